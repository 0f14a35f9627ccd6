"""Draws docs/grpo-curves.png: the five committed runs of grpo_math.py.

python benchmarks/plot_grpo.py
"""

import gzip
import json
from pathlib import Path

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


if __name__ == "__main__":
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
