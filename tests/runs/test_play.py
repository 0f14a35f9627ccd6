"""play.py: what it plays, shows and writes."""

import json

import pytest
from conftest import ROOT, save
from rich.console import Console
from run_tools import rows_of, write_rows
from transformers import AutoModelForCausalLM

import play as play_script
import report

pytest_plugins = ["run_fixtures"]
SCRIPT = "grpo_tools"


@pytest.fixture
def play(script, monkeypatch, capsys):
    """play(folder, *flags): the whole command line, in this process. -> games, what is on the screen"""
    monkeypatch.setattr(play_script, "grpo_tools", script)
    games = []
    play_tasks = play_script.play
    monkeypatch.setattr(play_script, "play", lambda args: games.append(play_tasks(args)))

    def run(folder, *flags):
        capsys.readouterr()
        play_script.main([str(folder), *flags])
        return games[-1], capsys.readouterr().out

    return run


@pytest.mark.parametrize("way", ["held-out", "greedy"])
def test_it_plays_what_the_evaluation_played(script, tools, play, way):
    """The held-out tasks in their order and, if each has one sample, with the same random numbers."""
    _, folder, _ = tools(num_eval_prompts=8, num_eval_samples=1, learning_rate=1e-5, temperature=1.0)
    games, screen = play(folder, "--num-tasks", "8", *(["--greedy"] if way == "greedy" else []))
    evaluated = [row for row in rows_of(folder, "evaluation_samples.jsonl") if row["set"] == way]
    assert [game["task"] for game in games] == [row["task"] for row in evaluated]
    tokenizer = script.load_tokenizer(str(folder / "model"))
    played = [tokenizer.decode(row["ids"]) for row in rows_of(folder / "play", "tokens.jsonl")]
    assert played == [row["after"]["responses"][0] for row in evaluated]
    for name in ("turns", "calls", "failures", "rewards/letters"):
        assert [game[name] for game in games] == [row["after"][name][0] for row in evaluated]
    assert sum(game["calls"] for game in games) > 0
    assert screen.count("ended: ") == 4 + len(script.ENDS)  # four tables of turns, and the last one


