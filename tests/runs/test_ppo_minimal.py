"""ppo_minimal.py is the default of ppo_sentiment.py: the same flags, responses and metrics."""

import dataclasses
import json
import re

import ppo_minimal
import ppo_sentiment
import pytest
import torch
from run_tools import ROOT, rows_of

pytest_plugins = ["run_fixtures"]

TINY = dataclasses.asdict(ppo_sentiment.RECIPES["tiny"])


def test_the_defaults_are_those_of_the_recipe_tiny():
    minimal = dataclasses.asdict(ppo_minimal.Args())
    del minimal["output_dir"]  # ppo_sentiment.py makes a folder for each run
    assert minimal == {name: TINY[name] for name in minimal}
    assert TINY["lr_scheduler_type"] == "linear" and TINY["optimizer"] == "torch.optim.Adam"


def record_rollouts(script, monkeypatch):
    """Every batch that the script's function rollout returns from now on. -> list of dict of tensors"""
    batches, rollout = [], script.rollout

    def recording_rollout(*args, **kwargs):
        result = rollout(*args, **kwargs)
        batches.append(result if isinstance(result, dict) else result[0])
        return result

    monkeypatch.setattr(script, "rollout", recording_rollout)
    return batches


def test_three_updates_have_the_same_responses_and_metrics(monkeypatch, tmp_path):
    """With SGD, because Adam would magnify a difference by rounding: it divides by the size of a gradient."""
    monkeypatch.chdir(ROOT)
    flags = dict(seed=7, total_episodes=3 * 128, num_eval_prompts=16, learning_rate=0.1, kl_target=0.05)
    expected = record_rollouts(ppo_sentiment, monkeypatch)
    ours = record_rollouts(ppo_minimal, monkeypatch)
    tiny = dict(optimizer="torch.optim.SGD", judge_model_path=None, output_dir=str(tmp_path / "big"))
    ppo_sentiment.train(dataclasses.replace(ppo_sentiment.RECIPES["tiny"], **flags, **tiny))
    monkeypatch.setattr(torch.optim, "Adam", torch.optim.SGD)
    _, history = ppo_minimal.train(ppo_minimal.Args(**flags, output_dir=str(tmp_path / "minimal")))

    assert len(ours) == len(expected) == 5  # the held-out prompts before and after, and three updates
    for b, big in zip(ours, expected):
        assert torch.equal(b["mask"], big["mask"])
        assert torch.equal(b["ids"][b["mask"]], big["ids"][big["mask"]])
        assert (b["raw_scores"] - big["raw_scores"]).abs().max() < 1e-4  # logits up to 8
        for name in ("logprobs", "ref_logprobs", "values"):
            assert (b[name] - big[name]).abs().max() < 1e-4
    rows = rows_of(tmp_path / "big")
    assert [row["update"] for row in history] == [1, 2, 3]
    for row, big in zip(history, rows):
        assert row == pytest.approx({name: big[name] for name in row}, rel=1e-5, abs=1e-5)
    assert rows[2]["objective/kl"] > 0.02  # the policy has moved
    assert rows[2]["objective/kl_coef"] != rows[0]["objective/kl_coef"]


def test_the_committed_default_ends_inside_the_band():
    """results/ppo-minimal/default.txt: what the whole default printed."""
    band = json.loads((ROOT / "results/reference_bands.json").read_text())["ppo_sentiment tiny"]["metrics"]
    lines = (ROOT / "results/ppo-minimal/default.txt").read_text().splitlines()
    updates = [line for line in lines if line.startswith("update")]
    assert len(updates) == TINY["total_episodes"] // 128
    last = dict(re.findall(r"(\S+) (-?[\d.e-]+)", updates[-1]))
    assert last.pop("update") == "200"
    for name in ("scores", "kl", "kl_coef", "policy_avg", "value_avg", "entropy_avg", "approxkl_avg"):
        [quantiles] = [x for metric, x in band.items() if metric.split("/")[-1] == name]
        assert quantiles["5"][-1] <= float(last.pop(name)) <= quantiles["95"][-1], name
    assert not last
