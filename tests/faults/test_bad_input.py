"""What a user can get wrong. What we refuse: exit code 2, one line that names the cause, no run folder.

Everything else ends in the traceback of a library. Nothing ends with exit code 0 and a wrong result.
"""

import re
import sys
from dataclasses import dataclass, replace

import pytest
import torch
import transformers
from conftest import ACTS, RL, ROOT
from run_tools import ALL, flags_of, one_line, reward_file, script_words, spy, start_process, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest_plugins = ["run_fixtures"]
SCRIPT = "ppo_sentiment"
MISSING = "/no/such/folder"
REVIEW = "A warm and clever film about a lighthouse keeper who learns to dance, told without a dull minute. "
DIALOG = ["Hello, who are you?", "I am Leo."]


@pytest.fixture(scope="module")
def broken(tiny_lm, tiny_classifier, tmp_path_factory):
    """A folder of data sets and models, each wrong in one way. The tables below call it DATA."""
    root = tmp_path_factory.mktemp("broken") / "DATA"

    # Data
    write_rows(root / "other-columns", train=[dict(review=REVIEW, stars=i) for i in range(8)])
    write_rows(root / "empty", train=[dict(text="", prompt="", label=i % 2) for i in range(8)])
    questions = [dict(question=f"{i} + 2?", answer=str(i + 2)) for i in range(8)]
    write_rows(root / "questions", train=questions)
    write_rows(root / "long", train=[dict(prompt="1 + 2?")] * 2, test=[dict(prompt="1" + " + 1" * 99)])
    write_rows(root / "pairs", train=[dict(prompt=REVIEW, chosen=" good", rejected=" bad")] * 8)
    write_rows(root / "no-completions", train=[dict(prompt=REVIEW, completion="")] * 8)
    write_rows(root / "empty-pairs", train=[dict(prompt=REVIEW, chosen="", rejected=" bad")] * 8)
    (root / "broken").mkdir()
    (root / "broken/train.jsonl").write_text('{"text": "a film"}\n{"text": \n')
    for act in (3, 5):
        write_rows(root / f"act-{act}", train=[dict(dialog=DIALOG, act=[1, act])] * 8)
    write_rows(root / "no-acts", train=[dict(dialog=DIALOG)] * 8)
    write_rows(root / "blank", train=[dict(dialog=["Hello.", " "], act=[1, 1])] * 8)
    good_row, bad_row = dict(dialog=DIALOG, act=[1, 1]), dict(dialog=DIALOG, act=[1, 9])
    write_rows(root / "held-out-acts", train=[good_row] * 8, test=[bad_row])
    labeled = [dict(text=REVIEW, label=i % 2) for i in range(8)]
    write_rows(root / "no-held-out-labels", train=labeled, test=[dict(text=REVIEW)])

    # Models
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm())
    sizes = dict(vocab_size=1024, dim=32, n_layers=1, n_heads=4)
    config = transformers.DistilBertConfig(**sizes, initializer_range=0.2)  # tokens matter to each other
    transformers.DistilBertModel(config).save_pretrained(root / "both-directions")
    model = AutoModelForCausalLM.from_pretrained(tiny_lm())
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(root / "no-eos")
    without_eos = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    without_eos.save_pretrained(root / "no-eos")
    (root / "lm").symlink_to(tiny_lm())
    (root / "classifier").symlink_to(tiny_classifier())

    function = "def reward(prompts, completions, **columns):\n    return [0.0] * len(prompts)\n"
    (root / "reward.py").write_text(function)
    (root / "other.py").write_text(function)
    return root


def with_paths(changes, broken):
    """The flags of a case, with the paths of this test."""

    def path(value):
        return value.replace("DATA/", f"{broken}/") if isinstance(value, str) else value

    return {flag: [*map(path, x)] if isinstance(x, list) else path(x) for flag, x in changes.items()}


# ---- Flags, data and models --------------------------------------------------------------------------------

