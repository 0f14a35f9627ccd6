"""The tool and the environment of docs/grpo_tools.md: their commands at a small size, and what they do."""

import json
import random
import re
import runpy
import shlex
import sys
from statistics import fmean

import pytest
import torch
from conftest import ROOT
from run_tools import rows_of

sys.path[:0] = [str(ROOT / "benchmarks")]
import game_results  # noqa: E402
from archive import read, read_rows  # noqa: E402

pytest_plugins = ["run_fixtures"]
PAGE = (ROOT / "docs/grpo_tools.md").read_text()
HEADINGS = {"search_tool": "Your own tool", "tic_tac_toe": "Your own environment"}
TOWN = 964  # one of the notes
SMALLER = {  # flags after those of the page
    "sft": "--num-train-epochs 0.1 --num-eval-prompts 4 --num-samples 1",
    "grpo_tools": "--total-episodes 16 --per-device-train-batch-size 8 --gradient-accumulation-steps 2 "
    "--num-generations 4 --num-eval-prompts 3 --num-eval-samples 2 --response-length 96",
    "play": "--num-tasks 2 --response-length 96",
}


@pytest.fixture(scope="module")
def game():
    return runpy.run_path(str(ROOT / "examples/tic_tac_toe.py"))


@pytest.fixture(scope="module")
def corpus():
    return runpy.run_path(str(ROOT / "examples/search_tool.py"))


def section(name):
    return PAGE.split(f"\n## {HEADINGS[name]}\n")[1].split("\n## ")[0]


# ---- The page ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HEADINGS)
def test_the_page_shows_the_code(name):
    """Each block of Python on the page is in the file, as it is."""
    code = (ROOT / f"examples/{name}.py").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", section(name), re.M | re.S)
    assert blocks and all(block.strip("\n") in code for block in blocks)


@pytest.mark.parametrize("name", HEADINGS)
def test_the_page_shows_the_rows(name, tmp_path):
    """The task on the page is the first one that the program writes."""
    runpy.run_path(str(ROOT / f"examples/{name}.py"))["write"](tmp_path)
    [shown] = [json.loads(line) for line in re.findall(r"^    (\{.*\})$", section(name), re.M)]
    assert shown == rows_of(tmp_path, "train.jsonl")[0]


