"""Hostile data: whatever stands in a data set, a run ends well and says what it left out, or ends in one line before it began.

A case is a folder with four rows, one of them damaged, or with files that are no data; the held-out rows are the same. The batch is all
rows, so that what is kept is trained on. Expected is the number of rows that are kept, or what the line says.
"""

import copy
import gzip
import io
import json

import datasets
import pytest
from run_tools import flags_of, rows_of

pytest_plugins = ["run_fixtures"]
LONG = 10**6
GOOD = ["A warm film about a lighthouse.", "A dull film, and too long.", "The best film of the year."]
TALKS = [["Hello, who are you?", "I am Leo.", "Nice."], ["Do you like tea?", "Yes, very much."], ["Open the door.", "Of course.", "Oh."]]
ROWS = {  # kind -> the good rows, of which the first is copied and damaged
    "text": [dict(text=text, label=i % 2) for i, text in enumerate(GOOD)],
    "completion": [dict(prompt=text, completion=f" {text}") for text in GOOD],
    "pairs": [dict(prompt=text, chosen=" good, I think", rejected=" bad") for text in GOOD],
    "ranking": [dict(prompt=text, responses=[" good", " so so", " bad"]) for text in GOOD],
    "dialog": [dict(dialog=texts, act=[1] * len(texts)) for texts in TALKS],
}
KIND = {"sft": "text", "reward_model": "text", "ppo_sentiment": "text", "ppo_dialog": "dialog", "rloo_tldr": "completion"}
READERS = {"sft": ["documents"], "reward_model": ["examples", "preferences"], "ppo_sentiment": ["load_queries"],
           "ppo_dialog": ["load_turns"], "rloo_tldr": ["load_posts"]}  # fmt: skip
FEW = {
    "sft": dict(per_device_train_batch_size=4, num_samples=0, packing=False),
    "reward_model": dict(per_device_train_batch_size=4),
    "ppo_sentiment": dict(total_episodes=4, per_device_train_batch_size=4, num_mini_batches=1, num_ppo_epochs=1, query_min_length=1),
    "ppo_dialog": dict(total_episodes=5, per_device_train_batch_size=5, num_mini_batches=1, num_ppo_epochs=1),
    "rloo_tldr": dict(total_episodes=8, per_device_train_batch_size=8, num_mini_batches=1, num_ppo_epochs=1),
}
JSON, UTF8, NO_DATA = "JSON parse error", "'utf-8' codec can't decode byte", "corresponds to no data"


@pytest.fixture(scope="module")
def quick(scripts):
    """Models are read once, and no curves are drawn: a case takes a fraction of a second."""
    with pytest.MonkeyPatch.context() as patch:
        for module in scripts.values():
            made, load = {}, module.load_model

            def cached(auto_class, name, *rest, made=made, load=load, **kwargs):
                key = repr((auto_class.__name__, name, rest, kwargs))
                made[key] = made.get(key) or load(auto_class, name, *rest, **kwargs)
                return copy.deepcopy(made[key])

            patch.setattr(module, "load_model", cached)
            patch.setattr(module.Run, "curves", lambda *_: None)
        yield


@pytest.fixture
def end(quick, scripts, world, small, monkeypatch, capsys, tmp_path):
    """end(script, files, **flags) -> how a run on these files ends: the number of rows that it kept, or its one line on stderr.

    files: a list of rows, for training and held out; or a dict of names and bytes.
    """

    def run(script, files, **changes):
        module, kept, folder = scripts[script], [], tmp_path / "data"
        folder.mkdir()
        given = len(files) if isinstance(files, list) else 0
        files = dict.fromkeys(("train.jsonl", "test.jsonl"), lines(files)) if isinstance(files, list) else files
        for name, content in files.items():
            (folder / name).write_bytes(content)
        for name in READERS[script]:

            def reading(*args, read=getattr(module, name)):  # noqa: B008
                kept.append(read(*args))
                return kept[-1]

            monkeypatch.setattr(module, name, reading)
        args = small(script, dataset_name=str(folder), **FEW[script] | changes)
        capsys.readouterr()
        try:
            module.main(flags_of(args))
        except SystemExit as stop:
            said = capsys.readouterr().err.splitlines()
            assert stop.code == 2 and len(said) == 1 and said[0].startswith(f"{script}.py: "), (stop.code, said)
            assert not (tmp_path / "run").exists(), "half a run is left"
            return said[0]
        rows = rows_of(tmp_path / "run")
        assert rows and (tmp_path / "run/model").exists()
        assert all(abs(x) < 1e9 for row in rows for name, x in row.items() if name != "perplexity"), rows  # nan neither
        if len(kept[0]) < given and script != "ppo_dialog":  # which counts turns
            assert "left out" in capsys.readouterr().out
        return len(kept[0])

    return run


