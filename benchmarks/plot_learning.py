"""Draw docs/learning.png: the defaults of the RL scripts, from results/reference_bands.json.

python benchmarks/plot_learning.py
"""

import json
from pathlib import Path

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
PANELS = [  # key of the bands, metric, title
    ("ppo_sentiment tiny", "objective/scores", "ppo_sentiment.py: score of a classifier"),
    ("ppo_dialog tiny", "objective/scores", "ppo_dialog.py: intent + METEOR"),
    ("rloo_tldr tiny", "judge/scores", "rloo_tldr.py: gold score"),
    ("grpo_math tiny", "objective/scores", "grpo_math.py: right answers"),
]

if __name__ == "__main__":
    bands = json.loads((ROOT / "results/reference_bands.json").read_text())
    figure = Figure(figsize=(13, 2.9), layout="constrained")
    for axis, (key, metric, title) in zip(figure.subplots(1, len(PANELS)), PANELS):
        band = bands[key]["metrics"][metric]
        axis.fill_between(band["update"], band["5"], band["95"], alpha=0.3)
        axis.plot(band["update"], band["50"])
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("update")
        axis.grid(alpha=0.3)
    figure.suptitle("Median and 5 to 95 % band of ten seeds, on batches of training prompts")
    figure.savefig(ROOT / "docs/learning.png", dpi=90)
