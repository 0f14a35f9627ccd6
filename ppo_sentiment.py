"""PPO that teaches a language model to write positive film reviews.

If you know PPO from CleanRL's ppo.py, this is what language changes:
1. A state is a text and an action is a token. The first words of a review are the prompt; the policy samples the rest from
   its own softmax, without top-k or top-p, because that distribution is the one which is scored later (`generate`).
2. The reward comes once, on the last token: the logit with which a classifier calls the whole text positive (`token_rewards`).
3. Every token also pays for leaving the reference model: -kl_coef * (logprob - ref_logprob). The coefficient follows the
   KL that it is meant to hold (`adaptive_kl_coef`; Ziegler et al. 2019, section 2.2).
4. Responses end early, so every tensor has a mask made from counts, never from `token != pad` (`length_mask`).
5. The value function is a linear head on the policy's own backbone, zero at the start, or a critic with its own weights.

    python ppo_sentiment.py                                # recipe tiny: no download, no GPU, 2 to 3 minutes on 2 cores
    python ppo_sentiment.py --learning-rate 1.41e-5        # every field of Args is a flag; --help lists them
    python ppo_sentiment.py gpt2-imdb                      # the published job, from the Hub
    python ppo_sentiment.py gpt2-imdb-lora --load-in-8bit  # LoRA on a base in 8 bit; the reference is the policy without its adapter
    torchrun --nproc_per_node 2 ppo_sentiment.py           # two processes, twice the batch (or: accelerate launch)
    python ppo_sentiment.py --resume latest                # go on after a kill, with the same bits

Trick -> where: EOS penalty, score clip, order of steps -> train, steps 2 to 4 | whitening -> masked_whiten | GAE -> gae | clipping ->
clipped_policy_loss, clipped_value_loss | logits never held whole -> token_logprobs | exact global sampling -> draws, sample_tokens |
loss independent of micro-batches and processes -> train, step 5 | resume bit for bit -> Run.checkpoint, Run.restore |
tokenizers that differ -> load_classifier

Papers: PPO (Schulman et al. 2017), GAE (Schulman et al. 2016), Fine-tuning language models from human preferences (Ziegler et al.
2019), The N+ implementation details of RLHF with PPO (Huang et al. 2024). Results, metrics, details: docs/ppo_sentiment.md.
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
import runpy
import shutil
import signal
import subprocess
import sys
import time
import traceback
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from numbers import Real
from pathlib import Path
from pydoc import locate
from typing import Literal

import accelerate
import datasets
import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeRemainingColumn
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

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
    save_every: int = 10
    """updates from one checkpoint to the next (0: only at the end, or when a signal stops the run)"""
    keep_checkpoints: int = 2
    """how many of the newest checkpoints stay on disk"""
    log_with: Literal["none", "wandb", "tensorboard"] = "none"
    """where the metrics go besides metrics.jsonl; WANDB_MODE=offline works"""
    num_sample_generations: int = 10
    """about how many times in a run a table of samples is shown (TRL)"""
    num_eval_prompts: int = 128
    """held-out prompts of the before / after table"""
    sanity: bool = False
    """two updates at learning rate 0 that check ratio 1, KL 0 and finite losses; nothing is trained"""
    # models
    model_name_or_path: str = "lvwerra/gpt2-imdb"
    """the policy before PPO, also the reference: a Hub name, or a folder (a LoRA adapter's too)"""
    reward_model_path: str = "lvwerra/distilbert-imdb"
    """sentiment classifier; its tokenizer need not be the policy's"""
    reward_label: str = "positive"
    """the label whose logit is the reward: its name in the classifier's config, in any case, or its number"""
    reward_fn: str | None = None
    """FILE.py:function in place of the reward model; runs your code: (prompts, responses), lists of str -> list of float"""
    judge_model_path: str | None = None
    """a second classifier that PPO never sees; its probability of reward_label joins the before / after table"""
    value_model_path: str | None = None
    """a critic of its own that starts here (same vocabulary); None: a value head on the policy's backbone"""
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"
    """bfloat16: products in bf16, weights and sums in fp32; auto: bfloat16 where the hardware multiplies it fast"""
    bf16: bool = False
    """the same as --dtype bfloat16 (TRL's spelling)"""
    load_in_8bit: bool = False
    """frozen weights in 8 bit (bitsandbytes): the base under LoRA, otherwise the reference"""
    num_shared_layers: int = 0
    """embeddings and the first layers that are frozen and shared with the reference, to save memory (0: none)"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass; generation is not affected"""
    lora_r: int = 0
    """rank of LoRA (0: train all weights); the reference is then the policy with the adapter off"""
    lora_alpha: int = 32
    """LoRA scale: the update is lora_alpha / lora_r * B A"""
    lora_target_modules: str = "c_attn"
    """names of the layers that get an adapter, with commas, or all-linear (c_attn: GPT-2's attention)"""
    # data
    dataset_name: str = "stanfordnlp/imdb"
    """a Hub name or a folder of jsonl, with the column text"""
    min_text_length: int = 200
    """characters; shorter reviews are left out (TRL's example: more than 200)"""
    query_min_length: int = 2
    """tokens of the shortest prompt"""
    query_max_length: int = 8
    """tokens of the longest prompt; each length is drawn, both ends included (TRL's LengthSampler leaves out the upper one)"""
    # rollout
    response_min_length: int = 4
    """tokens; the room for a response is drawn from here to response_length, both included"""
    response_length: int = 16
    """tokens of the longest response"""
    temperature: float = 1.0
    """of sampling, and of every log-probability in this file"""
    stop_token: Literal["eos"] | None = "eos"
    """eos: a response ends at the tokenizer's EOS; None (`--stop-token None`): only at its drawn length"""
    stop_token_id: int | None = None
    """a stop token by its id, instead of stop_token"""
    missing_eos_penalty: float | None = None
    """subtracted from the score of a response that did not stop by itself (TRL)"""
    score_clip: float | None = None
    """scores are clipped to +- this (TRL); None: not clipped"""
    # batch
    total_episodes: int = 24_832
    """prompts, one response each, in the whole run (194 batches of 128: one pass over IMDB); rounded up to whole batches"""
    per_device_train_batch_size: int = 16
    """responses in one forward and backward pass of the update"""
    gradient_accumulation_steps: int = 1
    """passes for one optimizer step"""
    num_mini_batches: int = 8
    """optimizer steps in one epoch over the batch"""
    num_ppo_epochs: int = 4
    """passes over each batch of rollouts (TRL's ppo_epochs)"""
    local_rollout_forward_batch_size: int = 128
    """responses generated and scored at once on one process"""
    # PPO
    kl_coef: float = 0.2
    """price of one nat of KL to the reference; the start value where kl_target is set (TRL's init_kl_coef)"""
    kl_target: float | None = 6.0
    """nats per response that the coefficient steers to (Ziegler et al. 2019); None (`--kl-target None`): fixed coefficient"""
    kl_horizon: float = 10_000
    """episodes over which the coefficient adapts"""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """of the KL in the reward (Schulman 2020); only k1 gives the gradient of KL(policy || reference) there"""
    gamma: float = 1.0
    """discount per token"""
    lam: float = 0.95
    """GAE's lambda"""
    cliprange: float = 0.2
    """epsilon of the clipped policy loss"""
    cliprange_value: float = 0.2
    """how far a value may move from its rollout's before its loss is clipped"""
    vf_coef: float = 0.1
    """weight of the value loss"""
    whiten_rewards: bool = False
    """divide rewards by their standard deviation (mean kept); advantages are always whitened"""
    early_stop_approxkl: float | None = None
    """leave an update's epochs when a minibatch's approxkl exceeds this (TRL stops at 1.5 x its target_kl)"""
    # optimizer
    learning_rate: float = 1.41e-5
    """TRL's sentiment example"""
    optimizer: str = "torch.optim.Adam"
    """dotted name: torch.optim.AdamW, torch.optim.SGD, bitsandbytes.optim.Adam8bit, bitsandbytes.optim.Lion, ..."""
    adam_eps: float = 1e-8
    """Adam's epsilon, for optimizers that have one (N+ uses 1e-5)"""
    lr_scheduler_type: Schedule = "constant"
    """as transformers' schedules, and exponential (down to 1 %); one step an update"""
    warmup_ratio: float = 0.0
    """share of the updates in which the learning rate rises from 0 (for the schedules that warm up)"""
    max_grad_norm: float | None = 1.0
    """gradients are scaled down to this norm; None: never"""

    @property
    def local_batch_size(self) -> int:
        """episodes of one process in one update (TRL 0.11's arithmetic)"""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.num_mini_batches

TINY = dict(
    model_name_or_path="checkpoints/reviews-lm", reward_model_path="checkpoints/reviews-sentiment", dataset_name="data/reviews",
    dtype="float32", total_episodes=17_920, per_device_train_batch_size=32, num_mini_batches=4, learning_rate=1.5e-4,
    lr_scheduler_type="linear", kl_coef=0.06, num_sample_generations=3,
)
RECIPES = {
    "tiny": Args(**TINY),  # the small world of this project
    "gpt2-imdb": Args(),  # TRL's sentiment example
    "gpt2-imdb-lora": Args(lora_r=16, lora_alpha=32, lora_target_modules="c_attn"),
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
# Pure tensor functions. Masks and lengths come from counts, sums are in fp32, and what is masked out may hold nan.
def response_lengths(tokens, stop_token_id):
    """Tokens of each response up to and including the first stop token; T where there is none. [B, T] -> [B]"""
    T = tokens.shape[1]
    position = torch.arange(1, T + 1, device=tokens.device)  # [T]
    return torch.where(tokens == stop_token_id, position, T).amin(1)  # [B]

def length_mask(lengths, max_length):
    """True on the first `lengths` positions of each row. [B] -> bool [B, T]"""
    return torch.arange(max_length, device=lengths.device) < lengths[:, None]  # [B, T]

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

def token_logprobs(hidden, weight, tokens, temperature=1.0, bias=None, keep=0):
    """Log-probabilities of tokens, and entropies in nats of the distributions they came from; never holds [B, T, V].

    [B, T, H], [V, H], [B, T] -> fp32 [B, T], fp32 [B, T]. Differentiable in hidden, weight and bias, through logprobs. At
    most `keep` exps of logits wait for the backward pass, which computes the others again.
    """
    hidden = (hidden / temperature).flatten(0, 1)  # [B * T, H], less than there are logits
    bias = None if bias is None else bias / temperature
    logprobs, _, entropies = BlockwiseLogprobs.apply(hidden, weight, bias, tokens.flatten(), keep)
    return logprobs.view(tokens.shape), entropies.view(tokens.shape)  # [B, T]

def kl_per_token(logprobs, ref_logprobs, estimator):
    """Estimates of KL(policy || reference) from samples of the policy, in nats, any shape (Schulman 2020, "Approximating KL").

    k1 is unbiased; k2 is biased and never negative; k3 is both unbiased and never negative. As a reward only k1's gradient is right.
    """
    log_ratio = logprobs - ref_logprobs
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio**2
    return torch.expm1(-log_ratio) + log_ratio  # k3

def token_rewards(scores, kl, lengths, kl_coef):
    """Per-token rewards: -kl_coef * kl on valid tokens, the score added on the last one. [B], [B, T], [B] -> [B, T]"""
    rewards = torch.where(length_mask(lengths, kl.shape[1]), -kl_coef * kl, 0.0)  # [B, T]
    return rewards.scatter_add(1, lengths[:, None] - 1, scores[:, None].to(rewards.dtype))

def masked_mean(values, mask):
    """Mean over the valid positions -> scalar."""
    return torch.where(mask, values, 0.0).float().sum() / mask.sum()

def masked_whiten(values, mask, shift_mean=True):
    """(x - mean) * rsqrt(var + 1e-8) over the valid tokens of all processes, 0 outside. [B, T] -> [B, T]

    Population variance, as OpenAI's tf.nn.moments (lm-human-preferences, utils/core.py; TRL's is the unbiased one).
    shift_mean=False keeps the mean (rewards). Fewer than 2 valid tokens have no variance and come back as they are.
    """
    x = torch.where(mask, values, 0.0).float()
    total = lambda t: (dist.all_reduce(t), t)[1] if dist.is_available() and dist.is_initialized() else t  # noqa: E731
    count = total(mask.sum().float())
    if count < 2:
        return x
    mean = total(x.sum()) / count
    var = total(torch.where(mask, x - mean, 0.0).square().sum()) / count  # two passes: no cancellation
    white = (x - mean) * torch.rsqrt(var + 1e-8)
    return torch.where(mask, white if shift_mean else white + mean, 0.0)

def gae(rewards, values, mask, gamma, lam):
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16). [B, T] each -> (advantages, returns), 0 outside the mask.

    The value after the last valid token is 0: the score was given for exactly this text, cut or not, so the end is terminal.
    A_t = sum over l of (gamma lam)^l delta_(t+l), as one product with the triangular matrix of the powers.
    """
    T = rewards.shape[1]
    rewards, values = (torch.where(mask, x, 0.0).float() for x in (rewards, values))
    deltas = torch.where(mask, rewards + gamma * F.pad(values[:, 1:], (0, 1)) - values, 0.0)  # [B, T]
    steps = torch.arange(T, device=rewards.device)
    distance = steps[None, :] - steps[:, None]  # [T, T], from t to t + l
    powers = torch.where(distance >= 0, (gamma * lam) ** distance.clamp(min=0).float(), 0.0)
    advantages = torch.where(mask, deltas @ powers.T, 0.0)
    return advantages, torch.where(mask, advantages + values, 0.0)

def clipped_policy_loss(logprobs, old_logprobs, advantages, cliprange):
    """PPO's pessimistic surrogate, negated (Schulman et al. 2017, eq. 7). Any shape -> same shape, unreduced."""
    ratio = torch.exp((logprobs - old_logprobs).clamp(max=80))  # e^89 is inf in fp32, and inf * 0 nan: in the loss or its gradient
    return torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - cliprange, 1 + cliprange))

