"""The math again, from the formulas of the papers, in plain Python: for the tests, and for exercises.py.

Rows are lists. Nothing is fast, clever or shared with the scripts. Positions outside a mask are never read.
"""

import math


def response_lengths(tokens, stop_token_id):
    """Ziegler et al. 2019, section 2.3: a response goes up to and including its first stop token."""
    lengths = []
    for row in tokens:
        length = 0
        for token in row:
            length += 1
            if token == stop_token_id:
                break
        lengths.append(length)
    return lengths


def log_softmax(logits):
    """log p_i = x_i - log sum_j exp(x_j). The maximum is subtracted first."""
    top = max(logits)
    log_sum = top + math.log(math.fsum(math.exp(x - top) for x in logits))
    return [x - log_sum for x in logits]


def kl_estimate(logprob, ref_logprob, estimator):
    """Schulman 2020, "Approximating KL divergence", with r = ref / policy.

    k1 = -log r, k2 = (log r)^2 / 2, k3 = (r - 1) - log r
    """
    log_r = ref_logprob - logprob
    if estimator == "k1":
        return -log_r
    if estimator == "k2":
        return log_r**2 / 2
    return math.expm1(log_r) - log_r


def token_rewards(scores, kl, lengths, kl_coef):
    """Ziegler et al. 2019, section 2.2, token by token: R = r(x, y) - beta KL, with r on the last token."""
    rewards = []
    for score, kl_row, length in zip(scores, kl, lengths):
        row = [0.0] * len(kl_row)
        for t in range(length):
            row[t] = -kl_coef * kl_row[t]
        row[length - 1] += score
        rewards.append(row)
    return rewards


def valid(values, mask):
    """The values inside the mask, as one list."""
    return [x for row, line in zip(values, mask) for x, inside in zip(row, line) if inside]


def masked_mean(values, mask):
    """The sum over the valid positions divided by their number."""
    inside = valid(values, mask)
    return math.fsum(inside) / len(inside)


def masked_whiten(values, mask, shift_mean=True):
    """(x - mean) / sqrt(var + 1e-8), with the population variance.

    openai/lm-human-preferences, utils/core.py, whiten
    """
    mean, scale, shift = 0.0, 1.0, 0.0
    inside = valid(values, mask)
    if len(inside) >= 2:
        mean = math.fsum(inside) / len(inside)
        variance = math.fsum((x - mean) ** 2 for x in inside) / len(inside)
        scale = 1 / math.sqrt(variance + 1e-8)
        shift = 0.0 if shift_mean else mean
    whitened = []
    for row, line in zip(values, mask):
        whitened.append([(x - mean) * scale + shift if m else 0.0 for x, m in zip(row, line)])
    return whitened


def gae(rewards, values, mask, gamma, lam):
    """Schulman et al. 2016, eq. 16, as the sum that it is: A_t = sum_l (gamma lam)^l delta_(t + l).

    A return is A_t + V_t.
    """
    advantages, returns = [], []
    for reward_row, value_row, line in zip(rewards, values, mask):
        length = sum(line)
        next_values = [*value_row[1:length], 0.0]
        deltas = [reward_row[t] + gamma * next_values[t] - value_row[t] for t in range(length)]
        advantage_row, return_row = [0.0] * len(line), [0.0] * len(line)
        for t in range(length):
            advantage_row[t] = math.fsum((gamma * lam) ** (u - t) * deltas[u] for u in range(t, length))
            return_row[t] = advantage_row[t] + value_row[t]
        advantages.append(advantage_row)
        returns.append(return_row)
    return advantages, returns


def clipped_policy_loss(logprob, old_logprob, advantage, cliprange):
    """Schulman et al. 2017, eq. 7, negated: - min(r A, clip(r, 1 - eps, 1 + eps) A).

    -> the loss, the ratio, whether clipping raised the loss
    """
    ratio = math.exp(logprob - old_logprob)
    clipped = min(max(ratio, 1 - cliprange), 1 + cliprange)
    loss = -min(ratio * advantage, clipped * advantage)
    return loss, ratio, loss > -ratio * advantage


