"""Whole runs of sft.py and reward_model.py on tiny models: what each option does to losses, labels, weights and files."""

import json
import math
import types

import datasets
import pytest
import tokenizers
import torch
import transformers
from conftest import ACTS
from run_tools import BY_HEART, distance, rows_of, spy, weights, write_rows
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

pytest_plugins = ["run_fixtures"]
EOS = "<|endoftext|>"
SHORT = [
    "The film was warm and clever from the first scene to the last, and I would see it again.",
    "A dull story, badly told: I left after an hour and nobody in the room was sad to go.",
    "Two sailors find a letter in a bottle, and then they argue about it for a very long time.",
    "My sister loved every song of it, and so did the people in the row behind us that night.",
]


def table_of(folder):
    """evaluation.json of a run."""
    return json.loads((folder / "evaluation.json").read_text())


# ---- sft.py ----------------------------------------------------------------------------------------------------------
def test_from_config_with_a_new_tokenizer(sft, tiny_reviews):
    """A model at random and a tokenizer of the asked size; the loss falls, on held-out texts too."""
    config = "gpt2 n_embd=32 n_layer=2 n_head=4 n_positions=128"
    model, folder, rows = sft(from_config=config, train_tokenizer=300, num_train_rows=None, num_train_epochs=4.0)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert len(tokenizer) == 300 == model.config.vocab_size and tokenizer.pad_token_id != tokenizer.eos_token_id
    assert (model.config.n_embd, model.config.n_layer) == (32, 2)
    assert rows[0]["loss"] == pytest.approx(math.log(300), abs=0.3) and rows[-1]["loss"] < rows[0]["loss"] - 1
    table = table_of(folder)
    assert table["after"]["loss"] < table["before"]["loss"] - 1
    assert rows[0]["perplexity"] == pytest.approx(math.exp(rows[0]["loss"]))


def test_from_config_of_a_model_that_lists_its_layers(sft):
    """qwen3 draws a list of the kinds of its layers from their number, and without it the model cannot be saved after the training."""
    sizes = "hidden_size=32 intermediate_size=64 num_hidden_layers=2 num_attention_heads=2 num_key_value_heads=2 head_dim=16"
    _, folder, _ = sft(from_config=f"qwen3 {sizes}", train_tokenizer=300)
    assert AutoModelForCausalLM.from_pretrained(folder / "model").config.num_hidden_layers == 2


def test_a_sample_shows_no_answer_as_its_prompt(scripts, tiny_lm):
    """A short prompt stays one, and something of a short text is left to be written."""
    tokenizer, model = AutoTokenizer.from_pretrained(tiny_lm()), AutoModelForCausalLM.from_pretrained(tiny_lm())
    pairs = [([5, 6, 7, 8], [-100, -100, 7, 8]), ([5, 6, 7], [5, 6, 7]), (list(range(20)), list(range(20))), ([9], [9])]
    rows = scripts["sft"].write_samples(model, tokenizer, pairs, types.SimpleNamespace(num_samples=4))
    assert [row["prompt"] for row in rows] == [tokenizer.decode(ids) for ids in ([5, 6], [5, 6], range(8), [9])]


def test_packing_changes_no_loss(sft, tmp_path):
    """The same documents, packed and not: the same loss a token, since packed documents do not see each other."""
    data = write_rows(tmp_path / "data", train=[dict(text=text) for text in SHORT * 2], test=[dict(text=text) for text in SHORT])
    tables = []
    for packing in (True, False):
        flags = dict(num_train_epochs=1.0, per_device_train_batch_size=8, num_eval_rows=4, learning_rate=1e-3)
        _, folder, rows = sft(f"run-{packing}", packing=packing, dataset_name=data, **flags)
        assert len(rows) == 1
        tables.append((table_of(folder)["before"], rows[0]))
    assert tables[0][0] == pytest.approx(tables[1][0], rel=1e-5)
    assert tables[0][1]["loss"] == pytest.approx(tables[1][1]["loss"], rel=1e-5)  # all of the data in one batch
    assert tables[0][1]["grad_norm"] == pytest.approx(tables[1][1]["grad_norm"], rel=1e-4)


