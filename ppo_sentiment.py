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

Part I is the algorithm: flags, math, loop, evaluation, rollout, model. Part II is infrastructure: recipes,
models, rewards, data, processes, run folder. Papers: PPO (Schulman et al. 2017), GAE (Schulman et al. 2016),
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

import atexit
import copy
import csv
import datetime
import gzip
import importlib
import json
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
    """The defaults follow TRL 0.11's notebook gpt2-sentiment (differences: docs/ppo_sentiment.md). A command
    line that names no recipe and no model starts from the recipe tiny, which replaces some of them."""

    # Run
    recipe: tyro.conf.Suppress[str] = "custom"  # first word of the command line
    seed: int = 1  # random seed; all sampling is a function of (seed, update)
    output_dir: str | None = None  # run folder (default: runs/<script>/<recipe>-s<seed>-<time>)
    resume: str | None = None  # continue the run in this folder, with its flags
    eval_every: int = 0  # updates between evaluations during training (0: only before and after)
    save_every: int = 10  # updates between checkpoints (0: only at the end, or after a signal)
    keep_checkpoints: int = 2  # number of checkpoints to keep
    log_with: Literal["none", "wandb", "tensorboard"] = "none"  # a tracker, in addition to metrics.jsonl
    num_sample_generations: int = 10  # about how many times samples are printed; first after update 1
    num_eval_prompts: int = 128  # number of held-out prompts in the before / after table

    # Models
    model_name_or_path: str = "lvwerra/gpt2-imdb"  # the policy before PPO; also the reference
    reward_model_path: str = "lvwerra/distilbert-imdb"  # a classifier; it may use another tokenizer
    reward_label: str = "positive"  # the name of the label whose logit is the reward
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
    lora_target_modules: str = "all-linear"  # layers with an adapter: comma-separated names, or all-linear

    # Data
    dataset_name: str = "stanfordnlp/imdb"  # a Hub name, a file, or a folder with train.jsonl; load_splits
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
    accelerator = start_accelerator(args)
    device, world = accelerator.device, accelerator.num_processes
    n, C, T = args.per_device_train_batch_size, args.query_max_length, args.response_length
    B = n * args.gradient_accumulation_steps * args.num_mini_batches * world  # episodes per update
    updates = math.ceil(args.total_episodes / B)
    # What the progress bar shows: label -> metric.
    run = Run(args, accelerator, updates, status={"score": "objective/scores", "KL": "objective/kl"})

    tokenizer = load_tokenizer(args.model_name_or_path)
    train_rows, held_out_rows = load_splits(args.dataset_name)
    train_reviews = load_prompts(train_rows, tokenizer, args)
    held_out_reviews = load_prompts(held_out_rows, tokenizer, args)
    # For functions of --reward-fn with a schedule. global_step: updates so far; in evaluations, all of them.
    trainer_state = transformers.TrainerState(max_steps=updates, global_step=updates)
    # get_scores(data_rows, prompts, responses, response_tokens) -> dict: name of the reward -> [B]
    get_scores = load_reward(args, trainer_state, device)
    judge = None
    if args.judge_model_path is not None:
        judge = load_label_scorer(args, args.judge_model_path, device)
    model, ref_model = load_policy_and_value(args, device)
    check_model(model.policy, C + T)
    stop_ids = find_stop_tokens(args, tokenizer, model.policy).to(device)  # [any number]
    is_bf16 = wants_bf16(args, device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=is_bf16)
    if is_bf16:
        round_frozen_weights(model.policy, only_if_exact=True)
    learner, optimizer = make_learner(model, args, accelerator)  # learner: the model, or DDP around it

    accelerator.print(
        f"recipe {args.recipe}: {args.model_name_or_path} on {args.dataset_name}, {device}, bf16: {is_bf16}\n"
        f"batch: {n} responses per pass x {args.gradient_accumulation_steps} accumulated "
        f"x {args.num_mini_batches} minibatches x {world} processes = {B} episodes; {updates} updates "
        f"x {args.num_ppo_epochs} epochs x {args.num_mini_batches} minibatches = "
        f"{updates * args.num_ppo_epochs * args.num_mini_batches} optimizer steps"
    )

    # The held-out prompts and their random numbers are the same for every --seed, before and after training,
    # and in a resumed run: run.start loads a checkpoint only below.
    num_eval_prompts = min(args.num_eval_prompts, len(held_out_reviews))
    held_out = draw_batch(held_out_reviews, 0, num_eval_prompts, replace(args, seed=0), "held-out")
    # respond(batch) -> b (a dict of tensors), prompts, responses
    respond = partial(rollout, model, ref_model, tokenizer, stop_ids, get_scores, args=args)
    with autocast:
        before = evaluate(respond, held_out, judge, args, accelerator)

    state = run.start(B)  # update 0 in a new run
    kl_coef = state.get("kl_coef", args.kl_coef)
    is_first_step = True

    for update in range(state["update"] + 1, updates + 1):
        # 1. Rollout. All random numbers are drawn for the global batch. Each process generates its share of
        #    the responses; then every process gets all of them. For a given B, the result does not depend
        #    on the number of processes, up to rounding.
        start_time = time.time()
        trainer_state.global_step = update - 1
        # Your reward function may draw from the global generators. Nothing else does.
        set_global_seed(args.seed, update, accelerator.process_index)
        prompt_batch = draw_batch(train_reviews, (update - 1) * B, B, args, update)
        with accelerator.split_between_processes(prompt_batch) as prompt_share, autocast:
            b, prompts, responses = respond(prompt_share)
        b = accelerator.gather(b)  # from here, b has the rows of all processes; the texts are only our own
        valid = length_mask(b["lengths"], T)  # [B, T]
        # The old log-probabilities come from the forward pass of the update (see rollout), so that ratios
        # start at 1. Those of generation, one token at a time with a cache, are only compared with them.
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
                for rows in share.split(n):  # a micro-batch; mb_ names its tensors
                    t = b["lengths"][rows].max().item()  # what follows the longest response is cut off
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
                        # We want the sum, but DDP averages over processes and accelerate over micro-batches.
                        # With 2 processes and 4 micro-batches, they divide by 2 and 4, so multiply by 8.
                        accelerator.backward(loss * world * args.gradient_accumulation_steps)

                    with torch.no_grad():
                        log_ratio = new_logprobs - old_logprobs
                        token_metrics = {
                            "loss/policy_avg": policy_loss,
                            "loss/value_avg": value_loss,
                            "policy/entropy_avg": entropies,
                            # KL between the old and the new policy, by k2 as in TRL (CleanRL: k3)
                            "policy/approxkl_avg": 0.5 * log_ratio**2,
                            # how often clipping changes the loss (CleanRL: ratios outside the range)
                            "policy/clipfrac_avg": is_clipped,
                            "val/clipfrac_avg": is_value_clipped,
                            "val/ratio": ratio,
                            "val/ratio_var": (ratio - 1) ** 2,  # becomes the variance below
                        }
                        metric_sums["tokens"] += mb_valid.sum()
                        for name, x in token_metrics.items():
                            metric_sums[name] += (x * mb_valid).sum()
                        if is_first_step:  # these are log-probabilities of one policy
                            gap = (log_ratio.abs() * mb_valid).sum() / mb_valid.sum().clamp(min=1)
                            assert gap < 0.02, f"rollout and update differ by {gap:.2g} nats per token"

                assert accelerator.sync_gradients, "no optimizer step: too few or too many micro-batches"
                is_first_step = False
                grad_norm = accelerator.clip_grad_norm_(learner.parameters(), args.max_grad_norm or math.inf)
                optimizer.step()
                optimizer.zero_grad(set_to_none=world == 1)  # DDP keeps gradients in its buckets

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
            "grad_norm": grad_norm,  # of the last optimizer step, before clipping
            "val/num_eos_tokens": b["stopped"].sum(),
            "env/reward_mean": b["raw_scores"].mean(),
            "env/reward_std": b["raw_scores"].std(correction=0),
            **{f"{key}/mean": x.nanmean().nan_to_num() for key, x in b.items() if key.startswith("rewards/")},
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
            trainer_state.global_step = updates
            with autocast:
                evaluation, _ = evaluate(respond, held_out, judge, args, accelerator)
            metrics |= {f"eval/{name}": x for name, x in evaluation.items()}
        metrics = run.log(metrics)  # tensors become numbers; raises if one is not finite
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
    return metrics, [{name: row[name] for name in ("prompt", "response", "score")} for row in rows]


