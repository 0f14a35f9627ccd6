"""Supervised fine-tuning of language models, and training small ones from scratch.

If you know nanoGPT's train.py, this is what differs:

1. The data are documents, not one long stream of tokens, and an epoch visits each of them once. Each ends in
   EOS (or a chat's end of turn), which has a label like any other token. A model that never saw EOS as a
   label never ends a response in PPO.
2. A row holds several whole documents (packing), but they do not see each other: positions start at 0 in
   each document, from which transformers builds a block-diagonal attention mask. nanoGPT's rows are random
   cuts of the stream, in which a document attends to the one before it.
3. With the columns prompt and completion, the loss is on the completion and its EOS only. The two parts are
   tokenized separately, exactly as in reward_model.py and in rollouts. A chat (a list of messages) is
   rendered by the tokenizer's chat template and tokenized as one text, and the loss is on the answers of the
   assistant only (`chat_document`).
4. A dialog is tokenized utterance by utterance, with a mark at the end of each. ppo_dialog.py makes its
   prompts by the same rule.
5. The loss is a sum over tokens divided by the number of labeled tokens in the global batch. Rows have
   different numbers of labels, so a mean of means would depend on how the batch is split.
6. Logits are computed for 128 positions at a time, and only at positions that have a label.
7. The model is nearly any causal language model of transformers (`check_model` says which are
   refused): pretrained, with or without LoRA, or with random weights. Pretrained models are trained without
   dropout, as in the other scripts. Models with random weights keep the dropout that their config sets.
8. The optimizer has PyTorch's defaults. AdamW's weight decay of 0.01 applies to all weights, including
   biases.

    python sft.py                                      # recipe tiny: how checkpoints/reviews-lm was made
    python sft.py tiny-tldr                            # how checkpoints/tldr-sft was made
    python sft.py tiny-dialog                          # how checkpoints/dialogs-lm was made
    python sft.py tiny-arithmetic                      # how checkpoints/arithmetic-sft was made
    python sft.py gpt2-imdb                            # GPT-2 on IMDB, as in lvwerra/gpt2-imdb, from the Hub
    python sft.py smollm2-imdb                         # SmolLM2-135M-Instruct on IMDB, minutes on a laptop
    python sft.py smollm2-word-problems                # the same model on word problems: docs/real_models.md
    python sft.py qwen-0.5b-chat                       # a chat model: Qwen2.5-0.5B on trl-lib/Capybara
    python sft.py --learning-rate 1e-3                 # tiny with one change; every field of Args is a flag
    python sft.py --model-name-or-path gpt2 --dataset-name my_folder --lora-r 16
    python sft.py --from-config "gpt2 n_layer=4" --model-name-or-path my_tokenizer    # random weights
    torchrun --nproc_per_node 2 sft.py                 # two processes, twice the batch
    python sft.py --resume RUN_FOLDER                  # continue a stopped run; on a CPU, bit for bit

Part I is the algorithm: flags, math, loop, evaluation, documents, model. Part II is infrastructure: models,
data, processes, run folder, flags. Papers: the first step of InstructGPT (Ouyang et al. 2022), packing
without cross-contamination (Krell et al. 2021), LoRA (Hu et al. 2021), The N+ Implementation Details of RLHF
with PPO ("N+ paper", Huang et al. 2024).
Results, metrics and details: docs/sft.md.
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

import bisect
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
import tempfile
import time
import warnings
from array import array
from collections import Counter
from contextlib import suppress
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
from rich.text import Text
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

# ============================================================================================================
# Part I: the algorithm
# ============================================================================================================


@dataclass
class Args:
    """The defaults fine-tune GPT-2 on IMDB, as was done for lvwerra/gpt2-imdb.

    A command line that names no recipe and no model starts from the recipe tiny, which replaces some of these
    defaults.
    """

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
    model_name_or_path: str = "openai-community/gpt2"  # model and tokenizer: Hub name, folder, LoRA folder
    from_config: str | None = None  # random weights instead: a model type and name=value pairs (JSON values)
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"  # auto: bf16 on GPUs that have it, else float32
    gradient_checkpointing: bool = False  # recompute activations in the backward pass to save memory
    lora_r: int = 0  # LoRA rank (0: train all weights)
    lora_alpha: int = 32  # LoRA scale: the adapter adds lora_alpha / lora_r * B A
    lora_target_modules: str = "c_attn"  # layers that get an adapter: comma-separated names, or all-linear

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
    optimizer: str = "torch.optim.AdamW"  # dotted name: torch.optim.SGD, bitsandbytes.optim.Adam8bit, ...
    adam_eps: float = 1e-8  # epsilon of Adam (the N+ paper uses 1e-5)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "linear"  # shape after the warm-up
    warmup_ratio: float = 0.0  # fraction of updates in which the learning rate rises to its full value
    max_grad_norm: float | None = 1.0  # clip the gradient to this norm; None: no clipping


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
        chunks = nn.LinearCrossEntropyOptions(batch_chunk_size=128)
        # As F.cross_entropy(F.linear(hidden, weight, bias), labels), but the gradient of a chunk is computed
        # right after its loss, so its logits need not be kept. (To weight tokens: reduction="none", which
        # computes them again in the backward pass. With label_smoothing, PyTorch keeps all logits.)
        loss_sum = F.linear_cross_entropy(
            hidden, weight, labels, linear_bias=bias, reduction="sum", options=chunks
        )
        correct_sum = 0
        with torch.no_grad():  # it does not return the logits, so compute them again
            for chunk, chunk_labels in zip(hidden.split(128), labels.split(128)):
                predicted = F.linear(chunk, weight, bias).argmax(1)
                correct_sum += (predicted == chunk_labels).sum()
    return loss_sum, correct_sum


def perplexity(loss):
    """exp(loss). math.exp raises an error if the result is too large, so there is a limit."""
    return math.exp(min(loss, 700))


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
    check_numbers(args)
    if args.from_config and args.lora_r:
        raise UserError("--lora-r: an adapter needs a trained model, so give --model-name-or-path")
    accelerator = start_accelerator(args)
    device, world = accelerator.device, accelerator.num_processes
    n = args.per_device_train_batch_size
    B = n * args.gradient_accumulation_steps * world  # rows per optimizer step

    tokenizer = load_tokenizer(args.model_name_or_path)
    set_template_options(tokenizer, args)
    refuse_appended_eos(tokenizer, args.model_name_or_path)
    train_examples, held_out_examples = load_splits(args.dataset_name)
    if args.num_train_rows is not None:  # the same ones for every --seed
        train_examples = random.Random(0).sample(
            train_examples, min(args.num_train_rows, len(train_examples))
        )
    documents, left_out = load_documents(train_examples, tokenizer, args)
    longest = max(sum(label != -100 for label in labels) for _, labels in documents)
    rows = pack(documents, args.max_length, args.packing)
    updates = max(1, round(args.num_train_epochs * len(rows) / B))
    # What the progress bar shows: label -> metric.
    run = Run(args, accelerator, updates, status={"loss": "loss", "accuracy": "mean_token_accuracy"})

    # Held-out documents are drawn at random: IMDB is sorted, and its first reviews are all negative.
    all_held_out, held_out_left_out = load_documents(held_out_examples, tokenizer, args)
    order = torch.randperm(len(all_held_out), generator=generator_for(args.seed, "held-out"))
    held_out = [all_held_out[i] for i in order[: args.num_eval_prompts]]
    held_out_rows = pack(held_out, args.max_length, args.packing)

    model = LanguageModel(load_language_model(args, tokenizer, documents)).to(device)
    check_model(model.lm, args)
    is_bf16 = wants_bf16(args, device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=is_bf16)
    name = args.model_name_or_path
    if args.from_config:
        name = f"random weights ({args.from_config}; tokenizer of {name})"
    accelerator.print(
        f"recipe {args.recipe}: {name} on {args.dataset_name}, {device}, bf16: {is_bf16}\n"
        f"documents for training: {len(documents):,} of {len(train_examples):,} examples ({left_out}), "
        f"held out: {len(all_held_out):,} of {len(held_out_examples):,} examples ({held_out_left_out})\n"
        f"packed for training: {len(rows):,} rows of up to {args.max_length} tokens; of a document, up "
        f"to {longest} tokens are learned\n"
        f"batch: {n} rows per pass x {args.gradient_accumulation_steps} accumulated x {world} processes "
        f"= {B} rows; {updates} updates of one optimizer step each"
    )
    show_labels(run, tokenizer, documents[0])

    # This must come before run.start, which may load a checkpoint: `before` is always the untrained model.
    with autocast:
        before = evaluate(model, held_out_rows, accelerator, args)

    # `model` is evaluated and saved, `learner` is trained. With one process or DDP they share their weights,
    # which accelerate moves back to the GPU at once. With FSDP2 and ZeRO-3 the learner is a sharded copy, and
    # `model` waits on the CPU until the next evaluation.
    learner, optimizer = make_learner(model.cpu(), args, accelerator)
    if is_bf16:  # autocast would round frozen weights (with LoRA or shared layers) in every pass
        round_frozen_weights(model.lm, only_if_exact=True)
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
        learner.train()  # dropout, in models that have it
        for group in optimizer.param_groups:  # not later: DeepSpeed takes its step in the last backward pass
            group["lr"] = learning_rate(args, update, updates)
        loss_sum = 0.0
        correct_sum = 0
        for mb in micro_batches:
            # accumulate counts its calls. Before the last micro-batch, processes exchange no gradients, and
            # the optimizer's step and zero_grad would do nothing.
            with accelerator.accumulate(learner):
                with autocast:
                    mb_loss_sum, mb_correct_sum = learner(**mb)
                loss = mb_loss_sum / num_labels
                # We want the sum, but DDP averages over processes and accelerate over micro-batches.
                accelerator.backward(loss * world * args.gradient_accumulation_steps)
            loss_sum += mb_loss_sum.detach()
            correct_sum += mb_correct_sum

        # 3. Optimizer step.
        assert accelerator.sync_gradients, "no optimizer step: too few or too many micro-batches"
        grad_norm = accelerator.clip_grad_norm_(learner.parameters(), args.max_grad_norm or math.inf)
        optimizer.step()  # does nothing with DeepSpeed, which has taken the step already
        optimizer.zero_grad()

        # 4. Log and save.
        mean_loss = (accelerator.reduce(loss_sum) / num_labels).item()
        metrics = {
            "update": update,
            "epoch": update * B / len(rows),
            "lr": optimizer.param_groups[0]["lr"],
            "loss": mean_loss,
            "mean_token_accuracy": accelerator.reduce(correct_sum) / num_labels,
            "perplexity": perplexity(mean_loss),
            "grad_norm": unshard(grad_norm),  # before clipping
            # There is no rollout here, so its time is 0.
            **performance_metrics(start_time, start_time, num_tokens, device),
        }
        if args.eval_every and update % args.eval_every == 0 and update < updates:
            copy_weights(learner, model)  # does nothing if they share their weights
            model.to(device)
            with autocast:
                evaluation = evaluate(model, held_out_rows, accelerator, args)
            metrics |= {f"eval/{name}": x for name, x in evaluation.items()}
        run.log(metrics)
        run.checkpoint({"update": update, "batch_size": B})

    # 5. Evaluate on the same held-out documents again, show samples, and save the model.
    copy_weights(learner, model)  # does nothing if they share their weights
    model.to(device)
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
    return {"loss": loss, "mean_token_accuracy": accuracy, "perplexity": perplexity(loss)}


@torch.no_grad()
def write_samples(lm, tokenizer, documents):
    """Continue each prompt by sampling, up to 40 tokens. -> one dict(prompt, completion) per document

    The prompt is all that comes before the completion, or before the last answer of a chat. A document that
    has labels from its second token on, such as a text or a dialog, is continued after its first 8 tokens.
    """
    samples = []
    for ids, labels in documents:
        # Walk back from the last label to the first one of its run, which is where the completion begins.
        first = max(i for i, label in enumerate(labels) if label != -100)
        while labels[first - 1] != -100:  # this ends, because the first token has no label
            first -= 1
        prompt_length = first if first > 1 else min(8, len(ids) - 1)
        tokens = torch.tensor([ids[:prompt_length]], device=lm.device)  # [1, L]
        # Not lm.generate, which would follow the model's generation_config: top-k, penalties, ...
        for _ in range(min(40, context_length(lm.config) - prompt_length)):
            probs = lm(tokens, use_cache=False).logits[0, -1].float().softmax(-1)  # [V]
            token = torch.multinomial(probs, 1)
            tokens = torch.cat([tokens, token[None]], 1)
            if token.item() in lm.generation_config.eos_token_id:  # a list: find_end_tokens
                break
        prompt, completion = tokens[0, :prompt_length], tokens[0, prompt_length:]
        samples.append({"prompt": tokenizer.decode(prompt), "completion": tokenizer.decode(completion)})
    return samples


# ---- Documents: token ids and labels -----------------------------------------------------------------------
#
# An example is one entry of the data set (a dict), a document is a pair of arrays, ids and labels. Two
# documents, each with a prompt and a completion, packed into a row (a pad's position does not matter):
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

    A document that is cut loses its EOS, because it does not end there. -> list of (ids, labels), str
    """
    documents, counts = [], Counter()
    for example in examples:
        ids, labels = make_document(example, tokenizer, args, counts)
        refuse_two_bos(tokenizer, [ids])
        is_cut = len(ids) > args.max_length
        # -100 means no label. Nothing predicts the first token.
        ids, labels = ids[: args.max_length], [-100, *labels[1 : args.max_length]]
        if set(labels) == {-100}:
            counts["examples without anything to learn"] += 1
        else:
            # Arrays of 4-byte numbers: lists would need ten times the memory.
            documents.append((array("i", ids), array("i", labels)))
            counts[f"cut to --max-length {args.max_length}"] += is_cut
    left_out = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    if not documents:
        raise UserError(
            f"{args.dataset_name}: there is nothing to learn in the columns text, prompt and completion, "
            f"messages, or dialog ({left_out})"
        )
    return documents, left_out or "nothing left out or cut"


