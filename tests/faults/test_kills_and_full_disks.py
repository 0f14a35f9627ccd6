"""Faults in a long run: full disks, functions that fail, models that overflow, damaged checkpoints."""

import os
import resource
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from run_tools import (
    ALL,
    SIX_UPDATES,
    assert_same_run,
    flags_of,
    one_line,
)

pytest_plugins = ["run_fixtures"]


@pytest.fixture
def script(scripts):
    """ppo_sentiment.py as a module."""
    return scripts["ppo_sentiment"]


def resume(module, folder):
    """Continue a run in this process."""
    module.train(module.parse_args(["--resume", str(folder)]))


def checkpoints(folder):
    """The names in checkpoints/, drafts included."""
    return sorted(path.name for path in (Path(folder) / "checkpoints").iterdir())


# ---- Disks -------------------------------------------------------------------------------------------------


@contextmanager
def read_only(folder):
    """A folder that nobody can write to, not even root."""
    folder.mkdir()
    is_root = os.geteuid() == 0
    if is_root:
        mount = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", folder]
        if subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("root can write everywhere and may not mount here")
    else:
        folder.chmod(0o555)
    try:
        yield folder
    finally:
        if is_root:
            subprocess.run(["umount", folder], capture_output=True)
        else:
            folder.chmod(0o755)


def limit_file_size(size):
    """No file may grow beyond so many bytes, as on a full disk."""
    hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard_limit))


@pytest.fixture
def unlimited():
    """Files may grow again after the test."""
    yield
    limit_file_size(resource.RLIM_INFINITY)


def test_read_only_folder(script, small, capsys, tmp_path):
    """One line that names the folder, before the first update."""
    with read_only(tmp_path / "locked") as folder:
        args = small("ppo_sentiment", output_dir=str(folder / "run"))
        assert str(folder) in one_line(script, flags_of(args), capsys)


def test_disk_full_while_a_checkpoint_is_saved(script, small, monkeypatch, capsys, unlimited):
    """One line names the checkpoint. The one before is complete, and --resume works."""
    flags = SIX_UPDATES["ppo_sentiment"]
    _, whole = script.train(small("ppo_sentiment", "whole", **flags))
    args = small("ppo_sentiment", "parts", **flags)
    log = script.Run.log

    def log_then_limit(self, metrics, *rest):
        result = log(self, metrics, *rest)
        if metrics["update"] == 4:
            limit_file_size(20_000)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(script.Run, "log", log_then_limit)
        line = one_line(script, flags_of(args), capsys)
    limit_file_size(resource.RLIM_INFINITY)
    assert "checkpoints/000004" in line and "File too large" in line
    assert checkpoints(args.output_dir) == ["000002.pt", "draft"]
    resume(script, args.output_dir)
    assert_same_run(whole, args.output_dir)


@pytest.mark.parametrize("name", ALL)
def test_disk_full_while_the_model_is_saved(scripts, small, monkeypatch, capsys, unlimited, name):
    """One line says so, and --resume then saves the model."""
    module = scripts[name]
    args = small(name)
    write = module.Run.write

    def write_then_limit(self, file, text):
        write(self, file, text)
        if file == "evaluation.json":
            limit_file_size(20_000)

    with monkeypatch.context() as patch:
        patch.setattr(module.Run, "write", write_then_limit)
        line = one_line(module, flags_of(args), capsys)
    limit_file_size(resource.RLIM_INFINITY)
    assert "File too large" in line
    model = Path(args.output_dir) / "model/model.safetensors"
    assert not model.exists()
    resume(module, args.output_dir)
    assert model.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_full_file_system(script, small, capsys, tmp_path):
    """On a real full disk, all saved checkpoints are complete. With more space, --resume works."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=20M", "tmpfs", disk]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        flags = SIX_UPDATES["ppo_sentiment"]
        _, whole = script.train(small("ppo_sentiment", "whole", **flags))
        one_checkpoint = (whole / "checkpoints/000006.pt").stat().st_size
        size = int(2.5 * one_checkpoint) + 100_000
        subprocess.run(["mount", "-o", f"remount,size={size}", disk], check=True)
        flags = flags | dict(save_every=1, keep_checkpoints=99)
        args = small("ppo_sentiment", output_dir=str(disk / "run"), **flags)
        line = one_line(script, flags_of(args), capsys)
        assert "No space left on device" in line and "checkpoints/" in line
        saved = checkpoints(disk / "run")
        assert saved[-1] == "draft" and len(saved) > 1
        assert saved[:-1] == [f"{update:06d}.pt" for update in range(1, len(saved))]
        subprocess.run(["mount", "-o", "remount,size=40M", disk], check=True)
        resume(script, disk / "run")
        assert_same_run(whole, disk / "run")
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


# ---- A model that overflows --------------------------------------------------------------------------------


@pytest.mark.parametrize("name, rate", [(name, 1e20) for name in ALL] + [("ppo_sentiment", 1e3)])
def test_steps_that_ruin_the_model(scripts, small, capsys, name, rate):
    """One line says so. No model is saved, and no checkpoint with weights that are not finite."""
    flags = SIX_UPDATES[name] | dict(
        optimizer="torch.optim.SGD",
        learning_rate=rate,
        max_grad_norm=None,
        lr_scheduler_type="constant",
        save_every=1,
    )
    args = small(name, **flags)
    line = one_line(scripts[name], flags_of(args), capsys)
    assert "finite" in line and "--learning-rate" in line
    folder = Path(args.output_dir)
    assert not (folder / "model").exists()
    for path in folder.glob("checkpoints/*.pt"):
        state = torch.load(path, weights_only=True)
        assert all(x.isfinite().all() for x in state["parameters"].values())


# ---- Damaged runs ------------------------------------------------------------------------------------------


def test_damaged_runs(script, small, capsys):
    """A checkpoint that was cut off is named, and so is the run of a damaged args.json."""
    args = small("ppo_sentiment")
    script.train(args)
    folder = Path(args.output_dir)
    for path in (folder / "checkpoints/000001.pt", folder / "args.json"):
        path.write_bytes(path.read_bytes()[:100])
        line = one_line(script, ["--resume", str(folder)], capsys)
        assert str(path if path.suffix == ".pt" else folder) in line