def rloo_advantages(rewards, rloo_k):
    """Ahmadian et al. 2024, section 3: R(y_i) minus the mean of R(y_j) over the prompt's other responses.

    The responses to a prompt are neighbors.
    """
    advantages = []
    for i, reward in enumerate(rewards):
        first = i - i % rloo_k
        others = [rewards[j] for j in range(first, first + rloo_k) if j != i]
        advantages.append(reward - sum(others) / len(others))
    return advantages


def grpo_advantages(rewards, k, scale="group"):
    """Shao et al. 2024, section 4.1.2: (r - mean of the group) / standard deviation of the group.

    The deviation is of a sample, with n - 1, plus 1e-4. The k rewards of a group are neighbors. scale:
    "group"; "none" (Liu et al. 2025); "mean": divided by the mean of the group (Tajwar et al. 2026).
    """
    advantages = []
    for i, reward in enumerate(rewards):
        start = i - i % k
        group = rewards[start : start + k]
        mean = math.fsum(group) / k
        centered = reward - mean
        if scale == "mean":
            centered /= max(mean, 1e-4)
        elif scale == "group":
            deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in group) / (k - 1))
            centered /= deviation + 1e-4
        advantages.append(centered)
    return advantages


def cispo(ratio, advantage, logprob):
    """The value of MiniMax-M1's loss, eq. 4, negated, with TRL's bound of 5."""
    return -min(ratio, 5.0) * advantage * logprob


def grpo_loss(
    responses,
    advantages,
    mean,
    kl_coef=0.0,
    low=0.2,
    high=0.2,
    surrogate=None,
    by_sequence=False,
    unbiased_kl=False,
):
    """Shao et al. 2024, eq. 3, negated: the clipped loss of each token plus the coefficient times k3.

    surrogate: another loss of ratio, advantage and log-probability; by_sequence: the ratio of Zheng et al.
    2025, eq. 7; unbiased_kl: k3 times the ratio of the token (DeepSeek-V3.2, eq. 7).

    responses: for each one a list of (log-probability, old one, reference's), one tuple per token. mean:
    "token", over all tokens (Yu et al. 2025); "response", first over each response (Shao et al.); or a
    number, by which the sum is divided (Liu et al. 2025).
    """
    by_response = []
    for tokens, advantage in zip(responses, advantages):
        losses = []
        mean_log_ratio = math.fsum(new - old for new, old, _ in tokens) / len(tokens)
        for logprob, old_logprob, ref_logprob in tokens:
            token_ratio = math.exp(logprob - old_logprob)
            ratio = math.exp(mean_log_ratio) if by_sequence else token_ratio
            clipped = min(max(ratio, 1 - low), 1 + high)
            kl = kl_estimate(logprob, ref_logprob, "k3") * (token_ratio if unbiased_kl else 1.0)
            loss = -min(ratio * advantage, clipped * advantage)
            if surrogate is not None:
                loss = surrogate(ratio, advantage, logprob)
            losses.append(loss + kl_coef * kl)
        by_response.append(losses)
    if mean == "response":
        return math.fsum(math.fsum(losses) / len(losses) for losses in by_response) / len(by_response)
    total = math.fsum(x for losses in by_response for x in losses)
    return total / (sum(map(len, by_response)) if mean == "token" else mean)


def preference_loss(chosen, rejected, margin=0.0):
    """Stiennon et al. 2020, section 3.4: - log sigma(r_chosen - r_rejected - margin).

    The margin is that of Llama 2, section 3.2.2.
    """
    x = chosen - rejected - margin
    if x > 0:
        return math.log1p(math.exp(-x))
    return -x + math.log1p(math.exp(x))


def sample_token(logits, uniform):
    """Inversion (Devroye 1986, chapter III.2): the first token whose cumulative probability is larger."""
    probs = [math.exp(x) for x in log_softmax(logits)]
    cumulative = 0.0
    for token, prob in enumerate(probs):
        cumulative += prob
        if uniform < cumulative:
            return token
    return max(token for token, prob in enumerate(probs) if prob > 0)
