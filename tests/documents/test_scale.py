"""docs/scale.md and benchmarks/scale.py: parts of the arithmetic against small models on a CPU, and the
tables of the page."""

import contextlib
import importlib.util
import io
import json
import re
import sys
from dataclasses import replace

import cuda_graphs
import pytest
import torch
import transformers
from conftest import ROOT

import rloo_tldr as rloo

SPEC = importlib.util.spec_from_file_location("scale", ROOT / "benchmarks/scale.py")
scale = importlib.util.module_from_spec(SPEC)
sys.modules["scale"] = scale  # its dataclasses look up their module
SPEC.loader.exec_module(scale)

PAGE = (ROOT / "docs/scale.md").read_text()
SMALL = {  # widths that differ from each other, so that no two parts have the same size by chance
    "gpt2": scale.Model("gpt2", 3, 64, 4, 4, 192, 97, 48),
    "gpt_neox": scale.Model("gpt_neox", 3, 64, 4, 4, 192, 97),
    "llama": scale.Model("llama", 3, 64, 4, 2, 192, 97),
    "qwen2": scale.Model("qwen2", 3, 64, 4, 2, 192, 97),
}
EACH = pytest.mark.parametrize("arch", SMALL)
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
ROWS, PROMPT, RESPONSE = 4, 11, 6


def config_of(model):
    """transformers' configuration of the same shape."""
    sizes = dict(
        hidden_size=model.width,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        vocab_size=model.vocabulary,
    )
    if model.family == "gpt2":
        sizes |= dict(n_inner=model.mlp_width, n_positions=model.positions)
        sizes |= dict(activation_function="gelu_pytorch_tanh", bos_token_id=None, eos_token_id=None)
        sizes |= dict.fromkeys(["attn_pdrop", "embd_pdrop", "resid_pdrop"], 0.0)
    else:
        sizes |= dict(intermediate_size=model.mlp_width)
    if model.family in ("llama", "qwen2"):
        sizes |= dict(num_key_value_heads=model.kv_heads, tie_word_embeddings=model.family == "qwen2")
    return transformers.AutoConfig.for_model(model.family, **sizes)


def new_model(model):
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(config_of(model))


def small_case(arch, **changes):
    sizes = dict(per_device_train_batch_size=ROWS, num_mini_batches=1, responses_per_prompt=2)
    lengths = dict(prompt_length=PROMPT, response_length=RESPONSE)
    return scale.Case(SMALL[arch], **(sizes | lengths | changes))


def built(case):
    """Policy and reference of a case, as the script makes them of loaded models."""
    args = rloo.Args(lora_r=case.lora_r, lora_target_modules="all-linear")
    policy = new_model(case.model)
    reference = None
    if case.lora_r:
        policy = rloo.add_lora(policy, args)
    elif case.num_shared_layers:
        rloo.freeze_layers(policy, case.num_shared_layers)
        args = rloo.Args(num_shared_layers=case.num_shared_layers)
        reference = rloo.load_reference(args, policy, "", "cpu")
    else:
        reference = new_model(case.model)
    if case.gradient_checkpointing:
        policy.activation_checkpointing_enable(dict(use_reentrant=False))
    return policy, reference


def bytes_of(tensors):
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def batch():
    """Prompts with padding, and responses."""
    ids = torch.randint(0, 97, (ROWS, PROMPT + RESPONSE))
    mask = torch.ones(ROWS, PROMPT + RESPONSE, dtype=torch.bool)
    mask[0, :3] = False
    return ids, mask


def autocast(case):
    return torch.autocast("cpu", torch.bfloat16, enabled=case.dtype == "bfloat16")


# ---- Parameters --------------------------------------------------------------------------------------------

KNOWN = {
    "gpt2": 124_439_808,
    "qwen2.5-0.5b": 494_032_768,
    "pythia-1b": 1_011_781_632,
    "llama-7b": 6_738_415_616,
    "llama-70b": 70_553_706_496,
}


@pytest.mark.parametrize("name", scale.MODELS)
def test_the_number_of_parameters_is_that_of_transformers(name):
    model = scale.MODELS[name]
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config_of(model))
    assert model.parameters == theirs.num_parameters() == KNOWN[name]
    layer = rloo.transformer_layers(theirs)[0]
    assert model.layer == sum(p.numel() for p in layer.parameters())


