"""docs/scale.md and benchmarks/scale.py: parameters, peaks of measured runs, and the tables of the page."""

import contextlib
import dataclasses
import importlib.util
import io
import json
import re
import sys

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
        sizes |= dict(num_key_value_heads=model.kv_heads, tie_word_embeddings=model.family == "qwen2")
    return transformers.AutoConfig.for_model(model.family, **sizes)


# ---- Parameters --------------------------------------------------------------------------------------------

KNOWN = {
    "gpt2": 124_439_808,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
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
    ratios = []
    for row in rows:  # from before frozen weights were stored in bf16
        computed = computed_peak(models[row["size"]], row, checkpoint="float32")
        ratios.append(row["peak_mb"] / computed)
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


def test_the_rule_of_thumb_is_what_fits_80_gb():
    """1.5B without flags; 3B with checkpointing; 7B only with LoRA."""
    assert scale.fits(scale.table_case("1.5B")) and not scale.fits(scale.table_case("3B"))
    assert scale.fits(scale.table_case("3B", **scale.SMALL))
    assert not scale.fits(scale.table_case("7B", **scale.SMALL, algorithm="grpo", kl_coef=0))
    assert scale.fits(scale.table_case("7B", **scale.LORA))
