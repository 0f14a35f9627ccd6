"""docs/your_data.md: its commands, at a small size; its converter; and that only the user's data are read."""

import csv
import json
import re
import runpy
import shlex
import sys

import pytest
from conftest import ROOT
from run_tools import evaluation_of, rows_of, spy

import check

pytest_plugins = ["run_fixtures"]
PAGE = (ROOT / "docs/your_data.md").read_text()
CONVERTER = (ROOT / "examples/pairs_from_table.py").read_text()
SMALLER = {  # flags after those of the page
    "sft": "--num-train-epochs 0.1 --num-eval-prompts 8 --num-samples 1",
    "reward_model": "--num-train-epochs 0.1 --num-eval-prompts 8",
    "rloo_tldr": "--total-episodes 64 --num-mini-batches 1 --num-eval-prompts 8 --response-length 16",
    "dpo_tldr": "--num-train-epochs 0.1 --num-eval-prompts 8 --num-eval-pairs 8 --response-length 16",
}


def commands(*headings):
    """The commands under these headings of the page. -> list of (program without .py, words)"""
    found = []
    for heading in headings:
        text = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
        for line in re.findall(r"^    python ((?:.*\\\n)*.*)$", text, re.M):
            program, *words = shlex.split(line.replace("\\\n", " "), comments=True)
            found.append((program.removesuffix(".py"), words))
    return found


def run_program(monkeypatch, name, words):
    """Run a program of the repository in this process, as its command does."""
    monkeypatch.setattr(sys, "argv", [name, *words])
    runpy.run_path(str(ROOT / f"{name}.py"), run_name="__main__")


def test_the_commands_of_the_page_run_and_read_nothing_else(scripts, monkeypatch, tmp_path):
    """From the table to the report, in an empty folder. Of the repository, only the tokenizer is used."""
    monkeypatch.chdir(tmp_path)
    reads = {name: spy(monkeypatch, scripts[name], "read_rows") for name in SMALLER}
    names = []
    for name, words in commands("The table", "From the table to training data", "Train"):
        names.append(name)
        if name == "check":  # the command that follows on the page
            with pytest.raises(SystemExit) as end:
                check.main([str(ROOT / words[0]), *words[1:]])
            assert end.value.code == 0
            continue
        if name not in SMALLER:
            run_program(monkeypatch, name, words)
            continue
        scripts[name].main([*words, *SMALLER[name].split()])
        assert {str(path) for (path,), _ in reads[name]} == {"shop/train.jsonl"}
    assert names == ["examples/make_answers", "examples/pairs_from_table", "check", *SMALLER, "report"]

    used = {}
    for folder in ("sft", "reward", "rloo", "dpo"):
        args = json.loads((tmp_path / "shop" / folder / "args.json").read_text())["args"]
        found = re.findall(r"(?:data|checkpoints|runs)/[\w/-]+", json.dumps(args))
        used[folder] = [name for name in found if name != args["output_dir"]]
    assert used == {"sft": ["checkpoints/tldr-sft"], "reward": [], "rloo": [], "dpo": []}
    for folder in ("rloo", "dpo"):
        after = evaluation_of(tmp_path / "shop" / folder)["after"]
        assert 0 <= after["win rate"] <= 1
        judge = evaluation_of(tmp_path / "shop" / folder)["judge"]
        assert judge == "examples/make_answers.py:good_parts"
    assert 0 <= evaluation_of(tmp_path / "shop/reward")["accuracy"] <= 1
    assert (tmp_path / "shop/rloo/report.html").exists()


def test_the_page_shows_the_converter():
    [shown] = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.S) if "csv" in block]
    assert shown == CONVERTER


def test_the_judge_of_the_page():
    """It can be called as rloo_tldr.py and dpo_tldr.py call theirs."""
    code, functions = re.search(r"^      (def my_judge.*\n.*)$", PAGE, re.M)[1], {}
    exec(code, functions)
    assert functions["my_judge"](prompts=["a"] * 2, completions=["b", "bc"], column=[1, 2]) == [1, 2]


