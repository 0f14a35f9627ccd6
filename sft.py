"""Supervised fine-tuning of language models, and training small ones from scratch.

If you know nanoGPT's train.py, this is what differs:

1. The data are documents, not one long stream of tokens. Each ends in EOS (or a chat's end of turn), which
   has a label like any other token. A model that never saw EOS as a label never ends a response in PPO.
2. A row holds several whole documents (packing), but they do not see each other: positions start at 0 in
   each document, from which transformers builds a block-diagonal attention mask.
3. With the columns prompt and completion, the loss is on the completion and its EOS only. The two parts are
   tokenized separately, exactly as in reward_model.py and in rollouts.
4. A chat (a list of messages) is rendered by the tokenizer's chat template, and the loss is on the answers
   of the assistant only. A dialog is tokenized utterance by utterance, each with a mark at its end.
5. The loss is a sum over tokens divided by the number of labeled tokens in the global batch. Rows have
   different numbers of labels, so a mean of means would depend on how the batch is split.
6. Logits are computed for 128 positions at a time, and only at positions that have a label.
7. Pretrained models are trained without dropout, as in the other scripts. Models with random weights keep
   the dropout of their config.

    python sft.py                                      # recipe tiny: how checkpoints/reviews-lm was made
    python sft.py tiny-tldr                            # how checkpoints/tldr-sft was made
    python sft.py gpt2-imdb                            # GPT-2 on IMDB, as in lvwerra/gpt2-imdb, from the Hub
    python sft.py qwen-0.5b-chat                       # a chat model: Qwen2.5-0.5B on trl-lib/Capybara
    python sft.py --learning-rate 1e-3                 # tiny with one change; every field of Args is a flag
    python sft.py --model-name-or-path gpt2 --dataset-name my_folder --lora-r 16
    python sft.py --from-config "gpt2 n_layer=4" --model-name-or-path my_tokenizer    # random weights
    torchrun --nproc_per_node 2 sft.py                 # two processes, twice the batch
    python sft.py --resume RUN_FOLDER                  # continue a stopped run; on a CPU, bit for bit

Part I is the algorithm: flags, math, loop, evaluation, documents, model. Part II is infrastructure: recipes,
models, data, processes, run folder. Papers: the first step of InstructGPT (Ouyang et al. 2022), packing
without cross-contamination (Krell et al. 2021), LoRA (Hu et al. 2021), The N+ Implementation Details of RLHF
with PPO (Huang et al. 2024). Results, metrics, which lines to change for what: docs/sft.md.
"""

# `uv run sft.py` installs these packages and needs no other set-up.
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
import bisect
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
from array import array
from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
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

# ============================================================================================================
# Part I: the algorithm
# ============================================================================================================


@dataclass
class Args:
    """The defaults fine-tune GPT-2 on IMDB, as was done for lvwerra/gpt2-imdb. A command line that names no
    recipe and no model starts from the recipe tiny, which replaces some of them."""

    # Run
    recipe: tyro.conf.Suppress[str] = "custom"  # first word of the command line
    seed: int = 1  # random seed; the batches are a function of (seed, update)
    output_dir: str | None = None  # run folder (default: runs/<script>/<recipe>-s<seed>-<time>)
    resume: str | None = None  # continue the run in this folder
    eval_every: int = 0  # updates between evaluations during training (0: only before and after)
    save_every: int = 100  # updates between checkpoints (0: only at the end, or after a signal)
    keep_checkpoints: int = 2  # number of checkpoints to keep
    log_with: Literal["none", "wandb", "tensorboard"] = "none"  # a tracker, in addition to metrics.jsonl
    num_eval_prompts: int = 500  # held-out documents for the before / after table (named as in other scripts)
    num_samples: int = 4  # how many of them the trained model continues at the end, as samples

    # Model
    model_name_or_path: str = "openai-community/gpt2"  # model and tokenizer: a Hub name or a folder
    from_config: str | None = None  # random weights instead: a model type and name=value pairs (JSON values)
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"  # auto: bf16 on GPUs that have it, else float32
    gradient_checkpointing: bool = False  # recompute activations in the backward pass to save memory
    lora_r: int = 0  # LoRA rank (0: train all weights)
    lora_alpha: int = 32  # LoRA scale: the adapter adds lora_alpha / lora_r * B A
    lora_target_modules: str = "all-linear"  # layers with an adapter: comma-separated names, or all-linear

    # Data
    dataset_name: str = "stanfordnlp/imdb"  # columns text | prompt, completion | messages | dialog
    num_train_rows: int | None = None  # train on N examples of the data, drawn at random; None: on all
    chat_template_kwargs: str | None = None  # template options, in JSON: {"enable_thinking": false}
    max_length: int = 512  # tokens per row; longer documents are cut, and lose their EOS
    packing: bool = True  # fill rows with several documents that do not see each other
    completion_only_loss: bool = True  # False: learn the column prompt too (in a chat: its answers)
    utterance_end: str = " <EOU>"  # text after each utterance, as in RL4LMs; eos: EOS, as in DialoGPT

    # Batch: per_device_train_batch_size x gradient_accumulation_steps x processes, in packed rows
    num_train_epochs: float = 1.0  # epochs over the packed rows, rounded to whole updates (at least one)
    per_device_train_batch_size: int = 8  # rows per forward and backward pass on one process
    gradient_accumulation_steps: int = 1  # micro-batches per optimizer step

    # Optimizer
    learning_rate: float = 5e-5  # the highest learning rate of the schedule
    optimizer: str = "torch.optim.AdamW"  # dotted name; with AdamW, all weights decay, biases too
    adam_eps: float = 1e-8  # epsilon of Adam (the N+ paper, Huang et al. 2024, uses 1e-5)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "linear"  # shape after the warm-up
    warmup_ratio: float = 0.0  # fraction of updates in which the learning rate rises to its full value
    max_grad_norm: float | None = 1.0  # clip the gradient to this norm; None: no clipping


