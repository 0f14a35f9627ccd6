"""docs/parity.md has what benchmarks/parity.py prints of the committed results."""

import json
import sys

import numpy as np
import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import parity  # noqa: E402
import parity_jobs  # noqa: E402

import rloo_tldr  # noqa: E402


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
    [ours], [theirs] = (parity.read_times("grpo", side) for side in ("ours", "TRL 1.16 GRPOTrainer"))
    ratio = theirs[-1][1] / ours[-1][1]
    assert f"TRL 1.16 takes {ratio:.1f} times as long" in (ROOT / "README.md").read_text()


def test_what_the_page_says_of_small_differences():
    """With the same order, decay and warm-up: equal losses for sft, differences that grow for reward."""
    loss = {}  # job -> list of curves: how far the losses are apart
    for job, peer in (("sft", "SFT"), ("reward", "Reward")):
        sides = {}
        for row in parity.read(job):
            sides.setdefault(row["side"], {})[row["seed"]] = [point["loss"] for point in row["curve"]]
        theirs = sides[f"TRL 1.16 {peer}Trainer, our order, weight decay and warm-up"]
        loss[job] = np.array([np.abs(np.subtract(sides["ours"][seed], theirs[seed])) for seed in theirs])
    assert loss["sft"].shape == (8, 11) and loss["reward"].shape == (9, 11)
    last = np.sort(loss["sft"][:, -1])
    assert last[-2] < 6e-7 and f"{last[-1]:.5f}" == "0.00008"
    assert loss["reward"][:, 1].max() < 7e-7  # after 25 steps
    last = loss["reward"][:, -1]
    assert 0.001 < last.min() and last.max() < 0.022 and f"{last.mean():.2f}" == "0.01"


def test_numbers_of_the_text():
    """Those of docs/parity.md that are in no table, from the committed results."""
    page = " ".join((ROOT / "docs/parity.md").read_text().split())
    scores = {(x["side"], x["peer"]): x for x in parity.compare("rloo") if x["metric"] == "score"}
    old = scores["ours", "TRL 0.11 RLOOTrainer"]
    assert f"TRL 0.11's score is lower by {old['difference']:.3f}, which is within the margin" in page
    assert old["verdict"] == "equivalent"
    margin = json.loads(parity.PLAN.read_text())["rloo"]["margin"]["kl"]
    kl = {(x["side"], x["peer"]): x for x in parity.compare("rloo") if x["metric"] == "kl"}
    ours = np.mean(kl["ours", "TRL 1.16 RLOOTrainer"]["ours"])
    assert f"its margin is {margin / ours:.0%} of today's KL".replace("%", " %") in page
    assert rloo_tldr.RECIPES["tiny"].learning_rate == 3e-4
    unclipped = scores["ours", "ours, no gradient clipping"]
    assert f"without clipping, our score is {unclipped['difference']:.3f} lower" in page

    scores = {(x["side"], x["peer"]): x for x in parity.compare("critic") if x["metric"] == "score"}
    whole = scores["ours", "TRL 1.12 PPOTrainer"]["difference"]
    [start] = {row["curve"][0]["score"] for row in parity.read("critic")}  # of the same weights
    gained = np.mean(scores["ours", "TRL 1.12 PPOTrainer"]["theirs"]) - start
    assert f"higher by {whole / gained:.0%} of what TRL's training adds".replace("%", " %") in page
    head = scores["ours", "ours, TRL's value head and variance"]["difference"]
    share = f"ends {head:.3f} lower, which is {head / whole:.0%} of the difference".replace("%", " %")
    assert share in page and 0.4 < head / whole < 0.6
