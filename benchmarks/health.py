"""Did a run learn, or learn to cheat? One line for each run of an RL script, as a markdown table.

    python benchmarks/health.py runs/ppo_sentiment/RUN results/ppo-sentiment-tiny/seed1.zip

The columns: score before and after; KL, the mean over the last half of the updates, and its target; distinct
bigrams after / before; the commonest new word with its share of the responses before and after; if there is a
judge, its P(label) before and after, and how much of the gap to 1 it closes.
"""

import json
import sys
from pathlib import Path

from archive import read, read_rows

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import report  # noqa: E402


def row(folder):
    """The numbers of one run. -> dict: column -> text"""
    evaluation = json.loads(read(folder, "evaluation.json"))
    before, after = evaluation["before"], evaluation["after"]
    updates = read_rows(folder, "metrics.jsonl")
    target = json.loads(read(folder, "args.json"))["args"].get("kl_target")
    last_half = [update["objective/kl"] for update in updates[len(updates) // 2 :]]
    kl = sum(last_half) / len(last_half)
    columns = {"run": Path(folder).name.removesuffix(".zip")}
    columns["score mean"] = f"{before['score mean']:.2f} -> {after['score mean']:.2f}"
    columns["KL, last half (target)"] = f"{kl:.2f} ({'none' if target is None else f'{target:g}'})"
    bigrams = "distinct bigrams" if "distinct bigrams" in before else "distinct2"
    columns["distinct bigrams, after / before"] = f"{after[bigrams] / before[bigrams]:.2f}"
    columns["commonest new word"] = commonest_new_word(folder, evaluation)
    for name in before:
        if name.startswith("judge"):
            closed = (after[name] - before[name]) / (1 - before[name])
            columns[name] = f"{before[name]:.2f} -> {after[name]:.2f}"
            columns["of the gap to 1"] = f"{closed:.0%}"
    return columns


def commonest_new_word(folder, evaluation):
    """The word that spread most, with its share of the responses before and after; "" if none spread."""
    if "commonest new word" in evaluation:  # a run of an earlier version
        word = evaluation["commonest new word"]
        return f"{word['metric'].split(chr(34))[1]}: {word['before']:.1%} -> {word['after']:.1%}"
    samples = read_rows(folder, "evaluation_samples.jsonl")
    for word, share_before, share in report.new_words(report.to_pairs(samples))[:1]:
        return f"{word}: {share_before:.1%} -> {share:.1%}"
    return ""


def table(folders):
    """A markdown table with one line for each run."""
    rows = [row(folder) for folder in folders]
    lines = [list(rows[0]), ["---"] * len(rows[0]), *[list(row.values()) for row in rows]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    print(table(sys.argv[1:]))
