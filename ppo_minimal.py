"""PPO that teaches a language model to write positive film reviews: the algorithm and nothing else.

If you know PPO from CleanRL's ppo.py, this is what language changes: the state is a text and the action is
the next token; the critic is a linear layer on the policy's transformer; a classifier scores the finished
text; every token is penalized for moving away from the reference model (the policy before PPO); responses
have different lengths, so every tensor needs a mask. There is no entropy bonus: the KL penalty keeps the
policy from collapsing. Some names are those of TRL, Hugging Face's library for RLHF.

    python ppo_minimal.py                 # minutes on a CPU; models and data are in this repository
    python ppo_minimal.py --kl-target 8   # every field of Args is a flag

This is the default configuration of ppo_sentiment.py, with its names, steps and random numbers. So both
sample the same responses, until rounding turns one token into another (tests/runs/test_ppo_minimal.py). Read
that one next. What it adds, and why one needs it:

- checks: some models handle padding or the cache differently, and would silently train on wrong numbers
- a run folder with curves and samples for report.py, and checkpoints: a killed run goes on, bit for bit
- for larger models: GPUs (this script runs on a CPU), several processes, accumulated gradients, bf16, LoRA,
  8-bit weights
- the output layer sees only valid tokens, in chunks: 50,000 logits per token fill a GPU's memory
- your own reward functions, stop tokens, a temperature, a separate critic, schedules and optimizers
- a second classifier that PPO never sees, and a measure of repetition (distinct bigrams): a policy may learn
  to please nobody but the classifier
"""

import json
import math
import random
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import tyro
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer


@dataclass
class Args:
    seed: int = 1  # random seed
    output_dir: str = "runs/ppo_minimal"  # the model is saved to model/ in it, over that of an earlier run
    num_eval_prompts: int = 512  # number of held-out prompts, before and after training
    model_name_or_path: str = "checkpoints/reviews-lm"  # the policy before PPO; also the reference
    reward_model_path: str = "checkpoints/reviews-sentiment"  # a classifier with a label "positive"
    dataset_name: str = "data/reviews"  # a folder with train.jsonl and test.jsonl, with a column text
    query_min_length: int = 2  # shortest prompt, in tokens
    query_max_length: int = 5  # longest prompt, in tokens; lengths are drawn uniformly, both ends included
    # EOS ends a response, or else a limit that each response draws: from response_min_length to
    # response_length. Almost every response reaches it here, because reviews are longer. The policy does not
    # know its limit, so it learns to write text that could go on.
    response_min_length: int = 8  # smallest limit, in tokens
    response_length: int = 24  # largest limit, in tokens
    total_episodes: int = 25_600  # number of responses in the whole run, rounded up to whole batches
    per_device_train_batch_size: int = 32  # responses per minibatch
    num_mini_batches: int = 4  # minibatches per batch: also the number of optimizer steps per epoch
    num_ppo_epochs: int = 4  # epochs over each batch
    kl_coef: float = 0.2  # KL penalty coefficient at first; then it adapts (0 stays 0)
    kl_target: float = 4.0  # hold the KL near this, in nats per response
    kl_horizon: float = 5_000  # time scale of the adaptation, in episodes
    score_clip: float = 4.0  # clip scores to [-score_clip, score_clip]
    gamma: float = 1.0  # discount per token
    lam: float = 0.95  # lambda of GAE
    cliprange: float = 0.2  # epsilon of the clipped policy loss
    cliprange_value: float = 0.2  # epsilon of the clipped value loss
    vf_coef: float = 0.1  # weight of the value loss
    learning_rate: float = 5e-5  # at first; it falls linearly to 0
    max_grad_norm: float = 1.0  # clip the gradient to this norm


# ---- Math: pure functions of tensors -----------------------------------------------------------------------
#
# Shapes: B responses, n in a minibatch, C = query_max_length positions of the prompt, T = response_length
# positions of the response, V tokens in the vocabulary, H hidden units. A row of C + T tokens is a
# left-padded prompt and a right-padded response, here with C = 4 and T = 5:
#
#     pad    pad    The    film  | was    good   EOS    pad    pad       length of the response: 3
#
# A pad may be any token: the mask hides it from the tokens after it, and from the loss.
#
# token_rewards, masked_whiten and gae mask what they get. train masks the two losses.


