"""Reward functions on real rows, and the tools of grpo_tools.py."""

import sys
import time
from pathlib import Path

import pytest
from check_helpers import assert_only, assert_remark, findings, texts
from conftest import ROOT
from run_tools import guesses, reward_file, write_rows

import check

pytest_plugins = ["run_fixtures"]
MODEL = str(ROOT / "checkpoints/arithmetic-sft")
CORRECT = [str(ROOT / "data/math_rewards.py:correct")]


def tasks(count=64):
    return [dict(prompt=f"What is {i} + 3?", answer=str(i + 3)) for i in range(count)]


@pytest.fixture
def look(scripts, small, tmp_path):
    """look(rows, script="grpo_math", **flags) -> findings about these rows"""

    def make(rows, script="grpo_math", is_quick=False, **flags):
        data = write_rows(tmp_path / "data", train=rows, test=rows[:4])
        return findings(scripts[script], small(script, dataset_name=data, **flags), is_quick)

    return make


# ---- Reward functions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_quick", [False, True])
def test_one_answer_of_many_is_missing(look, is_quick):
    """It would end a run in update 4. The row is named."""
    rows = tasks()
    rows[41]["answer"] = None
    found = look(rows, is_quick=is_quick, reward_fn=CORRECT)
    assert_only(found, "--reward-fn", "train.jsonl row 42", "no completion can equal")


def test_the_number_of_a_row_in_a_file_without_a_split(scripts, small, tmp_path):
    """The tenth that is held out is drawn by sorting the rows."""
    rows = tasks()
    rows[41]["answer"] = None
    data = str(Path(write_rows(tmp_path / "data", train=rows), "train.jsonl"))
    found = findings(scripts["grpo_math"], small("grpo_math", dataset_name=data, reward_fn=CORRECT))
    assert_only(found, "--reward-fn", "train.jsonl row 42", "no completion can equal")


def test_a_row_that_is_not_used_may_have_no_answer(look):
    """Its prompt is too long."""
    rows = tasks(12)
    rows[7] = dict(prompt="What is 1" + " + 1" * 99, answer=None)
    assert texts(look(rows, reward_fn=CORRECT)) == []


WRONG = {
    "too few": ("return [1.0] * (len(prompts) - 1)", "train.jsonl row 1"),
    "not finite": ("return [float('inf') if '7' in p else 1.0 for p in prompts]", "row 8"),
    "not a number": ("return [float('nan') if '7' in p else 1.0 for p in prompts]", "row 8"),
    "nothing applies": ("return [None if '9' in p else 1.0 for p in prompts]", "row 10"),
    "another column": ("return [float(x) for x in columns['anwser']]", "KeyError"),
    "a mapping": ("return {i: 1.0 for i in range(len(prompts))}", "returned a dict, not a list of numbers"),
    "a set": ("return {float(i) for i in range(len(prompts))}", "returned a set, not a list of numbers"),
    "bytes": ("return bytes([1] * len(prompts))", "returned a bytes, not a list of numbers"),
    "a text": ("return '1' * len(prompts)", "returned a str, not a list of numbers"),
    "a batch of one": ("assert len(prompts) == 1\nreturn [1.0]", "none of them alone"),
}


@pytest.mark.parametrize("body, word", WRONG.values(), ids=WRONG)
def test_wrong_rewards(look, tmp_path, body, word):
    """Of the twelve rows, the first that fails is named."""
    assert_only(look(tasks(12), reward_fn=reward_file(tmp_path, body)), "cannot score", word)


@pytest.mark.parametrize("is_quick", [False, True])
@pytest.mark.parametrize("line", ["f(", "import no_such_package", "raise SystemExit(0)"])
def test_a_file_that_cannot_be_imported(look, tmp_path, line, is_quick):
    """SystemExit: a program without `if __name__ == "__main__"`. It must not end check.py."""
    (tmp_path / "program.py").write_text(f"def reward(prompts, **columns):\n    return [1.0]\n\n\n{line}\n")
    found = look(tasks(6), is_quick=is_quick, reward_fn=[f"{tmp_path}/program.py:reward"])
    assert_only(found, "program.py:reward cannot be imported")


