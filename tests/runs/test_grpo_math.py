"""Whole runs of grpo_math.py on tiny models: steps, stop tokens, prompts, published data."""

import re
import shutil
import sys
import types
from dataclasses import replace

import pytest
import torch
from conftest import ROOT
from diff_blocks import apply_block, blocks
from run_tools import eos_prone, evaluation_of, reward_file, rows_of, spy, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest_plugins = ["run_fixtures"]
SCRIPT = "grpo_math"


def chat(*turns):
    """A list of messages."""
    return [{"role": role, "content": content} for role, content in turns]


# ---- Steps and the reference -------------------------------------------------------------------------------


@pytest.mark.parametrize("minibatches, epochs", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_ratios_are_to_the_policy_that_sampled(grpo, minibatches, epochs):
    """After the first of several steps they are not 1, whether epochs or minibatches make several steps."""
    _, _, [row] = grpo(
        total_episodes=8,
        num_mini_batches=minibatches,
        num_ppo_epochs=epochs,
        per_device_train_batch_size=8 // minibatches,
    )
    moved = row["policy/approxkl_avg"]
    assert (moved > 1e-4) if minibatches * epochs > 1 else (moved == 0)


def test_metrics_of_tokens_that_are_left_out(grpo, script, monkeypatch, tiny_lm, tmp_path):
    """If `valid` leaves out the second token of each response, so do entropy, KL and the largest gap."""
    length_mask, sample_responses = script.length_mask, script.sample_responses

    def without_the_second(lengths, width):
        mask = length_mask(lengths, width)
        if sys._getframe(1).f_code.co_name == "train":
            mask[:, 1] = False
        return mask

    def sample_otherwise(*inputs):
        b, responses = sample_responses(*inputs)
        b["sampling_logprobs"][:, 1] -= 1
        return b, responses

    monkeypatch.setattr(script, "length_mask", without_the_second)
    monkeypatch.setattr(script, "sample_responses", sample_otherwise)
    rollouts = spy(monkeypatch, script, "rollout")
    lm = eos_prone(tiny_lm, tmp_path / "lm")
    _, _, [_, row] = grpo(model_name_or_path=lm, total_episodes=16)
    b, _ = rollouts[1][1]  # of the second update, so that the KL is not 0
    kept = length_mask(b["lengths"], 6)
    kept[:, 1] = False
    logprobs = b["logprobs"][kept]
    assert row["objective/entropy"] == pytest.approx(-logprobs.sum().item() / 8, rel=1e-5)
    kl = (logprobs - b["ref_logprobs"][kept]).sum().item() / 8
    assert row["objective/kl"] == pytest.approx(kl, rel=1e-3)
    assert row["sampling/logprob_gap_max"] < 1e-4
    assert b["lengths"].min() < b["lengths"].max()


def test_the_table_says_who_decides_what_is_right(grpo, capsys, tmp_path, world):
    """The first function that applies, whichever it is: here, one that is not about the answer."""
    [first] = reward_file(tmp_path, "return [1.0 for _ in completions]")
    _, folder, _ = grpo(reward_fn=[first, world.verifier], total_episodes=8)
    evaluation = evaluation_of(folder)
    assert evaluation["judge"] == f"{first} or, if it does not apply, {world.verifier}"
    assert evaluation["after"]["held-out: pass@1"] == 1
    shown = "".join(capsys.readouterr().out.split())  # a narrow table breaks its title
    assert "".join(f"4 held-out tasks; right: 1 or more by {evaluation['judge']}".split()) in shown


def test_without_a_penalty_nobody_has_a_reference(grpo, script, monkeypatch):
    """--kl-coef 0: the model is read once, not once more for a reference, and no KL is logged."""
    loads = spy(monkeypatch, script, "load_model")
    _, _, rows = grpo(kl_coef=0.0)
    assert len(loads) == 1
    assert not any("kl" in name and name.startswith("objective") for name in rows[0])


def test_every_stop_token_of_the_model_ends_a_response(grpo, script, monkeypatch, tiny_lm, tmp_path):
    """Those of generation_config and EOS. The reward does not see their text."""
    rollouts = spy(monkeypatch, script, "rollout")
    grpo("first", learning_rate=0.0, total_episodes=8)
    sampled = rollouts.pop()[1][0]["ids"][:, -6:]
    stops = {sampled[0, 2].item(), sampled[3, 3].item()}
    model = AutoModelForCausalLM.from_pretrained(tiny_lm())
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm())
    model.generation_config.eos_token_id = sorted(stops)
    model.save_pretrained(tmp_path / "lm")
    tokenizer.save_pretrained(tmp_path / "lm")
    grpo("second", model_name_or_path=str(tmp_path / "lm"), learning_rate=0.0, total_episodes=8)
    [(_, (b, responses))] = rollouts
    ended_by = set()
    for i, tokens in enumerate(sampled.tolist()):
        ends = [t for t, token in enumerate(tokens) if token in stops | {tokenizer.eos_token_id}]
        length = ends[0] + 1 if ends else 6
        ended_by |= {tokens[length - 1]} if ends else set()
        assert b["lengths"][i] == length
        assert b["stopped"][i].item() is bool(ends)
        assert responses[i] == tokenizer.decode(tokens[: length - bool(ends)], skip_special_tokens=True)
    assert ended_by >= stops


