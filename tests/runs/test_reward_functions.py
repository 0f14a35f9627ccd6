"""Functions of --reward-fn, as TRL calls them: what they get, and what becomes of their scores."""

import json
import math
import re
from statistics import fmean as mean

import pytest
import torch
from conftest import GROUPS, RL, ROOT
from run_tools import evaluation_of, reward_file, rows_of, spy, write_rows
from transformers import AutoTokenizer

pytest_plugins = ["run_fixtures"]
ROLLOUT = {
    "ppo_sentiment": "rollout",
    "ppo_dialog": "rollout_answers",
    "rloo_tldr": "rollout_groups",
    "grpo_math": "sample_responses",
}
CREDIT = {
    "ppo_sentiment": "token_rewards",
    "ppo_dialog": "token_rewards",
    "rloo_tldr": "rloo_advantages",
    "grpo_math": "grpo_advantages",
}
SCORES = {name: "scores" if name == "grpo_math" else "raw_scores" for name in RL}  # before clip and penalty
NO_PENALTY = {name: {} if name == "grpo_math" else dict(missing_eos_penalty=None) for name in RL}
ONLY_FUNCTIONS = dict(intent_weight=0.0, meteor_weight=0.0)  # of ppo_dialog


@pytest.fixture
def recorded(scripts, small, monkeypatch):
    """recorded(script, folder="run", **changes) trains -> run folder, the calls of its rollout function.

    The calls are those of the evaluation before training, of each update, and of the evaluation after it.
    """

    def run(name, folder="run", **changes):
        with monkeypatch.context() as patch:
            rollouts = spy(patch, scripts[name], ROLLOUT[name])
            _, run_folder = scripts[name].train(small(name, folder, num_sample_generations=0, **changes))
        return run_folder, without_greedy(name, rollouts)

    return run


def without_greedy(name, calls):
    """The calls without those of the greedy responses, which follow each evaluation of grpo_math.py."""
    return [calls[0], *calls[2:-1]] if name == "grpo_math" else calls


def texts_of(result):
    """The responses in the result of a rollout function."""
    return next(x for x in reversed(result) if isinstance(x[0], str))


def numbered_row(name, number):
    """A row of data for a script, in which everything depends on the number. Its texts begin with it."""
    row = dict(number=number, tags=[f"tag {number}"] * (number % 3))
    if name == "ppo_sentiment":
        row["text"] = f"{number} films were shown, and the best one was about a lighthouse."
    if name == "ppo_dialog":
        row["dialog"] = [f"{number} people came.", "Who are they?", f"They are my {number} neighbors."]
        row["act"] = [1, 2, 1]
    if name in GROUPS:
        row["prompt"] = f"{number} cats live here.\n\nTL;DR:"
    return row


def unusable_rows(name):
    """Rows that a script skips, each for another reason. They have the number 99."""
    row = numbered_row(name, 99)
    if name == "ppo_sentiment":
        return [row | dict(text=None), row | dict(text="9"), row | dict(text="")]
    if name == "ppo_dialog":
        one, blank = dict(dialog=["99 people."], act=[1]), dict(dialog=["99 people.", " ", "Yes."])
        return [row | one, row | blank, row | dict(act=None), row | dict(act=[1, 2, 1, 3])]
    return [row | dict(prompt=""), row | dict(prompt="99 long" + " words" * 200), row | dict(prompt=None)]


def numbered_data(name, folder):
    """A data set of such rows. The first ones, some in the middle and the last ones cannot be used. -> str"""
    train = [numbered_row(name, number) for number in range(10, 22)]
    test = [numbered_row(name, number) for number in range(30, 36)]
    for rows in (train, test):
        for i, row in enumerate(unusable_rows(name)):
            rows.insert((0, 3, len(rows), 0)[i], row)
    return write_rows(folder, train=train, test=test)


def function_file(folder, text, *names):
    """Write a file of functions. -> list of FILE.py:function for these names"""
    path = folder / "functions.py"
    path.write_text(text)
    return [f"{path}:{name}" for name in names]


# ---- What a function gets ----------------------------------------------------------------------------------

RECORD = """import json
state = columns.pop("trainer_state")
call = columns | dict(prompts=prompts, completions=completions, steps=[state.global_step, state.max_steps])
with open(__file__ + ".calls", "a") as file:
    file.write(json.dumps(call) + "\\n")
return [float(len(completion) % 5) for completion in completions]"""
COLUMNS = {
    "ppo_sentiment": {"number", "tags", "text"},
    "ppo_dialog": {"number", "tags", "dialog", "act", "turn"},
    "rloo_tldr": {"number", "tags"},
    "grpo_math": {"number", "tags"},
}


