"""How the scripts do on a GPU: one command, no network, at most ten minutes on one H200.

    bash benchmarks/gpu.sh                          # writes results/gpu.json
    bash benchmarks/gpu.sh out.json --only math ratio
    bash benchmarks/gpu.sh out.json --device cpu --toy    # tests this program, without a GPU

Sections run one after another, the most important ones first. Each has a process and a time limit of its own,
and the file is written after each of them, so whatever stops the program leaves what is done.

    versions    what is installed, which GPU, how long CUDA takes to start
    math        the math functions on the GPU and on the CPU: the largest differences
    ratio       one update of each RL script in fp32 and bf16: the first log-ratios, and the gap to generation
    defaults    each script as a user runs it, shortened: exit code, seconds, first and last loss or score
    episodes    ppo_sentiment.py's recipe gpt2-imdb on GPT-2 with random weights: seconds per update, memory
    decode      tokens per second of generate, and of transformers' model.generate
    mfu         how much of the GPU's matrix product rate an update of pythia-1b's shape reaches
    kernels     kernels and waits for the GPU per generated token; the longest kernels
    memory      peak memory of an update of rloo_tldr.py for three sizes, with LoRA and with checkpointing
    launch      accelerate launch, 8-bit weights, a run that is resumed; DDP, FSDP2 and ZeRO on two GPUs

A section consists of items. An item that raises is recorded with the end of its traceback, and the next one
runs. An item with a suspicious number gets a warning. Where no checkpoint of the repository fits, models have
random weights, made on the GPU from a config. The settings of torch are those of the scripts' start_accelerator;
only the math section computes products without TF32.
"""

import argparse
import contextlib
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

RL = ("ppo_sentiment", "rloo_tldr", "grpo_math", "ppo_dialog")
PACKAGES = (  # what the scripts import, and what some flags need
    *("torch", "transformers", "accelerate", "datasets", "tyro", "rich", "safetensors", "tokenizers"),
    *("matplotlib", "numpy", "peft", "bitsandbytes", "triton"),
)
NEOX = "hidden_size num_hidden_layers num_attention_heads intermediate_size vocab_size".split()
SHAPES = {  # name -> model type and its config
    "gpt2-124m": ("gpt2", dict(vocab_size=50_257)),  # the defaults of GPT2Config
    "distilbert-66m": ("distilbert", dict(vocab_size=50_257)),  # a larger vocabulary than DistilBERT's
    "pythia-410m": ("gpt_neox", dict(zip(NEOX, (1024, 24, 16, 4096, 50_304)))),
    "pythia-1b": ("gpt_neox", dict(zip(NEOX, (2048, 16, 8, 8192, 50_304)))),
}
TOY_SIZES = {  # the same model types, so small that a CPU runs them
    "gpt2": dict(n_embd=32, n_layer=2, n_head=2, vocab_size=1100),
    "distilbert": dict(dim=32, n_layers=2, n_heads=2, hidden_dim=64, vocab_size=1100),
    "gpt_neox": dict(zip(NEOX, (32, 2, 2, 64, 1100))),
}
TOY_NOTE = "toy sizes on a CPU, to test this program: these numbers say nothing about a GPU"


# ---- Items, clocks, memory ---------------------------------------------------------------------------------


def attempt(name, function, *inputs):
    """Call function(*inputs). -> name, its result; or, if it raises, the end of the traceback.

    It raises if the GPU does not answer any more: every further call in this process would fail.
    """
    print(f"-- {name}", flush=True)
    try:
        return name, function(*inputs)
    except (Exception, SystemExit):
        traceback.print_exc()
        synchronize()  # raises if an error of CUDA stays
        return name, {"error": last_lines(traceback.format_exc())}


def last_lines(text, count=12):
    """The end of a traceback or of a log."""
    return "\n".join(text.strip().splitlines()[-count:])[-2000:]


def free_memory():
    """Give back what nobody holds any more, so that the next item starts with an empty GPU."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def synchronize():
    """Wait until the GPU has done everything."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def seconds_of(function, repeats=3):
    """The median time of a call, after one call to warm up. -> seconds"""
    function()
    times = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        function()
        synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def reset_peak_memory():
    """Start to measure the peak anew. The peak of a process on a CPU cannot be reset."""
    free_memory()
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


def peak_memory():
    """-> dict: what tensors needed and what the allocator took, MiB; on a CPU: of the process so far"""
    if not torch.cuda.is_initialized():
        return {"process so far, MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10}
    return {
        "allocated, MiB": torch.cuda.max_memory_allocated() / 2**20,
        "reserved, MiB": torch.cuda.max_memory_reserved() / 2**20,
    }


def bf16_autocast(device):
    """As in the scripts, which pass the type of the device, not the device."""
    return torch.autocast(torch.device(device).type, torch.bfloat16)


# ---- Models with random weights ----------------------------------------------------------------------------


def make_folder(shape, toy, folder, all_words=False, **settings):
    """A folder with the config of this shape and a tokenizer, but without weights. -> its path, a str

    The repository's tokenizer has fewer words than these shapes. With all_words it gets a text for every id
    that can be sampled, which takes a second. Without, the other ids decode to nothing.
    """
    import transformers

    model_type, config = SHAPES[shape]
    if toy:
        config = TOY_SIZES[model_type]
    ids_of_ends = {} if model_type == "distilbert" else dict(bos_token_id=0, eos_token_id=0)
    config = transformers.AutoConfig.for_model(model_type, **config, **ids_of_ends, **settings)
    folder = Path(folder, shape)
    config.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "checkpoints/reviews-lm")
    if all_words:
        tokenizer.add_tokens([f"<{i}>" for i in range(len(tokenizer), config.vocab_size)])
    tokenizer.save_pretrained(folder)
    return str(folder)