def test_packing_fills_rows(scripts, small, tiny_lm):
    """Packed rows hold several documents and no token more than max_length; without packing a row is one document."""
    script, tokenizer = scripts["sft"], AutoTokenizer.from_pretrained(tiny_lm())
    rows = script.datasets.Dataset.from_dict(dict(text=SHORT * 3))
    pairs = script.documents(rows, tokenizer, small("sft"))
    packed, plain = script.pack(pairs, 100, True), script.pack(pairs, 100, False)
    assert len(plain) == 12 > len(packed) and all(sum(len(ids) for ids, _ in row) <= 100 for row in packed)
    assert [pair for row in packed for pair in row] == pairs


def test_loss_of_a_completion_alone(sft, tiny_lm, tmp_path):
    """With prompt and completion, the loss is that of the completion and its EOS, computed here one by one."""
    rows = [dict(prompt=text[:20], completion=text[20:]) for text in SHORT]
    data = write_rows(tmp_path / "data", train=rows, test=rows)
    _, folder, _ = sft(dataset_name=data)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_lm()).eval(), AutoTokenizer.from_pretrained(tiny_lm())
    losses = []
    for row in rows:
        prompt, completion = tokenizer(row["prompt"]).input_ids, tokenizer(row["completion"]).input_ids + [tokenizer.eos_token_id]
        with torch.no_grad():
            logp = model(torch.tensor([prompt + completion])).logits[0].log_softmax(-1)
        losses += [-logp[len(prompt) - 1 + i, token].item() for i, token in enumerate(completion)]
    assert table_of(folder)["before"]["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)


def test_loss_of_a_text(sft, tiny_lm, tmp_path):
    """With the column text, the loss is on every token but the first, and on EOS; a cut text has no EOS."""
    data = write_rows(tmp_path / "data", train=[dict(text=text) for text in SHORT], test=[dict(text=SHORT[0]), dict(text=SHORT[1] * 9)])
    _, folder, _ = sft(dataset_name=data, max_length=64)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_lm()).eval(), AutoTokenizer.from_pretrained(tiny_lm())
    losses = []
    for text in (SHORT[0], SHORT[1] * 9):
        ids = (tokenizer(text).input_ids + [tokenizer.eos_token_id])[:64]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none"))
    assert table_of(folder)["before"]["loss"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-4)


@pytest.mark.parametrize("pad", ["own", "eos"])
def test_eos_is_learned(sft, tiny_lm, tmp_path, pad):
    """After overfitting four short texts, their samples end with EOS, also where pad is EOS."""
    rows = [dict(text=text) for text in SHORT]
    data = write_rows(tmp_path / "data", train=rows, test=rows)
    model, folder, metrics = sft(model_name_or_path=tiny_lm(pad=pad), dataset_name=data, num_train_epochs=60.0, packing=False,
                                 num_samples=4, learning_rate=2e-2, lr_scheduler_type="cosine")  # fmt: skip
    assert metrics[-1]["loss"] < 0.05 and metrics[-1]["mean_token_accuracy"] == 1
    samples = rows_of(folder, "samples.jsonl")
    assert len(samples) == 4 and all(row["completion"].endswith(EOS) for row in samples)
    assert sum(row["prompt"] + row["completion"] in [text + EOS for text in SHORT] for row in samples) >= 3


def test_sft_gradient_does_not_depend_on_micro_batches(sft):
    """One step of SGD on 8 documents of unequal lengths: as 8, as 2 x 4 and as 8 x 1."""
    results = []
    for n, accumulation in ((8, 1), (4, 2), (1, 8)):
        sizes = dict(per_device_train_batch_size=n, gradient_accumulation_steps=accumulation, num_train_rows=8, packing=False)
        _, folder, rows = sft(f"run{n}", optimizer="torch.optim.SGD", max_grad_norm=None, lr_scheduler_type="constant", **sizes)
        assert len(rows) == 1
        results.append((weights(folder / "model"), rows[0]["loss"]))
    assert distance(results[0][0], results[1][0]) < 1e-6 and distance(results[0][0], results[2][0]) < 1e-6
    assert results[0][1] == pytest.approx(results[1][1]) == pytest.approx(results[2][1])


def test_sft_lora(sft, tiny_lm):
    """Only what LoRA touches differs in model/, which plain transformers loads."""
    model, folder, _ = sft(lora_r=4)
    before, after = weights(tiny_lm()), weights(folder / "model")
    assert {name for name in before if not torch.equal(before[name], after[name])} == {name for name in before if "c_attn.weight" in name}
    state = torch.load(next((folder / "checkpoints").iterdir()) / "state.pt", weights_only=True)
    assert state["parameters"] and all("lora_" in name for name in state["parameters"])
    AutoModelForCausalLM.from_pretrained(folder / "model")


