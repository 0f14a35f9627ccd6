"""What the tests of whole runs share: small flags, readers of a run folder, and a way to start a script as a process."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
SMALL = {
    "ppo_sentiment": dict(
        dtype="float32", total_episodes=8, per_device_train_batch_size=4, num_mini_batches=2, num_ppo_epochs=2, learning_rate=1e-2,
        query_max_length=6, response_min_length=3, response_length=6, min_text_length=0, num_eval_prompts=4, num_sample_generations=1,
        local_rollout_forward_batch_size=8, kl_target=None,
    ),
    "sft": dict(
        dtype="float32", max_length=128, num_train_rows=16, num_eval_rows=4, num_samples=1, per_device_train_batch_size=4,
        learning_rate=1e-2,
    ),
    "rloo_tldr": dict(
        dtype="float32", total_episodes=16, per_device_train_batch_size=4, num_mini_batches=2, num_ppo_epochs=2, learning_rate=1e-2,
        max_prompt_length=200, response_length=6, num_examples=4, num_sample_generations=1, local_rollout_forward_batch_size=8,
        missing_eos_penalty=1.0,
    ),
    "reward_model": dict(
        dtype="float32", max_length=64, num_eval_rows=8, num_train_epochs=1.0, per_device_train_batch_size=8, learning_rate=1e-2,
    ),
}  # fmt: skip


def maker(scripts, world, root):
    """make(script, folder="run", **changes) -> Args of a run of a second or two; the folder is in root."""

    def make(script, folder="run", **changes):
        start = dict(model_name_or_path=world.classifier() if script == "reward_model" else world.lm(), dataset_name=world.reviews)
        if script == "ppo_sentiment":
            start["reward_model_path"] = world.classifier()
        if script == "rloo_tldr":
            start |= dict(reward_model_path=world.preference_model(), dataset_name=world.posts)
        return scripts[script].Args(**(start | SMALL[script] | dict(output_dir=str(root / folder)) | changes))

    return make


def rows_of(folder, name="metrics.jsonl"):
    """The objects of a file of lines in a run folder."""
    return [json.loads(line) for line in (Path(folder) / name).read_text().splitlines()]


def timeless(rows):
    """Rows of metrics without what the clock decides."""
    return [{name: x for name, x in row.items() if name != "eps" and not name.startswith("perf/")} for row in rows]


def weights(folder):
    """Name -> tensor of model.safetensors in a folder."""
    return load_file(Path(folder) / "model.safetensors")


def same(a, b):
    """Two dicts of tensors are equal to the bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def distance(a, b):
    """The largest difference between two dicts of tensors."""
    assert a.keys() == b.keys()
    return max((a[name].float() - b[name].float()).abs().max().item() for name in a)


def spy(monkeypatch, module, name):
    """Record the calls of module.name. -> a list that fills with (arguments, result)"""
    calls, original = [], getattr(module, name)

    def recorded(*args, **kwargs):
        calls.append((args, original(*args, **kwargs)))
        return calls[-1][1]

    monkeypatch.setattr(module, name, recorded)
    return calls


def reward_file(folder, body, name="reward"):
    """FILE.py:function with the given lines as its body."""
    path = folder / f"{name}.py"
    path.write_text("import os\n\ndef reward(prompts, responses):\n" + "".join(f"    {line}\n" for line in body.splitlines()))
    return f"{path}:reward"


def write_rows(folder, **splits):
    """A folder of jsonl, one file a split. -> str"""
    folder.mkdir(parents=True)
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def flags_of(args):
    """The command line that gives these Args, every field named."""
    words = []
    for field in fields(args):
        value, name = getattr(args, field.name), field.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif field.name not in ("recipe", "resume"):
            words += [f"--{name}", str(value)]
    return words


def free_port():
    """A TCP port that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def start_process(words, folder, **env):
    """A command in its own process, on one core."""
    env = os.environ | dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", COLUMNS="200") | env
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    return subprocess.Popen([str(word) for word in words], cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def script_words(script, args):
    """The command that starts a script alone."""
    return [sys.executable, ROOT / f"{script}.py", *flags_of(args)]


def torchrun_words(script, args, processes):
    """The command that starts a script in several processes."""
    head = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", processes, "--master_port", free_port()]
    return [*head, ROOT / f"{script}.py", *flags_of(args)]
