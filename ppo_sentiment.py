"""PPO that teaches a language model to write positive film reviews.

If you know PPO from CleanRL's ppo.py, this is what language changes:

1. The state is a text and the action is the next token. The first words of a review are the prompt, and
   the policy samples the rest from softmax(logits / temperature), without top-k or top-p: exactly the
   distribution whose log-probabilities are trained.
2. The score comes once, on the last token: the classifier's logit for "positive" on the whole text.
3. Every token is also penalized for moving away from the reference model (the policy before PPO):
   -kl_coef * (logprob - ref_logprob). The coefficient adapts to keep the KL near kl_target.
4. Responses have different lengths, so every tensor needs a mask. Masks are made from lengths, never from
   `token != pad`, because many tokenizers use EOS as the padding token.
5. The value function is a linear head on the policy's own transformer, or a critic with its own weights.
6. The loss is a mean over tokens, so a long response weighs more than a short one.

Two more differences are not about language. Like OpenAI's and TRL's code, this one has no entropy bonus. As
in TRL, advantages are whitened over the whole batch; CleanRL does it per minibatch.

    python ppo_sentiment.py                            # recipe tiny: no download, no GPU, minutes on 2 cores
    python ppo_sentiment.py --learning-rate 1.41e-5    # tiny with one change; every field of Args is a flag
    python ppo_sentiment.py gpt2-imdb                  # the published experiment, from the Hub
    python ppo_sentiment.py gpt2-imdb-lora --load-in-8bit
    python ppo_sentiment.py smollm2-imdb               # after sft.py and reward_model.py with this recipe
    torchrun --nproc_per_node 2 ppo_sentiment.py       # two processes, twice the batch
    python ppo_sentiment.py --resume RUN_FOLDER        # continue a stopped run; on a CPU, bit for bit

Part I is the algorithm: flags, math, loop, evaluation, rollout, model. Part II is infrastructure: models,
rewards, data, processes, run folder, flags. Papers: PPO (Schulman et al. 2017), GAE (Schulman et al. 2016),
Fine-Tuning Language Models from Human Preferences (Ziegler et al. 2019), The N+ Implementation Details of
RLHF with PPO (Huang et al. 2024). Results, metrics, which lines to change for what: docs/ppo_sentiment.md.
"""

# `uv run ppo_sentiment.py` installs these packages and needs no other set-up.
#
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0",
#     "transformers==5.23.0",
#     "datasets==5.2.0",
#     "accelerate==1.15.0",
#     "tyro==1.0.17",
#     "rich==15.0.0",
#     "peft==0.21.2",
# ]
# ///

import copy
import csv
import datetime
import gzip
import importlib
import json
import logging
import math
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
import warnings
from collections import defaultdict
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Literal

import accelerate
import datasets
import torch
import torch.nn.functional as F
import transformers
import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

# ============================================================================================================
# Part I: the algorithm
# ============================================================================================================


@dataclass
class Args:
    """The defaults follow TRL 0.11's notebook gpt2-sentiment; recipe gpt2-imdb also sets min_text_length. The
    main differences from it: prompts have 2 to 8 tokens and responses 4 to 16 (TRL: 2 to 7 and 4 to 15); an
    epoch has 8 optimizer steps (TRL: 1, on the whole batch); gradients are clipped; no minibatch is skipped
    (TRL: if its mean ratio is above 10); there is no dropout; values start at 0.

    A command line that names no recipe and no model starts from the recipe tiny, which replaces some of these
    defaults.
    """

    # Run
    recipe: tyro.conf.Suppress[str] = "custom"  # first word of the command line
    seed: int = 1  # random seed; all sampling is a function of (seed, update)
    output_dir: str | None = None  # run folder (default: runs/<script>/<recipe>-s<seed>-<time>)
    resume: str | None = None  # continue the run in this folder
    eval_every: int = 0  # updates between evaluations during training (0: only before and after)
    save_every: int = 10  # updates between checkpoints (0: only at the end, or after a signal)
    keep_checkpoints: int = 2  # number of checkpoints to keep
    log_with: Literal["none", "wandb", "tensorboard"] = "none"  # a tracker, in addition to metrics.jsonl
    num_sample_generations: int = 10  # about how many times samples are printed; first after update 1
    num_eval_prompts: int = 128  # number of held-out prompts in the before / after table

    # Models
    model_name_or_path: str = "lvwerra/gpt2-imdb"  # the policy before PPO; also the reference
    reward_model_path: str = "lvwerra/distilbert-imdb"  # a classifier; it may use another tokenizer
    reward_label: str = "positive"  # the label whose logit is the reward: its name or number
    reward_fn: list[str] | None = None  # FILE.py:function ... as the reward; see call_reward_functions
    reward_weights: list[float] | None = None  # one for each function of --reward-fn; None: 1 each
    judge_model_path: str | None = None  # a second classifier, not seen in training, for the final table
    value_model_path: str | None = None  # a causal critic, same tokenizer, trained whole; None: a value head
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"  # auto: bf16 on GPUs that have it, else float32
    load_in_8bit: bool = False  # frozen weights in 8 bit: the base model of LoRA, or else the reference
    num_shared_layers: int = 0  # freeze embeddings and this many first layers; share them with the reference
    gradient_checkpointing: bool = False  # recompute activations in the backward pass to save memory
    lora_r: int = 0  # LoRA rank (0: train all weights); the reference is then the policy without its adapter
    lora_alpha: int = 32  # LoRA scale: the adapter adds lora_alpha / lora_r * B A
    lora_target_modules: str = "c_attn"  # layers that get an adapter: comma-separated names, or all-linear

    # Data
    dataset_name: str = "stanfordnlp/imdb"  # a Hub name or a folder of jsonl files, with a column text
    min_text_length: int = 0  # use only reviews that are longer than this, in characters
    query_min_length: int = 2  # shortest prompt, in tokens
    query_max_length: int = 8  # longest prompt, in tokens; lengths are drawn uniformly, both ends included
    response_min_length: int = 4  # a response has a random length limit, in tokens, from this ...
    response_length: int = 16  # ... to this (TRL's example: 4 to 15); EOS may end it earlier
    stop_token: Literal["eos"] | None = "eos"  # end at EOS and the model's other stop tokens; None: never
    stop_token_id: list[int] | None = None  # end responses at these token ids only; replaces --stop-token
    temperature: float = 1.0  # sampling temperature; all log-probabilities use it too

    # Batch. Episodes per update: per_device_train_batch_size x gradient_accumulation_steps x num_mini_batches
    # x processes. Unlike in CleanRL, more minibatches make the batch larger, not the minibatches smaller.

    total_episodes: int = 24_832  # number of responses in the whole run, rounded up to whole batches
    per_device_train_batch_size: int = 16  # responses per forward and backward pass on one process
    gradient_accumulation_steps: int = 1  # micro-batches per optimizer step
    num_mini_batches: int = 8  # optimizer steps per epoch
    num_ppo_epochs: int = 4  # epochs over each batch of rollouts
    local_rollout_forward_batch_size: int = 128  # responses generated, or classified, at once on one process

    # PPO
    kl_coef: float = 0.2  # KL penalty coefficient; the initial value if kl_target is set (0 stays 0)
    kl_target: float | None = 6.0  # hold the KL near this, in nats per response; None: fixed coefficient
    kl_horizon: float = 10_000  # time scale of the adaptation of kl_coef, in episodes
    # Set response_min_length to response_length with it: a lower limit leaves less room to end.
    missing_eos_penalty: float | None = None  # subtracted from the score of a response without a stop token
    score_clip: float | None = None  # clip scores to [-score_clip, score_clip]
    whiten_rewards: bool = False  # rescale rewards to std 1, keeping their mean
    gamma: float = 1.0  # discount per token
    lam: float = 0.95  # lambda of GAE
    cliprange: float = 0.2  # epsilon of the clipped policy loss
    cliprange_value: float = 0.2  # epsilon of the clipped value loss
    vf_coef: float = 0.1  # weight of the value loss

    # Optimizer
    learning_rate: float = 1.41e-5  # the highest learning rate of the schedule
    optimizer: str = "torch.optim.Adam"  # dotted name: torch.optim.AdamW, bitsandbytes.optim.Adam8bit, ...
    adam_eps: float = 1e-8  # epsilon of Adam (the N+ paper, Huang et al. 2024, uses 1e-5)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"  # shape after the warm-up
    warmup_ratio: float = 0.0  # fraction of updates in which the learning rate rises to its full value
    max_grad_norm: float | None = 1.0  # clip the gradient to this norm; None: no clipping


RECIPES = {
    "tiny": Args(  # small models and data that come with this repository
        model_name_or_path="checkpoints/reviews-lm",
        reward_model_path="checkpoints/reviews-sentiment",
        judge_model_path="checkpoints/reviews-judge",  # trained on other reviews
        dataset_name="data/reviews",
        query_max_length=5,  # a short prompt leaves the sentiment open
        response_min_length=8,
        response_length=24,
        dtype="float32",
        total_episodes=25_600,
        per_device_train_batch_size=32,
        num_mini_batches=4,
        score_clip=4.0,  # at a logit of 4 the classifier is certain: a higher one earns no more
        learning_rate=5e-5,
        lr_scheduler_type="linear",
        kl_target=4.0,
        kl_horizon=5_000,
        num_sample_generations=3,
        num_eval_prompts=512,  # the mean's standard error is 1 / sqrt(512) = 4 % of the scores' std
    ),
    "gpt2-imdb": Args(min_text_length=200),
    "gpt2-imdb-lora": Args(min_text_length=200, lora_r=16),  # everything else as in the published experiment
    # First `python sft.py smollm2-imdb && python reward_model.py smollm2-imdb`, which write to these folders.
    "smollm2-imdb": Args(
        model_name_or_path="runs/smollm2-imdb/sft/model",
        reward_model_path="runs/smollm2-imdb/reward/model",
        min_text_length=200,
        lora_r=16,
        lora_target_modules="all-linear",
        response_min_length=8,
        response_length=24,
        total_episodes=8_192,
        num_mini_batches=4,
        num_ppo_epochs=2,
        learning_rate=2e-4,
        kl_coef=0.1,
        kl_horizon=1_000,
        num_eval_prompts=256,
    ),
}


# ---- Math: pure functions of tensors -----------------------------------------------------------------------
#
# Shapes: B responses, n in a micro-batch, C positions of the prompt, T positions of the response, V tokens in
# the vocabulary, H hidden units. A row of C + T tokens is a left-padded prompt and a right-padded response,
# here with C = 4 and T = 5:
#
#     pad    pad    The    film  | was    good   EOS    pad    pad       length of the response: 3
#
# The hidden state of each token predicts the next one: "film" predicts "was".
#
# score: one number per response, from the classifier or --reward-fn. reward: one number per token, the KL
# penalty, plus the score on the last one. (In TRL's names, such as reward functions, rewards/NAME and
# env/reward_mean, a reward is a score.)


def length_mask(lengths, max_length):
    """True on the first `lengths` positions of each row. [B] -> bool [B, max_length]"""
    return torch.arange(max_length, device=lengths.device) < lengths[:, None]


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
    """PPO's clipped objective, negated (Schulman et al. 2017, eq. 7).

    Any shape -> the loss, not reduced; the ratio; bool: clipping raised the loss. All of the same shape
    """
    assert logprobs.shape == old_logprobs.shape == advantages.shape  # [n] and [n, 1] would give [n, n]
    log_ratio = logprobs - old_logprobs
    # An infinite ratio would give inf * 0 = nan: in the loss if the advantage is 0, and in the backward pass,
    # where the branch that max does not choose has a gradient of 0.
    ratio = torch.exp(log_ratio.clamp(max=40))
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    return torch.max(unclipped, clipped), ratio, clipped > unclipped


def clipped_value_loss(values, old_values, returns, cliprange_value):
    """Half the larger of two squared errors: the value's, and that of the value clipped to old_values +-
    cliprange_value.

    Any shape -> the loss, not reduced; bool: clipping raised it. Both of the same shape
    """
    assert values.shape == old_values.shape == returns.shape
    clipped_values = values.clamp(old_values - cliprange_value, old_values + cliprange_value)
    unclipped = (values - returns) ** 2
    clipped = (clipped_values - returns) ** 2
    return 0.5 * torch.max(unclipped, clipped), clipped > unclipped


def adaptive_kl_coef(kl_coef, kl, target, horizon, episodes):
    """The KL coefficient after `episodes` responses with a mean KL of `kl` nats each.

    A proportional controller (Ziegler et al. 2019, section 2.2). In `horizon` episodes the coefficient
    changes by about 20 % at most. -> float
    """
    error = kl / target - 1
    error = min(max(error, -0.2), 0.2)
    return kl_coef * (1 + error * episodes / horizon)


