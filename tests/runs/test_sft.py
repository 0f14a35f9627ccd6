"""sft.py: every number of a run computed again by transformers, one text at a time; documents, options."""

import json
import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from conftest import EOS, byte_level_tokenizer, ids_of
from run_tools import (
    DIALOGS,
    adamw_step,
    assert_weights_of,
    distance,
    evaluation_of,
    linear,
    number_in,
    posts_of,
    rows_of,
    same,
    spy,
    texts_of,
    three_splits,
    weights,
    write_rows,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest_plugins = ["run_fixtures"]
SCRIPT = "sft"
close = dict(rel=1e-3, abs=2e-5)


def language_model(folder):
    """A folder's model and tokenizer, loaded by transformers."""
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


# ---- Rows, tables and files --------------------------------------------------------------------------------


def document_of(tokenizer, row, max_length):
    """The ids of a row with prompt and completion, and how many of them are not learned."""
    prompt = tokenizer(row["prompt"]).input_ids
    ids = prompt + tokenizer(row["completion"]).input_ids + [tokenizer.eos_token_id]
    return ids[:max_length], len(prompt)


def sums_of(model, documents):
    """Sum of losses, number of right predictions, number of labels. documents: (ids, unlabeled tokens)"""
    loss, right, count = 0, 0, 0
    for ids, unlabeled in documents:
        logits = model(torch.tensor([ids])).logits[0, unlabeled - 1 : -1]
        labels = torch.tensor(ids[unlabeled:])
        loss = loss + F.cross_entropy(logits, labels, reduction="sum")
        right += (logits.argmax(-1) == labels).sum().item()
        count += len(labels)
    return loss, right, count


def means_of(model, documents):
    """The three numbers of a table of sft.py."""
    with torch.no_grad():
        loss, right, count = sums_of(model, documents)
    loss = loss.item() / count
    return dict(loss=loss, mean_token_accuracy=right / count, perplexity=math.exp(loss))


def filled_rows(documents, max_length):
    """How many rows these documents fill, if each one goes into the fullest row that has room for it."""
    rooms = []
    for length in sorted((len(ids) for ids, _ in documents), reverse=True):
        room = min((room for room in rooms if room >= length), default=None)
        if room is not None:
            rooms.remove(room)
        rooms.append((room or max_length) - length)
    return len(rooms)


def collated(calls, split, tokenizer):
    """The numbers of the data rows in calls of collate_rows, for each of their rows a list."""
    numbers = []
    for (rows, _), _ in calls:
        numbers += [[number_in(tokenizer.decode(ids), split) for ids, _ in row] for row in rows]
    return numbers


@pytest.mark.parametrize("packing", [True, False])
def test_every_number_of_sft(sft, script, tiny_lm, tmp_path, monkeypatch, capsys, packing):
    """Metrics of each update, the table before and after, the samples, and the weights in model/."""
    data, train, test = three_splits(tmp_path / "data", posts_of, 11)
    model, tokenizer = language_model(tiny_lm())
    all_train = [document_of(tokenizer, row, 96) for row in train[:11]]
    all_test = [document_of(tokenizer, row, 96) for row in test]
    assert len(all_train[4][0]) == 96 and all_train[4][0][-1] != tokenizer.eos_token_id
    num_rows = filled_rows(all_train, 96) if packing else 11
    assert num_rows < 8 or not packing
    calls = spy(monkeypatch, script, "collate_rows")
    _, folder, metrics = sft(
        dataset_name=data,
        packing=packing,
        max_length=96,
        num_train_rows=11,
        num_eval_prompts=7,
        num_samples=2,
        num_train_epochs=12.4 / num_rows,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=2e-2,
        lr_scheduler_type="linear",
        warmup_ratio=0.4,
        adam_eps=1e-3,
        max_grad_norm=0.5,
    )

    # Evaluation: the same seven test rows before and after, in passes of two packed rows.
    updates = 3
    half = (len(calls) - 2 * updates) // 2
    assert half > 1 and all(len(result["ids"]) <= 2 for _, result in calls)
    before, in_training, after = calls[:half], calls[half:-half], calls[-half:]
    held_out = sum(collated(before, "test", tokenizer), [])
    assert held_out == sum(collated(after, "test", tokenizer), [])
    assert len(set(held_out)) == len(held_out) == 7
    documents = [all_test[i] for i in held_out]
    evaluation = evaluation_of(folder)
    assert evaluation["before"] == pytest.approx(means_of(model, documents), **close)
    assert evaluation["n"] == 7

    # Updates: each packed row once in an epoch, and the mean over all labels of the batch.
    assert len(metrics) == updates and len(in_training) == 2 * updates
    batches = collated(in_training, "train", tokenizer)
    assert len(batches) == 4 * updates
    seen = Counter(sum(batches[:num_rows], []))
    assert seen == Counter(range(11))
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-3)
    for update, row in enumerate(metrics, start=1):
        numbers = sum(batches[4 * update - 4 : 4 * update], [])
        loss, right, count = sums_of(model, [all_train[i] for i in numbers])
        rate = linear(2e-2, update, updates, warmup=2)
        expected = dict(
            update=update,
            epoch=4 * update / num_rows,
            lr=rate,
            loss=loss.item() / count,
            mean_token_accuracy=right / count,
            perplexity=math.exp(loss.item() / count),
            grad_norm=adamw_step(model, optimizer, loss / count, rate, max_norm=0.5),
        )
        assert expected["grad_norm"] > 0.5
        assert {name: row[name] for name in expected} == pytest.approx(expected, **close)
        num_tokens = sum(len(all_train[i][0]) for i in numbers)
        assert row["perf/tokens_per_second"] * row["perf/seconds"] == pytest.approx(num_tokens)
    assert_weights_of(folder, model)

    # Afterwards: the table, and the samples of the first of the same rows.
    assert evaluation["after"] == pytest.approx(means_of(model, documents), **close)
    assert abs(evaluation["after"]["loss"] - evaluation["before"]["loss"]) > 0.01
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "7 held-out documents" in lines
    for name in ("loss", "mean_token_accuracy", "perplexity"):
        cells = [f"{evaluation[part][name]:.3f}" for part in ("before", "after")]
        assert any([word for word in line.split() if word != "│"] == [name, *cells] for line in lines), name
    samples = rows_of(folder, "samples.jsonl")
    prompts = [row["prompt"] for row in samples]
    assert prompts == [test[i]["prompt"] for i in held_out[:2]] or packing  # which orders by length
    assert set(prompts) <= {test[i]["prompt"] for i in held_out}
    assert [row["update"] for row in samples] == [updates] * 2


