"""How fast the jobs' matrix products run in fp32, in MKL and in oneDNN, which torch has on board too, and in bf16; and attention in both.

    python benchmarks/speed/products.py            # results/products.jsonl and two tables
    python benchmarks/speed/products.py --show     # the tables of that file

oneDNN's product is called by a name that torch keeps for itself; the scripts do not.
"""

import argparse
import json
import math
import time
from functools import partial
from statistics import median

import compare

FILE = compare.HERE / "results" / "products.jsonl"
SHAPES = {  # rows, inputs, outputs
    "what useful MFU is measured with": (1024, 768, 3072),
    "a block of logits, 424 tokens, width 128": (424, 128, 768),
    "a layer, 936 tokens, width 128": (936, 128, 512),
    "a layer, 248 tokens, width 768": (248, 768, 3072),
    "all logits of 64 responses, one token, width 128": (64, 128, 50_304),
    "all logits of 32 responses, one token, width 768": (32, 768, 50_257),
    "a layer, 32 responses, one token, width 768": (32, 768, 3072),
}


ATTENTION = [(8, 4, 64, 32), (8, 4, 128, 32), (8, 4, 256, 32), (8, 4, 512, 32), (8, 12, 64, 64), (8, 12, 128, 64), (8, 12, 256, 64)]


def medians(calls, rounds=3, repeats=10):
    """{name: call without arguments} -> {name: seconds}: of so many calls in a row the median, of so many rounds in turn the median."""
    found = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            call()
            seconds = []
            for _ in range(repeats):
                began = time.perf_counter()
                call()
                seconds.append(time.perf_counter() - began)
            found[name].append(median(seconds))
    return {name: median(x) for name, x in found.items()}


def time_product(rows, inputs, outputs):
    import torch

    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    fp32 = dict(mkl=partial(torch.nn.functional.linear, x, weight),
                onednn=partial(torch.ops.mkldnn._linear_pointwise, x, weight, None, "none", [], ""))  # fmt: skip
    assert torch.allclose(*(call() for call in fp32.values()), atol=1e-2)
    return medians(fp32 | dict(bf16=partial(torch.nn.functional.linear, x.bfloat16(), weight.bfloat16())))


def time_attention(rows, heads, length, size):
    """Causal attention, forward and with its backward pass, in fp32 and in bf16."""
    import torch

    attend, calls = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True), {}
    for name, dtype in dict(fp32=torch.float32, bf16=torch.bfloat16).items():
        parts = [torch.randn(rows, heads, length, size).to(dtype).requires_grad_() for _ in range(3)]
        gradient = torch.randn(rows, heads, length, size).to(dtype)
        calls[f"{name}, forward"] = partial(torch.no_grad()(attend), *parts)
        calls[f"{name}, both"] = lambda parts=parts, gradient=gradient: torch.autograd.grad(attend(*parts), parts, gradient)
    return medians(calls)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--show", action="store_true", help="print the tables of the file, run nothing")
    args = parser.parse_args()
    if not args.show:
        import torch

        torch.set_num_threads(args.threads)
        about = dict(machine=compare.describe_machine(args.threads))
        lines = [dict(product=name, shape=shape, seconds=time_product(*shape)) | about for name, shape in SHAPES.items()]
        lines += [dict(attention=shape, seconds=time_attention(*shape)) | about for shape in ATTENTION]
        FILE.write_text("".join(json.dumps(line) + "\n" for line in lines))
    products, attention = [], []
    for line in map(json.loads, FILE.read_text().splitlines()):
        seconds = line["seconds"]
        if "attention" in line:
            attention.append([" x ".join(map(str, line["attention"])), *(f"{1000 * x:.2f}" for x in seconds.values())])
        else:
            shape, flops = " x ".join(map(str, line["shape"])), 2 * math.prod(line["shape"]) / 1e9
            products.append([line["product"], shape, *(f"{flops / x:.0f}" for x in seconds.values())])
    print(compare.table(["a product of", "rows x inputs x outputs", "GFLOP/s, MKL", "oneDNN", "bf16"], products) + "\n")
    phases = [f"{dtype}, {what}" for dtype in ("fp32, ms", "bf16, ms") for what in ("forward", "and backward")]
    print(compare.table(["attention: rows x heads x tokens x size", *phases], attention))


if __name__ == "__main__":
    main()
