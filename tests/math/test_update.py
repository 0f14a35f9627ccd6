"""The optimizer that the flags name, and weights on the way to a sharded copy."""

import pytest
import torch
from conftest import module_with

ppo = module_with("gae", "make_learner")


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


@pytest.mark.parametrize("kind", ["torch.optim.NoSuch", "no.such.module"])
def test_an_optimizer_that_does_not_exist(kind):
    with pytest.raises((AttributeError, ImportError), match="NoSuch|no"):
        learner_of(optimizer=kind)


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
