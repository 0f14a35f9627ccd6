"""Tic-tac-toe in docs/grpo_tools.md: its commands for several seeds, and games against two opponents.

python benchmarks/game_results.py run --seeds 1 2 3    # below runs/; what is there is not run again
python benchmarks/game_results.py pack --seeds 1 2 3   # -> results/grpo-tools-tic-tac-toe
python benchmarks/game_results.py table                # the table of the page, from results/
"""

import argparse
import functools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import fmean

from archive import pack

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
import tic_tac_toe as game  # noqa: E402

RESULTS = ROOT / "results/grpo-tools-tic-tac-toe"
OPPONENTS = {"random": "runs/game/test.jsonl", "best": "runs/game/best.jsonl"}
MODELS = {"before": "runs/game-sft", "after": "runs/game-grpo-s{seed}/model"}
FILES = ("args.json", "evaluation.json", "evaluation_samples.jsonl", "metrics.jsonl", "samples.jsonl")
GAMES = 256
OUTCOMES = ("won", "drawn", "lost", "not ended")


def page_commands():
    """The commands of the page that write a folder. -> dict: folder -> words"""
    page = (ROOT / "docs/grpo_tools.md").read_text()
    [model] = re.findall(r"^    python (examples/small_tool_model.py .*)$", page, re.M)
    section = page.split("\n## Your own environment\n")[1].split("\n## ")[0]
    lines = re.findall(r"^    python ((?:.*\\\n)*.*)$", section, re.M)
    found = {"runs/start": shlex.split(model)}
    for line in lines:
        words = shlex.split(line.replace("\\\n", " "), comments=True)
        if words[0] == "examples/tic_tac_toe.py":
            found[words[1]] = words
        elif "--output-dir" in words:
            found[words[words.index("--output-dir") + 1]] = words
    return found


def call(folder, words):
    """Run a command, unless its folder is complete."""
    last_files = ("best.jsonl", "tokenizer.json", "evaluation.json", "turns.jsonl")
    if not any((ROOT / folder / name).exists() for name in last_files):
        print("python", *words, flush=True)
        subprocess.run([sys.executable, *words], cwd=ROOT, check=True)


def run(seeds):
    """The data, the cold start, and for each seed a run and the games of both models."""
    commands = page_commands()
    for folder in ("runs/game", "runs/start", "runs/game-sft"):
        call(folder, commands[folder])
    for seed in seeds:
        folder = f"runs/game-grpo-s{seed}"
        call(folder, [*commands["runs/game-grpo"], "--seed", str(seed), "--output-dir", folder])
        for opponent, tasks in OPPONENTS.items():
            for time, model in MODELS.items():
                out = f"{folder}/play-{opponent}-{time}"
                flags = ["--tasks", tasks, "--num-tasks", str(GAMES), "--num-shown", "0", "--output-dir", out]
                call(out, ["play.py", folder, *flags, "--model-name-or-path", model.format(seed=seed)])


def outcomes(folder):
    """How the games of play.py ended. -> dict of fractions"""
    games = [json.loads(line) for line in (folder / "turns.jsonl").read_text().splitlines()]
    rewards = [game["rewards/environment"] for game in games]
    is_over = [game["end"] == "environment" for game in games]
    counts = {
        "won": rewards.count(1.0),
        "drawn": rewards.count(0.5),
        "lost": sum(over and reward == 0 for over, reward in zip(is_over, rewards)),
        "not ended": is_over.count(False),
    }
    return {"games": len(games)} | {name: count / len(games) for name, count in counts.items()}


def pack_results(seeds):
    """Write a file for each run, and games.jsonl."""
    rows = []
    for seed in seeds:
        folder = ROOT / f"runs/game-grpo-s{seed}"
        pack(RESULTS / f"seed{seed}.zip", {name: (folder / name).read_text() for name in FILES})
        for opponent in OPPONENTS:
            for time in MODELS:
                row = {"seed": seed, "opponent": opponent, "time": time}
                rows.append(row | outcomes(folder / f"play-{opponent}-{time}"))
    (RESULTS / "games.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@functools.cache
def exact(board, player, x, opponent):
    """How games end for X, who moves at random on free squares, or as is best. -> shares won, drawn, lost"""
    squares = game.free_squares(board)
    if game.winner(board) or not squares:
        return tuple(float(game.winner(board) == name) for name in ("X", None, "O"))
    if player == "O" and opponent == "best":
        values = {square: game.value(game.put(board, square, "O"), "X") for square in squares}
        squares = [square for square in squares if values[square] == min(values.values())]
    other = "O" if player == "X" else "X"
    ends = [exact(game.put(board, square, player), other, x, opponent) for square in squares]
    if player == "X" and x == "best":
        return max(ends, key=lambda shares: shares[0] + shares[1] / 2)  # the reward
    return tuple(fmean(shares) for shares in zip(*ends))


def print_table():
    """One row per opponent and outcome. The last two columns are exact: half of the games begin with O."""
    rows = [json.loads(line) for line in (RESULTS / "games.jsonl").read_text().splitlines()]
    seeds = sorted({row["seed"] for row in rows})
    titles = [f"seed {seed}: before | after" for seed in seeds]
    print("| of 256 games |", " | ".join(titles), "| random X | best X |")
    print("|---|" + "---|---|" * (len(seeds) + 1))
    for opponent in OPPONENTS:
        columns = [row for row in rows if row["opponent"] == opponent]
        for x in ("random", "best"):
            ends = [exact("123456789", first, x, opponent) for first in "XO"]
            columns.append(dict(zip(OUTCOMES, [*map(fmean, zip(*ends)), 0.0])))
        for outcome in OUTCOMES:
            cells = [f"{column[outcome]:.3f}" for column in columns]
            print(f"| X against the {opponent} player: {outcome} |", " | ".join(cells), "|")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("what", choices=["run", "pack", "table"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    flags = parser.parse_args()
    if flags.what == "table":
        print_table()
    else:
        {"run": run, "pack": pack_results}[flags.what](flags.seeds)