REWARD, OTHER = "DATA/reward.py:reward", "DATA/other.py:reward"
REFUSED_BY_ALL = {  # name of the case -> the flags that are wrong, a word of the line
    "model": (dict(model_name_or_path=MISSING), f"{MISSING}: no such file or folder"),
    "data": (dict(dataset_name=MISSING), f"{MISSING}: no such file or folder"),
    "clipping": (dict(max_grad_norm=-1.0), "--max-grad-norm"),
    "warm-up": (dict(warmup_ratio=100.0), "--warmup-ratio"),
    "other columns": (dict(dataset_name="DATA/other-columns"), "column"),
    "empty texts": (dict(dataset_name="DATA/empty"), "row"),
}
REFUSED = {
    "ppo_sentiment": {
        "broken data": (dict(dataset_name="DATA/broken"), "DATA/broken/train.jsonl, line 2"),
        "short texts": (dict(min_text_length=10**6), "no row has a column text that is long enough"),
        "LoRA on the head": (dict(lora_r=4, lora_target_modules="c_attn,lm_head"), "cannot have an adapter"),
        "LoRA on embeddings": (dict(lora_r=4, lora_target_modules="c_attn,wte"), "cannot have an adapter"),
        "critic, not causal": (dict(value_model_path="DATA/both-directions"), "later tokens"),
        "label": (dict(reward_label="splendid"), "splendid"),
        "context, by one token": (
            dict(query_max_length=200, response_length=57),
            "fewer tokens than the 257",
        ),
        "query lengths": (dict(query_min_length=9, query_max_length=8), "--query-min-length"),
        "response lengths": (dict(response_min_length=9, response_length=8), "--response-min-length"),
        "KL horizon": (dict(kl_target=1.0, kl_horizon=1.6), "must be more than 1/5 of the batch, 8"),
        "reward functions, equal names": (dict(reward_fn=[REWARD, OTHER]), "another function reward"),
        "shared layers": (dict(num_shared_layers=99), "2 layers"),
        "negative number": (dict(cliprange=-0.2), "--cliprange cannot be -0.2"),
        "shared layers and LoRA": (dict(num_shared_layers=1, lora_r=4), "--num-shared-layers"),
        "shared layers and 8 bit": (dict(num_shared_layers=1, load_in_8bit=True), "--num-shared-layers"),
        "no EOS": (dict(model_name_or_path="DATA/no-eos"), "EOS"),
    },
    "ppo_dialog": {
        "context, by one token": (dict(max_prompt_length=251), "fewer tokens than the 257"),
        "KL horizon": (dict(kl_target=1.0, kl_horizon=1.6), "must be more than 1/5 of the batch, 8"),
        "two labels": (
            dict(reward_model_path="DATA/classifier", dataset_name="DATA/act-3"),
            "act 3, but the classifier knows 1 to 2",
        ),
        "no acts": (dict(dataset_name="DATA/no-acts"), "column act"),
        "held-out acts": (dict(dataset_name="DATA/held-out-acts"), "act 9, "),
        "blank": (dict(dataset_name="DATA/blank"), "DATA/blank"),
        "end, blank": (dict(utterance_end=" "), "--utterance-end"),
    },
    "rloo_tldr": {
        "no stop token": (dict(stop_token=None), "--missing-eos-penalty"),
        "one response": (dict(rloo_k=1), "--rloo-k"),
        "3 responses of 8": (dict(rloo_k=3), "--rloo-k"),
        "judge without a model": (dict(judge_url="http://here/v1"), "--judge-model"),
        "context": (dict(response_length=250), "fewer tokens than the"),
        "long prompts": (dict(max_prompt_length=3), "--max-prompt-length"),
    },
    "grpo_math": {
        "one response": (dict(num_generations=1), "--num-generations 1 must be 2 or more"),
        "3 responses of 8": (dict(num_generations=3), "--num-generations 3 must be 2 or more, and divide"),
        "context": (dict(response_length=250), "fewer tokens than the"),
        "long prompts": (dict(max_prompt_length=3), "--max-prompt-length"),
        "no prompt, no template": (dict(dataset_name="DATA/questions"), "--prompt-template"),
        "template, no such column": (
            dict(dataset_name="DATA/questions", prompt_template="{task}"),
            "columns: question, answer; --prompt-template: '{task}'",
        ),
        "harder data": (dict(hard_dataset_name=MISSING), f"{MISSING}: no such file or folder"),
        "harder data, long prompts": (dict(hard_dataset_name="DATA/long"), "--max-prompt-length"),
    },
    "grpo_tools": {
        "no tool": (dict(tools=None), "there is no tool"),
        "no reward": (dict(reward_fn=None), "there is no reward"),
        "3 trajectories of 8": (dict(num_generations=3), "--num-generations 3 must be 2 or more, and divide"),
        "context": (dict(response_length=500), "fewer tokens than the"),
        "long prompts": (dict(max_prompt_length=3), "--max-prompt-length"),
    },
    "sft": {
        "context": (dict(max_length=257), "context"),
        "empty texts": (dict(dataset_name="DATA/empty"), "examples without anything to learn"),
        "blank dialogs": (dict(dataset_name="DATA/blank"), "DATA/blank"),
    },
    "reward_model": {
        "context": (dict(max_length=257), "--max-length 257"),
        "held-out labels": (dict(dataset_name="DATA/no-held-out-labels"), "None is none of"),
        "one label": (dict(label_names="only"), "needs two labels or more"),
        "acts without names": (dict(dataset_name="DATA/act-3"), "--label-names is missing"),
        "center data, labels": (dict(center_dataset_name="DATA/pairs"), "only for preferences"),
        "acts": (dict(dataset_name="DATA/act-5", label_names=",".join(ACTS)), "4 is none of"),
        "shard": (dict(train_shard="2/2"), "--train-shard 2/2: the shards are 0/2 to 1/2"),
        "no pairs": (dict(dataset_name="DATA/empty-pairs"), "two different responses"),
        "center data, empty": (
            dict(dataset_name="DATA/pairs", center_dataset_name="DATA/no-completions"),
            "no row has a prompt and a completion",
        ),
    },
    "dpo_tldr": {
        "context, by one token": (dict(response_length=200), "fewer tokens than the"),
        "long texts": (dict(max_length=3), "of at most 3 tokens"),
        "no pairs": (dict(dataset_name="DATA/empty-pairs"), "two different responses"),
        "beta": (dict(beta=0.0), "--beta"),
        "half of the labels are wrong": (dict(label_smoothing=0.5), "--label-smoothing"),
        "8 bit without LoRA": (dict(load_in_8bit=True), "--lora-r"),
        "evaluation data": (dict(eval_dataset_name=MISSING), f"{MISSING}: no such file or folder"),
    },
}
TABLE = []
for name in ALL:
    for case, (changes, word) in (REFUSED_BY_ALL | REFUSED[name]).items():
        TABLE.append(pytest.param(name, changes, word, id=f"{name}: {case}"))


