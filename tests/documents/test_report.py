"""report.py: what it finds in committed runs and in runs written by hand, and its page."""

import json
import math
import re
import shutil
import sys

import numpy as np
import pytest
from conftest import ROOT
from run_tools import rows_of

sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
from archive import pack, read, run_folder  # noqa: E402

import report  # noqa: E402

pytest_plugins = ["run_fixtures"]


def titles(folder):
    """What report.py finds in a run folder: a path, or one below results/."""
    run = report.read_run(run_folder(ROOT / "results" / folder))
    return [finding.title for finding in report.find_problems(run)]


# ---- Findings in committed runs ----------------------------------------------------------------------------


def test_an_exploited_reward_is_found():
    """One word is in most of the responses, and the KL is far above its target."""
    assert titles("ppo-sentiment-hacked") == [
        "Flags differ from those of healthy runs",
        "The responses become alike",
        "The KL is above its target",
    ]


def test_the_table_of_checks_and_faults():
    """results/diagnose/checks.json, without the slow column, and the numbers of the docs."""
    import diagnose

    table = json.loads((ROOT / "results/diagnose/checks.json").read_text())
    patterns = json.loads((ROOT / "results/diagnose/naming.json").read_text())
    runs = {name: report.read_run(diagnose.folder_of(name)) for name in patterns}
    named = diagnose.named_faults(report, runs, patterns)
    assert table["not named"] == sorted(runs.keys() - named)
    assert sum(name.startswith("unseen") for name in runs) == 80
    healthy = diagnose.healthy_runs(report)
    assert table["healthy runs"] == len(healthy) and table["false alarms"] == []
    assert not any(report.find_problems(run) for run in healthy.values())
    assert list(table["checks"]) == [check.__name__.removeprefix("check_") for check in report.CHECKS]


def test_the_numbers_of_the_docs():
    """What two judges said of the second edition, and what the table counts."""
    rows = report.read_lines(ROOT / "results/diagnose", "verdicts.jsonl")
    right = sum(row["verdicts"] == ["right", "right"] for row in rows)
    text = " ".join((ROOT / "docs/debugging.md").read_text().split())
    assert f"the true cause of {right} of {len(rows)} faults ({100 * right / len(rows):.0f} %)" in text
    table = report.read_json(ROOT / "results/diagnose/checks.json")
    named = sum(int(counts.split()[0]) for name, counts in table["named"].items() if "unseen" in name)
    assert f"Today's {len(table['checks'])} checks name {named} of 80" in text
    alone = table["unseen faults named without the bands of healthy runs"]
    assert f"as with your own model and data, they name {alone}" in text
    assert f"no false alarm in {table['healthy runs']} healthy runs" in text


def test_a_run_in_one_file_is_its_folder(tmp_path):
    """What benchmarks/archive.py packs and unpacks. A folder of the same name is not the run."""
    texts = {"metrics.jsonl": '{"update": 1, "objective/scores": 0.5}\n', "samples.jsonl": "naïve\n"}
    pack(tmp_path / "group/lr-1e-5-beta-0.1.zip", texts)
    (tmp_path / "group/lr-1e-5-beta-0.1").mkdir()
    for path in (tmp_path / "group/lr-1e-5-beta-0.1", tmp_path / "group/lr-1e-5-beta-0.1.zip"):
        assert {name: read(path, name) for name in texts} == texts
        run = report.read_run(run_folder(path))
        assert run.name == "group/lr-1e-5-beta-0.1" and run.metrics[0]["objective/scores"] == 0.5


# ---- Runs written by hand ----------------------------------------------------------------------------------


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_run(folder, args=(), script="ppo_sentiment", **columns):
    """A run folder. columns: metric -> function of the fraction of the run that is over. -> its path"""
    folder.mkdir()
    defaults = {"objective/scores": lambda x: x, "env/reward_std": lambda x: 1.0}
    columns = defaults | {name.replace("__", "/"): function for name, function in columns.items()}
    rows = []
    for update in range(1, 101):
        rows.append({"update": update} | {name: f((update - 1) / 99) for name, f in columns.items()})
    write_lines(folder / "metrics.jsonl", rows)
    about = {"args": {"recipe": "none", "dtype": "float32"} | dict(args), "command": [f"{script}.py"]}
    (folder / "args.json").write_text(json.dumps(about))
    return folder


