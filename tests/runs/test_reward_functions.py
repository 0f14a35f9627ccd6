"""Functions of --reward-fn, as TRL calls them: what they get, what becomes of their scores, what they log."""

import json
import math
import re

import pytest
import torch
from conftest import GROUPS, RL
from run_tools import flags_of, one_line, reward_file, rows_of, spy, write_rows
from transformers import AutoTokenizer

pytest_plugins = ["run_fixtures"]
CPU = torch.device("cpu")
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
TEXT = {name: "answer" if name == "ppo_dialog" else "response" for name in RL}  # in samples.jsonl
NO_PENALTY = {name: {} if name == "grpo_math" else dict(missing_eos_penalty=None) for name in RL}
ONLY_FUNCTIONS = dict(intent_weight=0.0, meteor_weight=0.0)  # of ppo_dialog


@pytest.fixture
def script(scripts):
    """ppo_sentiment.py as a module. The functions that call reward functions are the same in all scripts."""
    return scripts["ppo_sentiment"]


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
    return [row | dict(prompt=" \n"), row | dict(prompt="99 long" + " words" * 200), row | dict(prompt=None)]


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


def mean(numbers):
    """Of a list of numbers."""
    return sum(numbers) / len(numbers)


# ---- What a function gets ----------------------------------------------------------------------------------

RECORD = """import json
state = columns.pop("trainer_state")
del columns["log_metric"], columns["log_extra"]
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
    RLOO and GRPO have 3 responses to each prompt; the first responses to all prompts come first.
    """
    lm = bang_lm(bos=True)
    data = numbered_data(name, tmp_path / "data")
    flags = dict(model_name_or_path=lm, dataset_name=data, reward_fn=reward_file(tmp_path, RECORD))
    if name == "ppo_sentiment":
        flags |= dict(query_min_length=4)  # BOS and a number have at most 3 tokens
    if name == "rloo_tldr":
        flags |= dict(rloo_k=3, per_device_train_batch_size=6)
    if name == "grpo_math":
        judge = reward_file(tmp_path, "return [1.0] * len(prompts)", "judge")[0]  # not the recorded function
        flags |= dict(num_generations=3, num_eval_samples=3, per_device_train_batch_size=6, judge_fn=judge)
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
            assert call["prompts"] == call["prompts"][:4] * 3
            assert len(set(call["prompts"])) == 4
    assert 0 < sum(b["stopped"].sum().item() for _, (b, *_) in rollouts) < 2 * B
    assert len(set(calls[1]["number"] + calls[2]["number"])) > 4
    if name == "ppo_dialog":
        assert set(calls[1]["turn"]) == {1, 2}


@pytest.fixture
def call(script):
    """call(function, **columns) -> the scores of two responses, with "a" and "bb" in the columns for each."""

    def run(function, prompts=("p", "q"), **columns):
        functions = script.RewardFunctions("--reward-fn", {"f": function}, CPU)
        rows = [{name: values[i] for name, values in columns.items()} for i in range(2)]
        [scores] = functions(list(prompts), ["a", "bb"], [[5], [6, 7]], rows).values()
        return scores.tolist()

    return run


def test_a_function_gets_only_what_it_has_parameters_for(call):
    """Without **columns it has to name what it needs; other defaults stay."""

    def positional(number, completions, missing=7):
        return [n + missing + len(text) for n, text in zip(number, completions)]

    def by_keyword(*, prompts, completion_ids):
        return [len(prompt) + len(ids) for prompt, ids in zip(prompts, completion_ids)]

    def everything(**inputs):
        seen.append(set(inputs))
        return [0.0, 0.0]

    def optional(completions, number=None, log_metric=None):
        return list(number)

    seen = []
    columns = dict(number=[10, 20], other=["x", "y"])
    assert call(positional, **columns) == [18, 29]
    assert call(by_keyword, **columns) == [2, 3]
    assert call(optional, **columns) == [10, 20]
    assert call(everything, **columns) == [0, 0]
    own = {"prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra"}
    assert seen == [{"number", "other"} | own]


