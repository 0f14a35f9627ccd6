"""PPO that teaches a language model to answer in a dialog as a person would: same intent, similar words.

This is ppo_sentiment.py with another task; PPO itself is the same code. If you know that file, this is what
a dialog changes:

1. The prompt is the end of a conversation. It comes with a reference answer: what the person said next
   (`load_prompts`). "The references" are these answers; "the reference model" is the frozen policy, as
   elsewhere.
2. The score is a weighted sum, and each part of it is logged (`load_reward`). Intent: does the answer
   have the same dialog act (inform, question, directive, commissive) as the reference answer? Either 1 if
   a classifier finds that act the likeliest and 0 otherwise, or its probability (--intent-reward). METEOR:
   how many words does the answer share with the reference answer? And your own functions, if there are
   any. The KL penalty per token is subtracted, as in ppo_sentiment.py.
3. An answer ends with an end mark, `<EOU>`. In GPT-2's vocabulary this is several tokens. A prompt always has
   the same ones, but a policy may write others: "Bye.<EOU>" has a token ".<". So the mark is searched for in
   the text of the tokens, not among their ids (`load_end_criteria`, `generate`).
4. A policy can raise this score and still get worse. So the final table also has ROUGE, BLEU, distinct
   n-grams and the perplexity of the references, before and after training (`evaluate`).
5. Your own metrics go into one function and appear in the log and in the table (`custom_metrics`).

    python ppo_dialog.py                            # recipe tiny: no download, no GPU, minutes on 2 cores
    python ppo_dialog.py --meteor-weight 0          # tiny with one change; every field of Args is a flag
    python ppo_dialog.py gpt2-dailydialog           # the published experiment, from the Hub
    python ppo_dialog.py chat RUN_FOLDER_OR_MODEL   # chat with the trained model
    torchrun --nproc_per_node 2 ppo_dialog.py       # two processes, twice the batch
    python ppo_dialog.py --resume RUN_FOLDER        # continue a stopped run; on a CPU, bit for bit

Part I is the algorithm: flags, math, loop, evaluation, rollout, model. Part II is infrastructure: models,
rewards, data, processes, run folder, chat, flags. docs/differences.md shows these changes in the code.
Papers: RL4LMs (Ramamurthy et al. 2023), METEOR (Banerjee and Lavie 2005), PPO (Schulman et al. 2017), GAE
(Schulman et al. 2016), Ziegler et al. 2019, the N+ paper (Huang et al. 2024). Results, metrics, which lines
to change for what: docs/ppo_dialog.md.
"""

# `uv run ppo_dialog.py` installs these packages and needs no other set-up.
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
#     "nltk==3.10.4",
#     "rouge-score==0.1.2",
#     "sacrebleu==2.6.0",
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
from functools import lru_cache, partial
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Literal

import accelerate
import datasets
import nltk
import sacrebleu
import torch
import torch.nn.functional as F
import transformers
import tyro
from nltk.translate.meteor_score import single_meteor_score
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rouge_score.rouge_scorer import RougeScorer
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

# ============================================================================================================
# Part I: the algorithm
# ============================================================================================================


