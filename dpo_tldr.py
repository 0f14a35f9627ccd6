"""DPO (direct preference optimization) that teaches a language model to summarize, from pairs of summaries.

If you know reward_model.py and rloo_tldr.py, this is what changes (in the code: docs/differences.md):

1. The data and the loss are those of a reward model: pairs of responses to a prompt, and
   -log sigmoid(score of the better one - score of the worse one) (Bradley-Terry). But there is no head for
   the score. A language model scores a response by itself: beta * (log-probability of the response under the
   policy - that under the reference) (`dpo_loss`).
2. Why a score is enough: the policy that PPO and RLOO search for, which maximizes
   E[reward] - beta * KL(policy, reference), is known (Rafailov et al. 2023, eq. 4 to 7):

       policy = reference * exp(reward / beta) / Z        Z depends only on the prompt

   Solved for the reward:

       reward = beta * log(policy / reference) + beta * log Z

   In the difference between two responses to the same prompt, Z cancels, and the score remains. So every
   policy is the optimum for the reward that it implies, and learning this reward is learning the policy:
   there is no reward model and no rollout.
3. The reference is the policy before training. All its log-probabilities are computed once, before the first
   update (`pair_logprobs`). So there is no second model in memory during training.
4. A forward pass reads a prompt once for both responses (`group_hidden_states`, as in rloo_tldr.py).
5. Only the difference between the two scores is trained. The log-probabilities of both responses may fall,
   and usually do: logps/chosen shows it.
6. What the policy writes is sampled only before and after training, for the same held-out posts and with the
   same random numbers. rloo_tldr.py uses the same posts and numbers if its --dataset-name is this script's
   --eval-dataset-name, if --num-eval-prompts and --response-length agree, and if no post is too long for
   either script. Then their final tables can be compared. (This script also counts the reference
   summary: --max-length.)

Columns of the data set, one of:

       prompt, chosen, rejected      texts (EOS is added), or chats (lists of messages)
       chosen, rejected              both contain the prompt: it is what they have in common
       prompt, responses             ranked, best first: the best one against the worst one

The part that two texts have in common may include first words of both responses, such as "Assistant: I'm".
The loss is the same, but without --eval-dataset-name, the samples of the policy begin after these words.

    python dpo_tldr.py                             # recipe tiny: no download, no GPU, minutes on 2 cores
    python dpo_tldr.py --beta 0.5                  # tiny with one change; every field of Args is a flag
    python dpo_tldr.py tldr-pythia-1b              # the pairs and the start of Huang et al. 2024
    accelerate launch dpo_tldr.py tldr-pythia-1b   # on N GPUs, with N times the batch
    python dpo_tldr.py --resume RUN_FOLDER         # continue a stopped run; on a CPU, bit for bit
    python judge.py --model-name-or-path RUN/model --judge-model JUDGE    # ask another judge

Part I is the algorithm: flags, math, loop, pairs, model. Part II is infrastructure: recipes, evaluation,
models, data, processes, run folder, flags. Papers: Direct Preference Optimization (Rafailov et al. 2023),
Learning to Summarize from Human Feedback (Stiennon et al. 2020).
Results, metrics, which lines to change for IPO, SimPO and others: docs/dpo_tldr.md.
"""

# `uv run dpo_tldr.py` installs these packages and needs no other set-up.
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
from itertools import takewhile
from pathlib import Path
from statistics import fmean
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
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import LinearAttentionCacheLayerMixin

# ============================================================================================================
# Part I: the algorithm
# ============================================================================================================