def distinct_bigrams(texts):
    """Different pairs of neighboring words / all pairs, in all texts (compare Li et al. 2016). -> float

    It falls if a policy repeats itself. It also falls as the number of texts grows.
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
    is_text = valid & ~is_stop
    if args.stop_token_id is not None:  # it may name an ordinary token, such as ".", which is text
        special_ids = torch.tensor(tokenizer.all_special_ids, device=tokens.device)
        is_text |= is_stop & ~torch.isin(tokens, special_ids)
    text_tokens = list_tokens(tokens, is_text)
    prompts, responses = decode(tokenizer, list_tokens(prompt_ids, prompt_mask), text_tokens)  # B str each
    data_rows = [review["columns"] for review in batch["reviews"]]
    scores_by_name = get_scores(data_rows, prompts, responses, list_tokens(tokens, valid))  # name -> [B]

    # 3. Compute log-probabilities and values of the tokens exactly as in the update: with the same forward
    #    pass, and as many rows at a time. So the ratio is 1 until the first optimizer step, up to rounding.
    ids = torch.cat([prompt_ids, tokens], 1)  # [B, C + T]
    mask = torch.cat([prompt_mask, valid], 1)  # [B, C + T]
    logprobs, entropies, values, ref_logprobs = torch.zeros(4, B, T, device=ids.device)
    for rows in lengths.argsort(stable=True).split(args.per_device_train_batch_size):
        t = lengths[rows].max().item()
        inputs = ids[rows, : C + t], mask[rows, : C + t], t, args.temperature
        logprobs[rows, :t], entropies[rows, :t], values[rows, :t] = model(*inputs)
        ref_logprobs[rows, :t] = reference_logprobs(ref_model, model.policy, *inputs)

    weights = args.reward_weights or [1.0] * len(scores_by_name)
    scores = zip(weights, scores_by_name.values(), strict=True)
    b = {
        "ids": ids,
        "mask": mask,
        "lengths": lengths,
        "stopped": is_stop.any(1),
        "raw_scores": sum(weight * x.nan_to_num() for weight, x in scores),  # nan: does not apply to a row
        "logprobs": logprobs,
        "ref_logprobs": ref_logprobs,
        "sampling_logprobs": sampling_logprobs,
        "entropies": entropies,
        "values": values,
        **{f"rewards/{name}": x for name, x in scores_by_name.items()},
    }
    return b, prompts, responses


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
    # log softmax of token_logits at the tokens, and its entropies
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


def token_logprobs(hidden, weight, tokens, temperature=1.0, bias=None):
    """log softmax((hidden @ weight.T + bias) / temperature) at the tokens, and the entropies of the softmax.

    hidden [N, H], weight [V, H], tokens [N], bias [V] or None -> logprobs, entropies, both fp32 [N], in nats.
    The logits of all N tokens may need more memory than the model, so they are computed in chunks of rows.
    Chunks within the budget stay in memory for the backward pass; the others are computed again there.
    """
    budget = 2**26 if hidden.is_cuda else 2**25  # logits: 256 or 128 MiB
    rows_at_once = budget // len(weight) if hidden.is_cuda else 128

    def logprobs_of_chunk(hidden, tokens):
        logits = token_logits(hidden, weight, temperature, bias)  # [rows, V]
        return LogprobsAndEntropies.apply(logits, tokens)

    outputs = []
    for i, chunk in enumerate(zip(hidden.split(rows_at_once), tokens.split(rows_at_once))):
        if (i + 1) * rows_at_once * len(weight) <= budget:
            outputs.append(logprobs_of_chunk(*chunk))
        else:
            outputs.append(checkpoint(logprobs_of_chunk, *chunk, use_reentrant=False))
    logprobs, entropies = zip(*outputs)
    return torch.cat(logprobs), torch.cat(entropies)


class LogprobsAndEntropies(torch.autograd.Function):
    """log softmax at the tokens, and the entropies of the softmax. [N, V], [N] -> [N], [N]

    As separate operations, the entropies would keep [N, V] numbers for a backward pass that never runs if the
    loss does not contain them: in a chunk that is computed again, until the whole backward pass has ended.
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


