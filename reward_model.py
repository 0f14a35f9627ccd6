"""Train the reward model that PPO and RLOO use, from labels, preferences or rankings of texts.

If you know how to train a text classifier, this is what changes when it serves as a reward:

1. The columns of the data decide what is learned. With labels, the model is an ordinary classifier, and the
   reward is the logit of one label (ppo_sentiment.py's --reward-label). With preferences or rankings, it has
   one output, the score, and learns that the better of two responses to the same prompt has the higher score
   (Bradley-Terry).

       text, label                     a classifier of texts
       dialog, act                     a classifier of intents: the reward in ppo_dialog.py
       [prompt,] chosen, rejected      one score; without the column prompt, both texts include it
       [prompt,] responses             one score; the responses are ranked, best first

   act is the intent of each utterance as a number: 1 is the first name in --label-names. Every utterance
   but the first gives one text: the previous utterance, then this one. An optional column, margin, says how
   much higher the better score should be.

   Prompts and responses are texts, or chats (lists of messages).

2. A decoder is read at its last real token, found by the length of the text. Looking for `token != pad` would
   miss a real EOS, because many tokenizers use EOS as the padding token.
3. A prompt and its response are tokenized as in the rollouts: prompt, response, EOS. (A chat ends as its chat
   template ends it. BERT's family: [CLS] ... [SEP].) If they are too long, the prompt loses its first tokens,
   but not BOS, and the same ones for all responses. A labeled text is tokenized as it is. If it is too long,
   it loses its end; an utterance with its answer loses its beginning.
4. The new head of a decoder starts with weights of standard deviation 1 / sqrt(d + 1), so the first scores
   have a magnitude of about 1 (N+ paper, detail 11).
5. All responses to a prompt are in the same forward pass, which reads the prompt only once if the model can
   (`can_share_prompts`). Each pair of them is a term of the loss, and the weights of these pairs add up to 1.
   So a prompt with many responses counts no more than one with two (InstructGPT).
6. Preferences say nothing about where 0 is. The mean score of good responses is saved as reward_offset
   in config.json, and rloo_tldr.py subtracts it (N+ paper, detail 15). Plain transformers ignores it.
7. ppo_sentiment.py scores the first words of a review. --min-prefix-length cuts the training texts at random
   tokens, so that a classifier of texts learns to judge beginnings too. The final accuracy is measured on
   whole texts.
8. Models are trained without dropout, as in the other scripts.

    python reward_model.py                       # recipe tiny: how checkpoints/reviews-sentiment was made
    python reward_model.py tiny-tldr             # how checkpoints/tldr-reward was made, from preferences
    python reward_model.py tiny-dialog           # a classifier like checkpoints/dialogs-intent
    python reward_model.py distilbert-imdb       # like lvwerra/distilbert-imdb, from the Hub
    python reward_model.py smollm2-imdb          # the reward of ppo_sentiment.py's recipe: MiniLM, in minutes
    python reward_model.py tldr-pythia-1b        # the reward model of the N+ paper, from the Hub
    python reward_model.py --model-name-or-path my_lm --dataset-name my_folder
    torchrun --nproc_per_node 2 reward_model.py  # two processes, twice the batch
    python reward_model.py --resume RUN_FOLDER   # continue a stopped run; on a CPU, bit for bit

The result loads with AutoModelForSequenceClassification; a classifier of texts works in transformers.pipeline
too. With preferences, a decoder's score is read at the last of the tokens that `preference_ids` makes.

Part I is the algorithm: flags, math, loop, evaluation, texts, model. Part II is infrastructure: models, data,
processes, run folder, flags. Papers: Learning to Summarize from Human Feedback (Stiennon et al. 2020),
InstructGPT (Ouyang et al. 2022), The N+ Implementation Details of RLHF with PPO (Huang et al. 2024).
Results, metrics, which lines to change for what: docs/reward_model.md.
"""

# `uv run reward_model.py` installs these packages and needs no other set-up.
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
import itertools
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
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.cache_utils import LinearAttentionCacheLayerMixin

# ============================================================================================================
# Part I: the algorithm
# ============================================================================================================


@dataclass
class Args:
    """The defaults train a classifier of film reviews, like lvwerra/distilbert-imdb.

    A command line that names no recipe and no model starts from the recipe tiny, which replaces some of these
    defaults.
    """

    # Run
    recipe: tyro.conf.Suppress[str] = "custom"  # first word of the command line
    seed: int = 1  # random seed; all sampling is a function of (seed, update)
    output_dir: str | None = None  # run folder (default: runs/<script>/<recipe>-s<seed>-<time>)
    resume: str | None = None  # continue the run in this folder
    eval_every: int = 0  # updates between evaluations during training (0: only at the end)
    save_every: int = 100  # updates between checkpoints (0: only at the end, or after a signal)
    keep_checkpoints: int = 2  # number of checkpoints to keep
    log_with: Literal["none", "wandb", "tensorboard"] = "none"  # a tracker, in addition to metrics.jsonl

    # Models
    model_name_or_path: str = "distilbert/distilbert-base-uncased"  # a language model gets a new head
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"  # of a decoder's matmuls; auto: bf16 on GPUs
    gradient_checkpointing: bool = False  # recompute activations in the backward pass to save memory
    lora_r: int = 0  # LoRA rank (0: train all weights); the head is always trained in full
    lora_alpha: int = 32  # LoRA scale: the adapter adds lora_alpha / lora_r * B A
    lora_target_modules: str = "all-linear"  # layers with an adapter: comma-separated names, or all-linear

    # Data
    dataset_name: str = "stanfordnlp/imdb"  # columns text, label | chosen, rejected | responses | dialog, act
    train_shard: str = "0/1"  # i/n: part i of n of the rows; 0/2 and 1/2: two independent models
    center_dataset_name: str | None = None  # source of reward_offset; None: the best training responses
    label_names: str | None = None  # comma-separated names of classes 0, 1, ...; None: the labels themselves
    chat_template_kwargs: str | None = None  # template options, in JSON: {"enable_thinking": false}
    max_length: int = 512  # in tokens; a longer text (column text) loses its end, all others their beginning
    min_prefix_length: int = 0  # column text: cut training texts at random, to N tokens or more (0: never)
    num_eval_prompts: int = 25_000  # maximum number of held-out rows to score at the end

    # Batch: per_device_train_batch_size x gradient_accumulation_steps x processes
    num_train_epochs: float = 2.0  # epochs over the training rows, rounded to whole updates (at least one)
    per_device_train_batch_size: int = 16  # rows per forward and backward pass, with all responses of each
    gradient_accumulation_steps: int = 1  # micro-batches per optimizer step

    # Optimizer
    learning_rate: float = 5e-5  # the highest learning rate of the schedule
    optimizer: str = "torch.optim.AdamW"  # dotted name; AdamW's weight decay is its default, 0.01
    adam_eps: float = 1e-8  # epsilon of Adam (the N+ paper uses 1e-5)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "linear"  # shape after the warm-up
    warmup_ratio: float = 0.0  # fraction of updates in which the learning rate rises to its full value
    max_grad_norm: float | None = 1.0  # clip the gradient to this norm; None: no clipping


