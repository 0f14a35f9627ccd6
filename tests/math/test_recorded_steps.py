"""Recorded token steps: a round that is replayed must give the bits of one whose steps are called one by one.

No GPU is needed: tests/cuda_graphs.py does on a CPU what CUDA graphs do.
"""

import importlib
from contextlib import ExitStack, contextmanager

import cuda_graphs
import peft
import pytest
import torch
import transformers
from math_tools import close, left_padded, random_ids, random_model

import ppo_sentiment
import rloo_tldr

ARCHITECTURES = ("gpt2", "gpt_neox", "opt", "bloom", "llama", "qwen2")
B, T, ROUND = 5, 21, 8  # rounds of 8, 8 and 5 tokens
STOP_IDS = torch.arange(3, 25)


@pytest.fixture
def emulated():
    """CUDA graphs of the CPU."""
    with ExitStack() as stack:
        cuda_graphs.install(stack)
        cuda_graphs.Graph.lengths.clear()
        yield cuda_graphs.Graph


@contextmanager
def rounds(name, how):
    """A script whose rounds are recorded or called (without a recording), or whose loop is the plain one."""
    script = importlib.import_module(name)

    def is_possible(policy, cache):
        body, _ = script.body_and_head(policy)
        return body._can_compile_fullgraph and all(type(x) is script.DynamicLayer for x in cache.layers)

    def call(step, count):
        for _ in range(count):
            step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "TOKENS_PER_ROUND", ROUND)
        if how != "one token":
            patch.setattr(script, "can_be_recorded", is_possible)
        if how == "called":
            patch.setattr(script, "repeat", call)
        yield script


def model_of(tiny_lm, arch, lora=False):
    """A model in evaluation mode. The adapter does something."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_lm(arch))
    if lora:
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_B" in name:
                    p.normal_(0, 0.2)
    return model.eval()


def generated(how, model, bf16=False, name="rloo_tldr"):
    """Three responses to each prompt: tokens and log-probabilities."""
    ids, mask = left_padded([random_ids(n, seed=20 + n) for n in (6, 2, 4, 1, 5)], 6)
    generator = torch.Generator().manual_seed(4)
    uniforms = torch.rand(B, 3, T, dtype=torch.float64, generator=generator)
    with rounds(name, how) as script, torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        return script.generate(model, ids, mask, uniforms, STOP_IDS, 0.8)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("bf16", [False, True])
def test_recorded_steps_are_called_steps(tiny_lm, emulated, arch, lora, bf16):
    """Bit for bit. And they are today's steps on a CPU, whose cache grows, up to rounding."""
    model = model_of(tiny_lm, arch, lora)
    tokens, logprobs = generated("recorded", model, bf16)
    assert emulated.lengths
    for ours, called in zip((tokens, logprobs), generated("called", model, bf16)):
        assert torch.equal(ours, called)
    if not bf16:  # bf16 may choose other tokens
        assert_like_the_plain_loop(tokens, logprobs, model)


def test_grpo_records_too(tiny_lm, emulated):
    model = model_of(tiny_lm, "llama")
    tokens, logprobs = generated("recorded", model, name="grpo_math")
    assert emulated.lengths
    assert_like_the_plain_loop(tokens, logprobs, model)


def assert_like_the_plain_loop(tokens, logprobs, model):
    """The same tokens as with a cache that grows. Some responses end in the first round, and some never."""
    own_tokens, own_logprobs = generated("one token", model)
    assert torch.equal(tokens, own_tokens)
    close(logprobs, own_logprobs, rtol=0, atol=1e-5)
    lengths = (logprobs != 0).sum(-1)
    assert lengths.min() < ROUND and lengths.max() == T


def test_a_recording_sees_new_weights(tiny_lm, emulated):
    """An optimizer changes weights in place. The next rollout records anew, under autocast too."""
    model = model_of(tiny_lm, "llama")
    _, before = generated("recorded", model, bf16=True)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.02)
    _, after = generated("recorded", model, bf16=True)
    assert torch.equal(after, generated("called", model, bf16=True)[1])
    assert not torch.equal(after, before)


@pytest.mark.parametrize("arch, expected", [("gpt_neo", False), ("mistral", False), ("llama", True)])
def test_what_cannot_be_recorded(tiny_lm, monkeypatch, arch, expected):
    """Sliding windows, whose columns move, and models that transformers cannot compile."""
    model = random_model("mistral", sliding_window=4) if arch == "mistral" else model_of(tiny_lm, arch)
    script = rloo_tldr
    cache = transformers.DynamicCache(config=model.config)
    assert not script.can_be_recorded(model, cache)  # on a CPU
    monkeypatch.setattr(transformers.PreTrainedModel, "device", torch.device("cuda"))
    assert script.can_be_recorded(model, cache) == expected


NEEDS_THE_CPU = {
    "llama": dict(rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)),
    "falcon": dict(),
    "mixtral": dict(sliding_window=None),
}


@pytest.mark.parametrize("kind", NEEDS_THE_CPU)
def test_steps_that_need_the_cpu_are_not_recorded(emulated, monkeypatch, kind):
    """A recording would fail. transformers can compile these models, but its compiler moves such lines."""
    model = random_model(kind, vocab_size=1024, **NEEDS_THE_CPU[kind]).eval()
    with pytest.raises(AssertionError, match="while recording"):
        generated("recorded", model)
    generated("one token", model)
    cache = transformers.DynamicCache(config=model.config)
    monkeypatch.setattr(transformers.PreTrainedModel, "device", torch.device("cuda"))
    assert model.base_model._can_compile_fullgraph
    assert not rloo_tldr.can_be_recorded(model, cache)


def test_fused_norms_are_the_same(tiny_lm):
    """load_model replaces RMSNorm by torch's. On a CPU the bits are the same, gradients up to rounding."""
    folder = tiny_lm("qwen2")
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    fused = ppo_sentiment.load_model(transformers.AutoModelForCausalLM, str(folder)).eval()
    assert sum(isinstance(module, torch.nn.RMSNorm) for module in fused.modules()) == 5
    assert fused.state_dict().keys() == plain.state_dict().keys()
    ids = random_ids(3, 9, seed=2)
    outputs = [model(ids, labels=ids) for model in (plain, fused)]
    assert torch.equal(outputs[0].logits, outputs[1].logits)
    for output in outputs:
        output.loss.backward()
    for ours, theirs in zip(fused.parameters(), plain.parameters()):
        close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