# ---- Prompts -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def qwen(tiny_lm, tmp_path_factory):
    """Folder of a tiny Qwen2 with the chat template of Qwen2.5."""
    folder = shutil.copytree(tiny_lm("qwen2"), tmp_path_factory.mktemp("qwen") / "lm")
    shutil.copy(ROOT / "tests/data/templates/qwen2_5.jinja", folder / "chat_template.jinja")
    return str(folder)


@pytest.fixture
def load(script, qwen, tiny_lm):
    """load(rows, is_chat, **flags) -> the tasks of these rows, with a tokenizer for chats or without."""

    def run(rows, is_chat=False, **flags):
        tokenizer = script.load_tokenizer(qwen if is_chat else tiny_lm())
        flags = dict(prompt_template=None, system_prompt=None) | flags
        return script.load_tasks(rows, tokenizer, script.Args(**flags))

    return run


def texts_of(tasks, folder):
    """What the model reads."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer.decode(task["ids"]) for task in tasks]


def test_prompts_that_are_texts(load, tiny_lm):
    """The column prompt is what the model reads, after the system prompt. Other columns go to the rewards."""
    rows = [dict(prompt="1 + 2 =", answer="3"), dict(prompt=" 4 + 5 = ", answer="9")]
    tasks = load(rows, prompt_template="{answer}")  # the template is for data without the column
    assert [task["prompt"] for task in tasks] == texts_of(tasks, tiny_lm()) == ["1 + 2 =", " 4 + 5 = "]
    assert [task["columns"] for task in tasks] == rows
    tasks = load(rows, system_prompt="Be brief.")
    assert texts_of(tasks, tiny_lm()) == ["Be brief.\n\n1 + 2 =", "Be brief.\n\n 4 + 5 = "]


def test_prompts_of_a_template(load, tiny_lm, qwen):
    """A text, or a user's message if the tokenizer has a chat template."""
    rows = [dict(a=3, b=[4, 5], answer="12")]
    flags = dict(prompt_template="Add {a} to {b}.")
    [task] = load(rows, **flags)
    assert [task["prompt"]] == texts_of([task], tiny_lm()) == ["Add 3 to [4, 5]."]
    assert task["columns"] == rows[0]
    [task] = load(rows, is_chat=True, system_prompt="Be brief.", **flags)
    assert task["prompt"] == chat(("system", "Be brief."), ("user", "Add 3 to [4, 5]."))
    [text] = texts_of([task], qwen)
    turns = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nAdd 3 to [4, 5].<|im_end|>\n"
    assert text == turns + "<|im_start|>assistant\n"


def test_a_run_without_the_chat_template(small, qwen, tmp_path):
    """A line to change: the prompt is the text of --prompt-template, and the saved model has no template."""
    block = blocks((ROOT / "docs/grpo_math.md").read_text())["No chat template"]
    module = types.ModuleType("grpo_math")
    module.__file__ = str(ROOT / "grpo_math.py")
    exec(compile(apply_block((ROOT / "grpo_math.py").read_text(), block), "variant", "exec"), module.__dict__)
    rows = [dict(question=f"{i} + 1?", answer=str(i + 1)) for i in range(16)]
    data = write_rows(tmp_path / "data", train=rows, test=rows)
    flags = dict(model_name_or_path=qwen, prompt_template="Q: {question} A:", system_prompt=None)
    _, folder = module.train(small("grpo_math", dataset_name=data, num_sample_generations=1, **flags))
    [prompt, *_] = {row["prompt"] for row in rows_of(folder, "samples.jsonl")}
    assert re.fullmatch(r"Q: \d+ \+ 1\? A:", prompt)
    assert AutoTokenizer.from_pretrained(folder / "model").chat_template is None


