"""The kernels of every script against naive.py, closed forms and finite differences.

`k` is the script under test. Numbers are compared element by element. Tricks are numbered as in docs and design: the number stands in
the test's docstring.
"""

import copy
import math
import socket

import naive
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import shipping
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

NAN, INF = math.nan, math.inf
quick = settings(max_examples=25, deadline=None, derandomize=True)


def close(ours, theirs, rtol=1e-5, atol=1e-6):
    """Element by element, same shape, nan nowhere."""
    ours, theirs = torch.as_tensor(ours).detach().double(), torch.as_tensor(theirs, dtype=torch.float64)
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def spoiled(values, mask):
    """The same values with nan outside the mask."""
    return torch.where(torch.as_tensor(mask), values, NAN)


class Watch(TorchDispatchMode):
    """Counts the operations inside, and keeps the size of the largest result."""

    def __init__(self):
        super().__init__()
        self.largest = self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        for x in result if isinstance(result, (tuple, list)) else [result]:
            self.largest = max(self.largest, x.numel() if isinstance(x, torch.Tensor) else 0)
        return result


@st.composite
def ragged(draw, max_rows=4, max_columns=7):
    """(lengths, numbers [B, T], numbers [B, T]) of a batch whose rows end at different places."""
    rows, columns = draw(st.integers(1, max_rows)), draw(st.integers(1, max_columns))
    lengths = draw(st.lists(st.integers(1, columns), min_size=rows, max_size=rows))
    number = st.floats(-4, 4, width=32)
    table = st.lists(st.lists(number, min_size=columns, max_size=columns), min_size=rows, max_size=rows)
    return lengths, draw(table), draw(table)


# ---- lengths and masks -----------------------------------------------------------------------------------------------
@shipping("response_lengths")
def test_response_lengths(k):
    tokens = torch.tensor([[5, 0, 0, 7], [0, 1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 0], [0, 0, 0, 0]])
    close(k.response_lengths(tokens, 0), [2, 1, 4, 4, 1])
    close(k.response_lengths(tokens, -1), [4] * 5)  # -1: there is no stop token
    close(k.response_lengths(tokens, 3), [4, 4, 3, 3, 4])
    close(k.response_lengths(torch.tensor([[3], [0]]), 0), [1, 1])


@shipping("response_lengths", "length_mask")
@given(st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=1, max_size=5), st.integers(-1, 4))
@quick
def test_lengths_and_masks_agree_with_naive(k, tokens, stop):
    lengths = k.response_lengths(torch.tensor(tokens), stop)
    assert not lengths.is_floating_point() and lengths.tolist() == naive.response_lengths(tokens, stop)
    mask = k.length_mask(lengths, 6)
    assert mask.dtype is torch.bool and mask.tolist() == naive.length_mask(lengths.tolist(), 6)


@shipping("length_mask")
def test_length_mask_edges(k):
    assert k.length_mask(torch.tensor([0, 1]), 1).tolist() == [[False], [True]]
    assert k.length_mask(torch.tensor([3, 0, 2]), 3).tolist() == [[True] * 3, [False] * 3, [True, True, False]]


# ---- log-probabilities -----------------------------------------------------------------------------------------------
def head_case(B=3, T=4, H=5, V=11, seed=0):
    tokens = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(seed + 3))
    return normal(B, T, H, seed=seed), normal(V, H, seed=seed + 1), tokens, normal(V, seed=seed + 2)


def reference_logprobs(hidden, weight, tokens, temperature=1.0, bias=None):
    """The whole [B, T, V] in float64: another path than the kernel's for sizes that plain Python is too slow for."""
    logits = torch.einsum("bth,vh->btv", hidden.double(), weight.double())
    logp = torch.log_softmax((logits if bias is None else logits + bias.double()) / temperature, -1)
    return logp.gather(-1, tokens[..., None])[..., 0], torch.distributions.Categorical(logits=logp).entropy()


@shipping("token_logprobs")
@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.5])
@pytest.mark.parametrize("with_bias", [False, True])
def test_token_logprobs_agree_with_naive(k, temperature, with_bias):
    hidden, weight, tokens, bias = head_case()
    bias = bias if with_bias else None
    ours = k.token_logprobs(hidden, weight, tokens, temperature, bias)
    theirs = naive.token_logprobs(hidden.tolist(), weight.tolist(), tokens.tolist(), temperature, bias.tolist() if with_bias else None)
    for x, y in zip(ours, theirs):
        assert x.dtype is torch.float32
        close(x, y)


@shipping("token_logprobs")
def test_token_logprobs_of_one_token_and_one_word(k):
    logprobs, entropies = k.token_logprobs(normal(1, 1, 2), normal(1, 2), torch.zeros(1, 1, dtype=torch.long))
    close(logprobs, [[0.0]])
    close(entropies, [[0.0]])


@shipping("token_logprobs")
@pytest.mark.parametrize("V, B, T, atol", [(50_257, 4, 50, 5e-5), (1_536, 3, 683, 1e-5), (769, 2, 512, 1e-5), (2**20 + 1, 1, 3, 1e-3)])
def test_token_logprobs_in_several_blocks(k, V, B, T, atol):
    """Blocks are 1024 positions x 768 words: here one or three of positions, two to 1366 of words, the last ones of one or of all.
    torch's fp32 log_softmax, which adds up V numbers, sets the tolerance.
    """
    hidden, weight, tokens, bias = head_case(B, T, 2, V)
    tokens[0, 0], tokens[-1, -1] = 0, V - 1
    for x, y in zip(k.token_logprobs(hidden, weight, tokens, 0.7, bias), reference_logprobs(hidden, weight, tokens, 0.7, bias)):
        close(x, y, rtol=0, atol=atol)