def learning_rate(args, update, updates):
    """The learning rate in update 1, 2, ..., updates. -> float

    It rises linearly in the first warmup_ratio of the updates. Then it is constant, or falls towards 0: along
    a line, or along half a period of a cosine (Loshchilov and Hutter 2017, eq. 5).
    """
    warmup = math.ceil(args.warmup_ratio * updates)
    if update <= warmup:
        return args.learning_rate * update / warmup
    progress = (update - 1 - warmup) / (updates - warmup)  # from 0 to less than 1
    factors = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }
    return args.learning_rate * factors[args.lr_scheduler_type]


# ---- Training ----------------------------------------------------------------------------------------------


def train(args):
    """The whole run, from the flags to the final table. -> (PolicyAndValue, run folder)"""
    check_flags(args)
    accelerator = start_accelerator(args)
    device, world = accelerator.device, accelerator.num_processes
    n, C, T = args.per_device_train_batch_size, args.query_max_length, args.response_length
    B = n * args.gradient_accumulation_steps * args.num_mini_batches * world  # episodes per update
    updates = math.ceil(args.total_episodes / B)
    if args.kl_target is not None and B >= 5 * args.kl_horizon:
        # The smallest factor of adaptive_kl_coef is 1 - 0.2 * B / kl_horizon, which must be above 0.
        raise UserError(f"--kl-horizon {args.kl_horizon:g} must be more than 1/5 of the batch, {B}")
    # What the progress bar shows: label -> metric.
    run = Run(args, accelerator, updates, status={"score": "objective/scores", "KL": "objective/kl"})

    tokenizer = load_tokenizer(args.model_name_or_path)
    refuse_appended_eos(tokenizer, args.model_name_or_path)
    train_rows, held_out_rows = load_splits(args.dataset_name)
    train_reviews = load_prompts(train_rows, tokenizer, args)
    held_out_reviews = load_prompts(held_out_rows, tokenizer, args)
    # Only for functions of --reward-fn, whose rewards may have a schedule. global_step: updates so far. All
    # evaluations use the last value, so that they score alike.
    trainer_state = transformers.TrainerState(max_steps=updates, global_step=updates)
    # get_scores(data_rows, prompts, responses, response_tokens) -> dict: name of the reward -> [B]
    get_scores = load_reward(args, trainer_state, device)
    judge = None
    if args.judge_model_path is not None:
        judge = load_label_scorer(args, args.judge_model_path, device)
    model, ref_model = load_policy_and_value(args, device)
    check_model(model.policy, args.model_name_or_path, C + T)
    stop_ids = find_stop_tokens(args, tokenizer, model.policy).to(device)  # [any number]
    is_bf16 = wants_bf16(args, device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=is_bf16)

    accelerator.print(
        f"recipe {args.recipe}: {args.model_name_or_path} on {args.dataset_name}, {device}, bf16: {is_bf16}\n"
        f"reviews that are long enough: {len(train_reviews)} of {len(train_rows)} for training, "
        f"{len(held_out_reviews)} of {len(held_out_rows)} held out; "
        f"a prompt is the first {args.query_min_length} to {C} tokens, so it may end inside a word\n"
        f"batch: {n} responses per pass x {args.gradient_accumulation_steps} accumulated "
        f"x {args.num_mini_batches} minibatches x {world} processes = {B} episodes; {updates} updates "
        f"x {args.num_ppo_epochs} epochs x {args.num_mini_batches} minibatches = "
        f"{updates * args.num_ppo_epochs * args.num_mini_batches} optimizer steps\n"
        f"score clip: {args.score_clip}"
    )

    # `model` generates, `learner` is trained. They share their weights, unless FSDP2 or ZeRO-3 shards them:
    # then the learner is a sharded copy, and copy_weights copies its weights back after each update.
    learner, optimizer = make_learner(model, args, accelerator)
    if is_bf16:  # autocast would round frozen weights (with LoRA or shared layers) in every pass
        round_frozen_weights(model.policy, only_if_exact=True)

    # The held-out prompts and their random numbers depend only on the seed, so the evaluations before and
    # after training use the same ones, and so does a resumed run: `before` is always measured with the policy
    # before PPO, since run.start loads a checkpoint only below.
    num_eval_prompts = min(args.num_eval_prompts, len(held_out_reviews))
    if num_eval_prompts < world:
        raise UserError(f"{world} processes need as many held-out prompts; there are {num_eval_prompts}")
    held_out = draw_batch(held_out_reviews, 0, num_eval_prompts, args, "held-out")
    # respond(batch) -> b (a dict of tensors), prompts, responses
    respond = partial(rollout, model, ref_model, tokenizer, stop_ids, get_scores, args=args)
    with autocast:
        before = evaluate(respond, held_out, judge, args, accelerator)

    state = run.start(B)  # update 0 in a new run
    copy_weights(learner, model)  # run.start may have loaded a checkpoint into the learner
    kl_coef = state.get("kl_coef", args.kl_coef)
    is_first_step = True

    for update in range(state["update"] + 1, updates + 1):
        # 1. Rollout. All random numbers are drawn for the global batch. Each process generates its share of
        #    the responses; then every process gets all of them. For a given B, the result does not depend
        #    on the number of processes, up to rounding.
        start_time = time.time()
        trainer_state.global_step = update - 1
        # Nothing here uses the global generators, but your own reward function might. Each process has its
        # own seed.
        set_global_seed(args.seed, update, accelerator.process_index)
        # The beginnings of the next B reviews are the prompts. With them come a length limit for each
        # response, and the random numbers to sample it with.
        prompt_batch = draw_batch(train_reviews, (update - 1) * B, B, args, update)
        with accelerator.split_between_processes(prompt_batch) as prompt_share, autocast:
            b, prompts, responses = respond(prompt_share)
        # Rollouts of all processes: a dict of tensors, [B, ...] each (its keys: see rollout). `responses` has
        # only the texts of this process.
        b = accelerator.gather(b)
        # To leave out a response, set its row of valid to False here. Then it counts in no loss and in no
        # mean over tokens. (It does in the means over responses, which step 6 logs.)
        valid = length_mask(b["lengths"], T)  # [B, T]
        # The old log-probabilities come from the forward pass of the update (see rollout), so that ratios
        # start at 1. Those of generation, one token at a time with a cache, are only compared with them. A
        # large gap means that sampling and update read different texts; bf16 explains much less.
        sampling_gap = (b["sampling_logprobs"] - b["logprobs"])[valid].abs()
        if is_first_step:
            gap = sampling_gap.mean()
            assert gap < 0.1, f"sampling and update differ by {gap:.2g} nats per token"
        rollout_end = time.time()

        # 2. Scores: clip, then subtract missing_eos_penalty from responses that did not end on their own.
        scores = b["raw_scores"]  # [B]
        if args.score_clip is not None:
            scores = scores.clamp(-args.score_clip, args.score_clip)
        if args.missing_eos_penalty is not None:
            scores = torch.where(b["stopped"], scores, scores - args.missing_eos_penalty)

        # 3. Rewards: the KL penalty on every token, the score on the last one.
        #    logprob - ref_logprob may be negative for a sampled token, but its mean over samples is the KL.
        #    So this subtracts, on average, kl_coef * KL from the objective.
        kl = b["logprobs"] - b["ref_logprobs"]  # [B, T]; both are 0 after the end of a response
        rewards = token_rewards(scores, kl, b["lengths"], kl_coef)  # [B, T]
        if args.whiten_rewards:
            rewards = masked_whiten(rewards, valid, shift_mean=False)

        # 4. Advantages, always whitened: subtract their mean (so adding a constant to all of them changes
        #    nothing), and divide by their standard deviation.
        advantages, returns = gae(rewards, b["values"], valid, args.gamma, args.lam)  # [B, T] each
        advantages = masked_whiten(advantages, valid)

        # 5. Update. Minibatches are drawn from the global batch; each process trains on its share, n rows
        #    at a time. The loss is the sum over this process's tokens, divided by the number of tokens in
        #    the minibatch on all processes. So the gradient does not depend on how a minibatch is split.
        learner.train(args.gradient_checkpointing)  # there is no dropout; only checkpointing needs train mode
        for param_group in optimizer.param_groups:
            param_group["lr"] = learning_rate(args, update, updates)
        metric_sums = defaultdict(float)  # sums over the tokens of all minibatches and epochs
        for epoch in range(args.num_ppo_epochs):
            order = torch.randperm(B, generator=generator_for(args.seed, "order", update, epoch)).to(device)
            for minibatch in order.split(B // args.num_mini_batches):
                num_tokens = valid[minibatch].sum()
                with accelerator.split_between_processes(minibatch) as share:
                    share = share[b["lengths"][share].argsort(stable=True)]  # similar lengths: less padding
                # Do not drop rows here: accelerate counts the micro-batches (asserted below).
                for rows in share.split(n):  # a micro-batch: n rows of the minibatch; mb_ names its tensors
                    # What follows the longest response is cut off. t is the T of the functions called below.
                    t = b["lengths"][rows].max().item()
                    mb_valid = valid[rows, :t]  # [n, t]
                    old_logprobs, old_values = b["logprobs"][rows, :t], b["values"][rows, :t]  # [n, t]
                    mb_advantages, mb_returns = advantages[rows, :t], returns[rows, :t]  # [n, t]

                    # accumulate: processes exchange gradients only at the last micro-batch.
                    with accelerator.accumulate(learner):
                        with autocast:
                            new_logprobs, entropies, new_values = learner(
                                b["ids"][rows, : C + t], b["mask"][rows, : C + t], t, args.temperature
                            )  # [n, t] each, 0 after the end of a response; only these have a gradient
                        policy_loss, ratio, is_clipped = clipped_policy_loss(
                            new_logprobs, old_logprobs, mb_advantages, args.cliprange
                        )
                        value_loss, is_value_clipped = clipped_value_loss(
                            new_values, old_values, mb_returns, args.cliprange_value
                        )
                        loss = ((policy_loss + args.vf_coef * value_loss) * mb_valid).sum() / num_tokens
                        # We want the sum, but DDP averages over processes, and accelerate over micro-batches.
                        accelerator.backward(loss * world * args.gradient_accumulation_steps)

                    with torch.no_grad():
                        log_ratio = new_logprobs - old_logprobs
                        # approxkl: KL between the old and the new policy. It is estimated by k2, as in TRL;
                        # CleanRL uses k3 (joschu.net/blog/kl-approx.html compares them).
                        # clipfrac: how often clipping changes the loss (CleanRL: ratios outside the range).
                        token_metrics = {
                            "loss/policy_avg": policy_loss,
                            "loss/value_avg": value_loss,
                            "policy/entropy_avg": entropies,
                            "policy/approxkl_avg": 0.5 * log_ratio**2,
                            "policy/clipfrac_avg": is_clipped,
                            "val/clipfrac_avg": is_value_clipped,
                            "val/ratio": ratio,
                            "val/ratio_var": (ratio - 1) ** 2,  # becomes the variance below
                        }
                        metric_sums["tokens"] += mb_valid.sum()
                        for name, x in token_metrics.items():
                            metric_sums[name] += (x * mb_valid).sum()
                        # No optimizer step since the rollout: these are log-probabilities of one policy.
                        if is_first_step:
                            gap = (log_ratio.abs() * mb_valid).sum() / mb_valid.sum().clamp(min=1)
                            assert gap < 0.02, f"rollout and update differ by {gap:.2g} nats per token"

                assert accelerator.sync_gradients, "no optimizer step: too few or too many micro-batches"
                is_first_step = False
                grad_norm = accelerator.clip_grad_norm_(learner.parameters(), args.max_grad_norm or math.inf)
                optimizer.step()
                optimizer.zero_grad()
        copy_weights(learner, model)

        # 6. Log. Metrics that TRL also logs keep its names: "objective/scores" is after clipping and penalty,
        #    "env/reward_mean" is before.
        metric_sums = accelerator.reduce(dict(metric_sums), "sum")
        tokens_trained = metric_sums.pop("tokens")
        update_metrics = {name: x / tokens_trained for name, x in metric_sums.items()}
        # var r = E[(r - 1)^2] - (E[r - 1])^2
        update_metrics["val/ratio_var"] -= (update_metrics["val/ratio"] - 1) ** 2
        kl_per_response = kl.sum(1).mean()
        lengths = b["lengths"].float()
        metrics = {
            "update": update,
            "episode": update * B,
            "lr": optimizer.param_groups[0]["lr"],
            "objective/kl": kl_per_response,
            "objective/kl_coef": kl_coef,
            "objective/entropy": -b["logprobs"].sum(1).mean(),  # per response, estimated from its own tokens
            "objective/non_score_reward": -kl_coef * kl_per_response,
            "objective/rlhf_reward": scores.mean() - kl_coef * kl_per_response,
            "objective/scores": scores.mean(),
            **update_metrics,
            "grad_norm": unshard(grad_norm),  # of the last optimizer step, before clipping
            "val/num_eos_tokens": b["stopped"].sum(),
            "env/reward_mean": b["raw_scores"].mean(),
            "env/reward_std": b["raw_scores"].std(correction=0),
            **reward_means(b),  # rewards/NAME/mean, one for each reward function
            "completions/mean_length": lengths.mean(),
            "completions/min_length": lengths.min(),
            "completions/max_length": lengths.max(),
            "completions/clipped_ratio": 1 - b["stopped"].float().mean(),  # cut off at their limit
            "completions/distinct_2": distinct_bigrams(accelerate.utils.gather_object(responses)),
            "sampling/logprob_gap_mean": sampling_gap.mean(),
            "sampling/logprob_gap_max": sampling_gap.max(),
            **performance_metrics(start_time, rollout_end, lengths.sum(), device),
        }
        metrics["eps"] = B / metrics["perf/seconds"]  # episodes per second
        if args.eval_every and update % args.eval_every == 0 and update < updates:
            trainer_state.global_step = updates  # as in the other evaluations
            with autocast:
                evaluation, _ = evaluate(respond, held_out, judge, args, accelerator)
            metrics |= {f"eval/{name}": x for name, x in evaluation.items()}
        metrics = run.log(metrics)  # tensors become numbers; raises if one is not finite
        if (scores == scores[0]).all():
            accelerator.print("all scores are equal (because of --score-clip?): the reward teaches nothing")
        if args.num_sample_generations and (
            update == 1 or update % max(1, updates // args.num_sample_generations) == 0
        ):
            token_columns = {
                "ids": b["ids"][:, C:],
                "logprob": b["logprobs"],
                "entropy": b["entropies"],
                "kl": kl,
                "reward": rewards,
                "value": b["values"],
                "return": returns,
                "advantage": advantages,
            }
            # The main process generated the first rows of the batch, so its texts match the first scores.
            samples = {"prompt": prompts[:4], "response": responses[:4]}
            samples["score"] = b["raw_scores"][:4].tolist()  # as in the evaluation, before clip and penalty
            samples["score paid"] = scores[:4].tolist()  # after clip and penalty
            log_samples(run, update, rows_of(samples), b["lengths"], token_columns)

        # 7. Adapt the KL coefficient for the next update, and save.
        if args.kl_target is not None:
            kl_coef = adaptive_kl_coef(kl_coef, metrics["objective/kl"], args.kl_target, args.kl_horizon, B)
        run.checkpoint({"update": update, "batch_size": B, "kl_coef": kl_coef})

    # 8. Evaluate on the same held-out prompts again, and save the model.
    trainer_state.global_step = updates
    with autocast:
        after = evaluate(respond, held_out, judge, args, accelerator)
    if accelerator.is_main_process:
        report_evaluation(run, before, after)
        save_policy_and_value(model, tokenizer, run.folder / "model")
    run.finish()
    return model, run.folder


# ---- Evaluation --------------------------------------------------------------------------------------------


def evaluate(respond, batch, judge, args, accelerator):
    """Respond to the held-out prompts, with the same random numbers before and after training.

    respond: rollout, with everything but the prompts filled in. Each process takes its share of the prompts.
    -> metrics (dict of floats), one dict(prompt, response, score) per prompt; scores without clip and penalty
    """
    # Nothing here uses the global generators, but your own reward function might.
    set_global_seed(args.seed, "held-out", accelerator.process_index)
    with accelerator.split_between_processes(dict(batch)) as share:  # a copy, because accelerate changes it
        b, prompts, responses = respond(share)
    columns = {
        "prompt": prompts,
        "response": responses,
        "score": b["raw_scores"].tolist(),
        "kl": (b["logprobs"] - b["ref_logprobs"]).sum(1).tolist(),
        "length": b["lengths"].tolist(),
    }
    if judge is not None:
        _, probabilities = judge(prompts, responses)
        columns["judge"] = probabilities.tolist()
    rows = accelerate.utils.gather_object(rows_of(columns))  # of all processes, in the order of the prompts
    gathered = {name: [row[name] for row in rows] for name in columns}
    metrics = {
        "score mean": fmean(gathered["score"]),
        "score mean, +-": 1.96 * pstdev(gathered["score"]) / len(rows) ** 0.5,  # half of the 95 % interval
        "score median": median(gathered["score"]),
        "KL, nats per response": fmean(gathered["kl"]),
        "distinct bigrams": distinct_bigrams(gathered["response"]),
        "tokens per response": fmean(gathered["length"]),
    }
    if judge is not None:
        metrics[f"judge: P({args.reward_label})"] = fmean(gathered["judge"])
    samples = [{name: row[name] for name in ("prompt", "response", "score")} for row in rows]
    return metrics, samples


def distinct_bigrams(texts):
    """Different pairs of neighboring words / all pairs, in all texts (compare Li et al. 2016). -> float

    It falls if a policy repeats itself, even if no two responses are equal. It also falls as the number of
    texts grows, so compare only equal numbers of texts.
    """
    pairs = []
    for text in texts:
        # Chinese, Japanese, Thai and others have no spaces between words: each character counts as one.
        words = re.sub(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u9fff]", r" \g<0> ", text)
        words = words.lower().split()
        pairs.extend(zip(words, words[1:]))
    return len(set(pairs)) / max(len(pairs), 1)


# ---- Rollout -----------------------------------------------------------------------------------------------


def draw_batch(reviews, start, B, args, purpose):
    """Prompts cut to random lengths, a length limit per response, and random numbers to sample with.

    The prompts are the beginnings of reviews start to start + B - 1 of an endless stream of shuffled passes.
    All other draws depend only on the seed and the purpose: the number of the update, or "held-out".

    The policy is not told its limit, so it cannot plan to finish in time. With missing_eos_penalty, set
    response_min_length to response_length: else responses with a low limit are penalized because they had
    less room to end.
    -> dict: reviews (list of B), ids [B, C], bool mask [B, C], max_new_tokens [B], uniforms [B, T]
    """
    C, T = args.query_max_length, args.response_length
    reviews = [reviews[row] for row in stream_rows(len(reviews), start, B, args.seed)]
    prompt_lengths = torch.randint(
        args.query_min_length, C + 1, (B,), generator=generator_for(args.seed, "query", purpose)
    )
    max_new_tokens = torch.randint(
        args.response_min_length, T + 1, (B,), generator=generator_for(args.seed, "room", purpose)
    )
    generator = generator_for(args.seed, "tokens", purpose)
    uniforms = torch.rand(B, T, dtype=torch.float64, generator=generator)
    prompts = [review["ids"][:length] for review, length in zip(reviews, prompt_lengths)]
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    mask = length_mask(lengths, C).flip(1)  # [B, C], prompts end in the last column
    ids = torch.zeros(B, C, dtype=torch.long)  # 0 only fills the row: the mask hides it
    ids[mask] = torch.tensor([token for prompt in prompts for token in prompt])
    return dict(reviews=reviews, ids=ids, mask=mask, max_new_tokens=max_new_tokens, uniforms=uniforms)


def stream_rows(num_rows, start, count, seed):
    """Row numbers start ... start + count - 1 of an endless stream of shuffled passes. -> [count]"""
    first, last = start // num_rows, (start + count - 1) // num_rows
    generators = [generator_for(seed, "pass", number) for number in range(first, last + 1)]
    rows = torch.cat([torch.randperm(num_rows, generator=generator) for generator in generators])
    return rows[start - first * num_rows :][:count]


def generator_for(seed, *purpose):
    """A random generator for one purpose, such as (seed, "tokens", update), independent of all others."""
    # random.Random hashes a str with SHA-512, which is the same in every process; hash() is not.
    return torch.Generator().manual_seed(random.Random(repr((seed, *purpose))).getrandbits(63))


@torch.no_grad()
def rollout(model, ref_model, tokenizer, stop_ids, get_scores, batch, args):
    """Sample a response to each prompt, score it, and compute the log-probabilities that PPO calls old.

    batch: from draw_batch; get_scores: from load_reward. Returns
    - a dict of tensors: ids, mask [B, C + T]; lengths, stopped, raw_scores, rewards/NAME [B]; logprobs,
      ref_logprobs, sampling_logprobs, entropies, values [B, T]
    - prompts and responses, lists of B str
    """
    model.eval()
    batch = accelerate.utils.send_to_device(batch, stop_ids.device)
    prompt_ids, prompt_mask = batch["ids"], batch["mask"]  # [B, C], left-padded
    max_new_tokens, uniforms = batch["max_new_tokens"], batch["uniforms"]  # [B], [B, T]
    (B, C), T = prompt_ids.shape, args.response_length

    # 1. Generate.
    tokens = torch.zeros(B, T, dtype=torch.long, device=stop_ids.device)
    sampling_logprobs = torch.zeros(B, T, device=stop_ids.device)
    for rows in torch.arange(B, device=stop_ids.device).split(args.local_rollout_forward_batch_size):
        inputs = prompt_ids[rows], prompt_mask[rows], max_new_tokens[rows], uniforms[rows]
        tokens[rows], sampling_logprobs[rows] = generate(model.policy, *inputs, stop_ids, args.temperature)
    lengths = torch.minimum(response_lengths(tokens, stop_ids), max_new_tokens)  # [B]
    valid = length_mask(lengths, T)  # [B, T]
    is_stop = torch.isin(tokens, stop_ids) & valid  # [B, T]

    # 2. Decode and score. The reward reads text, because it may have another tokenizer.
    prompt_tokens = list_tokens(prompt_ids, prompt_mask)
    response_tokens = list_tokens(tokens, valid)
    # A stop token is not part of the text, unless --stop-token-id names an ordinary one, such as ".".
    cut_ids = {*stop_ids.tolist()}
    if args.stop_token_id is not None:
        cut_ids &= {*tokenizer.all_special_ids}
    text_tokens = [ids[:-1] if ids[-1] in cut_ids else ids for ids in response_tokens]
    prompts, responses = decode(tokenizer, prompt_tokens, text_tokens)  # lists of B str
    data_rows = [review["columns"] for review in batch["reviews"]]
    scores_by_name = get_scores(data_rows, prompts, responses, response_tokens)  # name -> [B]

    # 3. Compute log-probabilities and values of the tokens exactly as in the update: with the same forward
    #    pass, and as many rows at a time. Dropout is 0, so the ratio is 1 until the first optimizer step, up
    #    to rounding. The log-probabilities from generation differ more: they are only checked and logged.
    ids = torch.cat([prompt_ids, tokens], 1)  # [B, C + T]
    mask = torch.cat([prompt_mask, valid], 1)  # [B, C + T]
    logprobs, entropies, values, ref_logprobs = torch.zeros(4, B, T, device=ids.device)
    for rows in lengths.argsort(stable=True).split(args.per_device_train_batch_size):
        t = lengths[rows].max().item()
        inputs = ids[rows, : C + t], mask[rows, : C + t], t, args.temperature
        logprobs[rows, :t], entropies[rows, :t], values[rows, :t] = model(*inputs)
        ref_logprobs[rows, :t] = reference_logprobs(ref_model, model.policy, *inputs)

    b = {
        "ids": ids,
        "mask": mask,
        "lengths": lengths,
        "stopped": is_stop.any(1),
        "raw_scores": weighted_sum(scores_by_name, args.reward_weights),
        "logprobs": logprobs,
        "ref_logprobs": ref_logprobs,
        "sampling_logprobs": sampling_logprobs,
        "entropies": entropies,
        "values": values,
        **{f"rewards/{name}": x for name, x in scores_by_name.items()},
    }
    return b, prompts, responses


def weighted_sum(scores, weights=None):
    """The sum of weight * score.

    scores: dict of name -> [B]; weights: floats in the same order, or None for 1 each. -> [B]
    A nan means that a score does not apply to a row (the function returned None), and counts as 0.
    """
    weights = weights or [1.0] * len(scores)
    return sum(weight * values.nan_to_num() for weight, values in zip(weights, scores.values(), strict=True))


@torch.no_grad()
def generate(policy, ids, mask, max_new_tokens, uniforms, stop_ids, temperature):
    """Sample each response until a stop token or its own limit. No top-k, no top-p, no minimum length.

    Left-padded ids, mask [B, C]; max_new_tokens [B]; uniforms [B, T], one random number per token; stop_ids
    [any number]
    -> tokens [B, T] and the log-probabilities they were sampled with, fp32 [B, T]; both 0 after the end
    """
    B, T = uniforms.shape
    body, head = body_and_head(policy)
    cache = transformers.DynamicCache(config=body.config)
    hidden = hidden_states(body, ids, mask, cache)[:, -1]  # [B, H]
    tokens = torch.zeros(B, T, dtype=torch.long, device=ids.device)
    logprobs = torch.zeros(B, T, device=ids.device)
    rows = torch.arange(B, device=ids.device)  # the rows that are still being written
    for t in range(T):
        token, logprob = sample_next(head, hidden, uniforms[rows, t], temperature)  # [rows] each
        tokens[rows, t], logprobs[rows, t] = token, logprob
        # Drop the finished rows.
        is_finished = torch.isin(token, stop_ids) | (t + 1 >= max_new_tokens[rows])  # [rows]
        keep = (~is_finished).nonzero().squeeze(1)
        if len(keep) == 0:
            break
        if len(keep) < len(rows):
            # Made for beams, but it also drops rows. (batch_select_indices fails with linear attention.)
            cache.reorder_cache(keep)
            rows, token, mask = rows[keep], token[keep], mask[keep]
        # Read the token.
        mask = F.pad(mask, (0, 1), value=True)
        hidden = hidden_states(body, token[:, None], mask, cache)[:, -1]  # [rows, H]
    return tokens, logprobs


def sample_next(head, hidden, uniforms, temperature):
    """Sample the next token of each row.

    head: the output layer; hidden [B, H]; uniforms [B] -> tokens, log-probabilities [B]
    """
    probs = token_logits(hidden, head.weight, temperature, head.bias).softmax(-1)  # [B, V]
    token = sample_tokens(probs, uniforms)
    return token, probs.gather(1, token[:, None]).squeeze(1).log()


def sample_tokens(probs, uniforms):
    """Sample one token per row by inverting the cumulative distribution. fp32 [B, V], [B] in [0, 1) -> [B]

    Unlike torch.multinomial, each token depends only on its own row and its own uniform number. So for the
    same probabilities, the samples are the same no matter how a batch is split. Uniforms and sums are in
    fp64. In fp32, uniforms would be multiples of 2^-24, which miss most tokens with probabilities below 6e-8,
    and sums would lose small probabilities.
    """
    ends = probs.cumsum(1, dtype=torch.float64)  # [B, V]
    target = uniforms[:, None] * ends[:, -1:]  # [B, 1]
    # right=True never selects what has probability 0. With NaN, the index is past the end, hence the clamp.
    # (Then the loss is NaN too, and the run ends with an error message.)
    token = torch.searchsorted(ends, target, right=True).squeeze(1)
    return token.clamp(max=probs.shape[1] - 1)


def response_lengths(tokens, stop_ids):
    """Number of tokens up to and including the first stop token; T if there is none. [B, T] -> [B]

    stop_ids: one id, or a tensor of several
    """
    T = tokens.shape[1]
    position = torch.arange(1, T + 1, device=tokens.device)  # [T]
    return torch.where(torch.isin(tokens, stop_ids), position, T).amin(1)


# ---- Policy, value function, reference ---------------------------------------------------------------------


class PolicyAndValue(nn.Module):
    """Policy and value function in one module, so that DDP has a single module to wrap."""

    def __init__(self, policy, critic=None):
        super().__init__()
        self.policy = policy
        self.critic = critic  # None: the value head reads the policy's hidden states
        # The width of the last hidden states is that of the output layer's input. (Not config.hidden_size:
        # OPT-350m projects them to the embeddings' size.) A critic has no output layer; its embeddings have
        # that width too.
        embeddings = policy.get_output_embeddings() if critic is None else critic.get_input_embeddings()
        self.value_head = nn.Linear(embeddings.weight.shape[1], 1)
        # Values start at 0, so the first advantages are the rewards to come, discounted by gamma * lam.
        # (load_policy_and_value loads the head of an earlier run, if there is one.)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, ids, mask, T, temperature):
        """Log-probabilities, entropies and values of the last T tokens of each row.

        ids [B, C + T], bool mask [B, C + T] -> three tensors, fp32 [B, T], 0 after the end of a response. The
        value is predicted from the state before the token.
        """
        logprobs, entropies, hidden = response_logprobs(self.policy, ids, mask, T, temperature)
        if self.critic is not None:
            hidden = hidden_states(self.critic, ids, mask)[:, -T - 1 : -1]  # [B, T, H]
        with torch.autocast(ids.device.type, enabled=False):
            values = self.value_head(hidden.float()).squeeze(-1)  # [B, T]
        return logprobs, entropies, torch.where(mask[:, -T:], values, 0.0)


def reference_logprobs(ref_model, policy, *inputs):
    """Log-probabilities under the reference or, if ref_model is None, the policy without its LoRA adapter.

    inputs: those of response_logprobs -> fp32 [B, T]
    """
    if ref_model is not None:
        return response_logprobs(ref_model, *inputs)[0]
    with policy.disable_adapter():
        return response_logprobs(policy, *inputs)[0]


def response_logprobs(lm, ids, mask, T, temperature):
    """Log-probabilities of the last T tokens of each row, 0 after the end of a response.

    ids [B, C + T], bool mask [B, C + T] -> logprobs, entropies, both fp32 [B, T]; and the hidden states that
    predict these tokens [B, T, H]
    """
    body, head = body_and_head(lm)
    # The state at position t - 1 predicts token t.
    hidden = hidden_states(body, ids, mask)[:, -T - 1 : -1]  # [B, T, H]
    # The output layer is large, so only valid tokens go through it, as a flat list.
    valid = mask[:, -T:]
    rows, columns = valid.nonzero(as_tuple=True)  # only once, because nonzero waits for the GPU
    flat_hidden, flat_tokens = hidden[rows, columns], ids[:, -T:][rows, columns]
    # log softmax of token_logits at the tokens, and its entropies. Part II computes them in chunks of rows.
    logprobs, entropies = token_logprobs(flat_hidden, head.weight, flat_tokens, temperature, head.bias)
    zeros = torch.zeros(valid.shape, device=ids.device)
    return zeros.masked_scatter(valid, logprobs), zeros.masked_scatter(valid, entropies), hidden


def body_and_head(lm):
    """The transformer of a causal language model, and its output layer. Works with and without LoRA."""
    if hasattr(lm, "get_base_model"):
        lm = lm.get_base_model()  # peft: this only unwraps, the adapter stays inside the layers
    return lm.base_model, lm.get_output_embeddings()


def hidden_states(body, ids, mask, cache=None):
    """Hidden states of the last layer, for the tokens that are not in the cache yet.

    ids [B, L], bool mask [B, cached + L] -> [B, L, H]. With left padding, the first real token is not in
    column 0. So positions count only real tokens.
    """
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)
    outputs = body(
        input_ids=ids,
        attention_mask=mask.long(),
        position_ids=positions[:, -ids.shape[1] :],
        past_key_values=cache,
        use_cache=cache is not None,
    )
    return outputs.last_hidden_state


def token_logits(hidden, weight, temperature=1.0, bias=None):
    """The output layer, in fp32 (TF32 on a GPU), under autocast too. [N, H], [V, H], [V] or None -> [N, V]

    Logits of a language model may be near -100, where neighboring bf16 numbers are 0.5 apart.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        hidden = hidden.float() / temperature  # [N, H]; dividing the logits [N, V] would take longer
        return F.linear(hidden, weight.float(), None if bias is None else bias / temperature)


# ============================================================================================================
# Part II: infrastructure. Nothing below is needed to understand PPO: it covers models, rewards, data, files
# and flags. The scripts share these functions, copied verbatim, so some arguments are not used in this one.
# ============================================================================================================

SCRIPT = Path(__file__).stem
HERE = Path(__file__).resolve().parent  # recipes name folders next to this file


class UserError(Exception):
    """An error the user can fix: printed on one line, exit code 2.

    Only for mistakes that would otherwise be silent, and for the most common ones. The libraries report
    everything else, with a traceback.
    """


# ---- Models ------------------------------------------------------------------------------------------------


def resolve_path(name):
    """Look for a folder in the working directory, then next to this file; else return a Hub name.

    A run folder means the model in it.
    """
    for path in (Path(name), HERE / name):
        if path.exists():
            return str(path / "model" if (path / "model/config.json").exists() else path)
    # transformers would say that there is no connection to the Hub.
    if str(name).startswith(("/", ".", "checkpoints/", "data/", "runs/")):
        raise UserError(f"{name}: no such file or folder")
    return name


def load_model(auto_class, name, new_head=False, **kwargs):
    """A model in fp32 without dropout. If the folder holds a LoRA adapter, it is merged into its base model.
    Some kinds of layers are replaced by faster equivalents.

    Weights that are missing from the checkpoint would be random, so they are refused. new_head: accept it if
    those of the head are missing.
    """
    path = resolve_path(name)
    if transformers.utils.peft_utils.find_adapter_config_file(path) is not None:
        import peft

        adapter = peft.PeftConfig.from_pretrained(path)
        new_head = new_head or adapter.task_type == "SEQ_CLS"  # then peft saves the head with the adapter
        base = load_model(auto_class, adapter.base_model_name_or_path, new_head, **kwargs)
        model = peft.PeftModel.from_pretrained(base, path).merge_and_unload()
        model.name_or_path = path  # a new adapter trained on top will name this as its base
        for p in model.parameters():
            p.requires_grad_(p.is_floating_point())  # peft froze them
        return model
    kwargs |= dict(dtype=torch.float32, output_loading_info=True)
    device = accelerate.PartialState().device
    if device.type == "cuda":  # else the models of all processes would be in the CPU's memory first
        kwargs["device_map"] = {"": device}
    model, report = auto_class.from_pretrained(path, **kwargs)
    missing = [*report["missing_keys"], *(key for key, *shapes in report["mismatched_keys"])]
    if new_head:
        # Accept missing weights outside of the transformer, and in BERT's pooler, which is part of the head.
        body = f"{model.base_model_prefix}."
        missing = [key for key in missing if key.startswith(body) and "pooler" not in key]
    if missing:
        raise UserError(f"{name}: weights are missing from the checkpoint, such as {min(missing)}")
    for module in model.modules():
        for key, value in vars(module).items():
            is_noise = "drop" in key or "jitter" in key or isinstance(module, nn.Dropout)
            if isinstance(value, float) and is_noise:
                setattr(module, key, 0.0)  # otherwise two forward passes would differ
        for key, child in module.named_children():
            if isinstance(child, transformers.activations.NewGELUActivation):
                setattr(module, key, nn.GELU("tanh"))  # the same function in one kernel instead of eight
            if type(child).__name__ in ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"):
                norm = nn.RMSNorm(len(child.weight), child.variance_epsilon)  # one kernel instead of six
                norm.weight = child.weight
                setattr(module, key, norm)
    return model


def context_length(config):
    """The number of tokens that a model can read; a million if its config does not say."""
    context = getattr(config.get_text_config(), "max_position_embeddings", None) or -1
    return context if context > 0 else 1_000_000


def load_tokenizer(name):
    """The tokenizer of a folder or Hub name. If it has no pad token, EOS becomes the pad."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_path(name))
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    # Without tokenizer files, transformers returns a tokenizer with nothing but special and added tokens.
    if set(tokenizer.get_vocab()) <= set(tokenizer.get_added_vocab()):
        raise UserError(f"{name} has no tokenizer")
    return tokenizer


def refuse_appended_eos(tokenizer, name):
    """Raise if the tokenizer appends EOS to every text, because a prompt does not end there."""
    last, last_of_text = tokenizer("a").input_ids[-1], tokenizer("a", add_special_tokens=False).input_ids[-1]
    if last == tokenizer.eos_token_id and last != last_of_text:
        raise UserError(f"{name}: its tokenizer appends EOS to every text; set add_eos_token to false")


def refuse_two_bos(tokenizer, texts):
    """Raise if a text (a list of token ids) begins with BOS twice: one of its own, and the tokenizer's."""
    if tokenizer.bos_token_id is not None and any(ids[:2] == 2 * [tokenizer.bos_token_id] for ids in texts):
        raise UserError("a text begins with BOS twice: the tokenizer adds one, so remove it from the data")


@torch.no_grad()
def check_model(lm, name, max_tokens):
    """Refuse a model unless sampling, update and the model itself compute the same log-probabilities.

    This samples a few tokens after two left-padded prompts. Prompt and response have max_tokens tokens
    together, so that a sliding window shows too. The first response ends before the second one, so its row
    leaves the cache.
    """
    if context_length(lm.config) < max_tokens:
        raise UserError(
            f"{name} reads fewer tokens than the {max_tokens} of prompt and response together: lower "
            "--query-max-length or --response-length"
        )
    C, T, device = max(max_tokens - 4, 4), 4, lm.device
    prompt_lengths = torch.tensor([C // 2, C - 1], device=device)
    lengths = torch.tensor([2, 4], device=device)  # of the responses
    ids = torch.randint(lm.config.get_text_config().vocab_size, (2, C), device=device)
    mask = length_mask(prompt_lengths, C).flip(1)
    no_stop = torch.tensor([-1], device=device)
    uniforms = torch.rand(2, T, dtype=torch.float64, device=device)
    tokens, sampled = generate(lm.eval(), ids, mask, lengths, uniforms, no_stop, 1.0)  # [2, T] each
    ids, mask = torch.cat([ids, tokens], 1), torch.cat([mask, length_mask(lengths, T)], 1)
    # In train mode, so that any dropout that was left on is noticed.
    updated, _, _ = response_logprobs(lm.train(), ids, mask, T, 1.0)  # [2, T]
    compare_logprobs(lm, name, ids, mask, lengths, sampled, updated)


def compare_logprobs(lm, name, ids, mask, lengths, *ours):
    """Refuse a model whose own log-probabilities of the responses differ from those that we computed.

    ids, mask [B, C + T]; lengths of the responses [B]; ours: computed in two ways, [B, T] each
    """
    # Some models squash their logits: Gemma 2 computes 30 * tanh(logits / 30). That shows only when
    # logits are large. So they are multiplied by 64 before the tanh, and divided by 64 after it.
    hook = lm.get_output_embeddings().register_forward_hook(lambda module, inputs, logits: 64 * logits)
    own = torch.zeros(len(ids), device=ids.device)  # sums over the tokens of a response
    for row, length in enumerate(lengths.tolist()):
        text = ids[row, mask[row]]  # without padding
        logits = lm(text[None], logits_to_keep=length + 1).logits[0, :-1].float() / 64  # [length, V]
        own[row] = -F.cross_entropy(logits, text[-length:], reduction="sum")
    hook.remove()
    gap = (torch.stack(ours).sum(2) - own).abs().max()
    if not gap < (0.3 if getattr(lm, "is_quantized", False) else 0.1):  # 8-bit weights are rounded
        raise UserError(f"{name} does not work here: its own log-probabilities differ from ours by {gap:.2g}")


@torch.no_grad()
def check_critic(critic, name):
    """Refuse a critic unless it reads from left to right, after padding too."""
    ids = torch.arange(8, device=critic.device)[None]  # 0, 1: pads; 7: a token that 2 to 6 must not see
    alone = critic(ids[:, 2:7]).last_hidden_state  # [1, 5, H]
    padded = hidden_states(critic, ids, ids >= 2)[:, 2:7]
    if not torch.allclose(padded, alone, rtol=0.01, atol=0.01):  # TF32 rounds by about 0.001
        raise UserError(f"--value-model-path {name}: it sees later tokens, or cannot read left-padded rows")


def trainable(module):
    """The parameters that the optimizer trains and a checkpoint holds. -> dict: name -> parameter"""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def transformer_layers(model):
    """The list of a model's transformer layers, which is its longest ModuleList."""
    return max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)


@torch.no_grad()
def round_frozen_weights(model, only_if_exact):
    """Store the frozen weights of linear layers in bf16. Under autocast in bf16, no result changes.

    Autocast would round them in every forward pass, because it keeps rounded copies of trained weights only.
    only_if_exact: leave out weights that would change, because the model is saved. (A checkpoint in bf16 has
    none.) Call it after make_learner: FSDP2 shards layers whose weights have one dtype.
    """
    for layer in transformer_layers(model).modules():
        if isinstance(layer, (nn.Linear, transformers.pytorch_utils.Conv1D)):
            weight = layer.weight
            if weight.requires_grad or weight.dtype != torch.float32:  # trained, or quantized
                continue
            rounded = weight.bfloat16()
            if not only_if_exact or torch.equal(rounded.float(), weight):
                weight.data = rounded


def add_lora(model, args):
    """Add a LoRA adapter (Hu et al. 2021): each named layer computes W + lora_alpha / lora_r * B A, where B
    starts at 0."""
    import peft

    names = args.lora_target_modules.replace(" ", "").split(",")
    targets = "all-linear" if names == ["all-linear"] else names
    config = peft.LoraConfig(r=args.lora_r, lora_alpha=args.lora_alpha, target_modules=targets)
    model = peft.get_peft_model(model, config)
    found = {layer.split(".")[-1] for layer in model.targeted_module_names}
    if targets != "all-linear" and found != set(names):  # peft complains only if it finds none
        raise UserError(f"--lora-target-modules {','.join(names)}: only {found} are names of layers")
    # Some scripts read the output layer's weights, without an adapter. Embeddings may share these weights.
    base = model.get_base_model()
    if any(hasattr(x, "base_layer") for x in (base.get_input_embeddings(), base.get_output_embeddings())):
        raise UserError("--lora-target-modules: embeddings and the output layer cannot have an adapter")
    return model


def freeze_layers(policy, count):
    """Freeze the policy's embeddings and first layers. load_reference shares them."""
    layers = transformer_layers(policy)
    if count > len(layers):
        raise UserError(f"--num-shared-layers {count}: the model has {len(layers)} layers")
    embeddings = [m for m in policy.modules() if isinstance(m, nn.Embedding)]
    for module in (*embeddings, *layers[:count]):
        module.requires_grad_(False)


def load_policy(args, name, device):
    """The policy to train."""
    if args.num_shared_layers and (args.lora_r or args.load_in_8bit):
        raise UserError("--num-shared-layers cannot be combined with --lora-r or --load-in-8bit")
    policy = load_model(AutoModelForCausalLM, name, **(eight_bit(args) if args.lora_r else {})).to(device)
    if not all(p.is_floating_point() for p in policy.parameters()) and not args.lora_r:
        raise UserError(f"{name}: quantized weights cannot be trained: add --lora-r 16")
    if args.lora_r:
        policy = add_lora(policy, args)
    if args.num_shared_layers:
        freeze_layers(policy, args.num_shared_layers)
    if args.gradient_checkpointing:
        # transformers' new name for gradient_checkpointing_enable
        policy.activation_checkpointing_enable(dict(use_reentrant=False))
    return policy


def load_reference(args, policy, name, device):
    """The frozen reference model. With LoRA it is None: the reference is the policy without its adapter."""
    if args.lora_r:
        return None
    if args.num_shared_layers:
        frozen = {id(p): p for p in policy.parameters() if not p.requires_grad}
        ref_model = copy.deepcopy(policy, memo=frozen)  # what is in the memo is not copied
    else:
        ref_model = load_model(AutoModelForCausalLM, name, **eight_bit(args)).requires_grad_(False)
        if wants_bf16(args, device):
            round_frozen_weights(ref_model, only_if_exact=False)
    return ref_model.requires_grad_(False).eval().to(device)


def eight_bit(args):
    """What from_pretrained needs for --load-in-8bit."""
    if not args.load_in_8bit:
        return {}
    # Threshold 0: each token is rounded alone. With the default, 6, some columns are kept in 16 bits. Which
    # ones depends on the batch, and then the log-probabilities would too.
    config = transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    return dict(quantization_config=config)


def load_policy_and_value(args, device):
    """Policy and value function in one module, and the reference. -> PolicyAndValue, model or None"""
    policy = load_policy(args, args.model_name_or_path, device)
    ref_model = load_reference(args, policy, args.model_name_or_path, device)
    critic = None
    if args.value_model_path is not None:
        critic = load_model(AutoModel, args.value_model_path)
        check_critic(critic, args.value_model_path)
        if critic.config.vocab_size != policy.config.vocab_size:
            raise UserError(f"--value-model-path {args.value_model_path}: it has another vocabulary")
        if args.gradient_checkpointing:
            critic.activation_checkpointing_enable(dict(use_reentrant=False))
    model = PolicyAndValue(policy, critic)
    folder = resolve_path(args.value_model_path or args.model_name_or_path)
    saved_head = Path(folder, "value_head.safetensors")
    if saved_head.exists():  # of an earlier run
        accelerate.PartialState().print(f"the value head starts from {saved_head}")
        model.value_head.load_state_dict(load_file(saved_head))
    return model.to(device), ref_model


def save_policy(policy, tokenizer, folder):
    """Save what plain transformers loads. LoRA is merged in place, except into quantized weights."""
    if not getattr(policy, "is_quantized", False):
        policy.float()  # frozen weights may be in bf16
        if hasattr(policy, "merge_and_unload"):
            policy.save_pretrained(folder.parent / "adapter")
            policy = policy.merge_and_unload()
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_policy_and_value(model, tokenizer, folder):
    """Save the policy, and the value head next to it, or next to the critic in the subfolder critic/."""
    save_policy(model.policy, tokenizer, folder)
    if model.critic is not None:
        folder = folder / "critic"
        model.critic.save_pretrained(folder)
    save_file(model.value_head.state_dict(), folder / "value_head.safetensors")


# ---- Log-probabilities and entropies of tokens -------------------------------------------------------------


def token_logprobs(hidden, weight, tokens, temperature=1.0, bias=None):
    """log softmax((hidden @ weight.T + bias) / temperature) at the tokens, and the entropies of the softmax.

    hidden [N, H], weight [V, H], tokens [N], bias [V] or None -> logprobs, entropies, both fp32 [N], in nats.
    Both are differentiable: the loss may contain an entropy bonus.

    The logits of all N tokens may need more memory than the model, so they are computed in chunks of rows.
    Chunks within the budget stay in memory for the backward pass; the others are computed again there. On a
    CPU, a chunk has 128 rows. A GPU is faster with few large products, so one chunk fills the budget.
    """
    is_cuda = hidden.device.type == "cuda"
    budget = 2**26 if is_cuda else 2**25  # logits: 256 or 128 MiB
    rows_at_once = budget // len(weight) if is_cuda else 128

    def logprobs_of_chunk(hidden, tokens):
        logits = token_logits(hidden, weight, temperature, bias)  # [rows, V]
        return LogprobsAndEntropies.apply(logits, tokens)

    outputs = []
    for i, chunk in enumerate(zip(hidden.split(rows_at_once), tokens.split(rows_at_once))):
        is_kept = (i + 1) * rows_at_once * len(weight) <= budget  # on a GPU, only the first chunk
        if is_kept:
            outputs.append(logprobs_of_chunk(*chunk))
        else:
            outputs.append(checkpoint(logprobs_of_chunk, *chunk, use_reentrant=False))
    logprobs, entropies = zip(*outputs)
    return torch.cat(logprobs), torch.cat(entropies)


class LogprobsAndEntropies(torch.autograd.Function):
    """log softmax at the tokens, and the entropies of the softmax. [N, V], [N] -> [N], [N]

    As separate operations, the entropies would keep [N, V] numbers for a backward pass that never runs if the
    loss does not contain them.
    """

    @staticmethod
    def forward(ctx, logits, tokens):
        log_p = torch.log_softmax(logits, 1)  # [N, V]
        ctx.save_for_backward(log_p, tokens)
        ctx.set_materialize_grads(False)  # None for a result that the loss does not contain
        return log_p.gather(1, tokens[:, None]).squeeze(1), -log_p.exp().mul_(log_p).sum(1)

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropies):
        log_p, tokens = ctx.saved_tensors
        grad = torch.zeros_like(log_p)  # of log_p
        if grad_logprobs is not None:
            grad.scatter_(1, tokens[:, None], grad_logprobs[:, None])
        if grad_entropies is not None:
            # -p * (log_p + 1), but the gradient of log_softmax cancels the 1.
            grad -= grad_entropies[:, None] * log_p.exp() * log_p
        return torch.ops.aten._log_softmax_backward_data(grad, log_p, 1, log_p.dtype), None


# ---- Rewards -----------------------------------------------------------------------------------------------


def load_classifier(args, name, device):
    """A classifier as a function: texts (list of str) -> logits [B, labels]; and the names of its labels.

    It reads text with its own tokenizer, so it need not share the policy's.
    """
    model = load_model(AutoModelForSequenceClassification, name).to(device).eval().requires_grad_(False)
    if model.config.model_type in ("xlnet", "ctrl", "modernbert-decoder"):
        raise UserError(f"{name}: {model.config.model_type} reads the last position, which may be padding")
    tokenizer = load_tokenizer(name)
    tokenizer.truncation_side = "left"  # the response is at the end
    max_length = min(tokenizer.model_max_length, context_length(model.config))

    def classify(texts):
        tokens = tokenizer(texts, truncation=True, max_length=max_length).input_ids
        with torch.autocast(device.type, enabled=False):  # bf16 would round the logits
            return score_tokens(model, tokens, args.local_rollout_forward_batch_size)

    return classify, [model.config.id2label[i] for i in range(model.config.num_labels)]


@torch.no_grad()
def score_tokens(model, texts, batch_size):
    """Class logits of texts, batch_size at a time. texts: lists of token ids -> fp32 [len(texts), classes]"""
    lengths = torch.tensor([len(ids) for ids in texts], device=model.device)
    logits = torch.zeros(len(texts), model.config.num_labels, device=model.device)
    for rows in lengths.argsort(stable=True).split(batch_size):  # similar lengths need little padding
        ids = [torch.tensor(texts[i]) for i in rows.tolist()]
        ids = nn.utils.rnn.pad_sequence(ids, batch_first=True).to(model.device)  # [rows, L]
        logits[rows] = sequence_logits(model, ids, length_mask(lengths[rows], ids.shape[1]))
    return logits


def sequence_logits(model, ids, mask):
    """Class logits of right-padded texts. [B, L], bool [B, L] -> fp32 [B, classes]

    A decoder is read at its last real token, found by its length: looking for `token != pad` would miss a
    real EOS if pad is EOS.
    """
    if not hasattr(model, "score"):  # BERT and its family
        # The head runs inside this call, and bf16 would round its logits. So all of BERT runs in fp32.
        with torch.autocast(ids.device.type, enabled=False):
            return model(input_ids=ids, attention_mask=mask.long()).logits
    # Padding is on the right, so the model's default positions are correct.
    outputs = model.base_model(input_ids=ids, attention_mask=mask.long(), use_cache=False)
    hidden = outputs.last_hidden_state  # [B, L, H]
    rows = torch.arange(len(ids), device=ids.device)
    last = mask.sum(1) - 1  # [B]
    with torch.autocast(ids.device.type, enabled=False):  # bf16 would round the logits
        return model.score(hidden[rows, last].float())


def load_label_scorer(args, name, device):
    """A classifier as a function: prompts, responses (lists of str) -> logits, probabilities of
    --reward-label, [B] each.
    """
    classify, labels = load_classifier(args, name, device)
    # Reward models of pairs, ours or TRL's, read a response at its EOS. The texts here have none.
    if len(labels) == 1:
        raise UserError(f"{name} has one output, as reward models of pairs have: see docs/from_trl.md")
    # By name, in upper or lower case, or by number.
    names = [*(label.lower() for label in labels), *map(str, range(len(labels)))]
    if args.reward_label.lower() not in names:
        raise UserError(f"--reward-label {args.reward_label}: the labels of {name} are {', '.join(labels)}")
    label = names.index(args.reward_label.lower()) % len(labels)

    def score_label(prompts, responses):
        logits = classify([prompt + response for prompt, response in zip(prompts, responses)])
        return logits[:, label], logits.softmax(-1)[:, label]

    return score_label


def load_reward(args, trainer_state, device):
    """The functions of --reward-fn, or the classifier, as one function.

    -> call_reward_functions, with its first arguments filled in
    """
    if args.reward_fn is not None:
        functions = load_functions(args.reward_fn)
    else:
        score_label = load_label_scorer(args, args.reward_model_path, device)

        def classifier(prompts, completions, **columns):
            logits, _ = score_label(prompts, completions)
            return logits.tolist()

        functions = {"classifier": classifier}
    return partial(call_reward_functions, functions, trainer_state, device)


def load_functions(names):
    """Import functions that are named FILE.py:function. -> dict: name -> function"""
    functions = {}
    for name in names:
        path, _, function = name.rpartition(":")
        if not path:
            raise UserError(f"{name}: name a function as FILE.py:function")
        path = Path(resolve_path(path)).absolute()
        sys.path.insert(0, str(path.parent))  # so that the file can import its neighbors
        module = importlib.import_module(path.stem)
        if Path(module.__file__) != path or function in functions:
            raise UserError(f"{name}: there is another module {path.stem}, or another function {function}")
        functions[function] = getattr(module, function)
    return functions


@torch.no_grad()
def call_reward_functions(functions, trainer_state, device, rows, prompts, completions, completion_ids):
    """Call reward functions as TRL's GRPOTrainer calls them: by keyword. For example:

        def correct(prompts, completions, answer, **kwargs):
            return [float(text.endswith(right)) for text, right in zip(completions, answer)]

    If prompts are lists of messages, a completion is one too: its text is completion[0]["content"].
    rows: for each response, a dict with the columns of the data. A function gets each column except prompt as
    a list with one entry per response. trainer_state.global_step is the number of updates so far; max_steps
    is the total. A function returns one number per response, or None if it does not apply: that counts as 0.
    -> dict: name of the function -> fp32 [B], nan where it does not apply
    """
    columns = {name for row in rows for name in row} - {"prompt"}
    inputs = {name: [row.get(name) for row in rows] for name in columns}
    # A data column with one of these names raises a TypeError here.
    inputs = dict(prompts=prompts, completions=completions, completion_ids=completion_ids, **inputs)
    rewards = {}
    for name, function in functions.items():
        # A function may change what it gets, so every function and every response has a copy.
        own = {key: [copy.deepcopy(x) for x in values] for key, values in inputs.items()}
        try:
            with torch.autocast(device.type, enabled=False):
                scores = list(function(**own, trainer_state=trainer_state))
        except Exception as error:
            error.add_note(f"in the function {name}, called with {', '.join(sorted(own))}")
            raise
        if len(scores) != len(rows):
            raise UserError(f"function {name}: {len(scores)} numbers for {len(rows)} responses")
        if not all(score is None or math.isfinite(score) for score in scores):
            raise UserError(f"function {name}: a number is not finite")
        numbers = [math.nan if score is None else float(score) for score in scores]
        rewards[name] = torch.tensor(numbers, device=device)
    return rewards


def reward_means(b):
    """The means of b["rewards/NAME"] over the responses to which a function applies; 0 if there is none.

    -> dict: name -> mean
    """
    return {f"{name}/mean": x.nanmean().nan_to_num() for name, x in b.items() if name.startswith("rewards/")}


# ---- Data --------------------------------------------------------------------------------------------------


def load_splits(name):
    """The training and held-out rows of a data set, as lists of dict.

    name: a file that read_rows reads, which is train; a folder with such files, named after their splits
    (train.jsonl, or parts: train-*.jsonl); or anything that datasets.load_dataset reads, as NAME or
    NAME:CONFIG. The held-out rows are the split test; without it, validation; without both, a random tenth of
    train (the same one for every --seed).
    """
    splits, path = {}, Path(resolve_path(name))
    if path.is_file():
        splits["train"] = read_rows(path)
    for split, names in (("train", "train"), ("validation", "validation|valid|val|dev"), ("test", "test")):
        pattern = rf"({names})(-.*)?\.(jsonl|jsonl\.gz|csv|parquet)"
        files = [file for file in sorted(path.glob("*")) if re.fullmatch(pattern, file.name)]
        if len({re.sub(r"-.*(?=\.)", "-", file.name) for file in files}) > 1:  # not parts of one file
            raise UserError(f"{name}: which file is {split}? {', '.join(file.name for file in files)}")
        if files:
            splits[split] = [row for file in files for row in read_rows(file)]
    if not splits:
        path, _, config = resolve_path(name).partition(":")
        loaded = datasets.load_dataset(path, config or None)
        readers = {rows.info.builder_name for rows in loaded.values()}
        if Path(path).exists() and readers & {"json", "csv"}:
            # They turn "2024-01-15" into a timestamp, "NA" into None, and a 1 next to a 2.5 into 1.0.
            raise UserError(
                f"{name}: JSON files must be train.jsonl and test.jsonl, one object per line, csv files "
                "train.csv and test.csv"
            )
        splits = {split: rows.to_list() for split, rows in loaded.items()}
    if not splits.keys() & {"train", "validation", "test"}:
        raise UserError(f"{name}: its splits are {', '.join(splits)}, but they must be called train and test")
    train = splits.get("train", [])
    source = "test" if splits.get("test") else "validation"
    held_out = splits.get(source)
    if not held_out:
        source = "a random tenth of train"
        # A random order that depends only on the data: by the column prompt, then by row. Rows with the same
        # prompt are neighbors, so at most one prompt is on both sides.
        train.sort(key=lambda row: [random.Random(repr(x)).random() for x in (row.get("prompt"), row)])
        count = math.ceil(len(train) / 10)
        held_out, train = train[:count], train[count:]
    for row in train + held_out:  # whitespace is as good as no text
        row.update({column: "" for column, x in row.items() if isinstance(x, str) and x.isspace()})
    columns = ", ".join((train + held_out or [{}])[0])
    kind = "prompt" if "prompt" in columns.split(", ") else "row"
    known = {repr(row.get("prompt") or row) for row in train}
    held = [repr(row.get("prompt") or row) for row in held_out]
    repeated = sum(x in known for x in held)
    if len({*held}) < len(held):
        source += f"; {len({*held})} different {kind}s"
    accelerate.PartialState().print(
        f"{name}: columns {columns}; {len(held_out)} rows are held out ({source}), {repeated} of them with "
        f"a {kind} that is also in train"
    )
    return train, held_out


def read_rows(path):
    """The rows of a file (.jsonl, .jsonl.gz, .csv, .parquet), with their values as they are. -> list of dict

    In a csv file, all values are texts: 007 is "007", and an empty cell is "".
    """
    if path.suffix == ".parquet":
        return datasets.Dataset.from_parquet(str(path)).to_list()
    rows = []
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8-sig", newline="") as file:
        if path.suffix == ".csv":
            reader = csv.DictReader(file, strict=True)
            for row in reader:
                if len(row) != len(reader.fieldnames) or None in row.values():
                    raise UserError(f"{path}, line {reader.line_num}: not one value for each column")
                rows.append(row)
            return rows
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    rows.append(json.loads(line))
                except json.JSONDecodeError as error:
                    raise UserError(f"{path}, line {number}: {error}") from error
    return rows


def load_prompts(rows, tokenizer, args):
    """The reviews that are long enough, as a list of dict:

    ids: the first query_max_length tokens; columns: the row of the data set, for functions of --reward-fn
    """
    rows = [row for row in rows if len(row.get("text") or "") > args.min_text_length]
    texts = [row["text"] for row in rows]
    reviews = []
    for row, ids in zip(rows, tokenizer(texts).input_ids if texts else []):
        refuse_two_bos(tokenizer, [ids])
        if len(ids) >= args.query_min_length:
            reviews.append({"ids": ids[: args.query_max_length], "columns": row})
    if not reviews:
        raise UserError(f"{args.dataset_name}: no row has a column text that is long enough")
    return reviews


def decode(tokenizer, prompt_tokens, response_tokens):
    """The texts of prompts and responses, from lists of token ids. -> prompts, responses (lists of str)

    Some tokenizers drop the first space of what they decode. So prompt and response are decoded together, and
    the text of the prompt is cut off. Of the special tokens only BOS, EOS and pad are left out: another one,
    such as <answer>, is a part of the text.
    """
    left_out = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}

    def text_of(tokens):
        return tokenizer.decode([token for token in tokens if token not in left_out])

    prompts, responses = [], []
    for prompt, response in zip(prompt_tokens, response_tokens):
        text = text_of(prompt + response)
        # Not the length of the prompt: a response may complete its last character.
        start = len(os.path.commonprefix([text_of(prompt), text]))
        prompts.append(text[:start])
        responses.append(text[start:])
    return prompts, responses


