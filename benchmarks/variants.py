"""GRPO and its variants: each change of docs/grpo_math.md, run on the default job with seeds 1, 2, 3.

    python benchmarks/variants.py --jobs 2        # all runs, each on one thread; what is there already is kept
    python benchmarks/variants.py --only RLOO     # variants whose name contains this word ("GRPO": only this one)
    python benchmarks/variants.py --table         # only print the table of the runs that are there

A variant is a block under "Lines to change" on that page, applied to a copy of grpo_math.py, or flags, or
both. A run is kept as results/grpo-variants/NAME/seedN (GRPO as it is: results/grpo-math-tiny/seedN): args.json,
evaluation.json and metrics.jsonl.gz; of GRPO as it is, and of rewards that can be hacked, also the responses to
the held-out tasks, evaluation_samples.jsonl.gz.
"""

import argparse
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / "results/grpo-variants"
SEEDS = (1, 2, 3)
MORE_SEEDS = (1, 2, 3, 4, 5)  # of GRPO as it is: results/grpo-math-tiny
FOUR_MINIBATCHES = "--num-mini-batches 4 --gradient-accumulation-steps 1"

# name -> title of a block on the page (None: the script as it is), flags
VARIANTS = {
    "GRPO": (None, ""),
    "Dr. GRPO": ("Dr. GRPO", ""),
    "mean per response": ("Mean per response", ""),
    "RLOO's baseline": ("RLOO's baseline", ""),
    "REINFORCE++": ("REINFORCE++", ""),
    "KL penalty": (None, "--kl-coef 0.04"),
    "4 minibatches": (None, FOUR_MINIBATCHES),
    "4 minibatches, clip-higher": ("Clip-higher", FOUR_MINIBATCHES),
    "4 minibatches, GSPO": ("GSPO", f"{FOUR_MINIBATCHES} --cliprange 0.0004"),
    "4 minibatches, CISPO": ("CISPO", FOUR_MINIBATCHES),
    "dynamic sampling": ("Dynamic sampling, without a refill", ""),
    "overlong filtering": ("Overlong filtering", ""),
    "entropy bonus": ("Entropy bonus", ""),
    "unbiased KL": ("Unbiased KL", "--kl-coef 0.04"),
    "LoRA, rank 1": (None, "--lora-r 1 --lora-target-modules all-linear --learning-rate 5e-4"),
    "on-policy distillation": ("On-policy distillation", "--kl-coef 1"),
}

# The same job on rloo_tldr.py, by flags alone.
RLOO_FLAGS = (
    "--model-name-or-path checkpoints/arithmetic-sft --dataset-name data/arithmetic "
    "--reward-fn data/math_rewards.py:correct --rloo-k 8 --per-device-train-batch-size 64 "
    "--gradient-accumulation-steps 4 --num-ppo-epochs 1 --local-rollout-forward-batch-size 256 --kl-coef 0 "
    "--temperature 1 --response-length 48 --max-prompt-length 64 --total-episodes 25600 --learning-rate 5e-5 "
    "--lr-scheduler-type constant --dtype float32 --num-eval-prompts 256"
)
VARIANTS["rloo_tldr.py"] = (None, RLOO_FLAGS)

# Rewards that can be hacked, with one seed each; the right answer has weight 0, so it is only logged.
HACKS = {
    "format alone": (
        None,
        "--reward-fn data/math_rewards.py:correct data/math_rewards.py:well_formed --reward-weights 0 1",
    ),
    "work alone": (
        None,
        "--reward-fn data/math_rewards.py:correct data/math_rewards.py:shows_work --reward-weights 0 1",
    ),
}
COLUMNS = [
    "held-out: pass@1",
    "held-out: pass@8",
    "harder: pass@1",
    "greedy: pass@1",
    "held-out: tokens per response",
]


def blocks(page):
    """The diff blocks of a page. -> dict: title -> text"""
    return dict(re.findall(r"^\*\*([^*]+?)\.?\*\*(?:(?!^\*\*).)*?```diff\n(.*?)```", page, re.M | re.S))


def patched(source, block):
    """The script with the lines of a diff block changed."""
    for hunk in re.split(r"^@@.*\n", block, flags=re.M)[1:]:
        lines = hunk.splitlines()
        old = "\n" + "".join(line[1:] + "\n" for line in lines if not line.startswith("+"))
        new = "\n" + "".join(line[1:] + "\n" for line in lines if not line.startswith("-"))
        if source.count(old) != 1:
            raise ValueError(f"these lines are not in the script exactly once:{old}")
        source = source.replace(old, new)
    return source


