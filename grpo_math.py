"""GRPO (group relative policy optimization) that teaches a language model to do arithmetic.

GRPO is PPO without a value function: each task gets several responses, and a response is good if its reward
is above the average of its group. If you know RLOO from rloo_tldr.py, this is what changes:

1. Rewards are verifiable: a function compares the final answer with the known one (`data/math_rewards.py`).
   No reward model is trained, and nobody has to compare responses. There is no penalty for a missing EOS: a
   response that is cut off before its answer is simply wrong.
2. The advantage of a response is its reward minus the mean reward of its group, divided by the group's
   standard deviation (`grpo_advantages`). If all rewards of a group are equal, for example because all
   responses are right, the advantages are 0 and the group teaches nothing.
3. Every token is an action. All tokens of a response have its advantage, but each one has a ratio and a clip
   of its own, as in PPO. In RLOO the whole response has one.
4. The loss is the sum over all tokens of the minibatch, divided by the number of tokens, as in DAPO (Yu et
   al. 2025). At ratios of 1, RLOO's gradient is such a sum over tokens too, divided by the number of
   responses. So in both, each token has the same weight. The original GRPO (Shao et al. 2024) averages within
   each response first, so a token of a long response has less weight.
5. A KL penalty, if there is one, is a term of the loss (k3), not of the reward. By default there is none, as
   in DAPO, and then no reference model is needed.
6. By default there is one optimizer step per batch of rollouts. The policy that is trained is then still the
   one that sampled: every ratio is 1, and nothing is clipped. What is left is REINFORCE with the advantages
   of point 2. Ratios matter with --num-mini-batches or --num-ppo-epochs above 1.
7. Before and after training, held-out tasks are solved several times each. pass@1 is the share of responses
   that are right; pass@k, the share of tasks with at least one right response among k.

    python grpo_math.py                              # recipe tiny: no download, no GPU, minutes on 2 cores
    python grpo_math.py --learning-rate 1e-4         # tiny with one change; every field of Args is a flag
    python grpo_math.py gsm8k-qwen-0.5b              # Qwen2.5-0.5B-Instruct on GSM8K, from the Hub
    python grpo_math.py --reward-fn mine.py:correct mine.py:format --reward-weights 1 0.2
    accelerate launch grpo_math.py gsm8k-qwen-1.5b   # on N GPUs, with N times the batch
    python grpo_math.py --resume latest              # continue a run that was stopped, bit for bit

Part I is the algorithm. Part II is infrastructure: models, rewards, data, processes, run folder, flags.
Papers: DeepSeekMath (GRPO, Shao et al. 2024), DAPO (Yu et al. 2025), Understanding R1-Zero-Like Training
(Dr. GRPO, Liu et al. 2025), Back to Basics (RLOO, Ahmadian et al. 2024), PPO (Schulman et al. 2017),
"Approximating KL divergence" (k3, Schulman 2020). TRL is Hugging Face's library of trainers.
Results, metrics, variants, and which lines to change for what: docs/grpo_math.md.
"""

import copy
import inspect
import json
import logging
import math
import os
import random
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
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
from transformers import AutoModelForCausalLM, AutoTokenizer

# ============================================================================================================
# Part I: the algorithm
# ============================================================================================================


