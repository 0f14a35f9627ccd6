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
   much higher the better score should be. Prompts and responses are texts, or chats (lists of messages).

2. A decoder is read at its last real token, found by the length of the text. Looking for `token != pad` would
   miss a real EOS, because many tokenizers use EOS as the padding token.
3. A prompt and its response are tokenized as in the rollouts: prompt, response, EOS. If they are too long,
   the prompt loses its first tokens, the same ones for all responses (`preference_ids`). A labeled text that
   is too long loses its end; an utterance with its answer loses its beginning.
4. The new head of a decoder starts with weights of standard deviation 1 / sqrt(d + 1), so the first scores
   have a magnitude of about 1 (N+ paper, detail 11).
5. All responses to a prompt are in the same forward pass, which reads the prompt only once if the model can
   (`can_share_prompts`). Each pair of them is a term of the loss, and the weights of these pairs add up to 1.
   So a prompt with many responses counts no more than one with two (InstructGPT).
6. Preferences say nothing about where 0 is. The mean score of good responses is saved as reward_offset
   in config.json, and rloo_tldr.py subtracts it (N+ paper, detail 15). Plain transformers ignores it.
7. ppo_sentiment.py scores the first words of a review. --min-prefix-length cuts the training texts at random
   tokens, so that a classifier of texts learns to judge beginnings too. The final accuracy is that on whole
   texts.
8. Models are trained without dropout, as in the RL scripts.

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

Part I is the algorithm: flags, math, loop, evaluation, texts, model. Part II is infrastructure: recipes,
models, data, processes, run folder, flags. Papers: Learning to Summarize from Human Feedback (Stiennon et al.
2020), InstructGPT (Ouyang et al. 2022), The N+ Implementation Details of RLHF with PPO (Huang et al. 2024).
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