# ---- Math --------------------------------------------------------------------------------------------------
#
# Shapes: B packed rows, n in a micro-batch, L positions in a row, V tokens in the vocabulary, H hidden units,
# N positions with a label. Inside a function, B is the number of rows it is given.


def next_token_loss(hidden, weight, labels, bias=None):
    """The sum of the labels' cross-entropies in nats, and how often the model's likeliest token was right.

    hidden [N, H], weight [V, H], labels [N], bias [V] or None -> two scalars. The logits of all N labels may
    need more memory than the model, so they are computed for at most 128 positions at once.
    """
    with torch.autocast(hidden.device.type, enabled=False):  # logits in bf16 would be too coarse
        hidden, weight = hidden.float(), weight.float()
        # F.cross_entropy(F.linear(hidden, weight, bias), labels), but each chunk's gradient is computed right
        # after its loss, so its logits need not be kept. (To weight tokens: reduction="none".)
        chunks = nn.LinearCrossEntropyOptions(batch_chunk_size=128)
        loss_sum = F.linear_cross_entropy(
            hidden, weight, labels, linear_bias=bias, reduction="sum", options=chunks
        )
        correct_sum = 0
        with torch.no_grad():  # it does not return the logits, so compute them again
            for chunk, chunk_labels in zip(hidden.split(128), labels.split(128)):
                predicted = F.linear(chunk, weight, bias).argmax(1)
                correct_sum += (predicted == chunk_labels).sum()
    return loss_sum, correct_sum


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
    """The whole run, from the flags to the final table. -> transformers model, run folder"""
    accelerator = start_accelerator(args)
    device, world = accelerator.device, accelerator.num_processes
    n = args.per_device_train_batch_size
    B = n * args.gradient_accumulation_steps * world  # rows per optimizer step

    tokenizer = load_tokenizer(args.model_name_or_path)
    set_template_options(tokenizer, args)
    train_examples, held_out_examples = load_splits(args.dataset_name)
    if args.num_train_rows is not None:  # the same ones for every --seed
        count = min(args.num_train_rows, len(train_examples))
        train_examples = random.Random(0).sample(train_examples, count)
    documents, left_out = load_documents(train_examples, tokenizer, args)
    rows = pack(documents, args.max_length, args.packing)
    # Held-out documents are drawn at random, because IMDB is sorted: its first reviews are all negative. They
    # are the same ones for every --seed.
    all_held_out, held_out_left_out = load_documents(held_out_examples, tokenizer, args)
    order = torch.randperm(len(all_held_out), generator=generator_for(0, "held-out"))
    held_out = [all_held_out[i] for i in order[: args.num_eval_prompts]]
    held_out_rows = pack(held_out, args.max_length, args.packing)
    updates = max(1, round(args.num_train_epochs * len(rows) / B))
    # What the progress bar shows: label -> metric.
    run = Run(args, accelerator, updates, status={"loss": "loss", "accuracy": "mean_token_accuracy"})

    model = LanguageModel(load_language_model(args, tokenizer, documents)).to(device)
    check_model(model.lm, args)
    is_bf16 = wants_bf16(args, device)
    if is_bf16:
        round_frozen_weights(model.lm, only_if_exact=True)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=is_bf16)
    learner, optimizer = make_learner(model, args, accelerator)  # learner: the model, or DDP around it

    name = f"random weights ({args.from_config})" if args.from_config else args.model_name_or_path
    accelerator.print(
        f"recipe {args.recipe}: {name} on {args.dataset_name}, {device}, bf16: {is_bf16}\n"
        f"training: {len(documents):,} documents of {len(train_examples):,} examples ({left_out})\n"
        f"held out: {len(all_held_out):,} of {len(held_out_examples):,} ({held_out_left_out})\n"
        f"batch: {n} rows per pass x {args.gradient_accumulation_steps} accumulated x {world} processes "
        f"= {B} of {len(rows):,} packed rows; {updates} updates of one optimizer step each"
    )

    # This must come before run.start, which may load a checkpoint: `before` is always the untrained model.
    with autocast:
        before = evaluate(model, held_out_rows, accelerator, args)
    state = run.start(B)  # update 0 in a new run

    for update in range(state["update"] + 1, updates + 1):
        # 1. Batch. Row numbers come from shuffled passes, and are the same on every process. Each process
        #    takes its share of them, in micro-batches of n rows.
        start_time = time.time()
        set_global_seed(args.seed, update, accelerator.process_index)  # for dropout, in models that have it
        row_numbers = stream_rows(len(rows), (update - 1) * B, B, args.seed)  # [B]
        micro_batches = []
        with accelerator.split_between_processes(row_numbers) as share:
            for numbers in share.split(n):
                micro_batches.append(collate_rows([rows[i] for i in numbers], device))
        num_labels = sum((mb["labels"] != -100).sum() for mb in micro_batches)
        num_labels = accelerator.reduce(num_labels)  # in the batch of all processes
        num_tokens = sum(len(ids) for i in row_numbers for ids, _ in rows[i])  # with and without a label

        # 2. Gradient. The loss is the sum over this process's labels, divided by the number of labels on all
        #    processes. So, without dropout, the gradient does not depend on how the batch is split.
        learner.train()
        for group in optimizer.param_groups:  # not later: DeepSpeed takes its step in the last backward pass
            group["lr"] = learning_rate(args, update, updates)
        loss_sum = 0.0
        correct_sum = 0
        for mb in micro_batches:
            # accumulate: processes exchange gradients only at the last micro-batch.
            with accelerator.accumulate(learner):
                with autocast:
                    mb_loss_sum, mb_correct_sum = learner(**mb)
                loss = mb_loss_sum / num_labels
                # We want the sum, but DDP averages over processes and accelerate over micro-batches.
                # With 2 processes and 4 micro-batches, they divide by 2 and 4, so multiply by 8.
                accelerator.backward(loss * world * args.gradient_accumulation_steps)
            loss_sum += mb_loss_sum.detach()
            correct_sum += mb_correct_sum

        # 3. Optimizer step.
        assert accelerator.sync_gradients, "no optimizer step: too few or too many micro-batches"
        grad_norm = accelerator.clip_grad_norm_(learner.parameters(), args.max_grad_norm or math.inf)
        optimizer.step()
        optimizer.zero_grad(set_to_none=world == 1)  # DDP keeps gradients in its buckets

        # 4. Log and save.
        mean_loss = (accelerator.reduce(loss_sum) / num_labels).item()
        metrics = {
            "update": update,
            "epoch": update * B / len(rows),
            "lr": optimizer.param_groups[0]["lr"],
            "loss": mean_loss,
            "mean_token_accuracy": accelerator.reduce(correct_sum) / num_labels,
            "perplexity": math.exp(mean_loss),
            "grad_norm": grad_norm,  # before clipping
            **performance_metrics(start_time, start_time, num_tokens, device),  # no rollout: it takes 0 s
        }
        if args.eval_every and update % args.eval_every == 0 and update < updates:
            with autocast:
                evaluation = evaluate(model, held_out_rows, accelerator, args)
            metrics |= {f"eval/{name}": x for name, x in evaluation.items()}
        run.log(metrics)
        run.checkpoint({"update": update, "batch_size": B})

    # 5. Evaluate on the same held-out documents again, show samples, and save the model.
    with autocast:
        after = evaluate(model, held_out_rows, accelerator, args)
        set_global_seed(args.seed, "samples")
        samples = write_samples(model.lm, tokenizer, held_out[: args.num_samples])
    if accelerator.is_main_process:
        report_evaluation(run, before, after, samples, len(held_out))
        save_policy(model.lm, tokenizer, run.folder / "model")
    run.finish()
    return model.lm, run.folder