@dataclass
class Args:
    """The defaults follow OpenRL's DailyDialog example (recipe gpt2-dailydialog).

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
    num_eval_prompts: int = 512  # number of held-out prompts in the before / after table

    # Models
    model_name_or_path: str = "rajkumarrrk/gpt2-fine-tuned-on-daily-dialog"  # also the reference model
    reward_model_path: str | None = "rajkumarrrk/roberta-daily-dialog-intent-classifier"  # None: no intent
    reward_fn: list[str] | None = None  # FILE.py:function ..., more parts of the reward; called as in TRL
    value_model_path: str | None = None  # a causal critic with its own weights; None: a head on the policy
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"  # auto: bf16 on GPUs that have it, else float32
    load_in_8bit: bool = False  # frozen weights in 8 bit: the base model of LoRA, or else the reference
    num_shared_layers: int = 0  # freeze embeddings and this many first layers; share them with the reference
    gradient_checkpointing: bool = False  # recompute activations in the backward pass to save memory
    lora_r: int = 0  # LoRA rank (0: train all weights); the reference is then the policy without its adapter
    lora_alpha: int = 32  # LoRA scale: the adapter adds lora_alpha / lora_r * B A
    lora_target_modules: str = "c_attn"  # layers that get an adapter: comma-separated names, or all-linear

    # Data
    dataset_name: str = "OpenRL/daily_dialog"  # a Hub name or a folder of jsonl: columns dialog and act
    utterance_end: str = " <EOU>"  # text that ends each utterance, as in fine-tuning; eos: the EOS token
    num_context_utterances: int = 5  # utterances in the prompt; at the start of a dialog it has fewer
    max_prompt_length: int = 128  # longest prompt, in tokens; a longer one loses its oldest utterances
    response_length: int = 20  # longest answer, in tokens, with its end mark
    temperature: float = 1.0  # of sampling, and of all log-probabilities but those of reference answers

    # Reward
    intent_weight: float = 1.0  # weight of the intent; 0: it is only logged
    intent_reward: Literal["probability", "match"] = "match"  # the right act's probability, or 1 if likeliest
    meteor_weight: float = 1.0  # weight of METEOR against the reference
    reward_weights: list[float] | None = None  # one for each function of --reward-fn; None: 1 each

    # Batch. Episodes per update: per_device_train_batch_size x gradient_accumulation_steps x num_mini_batches
    # x processes. Unlike in CleanRL, more minibatches make the batch larger, not the minibatches smaller.

    total_episodes: int = 16_000  # number of responses in the whole run, rounded up to whole batches
    per_device_train_batch_size: int = 8  # responses per forward and backward pass on one process
    gradient_accumulation_steps: int = 1  # micro-batches per optimizer step
    num_mini_batches: int = 20  # optimizer steps per epoch
    num_ppo_epochs: int = 5  # epochs over each batch of rollouts
    local_rollout_forward_batch_size: int = 128  # responses generated, or classified, at once on one process

    # PPO
    kl_coef: float = 0.2  # KL penalty coefficient; the initial value if kl_target is set (0 stays 0)
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
    learning_rate: float = 1e-6  # the highest learning rate of the schedule
    optimizer: str = "torch.optim.Adam"  # dotted name: torch.optim.AdamW, bitsandbytes.optim.Adam8bit, ...
    adam_eps: float = 1e-8  # epsilon of Adam (the N+ paper, Huang et al. 2024, uses 1e-5)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"  # shape after the warm-up
    warmup_ratio: float = 0.0  # fraction of updates in which the learning rate rises to its full value
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
    # First `python sft.py smollm2-dailydialog && python reward_model.py smollm2-dailydialog`.
    "smollm2-dailydialog": Args(
        model_name_or_path="runs/smollm2-dailydialog/sft/model",
        reward_model_path="runs/smollm2-dailydialog/intent/model",
        utterance_end="eos",
        lora_r=16,
        lora_target_modules="all-linear",
        num_context_utterances=2,
        max_prompt_length=48,
        intent_reward="probability",
        meteor_weight=5.0,  # METEOR differs less between answers than the intent does
        total_episodes=10_240,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=4,
        num_mini_batches=4,
        num_ppo_epochs=1,
        learning_rate=3e-4,
        lr_scheduler_type="linear",
        kl_coef=0.05,
        kl_target=6.0,
        kl_horizon=5_000,
    ),
}


# ---- Math: pure functions of tensors -----------------------------------------------------------------------
#
# Shapes: B responses, n in a micro-batch, C positions of the prompt, T positions of the response, V tokens in
# the vocabulary, H hidden units. A row of C + T tokens is a left-padded prompt and a right-padded response,
# here with C = 4 and T = 5:
#
#     pad    pad    Hello  EOS   | Hi     there  EOS    pad    pad       length of the response: 3
#
# The hidden state of each token predicts the next one: the first EOS predicts "Hi".
#
# score: one number per response, the weighted sum of intent, METEOR and --reward-fn. reward: one number per
# token, the KL penalty, plus the score on the last one. (In TRL's names, such as reward functions,
# rewards/NAME and env/reward_mean, a reward is a score.)


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
    check_numbers(args)
    accelerator = start_accelerator(args)
    device, world = accelerator.device, accelerator.num_processes
    n, T = args.per_device_train_batch_size, args.response_length
    B = n * args.gradient_accumulation_steps * args.num_mini_batches * world  # episodes per update
    updates = math.ceil(args.total_episodes / B)
    if args.kl_target is not None and B >= 5 * args.kl_horizon:
        # The smallest factor of adaptive_kl_coef is 1 - 0.2 * B / kl_horizon, which must be above 0.
        raise UserError(f"--kl-horizon {args.kl_horizon:g} must be more than 1/5 of the batch, {B}")
    # What the progress bar shows: label -> metric.
    status = {"score": "objective/scores", "METEOR": "meteor", "KL": "objective/kl"}
    run = Run(args, accelerator, updates, status)

    tokenizer = load_tokenizer(args.model_name_or_path)
    refuse_appended_eos(tokenizer, args.model_name_or_path)
    is_end = load_end_criteria(args, tokenizer)  # a StoppingCriteriaList of transformers
    train_rows, held_out_rows = load_splits(args.dataset_name)
    # Only for functions of --reward-fn, whose rewards may have a schedule. global_step: updates so far. All
    # evaluations use the last value, so that they score alike.
    trainer_state = transformers.TrainerState(max_steps=updates, global_step=updates)
    # get_scores(turns, answers, answer_tokens) -> dict: name of a part of the reward -> [B]
    get_scores, act_names = load_reward(args, trainer_state, device)
    train_prompts = load_prompts(train_rows, tokenizer, act_names, args)
    held_out_prompts = load_prompts(held_out_rows, tokenizer, act_names, args)
    model, ref_model = load_policy_and_value(args, device)
    check_model(model.policy, args.model_name_or_path, args.max_prompt_length + T)
    is_bf16 = wants_bf16(args, device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=is_bf16)

    accelerator.print(
        f"recipe {args.recipe}: {args.model_name_or_path} on {args.dataset_name}, {device}, bf16: {is_bf16}\n"
        f"turns that can be used: {len(train_prompts)} of {count_turns(train_rows)} for training, "
        f"{len(held_out_prompts)} of {count_turns(held_out_rows)} held out; "
        f"{sum(turn.is_cut for turn in train_prompts + held_out_prompts)} of their prompts are cut to "
        f"{args.max_prompt_length} tokens\n"
        "first prompt, whose end marks must be those of fine-tuning: "
        f"{tokenizer.decode(train_prompts[0].prompt_tokens)!r}\n"
        f"acts 1, 2, ... of the classifier (they must be those of the data): {act_names}\n"
        f"METEOR counts {meteor_matches()}; ROUGE reads only Latin letters, BLEU needs spaces between words\n"
        f"batch: {n} responses per pass x {args.gradient_accumulation_steps} accumulated "
        f"x {args.num_mini_batches} minibatches x {world} processes = {B} episodes; {updates} updates "
        f"x {args.num_ppo_epochs} epochs x {args.num_mini_batches} minibatches = "
        f"{updates * args.num_ppo_epochs * args.num_mini_batches} optimizer steps"
    )

    # `model` generates, `learner` is trained. They share their weights, unless FSDP2 or ZeRO-3 shards them:
    # then the learner is a sharded copy, and copy_weights copies its weights back after each update.
    learner, optimizer = make_learner(model, args, accelerator)
    if is_bf16:  # autocast would round frozen weights (with LoRA or shared layers) in every pass
        round_frozen_weights(model.policy, only_if_exact=True)

    # The held-out prompts and their random numbers depend only on the seed, so the evaluations before and
    # after training use the same ones, and so does a resumed run: `before` is always measured with the policy
    # before PPO, since run.start loads a checkpoint only below.
    num_eval_prompts = min(args.num_eval_prompts, len(held_out_prompts))
    if num_eval_prompts < world:
        raise UserError(f"{world} processes need as many held-out prompts; there are {num_eval_prompts}")
    held_out = draw_batch(held_out_prompts, 0, num_eval_prompts, args, "held-out")
    respond = partial(rollout, model, ref_model, tokenizer, is_end, get_scores, args=args)
    with autocast:
        before = evaluate(respond, model.policy, held_out, args, accelerator)

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
        # The next B turns with their prompts, and the random numbers to sample answers with.
        prompt_batch = draw_batch(train_prompts, (update - 1) * B, B, args, update)
        turns = prompt_batch["turns"]  # of all processes
        # A copy of prompt_batch, because accelerate changes it.
        with accelerator.split_between_processes(dict(prompt_batch)) as prompt_share, autocast:
            b, answers = respond(prompt_share)
        b = accelerator.gather(b)  # rollouts of all processes: a dict of tensors, [B, ...] each
        answers = accelerate.utils.gather_object(answers)  # B str, in the order of turns
        C = b["ids"].shape[1] - T  # of this batch
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
            **part_means(b["parts"]),  # intent, meteor, ...
            **custom_metrics(turns, answers),
            "completions/mean_length": lengths.mean(),
            "completions/min_length": lengths.min(),
            "completions/max_length": lengths.max(),
            "completions/clipped_ratio": 1 - b["stopped"].float().mean(),  # cut off at T
            "completions/distinct_2": distinct_ngrams(answers, 2),
            "sampling/logprob_gap_mean": sampling_gap.mean(),
            "sampling/logprob_gap_max": sampling_gap.max(),
            **performance_metrics(start_time, rollout_end, lengths.sum(), device),
        }
        metrics["eps"] = B / metrics["perf/seconds"]  # episodes per second
        if args.eval_every and update % args.eval_every == 0 and update < updates:
            trainer_state.global_step = updates  # as in the other evaluations
            with autocast:
                evaluation, _ = evaluate(respond, model.policy, held_out, args, accelerator)
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
            samples = {
                "last": [turn.context[-1] for turn in turns[:4]],
                "reference": [turn.reference for turn in turns[:4]],
                "answer": answers[:4],
                "score": b["raw_scores"][:4].tolist(),  # as in the evaluation, before clip and penalty
                "score paid": scores[:4].tolist(),  # after clip and penalty
            }
            for name, x in b["parts"].items():
                if name != "intent_match":  # it is only logged; the part in the score is called intent
                    samples[name] = x[:4].nan_to_num().tolist()  # nan: a function does not apply
            log_samples(run, update, rows_of(samples), b["lengths"], token_columns)

        # 7. Adapt the KL coefficient for the next update, and save.
        if args.kl_target is not None:
            kl_coef = adaptive_kl_coef(kl_coef, metrics["objective/kl"], args.kl_target, args.kl_horizon, B)
        run.checkpoint({"update": update, "batch_size": B, "kl_coef": kl_coef})

    # 8. Evaluate on the same held-out prompts again, and save the model.
    trainer_state.global_step = updates
    with autocast:
        after = evaluate(respond, model.policy, held_out, args, accelerator)
    if accelerator.is_main_process:
        report_evaluation(run, tokenizer, held_out["turns"], before, after)
        save_policy_and_value(model, tokenizer, run.folder / "model")
    run.finish()
    return model, run.folder


# ---- Evaluation --------------------------------------------------------------------------------------------


def evaluate(respond, policy, batch, args, accelerator):
    """Answer the held-out prompts, with the same random numbers before and after training.

    respond: rollout, with everything but the prompts filled in. Each process takes its share of the
    prompts. -> metrics (dict of floats), one dict(last, reference, answer, score) per prompt; scores without
    clip and penalty
    """
    # Nothing here uses the global generators, but your own reward function might.
    set_global_seed(args.seed, "held-out", accelerator.process_index)
    with accelerator.split_between_processes(dict(batch)) as share:  # a copy, as in train
        b, answers = respond(share)
    columns = {
        "last": [turn.context[-1] for turn in share["turns"]],
        "reference": [turn.reference for turn in share["turns"]],
        "answer": answers,
        "score": b["raw_scores"].tolist(),
        "kl": (b["logprobs"] - b["ref_logprobs"]).sum(1).tolist(),
        "length": b["lengths"].tolist(),
        "reference_logprobs": [score_reference(policy, turn) for turn in share["turns"]],  # one per token
    }
    rows = accelerate.utils.gather_object(rows_of(columns))  # of all processes, in the order of the prompts
    gathered = {name: [row[name] for row in rows] for name in columns}
    parts = {}
    for name, x in b["parts"].items():
        parts[name] = torch.tensor(accelerate.utils.gather_object(x.tolist()))
    logprobs_of_references = [x for logprobs in gathered["reference_logprobs"] for x in logprobs]
    metrics = {
        **text_metrics(gathered["answer"], gathered["reference"]),
        **part_means(parts),
        "tokens per answer": fmean(gathered["length"]),
        "distinct1": distinct_ngrams(gathered["answer"], 1),
        "distinct2": distinct_ngrams(gathered["answer"], 2),
        "perplexity of the references": math.exp(-fmean(logprobs_of_references)),
        "score mean": fmean(gathered["score"]),
        "score mean, +-": 1.96 * pstdev(gathered["score"]) / len(rows) ** 0.5,  # half of the 95 % interval
        "score median": median(gathered["score"]),
        "KL, nats per response": fmean(gathered["kl"]),
        **custom_metrics(batch["turns"], gathered["answer"]),
    }
    samples = [{name: row[name] for name in ("last", "reference", "answer", "score")} for row in rows]
    return metrics, samples


def custom_metrics(turns, answers):
    """YOUR METRICS: logged in every update, and in the final table. -> dict: new name -> finite float

    It gets the batch of all processes. turns[i].context, .reference and .act belong to answers[i]. The final
    table also measures the references: for that column, they are passed as answers.
    """
    questions = [answer for answer in answers if answer.endswith("?")]
    return {"custom/questions": len(questions) / len(answers)}


def text_metrics(answers, references):
    """Standard text metrics that are not in the reward, each from 0 to 1. Lists of str -> dict of floats

    ROUGE-1 and ROUGE-Lsum: F1 with stems, mean over answers. BLEU of the whole corpus.
    """
    scorer = RougeScorer(["rouge1", "rougeLsum"], use_stemmer=True)
    rouge = [scorer.score(reference, answer) for reference, answer in zip(references, answers)]
    bleu = sacrebleu.corpus_bleu(answers, [references], force=True)  # force: no warning about tokenized text
    return {
        "rouge1": fmean(scores["rouge1"].fmeasure for scores in rouge),
        "rougeLsum": fmean(scores["rougeLsum"].fmeasure for scores in rouge),
        "sacrebleu": bleu.score / 100,
    }


def distinct_ngrams(texts, n):
    """Different n-grams / all n-grams of the texts: a measure of variety (after Li et al. 2016)."""
    ngrams = []
    for text in texts:
        ngrams.extend(nltk.ngrams(words_of(text.lower()), n))
    return len(set(ngrams)) / max(len(ngrams), 1)


@torch.no_grad()
def score_reference(policy, turn):
    """The policy's log-probabilities of the tokens of the reference, at temperature 1. -> list of float"""
    limit = context_length(policy.config) - len(turn.prompt_tokens)  # a longer reference is cut
    reference = turn.reference_tokens[:limit]
    ids = torch.tensor([turn.prompt_tokens + reference], device=policy.device)  # [1, C + R]
    mask = torch.ones_like(ids, dtype=torch.bool)
    logprobs, _, _ = response_logprobs(policy, ids, mask, len(reference), temperature=1.0)  # [1, R]
    return logprobs[0].tolist()


