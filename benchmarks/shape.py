"""How large and how readable are the scripts, in numbers?

    python benchmarks/shape.py                     # the scripts, what goes with them, tests/ and benchmarks/
    python benchmarks/shape.py --before 21db0b9    # a commit, and next to it the working tree
    python benchmarks/shape.py FILE.py ...         # any other files

It prints a table in Markdown. The numbers are directions, not limits:

- nodes of Python's syntax tree that have a line number: denser code does not lower them
- where the training loop starts: the longest `for` or `while` of the function train, or else of the file
- tokens per code line, median and 90th percentile: names, operators, numbers and strings of each line that has any;
  comments and docstrings do not count

ANCHORS are files that this project learns from, measured in the same way in 2026.
"""

import argparse
import ast
import io
import statistics
import subprocess
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = [
    "sft.py",
    "reward_model.py",
    "dpo_tldr.py",
    "ppo_sentiment.py",
    "ppo_dialog.py",
    "rloo_tldr.py",
    "grpo_math.py",
    "grpo_tools.py",
]
OTHERS = ["check.py", "judge.py", "chat.py", "play.py", "ppo_minimal.py", "report.py"]
OTHERS += ["tests/", "benchmarks/"]  # a folder: the sum of its Python files
COLUMNS = ["lines", "nodes", "loop starts at", "tokens per code line", "Part I ends at", "widest line"]
ANCHORS = {  # lines, nodes, line of the loop, tokens per code line
    "cleanrl ppo.py": (312, 1547, 185, "8, 21"),
    "nanochat chat_rl.py": (326, 1418, 222, "7, 18"),
    "nano-aha-moment": (1161, 3640, 890, ""),
    "summarize_from_feedback_details ppo.py": (861, 4100, 573, "7, 17"),
    "open-instruct grpo_fast.py": (2413, 8034, 1930, ""),
    "TRL 1.16 GRPOTrainer": (3374, 12188, "", ""),
}


def git(*words):
    """What a git command prints."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def read_files(commit=None):
    """All Python files of a commit, or of the working tree. -> dict: path -> source"""
    if commit:
        names = git("ls-tree", "-r", "--name-only", commit).splitlines()
        return {name: git("show", f"{commit}:{name}") for name in names if name.endswith(".py")}
    names = git("ls-files", "--cached", "--others", "--exclude-standard", "*.py").splitlines()
    return {name: (ROOT / name).read_text() for name in names if (ROOT / name).exists()}


def count_nodes(source):
    return sum(hasattr(node, "lineno") for node in ast.walk(ast.parse(source)))


def loop_line(source):
    """Line on which the training loop starts."""
    tree = ast.parse(source)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "train"]
    loops = [
        node
        for node in ast.walk(functions[0] if functions else tree)
        if isinstance(node, (ast.For, ast.While))
    ]
    return max(loops, key=lambda node: node.end_lineno - node.lineno).lineno if loops else ""


def part_1_lines(lines):
    """Number of lines before the banner of Part II."""
    return next((number - 1 for number, line in enumerate(lines) if line.startswith("# Part II")), "")


def tokens_per_line(source):
    """Number of code tokens on each line that has any. -> sorted list of int"""
    counts = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_code = token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER)
        is_short_string = token.type == tokenize.STRING and token.start[0] == token.end[0]
        if is_code or is_short_string:
            counts[token.start[0]] = counts.get(token.start[0], 0) + 1
    return sorted(counts.values())


def measure_file(source):
    """The cells of one file, in the order of COLUMNS."""
    lines = source.splitlines()
    counts = tokens_per_line(source)
    tokens = f"{statistics.median(counts):g}, {counts[int(0.9 * len(counts))]}"
    widest = max(len(line) for line in lines)
    return [len(lines), count_nodes(source), loop_line(source), tokens, part_1_lines(lines), widest]


def measure_sum(sources):
    """Lines and nodes of several files together."""
    lines = sum(len(source.splitlines()) for source in sources)
    return [lines, sum(map(count_nodes, sources)), *[""] * (len(COLUMNS) - 2)]


def measure_all(files):
    """files: path -> source. -> dict: name in the table -> cells"""
    rows = {name: measure_file(files[name]) for name in SCRIPTS}
    rows["the eight scripts"] = measure_sum([files[name] for name in SCRIPTS])
    for name in OTHERS:
        rows[name] = measure_sum([source for path, source in files.items() if path.startswith(name)])
    return rows


def print_table(header, rows):
    """rows: list of lists; integers get separators of thousands"""
    print("| " + " | ".join(header) + " |\n" + "|---" * len(header) + "|")
    for row in rows:
        print("| " + " | ".join(f"{cell:,}" if isinstance(cell, int) else cell for cell in row) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--before", metavar="COMMIT", help="compare this commit with the working tree")
    flags = parser.parse_args()
    anchors = [[name, *cells, "", ""] for name, cells in ANCHORS.items()]
    if flags.files:
        rows = {path.name: measure_file(path.read_text()) for path in flags.files}
    else:
        rows = measure_all(read_files())
    if not flags.before:
        print_table(["file", *COLUMNS], anchors + [[name, *cells] for name, cells in rows.items()])
        return
    before = measure_all(read_files(flags.before))
    header = ["file", *(f"{column}, {when}" for column in COLUMNS[:3] for when in (flags.before, "now"))]
    pairs = {name: zip(before[name][:3], cells[:3]) for name, cells in rows.items()}
    print_table(header, [[name, *(cell for pair in pairs[name] for cell in pair)] for name in pairs])


if __name__ == "__main__":
    main()
