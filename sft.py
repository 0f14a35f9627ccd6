"""Supervised fine-tuning of language models, and training small ones from scratch.

If you know nanoGPT's train.py, this is what differs:

1. The data are documents, not one long stream of tokens, and an epoch visits each of them once. Each ends in
   EOS, and EOS is learned like any other token. A model that never saw EOS as a label never ends a response
   in PPO.
2. A row holds several whole documents (packing), but they do not see each other: positions start at 0 in
   each document, and the attention mask is block-diagonal. nanoGPT's rows are random cuts of the stream, in
   which a document attends to the one before it.
3. With the columns prompt and completion, the loss is on the completion and its EOS only. The two parts are
   tokenized separately, exactly as in reward_model.py and in rollouts. A chat (a list of messages) is written
   by the tokenizer's chat template, and the loss is on the turns of the assistant only (`chat_documents`).
4. A dialog is tokenized utterance by utterance, with a mark at the end of each. ppo_dialog.py makes its
   prompts by the same rule.
5. The loss is a sum over tokens divided by the number of labeled tokens in the global batch. Rows have
   different numbers of labels, so a mean of means would depend on how the batch is split.
6. Logits are computed for 128 positions at a time, and only at positions that have a label.
7. The model is any causal language model of transformers: pretrained (dropout is then off), with LoRA, or
   with random weights and a tokenizer trained on the data.
8. The optimizer has PyTorch's defaults. AdamW's weight decay of 0.01 applies to all weights, including
   biases.

    python sft.py                                      # recipe tiny: how checkpoints/reviews-lm was made
    python sft.py tiny-tldr                            # how checkpoints/tldr-sft was made
    python sft.py tiny-dialog                          # how checkpoints/dialogs-lm was made
    python sft.py tiny-arithmetic                      # how checkpoints/arithmetic-sft was made
    python sft.py gpt2-imdb                            # GPT-2 on IMDB, as in lvwerra/gpt2-imdb, from the Hub
    python sft.py qwen-0.5b-chat                       # a chat model: Qwen2.5-0.5B on trl-lib/Capybara
    python sft.py --learning-rate 1e-3                 # tiny with one change; every field of Args is a flag
    python sft.py --model-name-or-path gpt2 --dataset-name my_folder --lora-r 16
    python sft.py --from-config "llama hidden_size=256 num_hidden_layers=4" --train-tokenizer 4096 \\
        --dataset-name my_folder
    torchrun --nproc_per_node 2 sft.py                 # two processes, twice the batch
    python sft.py --resume latest                      # continue a run that was stopped, bit for bit

Part I is the algorithm. Part II is infrastructure: models, data, processes, run folder, flags.
Papers: the first step of InstructGPT (Ouyang et al. 2022), packing without cross-contamination (Krell et al.
2021), LoRA (Hu et al. 2021), The N+ Implementation Details of RLHF with PPO ("N+ paper", Huang et al. 2024).
Results, metrics and details: docs/sft.md.
"""

import copy
import inspect
import json
import logging
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from pydoc import locate
from typing import Literal

import accelerate
import datasets
import tokenizers
import torch
import torch.nn.functional as F
import transformers
import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeRemainingColumn
from rich.table import Table
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

# ============================================================================================================
# Part I: the algorithm
# ============================================================================================================


@dataclass
class Args:
    """The defaults fine-tune GPT-2 on IMDB, as for lvwerra/gpt2-imdb."""

    # Run
    recipe: tyro.conf.Suppress[str] = "custom"  # set from the first word of the command line
    seed: int = 1  # random seed; the batches are a function of (seed, update)
    output_dir: str | None = None  # run folder (default: runs/<script>/<recipe>-s<seed>-<time>)
    resume: str | None = None  # continue a run: its folder, a checkpoint, or `latest` in runs/<script>
    save_every: int = 100  # updates between checkpoints (0: only at the end, or after a signal)
    keep_checkpoints: int = 2  # number of checkpoints to keep during a run; the last one stays after it
    log_with: Literal["none", "wandb", "tensorboard"] = "none"  # a tracker, in addition to metrics.jsonl
    num_eval_rows: int = 500  # held-out documents for the before / after table, drawn at random
    num_samples: int = 4  # how many of them the trained model continues at the end, as samples

    # Model
    model_name_or_path: str = "openai-community/gpt2"  # initial model: Hub name, folder, or LoRA folder
    from_config: str | None = None  # random weights instead: a model type and name=value pairs
    train_tokenizer: int = 0  # with from_config: train a tokenizer of this size on the data; 0: load one
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"  # matmul precision; auto: bf16 if the GPU has it
    save_dtype: Literal["float32", "bfloat16"] = "float32"  # of the saved model; bfloat16: half the size
    gradient_checkpointing: bool = False  # recompute activations in the backward pass to save memory
    lora_r: int = 0  # LoRA rank (0: train all weights)
    lora_alpha: int = 32  # LoRA scale: the adapter adds lora_alpha / lora_r * B A
    lora_target_modules: str = "c_attn"  # layers that get an adapter: comma-separated names, or all-linear

    # Data
    dataset_name: str = "stanfordnlp/imdb"  # columns text | prompt, completion | messages | dialog
    num_train_rows: int | None = None  # use only the first N training rows; None: all
    max_length: int = 512  # tokens per row; longer documents are cut, and lose their EOS
    packing: bool = True  # fill rows with several documents that do not see each other
    completion_only_loss: bool = True  # False: learn the prompt too (in a chat, its assistant's turns)
    chat_template_path: str | None = None  # file with a chat template, instead of the tokenizer's own
    utterance_end: str = " <EOU>"  # text after each utterance, as in RL4LMs; eos: EOS, as in DialoGPT

    # Batch: per_device_train_batch_size x gradient_accumulation_steps x processes, in packed rows
    num_train_epochs: float = 1.0  # epochs over the packed rows
    per_device_train_batch_size: int = 8  # rows per forward and backward pass on one process
    gradient_accumulation_steps: int = 1  # micro-batches per optimizer step

    # Optimizer
    learning_rate: float = 5e-5  # initial (or constant) learning rate
    optimizer: str = "torch.optim.AdamW"  # dotted name: torch.optim.SGD, bitsandbytes.optim.Adam8bit, ...
    adam_eps: float = 1e-8  # epsilon of Adam (the N+ paper uses 1e-5)
    lr_scheduler_type: Literal["constant", "linear", "cosine", "exponential"] = "linear"  # set in each update
    warmup_ratio: float = 0.0  # fraction of updates in which the learning rate rises from 0
    max_grad_norm: float | None = 1.0  # clip the gradient to this norm; None: no clipping