def gradients(function, *inputs, seed=9):
    """Gradients of a sum with random weights of the function's result."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*inputs)
    (out * normal(*out.shape, seed=seed).to(out.dtype)).sum().backward()
    return [x.grad for x in inputs]


@shipping("token_logprobs")
@pytest.mark.parametrize("V, B, T, atol", [(11, 3, 4, 1e-6), (50_257, 4, 40, 2e-4), (1_500, 3, 700, 2e-4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_token_logprobs_gradients_agree_with_autograd(k, V, B, T, atol, dtype):
    """Also over many blocks of words (V = 50,257) and of positions (2100), where fp32 sums over the vocabulary set the tolerance."""
    hidden, weight, tokens, bias = (x.to(dtype) if x.is_floating_point() else x for x in head_case(B, T, 3, V))
    ours = gradients(lambda h, w, b: k.token_logprobs(h, w, tokens, 0.7, b)[0], hidden, weight, bias)
    theirs = gradients(lambda h, w, b: reference_logprobs(h, w, tokens, 0.7, b)[0], *(x.double() for x in (hidden, weight, bias)))
    for x, y in zip(ours, theirs):
        close(x, y, rtol=1e-4, atol=atol)


@shipping("token_logprobs")
def test_token_logprobs_gradients_agree_with_finite_differences(k):
    hidden, weight, tokens, bias = head_case(1, 2, 3, 5)
    parts = [hidden.double().tolist(), weight.double().tolist(), bias.double().tolist()]
    factors = normal(1, 2, seed=9).tolist()[0]

    def value(h, w, b):
        return sum(f * x for f, x in zip(factors, naive.token_logprobs(h, w, tokens.tolist(), 0.7, b)[0][0]))

    def difference(part, *place):
        ends = []
        for step in (1e-5, -1e-5):
            moved = copy.deepcopy(parts)
            row = moved[part]
            for i in place[:-1]:
                row = row[i]
            row[place[-1]] += step
            ends.append(value(*moved))
        return (ends[0] - ends[1]) / 2e-5

    ours = gradients(lambda h, w, b: k.token_logprobs(h, w, tokens, 0.7, b)[0], hidden, weight, bias)
    close(ours[0], [[[difference(0, 0, t, i) for i in range(3)] for t in range(2)]], rtol=1e-4, atol=1e-5)
    close(ours[1], [[difference(1, v, i) for i in range(3)] for v in range(5)], rtol=1e-4, atol=1e-5)
    close(ours[2], [difference(2, v) for v in range(5)], rtol=1e-4, atol=1e-5)


@shipping("token_logprobs")
def test_token_logprobs_of_a_frozen_head_trains_the_body(k):
    """LoRA freezes the head, a head may have no bias, and a rollout needs no gradient at all."""
    hidden, weight, tokens, _ = head_case()
    ours = gradients(lambda h: k.token_logprobs(h, weight, tokens)[0], hidden)
    close(ours[0], gradients(lambda h: reference_logprobs(h, weight, tokens)[0], hidden.double())[0], rtol=1e-4)
    with torch.no_grad():
        assert not k.token_logprobs(hidden, weight, tokens)[0].requires_grad


@shipping("token_logprobs")
def test_token_logprobs_never_holds_all_logits(k):
    V, B, T = 2**18, 4, 16
    hidden, weight, tokens, _ = head_case(B, T, 2, V)
    hidden.requires_grad_()
    kept = []

    def pack(x):
        kept.append(x.numel())
        return x

    with Watch() as watch, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        logprobs, _ = k.token_logprobs(hidden, weight, tokens)
        logprobs.sum().backward()
    assert watch.largest <= 2**20 < B * T * V  # one block of logits
    assert sum(kept) < 2**20  # and no blocks kept from the forward to the backward pass


@shipping("token_logprobs")
@pytest.mark.parametrize("keep, blocks", [(1, 0), (2 * 10**6, 3), (2**25, 9)])
def test_kept_probabilities_change_no_bit(k, keep, blocks):
    """Of 3 x 3 blocks with 4.2 million probabilities the first are kept, never more than asked for, and the gradients are the same."""
    hidden, weight, tokens, bias = head_case(3, 700, 4, 2_000)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (sizes.append(x.numel()), x)[1], lambda x: x):
        ours = gradients(lambda h, w, b: k.token_logprobs(h, w, tokens, 0.7, b, keep)[0], hidden, weight, bias)
    base = gradients(lambda h, w, b: k.token_logprobs(h, w, tokens, 0.7, b)[0], hidden, weight, bias)
    assert all(torch.equal(x, y) for x, y in zip(ours, base))
    kept = [size for size in sizes if size > 20_000]  # the others: hidden, weight, bias, shares of blocks
    assert len(kept) == blocks and sum(kept) <= keep


@shipping("token_logprobs")
def test_gradients_of_large_logits(k):
    """All logits near -100, as many models have them: their probabilities still sum to 1, so nothing is rounded at the size of a logit."""
    hidden, weight, tokens, _ = head_case(4, 16, 64, 2_000)
    hidden[..., 0], weight[:, 0] = 1, -100
    ours = gradients(lambda h, w: k.token_logprobs(h, w, tokens)[0], hidden, weight)
    for x, y in zip(ours, gradients(lambda h, w: reference_logprobs(h, w, tokens)[0], hidden, weight)):
        assert (x.double() - y).norm() < 2e-5 * y.norm()


@shipping("token_logprobs")
def test_token_logprobs_of_no_token(k):
    """A pass without a valid token has a gradient of 0, not what stood in the memory before."""
    hidden, weight, _, bias = head_case(1, 1, 16, 1_600)
    none = torch.zeros(1, 0, dtype=torch.long)
    d_hidden, *others = gradients(lambda h, w, b: k.token_logprobs(h[:, :0], w, none, 1.0, b)[0], hidden, weight, bias)
    assert all(torch.equal(x, torch.zeros_like(x)) for x in (d_hidden, *others))


@shipping("token_logprobs")
@pytest.mark.parametrize("with_bias", [False, True])
def test_token_logprobs_in_bf16(k, with_bias):
    """A logit rounded to bf16 is off by 2**-8 of its size at most, so a log-probability by twice that of the largest; sums are fp32."""
    hidden, weight, tokens, bias = (x.bfloat16() if x.is_floating_point() else x for x in head_case(4, 8, 16, 500))
    bias = bias if with_bias else None
    largest = (hidden.double() @ weight.double().T).abs().max().item() + 4
    for x, y in zip(k.token_logprobs(hidden, weight, tokens, 1.0, bias), reference_logprobs(hidden, weight, tokens, 1.0, bias)):
        assert x.dtype is torch.float32
        close(x, y, rtol=0, atol=2 * largest * 2**-8)
    fp32_weight = k.token_logprobs(hidden, weight.float(), tokens, 1.0, None if bias is None else bias.float())[0]
    close(fp32_weight, k.token_logprobs(hidden, weight, tokens, 1.0, bias)[0])  # the head may stay in fp32


@shipping("token_logprobs")
@pytest.mark.parametrize("N", [1, 15, 16, 17])
def test_token_logprobs_in_bf16_of_any_number(k, N):
    """On a CPU rows come in sixteens in bf16: those that fill up the last one stand in no result and in no gradient."""
    hidden, weight, tokens, bias = (x.bfloat16() if x.is_floating_point() else x for x in head_case(1, N, 16, 500))
    assert all(x.shape == (1, N) for x in k.token_logprobs(hidden, weight, tokens, 1.0, bias))
    ours = gradients(lambda *x: k.token_logprobs(*x[:2], tokens, 1.0, x[2])[0], hidden, weight, bias)
    exact = gradients(lambda *x: reference_logprobs(*x[:2], tokens, 1.0, x[2])[0], hidden, weight, bias)
    for x, y in zip(ours, exact):
        close(x, y, rtol=0, atol=0.02 * y.abs().max().item() + 1e-6)


@shipping("token_logprobs")
def test_token_logprobs_in_bf16_sum_in_fp32(k):
    """Over 4096 equal logits the answer is -log 4096; a sum in bf16 stops growing at 256."""
    zeros = torch.zeros(1, 1, 2, dtype=torch.bfloat16)
    logprobs, entropies = k.token_logprobs(zeros, torch.zeros(4096, 2, dtype=torch.bfloat16), torch.ones(1, 1, dtype=torch.long))
    close(logprobs, [[-math.log(4096)]])
    close(entropies, [[math.log(4096)]])


@shipping("token_logprobs")
def test_token_logprobs_with_impossible_tokens(k):
    """A bias of -inf (a forbidden token) gives probability 0, and neither the entropy nor a gradient becomes nan."""
    hidden, weight, tokens, bias = head_case()
    bias[4], tokens[tokens == 4] = -INF, 5
    hidden.requires_grad_()
    logprobs, entropies = k.token_logprobs(hidden, weight, tokens, 1.0, bias)
    left = [v for v in range(11) if v != 4]
    theirs = reference_logprobs(hidden, weight[left], tokens - (tokens > 4).long(), 1.0, bias[left])
    close(logprobs, theirs[0].detach())
    close(entropies, theirs[1].detach())
    logprobs.sum().backward()
    assert hidden.grad.isfinite().all()


@shipping("token_logprobs")
def test_token_logprobs_of_logits_far_apart(k):
    """Logits of 0 and 1000: the likely token has log-probability 0, the other -1000, the entropy is 0."""
    logprobs, entropies = k.token_logprobs(torch.ones(1, 2, 1), torch.tensor([[0.0], [1000.0]]), torch.tensor([[0, 1]]))
    close(logprobs, [[-1000.0, 0.0]])
    close(entropies, [[0.0, 0.0]])


# ---- KL --------------------------------------------------------------------------------------------------------------
@shipping("kl_per_token")
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
def test_kl_per_token_agrees_with_naive(k, estimator, shape):
    a, b = normal(*shape) * 3, normal(*shape, seed=1) * 3
    theirs = [naive.kl_estimate(x, y, estimator) for x, y in zip(a.flatten().tolist(), b.flatten().tolist())]
    close(k.kl_per_token(a, b, estimator), torch.tensor(theirs).reshape(shape), rtol=1e-4)


@shipping("kl_per_token")
@pytest.mark.parametrize("estimator, kl", [("k1", (100.0, -100.0, 0.0)), ("k2", (5000.0, 5000.0, 0.0)), ("k3", (99.0, INF, 0.0))])
def test_kl_per_token_of_extreme_ratios(k, estimator, kl):
    """Log-ratios of +100, -100 and 0. e^100 is more than fp32 holds, and inf is the honest answer."""
    close(k.kl_per_token(torch.tensor([-1.0, -101.0, -2.0]), torch.tensor([-101.0, -1.0, -2.0]), estimator), kl)


@shipping("kl_per_token")
def test_k3_of_tiny_ratios_keeps_its_digits(k):
    """k3 of a log-ratio x is about x^2 / 2: below one rounding of exp(x) - 1 when x is 2^-13."""
    x = 2.0**-13
    for log_ratio in (x, -x):
        ours = k.kl_per_token(torch.tensor(log_ratio), torch.tensor(0.0), "k3")
        close(ours, naive.kl_estimate(log_ratio, 0.0, "k3"), rtol=5e-3, atol=0)


@shipping("kl_per_token")
def test_kl_estimators_on_a_small_categorical(k):
    """Trick 32, by summing over all outcomes. p = softmax(z), and in closed form
    d KL(p || r) / dz_i = p_i (log p_i / r_i - KL(p || r)) and d KL(r || p) / dz_i = p_i - r_i.
    """
    z = torch.tensor([0.5, -1.0, 2.0, 0.1], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64)
    p = z.detach().softmax(-1)
    kl = sum(x * math.log(x / y) for x, y in zip(p.tolist(), ref.tolist()))
    forward, backward = p * ((p / ref).log() - kl), p - ref
    in_reward, as_loss, mean = {}, {}, {}
    for name in ("k1", "k2", "k3"):
        logp = torch.log_softmax(z, -1)
        estimates = k.kl_per_token(logp, ref.log(), name)
        mean[name] = (p * estimates.detach()).sum().item()
        in_reward[name] = torch.autograd.grad((p * estimates.detach() * logp).sum(), z, retain_graph=True)[0]
        as_loss[name] = torch.autograd.grad((p * estimates).sum(), z)[0]
    assert mean["k1"] == pytest.approx(kl) and mean["k3"] == pytest.approx(kl) and abs(mean["k2"] - kl) > 0.02
    close(in_reward["k1"], forward)
    assert (in_reward["k2"] - forward).abs().max() > 0.05 and (in_reward["k3"] - forward).abs().max() > 0.05
    close(as_loss["k1"], [0.0] * 4)
    close(as_loss["k2"], forward)
    close(as_loss["k3"], backward)


# ---- rewards ---------------------------------------------------------------------------------------------------------
@shipping("token_rewards", "length_mask")
@given(ragged())
@quick
def test_token_rewards_agree_with_naive(k, case):
    """With nan behind each response's end."""
    lengths, kl, scores = case[0], torch.tensor(case[1]), [row[0] for row in case[2]]
    ours = k.token_rewards(torch.tensor(scores), spoiled(kl, naive.length_mask(lengths, kl.shape[1])), torch.tensor(lengths), 0.3)
    close(ours, naive.token_rewards(scores, kl.tolist(), lengths, 0.3))