def lines(rows):
    """Rows as a file of lines of JSON, as Python escapes them."""
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def damaged(kind, column, value):
    """The good rows, and the first again with a value in place of a column's; ...: without the column."""
    row = ROWS[kind][0] | {column: value}
    return [*ROWS[kind], {name: x for name, x in row.items() if x is not ...}]


def check(found, expected):
    """A number of rows, or words that the line must have."""
    assert found == expected if isinstance(expected, int) else isinstance(found, str) and expected in found, found


# ---- one text -----------------------------------------------------------------------------------------------------------
BLANK = {"empty": "", "spaces": "   ", "newlines": "\n\t \r\n", "no-break-space": "\u00a0\u2003"}
ODD = {"null": None, "number": 3, "float": 2.5, "bool": True, "list": ["a film"], "object": {"a": "film"}}
TEXTS = BLANK | ODD | {
    "zero-width": "\u200b\u200d\u2060", "one-letter": "a", "emoji": "🎬 👨\u200d👩\u200d👧 🏳️\u200d🌈 a film", "nul": "a film\0with a hole",
    "right-to-left": "\u202e فيلم رائع עברית", "combining": "e\u0301" + "Z\u0351\u036b\u0343\u036a\u0302" * 9,
    "lines": "a\r\nb\u2028d\x85e", "control": "\x1b[2J\x07 a film \x7f\x9b",
    "surrogate": "\ud83d a film \udc00", "non-characters": "a \uffff film \U0010ffff",
    "byte-order-mark": "\ufeffA film.", "japanese": "映画はとても面白かったです。" * 3, "json": '{"text": [1, 2]}',
    "end-of-text": "<|endoftext|><|pad|> a film <|endoftext|>", "markup": "[bold]a film[/nonsense] {x} %s", "long": "a film " * (LONG // 7),
}  # fmt: skip
COLUMNS = {  # script, kind, column -> the texts whose row is left out
    ("sft", "text", "text"): {"empty", *ODD},
    ("sft", "completion", "prompt"): {"long", *ODD},  # --max-length has no room for a token of the completion
    ("sft", "completion", "completion"): {"empty", *ODD},
    ("reward_model", "text", "text"): {"empty", *ODD},
    ("reward_model", "pairs", "prompt"): {*ODD},
    ("reward_model", "pairs", "rejected"): {*BLANK, *ODD},
    ("ppo_sentiment", "text", "text"): {"empty", *ODD},
    ("rloo_tldr", "completion", "prompt"): {"long", *BLANK, *ODD},
    ("rloo_tldr", "completion", "completion"): set(),  # a reference that is no text is none
}


@pytest.mark.parametrize("script, kind, column", COLUMNS)
@pytest.mark.parametrize("name", TEXTS)
def test_a_text(end, world, script, kind, column, name):
    """In a column of strings. A text of spaces is one; where a response or a prompt must say something, it is none."""
    flags = dict(model_name_or_path=world.lm()) if kind == "pairs" else {}
    expected = JSON if name == "surrogate" else 3 if name in COLUMNS[script, kind, column] else 4
    check(end(script, damaged(kind, column, TEXTS[name]), **flags), expected)


@pytest.mark.parametrize("text", ["a" * LONG, " " * LONG, "\0" * LONG], ids=["word", "spaces", "nul"])
def test_a_long_text_without_words(end, text):
    """A million characters that a tokenizer cannot divide."""
    check(end("sft", damaged("text", "text", text)), 4)


# ---- files ---------------------------------------------------------------------------------------------------------------
def table(rows, form):
    """Rows as csv or parquet."""
    buffer = io.BytesIO()
    getattr(datasets.Dataset.from_list(rows), f"to_{form}")(buffer)
    return buffer.getvalue()


def bare(row):
    """A row with nothing in its columns."""
    return {name: type(x)() for name, x in row.items()}


FILES = {  # name -> the files of a folder, made of good rows; the rows that are kept (without a split test one is held out), or the line
    "no-file": (lambda rows: {}, "doesn't contain any data files"),
    "empty-file": (lambda rows: {"train.jsonl": b""}, "empty?"),
    "empty-line": (lambda rows: {"train.jsonl": b"\n"}, NO_DATA),
    "empty-objects": (lambda rows: {"train.jsonl": b"{}\n{}\n"}, NO_DATA),
    "no-json": (lambda rows: {"train.jsonl": b"this is a film, not JSON\n"}, JSON),
    "scalars": (lambda rows: {"train.jsonl": b"1\n2\n3\n"}, JSON),
    "arrays": (lambda rows: {"train.jsonl": b'["a"]\n["b"]\n'}, "data"),
    "cut-at-the-end": (lambda rows: {"train.jsonl": lines(rows)[:-9]}, JSON),
    "cut-in-the-middle": (lambda rows: {"train.jsonl": lines(rows)[:40] + b"\n" + lines(rows)}, JSON),
    "binary": (lambda rows: {"train.jsonl": bytes(range(256)) * 4}, JSON),
    "zeros": (lambda rows: {"train.jsonl": bytes(1000)}, "empty?"),
    "utf-16": (lambda rows: {"train.jsonl": lines(rows).decode().encode("utf-16")}, JSON),
    "latin-1": (lambda rows: {"train.jsonl": lines(rows).replace(b". ", b"\xe9").replace(b'."', b'\xe9"')}, UTF8),
    "gzip": (lambda rows: {"train.jsonl.gz": gzip.compress(lines(rows))}, 2),
    "half-a-gzip": (lambda rows: {"train.jsonl.gz": gzip.compress(lines(rows))[:-20]}, "ended before the end"),
    "parquet": (lambda rows: {"train.parquet": table(rows, "parquet")}, 2),
    "half-a-parquet": (lambda rows: {"train.parquet": table(rows, "parquet")[:-99]}, "Parquet magic bytes not found"),
    "no-parquet": (lambda rows: {"train.parquet": b"PAR1 and no more"}, "Parquet magic bytes not found"),
    "csv": (lambda rows: {"train.csv": table(rows, "csv")}, 2),
    "ragged-csv": (lambda rows: {"train.csv": b'text,label\n"a film,1\nb,2,3,4\n'}, "Error tokenizing data"),
    "txt": (lambda rows: {"train.txt": b"A film.\nAnother film.\nA third.\n"}, 2),
    "json-array": (lambda rows: {"train.json": json.dumps(rows).encode()}, 2),
    "byte-order-mark": (lambda rows: {"train.jsonl": b"\xef\xbb\xbf" + lines(rows)}, 2),
    "crlf": (lambda rows: {"train.jsonl": lines(rows).replace(b"\n", b"\r\n")}, 2),
    "blank-lines": (lambda rows: {"train.jsonl": lines(rows).replace(b"\n", b"\n\n")}, 2),
    "no-last-newline": (lambda rows: {"train.jsonl": lines(rows)[:-1]}, 2),
    "one-row": (lambda rows: {"train.jsonl": lines(rows[:1])}, "at least 2 rows"),
    "two-rows": (lambda rows: {"train.jsonl": lines(rows[::2][:2])}, 1),
    "one-held-out-row": (lambda rows: {"train.jsonl": lines(rows), "test.jsonl": lines(rows[:1])}, 3),
    "only-test": (lambda rows: {"test.jsonl": lines(rows)}, "needs a split train"),
    "empty-test": (lambda rows: {"train.jsonl": lines(rows), "test.jsonl": b""}, NO_DATA),
    "other-test": (lambda rows: {"train.jsonl": lines(rows), "test.jsonl": b'{"x": 1}\n{"x": 2}\n'}, "Couldn't cast"),
    "blank-test": (lambda rows: {"train.jsonl": lines(rows), "test.jsonl": lines([bare(rows[0])] * 2)}, "no "),
    "csv-beside-it": (lambda rows: {"train.jsonl": lines(rows), "train.csv": b"a,b\n1,2\n"}, 2),
    "picture-beside-it": (lambda rows: {"train.jsonl": lines(rows), "photo.png": b"\x89PNG and no more"}, 2),
    "script-beside-it": (lambda rows: {"train.jsonl": lines(rows), "data.py": b"raise SystemExit('it ran')"}, "scripts are no longer"),
    "extra-columns": (lambda rows: {"train.jsonl": lines([row | dict(a=i, b=[{"c": None}]) for i, row in enumerate(rows)])}, 2),
    "extra-in-one-row": (lambda rows: {"train.jsonl": lines([*rows, rows[0] | dict(extra=1)])}, 3),
    "missing-in-one-row": (lambda rows: {"train.jsonl": lines([*rows, dict([*rows[0].items()][:1])])}, 3),
    "capital-columns": (lambda rows: {"train.jsonl": lines([{name.title(): x for name, x in row.items()} for row in rows])}, "column"),
    "column-twice": (lambda rows: {"train.jsonl": b'{"%s": 1, ' % next(iter(rows[0])).encode() + lines(rows)[1:]}, "specified twice"),
    "duplicate-rows": (lambda rows: {"train.jsonl": lines(rows * 2)}, 5),
    "all-null": (lambda rows: {"train.jsonl": lines([dict.fromkeys(row) for row in rows])}, "no"),
    "all-numbers": (lambda rows: {"train.jsonl": lines([dict.fromkeys(row, 1) for row in rows])}, "no "),
    "all-objects": (lambda rows: {"train.jsonl": lines([{name: {"a": x} for name, x in row.items()} for row in rows])}, "DATA"),
    "all-empty": (lambda rows: {"train.jsonl": lines(list(map(bare, rows)))}, "no "),
}  # fmt: skip
TURNS = {1: 2, 2: 3, 3: 5, 5: 8}  # of so many dialogues
OTHERWISE = {  # script, file -> what else is expected
    ("reward_model", "txt"): "column", ("ppo_dialog", "txt"): "column", ("rloo_tldr", "txt"): "column",
    ("reward_model", "missing-in-one-row"): "the label None", ("ppo_dialog", "missing-in-one-row"): "no dialogue has two",
    ("ppo_dialog", "csv"): "no dialogue has two", ("reward_model", "two-rows"): "two labels or more",
    ("reward_model", "all-null"): "one is None", ("reward_model", "all-numbers"): "two labels", ("reward_model", "all-empty"): "two labels",
}  # fmt: skip


@pytest.mark.parametrize("script", KIND)
@pytest.mark.parametrize("name", FILES)
def test_a_folder(end, tmp_path, script, name):
    """What load_dataset takes is taken, also as csv, parquet and lines of text; what it does not ends in one line that says why."""
    files, expected = FILES[name]
    expected = OTHERWISE.get((script, name), TURNS.get(expected, expected) if script == "ppo_dialog" else expected)
    check(end(script, files(ROWS[KIND[script]])), f"{tmp_path}/data" if expected == "DATA" else expected)


# ---- labels, dialogues, acts, rankings, margins -----------------------------------------------------------------------------
LABELS = {  # value -> with label_names negative,positive; without names; a column with another kind of value in one row
    "negative": (-1, "the label -1 is none of", 4), "large": (7, "the label 7 is none of", 4), "word": ("positive", 4, "others words"),
    "bool": (True, 4, 4), "half": (1.5, "label", "label"), "whole-float": (1.0, 4, 4), "null": (None, "label", "label"),
    "list": ([1], "label", "label"), "object": ({"a": 1}, "label", "label"), "numeral": ("1", 4, 4),
    "empty": ("", "the label '' is none of", "others words"), "missing": (..., "label", "label"), "huge": (10**30, "is none of", 4),
}  # fmt: skip


@pytest.mark.parametrize("names", [None, "negative,positive"])
@pytest.mark.parametrize("name", LABELS)
def test_a_label(end, names, name):
    """Out of range, or of another type than the others."""
    value, named, alone = LABELS[name]
    check(end("reward_model", damaged("text", "label", value), label_names=names), named if names else alone)


@pytest.mark.parametrize("name", LABELS)
def test_a_label_that_nobody_reads(end, name):
    """ppo_sentiment takes the text of such a row."""
    check(end("ppo_sentiment", damaged("text", "label", LABELS[name][0])), 4)


DIALOGS = {  # value -> is the dialogue used?
    "empty": ([], False), "alone": (["Hello."], False), "null": (None, False), "string": ("Hello.", False), "numbers": ([1, 2, 3], False),
    "with-null": (["Hello.", None, "Yes."], False), "with-blank": (["Hello.", "  ", "Yes."], False),
    "with-number": (["Hello.", 3, "Yes."], False), "nested": ([["Hello."], ["Yes."], ["No."]], False), "object": ({"a": "Hello."}, False),
    "objects": ([{"text": "Hello."}] * 3, False), "number": (7, False), "surrogate": (["\ud800", "a", "b"], JSON),
    "same": (["Hello."] * 3, True),
    "unicode": (["👋 hello", "\u202eשלום", "\0"], True), "zero-width": (["\u200b"] * 3, True), "many": (["Hello."] * 300, True),
    "long-answer": (["a", "b " * (LONG // 2), "c"], True), "end-marks": (["<|endoftext|>", " <EOU>", "x <EOU> y"], True),
}  # fmt: skip


@pytest.mark.parametrize("script", ["sft", "reward_model", "ppo_dialog"])
@pytest.mark.parametrize("name", DIALOGS)
def test_a_dialogue(end, script, name):
    """One that is none is left out; sft counts dialogues, the others answers."""
    value, used = DIALOGS[name]
    rows = damaged("dialog", "dialog", value)
    rows[-1]["act"] = [1] * len(value) if isinstance(value, list) else [1]
    flags = dict(label_names="a,b,c,d") if script == "reward_model" else {}
    expected = used if isinstance(used, str) else 3 + used if script == "sft" else 5 + (len(value) - 1 if used else 0)
    check(end(script, rows, **flags), expected)


ACTS = {  # value of three utterances -> answers used by reward_model, by ppo_dialog
    "empty": ([], 5, 5), "short": ([1], 5, 5), "many": ([1] * 9, 5, 5), "null": (None, 5, 5), "with-null": ([1, None, 1], 6, 6),
    "missing": (..., 5, 5), "zero": ([1, 0, 1], 6, "the act 0 is none"), "negative": ([1, -1, 1], 6, "the act -1 is none"),
    "large": ([1, 9, 1], "the label 8 is none", "the act 9 is none"), "numerals": (["1", "1", "1"], 7, 7),
    "words": (["inform"] * 3, 5, "the act 'inform' is none"), "bools": ([True] * 3, 7, 7), "floats": ([1.0, 2.0, 1.0], 7, 7),
    "halves": ([1.5] * 3, 5, "the act 1.5 is none"), "nested": ([[1], [1], [1]], 5, "the act [1] is none"), "number": (1, 5, 5),
    "string": ("1 1 1", 5, 5), "huge": ([10**30] * 3, 5, "is none"),
}  # fmt: skip


@pytest.mark.parametrize("script", ["reward_model", "ppo_dialog", "sft"])
@pytest.mark.parametrize("name", ACTS)
def test_acts(end, script, name):
    """sft reads none."""
    value, classifier, ppo = ACTS[name]
    flags = dict(label_names="a,b,c,d") if script == "reward_model" else {}
    check(end(script, damaged("dialog", "act", value), **flags), dict(reward_model=classifier, ppo_dialog=ppo, sft=4)[script])


RESPONSES = {
    "empty": ([], 3), "one": ([" good"], 3), "two": ([" good", " bad"], 4), "nine": ([f" {i}" for i in range(9)], 4), "null": (None, 3),
    "string": (" good", 3), "with-null": ([" good", None], 3), "with-blank": ([" good", " "], 3), "numbers": ([1, 2], 3),
    "nested": ([[" good"], [" bad"]], 3), "same": ([" good"] * 3, 4), "long": ([" good" * (LONG // 5), " bad"], 4), "missing": (..., 3),
}  # fmt: skip


@pytest.mark.parametrize("name", RESPONSES)
def test_a_ranking(end, world, name):
    """Two responses or more, none of them blank."""
    value, expected = RESPONSES[name]
    check(end("reward_model", damaged("ranking", "responses", value), model_name_or_path=world.lm()), expected)


MARGINS = {"null": (None, "margin"), "word": ("one", "margin"), "numeral": ("1", 4), "negative": (-1.0, 4), "whole": (1, 4),
           "bool": (True, 4), "list": ([1], "margin"), "huge": (1e300, "margin"), "missing": (..., "margin")}  # fmt: skip


@pytest.mark.parametrize("name", MARGINS)
def test_a_margin(end, world, name):
    """A finite number in every row."""
    value, expected = MARGINS[name]
    rows = [dict(margin=0.5) | row for row in damaged("pairs", "margin", value)]
    if value is ...:
        rows[-1].pop("margin")
    check(end("reward_model", rows, model_name_or_path=world.lm()), expected)


def test_swapped_columns(end):
    """Nothing tells a prompt from a completion: it runs."""
    rows = [dict(prompt=row["completion"], completion=row["prompt"]) for row in ROWS["completion"]]
    check(end("sft", rows), 3)


@pytest.mark.parametrize("script, kind", [("sft", "completion"), ("rloo_tldr", "completion"), ("ppo_dialog", "dialog")])
def test_prompts_longer_than_the_context(end, script, kind):
    """They are left out, and where all are, a line says so; a dialogue loses its oldest words instead."""
    long = "a film " * 999
    rows = [row | (dict(prompt=long) if kind == "completion" else dict(dialog=[long] * len(row["act"]))) for row in ROWS[kind]]
    check(end(script, rows), 5 if script == "ppo_dialog" else "length")
