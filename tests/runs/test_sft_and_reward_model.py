"""Runs of sft.py and reward_model.py on tiny models: what each option does to losses, weights and files."""

import json
import math

import datasets
import pytest
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from conftest import ACTS, EOS
from run_tools import BY_HEART, distance, rows_of, same, spy, weights, write_rows
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

pytest_plugins = ["run_fixtures"]
SHORT = [
    "The film was warm and clever from the first scene to the last, and I would see it again.",
    "A dull story, badly told: I left after an hour and nobody in the room was sad to go.",
    "Two sailors find a letter in a bottle, and then they argue about it for a very long time.",
    "My sister loved every song of it, and so did the people in the row behind us that night.",
]
SHORT_ROWS = [dict(text=text) for text in SHORT]
DIALOGS = [  # some can be used, some in part, some not at all
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
TINY_GPT2 = "gpt2 n_embd=32 n_layer=2 n_head=4 n_positions=128"
SGD = dict(optimizer="torch.optim.SGD", max_grad_norm=None, lr_scheduler_type="constant")
both_ends = pytest.mark.parametrize("end", ["eos", " <EOU>"])


def evaluation_of(folder):
    """evaluation.json of a run."""
    return json.loads((folder / "evaluation.json").read_text())


def language_model(folder):
    """A folder's model and tokenizer, loaded by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def classifier(folder):
    """The same of a classifier."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    return model, AutoTokenizer.from_pretrained(folder)


# ---- sft.py: losses and labels -----------------------------------------------------------------------------


def mean_loss(model, documents):
    """The mean loss of documents, one at a time, by transformers. documents: (ids, unlabeled tokens) each"""
    losses = []
    for ids, unlabeled in documents:
        start = max(1, unlabeled)  # the first token is never predicted
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        losses.append(F.cross_entropy(logits[start - 1 : -1], torch.tensor(ids[start:]), reduction="none"))
    return torch.cat(losses).mean().item()


def test_loss_of_texts(sft, tiny_lm, tmp_path):
    """On every token but the first, and on EOS. A text that is cut has no EOS."""
    texts = [SHORT[0], SHORT[1] * 9]
    data = write_rows(tmp_path / "data", train=SHORT_ROWS, test=[dict(text=text) for text in texts])
    _, folder, _ = sft(dataset_name=data, max_length=64)
    model, tokenizer = language_model(tiny_lm())
    eos = tokenizer.eos_token_id
    documents = [((tokenizer(text).input_ids + [eos])[:64], 0) for text in texts]
    assert evaluation_of(folder)["before"]["loss"] == pytest.approx(mean_loss(model, documents), rel=1e-4)


def test_loss_of_completions(sft, tiny_lm, tmp_path):
    """With prompt and completion, on the completion and its EOS only."""
    rows = [dict(prompt=text[:20], completion=text[20:]) for text in SHORT]
    data = write_rows(tmp_path / "data", train=rows[2:], test=rows[:2])
    _, folder, _ = sft(dataset_name=data)
    model, tokenizer = language_model(tiny_lm())
    documents = []
    for row in rows[:2]:
        prompt, completion = tokenizer(row["prompt"]).input_ids, tokenizer(row["completion"]).input_ids
        documents.append((prompt + completion + [tokenizer.eos_token_id], len(prompt)))
    assert evaluation_of(folder)["before"]["loss"] == pytest.approx(mean_loss(model, documents), rel=1e-4)


@both_ends
def test_loss_of_dialogs(sft, tiny_lm, tmp_path, end):
    """On every token but the first, end marks and EOS included."""
    data = write_rows(tmp_path / "data", train=DIALOGS[4:], test=DIALOGS[:4])
    _, folder, _ = sft(dataset_name=data, utterance_end=end)
    model, tokenizer = language_model(tiny_lm())
    eos = [tokenizer.eos_token_id]
    documents = []
    for texts in (["Who are you?", "I am Leo.", "Then come in."], ["Is it?", "It is."]):
        ids = []
        for text in texts:
            ids += (
                tokenizer(f" {text}").input_ids + eos
                if end == "eos"
                else tokenizer(f" {text}{end}").input_ids
            )
        documents.append((ids if end == "eos" else ids + eos, 0))
    assert evaluation_of(folder)["before"]["loss"] == pytest.approx(mean_loss(model, documents), rel=1e-4)


@both_ends
def test_documents_of_dialogs(scripts, small, tiny_lm, end):
    """Each utterance after a space and with its mark. One EOS at the very end, unless it was cut off."""
    script, tokenizer = scripts["sft"], AutoTokenizer.from_pretrained(tiny_lm())
    rows = datasets.Dataset.from_list(DIALOGS)
    documents = script.load_documents(rows, tokenizer, small("sft", utterance_end=end))
    mark, last = (EOS, "") if end == "eos" else (end, EOS)
    used = [
        ["Who are you?", "I am Leo.", "Then come in."],
        ["Is it?", "It is."],
        ["Was it?", "It was."],
        ["One.", "Two.", "Three."],
        ["Four.", "Five."],
    ]
    expected = ["".join(f" {text}{mark}" for text in texts) + last for texts in used]
    assert [tokenizer.decode(ids) for ids, _ in documents] == expected
    assert all(ids == labels for ids, labels in documents)
    cut = script.load_documents(rows, tokenizer, small("sft", utterance_end=end, max_length=9))
    assert [ids for ids, _ in cut] == [ids[:9] for ids, _ in documents]
    assert cut[0][0][-1] != tokenizer.eos_token_id


def test_packing_changes_no_loss(sft, tmp_path):
    """Packed documents do not see each other: packing changes neither the loss nor the gradient."""
    data = write_rows(tmp_path / "data", train=SHORT_ROWS * 2, test=SHORT_ROWS)
    before, first = [], []
    for packing in (True, False):
        flags = dict(dataset_name=data, packing=packing, per_device_train_batch_size=8, learning_rate=1e-3)
        _, folder, [metrics] = sft(f"run-{packing}", **flags)  # a batch of 8 documents, or 4 times 2 rows
        before.append(evaluation_of(folder)["before"])
        first.append(metrics)
    assert before[0] == pytest.approx(before[1], rel=1e-5)
    assert first[0]["loss"] == pytest.approx(first[1]["loss"], rel=1e-5)
    assert first[0]["grad_norm"] == pytest.approx(first[1]["grad_norm"], rel=1e-4)


def test_sft_gradient_does_not_depend_on_micro_batches(sft):
    """One step of SGD on 8 documents of unequal lengths: as 1 x 8, as 2 x 4 and as 8 x 1."""
    models, losses = [], []
    for n in (8, 4, 1):
        sizes = dict(per_device_train_batch_size=n, gradient_accumulation_steps=8 // n)
        _, folder, [metrics] = sft(f"run{n}", num_train_rows=8, packing=False, **sizes, **SGD)
        models.append(weights(folder / "model"))
        losses.append(metrics["loss"])
    assert max(distance(models[0], other) for other in models[1:]) < 1e-6
    assert losses[1:] == pytest.approx([losses[0]] * 2)


# ---- sft.py: what is learned -------------------------------------------------------------------------------


@pytest.mark.parametrize("pad", ["own", "eos"])
def test_eos_is_learned(sft, tiny_lm, tmp_path, pad):
    """After overfitting four short texts, their samples end in EOS, also if pad is EOS."""
    data = write_rows(tmp_path / "data", train=SHORT_ROWS, test=SHORT_ROWS)
    _, folder, metrics = sft(
        model_name_or_path=tiny_lm(pad=pad),
        dataset_name=data,
        num_train_epochs=60.0,
        packing=False,
        num_samples=4,
        learning_rate=2e-2,
        lr_scheduler_type="cosine",
    )
    assert metrics[-1]["loss"] < 0.05 and metrics[-1]["mean_token_accuracy"] == 1
    samples = rows_of(folder, "samples.jsonl")
    assert len(samples) == 4
    assert all(row["completion"].endswith(EOS) for row in samples)
    by_heart = [row for row in samples if row["prompt"] + row["completion"] in [text + EOS for text in SHORT]]
    assert len(by_heart) >= 3


@both_ends
def test_the_end_of_an_utterance_is_learned(sft, talker, end):
    """Learned by heart: EOS after each utterance; or a mark after each, and EOS after the last."""
    folder = talker.model
    if end == "eos":
        flags = dict(num_train_epochs=80.0, packing=False, per_device_train_batch_size=5, num_samples=0)
        _, run_folder, _ = sft(dataset_name=talker.data, utterance_end="eos", **flags)
        folder = run_folder / "model"
    model, tokenizer = language_model(folder)
    eos = [tokenizer.eos_token_id]
    for texts, _ in BY_HEART:
        if end == "eos":
            utterances = [tokenizer(f" {text}").input_ids + eos for text in texts]
        else:
            utterances = [tokenizer(f" {text}{end}").input_ids for text in texts]
            utterances[-1] += eos
        ids = sum(utterances, [])
        with torch.no_grad():
            predicted = model(torch.tensor([ids])).logits[0].argmax(-1).tolist()
        start = len(utterances[0]) - 1  # the end of the first utterance
        assert predicted[start - 1 : -1] == ids[start:]


@pytest.mark.parametrize("arch", ["gpt_neo", "gpt_neox", "opt", "bloom", "llama", "qwen2"])
def test_architectures(sft, tiny_lm, arch):
    """Each architecture learns, with packing if it can pack, and model/ is what was trained."""
    flags = dict(packing=arch != "bloom", learning_rate=5e-3)
    model, folder, _ = sft(model_name_or_path=tiny_lm(arch), **flags)
    evaluation = evaluation_of(folder)
    assert evaluation["after"]["loss"] < evaluation["before"]["loss"]
    saved, _ = language_model(folder / "model")
    ids = torch.arange(18).view(2, 9)
    with torch.no_grad():
        torch.testing.assert_close(saved(ids).logits, model.eval()(ids).logits)


# ---- sft.py: options ---------------------------------------------------------------------------------------


def test_from_config_with_a_new_tokenizer(sft):
    """Random weights and a tokenizer of the requested size. The loss falls, on held-out texts too."""
    flags = dict(train_tokenizer=300, num_train_rows=None, num_train_epochs=4.0)
    model, folder, rows = sft(from_config=TINY_GPT2, **flags)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert len(tokenizer) == 300 == model.config.vocab_size
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert (model.config.n_embd, model.config.n_layer) == (32, 2)
    assert rows[0]["loss"] == pytest.approx(math.log(300), abs=0.3)
    assert rows[0]["perplexity"] == pytest.approx(math.exp(rows[0]["loss"]))
    assert rows[-1]["loss"] < rows[0]["loss"] - 1
    evaluation = evaluation_of(folder)
    assert evaluation["after"]["loss"] < evaluation["before"]["loss"] - 1


def test_from_config_of_a_model_that_lists_its_layers(sft):
    """qwen3's config lists the kinds of its layers. With a wrong list the model could not be saved."""
    config = "qwen3 hidden_size=32 intermediate_size=64 num_hidden_layers=2 num_attention_heads=2"
    _, folder, _ = sft(from_config=f"{config} num_key_value_heads=2 head_dim=16", train_tokenizer=300)
    model, _ = language_model(folder / "model")
    assert model.config.num_hidden_layers == 2


def test_a_tokenizer_from_damaged_dialogs(sft, tmp_path):
    """Dialogs that are skipped do not stop a new tokenizer either."""
    data = write_rows(tmp_path / "data", train=DIALOGS, test=DIALOGS)
    _, folder, _ = sft(dataset_name=data, from_config=TINY_GPT2, train_tokenizer=280)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert tokenizer.decode(tokenizer(" I am Leo.").input_ids) == " I am Leo."


def test_prompts_of_samples(scripts, tiny_lm):
    """The prompt of the document, or its first 8 tokens; at least one token is left to be written."""
    model, tokenizer = language_model(tiny_lm())
    documents = [
        ([5, 6, 7, 8], [-100, -100, 7, 8]),
        ([5, 6, 7], [5, 6, 7]),
        (list(range(20)), list(range(20))),
        ([9], [9]),
        ([3, 4, 5, 6, 7, 8, 9], [-100, 4, 5, -100, -100, 8, -100]),  # a chat with two learned turns
    ]
    samples = scripts["sft"].write_samples(model, tokenizer, documents, tokenizer.eos_token_id)
    expected = [tokenizer.decode(ids) for ids in ([5, 6], [5, 6], range(8), [9], [3, 4, 5, 6, 7])]
    assert [row["prompt"] for row in samples] == expected


def test_samples_fit_the_context(scripts, tiny_lm):
    """A prompt that leaves less than 40 tokens is cut. A context of less than 48 tokens works too."""
    write_samples = scripts["sft"].write_samples
    model, tokenizer = language_model(tiny_lm())
    context = model.config.max_position_embeddings
    ids = torch.randint(3, 1000, (context,)).tolist()
    documents = [(ids, [-100] * (context - 2) + ids[-2:]), (ids, ids)]
    eos = tokenizer.eos_token_id
    prompts = [row["prompt"] for row in write_samples(model, tokenizer, documents, eos)]
    assert prompts == [tokenizer.decode(ids[38 - context : -2]), tokenizer.decode(ids[:8])]
    config = transformers.GPT2Config(**model.config.to_dict() | dict(n_positions=20))
    short = AutoModelForCausalLM.from_config(config)
    assert len(write_samples(short, tokenizer, [(ids[:20], ids[:20])], eos)) == 1


def test_sft_lora(sft, tiny_lm):
    """Only the layers with an adapter differ in model/, which plain transformers loads."""
    _, folder, _ = sft(lora_r=4)
    before, after = weights(tiny_lm()), weights(folder / "model")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "c_attn.weight" in name}
    [checkpoint] = (folder / "checkpoints").iterdir()
    state = torch.load(checkpoint / "state.pt", weights_only=True)
    assert state["parameters"] and all("lora_" in name for name in state["parameters"])
    language_model(folder / "model")


def test_checkpoints_do_not_change_dropout(sft):
    """Saving draws no random numbers: a run with dropout ends in the same weights however often it saves."""
    shape = "gpt2 n_embd=32 n_layer=1 n_head=2 n_positions=256 resid_pdrop=0.5"
    start = dict(from_config=shape, train_tokenizer=300)
    _, often, _ = sft("often", save_every=1, **start)
    _, rarely, _ = sft("rarely", save_every=0, **start)
    assert same(weights(often / "model"), weights(rarely / "model"))


def test_gradient_checkpointing_and_bf16(sft):
    """Recomputed activations change nothing. bf16 keeps fp32 weights and comes close."""
    _, plain, plain_rows = sft("plain", **SGD)
    model, recomputed, recomputed_rows = sft("recomputed", gradient_checkpointing=True, **SGD)
    _, half, half_rows = sft("half", dtype="bfloat16", **SGD)
    loss = plain_rows[0]["loss"]
    assert recomputed_rows[0]["loss"] == pytest.approx(loss, abs=1e-6)
    assert distance(weights(plain / "model"), weights(recomputed / "model")) < 1e-6
    assert {x.dtype for x in weights(half / "model").values()} == {torch.float32}
    assert half_rows[0]["loss"] == pytest.approx(loss, rel=1e-2)
    assert half_rows[0]["loss"] != loss


@pytest.mark.parametrize("script", ["sft", "reward_model"])
def test_save_dtype(scripts, small, script):
    """bfloat16 halves model/. The scripts load it in float32: the same numbers, rounded."""
    module = scripts[script]
    folders = {}
    for dtype in ("float32", "bfloat16"):
        _, folder = module.train(small(script, dtype, save_dtype=dtype))
        folders[dtype] = folder / "model"
    full, half = (weights(folder) for folder in folders.values())
    assert {x.dtype for x in half.values()} == {torch.bfloat16}
    assert same(half, {name: x.bfloat16() for name, x in full.items()})
    auto_class = AutoModelForCausalLM if script == "sft" else AutoModelForSequenceClassification
    model = module.load_model(auto_class, str(folders["bfloat16"]))
    assert all(p.dtype == torch.float32 for p in model.parameters())


# ---- reward_model.py: classifiers --------------------------------------------------------------------------


def assert_same_as_pipeline(scripts, folder, names):
    """The pipeline of transformers gives the probabilities that the script computes, for a padded batch."""
    script = scripts["reward_model"]
    model, tokenizer = classifier(folder)
    batch = script.collate_texts([script.Row([ids]) for ids in tokenizer(SHORT).input_ids], "cpu")
    with torch.no_grad():
        ours = script.sequence_logits(model, batch["ids"], batch["mask"]).softmax(-1)
    pipeline = transformers.pipeline("text-classification", model=str(folder), top_k=None)
    for probs, entries in zip(ours, pipeline(SHORT)):
        theirs = {entry["label"]: entry["score"] for entry in entries}
        assert set(theirs) == set(names)
        assert [theirs[name] for name in names] == pytest.approx(probs.tolist(), abs=1e-5)


def test_a_classifier_overfits(reward, scripts, tiny_reviews, tmp_path):
    """It learns 24 texts by heart. The names of the labels are in config.json. The pipeline agrees."""
    rows = rows_of(tiny_reviews, "train.jsonl")[:24]
    _, folder, metrics = reward(
        dataset_name=write_rows(tmp_path / "data", train=rows, test=rows[:17]),
        num_train_epochs=20.0,
        learning_rate=3e-3,
        num_eval_rows=24,
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


@pytest.mark.parametrize("arch, pad", [("gpt2", "eos"), ("llama", "own"), ("opt", "own"), ("bloom", "own")])
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
    score = scripts["ppo_sentiment"].load_reward(args, torch.device("cpu"))
    model, tokenizer = classifier(folder / "model")
    with torch.no_grad():
        logits = [model(**tokenizer(text, return_tensors="pt")).logits[0, 1] for text in SHORT]
    texts = [text[:30] for text in SHORT], [text[30:] for text in SHORT]
    [scores] = score(*texts, None, [{}] * len(SHORT)).values()
    torch.testing.assert_close(scores, torch.stack(logits), atol=1e-5, rtol=1e-5)


def test_words_as_labels(reward, tiny_reviews, tmp_path):
    """Three labels that are words: the classes have their names, in alphabetical order."""
    rows = rows_of(tiny_reviews, "train.jsonl")
    rows = [dict(text=row["text"], label=("sad", "mixed", "glad")[i % 3]) for i, row in enumerate(rows)]
    held_out = [row for i, row in enumerate(rows[36:]) if i not in (0, 3, 1)]  # 2 sad, 3 mixed, 4 glad
    model, folder, metrics = reward(
        dataset_name=write_rows(tmp_path / "data", train=rows[:36], test=held_out),
        num_eval_rows=12,
        from_config="distilbert dim=32 n_layers=1 n_heads=4 hidden_dim=64 max_position_embeddings=128",
    )
    assert model.config.num_labels == 3
    assert metrics[0]["loss"] == pytest.approx(math.log(3), abs=0.3)
    assert evaluation_of(folder)["labels"] == ["glad", "mixed", "sad"]
    assert [sum(row) for row in evaluation_of(folder)["confusion"]] == [4, 3, 2]


def test_an_encoder_skips_what_is_no_text(scripts, capsys):
    """An encoder's tokenizer marks the ends of an empty text too. Such rows are skipped, like null."""
    words = {"[CLS]": 0, "[SEP]": 1, "good": 2}
    marks = [("[CLS]", 0), ("[SEP]", 1)]
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="good"))
    template = tokenizers.processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=marks)
    model.post_processor = template
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=model)
    module = scripts["reward_model"]
    data = datasets.Dataset.from_dict(dict(text=["good", None, ""], label=[1, 0, 0]))
    rows = module.load_labeled_rows(data, {0: 0, 1: 1}, tokenizer, module.Args())
    assert rows == [module.Row([[0, 2, 1]], 1)]
    assert "skipped 2 of 3 rows" in capsys.readouterr().out


