"""GRPO (group relative policy optimization) that teaches a language model to do arithmetic.

GRPO is PPO without a value function: each task gets several responses, and a response is good if its reward
is above the average of its group. If you know RLOO from rloo_tldr.py, this is what changes:

1. Rewards are verifiable: a function compares the final answer of a response with the column `answer`, and
   returns 1 or 0 (`correct` in data/math_rewards.py; it reads the last \\boxed{...}, <answer>...</answer> or
   number). No reward model is trained, and nobody has to compare responses. There is no penalty for a missing
   EOS: a response that is cut off before its answer is simply wrong.
2. The advantage of a response is its reward minus the mean reward of its group, divided by the group's
   standard deviation (`grpo_advantages`). If all rewards of a group are equal, for example because all
   responses are right, the advantages are 0: no gradient comes from this group, except that of a KL penalty.
3. Every token is an action. All tokens of a response have its advantage, but each one has a ratio and a clip
   of its own, as in PPO. In RLOO the whole response has one.
4. The loss is the sum over all tokens of the minibatch, divided by the number of tokens, as in DAPO (Yu et
   al. 2025): every token has the same weight. The original GRPO (Shao et al. 2024) averages within each
   response first, so a token of a long response has less weight.
5. A KL penalty, if there is one, is a term of the loss (k3, see `kl_per_token`), not of the reward. By
   default there is none, as in DAPO, and then no reference model is needed.
6. By default there is one optimizer step per batch of rollouts. The policy that is trained is then still the
   one that sampled: every ratio is 1, and nothing is clipped. What is left is REINFORCE with the advantages
   of point 2. Ratios matter with --num-mini-batches or --num-ppo-epochs above 1.
7. Before and after training, held-out tasks are solved several times each. pass@1 is the share of responses
   that are right; pass@k, the share of tasks with at least one right response among k.
8. As in rloo_tldr.py, a forward pass reads a prompt only once, however many of its responses it holds
   (`generate_groups` and, without gradient checkpointing, `group_logprobs`). Several minibatches or processes
   split groups in training, so this saves most with one minibatch and one process, as by default.

    python grpo_math.py                              # recipe tiny: no download, no GPU, minutes on 2 cores
    python grpo_math.py --learning-rate 1e-4         # tiny with one change; every field of Args is a flag
    python grpo_math.py gsm8k-qwen-0.5b              # Qwen2.5-0.5B-Instruct on GSM8K, from the Hub
    python grpo_math.py smollm2-word-problems        # after the same recipe of sft.py
    python grpo_math.py --reward-fn mine.py:correct mine.py:format --reward-weights 1 0.2
    accelerate launch grpo_math.py gsm8k-qwen-1.5b   # on N GPUs, with N times the batch
    python grpo_math.py --resume latest              # continue a stopped run; on a CPU, bit for bit

Part I is the algorithm, from the training loop down to the math. Part II is infrastructure: models, rewards,
data, processes, run folder, flags. Papers: DeepSeekMath (GRPO, Shao et al. 2024), DAPO (Yu et al. 2025),
Understanding R1-Zero-Like Training (Dr. GRPO, Liu et al. 2025), Back to Basics (RLOO, Ahmadian et al. 2024),
PPO (Schulman et al. 2017), "Approximating KL divergence" (k3, Schulman 2020). TRL is Hugging Face's library
of trainers. Results, metrics, variants, which lines to change for what: docs/grpo_math.md.
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

import copy
import datetime
import gzip
import importlib
import inspect
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
import traceback
import warnings
from collections import defaultdict
from contextlib import chdir, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
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
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

# ============================================================================================================
# Part I: the algorithm
# ============================================================================================================


@dataclass
class Args:
    """The defaults are the recipe gsm8k-qwen-0.5b, with smaller micro-batches.

    A command line that names no recipe and no model starts from the recipe tiny, which replaces some of them.
    """

    # Run
    recipe: tyro.conf.Suppress[str] = "custom"  # first word of the command line
    date: str = time.strftime("%Y-%m-%d")  # today's date, for chat templates; kept by --resume
    seed: int = 1  # random seed; all sampling is a function of (seed, update)
    output_dir: str | None = None  # run folder (default: runs/<script>/<recipe>-s<seed>-<time>)
    resume: str | None = None  # continue a run: its folder, or `latest` in runs/<script>
    save_every: int = 10  # updates between checkpoints (0: only at the end, or after a signal)
    keep_checkpoints: int = 2  # number of checkpoints to keep
    log_with: Literal["none", "wandb", "tensorboard"] = "none"  # a tracker, in addition to metrics.jsonl
    num_sample_generations: int = 10  # about how many times samples are printed during the run

    # Model
    model_name_or_path: str = "Qwen/Qwen2.5-0.5B-Instruct"  # initial policy: Hub name, folder, or LoRA folder
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"  # of matrix products; auto: bf16 if a GPU has it
    load_in_8bit: bool = False  # 8-bit frozen weights: LoRA's base model, or without LoRA the reference
    num_shared_layers: int = 0  # freeze embeddings and this many first layers; share them with the reference
    gradient_checkpointing: bool = False  # recompute activations in the backward pass to save memory
    lora_r: int = 0  # LoRA rank (0: train all weights); the reference is then the policy without its adapter
    lora_alpha: int = 32  # LoRA scale: the adapter adds lora_alpha / lora_r * B A
    lora_target_modules: str = "all-linear"  # layers with an adapter: comma-separated names, or all-linear

    # Tasks and rewards
    dataset_name: str = "openai/gsm8k:main"  # Hub name, NAME:CONFIG, or folder; rewards get all columns
    num_train_rows: int | None = None  # train on the first N rows of the data set only; None: on all
    hard_dataset_name: str | None = None  # other held-out tasks, for the final table: its split test
    prompt_template: str | None = "{question}"  # makes prompts, if the data have no column prompt
    system_prompt: str | None = (  # system message of each chat, or text before each prompt
        "Think step by step, and put your final answer within \\boxed{}."
    )
    reward_fn: list[str] = field(  # FILE.py:function ...; f(completions, **columns) -> one number for each
        default_factory=lambda: ["data/math_rewards.py:correct"]
    )
    reward_weights: list[float] | None = None  # one for each function of --reward-fn; None: 1 each
    max_prompt_length: int = 512  # tasks whose prompt has more tokens are skipped
    response_length: int = 512  # longest response, in tokens
    stop_token: Literal["eos"] | None = "eos"  # end at EOS and the model's other stop tokens; None: never
    stop_token_id: int | None = None  # end responses at this token id only, instead of --stop-token
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

    # Evaluation
    num_examples: int = 256  # number of held-out tasks to solve before and after training, per data set
    num_eval_samples: int = 8  # responses to each of them: the k of pass@k

    # Optimizer
    learning_rate: float = 1e-6  # the highest learning rate of the schedule
    optimizer: str = "torch.optim.Adam"  # dotted name: torch.optim.SGD, bitsandbytes.optim.Adam8bit, ...
    adam_eps: float = 1e-8  # epsilon of Adam
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"  # shape after the warm-up
    warmup_ratio: float = 0.0  # fraction of updates in which the learning rate rises to its full value
    max_grad_norm: float | None = 1.0  # clip the gradient to this norm; None: no clipping


RECIPES = {
    "tiny": Args(  # a small model and tasks that come with this repository
        optimizer="torch.optim.AdamW",  # with weight decay 0.01; in the other recipes and in TRL, it is 0
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
    "gsm8k-qwen-0.5b": Args(  # large micro-batches, for a GPU with 80 GB
        per_device_train_batch_size=32,
        gradient_accumulation_steps=8,
        local_rollout_forward_batch_size=256,
    ),
    "gsm8k-qwen-1.5b": Args(
        model_name_or_path="Qwen/Qwen2.5-1.5B-Instruct",
        gradient_checkpointing=True,
        save_every=50,  # a checkpoint takes 18 GB
    ),
    # Run the recipe of this name in sft.py first: see docs/real_models.md.
    "smollm2-word-problems": Args(
        model_name_or_path="runs/smollm2-word-problems/sft/model",
        dataset_name="runs/smollm2-word-problems/word-problems",
        prompt_template=None,
        system_prompt=None,
        max_prompt_length=192,
        response_length=48,
        total_episodes=26_624,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=32,
        learning_rate=2e-5,
        num_examples=500,
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


# ---- Training ----------------------------------------------------------------------------------------------
#
# Shapes: P tasks with k responses each make B = k * P rows; n rows in a micro-batch, C positions of the
# prompt, T positions of the response, V tokens in the vocabulary, H hidden units. Rows are ordered as in
# rloo_tldr.py: the first responses to all tasks, then the second ones, ... So rows r, P + r, 2 P + r, ... are
# the group of task r. A row of C + T tokens is a left-padded prompt and a right-padded response, here with
# C = 4 and T = 5:
#
#     pad    2      +      3      | =      5      EOS    pad    pad       length of the response: 3
#
# The hidden state of each token predicts the next one: "3" predicts "=".
#
# Outside of train, P and B count the tasks and rows that a function gets.


def train(args):
    """The whole run, from the flags to the final table. -> (Policy, run folder)"""
    check_grpo_args(args)
    accelerator = start_accelerator(args)
    device, world = accelerator.device, accelerator.num_processes
    n, k, T = args.per_device_train_batch_size, args.num_generations, args.response_length
    B = n * args.gradient_accumulation_steps * args.num_mini_batches * world  # episodes per update
    P = B // k  # tasks per update
    updates = math.ceil(args.total_episodes / B)
    # What the progress bar shows: label -> metric.
    status = {"reward": "objective/scores", "equal groups": "frac_reward_zero_std"}
    run = Run(args, accelerator, updates, status)

    tokenizer = load_tokenizer(args.model_name_or_path)
    train_rows, held_out_rows = load_splits(args.dataset_name)
    train_rows = train_rows.select(range(len(train_rows))[: args.num_train_rows])
    train_tasks = load_tasks(train_rows, tokenizer, args, args.dataset_name)
    # Held-out tasks: those of the training data set and, with --hard-dataset-name, harder ones.
    held_out_tasks = load_tasks(held_out_rows, tokenizer, args, args.dataset_name)
    held_out = {"held-out": choose_tasks(held_out_tasks, args)}
    if args.hard_dataset_name is not None:
        hard_splits = read_splits(args.hard_dataset_name)
        if "test" not in hard_splits:
            raise UserError(f"--hard-dataset-name {args.hard_dataset_name}: it has no split test")
        hard_rows = hard_splits["test"]
        hard_tasks = load_tasks(hard_rows, tokenizer, args, args.hard_dataset_name)
        held_out["harder"] = choose_tasks(hard_tasks, args)
    max_tokens = max(longest_prompt(tasks) for tasks in [train_tasks, *held_out.values()]) + T
    policy, ref_model = load_policy_and_reference(
        args, args.model_name_or_path, max_tokens, needs_reference=args.kl_coef > 0
    )
    model = Policy(policy).to(device)
    if ref_model is not None:
        ref_model.to(device)
    stop_ids = find_stop_tokens(args, tokenizer, policy).to(device)  # [any number]
    trainer_state = transformers.TrainerState(max_steps=updates)  # reward functions may read it
    # get_rewards: tasks (list of dict, from load_tasks), responses (list of str), response_tokens (list of
    # lists) -> dict: name -> fp32 [B]
    functions = load_functions("--reward-fn", args.reward_fn)
    get_rewards = partial(score_responses, functions, trainer_state=trainer_state, device=device)
    is_bf16 = wants_bf16(args, device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=is_bf16)

    run.print(
        f"recipe {args.recipe}: {args.model_name_or_path} on {args.dataset_name}, {device}, bf16: {is_bf16}\n"
        f"batch: {n} responses per pass x {args.gradient_accumulation_steps} accumulated "
        f"x {args.num_mini_batches} minibatches x {world} processes = {B} episodes = {P} tasks x {k}; "
        f"{updates} updates x {args.num_ppo_epochs} epochs x {args.num_mini_batches} minibatches = "
        f"{updates * args.num_ppo_epochs * args.num_mini_batches} optimizer steps"
    )

    # The random numbers of an evaluation depend only on the seed, so they are the same before and after
    # training, and in a resumed run. There, `before` is that of the initial policy too, since run.start loads
    # a checkpoint only below.
    sampling_inputs = model, tokenizer, stop_ids, get_rewards
    with autocast:
        before = evaluate_all(*sampling_inputs, held_out, args, accelerator)

    # `model` generates, `learner` is trained. They share their weights, unless FSDP2 or ZeRO-3 shards them:
    # then the learner is a sharded copy, and copy_weights copies its weights back after each update.
    learner, optimizer, parameters = make_learner(model, args, accelerator)  # parameters: name -> parameter
    state = run.start(learner, optimizer, parameters, B)  # update 0 in a new run
    copy_weights(parameters, model)  # run.start may have loaded a checkpoint into the learner
    is_first_step = True

    for update in range(state["update"] + 1, updates + 1):
        # 1. Rollout. All random numbers are drawn for the global batch. Each process generates all k
        #    responses to its share of the tasks; then every process gets the tensors of all responses. (The
        #    texts stay where they were made, except for a metric in step 4.) For a given B, the result does
        #    not depend on the number of processes, up to rounding.
        start_time = time.time()
        trainer_state.global_step = update - 1
        # For random numbers in your own reward function. They do depend on the process.
        set_global_seed(args.seed, update, accelerator.process_index)
        # The next P tasks of an endless stream of shuffled epochs.
        task_numbers = stream_rows(len(train_tasks), (update - 1) * P, P, args.seed)
        prompt_batch = draw_groups([train_tasks[i] for i in task_numbers], k, args, update)
        prompt_share = local_share(prompt_batch, accelerator)
        with autocast:
            b, responses = rollout_tasks(*sampling_inputs, ref_model, prompt_share, args)
        # Rollouts of all processes: a dict of tensors, [B, ...] each
        b = {name: gather_groups(x, k, accelerator) for name, x in b.items()}
        C = b["ids"].shape[1] - T  # positions of the longest prompt in this batch
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
        learner.train(args.gradient_checkpointing)  # there is no dropout; only checkpointing needs train mode
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, update, updates)
        keys = group_keys(b["lengths"], k)  # [B]: sorted by them, rows with the same prompt are together
        metric_sums = defaultdict(float)  # sums over the tokens of all minibatches and epochs
        max_sampling_gap = torch.zeros((), device=device)
        for epoch in range(args.num_ppo_epochs):
            order = torch.randperm(B, generator=generator_for(args.seed, "order", update, epoch)).to(device)
            for minibatch in order.split(B // args.num_mini_batches):
                num_tokens = valid[minibatch].sum()
                # Processes exchange gradients only in the last micro-batch: micro_batches sees to that.
                for rows in micro_batches(minibatch, keys, n, learner, accelerator):
                    t = b["lengths"][rows].max().item()  # positions after the longest response are cut off
                    with autocast:
                        new_logprobs, entropies = learner(
                            b["ids"][rows, : C + t], b["mask"][rows, : C + t], t, args.temperature
                        )
                    # From here on, tensors are flat: [number of valid tokens in the micro-batch].
                    m = valid[rows, :t]
                    if takes_several_steps(args):
                        old_logprobs = b["logprobs"][rows, :t][m]
                    else:
                        old_logprobs = new_logprobs.detach()  # the ratio is 1, but has a gradient
                    token_advantages = advantages[rows, None].expand(-1, t)[m]
                    policy_loss = clipped_policy_loss(
                        new_logprobs, old_logprobs, token_advantages, args.cliprange
                    )
                    token_loss = policy_loss
                    if args.kl_coef > 0:
                        token_kl = kl_per_token(new_logprobs, b["ref_logprobs"][rows, :t][m], "k3")
                        token_loss = policy_loss + args.kl_coef * token_kl
                    loss = token_loss.sum() / num_tokens
                    accelerator.backward(loss * world)  # DDP averages over processes; we want the sum

                    with torch.no_grad():
                        log_ratio = new_logprobs - old_logprobs
                        ratio = log_ratio.clamp(max=40).exp()  # the square of a larger one may be infinite
                        # Generation computes one token at a time, with a cache. How far its log-probabilities
                        # are from those of a full forward pass:
                        sampling_gap = (b["sampling_logprobs"][rows, :t][m] - old_logprobs).abs()
                        max_sampling_gap = torch.maximum(max_sampling_gap, sampling_gap.max())
                        token_metrics = {
                            "loss/policy_avg": policy_loss,
                            "policy/approxkl_avg": 0.5 * log_ratio**2,
                            # clipfrac: how often clipping raises the loss above that of the plain ratio.
                            "policy/clipfrac_avg": policy_loss > -token_advantages * ratio,
                            "policy/entropy_avg": entropies,
                            "val/ratio": ratio,
                            "val/ratio_var": (ratio - 1) ** 2,  # becomes the variance below
                            "sampling/logprob_gap_mean": sampling_gap,
                        }
                        for name, x in token_metrics.items():
                            metric_sums[name] += x.float().sum()
                        # No optimizer step since the rollout, so the ratios must be 1. (With one step per
                        # batch they are 1 by definition: see sampling/logprob_gap_mean instead.)
                        if is_first_step and takes_several_steps(args):
                            check_first_ratio(log_ratio, args)

                is_first_step = False
                grad_norm = clip_gradients(parameters, args.max_grad_norm, accelerator)
                optimizer.step()
                optimizer.zero_grad()
        copy_weights(parameters, model)

        # 4. Log. What TRL logs too has TRL's name: RLOOTrainer 0.11's, so curves of rloo_tldr.py overlay,
        #    and GRPOTrainer's (completions/*, rewards/*, frac_reward_zero_std).
        tokens_trained = valid.sum() * args.num_ppo_epochs
        metric_sums = accelerator.reduce(dict(metric_sums))
        update_metrics = {name: x / tokens_trained for name, x in metric_sums.items()}
        # var r = E[(r - 1)^2] - (E[r - 1])^2
        update_metrics["val/ratio_var"] -= (update_metrics["val/ratio"] - 1) ** 2
        scores_of_groups = b["scores"].view(k, P)
        lengths = b["lengths"].float()
        metrics = {
            "update": update,
            "episode": update * B,
            "lr": optimizer.param_groups[0]["lr"],
            "eps": B / (time.time() - start_time),  # episodes per second
            "objective/entropy": -b["sampling_logprobs"].sum(1).mean(),  # per response: -log p of the sample
            "objective/scores": b["scores"].mean(),
            **update_metrics,
            "grad_norm": grad_norm,  # of the last optimizer step, before clipping
            "val/num_eos_tokens": b["stopped"].sum(),
            "env/reward_mean": b["scores"].mean(),  # the same: there are no penalties
            "env/reward_std": b["scores"].std(correction=0),
            # The fraction of groups with equal rewards. Their advantages are 0.
            "frac_reward_zero_std": (scores_of_groups == scores_of_groups[0]).all(0).float().mean(),
            **reward_means(b),
            "completions/mean_length": lengths.mean(),
            "completions/min_length": lengths.min(),
            "completions/max_length": lengths.max(),
            "completions/clipped_ratio": 1 - b["stopped"].float().mean(),  # did not stop on their own
            "completions/distinct_2": distinct_bigrams(accelerate.utils.gather_object(responses)),
            "sampling/logprob_gap_max": accelerator.gather(max_sampling_gap).max(),
            **performance_metrics(start_time, rollout_end, lengths.sum(), device),
        }
        if args.kl_coef > 0:
            # The metric is k1, summed over each response. (The loss has k3 per token: see kl_per_token.)
            kl = kl_per_token(b["sampling_logprobs"], b["ref_logprobs"], "k1")  # [B, T], 0 after the end
            metrics["objective/kl"] = kl.sum(1).mean()
            metrics["objective/kl_coef"] = args.kl_coef
        run.log(metrics)  # tensors become numbers; raises if one is not finite
        if is_sample_update(update, updates, args):
            # The k responses to the first task. b has all P tasks, `responses` only those of this process:
            # the main one shows them, and its first task is the first of all.
            own_count = len(prompt_share["rows"])
            first_task = [plain_text(prompt_share["rows"][0]["prompt"])] * k
            first = {name: x[::P] for name, x in b.items()}  # [k, ...] each
            texts = sample_texts(first_task, responses[::own_count], first["scores"])
            with torch.no_grad(), autocast:
                _, entropies = model(first["ids"], first["mask"], T, args.temperature)
            token_columns = {
                "logprob": first["sampling_logprobs"],
                "entropy": unflatten(entropies, valid[::P]),  # of the policy after this update
                "advantage": advantages[::P, None].expand(k, T),
            }
            if args.kl_coef > 0:
                token_columns["kl"] = kl[::P]
            log_samples(run, update, texts, first, token_columns)

        # 5. Save.
        run.checkpoint(update)

    # 6. Evaluate on the same held-out tasks again, and save the model.
    trainer_state.global_step = updates
    with autocast:
        after = evaluate_all(*sampling_inputs, held_out, args, accelerator)
    if accelerator.is_main_process:
        report_tasks(run, before, after)
        save_policy(model.policy, tokenizer, run.folder / "model")
    run.finish()
    return model, run.folder


# ---- Evaluation --------------------------------------------------------------------------------------------


def evaluate_all(model, tokenizer, stop_ids, get_rewards, held_out, args, accelerator):
    """Solve all held-out tasks, with the same random numbers before and after training.

    held_out: dict: name -> tasks. Returns a dict: name -> records (see evaluate_tasks), one for each set of
    tasks, and "greedy".
    """
    inputs = model, tokenizer, stop_ids, get_rewards
    records = {}
    for name, tasks in held_out.items():
        records[name] = evaluate_tasks(*inputs, tasks, args, accelerator)
    # Nearly greedy decoding: does the policy know the answer, but lose it in sampling?
    greedy_args = replace(args, temperature=0.01, num_eval_samples=1)
    records["greedy"] = evaluate_tasks(*inputs, held_out["held-out"], greedy_args, accelerator)
    return records


def evaluate_tasks(model, tokenizer, stop_ids, get_rewards, tasks, args, accelerator):
    """Solve each task k = num_eval_samples times. Each process takes its share of the tasks.

    tasks: list of dict, from load_tasks. A response is right if the first reward function gives it 1 or more.
    -> one dict per task, for the tasks of all processes:
        task          str, the prompt
        responses     k str
        right, ended  k bool
        length        k int, in tokens
        rewards/NAME  k numbers, for each reward function; None: it does not apply
    """
    model.eval()
    set_global_seed(args.seed, "held-out")  # for random numbers in your own reward function
    k = args.num_eval_samples
    batch = local_share(draw_groups(tasks, k, args, "held-out"), accelerator)
    tasks = batch["rows"]
    records = []
    if tasks:  # there may be more processes than tasks
        b, responses, response_tokens = sample_responses(model.policy, tokenizer, batch, stop_ids, args)
        rewards = get_rewards(tasks * k, responses, response_tokens)  # name -> [k * tasks]
        is_right = next(iter(rewards.values())) >= 1  # [k * tasks]
        columns = {f"rewards/{name}": values for name, values in rewards.items()}
        columns |= {"right": is_right, "ended": b["stopped"], "length": b["lengths"]}
        columns = {name: x.tolist() for name, x in columns.items()}
        for i, task in enumerate(tasks):  # row j * len(tasks) + i is response j to task i
            record = {"task": plain_text(task["prompt"]), "responses": responses[i :: len(tasks)]}
            for name, values in columns.items():
                record[name] = [None if math.isnan(x) else x for x in values[i :: len(tasks)]]
            records.append(record)
    return accelerate.utils.gather_object(records)


def task_metrics(records, is_greedy=False):
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
    if not is_greedy:
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


def sample_texts(prompts, responses, scores):
    """One dict(prompt, response, score) per response, for tables and files."""
    rows = zip(prompts, responses, scores.tolist())
    return [{"prompt": prompt, "response": response, "score": score} for prompt, response, score in rows]


def distinct_bigrams(texts):
    """Different pairs of neighboring words / all pairs, in all texts (compare Li et al. 2016). -> float

    It falls if a policy repeats itself, even if no two responses are equal. It also falls as the number of
    texts grows, so compare only equal numbers of texts.
    """
    pairs = []
    for text in texts:
        words = text.lower().split()
        pairs.extend(zip(words, words[1:]))
    return len(set(pairs)) / max(len(pairs), 1)


# ---- Rollout -----------------------------------------------------------------------------------------------


def draw_groups(rows, k, args, *purpose):
    """Prompts, left-padded to the longest one, and random numbers to sample k responses to each.

    rows: P dicts with ids, the tokens of the prompt; purpose: the number of the update, for example
    -> dict: rows (list of P), ids [P, C], bool mask [P, C], uniforms [P, k, T]
    """
    P, C = len(rows), longest_prompt(rows)
    ids = torch.zeros(P, C, dtype=torch.long)
    mask = torch.zeros(P, C, dtype=torch.bool)
    for i, row in enumerate(rows):
        start = C - len(row["ids"])
        ids[i, start:] = torch.tensor(row["ids"])
        mask[i, start:] = True
    # Drawn as [k, P, T]: the first response to a prompt gets the same numbers, however many others there are.
    uniforms = torch.rand(k, P, args.response_length, generator=generator_for(args.seed, "tokens", *purpose))
    return dict(rows=rows, ids=ids, mask=mask, uniforms=uniforms.transpose(0, 1))


def longest_prompt(rows):
    """The number of tokens of the longest prompt. rows: dicts with ids"""
    return max(len(row["ids"]) for row in rows)


def generator_for(seed, *purpose):
    """A random generator for one purpose, such as (seed, "tokens", update), independent of all others."""
    # random.Random hashes a str with SHA-512, which is the same in every process; hash() is not.
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


@torch.no_grad()
def rollout_tasks(model, tokenizer, stop_ids, get_rewards, ref_model, batch, args):
    """Sample k responses to each task, reward them, and compute old and reference log-probabilities.

    batch: from draw_groups; get_rewards: see train. Returns
    - a dict of tensors, with the first responses to all tasks first: ids, mask [k * P, C + T]; lengths,
      stopped, rewards/NAME, scores (the weighted sum of the rewards) [k * P]; sampling_logprobs, logprobs (if
      takes_several_steps), ref_logprobs (if kl_coef is above 0) [k * P, T]
    - the responses, k * P str
    """
    model.eval()
    b, responses, response_tokens = sample_responses(model.policy, tokenizer, batch, stop_ids, args)
    k = len(responses) // len(batch["rows"])
    # batch["rows"] * k is in the order of the responses: the first responses to all tasks come first.
    rewards = get_rewards(batch["rows"] * k, responses, response_tokens)  # name -> [k * P]
    b["scores"] = weighted_sum(rewards, args.reward_weights)  # [k * P]
    b |= {f"rewards/{name}": values for name, values in rewards.items()}

    # Old log-probabilities, the denominator of the ratio. With one optimizer step per batch, the policy does
    # not change before the update, and train uses its new log-probabilities as the old ones. With several
    # steps they are computed here, by a forward pass over the whole responses. Log-probabilities from
    # generation differ more, so they are only logged.
    if not takes_several_steps(args) and args.kl_coef == 0:
        return b, responses
    T = b["sampling_logprobs"].shape[1]
    C = b["ids"].shape[1] - T
    if takes_several_steps(args):
        b["logprobs"] = torch.zeros_like(b["sampling_logprobs"])  # [k * P, T]
    if args.kl_coef > 0:
        b["ref_logprobs"] = torch.zeros_like(b["sampling_logprobs"])
    order = group_keys(b["lengths"], k).argsort(stable=True)
    for rows in order.split(args.per_device_train_batch_size):
        t = b["lengths"][rows].max().item()
        inputs = b["ids"][rows, : C + t], b["mask"][rows, : C + t], t, args.temperature
        valid = b["mask"][rows, C : C + t]
        if takes_several_steps(args):
            logprobs, _ = model(*inputs)  # [number of valid tokens]
            b["logprobs"][rows, :t] = unflatten(logprobs, valid)
        if args.kl_coef > 0:
            logprobs = reference_group_logprobs(ref_model, model.policy, *inputs)
            b["ref_logprobs"][rows, :t] = unflatten(logprobs, valid)
    return b, responses


def takes_several_steps(args):
    """True if the policy changes while it learns from a batch. Only then can a ratio differ from 1."""
    return args.num_ppo_epochs * args.num_mini_batches > 1


@torch.no_grad()
def sample_responses(policy, tokenizer, batch, stop_ids, args):
    """Sample k responses to each prompt, and decode them.

    batch: from draw_groups. Returns
    - a dict of tensors, with the first responses to all prompts first: ids, mask [k * P, C + T]; lengths,
      stopped [k * P]; sampling_logprobs [k * P, T]
    - the responses, k * P str
    - their token ids with the stop token, k * P lists
    """
    device = stop_ids.device
    prompt_ids, prompt_mask = batch["ids"].to(device), batch["mask"].to(device)
    uniforms = batch["uniforms"].to(device)
    P, k, T = uniforms.shape

    # 1. Generate.
    tokens = torch.zeros(P, k, T, dtype=torch.long, device=device)
    sampling_logprobs = torch.zeros(P, k, T, device=device)
    prompts_at_once = max(1, args.local_rollout_forward_batch_size // k)
    for rows in torch.arange(P, device=device).split(prompts_at_once):
        inputs = prompt_ids[rows], prompt_mask[rows], uniforms[rows], stop_ids, args.temperature
        tokens[rows], sampling_logprobs[rows] = generate_groups(policy, *inputs)
    tokens = tokens.transpose(0, 1).flatten(0, 1)  # [k * P, T], first responses first
    sampling_logprobs = sampling_logprobs.transpose(0, 1).flatten(0, 1)
    prompt_ids, prompt_mask = prompt_ids.repeat(k, 1), prompt_mask.repeat(k, 1)  # [k * P, C]
    lengths = response_lengths(tokens, stop_ids)  # [k * P]
    valid = length_mask(lengths, T)  # [k * P, T]
    is_stop = torch.isin(tokens, stop_ids) & valid  # [k * P, T]

    # 2. Decode, without the stop token: it is not part of the text.
    prompt_tokens = list_tokens(prompt_ids, prompt_mask)
    _, responses = decode(tokenizer, prompt_tokens, list_tokens(tokens, valid & ~is_stop))  # k * P str

    b = {
        "ids": torch.cat([prompt_ids, tokens], 1),  # [k * P, C + T]
        "mask": torch.cat([prompt_mask, valid], 1),
        "lengths": lengths,
        "stopped": is_stop.any(1),
        "sampling_logprobs": sampling_logprobs,
    }
    return b, responses, list_tokens(tokens, valid)


@torch.no_grad()
def generate_groups(policy, ids, mask, uniforms, stop_ids, temperature):
    """Sample k responses to each prompt, until a stop token or T tokens. No top-k, no top-p.

    Left-padded ids, mask [P, C]; uniforms [P, k, T], one random number per token; stop_ids [any number]
    -> tokens [P, k, T] and the log-probabilities they were sampled with, fp32 [P, k, T]; both 0 after the end
    """
    P, k, T = uniforms.shape
    body, head = body_and_head(policy)
    cache = transformers.DynamicCache(config=body.config)
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
        probs = token_logits(hidden, head.weight, temperature, head.bias).softmax(-1)  # [rows, V]
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


def gather_groups(x, k, accelerator):
    """The rows of all processes as one batch. [k * p, ...] on each process -> [k * P, ...]

    Each process has k responses to its own p prompts. Its first responses come first, so put the first
    responses of all processes together, then the second ones, ...
    """
    x = accelerator.gather(x)  # [processes * k * p, ...]
    x = x.unflatten(0, (accelerator.num_processes, k, -1))  # [processes, k, p, ...]
    return x.transpose(0, 1).flatten(0, 2)


def group_keys(lengths, k):
    """Keys by which to sort responses, so that groups stay together, and groups of similar length too.

    lengths of the responses, first responses to all prompts first [k * P] -> [k * P], equal within a group
    """
    longest = lengths.view(k, -1).amax(0)  # [P]
    # Not `longest` itself: groups with equal keys would be mixed up. Rank 0 has the group whose longest
    # response is the shortest.
    rank = longest.argsort(stable=True).argsort()  # [P]
    return rank.repeat(k)


# ---- Policy and reference ----------------------------------------------------------------------------------


class Policy(nn.Module):
    """The policy with the forward pass of the update, so that DDP, FSDP2 or DeepSpeed can wrap it."""

    def __init__(self, policy):
        super().__init__()
        self.policy = policy

    def forward(self, ids, mask, T, temperature):
        """Log-probabilities and entropies of the last T tokens of each row.

        ids [B, C + T], bool mask [B, C + T] -> both fp32 [number of valid tokens among the last T]
        """
        return group_logprobs(self.policy, ids, mask, T, temperature)


def reference_group_logprobs(ref_model, policy, *inputs):
    """Log-probabilities under the reference, or under the policy without its LoRA adapter if that is None.

    inputs: those of group_logprobs -> fp32 [number of valid tokens]
    """
    if ref_model is not None:
        return group_logprobs(ref_model, *inputs)[0]
    with policy.disable_adapter():
        return group_logprobs(policy, *inputs)[0]


def group_logprobs(lm, ids, mask, T, temperature):
    """Log-probabilities of the valid tokens among the last T of each row, one row after the other.

    The responses of a group share their prompt, so each prompt is read only once. Its keys and values serve
    all responses to it, and gradients flow back through them: nothing is approximated.
    ids [B, C + T], bool mask [B, C + T] -> logprobs, entropies, both fp32 [number of valid tokens]
    """
    body, head = body_and_head(lm)
    if body.training and body.is_activation_checkpointing:
        # Gradient checkpointing (transformers has renamed it) cannot use a cache: each row reads its prompt.
        hidden = hidden_states(body, ids, mask)[:, -T - 1 : -1]  # [B, T, H]
    else:
        prompts = ids.where(mask, -1)[:, :-T]  # [B, C], -1: padding
        prompts, prompt_of_row = prompts.unique(dim=0, return_inverse=True)  # [P, C], [B]
        cache = transformers.DynamicCache(config=body.config)
        prompt_hidden = hidden_states(body, prompts.clamp(min=0), prompts >= 0, cache)  # [P, C, H]
        # Not cache.batch_select_indices: on a CPU, its gradient is added up in a varying order, and a resumed
        # run would not be the same bit for bit.
        for layer in cache.layers:
            layer.keys = layer.keys.index_select(0, prompt_of_row)  # [P, ...] -> [B, ...]
            layer.values = layer.values.index_select(0, prompt_of_row)
        response_hidden = hidden_states(body, ids[:, -T:], mask, cache)  # [B, T, H]
        # The state at position t - 1 predicts token t, and the prompt's last state predicts the first one.
        first_hidden = prompt_hidden[:, -1:].index_select(0, prompt_of_row)  # [B, 1, H]
        hidden = torch.cat([first_hidden, response_hidden[:, :-1]], 1)  # [B, T, H]
    valid = mask[:, -T:].nonzero(as_tuple=True)  # rows and columns; nonzero waits for the GPU, so only once
    # The output layer is large, so only valid tokens go through it.
    return token_logprobs(hidden[valid], head.weight, ids[:, -T:][valid], temperature, head.bias)


def unflatten(values, mask):
    """Put values back where the mask is True, and 0 elsewhere. [number of True], bool [B, T] -> [B, T]"""
    return torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, values)


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
    The entropies are only logged: they have no gradient.

    The logits of all N tokens may need more memory than the model, so no more than 128 rows are computed at
    once. The backward pass needs them again. The first 2**25 numbers (128 MiB) are kept for it, and it
    computes the others a second time.
    """

    def logprobs_of_chunk(hidden, tokens):
        log_p = torch.log_softmax(token_logits(hidden, weight, temperature, bias), dim=1)  # [128, V]
        with torch.no_grad():
            entropies = -log_p.exp().mul_(log_p).sum(1)
        return log_p.gather(1, tokens[:, None]).squeeze(1), entropies

    outputs = []
    for i, chunk in enumerate(zip(hidden.split(128), tokens.split(128))):
        if (i + 1) * 128 * len(weight) <= 2**25:
            outputs.append(logprobs_of_chunk(*chunk))
        else:
            outputs.append(checkpoint(logprobs_of_chunk, *chunk, use_reentrant=False))
    logprobs, entropies = zip(*outputs)
    return torch.cat(logprobs), torch.cat(entropies)


