"""GRPO and its variants: the changes of lines in docs/grpo_math.md, run on the default job of grpo_math.py.

    OMP_NUM_THREADS=1 python benchmarks/grpo_variants.py run 1 2 3    # these seeds -> results/grpo-variants.jsonl
    python benchmarks/grpo_variants.py show                           # the table of docs/grpo_math.md
    python benchmarks/grpo_variants.py plot                           # docs/grpo-variants.png

A run that is there already is kept. A variant is a block of the page, or flags, or both; everything else is as in
the recipe tiny: 25,600 episodes.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from diff_blocks import apply_block, blocks  # noqa: E402

RESULTS = ROOT / "results/grpo-variants.jsonl"
TEACHER = ROOT / "runs/grpo-variants-teacher"  # the model that GRPO trains with seed 1
MINIBATCHES = "--num-mini-batches 4 --gradient-accumulation-steps 1"
TWO_REWARDS = (
    "--reward-fn data/math_rewards.py:correct data/math_rewards.py:well_formed --reward-weights 1 0.2"
)
VARIANTS = {  # name -> title of a block on the page (None: the script as it is), flags
    "GRPO": (None, ""),
    "Dr. GRPO": ("Dr. GRPO", ""),
    "mean per response": ("Mean per response", ""),
    "RLOO's baseline": ("RLOO's baseline", ""),
    "REINFORCE++": ("REINFORCE++", ""),
    "MaxRL": ("MaxRL", ""),
    "two rewards": (None, TWO_REWARDS),
    "two rewards, GDPO": ("GDPO", TWO_REWARDS),
    "KL penalty": (None, "--kl-coef 0.04"),
    "unbiased KL": ("Unbiased KL", "--kl-coef 0.04"),
    "4 minibatches": (None, MINIBATCHES),
    "4 minibatches, clip-higher": ("Clip-higher", MINIBATCHES),
    "4 minibatches, GSPO": ("GSPO", f"{MINIBATCHES} --cliprange 0.0004"),
    "4 minibatches, CISPO": ("CISPO", MINIBATCHES),
    "LoRA, rank 1": (None, "--lora-r 1 --lora-target-modules all-linear --learning-rate 5e-4"),
    "on-policy distillation": ("On-policy distillation", "--kl-coef 1"),
    "dynamic sampling": ("Dynamic sampling, without a refill", ""),
    "overlong filtering": ("Overlong filtering", ""),
    "entropy bonus": ("Entropy bonus", ""),
}
COLUMNS = {  # metric of the evaluation after training -> digits
    "held-out: pass@1": 3,
    "held-out: pass@8": 3,
    "harder: pass@1": 3,
    "greedy: pass@1": 3,
    "held-out: tokens per response": 1,
}
CURVES = {  # what is kept of each update -> digits
    "rewards/correct/mean": 4,
    "completions/mean_length": 2,
    "policy/entropy_avg": 4,
    "frac_reward_zero_std": 4,
}


def read_results():
    """-> dict: (variant, seed) -> the line of its run"""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    rows = [json.loads(line) for line in lines]
    return {(row["variant"], row["seed"]): row for row in rows}


def run(variant, seed):
    """Train one variant in a copy of the script, and add a line to the results."""
    title, flags = VARIANTS[variant]
    source = (ROOT / "grpo_math.py").read_text()
    if title:
        source = apply_block(source, blocks((ROOT / "docs/grpo_math.md").read_text())[title])
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "grpo_math.py").write_text(source)
        for part in ("data", "checkpoints"):
            (folder / part).symlink_to(ROOT / part)
        (folder / "teacher").symlink_to(TEACHER)
        words = f"grpo_math.py --seed {seed} {flags} --save-every 0 --output-dir run"
        subprocess.run([sys.executable, *words.split()], cwd=folder, check=True)
        metrics = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
        evaluation = json.loads((folder / "run/evaluation.json").read_text())
        line = dict(variant=variant, seed=seed, flags=flags, evaluation=evaluation)
        line |= {name: [round(row[name], digits) for row in metrics] for name, digits in CURVES.items()}
        with open(RESULTS, "a") as file:
            file.write(json.dumps(line) + "\n")
        if (variant, seed) == ("GRPO", 1):
            shutil.copytree(folder / "run/model", TEACHER)
        if "SAMPLES" in os.environ:  # a folder for the responses, to read them
            samples = (folder / "run/evaluation_samples.jsonl").read_text()
            Path(os.environ["SAMPLES"], f"{variant}-{seed}.jsonl").write_text(samples)


def updates_to_reward(rewards, level=0.75):
    """The first update at which the share of right answers, a mean over five updates, is this high. -> text"""
    for i in range(5, len(rewards) + 1):
        if sum(rewards[i - 5 : i]) / 5 >= level:
            return str(i)
    return "never"


def table():
    """One row per variant, with one number per seed."""
    found = read_results()
    header = ["variant", *COLUMNS, "updates to a reward of 0.75"]
    lines = [header, ["---"] * len(header)]
    for variant in VARIANTS:
        runs = [found[key] for key in sorted(found) if key[0] == variant]
        after = [run["evaluation"]["after"] for run in runs]
        cells = [", ".join(f"{x[name]:.{digits}f}" for x in after) for name, digits in COLUMNS.items()]
        speeds = [updates_to_reward(run["rewards/correct/mean"]) for run in runs]
        lines.append([variant, *cells, ", ".join(speeds)])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def plot():
    """Four numbers of each variant, one dot per seed; the band is the range of GRPO's seeds."""
    import matplotlib.pyplot as plt

    found = read_results()
    panels = {
        "held-out pass@1": lambda run: run["evaluation"]["after"]["held-out: pass@1"],
        "updates to a reward of 0.75": lambda run: int(updates_to_reward(run["rewards/correct/mean"])),
        "entropy at the end": lambda run: sum(run["policy/entropy_avg"][-10:]) / 10,
        "groups with equal rewards at the end": lambda run: sum(run["frac_reward_zero_std"][-10:]) / 10,
    }
    names = list(VARIANTS)
    figure, axes = plt.subplots(1, 4, figsize=(13, 5.5), sharey=True, layout="constrained")
    for axis, (title, value) in zip(axes, panels.items()):
        for i, name in enumerate(names):
            values = [value(run) for (variant, _), run in found.items() if variant == name]
            axis.plot(values, [i] * len(values), "o", alpha=0.8, color="tab:orange" if i == 0 else "tab:blue")
            if name == "GRPO":
                axis.axvspan(min(values), max(values), color="tab:orange", alpha=0.15)
        axis.set_title(title, fontsize=10)
        axis.grid(axis="y", alpha=0.3)
        axis.locator_params(axis="x", nbins=4)
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    figure.savefig(ROOT / "docs/grpo-variants.png", dpi=110)


if __name__ == "__main__":
    if sys.argv[1] == "run":
        for seed in map(int, sys.argv[2:]):
            for variant in VARIANTS:
                if (variant, seed) not in read_results():
                    run(variant, seed)
    elif sys.argv[1] == "plot":
        plot()
    else:
        print(table())
