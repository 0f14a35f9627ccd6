"""PPO that teaches a language model to answer in a dialog as a person would: same intent, similar words.

This is ppo_sentiment.py with another task; PPO itself is the same code. If you know that file, this is what
a dialog changes:

1. The prompt is the end of a conversation. It comes with a reference answer: what the person said next
   (`Turn`). In this file "reference" alone means this answer. The frozen policy is the reference model.
2. The reward is a weighted sum, and each part of it is logged (`load_reward_parts`). Intent: does the answer
   have the same dialog act (inform, question, directive, commissive) as the reference answer? It is a
   classifier's probability of that act, or 1 if that act is the likeliest and 0 otherwise. METEOR: how many
   words does it share with the reference answer? And your own functions, if there are any. The KL penalty
   per token is subtracted, as in ppo_sentiment.py.
3. An answer ends with an end mark. In GPT-2's vocabulary, `<EOU>` is several tokens, and they merge with
   their neighbors (".<"). So the mark is searched for in the text, by an automaton that reads tokens
   (`stop_sequence_table`, `generate_until`).
4. A policy can raise this reward and still get worse. So the final table also has ROUGE, BLEU, distinct
   n-grams and the perplexity of the references, before and after training (`evaluate_dialogs`).
5. Your own metrics go into one function and appear in the log and in the table (`custom_metrics`).

    python ppo_dialog.py                            # recipe tiny: no download, no GPU, minutes on 2 cores
    python ppo_dialog.py --meteor-weight 0          # tiny with one change; every field of Args is a flag
    python ppo_dialog.py gpt2-dailydialog           # the published experiment, from the Hub
    python ppo_dialog.py chat RUN_FOLDER_OR_MODEL   # chat with the trained model
    torchrun --nproc_per_node 2 ppo_dialog.py       # two processes, twice the batch
    python ppo_dialog.py --resume latest            # continue a run that was stopped, bit for bit

Part I is the algorithm. Part II is infrastructure: models, rewards, data, processes, run folder, chat,
flags. `diff ppo_sentiment.py ppo_dialog.py` shows all differences. Papers: those of ppo_sentiment.py, RL4LMs
(Ramamurthy et al. 2023), METEOR (Banerjee and Lavie 2005). Results, metrics, details: docs/ppo_dialog.md.
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
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import lru_cache
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
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

# ============================================================================================================
# Part I: the algorithm
# ============================================================================================================


@dataclass
class Args:
    """The defaults follow OpenRL's DailyDialog example."""

    # Run
    recipe: tyro.conf.Suppress[str] = "custom"  # set from the first word of the command line
    seed: int = 1  # random seed; all sampling is a function of (seed, update)
    output_dir: str | None = None  # run folder (default: runs/<script>/<recipe>-s<seed>-<time>)
    resume: str | None = None  # continue a run: its folder, a checkpoint, or `latest` in runs/<script>
    save_every: int = 10  # updates between checkpoints (0: only at the end, or after a signal)
    keep_checkpoints: int = 2  # number of checkpoints to keep during a run; the last one stays after it
    log_with: Literal["none", "wandb", "tensorboard"] = "none"  # a tracker, in addition to metrics.jsonl
    num_sample_generations: int = 10  # how many times samples are printed during the run
    num_eval_prompts: int = 512  # number of held-out prompts in the before / after table

    # Models
    model_name_or_path: str = "rajkumarrrk/gpt2-fine-tuned-on-daily-dialog"  # also the reference model
    reward_model_path: str | None = "rajkumarrrk/roberta-daily-dialog-intent-classifier"  # None: no intent
    reward_fn: list[str] | None = None  # FILE.py:function ..., more parts of the reward; called as TRL's are
    value_model_path: str | None = None  # a critic with its own weights; None: a head on the policy
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"  # matmul precision; auto: bf16 if the GPU has it
    load_in_8bit: bool = False  # 8-bit frozen weights: LoRA's base model, or without LoRA the reference
    num_shared_layers: int = 0  # freeze embeddings and this many first layers; share them with the reference
    gradient_checkpointing: bool = False  # recompute activations in the backward pass to save memory
    compile: bool = False  # experimental: torch.compile, CUDA graphs for sampling; untested on GPUs
    lora_r: int = 0  # LoRA rank (0: train all weights); the reference is then the policy without its adapter
    lora_alpha: int = 32  # LoRA scale: the adapter adds lora_alpha / lora_r * B A
    lora_target_modules: str = "c_attn"  # layers that get an adapter: comma-separated names, or all-linear

    # Data
    dataset_name: str = "OpenRL/daily_dialog"  # a Hub name or a folder of jsonl: columns dialog and act
    utterance_end: str = " <EOU>"  # text that ends each utterance, as in fine-tuning; eos: the EOS token
    num_context_utterances: int = 5  # utterances in the prompt; at the start of a dialog it has fewer
    max_prompt_length: int = 128  # longest prompt, in tokens; a longer one loses its oldest utterances
    response_length: int = 20  # longest answer, in tokens
    temperature: float = 1.0  # sampling temperature; all log-probabilities use it too

    # Reward
    intent_weight: float = 1.0  # weight of the intent; 0: it is only logged
    intent_reward: Literal["probability", "match"] = "match"  # of the reference's act; match: 1 or 0
    meteor_weight: float = 1.0  # weight of METEOR against the reference
    reward_weights: list[float] | None = None  # weights of the functions of --reward-fn; None: 1 each

    # Batch. Episodes per update: per_device_train_batch_size x gradient_accumulation_steps x num_mini_batches
    # x processes. Unlike in CleanRL, more minibatches make the batch larger, not the minibatches smaller.

    total_episodes: int = 16_000  # number of responses in the whole run, rounded up to whole batches
    per_device_train_batch_size: int = 8  # responses per forward and backward pass on one process
    gradient_accumulation_steps: int = 1  # micro-batches per optimizer step
    num_mini_batches: int = 20  # optimizer steps per epoch
    num_ppo_epochs: int = 5  # epochs over each batch of rollouts
    local_rollout_forward_batch_size: int = 128  # responses generated or classified at once on one process

    # PPO
    kl_coef: float = 0.2  # KL penalty coefficient; the initial value if kl_target is set
    kl_target: float | None = 1.0  # hold the KL near this, in nats per response; None: fixed coefficient
    kl_horizon: float = 1_600  # time scale of that adaptation, in episodes
    missing_eos_penalty: float | None = None  # subtracted from the score of an answer without an end mark
    score_clip: float | None = None  # clip scores to [-score_clip, score_clip]
    whiten_rewards: bool = False  # rescale rewards to std 1, keeping their mean
    gamma: float = 1.0  # discount per token
    lam: float = 0.95  # lambda of GAE
    cliprange: float = 0.2  # epsilon of the clipped policy loss
    cliprange_value: float = 0.2  # epsilon of the clipped value loss
    vf_coef: float = 0.1  # weight of the value loss

    # Optimizer
    learning_rate: float = 1e-6  # initial (or constant) learning rate
    optimizer: str = "torch.optim.Adam"  # dotted name: torch.optim.AdamW, bitsandbytes.optim.Adam8bit, ...
    adam_eps: float = 1e-8  # epsilon of Adam (the N+ paper uses 1e-5)
    lr_scheduler_type: Literal["constant", "linear", "cosine", "exponential"] = "constant"  # set per update
    warmup_ratio: float = 0.0  # fraction of updates in which the learning rate rises from 0
    max_grad_norm: float | None = 1.0  # clip the gradient to this norm; None: no clipping


