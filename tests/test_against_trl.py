"""The kernels against TRL 0.11, the last one whose PPO kept its parts in functions. Skipped where it is not installed.

It needs an older transformers than the scripts do, so it runs in an environment of its own, which TRL_PYTHON names:

    python3 -m venv /tmp/trl && /tmp/trl/bin/pip install torch==2.13.0
    /tmp/trl/bin/pip install trl==0.11.4 transformers==4.45.2 'datasets<4' 'numpy<2.3' rich tyro psutil
    TRL_PYTHON=/tmp/trl/bin/python python -m pytest tests/test_against_trl.py
"""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from conftest import shipping
from test_kernels import close, head_case, normal
from transformers import AutoModelForSequenceClassification

SIZES = dict(gamma=0.97, lam=0.9, cliprange=0.2, cliprange_value=0.3, kl_coef=0.3, temperature=0.7)
STOP, PAD, CONTEXT = 3, 1, 6
THERE = """
import sys, torch
from types import SimpleNamespace
from transformers import AutoModelForSequenceClassification
from trl import PPOTrainer
from trl.core import entropy_from_logits, logprobs_from_logits, masked_mean, masked_whiten
from trl.trainer.utils import AdaptiveKLController, first_true_indices, get_reward, truncate_response

x, s, stop, pad, context = torch.load(sys.argv[1])
mask, out = x["mask"].float(), {}
responses = truncate_response(stop, pad, x["tokens"])
out["lengths"] = first_true_indices(responses == pad)
out["mean"], out["white"] = masked_mean(x["a"], mask), masked_whiten(x["a"], mask)
out["white, with its mean"] = masked_whiten(x["a"], mask, shift_mean=False)
logits = x["hidden"] @ x["weight"].T / s["temperature"]
out["logprobs"], out["entropies"] = logprobs_from_logits(logits, x["words"]), entropy_from_logits(logits)
for penalty in ("kl", "mse"):
    me = SimpleNamespace(kl_ctl=SimpleNamespace(value=s["kl_coef"]), config=SimpleNamespace(kl_penalty=penalty))
    me._kl_penalty = lambda *row: PPOTrainer._kl_penalty(me, *row)
    out["rewards " + penalty] = PPOTrainer.compute_rewards(me, x["scores"], x["a"], x["b"], x["mask"].long())[0]
for whiten in (False, True):
    me = SimpleNamespace(config=SimpleNamespace(whiten_rewards=whiten, vf_coef=1.0, ratio_threshold=1e9, **s))
    out[f"gae {whiten}"] = PPOTrainer.compute_advantages(me, x["c"], x["b"], mask)[1:]
policy, value, stats = PPOTrainer.loss(me, x["a"], x["c"], logits, x["d"], x["b"], mask, x["e"], x["f"])
out["losses"] = [policy, value, stats["policy/clipfrac"], stats["val/clipfrac"], stats["policy/approxkl"]]
controller, out["coefficients"] = AdaptiveKLController(0.2, 6.0, 10_000), []
for kl in (0.1, 5.9, 6.1, 30.0, -2.0):
    controller.update(kl, 128)
    out["coefficients"].append(float(controller.value))
model = AutoModelForSequenceClassification.from_pretrained(sys.argv[3]).eval()
with torch.no_grad():
    out["scores"] = get_reward(model, x["texts"], pad, context)[1]
torch.save(out, sys.argv[2])
"""


def ragged_texts():
    """Left-padded prompts and right-padded responses, as TRL has them: no real token is the pad. -> [4, CONTEXT + 5]"""
    texts = torch.randint(4, 1000, (4, CONTEXT + 5), generator=torch.Generator().manual_seed(3))
    for row, (before, behind) in zip(texts, ((0, 0), (2, 1), (5, 4), (1, 3))):
        row[:before] = PAD
        row[len(row) - behind :] = PAD
    return texts


@pytest.fixture(scope="module")
def inputs():
    hidden, weight, words, _ = head_case(4, 5, 6, 11)
    tokens = torch.tensor([[9, 8, 3, 7, 3], [3, 5, 5, 5, 5], [7, 7, 7, 7, 7], [2, 4, 6, 8, 3]])
    mask = torch.arange(5) < torch.tensor([3, 1, 5, 4])[:, None]
    numbers = {name: normal(4, 5, seed=seed) / 2 for seed, name in enumerate("abcdef")}
    head = dict(hidden=hidden, weight=weight, words=words)
    return numbers | head | dict(tokens=tokens, mask=mask, scores=normal(4, seed=8), texts=ragged_texts())


@pytest.fixture(scope="module")
def trl(inputs, tiny_preference_model, tmp_path_factory):
    """What TRL's functions say of the inputs."""
    python, folder = os.environ.get("TRL_PYTHON", sys.executable), tmp_path_factory.mktemp("trl")
    if python == sys.executable and importlib.util.find_spec("trl") is None:
        pytest.skip("TRL is not installed: name a Python that has trl 0.11 in TRL_PYTHON (see the top of this file)")
    asked = subprocess.run([python, "-c", "from importlib.metadata import version; print(version('trl'))"], capture_output=True, text=True)
    if not asked.stdout.startswith("0.11."):
        pytest.skip(f"{python} has no trl 0.11 but {asked.stdout.strip() or 'none'}")
    torch.save((inputs, SIZES, STOP, PAD, CONTEXT), folder / "in.pt")
    words = [python, "-c", THERE, folder / "in.pt", folder / "out.pt", tiny_preference_model("llama")]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | dict(PYTHONPATH="", OMP_NUM_THREADS="1"))
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "out.pt")