def make_document(example, tokenizer, args, counts):
    """-> ids, labels; both are empty if the example has no text. counts: see chat_document"""
    columns = [name for name in ("text", "completion", "messages", "dialog") if example.get(name)]
    if len(columns) > 1:
        raise UserError(f"{args.dataset_name}: an example has {' and '.join(columns)}; keep one of them")
    if example.get("text"):
        ids = with_eos(tokenizer(example["text"]).input_ids, tokenizer)
        return ids, ids
    if is_chat(example.get("messages")):
        refuse_template_columns(example, args.dataset_name)
        return chat_document(example["messages"], 0, tokenizer, counts)
    if example.get("dialog"):
        return dialog_document(example, tokenizer, args)
    prompt, completion = example.get("prompt"), example.get("completion")
    if not completion or prompt is None:  # the prompt may be empty
        return [], []
    if is_chat(prompt) or is_chat(completion):
        refuse_template_columns(example, args.dataset_name)
        first_labeled = len(prompt) if args.completion_only_loss else 0
        return chat_document(prompt + completion, first_labeled, tokenizer, counts)
    return completion_document(prompt, completion, tokenizer, args)


def with_eos(ids, tokenizer):
    """Token ids with EOS at the end, unless the text already ends in one."""
    return ids if ids[-1:] == [tokenizer.eos_token_id] else [*ids, tokenizer.eos_token_id]