# ---- Math: pure functions of tensors -----------------------------------------------------------------------


def sample_tokens(probs, uniforms):
    """Sample one token per row by inverting the cumulative distribution. fp32 [B, V], [B] in [0, 1) -> [B]

    Unlike torch.multinomial, each token depends only on its own row and its own uniform number. So for the
    same probabilities, the samples are the same no matter how a batch is split. The sums are in fp64: in fp32
    they would lose small probabilities.
    """
    dtype = torch.float32 if probs.device.type == "mps" else torch.float64  # Apple's GPUs have no fp64
    ends = probs.cumsum(1, dtype=dtype)  # [B, V]
    target = uniforms.to(dtype)[:, None] * ends[:, -1:]  # [B, 1]
    # right=True never selects what has probability 0. NaN selects past the end, hence the clamp. (Then the
    # loss is NaN too, and the run ends with an error message.)
    token = torch.searchsorted(ends, target, right=True).squeeze(1)
    return token.clamp(max=probs.shape[1] - 1)


def response_lengths(tokens, stop_token_id):
    """Number of tokens up to and including the first stop token; T if there is none. [B, T] -> [B]

    stop_token_id: one id, or a tensor of several
    """
    T = tokens.shape[1]
    position = torch.arange(1, T + 1, device=tokens.device)  # [T]
    return torch.where(torch.isin(tokens, stop_token_id), position, T).amin(1)


