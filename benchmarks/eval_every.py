"""What --eval-every shows and what it costs: a short run of each script.

    python benchmarks/eval_every.py run      # 20 minutes on one core: results/eval-every; `run sft`: only this script
    python benchmarks/eval_every.py table    # CPU seconds, for docs/running.md
    python benchmarks/eval_every.py plot     # docs/eval-during-training.png

`run` skips a script whose results are there.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

from archive import pack, read, read_rows

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results/eval-every"
JOBS = {  # script -> flags, updates between evaluations, a number of the final table, half of its 95 % interval
    "sft": ("--num-train-epochs 3", 30, "loss", None),
    "reward_model": ("--num-train-epochs 5", 70, "accuracy", None),
    "ppo_sentiment": ("--total-episodes 6400", 5, "score mean", "score mean, +-"),
    "ppo_dialog": ("--total-episodes 6400", 5, "score mean", "score mean, +-"),
    "rloo_tldr": ("--total-episodes 5120", 5, "win rate", "+- (95 % interval)"),
    "dpo_tldr": ("--num-train-epochs 0.2", 10, "win rate", "win rate, +-"),
    "grpo_math": ("--total-episodes 10240", 5, "held-out: pass@1", "held-out: +- (95 % interval)"),
    "grpo_tools": ("--total-episodes 6400", 5, "held-out: pass@1", "held-out: +- (95 % interval)"),
}


def measure(script):
    """Run a script in this process. Keep its metrics, and the CPU seconds until each update was logged."""
    flags, every, *_ = JOBS[script]
    words = f"{flags} --eval-every {every} --save-every 0 --output-dir run".split()
    sys.argv = [f"{script}.py", *words]  # for args.json
    module = importlib.import_module(script)
    log, seconds = module.Run.log, []

    def timed_log(self, metrics):
        seconds.append(time.process_time())
        return log(self, metrics)

    module.Run.log = timed_log
    with tempfile.TemporaryDirectory() as root:
        os.chdir(root)
        module.main()
        files = {name: read("run", name) for name in ("args.json", "metrics.jsonl", "evaluation.json")}
    pack(RESULTS / f"{script}.zip", files | {"cpu_seconds.json": json.dumps(seconds)})


def run(*scripts):
    """Measure each script, or these, in a process of its own."""
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for script in scripts or JOBS:
        if not (RESULTS / f"{script}.zip").exists():
            subprocess.run([sys.executable, __file__, "measure", script], check=True)


def costs(script):
    """-> number of updates, CPU seconds of an update, CPU seconds of an evaluation (medians)"""
    rows = read_rows(RESULTS / f"{script}.zip", "metrics.jsonl")
    seconds = json.loads(read(RESULTS / f"{script}.zip", "cpu_seconds.json"))
    took = {True: [], False: []}  # with and without an evaluation
    for row, (start, end) in zip(rows[1:], pairwise(seconds), strict=True):
        took[any(name.startswith("eval/") for name in row)].append(end - start)
    update = median(took[False])
    return len(rows), update, median(took[True]) - update


def table():
    """What an evaluation costs in each script, as a markdown table."""
    lines = ["| command | updates | CPU seconds per update | per evaluation | an evaluation costs |"]
    lines.append("|---|---|---|---|---|")
    for script, (flags, every, *_) in JOBS.items():
        updates, update, evaluation = costs(script)
        lines.append(
            f"| `{script}.py {flags} --eval-every {every}` | {updates} | {update:.2f} | {evaluation:.2f} "
            f"| {evaluation / update:.1f} updates |"
        )
    return "\n".join(lines)


def points(script):
    """The evaluations of a run. -> updates, dicts: name -> number; the last one is after training"""
    rows = read_rows(RESULTS / f"{script}.zip", "metrics.jsonl")
    evaluation = json.loads(read(RESULTS / f"{script}.zip", "evaluation.json"))
    found = []
    if "before" in evaluation:  # not in reward_model.py
        found.append((0, evaluation["before"]))
    for row in rows:
        numbers = {key.removeprefix("eval/"): x for key, x in row.items() if key.startswith("eval/")}
        if numbers:
            found.append((row["update"], numbers))
    found.append((rows[-1]["update"], evaluation.get("after", evaluation)))
    return zip(*found)


def plot():
    """Draw one number of each script over the updates."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.8), layout="constrained")
    axes = figure.subplots(2, 4).flatten()
    for axis, (script, (_, _, name, half_interval)) in zip(axes, JOBS.items(), strict=True):
        updates, numbers = points(script)
        errors = [x[half_interval] for x in numbers] if half_interval else None
        axis.errorbar(updates, [x[name] for x in numbers], errors, marker="o", markersize=4, elinewidth=1)
        axis.set_title(f"{script}.py\neval/{name}", fontsize=11)
        axis.set_xlim(left=-0.04 * updates[-1])
        axis.grid(alpha=0.3)
    figure.supxlabel("update", fontsize=11)
    figure.savefig(ROOT / "docs/eval-during-training.png", dpi=160)


if __name__ == "__main__":
    actions = {"run": run, "measure": measure, "table": lambda: print(table()), "plot": plot}
    actions[sys.argv[1]](*sys.argv[2:])
