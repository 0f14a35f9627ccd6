"""Peak memory of rloo_tldr.py by size of the policy, with and without LoRA and gradient checkpointing.

    python benchmarks/memory.py    # 12 runs of one update, about 5 minutes on 2 cores

Without a GPU, it writes results/memory.json. The policies are GPT-2s with random weights; prompts are those of
data/tldr. The libraries, the reward model and the data take memory too: the row "base", a policy of almost no size,
shows how much. With a GPU, it writes results/gpu-memory.json: GPT-2 and the shapes of two Pythias, in bf16.
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
FLAGS = ["", "--gradient-checkpointing", "--lora-r 16", "--lora-r 16 --gradient-checkpointing"]


def gpt2(layers, width):
    config = dict(n_layer=layers, n_embd=width, n_head=max(1, width // 64), n_positions=512, vocab_size=1024)
    return transformers.GPT2Config(**config)


def pythia(layers, width, heads):
    config = dict(num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, vocab_size=50_304)
    return transformers.GPTNeoXConfig(**config, intermediate_size=4 * width, bos_token_id=0, eos_token_id=0)


ON_CPU = {"base": gpt2(1, 32), "6 layers x 512": gpt2(6, 512), "10 layers x 640": gpt2(10, 640)}
ON_GPU = {
    "gpt2-124m": transformers.GPT2Config(bos_token_id=0, eos_token_id=0),
    "pythia-410m": pythia(24, 1024, 16),
    "pythia-1b": pythia(16, 2048, 8),
}


def peak_memory_mb(policy, folder, flags):
    """Run one update of 64 responses, 32 per pass. -> peak memory: of the GPU, or of the process"""
    command = [
        *(sys.executable, "rloo_tldr.py", "tiny", "--model-name-or-path", str(policy), *flags.split()),
        *"--total-episodes 64 --per-device-train-batch-size 32 --local-rollout-forward-batch-size 64".split(),
        *"--num-eval-prompts 4 --num-sample-generations 0 --save-every 0".split(),
        *("--dtype", "bfloat16" if torch.cuda.is_available() else "float32", "--output-dir", str(folder)),
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
    has_gpu = torch.cuda.is_available()
    rows = []
    for flags in FLAGS:
        for size, config in (ON_GPU if has_gpu else ON_CPU).items():
            with tempfile.TemporaryDirectory() as folder:
                policy = Path(folder, "policy")
                model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
                model.save_pretrained(policy)
                transformers.AutoTokenizer.from_pretrained(ROOT / "checkpoints/tldr-sft").save_pretrained(
                    policy
                )
                peak = peak_memory_mb(policy, Path(folder, "run"), flags)
            rows.append({"flags": flags, "size": size, "parameters": model.num_parameters(), "peak_mb": peak})
            print(f"{size:16} {flags:40} {peak:6.0f} MB", flush=True)
    device = torch.cuda.get_device_name() if has_gpu else "CPU"
    about = {
        "command": "python benchmarks/memory.py",
        "device": device,
        "torch": torch.__version__,
        "rows": rows,
    }
    name = "gpu-memory" if has_gpu else "memory"
    (ROOT / f"results/{name}.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
