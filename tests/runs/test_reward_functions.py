"""Functions of --reward-fn, as TRL calls them: what they get, and what becomes of their scores."""

import re
from statistics import fmean as mean

import pytest
import torch
from conftest import GROUPS, RL, ROOT
from run_tools import evaluation_of, rows_of, spy, write_rows
from transformers import AutoTokenizer

pytest_plugins = ["run_fixtures"]
ROLLOUT = {
    "ppo_sentiment": "rollout",
    "ppo_dialog": "rollout",
    "rloo_tldr": "rollout",
    "grpo_math": "sample_responses",
}
SCORES = {name: "scores" if name == "grpo_math" else "raw_scores" for name in RL}  # before clip and penalty


@pytest.fixture
def recorded(scripts, small, monkeypatch):
    """recorded(script, folder="run", **changes) trains -> run folder, the calls of its rollout function.

    The calls are those of the evaluation before training, of each update, and of the evaluation after it.
    """

    def run(name, folder="run", **changes):
        for calls in CALLS.values():
            calls.clear()
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


# ---- What a function gets ----------------------------------------------------------------------------------

CALLS = {"reward": [], "judge": []}  # what these functions got


def record(name, prompts, completions, trainer_state, **columns):
    steps = [trainer_state.global_step, trainer_state.max_steps]
    CALLS[name].append(columns | dict(prompts=prompts, completions=completions, steps=steps))
    return [float(len(completion) % 5) for completion in completions]


def reward(**inputs):
    return record("reward", **inputs)


def judge(**inputs):
    return record("judge", **inputs)


COLUMNS = {
    "ppo_sentiment": {"number", "tags", "text"},
    "ppo_dialog": {"number", "tags", "dialog", "act", "turn"},
    "rloo_tldr": {"number", "tags"},
    "grpo_math": {"number", "tags"},
}


@pytest.mark.parametrize("name", RL)
def test_a_function_gets_the_columns_of_its_rows(recorded, bang_lm, tmp_path, name):
    """Every column of the data, the tokens and the progress. All lists are in the order of the responses.

    Rows that are skipped change nothing. Nobody reads BOS, or the zeros after the end, which are "!" here.
    The policy does, once. RLOO and GRPO have 3 responses to each prompt, which are neighbors.
    """
    lm = bang_lm(bos=True)
    data = numbered_data(name, tmp_path / "data")
    flags = dict(model_name_or_path=lm, dataset_name=data, reward_fn=[f"{__file__}:reward"])
    if name == "ppo_sentiment":
        flags |= dict(query_min_length=4)  # BOS and a number have at most 3 tokens
    if name == "rloo_tldr":
        flags |= dict(rloo_k=3, per_device_train_batch_size=6)
    if name == "grpo_math":
        flags |= dict(num_generations=3, num_eval_samples=3, per_device_train_batch_size=6)
    B = 12 if name in GROUPS else 8
    _, rollouts = recorded(name, total_episodes=2 * B, **flags)
    calls = without_greedy(name, CALLS["reward"])
    assert len(calls) == len(rollouts) == 4
    tokenizer = AutoTokenizer.from_pretrained(lm)
    for call, (_, result) in zip(calls, rollouts):
        b, responses = result[0], texts_of(result)
        assert set(call) == COLUMNS[name] | {"prompts", "completions", "completion_ids", "steps"}
        assert call["completions"] == responses
        T = b["sampling_logprobs"].shape[1]
        rows = zip(b["ids"][:, -T:].tolist(), b["lengths"].tolist())
        assert call["completion_ids"] == [tokens[:length] for tokens, length in rows]
        for ids, is_token in zip(b["ids"][:, :-T], b["mask"][:, :-T]):
            prompt = ids[is_token].tolist()
            assert prompt[0] == tokenizer.bos_token_id and tokenizer.bos_token_id not in prompt[1:]
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
    assert [call["steps"] for call in calls] == [[2, 2], [0, 2], [1, 2], [2, 2]]
    for call in calls[1:3]:
        assert len(call["prompts"]) == B
        if name in GROUPS:
            assert call["prompts"] == [prompt for prompt in call["prompts"][::3] for _ in range(3)]
            assert len(set(call["prompts"])) == 4
    assert 0 < sum(b["stopped"].sum().item() for _, (b, *_) in rollouts) < 2 * B
    assert len(set(calls[1]["number"] + calls[2]["number"])) > 4
    if name == "ppo_dialog":
        assert set(calls[1]["turn"]) == {1, 2}
    if name == "ppo_sentiment":
        lengths = [b["mask"].sum(1) - b["lengths"] for _, (b, *_) in rollouts]
        assert torch.cat(lengths).max() == 6  # --query-max-length counts BOS


