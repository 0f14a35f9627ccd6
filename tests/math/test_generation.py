"""Generation against transformers, which reads each finished text alone, without padding or a cache."""

import copy

import naive
import pytest
import torch
import transformers
from conftest import ARCHITECTURES, module_with
from math_tools import TOO_LARGE, close, left_padded, logprobs_alone, random_ids

ppo = module_with("generate")
dialog = module_with("generate_until")
rloo = module_with("generate_groups")
T = 8
NO_STOP_TOKEN = -1


@pytest.fixture(scope="module")
def language_model(tiny_lm):
    """language_model(arch) -> the folder's model, loaded by transformers, in evaluation mode."""

    def get(arch):
        return transformers.AutoModelForCausalLM.from_pretrained(tiny_lm(arch)).eval()

    return get


def prompts_to_continue():
    """Five prompts. -> rows, ids, mask, max_new_tokens, uniforms"""
    rows = [random_ids(n, seed=20 + n) for n in (6, 2, 4, 1, 5)]
    ids, mask = left_padded(rows, 6)
    uniforms = torch.rand(len(rows), T, generator=torch.Generator().manual_seed(4))
    return rows, ids, mask, torch.tensor([8, 5, 8, 3, 1]), uniforms


def is_selected(token, logprobs, uniform):
    """True if inverting the distribution at the uniform number, give or take 1e-5, gives the token."""
    shifted = [min(max(uniform + shift, 0.0), 1 - 1e-9) for shift in (-1e-5, 0.0, 1e-5)]
    return token in {naive.sample_token(logprobs.tolist(), u) for u in shifted}


