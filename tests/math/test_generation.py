"""Generation against transformers, which reads each finished text alone, without padding or a cache."""

import naive
import pytest
import torch
from conftest import ARCHITECTURES
from math_tools import close, left_padded, logprobs_alone, random_ids

import ppo_sentiment as ppo
import rloo_tldr as rloo

T = 8
NO_STOP_TOKEN = torch.tensor([], dtype=torch.long)


def prompts_to_continue():
    """Five prompts. -> rows, ids, mask, max_new_tokens, uniforms"""
    rows = [random_ids(n, seed=20 + n) for n in (6, 2, 4, 1, 5)]
    ids, mask = left_padded(rows, 6)
    uniforms = torch.rand(len(rows), T, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    return rows, ids, mask, torch.tensor([3, 8, 5, 1, 8]), uniforms


def assert_sampled_from(model, prompt, tokens, logprobs, uniforms, temperature):
    """The tokens of one response, and their log-probabilities, are those of transformers' softmax.

    A uniform number within 1e-5 of a border may give either token.
    """
    table = logprobs_alone(model, torch.cat([prompt, tokens]), temperature)[len(prompt) - 1 : -1]
    for token, row, u in zip(tokens.tolist(), table.tolist(), uniforms.tolist()):
        near = [min(max(u + shift, 0.0), 1 - 1e-9) for shift in (-1e-5, 0.0, 1e-5)]
        assert token in {naive.sample_token(row, x) for x in near}
    close(logprobs, table.gather(1, tokens[:, None]).squeeze(1), rtol=0, atol=1e-4)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_generate_samples_from_transformers_softmax(language_model, arch, temperature):
    """Tricks 11 and 12. Rows end at their own limits or at a stop token, each at another step."""
    model = language_model(arch)
    rows, ids, mask, max_new_tokens, uniforms = prompts_to_continue()
    inputs = ids, mask, max_new_tokens, uniforms
    free, _ = ppo.generate(model, *inputs, NO_STOP_TOKEN, temperature)
    stop_ids = free[[1, 4], [3, 6]]  # whichever comes first
    tokens, logprobs = ppo.generate(model, *inputs, stop_ids, temperature)
    assert tokens.shape == logprobs.shape == uniforms.shape
    lengths = torch.minimum(ppo.response_lengths(free, stop_ids), max_new_tokens).tolist()
    assert lengths[1] <= 4
    for i, (row, n) in enumerate(zip(rows, lengths)):
        assert torch.equal(tokens[i, :n], free[i, :n])
        assert not tokens[i, n:].any() and not logprobs[i, n:].any()
        assert_sampled_from(model, row, tokens[i, :n], logprobs[i, :n], uniforms[i, :n], temperature)


def test_generate_groups_is_generate_for_each_response(language_model):
    """rloo_tldr.py reads each prompt once for all its responses. They are as if generated one by one."""
    model = language_model("llama")
    _, ids, mask, _, _ = prompts_to_continue()
    k = 3
    uniforms = torch.rand(5, k, T, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    free, _ = rloo.generate(model, ids, mask, uniforms, NO_STOP_TOKEN, 0.7)
    stop_ids = free.view(5, k, T)[[2, 0], [1, 2], [3, 5]]
    tokens, logprobs = rloo.generate(model, ids, mask, uniforms, stop_ids, 0.7)
    assert tokens.shape == logprobs.shape == (5 * k, T)
    for j in range(k):  # the responses to a prompt are neighbors
        expected = ppo.generate(model, ids, mask, torch.full((5,), T), uniforms[:, j], stop_ids, 0.7)
        assert torch.equal(tokens[j::k], expected[0])
        close(logprobs[j::k], expected[1], rtol=0, atol=1e-5)
    assert not torch.equal(tokens, free)  # something did stop


def test_generate_under_autocast_sums_in_fp32(language_model):
    """A token's interval of the float64 cumulative distribution has its uniform number, give or take 1e-5.

    Logits or probabilities in bf16 would be off by 4e-3.
    """
    model, n = language_model("gpt2"), 4096
    ids = torch.zeros(n, 1, dtype=torch.long)
    uniforms = (torch.arange(n)[:, None].double() + 0.5) / n
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        tokens, logprobs = ppo.generate(
            model, ids, ids == 0, torch.ones(n).long(), uniforms, NO_STOP_TOKEN, 1.0
        )
        hidden = model.transformer(ids).last_hidden_state[0, -1].double()
    probs = (model.lm_head.weight.double() @ hidden).softmax(-1)
    ends = probs.cumsum(-1)
    starts = ends - probs
    assert (starts[tokens] - 1e-5 < uniforms).all()
    assert (uniforms < ends[tokens] + 1e-5).all()
    close(logprobs, probs[tokens].log(), rtol=0, atol=1e-5)


def test_generate_does_not_depend_on_the_batch(language_model):
    """Each row alone, without its padding, gets the same tokens."""
    model = language_model("gpt2")
    rows, ids, mask, max_new_tokens, uniforms = prompts_to_continue()
    tokens, logprobs = ppo.generate(model, ids, mask, max_new_tokens, uniforms, torch.tensor([5]), 1.0)
    for i, row in enumerate(rows):
        one = slice(i, i + 1)
        inputs = row[None], torch.ones(1, len(row)).bool(), max_new_tokens[one], uniforms[one]
        alone = ppo.generate(model, *inputs, torch.tensor([5]), 1.0)
        assert torch.equal(alone[0][0], tokens[i])
        close(alone[1][0], logprobs[i], rtol=0, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampling_log_probabilities_are_those_of_the_update(language_model, temperature):
    """Trick 10: generation and update compute the same log-probabilities."""
    model = language_model("qwen2")
    _, ids, mask, max_new_tokens, uniforms = prompts_to_continue()
    inputs = ids, mask, max_new_tokens, uniforms, NO_STOP_TOKEN, temperature
    tokens, logprobs = ppo.generate(model, *inputs)
    valid = ppo.length_mask(max_new_tokens, T)  # after it, both are 0
    full_ids, full_mask = torch.cat([ids, tokens], 1), torch.cat([mask, valid], 1)
    recomputed, _, _ = ppo.response_logprobs(model, full_ids, full_mask, T, temperature)
    close(logprobs, recomputed, rtol=0, atol=1e-4)