# ---- Evaluation --------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(model, rows, accelerator, args):
    """Loss in nats per token, token accuracy and perplexity. Each process takes its share of the rows."""
    model.eval()
    n = args.per_device_train_batch_size
    sums = torch.zeros(3, device=accelerator.device)  # of losses, correct tokens and labels
    with accelerator.split_between_processes(rows) as share:
        for start in range(0, len(share), n):
            batch = collate_rows(share[start : start + n], accelerator.device)
            loss_sum, correct_sum = model(**batch)
            sums += torch.stack([loss_sum, correct_sum, (batch["labels"] != -100).sum()])
    loss_sum, correct_sum, num_labels = accelerator.reduce(sums)
    loss = (loss_sum / num_labels).item()
    accuracy = (correct_sum / num_labels).item()
    return {"loss": loss, "mean_token_accuracy": accuracy, "perplexity": math.exp(loss)}


@torch.no_grad()
def write_samples(lm, tokenizer, documents):
    """Continue each prompt by sampling, up to 40 tokens. -> one dict(prompt, completion) per document

    The prompt is all that comes before the completion, or before the last answer of a chat. A document that
    has labels from its second token on, such as a text or a dialog, is continued after its first 8 tokens.
    """
    context = getattr(lm.config, "max_position_embeddings", None) or math.inf
    samples = []
    for ids, labels in documents:
        # Walk back from the last label to the first one of its run, which is where the completion begins.
        start = max(i for i, label in enumerate(labels) if label != -100)
        while labels[start - 1] != -100:  # this ends, because the first token has no label
            start -= 1
        if start == 1:
            start = min(8, len(ids) - 1)
        tokens = torch.tensor([ids[:start]], device=lm.device)  # [1, L]
        # Not lm.generate, which would follow the model's generation_config: top-k, penalties, ...
        for _ in range(min(40, context - start)):
            probs = lm(tokens, use_cache=False).logits[0, -1].float().softmax(-1)  # [V]
            token = torch.multinomial(probs, 1)
            tokens = torch.cat([tokens, token[None]], 1)
            if token.item() in lm.generation_config.eos_token_id:  # a list: find_end_tokens
                break
        prompt, completion = tokenizer.decode(tokens[0, :start]), tokenizer.decode(tokens[0, start:])
        samples.append({"prompt": prompt, "completion": completion})
    return samples