def list_tokens(ids, mask):
    """The token ids of each row where the mask is True. [B, L], bool [B, L] -> list of B lists"""
    return [row[m].tolist() for row, m in zip(ids.cpu(), mask.cpu())]


def set_global_seed(seed, *purpose):
    """Seed the global generators of python, numpy and torch for one purpose."""
    transformers.set_seed(generator_for(seed, *purpose).initial_seed() % 2**32)


def find_stop_tokens(args, tokenizer, policy):
    """The ids of the tokens that end a response, as the flags say. -> [any number]"""
    if args.stop_token_id is not None:
        vocabulary = range(policy.config.get_text_config().vocab_size)
        if not args.stop_token_id or not {*args.stop_token_id} <= {*vocabulary}:
            raise UserError(f"--stop-token-id {args.stop_token_id}: the model has no such token")
        return torch.tensor(args.stop_token_id)
    if args.stop_token is None:
        return torch.tensor([-1])  # no token has this id
    ids = end_tokens(policy, tokenizer)
    if len(ids) == 0:
        raise UserError("the tokenizer has no EOS token: use --stop-token-id, or --stop-token None")
    return ids


def end_tokens(lm, tokenizer):
    """The ids of the tokens that end a response. -> [any number]

    They are the tokenizer's EOS, those of the model's generation_config, and what ends an answer in the chat
    template: the first special token after it. (A base model may have another EOS than its template.)
    """
    eos = lm.generation_config.eos_token_id  # an id, a list of ids, or None
    ids = {*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id} - {None}
    if tokenizer.chat_template is not None:
        chat = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "ANSWER"}]
        _, _, end = tokenizer.apply_chat_template(chat, tokenize=False).partition("ANSWER")
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        ids |= {*[i for i in tokenizer(end, add_special_tokens=False).input_ids if i in special][:1]}
    return torch.tensor(sorted(ids))