def length_mask(lengths, max_length):
    """True on the first `lengths` positions of each row. [B] -> bool [B, max_length]"""
    return torch.arange(max_length, device=lengths.device) < lengths[:, None]


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
    1e-4 avoids 0 / 0; both as in TRL.

    The division gives more weight to tasks that are nearly always or nearly never solved. Dr. GRPO leaves it
    out for that reason.
    """
    groups = rewards.float().view(k, -1)  # [k, P]
    groups = groups - groups[0]  # so that groups with equal rewards get exactly 0, without rounding
    mean, std = groups.mean(0), groups.std(0, correction=1)  # [P]
    advantages = (groups - mean) / (std + 1e-4)  # [k, P]
    return advantages.flatten()


def clipped_policy_loss(logprobs, old_logprobs, advantages, cliprange):
    """PPO's clipped objective, negated (Schulman et al. 2017, eq. 7). Any shape -> same shape, unreduced"""
    log_ratio = logprobs - old_logprobs
    ratio = torch.exp(log_ratio.clamp(max=40))  # an infinite ratio times an advantage of 0 is nan
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    return torch.max(unclipped, clipped)


def kl_per_token(logprobs, ref_logprobs, estimator):
    """Estimates of KL(policy || reference) from samples of the policy, in nats, any shape (Schulman 2020).

    As a metric: k1 and k3 are unbiased, k2 is not. k2 and k3 are never negative.
    In a reward, through which no gradient flows: only k1 leads to the gradient of KL(policy || reference).
    In a loss: the expected gradient per token, given the tokens before it, for samples of the policy, is
        k1  0
        k2  the gradient of KL(policy || reference)
        k3  the gradient of KL(reference || policy)
    """
    log_ratio = logprobs - ref_logprobs
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio**2
    return torch.expm1(-log_ratio) + log_ratio  # k3


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