def noise(size):
    """The same random numbers in each test, one per update."""
    values = np.random.default_rng(0).normal(0, size, 100)
    return lambda x: values[round(99 * x)].item()


CASES = {  # a change of a healthy run -> title of what is found, or None
    "healthy": ({}, {}, None),
    "sampler": ({"sampling__logprob_gap_mean": lambda x: 0.02}, {}, "Rollout and update compute"),
    "sampler in bf16": ({"sampling__logprob_gap_mean": lambda x: 0.02}, {"dtype": "bfloat16"}, None),
    "not finite": (
        {"loss__policy_avg": lambda x: math.nan if x > 0.5 else 0.0},
        {},
        "Some numbers are not finite",
    ),
    "flat and noisy": ({"objective__scores": noise(1.0)}, {}, "The score does not rise"),
    "small but clear gain": ({"objective__scores": lambda x: 0.1 * x}, {}, None),
    "falls": ({"objective__scores": lambda x: -x}, {}, "The score falls"),
    "gold score falls": (
        {"judge__scores": lambda x: 2 * x if x < 0.5 else 1 - 2 * (x - 0.5)},
        {},
        "The score rises, and the gold score falls",
    ),
    "equal groups": ({"frac_reward_zero_std": lambda x: 0.9}, {}, "Most groups have equal rewards"),
    "no gradient": ({"grad_norm": lambda x: 0.0}, {}, "The policy does not move"),
    "no steps": ({"policy__approxkl_avg": lambda x: 0.0}, {"num_ppo_epochs": 4}, "The policy does not move"),
    "one step": ({"policy__approxkl_avg": lambda x: 0.0}, {"num_ppo_epochs": 1}, None),
    "KL stays 0": ({"objective__kl": lambda x: 0.0}, {}, "The KL is exactly 0"),
    "large steps": ({"val__ratio_var": lambda x: 3.0}, {}, "The steps are too large"),
    "clipped": ({"policy__clipfrac_avg": lambda x: 0.5}, {}, "The steps are too large"),
    "above target": (
        {"objective__kl": lambda x: 10 * (x > 0), "objective__kl_coef": lambda x: 0.1 + x},
        {"kl_target": 4.0},
        "The KL is above its target",
    ),
    "equal scores": ({"env__reward_std": lambda x: 0.0}, {}, "All scores are equal"),
    "near target": ({"objective__kl": lambda x: 4.4 * min(1, 3 * x)}, {"kl_target": 4.0}, None),
    "coefficient up": (
        {"objective__kl": lambda x: 3 * x, "objective__kl_coef": lambda x: 0.1 + x},
        {"kl_target": 4.0},
        "The KL coefficient moves the wrong way",
    ),
    "entropy up": ({"policy__entropy_avg": lambda x: 1 + x}, {}, "The entropy rises"),
    "no end": (
        {"completions__clipped_ratio": lambda x: 0.9},
        {"missing_eos_penalty": 1.0},
        "Responses do not end",
    ),
    "critic": ({"loss__value_avg": lambda x: 1 + x}, {}, "The critic does not learn"),
    "loss": ({"loss": lambda x: 2 + x}, {}, "The loss does not fall"),
    "loss, noisy, falls a little": ({"loss": lambda x: 2 - 0.2 * x + noise(0.05)(x)}, {}, None),
    "words": ({"completions__distinct_2": lambda x: 0.8 - 0.4 * x}, {}, "The responses become alike"),
}


@pytest.mark.parametrize("case", CASES)
def test_each_finding(tmp_path, case):
    columns, args, title = CASES[case]
    found = titles(write_run(tmp_path / "run", args, **columns))
    if title is None:
        assert found == []
    else:
        assert len(found) == 1 and found[0].startswith(title)


def test_lines_that_are_no_json(tmp_path, capsys):
    """Of a file that was edited, or cut and continued: a line on the screen, and all others on the page."""
    folder = write_run(tmp_path / "run")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join([lines[0], "", lines[1][:20], *lines[1:]]) + "\n")
    assert [row["update"] for row in report.read_run(folder).metrics] == [*range(1, 101)]
    said = capsys.readouterr().err.splitlines()
    assert [line.split(", is left out")[0] for line in said] == [
        f"{folder / 'metrics.jsonl'}, line {number}" for number in (2, 3)
    ]