# ---- Processes and optimizer -------------------------------------------------------------------------------


def start_accelerator(args):
    """A single process, or one of several (DDP, FSDP2, DeepSpeed), as accelerate is configured."""
    if not __debug__:
        raise UserError("python -O and PYTHONOPTIMIZE remove checks (assert): run without them")
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # because shapes change
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # every process loads a whole model
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs that have it
    # With a mask and some lengths, cuDNN's attention returns NaN gradients on an H100 or H200 in torch 2.13
    # (pytorch#196678). It also makes a new plan for each shape.
    torch.backends.cuda.enable_cudnn_sdp(False)
    accumulation = accelerate.utils.GradientAccumulationPlugin(num_steps=args.gradient_accumulation_steps)
    accelerator = accelerate.Accelerator(
        # On Apple's GPUs, fully masked rows give NaN (pytorch#167515), and there is no fp64.
        cpu=not torch.cuda.is_available(),
        mixed_precision="no",  # autocast is explicit in train
        dynamo_backend="no",
        gradient_accumulation_plugin=accumulation,  # a number would be replaced by an environment variable
        kwargs_handlers=[
            # Gradients are views of what DDP sends, so they are not kept twice (see make_learner).
            accelerate.DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),
            # The others wait while the main process saves a large model, for example.
            accelerate.InitProcessGroupKwargs(timeout=datetime.timedelta(hours=12)),
        ],
    )
    if accelerator.distributed_type == "DEEPSPEED":
        # Batch, clipping and precision follow the flags, not DeepSpeed's config.
        accelerator.state.deepspeed_plugin.deepspeed_config |= dict(
            train_micro_batch_size_per_gpu=args.per_device_train_batch_size,
            gradient_accumulation_steps=args.gradient_accumulation_steps,
            gradient_clipping=args.max_grad_norm or 0.0,
            torch_autocast=dict(
                enabled=wants_bf16(args, accelerator.device),
                dtype="bfloat16",
                lower_precision_safe_modules=[],  # weights are gathered, and gradients added up, in fp32
            ),
        )
        transformers.integrations.deepspeed.unset_hf_deepspeed_config()  # else from_pretrained loads shards
    if accelerator.distributed_type == "FSDP" and args.optimizer.startswith("bitsandbytes."):
        raise UserError(f"--optimizer {args.optimizer}: bitsandbytes cannot update the shards of FSDP2")
    world = accelerator.num_processes
    if world > 1:
        accelerator.print(
            f"{world} processes, so the batch is {world} times that of one; to keep it, divide "
            f"--gradient-accumulation-steps or --per-device-train-batch-size by {world}"
        )
    set_global_seed(args.seed)  # for weights that start at random, such as LoRA's
    return accelerator