def clipped_value_loss(values, old_values, returns, cliprange_value):
    """Squared error of values that may move cliprange_value from old_values, with the 0.5. Any shape -> same shape, unreduced."""
    clipped = old_values + (values - old_values).clamp(-cliprange_value, cliprange_value)
    return 0.5 * torch.max((values - returns) ** 2, (clipped - returns) ** 2)

def adaptive_kl_coef(kl_coef, kl, target, horizon, episodes):
    """The coefficient after a batch of `episodes` whose KL was `kl` nats a response (Ziegler et al. 2019, section 2.2) -> float."""
    error = min(max(kl / target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * episodes / horizon)

def sample_tokens(probs, uniforms):
    """Draw one token a row by inverting the cumulative sum of the probabilities. fp32 [B, V], [B] in [0, 1) -> [B]

    Two levels, blocks of 64 tokens and then the token in its block, so that fp32 sums do not swallow small probabilities.
    """
    probs = (F.pad(probs, (0, -probs.shape[1] % 64)) if probs.shape[1] % 64 else probs).unflatten(-1, (-1, 64))  # [B, V / 64, 64]
    blocks = probs.sum(-1).cumsum(-1)  # [B, V / 64]
    below = 1 - 2**-23  # just under the total, so that rounding never points behind the last possible token
    target = uniforms.float()[:, None] * blocks[:, -1:] * below  # [B, 1]
    block = torch.searchsorted(blocks, target, right=True)  # [B, 1]
    inside = probs[torch.arange(len(probs), device=probs.device), block[:, 0]].cumsum(-1)  # [B, 64]
    rest = target - torch.where(block > 0, blocks.gather(1, (block - 1).clamp(min=0)), 0.0)  # [B, 1]
    rest = torch.minimum(rest.clamp(min=0), inside[:, -1:] * below)
    return (block * 64 + torch.searchsorted(inside, rest, right=True)).squeeze(-1)

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

def body_and_head(model):
    """The transformer without its head, and its output embedding, of a causal language model with or without LoRA."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    return model.base_model, model.get_output_embeddings()

def hidden_states(body, input_ids, mask, cache):
    """Last hidden states of the tokens that are not in the cache yet. [B, L], bool [B, cached + L] -> [B, L, H]

    Positions count real tokens, so left padding moves nothing. Pads become token 0: an added [PAD] may have no row in the embedding.
    """
    L = input_ids.shape[1]
    inputs = dict(input_ids=torch.where(mask[:, -L:], input_ids, 0), attention_mask=mask.long())
    if "position_ids" in inspect.signature(body.forward).parameters:  # BLOOM has none: its ALiBi reads the mask
        inputs["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -L:]
    return body(**inputs, past_key_values=cache, use_cache=True).last_hidden_state

def attention(module, query, key, value, attention_mask, **options):
    """transformers' SDPA, [B, heads, L, size] each, but in fp32 on a CPU, where the backward pass in bf16 takes longer.

    8 rows of 128 tokens: 2 ms, and 6 in bf16; at 512 both are alike. With a limit, rows near it would round differently
    in the rollout and in the update. A single token behind a cache has no backward pass, and stays in bf16.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    if torch.is_autocast_enabled("cpu") and query.shape[2] > 1:
        with torch.autocast("cpu", enabled=False):
            return sdpa_attention_forward(module, query.float(), key.float(), value.float(), attention_mask, **options)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)

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