# ---- Memory ------------------------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("changes", [{}, dict(lora_r=4), dict(num_shared_layers=2)], ids=str)
def test_weights_gradients_and_adam_have_the_computed_bytes(arch, changes):
    case = small_case(arch, **changes)
    policy, reference = built(case)
    weights = list(policy.parameters())
    shared = {id(p) for p in weights}
    assert bytes_of(weights) == scale.policy_bytes(case)
    if reference is not None:
        others = [p for p in reference.parameters() if id(p) not in shared]
        assert bytes_of(others) == scale.reference_bytes(case)

    parameters = rloo.trainable(policy).values()
    assert scale.trained(case) == sum(p.numel() for p in parameters)
    optimizer = torch.optim.AdamW(parameters)
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    always, update = scale.memory(case)["always"], scale.memory(case)["update"]
    moments = [x for state in optimizer.state.values() for x in state.values() if x.dim() > 0]
    assert bytes_of(p.grad for p in parameters) == update["gradients"]
    assert bytes_of(moments) == always["Adam"]


@contextlib.contextmanager
def steps(recorded, n=rloo.TOKENS_PER_ROUND):
    """The sampler with emulated recordings in rounds of n tokens, or with a cache that grows."""
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        cuda_graphs.install(stack)
        patch.setattr(rloo, "can_be_recorded", lambda *_: recorded)
        patch.setattr(rloo, "TOKENS_PER_ROUND", n)
        yield


