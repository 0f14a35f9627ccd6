"""The gradient of each optimizer step: minibatches with different numbers of tokens."""

import pytest
import torch
from accelerate import Accelerator
from run_tools import SMALL, eos_prone

pytest_plugins = ["run_fixtures"]


def record_steps(module, monkeypatch):
    """A list that fills with (number of tokens in the loss, gradients before clipping) of each step."""
    steps, counts = [], []
    loss, clip = module.clipped_policy_loss, Accelerator.clip_grad_norm_

    def counted(logprobs, *rest):
        counts.append((logprobs != 0).sum().item())  # 0 after the end of a response
        return loss(logprobs, *rest)

    def recorded(self, parameters, max_norm):
        parameters = list(parameters)
        gradients = {i: p.grad.clone() for i, p in enumerate(parameters) if p.grad is not None}
        steps.append((sum(counts), gradients))
        counts.clear()
        return clip(self, parameters, max_norm)

    monkeypatch.setattr(module, "clipped_policy_loss", counted)
    monkeypatch.setattr(Accelerator, "clip_grad_norm_", recorded)
    return steps


@pytest.mark.parametrize("name", ["ppo_sentiment", "ppo_dialog", "grpo_math"])
def test_a_minibatch_is_divided_by_its_own_number_of_tokens(
    scripts, small, tiny_lm, tmp_path, monkeypatch, name
):
    """With learning rate 0, the mean of 4 minibatches, weighted by tokens, is the gradient of the batch."""
    module = scripts[name]
    flags = dict(
        model_name_or_path=eos_prone(tiny_lm, tmp_path / "lm"),
        learning_rate=0.0,
        num_ppo_epochs=1,
        response_length=12,
        total_episodes=16,
    )
    if name == "ppo_sentiment":
        flags |= dict(stop_token="eos", response_min_length=1, response_length=12)
    steps = {}
    for minibatches in (1, 4):
        n = 16 // minibatches
        with monkeypatch.context() as patch:
            steps[minibatches] = record_steps(module, patch)
            batch = dict(per_device_train_batch_size=n, num_mini_batches=minibatches)
            module.train(small(name, f"run{minibatches}", **(SMALL[name] | flags | batch)))
    [(all_tokens, whole)] = steps[1]
    counts = [count for count, _ in steps[4]]
    assert sum(counts) == all_tokens and len(set(counts)) > 1
    for parameter, gradient in whole.items():
        mean = sum(count * gradients[parameter] for count, gradients in steps[4]) / all_tokens
        torch.testing.assert_close(mean, gradient, rtol=1e-3, atol=1e-5 * gradient.abs().max().item() + 1e-9)