def completion_document(prompt, completion, tokenizer, args):
    """Prompt, completion and EOS, without labels on the prompt. -> ids, labels

    They are tokenized separately: no token may span the end of the prompt, because in a rollout the prompt
    comes alone. Nothing is added between the two: a space there must be in the data. (Some tokenizers begin
    every text with one: Llama 2's, for example.)
    """
    prompt = tokenizer(prompt).input_ids
    completion = tokenizer(completion, add_special_tokens=False).input_ids  # no BOS in the middle
    completion = with_eos(completion, tokenizer)
    prompt_labels = [-100] * len(prompt) if args.completion_only_loss else prompt
    return prompt + completion, prompt_labels + completion


def chat_document(messages, first_labeled, tokenizer, counts):
    r"""A list of messages, written by the chat template and tokenized as one text. -> ids, labels

    Labels are on what a policy would generate: the assistant's answers, from message number first_labeled on,
    each with the end of its turn. In ChatML, for example:

        no labels    <|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n
        labels       It is 5.<|im_end|>
        no labels    \n

    Some templates write no token that ends a turn. Then EOS is put after the last answer with labels; earlier
    answers get no end token. counts: a Counter of answers that cannot have labels
    """
    text = render_chat(tokenizer, messages)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)  # the template has BOS
    ids = encoded.input_ids
    token_starts = [start for start, _ in encoded.offset_mapping]  # where in `text` each token starts
    labels = [-100] * len(ids)
    end = 0  # of the last answer with labels
    for i in range(first_labeled, len(messages)):
        if messages[i]["role"] != "assistant":
            continue
        # Start: the prompt is rendered and tokenized alone, as in a rollout; the answer begins after its
        # tokens. If ids do not begin with them, no rollout could get here, and the answer gets no labels. (A
        # template may rewrite earlier turns, or a token may span the border.) End: its last character in
        # `text`, because the answer tokenized alone may give other tokens.
        prompt, last_character = find_answer(tokenizer, messages[: i + 1], text)
        if prompt is None or ids[: len(prompt)] != prompt:
            counts["answers not learned (no rollout could give them: see docs/sft.md)"] += 1
            continue
        start = len(prompt)
        # Its last token is the last one that starts at its last character or before it. (max: if the answer
        # is empty and the template writes no end, rstrip went back into the assistant's header.)
        end = max(start, bisect.bisect(token_starts, last_character))
        labels[start:end] = ids[start:end]
    if end > 0 and ids[end - 1] not in special_ids(tokenizer):
        # There is no token that ends the turn: put EOS after the answer, and drop what follows.
        ids = ids[:end] + [tokenizer.eos_token_id]
        labels = labels[:end] + [tokenizer.eos_token_id]
    return ids, labels