import atexit
import csv
import datetime
import gzip
import importlib
import itertools
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
    """The defaults train a classifier of film reviews, like lvwerra/distilbert-imdb. A command line that
    names no recipe and no model starts from the recipe tiny, which replaces some of them."""

    # Run
    recipe: tyro.conf.Suppress[str] = "custom"  # first word of the command line
    seed: int = 1  # random seed; all sampling is a function of (seed, update)
    output_dir: str | None = None  # run folder (default: runs/<script>/<recipe>-s<seed>-<time>)
    resume: str | None = None  # continue the run in this folder, with its flags
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
    num_train_rows: int | None = None  # train on N rows of the data, drawn at random; None: on all
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
    """The whole run, from the flags to the final table. -> (classifier, run folder)"""
    accelerator = start_accelerator(args)
    device, world = accelerator.device, accelerator.num_processes
    n = args.per_device_train_batch_size
    B = n * args.gradient_accumulation_steps * world  # rows per update

    tokenizer = load_tokenizer(args.model_name_or_path)
    set_template_options(tokenizer, args)
    # references: good responses, whose mean score becomes reward_offset (point 6)
    train_rows, held_out_rows, references, label_names = load_data(args, tokenizer)
    has_labels = label_names is not None
    updates = max(1, round(args.num_train_epochs * len(train_rows) / B))
    # What the progress bar shows: label -> metric.
    run = Run(args, accelerator, updates, status={"loss": "loss", "accuracy": "accuracy"})

    classifier, has_new_head = build_classifier(args, tokenizer, train_rows, label_names)
    model = ClassLogits(classifier).to(device)  # the classifier, with the forward pass of the update
    shares_prompts = not has_labels and can_share_prompts(model, train_rows)
    is_decoder = hasattr(classifier, "score")  # transformers' name of a decoder's head; BERT has a classifier
    is_bf16 = is_decoder and wants_bf16(args, device)  # BERT runs in fp32: see sequence_logits
    if is_bf16:
        round_frozen_weights(classifier, only_if_exact=True)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=is_bf16)
    learner, optimizer = make_learner(model, args, accelerator)  # learner: the model, or DDP around it

    outputs = f"classes 0, 1, ...: {', '.join(label_names)}" if has_labels else "one score"
    accelerator.print(
        f"recipe {args.recipe}: {args.model_name_or_path} on {args.dataset_name}, {device}, bf16: {is_bf16}\n"
        f"outputs: {outputs}; the head is new: {has_new_head}\n"
        f"batch: {n} rows per pass x {args.gradient_accumulation_steps} accumulated x {world} processes "
        f"= {B} rows; {updates} optimizer steps"
    )
    state = run.start(B)  # update 0 in a new run

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
                # With 2 processes and 4 micro-batches, they divide by 2 and 4, so multiply by 8.
                accelerator.backward(loss * world * args.gradient_accumulation_steps)

            for name, x in unreduced.items():
                metric_sums[name] += (weight * x.detach()).sum()

        # 3. Optimizer step.
        assert accelerator.sync_gradients, "no optimizer step: too few or too many micro-batches"
        grad_norm = accelerator.clip_grad_norm_(learner.parameters(), args.max_grad_norm or math.inf)
        optimizer.step()
        optimizer.zero_grad(set_to_none=world == 1)  # DDP keeps gradients in its buckets

        # 4. Log and save. loss, accuracy, margin (the mean difference) and *_reward are names of TRL's
        #    RewardTrainer.
        metric_sums = accelerator.reduce(dict(metric_sums), "sum")
        num_tokens = sum(len(ids) for row in batch for ids in row.texts)
        metrics = {
            "update": update,
            "epoch": update * B / len(train_rows),
            "lr": optimizer.param_groups[0]["lr"],
            **{name: x / B for name, x in metric_sums.items()},  # loss, accuracy, margin
            "grad_norm": grad_norm,  # before clipping
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
            with autocast:
                evaluation, _ = evaluate(classifier, held_out_rows, label_names, accelerator)
            metrics |= {f"eval/{name}": x for name, x in evaluation.items() if isinstance(x, float)}
        run.log(metrics)
        run.checkpoint({"update": update, "batch_size": B})

    # 5. Evaluate on held-out rows. rloo_tldr.py will subtract the mean score of the references, which are
    #    completions of center_dataset_name, or the best responses of training rows.
    with autocast:
        evaluation, table = evaluate(classifier, held_out_rows, label_names, accelerator)
        if not has_labels:
            offset = score_rows(classifier, references, accelerator).mean().item()
            evaluation["reward_offset"] = classifier.config.reward_offset = offset
            accelerator.print(f"reward_offset: {offset:.3f}, the mean score of {len(references)} references")

    # 6. Report and save.
    if accelerator.is_main_process:
        run.table(f"{evaluation['n']} held-out rows, accuracy {evaluation['accuracy']:.4f}", table)
        (run.folder / "evaluation.json").write_text(json.dumps(evaluation, indent=2))
        numbers = {f"eval/{name}": x for name, x in evaluation.items() if isinstance(x, float)}
        accelerator.log(numbers, step=updates)
        save_reward_model(classifier, tokenizer, args, run.folder / "model")
    run.finish()
    return classifier, run.folder


# ---- Evaluation --------------------------------------------------------------------------------------------


def evaluate(classifier, rows, label_names, accelerator):
    """Score the held-out rows. -> metrics, table for the screen (list of dicts)"""
    logits = score_rows(classifier, rows, accelerator)  # [texts, classes or 1]
    if label_names is None:
        return evaluate_pairs(logits.squeeze(-1), rows)
    return evaluate_labels(logits, rows, label_names)


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


def load_labeled_rows(class_of, rows, tokenizer, args):
    """The rows that have a text. class_of: from find_classes -> list of Row"""
    used = [row for row in rows if (row.get("text") or "").strip()]
    texts = tokenizer([row["text"] for row in used], truncation=True, max_length=args.max_length).input_ids
    num_full = sum(len(ids) == args.max_length for ids in texts)
    accelerate.PartialState().print(
        f"{len(used)} of {len(rows)} rows have a text, {num_full} at the limit of {args.max_length} tokens"
    )
    return [Row([ids], class_of[row["label"]]) for row, ids in zip(used, texts)]


def find_classes(rows, args):
    """The names of the classes in the order of their numbers, and a dict: label -> number of its class.

    The names are --label-names, or else the labels themselves, sorted.
    """
    if args.label_names is not None:  # a label is the number of a class or its name
        names = [name.strip() for name in args.label_names.split(",")]
        labels = range(len(names))
    else:
        labels = sorted({row.get("label") for row in rows} - {None, ""})
        names = [str(label) for label in labels]
    class_of = {str(label): number for number, label in enumerate(labels)}  # in a csv file, all are texts
    class_of |= {name: number for number, name in enumerate(names)}
    class_of |= {label: number for number, label in enumerate(labels)}
    return names, class_of


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
    accelerate.PartialState().print(f"{len(answers)} of {count} utterances are answers with an act")
    return answers


def load_preference_rows(rows, tokenizer, args):
    """The rows with two or more different responses. -> list of Row"""
    preferences, num_full, num_equal = [], 0, 0
    for row, prompt, responses in read_preferences(rows):
        texts = preference_ids(tokenizer, prompt, responses, args.max_length)
        different = [ids for i, ids in enumerate(texts) if ids not in texts[:i]]
        num_equal += len(texts) - len(different)
        if len(different) > 1:
            num_full += max(len(ids) for ids in texts) == args.max_length
            preferences.append(Row(different, min_difference=float(row.get("margin") or 0.0)))
    accelerate.PartialState().print(
        f"{len(preferences)} of {len(rows)} rows have different responses, {num_full} at the limit of "
        f"{args.max_length} tokens; left out: {num_equal} responses equal to a better one"
    )
    return preferences


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
    ends as its template ends it, as in TRL (in ChatML, the score is read at the last line break). If a text
    is longer than max_length, the prompt loses its first tokens, but not BOS. All responses lose the same
    ones, so that they are compared after the same prompt. For example, with max_length 5:

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


def build_classifier(args, tokenizer, train_rows, label_names):
    """A model with one output per label or, without labels, with one output, the score.

    -> model, bool: True if its head is new
    """
    name = args.model_name_or_path
    labels = label_names or ["LABEL_0"]  # transformers' name for a single output
    saved = transformers.AutoConfig.from_pretrained(resolve_path(name))
    is_classifier = "ForSequenceClassification" in str(saved.architectures)
    is_new = not is_classifier or saved.num_labels != len(labels)
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
    # For users of the saved model: transformers reads the last token that is not the pad. If texts end with
    # EOS, and pad is EOS, that is the wrong token. Then the config gets no pad: transformers reads the last
    # token of a single text, and refuses batches.
    ends_with_pad = any(ids[-1] == tokenizer.pad_token_id for row in train_rows for ids in row.texts)
    model.config.pad_token_id = None if ends_with_pad else tokenizer.pad_token_id
    model.config.problem_type = None  # pipelines would apply the one of an earlier training
    vars(model.config).pop("reward_offset", None)  # of an earlier run; with preferences, train sets it again
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
    if args.lora_r:  # for the transformer only; the head is trained in full, and BERT's pooler with it
        setattr(model, model.base_model_prefix, add_lora(model.base_model, args))
        for key, p in model.named_parameters():
            if "pooler" in key:
                p.requires_grad_(True)
    return model, is_new


@torch.no_grad()
def can_share_prompts(model, rows):
    """True if the scores stay the same when the common beginning of two texts is read once."""
    classifier = model.model
    if not hasattr(classifier, "score") or not can_reuse_prompts(classifier):  # BERT reads in both directions
        return False
    # The longest row, which exposes a sliding window, and the shortest one, which needs padding next to it.
    rows = sorted(rows, key=lambda row: max(map(len, row.texts)))
    rows = [rows[0], rows[-1]]
    alone = model.eval()(*collate_texts(rows, classifier.device, shares_prompts=False))
    shared = model(*collate_texts(rows, classifier.device, shares_prompts=True))
    return torch.allclose(alone, shared, rtol=0.01, atol=0.01)  # TF32 rounds by about 0.001


class ClassLogits(nn.Module):
    """The classifier with the forward pass of the update, so that DDP or DeepSpeed can wrap it."""

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
# Part II: infrastructure. Nothing below is needed to understand the algorithm: it covers recipes, models,
# data, files and flags. The scripts share these functions, copied verbatim. check.py checks flags and data.
# ============================================================================================================

SCRIPT = Path(__file__).stem
HERE = Path(__file__).resolve().parent  # recipes name folders next to this file


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


class UserError(Exception):
    """An error that would otherwise be silent: printed without a traceback, exit code 2."""


# ---- Models ------------------------------------------------------------------------------------------------


def resolve_path(name):
    """A path here or next to this file, or else a Hub name. A run folder means the model in it."""
    for path in (Path(name), HERE / name):
        if path.exists():
            return str(path / "model" if any(path.glob("model/*config.json")) else path)
    return name


def load_model(auto_class, name, new_head=False, **kwargs):
    """A model in fp32 without dropout. Some kinds of layers are replaced by faster equivalents.

    new_head: only the head and BERT's pooler may be missing from the checkpoint.
    """
    path = resolve_path(name)
    if transformers.utils.peft_utils.find_adapter_config_file(path) is not None:
        raise UserError(f"{name} is a LoRA adapter: merge it first (docs/running.md, LoRA)")
    device = accelerate.PartialState().device
    if device.type == "cuda":  # else the models of all processes would be in the CPU's memory first
        kwargs["device_map"] = {"": device}
    model, report = auto_class.from_pretrained(path, dtype=torch.float32, output_loading_info=True, **kwargs)
    missing = [*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])]
    if new_head:  # what is not in the transformer, and BERT's pooler
        body = f"{model.base_model_prefix}."
        missing = [key for key in missing if key.startswith(body) and "pooler" not in key]
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