def test_sft_checkpoints_take_no_draw_from_dropout(sft):
    """The pass that looks whether a model is finite before it is saved leaves the masks of the dropout to come as they are."""
    shape = "gpt2 n_embd=32 n_layer=1 n_head=2 n_positions=256 resid_pdrop=0.5"
    start = dict(from_config=shape, train_tokenizer=300)
    (_, often, _), (_, rarely, _) = (sft(name, save_every=every, **start) for name, every in (("often", 1), ("rarely", 0)))
    assert all(torch.equal(x, weights(rarely / "model")[name]) for name, x in weights(often / "model").items())


def test_sft_samples_fit_the_context(scripts, tiny_lm):
    """A prompt that leaves no room for 40 tokens is cut, and so are the samples of a model with a context below 48."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_lm()), AutoTokenizer.from_pretrained(tiny_lm())
    context = model.config.max_position_embeddings
    ids = torch.randint(3, 1000, (context,)).tolist()
    pairs = [(ids, [-100] * (context - 2) + ids[-2:]), (ids, ids)]
    rows = scripts["sft"].write_samples(model, tokenizer, pairs, scripts["sft"].Args())
    assert [row["prompt"] for row in rows] == [tokenizer.decode(ids[38 - context : -2]), tokenizer.decode(ids[:8])]
    short = AutoModelForCausalLM.from_config(type(model.config)(**model.config.to_dict() | dict(n_positions=20)))
    assert len(scripts["sft"].write_samples(short, tokenizer, [(ids[:20], ids[:20])], scripts["sft"].Args())) == 1


def test_reward_encoder_leaves_out_what_is_no_text(scripts, capsys):
    """An encoder's tokenizer marks the ends of an empty text too; such rows, null and numbers are left out all the same."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[CLS]": 0, "[SEP]": 1, "good": 2}, unk_token="good"))
    words.post_processor = tokenizers.processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)])
    rows = datasets.Dataset.from_dict(dict(text=["good", None, ""], label=[1, 0, 0]))
    module, tokenizer = scripts["reward_model"], transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    assert module.examples(rows, {0: 0, 1: 1}, tokenizer, module.Args()) == [([[0, 2, 1]], 1)]
    assert "left out 2 of 3" in capsys.readouterr().out


@pytest.mark.parametrize("arch", ["gpt2", "gpt_neo", "gpt_neox", "opt", "bloom", "llama", "qwen2"])
def test_sft_architectures(sft, tiny_lm, arch):
    """Each architecture learns, with packing where its positions allow it, and model/ is what was trained."""
    flags = dict(packing=arch not in ("bloom", "opt"), num_train_epochs=2.0, learning_rate=5e-3)
    model, folder, rows = sft(model_name_or_path=tiny_lm(arch), **flags)
    assert table_of(folder)["after"]["loss"] < table_of(folder)["before"]["loss"]
    plain, ids = AutoModelForCausalLM.from_pretrained(folder / "model").eval(), torch.randint(0, 1000, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, model.eval()(ids).logits)


@pytest.mark.parametrize("arch", ["gpt2", "gpt_neo", "gpt_neox", "opt", "bloom", "llama", "qwen2"])
def test_packed_documents_do_not_see_each_other(scripts, small, tiny_lm, tmp_path, arch):
    """The held-out loss of packed documents is that of each alone; a model that cannot keep them apart may be refused in one line."""
    data = write_rows(tmp_path / "data", train=[dict(text=text) for text in SHORT], test=[dict(text=text) for text in SHORT])
    tables = []
    for packing in (False, True):
        args = small("sft", f"run-{packing}", model_name_or_path=tiny_lm(arch), packing=packing, dataset_name=data, max_length=200)
        try:
            _, folder = scripts["sft"].train(args)
        except scripts["sft"].UserError as error:
            assert packing and arch in ("opt", "bloom") and "packing" in str(error)
            return
        tables.append(table_of(folder)["before"])
    assert tables[0] == pytest.approx(tables[1], rel=1e-5)


