"""The math against naive.py, closed forms, finite differences and numbers worked out by hand.

All numbers are compared element by element. "Trick 5" in a docstring is number 5 in
docs/implementation_details.md.
"""

import math

import naive
import pytest
import torch
from math_tools import INF, NAN, close, normal, slope

import ppo_sentiment as ppo
import reward_model as reward
import rloo_tldr as rloo

MASK = torch.arange(5) < torch.tensor([3, 1, 5, 4])[:, None]  # responses of 3, 1, 5 and 4 tokens
REWARDS, VALUES = (torch.where(MASK, 2 * normal(4, 5, seed=seed), NAN) for seed in (1, 2))


# ---- Lengths and masks -------------------------------------------------------------------------------------


def test_response_lengths():
    tokens = torch.tensor([[5, 0, 0, 7], [0, 1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 0]])
    close(ppo.response_lengths(tokens, 0), [2, 1, 4, 4])
    close(ppo.response_lengths(tokens, -1), [4] * 4)  # there is no stop token
    close(ppo.response_lengths(tokens, torch.tensor([2, 0])), [2, 1, 2, 2])  # either one
    close(ppo.response_lengths(tokens, torch.tensor([], dtype=torch.long)), [4] * 4)


# ---- KL ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_per_token_agrees_with_naive(estimator):
    """Of any shape. Gradients in the policy's log-probability, against central differences."""
    log_ratios = torch.tensor([[-3.0, -1.0, -0.1, 0.0], [0.1, 1.0, 3.0, 6.0]], dtype=torch.float64)
    logprobs = log_ratios - 2
    logprobs.requires_grad_()
    ours = rloo.kl_per_token(logprobs, torch.full((2, 4), -2.0), estimator)

    def theirs(x):
        return naive.kl_estimate(x, 0.0, estimator)

    close(ours, [[theirs(x) for x in row] for row in log_ratios.tolist()])
    ours.sum().backward()
    close(logprobs.grad, [[slope(theirs, x) for x in row] for row in log_ratios.tolist()], atol=1e-5)
    assert rloo.kl_per_token(torch.tensor(1.0), torch.tensor(0.0), estimator).shape == ()


def test_k3_of_tiny_ratios_keeps_its_digits():
    """k3 of a log-ratio x is about x^2 / 2. For x = 2^-13, exp(x) - 1 in fp32 would round it away."""
    for log_ratio in (2.0**-13, -(2.0**-13)):
        ours = rloo.kl_per_token(torch.tensor(log_ratio), torch.tensor(0.0), "k3")
        close(ours, naive.kl_estimate(log_ratio, 0.0, "k3"), rtol=5e-3, atol=0)


def test_kl_estimators_on_a_small_categorical():
    """Trick 32: means and gradients of the estimators, by adding up all outcomes of p = softmax(z).

    In closed form, d KL(p || r) / dz_i = p_i (log(p_i / r_i) - KL(p || r)),
    and d KL(r || p) / dz_i = p_i - r_i.
    """
    z = torch.tensor([0.5, -1.0, 2.0, 0.1], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64)
    p = z.detach().softmax(-1)
    kl = sum(x * math.log(x / y) for x, y in zip(p.tolist(), ref.tolist()))
    forward_gradient = p * ((p / ref).log() - kl)
    reverse_gradient = p - ref

    mean, as_reward, as_loss = {}, {}, {}
    for name in ("k1", "k2", "k3"):
        logprobs = torch.log_softmax(z, -1)
        estimates = rloo.kl_per_token(logprobs, ref.log(), name)
        mean[name] = (p * estimates.detach()).sum().item()
        policy_gradient = (p * estimates.detach() * logprobs).sum()
        as_reward[name] = torch.autograd.grad(policy_gradient, z, retain_graph=True)[0]
        as_loss[name] = torch.autograd.grad((p * estimates).sum(), z)[0]

    assert mean["k1"] == pytest.approx(kl)
    assert mean["k3"] == pytest.approx(kl)
    assert abs(mean["k2"] - kl) > 0.02
    close(as_reward["k1"], forward_gradient)
    assert (as_reward["k2"] - forward_gradient).abs().max() > 0.05
    assert (as_reward["k3"] - forward_gradient).abs().max() > 0.05
    close(as_loss["k1"], [0.0] * 4)
    close(as_loss["k2"], forward_gradient)
    close(as_loss["k3"], reverse_gradient)


# ---- Rewards -----------------------------------------------------------------------------------------------


def test_token_rewards_by_hand():
    kl = torch.tensor([[1.0, 2.0, NAN], [0.5, 0.0, 4.0]])
    ours = ppo.token_rewards(torch.tensor([5.0, -1.0]), kl, torch.tensor([2, 3]), 0.1)
    close(ours, [[-0.1, 4.8, 0.0], [-0.05, 0.0, -1.4]])