# ============================================================================================================
# Part II: infrastructure. Nothing below is needed to understand PPO: it covers recipes, models, rewards,
# data, files and flags. The scripts share these functions, copied verbatim. check.py checks flags and data.
# ============================================================================================================

SCRIPT = Path(__file__).stem
HERE = Path(__file__).resolve().parent  # recipes name folders next to this file


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
    "gpt2-imdb-lora": Args(  # everything else as in the published experiment
        min_text_length=200,
        lora_r=16,
        lora_target_modules="c_attn",
    ),
    # First `python sft.py smollm2-imdb && python reward_model.py smollm2-imdb`, which write to these folders.
    "smollm2-imdb": Args(
        model_name_or_path="runs/smollm2-imdb/sft/model",
        reward_model_path="runs/smollm2-imdb/reward/model",
        min_text_length=200,
        lora_r=16,
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


class UserError(Exception):
    """An error that would otherwise be silent: printed without a traceback, exit code 2."""


# ---- Models ------------------------------------------------------------------------------------------------


def resolve_path(name):
    """A path here or next to this file, or else a Hub name. A run folder means the model in it."""
    for path in (Path(name), HERE / name):
        if path.exists():
            return str(path / "model" if any(path.glob("model/*config.json")) else path)
    return name


def load_model(auto_class, name, **kwargs):
    """A model in fp32 without dropout; a LoRA adapter is merged in. Faster layers replace some of its own."""
    path = resolve_path(name)
    if transformers.utils.peft_utils.find_adapter_config_file(path) is not None:
        import peft

        saved = peft.PeftConfig.from_pretrained(path)
        kwargs |= dict(revision=saved.revision)
        base = load_model(auto_class, saved.base_model_name_or_path, **kwargs)
        model = peft.PeftModel.from_pretrained(base, path).merge_and_unload().requires_grad_(True)
        model.name_or_path = path  # the base of a new adapter
        return model
    device = accelerate.PartialState().device
    if device.type == "cuda":  # else the models of all processes would be in the CPU's memory first
        kwargs["device_map"] = {"": device}
    model, report = auto_class.from_pretrained(path, dtype=torch.float32, output_loading_info=True, **kwargs)
    missing = [*report["missing_keys"], *report["mismatched_keys"]]
    if missing:  # they would be random
        raise UserError(f"{name}: weights are missing from the checkpoint, such as {missing[0]}")
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


def load_tokenizer(name):
    """The tokenizer of a folder or Hub name. If it has no pad token, EOS becomes the pad."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_path(name))
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


@torch.no_grad()
def check_model(lm, max_tokens):
    """Raise if the model's own log-probabilities of a text differ from ours, which read it left-padded."""
    length = max(max_tokens - 3, 2)  # and three positions of padding
    ids = torch.randint(lm.config.get_text_config().vocab_size, (1, length), device=lm.device)
    mask = F.pad(torch.ones_like(ids, dtype=torch.bool), (3, 0))
    ours, *_ = response_logprobs(lm.train(), F.pad(ids, (3, 0)), mask, length - 1, 1.0)
    logits = lm.eval()(ids).logits[0, :-1].float()
    gap = (ours.flatten() + F.cross_entropy(logits, ids[0, 1:], reduction="none")).abs().mean()
    if not gap < 0.1:
        raise UserError(f"{lm.name_or_path} does not work here: its log-probabilities differ by {gap:.2g}")


def trainable(module):
    """The parameters that the optimizer trains and a checkpoint holds. -> dict: name -> parameter"""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def transformer_layers(model):
    """The list of a model's transformer layers, which is its longest ModuleList."""
    return max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)


