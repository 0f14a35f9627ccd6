"""GRPO (group relative policy optimization) that teaches a language model to do arithmetic.

GRPO is PPO without a value function: each task gets several responses, and a response is good if its reward
is above the average of its group. What changes from RLOO in rloo_tldr.py (in the code: docs/differences.md):

1. Rewards are verifiable: a function compares the final answer of a response with the column `answer`, and
   returns 1 or 0 (`correct` in data/math_rewards.py). The final answer is in <answer> tags, or else in
   \\boxed{}, or else after ####. No reward model is trained, and there is no penalty for a missing EOS: a
   response that is cut off before its answer is wrong.
2. The advantage of a response is its reward minus the mean reward of its group, divided by the group's
   standard deviation (`grpo_advantages`). If all rewards of a group are equal, its advantages are 0.
3. Every token is an action. All tokens of a response share its advantage, but each has its own ratio and is
   clipped by itself, as in PPO. In RLOO, the whole response has one ratio and one clip.
4. The loss is the sum over all tokens of the minibatch, divided by the number of tokens, as in DAPO (Yu et
   al. 2025): every token has the same weight. The original GRPO (Shao et al. 2024) averages within each
   response first, so a token of a long response has less weight.
5. A KL penalty, if there is one, is a term of the loss (k3, see `kl_per_token`), not of the reward. By
   default there is none, as in DAPO, and then no reference model is needed.
6. By default there is one optimizer step per batch of rollouts, so every ratio is 1, and nothing is clipped:
   REINFORCE with the advantages of point 2.
7. Before and after training, held-out tasks are solved several times each. pass@1 is the share of responses
   that are right: the first function of --reward-fn that applies gives 1 or more. pass@k is the share of
   tasks with at least one right response among k.

    python grpo_math.py                              # recipe tiny: no download, no GPU, minutes on 2 cores
    python grpo_math.py --learning-rate 1e-4         # tiny with one change; every field of Args is a flag
    python grpo_math.py gsm8k-qwen-0.5b              # Qwen2.5-0.5B-Instruct on GSM8K, from the Hub
    python grpo_math.py smollm2-word-problems        # first run sft.py with the recipe of the same name
    python grpo_math.py --reward-fn mine.py:correct mine.py:format --reward-weights 1 0.2
    accelerate launch grpo_math.py gsm8k-qwen-1.5b   # on N GPUs, with N times the batch
    python grpo_math.py --resume RUN_FOLDER          # continue a stopped run; on a CPU, bit for bit

Part I is the algorithm: flags, math, loop, evaluation, rollout, model. Part II is infrastructure: recipes,
models, rewards, data, processes, run folder. Papers: DeepSeekMath (GRPO, Shao et al. 2024), DAPO (Yu et al.
2025), Understanding R1-Zero-Like Training (Dr. GRPO, Liu et al. 2025), Back to Basics (RLOO, Ahmadian et al.
2024), PPO (Schulman et al. 2017), "Approximating KL divergence" (k3, Schulman 2020). Results, metrics, which
lines to change for what: docs/grpo_math.md.
"""

# `uv run grpo_math.py` installs these packages and needs no other set-up.
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
import string
import sys
import time
import warnings
from collections import defaultdict
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean, pstdev
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
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

# ============================================================================================================
# Part I: the algorithm
# ============================================================================================================


@dataclass
class Args:
    """The defaults are the recipe gsm8k-qwen-0.5b, but for batch, episodes, learning rate and system
    prompt. A command line that names no recipe and no model starts from tiny, which replaces some of them."""

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
    num_eval_prompts: int = 256  # number of held-out tasks to solve before and after training, per data set
    num_eval_samples: int = 8  # responses to each of them: the k of pass@k

    # Model
    model_name_or_path: str = "Qwen/Qwen2.5-0.5B-Instruct"  # initial policy: a Hub name or a folder
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"  # auto: bf16 on GPUs that have it, else float32
    load_in_8bit: bool = False  # frozen weights in 8 bit: the base model of LoRA, or else the reference
    num_shared_layers: int = 0  # freeze embeddings and this many first layers; share them with the reference
    gradient_checkpointing: bool = False  # recompute activations in the backward pass to save memory
    lora_r: int = 0  # LoRA rank (0: train all weights); the reference is then the policy without its adapter
    lora_alpha: int = 32  # LoRA scale: the adapter adds lora_alpha / lora_r * B A
    lora_target_modules: str = "all-linear"  # layers with an adapter: comma-separated names, or all-linear

    # Tasks and rewards
    dataset_name: str = "openai/gsm8k:main"  # Hub name, NAME:CONFIG, folder, file; rewards get all columns
    num_train_rows: int | None = None  # train on only N rows, drawn at random; None: on all
    hard_dataset_name: str | None = None  # harder tasks: its held-out rows are solved too, same reward
    prompt_template: str | None = "{question}"  # makes prompts, if the data have no column prompt
    system_prompt: str | None = None  # system message of each chat, or text before each prompt
    chat_template_kwargs: str | None = None  # template options, in JSON: {"enable_thinking": false}
    reward_fn: list[str] = field(  # FILE.py:function ...; f(completions, **columns) -> one number for each
        default_factory=lambda: ["data/math_rewards.py:correct"]
    )
    reward_weights: list[float] | None = None  # one for each function of --reward-fn; None: 1 each
    max_prompt_length: int = 512  # tasks whose prompt has more tokens are skipped
    response_length: int = 512  # longest response, in tokens
    stop_token: Literal["eos"] | None = "eos"  # end at EOS and the model's other stop tokens; None: never
    stop_token_id: list[int] | None = None  # end responses at these token ids only; replaces --stop-token
    temperature: float = 1.0  # sampling temperature; all log-probabilities use it too

    # Batch. Responses per update: per_device_train_batch_size x gradient_accumulation_steps x
    # num_mini_batches x processes; tasks per update: responses per update / num_generations. Unlike in
    # CleanRL, more minibatches make the batch larger, not the minibatches smaller.

    total_episodes: int = 100_000  # number of responses in the whole run, rounded up to whole batches
    per_device_train_batch_size: int = 8  # responses per forward and backward pass on one process
    gradient_accumulation_steps: int = 32  # micro-batches per optimizer step
    num_mini_batches: int = 1  # optimizer steps per epoch
    num_ppo_epochs: int = 1  # epochs over each batch of rollouts
    local_rollout_forward_batch_size: int = 64  # responses generated at once on one process: whole groups

    # GRPO
    num_generations: int = 8  # responses per task, the size of a group; 2 or more
    kl_coef: float = 0.0  # coefficient of the KL to the initial policy, in the loss; 0: no KL penalty
    cliprange: float = 0.2  # ratios are clipped to 1 +- this; no effect with one optimizer step per batch

    # Optimizer
    learning_rate: float = 1e-6  # the highest learning rate of the schedule
    optimizer: str = "torch.optim.Adam"  # dotted name: torch.optim.SGD, bitsandbytes.optim.Adam8bit, ...
    adam_eps: float = 1e-8  # epsilon of Adam
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"  # shape after the warm-up
    warmup_ratio: float = 0.0  # fraction of updates in which the learning rate rises to its full value
    max_grad_norm: float | None = 1.0  # clip the gradient to this norm; None: no clipping