def test_completions_of_a_chat(call):
    """They are lists of messages if the prompts are."""
    seen = []

    def reward(prompts, completions):
        seen.append(completions)
        return [0.0] * len(prompts)

    chat = [{"role": "user", "content": "Hello."}]
    call(reward, prompts=[chat, [{"role": "system", "content": "Be kind."}, *chat]])
    call(reward, prompts=["Hello.", "Be kind."])
    messages = [[{"role": "assistant", "content": text}] for text in ("a", "bb")]
    assert seen == [messages, ["a", "bb"]]


@pytest.mark.parametrize(
    "parameters, message",
    [
        ("prompts, responses", "rename responses to completions"),
        ("prompts, responses, **columns", "rename responses to completions"),
        ("contexts, answers", "rename contexts to prompts, answers to completions"),
        ("contexts, completions", "rename contexts to prompts"),
    ],
)
@pytest.mark.parametrize("name", RL)
def test_old_names_of_parameters(scripts, small, capsys, tmp_path, name, parameters, message):
    """One line says which ones to rename."""
    text = f"def mine({parameters}):\n    return [0.0] * 4\n"
    args = small(name, reward_fn=function_file(tmp_path, text, "mine"))
    line = one_line(scripts[name], flags_of(args), capsys)
    assert line == f"{name}.py: --reward-fn mine: parameters have TRL's names: {message}"


def test_old_names_of_parameters_of_a_judge(scripts, small, capsys, tmp_path):
    """The line names --judge-fn."""
    [judge_fn] = function_file(tmp_path, "def mine(prompts, responses):\n    return [0.0] * 4\n", "mine")
    line = one_line(scripts["rloo_tldr"], flags_of(small("rloo_tldr", judge_fn=judge_fn)), capsys)
    assert "--judge-fn mine: parameters have TRL's names: rename responses to completions" in line


@pytest.mark.parametrize("name", RL)
def test_a_parameter_without_a_column(scripts, small, capsys, tmp_path, name):
    """One line names it, and the columns that there are."""
    parameters = "completions, solution, **columns" if name == "grpo_math" else "completions, solution"
    text = f"def mine({parameters}):\n    return [0.0] * 4\n"
    data = numbered_data(name, tmp_path / "data")
    args = small(name, dataset_name=data, reward_fn=function_file(tmp_path, text, "mine"))
    line = one_line(scripts[name], flags_of(args), capsys)
    assert "--reward-fn mine has the parameter solution, but there is no such column; there are " in line
    named = set(line.split("there are ")[1].split(", "))
    assert COLUMNS[name] | {"prompts", "completions"} <= named


# ---- Functions of others -----------------------------------------------------------------------------------

IN_THE_STYLE_OF_TRL = r'''
import re


def boxed_answer(completions, ground_truth, **kwargs):
    """Does the text in \\boxed{} equal the column ground_truth?"""
    rewards = []
    for completion, truth in zip(completions, ground_truth):
        found = re.search(r"\\boxed\{(.*?)\}", completion)
        rewards.append(1.0 if found and found.group(1) == truth else 0.0)
    return rewards


def many_tokens(completion_ids, **kwargs):
    """More points for longer completions."""
    return [float(len(ids)) for ids in completion_ids]


def math_only(prompts, completions, task, **kwargs):
    """Only for rows whose column task is "math"."""
    return [float(len(c)) if t == "math" else None for c, t in zip(completions, task)]


def harder_later(completions, trainer_state, **kwargs):
    """A limit that grows during training."""
    limit = 1 + trainer_state.global_step
    return [1.0 if len(completion) >= limit else 0.0 for completion in completions]
'''
TRL_NAMES = ("boxed_answer", "many_tokens", "math_only", "harder_later")


