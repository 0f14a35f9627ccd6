"""sample_tokens: it matches the distribution, and never selects a token of probability 0."""

import math

import naive
import pytest
import torch
from conftest import module_with
from math_tools import INF, close, normal

ppo = module_with("sample_tokens", "token_logprobs")
ALMOST_ONE = math.nextafter(1.0, 0.0)  # the largest float64 below 1; in fp32 it rounds to 1
ALMOST_ONE_32 = 1 - 2.0**-24  # the largest fp32 below 1


def counts_on_a_grid(probs, n):
    """How often each token is selected for n uniform numbers at equal distances. [V] -> [V]"""
    uniforms = (torch.arange(n) + 0.5) / n
    tokens = [ppo.sample_tokens(probs.expand(len(part), -1), part) for part in uniforms.split(1024)]
    return torch.bincount(torch.cat(tokens), minlength=len(probs))


@pytest.mark.parametrize("V", [1, 2, 63, 64, 65, 130, 1000])
def test_sample_tokens_matches_the_distribution(V):
    """Of n uniform numbers at equal distances, a token gets n times its probability, give or take 2."""
    n, logits = 2**13, normal(V, seed=V) * 2
    counts = counts_on_a_grid(logits.softmax(-1), n)
    probs = [math.exp(x) for x in naive.log_softmax(logits.double().tolist())]
    expected = n * torch.tensor(probs, dtype=torch.float64)
    assert counts.shape == (V,)
    assert ((counts - expected).abs() < 2).all()


@pytest.mark.parametrize("V", [5, 64, 200])
def test_sample_tokens_inverts_the_cumulative_sum(V):
    """The token of naive.py in each row. A uniform number within 1e-5 of a border may fall on either side."""
    logits, uniforms = normal(64, V) * 3, torch.rand(64, generator=torch.Generator().manual_seed(1))
    tokens = ppo.sample_tokens(logits.softmax(-1), uniforms)
    assert not tokens.is_floating_point()
    num_exact = 0
    for token, row, u in zip(tokens.tolist(), logits.double().tolist(), uniforms.tolist()):
        exact = naive.sample_token(row, u)
        neighbours = {
            naive.sample_token(row, min(max(u + shift, 0.0), ALMOST_ONE)) for shift in (-1e-5, 1e-5)
        }
        assert token in neighbours | {exact}
        num_exact += token == exact
    assert num_exact >= 62


@pytest.mark.parametrize("forbidden", [-INF, -1e4])
@pytest.mark.parametrize(
    "possible",
    [[0], [199], [64], [63, 64], [0, 130, 199], [1, 65, 129], list(range(128, 192)), [127, 198]],
)
def test_sample_tokens_never_selects_probability_0(possible, forbidden):
    """Also for the smallest and largest uniform numbers, and with whole blocks of 64 zeros anywhere."""
    edges = [0.0, 1e-45, 1e-38, 1e-8, 0.25, 0.5, 0.75, 1 - 2.0**-20, ALMOST_ONE_32, ALMOST_ONE]
    uniforms = torch.tensor(edges, dtype=torch.float64)
    for V in (200, 256):
        logits = torch.full((V,), forbidden)
        logits[possible] = normal(len(possible))
        tokens = ppo.sample_tokens(logits.softmax(-1).expand(len(uniforms), V), uniforms).tolist()
        assert set(tokens) <= set(possible)
        assert tokens[0] == min(possible)
        assert tokens[-1] == tokens[-2] == max(possible)


def test_sample_tokens_never_selects_probability_0_at_random():
    """Half of the tokens of each row are impossible; a tenth of the uniform numbers are 0 or almost 1."""
    generator = torch.Generator().manual_seed(0)
    rows, V = 2000, 150
    for _ in range(100):
        logits = 5 * torch.randn(rows, V, generator=generator)
        is_possible = torch.rand(rows, V, generator=generator) < 0.5
        is_possible[:, 70] = True
        probs = torch.where(is_possible, logits, -INF).softmax(-1)
        uniforms = torch.rand(rows, generator=generator)
        uniforms[:100] = 0.0
        uniforms[100:200] = ALMOST_ONE_32
        tokens = ppo.sample_tokens(probs, uniforms)
        assert (probs.gather(1, tokens[:, None]) > 0).all()


def test_sample_tokens_of_a_large_vocabulary():
    """50,257 equal tokens: the middle of a token's interval selects it. One running fp32 sum would miss."""
    V = 50_257
    wanted = torch.tensor([0, 1, 63, 64, 12_345, 25_128, 40_000, 50_000, 50_175, 50_176, V - 2, V - 1])
    uniforms = ((wanted.double() + 0.5) / V).float()
    tokens = ppo.sample_tokens(torch.full((len(wanted), V), 1 / V), uniforms)
    assert tokens.tolist() == wanted.tolist()


def test_sample_tokens_finds_rare_tokens_after_a_likely_one():
    """A token of probability 1 - 2^-12, then 4096 of 2^-24 each: too small to be added to 1 in fp32."""
    logits = torch.tensor([math.log(2.0**24 - 2.0**12)] + [0.0] * 4096)
    uniforms = 1 - 2.0**-12 + (torch.arange(16) + 0.5) * 2.0**-16  # exact in fp32
    tokens = ppo.sample_tokens(logits.softmax(-1).expand(16, -1), uniforms)
    close(tokens, 1 + 256 * torch.arange(16) + 128, rtol=0, atol=32)  # each rounding moves by 1 or 2 tokens


@pytest.mark.parametrize("V", [64, 128, 192])
def test_sample_tokens_stays_in_its_block_where_rounding_is_largest(V):
    """After the first block there is hardly any probability, and the uniform numbers are the largest ones.

    There the cumulative sums differ by about one rounding from block to block.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2000, V, generator=generator)
    logits[:, 64:] -= 12 + 4 * torch.rand(2000, 1, generator=generator)
    logits[:, V - 8 :] = -INF
    logits[:, 64::7] = -INF
    probs = logits.softmax(-1)
    for k in range(1, 33):
        tokens = ppo.sample_tokens(probs, torch.full((2000,), 1 - k * 2.0**-24))
        assert (
            probs.gather(1, tokens[:, None]) > 0
        ).all()  # gather fails for a token outside of the vocabulary


def test_a_sample_does_not_depend_on_the_batch():
    """Each row alone gets the same token."""
    probs, uniforms = normal(20, 200).softmax(-1), torch.rand(20, generator=torch.Generator().manual_seed(1))
    together = ppo.sample_tokens(probs, uniforms)
    alone = [ppo.sample_tokens(probs[i : i + 1], uniforms[i : i + 1]) for i in range(20)]
    assert torch.equal(together, torch.cat(alone))


def test_what_is_sampled_is_what_is_scored():
    """Trick 11, at temperature 0.7: the shares of the sampled tokens are exp of their log-probabilities."""
    n, V, hidden, weight = 2**12, 37, normal(1, 1, 6), normal(37, 6, seed=1)
    logits = (hidden[0, 0].double() @ weight.double().T) / 0.7
    counts = counts_on_a_grid(logits.softmax(-1).float(), n)
    logprobs, _ = ppo.token_logprobs(hidden.expand(1, V, 6), weight, torch.arange(V)[None], 0.7)
    assert ((counts - n * logprobs[0].exp()).abs() < 2).all()