@dataclass
class Args:
    """The defaults are those of TRL 1.16's DPOConfig, except that gradient checkpointing is off, and that
    pairs with more tokens than max_length are left out, not cut. A command line that names no recipe and no
    model starts from the recipe tiny, which replaces some of them."""

    # Run
    recipe: tyro.conf.Suppress[str] = "custom"  # first word of the command line
    seed: int = 1  # random seed; all shuffling and sampling is a function of it
    output_dir: str | None = None  # run folder (default: runs/<script>/<recipe>-s<seed>-<time>)
    resume: str | None = None  # continue the run in this folder, with its flags
    eval_every: int = 0  # updates between evaluations during training (0: only before and after)
    save_every: int = 100  # updates between checkpoints (0: only at the end, or after a signal)
    keep_checkpoints: int = 2  # number of checkpoints to keep
    log_with: Literal["none", "wandb", "tensorboard"] = "none"  # a tracker, in addition to metrics.jsonl

    # Model
    model_name_or_path: str = "Qwen/Qwen2-0.5B-Instruct"  # the initial policy, which is also the reference
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"  # auto: bf16 on GPUs that have it, else float32
    load_in_8bit: bool = False  # 8-bit weights for LoRA's base model
    gradient_checkpointing: bool = False  # recompute activations in the backward pass to save memory
    lora_r: int = 0  # LoRA rank (0: train all weights)
    lora_alpha: int = 32  # LoRA scale: the adapter adds lora_alpha / lora_r * B A
    lora_target_modules: str = "all-linear"  # layers with an adapter: comma-separated names, or all-linear

    # Data
    dataset_name: str = "trl-lib/ultrafeedback_binarized"  # columns [prompt,] chosen, rejected | responses
    num_train_rows: int | None = None  # train on N rows of the data, drawn at random; None: on all
    chat_template_kwargs: str | None = None  # template options, in JSON: {"enable_thinking": false}
    max_length: int = 1024  # pairs in which a prompt and response have more tokens are left out
    num_eval_pairs: int = 1_000  # held-out pairs, at most

    # DPO
    beta: float = 0.1  # strength of the implicit KL penalty: kl_coef of the other scripts
    label_smoothing: float = 0.0  # assumed share of pairs whose label is wrong (conservative DPO)

    # Batch: per_device_train_batch_size x gradient_accumulation_steps x processes
    num_train_epochs: float = 3.0  # epochs over the training pairs, rounded to whole updates (at least one)
    per_device_train_batch_size: int = 8  # pairs per forward and backward pass
    gradient_accumulation_steps: int = 1  # micro-batches per optimizer step

    # Samples before and after training
    eval_dataset_name: str | None = None  # columns prompt, completion; None: the prompts of held-out pairs
    num_eval_prompts: int = 256  # number of held-out posts that are summarized
    judge_fn: str | None = None  # FILE.py:function; f(prompts=..., completions=...) -> scores
    response_length: int = 53  # longest response, in tokens
    temperature: float = 1.0  # of the samples and their KL; the loss always uses 1

    # Optimizer
    learning_rate: float = 1e-6  # the highest learning rate of the schedule
    optimizer: str = "torch.optim.Adam"  # dotted name: torch.optim.SGD, bitsandbytes.optim.Adam8bit, ...
    adam_eps: float = 1e-8  # epsilon of Adam
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "linear"  # shape after the warm-up
    warmup_ratio: float = 0.0  # fraction of updates in which the learning rate rises to its full value
    max_grad_norm: float | None = 1.0  # clip the gradient to this norm; None: no clipping


# ---- Math: pure functions of tensors -----------------------------------------------------------------------
#
# Shapes: B pairs per update, n in a micro-batch, N in the whole data set. C positions of the prompt, T of the
# response, V tokens in the vocabulary, H hidden units. A micro-batch has 2n rows, because the two responses
# to a prompt are neighbors, the chosen one first. A row is a left-padded prompt and a right-padded response,
# here with C = 4 and T = 5:
#
#     pad    pad    TL;    DR:   | My     cat    EOS    pad    pad       chosen
#     pad    pad    TL;    DR:   | A      pet    is     ill    EOS       rejected
#
# The hidden state of each token predicts the next one: "DR:" predicts "My" and "A".
#
# In train, B counts the pairs of an update. In the functions below, it is the number of rows of a tensor: two
# for each pair, or one for each post. T is the longest response or, for samples, --response-length.


def length_mask(lengths, max_length):
    """True on the first `lengths` positions of each row. [B] -> bool [B, max_length]"""
    return torch.arange(max_length, device=lengths.device) < lengths[:, None]


def dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta, label_smoothing=0.0):
    """-log P(the chosen response is preferred), by the scores that the policy implies. [N] each -> [N]

    The arguments are log-probabilities of whole responses, under the policy and under the reference. The
    score of a response is beta * log(policy / reference), up to a term that depends only on the prompt, which
    is the same for both (Rafailov et al. 2023, eq. 7). label_smoothing: each label is assumed to be wrong
    with this probability (conservative DPO, Mitchell 2023).
    """
    chosen_scores = beta * (chosen - ref_chosen)
    rejected_scores = beta * (rejected - ref_rejected)
    difference = chosen_scores - rejected_scores
    loss_if_right, loss_if_wrong = -F.logsigmoid(difference), -F.logsigmoid(-difference)
    return (1 - label_smoothing) * loss_if_right + label_smoothing * loss_if_wrong


