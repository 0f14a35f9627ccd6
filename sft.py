"""Supervised fine-tuning: a language model learns to continue texts, or to complete prompts.

If you know nanoGPT's train.py, this is what differs:
1. Data are documents, not one stream. Each ends in EOS, which is learned like any other token, also where pad is EOS: labels come
   from counts. A model that never saw EOS in a label never stops in PPO.
2. Documents are packed into rows without seeing each other: positions start at 0 in each, and attention stays inside it.
3. With the columns prompt and completion, the loss is on the completion (and its EOS) alone. The two are tokenised apart, as they are
   in reward_model.py and in rollouts: a completion begins with its own space.
4. A dialogue is its utterances, each behind a space and with an end mark, tokenised one by one: ppo_dialog.py asks by the same rule.
5. The loss is a sum / the token count of the whole batch, so micro-batches, accumulation and processes do not change the gradient.

    python sft.py                                     # recipe tiny: how checkpoints/reviews-lm was made
    python sft.py tiny-tldr                           # how checkpoints/tldr-sft was made
    python sft.py tiny-dialog                         # how checkpoints/dialogs-lm was made
    python sft.py gpt2-imdb                           # GPT-2 on IMDB, from the Hub: what lvwerra/gpt2-imdb is
    python sft.py --model-name-or-path gpt2 --dataset-name my_folder --lora-r 16
    python sft.py --from-config "llama hidden_size=256 num_hidden_layers=4" --train-tokenizer 4096 --dataset-name my_folder
    torchrun --nproc_per_node 2 sft.py                # two processes, twice the batch (or: accelerate launch)

Results, metrics, details: docs/sft.md.
What two scripts share is the same in both, letter for letter: so a function may have an option that only another script uses.
"""

# ---- 2. Imports ------------------------------------------------------------------------------------------------------
import copy
import ctypes
import fcntl
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
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from pydoc import locate
from typing import Literal

import accelerate
import datasets
import psutil
import tokenizers
import torch
import torch.nn.functional as F
import transformers
import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeRemainingColumn
from rich.table import Table
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).resolve().parent  # data/ and checkpoints/ stand beside this file

# ---- 3. Config -------------------------------------------------------------------------------------------------------
Schedule = Literal["constant", "constant_with_warmup", "linear", "cosine", "inverse_sqrt", "polynomial", "exponential"]

@dataclass
class Args:
    # run
    recipe: tyro.conf.Suppress[str] = "custom"
    """name of the recipe, set from the first word of the command line"""
    seed: int = 1
    """every random draw follows from it and from the number of the update"""
    output_dir: str | None = None
    """run folder (default: runs/<script>/<recipe>-s<seed>-<time>)"""
    resume: str | None = None
    """a run folder, one of its checkpoints, or `latest`: go on from there, with the flags of that run"""
    save_every: int = 100
    """updates from one checkpoint to the next (0: only at the end, or when a signal stops the run)"""
    keep_checkpoints: int = 2
    """how many of the newest checkpoints stay on disk"""
    log_with: Literal["none", "wandb", "tensorboard"] = "none"
    """where the metrics go besides metrics.jsonl; WANDB_MODE=offline works"""
    num_samples: int = 4
    """held-out texts whose beginning is continued at the end"""
    # model
    model_name_or_path: str = "openai-community/gpt2"
    """where to start: a Hub name, or a folder (a LoRA adapter's too)"""
    from_config: str | None = None
    """weights at random instead: a model type or a folder with config.json, then sizes ("gpt2 n_layer=3 n_embd=128")"""
    train_tokenizer: int = 0
    """with from_config: learn a byte-level BPE of this many tokens from the training texts (0: the tokenizer of model_name_or_path)"""
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"
    """bfloat16: products in bf16, weights and sums in fp32; auto: bfloat16 where the hardware multiplies it fast"""
    bf16: bool = False
    """the same as --dtype bfloat16 (TRL's spelling)"""
    save_dtype: Literal["float32", "bfloat16"] = "float32"
    """of the weights in model/; bfloat16 halves the file, and every script loads it in float32"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass"""
    lora_r: int = 0
    """rank of LoRA (0: train all weights)"""
    lora_alpha: int = 32
    """LoRA scale: the update is lora_alpha / lora_r * B A"""
    lora_target_modules: str = "c_attn"
    """names of the layers that get an adapter, with commas, or all-linear (c_attn: GPT-2's attention)"""
    # data
    dataset_name: str = "stanfordnlp/imdb"
    """a Hub name or a folder of jsonl, with the column text, or the columns prompt and completion, or dialog (list of utterances)"""
    utterance_end: str = " <EOU>"
    """the text that ends an utterance of a dialogue (RL4LMs' models); eos: the tokenizer's EOS does (DialoGPT)"""
    max_length: int = 512
    """tokens of a row; a longer document is cut (and then ends without EOS, since it did not end)"""
    completion_only_loss: bool = True
    """with the columns prompt and completion: the loss is on the completion alone; False: on the prompt too (TRL)"""
    packing: bool = True
    """fill rows with several documents that do not see each other"""
    num_train_rows: int | None = None
    """only the first so many documents; None: all"""
    num_eval_rows: int = 500
    """held-out documents of the before / after table, the first ones of the split"""
    # batch
    num_train_epochs: float = 1.0
    """passes over the rows"""
    per_device_train_batch_size: int = 8
    """rows in one forward and backward pass"""
    gradient_accumulation_steps: int = 1
    """passes for one optimizer step; batch = the two multiplied x processes"""
    # optimizer
    learning_rate: float = 5e-5
    """transformers' default, and lvwerra/gpt2-imdb's"""
    optimizer: str = "torch.optim.AdamW"
    """dotted name: torch.optim.AdamW, torch.optim.SGD, bitsandbytes.optim.Adam8bit, bitsandbytes.optim.Lion, ..."""
    adam_eps: float = 1e-8
    """Adam's epsilon, for optimizers that have one (N+ uses 1e-5)"""
    lr_scheduler_type: Schedule = "linear"
    """as transformers' schedules, and exponential (down to 1 %); one step an update"""
    warmup_ratio: float = 0.0
    """share of the updates in which the learning rate rises from 0 (for the schedules that warm up)"""
    max_grad_norm: float | None = 1.0
    """gradients are scaled down to this norm; None: never"""

TINY = dict(
    from_config="gpt2 n_embd=128 n_layer=3 n_head=4 n_positions=256", train_tokenizer=1024, dataset_name="data/reviews",
    max_length=256, dtype="float32", num_train_epochs=12.0, per_device_train_batch_size=16, learning_rate=2e-3,
    lr_scheduler_type="cosine", warmup_ratio=0.05,
)
TINY_TLDR = TINY | dict(
    from_config="gpt_neox hidden_size=128 num_hidden_layers=3 num_attention_heads=4 intermediate_size=512 max_position_embeddings=256",
    dataset_name="data/tldr", save_dtype="bfloat16", num_train_epochs=10.0, learning_rate=3e-3,
)
TINY_DIALOG = TINY | dict(  # without dropout of attention, and with GELU in one kernel
    from_config=f"{TINY['from_config']} attn_pdrop=0.0 activation_function=\"gelu_pytorch_tanh\"", dataset_name="data/dialogs",
    utterance_end="eos", save_dtype="bfloat16", per_device_train_batch_size=8,
)
RECIPES = {
    "tiny": Args(**TINY),  # checkpoints/reviews-lm
    "tiny-tldr": Args(**TINY_TLDR),  # checkpoints/tldr-sft
    "tiny-dialog": Args(**TINY_DIALOG),  # checkpoints/dialogs-lm
    "gpt2-imdb": Args(),  # what lvwerra/gpt2-imdb is: GPT-2, one pass over IMDB
    "tldr-pythia-1b": Args(  # N+, table 2: batch 128, 1 epoch
        model_name_or_path="EleutherAI/pythia-1b-deduped", dataset_name="trl-lib/tldr", max_length=640, per_device_train_batch_size=8,
        gradient_accumulation_steps=16, learning_rate=3e-6, adam_eps=1e-5, lr_scheduler_type="cosine",
    ),
    "gpt2-dailydialog": Args(dataset_name="OpenRL/daily_dialog", num_train_epochs=3.0),  # as rajkumarrrk/gpt2-fine-tuned-on-daily-dialog
}

