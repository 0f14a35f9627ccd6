"""Runs that are stopped and go on: the same bits as a run that was never stopped."""

import json
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from run_tools import reward_file, rows_of, script_words, start_process, timeless

pytest_plugins = ["run_fixtures"]
ALL = ("ppo_sentiment", "ppo_dialog", "sft", "reward_model", "rloo_tldr")
FILES = {script: ["model/model.safetensors"] + ["model/value_head.safetensors"] * script.startswith("ppo") for script in ALL}
LONG = {  # about 6 updates
    "ppo_sentiment": dict(total_episodes=48, save_every=2, kl_target=0.5, kl_horizon=50, lr_scheduler_type="cosine", warmup_ratio=0.3),
    "ppo_dialog": dict(total_episodes=48, save_every=2, kl_target=0.5, kl_horizon=50, lr_scheduler_type="linear", warmup_ratio=0.3),
    "sft": dict(num_train_epochs=3.4, save_every=2, max_length=256, lr_scheduler_type="cosine", warmup_ratio=0.3),
    "reward_model": dict(save_every=2, min_prefix_length=4, lr_scheduler_type="exponential"),
    "rloo_tldr": dict(total_episodes=48, save_every=2, whiten_rewards=True, lr_scheduler_type="cosine", warmup_ratio=0.3),
}


def assert_same_run(script, one, other):
    """Models, value head, metrics, samples and the last table are the same, to the bit; clocks apart."""
    one, other = Path(one), Path(other)
    for name in FILES[script]:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    assert timeless(rows_of(one)) == timeless(rows_of(other))
    if script != "reward_model":
        assert rows_of(one, "samples.jsonl") == rows_of(other, "samples.jsonl")
    assert json.loads((one / "evaluation.json").read_text()) == json.loads((other / "evaluation.json").read_text())


def stop_after(monkeypatch, module, update, number=signal.SIGTERM):
    """Send this process a signal while the metrics of an update are logged."""
    log = module.Run.log

    def logged(self, metrics, *rest):
        if metrics["update"] == update:
            signal.raise_signal(number)
        return log(self, metrics, *rest)

    monkeypatch.setattr(module.Run, "log", logged)


def stop_and_go_on(module, monkeypatch, args, update, capsys):
    """Run until a SIGTERM, then --resume to the end. -> run folder"""
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
        stop_after(patch, module, update)
        module.train(args)
    assert end.value.code == 143
    assert f"--resume {args.output_dir}" in capsys.readouterr().out
    assert not (Path(args.output_dir) / "model").exists() and (Path(args.output_dir) / f"checkpoints/{update:06d}/state.pt").exists()
    _, folder = module.train(module.parse_args(["--resume", args.output_dir]))
    assert f"resumed after update {update}" in capsys.readouterr().out
    return folder


@pytest.mark.parametrize("script", ALL)
def test_sigterm_then_resume(scripts, small, monkeypatch, capsys, script):
    """SIGTERM finishes the update, saves, says how to go on and exits with 143; what follows is bit for bit the same run."""
    _, whole = scripts[script].train(small(script, "whole", **LONG[script]))
    assert len(rows_of(whole)) == 6
    parts = stop_and_go_on(scripts[script], monkeypatch, small(script, "parts", **LONG[script]), 3, capsys)
    assert_same_run(script, whole, parts)


@pytest.mark.parametrize("flags", [
    dict(lora_r=4, optimizer="bitsandbytes.optim.Adam8bit"),
    dict(num_shared_layers=1, optimizer="torch.optim.AdamW", whiten_rewards=True),
    dict(value_model_path="critic", optimizer="bitsandbytes.optim.Lion"),
], ids=["lora", "shared", "critic"])  # fmt: skip
def test_resume_with_other_parts(scripts, small, monkeypatch, capsys, tiny_lm, flags):
    """Adapter, 8-bit optimizer state, frozen layers and a critic go on where they were."""
    if "value_model_path" in flags:
        flags = flags | dict(value_model_path=tiny_lm("qwen2"))
        monkeypatch.setitem(FILES, "ppo_sentiment", ["model/model.safetensors", "model/critic/model.safetensors",
                                                     "model/critic/value_head.safetensors"])  # fmt: skip
    module, flags = scripts["ppo_sentiment"], LONG["ppo_sentiment"] | dict(total_episodes=24) | flags
    _, whole = module.train(small("ppo_sentiment", "whole", **flags))
    parts = stop_and_go_on(module, monkeypatch, small("ppo_sentiment", "parts", **flags), 1, capsys)
    assert_same_run("ppo_sentiment", whole, parts)


def test_random_state_of_user_code(scripts, small, monkeypatch, capsys, tmp_path):
    """A reward function that draws from torch and random draws the same after a resume."""
    body = "import random, torch\nreturn [random.random() + torch.rand(1).item() for _ in prompts]"
    module, flags = scripts["ppo_sentiment"], dict(total_episodes=32, reward_fn=reward_file(tmp_path, body))
    random.seed(0)
    _, whole = module.train(small("ppo_sentiment", "whole", **flags))
    random.seed(0)
    parts = stop_and_go_on(module, monkeypatch, small("ppo_sentiment", "parts", **flags), 2, capsys)
    assert [row["objective/scores"] for row in rows_of(whole)] == [row["objective/scores"] for row in rows_of(parts)]


