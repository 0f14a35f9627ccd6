"""What a user can get wrong. What we refuse: exit code 2, one line that names the cause, no run folder.

Everything else ends in the traceback of a library. Nothing ends with exit code 0 and a wrong result.
"""

import sys
from dataclasses import dataclass

import pytest
from conftest import ACTS, RL, ROOT
from run_tools import ALL, flags_of, one_line, reward_file, script_words, spy, start_process, write_rows

import chat
import check

pytest_plugins = ["run_fixtures"]
SCRIPT = "ppo_sentiment"
MISSING = "/no/such/folder"
REVIEW = "A warm and clever film about a lighthouse keeper who learns to dance, told without a dull minute. "
DIALOG = ["Hello, who are you?", "I am Leo."]


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """A folder of data sets, each wrong in one way. The table below calls it DATA."""
    root = tmp_path_factory.mktemp("broken") / "DATA"
    write_rows(root / "other-columns", train=[dict(review=REVIEW, stars=i) for i in range(8)])
    write_rows(root / "empty", train=[dict(text="", prompt="", label=i % 2) for i in range(8)])
    questions = [dict(question=f"{i} + 2?", answer=str(i + 2)) for i in range(8)]
    write_rows(root / "questions", train=questions)
    write_rows(root / "empty-pairs", train=[dict(prompt=REVIEW, chosen="", rejected=" bad")] * 8)
    write_rows(root / "act-5", train=[dict(dialog=DIALOG, act=[1, 5])] * 8)
    write_rows(root / "no-acts", train=[dict(dialog=DIALOG)] * 8)
    write_rows(root / "blank", train=[dict(dialog=["Hello.", " "], act=[1, 1])] * 8)
    labeled = [dict(text=REVIEW, label=i % 2) for i in range(8)]
    write_rows(root / "no-held-out-labels", train=labeled, test=[dict(text=REVIEW)])
    return root


# ---- Flags, data and models --------------------------------------------------------------------------------

REFUSED_BY_ALL = {  # name of the case -> the flags that are wrong, a word of the line
    "model": (dict(model_name_or_path=MISSING), f"--model-name-or-path {MISSING}: no such file or folder"),
    "data": (dict(dataset_name=MISSING), f"--dataset-name {MISSING}: no such file or folder"),
    "other columns": (dict(dataset_name="DATA/other-columns"), "olumn"),
    "empty texts": (dict(dataset_name="DATA/empty"), "row"),
}
LONG_PROMPTS = (dict(max_prompt_length=3), "more than --max-prompt-length 3 tokens")
REFUSED = {
    "ppo_sentiment": {
        "short texts": (dict(min_text_length=10**6), "not more than --min-text-length 1000000 characters"),
        "shared layers and 8 bit": (dict(num_shared_layers=1, load_in_8bit=True), "--num-shared-layers"),
    },
    "ppo_dialog": {
        "no acts": (dict(dataset_name="DATA/no-acts"), "no act for each utterance"),
        "blank": (dict(dataset_name="DATA/blank"), "blank: no training row can be used"),
    },
    "rloo_tldr": {"long prompts": LONG_PROMPTS},
    "grpo_math": {
        "long prompts": LONG_PROMPTS,
        "no prompt, no template": (dict(dataset_name="DATA/questions"), "--prompt-template: None"),
        "template, no such column": (
            dict(dataset_name="DATA/questions", prompt_template="{task}"),
            "Columns: question, answer; --prompt-template: '{task}'",
        ),
        "harder data": (dict(hard_dataset_name=MISSING), f"{MISSING}: no such file or folder"),
    },
    "grpo_tools": {"long prompts": LONG_PROMPTS},
    "sft": {"blank dialogs": (dict(dataset_name="DATA/blank"), "blank: no training row can be used")},
    "reward_model": {
        "held-out labels": (dict(dataset_name="DATA/no-held-out-labels"), "label None is none of"),
        "acts": (dict(dataset_name="DATA/act-5", label_names=",".join(ACTS)), "act 5"),
        "no pairs": (dict(dataset_name="DATA/empty-pairs"), "fewer than two responses"),
    },
    "dpo_tldr": {
        "long texts": (dict(max_length=3), "more than --max-length 3 tokens"),
        "no pairs": (dict(dataset_name="DATA/empty-pairs"), "fewer than two responses"),
        "evaluation data": (dict(eval_dataset_name=MISSING), f"{MISSING}: no such file or folder"),
    },
}
TABLE = []
for name in ALL:
    for case, (changes, word) in (REFUSED_BY_ALL | REFUSED[name]).items():
        TABLE.append(pytest.param(name, changes, word, id=f"{name}: {case}"))


def refusal(module, argv, capsys):
    """Call main(), which must end with exit code 2 and lines of ours on stderr. -> these lines, a str"""
    with pytest.raises(SystemExit) as end:
        module.main(argv)
    text = capsys.readouterr().err
    assert end.value.code == 2 and text.startswith(f"{module.__name__}.py: "), text
    return text


@pytest.mark.parametrize("name, changes, word", TABLE)
def test_what_we_refuse(scripts, small, broken, capsys, tmp_path, name, changes, word):
    """A line names the cause, and there is no run folder."""
    words = [text.replace("DATA/", f"{broken}/") for text in flags_of(small(name, **changes))]
    assert word in refusal(scripts[name], words, capsys)
    assert not (tmp_path / "run").exists()


