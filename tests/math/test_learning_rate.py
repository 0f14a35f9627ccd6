"""The learning rate of every update, against transformers' schedules and against formulas."""

import math

import pytest
import torch
import transformers
from conftest import module_with

script = module_with("learning_rate", "gae")
PEAK = 3e-4
RUNS = [(1, 0.0), (7, 0.0), (20, 0.1), (33, 0.25), (10, 0.33), (5, 1.0)]  # updates, warmup_ratio


def our_rates(kind, updates, warmup_ratio):
    """The learning rate in update 1, 2, ..., updates."""
    args = script.Args(learning_rate=PEAK, lr_scheduler_type=kind, warmup_ratio=warmup_ratio)
    return [script.learning_rate(args, update, updates) for update in range(1, updates + 1)]


def transformers_rates(kind, updates, warmup_ratio):
    """The same from transformers.get_scheduler. Its Trainer rounds the warm-up up to whole steps, too."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
    warmup = math.ceil(warmup_ratio * updates)
    scheduler = transformers.get_scheduler(kind, optimizer, warmup, updates)
    rates = []
    for _ in range(updates):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("updates, warmup_ratio", RUNS)
@pytest.mark.parametrize(
    "ours, theirs", [("constant", "constant_with_warmup"), ("linear", "linear"), ("cosine", "cosine")]
)
def test_learning_rates_are_those_of_transformers(ours, theirs, updates, warmup_ratio):
    rates = our_rates(ours, updates, warmup_ratio)
    assert rates == pytest.approx(transformers_rates(theirs, updates, warmup_ratio), rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("updates, warmup_ratio", RUNS)
def test_exponential_learning_rates(updates, warmup_ratio):
    """A linear warm-up, then the same factor from each update to the next: 1 % after the last one."""
    warmup = math.ceil(warmup_ratio * updates)
    expected = [PEAK * i / warmup for i in range(warmup)]
    for i in range(updates - warmup):
        expected.append(PEAK * math.exp(math.log(0.01) * i / (updates - warmup)))
    assert our_rates("exponential", updates, warmup_ratio) == pytest.approx(expected, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("kind", ["linear", "cosine", "exponential"])
def test_without_warmup_the_first_rate_is_the_full_one_and_it_only_falls(kind):
    rates = our_rates(kind, 50, 0.0)
    assert rates[0] == PEAK
    assert all(late < early for early, late in zip(rates, rates[1:]))
    assert 0 < rates[-1] < 0.05 * PEAK
