"""Calls of tools and environments, and rewards of trajectories: what check.py sees by trying them."""

import copy
import sys
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from check_helpers import assert_only, findings, texts
from conftest import ROOT
from run_tools import guesses, spy, write_rows
from test_tool_templates import HERMES, READS_TAGS, TAGS, program, template

import check
import grpo_tools

pytest_plugins = ["run_fixtures"]
CALCULATOR = dict(tools=[f"{ROOT}/data/tools.py:calculator"])
DOC = '"""Compute.\n\n    Args:\n        expression: numbers\n    """'


@pytest.fixture
def look(scripts, small, tmp_path):
    """look(**flags) -> findings about a run of grpo_tools.py, from main() or from the command line"""

    def make(is_quick=True, **flags):
        return findings(scripts["grpo_tools"], small("grpo_tools", **flags), is_quick)

    return make


@pytest.fixture
def tool(tmp_path):
    """tool(body, head) -> flags of a run with this calculator"""

    def make(body, head="", **flags):
        (tmp_path / "own_tool.py").write_text(
            f"{head}\n\n\ndef calculator(expression: str) -> str:\n    {DOC}\n    {body}\n"
        )
        return dict(tools=[f"{tmp_path}/own_tool.py:calculator"]) | flags

    return make


# ---- Imports -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds, count", [(0, 3), (1.1, 0)])
def test_a_file_that_loads_something_large_is_not_imported_again(look, tool, monkeypatch, seconds, count):
    """Do results show what trajectories share? If it takes no second, the file is imported afresh."""
    imported = spy(monkeypatch, check, "answers_of_first")
    head = f"import time\n\ntime.sleep({seconds})\nnotes = []"
    found = look(**tool("notes.append(expression)\n    return str(notes)", head))
    assert len(imported) == count
    assert len(texts(found)) == (count > 0)


def test_a_file_in_a_folder_that_python_knows(look, tool, tmp_path, monkeypatch):
    """As next to the script: it is forgotten too, so that a run starts with a fresh one."""
    monkeypatch.syspath_prepend(tmp_path)
    found = look(**tool("notes.append(expression)\n    return str(notes)", "notes = []"))
    assert_only(found, "changes notes of all trajectories")
    assert "own_tool" not in sys.modules


COUNTED = """
import time


def note(name):
    with open({log!r}, "a") as file:
        file.write(name + "\\n")


note("import")


class Talk:
    def __init__(self):
        note("constructor")

    def reset(self, secret, **columns):
        note("reset")

    def guess(self, number: int) -> str:
        '''Guess the number.

        Args:
            number: the guess
        '''
        note("guess")
        time.sleep({seconds})
        return "no"

    def reply(self, text):
        note(f"reply {{text!r}}")
        return "go on"

    def is_over(self):
        note("is_over")
        return False

    def get_reward(self):
        return 0.0

    def close(self):
        note("close")
"""


@pytest.fixture
def counted(look, tmp_path):
    """counted(seconds) -> how often check.py calls what of an environment whose calls take so long"""

    def count(seconds):
        (tmp_path / "talk.py").write_text(COUNTED.format(log=f"{tmp_path}/log", seconds=seconds))
        flags = guesses(tmp_path) | dict(
            environment=f"{tmp_path}/talk.py:Talk", system_prompt="You can guess."
        )
        assert texts(look(**flags)) == []
        time.sleep(3 * seconds)
        return Counter((tmp_path / "log").read_text().splitlines())

    return count


def test_how_often_an_environment_is_called(counted):
    """A call may cost something: a simulated user behind an API, a container for each object."""
    counts = counted(0)
    assert counts["import"] == 2
    assert counts["reset"] == 62 + 2  # rows, and more (docs/grpo_tools.md, Before a run)
    assert counts["guess"] == 6
    assert counts["reply ''"] == 1 and sum(name.startswith("reply") for name in counts) == 1
    assert counts["is_over"] == 2
    assert counts["constructor"] == counts["reset"] == counts["close"]


def test_a_call_that_takes_too_long_is_the_last(counted, monkeypatch):
    monkeypatch.setattr(check, "QUICK_SECONDS", 0.2)
    assert counted(0.5)["guess"] == 1