def round_frozen_weights(model, only_if_exact):
    """Store frozen weights of linear layers in bf16, because autocast would round them in every pass.

    only_if_exact: leave out weights that would change, because the model is saved.
    """
    for layer in transformer_layers(model).modules():
        if isinstance(layer, (nn.Linear, transformers.pytorch_utils.Conv1D)):
            weight = layer.weight
            is_frozen = weight.dtype == torch.float32 and not weight.requires_grad
            if is_frozen and not (only_if_exact and (weight.bfloat16() != weight).any()):
                weight.data = weight.bfloat16()


def add_lora(model, args):
    """Add a LoRA adapter (Hu et al. 2021): each named layer computes W + lora_alpha / lora_r * B A, where B
    starts at 0."""
    import peft

    names = args.lora_target_modules.replace(" ", "").split(",")
    targets = "all-linear" if names == ["all-linear"] else names
    config = peft.LoraConfig(r=args.lora_r, lora_alpha=args.lora_alpha, target_modules=targets)
    return peft.get_peft_model(model, config)


def load_policy(args, name, device):
    """The policy to train: whole, with a LoRA adapter, or with frozen embeddings and first layers."""
    policy = load_model(AutoModelForCausalLM, name, **(eight_bit(args) if args.lora_r else {})).to(device)
    if args.lora_r:
        policy = add_lora(policy, args)
    if args.num_shared_layers:
        embeddings = [m for m in policy.modules() if isinstance(m, nn.Embedding)]
        for module in (*embeddings, *transformer_layers(policy)[: args.num_shared_layers]):
            module.requires_grad_(False)
    if args.gradient_checkpointing:
        policy.gradient_checkpointing_enable(dict(use_reentrant=False))
    return policy


def load_reference(args, policy, name, device):
    """The frozen reference model. With LoRA it is None: the reference is the policy without its adapter."""
    if args.lora_r:
        return None
    if args.num_shared_layers:
        frozen = {id(p): p for p in policy.parameters() if not p.requires_grad}
        ref_model = copy.deepcopy(policy, memo=frozen)  # what is in the memo is shared, not copied
    else:
        ref_model = load_model(AutoModelForCausalLM, name, **eight_bit(args)).requires_grad_(False)
        if wants_bf16(args, device):
            round_frozen_weights(ref_model, only_if_exact=False)
    return ref_model.requires_grad_(False).eval().to(device)


def eight_bit(args):
    """What from_pretrained needs for --load-in-8bit."""
    # Threshold 0: each token is rounded alone. With the default, log-probabilities would depend on the batch.
    config = transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    return dict(quantization_config=config) if args.load_in_8bit else {}


def load_policy_and_value(args, device):
    """Policy and value function in one module, and the reference. -> PolicyAndValue, model or None"""
    policy = load_policy(args, args.model_name_or_path, device)
    ref_model = load_reference(args, policy, args.model_name_or_path, device)
    critic = None
    if args.value_model_path is not None:
        critic = load_model(AutoModel, args.value_model_path)
        if args.gradient_checkpointing:
            critic.gradient_checkpointing_enable(dict(use_reentrant=False))
    model = PolicyAndValue(policy, critic)
    folder = resolve_path(args.value_model_path or args.model_name_or_path)
    saved_head = Path(folder, "value_head.safetensors")
    if saved_head.exists():  # of an earlier run
        model.value_head.load_state_dict(load_file(saved_head))
    return model.to(device), ref_model


def save_policy(policy, tokenizer, folder):
    """Save what plain transformers loads. LoRA is merged in place, except into quantized weights."""
    if not getattr(policy, "is_quantized", False):
        policy.float()  # frozen weights may be in bf16
        if hasattr(policy, "merge_and_unload"):
            policy.save_pretrained(folder.parent / "adapter")
            tokenizer.save_pretrained(folder.parent / "adapter")
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


# ---- Rewards -----------------------------------------------------------------------------------------------


def load_label_scorer(args, name, device):
    """A classifier as a function: prompts, responses -> logits, probabilities of --reward-label, [B] each.

    It reads text with its own tokenizer, so it need not share the policy's.
    """
    model = load_model(AutoModelForSequenceClassification, name).to(device).eval().requires_grad_(False)
    tokenizer = load_tokenizer(name)
    tokenizer.truncation_side = "left"  # the response is at the end
    if tokenizer("a").input_ids[-1] == tokenizer.pad_token_id:  # EOS ends every text, so it cannot be the pad
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(int(tokenizer.pad_token_id == 0))
    model.config.pad_token_id = tokenizer.pad_token_id  # a decoder is read at the last token that is no pad
    labels = {label.lower(): i for i, label in model.config.id2label.items()}
    label = labels[args.reward_label.lower()]

    @torch.no_grad()
    def score_label(prompts, responses):
        texts = [prompt + response for prompt, response in zip(prompts, responses)]
        ids = tokenizer(texts, truncation=True).input_ids
        logits = torch.zeros(len(texts), model.config.num_labels, device=device)
        order = torch.tensor([len(x) for x in ids]).argsort(stable=True)  # similar lengths: less padding
        for rows in order.split(args.local_rollout_forward_batch_size):
            batch = {"input_ids": [ids[i] for i in rows]}
            batch = tokenizer.pad(batch, padding_side="right", return_tensors="pt").to(device)
            with torch.autocast(device.type, enabled=False):  # bf16 would round the logits
                logits[rows.to(device)] = model(**batch).logits
        return logits[:, label], logits.softmax(-1)[:, label]

    return score_label