RECIPES = {
    "tiny": Args(  # made checkpoints/reviews-lm
        from_config="gpt2 n_embd=128 n_layer=3 n_head=4 n_positions=256",
        train_tokenizer=1024,
        dataset_name="data/reviews",
        max_length=256,
        dtype="float32",
        num_train_epochs=12.0,
        per_device_train_batch_size=16,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        warmup_ratio=0.05,
    ),
    "tiny-tldr": Args(  # made checkpoints/tldr-sft
        from_config=(
            "gpt_neox hidden_size=128 num_hidden_layers=3 num_attention_heads=4 "
            "intermediate_size=512 max_position_embeddings=256"
        ),
        train_tokenizer=1024,
        dataset_name="data/tldr",
        max_length=256,
        dtype="float32",
        save_dtype="bfloat16",
        num_train_epochs=10.0,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_ratio=0.05,
    ),
    "tiny-dialog": Args(  # made checkpoints/dialogs-lm
        from_config=(  # attention without dropout and a fused GELU are faster
            "gpt2 n_embd=128 n_layer=3 n_head=4 n_positions=256 "
            'attn_pdrop=0.0 activation_function="gelu_pytorch_tanh"'
        ),
        train_tokenizer=1024,
        dataset_name="data/dialogs",
        utterance_end="eos",
        max_length=256,
        dtype="float32",
        save_dtype="bfloat16",
        num_train_epochs=12.0,
        per_device_train_batch_size=8,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        warmup_ratio=0.05,
    ),
    "tiny-arithmetic": Args(  # made checkpoints/arithmetic-sft
        from_config=(
            "llama hidden_size=128 num_hidden_layers=3 num_attention_heads=4 num_key_value_heads=2 "
            "intermediate_size=384 max_position_embeddings=256 tie_word_embeddings=true"
        ),
        model_name_or_path="checkpoints/arithmetic-tokenizer",
        dataset_name="data/arithmetic-sft",
        max_length=256,
        dtype="float32",
        save_dtype="bfloat16",
        num_train_epochs=14.0,
        per_device_train_batch_size=16,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        warmup_ratio=0.05,
    ),
    "gpt2-imdb": Args(),
    "tldr-pythia-1b": Args(  # N+ paper, table 2: batch 128, 1 epoch
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


# ---- Math: pure functions of tensors -----------------------------------------------------------------------
#
# Shapes: B rows, L positions in a row, V tokens in the vocabulary, H hidden units, N positions with a label.


def next_token_losses(hidden, weight, labels, bias=None):
    """Cross-entropy of each label in nats, and whether the model's likeliest token was right.

    hidden [B, L, H], weight [V, H], labels [B, L], bias [V] or None -> losses fp32 [B, L - 1], correct bool
    [B, L - 1], both 0 where the label is -100. Only positions with a label go through the output layer,
    which is large, and its logits are computed in chunks (`ChunkedCrossEntropy`).
    """
    if bias is not None:
        bias = bias.clamp(min=-1e4)  # -inf forbids a token, but makes 0 * -inf = nan in the gradient
    hidden, labels = hidden[:, :-1], labels[:, 1:]  # the state at position t - 1 predicts token t
    valid = labels != -100  # [B, L - 1]
    valid_losses, valid_correct = ChunkedCrossEntropy.apply(
        hidden[valid], weight, labels[valid], bias, torch.is_grad_enabled()
    )
    losses = torch.zeros(valid.shape, device=hidden.device).masked_scatter(valid, valid_losses)
    correct = torch.zeros_like(valid).masked_scatter(valid, valid_correct)
    return losses, correct


def perplexity(loss):
    """exp(loss). math.exp raises an error if the result is too large, so there is a limit."""
    return math.exp(min(loss, 700))


def learning_rate(args, update, updates):
    """The learning rate in update 1, 2, ..., updates. -> float

    It rises linearly from 0 in the first warmup_ratio of the updates. Then it stays constant, or falls to 0
    (linear, cosine) or to 1 % (exponential).
    """
    warmup = math.ceil(args.warmup_ratio * updates)
    if update <= warmup:
        return args.learning_rate * (update - 1) / warmup
    progress = (update - 1 - warmup) / (updates - warmup)  # from 0 to almost 1
    if args.lr_scheduler_type == "constant":
        factor = 1.0
    elif args.lr_scheduler_type == "linear":
        factor = 1 - progress
    elif args.lr_scheduler_type == "cosine":
        factor = 0.5 * (1 + math.cos(math.pi * progress))
    else:
        factor = 0.01**progress
    return args.learning_rate * factor


# ---- Language model ----------------------------------------------------------------------------------------


def body_and_head(lm):
    """The transformer of a causal language model, and its output layer. Works with and without LoRA."""
    if hasattr(lm, "get_base_model"):
        lm = lm.get_base_model()  # peft: this only unwraps, the adapter stays inside the layers
    return lm.base_model, lm.get_output_embeddings()


def document_states(body, ids, positions):
    """Last hidden states of rows that may hold several documents. [B, L], [B, L] -> [B, L, H]

    A block-diagonal causal mask keeps the documents apart. It is built here because not every architecture
    can tell from position ids where a document starts.
    """
    starts = positions == 0  # [B, L]
    if not starts[:, 1:].any():  # one document per row: the model's own causal mask is enough, and faster
        return body(input_ids=ids, use_cache=False).last_hidden_state
    L = ids.shape[1]
    document = starts.cumsum(1)  # [B, L], number of the document in its row
    same_document = document[:, :, None] == document[:, None, :]  # [B, L, L]
    causal = torch.ones(L, L, dtype=torch.bool, device=ids.device).tril()  # [L, L]
    visible = (same_document & causal)[:, None]  # [B, 1, L, L]
    # The mask is added to the attention scores. Autocast may turn it into bf16, so it has bf16's minimum.
    mask = torch.zeros(visible.shape, device=ids.device)
    mask = mask.masked_fill(~visible, torch.finfo(torch.bfloat16).min)
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    return body(**inputs, use_cache=False).last_hidden_state


class LanguageModel(nn.Module):
    """A causal language model whose forward pass returns losses, so that DDP has a single module to wrap."""

    def __init__(self, lm):
        super().__init__()
        self.lm = lm

    def forward(self, ids, labels, positions):
        """[B, L] each -> losses fp32 [B, L - 1], correct bool [B, L - 1]"""
        body, head = body_and_head(self.lm)
        hidden = document_states(body, ids, positions)  # [B, L, H]
        return next_token_losses(hidden, head.weight, labels, head.bias)


# ---- Documents: token ids and labels -----------------------------------------------------------------------
#
# A document is a pair of lists, ids and labels. Two documents, each with a prompt and a completion, packed
# into a row:
#
#     ids          Was    it     good   ?      Yes    EOS    Really ?      No     EOS    pad
#     labels       -100   -100   -100   -100   Yes    EOS    -100   -100   No     EOS    -100
#     positions    0      1      2      3      4      5      0      1      2      3      10
#
# The hidden state of each token predicts the label of the next one: that of the first "?" predicts "Yes".


def text_documents(rows, tokenizer, args):
    """Column text: the text and EOS, with labels on all of it. -> list of (ids, labels)"""
    texts = [text for text in rows["text"] if isinstance(text, str) and text]
    report_skipped(len(rows), len(texts), "rows: no text")
    documents = []
    for ids in tokenize(tokenizer, texts):
        ids = ids + [tokenizer.eos_token_id]
        documents.append((ids, ids))
    return documents


def completion_documents(rows, tokenizer, args):
    """Columns prompt and completion: the two and EOS, without labels on the prompt. -> list of (ids, labels)

    They are tokenized separately: no token may span the end of the prompt, because in a rollout the prompt
    comes alone. Nothing is added between the two: a space there must be in the data.
    """
    prompts, completions = [], []
    for prompt, completion in zip(rows["prompt"], rows["completion"]):
        if isinstance(prompt, str) and isinstance(completion, str) and completion:
            prompts.append(prompt)
            completions.append(completion)
    report_skipped(len(rows), len(prompts), "rows: no prompt or no completion")
    documents = []
    prompt_ids = tokenize(tokenizer, prompts)
    completion_ids = []
    if completions:  # tokenizers raise for an empty list
        completion_ids = tokenizer(completions, add_special_tokens=False).input_ids  # no BOS in the middle
    for prompt, completion in zip(prompt_ids, completion_ids):
        completion = completion + [tokenizer.eos_token_id]
        prompt_labels = prompt
        if args.completion_only_loss:
            prompt_labels = [-100] * len(prompt)
        documents.append((prompt + completion, prompt_labels + completion))
    return documents


def chat_documents(rows, tokenizer, args):
    """Columns messages, or prompt and completion as lists of messages. -> list of (ids, labels)

    The tokenizer's chat template writes the conversation. Labels are on the assistant's turns, each with its
    end-of-turn token, such as `<|im_end|>`; with prompt and completion, on the turns of the completion. If
    the last turn does not end in a special token, EOS is put there. Earlier turns then end without one.
    """
    conversations = []  # pairs: messages, index of the first message to learn from
    if "messages" in rows.column_names:
        conversations = [(messages, 0) for messages in rows["messages"] if is_chat(messages)]
    else:
        for prompt, completion in zip(rows["prompt"], rows["completion"]):
            if is_chat(prompt) and is_chat(completion):
                first_learned = len(prompt) if args.completion_only_loss else 0
                conversations.append((prompt + completion, first_learned))
    report_skipped(len(rows), len(conversations), "rows: no list of messages (dicts with role and content)")
    special = special_ids(tokenizer)
    num_assistant_turns, num_learned_turns = 0, 0
    documents = []
    for messages, first_learned in conversations:
        ids, labels = [], []
        for text, is_learned in chat_parts(tokenizer, messages, first_learned):
            if ids:
                part = tokenizer(text, add_special_tokens=False).input_ids
            else:  # the first part has BOS, once: from the template, or else from the tokenizer
                part = tokenize(tokenizer, [text])[0]
            ids.extend(part)
            labels.extend(part if is_learned else [-100] * len(part))
            num_learned_turns += is_learned
        end = last_labeled_position(labels) + 1  # 0 if no turn is learned
        if end > 0 and labels[end - 1] not in special:
            # There is no end-of-turn token: put EOS after the last turn, and drop what follows.
            ids = ids[:end] + [tokenizer.eos_token_id]
            labels = labels[:end] + [tokenizer.eos_token_id]
        documents.append((ids, labels))
        num_assistant_turns += sum(message["role"] == "assistant" for message in messages[first_learned:])
    reason = "turns of the assistant: no message before them, or rendered otherwise than they are generated"
    report_skipped(num_assistant_turns, num_learned_turns, reason)
    return documents


def last_labeled_position(labels):
    """The position of the last label that is not -100; -1 if there is none."""
    return max((i for i, label in enumerate(labels) if label != -100), default=-1)


def chat_parts(tokenizer, messages, first_learned=0):
    r"""A conversation as the chat template writes it, cut into parts. -> list of (text, bool: is it learned)

    first_learned: the first message from which to learn. Together, the parts are the conversation. What a
    policy would generate is learned; in ChatML, for example:

        not learned    <|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n
        learned        It is 5.<|im_end|>
        not learned    \n
    """
    conversation = render_chat(tokenizer, messages)
    parts = []
    position = 0  # in the conversation
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or i < first_learned:
            continue
        if i == 0:  # there is no prompt
            continue
        before = render_chat(tokenizer, messages[:i], add_generation_prompt=True)
        after = render_chat(tokenizer, messages[: i + 1])
        if not after.startswith(before) or not conversation.startswith(after):
            # The turn differs from what a policy would generate here. For example, the templates of thinking
            # models drop the thoughts of earlier turns. Do not learn it.
            continue
        turn = after[len(before) :].rstrip()  # generation stops before the line break that ends a turn
        parts.append((conversation[position : len(before)], False))
        parts.append((turn, True))
        position = len(before) + len(turn)
    parts.append((conversation[position:], False))
    return [(text, is_learned) for text, is_learned in parts if text]


def dialog_documents(rows, tokenizer, args):
    """Column dialog: each utterance with its end mark, then EOS; all have labels. -> list of (ids, labels)"""
    documents = []
    for _, utterances, _ in load_dialogs(rows):
        ids = bos_ids(tokenizer)
        for utterance in utterance_ids(tokenizer, utterances, args.utterance_end):
            ids.extend(utterance)
        if args.utterance_end != "eos":  # otherwise the last utterance ends in EOS already
            ids.append(tokenizer.eos_token_id)
        documents.append((ids, ids))
    return documents


def utterance_ids(tokenizer, utterances, end):
    """Token ids of each utterance: a space, its text, the end mark. -> list of lists

    The same rule in training, rollouts and chat. Utterances are tokenized one by one, so that no token
    spans two of them and a prompt is always the beginning of its dialog, token by token.
    """
    if end == "eos":
        mark, last = "", [tokenizer.eos_token_id]
    else:
        mark, last = end, []
    texts = [f" {' '.join(text.split())}{mark}" for text in utterances]
    return [ids + last for ids in tokenizer(texts, add_special_tokens=False).input_ids]


def load_documents(rows, tokenizer, args):
    """The documents of a data set, cut to max_length. -> list of (ids, labels)

    A document that is cut loses its EOS, because it does not end there. Label -100: nothing to learn here.
    """
    columns = set(rows.column_names)
    has_completions = {"prompt", "completion"} <= columns
    if "text" in columns:
        documents = text_documents(rows, tokenizer, args)
    elif "messages" in columns or (has_completions and any(is_chat(prompt) for prompt in rows["prompt"])):
        documents = chat_documents(rows, tokenizer, args)
    elif has_completions:
        documents = completion_documents(rows, tokenizer, args)
    elif "dialog" in columns:
        documents = dialog_documents(rows, tokenizer, args)
    else:
        raise UserError(
            f"data set {args.dataset_name!r} needs the column text, or prompt and completion, or messages, "
            f"or dialog; it has {', '.join(rows.column_names)}"
        )
    kept = []
    for ids, labels in documents:
        ids, labels = ids[: args.max_length], labels[: args.max_length]
        if any(label != -100 for label in labels[1:]):  # the first token is never predicted
            kept.append((ids, labels))
    reason = f"no text to learn from within --max-length {args.max_length} tokens"
    report_skipped(len(documents), len(kept), f"documents: {reason}")
    if not kept:
        raise UserError(f"data set {args.dataset_name!r}: {reason} in any row")
    return kept


def pack(documents, max_length, packing):
    """Fill rows of max_length tokens with whole documents, in their order. -> list of lists of documents"""
    rows = []
    length = 0  # of the last row, in tokens
    for ids, labels in documents:
        if not rows or not packing or length + len(ids) > max_length:
            rows.append([])
            length = 0
        rows[-1].append((ids, labels))
        length += len(ids)
    return rows


def collate_rows(rows, device):
    """Rows of documents, padded on the right. -> dict: ids, labels, positions, [B, L] each

    Positions start at 0 in each document. Its first token has no label: nothing before it could predict it.
    Labels come from the documents, never from `ids != pad`, because many tokenizers use EOS as the padding
    token.
    """
    B = len(rows)
    lengths = [sum(len(ids) for ids, _ in row) for row in rows]
    L = max(lengths)
    ids = torch.zeros(B, L, dtype=torch.long)
    labels = torch.full((B, L), -100)
    positions = torch.arange(L).repeat(B, 1)  # remains at pads: it is not 0, so no document starts there
    for i, row in enumerate(rows):
        start = 0
        for document_ids, document_labels in row:
            end = start + len(document_ids)
            ids[i, start:end] = torch.tensor(document_ids)
            labels[i, start:end] = torch.tensor(document_labels)
            labels[i, start] = -100
            positions[i, start:end] = torch.arange(len(document_ids))
            start = end
    return {"ids": ids.to(device), "labels": labels.to(device), "positions": positions.to(device)}


# ---- Training ----------------------------------------------------------------------------------------------


def train(args):
    """The whole run, from the flags to the final table. -> transformers model, run folder"""
    check_sft_args(args)
    accelerator = start_accelerator(args)
    device, rank, world = accelerator.device, accelerator.process_index, accelerator.num_processes
    n = args.per_device_train_batch_size
    B = n * args.gradient_accumulation_steps * world  # rows per optimizer step

    train_data, held_out_data = load_splits(args.dataset_name)
    tokenizer = build_tokenizer(args, train_data)
    model = to_device(build_language_model(args, tokenizer), args, device)
    if args.from_config:  # otherwise model and tokenizer came together
        check_tokenizer_survives(tokenizer, model.lm, held_out_data)
    if args.num_train_rows is not None:
        train_data = train_data.select(range(min(args.num_train_rows, len(train_data))))
    documents = load_documents(train_data, tokenizer, args)
    rows = pack(documents, args.max_length, args.packing)
    updates = max(1, round(args.num_train_epochs * len(rows) / B))

    # Held-out documents are drawn at random: IMDB is sorted, and its first reviews are all negative.
    held_out = load_documents(held_out_data, tokenizer, args)
    order = torch.randperm(len(held_out), generator=generator_for(args.seed, "held-out"))
    held_out = [held_out[i] for i in order[: args.num_eval_rows]]
    held_out_rows = pack(held_out, args.max_length, args.packing)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=wants_bf16(args, device))

    run = Run(args, accelerator, updates, status={"loss": "loss", "accuracy": "mean_token_accuracy"})
    run.print_setup(f"{args.from_config or args.model_name_or_path} on {args.dataset_name}", model)
    run.print(
        f"{len(documents):,} documents in {len(rows):,} rows of up to {args.max_length} tokens; "
        f"batch: {n} rows per pass x {args.gradient_accumulation_steps} accumulated x {world} processes "
        f"= {B} rows; {updates} updates of one optimizer step each"
    )

    with autocast:
        before = held_out_metrics(model, held_out_rows, accelerator, args)

    # `model` is evaluated and saved, `learner` is trained. On one process and with DDP they are the same
    # module, and copy_weights does nothing. With FSDP2 and ZeRO-3 the learner is a sharded copy.
    learner = make_learner(model, accelerator)
    optimizer = make_optimizer(args, trainable(learner))
    learner, optimizer = accelerator.prepare(learner, optimizer)
    # dict: name -> parameter. Only now, because prepare replaces the parameters if it shards the learner.
    parameters = trainable(accelerator.unwrap_model(learner))
    state = run.restore(parameters, optimizer, B)  # {"update": 0} in a new run

    for update in range(state["update"] + 1, updates + 1):
        # 1. Batch. Row numbers come from shuffled epochs, and are the same on every process. Each process
        #    takes its share of them, in micro-batches of n rows.
        start_time = time.time()
        row_numbers = stream_rows(len(rows), start=(update - 1) * B, count=B, seed=args.seed)  # [B]
        row_numbers = row_numbers[rank * B // world : (rank + 1) * B // world]
        micro_batches = []
        for numbers in row_numbers.split(n):
            micro_batches.append(collate_rows([rows[i] for i in numbers], device))
        num_tokens = sum((mb["labels"] != -100).sum() for mb in micro_batches)
        num_tokens = accelerator.reduce(num_tokens)  # labels in the batch of all processes

        # 2. Gradient. The loss is the sum over this process's tokens, divided by the number of labels on all
        #    processes. So the gradient does not depend on how the batch is split.
        learner.train()  # dropout, in models that have it
        for group in optimizer.param_groups:  # not later: DeepSpeed takes its step in the last backward pass
            group["lr"] = learning_rate(args, update, updates)
        loss_sum, correct_sum = torch.zeros(2, device=device)
        for i, mb in enumerate(micro_batches):
            is_last = i + 1 == len(micro_batches)
            with sync_gradients_if(is_last, accelerator, learner):
                with autocast:
                    losses, correct = learner(mb["ids"], mb["labels"], mb["positions"])  # [n, L - 1] each
                loss = losses.sum() / num_tokens
                accelerator.backward(loss * world)  # DDP averages over processes; we want the sum
            loss_sum += losses.detach().sum()
            correct_sum += correct.sum()

        # 3. Optimizer step.
        grad_norm = clip_gradients(accelerator, parameters, args.max_grad_norm)
        run.check_gradient(update, grad_norm)  # warns if it is not finite, and raises after five in a row
        if math.isfinite(grad_norm):
            optimizer.step()  # does nothing with DeepSpeed, which has taken the step already
        optimizer.zero_grad()

        # 4. Log and save.
        mean_loss = (accelerator.reduce(loss_sum) / num_tokens).item()
        accuracy = (accelerator.reduce(correct_sum) / num_tokens).item()
        seconds = time.time() - start_time
        metrics = {
            "update": update,
            "epoch": update * B / len(rows),
            "lr": optimizer.param_groups[0]["lr"],
            "loss": mean_loss,
            "mean_token_accuracy": accuracy,
            "perplexity": perplexity(mean_loss),
            "grad_norm": grad_norm,
            "perf/seconds": seconds,
            "perf/tokens_per_second": num_tokens.item() / seconds,  # tokens with a label
            "perf/peak_memory_mb": peak_memory_mb(device),
        }
        run.log(metrics)
        run.checkpoint(update, parameters, optimizer, B)

    # 5. Evaluate on the same held-out documents again, show samples, and save the model.
    copy_weights(parameters, model)
    with autocast:
        after = held_out_metrics(model, held_out_rows, accelerator, args)
    if not math.isfinite(after["loss"]):
        raise UserError(
            "the trained model is not saved, because its held-out loss is not finite: lower --learning-rate"
        )
    if accelerator.is_main_process:
        report_held_out(run, before, after, len(held_out))
        stop_ids = find_end_tokens(model.lm, tokenizer, documents, args.max_length)
        with autocast:
            samples = write_samples(model.lm, tokenizer, held_out[: args.num_samples], stop_ids)
        report_samples(run, samples)
        save_language_model(model.lm, tokenizer, run.folder / "model", args, stop_ids)
    run.finish()
    return model.lm, run.folder


@torch.no_grad()
def held_out_metrics(model, rows, accelerator, args):
    """Loss in nats per token, token accuracy and perplexity. Each process takes its share of the rows."""
    model.eval()
    n = args.per_device_train_batch_size
    device, rank, world = accelerator.device, accelerator.process_index, accelerator.num_processes
    loss_sum, correct_sum, num_tokens = torch.zeros(3, device=device)
    for start in range(rank * n, len(rows), world * n):
        batch = collate_rows(rows[start : start + n], device)
        losses, correct = model(batch["ids"], batch["labels"], batch["positions"])  # [n, L - 1] each
        loss_sum += losses.sum()
        correct_sum += correct.sum()
        num_tokens += (batch["labels"] != -100).sum()
    num_tokens = accelerator.reduce(num_tokens)
    loss = (accelerator.reduce(loss_sum) / num_tokens).item()
    accuracy = (accelerator.reduce(correct_sum) / num_tokens).item()
    return {"loss": loss, "mean_token_accuracy": accuracy, "perplexity": perplexity(loss)}


@torch.no_grad()
def write_samples(model, tokenizer, documents, stop_ids):
    """Continue each prompt by sampling, up to 40 tokens. -> one dict(prompt, completion) per document

    stop_ids: the tokens that end a completion. The prompt is all that comes before the completion, or before
    the last learned turn of a chat. A document that has labels on all of it is continued after its first 8
    tokens.
    """
    context = context_length(model)
    samples = []
    for ids, labels in documents:
        prompt_length = last_labeled_position(labels) + 1
        while prompt_length > 0 and labels[prompt_length - 1] != -100:
            prompt_length -= 1
        if prompt_length == 0:
            prompt_length = max(1, min(8, len(ids) - 1))
        prompt = ids[:prompt_length]
        prompt = prompt[-max(1, context - 40) :]  # a long prompt loses its beginning
        output = model.generate(
            torch.tensor([prompt], device=model.device),
            attention_mask=torch.ones(1, len(prompt), device=model.device),
            max_new_tokens=min(40, context - len(prompt)),
            do_sample=True,
            top_k=0,
            eos_token_id=stop_ids,
            pad_token_id=tokenizer.pad_token_id,
        )
        completion = output[0, len(prompt) :]
        samples.append({"prompt": tokenizer.decode(prompt), "completion": tokenizer.decode(completion)})
    return samples


# ============================================================================================================
# Part II: infrastructure. Nothing below is about fine-tuning.
# ============================================================================================================

SCRIPT = Path(__file__).stem
HERE = Path(__file__).resolve().parent  # recipes name folders next to this file


class UserError(Exception):
    """An error the user can fix: printed on one line, exit code 2."""


# ---- Cross-entropy in chunks -------------------------------------------------------------------------------


def cast_like_autocast(tensor):
    """To autocast's dtype if autocast is on, which does not reach into a backward pass written by hand."""
    device_type = tensor.device.type
    if torch.is_autocast_enabled(device_type):
        tensor = tensor.to(torch.get_autocast_dtype(device_type))
    return tensor


def fp32_logits(hidden, weight, bias=None):
    """The output layer, with its result in fp32 under autocast too. [N, H], [V, H], [V] or None -> [N, V]

    Logits of a language model may be near -100, where neighboring bf16 numbers are 0.5 apart. So products of
    bf16 numbers are added up in fp32, and their sum is never rounded to bf16.
    """
    hidden, weight = cast_like_autocast(hidden), cast_like_autocast(weight)
    device_type = hidden.device.type
    with torch.autocast(device_type, enabled=False):
        if device_type == "cuda" and hidden.dtype != torch.float32:
            logits = torch.mm(hidden, weight.T, out_dtype=torch.float32)
        else:
            logits = hidden.float() @ weight.float().T
    if bias is not None:
        logits.add_(bias)
    return logits


class ChunkedCrossEntropy(torch.autograd.Function):
    """What next_token_losses returns, computed for 128 rows at a time, since all logits [N, V] are too many.

    The backward pass needs the log-softmax of each chunk again. It recomputes it, except for the first
    chunks: theirs is kept, up to MAX_KEPT numbers (128 MiB).
    """

    MAX_KEPT = 2**25

    @staticmethod
    def forward(ctx, hidden, weight, labels, bias, has_backward):
        """[N, H], [V, H], [N], [V] or None, bool -> losses fp32 [N], correct bool [N]"""
        hidden, weight = cast_like_autocast(hidden), cast_like_autocast(weight)
        losses = torch.zeros(len(hidden), device=hidden.device)
        correct = torch.zeros(len(hidden), device=hidden.device, dtype=torch.bool)
        kept = []
        for rows in ChunkedCrossEntropy.chunks(hidden):
            log_p = ChunkedCrossEntropy.log_softmax(hidden[rows], weight, bias)  # [rows, V]
            label_logprobs = log_p.gather(1, labels[rows, None]).squeeze(1)
            losses[rows] = -label_logprobs
            correct[rows] = label_logprobs == log_p.amax(1)  # amax is faster than argmax
            is_kept = rows.stop * len(weight) <= ChunkedCrossEntropy.MAX_KEPT
            if is_kept and has_backward:
                kept.append(log_p)
        ctx.save_for_backward(hidden, weight, labels, bias, *kept)
        ctx.mark_non_differentiable(correct)
        return losses, correct

    @staticmethod
    def backward(ctx, grad, _):
        """d loss / d logits = softmax(logits) - one_hot(label)"""
        hidden, weight, labels, bias, *kept = ctx.saved_tensors
        d_hidden = torch.zeros_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[3] else None
        for i, rows in enumerate(ChunkedCrossEntropy.chunks(hidden)):
            if i < len(kept):
                log_p = kept[i]
            else:
                log_p = ChunkedCrossEntropy.log_softmax(hidden[rows], weight, bias)
            scale = grad[rows, None]  # [rows, 1]
            d_logits = log_p.exp_().mul_(scale)  # [rows, V], in place: nobody needs log_p again
            d_logits.scatter_add_(1, labels[rows, None], -scale)
            if d_bias is not None:
                d_bias += d_logits.sum(0)
            d_logits = d_logits.to(weight.dtype)
            d_hidden[rows] = d_logits @ weight
            if d_weight is not None and weight.dtype == torch.float32:
                d_weight.addmm_(d_logits.T, hidden[rows])  # needs no temporary [V, H], but equal dtypes
            elif d_weight is not None:
                d_weight += d_logits.T @ hidden[rows]
        return d_hidden, d_weight, None, d_bias, None

    @staticmethod
    def chunks(hidden):
        return [slice(start, start + 128) for start in range(0, len(hidden), 128)]

    @staticmethod
    def log_softmax(hidden, weight, bias):
        """[rows, H] -> fp32 [rows, V]"""
        logits = fp32_logits(hidden, weight, bias)
        return torch.log_softmax(logits, 1, out=logits)  # in place


# ---- Loading models ----------------------------------------------------------------------------------------


def resolve_path(name):
    """Look for a folder in the working directory, then next to this file; else return a Hub name."""
    for path in (Path(name), HERE / name):
        if path.exists():
            return str(path)
    return name


def load(what, function, name, **kwargs):
    """function(name), with a one-line error if it fails: a wrong path, no network, a broken file."""
    try:
        return function(resolve_path(name), **kwargs)
    except Exception as error:  # the libraries raise a dozen different types
        cause = error
        if isinstance(error, datasets.exceptions.DatasetGenerationError):
            cause = error.__cause__ or error  # this one says where
        reason = str(cause).strip() or f"empty? {cause!r}"
        first_line = reason.splitlines()[0]
        if Path(name).is_absolute() and not Path(name).exists():
            first_line = "no such folder"
        top_folder = str(name).split("/")[0]
        if top_folder in ("checkpoints", "data") and not Path(resolve_path(top_folder)).exists():
            first_line = f"the recipes named tiny need {top_folder}/ from the repository next to the script"
        raise UserError(f"cannot load the {what} {name!r} (a folder, or a Hub name): {first_line}") from error


def load_model(auto_class, name, settings=None, **kwargs):
    """A model in fp32 without dropout. A folder with a LoRA adapter is merged into its base model.

    `settings` replaces config fields. Loading never runs code from the files: without safetensors,
    pytorch_model.bin is read with weights_only.
    """
    name = resolve_path(name)
    if (Path(name) / "adapter_config.json").exists():
        return load_merged_adapter(auto_class, name, settings, **kwargs)
    config = load("model", transformers.AutoConfig.from_pretrained, name)
    for key, value in config.to_dict().items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)  # with dropout, the first ratio would not be 1
        if value == "gelu_new":
            setattr(config, key, "gelu_pytorch_tanh")  # the same function in one kernel instead of eight
    config.update(settings or {})
    kwargs |= dict(config=config, dtype=torch.float32, weights_only=True)
    return load("model", auto_class.from_pretrained, name, **kwargs)


def load_merged_adapter(auto_class, folder, settings=None, **kwargs):
    """The base model that a LoRA adapter names, with the adapter merged into it."""
    import peft

    if "quantization_config" in kwargs:
        raise UserError(f"--load-in-8bit: {folder} is a LoRA adapter; merge it into its base model first")
    base_name = peft.PeftConfig.from_pretrained(folder).base_model_name_or_path
    base = load_model(auto_class, base_name, settings, **kwargs)
    model = peft.PeftModel.from_pretrained(base, folder).merge_and_unload()
    model.requires_grad_(True)  # peft froze the base
    model.name_or_path = folder  # a new adapter trained on top will name this folder as its base
    return model


def model_from_config(auto_class, text, tokenizer, **settings):
    """A model with random weights from "TYPE_OR_FOLDER name=value ...", sized for the tokenizer."""
    name, *pairs = text.split()
    special_tokens = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    try:
        values = {}
        for pair in pairs:
            key, value = pair.split("=")
            values[key] = json.loads(value)
        if Path(name).exists() or "/" in name:
            config = transformers.AutoConfig.from_pretrained(name)
        else:
            config = transformers.AutoConfig.for_model(name, **values)  # derives other sizes from these
        config.update({"vocab_size": len(tokenizer)} | special_tokens | settings | values)
        return auto_class.from_config(config)
    except Exception as error:  # the libraries raise a dozen different types
        example = "expected for example 'gpt2 n_layer=3 n_embd=128', or a folder"
        raise UserError(f"--from-config {text!r}: {error}; {example}") from error


def load_tokenizer(name):
    """The tokenizer of a folder or Hub name. If it has no pad token, EOS becomes the pad."""
    tokenizer = load("tokenizer", AutoTokenizer.from_pretrained, name)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def learn_tokenizer(texts, size):
    """A byte-level BPE tokenizer (Radford et al. 2019) of `size` tokens, EOS and a separate pad included."""
    bpe = tokenizers.ByteLevelBPETokenizer()
    special_tokens = ["<|endoftext|>", "<|pad|>"]
    bpe.train_from_iterator(texts, vocab_size=size, special_tokens=special_tokens, show_progress=False)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|pad|>",
    )