def length_mask(lengths, max_length):
    """True on the first `lengths` positions of each row. [B] -> bool [B, max_length]"""
    return torch.arange(max_length, device=lengths.device) < lengths[:, None]


def token_rewards(scores, kl, lengths, kl_coef):
    """The KL penalty on every valid token, plus the score on the last one. [B], [B, T], [B] -> [B, T]"""
    mask = length_mask(lengths, kl.shape[1])
    rewards = torch.where(mask, -kl_coef * kl, 0.0)
    last = lengths[:, None] - 1  # [B, 1]
    return rewards.scatter_add(1, last, scores[:, None].to(rewards.dtype))


def masked_whiten(values, mask):
    """(x - mean) / std over the valid positions, 0 elsewhere. [B, T] -> [B, T]"""
    variance, mean = torch.var_mean(values[mask], correction=0)
    return torch.where(mask, (values - mean) * torch.rsqrt(variance + 1e-8), 0.0)


def gae(rewards, values, mask, gamma, lam):
    """Generalized advantage estimation (Schulman et al. 2016, eq. 16). [B, T] each -> advantages, returns

    The value after the last valid token is 0, even if the response was cut off: the score is that of
    exactly this text, so the episode ends there.
    """
    rewards = torch.where(mask, rewards, 0.0).float()
    values = torch.where(mask, values, 0.0).float()
    advantages = torch.zeros_like(rewards)
    next_advantage = torch.zeros_like(rewards[:, 0])  # [B]
    next_value = torch.zeros_like(rewards[:, 0])  # [B]
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantages[:, t] = delta + gamma * lam * next_advantage
        next_advantage = advantages[:, t]
        next_value = values[:, t]
    returns = advantages + values
    return advantages, returns


def adaptive_kl_coef(kl_coef, kl, target, horizon, episodes):
    """The KL coefficient after `episodes` responses with a mean KL of `kl` nats each.

    A proportional controller (Ziegler et al. 2019, section 2.2). In `horizon` episodes the coefficient
    changes by about 20 % at most. -> float
    """
    error = kl / target - 1
    error = min(max(error, -0.2), 0.2)
    return kl_coef * (1 + error * episodes / horizon)


# ---- Training ----------------------------------------------------------------------------------------------