# ---- Rewards -----------------------------------------------------------------------------------------------

REWARDS = """
import re


def answer_in(text):
    found = re.search("<answer>(.*?)</answer>", text)
    return found and found[1]


def first(completions, answer, **columns):
    return [float(answer_in(c[0]["content"]) == a) for c, a in zip(completions, answer)]


def last(completions, answer, **columns):
    return [float(answer_in(c[-1]["content"]) == a) for c, a in zip(completions, answer)]


def anywhere(completions, answer, **columns):
    return [float(a in " ".join(m["content"] for m in c)) for c, a in zip(completions, answer)]


def grounded(completions, answer, **columns):
    right = last(completions, answer)
    return [x * (len(c) == 1 or a in c[-2]["content"]) for x, c, a in zip(right, completions, answer)]


def after_a_call(completions, answer, **columns):
    return [x * (len(c) > 1) for x, c in zip(last(completions, answer), completions)]
"""


@pytest.mark.parametrize("name", ["first", "last", "anywhere", "grounded", "after_a_call"])
def test_a_reward_that_reads_the_first_message(look, tmp_path, name):
    """After a call, completion[0] is the call: whoever uses the tool would earn nothing."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    rows = [dict(prompt=f"How much is {i} + 3?", answer=str(i + 3)) for i in range(20, 32)]
    data = write_rows(tmp_path / "data", train=rows, test=rows[:4])
    found = look(dataset_name=data, reward_fn=[f"{tmp_path}/rewards.py:{name}"])
    if name == "first":
        assert_only(found, "first ignores the last message", "completion[-1]")
    else:
        assert texts(found) == []


# ---- Threads -----------------------------------------------------------------------------------------------

RUN = """
def run(code):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code)
    return out.getvalue()
"""
CHILD = """
def child():
    signal.alarm(5)
    os.chdir("/")