def build_tokenizer(args, rows):
    """The tokenizer of --model-name-or-path, or a new one that is trained on the rows."""
    if args.train_tokenizer:
        tokenizer = learn_tokenizer(all_texts(rows), args.train_tokenizer)
    else:
        tokenizer = load_tokenizer(args.model_name_or_path)
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no EOS token, so the model could not learn to stop")
    if args.chat_template_path is not None:
        path = Path(resolve_path(args.chat_template_path))
        if not path.is_file():
            raise UserError(f"--chat-template-path {args.chat_template_path}: there is no such file")
        tokenizer.chat_template = path.read_text()
    return tokenizer


def check_tokenizer_survives(tokenizer, model, rows):
    """Raise UserError if the tokenizer, saved and loaded again, gives other tokens.

    For models of some families (Qwen2, Phi-3), transformers ignores which tokenizer was saved, and loads the
    family's own. rows: a data set; the texts of its first 10 rows are compared.
    """
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        reloaded = AutoTokenizer.from_pretrained(folder)
    for text in all_texts(rows.select(range(min(10, len(rows))))):
        if reloaded(text).input_ids != tokenizer(text).input_ids:
            raise UserError(
                f"with a {model.config.model_type} model, transformers would load this tokenizer as a "
                f"{type(reloaded).__name__}, and texts would have other tokens: use another model type"
            )