def train(args):
    """The whole run. -> (PolicyAndValue, list with the metrics of each update)"""
    if not __debug__:
        raise RuntimeError("python -O and PYTHONOPTIMIZE remove checks (assert): run without them")
    T = args.response_length
    B = args.per_device_train_batch_size * args.num_mini_batches  # episodes per update
    updates = math.ceil(args.total_episodes / B)
    assert args.query_min_length > 0
    assert B < 5 * args.kl_horizon  # otherwise adaptive_kl_coef may return a number below 0
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    # eval() switches dropout off, also for the update: otherwise the ratio would not start at 1.
    model = PolicyAndValue(AutoModelForCausalLM.from_pretrained(args.model_name_or_path)).eval()
    ref_model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path).eval()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate, fused=True)
    # Row i has the first C tokens of the review for episode i: its prompt is the beginning of that.
    train_reviews = load_prompts("train", updates * B, tokenizer, args)  # [updates * B, C]
    held_out_args = replace(args, seed=0)  # the same prompts and random numbers for every --seed
    held_out_reviews = load_prompts("test", args.num_eval_prompts, tokenizer, held_out_args)  # [.., C]
    score_label = load_label_scorer(args)

    # The evaluations before and after training use the same prompts and random numbers.
    held_out = draw_batch(held_out_reviews, held_out_args, "held-out")
    before = rollout(model, ref_model, tokenizer, score_label, *held_out)
    kl_coef = args.kl_coef
    history = []

    for update in range(1, updates + 1):
        # 1. Rollout. The beginnings of the next B reviews are the prompts. With them come a length limit for
        #    each response, and the random numbers to sample it with.
        prompt_batch = draw_batch(train_reviews[(update - 1) * B : update * B], args, update)
        # b: ids, mask, lengths, texts, raw_scores, logprobs, ref_logprobs, values. None has a gradient.
        b = rollout(model, ref_model, tokenizer, score_label, *prompt_batch)
        valid = length_mask(b["lengths"], T)  # [B, T]

        # 2. Scores: clip.
        scores = b["raw_scores"].clamp(-args.score_clip, args.score_clip)  # [B]

        # 3. Rewards: the KL penalty on every token, the score on the last one.
        #    logprob - ref_logprob may be negative for a sampled token, but its mean over samples is the KL.
        #    So this subtracts, on average, kl_coef * KL from the objective.
        kl = b["logprobs"] - b["ref_logprobs"]  # [B, T]; both are 0 after the end of a response
        rewards = token_rewards(scores, kl, b["lengths"], kl_coef)  # [B, T]

        # 4. Advantages, whitened over the whole batch (in CleanRL: per minibatch).
        advantages, returns = gae(rewards, b["values"], valid, args.gamma, args.lam)  # [B, T] each
        advantages = masked_whiten(advantages, valid)

        # 5. Update. The loss is a mean over the tokens of a minibatch. Only what the model returns here has a
        #    gradient.
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - (update - 1) / updates)
        metric_sums = defaultdict(float)  # sums over the tokens of all minibatches and epochs
        for epoch in range(args.num_ppo_epochs):
            order = torch.randperm(B, generator=generator_for(args.seed, "order", update, epoch))
            for rows in order.split(args.per_device_train_batch_size):
                mb_valid = valid[rows]  # [n, T]
                old_logprobs, old_values = b["logprobs"][rows], b["values"][rows]  # [n, T]
                mb_advantages, mb_returns = advantages[rows], returns[rows]  # [n, T]
                new_logprobs, entropies, new_values = model(b["ids"][rows], b["mask"][rows], T)  # [n, T] each

                # Policy loss (Schulman et al. 2017, eq. 7)
                log_ratio = new_logprobs - old_logprobs
                ratio = log_ratio.clamp(max=40).exp()  # inf times an advantage or gradient of 0 is nan
                pg_loss1 = -mb_advantages * ratio
                pg_loss2 = -mb_advantages * ratio.clamp(1 - args.cliprange, 1 + args.cliprange)
                pg_loss = torch.max(pg_loss1, pg_loss2)  # [n, T]

                # Value loss: the value may move by at most cliprange_value, or else the larger error counts.
                v_clipped = new_values.clamp(
                    old_values - args.cliprange_value, old_values + args.cliprange_value
                )
                v_loss_unclipped = (new_values - mb_returns) ** 2
                v_loss_clipped = (v_clipped - mb_returns) ** 2
                v_loss = 0.5 * torch.max(v_loss_unclipped, v_loss_clipped)  # [n, T]

                loss = ((pg_loss + args.vf_coef * v_loss) * mb_valid).sum() / mb_valid.sum()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()

                token_metrics = {
                    "loss/policy_avg": pg_loss,
                    "loss/value_avg": v_loss,
                    "policy/entropy_avg": entropies,
                    "policy/approxkl_avg": 0.5 * log_ratio**2,  # estimates the KL of old and new policy
                }
                for name, x in token_metrics.items():
                    metric_sums[name] += (x * mb_valid).sum().item()

        # 6. Log. Metrics that TRL also logs keep its names.
        tokens_trained = valid.sum().item() * args.num_ppo_epochs
        metrics = {
            "update": update,
            "objective/scores": scores.mean().item(),  # clipped; those printed at the end are not
            "objective/kl": kl.sum(1).mean().item(),
            "objective/kl_coef": kl_coef,
            **{name: x / tokens_trained for name, x in metric_sums.items()},
        }
        history.append(metrics)
        print("  ".join(f"{name.split('/')[-1]} {x:.4g}" for name, x in metrics.items()), flush=True)

        # 7. Adapt the KL coefficient for the next update.
        kl_coef = adaptive_kl_coef(kl_coef, metrics["objective/kl"], args.kl_target, args.kl_horizon, B)

    # 8. Evaluate on the same held-out prompts again, and save the model.
    after = rollout(model, ref_model, tokenizer, score_label, *held_out)
    for old, new in zip(before["texts"][:4], after["texts"]):
        print(f"\nbefore  {old}\nafter   {new}")
    score_before, score_after = before["raw_scores"].mean(), after["raw_scores"].mean()
    print(f"\nscore before {score_before:.3f}, score after {score_after:.3f}")
    model.policy.save_pretrained(f"{args.output_dir}/model")
    tokenizer.save_pretrained(f"{args.output_dir}/model")
    print(f"saved {args.output_dir}/model, which the next run overwrites")
    return model, history


