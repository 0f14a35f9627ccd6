"""RLOO (REINFORCE with a leave-one-out baseline) that teaches a language model to summarize forum posts.

If you know PPO from ppo_sentiment.py, this is what changes:

1. A whole response is one action. Its log-probability is the sum over its tokens, so there is one ratio, one
   clip and one advantage per response instead of per token.
2. There is no value function and no GAE. Each prompt gets rloo_k responses, and the baseline of a response
   is the mean reward of the others (`rloo_advantages`).
3. There is one reward per response: its score - kl_coef * (KL summed over its tokens). The KL is to the
   reference model, a frozen copy of the policy before RLOO. With --kl-in-loss, it is a term of the loss
   instead, as in GRPO.
4. The score comes from a reward model that was trained on pairs of summaries (reward_model.py), or is the
   weighted sum of what your own functions return (--reward-fn). If a response has no stop token, its score is
   lower by --missing-eos-penalty (1 in all recipes). That teaches the policy to stop. Prompts are texts, or
   chats.
5. A policy can learn to please the reward model without getting better. So in the end a judge compares
   summaries of held-out posts with reference summaries, and the result is a win rate (`win_rate`).

    python rloo_tldr.py                             # recipe tiny: no download, no GPU, minutes on 2 cores
    python rloo_tldr.py --learning-rate 2e-4        # tiny with one change; every field of Args is a flag
    python rloo_tldr.py tldr-pythia-1b              # the published experiment, from the Hub
    accelerate launch rloo_tldr.py tldr-pythia-1b   # on N GPUs, with N times the batch
    python rloo_tldr.py --resume latest             # continue a run that was stopped, bit for bit
    python rloo_tldr.py judge --model_name_or_path MODEL --judge_model JUDGE --judge_url URL    # only judge

Part I is the algorithm. Part II is infrastructure: models, rewards, judges, data, processes, run folder,
flags. Papers: Buy 4 REINFORCE Samples, Get a Baseline for Free! (Kool et al. 2019), Back to Basics (Ahmadian
et al. 2024), Learning to Summarize from Human Feedback (Stiennon et al. 2020), The N+ Implementation Details
of RLHF with PPO (Huang et al. 2024).
Results, metrics, details, and which lines to change for what: docs/rloo_tldr.md.
"""

import copy
import inspect
import json
import logging
import math
import os
import random
import re
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from pydoc import locate
from typing import Literal

import accelerate
import datasets
import torch
import torch.nn.functional as F
import transformers
import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeRemainingColumn
from rich.table import Table
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

# ============================================================================================================
# Part I: the algorithm
# ============================================================================================================


@dataclass
class Args:
    """The defaults follow the RLOO page of TRL 0.11. Without a recipe or a model, tiny is run."""

    # Run
    recipe: tyro.conf.Suppress[str] = "custom"  # set from the first word of the command line
    seed: int = 1  # random seed; all sampling is a function of (seed, update)
    output_dir: str | None = None  # run folder (default: runs/<script>/<recipe>-s<seed>-<time>)
    resume: str | None = None  # continue a run: its folder, a checkpoint, or `latest` in runs/<script>
    save_every: int = 10  # updates between checkpoints (0: only at the end, or after a signal)
    keep_checkpoints: int = 2  # number of checkpoints to keep during a run; the last one stays after it
    log_with: Literal["none", "wandb", "tensorboard"] = "none"  # a tracker, in addition to metrics.jsonl
    num_sample_generations: int = 10  # how many times samples are printed during the run

    # Models
    model_name_or_path: str = "EleutherAI/pythia-1b-deduped"  # tokenizer; policy if sft_model_path is None
    sft_model_path: str | None = None  # initial policy; the reference is a frozen copy of it
    reward_model_path: str = "cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr"  # classifier with 1 output
    reward_fn: list[str] | None = None  # FILE.py:function ..., instead of the reward model; called as TRL's
    reward_weights: list[float] | None = None  # one for each function of --reward-fn; None: 1 each
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"  # matmul precision; auto: bf16 if the GPU has it
    bf16: bool = False  # the same as --dtype bfloat16 (TRL's spelling)
    load_in_8bit: bool = False  # 8-bit frozen weights: LoRA's base model, or without LoRA the reference
    num_shared_layers: int = 0  # freeze embeddings and this many first layers; share them with the reference
    gradient_checkpointing: bool = False  # recompute activations in the backward pass to save memory
    compile: bool = False  # experimental: torch.compile, CUDA graphs for sampling; untested on GPUs
    lora_r: int = 0  # LoRA rank (0: train all weights); the reference is then the policy without its adapter
    lora_alpha: int = 32  # LoRA scale: the adapter adds lora_alpha / lora_r * B A
    lora_target_modules: str = "all-linear"  # layers with an adapter: comma-separated names, or all-linear

    # Data
    dataset_name: str = "trl-lib/tldr"  # columns prompt, completion: texts, or chats (lists of messages)
    max_prompt_length: int = 512  # posts with more tokens are skipped
    response_length: int = 53  # longest response, in tokens
    stop_token: Literal["eos"] | None = "eos"  # end at EOS and the model's other stop tokens; None: never
    stop_token_id: int | None = None  # end responses at this token id only, instead of --stop-token
    temperature: float = 0.7  # sampling temperature; all log-probabilities use it too

    # Responses per update = per_device_train_batch_size x gradient_accumulation_steps x num_mini_batches
    # x processes. Prompts per update = responses per update / rloo_k.
    total_episodes: int = 1_000_000  # number of responses in the whole run, rounded up to whole batches
    per_device_train_batch_size: int = 8  # responses per forward and backward pass on one process
    gradient_accumulation_steps: int = 1  # micro-batches per optimizer step
    num_mini_batches: int = 1  # optimizer steps per epoch
    num_ppo_epochs: int = 4  # epochs over each batch of rollouts
    local_rollout_forward_batch_size: int = 64  # responses generated or scored at once on one process

    # RLOO
    rloo_k: int = 2  # responses per prompt; 2 or more
    kl_coef: float = 0.05  # KL penalty coefficient

    # Why k1 for a KL in the reward, and k2 or k3 for a KL in the loss: see kl_per_token.
    kl_in_loss: bool = False  # the KL is a term of the loss, not of the reward; needs k2 or k3
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"  # k1 in the reward; k2 or k3 (as in GRPO) in the loss
    missing_eos_penalty: float | None = None  # subtracted from the score of a response without a stop token
    score_clip: float | None = None  # clip scores to [-score_clip, score_clip]
    whiten_rewards: bool = False  # rescale rewards to std 1 (the baseline removes their mean)
    cliprange: float = 0.2  # epsilon of the clipped policy loss

    # Judge: judge_model if there is one, or judge_fn, or the reward itself
    num_examples: int = 256  # number of held-out posts whose summaries are judged, before and after
    judge_fn: str | None = None  # FILE.py:function like --reward-fn; the response with the higher score wins
    judge_model: str | None = None  # an existing folder: a reward model; any other name: a chat model
    judge_url: str | None = None  # server of the chat model; None: OpenAI if its key is set, or Hugging Face

    # Optimizer
    learning_rate: float = 3e-6  # initial (or constant) learning rate
    optimizer: str = "torch.optim.AdamW"  # dotted name: torch.optim.SGD, bitsandbytes.optim.Adam8bit, ...
    adam_eps: float = 1e-8  # epsilon of Adam (the N+ paper uses 1e-5)
    lr_scheduler_type: Literal["constant", "linear", "cosine", "exponential"] = "linear"  # per update
    warmup_ratio: float = 0.0  # fraction of updates in which the learning rate rises from 0
    max_grad_norm: float | None = 1.0  # clip the gradient to this norm; None: no clipping


RECIPES = {
    "tiny": Args(  # small models and data that come with this repository
        model_name_or_path="checkpoints/tldr-sft",
        reward_model_path="checkpoints/tldr-reward",
        dataset_name="data/tldr",
        judge_fn="data/make_tldr.py:gold_score",
        dtype="float32",
        total_episodes=10_240,
        per_device_train_batch_size=64,
        num_mini_batches=2,
        num_ppo_epochs=1,
        local_rollout_forward_batch_size=128,
        rloo_k=4,
        response_length=40,
        temperature=1.0,
        missing_eos_penalty=1.0,
        learning_rate=4e-4,
        num_examples=300,
        num_sample_generations=3,
    ),
    "pythia-14m": Args(  # TRL's first command, a test only: its reward model has a random head
        model_name_or_path="EleutherAI/pythia-14m",
        reward_model_path="EleutherAI/pythia-14m",
        total_episodes=10_000,
        per_device_train_batch_size=64,
        missing_eos_penalty=1.0,
    ),
    "tldr-pythia-1b": Args(  # TRL's second command, with Adam's epsilon of Huang et al. 2024
        sft_model_path="cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr",
        num_ppo_epochs=2,
        num_mini_batches=2,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=8,
        missing_eos_penalty=1.0,
        kl_coef=0.03,
        save_every=100,  # a checkpoint has 12 GB
        adam_eps=1e-5,
    ),
}


# ---- Math: pure functions of tensors -----------------------------------------------------------------------
#
# Shapes: P prompts with k responses each make B = k * P rows. C positions of the prompt, T positions of the
# response, V tokens in the vocabulary, H hidden units. Rows are ordered as in TRL: the first responses to all
# prompts, then the second ones, ... So rows r, P + r, 2 P + r, ... are the group of prompt r. A row of C + T
# tokens is a left-padded prompt and a right-padded response, here with C = 4 and T = 5:
#
#     pad    pad    TL;    DR:   | My     cat    EOS    pad    pad       length of the response: 3
#
# The hidden state of each token predicts the next one: "DR:" predicts "My".
#
# From reward functions to the reward, per response:
#
#     rewards/NAME   what one reward function returns
#     raw score      their weighted sum, b["scores"]; logged as env/reward_mean
#     score          the raw score, clipped, minus the penalty for a missing EOS; logged as objective/scores
#     reward         the score minus the KL penalty, which RLOO maximizes (with --kl-in-loss, the score)


def response_lengths(tokens, stop_token_id):
    """Number of tokens up to and including the first stop token; T if there is none. [B, T] -> [B]

    stop_token_id is one id or a tensor of several. -1, or an empty tensor: there is no stop token.
    """
    T = tokens.shape[1]
    position = torch.arange(1, T + 1, device=tokens.device)  # [T]
    return torch.where(torch.isin(tokens, stop_token_id), position, T).amin(1)


def length_mask(lengths, max_length):
    """True on the first `lengths` positions of each row. [B] -> bool [B, max_length]"""
    return torch.arange(max_length, device=lengths.device) < lengths[:, None]


def token_logprobs(hidden, weight, tokens, temperature=1.0, bias=None):
    """log softmax((hidden @ weight.T + bias) / temperature) at the tokens, and the entropies of the softmax.

    hidden [..., H], weight [V, H], tokens [...], bias [V] or None -> logprobs, entropies, fp32 [...], in
    nats. Only the log-probabilities have a gradient. ChunkedLogprobs (Part II) computes them in chunks of
    rows, because the logits of all N tokens, [N, V], would need too much memory.
    """
    if bias is not None:
        bias = bias.clamp(min=-1e4)  # models may forbid a token by -inf, but p log p would be 0 * -inf = nan
    flat_hidden = hidden.reshape(-1, hidden.shape[-1])  # [N, H]
    flat_tokens = tokens.reshape(-1)  # [N]
    # ChunkedLogprobs keeps what a backward pass needs only if there will be one. Inside of an
    # autograd.Function, torch.is_grad_enabled() is always False, so it is passed in.
    logprobs, entropies = ChunkedLogprobs.apply(
        flat_hidden, weight, flat_tokens, temperature, bias, torch.is_grad_enabled()
    )
    return logprobs.view(tokens.shape), entropies.view(tokens.shape)


def kl_per_token(logprobs, ref_logprobs, estimator):
    """Estimates of KL(policy || reference) from samples of the policy, in nats, any shape (Schulman 2020).

    As numbers: k1 is unbiased, k2 is biased but never negative, k3 is unbiased and never negative.
    In a reward, which is a constant: only k1 gives the policy gradient of KL(policy || reference).
    In a loss, which is differentiated, the average gradient over samples of the current policy is
        k1  0
        k2  that of KL(policy || reference), per token
        k3  that of KL(reference || policy), per token
    """
    log_ratio = logprobs - ref_logprobs
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio**2
    return torch.expm1(-log_ratio) + log_ratio  # k3


def weighted_sum(rewards, weights=None):
    """The sum of weight * reward.

    rewards: dict of name -> [B]; weights: floats in the same order, or None for 1 each. -> [B]
    A nan means that a reward does not apply to a row (the function returned None), and counts as 0.
    """
    weights = weights or [1.0] * len(rewards)
    return sum(weight * values.nan_to_num() for weight, values in zip(weights, rewards.values()))


def masked_mean(values, mask):
    """Mean over the valid positions. Any shape -> scalar"""
    return torch.where(mask, values, 0.0).float().sum() / mask.sum()


def rloo_advantages(rewards, rloo_k):
    """Reward minus the mean reward of the other responses to the same prompt. [k * P] -> [k * P]

    Kool et al. 2019; Ahmadian et al. 2024, section 3. Unlike GRPO, this does not divide by the standard
    deviation of the group, which would blow up differences between rewards that are almost equal.
    """
    # fp64, because in fp32 rounding would give groups with equal rewards advantages that are not exactly 0.
    rewards = rewards.double().view(rloo_k, -1)  # [k, P]
    sum_of_others = rewards.sum(0) - rewards  # [k, P]
    baselines = sum_of_others / (rloo_k - 1)
    return (rewards - baselines).flatten().float()


def clipped_policy_loss(logprobs, old_logprobs, advantages, cliprange):
    """PPO's clipped objective, negated (Schulman et al. 2017, eq. 7). Any shape -> same shape, unreduced"""
    log_ratio = logprobs - old_logprobs
    ratio = torch.exp(log_ratio.clamp(max=80))  # an infinite ratio times an advantage of 0 is nan
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    return torch.max(unclipped, clipped)


def sample_tokens(probs, uniforms):
    """Sample one token per row by inverting the cumulative distribution. fp32 [B, V], [B] in [0, 1) -> [B]

    Unlike torch.multinomial, each token depends only on its own row and its own uniform number. So for the
    same probabilities, the samples are the same no matter how a batch is split. The search has two levels,
    first a block of 64 tokens and then the token in it: an fp32 cumulative sum over the whole vocabulary
    would lose small probabilities.
    """
    almost_one = 1 - 2**-23  # so that rounding cannot select past the last token
    padding = -probs.shape[1] % 64  # to a multiple of 64
    if padding > 0:
        probs = F.pad(probs, (0, padding))
    blocks = probs.unflatten(1, (-1, 64))  # [B, blocks, 64]

    block_ends = blocks.sum(2).cumsum(1)  # [B, blocks]
    target = uniforms.float()[:, None] * block_ends[:, -1:] * almost_one  # [B, 1]
    # right=True never selects a block or a token of probability 0.
    block = torch.searchsorted(block_ends, target, right=True)  # [B, 1]

    block_starts = F.pad(block_ends, (1, 0))  # [B, blocks + 1]
    target_in_block = target - block_starts.gather(1, block)
    row = torch.arange(len(probs), device=probs.device)
    token_ends = blocks[row, block.squeeze(1)].cumsum(1)  # [B, 64]
    # Rounding may leave the target just outside the block: move it back in.
    target_in_block = torch.minimum(target_in_block.clamp(min=0), token_ends[:, -1:] * almost_one)
    token = torch.searchsorted(token_ends, target_in_block, right=True)  # [B, 1]
    return (block * 64 + token).squeeze(1)


def learning_rate(args, update, updates):
    """The learning rate in update 1, 2, ..., updates. -> float

    It rises linearly from 0 in the first warmup_ratio of the updates. Then it stays constant, or falls to 0
    (linear, cosine) or to 1 % (exponential).
    """
    warmup = math.ceil(args.warmup_ratio * updates)
    if update <= warmup:
        return args.learning_rate * (update - 1) / warmup
    progress = (update - 1 - warmup) / (updates - warmup)  # from 0 to almost 1
    if args.lr_scheduler_type == "constant":
        factor = 1.0
    elif args.lr_scheduler_type == "linear":
        factor = 1 - progress
    elif args.lr_scheduler_type == "cosine":
        factor = 0.5 * (1 + math.cos(math.pi * progress))
    else:
        factor = 0.01**progress
    return args.learning_rate * factor


# ---- Policy and reference ----------------------------------------------------------------------------------


def body_and_head(lm):
    """The transformer of a causal language model, and its output layer. Works with and without LoRA."""
    if hasattr(lm, "get_base_model"):
        lm = lm.get_base_model()  # peft: this only unwraps, the adapter stays inside the layers
    return lm.base_model, lm.get_output_embeddings()