def test_functions_in_the_style_of_trl(recorded, tmp_path):
    """What TRL's page on GRPO shows for strings: **kwargs, a column, completion_ids, None, trainer_state."""
    kinds = ("math", "code")
    rows = []
    for i in range(12):
        rows.append(dict(prompt=f"Solve {i}:", ground_truth=str(i), task=kinds[i % 2]))
    data = write_rows(tmp_path / "data", train=rows[:8], test=rows[8:])
    functions = function_file(tmp_path, IN_THE_STYLE_OF_TRL, *TRL_NAMES)
    folder, rollouts = recorded("rloo_tldr", dataset_name=data, reward_fn=functions)
    for i, row in enumerate(rows_of(folder)):
        (_, _, _, posts, *_), (b, responses) = rollouts[i + 1]
        tasks = [post["columns"]["task"] for post in posts] * 2
        lengths = [len(text) for text, task in zip(responses, tasks) if task == "math"]
        assert len(lengths) in (2, 4, 6)
        assert row["rewards/boxed_answer/mean"] == 0
        assert row["rewards/many_tokens/mean"] == mean((b["lengths"] - b["stopped"].long()).tolist())
        assert row["rewards/math_only/mean"] == pytest.approx(mean(lengths))
        reached = mean([len(text) >= i + 1 for text in responses])
        assert row["rewards/harder_later/mean"] == pytest.approx(reached)


def test_a_function_that_reads_a_solution(script, tmp_path):
    """The reward is of the row with the right answer, and of no other."""
    functions = function_file(tmp_path, IN_THE_STYLE_OF_TRL, "boxed_answer")
    rewards = script.load_reward_functions("--reward-fn", functions, CPU)
    completions = [r" It is \boxed{2}.", r" It is \boxed{6}.", " It is 5."]
    rows = [dict(ground_truth=truth) for truth in ("2", "5", "5")]
    scores = rewards(["2x + 3 = 7", "3x - 5 = 10", "3x - 5 = 10"], completions, [[1], [2], [3]], rows)
    assert scores["boxed_answer"].tolist() == [1, 0, 0]


# ---- Scores ------------------------------------------------------------------------------------------------

TWO = """
def length(completions):
    return [float(len(text)) for text in completions]


def letters(completions, **columns):
    return [float(len(set(text))) for text in completions]
"""


@pytest.mark.parametrize("weights", [None, [0.5, -2.0]])
@pytest.mark.parametrize("name", RL)
def test_scores_are_weighted_sums(recorded, scripts, monkeypatch, tmp_path, name, weights):
    """Weights belong to the functions in the order of --reward-fn. Means are logged without them."""
    flags = dict(reward_fn=function_file(tmp_path, TWO, "letters", "length"), reward_weights=weights)
    if name == "ppo_dialog":
        flags |= dict(intent_weight=0.25, meteor_weight=3.0)
    credits = spy(monkeypatch, scripts[name], CREDIT[name])
    folder, rollouts = recorded(name, kl_coef=0.0, **NO_PENALTY[name], **flags)
    _, result = rollouts[1]
    b, responses = result[0], texts_of(result)
    of_letters, of_length = weights or [1, 1]
    lengths, letters = [len(text) for text in responses], [len(set(text)) for text in responses]
    assert lengths != letters
    expected = of_letters * torch.tensor(letters).float() + of_length * torch.tensor(lengths)
    if name == "ppo_dialog":
        expected = expected + 0.25 * b["intent"] + 3 * b["meteor"]
    torch.testing.assert_close(b["scores"], expected)
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
            score = of_letters * len(set(text)) + of_length * len(text)
            assert row["score"] == pytest.approx(score)
        judge = json.loads((folder / "evaluation.json").read_text())["judge"]
        assert judge == ", ".join(flags["reward_fn"])


def test_the_reward_model_has_a_mean(rloo, ppo):
    """Without --reward-fn, rewards/NAME/mean is that of the model."""
    _, _, rows = rloo("rloo")
    assert [row["rewards/reward_model/mean"] for row in rows] == [row["env/reward_mean"] for row in rows]
    _, _, rows = ppo("ppo")
    assert [row["rewards/classifier/mean"] for row in rows] == [row["env/reward_mean"] for row in rows]