def pair_metrics(logprobs, ref_logprobs, beta):
    """Metrics of TRL's DPOTrainer, of each pair. [N, 2], [N, 2]: chosen, rejected -> dict of [N]

    A reward is the score that the policy implies: see dpo_loss. Before training, all rewards are 0, and a tie
    is half right, as in the win rate. (In TRL, it is wrong.)
    """
    chosen, rejected = logprobs.unbind(1)
    chosen_reward, rejected_reward = (beta * (logprobs - ref_logprobs)).unbind(1)
    return {
        "rewards/chosen": chosen_reward,
        "rewards/rejected": rejected_reward,
        "rewards/accuracies": (chosen_reward > rejected_reward) + 0.5 * (chosen_reward == rejected_reward),
        "rewards/margins": chosen_reward - rejected_reward,
        "logps/chosen": chosen,
        "logps/rejected": rejected,
    }


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
    """The whole run, from the flags to the final tables. -> (PairPolicy, run folder)"""
    accelerator = start_accelerator(args)
    device, world = accelerator.device, accelerator.num_processes
    n = args.per_device_train_batch_size
    B = n * args.gradient_accumulation_steps * world  # pairs per update

    tokenizer = load_tokenizer(args.model_name_or_path)
    set_template_options(tokenizer, args)
    train_rows, held_out_rows = load_splits(args.dataset_name)
    if args.num_train_rows is not None:  # the same ones for every --seed
        train_rows = random.Random(0).sample(train_rows, min(args.num_train_rows, len(train_rows)))
    # A pair is a dict. ids: tokens of the prompt; responses: tokens of the chosen and of the rejected one,
    # each with its EOS. A post has the same form, with one response: the reference summary.
    train_pairs = load_pairs(train_rows, tokenizer, args)
    held_out_rows = choose_rows(held_out_rows, args.num_eval_pairs)
    held_out_pairs = load_pairs(held_out_rows, tokenizer, args)
    posts = choose_rows(load_eval_posts(held_out_pairs, tokenizer, args), args.num_eval_prompts)
    updates = max(1, round(args.num_train_epochs * len(train_pairs) / B))
    # What the progress bar shows: label -> metric.
    status = {"loss": "loss", "accuracy": "rewards/accuracies", "margin": "rewards/margins"}
    run = Run(args, accelerator, updates, status)

    policy = load_lm(args).to(device)
    check_model(policy, max(map(text_length, train_pairs)))
    is_bf16 = wants_bf16(args, device)
    if is_bf16:
        round_frozen_weights(policy, only_if_exact=True)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=is_bf16)
    model = PairPolicy(policy)  # the policy, with the forward pass of the update
    learner, optimizer = make_learner(model, args, accelerator)  # learner: the model, or DDP around it

    accelerator.print(
        f"recipe {args.recipe}: {args.model_name_or_path} on {args.dataset_name}, {device}, bf16: {is_bf16}\n"
        f"batch: {n} pairs per pass x {args.gradient_accumulation_steps} accumulated x {world} processes "
        f"= {B} pairs; {updates} optimizer steps"
    )

    # The policy is still the reference here, with --resume too: run.start loads a checkpoint only below.
    with autocast:
        # Of all pairs, so that a run that is prolonged by --num-train-epochs has the same bits.
        ref_logprobs = pair_logprobs(model, train_pairs, args, accelerator)  # [N, 2]: chosen, rejected
        held_out_ref_logprobs = pair_logprobs(model, held_out_pairs, args, accelerator)

    def evaluate():
        """Evaluate the policy as it is now. -> metrics and columns of evaluate_samples, means over pairs"""
        # The KL of the samples needs the reference. With LoRA, it is the policy without its adapter. Without,
        # it is loaded only here, so that it takes no memory during training.
        ref_model = None if args.lora_r else load_lm(args).to(device)
        with autocast:
            logprobs = pair_logprobs(model, held_out_pairs, args, accelerator)
            samples = evaluate_samples(policy, posts, tokenizer, args, accelerator, ref_model=ref_model)
        of_pairs = pair_metrics(logprobs, held_out_ref_logprobs, args.beta)
        return *samples, {name: x.mean().item() for name, x in of_pairs.items()}

    before = evaluate()
    kl_to_itself = before[0]["KL, nats per response"]
    assert abs(kl_to_itself) < 0.5, "sampling and update compute different log-probabilities, or nan"
    state = run.start(B)  # update 0 in a new run

    for update in range(state["update"] + 1, updates + 1):
        # 1. Batch: the next B pairs of an endless stream of shuffled passes. For a given B, the result does
        #    not depend on the number of processes, up to rounding.
        start_time = time.time()
        # [B], places in train_pairs and in ref_logprobs
        row_numbers = stream_rows(len(train_pairs), (update - 1) * B, B, args.seed)
        batch = [train_pairs[i] for i in row_numbers.tolist()]

        # 2. Gradient. Each process works on its share of the batch, n pairs at a time. The loss is the sum
        #    over this process's pairs, divided by the number of pairs on all processes. So the gradient does
        #    not depend on how the batch is split.
        learner.train(args.gradient_checkpointing)  # there is no dropout; only checkpointing needs train mode
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, update, updates)
        metric_sums = defaultdict(float)  # sums over the pairs of all micro-batches
        lengths = torch.tensor([text_length(pair) for pair in batch])  # [B]
        with accelerator.split_between_processes(torch.arange(B)) as share:
            share = share[lengths[share].argsort(stable=True)]  # similar lengths: less padding
        for places in share.split(n):  # places in the batch
            ids, mask, T = collate_pairs([batch[i] for i in places.tolist()], device)
            mb_ref_logprobs = ref_logprobs[row_numbers[places]].to(device)  # [n, 2]

            with accelerator.accumulate(learner):  # processes exchange gradients only in the last micro-batch
                with autocast:
                    token_logprobs = learner(ids, mask, T)  # [2n, T], 0 after the end of a response
                # The log-probability of a response is the sum over its tokens.
                logprobs = token_logprobs.sum(1).view(-1, 2)  # [n, 2]: chosen, rejected
                chosen, rejected = logprobs.unbind(1)  # [n] each
                ref_chosen, ref_rejected = mb_ref_logprobs.unbind(1)
                losses = dpo_loss(
                    chosen, rejected, ref_chosen, ref_rejected, args.beta, args.label_smoothing
                )  # [n]
                loss = losses.sum() / B
                # We want the sum, but DDP averages over processes and accelerate over micro-batches.
                # With 2 processes and 4 micro-batches, they divide by 2 and 4, so multiply by 8.
                accelerator.backward(loss * world * args.gradient_accumulation_steps)

            if update == 1:  # no optimizer step yet: the policy is the reference, up to rounding
                gap = (logprobs - mb_ref_logprobs).abs().sum() / mask[:, -T:].sum()  # per token
                assert gap < 0.02, "policy and reference differ, or nan"
            unreduced = {"loss": losses} | pair_metrics(logprobs, mb_ref_logprobs, args.beta)
            for name, x in unreduced.items():
                metric_sums[name] += x.detach().sum()

        # 3. Optimizer step.
        assert accelerator.sync_gradients, "no optimizer step: too few or too many micro-batches"
        grad_norm = accelerator.clip_grad_norm_(learner.parameters(), args.max_grad_norm or math.inf)
        optimizer.step()
        optimizer.zero_grad(set_to_none=world == 1)  # DDP keeps gradients in its buckets

        # 4. Log and save. The metrics have the names of TRL's DPOTrainer.
        metric_sums = accelerator.reduce(dict(metric_sums), "sum")
        num_tokens = sum(len(pair["ids"]) + sum(map(len, pair["responses"])) for pair in batch)
        metrics = {
            "update": update,
            "epoch": update * B / len(train_pairs),
            "lr": optimizer.param_groups[0]["lr"],
            **{name: x / B for name, x in metric_sums.items()},  # loss, rewards/*, logps/*
            "grad_norm": grad_norm,  # before clipping
            # There is no rollout here, so its time is 0.
            **performance_metrics(start_time, start_time, num_tokens, device),
        }
        if args.eval_every and update % args.eval_every == 0 and update < updates:
            evaluation, _, pairs = evaluate()
            metrics |= {f"eval/{name}": x for name, x in (evaluation | pairs).items()}
        run.log(metrics)  # tensors become numbers; raises if one is not finite
        run.checkpoint({"update": update, "batch_size": B})

    # 5. Evaluate on the same held-out pairs and posts again, and save the model.
    after = evaluate()
    if accelerator.is_main_process:
        save_policy(policy, tokenizer, run.folder / "model")
        report_evaluation(run, before, after, len(held_out_pairs))
    run.finish()
    return model, run.folder


