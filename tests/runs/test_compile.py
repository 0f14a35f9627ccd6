"""--compile: the same tokens as without, and one graph per token.

The compiler is replaced by one that only captures graphs (backend="eager"): it refuses whatever cannot be
captured, and is faster than one that writes C++. CUDA graphs are not tried: they need a GPU.
"""

import pytest
import torch
import transformers
from conftest import module_with
from run_tools import SMALL, rows_of, timeless

pytest_plugins = ["run_fixtures"]

RL = ("ppo_sentiment", "ppo_dialog", "rloo_tldr", "grpo_math")
ppo = module_with("CompiledPolicy", "generate")
CPU = torch.device("cpu")


@pytest.fixture
def captured(monkeypatch):
    """torch.compile only captures. A list with the options of each call."""
    calls = []
    compile = torch.compile

    def capture(function, **options):
        calls.append(options)
        options.pop("mode", None)
        return compile(function, backend="eager", **options)

    monkeypatch.setattr(torch, "compile", capture)
    torch.compiler.reset()
    yield calls
    torch.compiler.reset()


def batch(C=7, T=20):
    """Left-padded prompts of 1, 4, 7 tokens and random numbers for T tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 300, (3, C), generator=generator)
    mask = torch.arange(C) >= C - torch.tensor([[1], [4], [7]])
    return ids, mask, torch.rand(3, T, generator=generator)


def policies(folder, max_tokens=40, **flags):
    args = ppo.Args(dtype="float32", **flags)
    policy = ppo.load_model(transformers.AutoModelForCausalLM, folder).eval()
    return policy, ppo.compile_policy(policy, max_tokens, args, CPU)


@pytest.mark.parametrize("arch", ["gpt2", "gpt_neox", "llama"])
def test_the_same_tokens(captured, tiny_lm, arch):
    """Also in a second batch of another width, which uses the same cache and the same graph."""
    policy, compiled = policies(tiny_lm(arch))
    limits = torch.tensor([20, 3, 17])
    for C in (7, 9):
        ids, mask, uniforms = batch(C)
        tokens, _ = ppo.generate(policy, ids, mask, limits, uniforms, -1, 0.9)
        stop = tokens[2, 9].item()  # the third row ends there, or before
        expected = ppo.generate(policy, ids, mask, limits, uniforms, stop, 0.9)
        ours = ppo.generate(compiled, ids, mask, limits, uniforms, stop, 0.9)
        assert torch.equal(ours[0], expected[0])
        torch.testing.assert_close(ours[1], expected[1], rtol=0, atol=1e-5)
    assert len(compiled.caches) == 1
    assert [options["fullgraph"] for options in captured[:1]] == [True]


def test_new_weights_are_used(captured, tiny_lm):
    policy, compiled = policies(tiny_lm())
    ids, mask, uniforms = batch()
    limits = torch.full((3,), 20)
    before, _ = ppo.generate(compiled, ids, mask, limits, uniforms, -1, 1.0)
    with torch.no_grad():
        for p in policy.parameters():
            p.mul_(0.8)
    expected, _ = ppo.generate(policy, ids, mask, limits, uniforms, -1, 1.0)
    after, _ = ppo.generate(compiled, ids, mask, limits, uniforms, -1, 1.0)
    assert not torch.equal(before, after)
    assert torch.equal(after, expected)


def test_frozen_weights_are_shared(captured, tiny_lm):
    """There is no second copy of a base model with an adapter, and the adapter's new weights are used."""
    args = ppo.Args(dtype="float32", lora_r=4, lora_target_modules="all-linear")
    policy = ppo.load_model(transformers.AutoModelForCausalLM, tiny_lm("llama")).eval()
    policy = ppo.add_lora(policy, args)
    compiled = ppo.compile_policy(policy, 40, args, CPU)
    theirs = dict(policy.named_parameters())
    for name, p in compiled.sampler.named_parameters():
        assert (p is theirs[name]) == ("lora_" not in name), name
        assert not p.requires_grad or p is theirs[name]
    assert any(p.requires_grad for p in policy.parameters())
    with torch.no_grad():
        for name, p in theirs.items():
            if "lora_B" in name:
                p.add_(0.3)
    ids, mask, uniforms = batch()
    limits = torch.full((3,), 8)
    expected, _ = ppo.generate(policy, ids, mask, limits, uniforms, -1, 1.0)
    ours, _ = ppo.generate(compiled, ids, mask, limits, uniforms, -1, 1.0)
    assert torch.equal(ours, expected)


def test_sampling_stops_when_all_have_ended(captured, tiny_lm, monkeypatch):
    """It looks every 16 tokens."""
    _, compiled = policies(tiny_lm(), max_tokens=60)
    ids, mask, uniforms = batch(T=50)
    steps = []
    next_token = compiled.next_token
    monkeypatch.setattr(compiled, "next_token", lambda *inputs: steps.append(1) or next_token(*inputs))
    tokens, logprobs = ppo.generate(compiled, ids, mask, torch.tensor([4, 2, 18]), uniforms, -1, 1.0)
    assert len(steps) == 31  # the first token comes from the prompt
    assert (logprobs != 0).sum(1).tolist() == [4, 2, 18]
    assert not tokens[0, 4:].any() and not tokens[2, 18:].any()


def test_weights_are_rounded_once(captured, tiny_lm):
    """In bf16, the copy that samples has its linear layers in bf16. The policy keeps fp32."""
    args = ppo.Args(dtype="bfloat16")
    policy = ppo.load_model(transformers.AutoModelForCausalLM, tiny_lm("llama"))
    compiled = ppo.compile_policy(policy, 40, args, CPU)
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    layer = compiled.sampler.model.layers[0].mlp.up_proj
    assert layer.weight.dtype is torch.bfloat16 and not layer.weight.requires_grad
    ids, mask, uniforms = batch()
    with torch.autocast("cpu", torch.bfloat16):
        ppo.generate(compiled, ids, mask, torch.full((3,), 4), uniforms, -1, 1.0)
    [cache] = compiled.caches.values()
    assert {layer.keys.dtype for layer in cache.layers} == {torch.bfloat16}


@pytest.mark.parametrize("arch, reason", [("bloom", "takes no position_ids"), ("gpt_neo", "something else")])
def test_models_that_cannot(captured, tiny_lm, arch, reason):
    with pytest.raises(ppo.UserError, match=f"--compile: .*{reason}"):
        policies(tiny_lm(arch))


@pytest.mark.parametrize("name", RL)
def test_a_run_is_the_same(captured, scripts, small, name):
    """Rollouts, evaluation and update, up to rounding; the same responses."""
    flags = dict(SMALL[name], total_episodes=16)
    _, plain = scripts[name].train(small(name, "plain", **flags))
    _, folder = scripts[name].train(small(name, "compiled", compile=True, **flags))
    assert len(captured) >= 2
    assert rows_of(folder, "evaluation_samples.jsonl") == rows_of(plain, "evaluation_samples.jsonl")
    for ours, theirs in zip(timeless(rows_of(folder)), timeless(rows_of(plain))):
        for metric, value in theirs.items():
            if "gap" not in metric:
                assert ours[metric] == pytest.approx(value, rel=1e-3, abs=1e-4), metric
