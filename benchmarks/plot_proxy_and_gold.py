"""Plot the reward that RLOO maximizes next to the judge's score, with a good reward model and with a weak
one: docs/rloo-proxy-and-gold.png.

    python benchmarks/plot_proxy_and_gold.py
"""

import gzip
import json
from pathlib import Path

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
RUNS = {"rloo-tiny/seed1": "all 10,000 pairs", "rloo-weak-reward": "1,250 pairs"}


def rows_of(folder):
    """The metrics of a run, one dict per update."""
    with gzip.open(ROOT / "results" / folder / "metrics.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def main():
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axis, (folder, pairs) in zip(figure.subplots(1, 2), RUNS.items()):
        rows = rows_of(folder)
        kl = [row["objective/kl"] for row in rows]
        axis.scatter(kl, [row["env/reward_mean"] for row in rows], s=9, label="reward model")
        axis.scatter(kl, [row["judge/scores"] for row in rows], s=9, label="gold score")
        axis.set(title=f"reward model from {pairs}", xlabel="KL to the reference, nats per response")
        axis.legend()
    figure.savefig(ROOT / "docs" / "rloo-proxy-and-gold.png", dpi=120)


if __name__ == "__main__":
    main()
