"""Frozen weights and the cache under bf16: half the bytes, and exactly the same numbers.

The reference is autocast with everything in fp32, which rounds each weight to bf16 in every product.
"""

from argparse import Namespace

import peft
import pytest
import torch
import transformers
from conftest import module_with
from math_tools import padded_batch
from torch.utils._python_dispatch import TorchDispatchMode

ppo = module_with("to_device", "Cache", "generate", "response_logprobs")
CPU = torch.device("cpu")
ARCHITECTURES = ("gpt2", "gpt_neox", "llama")
LORA = Namespace(lora_r=4, lora_alpha=8, lora_target_modules="all-linear")
BF16, FP32 = Namespace(dtype="bfloat16"), Namespace(dtype="float32")


def load(folder, with_adapter):
    """A frozen language model, or one with a LoRA adapter that does something."""
    model = ppo.load_model(transformers.AutoModelForCausalLM, folder).eval()
    if not with_adapter:
        return model.requires_grad_(False)
    torch.manual_seed(5)
    model = ppo.add_lora(model, LORA)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data.normal_(std=0.1)
    return model


class RoundedParameters(TorchDispatchMode):
    """The names of a model's parameters that are rounded to bf16, once for each time."""

    def __init__(self, model):
        super().__init__()
        self.names_by_address = {p.data_ptr(): name for name, p in model.named_parameters()}
        self.names = []

    def __torch_dispatch__(self, function, types, inputs=(), named_inputs=None):
        result = function(*inputs, **(named_inputs or {}))
        if function is torch.ops.aten._to_copy.default and result.dtype is torch.bfloat16:
            address = inputs[0].data_ptr()
            if address in self.names_by_address:
                self.names.append(self.names_by_address[address])
        return result


# ---- Weights -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_adapter", [False, True])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_frozen_linear_layers_are_in_bf16_and_nothing_else(tiny_lm, arch, with_adapter):
    model = load(tiny_lm(arch), with_adapter)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert bool(trainable) == with_adapter
    ppo.to_device(model, BF16, CPU)
    rounded = {name for name, p in model.named_parameters() if p.dtype is torch.bfloat16}
    assert not rounded & trainable
    body, head = ppo.body_and_head(model)
    layers = [
        m for m in body.modules() if isinstance(m, (torch.nn.Linear, transformers.pytorch_utils.Conv1D))
    ]
    assert layers
    for layer in layers:
        for p in layer.parameters(recurse=False):
            assert p.dtype is (torch.float32 if p.requires_grad else torch.bfloat16)
    for module in model.modules():
        if isinstance(module, (torch.nn.Embedding, torch.nn.LayerNorm)) or "RMSNorm" in type(module).__name__:
            assert module.weight.dtype is torch.float32
    is_tied = head.weight is model.get_input_embeddings().weight
    assert head.weight.dtype is (torch.float32 if is_tied else torch.bfloat16)


def test_frozen_weights_stay_in_fp32_if_products_are_in_fp32(tiny_lm):
    model = ppo.to_device(load(tiny_lm("gpt2"), with_adapter=True), FP32, CPU)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_trained_weights_stay_in_fp32(tiny_lm):
    model = ppo.load_model(transformers.AutoModelForCausalLM, tiny_lm("llama"))
    ppo.to_device(model, BF16, CPU)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_shared_layers_are_rounded_once_for_policy_and_reference(tiny_lm):
    policy = ppo.load_model(transformers.AutoModelForCausalLM, tiny_lm("gpt2"))
    reference = ppo.share_layers(policy, 1).requires_grad_(False)
    ppo.to_device(torch.nn.ModuleList([policy, reference]), BF16, CPU)
    first, last = policy.transformer.h[0], policy.transformer.h[-1]
    assert first.mlp.c_fc.weight.dtype is torch.bfloat16
    assert first.mlp.c_fc.weight is reference.transformer.h[0].mlp.c_fc.weight
    assert last.mlp.c_fc.weight.dtype is torch.float32
    assert reference.transformer.h[-1].mlp.c_fc.weight.dtype is torch.bfloat16