@contextlib.contextmanager
def random_weights(device):
    """In this block, transformers makes random weights, on the GPU, if a folder has a config only."""
    from transformers import PreTrainedModel

    from_pretrained = PreTrainedModel.from_pretrained.__func__

    def load_or_make(model_class, path, *args, **kwargs):
        if any(Path(path).glob("*.safetensors")):
            return from_pretrained(model_class, path, *args, **kwargs)
        torch.manual_seed(0)  # the policy and its reference are equal
        with torch.device(device):
            model = model_class._from_config(kwargs["config"], dtype=kwargs["dtype"])
        return model, {"missing_keys": []}

    with replaced(PreTrainedModel, from_pretrained=classmethod(load_or_make)):
        yield


def make_model(module, shape, toy, device):
    """A causal language model of this shape in fp32, as the script loads it."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder, random_weights(device):
        model = module.load_model(AutoModelForCausalLM, make_folder(shape, toy, folder))
    return model.to(device).eval()


def name_of(shape, toy):
    """The name of a shape in an item, so that a toy cannot be taken for the real size."""
    return f"toy of {shape}" if toy else shape


def layer_parameters(model):
    """Parameters without embeddings and output layer, and those of the output layer. -> two int"""
    head = model.get_output_embeddings().weight
    embeddings = [layer.weight for layer in model.modules() if isinstance(layer, torch.nn.Embedding)]
    outside = {id(weight): weight.numel() for weight in [*embeddings, head]}
    return sum(p.numel() for p in model.parameters()) - sum(outside.values()), head.numel()


# ---- Runs of the scripts -----------------------------------------------------------------------------------


class EnoughError(Exception):
    """Ends a run after the updates that are wanted: no evaluation, no saved model."""


class SynchronizedTime:
    """The module time, for a script: its clock waits for the GPU, so that perf/* metrics are exact."""

    def time(self):
        synchronize()
        return time.time()

    def __getattr__(self, name):
        return getattr(time, name)


@contextlib.contextmanager
def replaced(owner, **attributes):
    """In this block, an object has other attributes."""
    before = {name: vars(owner)[name] for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def run_updates(module, flags, updates):
    """Run a script in this process until so many updates are logged.

    -> the metrics of the updates, and the largest log-ratio before the first optimizer step, in one micro-batch
    """
    rows, gaps = [], []
    log, loss = module.Run.log, module.clipped_policy_loss

    def logged(self, metrics):
        rows.append(log(self, metrics))
        if len(rows) == updates:
            raise EnoughError
        return rows[-1]

    def recorded(logprobs, old_logprobs, advantages, cliprange):
        if not gaps:
            gaps.append((logprobs - old_logprobs).detach().abs().max().item())
        return loss(logprobs, old_logprobs, advantages, cliprange)

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with (
        tempfile.TemporaryDirectory() as folder,
        replaced(module, clipped_policy_loss=recorded, time=SynchronizedTime()),
        replaced(module.Run, log=logged),
    ):
        try:
            module.train(module.parse_args([*map(str, flags), "--output-dir", f"{folder}/run"]))
        except EnoughError:
            pass
        finally:
            # The handlers of a run hold the run, and with it the models, in memory.
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return rows, gaps[0]


def run_command(words, seconds):
    """Run a command from the root of the repository. -> exit code (None: too slow), seconds, its output"""
    start = time.time()
    process = subprocess.Popen(
        [str(word) for word in words],
        cwd=ROOT,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
        code = process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        code, output = None, "too slow"
        # A launcher's own child may hold the pipe open; it ends with this section.
        with contextlib.suppress(subprocess.TimeoutExpired):
            output, _ = process.communicate(timeout=5)
    return code, time.time() - start, output


def read_run(folder):
    """What a run folder says about a run, also if it was stopped. -> dict"""
    folder = Path(folder)
    rows = []
    if (folder / "metrics.jsonl").exists():
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
    if not rows:
        return {"updates": 0}
    name = "objective/scores" if "objective/scores" in rows[0] else "loss"
    values = [row[name] for row in rows]
    few = max(1, len(values) // 10)
    found = {
        "updates": len(rows),
        f"{name}, first tenth": sum(values[:few]) / few,
        f"{name}, last tenth": sum(values[-few:]) / few,
        "seconds per update": statistics.median(row["perf/seconds"] for row in rows[len(rows) // 5 :]),
        "peak memory, MiB": max(row["perf/peak_memory_mb"] for row in rows),
    }
    for name in ("objective/kl", "sampling/logprob_gap_max", "grad_norm"):
        if name in rows[-1]:
            found[f"{name}, last"] = rows[-1][name]
    if (folder / "evaluation.json").exists():
        evaluation = json.loads((folder / "evaluation.json").read_text())
        for part in ("before", "after"):
            if part in evaluation:
                found[part] = evaluation[part]
        if "accuracy" in evaluation:
            found["accuracy"] = evaluation["accuracy"]
    return found


def run_script(words, folder, seconds):
    """Run a script that writes this folder. -> dict; with "error" if the exit code is not 0"""
    code, spent, output = run_command(words, seconds)
    found = {"exit code": code, "seconds": spent, **read_run(folder)}
    if code != 0:
        found["error"] = last_lines(output)
    return found


# ---- 1. versions -------------------------------------------------------------------------------------------


def versions(device, toy, seconds):
    """What is installed, what the GPU is, and how long the first operation takes."""
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None  # not installed
    yield "packages", found
    yield "CUDA", {"available": torch.cuda.is_available(), "device of this run": device}
    if device == "cuda" and torch.cuda.is_available():
        yield attempt("GPU", describe_gpu)
    precision = {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "TF32 in matrix products": torch.backends.cuda.matmul.allow_tf32,
        "TF32 in cuDNN": torch.backends.cudnn.allow_tf32,
        "flash attention": torch.backends.cuda.flash_sdp_enabled(),
        "memory-efficient attention": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "cuDNN attention": torch.backends.cuda.cudnn_sdp_enabled(),
    }
    yield "precision", precision
    yield "processor", {"cores": os.cpu_count(), "threads of torch": torch.get_num_threads()}


def describe_gpu():
    start = time.perf_counter()
    torch.ones(1, device="cuda").item()
    first = time.perf_counter() - start
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "compute capability": f"{properties.major}.{properties.minor}",
        "memory, MiB": properties.total_memory / 2**20,
        "CUDA of torch": torch.version.cuda,
        "cuDNN": torch.backends.cudnn.version(),
        "bf16": torch.cuda.is_bf16_supported(including_emulation=False),
        "seconds until the first result": first,
    }


# ---- 2. math -----------------------------------------------------------------------------------------------


def outputs_on(device, function, inputs, differentiate):
    """Call a function on a device. -> its outputs, and the gradients of a sum of the first, on the CPU"""
    inputs = [x.detach().clone().to(device) if isinstance(x, torch.Tensor) else x for x in inputs]
    leaves = [inputs[i].requires_grad_() for i in differentiate]
    outputs = function(*inputs)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    gradients = []
    if leaves:
        weights = torch.linspace(-1, 1, outputs[0].numel()).view(outputs[0].shape).to(device)
        gradients = torch.autograd.grad((outputs[0].float() * weights).sum(), leaves)
    return [x.detach().cpu().double() for x in [*outputs, *gradients]]


def largest_error(ours, theirs):
    """Of lists of tensors: the largest difference, and the largest in units of a tensor's largest value."""
    found = {"largest error": 0.0, "relative to the largest value": 0.0}
    for a, b in zip(ours, theirs, strict=True):
        if not a.isfinite().all():
            raise ValueError("outputs or gradients are not finite")
        error = (a - b).abs().max().item()
        found["largest error"] = max(found["largest error"], error)
        relative = error / max(b.abs().max().item(), 1e-30) if error else 0.0
        found["relative to the largest value"] = max(found["relative to the largest value"], relative)
    return found


def compare(device, function, inputs, differentiate=(), limit=1e-4):
    """The same function on this device and on the CPU. limit: of the relative error"""
    ours = outputs_on(device, function, inputs, differentiate)
    theirs = outputs_on("cpu", function, inputs, differentiate)
    return warn_above(largest_error(ours, theirs), "relative to the largest value", limit)


def warn_above(found, name, limit):
    """Add a warning to the numbers of an item if one of them is larger than this."""
    if not abs(found[name]) <= limit:
        found["warning"] = f"{name}: {found[name]:.3g} is more than {limit:g}"
    return found


def math_cases(toy):
    """name -> function of a script, its inputs, and the inputs whose gradients are compared."""
    from grpo_math import grpo_advantages
    from ppo_sentiment import (
        clipped_policy_loss,
        clipped_value_loss,
        gae,
        masked_mean,
        masked_whiten,
        response_lengths,
        token_logprobs,
        token_rewards,
    )
    from reward_model import pair_loss
    from rloo_tldr import kl_per_token, rloo_advantages
    from sft import next_token_loss

    torch.manual_seed(0)
    B, T, H = (16, 24, 32) if toy else (256, 64, 768)
    N = 150 if toy else 300  # more than one chunk of token_logprobs
    lengths = torch.randint(1, T + 1, (B,))
    mask = torch.arange(T) < lengths[:, None]
    values, old_values, returns, kl = torch.randn(4, B, T)
    old_logprobs = -torch.rand(B, T) * 5
    logprobs = old_logprobs + 0.3 * torch.randn(B, T)
    tokens = torch.randint(0, 20, (B, T))
    cases = {
        "response_lengths": (response_lengths, [tokens, 3]),
        "response_lengths, two stop tokens": (response_lengths, [tokens, torch.tensor([3, 7])]),
        "token_rewards": (token_rewards, [torch.randn(B), kl, lengths, 0.2]),
        "masked_mean": (masked_mean, [values, mask], [0]),
        "masked_whiten": (masked_whiten, [values, mask]),
        "gae": (gae, [kl, values, mask, 0.99, 0.95]),
        "clipped_policy_loss": (clipped_policy_loss, [logprobs, old_logprobs, values, 0.2], [0]),
        "clipped_value_loss": (clipped_value_loss, [values, old_values, returns, 0.2], [0]),
        "rloo_advantages": (rloo_advantages, [torch.randn(B), 4]),
        "grpo_advantages": (grpo_advantages, [torch.randint(0, 2, (B,)).float(), 8]),
        "pair_loss": (pair_loss, [torch.randn(B), torch.randn(B), 0.5], [0, 1]),
    }
    for estimator in ("k1", "k2", "k3"):
        cases[f"kl_per_token {estimator}"] = (kl_per_token, [logprobs, old_logprobs, estimator], [0])
    # torch has different kernels for log_softmax up to 1024 columns, beyond, and if rows are not aligned.
    for V in (1000, 1024, 1025) if toy else (1000, 1024, 1025, 50_257, 50_304):
        hidden, weight = torch.randn(N, H), torch.randn(V, H) / H**0.5
        words, bias = torch.randint(0, V, (N,)), torch.randn(V)
        logprobs_of = [hidden, weight, words, 0.7, bias]
        cases[f"token_logprobs, {V} words"] = (token_logprobs, logprobs_of, [0, 1, 4])
        losses_of = [hidden, weight, words, bias]
        cases[f"next_token_loss, {V} words"] = (next_token_loss, losses_of, [0, 1, 3])
    return cases


def math_functions(device, toy, seconds):
    """The math functions of the scripts, on this device and on the CPU, with the same inputs."""
    lengths = (40,) if toy else (33, 40, 64, 192)
    for architecture in PADDED:
        for length in lengths:
            for dtype in ("float32", "bfloat16"):
                name = f"left padding, {architecture}, {length} tokens, {dtype}"
                yield attempt(name, padding_error, device, architecture, length, dtype)
    cases = math_cases(toy)
    for name, (function, inputs, *differentiate) in cases.items():
        yield attempt(name, compare, device, function, inputs, *differentiate)
    for name, (function, inputs, *differentiate) in cases.items():
        if name.startswith(("token_logprobs", "next_token_loss")):
            # The output layer must stay in fp32.
            yield attempt(f"{name}, bf16", compare, device, in_autocast(function), inputs, *differentiate)
    yield attempt("sample_tokens", sampling_differences, device, toy)


def in_autocast(function):
    """The function with products in bf16, on whichever device its first input is."""

    def called(first, *rest):
        with bf16_autocast(first.device):
            return function(first, *rest)

    return called


def sampling_differences(device, toy):
    """Tokens that differ although the probabilities and the uniform numbers are the same."""
    from ppo_sentiment import sample_tokens

    torch.manual_seed(0)
    B, V = (64, 1100) if toy else (1024, 50_257)
    probs = (4 * torch.randn(B, V)).softmax(-1)
    uniforms = torch.rand(B)
    ours = sample_tokens(probs.to(device), uniforms.to(device)).cpu()
    theirs = sample_tokens(probs, uniforms)
    found = {
        "rows": B,
        "different tokens": (ours != theirs).sum().item(),
        "smallest probability of a token": probs.gather(1, ours[:, None]).min().item(),
    }
    return warn_above(found, "different tokens", 0.01 * B)  # rounding may move a few


PADDED = {  # small models with the head sizes of GPT-2, pythia-1b and Qwen2.5-0.5B
    "gpt2, heads of 64": dict(model_type="gpt2", n_embd=128, n_layer=3, n_head=2),
    "gpt_neox, heads of 256": dict(model_type="gpt_neox") | dict(zip(NEOX, (512, 3, 2, 256))),
    "llama, grouped heads of 64": dict(model_type="llama", num_key_value_heads=2)
    | dict(zip(NEOX, (256, 3, 4, 256))),
}
NO_DROPOUT = dict(attn_pdrop=0, embd_pdrop=0, resid_pdrop=0)  # of GPT-2


def padding_error(device, architecture, length, dtype):
    """A batch with left padding on this device, against its rows without padding in fp32 on the CPU.

    Padding positions attend to nothing. Some attention kernels then return nan, which would reach the other
    positions in the next layer, and every weight in the backward pass. The lengths are those of known
    mistakes on GPUs: 64 more than a multiple of 128 with cuDNN's attention, which the scripts switch off
    (pytorch/pytorch, issue 196678), and 1 more than a multiple of 32 (huggingface/transformers, pull request
    47678).
    """
    import transformers

    from ppo_sentiment import hidden_states, response_logprobs

    settings = NO_DROPOUT | dict(bos_token_id=0, eos_token_id=0, vocab_size=500)
    config = transformers.AutoConfig.for_model(**PADDED[architecture], **settings)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = list(model.parameters())
    B, T = 6, 16
    ids = torch.randint(0, 500, (B, length))
    starts = torch.linspace(0, length - T - 1, B).long()  # the first real token of each row
    mask = torch.arange(length) >= starts[:, None]

    states_alone = []
    for row, start in enumerate(starts.tolist()):
        states = hidden_states(model.base_model, ids[row : row + 1, start:], mask[row : row + 1, start:])
        states_alone.append(states[0, -T:])
    states_alone = torch.stack(states_alone).detach()
    logprobs = response_logprobs(model, ids, mask, T, 1.0)[0]
    gradients_on_cpu = torch.autograd.grad(logprobs.sum(), weights)

    model, ids, mask = model.to(device), ids.to(device), mask.to(device)
    weights = list(model.parameters())

    with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=dtype == "bfloat16"):
        states = hidden_states(model.base_model, ids, mask)
        logprobs = response_logprobs(model, ids, mask, T, 1.0)[0]
    gradients = [x.cpu() for x in torch.autograd.grad(logprobs.sum(), weights)]
    # In units of all weights: some have no gradient but rounding, such as the bias of the keys.
    distance = sum(((a - b) ** 2).sum() for a, b in zip(gradients, gradients_on_cpu)) ** 0.5
    size = sum((b**2).sum() for b in gradients_on_cpu) ** 0.5
    found = {
        "finite at the padding too": states.isfinite().all().item(),
        "hidden states, largest error": (states[:, -T:].cpu() - states_alone).abs().max().item(),
        "gradient, relative distance": (distance / size).item(),
    }
    return warn_above(found, "gradient, relative distance", 1e-3 if dtype == "float32" else 0.05)


# ---- 3. ratio ----------------------------------------------------------------------------------------------

SHORT_EVALUATION = {  # flags that make the evaluation before the first update short
    "ppo_sentiment": ["--num-eval-prompts", 16],
    "ppo_dialog": ["--num-eval-prompts", 16],
    "rloo_tldr": ["--num-eval-prompts", 16],
    "grpo_math": ["--num-eval-prompts", 16],
}


def first_update(script, dtype, toy):
    """One update of the default recipe."""
    module = importlib.import_module(script)
    flags = ["--total-episodes", 1, "--dtype", dtype, "--num-sample-generations", 0]
    flags += ["--save-every", 0, *SHORT_EVALUATION[script]]
    if script == "grpo_math":
        # With one step per batch the ratio is 1 by definition, and without a KL there is no reference.
        flags += ["--num-ppo-epochs", 2, "--kl-coef", 0.04]
    if toy:
        flags += ["--per-device-train-batch-size", 8]
    rows, gap = run_updates(module, flags, 1)
    wanted = ("objective/kl", "sampling/logprob_gap_mean", "sampling/logprob_gap_max", "grad_norm")
    wanted += ("loss/policy_avg", "val/ratio", "val/ratio_var", "objective/scores")
    found = {"flags": " ".join(map(str, flags)), "first log-ratio, largest": gap}
    found |= {name: rows[0][name] for name in wanted if name in rows[0]}
    # The policy still is the reference.
    return warn_above(found, "objective/kl", 1e-3 if dtype == "float32" else 0.05)


def ratio(device, toy, seconds):
    """Do rollout and update compute the same probabilities on this device?"""
    for dtype in ("float32", "bfloat16"):
        for script in RL:
            yield attempt(f"{script}, {dtype}", first_update, script, dtype, toy)


# ---- 4. defaults -------------------------------------------------------------------------------------------


def episodes_per_update(script):
    """The batch of the default recipe."""
    args = importlib.import_module(script).RECIPES["tiny"]
    return args.per_device_train_batch_size * args.gradient_accumulation_steps * args.num_mini_batches


def defaults(device, toy, seconds):
    """`python X.py --output-dir ...` with fewer updates, each as a process of its own."""
    updates = 1 if toy else 25
    epochs = 0.02 if toy else 1.0
    with tempfile.TemporaryDirectory() as root:
        for script in (*RL, "sft", "reward_model"):
            folder = Path(root, script)
            words = [sys.executable, f"{script}.py", "--output-dir", folder]
            if script in RL:
                words += ["--total-episodes", updates * episodes_per_update(script)]
            else:
                words += ["--num-train-epochs", epochs]
            if toy:
                words += SHORT_EVALUATION.get(script, ["--num-eval-prompts", 16])
            yield attempt(script, run_script, words, folder, 60)


# ---- 5. episodes -------------------------------------------------------------------------------------------


def gpt2_imdb_updates(toy, device):
    """The recipe gpt2-imdb, with GPT-2 and DistilBERT of random weights and the reviews of data/reviews.

    All that the recipe computes is computed, but the learning rate is 0.
    """
    import ppo_sentiment

    warm_up, measured = (1, 2) if toy else (3, 20)
    with tempfile.TemporaryDirectory() as folder, random_weights(device):
        # The reward model must read texts as long as the real ones: so every id has a text.
        policy = make_folder("gpt2-124m", toy, folder, all_words=True)
        labels = {"id2label": {0: "NEGATIVE", 1: "POSITIVE"}, "label2id": {"NEGATIVE": 0, "POSITIVE": 1}}
        reward = make_folder("distilbert-66m", toy, folder, all_words=True, **labels)
        flags = ["gpt2-imdb", "--model-name-or-path", policy, "--reward-model-path", reward]
        flags += ["--dataset-name", ROOT / "data/reviews", "--min-text-length", 0]
        flags += ["--dtype", "bfloat16", "--num-sample-generations", 0, "--save-every", 0]
        flags += ["--learning-rate", 0]  # or the policy could learn to write shorter responses
        reset_peak_memory()
        rows, gap = run_updates(ppo_sentiment, flags, warm_up + measured)
    first, rows = rows[0], rows[warm_up:]
    batch = rows[0]["episode"] // rows[0]["update"]
    found = {"episodes per update": batch, "updates measured": len(rows), "first log-ratio, largest": gap}
    for name in ("perf/seconds", "perf/rollout_seconds", "perf/train_seconds"):
        values = [row[name] for row in rows]
        found[name] = {
            "median": statistics.median(values),
            "smallest": min(values),
            "largest": max(values),
        }
    total = 51_200 / batch * found["perf/seconds"]["median"]
    found |= {
        "seconds of the first update": first["perf/seconds"],
        "51,200 episodes, extrapolated, minutes": total / 60,
        "tokens per response": statistics.mean(row["completions/mean_length"] for row in rows),
        "sampling/logprob_gap_max": max(row["sampling/logprob_gap_max"] for row in rows),
        "objective/kl, last": rows[-1]["objective/kl"],
    }
    return found | peak_memory()


def episodes(device, toy, seconds):
    """How long would the published experiment take?"""
    name = name_of("gpt2-124m", toy)
    yield attempt(f"recipe gpt2-imdb, {name}, bf16", gpt2_imdb_updates, toy, device)


# ---- 6. decode ---------------------------------------------------------------------------------------------


def decode(device, toy, seconds):
    """Tokens per second of ppo_sentiment's generate and of transformers' generate, in the same process.

    All sample from the whole distribution, and all rows get all tokens. Autocast, with weights in fp32, is
    how a policy in training must generate. Theirs also runs with weights in bf16.
    """
    import ppo_sentiment

    batch = 4 if toy else 64
    for shape in ("gpt2-124m", "pythia-1b"):
        model = make_model(ppo_sentiment, shape, toy, device)
        name = f"{name_of(shape, toy)}, batch {batch}"
        yield attempt(f"{name}, ours, autocast", decode_ours, model, batch, toy, device)
        yield attempt(f"{name}, theirs, autocast", decode_theirs, model, batch, toy, device)
        model.bfloat16()
        yield attempt(f"{name}, theirs, weights in bf16", decode_theirs, model, batch, toy, device)
        del model
        free_memory()


def decode_sizes(toy):
    """Tokens of the prompt and of the response."""
    return (8, 8) if toy else (64, 64)


def draw_prompts(batch, toy, device):
    """Random ids, and a mask without padding."""
    ids = torch.randint(0, 1000, (batch, decode_sizes(toy)[0]), generator=torch.Generator().manual_seed(0))
    return ids.to(device), torch.ones(ids.shape, dtype=torch.bool, device=device)


def decode_ours(model, batch, toy, device):
    from ppo_sentiment import generate

    T = decode_sizes(toy)[1]
    ids, mask = draw_prompts(batch, toy, device)
    uniforms = torch.rand(batch, T, generator=torch.Generator().manual_seed(1)).to(device)
    limits = torch.full((batch,), T, device=device)

    def sample():
        with bf16_autocast(device):
            generate(model, ids, mask, limits, uniforms, -1, 1.0)

    return decode_speed(sample, batch * T)


def decode_theirs(model, batch, toy, device):
    C, T = decode_sizes(toy)
    ids, mask = draw_prompts(batch, toy, device)
    model.generation_config.eos_token_id = None  # no response ends early
    arguments = dict(do_sample=True, top_k=0, top_p=1.0, temperature=1.0, max_new_tokens=T, pad_token_id=0)
    has_fp32_weights = model.dtype == torch.float32

    @torch.no_grad()
    def sample():
        with bf16_autocast(device) if has_fp32_weights else contextlib.nullcontext():
            tokens = model.generate(ids, attention_mask=mask.long(), **arguments)
        if tokens.shape[1] != C + T:
            raise ValueError(f"{tokens.shape[1] - C} new tokens instead of {T}")

    return decode_speed(sample, batch * T)


def decode_speed(sample, num_tokens):
    reset_peak_memory()
    start = time.perf_counter()
    taken = seconds_of(sample, repeats=2)
    found = {"tokens per second": num_tokens / taken, "seconds": taken}
    return found | {"seconds with warm-up": time.perf_counter() - start} | peak_memory()


# ---- 7. mfu ------------------------------------------------------------------------------------------------


def mfu(device, toy, seconds):
    """Model FLOP utilization of an update of pythia-1b's shape, in bf16 autocast."""
    import rloo_tldr

    size = 256 if toy else 8192
    name = f"bf16 product of two {size} x {size} matrices"
    _, product = attempt(name, product_rate, size, device)
    yield name, product
    model = make_model(rloo_tldr, "pythia-1b", toy, device)
    shape = name_of("pythia-1b", toy)
    peak = product.get("FLOP per second")
    few, many = (1, 2) if toy else (8, 32)
    for rows, is_padded in ((few, False), (many, False), (many, True)):
        name = f"{shape}, {rows} rows, {'left' if is_padded else 'no'} padding"
        yield attempt(name, update_rate, model, rows, is_padded, toy, device, peak)


def product_rate(size, device):
    """The rate of a large matrix product of random numbers: what the GPU can do."""
    a, b = torch.randn(2, size, size, device=device).bfloat16()
    repeats = 20

    def multiply():
        for _ in range(repeats):
            a @ b

    return {"FLOP per second": repeats * 2 * size**3 / seconds_of(multiply)}


def update_rate(model, rows, is_padded, toy, device, peak):
    """One optimizer step: forward and backward of response_logprobs, the clipped loss, and Adam.

    Counted, per step: 6 x parameters of the layers x tokens, 6 x parameters of the output layer x tokens of
    the responses, and 6 x layers x width x length x tokens for attention (12, halved since it is causal).
    What is computed twice, such as logits, counts once. Padding, up to 8 tokens of a row, makes attention use
    a mask, as with real prompts.
    """
    import rloo_tldr

    L, T = (32, 8) if toy else (512, 64)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 1000, (rows, L), generator=generator).to(device)
    padding = torch.arange(rows) % 8 if is_padded else torch.zeros(rows)
    mask = (torch.arange(L) >= padding[:, None]).to(device)
    advantages = torch.randn(rows, generator=generator).to(device)
    args = rloo_tldr.RECIPES["tldr-pythia-1b"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    with torch.no_grad(), bf16_autocast(device):
        old_logprobs = rloo_tldr.group_logprobs(model, ids, mask, T, args.temperature)[0]

    def gradient():
        with bf16_autocast(device):
            logprobs, _ = rloo_tldr.group_logprobs(model, ids, mask, T, args.temperature)
        losses = rloo_tldr.clipped_policy_loss(
            logprobs.sum(1), old_logprobs.sum(1), advantages, args.cliprange
        )
        losses.mean().backward()
        return losses

    def step():
        gradient()
        optimizer.step()
        optimizer.zero_grad()

    reset_peak_memory()
    taken = seconds_of(step)
    memory = peak_memory()
    gradient_seconds = seconds_of(gradient)
    optimizer.zero_grad()
    if not gradient().isfinite().all():
        raise ValueError("the losses are not finite")
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    if not math.isfinite(norm):
        raise ValueError("the gradient is not finite")
    optimizer.zero_grad()
    layers, head = layer_parameters(model)
    attention = 6 * model.config.num_hidden_layers * model.config.hidden_size * L * rows * L
    flop = 6 * layers * rows * L + 6 * head * rows * T + attention
    found = {
        "rows x tokens": f"{rows} x {L}, of which {T} are the response",
        "parameters of layers, of the output layer": [layers, head],
        "FLOP per step": flop,
        "seconds per step": taken,
        "seconds of forward and backward": gradient_seconds,
        "FLOP per second": flop / taken,
    }
    if peak:
        found["MFU, with Adam"] = flop / taken / peak
        found["MFU, forward and backward only"] = flop / gradient_seconds / peak
    return found | memory


# ---- 8. kernels - -------------------------------------------------------------------------------------------


def kernels(device, toy, seconds):
    """What one more generated token costs: counts of a long response minus those of a short one."""
    import ppo_sentiment

    if device != "cuda":
        yield "all", "skipped: a CPU has no kernels to count"
        return
    for shape in ("gpt2-124m", "pythia-1b"):
        model = make_model(ppo_sentiment, shape, toy, device)
        yield attempt(f"{name_of(shape, toy)}, kernels per token", kernels_per_token, model, toy, device)
        del model
        free_memory()


def generate_tokens(model, T, toy, device):
    """T tokens for each of a batch of rows, none of which ends early. They are one step of the batch each."""
    from ppo_sentiment import generate

    batch = 4 if toy else 64
    ids, mask = draw_prompts(batch, toy, device)
    limits = torch.full((batch,), T, device=device)
    uniforms = torch.rand(batch, T, generator=torch.Generator().manual_seed(0)).to(device)
    with bf16_autocast(device):
        generate(model, ids, mask, limits, uniforms, -1, 1.0)
    synchronize()


def profiled(function):
    """-> Counter of what happened, seconds of each kernel name, seconds by the clock"""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        start = time.perf_counter()
        function()
        synchronize()
        taken = time.perf_counter() - start
    counts, kernel_seconds = Counter(), Counter()
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            if event.name.startswith(("Memcpy", "Memset")):
                counts[event.name] += 1
            else:
                counts["kernels"] += 1
                kernel_seconds[event.name[:110]] += event.time_range.elapsed_us() / 1e6
        elif event.name.startswith("cuda") and "Synchronize" in event.name:
            counts[event.name] += 1
    return counts, kernel_seconds, taken


def longest(kernel_seconds, count=8):
    return {name: f"{x * 1e3:.3f} ms" for name, x in kernel_seconds.most_common(count)}


def kernels_per_token(model, toy, device):
    generate_tokens(model, 4, toy, device)  # warm-up
    short, short_seconds, short_taken = profiled(lambda: generate_tokens(model, 4, toy, device))
    long, long_seconds, long_taken = profiled(lambda: generate_tokens(model, 20, toy, device))
    found = {f"{name} per token": (long[name] - short[name]) / 16 for name in long}
    busy = long_seconds.total() - short_seconds.total()
    found["milliseconds of kernels per token"] = busy / 16 * 1e3
    found["milliseconds per token by the clock, profiled"] = (long_taken - short_taken) / 16 * 1e3
    unprofiled = seconds_of(lambda: generate_tokens(model, 20, toy, device))
    unprofiled -= seconds_of(lambda: generate_tokens(model, 4, toy, device))
    found["milliseconds per token by the clock"] = unprofiled / 16 * 1e3
    found["the GPU is busy"] = busy / unprofiled
    found["longest kernels of 20 tokens"] = longest(long_seconds)
    return found


# ---- 9. memory ---------------------------------------------------------------------------------------------

MEMORY_FLAGS = ["", "--gradient-checkpointing", "--lora-r 16", "--lora-r 16 --gradient-checkpointing"]


def update_memory(shape, changes, toy, device):
    """One update of 64 responses of rloo_tldr.py, 32 per pass, on prompts of data/tldr. As in memory.py."""
    import rloo_tldr

    batch = 8 if toy else 64
    with tempfile.TemporaryDirectory() as folder, random_weights(device):
        flags = ["tiny", "--model-name-or-path", make_folder(shape, toy, folder), *changes.split()]
        flags += ["--total-episodes", batch, "--per-device-train-batch-size", batch // 2]
        flags += ["--local-rollout-forward-batch-size", batch, "--num-eval-prompts", 4]
        flags += ["--num-sample-generations", 0, "--save-every", 0, "--dtype", "bfloat16"]
        reset_peak_memory()
        rows, gap = run_updates(rloo_tldr, flags, 1)
    found = {"seconds of the update": rows[0]["perf/seconds"], "first log-ratio, largest": gap}
    return found | peak_memory()


def memory(device, toy, seconds):
    """Peak memory by size, with LoRA and gradient checkpointing, in bf16."""
    for shape in ("gpt2-124m", "pythia-410m", "pythia-1b"):
        for changes in MEMORY_FLAGS:
            name = f"{name_of(shape, toy)} {changes}".strip()
            yield attempt(name, update_memory, shape, changes, toy, device)


# ---- 10. launch --------------------------------------------------------------------------------------------


def launch(device, toy, seconds):
    """What else a user may do: accelerate launch, 8-bit weights, and continue a run."""
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", 1]
    launcher += ["--num_machines", 1, "--mixed_precision", "no", "--dynamo_backend", "no"]
    if device == "cpu":
        launcher += ["--cpu"]
    batch = ["--save-every", 1, "--num-sample-generations", 0]
    if toy:
        batch += ["--per-device-train-batch-size", 4]
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root, "launched")
        words = [*launcher, "rloo_tldr.py", "--output-dir", folder, "--total-episodes", 1, *batch]
        words += SHORT_EVALUATION["rloo_tldr"]
        yield attempt("accelerate launch rloo_tldr.py", run_script, words, folder, 60)

        short = [*batch, *SHORT_EVALUATION["ppo_sentiment"]]
        script = [sys.executable, "ppo_sentiment.py"]
        if importlib.util.find_spec("bitsandbytes") is None:
            yield "ppo_sentiment.py --lora-r 8 --load-in-8bit", "skipped: bitsandbytes is not installed"
        else:
            folder = Path(root, "8bit")
            words = [*script, "--output-dir", folder, "--total-episodes", 1, *short]
            words += ["--lora-r", 8, "--load-in-8bit", "--dtype", "auto"]
            yield attempt("ppo_sentiment.py --lora-r 8 --load-in-8bit", run_script, words, folder, 60)

        folder = Path(root, "resumed")
        words = [*script, "--output-dir", folder, "--total-episodes", 1, *short]
        yield attempt("ppo_sentiment.py, one update", run_script, words, folder, 60)
        two = 20 if toy else 2 * episodes_per_update("ppo_sentiment")
        words = [*script, "--resume", folder, "--total-episodes", two]
        yield attempt("ppo_sentiment.py --resume, more updates", run_script, words, folder, 60)

        for kind in ("ddp", "fsdp2", "zero2", "zero3"):
            if torch.cuda.device_count() < 2:
                yield f"two processes, {kind}", "skipped: there are not two GPUs"
                continue
            folder = Path(root, kind)
            config = ["--config_file", f"accelerate_configs/{kind}.yaml", "--num_processes", 2]
            words = [sys.executable, "-m", "accelerate.commands.launch", *config, "rloo_tldr.py"]
            words += ["--output-dir", folder, "--total-episodes", 1, *batch, *SHORT_EVALUATION["rloo_tldr"]]
            yield attempt(f"two processes, {kind}", run_script, words, folder, 60)


# ---- All sections ------------------------------------------------------------------------------------------

SECTIONS = {  # in the order of importance: name -> function and time limit in seconds
    "versions": (versions, 60),
    "math": (math_functions, 75),
    "ratio": (ratio, 90),
    "defaults": (defaults, 200),
    "episodes": (episodes, 90),
    "decode": (decode, 90),
    "mfu": (mfu, 45),
    "kernels": (kernels, 45),
    "memory": (memory, 90),
    "launch": (launch, 80),
}
MIN_SECONDS = 15  # less time than this is not worth a start


def clean(x):
    """Numbers with six digits, and text instead of nan and infinity, which JSON does not have."""
    if isinstance(x, dict):
        return {str(key): clean(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [clean(value) for value in x]
    if isinstance(x, float):
        return float(f"{x:.6g}") if math.isfinite(x) else str(x)
    if x is None or isinstance(x, (bool, int, str)):
        return x
    return str(x)


def run_items(name, device, toy, seconds, file):
    """Run one section in this process, and append each item to a file as soon as it is done."""
    function, _ = SECTIONS[name]
    torch.backends.cuda.enable_cudnn_sdp(False)  # as the scripts' start_accelerator
    if name != "math":
        torch.set_float32_matmul_precision("high")
    for item, value in function(device, toy, seconds):
        with open(file, "a") as lines:
            lines.write(json.dumps({item: clean(value)}) + "\n")


def section_command(name, args, seconds, file):
    """The command that runs one section in a process of its own."""
    words = [sys.executable, __file__, args.out, "--section", name, "--items", file]
    words += ["--device", args.device, "--seconds", seconds]
    return [*words, "--toy"] if args.toy else words


def section_environment(args):
    """No network, no progress bars. Without --device cuda, the scripts must not see a GPU."""
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}
    env |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "110"}
    env["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # as the scripts' start_accelerator
    if args.device != "cuda":
        env["CUDA_VISIBLE_DEVICES"] = ""
    return env


def run_section(name, args, seconds):
    """Run a section until its time is over. -> dict(status, seconds, items, and error if it failed)"""
    start = time.time()
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder, "items.jsonl"), Path(folder, "log.txt")
        with open(log, "w") as output:
            process = subprocess.Popen(
                [str(word) for word in section_command(name, args, seconds, file)],
                cwd=ROOT,
                env=section_environment(args),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,  # so that the scripts it starts end with it
            )
            try:
                code = process.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        items = {}
        for line in file.read_text().splitlines() if file.exists() else []:
            with contextlib.suppress(json.JSONDecodeError):  # the last line may be torn
                items |= json.loads(line)
        text = log.read_text(errors="replace")
    failed = [item for item, value in items.items() if isinstance(value, dict) and "error" in value]
    warned = [item for item, value in items.items() if isinstance(value, dict) and "warning" in value]
    result = {"status": "ok", "seconds": round(time.time() - start, 1), "items": items}
    if code is None:
        result["status"] = "out of time"
        result["error"] = last_lines(text)
    elif code != 0:
        result["status"] = "failed"
        result["error"] = last_lines(text)
    elif failed:
        result["status"] = f"failed: {', '.join(failed)}"
    elif warned:
        result["status"] = f"warnings: {', '.join(warned)}"
    return result


def write(report, out):
    """Replace the file at once, so that it is never half written."""
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = out.with_name(f".{out.name}")
    draft.write_text(json.dumps(report, indent=1) + "\n")
    os.replace(draft, out)


def commit():
    """The commit of this repository; "" if there is none."""
    try:
        return subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip()
    except OSError:
        return ""


def show(name, result):
    """A section on the screen, an item per line; of many items only those with an error or a warning."""
    print(f"{name}: {result['status'].split(':')[0]} ({result['seconds']} s)")
    for item, value in result["items"].items():
        text, is_bad = str(value), False
        if isinstance(value, dict):
            is_bad = "error" in value or "warning" in value
            text = value.get("error", text).splitlines()[-1]
        if is_bad or len(result["items"]) <= 16:
            print(f"    {item}: {text[:300]}")
    if "error" in result:
        print("    " + result["error"].replace("\n", "\n    "))
    sys.stdout.flush()


def run_all(args):
    """Run the sections, and write the file after each. -> report"""
    start = time.time()
    report = {
        "command": " ".join(["bash benchmarks/gpu.sh", *args.words]),
        "device": args.device,
        "sizes": "toy" if args.toy else "full",
        "note": TOY_NOTE if args.toy else "measured with random inputs, and models as the sections say",
        "commit": commit(),
        "seconds": 0.0,
        "sections": {},
    }
    for name, (_, limit) in SECTIONS.items():
        if args.only and name not in args.only:
            continue
        seconds = min(limit, args.minutes * 60 - (time.time() - start))
        if seconds < MIN_SECONDS:
            result = {"status": "not run: no time left", "seconds": 0.0, "items": {}}
        else:
            result = run_section(name, args, seconds)
        cuda = result["items"].get("CUDA", {})
        has_no_gpu = name == "versions" and args.device == "cuda" and not cuda.get("available", True)
        if has_no_gpu:
            result["status"] = "torch finds no GPU; to test this program: --device cpu --toy"
        report["sections"][name] = result
        report["seconds"] = round(time.time() - start, 1)
        write(report, args.out)
        show(name, result)
        if has_no_gpu:
            break
    bad = {name: part["status"] for name, part in report["sections"].items() if part["status"] != "ok"}
    print(f"{report['seconds']} s, {args.out}")
    print(f"look at {bad}" if bad else "everything ran")
    return report


def parse_args(words):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", nargs="?", default=str(ROOT / "results/gpu.json"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--toy", action="store_true", help="sizes that a CPU can run")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, help="only these sections")
    parser.add_argument("--minutes", type=float, default=9.5, help="for everything")
    # One section, in a process that the program starts itself:
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--items", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    args.out = str(Path(args.out).resolve())
    args.words = words
    return args


def main(words):
    args = parse_args(words)
    if args.section:
        return run_items(args.section, args.device, args.toy, args.seconds, args.items)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # and end the section too
    run_all(args)


if __name__ == "__main__":
    main(sys.argv[1:])