RL_SIZES = "per_device_train_batch_size gradient_accumulation_steps num_mini_batches num_ppo_epochs "
RL_SIZES += "total_episodes temperature response_length"
TOOL_SIZES = "tool_workers tool_timeout"
PPO_SIZES = f"{RL_SIZES} num_eval_prompts kl_target kl_horizon local_rollout_forward_batch_size"
STEPS = "per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_length num_eval_prompts"
SIZES = {
    "ppo_sentiment": f"{PPO_SIZES} query_min_length response_min_length",
    "ppo_dialog": f"{PPO_SIZES} num_context_utterances max_prompt_length",
    "rloo_tldr": f"{RL_SIZES} num_eval_prompts max_prompt_length local_rollout_forward_batch_size",
    "grpo_math": f"{RL_SIZES} num_eval_prompts num_eval_samples num_train_rows max_prompt_length",
    "grpo_tools": f"{RL_SIZES} num_eval_prompts num_eval_samples max_turns max_tool_tokens {TOOL_SIZES}",
    "sft": f"{STEPS} num_train_rows",
    "reward_model": STEPS,
    "dpo_tldr": f"{STEPS} num_eval_pairs response_length temperature beta",
}


@pytest.mark.parametrize("name", ALL)
def test_sizes_that_are_not_positive(scripts, small, name):
    """A run would end as if nothing were wrong."""
    for size in SIZES[name].split():
        for value in (0, -1):
            args = small(name, **{size: value})
            [found] = check.check_numbers(check.Inputs(scripts[name], args))
            assert found == check.error(f"--{size.replace('_', '-')} cannot be {value}")


def test_a_flag_whose_default_is_negative(script, monkeypatch):
    """A reader may add one."""

    @dataclass
    class Args(script.Args):
        penalty: float = -1.0

    monkeypatch.setattr(script, "Args", Args)
    assert not [*check.check_numbers(check.Inputs(script, Args(penalty=-2.0)))]
    [found] = check.check_numbers(check.Inputs(script, Args(penalty=-2.0, vf_coef=-2.0)))
    assert found.text == "--vf-coef cannot be -2.0"


EARLY = [(name, flag) for name in (*RL, "grpo_tools") for flag in ("reward_fn", "dataset_name")]
EARLY += [("rloo_tldr", "judge_fn"), ("dpo_tldr", "judge_fn")]


@pytest.mark.parametrize("name, flag", EARLY)
def test_a_typo_shows_before_a_model_is_loaded(scripts, small, monkeypatch, capsys, name, flag):
    """In the file of a reward function, or in the name of the data."""
    loaded = spy(monkeypatch, scripts[name], "load_model")
    typo = {
        "reward_fn": [f"{MISSING}.py:reward"],
        "judge_fn": f"{MISSING}.py:reward",
        "dataset_name": MISSING,
    }
    line = one_line(scripts[name], flags_of(small(name, **{flag: typo[flag]})), capsys)
    assert f"--{flag.replace('_', '-')} {MISSING}" in line and "no such file or folder" in line
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


def test_no_run_without_its_asserts(tmp_path):
    """PYTHONOPTIMIZE removes them. ppo_minimal.py says so itself; check.py says it of the others."""
    words = [sys.executable, ROOT / "ppo_minimal.py", "--total-episodes", "128"]
    process = start_process(words, tmp_path, PYTHONOPTIMIZE="1")
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "PYTHONOPTIMIZE remove checks" in errors.splitlines()[-1]


# ---- Run folders -------------------------------------------------------------------------------------------


def test_a_folder_that_holds_a_run(script, small, capsys, tmp_path):
    """A new run does not write into it, nor into one that holds a model, where an adapter may be left."""
    for name in ("checkpoints", "model"):
        folder = tmp_path / f"with {name}"
        folder.mkdir()
        (folder / name).write_text("{}")
        line = one_line(script, flags_of(small("ppo_sentiment", folder.name)), capsys)
        assert str(folder) in line and "--resume" in line
        assert [path.name for path in folder.iterdir()] == [name] and (folder / name).read_text() == "{}"


# ---- Reward functions --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body, error",
    [
        ("return None", "'NoneType' object is not iterable"),
        ("return [1.0]", "function reward must return a finite number, or None, per response"),
        ("return [float('inf')] * len(prompts)", "function reward must return a finite number.*: inf"),
        ("return (float('nan') for _ in prompts)", "function reward must return a finite number.*: nan"),
        ("return [1e39] * len(prompts)", "not finite: .*score"),  # too large for fp32
        ("raise KeyError('mine')", "mine"),
    ],
)
def test_wrong_rewards(script, small, tmp_path, body, error):
    """What a reward function returned must be finite numbers, one per response."""
    with pytest.raises(Exception, match=error):
        script.train(small("ppo_sentiment", reward_fn=reward_file(tmp_path, body)))
    assert not (tmp_path / "run/model").exists()


# ---- Chat --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [[], ["--temperature", "0.5"]])
def test_chat_without_a_model(capsys, monkeypatch, words):
    """One line, and no question."""
    monkeypatch.setattr("builtins.input", None)
    assert "python chat.py RUN_FOLDER_OR_MODEL" in one_line(chat, words, capsys)
