"""Draw figures of the docs from committed results.

python benchmarks/plots.py    # learning, grpo-curves, rloo-proxy-and-gold: docs/NAME.png
"""

import json
from pathlib import Path

from archive import read_rows
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
RESULTS = ROOT / "results"
LEARNING = [  # key of the bands, metric, title
    ("ppo_sentiment tiny", "objective/scores", "ppo_sentiment.py: score of a classifier"),
    ("ppo_dialog tiny", "objective/scores", "ppo_dialog.py: intent + METEOR"),
    ("rloo_tldr tiny", "judge/scores", "rloo_tldr.py: gold score"),
    ("grpo_math tiny", "objective/scores", "grpo_math.py: right answers"),
]
GRPO_CURVES = {
    "objective/scores": "reward: fraction of right responses",
    "completions/mean_length": "tokens per response",
    "frac_reward_zero_std": "fraction of groups with equal rewards",
}
PROXY_AND_GOLD = {"rloo-tiny/seed1": "all 10,000 pairs", "rloo-weak-reward": "1,250 pairs"}


def smooth(values, width=5):
    """The mean over the last updates."""
    return [sum(values[max(0, i - width + 1) : i + 1]) / min(i + 1, width) for i in range(len(values))]


def plot_learning():
    """The defaults of the RL scripts: the bands of ten seeds."""
    bands = json.loads((ROOT / "reference_bands.json").read_text())
    figure = Figure(figsize=(13, 2.9), layout="constrained")
    for axis, (key, metric, title) in zip(figure.subplots(1, len(LEARNING)), LEARNING):
        band = bands[key]["metrics"][metric]
        axis.fill_between(band["update"], band["5"], band["95"], alpha=0.3)
        axis.plot(band["update"], band["50"])
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("update")
        axis.grid(alpha=0.3)
    figure.suptitle("Median and 5 to 95 % band of ten seeds, on batches of training prompts")
    figure.savefig(DOCS / "learning.png", dpi=90)


def plot_grpo_curves():
    """The five committed runs of grpo_math.py."""
    figure = Figure(figsize=(12, 3.5), layout="constrained")
    for axis, (name, title) in zip(figure.subplots(1, len(GRPO_CURVES)), GRPO_CURVES.items()):
        for seed in range(1, 6):
            rows = read_rows(RESULTS / f"grpo-math-tiny/seed{seed}", "metrics.jsonl")
            values = smooth([row[name] for row in rows])
            axis.plot([row["episode"] for row in rows], values, label=f"seed{seed}")
        axis.set(title=title, xlabel="episodes (responses)")
        axis.grid(alpha=0.3)
    figure.axes[0].legend()
    figure.suptitle("grpo_math.py, recipe tiny, mean over the last 5 updates")
    figure.savefig(DOCS / "grpo-curves.png", dpi=110)


def plot_proxy_and_gold():
    """The reward that RLOO maximizes and the gold score, with a good reward model and with a weak one."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axis, (name, pairs) in zip(figure.subplots(1, 2), PROXY_AND_GOLD.items()):
        rows = read_rows(RESULTS / name, "metrics.jsonl")
        kl = [row["objective/kl"] for row in rows]
        axis.scatter(kl, [row["env/reward_mean"] for row in rows], s=9, label="reward model")
        axis.scatter(kl, [row["judge/scores"] for row in rows], s=9, label="gold score")
        axis.set(title=f"reward model from {pairs}", xlabel="KL to the reference, nats per response")
        axis.legend()
    figure.savefig(DOCS / "rloo-proxy-and-gold.png", dpi=120)


if __name__ == "__main__":
    plot_learning()
    plot_grpo_curves()
    plot_proxy_and_gold()