def load_reward(args, trainer_state, device):
    """call_reward_functions, for the functions of --reward-fn or for the classifier."""
    if args.reward_fn is not None:
        functions = load_functions(args.reward_fn)
    else:
        score_label = load_label_scorer(args, args.reward_model_path, device)
        functions = {"classifier": lambda prompts, completions, **_: score_label(prompts, completions)[0]}
    return partial(call_reward_functions, functions, trainer_state, device)


def load_functions(names):
    """Import functions that are named FILE.py:function. -> dict: name -> function"""
    functions = {}
    for name in names:
        path, _, function = name.rpartition(":")
        path = Path(resolve_path(path)).absolute()
        sys.path.insert(0, str(path.parent))  # so that the file can import its neighbors
        functions[function] = getattr(importlib.import_module(path.stem), function)
    return functions


@torch.no_grad()
def call_reward_functions(functions, trainer_state, device, rows, prompts, completions, completion_ids):
    """Call reward functions as TRL's GRPOTrainer calls them: by keyword. For example:

        def correct(prompts, completions, answer, **kwargs):
            return [float(text.endswith(right)) for text, right in zip(completions, answer)]

    If prompts are lists of messages, a completion is one too: its text is completion[0]["content"].
    rows: for each response, a dict with the columns of the data. A function gets each column as a list with
    one entry per response, and returns one number per response, or None if it does not apply.
    -> dict: name of the function -> fp32 [B], nan where it does not apply
    """
    columns = {name for row in rows for name in row} - {"prompt"}
    inputs = {name: [row.get(name) for row in rows] for name in columns}
    inputs = dict(prompts=prompts, completions=completions, completion_ids=completion_ids, **inputs)
    rewards = {}
    for name, function in functions.items():
        # A function may change what it gets, so every function and every response has a copy.
        own = {key: [copy.deepcopy(x) for x in values] for key, values in inputs.items()}
        with torch.autocast(device.type, enabled=False):
            scores = list(function(**own, trainer_state=trainer_state))
        numbers = [math.nan if score is None else float(score) for score in scores]
        wrong = [i for i, score in enumerate(scores) if score is not None and not math.isfinite(score)]
        if wrong or len(scores) != len(rows):
            row = f": {scores[wrong[0]]} for row {rows[wrong[0]]}" if wrong else ""
            raise UserError(f"function {name} must return a finite number, or None, per response{row[:300]}")
        rewards[name] = torch.tensor(numbers, device=device)
    return rewards


# ---- Data --------------------------------------------------------------------------------------------------


def load_splits(name):
    """The training and held-out rows of a data set, as lists of dict.

    name: a file (jsonl, csv, parquet); a folder with train.jsonl, test.jsonl and so on, or their parts; or
    what datasets.load_dataset reads, as NAME or NAME:CONFIG. Held out is the split test; without it,
    validation; without both, a random tenth of train, the same for every --seed.
    """
    splits, path = {}, Path(resolve_path(name))
    if path.is_file():
        splits["train"] = read_rows(path)
    for split in ("train", "validation", "test"):
        for file in sorted(path.glob(f"{split}*")):  # train.jsonl, or train-00000-of-00002.jsonl and so on
            if re.fullmatch(rf"{split}(-.*)?\.(jsonl|jsonl.gz|csv|parquet)", file.name):
                splits.setdefault(split, []).extend(read_rows(file))
    if not splits:
        path, _, config = resolve_path(name).partition(":")
        loaded = datasets.load_dataset(path, config or None)
        splits = {split: rows.to_list() for split, rows in loaded.items()}
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
    accelerate.PartialState().print(f"{name}: {len(train)} rows, and {len(held_out)} held out: {source}")
    return train, held_out


def read_rows(path):
    """The rows of a file, with their values as written: in csv, all are texts. -> list of dict"""
    if path.suffix == ".parquet":
        return datasets.Dataset.from_parquet(str(path)).to_list()
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
        if path.suffix == ".csv":
            return list(csv.DictReader(file, strict=True))
        return [json.loads(line) for line in file if line.strip()]


def load_prompts(rows, tokenizer, args):
    """The reviews that are long enough, as a list of dict:

    ids: the first query_max_length tokens; columns: the row of the data set, for functions of --reward-fn
    """
    long_rows = [row for row in rows if len((row["text"] or "").strip()) > args.min_text_length]
    reviews = []
    for row, ids in zip(long_rows, tokenizer([row["text"] for row in long_rows]).input_ids):
        if len(ids) >= args.query_min_length:
            reviews.append({"ids": ids[: args.query_max_length], "columns": row})
    accelerate.PartialState().print(f"{len(reviews)} of {len(rows)} rows have a text that is long enough")
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
        return torch.tensor(args.stop_token_id)
    if args.stop_token is None:
        return torch.tensor([-1])  # no token has this id
    eos = policy.generation_config.eos_token_id  # an id, a list of ids, or None
    ids = {*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id} - {None}
    return torch.tensor(sorted(ids))


