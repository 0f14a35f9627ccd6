"""Runs of reward_model.py on tiny models: what is learned from labels and dialog acts, files, options."""

import json
import math

import pytest
import torch
import transformers
from conftest import ACTS
from run_tools import rows_of, same, weights, write_rows
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

pytest_plugins = ["run_fixtures"]
SHORT = [
    "The film was warm and clever from the first scene to the last, and I would see it again.",
    "A dull story, badly told: I left after an hour and nobody in the room was sad to go.",
    "Two sailors find a letter in a bottle, and then they argue about it for a very long time.",
    "My sister loved every song of it, and so did the people in the row behind us that night.",
]


DIALOGS = [  # some can be used, some in part, some not at all
    dict(dialog=["Who  are\nyou?", "I am Leo.", "Then come in."], act=[2, 1, 3]),
    dict(dialog=["Fine.", " "], act=[1, 1]),
    dict(dialog=["Alone."], act=[1]),
    dict(dialog=["Is it?", "It is."], act=[2, 1, 3]),
    dict(dialog=["Was it?", "It was."], act=None),
    dict(dialog=None, act=[1, 2]),
    dict(dialog=["Yes.", None], act=[1, 2]),
    dict(dialog=["One.", "Two.", "Three."], act=[1, None, 4]),
    dict(dialog=["Four.", "Five."], act=[1, None]),
]


def evaluation_of(folder):
    """evaluation.json of a run."""
    return json.loads((folder / "evaluation.json").read_text())


