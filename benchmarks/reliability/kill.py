"""Kill runs at random moments, resume them, and compare the result with an uninterrupted run, bit for bit.

    python benchmarks/reliability/kill.py                     # 50 SIGKILLs, SIGTERMs and SIGINTs for each script
    python benchmarks/reliability/kill.py --kills 5 --signals KILL --scripts sft --eval-every 1

A run has 8 updates, with models of checkpoints/, the first rows of data/, and a checkpoint after each update. Runs
are forked from a process that has imported everything, so one takes about a second. Every second signal is aimed at
a save: it comes within 20 ms after the run began to write a checkpoint or the final model. The others come at any
time between start and end.

Each line of results/reliability/kills.jsonl is one signal: when it came, how the process ended, which checkpoints
there were, and whether the resumed run ended with the same model, metrics, samples and tables (times are not
compared).
"""

import argparse
import gzip
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import accelerate
import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

COMMON = "--dtype float32 --save-every 1 --lr-scheduler-type linear --learning-rate 1e-3"
SUPERVISED = (
    f"{COMMON} --max-length 64 --per-device-train-batch-size 8 --num-train-epochs 1.34 --num-eval-prompts 8"
)
RL = (
    f"{COMMON} --num-mini-batches 2 --num-ppo-epochs 1 --per-device-train-batch-size 4 --total-episodes 64 "
    "--num-sample-generations 4 --local-rollout-forward-batch-size 8"
)
RUNS = {  # script -> data set, flags
    "sft": (
        "reviews",
        f"{SUPERVISED} --model-name-or-path checkpoints/reviews-lm --no-packing --num-samples 2",
    ),
    "reward_model": (
        "reviews",
        f"{SUPERVISED} --model-name-or-path checkpoints/reviews-sentiment --min-prefix-length 4",
    ),
    "ppo_sentiment": (
        "reviews",
        f"{RL} --model-name-or-path checkpoints/reviews-lm --reward-model-path checkpoints/reviews-sentiment "
        "--num-eval-prompts 4 --kl-horizon 50",
    ),
    "ppo_dialog": (
        "dialogs",
        f"{RL} --model-name-or-path checkpoints/dialogs-lm --reward-model-path checkpoints/dialogs-intent "
        "--num-eval-prompts 4 --response-length 8 --max-prompt-length 64",
    ),
    "rloo_tldr": (
        "tldr",
        f"{RL} --model-name-or-path checkpoints/tldr-sft --reward-model-path checkpoints/tldr-reward "
        "--num-eval-prompts 4 --response-length 8 --rloo-k 2",
    ),
    "grpo_math": (
        "arithmetic",
        f"{RL} --model-name-or-path checkpoints/arithmetic-sft --prompt-template None --system-prompt None "
        "--max-prompt-length 64 --gradient-accumulation-steps 1 --num-generations 4 --response-length 16 "
        "--num-eval-prompts 4 --num-eval-samples 2",
    ),
    "grpo_tools": (
        "calculator",
        f"{RL} --model-name-or-path checkpoints/tools-sft --prompt-template None --tools data/tools.py:calculator "
        "--reward-fn data/math_rewards.py:correct --max-prompt-length 64 --gradient-accumulation-steps 1 "
        "--num-generations 4 --response-length 48 --num-eval-prompts 4 --num-eval-samples 2",
    ),
    "dpo_tldr": (
        "tldr-preference",
        f"{COMMON} --model-name-or-path checkpoints/tldr-sft --max-length 250 --per-device-train-batch-size 8 "
        "--num-train-epochs 1.34 --num-eval-pairs 8 --num-eval-prompts 4 --response-length 8",
    ),
}
COMPARED = (
    "model/model.safetensors",
    "model/value_head.safetensors",
    "metrics.jsonl",
    "samples.jsonl",
    "tokens.jsonl",
    "evaluation.json",
    "evaluation_samples.jsonl",
)


def fork(module, argv, log):
    """Run the script in a child. -> its id, the end of a pipe that gets a byte when something is saved"""
    told, tell = os.pipe()
    child = os.fork()
    if child:
        os.close(tell)
        return child, told
    code = 1
    try:
        os.close(told)
        # A shell's background jobs ignore SIGINT, and so would the run.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        torch.set_num_threads(1)

        def telling(function):
            def wrapped(*args, **kwargs):
                os.write(tell, b"s")
                return function(*args, **kwargs)

            return wrapped

        for owner, name in (
            (accelerate.Accelerator, "save_state"),
            (transformers.PreTrainedModel, "save_pretrained"),
        ):
            setattr(owner, name, telling(getattr(owner, name)))
        module.main(argv)
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except KeyboardInterrupt:  # before the run had its own handler
        code = 130
    finally:
        sys.stdout.flush()
        os._exit(code)


def wait(child, told):
    """-> exit code; minus the signal's number if it ended the process"""
    status = os.waitpid(child, 0)[1]
    os.close(told)
    return os.waitstatus_to_exitcode(status)