# ---- Means and whitening -----------------------------------------------------------------------------------


def test_masked_mean_agrees_with_naive():
    ours = ppo.masked_mean(VALUES, MASK)
    assert ours.shape == ()
    close(ours, naive.masked_mean(VALUES.tolist(), MASK.tolist()))


def test_masked_mean_lets_no_nan_into_gradients():
    """Trick 5."""
    values = torch.tensor([[1.0, NAN], [INF, 4.0]], requires_grad=True)
    ppo.masked_mean(values, torch.tensor([[True, False], [False, True]])).backward()
    close(values.grad, [[0.5, 0.0], [0.0, 0.5]])


@pytest.mark.parametrize("shift_mean", [True, False])
def test_masked_whiten_agrees_with_naive(shift_mean):
    ours = ppo.masked_whiten(VALUES, MASK, shift_mean)
    close(ours, naive.masked_whiten(VALUES.tolist(), MASK.tolist(), shift_mean))


def test_masked_whiten_by_hand():
    """Trick 20: over the valid tokens 1, 2, 3, 6, whose mean is 3 and whose population variance is 3.5."""
    values = torch.tensor([[1.0, 2.0, NAN], [3.0, 6.0, NAN]])
    mask = torch.tensor([[True, True, False], [True, True, False]])
    s = 3.5**-0.5
    close(ppo.masked_whiten(values, mask), [[-2 * s, -s, 0.0], [0.0, 3 * s, 0.0]])
    with_mean = ppo.masked_whiten(values, mask, shift_mean=False)
    close(with_mean, [[3 - 2 * s, 3 - s, 0.0], [3.0, 3 + 3 * s, 0.0]])


@pytest.mark.parametrize("shift_mean", [True, False])
def test_masked_whiten_edges(shift_mean):
    one = torch.tensor([[False, True, False]])
    ours = ppo.masked_whiten(torch.tensor([[NAN, 7.0, NAN]]), one, shift_mean)
    close(ours, [[0.0, 7.0, 0.0]])  # a single token is returned unchanged
    nothing = torch.zeros(1, 2, dtype=torch.bool)
    close(ppo.masked_whiten(torch.tensor([[NAN, 7.0]]), nothing, shift_mean), [[0.0, 0.0]])
    equal = ppo.masked_whiten(torch.full((2, 2), 3.0), torch.ones(2, 2, dtype=torch.bool), shift_mean)
    close(equal, torch.full((2, 2), 0.0 if shift_mean else 3.0))


# ---- Advantages --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.99, 0.9), (1.0, 1.0), (0.9, 0.0), (0.0, 0.5)])
def test_gae_agrees_with_naive(gamma, lam):
    """With nan after the end of each response (trick 30: nothing after the end enters)."""
    ours = ppo.gae(REWARDS, VALUES, MASK, gamma, lam)
    theirs = naive.gae(REWARDS.tolist(), VALUES.tolist(), MASK.tolist(), gamma, lam)
    for x, y in zip(ours, theirs):
        close(x, y)