# ---- Math: pure functions of tensors -----------------------------------------------------------------------
#
# Shapes: P tasks with k responses each make B = P * k rows; n rows in a micro-batch, C positions of the
# prompt, T positions of the response, V tokens in the vocabulary, H hidden units. The k responses to a task
# are neighbors everywhere, so `x.view(P, k)` has one group per row. A row of C + T tokens is a left-padded
# prompt and a right-padded response, here with C = 4 and T = 5:
#
#     pad    2      +      3      | =      5      EOS    pad    pad       length of the response: 3
#
# The hidden state of each token predicts the next one: "3" predicts "=".


def length_mask(lengths, max_length):
    """True on the first `lengths` positions of each row. [B] -> bool [B, max_length]"""
    return torch.arange(max_length, device=lengths.device) < lengths[:, None]


def kl_per_token(logprobs, ref_logprobs, estimator):
    """Estimates of KL(policy || reference) from samples of the policy, in nats, any shape (Schulman 2020).

    As a metric: k1 and k3 are unbiased, k2 is not. k2 and k3 are never negative.
    In a reward, through which no gradient flows: only k1 leads to the gradient of KL(policy || reference).
    In a loss: the expected gradient per token, given the tokens before it, for samples of the policy, is
        k1  0, because the mean of grad log p(token) is 0 under p
        k2  the gradient of KL(policy || reference)
        k3  the gradient of KL(reference || policy)
    So a loss ignores that a token also changes which tokens follow. k1 in a reward does not.
    """
    log_ratio = logprobs - ref_logprobs
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio**2
    return torch.expm1(-log_ratio) + log_ratio  # k3


