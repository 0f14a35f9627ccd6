"""Hostile data: a run skips the rows that it cannot use, or it ends in one line before it begins.

Most cases are four rows, one of them damaged. Whether they are read is tested without training. What must be
accepted is also trained on, all of it in one batch.
"""

import io
import json
import shutil

import datasets
import pytest
from conftest import CONTEXT, GROUPS
from run_tools import flags_of, rows_of
from transformers import AutoTokenizer

import check as look

pytest_plugins = ["run_fixtures"]
LONG = 10**5  # characters
GOOD = ["A warm film about a lighthouse.", "A dull film, and too long.", "The best film of the year."]
TALKS = [
    ["Hello, who are you?", "I am Leo.", "Nice."],
    ["Do you like tea?", "Yes, very much."],
    ["Open the door.", "Of course.", "Oh."],
]
ROWS = {  # kind of data -> the good rows, of which the first is copied and damaged
    "text": [dict(text=text, label=i % 2) for i, text in enumerate(GOOD)],
    "completion": [dict(prompt=text, completion=f" {text}") for text in GOOD],
    "pairs": [dict(prompt=text, chosen=" good, I think", rejected=" bad") for text in GOOD],
    "ranking": [dict(prompt=text, responses=[" good", " so so", " bad"]) for text in GOOD],
    "dialog": [dict(dialog=texts, act=[1] * len(texts)) for texts in TALKS],
}
KIND = {
    "sft": "text",
    "reward_model": "text",
    "ppo_sentiment": "text",
    "ppo_dialog": "dialog",
    "rloo_tldr": "completion",
    "grpo_math": "completion",
}
FLAGS = {  # for all cases
    "sft": dict(num_samples=0, packing=False),
    "reward_model": {},
    "ppo_sentiment": dict(num_mini_batches=1, num_ppo_epochs=1, query_min_length=1),
    "ppo_dialog": dict(num_mini_batches=1, num_ppo_epochs=1),
    "rloo_tldr": dict(num_mini_batches=1, num_ppo_epochs=1),
    "grpo_math": dict(num_mini_batches=1, num_ppo_epochs=1, max_prompt_length=200),
}
ACT_NAMES = "a,b,c,d"
REFUSED = ""


def jsonl(rows):
    """Rows as a file of lines of JSON, as Python escapes them."""
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def damaged(kind, column, value):
    """The good rows, then a copy of the first with this value in a column; ...: without the column."""
    row = ROWS[kind][0] | {column: value}
    if value is ...:
        del row[column]
    return [*ROWS[kind], row]


def write_files(folder, files):
    """files: a dict of names and bytes, or a list of rows, for training and held out. -> the folder, a str"""
    if isinstance(files, list):
        files = dict.fromkeys(("train.jsonl", "test.jsonl"), jsonl(files))
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return str(folder)


def check(found, expected):
    """A number of rows, or words of the error. REFUSED: any error."""
    if isinstance(expected, int):
        assert found == expected
    else:
        assert isinstance(found, str) and expected in found, found


@pytest.fixture
def keep(scripts, small, world, tmp_path):
    """keep(script, files, **flags) -> the number of training rows that a script keeps, or why it does not
    begin: the errors that check.py finds before it loads a model, or its own."""

    def read(script, files, **flags):
        module = scripts[script]
        args = small(script, dataset_name=write_files(tmp_path / "data", files), **FLAGS[script] | flags)
        errors = "\n".join(look.errors(module, args))
        if errors:
            return errors.replace(str(tmp_path), "")  # its name has words of the test's name
        tokenizer = AutoTokenizer.from_pretrained(
            world.classifier() if script == "reward_model" else world.lm()
        )
        try:
            if script == "reward_model":
                return len(module.load_data(args, tokenizer)[0])
            splits = module.load_splits(args.dataset_name)
            return [len(read_rows(module, rows, tokenizer, args)) for rows in splits][0]
        except Exception as error:
            return f"{type(error).__name__}: {error}".replace(str(tmp_path), "")

    return read


def read_rows(module, rows, tokenizer, args):
    """What a script makes of the rows of a split."""
    if module.__name__ == "grpo_math":
        return module.load_tasks(rows, tokenizer, args)
    if module.__name__ == "sft":
        documents, _ = module.load_documents(rows, tokenizer, args)
        return documents
    return module.load_prompts(rows, tokenizer, args)


@pytest.fixture
def train_on(scripts, small, tmp_path):
    """train_on(script, rows, batch, **flags): one update on a batch of all rows gives finite metrics."""

    def run(script, rows, batch, **flags):
        data = write_files(tmp_path / "data", rows)
        if hasattr(scripts[script].Args, "total_episodes"):
            flags["total_episodes"] = batch
        args = small(script, dataset_name=data, per_device_train_batch_size=batch, **FLAGS[script] | flags)
        scripts[script].main(flags_of(args))
        [metrics] = rows_of(tmp_path / "run")
        assert all(abs(x) < 1e9 for name, x in metrics.items() if name != "perplexity"), metrics
        assert (tmp_path / "run/model").exists()

    return run


# ---- Strings -----------------------------------------------------------------------------------------------

