"""How right is a classifier about the beginning of a review? PPO scores texts of a few words.

    python benchmarks/prefixes.py checkpoints/reviews-sentiment runs/without-prefixes/model

Each review of data/reviews/test.jsonl is cut after 4, 8, ... tokens. The table shows the accuracy, the loss
(-log of the probability of the right label, in nats; always guessing 50 % has 0.693) and the mean P(positive),
which is 0.5 for the labels. results/prefixes.json has the same numbers.
"""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
LENGTHS = (4, 8, 16, 24, 40, 128)  # tokens


@torch.no_grad()
def prefix_metrics(folder, rows, length):
    """Accuracy, loss and mean P(positive) of a classifier on the first tokens of each row. -> dict"""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.padding_side = "right"
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    model.config.pad_token_id = tokenizer.pad_token_id
    labels = torch.tensor([row["label"] for row in rows])
    logits = []
    for start in range(0, len(rows), 100):
        texts = [row["text"] for row in rows[start : start + 100]]
        options = dict(padding=True, truncation=True, max_length=length, return_tensors="pt")
        logits.append(model(**tokenizer(texts, **options)).logits)
    logits = torch.cat(logits)
    return {
        "tokens": length,
        "accuracy": (logits.argmax(1) == labels).float().mean().item(),
        "loss": F.cross_entropy(logits, labels).item(),
        "mean P(positive)": logits.softmax(1)[:, 1].mean().item(),
    }


def main():
    if not sys.argv[1:]:
        sys.exit("name at least one folder with a classifier")
    rows = [json.loads(line) for line in open(ROOT / "data/reviews/test.jsonl")]
    results = {}
    for folder in sys.argv[1:]:
        results[folder] = [prefix_metrics(folder, rows, length) for length in LENGTHS]
        print(f"{folder}\n| tokens | accuracy | loss | mean P(positive) |\n|---|---|---|---|")
        for row in results[folder]:
            print(
                f"| {row['tokens']} | {row['accuracy']:.3f} | {row['loss']:.3f} | {row['mean P(positive)']:.3f} |"
            )
    (ROOT / "results/prefixes.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
