"""What the tests of the math share: comparisons, random inputs, and references in float64."""

import importlib.metadata
import importlib.util
import math

import pytest
import torch
import transformers

NAN, INF = math.nan, math.inf


def close(ours, theirs, rtol=1e-5, atol=1e-6):
    """Assert that all elements are close, that the shapes are equal, and that there is no nan."""
    ours = torch.as_tensor(ours).detach().double()
    theirs = torch.as_tensor(theirs, dtype=torch.float64).detach()
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


def normal(*shape, seed=0):
    """Normally distributed numbers, the same for each call with this seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_ids(*shape, high=1024, seed=0):
    """Random token ids from 2 to high - 1."""
    return torch.randint(2, high, shape, generator=torch.Generator().manual_seed(seed))


def slope(function, x):
    """The derivative by a central difference."""
    return (function(x + 1e-6) - function(x - 1e-6)) / 2e-6


def gradients(function, *inputs, seed=9):
    """Gradients of the function's result, added up with random weights, in each of the inputs."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*inputs)
    weights = normal(*out.shape, seed=seed).to(out.dtype)
    (out * weights).sum().backward()
    return [x.grad for x in inputs]


def trl_1_16():
    """TRL, next to the packages of the scripts: pip install trl==1.16.0. The test is skipped without it."""
    if importlib.util.find_spec("trl") is None:
        pytest.skip("TRL is not installed: pip install trl==1.16.0")
    version = importlib.metadata.version("trl")
    if not version.startswith("1.16."):
        pytest.skip(f"this is TRL {version}, not 1.16")
    return importlib.import_module("trl")


# ---- Output layer ------------------------------------------------------------------------------------------


def head_case(B=3, T=4, H=5, V=11, seed=0):
    """Random hidden states [B, T, H], weight [V, H], tokens [B, T] and bias [V]."""
    tokens = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(seed + 3))
    return normal(B, T, H, seed=seed), normal(V, H, seed=seed + 1), tokens, normal(V, seed=seed + 2)


def reference_logprobs(hidden, weight, tokens, temperature=1.0, bias=None):
    """What token_logprobs returns, from all logits [B, T, V] at once, in float64."""
    logits = torch.einsum("bth,vh->btv", hidden.double(), weight.double())
    if bias is not None:
        logits = logits + bias.double()
    log_p = torch.log_softmax(logits / temperature, -1)
    logprobs = log_p.gather(-1, tokens[..., None]).squeeze(-1)
    return logprobs, -(log_p.exp() * log_p).sum(-1)


# ---- Language models ---------------------------------------------------------------------------------------


def random_model(kind, **settings):
    """A small model of an architecture, with random weights of transformers' usual size."""
    sizes = dict(vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    sizes |= dict(num_key_value_heads=2, intermediate_size=64, max_position_embeddings=128)
    config = transformers.AutoConfig.for_model(kind, **sizes | settings)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


def left_padded(rows, width):
    """Rows of tokens, padded on the left with some token. -> ids, bool mask [B, width]"""
    ids = torch.full((len(rows), width), 7)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :] = row
        mask[i, width - len(row) :] = True
    return ids, mask


def padded_batch(C=9, T=7):
    """Prompts of 1 to C tokens and responses of 1 to T tokens, padded to the left and to the right.

    -> ids, bool mask [4, C + T], rows (list of (prompt, response)), T
    """
    rows = []
    for prompt_length, response_length in ((C, T), (1, 5), (4, 1), (6, 3)):
        prompt = random_ids(prompt_length, seed=prompt_length)
        rows.append((prompt, random_ids(response_length, seed=10 + response_length)))
    prompts, prompt_mask = left_padded([prompt for prompt, _ in rows], C)
    flipped, flipped_mask = left_padded([response.flip(0) for _, response in rows], T)
    ids, mask = torch.cat([prompts, flipped.flip(1)], 1), torch.cat([prompt_mask, flipped_mask.flip(1)], 1)
    return ids, mask, rows, T


@torch.no_grad()
def logprobs_alone(model, row, temperature=1.0):
    """transformers' own log-probabilities of all next tokens, of one text without padding. [L] -> [L, V]"""
    logits = model(input_ids=row[None]).logits[0].double()
    return (logits / temperature).log_softmax(-1)


def response_part(table, prompt, response):
    """The log-probability of each token of the response, from a table of `logprobs_alone`."""
    positions = torch.arange(len(prompt) - 1, len(prompt) + len(response) - 1)
    return table[positions, response]