RECIPES = {
    "tiny": Args(  # checkpoints/reviews-sentiment
        model_name_or_path="checkpoints/reviews-lm",
        dataset_name="data/reviews",
        label_names="negative,positive",
        max_length=128,
        min_prefix_length=3,  # PPO scores texts of a few words, so the classifier must be right on them
        dtype="float32",
        num_train_epochs=10.0,
        per_device_train_batch_size=32,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_ratio=0.1,
    ),
    "tiny-tldr": Args(  # checkpoints/tldr-reward
        model_name_or_path="checkpoints/tldr-sft",
        dataset_name="data/tldr-preference",
        center_dataset_name="data/tldr",
        max_length=224,
        dtype="float32",
        num_train_epochs=4.0,
        per_device_train_batch_size=32,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_ratio=0.1,
    ),
    "tiny-dialog": Args(  # like checkpoints/dialogs-intent
        model_name_or_path="checkpoints/dialogs-lm",
        dataset_name="data/dialogs",
        label_names="inform,question,directive,commissive",
        max_length=64,
        dtype="float32",
        num_train_epochs=2.0,
        per_device_train_batch_size=64,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        warmup_ratio=0.1,
    ),
    "distilbert-imdb": Args(label_names="negative,positive"),  # like lvwerra/distilbert-imdb
    "smollm2-imdb": Args(  # the reward of ppo_sentiment.py's recipe of this name: docs/real_models.md
        model_name_or_path="sentence-transformers/all-MiniLM-L6-v2",
        output_dir="runs/smollm2-imdb/reward",
        label_names="negative,positive",
        max_length=96,
        min_prefix_length=3,  # PPO's texts are short
        num_eval_prompts=1_500,
        num_train_epochs=0.5,  # 12,500 reviews
        per_device_train_batch_size=32,
        learning_rate=1e-4,
        lr_scheduler_type="cosine",
        warmup_ratio=0.1,
    ),
    "smollm2-dailydialog": Args(  # the intent of ppo_dialog.py's recipe of this name
        model_name_or_path="sentence-transformers/all-MiniLM-L6-v2",
        output_dir="runs/smollm2-dailydialog/intent",
        dataset_name="OpenRL/daily_dialog",
        label_names="inform,question,directive,commissive",
        max_length=96,
        num_eval_prompts=3_000,
        num_train_epochs=0.25,  # about 19,000 answers
        per_device_train_batch_size=32,
        learning_rate=1e-4,
        lr_scheduler_type="cosine",
        warmup_ratio=0.1,
    ),
    "tldr-pythia-1b": Args(  # N+ paper, table 3
        model_name_or_path="cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr",
        dataset_name="trl-lib/tldr-preference",
        center_dataset_name="trl-lib/tldr",
        max_length=638,
        num_eval_prompts=2_000,
        num_train_epochs=1.0,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=8,
        learning_rate=3e-6,
        adam_eps=1e-5,
        lr_scheduler_type="cosine",
    ),
    "hh": Args(
        model_name_or_path="EleutherAI/pythia-160m",
        dataset_name="Anthropic/hh-rlhf",
        num_eval_prompts=5_000,
        num_train_epochs=1.0,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=8,
        learning_rate=1e-5,
        warmup_ratio=0.1,
    ),
    "roberta-dailydialog": Args(  # like rajkumarrrk/roberta-daily-dialog-intent-classifier
        model_name_or_path="FacebookAI/roberta-base",
        dataset_name="OpenRL/daily_dialog",
        label_names="inform,question,directive,commissive",
        max_length=128,
        learning_rate=2e-5,
        warmup_ratio=0.1,
    ),
}


# ---- Math: pure functions of tensors -----------------------------------------------------------------------
#
# Shapes: B rows of the data per update, n in a micro-batch; L tokens; Q tokens that are read once per row.
# A row (`Row`) is a labeled text, or a prompt with two or more responses, best first. row.texts are its texts
# as lists of token ids. In a shape, `texts` is the number of texts in a micro-batch; they are numbered across
# its rows. N is the number of pairs of texts, each a better and a worse response to the same prompt:
#
#     row   responses   texts      better, worse             weight
#     0     a > b > c   0, 1, 2    (0, 1), (0, 2), (1, 2)    1/3 each
#     1     d > e       3, 4       (3, 4)                    1


def length_mask(lengths, max_length):
    """True on the first `lengths` positions of each row. [B] -> bool [B, max_length]"""
    return torch.arange(max_length, device=lengths.device) < lengths[:, None]


def pair_loss(better, worse, min_difference=0.0):
    """-log P(the better one is preferred), where P = sigmoid(score difference) (Bradley-Terry). [N] -> [N]

    min_difference, in units of the score, asks for a larger difference between texts that differ more in
    quality (the margin of Llama 2, section 3.2.2).
    """
    return -F.logsigmoid((better - worse).float() - min_difference)