# ---- Scores ------------------------------------------------------------------------------------------------


NOTHING_ELSE = {  # flags with which only reward functions make the score
    "ppo_sentiment": dict(missing_eos_penalty=None),
    "ppo_dialog": dict(missing_eos_penalty=None, intent_weight=0.0, meteor_weight=0.0),
    "rloo_tldr": dict(missing_eos_penalty=None),
    "grpo_math": dict(),
}


def even(completions, **columns):
    return [float(len(text)) if len(text) % 2 == 0 else None for text in completions]


def three(completions, **columns):
    return [3.0] * len(completions)


def never(completions, **columns):
    return [None] * len(completions)


@pytest.mark.parametrize("name", RL)
def test_a_function_that_does_not_apply(recorded, name):
    """None adds nothing to the score of its response, and is left out of the function's mean."""
    functions = [f"{__file__}:{function}" for function in ("even", "three", "never")]
    flags = dict(reward_fn=functions, reward_weights=[2.0, -1.0, 5.0]) | NOTHING_ELSE[name]
    folder, rollouts = recorded(name, total_episodes=16, **flags)
    rows = rows_of(folder)
    assert len(rows) == 2
    assert not (folder / "samples.jsonl").exists()  # --num-sample-generations 0
    for row, (_, result) in zip(rows, rollouts[1:3]):
        b, responses = result[0], texts_of(result)
        lengths = [len(text) for text in responses]
        even_lengths = [n for n in lengths if n % 2 == 0]
        assert 0 < len(even_lengths) < len(lengths)
        scores = [2.0 * n - 3 if n % 2 == 0 else -3.0 for n in lengths]
        assert b[SCORES[name]].tolist() == scores
        scores_by_name = b["parts"] if name == "ppo_dialog" else b
        assert scores_by_name["rewards/even"].isnan().tolist() == [n % 2 == 1 for n in lengths]
        assert scores_by_name["rewards/never"].isnan().all()
        assert row["env/reward_mean"] == row["objective/scores"] == pytest.approx(mean(scores))
        assert row["rewards/even/mean"] == pytest.approx(mean(even_lengths))
        assert row["rewards/three/mean"] == 3
        assert row["rewards/never/mean"] == 0
    if name == "ppo_dialog":  # its final table has the parts of the score
        lengths = [len(row["after"]) for row in rows_of(folder, "evaluation_samples.jsonl")]
        table = evaluation_of(folder)["after"]
        assert table["rewards/even/mean"] == pytest.approx(mean(n for n in lengths if n % 2 == 0))
        assert (table["rewards/three/mean"], table["rewards/never/mean"]) == (3, 0)
    for path in folder.glob("*.json*"):
        assert not re.search(r"\b(NaN|Infinity)\b", path.read_text()), f"{path.name} is no JSON"


def test_the_judge_of_an_update_gets_what_the_reward_gets(recorded, tmp_path):
    """judge/scores: each response with its own post, and the mean of what the judge returns."""
    train = [numbered_row("rloo_tldr", number) for number in range(10, 22)]
    test = [numbered_row("rloo_tldr", number) | dict(completion=" Cats.") for number in range(30, 36)]
    data = write_rows(tmp_path / "data", train=train, test=test)
    flags = dict(rloo_k=3, per_device_train_batch_size=6, total_episodes=12)
    flags |= dict(reward_fn=[f"{__file__}:reward"], judge_fn=f"{__file__}:judge")
    folder, _ = recorded("rloo_tldr", dataset_name=data, **flags)
    [rewarded] = [call for call in CALLS["reward"] if len(call["prompts"]) == 12]
    [judged] = [call for call in CALLS["judge"] if len(call["prompts"]) == 12]
    assert len(set(zip(rewarded["prompts"], rewarded["completions"]))) > 4
    for name in ("prompts", "completions", "number", "tags"):
        assert judged[name] == rewarded[name]
    [row] = rows_of(folder)
    assert row["judge/scores"] == pytest.approx(mean([len(text) % 5 for text in judged["completions"]]))


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
    samples = rows_of(folder, "samples.jsonl")
    assert len({sample["score"] for sample in samples}) > 1
    for sample in samples:
        tail = len(f"{sample['response']}\n\nEnd your reply with the grade, as in: Grade: 7")
        assert sample["score"] == pytest.approx(expected[tail % 6])
        assert any(f"Answer:\n{sample['response']}\n" in question for question, _ in requests)
