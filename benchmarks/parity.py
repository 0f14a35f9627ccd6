"""Does a script learn as TRL's trainer does? Many seeds of both on the same job, and a test of equivalence.

    python benchmarks/parity.py run grpo --seeds 1-3 --jobs 2 --trl FOLDER     # adds what is not there yet
    python benchmarks/parity.py power grpo --seeds 1-3    # from a pilot: the seeds that 80 % power takes
    python benchmarks/parity.py table                     # the table of docs/parity.md
    python benchmarks/parity.py plot                      # docs/parity-JOB.png

A job is one model, reward, data set, batch, number of epochs and minibatches, learning rate, schedule, clip,
KL setting, temperature and length for all sides (parity_jobs.py). A side is our script or a trainer of TRL,
as it ships. Some jobs have more sides: our script with TRL's way of doing something, so that a difference
has a name. Every run has its own process with one thread. Its policy is copied every few updates, and after
training all copies answer the same held-out prompts with the same random numbers, whatever the side and the
seed. So score, KL, entropy and length of all sides are measured by one program.

A line of results/parity/JOB.jsonl is one run. FOLDER: `pip install --no-deps --target FOLDER trl==1.16.0`;
the job critic needs trl==1.12.0.
Needs scipy.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, median, stdev

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results/parity"
PLAN = ROOT / "results/parity/plan.json"


# ---- Runs --------------------------------------------------------------------------------------------------


def read(job):
    """The runs of a job that are there. -> list of dict, in the order of side and seed"""
    path = RESULTS / f"{job}.jsonl"
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(rows, key=lambda row: (row["side"], row["seed"]))


def run_one(job, side, seed, trl):
    """One run in a process of its own, with one thread. Its line is added to the results."""
    words = [sys.executable, str(ROOT / "benchmarks/parity_jobs.py"), job, side, str(seed)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if not side.startswith("ours"):
        environment["PYTHONPATH"] = str(trl)
    end = subprocess.run(words, env=environment, capture_output=True, text=True, cwd=ROOT)
    if end.returncode:
        raise RuntimeError(f"{job}, {side}, seed {seed}:\n{end.stdout[-2000:]}{end.stderr[-3000:]}")
    row = json.loads(end.stdout.splitlines()[-1])
    RESULTS.mkdir(parents=True, exist_ok=True)
    with open(RESULTS / f"{job}.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")
    print(f"{job}, {side}, seed {seed}: {row['seconds']:.0f} s, {row['final']}", flush=True)


def run_all(job, seeds, jobs, trl, only):
    """All runs of a job that are not there yet, `jobs` at a time."""
    from parity_jobs import JOBS

    done = {(row["side"], row["seed"]) for row in read(job)}
    sides = [side for side in JOBS[job].sides if only in (None, side)]
    todo = [(side, seed) for seed in seeds for side in sides if (side, seed) not in done]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda run: run_one(job, *run, trl), todo))


# ---- Statistics --------------------------------------------------------------------------------------------


def difference(ours, theirs, paired=False):
    """Mean of ours - mean of theirs, with a 90 % interval. -> difference, low, high

    ours, theirs: one number per seed. paired: both sides start from the same weights for a seed, so the interval
    is that of the differences per seed (paired t); otherwise it is Welch's. If the whole interval lies within
    +- the margin, both of the one-sided tests at 5 % reject a difference as large as the margin: the sides are
    equivalent (TOST, Schuirmann 1987).
    """
    from scipy.stats import ttest_ind, ttest_rel

    result = ttest_rel(ours, theirs) if paired else ttest_ind(ours, theirs, equal_var=False)
    interval = result.confidence_interval(0.9)
    return mean(ours) - mean(theirs), interval.low, interval.high


def power(sd, margin, seeds, paired=False):
    """How likely the 90 % interval lies within the margin, if the sides are equal. -> float from 0 to 1

    sd: standard deviation over seeds, the same for both sides (paired: of the differences); seeds: runs per
    side. The interval's half width is taken at the expected sd.
    """
    from scipy.stats import norm, t

    error = sd * ((1 if paired else 2) / seeds) ** 0.5
    degrees_of_freedom = seeds - 1 if paired else 2 * seeds - 2
    room = margin - t.ppf(0.95, degrees_of_freedom) * error  # how far the difference may be off
    return max(0.0, 2 * norm.cdf(room / error) - 1) if error > 0 else 1.0


def seeds_for_power(sd, margin, paired=False, most=10):
    """The fewest seeds per side with a power of 80 %; None if `most` are not enough."""
    for seeds in range(3, most + 1):
        if power(sd, margin, seeds, paired) >= 0.8:
            return seeds
    return None


def print_power(job, seeds):
    """What a pilot says: the gain, the spread over seeds, and the power for margins of the final metrics."""
    from parity_jobs import JOBS

    paired = JOBS[job].paired
    rows = [row for row in read(job) if row["seed"] in seeds]
    counts = Counter(row["side"] for row in rows)
    sides = sorted(side for side in counts if counts[side] > 1)  # one run has no spread
    rows = [row for row in rows if row["side"] in sides]
    for metric in JOBS[job].tested:
        start = mean(row["curve"][0][metric] for row in rows)
        end = mean(row["final"][metric] for row in rows)
        finals = {side: [row["final"][metric] for row in rows if row["side"] == side] for side in sides}
        # The largest spread, because the plan must hold for all sides.
        if paired:
            sd = max(
                stdev(a - b for a, b in zip(finals[ours], finals[peer], strict=True))
                for ours, peer in pairs(sides)
            )
            spread = f"largest sd of the differences {sd:.4f}"
        else:
            sd = max(stdev(values) for values in finals.values())
            spread = f"largest sd over seeds {sd:.4f}"
        print(f"{job}, {metric}: start {start:.4f}, end {end:.4f}, gain {end - start:.4f}, {spread}")
        for share, of, size in [
            (0.05, "gain", end - start),
            (0.1, "gain", end - start),
            (0.2, "gain", end - start),
            (0.03, "end", end),
        ]:
            margin = share * abs(size)
            powers = ", ".join(f"{n} seeds {power(sd, margin, n, paired):.2f}" for n in (5, 8, 10))
            need = seeds_for_power(sd, margin, paired)
            print(f"  margin {share:.0%} of the {of} = {margin:.4f}: power {powers}; 80 % takes {need} seeds")


# ---- Table and figures -------------------------------------------------------------------------------------


def verdict(low, high, margin):
    """What an interval says about a margin."""
    if -margin < low and high < margin:
        return "equivalent"
    if low > 0 or high < 0:
        return "different"
    return "inconclusive"


def table():
    """The markdown table: for each job, side of ours and peer, the tested final metrics and the seconds."""
    from parity_jobs import JOBS

    plan = json.loads(PLAN.read_text())
    head = [
        "job",
        "side",
        "peer",
        "metric",
        "ours",
        "peer's",
        "difference (90 % interval)",
        "margin",
        "verdict",
        "time, peer / ours",
    ]
    lines = [head, ["---"] * len(head)]
    for job, planned in plan.items():
        rows = [row for row in read(job) if row["seed"] in planned["seeds"]]
        for side, peer in pairs(JOBS[job].sides):
            ours, theirs = ([row for row in rows if row["side"] == name] for name in (side, peer))
            if min(len(ours), len(theirs)) < len(planned["seeds"]):
                continue  # nobody should look at a part of the planned runs
            ratio = "-"
            if as_it_ships(side) and as_it_ships(peer):
                seconds = [median(row["seconds"] for row in half) for half in (theirs, ours)]
                ratio = f"{seconds[0] / seconds[1]:.2f}"
            for metric in JOBS[job].tested:
                a, b = ([row["final"][metric] for row in half] for half in (ours, theirs))
                delta, low, high = difference(a, b, JOBS[job].paired)
                margin = planned["margin"][metric]
                lines.append([
                    job, side, peer, JOBS[job].metrics[metric].split(",")[0],
                    f"{mean(a):.4f} ({len(a)} seeds, sd {stdev(a):.4f})",
                    f"{mean(b):.4f} ({len(b)} seeds, sd {stdev(b):.4f})",
                    f"{delta:+.4f} ({low:+.4f} to {high:+.4f})",
                    f"{margin:.4f}", verdict(low, high, margin), ratio,
                ])  # fmt: skip
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def as_it_ships(side):
    """Is it a side without changes? The others ran later, beside other work, so their times do not compare."""
    return "," not in side


def pairs(sides):
    """Each of our sides with each peer. -> list of (side, peer)"""
    ours = [name for name in sides if name.startswith("ours")]
    return [(side, peer) for peer in sides if peer not in ours for side in ours]


def plot(job):
    """docs/parity-JOB.png: median and 10 to 90 % band of each side, over episodes and over minutes."""
    import numpy as np
    from matplotlib.figure import Figure
    from parity_jobs import JOBS

    rows = read(job)
    metrics = JOBS[job].metrics
    first = next(iter(metrics))
    figure = Figure(figsize=(3 * (len(metrics) + 1), 3.8), layout="constrained")
    axes = figure.subplots(1, len(metrics) + 1)
    for side in JOBS[job].sides:
        runs = [row for row in rows if row["side"] == side]
        if len(runs) < 2:  # one run has no band
            continue
        episodes = [point["episode"] for point in runs[0]["curve"]]
        for axis, (metric, title) in zip(axes, metrics.items()):
            values = np.array([[point[metric] for point in row["curve"]] for row in runs])  # [seeds, points]
            low, middle, high = np.quantile(values, [0.1, 0.5, 0.9], axis=0)
            [line] = axis.plot(episodes, middle, label=f"{side} ({len(runs)} seeds)")
            axis.fill_between(episodes, low, high, alpha=0.25, color=line.get_color())
            axis.set(title=title, xlabel=JOBS[job].unit)
        minutes = np.array([[point["seconds"] / 60 for point in row["curve"]] for row in runs])
        values = np.array([[point[first] for point in row["curve"]] for row in runs])
        if as_it_ships(side):
            axes[-1].plot(np.median(minutes, 0), np.median(values, 0), color=line.get_color(), label=side)
    axes[-1].set(title=f"median {first}", xlabel="minutes of training, one thread")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.locator_params(axis="x", nbins=5)
        axis.title.set_fontsize(9)
    lines, labels = axes[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=len(labels), fontsize=8)
    figure.suptitle(f"{JOBS[job].title}: median and 10 to 90 % band over seeds")
    figure.savefig(ROOT / f"docs/parity-{job}.png", dpi=100)


def seed_range(text):
    """1-3 or 5 -> list of int"""
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Our scripts and TRL's trainers on the same jobs.")
    parser.add_argument("what", choices=["run", "power", "table", "plot"])
    parser.add_argument("job", nargs="?")
    parser.add_argument("--seeds", type=seed_range, default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--side", help="only this side")
    parser.add_argument("--trl", type=Path, help="folder with the TRL that the job needs")
    flags = parser.parse_args()
    if flags.what == "run":
        run_all(flags.job, flags.seeds, flags.jobs, flags.trl, flags.side)
    elif flags.what == "power":
        print_power(flags.job, flags.seeds)
    elif flags.what == "table":
        print(table())
    else:
        from parity_jobs import JOBS

        for job in [flags.job] if flags.job else JOBS:
            if read(job):
                plot(job)
