"""Train the reward model that PPO and RLOO use, from labels, preferences or rankings of texts.

If you know how to train a text classifier, this is what its use as a reward adds:

1. The columns of the data decide what is learned. With labels, the model is an ordinary classifier, and the
   logit of one label is the reward. With preferences or rankings, it has one output, the score, and learns
   that the better of two responses to the same prompt has the higher score (Bradley-Terry).

       text, label                     a classifier of texts
       dialog, act                     a classifier of answers by intent: the reward in ppo_dialog.py
       [prompt,] chosen, rejected      one score; without the column prompt, both texts contain it. A column
                                       margin says by how much the chosen score should be higher
       prompt, responses               one score; the responses are ranked, best first

   Prompts and responses are texts, or chats (lists of messages).

2. A decoder is read at its last real token, found by the length of the text. Looking for `token != pad` would
   miss a real EOS, because many tokenizers use EOS as the padding token.
3. A prompt and its response are tokenized as in the rollouts: prompt, response, EOS. (A chat ends as its chat
   template ends it.) If they are too long, they lose their beginning, never their end. A labeled text loses
   its end.
4. A new head starts with weights of standard deviation 1 / sqrt(d + 1), so the first scores are about 1 in
   size (N+ paper, detail 11).
5. All responses to a prompt are in the same forward pass, and the loss is the mean over their pairs. So a
   prompt with many responses counts no more than one with two (InstructGPT).
6. Preferences say nothing about where 0 is. The mean score of reference responses is saved as reward_offset
   in config.json, and rloo_tldr.py subtracts it (N+ paper, detail 15). Plain transformers ignores it.
7. PPO asks for the reward of the beginnings of texts. --min-prefix-length cuts the training texts at random
   tokens, so that a classifier learns to judge beginnings too.

    python reward_model.py                       # recipe tiny: how checkpoints/reviews-sentiment was made
    python reward_model.py tiny-tldr             # how checkpoints/tldr-reward was made, from preferences
    python reward_model.py tiny-dialog           # how checkpoints/dialogs-intent was made
    python reward_model.py distilbert-imdb       # what lvwerra/distilbert-imdb is, from the Hub
    python reward_model.py tldr-pythia-1b        # the reward model of the N+ paper, from the Hub
    python reward_model.py --model-name-or-path my_lm --dataset-name my_folder
    torchrun --nproc_per_node 2 reward_model.py  # two processes, twice the batch
    python reward_model.py --resume latest       # continue a run that was stopped, bit for bit

The result loads with AutoModelForSequenceClassification, and a classifier with transformers.pipeline too.

Part I is the algorithm. Part II is infrastructure: models, data, processes, run folder, flags. Papers:
Learning to Summarize from Human Feedback (Stiennon et al. 2020), InstructGPT (Ouyang et al. 2022), The N+
Implementation Details of RLHF with PPO (Huang et al. 2024).
Results, metrics and details: docs/reward_model.md.
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
import torch
import torch.nn.functional as F
import transformers
import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeRemainingColumn
from rich.table import Table
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

# ============================================================================================================
# Part I: the algorithm
# ============================================================================================================


@dataclass
class Args:
    """The defaults train a classifier of film reviews, like lvwerra/distilbert-imdb."""

    # Run
    recipe: tyro.conf.Suppress[str] = "custom"  # set from the first word of the command line
    seed: int = 1  # random seed; all sampling is a function of (seed, update)
    output_dir: str | None = None  # run folder (default: runs/<script>/<recipe>-s<seed>-<time>)
    resume: str | None = None  # continue a run: its folder, a checkpoint, or `latest` in runs/<script>
    save_every: int = 100  # updates between checkpoints (0: only at the end, or after a signal)
    keep_checkpoints: int = 2  # number of checkpoints to keep during a run; the last one stays after it
    log_with: Literal["none", "wandb", "tensorboard"] = "none"  # a tracker, in addition to metrics.jsonl

    # Models
    model_name_or_path: str = "distilbert/distilbert-base-uncased"  # a language model gets a new head
    from_config: str | None = None  # random weights instead: "gpt2 n_layer=2 n_embd=64", or a folder
    tokenizer_name_or_path: str | None = None  # None: the tokenizer of model_name_or_path
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"  # matmul precision; auto: bf16 if the GPU has it
    save_dtype: Literal["float32", "bfloat16"] = "float32"  # of the saved weights; bfloat16 halves the file
    gradient_checkpointing: bool = False  # recompute activations in the backward pass to save memory
    lora_r: int = 0  # LoRA rank (0: train all weights); the head is trained as a whole
    lora_alpha: int = 32  # LoRA scale: the adapter adds lora_alpha / lora_r * B A
    lora_target_modules: str = "all-linear"  # layers that get an adapter: all-linear, or names with commas

    # Data
    dataset_name: str = "stanfordnlp/imdb"  # a Hub name, or a folder of jsonl files; columns as in point 1
    train_shard: str = "0/1"  # i/n: train on part i of n of the shuffled rows; 0/2 and 1/2 are two halves
    center_dataset_name: str | None = None  # reward_offset: mean score of its completions; None: of chosen
    label_names: str | None = None  # comma-separated names of classes 0, 1, ...; None: those of the data set
    max_length: int = 512  # in tokens; longer texts keep their beginning with a label, else their end
    min_prefix_length: int = 0  # labels: cut training texts to a random length of at least this (0: never)
    num_eval_rows: int = 25_000  # number of held-out rows to score at the end

    # Batch: per_device_train_batch_size x gradient_accumulation_steps x processes
    num_train_epochs: float = 2.0  # epochs over the training rows
    per_device_train_batch_size: int = 16  # rows per forward and backward pass, with all responses of each
    gradient_accumulation_steps: int = 1  # micro-batches per optimizer step

    # Optimizer
    learning_rate: float = 5e-5  # initial (or constant) learning rate
    optimizer: str = "torch.optim.AdamW"  # dotted name: torch.optim.SGD, bitsandbytes.optim.Adam8bit, ...
    adam_eps: float = 1e-8  # epsilon of Adam (the N+ paper uses 1e-5)
    lr_scheduler_type: Literal["constant", "linear", "cosine", "exponential"] = "linear"  # per update
    warmup_ratio: float = 0.0  # fraction of updates in which the learning rate rises from 0
    max_grad_norm: float | None = 1.0  # clip the gradient to this norm; None: no clipping


RECIPES = {
    "tiny": Args(  # checkpoints/reviews-sentiment
        model_name_or_path="checkpoints/reviews-lm",
        dataset_name="data/reviews",
        label_names="negative,positive",
        max_length=128,
        min_prefix_length=3,  # PPO scores texts of a few words, and so must the classifier be right on them
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
        save_dtype="bfloat16",
        num_train_epochs=4.0,
        per_device_train_batch_size=32,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_ratio=0.1,
    ),
    "tiny-dialog": Args(  # checkpoints/dialogs-intent
        from_config="gpt2 n_embd=96 n_layer=2 n_head=4 n_positions=128",
        tokenizer_name_or_path="checkpoints/dialogs-lm",
        dataset_name="data/dialogs",
        label_names="inform,question,directive,commissive",
        max_length=64,
        dtype="float32",
        save_dtype="bfloat16",
        num_train_epochs=2.0,
        per_device_train_batch_size=64,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        warmup_ratio=0.1,
    ),
    "distilbert-imdb": Args(),  # like lvwerra/distilbert-imdb
    "tldr-pythia-1b": Args(  # N+ paper, table 3
        model_name_or_path="cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr",
        dataset_name="trl-lib/tldr-preference",
        center_dataset_name="trl-lib/tldr",
        max_length=638,
        num_eval_rows=2_000,
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
        num_eval_rows=5_000,
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
# Shapes: N rows of the data, with at most K responses each (K = 1 with labels, 2 with chosen and rejected); P
# pairs of responses to one prompt, P = K (K - 1) / 2; texts = the number of texts in all N rows; L tokens.


def length_mask(lengths, max_length):
    """True on the first `lengths` positions of each row. [B] -> bool [B, max_length]"""
    return torch.arange(max_length, device=lengths.device) < lengths[:, None]


def preference_loss(chosen, rejected, margin=0.0):
    """-log P(chosen is preferred), where P = sigmoid(score difference) (Bradley-Terry). [N], [N] -> [N]

    A margin, in units of the score, asks for a larger difference between texts that differ more in quality
    (Llama 2, section 3.2.2).
    """
    return -F.logsigmoid((chosen - rejected).float() - margin)


def response_pairs(mask):
    """All pairs of responses to a prompt: column better[i] is ranked above column worse[i].

    bool mask [N, K] -> better [P], worse [P], and which of the pairs each row has, bool [N, P]
    """
    K = mask.shape[1]
    better, worse = torch.triu_indices(K, K, 1, device=mask.device)
    pair_mask = mask[:, better] & mask[:, worse]
    return better, worse, pair_mask


def ranking_loss(scores, mask):
    """Mean preference_loss over all pairs of a row, best first (Ouyang et al. 2022, eq. 1). [N, K] -> [N]

    The mask, bool [N, K], is False where a row has fewer than K responses. Rows have two or more.
    """
    scores = torch.where(mask, scores.float(), 0.0)
    better, worse, pair_mask = response_pairs(mask)
    losses = preference_loss(scores[:, better], scores[:, worse])  # [N, P]
    num_pairs = pair_mask.sum(1).clamp(min=1)
    return torch.where(pair_mask, losses, 0.0).sum(1) / num_pairs


def label_metrics(logits, labels):
    """Cross-entropy and accuracy of each text. fp32 [N, classes], [N] -> dict of [N]"""
    return {
        "loss": F.cross_entropy(logits, labels, reduction="none"),
        "accuracy": (logits.argmax(-1) == labels).float(),
    }


def preference_metrics(scores, mask, margins):
    """Loss, share of pairs in the right order, and score of the best-ranked minus the last-ranked response.

    scores [N, K], bool mask [N, K], margins [N] -> dict of [N]
    """
    if scores.shape[1] == 2:  # a pair may have a margin; without one this equals ranking_loss
        losses = preference_loss(scores[:, 0], scores[:, 1], margins)
    else:
        losses = ranking_loss(scores, mask)
    better, worse, pair_mask = response_pairs(mask)
    is_right = (scores[:, better] > scores[:, worse]) & pair_mask  # [N, P]
    last = mask.sum(1, keepdim=True) - 1  # [N, 1]
    last_scores = scores.gather(1, last).squeeze(1)
    return {
        "loss": losses,
        "accuracy": is_right.sum(1) / pair_mask.sum(1),
        "margin": scores[:, 0] - last_scores,
    }


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


# ---- Model -------------------------------------------------------------------------------------------------


def init_new_head(model, name):
    """Give a decoder a new head, unless `name` was saved with one of this size. -> True if the head is new

    The standard deviation 1 / sqrt(d + 1), with d inputs, makes the first scores about 1 in size (N+ paper,
    detail 11). No name: all weights are new.
    """
    is_new = True
    if name is not None:
        base = base_model_name(name)
        config = load("model", transformers.AutoConfig.from_pretrained, base)
        is_new = not is_classifier(config) or config.num_labels != model.config.num_labels
        if resolve_path(name) != base:  # a LoRA adapter; a classifier's adapter contains its head
            import peft

            adapter = peft.PeftConfig.from_pretrained(resolve_path(name))
            is_new = is_new and adapter.task_type != "SEQ_CLS"
    if is_new and hasattr(model, "score"):  # decoders call their head `score`
        nn.init.normal_(model.score.weight, std=(model.score.in_features + 1) ** -0.5)
    return is_new


def sequence_logits(model, ids, mask):
    """Class logits of right-padded texts. [B, L], bool [B, L] -> fp32 [B, classes]

    A decoder is read at its last real token, found by its length: looking for `token != pad` would miss a
    real EOS if pad is EOS. It never looks to its right, so its pads need no attention mask.
    """
    if hasattr(model, "get_base_model"):  # with LoRA
        model = model.get_base_model()
    if not hasattr(model, "score"):  # BERT and its family
        return model(input_ids=ids, attention_mask=mask.long()).logits.float()
    ids = torch.where(mask, ids, 0)  # a pad id may lie outside the embedding table
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state  # [B, L, H]
    rows = torch.arange(len(ids), device=ids.device)
    last = mask.sum(1) - 1  # [B]
    return model.score(hidden[rows, last]).float()


class Classifier(nn.Module):
    """The model behind one forward method, which is what DDP, FSDP2 and DeepSpeed wrap."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, mask):
        """Class logits or scores of right-padded texts. [B, L], bool [B, L] -> fp32 [B, classes or 1]"""
        return sequence_logits(self.model, ids, mask)


