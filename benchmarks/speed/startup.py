"""How long a user waits: from a command to its help, and to the first update of the default recipe.

    python benchmarks/speed/startup.py            # each of the six scripts, three times
    python benchmarks/speed/startup.py --show     # only the table

Writes results/speed/startup.jsonl, and prints a table.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from compare import ROOT, describe_machine, run, table

SCRIPTS = ("sft", "reward_model", "ppo_sentiment", "ppo_dialog", "rloo_tldr", "grpo_math")
FILE = ROOT / "results/speed" / "startup.jsonl"
LIMIT = 300  # seconds to a first update


def first_update(script, threads, folder):
    """Start the default recipe -> seconds until the first line of its metrics.jsonl; then stop it."""
    env = os.environ | dict(OMP_NUM_THREADS=str(threads), HF_HUB_OFFLINE="1")
    began, metrics = time.perf_counter(), folder / "run" / "metrics.jsonl"
    with open(folder / "log", "w") as log:
        started = subprocess.Popen([sys.executable, ROOT / f"{script}.py", "--output-dir", metrics.parent, "--save-every", "0"],
                                   env=env, cwd=folder, stdout=log, stderr=log)  # fmt: skip
    try:
        while not (metrics.exists() and metrics.stat().st_size):
            if started.poll() is not None or time.perf_counter() - began > LIMIT:
                sys.exit(f"{script}.py: no update: {(folder / 'log').read_text()[-2000:]}")
            time.sleep(0.05)
        return time.perf_counter() - began
    finally:
        started.kill()
        started.wait()


def show():
    """Medians, smallest and largest."""
    lines = [json.loads(line) for line in FILE.read_text().splitlines()]
    cells = [[f"`{script}.py`"] for script in SCRIPTS]
    for row, script in zip(cells, SCRIPTS):
        for what in ("help", "first_update"):
            found = [line[what] for line in lines if line["script"] == script]
            row.append(f"{median(found):.1f} ({min(found):.1f} to {max(found):.1f})")
    print(table(["script", "`--help`, s", "first update of the default recipe, s"], cells))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--show", action="store_true", help="print earlier results, run nothing")
    args = parser.parse_args()
    if not args.show:
        FILE.write_text("")
        machine = describe_machine(args.threads)
        for number in range(args.rounds):
            for script in SCRIPTS:
                with tempfile.TemporaryDirectory() as work:
                    line, began = (
                        dict(round=number, script=script, load_average=os.getloadavg()[0]),
                        time.perf_counter(),
                    )
                    run([sys.executable, ROOT / f"{script}.py", "--help"], args.threads, Path(work, "log"))
                    line |= dict(
                        help=time.perf_counter() - began,
                        first_update=first_update(script, args.threads, Path(work)),
                    )
                with open(FILE, "a") as lines:
                    lines.write(json.dumps(line | dict(machine=machine)) + "\n")
    show()


if __name__ == "__main__":
    main()