@pytest.mark.parametrize("width", [50, 200])
def test_the_screen(script, tools, play, monkeypatch, width):
    """The turns as they are: roles, texts with brackets, the end and the reward, in any width."""
    _, folder, _ = tools(tools=[f"{ROOT}/data/tools.py:calculator"])
    monkeypatch.setattr(play_script, "Console", lambda: Console(width=width))
    say = (
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": "[b]2 * 3"}}\n</tool_call><|im_end|>'
    )
    turns = iter([say, "<answer>[i]6</answer><|im_end|>"])
    tokenizer = script.load_tokenizer(str(folder / "model"))

    def sample(policy, texts, uniforms, stop_ids, args):
        ids = tokenizer(next(turns)).input_ids
        return [(ids, [-0.5] * len(ids)) for _ in uniforms]

    monkeypatch.setattr(script, "sample_turns", sample)
    games, screen = play(folder, "--prompt", "Two times [red]three[/red]?", "--response-length", "200")
    [game] = games
    assert [message["role"] for message in game["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert (game["end"], game["turns"], game["calls"], game["failures"]) == ("answer", 2, 1, 1)
    assert not [name for name in game if name.startswith("rewards/")]  # their columns are not there
    table, _, _ = screen.partition("metric")
    assert all(len(line) <= width for line in table.splitlines())
    folded = "".join(line.partition("│")[2].partition("│")[2].strip(" │") for line in table.splitlines())
    for message in game["messages"]:
        assert message["content"].replace("\n", "").replace(" ", "") in folded.replace(" ", "")
    assert "ended: answer" in " ".join(table.split())


GAME = """
class Door:
    def reset(self, color, **columns):
        self.is_open = False
        return f"\\nThe door is {color}."

    def guess(self, number: int) -> str:
        \"\"\"Open the door.

        Args:
            number: any
        \"\"\"
        self.is_open = True
        return "open"

    def is_over(self):
        return self.is_open

    def get_reward(self):
        return 0.3
"""


def test_the_result_of_the_last_call_is_shown(script, tools, play, tmp_path, monkeypatch):
    """The policy does not read it. One trajectory is ended by its environment, the other has no turn left."""
    (tmp_path / "door.py").write_text(GAME)
    prompt = [{"role": "user", "content": "Guess."}]
    rows = [{"prompt": prompt, "color": color} for color in ("red", "blue")]
    data = write_rows(tmp_path / "doors", train=rows, test=rows)
    own = dict(tools=None, reward_fn=None, environment=f"{tmp_path}/door.py:Door", dataset_name=data)
    _, folder, _ = tools(**own, max_turns=2)
    tokenizer = script.load_tokenizer(str(folder / "model"))
    numbers = iter(["", "7", "8"])  # the first call has no number, so it fails

    def sample(policy, texts, uniforms, stop_ids, args):
        ids = []
        for _ in uniforms:
            call = f'<tool_call>{{"name": "guess", "arguments": {{"number": {next(numbers)}}}}}</tool_call>'
            ids.append([*tokenizer(call).input_ids, stop_ids[0].item()])
        return [(tokens, [-0.5] * len(tokens)) for tokens in ids]

    monkeypatch.setattr(script, "sample_turns", sample)
    games, _ = play(folder, "--num-tasks", "2", "--max-turns", "1", "--response-length", "200")
    assert [game["end"] for game in games] == ["no_turn", "environment"]
    assert [game["messages"][-1]["content"][:5] for game in games] == ["error", "open"]
    assert [len(game["messages"]) for game in games] == [3, 3]


def test_tasks_of_a_file_with_an_environment(script, tools, play, tmp_path):
    """The first N rows, in the order of the file. What reset() says is shown, and get_reward() counts."""
    (tmp_path / "door.py").write_text(GAME)
    prompt = [{"role": "user", "content": "Guess my number from 1 to 31."}]
    rows = [{"prompt": prompt, "color": color} for color in ("red", "blue", "green")]
    data = write_rows(tmp_path / "doors", train=rows, test=rows)
    own = dict(tools=None, reward_fn=None, environment=f"{tmp_path}/door.py:Door", dataset_name=data)
    _, folder, _ = tools(**own, max_turns=2)
    write_rows(tmp_path / "mine", tasks=[{"prompt": prompt[0]["content"], "color": "white"}, *rows[1:]])
    flags = "--num-tasks", "2", "--output-dir", str(tmp_path / "out"), "--response-length", "60"
    games, screen = play(folder, "--tasks", f"{tmp_path}/mine/tasks.jsonl", *flags)
    first = [game["messages"][0]["content"] for game in games]
    assert first == [f"{prompt[0]['content']}\nThe door is {color}." for color in ("white", "blue")]
    assert [game["rewards/environment"] for game in games] == pytest.approx([0.3, 0.3])
    words = screen.split()
    assert "The door is white." in screen and words[words.index("rewards/environment") + 1] == "0.3"
    assert rows_of(tmp_path / "out", "turns.jsonl") == games
    assert not (folder / "play").exists()


def test_the_folder_is_a_page_of_report(tools, play):
    """report.py shows its tokens; those of a tool are marked."""
    _, folder, _ = tools(learning_rate=1e-5)
    games, _ = play(folder, "--num-tasks", "9")
    assert len(games) == 9  # more than the evaluation had
    run = report.read_run(folder / "play")
    data = report.token_data(run)
    assert [row["prompt"] for row in data["rows"]] == [game["task"] for game in games]
    assert "<tool_call>" in "".join("".join(row["tokens"]) for row in data["rows"])
    marks = [mark for row in data["rows"] for mark in row["sampled"]]
    assert True in marks and False in marks
    report.main([str(folder / "play")])
    assert (folder / "play/report.html").exists()


def test_another_model_and_other_flags(script, tools, play, monkeypatch):
    """The model of the run is the default; flags after the folder win."""
    _, folder, _ = tools()
    names, load_model = [], script.load_model
    monkeypatch.setattr(script, "load_model", lambda kind, name: names.append(name) or load_model(kind, name))
    play(folder, "--num-tasks", "1")
    play(folder, "--num-tasks", "1", "--model-name-or-path", f"{ROOT}/checkpoints/tools-sft")
    assert names == [f"{folder}/model", f"{ROOT}/checkpoints/tools-sft"]


def test_a_chat_that_is_a_json_text(tools, play, tmp_path, capsys):
    """It would be played with its brackets."""
    _, folder, _ = tools()
    path = tmp_path / "tasks.csv"
    path.write_text('prompt,answer\n"[{""role"": ""user"", ""content"": ""2 + 3?""}]",5\n')
    with pytest.raises(SystemExit):
        play(folder, "--tasks", str(path))
    assert "the chat in the column prompt is a JSON text" in capsys.readouterr().err
    path.write_text("prompt,answer\n2 + 3?,5\n")
    assert len(play(folder, "--tasks", str(path))[0]) == 1


def test_the_options_of_the_template(script, tools, play, tmp_path, monkeypatch):
    """Those of the run, also for the model before it; flags after the folder win."""
    model = AutoModelForCausalLM.from_pretrained(ROOT / "checkpoints/tools-sft")
    tokenizer = script.load_tokenizer(f"{ROOT}/checkpoints/tools-sft")
    tokenizer.chat_template += "{{ header | default('') }}"
    before = save(model, tokenizer, tmp_path / "before")
    _, folder, _ = tools(model_name_or_path=before, chat_template_kwargs='{"header": "<answer>"}')
    seen, sample = [], script.sample_turns

    def sample_turns(policy, texts, *inputs):
        seen.append(tokenizer.decode(texts[0]).rpartition("assistant\n")[2])
        return sample(policy, texts, *inputs)

    monkeypatch.setattr(script, "sample_turns", sample_turns)
    other = ["--chat-template-kwargs", '{"header": "<answer>1"}']
    for flags, header in (([], ""), (["--model-name-or-path", before], ""), (other, "1")):
        seen.clear()
        play(folder, "--num-tasks", "1", *flags)
        assert seen[0] == f"<answer>{header}"


def test_the_weights_of_rewards(tools, play):
    """Scores are those of a run: weighted sums."""
    _, folder, _ = tools(reward_weights=[0.25])
    play(folder, "--num-tasks", "4")
    rewards = [row["rewards/letters"] for row in rows_of(folder / "play", "turns.jsonl")]
    assert any(rewards)
    assert [row["score"] for row in rows_of(folder / "play", "tokens.jsonl")] == [0.25 * x for x in rewards]


def test_a_wrong_folder(monkeypatch, capsys, tmp_path):
    for words in ([], ["--greedy"], [str(tmp_path)]):
        with pytest.raises(SystemExit) as end:
            play_script.main(words)
        assert end.value.code == 2
        said = capsys.readouterr().err
        assert "python play.py RUN_FOLDER" in said and all(word in said for word in words)
    (tmp_path / "args.json").write_text(json.dumps({"args": {}}))
    with pytest.raises(SystemExit) as end:
        play_script.main([str(tmp_path), "--max-turns", "0"])
    assert end.value.code == 2


def test_the_folder_of_a_cold_start(capsys, tmp_path):
    """It has a model, but neither tools nor tasks."""
    (tmp_path / "args.json").write_text(json.dumps({"args": {"num_samples": 4}, "script": "sft"}))
    with pytest.raises(SystemExit) as end:
        play_script.main([str(tmp_path)])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert f"{tmp_path} is a run of sft.py" in said and f"--model-name-or-path {tmp_path}" in said