def test_sft_gradient_checkpointing_and_bf16(sft):
    """Recomputed activations change nothing; bf16 keeps fp32 weights and comes close."""
    results = {}
    for name, flags in dict(plain={}, again=dict(gradient_checkpointing=True), half=dict(bf16=True)).items():
        model, folder, rows = sft(name, optimizer="torch.optim.SGD", **flags)
        results[name] = rows[0]["loss"], weights(folder / "model")
    assert model.is_gradient_checkpointing is False and {x.dtype for x in results["half"][1].values()} == {torch.float32}
    assert results["plain"][0] == pytest.approx(results["again"][0], abs=1e-6)
    assert distance(results["plain"][1], results["again"][1]) < 1e-6
    assert results["half"][0] == pytest.approx(results["plain"][0], rel=1e-2) and results["half"][0] != results["plain"][0]


def test_save_dtype(sft, reward, scripts, tiny_lm):
    """bfloat16 halves model/, and the scripts load it in float32: the same numbers, rounded."""
    for run, auto_class in ((sft, AutoModelForCausalLM), (reward, AutoModelForSequenceClassification)):
        script = "sft" if run is sft else "reward_model"
        _, full, _ = run(f"{script}-32")
        _, half, _ = run(f"{script}-16", save_dtype="bfloat16")
        a, b = weights(full / "model"), weights(half / "model")
        assert all(b[name].dtype is torch.bfloat16 and torch.equal(b[name], a[name].bfloat16()) for name in a)
        model = scripts[script].load_model(auto_class, str(half / "model"))
        assert all(p.dtype is torch.float32 for p in model.parameters())


HOLES = [  # dialogues of which only some turns can be used
    dict(dialog=["Who  are\nyou?", "I am Leo.", "Then come in."], act=[2, 1, 3]),
    dict(dialog=["Fine.", " "], act=[1, 1]),
    dict(dialog=["Alone."], act=[1]),
    dict(dialog=["Is it?", "It is."], act=[2, 1, 3]),
    dict(dialog=["Was it?", "It was."], act=None),
    dict(dialog=None, act=[1, 2]),
    dict(dialog=["Yes.", None], act=[1, 2]),
    dict(dialog=["One.", "Two.", "Three."], act=[1, 0, 4]),
    dict(dialog=["Four.", "Five."], act=[1, None]),
]


@pytest.mark.parametrize("end", ["eos", " <EOU>"])
def test_documents_of_dialogues(scripts, small, tiny_lm, end):
    """Each utterance behind a space and with its mark; one EOS at the very end, and none where it was cut; all of it is learned."""
    script, tokenizer = scripts["sft"], AutoTokenizer.from_pretrained(tiny_lm())
    rows = script.datasets.Dataset.from_list(HOLES)
    pairs = script.documents(rows, tokenizer, small("sft", utterance_end=end))
    mark, last = (EOS, "") if end == "eos" else (end, EOS)
    said = [["Who are you?", "I am Leo.", "Then come in."], ["Is it?", "It is."], ["Was it?", "It was."], ["One.", "Two.", "Three."],
            ["Four.", "Five."]]  # fmt: skip
    assert [tokenizer.decode(ids) for ids, _ in pairs] == ["".join(f" {text}{mark}" for text in texts) + last for texts in said]
    assert all(ids == labels for ids, labels in pairs)
    cut = script.documents(rows, tokenizer, small("sft", utterance_end=end, max_length=9))
    assert [ids for ids, _ in cut] == [ids[:9] for ids, _ in pairs] and cut[0][0][-1] != tokenizer.eos_token_id


@pytest.mark.parametrize("end", ["eos", " <EOU>"])
def test_loss_of_a_dialogue(sft, tiny_lm, tmp_path, end):
    """The loss is on every token but the first, marks and EOS included, computed here one by one."""
    data = write_rows(tmp_path / "data", train=HOLES, test=HOLES[:4])
    _, folder, _ = sft(dataset_name=data, utterance_end=end)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_lm()).eval(), AutoTokenizer.from_pretrained(tiny_lm())
    mark, eos, losses = "" if end == "eos" else end, [tokenizer.eos_token_id], []
    for texts in (["Who are you?", "I am Leo.", "Then come in."], ["Is it?", "It is."]):
        parts = [tokenizer(f" {text}{mark}").input_ids + (eos if end == "eos" else []) for text in texts]
        ids = sum(parts, []) + ([] if end == "eos" else eos)
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none"))
    assert table_of(folder)["before"]["loss"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-4)


