"""Whole runs of grpo_math.py on tiny models: groups, prompts, stop tokens, judges, published data."""

from dataclasses import replace

import pytest
import torch
import transformers
from accelerate import Accelerator
from conftest import ROOT
from run_tools import rows_of, spy, write_rows
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest_plugins = ["run_fixtures"]
SCRIPT = "grpo_math"
ONE_STEP = dict(num_mini_batches=1, num_ppo_epochs=1, per_device_train_batch_size=8)
NO_SAMPLES = dict(num_sample_generations=0)


@pytest.fixture
def rollouts(script, monkeypatch):
    """The calls of rollout_tasks, one per update."""
    return spy(monkeypatch, script, "rollout_tasks")


def tasks_of(inputs):
    """The tasks of a call of rollout_tasks."""
    return inputs[3]["examples"]


def chat(*turns):
    """A list of messages."""
    return [{"role": role, "content": content} for role, content in turns]


# ---- Steps -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2])
def test_the_gap_between_sampling_and_training_is_measured(grpo, script, monkeypatch, steps):
    """Mean and maximum of the differences of log-probabilities, over the tokens of the responses only."""
    sample_responses = script.sample_responses
    lengths = []

    def with_a_gap(*inputs):
        b, responses = sample_responses(*inputs)
        if len(responses) == 8 and not lengths:  # of the evaluation
            lengths.append(None)
        elif len(responses) == 8:
            b["sampling_logprobs"][1, 0] -= 3
            b["sampling_logprobs"][2] -= script.length_mask(b["lengths"], 6)[2].float()
            lengths.append(b["lengths"].tolist())
        return b, responses

    monkeypatch.setattr(script, "sample_responses", with_a_gap)
    flags = ONE_STEP | dict(num_ppo_epochs=steps)
    _, _, [row] = grpo(learning_rate=0.0, total_episodes=8, kl_coef=0.0, **NO_SAMPLES, **flags)
    lengths = lengths[1]
    assert row["sampling/logprob_gap_max"] == pytest.approx(3, abs=1e-3)
    assert row["sampling/logprob_gap_mean"] == pytest.approx((3 + lengths[2]) / sum(lengths), abs=1e-3)


# ---- The reference -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("minibatches, epochs", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_ratios_are_to_the_policy_that_sampled(grpo, minibatches, epochs):
    """After the first of several steps they are not 1, whether epochs or minibatches make several steps."""
    _, _, [row] = grpo(
        total_episodes=8,
        num_mini_batches=minibatches,
        num_ppo_epochs=epochs,
        per_device_train_batch_size=8 // minibatches,
        **NO_SAMPLES,
    )
    moved = row["policy/approxkl_avg"]
    assert (moved > 1e-4) if minibatches * epochs > 1 else (moved == 0)


def test_without_a_penalty_nobody_has_a_reference(grpo, script, monkeypatch):
    """--kl-coef 0: the model is read once, not once more for a reference, and no KL is logged."""
    loads = spy(monkeypatch, script, "load_model")
    _, _, rows = grpo(kl_coef=0.0)
    assert len(loads) == 1
    assert not any("kl" in name and name.startswith("objective") for name in rows[0])


# ---- Stop tokens -------------------------------------------------------------------------------------------


def test_every_stop_token_of_the_model_ends_a_response(grpo, rollouts, tiny_lm, tmp_path):
    """Those of generation_config and EOS. The reward does not see their text, but that of --stop-token-id."""
    grpo("first", learning_rate=0.0, total_episodes=8)
    sampled = rollouts[0][1][0]["ids"][:, -6:]
    stops = {sampled[0, 2].item(), sampled[3, 3].item()}
    model = AutoModelForCausalLM.from_pretrained(tiny_lm())
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm())
    model.generation_config.eos_token_id = sorted(stops)
    model.save_pretrained(tmp_path / "lm")
    tokenizer.save_pretrained(tmp_path / "lm")
    rollouts.clear()
    grpo("second", model_name_or_path=str(tmp_path / "lm"), learning_rate=0.0, total_episodes=8)
    b, responses = rollouts[0][1]
    ended_by = set()
    for i, tokens in enumerate(sampled.tolist()):
        ends = [t for t, token in enumerate(tokens) if token in stops | {tokenizer.eos_token_id}]
        length = ends[0] + 1 if ends else 6
        ended_by |= {tokens[length - 1]} if ends else set()
        assert b["lengths"][i] == length
        assert b["stopped"][i].item() is bool(ends)
        assert responses[i] == tokenizer.decode(tokens[: length - bool(ends)], skip_special_tokens=True)
    assert ended_by >= stops

    rollouts.clear()
    [stop, *_] = stops
    grpo("third", stop_token_id=stop, learning_rate=0.0, total_episodes=8)
    b, responses = rollouts[0][1]
    assert 0 < b["stopped"].sum() < 8
    for i, tokens in enumerate(sampled.tolist()):
        if stop in tokens:
            tokens = tokens[: tokens.index(stop) + 1]
        assert b["lengths"][i] == len(tokens)
        assert responses[i] == tokenizer.decode(tokens, skip_special_tokens=True)


