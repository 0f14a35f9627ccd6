"""Chat templates of several kinds: calls are read back, or check.py refuses the template."""

import importlib.util
import json

import pytest
from conftest import ROOT

SPEC = importlib.util.spec_from_file_location("tool_templates", ROOT / "benchmarks/tool_templates.py")
program = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(program)
HEAD = "{% if tools %}{{ '<|im_start|>system\n' }}{{ tools | tojson }}{{ '<|im_end|>\n' }}{% endif %}"
TAIL = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
JSON = "{{ {'name': f.name, 'arguments': f.arguments} | tojson }}"
HERMES = f"<tool_call>{JSON}</tool_call>"
TAGS = "{% for key, x in f.arguments.items() %}<parameter={{ key }}>{{ x }}</parameter>{% endfor %}"
TAGS = f"<tool_call><function={{{{ f.name }}}}>{TAGS}</function></tool_call>"
READS_TAGS = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>\w+)>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>\w+)>(?P<value>.*?)</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": "<|im_end|>", "content": "text"},
    },
}


def template(call, head=HEAD, thought="", end="<|im_end|>", tail=TAIL):
    """A template of ChatML's kind. call: how it writes the function f; end: of a turn with calls"""
    return (
        head
        + "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        + thought
        + "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{% set f = c.function %}"
        + call
        + "{% endfor %}{% if m.tool_calls %}"
        + end
        + "{% else %}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
        + tail
    )


# In Qwen3's newer models, the header of a turn opens a thought.
THOUGHT = "{% if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}"
OPEN = TAIL.replace("assistant\n", "assistant\n<think>\n")
ARGUMENTS = (
    "{{ '<tool_call>{\"name\": \"' + f.name + '\", \"arguments\": ' + f.arguments + '}</tool_call>' }}"
)
ONLY_USERS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
)
NO_NUMBERS = (
    '{{ \'<tool_call>{"name": "\' + f.name + \'", "arguments": {"thing": "\' + f.arguments.thing + \'"\' }}'
)
NO_NUMBERS += (
    "{% if f.arguments.count is defined %}{{ ', \"count\": ' + f.arguments.count }}{% endif %}}}</tool_call>"
)
WORKS = {
    "only texts as arguments": (template(NO_NUMBERS), None),
    "JSON between tags": (template(HERMES), None),
    "on several lines": (template(f"<tool_call>\n{JSON}\n</tool_call>"), None),
    "a header that opens a thought": (template(HERMES, thought=THOUGHT, tail=OPEN), None),
    "arguments as a JSON text": (template(ARGUMENTS), None),
    "tags, which the model describes": (template(TAGS), READS_TAGS),
    "tags and a thought": (template(TAGS, thought=THOUGHT, tail=OPEN), READS_TAGS),
}
FAULTS = {  # template, response_template, what check.py says
    "another tag": (template(f"<call>{JSON}</call>"), None, "writes calls that are not read: <call>"),
    "tags": (template(TAGS), None, "writes calls that are not read: <tool_call><function=weigh_fruit>"),
    "JSON, and the model describes tags": (template(HERMES), READS_TAGS, "writes calls that are not read"),
    "bare JSON": (
        template(JSON.replace("arguments'", "parameters'", 1)),
        None,
        "writes calls that are not read",
    ),
    "no calls": (template(""), None, "does not write calls"),
    "another end": (template(HERMES, end="<|endoftext|>"), None, "goes on otherwise after a call"),
    "no tools": (template(HERMES, head=""), None, "does not know the tools (weigh_fruit)"),
    "no results": (
        template(HERMES).replace("m.content or ''", "m.content if m.role == 'user' or m.role == 'assistant'"),
        None,
        "does not write the results",
    ),
    "only users": (
        ONLY_USERS + template(HERMES),
        None,
        "cannot write the result of a tool after a turn (no tools)",
    ),
    "upper case": (
        template(HERMES).replace("m.content or ''", "m.content | upper"),
        None,
        "changes or drops",
    ),
}


def faults(text, response_template=None):
    tokenizer = program.tokenizer_with(text)
    tokenizer.response_template = response_template
    return program.faults(tokenizer)


@pytest.mark.parametrize("text, response_template", WORKS.values(), ids=WORKS)
def test_a_template_that_works(text, response_template):
    assert faults(text, response_template) == []


@pytest.mark.parametrize("text, response_template, word", FAULTS.values(), ids=FAULTS)
def test_a_template_that_is_refused(text, response_template, word):
    [finding] = faults(text, response_template)
    assert finding.kind == "error" and word in finding.text


def test_tools_that_fine_tuning_taught():
    """Then a comment of the template names them. It says nothing about how to write a call."""
    text = template("", head="{# The model knows weigh_fruit. #}")
    assert [finding.kind for finding in faults(text)] == ["remark", "remark"]
    [*_, finding] = faults(text.replace("weigh_fruit", "weigh"))
    assert finding.kind == "remark" and "neither shows tools nor writes calls" in finding.text
    assert any(finding.kind == "error" for finding in faults(text.replace("weigh_fruit", "weigh")))
    code = template("", head="{% if messages[0].role == 'weigh_fruit' %}{% endif %}")
    assert any(finding.kind == "error" for finding in faults(code))


def test_the_templates_of_the_tests():
    """Qwen's work, Llama 3's and Gemma's do not. Their control tokens are found."""
    found = {}
    for path in sorted((ROOT / "tests/data/templates").glob("*.jinja")):
        found[path.stem] = any(finding.kind == "error" for finding in faults(path.read_text()))
    assert found == dict(gemma=True, llama3=True, qwen2_5=False, qwen3=False)


def test_the_table_of_the_page():
    """Works or refused, none in between."""
    assert program.table() in (ROOT / "docs/grpo_tools.md").read_text()
    rows = json.loads(program.RESULT.read_text())["templates"]
    assert len(rows) > 50
    for row in rows:
        works = program.verdict(row).startswith("works")
        assert works == ([] in (row["alone"], row.get("with response_template"))), row
