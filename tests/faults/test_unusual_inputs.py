"""Unusual models, tokenizers, data and reward functions: used as they are, or refused in one line."""

import gzip
import json
import shutil
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from conftest import RL
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

pytest_plugins = ["run_fixtures"]
CPU = torch.device("cpu")
SIZES = dict(vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
SIZES |= dict(num_key_value_heads=2, intermediate_size=32)


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


@pytest.mark.parametrize("name", ["train.jsonl", "train.jsonl.gz", "train-00000-of-00002.jsonl"])
def test_values_stay_as_they_are(script, tmp_path, name):
    """Dates stay texts, and a column may hold several types."""
    rows = [dict(answer="2024-01-15", mixed=7), dict(answer="2024-01-16", mixed="seven", only_here=[1])]
    text = "".join(json.dumps(row) + "\n\n" for row in rows)
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    train = script.read_splits(str(tmp_path))["train"]
    assert train["answer"][:] == ["2024-01-15", "2024-01-16"]
    assert train["mixed"][:] == [7, "seven"] and train["only_here"][:] == [None, [1]]


def test_backups_are_not_read(script, tmp_path):
    """What editors leave beside a file is no part of the split; what the Hub cuts into several files is."""
    names = ["train-0.jsonl", "train-1.jsonl", "train-0.jsonl~", "train-1.jsonl.bak", "train-2.jsonl.tmp"]
    for number, name in enumerate(names):
        (tmp_path / name).write_text(json.dumps(dict(text=f"text {number}")) + "\n")
    assert script.read_splits(str(tmp_path))["train"]["text"][:] == ["text 0", "text 1"]


@pytest.mark.parametrize("line", ["", '{"text": "half of a character: \\ud800"}'])
def test_files_that_cannot_be_read(script, tmp_path, line):
    (tmp_path / "train.jsonl").write_text(line + "\n")
    with pytest.raises(script.UserError, match="cannot load .*train.jsonl"):
        script.read_splits(str(tmp_path))


def test_chats_with_tools(sft, scripts, tmp_path):
    """Their texts would be missing in what is learned."""
    chat = [dict(role="user", content="2 + 3?"), dict(role="assistant", content="5")]
    line = json.dumps(dict(messages=chat, tools=[{"name": "add"}])) + "\n"
    (tmp_path / "train.jsonl").write_text(3 * line)
    with pytest.raises(scripts["sft"].UserError, match="column tools"):
        sft(dataset_name=str(tmp_path))


def test_two_turns_of_the_assistant(scripts, tiny_lm):
    """The second one has no prompt of its own, so it is not learned; every text occurs once."""
    script = scripts["sft"]
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm())
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    roles = ["user", "assistant", "assistant", "user", "assistant"]
    texts = ["2?", "two", "three", "4?", "four"]
    messages = [dict(role=role, content=text) for role, text in zip(roles, texts)]
    parts = script.chat_parts(tokenizer, messages, "2026-01-02")
    assert "".join(text for text, _ in parts) == tokenizer.apply_chat_template(messages, tokenize=False)
    assert [text for text, is_learned in parts if is_learned] == ["two</>", "four</>"]


@pytest.mark.parametrize("call", ["strftime_now( '%Y' )", 'strftime_now("%Y")', "strftime_now(format)"])
def test_templates_that_write_the_date(scripts, tiny_lm, call):
    script = scripts["rloo_tldr"]
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm())
    tokenizer.chat_template = "{% set format = '%Y' %}{{ " + call + " }}: {{ messages[0].content }}"
    messages = [dict(role="user", content="Hi")]
    if "format" in call:
        with pytest.raises(script.UserError, match="strftime_now"):
            script.render_chat(tokenizer, messages, "2020-02-03")
    else:
        assert script.render_chat(tokenizer, messages, "2020-02-03") == "2020: Hi"


def test_names_of_labels(scripts, tmp_path):
    """Spaces around them do not count, and no two are equal."""
    script = scripts["reward_model"]
    rows = script.datasets.Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]})
    names, _ = script.find_classes(rows, script.Args(label_names="negative, positive"))
    assert names == ["negative", "positive"]
    with pytest.raises(script.UserError, match="no two equal"):
        script.find_classes(rows, script.Args(label_names="bad,bad"))