RECIPES = {
    "tiny": Args(  # small models and data that come with this repository
        model_name_or_path="checkpoints/dialogs-lm",
        reward_model_path="checkpoints/dialogs-intent",
        dataset_name="data/dialogs",
        utterance_end="eos",
        num_context_utterances=8,  # whole dialogs, as in fine-tuning
        dtype="float32",
        intent_reward="probability",
        intent_weight=0.5,
        total_episodes=19_200,
        per_device_train_batch_size=32,
        gradient_accumulation_steps=4,
        num_mini_batches=1,
        num_ppo_epochs=2,
        learning_rate=1.5e-4,
        lr_scheduler_type="linear",
        kl_coef=0.03,
        kl_target=0.75,
        kl_horizon=5_000,
        num_sample_generations=3,
    ),
    "gpt2-dailydialog": Args(),
}


# ---- Math: pure functions of tensors -----------------------------------------------------------------------
#
# Shapes: B responses, C positions of the prompt, T positions of the response, V tokens in the vocabulary, H
# hidden units. A row of C + T tokens is a left-padded prompt and a right-padded response, here with C = 4
# and T = 5:
#
#     pad    pad    The    film  | was    good   EOS    pad    pad       length of the response: 3
#
# The hidden state of each token predicts the next one: "film" predicts "was".


def response_lengths(tokens, stop_token_id):
    """Number of tokens up to and including the first stop token; T if there is none. [B, T] -> [B]

    stop_token_id is one id or a tensor of several. -1, or an empty tensor: there is no stop token.
    """
    T = tokens.shape[1]
    position = torch.arange(1, T + 1, device=tokens.device)  # [T]
    return torch.where(torch.isin(tokens, stop_token_id), position, T).amin(1)


def stop_state(text, stop):
    """Length of the longest beginning of `stop` that the text ends with; len(stop) if it contains `stop`."""
    if stop in text:
        return len(stop)
    for length in range(len(stop) - 1, 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def stop_sequence_table(pieces, stop):
    """An automaton that finds the text `stop` while it reads tokens. -> next state [len(stop) + 1, V]

    pieces: the text of each of the V tokens. The state is `stop_state` of the text so far, and
    table[state, token] is the state after one more token. This is the automaton of Knuth, Morris and Pratt
    (1977), but it reads tokens instead of characters. So it does not matter how a tokenizer splits the stop
    sequence, or which neighbors it merges it with. The last state, "found", is never left.

    For example, stop = "<EOU>". The tokens "fine" ".<" "EO" "U>!" lead through the states 0, 1, 3, 5:

        the text ends with    state    "fine"    ".<"    "<"    "EO"    "U>!"
        -                     0        0         1       1      0       0
        <                     1        0         1       1      3       0
        <E                    2        0         1       1      0       0
        <EO                   3        0         1       1      0       5
        <EOU                  4        0         1       1      0       0
        <EOU> (or had it)     5        5         5       5      5       5
    """
    found = len(stop)
    table = torch.full((found + 1, len(pieces)), found)
    for state in range(found):
        table[state] = torch.tensor([stop_state(stop[:state] + piece, stop) for piece in pieces])
    return table


def stop_sequence_seen(tokens, table):
    """True at the token that completes the stop sequence, and at all later ones.

    tokens [B, T], table [S + 1, V] of a stop sequence of S characters -> bool [B, T]
    """
    found = len(table) - 1
    state = torch.zeros(len(tokens), dtype=torch.long, device=tokens.device)  # [B]
    seen = torch.zeros_like(tokens, dtype=torch.bool)
    for t in range(tokens.shape[1]):
        state = table[state, tokens[:, t]]
        seen[:, t] = state == found
    return seen


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


def token_rewards(scores, kl, lengths, kl_coef):
    """The KL penalty on every valid token, plus the score on the last one. [B], [B, T], [B] -> [B, T]"""
    mask = length_mask(lengths, kl.shape[1])
    rewards = torch.where(mask, -kl_coef * kl, 0.0)
    last = lengths[:, None] - 1  # [B, 1]
    return rewards.scatter_add(1, last, scores[:, None].to(rewards.dtype))


def masked_mean(values, mask):
    """Mean over the valid positions. Any shape -> scalar"""
    return torch.where(mask, values, 0.0).float().sum() / mask.sum()


def masked_whiten(values, mask, shift_mean=True):
    """(x - mean) / std over the valid positions, 0 elsewhere. [B, T] -> [B, T]

    shift_mean=False adds the mean back. The variance is the population's, like tf.nn.moments in
    openai/lm-human-preferences (TRL uses the unbiased one). A single valid value is returned unchanged.
    """
    values = torch.where(mask, values, 0.0).float()
    if mask.sum() < 2:
        return values
    mean = masked_mean(values, mask)
    variance = masked_mean((values - mean) ** 2, mask)
    whitened = (values - mean) * torch.rsqrt(variance + 1e-8)
    if not shift_mean:
        whitened = whitened + mean
    return torch.where(mask, whitened, 0.0)


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


def clipped_policy_loss(logprobs, old_logprobs, advantages, cliprange):
    """PPO's clipped objective, negated (Schulman et al. 2017, eq. 7). Any shape -> same shape, unreduced"""
    log_ratio = logprobs - old_logprobs
    ratio = torch.exp(log_ratio.clamp(max=80))  # an infinite ratio times an advantage of 0 is nan
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    return torch.max(unclipped, clipped)


def clipped_value_loss(values, old_values, returns, cliprange_value):
    """Half the larger of two squared errors: the value's, and that of the value clipped to old_values +-
    cliprange_value. Any shape -> same shape, unreduced
    """
    clipped_values = old_values + (values - old_values).clamp(-cliprange_value, cliprange_value)
    unclipped = (values - returns) ** 2
    clipped = (clipped_values - returns) ** 2
    return 0.5 * torch.max(unclipped, clipped)


def adaptive_kl_coef(kl_coef, kl, target, horizon, episodes):
    """The KL coefficient after `episodes` responses with a mean KL of `kl` nats each.

    A proportional controller (Ziegler et al. 2019, section 2.2). It multiplies the coefficient by 1 + x; for
    small x this adds x to its logarithm. In `horizon` episodes the coefficient changes by about 20 % at most.
    -> float
    """
    error = kl / target - 1
    error = min(max(error, -0.2), 0.2)
    return kl_coef * (1 + error * episodes / horizon)


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


# ---- Policy, value function, reference ---------------------------------------------------------------------


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


class PolicyAndValue(nn.Module):
    """Policy, value function and reference in one module, so that DDP has a single module to wrap."""

    def __init__(self, policy, reference=None, critic=None):
        super().__init__()
        self.policy = policy
        self.reference = reference  # None: the policy without its LoRA adapter, or no reference at all
        self.compiled_policy = None  # with --compile: a CompiledPolicy that samples in place of the policy
        self.critic = critic  # None: the value head reads the policy's hidden states
        if critic is None:
            hidden_size = body_and_head(policy)[1].weight.shape[1]
        else:
            hidden_size = critic.config.hidden_size
        self.value_head = nn.Linear(hidden_size, 1)
        # Values start at 0, so the first advantages are the rewards to come, discounted by gamma * lam.
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, ids, mask, T, temperature):
        """Returns logprobs, entropies, values, fp32 [B, T] each. values[t] is predicted before token t."""
        logprobs, entropies, hidden = response_logprobs(self.policy, ids, mask, T, temperature)
        if self.critic is not None:
            hidden = hidden_states(self.critic, ids, mask)[:, -T - 1 : -1]
        values = self.value_head(hidden).squeeze(-1).float()
        return logprobs, entropies, values

    def reference_logprobs(self, ids, mask, T, temperature):
        """Returns the log-probabilities under the reference, fp32 [B, T]."""
        if self.reference is not None:
            return response_logprobs(self.reference, ids, mask, T, temperature)[0]
        with self.policy.disable_adapter():
            return response_logprobs(self.policy, ids, mask, T, temperature)[0]


# ---- Prompts and reward ------------------------------------------------------------------------------------