def response_tokens(b):
    """The tokens of each response, with its stop token."""
    T = b["sampling_logprobs"].shape[1]
    rows = zip(b["ids"][:, -T:].tolist(), b["lengths"].tolist())
    return [tokens[:length] for tokens, length in rows]


@pytest.mark.parametrize("name", RL)
def test_a_function_gets_the_columns_of_its_rows(recorded, bang_lm, tmp_path, name):
    """Every column of the data, the tokens and the progress. All lists are in the order of the responses.

    Rows that are skipped change nothing. Nobody reads BOS, or the zeros after the end, which are "!" here.
    RLOO and GRPO have 3 responses to each prompt, which are neighbors.
    """
    lm = bang_lm(bos=True)
    data = numbered_data(name, tmp_path / "data")
    flags = dict(model_name_or_path=lm, dataset_name=data, reward_fn=reward_file(tmp_path, RECORD))
    if name == "ppo_sentiment":
        flags |= dict(query_min_length=4)  # BOS and a number have at most 3 tokens
    if name == "rloo_tldr":
        flags |= dict(rloo_k=3, per_device_train_batch_size=6)
    if name == "grpo_math":
        flags |= dict(num_generations=3, num_eval_samples=3, per_device_train_batch_size=6)
    B = 12 if name in GROUPS else 8
    _, rollouts = recorded(name, total_episodes=2 * B, **flags)
    calls = without_greedy(name, rows_of(tmp_path, "reward.py.calls"))
    assert len(calls) == len(rollouts) == 4
    tokenizer = AutoTokenizer.from_pretrained(lm)
    for call, (_, result) in zip(calls, rollouts):
        b, responses = result[0], texts_of(result)
        assert set(call) == COLUMNS[name] | {"prompts", "completions", "completion_ids", "steps"}
        assert call["completions"] == responses
        assert call["completion_ids"] == response_tokens(b)
        assert not any("<s>" in text for text in call["prompts"] + call["completions"])
        texts = tokenizer.batch_decode(call["completion_ids"], skip_special_tokens=True)
        assert [text.strip() for text in texts] == [text.strip() for text in responses]
        assert call["number"] == [int(prompt.split()[0]) for prompt in call["prompts"]]
        rows = [numbered_row(name, number) for number in call["number"]]
        for column in set(rows[0]) - {"prompt"}:
            assert call[column] == [row[column] for row in rows]
        if name == "ppo_sentiment":
            assert all(text.startswith(prompt) for text, prompt in zip(call["text"], call["prompts"]))
        if name == "ppo_dialog":
            contexts = [dialog[:turn] for dialog, turn in zip(call["dialog"], call["turn"])]
            assert call["prompts"] == ["\n".join(context) for context in contexts]
    assert [call["steps"] for call in calls] == [[0, 2], [0, 2], [1, 2], [2, 2]]
    for call in calls[1:3]:
        assert len(call["prompts"]) == B
        if name in GROUPS:
            assert call["prompts"] == [prompt for prompt in call["prompts"][::3] for _ in range(3)]
            assert len(set(call["prompts"])) == 4
    assert 0 < sum(b["stopped"].sum().item() for _, (b, *_) in rollouts) < 2 * B
    assert len(set(calls[1]["number"] + calls[2]["number"])) > 4
    if name == "ppo_dialog":
        assert set(calls[1]["turn"]) == {1, 2}


def test_a_function_is_called_by_name(scripts):
    """The order of its parameters does not matter, and defaults of other parameters stay."""

    def mine(number, completions, missing=7, **kwargs):
        return [n + missing + len(text) for n, text in zip(number, completions)]

    rows, inputs = [dict(number=10), dict(number=20)], (["p", "q"], ["a", "bb"], [[1], [2, 2]])
    call = scripts["ppo_sentiment"].call_reward_functions
    rewards = call({"mine": mine}, None, torch.device("cpu"), rows, *inputs)
    assert rewards["mine"].tolist() == [18, 29]


@pytest.mark.parametrize("stem", ["json", "tyro"])
def test_a_file_named_like_a_module_is_refused(scripts, tmp_path, stem):
    """Of Python, of a library, or of another reward file: one name is one module in a process."""
    text = "def one(completions, **kwargs):\n    return [1.0] * len(completions)\n"
    files = [tmp_path / f"{stem}.py", tmp_path / "a/mine.py", tmp_path / "b/mine.py"]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    script = scripts["ppo_sentiment"]
    function = script.load_functions([f"{files[1]}:one"])["one"]
    assert function.__code__.co_filename == str(files[1])
    for file in (files[0], files[2]):
        with pytest.raises(script.UserError, match=f"there is another module {file.stem}"):
            script.load_functions([f"{file}:one"])