def folder_of(name, seed):
    """Where the results of a run are kept."""
    if name == "GRPO":
        return ROOT / f"results/grpo-math-tiny/seed{seed}"
    words = re.sub(r"[^a-z0-9+]+", "-", name.lower()).strip("-")
    return HOME / words / f"seed{seed}"


def call(folder, *words):
    """Run a script in a folder, with one thread and without checkpoints."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    words = [sys.executable, *words, "--save-every", "0"]
    end = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    if end.returncode:
        raise RuntimeError(f"{' '.join(words)}:\n{end.stdout[-1000:]}{end.stderr[-3000:]}")


def teacher():
    """The model that GRPO trains with seed 1. Trained here if it is missing."""
    folder = ROOT / "runs/variants-teacher"
    if not (folder / "evaluation.json").exists():
        call(ROOT, "grpo_math.py", "--output-dir", str(folder))
    return folder / "model"


def run(name, seed):
    """Train one variant in a temporary copy of the project, and keep its results."""
    folder = folder_of(name, seed)
    if (folder / "evaluation.json").exists():
        return
    title, flags = (VARIANTS | HACKS)[name]
    source = (ROOT / "grpo_math.py").read_text()
    if title:
        source = patched(source, blocks((ROOT / "docs/grpo_math.md").read_text())[title])
    with tempfile.TemporaryDirectory() as copy:
        Path(copy, "grpo_math.py").write_text(source)
        for part in ("data", "checkpoints", "rloo_tldr.py"):
            Path(copy, part).symlink_to(ROOT / part)
        if name == "on-policy distillation":
            Path(copy, "teacher").symlink_to(teacher())
        script = "rloo_tldr.py" if name == "rloo_tldr.py" else "grpo_math.py"
        call(copy, script, "--seed", str(seed), *flags.split(), "--output-dir", "run")
        evaluation = "run"
        if name == "rloo_tldr.py":  # solve the held-out tasks as grpo_math.py does
            words = ["tiny", "--model-name-or-path", "run/model", "--seed", str(seed), "--learning-rate", "0"]
            call(copy, "grpo_math.py", *words, "--total-episodes", "256", "--output-dir", "evaluation")
            evaluation = "evaluation"
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(copy, "run/args.json"), folder)
        shutil.copy(Path(copy, evaluation, "evaluation.json"), folder)
        kept = ["metrics.jsonl"]
        if name == "GRPO" or name in HACKS:
            kept.append("evaluation_samples.jsonl")
        for file in kept:
            content = Path(copy, "run", file).read_bytes()
            (folder / f"{file}.gz").write_bytes(gzip.compress(content, mtime=0))
    print(f"{name}, seed {seed}: {row(name)}", flush=True)


def seeds_of(name):
    """The seeds of a variant."""
    if name in HACKS:
        return SEEDS[:1]
    return MORE_SEEDS if name == "GRPO" else SEEDS


def updates_to_reward(folder, level=0.75):
    """The first update at which the reward for right answers, a mean over five updates, is this high. -> text"""
    lines = gzip.decompress((folder / "metrics.jsonl.gz").read_bytes()).decode().splitlines()
    rewards = [json.loads(line)["rewards/correct/mean"] for line in lines]
    for i in range(5, len(rewards) + 1):
        if sum(rewards[i - 5 : i]) / 5 >= level:
            return str(i)
    return "never"


def row(name):
    """The cells of a variant: for each column its values, seed by seed."""
    cells = []
    found = [folder_of(name, seed) for seed in seeds_of(name)]
    found = [folder for folder in found if (folder / "evaluation.json").exists()]
    evaluations = [json.loads((folder / "evaluation.json").read_text()) for folder in found]
    for column in COLUMNS:
        digits = 1 if "tokens" in column else 3
        cells.append(", ".join(f"{evaluation['after'][column]:.{digits}f}" for evaluation in evaluations))
    cells.append("" if name in HACKS else ", ".join(updates_to_reward(folder) for folder in found))
    return cells


def table():
    """The markdown table of the variants that have results."""
    lines = [["variant", *COLUMNS, "updates to a reward of 0.75"], ["---"] * (len(COLUMNS) + 2)]
    lines += [[name, *row(name)] for name in VARIANTS if any(row(name))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Run GRPO and its variants on the default job.")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--only", default="", help="a word in the names of the variants")
    parser.add_argument("--table", action="store_true", help="only print the table")
    flags = parser.parse_args()
    if not flags.table:
        names = [name for name in VARIANTS | HACKS if flags.only in name]
        if flags.only in names:
            names = [flags.only]
        jobs = [(name, seed) for name in names for seed in seeds_of(name)]
        with ThreadPoolExecutor(flags.jobs) as pool:
            list(pool.map(lambda job: run(*job), jobs))
    print(table())