# ---- Rollout -----------------------------------------------------------------------------------------------


def draw_batch(turns, start, B, args, purpose):
    """Prompts, left-padded to the longest of the batch, and random numbers to sample answers with.

    The turns are numbers start to start + B - 1 of an endless stream of shuffled passes. The random numbers
    depend only on the seed and the purpose: the number of the update, or "held-out".
    -> dict: turns (list of B), ids [B, C], bool mask [B, C], uniforms [B, T]
    """
    turns = [turns[row] for row in stream_rows(len(turns), start, B, args.seed)]
    prompts = [torch.tensor(turn.prompt_tokens) for turn in turns]
    lengths = torch.tensor([len(prompt) for prompt in prompts])  # [B]
    ids = nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_side="left")  # [B, C]
    mask = length_mask(lengths, ids.shape[1]).flip(1)  # [B, C]
    generator = generator_for(args.seed, "tokens", purpose)
    uniforms = torch.rand(B, args.response_length, dtype=torch.float64, generator=generator)
    return dict(turns=turns, ids=ids, mask=mask, uniforms=uniforms)


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
def rollout(model, ref_model, tokenizer, is_end, get_scores, batch, args):
    """Sample an answer for each turn, score it, and compute the log-probabilities that PPO calls old.

    batch: from draw_batch; is_end, get_scores: from load_end_criteria, load_reward. Returns
    - a dict of tensors: ids, mask [B, C + T]; lengths, stopped, raw_scores [B]; logprobs, ref_logprobs,
      sampling_logprobs, entropies, values [B, T]; and parts, a dict: part of the score -> [B]
    - answers, a list of B str
    """
    model.eval()
    device = model.value_head.weight.device
    batch = accelerate.utils.send_to_device(batch, device)
    prompt_ids, prompt_mask, uniforms = batch["ids"], batch["mask"], batch["uniforms"]  # [B, C] x 2, [B, T]
    (B, C), T = prompt_ids.shape, args.response_length

    # 1. Generate.
    tokens = torch.zeros(B, T, dtype=torch.long, device=device)
    sampling_logprobs = torch.zeros(B, T, device=device)
    lengths = torch.zeros(B, dtype=torch.long, device=device)
    stopped = torch.zeros(B, dtype=torch.bool, device=device)
    for rows in torch.arange(B, device=device).split(args.local_rollout_forward_batch_size):
        inputs = prompt_ids[rows], prompt_mask[rows], uniforms[rows], is_end, args.temperature
        tokens[rows], sampling_logprobs[rows], lengths[rows], stopped[rows] = generate(model.policy, *inputs)
    valid = length_mask(lengths, T)  # [B, T]

    # 2. Decode and score. The reward reads text, because the classifier may have another tokenizer.
    answer_tokens = list_tokens(tokens, valid)
    answers = [answer_text(tokenizer, row, args.utterance_end) for row in answer_tokens]
    parts = get_scores(batch["turns"], answers, answer_tokens)  # name -> [B]

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
        "stopped": stopped,
        "raw_scores": weighted_score(parts, args),
        "logprobs": logprobs,
        "ref_logprobs": ref_logprobs,
        "sampling_logprobs": sampling_logprobs,
        "entropies": entropies,
        "values": values,
        "parts": parts,
    }
    return b, answers


