"""How often responses to the arithmetic tasks have worked steps, and how often they are right with and without.

    python benchmarks/worked_steps.py      # of the runs of grpo_math.py in results/grpo-math-tiny

A response has steps if it has more than one line. The table has one row per set of tasks, before and after
training, over all responses of all seeds.
"""

from pathlib import Path

from archive import read_rows

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "results/grpo-math-tiny"


def read_lines():
    """The lines of evaluation_samples.jsonl of all runs. -> list of dict"""
    lines = []
    for run in sorted(RUNS.glob("seed*.zip")):
        lines += read_rows(run, "evaluation_samples.jsonl")
    return lines


def responses_of(lines, name, when):
    """All responses to a set of tasks, "before" or "after". -> list of (has steps, is right)"""
    found = []
    for line in lines:
        if line["set"] == name:
            answers = line[when]
            for response, right in zip(answers["responses"], answers["right"]):
                found.append(("\n" in response.strip(), right))
    return found


def share(found, has_steps):
    """How often responses with (without) steps are right."""
    right = [right for steps, right in found if steps == has_steps]
    return sum(right) / len(right)


def table(lines):
    """The markdown table."""
    rows = [["tasks", "", "responses", "with steps", "right, with steps", "right, without steps"]]
    rows.append(["---"] * len(rows[0]))
    for name in ("held-out", "harder"):
        for when in ("before", "after"):
            found = responses_of(lines, name, when)
            with_steps = sum(steps for steps, _ in found) / len(found)
            cells = [with_steps, share(found, True), share(found, False)]
            rows.append([name, when, f"{len(found):,}", *(f"{x:.3f}" for x in cells)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


if __name__ == "__main__":
    print(table(read_lines()))
