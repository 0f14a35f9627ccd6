"""How far --dtype bfloat16 is from float32: log-probabilities, entropies and the gradient of one batch, with the models of checkpoints/.

    python benchmarks/speed/bf16_distance.py           # seconds; results/bf16_distance.json and a table
    python benchmarks/speed/bf16_distance.py --show    # the table from the file

A row is 64 held-out texts under the model that the tiny recipe starts from: their last 16 tokens behind all before, scored by
rloo_tldr.py's `response_logprobs`, which all scripts that sample have. The gradient is that of the mean of advantage * log-probability,
with an advantage of +1 or -1 for each text; its error is |bf16 - fp32| / |fp32|. For scale, the last column is the same of the fp32
gradients of the two halves of the batch: |first - second| / |whole|.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from compare import HERE, ROOT, describe_machine, table
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

sys.path.insert(0, str(ROOT))
import rloo_tldr  # noqa: E402

TEXTS = {"reviews-lm": ("reviews", lambda row: row["text"]), "tldr-sft": ("tldr", lambda row: row["prompt"] + row["completion"]),
         "dialogs-lm": ("dialogs", lambda row: " ".join(row["dialog"]))}  # fmt: skip
B, T = 64, 16


def score(model, ids, mask, advantages, dtype):
    """Log-probabilities and entropies [B, T], and the gradient as one vector, in fp32."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
        logprobs, entropies, _ = rloo_tldr.response_logprobs(model, ids, mask, T, 1.0)
    (advantages[:, None] * logprobs).mean().backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return logprobs.detach(), entropies.detach(), gradient


def distance(checkpoint):
    """A line of the results."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "checkpoints" / checkpoint)
    model = AutoModelForCausalLM.from_pretrained(ROOT / "checkpoints" / checkpoint, dtype=torch.float32).eval()
    world, text = TEXTS[checkpoint]
    rows = (json.loads(line) for line in (ROOT / "data" / world / "test.jsonl").read_text().splitlines())
    rows = [ids for row in rows if len(ids := tokenizer(text(row)).input_ids) >= 2 * T][:B]
    assert len(rows) == B, f"{checkpoint}: {len(rows)} texts are long enough"
    longest = max(map(len, rows))
    ids, mask = (torch.tensor([[pad] * (longest - len(row)) + value(row) for row in rows])
                 for pad, value in ((0, list), (False, lambda row: [True] * len(row))))  # fmt: skip
    advantages = torch.where(torch.rand(B, generator=torch.Generator().manual_seed(0)) < 0.5, -1.0, 1.0)
    exact, rough = (score(model, ids, mask, advantages, dtype) for dtype in (torch.float32, torch.bfloat16))
    halves = [score(model, ids[half], mask[half], advantages[half], torch.float32)[2] for half in (slice(B // 2), slice(B // 2, B))]
    off = (rough[0] - exact[0]).abs().flatten()
    return {
        "model": checkpoint, "logprob, mean": exact[0].mean(), "error, mean": (rough[0] - exact[0]).mean(), "|error|, median": off.median(),
        "99 %": off.quantile(0.99), "max": off.max(), "of a text's sum, max": (rough[0] - exact[0]).sum(1).abs().max(),
        "entropy, max": (rough[1] - exact[1]).abs().max(), "gradient": (rough[2] - exact[2]).norm() / exact[2].norm(),
        "halves": (halves[0] - halves[1]).norm() / exact[2].norm(),
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--show", action="store_true", help="print earlier results, run nothing")
    args = parser.parse_args()
    file = args.results.resolve() / "bf16_distance.json"
    if not args.show:
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        lines = [{name: x if isinstance(x, str) else x.item() for name, x in distance(checkpoint).items()} for checkpoint in TEXTS]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(dict(lines=lines, machine=describe_machine(torch.get_num_threads())), indent=2) + "\n")
    lines = json.loads(file.read_text())["lines"]
    print(table(list(lines[0]), [[x if isinstance(x, str) else f"{x:.2g}" for x in line.values()] for line in lines]))


if __name__ == "__main__":
    main()
