"""Healthy runs of the defaults, with ten seeds each, and the bands that report.py draws behind the curves.

    python benchmarks/reference_bands.py run --jobs 2    # adds the runs that are not there yet
    python benchmarks/reference_bands.py write           # reference_bands.json, which report.py reads

A band is the 5, 50 and 95 % quantile of a metric over the seeds, for each update. Each run has one thread. Some seeds
are in results/ already, because the docs show them; the others go to results/healthy/SCRIPT/, one file per run.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from archive import pack, read, read_rows

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
SEEDS = range(1, 11)
POINTS = 50  # updates per band
SHOWN_IN_DOCS = {  # script -> folder with some of the seeds
    "ppo_sentiment": "ppo-sentiment-tiny",
    "ppo_dialog": "ppo-dialog-tiny",
    "rloo_tldr": "rloo-tiny",
    "grpo_math": "grpo-math-tiny",
    "dpo_tldr": "dpo-tldr-tiny",
}
SCRIPTS = [*SHOWN_IN_DOCS, "reward_model", "sft"]
LEFT_OUT = ("perf/", "eps", "episode", "epoch")  # of the machine, or the same in all runs


def run_path(script, seed):
    """Where a run is, or will be."""
    if script in SHOWN_IN_DOCS:
        shown = RESULTS / SHOWN_IN_DOCS[script] / f"seed{seed}.zip"
        if shown.exists():
            return shown
    return RESULTS / f"healthy/{script}/seed{seed}.zip"


def run_one(script, seed):
    """Run a default, and keep its metrics and flags."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, f"{script}.py", "--seed", str(seed), "--output-dir", f"{folder}/run"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        end = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
        if end.returncode:
            raise RuntimeError(f"{script}, seed {seed}:\n{end.stdout[-2000:]}{end.stderr[-2000:]}")
        args = json.loads(read(f"{folder}/run", "args.json"))["args"]
        del args["output_dir"]  # a temporary folder
        files = {
            "args.json": json.dumps({"args": args}),
            "metrics.jsonl": read(f"{folder}/run", "metrics.jsonl"),
        }
        pack(run_path(script, seed), files)
    print(f"{script}, seed {seed}", flush=True)


def run_all(jobs, scripts):
    todo = [(script, seed) for script in scripts for seed in SEEDS if not run_path(script, seed).exists()]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda run: run_one(*run), todo))


def band(script, seeds=SEEDS):
    """The quantiles of all metrics of a script. -> dict: seeds, args, metrics: name -> update, 5, 50, 95"""
    import numpy as np

    runs = [read_rows(run_path(script, seed), "metrics.jsonl") for seed in seeds]
    updates = [row["update"] for row in runs[0]]
    shown = np.unique(np.linspace(0, len(updates) - 1, POINTS).round().astype(int))
    metrics = {}
    names = set.intersection(*(set(run[0]) for run in runs))  # older runs have more metrics
    for name in runs[0][0]:
        if name == "update" or name.startswith(LEFT_OUT) or name not in names:
            continue
        values = np.array([[row[name] for row in run] for run in runs])  # [seeds, updates]
        quantiles = np.quantile(values[:, shown], [0.05, 0.5, 0.95], axis=0)
        metrics[name] = {"update": [updates[i] for i in shown]}
        for quantile, line in zip(("5", "50", "95"), quantiles):
            metrics[name][quantile] = [float(f"{x:.4g}") for x in line]
    about = json.loads(read(run_path(script, 1), "args.json"))
    return {"seeds": len(runs), "args": about["args"], "metrics": metrics}


def write():
    """reference_bands.json: script and recipe -> band"""
    bands = {f"{script} tiny": band(script) for script in SCRIPTS}
    (ROOT / "reference_bands.json").write_text(json.dumps(bands) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Healthy runs of the defaults, and bands of their metrics.")
    parser.add_argument("what", choices=["run", "write"])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--script", choices=SCRIPTS, help="only this script")
    flags = parser.parse_args()
    if flags.what == "run":
        run_all(flags.jobs, [flags.script] if flags.script else SCRIPTS)
    else:
        write()
