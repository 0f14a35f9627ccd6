"""Faults in a long run: full disks, and models that overflow.

The run ends in a traceback. The checkpoint before is whole, and --resume goes on from it.
"""

import resource
from pathlib import Path

import pytest
from run_tools import ALL, SIX_UPDATES, assert_same_run
from safetensors.torch import load_file

pytest_plugins = ["run_fixtures"]
SCRIPT = "ppo_sentiment"
FULL = "File too large|No space left|unexpected pos"  # the last one is torch.save


def resume(module, folder):
    """Continue a run in this process."""
    module.train(module.parse_args(["--resume", str(folder)]))


# ---- Disks -------------------------------------------------------------------------------------------------


def limit_file_size(size):
    """No file may grow beyond so many bytes, as on a full disk."""
    hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard_limit))


@pytest.fixture
def unlimited():
    """Files may grow again after the test."""
    yield
    limit_file_size(resource.RLIM_INFINITY)


def test_disk_full_while_a_checkpoint_is_saved(script, small, monkeypatch, unlimited):
    """The one before is complete, and --resume works."""
    flags = SIX_UPDATES["ppo_sentiment"]
    _, whole = script.train(small("ppo_sentiment", "whole", **flags))
    args = small("ppo_sentiment", "parts", **flags)
    log = script.Run.log

    def log_then_limit(self, metrics):
        result = log(self, metrics)
        if metrics["update"] == 4:
            limit_file_size(20_000)
        return result

    with monkeypatch.context() as patch, pytest.raises(Exception, match=FULL):
        patch.setattr(script.Run, "log", log_then_limit)
        script.train(args)
    limit_file_size(resource.RLIM_INFINITY)
    assert [path.name for path in Path(args.output_dir, "checkpoints").iterdir()] == ["000002"]
    resume(script, args.output_dir)
    assert_same_run(whole, args.output_dir)


@pytest.mark.parametrize("name", ALL)
def test_disk_full_while_the_model_is_saved(scripts, small, monkeypatch, unlimited, name):
    """--resume then saves the model."""
    module = scripts[name]
    args = small(name)
    checkpoint = module.Run.checkpoint

    def checkpoint_then_limit(self, state):
        checkpoint(self, state)
        if state["update"] == self.updates:
            limit_file_size(20_000)

    with monkeypatch.context() as patch, pytest.raises(Exception, match=FULL):
        patch.setattr(module.Run, "checkpoint", checkpoint_then_limit)
        module.train(args)
    limit_file_size(resource.RLIM_INFINITY)
    model = Path(args.output_dir) / "model/model.safetensors"
    assert not model.exists() or len(model.read_bytes()) <= 20_000
    resume(module, args.output_dir)
    assert load_file(model)


# ---- A model that overflows --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_steps_that_ruin_the_model(scripts, small, name):
    """No model is saved, and no run ends as if it were complete."""
    flags = SIX_UPDATES[name] | dict(
        optimizer="torch.optim.SGD",
        learning_rate=1e20,
        max_grad_norm=None,
        lr_scheduler_type="constant",
    )
    args = small(name, **flags)
    with pytest.raises(Exception, match="finite|nan"):
        scripts[name].train(args)
    assert not (Path(args.output_dir) / "model").exists()