def find_answer(tokenizer, messages, text):
    """Where the last of these messages, an answer of the assistant, is in the text of the whole chat.

    -> the token ids of its prompt in a rollout, and the position in `text` of its last character. None, None
    if it has no prompt, or if the text does not begin with prompt and answer: templates of thinking models
    drop the thoughts of all but the last answer, for example.
    """
    if len(messages) == 1 or messages[-2]["role"] == "assistant":
        return None, None  # it does not answer any message
    before = render_chat(tokenizer, messages[:-1], is_prompt=True)  # ends in the assistant's header
    after = render_chat(tokenizer, messages)
    if not (after.startswith(before) and text.startswith(after)):
        return None, None
    # rstrip: a turn ends in "<|im_end|>\n", but a policy stops at <|im_end|>, so "\n" is not learned.
    return tokenizer(before, add_special_tokens=False).input_ids, len(after.rstrip()) - 1


def dialog_document(example, tokenizer, args):
    """Column dialog: each utterance with its end mark, then EOS; all have labels. -> ids, labels"""
    dialogs = load_dialogs([example])
    if not dialogs:  # an utterance is blank, for example
        return [], []
    [(_, utterances, _)] = dialogs
    ids = tokenizer("").input_ids  # [BOS], or nothing for GPT-2
    for utterance in utterance_ids(tokenizer, utterances, args.utterance_end):
        ids = ids + utterance
    ids = with_eos(ids, tokenizer)
    return ids, ids


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
    """A causal language model whose forward pass returns the loss.

    DDP, FSDP2 and DeepSpeed wrap this module. They only intervene in its forward pass, so the body and
    head.weight must be used there, not in train().
    """

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
# Part II: infrastructure. Nothing below is needed to understand fine-tuning: it covers models, data, files
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


