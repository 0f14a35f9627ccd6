"""How much memory a run needs per GPU, by arithmetic.

    python benchmarks/scale.py                                                          # tables of docs/scale.md
    python benchmarks/scale.py llama-7b --algorithm rloo --gpus 8 --sharding zero2      # the parts of one case
    python benchmarks/scale.py pythia-1b --lora-r 16 --gradient-checkpointing           # --help lists all flags

Memory is in bytes, or in GB of 10^9 bytes. tests/documents/test_scale.py compares the peaks with those of
measured runs.
"""

import argparse
import math
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Literal, get_args

FP32, BF16, INT8 = 4, 2, 1  # bytes of a number
GB = 1e9

USABLE = 0.9  # share of a GPU's memory that a run may plan with: CUDA, NCCL and gaps take the rest
LOGITS_AT_ONCE = 2**26  # token_logprobs on a GPU
DEEPSPEED_BUCKET = 500_000_000  # numbers: reduce_bucket_size
DEEPSPEED_LIVE = 1_000_000_000  # numbers: stage3_max_live_parameters and stage3_max_reuse_distance
GPUS = (80, 141)  # GB: an H100 SXM, an H200
SMALLER_GPUS = (24, 48, 80)  # GB, of the table of long responses: an RTX 4090, an L40S, an H100


# ---- Models ------------------------------------------------------------------------------------------------