def test_held_out_documents_are_drawn_at_random(sft, script, tiny_lm, tmp_path, monkeypatch):
    """Another seed draws the same ones, and another order of the training rows. Validation is not used."""
    data, _, _ = three_splits(tmp_path / "data", texts_of, 8)
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm())
    flags = dict(dataset_name=data, packing=False, num_train_rows=8, num_train_epochs=2.0, num_samples=0)
    held_out, orders = [], []
    for seed in (1, 2, 3):
        with monkeypatch.context() as patch:
            calls = spy(patch, script, "collate_rows")
            sft(f"run{seed}", seed=seed, **flags)
        held_out.append(tuple(sum(collated(calls[:1], "test", tokenizer), [])))
        order = sum(collated(calls[1:5], "train", tokenizer), [])
        assert sorted(order[:8]) == sorted(order[8:]) == list(range(8))
        assert order[:8] != order[8:]  # another order in each epoch
        orders.append(tuple(order))
    assert all(sorted(numbers) != [0, 1, 2, 3] for numbers in held_out)
    assert len(set(orders)) == 3 and len(set(held_out)) == 1


def test_dropout_is_on_in_training_only(sft, tmp_path):
    """Random weights keep the dropout of their config. Both evaluations, and model/, have none."""
    data, train, test = three_splits(tmp_path / "data", posts_of)
    shape = f"{TINY_GPT2} resid_pdrop=0.5 embd_pdrop=0.5"
    flags = dict(dataset_name=data, num_eval_prompts=9, learning_rate=0.0, num_samples=0)
    _, folder, [metrics] = sft(
        from_config=shape, **flags, num_train_rows=4, packing=False, num_train_epochs=1.0
    )
    model, tokenizer = language_model(folder / "model")
    means = means_of(model, [document_of(tokenizer, row, 128) for row in test])
    evaluation = evaluation_of(folder)
    assert evaluation["before"] == evaluation["after"] == pytest.approx(means, **close)
    without = means_of(model, [document_of(tokenizer, row, 128) for row in train[:4]])
    assert abs(metrics["loss"] - without["loss"]) > 1e-4


def test_lora_is_merged_as_it_was_trained(sft, tiny_lm):
    """model/ is W + lora_alpha / lora_r * B A, with A and B of the last checkpoint."""
    flags = dict(packing=False, num_train_rows=8, from_config="")  # "" is no config, like None
    _, folder, _ = sft(lora_r=2, lora_alpha=6, **flags)
    [checkpoint] = (folder / "checkpoints").iterdir()
    trained = load_file(checkpoint / "trained.safetensors")
    before, after = weights(tiny_lm()), weights(folder / "model")
    names = [name for name in before if "c_attn.weight" in name]
    for name in names:
        [A] = [x for key, x in trained.items() if name.removesuffix("weight") + "lora_A" in key]
        [B] = [x for key, x in trained.items() if name.removesuffix("weight") + "lora_B" in key]
        assert B.abs().max() > 1e-3
        torch.testing.assert_close(after[name], before[name] + 3 * (B @ A).T)  # GPT-2 has W transposed
    assert len(names) == 2


# ---- Documents ---------------------------------------------------------------------------------------------


