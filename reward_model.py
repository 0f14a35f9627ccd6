"""Reward model: preferences, rankings or labels of texts become a score that PPO and RLOO can climb.

It is an ordinary classifier of texts, and what its use as a reward asks for:
1. The columns decide. text, label: a classifier, whose logit of one label is the reward; dialog, act: one that reads an utterance and
   the answer, and names the answer's act (ppo_dialog.py's intent). prompt, chosen, rejected (or chosen and
   rejected that begin alike) or prompt, responses (best first): one score a text, by Bradley-Terry (`preference_loss`, `ranking_loss`).
2. A decoder's score is read at the last real token, found by count: looking for `token != pad` misses a real EOS where pad is EOS.
3. A response is read as it was written: prompt, response, EOS, tokenised by the same rule as in sft.py and rloo_tldr.py, and what
   is too long loses its beginning, never its EOS (`preference_ids`).
4. A new head is drawn at 1 / sqrt(d + 1), so that the first scores are about 1 in size (N+, detail 11).
5. Preferences do not say where 0 is. The mean score of reference responses is kept as reward_offset in config.json, and subtracted
   by rloo_tldr.py (N+, detail 13); plain transformers gives the score plus that constant.
6. Texts with labels can be cut at random places while training: a rollout is the beginning of a text (--min-prefix-length).
What it saves loads with AutoModelForSequenceClassification, a classifier with transformers.pipeline("text-classification") too.

    python reward_model.py                      # recipe tiny: how checkpoints/reviews-sentiment was made
    python reward_model.py tiny-tldr            # how checkpoints/tldr-reward was made, from pairs
    python reward_model.py tiny-dialog          # how checkpoints/dialogs-intent was made
    python reward_model.py distilbert-imdb      # what lvwerra/distilbert-imdb is, from the Hub
    python reward_model.py tldr-pythia-1b       # N+'s reward model, from the Hub
    python reward_model.py --model-name-or-path my_lm --dataset-name my_folder
    torchrun --nproc_per_node 2 reward_model.py # two processes, twice the batch (or: accelerate launch)

Papers: Learning to summarize from human feedback (Stiennon et al. 2020), InstructGPT (Ouyang et al. 2022), The N+ implementation
details of RLHF with PPO (Huang et al. 2024). Results, metrics, details: docs/reward_model.md.
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
import torch
import torch.nn.functional as F
import transformers
import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeRemainingColumn
from rich.table import Table
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

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
    # model
    model_name_or_path: str = "distilbert/distilbert-base-uncased"
    """where to start: a Hub name, or a folder (a LoRA adapter's too); a language model gets a new head"""
    from_config: str | None = None
    """weights at random instead: a model type or a folder with config.json, then sizes ("distilbert n_layers=2 dim=64")"""
    tokenizer_name_or_path: str | None = None
    """None: model_name_or_path's"""
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"
    """bfloat16: products in bf16, weights and sums in fp32; auto: bfloat16 where the hardware multiplies it fast"""
    bf16: bool = False
    """the same as --dtype bfloat16 (TRL's spelling)"""
    save_dtype: Literal["float32", "bfloat16"] = "float32"
    """of the weights in model/; bfloat16 halves the file, and every script loads it in float32"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass"""
    share_prompts: bool = True
    """decoders: what the responses to a prompt begin with is computed once for all of them; not with --gradient-checkpointing"""
    lora_r: int = 0
    """rank of LoRA (0: train all weights)"""
    lora_alpha: int = 32
    """LoRA scale: the update is lora_alpha / lora_r * B A"""
    lora_target_modules: str = "all-linear"
    """names of the layers that get an adapter, with commas, or all-linear (c_attn: GPT-2's attention)"""
    # data
    dataset_name: str = "stanfordnlp/imdb"
    """Hub name or folder of jsonl: text, label | dialog, act | [prompt,] chosen, rejected | prompt, responses (best first)"""
    train_shard: str = "0/1"
    """i/n: part i of the shuffled training rows cut into n; 0/2 and 1/2 are two disjoint halves"""
    center_dataset_name: str | None = None
    """preferences: prompts and completions whose mean score becomes 0 (N+); None: the preferred responses of the training rows"""
    label_names: str | None = None
    """names of the classes in the order of their numbers, with commas; None: the data set's own, else the labels themselves"""
    max_length: int = 512
    """tokens; of a longer text with a label the beginning is read, of a longer response with its prompt the end"""
    min_prefix_length: int = 0
    """labels: while training, cut each text at a random token from here on, since PPO will ask about beginnings (0: never)"""
    num_eval_rows: int = 25_000
    """held-out rows that are scored at the end"""
    # batch
    num_train_epochs: float = 2.0
    """passes over the rows"""
    per_device_train_batch_size: int = 16
    """rows in one forward and backward pass; all responses to a prompt are in the same one (InstructGPT)"""
    gradient_accumulation_steps: int = 1
    """passes for one optimizer step; batch = the two multiplied x processes"""
    # optimizer
    learning_rate: float = 5e-5
    """transformers' default"""
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
    model_name_or_path="checkpoints/reviews-lm", dataset_name="data/reviews", max_length=128, dtype="float32",
    label_names="negative,positive", num_train_epochs=6.0, per_device_train_batch_size=32, learning_rate=1e-3,
    lr_scheduler_type="cosine", warmup_ratio=0.1,
)
TINY_TLDR = TINY | dict(
    model_name_or_path="checkpoints/tldr-sft", dataset_name="data/tldr-preference", center_dataset_name="data/tldr", max_length=224,
    label_names=None, save_dtype="bfloat16", num_train_epochs=4.0,
)
TINY_DIALOG = TINY | dict(
    from_config="gpt2 n_embd=96 n_layer=2 n_head=4 n_positions=128", tokenizer_name_or_path="checkpoints/dialogs-lm",
    dataset_name="data/dialogs", max_length=64, label_names="inform,question,directive,commissive", save_dtype="bfloat16",
    num_train_epochs=2.0, per_device_train_batch_size=64, learning_rate=2e-3,
)
RECIPES = {
    "tiny": Args(**TINY),  # checkpoints/reviews-sentiment
    "tiny-tldr": Args(**TINY_TLDR),  # checkpoints/tldr-reward
    "tiny-dialog": Args(**TINY_DIALOG),  # checkpoints/dialogs-intent
    "distilbert-imdb": Args(),  # what lvwerra/distilbert-imdb is
    "tldr-pythia-1b": Args(  # N+, table 3
        model_name_or_path="cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr", dataset_name="trl-lib/tldr-preference",
        center_dataset_name="trl-lib/tldr", max_length=638, num_train_epochs=1.0, per_device_train_batch_size=8,
        gradient_accumulation_steps=8, learning_rate=3e-6, adam_eps=1e-5, lr_scheduler_type="cosine", num_eval_rows=2_000,
    ),
    "hh": Args(
        model_name_or_path="EleutherAI/pythia-160m", dataset_name="Anthropic/hh-rlhf", num_train_epochs=1.0, learning_rate=1e-5,
        per_device_train_batch_size=8, gradient_accumulation_steps=8, warmup_ratio=0.1, num_eval_rows=5_000,
    ),
    "roberta-dailydialog": Args(  # as rajkumarrrk/roberta-daily-dialog-intent-classifier
        model_name_or_path="FacebookAI/roberta-base", dataset_name="OpenRL/daily_dialog", max_length=128, learning_rate=2e-5,
        label_names="inform,question,directive,commissive", warmup_ratio=0.1,
    ),
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
def length_mask(lengths, max_length):
    """True on the first `lengths` positions of each row. [B] -> bool [B, T]"""
    return torch.arange(max_length, device=lengths.device) < lengths[:, None]  # [B, T]

def preference_loss(chosen, rejected, margin=0.0):
    """-log P(chosen is preferred), where P = sigmoid of the score difference (Bradley-Terry). [N], [N] -> [N], in nats

    A margin, in units of the score, asks for more distance between texts that differ more (Llama 2, section 3.2.2).
    """
    return -F.logsigmoid((chosen - rejected).float() - margin)

def ranking_loss(scores, mask):
    """Mean of preference_loss over all pairs of a row, best first (Ouyang et al. 2022, eq. 1). [N, K], bool [N, K] -> [N]

    The mask leaves out what pads a row of fewer responses; a row of one has no pair and loses 0.
    """
    scores = torch.where(mask, scores.float(), 0.0)
    better, worse = torch.triu_indices(mask.shape[1], mask.shape[1], 1, device=mask.device)  # [K (K - 1) / 2] pairs
    both = mask[:, better] & mask[:, worse]  # [N, pairs]
    losses = preference_loss(scores[:, better], scores[:, worse])
    return torch.where(both, losses, 0.0).sum(1) / both.sum(1).clamp(min=1)

def draws(seed, *place):
    """A random generator for one place in the run, such as (seed, "tokens", update): no draw depends on an earlier one."""
    return torch.Generator().manual_seed(random.Random(repr((seed, *place))).getrandbits(63))

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

def context_of(model):
    """How many tokens a model takes at most; RoBERTa's positions begin behind the id of its pad."""
    tables = [m for name, m in model.named_modules() if name.endswith("position_embeddings")]
    taken = max((m.padding_idx + 1 for m in tables if getattr(m, "padding_idx", None) is not None), default=0)
    return getattr(model.config, "max_position_embeddings", 10**9) - taken

def sequence_logits(model, input_ids, mask):
    """Class logits of right-padded texts. [B, L], bool [B, L] -> fp32 [B, classes]

    A decoder is read at its last real token, by count: looking for `token != pad` misses a real EOS where pad is EOS. It never looks
    to its right, so pads there need no mask.
    """
    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # under LoRA
    if not hasattr(model, "score"):  # BERT and its family
        return model(input_ids=input_ids, attention_mask=mask.long()).logits.float()
    hidden = model.base_model(input_ids=torch.where(mask, input_ids, 0), use_cache=False).last_hidden_state  # [B, L, H]
    return model.score(hidden[torch.arange(len(hidden), device=mask.device), mask.sum(-1) - 1]).float()

def shared_prompt_scores(model, input_ids, mask, K):
    """The same scores of rows of K texts, where what the texts of a row begin with is read once. [N * K, L] -> fp32 [N * K, 1]

    A decoder's keys and values of the prompt serve all responses to it, as in a rollout, and its gradient is the sum of theirs
    (prefix sharing; Wang and Hegde 2024). Shared are as many tokens as the texts of every row have in common, so there is no gap.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # under LoRA
    rows = input_ids.view(-1, K, input_ids.shape[1])  # [N, K, L]
    alike = (rows == rows[:, :1]).flatten(0, 1).all(0).long().cumprod(0).sum()  # tokens from the beginning
    P = int(torch.minimum(alike, mask.sum(1).min() - 1))  # each text keeps one of its own
    if P == 0 or not hasattr(inner, "score") or inner._is_stateful:
        return sequence_logits(model, input_ids, mask)
    tokens, cache = torch.where(mask, input_ids, 0), transformers.DynamicCache(config=inner.config)
    inner.base_model(input_ids=tokens[::K, :P], past_key_values=cache, use_cache=True)
    cache.batch_repeat_interleave(K)
    hidden = inner.base_model(input_ids=tokens[:, P:], past_key_values=cache, use_cache=True).last_hidden_state  # [N * K, L - P, H]
    return inner.score(hidden[torch.arange(len(hidden), device=mask.device), mask.sum(-1) - 1 - P]).float()

def base_of(name):
    """The model under a LoRA adapter's folder, or under the adapter it stands on; any other name as it is."""
    name = located(name)
    if not (Path(name) / "adapter_config.json").exists():
        return name
    import peft
    return base_of(peft.PeftConfig.from_pretrained(name).base_model_name_or_path)

def new_head(model, name):
    """Draw the weights of a decoder's head anew where the folder or Hub name has none of that size -> is it new?

    std 1 / sqrt(d + 1) with d inputs, so that scores begin at about 1 in size (N+, detail 11). No name: all weights are new.
    """
    config = load("model", AutoConfig.from_pretrained, base_of(name)) if name else None
    known = config and any("ForSequenceClassification" in architecture for architecture in config.architectures or ())
    new = not known or config.num_labels != model.config.num_labels
    if name and (name := located(name)) != base_of(name):
        import peft
        new = new and peft.PeftConfig.from_pretrained(name).task_type != "SEQ_CLS"  # peft keeps the head of such an adapter
    if new and hasattr(model, "score"):
        scale = (model.score.in_features + 1) ** -0.5
        nn.init.normal_(model.score.weight, std=scale)
        spread = model.score.weight.square().mean().sqrt() / scale
        assert abs(spread - 1) < 4 / model.score.weight.numel() ** 0.5, "the new head is not what was drawn"  # 5.6 sigma
    return new

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

class Classifier(nn.Module):
    """The model behind one forward, which is what gets wrapped (DDP, FSDP, DeepSpeed)."""

    def __init__(self, model, share=False):
        super().__init__()
        self.model, self.share = model, share

    def forward(self, ids, mask, K=1):
        """Logits of rows of K texts each. [N * K, L], bool [N * K, L] -> fp32 [N * K, classes]"""
        return shared_prompt_scores(self.model, ids, mask, K) if self.share and K > 1 else sequence_logits(self.model, ids, mask)

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

def intent_texts(previous, answers):
    """What the intent classifier reads: the last utterance and the answer, and nothing before (RL4LMs). -> list of str"""
    return [f"{' '.join(last.split())} {' '.join(answer.split())}" for last, answer in zip(previous, answers)]

def act_rows(rows, args):
    """Columns dialog and act -> text, the last utterance and the answer, and label, the answer's act - 1: acts begin at 1."""
    talks = dialogues(rows)
    found = [(*pair, act - 1) for utterances, acts in talks if isinstance(acts, list) and len(acts) == len(utterances)
             for *pair, act in zip(utterances, utterances[1:], acts[1:]) if isinstance(act, int) and 0 < act < 2**31]  # fmt: skip
    left_out(sum(len(utterances) - 1 for utterances, _ in talks), len(found), "answers: no act (1, 2, ...)")
    if not found:
        raise UserError(f"{args.dataset_name!r}: no dialogue has two utterances, none of them blank, and an act (1, 2, ...) for each")
    previous, answers, labels = zip(*found)
    return datasets.Dataset.from_dict(dict(text=intent_texts(previous, answers), label=list(labels)))

def label_names_of(rows, args):
    """Names of the classes in the order of their numbers, and label -> number."""
    names = args.label_names.split(",") if args.label_names else getattr(rows.features["label"], "names", ())
    for label in [x for x in rows["label"] if not isinstance(x, (int, str)) and not (isinstance(x, float) and x.is_integer())][:1]:
        raise UserError(f"{args.dataset_name!r}: a label must be a whole number or a word, and one is {label!r}")
    if not names and len({isinstance(label, str) for label in rows["label"]}) > 1:
        raise UserError(f"{args.dataset_name!r}: some labels are numbers, others words")
    labels = range(len(names)) if names else sorted(set(rows["label"]))
    if len(labels) < 2:
        raise UserError(f"{args.dataset_name!r}: a classifier needs two labels or more, and every row has the label {labels[0]!r}")
    return list(map(str, names or labels)), {label: number for number, label in enumerate(labels)} | {n: i for i, n in enumerate(names)}

def examples(rows, numbers, tokenizer, args):
    """Rows with a text and a label -> list of ([ids], class)."""
    texts = [text if isinstance(text, str) else "" for text in rows["text"]]
    tokens = tokenizer(texts, truncation=True, max_length=args.max_length).input_ids  # of no text an encoder's has its marks
    for label in [x for x in rows["label"] if not isinstance(x, (int, float, str)) or x not in numbers][:1]:
        raise UserError(f"{args.dataset_name!r}: the label {label!r} is none of {', '.join(map(str, numbers))}")
    found = [([ids], numbers[label]) for text, ids, label in zip(texts, tokens, rows["label"]) if text and ids]
    left_out(len(rows), len(found), "rows: no text")
    if not found:
        raise UserError(f"{args.dataset_name!r}: no row has a text")
    return found

def preference_ids(tokenizer, prompts, responses, max_length):
    """Token ids of prompt, response and EOS: the same rule in training and in rollouts -> list of lists

    A response that was cut gets its EOS too, since the model learned to score there and nowhere else. What is too long loses its
    beginning. An encoder's tokenizer (BERT's family) marks the ends of a text in its own way.
    """
    if tokenizer.eos_token_id is None or tokenizer.cls_token_id is not None:
        tokenizer.truncation_side = "left"
        return tokenizer([p + r for p, r in zip(prompts, responses)], truncation=True, max_length=max_length).input_ids
    parts = zip(*(tokenizer(list(texts), add_special_tokens=False).input_ids for texts in (prompts, responses)))
    return [(prompt + response + [tokenizer.eos_token_id])[-max_length:] for prompt, response in parts]

def preferences(rows, tokenizer, args):
    """Rows with chosen and rejected, or responses, best first -> list of ([ids of each response], margin)."""
    names = rows.column_names
    if {"margin", "responses"} <= set(names):
        raise UserError(f"{args.dataset_name!r}: a margin goes with chosen and rejected, and not with a ranking of responses")
    groups = rows["responses"] if "responses" in names else [list(pair) for pair in zip(rows["chosen"], rows["rejected"])]
    prompts = rows["prompt"] if "prompt" in names else [""] * len(groups)  # without: chosen and rejected begin alike, as in HH
    margins = rows["margin"] if "margin" in names else [0.0] * len(groups)
    if not all(isinstance(margin, (int, float)) and abs(margin) < 3e38 for margin in margins):
        raise UserError(f"{args.dataset_name!r}: every margin must be a finite number")
    kept = [row for row in zip(prompts, groups, margins) if isinstance(row[0], str) and isinstance(row[1], list)
            and len(row[1]) > 1 and all(isinstance(text, str) and text.strip() for text in row[1])]  # fmt: skip
    left_out(len(rows), len(kept), "rows: not two responses to compare")
    if not kept:
        raise UserError(f"{args.dataset_name!r}: no row has two responses to compare (as strings, none of them empty)")
    flat = [(prompt, text) for prompt, group, _ in kept for text in group]
    ids = iter(preference_ids(tokenizer, *zip(*flat), args.max_length))
    return [([next(ids) for _ in group], margin) for _, group, margin in kept]

def center_texts(train_rows, tokenizer, args):
    """The responses whose mean score will be 0 -> list of ([ids], 0.0)."""
    if not args.center_dataset_name:
        return [(group[:1], 0.0) for group, _ in train_rows]
    rows, _ = load_splits(args.center_dataset_name)
    if not {"prompt", "completion"} <= set(rows.column_names):
        raise UserError(f"--center-dataset-name {args.center_dataset_name}: it needs the columns prompt and completion")
    kept = [row for row in zip(rows["prompt"], rows["completion"]) if all(isinstance(text, str) and text for text in row)]
    if not kept:
        raise UserError(f"--center-dataset-name {args.center_dataset_name}: no row has a prompt and a completion")
    return [([ids], 0.0) for ids in preference_ids(tokenizer, *zip(*kept), args.max_length)]

def collate_texts(batch, device):
    """Rows of K texts or fewer -> ids [N * K, L] padded on the right, bool mask [N * K, L], exists bool [N, K], targets [N].

    In place of a text that a row lacks stands its first; `exists` leaves the score out.
    """
    counts = torch.tensor([len(texts) for texts, _ in batch])
    texts = [torch.tensor(ids) for group, _ in batch for ids in group + group[:1] * (int(counts.max()) - len(group))]
    ids = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    mask = length_mask(torch.tensor([len(text) for text in texts]), ids.shape[1])
    parts = ids, mask, length_mask(counts, int(counts.max())), torch.tensor([target for _, target in batch])
    return [part.to(device) for part in parts]

def row_losses(logits, exists, targets, classes):
    """The loss of each row, how much of it was right (0 to 1), and the scores. [N * K, classes or 1] -> [N], [N], [N, K]"""
    if classes > 1:
        return F.cross_entropy(logits, targets, reduction="none"), (logits.argmax(-1) == targets).float(), logits
    scores = logits.view(exists.shape)  # [N, K], best first
    if scores.shape[1] == 2:
        losses = preference_loss(scores[:, 0], scores[:, 1], targets)
    else:
        losses = ranking_loss(scores, exists)
    better, worse = torch.triu_indices(*[scores.shape[1]] * 2, 1, device=scores.device)
    both = exists[:, better] & exists[:, worse]
    right = ((scores[:, better] > scores[:, worse]) & both).sum(1) / both.sum(1)
    return losses, right, scores

# ---- 8. Evaluation ---------------------------------------------------------------------------------------------------
@torch.no_grad()
def score_rows(model, rows, autocast, accelerator):
    """Logits of the texts of held-out rows, on all processes. -> list of (logits [K, classes or 1], target), in any order"""
    model.eval()
    rows, found = sorted(rows, key=lambda row: len(row[0][0]))[accelerator.process_index :: accelerator.num_processes], []
    for i in range(0, len(rows), 32):
        ids, mask, exists, targets = collate_texts(part := rows[i : i + 32], accelerator.device)
        with autocast:
            logits = model(ids, mask, exists.shape[1]).cpu().view(*exists.shape, -1)  # [N, K, classes or 1]
        found += [(x[: len(texts)].tolist(), target) for x, (texts, target) in zip(logits, part)]
    return accelerate.utils.gather_object(found)

def classes_table(found, names):
    """Accuracy, and the texts of each label (rows) by what they were taken for (columns). -> numbers, rows of the table"""
    counts = torch.zeros(len(names), len(names), dtype=torch.long)
    for logits, label in found:
        counts[label, torch.tensor(logits[0]).argmax()] += 1
    table = [{"label \\ taken for": name} | dict(zip(names, row)) for name, row in zip(names, counts.tolist())]
    return dict(accuracy=(counts.trace() / counts.sum()).item(), confusion=counts.tolist(), labels=names, n=len(found)), table

def calibration_table(found):
    """Held-out pairs in five equal parts by their score difference: the share that is ordered right, and what the model expects,
    the mean of sigmoid(difference). They agree where a difference means what Bradley-Terry says. -> numbers, rows of the table"""
    scores = [torch.tensor(logits).squeeze(-1) for logits, _ in found]  # [K] each, best first
    margins = torch.cat([(x[:, None] - x)[tuple(torch.triu_indices(len(x), len(x), 1))] for x in scores])  # [pairs]
    table = []
    for part in margins[margins.abs().argsort()].tensor_split(min(5, len(margins))):
        ends = f"{part[0].abs():.2f} to {part[-1].abs():.2f}"
        expected = part.abs().sigmoid().mean().item()
        table.append({"score difference": ends, "pairs": len(part), "accuracy": (part > 0).float().mean().item(), "expected": expected})
    return dict(accuracy=(margins > 0).float().mean().item(), margin=margins.mean().item(), calibration=table, n=len(found)), table

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
    accelerator = start(args)
    device, rank, world = accelerator.device, accelerator.process_index, accelerator.num_processes
    tokenizer = load_tokenizer(args.tokenizer_name_or_path or args.model_name_or_path)
    train_rows, held_rows = load_splits(args.dataset_name)
    if {"dialog", "act"} <= set(train_rows.column_names) & set(held_rows.column_names):
        train_rows, held_rows = act_rows(train_rows, args), act_rows(held_rows, args)
        tokenizer.truncation_side = "left"  # the answer is the end
    columns, kinds = set(train_rows.column_names), ({"text", "label"}, {"chosen", "rejected"}, {"prompt", "responses"})
    if not any(kind <= columns and kind <= set(held_rows.column_names) for kind in kinds):
        raise UserError(f"data set {args.dataset_name!r} needs the columns text and label, or dialog and act, or chosen and rejected, "
                        f"or prompt and responses; it has {', '.join(train_rows.column_names)}")
    part, _, parts = (int(x) if x.isdigit() else x for x in args.train_shard.partition("/"))
    if not (isinstance(part, int) and isinstance(parts, int) and part < parts):
        raise UserError(f"--train-shard {args.train_shard}: expected i/n with i less than n, such as 0/2")
    train_rows = train_rows.shuffle(seed=0).shard(parts, part) if parts > 1 else train_rows  # files are often sorted by label
    labels, names, settings = kinds[0] <= columns, ["score"], dict(num_labels=1)
    if labels:
        names, numbers = label_names_of(train_rows, args)
        settings = dict(id2label=dict(enumerate(names)), label2id={name: i for i, name in enumerate(names)})
    if args.from_config:
        model = draw_model(AutoModelForSequenceClassification, args.from_config, tokenizer, **settings)
    else:
        model = load_model(AutoModelForSequenceClassification, args.model_name_or_path, settings, ignore_mismatched_sizes=True)
    new = new_head(model, None if args.from_config else args.model_name_or_path)
    model.config.pad_token_id = tokenizer.pad_token_id  # for transformers' pipeline, which finds a decoder's last token by it
    if args.max_length > context_of(model):
        raise UserError(f"--max-length {args.max_length}: the model's context is {context_of(model)} tokens")
    if args.lora_r:
        model = add_lora(model, args)
        for name in ("score", "classifier", "pre_classifier"):  # the new head, by the names that transformers gives it: trained whole
            getattr(model.get_base_model(), name, nn.Identity()).requires_grad_(True)
    if args.gradient_checkpointing:
        model.activation_checkpointing_enable(dict(use_reentrant=False))
    bare = Classifier(model, args.share_prompts and not args.gradient_checkpointing).to(device)
    keep = torch.randperm(len(held_rows), generator=draws(args.seed, "held-out"))[: args.num_eval_rows].tolist()
    read = (lambda rows: examples(rows, numbers, tokenizer, args)) if labels else (lambda rows: preferences(rows, tokenizer, args))
    train_rows, held_rows = read(train_rows), read(held_rows.select(keep))
    references = [] if labels else center_texts(train_rows, tokenizer, args)
    B = args.per_device_train_batch_size * args.gradient_accumulation_steps * world
    updates = max(1, round(args.num_train_epochs * len(train_rows) / B))
    optimizer, scheduler = make_optimizer(args, trainable(learner := make_learner(bare, accelerator)).values(), updates)
    learner.share &= learner is bare  # a layer in shards can run once a pass
    dtype = pick_dtype(args, device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=dtype is torch.bfloat16)

    run = Run(args, accelerator, updates, {"loss": "loss", "accuracy": "accuracy"} | ({} if labels else {"margin": "margin"}))
    say = run.console.print
    say(f"recipe {args.recipe}: {args.from_config or args.model_name_or_path} on {args.dataset_name}, {device}, {dtype}; {run.folder}")
    say(f"{len(train_rows):,} rows, {f'{len(names)} classes: ' + ', '.join(names) if labels else 'preferences'}, "
        f"{'a new head' if new else 'the head as it was saved'}; batch: {args.per_device_train_batch_size} rows a pass x "
        f"{args.gradient_accumulation_steps} accumulated x {world} processes = {B}; {updates} optimizer steps")
    texts = max(len(group) for group, _ in train_rows)  # a row
    say(describe_memory(bare, learner, model.config, args, texts * args.max_length, 0, accelerator))
    model, optimizer = accelerator.prepare(learner, optimizer)
    parameters = trainable(learner)
    run.engine = model if accelerator.distributed_type == "DEEPSPEED" else None
    state = run.restore(parameters, optimizer, scheduler)
    take_weights(bare, learner)
    skipped = 0
    run.bar.start()
    for update in range(state["update"] + 1, updates + 1):
        # 1. The batch is drawn for all processes, and cut to prefixes; this one takes its rows, the similar lengths together.
        began = time.time()
        model.train()
        batch = [train_rows[i] for i in stream_rows(len(train_rows), (update - 1) * B, B, args.seed)]
        if labels and args.min_prefix_length:
            shares = torch.rand(B, generator=draws(args.seed, "prefix", update)).tolist()
            cuts = [args.min_prefix_length + round(share * (len(ids) - args.min_prefix_length)) for share, ([ids], _) in zip(shares, batch)]
            ends = [ids[-1:] if ids[-1:] == [tokenizer.sep_token_id] else [] for [ids], _ in batch]  # BERT's [SEP] stays
            batch = [([ids[: cut - len(end)] + end], label) for cut, end, ([ids], label) in zip(cuts, ends, batch)]
        batch = sorted(batch[rank * B // world : (rank + 1) * B // world], key=lambda row: max(map(len, row[0])))

        # 2. Gradients: each micro-batch adds its sum / the size of the whole batch. All responses to a prompt are in one pass.
        sums, seen, n = torch.zeros(3, device=device), [], args.per_device_train_batch_size
        for i in range(0, len(batch), n):
            with accelerator.no_sync(model) if i + n < len(batch) else nullcontext():
                ids, mask, exists, targets = collate_texts(batch[i : i + n], device)
                with autocast:
                    losses, right, scores = row_losses(model(ids, mask, exists.shape[1]), exists, targets, len(names))  # [n], [n], [n, K]
                accelerator.sync_gradients = i + n >= len(batch)  # DeepSpeed steps in the last pass's backward
                accelerator.backward(losses.sum() / B * world)  # DDP divides by the number of processes
            seen += [] if labels else [scores.detach()[exists]]
            worst = scores.gather(1, exists.sum(1, keepdim=True) - 1).squeeze(1)  # [n], the last response's
            sums += torch.stack([losses.detach().sum(), right.sum(), (scores[:, 0] - worst).detach().sum()])

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
        lr = optimizer.param_groups[0]["lr"]
        scheduler.step()

        # 4. Log and save.
        loss, accuracy, margin = (accelerator.reduce(sums) / B).tolist()
        metrics = {"update": update, "epoch": update * B / len(train_rows), "lr": lr, "loss": loss, "accuracy": accuracy}
        if not labels:
            scores = accelerate.utils.gather_object(torch.cat(seen).tolist())  # of all processes
            metrics |= {"margin": margin, "min_reward": min(scores), "mean_reward": sum(scores) / len(scores), "max_reward": max(scores)}
        seconds = time.time() - began
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 2**10)  # bytes on macOS, else KiB
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else host
        run.log(metrics | {"grad_norm": norm, "perf/seconds": seconds, "perf/peak_memory_mb": peak / 2**20})
        run.checkpoint(update, parameters, optimizer, scheduler, lambda: take_weights(bare, learner)(ids[:1], mask[:1]))  # noqa: B023

    # 5. Held-out rows: accuracy, and a table of what is confused or how well differences are calibrated.
    run.bar.stop()
    found = score_rows(bare, held_rows, autocast, accelerator)
    numbers, table = classes_table(found, names) if labels else calibration_table(found)

    # 6. Put the mean score of reference responses at 0, and save what PPO, RLOO and plain transformers load.
    if not labels:
        few = torch.randperm(len(references), generator=draws(args.seed, "center"))[:1000].tolist()
        found = score_rows(bare, [references[i] for i in few], autocast, accelerator)
        bare.model.config.reward_offset = numbers["reward_offset"] = sum(logits[0][0] for logits, _ in found) / len(found)
        say(f"{len(found)} reference responses score {numbers['reward_offset']:.3f}, which is subtracted from now on")
    if run.main:
        run.table(f"{numbers['n']} held-out rows, accuracy {numbers['accuracy']:.4f}", table)
        run.write("evaluation.json", json.dumps(numbers, indent=2))
        saved = bare.model.merge_and_unload() if args.lora_r else bare.model
        saved.to(getattr(torch, args.save_dtype)).save_pretrained(run.folder / "model")
        tokenizer.model_max_length = args.max_length
        tokenizer.save_pretrained(run.folder / "model")
        run.curves("loss", "accuracy", "lr")
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