NONE = """
def even(completions):
    return [float(len(text)) if len(text) % 2 == 0 else None for text in completions]


def three(completions):
    return [3.0] * len(completions)


def never(completions):
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
        assert b["scores"].tolist() == scores
        assert b["rewards/even"].isnan().tolist() == [n % 2 == 1 for n in lengths]
        assert b["rewards/never"].isnan().all()
        assert row["env/reward_mean"] == row["objective/scores"] == pytest.approx(mean(scores))
        assert row["rewards/even/mean"] == pytest.approx(mean(even))
        assert row["rewards/three/mean"] == 3
        assert row["rewards/never/mean"] == 0


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
    data = numbered_data("rloo_tldr", tmp_path / "data")
    flags = dict(rloo_k=3, per_device_train_batch_size=6, total_episodes=12)
    flags |= dict(reward_fn=reward_file(tmp_path, RECORD), judge_fn=reward_file(tmp_path, RECORD, "judge")[0])
    folder, _ = recorded("rloo_tldr", dataset_name=data, **flags)
    [rewarded] = [call for call in rows_of(tmp_path, "reward.py.calls") if len(call["prompts"]) == 12]
    [judged] = [call for call in rows_of(tmp_path, "judge.py.calls") if len(call["prompts"]) == 12]
    assert len(set(zip(rewarded["prompts"], rewarded["completions"]))) > 4
    for name in ("prompts", "completions", "number", "tags"):
        assert judged[name] == rewarded[name]
    [row] = rows_of(folder)
    assert row["judge/scores"] == pytest.approx(mean([len(text) % 5 for text in judged["completions"]]))


def test_the_weighted_sum_is_the_judge(recorded, tmp_path):
    """Without a judge, the win rate of rloo_tldr.py compares weighted sums."""
    rows = []
    for i in range(12):
        rows.append(
            dict(prompt=f"{i} cats.\n\nTL;DR:", completion=" abcdefgh"[: 1 + i % 8] + " aaaaaaaaaaaa")
        )
    data = write_rows(tmp_path / "data", train=rows[:4], test=rows[4:])
    functions = function_file(tmp_path, TWO, "length", "letters")
    flags = dict(dataset_name=data, num_examples=8, reward_fn=functions)
    found = []
    for weights in ([1.0, -2.0], [-1.0, 2.0]):
        folder, _ = recorded("rloo_tldr", f"run{weights}", reward_weights=weights, **flags)
        verdicts = []
        for row in rows_of(folder, "evaluation_samples.jsonl"):
            ours, theirs = (
                weights[0] * len(text) + weights[1] * len(set(text))
                for text in (row["before"], row["reference"])
            )
            verdicts.append(1.0 if ours > theirs else 0.5 if ours == theirs else 0.0)
        before = json.loads((folder / "evaluation.json").read_text())["before"]
        assert before["win rate"] == pytest.approx(mean(verdicts))
        assert before["ties"] == pytest.approx(mean([verdict == 0.5 for verdict in verdicts]))
        found.append(before["win rate"])
    assert found[0] != found[1]


def test_weights_are_not_for_other_judges(recorded, tiny_preference_model, tmp_path):
    """A reward model as judge decides by its own score, whatever --reward-weights is."""
    functions = function_file(tmp_path, TWO, "length", "letters")
    tables = []
    for weights in ([1.0, 1.0], [-1.0, 1.0]):
        flags = dict(reward_weights=weights, reward_fn=functions, judge_model=tiny_preference_model("llama"))
        folder, _ = recorded("rloo_tldr", f"run{weights}", num_examples=7, **flags)
        tables.append(json.loads((folder / "evaluation.json").read_text())["before"])
    assert tables[0]["win rate"] == tables[1]["win rate"] != 0.5
    assert tables[0]["score mean"] != tables[1]["score mean"]


# ---- What a function logs ----------------------------------------------------------------------------------

LOGGING = """
def first(prompts, completions, log_metric, log_extra):
    log_metric("texts", len(prompts))
    log_metric("texts", len(prompts) + 2)
    log_extra("first letter", [text[:1] for text in completions])
    return [float(len(text)) for text in completions]


def second(completions, log_metric, log_extra, **columns):
    log_metric("longest", max(len(text) for text in completions))
    log_extra("length", (len(text) for text in completions))
    return [0.0] * len(completions)
