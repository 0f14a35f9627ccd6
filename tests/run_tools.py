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
from transformers import AutoModelForCausalLM, AutoTokenizer

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
    "ppo_dialog": dict(
        dtype="float32", total_episodes=8, per_device_train_batch_size=4, num_mini_batches=2, num_ppo_epochs=2, learning_rate=1e-2,
        utterance_end="eos", num_context_utterances=2, max_prompt_length=48, response_length=6, num_eval_prompts=4,
        num_sample_generations=1, local_rollout_forward_batch_size=8, kl_target=None, intent_reward="probability",
    ),
    "reward_model": dict(
        dtype="float32", max_length=64, num_eval_rows=8, num_train_epochs=1.0, per_device_train_batch_size=8, learning_rate=1e-2,
    ),
}  # fmt: skip

BY_HEART = [  # what a talker says: some answers are questions, some letters are two tokens or three
    (["Hello, who are you?", "I am Leo, and you?", "I am Nina."], [2, 2, 1]),
    (["Do you like tea?", "Yes, I like tea very much.", "Then come in."], [2, 1, 3]),
    (["Please open the door.", "Of course, I will open it.", "Thank you, my friend."], [3, 4, 1]),
    (["Where is the café?", "Déjà vu: the café is 3 € away."], [2, 1]),
    (["It is cold here.", "Why do you not close the window?"], [1, 2]),
]


def maker(scripts, world, root):
    """make(script, folder="run", **changes) -> Args of a run of a second or two; the folder is in root."""

    def make(script, folder="run", **changes):
        start = dict(model_name_or_path=world.classifier() if script == "reward_model" else world.lm(), dataset_name=world.reviews)
        if script == "ppo_sentiment":
            start["reward_model_path"] = world.classifier()
        if script == "ppo_dialog":
            start |= dict(reward_model_path=world.intents(), dataset_name=world.dialogs)
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


def eos_prone(tiny_lm, folder):
    """tiny_lm with a final bias along the embedding of EOS, so that about one token in six is EOS. -> str"""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_lm()), AutoTokenizer.from_pretrained(tiny_lm())
    model.transformer.ln_f.bias.data += 5 * model.lm_head.weight[tokenizer.eos_token_id].detach()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


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


def start_process(words, folder, terminal=None, **env):
    """A command in its own process, on one core; its output is kept, or it sits at a terminal."""
    env = os.environ | dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", COLUMNS="200") | env
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    ends = dict(stdin=terminal, stdout=terminal or subprocess.PIPE, stderr=terminal or subprocess.PIPE)
    return subprocess.Popen([str(word) for word in words], cwd=folder, env=env, text=True, **ends)


def script_words(script, args):
    """The command that starts a script alone."""
    return [sys.executable, ROOT / f"{script}.py", *flags_of(args)]


def torchrun_words(script, args, processes):
    """The command that starts a script in several processes."""
    head = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", processes, "--master_port", free_port()]
    return [*head, ROOT / f"{script}.py", *flags_of(args)]
