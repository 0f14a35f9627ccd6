"""docs/scale.md and benchmarks/scale.py: parameters, peaks of measured runs, and the tables of the page."""

import contextlib
import dataclasses
import importlib.util
import io
import json
import re
import sys
import zipfile

import pytest
import torch
import transformers
from conftest import ROOT

import grpo_math as grpo
import rloo_tldr as rloo

SPEC = importlib.util.spec_from_file_location("scale", ROOT / "benchmarks/scale.py")
scale = importlib.util.module_from_spec(SPEC)
sys.modules["scale"] = scale  # its dataclasses look up their module
SPEC.loader.exec_module(scale)

PAGE = (ROOT / "docs/scale.md").read_text()


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
        is_tied = model.family == "qwen2" and not model.has_own_head
        sizes |= dict(num_key_value_heads=model.kv_heads, tie_word_embeddings=is_tied)
    return transformers.AutoConfig.for_model(model.family, **sizes)


# ---- Parameters --------------------------------------------------------------------------------------------

KNOWN = {
    "gpt2": 124_439_808,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
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


def test_which_policies_with_lora_peak_when_they_are_loaded():
    flags = dict(lora_r=16, gradient_checkpointing=True, local_rollout_forward_batch_size=16)
    phases = {size: scale.peaks(scale.table_case(size, **flags)) for size in scale.SIZES}
    assert [size for size, x in phases.items() if max(x, key=x.get) == "start"] == ["1.5B", "3B", "7B", "70B"]
    assert "With `small, --lora-r 16`, that is the peak from 1.5B on." in PAGE


# ---- Memory ------------------------------------------------------------------------------------------------


def saved_bytes(case, n, k, C, T):
    """What one pass over n responses, k per prompt, saves for its backward pass, without the weights."""
    torch.manual_seed(1)
    lm = transformers.AutoModelForCausalLM.from_config(config_of(case.model))
    if case.lora_r:
        lm = grpo.add_lora(lm, grpo.Args(lora_r=case.lora_r))
    lm.train()
    prompts = torch.randint(case.model.vocabulary, (n // k, C)).repeat_interleave(k, 0)
    ids = torch.cat([prompts, torch.randint(case.model.vocabulary, (n, T))], 1)
    mask = torch.ones(n, C + T, dtype=torch.bool)
    mask[:, :2] = False  # padding, so that there is a mask
    storages = {}

    def keep(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    is_bf16 = case.dtype == "bfloat16"
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), torch.autocast("cpu", enabled=is_bf16):
        grpo.group_hidden_states(lm, ids, mask, T)
    for p in lm.parameters():
        storages.pop(p.untyped_storage().data_ptr(), None)
    return sum(storages.values())


@pytest.mark.parametrize("family, tolerance", {"qwen2": 0.06, "gpt_neox": 0.1, "gpt2": 0.2}.items())
@pytest.mark.parametrize("dtype, lora_r", [("float32", 0), ("bfloat16", 0), ("bfloat16", 16)])
def test_the_activations_are_what_a_pass_saves(family, tolerance, dtype, lora_r):
    """Prompts are read once per group, with short and with long responses."""
    is_gpt2, is_qwen = family == "gpt2", family == "qwen2"
    model = scale.Model(family, 3, 256, 8, 2 if is_qwen else 8, 1024, 512, 1024 if is_gpt2 else 0)
    for k, C, T in ((4, 256, 64), (8, 64, 256)):
        flags = dict(responses_per_prompt=k, prompt_length=C, response_length=T, dtype=dtype, lora_r=lora_r)
        flags |= dict(checkpoint="float32", per_device_train_batch_size=8)  # the model below is not rounded
        case = scale.Case(model, algorithm="grpo", kl_coef=0, **flags)
        computed = scale.activations(case) + scale.bf16_copies(case) + scale.bf16_copies_for_backward(case)
        assert saved_bytes(case, 8, k, C, T) == pytest.approx(computed, rel=tolerance)


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
        assert found == pytest.approx(row["peak_mb"] - libraries, rel=0.23)
    assert "to within 23 %" in PAGE


def test_the_peaks_on_a_gpu_are_as_far_off_as_the_page_says():
    """results/gpu-memory.json: the same runs with larger policies, in bf16."""
    models = {"gpt2-124m": scale.MODELS["gpt2"], "pythia-1b": scale.MODELS["pythia-1b"]}
    models["pythia-410m"] = scale.Model("gpt_neox", 24, 1024, 16, 16, 4096, 50304)
    rows = json.loads((ROOT / "results/gpu-memory.json").read_text())["rows"]
    ratios = []
    for row in rows:  # from before frozen weights were stored in bf16
        computed = computed_peak(models[row["size"]], row, checkpoint="float32")
        ratios.append(row["peak_mb"] / computed)
    assert f"{min(ratios):.2f} to {max(ratios):.2f} times as much" in " ".join(PAGE.split())


def test_the_peak_of_the_recipe_for_gsm8k_is_as_the_page_says():
    """results/qwen-gsm8k: rows are read as in the recipe, and prompts of a batch are padded to about 200."""
    with zipfile.ZipFile(ROOT / "results/qwen-gsm8k/seed1.zip") as archive:
        rows = [json.loads(line) for line in archive.read("metrics.jsonl").splitlines()]
    measured = max(row["perf/peak_memory_mb"] for row in rows) / 2**10
    computed = scale.peak(grpo_0_5b(local_rollout_forward_batch_size=1024, prompt_length=200)) / 2**30
    text = " ".join(PAGE.split())
    assert f"[needed {measured:.1f} GiB]" in text and f"where {computed:.1f} are computed" in text
    assert measured == pytest.approx(computed, rel=0.05)


def grpo_0_5b(**changes):
    """The recipe gsm8k-qwen-0.5b, with changes of scale.py's Case."""
    recipe, case = grpo.RECIPES["gsm8k-qwen-0.5b"], scale.grpo_case("0.5B", 512, 32)
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "response_length", "kl_coef"):
        assert getattr(case, name) == getattr(recipe, name)
    at_once = recipe.local_rollout_forward_batch_size
    return dataclasses.replace(case, **dict(local_rollout_forward_batch_size=at_once) | changes)


# ---- Sharding ----------------------------------------------------------------------------------------------

ROWS = [
    dict(size=size, gpus=gpus, has_reference=r) for size in ("1B", "7B") for gpus in (2, 8) for r in (0, 1)
]


@pytest.mark.parametrize("N", [2, 8])
def test_the_bytes_per_parameter_of_each_sharding(N):
    """Counted on a CPU, with two processes: ZeRO-2, FSDP2 and ZeRO-3 hold 10, 10 and 14 bytes between
    updates, and 12, 12 and 14 after the backward pass. With FSDP2 and ZeRO-3, 4 of them are the whole policy.
    """
    between = {"ddp": 16, "zero2": 4 + 12 / N, "fsdp2": 4 + 12 / N, "zero3": 4 + 20 / N}
    update = {"ddp": 16, "zero2": 4 + 16 / N, "fsdp2": 4 + 16 / N, "zero3": 4 + 20 / N}
    accumulated = update | {"zero2": 4 + 20 / N, "fsdp2": 8 + 12 / N}
    for sharding in scale.SHARDINGS:
        case = scale.sharding_case("7B", N, sharding, False)
        parameters, always = case.model.parameters, scale.memory(case)["always"]
        assert sum(always.values()) - always.get("bucket", 0) == pytest.approx(between[sharding] * parameters)
        for expected, steps in ((update, 1), (accumulated, 4)):
            case = dataclasses.replace(case, gradient_accumulation_steps=steps)
            *states, buffers = scale.held_in_update(case).values()
            assert sum(states) == pytest.approx(expected[sharding] * parameters)
            assert buffers == {"ddp": 0, "zero2": 4e9, "fsdp2": scale.gathered(case), "zero3": 8e9}[sharding]


def test_one_process_frees_its_gradients_and_several_with_ddp_do_not():
    one, two = (scale.sharding_case("1B", gpus, "ddp", False) for gpus in (1, 2))
    assert scale.peaks(one)["update"] == scale.peaks(two)["update"]
    gradients = scale.FP32 * one.model.parameters
    assert scale.peak_of_rollout(two) - scale.peak_of_rollout(one) == pytest.approx(gradients)
    for setting in scale.SETTINGS:  # a row of the table is for both if there are adapters only
        for size in scale.SIZES if "lora_r" in setting else ():
            texts = {scale.fit_text(scale.table_case(size, gpus=gpus, **setting)) for gpus in (1, 8)}
            assert len(texts) == 1


def test_the_rest_of_memory_does_not_depend_on_the_sharding():
    for row in ROWS:
        phases = [scale.memory(scale.sharding_case(sharding=sharding, **row)) for sharding in scale.SHARDINGS]
        for phase in ("prompts", "first token", "generation", "scoring"):
            assert all(p[phase] == phases[0][phase] for p in phases)
        for phase, part in (
            ("always", "reference"),
            ("update", "activations"),
            ("update", "logits, or keys and values"),
        ):
            assert len({p[phase][part] for p in phases}) == 1
        assert (phases[0]["always"]["reference"] > 0) == row["has_reference"]


def percent_more(size, sharding, **changes):
    """How much more memory than ZeRO-2 this sharding needs. -> smallest and largest percentage in ROWS"""
    found = []
    for row in ROWS:
        if row["size"] == size and row["gpus"] == changes.get("gpus", row["gpus"]):
            cases = [scale.sharding_case(**row | changes | dict(sharding=s)) for s in (sharding, "zero2")]
            theirs, zero2 = [max(scale.peaks(x)["update"], scale.peak_of_rollout(x)) for x in cases]
            found.append(100 * (theirs / zero2 - 1))
    return min(found), max(found)


def test_what_the_page_says_about_fsdp2_and_zero3(monkeypatch):
    text, GB = " ".join(PAGE.split()), scale.GB
    low, high = percent_more("7B", "fsdp2")
    assert f"FSDP2 needs {low:.0f} to {high:.0f} % more than ZeRO-2" in text
    low, high = percent_more("7B", "fsdp2", gpus=8, gradient_accumulation_steps=4)
    assert f"({low:.0f} to {high:.0f} % on 8 GPUs with 4 accumulated passes)" in text
    low, high = percent_more("7B", "zero3")
    assert f"and ZeRO-3 {low:.0f} to {high:.0f} % more." in text
    low, high = percent_more("1B", "fsdp2")
    assert f"FSDP2 needs {-high:.0f} to {-low:.0f} % less" in text

    def sft(sharding, **changes):
        case = scale.Case(scale.MODELS["llama-7b"], algorithm="sft", gpus=8, sharding=sharding, **changes)
        assert case.per_device_train_batch_size == 4 and case.length == 1024
        return f"{scale.peak(case) / GB:.0f} GB"

    checked = [sft(sharding, gradient_checkpointing=True) for sharding in ("zero2", "fsdp2")]
    assert (
        "sft.py needs {} with ZeRO-2 and `--gradient-checkpointing`, and needed {}".format(*checked) in text
    )
    assert "without checkpointing {} and {}".format(sft("zero2"), sft("fsdp2")) in text

    before = scale.peak(scale.sharding_case("1B", 8, "zero2", False))
    monkeypatch.setattr(scale, "DEEPSPEED_BUCKET", 50_000_000)
    after = scale.peak(scale.sharding_case("1B", 8, "zero2", False))
    assert f"would need {(before - after) / GB:.1f} GB less, and less than FSDP2 in every row" in text
    assert percent_more("1B", "fsdp2")[0] > 0 and percent_more("7B", "fsdp2")[0] > 0


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


COMMANDS = re.findall(r"^    python benchmarks/scale\.py(.*?)(?:\s+#.*)?$", PAGE, re.M)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_page_run(command):
    assert len(COMMANDS) == 4
    assert "GB" in printed(command.split())


def test_the_command_of_the_recipe_has_its_flags_and_its_memory():
    case, recipe = scale.parse_case(COMMANDS[-1].split()), grpo.RECIPES["gsm8k-qwen-1.5b"]
    names = {"responses_per_prompt": "num_generations", "prompt_length": "max_prompt_length"}
    for field in dataclasses.fields(case):
        name = names.get(field.name, field.name)
        if name in vars(recipe) and name != "dtype":
            assert getattr(case, field.name) == getattr(recipe, name), name
    assert f"it needs {scale.peak(case) / scale.GB:.0f} GB" in PAGE


def test_the_numbers_below_the_table_of_long_responses():
    text, GB = " ".join(PAGE.split()), scale.GB
    small = grpo_0_5b(per_device_train_batch_size=8, gradient_accumulation_steps=32, gpu_memory=24)
    assert scale.fits(small) and f"needs {scale.peak(small) / GB:.0f} GB and gives" in text
    checkpointing = grpo_0_5b(gradient_checkpointing=True)
    assert f"instead, the recipe needs {scale.peak(checkpointing) / GB:.0f} GB" in text
    long = scale.grpo_case("0.5B", 4096, 32)
    masks = long.model.layers * 32 * 4096 * (512 + 4096) * scale.BF16
    assert f"need {scale.peak(long) / GB:.0f} GB at 4,096 tokens. {masks / GB:.0f} of them" in text
    command = re.search(r"`python grpo_math.py (gsm8k-qwen-0.5b --per.*?)`", PAGE)[1].split()
    args = grpo.parse_args(command)
    assert args.per_device_train_batch_size == 8 and args.gradient_accumulation_steps == 32


def test_the_rule_of_thumb_is_what_fits_80_gb():
    """1.5B without flags; 3B with checkpointing; 7B only with LoRA."""
    assert scale.fits(scale.table_case("1.5B")) and not scale.fits(scale.table_case("3B"))
    assert scale.fits(scale.table_case("3B", **scale.SMALL))
    assert not scale.fits(scale.table_case("7B", **scale.SMALL, algorithm="grpo", kl_coef=0))
    assert scale.fits(scale.table_case("7B", **scale.LORA))
