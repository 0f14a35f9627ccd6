"""The changes of lines in docs/dpo_tldr.md, run on the first 3,008 pairs of the default data: 94 updates.

    OMP_NUM_THREADS=1 python benchmarks/dpo_variants.py run 1 2 3    # these seeds -> results/dpo-variants.jsonl
    python benchmarks/dpo_variants.py show                           # the table of docs/dpo_tldr.md

A run that is there already is kept. Everything but the changed lines and --beta is as in the recipe tiny.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests")]
from diff_blocks import apply_block, blocks  # noqa: E402
from trl_dpo import make_data  # noqa: E402

RESULTS = ROOT / "results/dpo-variants.jsonl"
VARIANTS = {  # title of a block on the page -> beta
    "DPO": 0.5,
    "IPO": 2.0,
    "Length-normalized DPO": 10.0,
    "SimPO": 2.0,
    "RPO's NLL": 0.5,
    "ORPO": 0.5,
}
COLUMNS = {  # column -> part of evaluation.json, metric, digits
    "win rate": ("after", "win rate", 2),
    "gold score": ("after", "score mean", 2),
    "KL, nats per response": ("after", "KL, nats per response", 2),
    "ended by itself": ("after", "ended by itself", 2),
    "tokens per response": ("after", "tokens per response", 1),
    "logps/chosen": ("pairs", "logps/chosen", 2),
    "logps/rejected": ("pairs", "logps/rejected", 2),
    "accuracy": ("pairs", "rewards/accuracies", 2),
}


def read_results():
    """-> dict: (variant, seed) -> evaluation"""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    rows = [json.loads(line) for line in lines]
    return {(row["variant"], row["seed"]): row["evaluation"] for row in rows}


def run(variant, seed):
    source = (ROOT / "dpo_tldr.py").read_text()
    if variant != "DPO":
        source = apply_block(source, blocks((ROOT / "docs/dpo_tldr.md").read_text())[variant])
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "dpo_tldr.py").write_text(source)
        for part in ("data", "checkpoints"):
            (folder / part).symlink_to(ROOT / part)
        pairs = make_data(folder / "pairs")
        words = f"dpo_tldr.py --seed {seed} --beta {VARIANTS[variant]} --dataset-name {pairs} --save-every 0"
        words += " --eval-dataset-name data/tldr --judge-fn data/make_tldr.py:gold_score"
        subprocess.run([sys.executable, *words.split(), "--output-dir", "run"], cwd=folder, check=True)
        evaluation = json.loads((folder / "run/evaluation.json").read_text())
        line = dict(variant=variant, seed=seed, beta=VARIANTS[variant], evaluation=evaluation)
        with open(RESULTS, "a") as file:
            file.write(json.dumps(line) + "\n")
        if "SAMPLES" in os.environ:  # a folder for the responses, to read them
            samples = (folder / "run/evaluation_samples.jsonl").read_text()
            Path(os.environ["SAMPLES"], f"{variant}-{seed}.jsonl").write_text(samples)


def table():
    """Means over the seeds."""
    found = read_results()
    lines = [f"| | beta | seeds | {' | '.join(COLUMNS)} |", "|---|" + "---|" * (len(COLUMNS) + 2)]
    for variant, beta in VARIANTS.items():
        runs = [evaluation for (name, _), evaluation in found.items() if name == variant]
        cells = [f"{fmean(x[part][name] for x in runs):.{n}f}" for part, name, n in COLUMNS.values()]
        lines.append(f"| {variant} | {beta:g} | {len(runs)} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1] == "run":
        for seed in map(int, sys.argv[2:]):
            for variant in VARIANTS:
                if (variant, seed) not in read_results():
                    run(variant, seed)
    else:
        print(table())
