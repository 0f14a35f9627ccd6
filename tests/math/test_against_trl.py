"""The math against TRL 0.11, the last version whose PPO kept its parts in functions.

It needs an older transformers than the scripts do, so it runs in an environment of its own, which TRL_PYTHON
names. Skipped without:

    python3 -m venv ~/trl && ~/trl/bin/pip install torch==2.13.0
    ~/trl/bin/pip install trl==0.11.4 transformers==4.45.2 'datasets<4' 'numpy<2.3' rich tyro psutil
    TRL_PYTHON=~/trl/bin/python python -m pytest tests/math/test_against_trl.py
"""

import os
import subprocess

import pytest
import torch
from math_tools import close, normal
from transformers import AutoModelForSequenceClassification

import ppo_sentiment as ppo
import reward_model as reward
import rloo_tldr as rloo

SIZES = dict(gamma=0.97, lam=0.9, cliprange=0.2, cliprange_value=0.3, kl_coef=0.3)
PAD, CONTEXT = 1, 6
KLS = (0.1, 5.9, 6.1, 30.0, -2.0)
TRLS_SIDE = """
import sys, torch
from types import SimpleNamespace
from transformers import AutoModelForSequenceClassification
from trl import PPOTrainer
from trl.core import masked_whiten
from trl.trainer.utils import AdaptiveKLController, get_reward

x, s, pad, context, kls = torch.load(sys.argv[1])
mask, out = x["mask"].float(), {}
out["white"] = masked_whiten(x["a"], mask)
out["white, with its mean"] = masked_whiten(x["a"], mask, shift_mean=False)
for penalty in ("kl", "mse"):
    config, kl_ctl = SimpleNamespace(kl_penalty=penalty), SimpleNamespace(value=s["kl_coef"])
    me = SimpleNamespace(kl_ctl=kl_ctl, config=config)
    me._kl_penalty = lambda *row: PPOTrainer._kl_penalty(me, *row)
    rewards = PPOTrainer.compute_rewards(me, x["scores"], x["a"], x["b"], x["mask"].long())
    out["rewards " + penalty] = rewards[0]
me = SimpleNamespace(config=SimpleNamespace(whiten_rewards=False, vf_coef=1.0, ratio_threshold=1e9, **s))
out["gae"] = PPOTrainer.compute_advantages(me, x["c"], x["b"], mask)[1:]
losses = PPOTrainer.loss(me, x["a"], x["c"], x["logits"], x["d"], x["b"], mask, x["e"], x["f"])
policy, value, stats = losses
names = ("policy/clipfrac", "val/clipfrac", "policy/approxkl")
out["losses"] = [policy, value, *(stats[name] for name in names)]
controller, out["coefficients"] = AdaptiveKLController(0.2, 6.0, 10_000), []
for kl in kls:
    controller.update(kl, 128)
    out["coefficients"].append(float(controller.value))
model = AutoModelForSequenceClassification.from_pretrained(sys.argv[3]).eval()
with torch.no_grad():
    out["scores"] = get_reward(model, x["texts"], pad, context)[1]
torch.save(out, sys.argv[2])
"""


def ragged_texts():
    """Left-padded prompts and right-padded responses, as TRL has them. -> [4, CONTEXT + 5]"""
    texts = torch.randint(4, 1000, (4, CONTEXT + 5), generator=torch.Generator().manual_seed(3))
    for row, (num_before, num_after) in zip(texts, ((0, 0), (2, 1), (5, 4), (1, 3))):
        row[:num_before] = PAD
        row[len(row) - num_after :] = PAD
    return texts


@pytest.fixture(scope="module")
def inputs():
    numbers = {name: normal(4, 5, seed=seed) / 2 for seed, name in enumerate("abcdef")}
    return numbers | dict(
        logits=normal(4, 5, 11),
        mask=torch.arange(5) < torch.tensor([3, 1, 5, 4])[:, None],
        scores=normal(4, seed=8),
        texts=ragged_texts(),
    )


