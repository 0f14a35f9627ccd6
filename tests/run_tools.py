"""Helpers for tests of whole runs: small flags, readers of run folders, and scripts as processes."""

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
ALL = ("ppo_sentiment", "ppo_dialog", "sft", "reward_model", "rloo_tldr", "grpo_math", "dpo_tldr")
SMALL = {  # flags of a run of about a second
    "ppo_sentiment": dict(
        dtype="float32",
        total_episodes=8,
        per_device_train_batch_size=4,
        num_mini_batches=2,
        num_ppo_epochs=2,
        learning_rate=1e-2,
        query_max_length=6,
        response_min_length=3,
        response_length=6,
        min_text_length=0,
        num_eval_prompts=4,
        num_sample_generations=1,
        local_rollout_forward_batch_size=8,
        kl_target=None,
    ),
    "ppo_dialog": dict(
        dtype="float32",
        total_episodes=8,
        per_device_train_batch_size=4,
        num_mini_batches=2,
        num_ppo_epochs=2,
        learning_rate=1e-2,
        utterance_end="eos",
        num_context_utterances=2,
        max_prompt_length=48,
        response_length=6,
        num_eval_prompts=4,
        num_sample_generations=1,
        local_rollout_forward_batch_size=8,
        kl_target=None,
        intent_reward="probability",
    ),
    "rloo_tldr": dict(
        dtype="float32",
        total_episodes=16,
        per_device_train_batch_size=4,
        num_mini_batches=2,
        num_ppo_epochs=2,
        learning_rate=1e-2,
        max_prompt_length=200,
        response_length=6,
        num_eval_prompts=4,
        num_sample_generations=1,
        local_rollout_forward_batch_size=8,
        missing_eos_penalty=1.0,
    ),
    "grpo_math": dict(
        dtype="float32",
        prompt_template=None,
        system_prompt=None,
        total_episodes=16,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        num_mini_batches=2,
        num_ppo_epochs=2,
        num_generations=2,
        kl_coef=0.1,
        learning_rate=1e-2,
        max_prompt_length=64,
        response_length=6,
        num_eval_prompts=4,
        num_eval_samples=2,
        num_sample_generations=1,
        local_rollout_forward_batch_size=8,
    ),
    "sft": dict(
        dtype="float32",
        max_length=128,
        num_train_rows=16,
        num_eval_prompts=4,
        num_samples=1,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
    ),
    "reward_model": dict(
        dtype="float32",
        max_length=64,
        num_eval_prompts=8,
        num_train_epochs=1.0,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
    ),
    "dpo_tldr": dict(
        dtype="float32",
        max_length=250,
        num_eval_pairs=8,
        num_train_epochs=1.0,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        num_eval_prompts=4,
        response_length=6,
    ),
}
SIX_UPDATES = {  # with these flags on top, a run has 6 updates, and everything that a checkpoint must hold
    "ppo_sentiment": dict(
        total_episodes=48,
        save_every=2,
        kl_target=0.5,
        kl_horizon=50,
        lr_scheduler_type="cosine",
        warmup_ratio=0.3,
    ),
    "ppo_dialog": dict(
        total_episodes=48,
        save_every=2,
        kl_target=0.5,
        kl_horizon=50,
        lr_scheduler_type="linear",
        warmup_ratio=0.3,
    ),
    "rloo_tldr": dict(
        total_episodes=48,
        save_every=2,
        whiten_rewards=True,
        lr_scheduler_type="cosine",
        warmup_ratio=0.3,
    ),
    "grpo_math": dict(
        total_episodes=48,
        save_every=2,
        lr_scheduler_type="cosine",
        warmup_ratio=0.3,
    ),
    "sft": dict(
        num_train_epochs=4.0,
        save_every=2,
        max_length=256,
        lr_scheduler_type="cosine",
        warmup_ratio=0.3,
    ),
    "reward_model": dict(save_every=2, min_prefix_length=4, lr_scheduler_type="linear"),
    "dpo_tldr": dict(save_every=2, lr_scheduler_type="cosine", warmup_ratio=0.3),
}
BY_HEART = [  # dialogs that a model learns by heart: some answers are questions
    (["Hello, who are you?", "I am Leo, and you?", "I am Nina."], [2, 2, 1]),
    (["Do you like tea?", "Yes, I like tea very much.", "Then come in."], [2, 1, 3]),
    (["Please open the door.", "Of course, I will open it.", "Thank you, my friend."], [3, 4, 1]),
    (["Where is the café?", "Déjà vu: the café is 3 € away."], [2, 1]),  # some letters are 2 or 3 tokens
    (["It is cold here.", "Why do you not close the window?"], [1, 2]),
]


# ---- Run folders -------------------------------------------------------------------------------------------


def maker(scripts, world, root):
    """make(script, folder="run", **changes) -> Args of a small run, whose folder is in root."""

    def make(script, folder="run", **changes):
        if script == "ppo_sentiment":
            places = dict(dataset_name=world.reviews, reward_model_path=world.classifier())
        elif script == "ppo_dialog":
            places = dict(dataset_name=world.dialogs, reward_model_path=world.intents())
        elif script == "rloo_tldr":
            places = dict(dataset_name=world.posts, reward_model_path=world.preference_model())
        elif script == "grpo_math":
            places = dict(dataset_name=world.tasks, reward_fn=[world.verifier])
        elif script == "dpo_tldr":
            places = dict(dataset_name=world.pairs, eval_dataset_name=world.posts, judge_fn=world.verifier)
        else:
            places = dict(dataset_name=world.reviews)
        places["model_name_or_path"] = world.classifier() if script == "reward_model" else world.lm()
        places["output_dir"] = str(root / folder)
        return scripts[script].Args(**(places | SMALL[script] | changes))

    return make