@dataclass
class Args:
    """The defaults are the recipe gsm8k-qwen-0.5b. Without the name of a recipe or a model, tiny is run."""

    # Run
    recipe: tyro.conf.Suppress[str] = "custom"  # set from the first word of the command line
    seed: int = 1  # random seed; all sampling is a function of (seed, update)
    output_dir: str | None = None  # run folder (default: runs/<script>/<recipe>-s<seed>-<time>)
    resume: str | None = None  # continue a run: its folder, a checkpoint, or `latest` in runs/<script>
    save_every: int = 10  # updates between checkpoints (0: only at the end, or after a signal)
    keep_checkpoints: int = 2  # number of checkpoints to keep during a run; the last one stays after it
    log_with: Literal["none", "wandb", "tensorboard"] = "none"  # a tracker, in addition to metrics.jsonl
    num_sample_generations: int = 10  # how many times samples are printed during the run

    # Model
    model_name_or_path: str = "Qwen/Qwen2.5-0.5B-Instruct"  # initial policy: Hub name, folder, or LoRA folder
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"  # matmul precision; auto: bf16 if the GPU has it
    load_in_8bit: bool = False  # 8-bit frozen weights: LoRA's base model, or without LoRA the reference
    num_shared_layers: int = 0  # freeze embeddings and this many first layers; share them with the reference
    gradient_checkpointing: bool = False  # recompute activations in the backward pass to save memory
    compile: bool = False  # experimental: torch.compile, CUDA graphs for sampling; untested on GPUs
    lora_r: int = 0  # LoRA rank (0: train all weights); the reference is then the policy without its adapter
    lora_alpha: int = 32  # LoRA scale: the adapter adds lora_alpha / lora_r * B A
    lora_target_modules: str = "all-linear"  # layers with an adapter: comma-separated names, or all-linear

    # Tasks and rewards
    dataset_name: str = "openai/gsm8k:main"  # Hub name, NAME:CONFIG, or folder; rewards get all columns
    num_train_rows: int | None = None  # train on the first N rows of the data set only; None: on all
    hard_dataset_name: str | None = None  # other held-out tasks, never trained on, for the final table
    prompt_template: str | None = "{question}"  # makes prompts, if the data have no column prompt
    system_prompt: str | None = (  # system message of each chat, or text before each prompt
        "Think step by step, and put your final answer within \\boxed{}."
    )
    reward_fn: list[str] = field(  # FILE.py:function ...; f(completions, **columns) -> one number for each
        default_factory=lambda: ["data/math_rewards.py:correct"]
    )
    reward_weights: list[float] | None = None  # one for each function of --reward-fn; None: 1 each
    judge_fn: str | None = None  # in evaluation, 1 or more means right; None: the first reward_fn decides
    max_prompt_length: int = 512  # tasks whose prompt has more tokens are skipped
    response_length: int = 512  # longest response, in tokens
    stop_token: Literal["eos"] | None = "eos"  # end at EOS and the model's other stop tokens; None: never
    stop_token_id: int | None = None  # end responses at this token id only, instead of --stop-token
    temperature: float = 1.0  # sampling temperature; all log-probabilities use it too

    # Responses per update = per_device_train_batch_size x gradient_accumulation_steps x num_mini_batches
    # x processes. Tasks per update = responses per update / num_generations.
    total_episodes: int = 100_000  # number of responses in the whole run, rounded up to whole batches
    per_device_train_batch_size: int = 8  # responses per forward and backward pass on one process
    gradient_accumulation_steps: int = 32  # micro-batches per optimizer step
    num_mini_batches: int = 1  # optimizer steps per epoch
    num_ppo_epochs: int = 1  # epochs over each batch of rollouts
    local_rollout_forward_batch_size: int = 64  # responses generated at once on one process

    # GRPO
    num_generations: int = 8  # responses per task, the size of a group; 2 or more
    kl_coef: float = 0.0  # coefficient of the KL to the initial policy, in the loss; 0: no KL penalty
    cliprange: float = 0.2  # ratios are clipped to 1 +- this; no effect with one optimizer step per batch

    # Evaluation
    num_examples: int = 256  # number of held-out tasks to solve before and after training, per data set
    num_eval_samples: int = 8  # responses to each of them: the k of pass@k

    # Optimizer
    learning_rate: float = 1e-6  # initial (or constant) learning rate
    optimizer: str = "torch.optim.AdamW"  # dotted name: torch.optim.SGD, bitsandbytes.optim.Adam8bit, ...
    adam_eps: float = 1e-8  # epsilon of Adam
    lr_scheduler_type: Literal["constant", "linear", "cosine", "exponential"] = "constant"  # set per update
    warmup_ratio: float = 0.0  # fraction of updates in which the learning rate rises from 0
    max_grad_norm: float | None = 1.0  # clip the gradient to this norm; None: no clipping


RECIPES = {
    "tiny": Args(  # a small model and tasks that come with this repository
        model_name_or_path="checkpoints/arithmetic-sft",
        dataset_name="data/arithmetic",
        hard_dataset_name="data/arithmetic-hard",
        prompt_template=None,
        system_prompt=None,
        dtype="float32",
        total_episodes=25_600,
        per_device_train_batch_size=64,
        gradient_accumulation_steps=4,
        local_rollout_forward_batch_size=256,
        max_prompt_length=64,
        response_length=48,
        learning_rate=5e-5,
        num_sample_generations=3,
    ),
    "gsm8k-qwen-0.5b": Args(),
    "gsm8k-qwen-1.5b": Args(
        model_name_or_path="Qwen/Qwen2.5-1.5B-Instruct",
        gradient_checkpointing=True,
        save_every=50,  # a checkpoint takes 18 GB
    ),
    # TinyZero's task, with two differences: the format is not rewarded, and no first words are given.
    "countdown-qwen-1.5b": Args(
        model_name_or_path="Qwen/Qwen2.5-1.5B-Instruct",
        dataset_name="Jiayi-Pan/Countdown-Tasks-3to4",
        num_train_rows=50_000,
        system_prompt=(
            "You are a helpful assistant. You first think about the reasoning process in your mind and then "
            "provide the user with the answer."
        ),
        prompt_template=(
            "Using the numbers {nums}, create an equation that equals {target}. You can use basic arithmetic "
            "operations (+, -, *, /) and each number can only be used once. Show your work in <think> "
            "</think> tags. And return the final answer in <answer> </answer> tags, for example "
            "<answer> (1 + 2) / 3 </answer>."
        ),
        reward_fn=["data/math_rewards.py:countdown"],
        gradient_checkpointing=True,
        save_every=50,
    ),
}