@pytest.mark.parametrize("name, changes, word", TABLE)
def test_what_we_refuse(scripts, small, broken, capsys, tmp_path, name, changes, word):
    """The line names the cause, and there is no run folder."""
    args = small(name, **with_paths(changes, broken))
    assert word in one_line(scripts[name], flags_of(args), capsys)
    assert not (tmp_path / "run").exists()


RL_SIZES = "per_device_train_batch_size gradient_accumulation_steps num_mini_batches num_ppo_epochs "
RL_SIZES += "total_episodes temperature response_length"
PPO_SIZES = f"{RL_SIZES} num_eval_prompts kl_target kl_horizon local_rollout_forward_batch_size"
STEPS = "per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_length num_eval_prompts"
SIZES = {
    "ppo_sentiment": f"{PPO_SIZES} query_min_length response_min_length",
    "ppo_dialog": f"{PPO_SIZES} num_context_utterances max_prompt_length",
    "rloo_tldr": f"{RL_SIZES} num_eval_prompts max_prompt_length local_rollout_forward_batch_size",
    "grpo_math": f"{RL_SIZES} num_eval_prompts num_eval_samples num_train_rows max_prompt_length",
    "grpo_tools": f"{RL_SIZES} num_eval_prompts num_eval_samples max_turns max_tool_tokens tool_timeout",
    "sft": f"{STEPS} num_train_rows",
    "reward_model": STEPS,
    "dpo_tldr": f"{STEPS} num_examples response_length temperature beta",
}