def test_one_of_two_functions_may_not_apply(look, tmp_path):
    """As long as the other one does."""
    none = reward_file(tmp_path, "return [None] * len(prompts)", "none")
    (tmp_path / "ones.py").write_text("def ones(prompts, **columns):\n    return [1.0] * len(prompts)\n")
    assert texts(look(tasks(12), reward_fn=[*none, f"{tmp_path}/ones.py:ones"])) == []


def test_no_function_applies(look, tmp_path):
    """A response without any reward."""
    none = reward_file(tmp_path, "return [None] * len(prompts)", "none")
    assert_only(look(tasks(12), reward_fn=none), "all return None", "train.jsonl row 1")


def test_two_functions_of_one_name(look, tmp_path):
    """The second one would replace the first."""
    one, other = (reward_file(tmp_path, "return [1.0] * len(prompts)", name)[0] for name in ("one", "other"))
    found = look(tasks(6), reward_fn=[one, other])
    assert any("another function reward" in text for text in texts(found)), texts(found)


def test_a_file_with_the_name_of_a_module(look, tmp_path):
    """Python would not import the file: a module of this name is there already."""
    found = look(tasks(6), reward_fn=reward_file(tmp_path, "return [1.0] * len(prompts)", "random"))
    assert any("another module random" in text for text in texts(found)), texts(found)


def test_a_slow_function_is_sampled(look, tmp_path):
    """And it is said."""
    slow = reward_file(tmp_path, "import time\ntime.sleep(0.5 * len(prompts))\nreturn [1.0] * len(prompts)")
    start = time.time()
    found = look(tasks(400), is_quick=True, reward_fn=slow)
    assert time.time() - start < 10  # all rows would take 200 seconds
    assert texts(found) == []
    assert any("is slow: called on" in text for text in texts(found, "not checked"))


def test_the_answer_earns_nothing(look):
    """A wrong column: the answer is a text that no format makes right."""
    rows = [dict(prompt=f"What is {i} + 3?", answer=str(i + 3), solution="x") for i in range(12)]
    for row in rows:
        row["answer"], row["solution"] = row["solution"], row["answer"]
    found = look(rows, reward_fn=[str(ROOT / "data/math_rewards.py:well_formed")])
    assert_remark(found, "none has a reference", "earns more than an empty response")


def test_the_answer_earns_something(look):
    found = look(tasks(12), reward_fn=CORRECT)
    assert not any("none has a reference" in text for text in texts(found, "remark"))


CONSTANT = {  # the body of a function -> the kind of finding, if it ignores the response
    "prompts": ("return [float(len(str(p))) for p in prompts]", "error"),
    "answers": ("return [float(a) for a in columns['answer']]", "error"),
    "ones": ("return [1.0] * len(prompts)", "error"),
    "zeros": ("return [0.0] * len(prompts)", "remark"),  # perhaps a format that check.py does not try
    "an exception": ("return [0.0 if len(c) > 2000 else 1.0 for c in completions]", None),
    "lengths": ("return [float(len(c)) for c in completions]", None),
    "a format": ("return [float('```' in c) for c in completions]", None),
}


@pytest.mark.parametrize("body, kind", CONSTANT.values(), ids=CONSTANT)
def test_a_function_that_ignores_the_response(look, tmp_path, body, kind):
    """A policy could learn nothing from it."""
    found = look(tasks(12), reward_fn=reward_file(tmp_path, body))
    fitting = [finding for finding in found if "does not depend on the response" in finding.text]
    assert [finding.kind for finding in fitting] == [kind] * (kind is not None), found
    if kind is not None:
        assert "reward does not" in fitting[0].text and "for 16 of 16 rows" in fitting[0].text
    assert texts(found) == [finding.text for finding in fitting if kind == "error"]


def test_seven_rows_say_little(look, tmp_path):
    rows = [row if i < 3 else dict(prompt=row["prompt"]) for i, row in enumerate(tasks(12))]
    found = look(rows, reward_fn=reward_file(tmp_path, "return [1.0] * len(prompts)"))
    assert texts(found) == []  # three references in train, three in test


def test_one_of_two_functions_ignores_the_response(look, tmp_path):
    """It is named, and may be a rule that is seldom broken."""
    found = look(tasks(12), reward_fn=[*CORRECT, *reward_file(tmp_path, "return [1.0] * len(prompts)")])
    assert_remark(found, "reward does not depend on the response")