def classifier(folder):
    """The same of a classifier."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def assert_same_as_pipeline(scripts, folder, names):
    """The pipeline of transformers gives the probabilities that the script computes, for a padded batch."""
    script = scripts["reward_model"]
    model, tokenizer = classifier(folder)
    rows = [script.Row([ids]) for ids in tokenizer(SHORT).input_ids]
    _, ids, mask, _ = script.collate_texts(rows, "cpu")
    with torch.no_grad():
        ours = script.sequence_logits(model, ids, mask).softmax(-1)
    pipeline = transformers.pipeline("text-classification", model=str(folder), top_k=None)
    for probs, entries in zip(ours, pipeline(SHORT)):
        theirs = {entry["label"]: entry["score"] for entry in entries}
        assert set(theirs) == set(names)
        assert [theirs[name] for name in names] == pytest.approx(probs.tolist(), abs=1e-5)


# ---- Labels ------------------------------------------------------------------------------------------------


def test_a_classifier_overfits(reward, scripts, tiny_reviews, tmp_path):
    """It learns 24 texts by heart. The names of the labels are in config.json. The pipeline agrees."""
    rows = rows_of(tiny_reviews, "train.jsonl")[:24]
    _, folder, metrics = reward(
        dataset_name=write_rows(tmp_path / "data", train=rows, test=rows[:17]),
        num_train_epochs=20.0,
        learning_rate=3e-3,
        num_eval_prompts=24,
        label_names="bad,good",
    )
    assert metrics[-1]["loss"] < 0.5 * metrics[0]["loss"]
    evaluation = evaluation_of(folder)
    assert evaluation["accuracy"] > 0.9 and evaluation["labels"] == ["bad", "good"]
    [[true_bad, false_good], [false_bad, true_good]] = evaluation["confusion"]
    assert true_bad + true_good == round(17 * evaluation["accuracy"])
    num_good = sum(row["label"] for row in rows[:17])
    assert [true_bad + false_good, true_good + false_bad] == [17 - num_good, num_good]
    config = json.loads((folder / "model/config.json").read_text())
    assert config["id2label"] == {"0": "bad", "1": "good"}
    assert config["label2id"] == {"bad": 0, "good": 1}
    assert_same_as_pipeline(scripts, folder / "model", ["bad", "good"])


@pytest.mark.parametrize("arch, pad", [("gpt2", "eos"), ("llama", "own"), ("opt", "own")])
def test_decoders_as_classifiers(reward, scripts, tiny_lm, arch, pad):
    """A language model gets a head, read at the last token, also if pad is EOS. The pipeline agrees."""
    lm = tiny_lm(arch, pad)
    _, folder, rows = reward(model_name_or_path=lm, label_names="negative,positive", learning_rate=1e-3)
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert_same_as_pipeline(scripts, folder / "model", ["negative", "positive"])


def test_a_reward_model_for_ppo(reward, scripts, small):
    """What reward_model.py saves is a reward for ppo_sentiment.py: the logit of its label."""
    _, folder, _ = reward(label_names="negative,positive")
    args = small("ppo_sentiment", reward_model_path=str(folder / "model"))
    functions = scripts["ppo_sentiment"].load_reward(args, torch.device("cpu"))
    model, tokenizer = classifier(folder / "model")
    with torch.no_grad():
        logits = [model(**tokenizer(text, return_tensors="pt")).logits[0, 1] for text in SHORT]
    scores = functions["classifier"]([text[:30] for text in SHORT], [text[30:] for text in SHORT])
    assert scores == pytest.approx(torch.stack(logits).tolist(), abs=1e-5)


def test_words_as_labels(reward, tiny_reviews, tmp_path):
    """Three labels that are words: the classes have their names, in alphabetical order."""
    rows = rows_of(tiny_reviews, "train.jsonl")
    rows = [dict(text=row["text"], label=("sad", "mixed", "glad")[i % 3]) for i, row in enumerate(rows)]
    held_out = [row for i, row in enumerate(rows[36:]) if i not in (0, 3, 1)]  # 2 sad, 3 mixed, 4 glad
    model, folder, metrics = reward(
        dataset_name=write_rows(tmp_path / "data", train=rows[:36], test=held_out),
        num_eval_prompts=12,
    )
    assert model.config.num_labels == 3
    assert metrics[0]["loss"] == pytest.approx(math.log(3), abs=0.3)
    assert evaluation_of(folder)["labels"] == ["glad", "mixed", "sad"]
    assert [sum(row) for row in evaluation_of(folder)["confusion"]] == [4, 3, 2]


# ---- Options -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", ["distilbert", "gpt2", "llama"])
def test_reward_lora(reward, scripts, tiny_lm, tiny_classifier, base):
    """LoRA trains adapters and the new head. The merged model is complete: plain transformers loads it."""
    path = tiny_classifier() if base == "distilbert" else tiny_lm(base)
    _, folder, rows = reward(model_name_or_path=path, lora_r=4, label_names="negative,positive")
    assert all(math.isfinite(row["loss"]) for row in rows)
    [checkpoint] = (folder / "checkpoints").iterdir()
    trained = load_file(checkpoint / "trained.safetensors")
    assert any("lora_B" in name for name in trained)
    assert any("score" in name or "classifier" in name for name in trained)
    assert_same_as_pipeline(scripts, folder / "model", ["negative", "positive"])
    model, _ = classifier(folder / "model")
    assert weights(folder / "model").keys() == model.state_dict().keys()


@pytest.mark.parametrize("modules", ["all-linear", "query,value"])
def test_lora_trains_berts_pooler_as_a_whole(reward, tiny_classifier, tmp_path, modules):
    """Files of a BERT language model lack it, so it may be new. It is inside the transformer."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_classifier())
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        pad_token_id=tokenizer.pad_token_id,
    )
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    flags = dict(lora_r=4, lora_target_modules=modules, label_names="negative,positive")
    _, folder, _ = reward(model_name_or_path=str(tmp_path / "bert"), **flags)
    [checkpoint] = (folder / "checkpoints").iterdir()
    trained = load_file(checkpoint / "trained.safetensors")
    shapes = [x.shape for name, x in trained.items() if "pooler" in name and "lora" not in name]
    assert sorted(map(tuple, shapes)) == [(32,), (32, 32)]