@shipping("response_lengths")
def test_lengths_are_trls(k, inputs, trl):
    close(k.response_lengths(inputs["tokens"], STOP), trl["lengths"])


@shipping("masked_mean")
def test_means_are_trls(k, inputs, trl):
    close(k.masked_mean(inputs["a"], inputs["mask"]), trl["mean"])


@shipping("masked_whiten")
def test_whitening_is_trls_but_for_the_variance(k, inputs, trl):
    """Trick 20: TRL divides by n - 1, so that its numbers are smaller by sqrt((n - 1) / n); it leaves numbers outside the mask."""
    a, mask = inputs["a"], inputs["mask"]
    n = mask.sum()
    scale = torch.where(mask, ((n - 1) / n).sqrt(), 0.0)
    close(k.masked_whiten(a, mask) * scale, torch.where(mask, trl["white"], 0.0), rtol=1e-4)
    mean = k.masked_mean(a, mask)
    kept = k.masked_whiten(a, mask, shift_mean=False) - mean
    close(kept * scale, torch.where(mask, trl["white, with its mean"] - mean, 0.0), rtol=1e-4)


@shipping("token_logprobs")
def test_log_probabilities_are_trls(k, inputs, trl):
    logprobs, entropies = k.token_logprobs(inputs["hidden"], inputs["weight"], inputs["words"], SIZES["temperature"])
    close(logprobs, trl["logprobs"])
    close(entropies, trl["entropies"])


@shipping("token_rewards", "kl_per_token")
@pytest.mark.parametrize("estimator, penalty", [("k1", "kl"), ("k2", "mse")])
def test_rewards_are_trls(k, inputs, trl, estimator, penalty):
    """TRL also fills what stands behind the end."""
    mask = inputs["mask"]
    kl = k.kl_per_token(inputs["a"], inputs["b"], estimator)
    close(k.token_rewards(inputs["scores"], kl, mask.sum(1), SIZES["kl_coef"]), torch.where(mask, trl[f"rewards {penalty}"], 0.0))


@shipping("gae", "masked_whiten")
@pytest.mark.parametrize("whiten", [False, True])
def test_advantages_are_trls(k, inputs, trl, whiten):
    """Whitened advantages, and returns. Whitened rewards: only of the row that fills its tensor, since TRL whitens what stands behind the
    end too, where it is no longer 0 and becomes part of the return."""
    mask, n = inputs["mask"], inputs["mask"].sum()
    rewards = torch.where(mask, inputs["b"], 0.0)
    if whiten:
        mean = k.masked_mean(rewards, mask)
        rewards = (k.masked_whiten(rewards, mask, shift_mean=False) - mean) * ((n - 1) / n).sqrt() + mean
    advantages, returns = k.gae(rewards, inputs["c"], mask, SIZES["gamma"], SIZES["lam"])
    white, theirs = trl[f"gae {whiten}"]
    if whiten:
        assert (returns - theirs)[mask & ~mask.all(1, keepdim=True)].abs().max() > 0.1
    else:
        close(returns, torch.where(mask, theirs, 0.0), rtol=1e-4)
        close(k.masked_whiten(advantages, mask) * ((n - 1) / n).sqrt(), torch.where(mask, white, 0.0), rtol=1e-4, atol=1e-5)
    full = mask.all(1)
    close(returns[full], theirs[full], rtol=1e-4)


@shipping("clipped_policy_loss", "clipped_value_loss", "masked_mean")
def test_losses_are_trls(k, inputs, trl):
    """Means over the valid tokens of both losses, and how often each is clipped."""
    mask = inputs["mask"]
    old, new, old_values, values, advantages, returns = (inputs[name] for name in "abcdef")
    policy = k.clipped_policy_loss(new, old, advantages, SIZES["cliprange"])
    value = k.clipped_value_loss(values, old_values, returns, SIZES["cliprange_value"])
    clipped = (policy > -advantages * torch.exp(new - old)).float(), (value > 0.5 * (values - returns) ** 2).float()
    ours = [k.masked_mean(x, mask).item() for x in (policy, value, *clipped, 0.5 * (new - old) ** 2)]
    close(ours, [float(x) for x in trl["losses"]], rtol=1e-4)
    assert 0 < ours[2] < 1 and 0 < ours[3] < 1


@shipping("adaptive_kl_coef")
def test_the_adaptive_coefficient_is_trls(k, trl):
    coef, ours = 0.2, []
    for kl in (0.1, 5.9, 6.1, 30.0, -2.0):
        coef = k.adaptive_kl_coef(coef, kl, 6.0, 10_000, 128)
        ours.append(coef)
    close(ours, trl["coefficients"], rtol=1e-9)


@pytest.mark.parametrize("name", ["reward_model", "rloo_tldr"])
def test_scores_are_trls(scripts, inputs, trl, tiny_preference_model, name):
    """A Llama with a score, read at the last real token. TRL has its pads on the left and the right, here they are on the right alone."""
    module, texts = scripts[name], inputs["texts"]
    model = AutoModelForSequenceClassification.from_pretrained(tiny_preference_model("llama")).eval()
    rows = [row[row != PAD] for row in texts]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
    with torch.no_grad():
        close(module.sequence_logits(model, ids, mask).squeeze(-1), trl["scores"], atol=1e-5)
