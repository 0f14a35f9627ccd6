"""What each trick that has a flag is worth: the tiny recipes, and the same with one flag changed, seeds 1, 2, 3.

    python benchmarks/ablations.py --jobs 2               # all runs, one thread each; adds what is not there yet
    python benchmarks/ablations.py --only rloo_tldr k3    # runs whose script, name or flags have all these words
    python benchmarks/ablations.py --table                # only write the tables again

A run is `python SCRIPT.py --seed S FLAGS --output-dir runs/ablations/...`. A line of results.jsonl is what is kept of
it: the held-out numbers of evaluation.json, and from metrics.jsonl the extremes and the means over the last tenth of
the updates. Tables go to README.md next to results.jsonl. To try it out: --flags "--total-episodes 256" --folder DIR.

To add a change, add a line to CHANGES: script, name, numbers of the tricks in docs/implementation_details.md, flags.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / "results/ablations"
SEEDS = (1, 2, 3)
S, D, R = "ppo_sentiment", "ppo_dialog", "rloo_tldr"
AS_IT_IS = "as it is"
CHECKPOINTS = {S: "checkpoints/reviews-lm", D: "checkpoints/dialogs-lm"}
COLUMNS = {  # script -> numbers of the table, the first ones with their difference to the run as it is
    S: (["score mean"], ["KL, nats per response", "perplexity under the reference"]),
    D: (["intent", "meteor"], ["KL, nats per response", "perplexity of the references"]),
    R: (["win rate", "score mean"], ["KL, nats per response", "ended by itself", "tokens per response"]),
}
LAST = ("objective/kl", "objective/kl_coef", "objective/scores", "policy/approxkl_avg", "policy/clipfrac_avg", "policy/entropy_avg",
        "val/clipfrac_avg", "val/ratio", "loss/value_avg", "completions/mean_length", "completions/clipped_ratio",
        "frac_reward_zero_std")  # fmt: skip
HIGHEST = ("objective/kl", "policy/approxkl_avg", "val/ratio_var")


class Change(NamedTuple):
    """A line of CHANGES: one thing that a recipe does otherwise."""

    script: str
    name: str
    tricks: tuple
    flags: str


PPO_CHANGES = [  # of both PPO scripts
    ("a fixed KL coefficient", (21, 44), "--kl-target None"),
    ("no price on the KL", (), "--kl-coef 0 --kl-target None"),
    ("rewards divided by their deviation", (20,), "--whiten-rewards"),
    ("policy loss not clipped", (), "--cliprange 1e9"),
    ("value loss not clipped", (), "--cliprange-value 1e9"),
    ("lambda 1", (), "--lam 1"),
    ("lambda 0", (), "--lam 0"),
    ("one epoch", (27,), "--num-ppo-epochs 1"),
    ("gradients not clipped", (), "--max-grad-norm None"),
    ("Adam's epsilon 1e-5", (31,), "--adam-eps 1e-5"),
]
CHANGES = [Change(*row) for row in [
    (S, AS_IT_IS, (), ""),
    *((S, *row) for row in PPO_CHANGES),
    (S, "one minibatch, one optimizer step an epoch", (27,), "--num-mini-batches 1 --per-device-train-batch-size 128"),
    (S, "scores clipped to +-2", (18,), "--score-clip 2"),
    (S, "a critic with its own weights", (), f"--value-model-path {CHECKPOINTS[S]}"),
    (D, AS_IT_IS, (), ""),
    *((D, *row) for row in PPO_CHANGES),
    (D, "four minibatches, four optimizer steps an epoch", (27,), "--num-mini-batches 4 --gradient-accumulation-steps 1"),
    (D, "intent weighs as much as METEOR", (), "--intent-weight 1"),
    (D, "a missing EOS costs 1", (16, 17), "--missing-eos-penalty 1"),
    (D, "a critic with its own weights", (), f"--value-model-path {CHECKPOINTS[D]}"),
    (D, "intent 0 or 1, not its probability", (), "--intent-reward match"),
    (D, "no METEOR in the reward", (39,), "--meteor-weight 0"),
    (D, "no intent in the reward", (39,), "--intent-weight 0"),
    (R, AS_IT_IS, (), ""),
    (R, "a missing EOS costs nothing", (16, 17), "--missing-eos-penalty None"),
    (R, "no stop token", (16,), "--stop-token None --missing-eos-penalty None"),
    (R, "2 responses to a prompt", (25,), "--rloo-k 2"),
    (R, "no price on the KL", (), "--kl-coef 0"),
    (R, "k2 in the loss", (32,), "--kl-estimator k2"),
    (R, "k3 in the loss, as GRPO", (32,), "--kl-estimator k3"),
    (R, "rewards divided by their deviation", (20, 26), "--whiten-rewards"),
    (R, "policy loss not clipped", (), "--cliprange 1e9"),
    (R, "scores clipped to +-2", (18,), "--score-clip 2"),
    (R, "four epochs, as TRL", (27,), "--num-ppo-epochs 4"),
    (R, "one minibatch, one optimizer step an update", (27,), "--num-mini-batches 1 --per-device-train-batch-size 128"),
    (R, "gradients not clipped", (), "--max-grad-norm None"),
    (R, "Adam's epsilon 1e-5", (31,), "--adam-eps 1e-5"),
]]  # fmt: skip


def slug(change, seed):
    """The name of a run."""
    return f"{change.script}-{re.sub('[^a-z0-9]+', '-', change.name.lower()).strip('-')}-s{seed}"


def read(path):
    """The results so far: (script, flags, seed) -> line."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for line in lines:
        line["flags"] = line["flags"].replace("--kl-in-loss ", "")  # an earlier edition had this flag, too
    return {(line["script"], line["flags"], line["seed"]): line for line in lines}


