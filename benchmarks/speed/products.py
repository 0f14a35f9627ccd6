"""How fast the matrix products of the jobs run in fp32: in MKL, which torch takes on a CPU, and in oneDNN, which it has on board too.

    python benchmarks/speed/products.py            # results/products.jsonl and a table
    python benchmarks/speed/products.py --show     # the table of that file

oneDNN's product is called by a name that torch keeps for itself; the scripts do not.
"""

import argparse
import json
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


def gflops(product, flops, repeats=30):
    """Speed of a call without arguments, by the median of its times."""
    product()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        product()
        seconds.append(time.perf_counter() - began)
    return flops / median(seconds) / 1e9


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--show", action="store_true", help="print the table of the file, run nothing")
    args = parser.parse_args()
    if not args.show:
        import torch

        torch.set_num_threads(args.threads)
        lines = []
        for name, (rows, inputs, outputs) in SHAPES.items():
            x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
            mkl = partial(torch.nn.functional.linear, x, weight)
            calls = dict(mkl=mkl, onednn=partial(torch.ops.mkldnn._linear_pointwise, x, weight, None, "none", [], ""))
            assert torch.allclose(*(call() for call in calls.values()), atol=1e-2)
            found = {name: [] for name in calls}
            for _ in range(3):  # in turn
                for who, call in calls.items():
                    found[who].append(gflops(call, 2 * rows * inputs * outputs))
            speeds = {who: median(x) for who, x in found.items()}
            lines.append(dict(product=name, shape=(rows, inputs, outputs), gflops=speeds, machine=compare.describe_machine(args.threads)))
        FILE.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = []
    for line in map(json.loads, FILE.read_text().splitlines()):
        speeds = line["gflops"]
        shape = " x ".join(map(str, line["shape"]))
        rows.append([line["product"], shape, f"{speeds['mkl']:.0f}", f"{speeds['onednn']:.0f}", f"{speeds['onednn'] / speeds['mkl']:.2f}"])
    print(compare.table(["a product of", "rows x inputs x outputs", "GFLOP/s", "in oneDNN", "ratio"], rows))


if __name__ == "__main__":
    main()