# ---- Processes and optimizer -------------------------------------------------------------------------------


def start_accelerator(args):
    """A single process, or one of several (DDP, DeepSpeed ZeRO-2), as accelerate is configured."""
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # because shapes change
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs that have it
    torch.backends.cuda.enable_cudnn_sdp(False)  # NaN gradients with a mask in torch 2.13 (pytorch#196678)
    accumulation = accelerate.utils.GradientAccumulationPlugin(num_steps=args.gradient_accumulation_steps)
    accelerator = accelerate.Accelerator(
        cpu=not torch.cuda.is_available(),  # Apple's GPUs have no fp64
        mixed_precision="no",  # autocast is explicit in train
        dynamo_backend="no",
        gradient_accumulation_plugin=accumulation,  # a number would be replaced by an environment variable
        kwargs_handlers=[
            accelerate.DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),
            # The others wait while the main process saves a large model, for example.
            accelerate.InitProcessGroupKwargs(timeout=datetime.timedelta(hours=12)),
        ],
    )
    if accelerator.distributed_type == "FSDP":
        raise UserError("FSDP2: each process needs the whole policy, to sample; use ddp.yaml or zero2.yaml")
    plugin = accelerator.state.deepspeed_plugin
    if plugin is not None:
        if plugin.zero_stage == 3:
            accelerator.print("ZeRO-3 runs as ZeRO-2: each process needs the whole policy, to sample")
            plugin.zero_stage = plugin.deepspeed_config["zero_optimization"]["stage"] = 2
            transformers.integrations.deepspeed.unset_hf_deepspeed_config()  # else models load as shards
        # Batch, clipping and precision follow the flags, not DeepSpeed's config.
        plugin.deepspeed_config |= dict(
            train_micro_batch_size_per_gpu=args.per_device_train_batch_size,
            gradient_accumulation_steps=args.gradient_accumulation_steps,
            gradient_clipping=args.max_grad_norm or 0.0,
            torch_autocast=dict(
                enabled=wants_bf16(args, accelerator.device),
                dtype="bfloat16",
                lower_precision_safe_modules=[],  # weights are gathered, and gradients added up, in fp32
            ),
        )
    set_global_seed(args.seed)  # for weights that start at random, such as LoRA's
    return accelerator


def wants_bf16(args, device):
    """True if matmuls should run in bf16: on request, or with dtype auto on a GPU that supports it."""
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return args.dtype == "bfloat16" or (args.dtype == "auto" and has_bf16)


def make_learner(model, args, accelerator):
    """The model as DDP or DeepSpeed wraps it (they share its weights), and its optimizer."""
    options = dict(lr=args.learning_rate)
    if "Adam" in args.optimizer:
        options["eps"] = args.adam_eps
    if args.optimizer in ("torch.optim.Adam", "torch.optim.AdamW"):
        options["fused"] = True  # one kernel for all parameters
    module, _, name = args.optimizer.rpartition(".")
    optimizer_class = getattr(importlib.import_module(module), name)
    return accelerator.prepare(model, optimizer_class(trainable(model).values(), **options))


def performance_metrics(start_time, rollout_end, num_tokens, device):
    """Speed of an update that started at start_time and whose rollout ended at rollout_end; peak memory."""
    unit = 1 if sys.platform == "darwin" else 1024  # macOS reports bytes, Linux KiB
    peak_memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
    if device.type == "cuda":
        torch.cuda.synchronize()  # wait for what is still running
        peak_memory = torch.cuda.max_memory_allocated() / 2**20
    now = time.time()
    return {
        "perf/seconds": now - start_time,
        "perf/rollout_seconds": rollout_end - start_time,
        "perf/train_seconds": now - rollout_end,
        "perf/tokens_per_second": num_tokens / (now - start_time),
        "perf/peak_memory_mb": peak_memory,
    }


# ---- Run folder and screen ---------------------------------------------------------------------------------