# ---- Pairs -------------------------------------------------------------------------------------------------


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


def load_pairs(rows, tokenizer, args):
    """The rows with two different responses that are short enough.

    -> list of dict(ids: tokens of the prompt, responses: tokens of the chosen and of the rejected response)
    """
    preferences = read_preferences(rows)
    pairs = []
    num_empty, num_equal, num_too_long = len(rows) - len(preferences), 0, 0
    for _, prompt, responses in preferences:
        pair = tokenize_pair(tokenizer, prompt, [responses[0], responses[-1]])
        if not pair["ids"]:  # the first token of a text cannot be learned: nothing predicts it
            num_empty += 1
        elif pair["responses"][0] == pair["responses"][1]:
            num_equal += 1
        elif text_length(pair) > args.max_length:
            num_too_long += 1
        else:
            pairs.append(pair)
    accelerate.PartialState().print(
        f"{len(pairs)} of {len(rows)} rows; left out: {num_empty} with an empty prompt or response, "
        f"{num_equal} with equal ones, {num_too_long} of more than {args.max_length} tokens"
    )
    return pairs


def choose_rows(rows, count):
    """`count` of the rows, or all if there are fewer, in random order: the same ones for every --seed."""
    return [rows[i] for i in stream_rows(len(rows), 0, min(count, len(rows)), seed=0)]