# ---- Texts -------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """One training example: a text with its label, or two or more responses to one prompt, best first."""

    texts: list[list[int]]  # token ids of the labeled text, or of prompt + response for each response
    label: int = 0  # number of the class, if there are labels
    margin: float = 0.0  # the column margin: by how much the score of the chosen response should be higher


def preference_ids(tokenizer, prompts, responses, max_length):
    """Token ids of each prompt with its response, by the same rule in training and in rollouts.

    prompts, responses: lists of str, which get EOS at the end; or lists of chats, which end as the chat
    template ends them. Not empty. -> list of lists, each with the last max_length ids at most
    A response that reached its length limit gets an EOS too, because its score is read there. Encoders (the
    family of BERT) mark the ends in their own way.
    """
    if is_chat(responses[0]):  # then all are chats
        texts = [render_chat(tokenizer, [*prompt, *response]) for prompt, response in zip(prompts, responses)]
        return [ids[-max_length:] for ids in tokenize(tokenizer, texts)]
    is_encoder = tokenizer.eos_token_id is None or tokenizer.cls_token_id is not None
    if is_encoder:
        tokenizer.truncation_side = "left"
        texts = [prompt + response for prompt, response in zip(prompts, responses)]
        return tokenizer(texts, truncation=True, max_length=max_length).input_ids
    prompt_ids = tokenize(tokenizer, prompts)  # with BOS in front, if the tokenizer puts it there
    response_ids = tokenizer(list(responses), add_special_tokens=False).input_ids
    texts = []
    for prompt, response in zip(prompt_ids, response_ids):
        ids = prompt + response + [tokenizer.eos_token_id]
        texts.append(ids[-max_length:])
    return texts