# ---- Scores ------------------------------------------------------------------------------------------------

TWO = """
def length(completions, **kwargs):
    return [float(len(text)) for text in completions]


def letters(completions, **kwargs):
    return [float(len(set(text))) for text in completions]
"""


@pytest.mark.parametrize("name", RL)
def test_scores_are_weighted_sums(recorded, scripts, monkeypatch, tmp_path, name):
    """Weights belong to the functions in the order of --reward-fn. Means are logged without them."""
    flags = dict(reward_fn=function_file(tmp_path, TWO, "letters", "length"), reward_weights=[0.5, -2.0])
    if name == "ppo_dialog":
        flags |= dict(intent_weight=0.25, meteor_weight=3.0)
    credits = spy(monkeypatch, scripts[name], CREDIT[name])
    folder, rollouts = recorded(name, kl_coef=0.0, **NO_PENALTY[name], **flags)
    _, result = rollouts[1]
    b, responses = result[0], texts_of(result)
    lengths, letters = [len(text) for text in responses], [len(set(text)) for text in responses]
    assert lengths != letters
    expected = 0.5 * torch.tensor(letters) - 2.0 * torch.tensor(lengths)
    if name == "ppo_dialog":
        expected = expected + 0.25 * b["parts"]["intent"] + 3 * b["parts"]["meteor"]
    torch.testing.assert_close(b[SCORES[name]], expected)
    (used, *_), _ = credits[0]
    torch.testing.assert_close(used, expected)
    row = rows_of(folder)[0]
    assert row["rewards/length/mean"] == pytest.approx(mean(lengths))
    assert row["rewards/letters/mean"] == pytest.approx(mean(letters))
    assert row["env/reward_mean"] == row["objective/scores"] == pytest.approx(expected.mean().item())
    assert row["env/reward_std"] == pytest.approx(expected.std(correction=0).item())

    # The evaluation scores with the same weights. That of GRPO shows each function alone.
    samples = rows_of(folder, "evaluation_samples.jsonl")
    if name == "grpo_math":
        for row in samples:
            assert row["before"]["rewards/length"] == [len(text) for text in row["before"]["responses"]]
            letters = [len(set(text)) for text in row["before"]["responses"]]
            assert row["before"]["rewards/letters"] == letters
    elif name != "ppo_dialog":
        for row in samples:
            text = row["before"]
            assert row["score"] == pytest.approx(0.5 * len(set(text)) - 2.0 * len(text))


NONE = """
def even(completions, **kwargs):
    return [float(len(text)) if len(text) % 2 == 0 else None for text in completions]


def three(completions, **kwargs):
    return [3.0] * len(completions)


def never(completions, **kwargs):
    return [None] * len(completions)
"""


@pytest.mark.parametrize("name", RL)
def test_a_function_that_does_not_apply(recorded, tmp_path, name):
    """None adds nothing to the score of its response, and is left out of the function's mean."""
    functions = function_file(tmp_path, NONE, "even", "three", "never")
    flags = dict(reward_fn=functions, reward_weights=[2.0, -1.0, 5.0]) | NO_PENALTY[name]
    if name == "ppo_dialog":
        flags |= ONLY_FUNCTIONS
    folder, rollouts = recorded(name, total_episodes=16, **flags)
    rows = rows_of(folder)
    assert len(rows) == 2
    for row, (_, result) in zip(rows, rollouts[1:3]):
        b, responses = result[0], texts_of(result)
        lengths = [len(text) for text in responses]
        even = [n for n in lengths if n % 2 == 0]
        assert 0 < len(even) < len(lengths)
        scores = [2.0 * n - 3 if n % 2 == 0 else -3.0 for n in lengths]
        assert b[SCORES[name]].tolist() == scores
        scores_by_name = b["parts"] if name == "ppo_dialog" else b
        assert scores_by_name["rewards/even"].isnan().tolist() == [n % 2 == 1 for n in lengths]
        assert scores_by_name["rewards/never"].isnan().all()
        assert row["env/reward_mean"] == row["objective/scores"] == pytest.approx(mean(scores))
        assert row["rewards/even/mean"] == pytest.approx(mean(even))
        assert row["rewards/three/mean"] == 3
        assert row["rewards/never/mean"] == 0
    if name == "ppo_dialog":  # its final table has the parts of the score
        lengths = [len(row["after"]) for row in rows_of(folder, "evaluation_samples.jsonl")]
        table = evaluation_of(folder)["after"]
        assert table["rewards/even/mean"] == mean(n for n in lengths if n % 2 == 0)
        assert (table["rewards/three/mean"], table["rewards/never/mean"]) == (3, 0)