def model_from_config(text, tokenizer):
    """A language model with random weights from "TYPE name=value ...", sized for the tokenizer."""
    model_type, *pairs = text.split()
    values = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    for pair in pairs:
        name, _, value = pair.partition("=")
        if not hasattr(transformers.AutoConfig.for_model(model_type), name):  # transformers would ignore it
            raise UserError(f"--from-config: a config of type {model_type} has no {name}")
        values[name] = json.loads(value)
    config = transformers.AutoConfig.for_model(model_type, **values)
    check_saved_tokenizer(tokenizer, config)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def check_saved_tokenizer(tokenizer, config):
    """Raise if the tokenizer, saved next to a model with this config and loaded again, gives other tokens.

    For models of some families (Qwen2, Phi-3), transformers ignores which tokenizer was saved, and loads the
    family's own.
    """
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        reloaded = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.decode(range(len(tokenizer)), skip_special_tokens=True)  # all words that it knows
    if reloaded(text).input_ids != tokenizer(text).input_ids:
        raise UserError(
            f"with a {config.model_type} model, transformers would load this tokenizer as a "
            f"{type(reloaded).__name__}, and texts would have other tokens: use another model type"
        )


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


@torch.no_grad()
def check_model(lm, args):
    """Raise if our results for a packed document differ from the model's own results for that document alone.

    Its logits must be the product of its last hidden states and the output layer. They are not with a soft
    cap (Gemma 2) or a scale (Granite). The states of a document must not depend on what follows, as they do
    in an encoder; or on a packed document before it, as they do with a recurrent state (Mamba), with a
    convolution (LFM2), and in models that ignore the positions (BLOOM, OPT, Falcon).
    """
    name, length = args.from_config or args.model_name_or_path, args.max_length
    if length > context_length(lm.config):
        raise UserError(f"--max-length {length}: the context of {name} is {context_length(lm.config)} tokens")
    # Two rows of random tokens, which hold the same document in the same place. If the document does not
    # depend on what surrounds it, its states in the two rows are equal.
    size = min(length // 2, 64)
    start = size if args.packing else 0  # if packed, it is the second document of its row
    document = slice(start, start + size)
    vocab_size = lm.config.get_text_config().vocab_size
    ids = torch.randint(vocab_size, (2, length), generator=generator_for(0, "check")).to(lm.device)
    ids[1, document] = ids[0, document]
    positions = torch.arange(length, device=lm.device).repeat(2, 1)
    positions[:, start:] -= start

    body, head = body_and_head(lm)
    # Pretrained: train mode, so that dropout which load_model failed to turn off makes the two rows differ.
    # A new model may have dropout, so it is checked in eval mode.
    lm.train(not args.from_config)
    states, other_states = document_states(body, ids, positions)[:, document]  # [size, H] each
    # A soft cap shows only in large logits. So the output layer multiplies by 64, and we divide by 64.
    hook = head.register_forward_hook(lambda module, inputs, logits: 64 * logits)
    own_logits = lm.eval()(ids[:1, document], use_cache=False).logits[0].float() / 64  # [size, V]
    hook.remove()
    is_other_loss = differ(F.linear(states, head.weight, head.bias), own_logits, 1e-2)
    # A tight limit, because the states of an untrained model hardly depend on other tokens.
    if is_other_loss or differ(states, other_states, 1e-4):
        hint = " (perhaps with --no-packing)" if args.packing else ""
        raise UserError(
            f"{name} does not work here{hint}: the model's own loss on a document differs from the one "
            "computed here"
        )


def differ(found, expected, limit):
    """Whether two tensors differ by more than this part of the largest number, or are nan."""
    return not (found - expected).abs().max() < limit * expected.abs().max()


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


def load_language_model(args, tokenizer, documents):
    """The model to train, as the flags say: pretrained, or with random weights.

    Random weights keep the dropout of their config; pretrained models are loaded without dropout.
    """
    if args.from_config:
        lm = model_from_config(args.from_config, tokenizer)
    else:
        lm = load_model(AutoModelForCausalLM, args.model_name_or_path)
        if getattr(lm, "is_quantized", False):
            raise UserError(f"{args.model_name_or_path}: quantized weights cannot be trained here")
    end_tokens = find_end_tokens(lm, tokenizer, documents, args.max_length)
    if not lm.generation_config.do_sample:
        # A greedy config that still has a temperature cannot be saved, so start from an empty one.
        special_tokens = dict(bos_token_id=tokenizer.bos_token_id, pad_token_id=tokenizer.pad_token_id)
        lm.generation_config = transformers.GenerationConfig(**special_tokens)
    lm.generation_config.eos_token_id = end_tokens
    if args.lora_r:
        lm = add_lora(lm, args)
    if args.gradient_checkpointing:
        # transformers' new name for gradient_checkpointing_enable
        lm.activation_checkpointing_enable(dict(use_reentrant=False))
    return lm


def save_policy(policy, tokenizer, folder):
    """Save what plain transformers loads. LoRA is merged in place, except into quantized weights."""
    if not getattr(policy, "is_quantized", False):
        policy.float()  # frozen weights may be in bf16
        if hasattr(policy, "merge_and_unload"):
            policy.save_pretrained(folder.parent / "adapter")
            policy = policy.merge_and_unload()
    policy.save_pretrained(folder)
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


def show_labels(run, tokenizer, document):
    """Show what is learned of a document: green, and in brackets where there are no colors."""
    text = Text("the first document; [what is learned of it] is green:\n")
    for is_learned, part in itertools.groupby(zip(*document), key=lambda pair: pair[1] != -100):
        shown = tokenizer.decode([token for token, _ in part])
        text.append(f"[{shown}]" if is_learned else shown, "green" if is_learned else "")
    run.console.print(text)


def report_evaluation(run, before, after, samples, num_documents):
    """The samples, the before / after table, samples.jsonl and evaluation.json."""
    if samples:
        run.table("samples, cut after 40 tokens", samples)
    run.append("samples.jsonl", [{"update": run.updates} | sample for sample in samples])
    comparison = []
    for name, value in before.items():
        comparison.append({"metric": name, "before": value, "after": after[name]})
    run.table(f"{num_documents} held-out documents", comparison)
    about = {"before": before, "after": after, "n": num_documents}
    (run.folder / "evaluation.json").write_text(json.dumps(about, indent=2))
    run.accelerator.log({f"eval/{name}": x for name, x in after.items()}, step=run.updates)


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