@shipping("token_rewards")
def test_token_rewards_by_hand(k):
    ours = k.token_rewards(torch.tensor([5.0, -1.0]), torch.tensor([[1.0, 2.0, NAN], [0.5, 0.0, 4.0]]), torch.tensor([2, 3]), 0.1)
    close(ours, [[-0.1, 4.8, 0.0], [-0.05, 0.0, -1.4]])


@shipping("token_rewards", "kl_per_token", "length_mask")
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_what_the_rewards_pay_is_the_kl_of_the_estimator(k, estimator):
    """Trick 19: without scores, a response's rewards add up to -kl_coef times the sum of its estimates over its valid tokens."""
    lengths, a, b = [1, 3, 5], normal(3, 5), normal(3, 5, seed=1)
    rewards = k.token_rewards(torch.zeros(3), k.kl_per_token(a, b, estimator), torch.tensor(lengths), 0.25)
    for row, x, y, n in zip(rewards, a.tolist(), b.tolist(), lengths):
        close(row.sum(), -0.25 * sum(naive.kl_estimate(x[t], y[t], estimator) for t in range(n)))


@shipping("token_rewards", "gae", "length_mask")
def test_the_score_falls_on_the_last_valid_token(k):
    """Trick 15: with lambda 0 and values 0, the last token's advantage is the score, whether a response stopped early or not."""
    scores, lengths, mask = torch.tensor([3.0, -2.0, 7.0]), torch.tensor([2, 4, 1]), k.length_mask(torch.tensor([2, 4, 1]), 4)
    rewards = k.token_rewards(scores, torch.full((3, 4), 0.5), lengths, 0.0)
    advantages, returns = k.gae(rewards, torch.zeros(3, 4), mask, 1.0, 0.0)
    close(advantages, [[0.0, 3.0, 0.0, 0.0], [0.0, 0.0, 0.0, -2.0], [7.0, 0.0, 0.0, 0.0]])
    close(returns, advantages)