def pair_table(rows, device):
    """All pairs of responses to the same prompt (Ouyang et al. 2022, eq. 1). -> four tensors [N]

    better, worse: numbers of texts (the texts of all rows are numbered consecutively); weight: the weights of
    a row's pairs are equal and add up to 1, so that all rows count alike; min_difference of the pair's row
    """
    table = []
    first = 0  # the number of the row's first text
    for row in rows:
        pairs = list(itertools.combinations(range(len(row.texts)), 2))  # better before worse
        table += [(first + i, first + j, 1 / len(pairs), row.min_difference) for i, j in pairs]
        first += len(row.texts)
    return [torch.tensor(column, device=device) for column in zip(*table)]


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
    """The whole run, from the flags to the final table. -> (model, run folder)"""
    check_numbers(args)
    accelerator = start_accelerator(args)
    device, world = accelerator.device, accelerator.num_processes
    n = args.per_device_train_batch_size
    B = n * args.gradient_accumulation_steps * world  # rows per update

    tokenizer = load_tokenizer(args.model_name_or_path)
    set_template_options(tokenizer, args)
    # references: good responses, whose mean score becomes reward_offset (point 6)
    train_rows, held_out_rows, references, label_names, counts = load_data(args, tokenizer)
    has_labels = label_names is not None
    if not has_labels and tokenizer.cls_token_id is None:
        # A decoder's prompt and response are tokenized separately. If the tokenizer appended EOS to every
        # text, there would be one between them.
        refuse_appended_eos(tokenizer, args.model_name_or_path)
    updates = max(1, round(args.num_train_epochs * len(train_rows) / B))
    # What the progress bar shows: label -> metric.
    run = Run(args, accelerator, updates, status={"loss": "loss", "accuracy": "accuracy"})

    classifier, has_new_head = build_classifier(args, tokenizer, train_rows, label_names)
    # Three names for the same weights. `classifier` is evaluated and saved. `wrapper` has the forward pass of
    # the update. `learner`, below, is what the optimizer trains: wrapper itself, DDP around it or, with FSDP2
    # and ZeRO-3, a sharded copy.
    wrapper = ClassLogits(classifier)
    shares_prompts = not has_labels and can_share_prompts(wrapper, train_rows, accelerator)
    is_decoder = hasattr(classifier, "score")  # transformers' name of a decoder's head; BERT has a classifier
    is_bf16 = is_decoder and wants_bf16(args, device)  # BERT runs in fp32: see sequence_logits
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=is_bf16)
    head = "a new head" if has_new_head else "the head that was saved with the model"
    outputs = f"classes 0, 1, ...: {', '.join(label_names)}" if has_labels else "one score"
    accelerator.print(
        f"recipe {args.recipe}: {args.model_name_or_path} on {args.dataset_name}, {device}, bf16: {is_bf16}\n"
        f"{head}; {outputs}\n"
        f"{counts}\n"
        f"the first text ends with {tokenizer.decode(train_rows[0].texts[0])[-80:]!r}\n"
        f"batch: {n} rows per pass x {args.gradient_accumulation_steps} accumulated x {world} processes "
        f"= {B} rows; {updates} optimizer steps"
    )

    # With FSDP2 and ZeRO-3, the wrapper is on the CPU until an evaluation. Otherwise it moves back at once.
    learner, optimizer = make_learner(wrapper.cpu(), args, accelerator)
    if is_bf16:  # autocast would round frozen weights (with LoRA or shared layers) in every pass
        round_frozen_weights(classifier, only_if_exact=True)
    state = run.start(B)  # update 0 in a new run

    def evaluate():
        """Score the held-out rows. -> metrics, table (list of dicts)"""
        copy_weights(learner, wrapper)  # does nothing if they share their weights
        wrapper.to(device)
        with autocast:
            logits = score_rows(classifier, held_out_rows, accelerator)  # [texts, classes or 1]
        if has_labels:
            return evaluate_labels(logits, held_out_rows, label_names)
        return evaluate_pairs(logits.squeeze(-1), held_out_rows)

    for update in range(state["update"] + 1, updates + 1):
        # 1. Batch: the next B rows of an endless stream of shuffled passes. For a given B, the result does
        #    not depend on the number of processes, up to rounding.
        start_time = time.time()
        row_numbers = stream_rows(len(train_rows), (update - 1) * B, B, args.seed)
        batch = [train_rows[i] for i in row_numbers.tolist()]
        if args.min_prefix_length > 0:
            batch = cut_to_prefixes(batch, tokenizer, args, update)

        # 2. Gradient. Each process works on its share of the batch, n rows at a time. The loss is the sum
        #    over this process's rows, divided by the number of rows on all processes. So the gradient does
        #    not depend on how the batch is split.
        learner.train(args.gradient_checkpointing)  # there is no dropout; only checkpointing needs train mode
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, update, updates)
        metric_sums = defaultdict(float)  # sums over the rows of all micro-batches
        all_scores = []  # of all responses; empty with labels
        lengths = torch.tensor([max(len(ids) for ids in row.texts) for row in batch])  # [B]
        with accelerator.split_between_processes(torch.arange(B)) as share:
            share = share[lengths[share].argsort(stable=True)]  # similar lengths: less padding
        for places in share.split(n):  # places in the batch
            rows = [batch[i] for i in places.tolist()]
            # ids, mask [texts, L]: the texts. If the model can share prompts, the common beginning of a row's
            # texts is in prefixes [n, Q] instead. row_of_text [texts]: which prefix comes before a text.
            prefixes, ids, mask, row_of_text = collate_texts(rows, device, shares_prompts)

            with accelerator.accumulate(learner):  # processes exchange gradients only in the last micro-batch
                with autocast:
                    logits = learner(prefixes, ids, mask, row_of_text)  # [texts, classes or 1]
                if has_labels:
                    labels = torch.tensor([row.label for row in rows], device=device)  # [n]
                    weight = 1.0  # for each text
                    losses = F.cross_entropy(logits, labels, reduction="none")
                    unreduced = {"loss": losses, "accuracy": logits.argmax(-1) == labels}
                else:
                    scores = logits.squeeze(-1)  # [texts]
                    all_scores += scores.tolist()
                    better, worse, weight, min_difference = pair_table(rows, device)  # [N] each
                    losses = pair_loss(scores[better], scores[worse], min_difference)
                    differences = scores[better] - scores[worse]  # [N]
                    # TRL calls the difference "margin". The data's column of that name is min_difference.
                    unreduced = {"loss": losses, "accuracy": differences > 0, "margin": differences}
                loss = (weight * losses).sum() / B
                # We want the sum, but DDP averages over processes and accelerate over micro-batches.
                accelerator.backward(loss * world * args.gradient_accumulation_steps)

            for name, x in unreduced.items():
                metric_sums[name] += (weight * x.detach()).sum()

        # 3. Optimizer step.
        assert accelerator.sync_gradients, "no optimizer step: too few or too many micro-batches"
        grad_norm = accelerator.clip_grad_norm_(learner.parameters(), args.max_grad_norm or math.inf)
        optimizer.step()
        optimizer.zero_grad()

        # 4. Log and save. loss, accuracy, margin (the mean difference) and *_reward are names of TRL's
        #    RewardTrainer.
        metric_sums = accelerator.reduce(dict(metric_sums), "sum")  # it cannot reduce a defaultdict
        num_tokens = sum(len(ids) for row in batch for ids in row.texts)
        metrics = {
            "update": update,
            "epoch": update * B / len(train_rows),
            "lr": optimizer.param_groups[0]["lr"],
            **{name: x / B for name, x in metric_sums.items()},  # loss, accuracy, margin
            "grad_norm": unshard(grad_norm),  # before clipping
            # There is no rollout here, so its time is 0.
            **performance_metrics(start_time, start_time, num_tokens, device),
        }
        if not has_labels:
            all_scores = accelerate.utils.gather_object(all_scores)
            metrics |= {
                "min_reward": min(all_scores),
                "mean_reward": fmean(all_scores),
                "max_reward": max(all_scores),
            }
        if args.eval_every and update % args.eval_every == 0 and update < updates:
            evaluation, _ = evaluate()
            metrics |= {f"eval/{name}": x for name, x in evaluation.items() if isinstance(x, float)}
        run.log(metrics)
        run.checkpoint({"update": update, "batch_size": B})

    # 5. Evaluate on held-out rows. rloo_tldr.py will subtract the mean score of the references, which are
    #    completions of center_dataset_name, or the best responses of training rows.
    evaluation, table = evaluate()
    if not has_labels:
        with autocast:
            offset = score_rows(classifier, references, accelerator).mean().item()
        evaluation["reward_offset"] = classifier.config.reward_offset = offset
        source = args.center_dataset_name or "the best training responses"
        accelerator.print(f"reward_offset: {offset:.3f}, the mean score of {len(references)} texts: {source}")

    # 6. Report and save.
    if accelerator.is_main_process:
        run.table(f"{evaluation['n']} held-out rows, accuracy {evaluation['accuracy']:.4f}", table)
        (run.folder / "evaluation.json").write_text(json.dumps(evaluation, indent=2))
        accelerator.log(
            {f"eval/{name}": x for name, x in evaluation.items() if isinstance(x, float)},
            step=updates,
        )
        save_reward_model(classifier, tokenizer, args, run.folder / "model")
    run.finish()
    return classifier, run.folder


