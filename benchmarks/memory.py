"""Is the memory that a script says it will need at its start what it then takes? And what does a 7B policy need?

    python benchmarks/memory.py              # 12 runs of rloo_tldr.py, 2 steps each, 6 minutes on 2 cores; writes memory.json
    python benchmarks/memory.py --7b         # only the estimate for a policy of 7B parameters (in memory.json too); nothing is allocated

A run's peak resident memory holds the libraries, the reward model and the data too. So the peak of a run with a very small policy is
subtracted from each, and its estimate from each estimate. GPT-2's architecture with random weights, prompts of data/tldr.
"""

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import rloo_tldr  # noqa: E402

SIZES = {"base": (1, 32), "6 layers x 512": (6, 512), "10 layers x 640": (10, 640)}
FLAGS = ["", "--gradient-checkpointing", "--lora-r 16", "--lora-r 16 --gradient-checkpointing"]
SEVEN = ["--lora-r", "16", "--load-in-8bit", "--gradient-checkpointing", "--bf16", "--per-device-train-batch-size", "8",
         "--gradient-accumulation-steps", "8", "--local-rollout-forward-batch-size", "32"]  # fmt: skip


def run(folder, layers, width, flags):
    """Estimate and peak, in MiB, of a run of one update with a GPT-2 of this size."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "checkpoints/tldr-sft")
    config = transformers.GPT2Config(vocab_size=len(tokenizer), n_layer=layers, n_embd=width, n_head=max(1, width // 64), n_positions=512)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    words = [sys.executable, "rloo_tldr.py", "tiny", "--model-name-or-path", str(folder / "policy"), *flags.split()]
    words += ["--total-episodes", "64", "--per-device-train-batch-size", "32", "--local-rollout-forward-batch-size", "64"]
    words += ["--num-examples", "4", "--num-sample-generations", "0", "--save-every", "0", "--output-dir", str(folder / "run")]
    env = os.environ | dict(HF_HUB_OFFLINE="1", MALLOC_TRIM_THRESHOLD_="0", MALLOC_MMAP_THRESHOLD_="65536")  # what is freed goes back
    said = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout
    peak = max(json.loads(line)["perf/peak_memory_mb"] for line in (folder / "run/metrics.jsonl").read_text().splitlines())
    return float(re.search(r"memory about ([\d.]+) GiB", said).group(1)) * 1024, peak, re.search(r"memory about.*", said).group(0)


def seven():
    """What the line would say for pythia-6.9b with the flags above; the weights exist on the device meta only."""
    args = rloo_tldr.parse_args(["tldr-pythia-1b", *SEVEN])
    config = transformers.GPTNeoXConfig(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, intermediate_size=16384,
                                        vocab_size=50432)  # fmt: skip
    with torch.device("meta"):
        model = transformers.GPTNeoXForCausalLM(config)
    for layer in [m for m in model.gpt_neox.modules() if isinstance(m, torch.nn.Linear)]:
        layer.weight = torch.nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)  # as bitsandbytes holds them
    model.requires_grad_(False)
    with torch.device("meta"):
        model = rloo_tldr.add_lora(model, dataclasses.replace(args, load_in_8bit=False))
        sizes = dict(hidden_size=2048, num_hidden_layers=24, intermediate_size=8192, vocab_size=50304, num_labels=1)
        reward = transformers.GPTNeoXForSequenceClassification(transformers.GPTNeoXConfig(**sizes))
    one = SimpleNamespace(device=torch.device("cpu"), distributed_type="NO", num_processes=1)
    said = rloo_tldr.describe_memory(model, model, config, args, 512 + 53, args.local_rollout_forward_batch_size, one).rsplit(", ", 1)[0]
    return f"{said}; the reward model's weights, pythia-1.4b in fp32: {4 * sum(p.numel() for p in reward.parameters()) / 2**30:.2f} GiB"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--7b", dest="only", action="store_true", help="the estimate for 7B parameters alone")
    only = parser.parse_args().only
    rows, file = [], ROOT / "benchmarks/memory.json"
    about = dict(command="python benchmarks/memory.py", torch=torch.__version__, seven=dict(flags=" ".join(SEVEN), said=seven()))
    print("pythia-6.9b", *about["seven"].values(), sep="\n  ")
    if only:
        file.write_text(json.dumps(about | dict(rows=json.loads(file.read_text())["rows"]), indent=1) + "\n")
        return
    for flags in FLAGS:
        for name, (layers, width) in SIZES.items():
            with tempfile.TemporaryDirectory() as folder:
                estimate, peak, line = run(Path(folder), layers, width, flags)
            rows.append(dict(flags=flags, size=name, estimate_mb=estimate, peak_mb=peak, line=line))
            base = rows[-1 - list(SIZES).index(name)]
            if name != "base":
                rows[-1] |= dict(more_estimated=estimate - base["estimate_mb"], more_measured=peak - base["peak_mb"])
                ratio = rows[-1]["more_measured"] / rows[-1]["more_estimated"]
                rows[-1]["measured_by_estimated"] = ratio
                print(f"{name:16} {flags:40} estimated {rows[-1]['more_estimated']:6.0f} MiB, measured {rows[-1]['more_measured']:6.0f}, "
                      f"{ratio:.2f}", flush=True)  # fmt: skip
    file.write_text(json.dumps(about | dict(rows=rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