# ---- means and whitening ---------------------------------------------------------------------------------------------
@shipping("masked_mean")
@given(ragged())
@quick
def test_masked_mean_agrees_with_naive(k, case):
    values, mask = torch.tensor(case[1]), torch.tensor(naive.length_mask(case[0], len(case[1][0])))
    ours = k.masked_mean(spoiled(values, mask), mask)
    assert ours.shape == ()
    close(ours, naive.masked_mean(case[1], mask.tolist()), atol=1e-5)


@shipping("masked_mean")
def test_masked_mean_of_bf16_sums_in_fp32(k):
    """A sum of these in bf16 has two digits."""
    values = (normal(100, 100) + 1).bfloat16()
    ours = k.masked_mean(values, torch.ones(100, 100, dtype=torch.bool))
    assert ours.dtype is torch.float32
    close(ours, naive.masked_mean(values.tolist(), [[True] * 100] * 100))


@shipping("masked_mean")
def test_masked_mean_lets_no_nan_into_gradients(k):
    """Trick 5."""
    values = torch.tensor([[1.0, NAN], [INF, 4.0]], requires_grad=True)
    k.masked_mean(values, torch.tensor([[True, False], [False, True]])).backward()
    close(values.grad, [[0.5, 0.0], [0.0, 0.5]])


@shipping("masked_whiten")
@pytest.mark.parametrize("shift_mean", [True, False])
@given(ragged())
@quick
def test_masked_whiten_agrees_with_naive(k, shift_mean, case):
    values, mask = torch.tensor(case[1]), torch.tensor(naive.length_mask(case[0], len(case[1][0])))
    ours = k.masked_whiten(spoiled(values, mask), mask, shift_mean)
    close(ours, naive.masked_whiten(case[1], mask.tolist(), shift_mean), rtol=1e-3, atol=1e-3)  # the variance may be near 0


@shipping("masked_whiten")
def test_masked_whiten_by_hand(k):
    """Trick 20: over the valid tokens, population variance: of 1, 2, 3, 6 the mean is 3 and the variance 3.5."""
    values, mask = torch.tensor([[1.0, 2.0, NAN], [3.0, 6.0, NAN]]), torch.tensor([[True, True, False]] * 2)
    s = 3.5**-0.5
    close(k.masked_whiten(values, mask), [[-2 * s, -s, 0.0], [0.0, 3 * s, 0.0]])
    close(k.masked_whiten(values, mask, shift_mean=False), [[3 - 2 * s, 3 - s, 0.0], [3.0, 3 + 3 * s, 0.0]])


@shipping("masked_whiten")
@given(ragged())
@quick
def test_whitened_tokens_have_mean_0_and_variance_1(k, case):
    lengths, rows, _ = case
    values, mask = torch.tensor(rows), torch.tensor(naive.length_mask(lengths, len(rows[0])))
    assume(sum(lengths) > 1 and values[mask].var(correction=0) > 0.01)
    white = k.masked_whiten(spoiled(values, mask), mask)[mask].double()
    close(white.mean(), 0.0, atol=1e-5)
    close(white.var(correction=0), 1.0, rtol=1e-4)
    kept = k.masked_whiten(spoiled(values, mask), mask, shift_mean=False)[mask].double()
    close(kept.mean(), values[mask].double().mean(), rtol=1e-4, atol=1e-4)


@shipping("masked_whiten")
@pytest.mark.parametrize("shift_mean", [True, False])
def test_masked_whiten_edges(k, shift_mean):
    one = torch.tensor([[False, True, False]])
    close(k.masked_whiten(torch.tensor([[NAN, 7.0, NAN]]), one, shift_mean), [[0.0, 7.0, 0.0]])  # one token: as it is
    close(k.masked_whiten(torch.tensor([[NAN, 7.0]]), torch.zeros(1, 2, dtype=torch.bool), shift_mean), [[0.0, 0.0]])
    equal = k.masked_whiten(torch.full((2, 2), 3.0), torch.ones(2, 2, dtype=torch.bool), shift_mean)
    close(equal, torch.full((2, 2), 0.0 if shift_mean else 3.0))
    far = torch.tensor([[1e4, 1e4 + 1, 1e4 + 2]])  # a mean of squares minus a squared mean has no digits left here
    close(k.masked_whiten(far, far > 0), [[-(1.5**0.5), 0.0, 1.5**0.5]], rtol=1e-4, atol=1e-4)


def whiten_on_one_process(rank, name, port, file):
    import importlib

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    values, mask, k = normal(4, 5), torch.tensor(naive.length_mask([1, 2, 5, 4], 5)), importlib.import_module(name)
    here = slice(0, 1) if rank == 0 else slice(1, 4)  # one process has a single valid token
    torch.save([k.masked_whiten(values[here], mask[here], shift) for shift in (True, False)], f"{file}.{rank}")
    dist.destroy_process_group()


@shipping("masked_whiten")
def test_masked_whiten_of_two_processes_is_that_of_one(k, tmp_path):
    """Trick 20."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(whiten_on_one_process, (k.__name__, port, str(tmp_path / "white")), nprocs=2)
    parts = [torch.load(tmp_path / f"white.{rank}") for rank in range(2)]
    mask = naive.length_mask([1, 2, 5, 4], 5)
    for i, shift in enumerate((True, False)):
        close(torch.cat([part[i] for part in parts]), naive.masked_whiten(normal(4, 5).tolist(), mask, shift))


# ---- advantages ------------------------------------------------------------------------------------------------------
@shipping("gae")
@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.99, 0.9), (1.0, 1.0), (0.9, 0.0), (0.0, 0.5)])
@given(ragged())
@quick
def test_gae_agrees_with_a_backward_loop(k, gamma, lam, case):
    """With nan behind each response's end (trick 30: values after the end never enter)."""
    rewards, values = torch.tensor(case[1]), torch.tensor(case[2])
    mask = torch.tensor(naive.length_mask(case[0], rewards.shape[1]))
    ours = k.gae(spoiled(rewards, mask), spoiled(values, mask), mask, gamma, lam)
    for x, y in zip(ours, naive.gae(case[1], case[2], mask.tolist(), gamma, lam)):
        close(x, y, rtol=1e-4, atol=1e-5)


