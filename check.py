"""Look before you run: what is wrong with a run's data, tokenizer, chat template, rewards, tools and flags.

    python check.py rloo_tldr.py                                # the default; nothing is trained
    python check.py sft.py qwen-0.5b-chat --dataset-name mine   # a script and its own command line

It imports the script, parses the flags with the script's own parse_args, loads data and tokenizer with the
script's own functions, and looks at what can be known before training. No weights are loaded: of models, it
reads config.json. It prints what it sees in the order of the pipeline, then its findings:

    error    the run would be wrong, or would stop: exit code 1
    remark   worth knowing: exit code 0

If check.py is next to a script, the script's main calls errors(script, args) before it loads a model, and
stops if there are any. A script without check.py only lacks that. What the scripts check themselves is what
cannot be seen before the run: docs/check.md.

The file is a list of small functions (CHECKS). Each looks at one thing and yields findings. `x` is always the
Inputs: the script, its flags and, loaded once, its data, tokenizer and configs.
"""

import ast
import contextlib
import copy
import csv
import datetime
import gzip
import importlib
import importlib.util
import inspect
import io
import itertools
import json
import logging
import math
import os
import random
import re
import reprlib
import statistics
import string
import sys
import tempfile
import textwrap
import threading
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from unittest import mock

import accelerate
import torch
import transformers
from jinja2 import TemplateError
from rich.console import Console
from rich.table import Table
from rich.text import Text
from safetensors import safe_open

GB = 1e9
QUICK_ROWS, MOST_ROWS = 200, 3_000  # rows that are tokenized: by errors(), and on the command line
QUICK_SECONDS, MOST_SECONDS = 2.0, 20.0  # for calls of the reward functions
MESSAGE_COLUMNS = ("messages", "prompt", "completion", "chosen", "rejected", "responses")
REFERENCE_COLUMNS = ("answer", "completion", "solution", "reference", "ground_truth", "target")
REFERENCE_FORMS = ("{}", "<answer>{}</answer>", "\\boxed{{{}}}", "#### {}")  # of a right answer
PROBES = (  # responses of many kinds, for functions that may read the form of a response only
    "A short text.",
    "<answer>7</answer>",
    '# Title\n\n- It IS 1 + 1 = 2, damn!\n```python\nprint(7)\n```\n\u4f60\u597d {"answer": 7} http://a.b\n\n'
    * 40,
)
OWN_NAMES = ("prompts", "completions", "completion_ids", "trainer_state", "environments")  # of reward inputs


# ---- Findings ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """One line for the user. kind: error, remark, or not checked"""

    kind: str
    text: str


def error(text):
    return Finding("error", text)


def remark(text):
    return Finding("remark", text)


class Fault(Exception):
    """What was to be checked cannot even be loaded, and that is the user's to fix: an error."""


class NotChecked(Exception):
    """Something that a check needs is missing here, such as a connection to the Hub: no finding."""


# ---- Inputs ------------------------------------------------------------------------------------------------


def once(make):
    """A method whose result, or exception, is computed the first time and kept."""

    @wraps(make)
    def kept(x, *inputs):
        key = make, inputs
        if key not in x.results:
            try:
                with quiet():
                    x.results[key] = make(x, *inputs), None
            except (Exception, x.script.UserError) as problem:
                x.results[key] = None, problem
        value, problem = x.results[key]
        if problem is not None:
            raise problem
        return value

    return kept