# ---- Evaluation --------------------------------------------------------------------------------------------


def score_rows(classifier, rows, accelerator):
    """Outputs for the texts of all rows; each process computes a share. -> fp32 [texts, classes or 1]"""
    classifier.eval()
    texts = [ids for row in rows for ids in row.texts]
    with accelerator.split_between_processes(texts) as share:
        logits = score_tokens(classifier, share, batch_size=64).tolist() if share else []
    return torch.tensor(accelerate.utils.gather_object(logits))


def evaluate_labels(logits, rows, names):
    """Accuracy and confusion matrix of labeled texts. [texts, classes] -> metrics, table (list of dicts)"""
    labels = torch.tensor([row.label for row in rows])
    predicted = logits.argmax(-1)
    C = len(names)
    confusion = torch.bincount(labels * C + predicted, minlength=C * C).view(C, C)  # [label, predicted]
    metrics = {
        "accuracy": (predicted == labels).float().mean().item(),
        "confusion": confusion.tolist(),
        "labels": names,
        "n": len(rows),
    }
    table = [
        {"label \\ predicted": name, **dict(zip(names, counts))}
        for name, counts in zip(names, confusion.tolist())
    ]
    return metrics, table


def evaluate_pairs(scores, rows):
    """Accuracy, mean score difference and calibration of all pairs. [texts] -> metrics, table (list of dicts)

    The table splits the pairs into five equal parts, by the size of their score difference. Accuracy is the
    share in the right order, and expected is what the model predicts: the mean of sigmoid(|difference|).
    They agree if a score difference means what the Bradley-Terry model says.
    """
    better, worse, weight, _ = pair_table(rows, scores.device)  # [N] each
    differences = scores[better] - scores[worse]  # [N]
    by_size = differences[differences.abs().argsort()]
    table = []
    for part in by_size.tensor_split(min(5, len(differences))):
        sizes = part.abs()
        row = {
            "score difference": f"{sizes[0]:.2f} to {sizes[-1]:.2f}",
            "pairs": len(part),
            "accuracy": (part > 0).float().mean().item(),
            "expected": sizes.sigmoid().mean().item(),
        }
        table.append(row)
    # In the table, all pairs count alike. Here, all rows do, as in training. "margin" is the mean difference.
    metrics = {
        "accuracy": (weight * (differences > 0)).sum().item() / len(rows),
        "margin": (weight * differences).sum().item() / len(rows),
        "calibration": table,
        "n": len(rows),
    }
    return metrics, table


# ---- Texts -------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """A row of the data: a text with its label, or a prompt with each of its responses, best first."""

    texts: list[list[int]]  # token ids of the labeled text, or of prompt + response for each response
    label: int = 0  # number of the class, if there are labels
    min_difference: float = 0.0  # the column margin: how much higher the better score should be


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