# ---- Math: pure functions of tensors -----------------------------------------------------------------------
#
# Shapes: P tasks with k responses each make B = k * P rows. C positions of the prompt, T positions of the
# response, V tokens in the vocabulary, H hidden units. Rows are ordered as in rloo_tldr.py: the first
# responses to all tasks, then the second ones, ... So rows r, P + r, 2 P + r, ... are the group of task r. A
# row of C + T tokens is a left-padded prompt and a right-padded response, here with C = 4 and T = 5:
#
#     pad    2      +      3      | =      5      EOS    pad    pad       length of the response: 3
#
# The hidden state of each token predicts the next one: "3" predicts "=".


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


def grpo_advantages(rewards, k):
    """(Reward - mean of its group) / (standard deviation of its group + 1e-4). [k * P] -> [k * P]

    DeepSeekMath, section 4.1.2. Rows are ordered as above. The deviation has k - 1 in its denominator, and
    1e-4 avoids 0 / 0; both as in TRL. It is computed in fp64: in fp32, rounding would give groups with equal
    rewards advantages that are not exactly 0.

    The division gives more weight to tasks that are nearly always or nearly never solved. Dr. GRPO leaves it
    out for that reason.
    """
    groups = rewards.double().view(k, -1)  # [k, P]
    mean, std = groups.mean(0), groups.std(0, correction=1)  # [P]
    advantages = (groups - mean) / (std + 1e-4)  # [k, P]
    return advantages.flatten().float()


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
def rollout_tasks(model, tokenizer, reward, tasks, prompt_batch, stop_ids, args):
    """Sample k responses to each task, reward them, and compute old and reference log-probabilities.

    reward: RewardFunctions; tasks: P dicts with prompt (str or chat) and columns, for reward functions;
    prompt_batch, stop_ids: as in sample_responses. Returns
    - the dict of sample_responses, and in it
        rewards/NAME [k * P]     of each reward function; nan: it does not apply to this response
        scores [k * P]           their weighted sum: the reward of the response
        logprobs [k * P, T]      old log-probabilities, if takes_several_steps
        ref_logprobs [k * P, T]  if kl_coef is above 0
    - the responses, k * P str
    """
    b, responses, response_tokens = sample_responses(
        model.compiled_policy or model.policy, tokenizer, prompt_batch, stop_ids, args
    )
    k = len(responses) // len(tasks)
    # tasks * k is in the order of the responses: the first responses to all tasks come first.
    rewards = score_responses(reward, tasks * k, responses, response_tokens)  # name -> [k * P]
    b["scores"] = weighted_sum(rewards, args.reward_weights)  # [k * P]
    b |= {f"rewards/{name}": values for name, values in rewards.items()}

    # Old log-probabilities, the denominator of the ratio. With one optimizer step per batch, the policy does
    # not change before the update, and train uses its new log-probabilities as the old ones. With several
    # steps they are computed here, by a forward pass like that of the update. The update sorts its rows, so
    # the two differ by rounding. Log-probabilities from generation differ more.
    num_rows, T = b["sampling_logprobs"].shape
    if takes_several_steps(args):
        b["logprobs"] = torch.zeros_like(b["sampling_logprobs"])  # [k * P, T]
    if args.kl_coef > 0:
        b["ref_logprobs"] = torch.zeros_like(b["sampling_logprobs"])
    for rows in torch.arange(num_rows, device=b["ids"].device).split(args.per_device_train_batch_size):
        inputs = b["ids"][rows], b["mask"][rows], T, args.temperature
        if takes_several_steps(args):
            b["logprobs"][rows], _ = model(*inputs)
        if args.kl_coef > 0:
            b["ref_logprobs"][rows] = model.reference_logprobs(*inputs)
    return b, responses