def all_texts(rows):
    """The texts of all columns that documents are made from. -> list of str"""
    texts = []
    for name in ("text", "prompt", "completion"):
        if name in rows.column_names:
            texts += [text for text in rows[name] if isinstance(text, str)]
    for name in ("messages", "prompt", "completion"):
        if name in rows.column_names:
            for chat in filter(is_chat, rows[name]):
                texts += [message["content"] for message in chat if message["content"]]
    if "dialog" in rows.column_names:
        for utterances in rows["dialog"]:
            texts.append(" " + " ".join(text for text in utterances or () if text))
    return texts


def context_length(model):
    """The maximum number of tokens of a model. RoBERTa's positions start after its pad id."""
    reserved = 0
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            reserved = module.padding_idx + 1
    return getattr(model.config, "max_position_embeddings", 10**9) - reserved


def to_device(model, args, device):
    """Move a model to the device. If products are in bf16, frozen weights of linear layers become bf16.

    Autocast would round them to bf16 in every product again, so the results stay exactly the same. Embeddings
    (often tied to the output layer) and norms stay in fp32.
    """
    if wants_bf16(args, device):
        embeddings = {id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Embedding)}
        linear_layers = (nn.Linear, transformers.pytorch_utils.Conv1D)  # Conv1D is GPT-2's linear layer
        for layer in model.modules():
            if isinstance(layer, linear_layers):
                for p in layer.parameters(recurse=False):
                    if p.dtype == torch.float32 and not p.requires_grad and id(p) not in embeddings:
                        p.data = p.data.to(torch.bfloat16)
    return model.to(device)


