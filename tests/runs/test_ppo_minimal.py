"""ppo_minimal.py is the default of ppo_sentiment.py: the same flags, responses and metrics."""

import dataclasses
import importlib
import sys

import pytest
import torch
from diff_blocks import apply_block, blocks
from run_tools import ROOT, rows_of, spy

import grpo_math
import ppo_minimal
import ppo_sentiment
import rloo_tldr

pytest_plugins = ["run_fixtures"]

TINY = dataclasses.asdict(ppo_sentiment.RECIPES["tiny"])


def test_the_defaults_are_those_of_the_recipe_tiny():
    minimal = dataclasses.asdict(ppo_minimal.Args())
    del minimal["output_dir"]  # ppo_sentiment.py makes a folder for each run
    assert minimal == {name: TINY[name] for name in minimal}
    assert TINY["lr_scheduler_type"] == "linear" and TINY["optimizer"] == "torch.optim.Adam"


def test_four_updates_have_the_same_responses_and_metrics(monkeypatch, tmp_path):
    """With the default's Adam. Larger batches soon have a token that rounding turns into another one."""
    monkeypatch.chdir(ROOT)
    flags = dict(total_episodes=4 * 32, per_device_train_batch_size=8, num_eval_prompts=16)
    expected = spy(monkeypatch, ppo_sentiment, "rollout")
    ours = spy(monkeypatch, ppo_minimal, "rollout")
    optimizers = []

    class Adam(torch.optim.Adam):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            optimizers.append(self)

    monkeypatch.setattr(torch.optim, "Adam", Adam)
    tiny = dict(judge_model_path=None, output_dir=str(tmp_path / "big"))
    ppo_sentiment.train(dataclasses.replace(ppo_sentiment.RECIPES["tiny"], **flags, **tiny))
    _, history = ppo_minimal.train(ppo_minimal.Args(**flags, output_dir=str(tmp_path / "minimal")))

    assert optimizers[0].defaults == optimizers[1].defaults  # fused too, which rounds differently
    assert len(ours) == len(expected) == 6  # the held-out prompts before and after, and four updates
    for (_, b), (_, (big, *_)) in zip(ours, expected):
        assert torch.equal(b["mask"], big["mask"])
        assert torch.equal(b["ids"][b["mask"]], big["ids"][big["mask"]])
        assert (b["raw_scores"] - big["raw_scores"]).abs().max() < 1e-4  # logits up to 8
        for name in ("logprobs", "ref_logprobs", "values"):
            assert (b[name] - big[name]).abs().max() < 1e-4
    rows = rows_of(tmp_path / "big")
    assert [row["update"] for row in history] == [1, 2, 3, 4]
    for row, big in zip(history, rows):
        assert row == pytest.approx({name: big[name] for name in row}, rel=1e-5, abs=1e-5)
    assert rows[3]["objective/kl"] > 0.005  # the policy has moved
    assert rows[1]["objective/kl_coef"] != rows[0]["objective/kl_coef"]


# ---- docs/reading.md: from PPO to RLOO and GRPO ------------------------------------------------------------

BLOCKS = blocks((ROOT / "docs/reading.md").read_text())


@pytest.mark.parametrize("name", ["RLOO", "GRPO"])
def test_a_documented_change_runs(monkeypatch, tmp_path, name):
    """Four neighbors have one prompt, and the loss moves the policy."""
    source = apply_block((ROOT / "ppo_minimal.py").read_text(), BLOCKS[name])
    (tmp_path / "changed_minimal.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "changed_minimal", raising=False)
    module = importlib.import_module("changed_minimal")
    monkeypatch.chdir(ROOT)
    rollouts = spy(monkeypatch, module, "rollout")
    flags = dict(total_episodes=64, per_device_train_batch_size=8, num_eval_prompts=8, learning_rate=1e-3)
    _, history = module.train(module.Args(**flags, output_dir=str(tmp_path)))
    _, b = rollouts[1]
    prompts = b["ids"][:, :5].view(8, 4, 5)
    assert (prompts == prompts[:, :1]).all() and not (prompts == prompts[:1]).all()
    assert history[0]["objective/kl"] == 0 < history[1]["objective/kl"]
    assert not torch.equal(b["ids"][0], b["ids"][1])


@pytest.mark.parametrize("name", ["RLOO", "GRPO"])
def test_documented_advantages_are_those_of_the_script(name):
    torch.manual_seed(0)
    scores, kl, kl_coef, T = torch.randn(12), torch.randn(12, 5), 0.3, 5
    names = dict(scores=scores, kl=kl, kl_coef=kl_coef, T=T, b={"values": None})
    hunk = BLOCKS[name].split("@@ step 4\n")[1].split("@@")[0]
    exec("\n".join(line[1:].strip() for line in hunk.splitlines() if line.startswith("+")), names)
    expected = {
        "RLOO": lambda: rloo_tldr.rloo_advantages(scores - kl_coef * kl.sum(1), 4),
        "GRPO": lambda: grpo_math.grpo_advantages(scores, 4),
    }[name]()
    torch.testing.assert_close(names["advantages"], expected[:, None].expand_as(names["advantages"]))
