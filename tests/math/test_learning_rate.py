"""The learning rate of every update: a warm-up, then a schedule."""

import math

import pytest
import torch
from conftest import module_with
from transformers import get_scheduler

script = module_with("learning_rate", "gae")
PEAK = 3e-4
SHAPES = {  # the share of the peak when a share x of the updates after the warm-up is over
    "constant": lambda x: 1.0,
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
}


@pytest.mark.parametrize("updates, warmup", [(1, 0), (7, 0), (20, 2), (33, 9), (10, 4), (5, 5)])
@pytest.mark.parametrize("kind", SHAPES)
def test_learning_rates(kind, updates, warmup):
    """A warm-up of w updates is 1/w, 2/w, ..., 1 of the peak. Then the first update has the whole peak."""
    args = script.Args(
        learning_rate=PEAK, lr_scheduler_type=kind, warmup_ratio=(warmup - 0.1) / updates if warmup else 0.0
    )
    rates = [script.learning_rate(args, update, updates) for update in range(1, updates + 1)]
    expected = [PEAK * (i + 1) / warmup for i in range(warmup)]
    expected += [PEAK * SHAPES[kind](i / (updates - warmup)) for i in range(updates - warmup)]
    assert rates == pytest.approx(expected, rel=1e-9)
    assert min(rates) > 0


@pytest.mark.parametrize("kind", ["constant_with_warmup", "linear", "cosine"])
def test_one_step_before_transformers(kind):
    """Our warm-up ends with the full rate in update w, theirs with update w + 1. They agree afterwards."""
    updates, w = 40, 8
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = get_scheduler(kind, optimizer, num_warmup_steps=w, num_training_steps=updates)
    theirs = []
    for _ in range(updates):
        theirs += scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()
    args = script.Args(
        learning_rate=PEAK, lr_scheduler_type=kind.removesuffix("_with_warmup"), warmup_ratio=w / updates
    )
    ours = [script.learning_rate(args, update, updates) for update in range(1, updates + 1)]
    assert ours[:w] == pytest.approx([PEAK * i / w for i in range(1, w + 1)])
    assert theirs[:w] == pytest.approx([PEAK * i / w for i in range(w)])
    assert ours[w:] == pytest.approx(theirs[w:])
