"""Models by their configs: nothing is loaded but config.json and the tokenizer."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
import transformers
from check_helpers import assert_only, assert_remark, findings, texts
from conftest import SIZES, byte_level_tokenizer, ids_of
from run_tools import spy, write_rows
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import check

pytest_plugins = ["run_fixtures"]


@pytest.fixture
def folder_of(tmp_path):
    """folder_of(config) -> a folder with this config and a tokenizer, but without weights"""

    def make(config, tokenizer=True):
        folder = tmp_path / f"model-{len(list(tmp_path.iterdir()))}"
        config.save_pretrained(folder)
        if tokenizer:
            byte_level_tokenizer().save_pretrained(folder)
        return str(folder)

    return make


def config_of(arch, **changes):
    return AutoConfig.for_model(arch, **(SIZES.get(arch, {}) | ids_of(byte_level_tokenizer()) | changes))


# ---- The policy --------------------------------------------------------------------------------------------

CONTEXT = {  # the models read 256 tokens
    "ppo_sentiment": (dict(query_max_length=200, response_length=57), "up to 257"),
    "ppo_dialog": (dict(max_prompt_length=251), "up to 257"),
    "grpo_math": (dict(response_length=250), "lower --max-prompt-length or --response-length"),
    "rloo_tldr": (dict(response_length=250), "lower --max-prompt-length or --response-length"),
    "sft": (dict(max_length=257), "lower --max-length"),
    "reward_model": (dict(max_length=257), "lower --max-length"),
    "dpo_tldr": (dict(response_length=200), "lower --max-length or --response-length"),
}


@pytest.mark.parametrize("name", CONTEXT)
def test_texts_that_are_too_long(scripts, small, name):
    """By one token, in the scripts whose lengths are flags."""
    changes, word = CONTEXT[name]
    assert_only(findings(scripts[name], small(name, **changes)), "reads at most 256 tokens", word)


def test_texts_that_just_fit(scripts, small):
    found = findings(
        scripts["ppo_sentiment"], small("ppo_sentiment", query_max_length=200, response_length=56)
    )
    assert texts(found) == []


@pytest.mark.parametrize(
    "arch, changes, key",
    [
        ("gemma2", dict(final_logit_softcapping=30.0), "final_logit_softcapping"),
        ("granite", dict(logits_scaling=8.0), "logits_scaling"),
        ("cohere", dict(logit_scale=0.0625), "logit_scale"),
    ],
)
def test_capped_and_scaled_logits(scripts, small, folder_of, arch, changes, key):
    """Of a language model; a reward model has its own head."""
    sizes = SIZES["llama"] | dict(head_dim=8) if arch == "gemma2" else SIZES["llama"]
    folder = folder_of(config_of(arch, **sizes, **changes))
    assert_only(findings(scripts["sft"], small("sft", model_name_or_path=folder)), key)


def test_logits_that_are_not_scaled(scripts, small, folder_of):
    folder = folder_of(config_of("granite", **SIZES["llama"], logits_scaling=1.0))
    assert texts(findings(scripts["sft"], small("sft", model_name_or_path=folder))) == []


@pytest.mark.parametrize("arch", ["mamba", "rwkv"])
def test_models_without_a_cache(scripts, small, folder_of, arch):
    """Of those that sample responses. sft.py tries out if packed rows are read as they should be."""
    sizes = dict(hidden_size=32, num_hidden_layers=2, state_size=4, attention_hidden_size=32)
    folder = folder_of(config_of(arch, **sizes))
    for name in ("ppo_sentiment", "rloo_tldr", "grpo_math", "dpo_tldr"):
        flags = dict(model_name_or_path=folder)
        if name == "rloo_tldr":
            flags = dict(sft_model_path=folder)
        assert_only(findings(scripts[name], small(name, **flags)), "has no cache of keys and values")
    found = findings(scripts["sft"], small("sft", model_name_or_path=folder))
    assert not [text for text in texts(found) if "cache" in text]


@pytest.mark.parametrize("name, lora_r", [("ppo_sentiment", 0), ("grpo_math", 0), ("sft", 4)])
def test_quantized_weights(scripts, small, tiny_lm, tmp_path, name, lora_r):
    """Only the weights that are not quantized would be trained. sft.py takes none at all."""
    folder = shutil.copytree(tiny_lm(), tmp_path / "lm")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = dict(quant_method="bitsandbytes", load_in_8bit=True)
    (folder / "config.json").write_text(json.dumps(config))
    found = findings(scripts[name], small(name, model_name_or_path=str(folder), lora_r=lora_r))
    assert_only(found, "quantized weights cannot be trained")


def test_an_adapter_without_its_model(scripts, small, tiny_lm, tmp_path):
    """That of a policy is merged. For others, the line has the command that does it."""
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_lm()), peft.LoraConfig(r=2))
    folder = str(tmp_path / "adapter")
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_lm()).save_pretrained(folder)
    for name in ("sft", "ppo_sentiment"):
        assert texts(findings(scripts[name], small(name, model_name_or_path=folder))) == []
    words = "is a LoRA adapter without its model", "merge_and_unload"
    assert_only(findings(scripts["reward_model"], small("reward_model", model_name_or_path=folder)), *words)
    flags = dict(model_name_or_path=folder, lora_r=2, load_in_8bit=True)
    assert_only(findings(scripts["rloo_tldr"], small("rloo_tldr", **flags)), *words)
    found = findings(scripts["ppo_sentiment"], small("ppo_sentiment", value_model_path=folder))
    assert any(words[0] in text for text in texts(found)), found


@pytest.fixture
def adapter(tiny_lm, tmp_path):
    """adapter(name, base=tiny_lm(), **config) -> folder of a LoRA adapter with a tokenizer."""

    def make(name, base=None, **config):
        config = peft.LoraConfig(r=2, **config)
        model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_lm()), config)
        model.peft_config["default"].base_model_name_or_path = str(base or tiny_lm())
        model.save_pretrained(tmp_path / name)
        AutoTokenizer.from_pretrained(tiny_lm()).save_pretrained(tmp_path / name)
        return tmp_path / name

    return make


def rename_weights(folder, rename):
    """Save an adapter's weights under other names; None: leave them out."""
    file = folder / "adapter_model.safetensors"
    tensors = {rename(i, name): x for i, (name, x) in enumerate(load_file(file).items())}
    save_file({name: x for name, x in tensors.items() if name is not None}, file)