@torch.no_grad()
def generate(policy, ids, mask, uniforms, is_end, temperature):
    """Sample each response until its end mark or T tokens. No top-k, no top-p, no minimum length.

    Left-padded ids, mask [B, C]; uniforms [B, T], one random number per token; is_end: from load_end_criteria
    -> tokens [B, T] and the log-probabilities they were sampled with, fp32 [B, T], both 0 after the end;
    lengths [B]; bool [B], True if a response ended by itself
    """
    B, T = uniforms.shape
    body, head = body_and_head(policy)
    cache = transformers.DynamicCache(config=body.config)
    hidden = hidden_states(body, ids, mask, cache)[:, -1]  # [B, H]
    tokens = torch.zeros(B, T, dtype=torch.long, device=ids.device)
    logprobs = torch.zeros(B, T, device=ids.device)
    lengths = torch.full([B], T, device=ids.device)
    stopped = torch.zeros(B, dtype=torch.bool, device=ids.device)
    rows = torch.arange(B, device=ids.device)  # the rows that are still being written
    for t in range(T):
        token, logprob = sample_next(head, hidden, uniforms[rows, t], temperature)  # [rows] each
        tokens[rows, t], logprobs[rows, t] = token, logprob
        # Drop the finished rows. Only the response is searched for its end mark: the prompt ends with one.
        has_ended = is_end(tokens[rows, : t + 1], None)  # [rows]; None instead of logits
        lengths[rows[has_ended]] = t + 1
        stopped[rows[has_ended]] = True
        keep = (~has_ended).nonzero().squeeze(1)
        if len(keep) == 0 or t + 1 == T:
            break
        if len(keep) < len(rows):
            # Made for beams, but it also drops rows. (batch_select_indices fails with linear attention.)
            cache.reorder_cache(keep)
            rows, token, mask = rows[keep], token[keep], mask[keep]
        # Read the token.
        mask = F.pad(mask, (0, 1), value=True)
        hidden = hidden_states(body, token[:, None], mask, cache)[:, -1]  # [rows, H]
    return tokens, logprobs, lengths, stopped


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