def wants_bf16(args, device):
    """True if matmuls should run in bf16: on request, or with dtype auto on a GPU that supports it."""
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return args.dtype == "bfloat16" or (args.dtype == "auto" and has_bf16)


def make_learner(model, args, accelerator):
    """The module that is trained, and its optimizer.

    One process trains the model itself, DDP a wrapper around it. FSDP2 and ZeRO-3 cut a copy of it into
    shards. Shards cannot sample or score, so every process keeps the whole model for that.
    """
    plugin = accelerator.state.deepspeed_plugin
    learner = model
    if accelerator.distributed_type == "FSDP" or (plugin is not None and plugin.zero_stage == 3):
        learner = copy.deepcopy(model)
        # accelerate reads this: FSDP2 gathers one layer of this class at a time.
        learner._no_split_modules = [type(transformer_layers(model)[0]).__name__]
    options = dict(lr=args.learning_rate)
    if "Adam" in args.optimizer:
        options["eps"] = args.adam_eps
    if args.optimizer in ("torch.optim.Adam", "torch.optim.AdamW"):
        options["fused"] = True  # one kernel for all parameters
    module, _, name = args.optimizer.rpartition(".")
    optimizer_class = getattr(importlib.import_module(module), name)
    optimizer = optimizer_class(trainable(learner).values(), **options)
    learner, optimizer = accelerator.prepare(learner, optimizer)
    if isinstance(learner, nn.parallel.DistributedDataParallel):
        # Gradients are views of DDP's buckets. With None instead of zeros, those of an accumulated pass would
        # be new tensors next to the buckets.
        optimizer.zero_grad = partial(optimizer.zero_grad, set_to_none=False)
    return learner, optimizer