@pytest.fixture(scope="module")
def trl(inputs, tiny_preference_model, tmp_path_factory):
    """What TRL's functions return for the inputs."""
    python = os.environ.get("TRL_PYTHON")
    if python is None:
        pytest.skip("name a Python that has trl 0.11 in TRL_PYTHON (see this file)")
    folder = tmp_path_factory.mktemp("trl")
    torch.save((inputs, SIZES, PAD, CONTEXT, KLS), folder / "in.pt")
    command = [python, "-c", TRLS_SIDE, folder / "in.pt", folder / "out.pt", tiny_preference_model("llama")]
    env = os.environ | dict(PYTHONPATH="", OMP_NUM_THREADS="1")
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "out.pt")


def unbiased(whitened, mask):
    """TRL divides the variance by n - 1. So its whitened numbers are smaller by sqrt((n - 1) / n)."""
    n = mask.sum()
    return whitened * ((n - 1) / n).sqrt()


def valid(theirs, mask):
    """TRL does not set numbers outside the mask to 0."""
    return torch.where(mask, theirs, 0.0)


def test_whitening_is_trls_but_for_the_variance(inputs, trl):
    """Trick 20."""
    a, mask = inputs["a"], inputs["mask"]
    close(unbiased(ppo.masked_whiten(a, mask), mask), valid(trl["white"], mask), rtol=1e-4)
    mean = ppo.masked_mean(a, mask)
    ours = ppo.masked_whiten(a, mask, shift_mean=False) - mean
    close(unbiased(ours, mask)[mask], (trl["white, with its mean"] - mean)[mask], rtol=1e-4)


@pytest.mark.parametrize("estimator, penalty", [("k1", "kl"), ("k2", "mse")])
def test_rewards_are_trls(inputs, trl, estimator, penalty):
    """Up to the end of each response."""
    mask = inputs["mask"]
    kl = rloo.kl_per_token(inputs["a"], inputs["b"], estimator)
    ours = ppo.token_rewards(inputs["scores"], kl, mask.sum(1), SIZES["kl_coef"])
    close(ours, valid(trl[f"rewards {penalty}"], mask))


def test_advantages_are_trls(inputs, trl):
    """Whitened advantages, and returns."""
    mask = inputs["mask"]
    advantages, returns = ppo.gae(inputs["b"], inputs["c"], mask, SIZES["gamma"], SIZES["lam"])
    their_whitened, their_returns = trl["gae"]
    close(returns, valid(their_returns, mask), rtol=1e-4)
    ours = unbiased(ppo.masked_whiten(advantages, mask), mask)
    close(ours, valid(their_whitened, mask), rtol=1e-4, atol=1e-5)


def test_losses_are_trls(inputs, trl):
    """Means over the valid tokens of both losses, and how often each is clipped."""
    old, new, old_values, values, advantages, returns = (inputs[name] for name in "abcdef")
    policy_loss, _, policy_clipped = ppo.clipped_policy_loss(new, old, advantages, SIZES["cliprange"])
    value_loss, value_clipped = ppo.clipped_value_loss(values, old_values, returns, SIZES["cliprange_value"])
    tables = policy_loss, value_loss, policy_clipped, value_clipped, 0.5 * (new - old) ** 2
    ours = [ppo.masked_mean(x, inputs["mask"]).item() for x in tables]
    close(ours, [float(x) for x in trl["losses"]], rtol=1e-4)
    assert 0 < ours[2] < 1 and 0 < ours[3] < 1


def test_the_adaptive_coefficient_is_trls(trl):
    coef, ours = 0.2, []
    for kl in KLS:
        coef = ppo.adaptive_kl_coef(coef, kl, 6.0, 10_000, 128)
        ours.append(coef)
    close(ours, trl["coefficients"], rtol=1e-9)


def test_scores_are_trls(inputs, trl, tiny_preference_model):
    """A Llama with a score, read at the last real token. TRL pads on both sides, here only on the right."""
    model = AutoModelForSequenceClassification.from_pretrained(tiny_preference_model("llama")).eval()
    rows = [row[row != PAD] for row in inputs["texts"]]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = reward.length_mask(torch.tensor([len(row) for row in rows]), ids.shape[1])
    with torch.no_grad():
        close(reward.sequence_logits(model, ids, mask).squeeze(-1), trl["scores"], atol=1e-5)
