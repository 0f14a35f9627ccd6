"""What holds for every kernel at its edges and in any order of rows: one token, no token, bf16, slopes of KL and rankings."""

import math

import naive
import pytest
import torch
from conftest import shipping
from hypothesis import given
from hypothesis import strategies as st
from test_kernels import close, normal, quick, ragged, slope


# ---- the order of rows -----------------------------------------------------------------------------------------------
@shipping("token_rewards", "masked_mean", "masked_whiten", "gae", "length_mask")
@given(ragged(), st.randoms(use_true_random=False))
@quick
def test_the_order_of_rows_changes_nothing(k, case, chance):
    """Rows in another order give the same rows in that order, and the same mean."""
    order = list(range(len(case[0])))
    chance.shuffle(order)
    scores = torch.arange(len(order)).float()

    def everything(rows):
        lengths, kl, values = (torch.tensor(x)[rows] for x in case)
        mask = k.length_mask(lengths, kl.shape[1])
        rewards = k.token_rewards(scores[rows], kl, lengths, 0.1)
        advantages, returns = k.gae(rewards, values, mask, 1.0, 0.95)
        white = k.masked_whiten(advantages, mask), k.masked_whiten(rewards, mask, shift_mean=False)
        return k.masked_mean(values, mask), mask, rewards, advantages, returns, *white

    mean, *before = everything(list(range(len(order))))
    other, *after = everything(order)
    close(other, mean.item(), atol=1e-5)
    for x, y in zip(before, after):
        close(y, x[order], rtol=1e-4, atol=1e-3)  # whitened numbers whose variance is near 0 magnify a rounding


@shipping("response_lengths", "length_mask", "kl_per_token", "clipped_policy_loss")
@given(st.permutations(range(5)))
@quick
def test_the_order_of_rows_changes_no_other_kernel(k, order):
    """Here to the bit: each row is its own."""
    tokens, a, b = torch.arange(20).view(5, 4) * 7 % 6, normal(5, 4), normal(5, 4, seed=1)
    lengths = k.response_lengths(tokens, 3)
    assert torch.equal(k.response_lengths(tokens[order], 3), lengths[order])
    assert torch.equal(k.length_mask(lengths[order], 4), k.length_mask(lengths, 4)[order])
    for estimator in ("k1", "k2", "k3"):
        assert torch.equal(k.kl_per_token(a[order], b[order], estimator), k.kl_per_token(a, b, estimator)[order])
    assert torch.equal(k.clipped_policy_loss(a[order], b[order], a[order], 0.2), k.clipped_policy_loss(a, b, a, 0.2)[order])


@shipping("rloo_advantages")
@given(st.integers(2, 4).flatmap(lambda n: st.tuples(st.just(n), st.permutations(range(3)), st.permutations(range(n)), st.floats(-50, 50))))
@quick
def test_rloo_ignores_order_and_constants(k, case):
    """Prompts or responses in another order give the same advantages in that order; a constant for each prompt changes nothing."""
    rloo_k, prompts, responses, constant = case
    rewards = normal(rloo_k, 3)
    advantages = k.rloo_advantages(rewards.flatten(), rloo_k).view(rloo_k, 3)
    other = k.rloo_advantages(rewards[responses][:, prompts].flatten(), rloo_k).view(rloo_k, 3)
    close(other, advantages[responses][:, prompts])
    shifted = rewards + constant * torch.tensor([1.0, 0.0, -2.0])
    close(k.rloo_advantages(shifted.flatten(), rloo_k).view(rloo_k, 3), advantages, atol=1e-4)


# ---- one token and no token ------------------------------------------------------------------------------------------
@shipping("response_lengths", "token_rewards", "gae", "masked_whiten", "length_mask")
def test_responses_of_one_token(k):
    """T = 1: the only token has the score and its KL; its advantage is reward minus value, its return the reward."""
    lengths, kl, scores, values = torch.ones(3, dtype=torch.long), normal(3, 1), normal(3, seed=1), normal(3, 1, seed=2)
    assert k.response_lengths(torch.tensor([[0], [4], [0]]), 0).tolist() == [1, 1, 1]
    mask = k.length_mask(lengths, 1)
    rewards = k.token_rewards(scores, kl, lengths, 0.5)
    close(rewards, scores[:, None] - 0.5 * kl)
    for gamma, lam in ((1.0, 0.95), (0.5, 0.0)):
        advantages, returns = k.gae(rewards, values, mask, gamma, lam)
        close(advantages, rewards - values)
        close(returns, rewards)
    white = k.masked_whiten(rewards, mask)
    close(white, (rewards - rewards.mean()) / rewards.std(correction=0))