def cut_to_prefixes(rows, tokenizer, args, update):
    """Cut each labeled text at a random token, because PPO scores unfinished texts. -> list of Row"""
    fractions = torch.rand(len(rows), generator=generator_for(args.seed, "prefix", update)).tolist()
    prefixes = []
    for row, fraction in zip(rows, fractions):
        ids = row.texts[0]
        shortest = min(args.min_prefix_length, len(ids))
        length = shortest + round(fraction * (len(ids) - shortest))
        # BERT's [SEP], or an EOS that the tokenizer appends, stays at the end.
        if ids[-1] in (tokenizer.sep_token_id, tokenizer.eos_token_id):
            prefix = ids[: length - 1] + ids[-1:]
        else:
            prefix = ids[:length]
        prefixes.append(Row([prefix], row.label))
    return prefixes


def collate_texts(rows, device):
    """The texts of N rows with at most K texts each, one below the other and padded on the right.

    -> dict: ids [texts, L], bool mask [texts, L], bool response_mask [N, K], labels [N], margins [N]
    """
    texts = [torch.tensor(ids) for row in rows for ids in row.texts]
    ids = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    mask = length_mask(torch.tensor([len(text) for text in texts]), ids.shape[1])
    batch = {
        "ids": ids,
        "mask": mask,
        "response_mask": find_responses(rows),
        "labels": torch.tensor([row.label for row in rows]),
        "margins": torch.tensor([row.margin for row in rows]),
    }
    return {name: x.to(device) for name, x in batch.items()}