@pytest.mark.parametrize("name", RL)
def test_a_function_that_never_applies(recorded, tmp_path, name):
    """Every score is 0, and the run goes on."""
    flags = ONLY_FUNCTIONS if name == "ppo_dialog" else {}
    functions = function_file(tmp_path, NONE, "never")
    if name == "rloo_tldr":  # otherwise the reward is the judge, and it must give a verdict
        flags = dict(judge_fn=reward_file(tmp_path, "return [1.0] * len(prompts)", "judge")[0])
    folder, _ = recorded(name, reward_fn=functions, **NO_PENALTY[name], **flags)
    [row, *_] = rows_of(folder)
    assert row["env/reward_mean"] == row["env/reward_std"] == row["objective/scores"] == 0
    assert row["rewards/never/mean"] == 0
    assert all(math.isfinite(x) for x in row.values())
    for path in folder.glob("*.json*"):
        assert not re.search(r"\b(NaN|Infinity)\b", path.read_text()), f"{path.name} is no JSON"


def test_the_judge_of_an_update_gets_what_the_reward_gets(recorded, tmp_path):
    """judge/scores: each response with its own post, and the mean of what the judge returns."""
    data = tmp_path / "data"
    train = [numbered_row("rloo_tldr", number) for number in range(10, 22)]
    test = [numbered_row("rloo_tldr", number) | dict(completion=" Cats.") for number in range(30, 36)]
    write_rows(data, train=train, test=test)
    flags = dict(rloo_k=3, per_device_train_batch_size=6, total_episodes=12)
    flags |= dict(reward_fn=reward_file(tmp_path, RECORD), judge_fn=reward_file(tmp_path, RECORD, "judge")[0])
    folder, _ = recorded("rloo_tldr", dataset_name=str(data), **flags)
    [rewarded] = [call for call in rows_of(tmp_path, "reward.py.calls") if len(call["prompts"]) == 12]
    [judged] = [call for call in rows_of(tmp_path, "judge.py.calls") if len(call["prompts"]) == 12]
    assert len(set(zip(rewarded["prompts"], rewarded["completions"]))) > 4
    for name in ("prompts", "completions", "number", "tags"):
        assert judged[name] == rewarded[name]
    [row] = rows_of(folder)
    assert row["judge/scores"] == pytest.approx(mean([len(text) % 5 for text in judged["completions"]]))


# ---- A chat model as the reward ----------------------------------------------------------------------------


def test_the_rubric_of_the_example(grpo, chat_with, monkeypatch):
    """Each response gets the grade of its own task and answer. No grade, or a wrong one, counts 0."""
    grades = ["Grade: 7", "first Grade: 3, then\nGrade: 10", "Grade: 11", "no idea", None, "Grade: 2.5"]

    def answer(question):
        assert "Task:\n" in question
        return grades[len(question.split("Answer:\n")[1]) % len(grades)]

    flags, requests = chat_with(answer)
    monkeypatch.setenv("JUDGE_URL", flags["judge_url"])
    monkeypatch.setenv("JUDGE_MODEL", "grader")
    reward_fn = [str(ROOT / "examples/rubric_reward.py:rubric")]
    _, folder, rows = grpo(reward_fn=reward_fn, num_sample_generations=2)
    assert {body["model"] for _, body in requests} == {"grader"}
    expected = [0.7, 1.0, 0.0, 0.0, 0.0, 0.0]
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert len({sample["score"] for sample in samples}) > 1
    for sample in samples:
        tail = len(f"{sample['response']}\n\nEnd your reply with the grade, as in: Grade: 7")
        assert sample["score"] == pytest.approx(expected[tail % 6])
        assert any(f"Answer:\n{sample['response']}\n" in question for question, _ in requests)


@pytest.mark.parametrize("number", ["0.5", "50.0 + len(text)"])
def test_a_reward_that_cannot_teach_is_said(scripts, small, tmp_path, capsys, number):
    """All scores are equal, or are after the clip."""
    path = tmp_path / "flat.py"
    path.write_text(f"def flat(completions, **kwargs):\n    return [{number} for text in completions]\n")
    flags = dict(score_clip=4.0, missing_eos_penalty=None, num_sample_generations=0)
    args = small("ppo_sentiment", reward_fn=[f"{path}:flat"], **flags)
    scripts["ppo_sentiment"].train(args)
    assert "all scores are equal (because of --score-clip?)" in " ".join(capsys.readouterr().out.split())