"""


def test_log_extra_cannot_replace_the_answers_of_a_dialog(scripts, small, tmp_path):
    source = """
def score(completions, log_extra, **columns):
    log_extra("answer", ["another text"] * len(completions))
    return [0.0] * len(completions)
"""
    functions = function_file(tmp_path, source, "score")
    flags = dict(total_episodes=8, num_sample_generations=1, reward_fn=functions)
    with pytest.raises(scripts["ppo_dialog"].UserError, match="log_extra.'answer', .* such a column already"):
        scripts["ppo_dialog"].train(small("ppo_dialog", **flags))


@pytest.mark.parametrize("name", RL)
def test_what_functions_log(scripts, small, monkeypatch, tmp_path, name):
    """Metrics are means over the calls of log_metric in an update's rollout. Columns are in the samples."""
    functions = function_file(tmp_path, LOGGING, "first", "second")
    rollouts = spy(monkeypatch, scripts[name], ROLLOUT[name])
    flags = dict(total_episodes=16, num_sample_generations=2, reward_fn=functions)
    _, folder = scripts[name].train(small(name, **flags))
    rows = rows_of(folder)
    rollouts = without_greedy(name, rollouts)
    assert len(rows) == 2 and len(rollouts) == 6  # before, update, samples, update, samples, after
    for row, (_, result) in zip(rows, (rollouts[1], rollouts[3])):
        assert row["texts"] == 8 + 1
        assert row["longest"] == max(len(text) for text in texts_of(result))
    samples = rows_of(folder, "samples.jsonl")
    assert {row["update"] for row in samples} == {1, 2}
    for row in samples:
        text = row[TEXT[name]]
        assert row["first letter"] == text[:1]
        assert row["length"] == len(text)
    evaluated = rows_of(folder, "evaluation_samples.jsonl")
    if name == "rloo_tldr":
        for row in evaluated:
            assert row["length after"] == len(row["after"])
            assert row["first letter after"] == row["after"][:1]
    if name == "grpo_math":  # several responses to each task
        for row in evaluated:
            for record in (row["before"], row["after"]):
                assert record["extra"]["length"] == [len(text) for text in record["responses"]]
                assert record["extra"]["first letter"] == [text[:1] for text in record["responses"]]
        assert {len(row["before"]["responses"]) for row in evaluated} == {1, 2}


def test_a_column_of_another_length(script, small, capsys, tmp_path):
    """log_extra needs one value per response; one line says so."""
    text = """
def mine(completions, log_extra):
    log_extra("words", [1, 2, 3])
    return [0.0] * len(completions)
"""
    args = small("ppo_sentiment", reward_fn=function_file(tmp_path, text, "mine"))
    line = one_line(script, flags_of(args), capsys)
    assert "--reward-fn: log_extra('words', ...) needs 4 values" in line


@pytest.mark.parametrize(
    "line, message",
    [
        ("log_metric('x', float('nan'))", "log_metric('x', nan): not a finite number"),
        (
            "log_extra('score', completions)",
            "log_extra('score', ...): the samples have such a column already",
        ),
    ],
)
@pytest.mark.parametrize("name", RL)
def test_what_cannot_be_logged(scripts, small, capsys, tmp_path, name, line, message):
    """It is refused in the first call, before training, and one line says what."""
    text = f"def mine(completions, log_metric, log_extra):\n    {line}\n    return [0.0] * len(completions)\n"
    args = small(name, reward_fn=function_file(tmp_path, text, "mine"))
    assert f"--reward-fn: {message}" in one_line(scripts[name], flags_of(args), capsys)


def test_logged_columns_can_be_written(script):
    """Numbers stay numbers; of anything else, the text is kept, so that JSON can hold it."""

    def mine(completions, log_extra):
        log_extra("words", [{1}, 2])
        log_extra("share", (0.5, torch.tensor(3)))
        return [0.0] * len(completions)

    functions = script.RewardFunctions("--reward-fn", {"mine": mine}, CPU)
    functions(["p", "q"], ["a", "b"], [[1], [2]], [{}, {}])
    assert functions.extra == {"words": ["{1}", 2], "share": [0.5, "tensor(3)"]}
