"""Does a script learn as TRL's trainer does? Many seeds of both on the same job, and a test of equivalence.

    python benchmarks/parity.py run grpo --seeds 1-3 --jobs 2 --trl FOLDER     # adds what is not there yet
    python benchmarks/parity.py time --jobs 2 --trl FOLDER --trl112 FOLDER112  # the seconds of each side
    python benchmarks/parity.py table                     # the tables of docs/parity.md
    python benchmarks/parity.py plot                      # docs/parity*.png

A job is one model, reward, data set, batch, number of epochs and minibatches, learning rate, schedule, clip,
KL setting, temperature and length for all sides (parity_jobs.py). A side is our script or a trainer of TRL,
as it ships. Some jobs have more sides: our script with TRL's way of doing something, so that a difference
has a name. Every run has its own process with one thread. Its policy is copied every few updates, and after
training all copies answer the same held-out prompts with the same random numbers, whatever the side and the
seed. So score, KL, entropy and length of all sides are measured by one program.

A line of results/parity/JOB.jsonl is one run. FOLDER: `pip install --no-deps --target FOLDER trl==1.16.0`;
FOLDER112, for the job critic: the same with trl==1.12.0.
Needs scipy.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, median, stdev

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results/parity"
PLAN = ROOT / "results/parity/plan.json"
TIMES = ROOT / "results/parity/times.jsonl"


# ---- Runs --------------------------------------------------------------------------------------------------


def read(job):
    """The runs of a job that are there. -> list of dict, in the order of side and seed"""
    path = RESULTS / f"{job}.jsonl"
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(rows, key=lambda row: (row["side"], row["seed"]))


def run_one(job, side, seed, trl, file, *words):
    """One run in a process of its own, with one thread. Its line is added to file. words: options"""
    command = [sys.executable, str(ROOT / "benchmarks/parity_jobs.py"), job, side, str(seed), *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if side.startswith("TRL"):
        environment["PYTHONPATH"] = str(trl)
    end = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    if end.returncode:
        raise RuntimeError(f"{job}, {side}, seed {seed}:\n{end.stdout[-2000:]}{end.stderr[-3000:]}")
    row = json.loads(end.stdout.splitlines()[-1])
    RESULTS.mkdir(parents=True, exist_ok=True)
    with open(file, "a") as lines:
        lines.write(json.dumps(row) + "\n")
    print(f"{job}, {side}, seed {seed}: {row['seconds']} s, {row.get('final', '')}", flush=True)


def run_all(job, seeds, jobs, trl, only):
    """All runs of a job that are not there yet, `jobs` at a time."""
    from parity_jobs import JOBS

    done = {(row["side"], row["seed"]) for row in read(job)}
    sides = [side for side in JOBS[job].sides if only in (None, side)]
    todo = [(side, seed) for seed in seeds for side in sides if (side, seed) not in done]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda run: run_one(job, *run, trl, RESULTS / f"{job}.jsonl"), todo))


def time_all(jobs, trl, trl_of_critic):
    """Train each side without changes once more, `jobs` at a time, without any measurement.

    The planned runs took place next to other work, so their times do not compare. Here, each side runs next to
    another side, on a machine that does nothing else.
    """
    from parity_jobs import JOBS

    with ThreadPoolExecutor(jobs) as pool:
        ends = [
            pool.submit(run_one, job, side, 1, trl_of_critic if job == "critic" else trl, TIMES, "--time")
            for job in JOBS
            for side in JOBS[job].sides
            if as_it_ships(side)
        ]
        for end in ends:
            end.result()


def read_times(job, side):
    """Runs that only measured time. -> list of lists: [episode, seconds] of each copy"""
    if not TIMES.exists():
        return []
    rows = [json.loads(line) for line in TIMES.read_text().splitlines()]
    return [row["seconds"] for row in rows if (row["job"], row["side"]) == (job, side)]


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


# ---- Tables and figures ------------------------------------------------------------------------------------


def verdict(low, high, margin):
    """What an interval says about a margin."""
    if -margin < low and high < margin:
        return "equivalent"
    if low > 0 or high < 0:
        return "different"
    return "inconclusive"


def compare(job):
    """All comparisons of a job whose planned runs are there. -> list of dict

    ours, theirs: one number per seed; difference, low, high, margin, verdict;
    planned: False if the comparison was added after the plan
    """
    from parity_jobs import JOBS

    about, planned = JOBS[job], json.loads(PLAN.read_text())[job]
    rows = [row for row in read(job) if row["seed"] in planned["seeds"]]
    found = []
    for side, peer in [*about.comparisons, *about.explored]:
        halves = [[row for row in rows if row["side"] == name] for name in (side, peer)]
        if min(len(half) for half in halves) < len(planned["seeds"]):
            continue  # nobody should look at a part of the planned runs
        for metric in about.tested:
            ours, theirs = ([row["final"][metric] for row in half] for half in halves)
            delta, low, high = difference(ours, theirs, about.paired)
            margin = planned["margin"][metric]
            found.append(
                {
                    "side": side,
                    "peer": peer,
                    "metric": metric,
                    "ours": ours,
                    "theirs": theirs,
                    "difference": delta,
                    "low": low,
                    "high": high,
                    "margin": margin,
                    "verdict": verdict(low, high, margin),
                    "planned": (side, peer) in about.comparisons,
                }
            )
    return found


def table(job):
    """The markdown table of a job: final metrics of both sides of each comparison, and the verdicts."""
    from parity_jobs import JOBS

    about = JOBS[job]
    d = about.digits
    head = ["A", "B", "metric", "mean of A", "mean of B", "A - B (90 % interval)", "margin", "verdict"]
    lines = [head, ["---"] * len(head)]
    for row in compare(job):
        spread = ""
        if about.paired:
            differences = [a - b for a, b in zip(row["ours"], row["theirs"], strict=True)]
            spread = f", sd {stdev(differences):.{d}f}"
        word = f"**{row['verdict']}**" if row["planned"] else f"({row['verdict']})"
        lines.append(
            [
                row["side"],
                row["peer"],
                NAMES[row["metric"]],
                f"{mean(row['ours']):.{d}f} (sd {stdev(row['ours']):.{d}f})",
                f"{mean(row['theirs']):.{d}f} (sd {stdev(row['theirs']):.{d}f})",
                f"{row['difference']:+.{d}f} ({row['low']:+.{d}f} to {row['high']:+.{d}f}){spread}",
                f"{row['margin']:.{d}f}",
                word,
            ]
        )
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def time_table():
    """The markdown table of the seconds of all sides that ran as they ship, and the ratio to ours."""
    from parity_jobs import JOBS

    lines = [["job", "side", "seconds of training", "times ours"], ["---"] * 4]
    for job in JOBS:
        seconds = {}  # of the last copy; the median of all runs
        for side in JOBS[job].sides:
            runs = read_times(job, side)
            if runs:
                seconds[side] = median(run[-1][1] for run in runs)
        for side, x in seconds.items():
            lines.append([job, side, f"{x:.0f}", "-" if side == "ours" else f"{x / seconds['ours']:.2f}"])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


NAMES = {
    "score": "score",
    "kl": "KL",
    "loss": "held-out loss",
    "accuracy": "held-out accuracy",
}


def as_it_ships(side):
    """Is it a side without changes?"""
    return "," not in side


def plot(job):
    """docs/parity-JOB.png: median and 10 to 90 % band of each side, over episodes and over minutes."""
    import numpy as np
    from matplotlib.figure import Figure
    from parity_jobs import JOBS

    rows = read(job)
    metrics = JOBS[job].metrics
    first = next(iter(metrics))
    panels = len(metrics) + 1
    columns = 2 if panels == 4 else 3
    height = math.ceil(panels / columns)
    figure = Figure(figsize=(4 * columns, 3.1 * height + 0.9), layout="constrained")
    axes = figure.subplots(height, columns).flatten()
    for side in JOBS[job].sides:
        runs = [row for row in rows if row["side"] == side]
        if len(runs) < 2:  # one run has no band
            continue
        style = style_of(side, JOBS[job].sides)
        episodes = [point["episode"] for point in runs[0]["curve"]]
        for axis, (metric, title) in zip(axes, metrics.items()):
            values = np.array([[point[metric] for point in row["curve"]] for row in runs])  # [seeds, points]
            low, middle, high = np.quantile(values, [0.1, 0.5, 0.9], axis=0)
            axis.plot(episodes, middle, label=f"{side} ({len(runs)} seeds)", **style)
            if as_it_ships(side):
                axis.fill_between(episodes, low, high, alpha=0.2, color=style["color"], linewidth=0)
            axis.set(title=title, xlabel=JOBS[job].unit)
        times = read_times(job, side)
        if times:
            minutes = np.median([[seconds / 60 for _, seconds in run] for run in times], axis=0)
            values = np.array([[point[first] for point in row["curve"]] for row in runs])
            axes[len(metrics)].plot(minutes, np.median(values, 0), **style)
    axes[len(metrics)].set(title=metrics[first], xlabel="minutes of training, one thread")
    for axis in axes[:panels]:
        axis.grid(alpha=0.3)
        axis.locator_params(axis="x", nbins=5)
        axis.title.set_fontsize(11)
        if JOBS[job].log_scale and axis.get_title() == metrics[first]:
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter("{x:g}")
    for axis in axes[panels:]:
        axis.axis("off")
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=columns - 1, fontsize=10
    )
    figure.suptitle(f"{JOBS[job].title}: median and 10 to 90 % of the seeds")
    figure.savefig(ROOT / f"docs/parity-{job}.png", dpi=100)


def style_of(side, sides):
    """Ours is blue, the peers as they ship are orange and green. Sides with a change are dashed or dotted."""
    if side == "ours":
        return {"color": "C0"}
    if as_it_ships(side):
        peers = [name for name in sides if as_it_ships(name) and name != "ours"]
        return {"color": ["C1", "C2"][peers.index(side)]}
    changed = [name for name in sides if not as_it_ships(name)]
    color, dashes = [("#7b3294", "--"), ("#444444", ":"), ("#d62728", "-.")][changed.index(side) % 3]
    return {"color": color, "linestyle": dashes}


def plot_summary():
    """docs/parity.png: the difference and its interval of each planned comparison, in units of the margin."""
    from matplotlib.figure import Figure
    from parity_jobs import JOBS

    rows = [row for job in JOBS for row in compare(job) if row["planned"]]
    colors = {"equivalent": "C0", "different": "C3", "inconclusive": "0.45"}
    figure = Figure(figsize=(11, 0.32 * len(rows) + 1.4), layout="constrained")
    axis = figure.subplots()
    axis.axvspan(-1, 1, color="C0", alpha=0.12, linewidth=0)
    axis.axvline(0, color="0.6", linewidth=1)
    names = []
    for y, row in enumerate(rows):
        color = colors[row["verdict"]]
        low, middle, high = (row[name] / row["margin"] for name in ("low", "difference", "high"))
        axis.plot([low, high], [y, y], color=color, linewidth=2.5, solid_capstyle="butt")
        axis.plot(middle, y, "o", color=color)
        change = row["side"].removeprefix("ours").removeprefix(", ")
        names.append(f"{row['peer']}{f', ours with {change}' if change else ''}: {NAMES[row['metric']]}")
        axis.text(1.01, y, row["verdict"], color=color, va="center", transform=axis.get_yaxis_transform())
    axis.set_yticks(range(len(rows)), names)
    axis.invert_yaxis()
    axis.set(xlabel="ours - TRL's, divided by the margin; lines: 90 % intervals")
    axis.set_title("equivalent: the whole line is in the band")
    figure.savefig(ROOT / "docs/parity.png", dpi=100)


def seed_range(text):
    """1-3 or 5 -> list of int"""
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Our scripts and TRL's trainers on the same jobs.")
    parser.add_argument("what", choices=["run", "time", "table", "plot"])
    parser.add_argument("job", nargs="?")
    parser.add_argument("--seeds", type=seed_range, default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--side", help="only this side")
    parser.add_argument("--trl", type=Path, help="folder with the TRL that the job needs")
    parser.add_argument("--trl112", type=Path, help="for time: folder with TRL 1.12, for the job critic")
    flags = parser.parse_args()
    if flags.what == "run":
        run_all(flags.job, flags.seeds, flags.jobs, flags.trl, flags.side)
    elif flags.what == "time":
        time_all(flags.jobs, flags.trl, flags.trl112)
    else:
        from parity_jobs import JOBS

        names = [flags.job] if flags.job else list(JOBS)
        if flags.what == "table":
            print("\n\n".join([*(f"{job}\n\n{table(job)}" for job in names), time_table()]))
        else:
            plot_summary()
            for job in names:
                plot(job)