def test_gae_by_hand():
    """gamma 1/2, lambda 1/2.

    Row 1: the deltas are 1 + 2 - 2 = 1, 0 + 3 - 4 = -1 and 2 - 6 = -4, so the advantages from the end are
    -4, -1 - 1 = -2 and 1 - 1/2 = 1/2. Row 2 ends after one token: delta 3 - 1 = 2, the next value counts 0.
    """
    rewards = torch.tensor([[1.0, 0.0, 2.0], [3.0, 9.0, 9.0]])
    values = torch.tensor([[2.0, 4.0, 6.0], [1.0, 9.0, 9.0]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    advantages, returns = ppo.gae(rewards, values, mask, 0.5, 0.5)
    close(advantages, [[0.5, -2.0, -4.0], [2.0, 0.0, 0.0]])
    close(returns, [[2.5, 2.0, 2.0], [3.0, 0.0, 0.0]])


# ---- Losses ------------------------------------------------------------------------------------------------

LOG_RATIOS = (-2.0, -0.3, -0.21, -0.1, 0.0, 0.1, 0.17, 0.3, 2.0)  # on both sides of both clips
ADVANTAGES = (-2.0, -0.5, 0.0, 1.0, 3.0)


def test_clipped_policy_loss_agrees_with_naive():
    """Values, and gradients against central differences."""
    grid = [(x, a) for x in LOG_RATIOS for a in ADVANTAGES]
    log_ratios, advantages = torch.tensor(grid, dtype=torch.float64).T
    old = normal(len(grid)).double()
    new = (old + log_ratios).requires_grad_()
    ours, ratio, is_clipped = ppo.clipped_policy_loss(new, old, advantages, 0.2)
    for found, right in zip(
        (ours, ratio, is_clipped.double()), zip(*[naive.clipped_policy_loss(x, 0.0, a, 0.2) for x, a in grid])
    ):
        close(found, list(map(float, right)))
    assert 0 < is_clipped.sum() < len(grid)
    ours.sum().backward()
    expected = [slope(lambda y, a=a: naive.clipped_policy_loss(y, 0.0, a, 0.2)[0], x) for x, a in grid]
    close(new.grad, expected)


@pytest.mark.parametrize(
    "log_ratio, advantage, loss",
    [(100.0, 2.0, -2.4), (-100.0, 2.0, 0.0), (-100.0, -2.0, 1.6), (100.0, 0.0, 0.0), (-100.0, 0.0, 0.0)],
)
def test_clipped_policy_loss_of_extreme_ratios(log_ratio, advantage, loss):
    """e^100 is more than fp32 holds. Where the ratio is clipped, the loss is finite and the gradient 0."""
    new = torch.tensor(log_ratio, requires_grad=True)
    ours, _, _ = ppo.clipped_policy_loss(new, torch.tensor(0.0), torch.tensor(advantage), 0.2)
    ours.backward()
    close(ours, loss)
    close(new.grad, 0.0)


@pytest.mark.parametrize("wrong", [normal(4), normal(4, 1), normal(4, 4, 1)])
def test_losses_do_not_broadcast(wrong):
    """Advantages [n] next to log-probabilities [n, T] would be taken for those of tokens if n == T."""
    x = normal(4, 4)
    for inputs in ((wrong, x, x), (x, wrong, x), (x, x, wrong)):
        for loss in (ppo.clipped_policy_loss, ppo.clipped_value_loss):
            with pytest.raises(AssertionError):
                loss(*inputs, 0.2)


def test_clipped_value_loss_by_hand():
    """Value 3, old value 1, range 0.5: the clipped value is 1.5.

    Return 2: half of max(1, 0.25). Return 5: half of max(4, 12.25).
    """
    values, old, returns = torch.tensor([3.0, 3.0]), torch.tensor([1.0, 1.0]), torch.tensor([2.0, 5.0])
    loss, is_clipped = ppo.clipped_value_loss(values, old, returns, 0.5)
    close(loss, [0.5, 6.125])
    assert is_clipped.tolist() == [False, True]


@pytest.mark.parametrize(
    "kl, factor", [(6.0, 1.0), (6.6, 1.00128), (60.0, 1.00256), (0.0, 0.99744), (-3.0, 0.99744)]
)
def test_adaptive_kl_coef_by_hand(kl, factor):
    """Target 6, horizon 10,000, 128 episodes: the error is clipped to +-0.2, so a step is 0.256 % at most."""
    ours = ppo.adaptive_kl_coef(0.2, kl, 6.0, 10_000, 128)
    assert isinstance(ours, float)
    assert ours == pytest.approx(0.2 * factor, rel=1e-9)


# ---- From hidden states to log-probabilities and values ----------------------------------------------------


class Bigrams(torch.nn.Module):
    """A language model to check by hand: a hidden state is one-hot, and the head is a table of logits."""

    def __init__(self, table):
        super().__init__()
        self.head = torch.nn.Linear(len(table), len(table), bias=False)
        self.head.weight.data = torch.tensor(table).T.contiguous()  # table[i][j]: logit of j after i
        self.base_model = torch.nn.Module()
        self.base_model.forward = self.states

    def states(self, input_ids, **inputs):
        hidden = torch.nn.functional.one_hot(input_ids, self.head.weight.shape[0]).float()
        return type("Output", (), dict(last_hidden_state=hidden))

    def get_output_embeddings(self):
        return self.head


@pytest.mark.parametrize("num_pads", [0, 2])
def test_three_tokens_by_hand(num_pads):
    """Trick 6: prompt a, response b c. log p(b | a), log p(c | b), and the values at a and at b.

    So each value is predicted without knowing the token that it belongs to.
    """
    table = [[0.0, math.log(2.0), 0.0], [math.log(3.0), 0.0, math.log(6.0)], [0.0, 0.0, 0.0]]
    model = ppo.PolicyAndValue(Bigrams(table))
    model.value_head.weight.data = torch.tensor([[10.0, 20.0, 30.0]])
    ids = torch.tensor([[2] * num_pads + [0, 1, 2]])
    mask = torch.arange(3 + num_pads)[None] >= num_pads
    logprobs, entropies, values = model(ids, mask, 2, 1.0)
    close(logprobs, [[math.log(2 / 4), math.log(6 / 10)]])
    close(values, [[10.0, 20.0]])
    distributions = (0.25, 0.5, 0.25), (0.3, 0.1, 0.6)
    close(entropies, [[-sum(p * math.log(p) for p in row) for row in distributions]])
    colder, _, _ = model(ids, mask, 2, 0.5)  # temperature 0.5 squares the probabilities
    close(colder, [[math.log(4 / 6), math.log(36 / 46)]])


# ---- RLOO --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [2, 3, 4, 6])
def test_rloo_advantages_agree_with_naive(k):
    rewards = normal(12)
    close(rloo.rloo_advantages(rewards, k), naive.rloo_advantages(rewards.tolist(), k))


def test_rloo_advantages_of_trls_page():
    """Trick 25: the example of TRL 0.11's RLOO page, with three prompts and four completions each.

    There, the first completions of all prompts come first; here, those of a prompt are neighbors.
    """
    rewards = torch.tensor([1, 2, 3, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    neighbors = rewards.view(4, 3).T.flatten()
    advantages = rloo.rloo_advantages(neighbors, 4).view(3, 4).T.flatten()
    close(advantages[0], 1 - (2 + 5 + 8) / 3)  # first completion of the first prompt
    close(advantages[7], 6 - (3 + 2 + 9) / 3)  # third completion of the second prompt


def test_rloo_advantages_edges():
    """Trick 26: there is no division by a standard deviation. A constant changes nothing."""
    for x in (0.1, 0.7, 1.3841, 7.0):  # in fp32, rounding would leave some
        assert rloo.rloo_advantages(torch.full((6,), x), 3).tolist() == [0.0] * 6
    x = normal(8)
    close(rloo.rloo_advantages(x + 100, 2), rloo.rloo_advantages(x, 2), atol=1e-4)
    close(rloo.rloo_advantages(torch.tensor([0.001, 0.0]), 2), [0.001, -0.001])
    assert rloo.rloo_advantages(x.bfloat16(), 2).dtype is torch.float32


# ---- Preferences -------------------------------------------------------------------------------------------


def test_pair_loss_agrees_with_naive():
    """Also for differences whose exp would overflow, with margins, and for bf16. Gradients too."""
    cases = [(0, 0, 0.0), (2, -1, 0.0), (-3, 1.5, 0.5), (100, -100, 0.0), (-100, 100, 1.0)]
    better, worse, margins = torch.tensor(cases, dtype=torch.float64).T
    better, worse = better.clone().requires_grad_(), worse.clone().requires_grad_()
    losses = reward.pair_loss(better, worse, margins)
    close(losses, [naive.preference_loss(*case) for case in cases])
    losses.sum().backward()
    expected = [slope(lambda x, r=r, m=m: naive.preference_loss(x, r, m), c) for c, r, m in cases]
    close(better.grad, expected)
    close(better.grad, -worse.grad)
    without_margin = reward.pair_loss(torch.zeros(2).bfloat16(), torch.ones(2).bfloat16())
    close(without_margin, [naive.preference_loss(0, 1)] * 2)
    assert without_margin.dtype is torch.float32


def test_pairs_by_hand():
    """Texts of all rows are counted through; a row has weight 1 in all."""
    a, b, c = [5, 6], [5, 7], [5, 8]
    rows = [
        reward.Row([a, b, c], min_difference=0.5),
        reward.Row([c, a]),
        reward.Row([b, a], min_difference=1.0),
    ]
    better, worse, weight, margin = reward.pair_table(rows, "cpu")
    assert better.tolist() == [0, 0, 1, 3, 5]
    assert worse.tolist() == [1, 2, 2, 4, 6]
    close(weight, [1 / 3, 1 / 3, 1 / 3, 1.0, 1.0])
    close(margin, [0.5, 0.5, 0.5, 0.0, 1.0])


# ---- Random numbers ----------------------------------------------------------------------------------------


def test_random_numbers_depend_only_on_seed_and_purpose():
    """Trick 33: never on earlier random numbers. Other seeds, purposes and updates give other numbers."""
    purposes = [(1, "tokens", 3), (1, "tokens", 4), (2, "tokens", 3), (1, "query", 3), (1, "tokens")]

    def numbers():
        return [tuple(torch.rand(4, generator=ppo.generator_for(*purpose)).tolist()) for purpose in purposes]

    assert numbers() == numbers()
    assert len(set(numbers())) == len(purposes)


def test_stream_rows_is_one_stream():
    """Each epoch has every row once, in a new order, and any part of the stream can be asked for alone."""
    stream = ppo.stream_rows(7, start=0, count=28, seed=1).tolist()
    for i in range(0, 28, 7):
        assert sorted(stream[i : i + 7]) == list(range(7))
    assert stream[:7] != stream[7:14]
    for start, count in ((0, 3), (5, 4), (7, 7), (6, 15), (27, 1)):
        assert ppo.stream_rows(7, start, count, seed=1).tolist() == stream[start : start + count]
    assert ppo.stream_rows(7, start=0, count=28, seed=2).tolist() != stream