def test_a_run_of_one_update_without_anything_else(tmp_path, capsys):
    folder = write_run(tmp_path / "run")
    (folder / "metrics.jsonl").write_text('{"update": 1, "objective/scores": 0.5}\n')
    (folder / "args.json").unlink()
    report.main([str(folder), "--diagnose"])
    assert "too short to judge (updates: 1)" in capsys.readouterr().out
    page = report.page([report.read_run(folder)])
    assert "No evaluation yet" in page and "Too short to judge" in page and "Nothing looks wrong" not in page


def test_diagnose_prints_findings(capsys):
    report.main([str(ROOT / "results/rloo-weak-reward"), "--diagnose"])
    out = capsys.readouterr().out
    assert "1 finding (" in out and "1. the reward model is too weak" in out
    report.main([str(run_folder(ROOT / "results/diagnose/runs/healthy") / "ppo_sentiment-11"), "--diagnose"])
    assert capsys.readouterr().out.endswith("ppo_sentiment-11: nothing looks wrong (updates: 200)\n")
    report.main([str(run_folder(ROOT / "results/rloo-tiny/seed1")), "--diagnose"])
    no_findings, not_checked = capsys.readouterr().out.splitlines()
    assert no_findings.endswith(": no findings in what was checked (updates: 80)")
    assert not_checked == "Not checked: the numbers per token (none are saved)."


# ---- Findings: held-out prompts ----------------------------------------------------------------------------


HELD_OUT_CASES = {  # held-out responses and scores before and after, the judge after, what is found
    "same gain": (lambda i: {"after": "b", "score after": 1.0 + 0.01 * i}, 0.7, []),
    "training prompts only": (
        lambda i: {"after": "b", "score after": 0.1 + 0.01 * i},
        0.7,
        ["The score rises on the training prompts only"],
    ),
    "judge falls": (
        lambda i: {"after": "b", "score after": 1.0 + 0.01 * i},
        0.3,
        ["The score rises, and the judge disagrees"],
    ),
}


def write_evaluation(folder, pairs, **after):
    """after: metrics after training; before it, they are 0.5"""
    write_lines(folder / "evaluation_samples.jsonl", pairs)
    evaluation = {"before": dict.fromkeys(after, 0.5), "after": after, "n": len(pairs)}
    (folder / "evaluation.json").write_text(json.dumps(evaluation))


@pytest.mark.parametrize("case", HELD_OUT_CASES)
def test_what_held_out_prompts_show(tmp_path, case):
    after, judge, expected = HELD_OUT_CASES[case]
    folder = write_run(tmp_path / "run", env__reward_mean=lambda x: x)
    pairs = [{"prompt": "p", "before": f"text {i}", "score": 0.01 * i} | after(i) for i in range(60)]
    write_evaluation(folder, pairs, **{"judge: P(positive)": judge})
    assert titles(folder) == expected


def test_harder_tasks_and_greedy_decoding_are_no_held_out_tasks(tmp_path):
    """grpo_math.py evaluates three sets. Only the first is like the training tasks."""
    folder, lines = write_run(tmp_path / "run", env__reward_mean=lambda x: x), []
    for name, gain in (("held-out", 1.0), ("harder", 0.0), ("greedy", 0.0)):
        sides = [{"responses": ["text"], "rewards/own": [score]} for score in (0.0, gain)]
        lines += [{"set": name, "task": "p", "before": sides[0], "after": sides[1]}] * 60
    write_lines(folder / "evaluation_samples.jsonl", lines)
    assert titles(folder) == []


def test_a_short_run_says_little_about_held_out_prompts(tmp_path):
    """Ten batches with rewards from 0 to 2: that the last two are 1 above the first is chance."""
    folder = write_run(tmp_path / "run")
    rewards = [0.5, 2.0, 0.0, 1.5, 0.5, 1.0, 2.0, 0.0, 1.0, 2.0]
    rows = [
        {"update": i, "objective/scores": x, "env/reward_mean": x, "env/reward_std": 1.0}
        for i, x in enumerate(rewards, 1)
    ]
    write_lines(folder / "metrics.jsonl", rows)
    pairs = [{"prompt": "p", "before": "a", "score": 0.0, "after": "b", "score after": 0.2}] * 60
    write_lines(folder / "evaluation_samples.jsonl", pairs)
    assert titles(folder) == []