def trainable(module):
    """The parameters that the optimizer trains and a checkpoint holds. -> dict: name -> parameter"""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def transformer_layers(model):
    """The list of a model's transformer layers, which is its longest ModuleList."""
    return max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)


def add_lora(model, args):
    """Add a LoRA adapter (Hu et al. 2021): each named layer computes W + lora_alpha / lora_r * B A, with B
    = 0 at first."""
    import peft

    target_modules = args.lora_target_modules
    if target_modules != "all-linear":
        target_modules = target_modules.split(",")
    # A classifier's head is trained as a whole, without an adapter.
    heads = [name for name in ("score", "classifier", "pre_classifier") if hasattr(model, name)]
    config = peft.LoraConfig(
        r=args.lora_r,
        lora_alpha=args.lora_alpha,
        target_modules=target_modules,
        exclude_modules=heads or None,
    )
    flag = f"--lora-target-modules {args.lora_target_modules}"
    try:
        model = peft.get_peft_model(model, config)
    except ValueError as error:
        raise UserError(f"{flag}: no such layers in this model") from error
    if hasattr(model.get_base_model().get_output_embeddings(), "base_layer"):
        raise UserError(f"{flag}: the output embedding cannot have an adapter")
    return model


def can_pack(model, max_length):
    """True if a mask and position ids are enough to keep several documents in a row apart."""
    if getattr(model, "_is_stateful", True):  # a recurrent state would leak into the next document
        return False
    if "position_ids" not in inspect.signature(model.forward).parameters:  # BLOOM would go on counting
        return False
    config = model.config.get_text_config()
    if getattr(config, "alibi", False):  # Falcon derives its ALiBi from another kind of mask
        return False
    for name in ("sliding_window", "attention_chunk_size"):  # the block-diagonal mask has no window
        window = getattr(config, name, None)
        if window and window < max_length:
            return False
    return True


@torch.no_grad()
def check_own_losses(model, name):
    """Raise if a model computes its logits in any other way than hidden @ weight.T + bias.

    A soft cap (Gemma) or a scale (Granite, Cohere) would be ignored in training.
    """
    model.eval()
    _, head = body_and_head(model)
    ids = torch.arange(min(6, model.config.vocab_size), device=model.device)[None]  # [1, 6]
    head.weight.mul_(64)  # a soft cap does not show in the small logits of random weights
    ours, _ = LanguageModel(model)(ids, labels=ids, positions=ids)  # token i is at position i
    theirs = F.cross_entropy(model(ids).logits[0, :-1].float(), ids[0, 1:], reduction="none")
    head.weight.div_(64)  # exact, because 64 is a power of 2
    if not torch.allclose(ours[0], theirs, atol=1e-3, rtol=1e-3):
        raise UserError(f"{name}: the head of this model is more than hidden @ weight (a soft cap, a scale)")


def build_language_model(args, tokenizer):
    """The model to train, as the flags say: pretrained, or with random weights. -> LanguageModel

    Random weights keep the dropout of their config; pretrained models are loaded without dropout.
    """
    if args.from_config:
        name = args.from_config
        model = model_from_config(AutoModelForCausalLM, args.from_config, tokenizer)
    else:
        name = args.model_name_or_path
        model = load_model(AutoModelForCausalLM, args.model_name_or_path)
    if args.max_length > context_length(model):
        context = context_length(model)
        raise UserError(f"--max-length {args.max_length}: the context of the model is {context} tokens")
    if args.packing and not can_pack(model, args.max_length):
        raise UserError(
            "--packing needs a model that takes position ids, keeps no state and attends to whole rows: "
            "use --no-packing"
        )
    check_own_losses(model, name)
    if args.lora_r:
        model = add_lora(model, args)
    if args.gradient_checkpointing:
        model.activation_checkpointing_enable(dict(use_reentrant=False))
    return LanguageModel(model)


def special_ids(tokenizer):
    """The ids of all special tokens, also of those that are not EOS, BOS, ... (<|eot_id|>). -> set of int"""
    added = tokenizer.added_tokens_decoder.items()
    return set(tokenizer.all_special_ids) | {i for i, token in added if token.special}


def find_end_tokens(model, tokenizer, documents, max_length):
    """The ids of the tokens that end a response. -> an id, or a list of several: what generation_config takes

    They are EOS, those of the model's generation_config, and the special tokens at the end of what is learned
    of a document, such as <|im_end|>. documents: list of (ids, labels) with one label or more
    """
    eos = model.generation_config.eos_token_id  # an id, a list of ids, or None
    ids = set(eos if isinstance(eos, list) else [eos])
    ids = (ids | {tokenizer.eos_token_id}) - {None}
    uncut = [labels for _, labels in documents if len(labels) < max_length]  # longer ones may have been cut
    last_tokens = {labels[last_labeled_position(labels)] for labels in uncut}
    ids |= last_tokens & special_ids(tokenizer)
    return sorted(ids) if len(ids) > 1 else ids.pop()


