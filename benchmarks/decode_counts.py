"""What one generated token costs besides arithmetic, under bf16: operators, roundings of weights, bytes.

    python benchmarks/decode_counts.py    # half a minute; writes results/decode_counts.json

A frozen model of 16 layers with random weights generates, once with all weights and the cache as they come (fp32 under
autocast), and once as the scripts do it: frozen weights of linear layers in bf16 (to_device), keys and values in bf16
(Cache). Operators and bytes are counted, not timed, so they are the same on any machine.
"""

import json
import sys
from argparse import Namespace
from pathlib import Path

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import ppo_sentiment as ppo  # noqa: E402

B, C, T = 4, 8, 12  # responses, tokens of a prompt, tokens of a response
CPU = torch.device("cpu")
LAYERS, WIDTH, HEADS, VOCABULARY = 16, 256, 4, 2000
USUAL = dict(
    num_hidden_layers=LAYERS,
    hidden_size=WIDTH,
    num_attention_heads=HEADS,
    intermediate_size=4 * WIDTH,
    vocab_size=VOCABULARY,
    tie_word_embeddings=False,
)
CONFIGS = {
    "GPT-2": transformers.GPT2Config(n_layer=LAYERS, n_embd=WIDTH, n_head=HEADS, vocab_size=VOCABULARY),
    "NeoX (Pythia)": transformers.GPTNeoXConfig(**USUAL),
    "Llama": transformers.LlamaConfig(**USUAL, num_key_value_heads=HEADS),
}


class Counts(TorchDispatchMode):
    """Counts operators, and bytes that are written when parameters are rounded to bf16."""

    def __init__(self, model):
        super().__init__()
        self.addresses = {p.data_ptr() for p in model.parameters()}
        self.operators, self.roundings, self.rounded_bytes = 0, 0, 0

    def __torch_dispatch__(self, function, types, inputs=(), named_inputs=None):
        result = function(*inputs, **(named_inputs or {}))
        self.operators += 1
        is_rounding = function is torch.ops.aten._to_copy.default and result.dtype is torch.bfloat16
        if is_rounding and inputs[0].data_ptr() in self.addresses:
            self.roundings += 1
            self.rounded_bytes += 2 * result.numel()
        return result


def generate(model, cache_class, num_tokens):
    """Generate num_tokens tokens under autocast. -> Counts, bytes of the cache"""
    caches = []

    def make_cache(**settings):
        caches.append(cache_class(**settings))
        return caches[-1]

    original, ppo.Cache = ppo.Cache, make_cache
    ids = torch.arange(B * C).view(B, C) + 5
    mask = torch.ones(B, C, dtype=torch.bool)
    uniforms = torch.rand(B, num_tokens, generator=torch.Generator().manual_seed(0))
    limits = torch.full((B,), num_tokens)
    with torch.autocast("cpu", torch.bfloat16), Counts(model) as counts:
        ppo.generate(model, ids, mask, limits, uniforms, stop_token_id=-1, temperature=1.0)
    ppo.Cache = original
    tensors = [x for layer in caches[0].layers for x in (layer.keys, layer.values)]
    return counts, sum(x.numel() * x.element_size() for x in tensors)


def measure(name, as_shipped):
    """Counts per generated token: the difference between T tokens and 2. -> dict"""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]).eval().requires_grad_(False)
    if as_shipped:
        ppo.to_device(model, Namespace(dtype="bfloat16"), CPU)
    cache_class = ppo.Cache if as_shipped else transformers.DynamicCache
    few, _ = generate(model, cache_class, 2)
    many, cache_bytes = generate(model, cache_class, T)
    steps = T - 2
    cached_tokens = B * (C + T - 1)
    return {
        "model": name,
        "weights and cache": "bf16 if frozen" if as_shipped else "fp32",
        "operators per token": (many.operators - few.operators) / steps,
        "weights rounded per token": (many.roundings - few.roundings) / steps,
        "MB rounded per token": (many.rounded_bytes - few.rounded_bytes) / steps / 1e6,
        "MB of weights": sum(p.numel() * p.element_size() for p in model.parameters()) / 1e6,
        "KB of cache per cached token": cache_bytes / cached_tokens / 1e3,
    }


def main():
    rows = [measure(name, as_shipped) for name in CONFIGS for as_shipped in (False, True)]
    for row in rows:
        print(" | ".join(f"{x:.4g}" if isinstance(x, float) else x for x in row.values()))
    result = {
        "command": "python benchmarks/decode_counts.py",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "rows": rows,
    }
    (ROOT / "results/decode_counts.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