def test_a_tokenizer_of_dialogues_with_holes(sft, tmp_path):
    """What documents() leaves out does not stop a new tokenizer either."""
    data = write_rows(tmp_path / "data", train=HOLES, test=HOLES)
    _, folder, _ = sft(dataset_name=data, from_config="gpt2 n_embd=32 n_layer=2 n_head=4 n_positions=128", train_tokenizer=280)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert tokenizer.decode(tokenizer(" I am Leo.").input_ids) == " I am Leo."


@pytest.mark.parametrize("end", ["eos", " <EOU>"])
def test_the_end_of_an_utterance_is_learned(sft, talker, end):
    """By heart: with eos, EOS stands after each utterance; with a mark, after the last one alone, and the mark after each."""
    model, tokenizer = talker.model, AutoTokenizer.from_pretrained(talker.model)
    if end == "eos":
        flags = dict(num_train_epochs=80.0, packing=False, per_device_train_batch_size=5, num_samples=0)
        model = sft(dataset_name=talker.data, utterance_end="eos", **flags)[1] / "model"
    model, eos = AutoModelForCausalLM.from_pretrained(model).eval(), tokenizer.eos_token_id
    for texts, _ in BY_HEART:
        ids = [tokenizer(f" {text}{'' if end == 'eos' else end}").input_ids + [eos] * (end == "eos") for text in texts]
        whole = sum(ids, []) + [eos] * (end != "eos")
        with torch.no_grad():
            told = model(torch.tensor([whole])).logits[0].argmax(-1).tolist()
        assert told[len(ids[0]) - 2 : -1] == whole[len(ids[0]) - 1 :]  # from the end of the first utterance on


# ---- reward_model.py -------------------------------------------------------------------------------------------------
def labelled(folder, tiny_reviews, count=24):
    """A data set whose held-out rows are its training rows. -> str"""
    rows = [json.loads(line) for line in open(f"{tiny_reviews}/train.jsonl")][:count]
    return write_rows(folder, train=rows, test=rows)


def assert_same_as_pipeline(scripts, folder, names):
    """transformers' pipeline gives the probabilities that our own reading of the model gives."""
    script = scripts["reward_model"]
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    pipe = transformers.pipeline("text-classification", model=str(folder), top_k=None)
    ids = tokenizer(SHORT).input_ids
    with torch.no_grad():
        ours = script.sequence_logits(model, *script.collate_texts([([x], 0) for x in ids], "cpu")[:2]).softmax(-1)
    for row, said in zip(ours, pipe(SHORT)):
        said = {entry["label"]: entry["score"] for entry in said}
        assert list(said.keys() & set(names)) and set(said) == set(names)
        assert [said[name] for name in names] == pytest.approx(row.tolist(), abs=1e-5)


def test_classifier_overfits(reward, scripts, tiny_reviews, tmp_path):
    """It learns 24 texts by heart; the names of the labels are in config.json; the pipeline agrees."""
    data = labelled(tmp_path / "data", tiny_reviews)
    flags = dict(dataset_name=data, num_train_epochs=20.0, learning_rate=3e-3, num_eval_rows=24, label_names="bad,good")
    _, folder, rows = reward(**flags)
    table = table_of(folder)
    assert table["accuracy"] > 0.9 and table["labels"] == ["bad", "good"] and rows[-1]["loss"] < 0.5 * rows[0]["loss"]
    assert sum(map(sum, table["confusion"])) == 24 and table["confusion"][0][0] + table["confusion"][1][1] == round(24 * table["accuracy"])
    config = json.loads((folder / "model/config.json").read_text())
    assert config["id2label"] == {"0": "bad", "1": "good"} and config["label2id"] == {"bad": 0, "good": 1}
    assert_same_as_pipeline(scripts, folder / "model", ["bad", "good"])


DECODERS = [(arch, "own") for arch in ("gpt2", "gpt_neo", "gpt_neox", "opt", "bloom", "llama", "qwen2")]
DECODERS += [("gpt2", "eos"), ("llama", "eos")]


@pytest.mark.parametrize("arch, pad", DECODERS)
def test_decoders_as_classifiers(reward, scripts, tiny_lm, arch, pad):
    """A language model gets a head, read at the last token; where pad is EOS too. The pipeline agrees."""
    _, folder, rows = reward(model_name_or_path=tiny_lm(arch, pad), label_names="negative,positive", learning_rate=1e-3)
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert_same_as_pipeline(scripts, folder / "model", ["negative", "positive"])