# ---- Tokenizers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sft", "reward_model", *RL])
@pytest.mark.parametrize("arch", ["gpt_neox", "bert", "roberta", "qwen2"])
def test_a_folder_without_a_tokenizer(scripts, tiny_lm, tmp_path, name, arch):
    """transformers makes one up. It turns each text into nothing, or into the same special tokens."""
    folder = tmp_path / arch
    transformers.AutoConfig.for_model(arch).save_pretrained(folder)
    if arch == "qwen2":  # its list of added tokens has come along
        token = dict(content="<tool_call>", special=False)
        settings = dict(tokenizer_class="Qwen2Tokenizer", added_tokens_decoder={"1": token})
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(scripts[name].UserError, match="has no tokenizer"):
        scripts[name].load_tokenizer(str(folder))


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
            script.load_data(script.Args(dataset_name=folder), tokenizer)
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


def test_a_process_without_a_text_to_score(scripts, small, tiny_classifier, monkeypatch):
    """One held-out text, two processes: one of them has nothing to do."""
    script = scripts["reward_model"]
    model = AutoModelForSequenceClassification.from_pretrained(tiny_classifier())
    accelerator = script.start_accelerator(small("reward_model"))
    row = script.Row([[5, 6, 7]])
    full = script.score_rows(model.to(accelerator.device), [row], accelerator)
    monkeypatch.setattr(script, "local_share", lambda x, accelerator: x[:0])
    empty = script.score_rows(model, [row], accelerator)
    assert full.shape == empty.shape and full.abs().sum() > 0 and empty.abs().sum() == 0


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
            with pytest.raises(script.UserError, match="differ from ours .*with a cache: True"):
                script.check_model(model_of(config), "phi", length)
        else:
            script.check_model(model_of(config), "phi", length)


def test_a_context_that_the_config_calls_otherwise(script):
    """MPT: max_seq_len."""
    config = transformers.MptConfig(d_model=32, n_heads=2, n_layers=1, vocab_size=300, max_seq_len=16)
    script.check_model(model_of(config), "mpt", 16)
    with pytest.raises(script.UserError, match="mpt: this kind of model does not work here"):
        script.check_model(model_of(config), "mpt", 30)


def test_a_soft_cap_on_small_logits(script):
    config = transformers.Gemma2Config(**SIZES, head_dim=16, final_logit_softcapping=30.0)
    with pytest.raises(script.UserError, match="logits: True"):
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


def test_a_reward_model_in_fewer_positions(reward, scripts, tiny_lm, tmp_path):
    """RoBERTa's positions begin at 2, so it can read two tokens less than its config says."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm())
    config = transformers.RobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=66,
    )
    transformers.RobertaForMaskedLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    flags = dict(model_name_or_path=str(tmp_path), num_train_epochs=0.1)
    with pytest.raises(scripts["reward_model"].UserError, match="cannot read 66 tokens"):
        reward(max_length=66, **flags)
    reward(max_length=64, **flags)


def test_a_value_head_of_another_size(ppo, script, tiny_lm, copy_of):
    folder = copy_of(tiny_lm())
    save_file({"weight": torch.zeros(1, 7), "bias": torch.zeros(1)}, folder / "value_head.safetensors")
    with pytest.raises(script.UserError, match="(?s)cannot load .*value_head.safetensors.*size mismatch"):
        ppo(model_name_or_path=str(folder))


def test_a_folder_that_holds_a_model(script, small, tmp_path):
    """An adapter there would be put on top of the new weights when they are loaded."""
    (tmp_path / "run/model").mkdir(parents=True)
    with pytest.raises(script.UserError, match="holds a run"):
        script.train(small("ppo_sentiment", output_dir=str(tmp_path / "run")))


# ---- Functions of users ------------------------------------------------------------------------------------


def functions_of(script, tmp_path, **files):
    """Write files, and load their function `score`. -> what load_functions returns"""
    names = []
    for name, text in files.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        names.append(f"{path}:score")
    return script.load_functions("--reward-fn", names)


@pytest.mark.parametrize(
    "body, message", [("raise KeyError(6)", "failed: KeyError"), ("exit(3)", r"failed: SystemExit\(3\)")]
)
def test_a_generator_that_fails_later(script, tmp_path, body, message):
    text = f"def score(completions, **kwargs):\n    yield 1.0\n    {body}\n"
    functions = functions_of(script, tmp_path, late=text)
    inputs = dict(prompts=["a"] * 2, completions=["b"] * 2, completion_ids=[[1]] * 2)
    with pytest.raises(script.UserError, match=message):
        script.call_reward_functions(functions, [{}] * 2, inputs, None, CPU)


def test_the_directory_of_the_run(script, tmp_path, monkeypatch):
    """A file may change it for itself; the run, and the next file, keep theirs."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    text = "import os\nos.chdir('elsewhere')\ndef score(**kwargs):\n    return [1]\n"
    functions_of(script, tmp_path, moves=text)
    assert Path.cwd() == tmp_path