def find_responses(rows):
    """True for the texts that each row has; K is the largest number of texts in a row. -> bool [N, K]"""
    counts = torch.tensor([len(row.texts) for row in rows])
    return length_mask(counts, int(counts.max()))


def group_by_row(logits, response_mask):
    """Put the outputs of all texts into their rows, 0 if there is no text. [texts, C], [N, K] -> [N, K, C]"""
    by_row = torch.zeros(*response_mask.shape, logits.shape[1], device=logits.device)
    return by_row.masked_scatter(response_mask[:, :, None], logits)


# ---- Training ----------------------------------------------------------------------------------------------


def train(args):
    """The whole run, from the flags to the final table. -> (model, run folder)"""
    check_reward_model_args(args)
    accelerator = start_accelerator(args)
    device, rank, world = accelerator.device, accelerator.process_index, accelerator.num_processes
    n = args.per_device_train_batch_size
    B = n * args.gradient_accumulation_steps * world  # rows per update

    tokenizer = load_tokenizer(args.tokenizer_name_or_path or args.model_name_or_path)
    data = load_data(args, tokenizer)
    train_rows, label_names = data["train"], data["label_names"]
    has_labels = label_names is not None
    classifier, head_is_new = build_classifier(args, tokenizer, label_names)
    model = to_device(Classifier(classifier), args, device)
    updates = max(1, round(args.num_train_epochs * len(train_rows) / B))
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=wants_bf16(args, device))

    status = {"loss": "loss", "accuracy": "accuracy"}
    if not has_labels:
        status["margin"] = "margin"
    run = Run(args, accelerator, updates, status)
    run.print_setup(f"{args.from_config or args.model_name_or_path} on {args.dataset_name}", model)
    task = f"{len(label_names)} classes: {', '.join(label_names)}" if has_labels else "preferences"
    head = "a new head" if head_is_new else "the head that was saved with the model"
    run.print(f"{len(train_rows):,} training rows; {task}; {head}")
    run.print(
        f"batch: {n} rows per pass x {args.gradient_accumulation_steps} accumulated x {world} processes "
        f"= {B} rows; {updates} optimizer steps"
    )

    # `model` scores the held-out rows, `learner` is trained. On one process and with DDP they are the same
    # module. With FSDP2 and ZeRO-3 the learner is a sharded copy, and its weights are copied back at the end.
    learner = make_learner(model, accelerator)
    optimizer = make_optimizer(args, trainable(learner))
    learner, optimizer = accelerator.prepare(learner, optimizer)
    # dict: name -> parameter. Only now, because prepare replaces the parameters if it shards the learner.
    parameters = trainable(accelerator.unwrap_model(learner))
    state = run.restore(parameters, optimizer, B)  # {"update": 0} in a new run

    for update in range(state["update"] + 1, updates + 1):
        # 1. Batch. It is drawn for all processes, and each one takes its share. For a given B, the result
        #    does not depend on the number of processes. Texts of similar length go into the same
        #    micro-batch, which saves padding.
        start_time = time.time()
        data_rows = stream_rows(len(train_rows), start=(update - 1) * B, count=B, seed=args.seed)
        batch = [train_rows[i] for i in data_rows.tolist()]
        if has_labels and args.min_prefix_length > 0:
            batch = cut_to_prefixes(batch, tokenizer, args, update)
        local_batch = batch[rank * B // world : (rank + 1) * B // world]
        local_batch.sort(key=longest_text)

        # 2. Gradient, n rows at a time. The loss is the sum over this process's rows, divided by the number
        #    of rows in the batch on all processes. So the gradient does not depend on how a batch is split.
        learner.train()  # loaded models have no dropout; this switches on gradient checkpointing
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, update, updates)
        metric_sums = {}  # sums over the rows of all micro-batches
        rewards = []  # scores of all responses
        for start in range(0, len(local_batch), n):
            mb = collate_texts(local_batch[start : start + n], device)
            is_last = start + n >= len(local_batch)
            with sync_gradients_if(is_last, accelerator, learner):
                with autocast:
                    logits = learner(mb["ids"], mb["mask"])  # [texts, classes or 1]
                if has_labels:
                    row_metrics = label_metrics(logits, mb["labels"])
                else:
                    scores = group_by_row(logits, mb["response_mask"]).squeeze(-1)  # [n, K], best first
                    row_metrics = preference_metrics(scores, mb["response_mask"], mb["margins"])
                loss = row_metrics["loss"].sum() / B
                accelerator.backward(loss * world)  # DDP averages over processes; we want the sum
            for name, values in row_metrics.items():
                metric_sums[name] = metric_sums.get(name, 0) + values.detach().sum()
            if not has_labels:
                rewards.extend(logits.flatten().tolist())

        # 3. Optimizer step.
        grad_norm = clip_gradients(accelerator, parameters, args.max_grad_norm)
        run.check_gradient(update, grad_norm)  # warns if it is not finite, and raises after five in a row
        if math.isfinite(grad_norm):
            optimizer.step()
        optimizer.zero_grad()

        # 4. Log and save.
        metric_sums = accelerator.reduce(metric_sums)
        metrics = {
            "update": update,
            "epoch": update * B / len(train_rows),
            "lr": optimizer.param_groups[0]["lr"],
            **{name: x / B for name, x in metric_sums.items()},  # loss, accuracy, margin
        }
        if not has_labels:
            rewards = accelerate.utils.gather_object(rewards)
            metrics["min_reward"] = min(rewards)
            metrics["mean_reward"] = sum(rewards) / len(rewards)
            metrics["max_reward"] = max(rewards)
        metrics["grad_norm"] = grad_norm
        metrics["perf/seconds"] = time.time() - start_time
        metrics["perf/peak_memory_mb"] = peak_memory_mb(device)
        run.log(to_numbers(metrics))
        run.checkpoint(update, parameters, optimizer, B)
    copy_weights(parameters, model)

    # 5. Evaluate on held-out rows. The mean score of the references, completions of center_dataset_name or
    #    chosen responses, is what rloo_tldr.py will subtract.
    logits = score_rows(model, data["held_out"], accelerator, autocast)  # [N, K, classes or 1]
    if has_labels:
        evaluation, table = evaluate_labels(logits, data["held_out"], label_names)
    else:
        evaluation, table = evaluate_preferences(logits, data["held_out"])
        reference_scores = score_rows(model, data["references"], accelerator, autocast)
        offset = reference_scores.mean().item()
        evaluation["reward_offset"] = offset
        model.model.config.reward_offset = offset

    # 6. Report and save.
    if accelerator.is_main_process:
        run.table(f"{evaluation['n']} held-out rows, accuracy {evaluation['accuracy']:.4f}", table)
        if not has_labels:
            run.print(
                f"mean score of {len(data['references'])} references, saved as reward_offset: {offset:.3f}"
            )
        run.write_evaluation(evaluation)
        save_reward_model(model.model, tokenizer, args, run.folder / "model")
        titles = {"loss": "loss", "accuracy": "accuracy on the batch", "lr": "learning rate"}
        run.plot(titles, targets={})
    run.finish()
    return model.model, run.folder