@torch.no_grad()
def copy_weights(learner, model):
    """Copy the trained weights into the whole model, if they are shards of a copy."""
    for p, trained in zip(trainable(model).values(), trainable(learner).values(), strict=True):
        if hasattr(trained, "full_tensor"):  # FSDP2
            p.copy_(trained.full_tensor())
        elif trained is not p:  # ZeRO-3
            import deepspeed

            with deepspeed.zero.GatheredParameters([trained]):
                p.copy_(trained)


def unshard(x):
    """Gather a tensor that FSDP2 has cut into shards; return anything else unchanged."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def performance_metrics(start_time, rollout_end, num_tokens, device):
    """Speed of an update that started at start_time and whose rollout ended at rollout_end; peak memory."""
    if device.type == "cuda":
        torch.cuda.synchronize()  # wait for what is still running
    now = time.time()
    if device.type == "cuda":
        peak_memory = torch.cuda.max_memory_allocated() / 2**20
    else:
        unit = 1 if sys.platform == "darwin" else 1024  # macOS reports bytes, Linux KiB
        peak_memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
    return {
        "perf/seconds": now - start_time,
        "perf/rollout_seconds": rollout_end - start_time,
        "perf/train_seconds": now - rollout_end,
        "perf/tokens_per_second": num_tokens / (now - start_time),
        "perf/peak_memory_mb": peak_memory,
    }


# ---- Run folder and screen ---------------------------------------------------------------------------------


class Run:
    """The run folder (args.json, metrics.jsonl, checkpoints/, ...), the screen, and resuming.

    Only the main process writes and prints. (With DeepSpeed and FSDP2, all write checkpoints.) Checkpoints
    and args.json are renamed into place once they are complete. The logs grow; resuming cuts off what came
    after the checkpoint. So a run can be killed at any time.
    """

    def __init__(self, args, accelerator, updates, status):
        """status: label -> metric, for the metrics shown next to the progress bar"""
        self.args, self.accelerator, self.updates, self.status = args, accelerator, updates, status
        self.console = Console(
            highlight=False, markup=False, emoji=False, quiet=not accelerator.is_main_process
        )
        self.bar = Progress(console=self.console, disable=not self.console.is_terminal)
        self.task = self.bar.add_task("", total=updates)
        self.last_line_time = 0.0
        self.about = None  # what is written to args.json; None before start
        # The same folder on all processes. self.name is the path as it was given, for messages.
        now = f"{datetime.datetime.now():%Y%m%d-%H%M%S-%f}"  # to the microsecond: no other run has it
        name = args.resume or args.output_dir or f"runs/{SCRIPT}/{args.recipe}-s{args.seed}-{now}"
        [self.name] = accelerate.utils.broadcast_object_list([name])
        self.folder = Path(self.name).absolute()  # your code may change the working directory
        is_used = self.logs() or self.checkpoints() or (self.folder / "model").exists()
        if is_used and not args.resume:
            raise UserError(f"{self.name} holds a run: use --resume, or choose another --output-dir")
        if accelerator.num_processes > 1:
            self.check_disk()
        self.got_signal = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # SIGHUP: the terminal was closed
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it
                signal.signal(number, self.on_signal)
                # These signals still terminate worker processes that your code forks.
                os.register_at_fork(after_in_child=partial(signal.signal, number, signal.SIG_DFL))

    def check_disk(self):
        """Raise if the processes do not share the run folder. FSDP2 and DeepSpeed save shards there."""
        marks = self.folder / "marks"  # one per process
        marks.mkdir(parents=True, exist_ok=True)
        (marks / str(self.accelerator.process_index)).touch()
        self.accelerator.wait_for_everyone()
        count = len(list(marks.iterdir()))
        self.accelerator.wait_for_everyone()
        shutil.rmtree(marks, ignore_errors=True)  # all processes try to
        if count < self.accelerator.num_processes:
            raise UserError(f"{self.name} must be on a disk that all nodes share: set --output-dir")

    def logs(self):
        """The append-only files of this run. (Some scripts write only the first.)"""
        names = "metrics.jsonl", "samples.jsonl", "tokens.jsonl"
        return [self.folder / name for name in names if (self.folder / name).exists()]

    def checkpoints(self):
        """Its checkpoints, oldest first. A folder whose name is not that of its update is the user's own."""
        found = []
        for path in self.folder.glob("checkpoints/*/state.json"):
            if path.parent.name == f"{json.loads(path.read_text()).get('update', 0):06d}":
                found.append(path.parent)
        return sorted(found, key=lambda folder: int(folder.name))

    def append(self, name, rows):
        if self.accelerator.is_main_process:
            with open(self.folder / name, "a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)

    def table(self, title, rows):
        """Print dicts as the rows of a table."""
        table = Table(title=title, title_justify="left", show_lines="metric" not in rows[0])
        for name, cell in rows[-1].items():  # the last row, because the first one may have empty cells
            table.add_column(name, justify="left" if isinstance(cell, str) else "right", overflow="fold")
        for row in rows:
            if isinstance(row.get("prompt"), str) and self.console.width <= 80:
                row = row | {"prompt": row["prompt"][-60:]}  # its end, next to the response
            table.add_row(*[f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row.values()])
        self.console.print(table)

    def log(self, metrics):
        """Log one update: to metrics.jsonl, to the tracker and to the screen.

        metrics: dict of numbers, or tensors with one number -> dict of numbers
        """
        metrics = {name: x.item() if isinstance(x, torch.Tensor) else x for name, x in metrics.items()}
        update = metrics["update"]
        not_finite = [name for name, x in metrics.items() if not math.isfinite(x)]
        if not_finite:
            names = ", ".join(not_finite)
            raise UserError(f"update {update} was not saved; not finite: {names} (--learning-rate too high?)")
        if update == 1 and not self.args.resume:
            self.write_args()
        self.append("metrics.jsonl", [metrics])
        # In a tracker, TRL's names begin with train/ or eval/.
        named = {name if name.startswith("eval/") else f"train/{name}": x for name, x in metrics.items()}
        self.accelerator.log(named, step=update)

        status = self.status | {"lr": "lr", "seconds": "perf/seconds"}
        shown = "  ".join(f"{label} {metrics[name]:.3g}" for label, name in status.items())
        shown = f"update {update}/{self.updates}  {shown}"
        self.bar.start()
        self.bar.update(self.task, completed=update, description=shown)
        if update == self.updates:
            self.bar.stop()  # before the final tables
        is_due = time.time() - self.last_line_time > 10 or update == self.updates
        if self.bar.disable and is_due:  # not a terminal: print a line now and then
            self.last_line_time = time.time()
            self.accelerator.print(shown, flush=True)
        return metrics

    def finish(self):
        """Wait until the main process has saved everything, then close the tracker."""
        self.accelerator.print(f"saved {self.name}/model; to look at the run: python report.py {self.name}")
        self.accelerator.wait_for_everyone()
        self.accelerator.end_training()

    # -- Checkpoints --

    def start(self, batch_size):
        """To resume, load the newest checkpoint. -> its state; update 0 if new"""
        self.accelerator.register_save_state_pre_hook(save_trained)
        self.accelerator.register_load_state_pre_hook(load_trained)
        state = {"update": 0, "batch_size": batch_size, "sizes": {}}  # sizes: bytes of each log
        # The main process chooses the checkpoint: a network disk may show others an older list.
        newest = [None, *self.checkpoints()][-1]
        [newest] = accelerate.utils.broadcast_object_list([newest])  # that of the main process
        if self.args.resume and newest:
            state = json.loads((newest / "state.json").read_text())
            self.accelerator.load_state(newest)
            self.accelerator.step = 0  # accumulate counts from here; the number of steps may have changed
        if state["batch_size"] != batch_size:
            raise UserError(f"--resume: that run had a batch of {state['batch_size']}, not {batch_size}")
        if state["update"] > self.updates:
            raise UserError(f"--resume: the flags ask for {self.updates} updates; {state['update']} are done")
        config = asdict(self.args)
        self.about = {
            "args": config,
            "script": SCRIPT,
            "command": sys.argv,
            "id": os.urandom(8).hex(),  # of the run in Weights & Biases
            "versions": {m.__name__: m.__version__ for m in (torch, transformers, datasets, accelerate)},
            "world_size": self.accelerator.num_processes,
        }
        if self.args.resume:  # keep the first ones
            first = json.loads((self.folder / "args.json").read_text())
            self.about |= {name: first[name] for name in ("command", "id") if name in first}
            self.accelerator.wait_for_everyone()  # no process writes until all have read
            self.write_args()
            if self.accelerator.is_main_process:
                for path in self.logs():  # what came after the checkpoint will be written again
                    os.truncate(path, state["sizes"].get(path.name, 0))
        if self.args.log_with != "none":  # only now, because the tracker writes to the run folder
            self.accelerator.log_with = [self.args.log_with]
            self.accelerator.project_configuration.logging_dir = str(self.folder)
            config = {name: str(x) for name, x in config.items()}
            wandb = {"name": self.folder.name, "id": self.about["id"], "resume": "allow"}
            self.accelerator.init_trackers(SCRIPT, config, {"wandb": wandb})
        self.accelerator.print(f"run folder {self.name}, after update {state['update']}")
        return state

    def write_args(self):
        """Write args.json. A new run does so with its first update: until then, its folder is free."""
        if self.accelerator.is_main_process:
            (self.folder / "checkpoints").mkdir(parents=True, exist_ok=True)
            if not self.args.resume:  # raises an error if another new run was faster
                (self.folder / "metrics.jsonl").touch(exist_ok=False)
            (self.folder / "draft.json").write_text(json.dumps(self.about, indent=2))
            os.replace(self.folder / "draft.json", self.folder / "args.json")

    def on_signal(self, number, frame):
        """Finish the update (or the last evaluation), save, and stop. The same signal again stops at once."""
        if self.about is None:  # before start, there is nothing to save
            print(f"{SCRIPT}.py: stopped by {signal.Signals(number).name} before training", file=sys.stderr)
            sys.exit(128 + number)
        # A terminal that is closed sends SIGHUP more than once.
        signal.signal(number, signal.SIG_IGN if number == signal.SIGHUP else signal.SIG_DFL)
        self.got_signal = number  # only noted, because a signal may come at any moment

    def checkpoint(self, state):
        """If a checkpoint is due, save all that the rest of the run depends on. After a signal: save, exit.

        state: update, batch_size, and anything else that json can hold
        """
        update, save_every = state["update"], self.args.save_every
        if self.got_signal:
            self.accelerator.set_trigger()
        is_stopped = self.accelerator.check_trigger()  # by a signal that any process got
        if is_stopped or update == self.updates or save_every and update % save_every == 0:
            draft = self.folder / "draft"
            if self.accelerator.is_main_process:
                shutil.rmtree(draft, ignore_errors=True)  # of a run that was killed here
            self.accelerator.wait_for_everyone()
            self.accelerator.save_state(draft)
            self.accelerator.wait_for_everyone()
            if self.accelerator.is_main_process:
                state["sizes"] = {path.name: path.stat().st_size for path in self.logs()}
                (draft / "state.json").write_text(json.dumps(state))
                draft.rename(self.folder / "checkpoints" / f"{update:06d}")
                for old in self.checkpoints()[: -max(self.args.keep_checkpoints, 1)]:
                    shutil.rmtree(old.rename(draft))  # as a draft, so that no checkpoint is ever incomplete
        if is_stopped and update < self.updates:
            self.bar.stop()
            self.accelerator.print(f"stopped; to continue: the same command with --resume {self.name}")
            self.accelerator.wait_for_everyone()
            sys.exit(128 + (self.got_signal or signal.SIGTERM))


def save_trained(models, weights, folder):
    """Save only the trained weights: a hook of accelerator.save_state.

    Their names carry no prefix of DDP, so any number of processes can load them. With FSDP2 and DeepSpeed,
    `weights` is empty, because these save their shards themselves.
    """
    if weights and accelerate.PartialState().is_main_process:
        trained = trainable(accelerate.utils.extract_model_from_parallel(models[0]))
        if not all(p.isfinite().all() for p in trained.values()):
            raise UserError("not saved: weights are not finite (--learning-rate too high?)")
        save_file({name: p.detach() for name, p in trained.items()}, f"{folder}/trained.safetensors")
    weights.clear()  # tells accelerate that there is nothing left to save


def load_trained(models, folder):
    """Load what save_trained saved: a hook of accelerator.load_state."""
    for model in models:
        saved = load_file(f"{folder}/trained.safetensors")
        weights = trainable(accelerate.utils.extract_model_from_parallel(model))
        assert saved.keys() == weights.keys(), "the checkpoint is of another model"
        for name, p in weights.items():
            p.data.copy_(saved[name])
    models.clear()  # nothing left to load


def log_samples(run, update, rows, lengths, columns):
    """Show and save the first responses of the batch. tokens.jsonl also gets their numbers per token.

    rows: one dict of texts and numbers per response; lengths [B]; columns: name -> [B, T]
    """
    run.table(f"samples of update {update}", rows)
    for row, length, *values in zip(rows, lengths, *columns.values()):
        tokens = {name: x[:length].tolist() for name, x in zip(columns, values)}
        run.append("samples.jsonl", [{"update": update} | row])
        run.append("tokens.jsonl", [{"update": update} | row | tokens])


def rows_of(columns):
    """A dict of lists -> a list of dicts."""
    return [dict(zip(columns, row)) for row in zip(*columns.values())]


def report_evaluation(run, before, after):
    """The final tables, evaluation.json and evaluation_samples.jsonl. before, after: from evaluate"""
    metrics_before, samples_before = before
    metrics_after, samples_after = after
    rows = []
    for old, new in zip(samples_before, samples_after):
        row = {"prompt": old["prompt"], "before": old["response"], "score": old["score"]}
        rows.append(row | {"after": new["response"], "score after": new["score"]})
    comparison = []
    for name, value in metrics_before.items():
        comparison.append({"metric": name, "before": value, "after": metrics_after[name]})
    run.table("held-out prompts", rows[:6])
    run.table(f"{len(rows)} held-out prompts", comparison)
    about = {"before": metrics_before, "after": metrics_after, "n": len(rows)}
    (run.folder / "evaluation.json").write_text(json.dumps(about, indent=2))
    lines = [json.dumps(row) + "\n" for row in rows]
    (run.folder / "evaluation_samples.jsonl").write_text("".join(lines))
    run.accelerator.log({f"eval/{name}": x for name, x in metrics_after.items()}, step=run.updates)


# ---- Command line ------------------------------------------------------------------------------------------


def check_flags(args):
    """Raise if a run would not do what its flags say."""
    check_numbers(args)
    if args.query_min_length > args.query_max_length or args.response_min_length > args.response_length:
        raise UserError("--query-min-length or --response-min-length is larger than the largest length")
    if args.missing_eos_penalty is not None and args.stop_token is None and args.stop_token_id is None:
        raise UserError("--missing-eos-penalty without a stop token would penalize all responses alike")


# Flags of all scripts that cannot be 0. (The stars let several names stand on a line.)
POSITIVE = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "num_mini_batches", "num_ppo_epochs"),
    *("total_episodes", "num_train_epochs", "num_train_rows", "num_eval_prompts", "num_eval_pairs"),
    *("num_eval_samples", "num_context_utterances", "max_length", "query_min_length", "response_min_length"),
    *("response_length", "temperature", "max_grad_norm", "score_clip", "kl_target", "kl_horizon", "beta"),
    *("max_turns", "max_tool_tokens", "tool_timeout"),
)