def can_pack(model, width):
    """Whether rows of this width may hold several documents: a mask keeps them apart, and positions begin anew.

    A recurrent state would leak, the mask knows no window, Falcon's ALiBi reads another, and BLOOM would go on counting.
    """
    if getattr(model, "_is_stateful", True) or "position_ids" not in inspect.signature(model.forward).parameters:
        return False
    config = model.config.get_text_config()
    windows = [getattr(config, name, None) or width for name in ("sliding_window", "attention_chunk_size")]
    return min(windows) >= width and not getattr(config, "alibi", False)

def packing_pays(body, mask, width):
    """Whether rows, padded to this width, cost less as one row without pads, where most pairs of tokens are masked. bool [B, C + T]

    A layer takes 24 H^2 operations for a token and 4 H for a pair; those of pairs, which are slower, count twice. Not for GPUs: not tried.
    """
    if mask.device.type != "cpu" or not can_pack(body, width):
        return False
    N, cells = int(mask.sum()), len(mask) * width
    return 6 * body.config.get_text_config().hidden_size * (cells - N) > 2 * (N**2 - cells * width / 2)

def response_states(body, input_ids, mask, T):
    """The hidden states that predict the last T tokens: the one at t - 1 predicts token t. [B, C + T], bool [B, C + T] -> [B, T, H]

    Either all rows are packed into one, or each is moved left, so that it begins with its prompt: a causal model never
    looks to its right, so pads there need no mask, and nothing is computed behind the longest row. After the end of a response there
    may stand anything.
    """
    width = int(mask.sum(1).max())
    if packing_pays(body, mask, width):
        row = torch.stack([input_ids[mask], (mask.cumsum(1) - 1)[mask]])  # [2, N], tokens and their positions
        row = F.pad(row, (0, -row.shape[1] % 16))  # few different lengths: a CPU keeps what it compiled for each of them (bf16)
        hidden = document_states(body, *row[:, None])  # [1, N + pads, H]
        before = (mask.flatten().cumsum(0) - 1).view(mask.shape)[:, -T - 1 : -1]  # [B, T], the place of the token before
    else:
        prompt = mask[:, :-T].sum(1, keepdim=True)  # [B, 1]
        places = torch.arange(width, device=mask.device) + mask.shape[1] - T - prompt  # [B, width], where these tokens stood
        rows = torch.where(mask, input_ids, 0).gather(1, places.clamp(max=mask.shape[1] - 1))  # pads: an added [PAD] may have no embedding
        hidden = body(input_ids=rows, use_cache=False).last_hidden_state  # [B, width, H]
        before = (torch.arange(T, device=mask.device) + prompt - 1).clamp(max=width - 1)  # [B, T]
        before = before + width * torch.arange(len(rows), device=mask.device)[:, None]
    return hidden.flatten(0, 1).index_select(0, before.flatten()).view(*before.shape, -1)