def hidden_states(body, ids, mask, cache=None):
    """Hidden states of the last layer, for the tokens that are not in the cache yet.

    ids [B, L], bool mask [B, cached + L] -> [B, L, H]. Positions count only real tokens, not left padding.
    """
    L = ids.shape[1]
    ids = torch.where(mask[:, -L:], ids, 0)  # a pad id may lie outside the embedding table
    inputs = {"input_ids": ids, "attention_mask": mask.long()}
    if cache is not None:
        inputs["past_key_values"] = cache
    # With left padding, the first real token is not in column 0, so pass the positions. BLOOM takes no
    # position_ids: it computes them from the mask.
    if "position_ids" in inspect.signature(body.forward).parameters:
        positions = mask.long().cumsum(1) - 1
        inputs["position_ids"] = positions.clamp(min=0)[:, -L:]
    return body(**inputs, use_cache=cache is not None).last_hidden_state


def response_logprobs(lm, ids, mask, T, temperature):
    """Log-probabilities of the responses: the last T tokens of each row.

    ids [B, C + T], bool mask [B, C + T] -> logprobs, entropies, both fp32 [B, T] and 0 where masked; and the
    hidden states [B, T, H] that predict the tokens
    """
    body, head = body_and_head(lm)
    hidden = hidden_states(body, ids, mask)
    hidden = hidden[:, -T - 1 : -1]  # the state at position t - 1 predicts token t
    tokens, valid = ids[:, -T:], mask[:, -T:]
    # The output layer is large, so only valid tokens go through it.
    valid_logprobs, valid_entropies = token_logprobs(  # [number of valid tokens] each
        hidden[valid], head.weight, tokens[valid], temperature, head.bias
    )
    logprobs = torch.zeros(valid.shape, device=ids.device).masked_scatter(valid, valid_logprobs)
    entropies = torch.zeros(valid.shape, device=ids.device).masked_scatter(valid, valid_entropies)
    return logprobs, entropies, hidden


class PolicyAndReference(nn.Module):
    """The policy, and its reference model if it needs one. `forward` is that of the policy; DDP wraps it."""

    def __init__(self, policy, reference=None):
        super().__init__()
        self.policy = policy
        self.reference = reference  # None: the policy without its LoRA adapter, or none is needed
        self.compiled_policy = None  # with --compile: a CompiledPolicy that samples in place of the policy

    def forward(self, ids, mask, T, temperature):
        """Returns logprobs and entropies of the responses, fp32 [B, T] each, 0 where masked."""
        logprobs, entropies, _ = response_logprobs(self.policy, ids, mask, T, temperature)
        return logprobs, entropies

    def reference_logprobs(self, ids, mask, T, temperature):
        """Returns the log-probabilities under the reference, fp32 [B, T]."""
        if self.reference is not None:
            return response_logprobs(self.reference, ids, mask, T, temperature)[0]
        with self.policy.disable_adapter():
            return response_logprobs(self.policy, ids, mask, T, temperature)[0]


# ---- Rollout -----------------------------------------------------------------------------------------------


@torch.no_grad()
def generate_groups(policy, ids, mask, uniforms, stop_ids, temperature):
    """Sample k responses to each prompt, until a stop token or T tokens. No top-k, no top-p.

    Left-padded ids, mask [P, C]; uniforms [P, k, T], one random number per token; stop_ids [any number]
    -> tokens [P, k, T] and the log-probabilities they were sampled with, fp32 [P, k, T]; both 0 after the end
    """
    if isinstance(policy, CompiledPolicy):  # --compile
        return generate_groups_compiled(policy, ids, mask, uniforms, stop_ids, temperature)
    P, k, T = uniforms.shape
    body, head = body_and_head(policy)
    weight = cast_like_autocast(head.weight)  # to bf16 under autocast, once and not for each token
    cache = Cache(config=body.config)
    hidden = hidden_states(body, ids, mask, cache)[:, -1]  # [P, H]

    # The model reads each prompt only once. Its keys and values serve all k responses, which are neighbors
    # here. sample_responses puts the first responses to all prompts first.
    prompt_of_row = torch.arange(P, device=ids.device).repeat_interleave(k)  # [P * k]
    cache.batch_select_indices(prompt_of_row)
    hidden, mask = hidden[prompt_of_row], mask[prompt_of_row]
    uniforms = uniforms.flatten(0, 1)  # [P * k, T]
    tokens = torch.zeros(P * k, T, dtype=torch.long, device=ids.device)
    logprobs = torch.zeros(P * k, T, device=ids.device)
    rows = torch.arange(P * k, device=ids.device)  # the rows that are still being written

    for t in range(T):
        logits = fp32_logits(hidden, weight, head.bias)  # [rows, V]
        probs = logits.div_(temperature).softmax(-1)
        token = sample_tokens(probs, uniforms[rows, t])  # [rows]
        tokens[rows, t] = token
        logprobs[rows, t] = probs.gather(1, token[:, None]).squeeze(1).log()

        unfinished = ~torch.isin(token, stop_ids)
        if t + 1 == T or not unfinished.any():
            break
        if not unfinished.all():  # finished rows leave the batch
            keep = unfinished.nonzero().squeeze(1)
            cache.batch_select_indices(keep)
            rows, mask, token = rows[keep], mask[keep], token[keep]
        mask = F.pad(mask, (0, 1), value=True)
        hidden = hidden_states(body, token[:, None], mask, cache)[:, -1]  # [rows, H]
    return tokens.view(P, k, T), logprobs.view(P, k, T)