def write_table(path, rows):
    """A csv file as Excel writes it, with a byte order mark."""
    with open(path, "w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows([["question", "a", "b", "winner"], *rows])


def test_the_converter(monkeypatch, tmp_path, capsys):
    """The winner is chosen, quotes and line ends in a cell are kept. What is left out is counted."""
    monkeypatch.chdir(tmp_path)
    empty = [["", "A", "B", "a"], ["4?", " ", "B", "b"], ["5?", "A"]]
    rows = [["Où?", "A", "B", "a"], ["2?", "A", "B", "tie"], ['3 "x",\n?', "A ", "B", "b "]]
    write_table("t.csv", rows + empty)
    run_program(monkeypatch, "examples/pairs_from_table", ["t.csv", "new"])
    assert capsys.readouterr().out == "2 pairs; left out: 1 ties, 3 rows with an empty cell\n"
    assert rows_of("new", "train.jsonl") == [
        dict(prompt="Question: Où?\nAnswer:", completion=" A", chosen=" A", rejected=" B"),
        dict(prompt='Question: 3 "x",\n?\nAnswer:', completion=" B", chosen=" B", rejected=" A"),
    ]
    for winner in ("A", "c", ""):  # an unknown winner is not a tie
        write_table("t.csv", [rows[0], ["2?", "A", "B", winner]])
        with pytest.raises(SystemExit, match=f"^t.csv, line 3: the winner is '{winner}', not a, b or tie$"):
            run_program(monkeypatch, "examples/pairs_from_table", ["t.csv", "new"])


def test_the_table_is_what_the_page_says():
    """Always the same rows; the answer with more good parts wins, except in about 5 % of the rows."""
    module = runpy.run_path(str(ROOT / "examples/make_answers.py"))
    rows, good_parts = module["make_rows"](), module["good_parts"]
    assert rows == module["make_rows"]() and len(rows) == 1000
    right, decided = 0, 0
    for row in rows:
        a, b = good_parts([row["question"]] * 2, [row["a"], row["b"]])
        assert (row["winner"] == "tie") == (a == b)
        if a != b:
            decided += 1
            right += row["winner"] == ("a" if a > b else "b")
    assert 0.93 < right / decided < 0.97
    best, worst = "Hi there! I am sorry. We have your sofa. We will call you. Thank you!", " Bad luck."
    assert good_parts(["Where is my sofa?"] * 2, [best, worst]) == [5, 0]
    assert good_parts(["Where is my lamp?"], [best]) == [4]


def test_the_chats_of_the_page_work_in_all_scripts(scripts, monkeypatch, tmp_path):
    """The lines of the page, in the converter, and a model with a chat template."""
    monkeypatch.chdir(tmp_path)
    better, prompt = re.findall(r"^      ((?:better, worse|prompt) = .*)$", PAGE, re.M)
    program = re.sub(r'better, worse = " ".*', better, CONVERTER)
    program = re.sub(r'prompt = f"Question.*', prompt, program)
    assert program.count("role") == 2 and "Answer" not in program
    write_table("t.csv", [[f"{n} plus {n}?", f"It is {2 * n}.", "Who knows?", "a"] for n in range(40)])
    monkeypatch.setattr(sys, "argv", ["converter", "t.csv", "chats"])
    exec(program, {})
    assert rows_of("chats", "train.jsonl")[0]["chosen"] == [{"role": "assistant", "content": "It is 0."}]
    small = "--dtype float32 --dataset-name chats --output-dir"
    policy_and_reward = "--model-name-or-path sft --reward-model-path reward"
    flags = {
        "sft": f"--model-name-or-path checkpoints/arithmetic-sft {small} sft --max-length 128",
        "reward_model": f"--model-name-or-path sft {small} reward --max-length 128",
        "rloo_tldr": f"{policy_and_reward} {small} rloo --rloo-k 4 --max-prompt-length 64",
        "dpo_tldr": f"--model-name-or-path sft {small} dpo --max-length 128",
    }
    for name, words in flags.items():
        scripts[name].main([*words.split(), *SMALLER[name].split()])
    assert rows_of("rloo", "evaluation_samples.jsonl")[0]["reference"].startswith("It is")


def test_a_table_that_is_already_in_columns(scripts, monkeypatch, tmp_path):
    """A csv file as --dataset-name, and a data set of the Hub with other names, as the page renames them."""
    monkeypatch.chdir(tmp_path)
    with open("my.csv", "w", newline="") as file:
        csv.writer(file).writerows([["prompt", "completion"], *([f"{n}?", " Yes."] for n in range(20))])
    train, held_out = scripts["rloo_tldr"].load_splits("my.csv")
    assert len(train) == 18 and len(held_out) == 2

    import datasets

    data = datasets.Dataset.from_dict({"instruction": ["1?", "2?"], "output": [" A", " B"]})
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: data)
    code = re.search(r"^      (from datasets .*?parquet\"\))$", PAGE, re.M | re.S)[1]
    exec(re.sub(r"^      ", "", code, flags=re.M), {})
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    train, held_out = scripts["sft"].load_splits("my_data")
    assert {row["prompt"] for row in train + held_out} == {"1?", "2?"}
