"""data/make_dialogs.py: it writes the same bytes again, and the dialogs follow the rules of its docstring."""

import re
import subprocess
import sys
from collections import Counter

import pytest
from conftest import ROOT, rows_of_data

ROWS = {"train": 2200, "validation": 200, "test": 300}
INFORM, QUESTION, DIRECTIVE, COMMISSIVE = 1, 2, 3, 4


@pytest.fixture(scope="module")
def splits():
    """Split -> its rows."""
    return {split: rows_of_data(f"dialogs/{split}", 10**6) for split in ROWS}


@pytest.fixture(scope="module")
def dialogs(splits):
    """The rows of all splits."""
    return [row for rows in splits.values() for row in rows]


def words(rows):
    """The set of words in these dialogs."""
    text = " ".join(utterance for row in rows for utterance in row["dialog"])
    return set(re.findall(r"\w+", text.lower()))


def test_dialogs_are_made_again(tmp_path):
    """The same bytes in every file, no other files, and less than 0.9 MB in all."""
    command = [sys.executable, ROOT / "data/make_dialogs.py", "--folder", tmp_path]
    subprocess.run(command, check=True, capture_output=True)
    made = {path.name: path.read_bytes() for path in (tmp_path / "dialogs").iterdir()}
    kept = {f"{split}.jsonl": (ROOT / f"data/dialogs/{split}.jsonl").read_bytes() for split in ROWS}
    assert made == kept
    assert sum(len(text) for text in kept.values()) < 900_000


def test_dialogs_are_well_formed(splits, dialogs):
    """One act per utterance; 4 to 8 utterances of 4 to 14 words, each a full sentence, none twice."""
    assert {split: len(rows) for split, rows in splits.items()} == ROWS
    for row in dialogs:
        assert list(row) == ["dialog", "act"]
        assert 4 <= len(row["dialog"]) <= 8
        assert len(row["dialog"]) == len(row["act"]) == len(set(row["dialog"]))
        assert set(row["act"]) <= {INFORM, QUESTION, DIRECTIVE, COMMISSIVE}
        for text in row["dialog"]:
            assert re.fullmatch(r"[A-Z][A-Za-z ,.?!-]*[.?!]", text)
            assert "  " not in text
            assert 4 <= len(text.split()) <= 14


def test_dialogs_are_distinct_and_share_their_words(splits, dialogs):
    """No dialog occurs twice in any split, and every held-out word is in the training split."""
    assert len({tuple(row["dialog"]) for row in dialogs}) == len(dialogs)
    assert words(splits["validation"] + splits["test"]) <= words(splits["train"])


def test_acts_follow_each_other(dialogs):
    """An inform answers a question, a commissive most directives, and each act has its share."""
    pairs = Counter()
    for row in dialogs:
        pairs.update(zip(row["act"], row["act"][1:]))

    def share(act, answer):
        """How often `answer` follows `act`."""
        return pairs[act, answer] / sum(pairs[act, other] for other in (1, 2, 3, 4))

    assert share(QUESTION, INFORM) > 0.97
    assert 0.8 < share(DIRECTIVE, COMMISSIVE) < 0.92
    assert share(COMMISSIVE, INFORM) + share(COMMISSIVE, QUESTION) > 0.6

    acts = Counter(act for row in dialogs for act in row["act"])
    assert 0.35 < acts[INFORM] / acts.total() < 0.5
    for act in (QUESTION, DIRECTIVE, COMMISSIVE):
        assert 0.15 < acts[act] / acts.total() < 0.25


def test_acts_suit_the_words(dialogs):
    """Questions end with "?", informs and commissives do not. Every commissive says "will" or "would"."""
    for row in dialogs:
        for text, act in zip(row["dialog"], row["act"]):
            if act != DIRECTIVE:
                assert text.endswith("?") == (act == QUESTION)
            if act == COMMISSIVE:
                assert re.search(r"\b(will|would)\b", text)