def load_data(args, tokenizer):
    """-> training rows, held-out rows, references (lists of Row); label_names (list of str; None:
    preferences)

    References are the texts whose mean score is saved as reward_offset (point 6). With labels there are none.
    """
    train, held_out = load_splits(args.dataset_name)
    if args.num_train_rows is not None:  # the same ones for every --seed
        train = random.Random(0).sample(train, min(args.num_train_rows, len(train)))
    columns = {name for row in train for name in row}
    is_dialog = {"dialog", "act"} <= columns
    is_text = {"text", "label"} <= columns and not is_dialog
    # Texts that are too long lose their beginning, because a response, or an answer, is at the end.
    tokenizer.truncation_side = "right" if is_text else "left"
    train = select_shard(train, args.train_shard)  # whole dialogs, so that no two shards share one
    if is_dialog:
        train, held_out = load_answers(train), load_answers(held_out)
    order = torch.randperm(len(held_out), generator=generator_for(0, "held-out"))  # for every --seed
    held_out = [held_out[i] for i in order[: args.num_eval_prompts].tolist()]

    if is_text or is_dialog:
        label_names, class_of = find_classes(train, args)
        load_rows = partial(load_labeled_rows, class_of)
    else:
        label_names, load_rows = None, load_preference_rows
    train, held_out = [load_rows(rows, tokenizer, args) for rows in (train, held_out)]
    references = load_reference_rows(train, tokenizer, args) if label_names is None else []
    return train, held_out, references, label_names