@shipping("token_rewards")
def test_a_response_of_no_token_is_refused(k):
    """There is no last token to carry the score. A rollout makes no such response: the first token always counts."""
    with pytest.raises((RuntimeError, IndexError, ValueError)):
        k.token_rewards(torch.ones(2), torch.zeros(2, 3), torch.tensor([2, 0]), 0.1)
    assert k.response_lengths(torch.zeros(1, 3, dtype=torch.long), 0).tolist() == [1]


@shipping("gae", "masked_whiten", "masked_mean")
def test_all_masked_but_one(k):
    """One valid token in a batch of nan."""
    mask = torch.zeros(3, 4, dtype=torch.bool)
    mask[1, 0] = True
    rewards, values = (torch.where(mask, x, math.nan) for x in (torch.tensor(3.0), torch.tensor(1.0)))
    advantages, returns = k.gae(rewards, values, mask, 0.9, 0.9)
    close(advantages, torch.where(mask, 2.0, 0.0))
    close(returns, torch.where(mask, 3.0, 0.0))
    close(k.masked_whiten(rewards, mask), torch.where(mask, 3.0, 0.0))
    close(k.masked_mean(rewards, mask), 3.0)


# ---- bf16 ------------------------------------------------------------------------------------------------------------
@shipping("kl_per_token", "clipped_policy_loss")
def test_elementwise_kernels_take_bf16(k):
    """Rounded inputs, and at most a handful of roundings of 2**-8 on the way: within 2 % of naive, and of the size of the inputs near 0."""
    a, b, c = (normal(40, seed=seed).bfloat16() for seed in range(3))
    rows = list(zip(a.tolist(), b.tolist(), c.tolist()))
    for estimator in ("k1", "k2", "k3"):
        close(k.kl_per_token(a, b, estimator), [naive.kl_estimate(x, y, estimator) for x, y, _ in rows], rtol=0.02, atol=0.02)
    close(k.clipped_policy_loss(a, b, c, 0.2), [naive.clipped_policy_loss(*row, 0.2) for row in rows], rtol=0.02, atol=0.02)
    if hasattr(k, "clipped_value_loss"):
        close(k.clipped_value_loss(a, b, c, 0.2), [naive.clipped_value_loss(*row, 0.2) for row in rows], rtol=0.02, atol=0.02)


@shipping("token_rewards", "masked_whiten")
def test_rewards_and_whitening_take_bf16(k):
    """Sums are in fp32, so only the rounding of the inputs is left, which naive sees too."""
    lengths, kl, scores = [2, 5, 1], normal(3, 5).bfloat16(), normal(3, seed=1).bfloat16()
    mask = naive.length_mask(lengths, 5)
    close(k.masked_whiten(kl, torch.tensor(mask)), naive.masked_whiten(kl.tolist(), mask))
    ours = k.token_rewards(scores, kl, torch.tensor(lengths), 0.3)
    close(ours, naive.token_rewards(scores.tolist(), kl.tolist(), lengths, 0.3), rtol=0.02, atol=0.02)


# ---- slopes ----------------------------------------------------------------------------------------------------------
@shipping("kl_per_token")
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_slopes_of_the_kl_estimates(k, estimator):
    """In the policy's log-probability, against central differences of naive: what a KL in the loss pulls with."""
    ratios = [-3.0, -1.0, -0.1, 0.0, 0.1, 1.0, 3.0]
    logprobs = torch.tensor(ratios, dtype=torch.float64, requires_grad=True)
    k.kl_per_token(logprobs, torch.zeros(7, dtype=torch.float64), estimator).sum().backward()
    close(logprobs.grad, [slope(lambda y: naive.kl_estimate(y, 0.0, estimator), x) for x in ratios], atol=1e-5)  # noqa: B023


@shipping("ranking_loss")
def test_slopes_of_a_ranking(k):
    """Against central differences, of a full row and of one with three of four responses."""
    rows = [[0.3, -1.2, 2.0, 0.1], [1.5, 0.2, -0.7]]
    scores = torch.tensor([rows[0], [*rows[1], math.nan]], dtype=torch.float64, requires_grad=True)
    k.ranking_loss(scores, scores.detach().isfinite()).sum().backward()
    for i, row in enumerate(rows):
        for j in range(len(row)):
            near = lambda x: naive.ranking_loss([*row[:j], x, *row[j + 1 :]])  # noqa: B023, E731
            close(scores.grad[i, j], slope(near, row[j]), atol=1e-5)
