"""Every kernel again, from its paper's formula, in plain Python floats and loops: what test_kernels.py compares with.

Rows are lists. Nothing here is fast, clever or shared with the scripts. A position outside a mask is never read.
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


def length_mask(lengths, max_length):
    """True on the first `lengths` places."""
    return [[place < length for place in range(max_length)] for length in lengths]


def log_softmax(logits):
    """log p_i = x_i - log sum_j exp(x_j), with the maximum taken out."""
    top = max(logits)
    log_sum = top + math.log(math.fsum(math.exp(x - top) for x in logits))
    return [x - log_sum for x in logits]


def token_logprobs(hidden, weight, tokens, temperature=1.0, bias=None):
    """log softmax((W h + b) / temperature) at the token, and the entropy - sum p log p of the same distribution."""
    logprobs, entropies = [], []
    for hidden_row, token_row in zip(hidden, tokens):
        logprobs.append([])
        entropies.append([])
        for h, token in zip(hidden_row, token_row):
            logits = [math.fsum(w * x for w, x in zip(line, h)) for line in weight]
            if bias is not None:
                logits = [x + b for x, b in zip(logits, bias)]
            logp = log_softmax([x / temperature for x in logits])
            logprobs[-1].append(logp[token])
            entropies[-1].append(-math.fsum(math.exp(x) * x for x in logp))
    return logprobs, entropies


def kl_estimate(logprob, ref_logprob, estimator):
    """Schulman 2020, "Approximating KL divergence": with r = ref / policy: k1 = -log r, k2 = (log r)^2 / 2, k3 = (r - 1) - log r."""
    log_r = ref_logprob - logprob
    if estimator == "k1":
        return -log_r
    if estimator == "k2":
        return log_r**2 / 2
    return math.expm1(log_r) - log_r


def stop_sequence_held(text, stop):
    """How many characters of `stop` a text ends with; all of them as soon as it had `stop` anywhere."""
    return len(stop) if stop in text else max(k for k in range(len(stop)) if text.endswith(stop[:k]))


def token_rewards(scores, kl, lengths, kl_coef):
    """Ziegler et al. 2019, section 2.2, token by token: R = r(x, y) - beta KL; the score falls on the last token."""
    rewards = []
    for score, row, length in zip(scores, kl, lengths):
        rewards.append([])
        for place, price in enumerate(row):
            reward = -kl_coef * price if place < length else 0.0
            rewards[-1].append(reward + score if place == length - 1 else reward)
    return rewards


def valid(values, mask):
    """The values inside the mask, as one list."""
    return [x for row, line in zip(values, mask) for x, inside in zip(row, line) if inside]


def masked_mean(values, mask):
    """The sum over valid places divided by their number."""
    return math.fsum(valid(values, mask)) / len(valid(values, mask))


def masked_whiten(values, mask, shift_mean=True):
    """(x - mean) / sqrt(var + 1e-8), with the population variance (openai/lm-human-preferences, utils/core.py, whiten)."""
    inside = valid(values, mask)
    if len(inside) < 2:
        return [[x if m else 0.0 for x, m in zip(row, line)] for row, line in zip(values, mask)]
    mean = math.fsum(inside) / len(inside)
    variance = math.fsum((x - mean) ** 2 for x in inside) / len(inside)
    scale, back = 1 / math.sqrt(variance + 1e-8), 0.0 if shift_mean else mean
    return [[(x - mean) * scale + back if m else 0.0 for x, m in zip(row, line)] for row, line in zip(values, mask)]


def gae(rewards, values, mask, gamma, lam):
    """Schulman et al. 2016, eq. 11 to 16, backwards: A_t = delta_t + gamma lam A_(t+1); a return is A_t + V_t."""
    advantages, returns = [], []
    for reward_row, value_row, line in zip(rewards, values, mask):
        length = sum(line)
        row, next_advantage, next_value = [0.0] * len(line), 0.0, 0.0
        for t in reversed(range(length)):
            delta = reward_row[t] + gamma * next_value - value_row[t]
            row[t] = next_advantage = delta + gamma * lam * next_advantage
            next_value = value_row[t]
        advantages.append(row)
        returns.append([row[t] + value_row[t] if t < length else 0.0 for t in range(len(line))])
    return advantages, returns


def clipped_policy_loss(logprob, old_logprob, advantage, cliprange):
    """Schulman et al. 2017, eq. 7, negated: - min(r A, clip(r, 1 - eps, 1 + eps) A)."""
    ratio = math.exp(logprob - old_logprob)
    clipped = min(max(ratio, 1 - cliprange), 1 + cliprange)
    return -min(ratio * advantage, clipped * advantage)


def clipped_value_loss(value, old_value, target, cliprange_value):
    """OpenAI baselines, ppo2/model.py: the larger of two squared errors, one of a value kept near the old one; with the 0.5."""
    near = min(max(value, old_value - cliprange_value), old_value + cliprange_value)
    return 0.5 * max((value - target) ** 2, (near - target) ** 2)


def adaptive_kl_coef(kl_coef, kl, target, horizon, episodes):
    """Ziegler et al. 2019, section 2.2: e = clip((KL - target) / target, -0.2, 0.2); beta (1 + K e), K = episodes / horizon."""
    error = (kl - target) / target
    if error > 0.2:
        error = 0.2
    if error < -0.2:
        error = -0.2
    return kl_coef * (1 + episodes / horizon * error)


def rloo_advantages(rewards, rloo_k):
    """Ahmadian et al. 2024, section 3: R(y_i) minus the mean of R(y_j) over the prompt's other responses; TRL's order of the rows."""
    prompts, advantages = len(rewards) // rloo_k, []
    for i, reward in enumerate(rewards):
        others = [rewards[j * prompts + i % prompts] for j in range(rloo_k) if j != i // prompts]
        advantages.append(reward - sum(others) / len(others))
    return advantages


def preference_loss(chosen, rejected, margin=0.0):
    """Stiennon et al. 2020, section 3.4: - log sigma(r_chosen - r_rejected), less the margin of Llama 2, section 3.2.2."""
    x = chosen - rejected - margin
    return math.log1p(math.exp(-x)) if x > 0 else -x + math.log1p(math.exp(x))


def ranking_loss(scores):
    """Ouyang et al. 2022, eq. 1, of one prompt: the mean over its K (K - 1) / 2 pairs, the better response first."""
    pairs = [(scores[i], scores[j]) for i in range(len(scores)) for j in range(i + 1, len(scores))]
    return sum(preference_loss(better, worse) for better, worse in pairs) / max(1, len(pairs))


def sample_token(logits, uniform):
    """Inversion (Devroye 1986, chapter III.2): the first token whose cumulative probability is above the uniform."""
    probabilities = [math.exp(x) for x in log_softmax(logits)]
    below = 0.0
    for token, probability in enumerate(probabilities):
        below += probability
        if uniform < below:
            return token
    return max(token for token, probability in enumerate(probabilities) if probability > 0)


def adam(p, gradients, lr, eps, beta1=0.9, beta2=0.999, decay=0.0, tensorflow=False):
    """Kingma and Ba 2015, algorithm 1, of one number; its decoupled decay: Loshchilov and Hutter 2019, algorithm 2. -> p after each step

    tensorflow: the other order at the end of section 2, where epsilon joins the square root before its bias is corrected.
    """
    m = v = 0.0
    seen = []
    for t, gradient in enumerate(gradients, 1):
        m = beta1 * m + (1 - beta1) * gradient
        v = beta2 * v + (1 - beta2) * gradient**2
        p -= lr * decay * p
        if tensorflow:
            p -= lr * math.sqrt(1 - beta2**t) / (1 - beta1**t) * m / (math.sqrt(v) + eps)
        else:
            p -= lr * (m / (1 - beta1**t)) / (math.sqrt(v / (1 - beta2**t)) + eps)
        seen.append(p)
    return seen