def takes_several_steps(args):
    """True if the policy changes while it learns from a batch. Only then can a ratio differ from 1."""
    return args.num_ppo_epochs * args.num_mini_batches > 1


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
    accelerator = start_accelerator(args)
    device, rank, world = accelerator.device, accelerator.process_index, accelerator.num_processes
    n = args.per_device_train_batch_size  # rows of a forward and backward pass
    T, k = args.response_length, args.num_generations
    local_batch_size = n * args.gradient_accumulation_steps * args.num_mini_batches
    check_grpo_args(args, local_batch_size)
    B = local_batch_size * world  # responses ("episodes") per update
    P = B // k  # tasks per update
    updates = math.ceil(args.total_episodes / B)

    def local_rows(x):
        """The share of a global batch that this process works on."""
        return x[rank * len(x) // world : (rank + 1) * len(x) // world]

    tokenizer = load_tokenizer(args.model_name_or_path)
    train_rows, held_out_rows = load_splits(args.dataset_name)
    if args.num_train_rows is not None:
        train_rows = train_rows.select(range(min(args.num_train_rows, len(train_rows))))
    train_tasks = load_tasks(train_rows, tokenizer, args, args.dataset_name)
    # Held-out tasks: those of the training data set and, with --hard-dataset-name, harder ones.
    held_out_tasks = load_tasks(held_out_rows, tokenizer, args, args.dataset_name)
    held_out = {"held-out": choose_tasks(held_out_tasks, args)}
    if args.hard_dataset_name is not None:
        hard_rows = load_test_split(args.hard_dataset_name)
        hard_tasks = load_tasks(hard_rows, tokenizer, args, args.hard_dataset_name)
        held_out["harder"] = choose_tasks(hard_tasks, args)
    policy, reference = load_policy_and_reference(
        args, args.model_name_or_path, wants_reference=args.kl_coef > 0
    )
    max_tokens = max(longest_prompt(tasks) for tasks in [train_tasks, *held_out.values()]) + T
    check_context(policy, args.model_name_or_path, max_tokens)
    model = to_device(PolicyAndReference(policy, reference), args, device)
    if args.compile:
        model.compiled_policy = compile_policy(policy, max_tokens, args, device)
    stop_ids = find_stop_tokens(args, tokenizer, policy).to(device)
    trainer_state = transformers.TrainerState(max_steps=updates)  # reward functions may read it
    reward = load_reward_functions("--reward-fn", args.reward_fn, device, trainer_state)
    judge = None  # the first reward function decides what is right
    if args.judge_fn is not None:
        judge = load_reward_functions("--judge-fn", [args.judge_fn], device, trainer_state)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=wants_bf16(args, device))

    # What the progress bar shows: label -> metric.
    status = {"reward": "objective/scores", "equal groups": "frac_reward_zero_std"}
    run = Run(args, accelerator, updates, status)
    run.print_setup(f"{args.model_name_or_path} on {args.dataset_name}", model)
    run.print(
        f"batch: {n} responses per pass x {args.gradient_accumulation_steps} accumulated "
        f"x {args.num_mini_batches} minibatches x {world} processes = {B} episodes = {P} tasks x {k}; "
        f"{updates} updates x {args.num_ppo_epochs} epochs x {args.num_mini_batches} minibatches = "
        f"{updates * args.num_ppo_epochs * args.num_mini_batches} optimizer steps"
    )

    def evaluate_all():
        """Solve all held-out tasks. Returns a dict of records (see evaluate_tasks).

        Its keys are "held-out", "greedy" and, with --hard-dataset-name, "harder".
        """
        inputs = model, tokenizer, reward, judge
        with autocast:
            records = {}
            for name, tasks in held_out.items():
                records[name] = evaluate_tasks(*inputs, tasks, stop_ids, args, accelerator)
            # Nearly greedy decoding: does the policy know the answer, but lose it in sampling?
            greedy_args = replace(args, temperature=0.01, num_eval_samples=1)
            records["greedy"] = evaluate_tasks(
                *inputs, held_out["held-out"], stop_ids, greedy_args, accelerator
            )
        return records

    before = evaluate_all()  # before run.restore, so it measures the initial policy in a resumed run too

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
        #    responses to its share of the tasks; then every process gets all responses. For a given B, the
        #    result does not depend on the number of processes, up to rounding.
        start_time = time.time()
        model.eval()
        # The next P tasks of an endless stream: the data set is shuffled again after each pass.
        data_rows = stream_rows(len(train_tasks), start=(update - 1) * P, count=P, seed=args.seed)
        tasks = [train_tasks[row] for row in data_rows.tolist()]  # list of P
        prompt_batch = draw_groups(tasks, k, args, update)  # ids, mask [P, C]; uniforms [P, k, T]
        prompt_batch = {name: local_rows(x).to(device) for name, x in prompt_batch.items()}
        trainer_state.global_step = update - 1
        with autocast:
            local, responses = rollout_tasks(
                model, tokenizer, reward, local_rows(tasks), prompt_batch, stop_ids, args
            )
        # b: the rollouts of all processes, [B, ...] each
        b = {name: gather_groups(x, k, accelerator) for name, x in local.items()}
        C = b["ids"].shape[1] - T
        prompt_ids = b["ids"][:, :C].view(k, P, C)
        assert (prompt_ids == prompt_ids[0]).all(), "the rows of a group do not answer the same prompt"
        valid = length_mask(b["lengths"], T)  # [B, T]
        rollout_end = time.time()

        # 2. Advantages: one per response, and the same for all its tokens.
        advantages = grpo_advantages(b["scores"], k)  # [B]

        # 3. Update. Minibatches are drawn from the global batch, and need not contain whole groups; each
        #    process trains on its share, n rows at a time. The loss is the sum over this process's tokens,
        #    divided by the number of tokens in the minibatch on all processes (DAPO). So the gradient does
        #    not depend on how a minibatch is split, up to rounding.
        learner.train()  # dropout is 0; this switches on gradient checkpointing
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, update, updates)
        metric_sums = {}  # sums over the tokens of all minibatches and epochs
        max_sampling_gap = torch.zeros((), device=device)
        for epoch in range(args.num_ppo_epochs):
            order = torch.randperm(B, generator=generator_for(args.seed, "order", update, epoch)).to(device)
            for minibatch in order.split(B // args.num_mini_batches):
                num_tokens = valid[minibatch].sum()
                # Responses of similar length go into the same micro-batch. That saves padding.
                local_minibatch = local_rows(minibatch)
                by_length = b["lengths"][local_minibatch].argsort(stable=True)
                micro_batches = local_minibatch[by_length].split(n)
                for i, rows in enumerate(micro_batches):
                    is_last = i + 1 == len(micro_batches)
                    t = b["lengths"][rows].max().item()  # positions after the longest response are cut off
                    end = C + t
                    with sync_gradients_if(is_last, accelerator, learner):
                        with autocast:
                            mb_logprobs, mb_entropies = learner(
                                b["ids"][rows, :end], b["mask"][rows, :end], t, args.temperature
                            )  # [n, t] each
                        m = valid[rows, :t]  # [n, t]
                        new_logprobs = mb_logprobs[m]  # [valid tokens]
                        if takes_several_steps(args):
                            old_logprobs = b["logprobs"][rows, :t][m]  # [valid tokens]
                        else:
                            old_logprobs = new_logprobs.detach()  # the ratio is 1, but has a gradient
                        mb_advantages = advantages[rows, None].expand(-1, t)[m]  # [valid tokens]
                        policy_loss = clipped_policy_loss(
                            new_logprobs, old_logprobs, mb_advantages, args.cliprange
                        )  # [valid tokens]
                        token_loss = policy_loss
                        if args.kl_coef > 0:
                            mb_kl = kl_per_token(new_logprobs, b["ref_logprobs"][rows, :t][m], "k3")
                            token_loss = policy_loss + args.kl_coef * mb_kl
                        loss = token_loss.sum() / num_tokens
                        accelerator.backward(loss * world)  # DDP averages over processes; we want the sum

                    with torch.no_grad():
                        log_ratio = new_logprobs - old_logprobs
                        ratio = log_ratio.exp()
                        # Generation computes one token at a time, with a cache. How far its log-probabilities
                        # are from those of a full forward pass:
                        sampling_gap = (b["sampling_logprobs"][rows, :t][m] - old_logprobs).abs()
                        max_sampling_gap = torch.maximum(max_sampling_gap, sampling_gap.max())
                        token_metrics = {
                            "loss/policy_avg": policy_loss,
                            "policy/approxkl_avg": 0.5 * log_ratio**2,
                            "policy/clipfrac_avg": policy_loss > -mb_advantages * ratio,
                            "policy/entropy_avg": mb_entropies[m],
                            "val/ratio": ratio,
                            "val/ratio_var": (ratio - 1) ** 2,  # becomes the variance below
                            "sampling/logprob_gap_mean": sampling_gap,
                        }
                        add_sums(metric_sums, token_metrics)
                    if not ratio_was_checked:  # raises if b["logprobs"] are not those of this policy
                        check_first_ratio(log_ratio, args, device)

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

        # 4. Log. Names are those of TRL: of RLOOTrainer 0.11, so that curves of rloo_tldr.py overlay, and of
        #    GRPOTrainer (completions/*, rewards/*, frac_reward_zero_std).
        tokens_trained = valid.sum() * args.num_ppo_epochs
        metric_sums = accelerator.reduce(metric_sums)
        update_metrics = {name: x / tokens_trained for name, x in metric_sums.items()}
        # var r = E[(r - 1)^2] - (E[r - 1])^2
        update_metrics["val/ratio_var"] -= (update_metrics["val/ratio"] - 1) ** 2
        scores = b["scores"].view(k, P)
        lengths = b["lengths"].float()
        all_responses = accelerate.utils.gather_object(responses)  # of all processes
        metrics = {
            "update": update,
            "episode": update * B,
            "lr": optimizer.param_groups[0]["lr"],
            "eps": B / (time.time() - start_time),  # episodes per second
            "objective/entropy": -b["sampling_logprobs"].sum(1).mean(),  # per response: -log p of the sample
            "objective/scores": b["scores"].mean(),
            **reward_metrics(b, reward, accelerator),
            **update_metrics,
            "grad_norm": grad_norm,  # of the last optimizer step, before clipping
            "val/num_eos_tokens": b["stopped"].sum(),
            "env/reward_mean": b["scores"].mean(),
            "env/reward_std": b["scores"].std(correction=0),
            # The fraction of groups with equal rewards. Their advantages are 0.
            "frac_reward_zero_std": (scores == scores[0]).all(0).float().mean(),
            "completions/mean_length": lengths.mean(),
            "completions/min_length": lengths.min(),
            "completions/max_length": lengths.max(),
            "completions/clipped_ratio": 1 - b["stopped"].float().mean(),  # did not stop on their own
            "completions/distinct_2": distinct_bigrams(all_responses),
            "sampling/logprob_gap_max": accelerator.gather(max_sampling_gap).max(),
            **performance_metrics(start_time, rollout_end, lengths.sum(), device),
        }
        if args.kl_coef > 0:
            # k1, summed over each response. The loss has k3 per token, another estimate of the same KL.
            kl = kl_per_token(b["sampling_logprobs"], b["ref_logprobs"], "k1")  # [B, T]
            metrics["objective/kl"] = torch.where(valid, kl, 0.0).sum(1).mean()
            metrics["objective/kl_coef"] = args.kl_coef
        metrics = to_numbers(metrics)
        run.log(metrics, task_warnings(metrics))
        if is_sample_update(update, updates, args):
            # The same tasks each time, with the same random numbers: watch the responses change.
            first_tasks = held_out["held-out"][:4]
            sample_args = replace(args, num_eval_samples=1)
            with autocast:
                records = evaluate_tasks(
                    model, tokenizer, reward, judge, first_tasks, stop_ids, sample_args, accelerator
                )
            samples = [first_response(record) for record in records]
            run.table(f"samples after update {update}", samples, "samples.jsonl", update=update)
            token_columns = {"advantage": advantages[:, None].expand(B, T)}
            if args.kl_coef > 0:
                token_columns["KL"] = torch.where(valid, kl, 0.0)
            first_group = range(0, B, P)  # the k responses to the first task
            with autocast:
                save_tokens(run, update, model, tokenizer, b, first_group, b["scores"], token_columns)

        # 5. Save.
        run.checkpoint(update, parameters, optimizer, B)

    # 6. Evaluate on the same held-out tasks again, and save the model.
    trainer_state.global_step = updates
    after = evaluate_all()
    if accelerator.is_main_process:
        report_tasks(run, before, after)
        save_policy(model.policy, tokenizer, run.folder / "model")
    run.finish()
    return model, run.folder


def add_sums(sums, metrics):
    """Add the sum of each tensor in `metrics` to `sums`, both dicts with the same names."""
    for name, values in metrics.items():
        sums[name] = sums.get(name, 0) + values.float().sum()


# ---- Evaluation --------------------------------------------------------------------------------------------


def evaluate_tasks(model, tokenizer, reward, judge, tasks, stop_ids, args, accelerator):
    """Solve each task k = num_eval_samples times, with the same random numbers whenever it is called.

    tasks: list of dicts (load_tasks); judge: RewardFunctions, or None. Each process takes its share of the
    tasks, and gets the records of all. A response is right if the judge, or without one the first reward
    function, gives it 1 or more.
    -> one dict per task:
        task          str, the prompt
        responses     k str
        right, ended  k bool
        length        k int, in tokens
        rewards/NAME  k numbers, for each reward function; None: it does not apply
        extra         dict: columns that reward functions logged, k values each
    """
    model.eval()
    rank, world = accelerator.process_index, accelerator.num_processes
    k = args.num_eval_samples
    device = accelerator.device
    start, end = rank * len(tasks) // world, (rank + 1) * len(tasks) // world
    prompt_batch = draw_groups(tasks, k, args, "held-out")  # drawn for all processes
    prompt_batch = {name: x[start:end].to(device) for name, x in prompt_batch.items()}
    tasks = tasks[start:end]
    records = []
    if tasks:  # there may be more processes than tasks
        b, responses, tokens = sample_responses(
            model.compiled_policy or model.policy, tokenizer, prompt_batch, stop_ids, args
        )
        rewards = score_responses(reward, tasks * k, responses, tokens)
        extra = reward.extra  # columns that reward functions logged: name -> list of k * tasks
        verdicts = rewards
        if judge is not None:
            verdicts = score_responses(judge, tasks * k, responses, tokens)
        first_verdict = list(verdicts.values())[0]  # [k * tasks]
        columns = {f"rewards/{name}": values for name, values in rewards.items()}
        columns |= {"right": first_verdict >= 1, "ended": b["stopped"], "length": b["lengths"]}
        columns = {name: x.tolist() for name, x in columns.items()}
        for i, task in enumerate(tasks):  # row j * len(tasks) + i is response j to task i
            record = {"task": plain_text(task["prompt"]), "responses": responses[i :: len(tasks)]}
            for name, values in columns.items():
                record[name] = [None if math.isnan(x) else x for x in values[i :: len(tasks)]]
            record["extra"] = {name: values[i :: len(tasks)] for name, values in extra.items()}
            records.append(record)
    return accelerate.utils.gather_object(records)


def task_metrics(records):
    """The numbers of the final table for one set of tasks. Records as in evaluate_tasks -> dict of floats"""
    right = torch.tensor([record["right"] for record in records]).float()  # [tasks, k]
    pass_at_1 = right.mean(1)  # [tasks]
    lengths = torch.tensor([record["length"] for record in records]).float()  # [tasks, k]
    metrics = {
        "pass@1": pass_at_1.mean(),
        "+- (95 % interval)": 1.96 * pass_at_1.std(correction=0) / len(records) ** 0.5,
        "tokens per response": lengths.mean(),
    }
    k = right.shape[1]
    if k > 1:  # greedy decoding has one response per task
        responses = [response for record in records for response in record["responses"]]
        different = [len(set(record["responses"])) for record in records]
        ended = torch.tensor([record["ended"] for record in records]).float()  # [tasks, k]
        metrics[f"pass@{k}"] = right.amax(1).mean()
        metrics["tasks all right or all wrong"] = ((pass_at_1 == 0) | (pass_at_1 == 1)).float().mean()
        metrics["different responses per task"] = sum(different) / len(different)
        metrics["distinct bigrams"] = distinct_bigrams(responses)
        metrics["ended by itself"] = ended.mean()
        for name in records[0]:
            if name.startswith("rewards/"):
                values = [x for record in records for x in record[name] if x is not None]
                metrics[name] = sum(values) / max(len(values), 1)
    return {name: float(x) for name, x in metrics.items()}


def first_response(record):
    """The first response to a task, for tables. Record as in evaluate_tasks -> dict"""
    row = {"task": record["task"], "response": record["responses"][0], "right": record["right"][0]}
    row |= {name: values[0] for name, values in record.items() if name.startswith("rewards/")}
    return row | {name: values[0] for name, values in record["extra"].items()}


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


# ============================================================================================================
# Part II: infrastructure. Nothing below is about GRPO.
# ============================================================================================================

SCRIPT = Path(__file__).stem
HERE = Path(__file__).resolve().parent  # recipes name folders next to this file


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


# ---- Reward functions --------------------------------------------------------------------------------------


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


def score_responses(reward, rows, responses, response_tokens):
    """Call RewardFunctions for one response to each row. -> dict: name of the function -> fp32 [B]

    rows: B dicts with prompt (str or list of messages) and columns (dict); response_tokens: B lists of ids.
    An entry is nan if the function does not apply to the row.
    """
    prompts = [row["prompt"] for row in rows]
    columns = [row["columns"] for row in rows]
    return reward(prompts, responses, response_tokens, columns)


# ---- Data --------------------------------------------------------------------------------------------------


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


def load_test_split(name):
    """The rows of the split test of a Hub data set or a folder of jsonl files."""
    splits = load("data set", load_data_set, name)
    if "test" not in splits:
        raise UserError(f"data set {name!r} needs a split test; it has {', '.join(splits)}")
    return splits["test"]


def load_data_set(name):
    """All splits of a Hub data set, NAME or NAME:CONFIG, or of a folder of jsonl files."""
    if not Path(name).exists():
        name, _, config = name.partition(":")
        return datasets.load_dataset(name, config or None)
    return datasets.load_dataset(name)


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


def load_tasks(rows, tokenizer, args, name):
    """The tasks of the data set `name` that are short enough, as a list of dict:

    ids: token ids of the prompt; prompt: str or list of messages; columns: dict with all other columns of the
    row, for reward functions.
    """
    candidates, texts = [], []
    for row in rows:
        prompt = task_prompt(row, tokenizer, args, name)
        if prompt is None:
            continue
        if is_chat(prompt):
            texts.append(render_chat(tokenizer, prompt, add_generation_prompt=True))
        else:
            texts.append(prompt)
        columns = {column: value for column, value in row.items() if column != "prompt"}
        candidates.append({"prompt": prompt, "columns": columns})
    tasks = []
    for task, ids in zip(candidates, tokenize(tokenizer, texts)):
        if len(ids) <= args.max_prompt_length:
            tasks.append(task | {"ids": ids})
    reason = f"no prompt of at most --max-prompt-length {args.max_prompt_length} tokens"
    report_skipped(len(rows), len(tasks), f"rows: {reason}")
    if not tasks:
        raise UserError(f"data set {name!r}: {reason}")
    return tasks


def task_prompt(row, tokenizer, args, name):
    """The prompt of a row of the data set `name`, with the system prompt. -> str, messages, or None

    The column prompt may be either. What --prompt-template makes is a user's message, if the tokenizer has a
    chat template.
    """
    if "prompt" in row:
        prompt = row["prompt"]
    else:
        prompt = fill_template(row, args.prompt_template, name)
        if tokenizer.chat_template is not None:
            prompt = [{"role": "user", "content": prompt}]
    if not is_chat(prompt) and not (isinstance(prompt, str) and prompt.strip()):
        return None
    if args.system_prompt is None:
        return prompt
    if not is_chat(prompt):
        return f"{args.system_prompt}\n\n{prompt}"
    if prompt[0]["role"] == "system":  # the data bring their own
        return prompt
    return [{"role": "system", "content": args.system_prompt}, *prompt]


def fill_template(row, template, name):
    """--prompt-template with the columns of a row of the data set `name`. -> str"""
    columns = f"data set {name!r} has no column prompt, but {', '.join(row)}"
    if template is None:
        raise UserError(f"{columns}: use --prompt-template")
    try:
        return template.format(**row)
    except (KeyError, IndexError, ValueError) as error:
        raise UserError(f"--prompt-template {template!r}: {error!r}; {columns}") from error


def choose_tasks(tasks, args):
    """num_examples of the held-out tasks, in random order."""
    count = min(args.num_examples, len(tasks))
    return [tasks[row] for row in stream_rows(len(tasks), start=0, count=count, seed=args.seed).tolist()]


def longest_prompt(rows):
    """The number of tokens of the longest prompt. rows: dicts with ids"""
    return max(len(row["ids"]) for row in rows)


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


def task_warnings(metrics):
    """What looks unhealthy in the metrics of an update, with the likely cause. -> dict: metric -> warning"""
    warnings = {}
    if metrics["env/reward_std"] == 0:
        warnings["env/reward_std"] = (
            "all rewards are equal: there is nothing to learn from. Does the policy ever solve a task? Is "
            "the answer in the format that the reward function expects?"
        )
    elif metrics["frac_reward_zero_std"] > 0.8:
        warnings["frac_reward_zero_std"] = (
            "most tasks are solved by all their responses or by none, and teach nothing: choose tasks that "
            "the policy sometimes solves, or raise --num-generations"
        )
    if metrics["completions/clipped_ratio"] > 0.5:
        warnings["completions/clipped_ratio"] = (
            "most responses are cut off before their answer: raise --response-length"
        )
    if not 0.5 < metrics["val/ratio"] < 2:
        warnings["val/ratio"] = "the ratio is far from 1: lower --learning-rate or --num-ppo-epochs"
    if metrics["sampling/logprob_gap_mean"] > 0.1:
        warnings["sampling/logprob_gap_mean"] = (
            "tokens were sampled with other log-probabilities than those of the update: does the model give "
            "the same output with a cache as without?"
        )
    return warnings


def report_tasks(run, before, after):
    """The final tables, evaluation.json, evaluation_samples.jsonl and curves.png.

    before, after: dict: name of the set of tasks -> records of evaluate_tasks
    """
    args = run.args
    samples = []
    for old, new in zip(before["held-out"][:6], after["held-out"][:6]):
        old, new = first_response(old), first_response(new)
        samples.append({
            "task": old["task"],
            "before": old["response"],
            "right": old["right"],
            "after": new["response"],
            "right after": new["right"],
        })  # fmt: skip
    run.table("held-out tasks, the first of the sampled responses", samples)
    metrics_before, metrics_after = {}, {}
    lines = []  # of evaluation_samples.jsonl
    for name in before:
        for metric, value in task_metrics(before[name]).items():
            metrics_before[f"{name}: {metric}"] = value
        for metric, value in task_metrics(after[name]).items():
            metrics_after[f"{name}: {metric}"] = value
        for old, new in zip(before[name], after[name]):
            lines.append({"set": name, "task": old.pop("task"), "before": old, "after": new})
            new.pop("task")
    comparison = []
    for name, value in metrics_before.items():
        comparison.append({"metric": name, "before": value, "after": metrics_after[name]})
    count, k = len(before["held-out"]), args.num_eval_samples
    run.table(f"{count} held-out tasks, {k} responses each", comparison)
    judge = args.judge_fn or args.reward_fn[0]
    decoding = f"sampling, temperature {args.temperature}, at most {args.response_length} tokens"
    run.print(f"right: {judge} gives 1 or more; {decoding}")
    run.write_evaluation({
        "before": metrics_before,
        "after": metrics_after,
        "n": count,
        "judge": judge,
        "decoding": decoding,
    })  # fmt: skip
    run.write("evaluation_samples.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    titles = {
        "objective/scores": "reward",
        "frac_reward_zero_std": "groups with equal rewards, fraction",
        "policy/entropy_avg": "entropy, nats per token",
        "completions/mean_length": "tokens per response",
    }
    run.plot(titles, targets={})


# ---- Command line ------------------------------------------------------------------------------------------


def check_positive(args, *names):
    """Raise if a size is 0 or less, before anything is loaded."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise UserError(f"--{name.replace('_', '-')} must be more than 0; it is {value}")


def check_grpo_args(args, local_batch_size):
    """Raise for flags that cannot work, before anything is loaded."""
    check_positive(args, "per_device_train_batch_size", "gradient_accumulation_steps", "num_mini_batches")
    check_positive(args, "num_ppo_epochs", "total_episodes", "num_train_rows", "temperature")
    check_positive(args, "response_length", "max_prompt_length", "local_rollout_forward_batch_size")
    check_positive(args, "num_examples", "num_eval_samples")
    check_model_args(args)
    check_reward_args(args)
    k = args.num_generations
    if k < 2 or local_batch_size % k:
        raise UserError(
            f"--num-generations {k} must be 2 or more and divide the {local_batch_size} episodes of a "
            "process: per_device_train_batch_size x gradient_accumulation_steps x num_mini_batches"
        )
    if args.kl_coef < 0:
        raise UserError(f"--kl-coef must be 0 (no KL penalty) or more; it is {args.kl_coef}")
    if args.load_in_8bit and not args.lora_r and args.kl_coef == 0:
        raise UserError(
            "--load-in-8bit: no weights are frozen without LoRA and without a reference; add --lora-r 16, or "
            "--kl-coef 0.04"
        )


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


def without_foreign_tasks(args):
    """Drop the harder tasks of the recipe tiny if the training tasks are others."""
    tiny = RECIPES["tiny"]
    if args.hard_dataset_name == tiny.hard_dataset_name and args.dataset_name != tiny.dataset_name:
        return replace(args, hard_dataset_name=None)
    return args


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    run_command_line(lambda: train(without_foreign_tasks(parse_args(argv))))


if __name__ == "__main__":
    main()