def load_end_criteria(args, tokenizer):
    """What ends an answer: --utterance-end, and always EOS. -> function: token ids [B, t], None -> bool [B]

    True if the last token completes the mark; that token may go on after it. transformers compares the texts
    of the last tokens with the mark, so it does not matter how a tokenizer splits the mark, or what it merges
    the mark with.
    """
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no EOS token, so no answer could end")
    criteria = transformers.StoppingCriteriaList([transformers.EosTokenCriteria(tokenizer.eos_token_id)])
    if args.utterance_end != "eos":
        mark = args.utterance_end.strip()
        ids = utterance_ids(tokenizer, ["Yes"], args.utterance_end)
        if not mark or mark not in tokenizer.decode(ids[0]):
            raise UserError(f"--utterance-end {mark!r}: it is blank, or the tokenizer cannot write it")
        criteria.append(transformers.StopStringCriteria(tokenizer, mark))
    return criteria


def answer_text(tokenizer, tokens, end):
    """The decoded answer without its end mark. Token ids [n] -> str

    Of the special tokens only BOS, EOS and pad are left out: others are text, or the end mark. (The beginning
    of a mark of several tokens stays, if response_length cuts it off.)
    """
    left_out = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    text = tokenizer.decode([token for token in tokens if token not in left_out])
    if end != "eos":
        text = text.split(end.strip())[0]
    return text.strip()


# ---- Prompts and references --------------------------------------------------------------------------------


