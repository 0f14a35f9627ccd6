"""What the peers' scripts share: options, prompts, seconds by phase of each batch, one line of JSON at the end. Needs no TRL.

Every script of this folder runs one trainer of TRL as its documentation shows, on local models, and wraps the functions whose time or
output compare.py wants to know. Nothing of the trainers' work is changed.
"""

import argparse
import json
import os
import resource
import tempfile
import time
import warnings
from pathlib import Path

os.environ |= {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "WANDB_DISABLED": "true",
    "ACCELERATE_USE_CPU": "true",
}
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
warnings.filterwarnings("ignore")

import torch  # noqa: E402


def parse(**defaults):
    """The options of all scripts; a keyword changes a default, or adds an option of that name."""
    options = dict(
        model="",
        prompts="",
        batches=4,
        batch=64,
        prompt_tokens=64,
        response_length=53,
        temperature=0.7,
        epochs=2,
        mini_batches=2,
        micro_batch=8,
        rollout_batch=64,
        learning_rate=3e-6,
        seed=0,
    )
    parser = argparse.ArgumentParser()
    for name, value in (options | defaults).items():
        kind = dict(action="store_true") if value is False else dict(type=type(value), default=value)
        parser.add_argument(f"--{name.replace('_', '-')}", **kind)
    args = parser.parse_args()
    args.out = tempfile.mkdtemp()
    torch.manual_seed(args.seed)
    return args


def read_prompts(folder, column="prompt"):
    """The texts of a folder's train.jsonl."""
    return [json.loads(line)[column] for line in (Path(folder) / "train.jsonl").read_text().splitlines()]


def response_tokens(tokens, stop_ids):
    """Tokens up to and including the first of stop_ids, summed over the rows. [B, T] -> int"""
    stop = torch.isin(tokens, torch.tensor(stop_ids))
    return int(torch.where(stop.any(1), stop.int().argmax(1) + 1, tokens.shape[1]).sum())


class Clock:
    """Seconds of each batch, of its rollout and of its training, and what was counted in it."""

    def __init__(self):
        self.batches = []
        self.start()

    def start(self):
        self.began, self.current = time.perf_counter(), {}

    def count(self, **numbers):
        for name, number in numbers.items():
            self.current[name] = self.current.get(name, 0) + number

    def timed(self, phase, function):
        """The function, its seconds added to a phase."""

        def inner(*args, **kwargs):
            began = time.perf_counter()
            out = function(*args, **kwargs)
            self.count(**{phase: time.perf_counter() - began})
            return out

        return inner

    def until_training(self, function):
        """The function, whose first call with gradients in a batch ends the rollout."""

        def inner(*args, **kwargs):
            if torch.is_grad_enabled() and "rollout" not in self.current:
                self.count(rollout=time.perf_counter() - self.began)
            return function(*args, **kwargs)

        return inner

    def end_batch(self):
        seconds = time.perf_counter() - self.began
        self.batches.append(
            self.current | dict(seconds=seconds, train=seconds - self.current.get("rollout", 0.0))
        )
        self.start()


def batches(clock, steps=1):
    """A callback for a trainer: a batch ends after so many optimizer steps."""
    from transformers import TrainerCallback

    class Batches(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            clock.start()

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step % steps == 0:
                clock.end_batch()

    return Batches()


def report(clock, *packages, **extra):
    """The line of JSON that compare.py reads."""
    versions = {package.__name__: package.__version__ for package in (torch, *packages)}
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(
        json.dumps(dict(batches=clock.batches, peak_memory_mb=memory, versions=versions, **extra)), flush=True
    )