@torch.no_grad()
def sample_responses(policy, tokenizer, prompt_batch, stop_ids, args):
    """Sample k responses to each prompt, and decode them.

    prompt_batch: ids, bool mask [P, C], left-padded; uniforms [P, k, T]. Returns
    - a dict of tensors, with the first responses to all prompts first: ids, mask [k * P, C + T]; lengths,
      stopped [k * P]; sampling_logprobs [k * P, T]
    - the responses, k * P str
    - their token ids with the stop token, k * P lists
    """
    prompt_ids, prompt_mask = prompt_batch["ids"], prompt_batch["mask"]
    uniforms = prompt_batch["uniforms"]
    P, k, T = uniforms.shape
    device = prompt_ids.device

    # 1. Generate.
    tokens = torch.zeros(P, k, T, dtype=torch.long, device=device)
    sampling_logprobs = torch.zeros(P, k, T, device=device)
    prompts_at_once = max(1, args.local_rollout_forward_batch_size // k)
    for rows in torch.arange(P, device=device).split(prompts_at_once):
        tokens[rows], sampling_logprobs[rows] = generate_groups(
            policy, prompt_ids[rows], prompt_mask[rows], uniforms[rows], stop_ids, args.temperature
        )
    tokens = tokens.transpose(0, 1).flatten(0, 1)  # [k * P, T], first responses first
    sampling_logprobs = sampling_logprobs.transpose(0, 1).flatten(0, 1)
    prompt_ids, prompt_mask = prompt_ids.repeat(k, 1), prompt_mask.repeat(k, 1)  # [k * P, C]
    lengths = response_lengths(tokens, stop_ids)  # [k * P]
    last_tokens = tokens.gather(1, lengths[:, None] - 1).squeeze(1)
    stopped = torch.isin(last_tokens, stop_ids)  # [k * P]

    # 2. Decode, without the stop token: it is not part of the text. (A reward model adds its own EOS.)
    valid = length_mask(lengths, T)  # [k * P, T]
    has_text = length_mask(lengths - stopped.long(), T)  # [k * P, T]
    prompt_tokens = [row[keep].tolist() for row, keep in zip(prompt_ids, prompt_mask)]
    text_tokens = [row[keep].tolist() for row, keep in zip(tokens, has_text)]
    # decode needs the prompts: a tokenizer may drop the space at the beginning of what it decodes.
    _, responses = decode(tokenizer, prompt_tokens, text_tokens)  # list of k * P str
    response_tokens = [row[keep].tolist() for row, keep in zip(tokens, valid)]

    b = {
        "ids": torch.cat([prompt_ids, tokens], 1),  # [k * P, C + T]
        "mask": torch.cat([prompt_mask, valid], 1),
        "lengths": lengths,
        "stopped": stopped,
        "sampling_logprobs": sampling_logprobs,
    }
    return b, responses, response_tokens


@torch.no_grad()
def rollout_groups(model, tokenizer, reward, posts, prompt_batch, stop_ids, args):
    """Sample k responses to each post, score them, and compute old and reference log-probabilities.

    reward: RewardFunctions; posts: P dicts with prompt (str or chat) and columns, for reward functions;
    prompt_batch, stop_ids: as in sample_responses. Returns
    - the dict of sample_responses, and in it
        rewards/NAME [k * P]     of each reward function; nan: it does not apply to this response
        scores [k * P]           their weighted sum
        logprobs [k * P, T]      old log-probabilities, the denominator of the ratio
        ref_logprobs [k * P, T]  of the reference
    - the responses, k * P str
    """
    b, responses, response_tokens = sample_responses(
        model.compiled_policy or model.policy, tokenizer, prompt_batch, stop_ids, args
    )
    k = len(responses) // len(posts)
    # posts * k is in the order of the responses: the first responses to all posts come first.
    rewards = score_responses(reward, posts * k, responses, response_tokens)  # name -> [k * P]
    b["scores"] = weighted_sum(rewards, args.reward_weights)  # [k * P]
    b |= {f"rewards/{name}": values for name, values in rewards.items()}

    # Old log-probabilities come from a forward pass like that of the update, in micro-batches of the same
    # shape and without dropout. So until the first optimizer step the ratio is 1, up to rounding. Those from
    # generation differ more, and the sum over a response adds the differences up.
    b["logprobs"] = torch.zeros_like(b["sampling_logprobs"])  # [k * P, T]
    b["ref_logprobs"] = torch.zeros_like(b["sampling_logprobs"])
    num_rows, T = b["logprobs"].shape
    for rows in torch.arange(num_rows, device=b["ids"].device).split(args.per_device_train_batch_size):
        inputs = b["ids"][rows], b["mask"][rows], T, args.temperature
        b["logprobs"][rows], _ = model(*inputs)
        b["ref_logprobs"][rows] = model.reference_logprobs(*inputs)
    return b, responses


def gather_groups(x, k, accelerator):
    """The rows of all processes as one batch. [k * p, ...] on each process -> [k * P, ...]

    Each process has k responses to its own p prompts. Its first responses come first, so put the first
    responses of all processes together, then the second ones, ...
    """
    x = accelerator.gather(x)  # [processes * k * p, ...]
    x = x.unflatten(0, (accelerator.num_processes, k, -1))  # [processes, k, p, ...]
    return x.transpose(0, 1).flatten(0, 2)


# ---- Training ----------------------------------------------------------------------------------------------


def train(args):
    """The whole run, from the flags to the final table. -> (PolicyAndReference, run folder)"""
    if args.bf16:
        args = replace(args, dtype="bfloat16")
    accelerator = start_accelerator(args)
    device, rank, world = accelerator.device, accelerator.process_index, accelerator.num_processes
    n, T, k = args.per_device_train_batch_size, args.response_length, args.rloo_k
    local_batch_size = n * args.gradient_accumulation_steps * args.num_mini_batches
    check_rloo_args(args, local_batch_size)
    B = local_batch_size * world  # episodes per update
    P = B // k  # prompts per update
    updates = math.ceil(args.total_episodes / B)

    def local_rows(x):
        """The share of a global batch that this process works on."""
        return x[rank * len(x) // world : (rank + 1) * len(x) // world]

    tokenizer = load_tokenizer(args.model_name_or_path)
    train_rows, held_out_rows = load_splits(args.dataset_name)
    train_posts = load_posts(train_rows, tokenizer, args)
    held_out_posts = load_posts(held_out_rows, tokenizer, args)
    policy_name = args.sft_model_path or args.model_name_or_path
    policy, reference = load_policy_and_reference(args, policy_name)
    max_tokens = longest_prompt(train_posts + held_out_posts) + T
    check_context(policy, policy_name, max_tokens)
    model = to_device(PolicyAndReference(policy, reference), args, device)
    if args.compile:
        model.compiled_policy = compile_policy(policy, max_tokens, args, device)
    stop_ids = find_stop_tokens(args, tokenizer, policy).to(device)
    trainer_state = transformers.TrainerState(max_steps=updates)  # reward functions may read it
    reward = load_summary_reward(args, device, trainer_state)
    judge_functions = None
    if args.judge_fn is not None:
        judge_functions = load_reward_functions("--judge-fn", [args.judge_fn], device, trainer_state)
    judge = None
    if accelerator.is_main_process:  # so that a judge on a server is asked only once
        judge = load_summary_judge(args, tokenizer, reward, judge_functions, device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=wants_bf16(args, device))

    # What the progress bar shows: label -> metric.
    status = {"score": "objective/scores", "KL": "objective/kl", "ended": "val/num_eos_tokens"}
    run = Run(args, accelerator, updates, status)
    run.print_setup(f"{policy_name} on {args.dataset_name}", model)
    run.print(
        f"batch: {n} responses per pass x {args.gradient_accumulation_steps} accumulated "
        f"x {args.num_mini_batches} minibatches x {world} processes = {B} episodes = {P} prompts x {k}; "
        f"{updates} updates x {args.num_ppo_epochs} epochs x {args.num_mini_batches} minibatches = "
        f"{updates * args.num_ppo_epochs * args.num_mini_batches} optimizer steps"
    )

    # Every process summarizes all held-out posts; only the main one has a judge and shows the result.
    held_out_posts = choose_held_out(held_out_posts, args)
    # The prompts, and the random numbers for one summary of each. They depend only on the seed, so the
    # evaluations before and after training use the same ones, and so does a resumed run. This one is before
    # run.restore: it measures the initial policy in a resumed run too.
    held_out_batch = draw_groups(held_out_posts, 1, args, "held-out")
    held_out_batch = {name: x.to(device) for name, x in held_out_batch.items()}
    with autocast:
        before = evaluate_summaries(
            model, tokenizer, reward, judge, held_out_posts, held_out_batch, stop_ids, args
        )
    _, records_before = before
    responses_before = [record["response"] for record in records_before]

    # `model` generates, `learner` is trained. On one process and with DDP they are the same module, and
    # copy_weights does nothing. FSDP2 and ZeRO-3 cannot generate from shards: there the learner is a
    # sharded copy, and its weights are copied back after each update.
    learner = make_learner(model, accelerator)
    optimizer = make_optimizer(args, trainable(learner))
    learner, optimizer = accelerator.prepare(learner, optimizer)
    # dict: name -> parameter. Only now, because prepare replaces the parameters if it shards the learner.
    parameters = trainable(accelerator.unwrap_model(learner))
    state = run.restore(parameters, optimizer, B)  # {"update": 0} in a new run; raises if B has changed
    copy_weights(parameters, model)
    ratio_was_checked = False

    for update in range(state["update"] + 1, updates + 1):
        # 1. Rollout. All random numbers are drawn for the global batch. Each process generates all k
        #    responses to its share of the prompts; then every process gets all responses. For a given B, the
        #    result does not depend on the number of processes, up to rounding.
        start_time = time.time()
        model.eval()
        # The next P posts of an endless stream: the data set is shuffled again after each pass.
        data_rows = stream_rows(len(train_posts), start=(update - 1) * P, count=P, seed=args.seed)
        posts = [train_posts[row] for row in data_rows.tolist()]  # list of P
        prompt_batch = draw_groups(posts, k, args, update)  # ids, mask [P, C]; uniforms [P, k, T]
        prompt_batch = {name: local_rows(x).to(device) for name, x in prompt_batch.items()}
        posts = local_rows(posts)
        trainer_state.global_step = update - 1
        with autocast:
            local, responses = rollout_groups(model, tokenizer, reward, posts, prompt_batch, stop_ids, args)
        # The score of --judge-fn is only logged. If it falls while the reward's score rises, the policy
        # over-optimizes the reward.
        if judge_functions is not None:
            local["judge_scores"] = score_texts(judge_functions, tokenizer, posts * k, responses)
        # b: the rollouts of all processes, [B, ...] each
        b = {name: gather_groups(x, k, accelerator) for name, x in local.items()}
        prompt_ids = b["ids"][:, :-T].view(k, P, -1)
        assert (prompt_ids == prompt_ids[0]).all(), "the rows of a group do not answer the same prompt"
        valid = length_mask(b["lengths"], T)  # [B, T]
        rollout_end = time.time()

        # 2. Scores: clip, then subtract the penalty from responses that did not end on their own.
        scores = b["scores"]  # [B]
        if args.score_clip is not None:
            scores = scores.clamp(-args.score_clip, args.score_clip)
        if args.missing_eos_penalty is not None:
            scores = torch.where(b["stopped"], scores, scores - args.missing_eos_penalty)

        # 3. Rewards: one per response, with the KL of the whole response. Here it is always k1. With
        #    kl_in_loss it is only logged, and kl_estimator is for the loss.
        token_kl = torch.where(valid, kl_per_token(b["logprobs"], b["ref_logprobs"], "k1"), 0.0)  # [B, T]
        kl = token_kl.sum(1)  # [B]
        if args.kl_in_loss:
            rewards = scores
        else:
            rewards = scores - args.kl_coef * kl
        if args.whiten_rewards:
            rewards = rewards / rewards.std(correction=0).clamp(min=1e-8)

        # 4. Advantages: the baseline is the mean reward of the other responses to the same prompt.
        advantages = rloo_advantages(rewards, k)  # [B]

        # 5. Update. Minibatches are drawn from the global batch; each process trains on its share, n rows at
        #    a time. The loss is the sum over this process's responses, divided by the number of responses in
        #    the minibatch on all processes. So the gradient does not depend on how a minibatch is split,
        #    up to rounding.
        learner.train()  # dropout is 0; this switches on gradient checkpointing
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, update, updates)
        response_sums, token_sums = {}, {}  # metrics, summed over all minibatches and epochs
        for epoch in range(args.num_ppo_epochs):
            order = torch.randperm(B, generator=generator_for(args.seed, "order", update, epoch)).to(device)
            for minibatch in order.split(B // args.num_mini_batches):
                micro_batches = local_rows(minibatch).split(n)
                for i, rows in enumerate(micro_batches):
                    is_last = i + 1 == len(micro_batches)
                    with sync_gradients_if(is_last, accelerator, learner):
                        with autocast:
                            mb_logprobs, mb_entropies = learner(
                                b["ids"][rows], b["mask"][rows], T, args.temperature
                            )  # [n, T] each
                        m = valid[rows]  # [n, T]

                        # The action is the whole response: its log-probability is the sum over its tokens.
                        new_logprobs = torch.where(m, mb_logprobs, 0.0).sum(1)  # [n]
                        old_logprobs = torch.where(m, b["logprobs"][rows], 0.0).sum(1)  # [n]
                        mb_advantages = advantages[rows]  # [n]
                        policy_loss = clipped_policy_loss(
                            new_logprobs, old_logprobs, mb_advantages, args.cliprange
                        )  # [n]
                        response_loss = policy_loss
                        if args.kl_in_loss:
                            mb_kl = kl_per_token(mb_logprobs, b["ref_logprobs"][rows], args.kl_estimator)
                            mb_kl = torch.where(m, mb_kl, 0.0).sum(1)  # [n]
                            response_loss = policy_loss + args.kl_coef * mb_kl
                        loss = response_loss.sum() / len(minibatch)
                        accelerator.backward(loss * world)  # DDP averages over processes; we want the sum

                    with torch.no_grad():
                        log_ratio = new_logprobs - old_logprobs
                        ratio = log_ratio.exp()
                        response_metrics = {
                            "loss/policy_avg": policy_loss,
                            "policy/approxkl_avg": 0.5 * log_ratio**2,
                            "policy/clipfrac_avg": policy_loss > -mb_advantages * ratio,
                            "val/ratio": ratio,
                            "val/ratio_var": (ratio - 1) ** 2,  # becomes the variance below
                        }
                        token_metrics = {"policy/entropy_avg": mb_entropies[m]}
                        add_sums(response_sums, response_metrics)
                        add_sums(token_sums, token_metrics)
                    if not ratio_was_checked:  # raises if a ratio is not 1 before the first optimizer step
                        check_first_ratio((mb_logprobs - b["logprobs"][rows])[m], args, device)

                ratio_was_checked = True
                grad_norm = clip_gradients(accelerator, parameters, args.max_grad_norm)
                # Warns if the norm is not finite, and raises after five such steps in a row.
                run.check_gradient(update, grad_norm)
                if math.isfinite(grad_norm):
                    optimizer.step()
                optimizer.zero_grad()
        copy_weights(parameters, model)
        with autocast:
            check_outputs(update, model, b, T, args)  # raises if they are not finite any more

        # 6. Log. The names of the metrics are TRL's: "scores" are after clipping and penalty, "env/reward"
        #    is before.
        response_sums, token_sums = accelerator.reduce(response_sums), accelerator.reduce(token_sums)
        responses_trained = B * args.num_ppo_epochs
        tokens_trained = valid.sum() * args.num_ppo_epochs
        update_metrics = {name: x / responses_trained for name, x in response_sums.items()}
        update_metrics |= {name: x / tokens_trained for name, x in token_sums.items()}
        # var r = E[(r - 1)^2] - (E[r - 1])^2
        update_metrics["val/ratio_var"] -= (update_metrics["val/ratio"] - 1) ** 2
        # Generation computes one token at a time, with a cache. How far its log-probabilities are from those
        # of the full forward pass:
        sampling_gap = (b["sampling_logprobs"] - b["logprobs"])[valid].abs()
        score_std_of_groups = b["scores"].view(k, P).std(0, correction=0)  # [P]
        lengths = b["lengths"].float()
        # A policy that exploits its reward repeats the words that score best. Take the words whose share of
        # the responses has at least doubled since the start. Log the share of the most common one.
        all_responses = accelerate.utils.gather_object(responses)  # of all processes
        new_word = commonest_new_word(responses_before, all_responses)
        _, _, new_word_share = new_word  # the word, its share before training, its share now
        metrics = {
            "update": update,
            "episode": update * B,
            "lr": optimizer.param_groups[0]["lr"],
            "eps": B / (time.time() - start_time),  # episodes per second
            "objective/kl": kl.mean(),
            "objective/kl_coef": args.kl_coef,
            "objective/entropy": -torch.where(valid, b["logprobs"], 0.0).sum(1).mean(),  # per response
            "objective/non_score_reward": -args.kl_coef * kl.mean(),
            "objective/rlhf_reward": scores.mean() - args.kl_coef * kl.mean(),
            "objective/scores": scores.mean(),
            **update_metrics,
            "val/clipfrac_avg": 0.0,  # there is no value function to clip; TRL logs this 0 too
            "val/num_eos_tokens": b["stopped"].sum(),
            "env/reward_mean": b["scores"].mean(),
            "env/reward_std": b["scores"].std(correction=0),
            # The fraction of groups with equal raw scores. Only the KL and the EOS penalty differ in them.
            "frac_reward_zero_std": (score_std_of_groups < 1e-6).float().mean(),
            **reward_metrics(b, reward, accelerator),
            "completions/mean_length": lengths.mean(),
            "completions/min_length": lengths.min(),
            "completions/max_length": lengths.max(),
            "completions/clipped_ratio": 1 - b["stopped"].float().mean(),  # did not stop on their own
            "completions/distinct_2": distinct_bigrams(all_responses),
            "completions/new_word_share": new_word_share,
            "sampling/logprob_gap_mean": sampling_gap.mean(),
            "sampling/logprob_gap_max": sampling_gap.max(),
            **performance_metrics(start_time, rollout_end, lengths.sum(), device),
        }
        if judge_functions is not None:
            metrics["judge/scores"] = b["judge_scores"].nanmean().nan_to_num()
        metrics = to_numbers(metrics)
        run.log(metrics, health_warnings(metrics, args, new_word))
        if is_sample_update(update, updates, args):
            # The same prompts each time, with the same random numbers: watch the responses change.
            first_three = {name: x[:3] for name, x in held_out_batch.items()}
            with autocast:
                _, records = evaluate_summaries(
                    model, tokenizer, reward, None, held_out_posts[:3], first_three, stop_ids, args
                )
            run.table(f"samples after update {update}", records, "samples.jsonl", update=update)
            token_columns = {"KL": token_kl, "advantage": advantages[:, None].expand(B, T)}
            first_group = range(0, B, P)  # the k responses to the first post
            with autocast:
                save_tokens(run, update, model, tokenizer, b, first_group, scores, token_columns)

        # 7. Save.
        run.checkpoint(update, parameters, optimizer, B)

    trainer_state.global_step = updates

    # 8. Evaluate on the same held-out posts again, and save the model.
    with autocast:
        after = evaluate_summaries(
            model, tokenizer, reward, judge, held_out_posts, held_out_batch, stop_ids, args
        )
    if accelerator.is_main_process:
        report_summaries(run, held_out_posts, before, after)
        save_policy(model.policy, tokenizer, run.folder / "model")
    run.finish()
    return model, run.folder


def add_sums(sums, metrics):
    """Add the sum of each tensor in `metrics` to `sums`, both dicts with the same names."""
    for name, values in metrics.items():
        sums[name] = sums.get(name, 0) + values.float().sum()


# ---- Evaluation --------------------------------------------------------------------------------------------


def evaluate_summaries(model, tokenizer, reward, judge, posts, prompt_batch, stop_ids, args):
    """Summarize the held-out posts, with the same random numbers before and after training.

    posts: list of P dicts (load_posts); prompt_batch: of draw_groups, with k = 1; judge: of
    load_summary_judge, or None for no win rate.
    Returns metrics (dict of floats), and one record per post (summary_records).
    """
    model.eval()
    b, responses = rollout_groups(model, tokenizer, reward, posts, prompt_batch, stop_ids, args)
    records = summary_records(posts, responses, b, reward.extra)
    valid = length_mask(b["lengths"], args.response_length)  # [B, T]
    kl = torch.where(valid, b["logprobs"] - b["ref_logprobs"], 0.0)  # [B, T]
    metrics = {}
    if judge is not None and has_references(posts):
        metrics = win_rate(judge, posts, responses)
    metrics |= {
        "score mean": b["scores"].mean(),
        "score median": b["scores"].quantile(0.5),
        "KL, nats per response": kl.sum(1).mean(),
        "ended by itself": b["stopped"].float().mean(),
        "tokens per response": b["lengths"].float().mean(),
        "perplexity under the reference": torch.exp(-masked_mean(b["ref_logprobs"], valid)),
        "distinct responses": len(set(responses)) / len(responses),
        "distinct bigrams": distinct_bigrams(responses),
    }
    metrics = {name: float(x) for name, x in metrics.items()}
    return metrics, records


def has_references(posts):
    """False if the data set has no reference summaries."""
    return any(post["reference"] for post in posts)


def win_rate(judge, posts, responses):
    """How often the judge prefers the response to the reference summary; a tie counts as half a win. -> dict

    Posts for which the judge gives no verdict do not count.
    """
    # A verdict is 1 (the response wins), 0 (the reference wins), 0.5 (tie) or None (no verdict).
    verdicts = judge(posts, responses)
    given = torch.tensor([verdict for verdict in verdicts if verdict is not None])
    if len(given) == 0:
        raise UserError("the judge gave no verdict at all")
    standard_error = given.std(correction=0) / len(given) ** 0.5
    return {
        "win rate": given.mean(),
        "+- (95 % interval)": 1.96 * standard_error,
        "ties": (given == 0.5).float().mean(),
        "no verdict": 1 - len(given) / len(verdicts),
    }


RECORD_COLUMNS = ("prompt", "response", "ended", "score")


def summary_records(posts, responses, b, extra):
    """One dict(prompt, response, ended, score) per response, for tables and files.

    extra: more columns, from reward functions. dict: name -> list with one entry per response
    """
    stopped, scores = b["stopped"].tolist(), b["scores"].tolist()
    records = []
    for i, (post, response) in enumerate(zip(posts, responses)):
        record = {
            "prompt": plain_text(post["prompt"]),
            "response": response,
            "ended": stopped[i],
            "score": scores[i],
        }
        records.append(record | {name: values[i] for name, values in extra.items()})
    return records


def distinct_bigrams(texts):
    """Different pairs of neighboring words / all pairs, in all texts (distinct-2, Li et al. 2016). -> float

    It falls if a policy repeats itself, even if no two responses are equal. It also falls as the number of
    texts grows, so compare only equal numbers of texts.
    """
    pairs = []
    for text in texts:
        words = text.lower().split()
        pairs.extend(zip(words, words[1:]))
    return len(set(pairs)) / max(len(pairs), 1)


# Not counted as new words: English words that say little about the content.
FUNCTION_WORDS = set(
    """
    about after again also always another anything because been before being both could does doing down
    during each either even ever every everybody everyone everything from have having here however into
    itself just many might more most much must neither never nobody none nothing once only other over
    perhaps quite rather same should since some somebody someone something such than that their them
    then there these they this those though through under until upon very well were what when where
    whether which while whole whom whose will with within without would your yours
    """.split()
)


def word_shares(texts):
    """The fraction of texts that contain each content word of 4 letters or more. -> dict: word -> fraction"""
    counts = Counter()
    for text in texts:
        words = re.findall(r"[^\W\d_]{4,}", text.lower())  # [^\W\d_] is any letter
        counts.update(set(words) - FUNCTION_WORDS)
    return {word: count / len(texts) for word, count in counts.items()}


def commonest_new_word(texts_before, texts_after):
    """Of the content words whose share of the texts has at least doubled, the most common one.

    -> the word, its share of the texts before, its share after; "", 0, 0 if there is no such word
    """
    before, after = word_shares(texts_before), word_shares(texts_after)
    new_words = [word for word, share in after.items() if share >= 2 * before.get(word, 0.0)]
    if not new_words:
        return "", 0.0, 0.0
    word = max(sorted(new_words), key=after.get)  # sorted, so that a tie is always decided alike
    return word, before.get(word, 0.0), after[word]


# ============================================================================================================
# Part II: infrastructure. Nothing below is about RLOO.
# ============================================================================================================

SCRIPT = Path(__file__).stem
HERE = Path(__file__).resolve().parent  # recipes name folders next to this file

# Limits of a healthy policy. Beyond them, its samples look like those of an exploited reward.
MAX_NEW_WORD_SHARE = 0.15  # of responses with the commonest new word
MIN_VARIETY = 0.8  # distinct bigrams after training / before


class UserError(Exception):
    """An error the user can fix: printed on one line, exit code 2."""


# ---- Cache and log-probabilities ---------------------------------------------------------------------------


class Cache(transformers.DynamicCache):
    """Keys and values of the tokens that were read, in the dtype in which attention multiplies them.

    Under autocast, rotary embeddings return keys in fp32. Attention would round all of them for each token.
    """

    def update(self, keys, values, *inputs, **named_inputs):
        return super().update(cast_like_autocast(keys), cast_like_autocast(values), *inputs, **named_inputs)


class FixedCache(transformers.StaticCache):
    """The same with room for all tokens from the beginning."""

    def update(self, keys, values, *inputs, **named_inputs):
        return super().update(cast_like_autocast(keys), cast_like_autocast(values), *inputs, **named_inputs)


def cast_like_autocast(tensor):
    """To autocast's dtype if autocast is on, which does not reach into a backward pass written by hand."""
    device_type = tensor.device.type
    if torch.is_autocast_enabled(device_type):
        tensor = tensor.to(torch.get_autocast_dtype(device_type))
    return tensor


def fp32_logits(hidden, weight, bias=None):
    """The output layer, with its result in fp32 under autocast too. [N, H], [V, H], [V] or None -> [N, V]

    Logits of a language model may be near -100, where neighboring bf16 numbers are 0.5 apart. So products of
    bf16 numbers are added up in fp32, and their sum is never rounded to bf16.
    """
    hidden, weight = cast_like_autocast(hidden), cast_like_autocast(weight)
    device_type = hidden.device.type
    with torch.autocast(device_type, enabled=False):
        if device_type == "cuda" and hidden.dtype != torch.float32:
            logits = torch.mm(hidden, weight.T, out_dtype=torch.float32)
        else:
            logits = hidden.float() @ weight.float().T
    if bias is not None:
        logits.add_(bias)
    return logits


class ChunkedLogprobs(torch.autograd.Function):
    """What token_logprobs returns, computed for 128 rows at a time, since all logits [N, V] are too many.

    The backward pass needs the log-softmax of each chunk again. It recomputes it, except for the first
    chunks: theirs is kept, up to MAX_KEPT numbers (128 MiB).
    """

    MAX_KEPT = 2**25

    @staticmethod
    def forward(ctx, hidden, weight, tokens, temperature, bias, has_backward):
        """[N, H], [V, H], [N], float, [V] or None, bool -> logprobs, entropies, both fp32 [N]"""
        hidden, weight = cast_like_autocast(hidden), cast_like_autocast(weight)
        logprobs, entropies = torch.zeros(2, len(hidden), device=hidden.device)
        kept = []
        for rows in ChunkedLogprobs.chunks(hidden):
            log_p = ChunkedLogprobs.log_softmax(hidden[rows], weight, bias, temperature)  # [rows, V]
            logprobs[rows] = log_p.gather(1, tokens[rows, None]).squeeze(1)
            entropies[rows] = -(log_p.exp().mul_(log_p)).sum(1)  # in place: the chunks are large
            is_kept = rows.stop * len(weight) <= ChunkedLogprobs.MAX_KEPT
            if is_kept and has_backward:
                kept.append(log_p)
        ctx.save_for_backward(hidden, weight, tokens, bias, *kept)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx, grad, _):
        """d logprob / d logits = one_hot(token) - softmax(logits)"""
        hidden, weight, tokens, bias, *kept = ctx.saved_tensors
        d_hidden = torch.zeros_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[4] else None
        for i, rows in enumerate(ChunkedLogprobs.chunks(hidden)):
            if i < len(kept):
                log_p = kept[i]
            else:
                log_p = ChunkedLogprobs.log_softmax(hidden[rows], weight, bias, ctx.temperature)
            scale = grad[rows, None] / ctx.temperature  # [rows, 1]
            d_logits = log_p.exp_().mul_(-scale)  # [rows, V], in place: nobody needs log_p again
            d_logits.scatter_add_(1, tokens[rows, None], scale)
            if d_bias is not None:
                d_bias += d_logits.sum(0)
            d_logits = d_logits.to(weight.dtype)
            d_hidden[rows] = d_logits @ weight
            if d_weight is not None and weight.dtype == torch.float32:
                d_weight.addmm_(d_logits.T, hidden[rows])  # needs no temporary [V, H], but equal dtypes
            elif d_weight is not None:
                d_weight += d_logits.T @ hidden[rows]
        return d_hidden, d_weight, None, None, d_bias, None

    @staticmethod
    def chunks(hidden):
        return [slice(start, start + 128) for start in range(0, len(hidden), 128)]

    @staticmethod
    def log_softmax(hidden, weight, bias, temperature):
        """[rows, H] -> fp32 [rows, V]"""
        logits = fp32_logits(hidden, weight, bias).div_(temperature)
        return torch.log_softmax(logits, 1, out=logits)  # in place


# ---- Compiled generation -----------------------------------------------------------------------------------


class CompiledPolicy:
    """Samples tokens with fixed shapes, so that torch.compile can record the work for one token (--compile).

    `generate` starts hundreds of small kernels for each token. On a GPU, starting them can take longer than
    running them. A CUDA graph starts all of them at once. It needs the same shapes and addresses each time:
    the cache has its full length from the beginning, and responses that have ended stay in the batch.
    Experimental: it was tested on CPUs only.
    """

    def __init__(self, policy, max_tokens, args, device):
        """max_tokens: how long prompt and response can be together"""
        self.policy = policy
        # A copy that samples. If products are in bf16, so are its linear layers: they are not rounded again
        # for each token. deepcopy keeps what is in its memo: frozen weights are shared.
        frozen = {id(p): p for p in policy.parameters() if not p.requires_grad}
        sampler = copy.deepcopy(policy, memo=frozen).requires_grad_(False)
        self.sampler = to_device(sampler, args, device).eval()
        self.max_tokens = max_tokens
        self.caches = {}  # number of rows -> cache: a graph needs the same one each time
        self.next_token = torch.compile(
            self.read_token, mode="reduce-overhead", fullgraph=True, dynamic=False
        )

    def read_token(self, token, position, is_real, cache, uniforms, temperature):
        """Read one token per row, and sample the next.

        token, position, uniforms [B]; is_real [B, max_tokens]: 1 where the cache has a token, no padding
        -> token, log-probability [B]
        """
        body, head = body_and_head(self.sampler)
        states = body(
            input_ids=token[:, None],
            attention_mask=is_real,
            position_ids=position[:, None],
            past_key_values=cache,
            use_cache=True,
        )
        return self.choose(states.last_hidden_state[:, -1], head, uniforms, temperature)

    def choose(self, hidden, head, uniforms, temperature):
        probs = fp32_logits(hidden, head.weight, head.bias).div_(temperature).softmax(-1)
        token = sample_tokens(probs, uniforms)
        return token, probs.gather(1, token[:, None]).squeeze(1).log()

    @torch.no_grad()
    def sample(self, ids, mask, uniforms, temperature, all_ended):
        """T tokens for each row. What follows after the end of a response has no meaning.

        Left-padded ids, mask [B, C]; uniforms [B, T]; all_ended(tokens [B, t]) -> bool: asked every 16 tokens
        -> tokens [B, T] and the log-probabilities they were sampled with, fp32 [B, T]
        """
        B, T = uniforms.shape
        C = ids.shape[1]
        for ours, theirs in zip(self.sampler.parameters(), self.policy.parameters()):
            if ours is not theirs:
                ours.copy_(theirs)
        body, head = body_and_head(self.sampler)
        if B not in self.caches:
            self.caches[B] = FixedCache(config=body.config, max_cache_len=self.max_tokens)
        cache = self.caches[B]
        cache.reset()
        hidden = hidden_states(body, ids, mask, cache)[:, -1]  # [B, H]
        token, logprob = self.choose(hidden, head, uniforms[:, 0], temperature)

        is_real = F.pad(mask.long(), (0, self.max_tokens - C))  # [B, max_tokens]
        position = mask.sum(1)  # [B], of the next token
        tokens = torch.zeros(B, T, dtype=torch.long, device=ids.device)
        logprobs = torch.zeros(B, T, device=ids.device)
        for t in range(T):
            tokens[:, t], logprobs[:, t] = token, logprob
            # The only time that the CPU waits for the GPU.
            if t + 1 == T or (t % 16 == 15 and all_ended(tokens[:, : t + 1])):
                break
            is_real[:, C + t] = 1
            torch.compiler.cudagraph_mark_step_begin()
            token, logprob = self.next_token(
                token, position + t, is_real, cache, uniforms[:, t + 1], temperature
            )
        return tokens, logprobs


def generate_groups_compiled(policy, ids, mask, uniforms, stop_ids, temperature):
    """What `generate_groups` returns, from a CompiledPolicy. It reads each prompt k times."""
    P, k, T = uniforms.shape

    def all_ended(tokens):
        return torch.isin(tokens, stop_ids).any(1).all()

    ids, mask = ids.repeat_interleave(k, 0), mask.repeat_interleave(k, 0)
    tokens, logprobs = policy.sample(ids, mask, uniforms.flatten(0, 1), temperature, all_ended)
    valid = length_mask(response_lengths(tokens, stop_ids), T)  # [P * k, T]
    tokens, logprobs = torch.where(valid, tokens, 0), torch.where(valid, logprobs, 0.0)
    return tokens.view(P, k, T), logprobs.view(P, k, T)


@torch.no_grad()
def compile_policy(policy, max_tokens, args, device):
    """A CompiledPolicy, and the policy's own forward pass compiled in place. Raises if a model cannot."""
    flag = f"--compile: {policy.name_or_path}"
    body, _ = body_and_head(policy)
    if "position_ids" not in inspect.signature(body.forward).parameters:
        raise UserError(f"{flag} takes no position_ids")
    ids = torch.arange(6, device=device)[None]  # [1, 6]
    mask = ids > 1  # two pads
    cache = FixedCache(config=body.config, max_cache_len=max_tokens + 6)
    is_bf16 = wants_bf16(args, device)
    with torch.autocast(device.type, torch.bfloat16, enabled=is_bf16):
        hidden_states(body, ids[:, :5], mask[:, :5], cache)
        last = hidden_states(body, ids[:, 5:], mask, cache)[:, -1]
        expected = hidden_states(body, ids, mask)[:, -1]
    tolerance = 0.1 if is_bf16 else 1e-3
    if not torch.allclose(last, expected, atol=tolerance, rtol=tolerance):
        raise UserError(f"{flag} computes something else with a cache of fixed length")
    compiled = CompiledPolicy(policy, max_tokens, args, device)
    body.compile(dynamic=True)
    return compiled


# ---- Loading models ----------------------------------------------------------------------------------------


def resolve_path(name):
    """Look for a folder in the working directory, then next to this file; else return a Hub name."""
    for path in (Path(name), HERE / name):
        if path.exists():
            return str(path)
    return name


def load(what, function, name, **kwargs):
    """function(name), with a one-line error if it fails: a wrong path, no network, a broken file."""
    try:
        return function(resolve_path(name), **kwargs)
    except Exception as error:  # the libraries raise a dozen different types
        cause = error
        if isinstance(error, datasets.exceptions.DatasetGenerationError):
            cause = error.__cause__ or error  # this one says where
        reason = str(cause).strip() or f"empty? {cause!r}"
        first_line = reason.splitlines()[0]
        if Path(name).is_absolute() and not Path(name).exists():
            first_line = "no such folder"
        top_folder = str(name).split("/")[0]
        if top_folder in ("checkpoints", "data") and not Path(resolve_path(top_folder)).exists():
            first_line = f"the recipes named tiny need {top_folder}/ from the repository next to the script"
        raise UserError(f"cannot load the {what} {name!r} (a folder, or a Hub name): {first_line}") from error


def load_model(auto_class, name, settings=None, **kwargs):
    """A model in fp32 without dropout. A folder with a LoRA adapter is merged into its base model.

    `settings` replaces config fields. Loading never runs code from the files: without safetensors,
    pytorch_model.bin is read with weights_only.
    """
    name = resolve_path(name)
    if (Path(name) / "adapter_config.json").exists():
        return load_merged_adapter(auto_class, name, settings, **kwargs)
    config = load("model", transformers.AutoConfig.from_pretrained, name)
    for key, value in config.to_dict().items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)  # with dropout, the first ratio would not be 1
        if value == "gelu_new":
            setattr(config, key, "gelu_pytorch_tanh")  # the same function in one kernel instead of eight
    config.update(settings or {})
    kwargs |= dict(config=config, dtype=torch.float32, weights_only=True)
    return load("model", auto_class.from_pretrained, name, **kwargs)