class Inputs:
    """A script, its flags, and what they name, loaded once and only if a check asks for it."""

    def __init__(self, script, args, is_quick=False):
        self.script, self.args, self.is_quick = script, args, is_quick
        self.kind = kind_of(script)
        self.is_rl = self.kind in ("ppo_sentiment", "ppo_dialog", "rloo", "grpo", "tools")
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.results = {}
        self.files_read = {}  # data set -> dict: file -> its rows
        self.other_splits = {}  # data set of load_dataset -> dict: split -> number of rows
        self.readers = {}  # data set here that load_dataset reads as json or csv -> "json" or "csv"
        self.places = {}  # id of a row -> where it is, for messages
        self.not_taken = []  # what main drops of the recipe, for another --dataset-name

    def flag(self, name):
        """The value of a flag; None if the script has no such flag."""
        return getattr(self.args, name, None)

    def was_changed(self, name):
        """True if somebody gave a flag: it has neither the recipe's value nor the default."""
        starts = self.script.RECIPES.get(self.args.recipe), self.script.Args()
        return all(getattr(start, name, None) != self.flag(name) for start in starts if start is not None)

    # Models and tokenizers

    @property
    def tokenizer_name(self):
        return self.args.model_name_or_path or self.flag("sft_model_path")

    @property
    def policy_name(self):
        return self.flag("sft_model_path") or self.args.model_name_or_path

    def path(self, name):
        """The folder that a name means, or the name itself, which is then the Hub's."""
        return str(self.script.resolve_path(name))

    def load(self, name, what, function, *inputs):
        """function(path of name, *inputs). If it fails, a local folder is at fault; the Hub may be away."""
        path = self.path(name)
        try:
            return function(path, *inputs)
        except self.script.UserError:
            raise
        except Exception as problem:
            line = (str(problem).strip() or type(problem).__name__).splitlines()[0][:200]
            if Path(path).exists():
                raise Fault(f"{name}: {what} cannot be loaded ({line})") from problem
            raise NotChecked(f"{what} of {name}, which cannot be loaded here ({line})") from problem

    @property
    @once
    def tokenizer(self):
        """The script's tokenizer, with --chat-template-kwargs."""
        tokenizer = self.tokenizer_of(self.tokenizer_name)
        if self.flag("chat_template_kwargs") and hasattr(self.script, "set_template_options"):
            self.script.set_template_options(tokenizer, self.args)
        return tokenizer

    @once
    def tokenizer_of(self, name):
        return self.load(name, "the tokenizer", lambda path: self.script.load_tokenizer(name))

    @once
    def config_of(self, name):
        """The config of a model; that of its base model if the folder holds an adapter."""
        adapter = adapter_in(self, name)
        if adapter is None:
            return self.load(name, "config.json", transformers.AutoConfig.from_pretrained)
        if adapter_in(self, adapter["base_model_name_or_path"]) is not None:
            return self.config_of(adapter["base_model_name_or_path"])
        load = partial(transformers.AutoConfig.from_pretrained, revision=adapter.get("revision"))
        return self.load(adapter["base_model_name_or_path"], "config.json", load)

    @property
    def config(self):
        return self.model.config

    @property
    @once
    def model(self):
        """The policy without weights: names, shapes and config only."""
        with torch.device("meta"):
            if self.flag("from_config"):
                return self.script.model_from_config(self.args.from_config, self.tokenizer)
            config = self.config_of(self.policy_name)
            if self.kind == "reward_model":
                return transformers.AutoModelForSequenceClassification.from_config(config)
            model = transformers.AutoModelForCausalLM.from_config(config)
        saved = Path(self.path(self.policy_name), "generation_config.json")
        if saved.exists() or not Path(self.path(self.policy_name)).exists():
            with contextlib.suppress(Exception):  # a model need not have one
                path = self.path(self.policy_name)
                model.generation_config = transformers.GenerationConfig.from_pretrained(path)
        return model

    @property
    @once
    def stop_ids(self):
        """The tokens that end a response, as the script finds them. -> set of int"""
        if self.flag("stop_token_id"):
            return {*self.args.stop_token_id}
        if hasattr(self.script, "find_stop_tokens"):
            return {*self.script.find_stop_tokens(self.args, self.tokenizer, self.model).tolist()} - {-1}
        if hasattr(self.script, "end_tokens"):
            return {*self.script.end_tokens(self.model, self.tokenizer).tolist()}
        return {self.tokenizer.eos_token_id} - {None}

    # Data

    @property
    def data_sets(self):
        """The data sets that the flags name. -> dict: flag -> name"""
        names = ("dataset_name", "eval_dataset_name", "hard_dataset_name", "center_dataset_name")
        return {flag: self.flag(flag) for flag in names if self.flag(flag)}

    @once
    def splits(self, name):
        """-> training rows, held-out rows of a data set, as the script loads them"""
        script, files = self.script, {}

        def read_rows(path, *rest):
            files[Path(path)] = rows = real_read_rows(path, *rest)
            return [*rows]  # load_splits may sort it; ours stays in the order of the file

        def load_dataset(*inputs, **options):
            loaded = real_load_dataset(*inputs, **options)
            self.other_splits[name] = {split: len(rows) for split, rows in loaded.items()}
            readers = {rows.info.builder_name for rows in loaded.values()}
            if Path(inputs[0]).exists() and readers & {"json", "csv"}:
                self.readers[name] = ", ".join(readers)
            return loaded

        real_read_rows = getattr(script, "read_rows", None)
        real_load_dataset = script.datasets.load_dataset
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, script.datasets, "load_dataset", real_load_dataset)
            script.datasets.load_dataset = load_dataset
            if real_read_rows is not None:
                stack.callback(setattr, script, "read_rows", real_read_rows)
                script.read_rows = read_rows
            train, held_out = self.load(name, "the data", lambda path: script.load_splits(name))
        self.files_read[name] = files
        for split, rows in (("training", train), ("held-out", held_out)):
            self.places |= {id(row): f"{split} row {i}" for i, row in enumerate(rows, 1)}
        for file, rows in files.items():
            self.places |= {id(row): f"{file.name} row {i}" for i, row in enumerate(rows, 1)}
        return train, held_out

    @property
    @once
    def train(self):
        rows, _ = self.splits(self.args.dataset_name)
        if self.flag("num_train_rows"):  # the rows that the scripts draw
            drawn = random.Random(0).sample(rows, min(self.args.num_train_rows, len(rows)))
            drawn = {*map(id, drawn)}
            rows = [row for row in rows if id(row) in drawn]  # in the order of the file
        return rows

    @property
    def held_out(self):
        return self.splits(self.args.dataset_name)[1]

    @property
    def harder(self):
        """The held-out rows of --hard-dataset-name, which grpo_math.py solves too."""
        return self.splits(self.args.hard_dataset_name)[1] if self.flag("hard_dataset_name") else []

    @property
    def rows(self):
        return self.train + self.held_out

    @property
    @once
    def columns(self):
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def place(self, row):
        """Where a row is, for messages: "train.jsonl row 17"."""
        return self.places.get(id(row), "a row")

    def sample(self, rows):
        """All rows, or some of them at even distances and the longest ones, if there are many."""
        most = QUICK_ROWS if self.is_quick else MOST_ROWS
        if len(rows) <= most:
            return rows
        longest = sorted(range(len(rows)), key=lambda i: -size_of(rows[i]))[:20]
        numbers = {i * len(rows) // most for i in range(most)} | {*longest}
        return [rows[i] for i in sorted(numbers)]

    def rows_of(self, split):
        return {"train": self.train, "held-out": self.held_out, "harder": self.harder}[split]

    @once
    def examples(self, split):
        """What the script makes of the rows of a split (of some, if there are many). -> list of Example"""
        rows = self.rows_of(split)
        sample = self.sample(rows)
        examples = self.examples_of(sample)
        if any(example.is_kept for example in examples) or len(sample) == len(rows):
            return examples
        return self.examples_of(rows)  # none of the sample is used: look at all

    def examples_of(self, rows):
        """If the script cannot read a row, its run would stop there: that is a fault of the row."""
        try:
            return list(EXAMPLES[self.kind](self, rows))
        except (Fault, NotChecked, self.script.UserError):
            raise
        except Exception as problem:
            assert self.tokenizer is not None
            failures = [(row, why) for row in rows if (why := self.failure_with(row)) is not None]
            # Where all rows fail, it may be this file that does not know the script; templates say why.
            if not failures or len(failures) == len(rows) and not isinstance(problem, TemplateError):
                raise
            row, why = failures[0]
            text = f"{len(failures)} of {len(rows)} rows cannot be read, beginning with {self.place(row)}"
            raise Fault(f"{text}: {type(why).__name__}: {short(str(why), 150)}") from problem

    def failure_with(self, row):
        try:
            list(EXAMPLES[self.kind](self, [row]))
        except Exception as problem:
            return problem
        return None

    # Rewards and tools

    @property
    @once
    def tools(self):
        """-> start_tools, schemas, as in grpo_tools.py"""
        start = time.time()
        with own_modules():
            found = self.script.load_tools(self.args)
        self.is_light = time.time() - start < 1  # else the files of the tools are not imported again
        return found

    @property
    @once
    def num_rows(self):
        """What an epoch of training goes through: the rows (turns of a dialog, packed rows) that are used.

        If not all rows were looked at, it is an estimate.
        """
        examples, rows = self.examples("train"), self.train
        num_used = sum(example.is_kept for example in examples)
        if self.kind == "sft" and self.args.packing:
            documents = [(example.ids, example.labels) for example in examples if example.is_kept]
            num_used = len(self.script.pack(documents, self.args.max_length, True))
        if self.flag("train_shard"):
            rows = self.script.select_shard(rows, self.args.train_shard)
        if self.kind == "reward_model" and {"dialog", "act"} <= {*self.columns}:
            rows = self.script.load_answers(rows)
        return round(num_used * len(rows) / max(1, len({id(example.row) for example in examples})))

    @property
    def num_updates(self):
        args = self.args
        if self.is_rl:
            return math.ceil(args.total_episodes / self.batch)
        return max(1, round(args.num_train_epochs * self.num_rows / self.batch))

    @property
    def batch(self):
        """Episodes, pairs or rows per update, in all processes."""
        args = self.args
        local = args.per_device_train_batch_size * args.gradient_accumulation_steps
        return local * (self.flag("num_mini_batches") or 1) * self.world

    @property
    def group(self):
        """Responses to each prompt."""
        return self.flag("rloo_k") or self.flag("num_generations") or 1


def kind_of(script):
    """What a script trains, by its functions, so that a renamed copy is known too."""
    marks = {
        "TurnFormat": "tools",
        "grpo_advantages": "grpo",
        "rloo_advantages": "rloo",
        "make_document": "sft",
        "load_preference_rows": "reward_model",
        "dpo_loss": "dpo",
        "score_reference": "ppo_dialog",
        "gae": "ppo_sentiment",
    }
    for name, kind in marks.items():
        if hasattr(script, name) and hasattr(script, "parse_args"):  # ppo_minimal.py has no flags
            return kind
    raise NotChecked(f"{script.__name__}: check.py knows only the eight scripts and copies of them")


@contextlib.contextmanager
def quiet():
    """Without what the script prints while it loads something, and without starting its processes.

    accelerate.PartialState() joins the other processes of a run, with default settings. That is for the
    script to do, so functions of the script get a process that is alone.
    """
    alone = type("Alone", (), dict(print=lambda *inputs, **options: None, is_main_process=True))
    alone.device, alone.num_processes, alone.process_index = torch.device("cpu"), 1, 0
    real, accelerate.PartialState = accelerate.PartialState, alone
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        accelerate.PartialState = real
        transformers.logging.set_verbosity(verbosity)


@contextlib.contextmanager
def own_modules():
    """Import files of the user here, and forget them afterwards, so that a run starts with fresh ones."""
    modules, path = dict(sys.modules), list(sys.path)
    try:
        yield
    finally:
        folders = {Path(folder).resolve() for folder in Counter(sys.path) - Counter(path)}
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if name not in modules and file and Path(file).resolve().parent in folders:
                del sys.modules[name]
        sys.path[:] = path


def size_of(row):
    """About how long a row is, in characters."""
    return sum(len(str(value)) for value in row.values())


def is_blank(value):
    return value is None or value == [] or isinstance(value, str) and not value.strip()


def is_messages(value):
    return isinstance(value, list) and len(value) > 0 and all(isinstance(item, dict) for item in value)


def short(value, length=60):
    """A value on one line, cut to a length."""
    text = " ".join(value.split()) if isinstance(value, str) else repr(value)
    return text if len(text) <= length else text[: length - 3] + "..."


def plain(number):
    """A number with two digits or more, never 2.1e+02."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def flag_name(name):
    return f"--{name.replace('_', '-')}"


def listed(names, most=8):
    """Names for a sentence."""
    names = [str(name) for name in names]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def special_ids(tokenizer):
    """The ids of all control tokens, with and without a role. -> set"""
    added = tokenizer.added_tokens_decoder.items()
    return {*tokenizer.all_special_ids, *(i for i, token in added if token.special)}


# ---- Examples: what each script makes of its rows ----------------------------------------------------------


@dataclass
class Example:
    """A row as the script uses it. ids is empty, and reason is not, if the script leaves the row out."""

    row: dict
    ids: list  # tokens of the prompt, or of the whole text
    answer: list  # tokens that are learned or compared after it; [] in RL
    labels: list | None = None  # sft: -100 where nothing is learned
    prompt: object = None  # str or list of messages
    other: list | None = None  # the rejected response
    reason: str = ""  # why the row is left out
    note: str = ""  # of what is used in part only

    @property
    def is_kept(self):
        return not self.reason


@once
def dpo_posts(x):
    """What dpo_tldr.py responds to, with the reference: of --eval-dataset-name, or the held-out pairs."""
    if x.kind != "dpo":
        return []
    if x.args.eval_dataset_name is None:
        return [example for example in x.examples("held-out") if example.is_kept]
    complete = [row for row in x.splits(x.args.eval_dataset_name)[1] if has_completion(row)]
    for rows in (x.sample(complete), complete):  # all, if none of the sample is short enough
        pairs = [x.script.tokenize_pair(x.tokenizer, *pair) for pair in x.script.read_completions(rows)]
        posts = [Example(row, pair["ids"], pair["responses"][0]) for row, pair in zip(rows, pairs)]
        posts = [post for post in posts if len(post.ids) + len(post.answer) <= x.args.max_length]
        if posts:
            break
    return posts


def has_completion(row):
    return not is_blank(row.get("prompt")) and not is_blank(row.get("completion"))


def document_examples(x, rows):
    for row in rows:
        counts = Counter()
        ids, labels = x.script.make_document(row, x.tokenizer, x.args, counts)
        kept = [-100, *labels[1 : x.args.max_length]]
        reason = note = ""
        if not ids:
            reason = "no text in text, prompt and completion, messages or dialog"
        elif set(labels[1:]) <= {-100} and (chat := whole_chat(row)):
            why = f"the roles are {listed(dict.fromkeys(message.get('role') for message in chat))}"
            if begins_with_answer(chat):
                why = "the chat begins with an assistant message, which answers nothing"
            reason = f"no message of the role assistant is learned: {why}"
        elif set(kept) == {-100}:
            reason = f"nothing to learn in the first {x.args.max_length} tokens (--max-length)"
        elif len(ids) > x.args.max_length:
            note = f"cut to --max-length {x.args.max_length}, without its end"
        prompt = row.get("messages") or row.get("prompt")
        yield Example(row, ids[: x.args.max_length], [], kept, prompt, None, reason, note)


def whole_chat(row):
    """The messages that sft.py learns from; None if the row is no chat."""
    if is_messages(row.get("messages")):
        return row["messages"]
    if is_messages(row.get("completion")):
        return (row["prompt"] if is_messages(row.get("prompt")) else []) + row["completion"]
    return None


def begins_with_answer(chat):
    return bool(chat) and chat[0].get("role") == "assistant"


def preference_examples(x, rows):
    complete = {id(row): (prompt, responses) for row, prompt, responses in x.script.read_preferences(rows)}
    for row in rows:
        if id(row) not in complete:
            yield Example(row, [], [], reason="fewer than two responses, or empty ones")
            continue
        prompt, responses = complete[id(row)]
        limit, reason, note = x.args.max_length, "", ""
        if x.kind == "dpo":
            pair = x.script.tokenize_pair(x.tokenizer, prompt, [responses[0], responses[-1]])
            ids, texts = pair["ids"], pair["responses"]
            if not ids:
                reason = "the prompt is empty, and the responses have no common beginning"
            elif len(ids) + max(map(len, texts)) > limit:
                reason = f"more than --max-length {limit} tokens"
        else:
            texts = x.script.preference_ids(x.tokenizer, prompt, responses, limit)
            if max(map(len, texts)) == limit:
                note = f"cut to --max-length {limit}, without the beginning of the prompt"
                note += ", through headers of the chat" if is_messages(responses[0]) else ""
            length = len(os.path.commonprefix(texts))
            ids, texts = texts[0][:length], [text[length:] for text in texts]
        if texts[0] == texts[-1]:
            reason = "the responses are equal"
        yield Example(row, ids, texts[0], prompt=prompt, other=texts[-1], reason=reason, note=note)


def reward_model_examples(x, rows):
    if {"dialog", "act"} <= {*x.columns}:
        rows = x.sample(x.script.load_answers(rows))
    elif not {"text", "label"} <= {*x.columns}:
        yield from preference_examples(x, rows)
        return
    limit = dict(truncation=True, max_length=x.args.max_length)
    for row in rows:
        if is_blank(row.get("text")):
            yield Example(row, [], [], reason="no text")
            continue
        ids = x.tokenizer(row["text"], **limit).input_ids
        note = f"at the limit of --max-length {x.args.max_length}" if len(ids) == x.args.max_length else ""
        yield Example(row, ids, [], prompt=row["text"], note=note)


def review_examples(x, rows):
    args = x.args
    for row in rows:
        text = row.get("text")
        ids = x.tokenizer(text).input_ids if isinstance(text, str) and text else []
        reason = ""
        if is_blank(text):
            reason = "no text"
        elif len(text) <= (args.min_text_length or 0):
            reason = f"not more than --min-text-length {args.min_text_length} characters"
        elif len(ids) < args.query_min_length:
            reason = f"fewer than --query-min-length {args.query_min_length} tokens"
        yield Example(row, ids[: args.query_max_length], [], prompt=text, reason=reason)


def dialog_examples(x, rows):
    known = {id(row) for row, _, _ in x.script.load_dialogs(rows)}
    for row in rows:
        turns = x.script.load_prompts([row], x.tokenizer, x.args)
        if id(row) not in known:
            yield Example(row, [], [], reason="fewer than two utterances in dialog, or a blank one")
        elif not turns:
            yield Example(row, [], [], reason="no act for each utterance")
        for turn in turns:
            note = "prompt cut to --max-prompt-length" if turn.is_cut else ""
            yield Example(
                row, list(turn.prompt_tokens), list(turn.reference_tokens), prompt=turn.context, note=note
            )


def prompt_examples(x, rows):
    """The prompts of rloo_tldr.py, grpo_math.py and grpo_tools.py."""
    limit = x.args.max_prompt_length
    schemas = x.tools[1:] if x.kind == "tools" else ()  # in grpo_tools.py, the prompts describe the tools
    for row in rows:
        prompt = prompt_of(x, row)
        if is_blank(prompt):
            yield Example(row, [], [], reason="no prompt, or a part of it is missing")
            continue
        ids = x.script.tokenize_prompt(x.tokenizer, prompt, *schemas)
        reason = f"more than --max-prompt-length {limit} tokens" if len(ids) > limit else ""
        yield Example(row, list(ids), [], prompt=prompt, reason=reason)


def prompt_of(x, row):
    """The prompt that a row gives, a text or a list of messages; None if there is none."""
    if x.kind == "tools" and row.get("prompt") and not is_messages(row["prompt"]):
        row["prompt"] = [{"role": "user", "content": row["prompt"]}]  # as the script's load_prompts
    if hasattr(x.script, "task_prompt"):
        return x.script.task_prompt(row, x.tokenizer, x.args)
    return row.get("prompt")


EXAMPLES = {
    "sft": document_examples,
    "reward_model": reward_model_examples,
    "dpo": preference_examples,
    "ppo_sentiment": review_examples,
    "ppo_dialog": dialog_examples,
    "rloo": prompt_examples,
    "grpo": prompt_examples,
    "tools": prompt_examples,
}


# ---- Flags -------------------------------------------------------------------------------------------------

# Numbers of all scripts that cannot be 0.
POSITIVE = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "num_mini_batches", "num_ppo_epochs"),
    *("total_episodes", "num_train_epochs", "num_train_rows", "num_eval_prompts", "num_eval_pairs"),
    *("num_eval_samples", "num_context_utterances", "max_length", "query_min_length", "response_min_length"),
    *("response_length", "temperature", "max_grad_norm", "score_clip", "kl_target", "kl_horizon", "beta"),
    *("max_turns", "max_tool_tokens", "tool_workers", "tool_timeout", "lora_alpha", "max_prompt_length"),
    *("learning_rate", "local_rollout_forward_batch_size", "cliprange", "cliprange_value"),
)

# Texts for which "" means something, or is looked at by another check.
MAY_BE_EMPTY = ("system_prompt", "prompt_template", "chat_template_kwargs", "utterance_end")


def check_python(x):
    """Without assert, nothing notices that sampling and update differ."""
    if not __debug__ or os.environ.get("PYTHONOPTIMIZE", "") not in ("", "0"):
        yield error("python -O and PYTHONOPTIMIZE remove the scripts' checks (assert): run without them")


def check_numbers(x):
    """Numbers that make no sense: a run would train on nothing, or backwards, without a word."""
    for name, value in vars(x.args).items():
        is_empty = value == "" or isinstance(value, list) and "" in value  # a shell variable that is not set?
        if is_empty and name not in (*MAY_BE_EMPTY, *FUNCTION_FLAGS):
            yield error(f"{flag_name(name)} is empty: leave the flag out, or give it a value")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        default = getattr(x.script.Args(), name, None)
        may_be_negative = name.endswith("_weight") or isinstance(default, (int, float)) and default < 0
        if math.isnan(value) or value < 0 and not may_be_negative or value == 0 and name in POSITIVE:
            yield error(f"{flag_name(name)} cannot be {value}")
    for name in ("warmup_ratio", "gamma", "lam"):
        if (x.flag(name) or 0) > 1:
            yield error(f"{flag_name(name)} is a fraction: {x.flag(name)} is more than 1")
    if not 0 <= (x.flag("label_smoothing") or 0) < 0.5:
        yield error("--label-smoothing must be less than 0.5: at 0.5, both responses count alike")


def check_pairs_of_flags(x):
    """Flags that contradict each other."""
    args = x.args
    for low, high in (("query_min_length", "query_max_length"), ("response_min_length", "response_length")):
        if (x.flag(low) or 0) > (x.flag(high) or math.inf):
            yield error(f"{flag_name(low)} {x.flag(low)} is larger than {flag_name(high)} {x.flag(high)}")
    never_stops = hasattr(args, "stop_token") and args.stop_token is None and not args.stop_token_id
    if x.flag("missing_eos_penalty") is not None and never_stops:
        yield error("--missing-eos-penalty without a stop token would penalize all responses alike")
    if x.kind == "tools" and never_stops:
        yield error("--stop-token None: a turn must be able to end, so that tools can answer")
    if x.flag("kl_target") is not None and x.batch >= 5 * args.kl_horizon:
        yield error(
            f"--kl-horizon {args.kl_horizon:g} must be more than 1/5 of the batch, {x.batch}: the KL "
            "coefficient would become negative"
        )
    minibatch = args.per_device_train_batch_size * args.gradient_accumulation_steps
    for name in ("rloo_k", "num_generations"):
        group = x.flag(name)
        if group is not None and (group < 2 or minibatch % group):
            yield error(
                f"{flag_name(name)} {group} must be 2 or more, and divide the minibatch of a process: "
                f"per_device_train_batch_size x gradient_accumulation_steps = {minibatch}"
            )
    num_shared = x.flag("num_shared_layers") or 0
    if num_shared and (args.lora_r or args.load_in_8bit):
        yield error("--num-shared-layers cannot be combined with --lora-r or --load-in-8bit")
    has_frozen = args.lora_r or x.is_rl and (x.kind not in ("grpo", "tools") or args.kl_coef != 0)
    if x.flag("load_in_8bit") and not has_frozen:
        yield error(
            "--load-in-8bit: no weights are frozen, so none can be in 8 bit: add --lora-r 16"
            + (", or --kl-coef for a reference" if x.is_rl else "")
        )
    if x.flag("from_config") and args.lora_r:
        yield error("--lora-r: an adapter needs a trained model, so give --model-name-or-path")
    if x.flag("judge_url") is not None and x.flag("judge_model") is None:
        yield error("--judge-url needs --judge-model: the name of the model on that server")
    if x.kind == "rloo" and x.policy_name is None:
        yield error("--model-name-or-path or --sft-model-path must name the policy")


def check_reward_weights(x):
    """One weight for each function; with an environment, one more for its get_reward()."""
    weights = x.flag("reward_weights")
    names = list(x.flag("reward_fn") or [])
    if x.kind != "tools" and x.flag("reward_fn") == []:
        yield error("--reward-fn names no function")
    if x.kind == "tools" and x.args.environment and hasattr(environment_class(x), "get_reward"):
        if any(name.endswith(":environment") for name in names):
            yield error(
                "--reward-fn: rename the function environment: get_reward() of the environment has that name"
            )
        names.append("get_reward()")
    if weights is None:
        return
    if not any(weights):
        yield error("--reward-weights: all are 0, so no response would be better than another")
    if not names and x.kind != "ppo_dialog":
        names = ["the reward model"]
    if len(weights) != len(names):
        yield error(f"--reward-weights: {len(weights)} numbers for {len(names)} rewards ({listed(names)})")


def check_flags_without_effect(x):
    """Flags that were given and change nothing, so that the run looks as if they did. Also a penalty for
    responses without EOS, if some have too little room for one.
    """
    args = x.args
    no_effect = {
        "lora_alpha": not args.lora_r and "without --lora-r",
        "lora_target_modules": not args.lora_r and "without --lora-r",
        "kl_horizon": x.flag("kl_target") is None and "without --kl-target",
        "kl_target": x.flag("kl_coef") == 0 and "with --kl-coef 0, which stays 0",
        "stop_token": bool(x.flag("stop_token_id")) and "with --stop-token-id, which replaces it",
        "dtype": bool(x.flag("bf16")) and "with --bf16, which wins",
        "adam_eps": "Adam" not in args.optimizer and f"with --optimizer {args.optimizer}",
        "keep_checkpoints": args.save_every == 0 and "with --save-every 0, unless a signal stops the run",
        "utterance_end": x.kind == "sft" and "dialog" not in x.columns and "without a column dialog",
        "completion_only_loss": "completion" not in x.columns and "without a column completion",
        "kl_estimator": x.flag("kl_coef") == 0 and "with --kl-coef 0",
        "missing_eos_penalty": x.flag("missing_eos_penalty") == 0 and "if it is 0: None is no penalty",
    }
    if x.kind == "ppo_sentiment" and x.flag("reward_fn") and x.flag("judge_model_path") is None:
        no_effect["reward_label"] = "with --reward-fn, unless there is a judge"
    if x.kind in ("ppo_sentiment", "rloo") and x.flag("reward_fn"):
        no_effect["reward_model_path"] = "with --reward-fn, which replaces it"
    if x.kind in ("grpo", "tools"):
        steps = args.num_ppo_epochs * args.num_mini_batches
        no_effect["cliprange"] = steps == 1 and "with one optimizer step per batch: every ratio is 1"
        no_effect["prompt_template"] = "prompt" in x.columns and "beside the data's column prompt"
    for name, why in no_effect.items():
        if why and x.was_changed(name) and x.flag(name) is not None:
            yield remark(f"{flag_name(name)} has no effect {why}")
    if x.flag("vf_coef") == 0:
        yield remark("--vf-coef 0: the critic is not trained, so its values do not become baselines")
    if x.flag("max_turns") == 1 and x.args.tools:
        yield remark("--max-turns 1: a call of a tool ends its trajectory, and nobody reads the result")
    shortest = x.flag("response_min_length")
    if x.flag("missing_eos_penalty") is not None and shortest and shortest < args.response_length:
        yield remark(
            f"--missing-eos-penalty with --response-min-length {shortest}: responses with a low limit have "
            f"less room to end, so set it to --response-length {args.response_length}"
        )


def check_packages(x):
    """What the flags need, and is not installed: the run would stop after the models are loaded."""
    args = x.args
    module, _, name = args.optimizer.rpartition(".")
    needed = {
        "--lora-r": args.lora_r and "peft",
        "--load-in-8bit": x.flag("load_in_8bit") and "bitsandbytes",
        f"--log-with {args.log_with}": args.log_with != "none" and args.log_with,
        "--judge-url": x.flag("judge_url") and "openai",
        f"--optimizer {args.optimizer}": module.split(".")[0],
    }
    for flag, package in needed.items():
        if package and importlib.util.find_spec(package) is None:
            yield error(f"{flag} needs the package {package!r}: pip install {package}")
    if not module:
        yield error(f"--optimizer {args.optimizer}: name its module too, such as torch.optim.AdamW")
    elif module.startswith("torch.") and not hasattr(importlib.import_module(module), name):
        yield error(f"--optimizer {args.optimizer}: {module} has no {name}")


# ---- Paths -------------------------------------------------------------------------------------------------

MODEL_FLAGS = (
    *("model_name_or_path", "sft_model_path", "reward_model_path", "value_model_path"),
    *("judge_model_path", "judge_model"),
)
FUNCTION_FLAGS = ("reward_fn", "judge_fn", "tools", "environment")


def functions_of(x, flag):
    """The names FILE.py:function of a flag. -> list"""
    value = x.flag(flag)
    return [value] if isinstance(value, str) else list(value or [])


def models_of(x):
    """The models of the flags, but for what --judge-url and --reward-fn replace. -> dict: flag -> name"""
    models = {flag: x.flag(flag) for flag in MODEL_FLAGS if x.flag(flag)}
    if x.flag("judge_url") is not None:
        models.pop("judge_model", None)  # the name of a model on a server
    if x.kind in ("ppo_sentiment", "rloo") and x.flag("reward_fn"):
        models.pop("reward_model_path", None)
    return models


def check_paths(x):
    """A folder that does not exist would be looked for on the Hub, whose error is about the connection."""
    for flag, name in (models_of(x) | x.data_sets).items():
        if str(name).startswith(("/", ".", "checkpoints/", "data/", "runs/")) and not find_path(x, name):
            yield error(f"{flag_name(flag)} {name}: no such file or folder")
    for flag in FUNCTION_FLAGS:
        for name in functions_of(x, flag):
            path, _, function = name.rpartition(":")
            file = find_path(x, path)
            if not path:
                yield error(f"{flag_name(flag)} {name}: name a function as FILE.py:function")
            elif file is None:
                yield error(f"{flag_name(flag)} {path}: no such file or folder")
            elif not re.search(rf"\b{re.escape(function)}\b", file.read_text()):
                names = re.findall(r"^(?:def|class) (\w+)", file.read_text(), re.MULTILINE)
                yield error(f"{flag_name(flag)} {name}: {path} has no {function}, but {listed(names)}")


def find_path(x, name):
    """A file or folder here, or next to the script; None if there is none."""
    here = Path(x.script.__file__).resolve().parent
    return next((path for path in (Path(name), here / name) if path.exists()), None)


def check_functions(x):
    """Two functions of one name, or a file with the name of a module that is imported: the wrong one runs."""
    for flag in ("reward_fn", "judge_fn"):
        counts = Counter(name.rpartition(":")[2] for name in functions_of(x, flag))
        for function, count in counts.items():
            if count > 1:
                yield error(f"{flag_name(flag)}: there is another function {function}; names must differ")
    paths = {}
    for flag in FUNCTION_FLAGS:
        for name in functions_of(x, flag):
            path = find_path(x, name.rpartition(":")[0])
            if path is None or path.suffix != ".py":
                continue
            module = sys.modules.get(path.stem)
            known = paths.setdefault(path.stem, Path(getattr(module, "__file__", None) or path))
            if known.resolve() != path.resolve():
                yield error(f"{flag_name(flag)} {name}: there is another module {path.stem}; rename the file")


def adapter_in(x, name):
    """The config of the LoRA adapter in a folder; None if there is none. -> dict or None"""
    file = Path(x.path(name), "adapter_config.json")
    return json.loads(file.read_text()) if file.exists() else None


def check_adapters(x):
    """The scripts merge a policy's adapter into its base model. Others are not models."""
    for flag, name in models_of(x).items():
        adapter, folder = adapter_in(x, name), Path(x.path(name))
        if adapter is None:
            continue
        weights = [*folder.glob("model*.safetensors"), *folder.glob("pytorch_model*.bin")]
        kind = "SequenceClassification" if adapter.get("task_type") == "SEQ_CLS" else "CausalLM"
        is_policy = flag in ("model_name_or_path", "sft_model_path") and x.kind != "reward_model"
        if weights:
            yield error(
                f"{flag_name(flag)} {name} holds a model and an adapter, which would be loaded instead, with "
                f"its own base model: remove adapter_config.json, or {weights[0].name}"
            )
        elif not adapter.get("base_model_name_or_path"):
            yield error(f"{flag_name(flag)} {name}: adapter_config.json does not name its base model")
        elif not is_policy or kind != "CausalLM" or x.flag("load_in_8bit"):
            yield error(
                f'{flag_name(flag)} {name} is a LoRA adapter without its model. Merge it: python -c "'
                f"import peft; peft.AutoPeftModelFor{kind}.from_pretrained('{name}').merge_and_unload()"
                f".save_pretrained('{name}-merged')\", and copy the tokenizer's files"
            )
        elif name == x.policy_name and adapter.get("peft_type") == "LORA":
            yield from lost_layers(x, flag, name)


def lost_layers(x, flag, name):
    """Layers of an adapter that its base model lacks, and the reverse: peft warns, and adds nothing there."""
    folder = Path(x.path(name))
    if not (folder / "adapter_model.safetensors").exists():
        return
    import peft

    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        saved = {key.rpartition(".lora_")[0] for key in file.keys() if ".lora_" in key}
    with torch.device("meta"), warnings.catch_warnings(action="ignore"):
        model = peft.get_peft_model(copy.deepcopy(x.model), peft.PeftConfig.from_pretrained(folder))
    needed = {key.rpartition(".lora_")[0] for key in model.state_dict() if ".lora_" in key}
    lost = sorted(saved ^ needed)
    if lost:
        yield error(
            f"{flag_name(flag)} {name}: the weights of the adapter do not fit the layers of its base model, "
            f"such as {lost[0]}: perhaps they were saved from a wrapped or compiled model, or in part"
        )


# ---- Data: files -------------------------------------------------------------------------------------------

DATA_FILE = (  # a name in three parts, such as train, -00000-of-00002-a09b74b3ef9c3b56 and .jsonl.gz
    r"(?P<stem>.*?)"
    r"((^|-)(part|shard|chunk)?[-_]?(?P<number>\d+)((?P<of>-of-(?P<count>\d+))(-\w+)?)?)?"
    r"\.(?P<type>(json|jsonl|csv|tsv)(\.(gz|zst|xz|bz2|zip|part))?|parquet|arrow)"
)
ABOUT_DATA = ("dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json")  # of datasets
SPLIT_NAMES = {
    "train": r"train(ing|_sft|_prefs|_gen)?",
    "held-out": r"(test|dev|valid|val|validation|eval|heldout|held[-_]out)(_sft|_prefs|_gen)?",
}


@dataclass
class DataFile:
    """A file that may hold rows, by its name. train-0-of-2.jsonl is one of the series train-*-of-2.jsonl."""

    path: Path
    type: str  # jsonl, csv.gz and so on
    stem: str  # the name without number and type; that of the folder if nothing is left
    series: str
    number: int | None
    count: int  # what -of- says, or 0
    split: str | None  # "train" or "held-out"; below the data set's folder, also by the name of its own


def data_files(path):
    """The file of a data set, or those in its folder, with subfolders data, train and so on.

    Other folders are data sets of their own. -> list of DataFile, empty for a data set of the Hub
    """
    if path is None:
        return []
    paths = [path]
    if path.is_dir():
        inner = [folder for folder in path.glob("*/") if folder.name == "data" or split_of(folder.name)]
        paths = [*path.iterdir(), *(file for folder in inner for file in folder.rglob("*"))]
    files = []
    for file in sorted(paths):
        match = re.fullmatch(DATA_FILE, file.name, re.IGNORECASE)
        if match and file.name not in ABOUT_DATA:
            stem = match["stem"] or file.parent.name
            series = f"{stem}{'-*' if match['number'] else ''}{match['of'] or ''}.{match['type']}"
            number = int(match["number"]) if match["number"] else None
            split = split_of(stem) or (split_of(file.parent.name) if file.parent != path else None)
            files.append(DataFile(file, match["type"], stem, series, number, int(match["count"] or 0), split))
    return files


def split_of(name):
    """The split that a name means: "train", "held-out", or None."""
    names = SPLIT_NAMES.items()
    return next((split for split, pattern in names if re.fullmatch(pattern, name, re.IGNORECASE)), None)


def check_files(x):
    """Lines that are not rows. A comma or a quote too many moves values, or swallows rows, in silence."""
    for name in x.data_sets.values():
        try:
            x.splits(name)
            read = x.files_read[name]
        except Exception:
            read = None
        for file in data_files(find_path(x, name)):
            if file.type == "csv" and (read is None or file.path in read):
                yield from bad_csv_lines(file.path)
            elif file.type in ("jsonl", "jsonl.gz") and read is None:
                yield from bad_json_lines(file.path)


def bad_json_lines(path):
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line) if line.strip() else {}
            except json.JSONDecodeError as problem:
                yield error(f"{path}, line {number} is not JSON: {problem}")
                return
            if not isinstance(row, dict):
                yield error(f"{path}, line {number} is not an object with columns: {short(row)}")
                return