LOST = {
    "compiled": lambda i, name: name.replace("base_model.model.", "base_model.model._orig_mod."),
    "wrapped": lambda i, name: f"module.{name}",
    "in part": lambda i, name: None if ".h.1." in name else name,
    "nothing": lambda i, name: None,
}


@pytest.mark.parametrize("rename", LOST.values(), ids=LOST)
def test_an_adapter_whose_weights_fit_no_layer(scripts, small, adapter, rename):
    """peft warns, and the run would train the base model. An adapter of few layers by its config is fine."""
    folder = str(adapter("part", layers_to_transform=[1], target_modules=["c_fc"]))
    found = findings(scripts["ppo_sentiment"], small("ppo_sentiment", model_name_or_path=folder))
    assert texts(found) == []
    folder = str(adapter("lost"))
    rename_weights(Path(folder), rename)
    found = findings(scripts["ppo_sentiment"], small("ppo_sentiment", model_name_or_path=folder))
    assert_only(found, "do not fit the layers of its base model", "attn.c_attn")


def test_an_adapter_of_an_adapter(scripts, small, adapter):
    """load_model merges both; the config is that of the model below both."""
    folder = str(adapter("second", adapter("first")))
    assert texts(findings(scripts["grpo_math"], small("grpo_math", model_name_or_path=folder))) == []


def test_an_adapter_beside_a_model(scripts, small, adapter, tiny_lm):
    """The adapter and its own base model would be loaded, not the model in the folder."""
    folder = adapter("both")
    shutil.copy(Path(tiny_lm(), "config.json"), folder)  # as some trainers do
    args = small("sft", model_name_or_path=str(folder))
    assert texts(findings(scripts["sft"], args)) == []
    shutil.copy(Path(tiny_lm(), "model.safetensors"), folder)
    found = findings(scripts["sft"], args)
    assert_only(found, "holds a model and an adapter, which would be loaded instead")


