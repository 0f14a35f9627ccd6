"""The tables of docs/grpo_tools.md: before and after in three seeds, and why wrong trajectories are wrong.

python benchmarks/tool_results.py
"""

import json
import re
from collections import Counter
from pathlib import Path

from archive import read, read_rows

RESULTS = Path(__file__).resolve().parents[1] / "results/grpo-tools-tiny"
SEEDS = (1, 2, 3)
METRICS = (
    "held-out: pass@1",
    "held-out: +- (95 % interval)",
    "held-out: pass@8",
    "held-out: calls per trajectory",
    "held-out: failed calls",
    "held-out: turns",
    "without tools: pass@1",
    "greedy: pass@1",
    "greedy: calls per trajectory",
)
KINDS = (
    "no call",
    "a call failed or was not complete",
    "other numbers than the task's",
    "right numbers, another operation or answer",
)


def results():
    """Before and after of each seed, as a markdown table."""
    evaluations = [json.loads(read(RESULTS / f"seed{seed}.zip", "evaluation.json")) for seed in SEEDS]
    head = " | ".join(f"seed {seed}: before | after" for seed in SEEDS)
    lines = [f"| 256 held-out tasks | {head} |", "|---" * (1 + 2 * len(SEEDS)) + "|"]
    for name in METRICS:
        cells = [f"{x[when][name]:.3f}" for x in evaluations for when in ("before", "after")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def kind_of_error(task, response):
    """Why a trajectory is wrong: the first of KINDS that applies."""
    calls = re.findall(r'"expression": "(.*?)"', response)
    if "<tool_call>" not in response:
        return KINDS[0]
    if "error:" in response or not calls:
        return KINDS[1]
    numbers = [set(re.findall(r"\d+", text)) for text in (task, calls[-1])]
    return KINDS[2] if numbers[0] != numbers[1] else KINDS[3]


def errors():
    """How many of the sampled trajectories are wrong, and why, as a markdown table."""
    counts = {}
    for seed in SEEDS:
        for when in ("before", "after"):
            kinds, total = Counter(), 0
            for row in read_rows(RESULTS / f"seed{seed}.zip", "evaluation_samples.jsonl"):
                if row["set"] == "held-out":
                    total += len(row[when]["right"])
                    for response, is_right in zip(row[when]["responses"], row[when]["right"]):
                        if not is_right:
                            kinds[kind_of_error(row["task"], response)] += 1
            counts[seed, when] = kinds, total
    [total] = {total for _, total in counts.values()}
    head = " | ".join(f"seed {seed}: before | after" for seed in SEEDS)
    lines = [f"| wrong, of {total:,} | {head} |", "|---" * (1 + 2 * len(SEEDS)) + "|"]
    for kind in KINDS:
        lines.append(f"| {kind} | {' | '.join(str(kinds[kind]) for kinds, _ in counts.values())} |")
    lines.append(f"| all | {' | '.join(str(kinds.total()) for kinds, _ in counts.values())} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(results(), errors(), sep="\n\n")