def rows_of(folder, name="metrics.jsonl"):
    """The objects in a file of a run folder that holds one per line."""
    return [json.loads(line) for line in (Path(folder) / name).read_text().splitlines()]


def timeless(rows):
    """Rows of metrics without those that depend on the clock."""
    kept = []
    for row in rows:
        kept.append({name: x for name, x in row.items() if name != "eps" and not name.startswith("perf/")})
    return kept


def weights(folder):
    """model.safetensors of a folder. -> dict: name -> tensor"""
    return load_file(Path(folder) / "model.safetensors")


def same(a, b):
    """True if two dicts of tensors are equal, bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def distance(a, b):
    """The largest difference between two dicts of tensors."""
    assert a.keys() == b.keys()
    return max((a[name].float() - b[name].float()).abs().max().item() for name in a)


def assert_same_run(one, other):
    """Models, value heads, metrics, samples and evaluation are bit-identical, except for clocks."""
    one, other = Path(one), Path(other)
    files = sorted(path.relative_to(one) for path in (one / "model").rglob("*.safetensors"))
    assert files
    for name in files:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    assert timeless(rows_of(one)) == timeless(rows_of(other))
    for name in ("samples.jsonl", "tokens.jsonl", "evaluation.json", "evaluation_samples.jsonl"):
        assert (one / name).exists() == (other / name).exists()
        if (one / name).exists():
            assert (one / name).read_text() == (other / name).read_text(), name


# ---- Models, data, functions -------------------------------------------------------------------------------


def spy(monkeypatch, module, name):
    """Record the calls of module.name. -> a list that fills with (arguments, result)"""
    calls = []
    original = getattr(module, name)

    def recorded(*args, **kwargs):
        result = original(*args, **kwargs)
        calls.append((args, result))
        return result

    monkeypatch.setattr(module, name, recorded)
    return calls


def without_check_of_models(monkeypatch, module):
    """Let a script train any model, and generate nothing before the evaluation."""
    name = next(name for name in vars(module) if name.startswith("check_") and name.endswith("_model"))
    monkeypatch.setattr(module, name, lambda *inputs: None)


def eos_prone(tiny_lm, folder):
    """tiny_lm with a final bias towards EOS, so that about one token in six is EOS. -> its folder, a str"""
    model = AutoModelForCausalLM.from_pretrained(tiny_lm())
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm())
    model.transformer.ln_f.bias.data += 5 * model.lm_head.weight[tokenizer.eos_token_id].detach()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def forget_reward_files(root):
    """Let the next run of this process import a file of the same name as one under root."""
    importlib.invalidate_caches()
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(root)):
            del sys.modules[name]


def reward_file(folder, body, name="reward"):
    """Write a reward function with these lines as its body. -> [FILE.py:function]"""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    path = folder / f"{name}.py"
    path.write_text("import os\n\ndef reward(prompts, completions, **columns):\n" + lines)
    return [f"{path}:reward"]


def write_rows(folder, **splits):
    """A data set: a folder with one jsonl file per split. -> its path, a str"""
    folder.mkdir(parents=True)
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


# ---- Ends of runs ------------------------------------------------------------------------------------------


def stop_after(monkeypatch, module, update, number=signal.SIGTERM):
    """Send this process a signal while the metrics of an update are logged."""
    log = module.Run.log

    def logged(self, metrics, *rest):
        if metrics["update"] == update:
            signal.raise_signal(number)
        return log(self, metrics, *rest)

    monkeypatch.setattr(module.Run, "log", logged)


def one_line(module, argv, capsys):
    """Call main(), which must end with exit code 2 and one line on stderr. -> that line"""
    with pytest.raises(SystemExit) as end:
        module.main(argv)
    lines = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and len(lines) == 1, lines
    assert lines[0].startswith(f"{module.__name__}.py: "), lines
    return lines[0]


# ---- Processes ---------------------------------------------------------------------------------------------


def flags_of(args):
    """The command line that gives these Args, with every field named."""
    words = []
    for field in fields(args):
        value = getattr(args, field.name)
        flag = field.name.replace("_", "-")
        if field.name in ("recipe", "resume"):
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            words += [f"--{flag}", *map(str, value)]
        else:
            words += [f"--{flag}", str(value)]
    return words


def free_port():
    """A TCP port that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def start_process(words, folder, terminal=None, **env):
    """Start a command on one core. Its output is kept, or goes to a terminal."""
    env = os.environ | dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", COLUMNS="200") | env
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    output = terminal or subprocess.PIPE
    return subprocess.Popen(
        [str(word) for word in words],
        cwd=folder,
        env=env,
        text=True,
        stdin=terminal,
        stdout=output,
        stderr=output,
    )


def script_words(script, args):
    """The command that runs a script in one process."""
    return [sys.executable, ROOT / f"{script}.py", *flags_of(args)]


def torchrun_words(script, args, processes):
    """The command that runs a script in several processes."""
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    torchrun += ["--nproc_per_node", processes, "--master_port", free_port()]
    return [*torchrun, ROOT / f"{script}.py", *flags_of(args)]