def read_preferences(rows):
    """The rows with two or more responses: chosen and rejected or, without them, the column responses.

    -> list of (row, its prompt, its responses, best first)
    """
    preferences = []
    for row in rows:
        responses = row.get("responses")
        if row.get("chosen"):
            responses = [row["chosen"], row.get("rejected")]
        if isinstance(responses, list):
            responses = [response for response in responses if str(response or "").strip()]
            if len(responses) > 1:
                preferences.append((row, find_prompt(row, responses), responses))
    return preferences


def read_completions(rows):
    """The rows with a prompt and a completion. -> list of (prompt, a list with the completion)"""
    complete = []
    for row in rows:
        if all(str(row.get(column) or "").strip() for column in ("prompt", "completion")):
            responses = [row["completion"]]
            complete.append((find_prompt(row, responses), responses))
    return complete


def find_prompt(row, responses):
    """The prompt of a row, a text or a chat like its responses. If it is empty, they contain it.

    column prompt    responses                          prompt
    text             texts                              the column
    text             chats without a user's question    one message of the user
    text or none     chats with a user's question       empty
    chat             chats                              the column

    If the responses are complete chats, a text in the column prompt is ignored: many data sets repeat the
    question there.
    """
    prompt = row.get("prompt") or ""
    if is_chat(prompt):
        return prompt
    prompt = prompt if prompt.strip() else ""
    if not is_chat(responses[0]):
        return prompt
    roles = [message["role"] for message in responses[0]]
    is_contained = "user" in roles[: roles.index("assistant")]
    return [{"role": "user", "content": prompt}] if prompt and not is_contained else []


def tokenize_pair(tokenizer, prompt, responses):
    """Token ids of a prompt and of the responses to it, as in rollouts. -> dict(ids, responses)

    A text is prompt, response, EOS, each tokenized alone. A chat is tokenized as a whole. It ends as its chat
    template ends it, but for whitespace, and with EOS if that is no special token. If the prompt is empty, it
    is what the responses have in common.
    """
    if is_chat(responses[0]):
        # rstrip: a turn ends in "<|im_end|>\n", but a policy stops at <|im_end|>, so "\n" has no score.
        chats = [render_chat(tokenizer, prompt + response).rstrip() for response in responses]
        added = tokenizer.added_tokens_decoder.items()
        special = {i for i, token in added if token.special} - {tokenizer.unk_token_id}
        texts = tokenizer(chats, add_special_tokens=False).input_ids
        texts = [ids if ids[-1] in special else with_eos(ids, tokenizer) for ids in texts]
        prompt = prompt + responses[0][:-1]  # all messages but the last one
    else:
        response_ids = tokenizer(responses, add_special_tokens=False).input_ids
        texts = [tokenizer(prompt).input_ids + with_eos(ids, tokenizer) for ids in response_ids]
    # Where does the prompt end? In texts with a prompt: where its own tokens end. In texts without one: at
    # the first token in which the two differ. In chats, it is what the two chats and the prompt alone begin
    # with. That may be less than the prompt: a template may add "<think>" to a prompt alone, or its last
    # space may join the next word.
    beginnings = [tokenize_prompt(tokenizer, prompt)] if prompt else []
    length = len(os.path.commonprefix([*beginnings, *texts]))  # it is for paths, but works on lists too
    return dict(ids=texts[0][:length], responses=[ids[length:] for ids in texts])


def with_eos(ids, tokenizer):
    """Token ids with EOS at the end, unless the text already ends in one."""
    return ids if ids[-1:] == [tokenizer.eos_token_id] else [*ids, tokenizer.eos_token_id]


def collate_pairs(pairs, device):
    """Pairs (or posts) as one batch, in which the responses to a prompt are neighbors, the chosen one first.

    -> ids, bool mask [2n (or n), C + T]; T, the length of the longest response
    """
    prompts = [torch.tensor(pair["ids"]) for pair in pairs for _ in pair["responses"]]
    responses = [torch.tensor(ids) for pair in pairs for ids in pair["responses"]]
    pad = partial(nn.utils.rnn.pad_sequence, batch_first=True, padding_value=-1)
    prompts = pad(prompts, padding_side="left")  # [.., C]
    responses = pad(responses)  # [.., T]
    ids = torch.cat([prompts, responses], 1).to(device)
    return ids.clamp(min=0), ids >= 0, responses.shape[1]


@torch.no_grad()
def pair_logprobs(model, pairs, args, accelerator):
    """Log-probabilities of the two responses of each pair; each process computes a share. -> fp32 [N, 2]"""
    model.eval()
    lengths = torch.tensor([text_length(pair) for pair in pairs])
    with accelerator.split_between_processes(torch.arange(len(pairs))) as share:
        logprobs = torch.zeros(len(share), 2)
        for rows in lengths[share].argsort(stable=True).split(args.per_device_train_batch_size):
            ids, mask, T = collate_pairs([pairs[i] for i in share[rows].tolist()], accelerator.device)
            logprobs[rows] = model(ids, mask, T).sum(1).view(-1, 2).cpu()
    return torch.tensor(accelerate.utils.gather_object(logprobs.tolist()))


