"""The data of this repository: made again byte for byte, small, without repetitions; and the gold score."""

import collections
import gzip
import json
import re
import runpy
import subprocess
import sys

import pytest
from conftest import ROOT, rows_of_data
from hypothesis import given, settings
from hypothesis import strategies as st

TOKENIZER = "arithmetic-tokenizer"
MADE = {  # program -> the folders of data/ that it makes
    "make_reviews.py": ["reviews"],
    "make_dialogs.py": ["dialogs"],
    "make_tldr.py": ["tldr", "tldr-preference"],
    "make_arithmetic.py": ["arithmetic", "arithmetic-hard", "arithmetic-sft", TOKENIZER],
}


def contents(folders):
    """Path in its folder -> bytes, unpacked: gzip's own bytes may differ between versions."""
    found = {}
    for folder in folders:
        for path in (path for path in folder.iterdir() if path.suffix != ".md"):
            data = path.read_bytes()
            found[path.name, folder.name] = gzip.decompress(data) if path.suffix == ".gz" else data
    return found


@pytest.mark.parametrize("program", MADE)
def test_data_are_made_again(tmp_path, program):
    """The same files, and no others."""
    target = tmp_path / "reviews" if program == "make_reviews.py" else tmp_path
    words = [sys.executable, ROOT / "data" / program, "--folder", target]
    if program == "make_arithmetic.py":
        words += ["--tokenizer", tmp_path / TOKENIZER]
    subprocess.run(words, check=True, capture_output=True)
    kept = [ROOT / ("checkpoints" if name == TOKENIZER else "data") / name for name in MADE[program]]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(MADE[program])
    assert contents(tmp_path / name for name in MADE[program]) == contents(kept)


def test_data_and_checkpoints_stay_small():
    for folder, limit in (("data", 6), ("checkpoints", 24)):
        files = [path for path in (ROOT / folder).rglob("*") if path.is_file()]
        files = [path for path in files if "__pycache__" not in path.parts]
        assert 0 < sum(path.stat().st_size for path in files) <= limit * 2**20
        assert not [path for path in files if path.suffix in (".bin", ".pt", ".pkl")]


# ---- Reviews and dialogs -----------------------------------------------------------------------------------


def test_reviews_are_balanced_and_the_splits_share_no_text():
    texts = []
    for split in ("train", "test"):
        rows = [json.loads(line) for line in open(ROOT / f"data/reviews/{split}.jsonl")]
        assert collections.Counter(row["label"] for row in rows) == dict.fromkeys((0, 1), len(rows) // 2)
        texts += [row["text"] for row in rows]
    assert len(set(texts)) == len(texts)


def test_dialogs_are_well_formed_and_share_their_words():
    """One act per utterance; 4 to 8 utterances, none twice. Every held-out word is in the training split."""
    splits = {split: rows_of_data(f"dialogs/{split}", 10**6) for split in ("train", "validation", "test")}
    assert [len(rows) for rows in splits.values()] == [2200, 200, 300]
    words = {}
    for split, rows in splits.items():
        for row in rows:
            assert 4 <= len(row["dialog"]) == len(row["act"]) == len(set(row["dialog"])) <= 8
            assert set(row["act"]) <= {1, 2, 3, 4}
        words[split] = set(re.findall(r"\w+", str([row["dialog"] for row in rows]).lower()))
    assert words["validation"] | words["test"] <= words["train"]


# ---- Posts -------------------------------------------------------------------------------------------------

gold_score = runpy.run_path(str(ROOT / "data/make_tldr.py"))["gold_score"]
COLUMNS = {"tldr": {"prompt", "completion"}, "tldr-preference": {"prompt", "chosen", "rejected"}}
POST = (
    "SUBREDDIT: r/roommates\n\n"
    "TITLE: A hard week\n\n"
    "POST: I cannot sleep. My roommate Ben keeps eating my food. I told my sister Mia and she laughed. "
    "Should I move out? Thanks in advance.\n\n"
    "TL;DR:"
)
GOOD = " My roommate Ben keeps eating my food. Should I move out?"


def test_posts_are_distinct_and_well_formed():
    """No post occurs twice in both data sets. A prompt ends with TL;DR:, a summary begins with a space."""
    prompts = []
    for folder, columns in COLUMNS.items():
        for split in ("train", "test"):
            for row in rows_of_data(f"{folder}/{split}", 10**6):
                assert set(row) == columns
                assert row["prompt"].endswith("\n\nTL;DR:")
                assert all(row[name].startswith(" ") for name in columns - {"prompt"})
                prompts.append(row["prompt"])
    assert len(prompts) == len(set(prompts)) == 2400 + 300 + 10_000 + 300


def test_pairs_follow_the_gold_score():
    """The chosen summary has the higher gold score in about 96 of 100 pairs, and no pair is a tie."""
    rows = rows_of_data("tldr-preference/test", 300)
    prompts = [row["prompt"] for row in rows]
    chosen = gold_score(prompts, [row["chosen"] for row in rows])
    rejected = gold_score(prompts, [row["rejected"] for row in rows])
    assert all(a != b for a, b in zip(chosen, rejected))
    right = sum(a > b for a, b in zip(chosen, rejected))
    assert 0.92 < right / len(rows) < 0.99


@pytest.mark.parametrize(
    "summary, points",
    [
        (GOOD, 3.0),
        (" Should I move out? Ben, my roommate, keeps eating my food.", 3.0),
        (" Ben keeps eating my food, should I move out?", 2.5),  # the name without the relation
        (" Someone keeps eating my food. Should I move out?", 2.0),
        (" My roommate Ben keeps eating my food. Any advice?", 2.0),
        (" My roommate Ben keeps eating my food. Should I move out", 2.0),  # it does not end
        (" My roommate Leo keeps eating my food. Should I move out?", 1.5),  # half a person, one invented
        (" My sister Mia keeps eating my food. Should I move out?", 1.5),  # the other person of the post
        (" My roommate Ben forgot my birthday. Should I move out?", 1.0),
        (GOOD + " Should I call the police?", 2.0),
        (GOOD + " well" * 9 + ".", 3.0 - 0.05 * 4),  # 20 words, 4 too many
        ("", -1.0),
        (" Help.", 0.0),
    ],
)
def test_gold_score_by_hand(summary, points):
    """One point per fact; less for inventions, length and a missing end."""
    assert gold_score([POST], [summary]) == pytest.approx([points])


def test_gold_score_refuses_other_posts():
    """The recipe tiny with other data needs --judge-fn None, or a judge of its own."""
    with pytest.raises(ValueError, match="use --judge-fn None"):
        gold_score([POST, "SUBREDDIT: r/aww\n\nPOST: My cat sleeps a lot.\n\nTL;DR:"], [GOOD, " A cat."])


@settings(max_examples=50, deadline=None, derandomize=True)
@given(text=st.text(max_size=60))
def test_gold_score_takes_any_text(text):
    """Whatever a policy writes has a score, and no text has more than 3 points."""
    [score] = gold_score([POST], [text])
    assert isinstance(score, float)
    assert -10 < score <= 3