@dataclass
class Turn:
    """A place in a dialog where the policy answers: what the person said there, and everything before."""

    columns: dict  # the whole row of the data set, for functions of --reward-fn
    number: int  # index of the reference in columns["dialog"]
    context: list[str]  # all earlier utterances of the dialog
    reference: str  # what the person said there
    act: int | None  # dialog act of the reference, counted from 1; None: not in the data
    prompt_tokens: list[int]  # token ids of the prompt: the end of the context
    reference_tokens: list[int]  # token ids of the reference, with its end mark


def context_ids(utterances, args, bos=()):
    """The prompt: the last utterances of a dialog, without the oldest ones if they are too long.

    utterances: one list of token ids each; bos: [BOS] or nothing -> list of at most max_prompt_length token
    ids. If the last utterance alone is too long, it loses its beginning.
    """
    max_length = args.max_prompt_length - len(bos)
    kept = utterances[-args.num_context_utterances :]
    while len(kept) > 1 and sum(len(ids) for ids in kept) > max_length:
        kept = kept[1:]
    prompt = [token for ids in kept for token in ids]
    return [*bos, *prompt[max(len(prompt) - max_length, 0) :]]


def intent_texts(previous, answers):
    """What the intent classifier reads: the last utterance and the answer, nothing earlier. -> list of str"""
    texts = []
    for last, answer in zip(previous, answers):
        texts.append(f"{' '.join(last.split())} {' '.join(answer.split())}")
    return texts


def load_reward_parts(args, device, trainer_state=None):
    """Load all that the reward needs. -> reward_parts, num_acts, functions

    num_acts: how many dialog acts the classifier knows; None without a classifier
    functions: RewardFunctions of --reward-fn, perhaps none
    reward_parts(turns, answers, answer_tokens) -> dict of fp32 [B]:
        meteor        METEOR of the answer against the reference, from 0 to 1
        intent        what --intent-reward selects: the probability of the reference's act, or intent_match
        intent_match  1 if the classifier finds the reference's act the likeliest, otherwise 0
        rewards/NAME  what the user's function NAME returns; nan: it does not apply
    Without --reward-model-path or --reward-fn, their parts are missing.
    """
    meteor = load_meteor()
    classify, num_acts = None, None
    if args.reward_model_path is not None:
        classify, config = load_classifier(args, args.reward_model_path, device)
        num_acts = config.num_labels
    functions = load_reward_functions("--reward-fn", args.reward_fn or [], device, trainer_state)

    def reward_parts(turns, answers, answer_tokens):
        meteors = [meteor(turn.reference, answer) for turn, answer in zip(turns, answers)]
        parts = {"meteor": torch.tensor(meteors, dtype=torch.float32, device=device)}
        if classify is not None:
            previous = [turn.context[-1] for turn in turns]
            probs = classify(intent_texts(previous, answers)).softmax(-1)  # [B, acts]
            # load_turns has checked that every turn has an act from 1 to num_acts if there is a classifier.
            acts = torch.tensor([turn.act - 1 for turn in turns], device=device)  # [B], from 0
            probability = probs.gather(1, acts[:, None]).squeeze(1)  # [B]
            match = (probs.argmax(-1) == acts).float()  # [B]
            intent = match if args.intent_reward == "match" else probability
            parts |= {"intent": intent, "intent_match": match}
        contexts = ["\n".join(turn.context) for turn in turns]
        columns = [turn.columns | {"turn": turn.number} for turn in turns]
        rewards = functions(contexts, answers, answer_tokens, columns)
        return parts | {f"rewards/{name}": values for name, values in rewards.items()}

    return reward_parts, num_acts, functions


def weighted_score(parts, args):
    """The score of each answer: the sum of the parts, each times its weight. dict of [B] -> [B]

    A function of --reward-fn that does not apply to an answer (nan) adds nothing to its score.
    """
    functions = [name for name in parts if name.startswith("rewards/")]
    weights = {"intent": args.intent_weight, "meteor": args.meteor_weight}
    weights |= dict(zip(functions, args.reward_weights or [1.0] * len(functions)))
    return sum(weight * parts[name].nan_to_num() for name, weight in weights.items() if name in parts)


# ---- Rollout -----------------------------------------------------------------------------------------------


@torch.no_grad()
def generate_until(policy, ids, mask, uniforms, stop_table, temperature, on_token=None):
    """Sample each response until its stop sequence or T tokens. No top-k, no top-p, no minimum length.

    Left-padded ids, mask [B, C]; uniforms [B, T], one random number per token; stop_table as in
    `stop_sequence_table`. on_token is for chat, where B is 1: on_token(tokens so far, state of the table) is
    called after each token. -> tokens [B, T] and the log-probabilities they were sampled with, fp32 [B, T];
    both 0 after the end
    """
    if isinstance(policy, CompiledPolicy):  # --compile
        return generate_until_compiled(policy, ids, mask, uniforms, stop_table, temperature)
    B, T = uniforms.shape
    body, head = body_and_head(policy)
    weight = cast_like_autocast(head.weight)  # to bf16 under autocast, once and not for each token
    cache = Cache(config=body.config)
    hidden = hidden_states(body, ids, mask, cache)[:, -1]  # [B, H]
    tokens = torch.zeros(B, T, dtype=torch.long, device=ids.device)
    logprobs = torch.zeros(B, T, device=ids.device)
    rows = torch.arange(B, device=ids.device)  # the rows that are still being written
    state = torch.zeros_like(rows)  # of the automaton that looks for the stop sequence

    for t in range(T):
        logits = fp32_logits(hidden, weight, head.bias)  # [rows, V]
        probs = logits.div_(temperature).softmax(-1)
        token = sample_tokens(probs, uniforms[rows, t])  # [rows]
        tokens[rows, t] = token
        logprobs[rows, t] = probs.gather(1, token[:, None]).squeeze(1).log()

        state = stop_table[state, token]  # [rows]
        if on_token is not None:
            on_token(tokens[0, : t + 1], int(state[0]))
        unfinished = state < len(stop_table) - 1
        if t + 1 == T or not unfinished.any():
            break
        if not unfinished.all():  # finished rows leave the batch
            keep = unfinished.nonzero().squeeze(1)
            cache.batch_select_indices(keep)
            rows, mask, token, state = rows[keep], mask[keep], token[keep], state[keep]
        mask = F.pad(mask, (0, 1), value=True)
        hidden = hidden_states(body, token[:, None], mask, cache)[:, -1]  # [rows, H]
    return tokens, logprobs


def answer_text(tokenizer, tokens, end):
    """The decoded answer without its end mark. Token ids [n] -> str"""
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    if end != "eos":
        text = text.split(end.strip())[0]
    return text.strip()