def test_an_adapter_that_does_not_name_its_base(scripts, small, tiny_lm, tmp_path):
    """Said in one line, not by a library that gets None for a path."""
    folder = tmp_path / "adapter"
    peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_lm()), peft.LoraConfig(r=2)
    ).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_lm()).save_pretrained(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": None}))
    for name in ("sft", "ppo_sentiment", "grpo_math"):
        found = findings(scripts[name], small(name, model_name_or_path=str(folder)))
        errors = [finding.text for finding in found if finding.kind == "error"]
        assert len(errors) == 1 and "does not name its base model" in errors[0], errors


def test_no_weights_are_loaded(scripts, small, monkeypatch):
    """Looking takes seconds for any size."""
    for name in ("ppo_sentiment", "rloo_tldr", "grpo_tools"):
        loaded = spy(monkeypatch, scripts[name], "load_model")
        findings(scripts[name], small(name))
        assert loaded == []


def test_layers_are_made_without_numbers(scripts, small):
    x = check.Inputs(scripts["sft"], small("sft"))
    assert {p.device.type for p in x.model.parameters()} == {"meta"}


def test_a_type_of_model_with_its_own_tokenizer(scripts, small, metaspace_lm):
    """transformers loads Qwen2's tokenizer whatever was saved."""
    sizes = "hidden_size=32 num_hidden_layers=1 num_attention_heads=2 intermediate_size=64"
    found = findings(
        scripts["sft"], small("sft", model_name_or_path=metaspace_lm, from_config=f"qwen2 {sizes}")
    )
    assert texts(found)
    assert any("use another model type" in text for text in texts(found)), texts(found)


def test_texts_that_a_classifier_cannot_read(scripts, small, folder_of):
    """Its tokenizer does not say how many tokens it reads."""
    config = config_of(
        "distilbert", max_position_embeddings=10, architectures=["DistilBertForSequenceClassification"]
    )
    config.id2label = {0: "negative", 1: "positive"}
    found = findings(scripts["ppo_sentiment"], small("ppo_sentiment", reward_model_path=folder_of(config)))
    assert_only(found, "reads at most 10 tokens", "set model_max_length to 10")


# ---- Critics -----------------------------------------------------------------------------------------------


def test_a_critic_that_reads_both_ways(scripts, small, folder_of):
    folder = folder_of(config_of("distilbert"))
    found = findings(scripts["ppo_sentiment"], small("ppo_sentiment", value_model_path=folder))
    assert_only(found, "--value-model-path", "sees later tokens")


def test_a_decoder_that_reads_both_ways(scripts, small, folder_of):
    """Gemma 3's text model may be told to."""
    sizes = SIZES["llama"] | dict(head_dim=8, use_bidirectional_attention=True)
    folder = folder_of(config_of("gemma3_text", **sizes))
    found = findings(scripts["ppo_sentiment"], small("ppo_sentiment", value_model_path=folder))
    assert_only(found, "sees later tokens")


@pytest.mark.parametrize("arch", ["gpt2", "llama", "gpt_neox", "opt"])
def test_critics_that_read_one_way(scripts, small, tiny_lm, arch):
    found = findings(scripts["ppo_sentiment"], small("ppo_sentiment", value_model_path=tiny_lm(arch)))
    assert texts(found) == [] and texts(found, "not checked") == []


def test_a_critic_with_another_vocabulary(scripts, small, folder_of):
    folder = folder_of(config_of("gpt2", vocab_size=900))
    found = findings(scripts["ppo_sentiment"], small("ppo_sentiment", value_model_path=folder))
    assert_only(found, "a vocabulary of 900 tokens, but the policy has 1024")


# ---- Reward models -----------------------------------------------------------------------------------------


def test_a_label_that_does_not_exist(scripts, small):
    found = findings(scripts["ppo_sentiment"], small("ppo_sentiment", reward_label="splendid"))
    assert_only(found, "--reward-label splendid", "negative, positive")


def test_a_judge_without_the_label(scripts, small, tiny_classifier):
    judge = tiny_classifier(labels=("bad", "good"))
    found = findings(scripts["ppo_sentiment"], small("ppo_sentiment", judge_model_path=judge))
    assert_only(found, "--reward-label", "bad, good")


def test_one_output_for_a_label(scripts, small, tiny_preference_model):
    """A reward model of pairs reads a response at its EOS, which these texts do not have."""
    found = findings(
        scripts["ppo_sentiment"], small("ppo_sentiment", reward_model_path=tiny_preference_model())
    )
    assert_only(found, "--reward-model-path", "one output", "docs/from_trl.md")


def test_two_outputs_for_a_score(scripts, small, tiny_classifier):
    found = findings(scripts["rloo_tldr"], small("rloo_tldr", reward_model_path=tiny_classifier()))
    assert_only(found, "a classifier with 2 labels", "a reward model has one output")


def test_a_language_model_as_reward(scripts, small, tiny_lm):
    """TRL's first command has one. For the other scripts it is no classifier."""
    found = findings(scripts["rloo_tldr"], small("rloo_tldr", reward_model_path=tiny_lm("gpt_neox")))
    assert_remark(found, "its reward head is random")
    found = findings(scripts["ppo_dialog"], small("ppo_dialog", reward_model_path=tiny_lm()))
    assert any("is not a classifier" in text for text in texts(found))


def test_a_language_model_as_judge(scripts, small, tiny_lm):
    found = findings(scripts["rloo_tldr"], small("rloo_tldr", judge_model=tiny_lm("gpt_neox")))
    assert_only(found, "--judge-model", "is a language model: use --judge-url")


def test_a_classifier_that_reads_padding(scripts, small, folder_of):
    sizes = dict(vocab_size=1100, d_model=16, n_layer=1, n_head=2, d_inner=16, num_labels=1)
    config = transformers.XLNetConfig(**sizes, architectures=["XLNetForSequenceClassification"])
    found = findings(scripts["rloo_tldr"], small("rloo_tldr", reward_model_path=folder_of(config)))
    assert_only(found, "a xlnet reads the last position")


def test_a_reward_model_without_a_tokenizer(scripts, small, tiny_preference_model, tmp_path):
    folder = tmp_path / "reward"
    folder.mkdir()
    for file in ("config.json", "model.safetensors"):
        shutil.copy(Path(tiny_preference_model()) / file, folder)
    found = findings(scripts["rloo_tldr"], small("rloo_tldr", reward_model_path=str(folder)))
    assert any("tokenizer" in text for text in texts(found)), texts(found)


def test_chats_for_a_reward_model_of_texts(scripts, small, tiny_preference_model, tmp_path):
    """It has no template to write them with."""
    rows = [dict(prompt=[dict(role="user", content=f"{i}?")], completion="Yes.") for i in range(9)]
    data = write_rows(tmp_path / "data", train=rows, test=rows[:4])
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}assistant: {% endif %}"
    folder = shutil.copytree(small("sft").model_name_or_path, tmp_path / "lm")
    tokenizer.save_pretrained(folder)
    args = small("rloo_tldr", dataset_name=data, model_name_or_path=str(folder))
    assert_only(findings(scripts["rloo_tldr"], args), "no chat template, and the prompts are chats")