def summary(rows):
    """What is kept of metrics.jsonl: means over the last tenth, extremes, and the seconds of all updates."""
    last = rows[-max(1, len(rows) // 10) :]
    kept = {f"{name}, last": sum(row[name] for row in last) / len(last) for name in LAST if name in rows[0]}
    kept |= {f"{name}, highest": max(row[name] for row in rows) for name in HIGHEST if name in rows[0]}
    seconds = sum(row["perf/seconds"] for row in rows)
    return kept | {"val/ratio, first": rows[0]["val/ratio"], "updates": len(rows), "seconds": seconds}


def run(change, seed, extra, path):
    """One run in a process of its own. Its line is added to path."""
    with tempfile.TemporaryDirectory() as folder:
        run_folder = Path(folder, "run")
        words = [sys.executable, f"{change.script}.py", "--seed", str(seed)]
        words += [*shlex.split(f"{change.flags} {extra}"), "--output-dir", str(run_folder)]
        words += ["--save-every", "0", "--num-sample-generations", "0"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        end = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
        # 2: the script stopped, because something is not finite.
        if end.returncode not in (0, 2) or not (run_folder / "metrics.jsonl").exists():
            raise RuntimeError(f"{slug(change, seed)}:\n{end.stdout[-1000:]}{end.stderr[-3000:]}")
        rows = [json.loads(text) for text in (run_folder / "metrics.jsonl").read_text().splitlines()]
        line = dict(script=change.script, name=change.name, flags=change.flags, seed=seed)
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
        line |= dict(commit=commit.strip(), metrics=summary(rows))
        if end.returncode == 2:
            line["stopped"] = end.stderr.strip().splitlines()[-1]
        else:
            line |= json.loads((run_folder / "evaluation.json").read_text())
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\n")
    print(slug(change, seed), line.get("after", line.get("stopped")), flush=True)


def spread(values, digits=3):
    """Mean, and in brackets the lowest and the highest."""
    low, high = (f"{x:.{digits}f}" for x in (min(values), max(values)))
    if len(values) == 1:
        return f"{low} (one seed)"
    return f"{sum(values) / len(values):.{digits}f} ({low} .. {high})"


def table(script, results):
    """A table in Markdown of one script: means over the seeds, lowest and highest; differences are of runs
    with the same seed."""
    main, others = COLUMNS[script]
    heads = ["changed", "tricks", *(head for name in main for head in (name, "difference")), *others]
    rows = []
    for change in [change for change in CHANGES if change.script == script]:
        lines = [results[key] for seed in SEEDS if (key := (script, change.flags, seed)) in results]
        ended = [line for line in lines if "after" in line]
        if not lines:
            continue
        name = change.name
        if change.flags:
            name += f": `{change.flags}`"
        if len(ended) < len(lines):
            name += f"; stopped by itself in {len(lines) - len(ended)} of {len(lines)} runs"
        if len(lines) < len(SEEDS):
            name += f"; {len(lines)} of {len(SEEDS)} seeds"
        cells = [name, ", ".join(map(str, change.tricks))]
        for number in main + others:
            cells.append(spread([line["after"][number] for line in ended]) if ended else "")
            if number in main:
                pairs = []
                for line in ended:
                    start = results.get((script, "", line["seed"]), {}).get("after")
                    if start:
                        pairs.append(line["after"][number] - start[number])
                cells.append(spread(pairs) if pairs and change.flags else "")
        rows.append(cells)
    if not rows:
        return ""
    return "\n".join(["| " + " | ".join(row) + " |" for row in (heads, ["---"] * len(heads), *rows)])


def tables(results):
    """All tables, with a heading each."""
    texts = {script: table(script, results) for script in (S, D, R)}
    return "\n\n".join(f"### {script}.py\n\n{text}" for script, text in texts.items() if text)


README = """# Ablations

What `python benchmarks/ablations.py` measured: the tiny recipes with one flag changed, with the seeds {seeds}, each run on one thread.
Measured before the scripts were rewritten (commits ca914eb and 9289153; each line of `results.jsonl` has its commit).

Cells are means over the seeds, with the lowest and the highest value in brackets. A difference is to the unchanged run with the same
seed. If its brackets contain 0, three seeds do not tell the two apart. "tricks" are numbers of traps in
[implementation details](../../docs/implementation_details.md), which also says [what these tables
show](../../docs/implementation_details.md#what-the-ablations-show). `results.jsonl` has one line per run: the held-out numbers `before`
and `after`, and means and extremes of the metrics over the last tenth of the updates.

{tables}
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="runs that have all these words"
    )
    parser.add_argument("--folder", type=Path, default=HOME, help="where results.jsonl and README.md are")
    parser.add_argument("--flags", default="", help="flags for every run; needs another --folder")
    parser.add_argument("--table", action="store_true", help="write the tables again and start nothing")
    args = parser.parse_args()
    if args.flags and args.folder == HOME:
        parser.error("--flags makes other runs than those of results/ablations: name another --folder")
    path = args.folder / "results.jsonl"
    done, todo = read(path), []
    for seed in SEEDS:  # all changes with the first seed, then with the next
        for change in CHANGES:
            words = f"{change.script} {change.name} {change.flags}".lower()
            is_wanted = all(word.lower() in words for word in args.only)
            if is_wanted and (change.script, change.flags, seed) not in done:
                todo.append((change, seed))
    if not args.table:
        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(lambda job: run(*job, args.flags, path), todo))
    text = tables(read(path))
    (args.folder / "README.md").write_text(README.format(seeds=", ".join(map(str, SEEDS)), tables=text))