def load_merged_adapter(auto_class, folder, settings=None, **kwargs):
    """The base model that a LoRA adapter names, with the adapter merged into it."""
    import peft

    if "quantization_config" in kwargs:
        raise UserError(f"--load-in-8bit: {folder} is a LoRA adapter; merge it into its base model first")
    base_name = peft.PeftConfig.from_pretrained(folder).base_model_name_or_path
    base = load_model(auto_class, base_name, settings, **kwargs)
    model = peft.PeftModel.from_pretrained(base, folder).merge_and_unload()
    model.requires_grad_(True)  # peft froze the base
    model.name_or_path = folder  # a new adapter trained on top will name this folder as its base
    return model


def load_tokenizer(name):
    """The tokenizer of a folder or Hub name. If it has no pad token, EOS becomes the pad."""
    tokenizer = load("tokenizer", AutoTokenizer.from_pretrained, name)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def base_model_name(name):
    """The model under a LoRA adapter's folder, or under the adapter that it was trained on; else the name."""
    name = resolve_path(name)
    if not (Path(name) / "adapter_config.json").exists():
        return name
    import peft

    return base_model_name(peft.PeftConfig.from_pretrained(name).base_model_name_or_path)


def is_classifier(config):
    """True if a model was saved with a classification head."""
    return any("ForSequenceClassification" in architecture for architecture in config.architectures or ())


def init_new_head(model, name):
    """Give a decoder a new head, unless `name` was saved with one of this size. -> True if the head is new

    The standard deviation 1 / sqrt(d + 1), with d inputs, makes the first scores about 1 in size (N+ paper,
    detail 11). No name: all weights are new.
    """
    is_new = True
    if name is not None:
        base = base_model_name(name)
        config = load("model", transformers.AutoConfig.from_pretrained, base)
        is_new = not is_classifier(config) or config.num_labels != model.config.num_labels
        if resolve_path(name) != base:  # a LoRA adapter; a classifier's adapter contains its head
            import peft

            adapter = peft.PeftConfig.from_pretrained(resolve_path(name))
            is_new = is_new and adapter.task_type != "SEQ_CLS"
    if is_new and hasattr(model, "score"):  # decoders call their head `score`
        nn.init.normal_(model.score.weight, std=(model.score.in_features + 1) ** -0.5)
    return is_new


def context_length(model):
    """The maximum number of tokens of a model. RoBERTa's positions start after its pad id."""
    reserved = 0
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            reserved = module.padding_idx + 1
    return getattr(model.config, "max_position_embeddings", 10**9) - reserved


def to_device(model, args, device):
    """Move a model to the device. If products are in bf16, frozen weights of linear layers become bf16.

    Autocast would round them to bf16 in every product again, so the results stay exactly the same. Embeddings
    (often tied to the output layer) and norms stay in fp32.
    """
    if wants_bf16(args, device):
        embeddings = {id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Embedding)}
        linear_layers = (nn.Linear, transformers.pytorch_utils.Conv1D)  # Conv1D is GPT-2's linear layer
        for layer in model.modules():
            if isinstance(layer, linear_layers):
                for p in layer.parameters(recurse=False):
                    if p.dtype == torch.float32 and not p.requires_grad and id(p) not in embeddings:
                        p.data = p.data.to(torch.bfloat16)
    return model.to(device)


def trainable(module):
    """The parameters that the optimizer trains and a checkpoint holds. -> dict: name -> parameter"""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def transformer_layers(model):
    """The list of a model's transformer layers, which is its longest ModuleList."""
    return max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)


def add_lora(model, args):
    """Add a LoRA adapter (Hu et al. 2021): each named layer computes W + lora_alpha / lora_r * B A, with B
    = 0 at first."""
    import peft

    target_modules = args.lora_target_modules
    if target_modules != "all-linear":
        target_modules = target_modules.split(",")
    # A classifier's head is trained as a whole, without an adapter.
    heads = [name for name in ("score", "classifier", "pre_classifier") if hasattr(model, name)]
    config = peft.LoraConfig(
        r=args.lora_r,
        lora_alpha=args.lora_alpha,
        target_modules=target_modules,
        exclude_modules=heads or None,
    )
    flag = f"--lora-target-modules {args.lora_target_modules}"
    try:
        model = peft.get_peft_model(model, config)
    except ValueError as error:
        raise UserError(f"{flag}: no such layers in this model") from error
    if hasattr(model.get_base_model().get_output_embeddings(), "base_layer"):
        raise UserError(f"{flag}: the output embedding cannot have an adapter")
    return model


def share_layers(policy, count):
    """Freeze the policy's embeddings and first layers. -> a reference that shares them and copies the rest"""
    layers = transformer_layers(policy)
    if count > len(layers):
        raise UserError(f"--num-shared-layers {count}: the model has {len(layers)} layers")
    embeddings = [m for m in policy.modules() if isinstance(m, nn.Embedding)]
    shared = [p for module in [*embeddings, *layers[:count]] for p in module.parameters()]
    for p in shared:
        p.requires_grad_(False)
    return copy.deepcopy(policy, memo={id(p): p for p in shared})  # deepcopy keeps what is in its memo


@torch.no_grad()
def check_head(model, name):
    """Raise if a model computes its logits in any other way than hidden @ weight.T + bias.

    A soft cap (Gemma) or a scale (Granite, Cohere) would be ignored in training.
    """
    body, head = body_and_head(model)
    ids = torch.arange(6, device=head.weight.device)[None]  # [1, 6]
    hidden = body(ids).last_hidden_state
    ours, _ = token_logprobs(hidden[:, :-1], head.weight, ids[:, 1:], bias=head.bias)
    all_logprobs = model(ids).logits[:, :-1].float().log_softmax(-1)
    theirs = all_logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1)
    if not torch.allclose(ours, theirs, atol=1e-3, rtol=1e-3):
        raise UserError(f"{name}: the head of this model is more than hidden @ weight (a soft cap, a scale)")


def load_policy_and_reference(args, name, wants_reference=True):
    """The policy to train, and the frozen reference (None: the policy without its LoRA adapter, or none)."""
    eight_bit = {}
    if args.load_in_8bit:
        eight_bit = dict(quantization_config=transformers.BitsAndBytesConfig(load_in_8bit=True))
    policy = load_model(AutoModelForCausalLM, name, **(eight_bit if args.lora_r else {}))
    check_head(policy, name)
    if args.lora_r:
        policy, reference = add_lora(policy, args), None
    elif args.num_shared_layers:
        reference = share_layers(policy, args.num_shared_layers)
    elif wants_reference:
        reference = load_model(AutoModelForCausalLM, name, **eight_bit)
    else:
        reference = None
    if not wants_reference:
        reference = None
    if reference is not None:
        reference.requires_grad_(False)
    if args.gradient_checkpointing:
        policy.activation_checkpointing_enable(dict(use_reentrant=False))
    return policy, reference


def check_context(model, name, max_tokens):
    """Raise if prompt and response can be longer than the model's context."""
    if context_length(model) < max_tokens:
        raise UserError(
            f"prompt and response can have {max_tokens} tokens together, but the context of {name} "
            f"is {context_length(model)}: lower the limits of the prompt or --response-length"
        )


def save_policy(policy, tokenizer, folder):
    """Save what plain transformers loads. LoRA is merged, but into 8-bit weights it cannot be."""
    has_adapter = hasattr(policy, "merge_and_unload")
    base = policy.get_base_model() if has_adapter else policy
    if not getattr(base, "is_loaded_in_8bit", False):
        base.float()  # frozen weights may be in bf16 (to_device), which is too coarse to merge into
        if has_adapter:
            policy.save_pretrained(folder.parent / "adapter")
            policy = policy.merge_and_unload()
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# ---- Rewards -----------------------------------------------------------------------------------------------


