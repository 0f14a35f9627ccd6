"""Unusual models, tokenizers and data: used as they are, or refused."""

import gzip
import json
import shutil
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from conftest import ACTS, RL
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

pytest_plugins = ["run_fixtures"]
CPU = torch.device("cpu")
SIZES = dict(vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
SIZES |= dict(num_key_value_heads=2, intermediate_size=32, initializer_range=0.3)


@pytest.fixture
def script(scripts):
    """ppo_sentiment.py as a module."""
    return scripts["ppo_sentiment"]


@pytest.fixture
def copy_of(tmp_path):
    """copy_of(folder) -> a copy that a test may damage."""
    return lambda folder: Path(shutil.copytree(folder, tmp_path / "copy"))


def random_ids(*shape, seed=0):
    return torch.randint(2, 300, shape, generator=torch.Generator().manual_seed(seed))


def model_of(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


# ---- Data --------------------------------------------------------------------------------------------------


VALUES = [
    dict(x=72, y="2024-01-15", z=[1]),
    dict(x=3.5, y=None, z=[2.5, "7"]),
    dict(x="7", y='{"a": 1}', w={"a": "true"}),
]


@pytest.mark.parametrize("name", ["train.jsonl", "train.jsonl.gz", "train-00000-of-00002.jsonl"])
def test_values_stay_as_they_are(script, tmp_path, name):
    """No 1 becomes 1.0, and no text a date. What editors leave next to a file is no part of the split."""
    for number, file in enumerate([name, f"{name}~", f"{name}.bak", "train-2.jsonl.tmp"]):
        rows = VALUES if number == 0 else [dict(x="of a backup")]
        lines = "\n\n".join(map(json.dumps, rows)).encode()
        (tmp_path / file).write_bytes(gzip.compress(lines) if file.endswith("gz") else lines)
    (tmp_path / "test.jsonl").write_text(json.dumps(VALUES[0]))
    train, held_out = script.load_splits(str(tmp_path))
    assert repr(train) == repr(VALUES) and repr(held_out) == repr(VALUES[:1])


def test_chats_with_tools(sft, scripts, tmp_path):
    """Their texts would be missing in what is learned."""
    chat = [dict(role="user", content="2 + 3?"), dict(role="assistant", content="5")]
    line = json.dumps(dict(messages=chat, tools=[{"name": "add"}])) + "\n"
    (tmp_path / "train.jsonl").write_text(3 * line)
    with pytest.raises(scripts["sft"].UserError, match="column tools"):
        sft(dataset_name=str(tmp_path))


def test_names_of_labels(scripts, tmp_path):
    """Spaces around them do not count, and no two are equal."""
    script = scripts["reward_model"]
    rows = [dict(text="a", label=0), dict(text="b", label=1)]
    names, _ = script.find_classes(rows, script.Args(label_names="negative, positive"))
    assert names == ["negative", "positive"]
    with pytest.raises(script.UserError, match="no two equal"):
        script.find_classes(rows, script.Args(label_names="bad,bad"))


# ---- Tokenizers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["gpt_neox", "bert"])
def test_a_folder_without_a_tokenizer(script, tmp_path, arch):
    """transformers makes one up. It turns each text into nothing, or into the same special tokens."""
    transformers.AutoConfig.for_model(arch).save_pretrained(tmp_path)
    with pytest.raises((script.UserError, IndexError)):
        script.load_tokenizer(str(tmp_path), for_prompts=arch == "gpt_neox")


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_side_to_cut_is_saved(scripts, tiny_classifier, tmp_path, side):
    """An answer at the end of a dialog must survive, in plain transformers too."""
    script = scripts["reward_model"]
    model = AutoModelForSequenceClassification.from_pretrained(tiny_classifier())
    tokenizer = AutoTokenizer.from_pretrained(tiny_classifier())
    tokenizer.truncation_side = side
    tokenizer("word")  # forgets what an earlier call has cut
    script.save_reward_model(model, tokenizer, script.Args(max_length=4), tmp_path)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    ids = saved("one two three four five", add_special_tokens=False).input_ids
    cut = saved("one two three four five", add_special_tokens=False, truncation=True).input_ids
    assert cut == (ids[-4:] if side == "left" else ids[:4])


def test_the_side_to_cut_is_that_of_the_data(scripts, tiny_pairs, tiny_classifier, small_folder):
    """Texts with a label lose their end, everything else its beginning, whatever the tokenizer came with."""
    script = scripts["reward_model"]
    tokenizer = AutoTokenizer.from_pretrained(tiny_classifier())
    folders = {"left": (tiny_pairs, small_folder("dialogs")), "right": (small_folder("reviews"),)}
    for side, of_side in folders.items():
        for folder in of_side:
            tokenizer.truncation_side = "right" if side == "left" else "left"
            names = None if folder == tiny_pairs else ",".join(ACTS[: 2 if side == "right" else 4])
            script.load_data(script.Args(dataset_name=folder, label_names=names), tokenizer)
            assert tokenizer.truncation_side == side


@pytest.fixture
def eos_appender(tiny_lm, copy_of):
    """A language model whose tokenizer appends EOS to every text, and whose pad is EOS."""
    folder = copy_of(tiny_lm("gpt2", "eos"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    eos = tokenizer.eos_token
    tokenizer._tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"$A {eos}", special_tokens=[(eos, tokenizer.eos_token_id)]
    )
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", ["sft", *RL])
def test_a_tokenizer_that_appends_eos(scripts, eos_appender, name):
    """A prompt would end in EOS. A classifier of texts may have such a tokenizer."""
    with pytest.raises(scripts[name].UserError, match="appends EOS"):
        scripts[name].load_tokenizer(eos_appender)
    loaded = scripts[name].load_tokenizer(eos_appender, for_prompts=False)
    assert loaded("sun").input_ids[-1] == loaded.eos_token_id


def test_a_reward_model_whose_tokenizer_appends_eos(scripts, reward, eos_appender, tiny_pairs):
    """With preferences, EOS would stand between prompt and response. With labels, transformers must not take
    the EOS of a text for a pad."""
    with pytest.raises(scripts["reward_model"].UserError, match="appends EOS"):
        reward("pairs", model_name_or_path=eos_appender, dataset_name=tiny_pairs)
    _, folder, _ = reward("labels", model_name_or_path=eos_appender, num_train_epochs=0.1)
    assert transformers.AutoConfig.from_pretrained(folder / "model").pad_token_id is None


# ---- Models ------------------------------------------------------------------------------------------------


def test_rope_that_changes_with_the_length(script):
    """Phi-3's longrope has other factors for long texts; keys in the cache have those of short ones."""
    rope = dict(rope_type="longrope", short_factor=[1.0] * 8, long_factor=[4.0] * 8, rope_theta=1e4)
    for length, is_refused in ((20, False), (40, True)):
        config = transformers.Phi3Config(
            **SIZES,
            max_position_embeddings=256,
            original_max_position_embeddings=32,
            pad_token_id=0,
            rope_parameters=rope | dict(original_max_position_embeddings=32),
        )
        if is_refused:
            with pytest.raises(script.UserError, match="phi does not work here"):
                script.check_model(model_of(config), "phi", length)
        else:
            script.check_model(model_of(config), "phi", length)


def test_a_soft_cap_on_small_logits(script):
    config = transformers.Gemma2Config(**SIZES, head_dim=16, final_logit_softcapping=30.0)
    with pytest.raises(script.UserError, match="gemma does not work here"):
        script.check_model(model_of(config), "gemma", 10)


def test_noise_of_a_router(scripts, tmp_path):
    """Mixtral's jitter, in train mode."""
    config = transformers.MixtralConfig(**SIZES, num_local_experts=2, router_jitter_noise=0.5)
    model_of(config).save_pretrained(tmp_path)
    script = scripts["sft"]
    model = script.load_model(AutoModelForCausalLM, str(tmp_path)).train()
    ids = random_ids(2, 9)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, model(ids).logits)


def test_a_classifier_that_looks_to_its_right(script):
    """Gemma 3's text model may be bidirectional. Then it must not read the pads."""
    flags = dict(use_bidirectional_attention=True, num_labels=1)
    config = transformers.Gemma3TextConfig(**SIZES, head_dim=16, **flags)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    texts = [random_ids(length, seed=length).tolist() for length in (3, 9, 6)]
    found = script.score_tokens(model, texts, 3)
    alone = torch.stack([script.score_tokens(model, [text], 1)[0] for text in texts])
    torch.testing.assert_close(found, alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("change", [dict(architectures=None), dict(architectures=["GPT2Model"])])
def test_a_head_in_spite_of_the_config(scripts, world, copy_of, change):
    """The file has the head, so it is used, whatever the config says."""
    script = scripts["rloo_tldr"]
    folder = copy_of(world.preference_model())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    expected = script.load_reward_model(script.Args(dtype="float32"), world.preference_model(), CPU)
    found = script.load_reward_model(script.Args(dtype="float32"), str(folder), CPU)
    texts = ["A sun."], [" It shines."]
    assert found(*texts) == expected(*texts)