# ---- Prompts -----------------------------------------------------------------------------------------------


def tiny_qwen(folder):
    """A random Qwen2 with a tokenizer of bytes, Qwen2.5's chat template and two stop tokens. -> its path"""
    alphabet = sorted(ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = transformers.Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate([*special, *alphabet])},
        merges=[],
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = (ROOT / "tests/data/templates/qwen2_5.jinja").read_text()
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        initializer_range=0.1,
    )
    model = transformers.Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def qwen(tmp_path_factory):
    """Folder of a tiny Qwen2 that was made for chats."""
    return tiny_qwen(tmp_path_factory.mktemp("qwen"))


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
    assert [task["prompt"] for task in tasks] == texts_of(tasks, tiny_lm())


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
    assert task["columns"] == rows[0]


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
    [plain] = load([dict(prompt=longer)], is_chat=True)
    assert plain["prompt"] == longer


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


def numbered(folder, train=12, test=12, **more):
    """Tasks whose prompts begin with Train or Exam and a number. -> the path of the data, a str"""
    rows = [dict(prompt=f"Train {i}:") for i in range(train)]
    return write_rows(folder, train=rows, test=[dict(prompt=f"Exam {i}:") for i in range(test)], **more)


def test_some_rows_are_trained_on(grpo, rollouts, tmp_path):
    """--num-train-rows draws training tasks at random, because a file may be sorted, and no held-out ones."""
    data = numbered(tmp_path / "data")
    _, folder, _ = grpo(
        dataset_name=data, num_train_rows=3, num_eval_prompts=9, total_episodes=24, **NO_SAMPLES
    )
    prompts = [task["prompt"] for inputs, _ in rollouts for task in tasks_of(inputs)]
    assert len(prompts) == 12
    assert len(set(prompts)) == 3 and max(int(prompt[6:-1]) for prompt in prompts) > 2
    held_out = [
        row["task"] for row in rows_of(folder, "evaluation_samples.jsonl") if row["set"] == "held-out"
    ]
    assert len(set(held_out)) == 9 and all(task.startswith("Exam") for task in held_out)
    rollouts.clear()
    grpo("more", dataset_name=data, num_train_rows=99, total_episodes=24, **NO_SAMPLES)
    prompts = {task["prompt"] for inputs, _ in rollouts for task in tasks_of(inputs)}
    assert prompts == {f"Train {i}:" for i in range(12)}


# ---- Recipes and published data ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, names",
    [
        (dict(), ["held-out", "harder"]),
        (dict(dataset_name="OTHER", hard_dataset_name="OTHER"), ["held-out", "harder"]),
        (dict(hard_dataset_name=None), ["held-out"]),
    ],
)
def test_harder_tasks(script, tmp_path, flags, names):
    """What is kept is counted."""
    other = numbered(tmp_path / "data", train=3, test=5)
    flags = {name: other if x == "OTHER" else x for name, x in flags.items()}
    args = replace(script.parse_args(["tiny"]), max_prompt_length=20, num_eval_prompts=4, **flags)
    tokenizer = script.load_tokenizer(args.model_name_or_path)
    train_tasks, held_out, counts = script.load_all_tasks(args, tokenizer)
    assert list(held_out) == names
    assert all(len(tasks) == 4 for tasks in held_out.values())
    if args.dataset_name == other:
        assert len(train_tasks) == 3
        assert counts == ", ".join(["3 of 3 training", "5 of 5 held-out", "5 of 5 harder"][: len(names) + 1])
    else:
        assert counts.startswith(f"{len(train_tasks)} of 4000 training, ")


GSM8K = {  # as openai/gsm8k has them
    "Natalia sold clips to 48 friends in April, and half as many in May. How many?": (
        "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n48+24 = <<48+24=72>>72 in all.\n#### 72"
    ),
    "Weng earns $12 an hour. How much for 50 minutes?": "12/60 = $<<12/60=0.2>>0.2 a minute.\n#### 10",
}
COUNTDOWN = [
    ([44, 19, 35], 98),
    ([3, 7, 2], 12),
]  # nums and target, as Jiayi-Pan/Countdown-Tasks-3to4 has them