def text_length(pair):
    """The number of tokens of a prompt and the longest of its responses."""
    return len(pair["ids"]) + max(len(ids) for ids in pair["responses"])


# ---- Policy and reference ----------------------------------------------------------------------------------


def load_lm(args):
    """The language model that is trained, with an adapter if --lora-r asks for one."""
    lm = load_model(AutoModelForCausalLM, args.model_name_or_path, **eight_bit(args))
    if args.lora_r:
        lm = add_lora(lm, args)
    if args.gradient_checkpointing:
        lm.gradient_checkpointing_enable(dict(use_reentrant=False))
    return lm


class PairPolicy(nn.Module):
    """The policy with the forward pass of the update, so that DDP or DeepSpeed can wrap it."""

    def __init__(self, policy):
        super().__init__()
        self.policy = policy

    def forward(self, ids, mask, T):
        """Log-probabilities of the last T tokens of each row.

        ids [B, C + T], bool mask [B, C + T] -> fp32 [B, T], 0 after the end of a response
        """
        return response_logprobs(self.policy, ids, mask, T)


def response_logprobs(lm, ids, mask, T, temperature=1.0):
    """log softmax(logits / temperature) at the last T tokens of each row, 0 after the end of a response.

    ids [B, C + T], bool mask [B, C + T] -> fp32 [B, T]. The logits may need more memory than the model, so
    they are computed for at most 128 tokens at once, and again in the backward pass.
    """
    _, head = body_and_head(lm)
    hidden = group_hidden_states(lm, ids, mask, T)  # [B, T, H]
    # The output layer is large, so only valid tokens go through it, as a flat list.
    valid = mask[:, -T:]
    rows, columns = valid.nonzero(as_tuple=True)  # only once, because nonzero waits for the GPU
    flat_hidden, flat_tokens = hidden[rows, columns], ids[:, -T:][rows, columns]
    with torch.autocast(ids.device.type, enabled=False):  # logits in bf16 would be too coarse
        # F.cross_entropy(F.linear(hidden, weight, bias), tokens), in chunks: -log softmax at the tokens.
        losses = F.linear_cross_entropy(
            flat_hidden.float() / temperature,
            head.weight.float(),
            flat_tokens,
            linear_bias=None if head.bias is None else head.bias / temperature,
            reduction="none",
            options=nn.LinearCrossEntropyOptions(batch_chunk_size=128),
        )
    return torch.zeros(valid.shape, device=ids.device).masked_scatter(valid, -losses)


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


# ============================================================================================================
# Part II: infrastructure. Nothing below is needed to understand DPO: it covers recipes, samples before and
# after training, models, data, files and flags. The scripts share these functions, copied verbatim (in the
# others, sampling is part of the algorithm). check.py checks flags and data.
# ============================================================================================================

SCRIPT = Path(__file__).stem
HERE = Path(__file__).resolve().parent  # recipes name folders next to this file


RECIPES = {
    "tiny": Args(  # small models and data that come with this repository
        model_name_or_path="checkpoints/tldr-sft",
        dataset_name="data/tldr-preference",
        eval_dataset_name="data/tldr",
        judge_fn="data/make_tldr.py:gold_score",
        optimizer="torch.optim.AdamW",  # with weight decay 0.01; in the other recipes and in TRL, it is 0
        dtype="float32",
        beta=0.5,
        num_train_epochs=1.0,
        per_device_train_batch_size=32,
        learning_rate=1e-4,
        lr_scheduler_type="cosine",
        warmup_ratio=0.1,
        response_length=40,
        num_eval_prompts=300,
    ),
    "tldr-pythia-1b": Args(  # pairs and start of Huang et al. 2024, flags of Rafailov et al. 2023, appendix B
        model_name_or_path="cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr",
        dataset_name="trl-lib/tldr-preference",
        eval_dataset_name="trl-lib/tldr",
        max_length=638,
        beta=0.5,
        num_train_epochs=1.0,
        gradient_accumulation_steps=8,
        optimizer="torch.optim.RMSprop",
        lr_scheduler_type="constant",
        warmup_ratio=0.1,  # 145 updates
    ),
    # The same flags with the paper's beta for dialogs. But the paper began with a model that was fine-tuned
    # on the chosen responses, and this recipe begins with the base model.
    "hh": Args(
        model_name_or_path="EleutherAI/pythia-1b-deduped",
        dataset_name="Anthropic/hh-rlhf",
        max_length=512,
        num_train_epochs=1.0,
        gradient_accumulation_steps=8,
        optimizer="torch.optim.RMSprop",
        lr_scheduler_type="constant",
        warmup_ratio=0.06,  # 150 updates
        response_length=128,
    ),
    "qwen-0.5b-ultrafeedback": Args(  # the first command of TRL's page about DPO
        gradient_checkpointing=True,
        num_eval_prompts=64,
        response_length=256,
    ),
}


