"""The data and checkpoints of this repository: their size, their balance, and that the reviews are made
again byte for byte."""

import collections
import hashlib
import json
import subprocess
import sys

from conftest import ROOT


def size_of(folder):
    """Bytes of the files that git holds."""
    files = [
        path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    return sum(path.stat().st_size for path in files)


def test_data_and_checkpoints_stay_small():
    assert 0 < size_of("data") <= 6 * 2**20
    assert 0 < size_of("checkpoints") <= 24 * 2**20
    for kind in ("*.bin", "*.pt", "*.pkl"):
        assert not list((ROOT / "checkpoints").rglob(kind))


def test_reviews_are_made_again_byte_for_byte(tmp_path):
    subprocess.run([sys.executable, ROOT / "data/make_reviews.py", "--folder", tmp_path], check=True)
    made = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.iterdir()}
    kept = {}
    for path in (ROOT / "data/reviews").glob("*.jsonl"):
        kept[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    assert made == kept and set(kept) == {"train.jsonl", "test.jsonl"}


def test_reviews_are_balanced_and_the_splits_share_no_text():
    texts = {}
    for split in ("train", "test"):
        rows = [json.loads(line) for line in open(ROOT / f"data/reviews/{split}.jsonl")]
        assert all(set(row) == {"text", "label"} and row["text"].strip() for row in rows)
        labels = collections.Counter(row["label"] for row in rows)
        assert labels == {0: len(rows) // 2, 1: len(rows) // 2}
        texts[split] = {row["text"] for row in rows}
        assert len(texts[split]) == len(rows)
    assert not texts["train"] & texts["test"]