# ---- Evaluation --------------------------------------------------------------------------------------------


@torch.no_grad()
def score_rows(model, rows, accelerator, autocast):
    """Outputs for all texts of all rows; each process computes a share. -> fp32 [N, K, classes or 1]"""
    model.eval()
    N, K = find_responses(rows).shape
    logits = torch.zeros(N, K, model.model.config.num_labels, device=accelerator.device)
    by_length = sorted(range(len(rows)), key=lambda i: longest_text(rows[i]))
    local = by_length[accelerator.process_index :: accelerator.num_processes]
    for start in range(0, len(local), 32):
        numbers = local[start : start + 32]
        mb = collate_texts([rows[i] for i in numbers], accelerator.device)
        with autocast:
            mb_logits = model(mb["ids"], mb["mask"])
        mb_K = mb["response_mask"].shape[1]
        logits[numbers, :mb_K] = group_by_row(mb_logits, mb["response_mask"])
    return accelerator.reduce(logits).cpu()  # a sum over processes: each row is 0 on all of them but one


def evaluate_labels(logits, rows, names):
    """Accuracy and confusion matrix of labeled texts. [N, 1, classes] -> metrics, table (list of dicts)"""
    labels = torch.tensor([row.label for row in rows])
    predicted = logits[:, 0].argmax(-1)
    C = len(names)
    confusion = torch.bincount(labels * C + predicted, minlength=C * C).view(C, C)  # [label, predicted]
    metrics = {
        "accuracy": (predicted == labels).float().mean().item(),
        "confusion": confusion.tolist(),
        "labels": names,
        "n": len(rows),
    }
    table = []
    for name, counts in zip(names, confusion.tolist()):
        table.append({"label \\ predicted": name, **dict(zip(names, counts))})
    return metrics, table