def preference_ids(tokenizer, prompts, responses, max_length):
    """Token ids of each prompt with its response, by the same rule in training and in rollouts.

    prompts, responses: lists of str, which get EOS at the end; or lists of chats, which end as the chat
    template ends them. Not empty. -> list of lists, each with the last max_length ids at most
    A response that reached its length limit gets an EOS too, because its score is read there. Encoders (the
    family of BERT) mark the ends in their own way.
    """
    if is_chat(responses[0]):  # then all are chats
        texts = [render_chat(tokenizer, [*prompt, *response]) for prompt, response in zip(prompts, responses)]
        return [ids[-max_length:] for ids in tokenize(tokenizer, texts)]
    is_encoder = tokenizer.eos_token_id is None or tokenizer.cls_token_id is not None
    if is_encoder:
        tokenizer.truncation_side = "left"
        texts = [prompt + response for prompt, response in zip(prompts, responses)]
        return tokenizer(texts, truncation=True, max_length=max_length).input_ids
    prompt_ids = tokenize(tokenizer, prompts)  # with BOS in front, if the tokenizer puts it there
    response_ids = tokenizer(list(responses), add_special_tokens=False).input_ids
    texts = []
    for prompt, response in zip(prompt_ids, response_ids):
        ids = prompt + response + [tokenizer.eos_token_id]
        texts.append(ids[-max_length:])
    return texts


def sequence_logits(model, ids, mask):
    """Class logits of right-padded texts. [B, L], bool [B, L] -> fp32 [B, classes]

    A decoder is read at its last real token, found by its length: looking for `token != pad` would miss a
    real EOS if pad is EOS. It never looks to its right, so its pads need no attention mask.
    """
    if hasattr(model, "get_base_model"):  # with LoRA
        model = model.get_base_model()
    if not hasattr(model, "score"):  # BERT and its family
        return model(input_ids=ids, attention_mask=mask.long()).logits.float()
    ids = torch.where(mask, ids, 0)  # a pad id may lie outside the embedding table
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state  # [B, L, H]
    rows = torch.arange(len(ids), device=ids.device)
    last = mask.sum(1) - 1  # [B]
    return model.score(hidden[rows, last]).float()


def load_reward_model(args, name, device):
    """A reward model as a function: prompts, completions (lists of str, or of chats) -> list of floats.

    It reads text, tokenized with its own tokenizer, so it need not share the policy's. reward_model.py saved
    the mean score of reference summaries as reward_offset. It is subtracted (N+ paper, detail 15).
    """
    config = load("model", transformers.AutoConfig.from_pretrained, base_model_name(name))
    settings = {} if is_classifier(config) else {"num_labels": 1}
    model = load_model(AutoModelForSequenceClassification, name, settings).requires_grad_(False)
    if model.config.num_labels != 1:
        raise UserError(f"{name} is a classifier of {model.config.num_labels} labels, not a reward model")
    if init_new_head(model, name) and accelerate.PartialState().is_main_process:
        print(f"{name} is a language model without a score: its new head is random, and so is the reward")
    model = to_device(model, args, device).eval()
    tokenizer = load_tokenizer(name)
    max_length = min(tokenizer.model_max_length, context_length(model))
    offset = getattr(config, "reward_offset", 0.0)

    @torch.no_grad()
    def score(prompts, completions):  # RewardFunctions passes them by these names
        texts = [torch.tensor(ids) for ids in preference_ids(tokenizer, prompts, completions, max_length)]
        lengths = torch.tensor([len(ids) for ids in texts])
        scores = torch.zeros(len(texts))
        # Similar lengths need little padding.
        for rows in lengths.argsort().split(args.local_rollout_forward_batch_size):
            ids = nn.utils.rnn.pad_sequence([texts[i] for i in rows], batch_first=True)  # [rows, L]
            mask = length_mask(lengths[rows], ids.shape[1])
            logits = sequence_logits(model, ids.to(device), mask.to(device))  # [rows, 1]
            scores[rows] = logits.squeeze(1).cpu() - offset
        return scores.tolist()

    return score


def load_function(flag, name):
    """The user's function FILE.py:function."""
    path, _, function_name = name.partition(":")
    path = resolve_path(path)
    if not Path(path).is_file():
        raise UserError(f"{flag} {name}: expected FILE.py:function, and there is no file {path!r}")
    function = call_user_code(f"{flag} {name}", runpy.run_path, path).get(function_name)
    if not callable(function):
        raise UserError(f"{flag} {name}: {path} has no function {function_name!r}")
    return function


def call_user_code(where, function, *inputs, **named_inputs):
    """function(*inputs, **named_inputs). If it raises, its traceback is printed: its author needs it."""
    try:
        return function(*inputs, **named_inputs)
    except UserError:  # from a reward model, or from what we pass to the function: no traceback is needed
        raise
    except Exception as error:
        traceback.print_exc()
        raise UserError(f"{where} raised {type(error).__name__}: {error}") from error


# Columns of the tables of samples: log_extra cannot add one of these names.
SAMPLE_COLUMNS = set(
    "update prompt task last response reference ended right score scores intent intent_match meteor".split()
)


class RewardFunctions:
    """Functions that score responses, called as TRL's GRPOTrainer calls them: by keyword. For example:

        def correct(prompts, completions, answer, **columns):
            return [float(text.endswith(right)) for text, right in zip(completions, answer)]

    A function may have these parameters, in any order; **columns takes all of them:
    - prompts, completions, completion_ids (lists of token ids), and every column of the data except prompt:
      lists with one entry per response
    - trainer_state: trainer_state.global_step is the number of updates so far, max_steps that of all
    - log_metric(name, value): adds a number to metrics.jsonl
    - log_extra(column, values): adds a column to the tables of samples, with one value per response

    It returns one number per response, or None where it does not apply. In the example, prompts are texts. If
    prompts are chats, each completion is a chat too: [{"role": "assistant", "content": text}].
    """

    def __init__(self, flag, functions, device, trainer_state=None):
        """flag: for error messages; functions: dict of name -> function; trainer_state: for the functions"""
        self.flag = flag
        self.functions = functions
        self.device = device
        self.trainer_state = trainer_state or transformers.TrainerState()
        self.metrics = {}  # name -> values that functions logged in the last call
        self.extra = {}  # column -> values, the same

    def __call__(self, prompts, responses, response_tokens, rows):
        """Call all functions. -> dict: name of the function -> fp32 [B], nan where it does not apply

        prompts: B str or lists of messages; responses: B str; response_tokens: B lists of token ids; rows: B
        dicts, the other columns of the data. Raises UserError if a function fails.
        """
        self.metrics, self.extra = {}, {}
        completions = []
        for prompt, response in zip(prompts, responses):
            if is_chat(prompt):
                completions.append([{"role": "assistant", "content": response}])
            else:
                completions.append(response)
        inputs = {name: [row[name] for row in rows] for name in rows[0]}
        inputs |= {
            "prompts": prompts,
            "completions": completions,
            "completion_ids": response_tokens,
            "trainer_state": self.trainer_state,
            "log_metric": self.log_metric,
            "log_extra": self.log_extra,
        }
        rewards = {}
        for name, function in self.functions.items():
            where = f"{self.flag} {name}"
            scores = call_user_code(where, function, **accepted_inputs(function, inputs, where))
            rewards[name] = check_scores(where, scores, prompts, responses).to(self.device)
        for column, values in self.extra.items():
            if len(values) != len(prompts):
                raise UserError(f"{self.flag}: log_extra({column!r}, ...) needs {len(prompts)} values")
        return rewards

    def log_metric(self, name, value):
        """For reward functions: log a number. metrics.jsonl has its mean over calls and processes."""
        if not math.isfinite(value):
            raise UserError(f"{self.flag}: log_metric({name!r}, {value!r}): not a finite number")
        self.metrics.setdefault(name, []).append(float(value))

    def log_extra(self, column, values):
        """For reward functions: add a column to the tables of samples. values: one per response"""
        if column in SAMPLE_COLUMNS:
            raise UserError(
                f"{self.flag}: log_extra({column!r}, ...): the samples have such a column already"
            )
        self.extra[column] = [x if isinstance(x, (int, float)) else str(x) for x in values]


def load_reward_functions(flag, names, device, trainer_state=None):
    """The functions that a flag names, each FILE.py:function. -> RewardFunctions"""
    functions = {}
    for name in names:
        function_name = name.rpartition(":")[2]
        if function_name in functions:
            raise UserError(f"{flag}: two functions have the name {function_name!r}; rename one of them")
        functions[function_name] = load_function(flag, name)
    return RewardFunctions(flag, functions, device, trainer_state)


def accepted_inputs(function, inputs, where):
    """The inputs to pass to a function: all if it has **columns, or else those that it names. -> dict

    Raises UserError if it has a parameter for which there is no input.
    """
    parameters = inspect.signature(function).parameters.values()
    starred = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)  # *inputs, **columns
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in starred]
    missing = [name for name in required if name not in inputs]
    trl_names = {"responses": "completions", "answers": "completions", "contexts": "prompts"}
    renamed = [f"{name} to {trl_names[name]}" for name in missing if name in trl_names]
    if renamed:
        raise UserError(f"{where}: parameters have TRL's names: rename {', '.join(renamed)}")
    if missing:
        raise UserError(
            f"{where} has the parameter {', '.join(missing)}, but there is no such column; there are "
            f"{', '.join(inputs)}"
        )
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        return inputs
    return {p.name: inputs[p.name] for p in parameters if p.name in inputs}


def check_scores(where, scores, prompts, responses):
    """Check what a reward function returned: a finite number for each response, or None. -> fp32 [B]

    where: flag and function, for error messages; scores: a list, array or tensor of B values that float()
    accepts, or None, which becomes nan. Raises UserError.
    """
    not_a_list = UserError(f"{where} must return a list, not {type(scores).__name__}")
    if isinstance(scores, (str, dict)):
        raise not_a_list
    try:
        scores = list(scores)
    except TypeError as error:
        raise not_a_list from error
    if len(scores) != len(prompts):
        raise UserError(f"{where} must return {len(prompts)} numbers; it returned {len(scores)}")
    numbers = []
    for score, prompt, response in zip(scores, prompts, responses):
        if score is None:
            numbers.append(math.nan)
            continue
        row = f"for prompt {prompt!r} and response {response!r}"
        try:
            number = float(score)
        except (TypeError, ValueError, OverflowError) as error:
            kind = type(score).__name__
            raise UserError(
                f"{where}: the reward is {score!r}, of type {kind}, not a number, {row}"
            ) from error
        if not abs(number) < 3e38:  # nan, or infinite in fp32
            raise UserError(f"{where}: the reward is {number!r} {row}")
        numbers.append(number)
    return torch.tensor(numbers, dtype=torch.float32)


def reward_metrics(b, reward, accelerator):
    """The means of the rewards, and the metrics of log_metric. -> dict of name -> number

    b: dict with rewards/NAME -> [B], of all processes; reward: RewardFunctions. rewards/NAME/mean is over the
    rows to which the function applies; 0 if there is none. All processes must call this.
    """
    metrics = {}
    for name, values in b.items():
        if name.startswith("rewards/"):
            metrics[f"{name}/mean"] = values.nanmean().nan_to_num()
    logged = {}
    for metrics_of_process in accelerate.utils.gather_object([reward.metrics]):
        for name, values in metrics_of_process.items():
            logged.setdefault(name, []).extend(values)
    return metrics | {name: sum(values) / len(values) for name, values in logged.items()}


def load_summary_reward(args, device, trainer_state=None):
    """The reward model, or the user's functions. -> RewardFunctions"""
    if args.reward_fn is not None:
        return load_reward_functions("--reward-fn", args.reward_fn, device, trainer_state)
    score = load_reward_model(args, args.reward_model_path, device)
    return RewardFunctions("--reward-model-path", {"reward_model": score}, device)


def score_responses(reward, rows, responses, response_tokens):
    """Call RewardFunctions for one response to each row. -> dict: name of the function -> fp32 [B]

    rows: B dicts with prompt (str or list of messages) and columns (dict); response_tokens: B lists of ids.
    An entry is nan if the function does not apply to the row.
    """
    prompts = [row["prompt"] for row in rows]
    columns = [row["columns"] for row in rows]
    return reward(prompts, responses, response_tokens, columns)


# ---- Judges ------------------------------------------------------------------------------------------------

QUESTION = """Which of two summaries of a forum post is better? A good summary is short, true to the post, \
and keeps what matters most.

{post}

Summary A:{a}

Summary B:{b}

Answer with one letter, A or B, and nothing else."""


def load_summary_judge(args, tokenizer, reward, judge_functions, device):
    """The judge: posts, responses (list of str) -> one verdict per post.

    A verdict is 1 (the response wins), 0 (the reference wins), 0.5 (tie) or None (no verdict). The judge is
    --judge-model, else the function of --judge-fn, else the reward itself.
    """
    if args.judge_model is not None and is_chat_judge(args):
        return chat_judge(args)
    if args.judge_model is not None:
        score = load_reward_model(args, args.judge_model, device)
        return score_judge(RewardFunctions("--judge-model", {args.judge_model: score}, device), tokenizer)
    if judge_functions is not None:
        return score_judge(judge_functions, tokenizer)
    return score_judge(reward, tokenizer, args.reward_weights)


def judge_name(args):
    """Who the judge of load_summary_judge is, and on which server."""
    if args.judge_model is None:
        return args.judge_fn or ", ".join(args.reward_fn or [args.reward_model_path])
    if not is_chat_judge(args):
        return args.judge_model
    return f"{args.judge_model} at {judge_address(args) or 'Hugging Face'}"


def is_chat_judge(args):
    """True if --judge-model is a chat model on a server, not the folder of a reward model."""
    return args.judge_url is not None or not Path(resolve_path(args.judge_model)).is_dir()


def judge_address(args):
    """The server of the chat model: --judge-url, else OpenAI's for its models, else None: Hugging Face's.

    OpenAI's models have no "/" in their names, those of Hugging Face have one.
    """
    if args.judge_url is None and "OPENAI_API_KEY" in os.environ and "/" not in args.judge_model:
        return "https://api.openai.com/v1"
    return args.judge_url


def without_foreign_judge(args):
    """Drop the judge function of the recipe tiny if the data is another: it only understands data/tldr."""
    tiny = RECIPES["tiny"]
    if args.judge_fn == tiny.judge_fn and args.dataset_name != tiny.dataset_name:
        return replace(args, judge_fn=None)
    return args


def score_texts(functions, tokenizer, posts, texts, weights=None):
    """The score of one text for each post: the weighted sum of its rewards. -> fp32 [B]

    functions: RewardFunctions; posts: B dicts; texts: B str. The functions get the texts tokenized again,
    without a stop token. In training, a text to which no function applies has the score 0; here nan, so that
    no judge decides by it.
    """
    token_ids = tokenizer(list(texts), add_special_tokens=False).input_ids
    rewards = score_responses(functions, posts, texts, token_ids)  # name -> [B]
    has_no_reward = torch.stack(list(rewards.values())).isnan().all(0)  # [B]
    return weighted_sum(rewards, weights).masked_fill(has_no_reward, math.nan)


def score_judge(functions, tokenizer, weights=None):
    """A judge that prefers the summary with the higher score. No verdict if one of the two has no score."""

    def judge(posts, responses):
        references = [post["reference"] for post in posts]
        ours = score_texts(functions, tokenizer, posts, responses, weights)  # [B]
        theirs = score_texts(functions, tokenizer, posts, references, weights)  # [B]
        verdicts = (ours > theirs).float() + 0.5 * (ours == theirs).float()
        unknown = (ours + theirs).isnan().tolist()
        return [None if x else verdict for x, verdict in zip(unknown, verdicts.tolist())]

    return judge


def chat_judge(args):
    """A judge that asks a chat model which of two summaries is better."""
    client = chat_client(args)

    def verdict(post, response, response_is_a):
        if response_is_a:
            a, b = response, post["reference"]
        else:
            a, b = post["reference"], response
        question = QUESTION.format(post=plain_text(post["prompt"]), a=a, b=b)
        answer = ask_chat_model(client, args.judge_model, question)
        letters = set(re.findall(r"\b[AB]\b", answer))
        if len(letters) != 1:
            return None
        answer_is_a = "A" in letters
        return float(answer_is_a == response_is_a)

    def judge(posts, responses):
        # Judges prefer the first or the second place, so the order is random.
        uniforms = torch.rand(len(posts), generator=generator_for(args.seed, "order of the two"))
        response_is_a = (uniforms < 0.5).tolist()
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(verdict, posts, responses, response_is_a))

    return judge