"""
OF_THE_PROCESS = {  # head, body, what is said
    "in a helper": (
        f"import contextlib, io\n{RUN}",
        "return run(expression)",
        "own_tool.py, line 4, calls redirect_stdout()",
    ),
    "another name": (
        "from contextlib import redirect_stdout as to",
        "with to(None):\n        return expression",
        "calls redirect_stdout()",
    ),
    "a folder": ("import os", "os.chdir('.')\n    return '1'", "calls os.chdir()"),
    "a signal in a helper": (
        "import signal\n\ndef limit():\n    signal.signal(signal.SIGALRM, print)\n",
        "limit()\n    return '1'",
        "tool calculator does not work in a thread, where tools run: ValueError: signal only works in main",
    ),
    "in a process": (
        f"import multiprocessing, os, signal\n{CHILD}",
        "multiprocessing.Process(target=child)\n    return '1'",
        None,
    ),
    "a text": ("import os", "return 'os.chdir()'  # not os.chdir('.')", None),
}


@pytest.mark.parametrize("head, body, word", OF_THE_PROCESS.values(), ids=OF_THE_PROCESS)
def test_what_holds_for_all_threads(look, tool, head, body, word):
    """What one trajectory prints would be in the result of another, or its files in another folder."""
    found = look(**tool(body, head))
    if word is None:
        assert texts(found) == []
    else:
        assert_only(found, word)


def test_one_thread_may_change_the_process(look, tool):
    head = f"import contextlib, io\n{RUN}"
    assert texts(look(**tool("return run('print(1)')", head, tool_workers=1))) == []


def test_a_method_that_changes_the_process(look, tmp_path):
    flags = guesses(tmp_path)
    path = tmp_path / "guesses.py"
    text = path.read_text().replace("def get_reward(self):", "def get_reward(self):\n        os.chdir('.')")
    path.write_text(f"import os\n{text}")
    assert_only(look(**flags), "guesses.py, line 20, calls os.chdir()")


BOUND = {  # head, body, whether it works otherwise in another thread
    "a connection": (
        "import sqlite3\n\ndata = sqlite3.connect(':memory:')",
        "return str(data.execute('select 1').fetchall())",
        True,
    ),
    "a connection for each call": (
        "import sqlite3",
        "return str(sqlite3.connect(':memory:').execute('select 1').fetchall())",
        False,
    ),
    "the clock": ("import time", "return str(time.time() // 0.1)", False),
    "random numbers": ("import random", "return str(random.random())", False),
    "a random counter": (
        "import random\n\nrandoms = []",
        "randoms.append(random.random())\n    return str(randoms)",
        False,
    ),
    "no result": ("", "raise ValueError(expression)", False),
}


@pytest.mark.parametrize("head, body, is_bound", BOUND.values(), ids=BOUND)
def test_what_counts_in_the_thread_of_the_import(look, tool, head, body, is_bound):
    found = look(**tool(body, head))
    if is_bound:
        assert_only(found, "tool calculator does not work in a thread, where tools run: ProgrammingError")
    else:
        assert texts(found) == []


# ---- Results -----------------------------------------------------------------------------------------------

RESULTS = {  # body, what is said
    "map": ("return map(str, [1, 2])", "returns an object of type map; the policy would read <map object at"),
    "object": ("return object()", "returns an object of type object"),
    "objects": ("return [object()]", "returns an object of type list"),
    "bytes": ("return expression.encode()", "the policy would read b'1': return a text"),
    "generator": ("yield '72'", "returns an object of type generator"),
    "number": ("return 42", None),
    "list": ("return [expression, 'a <b at 0x1>']", None),
    "text about an object": ("return str(object())", None),
    "exit": ("raise SystemExit(1)", None),
    "attribute of what was not found": ("return __import__('re').match('x', expression).group()", None),
    "wrong name": ("return expresion", "all 3 calls of calculator with made-up arguments fail: NameError"),
}


@pytest.mark.parametrize("body, word", RESULTS.values(), ids=RESULTS)
def test_what_no_policy_can_read(look, tool, body, word):
    found = look(**tool(body))
    if word is None:
        assert texts(found) == []
    else:
        assert_only(found, word)


def test_a_long_result(look, tool):
    found = look(is_quick=False, **tool("return 'word ' * 999", max_tool_tokens=9))
    assert texts(found) == []
    assert any(
        "of which the policy would read the first --max-tool-tokens 9" in text
        for text in texts(found, "remark")
    )


@pytest.mark.parametrize("max_tool_tokens", [9, 4])
def test_a_beginning_that_is_cut(look, tmp_path, max_tool_tokens):
    """The policy would begin a task that it knows only in part."""
    (tmp_path / "shelf.py").write_text(SHELF.format(head="", reset="return '12345'", body="return name"))
    flags = guesses(tmp_path) | dict(environment=f"{tmp_path}/shelf.py:Shelf", system_prompt="You can put.")
    found = look(**flags, max_tool_tokens=max_tool_tokens)
    if max_tool_tokens == 4:
        assert_only(found, "reset returns 5 tokens", "--max-tool-tokens 4")
    else:
        assert texts(found) == []


# ---- State -------------------------------------------------------------------------------------------------

SHELF = """
{head}


class Shelf:
    def reset(self, secret, others=[], **columns):
        self.own = []
        self.score = 0
        {reset}

    def get_reward(self):
        return float(self.score)

    def put(self, name: str) -> str:
        \'\'\'Put something on the shelf.

        Args:
            name: what
        \'\'\'
        {body}