def bad_csv_lines(path):
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = next(reader, [])
            if len({*header}) < len(header):
                yield error(f"{path}, line 1: two columns have one name: {listed(header)}")
                return
            for cells in reader:
                if cells and len(cells) != len(header):
                    count = f"{len(cells)} cells, but the header has {len(header)}"
                    yield error(f"{path}, line {reader.line_num}: {count}. Quote cells that hold commas")
                    return
        except csv.Error as problem:
            yield error(f"{path}, line {reader.line_num}: {problem}")
    if len(header) == 1 and re.search("[;\t]", header[0]):
        yield error(f"{path} has one column, {header[0]!r}: write it with commas between the cells")


def check_splits(x):
    """Which files are read, and which are not: a held-out file with another name would be ignored."""
    for name in x.data_sets.values():
        path = find_path(x, name)
        files = data_files(path)
        if path is not None and path.is_file():
            if files and files[0].count > 1:
                yield remark(f"{name} is one of {files[0].count} parts: name its folder to read all")
            continue
        yield from missing_shards(name, files)
        x.splits(name)
        if x.files_read[name]:
            yield from candidates(name, x.files_read[name], files)
            yield from unread_files(x, name, files)
        else:
            yield from unread_splits(x, name, files)


def missing_shards(name, files):
    """train-00000-of-00002 without its second half; train-0 and train-2 without train-1; a number twice."""
    shards = {}  # of each series, Counter: number -> files that have it
    for file in files:
        if file.number is not None and (file.split or file.count):
            shards.setdefault((file.path.parent, file.series, file.count), Counter())[file.number] += 1
    for (_, series, count), num_files in shards.items():  # they count from 0 or from 1
        numbers = {*num_files}
        first = min(numbers)
        gap = next((i for i in range(first, max(numbers)) if i not in numbers), None)
        twice = next((i for i in sorted(numbers) if num_files[i] > 1), None)
        if twice is not None:
            yield error(f"{name}: {series}: number {twice} is there twice: remove the older files")
        elif count and numbers not in ({*range(count)}, {*range(1, count + 1)}):
            there = len(numbers & {*range(count)})
            yield error(f"{name}: {series}: {there} of {count} parts are there")
        elif not count and first < 2 and gap is not None:
            yield error(f"{name}: {series}: number {gap} is missing")


def candidates(name, rows_of, files):
    """Several files of a split are read. train.jsonl and train.csv may hold the same rows, as may shards.

    rows_of: dict: path of a file that is read -> its rows
    """
    for split in ("train", "validation", "test"):
        of_split = [file for file in files if file.path in rows_of and file.path.name.startswith(split)]
        series = {file.series for file in of_split}
        has_usual_name = any(re.match(rf"{split}(-\*|\.)", one) for one in series)  # not only train-a
        if len(series) > 1 and has_usual_name:
            yield error(
                f"{name}: which file is {split}? {listed(file.path.name for file in of_split)}: keep one of "
                f"them or, if all belong to {split}, name them {split}-0, {split}-1 and so on"
            )
        elif len(of_split) > 1:
            texts = {file.path: {*map(repr, rows_of[file.path])} for file in of_split}
            num_files = Counter(itertools.chain(*texts.values()))  # that hold a row
            for path, rows in texts.items():
                if sum(num_files[row] > 1 for row in rows) > len(rows) / 2:
                    yield error(f"{path} repeats rows of other files of {split}: remove what is there twice")
                    break


def unread_files(x, name, files):
    """Files next to those whose rows are used."""
    used = {id(row) for rows in x.splits(name) for row in rows}
    read = {path for path, rows in x.files_read[name].items() if used & {*map(id, rows)}}
    train = [file.path.name for file in files if file.path in read and file.split == "train"]
    has_held_out = any(file.path in read and file.split == "held-out" for file in files)
    for path, split in [(file.path, file.split) for file in files if file.path not in read]:
        if split == "held-out" and not has_held_out:
            yield error(
                f"{path} is not read, and a random tenth of the training rows is held out instead: rename it "
                "to test.jsonl (or test.csv)"
            )
        elif split == "train":
            why = f"the training rows come from {listed(train)}" if train else "name it train.jsonl"
            yield error(f"{path} is not read: {why}")
        else:
            yield remark(f"{path} is not read")


def unread_splits(x, name, files):
    """What load_dataset makes of a data set of the Hub, or of files with other names."""
    if name in x.readers:
        yield error(
            f'{name} is read by the {x.readers[name]} reader of datasets, which turns "2024-01-15" into a '
            "timestamp, NA into None and 007 into 7: name the files train.jsonl and test.jsonl"
        )
    kinds = sorted({file.type for file in files})
    if len(kinds) > 1:
        yield error(f"{name}: datasets reads files of one kind only, and there are {listed(kinds)}")
    splits = x.other_splits[name]
    for split in SPLIT_NAMES:
        stems = sorted({file.stem for file in files if split_of(file.stem) == split})
        loaded = [known for known in splits if split_of(known) == split]
        if len(loaded) < len(stems) > 1:
            yield error(f"{name}: {listed(stems)} are read as one split: keep the files of one of them")
    unread = [split for split in splits if split not in ("train", "validation", "test")]
    is_tenth_held_out = "train" in splits and not {"validation", "test"} & {*splits}
    for split in unread:
        if is_tenth_held_out and split_of(split) == "held-out":
            yield error(
                f"{name}: the split {split} is not read, and a random tenth of train is held out instead: "
                "save the data with a split test"
            )
    if unread:
        yield remark(f"{name}: these splits are not read: {listed(unread)}")


# ---- Data: rows --------------------------------------------------------------------------------------------


def check_loading(x):
    """What the script's own loaders refuse, with their text."""
    for name in x.data_sets.values():
        x.splits(name)
    if not x.train:
        splits = x.other_splits.get(x.args.dataset_name, {})
        hint = f", but the splits {listed(splits)}: save them as train.jsonl and test.jsonl" if splits else ""
        yield error(f"{x.args.dataset_name}: there are no training rows{hint}")
    if not x.held_out:
        yield error(f"{x.args.dataset_name}: there are no held-out rows")


def check_kept_rows(x):
    """Rows that are left out, with the reason and the first one; an error if none is left."""
    for split in ("train", "held-out", "harder"):
        if not x.rows_of(split):
            continue
        examples = x.examples(split)
        left_out = [example for example in examples if example.reason]
        name = x.args.hard_dataset_name if split == "harder" else x.args.dataset_name
        if examples and len(left_out) == len(examples):
            why = Counter(example.reason for example in left_out).most_common(1)[0][0]
            kind, template = "training" if split == "train" else split, x.flag("prompt_template")
            hint = f"; --prompt-template: {template!r}" if x.kind in ("grpo", "tools") else ""
            if "--max-prompt-length" in why:
                why += f"; the shortest has {min(len(example.ids) for example in examples if example.ids)}"
            yield error(f"{name}: no {kind} row can be used: {why}. Columns: {listed(x.columns)}{hint}")
        for reason in dict.fromkeys(example.reason for example in left_out):
            alike = [example for example in left_out if example.reason == reason]
            count = f"{len(alike)} of {looked_at(x, split, examples)} {split} rows are left out"
            yield remark(f"{count}: {reason}. The first is {x.place(alike[0].row)}")
        for note in dict.fromkeys(example.note for example in examples if example.note):
            alike = [example for example in examples if example.note == note]
            yield remark(f"{len(alike)} of {len(examples)} {split} examples: {note}")


def check_held_out(x):
    """Rows on both sides of the split make an evaluation look too good."""
    if x.is_rl and len(x.held_out) < x.world:
        yield error(f"{x.world} processes need as many held-out prompts; there are {len(x.held_out)}")
    key = next((name for name in ("prompt", "text", "messages") if name in x.columns), None)
    if key is None or x.flag("environment"):  # whose tasks differ in other columns
        key_of, have, what = repr, "are", "rows"
    else:
        key_of, what = lambda row: repr(row.get(key)), f"values in the column {key}"
        have = f"have a value in the column {key} that is"
    train, held_out = {key_of(row) for row in x.train}, [key_of(row) for row in x.held_out]
    both = [row for row in x.held_out if key_of(row) in train]
    if both:
        count = f"{len(both)} of {len(x.held_out)} held-out rows"
        yield remark(f"{count} {have} also in train, such as {x.place(both[0])}")
    if len({*held_out}) < len(held_out):
        yield remark(f"the {len(held_out)} held-out rows contain only {len({*held_out})} different {what}")
    rows = Counter(map(repr, x.train))
    num_seen = sum(repr(row) in rows for row in x.held_out)
    if num_seen and key_of is not repr:  # not only the same prompts
        yield remark(f"{num_seen} of {len(x.held_out)} held-out rows are training rows")
    if len(rows) < len(x.train):
        yield remark(f"{len(x.train) - len(rows)} of {len(x.train)} training rows repeat another one")


def check_amount(x):
    """Less data than a batch, or an epoch that is rounded."""
    batch, is_packed = x.batch // x.group, x.kind == "sft" and x.args.packing
    if 0 < x.num_rows < batch:
        rows = f"packed rows of {x.args.max_length} tokens" if is_packed else "rows"
        yield remark(f"an update takes {batch} {rows}, and there are {x.num_rows}: each comes more than once")
    if x.flag("num_train_epochs") and x.num_rows:
        epochs = x.num_updates * x.batch / x.num_rows
        asked = x.args.num_train_epochs
        if abs(epochs - asked) > 0.1 * asked:
            yield remark(
                f"--num-train-epochs {asked:g} is rounded to whole updates of {x.batch} rows: "
                f"{plain(epochs)} epochs. For more updates, lower the batch"
            )


def check_blank_values(x):
    """Empty texts, and texts of whitespace, which no script uses."""
    used = read_by_script(x)
    for column in x.columns:
        values = [row.get(column) for row in x.rows]
        blank = [row for row, value in zip(x.rows, values) if is_blank(value)]
        if len(blank) == len(x.rows):
            yield remark(f"the column {column} is empty in all rows")
        elif blank and column in used:
            count = f"{len(blank)} of {len(x.rows)} rows have nothing (or only whitespace)"
            yield remark(f"{count} in the column {column}; the first is {x.place(blank[0])}")


def read_by_script(x):
    """The columns that a script reads itself. -> set"""
    if x.kind in ("grpo", "tools"):
        template = string.Formatter().parse(x.flag("prompt_template") or "")
        return {"prompt"} if "prompt" in x.columns else {name for _, name, _, _ in template if name}
    return {
        "sft": {"text", "prompt", "completion", "messages", "dialog"}
        | ({"tools"} if any(map(whole_chat, x.rows)) else set()),
        "reward_model": (
            {"text", "label"}
            if {"text", "label"} <= {*x.columns}
            else {"prompt", "chosen", "rejected", "responses", "margin", "dialog", "act"}
        ),
        "dpo": {"prompt", "chosen", "rejected", "responses"},
        "ppo_sentiment": {"text"},
        "ppo_dialog": {"dialog", "act"},
        "rloo": {"prompt", "completion"},
    }[x.kind]


