"""Token steps that a GPU records (TOKENS_PER_ROUND in grpo_math.py): are they right, and how fast are they?

    python benchmarks/gpu_rollout.py OUT.json          # on a GPU, about two minutes; no network, random weights
    python benchmarks/gpu_rollout.py OUT.json --toy    # on a CPU, at toy size, with emulated recordings

right     the same rollout with steps that are recorded, with steps that are called, and with a cache that grows;
          how far the sampled log-probabilities are from those of the update
step      milliseconds per token step. recorded: a rollout of 128 tokens / 128, so with prompts and recording;
          growing cache (64 and 256 rows): rollouts of 128 and of 64 tokens, their difference / 64
rollout   256 responses of 512 tokens, with rounds of 64 to 512 tokens
casts     only with --only casts --lora: milliseconds per recorded step with frozen weights in fp32, which autocast rounds in each
          step, and in bf16; whether the results are the same bits
Exit code 1: recorded steps are not right.
"""

import argparse
import importlib
import json
import os
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as the scripts do, before torch
import torch  # noqa: E402
import transformers  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
parser = argparse.ArgumentParser()
parser.add_argument("out")
parser.add_argument("--toy", action="store_true")
parser.add_argument("--shapes", nargs="*", default=["qwen2.5-0.5b", "gpt2-124m", "pythia-1b"])
parser.add_argument("--script", default="grpo_math")  # or rloo_tldr, grpo_tools: their generate records too
parser.add_argument("--only", nargs="*", default=["right", "step", "rollout"])  # sections
parser.add_argument("--lora", action="store_true")  # the models have a LoRA adapter
options = parser.parse_args()
script = importlib.import_module(options.script)
TOY = options.toy
DEVICE = "cpu" if TOY else "cuda"
C, K = (8, 2) if TOY else (100, 8)  # tokens of a prompt, responses to a prompt
NO_STOP = torch.tensor([-1], device=DEVICE)
found = {}


def note(section, item, **values):
    """Print a measurement and keep it."""
    values = {k: round(v, 6) if isinstance(v, float) else v for k, v in values.items()}
    print(f"{section:8} {item:40} {values}", flush=True)
    found.setdefault(section, {})[item] = values
    Path(options.out).write_text(json.dumps(found, indent=1) + "\n")


def make_model(shape):
    """A model of this shape with random weights, changed as load_model changes it."""
    if shape == "qwen2.5-0.5b":
        sizes = dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14)
        sizes |= dict(num_key_value_heads=2, vocab_size=151_936, tie_word_embeddings=True)
        toy = dict(hidden_size=56, intermediate_size=64, num_hidden_layers=2, vocab_size=97)
        config = transformers.Qwen2Config(**sizes | (toy if TOY else {}))
    elif shape == "gpt2-124m":
        toy = dict(n_embd=24, n_layer=2, vocab_size=97)
        config = transformers.GPT2Config(**(toy if TOY else {}))
    elif shape == "pythia-1b":
        sizes = dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=8)
        toy = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=97)
        config = transformers.GPTNeoXConfig(**sizes | (toy if TOY else {}))
    elif shape.startswith("llama"):
        sizes = dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32)
        sizes |= dict(num_key_value_heads=8, vocab_size=128_256, tie_word_embeddings=True)
        if shape == "llama-7b":
            sizes = {}  # the defaults of transformers
        toy = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, vocab_size=97)
        config = transformers.LlamaConfig(**sizes | (toy if TOY else {}))
    torch.manual_seed(1)
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.mul_(2)  # random weights are so small that all tokens would be equally likely
    model = swap_kernels(model)
    if options.lora:
        model = script.add_lora(
            model, SimpleNamespace(lora_r=16, lora_alpha=32, lora_target_modules="all-linear")
        ).eval()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_B" in name:
                    p.normal_(0, 0.02)  # so that the adapter does something
    return model


def swap_kernels(model):
    """The part of load_model that replaces modules, on a model that is already there."""
    no_report = {"missing_keys": set(), "mismatched_keys": set()}
    with (
        patch.object(script, "resolve_path", return_value="."),
        patch.object(transformers.utils.peft_utils, "find_adapter_config_file", return_value=None),
        patch.object(script.AutoModelForCausalLM, "from_pretrained", return_value=(model, no_report)),
    ):
        return script.load_model(script.AutoModelForCausalLM, ".").eval()


@contextmanager
def rounds(how, n=128):
    """Recorded rounds of n tokens, the same rounds with called steps, or rounds of one token."""

    def call(step, count):
        for _ in range(count):
            step()

    with ExitStack() as stack:
        stack.enter_context(patch.object(script, "TOKENS_PER_ROUND", n))
        if how == "one token" or TOY:
            stack.enter_context(patch.object(script, "can_be_recorded", lambda *_: how != "one token"))
        if how == "called":
            stack.enter_context(patch.object(script, "repeat", call))
        yield