@dataclass
class Turn:
    """A place in a dialog where the policy answers: what the person said there, and everything before."""

    columns: dict  # the whole row of the data set, for functions of --reward-fn
    number: int  # index of the reference in columns["dialog"]
    context: list[str]  # all earlier utterances of the dialog
    reference: str  # what the person said there
    act: int | None  # of the reference. DailyDialog: 1 inform, 2 question, 3 directive, 4 commissive
    prompt_tokens: list[int]  # token ids of the prompt: the end of the context
    reference_tokens: list[int]  # token ids of the reference, with its end mark
    is_cut: bool = False  # max_prompt_length cut something off the prompt


def load_prompts(rows, tokenizer, act_names, args):
    """Every utterance but the first of each dialog. -> list of Turn

    act_names: the labels of the intent classifier, for acts 1, 2, ... Turns without an act are left out.
    None: there is no classifier, so acts are not needed.
    """
    bos = tokenizer("").input_ids  # [BOS], or nothing for GPT-2
    turns = []
    for row, utterances, acts in load_dialogs(rows):  # acts: one number per utterance, or None
        tokens = utterance_ids(tokenizer, utterances, args.utterance_end)
        for t in range(1, len(utterances)):
            act = None if acts is None else acts[t]
            if act_names is not None:
                if act is None:
                    continue
                if act not in range(1, len(act_names) + 1):
                    raise UserError(f"data: act {act}, but the classifier knows 1 to {len(act_names)}")
            prompt_tokens, is_cut = context_ids(tokens[:t], args, bos)
            turns.append(Turn(row, t, utterances[:t], utterances[t], act, prompt_tokens, tokens[t], is_cut))
    if not turns:
        raise UserError(
            f"{args.dataset_name}: no row has a column dialog with two utterances, and a column act with a "
            "number for each (not needed with --reward-model-path None)"
        )
    return turns


def utterance_ids(tokenizer, utterances, end):
    """Token ids of each utterance: a space, its text, the end mark. -> list of lists

    sft.py and ppo_dialog.py share this rule. Utterances are tokenized one by one, so no token spans two of
    them, and an utterance has the same tokens in fine-tuning, in a prompt and as a reference.
    """
    end_text, end_ids = end, []
    if end == "eos":
        end_text, end_ids = "", [tokenizer.eos_token_id]
    texts = [f" {' '.join(text.split())}{end_text}" for text in utterances]
    return [ids + end_ids for ids in tokenizer(texts, add_special_tokens=False).input_ids]


def context_ids(utterances, args, bos=()):
    """The prompt: the last utterances of a dialog, without the oldest ones if they are too long.

    utterances: one list of token ids each; bos: [BOS] or nothing -> list of at most max_prompt_length token
    ids; bool: was it too long? If the last utterance alone is too long, it loses its beginning.
    """
    max_length = args.max_prompt_length - len(bos)
    if max_length <= 0:
        raise UserError(f"--max-prompt-length {args.max_prompt_length} leaves no room for a prompt")
    kept = utterances[-args.num_context_utterances :]
    is_too_long = sum(len(ids) for ids in kept) > max_length
    while len(kept) > 1 and sum(len(ids) for ids in kept) > max_length:
        kept = kept[1:]
    prompt = sum(kept, [])  # one list of all tokens
    return [*bos, *prompt[-max_length:]], is_too_long


# ---- Reward ------------------------------------------------------------------------------------------------


def load_reward(args, trainer_state, device):
    """Load what the reward needs. -> get_scores, and the names of the classifier's acts (None: no
    classifier)

    get_scores(turns, answers, answer_tokens) -> dict: name -> fp32 [B]:
        intent        what --intent-reward selects: the probability of the reference's act, or intent_match
        intent_match  1 if the classifier finds the reference's act the likeliest, otherwise 0
        meteor        METEOR of the answer against the reference, from 0 to 1
        rewards/NAME  what the user's function NAME returns; nan: it does not apply
    """
    functions = load_functions(args.reward_fn or [])
    meteor = load_meteor()
    classify, act_names = None, None
    if args.reward_model_path is not None:
        classify, act_names = load_classifier(args, args.reward_model_path, device)

    def get_scores(turns, answers, answer_tokens):
        parts = {}
        if classify is not None:
            previous = [turn.context[-1] for turn in turns]
            probs = classify(intent_texts(previous, answers)).softmax(-1)  # [B, acts]
            # Label i of the classifier is act i + 1. (load_prompts has left out turns without an act.)
            acts = torch.tensor([turn.act - 1 for turn in turns], dtype=torch.long, device=device)  # [B]
            probability = probs.gather(1, acts[:, None]).squeeze(1)  # [B]
            match = (probs.argmax(-1) == acts).float()  # [B]
            parts["intent"] = match if args.intent_reward == "match" else probability
            parts["intent_match"] = match
        meteors = [meteor(turn.reference, answer) for turn, answer in zip(turns, answers)]
        parts["meteor"] = torch.tensor(meteors, device=device)
        # Your functions are called by keyword. For example, a reward for being as long as the reference:
        #     def same_length(completions, dialog, turn, **kwargs):
        #         references = [utterances[t] for utterances, t in zip(dialog, turn)]
        #         return [-abs(len(x) - len(y.strip())) for x, y in zip(completions, references)]
        # `prompts` is the whole context, one utterance per line, even if the policy reads only its end.
        # `turn` replaces a column of that name.
        rows = [turn.columns | {"turn": turn.number} for turn in turns]
        prompts = ["\n".join(turn.context) for turn in turns]
        rewards = call_reward_functions(
            functions, trainer_state, device, rows, prompts, answers, answer_tokens
        )
        return parts | {f"rewards/{name}": x for name, x in rewards.items()}

    return get_scores, act_names