@shipping("gae")
def test_gae_by_hand(k):
    """gamma 1/2, lambda 1/2. Row 1: deltas 1 + 2 - 2 = 1, 0 + 3 - 4 = -1, 2 - 6 = -4; then A = -4, -1 - 1 = -2, 1 - 1/2 = 1/2.
    Row 2 ends after one token: delta 3 - 1 = 2, and the value behind it counts 0.
    """
    rewards, values = torch.tensor([[1.0, 0.0, 2.0], [3.0, 9.0, 9.0]]), torch.tensor([[2.0, 4.0, 6.0], [1.0, 9.0, 9.0]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    advantages, returns = k.gae(rewards, values, mask, 0.5, 0.5)
    close(advantages, [[0.5, -2.0, -4.0], [2.0, 0.0, 0.0]])
    close(returns, [[2.5, 2.0, 2.0], [3.0, 0.0, 0.0]])


@shipping("gae")
@given(ragged(), st.sampled_from([1.0, 0.9, 0.5]))
@quick
def test_gae_limits(k, case, gamma):
    """lambda 1: the discounted return minus the value. lambda 0: the one-step residual."""
    lengths, rewards, values = case
    mask = torch.tensor(naive.length_mask(lengths, len(rewards[0])))
    monte_carlo, residual = torch.zeros(mask.shape, dtype=torch.float64), torch.zeros(mask.shape, dtype=torch.float64)
    for i, n in enumerate(lengths):
        for t in range(n):
            monte_carlo[i, t] = sum(gamma ** (u - t) * rewards[i][u] for u in range(t, n)) - values[i][t]
            residual[i, t] = rewards[i][t] + (gamma * values[i][t + 1] if t + 1 < n else 0.0) - values[i][t]
    arguments = torch.tensor(rewards), torch.tensor(values), mask, gamma
    close(k.gae(*arguments, 1.0)[0], monte_carlo, rtol=1e-4, atol=1e-5)
    close(k.gae(*arguments, 0.0)[0], residual, rtol=1e-4, atol=1e-5)


@shipping("gae")
def test_gae_of_long_responses(k):
    rewards, values, lengths = normal(3, 600), normal(3, 600, seed=1), [600, 599, 17]
    mask = torch.tensor(naive.length_mask(lengths, 600))
    ours = k.gae(rewards, values, mask, 1.0, 0.95)
    for x, y in zip(ours, naive.gae(rewards.tolist(), values.tolist(), mask.tolist(), 1.0, 0.95)):
        close(x, y, rtol=1e-4, atol=1e-4)


@shipping("gae")
def test_gae_takes_bf16_and_returns_fp32(k):
    rewards, values, mask = normal(2, 9).bfloat16(), normal(2, 9, seed=1).bfloat16(), torch.ones(2, 9, dtype=torch.bool)
    for x, y in zip(k.gae(rewards, values, mask, 1.0, 0.95), naive.gae(rewards.tolist(), values.tolist(), mask.tolist(), 1.0, 0.95)):
        assert x.dtype is torch.float32
        close(x, y)


@shipping("gae")
def test_gae_has_no_loop_over_tokens(k):
    counts = []
    for T in (3, 50):
        with Watch() as watch:
            k.gae(normal(2, T), normal(2, T), torch.ones(2, T, dtype=torch.bool), 1.0, 0.95)
        counts.append(watch.operations)
    assert counts[0] == counts[1]


@shipping("token_rewards", "masked_mean", "masked_whiten", "gae", "length_mask")
@given(ragged(), st.integers(1, 4))
@quick
def test_more_padding_changes_nothing(k, case, extra):
    """Trick 4: columns of nan appended behind everything."""
    lengths, kl, values = torch.tensor(case[0]), torch.tensor(case[1]), torch.tensor(case[2])
    T, scores = kl.shape[1], torch.arange(len(lengths)).float()

    def everything(kl, values):
        mask = k.length_mask(lengths, kl.shape[1])
        rewards = k.token_rewards(scores, kl, lengths, 0.1)
        advantages, returns = k.gae(rewards, values, mask, 1.0, 0.95)
        scaled = k.masked_whiten(rewards, mask, shift_mean=False)
        return [k.masked_mean(values, mask)], [rewards, scaled, advantages, returns, k.masked_whiten(advantages, mask)]

    more = torch.full((len(lengths), extra), NAN)
    short, long = everything(kl, values), everything(torch.cat([kl, more], 1), torch.cat([values, more], 1))
    close(long[0][0], short[0][0].item())
    for x, y in zip(long[1], short[1]):
        close(x[:, :T], y, rtol=1e-4, atol=1e-4)
        close(x[:, T:], torch.zeros(len(lengths), extra))


# ---- losses ----------------------------------------------------------------------------------------------------------
def slope(function, x):
    """Central difference."""
    return (function(x + 1e-6) - function(x - 1e-6)) / 2e-6


GRID = [(x, a) for x in (-2.0, -0.3, -0.21, -0.1, 0.0, 0.1, 0.17, 0.3, 2.0) for a in (-2.0, -0.5, 0.0, 1.0, 3.0)]


@shipping("clipped_policy_loss")
def test_clipped_policy_loss_agrees_with_naive(k):
    """Values, and gradients against central differences, on both sides of both clips."""
    log_ratio, advantage = (torch.tensor(x, dtype=torch.float64) for x in zip(*GRID))
    old = normal(len(GRID)).double()
    new = (old + log_ratio).requires_grad_()
    ours = k.clipped_policy_loss(new, old, advantage, 0.2)
    close(ours, [naive.clipped_policy_loss(x, 0.0, a, 0.2) for x, a in GRID])
    ours.sum().backward()
    close(new.grad, [slope(lambda y: naive.clipped_policy_loss(y, 0.0, a, 0.2), x) for x, a in GRID])  # noqa: B023


@shipping("clipped_policy_loss")
@pytest.mark.parametrize("shape", [(), (4,), (2, 3)])
def test_clipped_policy_loss_keeps_the_shape(k, shape):
    """Tokens for PPO, whole sequences for RLOO; at ratio 1 the loss is -A, and its gradient is -A too."""
    old, advantages = normal(*shape), normal(*shape, seed=1)
    new = old.clone().requires_grad_()
    ours = k.clipped_policy_loss(new, old, advantages, 0.2)
    close(ours, -advantages)
    ours.sum().backward()
    close(new.grad, -advantages)


@shipping("clipped_policy_loss")
@pytest.mark.parametrize("log_ratio, advantage, loss, slope", [
    (100.0, 2.0, -2.4, 0.0), (-100.0, 2.0, 0.0, 0.0), (-100.0, -2.0, 1.6, 0.0), (100.0, 0.0, 0.0, 0.0), (-100.0, 0.0, 0.0, 0.0),
])  # fmt: skip
def test_clipped_policy_loss_of_extreme_ratios(k, log_ratio, advantage, loss, slope):
    """e^100 is more than fp32 holds; where the clip holds the ratio, neither loss nor gradient may notice."""
    new = torch.tensor(log_ratio, requires_grad=True)
    ours = k.clipped_policy_loss(new, torch.tensor(0.0), torch.tensor(advantage), 0.2)
    ours.backward()
    close(ours, loss)
    close(new.grad, slope)


@shipping("clipped_policy_loss")
def test_clipped_policy_loss_is_unbounded_where_ppo_is(k):
    """A < 0 and a huge ratio: PPO does not clip there, and the loss must be huge, not nan."""
    assert k.clipped_policy_loss(torch.tensor(100.0), torch.tensor(0.0), torch.tensor(-2.0), 0.2) > 1e9


@shipping("clipped_value_loss")
def test_clipped_value_loss_agrees_with_naive(k):
    grid = [(v, o, r) for v in (-1.0, 0.05, 0.12, 0.35, 2.0) for o in (0.0, 0.3) for r in (-0.7, 0.13, 1.9)]
    values, old, returns = (torch.tensor(x, dtype=torch.float64) for x in zip(*grid))
    values.requires_grad_()
    ours = k.clipped_value_loss(values, old, returns, 0.2)
    close(ours, [naive.clipped_value_loss(*x, 0.2) for x in grid])
    ours.sum().backward()
    close(values.grad, [slope(lambda y: naive.clipped_value_loss(y, o, r, 0.2), v) for v, o, r in grid])  # noqa: B023


@shipping("clipped_value_loss")
def test_clipped_value_loss_by_hand(k):
    """Value 3, old 1, range 0.5: near 1.5. Return 2: 0.5 * max(1, 0.25). Return 5: 0.5 * max(4, 12.25)."""
    close(k.clipped_value_loss(torch.tensor([[3.0, 3.0]]), torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, 5.0]]), 0.5), [[0.5, 6.125]])


