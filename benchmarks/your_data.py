"""Print the tables of docs/your_data.md, from the runs of its commands in results/your-data.

python benchmarks/your_data.py
"""

import json
import sys
from pathlib import Path

from archive import read, read_rows

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "results/your-data"
sys.path.insert(0, str(ROOT / "examples"))
from make_answers import THINGS, good_parts, make_rows  # noqa: E402


def markdown(header, rows):
    """A table of cells."""
    lines = ["| " + " | ".join(line) + " |" for line in [header, *rows]]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])


def evaluation(name):
    """The final table of a run."""
    return json.loads(read(RUNS / name, "evaluation.json"))


def answers(name):
    """The held-out prompts of a run, with the reference and the answers before and after. -> list of dict"""
    return read_rows(RUNS / name, "evaluation_samples.jsonl")


def mean_parts(rows, column):
    """The mean number of good parts of the texts in one column."""
    return sum(good_parts([row["prompt"] for row in rows], [row[column] for row in rows])) / len(rows)


def wrong_articles(rows, column):
    """How many answers name an article of the shop, but not that of the question; how many name any."""
    named, wrong = 0, 0
    for row in rows:
        [asked] = [thing for thing in THINGS if thing in row["prompt"]]
        named += any(thing in row[column] for thing in THINGS)
        wrong += any(thing in row[column] for thing in THINGS) and asked not in row[column]
    return wrong, named


def first_rows():
    """The first rows of the table of comparisons."""
    return markdown(["question", "a", "b", "winner"], [list(row.values()) for row in make_rows()[:4]])


def results():
    """Before and after, for RLOO and DPO."""
    runs = [evaluation(name)[when] for name in ("rloo", "dpo") for when in ("before", "after")]
    lines = []
    for name in ("win rate", "KL, nats per response", "ended by itself", "tokens per response"):
        lines.append(
            [name, *(f"{max(run[name], 0):.3f}" for run in runs)]
        )  # 0 is -0 now and then, by rounding
    parts = [mean_parts(answers(name), when) for name in ("rloo", "dpo") for when in ("before", "after")]
    lines.insert(1, ["good parts, of 5", *(f"{x:.2f}" for x in parts)])
    return markdown(["held-out questions", "RLOO: before", "after", "DPO: before", "after"], lines)


def samples():
    """The first four held-out questions with RLOO's answers."""
    lines = []
    for row in answers("rloo")[:4]:
        question = row["prompt"].removeprefix("Question: ").removesuffix("\nAnswer:")
        lines.append([question, row["before"].strip(), row["after"].strip()])
    return markdown(["question", "before", "after"], lines)


def too_far():
    """Reward and judge over the updates of RLOO without a KL penalty."""
    rows = read_rows(RUNS / "rloo-kl0", "metrics.jsonl")
    final = evaluation("rloo-kl0")
    points = [(0, final["before"])]
    for row in rows:
        if "eval/win rate" in row:
            points.append((row["update"], {name.removeprefix("eval/"): x for name, x in row.items()}))
    points.append((rows[-1]["update"], final["after"]))
    lines = [["update", *(str(update) for update, _ in points)]]
    for name in ("score mean", "win rate", "KL, nats per response"):
        lines.append([name, *(f"{max(x[name], 0) if 'KL' in name else x[name]:.2f}" for _, x in points)])
    return markdown(lines[0], lines[1:])


def too_long():
    """Training loss and held-out loss over the updates of a long run of sft.py."""
    rows = read_rows(RUNS / "sft-long", "metrics.jsonl")
    points = [row for row in rows if "eval/loss" in row]
    last = rows[-1] | {"eval/loss": evaluation("sft-long")["after"]["loss"]}
    lines = [["update", *(str(row["update"]) for row in [*points, last])]]
    means = []
    for row in [*points, last]:  # of the last 20 updates: batches differ
        recent = [x["loss"] for x in rows[row["update"] - 20 : row["update"]]]
        means.append(sum(recent) / len(recent))
    lines.append(["loss in training", *(f"{x:.3f}" for x in means)])
    lines.append(["`eval/loss`", *(f"{row['eval/loss']:.3f}" for row in [*points, last])])
    return markdown(lines[0], lines[1:])


if __name__ == "__main__":
    for table in (first_rows, results, samples, too_far, too_long):
        print(table(), end="\n\n")
    for name in ("rloo", "rloo-far", "rloo-kl0", "dpo"):
        rows = answers(name)
        for column in ("reference", "before", "after"):
            wrong, named = wrong_articles(rows, column)
            print(
                f"{name}, {column}: {mean_parts(rows, column):.2f} good parts, {wrong} of {named} wrong articles"
            )
    print(f"accuracy of the reward model: {evaluation('reward')['accuracy']:.3f}")