def intent_texts(previous, answers):
    """What the intent classifier reads: the utterance before the answer, and the answer. -> list of str"""
    pairs = zip(previous, answers)
    return [f"{' '.join(last.split())} {' '.join(answer.split())}" for last, answer in pairs]


def load_meteor():
    """nltk's METEOR (Banerjee and Lavie 2005) as a function: reference, answer -> float from 0 to 1."""
    wordnet = load_wordnet()
    stemmer = nltk.PorterStemmer()
    stemmer.stem = lru_cache(100_000)(stemmer.stem)  # the same words come again and again

    def meteor(reference, answer):
        return single_meteor_score(words_of(reference), words_of(answer), stemmer=stemmer, wordnet=wordnet)

    return meteor


@lru_cache(100_000)
def words_of(text):
    """The words of a text, cut as in nltk.word_tokenize: into sentences, then into words. -> list of str

    The word tokenizer alone separates a period only at the end of the text: in "I see. Thanks." it finds a
    word "see.". word_tokenize also needs a list of abbreviations that nltk downloads. Here there is none, so
    "Mr. Lee" is two sentences.
    """
    # Chinese, Japanese, Thai and others have no spaces between words: each character counts as one.
    text = re.sub(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u9fff]", r" \g<0> ", text)
    sentences = nltk.PunktSentenceTokenizer().tokenize(text)
    return [word for sentence in sentences for word in nltk.NLTKWordTokenizer().tokenize(sentence)]


def weighted_score(parts, args):
    """The score of each answer: the sum of the parts, each times its weight. dict of [B] -> [B]

    A part without a weight raises a KeyError. nan means that a --reward-fn function does not apply; it counts
    as 0.
    """
    functions = [name for name in parts if name.startswith("rewards/")]
    weights = dict(zip(functions, args.reward_weights or [1.0] * len(functions), strict=True))
    weights |= {"intent": args.intent_weight, "intent_match": 0.0, "meteor": args.meteor_weight}
    return sum(weights[name] * x.nan_to_num() for name, x in parts.items())


def part_means(parts):
    """The metric of each part: its mean over the answers to which it applies, or 0 if there is none.

    parts: name -> [B] -> dict of floats. Functions of --reward-fn have TRL's name, rewards/NAME/mean.
    """
    means = {}
    for name, x in parts.items():
        metric = f"{name}/mean" if name.startswith("rewards/") else name
        means[metric] = x.nanmean().nan_to_num().item()
    return means


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