# ============================================================================================================
# Part II: infrastructure. You need nothing below to understand GRPO. To write a reward function, read
# call_reward_functions; to bring your own data, load_splits and task_prompt. The scripts share these
# functions, copied verbatim, so a few arguments, return values and names of flags are used only in another
# script.
# ============================================================================================================

SCRIPT = Path(__file__).stem
HERE = Path(__file__).resolve().parent  # recipes name folders next to this file


class UserError(Exception):
    """An error the user can fix: printed on one line, exit code 2."""


# ---- Loading models ----------------------------------------------------------------------------------------


def resolve_path(name):
    """Look for a folder in the working directory, then next to this file; else return a Hub name."""
    for path in (Path(name), HERE / name):
        if path.exists():
            return str(path)
    return name


def load(function, path, **kwargs):
    """function(path), with a one-line error if it fails: a wrong path, no network, a broken file."""
    try:
        return function(resolve_path(path), **kwargs)
    except Exception as error:  # the libraries raise a dozen different types
        reason = f"{error} {error.__cause__ or ''}".strip() or repr(error)
        raise UserError(f"cannot load {path!r}: {reason}") from error


def load_model(auto_class, name, head_may_be_new=False, **kwargs):
    """A model in fp32 without dropout. A folder with a LoRA adapter is merged into its base model.

    Weights that the files lack would be random, so they are refused. With head_may_be_new, those of the head
    may be missing, and model.has_new_head tells reward_model.py and rloo_tldr.py if they were. Loading never
    runs code from the files: without safetensors, pytorch_model.bin is read with weights_only.
    """
    if load(transformers.utils.peft_utils.find_adapter_config_file, name) is not None:
        return load_adapter(auto_class, name, head_may_be_new, **kwargs)
    kwargs |= dict(dtype=torch.float32, weights_only=True, output_loading_info=True)
    model, report = load(auto_class.from_pretrained, name, **kwargs)
    missing = [*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])]
    # What is outside of the transformer is the head. (BERT's pooler is inside, but counts as head too: the
    # files of a BERT language model lack it.)
    inner = f"{model.base_model_prefix}."
    of_body = [key for key in missing if key.startswith(inner) and "pooler" not in key]
    model.has_new_head = len(of_body) < len(missing)
    if head_may_be_new:
        missing = of_body
    if missing:
        raise UserError(f"{name}: {len(missing)} weights are not in the files, such as {min(missing)}")
    if not getattr(model, "is_quantized", False):
        model.float()  # a format that transformers dequantizes while loading (fp8) ignores the dtype above
    for module in model.modules():
        for key, value in vars(module).items():
            is_noise = "drop" in key or "jitter" in key or isinstance(module, nn.Dropout)
            if isinstance(value, float) and is_noise:
                setattr(module, key, 0.0)  # in RL, rollout and update must have the same probabilities
        for key, child in module.named_children():
            if isinstance(child, transformers.activations.NewGELUActivation):
                setattr(module, key, nn.GELU("tanh"))  # the same function in one kernel instead of eight
    clean_generation_config(model)
    return model


def load_adapter(auto_class, name, head_may_be_new, **kwargs):
    """The base model of a LoRA adapter, with the adapter merged into it."""
    import peft

    adapter = load(peft.PeftConfig.from_pretrained, name)
    holds_head = adapter.task_type == "SEQ_CLS"  # then peft saves the head with the adapter
    base = load_model(auto_class, adapter.base_model_name_or_path, head_may_be_new or holds_head, **kwargs)
    base.has_new_head = base.has_new_head and not holds_head
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        model = load(partial(peft.PeftModel.from_pretrained, base), name)
    # Some kinds of adapters cannot be merged; load() makes one line of that error too.
    model = load(lambda path: model.merge_and_unload(), name)
    for p in model.parameters():
        p.requires_grad_(p.is_floating_point())  # peft froze the base; quantized weights cannot be trained
    model.name_or_path = resolve_path(name)  # a new adapter trained on top will name this as its base
    return model


def clean_generation_config(model):
    """Reduce the generation config to its token ids if transformers would refuse to save it at the end."""
    settings = getattr(model, "generation_config", None)
    if settings is None:
        return
    try:
        settings.validate(strict=True)
    except ValueError:
        # -1: no pad token, in some old files
        ids = {name: x for name, x in settings.to_dict().items() if name.endswith("_token_id") and x != -1}
        model.generation_config = transformers.GenerationConfig(**ids)


def context_length(config):
    """The number of tokens that a model can read; a million if its config does not say."""
    context = getattr(config.get_text_config(), "max_position_embeddings", None) or -1
    return context if context > 0 else 1_000_000


def load_tokenizer(name, for_prompts=True):
    """The tokenizer of a folder or Hub name. If it has no pad token, EOS becomes the pad.

    for_prompts: refuse one that appends EOS to every text, because a prompt does not end there.
    """
    tokenizer = load(AutoTokenizer.from_pretrained, name)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    # Without tokenizer files, transformers returns a tokenizer with nothing but special and added tokens.
    if set(tokenizer.get_vocab()) <= set(tokenizer.get_added_vocab()):
        raise UserError(f"{name} has no tokenizer")
    if for_prompts and appends_eos(tokenizer):
        raise UserError(f"{name}: its tokenizer appends EOS to every text; set add_eos_token to false")
    return tokenizer


def appends_eos(tokenizer):
    """True if a tokenizer ends every text with EOS."""
    # EOS at the end alone proves nothing: GPT-2's unknown token is EOS, and the vocabulary may lack the word.
    word = tokenizer("word", add_special_tokens=False).input_ids
    return tokenizer("word").input_ids[-len(word) - 1 :] == [*word, tokenizer.eos_token_id]


def trainable(module):
    """The parameters that the optimizer trains and a checkpoint holds. -> dict: name -> parameter"""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def transformer_layers(model):
    """The list of a model's transformer layers, which is its longest ModuleList."""
    return max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)