def evaluate_preferences(logits, rows):
    """Accuracy and calibration on all pairs of responses. [N, K, 1] -> metrics, table (list of dicts)

    The table splits the pairs into five equal parts, by the size of their score difference. Accuracy is the
    share in the right order, and expected is what the model predicts: the mean of sigmoid(|difference|).
    They agree if a score difference means what the Bradley-Terry model says.
    """
    scores = logits.squeeze(-1)  # [N, K], best first
    better, worse, pair_mask = response_pairs(find_responses(rows))
    margins = (scores[:, better] - scores[:, worse])[pair_mask]  # [pairs of all rows]
    by_size = margins[margins.abs().argsort()]
    table = []
    for part in by_size.tensor_split(min(5, len(margins))):
        sizes = part.abs()
        table.append({
            "score difference": f"{sizes[0]:.2f} to {sizes[-1]:.2f}",
            "pairs": len(part),
            "accuracy": (part > 0).float().mean().item(),
            "expected": sizes.sigmoid().mean().item(),
        })  # fmt: skip
    metrics = {
        "accuracy": (margins > 0).float().mean().item(),
        "margin": margins.mean().item(),
        "calibration": table,
        "n": len(rows),
    }
    return metrics, table


# ============================================================================================================
# Part II: infrastructure. Nothing below is about reward models.
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


def load_tokenizer(name):
    """The tokenizer of a folder or Hub name. If it has no pad token, EOS becomes the pad."""
    tokenizer = load("tokenizer", AutoTokenizer.from_pretrained, name)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def base_model_name(name):
    """The model under a LoRA adapter's folder, or under the adapter that it was trained on; else the name."""
    name = resolve_path(name)
    if not (Path(name) / "adapter_config.json").exists():
        return name
    import peft

    return base_model_name(peft.PeftConfig.from_pretrained(name).base_model_name_or_path)


def is_classifier(config):
    """True if a model was saved with a classification head."""
    return any("ForSequenceClassification" in architecture for architecture in config.architectures or ())


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


def train_head(model):
    """Train the whole head of a classifier with LoRA, by the names that transformers gives to heads."""
    for name in ("score", "classifier", "pre_classifier"):
        head = getattr(model.get_base_model(), name, None)
        if head is not None:
            head.requires_grad_(True)


def build_classifier(args, tokenizer, label_names):
    """A model with one output per label, or with one output, the score. -> model, True if its head is new"""
    if label_names is None:
        settings = {"num_labels": 1}
    else:
        settings = {
            "id2label": dict(enumerate(label_names)),
            "label2id": {name: i for i, name in enumerate(label_names)},
        }
    if args.from_config:
        name = None
        model = model_from_config(AutoModelForSequenceClassification, args.from_config, tokenizer, **settings)
    else:
        name = args.model_name_or_path
        model = load_model(AutoModelForSequenceClassification, name, settings, ignore_mismatched_sizes=True)
    head_is_new = init_new_head(model, name)
    model.config.pad_token_id = tokenizer.pad_token_id  # transformers' pipeline finds the last token by it
    if args.max_length > context_length(model):
        context = context_length(model)
        raise UserError(f"--max-length {args.max_length}: the model's context is {context} tokens")
    if args.lora_r:
        model = add_lora(model, args)
        train_head(model)
    if args.gradient_checkpointing:
        model.activation_checkpointing_enable(dict(use_reentrant=False))
    return model, head_is_new


def save_reward_model(model, tokenizer, args, folder):
    """Save what plain transformers loads, with LoRA merged. A longer text will be cut at --max-length."""
    if hasattr(model, "merge_and_unload"):
        model = model.float().merge_and_unload()  # bf16 (to_device) is too coarse to merge into
    model.to(getattr(torch, args.save_dtype)).save_pretrained(folder)
    tokenizer.model_max_length = args.max_length
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


def longest_text(row):
    """The number of tokens of a row's longest text."""
    return max(len(ids) for ids in row.texts)


def load_data(args, tokenizer):
    """-> dict: train, held_out, references (lists of Row), label_names (list of str; None: preferences)

    References are the texts whose mean score will be 0. Labels need none.
    """
    train, held_out = load_splits(args.dataset_name)
    columns = find_columns(train, held_out, args)
    if columns == ("dialog", "act"):
        train, held_out = load_answers(train, args), load_answers(held_out, args)
        tokenizer.truncation_side = "left"  # the answer is at the end
    train = select_shard(train, args.train_shard)
    order = torch.randperm(len(held_out), generator=generator_for(args.seed, "held-out"))
    held_out = held_out.select(order[: args.num_eval_rows].tolist())

    if columns in [("text", "label"), ("dialog", "act")]:
        label_names, class_of = find_classes(train, args)
        return {
            "train": load_labeled_rows(train, class_of, tokenizer, args),
            "held_out": load_labeled_rows(held_out, class_of, tokenizer, args),
            "references": [],
            "label_names": label_names,
        }
    train = load_preference_rows(train, tokenizer, args)
    return {
        "train": train,
        "held_out": load_preference_rows(held_out, tokenizer, args),
        "references": load_reference_rows(train, tokenizer, args),
        "label_names": None,
    }