def test_damaged_rows_are_skipped(script):
    """Each completion stays with its prompt. Rows without a text, a prompt or a completion are skipped. A
    prompt may be empty."""
    tokenizer = byte_level_tokenizer()
    prompts = ["one", None, "two", "", "three", "four"]
    completions = [" a", " b", None, " c", "", " d"]
    rows = [dict(prompt=x, completion=y) for x, y in zip(prompts, completions, strict=True)]
    documents, _ = script.load_documents(rows, tokenizer, script.Args())
    assert [tokenizer.decode(ids) for ids, _ in documents] == [f"one a{EOS}", f" c{EOS}", f"four d{EOS}"]
    learned = [tokenizer.decode([label for label in labels if label != -100]) for _, labels in documents]
    assert learned == [f" a{EOS}", EOS, f" d{EOS}"]  # nothing predicts the first token of a document
    rows = [dict(text=text) for text in ("one", None, "", "two", "three")] + [{}]
    documents, _ = script.load_documents(rows, tokenizer, script.Args())
    assert [tokenizer.decode(ids) for ids, _ in documents] == [text + EOS for text in ("one", "two", "three")]


def test_a_text_without_completion(script):
    """Other columns may be there, if they do not make a second kind of document."""
    row = dict(text="three", prompt="one", completion=None, label=1)
    tokenizer = byte_level_tokenizer()
    [(ids, _)], _ = script.load_documents([row], tokenizer, script.Args())
    assert tokenizer.decode(ids) == f"three{EOS}"


# ---- Models from a config ----------------------------------------------------------------------------------


def test_random_weights_follow_the_seed(sft):
    """And the config has the ids of the tokenizer's special tokens."""
    folders = []
    for name, seed in (("one", 1), ("again", 1), ("other", 2)):
        flags = dict(from_config=TINY_GPT2, seed=seed, learning_rate=0.0, num_train_epochs=0.1)
        _, folder, _ = sft(name, **flags)
        folders.append(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    config = json.loads((folders[0] / "config.json").read_text())
    assert {name: config[name] for name in ids_of(tokenizer)} == ids_of(tokenizer)
    one, again, other = (weights(folder) for folder in folders)
    name = "transformer.h.0.attn.c_attn.weight"
    assert same(one, again) and not torch.equal(one[name], other[name])


SHORT = [
    "The film was warm and clever from the first scene to the last, and I would see it again.",
    "A dull story, badly told: I left after an hour and nobody in the room was sad to go.",
    "Two sailors find a letter in a bottle, and then they argue about it for a very long time.",
    "My sister loved every song of it, and so did the people in the row behind us that night.",
]
SHORT_ROWS = [dict(text=text) for text in SHORT]
TINY_GPT2 = "gpt2 n_embd=32 n_layer=2 n_head=4 n_positions=128"
SGD = dict(optimizer="torch.optim.SGD", max_grad_norm=None, lr_scheduler_type="constant")
both_ends = pytest.mark.parametrize("end", ["eos", " <EOU>"])


# ---- Losses and labels -------------------------------------------------------------------------------------


@both_ends
def test_documents_of_dialogs(script, small, tiny_lm, end):
    """Each utterance after a space and with its mark. One EOS at the very end, unless it was cut off."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm())
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


# ---- Options -----------------------------------------------------------------------------------------------


def test_from_config_of_a_model_that_lists_its_layers(sft):
    """qwen3's config lists the kinds of its layers. With a wrong list the model could not be saved."""
    config = "qwen3 hidden_size=32 intermediate_size=64 num_hidden_layers=2 num_attention_heads=2"
    _, folder, _ = sft(from_config=f"{config} num_key_value_heads=2 head_dim=16")
    model, _ = language_model(folder / "model")
    assert model.config.num_hidden_layers == 2


def test_prompts_of_samples(script, tiny_lm):
    """The prompt of the document, or its first 8 tokens; at least one token is left to be written."""
    model, tokenizer = language_model(tiny_lm())
    model.generation_config.eos_token_id = [tokenizer.eos_token_id]
    documents = [
        ([5, 6, 7, 8], [-100, -100, 7, 8]),
        ([5, 6, 7], [-100, 6, 7]),
        (list(range(20)), [-100, *range(1, 20)]),
        ([3, 4, 5, 6, 7, 8, 9], [-100, 4, 5, -100, -100, 8, -100]),  # a chat with two learned turns
    ]
    samples = script.write_samples(model, tokenizer, documents)
    expected = [tokenizer.decode(ids) for ids in ([5, 6], [5, 6], range(8), [3, 4, 5, 6, 7])]
    assert [row["prompt"] for row in samples] == expected


def test_samples_fit_the_context(script, tiny_lm):
    """A prompt that leaves room for less than 40 tokens gets less."""
    model, tokenizer = language_model(tiny_lm())
    model.generation_config.eos_token_id = [-1]  # no end
    context = model.config.max_position_embeddings
    ids = torch.randint(3, 1000, (context,)).tolist()
    calls = []
    model.register_forward_hook(lambda module, inputs, outputs: calls.append(inputs[0].shape[1]))
    script.write_samples(model, tokenizer, [(ids, [-100] * (context - 2) + ids[-2:])])
    assert calls == [context - 2, context - 1]


def test_each_update_has_its_own_dropout(sft):
    """Three equal batches, and weights that do not change, have three losses."""
    flags = dict(num_train_rows=1, num_train_epochs=12.0, learning_rate=0.0)
    _, _, rows = sft(from_config=f"{TINY_GPT2} resid_pdrop=0.5", **flags)
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