def test_shards_are_disjoint(scripts, small, world):
    """The halves 0/2 and 1/2 share no row, and together they are the training data."""
    module, tokenizer = scripts["reward_model"], AutoTokenizer.from_pretrained(world.classifier())
    shards = {}
    for shard in ("0/2", "1/2", "0/1"):
        data = module.load_data(small("reward_model", train_shard=shard), tokenizer)
        shards[shard] = [row.texts[0] for row in data["train"]]
    one, other = shards["0/2"], shards["1/2"]
    assert len(one) == len(other) == 24
    assert not any(text in other for text in one)
    assert sorted(one + other) == sorted(shards["0/1"])


def text_lengths(call):
    """The lengths of the texts that a call of collate_texts returned."""
    _, batch = call
    return batch["mask"].sum(1)


def test_prefixes(reward, scripts, monkeypatch):
    """--min-prefix-length cuts texts at random tokens, in training but not in the evaluation."""
    with monkeypatch.context() as patch:
        calls = spy(patch, scripts["reward_model"], "collate_texts")
        reward(min_prefix_length=4)
    in_training = torch.cat([text_lengths(call) for call in calls[:6]])
    in_evaluation = text_lengths(calls[-1])
    assert len(in_training) == 48 and 4 <= in_training.min() < 15
    assert len(in_training.unique()) > 15
    assert in_evaluation.min() > 15