def generate(policy, rows, prompt, response):
    """Two responses to each prompt, which no token ends."""
    ids = torch.randint(0, 97, (rows // 2, prompt))
    uniforms = torch.rand(rows // 2, 2, response)
    never = torch.tensor([], dtype=torch.long)
    rloo.generate_groups(policy, ids, ids >= 0, uniforms, never, 1.0)


@EACH
@DTYPES
@pytest.mark.parametrize("recorded", [True, False])
def test_the_cache_after_generation_has_the_computed_bytes(arch, dtype, recorded, monkeypatch):
    case = small_case(arch, dtype=dtype)
    policy, _ = built(case)
    caches = []
    new_cache = transformers.DynamicCache

    def kept(**named_inputs):
        caches.append(new_cache(**named_inputs))
        return caches[0]

    monkeypatch.setattr(rloo.transformers, "DynamicCache", kept)
    with steps(recorded), autocast(case):
        generate(policy, ROWS, PROMPT, RESPONSE)
    measured = bytes_of(x for layer in caches[0].layers for x in (layer.keys, layer.values))
    if not recorded:
        case = replace(case, lora_r=4, load_in_8bit=True)
    assert case.is_recorded == recorded
    assert measured == scale.memory(case)["generation"]["KV cache"]


def saved_bytes(case):
    """What the transformer saves for its backward pass. -> bytes of activations, of rounded weights"""
    policy = built(case)[0].train()
    storages = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    shapes = {tuple(p.shape) for p in policy.parameters() if not p.requires_grad}
    shapes |= {shape[::-1] for shape in shapes}
    trained_shapes = {tuple(p.shape) for p in policy.parameters() if p.requires_grad}
    trained_shapes |= {shape[::-1] for shape in trained_shapes}
    saved = []

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in storages:
            saved.append(tensor)
        return tensor

    ids, mask = batch()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast(case):
        rloo.hidden_states(rloo.body_and_head(policy)[0], ids, mask)
    weights = [t for t in saved if tuple(t.shape) in shapes and t.dim() == 2]
    activations = [t for t in saved if t.dim() != 2 or tuple(t.shape) not in shapes | trained_shapes]
    return bytes_of(activations), bytes_of(weights)


@EACH
@DTYPES
@pytest.mark.parametrize("changes", [{}, dict(lora_r=4), dict(gradient_checkpointing=True)], ids=str)
def test_a_layer_saves_the_computed_bytes(arch, dtype, changes):
    """The difference between a model with one layer more and one with one layer less."""
    case = small_case(arch, dtype=dtype, **changes)
    more = replace(case, model=replace(case.model, layers=case.model.layers + 1))
    (few, few_weights), (many, many_weights) = saved_bytes(case), saved_bytes(more)
    computed = scale.activations(more) - scale.activations(case)
    assert many - few == pytest.approx(computed, rel=0.12 if case.lora_r else 0.001)
    copies = scale.bf16_copies_for_backward(more) - scale.bf16_copies_for_backward(case)
    assert many_weights - few_weights == copies


def computed_peak(model, row, **changes):
    """The peak in MiB of a run that benchmarks measured."""
    case = scale.Case(
        model,
        gradient_checkpointing="checkpointing" in row["flags"],
        lora_r=16 if "lora" in row["flags"] else 0,
        per_device_train_batch_size=32,
        num_mini_batches=2,
        prompt_length=70,  # the longest of the first 16 posts of data/tldr
        response_length=40,
        **changes,
    )
    return scale.peak(case) / 2**20


def test_the_peaks_of_whole_runs_are_those_of_the_file():
    """results/memory.json, less the libraries: the smallest peak of a policy of almost no size."""
    rows = json.loads((ROOT / "results/memory.json").read_text())["rows"]
    models = {
        "6 layers x 512": scale.Model("gpt2", 6, 512, 8, 8, 2048, 1024, 512),
        "10 layers x 640": scale.Model("gpt2", 10, 640, 10, 10, 2560, 1024, 512),
    }
    libraries = min(row["peak_mb"] for row in rows if row["size"] == "base")
    compared = [row for row in rows if row["size"] in models]
    assert len(compared) == 8
    for row in compared:
        found = computed_peak(models[row["size"]], row, dtype="float32")
        assert found == pytest.approx(row["peak_mb"] - libraries, rel=0.22)


def test_the_peaks_on_a_gpu_are_as_far_off_as_the_page_says():
    """results/gpu-memory.json: the same runs with larger policies, in bf16."""
    models = {"gpt2-124m": scale.MODELS["gpt2"], "pythia-1b": scale.MODELS["pythia-1b"]}
    models["pythia-410m"] = scale.Model("gpt_neox", 24, 1024, 16, 16, 4096, 50304)
    rows = json.loads((ROOT / "results/gpu-memory.json").read_text())["rows"]
    ratios = [row["peak_mb"] / computed_peak(models[row["size"]], row) for row in rows]
    assert f"{min(ratios):.2f} to {max(ratios):.2f} times as much" in " ".join(PAGE.split())


# ---- The page ----------------------------------------------------------------------------------------------


def printed(argv):
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        scale.main(argv)
    return output.getvalue()


def test_the_tables_of_the_page_are_those_that_the_program_prints():
    lines = [line for line in printed([]).splitlines() if line]
    body = [line for line in lines if line.startswith("|") or line.startswith("Host memory")]
    ours = PAGE.split("\n## What these scripts cannot do")[0].splitlines()
    ours = {line for line in ours if line.startswith("|")}
    assert len(ours) > 20 and ours <= set(body)


def test_the_advice_of_the_page_is_what_the_program_chooses():
    """Each sentence about a job, from the choices."""
    for gpus in (1, 8, 64):
        for gpu_memory in scale.GPUS:
            chosen = {size: scale.choose(size, gpus, gpu_memory) for size in scale.SIZES}
            assert not chosen["124M"][2] and not chosen["1B"][2]
            is_full_7b = not chosen["7B"][0].lora_r
            is_8bit = chosen["7B"][0].load_in_8bit
            assert is_8bit == ((gpus, gpu_memory) == (64, 80))
            assert is_full_7b == ((gpus, gpu_memory) in [(8, 141), (64, 80), (64, 141)])
            assert (chosen["70B"] is not None) == (gpu_memory == 141)
    assert chosen["70B"][0].lora_r and chosen["70B"][0].load_in_8bit


COMMANDS = re.findall(r"^    python benchmarks/scale\.py(.*?)(?:\s+#.*)?$", PAGE, re.M)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_page_run(command):
    assert len(COMMANDS) == 3
    assert "GB" in printed(command.split())