def select_shard(rows, train_shard):
    """Part i of n of the rows, for "i/n". They are shuffled first: files are often sorted by label."""
    part, parts = map(int, train_shard.split("/"))
    if parts == 1:
        return rows
    # The shuffle of datasets: the models in checkpoints/ were trained on its shards.
    numbers = datasets.Dataset.from_dict({"row": range(len(rows))})
    numbers = numbers.shuffle(seed=0).shard(parts, part)  # the same parts for every --seed
    return [rows[i] for i in numbers["row"]]


def load_reference_rows(train_rows, tokenizer, args):
    """Up to 1,000 responses, whose mean score becomes reward_offset. -> list of Row

    They are the completions of --center-dataset-name, or the best responses of the training rows.
    """
    rows = train_rows
    if args.center_dataset_name is not None:
        rows, _ = load_splits(args.center_dataset_name)
    order = torch.randperm(len(rows), generator=generator_for(0, "center"))[:1000]
    rows = [rows[i] for i in order.tolist()]
    if args.center_dataset_name is None:
        return [Row(row.texts[:1]) for row in rows]
    texts = [preference_ids(tokenizer, *x, args.max_length) for x in read_completions(rows)]
    return [Row(ids) for ids in texts]


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


def load_dialogs(rows):
    """The dialogs that have two or more utterances, none of them blank.

    rows: with the columns dialog and, perhaps, act -> list of (row, utterances, acts); acts is None if there
    is not one for each utterance
    """
    dialogs = []
    for row in rows:
        utterances = [(text or "").strip() for text in row.get("dialog") or []]  # they may end with a space
        if len(utterances) >= 2 and all(utterances):
            acts = row.get("act") or []
            dialogs.append((row, utterances, acts if len(acts) == len(utterances) else None))
    return dialogs


def set_global_seed(seed, *purpose):
    """Seed the global generators of python, numpy and torch for one purpose."""
    transformers.set_seed(generator_for(seed, *purpose).initial_seed() % 2**32)


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


# ---- Command line ------------------------------------------------------------------------------------------

# Flags that may change when a run is resumed: they do not change its result, or prolong it.
MAY_CHANGE = (
    *("resume", "eval_every", "save_every", "keep_checkpoints", "log_with", "num_train_epochs"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing"),
)
# Flags with which a recipe describes its own data. They do not apply to other data.
OF_DATA = ("center_dataset_name", "label_names")


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