# ---- Results -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_log_probabilities_and_gradients_stay_exactly_the_same(tiny_lm, arch):
    ids, mask, _, T = padded_batch()
    results = []
    for args in (FP32, BF16):  # what is stored; autocast is on both times
        model = ppo.to_device(load(tiny_lm(arch), with_adapter=True), args, CPU)
        with torch.autocast("cpu", torch.bfloat16):
            logprobs, entropies, hidden = ppo.response_logprobs(model, ids, mask, T, 0.7)
            (logprobs.sum() + hidden.float().square().sum()).backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        results.append((logprobs, entropies, hidden, gradients))
    (*fp32, fp32_gradients), (*bf16, bf16_gradients) = results
    for x, y in zip(fp32, bf16):
        assert torch.equal(x, y)
    assert fp32_gradients.keys() == bf16_gradients.keys()
    for name, gradient in fp32_gradients.items():
        assert torch.equal(gradient, bf16_gradients[name]), name


def sample(model, monkeypatch, cache_class):
    """-> tokens, log-probabilities and the cache of `generate` under autocast."""
    caches = []

    def make_cache(**settings):
        caches.append(cache_class(**settings))
        return caches[-1]

    monkeypatch.setattr(ppo, "Cache", make_cache)
    ids, mask, _, _ = padded_batch(C=9)
    ids, mask = ids[:, :9], mask[:, :9]  # the prompts
    uniforms = torch.rand(len(ids), 8, generator=torch.Generator().manual_seed(3))
    limits = torch.full((len(ids),), 8)
    with torch.autocast("cpu", torch.bfloat16):
        tokens, logprobs = ppo.generate(model, ids, mask, limits, uniforms, -1, 1.0)
    [cache] = caches
    return tokens, logprobs, cache


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_cache_in_bf16_samples_exactly_the_same_tokens(tiny_lm, monkeypatch, arch):
    model = load(tiny_lm(arch), with_adapter=False)
    tokens, logprobs, cache = sample(model, monkeypatch, ppo.Cache)
    plain_tokens, plain_logprobs, _ = sample(model, monkeypatch, transformers.DynamicCache)
    assert torch.equal(tokens, plain_tokens) and torch.equal(logprobs, plain_logprobs)
    for layer in cache.layers:
        assert layer.keys.dtype is torch.bfloat16 and layer.values.dtype is torch.bfloat16


def test_a_cache_in_fp32_stays_in_fp32():
    cache = ppo.Cache()
    keys = torch.randn(1, 2, 3, 4)
    returned, _ = cache.update(keys, keys + 1, 0)
    assert torch.equal(returned, keys)
    _, values = cache.update(keys[:, :, :1], keys[:, :, :1] + 2, 0)
    assert torch.equal(values, torch.cat([keys + 1, keys[:, :, :1] + 2], 2))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_no_frozen_weight_is_rounded_while_tokens_are_sampled(tiny_lm, monkeypatch, arch):
    """Only the output layer, if it is tied to the embedding, and only once."""
    model = load(tiny_lm(arch), with_adapter=False)
    with RoundedParameters(model) as before:
        sample(model, monkeypatch, ppo.Cache)
    matrices = [name for name, p in model.named_parameters() if p.dim() == 2 and "emb" not in name]
    assert len(before.names) > 4 * len(matrices)

    ppo.to_device(model, BF16, CPU)
    with RoundedParameters(model) as after:
        sample(model, monkeypatch, ppo.Cache)
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert len(after.names) == (1 if is_tied else 0)


# ---- Saving ------------------------------------------------------------------------------------------------


def test_an_adapter_is_merged_in_fp32(tiny_lm, tmp_path):
    """What is saved is the rounded weight, as it was used, plus the whole adapter."""
    folder = tiny_lm("llama")
    model = ppo.to_device(load(folder, with_adapter=True), BF16, CPU)
    layer = model.get_base_model().model.layers[0].mlp.up_proj
    update = layer.get_delta_weight("default").detach().float()
    expected = layer.base_layer.weight.float() + update
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ppo.save_policy(model, tokenizer, tmp_path / "model")
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert {p.dtype for p in saved.parameters()} == {torch.float32}
    torch.testing.assert_close(saved.model.layers[0].mlp.up_proj.weight, expected, rtol=0, atol=1e-6)
    assert (tmp_path / "adapter/adapter_model.safetensors").exists()
    assert peft.PeftConfig.from_pretrained(tmp_path / "adapter").r == 4