ORDERS = {  # the body of a function -> True if it looks at other rows
    "the first answer": ("return [float(c == columns['answer'][0]) for c in completions]", True),
    "the last one": ("return [float(columns['answer'][-1] in c) for c in completions]", True),
    "in tags": ("return [float(f'<answer>{columns[\"answer\"][0]}<' in c) for c in completions]", True),
    "its place": ("return [float(i * len(c)) for i, c in enumerate(completions)]", True),
    "its own": ("return [float(c == a) for c, a in zip(completions, columns['answer'])]", False),
    "at random": ("import random\nreturn [random.random() for c in completions]", False),
    "the mean": ("n = [len(c) for c in completions]\nreturn [x - sum(n) / len(n) for x in n]", False),
    "its group": (
        "n = [len(c) for c in completions]\nreturn [float(n[i] - n[i ^ 1]) for i in range(len(n))]",
        False,
    ),
}


@pytest.mark.parametrize("body, is_wrong", ORDERS.values(), ids=ORDERS)
def test_a_function_that_compares_with_another_row(look, tmp_path, body, is_wrong):
    """Right for the first row only, so hardly any response earns something."""
    found = look(tasks(13)[1:], reward_fn=reward_file(tmp_path, body))
    if is_wrong:
        assert_only(found, "--reward-fn: reward depends on the other rows", "train.jsonl row 1 earns")
    else:
        assert texts(found) == []


def test_the_order_of_rows_without_references(look, tmp_path):
    body = "return [float(len(c) - len(completions[0])) for c in completions]"
    rows = [dict(prompt=row["prompt"]) for row in tasks(12)]
    assert_only(look(rows, reward_fn=reward_file(tmp_path, body)), "depends on the other rows")


CLIPS = {  # a reward, and --score-clip -> the kind of finding
    "references": ("return [9.0 if c else 0.0 for c in completions]", 4.0, "remark"),
    "all": ("return [9.0 + len(c) for c in completions]", 4.0, "error"),
    "just": ("return [float(bool(c)) for c in completions]", 1.0, None),
    "some": ("return [9.0 * ('B' in c) for c in completions]", 4.0, None),
    "none": ("return [9.0 if c else 0.0 for c in completions]", None, None),
}


@pytest.mark.parametrize("body, clip, kind", CLIPS.values(), ids=CLIPS)
def test_references_beyond_the_clip(look, tmp_path, body, clip, kind):
    rows = [dict(prompt=f"Post {i}.", completion="AB"[i % 2] + f" {i}") for i in range(12)]
    found = look(rows, "rloo_tldr", reward_fn=reward_file(tmp_path, body), score_clip=clip)
    fitting = [finding for finding in found if "--score-clip" in finding.text]
    assert [finding.kind for finding in fitting] == [kind] * (kind is not None), found
    assert texts(found) == [finding.text for finding in fitting if kind == "error"]


@pytest.mark.parametrize("weight, is_said", [(1.0, True), (0.1, False)])
def test_weights_count_before_the_clip(look, tmp_path, weight, is_said):
    rows = [dict(prompt=f"Post {i}.", completion=f"Text {i}.") for i in range(12)]
    body = reward_file(tmp_path, "return [9.0 if c else 0.0 for c in completions]")
    found = look(rows, "rloo_tldr", reward_fn=body, score_clip=4.0, reward_weights=[weight])
    assert is_said == any("--score-clip 4: the references of 16 rows" in t for t in texts(found, "remark"))


@pytest.mark.parametrize("name", ["prompts", "completions", "trainer_state"])
def test_columns_with_the_name_of_an_input(look, name):
    found = look([row | {name: 1} for row in tasks(12)], reward_fn=CORRECT)
    assert any(f"a column of the data is called {name}" in text for text in texts(found))


def test_the_run_imports_its_functions_anew(look, tmp_path):
    """What a module counts or draws begins with the run, not with the check."""
    found = look(tasks(6), reward_fn=reward_file(tmp_path, "return [len(c) for c in completions]", "counted"))
    assert texts(found) == []
    assert "counted" not in sys.modules and str(tmp_path) not in sys.path


@pytest.mark.parametrize("script", ["ppo_sentiment", "ppo_dialog", "rloo_tldr"])
def test_functions_of_other_scripts(scripts, small, tmp_path, script):
    """They get the columns of the row."""
    body = (
        "assert len(columns) >= 3, sorted(columns)\nreturn [len(str(x)) / len(prompts) for x in completions]"
    )
    assert texts(findings(scripts[script], small(script, reward_fn=reward_file(tmp_path, body)))) == []
    bad = reward_file(tmp_path, "return [1.0] * (len(prompts) + 1)", "bad")
    assert_only(findings(scripts[script], small(script, reward_fn=bad)), "cannot score")