def find_columns(train, held_out, args):
    """The columns that decide what is learned: those that both splits have. -> tuple of str"""
    both = set(train.column_names) & set(held_out.column_names)
    for columns in [("dialog", "act"), ("text", "label"), ("prompt", "responses"), ("chosen", "rejected")]:
        if set(columns) <= both:
            return columns
    raise UserError(
        f"data set {args.dataset_name!r} needs the columns text and label, or dialog and act, or chosen and "
        f"rejected, or prompt and responses; it has {', '.join(train.column_names)}"
    )


def select_shard(rows, train_shard):
    """Part i of n of the rows, for "i/n". They are shuffled first: files are often sorted by label."""
    part, _, parts = train_shard.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise UserError(f"--train-shard {train_shard}: expected i/n with i less than n, such as 0/2")
    if int(parts) == 1:
        return rows
    if int(parts) > len(rows):
        raise UserError(f"--train-shard {train_shard}: there are only {len(rows)} training rows")
    return rows.shuffle(seed=0).shard(int(parts), int(part))


def load_labeled_rows(rows, class_of, tokenizer, args):
    """The rows with a text and a label. -> list of Row"""
    texts, classes = [], []
    for text, label in zip(rows["text"], rows["label"]):
        if not isinstance(label, (int, float, str)) or label not in class_of:
            known = ", ".join(str(name) for name in class_of)
            raise UserError(f"{args.dataset_name!r}: the label {label!r} is none of {known}")
        if isinstance(text, str) and text:
            texts.append(text)
            classes.append(class_of[label])
    all_ids = []
    if texts:
        all_ids = tokenizer(texts, truncation=True, max_length=args.max_length).input_ids
    labeled = [Row([ids], number) for ids, number in zip(all_ids, classes) if ids]
    report_skipped(len(rows), len(labeled), "rows: no text")
    if not labeled:
        raise UserError(f"{args.dataset_name!r}: no row has a text")
    return labeled


def find_classes(rows, args):
    """The names of the classes in the order of their numbers, and a dict: label -> number of its class.

    The names are --label-names, or those of the data set, or the labels themselves, sorted.
    """
    labels = rows["label"]
    check_labels(labels, args)
    if args.label_names:
        names = args.label_names.split(",")
    else:
        names = getattr(rows.features["label"], "names", None)
    if names:  # a label is the number of a class or its name
        class_of = {number: number for number in range(len(names))}
        class_of |= {name: number for number, name in enumerate(names)}
    else:
        if len({isinstance(label, str) for label in labels}) > 1:
            raise UserError(f"{args.dataset_name!r}: some labels are numbers, others are words")
        distinct = sorted(set(labels))
        names = [str(label) for label in distinct]
        class_of = {label: number for number, label in enumerate(distinct)}
    if len(names) < 2:
        raise UserError(
            f"{args.dataset_name!r}: a classifier needs two labels or more; there is only {names[0]}"
        )
    return names, class_of


def check_labels(labels, args):
    """Raise if a label is neither a whole number nor a word."""
    for label in labels:
        is_whole = isinstance(label, int) or (isinstance(label, float) and label.is_integer())
        if not is_whole and not isinstance(label, str):
            raise UserError(
                f"{args.dataset_name!r}: a label must be a whole number or a word, and one is {label!r}"
            )


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


def intent_texts(previous, answers):
    """What the intent classifier reads: the last utterance and the answer, nothing earlier. -> list of str"""
    texts = []
    for last, answer in zip(previous, answers):
        texts.append(f"{' '.join(last.split())} {' '.join(answer.split())}")
    return texts


def load_answers(rows, args):
    """The answers in dialogs: text is the last utterance and the answer, label is the act. -> data set

    Acts count from 1, classes from 0.
    """
    previous, answers, labels = [], [], []
    num_answers = 0
    for _, utterances, acts in load_dialogs(rows):
        num_answers += len(utterances) - 1
        if acts is None:
            continue
        for last, answer, act in zip(utterances, utterances[1:], acts[1:]):
            if isinstance(act, int) and 0 < act < 2**31:
                previous.append(last)
                answers.append(answer)
                labels.append(act - 1)
    report_skipped(num_answers, len(answers), "answers: no act (1, 2, ...)")
    if not answers:
        raise UserError(
            f"{args.dataset_name!r}: no dialog has two utterances, none of them blank, and an act "
            "(1, 2, ...) for each"
        )
    return datasets.Dataset.from_dict({"text": intent_texts(previous, answers), "label": labels})


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


