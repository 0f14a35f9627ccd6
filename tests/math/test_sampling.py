"""sample_tokens: it matches the distribution, and never selects a token of probability 0."""

import importlib
import math

import naive
import pytest
import torch
from math_tools import INF, normal

import ppo_sentiment as ppo

ALMOST_ONE = math.nextafter(1.0, 0.0)  # the largest float64 below 1; in fp32 it rounds to 1
ALMOST_ONE_32 = 1 - 2.0**-24  # the largest fp32 below 1


def counts_on_a_grid(probs, n):
    """How often each token is selected for n uniform numbers at equal distances. [V] -> [V]"""
    uniforms = (torch.arange(n).double() + 0.5) / n
    tokens = [ppo.sample_tokens(probs.expand(len(part), -1), part) for part in uniforms.split(1024)]
    return torch.bincount(torch.cat(tokens), minlength=len(probs))


@pytest.mark.parametrize("V", [1, 2, 65, 1000])
def test_sample_tokens_matches_the_distribution(V):
    """Of n uniform numbers at equal distances, a token gets n times its probability, give or take 2."""
    n, logits = 2**13, normal(V, seed=V) * 2
    counts = counts_on_a_grid(logits.softmax(-1), n)
    probs = [math.exp(x) for x in naive.log_softmax(logits.double().tolist())]
    assert counts.shape == (V,)
    assert ((counts - n * torch.tensor(probs, dtype=torch.float64)).abs() < 2).all()


def test_borders_are_exact():
    """The interval of a token has its lower end and not its upper one. Probabilities need not add up to 1."""
    probs = torch.tensor([0.0, 0.25, 0.0, 0.25, 0.5, 0.0])
    borders = [0.0, 0.25 - 2.0**-50, 0.25, 0.5 - 2.0**-50, 0.5, 0.75, ALMOST_ONE]
    uniforms = torch.tensor(borders, dtype=torch.float64)
    for scale in (1.0, 0.5, 4.0):
        tokens = ppo.sample_tokens((probs * scale).expand(7, -1), uniforms)
        assert tokens.tolist() == [1, 1, 3, 3, 4, 4, 4]


@pytest.mark.parametrize("forbidden", [-INF, -1e4])
@pytest.mark.parametrize("possible", [[0], [199], [63, 64], [0, 130, 199], list(range(128, 192))])
def test_sample_tokens_never_selects_probability_0(possible, forbidden):
    """Also for the smallest and the largest uniform numbers."""
    edges = [0.0, 1e-45, 1e-38, 1e-8, 0.25, 0.5, 0.75, 1 - 2.0**-20, ALMOST_ONE_32, ALMOST_ONE]
    uniforms = torch.tensor(edges, dtype=torch.float64)
    logits = torch.full((200,), forbidden)
    logits[possible] = normal(len(possible))
    tokens = ppo.sample_tokens(logits.softmax(-1).expand(len(uniforms), -1), uniforms).tolist()
    assert set(tokens) <= set(possible)
    assert tokens[0] == min(possible)
    assert tokens[-1] == tokens[-2] == max(possible)


@pytest.mark.parametrize("script", ["ppo_sentiment", "ppo_minimal"])
def test_sample_tokens_finds_rare_tokens_after_a_likely_one(script):
    """A token of probability 1 - 2^-16, then 2^14 of 2^-30 each. fp32 sums would miss almost all of them, and
    so would fp32 uniforms, which are multiples of 2^-24."""
    probs = torch.tensor([1 - 2.0**-16] + [2.0**-30] * 2**14)
    steps = torch.tensor([0, 1, 2, 3, 1000, 16_383])
    uniforms = 1 - 2.0**-16 + steps.double() * 2.0**-30
    tokens = importlib.import_module(script).sample_tokens(probs.expand(6, -1), uniforms)
    assert tokens.tolist() == (1 + steps).tolist()


def test_what_is_sampled_is_what_is_scored():
    """Trick 11, at temperature 0.7: the shares of the sampled tokens are exp of their log-probabilities."""
    n, V, hidden, weight = 2**12, 37, normal(1, 6), normal(37, 6, seed=1)
    counts = counts_on_a_grid(ppo.token_logits(hidden, weight, 0.7).softmax(-1)[0], n)
    logprobs, _ = ppo.token_logprobs(hidden.expand(V, 6), weight, torch.arange(V), 0.7)
    assert ((counts - n * logprobs.exp()).abs() < 2).all()


@pytest.mark.parametrize("V", [1, 200])
def test_nan_samples_a_token_of_the_vocabulary(V):
    """So the run goes on to the loss, which is NaN too, and ends with one line."""
    token = ppo.sample_tokens(torch.full((2, V), float("nan")), torch.tensor([0.1, 0.9]))
    assert (token >= 0).all() and (token < V).all()
