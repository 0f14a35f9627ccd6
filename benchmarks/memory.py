"""Peak memory of rloo_tldr.py by size of the policy, with and without LoRA and gradient checkpointing.

    python benchmarks/memory.py    # 12 runs of one update, about 5 minutes on 2 cores

Writes results/memory.json. The policies are GPT-2s with random weights; prompts are those of data/tldr. The libraries,
the reward model and the data take memory too: the row "base", a policy of almost no size, shows how much.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
SIZES = {"base": (1, 32), "6 layers x 512": (6, 512), "10 layers x 640": (10, 640)}
FLAGS = ["", "--gradient-checkpointing", "--lora-r 16", "--lora-r 16 --gradient-checkpointing"]


def make_policy(folder, layers, width):
    """Save a GPT-2 of this size with the tokenizer of checkpoints/tldr-sft. -> its number of parameters"""
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "checkpoints/tldr-sft")
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer), n_layer=layers, n_embd=width, n_head=max(1, width // 64), n_positions=512
    )
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.num_parameters()


def peak_memory_mb(policy, folder, flags):
    """Run one update of 64 responses, 32 per pass. -> peak memory of the process"""
    command = [
        *(sys.executable, "rloo_tldr.py", "tiny", "--model-name-or-path", str(policy), *flags.split()),
        *("--total-episodes", "64", "--per-device-train-batch-size", "32"),
        *(
            "--local-rollout-forward-batch-size",
            "64",
            "--num-eval-prompts",
            "4",
            "--num-sample-generations",
            "0",
        ),
        *("--save-every", "0", "--output-dir", str(folder)),
    ]
    # Freed memory goes back to the system, so that the peak is what was needed at once.
    env = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "MALLOC_TRIM_THRESHOLD_": "0",
        "MALLOC_MMAP_THRESHOLD_": "65536",
    }
    subprocess.run(command, cwd=ROOT, env=env, capture_output=True, check=True)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return max(json.loads(line)["perf/peak_memory_mb"] for line in lines)


def main():
    rows = []
    for flags in FLAGS:
        for size, (layers, width) in SIZES.items():
            with tempfile.TemporaryDirectory() as folder:
                parameters = make_policy(Path(folder, "policy"), layers, width)
                peak = peak_memory_mb(Path(folder, "policy"), Path(folder, "run"), flags)
            rows.append({"flags": flags, "size": size, "parameters": parameters, "peak_mb": peak})
            print(f"{size:16} {flags:40} {peak:6.0f} MB", flush=True)
    about = {"command": "python benchmarks/memory.py", "torch": torch.__version__, "rows": rows}
    (ROOT / "results/memory.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