@torch.no_grad()
def rollout_answers(model, tokenizer, reward_parts, turns, prompt_batch, stop_table, args):
    """Sample an answer for each turn, score it, and compute the log-probabilities that PPO calls old.

    prompt_batch: ids, bool mask [B, C], left-padded; uniforms [B, T]
    -> dict of tensors [B, ...], with the parts of the reward under their names, and answers (list of B str)
    """
    prompt_ids, prompt_mask, uniforms = prompt_batch["ids"], prompt_batch["mask"], prompt_batch["uniforms"]
    B, T = uniforms.shape
    device = prompt_ids.device

    # 1. Generate.
    tokens = torch.zeros(B, T, dtype=torch.long, device=device)
    sampling_logprobs = torch.zeros(B, T, device=device)
    for rows in torch.arange(B, device=device).split(args.local_rollout_forward_batch_size):
        tokens[rows], sampling_logprobs[rows] = generate_until(
            model.compiled_policy or model.policy,
            prompt_ids[rows],
            prompt_mask[rows],
            uniforms[rows],
            stop_table,
            args.temperature,
        )
    seen = stop_sequence_seen(tokens, stop_table)  # [B, T]
    lengths = response_lengths(seen.long(), 1)  # [B]; up to and including the first True
    stopped = seen[:, -1]  # [B]
    valid = length_mask(lengths, T)  # [B, T]

    # 2. Decode.
    answers = [answer_text(tokenizer, row[m], args.utterance_end) for row, m in zip(tokens, valid)]
    answer_tokens = [row[m].tolist() for row, m in zip(tokens, valid)]

    # 3. Score the texts, and compute log-probabilities and values of the tokens. The update will repeat
    #    exactly this forward pass: its micro-batches have the same shape, and dropout is 0. So the ratio is 1
    #    until the first optimizer step, up to rounding. The log-probabilities from generation differ more,
    #    so they are only logged.
    parts = reward_parts(turns, answers, answer_tokens)  # name -> [B]
    scores = weighted_score(parts, args)  # [B]
    ids = torch.cat([prompt_ids, tokens], 1)  # [B, C + T]
    mask = torch.cat([prompt_mask, valid], 1)  # [B, C + T]
    logprobs, values, ref_logprobs = torch.zeros(3, B, T, device=device)
    for rows in torch.arange(B, device=device).split(args.per_device_train_batch_size):
        inputs = ids[rows], mask[rows], T, args.temperature
        logprobs[rows], _, values[rows] = model(*inputs)
        ref_logprobs[rows] = model.reference_logprobs(*inputs)

    b = {
        "ids": ids,
        "mask": mask,
        "lengths": lengths,
        "stopped": stopped,
        "scores": scores,
        "logprobs": logprobs,
        "ref_logprobs": ref_logprobs,
        "sampling_logprobs": sampling_logprobs,
        "values": values,
        **parts,
    }
    return b, answers


# ---- Training ----------------------------------------------------------------------------------------------