# ---- Memory ------------------------------------------------------------------------------------------------


def test_a_model_that_cannot_fit(scripts, small, folder_of, monkeypatch):
    """Weights and optimizer alone need more than there is; with SGD they fit, and only activations do not."""
    folder = folder_of(config_of("llama", **(SIZES["llama"] | dict(hidden_size=512, intermediate_size=2048))))
    args = dict(model_name_or_path=folder)
    x = check.Inputs(scripts["sft"], small("sft", **args))
    parts = check.memory(x)
    parameters = sum(p.numel() for p in x.model.parameters())
    assert parts["weights"] == parts["gradients"] == 4 * parameters
    assert parts["optimizer"] == 8 * parameters
    available = 10 * parameters
    monkeypatch.setattr(check, "available_memory", lambda: (available, "this machine"))
    assert_only(findings(scripts["sft"], small("sft", **args)), "weights and optimizer need")
    found = findings(scripts["sft"], small("sft", **args, optimizer="torch.optim.SGD"))
    assert_remark(found, "the run needs about")


def test_memory_of_an_adapter(scripts, small):
    """Its rows and columns, and the frozen base."""
    parts = check.memory(check.Inputs(scripts["sft"], small("sft", lora_r=4, lora_target_modules="c_attn")))
    adapter = 2 * 4 * (32 + 96)  # two layers, r = 4, 32 inputs, 96 outputs
    assert parts["gradients"] == 4 * adapter and parts["optimizer"] == 8 * adapter
    x = check.Inputs(scripts["sft"], small("sft"))
    assert parts["weights"] == 4 * adapter + 4 * sum(p.numel() for p in x.model.parameters())