def response_logprobs(model, input_ids, mask, T, temperature, states=response_states):
    """Log-probabilities and entropies of the last T tokens, 0 where they are masked, and the hidden states that predicted them.

    [B, C + T], bool [B, C + T] -> fp32 [B, T], fp32 [B, T], [B, T, H]. Only valid tokens go through the head.
    """
    body, head = body_and_head(model)
    hidden, valid = states(body, input_ids, mask, T), mask[:, -T:]
    keep, tokens = KEPT_PROBS if torch.is_grad_enabled() else 0, input_ids[:, -T:]
    found = token_logprobs(hidden[valid][None], head.weight, tokens[valid][None], temperature, head.bias, keep)  # [1, valid tokens]
    return *(torch.zeros(valid.shape, device=mask.device).masked_scatter(valid, x) for x in found), hidden

class PolicyAndValue(nn.Module):
    """Policy, value function and reference in one module: one forward, and one thing to wrap (DDP, FSDP, DeepSpeed)."""

    def __init__(self, policy, reference=None, critic=None):
        super().__init__()
        self.policy, self.reference, self.critic = policy, reference, critic
        width = body_and_head(policy)[1].weight.shape[1] if critic is None else critic.config.hidden_size
        self.value_head = nn.Linear(width, 1)
        nn.init.zeros_(self.value_head.weight)  # the first advantages are the rewards to come, and nothing made up
        nn.init.zeros_(self.value_head.bias)

    def forward(self, input_ids, mask, T, temperature):
        """-> logprobs, entropies, values, each fp32 [B, T]. values[t] is said before token t is known."""
        logprobs, entropies, hidden = response_logprobs(self.policy, input_ids, mask, T, temperature)
        hidden = hidden if self.critic is None else response_states(self.critic, input_ids, mask, T)
        return logprobs, entropies, self.value_head(hidden).squeeze(-1).float()

    def reference_logprobs(self, input_ids, mask, T, temperature):
        """The same log-probabilities under the reference: a frozen model, or the policy without its adapter. -> fp32 [B, T]"""
        with self.policy.disable_adapter() if self.reference is None else nullcontext():
            return response_logprobs(self.reference or self.policy, input_ids, mask, T, temperature)[0]

def load_policy(args, name):
    """The policy, ready to be trained, and the frozen reference; None where that is the policy with its adapter off."""
    if args.num_shared_layers and (args.lora_r or args.load_in_8bit):
        raise UserError("--num-shared-layers goes neither with --lora-r, which shares all layers, nor with --load-in-8bit")
    eight_bit = dict(quantization_config=transformers.BitsAndBytesConfig(load_in_8bit=True)) if args.load_in_8bit else {}
    policy = load_model(AutoModelForCausalLM, name, **(eight_bit if args.lora_r else {}))
    check_head(policy, name)
    if args.lora_r:
        policy, reference = add_lora(policy, args), None  # one copy of the weights: the reference is the policy with its adapter off
    elif args.num_shared_layers:
        body, _ = body_and_head(policy)
        blocks = max((m for m in body.modules() if isinstance(m, nn.ModuleList)), key=len)
        if not 0 < args.num_shared_layers <= len(blocks):
            raise UserError(f"--num-shared-layers {args.num_shared_layers}: the model has {len(blocks)} layers")
        shared = [m for m in body.modules() if isinstance(m, nn.Embedding)] + list(blocks[: args.num_shared_layers])
        shared = [p.requires_grad_(False) for module in shared for p in module.parameters()]
        reference = copy.deepcopy(policy, memo={id(p): p for p in shared})  # deepcopy takes what its memo holds as it is
    else:
        reference = load_model(AutoModelForCausalLM, name, **eight_bit)
    if args.gradient_checkpointing:
        policy.activation_checkpointing_enable(dict(use_reentrant=False))  # transformers does it in train mode, not in generate
    return policy, reference and reference.requires_grad_(False)

@torch.no_grad()
def reads_left_to_right(body):
    """Whether the states of a text stay as they are where it goes on."""
    ids = torch.arange(6)[None]  # [1, 6]
    whole, part = (body(x).last_hidden_state[:, :5] for x in (ids, ids[:, :5]))
    return torch.allclose(whole, part, atol=1e-3, rtol=1e-3)

def build_policy(args):
    """Policy, reference and value function as the flags say. -> PolicyAndValue"""
    policy, reference = load_policy(args, args.model_name_or_path)
    critic = load_model(AutoModel, args.value_model_path) if args.value_model_path else None
    if critic is not None and critic.config.vocab_size < policy.config.vocab_size:
        raise UserError(f"--value-model-path {args.value_model_path}: its vocabulary is smaller than the policy's")
    if critic is not None and not reads_left_to_right(critic):
        raise UserError(f"--value-model-path {args.value_model_path}: it sees the tokens that come later; a critic must not")
    if critic is not None and args.gradient_checkpointing:
        critic.activation_checkpointing_enable(dict(use_reentrant=False))
    model = PolicyAndValue(policy, reference, critic)
    if (head := Path(located(args.value_model_path or args.model_name_or_path)) / "value_head.safetensors").exists():
        model.value_head.load_state_dict(load_file(head))
    return model

@torch.no_grad()
def check_head(model, name):
    """Refuse a model whose head is more than a matrix product (soft caps, logit scales): it would be trained wrongly."""
    body, head = body_and_head(model)
    ids = torch.arange(6, device=head.weight.device)[None]  # [1, 6]
    ours, _ = token_logprobs(body(ids).last_hidden_state[:, :-1], head.weight, ids[:, 1:], bias=head.bias)
    theirs = model(ids).logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    if not torch.allclose(ours, theirs, atol=1e-3, rtol=1e-3):
        raise UserError(f"{name}: its head is more than hidden @ weight (a soft cap, a scale); it would be trained wrongly here")