def test_a_function_with_the_name_of_the_environments_reward(scripts, small, tmp_path):
    """get_reward() would replace it."""
    (tmp_path / "rules.py").write_text(
        "def environment(completions, **columns):\n    return [float(len(text)) for text in completions]\n"
    )
    flags = guesses(tmp_path) | dict(reward_fn=[f"{tmp_path}/rules.py:environment"])
    found = findings(scripts["grpo_tools"], small("grpo_tools", **flags))
    assert any("rename the function environment" in text for text in texts(found)), found


def test_the_judge_of_dpo(scripts, small, tmp_path):
    """It is asked at the very end of a run."""
    judge = reward_file(tmp_path, "return [1.0] * (len(prompts) + 1)")
    found = findings(scripts["dpo_tldr"], small("dpo_tldr", judge_fn=judge[0]))
    assert_only(found, "--judge-fn", "cannot score held-out rows")


def test_a_mapping_of_other_scripts(scripts, small, tmp_path):
    """list() would make rewards of its keys."""
    mapping = reward_file(tmp_path, "return dict(enumerate([1.0] * len(completions)))")
    for name, flags in (("grpo_tools", dict(reward_fn=mapping)), ("dpo_tldr", dict(judge_fn=mapping[0]))):
        found = findings(scripts[name], small(name, **flags))
        assert any("returned a dict, not a list of numbers" in text for text in texts(found)), (name, found)


def test_harder_rows(scripts, small, tmp_path):
    """Those of --hard-dataset-name are looked at like others."""
    flags = dict(dataset_name=write_rows(tmp_path / "data", train=tasks(), test=tasks(4)), reward_fn=CORRECT)
    rows = [dict(prompt="", answer="1"), dict(prompt="How much is 1 + 1?", answer="2")]
    for name, hard in (("some", rows), ("none", rows[:1] * 3)):
        flags["hard_dataset_name"] = write_rows(tmp_path / name, train=rows, test=hard)
        found = findings(scripts["grpo_math"], small("grpo_math", **flags))
        if name == "none":
            assert_only(found, str(tmp_path / "none"), "no harder row can be used")
        else:
            assert_remark(found, "1 of 2 harder rows are left out", "test.jsonl row 1")


# ---- Tools -------------------------------------------------------------------------------------------------

GOOD = '''
def search(query: str) -> str:
    """Find a page.

    Args:
        query: words
    """
    return query


def twice(query: str) -> str:
    return query


def untyped(query):
    """Find a page."""
    return query


async def waiting(query: str) -> str:
    """Find a page.

    Args:
        query: words
    """
    return query


def pages(query: str) -> str:
    """Find a page.

    Args:
        query: words
    """
    yield query


def printing(query: str):
    """Find a page.

    Args:
        query: words
    """
    print(query)


async def stream(query: str) -> str:
    """Find a page.

    Args:
        query: words
    """
    yield query


renamed = search
'''
TOOLS = {
    "no docstring": (["twice"], "tool twice cannot be described"),
    "no types": (["untyped"], "tool untyped cannot be described"),
    "generator": (["pages"], "tool pages returns an object of type generator"),
    "printing": (["printing"], "tool printing prints its result: return it"),
    "async generator": (["stream"], "tool stream returns an object of type async_generator"),
    "two of one name": (["search", "search"], "2 tools are called search"),
    "another name": (["renamed"], "tool renamed has another __name__, search"),
}


@pytest.mark.parametrize("names, word", TOOLS.values(), ids=TOOLS)
def test_tools(scripts, small, tmp_path, names, word):
    """What transformers cannot describe, or the script cannot call."""
    (tmp_path / "own_tools.py").write_text(GOOD)
    args = small("grpo_tools", tools=[f"{tmp_path}/own_tools.py:{name}" for name in names])
    found = findings(scripts["grpo_tools"], args)
    assert any(word in text for text in texts(found)), texts(found)
    assert not any("cannot score" in text for text in texts(found)), "blames the reward for it"
    assert not any("KeyError" in text for text in texts(found, "not checked"))


