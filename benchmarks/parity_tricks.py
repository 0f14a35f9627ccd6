"""What two phrases earn and cost: the responses of three policies of the parity job rloo.

    python benchmarks/parity_tricks.py     # writes results/parity/tricks.json

Two of TRL's policies write "?." at the end of their responses, and one of ours begins many with "I am upset
because". For each policy, and for the one that all of them start from:

- share: the responses that end with "?.", or begin with the other phrase
- gain: their score, minus their score without the full stop (mean over the responses that end with "?.")
- price: -log of the probability that the initial policy gives the full stop after the question mark, in
  nats. That is what it costs in KL, if the policy is sure of it.
"""

import gzip
import json
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results/parity"
sys.path.insert(0, str(ROOT))

import rloo_tldr  # noqa: E402

STOP, PHRASE = "?.", "I am upset because"


def sample_initial_policy(args, posts, tokenizer, k):
    """k responses to each post. -> list of dict: prompt, response"""
    policy, _ = rloo_tldr.load_policy_and_reference(args, args.model_name_or_path, wants_reference=False)
    stop_ids = rloo_tldr.find_stop_tokens(args, tokenizer, policy)
    found = []
    for start in range(0, len(posts), 64):
        rows = posts[start : start + 64]
        batch = rloo_tldr.draw_groups(rows, k, args, "parity", start)
        _, responses, _ = rloo_tldr.sample_responses(policy.eval(), tokenizer, batch, stop_ids, args)
        found += [
            {"prompt": row["prompt"], "response": response} for row, response in zip(rows * k, responses)
        ]
    return found


@torch.no_grad()
def price(model, tokenizer, pairs):
    """-log p(full stop | prompt and response up to "?"). pairs: list of dict -> list of float, nats"""
    prices = []
    for pair in pairs:
        with_stop, without = (
            rloo_tldr.preference_ids(tokenizer, [pair["prompt"]], [text], 10_000)[0][:-1]  # without EOS
            for text in (pair["response"], pair["response"].removesuffix("."))
        )
        if with_stop[:-1] != without:  # "?." is two tokens of its own, else the price is of something else
            raise ValueError(f"not one token more: {pair['response']!r}")
        log_probabilities = model(torch.tensor([without])).logits[0, -1].log_softmax(-1)
        prices.append(-log_probabilities[with_stop[-1]].item())
    return prices


def mean(values):
    return sum(values) / len(values) if values else None


def cell(value):
    """A number of the table in docs/parity.md."""
    return "-" if value is None else f"{value:.3f}"


def main():
    args = rloo_tldr.RECIPES["tiny"]
    tokenizer = rloo_tldr.load_tokenizer(args.model_name_or_path)
    model, _ = rloo_tldr.load_policy_and_reference(args, args.model_name_or_path, wants_reference=False)
    score = rloo_tldr.load_reward_model(args, args.reward_model_path, torch.device("cpu"))
    posts = rloo_tldr.load_posts(rloo_tldr.load_splits(args.dataset_name)[1], tokenizer, args)

    answers = {"initial policy": sample_initial_policy(args, posts, tokenizer, 8)}
    for path in sorted((RESULTS / "samples").glob("*.jsonl.gz")):
        with gzip.open(path, "rt") as file:
            answers[path.name.removesuffix(".jsonl.gz")] = [json.loads(line) for line in file]

    found = {}
    for name, pairs in answers.items():
        tricked = [pair for pair in pairs if pair["response"].endswith(STOP)]
        prompts = [pair["prompt"] for pair in tricked]
        texts = [pair["response"] for pair in tricked]
        gains = []
        if tricked:
            with_stop = score(prompts, texts)
            without = score(prompts, [text.removesuffix(".") for text in texts])
            gains = [float(a - b) for a, b in zip(with_stop, without)]
        found[name] = {
            "responses": len(pairs),
            "share_stop": len(tricked) / len(pairs),
            "share_phrase": mean([pair["response"].strip().startswith(PHRASE) for pair in pairs]),
            "gain": mean(gains),
            "price": mean(price(model.eval(), tokenizer, tricked)),
        }
    (RESULTS / "tricks.json").write_text(json.dumps(found, indent=1) + "\n")
    for name, row in found.items():
        cells = [cell(row[column]) for column in ("share_stop", "gain", "price", "share_phrase")]
        print("| " + " | ".join([name, *cells]) + " |")


if __name__ == "__main__":
    main()