def test_prompts_that_are_chats(load, qwen):
    """Lists of messages, with a system message of their own or that of the flag."""
    own = chat(("system", "Think."), ("user", "1 + 1?"))
    longer = chat(("user", "1 + 1?"), ("assistant", "2"), ("user", "And 2 + 2?"))
    first, second = load([dict(prompt=own), dict(prompt=longer)], is_chat=True, system_prompt="Be brief.")
    assert first["prompt"] == own
    assert second["prompt"] == chat(("system", "Be brief."), *[(x["role"], x["content"]) for x in longer])
    texts = texts_of([first, second], qwen)
    assert "Think." in texts[0] and "Be brief." not in texts[0]
    assert texts[1].count("<|im_start|>") == 5 and texts[1].endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_long_tasks_are_skipped(load):
    """The limit counts the tokens of the whole prompt, with the system prompt."""
    rows = [dict(prompt="1" + " + 1" * i) for i in range(6)]
    lengths = [len(task["ids"]) for task in load(rows)]
    assert lengths == sorted(set(lengths))
    assert len(load(rows, max_prompt_length=lengths[3] - 1)) == 3
    assert [len(task["ids"]) for task in load(rows, max_prompt_length=lengths[3])] == lengths[:4]
    with_system = load(rows, max_prompt_length=lengths[3], system_prompt="Be.")
    assert 0 < len(with_system) < 4


def test_a_row_with_an_empty_part_of_its_prompt_is_skipped(load):
    """The template would write None, or nothing. 0 is not empty, and other columns do not matter."""
    rows = [dict(a=1, b=2), dict(a=None, b=2), dict(a=1, b=""), dict(a=1), dict(a=0, b=[4]), dict(a=1, b=[])]
    rows = [row | dict(number=i, answer=None) for i, row in enumerate(rows)]
    tasks = load(rows, prompt_template="Add {a} to {b}.")
    assert [task["prompt"] for task in tasks] == ["Add 1 to 2.", "Add 0 to [4]."]
    assert [task["columns"]["number"] for task in tasks] == [0, 4]


def test_which_rows_are_used(script, tiny_lm, tmp_path, capsys):
    """Training tasks are drawn at random, because a file may be sorted. What is kept is counted."""
    train, test = ([dict(prompt=f"{i}") for i in numbers] for numbers in (range(12), range(12, 17)))
    args = script.Args(
        dataset_name=write_rows(tmp_path / "data", train=train, test=test),
        system_prompt=None,
        num_train_rows=3,
        num_eval_prompts=4,
    )
    tasks, held_out = script.load_prompts(args, script.load_tokenizer(tiny_lm()))
    numbers = {int(task["prompt"]) for task in tasks}
    assert len(numbers) == len(tasks) == 3 and 3 <= max(numbers) < 12
    [held_out] = held_out.values()
    assert len({int(task["prompt"]) for task in held_out} & {*range(12, 17)}) == len(held_out) == 4
    screen = capsys.readouterr().out
    for count in (3, 5):
        assert f"{count} of {count} rows have a prompt" in screen


# ---- Recipes and published data ----------------------------------------------------------------------------

GSM8K = [  # as openai/gsm8k has them
    dict(
        question="Natalia sold clips to 48 friends in April, and half as many in May. How many?",
        answer="Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n48+24 = <<48+24=72>>72 in all.\n#### 72",
    ),
    dict(
        question="Weng earns $12 an hour. How much for 50 minutes?",
        answer="12/60 = $<<12/60=0.2>>0.2 a minute.\n#### 10",
    ),
]
# As Jiayi-Pan/Countdown-Tasks-3to4 has them:
COUNTDOWN = [dict(nums=[44, 19, 35], target=98), dict(nums=[3, 7, 2], target=12)]
PUBLISHED = {  # recipe -> rows, a right and a wrong response to the first one
    "gsm8k-qwen-0.5b": (GSM8K, r"24 + 48. \boxed{72}", r"24 + 46. \boxed{70}"),
    "countdown-qwen-1.5b": (COUNTDOWN, "<answer>44 + 19 + 35</answer>", "<answer>44 - 19 + 35</answer>"),
}


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_a_recipe_on_data_in_the_published_format(script, qwen, tmp_path, recipe):
    """Its prompts, and its reward function: what is right for the first row is wrong for the other one."""
    rows, right, wrong = PUBLISHED[recipe]
    data = write_rows(tmp_path / "data", train=rows, test=rows)
    args = replace(script.parse_args([recipe]), dataset_name=data)
    tasks, _ = script.load_prompts(args, script.load_tokenizer(qwen))
    for task in tasks:
        [system, user], columns = task["prompt"], task["columns"]
        if rows is GSM8K:
            assert system["content"] == r"Think step by step, and put your final answer within \boxed{}."
            assert user["content"] == columns["question"]
        else:
            numbers = (
                f"Using the numbers {columns['nums']}, create an equation that equals {columns['target']}."
            )
            assert user["content"].startswith(numbers)
            assert "<answer> (1 + 2) / 3 </answer>" in user["content"]

    first, other = (next(task for task in tasks if task["columns"] == row) for row in rows)
    functions, cpu = script.load_functions(args.reward_fn), torch.device("cpu")
    responses = [right, wrong, right]
    scores = script.score_responses(functions, None, cpu, [first, first, other], responses, [[1]] * 3)
    assert next(iter(scores.values())).tolist() == [1, 0, 0]