CHAT_TIMEOUT = 300  # seconds that a chat model may take for one answer


def chat_client(args):
    """A client for the server that judge_address names. The key of a server other than Hugging Face's is in
    OPENAI_API_KEY."""
    import httpx2  # comes with huggingface_hub
    import huggingface_hub

    url = judge_address(args)
    if url is None:
        return huggingface_hub.InferenceClient(timeout=CHAT_TIMEOUT)
    # With HF_HUB_OFFLINE, huggingface_hub's own client refuses every server, even one on this machine.
    huggingface_hub.set_client_factory(httpx2.Client)
    key = os.environ.get("OPENAI_API_KEY", "none")
    return huggingface_hub.InferenceClient(base_url=url, api_key=key, timeout=CHAT_TIMEOUT)


def ask_chat_model(client, model, question):
    """The answer to one question, after up to 4 attempts. -> str"""
    messages = [{"role": "user", "content": question}]
    for attempt in range(4):
        try:
            answer = client.chat_completion(messages, model=model, max_tokens=8, temperature=0.0)
            return answer.choices[0].message.content or ""
        except Exception as error:  # servers fail in many ways
            if attempt == 3:
                raise UserError(f"--judge-model {model}: no answer after 4 attempts: {error}") from error
            time.sleep(2**attempt)


def judge_policy(args):
    """The verb judge: the win rate of one model against the references, like TRL's judge_tldr.py.

    -> the metrics of win_rate; None on other processes than the main one
    """
    if args.bf16:
        args = replace(args, dtype="bfloat16")
    check_judge_args(args)
    check_reward_args(args)
    accelerator = start_accelerator(args)
    device = accelerator.device
    tokenizer = load_tokenizer(args.model_name_or_path)
    posts = load_posts(load_splits(args.dataset_name)[1], tokenizer, args)
    policy_name = args.sft_model_path or args.model_name_or_path
    policy = load_model(AutoModelForCausalLM, policy_name)
    check_head(policy, policy_name)
    check_context(policy, policy_name, max_tokens=longest_prompt(posts) + args.response_length)
    policy = policy.to(device).eval()
    stop_ids = find_stop_tokens(args, tokenizer, policy).to(device)
    judge_functions, reward = None, None
    if args.judge_fn is not None:
        judge_functions = load_reward_functions("--judge-fn", [args.judge_fn], device)
    elif args.judge_model is None:
        reward = load_summary_reward(args, device)
    judge = load_summary_judge(args, tokenizer, reward, judge_functions, device)

    posts = choose_held_out(posts, args)
    if not has_references(posts):
        raise UserError(
            f"data set {args.dataset_name!r}: judge needs reference summaries, a column completion"
        )
    prompt_batch = draw_groups(posts, 1, args, "held-out")  # one summary per post
    prompt_batch = {name: x.to(device) for name, x in prompt_batch.items()}
    with torch.autocast(device.type, torch.bfloat16, enabled=wants_bf16(args, device)):
        _, responses, _ = sample_responses(policy, tokenizer, prompt_batch, stop_ids, args)
        if not accelerator.is_main_process:
            return None
        result = {name: float(x) for name, x in win_rate(judge, posts, responses).items()}
    print(
        f"Model win rate: {result['win rate']:.2%} +- {result['+- (95 % interval)']:.2%} "
        f"({result['ties']:.1%} ties, {result['no verdict']:.1%} without verdict), n = {len(posts)}, "
        f"judge {judge_name(args)}, {describe_decoding(args)}"
    )
    return result


# ---- Data --------------------------------------------------------------------------------------------------


def load_data_set(name):
    """All splits of a Hub data set, NAME or NAME:CONFIG, or of a folder of jsonl files."""
    if not Path(name).exists():
        name, _, config = name.partition(":")
        return datasets.load_dataset(name, config or None)
    return datasets.load_dataset(name)


def load_splits(name):
    """The training and held-out rows of a data set.

    Held out: the split test, or else validation, or else the last 10 % of train.
    """
    splits = load("data set", load_data_set, name)
    if "train" not in splits or len(splits["train"]) < 2:
        names = ", ".join(splits)
        raise UserError(f"data set {name!r} needs a split train with at least 2 rows; it has {names}")
    rows = splits["train"]
    for held_out in ("test", "validation"):
        if held_out in splits:
            return rows, splits[held_out]
    cut = len(rows) - max(1, len(rows) // 10)
    return rows.select(range(cut)), rows.select(range(cut, len(rows)))


def bos_ids(tokenizer):
    """[BOS] if the tokenizer begins each text with it, as those of Llama and Gemma do; else []."""
    first = tokenizer("a").input_ids[:1]
    return first if first == [tokenizer.bos_token_id] else []


def tokenize(tokenizer, texts):
    """Token ids of each text, after BOS if the tokenizer puts it there. -> list of lists

    BOS is added only once, even if a text begins with it. Nothing is added at the end, because the response
    follows there.
    """
    if not texts:
        return []  # tokenizers raise for an empty list
    bos = bos_ids(tokenizer)
    all_ids = tokenizer(list(texts), add_special_tokens=False).input_ids
    return [ids if bos and ids[:1] == bos else bos + ids for ids in all_ids]


def decode(tokenizer, prompt_tokens, response_tokens):
    """The texts of prompts and responses, from lists of token ids. -> prompts, responses (lists of str)

    Some tokenizers drop the first space of what they decode. So prompt and response are decoded together, and
    the text of the prompt is cut off. Prompts keep special tokens (those of a chat template, for example) but
    not BOS, which the reward's own tokenizer adds. Responses have none.
    """
    bos = bos_ids(tokenizer)
    prompt_tokens = [ids[1:] if bos and ids[:1] == bos else ids for ids in prompt_tokens]
    full_tokens = [prompt + response for prompt, response in zip(prompt_tokens, response_tokens)]
    prompts = tokenizer.batch_decode(prompt_tokens)
    plain_prompts = tokenizer.batch_decode(prompt_tokens, skip_special_tokens=True)
    full_texts = tokenizer.batch_decode(full_tokens, skip_special_tokens=True)
    responses = []
    for prompt, text in zip(plain_prompts, full_texts):
        # Not len(prompt): a response may complete the last character of the prompt.
        start = len(os.path.commonprefix([prompt, text]))
        responses.append(text[start:])
    return prompts, responses


def report_skipped(total, kept, reason):
    """Tell the user how many rows of the data are not used, and why."""
    if kept < total and accelerate.PartialState().is_main_process:
        print(f"skipped {total - kept:,} of {total:,} {reason}")


def is_chat(value):
    """True for a list of messages: dicts with role and content, both str. Images and tool calls are not."""
    if not isinstance(value, list) or not value:
        return False
    for message in value:
        if not isinstance(message, dict):
            return False
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            return False
    return True


def render_chat(tokenizer, messages, add_generation_prompt=False):
    """The text of a list of messages, by the tokenizer's own chat template. -> str

    add_generation_prompt: end with the header of a new turn of the assistant. Raises UserError if there is no
    template, or if it refuses the messages.
    """
    if tokenizer.chat_template is None:
        raise UserError(
            f"the data has chats, but the tokenizer of {tokenizer.name_or_path} has no chat template: use a "
            "chat model, or one that sft.py trained with --chat-template-path FILE"
        )
    # datasets gives all messages the same keys, with None for those that a message did not have.
    messages = [{key: x for key, x in message.items() if x is not None} for message in messages]
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except Exception as error:  # templates raise what they like: about roles, for example
        roles = ", ".join(message["role"] for message in messages)
        raise UserError(f"the chat template refuses messages with the roles {roles}: {error}") from error


def plain_text(prompt):
    """A prompt for tables and judges: the text itself, or the messages of a chat, one below the other."""
    if not is_chat(prompt):
        return prompt
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def load_posts(rows, tokenizer, args):
    """The posts that are short enough. -> list of dict, each with

        ids        token ids of the prompt
        prompt     as in the data: a str, or a list of messages
        reference  str; "" if there is none
        columns    dict with all other columns of the row, for reward functions

    Raises UserError if there is no column prompt, or no post that is short enough.
    """
    names = rows.column_names
    if "prompt" not in names:
        raise UserError(f"data set {args.dataset_name!r} needs a column prompt; it has {', '.join(names)}")
    candidates, texts = [], []
    for row in rows:
        prompt = row.pop("prompt")  # what is left are the columns for reward functions
        reference = row.get("completion")
        if is_chat(reference):
            reference = reference[-1]["content"]
        if not isinstance(reference, str):
            reference = ""
        if is_chat(prompt):
            texts.append(render_chat(tokenizer, prompt, add_generation_prompt=True))
        elif isinstance(prompt, str) and prompt.strip():
            texts.append(prompt)
        else:
            continue
        candidates.append({"prompt": prompt, "reference": reference, "columns": row})
    posts = []
    for post, ids in zip(candidates, tokenize(tokenizer, texts)):
        if len(ids) <= args.max_prompt_length:
            posts.append(post | {"ids": ids})
    reason = f"no prompt of at most --max-prompt-length {args.max_prompt_length} tokens"
    report_skipped(len(rows), len(posts), f"rows: {reason}")
    if not posts:
        raise UserError(f"data set {args.dataset_name!r}: {reason}")
    return posts


def longest_prompt(rows):
    """The number of tokens of the longest prompt. rows: dicts with ids"""
    return max(len(row["ids"]) for row in rows)


def choose_held_out(posts, args):
    """num_examples of the held-out posts, in random order; of those with a reference, if there are any."""
    with_reference = [post for post in posts if post["reference"]]
    posts = with_reference or posts
    count = min(args.num_examples, len(posts))
    return [posts[row] for row in stream_rows(len(posts), start=0, count=count, seed=args.seed).tolist()]


def generator_for(seed, *purpose):
    """A random generator for one purpose, such as (seed, "tokens", update), independent of all others."""
    return torch.Generator().manual_seed(random.Random(repr((seed, *purpose))).getrandbits(63))


def stream_rows(num_rows, start, count, seed):
    """Row numbers start ... start + count - 1 of an endless stream of shuffled epochs. -> [count]"""
    first_epoch = start // num_rows
    last_epoch = (start + count - 1) // num_rows
    epochs = []
    for epoch in range(first_epoch, last_epoch + 1):
        epochs.append(torch.randperm(num_rows, generator=generator_for(seed, "pass", epoch)))
    offset = start - first_epoch * num_rows
    return torch.cat(epochs)[offset : offset + count]


def draw_groups(rows, k, args, *purpose):
    """Prompts padded on the left to the longest one, and random numbers to sample k responses to each.

    rows: P dicts with ids, the tokens of the prompt -> dict: ids [P, C], bool mask [P, C], uniforms [P, k, T]
    """
    prompts = [row["ids"] for row in rows]
    P, C = len(prompts), max(len(ids) for ids in prompts)
    ids = torch.zeros(P, C, dtype=torch.long)
    mask = torch.zeros(P, C, dtype=torch.bool)
    for i, prompt in enumerate(prompts):
        ids[i, C - len(prompt) :] = torch.tensor(prompt)
        mask[i, C - len(prompt) :] = True
    uniforms = torch.rand(k, P, args.response_length, generator=generator_for(args.seed, "tokens", *purpose))
    return {"ids": ids, "mask": mask, "uniforms": uniforms.transpose(0, 1)}


def find_stop_tokens(args, tokenizer, policy):
    """The ids of the tokens that end a response; none if responses end only at their limit. -> [any number]

    Chat models have several: the tokenizer's EOS, and the ends of a turn in the model's generation_config.
    """
    if args.stop_token_id is not None:
        return torch.tensor([args.stop_token_id])
    if args.stop_token is None:
        return torch.tensor([], dtype=torch.long)
    eos = policy.generation_config.eos_token_id  # an id, a list of ids, or None
    ids = set(eos if isinstance(eos, list) else [eos])
    ids = (ids | {tokenizer.eos_token_id}) - {None}
    if not ids:
        raise UserError("the tokenizer has no EOS token: use --stop-token-id, or --stop-token None")
    return torch.tensor(sorted(ids))


# ---- Processes and optimizer -------------------------------------------------------------------------------


def start_accelerator(args):
    """One process, or one of several (DDP, FSDP2, DeepSpeed) as accelerate was configured."""
    has_gpu = torch.cuda.is_available()
    uses_fsdp = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    uses_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
    if uses_fsdp and os.environ.get("FSDP_VERSION") != "2":
        raise UserError("FSDP 1 does not work here: set fsdp_version: 2 in accelerate's config")
    if os.environ.get("FSDP_ACTIVATION_CHECKPOINTING", "").lower() == "true":  # it renames the parameters
        raise UserError("use --gradient-checkpointing instead of fsdp_activation_checkpointing")
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # every process loads a whole model
    if not has_gpu and (uses_fsdp or uses_deepspeed):
        # accelerate shards on GPUs only, but does it on a CPU too if it believes that this is a GPU.
        accelerate.PartialState(cpu=True).distributed_type = accelerate.DistributedType.MULTI_GPU
    accelerator = accelerate.Accelerator(
        cpu=not has_gpu and not uses_fsdp and not uses_deepspeed,
        mixed_precision="no",  # autocast is explicit in train
        kwargs_handlers=[
            # Gradients are views of what DDP sends, so they are not kept twice.
            accelerate.DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),
            # The other processes wait while the main one evaluates, and a judge may take long.
            accelerate.InitProcessGroupKwargs(timeout=timedelta(hours=12)),
        ],
    )
    if accelerator.state.deepspeed_plugin is not None:
        configure_deepspeed(args, accelerator)
    torch.manual_seed(args.seed)  # for weights that start at random, such as LoRA's
    return accelerator


def configure_deepspeed(args, accelerator):
    """Batch, clipping and precision follow the flags, not what the config of DeepSpeed says."""
    bf16 = dict(enabled=wants_bf16(args, accelerator.device), dtype="bfloat16")
    accelerator.state.deepspeed_plugin.deepspeed_config |= dict(
        train_micro_batch_size_per_gpu=args.per_device_train_batch_size,
        gradient_accumulation_steps=1,  # train accumulates
        gradient_clipping=args.max_grad_norm or 0.0,
        torch_autocast=bf16,
    )
    transformers.integrations.deepspeed.unset_hf_deepspeed_config()  # it would load every model in shards


def wants_bf16(args, device):
    """True if matmuls should run in bf16: on request, or with dtype auto on a GPU that supports it."""
    if args.dtype == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return args.dtype == "bfloat16"


def find_optimizer(name):
    """The optimizer class with this dotted name."""
    optimizer_class = locate(name)
    if not isinstance(optimizer_class, type) or not issubclass(optimizer_class, torch.optim.Optimizer):
        raise UserError(f"--optimizer {name}: no such optimizer is installed; try torch.optim.AdamW")
    return optimizer_class


def make_optimizer(args, parameters):
    """The optimizer that --optimizer names, for a dict of parameters."""
    optimizer_class = find_optimizer(args.optimizer)
    options = dict(lr=args.learning_rate, eps=args.adam_eps, fused="Adam" in args.optimizer)
    accepted = inspect.signature(optimizer_class).parameters
    options = {name: value for name, value in options.items() if name in accepted}
    return optimizer_class(list(parameters.values()), **options)


def make_learner(model, accelerator):
    """The module to train: the model itself or, for FSDP2 and ZeRO-3, a copy that will be cut into shards.

    Sharded models cannot generate. So every process keeps a whole model for sampling, and copies the new
    weights into it after each update (`copy_weights`). The copy leaves out the reference.
    """
    plugin = accelerator.state.deepspeed_plugin
    shards_weights = accelerator.distributed_type == "FSDP" or (plugin is not None and plugin.zero_stage == 3)
    if not shards_weights:
        return model
    left_out = [getattr(model, "reference", None), getattr(model, "compiled_policy", None)]
    # deepcopy takes None from its memo instead of a copy.
    learner = copy.deepcopy(model, memo={id(part): None for part in left_out})
    learner._no_split_modules = [type(transformer_layers(model)[0]).__name__]  # FSDP2 shards layer by layer
    return learner


@torch.no_grad()
def copy_weights(parameters, model):
    """Copy the trained parameters (name -> parameter) into the whole model, if they are shards of a copy."""
    for name, p in trainable(model).items():
        trained = parameters[name]
        if trained is p:
            continue
        if hasattr(trained, "full_tensor"):  # FSDP2
            p.copy_(trained.full_tensor())
        else:  # ZeRO-3
            import deepspeed

            with deepspeed.zero.GatheredParameters([trained]):
                p.copy_(trained)


@contextmanager
def sync_gradients_if(is_last, accelerator, learner):
    """Exchange gradients between processes only in the last micro-batch of an optimizer step."""
    accelerator.sync_gradients = is_last  # DeepSpeed takes its step in the backward pass of the last one
    with nullcontext() if is_last else accelerator.no_sync(learner):
        yield