@pytest.mark.parametrize("name", ["search", "waiting"])
def test_a_good_tool(scripts, small, tmp_path, name):
    """Async functions are awaited."""
    (tmp_path / "own_tools.py").write_text(GOOD)
    tools = [f"{tmp_path}/own_tools.py:{name}"]
    args = small("grpo_tools", tools=tools, system_prompt=f"Use {name}(query).")
    found = findings(scripts["grpo_tools"], args)
    assert texts(found) == []
    assert_remark(found, f"does not show the tools ({name})")


def test_a_tool_that_the_policy_does_not_know(scripts, small, tmp_path):
    """Neither the template nor a prompt names it, and fine-tuning taught others: no call could be right."""
    (tmp_path / "own_tools.py").write_text(GOOD)
    found = findings(scripts["grpo_tools"], small("grpo_tools", tools=[f"{tmp_path}/own_tools.py:search"]))
    assert_only(found, "the policy does not know the tools (search)")


def test_no_tool_and_no_reward(scripts, small):
    found = findings(scripts["grpo_tools"], small("grpo_tools", tools=None))
    assert any("there is no tool" in text for text in texts(found))


@pytest.mark.parametrize("has_reply", [False, True])
def test_an_environment_without_tools(scripts, small, tmp_path, has_reply):
    """It may answer texts instead, as a user does."""
    flags = guesses(tmp_path)
    path = tmp_path / "guesses.py"
    reply = "def reply(self, text):\n        return None\n\n    def _guess(" if has_reply else "def _guess("
    path.write_text(path.read_text().replace("def guess(", reply))
    errors = texts(findings(scripts["grpo_tools"], small("grpo_tools", **flags)))
    assert len(errors) == (not has_reply) and all("public method or reply" in text for text in errors), errors


def test_an_environment_without_a_reward(scripts, small, tmp_path):
    """Then there must be a function."""
    flags = guesses(tmp_path)
    path = tmp_path / "guesses.py"
    path.write_text(path.read_text().replace("get_reward", "_reward"))
    found = findings(scripts["grpo_tools"], small("grpo_tools", **flags))
    assert any("there is no reward" in text for text in texts(found)), texts(found)


def test_an_environment(scripts, small, tmp_path):
    """Its methods are tools, and it rewards itself."""
    assert texts(findings(scripts["grpo_tools"], small("grpo_tools", **guesses(tmp_path)))) == []


SHELF = """
class Shelf:
    {of_class} = []

    def reset(self, secret, **columns):
        self.own = []

    def get_reward(self):
        return float(len(self.own))

    def put(self, name: str, count: int = 1) -> str:
        \'\'\'Put something on the shelf.

        Args:
            name: what
            count: how many
        \'\'\'
        {body}
"""
ENVIRONMENTS = {
    "own": ("items", "self.own.append(name)\n        return str(self.own)", None, None),
    "shared": (
        "items",
        "self.items.append(name)\n        return str(self.items)",
        "changes items of all",
        None,
    ),
    "a cache": ("_seen", "self._seen.append(name)\n        return name", None, "changes _seen of all"),
    "always fails": ("items", "return self.itmes[0]", "all 3 calls of put with made-up arguments fail", None),
    "asks for a number": ("items", "return str(1 / len(self.own))", None, "all 3 calls of put"),
    "fails once": ("items", "return str(1 / (len(name) - 1))", None, None),
    "says nothing": ("items", "self.own.append(name)", None, "tool put returns nothing"),
    "hangs": ("items", "import time\n        time.sleep(9)\n        return name", None, None),
}


@pytest.mark.parametrize("of_class, body, wrong, said", ENVIRONMENTS.values(), ids=ENVIRONMENTS)
def test_calls_of_an_environment(scripts, small, tmp_path, monkeypatch, of_class, body, wrong, said):
    """Its tools are called with made-up arguments: state that objects share, and calls that all fail."""
    monkeypatch.setattr(check, "QUICK_SECONDS", 0.5)
    (tmp_path / "shelf.py").write_text(SHELF.format(of_class=of_class, body=body))
    flags = guesses(tmp_path) | dict(environment=f"{tmp_path}/shelf.py:Shelf")
    found = findings(scripts["grpo_tools"], small("grpo_tools", **flags))
    about = {
        kind: [
            text for text in texts(found, kind) if "made-up" in text or "of all" in text or "tool put" in text
        ]
        for kind in ("error", "remark")
    }
    for kind, word in (("error", wrong), ("remark", said)):
        assert len(about[kind]) == (word is not None), found
        assert word is None or word in about[kind][0], found