def test_prefixes_keep_the_mark_at_the_end(reward, scripts, monkeypatch, tiny_classifier, tmp_path):
    """The mark that BERT's tokenizer adds to a text also ends its prefixes."""
    model, tokenizer = classifier(tiny_classifier())
    tokenizer.sep_token = tokenizer.eos_token
    sep, sep_id = tokenizer.sep_token, tokenizer.sep_token_id
    template = tokenizers.processors.TemplateProcessing(f"$A {sep}", special_tokens=[(sep, sep_id)])
    tokenizer.backend_tokenizer.post_processor = template
    tokenizer.save_pretrained(tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    calls = spy(monkeypatch, scripts["reward_model"], "collate_texts")
    reward(model_name_or_path=str(tmp_path / "model"), min_prefix_length=4)
    for call in calls:
        last = text_lengths(call) - 1
        assert (call[1]["ids"].gather(1, last[:, None]) == sep_id).all()
    assert min(text_lengths(call).min() for call in calls) < 15


def test_reward_gradient_does_not_depend_on_micro_batches(reward):
    """One step of SGD on 8 texts: as 1 x 8, as 2 x 4 and as 8 x 1."""
    models = []
    for n in (8, 4, 1):
        sizes = dict(per_device_train_batch_size=n, gradient_accumulation_steps=8 // n)
        _, folder, [_] = reward(f"run{n}", num_train_epochs=8 / 48, **sizes, **SGD)
        models.append(weights(folder / "model"))
    assert max(distance(models[0], other) for other in models[1:]) < 1e-6


@pytest.mark.parametrize("base", ["distilbert", "gpt2", "llama"])
def test_reward_lora(reward, scripts, tiny_lm, tiny_classifier, base):
    """LoRA trains adapters and the new head. The merged model is complete: plain transformers loads it."""
    path = tiny_classifier() if base == "distilbert" else tiny_lm(base)
    _, folder, rows = reward(model_name_or_path=path, lora_r=4, label_names="negative,positive")
    assert all(math.isfinite(row["loss"]) for row in rows)
    [checkpoint] = (folder / "checkpoints").iterdir()
    trained = torch.load(checkpoint / "state.pt", weights_only=True)["parameters"]
    assert any("lora_B" in name for name in trained)
    assert any("score" in name or "classifier" in name for name in trained)
    assert_same_as_pipeline(scripts, folder / "model", ["negative", "positive"])
    model, _ = classifier(folder / "model")
    assert weights(folder / "model").keys() == model.state_dict().keys()


# ---- reward_model.py: dialog acts --------------------------------------------------------------------------


def test_answers_and_acts(scripts):
    """Trick 38: acts count from 1, classes from 0. Each answer comes with the utterance before it."""
    script = scripts["reward_model"]
    rows = script.load_answers(datasets.Dataset.from_list(DIALOGS), script.Args())
    expected = [("Who are you? I am Leo.", 0), ("I am Leo. Then come in.", 2), ("Two. Three.", 3)]
    assert list(zip(rows["text"], rows["label"])) == expected


def test_a_classifier_of_acts_for_ppo_dialog(reward, dialog, scripts, small, tiny_dialogs):
    """Its four classes have names, and ppo_dialog.py reads the intent with it."""
    flags = dict(dataset_name=tiny_dialogs, label_names=",".join(ACTS), num_eval_rows=100)
    _, folder, rows = reward(**flags)
    evaluation = evaluation_of(folder)
    assert evaluation["labels"] == list(ACTS)
    assert sum(map(sum, evaluation["confusion"])) == 100
    assert rows[0]["loss"] > 1 and len(rows) == 38  # 301 answers in batches of 8
    model, tokenizer = classifier(folder / "model")
    script = scripts["ppo_dialog"]
    args = small("ppo_dialog", reward_model_path=str(folder / "model"))
    reward_parts, num_acts, _ = script.load_reward_parts(args, torch.device("cpu"))
    assert num_acts == 4
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
