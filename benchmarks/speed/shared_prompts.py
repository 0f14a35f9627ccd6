"""What reading a prompt once for all its responses is worth: rloo_tldr.py without and with --share-prompts, in turn.

    python benchmarks/speed/shared_prompts.py             # every point, then results/shared_prompts.jsonl and a table
    python benchmarks/speed/shared_prompts.py --show      # the table from the file

A run is a process: two updates of 32 responses of 53 tokens (one epoch, one minibatch, passes of 8), of which the second counts. The model
is a GPT-2 of 8 layers x 512 with random weights and a vocabulary of 8192.
"""

import argparse
import json
from statistics import median

from compare import HERE, describe_machine, table
from growth import START, measure

POINTS = [(64, 2), (350, 2), (350, 4), (350, 8)]  # tokens of a prompt, responses to it
FILE = HERE / "results" / "shared_prompts.jsonl"


def show():
    """Medians over the rounds, and how many times as fast (smallest and largest of a round)."""
    lines, rows = [json.loads(line) for line in FILE.read_text().splitlines()], []
    for prompt, k in POINTS:
        found = [[line for line in lines if (line["prompt"], line["rloo_k"], line["shared"]) == (prompt, k, way)] for way in (False, True)]
        if not all(found):
            continue
        names = ("seconds", "train_seconds", "peak_memory_mb")
        seconds, train, peak = ([median(line[name] for line in way) for way in found] for name in names)
        each = [a["seconds"] / b["seconds"] for a, b in zip(*found)]
        rows.append([f"{prompt} tokens, k = {k}", *(f"{x:.2f}" for x in (*seconds, *train)), *(f"{x:.0f}" for x in peak),
                     f"{seconds[0] / seconds[1]:.2f} ({min(each):.2f} to {max(each):.2f})", f"{train[0] / train[1]:.2f}"])
    header = ["prompt", "s", "s, shared", "update, s", "update, s, shared", "peak MB", "peak MB, shared", "ratio", "of the update"]
    print(table(header, rows))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--show", action="store_true", help="print earlier results, run nothing")
    args = parser.parse_args()
    if not args.show:
        FILE.write_text("")
        machine = describe_machine(args.threads)
        for number in range(args.rounds):
            for prompt, k in POINTS:
                for shared in (False, True):
                    setting = START | dict(prompt=prompt, response=53, batch=32, layers=8, width=512)
                    flags = dict(rloo_k=k, share_prompts=True) if shared else dict(rloo_k=k)
                    line = dict(round=number, rloo_k=k, shared=shared) | measure(setting, args.threads, args.dtype, **flags)
                    with open(FILE, "a") as lines:
                        lines.write(json.dumps(line | dict(machine=machine)) + "\n")
                    print(f"round {number + 1}, {prompt} tokens, k = {k}, shared {shared}: {line['seconds']:.2f} s", flush=True)
    show()


if __name__ == "__main__":
    main()