def test_a_reset_that_changes_all_objects(scripts, small, tmp_path):
    """The tools change nothing."""
    text = SHELF.format(of_class="items", body="return str(self.items)")
    (tmp_path / "shelf.py").write_text(
        text.replace("self.own = []", "self.items.append(secret)\n        self.own = []")
    )
    flags = guesses(tmp_path) | dict(environment=f"{tmp_path}/shelf.py:Shelf")
    found = findings(scripts["grpo_tools"], small("grpo_tools", **flags))
    assert any("changes items of all trajectories" in text for text in texts(found)), texts(found)


BROKEN = {  # old, new -> what is said
    "no reset": ("def reset(", "def begin(", "has no method reset"),
    "a tool called reply": (
        "def get_reward(",
        "def reply(self):\n        return None\n\n    def get_reward(",
        "reply('') ends the run: TypeError",
    ),
    "signal": (
        "def get_reward(self):",
        "def get_reward(self):\n        import signal\n        signal.signal(signal.SIGALRM, print)",
        "ValueError: signal only works in main thread",
    ),
}


def begin_with(lines):
    """Other lines of a method before those of get_reward."""
    return "def get_reward(", f"{lines}\n\n    def get_reward("


BROKEN |= {
    "reset returns a chat": (
        "self.random, self.guesses = random.Random(secret), []",
        "self.random, self.guesses = random.Random(secret), []\n        return [{'content': 'Go.'}]",
        "reset returned [{'content': 'Go.'}]: return a text, or None",
    ),
    "reply returns a number": (
        *begin_with("def reply(self, text):\n        return len(text)"),
        "reply returned 0: return a text, or None",
    ),
    "reply fails": (
        *begin_with("def reply(self, text):\n        return str(int(text))"),
        "reply('') ends the run: ValueError: invalid literal for int()",
    ),
    "is_over fails": (
        *begin_with("def is_over(self):\n        return self.has_won"),
        "is_over() ends the run: AttributeError: 'Guesses' object has no attribute 'has_won'",
    ),
    "is_over returns nothing": (
        *begin_with("def is_over(self):\n        len(self.guesses) > 3"),
        "is_over() returns nothing",
    ),
}


@pytest.mark.parametrize("old, new, word", BROKEN.values(), ids=BROKEN)
def test_broken_environments(scripts, small, tmp_path, old, new, word):
    flags = guesses(tmp_path)
    path = tmp_path / "guesses.py"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    found = findings(scripts["grpo_tools"], small("grpo_tools", **flags))
    assert any(word in text for text in texts(found)), texts(found)


def test_an_environment_beside_a_recipe(scripts, tmp_path):
    """The recipe's calculator would be one of its tools, and the calculations its tasks."""
    parse_args, environment = scripts["grpo_tools"].parse_args, guesses(tmp_path)["environment"]
    own = ["--environment", environment]
    word = "would get the tools and the data of the recipe tiny"
    for words, is_wrong in ((own, True), ([*own, "--tools", "None"], False), (["guess", *own], False)):
        args = parse_args(words)
        x = check.Inputs(scripts["grpo_tools"], args)
        assert any(word in finding.text for finding in check.environment_faults(x)) == is_wrong


def test_a_column_called_environments(scripts, small, tmp_path):
    """Reward functions get the environments under this name."""
    rows = [dict(prompt=f"Guess {i}.", secret=i, environments="a") for i in range(9)]
    flags = guesses(tmp_path) | dict(dataset_name=write_rows(tmp_path / "data", train=rows, test=rows[:4]))
    found = findings(scripts["grpo_tools"], small("grpo_tools", **flags))
    assert any("a column of the data is called environments" in text for text in texts(found))


def test_a_system_prompt_about_another_tool(scripts, small, tmp_path):
    (tmp_path / "own_tools.py").write_text(GOOD)
    prompt = "Think step by step, and use the calculator."
    args = small(
        "grpo_tools", tools=[f"{tmp_path}/own_tools.py:search"], system_prompt=prompt, max_prompt_length=200
    )
    found = findings(scripts["grpo_tools"], args)
    assert "--system-prompt speaks of the tool calculator, but the tools are search" in texts(found)


