"""Turn a table of comparisons into data for all scripts.

python examples/pairs_from_table.py TABLE.csv FOLDER    # writes FOLDER/train.jsonl
"""

import csv
import json
import sys
from pathlib import Path

QUESTION, A, B, WINNER = "question", "a", "b", "winner"  # columns of the table

table, folder = sys.argv[1], Path(sys.argv[2])
reader = csv.DictReader(open(table, newline="", encoding="utf-8-sig"))  # -sig: also Excel's CSV UTF-8
pairs, num_ties, num_empty = [], 0, 0
for row in reader:
    question, a, b, winner = ((row[column] or "").strip() for column in (QUESTION, A, B, WINNER))
    if not (question and a and b):
        num_empty += 1
        continue
    if winner == "tie":
        num_ties += 1
        continue
    if winner not in ("a", "b"):
        sys.exit(f"{table}, line {reader.line_num}: the winner is {winner!r}, not a, b or tie")
    better, worse = (a, b) if winner == "a" else (b, a)
    better, worse = " " + better, " " + worse
    prompt = f"Question: {question}\nAnswer:"
    pairs.append({"prompt": prompt, "completion": better, "chosen": better, "rejected": worse})
folder.mkdir(exist_ok=True)
(folder / "train.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
print(f"{len(pairs)} pairs; left out: {num_ties} ties, {num_empty} rows with an empty cell")