def train(args):
    """The whole run, from the flags to the final table. -> (PolicyAndValue, run folder)"""
    accelerator = start_accelerator(args)
    device, rank, world = accelerator.device, accelerator.process_index, accelerator.num_processes
    n, T = args.per_device_train_batch_size, args.response_length
    local_batch_size = n * args.gradient_accumulation_steps * args.num_mini_batches
    B = local_batch_size * world  # episodes per update
    check_dialog_args(args, B)
    updates = math.ceil(args.total_episodes / B)

    def local_rows(x):
        """The share of a global batch that this process works on."""
        return x[rank * len(x) // world : (rank + 1) * len(x) // world]

    max_tokens = args.max_prompt_length + T
    model = to_device(build_policy_and_value(args, max_tokens), args, device)  # with the reference
    if args.compile:
        model.compiled_policy = compile_policy(model.policy, max_tokens, args, device)
    tokenizer = load_tokenizer(args.model_name_or_path)
    # The table finds utterance_end without its spaces. For "eos" it has two states: the EOS token leads to
    # the second one, "found".
    stop_table = build_stop_table(args, tokenizer, model.policy).to(device)
    progress = transformers.TrainerState(max_steps=updates)  # reward functions may read it
    reward_parts, num_acts, reward_functions = load_reward_parts(args, device, progress)
    train_rows, held_out_rows = load_splits(args.dataset_name)
    train_turns = load_turns(train_rows, tokenizer, num_acts, args)
    held_out_turns = load_turns(held_out_rows, tokenizer, num_acts, args)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=wants_bf16(args, device))

    status = {"score": "objective/scores", "METEOR": "meteor", "KL": "objective/kl"}
    run = Run(args, accelerator, updates, status)
    run.print_setup(f"{args.model_name_or_path} on {args.dataset_name}", model)
    run.print(
        f"batch: {n} responses per pass x {args.gradient_accumulation_steps} accumulated "
        f"x {args.num_mini_batches} minibatches x {world} processes = {B} episodes; {updates} updates "
        f"x {args.num_ppo_epochs} epochs x {args.num_mini_batches} minibatches = "
        f"{updates * args.num_ppo_epochs * args.num_mini_batches} optimizer steps"
    )
    run.print(
        f"{len(train_turns):,} turns to train on, {len(held_out_turns):,} held out; "
        f"METEOR counts {meteor_matches()}"
    )

    # Every process evaluates all held-out prompts; only the main one shows the result.
    num_eval_prompts = min(args.num_eval_prompts, len(held_out_turns))
    data_rows = stream_rows(len(held_out_turns), start=0, count=num_eval_prompts, seed=args.seed)
    held_out_turns = [held_out_turns[row] for row in data_rows]
    held_out_batch = draw_prompts(held_out_turns, args, "held-out")
    held_out_batch = {name: x.to(device) for name, x in held_out_batch.items()}
    with autocast:
        before = evaluate_dialogs(
            model, tokenizer, reward_parts, held_out_turns, held_out_batch, stop_table, args
        )
    _, records_before = before
    answers_before = [record["answer"] for record in records_before]

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
    kl_coef = state.get("kl_coef", args.kl_coef)
    ratio_was_checked = False

    for update in range(state["update"] + 1, updates + 1):
        # 1. Rollout. All random numbers are drawn for the global batch. Each process generates its share of
        #    the responses; then every process gets all of them. For a given B, the result does not depend
        #    on the number of processes.
        start_time = time.time()
        model.eval()
        data_rows = stream_rows(len(train_turns), start=(update - 1) * B, count=B, seed=args.seed)
        turns = [train_turns[row] for row in data_rows]
        prompt_batch = draw_prompts(turns, args, update)
        prompt_batch = {name: local_rows(x).to(device) for name, x in prompt_batch.items()}
        progress.global_step = update - 1
        with autocast:
            b, answers = rollout_answers(
                model, tokenizer, reward_parts, local_rows(turns), prompt_batch, stop_table, args
            )
        b = {name: accelerator.gather(x) for name, x in b.items()}  # rollouts of all processes, [B, ...]
        valid = length_mask(b["lengths"], T)  # [B, T]
        rollout_end = time.time()

        # 2. Scores: clip, then subtract the penalty from responses that did not end on their own.
        scores = b["scores"]  # [B]
        if args.score_clip is not None:
            scores = scores.clamp(-args.score_clip, args.score_clip)
        if args.missing_eos_penalty is not None:
            scores = torch.where(b["stopped"], scores, scores - args.missing_eos_penalty)

        # 3. Rewards: the KL penalty on every token, the score on the last one.
        #    logprob - ref_logprob may be negative for a sampled token, but its mean over samples is the KL.
        #    So this subtracts, on average, kl_coef * KL from the objective.
        kl = torch.where(valid, b["logprobs"] - b["ref_logprobs"], 0.0)  # [B, T]
        rewards = token_rewards(scores, kl, b["lengths"], kl_coef)  # [B, T]
        if args.whiten_rewards:
            rewards = masked_whiten(rewards, valid, shift_mean=False)

        # 4. Advantages, always whitened, as OpenAI and TRL do.
        advantages, returns = gae(rewards, b["values"], valid, args.gamma, args.lam)  # [B, T] each
        advantages = masked_whiten(advantages, valid)

        # 5. Update. Minibatches are drawn from the global batch; each process trains on its share, n rows
        #    at a time. The loss is the sum over this process's tokens, divided by the number of tokens in
        #    the minibatch on all processes. So the gradient does not depend on how a minibatch is split.
        learner.train()  # dropout is 0; this switches on gradient checkpointing
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, update, updates)
        metric_sums = {}  # sums over the tokens of all minibatches and epochs
        for epoch in range(args.num_ppo_epochs):
            order = torch.randperm(B, generator=generator_for(args.seed, "order", update, epoch)).to(device)
            for minibatch in order.split(B // args.num_mini_batches):
                num_tokens = valid[minibatch].sum()
                micro_batches = local_rows(minibatch).split(n)
                for i, rows in enumerate(micro_batches):
                    is_last = i + 1 == len(micro_batches)
                    with sync_gradients_if(is_last, accelerator, learner):
                        with autocast:
                            mb_logprobs, mb_entropies, mb_values = learner(
                                b["ids"][rows], b["mask"][rows], T, args.temperature
                            )  # [n, T] each
                        # Keep only the valid tokens. From here on, all tensors are [number of valid tokens].
                        m = valid[rows]
                        new_logprobs, old_logprobs = mb_logprobs[m], b["logprobs"][rows][m]
                        new_values, old_values = mb_values[m], b["values"][rows][m]
                        mb_advantages, mb_returns = advantages[rows][m], returns[rows][m]

                        policy_loss = clipped_policy_loss(
                            new_logprobs, old_logprobs, mb_advantages, args.cliprange
                        )
                        value_loss = clipped_value_loss(
                            new_values, old_values, mb_returns, args.cliprange_value
                        )
                        loss = (policy_loss + args.vf_coef * value_loss).sum() / num_tokens
                        accelerator.backward(loss * world)  # DDP averages over processes; we want the sum

                    with torch.no_grad():
                        log_ratio = new_logprobs - old_logprobs
                        ratio = log_ratio.exp()
                        unclipped_value_loss = 0.5 * (new_values - mb_returns) ** 2
                        # clipped_value_loss computes old + clamp(new - old), which rounding makes differ from
                        # new. So a value counts as clipped only if it moved by more than the range.
                        value_moved = (new_values - old_values).abs() > args.cliprange_value
                        # approxkl: KL between the old and the new policy, by k2 as in TRL (CleanRL uses k3).
                        # clipfrac: tokens whose loss the clipping changes (CleanRL: all ratios outside of the
                        # range).
                        token_metrics = {
                            "loss/policy_avg": policy_loss,
                            "loss/value_avg": value_loss,
                            "policy/entropy_avg": mb_entropies[m],
                            "policy/approxkl_avg": 0.5 * log_ratio**2,
                            "policy/clipfrac_avg": policy_loss > -mb_advantages * ratio,
                            "val/clipfrac_avg": value_moved & (value_loss > unclipped_value_loss),
                            "val/ratio": ratio,
                            "val/ratio_var": (ratio - 1) ** 2,  # becomes the variance below
                        }
                        add_sums(metric_sums, token_metrics)
                    if not ratio_was_checked:  # raises if a ratio is not 1 before the first optimizer step
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

        # 6. Log. The names of the metrics are TRL's: "scores" are after clipping and penalty, "env/reward"
        #    is before.
        tokens_trained = valid.sum() * args.num_ppo_epochs
        metric_sums = accelerator.reduce(metric_sums)
        update_metrics = {name: x / tokens_trained for name, x in metric_sums.items()}
        # var r = E[(r - 1)^2] - (E[r - 1])^2
        update_metrics["val/ratio_var"] -= (update_metrics["val/ratio"] - 1) ** 2
        kl_per_response = kl.sum(1).mean()
        # Generation computes one token at a time, with a cache. How far its log-probabilities are from those
        # of the full forward pass:
        sampling_gap = (b["sampling_logprobs"] - b["logprobs"])[valid].abs()
        lengths = b["lengths"].float()
        parts = {name: b[name] for name in ("intent", "meteor") if name in b}  # [B] each
        all_answers = accelerate.utils.gather_object(answers)  # of all processes, in the order of turns
        # A policy that exploits its reward repeats the words that score best. Take the words whose share of
        # the responses has at least doubled since the start. Log the share of the most common one.
        new_word = commonest_new_word(answers_before, all_answers)
        _, _, new_word_share = new_word  # the word, its share before training, its share now
        metrics = {
            "update": update,
            "episode": update * B,
            "lr": optimizer.param_groups[0]["lr"],
            "eps": B / (time.time() - start_time),  # episodes per second
            "objective/kl": kl_per_response,
            "objective/kl_coef": kl_coef,
            "objective/entropy": -torch.where(valid, b["logprobs"], 0.0).sum(1).mean(),  # per response
            "objective/non_score_reward": -kl_coef * kl_per_response,
            "objective/rlhf_reward": scores.mean() - kl_coef * kl_per_response,
            "objective/scores": scores.mean(),
            **update_metrics,
            "val/num_eos_tokens": b["stopped"].sum(),
            "env/reward_mean": b["scores"].mean(),
            "env/reward_std": b["scores"].std(correction=0),
            "completions/mean_length": lengths.mean(),
            "completions/min_length": lengths.min(),
            "completions/max_length": lengths.max(),
            "completions/clipped_ratio": 1 - b["stopped"].float().mean(),
            "completions/distinct_2": distinct_ngrams(all_answers, 2),
            "completions/new_word_share": new_word_share,
            "sampling/logprob_gap_mean": sampling_gap.mean(),
            "sampling/logprob_gap_max": sampling_gap.max(),
            **performance_metrics(start_time, rollout_end, lengths.sum(), device),
            **{name: x.mean() for name, x in parts.items()},
            **reward_metrics(b, reward_functions, accelerator),
            **custom_metrics(turns, all_answers),
        }
        metrics = to_numbers(metrics)
        run.log(metrics, health_warnings(metrics, args, new_word))
        if is_sample_update(update, updates, args):
            # The same prompts each time, with the same random numbers: watch the responses change.
            first_turns = held_out_turns[:4]
            first_prompts = {name: x[:4] for name, x in held_out_batch.items()}
            with autocast:
                sample, answers = rollout_answers(
                    model, tokenizer, reward_parts, first_turns, first_prompts, stop_table, args
                )
            columns = {name: sample[name].tolist() for name in ["scores", *parts]}
            for name in reward_functions.functions:  # None: the function does not apply to this answer
                values = sample[f"rewards/{name}"].tolist()
                columns[f"rewards/{name}"] = [None if math.isnan(x) else x for x in values]
            records = dialog_records(first_turns, answers, columns | reward_functions.extra)
            run.table(f"samples after update {update}", records, "samples.jsonl", update=update)
            token_columns = {
                "reward": rewards,
                "KL": kl,
                "value": b["values"],
                "return": returns,
                "advantage": advantages,
            }
            with autocast:
                save_tokens(run, update, model, tokenizer, b, range(min(4, B)), scores, token_columns)

        # 7. Adapt the KL coefficient for the next update, and save.
        if args.kl_target is not None:
            kl_coef = adaptive_kl_coef(kl_coef, metrics["objective/kl"], args.kl_target, args.kl_horizon, B)
        run.checkpoint(update, parameters, optimizer, B, kl_coef=kl_coef)

    progress.global_step = updates

    # 8. Evaluate on the same held-out prompts again, and save the model.
    with autocast:
        after = evaluate_dialogs(
            model, tokenizer, reward_parts, held_out_turns, held_out_batch, stop_table, args
        )
    if accelerator.is_main_process:
        report_dialog_evaluation(run, held_out_turns, before, after)
        save_policy(model.policy, tokenizer, run.folder / "model")
        save_value(model, run.folder / "model")
    run.finish()
    return model, run.folder


def add_sums(sums, metrics):
    """Add the sum of each tensor in `metrics` to `sums`, both dicts with the same names."""
    for name, values in metrics.items():
        sums[name] = sums.get(name, 0) + values.float().sum()


# ---- Evaluation --------------------------------------------------------------------------------------------


def evaluate_dialogs(model, tokenizer, reward_parts, turns, prompt_batch, stop_table, args):
    """Answer the held-out prompts, with the same random numbers before and after training.

    -> metrics (dict of floats), one dict(last, reference, answer, score) per prompt
    """
    model.eval()
    b, answers = rollout_answers(model, tokenizer, reward_parts, turns, prompt_batch, stop_table, args)
    valid = length_mask(b["lengths"], args.response_length)  # [B, T]
    kl = torch.where(valid, b["logprobs"] - b["ref_logprobs"], 0.0)  # [B, T]
    text = text_metrics(answers, [turn.reference for turn in turns])
    metrics = {
        "rouge1": text["rouge1"],
        "rougeLsum": text["rougeLsum"],
        "meteor": b["meteor"].mean(),
        "sacrebleu": text["sacrebleu"],
    }
    if "intent_match" in b:
        # Always the match rate. In the log, "intent" is what --intent-reward selects.
        metrics["intent"] = b["intent_match"].mean()
    metrics |= {
        "tokens per answer": b["lengths"].float().mean(),
        "distinct1": text["distinct1"],
        "distinct2": text["distinct2"],
        "perplexity of the references": reference_perplexity(model.policy, turns, prompt_batch, args),
        "score mean": b["scores"].mean(),
        "score median": b["scores"].quantile(0.5),
        "KL, nats per response": kl.sum(1).mean(),
        **custom_metrics(turns, answers),
    }
    metrics = {name: float(x) for name, x in metrics.items()}
    return metrics, dialog_records(turns, answers, {"score": b["scores"].tolist()})


def custom_metrics(turns, answers):
    """YOUR METRICS: what this returns is logged in every update, and is in the final table. -> dict of floats

    It gets the batch of all processes. turns[i].context, .reference and .act belong to answers[i].
    """
    questions = [answer for answer in answers if answer.endswith("?")]
    return {"custom/questions": len(questions) / len(answers)}


def text_metrics(answers, references):
    """Standard text metrics that are not in the reward, each from 0 to 1. Lists of str -> dict of floats

    ROUGE-1 and ROUGE-Lsum: F1 with stems, mean over answers. BLEU of the whole corpus. Distinct n-grams.
    """
    import sacrebleu
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rouge1", "rougeLsum"], use_stemmer=True)
    rouge = [scorer.score(reference, answer) for reference, answer in zip(references, answers)]
    bleu = sacrebleu.corpus_bleu(answers, [references], force=True)  # force: no warning about tokenized text
    return {
        "rouge1": sum(scores["rouge1"].fmeasure for scores in rouge) / len(answers),
        "rougeLsum": sum(scores["rougeLsum"].fmeasure for scores in rouge) / len(answers),
        "sacrebleu": bleu.score / 100,
        "distinct1": distinct_ngrams(answers, 1),
        "distinct2": distinct_ngrams(answers, 2),
    }


def distinct_ngrams(texts, n):
    """Different n-grams / all n-grams of the texts: a measure of variety (Li et al. 2016, section 2.2)."""
    import nltk

    tokenizer = nltk.NLTKWordTokenizer()
    ngrams = []
    for text in texts:
        ngrams += nltk.ngrams(tokenizer.tokenize(text.lower()), n)
    return len(set(ngrams)) / max(len(ngrams), 1)


@torch.no_grad()
def reference_perplexity(policy, turns, prompt_batch, args):
    """Perplexity of the references, given the same prompts, at temperature 1. -> scalar"""
    prompt_ids, prompt_mask = prompt_batch["ids"], prompt_batch["mask"]  # [B, C]
    limit = context_length(policy) - prompt_ids.shape[1]  # a longer reference is cut
    references = [torch.tensor(turn.reference_tokens[:limit]) for turn in turns]
    lengths = torch.tensor([len(reference) for reference in references])  # [B]
    tokens = nn.utils.rnn.pad_sequence(references, batch_first=True).to(prompt_ids.device)  # [B, R]
    R = tokens.shape[1]
    valid = length_mask(lengths, R).to(prompt_ids.device)  # [B, R]
    ids = torch.cat([prompt_ids, tokens], 1)  # [B, C + R]
    mask = torch.cat([prompt_mask, valid], 1)  # [B, C + R]
    logprobs = torch.zeros(tokens.shape, device=ids.device)  # [B, R]
    for rows in torch.arange(len(ids), device=ids.device).split(args.per_device_train_batch_size):
        logprobs[rows], _, _ = response_logprobs(policy, ids[rows], mask[rows], R, 1.0)
    return torch.exp(-masked_mean(logprobs, valid))


def dialog_records(turns, answers, columns):
    """One dict per answer, for tables and files: last utterance, reference, answer, and more columns.

    columns: dict: name -> list with one entry per answer
    """
    records = []
    for i, (turn, answer) in enumerate(zip(turns, answers)):
        record = {"last": turn.context[-1], "reference": turn.reference, "answer": answer}
        for name, values in columns.items():
            if name in record:
                raise UserError(f"log_extra({name!r}, ...): the samples have such a column already")
            record[name] = values[i]
        records.append(record)
    return records


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
# Part II: infrastructure. Nothing below is about PPO.
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


def generate_until_compiled(policy, ids, mask, uniforms, stop_table, temperature):
    """What `generate_until` returns, from a CompiledPolicy."""

    def all_ended(tokens):
        return stop_sequence_seen(tokens, stop_table)[:, -1].all()

    tokens, logprobs = policy.sample(ids, mask, uniforms, temperature, all_ended)
    lengths = response_lengths(stop_sequence_seen(tokens, stop_table).long(), 1)
    valid = length_mask(lengths, tokens.shape[1])
    return torch.where(valid, tokens, 0), torch.where(valid, logprobs, 0.0)


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


@torch.no_grad()
def is_causal(body):
    """True if appending tokens does not change the hidden states of earlier ones."""
    ids = torch.arange(6)[None]  # [1, 6]
    full = body(ids).last_hidden_state
    prefix = body(ids[:, :5]).last_hidden_state
    return torch.allclose(full[:, :5], prefix, atol=1e-3, rtol=1e-3)


def load_critic(args, policy):
    """A value function with its own transformer, which must read the policy's tokens from left to right."""
    flag = f"--value-model-path {args.value_model_path}"
    critic = load_model(AutoModel, args.value_model_path)
    if critic.config.vocab_size < policy.config.vocab_size:
        raise UserError(f"{flag}: its vocabulary is smaller than the policy's")
    if not is_causal(critic):
        raise UserError(f"{flag}: it attends to later tokens, which a critic must not see")
    if args.gradient_checkpointing:
        critic.activation_checkpointing_enable(dict(use_reentrant=False))
    return critic


def check_context(model, name, max_tokens):
    """Raise if prompt and response can be longer than the model's context."""
    if context_length(model) < max_tokens:
        raise UserError(
            f"prompt and response can have {max_tokens} tokens together, but the context of {name} "
            f"is {context_length(model)}: lower the limits of the prompt or --response-length"
        )


def build_policy_and_value(args, max_tokens):
    """Policy, reference and value function, as the flags say, for texts of max_tokens. -> PolicyAndValue"""
    policy, reference = load_policy_and_reference(args, args.model_name_or_path)
    check_context(policy, args.model_name_or_path, max_tokens)
    critic = None
    if args.value_model_path is not None:
        critic = load_critic(args, policy)
        check_context(critic, args.value_model_path, max_tokens)
    model = PolicyAndValue(policy, reference, critic)
    folder = Path(resolve_path(args.value_model_path or args.model_name_or_path))
    if (folder / "value_head.safetensors").exists():  # saved by an earlier run
        model.value_head.load_state_dict(load_file(folder / "value_head.safetensors"))
    return model


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


def save_value(model, folder):
    """Save the value head next to the policy, or next to the critic in the subfolder critic/."""
    if model.critic is not None:
        folder = folder / "critic"
        model.critic.save_pretrained(folder)
    weights = {name: x.detach().cpu() for name, x in model.value_head.state_dict().items()}
    save_file(weights, folder / "value_head.safetensors")


# ---- Rewards -----------------------------------------------------------------------------------------------


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


def load_classifier(args, name, device):
    """A classifier as a function from texts (list of str) to logits [B, labels]; and its config."""
    model = load_model(AutoModelForSequenceClassification, name).requires_grad_(False)
    model = to_device(model, args, device).eval()
    tokenizer = load_tokenizer(name)
    tokenizer.truncation_side = "left"  # the response is at the end
    max_length = min(tokenizer.model_max_length, context_length(model))

    @torch.no_grad()
    def classify(texts):
        logits = torch.zeros(len(texts), model.config.num_labels, device=device)
        text_lengths = torch.tensor([len(text) for text in texts])
        # Similar lengths need little padding.
        for rows in text_lengths.argsort().split(args.local_rollout_forward_batch_size):
            tokens = tokenizer([texts[i] for i in rows], truncation=True, max_length=max_length).input_ids
            lengths = torch.tensor([len(row) for row in tokens])
            ids = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in tokens], batch_first=True)
            mask = length_mask(lengths, ids.shape[1])  # [rows, L], like ids
            logits[rows] = sequence_logits(model, ids.to(device), mask.to(device))
        return logits

    return classify, model.config


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