def test_a_reward_model_for_ppo(reward, scripts, small):
    """What reward_model.py saves is a reward for ppo_sentiment.py: the logit of its label."""
    _, folder, _ = reward(label_names="negative,positive")
    score = scripts["ppo_sentiment"].load_reward(small("ppo_sentiment", reward_model_path=str(folder / "model")), torch.device("cpu"))
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    with torch.no_grad():
        logits = torch.cat([model(**tokenizer(text, return_tensors="pt")).logits[:, 1] for text in SHORT])
    torch.testing.assert_close(score([text[:30] for text in SHORT], [text[30:] for text in SHORT]), logits, atol=1e-5, rtol=1e-5)


def test_turns_and_acts(scripts):
    """Trick 38: acts begin at 1, so a label is an act less 1. Each answer with the utterance before it; what is not whole is left out."""
    script = scripts["reward_model"]
    rows = script.act_rows(script.datasets.Dataset.from_list(HOLES), script.Args())
    assert list(zip(rows["text"], rows["label"])) == [
        ("Who are you? I am Leo.", 0), ("I am Leo. Then come in.", 2), ("Two. Three.", 3)]  # fmt: skip


def test_a_classifier_of_acts_for_ppo_dialog(reward, dialog, scripts, small, tiny_dialogs, tiny_classifier):
    """What reward_model.py makes of dialogues has four named classes, reads the end of long texts, and is an intent for ppo_dialog.py."""
    _, folder, rows = reward(dataset_name=tiny_dialogs, label_names=",".join(ACTS), num_eval_rows=100)
    assert table_of(folder)["labels"] == list(ACTS) and sum(map(sum, table_of(folder)["confusion"])) == 100
    assert rows[0]["loss"] > 1 and len(rows) == 38  # of 301 turns
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model").eval()
    tokenizer, script = AutoTokenizer.from_pretrained(folder / "model"), scripts["ppo_dialog"]
    args = small("ppo_dialog", "other", reward_model_path=str(folder / "model"))
    parts, _, _ = script.load_reward_parts(args, torch.device("cpu"))
    turns = [script.Turn([f"{text} "], "", act, []) for text, act in zip(SHORT, (1, 2, 3, 4))]
    with torch.no_grad():
        probs = torch.cat([model(**tokenizer(f"{text} I will.", return_tensors="pt")).logits for text in SHORT]).softmax(-1)
    torch.testing.assert_close(parts(turns, ["I will."] * 4)["intent"], probs.diag(), atol=1e-5, rtol=1e-5)
    _, _, metrics = dialog("ppo", reward_model_path=str(folder / "model"))
    assert 0 < metrics[0]["intent"] < 1


def test_a_long_turn_keeps_its_answer(reward, scripts, monkeypatch, tmp_path):
    """Where a pair of utterances is longer than max_length, its beginning is left out, in training as in ppo_dialog.py."""
    rows = [dict(dialog=["long " * 100, f"The answer {i}."], act=[1, 1 + i % 4]) for i in range(8)]
    calls = spy(monkeypatch, scripts["reward_model"], "examples")
    _, folder, _ = reward(dataset_name=write_rows(tmp_path / "data", train=rows, test=rows), label_names=",".join(ACTS), max_length=16)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    texts = sorted((tokenizer.decode(ids), label) for [ids], label in calls[0][1])
    assert [label for _, label in texts] == [0, 1, 2, 3] * 2
    assert all(len(ids) == 16 for [ids], _ in calls[0][1]) and all(text.endswith(f" The answer {i}.") for i, (text, _) in enumerate(texts))


def test_more_classes(reward, tiny_reviews, tmp_path):
    """Labels that are words, three of them: the classes are they, in alphabetical order."""
    rows = [json.loads(line) for line in open(f"{tiny_reviews}/train.jsonl")]
    rows = [dict(text=row["text"], label=("sad", "mixed", "glad")[i % 3]) for i, row in enumerate(rows)]
    data = write_rows(tmp_path / "data", train=rows, test=rows[:12])
    from_config = "distilbert dim=32 n_layers=1 n_heads=4 hidden_dim=64 max_position_embeddings=128"
    model, folder, metrics = reward(dataset_name=data, num_eval_rows=12, from_config=from_config)
    assert table_of(folder)["labels"] == ["glad", "mixed", "sad"] and model.config.num_labels == 3
    assert metrics[0]["loss"] == pytest.approx(math.log(3), abs=0.3)
    assert [sum(row) for row in table_of(folder)["confusion"]] == [4, 4, 4]


