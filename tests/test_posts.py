"""data/make_tldr.py: the same text again, splits apart, and a gold score that counts facts as its docstring says."""

import gzip
import json
import runpy
import subprocess
import sys

import pytest
from conftest import ROOT, rows_of_data
from hypothesis import given, settings
from hypothesis import strategies as st

FILES = {"tldr": ("train.jsonl", "test.jsonl"), "tldr-preference": ("train.jsonl.gz", "test.jsonl")}
gold_score = runpy.run_path(str(ROOT / "data/make_tldr.py"))["gold_score"]
POST = ("SUBREDDIT: r/roommates\n\nTITLE: A hard week\n\nPOST: I cannot sleep. My roommate Ben keeps eating my food. "
        "I told my sister Mia and she laughed. Should I move out? Thanks in advance.\n\nTL;DR:")  # fmt: skip


def text_of(path):
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def test_posts_are_made_again(tmp_path):
    """The same text in every file, and no other files; gzip's own bytes may differ from one zlib to another."""
    subprocess.run([sys.executable, ROOT / "data/make_tldr.py", "--folder", tmp_path], check=True, capture_output=True)
    for name, files in FILES.items():
        assert {path.name for path in (tmp_path / name).iterdir()} == set(files)
        for file in files:
            assert text_of(tmp_path / name / file) == text_of(ROOT / "data" / name / file)


def test_posts_are_distinct_and_well_formed():
    """No post occurs twice in any split of the two data sets; a prompt ends as TL;DR's do, a summary begins with its space."""
    prompts = []
    for name in FILES:
        for split in ("train", "test"):
            for row in rows_of_data(f"{name}/{split}", 10**6):
                assert set(row) == ({"prompt", "completion"} if name == "tldr" else {"prompt", "chosen", "rejected"})
                assert row["prompt"].endswith("\n\nTL;DR:") and all(row[key].startswith(" ") for key in row if key != "prompt")
                prompts.append(row["prompt"])
    assert len(prompts) == len(set(prompts)) == 2400 + 300 + 10_000 + 300


def test_pairs_follow_the_gold_score():
    """The chosen summary is the better one in 96 of 100 pairs, and no pair is a tie."""
    rows = rows_of_data("tldr-preference/test", 300)
    prompts = [row["prompt"] for row in rows]
    chosen, rejected = (gold_score(prompts, [row[name] for row in rows]) for name in ("chosen", "rejected"))
    assert not any(a == b for a, b in zip(chosen, rejected))
    assert 0.92 < sum(a > b for a, b in zip(chosen, rejected)) / len(rows) < 0.99


@pytest.mark.parametrize("summary, points", [
    (" My roommate Ben keeps eating my food. Should I move out?", 3.0),
    (" Should I move out? Ben, my roommate, keeps eating my food.", 3.0),
    (" Ben keeps eating my food, should I move out?", 2.5),  # the name alone
    (" Someone keeps eating my food. Should I move out?", 2.0),
    (" My roommate Ben keeps eating my food. Any advice?", 2.0),
    (" My roommate Ben keeps eating my food. Should I move out", 2.0),  # it does not end
    (" My roommate Leo keeps eating my food. Should I move out?", 1.5),  # half a person, and one invented
    (" My sister Mia keeps eating my food. Should I move out?", 1.5),  # somebody else of the post
    (" My roommate Ben forgot my birthday. Should I move out?", 1.0),
    (" My roommate Ben keeps eating my food. Should I move out? Should I call the police?", 2.0),
    (" My roommate Ben keeps eating my food. Should I move out?" + " well" * 9 + ".", 3.0 - 0.05 * 4),  # 20 words
    ("", -1.0),
    (" Help.", 0.0),
])  # fmt: skip
def test_gold_score_by_hand(summary, points):
    assert gold_score([POST], [summary]) == pytest.approx([points])


@settings(max_examples=50, deadline=None, derandomize=True)
@given(text=st.text(max_size=60))
def test_gold_score_takes_anything(text):
    """Whatever a policy writes has a score, and never a good one by chance."""
    [score] = gold_score([POST], [text])
    assert isinstance(score, float) and score <= 3.0
    assert json.dumps(score)
