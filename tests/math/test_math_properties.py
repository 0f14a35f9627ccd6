"""What holds for the math in any order of rows, for one token, in bf16, and for gradients."""

import math

import naive
import pytest
import torch
from conftest import module_with
from hypothesis import given
from hypothesis import strategies as st
from math_tools import close, normal, quick, ragged, slope

ppo = module_with("token_rewards", "gae", "clipped_value_loss")
rloo = module_with("kl_per_token", "rloo_advantages")
reward = module_with("ranking_loss")


# ---- The order of rows -------------------------------------------------------------------------------------


@given(ragged(), st.randoms(use_true_random=False))
@quick
def test_the_order_of_rows_changes_nothing(case, random):
    """Rows in another order give the same results in that order, and the same mean."""
    order = list(range(len(case[0])))
    random.shuffle(order)
    scores = torch.arange(len(order)).float()

    def everything(rows):
        lengths, kl, values = (torch.tensor(x)[rows] for x in case)
        mask = ppo.length_mask(lengths, kl.shape[1])
        rewards = ppo.token_rewards(scores[rows], kl, lengths, 0.1)
        advantages, returns = ppo.gae(rewards, values, mask, 1.0, 0.95)
        whitened = ppo.masked_whiten(advantages, mask)
        scaled = ppo.masked_whiten(rewards, mask, shift_mean=False)
        return ppo.masked_mean(values, mask), [mask, rewards, advantages, returns, whitened, scaled]

    mean, results = everything(list(range(len(order))))
    other_mean, other_results = everything(order)
    close(other_mean, mean.item(), atol=1e-5)
    for x, y in zip(other_results, results):
        close(x, y[order], rtol=1e-4, atol=1e-3)  # whitening magnifies roundings if the variance is almost 0


@given(st.permutations(range(5)))
@quick
def test_rows_do_not_change_each_other(order):
    """Functions that treat each row alone: here the results are equal to the bit."""
    tokens, a, b = torch.arange(20).view(5, 4) * 7 % 6, normal(5, 4), normal(5, 4, seed=1)
    lengths = ppo.response_lengths(tokens, 3)
    assert torch.equal(ppo.response_lengths(tokens[order], 3), lengths[order])
    assert torch.equal(ppo.length_mask(lengths[order], 4), ppo.length_mask(lengths, 4)[order])
    for estimator in ("k1", "k2", "k3"):
        kl = rloo.kl_per_token(a, b, estimator)
        assert torch.equal(rloo.kl_per_token(a[order], b[order], estimator), kl[order])
    losses = ppo.clipped_policy_loss(a, b, a, 0.2)
    assert torch.equal(ppo.clipped_policy_loss(a[order], b[order], a[order], 0.2), losses[order])


@given(st.integers(2, 4), st.permutations(range(3)), st.data())
@quick
def test_rloo_ignores_order_and_constants(k, prompt_order, data):
    """Prompts or responses in another order, and a constant added to all rewards of a prompt."""
    response_order = data.draw(st.permutations(range(k)))
    constant = data.draw(st.floats(-50, 50))
    rewards = normal(k, 3)
    advantages = rloo.rloo_advantages(rewards.flatten(), k).view(k, 3)
    reordered = rewards[response_order][:, prompt_order]
    ours = rloo.rloo_advantages(reordered.flatten(), k).view(k, 3)
    close(ours, advantages[response_order][:, prompt_order])
    shifted = rewards + constant * torch.tensor([1.0, 0.0, -2.0])
    close(rloo.rloo_advantages(shifted.flatten(), k).view(k, 3), advantages, atol=1e-4)


# ---- One token, or none ------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.5, 0.0)])
def test_responses_of_one_token(gamma, lam):
    """The only token has the score and its KL. Its advantage is reward - value, its return the reward."""
    kl, scores, values = normal(3, 1), normal(3, seed=1), normal(3, 1, seed=2)
    lengths = ppo.response_lengths(torch.tensor([[0], [4], [0]]), 0)
    assert lengths.tolist() == [1, 1, 1]
    mask = ppo.length_mask(lengths, 1)
    rewards = ppo.token_rewards(scores, kl, lengths, 0.5)
    close(rewards, scores[:, None] - 0.5 * kl)
    advantages, returns = ppo.gae(rewards, values, mask, gamma, lam)
    close(advantages, rewards - values)
    close(returns, rewards)
    close(ppo.masked_whiten(rewards, mask), (rewards - rewards.mean()) / rewards.std(correction=0))


