"""The command line: what is printed, and the exit code."""

import re
import subprocess
import sys

import pytest
from conftest import ROOT
from run_tools import flags_of, guesses, write_rows

import check

pytest_plugins = ["run_fixtures"]


def run(*words, **options):
    words = [sys.executable, str(ROOT / "check.py"), *map(str, words)]
    return subprocess.run(words, capture_output=True, text=True, **options)


def test_a_run_that_is_fine(tmp_path):
    """Exit code 0, from any folder; nothing is written there."""
    done = run(ROOT / "grpo_math.py", "tiny", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "= 256 responses per update = 32 prompts x 8" in " ".join(done.stdout.split())
    assert "0 errors" in done.stdout
    sections = [
        line.split()[0] for line in done.stdout.splitlines() if line.endswith("────") and line[0].isalpha()
    ]
    assert sections == ["batch", "data", "tokens", "rewards", "model", "findings"]
    assert "<answer>840</answer>" in done.stdout  # the reference of the first row, as the reward reads it
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_wrong(small, tmp_path):
    """Exit code 1, and every error on the screen."""
    rows = [dict(prompt=f"{i} + 1?", answer=str(i)) for i in range(9)]
    rows[4]["answer"] = None
    data = write_rows(tmp_path / "data", train=rows, test=rows[:2])
    args = small(
        "grpo_math", dataset_name=data, num_generations=3, reward_fn=[f"{ROOT}/data/math_rewards.py:correct"]
    )
    done = run(ROOT / "grpo_math.py", *flags_of(args))
    out = " ".join(done.stdout.split())
    assert done.returncode == 1
    assert (
        "2 errors" in out and "--num-generations 3 must be" in out and "cannot score train.jsonl row 5" in out
    )


@pytest.mark.parametrize("words", [("sft.py", "no-such-recipe"), ("ppo_minimal.py",), ("nowhere.py",)])
def test_what_cannot_be_checked(words):
    """One line on stderr."""
    done = run(ROOT / words[0], *words[1:])
    assert done.returncode != 0
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("check.py: "), done.stderr


def test_a_remark_does_not_replace_an_error(scripts):
    """Of two findings of one kind, one that is a part of the other is left out."""

    def two(x):
        yield check.remark("rows 1 and 2 are empty")
        yield check.error("rows 1 and 2 are empty")

    def three(x):
        yield check.error("row 3 is empty, so the run would stop")
        yield check.error("row 3 is empty, so the run would stop")
        yield check.error("row 3 is empty")
        yield check.remark("row 3 is empty, so the run would stop there")

    x = check.Inputs(scripts["sft"], scripts["sft"].Args())
    found = [(finding.kind, finding.text) for finding in check.find(x, [two, three, two])]
    assert found == [
        ("remark", "rows 1 and 2 are empty"),
        ("error", "rows 1 and 2 are empty"),
        ("error", "row 3 is empty, so the run would stop"),
        ("remark", "row 3 is empty, so the run would stop there"),
    ]


def test_help():
    done = run("--help")
    assert done.returncode == 0 and "python check.py rloo_tldr.py" in done.stdout


def test_a_renamed_copy(tmp_path):
    """It is known by its functions."""
    (tmp_path / "mine.py").write_text((ROOT / "sft.py").read_text())
    done = run(
        tmp_path / "mine.py",
        "--dataset-name",
        ROOT / "data/reviews",
        "--model-name-or-path",
        ROOT / "checkpoints/reviews-lm",
        "--max-length",
        64,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "learned" in done.stdout


def test_what_is_dropped_of_a_recipe(tmp_path):
    """The game's rewards are for its own data. What the command line gives is not dropped."""
    rows = [dict(prompt=f"{i} + 1?", answer=str(i + 1)) for i in range(9)]
    data = write_rows(tmp_path / "data", train=rows, test=rows[:2])
    correct = f"{ROOT}/data/math_rewards.py:correct"
    done = run(ROOT / "grpo_tools.py", "guess", "--dataset-name", data, "--reward-fn", correct)
    line = "not taken from the recipe, because --dataset-name is given: prompt_template, environment 64"
    assert line in " ".join(done.stdout.split()), done.stdout


def test_what_an_environment_says_first(scripts, small, tmp_path):
    """The end of the prompt, which is not in the data: is there a space, and how many tokens are there?"""
    flags = guesses(tmp_path)
    path = tmp_path / "guesses.py"
    path.write_text(path.read_text().replace("random.Random(secret), []", 'random, []\n        return "Go!"'))
    x = check.Inputs(scripts["grpo_tools"], small("grpo_tools", **flags))
    *_, title, tokens = check.show_tools(x)
    [said] = re.findall(r"the prompt with what reset says, (\d+) tokens", title)
    assert int(said) > len(next(iter(x.examples("train"))).ids)
    text = tokens.plain.replace("|", "")
    assert "Go!" in text and text.index("Go!") > text.index("Guess")


@pytest.mark.parametrize("words", [["guess"], ["guess", "--max-turns", "3"], ["--dataset-name=data/guess"]])
def test_what_is_taken_of_a_recipe(scripts, words, monkeypatch):
    """Its own data; and a recipe that is not named may have values, too."""
    monkeypatch.chdir(ROOT)
    x = check.Inputs(scripts["grpo_tools"], scripts["grpo_tools"].parse_args(words))
    # tiny has a calculator and its reward, too.
    expected = [] if "guess" in words else ["prompt_template", "reward_fn", "tools"]
    assert check.not_taken(x, words) == expected


@pytest.mark.parametrize(
    "number, text", [(213.4, "213"), (10432.0, "10,432"), (2.46, "2.5"), (0.031, "0.031")]
)
def test_numbers_without_exponents(number, text):
    assert check.plain(number) == text


def test_a_sample_is_called_one(scripts, small, tmp_path, monkeypatch):
    """Of many rows, some are tokenized."""
    monkeypatch.setattr(check, "MOST_ROWS", 30)
    rows = [dict(text=f"Number {i} is a film about a lighthouse.") for i in range(50)]
    data = write_rows(tmp_path / "data", train=rows, test=rows[:5])
    x = check.Inputs(
        scripts["sft"], scripts["sft"].Args(**vars(small("sft", dataset_name=data, num_train_rows=None)))
    )
    *_, table = check.show_data(x)
    train, held_out = table.columns[1]._cells
    assert train.endswith(" (a sample of 50 rows)") and held_out == "5"