def check_unread_columns(x):
    """A column that nobody reads: an instruction, a system prompt or a label that does not count."""
    unread = {*x.columns} - read_by_script(x)
    for function in reward_callables(x):
        names = inspect.signature(function).parameters
        named = {name for name, p in names.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        takes_any = any(p.kind == p.VAR_KEYWORD for p in names.values())
        if takes_any and not named - {"self", "prompts", *OWN_NAMES}:
            return  # it may read any column
        unread -= named
    unread = [name for name in x.columns if name in unread]
    if unread:
        yield remark(f"nobody reads these columns of {x.args.dataset_name}: {listed(unread)}")


def check_columns_of_one_row(x):
    """sft.py and preferences: two kinds of columns in one row, of which one would be ignored."""
    if uses_preferences(x):
        both = [
            row for row in x.rows if not is_blank(row.get("chosen")) and not is_blank(row.get("responses"))
        ]
        if both:
            yield remark(f"{len(both)} rows have chosen and responses ({x.place(both[0])}): chosen is read")
    if x.kind == "sft":
        kinds = ("text", "completion", "messages", "dialog")
        for row in x.rows:
            found = [name for name in kinds if not is_blank(row.get(name))]
            if len(found) > 1:
                yield error(
                    f"{x.place(row)} has {' and '.join(found)}: keep one of them, the others are ignored"
                )
                return


# ---- Chats -------------------------------------------------------------------------------------------------

SYNONYMS = {  # roles of other formats, which no template of a Hub model means
    *("gpt", "bot", "model", "ai", "chatgpt", "human", "Human", "User", "Assistant", "System", "USER"),
    *("ASSISTANT", "SYSTEM", "user ", "assistant ", "prompter", "question", "answer"),
}
QUESTION = {"role": "user", "content": "Q"}
MARKER = "c47b1e0f"  # in place of a message, to see whether the template writes it


@once
def chats_of(x):
    """All chats in columns that the script reads. -> list of (row, column, list of messages)"""
    found = []
    for column in MESSAGE_COLUMNS:
        if column not in x.columns or column not in read_by_script(x):
            continue
        for row in x.rows + x.harder:
            value = row.get(column)
            chats = value if column == "responses" and isinstance(value, list) else [value]
            found += [(row, column, chat) for chat in chats if is_messages(chat)]
    return found


def check_chat_texts(x):
    """A chat that was saved as a JSON text would be trained on with its brackets and quotes."""
    pattern = re.compile(r"""\s*\[\s*\{\s*["'](role|content|from|value)["']""")
    for column in sorted(read_by_script(x)):
        for row in x.rows:
            value = row.get(column)
            if isinstance(value, str) and pattern.match(value):
                yield error(
                    f"{x.place(row)}: the chat in the column {column} is a JSON text, not a list of "
                    f"messages: {short(value)}. json.loads or ast.literal_eval turns it into one"
                )
                break


def check_messages(x):
    """Messages whose content is no text, and parts that the template does not read: written as Python prints
    them, or ignored.
    """
    template = str(x.tokenizer.chat_template or "")
    if chats_of(x) and not template:
        row, column, _ = chats_of(x)[0]
        yield error(
            f"{x.place(row)}: the column {column} is a chat, but the tokenizer of {x.tokenizer_name} has no "
            "chat template: use a chat model, or write texts"
        )
        return
    read_keys = {"role", "content", "tool_call_id", *re.findall(r"""[.'"](\w+)""", template)}
    seen = set()
    for row, column, chat in chats_of(x):
        for message in chat:
            others = {key for key, value in message.items() if value not in (None, "", [], {})} - read_keys
            is_call = message.get("content") is None and message.get("tool_calls")
            is_text = isinstance(message.get("content"), str) or is_call and writes_calls_alone(x, message)
            if not is_text:
                problem, fix = "content", "the content of a message must be a text"
            elif others:
                problem = ", ".join(sorted(others))
                fix = f"a message has {problem}, which the chat template does not read: it is ignored"
            else:
                continue
            if problem not in seen:
                seen.add(problem)
                yield error(f"{x.place(row)}, column {column}: {fix}: {short(message, 100)}")


def writes_calls_alone(x, message):
    """True if the template writes a message with calls alike, whether its content is null or empty."""
    null, empty = (rendered(x, {}, [QUESTION, message | {"content": content}]) for content in (None, ""))
    return null is not None and null == empty


def check_roles(x):
    """A role that is not the assistant's is not learned, and a template may write it as any other."""
    known = {"system", "user", "assistant", "tool", "developer", "ipython", "function"}
    seen = {*known}
    for row, column, chat in chats_of(x):
        for role in [message.get("role") for message in chat]:
            if role in seen:
                continue
            seen.add(role)
            text = f"{x.place(row)}, column {column}: a message has the role {role!r}"
            if role is None or role in SYNONYMS or str(role).strip().lower() in known:
                yield error(f"{text}; roles must be system, user, assistant and tool")
            else:
                yield remark(f"{text}: only what the assistant writes is learned")


def check_written_messages(x):
    """Messages that the chat template leaves out: a system prompt that the model never sees, for example."""
    chats = {}  # one for each sequence of roles
    for row, column, chat in chats_of(x):
        if column == "prompt" or not is_messages(row.get("prompt")):  # otherwise, it is only the end of one
            chats.setdefault(roles_of(chat), (f"{x.place(row)}, column {column}: ", row, chat))
    if x.flag("system_prompt"):
        for roles, prompt in prompts_by_roles(x).items():
            chats.setdefault(roles, ("", {}, prompt))
    seen = {"assistant"}
    for roles, (place, row, chat) in [*chats.items()][:20]:
        for i, role in enumerate(roles):
            if role in seen or is_blank(chat[i].get("content")):
                continue
            text = rendered(x, row, [*chat[:i], chat[i] | {"content": MARKER}, *chat[i + 1 :]])
            if text is not None and MARKER not in text:
                seen.add(role)
                yield error(
                    f"{place}the chat template leaves out the message of the role {role}: nobody reads it"
                )


def check_chat_columns(x):
    """Columns that a chat template would need, and that the script does not give it."""
    reported = set()
    for row, _, chat in chats_of(x):
        for column in ("tools", "chat_template_kwargs", "images", "image", "videos", "documents"):
            if is_blank(row.get(column)) or row[column] == {} or column in reported:
                continue
            reported.add(column)
            if column != "tools" or x.kind != "sft":
                yield error(
                    f"{x.place(row)}: the column {column} belongs to the chat, but this script does not give "
                    "it to the chat template"
                )
            elif rendered(x, row, chat) == rendered(x, {}, chat):
                yield error(f"{x.place(row)}: the chat template does not show the column tools")


def rendered(x, row, chat, **options):
    """The text of a chat with the row's tools; None if the chat template cannot write it."""
    schemas = row.get("tools") or None
    try:
        schemas = json.loads(schemas) if isinstance(schemas, str) else schemas
        return x.tokenizer.apply_chat_template(chat, tools=schemas, tokenize=False, **options)
    except Exception:
        return None  # reported for the whole row


def check_calls(x):
    """Calls that the template writes otherwise than the policy should, in the first 100 chats with calls."""
    with_calls = [found for found in chats_of(x) if functions_in(found[2])]
    seen = set()
    for row, column, chat in with_calls[:100]:
        loaded = copy.deepcopy(chat)
        for function in functions_in(loaded):
            if isinstance(function.get("arguments"), str):
                function["arguments"] = json_of(function["arguments"])
        problems = []
        if rendered(x, row, chat) != rendered(x, row, loaded):
            problems.append(
                "the arguments of a call are a JSON text, which the chat template writes in quotes: load it"
            )
        tools = row.get("tools")
        has_null = isinstance(tools, list) and ": null" in json.dumps(tools)
        has_null |= any(
            None in (function.get("arguments") or {}).values() for function in functions_in(loaded)
        )
        if has_null and "jsonl" not in x.place(row):
            problems.append("a call or a tool has null: Arrow fills in what other rows have. Use jsonl files")
        for problem in problems:
            if problem not in seen:
                seen.add(problem)
                yield error(f"{x.place(row)}, column {column}: {problem}")
    for row, _, chat in with_calls if x.kind == "sft" else []:
        told = " ".join(str(message.get("content")) for message in chat if message.get("role") != "assistant")
        names = {str(function.get("name")) for function in functions_in(chat)}
        unknown = sorted(name for name in names if name not in told)
        if unknown and not row.get("tools"):
            yield remark(
                f"{x.place(row)} calls {listed(unknown)}, and has no column tools: its prompt lacks what the "
                "template writes about tools, which a prompt of grpo_tools.py has"
            )
            return


def functions_in(chat):
    """The functions that a chat calls, with their arguments. -> list of dict"""
    calls = [call for message in chat for call in message.get("tool_calls") or []]
    return [call.get("function", call) for call in calls]


def check_begun_answers(x):
    """A prompt that ends with the assistant's words, where the template would close that message."""
    for row, column, chat in chats_of(x):
        if column != "prompt" or chat[-1].get("role") != "assistant":
            continue
        problem = None
        if is_blank(chat[-1].get("content")):
            problem = (
                "the prompt ends with an empty message of the assistant, which some chat templates write "
                "otherwise than the beginning of an answer: remove it"
            )
        elif x.kind in ("dpo", "reward_model", "sft", "tools"):
            problem = "the prompt ends with the assistant: move that message to the response"
        else:
            try:
                x.script.tokenize_prompt(x.tokenizer, chat)
            except Exception as failure:
                problem = f"the chat template cannot go on with a begun answer ({failure})"
        if problem is not None:
            yield error(f"{x.place(row)}: {problem}")
            return


def check_template_options(x):
    """Jinja ignores a variable that the template does not have, and transformers sets some itself. Of several
    templates in a dict, the script would make one text."""
    if not x.flag("chat_template_kwargs"):
        return
    try:
        options = json.loads(x.args.chat_template_kwargs)
    except json.JSONDecodeError as problem:
        yield error(f"--chat-template-kwargs is not JSON ({problem}): {x.args.chat_template_kwargs}")
        return
    tokenizer = x.tokenizer_of(x.tokenizer_name)
    if isinstance(tokenizer.chat_template, dict):
        yield error(f"--chat-template-kwargs: {x.tokenizer_name} has several chat templates; keep one")
        return
    passed = {"messages", "tools", "documents", "add_generation_prompt", *tokenizer.special_tokens_map}
    template = tokenizer.chat_template or ""
    for name in options:
        if name in passed or not re.search(rf"\b{name}\b", template):
            yield error(f"--chat-template-kwargs: the chat template has no option {name}")


def check_date(x):
    """A chat template that writes today's date (Llama 3.1): tomorrow, all prompts differ."""
    if not x.tokenizer.chat_template or not (x.kind in ("grpo", "tools") or chats_of(x)):
        return
    clock = mock.Mock(now=lambda: datetime.datetime(2001, 2, 3))
    with mock.patch.object(transformers.utils.chat_template_utils, "datetime", clock):
        other_day = rendered(x, {}, [QUESTION])
    if other_day != rendered(x, {}, [QUESTION]):
        yield remark(
            "the chat template writes today's date: prompts change from day to day, also in a resumed run. "
            "If the template has an option for it, set it: "
            """--chat-template-kwargs '{"date_string": "26 Jul 2024"}'"""
        )


def check_learned_answers(x):
    """Answers of a chat that are not learned: the template writes them otherwise once something follows."""
    if x.kind != "sft":
        return
    num_answers = num_learned = 0
    first = None
    for example in x.examples("train"):
        messages = example.row.get("messages") or example.row.get("completion")
        if not is_messages(messages) or not example.is_kept or example.note:  # a cut is reported by itself
            continue
        answers = sum(message.get("role") == "assistant" for message in messages)
        learned = sum(
            label != -100 and before == -100 for before, label in zip([-100, *example.labels], example.labels)
        )
        num_answers, num_learned = num_answers + answers, num_learned + min(learned, answers)
        if learned < answers and first is None:
            first = example.row
    if num_learned < num_answers:
        why = "the template writes it otherwise when something follows"
        if begins_with_answer(whole_chat(first)):
            why = "the chat begins with an assistant message, which answers nothing"
        yield remark(
            f"{num_learned} of {num_answers} answers in chats are learned; the first that is not is in "
            f"{x.place(first)}: {why}"
        )


def check_end_of_answers(x):
    """A template without a token that ends an answer, or with more text after it."""
    if not chats_of(x):
        return
    chat = [QUESTION, {"role": "assistant", "content": MARKER}]
    _, _, after = x.tokenizer.apply_chat_template(chat, tokenize=False).partition(MARKER)
    end, special = x.tokenizer(after, add_special_tokens=False).input_ids, special_ids(x.tokenizer)
    places = [place for place, token in enumerate(end) if token in special]
    if not places:
        text = f"with {x.tokenizer.decode(end)!r}, which has no control token" if end else "with nothing"
        yield remark(
            f"the chat template ends an answer {text}; a response ends at {x.tokenizer.eos_token!r} instead, "
            "and only the last answer of a chat teaches this end"
        )
    elif x.kind in ("sft", "dpo") and (after := x.tokenizer.decode(end[places[0] + 1 :]).strip()):
        yield remark(
            f"after {x.tokenizer.decode(end[places[0]])!r}, where a response ends, the chat template writes "
            f"{after!r}: it is learned after the last answer, although no rollout has it"
        )


def check_written_answers(x):
    """Last answers that are empty, or of which the template leaves out a part, such as a thought."""
    chats = [found for found in chats_of(x) if found[1] != "prompt" and roles_of(found[2])[-1] == "assistant"]
    empty, shortened = [], []
    for row, column, chat in chats[:: len(chats) // (QUICK_ROWS if x.is_quick else MOST_ROWS) + 1]:
        content, prompt = chat[-1].get("content"), row.get("prompt")
        if is_blank(content) and not chat[-1].get("tool_calls"):
            empty.append(row)
        if not isinstance(content, str):
            continue  # check_messages says so
        if not has_question(chat):  # which is elsewhere
            chat = [*(prompt if is_messages(prompt) else [QUESTION]), *chat]
        text = rendered(x, row, chat)
        if text is not None and "".join(content.split()) not in "".join(text.split()):
            shortened.append((row, column, content))
    if shortened:
        row, column, content = shortened[0]
        yield error(
            f"the chat template changes {len(shortened)} last answers, or leaves out a part of them; the "
            f"first is in {x.place(row)}, column {column}: {short(content)}"
        )
    if empty:
        yield remark(f"{len(empty)} last answers are empty; the first is in {x.place(empty[0])}")


def check_beginning_of_answers(x):
    """An answer must begin where a prompt ends, or rollouts and answers of the data differ."""
    if not x.tokenizer.chat_template or not (x.kind in ("grpo", "tools") or chats_of(x)):
        return
    prompt = rendered(x, {}, [QUESTION], add_generation_prompt=True)
    text = rendered(x, {}, [QUESTION, {"role": "assistant", "content": MARKER}])
    begin, marker, _ = (text or "").partition(MARKER)
    if prompt is None or not marker:
        return  # check_written_answers says so, or it is reported for the rows
    header = begin.removeprefix(prompt)
    if header != begin and re.search(r"\w", re.sub("</?think>", "", header)):
        # Otherwise, it is the policy's: gpt-oss names its channels itself.
        is_ignored = prompt == rendered(x, {}, [QUESTION])
        fix = ". It belongs in {% if add_generation_prompt %}" if is_ignored else ""
        yield (error if is_ignored and x.kind in ("rloo", "grpo", "tools") else remark)(
            f"after a prompt, the chat template writes {header!r} before an answer: the policy has to write "
            f"that itself, in every response{fix}"
        )
    elif x.kind == "dpo" and not begin.startswith(prompt.rstrip()):
        after = prompt.removeprefix(os.path.commonprefix([prompt, begin]))
        yield error(
            f"the chat template ends a prompt with {after!r}, and writes answers without it: the pairs would "
            "be scored after another prompt than samples are"
        )


def check_control_tokens(x):
    """Text of a user that the tokenizer reads as a control token: it can end or open a turn."""
    tokenizer = x.tokenizer
    tokens = tokenizer.convert_ids_to_tokens(sorted(special_ids(tokenizer)))
    tokens = [token for token in tokens if len(token or "") > 2]
    if not tokens:
        return
    pattern = re.compile("|".join(map(re.escape, tokens)))
    texts = [(row, str(message.get("content"))) for row, _, chat in chats_of(x) for message in chat]
    for column in sorted(read_by_script(x)):
        for row in x.rows + x.harder:
            value = row.get(column)
            for text in value if isinstance(value, list) else [value]:  # responses, utterances
                if isinstance(text, str):
                    texts.append((row, text.strip().removesuffix(tokenizer.eos_token or "")))
    found = [(row, match[0]) for row, text in texts if (match := pattern.search(text))]
    if found:
        row, token = found[0]
        count = len({id(row) for row, _ in found})
        yield remark(
            f"{count} rows hold text that is read as a control token, such as {token!r} in {x.place(row)}"
        )


# ---- Preferences -------------------------------------------------------------------------------------------


def uses_preferences(x):
    return x.kind == "dpo" or x.kind == "reward_model" and {*x.columns} & {"chosen", "responses"}


def check_preferences(x):
    """A prompt that is read twice, or not at all; responses that are equal or of two kinds."""
    if not uses_preferences(x):
        return
    rows = [(row, responses) for row, _, responses in x.script.read_preferences(x.rows)]
    mixed = [row for row, responses in rows if len({isinstance(one, str) for one in responses}) > 1]
    if mixed:
        yield error(f"{x.place(mixed[0])}: some responses are texts, others are lists")
        return
    equal = [row for row, responses in rows if responses[0] == responses[-1]]
    if equal:
        yield remark(
            f"{len(equal)} rows have equal responses and are left out; the first is {x.place(equal[0])}"
        )
    texts = [(row, responses) for row, responses in rows if isinstance(responses[0], str)]
    repeated = [
        row
        for row, responses in texts
        if row.get("prompt") and all(response.startswith(row["prompt"]) for response in responses)
    ]
    if texts and len(repeated) > len(texts) / 2:
        yield error(
            f"{len(repeated)} of {len(texts)} rows repeat their prompt at the beginning of both responses "
            f"({x.place(repeated[0])}), so it would be read twice: empty the column prompt"
        )
    yield from contradictions(x, rows)
    if "prompt" not in x.columns:
        yield from prompts_elsewhere(x, rows)
    for row, responses in rows:
        prompt = row.get("prompt") if is_messages(row.get("prompt")) else []
        if "user" in roles_of(prompt) and is_messages(responses[0]) and has_question(responses[0]):
            yield error(f"{x.place(row)}: the responses contain their prompt: empty the column prompt")
            return


def contradictions(x, rows):
    """A pair that is there both ways round: what one row teaches, the other one unteaches."""
    known, against = {}, []
    for row, responses in rows:
        prompt, chosen, rejected = repr(row.get("prompt")), repr(responses[0]), repr(responses[-1])
        if chosen != rejected:
            known.setdefault((prompt, chosen, rejected), row)
            if (prompt, rejected, chosen) in known:
                against.append((known[prompt, rejected, chosen], row))
    if against:
        first, second = against[0]
        is_much = len(against) > len(rows) / 40  # a few are usual where people disagree
        yield (error if is_much else remark)(
            f"{len(against)} of {len(rows)} rows contradict another one: the same prompt, with chosen and "
            f"rejected exchanged; the first are {x.place(first)} and {x.place(second)}"
        )


def check_shuffled(x):
    """Responses of other rows: a good one shares more words with its own prompt than with another one.

    It is measured, and said only if one of the columns chosen and rejected does so clearly, and the other one
    does not.
    """
    if not uses_preferences(x):
        return
    rows = [[row.get(name) for name in ("prompt", "chosen", "rejected")] for row in x.sample(x.rows)]
    rows = [[*map(words_of, values)] for values in rows if not any(map(is_blank, values))]
    if len(rows) < 50:
        return
    prompts, *responses = zip(*rows)
    surplus = {name: own_surplus(prompts, column) for name, column in zip(("chosen", "rejected"), responses)}
    for name, other in (("chosen", "rejected"), ("rejected", "chosen")):
        if surplus[name] < 2 and surplus[other] > 8:
            yield remark(
                f"the column {name} shares no more words with its own prompt than with those of other rows "
                f"({surplus[name]:.1f} standard errors more; {other}: {surplus[other]:.1f}): was it shuffled?"
            )


def words_of(value):
    """The longer words of a text or a chat. -> set"""
    if is_messages(value):
        value = " ".join(str(message.get("content")) for message in value)
    return {*re.findall(r"\w{4,}", str(value).lower())}


def own_surplus(prompts, responses):
    """How much more of its words a response shares with its prompt than with another, in standard errors."""
    half = len(prompts) // 2
    others = prompts[half:] + prompts[:half]
    differences = [
        (len(words & own) - len(words & other)) / max(len(words), 1)
        for words, own, other in zip(responses, prompts, others)
    ]
    error_of_mean = statistics.stdev(differences) / len(differences) ** 0.5
    return statistics.fmean(differences) / max(error_of_mean, 1e-9)


def roles_of(chat):
    """The roles of a chat's messages. -> tuple of str"""
    return tuple(str(message.get("role")) for message in chat)


def has_question(chat):
    """True if the user speaks before the assistant does."""
    roles = roles_of(chat)
    return "user" in roles[: (*roles, "assistant").index("assistant")]


USUAL_PROMPTS = ("question", "instruction", "query", "input", "messages", "context")


def last_text(value):
    """A text, or the last content of a chat."""
    return value[-1].get("content") if is_messages(value) else value if isinstance(value, str) else None


def prompts_elsewhere(x, rows):
    """Without a column prompt, it is what the responses have in common, or their first messages."""
    others = [name for name in x.columns if name not in ("chosen", "rejected", "responses")]
    others = [name for name in others if any(isinstance(row.get(name), (str, list)) for row in x.rows[:100])]
    usual = [name for name in others if name in USUAL_PROMPTS]
    begins = [os.path.commonprefix(responses) for _, responses in rows if not is_messages(responses[0])]
    of_all = len(os.path.commonprefix(begins))  # of responses that begin alike in all rows, as in "<answer>"
    chats, texts = [], []  # rows without a prompt
    for row, responses in rows:
        if is_messages(responses[0]):
            chats += [] if has_question(responses[0]) else [row]
            continue
        begin = os.path.commonprefix(responses)
        questions = filter(None, (last_text(row.get(name)) for name in usual))
        # Fewer than 8 letters are alike by chance.
        if len(begin) < 8 or len(begin) < of_all + 8 and any(question not in begin for question in questions):
            texts.append(row)
    if chats or len(texts) > len(rows) / 2:
        hint = f"rename one of {listed(others)} to prompt" if others else "add a column prompt"
        yield error(
            f"{x.args.dataset_name} has no column prompt, and the responses of {len(chats + texts)} of "
            f"{len(rows)} rows hold none ({x.place((chats + texts)[0])}): {hint}"
        )
    elif usual:
        yield remark(f"the prompt is the beginning that the responses share; {listed(others)} are not read")


def check_completions(x):
    """A completion that begins with its prompt, so that it would be read twice; no reference for a judge."""
    sets = {"dataset_name": x.rows} if x.kind in ("sft", "rloo") else {}
    for i, flag in enumerate(("center_dataset_name", "eval_dataset_name")):  # training, held-out rows
        if x.flag(flag):
            sets[flag] = x.splits(x.flag(flag))[i]
    for flag, rows in sets.items():
        pairs = [(row, row["prompt"], row["completion"]) for row in rows if has_completion(row)]
        repeated = [row for row, prompt, completion in pairs if completion[: len(prompt)] == prompt]
        if pairs and len(repeated) > len(pairs) / 2:
            yield error(
                f"{flag_name(flag)}: {len(repeated)} of {len(pairs)} completions begin with their prompt "
                f"({x.place(repeated[0])}), so it would be read twice: cut it off"
            )
        if flag != "dataset_name" and not pairs:
            yield error(f"{flag_name(flag)} {x.flag(flag)}: no row has a prompt and a completion")
        elif flag == "eval_dataset_name" and not dpo_posts(x):
            yield error(
                f"{flag_name(flag)} {x.flag(flag)}: no row has a prompt and a completion of at most "
                f"--max-length {x.args.max_length} tokens"
            )
    has_judge = x.kind == "rloo" and (x.flag("judge_fn") or x.flag("judge_model"))
    if has_judge and x.held_out and not any(has_completion(row) and is_kept(x, row) for row in x.held_out):
        yield error(
            f"{x.args.dataset_name}: a judge needs references, a column completion (or --judge-fn None)"
        )


def check_labels(x):
    """reward_model.py with labels: classes that are missing, misnamed or decimals."""
    if x.kind != "reward_model":
        return
    args, columns = x.args, {*x.columns}
    is_dialog = {"dialog", "act"} <= columns
    is_text = {"text", "label"} <= columns and not is_dialog
    part, _, parts = args.train_shard.partition("/")
    if not (part.isdigit() and parts.isdigit() and int(part) < int(parts)):
        yield error(f"--train-shard {args.train_shard} must be i/n with i from 0 to n - 1, such as 0/2")
    if args.min_prefix_length and not is_text:
        yield error("--min-prefix-length is only for the columns text and label: set it to 0")
    elif 0 < args.min_prefix_length <= x.tokenizer.num_special_tokens_to_add():
        yield error("--min-prefix-length must be more than the number of special tokens of a text")
    if is_dialog and args.label_names is None:
        yield error("--label-names is missing: the names of the acts 1, 2, ...")
    if args.center_dataset_name is not None and (is_text or is_dialog):
        yield error("--center-dataset-name is only for preferences: labels need no reward_offset")
    names = names_of_labels(x)
    if args.label_names is not None and (is_text or is_dialog) and len({*names}) < max(2, len(names)):
        yield error(f"--label-names {args.label_names}: two labels or more are needed, no two equal")
    elif is_text:
        yield from check_classes(x)


def names_of_labels(x):
    """The names in --label-names. -> list"""
    return [name.strip() for name in (x.flag("label_names") or "").split(",") if name.strip()]


def check_classes(x):
    used = [row for row in x.rows if not is_blank(row.get("text"))]
    try:
        labels, known = x.script.find_classes(x.train, x.args)
    except TypeError:  # they cannot be sorted, or are lists
        yield error("the column label has values of several types, or lists: labels are numbers or names")
        return
    if x.args.label_names is None:
        decimals = [label for label in labels if re.fullmatch(r"-?\d*\.\d+|.*\de-\d+", label)]
        if decimals:
            yield error(f"the column label has decimals, such as {decimals[0]}: classes are numbers or names")
        if len(labels) < 2:
            yield error(f"the column label has fewer than two different values: {listed(labels)}")
    for row in used:
        label = row.get("label")
        if isinstance(label, (dict, list)) or label not in known:
            yield error(
                f"{x.place(row)}: label {label!r} is none of {listed(dict.fromkeys(map(str, known)))}"
            )
            return
    yield from reversed_sentiments(x, used, labels, known)
    counts = Counter(str(row.get("label")) for row in used)
    if counts and min(counts.values()) < 0.02 * len(used):
        yield remark(f"rows per label are uneven: {dict(counts.most_common(8))}")


GOOD = {*"good great excellent love loved wonderful best beautiful perfect brilliant enjoyed fun".split()}
BAD = {*"bad worst awful terrible boring poor waste stupid horrible dull worse fails".split()}


def reversed_sentiments(x, rows, names, class_of):
    """Names in the wrong order, measured for positive and negative only: by a few words that tell."""
    if {name.lower() for name in names} != {"positive", "negative"}:
        return
    moods = {"positive": [], "negative": []}
    for row in x.sample(rows):
        words = re.findall(r"[a-z]+", row["text"].lower())
        mood = sum((word in GOOD) - (word in BAD) for word in words)
        moods[names[class_of[row["label"]]].lower()].append(float(mood))
    if min(map(len, moods.values())) < 20:
        return
    means = {name: statistics.fmean(values) for name, values in moods.items()}
    errors = [statistics.variance(values) / len(values) for values in moods.values()]
    if means["negative"] - means["positive"] > 5 * sum(errors) ** 0.5:
        yield remark(
            "are --label-names in the wrong order? Of words such as great, less those such as awful, texts "
            f"that are named negative have {means['negative']:.2f}, and those named positive "
            f"{means['positive']:.2f}"
        )


def check_dialogs(x):
    """Acts that the classifier does not know; a mark or a prompt that would be empty."""
    args, names = x.args, names_of_labels(x)
    if "dialog" not in x.columns or x.kind not in ("sft", "reward_model", "ppo_dialog"):
        return
    if x.kind == "ppo_dialog" and args.reward_model_path is not None:
        names = labels_of(x.config_of(args.reward_model_path))
    if x.kind != "reward_model" and args.utterance_end != "eos":
        mark = args.utterance_end.strip()
        [ids] = x.script.utterance_ids(x.tokenizer, ["Yes"], args.utterance_end)
        if not mark or mark not in x.tokenizer.decode(ids):
            yield error(f"--utterance-end {mark!r}: it is blank, or the tokenizer cannot write it")
        elif x.kind == "ppo_dialog":
            parts = x.tokenizer(args.utterance_end, add_special_tokens=False).input_ids
            if len(parts) > 1:
                tokens = listed(repr(x.tokenizer.decode([i])) for i in parts)
                yield remark(
                    f"--utterance-end {args.utterance_end!r} is no token of {x.tokenizer_name}, which writes "
                    f"it as {tokens}: fine-tuning (sft.py --utterance-end) must have used the same mark"
                )
    num_special = len(x.tokenizer("").input_ids)
    if x.kind == "ppo_dialog" and 0 < args.max_prompt_length <= num_special:
        yield error(
            f"--max-prompt-length {args.max_prompt_length} must be more than {num_special}, the number of "
            "special tokens of a prompt: else it would not be cut at all"
        )
    for row, _, acts in x.script.load_dialogs(x.rows) if names else []:
        for act in (acts or [])[1:]:  # the first utterance is no answer
            if act is not None and act not in range(1, len(names) + 1):
                known = f"1 to {len(names)} ({listed(names)})"
                yield error(f"{x.place(row)}: act {act}, but the classifier knows {known}")
                return


# ---- Tokenizer ---------------------------------------------------------------------------------------------


def check_tokenizer(x):
    """A tokenizer that knows no words, appends EOS, or has no EOS."""
    tokenizer, name = x.tokenizer, x.tokenizer_name
    if set(tokenizer.get_vocab()) <= set(tokenizer.get_added_vocab()):
        yield error(f"{name} has no tokenizer: copy the tokenizer's files into it")
        return
    reads_labels = x.kind == "reward_model" and ("label" in x.columns or "act" in x.columns)
    if reads_labels or tokenizer.cls_token_id is not None:
        return
    if appends_eos(tokenizer):
        yield error(
            f"{name}: its tokenizer appends EOS to every text, prompts too; set add_eos_token to false"
        )
    has_flag = hasattr(x.args, "stop_token")
    can_end = has_flag and (x.args.stop_token is None or x.stop_ids)
    if tokenizer.eos_token_id is None and not can_end:
        hint = ": use --stop-token-id, or --stop-token None" if has_flag else ""
        yield error(f"{name}: the tokenizer has no EOS token, so no response can end{hint}")


def appends_eos(tokenizer):
    last = tokenizer("a").input_ids[-1:]
    last_of_text = tokenizer("a", add_special_tokens=False).input_ids[-1:]
    return last == [tokenizer.eos_token_id] and last != last_of_text


def check_two_bos(x):
    """A text that begins with BOS, to which the tokenizer adds another: no rollout begins like that."""
    bos = x.tokenizer.bos_token_id
    if bos is None:
        return
    for example in x.examples("train") + x.examples("held-out"):
        if list(example.ids[:2]) == [bos, bos]:
            yield error(
                f"{x.place(example.row)} begins with BOS twice: the tokenizer adds one, so remove it from "
                "the data, or from the chat template"
            )
            return


def check_vocabulary(x):
    """Tokens that the model has no embedding for, and stop tokens that do not exist."""
    if x.flag("from_config"):
        return
    size = x.config.get_text_config().vocab_size
    too_large = {token: i for token, i in x.tokenizer.get_vocab().items() if i >= size}
    too_large.pop(x.tokenizer.pad_token, None)  # pads are never embedded
    if too_large:
        token = min(too_large, key=too_large.get)
        yield error(
            f"the tokenizer of {x.tokenizer_name} has {len(too_large)} tokens beyond the model's {size} "
            f"embeddings, such as {token!r}: another model's tokenizer, or embeddings that were not resized"
        )
    for i in x.flag("stop_token_id") or []:
        if not 0 <= i < size:
            yield error(f"--stop-token-id {i}: the model has no such token (0 to {size - 1})")
    if x.flag("stop_token_id") == []:
        yield error("--stop-token-id needs an id")


def check_stop_tokens(x):
    """dpo_tldr.py: no reference ends as the model's responses do."""
    posts = dpo_posts(x)
    if posts and not any({*post.answer} & x.stop_ids for post in posts):
        yield error(
            "no response in the held-out rows contains a token that ends a response, so samples would run "
            "past their end: set eos_token_id in generation_config.json, or let the chat template write one"
        )


def check_from_config(x):
    """Random weights: names that the config does not have are ignored, and some model types load another
    tokenizer than the one that is saved next to them.
    """
    if not x.flag("from_config"):
        return
    model_type, *pairs = x.args.from_config.split()
    known = transformers.AutoConfig.for_model(model_type)
    for pair in pairs:
        name, _, value = pair.partition("=")
        if not hasattr(known, name):
            yield error(f"--from-config: a config of type {model_type} has no {name}")
        try:
            json.loads(value)
        except json.JSONDecodeError:
            yield error(f'--from-config: {pair} needs a JSON value, such as {name}=4 or {name}="gelu"')
            return
    tokenizer = x.tokenizer
    with tempfile.TemporaryDirectory() as folder:
        x.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        reloaded = transformers.AutoTokenizer.from_pretrained(folder)
    text = tokenizer.decode(range(len(tokenizer)), skip_special_tokens=True)  # all words that it knows
    if reloaded(text).input_ids != tokenizer(text).input_ids:
        yield error(
            f"--from-config: with a {model_type} model, transformers would load this tokenizer as a "
            f"{type(reloaded).__name__}, and texts would have other tokens: use another model type"
        )


# ---- Models ------------------------------------------------------------------------------------------------


def context_length(config):
    """The number of tokens that a model can read; a million if its config does not say."""
    context = getattr(config.get_text_config(), "max_position_embeddings", None) or -1
    return context if context > 0 else 1_000_000


def longest_text(x):
    """The most tokens that the policy reads, and the flags that say so. -> int, str"""
    args = x.args
    if x.kind in ("sft", "reward_model"):
        return args.max_length, "--max-length"
    if x.kind == "ppo_sentiment":
        return args.query_max_length + args.response_length, "--query-max-length or --response-length"
    if x.kind in ("rloo", "dpo"):
        kept = [e for split in ("train", "held-out") for e in x.examples(split) if e.is_kept]
        longest = max((len(e.ids) for e in kept), default=0) + args.response_length
        if x.kind == "dpo":
            pairs = [len(e.ids) + max(len(e.answer), len(e.other)) for e in kept]
            posts = [len(post.ids) + args.response_length for post in dpo_posts(x)]
            return max([*pairs, *posts, longest]), "--max-length or --response-length"
        return longest, "--max-prompt-length or --response-length"
    longest = args.max_prompt_length + args.response_length
    if x.kind == "tools" and args.environment:
        longest += args.max_tool_tokens  # what reset() says
    return longest, "--max-prompt-length or --response-length"


def check_context(x):
    """A model that reads fewer tokens than a text has: learned positions end, others get worse in silence."""
    name = x.flag("from_config") or x.policy_name
    longest, flags = longest_text(x)
    context = context_length(x.config)
    if longest > context:
        yield error(
            f"{name} reads at most {context} tokens, but prompt and response together have up to {longest}: "
            f"lower {flags}"
        )


def check_logits(x):
    """Logits that are not the product of hidden states and output layer: all losses would be wrong."""
    if x.kind == "reward_model":
        return
    plain = {
        "final_logit_softcapping": None,  # Gemma 2
        "logits_soft_cap": None,  # RecurrentGemma
        "logit_scale": 1.0,  # Cohere
        "logits_scaling": 1.0,  # Granite
        "lm_head_multiplier": 1.0,  # Falcon H1
        "output_multiplier_scale": 1.0,
        "mup_scale": 1.0,
    }
    config = x.config.get_text_config()
    for key, value in plain.items():
        if getattr(config, key, value) not in (value, None):
            yield error(
                f"{x.policy_name}: {config.model_type} models cap or scale their logits ({key} = "
                f"{getattr(config, key)}), so log-probabilities would be wrong here: use another model"
            )


def check_cache(x):
    """A forward without a cache of keys and values: a token would be sampled without the text before it."""
    if x.kind in ("sft", "reward_model"):
        return
    if "past_key_values" not in inspect.signature(type(x.model).forward).parameters:
        yield error(
            f"{x.policy_name}: a {x.config.model_type} has no cache of keys and values (past_key_values), "
            "with which responses are sampled: use another model"
        )


def check_quantized(x):
    """Quantized weights cannot be trained: only the few that are not quantized would be."""
    if x.flag("from_config") or getattr(x.config, "quantization_config", None) is None:
        return
    if x.kind in ("sft", "reward_model"):
        yield error(f"{x.policy_name}: quantized weights cannot be trained here")
    elif not x.args.lora_r:
        yield error(f"{x.policy_name}: quantized weights cannot be trained: add --lora-r 16")


def linear_layers(model):
    """The last part of the names of a model's linear layers. -> set"""
    kinds = torch.nn.Linear, transformers.pytorch_utils.Conv1D
    return {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, kinds)}


def check_lora(x):
    """Names of layers that match nothing. peft complains only if all of them do."""
    names = x.args.lora_target_modules.replace(" ", "").split(",")
    if not x.args.lora_r or names == ["all-linear"]:
        return
    inside = linear_layers(x.model.base_model)  # embeddings and the output layer cannot have an adapter
    for name in names:
        if name.rpartition(".")[2] not in inside:
            yield error(
                f"--lora-target-modules {name} matches no layer; there are {listed(sorted(inside), 12)} "
                "(embeddings and the output layer cannot have an adapter)"
            )


def check_shared_layers(x):
    count = x.flag("num_shared_layers")
    if count:
        lists = [m for m in x.model.modules() if isinstance(m, torch.nn.ModuleList)]
        layers = len(max(lists, key=len))
        if count >= layers:
            yield error(
                f"--num-shared-layers {count}: the model has {layers} layers, and some must be trained"
            )


def check_critic(x):
    """A critic that sees later tokens knows the end of the response while it is being written."""
    name = x.flag("value_model_path")
    if name is None:
        return
    config = x.config_of(name)
    own, size = config.get_text_config().vocab_size, x.config.get_text_config().vocab_size
    if own != size:
        yield error(f"--value-model-path {name} has a vocabulary of {own} tokens, but the policy has {size}")
    if not reads_left_to_right(x, config):
        yield error(
            f"--value-model-path {name}: a {config.model_type} sees later tokens, or cannot read left-padded "
            "rows: a critic must be a causal language model"
        )


@torch.no_grad()
def reads_left_to_right(x, config):
    """True if later tokens, and pads before a text, change nothing. It is tried with two random layers."""
    config = type(config).from_dict(config.to_dict())
    text = config.get_text_config()
    if getattr(text, "hidden_size", 0) > 2048:
        raise NotChecked(f"whether --value-model-path reads from left to right (a {config.model_type})")
    for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        if getattr(text, key, None):
            setattr(text, key, 2)  # an RWKV divides by their number - 1
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:2]
    text.vocab_size, text.pad_token_id = 16, None
    for key in ("initializer_range", "init_std"):
        if hasattr(text, key):
            setattr(text, key, 0.2)  # so that tokens matter to each other
    with torch.random.fork_rng():
        torch.manual_seed(0)
        critic = transformers.AutoModel.from_config(config).eval()
    ids = torch.arange(8)[None]  # 0, 1: pads; 7: a token that 2 to 6 must not see
    alone = critic(ids[:, 2:7]).last_hidden_state  # [1, 5, H]
    padded = x.script.hidden_states(critic, ids, ids >= 2)[:, 2:7]
    return torch.allclose(padded, alone, rtol=0.01, atol=0.01)