def test_shards_are_disjoint(reward, scripts, tiny_reviews, monkeypatch):
    """The two halves 0/2 and 1/2 share no row, and together they are the data."""
    halves = []
    for i in (0, 1):
        with monkeypatch.context() as patch:
            calls = spy(patch, scripts["reward_model"], "examples")
            reward(f"run{i}", train_shard=f"{i}/2")
        halves.append(list(calls[0][0][0]["text"]))
    everything = [json.loads(line)["text"] for line in open(f"{tiny_reviews}/train.jsonl")]
    assert not set(halves[0]) & set(halves[1]) and sorted(halves[0] + halves[1]) == sorted(everything)


def test_prefixes_while_training(reward, scripts, monkeypatch):
    """With min_prefix_length texts are cut at random places from there on, in training and not in the evaluation."""
    with monkeypatch.context() as patch:
        calls = spy(patch, scripts["reward_model"], "collate_texts")
        reward(min_prefix_length=4)
    trained = [mask.sum(1) for _, (_, mask, *_) in calls[:6]]
    held = calls[-1][1][1].sum(1)
    assert min(x.min() for x in trained) >= 4 and min(x.min() for x in trained) < 15 and held.min() > 15
    assert len(torch.cat(trained).unique()) > 15


def test_prefixes_keep_the_mark_at_the_end(reward, scripts, monkeypatch, tiny_classifier, tmp_path):
    """What BERT's tokenizer puts behind each text stands behind its beginnings too."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_classifier())
    tokenizer.sep_token = tokenizer.eos_token
    mark = [(tokenizer.sep_token, tokenizer.sep_token_id)]
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(f"$A {tokenizer.sep_token}", special_tokens=mark)
    tokenizer.save_pretrained(tmp_path / "model")
    AutoModelForSequenceClassification.from_pretrained(tiny_classifier()).save_pretrained(tmp_path / "model")
    calls = spy(monkeypatch, scripts["reward_model"], "collate_texts")
    reward(model_name_or_path=str(tmp_path / "model"), min_prefix_length=4)
    for _, (ids, mask, *_) in calls:
        assert (ids.gather(1, mask.sum(1, keepdim=True) - 1) == tokenizer.sep_token_id).all()
    assert min(mask.sum(1).min() for _, (_, mask, *_) in calls) < 15


def test_reward_gradient_does_not_depend_on_micro_batches(reward):
    """One step of SGD on 8 texts: as 8, as 2 x 4 and as 8 x 1."""
    results = []
    for n, accumulation in ((8, 1), (4, 2), (1, 8)):
        sizes = dict(per_device_train_batch_size=n, gradient_accumulation_steps=accumulation, num_train_epochs=8 / 48)
        _, folder, rows = reward(f"run{n}", optimizer="torch.optim.SGD", max_grad_norm=None, lr_scheduler_type="constant", **sizes)
        assert len(rows) == 1
        results.append(weights(folder / "model"))
    assert distance(results[0], results[1]) < 1e-6 and distance(results[0], results[2]) < 1e-6


@pytest.mark.parametrize("base", ["distilbert", "gpt2", "llama"])
def test_reward_lora(reward, scripts, tiny_lm, tiny_classifier, base):
    """LoRA trains a classifier of either family, with its new head; the merged model is in plain transformers what was trained."""
    path = tiny_classifier() if base == "distilbert" else tiny_lm(base)
    _, folder, rows = reward(model_name_or_path=path, lora_r=4, label_names="negative,positive")
    assert all(math.isfinite(row["loss"]) for row in rows)
    state = torch.load(next((folder / "checkpoints").iterdir()) / "state.pt", weights_only=True)["parameters"]
    assert any("lora_B" in name for name in state) and any("score" in name or "classifier" in name for name in state)
    assert_same_as_pipeline(scripts, folder / "model", ["negative", "positive"])
    assert len(weights(folder / "model")) == len(AutoModelForSequenceClassification.from_pretrained(folder / "model").state_dict())