def load_classifier(name, batch_size, device):
    """A classifier as a function from texts (list of str) to logits [B, classes], and the model."""
    model, tokenizer = load_model(AutoModelForSequenceClassification, name).to(device).eval(), load_tokenizer(name)
    model.config.pad_token_id, tokenizer.padding_side = tokenizer.pad_token_id, "right"  # how a decoder finds its last token
    tokenizer.truncation_side = "left"  # the response is the end
    limit = min(tokenizer.model_max_length, context_of(model))

    @torch.no_grad()
    def classify(texts):  # decoded, and tokenised again: the tokenizers need not be the same
        logits = torch.zeros(len(texts), model.config.num_labels, device=device)
        for rows in torch.tensor([len(text) for text in texts]).argsort().split(batch_size):  # similar lengths: little padding
            batch = tokenizer([texts[i] for i in rows], truncation=True, max_length=limit, padding=True, return_tensors="pt")
            logits[rows] = model(**batch.to(device)).logits.float()
        return logits

    return classify, model

def opinion_of(label, name, batch_size, device):
    """What a classifier says of a label (its name or number): prompts, responses (lists of str) -> logits [B], probabilities [B]"""
    classify, model = load_classifier(name, batch_size, device)
    numbers = {str(key).lower(): i for i, text in model.config.id2label.items() for key in (i, text)}
    if label.lower() not in numbers:
        raise UserError(f"--reward-label {label}: the labels of {name} are {', '.join(model.config.id2label.values())}")

    def opinion(prompts, responses):
        logits = classify([prompt + response for prompt, response in zip(prompts, responses)])  # [B, classes]
        return logits[:, numbers[label.lower()]], logits.softmax(-1)[:, numbers[label.lower()]]

    return opinion

FUNCTION_SECONDS = 600  # a call of a reward or judge function of yours that takes longer ends the run