# ---- Reward models -----------------------------------------------------------------------------------------


def labels_of(config):
    return [config.id2label[i] for i in range(config.num_labels)]


def reward_models(x):
    """The classifiers that score responses. -> dict: flag -> name"""
    flags = ("reward_model_path", "judge_model_path", "judge_model")
    models = {flag: name for flag, name in models_of(x).items() if flag in flags}
    if "judge_model" in models and not Path(x.path(models["judge_model"])).is_dir():
        models.pop("judge_model")  # a chat model of OpenAI
    return models


def check_reward_models(x):
    """A classifier that reads padding, has no head, or gives another number of outputs."""
    for flag, name in (models_of(x) if x.kind == "reward_model" else reward_models(x)).items():
        config, flag = x.config_of(name), flag_name(flag)
        if config.model_type in ("xlnet", "ctrl", "modernbert-decoder"):
            yield error(f"{flag} {name}: a {config.model_type} reads the last position, perhaps padding")
        if x.kind == "reward_model":
            continue  # it is trained
        is_adapter = Path(x.path(name), "adapter_config.json").exists()
        has_head = "ForSequenceClassification" in str(config.architectures) or is_adapter
        if x.kind == "rloo":
            if not has_head and flag == "--judge-model":
                yield error(f"--judge-model {name} is a language model: use --judge-url, or a reward model")
            elif not has_head:
                yield remark(f"{flag} {name} is a language model: its reward head is random, a test only")
            elif config.num_labels != 1 and not is_adapter:
                yield error(
                    f"{flag} {name} is a classifier with {config.num_labels} labels "
                    f"({listed(labels_of(config))}); a reward model has one output"
                )
        elif not has_head:
            yield error(f"{flag} {name} is not a classifier ({listed(config.architectures or ['?'])})")
        elif x.kind == "ppo_sentiment":
            yield from check_label(x, flag, name, config)
        tokenizer = x.tokenizer_of(name)
        if set(tokenizer.get_vocab()) <= set(tokenizer.get_added_vocab()):
            yield error(f"{flag} {name} has no tokenizer: copy the tokenizer's files into it")
        elif x.kind == "rloo" and tokenizer.cls_token_id is None and appends_eos(tokenizer):
            yield error(
                f"{flag} {name}: its tokenizer appends EOS, which would be between prompt and response"
            )
        longest, context = min(longest_text(x)[0], context_length(x.config)), context_length(config)
        is_learned = "rope" not in str(config.to_dict())  # a longer text has no positions
        if x.kind != "rloo" and tokenizer.model_max_length > context and (longest > context or is_learned):
            yield (error if longest > context else remark)(
                f"{flag} {name} reads at most {context} tokens, texts may have {longest} of the policy's, "
                f"and its tokenizer cuts none: set model_max_length to {context} in tokenizer_config.json"
            )
        own = getattr(tokenizer, "chat_template", None)
        if x.kind == "rloo" and chats_of(x) and own != x.tokenizer.chat_template:
            template = "another chat template than the policy" if own else "no chat template"
            yield (remark if own else error)(f"{flag} {name} has {template}, and the prompts are chats")


def check_label(x, flag, name, config):
    """The reward is the logit of a label. Reward models of pairs have none: they read a response at EOS."""
    labels = labels_of(config)
    if len(labels) == 1:
        yield error(f"{flag} {name} has one output, as reward models of pairs have: see docs/from_trl.md")
    elif x.args.reward_label.lower() not in map(str.lower, labels):
        yield error(f"--reward-label {x.args.reward_label}: the labels of {name} are {listed(labels)}")