@shipping("clipped_policy_loss", "token_logprobs", "length_mask")
def test_sums_over_a_global_count_do_not_see_micro_batches(k):
    """Trick 28: the gradient of sum / count of all tokens is the same in 1, 2, 4 or 8 parts; a mean of means is not."""
    hidden, weight, tokens, _ = head_case(8, 6, 5, 11)
    lengths, old, advantages = torch.tensor([1, 6, 2, 5, 3, 1, 6, 4]), normal(8, 6) - 2.4, normal(8, 6, seed=1)
    mask = k.length_mask(lengths, 6)

    def gradient(rows, count):
        w = weight.clone().requires_grad_()
        for part in torch.arange(8).split(rows):
            losses = k.clipped_policy_loss(k.token_logprobs(hidden[part], w, tokens[part])[0], old[part], advantages[part], 10.0)
            (torch.where(mask[part], losses, 0.0).sum() / count(mask[part])).backward()
        return w.grad

    whole = gradient(8, lambda m: mask.sum())
    for rows in (1, 2, 4):
        close(gradient(rows, lambda m: mask.sum()), whole.double())
    assert (gradient(1, lambda m: 8 * m.sum()) - whole).abs().max() > 1e-3


@shipping("adaptive_kl_coef")
@given(st.tuples(st.floats(1e-3, 2), st.floats(-5, 50), st.floats(0.1, 20), st.floats(100, 1e5), st.integers(1, 1000)))
@quick
def test_adaptive_kl_coef_agrees_with_naive(k, numbers):
    assert k.adaptive_kl_coef(*numbers) == pytest.approx(naive.adaptive_kl_coef(*numbers))


@shipping("adaptive_kl_coef")
@pytest.mark.parametrize("kl, coef", [(6.0, 0.2), (6.6, 0.2 * 1.00128), (60.0, 0.2 * 1.00256), (0.0, 0.2 * 0.99744), (-3.0, 0.2 * 0.99744)])
def test_adaptive_kl_coef_by_hand(k, kl, coef):
    """Target 6, horizon 10,000, 128 episodes: the error is clipped to +-0.2, so a step is 0.256 % at most."""
    ours = k.adaptive_kl_coef(0.2, kl, 6.0, 10_000, 128)
    assert isinstance(ours, float) and ours == pytest.approx(coef, rel=1e-9)


# ---- sampling --------------------------------------------------------------------------------------------------------
LAST = math.nextafter(1.0, 0.0)  # of float64; in fp32 it rounds to 1
LAST32 = 1 - 2.0**-24


@shipping("sample_tokens")
@pytest.mark.parametrize("V", [1, 2, 63, 64, 65, 130, 1000])
def test_sample_tokens_has_the_shares_of_softmax(k, V):
    """On a grid of n uniforms a token of probability p comes floor(n p) to ceil(n p) times, here give or take one for rounding."""
    n, logits = 2**13, normal(V, seed=V) * 2
    uniforms = (torch.arange(n) + 0.5) / n
    tokens = torch.cat([k.sample_tokens(logits.softmax(-1).expand(len(part), V), part) for part in uniforms.split(1024)])
    assert not tokens.is_floating_point() and tokens.shape == (n,)
    counts = torch.bincount(tokens, minlength=V)
    expected = n * torch.tensor([math.exp(x) for x in naive.log_softmax(logits.double().tolist())], dtype=torch.float64)
    assert counts.shape == (V,) and ((counts - expected).abs() < 2).all()


@shipping("sample_tokens")
@pytest.mark.parametrize("V", [5, 64, 200])
def test_sample_tokens_inverts_the_cumulative_sum(k, V):
    """Row by row the token of naive.py, with other logits in every row; uniforms within 1e-5 of a border may fall on either side."""
    logits, uniforms = normal(64, V) * 3, torch.rand(64, generator=torch.Generator().manual_seed(1))
    ours = k.sample_tokens(logits.softmax(-1), uniforms).tolist()
    for token, row, u in zip(ours, logits.double().tolist(), uniforms.tolist()):
        assert token in {naive.sample_token(row, min(max(u + shift, 0.0), LAST)) for shift in (-1e-5, 0.0, 1e-5)}
    exact = [naive.sample_token(row, u) for row, u in zip(logits.double().tolist(), uniforms.tolist())]
    assert sum(a == b for a, b in zip(ours, exact)) >= 62


@shipping("sample_tokens")
@pytest.mark.parametrize("possible", [[0], [199], [64], [63, 64], [0, 130, 199], [1, 65, 129], list(range(128, 192)), [127, 198]])
@pytest.mark.parametrize("forbidden", [-INF, -1e4])
def test_sample_tokens_never_draws_probability_0(k, possible, forbidden):
    """Also at uniform 0, at the smallest and largest floats, and for sizes with whole blocks of zeros before, between and behind."""
    for V in (200, 256):
        logits = torch.full((V,), forbidden)
        logits[possible] = normal(len(possible))
        uniforms = torch.tensor([0.0, 1e-45, 1e-38, 1e-8, 0.25, 0.5, 0.75, 1 - 2.0**-20, LAST32, LAST], dtype=torch.float64)
        drawn = k.sample_tokens(logits.softmax(-1).expand(len(uniforms), V), uniforms).tolist()
        assert set(drawn) <= set(possible) and drawn[0] == min(possible) and drawn[-1] == drawn[-2] == max(possible)