class UserError(Exception):
    """Something that the user can mend: shown in one line, exit code 2."""

def fail(error):
    """End the process: one line for what the user can mend, a full disk too; a bug of ours keeps its traceback.

    Of several processes only the first to fail says why. The others fail alike, or because it is gone.
    """
    Console().show_cursor()  # the progress bar hid it
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        with suppress(KeyError, torch.distributed.DistError):  # without torchrun there is no store before the processes have met
            place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            if torch.distributed.TCPStore(*place, is_master=False, timeout=timedelta(seconds=10)).add("failed", 1) > 1:
                sys.exit(2)
    cause = error.__context__ if isinstance(error.__context__, OSError) else error  # torch and safetensors have their own words for it
    if isinstance(error, ModuleNotFoundError):
        line = f"these flags need {error.name}: pip install {error.name}"
    elif isinstance(error, (UserError, UnicodeDecodeError)):  # data that are not UTF-8
        line = str(error)
    elif isinstance(cause, OSError) or "(os error " in str(error):
        line = f"{cause}; what was saved before is whole, and --resume goes on from the last checkpoint"
    else:
        raise error
    sys.exit(print(f"{Path(__file__).name}: {' '.join(line.splitlines())}", file=sys.stderr) or 2)

def parse_args(argv):
    """Flags after an optional recipe. No recipe and no model named: tiny. A model named: the published defaults of Args.

    --resume takes the flags of the run that it goes on with, and refuses others where they would change the result.
    """
    named = any(word.split("=")[0].replace("_", "-") in ("--model-name-or-path", "--sft-model-path", "--from-config") for word in argv)
    recipe, flags = (argv[0], argv[1:]) if argv and argv[0][0] != "-" else ("custom" if named else "tiny", argv)
    if recipe not in (*RECIPES, "custom"):
        raise UserError(f"there is no recipe {recipe!r}; there are {', '.join(RECIPES)}")
    about = f"{__doc__.splitlines()[0]} The first word may be a recipe: {', '.join(RECIPES)}."
    args = tyro.cli(Args, default=replace(RECIPES.get(recipe, Args()), recipe=recipe), args=flags, description=about)
    if not args.resume:
        return args
    runs = sorted(Path("runs", Path(__file__).stem).glob("*/args.json"), key=os.path.getmtime) if args.resume == "latest" else ()
    folder = runs[-1].parent if runs else Path(args.resume)
    there, folder = folder.exists(), folder.parent.parent if folder.parent.name == "checkpoints" else folder
    if not there or not (folder / "args.json").exists():
        raise UserError(f"--resume {args.resume}: there is no such checkpoint, or no run (no args.json)")
    saved = load("run", lambda name: json.loads(Path(name).read_text())["args"], str(folder / "args.json"))
    if argv[0][0] != "-" and recipe != saved.get("recipe"):
        raise UserError(f"--resume {args.resume}: a run of recipe {saved.get('recipe')}, not {recipe}")
    if other := set(saved) ^ set(asdict(args)):
        raise UserError(f"--resume {args.resume}: a run of another script or version, one of the two has no {', '.join(sorted(other))}")
    args, saved = tyro.cli(Args, default=Args(**saved), args=flags), Args(**saved)
    free = ("resume", "save_every", "keep_checkpoints", "log_with", "judge_fn", "judge_model", "judge_url", "total_episodes",
            "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps")  # the batch must stay: Run.restore
    if changed := [key for key, value in asdict(args).items() if key not in free and value != getattr(saved, key)]:
        raise UserError(f"--resume {folder} would change {', '.join(changed)}; start a new run for that")
    return replace(args, output_dir=str(folder))

# ---- 4. Kernels ------------------------------------------------------------------------------------------------------
def draws(seed, *place):
    """A random generator for one place in the run, such as (seed, "tokens", update): no draw depends on an earlier one."""
    return torch.Generator().manual_seed(random.Random(repr((seed, *place))).getrandbits(63))

def block_size(device):
    """Positions and words in a block of logits: 3 MiB stay in a processor's cache, 128 MiB cost a GPU few launches (not measured)."""
    return (1024, 768) if device.type == "cpu" else (4096, 8192)

KEPT_PROBS = 2**25  # probabilities, 128 MiB, that may wait for the backward pass of an update

