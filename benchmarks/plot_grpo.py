"""Draws docs/grpo-curves.png, the five committed runs of grpo_math.py, and docs/grpo-variants.png, those of its
variants.

python benchmarks/plot_grpo.py
"""

import gzip
import json
from pathlib import Path

import variants
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
SEEDS = [ROOT / f"results/grpo-math-tiny/seed{seed}" for seed in range(1, 6)]
PANELS = {
    "objective/scores": "reward: fraction of right responses",
    "completions/mean_length": "tokens per response",
    "frac_reward_zero_std": "fraction of groups with equal rewards",
}


def read(folder):
    """metrics.jsonl.gz of a run. -> list of dicts"""
    text = gzip.decompress((folder / "metrics.jsonl.gz").read_bytes()).decode()
    return [json.loads(line) for line in text.splitlines()]


def smooth(values, width=5):
    """The mean over the last updates."""
    return [sum(values[max(0, i - width + 1) : i + 1]) / min(i + 1, width) for i in range(len(values))]


def of_run(folder):
    """The numbers of one run in the picture of the variants. -> dict: title -> number, or None"""
    after = json.loads((folder / "evaluation.json").read_text())["after"]
    last = read(folder)[-10:]
    numbers = {
        "held-out: pass@1": after["held-out: pass@1"],
        "tokens per response": after["held-out: tokens per response"],
    }
    for title, name in {
        "entropy per token, last 10 updates": "policy/entropy_avg",
        "groups of equal rewards, last 10": "frac_reward_zero_std",
    }.items():
        numbers[title] = sum(row[name] for row in last) / 10 if name in last[0] else None
    return numbers


def plot_variants():
    """One row per variant, one dot per seed. The band is the range of GRPO's five seeds."""
    runs = {}
    for name in variants.VARIANTS:
        folders = [variants.folder_of(name, seed) for seed in variants.seeds_of(name)]
        runs[name] = [of_run(folder) for folder in folders if folder.exists()]
    names = [name for name in runs if runs[name]][::-1]
    figure = Figure(figsize=(13, 0.6 + 0.27 * len(names)), layout="constrained")
    titles = list(runs["GRPO"][0])
    axes = figure.subplots(1, len(titles), sharey=True)
    for axis, title in zip(axes, titles):
        band = [run[title] for run in runs["GRPO"]]
        axis.axvspan(min(band), max(band), alpha=0.15)
        for y, name in enumerate(names):
            values = [run[title] for run in runs[name] if run[title] is not None]
            axis.plot(values, [y] * len(values), "o", markersize=4, color="tab:blue", alpha=0.7)
        axis.set(title=title)
        axis.title.set_size(9)
        axis.locator_params(axis="x", nbins=5)
        axis.grid(alpha=0.3)
    axes[0].set_yticks(range(len(names)), names)
    figure.savefig(ROOT / "docs/grpo-variants.png", dpi=110)


if __name__ == "__main__":
    plot_variants()
    figure = Figure(figsize=(12, 3.5), layout="constrained")
    for axis, (name, title) in zip(figure.subplots(1, len(PANELS)), PANELS.items()):
        for folder in SEEDS:
            rows = read(folder)
            axis.plot(
                [row["episode"] for row in rows], smooth([row[name] for row in rows]), label=folder.name
            )
        axis.set(title=title, xlabel="episodes (responses)")
        axis.grid(alpha=0.3)
    figure.axes[0].legend()
    figure.suptitle("grpo_math.py, recipe tiny, mean over the last 5 updates")
    figure.savefig(ROOT / "docs/grpo-curves.png", dpi=110)