# ---- Reward functions --------------------------------------------------------------------------------------


@once
def environment_class(x):
    """The class of --environment, imported once; None without this flag."""
    with own_modules():
        found = x.script.load_functions(functions_of(x, "environment"))
    return next(iter(found.values()), None)


def reward_callables(x):
    """The functions that get columns of the data. -> list"""
    functions = []
    if x.is_rl:
        with own_modules():
            names = [*functions_of(x, "reward_fn"), *functions_of(x, "judge_fn")]
            functions += x.script.load_functions(names).values()
    if x.kind == "tools" and x.args.environment:
        functions.append(environment_class(x).reset)
    return functions


def scored_names(x):
    """What is called for each response. -> dict: flag -> names FILE.py:function"""
    if not x.is_rl:
        return {}
    flags = ("reward_fn", "judge_fn")
    names = {flag: functions_of(x, flag) for flag in flags if functions_of(x, flag)}
    if x.kind == "tools" and not names and x.args.environment:
        names["environment"] = [x.args.environment]
    return names


def check_column_names(x):
    """A column that is called like an input of reward functions, which would get one instead of the other."""
    if not scored_names(x):
        return
    for name in OWN_NAMES:
        if name in x.columns:
            yield error(
                f"a column of the data is called {name}, as an input of the reward functions: rename it"
            )
    if x.kind == "ppo_dialog" and "turn" in x.columns and x.flag("reward_fn"):
        yield remark("the column turn is replaced by the number of the answer in its dialog")


def reference_of(row):
    """The right answer of a row, as a text; None if it has none."""
    for column in REFERENCE_COLUMNS:
        value = row.get(column)
        if is_messages(value):
            value = value[-1].get("content")
        if not is_blank(value) and isinstance(value, (str, int, float)):
            return str(value)
    return None


def scorers(x):
    """The script's own calls of the reward functions. -> dict: flag -> function of (rows, responses)"""
    cpu = torch.device("cpu")
    state = transformers.TrainerState(max_steps=10, global_step=0)
    score = score_tools if x.kind == "tools" else score_texts
    made = {}
    for flag, names in scored_names(x).items():
        functions = load_listing(x, names if flag != "environment" else [])
        made[flag] = partial(score, x, (functions, state, cpu))
    return made


def load_listing(x, names):
    """The functions, which now raise if they return a mapping (list() takes its keys), a set or a text."""
    functions = {}
    for name in names:
        try:
            functions |= x.script.load_functions([name])
        except (Exception, SystemExit) as problem:
            if any(check_paths(x)) or any(check_functions(x)):
                raise  # these say why
            raise Fault(f"{name} cannot be imported: {line_of(problem)}") from problem
    return {name: lists_only(name, function) for name, function in functions.items()}


def lists_only(name, function):
    @wraps(function)
    def call(*inputs, **columns):
        scores = function(*inputs, **columns)
        if isinstance(scores, (Mapping, Set, str, bytes)):
            raise TypeError(f"{name} returned a {type(scores).__name__}, not a list of numbers")
        return scores

    return call


def score_texts(x, inputs, rows, responses):
    """-> dict: name of the function -> list of numbers, nan where it does not apply"""
    ids = x.tokenizer(responses, add_special_tokens=False).input_ids
    columns = [row | {"turn": 1} if x.kind == "ppo_dialog" else row for row in rows]
    prompts = [start_of(x, row) for row in rows]
    if hasattr(x.script, "score_responses"):
        examples = [dict(prompt=prompt, columns=row) for prompt, row in zip(prompts, columns)]
        scores = x.script.score_responses(*inputs, examples, responses, ids)
    else:
        scores = x.script.call_reward_functions(*inputs, columns, prompts, responses, ids)
    return {name: numbers.tolist() for name, numbers in scores.items()}


def start_of(x, row):
    """The prompt that a reward function gets with a row."""
    if x.kind == "ppo_sentiment":
        return " ".join(str(row.get("text") or "").split()[:4])
    if x.kind == "ppo_dialog":
        return str((row.get("dialog") or [""])[0])
    return prompt_of(x, row)


def score_tools(x, inputs, rows, responses, earlier=None):
    """Trajectories of one turn, without a call. earlier: for each, the messages before this turn"""
    start_tools, _ = x.tools
    trajectories = []
    for row, response, before in zip(rows, responses, earlier or [[]] * len(rows)):
        example = dict(prompt=prompt_of(x, row), columns=row, ids=[])
        messages = [*before, {"role": "assistant", "content": response, "tool_calls": []}]
        text = "".join(message["content"] for message in messages)
        tokens = x.tokenizer(text, add_special_tokens=False).input_ids
        trajectories.append(x.script.Trajectory(example, None, tokens=tokens, messages=messages))
    start_tools(trajectories)
    scores = x.script.score_trajectories(*inputs, trajectories)
    for job in [trajectory.ask("close") for trajectory in trajectories]:
        job.result()
    return {name: numbers.tolist() for name, numbers in scores.items()}


def scored_rows(x):
    """Rows that a run may score: they have a prompt. -> list"""
    return [row for row in x.rows + x.harder if not is_blank(start_of(x, row))]


def check_rewards(x):
    """Rows that a reward function cannot score. One null among the answers ends a run hours later."""
    if not scored_names(x) or any(finding.kind == "error" for finding in check_tools(x)):
        return  # without tools, there is no prompt
    with own_modules(), quiet():
        for flag, score in scorers(x).items():
            yield from check_scores(x, flag, score, scored_rows(x))


def check_scores(x, flag, score, rows):
    """Call a scorer on all rows, 1,000 at a time; on fewer, if it is slow."""
    if not rows:
        return
    names = listed(scored_names(x)[flag])
    failure = None
    for part in filter(None, (rows[:4], rows[4:8])):  # the first calls may load something
        start = time.time()
        failure = failure or first_failure(score, part)
        seconds = max(time.time() - start, 1e-4) / len(part)  # per row
    rest = rows[8:]
    num_rows = int((QUICK_SECONDS if x.is_quick else MOST_SECONDS) / seconds)
    if failure is None and num_rows < len(rest):
        numbers = sorted(random.Random(0).sample(range(len(rest)), num_rows))
        rest = [rest[i] for i in numbers]
        yield Finding("not checked", f"{names} is slow: called on {num_rows + 8} of the rows only")
    for i in range(0, len(rest), 1000):
        failure = failure or first_failure(score, rest[i : i + 1000])
    if failure is not None:
        row, problem = failure
        where = x.place(row) if row is not None else "a batch of rows, though none of them alone"
        if row is None or is_kept(x, row):
            yield error(f"{flag_name(flag)} {names} cannot score {where}: {problem}")
        return
    rows = rows[:8] + rest
    if x.kind == "tools" and flag == "reward_fn":
        yield from check_last_turn(x, score, rows, min(8, int(QUICK_SECONDS / 16 / seconds)))
    if not x.is_quick:
        most = min(64, max(4, int(MOST_SECONDS / 16 / seconds)))  # of the rows, for further calls
        if flag == "reward_fn":
            yield from check_references(x, score, rows, most)
        yield from check_order(x, flag, score, rows[:most])


def check_last_turn(x, score, rows, most):
    """A reward that an answer without a call earns, and the same answer after a call does not: it may read
    completion[0], which is then the call.
    """
    rows = [row for row in rows if reference_of(row) is not None][:most]
    if not rows or not x.tools[1]:
        return
    function = x.tools[1][0]["function"]
    text = json.dumps({"name": function["name"], "arguments": made_up_arguments(function, 0)})
    call = {"role": "assistant", "content": f"<tool_call>\n{text}\n</tool_call>", "tool_calls": [text]}
    none = [""] * len(rows)
    empty, counts, reads_last = score(rows, none), Counter(), set()
    for form in REFERENCE_FORMS:
        answers = [form.format(reference_of(row)) for row in rows]
        better = {}  # name of a function -> how many rows earn more with this answer than with an empty one
        for name, numbers in score(rows, answers).items():
            better[name] = sum(number > other for number, other in zip(numbers, empty[name]))
        if not any(better.values()):
            continue
        for results in (["nothing found"] * len(rows), answers):  # a reward may search all messages
            earlier = [[call, {"role": "tool", "content": result}] for result in results]
            with_answer, without = score(rows, answers, earlier), score(rows, none, earlier)
            for name in better:
                if better[name] and not same_numbers(with_answer[name], without[name]):
                    reads_last.add(name)
        counts |= Counter(better)  # the larger number of each
    for name, count in counts.items():
        if name not in reads_last:
            yield error(
                f"--reward-fn: {name} ignores the last message: the right answer earns more than an empty "
                f"one in {count} of {len(rows)} rows, but after a call of a tool, both earn the same. "
                "completion[0] is then the call, and the answer is completion[-1]"
            )


def is_kept(x, row):
    """True if a run uses a row: its prompt is not too long."""
    try:
        return any(example.is_kept for example in EXAMPLES[x.kind](x, [row]))
    except (Exception, x.script.UserError):
        return True


def first_failure(score, rows):
    """The first row that cannot be scored. -> (row, what happened), or None; row: None if none fails alone"""
    problem = failure_of(score, rows, [reference_of(row) or "A short text." for row in rows])
    if problem is None:
        return None
    if len(rows) == 1:
        return rows[0], problem
    half = len(rows) // 2
    return first_failure(score, rows[:half]) or first_failure(score, rows[half:]) or (None, problem)


def failure_of(score, rows, responses):
    """What goes wrong with these rows, as a text; None if nothing does."""
    try:
        scores = score(rows, responses)
    except (Exception, SystemExit) as problem:
        return line_of(problem).removeprefix("UserError: ")
    for name, numbers in scores.items():
        if len(numbers) != len(rows):
            return f"{name} returned {len(numbers)} numbers for {len(rows)} responses"
    for values in zip(*scores.values()):
        if any(math.isinf(value) for value in values):
            return "the reward is not finite"
        if all(math.isnan(value) for value in values):
            return "no function gives a reward: all return None"
    return None


def check_references(x, score, rows, most):
    """What the rows' own references earn: more than an empty answer, or the function reads another column."""
    rows = [row for row in rows if reference_of(row) is not None][:most]
    if not rows:
        return
    empty = score(rows, [""] * len(rows))
    best = [score(rows, [form.format(reference_of(row)) for row in rows]) for form in REFERENCE_FORMS]
    yield from check_clipped(x, empty, best)
    constant = [name for name in empty if len(rows) >= 8 and is_constant(name, score, rows, [empty, *best])]
    for name in constant:
        numbers = empty[name]
        # A rule that is seldom broken, or a format that is not tried here, gives all of these one number.
        may_be_a_rule = len({*numbers}) == 1 and (numbers[0] <= 0 or len(empty) > 1 or has_classifier(x))
        hint = ". Right only if it pays for a format, or for a rule, that none of the texts here has"
        yield (remark if may_be_a_rule else error)(
            f"--reward-fn: {name} does not depend on the response: for {len(rows)} of {len(rows)} rows the "
            f"reference and an empty response get the same number ({numbers[0]:g} in {x.place(rows[0])})"
            + (hint if may_be_a_rule else "")
        )
    pairs = [pair for scores in best for name in empty for pair in zip(scores[name], empty[name])]
    if len(constant) < len(empty) and not any(number > other for number, other in pairs):
        yield remark(
            f"--reward-fn: of {len(rows)} rows, none has a reference (a column such as answer) that earns "
            "more than an empty response: does the function read the right column and format?"
        )


def is_constant(name, score, rows, tried):
    """True if a function gives each row one number for all responses: those tried, and those in PROBES."""
    first, *others = (scores[name] for scores in tried)
    if all(map(math.isnan, first)) or not all(same_numbers(first, other) for other in others):
        return False
    return all(same_numbers(first, score(rows, [probe] * len(rows))[name]) for probe in PROBES)


def same_numbers(one, other):
    """True if two lists hold the same rewards, up to the order in which a machine adds. nan equals nan."""
    return all(
        math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6) or math.isnan(a) and math.isnan(b)
        for a, b in zip(one, other)
    )


def has_classifier(x):
    """True if a classifier's score is added to the reward functions'."""
    return x.kind == "ppo_dialog" and x.args.reward_model_path is not None


def check_clipped(x, empty, best):
    """References that all earn more than --score-clip: beyond it, a better response is paid as a worse one.

    empty, best: the rewards of empty responses, and of references in each form, by function
    """
    clip = x.flag("score_clip")
    if clip is None or has_classifier(x):
        return
    weights = x.flag("reward_weights") or [1.0] * len(empty)
    totals = []
    for scores in (empty, *best):
        parts = [[0.0 if math.isnan(n) else w * n for n in ns] for w, ns in zip(weights, scores.values())]
        totals.append([sum(numbers) for numbers in zip(*parts)])
    for total in totals[1:]:
        if min(total) >= clip < max(total):  # rewards that end at the clip lose nothing
            is_all = min(totals[0]) >= clip
            what = (
                "references and empty responses alike" if is_all else f"the references of {len(total)} rows"
            )
            yield (error if is_all else remark)(
                f"--score-clip {clip:g}: {what} earn {min(total):g} to {max(total):g}, and every response "
                "above the clip is paid the same"
            )
            return


def check_order(x, flag, score, rows):
    """A reward that depends on the other rows of the call, as with answer[0] for answer[i]."""
    different = {}  # so that the first and the last are not alike
    for row in rows:
        different.setdefault(reference_of(row) or repr(start_of(x, row)), row)
    rows = list(different.values())
    rows = rows[: len(rows) // x.group * x.group] or rows  # a function may compare the responses of a group
    if len(rows) < 2:
        return
    references = [*map(reference_of, rows)]
    for form in REFERENCE_FORMS if any(references) else REFERENCE_FORMS[:1]:
        responses = [
            f"This is text {i}" + i % 7 * " and more" if reference is None else form.format(reference)
            for i, reference in enumerate(references)
        ]
        first, backward = score(rows, responses), score(rows[::-1], responses[::-1])
        changed = [name for name in first if not same_numbers(first[name], backward[name][::-1])]
        again = score(rows, responses) if changed else {}  # or is it random?
        for name in changed:
            numbers, turned = first[name], backward[name][::-1]
            if same_numbers(numbers, again[name]):
                i = next(i for i, pair in enumerate(zip(numbers, turned)) if not same_numbers(*zip(pair)))
                yield error(
                    f"{flag_name(flag)}: {name} depends on the other rows of a call: {x.place(rows[i])} "
                    f"earns {numbers[i]:g}, and {turned[i]:g} if the same rows come in reverse. Number i "
                    "must come from completions[i] and answer[i] alone"
                )
                return


def check_judge_of_dpo(x):
    """dpo_tldr.py calls its judge only before and after training, so a fault would come at the very end."""
    if x.kind != "dpo" or not x.flag("judge_fn"):
        return
    _, rows = x.splits(x.flag("eval_dataset_name") or x.args.dataset_name)
    rows = [row for row in rows if isinstance(row.get("prompt"), (str, list)) and row["prompt"]][:8]
    if not rows:
        return
    responses = [reference_of(row) or row.get("chosen") or " A short text." for row in rows]
    with own_modules(), quiet():
        [judge] = load_listing(x, [x.args.judge_fn]).values()
        inputs = dict(prompts=[row["prompt"] for row in rows], completions=responses)
        failure = failure_of(lambda *unused: {"judge": list(map(float, judge(**inputs)))}, rows, responses)
    if failure is not None:
        yield error(f"--judge-fn {x.args.judge_fn} cannot score held-out rows: {failure}")


def check_system_prompt(x):
    """A system prompt that belongs to other data, or speaks of tools that are not there."""
    prompt = x.flag("system_prompt")
    if prompt == "":
        yield remark("--system-prompt is an empty text, which is a system message too; None is no message")
    if not prompt:
        return
    if is_path(x, prompt):
        yield error(
            f"--system-prompt {prompt} is the name of a file, but the flag is the text itself: use "
            f'--system-prompt "$(cat {prompt})"'
        )
        return
    prompts = [row["prompt"] for row in x.train if is_messages(row.get("prompt"))]
    own = [one for one in prompts if one[0].get("role") == "system"]
    if own and x.was_changed("system_prompt"):
        is_all = len(own) == len(x.train)
        yield (error if is_all else remark)(
            f"--system-prompt is not used in {len(own)} of {len(x.train)} training rows, which have their own"
        )
    owners = [name for name, recipe in x.script.RECIPES.items() if recipe.system_prompt == prompt]
    data = {x.script.RECIPES[name].dataset_name for name in owners}
    if owners and x.args.dataset_name not in data:
        yield remark(
            f"--system-prompt is that of the recipe {owners[0]}, whose data are others: {short(prompt)}"
        )
    if x.kind == "tools":
        known = {name for recipe in x.script.RECIPES.values() for name in recipe.tools or []}
        known = {name.rpartition(":")[2] for name in known}
        _, schemas = x.tools
        names = {schema["function"]["name"] for schema in schemas}
        for name in sorted(known - names):
            if re.search(rf"\b{name}\b", prompt):
                yield error(
                    f"--system-prompt speaks of the tool {name}, but the tools are {listed(sorted(names))}"
                )


def is_path(x, text):
    """True if a text is the name of a file, whether it is there or not."""
    if len(text) > 250 or "\n" in text:
        return False
    found = find_path(x, text)
    return found is not None and found.is_file() or bool(re.fullmatch(r"\S+\.(txt|md|jinja)", text))


# ---- Tools -------------------------------------------------------------------------------------------------


def check_tools(x):
    """Tools that cannot be described to the policy, two of one name, or none; no reward."""
    if x.kind != "tools":
        return
    names = functions_of(x, "tools")
    counts = Counter(name.rpartition(":")[2] for name in names)
    with own_modules():
        functions = x.script.load_functions(names)
    if x.args.environment:
        yield from environment_faults(x)
        methods = methods_of(x)
        counts.update(methods.keys())
        functions |= methods
    for name, count in counts.items():
        if count > 1:
            yield error(f"{count} tools are called {name}: rename one")
    for name, function in functions.items():
        yield from tool_faults(name, function)
    if not functions and not hasattr(environment_class(x), "reply"):
        yield error(
            "there is no tool: name --tools FILE.py:function, or an --environment FILE.py:Class with a "
            "public method or reply"
        )
    if not x.flag("reward_fn") and not hasattr(environment_class(x), "get_reward"):
        yield error("there is no reward: name --reward-fn, or give the environment a method get_reward")


def methods_of(x):
    """The tools of the environment. -> dict: name -> method of the class"""
    methods = inspect.getmembers(environment_class(x), inspect.isroutine)
    own = x.script.OWN_METHODS
    return {name: method for name, method in methods if not name.startswith("_") and name not in own}


def environment_faults(x):
    """No reset, methods that forget their result, or tools and data of a recipe for another environment."""
    found = environment_class(x)
    if not hasattr(found, "reset"):
        yield error(f"{x.args.environment} has no method reset, which gets the columns of the task")
    for name in ("reply", "is_over", "get_reward"):
        method = getattr(found, name, None)
        if returns_nothing(method) and inspect.unwrap(method).__code__.co_names:  # one with pass has no names
            yield error(f"--environment: {name}() returns nothing, which counts as None: return its result")
    recipe = x.script.RECIPES.get(x.args.recipe)
    if recipe is None or not recipe.tools or recipe.environment == x.args.environment:
        return
    if (recipe.tools, recipe.dataset_name) == (x.args.tools, x.args.dataset_name):
        yield error(
            f"--environment {x.args.environment} would get the tools and the data of the recipe "
            f"{x.args.recipe}: name your own --dataset-name, or --tools None to keep the data only"
        )


def tool_faults(name, function):
    """A tool that returns nothing, or whose schema transformers cannot make."""
    if returns_nothing(function):
        prints = "print" in inspect.unwrap(function).__code__.co_names
        text = "prints its result: return it" if prints else "returns nothing"
        yield (error if prints else remark)(f"tool {name} {text}; the policy would read None")
    try:
        own_name = transformers.utils.get_json_schema(function)["function"]["name"]
    except Exception as problem:
        line = short(str(problem), 150)
        yield error(
            f"tool {name} cannot be described to the policy: it needs a docstring and type hints ({line})"
        )
        return
    if own_name != name:
        yield error(
            f"tool {name} has another __name__, {own_name}, by which the policy would call it: make them "
            "equal"
        )


def returns_nothing(function):
    """True if a function has no return (or yield) with a value; False if its source is not known."""
    try:
        [definition] = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError):
        return False
    if not isinstance(definition, ast.FunctionDef):
        return False
    results = (ast.Return, ast.Yield, ast.YieldFrom)
    return not any(isinstance(node, results) and node.value is not None for node in ast.walk(definition))