class NoWordNet:
    """Replaces nltk's WordNet if its data are not installed: no word has synonyms."""

    @staticmethod
    def synsets(word):
        return []


def load_wordnet():
    """nltk's WordNet, or NoWordNet. To install its data: python -m nltk.downloader wordnet"""
    from nltk.corpus import wordnet

    try:
        wordnet.ensure_loaded()
    except LookupError:
        return NoWordNet
    return wordnet


def meteor_matches():
    """What METEOR counts as the same word on this machine."""
    if load_wordnet() is NoWordNet:
        return "exact and stem matches, WordNet is not installed"
    return "exact, stem and WordNet synonym matches"


def load_meteor():
    """nltk's METEOR (Banerjee and Lavie 2005) as a function: reference, answer -> float from 0 to 1."""
    from nltk.stem import PorterStemmer
    from nltk.tokenize import NLTKWordTokenizer
    from nltk.translate.meteor_score import single_meteor_score

    wordnet = load_wordnet()
    stemmer = PorterStemmer()
    stemmer.stem = lru_cache(100_000)(stemmer.stem)  # the same words and references come again and again
    words = lru_cache(100_000)(NLTKWordTokenizer().tokenize)

    def meteor(reference, answer):
        return single_meteor_score(words(reference), words(answer), stemmer=stemmer, wordnet=wordnet)

    return meteor


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