# ---- Documents: token ids and labels -----------------------------------------------------------------------
#
# An example is one entry of the data set (a dict), a document is a pair of arrays, ids and labels. Two
# documents, each with a prompt and a completion, packed into a row:
#
#     ids          Was    it     good   ?      Yes    EOS    Really ?      No     EOS    pad
#     labels       -100   -100   -100   -100   Yes    EOS    -100   -100   No     EOS    -100
#     positions    0      1      2      3      4      5      0      1      2      3      10
#
# The hidden state of each token predicts the label of the next one: that of the first "?" predicts "Yes".


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


def load_documents(examples, tokenizer, args):
    """The documents of a data set, cut to max_length; and a summary of what was left out or cut.

    No EOS is put at a cut, because the document does not end there. -> list of (ids, labels), str
    """
    documents, counts = [], Counter()
    for example in examples:
        ids, labels = make_document(example, tokenizer, args, counts)
        labels = [-100, *labels[1 : args.max_length]]  # no label: nothing predicts the first token
        if set(labels) == {-100}:
            counts["examples without anything to learn"] += 1
            continue
        counts[f"cut to --max-length {args.max_length}"] += len(ids) > args.max_length
        # Arrays of 4-byte numbers: lists would need ten times the memory.
        documents.append((array("i", ids[: args.max_length]), array("i", labels)))
    left_out = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    return documents, left_out or "nothing left out or cut"


def make_document(example, tokenizer, args, counts):
    """-> ids, labels; both are empty if the example has no text. counts: see chat_document"""
    if (example.get("text") or "").strip():
        ids = with_eos(tokenizer(example["text"]).input_ids, tokenizer)
        return ids, ids
    if example.get("messages"):
        return chat_document(example["messages"], example.get("tools"), 0, tokenizer, counts)
    if isinstance(example.get("dialog"), list):
        return dialog_document(example, tokenizer, args)
    prompt, completion = example.get("prompt"), example.get("completion")
    if is_chat(completion):
        first_labeled = len(prompt) if args.completion_only_loss else 0
        return chat_document(prompt + completion, example.get("tools"), first_labeled, tokenizer, counts)
    if prompt is None or not (completion or "").strip():  # the prompt may be empty
        return [], []
    return completion_document(prompt, completion, tokenizer, args)


def with_eos(ids, tokenizer):
    """Token ids with EOS at the end, unless the text already ends in one."""
    return ids if ids[-1:] == [tokenizer.eos_token_id] else [*ids, tokenizer.eos_token_id]