# ---- Rollout -----------------------------------------------------------------------------------------------


def load_prompts(split, count, tokenizer, args):
    """The first query_max_length tokens of `count` reviews, from shuffled passes over the data. -> [count, C]

    All reviews must have that many tokens.
    """
    with open(Path(args.dataset_name, f"{split}.jsonl"), encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    reviews = torch.tensor([ids[: args.query_max_length] for ids in tokenizer(texts).input_ids])
    passes = math.ceil(count / len(reviews))
    generators = [generator_for(args.seed, "pass", number) for number in range(passes)]
    rows = torch.cat([torch.randperm(len(reviews), generator=generator) for generator in generators])
    return reviews[rows[:count]]


def draw_batch(reviews, args, purpose):
    """Cut prompts to random lengths, and draw the length limits of the responses.

    All draws depend only on the seed and the purpose: the number of the update, or "held-out". So do the
    random numbers that responses are sampled with.
    -> ids [B, C], bool mask [B, C], max_new_tokens [B], uniforms [B, T]
    """
    (B, C), T = reviews.shape, args.response_length
    prompt_lengths = torch.randint(
        args.query_min_length, C + 1, (B,), generator=generator_for(args.seed, "query", purpose)
    )
    max_new_tokens = torch.randint(
        args.response_min_length, T + 1, (B,), generator=generator_for(args.seed, "room", purpose)
    )
    generator = generator_for(args.seed, "tokens", purpose)
    uniforms = torch.rand(B, T, dtype=torch.float64, generator=generator)
    mask = length_mask(prompt_lengths, C).flip(1)  # [B, C], prompts end in the last column
    ids = torch.zeros(B, C, dtype=torch.long)  # 0 only fills the row: the mask hides it
    # Boolean indexing goes row by row, and row i of both masks has prompt_lengths[i] times True. So the first
    # prompt_lengths[i] tokens move to the end of row i.
    ids[mask] = reviews[length_mask(prompt_lengths, C)]
    return ids, mask, max_new_tokens, uniforms


def generator_for(seed, *purpose):
    """A random generator for one purpose, such as (seed, "tokens", update), independent of all others."""
    # random.Random hashes a str with SHA-512, which is the same in every process; hash() is not.
    return torch.Generator().manual_seed(random.Random(repr((seed, *purpose))).getrandbits(63))


def load_label_scorer(args):
    """A classifier as a function: texts (list of B str) -> the logit of its label "positive" [B]"""
    tokenizer = AutoTokenizer.from_pretrained(args.reward_model_path)
    model = AutoModelForSequenceClassification.from_pretrained(args.reward_model_path).eval()

    def score_label(texts):
        inputs = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        return model(**inputs).logits[:, model.config.label2id["positive"]]

    return score_label


@torch.no_grad()
def rollout(model, ref_model, tokenizer, score_label, prompt_ids, prompt_mask, max_new_tokens, uniforms):
    """Sample a response to each prompt, score it, and compute the log-probabilities that PPO calls old.

    score_label: from load_label_scorer; prompt_ids, prompt_mask [B, C], max_new_tokens [B], uniforms [B, T]:
    from draw_batch
    -> dict: ids, mask [B, C + T]; lengths, raw_scores [B]; logprobs, ref_logprobs, values [B, T]; and texts,
    a list of B str, each a prompt with its response
    """
    T = uniforms.shape[1]
    tokens = generate(model.policy, prompt_ids, prompt_mask, uniforms)  # [B, T]
    lengths = torch.minimum(response_lengths(tokens, tokenizer.eos_token_id), max_new_tokens)  # [B]
    ids = torch.cat([prompt_ids, tokens], 1)  # [B, C + T]
    mask = torch.cat([prompt_mask, length_mask(lengths, T)], 1)  # [B, C + T]

    # The classifier gets text, because it may have another tokenizer. EOS is not text.
    texts = [tokenizer.decode(row[m], skip_special_tokens=True) for row, m in zip(ids, mask)]

    # The same forward pass as in the update, so the ratio is 1 until the first optimizer step.
    logprobs, _, values = model(ids, mask, T)
    return {
        "ids": ids,
        "mask": mask,
        "lengths": lengths,
        "raw_scores": score_label(texts),
        "logprobs": logprobs,
        "ref_logprobs": response_logprobs(ref_model, ids, mask, T)[0],
        "values": values,
        "texts": texts,
    }


def generate(policy, ids, mask, uniforms):
    """Sample T tokens after each prompt, from the distribution that is trained: no top-k, no top-p.

    A response may end earlier; the tokens after its end are masked in rollout.
    Left-padded ids, mask [B, C]; uniforms [B, T], one random number per token -> tokens [B, T]
    """
    tokens = []
    cache = None
    for t in range(uniforms.shape[1]):
        # The first pass reads the prompt, the others one token each. Positions count only real tokens.
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        outputs = policy(
            ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        )
        cache = outputs.past_key_values
        ids = sample_tokens(outputs.logits[:, -1].softmax(-1), uniforms[:, t])[:, None]  # [B, 1]
        mask = nn.functional.pad(mask, (0, 1), value=True)
        tokens.append(ids)
    return torch.cat(tokens, 1)


def sample_tokens(probs, uniforms):
    """Sample one token per row by inverting the cumulative distribution. [B, V], [B] in [0, 1) -> [B]

    Like torch.multinomial, but the same uniforms always give the same tokens: before and after training can
    be compared.
    """
    ends = probs.cumsum(1, dtype=torch.float64)  # [B, V]; sums in fp32 would lose small probabilities
    target = uniforms[:, None] * ends[:, -1:]  # [B, 1]
    return torch.searchsorted(ends, target, right=True).squeeze(1)


def response_lengths(tokens, stop_ids):
    """Number of tokens up to and including the first stop token; T if there is none. [B, T] -> [B]

    stop_ids: one id, or a tensor of several
    """
    T = tokens.shape[1]
    position = torch.arange(1, T + 1, device=tokens.device)  # [T]
    return torch.where(torch.isin(tokens, stop_ids), position, T).amin(1)


# ---- Policy, value function, reference ---------------------------------------------------------------------


class PolicyAndValue(nn.Module):
    """Policy and value function in one module."""

    def __init__(self, policy):
        super().__init__()
        self.policy = policy
        self.value_head = nn.Linear(policy.config.hidden_size, 1)
        # Values start at 0, so the first advantages are the rewards to come, discounted by gamma * lam.
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, ids, mask, T):
        """Log-probabilities, entropies and values of the last T tokens of each row.

        ids [B, C + T], bool mask [B, C + T] -> three tensors [B, T], 0 after the end of a response. The value
        is predicted from the state before the token.
        """
        logprobs, entropies, hidden = response_logprobs(self.policy, ids, mask, T)
        values = self.value_head(hidden).squeeze(-1)  # [B, T]
        return logprobs, entropies, torch.where(mask[:, -T:], values, 0.0)


def response_logprobs(lm, ids, mask, T):
    """Log-probabilities of the last T tokens of each row, 0 after the end of a response.

    ids [B, C + T], bool mask [B, C + T] -> logprobs, entropies, both [B, T]; and the hidden states that
    predict these tokens [B, T, H]
    """
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # count only real tokens, because prompts are padded
    outputs = lm(ids, attention_mask=mask, position_ids=positions, output_hidden_states=True)
    # The state at position t - 1 predicts token t.
    hidden = outputs.hidden_states[-1][:, -T - 1 : -1]  # [B, T, H]
    log_p = outputs.logits[:, -T - 1 : -1].log_softmax(-1)  # [B, T, V]
    logprobs = log_p.gather(2, ids[:, -T:, None]).squeeze(2)  # [B, T]
    entropies = -(log_p.exp() * log_p).sum(2)  # [B, T]
    valid = mask[:, -T:]
    return torch.where(valid, logprobs, 0.0), torch.where(valid, entropies, 0.0), hidden


if __name__ == "__main__":
    train(tyro.cli(Args))
