"""Kill runs at random moments, resume them, and compare the result with an uninterrupted run, bit for bit.

    python benchmarks/reliability/kill.py                     # 50 SIGKILLs, SIGTERMs and SIGINTs for each script
    python benchmarks/reliability/kill.py --kills 5 --signals KILL --scripts sft

A run has 8 updates, with models of checkpoints/, the first rows of data/, and a checkpoint after each update. Runs are
forked from a process that has imported everything, so one takes about a second. Every second signal is aimed at a
save: it comes within 20 ms after the run began to write a checkpoint or the final model. The others come at any time
between start and end.

Each line of results/reliability/kills.jsonl is one signal: when it came, how the process ended, which checkpoints there
were, and whether the resumed run ended with the same model, metrics, samples and tables (times are not compared).
"""

import argparse
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

import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
COMMON = dict(
    dtype="float32", save_every=1, keep_checkpoints=2, lr_scheduler_type="linear", learning_rate=1e-3
)
RL = COMMON | dict(model_name_or_path="checkpoints/reviews-lm", num_mini_batches=2, num_ppo_epochs=1, per_device_train_batch_size=4,
                   total_episodes=64, num_sample_generations=4, local_rollout_forward_batch_size=8)  # fmt: skip
RUNS = {
    "sft": COMMON | dict(model_name_or_path="checkpoints/reviews-lm", dataset_name="reviews", max_length=64, packing=False,
                         per_device_train_batch_size=8, num_train_epochs=1.34, num_eval_rows=8, num_samples=2),
    "reward_model": COMMON | dict(model_name_or_path="checkpoints/reviews-sentiment", dataset_name="reviews", max_length=64,
                                  per_device_train_batch_size=8, num_train_epochs=1.34, num_eval_rows=8, min_prefix_length=4),
    "ppo_sentiment": RL | dict(reward_model_path="checkpoints/reviews-sentiment", dataset_name="reviews", num_eval_prompts=4,
                          kl_horizon=50),
    "ppo_dialog": RL | dict(model_name_or_path="checkpoints/dialogs-lm", reward_model_path="checkpoints/dialogs-intent",
                            dataset_name="dialogs", num_eval_prompts=4, response_length=8, max_prompt_length=64),
    "rloo_tldr": RL | dict(model_name_or_path="checkpoints/tldr-sft", reward_model_path="checkpoints/tldr-reward", dataset_name="tldr",
                           num_examples=4, response_length=8, rloo_k=2),
    "grpo_math": RL | dict(model_name_or_path="checkpoints/arithmetic-sft", dataset_name="arithmetic", prompt_template=None,
                           system_prompt=None, gradient_accumulation_steps=1, num_generations=4, response_length=16,
                           num_examples=4, num_eval_samples=2),
}  # fmt: skip
COMPARED = (
    "model/model.safetensors",
    "model/value_head.safetensors",
    "metrics.jsonl",
    "samples.jsonl",
    "tokens.jsonl",
    "evaluation.json",
    "evaluation_samples.jsonl",
)


def words_of(flags):
    """A command line of these flags."""
    words = []
    for name, value in flags.items():
        name = name.replace("_", "-")
        words += (
            [f"--{'' if value else 'no-'}{name}"] if isinstance(value, bool) else [f"--{name}", str(value)]
        )
    return words


def fork(module, argv, log):
    """Run the script in a child. -> its id, the end of a pipe that says when something is saved"""
    told, tell = os.pipe()
    child = os.fork()
    if child:
        os.close(tell)
        return child, told
    code = 1
    try:
        os.close(told)
        signal.signal(
            signal.SIGINT, signal.default_int_handler
        )  # a shell's background jobs ignore SIGINT, and so would the run
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        torch.set_num_threads(1)

        def telling(function):
            def wrapped(*args, **kwargs):
                os.write(tell, b"s")
                return function(*args, **kwargs)

            return wrapped

        torch.save = telling(torch.save)
        transformers.PreTrainedModel.save_pretrained = telling(transformers.PreTrainedModel.save_pretrained)
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
    """-> exit code; minus the signal's number where it ended the process"""
    status = os.waitpid(child, 0)[1]
    os.close(told)
    return os.waitstatus_to_exitcode(status)