def completion_document(prompt, completion, tokenizer, args):
    """Prompt, completion and EOS, without labels on the prompt. -> ids, labels

    They are tokenized separately: no token may span the end of the prompt, because in a rollout the prompt
    comes alone. Nothing is added between the two: a space there must be in the data.
    """
    prompt = tokenizer(prompt).input_ids
    completion = tokenizer(completion, add_special_tokens=False).input_ids  # no BOS in the middle
    completion = with_eos(completion, tokenizer)
    prompt_labels = [-100] * len(prompt) if args.completion_only_loss else prompt
    return prompt + completion, prompt_labels + completion


def chat_document(messages, tools, first_labeled, tokenizer, counts):
    r"""A list of messages, written by the chat template and tokenized as one text. -> ids, labels

    Labels are on what a policy would generate: the assistant's answers, from message number first_labeled on,
    each with the end of its turn. In ChatML, for example:

        no labels    <|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n
        labels       It is 5.<|im_end|>
        no labels    \n

    What a tool wrote has no labels. tools: schemas for the template, a list or its JSON text.
    counts: a Counter of answers that no rollout could give, and that have no labels: they answer no message,
    or the template writes their prompt differently once the chat goes on (without thoughts, for example)
    """
    schemas = json.loads(tools) if tools and isinstance(tools, str) else tools or None
    render = partial(render_chat, tokenizer, schemas=schemas)
    text = render(messages)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)  # the template has BOS
    ids = encoded.input_ids
    token_starts = [start for start, _ in encoded.offset_mapping]  # where in `text` each token starts
    labels = [-100] * len(ids)
    end = 0  # of the last answer with labels
    for i in range(first_labeled, len(messages)):
        if messages[i]["role"] != "assistant":
            continue
        before = after = ""
        if i > 0 and messages[i - 1]["role"] != "assistant":
            before = render(messages[:i], is_prompt=True)  # ends in the assistant's header
            after = render(messages[: i + 1])
        is_in_text = before and after.startswith(before) and text.startswith(after)
        prompt = tokenizer(before, add_special_tokens=False).input_ids
        if not is_in_text or ids[: len(prompt)] != prompt:  # or a token spans the start of the answer
            counts["answers not learned (no rollout could give them: see docs/sft.md)"] += 1
            continue
        start = len(prompt)
        # rstrip: a turn ends in "<|im_end|>\n", but a policy stops at <|im_end|>, so "\n" is not learned.
        end = max(start, bisect.bisect_left(token_starts, len(after.rstrip())))
        labels[start:end] = ids[start:end]
    if end > 0 and ids[end - 1] not in special_ids(tokenizer):
        # The template writes no token that ends a turn: put EOS after the last answer, and drop what follows.
        ids = ids[:end] + [tokenizer.eos_token_id]
        labels = labels[:end] + [tokenizer.eos_token_id]
    return ids, labels


def dialog_document(example, tokenizer, args):
    """Column dialog: each utterance with its end mark, then EOS; all have labels. -> ids, labels"""
    utterances = example["dialog"]
    if len(utterances) < 2 or not all((text or "").strip() for text in utterances):
        return [], []
    ids = tokenizer("").input_ids  # [BOS], or nothing for GPT-2
    ids = sum(utterance_ids(tokenizer, utterances, args.utterance_end), ids)
    ids = with_eos(ids, tokenizer)
    return ids, ids


def utterance_ids(tokenizer, utterances, end):
    """Token ids of each utterance: a space, its text, the end mark. -> list of lists

    Utterances are tokenized one by one, so no token spans two of them, and an utterance has the same tokens
    in fine-tuning, in a prompt and as a reference.
    """
    end_text, end_ids = end, []
    if end == "eos":
        end_text, end_ids = "", [tokenizer.eos_token_id]
    texts = [f" {' '.join(text.split())}{end_text}" for text in utterances]
    return [ids + end_ids for ids in tokenizer(texts, add_special_tokens=False).input_ids]


def pack(documents, max_length, packing):
    """Fill rows of max_length tokens with whole documents. -> list of rows, each a list of documents

    Best-fit decreasing: from the longest document to the shortest, each goes into the fullest row that has
    room for it.
    """
    if not packing:
        return [[document] for document in documents]
    rows = []
    rooms = []  # (free tokens, row number), sorted
    for document in sorted(documents, key=lambda document: len(document[0]), reverse=True):
        length = len(document[0])
        fullest = bisect.bisect_left(rooms, (length, 0))
        if fullest == len(rooms):  # no row has room
            rooms.append((max_length, len(rows)))
            rows.append([])
        room, row = rooms.pop(fullest)
        rows[row].append(document)
        bisect.insort(rooms, (room - length, row))
    return rows