def check_numbers(args):
    """Raise if a number is negative, or if it is 0 and in POSITIVE.

    A weight may be negative, and so may any flag whose default is negative.
    """
    for name, value in vars(args).items():
        if not isinstance(value, (int, float)):
            continue
        default = getattr(Args, name, None)
        may_be_negative = name.endswith("_weight") or isinstance(default, (int, float)) and default < 0
        if value < 0 and not may_be_negative or value == 0 and name in POSITIVE:
            raise UserError(f"--{name.replace('_', '-')} cannot be {value}")
    if args.warmup_ratio > 1:
        raise UserError(f"--warmup-ratio is a fraction of the updates: {args.warmup_ratio} is more than 1")


# Flags of all scripts that may change when a run is resumed. (More updates also change the learning rates of
# the updates that are left, unless the schedule is constant and the warm-up is over.)
MAY_CHANGE = (
    *("resume", "eval_every", "save_every", "keep_checkpoints", "log_with", "num_sample_generations"),
    *("judge_fn", "judge_model", "judge_url", "judge_model_path"),
    *("total_episodes", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("local_rollout_forward_batch_size", "gradient_checkpointing"),
)


# Flags of all scripts with which a recipe describes its own data.
DESCRIBE_DATA = (
    *("eval_dataset_name", "center_dataset_name", "hard_dataset_name"),
    *("label_names", "prompt_template", "reward_fn", "environment", "judge_fn"),
)


def fit_recipe(recipe, args):
    """The recipe for the data and the model that the command line names. -> Args

    With other data, the flags that describe the recipe's own data go back to the defaults of Args. With
    another model, so does --from-config, the recipe's random weights.
    """
    names = []
    if args.dataset_name != recipe.dataset_name:
        names += DESCRIBE_DATA
    if args.model_name_or_path != recipe.model_name_or_path:
        names.append("from_config")
    defaults = {name: x for name, x in asdict(Args()).items() if name in names}
    changed = [name for name, x in defaults.items() if getattr(args, name) == getattr(recipe, name) != x]
    if changed and os.environ.get("RANK", "0") == "0":
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in changed)
        print(f"not taken from the recipe, because they describe its own data or model: {flags}")
    return replace(recipe, **defaults)