def assert_sampled_from(model, prompt, tokens, logprobs, uniforms, temperature):
    """The tokens of one response, and their log-probabilities, are those of transformers' softmax."""
    table = logprobs_alone(model, torch.cat([prompt, tokens]), temperature)[len(prompt) - 1 : -1]
    for token, row, u in zip(tokens.tolist(), table, uniforms.tolist()):
        assert is_selected(token, row, u)
    expected = table.gather(1, tokens[:, None]).squeeze(1)
    close(logprobs, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_generate_samples_from_transformers_softmax(language_model, arch, temperature):
    """Tricks 11 and 12. Rows end at their own limits or at a stop token, each at another step."""
    model = language_model(arch)
    rows, ids, mask, max_new_tokens, uniforms = prompts_to_continue()
    inputs = ids, mask, max_new_tokens, uniforms
    free, _ = ppo.generate(model, *inputs, NO_STOP_TOKEN, temperature)
    stop = free[2, 3].item()
    tokens, logprobs = ppo.generate(model, *inputs, stop, temperature)
    assert tokens.shape == logprobs.shape == uniforms.shape
    to_stop = naive.response_lengths(free.tolist(), stop)
    for i, row in enumerate(rows):
        n = min(to_stop[i], max_new_tokens[i].item())
        assert torch.equal(tokens[i, :n], free[i, :n])
        assert not tokens[i, n:].any()
        assert not logprobs[i, n:].any()
        assert_sampled_from(model, row, tokens[i, :n], logprobs[i, :n], uniforms[i, :n], temperature)
    assert to_stop[2] <= 4


def test_generate_until_is_generate(language_model):
    """With EOS as the only stop, ppo_dialog.py samples the same as ppo_sentiment.py."""
    model = language_model("gpt2")
    _, ids, mask, _, uniforms = prompts_to_continue()
    free, _ = ppo.generate(model, ids, mask, torch.full((5,), T), uniforms, NO_STOP_TOKEN, 0.8)
    stop = free[2, 3].item()
    expected = ppo.generate(model, ids, mask, torch.full((5,), T), uniforms, stop, 0.8)
    table = torch.zeros(2, 1024, dtype=torch.long)  # states: not yet, found
    table[1] = 1
    table[:, stop] = 1
    ours = dialog.generate_until(model, ids, mask, uniforms, table, 0.8)
    assert torch.equal(ours[0], expected[0])
    assert torch.equal(ours[1], expected[1])
    assert not torch.equal(ours[0], free)  # something did stop


def test_generate_groups_is_generate_for_each_response(language_model):
    """rloo_tldr.py reads each prompt once for all its responses. They are as if generated one by one."""
    model = language_model("llama")
    _, ids, mask, _, _ = prompts_to_continue()
    k = 3
    uniforms = torch.rand(5, k, T, generator=torch.Generator().manual_seed(5))
    limit = torch.full((5,), T)
    none = torch.tensor([], dtype=torch.long)
    free, _ = rloo.generate_groups(model, ids, mask, uniforms, none, 0.7)
    stop = free[2, 1, 3].item()
    tokens, logprobs = rloo.generate_groups(model, ids, mask, uniforms, torch.tensor([stop]), 0.7)
    assert tokens.shape == logprobs.shape == (5, k, T)
    for j in range(k):
        expected = ppo.generate(model, ids, mask, limit, uniforms[:, j], stop, 0.7)
        assert torch.equal(tokens[:, j], expected[0])
        close(logprobs[:, j], expected[1], rtol=0, atol=1e-5)
    assert not torch.equal(tokens, free)  # something did stop


def test_generate_groups_stops_at_each_of_several_tokens(language_model):
    """A response ends with its first stop token, whichever it is. Before it, nothing changes."""
    model = language_model("gpt2")
    _, ids, mask, _, _ = prompts_to_continue()
    uniforms = torch.rand(5, 2, T, generator=torch.Generator().manual_seed(6))
    free, _ = rloo.generate_groups(model, ids, mask, uniforms, torch.tensor([], dtype=torch.long), 1.0)
    stop_ids = torch.stack([free[0, 0, 2], free[3, 1, 4]])
    tokens, logprobs = rloo.generate_groups(model, ids, mask, uniforms, stop_ids, 1.0)
    ends = set()
    for old, new, logprob in zip(*(x.flatten(0, 1) for x in (free, tokens, logprobs))):
        stops = [t for t, token in enumerate(old.tolist()) if token in stop_ids.tolist()]
        n = stops[0] + 1 if stops else T
        assert torch.equal(new[:n], old[:n])
        assert not new[n:].any() and not logprob[n:].any()
        ends |= {old[n - 1].item()} if stops else set()
    assert ends == set(stop_ids.tolist())


def test_generate_of_a_bf16_model_sums_in_fp32(language_model):
    """A token's interval of the float64 cumulative distribution has its uniform number, give or take 1e-5.

    Logits or probabilities in bf16 would be off by 4e-3.
    """
    model, n = language_model("gpt2").bfloat16(), 4096
    ids = torch.zeros(n, 1, dtype=torch.long)
    uniforms = (torch.arange(n)[:, None] + 0.5) / n
    tokens, _ = ppo.generate(model, ids, ids == 0, torch.ones(n).long(), uniforms, NO_STOP_TOKEN, 1.0)
    with torch.no_grad():
        hidden = model.transformer(ids[:1]).last_hidden_state[0, -1].double()
        ends = (model.lm_head.weight.double() @ hidden).softmax(-1).cumsum(-1)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    assert (starts[tokens] - 1e-5 < uniforms).all()
    assert (uniforms < ends[tokens] + 1e-5).all()


def test_generate_does_not_depend_on_the_batch(language_model):
    """Each row alone, without its padding, gets the same tokens."""
    model = language_model("gpt2")
    rows, ids, mask, max_new_tokens, uniforms = prompts_to_continue()
    tokens, logprobs = ppo.generate(model, ids, mask, max_new_tokens, uniforms, 5, 1.0)
    for i, row in enumerate(rows):
        mask_alone = torch.ones(1, len(row), dtype=torch.bool)
        alone = ppo.generate(
            model, row[None], mask_alone, max_new_tokens[i : i + 1], uniforms[i : i + 1], 5, 1.0
        )
        assert torch.equal(alone[0][0], tokens[i])
        close(alone[1][0], logprobs[i], rtol=0, atol=1e-5)


def test_sampling_log_probabilities_are_those_of_the_update(language_model):
    """Trick 10: generation and update compute the same log-probabilities, at temperature 0.7."""
    model = language_model("qwen2")
    _, ids, mask, max_new_tokens, uniforms = prompts_to_continue()
    tokens, logprobs = ppo.generate(model, ids, mask, max_new_tokens, uniforms, NO_STOP_TOKEN, 0.7)
    valid = ppo.length_mask(max_new_tokens, T)
    full_ids, full_mask = torch.cat([ids, tokens], 1), torch.cat([mask, valid], 1)
    recomputed, _, _ = ppo.response_logprobs(model, full_ids, full_mask, T, 0.7)
    close(logprobs, recomputed, rtol=0, atol=1e-4)


class Forced(transformers.LogitsProcessor):
    """Keeps the logits of every step, and makes transformers' generate take the given tokens."""

    def __init__(self, tokens):
        self.tokens = tokens
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(scores.clone())
        forced = torch.full_like(scores, -torch.inf)
        step = len(self.seen) - 1
        return forced.scatter(1, self.tokens[:, step : step + 1], 0.0)


@pytest.mark.parametrize("arch", ["gpt2", "bloom", "llama"])
def test_generate_agrees_with_transformers_generate(language_model, arch):
    """transformers' own generate, on the padded batch and led along the same tokens, has the same logits."""
    model = language_model(arch)
    rows, ids, mask, _, uniforms = prompts_to_continue()
    tokens, logprobs = ppo.generate(model, ids, mask, torch.full((5,), T), uniforms, NO_STOP_TOKEN, 1.0)
    forced = Forced(tokens)
    config = transformers.GenerationConfig(
        max_new_tokens=T, do_sample=False, pad_token_id=1, eos_token_id=TOO_LARGE
    )
    out = copy.deepcopy(model).generate(
        torch.where(mask, ids, 1),
        attention_mask=mask.long(),
        generation_config=config,
        logits_processor=[forced],
    )
    assert torch.equal(out[:, -T:], tokens)
    theirs = torch.stack(forced.seen, 1).double().log_softmax(-1)  # [B, T, V]
    close(logprobs, theirs.gather(2, tokens[..., None]).squeeze(2), rtol=0, atol=1e-4)