def generate(model, rows, T, how, n=128, is_bf16=True, stop_ids=NO_STOP):
    """-> tokens, log-probabilities, seconds, GiB"""
    generator = torch.Generator().manual_seed(rows)
    P = rows // K
    lengths = torch.randint(C // 2, C + 1, (P,), generator=generator)
    lengths[0] = C
    mask = (torch.arange(C) >= C - lengths[:, None]).to(DEVICE)
    vocabulary = model.config.vocab_size
    ids = torch.randint(vocabulary, (P, C), generator=generator).to(DEVICE)
    uniforms = torch.rand(P, K, T, dtype=torch.float64, generator=generator).to(DEVICE)
    reset_memory()
    start = clock()
    with rounds(how, n), torch.autocast(DEVICE, torch.bfloat16, enabled=is_bf16), torch.no_grad():
        tokens, logprobs = script.generate(model, ids, mask, uniforms, stop_ids, 1.0)
    return (ids, mask), tokens, logprobs, clock() - start, peak_gib()


def clock():
    """Seconds, after the GPU has finished."""
    if not TOY:
        torch.cuda.synchronize()
    return time.perf_counter()


def reset_memory():
    """Freed memory stays with torch, as in training. So call what is timed once before."""
    if not TOY:
        torch.cuda.reset_peak_memory_stats()


def peak_gib():
    return 0.0 if TOY else torch.cuda.max_memory_allocated() / 2**30


def is_right(shape, model):
    """Compare rollouts with recorded, called and growing steps."""
    rows, T = (8, 20) if TOY else (64, 200)
    n = 8 if TOY else 64
    stop_ids = torch.arange(0, model.config.vocab_size, 200, device=DEVICE)  # about every 200th token
    good = True
    for is_bf16 in (True, False):
        outputs = {}
        for how in ("recorded", "called", "one token"):
            outputs[how] = generate(model, rows, T, how, n, is_bf16, stop_ids)
        (ids, mask), tokens, logprobs, _, _ = outputs["recorded"]
        gaps = {}
        for how, (_, own_tokens, own_logprobs, _, _) in outputs.items():
            valid = own_logprobs != 0
            row_ids = torch.cat([ids.repeat_interleave(K, 0), own_tokens], 1)
            row_mask = torch.cat([mask.repeat_interleave(K, 0), valid], 1)
            with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16, enabled=is_bf16):
                updated, _ = script.response_logprobs(model, row_ids, row_mask, T, 1.0)
            gaps[how] = (updated - own_logprobs)[valid].abs().mean().item()
        note(
            "right",
            f"{shape}, {'bf16' if is_bf16 else 'fp32'}",
            tokens=int((logprobs != 0).sum()),
            tokens_unlike_called=int((tokens != outputs["called"][1]).sum()),
            rows_unlike_one_token=int((tokens != outputs["one token"][1]).any(-1).sum()),
            rows=rows,
            gap_recorded=gaps["recorded"],
            gap_called=gaps["called"],
            gap_one_token=gaps["one token"],
        )
        good = good and gaps["recorded"] < 2 * gaps["one token"] + 1e-5
    return good


def time_steps(shape, model):
    """Milliseconds per token step."""
    n = 8 if TOY else 128
    for rows in (8,) if TOY else (64, 256, 512, 1024):
        generate(model, rows, n, "recorded", n)
        _, _, _, seconds, gib = generate(model, rows, n, "recorded", n)
        values = dict(ms_recorded=seconds / n * 1e3, gib=gib)
        if rows <= 256:  # Python takes most of the time, so more rows take about as long
            generate(model, rows, n, "one token")
            few, many = (generate(model, rows, T, "one token")[3] for T in (n // 2, n))
            values["ms_growing_cache"] = (many - few) / (n - n // 2) * 1e3
        note("step", f"{shape}, {rows} rows", **values)


def time_rollouts(shape, model):
    """Whole rollouts; none ends early."""
    rows, T = (8, 20) if TOY else (256, 512)
    generate(model, rows, T, "recorded")
    for n in (4, 8) if TOY else (64, 128, 256, 512):
        _, _, logprobs, seconds, gib = generate(model, rows, T, "recorded", n)
        tokens = int((logprobs != 0).sum())
        values = dict(seconds=seconds, tokens=tokens, tokens_per_second=tokens / seconds, gib=gib)
        note("rollout", f"{shape}, none ends early, rounds of {n}", **values)


def time_casts(shape, model):
    """Round the frozen weights of a model with an adapter. Under autocast, no result changes."""
    rows, n = (8, 8) if TOY else (64, 128)
    outputs = []
    for dtype in ("fp32", "bf16"):
        if dtype == "bf16":
            script.round_frozen_weights(model, only_if_exact=False)
        generate(model, rows, n, "recorded", n)
        _, tokens, logprobs, seconds, gib = generate(model, rows, n, "recorded", n)
        note("casts", f"{shape}, frozen weights in {dtype}", ms_recorded=seconds / n * 1e3, gib=gib)
        outputs.append((tokens, logprobs))
    same = all(torch.equal(x, y) for x, y in zip(*outputs))
    note("casts", f"{shape}, both", same_bits=same)


def main():
    torch.set_float32_matmul_precision("high")  # as the scripts do
    name = "CPU, toy sizes" if TOY else torch.cuda.get_device_name()
    note("versions", "device", name=name, torch=torch.__version__, transformers=transformers.__version__)
    good = True
    for shape in options.shapes:
        model = make_model(shape)
        if "right" in options.only:
            good = is_right(shape, model) and good
        if "step" in options.only:
            time_steps(shape, model)
        if "rollout" in options.only and shape == "qwen2.5-0.5b":
            time_rollouts(shape, model)
        if "casts" in options.only:
            time_casts(shape, model)
    print("recorded steps are right" if good else "WRONG: recorded steps are not right")
    sys.exit(not good)


if __name__ == "__main__":
    if TOY:
        import cuda_graphs

        with ExitStack() as stack:
            cuda_graphs.install(stack)
            main()
    else:
        main()