class BlockwiseLogprobs(torch.autograd.Function):
    """Log-probabilities of tokens through the head, a block of logits at a time. What is not kept, the backward pass computes again.

    A logit's exp, less the largest of its block, times a number for the row and the block is the softmax of the row, so each pass takes
    one exp of a logit (Wijmans et al. 2024, "Cut your losses in large-vocabulary language models", has blocks of this kind on a GPU).
    """

    @staticmethod
    def blocks(hidden, weight, bias, kept=()):
        """-> number of the block of columns, rows, columns; fp32: the largest logits [rows], logits minus these, their exp [rows, columns]

        Of the first blocks the exp may be `kept`, and the two before it are None then.
        """
        (height, width), kept = block_size(hidden.device), iter(kept)
        for k, start in enumerate(range(0, len(weight), width)):
            for row in range(0, len(hidden), height):
                rows, columns, exps = slice(row, row + height), slice(start, start + width), next(kept, None)
                if exps is not None:
                    yield k, rows, columns, None, None, exps
                    continue
                logits = F.linear(hidden[rows], weight[columns], None if bias is None else bias[columns]).float()
                if bias is not None:
                    logits.clamp_(min=-1e4)  # a bias of -inf forbids a token, and 0 * -inf is nan
                top = logits.amax(-1)
                logits.sub_(top[:, None])
                yield k, rows, columns, top, logits, logits.exp()

    @staticmethod
    def forward(ctx, hidden, weight, bias, tokens, keep):
        """[N, H], [V, H], [V] or None, [N] -> log-probabilities of the tokens and of the likeliest ones, entropies, each fp32 [N]

        At most `keep` exps stay for the backward pass: a quarter of the head's products and half of its exps less for them.
        """
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        hidden, weight, bias = (None if x is None else x.to(dtype) for x in (hidden, weight, bias))
        N, more = len(hidden), -len(hidden) % 16 if kind == "cpu" and dtype is torch.bfloat16 else 0
        hidden, tokens = F.pad(hidden, (0, 0, 0, more)), F.pad(tokens, (0, more))  # few different N: a CPU compiles for each (bf16)
        picked = torch.empty(len(hidden), device=hidden.device)  # [N], logit of the token
        parts = math.ceil(len(weight) / block_size(hidden.device)[1])
        kept = []
        tops, sums, dots = torch.empty(3, parts, len(hidden), device=hidden.device)  # [blocks, N]: largest logit, sums of exp, exp * logit
        for k, rows, columns, top, logits, exps in BlockwiseLogprobs.blocks(hidden, weight, bias):
            tops[k, rows], sums[k, rows] = top, exps.sum(-1)
            place = tokens[rows] - columns.start
            near = place.clamp(0, logits.shape[1] - 1)
            picked[rows] = torch.where(near == place, logits.gather(1, near[:, None]).squeeze(1) + top, picked[rows])
            dots[k, rows] = logits.mul_(exps).sum(-1)
            keep -= exps.numel()
            kept += [exps] if keep >= 0 else []
        best = tops.amax(0)  # [N], largest logit; what follows is relative to it, and is not rounded at its size
        scale = torch.exp(tops - best)  # [blocks, N]
        total = (scale * sums).sum(0)  # [N], of exp
        scale = scale / total  # makes probabilities of a block's exp
        entropies = total.log() - (scale * (dots + (tops - best) * sums)).sum(0)  # [N], of -p log p
        ctx.save_for_backward(hidden, weight, bias, tokens, scale, *kept)
        logprobs, likeliest, entropies = (x[:N] for x in (picked - best - total.log(), -total.log(), entropies))
        ctx.mark_non_differentiable(likeliest, entropies)
        return logprobs, likeliest, entropies

    @staticmethod
    def backward(ctx, grad, *_):
        """The derivative of a token's log-probability by the logits: 1 at the token, minus the softmax."""
        hidden, weight, bias, tokens, scale, *kept = ctx.saved_tensors
        N, grad = len(grad), F.pad(grad, (0, len(hidden) - len(grad)))
        d_hidden = grad[:, None] * weight[tokens].float()  # [N, H]
        empty = torch.empty_like if N else torch.zeros_like  # without rows nothing below fills it
        d_weight = empty(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None  # [V, H]
        d_bias = grad.new_zeros(len(weight)).index_add_(0, tokens, grad) if bias is not None else None  # [V]
        for k, rows, columns, _, _, exps in BlockwiseLogprobs.blocks(hidden, weight, bias, kept):
            d_logits = exps * (-grad[rows] * scale[k, rows])[:, None]  # [rows, columns]
            if d_bias is not None:
                d_bias[columns] += d_logits.sum(0)
            d_logits = d_logits.to(hidden.dtype)
            d_hidden[rows] += d_logits @ weight[columns]
            if d_weight is not None:
                part = d_logits.T @ hidden[rows]
                d_weight[columns] = part if rows.start == 0 else d_weight[columns] + part
        if d_weight is not None:
            d_weight.index_add_(0, tokens, grad[:, None] * hidden.float())
        return d_hidden[:N], d_weight, d_bias, None, None

def next_token_losses(hidden, weight, labels, bias=None, keep=0):
    """Cross-entropy in nats, and whether the likeliest token was right, at each position whose label is not -100; else 0.

    [B, L, H], [V, H], [B, L] -> fp32 [B, L - 1], bool [B, L - 1]. The state at t - 1 is judged by the label at t. Positions without a
    label do not go through the head, and [B, L, V] is never held; the gradient finds at most `keep` exps of logits kept.
    """
    labels, valid = labels[:, 1:], labels[:, 1:] != -100
    logprobs, likeliest, _ = BlockwiseLogprobs.apply(hidden[:, :-1][valid], weight, bias, labels[valid], keep)
    empty = torch.zeros(valid.shape, device=valid.device)
    return empty.masked_scatter(valid, -logprobs), empty.bool().masked_scatter(valid, logprobs >= likeliest)

# ---- 5. Models -------------------------------------------------------------------------------------------------------
def check_positive(args, *names):
    """Refuse a size of 0 or less before anything is loaded."""
    for name in names:
        if getattr(args, name) <= 0:
            raise UserError(f"--{name.replace('_', '-')} must be more than 0; it is {getattr(args, name)}")

def located(name):
    """A folder as it is named, or beside this file, as recipes name theirs; else the name, which is the Hub's."""
    return next((str(path) for path in (Path(name), HERE / name) if path.exists()), name)

def load(what, function, name, **kwargs):
    """function(name), with one line where it fails: a wrong path, no network, a broken file."""
    name = located(name)
    try:
        return function(name, **kwargs)
    except Exception as error:  # the libraries raise a dozen kinds
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else error  # it says where
        reason = "no such folder" if Path(name).is_absolute() and not Path(name).exists() else str(cause).strip() or f"empty? {cause!r}"
        raise UserError(f"cannot load the {what} {name!r} (a folder, or a Hub name with network): {reason.splitlines()[0]}") from error

def load_model(auto_class, name, settings=None, **kwargs):
    """A model in fp32 without dropout, from safetensors: what comes from elsewhere runs no code. A LoRA folder is merged."""
    name = located(name)
    if (Path(name) / "adapter_config.json").exists():
        import peft
        if "quantization_config" in kwargs:
            raise UserError(f"--load-in-8bit: {name} is a LoRA adapter, which cannot be merged into 8 bit: merge it first")
        base = load_model(auto_class, peft.PeftConfig.from_pretrained(name).base_model_name_or_path, settings, **kwargs)
        model = peft.PeftModel.from_pretrained(base, name).merge_and_unload().requires_grad_(True)  # peft froze the base
        model.name_or_path = str(name)  # what the next adapter stands on
        return model
    config = load("model", AutoConfig.from_pretrained, name)
    rates = {key: 0.0 for key, value in config.to_dict().items() if "drop" in key and isinstance(value, float)}
    gelu = {key: "gelu_pytorch_tanh" for key, value in config.to_dict().items() if value == "gelu_new"}  # the same in one kernel, not 8
    config.update(rates | gelu | (settings or {}))  # with dropout a second forward would differ, and the first ratio would not be 1
    return load("model", auto_class.from_pretrained, name, config=config, dtype=torch.float32, use_safetensors=True, **kwargs)

def load_tokenizer(name):
    """The tokenizer of a folder or Hub name. Where it has no pad, pad is EOS, which is safe here: masks come from counts."""
    tokenizer = load("tokenizer", AutoTokenizer.from_pretrained, name)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer

def add_lora(model, args):
    """LoRA (Hu et al. 2021) around the named layers: W + lora_alpha / lora_r * B A, with A drawn at random and B = 0."""
    import peft
    if args.lora_r < 0:
        raise UserError(f"--lora-r must be 0 (no LoRA) or more; it is {args.lora_r}")
    target = args.lora_target_modules if args.lora_target_modules == "all-linear" else args.lora_target_modules.split(",")
    heads = [name for name in ("score", "classifier", "pre_classifier") if hasattr(model, name)]  # of classifiers: trained whole
    config = peft.LoraConfig(r=args.lora_r, lora_alpha=args.lora_alpha, target_modules=target, exclude_modules=heads or None)
    try:
        model = peft.get_peft_model(model, config)
    except ValueError as error:
        raise UserError(f"--lora-target-modules {args.lora_target_modules}: no such layers in this model") from error
    if hasattr(model.get_base_model().get_output_embeddings(), "base_layer"):  # the loss would read the weight alone
        raise UserError(f"--lora-target-modules {args.lora_target_modules}: the output embedding cannot have an adapter here")
    return model

def trainable(module):
    """Name -> parameter, of what the optimizer moves and a checkpoint holds."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}

def make_learner(model, accelerator):
    """The module to train: this one, or a copy without its reference where FSDP2 or ZeRO-3 will cut its weights into shards.

    Shards cannot generate. The whole module does, on every process, and takes the new weights over where it is used (`take_weights`).
    """
    plugin = accelerator.state.deepspeed_plugin
    if accelerator.distributed_type != "FSDP" and (plugin is None or plugin.zero_stage < 3):
        return model
    learner = copy.deepcopy(model, memo={id(getattr(model, "reference", None)): None})  # what its memo holds is taken as it is
    layers = max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)
    learner._no_split_modules = [type(layers[0]).__name__]  # FSDP2 shards layer by layer
    return learner

@torch.no_grad()
def take_weights(model, learner):
    """Copy the weights of a sharded module into the whole one, one by one; all processes take part. -> the whole one, in eval mode"""
    for p, shard in zip(trainable(model).values(), trainable(learner).values()) if learner is not model else ():
        if hasattr(shard, "full_tensor"):  # FSDP2
            p.copy_(shard.full_tensor())
        else:  # ZeRO-3
            import deepspeed
            with deepspeed.zero.GatheredParameters([shard]):
                p.copy_(shard)
    return model.eval()

def clip_gradients(accelerator, parameters, max_norm):
    """Scale the gradients of one step down to this norm; None: never. -> their norm before, over all processes' shards

    DeepSpeed clips and steps in the step's last backward pass; its norm is what it has seen there.
    """
    norm = accelerator.clip_grad_norm_(parameters.values(), max_norm or math.inf)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

def shard_like(value, p):
    """This process's shard of a tensor of p's shape where p is sharded (FSDP2); anything else as it is."""
    if not hasattr(p, "full_tensor") or getattr(value, "shape", None) != p.shape:
        return value
    return torch.distributed.tensor.distribute_tensor(value.to(p.device), p.device_mesh, p.placements, src_data_rank=None)

def make_optimizer(args, parameters, updates):
    """The optimizer of the dotted name, and its schedule, which steps once an update."""
    kind = locate(args.optimizer)
    if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
        raise UserError(f"--optimizer {args.optimizer}: not an optimizer of an installed package; e.g. torch.optim.AdamW")
    options = dict(lr=args.learning_rate, eps=args.adam_eps, fused="Adam" in args.optimizer)  # others cannot fuse on FSDP2's shards
    optimizer = kind(list(parameters), **{k: v for k, v in options.items() if k in inspect.signature(kind).parameters})
    warmup = 0 if args.lr_scheduler_type == "constant" else math.ceil(args.warmup_ratio * updates)

    def factor(step):  # of the learning rate, as transformers' schedules of these names have it; importing those takes seconds
        if step < warmup:
            return step / warmup
        left = (updates - step) / max(1, updates - warmup)  # from 1 to 0
        scale, end = warmup or 10_000, 1e-7 / max(args.learning_rate, 1e-7)
        return dict(linear=left, cosine=0.5 * (1 - math.cos(math.pi * left)), polynomial=end + (1 - end) * left,
                    inverse_sqrt=(1 + (step - warmup) / scale) ** -0.5, exponential=0.01 ** (1 - left)).get(args.lr_scheduler_type, 1.0)

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

def check_finite(numbers, update):
    """Stop before a model that has overflowed writes the next batch, or takes the place of a good checkpoint."""
    if not numbers.isfinite().all():
        raise UserError(f"update {update} is not saved: what the model computes is not finite: lower --learning-rate, or --max-grad-norm 1")

def pick_dtype(args, device):
    """bf16 products where they are asked for or, on auto, where the hardware has units for them; weights and sums stay fp32."""
    fast = torch.cuda.is_bf16_supported(including_emulation=False) if device.type == "cuda" else torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if args.bf16 or args.dtype == "bfloat16" or (args.dtype == "auto" and fast) else torch.float32

def describe_memory(model, learner, config, args, length, sampled, accelerator):
    """One line: estimated GiB on one process with Adam, passes of `length` tokens a row, `sampled` rows generated at once.

    Gradients and activations go before the cache of the next rollout comes. Of shards (FSDP2, DeepSpeed) each process has its part.
    """
    device, split = accelerator.device, accelerator.num_processes if accelerator.distributed_type in ("FSDP", "DEEPSPEED") else 1
    trained, weights = sum(p.numel() for p in trainable(model).values()), sum(p.nbytes for p in model.parameters())
    layer = length * config.hidden_size * 4  # bytes of an fp32 vector a token of one row
    kept = config.num_hidden_layers + 17 if args.gradient_checkpointing else 17 * config.num_hidden_layers  # Korthikanti et al. 2022, eq. 1
    parts = dict(weights=weights, optimizer=8 * trained // split, shards=4 * trained // split if learner is not model else 0,
                 gradients=4 * trained // split, activations=kept * layer * args.per_device_train_batch_size,
                 cache=2 * config.num_hidden_layers * layer * sampled)
    total = sum(parts.values()) - min(parts["gradients"] + parts["activations"], parts["cache"])
    free = torch.cuda.mem_get_info()[0] if device.type == "cuda" else psutil.virtual_memory().available
    listed = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in parts.items() if size)
    warning = "; MORE THAN THERE IS: a smaller batch, LoRA, 8 bit?" if total - weights > free else ""  # the weights are there already
    return f"{trained:,} trainable parameters; memory about {total / 2**30:.2f} GiB ({listed}), {free / 2**30:.0f} are free{warning}"

def draw_model(auto_class, text, tokenizer, **settings):
    """A model with weights at random from "TYPE_OR_FOLDER name=value ...", sized for the tokenizer."""
    name, *pairs = text.split()
    ends = dict(bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    try:
        values = {key: json.loads(value) for key, value in (pair.split("=") for pair in pairs)}
        there = Path(name).exists() or "/" in name
        config = AutoConfig.from_pretrained(name) if there else AutoConfig.for_model(name, **values)  # it draws other values from these
        config.update(dict(vocab_size=len(tokenizer)) | ends | settings | values)
        return auto_class.from_config(config)
    except Exception as error:  # the libraries raise a dozen kinds
        raise UserError(f"--from-config {text!r}: {error}; expected e.g. 'gpt2 n_layer=3 n_embd=128', or a folder") from error

def learn_tokenizer(texts, size):
    """A byte-level BPE tokenizer (Radford et al. 2019) of `size` tokens, with an EOS and a pad of its own."""
    learned = tokenizers.ByteLevelBPETokenizer()
    learned.train_from_iterator(texts, vocab_size=size, special_tokens=["<|endoftext|>", "<|pad|>"], show_progress=False)
    ends = dict(bos_token="<|endoftext|>", eos_token="<|endoftext|>", pad_token="<|pad|>")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=learned._tokenizer, **ends)

def context_of(model):
    """How many tokens a model takes at most; RoBERTa's positions begin behind the id of its pad."""
    tables = [m for name, m in model.named_modules() if name.endswith("position_embeddings")]
    taken = max((m.padding_idx + 1 for m in tables if getattr(m, "padding_idx", None) is not None), default=0)
    return getattr(model.config, "max_position_embeddings", 10**9) - taken

def body_and_head(model):
    """The transformer without its head, and its output embedding, of a causal language model with or without LoRA."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    return model.base_model, model.get_output_embeddings()

class LanguageModel(nn.Module):
    """A language model whose forward is its losses: one module, one forward, and one thing to wrap (DDP, FSDP, DeepSpeed)."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, labels, positions):
        """-> losses fp32 [B, L - 1], right bool [B, L - 1]"""
        body, head = body_and_head(self.model)
        keep = KEPT_PROBS if torch.is_grad_enabled() else 0
        return next_token_losses(document_states(body, ids, positions), head.weight, labels, head.bias, keep)

@torch.no_grad()
def check_losses(model, name):
    """Refuse a model whose head is more than a matrix product (soft caps, logit scales): it would be trained wrongly."""
    ids = torch.arange(min(6, model.config.vocab_size), device=model.device)[None]  # [1, 6], also their own positions and labels
    theirs = F.cross_entropy(model.eval()(ids).logits[0, :-1].float(), ids[0, 1:], reduction="none")
    if not torch.allclose(LanguageModel(model)(ids, ids, ids)[0][0], theirs, atol=1e-3, rtol=1e-3):
        raise UserError(f"{name}: its head is more than hidden @ weight (a soft cap, a scale); it would be trained wrongly here")

# ---- 6. Data ---------------------------------------------------------------------------------------------------------
def load_splits(name):
    """(train, held-out) rows of a Hub data set or a folder. Held out: split test, else validation, else the last 10 % of train."""
    splits = load("data set", datasets.load_dataset, name)
    if "train" not in splits or len(splits["train"]) < 2:
        raise UserError(f"data set {name!r} needs a split train with at least 2 rows; it has {', '.join(splits)}")
    rows, held = splits["train"], splits.get("test", splits.get("validation"))
    cut = len(rows) - max(1, len(rows) // 10)
    return (rows, held) if held is not None else (rows.select(range(cut)), rows.select(range(cut, len(rows))))

def left_out(total, kept, why):
    """Say how many rows of the data are not used."""
    if kept < total and accelerate.PartialState().is_main_process:
        print(f"left out {total - kept:,} of {total:,} {why}")

def stream_rows(num_rows, start, count, seed):
    """Row numbers start .. start + count of an endless stream of shuffled passes over the data. -> [count]"""
    passes = range(start // num_rows, (start + count - 1) // num_rows + 1)
    stream = torch.cat([torch.randperm(num_rows, generator=draws(seed, "pass", p)) for p in passes])
    return stream[start - passes[0] * num_rows :][:count]

def dialogues(rows):
    """The dialogues of two or more utterances, none of them blank, and their acts, if they have any. -> list of (list of str, acts)"""
    acts = rows["act"] if "act" in rows.column_names else [None] * len(rows)
    acts = [[int(x) if isinstance(x, float) and x.is_integer() else x for x in act] if isinstance(act, list) else act for act in acts]
    kept = [(utterances, act) for utterances, act in zip(rows["dialog"], acts) if isinstance(utterances, list) and len(utterances) > 1
            and all(isinstance(text, str) and text.strip() for text in utterances)]  # fmt: skip
    left_out(len(rows), len(kept), "dialogues: fewer than two utterances, or a blank one")
    return kept

def utterance_ids(tokenizer, utterances, end):
    """Token ids of each utterance: a space, its text, the end mark; the same rule in training, rollouts and chat. -> list of lists

    Tokenised one by one: no merge crosses the border of two, and a prompt has the very ids with which its dialogue begins.
    """
    mark, last = ("", [tokenizer.eos_token_id]) if end == "eos" else (end, [])
    texts = [f" {' '.join(text.split())}{mark}" for text in utterances]
    return [ids + last for ids in tokenizer(texts, add_special_tokens=False).input_ids]

def documents(rows, tokenizer, args):
    """(ids, labels) of each row: text + EOS, prompt + completion + EOS with -100 on the prompt, or a dialogue. -> list of pairs of lists"""
    kinds = [names for names in (("text",), ("prompt", "completion"), ("dialog",)) if set(names) <= set(rows.column_names)]
    if not kinds:
        raise UserError(f"{args.dataset_name!r} needs a column text, or prompt and completion, or dialog; "
                        f"it has {', '.join(rows.column_names)}")
    if kinds[0] == ("dialog",):
        if not args.utterance_end.strip():
            raise UserError("--utterance-end must not be empty: nobody could tell where an utterance ends")
        found = [utterance_ids(tokenizer, utterances, args.utterance_end) for utterances, _ in dialogues(rows)]
        parts = [[sum(ids, [])[: -1 if args.utterance_end == "eos" else None] for ids in found]]  # its EOS comes below, as everyone's
    else:
        kept = [row for row in zip(*(rows[name] for name in kinds[0])) if all(isinstance(text, str) for text in row)]
        parts = [tokenizer(list(column), add_special_tokens=False).input_ids for column in zip(*kept)] or [[]]
    total = len(parts[0]) if kinds[0] == ("dialog",) else len(rows)
    prompts, texts = parts if len(parts) == 2 else ([[]] * len(parts[0]), parts[0])
    rows = [(p, t + [tokenizer.eos_token_id]) for p, t in zip(prompts, texts) if t]
    pairs = [(p + t, ([-100] * len(p) if args.completion_only_loss else p) + t) for p, t in rows]
    pairs = [(ids[: args.max_length], labels[: args.max_length]) for ids, labels in pairs]
    pairs = [(ids, labels) for ids, labels in pairs if any(label != -100 for label in labels[1:])]
    left_out(total, len(pairs), f"rows: no text to learn from within --max-length {args.max_length} tokens")
    if not pairs:
        raise UserError(f"{args.dataset_name!r}: no row has text to learn from within --max-length {args.max_length} tokens")
    return pairs

def pack(pairs, max_length, packing):
    """Fill rows of max_length tokens with whole documents, first come, first served. -> list of lists of pairs"""
    rows = [[]]
    for pair in pairs:
        if rows[-1] and (not packing or sum(len(ids) for ids, _ in rows[-1]) + len(pair[0]) > max_length):
            rows.append([])
        rows[-1].append(pair)
    return rows

def collate_rows(rows, device):
    """Rows of documents -> ids [B, L], labels [B, L], positions [B, L]. Pads stand right of everything that is learned.

    The first label of a document is -100: nothing before it could predict it. Positions begin at 0 in each document.
    """
    L = max(sum(len(ids) for ids, _ in row) for row in rows)
    ids, labels = torch.zeros(len(rows), L, dtype=torch.long), torch.full((len(rows), L), -100)
    positions = torch.arange(L).repeat(len(rows), 1)  # pads stay with the document before them, which cannot see them
    for i, row in enumerate(rows):
        at = 0
        for tokens, targets in row:
            here = slice(at, at + len(tokens))
            ids[i, here], labels[i, here], positions[i, here] = torch.tensor(tokens), torch.tensor(targets), torch.arange(len(tokens))
            labels[i, at] = -100
            at += len(tokens)
    return ids.to(device), labels.to(device), positions.to(device)

def can_pack(model, width):
    """Whether rows of this width may hold several documents: a mask keeps them apart, and positions begin anew.

    A recurrent state would leak, the mask knows no window, Falcon's ALiBi reads another, and BLOOM would go on counting.
    """
    if getattr(model, "_is_stateful", True) or "position_ids" not in inspect.signature(model.forward).parameters:
        return False
    config = model.config.get_text_config()
    windows = [getattr(config, name, None) or width for name in ("sliding_window", "attention_chunk_size")]
    return min(windows) >= width and not getattr(config, "alibi", False)

def document_states(body, ids, positions):
    """Last hidden states [B, L, H]. Where a row holds several documents, a block-diagonal causal mask keeps them apart.

    The mask is added to the attention scores, [B, 1, L, L]: not every architecture reads the borders from position ids (OPT does not).
    """
    if not (positions[:, 1:] == 0).any():
        return body(input_ids=ids, use_cache=False).last_hidden_state
    document = (positions == 0).cumsum(-1)  # [B, L], the number of the document in its row
    later = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).triu(1)  # [L, L]
    apart = later | (document[:, None, :] != document[:, :, None])  # [B, L, L]
    mask = torch.zeros(apart.shape, device=ids.device).masked_fill(apart, torch.finfo(torch.bfloat16).min)[:, None]  # [B, 1, L, L]
    return body(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).last_hidden_state

# ---- 7. Rollout ------------------------------------------------------------------------------------------------------
@torch.no_grad()
def write_samples(model, tokenizer, pairs, args):
    """Continue prompts, or the first 8 tokens of held-out documents, by sampling, until EOS or 40 tokens. -> rows of a table"""
    rows, context = [], context_of(model)
    for ids, labels in pairs[: args.num_samples]:
        prompt = ids[: labels.count(-100) or max(1, min(8, len(ids) - 1))]
        prompt = prompt[-max(1, context - 40):]  # its end is what is continued
        out = model.generate(torch.tensor([prompt], device=model.device), attention_mask=torch.ones(1, len(prompt), device=model.device),
                             max_new_tokens=min(40, context - len(prompt)), do_sample=True, top_k=0, pad_token_id=tokenizer.pad_token_id)
        rows.append(dict(prompt=tokenizer.decode(prompt), completion=tokenizer.decode(out[0, len(prompt):])))
    return rows

# ---- 8. Evaluation ---------------------------------------------------------------------------------------------------
@torch.no_grad()
def held_out_numbers(model, rows, autocast, accelerator, args):
    """Held-out loss in nats a token, token accuracy and perplexity; each process takes its share of the rows."""
    model.eval()
    n, sums = args.per_device_train_batch_size, torch.zeros(3, device=accelerator.device)
    for i in range(accelerator.process_index * n, len(rows), accelerator.num_processes * n):
        ids, labels, positions = collate_rows(rows[i : i + n], accelerator.device)
        with autocast:
            losses, right = model(ids, labels, positions)
        sums += torch.stack([losses.sum(), right.sum(), (labels != -100).sum()])
    loss, accuracy, _ = ((sums := accelerator.reduce(sums)) / sums[2]).tolist()
    return {"loss": loss, "mean_token_accuracy": accuracy, "perplexity": math.exp(min(loss, 700))}

# ---- 9. Logging and run folder ---------------------------------------------------------------------------------------
class Run:
    """The run folder and the screen: args.json, metrics.jsonl, samples.jsonl, evaluation.json, curves.png, checkpoints/, model/."""

    def __init__(self, args, accelerator, updates, columns):
        name = args.output_dir or f"runs/{Path(__file__).stem}/{args.recipe}-s{args.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
        taken = Path(name).is_file() or (not args.resume and any(Path(name, file).exists() for file in ("args.json", "metrics.jsonl")))
        name, taken = accelerate.utils.broadcast_object_list([name, taken])
        if taken:
            raise UserError(f"{name} is a file or holds a run: --resume goes on with a run, --output-dir names another folder")
        self.folder = Path(name)
        self.args, self.accelerator, self.main = args, accelerator, accelerator.is_main_process
        self.console = Console(highlight=False, markup=False, soft_wrap=not sys.stdout.isatty(), quiet=not self.main)
        parts = ("{task.completed}/{task.total}", BarColumn(20), TimeRemainingColumn(), "{task.description}")
        self.bar = Progress(*parts, console=self.console, disable=not (self.main and self.console.is_terminal))
        self.updates, self.columns, self.task = updates, columns, self.bar.add_task("", total=updates)
        self.signal, self.printed, self.engine = 0, 0.0, None  # DeepSpeed's, where it trains
        for number in (signal.SIGINT, signal.SIGTERM):  # the update is finished and saved first; a second signal ends at once
            signal.signal(number, self.stop)
        self.batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * accelerator.num_processes  # of one step
        if self.main:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = open(self.folder / ".lock", "w")
            try:
                fcntl.lockf(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends, however it ends
            except OSError as error:
                if isinstance(error, (BlockingIOError, PermissionError)):  # others: a file system without locks
                    raise UserError(f"{name} is in use by a run that has not ended") from error
            commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True).stdout.strip()
            versions = {module.__name__: module.__version__ for module in (torch, transformers, datasets, accelerate)}
            about = dict(command=sys.argv, versions=versions, commit=commit, world_size=accelerator.num_processes)
            self.write("args.json", json.dumps(dict(args=asdict(args), **about), indent=2))
        if args.log_with != "none":
            accelerator.log_with, accelerator.project_configuration.logging_dir = [args.log_with], str(self.folder)
            accelerator.init_trackers(Path(__file__).stem, {k: str(v) for k, v in asdict(args).items()})

    def stop(self, number, frame):
        self.signal = number
        signal.signal(number, signal.SIG_DFL)

    def write(self, name, text):
        (self.folder / f".{name}").write_text(text)
        os.replace(self.folder / f".{name}", self.folder / name)  # whole or not at all

    def log(self, metrics, complaints=()):
        """One dict, one call: a line of metrics.jsonl, a point in wandb or tensorboard (under train/, as TRL), a row on the screen."""
        self.accelerator.log({f"train/{name}": value for name, value in metrics.items()}, step=metrics["update"])
        if self.main:
            with open(self.folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps(metrics) + "\n")
        status = "  ".join(f"{label} {metrics[name]:.3g}" for label, name in self.columns.items())
        self.bar.update(self.task, completed=metrics["update"], description=status)
        if self.bar.disable and (time.time() - self.printed > 10 or metrics["update"] == self.updates):  # no terminal: lines
            self.printed = time.time()
            self.console.print(f"update {metrics['update']}/{self.updates}  {status}")
        for line in complaints:
            self.console.print(f"update {metrics['update']}: {line}", style="yellow")

    def table(self, title, rows, file=None, **extra):
        """Dicts as a table on the screen and, where a file is named, with what is extra as its lines."""
        wide = any(isinstance(cell, str) and len(cell) > 40 for row in rows for cell in row.values())
        table = Table(title=title, title_justify="left", show_lines=wide)
        for name, cell in rows[0].items():
            table.add_column(name.strip(), justify="left" if isinstance(cell, str) else "right", overflow="fold")
        for row in rows:
            table.add_row(*(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row.values()))
        self.console.print(table, soft_wrap=False)
        if file and self.main:
            with open(self.folder / file, "a") as lines:
                lines.writelines(json.dumps(extra | row) + "\n" for row in rows)
        if file and self.args.log_with == "wandb":
            self.accelerator.get_tracker("wandb").log_table(title, columns=list(rows[0]), data=[list(row.values()) for row in rows])

    def whole(self, value):
        """What a checkpoint keeps, with the shards of FSDP2 put together; all processes take part, one gets the result."""
        if hasattr(value, "full_tensor"):
            full = value.full_tensor()
            return full.cpu() if self.main else None
        return {key: self.whole(x) for key, x in value.items()} if isinstance(value, dict) else value

    def checkpoint(self, update, parameters, optimizer, scheduler, probe=None, **state):
        """Save what decides the rest of the run, when it is due or a signal came to any process; after a signal, exit.

        probe() computes something with the model: where that is not finite, the last good checkpoint keeps its place.
        """
        number = int(self.accelerator.gather(torch.tensor([self.signal], device=self.accelerator.device)).max())
        due = number or update == self.updates or (self.args.save_every and update % self.args.save_every == 0)
        if due and probe:
            with torch.no_grad():
                check_finite(probe(), update)
        folder, draft = (self.folder / "checkpoints" / f"{dot}{update:06d}" for dot in ("", "."))
        if due and self.engine:
            self.engine.save_checkpoint(str(draft), tag="deepspeed")  # each process its shards
            self.accelerator.wait_for_everyone()
        elif due:
            state |= self.whole(dict(parameters={name: p.detach() for name, p in parameters.items()}, optimizer=optimizer.state_dict()))
        if self.main and due:
            rng = dict(torch=torch.get_rng_state(), python=random.getstate())  # of the user's code; ours draws from (seed, update)
            state |= dict(update=update, scheduler=scheduler.state_dict(), batch=self.batch, shards=self.shards, rng=rng)
            draft.mkdir(parents=True, exist_ok=True)
            try:
                with open(draft / "state.pt", "wb") as file:
                    torch.save(state, file)
                    os.fsync(file.fileno())
            except (OSError, RuntimeError) as error:
                shutil.rmtree(draft)
                raise UserError(f"cannot save {folder}: {error.__context__ or error}; --resume goes on from the one before") from error
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(draft, folder)  # a checkpoint gets its name when it is whole, so a kill leaves the last one good
            for old in sorted(folder.parent.glob("[0-9]*"), reverse=True)[max(self.args.keep_checkpoints, 1) :]:
                shutil.rmtree(old)
        if number and update < self.updates:
            self.bar.stop()
            self.console.print(f"stopped by signal {number}; to go on: python {Path(__file__).name} --resume {self.folder}")
            sys.exit(128 + number)

    def restore(self, parameters, optimizer, scheduler):
        """Load the checkpoint that --resume names, or the run's newest. -> its state; {"update": 0} at the start of a run"""
        found, state = sorted((self.folder / "checkpoints").glob("[0-9]*")), {"update": 0}
        self.shards = f"ZeRO-{self.engine.zero_optimization_stage()} on {self.accelerator.num_processes} processes" if self.engine else ""
        if self.args.resume and found:
            last = next((path for path in found if path.resolve() == Path(self.args.resume).resolve()), found[-1])
            state = load("checkpoint", torch.load, str(last / "state.pt"), map_location="cpu", weights_only=True)
            if state["batch"] != self.batch:
                raise UserError(f"--resume {last}: a step there is of {state['batch']} rows, here of {self.batch}: choose "
                                "--per-device-train-batch-size so that with this number of processes it stays the same")
            if (cut := state.get("shards", "")) != self.shards:  # "": whole, and fits any number of processes
                raise UserError(f"--resume {last}: it is of {cut or 'a run without DeepSpeed'}, which must stay so")
            if self.engine:
                self.engine.load_checkpoint(str(last), tag="deepspeed")
            else:
                for name, p in parameters.items():
                    p.data.copy_(shard_like(state["parameters"][name], p))
                moments, held = state["optimizer"]["state"], [p for group in optimizer.param_groups for p in group["params"]]
                moments |= {i: {key: shard_like(x, held[i]) for key, x in kept.items()} for i, kept in moments.items()}
                optimizer.load_state_dict(state["optimizer"])
            scheduler.load_state_dict(state["scheduler"] | {"last_epoch": state["update"] - 1})
            scheduler.step()  # again, since another number of updates has another curve
            torch.set_rng_state(state["rng"]["torch"])
            random.setstate(state["rng"]["python"])
            self.console.print(f"resumed after update {state['update']}, from {last}")
        if self.main:
            later = [path for path in found if self.args.resume and path > last]  # it will come again
            for path in (*later, *(self.folder / "checkpoints").glob(".*")):  # the others: what a kill left half written
                shutil.rmtree(path)
            for file in filter(Path.exists, (self.folder / "metrics.jsonl", self.folder / "samples.jsonl")):
                lines = [line for line in file.read_text().splitlines(True) if line.endswith("\n")]  # a kill can tear the last one
                self.write(file.name, "".join(line for line in lines if json.loads(line)["update"] <= state["update"]))
        return state

    def curves(self, *names):
        """curves.png: the named metrics over the updates."""
        from matplotlib.figure import Figure
        figure = Figure(figsize=(4 * len(names), 3), layout="constrained")
        rows = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        for axis, name in zip(figure.subplots(1, len(names)), names):
            axis.plot([row["update"] for row in rows], [row[name] for row in rows])
            axis.set(title=name, xlabel="update")
        figure.savefig(self.folder / "curves.png", dpi=120)

def hold_memory():
    """Keep what is freed: glibc gives large blocks back at once, and Linux fills the next ones with zeros, page by page, in every step."""
    with suppress(AttributeError):  # a C library without mallopt
        for option, value in ((-4, 0), (-1, 2**31 - 1), (-2, 2**26)):  # malloc.h: M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD
            ctypes.CDLL(None).mallopt(option, value)

def start(args):
    """The accelerator: CPU, GPU, or one process of several, by accelerate's configuration sharded (FSDP2, DeepSpeed).

    Refuses to run on fewer processes than were asked for.
    """
    ddp = accelerate.DistributedDataParallelKwargs(broadcast_buffers=False)  # they are constants, and an offloaded model's are elsewhere
    if cpu := not torch.cuda.is_available():
        hold_memory()
    sharded = [kind for kind in ("FSDP", "DEEPSPEED") if os.environ.get(f"ACCELERATE_USE_{kind}", "").lower() == "true"]
    if "FSDP" in sharded and os.environ.get("FSDP_VERSION") != "2":
        raise UserError("accelerate's configuration asks for the first FSDP, which does not work here; put fsdp_version: 2 into it")
    if cpu and sharded:  # accelerate 1.15 has them for GPUs alone; told that this is one, it runs them on a CPU too
        accelerate.PartialState(cpu=True).distributed_type = accelerate.DistributedType.MULTI_GPU
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # each process loads whole models: the policy also generates
    accelerator = accelerate.Accelerator(cpu=cpu and not sharded, mixed_precision="no", kwargs_handlers=[ddp])
    if plugin := accelerator.state.deepspeed_plugin:
        bf16 = dict(enabled=pick_dtype(args, accelerator.device) is torch.bfloat16, dtype="bfloat16")
        plugin.deepspeed_config |= dict(train_micro_batch_size_per_gpu=args.per_device_train_batch_size, torch_autocast=bf16,
                                        gradient_accumulation_steps=1, gradient_clipping=args.max_grad_norm or 0.0)  # ours adds up
        transformers.integrations.deepspeed.unset_hf_deepspeed_config()  # it would load every model in shards
    parent = psutil.Process().parent()  # None in a container that shows no process outside
    words = [*(parent.cmdline() if parent else ()), ""]  # accelerate 1.15 starts one for `launch --cpu --num_processes 2`
    asked = [number for word, number in zip(words, words[1:]) if word.replace("-", "_") == "__num_processes"] or ["1"]
    asked, runs = os.environ.get("WORLD_SIZE", asked[0]), accelerator.num_processes
    if runs != int(asked):
        raise UserError(f"{asked} processes were asked for and {runs} runs; try torchrun --nproc_per_node {asked} {Path(__file__).name}")
    torch.manual_seed(args.seed)  # the weights that start at random: LoRA's A, a new head
    return accelerator

# ---- 10. Train -------------------------------------------------------------------------------------------------------
def train(args):
    """The whole run, from the flags to the last table. -> (model, run folder)"""
    check_positive(args, "per_device_train_batch_size", "gradient_accumulation_steps", "max_length", "num_eval_rows")
    if args.train_tokenizer and not args.from_config:
        raise UserError("--train-tokenizer goes with --from-config: a trained model knows only its own tokenizer")
    accelerator = start(args)
    device, rank, world = accelerator.device, accelerator.process_index, accelerator.num_processes
    train_rows, held_rows = load_splits(args.dataset_name)
    if args.train_tokenizer:
        names = [name for name in ("text", "prompt", "completion", "dialog") if name in train_rows.column_names]
        texts = [" " + " ".join(filter(None, text)) if name == "dialog" else text for name in names for text in train_rows[name] if text]
        tokenizer = learn_tokenizer(texts, args.train_tokenizer)
    else:
        tokenizer = load_tokenizer(args.model_name_or_path)
    model = draw_model(AutoModelForCausalLM, args.from_config, tokenizer) if args.from_config else \
        load_model(AutoModelForCausalLM, args.model_name_or_path)
    if args.max_length > context_of(model):
        raise UserError(f"--max-length {args.max_length}: the model's context is {context_of(model)} tokens")
    if args.packing and not can_pack(model, args.max_length):
        raise UserError("--packing needs a model that takes position ids, keeps no state and attends to whole rows; use --no-packing here")
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no EOS, so the model could not learn to stop")
    check_losses(model, args.from_config or args.model_name_or_path)
    model = (add_lora(model, args) if args.lora_r else model).to(device)
    if args.gradient_checkpointing:
        model.activation_checkpointing_enable(dict(use_reentrant=False))
    bare = LanguageModel(model)
    train_rows = train_rows.select(range(min(len(train_rows), args.num_train_rows or len(train_rows))))
    train_pairs, held_pairs = documents(train_rows, tokenizer, args), documents(held_rows, tokenizer, args)[: args.num_eval_rows]
    rows, held = pack(train_pairs, args.max_length, args.packing), pack(held_pairs, args.max_length, args.packing)
    B = args.per_device_train_batch_size * args.gradient_accumulation_steps * world
    updates = max(1, round(args.num_train_epochs * len(rows) / B))
    optimizer, scheduler = make_optimizer(args, trainable(learner := make_learner(bare, accelerator)).values(), updates)
    dtype = pick_dtype(args, device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=dtype is torch.bfloat16)

    run = Run(args, accelerator, updates, {"loss": "loss", "accuracy": "mean_token_accuracy"})
    say = run.console.print
    say(f"recipe {args.recipe}: {args.from_config or args.model_name_or_path} on {args.dataset_name}, {device}, {dtype}; {run.folder}")
    say(f"{len(train_pairs):,} documents in {len(rows):,} rows of {args.max_length} tokens; batch: {args.per_device_train_batch_size} rows "
        f"a pass x {args.gradient_accumulation_steps} accumulated x {world} processes = {B}; {updates} optimizer steps")
    say(describe_memory(bare, learner, model.config, args, args.max_length, 0, accelerator))
    model, optimizer = accelerator.prepare(learner, optimizer)
    parameters = trainable(learner)
    before = held_out_numbers(bare, held, autocast, accelerator, args)
    run.engine = model if accelerator.distributed_type == "DEEPSPEED" else None
    state = run.restore(parameters, optimizer, scheduler)
    take_weights(bare, learner)
    skipped = 0
    run.bar.start()
    for update in range(state["update"] + 1, updates + 1):
        # 1. The batch is drawn for all processes; this one takes its rows, in micro-batches.
        began = time.time()
        model.train()
        batch = stream_rows(len(rows), (update - 1) * B, B, args.seed)[rank * B // world : (rank + 1) * B // world]
        micros = [collate_rows([rows[i] for i in part], device) for part in batch.split(args.per_device_train_batch_size)]
        tokens = accelerator.reduce(sum((labels != -100).sum() for _, labels, _ in micros))  # of the whole batch

        # 2. Gradients: each micro-batch adds its sum / the token count of all of them.
        sums = torch.zeros(2, device=device)
        for i, (ids, labels, positions) in enumerate(micros):
            with accelerator.no_sync(model) if i + 1 < len(micros) else nullcontext():
                with autocast:
                    losses, right = model(ids, labels, positions)
                accelerator.sync_gradients = i + 1 == len(micros)  # DeepSpeed steps in the last pass's backward
                accelerator.backward(losses.sum() / tokens * world)  # DDP divides by the number of processes
            sums += torch.stack([losses.detach().sum(), right.sum()])

        # 3. Step, unless the gradient is broken.
        norm = clip_gradients(accelerator, parameters, args.max_grad_norm)
        skipped = 0 if math.isfinite(norm) else skipped + 1
        if skipped:
            say(f"update {update}: a gradient that is not finite, step skipped, {skipped} in a row", style="yellow")
            if skipped == 5:
                raise UserError("5 gradients in a row were not finite: lower --learning-rate, or --dtype float32")
        else:
            optimizer.step()
        optimizer.zero_grad()

        # 4. Log and save.
        loss, accuracy = (accelerator.reduce(sums) / tokens).tolist()
        seconds = time.time() - began
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 2**10)  # bytes on macOS, else KiB
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else host
        run.log({"update": update, "epoch": update * B / len(rows), "lr": optimizer.param_groups[0]["lr"], "loss": loss,
                 "mean_token_accuracy": accuracy, "perplexity": math.exp(min(loss, 700)), "grad_norm": norm, "perf/seconds": seconds,
                 "perf/tokens_per_second": int(tokens) / seconds, "perf/peak_memory_mb": peak / 2**20})
        scheduler.step()
        probe = lambda: take_weights(bare, learner)(ids[:1], labels[:1], positions[:1])[0]  # noqa: B023, E731
        run.checkpoint(update, parameters, optimizer, scheduler, probe)

    # 5. The same held-out rows again, samples, and the model that the next script loads.
    run.bar.stop()
    after = held_out_numbers(bare, held, autocast, accelerator, args)
    if run.main:
        run.table(f"{len(held_pairs)} held-out documents", [dict(metric=k, before=before[k], after=after[k]) for k in before])
        run.write("evaluation.json", json.dumps(dict(before=before, after=after, n=len(held_pairs)), indent=2))
        (run.folder / "samples.jsonl").unlink(missing_ok=True)  # a run that was killed behind this line comes here again
        if args.num_samples > 0:
            run.table("samples", write_samples(bare.model, tokenizer, held_pairs, args), "samples.jsonl", update=updates)
        saved = bare.model.merge_and_unload() if args.lora_r else bare.model
        saved.to(getattr(torch, args.save_dtype)).save_pretrained(run.folder / "model")
        tokenizer.save_pretrained(run.folder / "model")
        run.curves("loss", "mean_token_accuracy", "lr")
        say(f"saved {run.folder / 'model'}")
    accelerator.wait_for_everyone()  # a process that ends too soon may abort, and torchrun would then stop the one that saves
    accelerator.end_training()
    return bare.model, run.folder

# ---- 11. Main --------------------------------------------------------------------------------------------------------
def main(argv=None):
    """The command line. What the user can mend ends in one line and exit code 2; a bug of ours keeps its traceback."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of a missing 4-bit kernel that nothing here uses
    for quiet in (transformers, datasets):
        quiet.logging.set_verbosity_error()
        quiet.utils.logging.disable_progress_bar()
    try:
        train(parse_args(sys.argv[1:] if argv is None else argv))
    except Exception as error:
        fail(error)

if __name__ == "__main__":
    main()