def test_a_response_of_no_token_is_an_error():
    """It has no last token for its score. No rollout makes one: the first token always counts."""
    with pytest.raises(RuntimeError):
        ppo.token_rewards(torch.ones(2), torch.zeros(2, 3), torch.tensor([2, 0]), 0.1)
    assert ppo.response_lengths(torch.zeros(1, 3, dtype=torch.long), 0).tolist() == [1]


def test_one_valid_token_among_nan():
    mask = torch.zeros(3, 4, dtype=torch.bool)
    mask[1, 0] = True
    rewards = torch.where(mask, 3.0, math.nan)
    values = torch.where(mask, 1.0, math.nan)
    advantages, returns = ppo.gae(rewards, values, mask, 0.9, 0.9)
    close(advantages, torch.where(mask, 2.0, 0.0))
    close(returns, torch.where(mask, 3.0, 0.0))
    close(ppo.masked_whiten(rewards, mask), torch.where(mask, 3.0, 0.0))
    close(ppo.masked_mean(rewards, mask), 3.0)


# ---- bf16 --------------------------------------------------------------------------------------------------


def test_elementwise_math_takes_bf16():
    """Each of a few operations rounds by 2^-8, so the results are within 2 % of naive.py."""
    a, b, c = (normal(40, seed=seed).bfloat16() for seed in range(3))
    rows = list(zip(a.tolist(), b.tolist(), c.tolist()))
    near = dict(rtol=0.02, atol=0.02)
    for estimator in ("k1", "k2", "k3"):
        theirs = [naive.kl_estimate(x, y, estimator) for x, y, _ in rows]
        close(rloo.kl_per_token(a, b, estimator), theirs, **near)
    theirs = [naive.clipped_policy_loss(*row, 0.2) for row in rows]
    close(ppo.clipped_policy_loss(a, b, c, 0.2), theirs, **near)
    theirs = [naive.clipped_value_loss(*row, 0.2) for row in rows]
    close(ppo.clipped_value_loss(a, b, c, 0.2), theirs, **near)


def test_rewards_and_whitening_take_bf16():
    """Whitening adds up in fp32, so only the inputs are rounded, for naive.py too."""
    lengths, kl, scores = [2, 5, 1], normal(3, 5).bfloat16(), normal(3, seed=1).bfloat16()
    mask = naive.length_mask(lengths, 5)
    close(ppo.masked_whiten(kl, torch.tensor(mask)), naive.masked_whiten(kl.tolist(), mask))
    ours = ppo.token_rewards(scores, kl, torch.tensor(lengths), 0.3)
    theirs = naive.token_rewards(scores.tolist(), kl.tolist(), lengths, 0.3)
    close(ours, theirs, rtol=0.02, atol=0.02)


# ---- Gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_gradients_of_the_kl_estimates(estimator):
    """In the policy's log-probability, against central differences of naive.py."""
    log_ratios = [-3.0, -1.0, -0.1, 0.0, 0.1, 1.0, 3.0]
    logprobs = torch.tensor(log_ratios, dtype=torch.float64, requires_grad=True)
    rloo.kl_per_token(logprobs, torch.zeros_like(logprobs), estimator).sum().backward()
    expected = [slope(lambda y: naive.kl_estimate(y, 0.0, estimator), x) for x in log_ratios]
    close(logprobs.grad, expected, atol=1e-5)


def test_gradients_of_a_ranking():
    """Against central differences, of a row of four responses and of one of three."""
    rows = [[0.3, -1.2, 2.0, 0.1], [1.5, 0.2, -0.7]]
    scores = torch.tensor([rows[0], [*rows[1], math.nan]], dtype=torch.float64, requires_grad=True)
    mask = scores.detach().isfinite()
    reward.ranking_loss(scores, mask).sum().backward()

    for i, row in enumerate(rows):
        for j, score in enumerate(row):

            def loss_with(x, row=row, j=j):
                return naive.ranking_loss([*row[:j], x, *row[j + 1 :]])

            close(scores.grad[i, j], slope(loss_with, score), atol=1e-5)