def load_preference_rows(rows, tokenizer, args):
    """The rows with two or more responses to compare. -> list of Row"""
    columns = rows.column_names
    if "responses" in columns:
        groups = rows["responses"]
    else:
        groups = [[chosen, rejected] for chosen, rejected in zip(rows["chosen"], rows["rejected"])]
    prompts = rows["prompt"] if "prompt" in columns else [""] * len(rows)
    margins = rows["margin"] if "margin" in columns else [0.0] * len(rows)
    check_margins(margins, columns, args)

    group_sizes, group_margins = [], []
    text_prompts, text_responses = [], []  # one per response, so that all are tokenized in one call
    for prompt, responses, margin in zip(prompts, groups, margins):
        if isinstance(prompt, str) and responses and is_chat(responses[0]):
            prompt = []  # chats contain their prompt, also if a column prompt repeats it as a text
        if is_comparison(prompt, responses):
            group_sizes.append(len(responses))
            group_margins.append(float(margin))
            text_prompts.extend([prompt] * len(responses))
            text_responses.extend(responses)
    report_skipped(len(rows), len(group_sizes), "rows: fewer than two responses to compare, or a blank one")
    if not group_sizes:
        raise UserError(
            f"{args.dataset_name!r}: no row has two responses to compare (strings, or lists of messages, "
            "none of them empty)"
        )

    ids = preference_ids(tokenizer, text_prompts, text_responses, args.max_length)
    preferences, start = [], 0
    for size, margin in zip(group_sizes, group_margins):
        preferences.append(Row(ids[start : start + size], margin=margin))
        start += size
    return preferences


def is_comparison(prompt, responses):
    """True for two or more responses to one prompt, none of them blank: all are str, or all are chats.

    A prompt of [] means that the chats contain it.
    """
    if not isinstance(responses, list) or len(responses) < 2:
        return False
    if is_chat(prompt) or prompt == []:
        return all(is_chat(response) and response[-1]["content"].strip() for response in responses)
    if not isinstance(prompt, str):
        return False
    return all(isinstance(response, str) and response.strip() for response in responses)


def check_margins(margins, columns, args):
    """Raise if a margin is not a finite number, or if there are rankings."""
    if "margin" in columns and "responses" in columns:
        raise UserError(f"{args.dataset_name!r}: a margin goes with chosen and rejected, not with responses")
    for margin in margins:
        if not isinstance(margin, (int, float)) or not abs(margin) < 3e38:  # nan, or infinite in fp32
            raise UserError(
                f"{args.dataset_name!r}: every margin must be a finite number, and one is {margin!r}"
            )


def load_reference_rows(train_rows, tokenizer, args):
    """Up to 1,000 responses. Their mean score is subtracted from all scores. -> list of Row

    They are the completions of --center-dataset-name, or the best responses of the training rows.
    """
    if args.center_dataset_name is None:
        references = [Row(row.texts[:1]) for row in train_rows]
    else:
        flag = f"--center-dataset-name {args.center_dataset_name}"
        rows, _ = load_splits(args.center_dataset_name)
        if not {"prompt", "completion"} <= set(rows.column_names):
            raise UserError(f"{flag}: the data set needs the columns prompt and completion")
        prompts, completions = [], []
        for prompt, completion in zip(rows["prompt"], rows["completion"]):
            are_strings = isinstance(prompt, str) and isinstance(completion, str)
            are_texts = are_strings and prompt and completion
            if are_texts or (is_chat(prompt) and is_chat(completion)):
                prompts.append(prompt)
                completions.append(completion)
        if not prompts:
            raise UserError(f"{flag}: no row has a prompt and a completion")
        references = [Row([ids]) for ids in preference_ids(tokenizer, prompts, completions, args.max_length)]
    order = torch.randperm(len(references), generator=generator_for(args.seed, "center"))
    return [references[i] for i in order[:1000].tolist()]


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


def flags_that_differ(args, recipe):
    """The flags of a run that differ from those of a recipe, with its values. -> str"""
    differ = []
    for name, value in asdict(args).items():
        usual = getattr(recipe, name)
        if value != usual and name not in ("recipe", "resume", "output_dir"):
            differ.append(f"--{name.replace('_', '-')} {value} ({usual})")
    return ", ".join(differ)


def to_numbers(metrics):
    """Replace the tensors in a dict of metrics by Python numbers."""
    return {name: x.item() if isinstance(x, torch.Tensor) else x for name, x in metrics.items()}


# ---- Command line ------------------------------------------------------------------------------------------


def check_positive(args, *names):
    """Raise if a size is 0 or less, before anything is loaded."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise UserError(f"--{name.replace('_', '-')} must be more than 0; it is {value}")


def check_reward_model_args(args):
    """Raise for flags that cannot work, before anything is loaded."""
    check_positive(args, "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs")
    check_positive(args, "max_length", "num_eval_rows")
    find_optimizer(args.optimizer)
    if args.lora_r < 0:
        raise UserError(f"--lora-r must be 0 (no LoRA) or more; it is {args.lora_r}")


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