@pytest.mark.parametrize("name, size", [(name, size) for name in ALL for size in SIZES[name].split()])
def test_sizes_that_are_not_positive(scripts, small, tmp_path, name, size):
    """No run ends as if nothing were wrong."""
    values = [0, -1] if size in ("gradient_accumulation_steps", "num_mini_batches") else [0]
    for value in values:
        with pytest.raises(Exception):  # noqa: B017  ours, or that of a library
            scripts[name].train(replace(small(name), **{size: value}))
        assert not (tmp_path / "run/model").exists()


def test_a_flag_whose_default_is_negative(script, monkeypatch):
    """A reader may add one."""

    @dataclass
    class Args(script.Args):
        penalty: float = -1.0

    monkeypatch.setattr(script, "Args", Args)
    script.check_numbers(Args(penalty=-2.0))
    with pytest.raises(script.UserError, match="--vf-coef cannot be -2.0"):
        script.check_numbers(Args(penalty=-2.0, vf_coef=-2.0))


EARLY = [(name, flag) for name in (*RL, "grpo_tools") for flag in ("reward_fn", "dataset_name")]
EARLY += [("rloo_tldr", "judge_fn"), ("dpo_tldr", "judge_fn")]


@pytest.mark.parametrize("name, flag", EARLY)
def test_a_typo_shows_before_a_model_is_loaded(scripts, small, monkeypatch, name, flag):
    """In the file of a reward function, or in the name of the data."""
    loaded = spy(monkeypatch, scripts[name], "load_model")
    typo = {
        "reward_fn": [f"{MISSING}.py:reward"],
        "judge_fn": f"{MISSING}.py:reward",
        "dataset_name": MISSING,
    }
    with pytest.raises(Exception, match="such"):
        scripts[name].train(small(name, **{flag: typo[flag]}))
    assert not loaded


# ---- The command line --------------------------------------------------------------------------------------


def test_unknown_recipe(script, capsys):
    """The line names it, and the recipes that there are."""
    line = one_line(script, ["gpt5-imdb"], capsys)
    assert "gpt5-imdb" in line and all(name in line for name in script.RECIPES)


@pytest.mark.parametrize("words", [["--seeed", "1"], ["--seed", "one"]])
def test_a_flag_that_does_not_exist_or_has_a_wrong_value(script, capsys, words):
    """The same exit code, but a box of tyro instead of our line: it suggests flags."""
    with pytest.raises(SystemExit) as ending:
        script.main(["tiny", *words])
    assert ending.value.code == 2
    assert "--seed" in capsys.readouterr().err


def test_in_a_shell(small, tmp_path):
    """The same as a process: exit code 2 and nothing but one line."""
    args = small("ppo_sentiment", reward_label="splendid")
    process = start_process(script_words("ppo_sentiment", args), tmp_path)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    [line] = errors.splitlines()
    assert line.startswith("ppo_sentiment.py: --reward-label splendid")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ALL)