# Made-up arguments of tools, by their JSON type.
ARGUMENTS = {
    "integer": (1, 0, 50),
    "number": (1.5, 0.0, 50.0),
    "string": ("1", "", "a"),
    "boolean": (True, False, True),
    "array": ([], [1], ["a"]),
    "object": ({}, {"a": 1}, {}),
}
FAULTS_OF_CODE = (AttributeError, NameError, ImportError)  # whatever a policy's arguments are
OTHER_THREAD = re.compile("(main|same) thread")  # in the errors of signals and of sqlite3
UNREADABLE = re.compile(r"\[?<.* at 0x[0-9a-f]+>.*|b['\"].*", re.DOTALL)  # what Python prints of an object


def check_environment(x):
    """Let two trajectories call all tools with made-up arguments, one after the other. Do all calls of a tool
    fail? Can the policy read the results? Does one trajectory change what the other one sees?
    """
    if x.kind != "tools":
        return
    rows = [row for row in x.sample(x.train) if not is_blank(prompt_of(x, row))]
    if not rows:
        return
    start_tools, schemas = x.tools
    with own_modules(), quiet(), watched_process() as process_calls:
        one, other = (x.script.Trajectory({"columns": row}, None) for row in (rows[0], rows[-1]))
        beginnings = start_tools([one])
        if any(schema["function"]["name"] not in one.tools for schema in schemas):
            return  # another __name__: tool_faults says which
        before = shared_values(one)
        beginnings += start_tools([other])
        changed = changes(before, one)
        for text in beginnings:
            yield from text_faults(x, "reset", text)
        reply = other.ask("reply", "")  # only once, because a simulated user may cost something
        yield from method_faults("reply('')", reply)
        yield from text_faults(x, "reply", returned(reply))
        calls = play(x, one)
        before = shared_values(one)
        play(x, other)
        changed += changes(before, one)
        for trajectory in (one, other):
            yield from method_faults("close()", trajectory.ask("close"))
    for schema in schemas:
        name = schema["function"]["name"]
        yield from result_faults(x, name, calls[name])
    [is_over], [get_reward] = calls["is_over"], calls["get_reward"]
    yield from method_faults("get_reward()", get_reward)
    yield from method_faults("is_over()", is_over)
    if returned(is_over) not in (True, False, None):
        yield error(f"--environment: is_over returned {short(repr(returned(is_over)))}: return True or False")
    yield from sharing_faults(x, changed, rows)
    for call, place in process_calls.items():
        if x.args.tool_workers > 1:
            yield error(
                f"{place} calls {call}, which holds for all threads, so tools that run at once would disturb "
                "each other: use a process as in examples/python_tool.py, or --tool-workers 1"
            )


def play(x, trajectory):
    """Call each tool three times with made-up arguments, then is_over and get_reward, as the script would.

    -> dict: name -> list of Future, which are done
    """
    end, calls = time.time() + QUICK_SECONDS, {}
    for schema in x.tools[1]:
        function = schema["function"]
        name = function["name"]
        calls[name] = []
        for i in range(3):
            tool = partial(trajectory.tools[name], **made_up_arguments(function, i))
            job = trajectory.worker.submit(tool)
            calls[name].append(job)
            if not x.script.is_in_time(job, end - time.time()):
                if job.cancelled():
                    trajectory.worker.replace_thread()
                raise NotChecked(f"calls of tools, because they took longer than {QUICK_SECONDS:g} seconds")
    for name in ("is_over", "get_reward"):
        calls[name] = [trajectory.ask(name)]
        calls[name][0].exception()  # waits
    return calls


def returned(job):
    """What a call returned; None after an exception."""
    return job.result() if job.exception() is None else None


def made_up_arguments(function, i):
    """Arguments number i of a function, from its schema. -> dict"""
    parameters = function["parameters"]
    return {name: made_up(parameters["properties"][name], i) for name in parameters.get("required", [])}


def made_up(schema, i):
    """Value number i for an argument with this schema."""
    values = schema.get("enum") or ARGUMENTS.get(str(schema.get("type")), ARGUMENTS["string"])
    return values[i % len(values)]


def line_of(problem):
    """An exception on one line."""
    return f"{type(problem).__name__}: {short(str(problem), 150)}"


@contextlib.contextmanager
def watched_process():
    """Note what threads meanwhile do to the whole process. -> dict: what they called -> file and line"""
    seen = {}

    def noting(call, function):
        def noted(*inputs):
            caller = sys._getframe(1)
            if threading.current_thread() is not threading.main_thread():
                seen[call] = f"{Path(caller.f_code.co_filename).name}, line {caller.f_lineno},"
            return function(*inputs)

        return noted

    redirect = contextlib.redirect_stdout
    with (
        mock.patch.object(os, "chdir", noting("os.chdir()", os.chdir)),
        mock.patch.object(redirect, "__enter__", noting("redirect_stdout()", redirect.__enter__)),
    ):
        yield seen


def text_faults(x, name, text):
    """What reset and reply return must be a text, and should not be cut off, least of all the task."""
    if not isinstance(text, str | None):
        yield error(f"--environment: {name} returned {short(repr(text))}: return a text, or None")
    elif text and num_tokens(x, text) > x.args.max_tool_tokens:
        yield (error if name == "reset" else remark)(
            f"--environment: {name} returns {num_tokens(x, text)} tokens, of which the policy would read the "
            f"first --max-tool-tokens {x.args.max_tool_tokens}: raise it"
        )


def num_tokens(x, text):
    return len(x.tokenizer(text, add_special_tokens=False).input_ids)


def method_faults(call, job):
    """An exception in a method that is no tool. job: the call, in the thread of its trajectory"""
    if job.exception() is not None:
        yield error(f"--environment: {call} ends the run: {line_of(job.exception())}")


def result_faults(x, name, jobs):
    """Calls of a tool that all fail, and results that the policy cannot read. jobs: its calls"""
    results = [job.result() for job in jobs if job.exception() is None]
    problems = [job.exception() for job in jobs if job.exception() is not None]
    for problem in problems:
        if OTHER_THREAD.search(str(problem)):
            yield error(
                f"tool {name} does not work in a thread, where tools run: {line_of(problem)}. Open a "
                "connection of sqlite3 in the function or in reset; use --tool-timeout instead of a signal"
            )
            return
    if not results:
        # None is what a search for the arguments may have found.
        is_code = all(isinstance(one, FAULTS_OF_CODE) and "'NoneType'" not in str(one) for one in problems)
        yield (error if is_code else remark)(
            f"all {len(jobs)} calls of {name} with made-up arguments fail: {line_of(problems[0])}"
        )
    for result in results:
        if not isinstance(result, str) and UNREADABLE.fullmatch(str(result)):
            yield error(
                f"tool {name} returns an object of type {type(result).__name__}; the policy would read "
                f"{short(str(result))}: return a text"
            )
            return
    longest = max((num_tokens(x, str(result)) for result in results), default=0)
    if longest > x.args.max_tool_tokens:
        yield remark(
            f"tool {name} returned {longest} tokens, of which the policy would read the first "
            f"--max-tool-tokens {x.args.max_tool_tokens}"
        )


# ---- State that trajectories share -------------------------------------------------------------------------

PLACES = {
    "class": "belongs to the class",
    "object": "is one object for all of them (a default argument, or a value of the module)",
    "module": "belongs to the module",
}


def shared_values(trajectory):
    """The values that the tools of a trajectory see: of its environment, of its class, and of their files.

    -> dict: (place, name) -> str
    """
    environment, values = trajectory.environment, {}
    for one in type(environment).__mro__[-2::-1]:  # without object, and so that a class replaces its parents
        values |= {("class", name): value for name, value in vars(one).items()}
    values |= {("object", name): value for name, value in getattr(environment, "__dict__", {}).items()}
    for function in (getattr(environment, "reset", None), *trajectory.tools.values()):
        names = getattr(inspect.unwrap(function), "__globals__", {})
        values |= {("module", name): value for name, value in names.items()}
    shown = reprlib.Repr()
    shown.maxlist = shown.maxdict = shown.maxset = shown.maxstring = shown.maxother = 1000
    return {place: shown.repr(value) for place, value in values.items() if not place[1].startswith("__")}


def changes(before, trajectory):
    """What has changed since shared_values(trajectory) was before. -> list of (place, name)"""
    after = shared_values(trajectory)
    return [place for place in before if before[place] != after.get(place)]


def sharing_faults(x, changed, rows):
    """changed: values (place, name) of one trajectory that another one has changed. A cache or a counter may
    change if no result shows it. A public value of an environment should be its own.
    """
    unclear = [(place, name) for place, name in changed if place == "module" or name.startswith("_")]
    is_seen = unclear and x.is_light and results_depend_on_others(x, rows)
    for place, name in changed:
        text = f"reset or a call of one trajectory changes {name} of all trajectories: it {PLACES[place]}"
        if (place, name) in unclear and not is_seen:
            yield remark(f"{text}. That is right only for a cache or a counter")
        elif x.args.environment:
            yield error(f"--environment: {text}. Make a new one in reset, as self.{name}")
        else:
            yield error(f"--tools: {text}, and later results show it. Use --environment")


def results_depend_on_others(x, rows):
    """True if a trajectory reads something else after another one has played, and the same each time alone:
    so the difference is not chance.
    """
    alone, alone_again = answers_of_first(x, rows[:1]), answers_of_first(x, rows[:1])
    return alone == alone_again != answers_of_first(x, [rows[0], rows[-1]])


def answers_of_first(x, rows):
    """Import the tools afresh, start a trajectory for each row, and let the first one play last.

    -> what its tools and its environment answer, a list of str
    """
    with own_modules(), quiet():
        start_tools, _ = x.script.load_tools(replace(x.args, tool_workers=1))
        trajectories = [x.script.Trajectory({"columns": row}, None) for row in rows]
        start_tools(trajectories)
        for trajectory in reversed(trajectories):
            calls = play(x, trajectory)
        for trajectory in trajectories:
            trajectory.ask("close").exception()  # waits
    jobs = itertools.chain(*calls.values())
    return [str(job.result()) if job.exception() is None else line_of(job.exception()) for job in jobs]


# ---- Chat templates of tools -------------------------------------------------------------------------------

PROBE = {  # a tool that nobody has, to see what the chat template makes of it
    "name": "weigh_fruit",
    "description": "Weigh a fruit.",
    "parameters": {
        "type": "object",
        "properties": {
            "thing": {"type": "string", "description": "a name"},
            "count": {"type": "integer", "description": "a number"},
        },
        "required": ["thing", "count"],
    },
}
PROBE_SCHEMA = {"type": "function", "function": PROBE}
PROBE_CALL = {"name": "weigh_fruit", "arguments": {"thing": "a red apple", "count": 7}}


def check_known_tools(x):
    """A policy calls only tools that it knows: from the chat template, from a prompt, or from fine-tuning."""
    if x.kind != "tools":
        return
    _, schemas = x.tools
    names = [schema["function"]["name"] for schema in schemas]
    template = str(x.tokenizer.chat_template or "")
    prompt = x.script.render_chat(x.tokenizer, [QUESTION], is_prompt=True, schemas=schemas)
    for roles, messages in prompts_by_roles(x).items():
        text = x.script.render_chat(x.tokenizer, messages, is_prompt=True, schemas=schemas)
        lost = [name for name in names if name in prompt and name not in text]
        if lost:
            yield error(
                f"the chat template shows the tools ({listed(lost)}) to a user alone, but not in a prompt "
                f"with the roles {listed(roles)}"
            )
            return
    prompts = [str(prompt_of(x, row)) for row in x.sample(x.train)]
    texts = [*re.findall(r"\{#.*?#\}", template, re.DOTALL), *prompts]
    hidden = [name for name in names if name not in prompt]
    unknown = [name for name in hidden if not any(re.search(rf"\b{name}\b", text) for text in texts)]
    if unknown:
        yield error(
            f"the policy does not know the tools ({listed(unknown)}): the chat template does not show them, "
            "and no prompt names them. Use a model whose template does, or name them in --system-prompt; if "
            f"fine-tuning taught them, say so in a comment of the template: {{# tools: {listed(unknown)} #}}"
        )
    elif hidden:
        yield remark(
            f"the chat template does not show the tools ({listed(hidden)}) in the prompt: right only if "
            "fine-tuning taught them, or if the prompts say how to call them"
        )


def prompts_by_roles(x):
    """For each sequence of roles, the first prompt that has it. -> dict: tuple of roles -> messages"""
    found = {}
    for row in x.sample(x.train):
        prompt = prompt_of(x, row)
        if is_messages(prompt):
            found.setdefault(roles_of(prompt), prompt)
    return found


def check_tool_format(x):
    """A call that the chat template writes must be read back, and what follows it must be as expected."""
    if x.kind != "tools":
        return
    turn = {"role": "assistant", "content": x.script.MARK}
    try:
        text = x.script.render_chat(x.tokenizer, [QUESTION, turn, result_of("72")], is_prompt=True)
    except Exception as problem:
        yield error(
            f"the chat template cannot write the result of a tool after a turn ({short(str(problem), 150)})"
        )
        return
    if text.count(x.script.MARK) != 1:
        yield error("the chat template changes or drops what the assistant wrote before a tool's result")
        return
    turn_format = x.script.TurnFormat(x.tokenizer, torch.tensor(sorted(x.stop_ids)), [PROBE_SCHEMA])
    yield from turn_faults(x, turn_format)
    yield from call_faults(x, turn_format)
    yield from pair_faults(x, turn_format)


def turn_faults(x, turn_format):
    """A template that writes a turn otherwise once a result follows, or that does not write the result."""
    if turn_format.after_turn([result_of("1")]) == turn_format.after_turn([result_of("2")]):
        yield error("the chat template does not write the results of tools")
    if x.stop_ids and turn_format.end not in x.stop_ids:
        end = x.tokenizer.decode(turn_format.end)
        yield error(
            f"the chat template ends a turn with {end!r}, which must be a stop token (--stop-token-id)"
        )


def pair_faults(x, turn_format):
    """A template that needs more of a result than its text, or that does not write two of them."""
    if x.flag("environment") and hasattr(environment_class(x), "reply"):
        end, *_ = turn_format.ids_after_text([{"role": "user", "content": "1"}])
        if end != turn_format.end:
            texts = [x.tokenizer.decode(token) for token in (turn_format.end, end)]
            yield error(
                f"the chat template ends a turn with {texts[0]!r} before a result, and with {texts[1]!r} "
                "before what reply returns"
            )
    one, two, three = map(result_of, "123")
    try:
        pairs = [turn_format.after_turn(pair) for pair in ([one, two], [one, three], [three, two])]
    except Exception as problem:
        text = "the chat template cannot write the results of two calls in one turn"
        yield error(f"{text} ({short(str(problem), 150)})")
        return
    if pairs[0] in pairs[1:] and pairs[1] != pairs[2]:
        yield error("the chat template writes only one of the results of two calls in one turn")
    for key, value in (("name", PROBE["name"]), ("tool_call_id", "a1b2c3d4e")):
        with contextlib.suppress(Exception):
            if turn_format.after_turn([one | {key: value}]) != turn_format.after_turn([one]):
                yield error(f"the chat template writes {key} of a result, which this script does not give it")


def result_of(text):
    return {"role": "tool", "content": text}


def call_faults(x, turn_format):
    """A call with a text and a number: written by the template, cut out, and read by the script."""
    failures = failures_with(x, turn_format, PROBE_CALL)
    if [*failures] == ["raised"]:  # perhaps it cannot write numbers
        only_text = {"thing": PROBE_CALL["arguments"]["thing"]}
        failures = failures_with(x, turn_format, PROBE_CALL | {"arguments": only_text})
    if not failures:
        yield from nested_faults(x, turn_format)
        return
    prompt = x.script.render_chat(x.tokenizer, [QUESTION], is_prompt=True, schemas=[PROBE_SCHEMA])
    if [*failures] == ["dropped"] and PROBE["name"] not in prompt:
        yield remark(
            "the chat template neither shows tools nor writes calls: they are read as "
            '<tool_call>{"name": ..., "arguments": {...}}</tool_call>'
        )
        return
    problem = next(failures[kind] for kind in ("format", "end", "raised", "dropped") if kind in failures)
    yield error(
        f"the chat template {problem}. grpo_tools.py reads <tool_call>{{JSON}}</tool_call>, or what "
        "response_template in tokenizer_config.json describes"
    )


def nested_faults(x, turn_format):
    """Lists and dicts as arguments, if the tools have such ones: are they read back as texts?"""
    properties = [schema["function"]["parameters"]["properties"].values() for schema in x.tools[1]]
    kinds = {str(one.get("type")) for one in itertools.chain(*properties)}
    for kind, value in (("array", ["a", "b"]), ("object", {"a": "b"})):
        if kind not in kinds:
            continue
        function = copy.deepcopy(PROBE)
        function["parameters"]["properties"]["parts"] = {"type": kind, "description": "parts"}
        schemas = [{"type": "function", "function": function}]
        own_format = x.script.TurnFormat(x.tokenizer, torch.tensor(turn_format.stops), schemas)
        call = PROBE_CALL | {"arguments": PROBE_CALL["arguments"] | {"parts": value}}
        for failure in [*failures_with(x, own_format, call).values()][:1]:
            yield error(f"an argument of the type {kind}: the chat template {failure}")


def failures_with(x, turn_format, expected):
    """Why a call is not read back. -> dict: kind -> text; empty if it is"""
    render = partial(x.script.render_chat, x.tokenizer, is_prompt=True, schemas=turn_format.schemas)
    begin, mark = render([QUESTION]), x.script.MARK
    _, end = render([QUESTION, {"role": "assistant", "content": mark}, result_of("72")]).split(mark)
    failures = {}
    for message in messages_with(expected):
        try:
            text = render([QUESTION, message, result_of("72")])
        except Exception as problem:
            failures.setdefault("raised", f"cannot write a call ({short(str(problem), 150)})")
            continue
        turns = [text.removesuffix(end).removeprefix(start) for start in starts_of(begin, text)]
        if "red apple" not in text:
            failures.setdefault("dropped", "does not write calls")
        elif not text.endswith(end):
            failures.setdefault("end", f"goes on otherwise after a call: {short(text[-150:], 150)}")
        elif any(calls_in(x, turn_format, turn) == [expected] for turn in turns):
            return {}
        else:
            failures.setdefault("format", f"writes calls that are not read: {short([*turns, text][0], 120)}")
    return failures