def cut_to_prefixes(rows, tokenizer, args, update):
    """Cut each labeled text at a random token. -> list of Row"""
    fractions = torch.rand(len(rows), generator=generator_for(args.seed, "prefix", update)).tolist()
    prefixes = []
    for row, fraction in zip(rows, fractions):
        [ids] = row.texts
        shortest = min(args.min_prefix_length, len(ids))
        length = shortest + round(fraction * (len(ids) - shortest))
        prefix = ids[:length]
        # BERT's [SEP], or an EOS that the tokenizer appends, stays at the end.
        if ids[-1] in (tokenizer.sep_token_id, tokenizer.eos_token_id):
            prefix[-1] = ids[-1]
        prefixes.append(Row([prefix], row.label))
    return prefixes


def collate_texts(rows, device, shares_prompts=False):
    """The texts of all rows as one batch, padded on the right.

    With shares_prompts, the longest common beginning of a row's texts (the prompt, and first words that all
    responses share) is in `prefixes`, which the model reads once. ids and mask then have the rest of each.
    -> prefixes [n, Q], padded with -1 on the left; ids, bool mask [texts, L]; row_of_text [texts]
    """
    prefixes, texts, row_of_text = [], [], []
    for i, row in enumerate(rows):
        length = 0
        if shares_prompts:
            # Each text keeps its last token, where its score is read. (commonprefix works on lists too.)
            length = len(os.path.commonprefix([ids[:-1] for ids in row.texts]))
        prefixes.append(torch.tensor(row.texts[0][:length], dtype=torch.long))
        texts += [torch.tensor(ids[length:]) for ids in row.texts]
        row_of_text += [i] * len(row.texts)
    pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    prefixes = pad(prefixes, padding_value=-1, padding_side="left")
    ids = pad(texts)  # with 0, which the mask hides
    mask = length_mask(torch.tensor([len(text) for text in texts]), ids.shape[1])
    return [x.to(device) for x in (prefixes, ids, mask, torch.tensor(row_of_text))]


def preference_ids(tokenizer, prompt, responses, max_length):
    """Token ids of a prompt with each of its responses, by the same rule in training and in rollouts.

    Texts: a response begins with its own space. EOS is appended even to a response that was cut off at its
    length limit, because the score is read there. Lists of messages: prompt and response are one chat, which
    ends as its template ends it. If a text is longer than max_length, the prompt loses its first tokens, but
    not BOS. All responses lose the same ones, so that they are compared after the same prompt. For example,
    with max_length 5:

        BOS p q r a EOS        ->    BOS r a EOS
        BOS p q r b c EOS      ->    BOS r b c EOS
    -> list of lists
    """
    if isinstance(responses[0], list):  # chats
        chats = [render_chat(tokenizer, prompt + response) for response in responses]
        texts = tokenizer(chats, add_special_tokens=False).input_ids
    elif tokenizer.cls_token_id is not None:  # tokenizers of BERT's family write [CLS] and [SEP] themselves
        texts = tokenizer([prompt + response for response in responses]).input_ids
    else:
        prompt_ids = tokenizer(prompt).input_ids
        response_ids = tokenizer(responses, add_special_tokens=False).input_ids
        texts = [prompt_ids + with_eos(ids, tokenizer) for ids in response_ids]
    refuse_two_bos(tokenizer, texts)
    start = int(texts[0][0] in (tokenizer.bos_token_id, tokenizer.cls_token_id))  # 1: keep the first token
    # Cut the same tokens from all texts until the longest fits, but only tokens that they have in common, and
    # never the last one of a text. (commonprefix works on lists of tokens too.)
    num_shared = max(0, len(os.path.commonprefix([ids[:-1] for ids in texts])) - start)
    num_excess = max(0, max(len(ids) for ids in texts) - max_length)
    shared_cut = min(num_excess, num_shared)
    # If that is not enough, a text that is still too long loses the beginning of its response too.
    cuts = [max(shared_cut, len(ids) - max_length) for ids in texts]
    return [ids[:start] + ids[start + cut :] for ids, cut in zip(texts, cuts)]


def with_eos(ids, tokenizer):
    """Token ids with EOS at the end, unless the text already ends in one."""
    return ids if ids[-1:] == [tokenizer.eos_token_id] else [*ids, tokenizer.eos_token_id]


# ---- Model -------------------------------------------------------------------------------------------------