def test_linear_layers_of_all_kinds(scripts, small, tiny_lm):
    """Conv1D and Linear, of the transformer."""
    for arch, layers in (("gpt2", {"c_attn", "c_proj", "c_fc"}), ("gpt_neox", {"query_key_value", "dense"})):
        x = check.Inputs(scripts["sft"], small("sft", model_name_or_path=tiny_lm(arch)))
        assert layers <= check.linear_layers(x.model.base_model)
        assert "lm_head" not in check.linear_layers(x.model.base_model)


def test_the_head_of_a_reward_model_is_no_target(scripts, small, tiny_lm):
    args = small("reward_model", model_name_or_path=tiny_lm(), lora_r=2, lora_target_modules="score")
    found = findings(scripts["reward_model"], args)
    assert_only(found, "--lora-target-modules score")
    assert isinstance(AutoModelForSequenceClassification, type) and torch.get_default_device().type == "cpu"


@pytest.mark.parametrize("arch", ["xlnet", "ctrl", "modernbert-decoder"])
def test_a_model_that_is_read_at_its_last_position(scripts, small, folder_of, arch):
    """reward_model.py pads its rows."""
    sizes = {
        "xlnet": dict(d_model=16, n_layer=1, n_head=2, d_inner=16),
        "ctrl": dict(n_embd=16, n_layer=1, n_head=2, dff=16),
        "modernbert-decoder": dict(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
        ),
    }
    folder = folder_of(config_of(arch, **sizes[arch]))
    found = findings(scripts["reward_model"], small("reward_model", model_name_or_path=folder))
    assert_only(found, f"--model-name-or-path {folder}: a {arch} reads the last position")


@pytest.mark.parametrize("arch, is_learned", [("gpt2", True), ("llama", False)])
def test_a_classifier_that_cuts_nothing(scripts, small, folder_of, arch, is_learned):
    """Learned positions end at some length: a longer text would be an IndexError, hours into a run."""
    config = config_of(arch, architectures=["GPT2ForSequenceClassification"])
    config.id2label = dict(enumerate(["inform", "question", "directive", "commissive"]))
    found = findings(scripts["ppo_dialog"], small("ppo_dialog", reward_model_path=folder_of(config)))
    assert texts(found) == []
    hints = [text for text in texts(found, "remark") if "set model_max_length to 256" in text]
    assert len(hints) == is_learned, texts(found, "remark")
    assert not hints or hints[0].startswith("--reward-model-path")


@pytest.mark.parametrize("environment, said", [(None, 0), ("mine.py:Game", 8)])
def test_how_far_a_trajectory_goes(scripts, environment, said):
    """What an environment says first comes on top."""
    args = scripts["grpo_tools"].Args(
        max_prompt_length=100, response_length=50, max_tool_tokens=8, environment=environment
    )
    x = SimpleNamespace(kind="tools", args=args)
    assert check.longest_text(x)[0] == 100 + 50 + said