def collate_rows(rows, device):
    """Rows of documents, padded on the right. -> dict: ids, labels, positions, [B, L] each

    Positions start at 0 in each document. Labels come from the documents, never from `ids != pad`, because
    many tokenizers use EOS as the padding token.
    """
    B = len(rows)
    L = max(sum(len(ids) for ids, _ in row) for row in rows)
    ids = torch.zeros(B, L, dtype=torch.long)
    labels = torch.full((B, L), -100)
    positions = torch.arange(L).repeat(B, 1)  # pads keep these, which do not matter: they come last
    for i, row in enumerate(rows):
        start = 0
        for document_ids, document_labels in row:
            end = start + len(document_ids)
            ids[i, start:end] = torch.tensor(document_ids)
            labels[i, start:end] = torch.tensor(document_labels)
            positions[i, start:end] = torch.arange(len(document_ids))
            start = end
    return {"ids": ids.to(device), "labels": labels.to(device), "positions": positions.to(device)}


# ---- Language model ----------------------------------------------------------------------------------------


class LanguageModel(nn.Module):
    """A causal language model whose forward pass returns the loss. DDP and DeepSpeed wrap this module."""

    def __init__(self, lm):
        super().__init__()
        self.lm = lm

    def forward(self, ids, labels, positions):
        """[B, L] each -> the sum of the losses, and the number of correct tokens, over all labels but -100"""
        body, head = body_and_head(self.lm)
        hidden = document_states(body, ids, positions)  # [B, L, H]
        hidden, labels = hidden[:, :-1], labels[:, 1:]  # the state at position t - 1 predicts token t
        # The output layer is large, so only positions with a label go through it.
        valid = labels != -100  # [B, L - 1]
        return next_token_loss(hidden[valid], head.weight, labels[valid], head.bias)