def test_the_commands_of_the_page(scripts, monkeypatch, tmp_path):
    """From the data to play.py, in an empty folder next to the examples and checkpoints."""
    monkeypatch.chdir(tmp_path)
    for folder in ("examples", "checkpoints"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    programs = []
    text = "".join(section(name) for name in HEADINGS)
    for line in re.findall(r"^    python ((?:.*\\\n)*.*)$", text, re.M):
        program, *words = shlex.split(line.replace("\\\n", " "), comments=True)
        program = program.removesuffix(".py")
        programs.append(program)
        words += SMALLER.get(program, "").split()
        if program in scripts:
            scripts[program].main(words)
        else:
            monkeypatch.setattr(sys, "argv", [program, *words])
            runpy.run_path(str(ROOT / f"{program}.py"), run_name="__main__")
    train = ["sft", "grpo_tools", "play"]
    tool = ["examples/search_tool", "examples/small_tool_model", *train, "report"]
    assert programs == [*tool, "examples/tic_tac_toe", *train, "play", "play", "report"]


def test_the_numbers_of_the_tool():
    """The lines of the screen, the table and the minutes are those of results/."""
    run, page = ROOT / "results/grpo-tools-search/seed1.zip", section("search_tool")
    metrics, evaluation = read_rows(run, "metrics.jsonl"), json.loads(read(run, "evaluation.json"))
    lines = re.findall(r"^    update (\d+)/60  reward (\S+)  calls (\S+)  lr \S+  seconds (\S+)$", page, re.M)
    names = ("update", "objective/scores", "tools/call_frequency", "perf/seconds")
    assert lines == [tuple(f"{metrics[i][name]:.3g}" for name in names) for i in (0, 2, 4)]
    rows = re.findall(r"^\| (\w.*: .*) \| (\S+) \| (\S+) \|$", page, re.M)
    times = ("before", "after")
    assert rows == [(name, *[f"{evaluation[time][name]:.3f}" for time in times]) for name, *_ in rows]
    minutes = sum(row["perf/seconds"] for row in metrics) / 60
    assert len(rows) == 3 and f"GRPO took {minutes:.0f} minutes" in page


def test_the_numbers_of_the_environment(capsys):
    """The table is that of benchmarks/game_results.py, which finds the commands of the page."""
    assert list(game_results.page_commands()) == [
        "runs/start",
        "runs/game",
        "runs/game-sft",
        "runs/game-grpo",
    ]
    game_results.print_table()
    table = capsys.readouterr().out
    page = section("tic_tac_toe")
    assert len(table.splitlines()) == 10 and table in page
    runs = [read_rows(game_results.RESULTS / f"seed{seed}.zip", "metrics.jsonl") for seed in (1, 2, 3)]
    seconds = [[row["perf/seconds"] for row in rows] for rows in runs]
    assert f"{min(map(min, seconds)):.0f} to {max(map(max, seconds)):.0f} seconds" in page
    first, *others = [f"{sum(x) / 60:.0f}" for x in seconds]
    assert len(set(others)) == 1 and f"{others[0]} minutes for seeds 2 and 3, {first} for seed 1" in page
    equal = [fmean(row["frac_reward_zero_std"] for row in rows[-10:]) for rows in runs]
    assert f"{100 * min(equal):.0f} to {100 * max(equal):.0f} % of the groups" in page


# ---- The examples ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, header", [("search_tool", "search(number)"), ("tic_tac_toe", "play(number)")])
def test_the_small_model_shows_tools(scripts, tmp_path, name, header):
    """Its prompt names the tool and its argument. A call that its template writes is read as it was."""
    script, chat = scripts["grpo_tools"], runpy.run_path(str(ROOT / f"examples/{name}.py"))["chat"]
    runpy.run_path(str(ROOT / "examples/small_tool_model.py"))["copy_model"](tmp_path / "model")
    tokenizer = script.load_tokenizer(str(tmp_path / "model"))
    chats = [chat(random.Random(i), [TOWN]) if name == "search_tool" else chat(i) for i in range(9)]
    row = next(row for row in chats if "tool_calls" in row["messages"][1])
    text = script.render_chat(tokenizer, row["messages"][:2], schemas=row["tools"])
    head, turn = text.split("<|im_start|>assistant\n")
    assert head.startswith(f"<|im_start|>system\n{header}<|im_end|>\n<|im_start|>user\n")
    turn_format = script.TurnFormat(tokenizer, torch.tensor([tokenizer.eos_token_id]), row["tools"])
    _, calls, is_complete = turn_format.read_turn(tokenizer(turn.rstrip("\n")).input_ids)
    assert is_complete and [json.loads(x) for x in calls] == [row["messages"][1]["tool_calls"][0]["function"]]


def test_search(corpus):
    search, notes = corpus["search"], corpus["NOTES"]
    assert len(notes) == 200
    people, height = notes[TOWN].values()
    assert search(TOWN) == search(people) == f"town {TOWN}: people {people}, height {height}"
    assert search(TOWN // 10) == search(TOWN * 10) == "nothing found"
    with pytest.raises(ValueError, match="no note has a negative number"):
        search(-TOWN)
    messages = [
        [{"content": "<answer>12</answer>"}, {"content": text}] for text in ("<answer>7</answer>", "7")
    ]
    assert corpus["right"](prompts=[0] * 2, completions=messages, answer=["7", "7"]) == [1.0, 0.0]
    assert corpus["right"](prompts=[0], completions=messages[:1], answer=["12"]) == [0.0]


def test_held_out_towns_are_new(corpus, tmp_path):
    corpus["write"](tmp_path)
    texts = {name: (tmp_path / f"{name}.jsonl").read_text() for name in ("train", "test", "sft/train")}
    for town in corpus["NOTES"]:
        is_held_out = f"town {town}?" in texts["test"]
        assert is_held_out != (f"town {town}?" in texts["train"])
        assert not (is_held_out and f"town {town}?" in texts["sft/train"])
    answers = [row["answer"] for row in rows_of(tmp_path, "test.jsonl")]
    assert len(answers) == 100


def started(game, opponent="random", **columns):
    played = game["TicTacToe"]()
    text = played.reset(**(game["task"](seed=4, opponent=opponent) | columns))
    return played, text


def test_a_game(game):
    played, text = started(game, first="X")
    assert text == "\n1 2 3\n4 5 6\n7 8 9"
    board = played.play(5).split()
    assert board[4] == "X" and board.count("O") == 1 and not played.is_over()
    assert played.get_reward() == 0
    for square in (5, 0, 10, -1, "3", board.index("O") + 1):
        with pytest.raises(ValueError, match=f"^{square} is not free$"):
            played.play(square)
    _, text = started(game, first="O")
    assert text.count("O") == 1


@pytest.mark.parametrize(
    "board, over, reward",
    [
        ("XXX45OO89", True, 1.0),
        ("OOOXX6X89", True, 0.0),
        ("XOXXOOOXX", True, 0.5),
        ("XO345678X", False, 0.0),
        ("X2OOX67OX", True, 1.0),
        ("XXO4O6OX9", True, 0.0),
    ],
)
def test_how_a_game_ends(game, board, over, reward):
    played, _ = started(game)
    played.board = board
    assert played.is_over() == over
    assert played.get_reward() == reward
    if over:
        with pytest.raises(ValueError, match="is not free"):
            played.play(int(next((x for x in board if x.isdigit()), 1)))


def test_the_best_player_never_loses(game):
    """Against all moves of X, whoever begins."""

    def results(board):
        """All rewards that X can reach."""
        played, _ = started(game, "best")
        played.board = board
        if played.is_over():
            return {played.get_reward()}
        found = set()
        for square in game["free_squares"](board):
            played.board = board
            played.play(square)
            found |= results(played.board)
        return found

    assert results("123456789") == {0.0, 0.5}
    assert game["value"]("123456789", "X") == 0  # a draw, if both play well
    assert game["value"]("XX3OO6789", "X") == 1 and game["value"]("XX3OO6789", "O") == -1


def test_the_opponent_depends_on_the_seed_only(game):
    boards = []
    for _ in range(2):
        played, _ = started(game, seed=11, first="O")
        boards.append(played.play(game["free_squares"](played.board)[0]))
    assert boards[0] == boards[1]
    assert len({started(game, seed=seed, first="O")[1] for seed in range(50)}) == 9


def test_the_chats(game):
    """They call as the environment understands it, and end with a call."""
    kinds = set()
    for seed in range(40):
        row = game["chat"](seed)
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["user", *["assistant", "tool"] * (len(roles) // 2 - 1), "assistant"]
        kinds |= {m["content"].split(":")[0] for m in row["messages"] if m["content"].startswith("error")}
    assert kinds == {"error"}