def add_lora(model, args):
    """Add a LoRA adapter (Hu et al. 2021): each named layer computes W + lora_alpha / lora_r * B A, where B
    starts at 0."""
    import peft

    names = args.lora_target_modules.replace(" ", "").split(",")
    is_all = names == ["all-linear"]
    target_modules = "all-linear" if is_all else names
    config = peft.LoraConfig(r=args.lora_r, lora_alpha=args.lora_alpha, target_modules=target_modules)
    try:
        model = peft.get_peft_model(model, config)
    except ValueError as error:
        raise UserError(f"--lora-target-modules {args.lora_target_modules}: {error}") from error
    layers = model.targeted_module_names
    for name in names:
        if not is_all and not any(f".{layer}".endswith(f".{name}") for layer in layers):
            raise UserError(f"--lora-target-modules: no layer is called {name!r}")
    base = model.get_base_model()
    # The scripts read the output layer's weights, without an adapter. Embeddings may share these weights.
    if any(hasattr(x, "base_layer") for x in (base.get_input_embeddings(), base.get_output_embeddings())):
        raise UserError(f"--lora-target-modules {args.lora_target_modules}: not for embeddings or the head")
    return model


def check_gradients(model):
    """Raise UserError if a layer of a LoRA adapter would not be trained.

    Measured, not guessed: on some CPUs, bitsandbytes passes no gradient through 4-bit weights (of a model
    that was saved with them), once they have been used in eval mode.
    """
    ids = torch.arange(6, device=model.device)[None]  # [1, 6]
    with torch.no_grad():
        model.eval()(input_ids=ids)
    loss = model.train()(input_ids=ids).logits[..., 0].sum()
    # Only B: the gradient of A is 0 as long as B is 0, as it is now.
    weights = [p for name, p in model.named_parameters() if "lora_B" in name]
    grads = []
    if loss.requires_grad:
        grads = torch.autograd.grad(loss, weights, materialize_grads=True)
    if not grads or not all(grad.any() for grad in grads):
        raise UserError("LoRA: some layers get no gradient; are weights behind them quantized, on a CPU?")


def share_layers(policy, count):
    """Freeze the policy's embeddings and first layers. -> a reference that shares them and copies the rest"""
    layers = transformer_layers(policy)
    if not 0 < count <= len(layers):
        raise UserError(f"--num-shared-layers {count}: the model has {len(layers)} layers")
    embeddings = [m for m in policy.modules() if isinstance(m, nn.Embedding)]
    shared = [p for module in [*embeddings, *layers[:count]] for p in module.parameters()]
    for p in shared:
        p.requires_grad_(False)
    return copy.deepcopy(policy, memo={id(p): p for p in shared})  # what is in the memo is not copied


@torch.no_grad()
def check_model(lm, name, max_tokens):
    """Raise UserError if Part I cannot train a language model, or sample from it, as it is.

    Measured, not guessed. The model's own logits must be the product of its last hidden states and the output
    layer, without a soft cap or a scale (Gemma 2, Granite). And the hidden states of a text must be the same
    (1) alone in eval mode, (2) in train mode after two pads, and (3) read in two halves with a cache, from
    which another row is removed in between. Text and pads together have max_tokens tokens, so that a sliding
    window or scaled positions show too.
    """
    config = lm.config.get_text_config()
    context = context_length(config)
    if context < max_tokens:
        raise UserError(f"{name} can read {context} tokens; prompt and response may have {max_tokens}")
    L = max(max_tokens - 2, 6)
    ids = torch.arange(L, device=lm.device)[None] % config.vocab_size  # [1, L]
    short_ids = ids[:, :6]
    padded_ids = F.pad(ids, (2, 0)).expand(2, -1)  # [2, L + 2], two equal rows with two pads each
    mask = torch.arange(L + 2, device=lm.device).expand(2, -1) >= 2
    try:
        body, head = body_and_head(lm.eval())
        # A soft cap shows only in large logits, so make them large. (With tied embeddings the inputs grow
        # too, but for both `logits` and `product`.)
        head.weight.mul_(64)
        logits = lm(short_ids).logits[0].float()  # [6, V]
        product = token_logits(hidden_states(body, short_ids, short_ids >= 0)[0], head.weight, bias=head.bias)
        head.weight.div_(64)  # exact, because 64 is a power of 2
        alone = hidden_states(body, ids, ids >= 0)[0]  # [L, H]
        lm.train()
        padded = hidden_states(body, padded_ids[:1], mask[:1])[0]  # [L + 2, H]
        # As in rollouts: two rows fill the cache, row 0 leaves, row 1 goes on.
        cache = transformers.DynamicCache(config=body.config)
        half = L // 2
        hidden_states(body, padded_ids[:, :half], mask[:, :half], cache)
        cache.batch_select_indices(torch.tensor([1], device=lm.device))
        cached = hidden_states(body, padded_ids[1:, half:], mask[1:], cache)[0]  # [L + 2 - half, H]
    except Exception as error:  # models fail in many ways, recurrent ones because a row leaves the cache
        raise UserError(
            f"{name}: this kind of model does not work here; it cannot read left-padded rows, or no row can "
            f"leave its cache ({type(error).__name__})"
        ) from error
    is_equal = []
    for states in (padded[2:], cached):
        same = alone[-len(states) :]
        if getattr(lm, "is_quantized", False):  # rounding can change the states of a few tokens completely
            distances = (states - same).norm(dim=-1) / same.norm(dim=-1)
            is_equal.append(distances.median().item() < 0.5)
        else:
            is_equal.append(torch.allclose(states, same, 1e-3, 1e-3 * alone.abs().mean()))
    is_equal.append(torch.allclose(product, logits, 1e-2, 0.1))
    if not all(is_equal):
        raise UserError(
            f"{name}: this kind of model does not work here, its log-probabilities differ from ours "
            f"(left-padded: {not is_equal[0]}, with a cache: {not is_equal[1]}, logits: {not is_equal[2]})"
        )


def load_policy_and_reference(args, name, max_tokens, needs_reference=True):
    """The policy to train, and the frozen reference model.

    The reference is None with LoRA, where it is the policy without its adapter; and if none is needed.
    max_tokens: of prompt and response together
    """
    eight_bit = {}
    if args.load_in_8bit:
        # Threshold 0 rounds each token alone. With 6, the default, log-probabilities depend on the batch.
        config = transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
        eight_bit = dict(quantization_config=config)
    policy = load_model(AutoModelForCausalLM, name, **(eight_bit if args.lora_r else {}))
    check_model(policy, name, max_tokens)
    if not all(p.is_floating_point() for p in policy.parameters()) and not args.lora_r:
        raise UserError(f"{name}: quantized weights cannot be trained: add --lora-r 16")
    ref_model = None
    if args.lora_r:
        policy = add_lora(policy, args)
        check_gradients(policy)
    elif args.num_shared_layers:
        ref_model = share_layers(policy, args.num_shared_layers)
    elif needs_reference:
        ref_model = load_model(AutoModelForCausalLM, name, **eight_bit)
    if not needs_reference:  # share_layers makes one in any case
        ref_model = None
    if ref_model is not None:
        ref_model.requires_grad_(False).eval()
    if args.gradient_checkpointing:
        policy.activation_checkpointing_enable(dict(use_reentrant=False))  # gradient checkpointing, renamed
    return policy, ref_model


def save_policy(policy, tokenizer, folder):
    """Save what plain transformers loads. LoRA is merged in place, except into quantized weights."""
    if hasattr(policy, "merge_and_unload") and not getattr(policy, "is_quantized", False):
        policy.save_pretrained(folder.parent / "adapter")
        policy = policy.merge_and_unload()
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# ---- Rewards -----------------------------------------------------------------------------------------------


def score_responses(functions, rows, responses, response_tokens, trainer_state, device):
    """Call reward functions for one response to each row. -> dict: name of the function -> fp32 [B]

    functions: dict of name -> function; rows: B dicts with prompt (str or list of messages) and columns
    (dict); responses: B str; response_tokens: B lists of token ids. Where the prompt is a list of messages,
    functions get the response as one too, as in TRL. nan: a function does not apply to the row.
    """
    completions = []
    for row, response in zip(rows, responses):
        message = {"role": "assistant", "content": response}
        completions.append([message] if is_chat(row["prompt"]) else response)
    prompts = [row["prompt"] for row in rows]
    inputs = dict(prompts=prompts, completions=completions, completion_ids=response_tokens)
    data_rows = [row["columns"] for row in rows]
    return call_reward_functions(functions, data_rows, inputs, trainer_state, device)


def load_functions(flag, names):
    """The functions FILE.py:function that a flag names. -> dict: name -> function"""
    if not names:
        raise UserError(f"{flag} needs a function: FILE.py:function")
    functions = {}
    for name in names:
        path, _, function_name = name.rpartition(":")
        path = Path(resolve_path(path)).absolute()
        if not path.is_file():
            raise UserError(f"{flag} {name}: expected FILE.py:function, and there is no file {path}")
        try:
            # The file may change the working directory or the grad mode. These two restore them at their end.
            with chdir("."), torch.enable_grad():
                function = getattr(import_file(path), function_name, None)
        except BaseException as error:  # SystemExit too
            raise UserError(f"{flag} {name}: the file cannot be imported: {error!r}") from error
        if not callable(function) or function_name in functions:
            raise UserError(f"{flag} {name}: no such function, or two of this name")
        functions[function_name] = function
    return functions


def import_file(path):
    """A Python file as a module: run once, able to import its neighbors, in sys.modules for process pools."""
    sys.path.insert(0, str(path.parent))
    module = importlib.import_module(path.stem)
    if Path(module.__file__) != path:
        raise ImportError(f"there is another module {path.stem}: rename the file")
    return module


def call_reward_functions(functions, rows, inputs, trainer_state, device):
    """Call reward functions as TRL's GRPOTrainer calls them: by keyword. For example:

        def correct(prompts, completions, answer, **kwargs):
            return [float(text.endswith(right)) for text, right in zip(completions, answer)]

    Where prompts are lists of messages, a completion is one too: its text is completion[0]["content"].
    inputs: prompts, completions, completion_ids (lists of token ids), each with one entry per response; rows:
    for each response, a dict with the columns of the data. A function gets each column except prompt as a
    list with one entry per response. trainer_state.global_step is the number of updates so far, max_steps
    that of all. A function returns one number per response, or None where it does not apply.
    -> dict: name of the function -> fp32 [B], nan where it does not apply
    """
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
    taken = {"trainer_state", *inputs} & set(columns)
    if taken:
        raise UserError(f"rename the column {min(taken)}: reward functions get something else of that name")
    rewards = {}
    for name, function in functions.items():
        # A function may change what it gets, so every function and every response has a copy.
        own = {key: [copy.deepcopy(x) for x in values] for key, values in (columns | inputs).items()}
        try:
            with torch.autocast(device.type, enabled=False), torch.no_grad():
                scores = list(function(**own, trainer_state=trainer_state))
            numbers = [math.nan if score is None else float(score) for score in scores]
        except BaseException as error:  # SystemExit too
            traceback.print_exc()
            raise UserError(f"reward {name} failed: {error!r}") from error
        if len(numbers) != len(rows):
            raise UserError(f"reward {name}: {len(numbers)} numbers for {len(rows)} responses")
        for score, number in zip(scores, numbers):
            if score is not None and not abs(number) < 3e38:  # nan, or infinite in fp32
                raise UserError(f"reward {name}: {score!r} is not a finite number")
        rewards[name] = torch.tensor(numbers, device=device)
    return rewards


def reward_means(b):
    """The means of b["rewards/NAME"] over the responses to which a function applies; 0 if there is none.

    -> dict: name -> mean
    """
    return {f"{name}/mean": x.nanmean().nan_to_num() for name, x in b.items() if name.startswith("rewards/")}


