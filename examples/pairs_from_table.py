"""Turn a table of comparisons into data for all scripts.

python examples/pairs_from_table.py TABLE.csv FOLDER    # writes FOLDER/train.jsonl
"""

import csv
import json
import sys
from pathlib import Path

table, folder = sys.argv[1], Path(sys.argv[2])
rows = list(csv.DictReader(open(table, newline="", encoding="utf-8-sig")))  # -sig: a file from Excel, too
pairs = []
for row in rows:
    if row["winner"] == "tie":
        continue
    winner, loser = {"a": ("a", "b"), "b": ("b", "a")}[row["winner"]]
    better, worse = " " + row[winner], " " + row[loser]
    prompt = f"Question: {row['question']}\nAnswer:"
    pairs.append({"prompt": prompt, "completion": better, "chosen": better, "rejected": worse})
folder.mkdir(exist_ok=True)
(folder / "train.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
print(f"{len(rows)} rows: {len(pairs)} pairs, {len(rows) - len(pairs)} ties left out")
