"""How readable are the scripts, in numbers? Lines, widest line, where the loop starts, tokens per code line.

    python benchmarks/shape.py                   # our scripts; writes results/shape.json
    python benchmarks/shape.py FILE.py ...       # any other files

The numbers are directions, not limits. The loop is the longest `for` or `while` of the function train, or
of the file. Tokens per code line: names, operators, numbers and strings of each line that has any; comments
and docstrings do not count. ANCHORS are files that this project learns from, measured in the same way in
2026.
"""

import ast
import io
import json
import statistics
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ["sft.py", "reward_model.py", "ppo_sentiment.py", "ppo_dialog.py", "rloo_tldr.py", "grpo_math.py"]
ANCHORS = [
    {
        "file": "cleanrl ppo.py",
        "lines": 312,
        "widest": 120,
        "loop": 185,
        "part_1": None,
        "median": 8,
        "p90": 21,
    },
    {
        "file": "nanoGPT train.py",
        "lines": 336,
        "widest": 180,
        "loop": 255,
        "part_1": None,
        "median": 5,
        "p90": 16,
    },
    {
        "file": "nanochat chat_rl.py",
        "lines": 326,
        "widest": 162,
        "loop": 222,
        "part_1": None,
        "median": 7,
        "p90": 18,
    },
    {
        "file": "summarize_from_feedback_details ppo.py",
        "lines": 861,
        "widest": 187,
        "loop": 573,
        "part_1": None,
        "median": 7,
        "p90": 17,
    },
]


def tokens_per_line(source):
    """Number of code tokens on each line that has any. -> list of int"""
    counts = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_code = token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER)
        is_short_string = token.type == tokenize.STRING and token.start[0] == token.end[0]
        if is_code or is_short_string:
            counts[token.start[0]] = counts.get(token.start[0], 0) + 1
    return list(counts.values())


def loop_line(source):
    """Line on which the longest loop of train (or of the file) starts."""
    tree = ast.parse(source)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "train"]
    loops = [
        node
        for node in ast.walk(functions[0] if functions else tree)
        if isinstance(node, (ast.For, ast.While))
    ]
    return max(loops, key=lambda node: node.end_lineno - node.lineno).lineno


def part_1_lines(lines):
    """Number of lines before the banner of Part II; None if there is none."""
    for number, line in enumerate(lines):
        if line.startswith("# Part II"):
            return number - 1
    return None


def measure(path):
    """The numbers of one file. -> dict"""
    source = path.read_text()
    lines = source.splitlines()
    counts = sorted(tokens_per_line(source))
    return {
        "file": path.name,
        "lines": len(lines),
        "widest": max(len(line) for line in lines),
        "loop": loop_line(source),
        "part_1": part_1_lines(lines),
        "median": statistics.median(counts),
        "p90": counts[int(0.9 * len(counts))],
    }


def main():
    paths = [Path(name) for name in sys.argv[1:]] or [ROOT / name for name in SCRIPTS]
    rows = [measure(path) for path in paths]
    print("| file | lines | widest | loop starts at | Part I ends at | tokens per code line (median, p90) |")
    print("|---|---|---|---|---|---|")
    for row in ANCHORS + rows:
        print(
            "| {file} | {lines} | {widest} | {loop} | {part_1} | {median:g}, {p90} |".format(**row).replace(
                "None", ""
            )
        )
    if len(sys.argv) == 1:
        about = {"command": "python benchmarks/shape.py", "anchors": ANCHORS, "scripts": rows}
        (ROOT / "results/shape.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
