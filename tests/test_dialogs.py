"""data/make_dialogs.py: the same bytes again, well-formed dialogues, splits apart, and the rules of its docstring."""

import re
import runpy
import subprocess
import sys
from collections import Counter

import pytest
from conftest import ROOT, rows_of_data

ROWS = {"train": 2200, "validation": 200, "test": 300}
INFORM, QUESTION, DIRECTIVE, COMMISSIVE = 1, 2, 3, 4
WORLD = runpy.run_path(str(ROOT / "data/make_dialogs.py"))


@pytest.fixture(scope="module")
def splits():
    return {split: rows_of_data(f"dialogs/{split}", 10**6) for split in ROWS}


def words(rows):
    return {word for row in rows for text in row["dialog"] for word in re.findall(r"\w+", text.lower())}


def test_dialogs_are_made_again(tmp_path):
    """The same bytes in every file, no other files, and together less than 0.9 MB."""
    subprocess.run([sys.executable, ROOT / "data/make_dialogs.py", "--folder", tmp_path], check=True, capture_output=True)
    assert {path.name for path in (tmp_path / "dialogs").iterdir()} == {f"{split}.jsonl" for split in ROWS}
    for split in ROWS:
        assert (tmp_path / f"dialogs/{split}.jsonl").read_bytes() == (ROOT / f"data/dialogs/{split}.jsonl").read_bytes()
    assert sum((tmp_path / f"dialogs/{split}.jsonl").stat().st_size for split in ROWS) < 900_000


def test_dialogs_are_well_formed(splits):
    """One act for each utterance; 4 to 8 utterances of 4 to 14 plain words, each a full sentence, and none twice in a dialogue."""
    for split, rows in splits.items():
        assert len(rows) == ROWS[split]
        for row in rows:
            assert list(row) == ["dialog", "act"]
            assert 4 <= len(row["dialog"]) == len(row["act"]) == len(set(row["dialog"])) <= 8
            assert set(row["act"]) <= {INFORM, QUESTION, DIRECTIVE, COMMISSIVE}
            for text in row["dialog"]:
                assert re.fullmatch(r"[A-Z][A-Za-z ,.?!-]*[.?!]", text) and "  " not in text and 4 <= len(text.split()) <= 14


def test_dialogs_are_distinct_and_share_their_words(splits):
    """No dialogue occurs twice in any split, and the test split has no word that is not in train."""
    dialogs = [tuple(row["dialog"]) for rows in splits.values() for row in rows]
    assert len(dialogs) == len(set(dialogs)) == sum(ROWS.values())
    assert words(splits["validation"]) | words(splits["test"]) <= words(splits["train"])


def test_speakers_alternate():
    """Every block has as many lines of A as of B, so whichever are left out, A asks where A should; each line has three wordings."""
    assert len(WORLD["SCRIPTS"]) == 12
    for blocks in WORLD["SCRIPTS"].values():
        assert not blocks[0][0]  # the first block stays
        for _, lines in blocks:
            assert len(lines) % 2 == 0 and all(len(wordings) == len(set(wordings)) == 3 for _, wordings in lines)


def test_acts_follow_each_other(splits):
    """A question is answered by an inform, a directive mostly by a commissive, and each act has its share."""
    rows = [row for rows in splits.values() for row in rows]
    follow = Counter(pair for row in rows for pair in zip(row["act"], row["act"][1:]))
    after = Counter(act for row in rows for act in row["act"][:-1])
    assert follow[QUESTION, INFORM] / after[QUESTION] > 0.97
    assert 0.8 < follow[DIRECTIVE, COMMISSIVE] / after[DIRECTIVE] < 0.92
    assert (follow[COMMISSIVE, INFORM] + follow[COMMISSIVE, QUESTION]) / after[COMMISSIVE] > 0.6
    acts = Counter(act for row in rows for act in row["act"])
    assert 0.35 < acts[INFORM] / acts.total() < 0.5 and all(0.15 < acts[act] / acts.total() < 0.25 for act in (2, 3, 4))


def test_acts_suit_the_words(splits):
    """A question ends as one, an inform and a commissive do not; every commissive says "will" or "would"."""
    for row in (row for rows in splits.values() for row in rows):
        for text, act in zip(row["dialog"], row["act"]):
            assert act == DIRECTIVE or text.endswith("?") == (act == QUESTION)
            assert act != COMMISSIVE or re.search(r"\b(will|would)\b", text)


def test_facts_stay_the_same(splits):
    """What belongs together does so in all dialogues: the soup is four dollars, the train to Boston leaves at seven."""
    texts = {text for rows in splits.values() for row in rows for text in row["dialog"]}
    for pattern in (r"The (soup|fish|salad|pizza|chicken|rice|steak) (?:is|costs) (\w+) dollars", r"train to (\w+) leaves at (\w+)"):
        pairs = {match.groups() for text in texts if (match := re.search(pattern, text))}
        assert len(pairs) == len(dict(pairs)) >= 6


def test_one_answer_in_seven_is_evasive():
    """Of the answers to questions and directives about 15 % are evasive."""
    lines = [(row["act"][i - 1], line) for row, lines in WORLD["make"]({"train": 600})["train"] for i, line in enumerate(lines) if i]
    answers = [line for act, line in lines if act in (QUESTION, DIRECTIVE) and line != "asks back"]
    assert 0.12 < sum(line.startswith("evades") for line in answers) / len(answers) < 0.18