# ---- Data --------------------------------------------------------------------------------------------------


def load_splits(name):
    """The training and held-out rows of a data set: a folder with train.jsonl, or a Hub name, NAME or
    NAME:CONFIG.

    Held out: the split test, or else validation, or else the last 10 % of train.
    """
    splits = read_splits(name)
    if "train" not in splits or len(splits["train"]) < 2:
        raise UserError(
            f"data set {name!r} needs a split train of two rows or more; it has {', '.join(splits)}"
        )
    for held_out in ("test", "validation"):
        if held_out in splits:
            return splits["train"], splits[held_out]
    parts = splits["train"].train_test_split(max(1, len(splits["train"]) // 10), shuffle=False)
    return parts["train"], parts["test"]


def read_splits(name):
    """All splits of a data set: see load_splits. -> dict: name of the split -> rows"""
    splits = {}
    for split in ("train", "validation", "test"):
        folder = Path(resolve_path(name))
        patterns = f"{split}*.jsonl", f"{split}*.jsonl.gz", f"{split}.json"
        paths = [path for pattern in patterns for path in sorted(folder.glob(pattern))]
        if paths:
            splits[split] = datasets.concatenate_datasets([load(read_rows, str(path)) for path in paths])
    if splits:
        return splits
    if any(Path(resolve_path(name)).glob("train*.csv")):
        raise UserError(f"data set {name!r}: csv changes values such as 010 and NA; use jsonl")
    name, _, config = name.partition(":")
    return load(datasets.load_dataset, name, name=config or None)


def read_rows(path):
    """The rows of a jsonl file, which may be compressed (.jsonl.gz), or of a json file with a list.

    Values stay as they are: the reader of `datasets` would turn "2024-01-15" into a timestamp, and a 1 beside
    a 2.5 into 1.0.
    """
    with (gzip.open if path.endswith(".gz") else open)(path, "rt", encoding="utf-8-sig") as file:
        text = file.read()
    is_list = text.lstrip().startswith("[")
    rows = json.loads(text) if is_list else [json.loads(line) for line in text.split("\n") if line.strip()]
    if not rows:
        raise ValueError("the file is empty")
    names = dict.fromkeys(name for row in rows for name in row)
    # datasets.Json would encode the values itself, but it takes a text such as "7" for encoded already and
    # returns the number 7. So each value is encoded here. Reading a row decodes it.
    columns = {name: [json.dumps(row.get(name), ensure_ascii=False) for row in rows] for name in names}
    return datasets.Dataset.from_dict(columns, datasets.Features(dict.fromkeys(names, datasets.Json())))


def decode(tokenizer, prompt_tokens, response_tokens):
    """The texts of prompts and responses, from lists of token ids. -> prompts, responses (lists of str)

    Some tokenizers drop the first space of what they decode. So prompt and response are decoded together, and
    the text of the prompt is cut off. Of the special tokens only BOS, EOS and pad are left out: another one,
    such as <answer>, is a part of the text.
    """
    left_out = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    prompt_tokens = [[token for token in row if token not in left_out] for row in prompt_tokens]
    response_tokens = [[token for token in row if token not in left_out] for row in response_tokens]
    full_texts = tokenizer.batch_decode([x + y for x, y in zip(prompt_tokens, response_tokens)])
    prompts, responses = [], []
    for prompt, text in zip(tokenizer.batch_decode(prompt_tokens), full_texts):
        # Not len(prompt): a response may complete the last character of the prompt.
        start = len(os.path.commonprefix([prompt, text]))
        prompts.append(text[:start])
        responses.append(text[start:])
    return prompts, responses


def list_tokens(ids, mask):
    """The token ids of each row where the mask is True. [B, L], bool [B, L] -> list of B lists"""
    ids, mask = ids.cpu(), mask.cpu()
    return [row[m].tolist() for row, m in zip(ids, mask)]


def load_tasks(rows, tokenizer, args, name):
    """The tasks of the data set `name` that are short enough. -> list of dict, each with

    ids: token ids of the prompt; prompt: str or list of messages; columns: all other columns of the row, for
    reward functions
    """
    tasks = []
    for row in rows:
        if "prompt" in row:
            sources = [row["prompt"] if isinstance(row["prompt"], (str, list)) else None]
        else:
            # What the template names in braces. A row that lacks a part of its prompt is no task.
            sources = [x for name, x in row.items() if f"{{{name}}}" in (args.prompt_template or "")]
        if any(x in (None, "", []) for x in sources):
            continue  # no task
        prompt = task_prompt(row, tokenizer, args, name)
        if is_chat(prompt):
            text = render_chat(tokenizer, prompt, args.date, is_prompt=True)
            ids = tokenizer(text, add_special_tokens=False).input_ids
        else:
            ids = tokenizer(prompt).input_ids
        row.pop("prompt", None)
        if len(ids) <= args.max_prompt_length:
            tasks.append(dict(ids=ids, prompt=prompt, columns=row))
    if not tasks:
        raise UserError(
            f"data set {name!r}: no prompt is a text, or a chat, of at most --max-prompt-length "
            f"{args.max_prompt_length} tokens"
        )
    return tasks


def task_prompt(row, tokenizer, args, name):
    """The prompt of a row of the data set `name`, with the system prompt. -> str or list of messages

    The column prompt may be either. What --prompt-template makes is a user's message, if the tokenizer has a
    chat template.
    """
    if "prompt" in row:
        prompt = row["prompt"]
    else:
        try:
            prompt = args.prompt_template.format(**row)
        except (AttributeError, KeyError, IndexError, ValueError) as error:  # the first: no template
            raise UserError(
                f"data set {name!r} has no column prompt, but {', '.join(row)}, and --prompt-template "
                f"{args.prompt_template!r} does not fit: {error!r}"
            ) from error
        if tokenizer.chat_template is not None:
            prompt = [{"role": "user", "content": prompt}]
    if args.system_prompt is None:
        return prompt
    if not is_chat(prompt):
        return f"{args.system_prompt}\n\n{prompt}"
    if isinstance(prompt[0], dict) and prompt[0].get("role") == "system":  # the data bring their own
        return prompt
    return [{"role": "system", "content": args.system_prompt}, *prompt]


def choose_tasks(tasks, args):
    """num_examples of the held-out tasks, in random order."""
    count = min(args.num_examples, len(tasks))
    return [tasks[row] for row in stream_rows(len(tasks), start=0, count=count, seed=args.seed)]


def is_chat(value):
    """True for a list of messages (dicts with role and content), False for a text."""
    return isinstance(value, list) and len(value) > 0


def render_chat(tokenizer, messages, date, is_prompt=False):
    """The text of a list of messages, by the tokenizer's chat template. It contains BOS if the model needs
    one, so tokenize it with add_special_tokens=False.

    date: today's, for templates that write it, year-month-day; is_prompt: end where the assistant goes on,
    after the header of its turn or, if the last message is its own, in that message. -> str
    """
    try:
        roles = [message["role"] for message in messages]  # an error without one, which a template may ignore
        is_begun = is_prompt and roles[-1] == "assistant"  # the policy goes on with this message
        # strftime_now('%d %B %Y') in a template would be another day when the run is resumed.
        day = datetime.date.fromisoformat(date)
        call = r"strftime_now\(\s*['\"]([^'\"\\]+)['\"]\s*\)"
        template = re.sub(call, lambda m: repr(day.strftime(m[1])), tokenizer.get_chat_template())
        if "strftime_now(" in template:
            raise ValueError("it calls strftime_now with something else than a text")
        return tokenizer.apply_chat_template(
            messages,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=is_prompt and not is_begun,
            continue_final_message=is_begun,
        )
    except Exception as error:  # no messages, no template, or one that refuses these roles
        raise UserError(
            f"cannot render chats with the tokenizer of {tokenizer.name_or_path}: {error}"
        ) from error


def plain_text(prompt):
    """A prompt for tables and judges: the text itself, or the messages of a chat, one below the other."""
    if not is_chat(prompt):
        return prompt
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def set_global_seed(seed, *purpose):
    """Seed the global generators of python, numpy and torch for one purpose."""
    transformers.set_seed(generator_for(seed, *purpose).initial_seed() % 2**32)


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
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # because shapes change
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # every process loads a whole model
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs that have it
    # With a mask, cuDNN's attention returns NaN gradients on an H100 in torch 2.13 (pytorch#196678), and it
    # makes a new plan for each shape.
    torch.backends.cuda.enable_cudnn_sdp(False)
    uses_fsdp = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    uses_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
    if uses_fsdp and os.environ.get("FSDP_VERSION") != "2":
        raise UserError("FSDP 1 does not work here: set fsdp_version: 2 in accelerate's config")
    accelerator = accelerate.Accelerator(
        cpu=not torch.accelerator.is_available(),  # Apple's GPUs count, but nobody has tried them yet
        mixed_precision="no",  # autocast is explicit in train
        kwargs_handlers=[
            # Gradients are views of what DDP sends, so they are not kept twice.
            accelerate.DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),
            # The others wait while the main process saves or, in rloo_tldr.py, asks a judge.
            accelerate.InitProcessGroupKwargs(timeout=datetime.timedelta(hours=12)),
        ],
    )
    # Where accelerate cannot connect processes, or shard, it goes on without a word.
    started = int(os.environ.get("WORLD_SIZE", 1))
    is_sharded = accelerator.distributed_type in ("FSDP", "DEEPSPEED")
    if accelerator.num_processes != started or is_sharded != (uses_fsdp or uses_deepspeed):
        raise UserError(
            f"accelerate runs {accelerator.num_processes} of {started} processes here, and sharding is "
            f"{is_sharded}: FSDP2 and DeepSpeed need GPUs, and Apple's GPUs work alone"
        )
    if accelerator.state.deepspeed_plugin is not None:
        # Batch, clipping and precision follow the flags, not what the config of DeepSpeed says.
        accelerator.state.deepspeed_plugin.deepspeed_config |= dict(
            train_micro_batch_size_per_gpu=args.per_device_train_batch_size,
            gradient_accumulation_steps=1,  # train accumulates
            gradient_clipping=args.max_grad_norm or 0.0,
            torch_autocast=dict(
                enabled=wants_bf16(args, accelerator.device),
                dtype="bfloat16",
                lower_precision_safe_modules=[],  # weights are gathered, and gradients added up, in fp32
            ),
        )
        transformers.integrations.deepspeed.unset_hf_deepspeed_config()  # else from_pretrained loads shards
    torch.manual_seed(args.seed % 2**64)  # for weights that start at random, such as LoRA's
    return accelerator


def wants_bf16(args, device):
    """True if matmuls should run in bf16: on request, or with dtype auto on a GPU that supports it."""
    if args.dtype == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return args.dtype == "bfloat16"


def local_share(x, accelerator):
    """The rows of a global batch that this process works on. x: a tensor, a list, or a dict of them"""
    if isinstance(x, dict):
        return {name: local_share(value, accelerator) for name, value in x.items()}
    rank, world = accelerator.process_index, accelerator.num_processes
    return x[rank * len(x) // world : (rank + 1) * len(x) // world]


def make_optimizer(args, parameters):
    """The optimizer that --optimizer names, for a list of parameters."""
    optimizer_class = locate(args.optimizer)  # None if there is no such class
    options = dict(eps=args.adam_eps, fused=True) if "Adam" in args.optimizer else {}
    try:
        accepted = inspect.signature(optimizer_class).parameters
        options = {name: value for name, value in options.items() if name in accepted}
        optimizer = optimizer_class(parameters, lr=args.learning_rate, **options)
        optimizer.step()  # changes nothing, since there are no gradients
        return optimizer
    except Exception as error:  # Muon, for example, trains only matrices, and LBFGS needs a closure
        line = f"--optimizer {args.optimizer}: no such class, or it does not work here: {error}"
        raise UserError(line) from error


def make_learner(model, args, accelerator):
    """The module that is trained, its optimizer, and its parameters (dict: name -> parameter).

    One process trains the model itself, DDP a wrapper around it. FSDP2 and ZeRO-3 cut a copy of it into
    shards. Shards cannot generate, so every process keeps the whole model for sampling and scoring.
    """
    plugin = accelerator.state.deepspeed_plugin
    learner = model
    if accelerator.distributed_type == "FSDP" or (plugin is not None and plugin.zero_stage == 3):
        learner = copy.deepcopy(model)
        # accelerate reads this: FSDP2 gathers one layer of this class at a time.
        learner._no_split_modules = [type(transformer_layers(model)[0]).__name__]
    optimizer = make_optimizer(args, list(trainable(learner).values()))
    learner, optimizer = accelerator.prepare(learner, optimizer)
    # Only now, because prepare replaces the parameters if it shards the learner.
    parameters = trainable(accelerator.unwrap_model(learner))
    return learner, optimizer, parameters


def micro_batches(minibatch, keys, size, learner, accelerator):
    """The rows of a minibatch that this process trains on, `size` at a time, sorted so that rows with equal
    or similar keys are together. Processes exchange gradients only in the last micro-batch: until then, this
    generator keeps accelerator.no_sync open while the body of the loop runs.

    minibatch: row numbers [any number]; keys [B], such as lengths -> yields row numbers [size]
    """
    rows = local_share(minibatch, accelerator)
    rows = rows[keys[rows].argsort(stable=True)]
    parts = rows.split(size)
    for i, part in enumerate(parts):
        # accelerate reads this: if it is True, DeepSpeed's backward pass takes the optimizer's step.
        accelerator.sync_gradients = i + 1 == len(parts)
        with nullcontext() if accelerator.sync_gradients else accelerator.no_sync(learner):
            yield part


@torch.no_grad()
def unshard(x):
    """The whole tensor of which FSDP2 has shards; anything else as it is."""
    return x.full_tensor().cpu() if hasattr(x, "full_tensor") else x


def shard_like(value, p):
    """The shard of a value that belongs to the parameter p if p is sharded (FSDP2); else the value, as for
    Adam's step counter, which has another shape.
    """
    if not hasattr(p, "full_tensor") or getattr(value, "shape", None) != p.shape:
        return value
    value = value.to(p.device)
    return torch.distributed.tensor.distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None)


def clip_gradients(parameters, max_norm, accelerator):
    """Scale the gradients down to this norm; None: no clipping. -> the norm before that, a float

    (With DeepSpeed, the last backward pass has clipped and taken the step. Then this only reads the norm, and
    optimizer.step does nothing.)
    """
    norm = float(unshard(accelerator.clip_grad_norm_(parameters.values(), max_norm or math.inf)))
    if not math.isfinite(norm):
        raise UserError("the gradient is not finite: lower --learning-rate, or use --dtype float32")
    return norm


@torch.no_grad()
def copy_weights(parameters, model):
    """Copy the trained parameters (name -> parameter) into the whole model, if they are shards of a copy."""
    for name, p in trainable(model).items():
        trained = parameters[name]
        if hasattr(trained, "full_tensor"):  # FSDP2
            p.copy_(trained.full_tensor())
        elif trained is not p:  # ZeRO-3
            import deepspeed

            with deepspeed.zero.GatheredParameters([trained]):
                p.copy_(trained)


def check_first_ratio(log_ratio, args):
    """Raise if the ratio is not 1 before the first optimizer step: then rollout and update compute different
    probabilities. log_ratio [N]

    It is not exactly 1, because a matrix product is rounded differently in a batch of another shape. That
    makes the largest difference in bf16, in 8 bit, and on a GPU in TF32.
    """
    gap = log_ratio.abs()
    mean, largest = gap.mean().item(), gap.quantile(0.999).item()
    is_rounded = gap.is_cuda or args.dtype == "bfloat16" or args.load_in_8bit
    max_mean, max_largest = (0.02, 0.2) if is_rounded else (1e-4, 1e-3)
    if not (mean < max_mean and largest < max_largest):
        raise UserError(
            f"before the first optimizer step, log-ratios are {mean:.2g} on average, 1 in 1000 above "
            f"{largest:.2g}, instead of 0: rollout and update do not compute the same probabilities"
        )


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


def peak_memory_mb(device):
    """The most memory that was in use: of the GPU, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    unit = 1 if sys.platform == "darwin" else 1024  # macOS reports bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


# ---- Run folder and screen ---------------------------------------------------------------------------------


class Run:
    """The run folder (args.json, metrics.jsonl, samples.jsonl, checkpoints/, ...), the screen, and resuming.

    Only the main process writes and prints. (With DeepSpeed, all write checkpoints.) Checkpoints and json
    files get their names when they are complete. The jsonl files grow; resuming cuts off what came after the
    checkpoint. So a run can be killed at any time.
    """

    def __init__(self, args, accelerator, updates, status):
        """status: label -> metric, for the metrics shown next to the progress bar"""
        self.args = args
        self.accelerator = accelerator
        self.updates = updates
        self.status = status
        self.is_main = accelerator.is_main_process
        self.console = Console(highlight=False, markup=False, emoji=False, soft_wrap=not sys.stdout.isatty())
        self.console.quiet = not self.is_main
        columns = "{task.completed}/{task.total}", BarColumn(20), TimeRemainingColumn(), "{task.description}"
        self.bar = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self.task = self.bar.add_task("", total=updates)
        self.last_line_time = 0.0
        self.signal_number = 0  # of a signal that asked us to stop
        if args.recipe == "custom" and not args.resume:
            self.print("no recipe: flags that are not given have the defaults of Args")
        # The same folder on all processes. self.name is the path as it was given, for messages. A new run
        # must not write into the folder of another one.
        name = args.output_dir or f"runs/{SCRIPT}/{args.recipe}-s{args.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
        [self.name] = accelerate.utils.broadcast_object_list([name])
        self.folder = Path(self.name).absolute()  # a reward function may change the working directory
        if any((self.folder / x).exists() for x in ("args.json", "model")) and not args.resume:
            raise UserError(f"{self.name} holds a run: use --resume, or choose another --output-dir")

    def on_signal(self, number, frame):
        """Finish the update (or the last evaluation), save, and stop. The same signal again stops at once."""
        signal.signal(number, signal.SIG_DFL)
        self.signal_number = number

    def print(self, text):
        self.console.print(text)

    def write(self, name, text):
        draft = self.folder / f".{name}"
        draft.write_text(text)
        os.replace(draft, self.folder / name)

    def append(self, name, rows):
        if self.is_main:
            with open(self.folder / name, "a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)

    def logs(self):
        """The files of this run that grow."""
        names = "metrics.jsonl", "samples.jsonl", "tokens.jsonl"
        return [self.folder / name for name in names if (self.folder / name).exists()]

    def table(self, title, rows):
        """Print dicts as the rows of a table."""
        has_long_text = any(isinstance(cell, str) and len(cell) > 40 for row in rows for cell in row.values())
        table = Table(title=title, title_justify="left", show_lines=has_long_text)
        for name, cell in rows[-1].items():  # not rows[0]: in ppo_dialog.py it has empty cells
            table.add_column(name, justify="left" if isinstance(cell, str) else "right", overflow="fold")
        for row in rows:
            table.add_row(*[f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row.values()])
        self.console.print(table, soft_wrap=False)

    def log(self, metrics):
        """Log one update: to metrics.jsonl, to the tracker (under train/, as TRL does) and to the screen.

        metrics: dict of numbers, or tensors with one number -> dict of numbers
        """
        metrics = {name: x.item() if isinstance(x, torch.Tensor) else x for name, x in metrics.items()}
        update = metrics["update"]
        not_finite = [name for name, x in metrics.items() if not math.isfinite(x)]
        if not_finite:
            names = ", ".join(not_finite)
            raise UserError(f"update {update} is not saved, not finite: {names} (--learning-rate too high?)")
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
        return metrics

    def finish(self):
        """Wait until the main process has saved everything, then close the tracker."""
        self.print(f"saved {self.name}/model; to look at the run: python report.py {self.name}")
        self.accelerator.wait_for_everyone()
        self.accelerator.end_training()

    # -- Checkpoints --

    def start(self, learner, optimizer, parameters, batch_size):
        """Write args.json and, to resume, load the newest checkpoint. -> its state; update 0 if new

        Remembers learner, optimizer and parameters (name -> parameter) for the checkpoints to come.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.on_signal)
            # A worker that a reward function forks ends at these signals as usual.
            os.register_at_fork(after_in_child=partial(signal.signal, number, signal.SIG_DFL))
        self.learner, self.optimizer, self.parameters = learner, optimizer, parameters
        plugin = self.accelerator.state.deepspeed_plugin
        # A checkpoint of DeepSpeed fits only this stage and number of processes; ours fit any number.
        deepspeed = None if plugin is None else [plugin.zero_stage, self.accelerator.num_processes]
        self.fixed = {"batch_size": batch_size, "deepspeed": deepspeed}  # may not change in a resumed run
        state = {"update": 0, "sizes": {}}  # sizes: bytes of each jsonl file
        checkpoints = sorted(self.folder.glob("checkpoints/*.pt"))
        if self.args.resume and checkpoints:
            state = load(torch.load, str(checkpoints[-1]), map_location="cpu", weights_only=True)
            if state["fixed"] != self.fixed:
                raise UserError(f"--resume: that run had {state['fixed']}, this one has {self.fixed}")
            self.load_checkpoint(state)
        self.accelerator.wait_for_everyone()  # nobody writes before everybody has read
        about = {
            "args": asdict(self.args),
            "command": sys.argv,
            "versions": {m.__name__: m.__version__ for m in (torch, transformers, datasets, accelerate)},
            "world_size": self.accelerator.num_processes,
        }
        if self.is_main:
            (self.folder / "checkpoints").mkdir(parents=True, exist_ok=True)
            self.write("args.json", json.dumps(about, indent=2))
            # Forget what the run wrote after its checkpoint: it will be written again.
            for path in self.logs():
                os.truncate(path, state["sizes"].get(path.name, 0))
        if self.args.log_with != "none":  # only now, because the tracker writes to the run folder
            self.accelerator.log_with = [self.args.log_with]
            self.accelerator.project_configuration.logging_dir = str(self.folder)
            config = {name: str(value) for name, value in asdict(self.args).items()}
            self.accelerator.init_trackers(SCRIPT, config, {"wandb": {"name": self.folder.name}})
        self.print(f"run folder {self.name}, after update {state['update']}")
        return state

    def load_checkpoint(self, state):
        if self.fixed["deepspeed"] is not None:
            self.learner.load_checkpoint(str(self.folder / "checkpoints"), tag=f"{state['update']:06d}")
            return
        for name, p in self.parameters.items():
            p.data.copy_(shard_like(state["parameters"][name], p))
        in_order = [p for group in self.optimizer.param_groups for p in group["params"]]
        for i, moments in state["optimizer"]["state"].items():
            for name, value in moments.items():
                moments[name] = shard_like(value, in_order[i])
        self.optimizer.load_state_dict(state["optimizer"])

    def checkpoint(self, update, **extra):
        """Save everything that decides the rest of the run, if it is due. After a signal: save, then exit."""
        signals = torch.tensor([self.signal_number], device=self.accelerator.device)
        signal_number = int(self.accelerator.gather(signals).max())  # any process may have got it
        is_last = update == self.updates
        is_due = self.args.save_every > 0 and update % self.args.save_every == 0
        if is_due or is_last or signal_number:
            self.save_checkpoint({"update": update, "fixed": self.fixed, **extra})
        if signal_number and not is_last:
            self.bar.stop()
            self.print(f"stopped by signal {signal_number}")
            self.print(f"to continue: the same command with --resume {self.name}")
            self.accelerator.wait_for_everyone()
            sys.exit(128 + signal_number)

    def save_checkpoint(self, state):
        """Write checkpoints/<update>.pt. DeepSpeed's processes write shards to a folder of that name."""
        folder = self.folder / "checkpoints"
        tag = f"{state['update']:06d}"
        if self.fixed["deepspeed"] is not None:
            self.learner.save_checkpoint(str(folder), tag=tag, save_latest=False)
            self.accelerator.wait_for_everyone()
        else:
            weights = {name: p.detach() for name, p in self.parameters.items()}
            tensors = {"parameters": weights, "optimizer": self.optimizer.state_dict()}
            state |= tree_map(unshard, tensors)
            if not all(p.isfinite().all() for p in state["parameters"].values()):
                raise UserError(f"update {state['update']} is not saved: weights are not finite")
        if not self.is_main:
            return
        state["sizes"] = {path.name: path.stat().st_size for path in self.logs()}
        try:
            with open(folder / "draft", "wb") as file:
                torch.save(state, file)
        except (OSError, RuntimeError) as error:  # a full disk: then the context has the reason
            raise UserError(f"cannot save {folder / tag}.pt: {error.__context__ or error}") from error
        os.replace(folder / "draft", folder / f"{tag}.pt")
        for old in sorted(folder.glob("*.pt"))[: -max(self.args.keep_checkpoints, 1)]:
            old.unlink()
            shutil.rmtree(old.with_suffix(""), ignore_errors=True)  # of DeepSpeed