def updates_of(folder):
    """How many lines of metrics a run has written so far."""
    file = folder / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def test_kills_at_random_moments(scripts, small, tmp_path):
    """SIGKILL three times at random moments; the run that went on each time ends with the same bytes."""
    module, flags = scripts["ppo_sentiment"], dict(total_episodes=8 * 40, save_every=1)
    _, whole = module.train(small("ppo_sentiment", "whole", **flags))
    args, folder = small("ppo_sentiment", "parts", **flags), tmp_path / "parts"
    words, rng, killed = script_words("ppo_sentiment", args), random.Random(), 0
    for _ in range(3):
        process = start_process(words, tmp_path)
        seen = updates_of(folder)
        while process.poll() is None and updates_of(folder) <= seen:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 1.0))
        process.kill()
        _, errors = process.communicate()
        assert process.returncode in (-signal.SIGKILL, 0), errors
        killed += process.returncode != 0
        if process.returncode == 0:
            break
        words = [sys.executable, *words[1:2], "--resume", folder]  # also before its first checkpoint: from the start
    assert killed
    _, folder = module.train(module.parse_args(["--resume", str(folder)]))
    assert_same_run("ppo_sentiment", whole, folder)


def test_kill_while_a_checkpoint_is_written(scripts, small, monkeypatch):
    """What is half written has no checkpoint's name: the run goes on from the one before."""
    module, flags = scripts["ppo_sentiment"], dict(total_episodes=32, save_every=1)
    _, whole = module.train(small("ppo_sentiment", "whole", **flags))
    save = torch.save

    def torn(state, file):
        if state["update"] == 3:
            file.write(b"half a checkpoint")
            raise KeyboardInterrupt
        save(state, file)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch, "save", torn)
        module.train(small("ppo_sentiment", "parts", **flags))
    args = small("ppo_sentiment", "parts", **flags)
    _, folder = module.train(module.parse_args(["--resume", args.output_dir]))
    assert_same_run("ppo_sentiment", whole, folder)


def test_resume_from_an_older_checkpoint(scripts, small):
    """--resume RUN/checkpoints/NUMBER goes on from there, with the same end."""
    module, flags = scripts["ppo_sentiment"], dict(total_episodes=32, save_every=1, keep_checkpoints=4)
    _, whole = module.train(small("ppo_sentiment", "whole", **flags))
    _, folder = module.train(small("ppo_sentiment", "again", **flags))
    _, folder = module.train(module.parse_args(["--resume", str(folder / "checkpoints/000002")]))
    assert [row["update"] for row in rows_of(folder)] == [1, 2, 3, 4]
    assert_same_run("ppo_sentiment", whole, folder)


@pytest.mark.parametrize("script", ALL)
def test_resume_refuses_other_flags(scripts, small, script):
    """A flag that would change the result is named; one that would not is taken."""
    module, args = scripts[script], small(script, save_every=0)
    module.train(args)
    with pytest.raises(module.UserError, match="learning_rate"):
        module.parse_args(["--resume", args.output_dir, "--learning-rate", "0.5"])
    with pytest.raises(module.UserError, match="custom, not tiny"):
        module.parse_args(["tiny", "--resume", args.output_dir])
    assert module.parse_args(["--resume", args.output_dir, "--save-every", "7"]).save_every == 7
    again = module.parse_args(["--resume", args.output_dir, "--learning-rate", str(args.learning_rate)])
    assert (again.output_dir, again.dataset_name) == (args.output_dir, args.dataset_name)


@pytest.mark.parametrize("script", ALL)
def test_resume_latest(scripts, small, monkeypatch, tmp_path, script):
    """latest is the newest run of this script under runs/."""
    monkeypatch.chdir(tmp_path)
    module = scripts[script]
    _, older = module.train(small(script, output_dir=f"runs/{script}/b", seed=1))
    _, newer = module.train(small(script, output_dir=f"runs/{script}/a", seed=2))
    args = module.parse_args(["--resume", "latest"])
    assert Path(args.output_dir) == Path(newer) != Path(older) and args.seed == 2


def test_default_folder(scripts, small, monkeypatch, tmp_path):
    """Without --output-dir a run lies in runs/<script>/<recipe>-s<seed>-<time>."""
    monkeypatch.chdir(tmp_path)
    _, folder = scripts["sft"].train(small("sft", output_dir=None, seed=3))
    assert folder.parent == Path("runs/sft") and folder.name.startswith("custom-s3-")


def test_resume_of_a_finished_run(scripts, small):
    """It trains nothing more, and ends with the same model."""
    module, args = scripts["sft"], small("sft")
    _, folder = module.train(args)
    before, rows = (folder / "model/model.safetensors").read_bytes(), rows_of(folder)
    module.train(module.parse_args(["--resume", str(folder)]))
    assert (folder / "model/model.safetensors").read_bytes() == before and rows_of(folder) == rows