def messages_with(call):
    """Messages with this call. Some templates need its arguments as a JSON text, or a thought before it."""
    for arguments in (call["arguments"], json.dumps(call["arguments"])):
        for thought in ({}, {"reasoning_content": "Hm."}):
            calls = [{"type": "function", "function": call | {"arguments": arguments}}]
            yield {"role": "assistant", "content": "", "tool_calls": calls, **thought}


def starts_of(begin, text):
    """What of a rendered chat comes before the turn: the prompt, perhaps without a thought that it opens."""
    starts = [begin, begin.rpartition("<think>")[0]]
    return [start for start in starts if start and text.startswith(start)]


def calls_in(x, turn_format, turn):
    """The calls that the script reads in the text of a turn. -> list, None for what is no JSON"""
    tokens = x.tokenizer(turn, add_special_tokens=False).input_ids
    _, calls, _ = turn_format.read_turn([*tokens, turn_format.end])
    return [json_of(call) for call in calls]


def json_of(text):
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


# ---- Memory ------------------------------------------------------------------------------------------------


def memory(x):
    """About how much memory a run needs, part by part, in bytes (docs/scale.md has the whole arithmetic).

    -> dict: part -> bytes
    """
    args, model = x.args, x.model
    config = model.config.get_text_config()
    parameters = sum(p.numel() for p in model.parameters())
    width = getattr(config, "hidden_size", None) or getattr(config, "dim", 0)
    layers = getattr(config, "num_hidden_layers", None) or getattr(config, "n_layers", 0)
    is_bf16 = torch.cuda.is_available() and args.dtype != "float32" or args.dtype == "bfloat16"
    frozen = 1 if x.flag("load_in_8bit") else 2 if is_bf16 else 4  # bytes of a frozen weight
    trained = parameters
    if args.lora_r:
        names = args.lora_target_modules.replace(" ", "").split(",")
        trained = 0
        for name, module in model.named_modules():
            if isinstance(module, (torch.nn.Linear, transformers.pytorch_utils.Conv1D)):
                if names == ["all-linear"] or name.rpartition(".")[2] in names:
                    trained += args.lora_r * sum(module.weight.shape)
    states = 0 if args.optimizer.endswith("SGD") else 1 if args.optimizer.endswith("RMSprop") else 2
    bytes_of_state = 1 if "8bit" in args.optimizer else 4
    parts = {
        "weights": 4 * trained + (frozen * parameters if args.lora_r else 0),
        "gradients": 4 * trained,
        "optimizer": states * bytes_of_state * trained,
    }
    needs_reference = x.kind in ("ppo_sentiment", "ppo_dialog", "rloo") or (x.flag("kl_coef") or 0) > 0
    if x.is_rl and needs_reference and not args.lora_r:
        parts["reference"] = frozen * parameters
    rows = args.per_device_train_batch_size * (2 if x.kind in ("dpo", "reward_model") else 1)
    tokens = rows * longest_text(x)[0]
    per_layer = tokens * width * (4 * 4 + (2 if is_bf16 else 4) * 12)  # inputs of norms, and of products
    checkpointed = layers * tokens * width * 4 + per_layer
    parts["activations"] = checkpointed if args.gradient_checkpointing else layers * per_layer
    if x.kind != "reward_model":
        logits = rows * (x.flag("response_length") or longest_text(x)[0]) * config.vocab_size
        parts["logits"] = 3 * 4 * min(logits, 2**26 if torch.cuda.is_available() else 2**25)
    if x.is_rl:
        heads = getattr(config, "num_attention_heads", 1) or 1
        kv_width = width * (getattr(config, "num_key_value_heads", None) or heads) // heads
        cached = min(args.local_rollout_forward_batch_size, x.batch // x.world) * longest_text(x)[0]
        parts["KV cache"] = 2 * layers * kv_width * cached * (2 if is_bf16 else 4)
    return parts


def available_memory():
    """-> bytes, and what has them"""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory, "the GPU"
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine"


def check_memory(x):
    """Whether the run fits. It is arithmetic, so only what cannot fit in any case is an error."""
    parts, (available, where) = memory(x), available_memory()
    least = parts["weights"] + parts["optimizer"]
    total = sum(parts.values())
    if least > available:
        yield error(
            f"weights and optimizer need {least / GB:.0f} GB, and {where} has {available / GB:.0f} GB: use "
            "--lora-r 16, or a smaller model (docs/scale.md)"
        )
    elif total > 0.9 * available:
        largest = max(parts, key=parts.get)
        yield remark(
            f"the run needs about {total / GB:.0f} GB, most of it {largest}, and {where} has "
            f"{available / GB:.0f} GB: see docs/running.md, Memory"
        )


# ---- All checks, in the order of the pipeline --------------------------------------------------------------

CHECKS = [
    *(check_python, check_numbers, check_pairs_of_flags, check_packages, check_paths, check_functions),
    *(check_adapters, check_files, check_splits, check_loading, check_reward_weights),
    *(check_flags_without_effect, check_tools, check_template_options, check_tokenizer, check_chat_texts),
    *(check_messages, check_roles, check_written_messages, check_chat_columns, check_calls),
    *(check_columns_of_one_row, check_begun_answers, check_date, check_preferences, check_shuffled),
    *(check_completions, check_labels),
    *(check_dialogs, check_kept_rows, check_two_bos),
    *(check_held_out, check_amount, check_blank_values, check_unread_columns, check_learned_answers),
    *(check_end_of_answers, check_written_answers, check_beginning_of_answers, check_control_tokens),
    *(check_vocabulary, check_stop_tokens, check_from_config),
    *(check_context, check_logits, check_cache, check_quantized, check_lora, check_shared_layers),
    *(check_critic, check_reward_models, check_column_names, check_rewards, check_judge_of_dpo),
    *(check_system_prompt, check_known_tools, check_tool_format, check_environment, check_memory),
]
# What yields only remarks, so errors() leaves it out.
ONLY_REMARKS = (
    *(check_flags_without_effect, check_amount, check_blank_values, check_unread_columns),
    *(check_learned_answers, check_end_of_answers, check_control_tokens, check_shuffled, check_date),
)


def find(x, checks=None):
    """Run all checks, or some. -> list of Finding, each once"""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns about kernels that nobody uses
    checks = [check for check in checks or CHECKS if not (x.is_quick and check in ONLY_REMARKS)]
    findings = dict.fromkeys(finding for check in checks for finding in run(check, x))
    # The script's own line about a fault may be a part of ours. (But a remark does not replace an error.)
    pairs = itertools.permutations(findings, 2)
    repeated = {one for one, other in pairs if one.kind == other.kind and one.text in other.text}
    return [finding for finding in findings if finding not in repeated]


def run(check, x):
    """The findings of one check. A failure of the check is none, unless it is the user's to fix."""
    found = []
    try:
        for finding in check(x):
            found.append(finding)
    except (Fault, x.script.UserError) as problem:
        found.append(error(str(problem)))
    except NotChecked as problem:
        found.append(Finding("not checked", str(problem)))
    except (Exception, SystemExit) as problem:
        what = check.__name__.removeprefix("check_").replace("_", " ")
        found.append(Finding("not checked", f"{what} ({type(problem).__name__}: {short(str(problem), 150)})"))
    return found


def errors(script, args, checks=None):
    """What is wrong with a run of this script with these flags. -> list of str, one for each error

    For main(): nothing is printed, and nothing is raised. Only some rows are tokenized.
    """
    try:
        findings = find(Inputs(script, args, is_quick=True), checks)
    except Exception:  # a check must never be the reason why a run does not start
        return []
    return [finding.text for finding in findings if finding.kind == "error"]


# ---- The screen --------------------------------------------------------------------------------------------


class Screen:
    """What check.py prints: sections in the order of the pipeline, then the findings."""

    def __init__(self):
        self.console = Console(highlight=False, markup=False, emoji=False)

    def section(self, title, show, x):
        """A heading and what show(x) yields; a line that says why, if that cannot be looked at here."""
        self.console.rule(Text(title, "bold"), align="left", style="dim")
        try:
            for line in show(x):
                self.console.print(line)
        except (Exception, SystemExit, x.script.UserError) as problem:
            why = short(str(problem) or type(problem).__name__, 300)
            self.console.print(Text(f"not shown: {why}", "dim"))

    def findings(self, findings):
        """The findings, errors last, because the end of the output is what one sees."""
        self.console.rule(Text("findings", "bold"), align="left", style="dim")
        styles = {"not checked": "dim", "remark": "yellow", "error": "bold red"}
        for kind, style in styles.items():
            for finding in findings:
                if finding.kind == kind:
                    self.console.print(Text.assemble((f"{kind}: ", style), finding.text))
        counts = Counter(finding.kind for finding in findings)
        numbers = [f"{counts[kind]} {kind}{'s' * (counts[kind] != 1)}" for kind in ("error", "remark")]
        self.console.print(", ".join(numbers))


def show_batch(x):
    args = x.args
    accumulated = args.gradient_accumulation_steps
    unit = "responses" if x.is_rl else "pairs" if x.kind == "dpo" else "rows"
    steps = f"{args.per_device_train_batch_size} {unit} per pass x {accumulated} accumulated"
    if x.is_rl:
        steps += f" x {args.num_mini_batches} minibatches"
    steps += f" x {x.world} processes = {x.batch} {unit} per update"
    if x.group > 1:
        steps += f" = {x.batch // x.group} prompts x {x.group}"
    yield f"recipe {args.recipe}: {x.policy_name} on {args.dataset_name}"
    if x.not_taken:
        names = listed(x.not_taken, 20)
        yield f"not taken from the recipe, because --dataset-name is given: {names}"
    yield steps
    optimizer_steps = x.num_updates
    if x.is_rl:
        optimizer_steps *= args.num_ppo_epochs * args.num_mini_batches
    prompts = x.num_updates * x.batch / x.group
    is_sample = len({id(example.row) for example in x.examples("train")}) < len(x.train)
    about = "about " if is_sample and not x.is_rl else ""
    yield (
        f"{about}{x.num_updates:,} updates, {about}{optimizer_steps:,} optimizer steps, "
        f"{plain(prompts / max(1, x.num_rows))} passes"
    )


def show_data(x):
    for flag, name in x.data_sets.items():
        train, held_out = x.splits(name)
        files = [path.name for path in x.files_read[name]]
        splits = x.other_splits.get(name, {})
        numbers = f"{len(train)} training, {len(held_out)} held out"
        yield f"{flag_name(flag)} {name}: {listed(files or splits)} -> {numbers}"
        folder = find_path(x, name)
        if folder is not None and folder.is_dir() and files:
            others = [path.name for path in sorted(folder.iterdir()) if path.is_file()]
            others = [other for other in others if other not in files]
            if others:
                yield f"  not read: {listed(others)}"
    table = Table(title=f"columns of {x.args.dataset_name}", title_justify="left")
    for heading in ("column", "type", "empty", "different", "the first value"):
        table.add_column(heading, overflow="fold")
    for column in x.columns:
        values = [row.get(column) for row in x.rows]
        kinds = Counter("messages" if is_messages(v) else type(v).__name__ for v in values if v is not None)
        different = len({repr(value) for value in values})
        empty = sum(map(is_blank, values))
        first = next((value for value in values if not is_blank(value)), "")
        table.add_row(column, listed(kinds), str(empty), str(different), short(first, 60))
    yield table
    table = Table(title="tokens of what is used", title_justify="left")
    for heading in ("split", "looked at", "used", "shortest", "median", "longest"):
        table.add_column(heading, justify="left" if heading == "split" else "right")
    for split in ("train", "held-out"):
        examples = x.examples(split)
        lengths = sorted(len(e.ids) + len(e.answer) for e in examples if e.is_kept)
        if lengths:
            numbers = [lengths[0], lengths[len(lengths) // 2], lengths[-1]]
            table.add_row(split, looked_at(x, split, examples), str(len(lengths)), *map(str, numbers))
    yield table


def looked_at(x, split, examples):
    """How many examples were made, and whether that is a sample of the rows."""
    rows = x.rows_of(split)
    is_sample = len({id(example.row) for example in examples}) < len(rows)
    return f"{len(examples)} (a sample of {len(rows):,} rows)" if is_sample else str(len(examples))


def show_tokens(x):
    """One example, token by token."""
    example = next(example for example in x.examples("train") if example.is_kept)
    tokenizer, stop_ids = x.tokenizer, x.stop_ids if x.kind != "reward_model" else set()
    special = special_ids(tokenizer)
    yield (
        f"{type(tokenizer).__name__} of {x.tokenizer_name}: {len(tokenizer):,} tokens; BOS "
        f"{tokenizer.bos_token!r}, EOS {tokenizer.eos_token!r}, pad {tokenizer.pad_token!r}, chat template: "
        f"{'yes' if tokenizer.chat_template else 'no'}"
    )
    if stop_ids or x.is_rl:
        stops = [tokenizer.decode([i]) for i in sorted(stop_ids)]
        yield f"a response ends at {listed(map(repr, stops)) if stops else 'its longest length only'}"
    yield f"{x.place(example.row)}, {len(example.ids)} tokens:"
    learned = None
    if example.labels is not None:
        learned = [label != -100 for label in example.labels]
        yield Text.assemble(("green: learned", "green"), "   ", ("control token", "reverse"))
    yield marked(tokenizer, example.ids, special, learned)
    if example.answer:
        yield Text("chosen:" if example.other is not None else "reference:")
        yield marked(tokenizer, example.answer, special, [True] * len(example.answer))
    if example.other:
        yield Text("rejected:")
        yield marked(tokenizer, example.other, special, None)


def marked(tokenizer, ids, special, learned, most=160):
    """Tokens as a text, with bars between them; control tokens reversed, what is learned in green."""
    text = Text()
    for number, i in enumerate(list(ids)[:most]):
        style = "green" if learned and learned[number] else "dim" if learned else ""
        if i in special:
            style = f"{style} reverse".strip()
        text.append(tokenizer.decode([i]).replace("\n", "\\n"), style)
        text.append("|", "bright_black")
    if len(ids) > most:
        text.append(f" ... {len(ids) - most} more tokens", "dim")
    return text


def show_rewards(x):
    """The reward functions on the first rows, with the reference and with an empty response."""
    for flag, name in reward_models(x).items():
        config = x.config_of(name)
        outputs = listed(labels_of(config))
        yield f"{flag_name(flag)} {name}: {config.model_type}, outputs {outputs} (not called here)"
    yield from reward_tables(x)


@once
def reward_tables(x):
    rows, tables = scored_rows(x)[:2], []
    with own_modules():
        for flag, score in scorers(x).items():
            table = Table(title=f"{flag_name(flag)} {listed(scored_names(x)[flag])}", title_justify="left")
            for heading in ("row", "response", "rewards"):
                table.add_column(heading, overflow="fold")
            references = [reference_of(row) for row in rows]
            for form in (*REFERENCE_FORMS[:2], ""):
                responses = [form.format(reference) for reference in references]
                results = score(rows, responses)
                for i, row in enumerate(rows):
                    if references[i] is not None or not form:
                        rewards = ", ".join(f"{name} {numbers[i]:g}" for name, numbers in results.items())
                        table.add_row(x.place(row), short(responses[i], 40) or "(empty)", rewards)
            tables.append(table)
    return tables


def show_tools(x):
    _, schemas = x.tools
    for schema in schemas:
        function = schema["function"]
        arguments = ", ".join(function["parameters"]["properties"])
        yield f"{function['name']}({arguments}): {short(function['description'], 80)}"
    turn_format = x.script.TurnFormat(x.tokenizer, torch.tensor(sorted(x.stop_ids)), schemas)
    yield "what follows a call, with the result 72 (the policy writes none of it):"
    ids = turn_format.after_turn([result_of("72")])
    yield marked(x.tokenizer, ids, special_ids(x.tokenizer), None)
    example = next(example for example in x.examples("train") if example.is_kept)
    with own_modules(), quiet():
        trajectory = x.script.Trajectory({"columns": example.row}, None)
        [text] = x.tools[0]([trajectory])
        trajectory.ask("close").result()
    if text:
        *earlier, last = example.prompt
        prompt = [*earlier, last | {"content": last["content"] + text}]
        ids = x.script.tokenize_prompt(x.tokenizer, prompt, schemas)
        yield f"{x.place(example.row)}, the prompt with what reset says, {len(ids)} tokens:"
        yield marked(x.tokenizer, ids, special_ids(x.tokenizer), None)


def show_model(x):
    config, parts = x.config, memory(x)
    longest, _ = longest_text(x)
    parameters = sum(p.numel() for p in x.model.parameters())
    yield (
        f"{config.model_type}, {parameters / 1e6:,.1f} M parameters; reads {context_length(config):,} "
        f"tokens, and needs {longest:,}"
    )
    available, where = available_memory()
    yield (
        f"about {sum(parts.values()) / GB:.2f} GB of the {available / GB:.0f} GB of {where}: "
        + ", ".join(f"{name} {size / GB:.2f}" for name, size in parts.items() if size)
    )


SECTIONS = {
    "batch": show_batch,
    "data": show_data,
    "tokens": show_tokens,
    "tools": show_tools,
    "rewards": show_rewards,
    "model": show_model,
}


# ---- Command line ------------------------------------------------------------------------------------------


def import_script(path):
    """A script as a module, under its own name."""
    path = Path(path).resolve()
    if not path.is_file():
        sys.exit(f"check.py: there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # for dataclasses
    spec.loader.exec_module(module)
    return module


def not_taken(x, words):
    """What parse_args drops of a recipe, because it belongs to the recipe's own data. -> list of flags"""
    given = {word.split("=")[0].strip("-").replace("-", "_") for word in words if word.startswith("--")}
    recipe, default = x.script.RECIPES.get(x.args.recipe), x.script.Args()
    if recipe is None or "dataset_name" not in given or "resume" in given:
        return []
    return [
        name
        for name in x.script.OF_DATA
        if name not in given and getattr(recipe, name, None) != getattr(default, name, None)
    ]


def main(argv=None):
    """Check a command line. Exit code: 0 without errors, 1 with errors, 2 if the flags cannot be parsed."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        sys.exit(0 if argv else 2)
    path, *words = argv
    script = import_script(path)
    try:
        kind_of(script)
    except NotChecked as problem:
        sys.exit(f"check.py: {problem}")
    for library in (transformers, script.datasets):
        library.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
    try:
        args = script.parse_args(words)
    except script.UserError as problem:
        print(f"check.py: {problem}", file=sys.stderr)
        sys.exit(2)
    x, screen = Inputs(script, args), Screen()
    x.not_taken = not_taken(x, words)
    findings = find(x)
    for title, show in SECTIONS.items():
        if (title != "tools" or x.kind == "tools") and (title != "rewards" or x.is_rl):
            screen.section(title, show, x)
    screen.findings(findings)
    sys.exit(any(finding.kind == "error" for finding in findings))


if __name__ == "__main__":
    main()
