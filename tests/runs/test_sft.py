"""Runs of sft.py on tiny models: what each option does to losses, weights and files."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import EOS
from run_tools import BY_HEART, distance, rows_of, same, weights, write_rows
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

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


# ---- Losses and labels -------------------------------------------------------------------------------------


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
    documents, left_out = script.load_documents(DIALOGS, tokenizer, small("sft", utterance_end=end))
    assert left_out == "4 examples without anything to learn"
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
    assert all(list(labels) == [-100, *ids[1:]] for ids, labels in documents)
    cut, _ = script.load_documents(DIALOGS, tokenizer, small("sft", utterance_end=end, max_length=9))
    assert [ids for ids, _ in cut] == [ids[:9] for ids, _ in documents]
    assert cut[0][0][-1] != tokenizer.eos_token_id


def test_packing_changes_no_loss(sft, tmp_path):
    """Packed documents do not see each other: packing changes neither the loss nor the gradient."""
    data = write_rows(tmp_path / "data", train=SHORT_ROWS * 2, test=SHORT_ROWS)
    before, first = [], []
    for packing, num_rows in ((True, 3), (False, 8)):
        flags = dict(dataset_name=data, packing=packing, per_device_train_batch_size=num_rows)
        _, folder, [metrics] = sft(f"run-{packing}", **flags)
        assert metrics["epoch"] == 1  # each document once
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


# ---- What is learned ---------------------------------------------------------------------------------------


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
    flags = dict(packing=arch not in ("bloom", "opt"), learning_rate=5e-3)
    model, folder, _ = sft(model_name_or_path=tiny_lm(arch), **flags)
    evaluation = evaluation_of(folder)
    assert evaluation["after"]["loss"] < evaluation["before"]["loss"]
    saved, _ = language_model(folder / "model")
    ids = torch.arange(18).view(2, 9)
    with torch.no_grad():
        torch.testing.assert_close(saved(ids).logits, model.eval()(ids).logits)


# ---- Options -----------------------------------------------------------------------------------------------


def test_from_config(sft, tiny_lm):
    """Random weights for the tokenizer of model_name_or_path. The loss falls, on held-out texts too."""
    model, folder, rows = sft(from_config=TINY_GPT2, num_train_rows=None, num_train_epochs=4.0)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(tiny_lm()).get_vocab()
    assert len(tokenizer) == model.config.vocab_size
    assert (model.config.n_embd, model.config.n_layer) == (32, 2)
    assert rows[0]["loss"] == pytest.approx(math.log(len(tokenizer)), abs=0.3)
    assert rows[0]["perplexity"] == pytest.approx(math.exp(rows[0]["loss"]))
    assert rows[-1]["loss"] < rows[0]["loss"] - 1
    evaluation = evaluation_of(folder)
    assert evaluation["after"]["loss"] < evaluation["before"]["loss"] - 1


def test_from_config_of_a_model_that_lists_its_layers(sft):
    """qwen3's config lists the kinds of its layers. With a wrong list the model could not be saved."""
    config = "qwen3 hidden_size=32 intermediate_size=64 num_hidden_layers=2 num_attention_heads=2"
    _, folder, _ = sft(from_config=f"{config} num_key_value_heads=2 head_dim=16")
    model, _ = language_model(folder / "model")
    assert model.config.num_hidden_layers == 2


def test_prompts_of_samples(scripts, tiny_lm):
    """The prompt of the document, or its first 8 tokens; at least one token is left to be written."""
    model, tokenizer = language_model(tiny_lm())
    model.generation_config.eos_token_id = [tokenizer.eos_token_id]
    documents = [
        ([5, 6, 7, 8], [-100, -100, 7, 8]),
        ([5, 6, 7], [-100, 6, 7]),
        (list(range(20)), [-100, *range(1, 20)]),
        ([3, 4, 5, 6, 7, 8, 9], [-100, 4, 5, -100, -100, 8, -100]),  # a chat with two learned turns
    ]
    samples = scripts["sft"].write_samples(model, tokenizer, documents)
    expected = [tokenizer.decode(ids) for ids in ([5, 6], [5, 6], range(8), [3, 4, 5, 6, 7])]
    assert [row["prompt"] for row in samples] == expected


def test_samples_fit_the_context(scripts, tiny_lm):
    """A prompt that leaves room for less than 40 tokens gets less."""
    model, tokenizer = language_model(tiny_lm())
    model.generation_config.eos_token_id = [-1]  # no end
    context = model.config.max_position_embeddings
    ids = torch.randint(3, 1000, (context,)).tolist()
    calls = []
    model.register_forward_hook(lambda module, inputs, outputs: calls.append(inputs[0].shape[1]))
    scripts["sft"].write_samples(model, tokenizer, [(ids, [-100] * (context - 2) + ids[-2:])])
    assert calls == [context - 2, context - 1]


def test_sft_lora(sft, tiny_lm):
    """Only the layers with an adapter differ in model/, which plain transformers loads."""
    _, folder, _ = sft(lora_r=4)
    before, after = weights(tiny_lm()), weights(folder / "model")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "c_attn.weight" in name}
    [checkpoint] = (folder / "checkpoints").iterdir()
    trained = load_file(checkpoint / "trained.safetensors")
    assert trained and all("lora_" in name for name in trained)
    language_model(folder / "model")


def test_dropout_is_seeded_in_every_update(sft):
    """Checkpoints, evaluations and samples do not change the masks. Each update has its own."""
    shape = "gpt2 n_embd=32 n_layer=1 n_head=2 n_positions=256 resid_pdrop=0.5"
    start = dict(from_config=shape)
    _, one, _ = sft("one", save_every=1, **start)
    _, other, _ = sft("other", save_every=0, num_eval_prompts=2, num_samples=0, **start)
    assert same(weights(one / "model"), weights(other / "model"))
    flags = dict(num_train_rows=1, num_train_epochs=12.0, learning_rate=0.0)
    _, _, rows = sft("equal batches", **flags, **start)
    assert len({row["loss"] for row in rows}) == len(rows) == 3


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
