"""docs/parity.md has what benchmarks/parity.py prints of the committed results."""

import json
import sys
from statistics import median

import numpy as np
import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import parity  # noqa: E402
import parity_jobs  # noqa: E402


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