def parse_args(argv):
    """The command line: an optional recipe, then flags. -> Args

    No recipe and no model: the recipe tiny. A model but no recipe: everything else has the defaults of Args.
    fit_recipe says which flags of a recipe do not apply to other data.
    """
    model_flags = ("--model-name-or-path", "--sft-model-path", "--from-config")  # of all scripts
    names_model = any(word.split("=")[0].replace("_", "-") in model_flags for word in argv)
    recipe = "custom" if names_model else "tiny"
    names_recipe = len(argv) > 0 and not argv[0].startswith("-")
    if names_recipe:
        recipe, *argv = argv
        if recipe not in RECIPES:
            raise UserError(f"there is no recipe {recipe!r}; the recipes are {', '.join(RECIPES)}")
    description = f"{__doc__}\nRecipes: {', '.join(RECIPES)}"
    parse = partial(tyro.cli, Args, args=argv, description=description)
    start = replace(RECIPES.get(recipe, Args()), recipe=recipe)
    # The first parse tells which data and model the flags name; the second takes the recipe that fits them.
    args = parse(default=start)
    if args.resume is None:
        return parse(default=fit_recipe(start, args))

    # The flags of that run. Only those in MAY_CHANGE may differ.
    saved = json.loads(Path(args.resume, "args.json").read_text())["args"]
    if saved.keys() != asdict(args).keys():
        raise UserError(f"--resume {args.resume}: a run of another script, or of another version of this one")
    args = parse(default=Args(**saved))
    if names_recipe:
        args.recipe = recipe
    for name, value in asdict(args).items():
        if value != saved[name] and name not in MAY_CHANGE:
            raise UserError(f"--resume cannot change {name}: it is {saved[name]} in that run")
    return args


def go_on_without_output():
    """Drop what cannot be printed, because `| tee` was stopped first or the terminal is closed."""

    def attempt(method, *inputs):
        with suppress(OSError, ValueError):  # closed, full, or of another encoding
            return method(*inputs)

    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.write = partial(attempt, stream.write)
            stream.flush = partial(attempt, stream.flush)


def main(argv=None):
    """Run the command line. A UserError prints one line, with exit code 2."""
    go_on_without_output()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns about kernels that we do not use
    warnings.filterwarnings("ignore", category=FutureWarning)  # libraries that use each other's old names
    warnings.filterwarnings("error", message="Found missing adapter keys")  # peft: they would be random
    warnings.filterwarnings("ignore", message="fan_in_fan_out")  # peft, about GPT-2; it does the right thing
    for library in (transformers, datasets):
        library.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
    try:
        train(parse_args(sys.argv[1:] if argv is None else argv))
    except UserError as error:
        print(f"{SCRIPT}.py: {error}", file=sys.stderr)
        sys.exit(2)
    except torch.OutOfMemoryError as error:
        error.add_note(
            "Out of memory: halve --per-device-train-batch-size and double --gradient-accumulation-steps. If "
            "it was the rollout, halve --local-rollout-forward-batch-size. More: docs/running.md, Memory"
        )
        raise
    finally:
        Console().show_cursor()  # the progress bar hid it


if __name__ == "__main__":
    main()