def test_out_of_memory(scripts, monkeypatch, name):
    """After the traceback comes a line that names the flags to halve."""

    def train(args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(scripts[name], "train", train)
    with pytest.raises(torch.OutOfMemoryError) as error:
        scripts[name].main([])
    assert "halve --per-device-train-batch-size" in error.value.__notes__[0]


@pytest.mark.parametrize("name", [*ALL, "ppo_minimal"])
def test_no_run_without_its_asserts(small, tmp_path, name):
    """PYTHONOPTIMIZE removes them, and with them the check that rollout and update agree."""
    words = [sys.executable, ROOT / "ppo_minimal.py", "--total-episodes", "128"]
    if name != "ppo_minimal":
        words = script_words(name, small(name))
    process = start_process(words, tmp_path, PYTHONOPTIMIZE="1")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == (1 if name == "ppo_minimal" else 2)
    assert "PYTHONOPTIMIZE remove checks" in errors.splitlines()[-1]
    assert not (tmp_path / "run").exists()


# ---- Run folders -------------------------------------------------------------------------------------------


def test_a_folder_that_holds_a_run(script, small, capsys, tmp_path):
    """A new run does not write into it, nor into one that holds a model, where an adapter may be left."""
    for name in ("metrics.jsonl", "model"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_text("{}")
        line = one_line(script, flags_of(small("ppo_sentiment", name)), capsys)
        assert str(folder) in line and "--resume" in line
        assert [path.name for path in folder.iterdir()] == [name] and (folder / name).read_text() == "{}"


# ---- Reward functions --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body, error",
    [
        ("return None", "'NoneType' object is not iterable"),
        ("return [1.0]", "function reward: 1 numbers for 4 responses"),
        ("return [float('inf')] * len(prompts)", "function reward: a number is not finite"),
        ("return (float('nan') for _ in prompts)", "function reward: a number is not finite"),
        ("return [1e39] * len(prompts)", "not finite: .*score"),  # too large for fp32
        ("raise KeyError('mine')", "mine"),
    ],
)
def test_wrong_rewards(script, small, tmp_path, body, error):
    """What a reward function returned must be finite numbers, one per response."""
    with pytest.raises(Exception, match=error):
        script.train(small("ppo_sentiment", reward_fn=reward_file(tmp_path, body)))
    assert not (tmp_path / "run/model").exists()


@pytest.mark.parametrize("name", [*RL, "grpo_tools"])
def test_the_reward_function_that_fails_is_named(scripts, small, tmp_path, name):
    """And so is what it was called with: often a column has another name than the parameter."""
    path = tmp_path / "two.py"
    path.write_text(
        "def fine(completions, **columns):\n    return [1.0] * len(completions)\n\n"
        "def wrong(completions, solution, **columns):\n    return [1.0] * len(completions)\n"
    )
    with pytest.raises(TypeError, match="solution") as failure:
        scripts[name].train(small(name, reward_fn=[f"{path}:fine", f"{path}:wrong"]))
    [note] = failure.value.__notes__
    columns = {
        "ppo_sentiment": "label, prompts, text",
        "ppo_dialog": "act, .*dialog, ",
        "grpo_math": "answer, ",
    }
    assert re.match(f"in the function wrong, called with .*{columns.get(name, 'prompts')}", note)


# ---- Chat --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, word",
    [
        ([], "RUN_FOLDER_OR_MODEL"),
        (["DATA/no-eos"], "EOS"),
        (["DATA/lm", "--utterance-end", ""], "utterance-end"),
        (["DATA/lm", "--response-length", "300"], "fewer tokens"),
        (["DATA/lm", "--temperature", "0"], "temperature"),
    ],
)
def test_chat_that_cannot_start(scripts, broken, capsys, monkeypatch, words, word):
    """No folder, or a wrong flag: one line, and no question."""
    monkeypatch.setattr("builtins.input", None)
    words = [text.replace("DATA", str(broken)) for text in words]
    assert re.search(word, one_line(scripts["ppo_dialog"], ["chat", *words], capsys))