def clip_gradients(accelerator, parameters, max_norm):
    """Scale the gradients down to this norm; None: do not. -> the norm before that, a float"""
    norm = accelerator.clip_grad_norm_(parameters.values(), max_norm or math.inf)
    if hasattr(norm, "full_tensor"):  # FSDP2
        norm = norm.full_tensor()
    return float(norm)


def check_first_ratio(log_ratio, args, device):
    """Raise if a ratio is not 1 before the first optimizer step.

    Then rollout and update would compute different probabilities. bf16 and 8-bit weights round more.
    """
    tolerance = 0.2 if wants_bf16(args, device) or args.load_in_8bit else 1e-3
    gap = log_ratio.detach().abs().max().item() if log_ratio.numel() else 0.0
    if not gap < tolerance:
        raise UserError(
            f"before the first optimizer step, log-ratios are up to {gap:.2g} instead of 0: "
            "rollout and update do not compute the same probabilities with this model"
        )


@torch.no_grad()
def check_outputs(update, model, b, T, args):
    """Raise, before anything is saved, if the outputs for one row are not finite after an update."""
    outputs = model(b["ids"][:1], b["mask"][:1], T, args.temperature)  # [1, T] each
    valid = b["mask"][:1, -T:]
    if not all(x[valid].isfinite().all() for x in outputs):
        raise UserError(f"update {update} is not saved: outputs are not finite; lower --learning-rate")


def peak_memory_mb(device):
    """The most memory that was in use: of the GPU, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    unit = 1 if sys.platform == "darwin" else 1024  # macOS reports bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def performance_metrics(start_time, rollout_end, num_tokens, device):
    """Speed of an update that started at start_time and whose rollout ended at rollout_end; peak memory."""
    now = time.time()
    return {
        "perf/seconds": now - start_time,
        "perf/rollout_seconds": rollout_end - start_time,
        "perf/train_seconds": now - rollout_end,
        "perf/tokens_per_second": num_tokens / (now - start_time),
        "perf/peak_memory_mb": peak_memory_mb(device),
    }


# ---- Run folder and screen ---------------------------------------------------------------------------------


class Run:
    """The run folder (args.json, metrics.jsonl, samples.jsonl, checkpoints/, ...), the screen, and resuming.

    Only the main process writes and prints. A file is written under another name and then renamed, so that
    killing the process never leaves half a file.
    """

    def __init__(self, args, accelerator, updates, status):
        """status: label -> metric, for the metrics shown next to the progress bar"""
        self.args = args
        self.accelerator = accelerator
        self.updates = updates
        self.status = status
        self.folder = self.choose_folder()
        self.signal_number = 0  # of a signal that asked us to stop
        self.skipped_steps = 0  # in a row
        self.last_skip = 0  # the update of the last one
        self.warnings_shown = set()  # names of metrics
        self.last_line_time = 0.0

        is_main = accelerator.is_main_process
        self.console = Console(
            highlight=False, markup=False, soft_wrap=not sys.stdout.isatty(), quiet=not is_main
        )
        self.bar = Progress(
            "{task.completed}/{task.total}",
            BarColumn(20),
            TimeRemainingColumn(),
            "{task.description}",
            console=self.console,
            disable=not (is_main and self.console.is_terminal),
        )
        self.task = self.bar.add_task("", total=updates)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.on_signal)
        if is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not args.resume:  # else restore writes it, if the run can be resumed with these flags
                self.write("args.json", json.dumps(self.describe(), indent=2))
        if args.log_with != "none":
            accelerator.log_with = [args.log_with]
            accelerator.project_configuration.logging_dir = str(self.folder)
            config = {name: str(value) for name, value in asdict(args).items()}
            accelerator.init_trackers(SCRIPT, config, init_kwargs={"wandb": {"name": self.folder.name}})

    def choose_folder(self):
        """The same folder on all processes. A new run must not write into the folder of another one."""
        name = self.args.output_dir
        if name is None and self.accelerator.is_main_process:
            now = time.strftime("%Y%m%d-%H%M%S")
            name = make_new_folder(f"runs/{SCRIPT}/{self.args.recipe}-s{self.args.seed}-{now}")
        name, resume = accelerate.utils.broadcast_object_list([name, self.args.resume])
        if Path(name).is_file():
            raise UserError(f"--output-dir {name} is a file")
        holds_run = any((Path(name) / file).exists() for file in ("args.json", "metrics.jsonl"))
        if holds_run and not resume:
            raise UserError(f"{name} holds a run: continue it with --resume, or choose another --output-dir")
        self.accelerator.wait_for_everyone()  # nobody writes before everybody has looked
        return Path(name)

    def describe(self):
        """What args.json holds."""
        return {
            "args": asdict(self.args),
            "command": sys.argv,
            "versions": {m.__name__: m.__version__ for m in (torch, transformers, datasets, accelerate)},
            "commit": git_commit(),
            "world_size": self.accelerator.num_processes,
        }

    def on_signal(self, number, frame):
        """Finish the update, save, and stop. A second signal stops at once."""
        self.signal_number = number
        signal.signal(number, signal.SIG_DFL)

    def print(self, text, style=None):
        self.console.print(text, style=style)

    def print_setup(self, job, model):
        """The first lines on the screen: what runs, where, and how much of the model is trained."""
        device = self.accelerator.device
        dtype = "bfloat16" if wants_bf16(self.args, device) else "float32"
        trained = sum(p.numel() for p in trainable(model).values())
        total = sum(p.numel() for p in model.parameters())
        self.print(f"recipe {self.args.recipe}: {job}, {device}, {dtype}; run folder {self.folder}")
        if self.args.recipe == "custom":
            self.print(
                "custom: a model was named, so all other flags begin with the published defaults of Args"
            )
            self.print(f"flags that differ from recipe tiny: {flags_that_differ(self.args, RECIPES['tiny'])}")
        else:
            differ = flags_that_differ(self.args, RECIPES[self.args.recipe])
            self.print(f"flags that differ from the recipe: {differ or 'none'}")
        self.print(f"{trained:,} of {total:,} parameters are trained ({trained / total:.2%})")

    # -- Files and tables --

    def write(self, name, text):
        draft = self.folder / f".{name}"
        draft.write_text(text)
        os.replace(draft, self.folder / name)

    def append(self, name, rows):
        if self.accelerator.is_main_process:
            with open(self.folder / name, "a") as file:
                for row in rows:
                    file.write(json.dumps(row) + "\n")

    def log(self, metrics, warnings=None):
        """Log one update: to metrics.jsonl, to the tracker (under train/, as TRL does) and to the screen.

        warnings: dict of metric -> text. Each metric is warned about only once in a run.
        """
        update = metrics["update"]
        not_finite = [name for name, x in metrics.items() if not math.isfinite(x)]
        if not_finite and self.last_skip != update:
            names = ", ".join(not_finite)
            raise UserError(f"update {update} is not saved, not finite: {names}; lower --learning-rate")
        self.append("metrics.jsonl", [metrics])
        self.accelerator.log({f"train/{name}": x for name, x in metrics.items()}, step=update)

        shown = "  ".join(f"{label} {metrics[name]:.3g}" for label, name in self.status.items())
        self.bar.start()
        self.bar.update(self.task, completed=update, description=shown)
        if update == self.updates:
            self.bar.stop()  # before the final tables
        is_due = time.time() - self.last_line_time > 10 or update == self.updates
        if self.bar.disable and is_due:  # not a terminal: print a line now and then
            self.last_line_time = time.time()
            self.print(f"update {update}/{self.updates}  {shown}")
        for name, warning in (warnings or {}).items():
            if name not in self.warnings_shown:
                self.warnings_shown.add(name)
                self.print(f"update {update}: {warning}", style="yellow")

    def table(self, title, rows, file=None, **extra):
        """Print dicts as the rows of a table. With a file, also append them to it, plus `extra`."""
        has_long_text = any(isinstance(cell, str) and len(cell) > 40 for row in rows for cell in row.values())
        table = Table(title=title, title_justify="left", show_lines=has_long_text)
        for name, cell in rows[0].items():
            table.add_column(name, justify="left" if isinstance(cell, str) else "right", overflow="fold")
        for row in rows:
            table.add_row(*[f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row.values()])
        self.console.print(table, soft_wrap=False)
        if file is not None:
            rows = [extra | row for row in rows]
            self.append(file, rows)
            if self.accelerator.is_main_process:
                self.track_table(Path(file).stem, rows, extra["update"])

    def track_table(self, name, rows, step):
        """Send a table of samples to the tracker: a table for wandb, text for tensorboard."""
        columns = list(rows[0])
        data = [list(row.values()) for row in rows]
        if self.args.log_with == "wandb":
            self.accelerator.get_tracker("wandb").log_table(name, columns=columns, data=data, step=step)
        elif self.args.log_with == "tensorboard":
            lines = [columns, ["---"] * len(columns), *data]
            cells = [[" ".join(str(cell).split()).replace("|", "&#124;") for cell in line] for line in lines]
            text = "\n".join(" | ".join(line) for line in cells)
            self.accelerator.get_tracker("tensorboard").tracker.add_text(name, text, step)

    def write_evaluation(self, about):
        """evaluation.json. Its numbers also go to the tracker, under eval/."""
        self.write("evaluation.json", json.dumps(about, indent=2))
        numbers = {}
        for part, values in about.items():
            if isinstance(values, dict):
                numbers |= {f"eval/{part}/{name}": x for name, x in values.items()}
            else:
                numbers[f"eval/{part}"] = values
        numbers = {name: x for name, x in numbers.items() if isinstance(x, (int, float))}
        self.accelerator.log(numbers, step=self.updates)

    def plot(self, titles, targets):
        """curves.png: metrics over the updates, each value, and the mean of the last 5 % of the run.

        titles: metric -> title with the unit; targets: metric -> value to draw as a dashed line, or None
        """
        from matplotlib.figure import Figure

        rows = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        window = max(1, len(rows) // 20)
        figure = Figure(figsize=(4 * len(titles), 3.2), layout="constrained")
        figure.suptitle(f"{SCRIPT}.py {self.args.recipe}, seed {self.args.seed}")
        axes = figure.subplots(1, len(titles), squeeze=False)[0]
        for axis, (name, title) in zip(axes, titles.items()):
            points = [(row["update"], row[name]) for row in rows if name in row]
            updates = [update for update, _ in points]
            values = [value for _, value in points]
            last_values = [values[max(0, i + 1 - window) : i + 1] for i in range(len(values))]
            axis.plot(updates, values, color="tab:blue", alpha=0.3)
            axis.plot(updates, [sum(part) / len(part) for part in last_values], color="tab:blue")
            target = targets.get(name)
            if target is not None:
                axis.axhline(target, color="gray", linestyle="--", label=f"target {target:g}")
                axis.legend()
            axis.set_title(title, fontsize=10)
            axis.set_xlabel("update")
            axis.grid(alpha=0.3)
        figure.savefig(self.folder / "curves.png", dpi=120)

    def check_gradient(self, update, grad_norm):
        """Warn that a step will be skipped if its gradient is not finite. Five in a row end the run."""
        if math.isfinite(grad_norm):
            self.skipped_steps = 0
            return
        if self.deepspeed_engine() is not None:
            raise UserError(
                f"update {update}: gradient not finite, after DeepSpeed took the step; use FSDP2 or DDP"
            )
        self.skipped_steps += 1
        self.last_skip = update
        message = f"update {update}: gradient not finite, step skipped ({self.skipped_steps} in a row)"
        self.print(message, style="yellow")
        if self.skipped_steps == 5:
            raise UserError(
                "5 gradients in a row were not finite: lower --learning-rate, or use --dtype float32"
            )

    def finish(self):
        """Wait until the main process has saved everything, because torchrun would stop it."""
        self.bar.stop()
        if self.accelerator.is_main_process:  # the last checkpoint is enough now
            for old in sorted((self.folder / "checkpoints").glob("[0-9]*"))[:-1]:
                shutil.rmtree(old)
        self.print(f"saved {self.folder / 'model'}")
        self.accelerator.wait_for_everyone()
        self.accelerator.end_training()

    # -- Checkpoints --

    def sharding(self):
        """DeepSpeed's checkpoints fit only this stage and number of processes; ours ("") fit any."""
        engine = self.deepspeed_engine()
        if engine is None:
            return ""
        return f"ZeRO-{engine.zero_optimization_stage()} on {self.accelerator.num_processes} processes"

    def deepspeed_engine(self):
        wrapper = getattr(self.accelerator, "deepspeed_engine_wrapped", None)
        return None if wrapper is None else wrapper.engine

    def checkpoint(self, update, parameters, optimizer, batch_size, **extra):
        """Save everything that decides the rest of the run, if it is due. After a signal: save, then exit."""
        signals = torch.tensor([self.signal_number], device=self.accelerator.device)
        signal_number = int(self.accelerator.gather(signals).max())  # any process may have got it
        is_last = update == self.updates
        is_due = self.args.save_every > 0 and update % self.args.save_every == 0
        if is_due or is_last or signal_number:
            self.save_checkpoint(update, parameters, optimizer, batch_size, extra)
        if signal_number and not is_last:
            self.bar.stop()
            self.print(f"stopped by signal {signal_number}")
            self.print(f"to continue: python {SCRIPT}.py --resume {self.folder}")
            sys.exit(128 + signal_number)

    def save_checkpoint(self, update, parameters, optimizer, batch_size, extra):
        """Write checkpoints/<update>. The folder gets its name when it is complete, so a kill leaves the
        last one good."""
        folder = self.folder / "checkpoints" / f"{update:06d}"
        draft = folder.with_name(f".{folder.name}")
        engine = self.deepspeed_engine()
        tensors = {}
        if engine is None:
            weights = {name: p.detach() for name, p in parameters.items()}
            if not all(torch.isfinite(p).all() for p in weights.values()):
                raise UserError(
                    f"update {update} is not saved: weights are not finite; lower --learning-rate"
                )
            tensors = dict(parameters=self.unshard(weights), optimizer=self.unshard(optimizer.state_dict()))
        else:
            engine.save_checkpoint(str(draft), tag="deepspeed")  # every process writes its shards
            self.accelerator.wait_for_everyone()
        if not self.accelerator.is_main_process:
            return
        state = {
            "update": update,
            "batch_size": batch_size,
            "sharding": self.sharding(),
            "rng": {"torch": torch.get_rng_state(), "python": random.getstate()},  # of your reward function
            **tensors,
            **extra,
        }
        draft.mkdir(parents=True, exist_ok=True)
        try:
            with open(draft / "state.pt", "wb") as file:
                torch.save(state, file)
                os.fsync(file.fileno())
        except (OSError, RuntimeError) as error:  # a full disk
            shutil.rmtree(draft)
            raise UserError(f"cannot save {folder}: {error.__context__ or error}") from error
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(draft, folder)
        keep = max(self.args.keep_checkpoints, 1)
        for old in sorted(folder.parent.glob("[0-9]*"))[:-keep]:
            shutil.rmtree(old)

    def unshard(self, x):
        """Put the shards of FSDP2 together, in nested dicts too. The main process gets the result."""
        if isinstance(x, dict):
            return {key: self.unshard(value) for key, value in x.items()}
        if not hasattr(x, "full_tensor"):
            return x
        full = x.full_tensor()
        return full.cpu() if self.accelerator.is_main_process else None

    def restore(self, parameters, optimizer, batch_size):
        """Load the checkpoint that --resume names, or the newest. -> its state; {"update": 0} if new"""
        state = {"update": 0}
        checkpoints = sorted((self.folder / "checkpoints").glob("[0-9]*"))
        if self.args.resume and checkpoints:
            asked = Path(self.args.resume).resolve()
            chosen = checkpoints[-1]
            for path in checkpoints:
                if path.resolve() == asked:
                    chosen = path
            path = str(chosen / "state.pt")
            state = load("checkpoint", torch.load, path, map_location="cpu", weights_only=True)
            self.check_resumable(chosen, state, batch_size)
            self.load_checkpoint(chosen, state, parameters, optimizer)
            self.print(f"resumed after update {state['update']}, from {chosen}")
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process and self.args.resume:
            self.write("args.json", json.dumps(self.describe(), indent=2))
            self.forget_after(state["update"])
        return state

    def check_resumable(self, folder, state, batch_size):
        if state["batch_size"] != batch_size:
            raise UserError(
                f"--resume {folder}: its batch was {state['batch_size']}, this one is {batch_size}: change "
                "--per-device-train-batch-size or --gradient-accumulation-steps so that it stays the same"
            )
        if state["sharding"] != self.sharding():
            was = state["sharding"] or "without DeepSpeed"
            raise UserError(f"--resume {folder}: that run was {was}, and it must stay so")

    def load_checkpoint(self, folder, state, parameters, optimizer):
        engine = self.deepspeed_engine()
        if engine is not None:
            engine.load_checkpoint(str(folder), tag="deepspeed")
        else:
            for name, p in parameters.items():
                p.data.copy_(shard_like(state["parameters"][name], p))
            in_order = [p for group in optimizer.param_groups for p in group["params"]]
            for i, moments in state["optimizer"]["state"].items():
                for name, value in moments.items():
                    moments[name] = shard_like(value, in_order[i])
            optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"]["torch"])
        random.setstate(state["rng"]["python"])

    def forget_after(self, update):
        """Delete what a run wrote after the checkpoint that it continues from: it will be written again."""
        for path in (self.folder / "checkpoints").glob("*"):
            if path.name.startswith(".") or int(path.name) > update:
                shutil.rmtree(path)
        for name in ("metrics.jsonl", "samples.jsonl", "tokens.jsonl"):
            if (self.folder / name).exists():
                lines = (self.folder / name).read_text().splitlines(keepends=True)
                complete = [line for line in lines if line.endswith("\n")]  # a kill can tear the last one
                kept = [line for line in complete if json.loads(line)["update"] <= update]
                self.write(name, "".join(kept))