class ClassLogits(nn.Module):
    """The classifier with the forward pass of the update, so that DDP, FSDP2 or DeepSpeed can wrap it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, prefixes, ids, mask, row_of_text):
        """Class logits or scores of a batch from collate_texts. -> fp32 [texts, classes or 1]"""
        if prefixes.shape[1] == 0:  # collate_texts has left the prefixes in ids
            return sequence_logits(self.model, ids, mask)
        return shared_prompt_logits(self.model, prefixes, ids, mask, row_of_text)


def shared_prompt_logits(model, prefixes, ids, mask, row_of_text):
    """Class logits of texts whose beginnings, `prefixes`, are read once. -> fp32 [texts, classes]

    The keys and values of a prefix serve all texts of its row, and gradients flow back through them: nothing
    is approximated.
    """
    body = model.base_model
    cache = transformers.DynamicCache(config=model.config)
    prefix_mask = prefixes >= 0  # [n, Q]
    hidden_states(body, prefixes.clamp(min=0), prefix_mask, cache)  # fills the cache
    # Not cache.batch_select_indices: on a CPU, its gradient is added up in a varying order, and a resumed run
    # would not be the same bit for bit.
    cache.reorder_cache(row_of_text)  # keys and values [n, ...] -> [texts, ...]
    full_mask = torch.cat([prefix_mask[row_of_text], mask], 1)  # [texts, Q + L]
    hidden = hidden_states(body, ids, full_mask, cache)  # [texts, L, H]
    last = mask.sum(1) - 1  # [texts]
    with torch.autocast(ids.device.type, enabled=False):  # bf16 would round the logits
        return model.score(hidden[torch.arange(len(ids), device=ids.device), last].float())


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


# ============================================================================================================
# Part II: infrastructure. load_data and the functions it calls turn columns into Rows, and build_classifier
# gives a model its head. The scripts share most of the other functions, copied verbatim, so a few arguments,
# return values and names of flags are used only in another script.
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


def set_template_options(tokenizer, args):
    """Make the values of --chat-template-kwargs the defaults of the chat template.

    The template is saved with the model, so the next script and plain transformers render chats alike.
    """
    # transformers passes these itself, so their defaults would have no effect.
    passed = {"messages", "tools", "documents", "add_generation_prompt", *tokenizer.special_tokens_map}
    for name, value in json.loads(args.chat_template_kwargs or "{}").items():
        template = tokenizer.chat_template or ""
        if name in passed or not re.search(rf"\b{name}\b", template):
            raise UserError(f"--chat-template-kwargs: the chat template has no option {name}")
        tokenizer.chat_template = f"{{% set {name} = {name} | default({value!r}) %}}\n{template}"


def can_reuse_prompts(model):
    """True if a prompt that is read once can serve several responses, with gradients.

    Gradient checkpointing excludes a cache. Linear attention and convolutions (Qwen3.5, LFM2) have no keys
    and values in theirs, but a state that every token overwrites.
    """
    layers = transformers.DynamicCache(config=model.config).layers
    has_states = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)
    return not (has_states or model.is_activation_checkpointing)


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


def has_head(name, num_labels):
    """True if a model, or a LoRA adapter, was saved as a classifier with this number of labels."""
    path = resolve_path(name)
    if transformers.utils.peft_utils.find_adapter_config_file(path) is not None:
        import peft

        adapter = peft.PeftConfig.from_pretrained(path)  # for SEQ_CLS, peft saves the head with the adapter
        return adapter.task_type == "SEQ_CLS" or has_head(adapter.base_model_name_or_path, num_labels)
    config = transformers.AutoConfig.from_pretrained(path)
    return "ForSequenceClassification" in str(config.architectures) and config.num_labels == num_labels


def build_classifier(args, tokenizer, train_rows, label_names):
    """A model with one output per label or, without labels, with one output, the score.

    -> model, bool: True if its head is new
    """
    name = args.model_name_or_path
    labels = label_names or ["LABEL_0"]  # transformers' name for a single output
    is_new = not has_head(name, len(labels))
    model = load_model(
        AutoModelForSequenceClassification,
        name,
        new_head=is_new,
        ignore_mismatched_sizes=is_new,  # a head for another number of labels is replaced
        id2label=dict(enumerate(labels)),
        label2id={label: i for i, label in enumerate(labels)},
    )
    if is_new and hasattr(model, "score"):  # of a decoder. BERT's family keeps what transformers made.
        nn.init.normal_(model.score.weight, std=(model.score.in_features + 1) ** -0.5)
    if not all(p.is_floating_point() for p in model.parameters()):
        raise UserError(f"{name}: quantized weights cannot be trained here")
    if model.config.model_type in ("xlnet", "ctrl", "modernbert-decoder"):
        raise UserError(f"{name}: {model.config.model_type} reads the last position, which may be padding")
    if context_length(model.config) < args.max_length:
        raise UserError(f"{name} reads fewer tokens than --max-length {args.max_length}")
    # For users of the saved model: transformers reads the last token that is not the pad. If texts end with
    # EOS, and pad is EOS, that is the wrong token. Then the config gets no pad: transformers reads the last
    # token of a single text, and refuses batches.
    ends_with_pad = any(ids[-1] == tokenizer.pad_token_id for row in train_rows for ids in row.texts)
    model.config.pad_token_id = None if ends_with_pad else tokenizer.pad_token_id
    model.config.problem_type = None  # pipelines would apply the one of an earlier training
    vars(model.config).pop("reward_offset", None)  # of an earlier run; with preferences, train sets it again
    if args.gradient_checkpointing:
        # transformers' new name for gradient_checkpointing_enable
        model.activation_checkpointing_enable(dict(use_reentrant=False))
    if args.lora_r:  # for the transformer only; the head is trained in full, and BERT's pooler with it
        setattr(model, model.base_model_prefix, add_lora(model.base_model, args))
        for key, p in model.named_parameters():
            if "pooler" in key:
                p.requires_grad_(True)
    return model, is_new


@torch.no_grad()
def can_share_prompts(wrapper, rows, accelerator):
    """True if the scores stay the same when the common beginning of two texts is read once."""
    classifier = wrapper.model
    # BERT reads in both directions. FSDP2 gathers a layer for its backward pass only if the layer's output
    # gets a gradient. Of a prompt's last layer, only the keys and values are used, so its output gets none.
    is_decoder = hasattr(classifier, "score")  # transformers' name of a decoder's head; BERT has a classifier
    if not is_decoder or accelerator.distributed_type == "FSDP":
        return False
    if not can_reuse_prompts(classifier):
        return False
    # The longest row, which exposes a sliding window, and the shortest one, which needs padding next to it.
    rows = sorted(rows, key=lambda row: max(map(len, row.texts)))
    rows = [rows[0], rows[-1]]
    wrapper.eval().to(accelerator.device)
    alone = wrapper(*collate_texts(rows, classifier.device, shares_prompts=False))
    shared = wrapper(*collate_texts(rows, classifier.device, shares_prompts=True))
    return torch.allclose(alone, shared, rtol=0.01, atol=0.01)  # TF32 rounds by about 0.001


def save_reward_model(model, tokenizer, args, folder):
    """Save what plain transformers loads, with LoRA merged; the tokenizer can truncate at --max-length."""
    model.float()  # frozen weights may be in bf16
    if args.lora_r:
        setattr(model, model.base_model_prefix, model.base_model.merge_and_unload())
    model.save_pretrained(folder)
    tokenizer.model_max_length = args.max_length
    tokenizer.init_kwargs["truncation_side"] = tokenizer.truncation_side  # else it is not saved
    tokenizer.save_pretrained(folder)


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


def load_data(args, tokenizer):
    """-> training rows, held-out rows, references (lists of Row); label_names (list of str; None:
    preferences); counts (str: how many rows are used, and how many are cut)

    References are the texts whose mean score is saved as reward_offset (point 6). With labels there are none.
    """
    train, held_out = load_splits(args.dataset_name)
    columns = {name for row in train for name in row}
    is_dialog = {"dialog", "act"} <= columns
    is_text = {"text", "label"} <= columns and not is_dialog
    if args.min_prefix_length and not is_text:
        raise UserError(
            f"--min-prefix-length is only for the columns text and label; it is {args.min_prefix_length} (by "
            f"recipe {args.recipe} or a flag), and 0 turns it off"
        )
    num_special = tokenizer.num_special_tokens_to_add()  # BERT's [CLS] and [SEP]
    if 0 < args.min_prefix_length <= num_special:
        raise UserError(f"--min-prefix-length must be more than {num_special}, the number of special tokens")
    if is_dialog and args.label_names is None:
        raise UserError("--label-names is missing: the names of the acts 1, 2, ...")
    if args.center_dataset_name is not None and (is_text or is_dialog):
        raise UserError("--center-dataset-name is only for preferences: labels need no reward_offset")
    # Texts that are too long lose their beginning, because a response, or an answer, is at the end.
    tokenizer.truncation_side = "right" if is_text else "left"
    train = select_shard(train, args.train_shard)  # whole dialogs, so that no two shards share one
    if is_dialog:
        train, held_out = load_answers(train), load_answers(held_out)
    order = torch.randperm(len(held_out), generator=generator_for(args.seed, "held-out"))
    held_out = [held_out[i] for i in order[: args.num_eval_prompts].tolist()]

    if is_text or is_dialog:
        label_names, class_of = find_classes(train, args)
        load_rows = partial(load_labeled_rows, class_of)
    else:
        label_names, load_rows = None, load_preference_rows
    train, train_counts = load_rows(train, tokenizer, args)
    held_out, held_out_counts = load_rows(held_out, tokenizer, args)
    references = load_reference_rows(train, tokenizer, args) if label_names is None else []
    counts = f"training: {train_counts}\nheld out: {held_out_counts}"
    return train, held_out, references, label_names, counts


def select_shard(rows, train_shard):
    """Part i of n of the rows, for "i/n". They are shuffled first: files are often sorted by label."""
    part, parts = map(int, train_shard.split("/"))
    if not 0 <= part < parts:
        raise UserError(f"--train-shard {train_shard}: the shards are 0/{parts} to {parts - 1}/{parts}")
    if parts == 1:
        return rows
    # The shuffle of datasets: the models in checkpoints/ were trained on its shards.
    numbers = datasets.Dataset.from_dict({"row": range(len(rows))})
    numbers = numbers.shuffle(seed=0).shard(parts, part)  # the same parts for every --seed
    return [rows[i] for i in numbers["row"]]


def load_labeled_rows(class_of, rows, tokenizer, args):
    """The rows that have a text. -> list of Row, and their number as a text"""
    used = [row for row in rows if (row.get("text") or "").strip()]
    if not used:
        raise UserError(f"{args.dataset_name}: no row has a text")
    # A tokenizer is faster with many texts at once.
    texts = tokenizer([row["text"] for row in used], truncation=True, max_length=args.max_length).input_ids
    refuse_two_bos(tokenizer, texts)
    labeled = []
    for row, ids in zip(used, texts):
        label = row.get("label")
        if label not in class_of:
            raise UserError(
                f"{args.dataset_name}: label {label!r} is none of {list(class_of)} (of a dialog: act - 1)"
            )
        labeled.append(Row([ids], class_of[label]))
    num_full = sum(len(ids) == args.max_length for ids in texts)
    counts = f"{len(labeled)} of {len(rows)} rows, {num_full} at the limit of {args.max_length} tokens"
    return labeled, counts


def find_classes(rows, args):
    """The names of the classes in the order of their numbers, and a dict: label -> number of its class.

    The names are --label-names, or else the labels themselves, sorted.
    """
    if args.label_names is not None:  # a label is the number of a class or its name
        names = [name.strip() for name in args.label_names.split(",")]
        labels = range(len(names))
    else:
        labels = sorted({row.get("label") for row in rows} - {None, ""})  # load_labeled_rows refuses these
        if any(isinstance(label, float) or re.fullmatch(r"-?\d*\.\d+", str(label)) for label in labels):
            raise UserError(f"{args.dataset_name}: a label is a decimal; classes have whole numbers or names")
        names = [str(label) for label in labels]
    if len(set(names)) < max(2, len(names)):
        raise UserError(f"{args.dataset_name} needs two labels or more, no two equal: {names}")
    class_of = {str(label): number for number, label in enumerate(labels)}  # in a csv file, all are texts
    class_of |= {name: number for number, name in enumerate(names)}
    class_of |= {label: number for number, label in enumerate(labels)}
    return names, class_of


def read_preferences(rows, name):
    """The rows with two or more responses: chosen and rejected or, without them, the column responses.

    -> list of (row, its prompt, its responses, best first)
    """
    preferences = []
    for row in rows:
        responses = row.get("responses")
        if row.get("chosen"):
            responses = [row["chosen"], row.get("rejected")]
        if not isinstance(responses, list):
            continue
        responses = [response for response in responses if str(response or "").strip()]
        if len(responses) < 2:
            continue
        if len({type(response) for response in responses}) > 1:
            raise UserError(f"{name}: some responses of a row are texts, others are lists")
        preferences.append((row, find_prompt(row, responses, name), responses))
    refuse_repeated_prompts(preferences, name)
    return preferences


def refuse_repeated_prompts(rows, name):
    """Raise if most responses begin with their prompt. rows: list of (row, its prompt, its responses)"""
    repeats = []
    for _, prompt, responses in rows:
        repeats += [response[: len(prompt)] == prompt for response in responses if prompt]
    if sum(repeats) > len(repeats) / 2:
        raise UserError(
            f"{name}: most responses begin with their prompt, so it would be read twice: empty that column"
        )


def find_prompt(row, responses, name):
    """The prompt of a row, a text or a chat like its responses. It is empty if they contain it.

    column prompt    responses                          prompt
    text             texts                              the column
    text             chats without a user's question    one message of the user
    text or none     chats with a user's question       empty
    chat             chats without a user's question    the column
    chat             chats with a user's question       refused, if both have one

    If the responses are complete chats, a text in the column prompt is ignored: many data sets repeat the
    question there.
    """
    prompt = row.get("prompt") or ""
    is_contained = False
    if is_chat(responses[0]):
        refuse_template_columns(row, name)
        roles = [message["role"] for message in responses[0]]
        is_contained = "user" in roles[: [*roles, "assistant"].index("assistant")]
    if is_chat(prompt):
        if is_contained and any(message["role"] == "user" for message in prompt):
            raise UserError(f"{name}: the responses contain their prompt; empty the column prompt")
        if prompt[-1]["role"] == "assistant":  # a template would close this message, and begin another one
            raise UserError(f"{name}: a prompt ends with the assistant: move that to the responses")
        return prompt
    if is_contained:
        return []
    columns = {column for column, value in row.items() if isinstance(value, (str, list))}
    columns -= {"chosen", "rejected", "responses"}
    if "prompt" not in row and columns:  # one of them is probably the prompt
        raise UserError(
            f"{name} has no column prompt: rename one of {columns} or, if the responses contain the prompts, "
            "add an empty one"
        )
    if not is_chat(responses[0]):
        return prompt
    return [{"role": "user", "content": prompt}] if prompt else []


def load_reference_rows(train_rows, tokenizer, args):
    """Up to 1,000 responses, whose mean score becomes reward_offset. -> list of Row

    They are the completions of --center-dataset-name, or the best responses of the training rows.
    """
    rows = train_rows
    if args.center_dataset_name is not None:
        rows, _ = load_splits(args.center_dataset_name)
    order = torch.randperm(len(rows), generator=generator_for(args.seed, "center"))[:1000]
    rows = [rows[i] for i in order.tolist()]
    if args.center_dataset_name is None:
        return [Row(row.texts[:1]) for row in rows]
    references = []
    for row in rows:
        if row.get("prompt") and row.get("completion"):
            responses = [row["completion"]]
            references.append((row, find_prompt(row, responses, args.center_dataset_name), responses))
    if not references:
        raise UserError(
            f"--center-dataset-name {args.center_dataset_name}: no row has a prompt and a completion"
        )
    refuse_repeated_prompts(references, args.center_dataset_name)
    texts = [preference_ids(tokenizer, prompt, x, args.max_length) for _, prompt, x in references]
    return [Row(ids) for ids in texts]


def is_chat(value):
    """True for a list of messages (dicts with role and content), False for a text."""
    if isinstance(value, str) and re.match(r"""\s*\[\s*\{\s*["'](role|content)""", value):
        raise UserError(f"a chat must be a list of messages, but this one is a JSON text: {value[:60]}")
    return isinstance(value, list) and len(value) > 0


def refuse_template_columns(row, name):
    """Raise if a row with a chat has other columns that its chat template would need."""
    for column in ("tools", "chat_template_kwargs", "images", "image"):
        if row.get(column):
            raise UserError(f"{name}: chats with the column {column} are not supported")


def render_chat(tokenizer, messages, is_prompt=False):
    """The text of a list of messages, by the tokenizer's chat template. It contains BOS if the model needs
    one, so tokenize it with add_special_tokens=False.

    is_prompt: end where the assistant continues: after the header of its turn or, if the last message is its
    own, inside that message. -> str
    """
    for message in messages:
        if not isinstance(message.get("content"), str):  # templates write a list as Python prints it
            raise UserError(f"the content of a message must be a text: {str(message)[:200]}")
        others = {key for key, x in message.items() if x not in (None, "", [], {})} - {"role", "content"}
        if others:  # the template may read them, as message.key or message['key']
            others -= {*re.findall(r"""[.'"](\w+)""", str(tokenizer.chat_template))}
        if others:
            raise UserError(f"a message has {sorted(others)}, which the chat template does not read")
    is_begun = messages[-1]["role"] == "assistant" and is_prompt  # the policy goes on with this message
    return tokenizer.apply_chat_template(
        messages,
        tokenize=False,
        add_generation_prompt=is_prompt and not is_begun,
        continue_final_message=is_begun,
    )


def load_preference_rows(rows, tokenizer, args):
    """The rows with two or more different responses. -> list of Row, and their number as a text"""
    complete = read_preferences(rows, args.dataset_name)
    preferences, num_full, num_equal = [], 0, 0
    for row, prompt, responses in complete:
        texts = preference_ids(tokenizer, prompt, responses, args.max_length)
        different = [ids for i, ids in enumerate(texts) if ids not in texts[:i]]
        num_equal += len(texts) - len(different)
        if len(different) > 1:
            num_full += max(len(ids) for ids in texts) == args.max_length
            preferences.append(Row(different, min_difference=float(row.get("margin") or 0.0)))
    if not preferences:
        raise UserError(
            f"{args.dataset_name} has no columns text and label, or dialog and act, and no row with two "
            f"different responses (chosen and rejected, or responses); its columns are {', '.join(rows[0])}"
        )
    counts = f"{len(preferences)} of {len(rows)} rows, {num_full} at the limit of {args.max_length} tokens"
    num_empty = len(rows) - len(complete)
    left_out = f"{num_empty} rows without two responses, {num_equal} responses equal to a better one"
    return preferences, f"{counts}; left out: {left_out}"


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


def intent_texts(previous, answers):
    """What the intent classifier reads: the utterance before the answer, and the answer. -> list of str"""
    pairs = zip(previous, answers)
    return [f"{' '.join(last.split())} {' '.join(answer.split())}" for last, answer in pairs]


def load_answers(rows):
    """The answers in dialogs. -> list of dict: text is the last utterance and the answer, label is the act

    Acts count from 1, classes from 0. Answers without an act are left out.
    """
    answers = []
    for _, utterances, acts in load_dialogs(rows):
        texts = intent_texts(utterances, utterances[1:])
        for text, act in zip(texts, (acts or [])[1:]):
            if act is not None:
                answers.append({"text": text, "label": act - 1})
    count = sum(len(row.get("dialog") or []) for row in rows)
    accelerate.PartialState().print(
        f"answers with an act: {len(answers)}, in dialogs with {count} utterances"
    )
    return answers


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
