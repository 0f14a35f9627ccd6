"""RLOO: REINFORCE with a leave-one-out baseline, which teaches a language model to summarise posts.

If you know PPO from ppo_sentiment.py, this is what changes:
1. A whole response is one action. Its log-probability is the sum over its tokens, and so the ratio that is clipped is the
   whole response's (`clipped_policy_loss` gets [B], not [B, T]).
2. No value function. Each prompt is answered rloo_k times, and the mean reward of the other answers is the baseline
   (`rloo_advantages`; Kool et al. 2019, Ahmadian et al. 2024).
3. The KL to the reference is subtracted from the reward of the response, or, with --kl-in-loss, is a term of the loss (GRPO).
4. The reward comes from a model of preferences (reward_model.py), whose reference summaries score 0. A response that did not
   stop by itself is punished (--missing-eos-penalty), which is what teaches the policy to come to an end.
5. What counts in the end is not that reward: a judge compares summaries with the references of held-out posts (`win_rate`).

    python rloo_tldr.py                             # recipe tiny: no download, no GPU, 2 minutes on 2 cores
    python rloo_tldr.py --learning_rate 3e-6        # TRL 0.11: the commands of its RLOO page run here with their flags unchanged
    python rloo_tldr.py tldr-pythia-1b              # the published job, from the Hub
    accelerate launch rloo_tldr.py                  # several GPUs; on the CPU: torchrun --nproc_per_node 2 rloo_tldr.py
    python rloo_tldr.py judge --model_name_or_path M --judge_model J --judge_url URL --num_examples 1000    # the win rate alone

Trick -> where: leave-one-out and the layout of groups -> rloo_advantages, train, steps 1 and 4 | EOS penalty, clip, KL, order of
steps -> train, steps 2 and 3 | one prefill a prompt -> generate_groups | exact global sampling -> draws, sample_tokens | score read
at EOS, with another tokenizer too -> preference_ids, load_scorer | judge, order at random, ties, retries -> load_judge

Papers: Back to Basics (Ahmadian et al. 2024), Buy 4 REINFORCE samples, get a baseline for free (Kool et al. 2019), Learning to
summarize from human feedback (Stiennon et al. 2020), The N+ implementation details of RLHF with PPO (Huang et al. 2024).
Results, metrics, details: docs/rloo_tldr.md.
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
import re
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
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
import torch.nn.functional as F
import transformers
import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeRemainingColumn
from rich.table import Table
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

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
    sanity: bool = False
    """two updates at learning rate 0 that check ratio 1, KL 0 and finite losses; nothing is trained"""
    # models
    model_name_or_path: str = "EleutherAI/pythia-1b-deduped"
    """the tokenizer's model, and the policy's where sft_model_path is not given: a Hub name, or a folder"""
    sft_model_path: str | None = None
    """the policy before RLOO, also the reference (a LoRA adapter's folder too); None: model_name_or_path"""
    reward_model_path: str = "cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr"
    """a model of preferences with one score (reward_model.py); its tokenizer need not be the policy's"""
    reward_fn: str | None = None
    """FILE.py:function in place of the reward model; runs your code: (prompts, responses), lists of str -> list of float"""
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
    lora_target_modules: str = "all-linear"
    """names of the layers that get an adapter, with commas, or all-linear (c_attn: GPT-2's attention)"""
    # data
    dataset_name: str = "trl-lib/tldr"
    """a Hub name or a folder of jsonl, with the column prompt, and completion for the references that the judge compares with"""
    max_prompt_length: int = 512
    """tokens; rows with a longer prompt are left out (N+, detail 2)"""
    # rollout
    rloo_k: int = 2
    """responses to each prompt, 2 or more"""
    response_length: int = 53
    """tokens of the longest response"""
    temperature: float = 0.7
    """of sampling, and of every log-probability in this file"""
    stop_token: Literal["eos"] | None = "eos"
    """eos: a response ends at the tokenizer's EOS; None (`--stop-token None`, TRL's default): never, each has response_length tokens"""
    stop_token_id: int | None = None
    """a stop token by its id, instead of stop_token"""
    missing_eos_penalty: float | None = None
    """subtracted from the score of a response that did not stop by itself (TRL)"""
    score_clip: float | None = None
    """scores are clipped to +- this (TRL); None: not clipped"""
    # batch
    total_episodes: int = 1_000_000
    """responses in the whole run, rloo_k a prompt; rounded up to whole batches"""
    per_device_train_batch_size: int = 8
    """responses in one forward and backward pass of the update"""
    gradient_accumulation_steps: int = 1
    """passes for one optimizer step"""
    num_mini_batches: int = 1
    """optimizer steps in one epoch over the batch"""
    num_ppo_epochs: int = 4
    """passes over each batch of rollouts (TRL's ppo_epochs)"""
    local_rollout_forward_batch_size: int = 64
    """responses generated and scored at once on one process"""
    old_logprobs: Literal["forward", "sampler"] = "forward"
    """sampler: those that the tokens were drawn with, a forward pass less; refused where the first ratio is not 1 (bf16)"""
    share_prompts: bool = False
    """the responses to a prompt are in one minibatch and pass, which reads the prompt once; other minibatches than TRL's"""
    # RLOO
    kl_coef: float = 0.05
    """price of one nat of KL to the reference"""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """of the KL, token by token (Schulman 2020): in the reward use k1, in the loss k2 or k3"""
    kl_in_loss: bool = False
    """the KL is a term of the loss, token by token (k3: as GRPO), and not of the reward; k1 has no gradient there and is refused"""
    cliprange: float = 0.2
    """epsilon of the clipped policy loss"""
    whiten_rewards: bool = False
    """divide the rewards of a batch by their standard deviation; their mean makes no difference, leave-one-out subtracts it"""
    # judge
    num_examples: int = 256
    """held-out posts whose summaries are compared with the references, before and after (TRL's judge_tldr.py)"""
    judge_fn: str | None = None
    """FILE.py:function that scores (prompts, responses), lists of str; the summary with the higher score wins"""
    judge_model: str | None = None
    """a second model of preferences (a folder), or the name of a chat model; None and no judge_fn: the reward is the judge"""
    judge_url: str | None = None
    """an OpenAI-compatible server that has the chat model (its key: OPENAI_API_KEY); None: Hugging Face's inference service"""
    # optimizer
    learning_rate: float = 3e-6
    """TRL's RLOO page"""
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

    @property
    def local_batch_size(self) -> int:
        """episodes of one process in one update (TRL 0.11's arithmetic)"""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.num_mini_batches

TINY = dict(
    model_name_or_path="checkpoints/tldr-sft", reward_model_path="checkpoints/tldr-reward", dataset_name="data/tldr",
    judge_fn="data/make_tldr.py:gold_score", dtype="float32", total_episodes=10_240, rloo_k=4, response_length=40, temperature=1.0,
    missing_eos_penalty=1.0, per_device_train_batch_size=64, num_mini_batches=2, num_ppo_epochs=1, local_rollout_forward_batch_size=128,
    learning_rate=4e-4, num_examples=300, num_sample_generations=3,
)
RECIPES = {
    "tiny": Args(**TINY),  # the small world of this project
    "pythia-14m": Args(  # the first command of TRL's page, a check that all runs: its reward model is a bare language model
        model_name_or_path="EleutherAI/pythia-14m", reward_model_path="EleutherAI/pythia-14m", total_episodes=10_000,
        per_device_train_batch_size=64, missing_eos_penalty=1.0,
    ),
    "tldr-pythia-1b": Args(  # the second one, with N+'s Adam; batch 128 a process
        sft_model_path="cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr", num_ppo_epochs=2, num_mini_batches=2,
        per_device_train_batch_size=8, gradient_accumulation_steps=8, local_rollout_forward_batch_size=16, missing_eos_penalty=1.0,
        kl_coef=0.03, adam_eps=1e-5,
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

def masked_mean(values, mask):
    """Mean over the valid positions -> scalar."""
    return torch.where(mask, values, 0.0).float().sum() / mask.sum()

def rloo_advantages(rewards, rloo_k):
    """Reward minus the mean reward of the prompt's other responses (Kool et al. 2019; Ahmadian et al. 2024, section 3). [k * P] -> [k * P]

    Ordered as TRL does: first responses of all prompts, then second ones, ... No division by a standard deviation, which explodes
    where a group's rewards are nearly equal.
    """
    rewards = rewards.float().view(rloo_k, -1)  # [k, P]
    return (rewards - (rewards.sum(0) - rewards) / (rloo_k - 1)).flatten()

def clipped_policy_loss(logprobs, old_logprobs, advantages, cliprange):
    """PPO's pessimistic surrogate, negated (Schulman et al. 2017, eq. 7). Any shape -> same shape, unreduced."""
    ratio = torch.exp((logprobs - old_logprobs).clamp(max=80))  # e^89 is inf in fp32, and inf * 0 nan: in the loss or its gradient
    return torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - cliprange, 1 + cliprange))

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

def group_states(k, body, input_ids, mask, T):
    """response_states for k responses to each prompt, which is read once: rows r, B / k + r, ... answer the same one. -> [B, T, H]

    A prompt's keys and values serve all its responses, as in `generate_groups`, and its gradient is the sum of theirs (prefix sharing,
    Wang and Hegde 2024).
    """
    C, R = (int(part.sum(1).max()) for part in (mask[:, :-T], mask[:, -T:]))  # the longest prompt and response here
    first = mask.shape[1] - T
    ids, mask = (x[:, first - C : first + R] for x in (input_ids, mask))
    cache, prompts = transformers.DynamicCache(config=body.config), slice(len(ids) // k)
    last = hidden_states(body, ids[prompts, :C], mask[prompts, :C], cache)[:, -1:]  # [B / k, 1, H]
    cache.batch_select_indices(torch.arange(len(last), device=ids.device).repeat(k))
    rest = hidden_states(body, ids[:, C:], mask, cache)[:, :-1]  # [B, R - 1, H]
    return F.pad(torch.cat([last.repeat(k, 1, 1), rest], 1), (0, 0, 0, T - R))

def response_logprobs(model, input_ids, mask, T, temperature, states=response_states):
    """Log-probabilities and entropies of the last T tokens, 0 where they are masked, and the hidden states that predicted them.

    [B, C + T], bool [B, C + T] -> fp32 [B, T], fp32 [B, T], [B, T, H]. Only valid tokens go through the head.
    """
    body, head = body_and_head(model)
    hidden, valid = states(body, input_ids, mask, T), mask[:, -T:]
    keep, tokens = KEPT_PROBS if torch.is_grad_enabled() else 0, input_ids[:, -T:]
    found = token_logprobs(hidden[valid][None], head.weight, tokens[valid][None], temperature, head.bias, keep)  # [1, valid tokens]
    return *(torch.zeros(valid.shape, device=mask.device).masked_scatter(valid, x) for x in found), hidden

class PolicyAndReference(nn.Module):
    """Policy and reference in one module: one forward, and one thing to wrap (DDP, FSDP, DeepSpeed)."""

    def __init__(self, policy, reference=None):
        super().__init__()
        self.policy, self.reference = policy, reference

    def forward(self, input_ids, mask, T, temperature, states=response_states):
        """-> logprobs, entropies, each fp32 [B, T]."""
        return response_logprobs(self.policy, input_ids, mask, T, temperature, states)[:2]

    def reference_logprobs(self, input_ids, mask, T, temperature, states=response_states):
        """The same log-probabilities under the reference: a frozen model, or the policy without its adapter. -> fp32 [B, T]"""
        with self.policy.disable_adapter() if self.reference is None else nullcontext():
            return response_logprobs(self.reference or self.policy, input_ids, mask, T, temperature, states)[0]

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
def check_head(model, name):
    """Refuse a model whose head is more than a matrix product (soft caps, logit scales): it would be trained wrongly."""
    body, head = body_and_head(model)
    ids = torch.arange(6, device=head.weight.device)[None]  # [1, 6]
    ours, _ = token_logprobs(body(ids).last_hidden_state[:, :-1], head.weight, ids[:, 1:], bias=head.bias)
    theirs = model(ids).logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    if not torch.allclose(ours, theirs, atol=1e-3, rtol=1e-3):
        raise UserError(f"{name}: its head is more than hidden @ weight (a soft cap, a scale); it would be trained wrongly here")

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

def load_scorer(name, batch_size, device):
    """A model of preferences as a function of prompts and responses (lists of str) -> list of float.

    Decoded and tokenised again, since its tokenizer need not be the policy's; the reward_offset of its config.json is subtracted.
    """
    config = load("model", AutoConfig.from_pretrained, base_of(name))
    settings = {} if any("ForSequenceClassification" in architecture for architecture in config.architectures or ()) else dict(num_labels=1)
    model, tokenizer = load_model(AutoModelForSequenceClassification, name, settings), load_tokenizer(name)
    if new_head(model, name):
        print(f"{name} is a language model without a score: its new head is random, and so is the reward", file=sys.stderr)
    if model.config.num_labels != 1:
        raise UserError(f"{name}: a classifier of {model.config.num_labels} labels; a model of preferences has one score")
    offset, model = getattr(config, "reward_offset", 0.0), model.to(device).eval()
    limit = min(tokenizer.model_max_length, context_of(model))

    @torch.no_grad()
    def score(prompts, responses):
        ids = [torch.tensor(x) for x in preference_ids(tokenizer, prompts, responses, limit)]
        scores = torch.zeros(len(ids), device=device)
        for rows in torch.tensor([len(x) for x in ids]).argsort().split(batch_size):  # similar lengths: little padding
            mask = length_mask(torch.tensor([len(ids[i]) for i in rows]), max(len(ids[i]) for i in rows)).to(device)
            batch = nn.utils.rnn.pad_sequence([ids[i] for i in rows], batch_first=True).to(device)  # [B, L]
            scores[rows.to(device)] = sequence_logits(model, batch, mask).squeeze(-1) - offset
        return scores.tolist()

    return score

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

def load_scores(args, device):
    """The reward as a function of prompts and responses (lists of str) -> fp32 [B]: the model's, or your own."""
    if args.reward_fn:
        score = load_function("--reward-fn", args.reward_fn)
    else:
        score = load_scorer(args.reward_model_path, args.local_rollout_forward_batch_size, device)
    return lambda prompts, responses: check_scores(score(prompts, responses), prompts, responses).to(device)

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

def load_posts(rows, tokenizer, args):
    """Prompts that fit, with their references ("" where the data have none). -> list of (ids, prompt, reference)"""
    if "prompt" not in rows.column_names:
        raise UserError(f"data set {args.dataset_name!r} needs a column prompt; it has {', '.join(rows.column_names)}")
    references = rows["completion"] if "completion" in rows.column_names else [""] * len(rows)
    kept = [(p, r if isinstance(r, str) else "") for p, r in zip(rows["prompt"], references) if isinstance(p, str) and p.strip()]
    ids = tokenizer([p for p, _ in kept], add_special_tokens=False).input_ids if kept else []
    posts = [(x, *row) for x, row in zip(ids, kept) if len(x) <= args.max_prompt_length]
    left_out(len(rows), len(posts), f"rows: no prompt, or one of more than --max-prompt-length {args.max_prompt_length} tokens")
    if not posts:
        raise UserError(f"data set {args.dataset_name!r}: no prompt of --max-prompt-length {args.max_prompt_length} tokens or fewer")
    return posts

def check_fit(args, tokenizer, policy, posts):
    """Refuse posts that do not fit the context, and a stop token that does not exist. -> tokens of the longest prompt, stop token's id"""
    longest, T = max(len(ids) for ids, *_ in posts), args.response_length
    if context_of(policy) < longest + T:
        raise UserError(f"the longest prompt, {longest} tokens, + --response-length {T} is longer than the model's context; lower "
                        "--max-prompt-length")
    stop_token_id = args.stop_token_id if args.stop_token_id is not None else tokenizer.eos_token_id if args.stop_token else -1
    if stop_token_id is None:
        raise UserError("the tokenizer has no EOS: name a --stop-token-id, or use --stop-token None")
    if stop_token_id == -1 and args.missing_eos_penalty is not None:
        raise UserError("--missing-eos-penalty without a stop token would punish every response alike")
    return longest, stop_token_id

def held_out_posts(posts, args):
    """num_examples posts to judge, with references if any has one, and their draws. -> references, (ids, mask, uniforms)"""
    posts = [post for post in posts if post[2]] or posts
    rows = stream_rows(len(posts), 0, min(args.num_examples, len(posts)), args.seed)
    return [posts[i][2] for i in rows.tolist()], draw_posts(posts, rows, replace(args, rloo_k=1), "held-out")

def draw_posts(posts, rows, args, *place):
    """Prompts left-padded to the longest of the batch, and the uniforms that will sample rloo_k responses to each.

    Drawn for the batch of all processes, of which each takes its columns. -> ids [P, C], bool [P, C], uniforms [k, P, T]
    """
    batch = [torch.tensor(posts[row][0]) for row in rows.tolist()]
    lengths = torch.tensor([len(x) for x in batch])
    ids = torch.stack([F.pad(x, (int(lengths.max()) - len(x), 0)) for x in batch])  # [P, C]
    uniforms = torch.rand(args.rloo_k, len(rows), args.response_length, generator=draws(args.seed, "tokens", *place))
    return ids, length_mask(lengths, ids.shape[1]).flip(1), uniforms

# ---- 7. Rollout ------------------------------------------------------------------------------------------------------
@torch.no_grad()
def generate_groups(model, ids, mask, uniforms, stop_token_id, temperature):
    """Sample k responses to each prompt, until the stop token or T tokens. Pure sampling: no top-k, no top-p, no minimum length.

    Left-padded ids, mask [P, C]; uniforms [k * P, T] -> tokens [k * P, T], lengths [k * P], log-probabilities that the tokens were
    drawn with [k * P, T]. Rows r, P + r, ... answer prompt r, which runs through the model once. A row that is done leaves the batch.
    """
    body, head = body_and_head(model)
    cache = transformers.DynamicCache(config=body.config)
    hidden = hidden_states(body, ids, mask, cache)[:, -1]  # [P, H]
    prompt = torch.arange(len(ids), device=ids.device).repeat(len(uniforms) // len(ids))  # [k * P]
    cache.batch_select_indices(prompt)
    hidden, mask, rows = hidden[prompt], mask[prompt], torch.arange(len(prompt), device=ids.device)  # the rows still being written
    tokens, logprobs = torch.zeros(uniforms.shape, dtype=torch.long, device=ids.device), torch.zeros_like(uniforms)
    for t in range(uniforms.shape[1]):
        probs = F.linear(hidden, head.weight, head.bias).div_(temperature).float().softmax(-1)  # [rows, V]
        token = sample_tokens(probs, uniforms[rows, t])  # [rows]
        tokens[rows, t], logprobs[rows, t] = token, probs.gather(1, token[:, None]).squeeze(1).log()
        going = (token != stop_token_id).nonzero().squeeze(-1)
        if len(going) == 0 or t + 1 == uniforms.shape[1]:
            break
        if len(going) < len(rows):
            cache.batch_select_indices(going)
            rows, mask, token = rows[going], mask[going], token[going]
        mask = F.pad(mask, (0, 1), value=True)
        hidden = hidden_states(body, token[:, None], mask, cache)[:, -1]  # [rows, H]
    return tokens, response_lengths(tokens, stop_token_id), logprobs

def together(k, P, args):
    """Rows that stay in one pass, and how it finds their states: each alone, or with --share-prompts the k responses to a prompt.

    -> [k * P, 1], response_states or [P, k], group_states
    """
    rows = torch.arange(k * P).view(k, P).T  # [P, k]
    return (rows, partial(group_states, k)) if args.share_prompts and k > 1 else (rows.T.reshape(-1, 1), response_states)

def passes(units, lengths, n):
    """Cut units [U, s] of rows into passes of n rows: similar lengths together, since each pass is as wide as its longest row.

    -> list of at most n rows each, all first rows of the units, then all second ones
    """
    units = units.to(lengths.device)
    order = lengths[units].amax(1).argsort()
    return [part.T.flatten() for part in units[order].split(n // units.shape[1])]

@torch.no_grad()
def rollout_groups(model, tokenizer, score, batch, stop_token_id, args):
    """k responses to each of P prompts, their raw scores, and the log-probabilities that the update will call old.

    These come from the update's own forward, so that the first ratio is 1: exactly where micro-batches are as long as the update's,
    otherwise up to rounding. With --old-logprobs sampler they are those that the tokens were drawn with, which `train` checks.
    Rows are ordered as TRL does: first responses of all prompts, then second ones.
    -> dict of tensors [k * P, ...], prompts, responses (lists of str)
    """
    ids, mask, uniforms = batch  # [P, C], [P, C], [k, P, T]
    k, P, T = uniforms.shape
    written = []
    for part in torch.arange(P).split(max(1, args.local_rollout_forward_batch_size // k)):
        draw = uniforms[:, part].flatten(0, 1)  # [k * n, T]
        written.append(generate_groups(model.policy, ids[part], mask[part], draw, stop_token_id, args.temperature))
    written = (torch.cat([x.unflatten(0, (k, -1)) for x in parts], 1).flatten(0, 1) for parts in zip(*written))
    tokens, lengths, drawn = written  # [k * P, T], [k * P], [k * P, T]
    stopped = tokens.gather(1, lengths[:, None] - 1).squeeze(1) == stop_token_id  # [k * P]
    asked = [x[m].tolist() for x, m in zip(ids, mask)] * k
    words = [x[:n].tolist() for x, n in zip(tokens, lengths - stopped.long())]  # without the stop token
    shown = tokenizer.batch_decode(asked, skip_special_tokens=True)
    texts = tokenizer.batch_decode([a + w for a, w in zip(asked, words)], skip_special_tokens=True)
    responses = [text[len(prompt):] for prompt, text in zip(shown, texts)]  # alone, some tokenizers would drop its first space
    prompts = tokenizer.batch_decode(asked)  # with the marks that a chat has, as the reward model learned them
    scores = score(prompts, responses)
    ids = torch.cat([ids.repeat(k, 1), tokens], 1)  # [k * P, C + T]
    mask = torch.cat([mask.repeat(k, 1), length_mask(lengths, T)], 1)
    units, states = together(k, P, args)
    order = passes(units, mask.sum(1), args.per_device_train_batch_size)  # as in the update
    parts = [(ids[rows], mask[rows], T, args.temperature, states) for rows in order]
    back, forward = torch.cat(order).argsort(), args.old_logprobs == "forward"
    logprobs = torch.cat([model(*part)[0] for part in parts])[back] if forward else drawn  # [k * P, T]
    ref_logprobs = torch.cat([model.reference_logprobs(*part) for part in parts])[back]
    b = dict(ids=ids, mask=mask, lengths=lengths, stopped=stopped, scores=scores, logprobs=logprobs, ref_logprobs=ref_logprobs)
    return b, prompts, responses

# ---- 8. Evaluation ---------------------------------------------------------------------------------------------------
QUESTION = """Which of two summaries of a forum post is better? A good summary is short, true to the post, and keeps what matters most.

{post}

Summary A:{a}

Summary B:{b}

Answer with one letter, A or B, and nothing else."""

def check_judge(args):
    """Refuse an address without a name, before anything is loaded."""
    if args.judge_url and not args.judge_model:
        raise UserError("--judge-url needs the --judge-model that is asked there")

def chat_judge(args):
    """A chat model as a function of prompts, responses, references -> list of 1 (wins), 0 (loses) or None (no verdict)."""
    import httpx
    import huggingface_hub
    if args.judge_url:  # huggingface_hub's own client refuses any server under HF_HUB_OFFLINE, one on this machine too
        huggingface_hub.set_client_factory(lambda: httpx.Client(timeout=300))
    key = os.environ.get("OPENAI_API_KEY", "none") if args.judge_url else None  # None: the Hugging Face token
    client = huggingface_hub.InferenceClient(base_url=args.judge_url, api_key=key)

    def ask(prompt, response, reference, first):
        a, b = (response, reference) if first else (reference, response)
        messages = [dict(role="user", content=QUESTION.format(post=prompt, a=a, b=b))]
        for attempt in range(4):
            try:
                answer = client.chat_completion(messages, model=args.judge_model, max_tokens=8, temperature=0.0)
                break
            except Exception as error:  # a server can fail in as many ways as there are servers
                if attempt == 3:
                    raise UserError(f"--judge-model {args.judge_model}: no answer after 4 attempts: {error}") from error
                time.sleep(2**attempt)
        letters = set(re.findall(r"\b[AB]\b", answer.choices[0].message.content or ""))
        return float(("A" in letters) == first) if len(letters) == 1 else None

    def compare(prompts, responses, references):
        order = (torch.rand(len(prompts), generator=draws(args.seed, "order of the two")) < 0.5).tolist()  # judges favour a place
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(ask, prompts, responses, references, order))

    return compare

def load_gold(args):
    """The function of --judge-fn, or None."""
    return load_function("--judge-fn", args.judge_fn) if args.judge_fn else None

def load_judge(args, score, gold, device):
    """The judge as a function of prompts, responses, references -> list of 1 (wins), 0 (loses), 0.5 (tie), None (no verdict).

    A chat model, a second model of preferences, else the larger score: by `gold`, or without it by the reward's `score`.
    """
    if args.judge_model and (args.judge_url or not Path(located(args.judge_model)).is_dir()):
        return chat_judge(args)
    if args.judge_model:
        judge = load_scorer(args.judge_model, args.local_rollout_forward_batch_size, device)
        score = lambda prompts, responses: torch.tensor(judge(prompts, responses))  # noqa: E731
    elif gold:
        score = lambda prompts, responses: check_scores(gold(prompts, responses), prompts, responses)  # noqa: E731

    def compare(prompts, responses, references):
        ours, theirs = score(list(prompts), list(responses)), score(list(prompts), list(references))
        return (((ours > theirs).float() + (ours >= theirs).float()) / 2).tolist()

    return compare

def judge_name(args):
    """Who load_judge's judge is."""
    return args.judge_model or args.judge_fn or args.reward_fn or args.reward_model_path

def win_rate(model, tokenizer, score, judge, batch, references, stop_token_id, args):
    """Answer the held-out prompts once, with the same draws before and after. -> numbers of the table, prompts, responses, scores

    The win rate is of the prompts that have a reference and a verdict; a tie counts half; 1.96 standard errors to either side.
    """
    model.eval()
    b, prompts, responses = rollout_groups(model, tokenizer, score, batch, stop_token_id, replace(args, old_logprobs="forward"))
    valid = length_mask(b["lengths"], args.response_length)  # [B, T]
    kl = torch.where(valid, kl_per_token(b["logprobs"], b["ref_logprobs"], "k1"), 0.0).sum(1)  # [B]
    numbers = {"score mean": b["scores"].mean(), "score median": b["scores"].quantile(0.5), "KL, nats a response": kl.mean(),
               "ended by itself": b["stopped"].float().mean(), "tokens a response": b["lengths"].float().mean(),
               "perplexity under the reference": torch.exp(-masked_mean(b["ref_logprobs"], valid)),
               "distinct responses": len(set(responses)) / len(responses)}
    if judge and any(references):
        given = judge(*zip(*[row for row in zip(prompts, responses, references) if row[2]]))
        verdicts = torch.tensor([x for x in given if x is not None])
        if len(verdicts):
            half = 1.96 * (verdicts.var(correction=0) / len(verdicts)) ** 0.5
            numbers = {"win rate": verdicts.mean(), "+- (95 % interval)": half, "ties": (verdicts == 0.5).float().mean()} | numbers
        numbers["no verdict"] = 1 - len(verdicts) / len(given)
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
    """The whole run, from the flags to the last table. -> (PolicyAndReference, run folder)"""
    check_positive(args, "per_device_train_batch_size", "gradient_accumulation_steps", "num_mini_batches", "num_ppo_epochs",
                   "total_episodes", "local_rollout_forward_batch_size", "num_examples", "temperature", "response_length")
    if args.rloo_k < 2 or args.local_batch_size % args.rloo_k:
        raise UserError(f"--rloo-k {args.rloo_k} must be 2 or more and divide the {args.local_batch_size} episodes of a process's batch")
    if args.share_prompts and (args.gradient_checkpointing or args.per_device_train_batch_size % args.rloo_k):
        raise UserError("--share-prompts needs a --per-device-train-batch-size that --rloo-k divides, and no --gradient-checkpointing")
    check_judge(args)
    if args.kl_in_loss and args.kl_estimator == "k1":
        raise UserError("--kl-in-loss with --kl-estimator k1 has no gradient in expectation; use k2, or k3 as GRPO does")
    accelerator = start(args)
    if args.load_in_8bit and args.lora_r and accelerator.distributed_type == "FSDP":
        raise UserError("--load-in-8bit: FSDP2 cannot cut 8-bit weights into shards; use ZeRO or plain data parallelism")
    device, rank, world = accelerator.device, accelerator.process_index, accelerator.num_processes
    B, T, k, n = args.local_batch_size * world, args.response_length, args.rloo_k, args.per_device_train_batch_size
    updates, epochs = 2 if args.sanity else math.ceil(args.total_episodes / B), args.num_ppo_epochs
    args = replace(args, learning_rate=0.0) if args.sanity else args
    name, tokenizer = args.sft_model_path or args.model_name_or_path, load_tokenizer(args.model_name_or_path)
    bare = PolicyAndReference(*load_policy(args, name)).to(device)
    score, gold = load_scores(args, device), load_gold(args)
    judge = load_judge(args, score, gold, device) if accelerator.is_main_process else None  # a chat model is asked by one process
    train_posts, held_posts = (load_posts(rows, tokenizer, args) for rows in load_splits(args.dataset_name))
    config, (longest, stop_token_id) = bare.policy.config, check_fit(args, tokenizer, bare.policy, train_posts + held_posts)
    optimizer, scheduler = make_optimizer(args, trainable(learner := make_learner(bare, accelerator)).values(), updates)
    if args.share_prompts and learner is not bare:
        raise UserError("--share-prompts: layers in shards (FSDP2, ZeRO-3) can run once a pass; use ZeRO-2 or plain data parallelism")
    dtype = pick_dtype(args, device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=dtype is torch.bfloat16)
    transformers.AttentionInterface.register("sdpa", attention)  # in place of transformers' own

    run = Run(args, accelerator, updates, {"score": "objective/scores", "KL": "objective/kl", "ended": "val/num_eos_tokens"})
    say = run.console.print
    say(f"recipe {args.recipe}: {name} on {args.dataset_name}, {device}, {dtype}; run folder {run.folder}")
    say(f"batch: {n} episodes a pass x {args.gradient_accumulation_steps} accumulated x {args.num_mini_batches} minibatches x {world} "
        f"processes = {B} = {B // k} prompts x {k}; {updates} updates x {epochs} epochs x {args.num_mini_batches} minibatches = "
        f"{updates * epochs * args.num_mini_batches} optimizer steps")
    say(describe_memory(bare, learner, config, args, longest + T, args.local_rollout_forward_batch_size, accelerator))
    if args.lora_r:
        trained, total = (sum(p.numel() for p in bare.parameters() if p.requires_grad >= least) for least in (True, False))
        say(f"LoRA trains {trained:,} of {total:,} parameters = {trained / total:.3%}")
    model, optimizer = accelerator.prepare(learner, optimizer)
    parameters = trainable(learner)

    references, held_batch = held_out_posts(held_posts, args)
    held_batch = [x.to(device) for x in held_batch]
    with autocast:
        before = win_rate(bare, tokenizer, score, judge, held_batch, references, stop_token_id, args)
    run.engine = model if accelerator.distributed_type == "DEEPSPEED" else None
    state = run.restore(parameters, optimizer, scheduler)
    take_weights(bare, learner)
    skipped = 0
    run.bar.start()
    for update in range(state["update"] + 1, updates + 1):
        # 1. Rollout. Everything random is drawn for the whole batch; this process takes its prompts, with all their responses.
        began = time.time()
        bare.eval()
        P, mine = B // k, slice(rank * B // k // world, (rank + 1) * B // k // world)
        ids, mask, uniforms = draw_posts(train_posts, stream_rows(len(train_posts), (update - 1) * P, P, args.seed), args, update)
        with autocast:
            batch = [x.to(device) for x in (ids[mine], mask[mine], uniforms[:, mine])]
            local, prompts, responses = rollout_groups(bare, tokenizer, score, batch, stop_token_id, args)
        if gold:
            local["gold"] = check_scores(gold(prompts, responses), prompts, responses).to(device)
        groups = {key: accelerator.gather(x).view(world, k, -1, *x.shape[1:]) for key, x in local.items()}
        b = {key: x.transpose(0, 1).flatten(0, 2) for key, x in groups.items()}  # [B, ...], all first responses, then all second ones
        asked = b["ids"][:, :-T].view(k, P, -1)
        assert (asked == asked[0]).all(), "the rows of a group do not answer the same prompt"
        b_mask = length_mask(b["lengths"], T)  # [B, T]
        rollout_seconds = time.time() - began

        # 2. Scores: clip, then punish. A penalty before a normalisation of the scores would shift everyone else's.
        # Running score normalisation (TRL's use_score_scaling) is a line here: docs/rloo_tldr.md.
        scores = b["scores"] if args.score_clip is None else b["scores"].clamp(-args.score_clip, args.score_clip)  # [B]
        scores = torch.where(b["stopped"], scores, scores - (args.missing_eos_penalty or 0.0))  # TRL's EOS trick

        # 3. Rewards: one a response, score minus the price of its KL.
        kl = torch.where(b_mask, kl_per_token(b["logprobs"], b["ref_logprobs"], args.kl_estimator), 0.0).sum(1)  # [B]
        rewards = scores if args.kl_in_loss else scores - args.kl_coef * kl  # [B]
        rewards = rewards / rewards.std(correction=0).clamp(min=1e-8) if args.whiten_rewards else rewards

        # 4. Advantages: the other responses to the same prompt are the baseline.
        advantages = rloo_advantages(rewards, k)  # [B]

        # 5. Update: minibatches of the whole batch; a process takes its rows of each, in micro-batches. The loss is a sum over
        # responses / the minibatch's size, so the gradient does not depend on micro-batches, accumulation or processes.
        model.train()
        sums = torch.zeros(8, device=device)  # what is logged, over all minibatches
        (units, states), M = together(k, P, args), B // args.num_mini_batches  # [U, s] rows; M are in a minibatch
        order = [torch.randperm(len(units), generator=draws(args.seed, "order", update, epoch)) for epoch in range(epochs)]
        for step, mb in enumerate(torch.stack(order).view(epochs * args.num_mini_batches, -1)):  # [U / num_mini_batches]
            mine = units[mb[rank * len(mb) // world : (rank + 1) * len(mb) // world]]
            micros = passes(mine, b["mask"].sum(1), n)
            for i, rows in enumerate(micros):
                m, old, ref = b_mask[rows], b["logprobs"][rows], b["ref_logprobs"][rows]  # [n, T]
                with accelerator.no_sync(model) if i + 1 < len(micros) else nullcontext():
                    with autocast:
                        new, entropies = model(b["ids"][rows], b["mask"][rows], T, args.temperature, states)  # [n, T]
                    # where before arithmetic: behind a response's end there may stand anything, and nan * 0 is nan
                    new, old, ref, entropies = (torch.where(m, x, 0.0) for x in (new, old, ref, entropies))
                    log_ratio = (new - old).sum(1)  # [n], of the whole response
                    policy_loss = clipped_policy_loss(log_ratio, torch.zeros_like(log_ratio), advantages[rows], args.cliprange)  # [n]
                    loss = policy_loss.sum() / M
                    if args.kl_in_loss:
                        loss = loss + args.kl_coef * kl_per_token(new, ref, args.kl_estimator).sum() / M
                    accelerator.sync_gradients = i + 1 == len(micros)  # DeepSpeed steps in the last pass's backward
                    accelerator.backward(loss * world)  # DDP divides by the number of processes
                log_ratio = log_ratio.detach()
                ratio = torch.exp(log_ratio)
                if args.old_logprobs == "sampler" and step == 0 and not (ratio - 1).abs().max() < 1e-3:
                    raise UserError(f"--old-logprobs sampler: the first ratios are {ratio.min():.5f} to {ratio.max():.5f}, not 1: sampling "
                                    "and training round differently here; use --old-logprobs forward, or --dtype float32")
                seen = (policy_loss, policy_loss > -advantages[rows] * ratio, 0.5 * log_ratio**2, ratio - 1, (ratio - 1) ** 2,
                        torch.ones_like(ratio), entropies, m)
                sums += torch.stack([x.detach().float().sum() for x in seen])
            norm = clip_gradients(accelerator, parameters, args.max_grad_norm)
            skipped = 0 if math.isfinite(norm) else skipped + 1
            if skipped:
                say(f"update {update}: a gradient that is not finite, step skipped, {skipped} in a row", style="yellow")
                if skipped == 5:
                    raise UserError("5 gradients in a row were not finite: lower --learning-rate, or --dtype float32")
            else:
                optimizer.step()
            optimizer.zero_grad()
        take_weights(bare, learner)
        # To move the reference, or to average the policy (EMA), add lines here: docs/rloo_tldr.md.
        with torch.no_grad(), autocast:
            check_finite(torch.stack(bare(b["ids"][:1], b["mask"][:1], T, args.temperature))[:, b_mask[:1]], update)

        # 6. Log.
        sums = accelerator.reduce(sums)
        (pg_loss, clipfrac, approxkl, off, off2), entropy = (sums[:5] / sums[5]).tolist(), (sums[6] / sums[7]).item()
        lengths, kl_mean, seconds = b["lengths"].float(), kl.mean(), time.time() - began
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 2**10)  # bytes on macOS, else KiB
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else host
        metrics = {
            "update": update, "episode": update * B, "lr": optimizer.param_groups[0]["lr"], "eps": B / seconds, "objective/kl": kl_mean,
            "objective/kl_coef": args.kl_coef, "objective/entropy": -torch.where(b_mask, b["logprobs"], 0.0).sum(1).mean(),
            "objective/non_score_reward": -args.kl_coef * kl_mean, "objective/rlhf_reward": scores.mean() - args.kl_coef * kl_mean,
            "objective/scores": scores.mean(), "policy/approxkl_avg": approxkl, "policy/clipfrac_avg": clipfrac,
            "policy/entropy_avg": entropy, "loss/policy_avg": pg_loss, "val/ratio": 1 + off, "val/ratio_var": max(off2 - off**2, 0.0),
            "val/num_eos_tokens": b["stopped"].sum(), "env/reward_mean": b["scores"].mean(),
            "env/reward_std": b["scores"].std(correction=0), "completions/mean_length": lengths.mean(),
            "completions/min_length": lengths.min(), "completions/max_length": lengths.max(),
            "completions/clipped_ratio": 1 - b["stopped"].float().mean(),
            "frac_reward_zero_std": (b["scores"].view(k, P).std(0, correction=0) < 1e-6).float().mean(), "perf/seconds": seconds,
            "perf/rollout_seconds": rollout_seconds, "perf/train_seconds": seconds - rollout_seconds,
            "perf/tokens_per_second": lengths.sum() / seconds, "perf/peak_memory_mb": peak / 2**20,
        } | ({"judge/scores": b["gold"].mean()} if gold else {})
        metrics = {key: x.item() if isinstance(x, torch.Tensor) else x for key, x in metrics.items()}
        run.log(metrics, health(metrics, args))
        limit = 1e-4 if dtype is torch.float32 else 1e-1  # of a whole response, a sum of T log-probabilities
        kl_limit = 1.0 if args.load_in_8bit else limit  # rounded weights are another model
        if args.sanity and not (abs(off) < limit and abs(metrics["objective/kl"]) < kl_limit and all(map(math.isfinite, metrics.values()))):
            raise UserError(f"--sanity: at learning rate 0 the ratio should be 1, the KL 0 and all finite: {metrics}")
        if args.num_sample_generations and update % max(1, updates // args.num_sample_generations) == 0:
            ends = [tokenizer.eos_token if end else " ..." for end in local["stopped"].tolist()]
            rows = zip(prompts[:3], responses, ends, local["scores"].tolist())
            rows = [{"query": p, "model response": r + end, "score": x} for p, r, end, x in rows]
            run.table(f"samples of update {update}", rows, "samples.jsonl", update=update)
        scheduler.step()
        run.checkpoint(update, parameters, optimizer, scheduler)

    # 7. The same held-out prompts again, the table, and the model that the next script loads.
    run.bar.stop()
    if args.sanity:
        say("sanity: at learning rate 0 the ratio is 1, the KL 0, and every metric finite")
        return bare, run.folder
    with autocast:
        after = win_rate(bare, tokenizer, score, judge, held_batch, references, stop_token_id, args)
    if run.main:
        for post, reference, *texts in [*zip(before[1], references, before[2], after[2], before[3], after[3])][:2]:
            rows = zip((post, "reference", "before", "after"), ("", reference, *texts[:2]), ("", "", *(f"{x:.3f}" for x in texts[2:])))
            run.table("a held-out post", [dict(zip(("post", "summary", "score"), row)) for row in rows])
        about = dict(n=len(references), judge=judge_name(args),
                     decoding=f"sampling, temperature {args.temperature}, at most {T} tokens")
        table = [dict(metric=key, before=before[0].get(key, math.nan), after=after[0][key]) for key in after[0]]
        run.table(f"{about['n']} held-out posts against their references; judge: {about['judge']}; {about['decoding']}", table)
        run.write("evaluation.json", json.dumps(dict(before=before[0], after=after[0], **about), indent=2))
        save_policy(bare.policy, tokenizer, run.folder / "model")
        run.curves("objective/scores", "objective/kl", "val/num_eos_tokens", "completions/mean_length")
        say(f"saved {run.folder / 'model'}")
    accelerator.wait_for_everyone()  # a process that ends too soon may abort, and torchrun would then stop the one that saves
    accelerator.end_training()
    return bare, run.folder

def judge_alone(args):
    """The verb judge: the win rate of one model against the references, as TRL's judge_tldr.py. -> numbers"""
    check_positive(args, "num_examples", "temperature", "response_length", "per_device_train_batch_size",
                   "local_rollout_forward_batch_size")
    check_judge(args)
    accelerator, name = start(args), args.sft_model_path or args.model_name_or_path
    device, tokenizer = accelerator.device, load_tokenizer(args.model_name_or_path)
    policy = load_model(AutoModelForCausalLM, name).to(device)
    check_head(policy, name)
    nothing = lambda prompts, *_: torch.zeros(len(prompts), device=device)  # noqa: E731
    score = nothing if args.judge_fn or args.judge_model else load_scores(args, device)
    posts = load_posts(load_splits(args.dataset_name)[1], tokenizer, args)
    _, stop = check_fit(args, tokenizer, policy, posts)
    references, batch = held_out_posts(posts, args)
    if not any(references):
        raise UserError(f"data set {args.dataset_name!r}: judge needs references, in a column completion")
    batch = [x.to(device) for x in batch]
    judge, model = load_judge(args, score, load_gold(args), device), PolicyAndReference(policy, policy)
    transformers.AttentionInterface.register("sdpa", attention)  # as in training
    with torch.autocast(device.type, torch.bfloat16, enabled=pick_dtype(args, device) is torch.bfloat16):
        numbers, *_ = win_rate(model, tokenizer, score, judge, batch, references, stop, args)
    if "win rate" not in numbers:
        raise UserError("the judge gave no verdict at all")
    judged = round(len(references) * (1 - numbers["no verdict"]))
    if accelerator.is_main_process:
        print(f"Model win rate: {numbers['win rate']:.2%} +- {numbers['+- (95 % interval)']:.2%} ({numbers['ties']:.1%} ties; "
              f"{len(references) - judged} posts without verdict), n = {judged}, judge {judge_name(args)}, temperature {args.temperature}, "
              f"at most {args.response_length} tokens")
    return numbers

# ---- 11. Main --------------------------------------------------------------------------------------------------------
def main(argv=None):
    """The command line. What the user can mend ends in one line and exit code 2; a bug of ours keeps its traceback."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of a missing 4-bit kernel that nothing here uses
    for quiet in (transformers, datasets):
        quiet.logging.set_verbosity_error()
        quiet.utils.logging.disable_progress_bar()
    try:
        argv = sys.argv[1:] if argv is None else argv
        judge_alone(parse_args(argv[1:])) if argv[:1] == ["judge"] else train(parse_args(argv))
    except Exception as error:
        fail(error)

if __name__ == "__main__":
    main()