@dataclass
class Model:
    family: str  # gpt2, gpt_neox, llama or qwen2
    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp_width: int
    vocabulary: int
    positions: int = 0  # learned positions
    has_own_head: bool = (
        False  # qwen2: the output layer is not the matrix of the embeddings, as it is up to 3B
    )

    @property
    def is_llama(self):
        return self.family in ("llama", "qwen2")

    @property
    def kv_width(self):
        return self.kv_heads * (self.width // self.heads)

    @property
    def linear_layers(self):
        """Inputs and outputs of the linear layers in one transformer layer."""
        W, M, K = self.width, self.mlp_width, self.kv_width
        if self.is_llama:
            return [(W, W), (W, K), (W, K), (W, W), (W, M), (W, M), (M, W)]  # q, k, v, o, gate, up, down
        return [(W, 3 * W), (W, W), (W, M), (M, W)]  # q with k and v, output, up, down

    @property
    def linear_weights(self):
        """Parameters of the linear layers in one transformer layer."""
        weights = sum(inputs * outputs for inputs, outputs in self.linear_layers)
        with_biases = {"llama": [], "qwen2": self.linear_layers[:3]}.get(self.family, self.linear_layers)
        return weights + sum(outputs for _, outputs in with_biases)

    @property
    def norm(self):
        return self.width if self.is_llama else 2 * self.width

    @property
    def layer(self):
        """Parameters of one transformer layer."""
        return self.linear_weights + 2 * self.norm

    @property
    def embeddings(self):
        return (self.vocabulary + self.positions) * self.width

    @property
    def head(self):
        """Parameters of the output layer, if they are not those of the embeddings."""
        shares_embeddings = self.family in ("gpt2", "qwen2") and not self.has_own_head
        return 0 if shares_embeddings else self.vocabulary * self.width

    @property
    def parameters(self):
        return self.layers * self.layer + self.norm + self.embeddings + self.head


MODELS = {
    "gpt2": Model("gpt2", 12, 768, 12, 12, 3072, 50257, 1024),
    "qwen2.5-0.5b": Model("qwen2", 24, 896, 14, 2, 4864, 151936),
    "qwen2.5-1.5b": Model("qwen2", 28, 1536, 12, 2, 8960, 151936),
    "qwen2.5-3b": Model("qwen2", 36, 2048, 16, 2, 11008, 151936),
    "qwen2.5-7b": Model("qwen2", 28, 3584, 28, 4, 18944, 152064, has_own_head=True),
    "pythia-1b": Model("gpt_neox", 16, 2048, 8, 8, 8192, 50304),
    "llama-7b": Model("llama", 32, 4096, 32, 32, 11008, 32000),  # Llama 2
    "llama-70b": Model("llama", 80, 8192, 64, 8, 28672, 128256),  # Llama 3
}


# ---- A case ------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """Names and meanings of the script's flags, if it has such a flag."""

    model: Model
    algorithm: Literal["ppo", "rloo", "grpo", "sft", "reward_model"] = "rloo"
    gpus: int = 1
    sharding: Literal["ddp", "zero2", "fsdp2", "zero3"] = "ddp"  # the scripts have ddp and zero2
    gpu_memory: int = 80  # GB
    reward_model: Model | None = None  # None: a function without a model
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    checkpoint: Literal["bfloat16", "float32"] = (
        "bfloat16"  # of the policy: what round_frozen_weights can round
    )
    lora_r: int = 0  # on all linear layers
    gradient_checkpointing: bool = False
    load_in_8bit: bool = False
    num_shared_layers: int = 0
    kl_coef: float = 0.05  # GRPO with 0 has no reference
    per_device_train_batch_size: int = 4
    gradient_accumulation_steps: int = 1
    num_mini_batches: int = 16
    local_rollout_forward_batch_size: int = 64
    responses_per_prompt: int = 4  # --rloo-k, --num-generations; PPO has 1
    prompt_length: int = 512
    response_length: int = 512

    def __post_init__(self):
        if self.algorithm == "ppo":
            self.responses_per_prompt = 1

    @property
    def number(self):
        """Bytes of a number in the products of the layers."""
        return BF16 if self.dtype == "bfloat16" else FP32

    @property
    def frozen_number(self):
        """Bytes of a frozen weight of the policy's linear layers, if it is not in 8 bit."""
        return self.number if self.checkpoint == "bfloat16" else FP32

    @property
    def is_recorded(self):
        """Whether a GPU records token steps. All models here can be recorded, but not 8-bit layers."""
        return not (self.lora_r and self.load_in_8bit)

    @property
    def prompt_number(self):
        """Bytes of a number in the cache of a forward pass. Rotary positions are in fp32: so are keys and values."""
        return self.number if self.model.family == "gpt2" else FP32

    @property
    def cache_number(self):
        """Bytes of a number in the cache of a token step. A recorded step keeps it in bf16."""
        return self.number if self.is_recorded else self.prompt_number

    @property
    def is_rl(self):
        return self.algorithm in ("ppo", "rloo", "grpo")

    @property
    def shares_prompts(self):
        """The update reads a prompt once per group. Gradient checkpointing excludes the cache it needs."""
        return self.algorithm in ("rloo", "grpo") and not self.gradient_checkpointing

    @property
    def has_copy(self):
        """FSDP2 and ZeRO-3 cut weights into shards. Shards cannot sample, so the learner is a copy of the policy."""
        return self.sharding in ("fsdp2", "zero3") and self.gpus > 1

    @property
    def shards(self):
        """The number of parts that gradients and optimizer states are cut into."""
        return 1 if self.sharding == "ddp" else self.gpus

    @property
    def length(self):
        return self.prompt_length + self.response_length

    @property
    def local_batch(self):
        """Responses, or rows, of one process and update."""
        minibatches = self.num_mini_batches if self.is_rl else 1
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * minibatches

    @property
    def has_head(self):
        """A reward model has one output instead of the vocabulary."""
        return self.algorithm != "reward_model"

    @property
    def has_reference(self):
        """With LoRA, the reference is the policy without its adapter."""
        if self.lora_r or not self.is_rl:
            return False
        return self.algorithm != "grpo" or self.kl_coef > 0


# ---- Numbers of parameters ---------------------------------------------------------------------------------


def trained_linear(case):
    """Parameters of the linear layers of the transformer that are trained."""
    m = case.model
    if case.lora_r:
        return m.layers * sum(case.lora_r * (inputs + outputs) for inputs, outputs in m.linear_layers)
    return (m.layers - case.num_shared_layers) * m.linear_weights


def trained(case):
    """All parameters that are trained."""
    m = case.model
    value_head = m.width + 1 if case.algorithm == "ppo" else 0
    if case.lora_r:
        return trained_linear(case) + value_head
    norms = 2 * (m.layers - case.num_shared_layers) * m.norm + m.norm
    embeddings = 0 if case.num_shared_layers else m.embeddings
    head = m.head if case.has_head else m.width
    return trained_linear(case) + norms + embeddings + head + value_head


def frozen_bytes(model, layers, embeddings, head, number, eight_bit=False):
    """Frozen weights: linear layers have `number` bytes per weight, or 1 in 8 bit; everything else is in fp32.

    layers, embeddings, head: how many layers, and whether these parts are there; norms go with the layers.
    """
    linear = INT8 if eight_bit else number
    total = layers * (linear * model.linear_weights + FP32 * 2 * model.norm)
    if embeddings:
        total += FP32 * model.embeddings
    if head:
        total += FP32 * (model.head + model.norm)
    return total


# ---- Memory ------------------------------------------------------------------------------------------------


def policy_bytes(case, number=FP32):
    """A whole policy: its trained weights and its frozen ones. number: bytes of a frozen linear weight"""
    m = case.model
    if case.lora_r:
        frozen = frozen_bytes(m, m.layers, True, case.has_head, number, case.load_in_8bit)
    elif case.num_shared_layers:
        frozen = frozen_bytes(m, case.num_shared_layers, True, False, number)
    else:
        frozen = 0
    return FP32 * trained(case) + frozen


def reference_bytes(case):
    m = case.model
    if not case.has_reference:
        return 0
    if case.num_shared_layers:
        return frozen_bytes(m, m.layers - case.num_shared_layers, False, True, FP32)
    return frozen_bytes(m, m.layers, True, True, case.number, case.load_in_8bit)


def reward_model_bytes(case):
    m = case.reward_model
    if m is None or not case.is_rl:
        return 0
    number = FP32 if case.algorithm == "ppo" else case.number  # classifiers run in fp32
    return frozen_bytes(m, m.layers, True, False, number)


def bf16_copies(case):
    """Autocast rounds each trained weight of a linear layer to bf16, and keeps the copy for its whole block.

    It does so with shards too: the copies of all layers stay, although the gathered layers go. The output
    layer stays in fp32.
    """
    return 0 if case.dtype == "float32" else BF16 * trained_linear(case)


def bf16_copies_for_backward(case):
    """Autocast rounds frozen weights in fp32 each time. With LoRA, the backward pass needs the copy, so it is saved.

    8-bit layers save none. With checkpointing, only one layer has copies at a time.
    """
    if case.dtype == "float32" or not case.lora_r or case.load_in_8bit:
        return 0
    if case.frozen_number == BF16 and not case.has_copy:
        return 0
    weights = sum(inputs * outputs for inputs, outputs in case.model.linear_layers)
    return BF16 * weights * (1 if case.gradient_checkpointing else case.model.layers)


def kv_cache(case, rows, tokens, number):
    """Keys and values of all layers. number: bytes of a number"""
    return 2 * case.model.layers * case.model.kv_width * rows * tokens * number


def cache_columns(case):
    """Of the last token step. A recorded step reads the last token too, and needs a multiple of 8."""
    return case.length + -case.length % 8 if case.is_recorded else case.length - 1


def layer_activations(case, rows, tokens, keys):
    """What one layer saves for its backward pass. Attention saves its inputs and its mask, not its matrix.

    Normalization works in fp32. The linear layers and attention save their inputs in bf16. keys: tokens that
    attention reads in each row. Their keys and values are repeated for all heads of a group (GQA), because
    there is a mask.
    """
    m, b = case.model, case.number
    W, M = m.width, m.mlp_width
    if m.family == "gpt2":
        fp32 = 2 * W + 4 + m.heads
        products = 4 * W + 2 * M
        if keys > tokens:  # the cache has copies of k and v, and q is a view of a tensor with all three
            products += 2 * W
    elif m.family == "gpt_neox":
        fp32 = W + 4 + m.heads
        products = 7 * W + 2 * M
    else:
        fp32 = 4 * W + 2 + m.heads
        casts = (
            6 if case.dtype == "bfloat16" else 3
        )  # q, k, v, gate and up round their input, each for itself
        products = (casts + 1) * W + 4 * M
    attention = 2 * W * keys + tokens * keys
    return rows * (tokens * (FP32 * fp32 + b * products) + b * attention)


def prompts_per_pass(case):
    """Prompts that the update reads in one pass: one per group, or one per response if it cannot share them."""
    if not case.shares_prompts:
        return case.per_device_train_batch_size
    return math.ceil(case.per_device_train_batch_size / case.responses_per_prompt)


def activations(case):
    """Of all layers in one forward and backward pass. With checkpointing: each layer's input, and one layer."""
    rows, m = case.per_device_train_batch_size, case.model
    layers = m.layers - case.num_shared_layers
    if case.gradient_checkpointing:
        inputs = layers * rows * case.length * m.width * FP32
        return inputs + layer_activations(case, rows, case.length, case.length)
    if not case.shares_prompts:
        return layers * layer_activations(case, rows, case.length, case.length)
    C, T = case.prompt_length, case.response_length
    prompts = layer_activations(case, prompts_per_pass(case), C, C)
    return layers * (prompts + layer_activations(case, rows, T, C + T))


def one_layer_without_gradient(case, model, tokens):
    """An estimate: the residual stream and three more of its size in fp32, and three outputs of the MLP."""
    return tokens * (FP32 * 4 * model.width + case.number * 3 * model.mlp_width)


def logits_of_update(case):
    """What the output layer holds, all fp32: the logits that are kept, three times the chunk whose gradient is
    computed (or its gradient alone, while that of the weights is), and the gradient of its weights: that of
    one chunk, and the sum so far.
    """
    m = case.model
    if not case.has_head:
        return 0
    tokens = case.length if case.algorithm == "sft" else case.response_length
    numbers = case.per_device_train_batch_size * tokens * m.vocabulary
    chunk = min(numbers, LOGITS_AT_ONCE)
    is_trained = not case.lora_r and not (case.num_shared_layers and m.head == 0)
    gradient = m.vocabulary * m.width if is_trained else 0
    if numbers <= chunk:
        return FP32 * max(3 * chunk, chunk + gradient)
    last = min(numbers - chunk, chunk)  # of the chunks that are computed again
    return FP32 * max(3 * chunk + gradient, chunk + 3 * last + gradient, 2 * chunk + 2 * gradient)


def states(case):
    """Gradients, optimizer and what comes with sharding. -> two dicts, part -> bytes: held always, and in the update

    The bytes per parameter were counted on a CPU, in runs of two processes (torch 2.13, deepspeed 0.19.8).
    """
    weights, N = FP32 * trained(case), case.shards
    accumulates = case.gradient_accumulation_steps > 1
    adam = {"Adam": 2 * weights / N}
    if case.sharding == "ddp":
        gradients = {"gradients": weights}
        # With several processes, gradients are views of DDP's buckets, which are never freed.
        return (adam, gradients) if case.gpus == 1 else (adam | gradients, {})
    if case.sharding == "fsdp2":  # with accumulation, it keeps whole gradients until the last pass
        gradients = weights if accumulates else weights / N
        return adam, {"gradients": gradients, "gathered layers": gathered(case)}
    # DeepSpeed copies the weights that this process updates, although they are in fp32 already. It allocates a
    # whole bucket, and copies what is in it (or a larger gradient, which is not put in it) if that belongs to
    # several processes. The optimizer step copies the gradients too, but by then the activations are gone.
    always = adam | {"fp32 copy of a shard": weights / N}
    bucket = FP32 * DEEPSPEED_BUCKET
    copied = min(max(bucket, FP32 * case.model.embeddings), weights)
    if case.sharding == "zero2":  # with accumulation: the gradients of this pass, and the sum of those before
        gradients = (2 if accumulates else 1) * weights / N
        return always, {"gradients": gradients, "buckets": bucket + copied}
    always |= {"gradients": weights / N, "bucket": bucket}
    return always, {"copy of the bucket": copied, "gathered layers": gathered(case)}


def gathered(case):
    """FSDP2: two layers, embeddings and output layer are whole, and so are their gradients. ZeRO-3 does not release
    layers that it needs again soon.
    """
    m = case.model
    if case.sharding == "zero3":
        return FP32 * min(m.parameters, DEEPSPEED_LIVE)
    whole = 2 * m.layer + m.embeddings + m.head
    return FP32 * whole if case.lora_r else 2 * FP32 * whole


def memory(case):
    """Bytes per GPU, part by part. -> dict: phase -> dict: part -> bytes

    always: held in every phase of an update. The peak of a run is that of its largest phase.
    """
    policy = policy_bytes(case)  # in fp32
    rounded_policy = policy_bytes(case, case.frozen_number)
    always_held, held_in_update = states(case)
    frozen = {
        "reference": reference_bytes(case),
        "reward model": reward_model_bytes(case),
    }
    copies = {"bf16 copies of trained weights": bf16_copies(case)}
    rows = min(case.local_rollout_forward_batch_size, case.local_batch)
    # The keys and values with which the responses are read go before the output layer comes.
    cache = case.shares_prompts * kv_cache(
        case, case.per_device_train_batch_size, case.length, case.prompt_number
    )
    if case.has_copy:
        weights = {"shard of the policy": policy / case.shards}
        if case.is_rl:
            weights["whole policy to sample with"] = rounded_policy
    else:
        weights = {"policy": rounded_policy}
    phases = {
        "always": {**weights, **always_held, **frozen},
        "update": {
            **held_in_update,
            **copies,
            "bf16 copies of frozen weights": bf16_copies_for_backward(case),
            "activations": activations(case),
            "logits, or keys and values": max(logits_of_update(case), cache),
        },
    }
    if case.is_rl:
        phases |= rollout(case, copies, rows)
    elif case.has_copy:  # sft.py and reward_model.py kept the whole model on the CPU until an evaluation
        phases["evaluation"] = {
            "whole model": rounded_policy,
            **copies,
            "one layer": one_layer_without_gradient(case, case.model, rows * case.length),
            "logits": logits_of_update(case),
        }
    if case.has_copy and case.is_rl:
        phases["start"] = {"two whole policies, before one is cut": 2 * policy, **frozen}
    else:
        phases["start"] = {"policy in fp32, as it is loaded and saved": policy, **frozen}
    return phases


def rollout(case, copies, rows):
    """The phases of a rollout of so many rows. -> dict: phase -> dict: part -> bytes"""
    prompt_tokens = rows / case.responses_per_prompt * case.prompt_length
    prompts = {
        **copies,
        "KV cache of the prompts": kv_cache(case, 1, prompt_tokens, case.prompt_number),
        "one layer that reads the prompts": one_layer_without_gradient(case, case.model, prompt_tokens),
    }
    # The probabilities are in fp32. A GPU converts them to fp64, and sums these.
    logits = 5 * FP32 * rows * case.model.vocabulary
    prompt_cache = kv_cache(case, rows, case.prompt_length, case.prompt_number)
    last_cache = kv_cache(case, rows, cache_columns(case), case.cache_number)
    first_token = {
        **copies,
        "KV cache of the prompts, for each response": prompt_cache,
        "logits of one step, or a layer that is converted": max(logits, prompt_cache / case.model.layers),
    }
    generation = {
        **copies,
        "KV cache": last_cache,
        "logits of one step, or a layer that grows": max(logits, last_cache / case.model.layers),
    }
    scoring = dict(copies)
    if case.reward_model is not None:
        scoring["one layer of the reward model"] = one_layer_without_gradient(
            case, case.reward_model, rows * case.length
        )
    return {"prompts": prompts, "first token": first_token, "generation": generation, "scoring": scoring}


def peaks(case):
    """The bytes of each phase, with what is always held. -> dict: phase -> bytes"""
    totals = {phase: sum(parts.values()) for phase, parts in memory(case).items()}
    always = totals.pop("always")
    return {phase: total if phase == "start" else always + total for phase, total in totals.items()}


def peak(case):
    return max(peaks(case).values())


def peak_of_rollout(case):
    """In bytes, as the peak of the update is peaks(case)["update"]."""
    return max(peaks(case)[phase] for phase in ("prompts", "first token", "generation", "scoring"))


def fits(case):
    return peak(case) <= USABLE * case.gpu_memory * GB


# ---- Tables ------------------------------------------------------------------------------------------------

SMALL = dict(gradient_checkpointing=True, local_rollout_forward_batch_size=16)
LORA = SMALL | dict(lora_r=16)
EIGHT_BIT = dict(load_in_8bit=True)
SETTINGS = [{}, SMALL, SMALL | EIGHT_BIT, LORA, LORA | EIGHT_BIT]
SIZES = {
    "124M": "gpt2",
    "1B": "pythia-1b",
    "1.5B": "qwen2.5-1.5b",
    "3B": "qwen2.5-3b",
    "7B": "llama-7b",
    "70B": "llama-70b",
}


def flags_text(changes):
    """The flags of a setting; "small" are those of SMALL."""
    words = [f"--{name.replace('_', '-')} {value}" for name, value in changes.items() if name not in SMALL]
    flags = f"`{' '.join(words).replace(' True', '')}`" if words else ""
    if SMALL.keys() <= changes.keys():
        return f"small, {flags}" if flags else "small"
    return flags or "no flags"


def table_case(size, **changes):
    """RLOO with a reward model of 1B, or of 124M for the policy of 124M."""
    reward_model = MODELS["gpt2" if size == "124M" else "pythia-1b"]
    return Case(MODELS[SIZES[size]], reward_model=reward_model, **changes)


def launches(gpus):
    """Ways to start on this many GPUs. -> list of (sharding, what the tables call it)"""
    if gpus == 1:
        return [("ddp", "one process")]
    return [("ddp", "ddp.yaml"), ("zero2", "zero2.yaml")]


def markdown(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def memory_table():
    """GB per GPU at the peak, for each size; which of the two GPUs it fits."""
    rows = []
    for changes in SETTINGS:
        if "lora_r" in changes:
            starts = [(1, "ddp", "1, or more with ddp.yaml")]
        else:
            starts = [(1, "ddp", "1"), (8, "ddp", "2 or more, ddp.yaml")]
            starts += [(8, "zero2", "8, zero2.yaml"), (64, "zero2", "64, zero2.yaml")]
        for gpus, sharding, name in starts:
            cells = []
            for size in SIZES:
                case = table_case(size, gpus=gpus, sharding=sharding, **changes)
                cells.append(fit_text(case))
            rows.append([flags_text(changes), name, *cells])
    return markdown(["flags", "GPUs, config", *SIZES], rows)


def fit_text(case):
    text = f"{peak(case) / GB:.0f}"
    if fits(replace(case, gpu_memory=80)):
        return text
    if fits(replace(case, gpu_memory=141)):
        return f"{text} (141)"
    return f"{text} (no)"


def choose(size, gpus, gpu_memory):
    """The first way that fits: all weights before LoRA, then few flags before many, then DDP before ZeRO-2."""
    for changes in SETTINGS:
        for sharding, name in launches(gpus):
            if "lora_r" in changes and sharding == "zero2":
                continue  # an adapter has little to shard
            case = table_case(size, gpus=gpus, sharding=sharding, gpu_memory=gpu_memory, **changes)
            if fits(case):
                return case, name, changes
    return None


def choice_table():
    """What to use: for each size and number of GPUs, on both GPUs."""
    rows = []
    for size in SIZES:
        for gpus in (1, 8):
            cells = []
            for gpu_memory in GPUS:
                choice = choose(size, gpus, gpu_memory)
                if choice is None:
                    cells.append("does not fit")
                else:
                    case, name, changes = choice
                    cells.append(f"{name}, {flags_text(changes)}: {peak(case) / GB:.0f} GB")
            rows.append([size, str(gpus), *cells])
    return markdown(["policy", "GPUs", "80 GB each", "141 GB each"], rows)


SHARDINGS = {"ddp": "DDP", "zero2": "ZeRO-2", "fsdp2": "FSDP2", "zero3": "ZeRO-3"}


def sharding_case(size, gpus, sharding, has_reference, **changes):
    """GRPO with `small` and a reward function, all weights trained, with or without a reference."""
    return Case(
        MODELS[SIZES[size]],
        algorithm="grpo",
        kl_coef=0.05 if has_reference else 0.0,
        gpus=gpus,
        sharding=sharding,
        **SMALL | changes,
    )


STATES = {
    "weights": ("policy", "shard of the policy", "whole policy to sample with"),
    "fp32 copy of a shard": ("fp32 copy of a shard",),
    "gradients": ("gradients",),
    "Adam": ("Adam",),
}
BUFFERS = ("bucket", "buckets", "copy of the bucket", "gathered layers")


def held_in_update(case):
    """All that depends on the sharding. -> dict: column of bytes_table -> bytes"""
    phases = memory(case)
    parts = phases["always"] | phases["update"]
    columns = STATES | {"buffers": BUFFERS}
    return {column: sum(parts.get(name, 0) for name in names) for column, names in columns.items()}


def bytes_table():
    """Bytes per trained parameter on N GPUs during the update, and GB of buffers."""
    rows = []
    for sharding, name in SHARDINGS.items():
        two, four = (sharding_case("7B", gpus, sharding, False) for gpus in (2, 4))
        columns = zip(held_in_update(two).values(), held_in_update(four).values())
        *states, _ = [(x / trained(two), y / trained(four)) for x, y in columns]
        states.append([sum(column) for column in zip(*states)])
        buffers = [
            held_in_update(sharding_case(size, 2, sharding, False))["buffers"] for size in ("1B", "7B")
        ]
        rows.append([name, *[share_text(*x) for x in states], *[f"{x / GB:.1f}" for x in buffers]])
    header = ["", *STATES, "sum", "buffers of 1B, GB", "of 7B, GB"]
    return markdown(header, rows)


def share_text(two, four):
    """The formula a + b/N of a number that is `two` on 2 GPUs and `four` on 4."""
    b = round(4 * (two - four), 6)
    a = round(two - b / 2, 6)
    return " + ".join([f"{a:g}"] * bool(a) + [f"{b:g}/N"] * bool(b)) or "0"


def sharding_table():
    """GB per GPU at the peak of the rollout and at that of the update, for each sharding."""
    rows = []
    for size, gpus, has_reference in product(("1B", "7B"), (2, 8), (False, True)):
        cells = []
        for sharding in SHARDINGS:
            case = sharding_case(size, gpus, sharding, has_reference)
            cells.append(f"{peak_of_rollout(case) / GB:.1f} / {peaks(case)['update'] / GB:.1f}")
        rows.append([size, str(gpus), "yes" if has_reference else "no", *cells])
    return markdown(["policy", "GPUs", "reference", *SHARDINGS.values()], rows)


LONG_SIZES = {"0.5B": "qwen2.5-0.5b", "1.5B": "qwen2.5-1.5b", "3B": "qwen2.5-3b", "7B": "qwen2.5-7b"}
WEIGHTS = {"": {}, "LoRA": dict(lora_r=16), "LoRA, 8 bit": dict(lora_r=16, load_in_8bit=True)}


def grpo_case(size, length, rows, **changes):
    """GRPO as in the recipes for GSM8K, with rows per pass and responses of this length."""
    return Case(
        MODELS[LONG_SIZES[size]],
        algorithm="grpo",
        kl_coef=0,
        responses_per_prompt=8,
        response_length=length,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=256 // rows,
        num_mini_batches=1,
        **changes,
    )


def choose_rows(size, length, gpu_memory):
    """The first way that fits: all weights before LoRA, no checkpointing before checkpointing, then many rows
    per pass before few, and many responses generated at once before few. -> the text of a cell
    """
    rows_of = {"": (32, 16, 8), "checkpointing": (32, 16, 8, 4, 2, 1)}  # without it, whole groups
    for weights, checkpointing in product(WEIGHTS, rows_of):
        for rows, at_once in product(rows_of[checkpointing], (64, 32, 16, 8)):
            changes = WEIGHTS[weights] | dict(gradient_checkpointing=bool(checkpointing))
            changes |= dict(local_rollout_forward_batch_size=at_once, gpu_memory=gpu_memory)
            case = grpo_case(size, length, rows, **changes)
            if fits(case):
                words = [f"{rows} / {at_once}", checkpointing, weights]
                return ", ".join(word for word in words if word) + f": {peak(case) / GB:.0f} GB"
    return "does not fit"


def long_table():
    """For each size and length of response: the rows per pass of the update and of the rollout that fit."""
    rows = []
    for size, length in product(LONG_SIZES, (512, 2048, 4096)):
        cells = [choose_rows(size, length, gpu_memory) for gpu_memory in SMALLER_GPUS]
        rows.append([size, f"{length:,}", *cells])
    return markdown(["policy", "tokens", *[f"{gpu_memory} GB" for gpu_memory in SMALLER_GPUS]], rows)


def parts_table(case):
    """The parts of one case, in GB."""
    rows = []
    for phase, parts in memory(case).items():
        for name, size in parts.items():
            if size > 0:
                rows.append([phase, name, f"{size / GB:.2f}"])
    for phase, total in peaks(case).items():
        rows.append([phase, "**peak**" if phase == "start" else "**peak, with always**", f"{total / GB:.2f}"])
    return markdown(["phase", "part", "GB per GPU"], rows)


def print_tables():
    tables = {
        "Memory per GPU": memory_table(),
        "What to use": choice_table(),
        "Why DDP and ZeRO-2 only: bytes per trained parameter": bytes_table(),
        "Why DDP and ZeRO-2 only": sharding_table(),
        "Long responses": long_table(),
    }
    for title, lines in tables.items():
        print(f"{title}\n\n" + "\n".join(lines) + "\n")


def parse_case(argv):
    """A case from the command line: every field of Case is a flag."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("policy", choices=MODELS)
    for f in fields(Case)[1:]:
        flag = "--" + f.name.replace("_", "-")
        if f.name == "reward_model":
            parser.add_argument(flag, choices=MODELS)
        elif f.type is bool:
            parser.add_argument(flag, action="store_true")
        elif f.name == "gpu_memory":
            parser.add_argument(flag, type=int, choices={*SMALLER_GPUS, *GPUS}, default=f.default)
        elif get_args(f.type):
            parser.add_argument(flag, choices=get_args(f.type), default=f.default)
        else:
            parser.add_argument(flag, type=f.type, default=f.default)
    flags = vars(parser.parse_args(argv))
    model = MODELS[flags.pop("policy")]
    flags["reward_model"] = MODELS.get(flags["reward_model"])
    case = Case(model, **flags)
    if case.sharding != "ddp" and case.gpus == 1:
        parser.error(f"--sharding {case.sharding}: also set --gpus")
    if case.num_shared_layers and (case.lora_r or case.load_in_8bit):
        parser.error("--num-shared-layers cannot be combined with --lora-r or --load-in-8bit")
    if case.load_in_8bit and case.lora_r and case.sharding == "fsdp2":
        parser.error("--load-in-8bit: FSDP2 cannot shard 8-bit weights")
    return case


def print_case(case):
    print(f"{case.model.parameters:,} parameters, {trained(case):,} of them are trained\n")
    print("\n".join(parts_table(case)))
    if case.has_copy:
        print(f"\nThe scripts have no {SHARDINGS[case.sharding]}: docs/scale.md compares it with ZeRO-2.")
    print(
        f"\nIt {'fits' if fits(case) else 'does not fit'} {case.gpu_memory} GB, of which {USABLE:.0%} count."
    )


def main(argv):
    if argv:
        print_case(parse_case(argv))
    else:
        print_tables()


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