def save_language_model(model, tokenizer, folder, args, stop_ids):
    """Save what plain transformers loads, in --save-dtype, with LoRA merged. Generation ends at stop_ids."""
    if args.lora_r:
        model = model.float().merge_and_unload()  # bf16 (to_device) is too coarse to merge into
    generation_config = model.generation_config
    generation_config.eos_token_id = stop_ids
    if not generation_config.do_sample:  # then transformers refuses to save the settings of sampling
        generation_config.temperature = generation_config.top_p = generation_config.top_k = None
    model.to(getattr(torch, args.save_dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# ---- Data --------------------------------------------------------------------------------------------------


def load_data_set(name):
    """All splits of a Hub data set, NAME or NAME:CONFIG, or of a folder of jsonl files."""
    if not Path(name).exists():
        name, _, config = name.partition(":")
        return datasets.load_dataset(name, config or None)
    return datasets.load_dataset(name)


def load_splits(name):
    """The training and held-out rows of a data set.

    Held out: the split test, or else validation, or else the last 10 % of train.
    """
    splits = load("data set", load_data_set, name)
    if "train" not in splits or len(splits["train"]) < 2:
        names = ", ".join(splits)
        raise UserError(f"data set {name!r} needs a split train with at least 2 rows; it has {names}")
    rows = splits["train"]
    for held_out in ("test", "validation"):
        if held_out in splits:
            return rows, splits[held_out]
    cut = len(rows) - max(1, len(rows) // 10)
    return rows.select(range(cut)), rows.select(range(cut, len(rows)))


def bos_ids(tokenizer):
    """[BOS] if the tokenizer begins each text with it, as those of Llama and Gemma do; else []."""
    first = tokenizer("a").input_ids[:1]
    return first if first == [tokenizer.bos_token_id] else []


def tokenize(tokenizer, texts):
    """Token ids of each text, after BOS if the tokenizer puts it there. -> list of lists

    BOS is added only once, even if a text begins with it. Nothing is added at the end, because the response
    follows there.
    """
    if not texts:
        return []  # tokenizers raise for an empty list
    bos = bos_ids(tokenizer)
    all_ids = tokenizer(list(texts), add_special_tokens=False).input_ids
    return [ids if bos and ids[:1] == bos else bos + ids for ids in all_ids]


def report_skipped(total, kept, reason):
    """Tell the user how many rows of the data are not used, and why."""
    if kept < total and accelerate.PartialState().is_main_process:
        print(f"skipped {total - kept:,} of {total:,} {reason}")


def is_chat(value):
    """True for a list of messages: dicts with role and content, both str. Images and tool calls are not."""
    if not isinstance(value, list) or not value:
        return False
    for message in value:
        if not isinstance(message, dict):
            return False
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            return False
    return True


def render_chat(tokenizer, messages, add_generation_prompt=False):
    """The text of a list of messages, by the tokenizer's own chat template. -> str

    add_generation_prompt: end with the header of a new turn of the assistant. Raises UserError if there is no
    template, or if it refuses the messages.
    """
    if tokenizer.chat_template is None:
        raise UserError(
            f"the data has chats, but the tokenizer of {tokenizer.name_or_path} has no chat template: use a "
            "chat model, or one that sft.py trained with --chat-template-path FILE"
        )
    # datasets gives all messages the same keys, with None for those that a message did not have.
    messages = [{key: x for key, x in message.items() if x is not None} for message in messages]
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except Exception as error:  # templates raise what they like: about roles, for example
        roles = ", ".join(message["role"] for message in messages)
        raise UserError(f"the chat template refuses messages with the roles {roles}: {error}") from error


def load_dialogs(rows):
    """The dialogs with two or more utterances, none of them blank.

    -> list of (row, its utterances, its acts or None)
    """
    dialogs = []
    for row in rows:
        utterances, acts = row["dialog"], row.get("act")
        if not isinstance(utterances, list) or len(utterances) < 2:
            continue
        if not all(isinstance(text, str) and text.strip() for text in utterances):
            continue
        if not isinstance(acts, list) or len(acts) != len(utterances):
            acts = None
        else:  # jsonl with a missing value has floats
            acts = [int(act) if isinstance(act, float) and act.is_integer() else act for act in acts]
        dialogs.append((row, utterances, acts))
    report_skipped(len(rows), len(dialogs), "dialogs: fewer than two utterances, or a blank one")
    return dialogs


def generator_for(seed, *purpose):
    """A random generator for one purpose, such as (seed, "tokens", update), independent of all others."""
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


# ---- Processes and optimizer -------------------------------------------------------------------------------


def start_accelerator(args):
    """One process, or one of several (DDP, FSDP2, DeepSpeed) as accelerate was configured."""
    has_gpu = torch.cuda.is_available()
    uses_fsdp = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    uses_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
    if uses_fsdp and os.environ.get("FSDP_VERSION") != "2":
        raise UserError("FSDP 1 does not work here: set fsdp_version: 2 in accelerate's config")
    if os.environ.get("FSDP_ACTIVATION_CHECKPOINTING", "").lower() == "true":  # it renames the parameters
        raise UserError("use --gradient-checkpointing instead of fsdp_activation_checkpointing")
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # every process loads a whole model
    if not has_gpu and (uses_fsdp or uses_deepspeed):
        # accelerate shards on GPUs only, but does it on a CPU too if it believes that this is a GPU.
        accelerate.PartialState(cpu=True).distributed_type = accelerate.DistributedType.MULTI_GPU
    accelerator = accelerate.Accelerator(
        cpu=not has_gpu and not uses_fsdp and not uses_deepspeed,
        mixed_precision="no",  # autocast is explicit in train
        kwargs_handlers=[
            # Gradients are views of what DDP sends, so they are not kept twice.
            accelerate.DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),
            # The other processes wait while the main one evaluates, and a judge may take long.
            accelerate.InitProcessGroupKwargs(timeout=timedelta(hours=12)),
        ],
    )
    if accelerator.state.deepspeed_plugin is not None:
        configure_deepspeed(args, accelerator)
    torch.manual_seed(args.seed)  # for weights that start at random, such as LoRA's
    return accelerator


def configure_deepspeed(args, accelerator):
    """Batch, clipping and precision follow the flags, not what the config of DeepSpeed says."""
    bf16 = dict(enabled=wants_bf16(args, accelerator.device), dtype="bfloat16")
    accelerator.state.deepspeed_plugin.deepspeed_config |= dict(
        train_micro_batch_size_per_gpu=args.per_device_train_batch_size,
        gradient_accumulation_steps=1,  # train accumulates
        gradient_clipping=args.max_grad_norm or 0.0,
        torch_autocast=bf16,
    )
    transformers.integrations.deepspeed.unset_hf_deepspeed_config()  # it would load every model in shards


def wants_bf16(args, device):
    """True if matmuls should run in bf16: on request, or with dtype auto on a GPU that supports it."""
    if args.dtype == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return args.dtype == "bfloat16"


def find_optimizer(name):
    """The optimizer class with this dotted name."""
    optimizer_class = locate(name)
    if not isinstance(optimizer_class, type) or not issubclass(optimizer_class, torch.optim.Optimizer):
        raise UserError(f"--optimizer {name}: no such optimizer is installed; try torch.optim.AdamW")
    return optimizer_class


def make_optimizer(args, parameters):
    """The optimizer that --optimizer names, for a dict of parameters."""
    optimizer_class = find_optimizer(args.optimizer)
    options = dict(lr=args.learning_rate, eps=args.adam_eps, fused="Adam" in args.optimizer)
    accepted = inspect.signature(optimizer_class).parameters
    options = {name: value for name, value in options.items() if name in accepted}
    return optimizer_class(list(parameters.values()), **options)


def make_learner(model, accelerator):
    """The module to train: the model itself or, for FSDP2 and ZeRO-3, a copy that will be cut into shards.

    Sharded models cannot generate. So every process keeps a whole model for sampling, and copies the new
    weights into it after each update (`copy_weights`). The copy leaves out the reference.
    """
    plugin = accelerator.state.deepspeed_plugin
    shards_weights = accelerator.distributed_type == "FSDP" or (plugin is not None and plugin.zero_stage == 3)
    if not shards_weights:
        return model
    left_out = [getattr(model, "reference", None), getattr(model, "compiled_policy", None)]
    # deepcopy takes None from its memo instead of a copy.
    learner = copy.deepcopy(model, memo={id(part): None for part in left_out})
    learner._no_split_modules = [type(transformer_layers(model)[0]).__name__]  # FSDP2 shards layer by layer
    return learner


@torch.no_grad()
def copy_weights(parameters, model):
    """Copy the trained parameters (name -> parameter) into the whole model, if they are shards of a copy."""
    for name, p in trainable(model).items():
        trained = parameters[name]
        if trained is p:
            continue
        if hasattr(trained, "full_tensor"):  # FSDP2
            p.copy_(trained.full_tensor())
        else:  # ZeRO-3
            import deepspeed

            with deepspeed.zero.GatheredParameters([trained]):
                p.copy_(trained)


@contextmanager
def sync_gradients_if(is_last, accelerator, learner):
    """Exchange gradients between processes only in the last micro-batch of an optimizer step."""
    accelerator.sync_gradients = is_last  # DeepSpeed takes its step in the backward pass of the last one
    with nullcontext() if is_last else accelerator.no_sync(learner):
        yield


def clip_gradients(accelerator, parameters, max_norm):
    """Scale the gradients down to this norm; None: do not. -> the norm before that, a float"""
    norm = accelerator.clip_grad_norm_(parameters.values(), max_norm or math.inf)
    if hasattr(norm, "full_tensor"):  # FSDP2
        norm = norm.full_tensor()
    return float(norm)


def peak_memory_mb(device):
    """The most memory that was in use: of the GPU, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    unit = 1 if sys.platform == "darwin" else 1024  # macOS reports bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


# ---- Run folder and screen ---------------------------------------------------------------------------------


class Run:
    """The run folder (args.json, metrics.jsonl, samples.jsonl, checkpoints/, ...), the screen, and resuming.

    Only the main process writes and prints. A file is written under another name and then renamed, so that
    killing the process never leaves half a file.
    """

    def __init__(self, args, accelerator, updates, status):
        """status: label -> metric, for the metrics shown next to the progress bar"""
        self.args = args
        self.accelerator = accelerator
        self.updates = updates
        self.status = status
        self.folder = self.choose_folder()
        self.signal_number = 0  # of a signal that asked us to stop
        self.skipped_steps = 0  # in a row
        self.last_skip = 0  # the update of the last one
        self.warnings_shown = set()  # names of metrics
        self.last_line_time = 0.0

        is_main = accelerator.is_main_process
        self.console = Console(
            highlight=False, markup=False, soft_wrap=not sys.stdout.isatty(), quiet=not is_main
        )
        self.bar = Progress(
            "{task.completed}/{task.total}",
            BarColumn(20),
            TimeRemainingColumn(),
            "{task.description}",
            console=self.console,
            disable=not (is_main and self.console.is_terminal),
        )
        self.task = self.bar.add_task("", total=updates)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.on_signal)
        if is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not args.resume:  # else restore writes it, if the run can be resumed with these flags
                self.write("args.json", json.dumps(self.describe(), indent=2))
        if args.log_with != "none":
            accelerator.log_with = [args.log_with]
            accelerator.project_configuration.logging_dir = str(self.folder)
            config = {name: str(value) for name, value in asdict(args).items()}
            accelerator.init_trackers(SCRIPT, config, init_kwargs={"wandb": {"name": self.folder.name}})

    def choose_folder(self):
        """The same folder on all processes. A new run must not write into the folder of another one."""
        name = self.args.output_dir
        if name is None and self.accelerator.is_main_process:
            now = time.strftime("%Y%m%d-%H%M%S")
            name = make_new_folder(f"runs/{SCRIPT}/{self.args.recipe}-s{self.args.seed}-{now}")
        name, resume = accelerate.utils.broadcast_object_list([name, self.args.resume])
        if Path(name).is_file():
            raise UserError(f"--output-dir {name} is a file")
        holds_run = any((Path(name) / file).exists() for file in ("args.json", "metrics.jsonl"))
        if holds_run and not resume:
            raise UserError(f"{name} holds a run: continue it with --resume, or choose another --output-dir")
        self.accelerator.wait_for_everyone()  # nobody writes before everybody has looked
        return Path(name)

    def describe(self):
        """What args.json holds."""
        return {
            "args": asdict(self.args),
            "command": sys.argv,
            "versions": {m.__name__: m.__version__ for m in (torch, transformers, datasets, accelerate)},
            "commit": git_commit(),
            "world_size": self.accelerator.num_processes,
        }

    def on_signal(self, number, frame):
        """Finish the update, save, and stop. A second signal stops at once."""
        self.signal_number = number
        signal.signal(number, signal.SIG_DFL)

    def print(self, text, style=None):
        self.console.print(text, style=style)

    def print_setup(self, job, model):
        """The first lines on the screen: what runs, where, and how much of the model is trained."""
        device = self.accelerator.device
        dtype = "bfloat16" if wants_bf16(self.args, device) else "float32"
        trained = sum(p.numel() for p in trainable(model).values())
        total = sum(p.numel() for p in model.parameters())
        self.print(f"recipe {self.args.recipe}: {job}, {device}, {dtype}; run folder {self.folder}")
        if self.args.recipe == "custom":
            self.print(
                "custom: a model was named, so all other flags begin with the published defaults of Args"
            )
            self.print(f"flags that differ from recipe tiny: {flags_that_differ(self.args, RECIPES['tiny'])}")
        else:
            differ = flags_that_differ(self.args, RECIPES[self.args.recipe])
            self.print(f"flags that differ from the recipe: {differ or 'none'}")
        self.print(f"{trained:,} of {total:,} parameters are trained ({trained / total:.2%})")

    # -- Files and tables --

    def write(self, name, text):
        draft = self.folder / f".{name}"
        draft.write_text(text)
        os.replace(draft, self.folder / name)

    def append(self, name, rows):
        if self.accelerator.is_main_process:
            with open(self.folder / name, "a") as file:
                for row in rows:
                    file.write(json.dumps(row) + "\n")

    def log(self, metrics, warnings=None):
        """Log one update: to metrics.jsonl, to the tracker (under train/, as TRL does) and to the screen.

        warnings: dict of metric -> text. Each metric is warned about only once in a run.
        """
        update = metrics["update"]
        not_finite = [name for name, x in metrics.items() if not math.isfinite(x)]
        if not_finite and self.last_skip != update:
            names = ", ".join(not_finite)
            raise UserError(f"update {update} is not saved, not finite: {names}; lower --learning-rate")
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
        for name, warning in (warnings or {}).items():
            if name not in self.warnings_shown:
                self.warnings_shown.add(name)
                self.print(f"update {update}: {warning}", style="yellow")

    def table(self, title, rows, file=None, **extra):
        """Print dicts as the rows of a table. With a file, also append them to it, plus `extra`."""
        has_long_text = any(isinstance(cell, str) and len(cell) > 40 for row in rows for cell in row.values())
        table = Table(title=title, title_justify="left", show_lines=has_long_text)
        for name, cell in rows[0].items():
            table.add_column(name, justify="left" if isinstance(cell, str) else "right", overflow="fold")
        for row in rows:
            table.add_row(*[f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row.values()])
        self.console.print(table, soft_wrap=False)
        if file is not None:
            rows = [extra | row for row in rows]
            self.append(file, rows)
            if self.accelerator.is_main_process:
                self.track_table(Path(file).stem, rows, extra["update"])

    def track_table(self, name, rows, step):
        """Send a table of samples to the tracker: a table for wandb, text for tensorboard."""
        columns = list(rows[0])
        data = [list(row.values()) for row in rows]
        if self.args.log_with == "wandb":
            self.accelerator.get_tracker("wandb").log_table(name, columns=columns, data=data, step=step)
        elif self.args.log_with == "tensorboard":
            lines = [columns, ["---"] * len(columns), *data]
            cells = [[" ".join(str(cell).split()).replace("|", "&#124;") for cell in line] for line in lines]
            text = "\n".join(" | ".join(line) for line in cells)
            self.accelerator.get_tracker("tensorboard").tracker.add_text(name, text, step)

    def write_evaluation(self, about):
        """evaluation.json. Its numbers also go to the tracker, under eval/."""
        self.write("evaluation.json", json.dumps(about, indent=2))
        numbers = {}
        for part, values in about.items():
            if isinstance(values, dict):
                numbers |= {f"eval/{part}/{name}": x for name, x in values.items()}
            else:
                numbers[f"eval/{part}"] = values
        numbers = {name: x for name, x in numbers.items() if isinstance(x, (int, float))}
        self.accelerator.log(numbers, step=self.updates)

    def plot(self, titles, targets):
        """curves.png: metrics over the updates, each value, and the mean of the last 5 % of the run.

        titles: metric -> title with the unit; targets: metric -> value to draw as a dashed line, or None
        """
        from matplotlib.figure import Figure

        rows = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        window = max(1, len(rows) // 20)
        figure = Figure(figsize=(4 * len(titles), 3.2), layout="constrained")
        figure.suptitle(f"{SCRIPT}.py {self.args.recipe}, seed {self.args.seed}")
        axes = figure.subplots(1, len(titles), squeeze=False)[0]
        for axis, (name, title) in zip(axes, titles.items()):
            points = [(row["update"], row[name]) for row in rows if name in row]
            updates = [update for update, _ in points]
            values = [value for _, value in points]
            last_values = [values[max(0, i + 1 - window) : i + 1] for i in range(len(values))]
            axis.plot(updates, values, color="tab:blue", alpha=0.3)
            axis.plot(updates, [sum(part) / len(part) for part in last_values], color="tab:blue")
            target = targets.get(name)
            if target is not None:
                axis.axhline(target, color="gray", linestyle="--", label=f"target {target:g}")
                axis.legend()
            axis.set_title(title, fontsize=10)
            axis.set_xlabel("update")
            axis.grid(alpha=0.3)
        figure.savefig(self.folder / "curves.png", dpi=120)

    def check_gradient(self, update, grad_norm):
        """Warn that a step will be skipped if its gradient is not finite. Five in a row end the run."""
        if math.isfinite(grad_norm):
            self.skipped_steps = 0
            return
        if self.deepspeed_engine() is not None:
            raise UserError(
                f"update {update}: gradient not finite, after DeepSpeed took the step; use FSDP2 or DDP"
            )
        self.skipped_steps += 1
        self.last_skip = update
        message = f"update {update}: gradient not finite, step skipped ({self.skipped_steps} in a row)"
        self.print(message, style="yellow")
        if self.skipped_steps == 5:
            raise UserError(
                "5 gradients in a row were not finite: lower --learning-rate, or use --dtype float32"
            )

    def finish(self):
        """Wait until the main process has saved everything, because torchrun would stop it."""
        self.bar.stop()
        if self.accelerator.is_main_process:  # the last checkpoint is enough now
            for old in sorted((self.folder / "checkpoints").glob("[0-9]*"))[:-1]:
                shutil.rmtree(old)
        self.print(f"saved {self.folder / 'model'}")
        self.accelerator.wait_for_everyone()
        self.accelerator.end_training()

    # -- Checkpoints --

    def sharding(self):
        """DeepSpeed's checkpoints fit only this stage and number of processes; ours ("") fit any."""
        engine = self.deepspeed_engine()
        if engine is None:
            return ""
        return f"ZeRO-{engine.zero_optimization_stage()} on {self.accelerator.num_processes} processes"

    def deepspeed_engine(self):
        wrapper = getattr(self.accelerator, "deepspeed_engine_wrapped", None)
        return None if wrapper is None else wrapper.engine

    def checkpoint(self, update, parameters, optimizer, batch_size, **extra):
        """Save everything that decides the rest of the run, if it is due. After a signal: save, then exit."""
        signals = torch.tensor([self.signal_number], device=self.accelerator.device)
        signal_number = int(self.accelerator.gather(signals).max())  # any process may have got it
        is_last = update == self.updates
        is_due = self.args.save_every > 0 and update % self.args.save_every == 0
        if is_due or is_last or signal_number:
            self.save_checkpoint(update, parameters, optimizer, batch_size, extra)
        if signal_number and not is_last:
            self.bar.stop()
            self.print(f"stopped by signal {signal_number}")
            self.print(f"to continue: python {SCRIPT}.py --resume {self.folder}")
            sys.exit(128 + signal_number)

    def save_checkpoint(self, update, parameters, optimizer, batch_size, extra):
        """Write checkpoints/<update>. The folder gets its name when it is complete, so a kill leaves the
        last one good."""
        folder = self.folder / "checkpoints" / f"{update:06d}"
        draft = folder.with_name(f".{folder.name}")
        engine = self.deepspeed_engine()
        tensors = {}
        if engine is None:
            weights = {name: p.detach() for name, p in parameters.items()}
            if not all(torch.isfinite(p).all() for p in weights.values()):
                raise UserError(
                    f"update {update} is not saved: weights are not finite; lower --learning-rate"
                )
            tensors = dict(parameters=self.unshard(weights), optimizer=self.unshard(optimizer.state_dict()))
        else:
            engine.save_checkpoint(str(draft), tag="deepspeed")  # every process writes its shards
            self.accelerator.wait_for_everyone()
        if not self.accelerator.is_main_process:
            return
        state = {
            "update": update,
            "batch_size": batch_size,
            "sharding": self.sharding(),
            "rng": {"torch": torch.get_rng_state(), "python": random.getstate()},  # of your reward function
            **tensors,
            **extra,
        }
        draft.mkdir(parents=True, exist_ok=True)
        try:
            with open(draft / "state.pt", "wb") as file:
                torch.save(state, file)
                os.fsync(file.fileno())
        except (OSError, RuntimeError) as error:  # a full disk
            shutil.rmtree(draft)
            raise UserError(f"cannot save {folder}: {error.__context__ or error}") from error
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(draft, folder)
        keep = max(self.args.keep_checkpoints, 1)
        for old in sorted(folder.parent.glob("[0-9]*"))[:-keep]:
            shutil.rmtree(old)

    def unshard(self, x):
        """Put the shards of FSDP2 together, in nested dicts too. The main process gets the result."""
        if isinstance(x, dict):
            return {key: self.unshard(value) for key, value in x.items()}
        if not hasattr(x, "full_tensor"):
            return x
        full = x.full_tensor()
        return full.cpu() if self.accelerator.is_main_process else None

    def restore(self, parameters, optimizer, batch_size):
        """Load the checkpoint that --resume names, or the newest. -> its state; {"update": 0} if new"""
        state = {"update": 0}
        checkpoints = sorted((self.folder / "checkpoints").glob("[0-9]*"))
        if self.args.resume and checkpoints:
            asked = Path(self.args.resume).resolve()
            chosen = checkpoints[-1]
            for path in checkpoints:
                if path.resolve() == asked:
                    chosen = path
            path = str(chosen / "state.pt")
            state = load("checkpoint", torch.load, path, map_location="cpu", weights_only=True)
            self.check_resumable(chosen, state, batch_size)
            self.load_checkpoint(chosen, state, parameters, optimizer)
            self.print(f"resumed after update {state['update']}, from {chosen}")
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process and self.args.resume:
            self.write("args.json", json.dumps(self.describe(), indent=2))
            self.forget_after(state["update"])
        return state

    def check_resumable(self, folder, state, batch_size):
        if state["batch_size"] != batch_size:
            raise UserError(
                f"--resume {folder}: its batch was {state['batch_size']}, this one is {batch_size}: change "
                "--per-device-train-batch-size or --gradient-accumulation-steps so that it stays the same"
            )
        if state["sharding"] != self.sharding():
            was = state["sharding"] or "without DeepSpeed"
            raise UserError(f"--resume {folder}: that run was {was}, and it must stay so")

    def load_checkpoint(self, folder, state, parameters, optimizer):
        engine = self.deepspeed_engine()
        if engine is not None:
            engine.load_checkpoint(str(folder), tag="deepspeed")
        else:
            for name, p in parameters.items():
                p.data.copy_(shard_like(state["parameters"][name], p))
            in_order = [p for group in optimizer.param_groups for p in group["params"]]
            for i, moments in state["optimizer"]["state"].items():
                for name, value in moments.items():
                    moments[name] = shard_like(value, in_order[i])
            optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"]["torch"])
        random.setstate(state["rng"]["python"])

    def forget_after(self, update):
        """Delete what a run wrote after the checkpoint that it continues from: it will be written again."""
        for path in (self.folder / "checkpoints").glob("*"):
            if path.name.startswith(".") or int(path.name) > update:
                shutil.rmtree(path)
        for name in ("metrics.jsonl", "samples.jsonl", "tokens.jsonl"):
            if (self.folder / name).exists():
                lines = (self.folder / name).read_text().splitlines(keepends=True)
                complete = [line for line in lines if line.endswith("\n")]  # a kill can tear the last one
                kept = [line for line in complete if json.loads(line)["update"] <= update]
                self.write(name, "".join(kept))


def make_new_folder(name):
    """Make a folder of this name; NAME-2, NAME-3, ... if other runs began in the same second. -> its name"""
    folder = Path(name)
    number = 1
    while True:
        try:
            folder.mkdir(parents=True)
            return str(folder)
        except FileExistsError:
            number += 1
            folder = Path(f"{name}-{number}")


def git_commit():
    """The commit of the repository that holds this script; "" if there is none, or no git."""
    try:
        command = ["git", "rev-parse", "HEAD"]
        return subprocess.run(command, cwd=HERE, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:  # git is not installed
        return ""


def shard_like(value, p):
    """The shard of a tensor that belongs to the parameter p if p is sharded (FSDP2); else the tensor."""
    if not hasattr(p, "full_tensor") or getattr(value, "shape", None) != p.shape:
        return value
    value = value.to(p.device)
    return torch.distributed.tensor.distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None)


def report_held_out(run, before, after, num_documents):
    """The before / after table, evaluation.json and curves.png."""
    comparison = []
    for name, value in before.items():
        comparison.append({"metric": name, "before": value, "after": after[name]})
    run.table(f"{num_documents} held-out documents", comparison)
    about = {"before": before, "after": after, "n": num_documents}
    run.write_evaluation(about)
    titles = {
        "loss": "loss, nats per token",
        "mean_token_accuracy": "accuracy of the next token",
        "lr": "learning rate",
    }
    run.plot(titles, targets={})


def report_samples(run, samples):
    """Show the samples, and write samples.jsonl."""
    (run.folder / "samples.jsonl").unlink(missing_ok=True)  # from a run that was killed right after this
    if samples:
        run.table("samples", samples, "samples.jsonl", update=run.updates)


# ---- Command line ------------------------------------------------------------------------------------------


def flags_that_differ(args, recipe):
    """The flags of a run that differ from those of a recipe, with its values. -> str"""
    differ = []
    for name, value in asdict(args).items():
        usual = getattr(recipe, name)
        if value != usual and name not in ("recipe", "resume", "output_dir"):
            differ.append(f"--{name.replace('_', '-')} {value} ({usual})")
    return ", ".join(differ)


def check_positive(args, *names):
    """Raise if a size is 0 or less, before anything is loaded."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise UserError(f"--{name.replace('_', '-')} must be more than 0; it is {value}")


def check_sft_args(args):
    """Raise for flags that cannot work, before anything is loaded."""
    check_positive(args, "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs")
    check_positive(args, "max_length", "num_train_rows", "num_eval_rows")
    find_optimizer(args.optimizer)
    if args.lora_r < 0:
        raise UserError(f"--lora-r must be 0 (no LoRA) or more; it is {args.lora_r}")
    if args.num_samples < 0:
        raise UserError(f"--num-samples must be 0 or more; it is {args.num_samples}")
    if args.train_tokenizer < 0:
        raise UserError(f"--train-tokenizer must be 0 (no) or more; it is {args.train_tokenizer}")
    if args.train_tokenizer and not args.from_config:
        raise UserError("--train-tokenizer needs --from-config: a trained model knows only its own tokenizer")
    if not args.utterance_end.strip():
        raise UserError("--utterance-end must not be empty: nobody could tell where an utterance ends")


def parse_args(argv):
    """The command line: an optional recipe, then flags. -> Args

    No recipe and no model: the recipe tiny. A model but no recipe: everything else has the defaults of Args.
    """
    model_flags = ("--model-name-or-path", "--sft-model-path", "--from-config")
    names_model = any(word.split("=")[0].replace("_", "-") in model_flags for word in argv)
    recipe, flags = "custom" if names_model else "tiny", argv
    if argv and not argv[0].startswith("-"):
        recipe, flags = argv[0], argv[1:]
        if recipe not in RECIPES:
            raise UserError(f"there is no recipe {recipe!r}; the recipes are {', '.join(RECIPES)}")
    default = replace(RECIPES.get(recipe, Args()), recipe=recipe)
    description = f"{__doc__.splitlines()[0]} The first word may be a recipe: {', '.join(RECIPES)}."
    args = tyro.cli(Args, default=default, args=flags, description=description)
    if args.resume is None:
        return args
    return resumed_args(args.resume, argv[0] if flags is not argv else None, flags)


def resumed_args(resume, recipe, flags):
    """The flags of the run to continue. Flags that would change its result are refused."""
    folder = Path(resume)
    if resume == "latest":
        runs = Path("runs", SCRIPT)  # runs with an --output-dir elsewhere are not found
        newest = max(runs.glob("*/args.json"), key=os.path.getmtime, default=None)
        if newest is None:
            raise UserError(f"--resume latest: there is no run in {runs}; name the --output-dir of your run")
        folder = newest.parent
    if not folder.exists():
        raise UserError(f"--resume {resume}: there is no such run or checkpoint")
    if folder.parent.name == "checkpoints":
        folder = folder.parent.parent
    try:
        saved = Args(**json.loads((folder / "args.json").read_text())["args"])
    except (OSError, TypeError, KeyError, ValueError) as error:
        raise UserError(f"--resume {resume}: not a run of this script and version: {error}") from error
    if recipe is not None and recipe != saved.recipe:
        raise UserError(f"--resume {resume}: that run has the recipe {saved.recipe}, not {recipe}")

    args = tyro.cli(Args, default=saved, args=flags)
    # Flags that may differ from those of the saved run. Run.restore makes sure that the batch stays the same.
    may_change = {
        "resume",
        "save_every",
        "keep_checkpoints",
        "log_with",
        "total_episodes",
        "num_train_epochs",
    }
    may_change |= {"per_device_train_batch_size", "gradient_accumulation_steps"}
    may_change |= {"judge_fn", "judge_model", "judge_url"}
    changed = [name for name, value in asdict(args).items() if value != getattr(saved, name)]
    changed = [name for name in changed if name not in may_change]
    if changed:
        raise UserError(f"--resume {folder} would change {', '.join(changed)}; start a new run for that")
    return replace(args, output_dir=str(folder))


def run_command_line(function, *inputs):
    """Call function(*inputs). Errors that the user can fix print one line, with exit code 2."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns about a kernel we do not use
    warnings.filterwarnings("ignore", category=FutureWarning)  # libraries that use old names of each other
    warnings.filterwarnings("ignore", message="fan_in_fan_out")  # peft, about GPT-2; it does the right thing
    for library in (transformers, datasets):
        library.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
    try:
        function(*inputs)
    except (UserError, UnicodeDecodeError) as error:  # the latter: data that is not UTF-8
        line = str(error)
    except ModuleNotFoundError as error:
        line = f"these flags need the package {error.name}: pip install {error.name}"
    except (OSError, SafetensorError) as error:  # a full disk, a folder that is not writable
        line = f"{error}; --resume continues from the last checkpoint"
    else:
        return
    finally:
        Console().show_cursor()  # the progress bar hid it
    print(f"{SCRIPT}.py: {' '.join(line.split())}", file=sys.stderr)
    sys.exit(2)


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    run_command_line(lambda: train(parse_args(argv)))


if __name__ == "__main__":
    main()