@shipping("sample_tokens")
def test_sample_tokens_of_a_large_vocabulary(k):
    """50,257 equal tokens: the middle of each one's interval, up to the last, which one running fp32 sum may miss."""
    V = 50_257
    wanted = torch.tensor([0, 1, 63, 64, 12_345, 25_128, 40_000, 50_000, 50_175, 50_176, V - 2, V - 1])
    drawn = k.sample_tokens(torch.full((len(wanted), V), 1 / V), ((wanted.double() + 0.5) / V).float())
    assert drawn.tolist() == wanted.tolist()


@shipping("sample_tokens")
def test_sample_tokens_takes_a_rare_token_after_a_likely_one(k):
    """A first token of probability 1 - 2^-12 and 4,096 more of 2^-24 each: all of these are too small for a sum near 1 in fp32."""
    V = 4097
    logits = torch.tensor([math.log(2.0**24 - 2.0**12)] + [0.0] * 4096)
    uniforms = 1 - 2.0**-12 + (torch.arange(16) + 0.5) * 2.0**-16  # fp32 holds these
    drawn = k.sample_tokens(logits.softmax(-1).expand(16, V), uniforms)
    close(drawn, 1 + 256 * torch.arange(16) + 128, rtol=0, atol=32)  # atol: 8 roundings of 2^-24 and 2^-23 under the total


@shipping("sample_tokens")
@pytest.mark.parametrize("V, end", [(64, 64), (64, 60), (128, 128), (128, 120), (192, 120)])
def test_sample_tokens_stays_inside_where_rounding_is_largest(k, V, end):
    """A second block whose whole mass is a few roundings of 1, or one block alone, at the last uniforms: never a token behind the end."""
    logits = normal(4000, V)
    logits[:, 64:] -= 12 + 6 * torch.rand(4000, 1, generator=torch.Generator().manual_seed(1))
    logits[:, end:] = -INF
    for u in (LAST32, 1 - 2.0**-23, 1 - 2.0**-22, 1 - 2.0**-21):
        drawn = k.sample_tokens(logits.softmax(-1), torch.full((4000,), u))
        assert 0 <= drawn.min() and drawn.max() < end


@shipping("sample_tokens", "token_logprobs")
def test_what_is_sampled_is_what_is_scored(k):
    """Trick 11, at temperature 0.7: the shares of the drawn tokens are the exp of their recomputed log-probabilities."""
    n, V, hidden, weight = 2**12, 37, normal(1, 1, 6), normal(37, 6, seed=1)
    logits = [sum(w * x for w, x in zip(line, hidden[0, 0].tolist())) / 0.7 for line in weight.tolist()]
    tokens = k.sample_tokens(torch.tensor(logits).softmax(-1).expand(n, V), (torch.arange(n) + 0.5) / n)
    logprobs, _ = k.token_logprobs(hidden.expand(1, V, 6), weight, torch.arange(V)[None], 0.7)
    assert ((torch.bincount(tokens, minlength=V) - n * logprobs[0].exp()).abs() < 2).all()


# ---- what uses the kernels: one step from hidden states to log-probabilities and values --------------------------------------------
class Bigrams(torch.nn.Module):
    """A language model that can be read by eye: the state at a token is its one-hot vector, the head a table of logits."""

    def __init__(self, table):
        super().__init__()
        self.head = torch.nn.Linear(len(table), len(table), bias=False)
        self.head.weight.data = torch.tensor(table).T.contiguous()  # table[i][j]: logit of j after i
        self.base_model = torch.nn.Module()
        self.base_model.forward = self.states

    def states(self, input_ids, use_cache):
        hidden = torch.nn.functional.one_hot(input_ids, self.head.weight.shape[0]).float()
        return type("Output", (), dict(last_hidden_state=hidden))

    def get_output_embeddings(self):
        return self.head


@shipping("token_logprobs", "token_rewards")
@pytest.mark.parametrize("pads", [0, 2])
def test_three_tokens_by_hand(k, pads):
    """Trick 6: prompt a, response b c. log p(b | a) and log p(c | b), and the values said at a and at b, before b and c are known."""
    table = [[0.0, math.log(2.0), 0.0], [math.log(3.0), 0.0, math.log(6.0)], [0.0, 0.0, 0.0]]
    model = k.PolicyAndValue(Bigrams(table))
    model.value_head.weight.data = torch.tensor([[10.0, 20.0, 30.0]])
    ids = torch.tensor([[2] * pads + [0, 1, 2]])
    logprobs, entropies, values = model(ids, torch.arange(3 + pads)[None] >= pads, 2, 1.0)
    close(logprobs, [[math.log(2 / 4), math.log(6 / 10)]])
    close(values, [[10.0, 20.0]])
    close(entropies, [[-sum(p * math.log(p) for p in row) for row in ((0.25, 0.5, 0.25), (0.3, 0.1, 0.6))]])
    close(model(ids, torch.arange(3 + pads)[None] >= pads, 2, 0.5)[0], [[math.log(4 / 6), math.log(36 / 46)]])


# ---- RLOO ------------------------------------------------------------------------------------------------------------
groups = st.integers(2, 5).flatmap(
    lambda k: st.tuples(st.just(k), st.lists(st.lists(st.floats(-9, 9, width=32), min_size=k, max_size=k), min_size=1, max_size=4))
)


@shipping("rloo_advantages")
@quick
@given(case=groups)
def test_rloo_advantages_agree_with_naive(k, case):
    """And they sum to 0 over the responses to a prompt."""
    rloo_k, rows = case
    rewards = [row[i] for i in range(rloo_k) for row in rows]  # first responses of all prompts, then second ones
    ours = k.rloo_advantages(torch.tensor(rewards), rloo_k)
    close(ours, naive.rloo_advantages(rewards, rloo_k), atol=1e-4)
    close(ours.view(rloo_k, -1).sum(0), [0.0] * len(rows), atol=1e-4)