def load_function(flag, name):
    """The function that FILE.py:function names; the file may stand beside this one. It is code of the user's, and it runs here.

    What it raises ends in one line that says where, and so does a call that takes longer than FUNCTION_SECONDS.
    """
    path, _, function = name.partition(":")
    path = next((str(place) for place in (Path(path), HERE / path) if place.is_file()), None)

    def late(*_):
        raise SystemExit(f"no answer within {FUNCTION_SECONDS} seconds")  # no `except Exception` on the way stops it

    def guarded(call, *lists):
        before = signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, FUNCTION_SECONDS)
        try:
            return call(*lists)
        except (Exception, SystemExit) as error:
            lines = [f", line {frame.lineno}" for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
            raise UserError(f"{flag} {name}: {type(error).__name__}: {error} ({path}{''.join(lines[-1:])})") from error
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    if path is None or not callable(found := guarded(runpy.run_path, path).get(function)):
        raise UserError(f"{flag} {name}: expected FILE.py:function, and found no such file or function")
    return partial(guarded, found)

def check_scores(scores, prompts, responses):
    """Refuse what a reward function should not return, and name the response. -> fp32 [B]"""
    if not isinstance(scores, list) or len(scores) != len(prompts) or not all(isinstance(x, Real) for x in scores):
        raise UserError(f"the reward or judge function must return a list of {len(prompts)} floats; it returned {str(scores)[:100]}")
    for score, prompt, response in zip(scores, prompts, responses):
        if not abs(score) < 3e38:  # nan too, and what is infinite in fp32
            raise UserError(f"the reward is {score} for the prompt {prompt!r} with the response {response!r}")
    return torch.tensor([float(score) for score in scores], dtype=torch.float32)

def load_reward(args, device):
    """The reward as a function of prompts and responses (lists of str) -> fp32 [B]: a classifier's logit, or the user's own code."""
    if args.reward_fn:
        reward = load_function("--reward-fn", args.reward_fn)
    else:
        opinion = opinion_of(args.reward_label, args.reward_model_path, args.local_rollout_forward_batch_size, device)
        reward = lambda prompts, responses: opinion(prompts, responses)[0].tolist()  # noqa: E731
    return lambda prompts, responses: check_scores(reward(prompts, responses), prompts, responses).to(device)

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

def load_queries(rows, tokenizer, args):
    """The first query_max_length tokens of each review that is long enough. -> list of lists of token ids"""
    if "text" not in rows.column_names:
        raise UserError(f"data set {args.dataset_name!r} needs a column text; it has {', '.join(rows.column_names)}")
    texts = [text for text in rows["text"] if isinstance(text, str) and len(text) > args.min_text_length]
    queries = tokenizer(texts, truncation=True, max_length=args.query_max_length, add_special_tokens=False).input_ids if texts else []
    queries = [query for query in queries if len(query) >= args.query_min_length]
    left_out(len(rows), len(queries), f"rows: no text of more than --min-text-length {args.min_text_length} characters "
             f"and at least --query-min-length {args.query_min_length} tokens")
    if not queries:
        raise UserError(f"data set {args.dataset_name!r}: no text is longer than --min-text-length {args.min_text_length} characters "
                        f"and has at least --query-min-length {args.query_min_length} tokens")
    return queries

def draw_batch(queries, rows, args, *place):
    """Prompts cut to drawn lengths and left-padded, the room of each response, the uniforms that will sample it.

    Drawn for the batch of all processes, of which each takes its rows. -> ids [B, C], bool [B, C], room [B], uniforms [B, T]
    """
    B, C = len(rows), args.query_max_length
    cuts = torch.randint(args.query_min_length, C + 1, (B,), generator=draws(args.seed, "query", *place))
    room = torch.randint(args.response_min_length, args.response_length + 1, (B,), generator=draws(args.seed, "room", *place))
    uniforms = torch.rand(B, args.response_length, generator=draws(args.seed, "tokens", *place))
    batch = [torch.tensor(queries[row][:cut]) for row, cut in zip(rows.tolist(), cuts.tolist())]
    ids = torch.stack([F.pad(query, (C - len(query), 0)) for query in batch])  # [B, C]
    return ids, length_mask(torch.tensor([len(query) for query in batch]), C).flip(1), room, uniforms

# ---- 7. Rollout ------------------------------------------------------------------------------------------------------
@torch.no_grad()
def generate(model, ids, mask, room, uniforms, stop_token_id, temperature):
    """Sample until the stop token or the end of the room. Pure sampling: no top-k, no top-p, no minimum length.

    Left-padded ids, mask [B, C]; room [B]; uniforms [B, T] -> tokens [B, T], lengths [B]. A row that is done leaves the batch.
    """
    body, head = body_and_head(model)
    cache = transformers.DynamicCache(config=body.config)
    hidden = hidden_states(body, ids, mask, cache)[:, -1]  # [B, H]
    rows = torch.arange(len(uniforms), device=ids.device)  # the rows still being written
    tokens = torch.zeros(uniforms.shape, dtype=torch.long, device=ids.device)
    for t in range(uniforms.shape[1]):
        logits = F.linear(hidden, head.weight, head.bias).div_(temperature)  # [rows, V]
        token = sample_tokens(logits.float().softmax(-1), uniforms[rows, t])  # [rows]
        tokens[rows, t] = token
        going = ((token != stop_token_id) & (t + 1 < room[rows])).nonzero().squeeze(-1)
        if len(going) == 0:
            break
        if len(going) < len(rows):
            cache.batch_select_indices(going)
            rows, mask, token = rows[going], mask[going], token[going]
        mask = F.pad(mask, (0, 1), value=True)
        hidden = hidden_states(body, token[:, None], mask, cache)[:, -1]  # [rows, H]
    return tokens, torch.minimum(response_lengths(tokens, stop_token_id), room)

@torch.no_grad()
def rollout(model, tokenizer, reward, batch, stop_token_id, args):
    """Responses to a batch of prompts, their raw scores, and the log-probabilities that PPO will call old.

    These come from the update's own forward, so that the first ratio is 1: exactly where micro-batches are as long as the update's,
    otherwise up to rounding.
    -> dict of tensors [B, ...], prompts, responses (lists of str)
    """
    parts = zip(*(x.split(args.local_rollout_forward_batch_size) for x in batch))
    tokens, lengths = (torch.cat(x) for x in zip(*(generate(model.policy, *p, stop_token_id, args.temperature) for p in parts)))
    valid = length_mask(lengths, tokens.shape[1])  # [B, T]
    asked = [q[m].tolist() for q, m in zip(*batch[:2])]
    shown, prompts = (tokenizer.batch_decode(asked, skip_special_tokens=skip) for skip in (True, False))  # the reward reads all
    texts = tokenizer.batch_decode([a + t[v].tolist() for a, t, v in zip(asked, tokens, valid)], skip_special_tokens=True)
    responses = [text[len(prompt):] for prompt, text in zip(shown, texts)]  # alone, some tokenizers would drop its first space
    stopped = tokens.gather(1, lengths[:, None] - 1).squeeze(1) == stop_token_id  # [B]
    ids, mask = torch.cat([batch[0], tokens], 1), torch.cat([batch[1], valid], 1)  # [B, C + T]
    order = mask.sum(1).argsort()  # similar lengths together, as in the update
    parts = [(ids[rows], mask[rows], tokens.shape[1], args.temperature) for rows in order.split(args.per_device_train_batch_size)]
    parts = [(*model(*part), model.reference_logprobs(*part)) for part in parts]
    logprobs, _, values, ref_logprobs = (torch.cat(x)[order.argsort()] for x in zip(*parts))  # [B, T]
    b = dict(ids=ids, mask=mask, lengths=lengths, stopped=stopped, scores=reward(prompts, responses))
    return b | dict(logprobs=logprobs, values=values, ref_logprobs=ref_logprobs), prompts, responses

# ---- 8. Evaluation ---------------------------------------------------------------------------------------------------
def evaluate(model, tokenizer, reward, judge, batch, stop_token_id, args):
    """Sample the held-out prompts, with the same draws before and after. -> numbers of the table, prompts, responses, scores"""
    model.eval()
    b, prompts, responses = rollout(model, tokenizer, reward, batch, stop_token_id, args)
    valid = length_mask(b["lengths"], args.response_length)  # [B, T]
    kl = torch.where(valid, kl_per_token(b["logprobs"], b["ref_logprobs"], "k1"), 0.0).sum(1)  # [B]
    numbers = {"score mean": b["scores"].mean(), "score median": b["scores"].quantile(0.5), "KL, nats a response": kl.mean(),
               "perplexity under the reference": torch.exp(-masked_mean(b["ref_logprobs"], valid)),
               "distinct responses": len(set(responses)) / len(responses), "tokens a response": b["lengths"].float().mean()}
    if judge:
        numbers[f"judge: P({args.reward_label})"] = judge(prompts, responses)[1].mean()
    return {name: float(value) for name, value in numbers.items()}, prompts, responses, b["scores"].tolist()

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

def save_policy(policy, tokenizer, folder):
    """What plain transformers and the next script load. LoRA is merged, but not into 8 bit: there the folder is the adapter."""
    if hasattr(policy, "merge_and_unload") and not getattr(policy.get_base_model(), "is_loaded_in_8bit", False):
        policy.save_pretrained(folder.parent / "adapter")
        policy = policy.merge_and_unload()
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

def save_value(model, folder):
    """The value head, and the critic where there is one, beside the policy or below it."""
    if model.critic is not None:
        model.critic.save_pretrained(folder := folder / "critic")
    save_file({name: x.detach().cpu() for name, x in model.value_head.state_dict().items()}, folder / "value_head.safetensors")

def health(m, args):
    """What looks wrong in the metrics of an update, each with its likely cause."""
    signs = {
        "KL below 0 by more than noise: are the samples drawn from another distribution than is scored?": m["objective/kl"] < -1,
        "ratio far from 1: the steps are too big; lower --learning-rate or --num-ppo-epochs": not 0.5 < m["val/ratio"] < 2,
        "the entropy is gone, the policy always says the same; raise --kl-coef": m["policy/entropy_avg"] < 0.1,
        "all rewards are equal: there is nothing to learn from": m["env/reward_std"] == 0,
        "most prompts have equal rewards for all their responses: raise --temperature or --rloo-k":
            m.get("frac_reward_zero_std", 0.0) > 0.5,
        "no response ended by itself: is --response-length long enough, was EOS learned?":
            args.missing_eos_penalty is not None and m["val/num_eos_tokens"] == 0,
    }  # fmt: skip
    return [line for line, wrong in signs.items() if wrong]

# ---- 10. Train -------------------------------------------------------------------------------------------------------
def train(args):
    """The whole run, from the flags to the last table. -> (PolicyAndValue, run folder)"""
    check_positive(args, "per_device_train_batch_size", "gradient_accumulation_steps", "num_mini_batches", "num_ppo_epochs",
                   "total_episodes", "local_rollout_forward_batch_size", "num_eval_prompts", "temperature", "query_min_length",
                   "response_min_length", "kl_horizon", *(["kl_target"] if args.kl_target is not None else []))
    if args.query_min_length > args.query_max_length or args.response_min_length > args.response_length:
        raise UserError("the shortest query and response must not be longer than the longest")
    accelerator = start(args)
    if args.load_in_8bit and args.lora_r and accelerator.distributed_type == "FSDP":
        raise UserError("--load-in-8bit: FSDP2 cannot cut 8-bit weights into shards; use ZeRO or plain data parallelism")
    if args.early_stop_approxkl is not None and accelerator.distributed_type == "DEEPSPEED":
        raise UserError("--early-stop-approxkl: DeepSpeed has made the step before it could be stopped; use FSDP2")
    device, rank, world = accelerator.device, accelerator.process_index, accelerator.num_processes
    B, T, epochs, n = args.local_batch_size * world, args.response_length, args.num_ppo_epochs, args.per_device_train_batch_size
    updates = 2 if args.sanity else math.ceil(args.total_episodes / B)
    if args.kl_target is not None and B >= 5 * args.kl_horizon:
        raise UserError(f"--kl-horizon {args.kl_horizon:g} must be more than a fifth of the batch, {B}: one step could make the price 0")
    args = replace(args, learning_rate=0.0) if args.sanity else args
    bare, tokenizer = build_policy(args).to(device), load_tokenizer(args.model_name_or_path)
    for part in (bare.policy, bare.critic or bare.policy):
        if context_of(part) < args.query_max_length + T:
            raise UserError(f"--query-max-length {args.query_max_length} + --response-length {T} is longer than the model's context")
    reward = load_reward(args, device)
    judge = args.judge_model_path and opinion_of(args.reward_label, args.judge_model_path, 64, device)
    train_queries, held_queries = (load_queries(rows, tokenizer, args) for rows in load_splits(args.dataset_name))
    optimizer, scheduler = make_optimizer(args, trainable(learner := make_learner(bare, accelerator)).values(), updates)
    stop_token_id = args.stop_token_id if args.stop_token_id is not None else tokenizer.eos_token_id if args.stop_token else -1
    if stop_token_id is None:
        raise UserError("the tokenizer has no EOS: name a --stop-token-id, or use --stop-token None")
    dtype = pick_dtype(args, device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=dtype is torch.bfloat16)
    transformers.AttentionInterface.register("sdpa", attention)  # in place of transformers' own

    run = Run(args, accelerator, updates, {"score": "objective/scores", "KL": "objective/kl", "entropy": "policy/entropy_avg"})
    say = run.console.print
    say(f"recipe {args.recipe}: {args.model_name_or_path} on {args.dataset_name}, {device}, {dtype}; run folder {run.folder}")
    say(f"batch: {n} episodes a pass x {args.gradient_accumulation_steps} accumulated x {args.num_mini_batches} minibatches x {world} "
        f"processes = {B}; {updates} updates x {epochs} epochs x {args.num_mini_batches} minibatches = "
        f"{updates * epochs * args.num_mini_batches} optimizer steps")
    sampled = args.local_rollout_forward_batch_size
    say(describe_memory(bare, learner, bare.policy.config, args, args.query_max_length + T, sampled, accelerator))
    if args.lora_r:
        trained, total = (sum(p.numel() for p in bare.parameters() if p.requires_grad >= least) for least in (True, False))
        say(f"LoRA trains {trained:,} of {total:,} parameters = {trained / total:.3%}")
    model, optimizer = accelerator.prepare(learner, optimizer)
    parameters = trainable(learner)

    rows = stream_rows(len(held_queries), 0, min(args.num_eval_prompts, len(held_queries)), args.seed)
    held_batch = [x.to(device) for x in draw_batch(held_queries, rows, args, "held-out")]
    with autocast:
        before = evaluate(bare, tokenizer, reward, judge, held_batch, stop_token_id, args)
    run.engine = model if accelerator.distributed_type == "DEEPSPEED" else None
    state = {"kl_coef": args.kl_coef} | run.restore(parameters, optimizer, scheduler)
    take_weights(bare, learner)
    kl_coef, skipped = state["kl_coef"], 0
    run.bar.start()
    for update in range(state["update"] + 1, updates + 1):
        # 1. Rollout. Everything random is drawn for the whole batch; this process takes its rows, then all get the whole.
        began = time.time()
        bare.eval()
        batch = draw_batch(train_queries, stream_rows(len(train_queries), (update - 1) * B, B, args.seed), args, update)
        with autocast:
            batch = [x[rank * B // world : (rank + 1) * B // world].to(device) for x in batch]
            b, prompts, responses = rollout(bare, tokenizer, reward, batch, stop_token_id, args)
        b = {name: accelerator.gather(x) for name, x in b.items()}
        b_mask = length_mask(b["lengths"], T)  # [B, T]
        rollout_seconds = time.time() - began

        # 2. Scores: clip, then punish. A penalty before a normalisation of the scores would shift everyone else's.
        # Running score normalisation (TRL's use_score_scaling) is a line here: docs/ppo_sentiment.md.
        scores = b["scores"] if args.score_clip is None else b["scores"].clamp(-args.score_clip, args.score_clip)  # [B]
        scores = torch.where(b["stopped"], scores, scores - (args.missing_eos_penalty or 0.0))  # TRL's EOS trick

        # 3. Rewards: the price of the KL on every token, the score on the last one.
        kl = torch.where(b_mask, kl_per_token(b["logprobs"], b["ref_logprobs"], args.kl_estimator), 0.0)  # [B, T]
        rewards = token_rewards(scores, kl, b["lengths"], kl_coef)  # [B, T]
        rewards = masked_whiten(rewards, b_mask, shift_mean=False) if args.whiten_rewards else rewards

        # 4. Advantages, always whitened, as OpenAI and TRL do.
        advantages, returns = gae(rewards, b["values"], b_mask, args.gamma, args.lam)  # [B, T]
        advantages = masked_whiten(advantages, b_mask)

        # 5. Update: minibatches of the whole batch; a process takes its rows of each, in micro-batches. The loss is a sum over
        # tokens / the minibatch's token count, so the gradient does not depend on micro-batches, accumulation or processes.
        model.train()
        sums = torch.zeros(9, device=device)  # what is logged, over all tokens of all minibatches
        order = [torch.randperm(B, generator=draws(args.seed, "order", update, epoch)) for epoch in range(epochs)]
        for mb in torch.stack(order).to(device).view(epochs * args.num_mini_batches, -1):  # [B / num_mini_batches] rows
            mb_tokens, mb_sums = b_mask[mb].sum(), torch.zeros_like(sums)
            mine = mb[rank * len(mb) // world : (rank + 1) * len(mb) // world]
            micros = mine[b["mask"][mine].sum(1).argsort()].split(n)  # similar lengths together, so that each is cut to its longest
            for i, rows in enumerate(micros):
                m, old, old_values = b_mask[rows], b["logprobs"][rows], b["values"][rows]  # [n, T]
                with accelerator.no_sync(model) if i + 1 < len(micros) else nullcontext():
                    with autocast:
                        new, entropies, values = model(b["ids"][rows], b["mask"][rows], T, args.temperature)  # [n, T]
                    # where before arithmetic: behind a response's end there may stand anything, and nan * 0 is nan
                    new, old, entropies, values, old_values = (torch.where(m, x, 0.0) for x in (new, old, entropies, values, old_values))
                    policy_loss = clipped_policy_loss(new, old, advantages[rows], args.cliprange)
                    value_loss = clipped_value_loss(values, old_values, returns[rows], args.cliprange_value)
                    loss = (policy_loss + args.vf_coef * value_loss).sum() / mb_tokens
                    accelerator.sync_gradients = i + 1 == len(micros)  # DeepSpeed steps in the last pass's backward
                    accelerator.backward(loss * world)  # DDP divides by the number of processes
                ratio = torch.exp(new.detach() - old)  # 1 outside the mask; clipped: where the clipped loss is the larger one
                far = (values - old_values).abs() > args.cliprange_value  # nearer ones differ by rounding
                seen = (policy_loss, value_loss, policy_loss > -advantages[rows] * ratio,
                        far & (value_loss > 0.5 * (values - returns[rows]) ** 2), 0.5 * (new - old) ** 2, entropies, ratio - 1,
                        (ratio - 1) ** 2, m)
                mb_sums += torch.stack([x.detach().float().sum() for x in seen])
            mb_sums = accelerator.reduce(mb_sums)
            sums += mb_sums
            norm = clip_gradients(accelerator, parameters, args.max_grad_norm)
            if args.early_stop_approxkl is not None and mb_sums[4] / mb_tokens > args.early_stop_approxkl:
                optimizer.zero_grad()
                break
            # A guard against an exploding ratio (TRL's ratio_threshold) is a line here: docs/ppo_sentiment.md.
            skipped = 0 if math.isfinite(norm) else skipped + 1
            if skipped:
                say(f"update {update}: a gradient that is not finite, step skipped, {skipped} in a row", style="yellow")
                if skipped == 5:
                    raise UserError("5 gradients in a row were not finite: lower --learning-rate, or --dtype float32")
            else:
                optimizer.step()
            optimizer.zero_grad()
        take_weights(bare, learner)
        with torch.no_grad(), autocast:
            check_finite(torch.stack(bare(b["ids"][:1], b["mask"][:1], T, args.temperature))[:, b_mask[:1]], update)

        # 6. Log, and let the coefficient follow the KL.
        pg_loss, vf_loss, clipfrac, vf_clipfrac, approxkl, entropy, off, off2, _ = (sums / sums[-1]).tolist()
        lengths, kl_sum, seconds = b["lengths"].float(), kl.sum(1).mean(), time.time() - began
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 2**10)  # bytes on macOS, else KiB
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else host
        metrics = {
            "update": update, "episode": update * B, "lr": optimizer.param_groups[0]["lr"], "eps": B / seconds, "objective/kl": kl_sum,
            "objective/kl_coef": kl_coef, "objective/entropy": -torch.where(b_mask, b["logprobs"], 0.0).sum(1).mean(),
            "objective/non_score_reward": -kl_coef * kl_sum, "objective/rlhf_reward": scores.mean() - kl_coef * kl_sum,
            "objective/scores": scores.mean(), "policy/approxkl_avg": approxkl, "policy/clipfrac_avg": clipfrac,
            "policy/entropy_avg": entropy, "loss/policy_avg": pg_loss, "loss/value_avg": vf_loss,
            "val/clipfrac_avg": vf_clipfrac, "val/ratio": 1 + off, "val/ratio_var": max(off2 - off**2, 0.0),
            "val/num_eos_tokens": b["stopped"].sum(), "env/reward_mean": b["scores"].mean(),
            "env/reward_std": b["scores"].std(correction=0), "completions/mean_length": lengths.mean(),
            "completions/min_length": lengths.min(), "completions/max_length": lengths.max(),
            "completions/clipped_ratio": 1 - b["stopped"].float().mean(), "perf/seconds": seconds,
            "perf/rollout_seconds": rollout_seconds, "perf/train_seconds": seconds - rollout_seconds,
            "perf/tokens_per_second": lengths.sum() / seconds, "perf/peak_memory_mb": peak / 2**20,
        }
        metrics = {name: x.item() if isinstance(x, torch.Tensor) else x for name, x in metrics.items()}
        run.log(metrics, health(metrics, args))
        if args.kl_target is not None:
            kl_coef = adaptive_kl_coef(kl_coef, metrics["objective/kl"], args.kl_target, args.kl_horizon, B)
        limit = 1e-5 if dtype is torch.float32 else 1e-2
        kl_limit = 1.0 if args.load_in_8bit else limit  # rounded weights are another model
        if args.sanity and not (abs(off) < limit and abs(metrics["objective/kl"]) < kl_limit and all(map(math.isfinite, metrics.values()))):
            raise UserError(f"--sanity: at learning rate 0 the ratio should be 1, the KL 0 and all finite: {metrics}")
        if args.num_sample_generations and update % max(1, updates // args.num_sample_generations) == 0:
            rows = [dict(prompt=p, response=r, score=x) for p, r, x in zip(prompts[:4], responses, b["scores"].tolist())]
            run.table(f"samples of update {update}", rows, "samples.jsonl", update=update)
        scheduler.step()
        run.checkpoint(update, parameters, optimizer, scheduler, kl_coef=kl_coef)

    # 7. The same held-out prompts again, the table, and the model that the next script loads.
    run.bar.stop()
    if args.sanity:
        say("sanity: at learning rate 0 the ratio is 1, the KL 0, and every metric finite")
        return bare, run.folder
    with autocast:
        after = evaluate(bare, tokenizer, reward, judge, held_batch, stop_token_id, args)
    if run.main:
        rows = zip(before[1], before[2], before[3], after[2], after[3])
        run.table("held-out prompts", [dict(zip(("prompt", "before", "score", "after", "score "), row)) for row in rows][:6])
        run.table(f"{len(before[1])} held-out prompts", [dict(metric=k, before=before[0][k], after=after[0][k]) for k in before[0]])
        about = dict(n=len(before[1]), judge=args.judge_model_path or args.reward_fn or args.reward_model_path,
                     decoding=f"sampling, temperature {args.temperature}, {args.response_min_length} to {T} tokens")
        run.write("evaluation.json", json.dumps(dict(before=before[0], after=after[0], **about), indent=2))
        save_policy(bare.policy, tokenizer, run.folder / "model")
        save_value(bare, run.folder / "model")
        run.curves("objective/scores", "objective/kl", "policy/entropy_avg", "loss/value_avg")
        say(f"saved {run.folder / 'model'}")
    accelerator.wait_for_everyone()  # a process that ends too soon may abort, and torchrun would then stop the one that saves
    accelerator.end_training()
    return bare, run.folder

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
