"""The data of this repository: made again byte for byte, without repetitions; and the gold score."""

import gzip
import runpy
import subprocess
import sys

import pytest
from conftest import ROOT, rows_of_data

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


# ---- Splits ----------------------------------------------------------------------------------------------


def test_no_text_is_in_two_splits():
    """Nor in two data sets of the same world."""
    worlds = {"reviews": "text", "dialogs": "dialog", "tldr tldr-preference": "prompt"}
    worlds["arithmetic arithmetic-sft"] = "prompt"
    for folders, column in worlds.items():
        texts = []
        for folder in folders.split():
            for split in ("train", "test"):
                texts += [str(row[column]) for row in rows_of_data(f"{folder}/{split}", 10**6)]
        assert len(set(texts)) == len(texts) > 1000


# ---- Posts -------------------------------------------------------------------------------------------------

gold_score = runpy.run_path(str(ROOT / "data/make_tldr.py"))["gold_score"]
POST = (
    "SUBREDDIT: r/roommates\n\n"
    "TITLE: A hard week\n\n"
    "POST: I cannot sleep. My roommate Ben keeps eating my food. I told my sister Mia and she laughed. "
    "Should I move out? Thanks in advance.\n\n"
    "TL;DR:"
)
GOOD = " My roommate Ben keeps eating my food. Should I move out?"


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
        (" Ben keeps eating my food, should I move out?", 2.5),  # the name without the relation
        (" My roommate Ben keeps eating my food. Should I move out", 2.0),  # it does not end
        (" My roommate Leo keeps eating my food. Should I move out?", 1.5),  # half a person, one invented
        (" My roommate Ben forgot my birthday. Should I move out?", 1.0),
        (GOOD + " Should I call the police?", 2.0),
        (GOOD + " well" * 9 + ".", 3.0 - 0.05 * 4),  # 20 words, 4 too many
        ("", -1.0),
    ],
)
def test_gold_score_by_hand(summary, points):
    """One point per fact; less for inventions, length and a missing end."""
    assert gold_score([POST], [summary]) == pytest.approx([points])


def test_gold_score_refuses_other_posts():
    """The recipe tiny with other data needs --judge-fn None, or a judge of its own."""
    with pytest.raises(ValueError, match="use --judge-fn None"):
        gold_score([POST, "SUBREDDIT: r/aww\n\nPOST: My cat sleeps a lot.\n\nTL;DR:"], [GOOD, " A cat."])