def bos_ids(tokenizer):
    """[BOS] if the tokenizer begins each text with it, as those of Llama and Gemma do; else []."""
    first = tokenizer("a").input_ids[:1]
    return first if first == [tokenizer.bos_token_id] else []


def report_skipped(total, kept, reason):
    """Tell the user how many rows of the data are not used, and why."""
    if kept < total and accelerate.PartialState().is_main_process:
        print(f"skipped {total - kept:,} of {total:,} {reason}")


def load_dialogs(rows):
    """The dialogs with two or more utterances, none of them blank.

    -> list of (row, its utterances, its acts or None)
    """
    dialogs = []
    for row in rows:
        utterances, acts = row["dialog"], row.get("act")
        if not isinstance(utterances, list) or len(utterances) < 2:
            continue
        if not all(isinstance(text, str) and text.strip() for text in utterances):
            continue
        if not isinstance(acts, list) or len(acts) != len(utterances):
            acts = None
        else:  # jsonl with a missing value has floats
            acts = [int(act) if isinstance(act, float) and act.is_integer() else act for act in acts]
        dialogs.append((row, utterances, acts))
    report_skipped(len(rows), len(dialogs), "dialogs: fewer than two utterances, or a blank one")
    return dialogs


def utterance_ids(tokenizer, utterances, end):
    """Token ids of each utterance: a space, its text, the end mark. -> list of lists

    The same rule in training, rollouts and chat. Utterances are tokenized one by one, so that no token
    spans two of them and a prompt is always the beginning of its dialog, token by token.
    """
    if end == "eos":
        mark, last = "", [tokenizer.eos_token_id]
    else:
        mark, last = end, []
    texts = [f" {' '.join(text.split())}{mark}" for text in utterances]
    return [ids + last for ids in tokenizer(texts, add_special_tokens=False).input_ids]


def load_turns(rows, tokenizer, num_acts, args):
    """Every utterance but the first of each dialog. -> list of Turn

    num_acts: every turn needs an act from 1 to this number, for the intent classifier; None: no acts needed.
    """
    needed = {"dialog"} if num_acts is None else {"dialog", "act"}
    if not needed <= set(rows.column_names):
        columns = ", ".join(rows.column_names)
        raise UserError(
            f"data set {args.dataset_name!r} needs the columns dialog and act (without act: "
            f"--reward-model-path None); it has {columns}"
        )
    bos = bos_ids(tokenizer)
    turns = []
    for row, utterances, acts in load_dialogs(rows):
        tokens = utterance_ids(tokenizer, utterances, args.utterance_end)
        for t in range(1, len(utterances)):
            turn = Turn(
                columns=row,
                number=t,
                context=utterances[:t],
                reference=utterances[t][:10_000],  # METEOR and ROUGE are quadratic in its length
                act=None if acts is None else acts[t],
                prompt_tokens=context_ids(tokens[:t], args, bos),
                reference_tokens=tokens[t],
            )
            turns.append(turn)
    if num_acts is not None:
        turns = turns_with_acts(turns, num_acts, args)
    if not turns:
        raise UserError(
            f"data set {args.dataset_name!r}: no dialog has two utterances, none of them blank, "
            "and an act for each"
        )
    return turns


def turns_with_acts(turns, num_acts, args):
    """The turns that have an act; it must be one that the classifier knows."""
    kept = [turn for turn in turns if turn.act is not None]
    report_skipped(len(turns), len(kept), "answers: no act")
    for turn in kept:
        if turn.act not in range(1, num_acts + 1):
            raise UserError(
                f"data set {args.dataset_name!r}: the act {turn.act!r} is none of the classifier's, "
                f"1 to {num_acts}"
            )
    return kept


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


def draw_prompts(turns, args, *purpose):
    """The prompts, left-padded to the longest of the batch, and random numbers to sample answers with.

    -> dict: ids [B, C], bool mask [B, C], uniforms [B, T]
    """
    prompts = [torch.tensor(turn.prompt_tokens) for turn in turns]
    lengths = torch.tensor([len(prompt) for prompt in prompts])  # [B]
    ids = nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_side="left")  # [B, C]
    mask = length_mask(lengths, ids.shape[1]).flip(1)  # [B, C]
    generator = generator_for(args.seed, "tokens", *purpose)
    uniforms = torch.rand(len(turns), args.response_length, generator=generator)
    return {"ids": ids, "mask": mask, "uniforms": uniforms}


def build_stop_table(args, tokenizer, policy):
    """The automaton that finds the end of an answer: --utterance-end, or EOS. -> as in stop_sequence_table"""
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no EOS token, so no answer could end")
    mark = args.utterance_end.strip()
    if not (mark.isascii() and mark.isprintable() and mark):
        raise UserError(
            f"--utterance-end {args.utterance_end!r}: expected eos, or a mark of ASCII characters "
            "such as ' <EOU>'"
        )
    vocab_size = len(body_and_head(policy)[1].weight)  # often more than the tokenizer has
    if args.utterance_end == "eos":
        table = torch.tensor([[0], [1]]).repeat(1, vocab_size)  # states: not yet, found
    else:
        pieces = token_texts(tokenizer)
        pieces += [""] * (vocab_size - len(pieces))
        table = stop_sequence_table(pieces, mark)
    table[:, tokenizer.eos_token_id] = len(table) - 1  # EOS always ends an answer
    return table


def token_texts(tokenizer):
    """The text of each token inside a sentence. -> list of str

    Each token is decoded after another one: alone, some tokenizers would drop its first space.
    """
    first = tokenizer("a", add_special_tokens=False).input_ids[-1]
    start = len(tokenizer.decode([first]))
    pairs = [[first, token] for token in range(len(tokenizer))]
    texts = tokenizer.batch_decode(pairs, clean_up_tokenization_spaces=False)
    return [text[start:] for text in texts]


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