@shipping("rloo_advantages")
def test_rloo_advantages_of_trls_page(k):
    """Trick 25: the example of TRL's RLOO page, three prompts with four completions each."""
    rewards = torch.tensor([1, 2, 3, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    advantages = k.rloo_advantages(rewards, 4)
    close(advantages[0], 1 - (2 + 5 + 8) / 3)  # first reward of the first prompt
    close(advantages[7], 6 - (3 + 2 + 9) / 3)  # third reward of the second prompt


@shipping("rloo_advantages")
def test_rloo_advantages_edges(k):
    """Trick 26: no division by a standard deviation; a constant changes nothing, and equal rewards give 0."""
    close(k.rloo_advantages(torch.tensor([1.0, 0, 0, 0]), 4), [1, -1 / 3, -1 / 3, -1 / 3])
    close(k.rloo_advantages(torch.full((6,), 7.0), 3), [0.0] * 6)
    x = normal(8)
    close(k.rloo_advantages(x + 100, 2), k.rloo_advantages(x, 2), atol=1e-4)
    close(k.rloo_advantages(torch.tensor([3.0, 1.0]), 2), [2.0, -2.0])  # one prompt, k = 2
    close(k.rloo_advantages(torch.tensor([0.001, 0.0]), 2), [0.001, -0.001])  # nearly equal rewards stay nearly 0
    assert k.rloo_advantages(x.bfloat16(), 2).dtype is torch.float32


# ---- preferences -----------------------------------------------------------------------------------------------------
@shipping("preference_loss")
def test_preference_loss_agrees_with_naive(k):
    """Also far out, where exp would overflow; a margin asks for more distance."""
    for chosen, rejected, margin in ((0.0, 0.0, 0.0), (2.0, -1.0, 0.0), (-3.0, 1.5, 0.5), (100.0, -100.0, 0.0), (-100.0, 100.0, 1.0)):
        ours = k.preference_loss(torch.tensor([chosen]), torch.tensor([rejected]), margin)
        close(ours, [naive.preference_loss(chosen, rejected, margin)])
    close(k.preference_loss(torch.zeros(2), torch.zeros(2)), [math.log(2)] * 2)
    margins = torch.tensor([0.0, 2.0])
    close(k.preference_loss(torch.ones(2), torch.zeros(2), margins), [naive.preference_loss(1, 0, m) for m in (0.0, 2.0)])
    assert k.preference_loss(torch.ones(1).bfloat16(), torch.zeros(1).bfloat16()).dtype is torch.float32


@shipping("preference_loss")
def test_preference_loss_gradients(k):
    """d loss / d chosen = -sigma(rejected - chosen): it fades where the order is right, and the two sides are opposite."""
    chosen, rejected = normal(5).requires_grad_(), normal(5, seed=1).requires_grad_()
    k.preference_loss(chosen, rejected).sum().backward()
    close(chosen.grad, [-1 / (1 + math.exp(c - r)) for c, r in zip(chosen.tolist(), rejected.tolist())])
    close(chosen.grad, -rejected.grad)


@shipping("ranking_loss")
@quick
@given(rows=st.lists(st.lists(st.floats(-9, 9, width=32), min_size=1, max_size=5), min_size=1, max_size=4))
def test_ranking_loss_agrees_with_naive(k, rows):
    """Rows of unequal length: what pads them may be nan, in the loss and in its gradient; a row of one loses 0."""
    K = max(map(len, rows))
    mask = torch.tensor([[i < len(row) for i in range(K)] for row in rows])
    scores = torch.tensor([row + [NAN] * (K - len(row)) for row in rows]).requires_grad_()
    losses = k.ranking_loss(scores, mask)
    close(losses, [naive.ranking_loss(row) for row in rows])
    losses.sum().backward()
    assert scores.grad.isfinite().all() and not scores.grad[~mask].any()


@shipping("ranking_loss", "preference_loss")
def test_ranking_of_two_is_a_pair(k):
    scores = normal(4, 2)
    close(k.ranking_loss(scores, torch.ones(4, 2, dtype=torch.bool)), k.preference_loss(scores[:, 0], scores[:, 1]))


# ---- sft -------------------------------------------------------------------------------------------------------------
@shipping("next_token_losses")
@pytest.mark.parametrize("with_bias", [False, True])
def test_next_token_losses_agree_with_naive(k, with_bias):
    hidden, weight, bias, labels = normal(2, 4, 3), normal(5, 3, seed=1), normal(5, seed=2), [[3, 1, -100, 4], [-100, -100, 0, 2]]
    hidden[1, 0] = math.nan  # nothing is learned there
    losses, right = k.next_token_losses(hidden, weight, torch.tensor(labels), bias if with_bias else None)
    assert losses.dtype is torch.float32 and right.dtype is torch.bool
    logits = hidden.double() @ weight.double().T + (bias.double() if with_bias else 0)
    for b in range(2):
        for t in range(1, 4):
            label, logp = labels[b][t], naive.log_softmax(logits[b, t - 1].tolist())
            close(losses[b, t - 1], -logp[label] if label != -100 else 0.0)
            assert right[b, t - 1].item() == (label != -100 and logp[label] == max(logp))


@shipping("next_token_losses")
@pytest.mark.parametrize("keep", [0, 2**25])
def test_next_token_losses_learn_as_cross_entropy(k, keep):
    """Gradients over several blocks of words, whose probabilities are kept or not, against torch's own cross-entropy in float64; the
    prompt's positions get none.
    """
    hidden, weight = normal(3, 9, 4), normal(2500, 4, seed=1)
    labels = torch.randint(0, 2500, (3, 9), generator=torch.Generator().manual_seed(2))
    labels[:, :4], labels[0, 1] = -100, 7
    slopes = []
    for dtype in (torch.float32, torch.float64):
        h, w = (x.to(dtype).requires_grad_() for x in (hidden, weight))
        theirs = torch.nn.functional.cross_entropy((h @ w.T)[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        loss = k.next_token_losses(h, w, labels, keep=keep)[0].sum() if dtype is torch.float32 else theirs
        slopes.append(torch.autograd.grad(loss, (h, w)))
    for ours, theirs in zip(*slopes):
        close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert not slopes[0][0][1, :3].any()


@pytest.mark.parametrize("name", ["sft", "ppo_sentiment"])
def test_draws_depend_on_the_place_alone(scripts, name):
    """Trick 33: no draw depends on an earlier one, and different seeds, names and updates give different numbers."""
    draws = scripts[name].draws
    places = [(1, "tokens", 3), (1, "tokens", 4), (2, "tokens", 3), (1, "query", 3), (1, "tokens"), (1, "tokens", 3, 0)]
    numbers = [torch.rand(4, generator=draws(*place)).tolist() for place in places]
    assert numbers == [torch.rand(4, generator=draws(*place)).tolist() for place in places]
    assert len(set(map(tuple, numbers))) == len(places)


@pytest.mark.parametrize("name", ["sft", "ppo_sentiment"])
def test_stream_rows_is_one_stream(scripts, name):
    """Every pass visits every row once, in another order, and a cut of the stream is the stream's cut."""
    stream_rows = scripts[name].stream_rows
    stream = stream_rows(7, 0, 28, 1).tolist()
    assert all(sorted(stream[i : i + 7]) == list(range(7)) for i in range(0, 28, 7)) and stream[:7] != stream[7:14]
    for start, count in ((0, 3), (5, 4), (7, 7), (6, 15), (27, 1)):
        assert stream_rows(7, start, count, 1).tolist() == stream[start : start + count]
    assert stream_rows(7, 0, 28, 2).tolist() != stream