class UserError(Exception):
    """An error that would otherwise be silent: printed without a traceback, exit code 2."""


# ---- Samples and judge -------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate_samples(policy, posts, tokenizer, args, accelerator, ref_model):
    """Respond to the held-out posts, with the same random numbers before and after training.

    ref_model: None if it is the policy without its LoRA adapter. Each process takes its share of the posts.
    -> metrics (dict of floats); columns (dict of lists, one entry per post): prompt, reference, response,
    score (None without a judge), kl, stopped, length
    """
    policy.eval()
    device, T = accelerator.device, args.response_length
    stop_ids = end_tokens(policy, tokenizer).to(device)
    # One random number per token, the same for every --seed. With the same posts and T, rloo_tldr.py draws
    # the same ones.
    generator = generator_for(0, "tokens", "held-out")
    uniforms = torch.rand(len(posts), T, dtype=torch.float64, generator=generator).to(device)
    rows = []
    with accelerator.split_between_processes(torch.arange(len(posts))) as share:
        for places in share.split(args.per_device_train_batch_size):  # places in posts
            chunk = [posts[i] for i in places.tolist()]
            # Only the left-padded prompts [n, C], without the reference summaries after them.
            ids, mask, summary_length = collate_pairs(chunk, device)
            ids, mask = ids[:, :-summary_length], mask[:, :-summary_length]
            tokens, logprobs = generate(policy, ids, mask, uniforms[places], args.temperature)  # [n, T]
            lengths = response_lengths(tokens, stop_ids)  # [n]
            valid = length_mask(lengths, T)
            ids = torch.cat([ids, tokens], 1)
            mask = torch.cat([mask, valid], 1)
            ref_logprobs = reference_logprobs(ref_model, policy, ids, mask, T, args.temperature)
            # The texts, without the tokens that end them.
            prompt_tokens = [post["ids"] for post in chunk]
            is_text = ~torch.isin(tokens, stop_ids)
            prompts, responses = decode(tokenizer, prompt_tokens, list_tokens(tokens, valid & is_text))
            references = [[*takewhile(lambda x: x not in stop_ids, post["responses"][0])] for post in chunk]
            columns = {
                "prompt": prompts,
                "reference": decode(tokenizer, prompt_tokens, references)[1],
                "response": responses,
                "score": [None] * len(chunk),
                "kl": (logprobs.where(valid, 0.0) - ref_logprobs).sum(1).tolist(),
                "stopped": (torch.isin(tokens, stop_ids) & valid).any(1).tolist(),
                "length": lengths.tolist(),
            }
            rows += rows_of(columns)
    rows = accelerate.utils.gather_object(rows)  # of all processes, in the order of the posts
    gathered = {name: [row[name] for row in rows] for name in rows[0]}
    metrics = {}
    if args.judge_fn is not None and accelerator.is_main_process:  # the others would make the same calls
        [judge] = load_functions([args.judge_fn]).values()
        ask = partial(judge, prompts=gathered["prompt"])
        with torch.autocast(device.type, enabled=False):
            scores = [list(ask(completions=gathered[name])) for name in ("response", "reference")]
        scores, reference_scores = torch.tensor(scores, dtype=torch.float32)  # [posts] each
        if len(scores) != len(posts) or not (scores + reference_scores).isfinite().all():
            raise UserError("--judge-fn must return a finite number per response")
        gathered["score"] = scores.tolist()
        wins = (scores > reference_scores) + 0.5 * (scores == reference_scores)  # a tie is half a win
        metrics |= mean_with_error("win rate", wins) | mean_with_error("score mean", scores)
    metrics |= mean_with_error("KL, nats per response", torch.tensor(gathered["kl"])) | {
        "ended by itself": fmean(gathered["stopped"]),
        "tokens per response": fmean(gathered["length"]),
        "distinct bigrams": distinct_bigrams(gathered["response"]),
    }
    return metrics, gathered


def mean_with_error(name, values):
    """The mean, and half of its 95 % interval. [N] -> dict of floats"""
    standard_error = values.std(correction=0).item() / len(values) ** 0.5
    return {name: values.mean().item(), f"{name}, +-": 1.96 * standard_error}


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