def gsm8k_rows():
    return [dict(question=question, answer=answer) for question, answer in GSM8K.items()]


def countdown_rows():
    return [dict(nums=nums, target=target) for nums, target in COUNTDOWN]


PUBLISHED = {  # recipe -> rows, a right response to the first one and a wrong one of the same length, prompts
    "gsm8k-qwen-0.5b": (
        gsm8k_rows,
        (r"24 + 48. \boxed{72}", r"24 + 46. \boxed{70}"),
        [
            chat(("system", r"Think step by step, and put your final answer within \boxed{}."), ("user", x))
            for x in GSM8K
        ],
    ),
    "countdown-qwen-1.5b": (
        countdown_rows,
        ("<answer>44 + 19 + 35</answer>", "<answer>44 - 19 + 35</answer>"),
        None,
    ),
}


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_a_recipe_on_data_in_the_published_format(script, qwen, tmp_path, monkeypatch, recipe):
    """Local rows, a tiny Qwen2, and given responses: the first ones are right for one of two tasks."""
    make_rows, (right, wrong), prompts = PUBLISHED[recipe]
    rows = make_rows() * 6
    splits = dict(train=rows, test=rows) if recipe.startswith("gsm8k") else dict(train=rows * 2)
    tokenizer = AutoTokenizer.from_pretrained(qwen)
    forced = torch.tensor([[*tokenizer(text).input_ids, tokenizer.eos_token_id] for text in (right, wrong)])
    step = iter([])

    def next_tokens(probs, uniforms):
        """The next token of the right text in even rows, which are first responses; else of the wrong one."""
        nonlocal step
        t = next(step, None)
        if t is None:
            step = iter(range(1, forced.shape[1]))
            t = 0
        return forced[torch.arange(len(probs)) % 2, t]

    monkeypatch.setattr(script, "check_group_model", lambda *inputs: None)
    monkeypatch.setattr(script, "sample_tokens", next_tokens)
    rollouts = spy(monkeypatch, script, "rollout_tasks")
    args = replace(
        script.parse_args([recipe]),
        model_name_or_path=qwen,
        dataset_name=write_rows(tmp_path / "data", **splits),
        output_dir=str(tmp_path / "run"),
        dtype="float32",
        num_generations=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        total_episodes=8,
        response_length=40,
        num_eval_prompts=2,
        num_eval_samples=2,
        num_sample_generations=1,
    )
    _, folder = script.train(args)
    [row] = rows_of(folder)
    [(inputs, (b, responses))] = rollouts
    assert responses == [right, wrong] * 4
    first = [task["columns"] == rows[0] for task in tasks_of(inputs)]
    assert b["scores"].tolist() == [score for x in first for score in (float(x), 0.0)]
    assert row["objective/scores"] == sum(first) / 8
    assert row["completions/clipped_ratio"] == 0
    for task in tasks_of(inputs):
        messages = task["prompt"]
        assert [message["role"] for message in messages] == ["system", "user"]
        if prompts is None:
            nums, target = task["columns"]["nums"], task["columns"]["target"]
            question = f"Using the numbers {nums}, create an equation that equals {target}. You can"
            assert messages[1]["content"].startswith(question)
            assert "<answer> (1 + 2) / 3 </answer>" in messages[1]["content"]
        else:
            assert messages in prompts
    for line in rows_of(folder, "evaluation_samples.jsonl"):
        if line["set"] == "held-out":
            is_first = "Natalia" in line["task"] or "[44, 19, 35]" in line["task"]
            assert line["before"]["right"] == line["after"]["right"] == [is_first, False]


def test_the_first_function_that_applies_says_what_is_right(script):
    """Tasks of two kinds, each with a reward function that returns None for the other kind."""
    nan = float("nan")
    scores = {
        "rewards/a": torch.tensor([1.0, 0.5, nan, nan]),
        "rewards/b": torch.tensor([0.0, 1.0, 1.0, nan]),
    }
    b = scores | {"stopped": torch.ones(4).bool(), "lengths": torch.ones(4).long()}
    args = script.Args(num_eval_samples=2, response_length=3)
    tasks = [dict(ids=[5], prompt="a"), dict(ids=[6, 7], prompt="b")]
    records = script.evaluate_tasks(lambda share, args: (b, list("wxyz")), tasks, args, Accelerator(cpu=True))
    assert [record["right"] for record in records] == [[True, False], [True, False]]
