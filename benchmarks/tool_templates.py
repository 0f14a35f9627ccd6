"""Which chat templates work with grpo_tools.py: what check.py says of each file in a folder of templates.

    pip download --no-deps trl==1.16.0 && unzip -q trl-*.whl -d trl
    python benchmarks/tool_templates.py trl/trl/chat_templates     # writes results/tool_templates.json
    python benchmarks/tool_templates.py                            # prints the table of docs/grpo_tools.md

A template works if the prompt shows the tools, a call with a text and a number that the template writes is read
back, and what follows it is what the script appends. Otherwise, check.py refuses it. The tokenizer is that of
checkpoints/arithmetic-sft, which has all bytes, plus the template's control tokens. If the folder is TRL's, each
template is tried again with the response_template that TRL has for it.
"""

import argparse
import importlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import check  # noqa: E402
import grpo_tools  # noqa: E402

RESULT = ROOT / "results/tool_templates.json"
CONTROL = r"<[|｜][^<>'\"{}\s]+[|｜]>|<\|?/?[a-z_]+\|?>|\[/?[A-Z_]+\]"
NOT_CONTROL = r"</?(tool|function|param|think|arg|example|IMPORTANT)"  # plain text, or not special


def tokenizer_with(template):
    """A tokenizer with this template and the control tokens in it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "checkpoints/arithmetic-sft")
    tokens = sorted({token for token in re.findall(CONTROL, template) if not re.match(NOT_CONTROL, token)})
    tokenizer.add_special_tokens({"bos_token": "<bos>", "eos_token": "<eos>"})
    tokenizer.add_special_tokens({"extra_special_tokens": tokens}, replace_extra_special_tokens=False)
    tokenizer.chat_template = template
    return tokenizer


def faults(tokenizer):
    """What check.py says of a template: list of Finding."""
    x = SimpleNamespace(kind="tools", script=grpo_tools, tokenizer=tokenizer, stop_ids=set(), train=[])
    x.sample, x.tools, x.flag = list, (None, [check.PROBE_SCHEMA]), lambda name: None
    return [*check.check_known_tools(x), *check.check_tool_format(x)]


def response_template(tokenizer, utils):
    """What TRL says about how to read the turns of this template, or None."""
    try:
        return utils.add_response_schema(tokenizer).response_template
    except ValueError:  # TRL does not know it
        return None


def row_of(path, utils):
    tokenizer = tokenizer_with(path.read_text())
    row = {"template": path.stem}
    row["alone"] = [finding.text for finding in faults(tokenizer)]
    if utils is not None and response_template(tokenizer, utils) is not None:
        row["with response_template"] = [finding.text for finding in faults(tokenizer)]
    return row


def measure(folder):
    utils = None
    if (folder.parent / "chat_template_utils.py").exists():
        sys.path.insert(0, str(folder.parent.parent))
        utils = importlib.import_module("trl.chat_template_utils")
    rows = [row_of(path, utils) for path in sorted(folder.glob("*.jinja"))]
    versions = {"transformers": transformers.__version__}
    if utils is not None:
        versions["trl"] = sys.modules["trl"].__version__
    RESULT.write_text(json.dumps({"versions": versions, "templates": rows}, indent=1) + "\n")
    return rows


REASONS = {  # what check.py says -> what the table says
    "the policy does not know the tools": "the prompt does not show the tools",
    "the chat template cannot write the result": "a tool's result cannot follow a turn",
    "the chat template does not write the results": "a tool's result cannot follow a turn",
    "the chat template does not write calls": "it shows tools, but writes no calls",
    "the chat template goes on otherwise": "what follows a call is not what follows an answer",
    "the chat template writes calls that are not read": "calls in a format that nothing describes",
    "the chat template cannot write the results of two": "the results of two calls cannot follow a turn",
    "the chat template writes": "it needs more of a result than its text, or leaves out one of two",
}


def verdict(row):
    """Whether a template works, or why it is refused."""
    if not row["alone"]:
        return "works"
    if row.get("with response_template") == []:
        return "works with TRL's `response_template`, refused without it"
    first = row.get("with response_template", row["alone"])[0]
    return "refused: " + next(reason for start, reason in REASONS.items() if first.startswith(start))


def table():
    """The templates of models, without TRL's variants for training, as a markdown table."""
    groups = {}
    for row in json.loads(RESULT.read_text())["templates"]:
        if not row["template"].endswith("_training"):
            groups.setdefault(verdict(row), []).append(row["template"])
    lines = ["| result | templates |", "|---|---|"]
    for result, names in sorted(groups.items(), key=lambda group: (group[0] != "works", -len(group[1]))):
        lines.append(f"| {result} | {', '.join(names)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?")
    folder = parser.parse_args().folder
    if folder is not None:
        measure(folder)
    print(table())