def test_new_words_by_hand():
    """Content words of four letters or more whose share has at least doubled, the commonest first."""
    befores = ["A nice film about tea.", "nice", "A story", "The cat"]
    afters = ["Great film, great story", "great nice", "great cat", "very film"]
    pairs = [{"before": before, "after": after} for before, after in zip(befores, afters)]
    assert report.new_words(pairs) == [("great", 0.0, 0.75), ("film", 0.25, 0.5)]
    assert report.new_words([]) == []


@pytest.mark.parametrize(
    "judge, share, is_found",
    [(0.5, 0.1, False), (0.5, 0.25, True), (0.7, 0.25, False), (0.7, 0.45, True)],
)
def test_a_new_word_takes_over(tmp_path, judge, share, is_found):
    """It may if a judge approves, but not in nearly half of the texts."""
    pairs = []
    for i in range(100):
        after = "dull" if i >= 100 * share else "brilliant"
        pairs.append({"prompt": "p", "before": "dull", "after": after, "score": i, "score after": i + 1})
    folder = write_run(tmp_path / "run")
    write_evaluation(folder, pairs, **{"win rate": judge})
    found = report.find_problems(report.read_run(folder))
    assert [finding.title for finding in found] == ["The responses become alike"] * is_found
    assert all(f"“brilliant” is in {share:.0%} of the" in finding.evidence for finding in found)


# ---- Findings: healthy runs --------------------------------------------------------------------------------


BAND = {  # metric -> what ten healthy runs have in each update, give or take 0.01
    "objective/entropy": 5.0,
    "env/reward_std": 1.0,
    "objective/kl": 0.005,
    "loss/value_avg": 0.5,
    "lr": 0.1,
}


def write_bands(tmp_path, monkeypatch, args, metrics, name="ppo_sentiment none"):
    """metrics: name -> values of 5 %, 50 %, 95 %, each a number or a list for the updates 1, 50, 100"""
    bands = {}
    for metric, quantiles in metrics.items():
        band = {"update": [1, 50, 100]}
        for quantile, x in zip(("5", "50", "95"), quantiles):
            band[quantile] = x if isinstance(x, list) else [x] * 3
        bands[metric] = band
    (tmp_path / "bands.json").write_text(json.dumps({name: {"args": args, "metrics": bands}}))
    monkeypatch.setattr(report, "BANDS", tmp_path / "bands.json")


def run_with_band(tmp_path, monkeypatch, **columns):
    """A run folder whose script and recipe have a band. columns: as write_run's. -> Run"""
    metrics = {name: (x - 0.01, x, x + 0.01) for name, x in BAND.items()}
    write_bands(tmp_path, monkeypatch, {"dtype": "float32"}, metrics)
    usual = {name.replace("/", "__"): lambda x, usual=usual: usual for name, usual in BAND.items()}
    return report.read_run(write_run(tmp_path / "run", **usual | columns))


def first(value, later):
    """A column: value in the first update, then something else."""
    return lambda x: value if x == 0 else later


@pytest.mark.parametrize(
    "columns, metric",
    [
        ({"env__reward_std": first(3.0, 1.0)}, "env/reward_std"),
        # Responses come before rewards, and rewards before the loss.
        ({"env__reward_std": first(3.0, 1.0), "objective__entropy": first(6.0, 5.0)}, "objective/entropy"),
        ({"loss__value_avg": first(0.535, 0.5)}, "loss/value_avg"),  # 1.25 widths above
        ({"lr": first(0.3, 0.1)}, "lr"),
    ],
)
def test_the_first_update_says_where_to_look(tmp_path, monkeypatch, columns, metric):
    """A run whose score does not rise, and that differs from healthy runs before any step."""
    run = run_with_band(tmp_path, monkeypatch, **columns, objective__scores=lambda x: 0.0)
    found = report.find_problems(run)
    assert [finding.entry for finding in found] == ["first-update", "score-does-not-rise"]
    assert found[0].causes == report.CAUSES[metric]


@pytest.mark.parametrize(
    "value, rate, is_found",
    [(2.5, 0.1, False), (3.6, 0.1, False), (6.0, 0.1, True), (-1.0, 0.1, True), (6.0, 0.2, False)],
)
def test_distance_from_the_band(tmp_path, monkeypatch, value, rate, is_found):
    """The band of this metric is from 2 to 3. Other flags than those of the healthy runs: no comparison."""
    flags = {"recipe": "none", "learning_rate": 0.1, "seed": 1}
    write_bands(tmp_path, monkeypatch, flags, {"objective/entropy": (2.0, 2.5, 3.0)})
    args = {"learning_rate": rate, "seed": 2}
    run = report.read_run(write_run(tmp_path / "run", args, objective__entropy=lambda x: value))
    found = report.find_problems(run)
    assert [finding.entry for finding in found] == ["first-update", "outside-the-band"] * is_found
    if is_found:
        evidence = f"objective/entropy is {value:.3g} at update 100 (90 % of healthy runs: 2 to 3)"
        assert evidence in found[1].evidence


