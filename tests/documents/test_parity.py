"""benchmarks/parity.py: its statistics, one side of a job at toy size, and the committed results."""

import json
import sys
from dataclasses import replace
from statistics import median

import numpy as np
import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import parity  # noqa: E402
import parity_jobs  # noqa: E402


def test_the_interval_is_that_of_welch():
    """An example by hand: means 3 and 8, variances 2.5 and 10, 5 and 5 runs, 5.882 degrees of freedom."""
    delta, low, high = parity.difference([1, 2, 3, 4, 5], [4, 6, 8, 10, 12])
    assert delta == -5
    assert (low + high) / 2 == pytest.approx(-5)
    t, error = 1.9484, (2.5 / 5 + 10 / 5) ** 0.5  # t: 95 % quantile
    assert high - low == pytest.approx(2 * t * error, rel=1e-3)


def test_the_paired_interval():
    """By hand: differences -1, -3, -2, -6, -3; mean -3, variance 3.5, 4 degrees of freedom."""
    delta, low, high = parity.difference([1, 2, 3, 4, 5], [2, 5, 5, 10, 8], paired=True)
    assert delta == -3
    assert (low + high) / 2 == pytest.approx(-3)
    t, error = 2.1318, (3.5 / 5) ** 0.5  # t: 95 % quantile
    assert high - low == pytest.approx(2 * t * error, rel=1e-3)


@pytest.mark.parametrize(
    "low, high, word",
    [
        (-0.01, 0.019, "equivalent"),
        (0.001, 0.019, "equivalent"),  # a real difference, but less than the margin
        (0.001, 0.021, "different"),
        (-0.03, -0.001, "different"),
        (-0.03, 0.001, "inconclusive"),
    ],
)
def test_verdicts(low, high, word):
    assert parity.verdict(low, high, 0.02) == word


def test_our_side_of_a_job(monkeypatch):
    """Copies of the policy before the first update and after each; the KL begins at 0."""
    job = parity_jobs.JOBS["rloo"]
    few = replace(job, k=2, load_rows=lambda *inputs: job.load_rows(*inputs)[:10])
    monkeypatch.setitem(parity_jobs.JOBS, "rloo", few)
    flags = dict(learning_rate=1e-2, total_episodes=48, per_device_train_batch_size=8)
    row = parity_jobs.run("rloo", "ours, no gradient clipping", 1, **flags)
    assert [point["episode"] for point in row["curve"]] == [0, 16, 32, 48]
    assert row["curve"][0]["kl"] == 0 < row["curve"][3]["kl"]
    assert row["held_out_responses"] == 20
    assert set(few.metrics) <= set(row["curve"][0])


@pytest.mark.parametrize("job", parity_jobs.JOBS)
def test_the_page_has_the_table_of_the_results(job):
    """docs/parity.md has lines that parity.py prints, and all planned ones; the seeds are the plan's."""
    section = (ROOT / "docs/parity.md").read_text().split(f"(`{job}`)\n")[1].split("\n### ")[0]
    rows = [line for line in section.splitlines() if line.count(" | ") == 7]
    printed = parity.table(job).splitlines()
    assert set(rows) <= set(printed)
    assert {line for line in printed if line.endswith("** |")} <= set(rows)
    planned = json.loads(parity.PLAN.read_text())[job]
    shown = {(row["side"], row["peer"]) for row in parity.compare(job)}
    assert shown == {*parity_jobs.JOBS[job].comparisons, *parity_jobs.JOBS[job].explored}
    rows = parity.read(job)
    for side in parity_jobs.JOBS[job].sides:
        seeds = [row["seed"] for row in rows if row["side"] == side]
        assert len(seeds) == len(set(seeds))
        assert set(seeds) <= {*planned["pilot_seeds"], *planned["seeds"]}
        assert not set(planned["pilot_seeds"]) & set(planned["seeds"])


def test_the_page_has_the_times():
    assert parity.time_table() in (ROOT / "docs/parity.md").read_text()


def test_what_the_page_says_of_small_differences():
    """With the same order and weight decay: equal losses for sft, differences that grow for reward."""
    loss = {}  # job -> list of curves: how far the losses are apart
    for job, peer in (("sft", "SFT"), ("reward", "Reward")):
        sides = {}
        for row in parity.read(job):
            sides.setdefault(row["side"], {})[row["seed"]] = [point["loss"] for point in row["curve"]]
        theirs = sides[f"TRL 1.16 {peer}Trainer, our order and weight decay"]
        loss[job] = np.array([np.abs(np.subtract(sides["ours"][seed], theirs[seed])) for seed in theirs])
    assert loss["sft"].shape == (5, 11) and loss["reward"].shape == (9, 11)
    assert loss["sft"][:, -1].max() < 2e-7
    assert loss["reward"][:, 1].max() < 2.5e-7  # after 25 steps
    last = np.sort(loss["reward"][:, -1])
    assert 0.0005 < last[0] and last[-2] < 0.015 and 0.045 < last[-1] < 0.055


def test_numbers_of_the_text():
    """Those of docs/parity.md that are in no table, from the committed results."""
    page = " ".join((ROOT / "docs/parity.md").read_text().split())
    [row] = [
        row
        for row in parity.compare("rloo")
        if row["peer"] == "TRL 1.16 RLOOTrainer" and row["metric"] == "kl"
    ]
    assert f"{median(row['ours']):.2f} nats for ours and {median(row['theirs']):.2f} for TRL" in page
    highest = sorted(row["theirs"])[-2:]
    assert [f"{x:.1f}" for x in highest] == ["4.9", "7.3"]