CALLS = {  # how a template writes a call -> whether grpo_tools.py finds it
    "hermes": (
        "<tool_call>{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>",
        True,
    ),
    "another tag": (
        "<call>{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</call>",
        False,
    ),
    "another key": (
        "<tool_call>{{ {'name': c.function.name, 'parameters': c.function.arguments} | tojson }}</tool_call>",
        False,
    ),
}


@pytest.mark.parametrize("form, is_found", CALLS.values(), ids=CALLS)
def test_the_format_of_calls(scripts, small, monkeypatch, form, is_found):
    """A policy that was trained on the template's calls would never call a tool."""
    template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}"
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        "{% if m.tool_calls %}{% for c in m.tool_calls %}" + form + "{% endfor %}{% endif %}"
        "{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    module, load = scripts["grpo_tools"], scripts["grpo_tools"].load_tokenizer

    def load_tokenizer(name):
        tokenizer = load(name)
        tokenizer.chat_template = template
        return tokenizer

    monkeypatch.setattr(module, "load_tokenizer", load_tokenizer)
    found = findings(module, small("grpo_tools", max_prompt_length=400, response_length=100))
    errors = [text for text in texts(found) if "writes calls that are not read" in text]
    assert len(errors) == (not is_found), texts(found)
    assert not any("does not show the tools" in text for text in texts(found, "remark"))


WITHOUT = {
    "upper case": ("message['content']", "message['content'] | upper", "changes or drops"),
    "no results": (
        "message['content']",
        "('' if message.role == 'tool' else message['content'])",
        "does not write",
    ),
    "another end": ("'<|im_end|>", "'<|endoftext|>", "must be a stop token"),
}


@pytest.mark.parametrize("old, new, word", WITHOUT.values(), ids=WITHOUT)
def test_turns_that_cannot_be_told_apart(scripts, small, monkeypatch, old, new, word):
    """What was sampled would not be what is trained, or nobody would read the results."""
    module, load = scripts["grpo_tools"], scripts["grpo_tools"].load_tokenizer

    def load_tokenizer(name):
        tokenizer = load(name)
        tokenizer.chat_template = tokenizer.chat_template.replace(old, new)
        return tokenizer

    monkeypatch.setattr(module, "load_tokenizer", load_tokenizer)
    args = small("grpo_tools", stop_token_id=[5] if word == "must be a stop token" else None)
    found = findings(module, args)
    assert any(word in text for text in texts(found)), texts(found)


def test_all_forms_of_a_reference():
    """A number, a text, or the last message of a chat."""
    chat = [dict(role="assistant", content="Yes.")]
    for row, reference in ((dict(answer=5), "5"), (dict(completion=chat), "Yes."), (dict(text="a"), None)):
        assert check.reference_of(row) == reference


def test_a_judge_without_references(scripts, small, tmp_path):
    """The only prompts with one are too long, so that they are not used."""
    rows = [dict(prompt=f"Post {i}.", completion="") for i in range(12)]
    long = dict(prompt="long " * 300, completion="A summary.")
    data = write_rows(tmp_path / "data", train=rows, test=[*rows[:4], long])
    judge = small("grpo_math").reward_fn[0]
    found = findings(scripts["rloo_tldr"], small("rloo_tldr", dataset_name=data, judge_fn=judge))
    assert_only(found, "a judge needs references")


PATHS = {  # a system prompt -> True if it is the name of a file
    "prompt.txt": True,
    "prompts/math.jinja": True,
    "SYSTEM": True,  # it is there
    "data": False,  # a folder, and a word
    "Write to notes.txt": False,
    "Answer in one word.": False,
    "Read\nnotes.md": False,
}


@pytest.mark.parametrize("prompt, is_path", PATHS.items(), ids=PATHS)
def test_a_system_prompt_that_is_a_path(look, tmp_path, monkeypatch, prompt, is_path):
    """The policy would read the name of the file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "SYSTEM").write_text("Think.")
    rows = [dict(prompt=[dict(role="user", content=f"{i}?")], answer=str(i)) for i in range(12)]
    found = look(rows, system_prompt=prompt, reward_fn=CORRECT, model_name_or_path=MODEL)
    errors = [text for text in texts(found) if "--system-prompt" in text]
    assert len(errors) == is_path, texts(found)
    assert not is_path or f"--system-prompt {prompt} is the name of a file" in errors[0]