def content(path):
    """What is compared of a file: bytes, or lines without clocks. None if there is no file."""
    if not path.exists():
        return None
    if path.suffix != ".jsonl":
        return path.read_bytes()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        {name: x for name, x in row.items() if name != "eps" and not name.startswith("perf/")} for row in rows
    ]


class Whole:
    """An uninterrupted run of a script: what it wrote, how long it took, and how often it saved."""

    def __init__(self, script, data, work, eval_every):
        self.script, self.work = script, work
        self.module = importlib.import_module(script)
        data_name, flags = RUNS[script]
        self.words = [*flags.split(), "--dataset-name", str(data / data_name), "--eval-every", eval_every]
        for _ in range(2):  # the first run is slower
            folder = work / "whole"
            shutil.rmtree(folder, ignore_errors=True)
            start = time.time()
            child, told = fork(self.module, self.command(folder), work / "log")
            self.saves = 0
            while os.read(told, 1):
                self.saves += 1
            assert wait(child, told) == 0, (work / "log").read_text()
            self.seconds = time.time() - start
        self.contents = {name: content(folder / name) for name in COMPARED}

    def command(self, folder):
        return [*self.words, "--output-dir", str(folder)]

    def kill_and_resume(self, number, aim, rng):
        """One run, one signal, one run that continues. -> a line of kills.jsonl; None if it came too late"""
        folder, log = self.work / "parts", self.work / "log"
        shutil.rmtree(folder, ignore_errors=True)
        argv = self.command(folder)
        start = time.time()
        child, told = fork(self.module, argv, log)
        if aim == "save":
            for _ in range(rng.randint(1, self.saves)):
                os.read(told, 1)
            time.sleep(rng.uniform(0, 0.02))
        else:
            time.sleep(rng.uniform(0, self.seconds))
        seconds = time.time() - start
        if os.waitpid(child, os.WNOHANG) != (0, 0):
            os.close(told)
            return None
        os.kill(child, number)
        code = wait(child, told)
        line = {
            "script": self.script,
            "signal": signal.Signals(number).name,
            "aim": aim,
            "seconds": round(seconds, 3),
            "exit": code,
            "said_how_to_go_on": f"--resume {folder}" in log.read_text(),
            "checkpoints": sorted(path.parent.name for path in folder.glob("checkpoints/*/state.json")),
            "half_written": [path.name for path in folder.glob("draft*")],
            "resumed": (folder / "args.json").exists(),
        }
        again = ["--resume", str(folder)] if line["resumed"] else argv
        end = wait(*fork(self.module, again, self.work / "log2"))
        different = [name for name in COMPARED if content(folder / name) != self.contents[name]]
        if end or different:
            print(line, end, different)
            for path in (log, self.work / "log2"):
                print(path.read_text()[-2000:])
        return line | {"exit_of_the_rest": end, "same": not end and not different}


def write_data(folder):
    """The first rows of the data sets."""
    for name in {name for name, _ in RUNS.values()}:
        (folder / name).mkdir()
        for split, count in (("train", 48), ("test", 8)):
            path = ROOT / f"data/{name}/{split}.jsonl"
            text = path.read_text() if path.exists() else gzip.open(f"{path}.gz", "rt").read()
            lines = text.splitlines(True)
            (folder / name / f"{split}.jsonl").write_text("".join(lines[:count]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--signals", default="KILL,TERM,INT")
    parser.add_argument("--scripts", default=",".join(RUNS))
    parser.add_argument("--eval-every", default="0")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default=str(ROOT / "results/reliability/kills.jsonl"))
    args = parser.parse_args()
    # The scripts import them when they need them, and that takes seconds.
    for name in ("optimization", "trainer_callback", "models.gpt2.modeling_gpt2"):
        importlib.import_module(f"transformers.{name}")
    rng, counts, good = random.Random(args.seed), Counter(), Counter()
    with tempfile.TemporaryDirectory() as work:
        work = Path(work)
        write_data(work)
        for line in open(args.out) if Path(args.out).exists() else ():  # of a call that was stopped
            line = json.loads(line)
            counts[line["script"], line["signal"]] += 1
            good[line["script"], line["signal"]] += line["same"]
        for script in args.scripts.split(","):
            whole = Whole(script, work, work, args.eval_every)
            for number in [signal.Signals[f"SIG{name}"] for name in args.signals.split(",")]:
                key = script, number.name
                while counts[key] < args.kills:
                    aim = ("save", "any")[counts[key] % 2]
                    line = whole.kill_and_resume(number, aim, rng)
                    if line is None:
                        continue
                    with open(args.out, "a") as file:
                        file.write(json.dumps(line) + "\n")
                    counts[key] += 1
                    good[key] += line["same"]
                print(f"{script:14} {number.name:8} {good[key]} of {counts[key]} ended with the same bits")
    sys.exit(good != counts)


if __name__ == "__main__":
    main()
