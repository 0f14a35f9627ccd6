"""Seconds per update on an idle machine, and beside a program that keeps one core busy, by GOMP_SPINCOUNT.

    python benchmarks/speed/busy.py                                # writes results/speed/busy.jsonl
    python benchmarks/speed/busy.py --settings none 10000 --rounds 1
    python benchmarks/speed/busy.py --show                         # only the table, from the committed file

Threads of one process wait for each other after each parallel loop. They spin: they keep their core while they
wait, although the one they wait for may need it. GOMP_SPINCOUNT limits how long. The settings run alternately,
`none` without the variable; `passive` is OMP_WAIT_POLICY=PASSIVE. Nothing else may run.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ["ppo_sentiment", "rloo_tldr"]
EPISODES = 128  # of an update of their defaults


def seconds_per_update(script, setting, updates):
    """The median of the updates after the first one."""
    environment = {name: x for name, x in os.environ.items() if not name.startswith(("OMP", "GOMP"))}
    environment["HF_HUB_OFFLINE"] = "1"
    if setting == "passive":
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
    elif setting != "none":
        environment["GOMP_SPINCOUNT"] = setting
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, f"{script}.py", "--total-episodes", str(updates * EPISODES)]
        words += ["--output-dir", f"{folder}/run", "--num-sample-generations", "0", "--save-every", "0"]
        words += ["--num-eval-prompts", "4"] if script == "rloo_tldr" else ["--num-eval-prompts", "4"]
        run = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
        if run.returncode != 0:
            raise RuntimeError(run.stderr[-2000:])
        rows = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["perf/seconds"] for row in rows[1:])


def table(lines):
    """The seconds of all rounds by script, neighbors and setting, in markdown."""
    settings = list(dict.fromkeys(line["setting"] for line in lines))
    rows = [f"| | {' | '.join(settings)} |", "|---" * (len(settings) + 1) + "|"]
    for script in dict.fromkeys(line["script"] for line in lines):
        for neighbors, name in ((0, "idle"), (1, "beside a busy program")):
            cells = []
            for setting in settings:
                wanted = dict(script=script, neighbors=neighbors, setting=setting)
                found = [line["seconds"] for line in lines if wanted.items() <= line.items()]
                cells.append(", ".join(f"{x:.2f}" for x in found))
            rows.append(f"| `{script}.py`, {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--settings", nargs="+", default=["none", "100000", "10000", "passive"])
    parser.add_argument("--scripts", nargs="+", default=SCRIPTS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", default=str(ROOT / "results/speed/busy.jsonl"))
    parser.add_argument("--show", action="store_true")
    args = parser.parse_args()
    if args.show:
        print(table([json.loads(line) for line in Path(args.out).read_text().splitlines()]))
        return
    with open(args.out, "w") as file:
        for script in args.scripts:
            for number in range(args.rounds):
                for neighbors in (0, 1):
                    for setting in args.settings:
                        busy = [
                            subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(neighbors)
                        ]
                        try:
                            seconds = seconds_per_update(script, setting, 5 if neighbors else 11)
                        finally:
                            for process in busy:
                                process.kill()
                                process.wait()
                        line = dict(script=script, round=number, neighbors=neighbors, setting=setting)
                        file.write(json.dumps(line | dict(seconds=seconds, cores=os.cpu_count())) + "\n")
                        file.flush()
                        print(line, f"{seconds:.2f}", flush=True)


if __name__ == "__main__":
    main()