def report_dialog_evaluation(run, turns, before, after):
    """The final tables, evaluation.json, evaluation_samples.jsonl and curves.png."""
    args = run.args
    metrics_before, samples_before = before
    metrics_after, samples_after = after
    rows = []
    for old, new in zip(samples_before, samples_after):
        rows.append({
            "last": old["last"],
            "reference": old["reference"],
            "before": old["answer"],
            "score": old["score"],
            "after": new["answer"],
            "score after": new["score"],
        })  # fmt: skip
    texts = ("last", "reference", "before", "after")
    run.table("held-out prompts", [{name: row[name] for name in texts} for row in rows[:6]])
    of_references = reference_metrics(turns)
    comparison = []
    for name, value in metrics_before.items():
        comparison.append({
            "metric": name,
            "before": value,
            "after": metrics_after[name],
            "references": of_references.get(name, ""),
        })  # fmt: skip
    new_word = new_word_row([row["before"] for row in rows], [row["after"] for row in rows])
    run.table(f"{len(rows)} held-out prompts", [*comparison, new_word | {"references": ""}])
    report_collapse(run, new_word, metrics_before["distinct2"], metrics_after["distinct2"])
    about = {
        "before": metrics_before,
        "after": metrics_after,
        "references": of_references,
        "commonest new word": new_word,
        "n": len(rows),
        "judge": args.reward_model_path,
        "decoding": f"sampling, temperature {args.temperature}, at most {args.response_length} tokens",
        "meteor": meteor_matches(),
    }
    run.write_evaluation(about)
    run.write("evaluation_samples.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    titles = {
        "objective/scores": "score",
        "meteor": "METEOR",
        "objective/kl": "KL to the reference, nats per response",
        "policy/entropy_avg": "entropy, nats per token",
    }
    run.plot(titles, targets={"objective/kl": args.kl_target})


def reference_metrics(turns):
    """What the table shows of the answers that people gave: their variety and length. -> dict of floats"""
    references = [turn.reference for turn in turns]
    lengths = [len(turn.reference_tokens) for turn in turns]
    metrics = {
        "tokens per answer": sum(lengths) / len(lengths),
        "distinct1": distinct_ngrams(references, 1),
        "distinct2": distinct_ngrams(references, 2),
        **custom_metrics(turns, references),
    }
    return {name: float(x) for name, x in metrics.items()}


# ---- Chat --------------------------------------------------------------------------------------------------


def chat(argv):
    """Talk with a model: RUN_FOLDER_OR_MODEL, then flags. A run brings its own flags."""
    name, args = parse_chat_args(argv)
    model = load_model(AutoModelForCausalLM, name).eval()
    check_head(model, name)
    tokenizer = load_tokenizer(name)
    stop_table = build_stop_table(args, tokenizer, model)
    max_prompt_length = context_length(model) - args.response_length
    if max_prompt_length <= 0:
        raise UserError(
            f"--response-length {args.response_length} fills the model's context, without a prompt"
        )
    args = replace(args, max_prompt_length=min(args.max_prompt_length, max_prompt_length))

    print(
        f"{name}: the prompt is the last {args.num_context_utterances} utterances; "
        "`reset` forgets them, `quit` leaves"
    )
    history = []  # token ids of each utterance
    num_answers = 0
    try:
        while True:
            text = input("> You: ").strip()
            text = text.encode(errors="replace").decode()  # a terminal may send bytes that are not UTF-8
            if text == "quit":
                break
            if text == "reset":
                history = []
                print("forgotten")
            elif text:
                history += utterance_ids(tokenizer, [text], args.utterance_end)
                generator = generator_for(args.seed, "chat", num_answers)
                uniforms = torch.rand(1, args.response_length, generator=generator)
                print("> Bot: ", end="", flush=True)
                answer = stream_answer(model, tokenizer, history, uniforms, stop_table, args)
                history += utterance_ids(tokenizer, [answer], args.utterance_end)
                num_answers += 1
    except (EOFError, KeyboardInterrupt):  # Ctrl-D, Ctrl-C
        print()


def stream_answer(model, tokenizer, history, uniforms, stop_table, args):
    """Generate an answer, and print it while it is written, without its end mark. -> str"""
    found = len(stop_table) - 1
    num_printed = 0  # characters

    def print_new_text(tokens, state):
        nonlocal num_printed
        text = answer_text(tokenizer, tokens, args.utterance_end)
        if text.endswith("\ufffd"):  # the first bytes of a character: wait for the others
            return
        if state != found:  # the last `state` characters may become the end mark: wait
            text = text[: len(text) - state].rstrip()
        print(text[num_printed:], end="", flush=True)
        num_printed = max(num_printed, len(text))

    ids = torch.tensor([context_ids(history, args, bos_ids(tokenizer))])  # [1, C]
    mask = torch.ones_like(ids, dtype=torch.bool)
    tokens, _ = generate_until(model, ids, mask, uniforms, stop_table, args.temperature, print_new_text)
    lengths = response_lengths(stop_sequence_seen(tokens, stop_table).long(), 1)
    answer = answer_text(tokenizer, tokens[0, : lengths[0]], args.utterance_end)
    print(answer[num_printed:])
    return answer


def parse_chat_args(argv):
    """The words after `chat`. -> the model to load, Args

    Flags that are not given come from the run, from the recipe that starts with this model, or from Args.
    """
    if not argv or argv[0].startswith("-"):
        raise UserError(f"chat needs a run folder or a model: python {SCRIPT}.py chat RUN_FOLDER_OR_MODEL")
    name, folder = argv[0], Path(argv[0])
    default = Args()
    for recipe in RECIPES.values():
        if name == recipe.model_name_or_path or folder.resolve() == HERE / recipe.model_name_or_path:
            default = recipe
            break
    if (folder / "args.json").exists():  # a run folder
        name = str(folder / "model")
        default = flags_of_run(folder)
    elif (folder.parent / "args.json").exists():  # its model/
        default = flags_of_run(folder.parent)
    args = tyro.cli(Args, default=default, args=argv[1:], description=chat.__doc__)
    check_positive(args, "temperature", "response_length", "num_context_utterances", "max_prompt_length")
    return name, args


def flags_of_run(folder):
    """The flags of a run as Args. Of a run of another script: those that both have."""
    saved = json.loads((folder / "args.json").read_text())["args"]
    known = {name: value for name, value in saved.items() if hasattr(Args, name)}
    return replace(Args(), **known)


# ---- Command line ------------------------------------------------------------------------------------------


def check_positive(args, *names):
    """Raise if a size is 0 or less, before anything is loaded."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise UserError(f"--{name.replace('_', '-')} must be more than 0; it is {value}")


def check_dialog_args(args, batch_size):
    """Raise for flags that cannot work, before anything is loaded."""
    check_positive(args, "per_device_train_batch_size", "gradient_accumulation_steps", "num_mini_batches")
    check_positive(args, "num_ppo_epochs", "total_episodes", "local_rollout_forward_batch_size")
    check_positive(args, "num_eval_prompts", "response_length", "temperature")
    check_positive(args, "num_context_utterances", "max_prompt_length", "kl_target", "kl_horizon")
    check_model_args(args)
    check_reward_args(args)
    check_kl_args(args, batch_size)


def check_kl_args(args, batch_size):
    """Raise if one update could move the adaptive KL coefficient to 0 or below."""
    if args.kl_target is not None and batch_size >= 5 * args.kl_horizon:
        raise UserError(f"--kl-horizon {args.kl_horizon:g} must be more than 1/5 of the batch, {batch_size}")


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
    if argv[:1] == ["chat"]:
        run_command_line(chat, argv[1:])
    else:
        run_command_line(lambda: train(parse_args(argv)))


if __name__ == "__main__":
    main()