def document_states(body, ids, positions):
    """Last hidden states of rows that may hold several documents. [B, L], [B, L] -> [B, L, H]

    There is no attention mask, so transformers makes a causal one, which is block-diagonal if the positions
    start again at 0 (masking_utils.find_packed_sequence_indices).
    """
    return body(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state


def body_and_head(lm):
    """The transformer of a causal language model, and its output layer. Works with and without LoRA."""
    if hasattr(lm, "get_base_model"):
        lm = lm.get_base_model()  # peft: this only unwraps, the adapter stays inside the layers
    return lm.base_model, lm.get_output_embeddings()


# ============================================================================================================
# Part II: infrastructure. Nothing below is needed to understand fine-tuning: it covers recipes, models, data,
# files and flags. The scripts share these functions, copied verbatim. check.py checks flags and data.
# ============================================================================================================

SCRIPT = Path(__file__).stem
HERE = Path(__file__).resolve().parent  # recipes name folders next to this file


TINY = Args(  # made checkpoints/reviews-lm
    from_config="gpt2 n_embd=128 n_layer=3 n_head=4 n_positions=256",
    model_name_or_path="checkpoints/reviews-lm",  # only the tokenizer: the weights are random
    dataset_name="data/reviews",
    max_length=256,
    dtype="float32",
    num_train_epochs=12.0,
    per_device_train_batch_size=16,
    learning_rate=2e-3,
    lr_scheduler_type="cosine",
    warmup_ratio=0.05,
)

RECIPES = {
    "tiny": TINY,
    "tiny-tldr": replace(  # made checkpoints/tldr-sft
        TINY,
        from_config=(
            "gpt_neox hidden_size=128 num_hidden_layers=3 num_attention_heads=4 "
            "intermediate_size=512 max_position_embeddings=256"
        ),
        model_name_or_path="checkpoints/tldr-sft",
        dataset_name="data/tldr",
        num_train_epochs=10.0,
        learning_rate=3e-3,
    ),
    "tiny-dialog": replace(  # made checkpoints/dialogs-lm
        TINY,
        from_config=(  # attention without dropout and a fused GELU are faster
            "gpt2 n_embd=128 n_layer=3 n_head=4 n_positions=256 "
            'attn_pdrop=0.0 activation_function="gelu_pytorch_tanh"'
        ),
        model_name_or_path="checkpoints/dialogs-lm",
        dataset_name="data/dialogs",
        utterance_end="eos",
        per_device_train_batch_size=8,
    ),
    "tiny-arithmetic": replace(  # made checkpoints/arithmetic-sft
        TINY,
        from_config=(
            "llama hidden_size=128 num_hidden_layers=3 num_attention_heads=4 num_key_value_heads=2 "
            "intermediate_size=384 max_position_embeddings=256 tie_word_embeddings=true"
        ),
        model_name_or_path="checkpoints/arithmetic-tokenizer",
        dataset_name="data/arithmetic-sft",
        num_train_epochs=14.0,
    ),
    "tiny-tools": replace(  # made checkpoints/tools-sft
        TINY,
        from_config=(
            "llama hidden_size=128 num_hidden_layers=3 num_attention_heads=4 num_key_value_heads=2 "
            "intermediate_size=384 max_position_embeddings=512 tie_word_embeddings=true"
        ),
        model_name_or_path="checkpoints/tools-tokenizer",
        dataset_name="data/tools-sft",
        num_train_epochs=8.0,
    ),
    "gpt2-imdb": Args(),
    "smollm2-imdb": Args(  # the start of ppo_sentiment.py's recipe of this name: docs/real_models.md
        model_name_or_path="HuggingFaceTB/SmolLM2-135M-Instruct",
        output_dir="runs/smollm2-imdb/sft",
        num_eval_prompts=200,
        max_length=64,  # beginnings of reviews, because PPO's texts have at most 32 tokens
        num_train_epochs=0.12,  # 3,000 reviews
        per_device_train_batch_size=16,
        lr_scheduler_type="cosine",
        warmup_ratio=0.05,
    ),
    "smollm2-dailydialog": Args(  # the start of ppo_dialog.py's recipe of this name: docs/real_models.md
        model_name_or_path="HuggingFaceTB/SmolLM2-135M-Instruct",
        output_dir="runs/smollm2-dailydialog/sft",
        num_eval_prompts=200,
        dataset_name="OpenRL/daily_dialog",
        utterance_end="eos",
        max_length=256,
        num_train_epochs=0.25,  # about 2,800 dialogs
        lr_scheduler_type="cosine",
        warmup_ratio=0.05,
    ),
    # First `python benchmarks/real_data.py smollm2-word-problems RAW runs/smollm2-word-problems`. RAW is a
    # folder of data sets: see docs/real_models.md.
    "smollm2-word-problems": Args(  # the start of grpo_math.py's recipe of this name
        model_name_or_path="HuggingFaceTB/SmolLM2-135M-Instruct",
        output_dir="runs/smollm2-word-problems/sft",
        num_eval_prompts=200,
        dataset_name="runs/smollm2-word-problems/word-problems-sft",
        max_length=256,
        lr_scheduler_type="cosine",
        warmup_ratio=0.05,
    ),
    "tldr-pythia-1b": Args(  # N+ paper, table 2: 1 epoch, batch 128 (here: packed rows, so more documents)
        model_name_or_path="EleutherAI/pythia-1b-deduped",
        dataset_name="trl-lib/tldr",
        max_length=640,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=16,
        learning_rate=3e-6,
        adam_eps=1e-5,
        lr_scheduler_type="cosine",
    ),
    "gpt2-dailydialog": Args(  # as for rajkumarrrk/gpt2-fine-tuned-on-daily-dialog
        dataset_name="OpenRL/daily_dialog",
        num_train_epochs=3.0,
    ),
    "qwen-0.5b-chat": Args(  # TRL's example of a chat data set
        model_name_or_path="Qwen/Qwen2.5-0.5B",
        dataset_name="trl-lib/Capybara",
        max_length=2048,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=8,
        learning_rate=2e-5,
        lr_scheduler_type="cosine",
        gradient_checkpointing=True,
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


def model_from_config(text, tokenizer):
    """A language model with random weights from "TYPE name=value ...", sized for the tokenizer."""
    model_type, *pairs = text.split()
    special_tokens = ("bos_token_id", "eos_token_id", "pad_token_id")
    fields = {name: getattr(tokenizer, name) for name in special_tokens}
    fields["vocab_size"] = len(tokenizer)
    for pair in pairs:
        name, _, value = pair.partition("=")
        fields[name] = json.loads(value)
    config = transformers.AutoConfig.for_model(model_type, **fields)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


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
def check_model(lm, args):
    """Raise if our logits of a packed document differ from those that the model gives to it alone.

    They do if a model caps or scales its logits (Gemma 2, Granite), or sees what follows (encoders); or what
    comes before, by a recurrent state (Mamba), a convolution (LFM2), or ignored positions (BLOOM, OPT).
    """
    length = min(args.max_length // 2, 64)
    ids = torch.randint(lm.config.get_text_config().vocab_size, (1, 2 * length), device=lm.device)
    positions = torch.arange(2 * length, device=lm.device)[None]
    document = slice(0, length)  # other tokens follow it
    if args.packing:
        positions = positions % length
        document = slice(length, None)  # another document comes before it
    torch.set_float32_matmul_precision("highest")  # the gap may be small: random weights read little context
    body, head = body_and_head(lm.train(not args.from_config))  # only random weights may have dropout
    ours = F.linear(document_states(body, ids, positions)[0, document], head.weight, head.bias)
    logits = lm.eval()(ids[:, document], use_cache=False).logits[0]  # [length, V]
    torch.set_float32_matmul_precision("high")
    gap = (ours - logits).abs().max() / logits.abs().max()
    if not gap < 3e-5:
        name = args.from_config or args.model_name_or_path
        hint = " (perhaps with --no-packing)" if args.packing else ""
        raise UserError(f"{name} does not work here{hint}: its own logits differ from ours by {gap:.2g}")


def special_ids(tokenizer):
    """The ids of all special tokens but <unk>, including those like <|eot_id|> that have no role. -> set"""
    added = tokenizer.added_tokens_decoder.items()
    ids = {*tokenizer.all_special_ids, *(i for i, token in added if token.special)}
    return ids - {tokenizer.unk_token_id} | {tokenizer.eos_token_id}  # GPT-2's EOS is its <unk> too


def find_end_tokens(lm, tokenizer, documents, max_length):
    """The ids of the tokens that end a response. -> list, for generation_config

    They are EOS, those of the model's generation_config, and the special tokens that end a run of labels: an
    answer in a chat may end in <|im_end|>, for example. documents: list of (ids, labels)
    """
    eos = lm.generation_config.eos_token_id  # an id, a list of ids, or None
    ids = {*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id} - {None}
    last_tokens = set()
    for _, labels in documents:
        # A run of labels ends where -100 follows. A document of max_length tokens may have been cut.
        if len(labels) < max_length:
            labels = [*labels, -100]
        last_tokens |= {label for label, next_label in itertools.pairwise(labels) if next_label == -100}
    return sorted(ids | (last_tokens & special_ids(tokenizer)))


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


def load_language_model(args, tokenizer, documents):
    """The model to train: pretrained and without dropout, or with random weights and its config's dropout."""
    if args.from_config:
        lm = model_from_config(args.from_config, tokenizer)
    else:
        lm = load_model(AutoModelForCausalLM, args.model_name_or_path)
    end_tokens = find_end_tokens(lm, tokenizer, documents, args.max_length)
    if not lm.generation_config.do_sample:
        # A greedy config that still has a temperature cannot be saved, so start from an empty one.
        special_tokens = dict(bos_token_id=tokenizer.bos_token_id, pad_token_id=tokenizer.pad_token_id)
        lm.generation_config = transformers.GenerationConfig(**special_tokens)
    lm.generation_config.eos_token_id = end_tokens
    if args.lora_r:
        lm = add_lora(lm, args)
    if args.gradient_checkpointing:
        lm.gradient_checkpointing_enable(dict(use_reentrant=False))
    return lm


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


def is_chat(value):
    """True for a list of messages (dicts with role and content), False for a text."""
    return isinstance(value, list) and len(value) > 0


def render_chat(tokenizer, messages, is_prompt=False, schemas=None):
    """The text of a list of messages, by the tokenizer's chat template. It contains BOS if the model needs
    one, so tokenize it with add_special_tokens=False.

    is_prompt: end where the assistant continues: after the header of its turn or, if the last message is its
    own, inside that message. schemas: the tools that the template shows to the model. -> str
    """
    is_begun = messages[-1]["role"] == "assistant" and is_prompt  # the policy goes on with this message
    return tokenizer.apply_chat_template(
        messages,
        tools=schemas,
        tokenize=False,
        add_generation_prompt=is_prompt and not is_begun,
        continue_final_message=is_begun,
    )


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


def report_evaluation(run, before, after, samples, num_documents):
    """The samples, the before / after table, samples.jsonl and evaluation.json."""
    if samples:
        run.table("samples, cut after 40 tokens", samples)
    run.append("samples.jsonl", [{"update": run.updates} | sample for sample in samples])
    comparison = [{"metric": name, "before": before[name], "after": after[name]} for name in before]
    run.table(f"{num_documents} held-out documents", comparison)
    about = {"before": before, "after": after, "n": num_documents}
    (run.folder / "evaluation.json").write_text(json.dumps(about, indent=2))
    run.accelerator.log({f"eval/{name}": x for name, x in after.items()}, step=run.updates)


# ---- Command line ------------------------------------------------------------------------------------------

# Flags that may change when a run is resumed: they do not change its result, or prolong it.
MAY_CHANGE = (
    *("resume", "eval_every", "save_every", "keep_checkpoints", "log_with", "num_train_epochs"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing"),
)
# Flags with which a recipe describes its own data. They do not apply to other data.
OF_DATA = ()


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