def make_new_folder(name):
    """Make a folder of this name; NAME-2, NAME-3, ... if other runs began in the same second. -> its name"""
    folder = Path(name)
    number = 1
    while True:
        try:
            folder.mkdir(parents=True)
            return str(folder)
        except FileExistsError:
            number += 1
            folder = Path(f"{name}-{number}")


def git_commit():
    """The commit of the repository that holds this script; "" if there is none, or no git."""
    try:
        command = ["git", "rev-parse", "HEAD"]
        return subprocess.run(command, cwd=HERE, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:  # git is not installed
        return ""


def shard_like(value, p):
    """The shard of a tensor that belongs to the parameter p if p is sharded (FSDP2); else the tensor."""
    if not hasattr(p, "full_tensor") or getattr(value, "shape", None) != p.shape:
        return value
    value = value.to(p.device)
    return torch.distributed.tensor.distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None)


def flags_that_differ(args, recipe):
    """The flags of a run that differ from those of a recipe, with its values. -> str"""
    differ = []
    for name, value in asdict(args).items():
        usual = getattr(recipe, name)
        if value != usual and name not in ("recipe", "resume", "output_dir"):
            differ.append(f"--{name.replace('_', '-')} {value} ({usual})")
    return ", ".join(differ)


def to_numbers(metrics):
    """Replace the tensors in a dict of metrics by Python numbers."""
    return {name: x.item() if isinstance(x, torch.Tensor) else x for name, x in metrics.items()}


def is_sample_update(update, updates, args):
    """True in about num_sample_generations updates of the run, evenly spaced."""
    count = args.num_sample_generations
    return count > 0 and update % max(1, updates // count) == 0


@torch.no_grad()
def save_tokens(run, update, model, tokenizer, b, rows, scores, columns):
    """Append some responses of the batch to tokens.jsonl, token by token. report.py shows them.

    rows: which responses, a list or range of int; scores [B]: what they were paid; columns: name -> [B, T],
    what to save for each token. Added are its log-probability under the policy that sampled it, and its ratio
    and the entropy under the new policy: call this after the update.
    """
    rows = torch.tensor(list(rows))
    T = b["sampling_logprobs"].shape[1]
    C = b["ids"].shape[1] - T
    new_logprobs, entropies = [], []
    for part in rows.split(run.args.per_device_train_batch_size):
        outputs = model(b["ids"][part], b["mask"][part], T, run.args.temperature)
        new_logprobs.append(outputs[0])
        entropies.append(outputs[1])
    # With one step per batch, grpo_math.py has no old log-probabilities. Those from generation are close.
    old_logprobs = b.get("logprobs", b["sampling_logprobs"])[rows]
    columns = {name: x[rows] for name, x in columns.items()}
    columns["logprob"] = old_logprobs
    columns["ratio"] = (torch.cat(new_logprobs) - old_logprobs).exp()
    columns["entropy"] = torch.cat(entropies)

    lines = []
    for i, row in enumerate(rows.tolist()):
        length = int(b["lengths"][row])
        prompt = b["ids"][row, :C][b["mask"][row, :C]].tolist()
        response = b["ids"][row, C : C + length].tolist()
        line = {
            "update": update,
            "prompt": tokenizer.decode(prompt),
            "tokens": token_pieces(tokenizer, response),
            "ids": response,
            "score": float(scores[row]),
        }
        line |= {name: [round(value, 4) for value in x[i, :length].tolist()] for name, x in columns.items()}
        lines.append(line)
    run.append("tokens.jsonl", lines)


def token_pieces(tokenizer, ids):
    """The text that each token adds. Decoding each token by itself would lose spaces with some tokenizers.

    A character of several tokens belongs to the last of them.
    """
    pieces = []
    shown = ""
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:end])
        if text.endswith("\N{REPLACEMENT CHARACTER}") and end < len(ids):
            pieces.append("")  # not a whole character yet
        else:
            pieces.append(text[len(shown) :])
            shown = text
    return pieces


def health_warnings(metrics, args, new_word):
    """What looks unhealthy in the metrics of an update, with the likely cause. -> dict: metric -> warning

    new_word: from commonest_new_word. A batch is small, so only a clear case counts: a word in every fourth
    response, in at least 10 of them, and five times as common as before training.
    """
    warnings = {}
    if metrics["objective/kl"] < -1:
        warnings["objective/kl"] = (
            "the KL is negative: are tokens sampled from the distribution that is scored?"
        )
    if not 0.5 < metrics["val/ratio"] < 2:
        warnings["val/ratio"] = "the ratio is far from 1: lower --learning-rate or --num-ppo-epochs"
    if metrics["policy/entropy_avg"] < 0.1:
        warnings["policy/entropy_avg"] = (
            "the entropy is almost 0: the policy always says the same; raise --kl-coef"
        )
    if metrics["env/reward_std"] == 0:
        warnings["env/reward_std"] = "all rewards are equal: there is nothing to learn from"
    if metrics.get("frac_reward_zero_std", 0) > 0.5:
        warnings["frac_reward_zero_std"] = (
            "most prompts get equal rewards for all responses: raise --temperature or --rloo-k"
        )
    if args.missing_eos_penalty is not None and metrics["val/num_eos_tokens"] == 0:
        warnings["val/num_eos_tokens"] = (
            "no response ended by itself: raise --response-length, or teach the policy EOS first"
        )
    word, share_before, share = new_word
    batch_size = metrics["episode"] / metrics["update"]
    if share >= 0.25 and share * batch_size >= 10 and share >= 5 * share_before:
        warnings["completions/new_word_share"] = (
            f'"{word}" is in {share:.0%} of the responses, before training in {share_before:.0%}: is the '
            "policy exploiting the reward? Read the samples. A higher --kl-coef keeps it near the reference"
        )
    return warnings


def new_word_row(texts_before, texts_after):
    """The commonest new word and its share, as a row of the final table. -> dict(metric, before, after)"""
    word, share_before, share_after = commonest_new_word(texts_before, texts_after)
    return {"metric": f'commonest new word: "{word}"', "before": share_before, "after": share_after}


def report_collapse(run, new_word, distinct_before, distinct_after):
    """Warn if a word took over, or if the responses became more alike. new_word: from new_word_row"""
    if new_word["after"] > MAX_NEW_WORD_SHARE:
        run.print(
            f"{new_word['metric']} is in {new_word['after']:.0%} of the responses, before in "
            f"{new_word['before']:.0%}. The policy may exploit the reward, so the score alone proves "
            "nothing: read evaluation_samples.jsonl",
            style="yellow",
        )
    variety = distinct_after / max(distinct_before, 1e-9)
    if variety < MIN_VARIETY:
        run.print(
            f"the responses repeat each other: distinct bigrams are at {variety:.0%} of their first value",
            style="yellow",
        )


def report_summaries(run, posts, before, after):
    """The final tables, evaluation.json, evaluation_samples.jsonl and curves.png."""
    args = run.args
    metrics_before, samples_before = before
    metrics_after, samples_after = after
    rows = []
    for post, old, new in zip(posts, samples_before, samples_after):
        rows.append({
            "prompt": old["prompt"],
            "reference": post["reference"],
            "before": old["response"],
            "score": old["score"],
            "after": new["response"],
            "score after": new["score"],
            **{f"{name} after": x for name, x in new.items() if name not in RECORD_COLUMNS},
        })  # fmt: skip
    for i, row in enumerate(rows[:3]):
        run.table(f"held-out post {i + 1}", [
            {"": "post", "text": row["prompt"], "score": ""},
            {"": "reference", "text": row["reference"], "score": ""},
            {"": "before", "text": row["before"], "score": f"{row['score']:.3f}"},
            {"": "after", "text": row["after"], "score": f"{row['score after']:.3f}"},
        ])  # fmt: skip
    comparison = []
    for name, value in metrics_before.items():
        comparison.append({"metric": name, "before": value, "after": metrics_after[name]})
    decoding = describe_decoding(args)
    new_word = new_word_row([row["before"] for row in rows], [row["after"] for row in rows])
    run.table(f"{len(rows)} held-out posts", [*comparison, new_word])
    run.print(f"judge: {judge_name(args)}; {decoding}")
    report_collapse(run, new_word, metrics_before["distinct bigrams"], metrics_after["distinct bigrams"])
    about = {
        "before": metrics_before,
        "after": metrics_after,
        "commonest new word": new_word,
        "n": len(rows),
        "judge": judge_name(args),
        "decoding": decoding,
    }
    run.write_evaluation(about)
    run.write("evaluation_samples.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    titles = {
        "objective/scores": "score",
        "objective/kl": "KL to the reference, nats per response",
        "completions/clipped_ratio": "responses without a stop token, fraction",
        "completions/mean_length": "tokens per response",
    }
    if args.judge_fn is not None:
        titles["judge/scores"] = "gold score (--judge-fn)"
    run.plot(titles, targets={})


def describe_decoding(args):
    return f"sampling, temperature {args.temperature}, at most {args.response_length} tokens"


# ---- Command line ------------------------------------------------------------------------------------------


def check_positive(args, *names):
    """Raise if a size is 0 or less, before anything is loaded."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise UserError(f"--{name.replace('_', '-')} must be more than 0; it is {value}")


def check_rloo_args(args, local_batch_size):
    """Raise for flags that cannot work, before anything is loaded."""
    check_positive(args, "per_device_train_batch_size", "gradient_accumulation_steps", "num_mini_batches")
    check_positive(args, "num_ppo_epochs", "total_episodes")
    check_model_args(args)
    check_judge_args(args)
    check_reward_args(args)
    if args.rloo_k < 2 or local_batch_size % args.rloo_k:
        raise UserError(
            f"--rloo-k {args.rloo_k} must be 2 or more and divide the {local_batch_size} episodes of a "
            "process: per_device_train_batch_size x gradient_accumulation_steps x num_mini_batches"
        )
    if args.kl_in_loss and args.kl_estimator == "k1":
        raise UserError("--kl-in-loss: the gradient of k1 is 0 on average; add --kl-estimator k3, or k2")
    if not args.kl_in_loss and args.kl_estimator != "k1":
        raise UserError(
            f"--kl-estimator {args.kl_estimator}: in the reward, only k1 has the gradient of the KL; "
            "add --kl-in-loss"
        )
    if args.missing_eos_penalty is not None and args.stop_token is None and args.stop_token_id is None:
        raise UserError("--missing-eos-penalty without a stop token would penalize all responses alike")


def check_judge_args(args):
    """Raise for flags of sampling and judging that cannot work."""
    check_positive(args, "num_examples", "temperature", "response_length", "max_prompt_length")
    check_positive(args, "local_rollout_forward_batch_size")
    if args.judge_url is not None and args.judge_model is None:
        raise UserError("--judge-url needs --judge-model: the name of the model on that server")


def check_reward_args(args):
    """Raise if there is not one weight for each reward function."""
    if args.reward_fn == []:
        raise UserError("--reward-fn: expected one FILE.py:function or more")
    count = len(args.reward_fn or [])
    if args.reward_weights is not None and len(args.reward_weights) != count:
        raise UserError(
            f"--reward-weights: {len(args.reward_weights)} weights for {count} functions of --reward-fn"
        )


def check_model_args(args):
    """Raise for an unknown optimizer, and for model flags that do not go together."""
    find_optimizer(args.optimizer)
    uses_fsdp = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    if args.lora_r < 0:
        raise UserError(f"--lora-r must be 0 (no LoRA) or more; it is {args.lora_r}")
    if args.num_shared_layers < 0:
        raise UserError(f"--num-shared-layers must be 0 or more; it is {args.num_shared_layers}")
    if args.num_shared_layers and (args.lora_r or args.load_in_8bit):
        raise UserError("--num-shared-layers cannot be combined with --lora-r or --load-in-8bit")
    if args.load_in_8bit and args.lora_r and uses_fsdp:
        raise UserError("--load-in-8bit: FSDP2 cannot shard 8-bit weights; use ZeRO or DDP")


def parse_args(argv):
    """The command line: an optional recipe, then flags. -> Args

    No recipe and no model: the recipe tiny. A model but no recipe: everything else has the defaults of Args.
    """
    model_flags = ("--model-name-or-path", "--sft-model-path", "--from-config")
    names_model = any(word.split("=")[0].replace("_", "-") in model_flags for word in argv)
    recipe, flags = "custom" if names_model else "tiny", argv
    if argv and not argv[0].startswith("-"):
        recipe, flags = argv[0], argv[1:]
        if recipe not in RECIPES:
            raise UserError(f"there is no recipe {recipe!r}; the recipes are {', '.join(RECIPES)}")
    default = replace(RECIPES.get(recipe, Args()), recipe=recipe)
    description = f"{__doc__.splitlines()[0]} The first word may be a recipe: {', '.join(RECIPES)}."
    args = tyro.cli(Args, default=default, args=flags, description=description)
    if args.resume is None:
        return args
    return resumed_args(args.resume, argv[0] if flags is not argv else None, flags)


def resumed_args(resume, recipe, flags):
    """The flags of the run to continue. Flags that would change its result are refused."""
    folder = Path(resume)
    if resume == "latest":
        runs = Path("runs", SCRIPT)  # runs with an --output-dir elsewhere are not found
        newest = max(runs.glob("*/args.json"), key=os.path.getmtime, default=None)
        if newest is None:
            raise UserError(f"--resume latest: there is no run in {runs}; name the --output-dir of your run")
        folder = newest.parent
    if not folder.exists():
        raise UserError(f"--resume {resume}: there is no such run or checkpoint")
    if folder.parent.name == "checkpoints":
        folder = folder.parent.parent
    try:
        saved = Args(**json.loads((folder / "args.json").read_text())["args"])
    except (OSError, TypeError, KeyError, ValueError) as error:
        raise UserError(f"--resume {resume}: not a run of this script and version: {error}") from error
    if recipe is not None and recipe != saved.recipe:
        raise UserError(f"--resume {resume}: that run has the recipe {saved.recipe}, not {recipe}")

    args = tyro.cli(Args, default=saved, args=flags)
    # Flags that may differ from those of the saved run. Run.restore makes sure that the batch stays the same.
    may_change = {
        "resume",
        "save_every",
        "keep_checkpoints",
        "log_with",
        "total_episodes",
        "num_train_epochs",
    }
    may_change |= {"per_device_train_batch_size", "gradient_accumulation_steps"}
    may_change |= {"judge_fn", "judge_model", "judge_url"}
    changed = [name for name, value in asdict(args).items() if value != getattr(saved, name)]
    changed = [name for name in changed if name not in may_change]
    if changed:
        raise UserError(f"--resume {folder} would change {', '.join(changed)}; start a new run for that")
    return replace(args, output_dir=str(folder))


def run_command_line(function, *inputs):
    """Call function(*inputs). Errors that the user can fix print one line, with exit code 2."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns about a kernel we do not use
    warnings.filterwarnings("ignore", category=FutureWarning)  # libraries that use old names of each other
    warnings.filterwarnings("ignore", message="fan_in_fan_out")  # peft, about GPT-2; it does the right thing
    for library in (transformers, datasets):
        library.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
    try:
        function(*inputs)
    except (UserError, UnicodeDecodeError) as error:  # the latter: data that is not UTF-8
        line = str(error)
    except ModuleNotFoundError as error:
        line = f"these flags need the package {error.name}: pip install {error.name}"
    except (OSError, SafetensorError) as error:  # a full disk, a folder that is not writable
        line = f"{error}; --resume continues from the last checkpoint"
    else:
        return
    finally:
        Console().show_cursor()  # the progress bar hid it
    print(f"{SCRIPT}.py: {' '.join(line.split())}", file=sys.stderr)
    sys.exit(2)


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["judge"]:
        run_command_line(lambda: judge_policy(without_foreign_judge(parse_args(argv[1:]))))
    else:
        run_command_line(lambda: train(without_foreign_judge(parse_args(argv))))


if __name__ == "__main__":
    main()