def test_unusual_flags_come_first_if_something_is_wrong(tmp_path, monkeypatch):
    usual = {"learning_rate": 1e-4, "gamma": 1.0, "optimizer": "Adam", "seed": 1}
    write_bands(tmp_path, monkeypatch, usual, {"x": (0.0, 0.0, 0.0)})
    flags = {"learning_rate": 1e-2, "gamma": 1.0, "optimizer": "SGD", "seed": 2}
    assert titles(write_run(tmp_path / "healthy", flags)) == []
    failed = report.read_run(write_run(tmp_path / "failed", flags, objective__scores=lambda x: -x))
    flags, score = report.find_problems(failed)
    assert flags.entry == "flags" and score.title == "The score falls"
    assert flags.causes == [
        "--learning-rate is 0.01, healthy runs: 0.0001",
        "--optimizer is SGD, healthy runs: Adam",
    ]


def test_on_other_data_flags_are_no_cause(tmp_path, monkeypatch):
    """Nor are the names of data, models, rewards and judges."""
    usual = {"learning_rate": 1e-4, "dataset_name": "a", "reward_fn": None, "judge_fn": "f"}
    write_bands(tmp_path, monkeypatch, usual, {"x": (0.0, 0.0, 0.0)})
    own = {"learning_rate": 1e-3, "dataset_name": "b", "reward_fn": ["own.py:f"], "judge_fn": "g"}
    failed = report.read_run(write_run(tmp_path / "failed", own, objective__scores=lambda x: -x))
    assert [finding.title for finding in report.find_problems(failed)] == ["The score falls"]


RECIPE = {"learning_rate": 0.1, "dataset_name": "data/reviews", "judge_fn": "gold.py:f"}


@pytest.mark.parametrize(
    "args, missing, reasons",
    [
        ({}, "", []),
        ({"judge_fn": "own.py:f"}, "", []),
        ({"dataset_name": "own"}, "", ["healthy runs (their flags differ: --dataset-name)"]),
        ({"recipe": "custom"}, "", ["healthy runs (there are none of this recipe)"]),
        ({}, "world_size", ["healthy runs (they have one process)"]),
        ({}, "tokens.jsonl", ["the numbers per token (none are saved)"]),
        ({"missing_eos_penalty": None}, "", []),
        ({"missing_eos_penalty": 1.0}, "", ["the rewards (what was paid is not saved)"]),
        ({"whiten_rewards": True}, "", ["the rewards (they are whitened)"]),
        ({}, "evaluation_samples.jsonl", ["the held-out prompts (no evaluation yet)"]),
        ({"judge_fn": None}, "", ["whether a judge agrees (there is none)"]),
    ],
)
def test_what_was_not_checked_is_said(tmp_path, monkeypatch, args, missing, reasons):
    """Never that nothing looks wrong, if something was not looked at."""
    write_bands(tmp_path, monkeypatch, RECIPE, {"x": (0.0, 0.0, 0.0)})
    folder = write_run(tmp_path / "run", RECIPE | args)
    write_evaluation(folder, [{"prompt": "p", "before": "", "score": 0.0, "after": "", "score after": 1.0}])
    write_lines(
        folder / "tokens.jsonl", [{"update": 2, "prompt": "p", "score": 1.0, "ids": [5], "reward": [1.0]}]
    )
    if missing == "world_size":
        about = json.loads((folder / "args.json").read_text())
        (folder / "args.json").write_text(json.dumps(about | {"world_size": 2}))
    elif missing:
        (folder / missing).unlink()
    run = report.read_run(folder)
    line = report.skipped_checks(run)
    assert (line == "") == (reasons == []) and line.count("(") == len(reasons)
    assert all(reason in line for reason in reasons)
    assert report.find_problems(run) == []
    page, screen = report.page([run]), report.describe_findings(run)
    assert ("Nothing looks wrong" in page) == ("nothing looks wrong" in screen) == (reasons == [])
    assert line in page and line in screen


