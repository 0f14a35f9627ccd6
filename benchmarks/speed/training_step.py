"""What three things gain in an optimizer step: probabilities kept (KEPT_PROBS), memory held (hold_memory), narrow blocks (block_size).

    python benchmarks/speed/training_step.py --peers FOLDER     # one process, VARIANTS in turn: results/training_step.jsonl
    python benchmarks/speed/training_step.py --show             # the table of that file

A step is two forward and backward passes of rloo_tldr.py's log-probabilities over the same random rows, clipping and Adam. Turning
hold_memory off again gives glibc's usual settings back, and the free memory to Linux.
"""

import argparse
import ctypes
import json
import sys
import time
from pathlib import Path
from statistics import median

import compare

FILE = compare.HERE / "results" / "training_step.jsonl"
JOBS = {  # model, rows of a pass, tokens of a prompt, shortest and longest response, steps of each variant
    "neox14m, 8 rows": ("neox14m", 8, 64, 53, 53, 15),
    "gpt2_tiny, 16 rows": ("gpt2_tiny", 16, 5, 4, 15, 40),
    "gpt2_small, 16 rows": ("gpt2_small", 16, 5, 4, 15, 4),
}
VARIANTS = {  # probabilities kept, memory held, words in a block of logits
    "neither, ms": (False, False, 768),
    "probabilities kept": (True, False, 768),
    "memory held": (False, True, 768),
    "both": (True, True, 768),
    "both, blocks of 1024 words": (True, True, 1024),
}


def give_back():
    """Undo hold_memory: malloc's defaults (mallopt(3)), and what is free now goes back."""
    for option, value in ((-4, 65_536), (-1, 2**17), (-2, 2**17), (-3, 2**25)):
        ctypes.CDLL(None).mallopt(option, value)
    ctypes.CDLL(None).malloc_trim(0)


def measure(script, folder, rows, prompt, shortest, longest, steps):
    """-> {variant: median seconds of a step}"""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    optimizer, generator = torch.optim.Adam(model.parameters(), lr=1e-6, fused=True), torch.Generator().manual_seed(0)
    lengths = torch.randint(shortest, longest + 1, (rows,), generator=generator)
    mask = torch.cat([torch.ones(rows, prompt, dtype=torch.bool), script.length_mask(lengths, longest)], 1)
    ids = torch.randint(3, 4000, mask.shape, generator=generator)

    def step():
        for _ in range(2):
            script.response_logprobs(model, ids, mask, longest, 1.0)[0].sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    seconds, keep = {}, script.KEPT_PROBS
    height, _ = script.block_size(ids.device)
    for _ in range(steps):
        for name, (kept, held, width) in VARIANTS.items():
            script.hold_memory() if held else give_back()
            script.KEPT_PROBS, script.block_size = keep * kept, lambda device, width=width: (height, width)
            step()  # the first after a change does not count
            began = time.perf_counter()
            step()
            seconds.setdefault(name, []).append(time.perf_counter() - began)
    return {name: median(found) for name, found in seconds.items()}


def show():
    """The lines of the file as a table: milliseconds a step, and how many times as fast as with neither."""
    lines = [json.loads(line) for line in FILE.read_text().splitlines()]
    rows = []
    for job, (base, *others) in ((line["job"], line["seconds"].values()) for line in lines):
        rows.append([job, f"{1e3 * base:.0f}", *(f"{base / x:.2f}" for x in others)])
    print(compare.table(["a step of", *VARIANTS], rows))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peers", type=Path, help="the folder of install_peers.sh")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--show", action="store_true", help="print the table of the file, run nothing")
    args = parser.parse_args()
    if args.show:
        return show()
    if not args.peers:
        parser.error("--peers FOLDER: run benchmarks/speed/install_peers.sh FOLDER first")
    sys.path.insert(0, str(compare.ROOT))
    import torch

    import rloo_tldr

    torch.set_num_threads(args.threads)
    FILE.write_text("")
    for job, (model, *sizes) in JOBS.items():
        seconds = measure(rloo_tldr, args.peers / "models" / model, *sizes)
        line = dict(job=job, seconds=seconds, machine=compare.describe_machine(args.threads))
        with open(FILE, "a") as lines:
            lines.write(json.dumps(line) + "\n")
    show()


if __name__ == "__main__":
    main()