def test_a_model_in_bfloat16(reward, scripts, tiny_lm, tmp_path):
    """The scripts load it in float32: the same numbers, rounded."""
    model = AutoModelForSequenceClassification.from_pretrained(tiny_lm(), num_labels=1)
    model.bfloat16().save_pretrained(tmp_path)
    loaded = scripts["reward_model"].load_model(AutoModelForSequenceClassification, str(tmp_path))
    assert all(p.dtype == torch.float32 for p in loaded.parameters())
    assert same(weights(tmp_path), {name: x.bfloat16() for name, x in loaded.state_dict().items()})


def test_answers_and_acts(scripts, tiny_lm, capsys):
    """Trick 38: acts count from 1, classes from 0. The text is the utterance before and the answer."""
    script, tokenizer = scripts["reward_model"], AutoTokenizer.from_pretrained(tiny_lm())
    rows = script.load_answers([*DIALOGS, dict(note="no dialog")])
    texts = ["Who are you? I am Leo.", "I am Leo. Then come in.", "Two. Three."]
    expected = [dict(text=text, label=label) for text, label in zip(texts, (0, 2, 3), strict=True)]
    assert rows == expected  # none for answers without an act, or in a dialog with a gap
    assert "answers with an act: 3, in dialogs with 17 utterances" in capsys.readouterr().out
    loaded, counts = script.load_labeled_rows(dict.fromkeys(range(4), 0), rows, tokenizer, script.Args())
    assert len(loaded) == 3 and counts.startswith("3 of 3 rows")


def test_a_classifier_of_acts_for_ppo_dialog(reward, dialog, scripts, small, tiny_dialogs, tiny_lm):
    """Its four classes have names, and ppo_dialog.py reads the intent with it."""
    flags = dict(dataset_name=tiny_dialogs, label_names=",".join(ACTS), num_eval_prompts=100)
    _, folder, rows = reward(model_name_or_path=tiny_lm(), **flags)
    evaluation = evaluation_of(folder)
    assert evaluation["labels"] == list(ACTS)
    assert sum(map(sum, evaluation["confusion"])) == 100
    assert rows[0]["loss"] > 1 and len(rows) == 38  # 301 answers in batches of 8
    model, tokenizer = classifier(folder / "model")
    script = scripts["ppo_dialog"]
    args = small("ppo_dialog", reward_model_path=str(folder / "model"))
    reward_parts, acts = script.load_reward_parts(args, torch.device("cpu"), None)
    assert len(acts) == 4
    turns, expected = [], []
    for act, text in enumerate(SHORT, start=1):
        turns.append(script.Turn({}, 1, [f"{text} "], "", act, [], []))
        with torch.no_grad():
            logits = model(**tokenizer(f"{text} I will.", return_tensors="pt")).logits[0]
        expected.append(logits.softmax(-1)[act - 1])
    parts = reward_parts(turns, ["I will."] * 4, [[]] * 4)
    torch.testing.assert_close(parts["intent"], torch.stack(expected), atol=1e-5, rtol=1e-5)
    _, _, metrics = dialog("ppo", reward_model_path=str(folder / "model"))
    assert 0 < metrics[0]["intent"] < 1


def test_a_long_dialog_keeps_its_answer(scripts, small, world, tmp_path):
    """Two utterances longer than max_length lose their beginning, as in ppo_dialog.py."""
    rows = [dict(dialog=["long " * 100, f"The answer {i}."], act=[1, 1 + i % 4]) for i in range(8)]
    data = write_rows(tmp_path / "data", train=rows, test=rows)
    args = small("reward_model", dataset_name=data, label_names=",".join(ACTS), max_length=16)
    tokenizer = AutoTokenizer.from_pretrained(world.classifier())
    loaded = scripts["reward_model"].load_data(args, tokenizer)["train"]
    assert [row.label for row in loaded] == [0, 1, 2, 3] * 2
    for i, row in enumerate(loaded):
        [ids] = row.texts
        assert len(ids) == 16
        assert tokenizer.decode(ids).endswith(f" The answer {i}.")