def test_all_metrics_with_causes_are_logged():
    """A misspelled metric would never be looked at."""
    bands = json.loads((ROOT / "reference_bands.json").read_text()).values()
    logged = {metric for band in bands for metric in band["metrics"]}
    assert set(report.CAUSES) <= logged and set(report.LATER) <= set(report.CAUSES)


# ---- Tokens ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ppo_sentiment", "ppo_dialog", "rloo_tldr"])
def test_rewards_are_checked_against_what_was_paid(scripts, small, bang_lm, name):
    """After the clip and the penalty for a missing EOS, which some responses pay; not the raw score."""
    flags = dict(model_name_or_path=bang_lm(), missing_eos_penalty=3.0, score_clip=0.5, total_episodes=48)
    flags |= dict(temperature=1.0, learning_rate=1e-4)
    if name == "rloo_tldr":
        flags |= dict(rloo_k=4)
    _, folder = scripts[name].train(small(name, num_sample_generations=6, **flags))
    rows = rows_of(folder, "tokens.jsonl")
    penalties = {round(max(-0.5, min(0.5, row["score"])) - row["score paid"], 3) for row in rows}
    assert penalties == {0.0, 3.0} and {row["update"] for row in rows} == {1, 2, 3, 4, 5, 6}

    def findings():
        found = [finding.entry for finding in report.find_problems(report.read_run(folder))]
        return [entry for entry in found if entry in ("token-rewards", "group-advantages")]

    assert findings() == []
    # If something else was paid than the file says:
    write_lines(folder / "tokens.jsonl", [row | {"score paid": i % 3} for i, row in enumerate(rows)])
    assert len(findings()) == 1
    # An earlier version saved only the raw score.
    for row in rows:
        del row["score paid"]
    write_lines(folder / "tokens.jsonl", rows)
    assert findings() == []
    assert "the rewards (what was paid is not saved)" in report.skipped_checks(report.read_run(folder))


def test_a_reward_of_0_in_the_first_update_is_no_mask(tmp_path):
    """There the KL is 0 too. Later, a token whose numbers are all 0 is masked out."""
    zeros = {"kl": [0.0], "return": [0.0], "advantage": [0.0], "prompt": "p", "score": 0.0}
    folder = write_run(tmp_path / "run")
    write_lines(folder / "tokens.jsonl", [{"update": 1} | zeros] * 4)
    assert titles(folder) == []
    write_lines(folder / "tokens.jsonl", [{"update": update} | zeros for update in (1, 1, 2, 2)])
    assert titles(folder) == ["Tokens of the responses are masked out"]


def test_tokens_are_decoded_by_the_runs_tokenizer(tmp_path):
    """Of model/, else of the model that the run began with; else there are only ids."""
    folder = write_run(tmp_path / "run", {"model_name_or_path": "checkpoints/reviews-lm"})
    other = write_run(tmp_path / "other", {"model_name_or_path": "no/such-model"})
    tokenizer = report.load_tokenizer(report.read_run(folder))
    ids = tokenizer("The film is naïve, and so good.")["input_ids"]
    for run in (folder, other):
        write_lines(run / "tokens.jsonl", [{"update": 1, "prompt": "p", "score": 1.0, "ids": ids}])
    [row] = report.token_data(report.read_run(folder))["rows"]
    assert "".join(row["tokens"]) == "The film is naïve, and so good."
    assert len(row["tokens"]) == len(ids) and " film" in row["tokens"]
    shutil.copytree(ROOT / "checkpoints/arithmetic-tokenizer", folder / "model")
    [trained] = report.token_data(report.read_run(folder))["rows"]
    assert trained["tokens"] != row["tokens"]
    [unknown] = report.token_data(report.read_run(other))["rows"]
    assert unknown["tokens"] == [f" {i}" for i in ids]


def test_a_character_of_several_tokens_belongs_to_the_last(tmp_path):
    class Bytes:
        def decode(self, ids):
            return bytes(ids).decode("utf-8", errors="replace")

    pieces = report.token_pieces(Bytes(), list("a ö".encode()))
    assert pieces == ["a", " ", "", "ö"]


