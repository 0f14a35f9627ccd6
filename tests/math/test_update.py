"""The optimizer that the flags name, and the learning rate of every update: a warm-up, then a schedule."""

import math

import pytest
import torch

import ppo_sentiment as ppo

PEAK = 3e-4
SHAPES = {  # the share of the peak when a share x of the updates after the warm-up is over
    "constant": lambda x: 1.0,
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
}


def learner_of(**flags):
    """A layer with a gradient, and its optimizer as train makes it."""
    args = ppo.Args(dtype="float32", **flags)
    layer = torch.nn.Linear(3, 1)
    layer.bias.requires_grad_(False)
    learner, optimizer = ppo.make_learner(layer, args, ppo.start_accelerator(args))
    learner(torch.ones(2, 3)).sum().backward()
    return learner, optimizer


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("torch.optim.Adam", dict(lr=0.1, eps=1e-3, weight_decay=0, fused=True)),
        ("torch.optim.AdamW", dict(lr=0.1, eps=1e-3, weight_decay=0.01, fused=True)),
        ("torch.optim.SGD", dict(lr=0.1, momentum=0)),  # has no epsilon
        ("torch.optim.NAdam", dict(lr=0.1, eps=1e-3)),
        ("torch.optim.Adafactor", dict(lr=0.1, eps=(None, 1e-3))),  # its epsilon is another one
    ],
)
def test_flags_reach_the_optimizer(kind, expected):
    """Only weights that are trained belong to it."""
    learner, optimizer = learner_of(optimizer=kind, learning_rate=0.1, adam_eps=1e-3)
    assert type(optimizer.optimizer).__name__ == kind.rpartition(".")[2]
    [group] = optimizer.param_groups
    assert {name: group[name] for name in expected} == expected
    [p] = group["params"]
    before = p.detach().clone()
    optimizer.step()
    assert p is learner.weight and (p < before).all()


def test_the_environment_does_not_change_a_run(monkeypatch):
    """accelerate reads settings of its own from it."""
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    accelerator = ppo.start_accelerator(ppo.Args(gradient_accumulation_steps=3))
    assert accelerator.gradient_accumulation_steps == 3
    learner, _ = ppo.make_learner(torch.nn.Linear(3, 1), ppo.Args(), accelerator)
    assert type(learner) is torch.nn.Linear
    assert learner(torch.ones(3)).dtype is torch.float32


@pytest.mark.parametrize("updates, warmup", [(1, 0), (7, 0), (20, 2), (33, 9), (10, 4), (5, 5)])
@pytest.mark.parametrize("kind", SHAPES)
def test_learning_rates(kind, updates, warmup):
    """A warm-up of w updates is 1/w, 2/w, ..., 1 of the peak. Then the first update has the whole peak."""
    args = ppo.Args(
        learning_rate=PEAK, lr_scheduler_type=kind, warmup_ratio=(warmup - 0.1) / updates if warmup else 0.0
    )
    rates = [ppo.learning_rate(args, update, updates) for update in range(1, updates + 1)]
    expected = [PEAK * (i + 1) / warmup for i in range(warmup)]
    expected += [PEAK * SHAPES[kind](i / (updates - warmup)) for i in range(updates - warmup)]
    assert rates == pytest.approx(expected, rel=1e-9)
    assert min(rates) > 0