BLANK = {"empty": "", "spaces": "   ", "newlines": "\n\t \r\n", "no-break-space": "\u00a0\u2003"}
STRINGS = BLANK | {
    "zero-width": "\u200b\u200d\u2060",
    "emoji": "🎬 👨\u200d👩\u200d👧 🏳️\u200d🌈 a film",
    "nul": "a film\0with a hole",
    "right-to-left": "\u202e فيلم رائع עברית",
    "lines": "a\r\nb\u2028d\x85e",
    "control": "\x1b[2J\x07 a film \x7f\x9b",
    "byte-order-mark": "\ufeffA film.",
    "japanese": "映画はとても面白かったです。" * 3,
    "json": '{"text": [1, 2]}',
    "end-of-text": "<|endoftext|><|pad|> a film <|endoftext|>",
    "markup": "[bold]a film[/nonsense] {x} %s",
    "long": "a film " * (LONG // 7),
}
SKIPPED_STRINGS = {  # script, kind -> column -> the strings whose row is skipped
    ("sft", "text"): dict(text=[*BLANK]),
    ("sft", "completion"): dict(prompt=["long"], completion=[*BLANK]),  # "long": nothing fits
    ("reward_model", "text"): dict(text=[*BLANK]),
    ("reward_model", "pairs"): dict(prompt=[], chosen=[*BLANK], rejected=[*BLANK]),
    ("ppo_sentiment", "text"): dict(text=[*BLANK]),
    ("rloo_tldr", "completion"): dict(prompt=[*BLANK, "long"], completion=[]),
    ("grpo_math", "completion"): dict(prompt=[*BLANK, "long"]),
}


@pytest.mark.parametrize("script, kind", SKIPPED_STRINGS)
def test_strings(keep, train_on, world, script, kind):
    """Each string in each column. Whitespace alone is no text."""
    skipped = SKIPPED_STRINGS[script, kind]
    rows = list(ROWS[kind])
    for column in skipped:
        rows += [ROWS[kind][0] | {column: text} for text in STRINGS.values()]
    flags = dict(model_name_or_path=world.lm()) if kind == "pairs" else {}
    kept = len(rows) - sum(map(len, skipped.values()))
    assert keep(script, rows, **flags) == kept
    responses = 2 if script in GROUPS else 1
    train_on(script, rows, kept * responses, **flags)


def test_null_is_no_text(keep):
    """Such a row is skipped. To RLOO, a reference that is null is none."""
    rows = damaged("text", "text", None)
    assert [keep(script, rows) for script in ("sft", "reward_model", "ppo_sentiment")] == [3, 3, 3]
    for column in ("prompt", "completion"):
        rows = damaged("completion", column, None)
        assert keep("sft", rows) == 3
        for script in GROUPS:
            assert keep(script, rows) == (3 if column == "prompt" else 4)


# ---- Files -------------------------------------------------------------------------------------------------


def csv(rows):
    """Rows as a file with commas."""
    buffer = io.BytesIO()
    datasets.Dataset.from_list(rows).to_csv(buffer)
    return buffer.getvalue()


TEXTS = ROWS["text"]
LINES = jsonl(TEXTS)
EXTRA = [row | dict(a=i, b=[{"c": None}]) for i, row in enumerate(TEXTS)]
FILES = {  # name -> files of a folder; the rows that are kept (one is held out without test), or the line
    "empty file": ({"train.jsonl": b""}, REFUSED),
    "cut in the middle": ({"train.jsonl": LINES[:40] + b"\n" + LINES}, "train.jsonl, line 1"),
    "byte order mark": ({"train.jsonl": b"\xef\xbb\xbf" + LINES}, 2),
    "crlf and blank lines": ({"train.jsonl": LINES.replace(b"\n", b"\r\n\r\n")}, 2),
    "one row": ({"train.jsonl": jsonl(TEXTS[:1])}, REFUSED),
    "one held-out row": ({"train.jsonl": LINES, "test.jsonl": jsonl(TEXTS[:1])}, 3),
    "only test": ({"test.jsonl": LINES}, REFUSED),
    "empty test": ({"train.jsonl": LINES, "test.jsonl": b""}, "test.jsonl is not read"),
    "other test": ({"train.jsonl": LINES, "test.jsonl": b'{"x": 1}\n{"x": 2}\n'}, "no held-out row can"),
    "extra columns": ({"train.jsonl": jsonl(EXTRA)}, 2),
}


@pytest.mark.parametrize("name", FILES)
def test_files(keep, name):
    """What is not train.jsonl, load_dataset may read. All scripts share this code."""
    files, expected = FILES[name]
    check(keep("sft", files), expected)


def lines_of(rows):
    """The text of each row, or all its values as one string: a file without columns."""
    return "".join(" ".join(map(str, row.values())) + "\n" for row in rows).encode()


COLUMNS = {  # name -> files made of a script's good rows; what each script of KIND makes of them
    "lines of text": (lambda rows: {"train.txt": lines_of(rows)}, [2, REFUSED, 2, REFUSED, REFUSED, REFUSED]),
    "csv": (lambda rows: {"train.csv": csv(rows), "test.csv": csv(rows)}, [3, 3, 3, REFUSED, 3, 3]),
    "first column alone in a row": (
        lambda rows: {"train.jsonl": jsonl([*rows, dict([*rows[0].items()][:1])])},
        [3, "label None", 3, 4, 3, 3],
    ),
}


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("number, script", [*enumerate(KIND)], ids=KIND)
def test_columns(keep, name, number, script):
    """Columns that are missing, empty or of another type."""
    files, expected = COLUMNS[name]
    check(keep(script, files(ROWS[KIND[script]])), expected[number])


@pytest.mark.parametrize("value", [None, 1, {"a": "film"}, ""], ids=repr)
@pytest.mark.parametrize("script", KIND)
def test_rows_without_anything_to_use(keep, script, value):
    """No run begins if all rows are like that, or all that are held out."""
    rows = ROWS[KIND[script]]
    useless = [dict.fromkeys(row, value) for row in rows]
    check(keep(script, useless), REFUSED)
    check(keep(script, {"train.jsonl": jsonl(rows), "test.jsonl": jsonl(useless)}), REFUSED)


@pytest.mark.parametrize("script, kind", [("sft", "completion"), ("reward_model", "pairs")])
@pytest.mark.parametrize("value", [1, {"a": "film"}], ids=repr)
def test_what_is_no_text(keep, script, kind, value):
    """It is not made one."""
    *_, last = ROWS[kind][0]
    check(keep(script, damaged(kind, last, value)), REFUSED)


# ---- Labels ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, "a word", [1]], ids=repr)
def test_what_is_no_label(keep, value):
    """It is not made a class of its own."""
    check(keep("reward_model", damaged("text", "label", value)), REFUSED)


# ---- Dialogs and acts --------------------------------------------------------------------------------------

USED_DIALOGS = [
    ["Hello."] * 3,
    ["👋 hello", "\u202eשלום", "\0"],
    ["\u200b"] * 3,
    ["Hello."] * 60,
    ["a", "b " * (LONG // 2), "c"],
    ["<|endoftext|>", " <EOU>", "x <EOU> y"],
]
SKIPPED_DIALOGS = [[], ["Hello."], None, ["Hello.", None, "Yes."], ["Hello.", "  ", "Yes."]]


@pytest.mark.parametrize("script", ["sft", "reward_model", "ppo_dialog"])
def test_dialogs(keep, train_on, world, tmp_path, script):
    """A dialog needs two utterances, none of them blank. sft counts dialogs, the others answers."""
    rows = list(ROWS["dialog"])
    for dialog in USED_DIALOGS + SKIPPED_DIALOGS:
        rows.append(dict(dialog=dialog, act=[1] * len(dialog or ())))
    used = TALKS + USED_DIALOGS
    expected = len(used) if script == "sft" else sum(len(dialog) - 1 for dialog in used)
    flags = dict(label_names=ACT_NAMES) if script == "reward_model" else {}
    if script == "ppo_dialog":  # the classifier reads whole utterances, which its tokenizer must cut
        flags["reward_model_path"] = str(shutil.copytree(world.intents(), tmp_path / "classifier"))
        tokenizer = AutoTokenizer.from_pretrained(world.intents(), model_max_length=CONTEXT)
        tokenizer.save_pretrained(flags["reward_model_path"])
    assert keep(script, rows, **flags) == expected
    train_on(script, rows, expected, **flags)


ACTS = {  # value for three utterances -> the answers that reward_model uses, and ppo_dialog
    "short": ([1], 5, 5),
    "null": (None, 5, 5),
    "with null": ([1, None, 1], 6, 6),
    "missing": (..., 5, 5),
    "zero": ([1, 0, 1], "act 0, but", "act 0, but"),
    "floats": ([1.0, 2.0, 1.0], 7, 7),
    "decimals": ([1, 1.5, 1], "act 1.5, but", "act 1.5, but"),
    "words": (["inform"] * 3, "unsupported operand", "act inform, but"),
}


@pytest.mark.parametrize("name", ACTS)
def test_acts(keep, name):
    """Answers without an act are skipped, what is no act is refused. sft does not read acts."""
    value, of_reward_model, of_ppo_dialog = ACTS[name]
    rows = damaged("dialog", "act", value)
    check(keep("reward_model", rows, label_names=ACT_NAMES), of_reward_model)
    check(keep("ppo_dialog", rows), of_ppo_dialog)
    assert keep("sft", rows) == 4


# ---- Rankings --------------------------------------------------------------------------------------------

USED_RANKINGS = [
    [" good", " bad"],
    [f" {i}" for i in range(9)],
    [" good" * (LONG // 5), " bad"],
]
SKIPPED_RANKINGS = [[], [" good"], None, [" good", ""], [" good", "  "], [" good"] * 3]


def test_rankings(keep, train_on, world):
    """A ranking needs two different responses, none of them empty."""
    good = ROWS["ranking"]
    rows = good + [good[0] | dict(responses=texts) for texts in USED_RANKINGS + SKIPPED_RANKINGS]
    assert keep("reward_model", rows) == 6
    train_on("reward_model", rows, 6, model_name_or_path=world.lm())
