"""tokens.jsonl: the numbers of each token, which report.py shows."""

from collections import defaultdict

import pytest
import torch
from accelerate import Accelerator
from conftest import PPO, RL
from run_tools import rows_of, spy
from transformers import AutoModelForCausalLM

pytest_plugins = ["run_fixtures"]


def all_samples(scripts, small, name, **changes):
    """Train with samples in every update. -> Args, rows of tokens.jsonl, rows of metrics.jsonl"""
    args = small(name, **(dict(num_sample_generations=100) | changes))
    _, folder = scripts[name].train(args)
    return args, rows_of(folder, "tokens.jsonl"), rows_of(folder)


@pytest.mark.parametrize("name", PPO)
def test_log_probabilities_and_entropies(scripts, small, monkeypatch, name):
    """Without learning, they are those of the initial model, in plain transformers and without padding."""
    gathered = spy(monkeypatch, Accelerator, "gather")
    args, rows, _ = all_samples(scripts, small, name, learning_rate=0.0, temperature=0.7)
    batches = [b for _, b in gathered if isinstance(b, dict) and "ids" in b]  # one per update
    model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path).eval()
    shown = 0
    for update, b in enumerate(batches, 1):
        for i, row in enumerate(row for row in rows if row["update"] == update):
            n = len(row["ids"])
            assert n == b["lengths"][i] and len(row["logprob"]) == len(row["entropy"]) == n
            end = b["ids"].shape[1] - args.response_length
            prompt = b["ids"][i, :end][b["mask"][i, :end]]
            text = torch.cat([prompt, torch.tensor(row["ids"])])
            with torch.no_grad():
                logp = (model(text[None]).logits[0, len(prompt) - 1 : -1] / 0.7).log_softmax(-1)
            chosen = logp.gather(1, torch.tensor(row["ids"])[:, None]).squeeze(1)
            assert row["logprob"] == pytest.approx(chosen.tolist(), abs=1e-4)
            assert row["entropy"] == pytest.approx((-logp.exp() * logp).sum(1).tolist(), abs=1e-4)
            shown += 1
    assert shown == len(rows) > 0


@pytest.mark.parametrize("name", PPO)
def test_the_reward_of_ppo(scripts, small, name):
    """The KL penalty for each token, and the clipped score for the last one.

    With lam = 1, a return is the sum of the rewards to come. Advantages are returns - values, whitened.
    """
    flags = dict(total_episodes=24, learning_rate=1e-2, kl_coef=0.3, kl_target=None, lam=1.0)
    _, rows, _ = all_samples(scripts, small, name, **flags, score_clip=0.05)
    assert {row["update"] for row in rows} == {1, 2, 3}
    assert any(abs(kl) > 0.01 for row in rows for kl in row["kl"])
    by_update = defaultdict(list)
    for row in rows:
        rewards = [-0.3 * kl for kl in row["kl"]]
        rewards[-1] += max(-0.05, min(row["score"], 0.05))
        assert row["reward"] == pytest.approx(rewards, abs=1e-5)
        returns = [sum(rewards[t:]) for t in range(len(rewards))]
        assert row["return"] == pytest.approx(returns, abs=1e-4)
        raw = [x - value for x, value in zip(returns, row["value"])]
        by_update[row["update"]] += zip(raw, row["advantage"])
    del by_update[1]  # with clipped scores and values of 0, all may be equal
    for pairs in by_update.values():  # whitened: a rising line
        pairs.sort()
        (x0, y0), (x1, y1) = pairs[0], pairs[-1]
        slope = (y1 - y0) / (x1 - x0)
        assert slope > 0
        for x, y in pairs:
            assert y == pytest.approx(y0 + slope * (x - x0), abs=1e-3)


@pytest.mark.parametrize("name", RL)
def test_no_samples_no_file(scripts, small, name):
    _, folder = scripts[name].train(small(name, num_sample_generations=0))
    assert not (folder / "samples.jsonl").exists() and not (folder / "tokens.jsonl").exists()