"""
NOTES = {  # head, body, kind
    "notes": ("notes = []", "notes.append(expression)\n    return str(notes)", "error"),
    "a count": ("count = [0]", "count[0] += 1\n    return expression", "remark"),
    "a cache": ("cache = {}", "return cache.setdefault(expression, expression)", None),
    "a table": ("table = list(range(9))", "return str(table)", None),
}


@pytest.mark.parametrize("head, body, kind", NOTES.values(), ids=NOTES)
def test_state_that_functions_share(look, tool, head, body, kind):
    """A function has no trajectory of its own: its notes are read in all others."""
    found = look(is_quick=False, **tool(body, head))
    about = [(one.kind, one.text) for one in found if "of all trajectories" in one.text]
    assert [name for name, _ in about] == ([] if kind is None else [kind])
    assert kind == "error" or texts(found) == []


METHODS = {  # more of the class, what is said
    "is_over": ("def is_over(self):\n        return len(self.own) > 2", None),
    "a text": (
        "def is_over(self):\n        return str(len(self.own) > 2)",
        "is_over returned 'True': return True or False",
    ),
    "a method": ("def is_over(self):\n        return self.get_reward", "is_over returned <bound method"),
    "no return": ("def is_over(self):\n        len(self.own) > 2", "is_over() returns nothing"),
    "a generator": ("def is_over(self):\n        yield False", "is_over returned <generator object"),
    "a printed reply": ("def reply(self, text):\n        print(text)", "reply() returns nothing"),
    "an empty method": ("def is_over(self):\n        pass", None),
    "close": ("def close(self):\n        self.own.clear()", None),
}


@pytest.mark.parametrize("more, word", METHODS.values(), ids=METHODS)
def test_what_methods_return(look, tmp_path, more, word):
    """Each game would end after a turn, or never."""
    text = SHELF.format(head="", reset="pass", body="self.own.append(name)\n        return name")
    (tmp_path / "shelf.py").write_text(f"{text}\n    {more}\n")
    flags = guesses(tmp_path) | dict(environment=f"{tmp_path}/shelf.py:Shelf", system_prompt="You can put.")
    found = look(**flags)
    if word is None:
        assert texts(found) == []
    else:
        assert_only(found, word)


BEGINNINGS = {
    "a text": ("return 'go on'", None),
    "nothing": ("return", None),
    "a pair": ("return 'go on', {}", "reset returned ('go on', {}): return a text, or None"),
    "a number": ("return 0", "reset returned 0: return a text, or None"),
}


@pytest.mark.parametrize("reset, word", BEGINNINGS.values(), ids=BEGINNINGS)
def test_what_reset_returns(look, tmp_path, reset, word):
    (tmp_path / "shelf.py").write_text(SHELF.format(head="", reset=reset, body="return name"))
    flags = guesses(tmp_path) | dict(environment=f"{tmp_path}/shelf.py:Shelf", system_prompt="You can put.")
    found = look(**flags)
    if word is None:
        assert texts(found) == []
    else:
        assert_only(found, word)


STATES = {  # head, reset, body, kind, what is said
    "own": ("", "pass", "self.own.append(name)\n        return str(self.own)", None, None),
    "a default": (
        "",
        "self.own = others",
        "self.own.append(name)\n        return 'done'",
        "error",
        "changes own of all trajectories: it is one object",
    ),
    "of the module": (
        "board = []",
        "board.clear()",
        "board.append(name)\n        return str(board)",
        "error",
        "changes board of all trajectories: it belongs to the module",
    ),
    "in the reward": (
        "count = 0",
        "pass",
        "global count\n        count += 1\n        self.score = count\n        return 'done'",
        "error",
        "changes count of all",
    ),
    "a count that nobody sees": (
        "count = 0",
        "pass",
        "global count\n        count += 1\n        return 'done'",
        "remark",
        "changes count of all",
    ),
    "loaded once": (
        "index = None",
        "global index\n        index = index or [1]",
        "return str(index)",
        None,
        None,
    ),
    "a cache": ("cache = {}", "self.cache = cache", "return cache.setdefault(name, name)", None, None),
    "random numbers": ("import random", "pass", "return str(random.Random().random())", None, None),
}


@pytest.mark.parametrize("head, reset, body, kind, word", STATES.values(), ids=STATES)
def test_state_that_objects_share(look, tmp_path, head, reset, body, kind, word):
    """The k trajectories of a task would play one game."""
    (tmp_path / "shelf.py").write_text(SHELF.format(head=head, reset=reset, body=body))
    flags = guesses(tmp_path) | dict(environment=f"{tmp_path}/shelf.py:Shelf")
    flags["system_prompt"] = "You can put."
    found = look(is_quick=False, **flags)
    about = [(one.kind, one.text) for one in found if "of all trajectories" in one.text]
    assert [name for name, _ in about] == ([] if kind is None else [kind])
    assert word is None or word in about[0][1]
    assert kind == "error" or texts(found) == []


# ---- Templates ---------------------------------------------------------------------------------------------

ONE_RESULT = "{% if m.role == 'tool' and messages[loop.index0 - 1].role == 'tool' %}{% else %}"
LOOP = "{% for m in messages %}"
RAISES = "{% if m.role == 'tool' and messages[loop.index0 - 1].role == 'tool' %}"
RAISES += "{{ raise_exception('roles must alternate') }}{% endif %}"
TEMPLATES = {  # text before a message, after it, what is said
    "all": ("", "", None),
    "one result": (ONE_RESULT, "{% endif %}", "writes only one of the results of two calls in one turn"),
    "alternate": (RAISES, "", "cannot write the results of two calls in one turn (roles must alternate)"),
    "the name": ("{{ m.name }}", "", "writes name of a result, which this script does not give it"),
    "the id": ("{{ m.tool_call_id }}", "", "writes tool_call_id of a result"),
}


@pytest.mark.parametrize("before, after, word", TEMPLATES.values(), ids=TEMPLATES)
def test_results_of_two_calls(before, after, word):
    text = template(HERMES)
    assert text.count(LOOP) == 1 and text.count("{% endfor %}{% if add_generation") == 1
    text = text.replace(LOOP, LOOP + before)
    text = text.replace("{% endfor %}{% if add_generation", after + "{% endfor %}{% if add_generation")
    found = [finding.text for finding in program.faults(program.tokenizer_with(text))]
    assert len(found) == (word is not None), found
    assert word is None or word in found[0]


AS_JSON = TAGS.replace("{{ x }}", "{{ x if x is string else x | tojson }}")
NESTED = {
    "JSON": (HERMES, None, True),
    "Python": (TAGS, READS_TAGS, False),
    "JSON in tags": (AS_JSON, READS_TAGS, True),
}


@pytest.mark.parametrize("kind", ["array", "object", "number"])
@pytest.mark.parametrize("call, response_template, is_right", NESTED.values(), ids=NESTED)
def test_lists_and_dicts_as_arguments(call, response_template, is_right, kind):
    """A tool that takes a list would get a text. It matters only if there is such a tool."""
    tokenizer = program.tokenizer_with(template(call))
    tokenizer.response_template = response_template
    schema = copy.deepcopy(check.PROBE_SCHEMA)
    schema["function"]["parameters"]["properties"]["many"] = {"type": kind, "description": "many"}
    x = SimpleNamespace(kind="tools", script=grpo_tools, tokenizer=tokenizer, stop_ids=set())
    x.tools = None, [schema]
    turn_format = grpo_tools.TurnFormat(tokenizer, torch.tensor([0]), [check.PROBE_SCHEMA])
    found = [finding.text for finding in check.call_faults(x, turn_format)]
    if is_right or kind == "number":
        assert found == []
    else:
        assert len(found) == 1 and f"an argument of the type {kind}: the chat template writes" in found[0]


@pytest.mark.parametrize("end, is_wrong", [("<|im_end|>", False), ("<|endoftext|>", True)])
def test_the_end_of_a_turn_before_a_reply(look, scripts, tmp_path, monkeypatch, end, is_wrong):
    """The end that the policy wrote is left out of what follows it."""
    load = scripts["grpo_tools"].load_tokenizer

    def load_tokenizer(name):
        tokenizer = load(name)
        is_followed = "message.role == 'assistant' and loop.nextitem and loop.nextitem.role == 'user'"
        new = f"('{end}' if {is_followed} else '<|im_end|>') + '\n'"
        tokenizer.chat_template = tokenizer.chat_template.replace(r"'<|im_end|>\n'", new)
        assert end in tokenizer.chat_template
        return tokenizer

    monkeypatch.setattr(scripts["grpo_tools"], "load_tokenizer", load_tokenizer)
    flags = guesses(tmp_path)
    path = tmp_path / "guesses.py"
    path.write_text(f"{path.read_text()}\n    def reply(self, text):\n        return 'go on'\n")
    word = "before what reply returns"
    assert any(word in text for text in texts(look(**flags))) == is_wrong
    path.write_text(path.read_text().replace("def reply(", "def _reply("))
    assert not any(word in text for text in texts(look(**flags)))
