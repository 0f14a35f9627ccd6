"""data/make_tldr.py: it writes the same text again, no post occurs twice, and the gold score counts facts."""

import gzip
import runpy
import subprocess
import sys

import pytest
from conftest import ROOT, rows_of_data
from hypothesis import given, settings
from hypothesis import strategies as st

FILES = {"tldr": {"train.jsonl", "test.jsonl"}, "tldr-preference": {"train.jsonl.gz", "test.jsonl"}}
COLUMNS = {"tldr": {"prompt", "completion"}, "tldr-preference": {"prompt", "chosen", "rejected"}}
gold_score = runpy.run_path(str(ROOT / "data/make_tldr.py"))["gold_score"]
POST = (
    "SUBREDDIT: r/roommates\n\n"
    "TITLE: A hard week\n\n"
    "POST: I cannot sleep. My roommate Ben keeps eating my food. I told my sister Mia and she laughed. "
    "Should I move out? Thanks in advance.\n\n"
    "TL;DR:"
)
GOOD = " My roommate Ben keeps eating my food. Should I move out?"


def text_of(path):
    """The bytes of a file, unpacked."""
    if path.suffix == ".gz":
        return gzip.decompress(path.read_bytes())
    return path.read_bytes()


def test_posts_are_made_again(tmp_path):
    """The same text in every file, and no other files. gzip's own bytes may differ between versions."""
    command = [sys.executable, ROOT / "data/make_tldr.py", "--folder", tmp_path]
    subprocess.run(command, check=True, capture_output=True)
    for folder, names in FILES.items():
        assert {path.name for path in (tmp_path / folder).iterdir()} == names
        for name in names:
            assert text_of(tmp_path / folder / name) == text_of(ROOT / "data" / folder / name)


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