class Run:
    """The run folder, the screen, and resuming. A run can be killed at any time: checkpoints are renamed into
    place once they are complete, and resuming cuts off what the logs say after the checkpoint."""

    def __init__(self, args, accelerator, updates, status):
        """status: label -> metric, for the metrics shown next to the progress bar"""
        self.args, self.accelerator, self.updates, self.status = args, accelerator, updates, status
        now = f"{datetime.datetime.now():%Y%m%d-%H%M%S-%f}"  # to the microsecond: no other run has it
        name = args.resume or args.output_dir or f"runs/{SCRIPT}/{args.recipe}-s{args.seed}-{now}"
        [self.name] = accelerate.utils.broadcast_object_list([name])  # the same on all processes
        self.folder = Path(self.name).absolute()  # your code may change the working directory
        # The files that grow. (Some scripts write only the first.)
        self.logs = [self.folder / log for log in ("metrics.jsonl", "samples.jsonl", "tokens.jsonl")]
        is_used = (self.folder / "checkpoints").exists() or (self.folder / "model").exists()
        if is_used and not args.resume:
            raise UserError(f"{self.name} holds a run: use --resume, or choose another --output-dir")
        is_main = accelerator.is_main_process
        self.console = Console(highlight=False, markup=False, emoji=False, quiet=not is_main)
        self.bar = Progress(console=self.console, disable=not self.console.is_terminal)
        self.task = self.bar.add_task("", total=updates)
        atexit.register(self.bar.stop)  # it hides the cursor
        self.to_show, self.last_line_time, self.got_signal = [], 0.0, False

    def checkpoints(self):
        """The run's checkpoints, oldest first. A name that is not a number is the user's own."""
        return sorted(path for path in self.folder.glob("checkpoints/*") if path.name.isdecimal())

    def start(self, batch_size):
        """Load the newest checkpoint of a resumed run; start the tracker. -> its state; update 0 if new"""
        accelerator, args = self.accelerator, self.args
        accelerator.register_save_state_pre_hook(save_trained)
        accelerator.register_load_state_pre_hook(load_trained)
        state = {"update": 0, "batch_size": batch_size, "sizes": {}}  # sizes: bytes of each log
        # All processes load what the main one finds: a network disk may show others an older list.
        [newest] = accelerate.utils.broadcast_object_list(self.checkpoints()[-1:] or [None])
        if newest is not None:
            state = json.loads((newest / "state.json").read_text())
            accelerator.load_state(newest)
            accelerator.step = 0  # accumulate counts from here; the number of steps may have changed
        if state["batch_size"] != batch_size:
            raise UserError(f"--resume: that run had a batch of {state['batch_size']}, not {batch_size}")
        run_id = os.urandom(8).hex()  # of the run in Weights & Biases
        if args.resume:
            run_id = json.loads((self.folder / "args.json").read_text()).get("id")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # SIGHUP: the terminal was closed
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self.on_signal)
                # Worker processes that your code forks end at once.
                os.register_at_fork(after_in_child=partial(signal.signal, number, signal.SIG_DFL))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            # Of two new runs with one folder, the second stops here.
            (self.folder / "checkpoints").mkdir(parents=True, exist_ok=args.resume is not None)
            for path in filter(Path.exists, self.logs):
                os.truncate(path, state["sizes"].get(path.name, 0))  # the rest will be written again
            about = {
                "args": asdict(args),
                "id": run_id,
                "script": SCRIPT,
                "command": sys.argv,
                "versions": {m.__name__: m.__version__ for m in (torch, transformers, datasets, accelerate)},
                "world_size": accelerator.num_processes,
            }
            (self.folder / "draft.json").write_text(json.dumps(about, indent=2))
            os.replace(self.folder / "draft.json", self.folder / "args.json")
        if args.log_with != "none":  # only now, because the tracker writes to the run folder
            accelerator.log_with = [args.log_with]
            accelerator.project_configuration.logging_dir = str(self.folder)
            config = {name: str(x) for name, x in asdict(args).items()}
            wandb = {"name": self.folder.name, "id": run_id, "resume": "allow"}
            accelerator.init_trackers(SCRIPT, config, {"wandb": wandb})
        accelerator.print(f"run folder {self.name}, after update {state['update']}")
        return state

    def on_signal(self, number, frame):
        """Finish the update, save, and stop. A second Ctrl-C (SIGINT) stops at once."""
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        self.got_signal = True  # only noted, because a signal may come at any moment

    def checkpoint(self, state):
        """If a checkpoint is due, save what the rest of the run depends on. After a signal, save and exit."""
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
                state["sizes"] = {path.name: path.stat().st_size for path in self.logs if path.exists()}
                (draft / "state.json").write_text(json.dumps(state))
                draft.rename(self.folder / "checkpoints" / f"{update:06d}")
                for old in self.checkpoints()[: -max(self.args.keep_checkpoints, 1)]:
                    shutil.rmtree(old.rename(draft))  # as a draft, so that no checkpoint is ever incomplete
        if is_stopped and update < self.updates:
            self.bar.stop()
            self.accelerator.print(f"stopped; to continue: the same command with --resume {self.name}")
            self.accelerator.wait_for_everyone()
            sys.exit(128 + signal.SIGTERM)
        self.show()

    def append(self, name, rows):
        if self.accelerator.is_main_process:
            with open(self.folder / name, "a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)

    def log(self, metrics):
        """Log an update: metrics.jsonl, tracker, screen. dict of tensors or numbers -> dict of numbers"""
        metrics = {name: x.item() if isinstance(x, torch.Tensor) else x for name, x in metrics.items()}
        not_finite = [name for name, x in metrics.items() if not math.isfinite(x)]
        if not_finite:
            names = ", ".join(not_finite)
            raise UserError(f"update {metrics['update']}: not finite: {names} (--learning-rate too high?)")
        self.append("metrics.jsonl", [metrics])
        # In a tracker, TRL's names begin with train/ or eval/.
        named = {name if name.startswith("eval/") else f"train/{name}": x for name, x in metrics.items()}
        self.accelerator.log(named, step=metrics["update"])
        status = self.status | {"lr": "lr", "seconds": "perf/seconds"}
        shown = "  ".join(f"{label} {metrics[name]:.3g}" for label, name in status.items())
        shown = f"update {metrics['update']}/{self.updates}  {shown}"
        self.bar.start()
        self.bar.update(self.task, completed=metrics["update"], description=shown)
        is_due = time.time() - self.last_line_time > 10 or metrics["update"] == self.updates
        if self.bar.disable and is_due:  # not a terminal: print a line now and then
            self.last_line_time = time.time()
            self.to_show.append(shown)
        return metrics

    def table(self, title, rows):
        """A table for the screen. rows: a list of dicts"""
        table = Table(title=title, title_justify="left", show_lines="metric" not in rows[0])
        for name, cell in rows[-1].items():  # the last row, because the first one may have empty cells
            table.add_column(name, justify="left" if isinstance(cell, str) else "right", overflow="fold")
        for row in rows:
            if isinstance(row.get("prompt"), str) and self.console.width <= 80:
                row = row | {"prompt": row["prompt"][-60:]}  # its end, next to the response
            table.add_row(*[f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row.values()])
        self.to_show.append(table)

    def show(self):
        """Print what is waiting: after a checkpoint, so that a closed pipe or terminal cannot cost one."""
        while self.to_show:
            item = self.to_show.pop(0)
            self.console.print(item, soft_wrap=isinstance(item, str))

    def finish(self):
        """Show the final tables, wait until the main process has saved everything, and close the tracker."""
        self.bar.stop()
        self.show()
        self.accelerator.print(f"saved {self.name}/model; to look at the run: python report.py {self.name}")
        self.accelerator.wait_for_everyone()
        self.accelerator.end_training()


def save_trained(models, weights, folder):
    """Save only the trained weights: a hook of accelerator.save_state. (DeepSpeed saves them itself.)"""
    if weights and accelerate.PartialState().is_main_process:
        trained = trainable(accelerate.utils.extract_model_from_parallel(models[0]))
        save_file({name: p.detach() for name, p in trained.items()}, f"{folder}/trained.safetensors")
    weights.clear()  # tells accelerate that there is nothing left to save


@torch.no_grad()
def load_trained(models, folder):
    """Load what save_trained saved: a hook of accelerator.load_state."""
    for model in models:
        saved = load_file(f"{folder}/trained.safetensors")
        for name, p in trainable(accelerate.utils.extract_model_from_parallel(model)).items():
            p.copy_(saved[name])
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
    names = metrics_before.keys()
    comparison = [{"metric": x, "before": metrics_before[x], "after": metrics_after[x]} for x in names]
    run.table("held-out prompts", rows[:6])
    run.table(f"{len(rows)} held-out prompts", comparison)
    about = {"before": metrics_before, "after": metrics_after, "n": len(rows)}
    (run.folder / "evaluation.json").write_text(json.dumps(about, indent=2))
    lines = [json.dumps(row) + "\n" for row in rows]
    (run.folder / "evaluation_samples.jsonl").write_text("".join(lines))
    run.accelerator.log({f"eval/{name}": x for name, x in metrics_after.items()}, step=run.updates)


# ---- Command line ------------------------------------------------------------------------------------------

# Flags that may change when a run is resumed: they do not change its result, or prolong it.
MAY_CHANGE = (
    *("resume", "eval_every", "save_every", "keep_checkpoints", "log_with", "num_sample_generations"),
    *("judge_model_path", "total_episodes", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("local_rollout_forward_batch_size", "gradient_checkpointing"),
)
# Flags with which a recipe describes its own data. They do not apply to other data.
OF_DATA = ("reward_fn",)


def parse_args(argv):
    """The command line: an optional recipe, then flags. -> Args

    No recipe and no model: the recipe tiny. A model but no recipe: everything else has the defaults of Args.
    """
    flags = {word.split("=")[0].strip("-").replace("-", "_") for word in argv if word.startswith("--")}
    names_model = not flags.isdisjoint(["model_name_or_path", "sft_model_path", "from_config"])
    recipe = "custom" if names_model else "tiny"
    if argv and not argv[0].startswith("-"):
        recipe, *argv = argv
        if recipe not in RECIPES:
            raise UserError(f"there is no recipe {recipe!r}; the recipes are {', '.join(RECIPES)}")
    start = replace(RECIPES.get(recipe, Args()), recipe=recipe)
    # What a recipe says of its own data or model does not apply to another one that the command line names.
    dropped = [*(OF_DATA if "dataset_name" in flags else ()), *(["from_config"] if names_model else ())]
    start = replace(start, **{name: x for name, x in asdict(Args()).items() if name in dropped})
    parse = partial(tyro.cli, Args, args=argv, description=f"{__doc__}\nRecipes: {', '.join(RECIPES)}")
    args = parse(default=start)
    if args.resume is not None:  # the flags of that run
        saved = json.loads(Path(args.resume, "args.json").read_text())["args"]
        args = parse(default=Args(**saved))
        for name, value in saved.items():
            if getattr(args, name) != value and name not in MAY_CHANGE:
                raise UserError(f"--resume cannot change {name}: it is {value} in that run")
    return args


def main(argv=None):
    """Run the command line. A UserError is printed without a traceback, exit code 2."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # libraries that use each other's old names
    warnings.filterwarnings("ignore", message="fan_in_fan_out")  # peft, about GPT-2; it does the right thing
    for library in (transformers, datasets):
        library.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
    try:
        args = parse_args(sys.argv[1:] if argv is None else argv)
        if (HERE / "check.py").exists() and os.environ.get("RANK", "0") == "0":
            errors = importlib.import_module("check").errors(sys.modules[__name__], args)
            if errors:  # found in flags, data, tokenizer, rewards: before a model is loaded
                raise UserError("\n".join(errors))
        train(args)
    except UserError as error:
        print(f"{SCRIPT}.py: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