def grpo_advantages(rewards, k):
    """(Reward - mean of its group) / (standard deviation of its group + 1e-4). [P * k] -> [P * k]

    DeepSeekMath, section 4.1.2. The k rewards of a group are neighbors. The deviation has k - 1 in its
    denominator, and 1e-4 avoids 0 / 0; both as in TRL.

    The division gives more weight to tasks that are nearly always or nearly never solved. Dr. GRPO leaves it
    out for that reason.
    """
    groups = rewards.float().view(-1, k)  # [P, k]
    groups = groups - groups[:, :1]  # so that groups with equal rewards get exactly 0, without rounding
    mean, std = groups.mean(1, keepdim=True), groups.std(1, correction=1, keepdim=True)  # [P, 1]
    return ((groups - mean) / (std + 1e-4)).flatten()


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
    """The whole run, from the flags to the final table. -> (Policy, run folder)"""
    accelerator = start_accelerator(args)
    device, world = accelerator.device, accelerator.num_processes
    n, k, T = args.per_device_train_batch_size, args.num_generations, args.response_length
    B = n * args.gradient_accumulation_steps * args.num_mini_batches * world  # responses per update
    P = B // k  # prompts per update
    updates = math.ceil(args.total_episodes / B)
    # What the progress bar shows: label -> metric.
    status = {"reward": "objective/scores", "equal groups": "frac_reward_zero_std"}
    run = Run(args, accelerator, updates, status)

    tokenizer = load_tokenizer(args.model_name_or_path)
    set_template_options(tokenizer, args)
    # For functions of --reward-fn with a schedule. global_step: updates so far; in evaluations, all of them.
    trainer_state = transformers.TrainerState(max_steps=updates, global_step=updates)
    # get_scores(examples, responses, response_tokens) -> dict: name of the reward -> [B]
    get_scores = partial(score_responses, load_functions(args.reward_fn), trainer_state, device)
    train_prompts, held_out = load_prompts(args, tokenizer)
    policy = load_policy(args, args.model_name_or_path, device)
    has_kl = args.kl_coef != 0
    ref_model = load_reference(args, policy, args.model_name_or_path, device) if has_kl else None
    check_model(policy, args.max_prompt_length + T)
    stop_ids = find_stop_tokens(args, tokenizer, policy).to(device)  # [any number]
    is_bf16 = wants_bf16(args, device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=is_bf16)
    if is_bf16:
        round_frozen_weights(policy, only_if_exact=True)
    model = Policy(policy)
    learner, optimizer = make_learner(model, args, accelerator)  # learner: the model, or DDP around it

    accelerator.print(
        f"recipe {args.recipe}: {args.model_name_or_path} on {args.dataset_name}, {device}, bf16: {is_bf16}\n"
        f"batch: {n} responses per pass x {args.gradient_accumulation_steps} accumulated "
        f"x {args.num_mini_batches} minibatches x {world} processes = {B} episodes = {P} prompts x {k}; "
        f"{updates} updates x {args.num_ppo_epochs} epochs x {args.num_mini_batches} minibatches = "
        f"{updates * args.num_ppo_epochs * args.num_mini_batches} optimizer steps"
    )

    # The held-out tasks and their random numbers are the same for every --seed, before and after training,
    # and in a resumed run: run.start loads a checkpoint only below.
    # respond(batch, args) -> b (a dict of tensors), responses
    respond = partial(sample_responses, policy, tokenizer, stop_ids, get_scores)
    with autocast:
        before = evaluate(respond, held_out, args, accelerator)

    state = run.start(B)  # update 0 in a new run
    is_first_step = True

    for update in range(state["update"] + 1, updates + 1):
        # 1. Rollout. All random numbers are drawn for the global batch. Each process generates all k
        #    responses to its share of the prompts; then every process gets all of them. For a given B, the
        #    result does not depend on the number of processes, up to rounding.
        start_time = time.time()
        trainer_state.global_step = update - 1
        # Your reward function may draw from the global generators. Nothing else does.
        set_global_seed(args.seed, update, accelerator.process_index)
        numbers = stream_rows(len(train_prompts), (update - 1) * P, P, args.seed)
        prompt_batch = draw_batch([train_prompts[i] for i in numbers], k, args, update)
        with accelerator.split_between_processes(prompt_batch) as prompt_share, autocast:
            b, responses = rollout(respond, model, ref_model, prompt_share, args)
        b = accelerator.gather(b)  # from here, b has the rows of all processes; the texts are only our own
        C = b["ids"].shape[1] - T  # positions of the longest prompt in this batch
        # A row that is set to False here counts in no loss, but still in the advantages of its group.
        valid = length_mask(b["lengths"], T)  # [B, T]
        rollout_end = time.time()

        # 2. Advantages: one per response, and the same for all its tokens.
        advantages = grpo_advantages(b["scores"], k)  # [B]

        # 3. Update. Minibatches are drawn from the global batch; each process trains on its share, n rows
        #    at a time. Both consist of whole groups, because neighboring rows of a group share one pass over
        #    their prompt. The loss is the sum over this process's tokens, divided by the number of tokens of
        #    the minibatch in all processes (DAPO): the gradient does not depend on how a minibatch is split.
        learner.train(args.gradient_checkpointing)  # there is no dropout; only checkpointing needs train mode
        for param_group in optimizer.param_groups:
            param_group["lr"] = learning_rate(args, update, updates)
        metric_sums = defaultdict(float)  # sums over the tokens of all minibatches and epochs
        max_sampling_gap = torch.zeros((), device=device)
        for epoch in range(args.num_ppo_epochs):
            order = torch.randperm(P, generator=generator_for(args.seed, "order", update, epoch)).to(device)
            for minibatch in order.split(P // args.num_mini_batches):  # indices of prompts
                num_tokens = valid.view(P, k, T)[minibatch].sum()
                with accelerator.split_between_processes(minibatch) as share:
                    rows_of_share = sorted_groups(share, b["lengths"], k, can_reuse_prompts(policy))
                for rows in rows_of_share.split(n):
                    t = b["lengths"][rows].max().item()  # what follows the longest response is cut off
                    mb_valid = valid[rows, :t]  # [n, t]
                    token_advantages = advantages[rows, None].expand(-1, t)  # [n, t]

                    # accumulate: processes exchange gradients only at the last micro-batch.
                    with accelerator.accumulate(learner):
                        with autocast:
                            new_logprobs, entropies = learner(
                                b["ids"][rows, : C + t], b["mask"][rows, : C + t], t, args.temperature
                            )  # [n, t] each, 0 after the end of a response; only these have a gradient
                        if "logprobs" in b:
                            old_logprobs = b["logprobs"][rows, :t]
                        else:  # one step per batch: the ratio is 1, but has a gradient
                            old_logprobs = new_logprobs.detach()
                        policy_loss, ratio, is_clipped = clipped_policy_loss(
                            new_logprobs, old_logprobs, token_advantages, args.cliprange
                        )
                        token_loss = policy_loss
                        if has_kl:  # k3, as in the GRPO paper; see kl_per_token for its gradient
                            token_kl = kl_per_token(new_logprobs, b["ref_logprobs"][rows, :t], "k3")
                            token_loss = policy_loss + args.kl_coef * token_kl
                        loss = (token_loss * mb_valid).sum() / num_tokens
                        # We want the sum, but DDP averages over processes and accelerate over micro-batches.
                        # With 2 processes and 4 micro-batches, they divide by 2 and 4, so multiply by 8.
                        accelerator.backward(loss * world * args.gradient_accumulation_steps)

                    with torch.no_grad():
                        log_ratio = new_logprobs - old_logprobs
                        # How far is generation, one token at a time with a cache, from this forward pass?
                        sampling_gap = (b["sampling_logprobs"][rows, :t] - old_logprobs).abs()
                        max_sampling_gap = torch.maximum(max_sampling_gap, (sampling_gap * mb_valid).max())
                        token_metrics = {
                            "loss/policy_avg": policy_loss,
                            "policy/approxkl_avg": 0.5 * log_ratio**2,
                            "policy/clipfrac_avg": is_clipped,  # how often clipping changes the loss
                            "policy/entropy_avg": entropies,
                            "val/ratio": ratio,
                            "val/ratio_var": (ratio - 1) ** 2,  # becomes the variance below
                            "sampling/logprob_gap_mean": sampling_gap,
                            "logprob": old_logprobs,
                        }
                        if has_kl:
                            # The metric is k1 under the old policy; the loss has k3 under the new one.
                            ref_logprobs = b["ref_logprobs"][rows, :t]
                            token_metrics["kl"] = kl_per_token(old_logprobs, ref_logprobs, "k1")
                        metric_sums["tokens"] += mb_valid.sum()
                        for name, x in token_metrics.items():
                            metric_sums[name] += (x * mb_valid).sum()
                        if is_first_step:  # these are log-probabilities of one policy
                            num_valid = mb_valid.sum().clamp(min=1)
                            gap = (log_ratio.abs() * mb_valid).sum() / num_valid
                            assert gap < 0.02, f"rollout and update differ by {gap:.2g} nats per token"
                            gap = (sampling_gap * mb_valid).sum() / num_valid
                            assert gap < 0.1, f"sampling and update differ by {gap:.2g} nats per token"

                assert accelerator.sync_gradients, "no optimizer step: too few or too many micro-batches"
                is_first_step = False
                grad_norm = accelerator.clip_grad_norm_(learner.parameters(), args.max_grad_norm or math.inf)
                optimizer.step()
                optimizer.zero_grad(set_to_none=world == 1)  # DDP keeps gradients in its buckets

        # 4. Log. Metrics that TRL also logs keep its names.
        metric_sums = accelerator.reduce(dict(metric_sums), "sum")
        tokens_trained = metric_sums.pop("tokens").clamp(min=1)
        update_metrics = {name: x / tokens_trained for name, x in metric_sums.items()}
        # var r = E[(r - 1)^2] - (E[r - 1])^2
        update_metrics["val/ratio_var"] -= (update_metrics["val/ratio"] - 1) ** 2
        score_std_of_groups = b["scores"].view(P, k).std(1, correction=0)  # [P]
        lengths = b["lengths"].float()
        tokens_per_response = tokens_trained / (B * args.num_ppo_epochs)  # those in the loss
        metrics = {
            "update": update,
            "episode": update * B,
            "lr": optimizer.param_groups[0]["lr"],
            # -log p of a response: its entropy, estimated from the sampled tokens
            "objective/entropy": -update_metrics.pop("logprob") * tokens_per_response,
            "objective/scores": b["scores"].mean(),
            **update_metrics,
            "grad_norm": grad_norm,  # of the last optimizer step, before clipping
            "val/num_eos_tokens": b["stopped"].sum(),
            "env/reward_mean": b["scores"].mean(),  # as objective/scores, because there are no penalties
            "env/reward_std": b["scores"].std(correction=0),
            # The fraction of groups with equal rewards, up to rounding. Their advantages are 0.
            "frac_reward_zero_std": (score_std_of_groups < 1e-6).float().mean(),
            **{f"{key}/mean": x.nanmean().nan_to_num() for key, x in b.items() if key.startswith("rewards/")},
            "completions/mean_length": lengths.mean(),
            "completions/min_length": lengths.min(),
            "completions/max_length": lengths.max(),
            "completions/clipped_ratio": 1 - b["stopped"].float().mean(),  # cut off at T
            "completions/distinct_2": distinct_bigrams(accelerate.utils.gather_object(responses)),
            "sampling/logprob_gap_max": accelerator.gather(max_sampling_gap).max(),
            **performance_metrics(start_time, rollout_end, lengths.sum(), device),
        }
        metrics["eps"] = B / metrics["perf/seconds"]  # episodes per second
        if has_kl:
            metrics["objective/kl"] = metrics.pop("kl") * tokens_per_response
            metrics["objective/kl_coef"] = args.kl_coef
        if args.eval_every and update % args.eval_every == 0 and update < updates:
            trainer_state.global_step = updates
            with autocast:
                records = evaluate(respond, held_out, args, accelerator)
            metrics |= {f"eval/{name}": x for name, x in table_metrics(records).items()}
        run.log(metrics)  # tensors become numbers; raises if one is not finite
        if args.num_sample_generations and (
            update == 1 or update % max(1, updates // args.num_sample_generations) == 0
        ):
            # The k responses to the first prompt, which the main process generated.
            with torch.no_grad(), autocast:
                _, entropies = model(b["ids"][:k], b["mask"][:k], T, args.temperature)
            token_columns = {
                "ids": b["ids"][:k, C:],
                "logprob": b["sampling_logprobs"][:k],
                "entropy": entropies,  # of the policy after this update
                "advantage": advantages[:k, None].expand(k, T),
            }
            if has_kl:
                token_columns["kl"] = kl_per_token(b["sampling_logprobs"][:k], b["ref_logprobs"][:k], "k1")
            prompt = plain_text(prompt_share["examples"][0]["prompt"])
            samples = {"prompt": [prompt] * k, "response": responses[:k], "score": b["scores"][:k].tolist()}
            log_samples(run, update, rows_of(samples), b["lengths"], token_columns)

        # 5. Save.
        run.checkpoint({"update": update, "batch_size": B})

    # 6. Evaluate on the same held-out prompts again, and save the model.
    trainer_state.global_step = updates
    with autocast:
        after = evaluate(respond, held_out, args, accelerator)
    if accelerator.is_main_process:
        report_evaluation(run, before, after)
        save_policy(policy, tokenizer, run.folder / "model")
    run.finish()
    return model, run.folder


# ---- Evaluation --------------------------------------------------------------------------------------------


def evaluate(respond, held_out, args, accelerator):
    """Solve all held-out tasks, with the same random numbers before and after training.

    held_out: dict: name -> tasks. -> dict: name -> records (see evaluate_set), also for "greedy"
    """
    records = {name: evaluate_set(respond, tasks, args, accelerator) for name, tasks in held_out.items()}
    # Nearly greedy decoding: does the policy know the answer, but lose it in sampling?
    greedy_args = replace(args, temperature=0.01, num_eval_samples=1)
    records["greedy"] = evaluate_set(respond, held_out["held-out"], greedy_args, accelerator)
    return records


def evaluate_set(respond, tasks, args, accelerator):
    """Solve each task k = num_eval_samples times. Each process takes its share of the tasks.

    respond: sample_responses, with everything but the batch and the flags filled in; tasks: list of dict,
    from load_tasks. A response is right if the first reward function that applies to it gives 1 or more.
    -> one dict per task, for the tasks of all processes:
        task          str, the prompt
        responses     k str
        right, ended  k bool
        length        k int, in tokens
        rewards/NAME  k numbers, for each reward function; None: it does not apply
    """
    k = args.num_eval_samples
    batch = draw_batch(tasks, k, replace(args, seed=0), "held-out")
    records = []
    with accelerator.split_between_processes(batch) as share:
        if share["examples"]:  # there may be more processes than tasks
            b, responses = respond(share, args)
            columns = {name: x for name, x in b.items() if name.startswith("rewards/")}
            first_score = torch.full_like(b["lengths"], math.nan, dtype=torch.float)  # [P * k]
            for score in columns.values():
                first_score = torch.where(first_score.isnan(), score, first_score)
            columns |= {"right": first_score >= 1, "ended": b["stopped"], "length": b["lengths"]}
            for i, task in enumerate(share["examples"]):
                group = slice(i * k, (i + 1) * k)
                record = {"task": plain_text(task["prompt"]), "responses": responses[group]}
                for name, x in columns.items():
                    record[name] = [None if math.isnan(value) else value for value in x[group].tolist()]
                records.append(record)
    return accelerate.utils.gather_object(records)


def table_metrics(records):
    """The numbers of the final table. records: from evaluate -> dict of floats"""
    metrics = {}
    for name in records:
        for metric, x in task_metrics(records[name], is_greedy=name == "greedy").items():
            metrics[f"{name}: {metric}"] = x
    return metrics


def task_metrics(records, is_greedy=False):
    """The numbers of the final table for one set of tasks. Records as in evaluate_set -> dict of floats"""
    pass_at_1 = [fmean(record["right"]) for record in records]  # of each task
    metrics = {
        "pass@1": fmean(pass_at_1),
        "+- (95 % interval)": 1.96 * pstdev(pass_at_1) / len(records) ** 0.5,
        "tokens per response": fmean(length for record in records for length in record["length"]),
    }
    if is_greedy:  # one response per task
        return metrics
    k = len(records[0]["right"])
    responses = [response for record in records for response in record["responses"]]
    metrics[f"pass@{k}"] = fmean(any(record["right"]) for record in records)
    metrics["tasks all right or all wrong"] = fmean(x in (0.0, 1.0) for x in pass_at_1)
    metrics["different responses per task"] = fmean(len(set(record["responses"])) for record in records)
    metrics["distinct bigrams"] = distinct_bigrams(responses)
    metrics["ended by itself"] = fmean(ended for record in records for ended in record["ended"])
    for name in records[0]:
        if name.startswith("rewards/"):
            rewards = [x for record in records for x in record[name] if x is not None]
            metrics[name] = fmean(rewards or [0])
    return metrics


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


def draw_batch(examples, k, args, purpose):
    """Prompts, left-padded to the longest one, and random numbers to sample k responses to each.

    examples: P dicts with ids, the tokens of the prompt; purpose: the number of the update, or "held-out"
    -> dict: examples (list of P), ids [P, C], bool mask [P, C], uniforms [P, k, T]
    """
    lengths = torch.tensor([len(example["ids"]) for example in examples])
    mask = length_mask(lengths, lengths.max()).flip(1)  # [P, C], prompts end in the last column
    ids = torch.zeros(mask.shape, dtype=torch.long)  # 0 only fills the row: the mask hides it
    ids[mask] = torch.tensor([token for example in examples for token in example["ids"]])
    generator = generator_for(args.seed, "tokens", purpose)
    uniforms = torch.rand(len(examples), k, args.response_length, dtype=torch.float64, generator=generator)
    return dict(examples=examples, ids=ids, mask=mask, uniforms=uniforms)


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
def rollout(respond, model, ref_model, batch, args):
    """Sample k responses to each task, reward them, and compute old and reference log-probabilities.

    respond: sample_responses, with everything but batch and args filled in; batch: from draw_batch. Returns
    - the dict of sample_responses, and scores (the weighted sum of the rewards) [P * k]; logprobs (old ones,
      if a batch has several optimizer steps), ref_logprobs (if kl_coef is not 0) [P * k, T]
    - the responses, P * k str
    """
    b, responses = respond(batch, args)
    scores_by_name = [x for name, x in b.items() if name.startswith("rewards/")]
    weights = args.reward_weights or [1.0] * len(scores_by_name)
    scores = zip(weights, scores_by_name, strict=True)
    b["scores"] = sum(weight * x.nan_to_num() for weight, x in scores)  # nan: does not apply to a row

    # With one optimizer step per batch, the policy does not change before the update, and train uses its new
    # log-probabilities as the old ones. With several steps, old ones are computed here, exactly as in the
    # update: those from generation differ more, and are only checked and logged.
    if args.num_ppo_epochs * args.num_mini_batches > 1:
        b["logprobs"] = torch.zeros_like(b["sampling_logprobs"])
    if args.kl_coef != 0:
        b["ref_logprobs"] = torch.zeros_like(b["sampling_logprobs"])
    P, k, T = batch["uniforms"].shape
    C = b["ids"].shape[1] - T
    groups = torch.arange(P, device=b["ids"].device)
    sorted_rows = sorted_groups(groups, b["lengths"], k, can_reuse_prompts(model.policy))
    for rows in sorted_rows.split(args.per_device_train_batch_size):
        t = b["lengths"][rows].max().item()
        inputs = b["ids"][rows, : C + t], b["mask"][rows, : C + t], t, args.temperature
        if "logprobs" in b:
            b["logprobs"][rows, :t], _ = model(*inputs)
        if "ref_logprobs" in b:
            b["ref_logprobs"][rows, :t] = reference_logprobs(ref_model, model.policy, *inputs)
    return b, responses


def sorted_groups(groups, lengths, k, reuses_prompts):
    """The row numbers of whole groups, sorted by length, because similar lengths need less padding.

    groups: indices of prompts [G]; lengths of all responses [P * k]; reuses_prompts: the responses of a group
    stay neighbors, because their prompt is read once, and groups are sorted by their longest response.
    Otherwise, single rows are sorted. -> [G * k]
    """
    longest = lengths.view(-1, k).amax(1)[groups]  # [G]
    groups = groups[longest.argsort(stable=True)]
    rows = (groups[:, None] * k + torch.arange(k, device=groups.device)).flatten()
    return rows if reuses_prompts else rows[lengths[rows].argsort(stable=True)]


@torch.no_grad()
def sample_responses(policy, tokenizer, stop_ids, get_scores, batch, args):
    """Sample k responses to each prompt, and reward them.

    get_scores(examples, responses, response_tokens) -> dict: name of the reward -> [P * k]
    batch: from draw_batch. Returns
    - a dict of tensors, in which the responses to a prompt are neighbors: ids, mask [P * k, C + T]; lengths,
      stopped, rewards/NAME [P * k]; sampling_logprobs [P * k, T]
    - the responses, P * k str
    """
    policy.eval()
    batch = accelerate.utils.send_to_device(batch, stop_ids.device)
    P, k, T = batch["uniforms"].shape

    # 1. Generate.
    outputs = []
    groups_at_once = max(1, args.local_rollout_forward_batch_size // k)
    for groups in torch.arange(P, device=stop_ids.device).split(groups_at_once):
        inputs = batch["ids"][groups], batch["mask"][groups], batch["uniforms"][groups]
        outputs.append(generate(policy, *inputs, stop_ids, args.temperature))
    tokens, sampling_logprobs = [torch.cat(parts) for parts in zip(*outputs)]  # [P * k, T] each
    prompt_ids = batch["ids"].repeat_interleave(k, 0)  # [P * k, C]
    prompt_mask = batch["mask"].repeat_interleave(k, 0)
    lengths = response_lengths(tokens, stop_ids)  # [P * k]
    valid = length_mask(lengths, T)  # [P * k, T]
    is_stop = torch.isin(tokens, stop_ids) & valid  # [P * k, T]

    # 2. Decode and reward.
    response_tokens = list_tokens(tokens, valid)
    is_text = valid & ~is_stop
    if args.stop_token_id is not None:  # it may name an ordinary token, such as ".", which is text
        special_ids = torch.tensor(tokenizer.all_special_ids, device=tokens.device)
        is_text |= is_stop & ~torch.isin(tokens, special_ids)
    text_tokens = list_tokens(tokens, is_text)
    _, responses = decode(tokenizer, list_tokens(prompt_ids, prompt_mask), text_tokens)  # P * k str
    examples = [example for example in batch["examples"] for _ in range(k)]
    scores_by_name = get_scores(examples, responses, response_tokens)  # name -> [P * k]

    b = {
        "ids": torch.cat([prompt_ids, tokens], 1),  # [P * k, C + T]
        "mask": torch.cat([prompt_mask, valid], 1),
        "lengths": lengths,
        "stopped": is_stop.any(1),
        "sampling_logprobs": sampling_logprobs,
        **{f"rewards/{name}": x for name, x in scores_by_name.items()},
    }
    return b, responses


@torch.no_grad()
def generate(policy, ids, mask, uniforms, stop_ids, temperature):
    """Sample k responses to each prompt, until a stop token or T tokens. No top-k, no top-p.

    Left-padded ids, mask [P, C]; uniforms [P, k, T], one random number per token; stop_ids [any number]
    -> tokens and the log-probabilities they were sampled with (fp32), [P * k, T] each, 0 after the end; the k
    responses to a prompt are neighbors
    """
    P, k, T = uniforms.shape
    body, head = body_and_head(policy)
    cache = transformers.DynamicCache(config=body.config)
    hidden = hidden_states(body, ids, mask, cache)[:, -1]  # [P, H]

    # The model reads each prompt only once. Its keys and values serve all k responses, which are neighbors.
    prompt_of_row = torch.arange(P, device=ids.device).repeat_interleave(k)  # [P * k]
    # Keys and values [P, ...] -> [P * k, ...]. (batch_select_indices would fail with linear attention.)
    cache.reorder_cache(prompt_of_row)
    hidden, mask = hidden[prompt_of_row], mask[prompt_of_row]
    uniforms = uniforms.flatten(0, 1)  # [P * k, T]
    if can_be_recorded(policy, cache):
        # On a GPU, most models run the loop below in this faster version. Both sample by sample_next.
        return generate_recorded(policy, cache, hidden, mask, uniforms, stop_ids, temperature)

    tokens = torch.zeros(P * k, T, dtype=torch.long, device=ids.device)
    logprobs = torch.zeros(P * k, T, device=ids.device)
    rows = torch.arange(P * k, device=ids.device)  # the rows that are still being written
    for t in range(T):
        token, logprob = sample_next(head, hidden, uniforms[rows, t], temperature)  # [rows] each
        tokens[rows, t], logprobs[rows, t] = token, logprob
        # Drop the finished rows.
        keep = (~torch.isin(token, stop_ids)).nonzero().squeeze(1)
        if len(keep) == 0 or t + 1 == T:
            break
        if len(keep) < len(rows):
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


# ---- Policy and reference ----------------------------------------------------------------------------------


class Policy(nn.Module):
    """The policy with the forward pass of the update, so that DDP or DeepSpeed can wrap it."""

    def __init__(self, policy):
        super().__init__()
        self.policy = policy

    def forward(self, ids, mask, T, temperature):
        """Log-probabilities and entropies of the last T tokens of each row.

        ids [B, C + T], bool mask [B, C + T] -> both fp32 [B, T], 0 after the end of a response
        """
        return response_logprobs(self.policy, ids, mask, T, temperature)


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

    ids [B, C + T], bool mask [B, C + T] -> logprobs, entropies, both fp32 [B, T]
    """
    _, head = body_and_head(lm)
    hidden = group_hidden_states(lm, ids, mask, T)  # [B, T, H]
    # The output layer is large, so only valid tokens go through it, as a flat list.
    valid = mask[:, -T:]
    rows, columns = valid.nonzero(as_tuple=True)  # only once, because nonzero waits for the GPU
    flat_hidden, flat_tokens = hidden[rows, columns], ids[:, -T:][rows, columns]
    # log softmax of token_logits at the tokens, and its entropies
    logprobs, entropies = token_logprobs(flat_hidden, head.weight, flat_tokens, temperature, head.bias)
    zeros = torch.zeros(valid.shape, device=ids.device)
    return zeros.masked_scatter(valid, logprobs), zeros.masked_scatter(valid, entropies)


def group_hidden_states(lm, ids, mask, T):
    """The hidden states that predict the last T tokens of each row. [B, C + T], bool [B, C + T] -> [B, T, H]

    The responses of a group share their prompt. If can_reuse_prompts, it is read only once per micro-batch:
    its keys and values serve all responses, and gradients flow back through them. Nothing is approximated.
    """
    body, _ = body_and_head(lm)
    if not can_reuse_prompts(lm):  # each row reads its own prompt
        return hidden_states(body, ids, mask)[:, -T - 1 : -1]
    prompts = ids.where(mask, -1)[:, :-T]  # [B, C], -1: padding
    prompts, prompt_of_row = prompts.unique_consecutive(dim=0, return_inverse=True)  # [P, C], [B]
    cache = transformers.DynamicCache(config=body.config)
    prompt_hidden = hidden_states(body, prompts.clamp(min=0), prompts >= 0, cache)  # [P, C, H]
    # Not cache.batch_select_indices: on a CPU, its gradient is added up in a varying order, and a resumed run
    # would not be the same bit for bit.
    cache.reorder_cache(prompt_of_row)  # keys and values [P, ...] -> [B, ...]
    response_hidden = hidden_states(body, ids[:, -T:], mask, cache)  # [B, T, H]
    # The state at position t - 1 predicts token t, and the prompt's last state predicts the first one.
    first_hidden = prompt_hidden[:, -1:].index_select(0, prompt_of_row)  # [B, 1, H]
    return torch.cat([first_hidden, response_hidden[:, :-1]], 1)


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
# Part II: infrastructure. Nothing below is needed to understand GRPO: it covers recipes, models, rewards,
# data, files and flags. The scripts share these functions, copied verbatim. check.py checks flags and data.
# ============================================================================================================

SCRIPT = Path(__file__).stem
HERE = Path(__file__).resolve().parent  # recipes name folders next to this file


BOXED = "Think step by step, and put your final answer within \\boxed{}."
RECIPES = {
    "tiny": Args(  # a small model and tasks that come with this repository
        optimizer="torch.optim.AdamW",  # with weight decay 0.01; in the other recipes and in TRL, it is 0
        model_name_or_path="checkpoints/arithmetic-sft",
        dataset_name="data/arithmetic",
        hard_dataset_name="data/arithmetic-hard",
        prompt_template=None,
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
    "gsm8k-qwen-0.5b": Args(  # large micro-batches, for a GPU with 80 GB: 5 minutes of updates on an H200
        system_prompt=BOXED,
        total_episodes=13_056,
        per_device_train_batch_size=32,
        gradient_accumulation_steps=8,
        local_rollout_forward_batch_size=256,
        learning_rate=3e-6,
    ),
    "gsm8k-qwen-1.5b": Args(
        system_prompt=BOXED,
        model_name_or_path="Qwen/Qwen2.5-1.5B-Instruct",
        gradient_checkpointing=True,
        save_every=50,  # a checkpoint takes 18 GB
    ),
    "smollm2-word-problems": Args(
        model_name_or_path="runs/smollm2-word-problems/sft/model",  # of sft.py: see docs/real_models.md
        dataset_name="runs/smollm2-word-problems/word-problems",
        prompt_template=None,
        max_prompt_length=192,
        response_length=48,
        total_episodes=26_624,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=32,
        learning_rate=2e-5,
        num_eval_prompts=500,
        num_sample_generations=3,
    ),
    # The task of TinyZero (a small reproduction of DeepSeek-R1-Zero), with two differences: there is no
    # reward for the format, and the beginning of the response is not given.
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


def set_template_options(tokenizer, args):
    """Make the values of --chat-template-kwargs the defaults of the chat template, which the model's folder
    will contain. So the next script and plain transformers render chats alike."""
    for name, value in json.loads(args.chat_template_kwargs or "{}").items():
        option = f"{{% set {name} = {name} | default({value!r}) %}}"
        tokenizer.chat_template = f"{option}\n{tokenizer.chat_template}"


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


def can_reuse_prompts(model):
    """True if a prompt that is read once can serve several responses, with gradients.

    Gradient checkpointing excludes a cache. Linear attention and convolutions (Qwen3.5, LFM2) have no keys
    and values in theirs, but a state that every token overwrites.
    """
    layers = transformers.DynamicCache(config=model.config).layers
    has_states = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)
    return not (has_states or model.is_gradient_checkpointing)


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


# ---- Token steps that a GPU records ------------------------------------------------------------------------


TOKENS_PER_ROUND = 128  # then finished rows are dropped, and a step is recorded again


def can_be_recorded(policy, cache):
    """Can a GPU record a token step of this model? No shape may change, and nothing may involve the CPU.

    transformers says of each kind of model whether it can read a cache with free columns (GPT-Neo cannot).
    """
    body, _ = body_and_head(policy)
    # Sliding windows move, and linear attention has states instead of columns.
    is_plain = all(type(layer) is DynamicLayer for layer in cache.layers)
    # The CPU takes part in RoPE whose frequencies depend on the longest row, in Falcon's attention, which
    # selects heads by lists of numbers, and in fp32 matmuls of experts, whose weights are 3-D.
    is_dynamic = "dynamic" in str(getattr(body.config, "rope_parameters", None))
    has_experts = any(p.dim() == 3 for p in body.parameters())
    needs_cpu = is_dynamic or has_experts or body.config.model_type == "falcon"
    is_quantized = getattr(policy, "is_quantized", False)
    can_be = body._can_compile_fullgraph and is_plain and not (needs_cpu or is_quantized)
    return body.device.type == "cuda" and can_be


def generate_recorded(policy, cache, hidden, mask, uniforms, stop_ids, temperature):
    """The loop over tokens of generate on a GPU: the same tokens up to rounding, in less time.

    It works in rounds. Within a round, all steps are the same for the GPU, so that `repeat` can record one:
    no shape changes, and nothing is copied to the CPU. Before a round, mask and cache get room for its
    tokens. After it, finished rows are dropped.

    cache, mask [B, C]: the prompts; hidden [B, H]: predicts the first token; uniforms [B, T]
    -> tokens and the log-probabilities they were sampled with, both [B, T] and 0 after the end
    """
    (B, C), T = mask.shape, uniforms.shape[1]
    body, head = body_and_head(policy)
    tokens = torch.zeros(B, T, dtype=torch.long, device=mask.device)
    logprobs = torch.zeros(B, T, device=mask.device)
    rows = torch.arange(B, device=mask.device)  # the rows that are still being written
    column = torch.full([1], C, device=mask.device)  # of the next token

    # step reads the current rows, mask and hidden of the loop below.
    def step():
        """The body of the loop over tokens: sample the next token of each row, and read it."""
        t = column - C  # [1]
        token, logprob = sample_next(head, hidden, uniforms[rows, t], temperature)  # [rows] each
        tokens[rows, t], logprobs[rows, t] = token, logprob
        mask.index_fill_(1, column, True)
        hidden.copy_(hidden_states(body, token[:, None], mask, cache)[:, -1])
        column.add_(1)

    for start in range(0, T, TOKENS_PER_ROUND):
        end = min(start + TOKENS_PER_ROUND, T)
        columns = math.ceil((C + end) / 8) * 8  # after this round; fast attention needs a multiple of 8
        mask = F.pad(mask, (0, columns - mask.shape[1]))  # False: nothing is written there yet
        for i, layer in enumerate(cache.layers):  # one by one, so that only one layer is in memory twice
            cache.layers[i] = FixedSizeLayer(layer, columns, column)

        repeat(step, end - start)
        has_stopped = torch.isin(tokens[rows, start:end], stop_ids).any(1)  # [rows]
        keep = (~has_stopped).nonzero().squeeze(1)
        if len(keep) == 0 or end == T:
            break
        if len(keep) < len(rows):
            cache.reorder_cache(keep)
            rows, mask, hidden = rows[keep], mask[keep], hidden[keep]

    # Discard what a row sampled between its end and the end of its round.
    valid = length_mask(response_lengths(tokens, stop_ids), T)  # [B, T]
    return tokens.where(valid, 0), logprobs.where(valid, 0.0)


def repeat(step, count):
    """Call step() count times. From the second time on, the GPU replays what it recorded of one call.

    Launching a kernel from Python takes longer than running it. A recording (a CUDA graph) is the list of
    the kernels of one call, with the addresses that they read and write; the GPU starts them by itself. So a
    step must keep its state in tensors that it changes in place.
    """
    step()  # also loads the kernels, which must not happen during a recording
    if count == 1:
        return
    # Other threads may use the GPU, but not autocast: the end of an autocast block in any thread frees the
    # rounded copies of weights, which all threads share and the recording reads.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()  # only recorded, not executed
    for _ in range(count - 1):
        graph.replay()
    torch.cuda.synchronize()  # before the graph and its memory are freed


class FixedSizeLayer(DynamicLayer):
    """Keys and values of one layer, [rows, heads, L, width]. Each token is written to a free column."""

    is_compileable = True  # otherwise transformers asks for the values of the mask

    def __init__(self, layer, columns, column):
        """A copy of a layer, with free columns. column: where update writes, a tensor [1]"""
        super().__init__()
        dtype, device_type = layer.keys.dtype, layer.keys.device.type
        if torch.is_autocast_enabled(device_type):  # otherwise attention rounds all columns for each token
            dtype = torch.get_autocast_dtype(device_type)
        room = (0, 0, 0, columns - layer.keys.shape[2])
        self.keys = F.pad(layer.keys.to(dtype), room)
        self.values = F.pad(layer.values.to(dtype), room)
        self.is_initialized, self.column = True, column

    def update(self, keys, values, *args, **kwargs):
        """Called by each attention layer, with the newest token's keys and values. -> those of all columns"""
        self.keys.index_copy_(2, self.column, keys.to(self.keys.dtype))
        self.values.index_copy_(2, self.column, values.to(self.values.dtype))
        return self.keys, self.values

    def get_mask_sizes(self, query_length):
        """Called by transformers, to make the attention mask. -> number of columns, the first column"""
        return self.keys.shape[2], 0


# ---- Rewards -----------------------------------------------------------------------------------------------


def load_functions(names):
    """Import functions that are named FILE.py:function. -> dict: name -> function"""
    functions = {}
    for name in names:
        path, _, function = name.rpartition(":")
        path = Path(resolve_path(path)).absolute()
        sys.path.insert(0, str(path.parent))  # so that the file can import its neighbors
        functions[function] = getattr(importlib.import_module(path.stem), function)
    return functions


def score_responses(functions, trainer_state, device, examples, responses, response_tokens):
    """Call reward functions for one response to each example. -> dict: name of the function -> fp32 [B]

    examples: B dicts with prompt (str or list of messages) and columns (dict); responses: B str;
    response_tokens: B lists of token ids. If the prompt is a list of messages, functions get the response as
    one too, as in TRL. If the prompt ends with the beginning of the answer, the response begins with that.
    """
    prompts, completions = [], []
    for example, response in zip(examples, responses):
        prompt = example["prompt"]
        if is_chat(prompt):
            if prompt[-1]["role"] == "assistant":
                *prompt, beginning = prompt
                response = beginning["content"] + response
            response = [{"role": "assistant", "content": response}]
        prompts.append(prompt)
        completions.append(response)
    rows = [example["columns"] for example in examples]
    inputs = rows, prompts, completions, response_tokens
    return call_reward_functions(functions, trainer_state, device, *inputs)


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


def load_prompts(args, tokenizer):
    """-> training tasks; dict: name -> held-out tasks. Tasks are a list of dict, from load_tasks"""
    train_rows, held_out_rows = load_splits(args.dataset_name)
    if args.num_train_rows is not None:  # the same ones for every --seed
        train_rows = random.Random(0).sample(train_rows, min(args.num_train_rows, len(train_rows)))
    splits = {"held-out": held_out_rows}
    if args.hard_dataset_name is not None:
        _, splits["harder"] = load_splits(args.hard_dataset_name)
    held_out = {}
    for name, rows in splits.items():
        tasks = load_tasks(rows, tokenizer, args)
        order = stream_rows(len(tasks), 0, len(tasks), seed=0)  # the same ones for every --seed
        held_out[name] = [tasks[i] for i in order[: args.num_eval_prompts]]
    return load_tasks(train_rows, tokenizer, args), held_out


def load_tasks(rows, tokenizer, args):
    """The tasks whose prompt is complete and short enough, as a list of dict:

    ids: token ids of the prompt; prompt: str or list of messages; columns: the row, for reward functions
    """
    tasks = []
    for row in rows:
        prompt = task_prompt(row, tokenizer, args)
        ids = [] if prompt is None else tokenize_prompt(tokenizer, prompt)
        if 0 < len(ids) <= args.max_prompt_length:
            tasks.append(dict(ids=ids, prompt=prompt, columns=row))
    accelerate.PartialState().print(f"{len(tasks)} of {len(rows)} rows have a prompt that is short enough")
    return tasks


def task_prompt(row, tokenizer, args):
    """The prompt of a row, with the system prompt. -> str or list of messages; None if a part is missing

    What --prompt-template makes is a user's message, if the tokenizer has a chat template.
    """
    names = ["prompt"]
    if "prompt" not in row:  # the columns that the template names
        names = [name for _, name, _, _ in string.Formatter().parse(args.prompt_template or "") if name]
    values = [row.get(name) for name in names]
    if not names or any(value in (None, []) or not str(value).strip() for value in values):
        return None
    prompt = row.get("prompt")
    if "prompt" not in row:
        prompt = args.prompt_template.format(**row)
        if tokenizer.chat_template is not None:
            prompt = [{"role": "user", "content": prompt}]
    if args.system_prompt is not None and not is_chat(prompt):
        prompt = f"{args.system_prompt}\n\n{prompt}"
    elif args.system_prompt is not None and prompt[0]["role"] != "system":  # the data may have their own
        prompt = [{"role": "system", "content": args.system_prompt}, *prompt]
    return prompt


def tokenize_prompt(tokenizer, prompt):
    """The token ids of a prompt, which is a text or a list of messages. -> list"""
    if not is_chat(prompt):
        return tokenizer(prompt).input_ids
    return tokenizer(render_chat(tokenizer, prompt, is_prompt=True), add_special_tokens=False).input_ids


def is_chat(value):
    """True for a list of messages (dicts with role and content), False for a text."""
    return isinstance(value, list) and len(value) > 0


def render_chat(tokenizer, messages, is_prompt=False):
    """The text of a list of messages, by the tokenizer's chat template. It contains BOS if the model needs
    one, so tokenize it with add_special_tokens=False.

    is_prompt: end where the assistant continues: after the header of its turn or, if the last message is its
    own, inside that message. -> str
    """
    is_begun = messages[-1]["role"] == "assistant" and is_prompt  # the policy goes on with this message
    return tokenizer.apply_chat_template(
        messages,
        tokenize=False,
        add_generation_prompt=is_prompt and not is_begun,
        continue_final_message=is_begun,
    )


def plain_text(prompt):
    """A prompt for tables and judges: the text itself, or the messages of a chat, one below the other."""
    if not is_chat(prompt):
        return prompt
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)


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
    return end_tokens(policy, tokenizer)


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
    metrics_before, metrics_after = table_metrics(before), table_metrics(after)
    names = metrics_before.keys()
    comparison = [{"metric": x, "before": metrics_before[x], "after": metrics_after[x]} for x in names]
    samples = []
    for old, new in zip(before["held-out"][:6], after["held-out"]):
        sample = {"prompt": old["task"], "before": old["responses"][0], "right": old["right"][0]}
        samples.append(sample | {"after": new["responses"][0], "right after": new["right"][0]})
    rows = []
    for name in before:
        for old, new in zip(before[name], after[name]):
            rows.append({"set": name, "task": old.pop("task"), "before": old, "after": new})
            del new["task"]  # the same
    judge = " or, if it does not apply, ".join(run.args.reward_fn)
    decoding = f"sampling, temperature {run.args.temperature}, at most {run.args.response_length} tokens"
    about = {"before": metrics_before, "after": metrics_after, "n": len(before["held-out"])}
    about |= {"judge": judge, "decoding": decoding}
    run.table("held-out tasks, the first of the sampled responses", samples)
    run.table(f"{about['n']} held-out tasks; right: 1 or more by {judge}", comparison)
    (run.folder / "evaluation.json").write_text(json.dumps(about, indent=2))
    lines = [json.dumps(row) + "\n" for row in rows]
    (run.folder / "evaluation_samples.jsonl").write_text("".join(lines))
    run.accelerator.log({f"eval/{name}": x for name, x in metrics_after.items()}, step=run.updates)


# ---- Command line ------------------------------------------------------------------------------------------


# Flags that may change when a run is resumed: they do not change its result, or prolong it.
MAY_CHANGE = (
    *("resume", "eval_every", "save_every", "keep_checkpoints", "log_with", "num_sample_generations"),
    *("total_episodes", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("local_rollout_forward_batch_size", "gradient_checkpointing"),
)
# Flags with which a recipe describes its own data. They do not apply to other data.
OF_DATA = ("hard_dataset_name", "prompt_template", "system_prompt", "reward_fn")


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