def load_eval_posts(pairs, tokenizer, args):
    """What the policy responds to: held-out rows of --eval-dataset-name, or else the held-out pairs.

    -> list of dict(ids: tokens of the prompt, responses: a list with those of the reference)
    """
    if args.eval_dataset_name is None:
        return [pair | {"responses": pair["responses"][:1]} for pair in pairs]
    _, rows = load_splits(args.eval_dataset_name)
    posts = [tokenize_pair(tokenizer, *x) for x in read_completions(rows)]
    posts = [post for post in posts if text_length(post) <= args.max_length]
    accelerate.PartialState().print(
        f"{len(posts)} of {len(rows)} rows have a prompt, a completion and at most {args.max_length} tokens"
    )
    return posts


@torch.no_grad()
def generate(policy, ids, mask, uniforms, temperature):
    """Sample T tokens after each prompt, whether or not a stop token is among them. No top-k, no top-p.

    Left-padded ids, mask [B, C]; uniforms [B, T], one random number per token
    -> tokens [B, T] and the log-probabilities they were sampled with, fp32 [B, T]
    """
    body, head = body_and_head(policy)
    cache = transformers.DynamicCache(config=body.config)
    hidden = hidden_states(body, ids, mask, cache)[:, -1]  # [B, H]
    tokens, logprobs = [], []
    for uniforms_of_step in uniforms.unbind(1):
        token, logprob = sample_next(head, hidden, uniforms_of_step, temperature)  # [B] each
        tokens.append(token)
        logprobs.append(logprob)
        mask = F.pad(mask, (0, 1), value=True)
        hidden = hidden_states(body, token[:, None], mask, cache)[:, -1]  # [B, H]
    return torch.stack(tokens, 1), torch.stack(logprobs, 1)


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


def reference_logprobs(ref_model, policy, *inputs):
    """Log-probabilities under the reference or, if ref_model is None, the policy without its LoRA adapter.

    inputs: those of response_logprobs -> fp32 [B, T]
    """
    if ref_model is not None:
        return response_logprobs(ref_model, *inputs)
    with policy.disable_adapter():
        return response_logprobs(policy, *inputs)


def token_logits(hidden, weight, temperature=1.0, bias=None):
    """The output layer, in fp32 (TF32 on a GPU), under autocast too. [N, H], [V, H], [V] or None -> [N, V]

    Logits of a language model may be near -100, where neighboring bf16 numbers are 0.5 apart.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        hidden = hidden.float() / temperature  # [N, H]; dividing the logits [N, V] would take longer
        return F.linear(hidden, weight.float(), None if bias is None else bias / temperature)


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


# ---- Data --------------------------------------------------------------------------------------------------


def load_functions(names):
    """Import functions that are named FILE.py:function. -> dict: name -> function"""
    functions = {}
    for name in names:
        path, _, function = name.rpartition(":")
        path = Path(resolve_path(path)).absolute()
        sys.path.insert(0, str(path.parent))  # so that the file can import its neighbors
        functions[function] = getattr(importlib.import_module(path.stem), function)
    return functions


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


def rows_of(columns):
    """A dict of lists -> a list of dicts."""
    return [dict(zip(columns, row)) for row in zip(*columns.values())]


def report_evaluation(run, before, after, num_pairs):
    """The final tables, evaluation.json and evaluation_samples.jsonl. before, after: see evaluate in train"""
    metrics_before, old, pairs_before = before
    metrics_after, new, pairs_after = after
    columns = {
        "prompt": old["prompt"],
        "reference": old["reference"],
        "before": old["response"],
        "score": old["score"],
        "after": new["response"],
        "score after": new["score"],
    }
    rows = rows_of(columns)
    tables = {
        f"{len(rows)} held-out prompts, judge: {run.args.judge_fn}": (metrics_before, metrics_after),
        f"{num_pairs} held-out pairs": (pairs_before, pairs_after),
    }
    run.table("held-out prompts", rows[:3])
    for title, (x, y) in tables.items():
        run.table(title, [{"metric": name, "before": x[name], "after": y[name]} for name in x])
    about = {
        "before": metrics_before,
        "after": metrics_after,
        "n": len(rows),
        "judge": run.args.judge_fn,
        "pairs before": pairs_before,
        "pairs": pairs_after,
        "number of pairs": num_pairs,
    }
    (run.folder / "evaluation.json").write_text(json.dumps(about, indent=2))
    lines = [json.dumps(row) + "\n" for row in rows]
    (run.folder / "evaluation_samples.jsonl").write_text("".join(lines))
    evaluation = metrics_after | pairs_after
    run.accelerator.log({f"eval/{name}": x for name, x in evaluation.items()}, step=run.updates)


# ---- Command line ------------------------------------------------------------------------------------------

# Flags that may change when a run is resumed: they do not change its result, or prolong it.
MAY_CHANGE = (
    *("resume", "eval_every", "save_every", "keep_checkpoints", "log_with", "num_train_epochs"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "judge_fn"),
)
# Flags with which a recipe describes its own data. They do not apply to other data.
OF_DATA = ("eval_dataset_name", "judge_fn")


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