def test_what_a_tool_wrote_has_no_numbers(tmp_path):
    """Tokens of grpo_tools.py: `sampled` is no column to color by. Without it, all tokens are sampled."""
    folder = write_run(tmp_path / "run", script="grpo_tools", tools__call_frequency=lambda x: x)
    row = {
        "update": 1,
        "prompt": "p",
        "score": 1.0,
        "tokens": ["call", "72", "answer"],
        "advantage": [0.5] * 3,
    }
    write_lines(folder / "tokens.jsonl", [row | {"sampled": [True, False, True]}])
    data = report.token_data(report.read_run(folder))
    assert data["columns"] == ["advantage"] and data["rows"][0]["sampled"] == [True, False, True]
    report.main([str(folder)])
    text = (folder / "report.html").read_text()
    assert (
        '"sampled": [true, false, true]' in text and 'line.sampled[i] ? "token" : "token unsampled"' in text
    )
    assert "How does it use its tools?" in text and "calls per trajectory" in text
    write_lines(folder / "tokens.jsonl", [row])
    assert report.token_data(report.read_run(folder))["rows"][0]["sampled"] == [True] * 3


def test_words_of_calls_are_no_finding():
    """A policy that learns to call its tool writes the same words each time."""
    assert "The responses become alike" not in titles("grpo-tools-tiny/seed1")


# ---- The page ----------------------------------------------------------------------------------------------


def test_the_page_needs_no_network(tmp_path):
    """A page of two runs, one of them with tokens and with texts that look like HTML."""
    run = write_run(tmp_path / "one", {"kl_target": 4.0}, objective__kl=lambda x: 4 * x)
    tokens = {"tokens": [" yes", "</script>", "<i>"], "advantage": [1.0, math.nan, -1.0]}
    rows = [{"update": update, "prompt": "Is <b> bold?", "score": 2.5} | tokens for update in (1, 100)]
    write_lines(run / "tokens.jsonl", rows)
    pairs = []
    for i in range(12):
        pair = {"prompt": f"prompt {i}", "before": "dull", "score": i}
        pairs.append(pair | {"after": "superb", "score after": 11 - i})
    write_lines(run / "evaluation_samples.jsonl", pairs)
    other = write_run(tmp_path / "two", objective__scores=lambda x: -x)
    report.main([str(run), str(other), "--output", str(tmp_path / "page.html")])
    text = (tmp_path / "page.html").read_text()
    assert not re.search(r"<(script|link|img)\b[^>]*(src|href)=.?(https?:)?//", text)
    assert "</script><i>" not in text and "<b> bold" not in text
    assert "Words that spread" not in text  # in 12 responses, one is a large share


def test_a_committed_run_fits(tmp_path):
    folder = run_folder(ROOT / "results/ppo-sentiment-tiny/seed1.zip")
    report.main([str(folder), "--output", str(tmp_path / "page.html")])
    assert (tmp_path / "page.html").stat().st_size < 3_000_000


def test_a_page_of_a_reward_model(tmp_path):
    """Its evaluation has no before and after, and its run no tokens."""
    run = write_run(tmp_path / "run", loss=lambda x: 1 - x)
    evaluation = {"accuracy": 0.875, "n": 8, "labels": ["dull", "superb"], "confusion": [[3, 0], [1, 4]]}
    (run / "evaluation.json").write_text(json.dumps(evaluation))
    [(_, _, rows)] = report.evaluation_tables(report.read_run(run))
    assert rows == [["accuracy", "0.875"], ["n", 8]]
    report.main([str(run), "--output", str(tmp_path / "page.html")])
    text = (tmp_path / "page.html").read_text()
    assert "<td>accuracy<td>0.875" in text and "This run has no numbers per token" in text


def test_both_final_tables_of_dpo(tmp_path):
    before, after = {"win rate": 0.25, "score mean": 1.0}, {"win rate": 0.5, "score mean": 1.5}
    pairs_before, pairs = {"rewards/accuracies": 0.0}, {"rewards/accuracies": 0.75}
    about = {"before": before, "after": after, "n": 30, "judge": "judge.py:f", "number of pairs": 40}
    about |= {"pairs before": pairs_before, "pairs": pairs}
    (tmp_path / "metrics.jsonl").write_text('{"update": 1}\n')
    (tmp_path / "evaluation.json").write_text(json.dumps(about))
    prompts, pairs = report.evaluation_tables(report.read_run(tmp_path))
    assert prompts[0] == "30 held-out prompts" and len(prompts[2]) == 2
    assert pairs == ("40 held-out pairs", ["", "before", "after"], [["rewards/accuracies", "0", "0.75"]])