def is_sample_update(update, updates, args):
    """True in num_sample_generations updates of the run, evenly spaced, or in up to twice as many (in all of
    them if there are fewer).
    """
    count = args.num_sample_generations
    return count > 0 and update % max(1, updates // count) == 0


def log_samples(run, update, texts, b, columns):
    """Show some responses of the batch; save them, and in tokens.jsonl their numbers, token by token.

    texts: a dict of texts and numbers for each response; b: a batch whose first rows are those of texts, with
    ids [B, C + T] and lengths [B]; columns: name -> [B, T]
    """
    run.table(f"samples of update {update}", texts)
    run.append("samples.jsonl", [{"update": update} | text for text in texts])
    columns = columns | {"ids": b["ids"][:, -run.args.response_length :]}  # [B, T]
    rows = []
    for i, text in enumerate(texts):
        length = int(b["lengths"][i])
        rows.append({"update": update} | text | {name: x[i, :length].tolist() for name, x in columns.items()})
    run.append("tokens.jsonl", rows)
    if run.args.log_with == "wandb" and run.is_main:
        data = [list(text.values()) for text in texts]
        run.accelerator.get_tracker("wandb").log_table("samples", list(texts[0]), data, step=update)


def report_tasks(run, before, after):
    """The final tables, evaluation.json and evaluation_samples.jsonl. before, after: from evaluate_all"""
    args = run.args
    metrics_before, metrics_after, rows = {}, {}, []
    for name in before:
        for metrics, records in ((metrics_before, before[name]), (metrics_after, after[name])):
            for metric, x in task_metrics(records, is_greedy=name == "greedy").items():
                metrics[f"{name}: {metric}"] = x
        for old, new in zip(before[name], after[name]):
            task = old.pop("task")
            new.pop("task")  # the same
            rows.append({"set": name, "task": task, "before": old, "after": new})
    samples = []
    for row in rows[:6]:
        old, new = row["before"], row["after"]
        sample = {"task": row["task"], "before": old["responses"][0], "right": old["right"][0]}
        samples.append(sample | {"after": new["responses"][0], "right after": new["right"][0]})
    comparison = []
    for name, value in metrics_before.items():
        comparison.append({"metric": name, "before": value, "after": metrics_after[name]})
    count = len(before["held-out"])
    decoding = f"sampling, temperature {args.temperature}, at most {args.response_length} tokens"
    run.table("held-out tasks, the first of the sampled responses", samples)
    run.table(f"{count} held-out tasks", comparison)
    run.print(f"right: {args.reward_fn[0]} gives 1 or more")
    run.print(f"{args.num_eval_samples} responses per task by {decoding}; greedy: one, temperature 0.01")
    about = {"before": metrics_before, "after": metrics_after, "n": count}
    about |= {"judge": args.reward_fn[0], "decoding": decoding}  # names of all scripts, for report.py
    run.write("evaluation.json", json.dumps(about, indent=2))
    run.write("evaluation_samples.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    run.accelerator.log({f"eval/{name}": x for name, x in metrics_after.items()}, step=run.updates)


# ---- Command line ------------------------------------------------------------------------------------------


def check_positive(args, *names):
    """Raise if a number is 0 or less."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise UserError(f"--{name.replace('_', '-')} must be more than 0; it is {value}")


def check_rl_args(args):
    """Raise for flags that cannot work, before anything is loaded."""
    check_positive(args, "per_device_train_batch_size", "gradient_accumulation_steps", "num_mini_batches")
    check_positive(args, "num_ppo_epochs", "total_episodes", "local_rollout_forward_batch_size")
    check_positive(args, "response_length", "temperature", "max_grad_norm")
    if args.num_shared_layers and (args.lora_r or args.load_in_8bit):
        raise UserError("--num-shared-layers cannot be combined with --lora-r or --load-in-8bit")
    count = len(args.reward_fn or [])
    if args.reward_weights is not None and len(args.reward_weights) != count:
        raise UserError(f"--reward-weights: {len(args.reward_weights)} weights, but --reward-fn has {count}")


def check_grpo_args(args):
    """Raise for flags that cannot work, before anything is loaded."""
    check_rl_args(args)
    check_positive(args, "num_train_rows", "max_prompt_length", "num_examples", "num_eval_samples")
    k = args.num_generations
    local_batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.num_mini_batches
    if k < 2 or local_batch % k:
        raise UserError(
            f"--num-generations {k} must be 2 or more and divide the {local_batch} episodes of a process: "
            "per_device_train_batch_size x gradient_accumulation_steps x num_mini_batches"
        )
    if args.kl_coef < 0:
        raise UserError(f"--kl-coef must be 0 (no KL penalty) or more; it is {args.kl_coef}")
    if args.load_in_8bit and not args.lora_r and args.kl_coef == 0:
        raise UserError(
            "--load-in-8bit: no weights are frozen without LoRA and without a reference; add --lora-r 16, or "
            "--kl-coef 0.04"
        )


def without_foreign_tasks(args):
    """Drop the harder tasks of the recipe tiny if the data is another: your reward may not fit them."""
    tiny = RECIPES["tiny"]
    has_other_data = Path(args.dataset_name) != Path(tiny.dataset_name)
    if args.hard_dataset_name == tiny.hard_dataset_name and has_other_data:
        return replace(args, hard_dataset_name=None)
    return args


def parse_args(argv):
    """The command line: an optional recipe, then flags. -> Args

    No recipe and no model: the recipe tiny. A model but no recipe: everything else has the defaults of Args.
    """
    model_flags = ("--model-name-or-path", "--sft-model-path", "--from-config")  # of any script
    names_model = any(word.split("=")[0].replace("_", "-") in model_flags for word in argv)
    recipe = "custom" if names_model else "tiny"
    flags = argv
    names_recipe = len(argv) > 0 and not argv[0].startswith("-")
    if names_recipe:
        recipe, flags = argv[0], argv[1:]
        if recipe not in RECIPES:
            raise UserError(f"there is no recipe {recipe!r}; the recipes are {', '.join(RECIPES)}")
    default = replace(RECIPES.get(recipe, Args()), recipe=recipe)
    description = f"{__doc__.splitlines()[0]} The first word may be a recipe: {', '.join(RECIPES)}."
    args, unknown = tyro.cli(
        Args, default=default, args=flags, description=description, return_unknown_args=True
    )
    if unknown:
        raise UserError(f"unknown: {' '.join(unknown)}. See --help; CHANGELOG.md has flags that were removed")
    if args.resume is None:
        return args
    return resumed_args(args.resume, recipe if names_recipe else None, flags)


def resumed_args(resume, recipe, flags):
    """The flags of the run to continue. All changes are refused, except those of a few flags."""
    path = Path(resume, "args.json")
    if resume == "latest":
        runs = Path("runs", SCRIPT)
        path = max(runs.glob("*/args.json"), key=os.path.getmtime, default=runs / "*/args.json")
    if not path.exists():
        raise UserError(f"--resume {resume}: there is no {path}")
    try:
        saved = Args(**json.loads(path.read_text())["args"] | {"output_dir": str(path.parent)})
    except (TypeError, KeyError, ValueError) as error:
        line = f"--resume {resume}: a run of another script or version, see CHANGELOG.md: {error}"
        raise UserError(line) from error
    args = tyro.cli(Args, default=replace(saved, recipe=recipe or saved.recipe), args=flags)
    if Path(args.output_dir or "").resolve() == path.parent.resolve():
        args = replace(args, output_dir=saved.output_dir)  # the same folder, spelled in another way
    # What may change, by the names of all scripts: how long the run is, what it saves, and who judges it.
    # (With a warm-up or a falling learning rate, a longer run is not one that was longer from the start.)
    may_change = "resume save_every keep_checkpoints log_with total_episodes num_train_epochs"
    # Run.start refuses another batch size, so these two change only together or with the number of processes.
    may_change += " per_device_train_batch_size gradient_accumulation_steps"
    changed = [name for name, value in asdict(args).items() if value != getattr(saved, name)]
    changed = [x for x in changed if x not in may_change.split() and not x.startswith("judge_")]
    if changed:
        raise UserError(f"--resume {resume} would change {', '.join(changed)}; start a new run for that")
    return args


def run_command_line(function, *inputs):
    """Call function(*inputs). Errors that the user can fix print one line, with exit code 2."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns about a kernel we do not use
    warnings.filterwarnings("ignore", category=FutureWarning)  # libraries that use old names of each other
    warnings.filterwarnings("ignore", message="fan_in_fan_out")  # peft, about GPT-2; it does the right thing
    for library in (transformers, datasets):
        library.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # not in a notebook
            stream.reconfigure(errors="replace")  # a terminal may not know all characters of a response
    try:
        function(*inputs)
    except (UserError, UnicodeDecodeError, OSError, SafetensorError) as error:
        line = str(error)  # UnicodeDecodeError: data that is not UTF-8; OSError: a full disk, for example
    except ModuleNotFoundError as error:
        line = f"this needs {error.name}: pip install {error.name}, or uv run --with {error.name} {SCRIPT}.py"
    else:
        return
    finally:
        Console().show_cursor()  # the progress bar hid it
    print(f"{SCRIPT}.py: {' '.join(line.split())}", file=sys.stderr)
    sys.exit(2)


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    run_command_line(lambda: train(without_foreign_tasks(parse_args(argv))))


if __name__ == "__main__":
    main()