def content(path):
    """What is compared of a file: bytes, or lines without clocks."""
    if not path.exists() or path.suffix != ".jsonl":
        return path.read_bytes() if path.exists() else None
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        {name: x for name, x in row.items() if name != "eps" and not name.startswith("perf/")} for row in rows
    ]


def one(module, script, flags, number, aim, seconds, saves, rng, root, whole):
    """One run, one signal, one run that goes on. -> the line of kills.jsonl; None where the run had ended
    before the signal"""
    folder, log = root / "parts", root / "log"
    shutil.rmtree(folder, ignore_errors=True)
    argv = words_of(flags | dict(output_dir=str(folder)))
    began = time.time()
    child, told = fork(module, argv, log)
    if aim == "save":
        for _ in range(rng.randint(1, saves)):
            os.read(told, 1)
        time.sleep(rng.uniform(0, 0.02))
    else:
        time.sleep(rng.uniform(0, seconds))
    moment = time.time() - began
    if os.waitpid(child, os.WNOHANG) != (0, 0):
        os.close(told)
        return None
    os.kill(child, number)
    code, drafts = wait(child, told), [path.name for path in folder.glob("checkpoints/draft*")]
    checkpoints = sorted(path.name for path in folder.glob("checkpoints/[0-9]*"))
    said = f"--resume {folder}" in log.read_text()
    again = ["--resume", str(folder)] if (folder / "args.json").exists() else argv
    end = wait(*fork(module, again, root / "log2"))
    differ = [name for name in COMPARED if content(folder / name) != whole[name]]
    if end or differ:
        print(
            script,
            signal.Signals(number).name,
            code,
            end,
            differ,
            *((root / name).read_text()[-2000:] for name in ("log", "log2")),
        )
    return dict(
        script=script,
        signal=signal.Signals(number).name,
        aim=aim,
        seconds=round(moment, 3),
        exit=code,
        said_how_to_go_on=said,
        checkpoints=checkpoints,
        half_written=drafts,
        resumed=again is not argv,
        exit_of_the_rest=end,
        same=not end and not differ,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--signals", default="KILL,TERM,INT")
    parser.add_argument("--scripts", default=",".join(RUNS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default=str(ROOT / "results/reliability/kills.jsonl"))
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp())
    for name in ("reviews", "dialogs", "tldr", "arithmetic"):
        (root / name).mkdir()
        for split, count in (("train", 48), ("test", 8)):
            lines = (ROOT / f"data/{name}/{split}.jsonl").read_text().splitlines(True)
            (root / name / f"{split}.jsonl").write_text("".join(lines[:count]))
    for name in (
        "optimization",
        "models.gpt2.modeling_gpt2",
    ):  # a script imports them when it needs them, and that takes seconds
        importlib.import_module(f"transformers.{name}")
    modules = {script: importlib.import_module(script) for script in args.scripts.split(",")}
    rng, counts, good = random.Random(args.seed), Counter(), Counter()
    for script, module in modules.items():
        flags = RUNS[script] | dict(dataset_name=str(root / RUNS[script]["dataset_name"]))
        for _ in range(2):  # the first fills the cache of data sets
            shutil.rmtree(root / "whole", ignore_errors=True)
            began = time.time()
            child, told = fork(module, words_of(flags | dict(output_dir=str(root / "whole"))), root / "log")
            saves = 0
            while os.read(told, 1):
                saves += 1
            assert wait(child, told) == 0, (root / "log").read_text()
            seconds = time.time() - began
        whole = {name: content(root / "whole" / name) for name in COMPARED}
        for number in (signal.Signals[f"SIG{name}"] for name in args.signals.split(",")):
            done = 0
            while done < args.kills:
                line = one(
                    module, script, flags, number, ("save", "any")[done % 2], seconds, saves, rng, root, whole
                )
                if line is None:
                    continue
                with open(args.out, "a") as file:
                    file.write(json.dumps(line) + "\n")
                done += 1
                counts[script, number.name] += 1
                good[script, number.name] += line["same"]
    for key, count in counts.items():
        print(f"{key[0]:14} {key[1]:8} {good[key]} of {count} ended with the same bits")
    shutil.rmtree(root)
    sys.exit(good != counts)


if __name__ == "__main__":
    main()