@torch.no_grad()
def check_model(lm, name, max_tokens):
    """Refuse a model unless sampling, update and the model itself compute the same log-probabilities.

    This samples a few tokens after two left-padded prompts. Prompt and response have max_tokens tokens
    together, so that a sliding window shows too. The first response ends with its first token, so its row
    leaves the cache.
    """
    if context_length(lm.config) < max_tokens:
        raise UserError(
            f"{name} reads fewer tokens than the {max_tokens} of prompt and response together: lower "
            "--max-prompt-length or --response-length"
        )
    C, T, device = max(max_tokens - 4, 4), 4, lm.device
    prompt_lengths = torch.tensor([C // 2, C - 1], device=device)
    ids = torch.randint(lm.config.get_text_config().vocab_size, (2, C), device=device)
    mask = length_mask(prompt_lengths, C).flip(1)
    uniforms = torch.rand(2, T, dtype=torch.float64, device=device)
    row_ends = torch.tensor([True, False], device=device)

    def is_end(tokens, logits):
        return row_ends if len(tokens) == 2 else row_ends[1:]  # then only the second row is left

    tokens, sampled, lengths, _ = generate(lm.eval(), ids, mask, uniforms, is_end, 1.0)
    ids, mask = torch.cat([ids, tokens], 1), torch.cat([mask, length_mask(lengths, T)], 1)
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


def list_tokens(ids, mask):
    """The token ids of each row where the mask is True. [B, L], bool [B, L] -> list of B lists"""
    return [row[m].tolist() for row, m in zip(ids.cpu(), mask.cpu())]


def load_dialogs(rows):
    """The dialogs that have two or more utterances, none of them blank.

    rows: with the columns dialog and, perhaps, act -> list of (row, utterances, acts); acts is None if there
    is not one for each utterance
    """
    dialogs = []
    for row in rows:
        utterances, acts = row.get("dialog"), row.get("act")
        if not isinstance(utterances, list) or not all(isinstance(text, str) for text in utterances):
            continue
        utterances = [text.strip() for text in utterances]  # DailyDialog's end with a space
        if len(utterances) >= 2 and all(utterances):
            has_acts = isinstance(acts, list) and len(acts) == len(utterances)
            dialogs.append((row, utterances, acts if has_acts else None))
    return dialogs


def count_turns(rows):
    """The number of utterances that answer another one, including those that load_prompts leaves out."""
    dialogs = [row["dialog"] for row in rows if isinstance(row.get("dialog"), list)]
    return sum(max(len(dialog) - 1, 0) for dialog in dialogs)


def set_global_seed(seed, *purpose):
    """Seed the global generators of python, numpy and torch for one purpose."""
    transformers.set_seed(generator_for(seed, *purpose).initial_seed() % 2**32)


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


def report_evaluation(run, tokenizer, turns, before, after):
    """The final tables, evaluation.json and evaluation_samples.jsonl. before, after: from evaluate"""
    metrics_before, samples_before = before
    metrics_after, samples_after = after
    rows = []
    for old, new in zip(samples_before, samples_after):
        rows.append(
            {
                "last": old["last"],
                "reference": old["reference"],
                "before": old["answer"],
                "score": old["score"],
                "after": new["answer"],
                "score after": new["score"],
            }
        )
    # The same metrics of the references, as far as they can be measured. They are cut like answers.
    args = run.args
    tokens = [turn.reference_tokens[: args.response_length] for turn in turns]
    references = [answer_text(tokenizer, row, args.utterance_end) for row in tokens]
    metrics_of_references = {
        "tokens per answer": fmean(len(row) for row in tokens),
        "distinct1": distinct_ngrams(references, 1),
        "distinct2": distinct_ngrams(references, 2),
        **custom_metrics(turns, references),
    }
    comparison = []
    for name, value in metrics_before.items():
        of_references = metrics_of_references.get(name, "")
        comparison.append(
            {"metric": name, "before": value, "after": metrics_after[name], "references": of_references}
        )
    run.table("held-out prompts", rows[:6])
    run.table(f"{len(rows)} held-out prompts", comparison)
    about = {
        "before": metrics_before,
        "after": metrics_after,
        "references": metrics_of_references,
        "n": len(rows),
        "meteor": meteor_matches(),
    }
    (run.folder / "evaluation.json").write_text(json.dumps(about, indent=2, default=float))
    lines = [json.dumps(row) + "\n" for row in rows]
    (run.folder / "evaluation_samples.jsonl").write_text("".join(lines))
    run.accelerator.log({f"eval/{name}": x for name, x in metrics_after.items()}, step=run.updates)


# ---- Chat --------------------------------------------------------------------------------------------------


def chat(argv):
    """Talk with a model: RUN_FOLDER_OR_MODEL, then flags. A run folder supplies its own flags."""
    if not argv:
        raise UserError(f"chat needs a run folder or a model: python {SCRIPT}.py chat RUN_FOLDER_OR_MODEL")
    name, *flags = argv
    path = Path(resolve_path(name))
    # What the flags do not say comes from the run, from the recipe that starts with this model, or from Args.
    default = Args()
    for recipe in RECIPES.values():
        start = Path(recipe.model_name_or_path)
        if path == start or path.resolve() == (HERE / start).resolve():
            default = recipe
    run_folder = path.parent if path.name == "model" else path
    if (run_folder / "args.json").exists():  # perhaps of another script: take the flags that both have
        saved = json.loads((run_folder / "args.json").read_text())["args"]
        default = replace(default, **{key: x for key, x in saved.items() if hasattr(Args, key)})
        name = str(run_folder / "model")
    default = replace(default, model_name_or_path=name)
    args = tyro.cli(Args, default=default, args=flags, description=chat.__doc__)
    name = args.model_name_or_path
    check_numbers(args)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = load_tokenizer(name)
    refuse_appended_eos(tokenizer, name)
    is_end = load_end_criteria(args, tokenizer)
    model = load_model(AutoModelForCausalLM, name).to(device)
    check_model(model, name, args.max_prompt_length + args.response_length)
    model.eval()
    bos = tokenizer("").input_ids
    torch.manual_seed(args.seed)
    print(
        f"{name}: the prompt is the last {args.num_context_utterances} utterances, each with the end mark "
        f"{args.utterance_end!r}; `reset` forgets them, `quit` leaves"
    )
    history = []  # all utterances since the last reset
    try:
        while (text := input("> You: ").strip()) != "quit":
            if text == "reset":
                history = []
                print("forgotten")
            elif text:
                history.append(text)
                utterances = utterance_ids(tokenizer, history, args.utterance_end)
                prompt, _ = context_ids(utterances, args, bos)
                ids = torch.tensor([prompt], device=device)  # [1, C]
                mask = torch.ones_like(ids, dtype=torch.bool)
                uniforms = torch.rand(1, args.response_length, dtype=torch.float64, device=device)
                tokens, _, length, _ = generate(model, ids, mask, uniforms, is_end, args.temperature)
                answer = answer_text(tokenizer, tokens[0, :length].tolist(), args.utterance_end)
                print(f"> Bot: {answer}")
                if answer:
                    history.append(answer)
                else:  # fine-tuning never saw an empty utterance, so forget both
                    history.pop()
    except (EOFError, KeyboardInterrupt):  # Ctrl-D, Ctrl-C
        print()


# ---- Command line ------------------------------------------------------------------------------------------


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
    argv = sys.argv[1:] if argv is None else argv
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns about kernels that we do not use
    warnings.filterwarnings("ignore", category=FutureWarning)  # libraries that use each other's old names
    warnings.filterwarnings("error", message="Found missing adapter keys")  # peft: they would be random
    warnings.filterwarnings("ignore", message="fan_in_fan_out")  # peft, about GPT-2; it does the right thing
    for library in (transformers, datasets):
        library.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
    try:
        if argv[:1] == ["chat"]:
            chat(argv[1:])
        else:
            train(parse_args(argv))
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
