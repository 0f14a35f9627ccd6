"""reward_model.py: every number of a run computed again by transformers, one text at a time; labels, pairs,
rankings, the new head, the offset, options."""

import json
import math
import shutil
from collections import Counter
from functools import partial

import pytest
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from conftest import ACTS, EOS, byte_level_tokenizer
from run_tools import (
    DIALOGS,
    adamw_step,
    assert_weights_of,
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
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import check

pytest_plugins = ["run_fixtures"]
SCRIPT = "reward_model"
close = dict(rel=1e-3, abs=2e-5)
THREE_UPDATES = dict(  # of 6 rows each, on 13 training rows
    num_eval_prompts=7,
    num_train_epochs=1.4,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=3,
    learning_rate=5e-3,
    lr_scheduler_type="linear",
    warmup_ratio=0.4,
    adam_eps=1e-3,
    max_grad_norm=0.5,
)


def labeled_of(split, count):
    """Rows with the columns text and label, of which about one in three is 1."""
    return [row | dict(label=int(i % 3 == 1)) for i, row in enumerate(texts_of(split, count))]


def pairs_of(split, count):
    """Rows with the columns prompt, chosen, rejected and margin. No two margins are equal."""
    rows = []
    for i, row in enumerate(posts_of(split, count, longest=8)):
        rejected = f" no {i}" + " snow" * (3 * i % 5)
        margin = 0.25 * i - 0.5
        rows.append(dict(prompt=row["prompt"], chosen=row["completion"], rejected=rejected, margin=margin))
    return rows


def rankings_of(split, count):
    """Rows with the columns prompt and responses, of which there are 3, 2, 4, 3, 2, ..., best first."""
    rows = []
    for i in range(count):
        responses = [f" {word}" + " sun" * (i * k % 5) for k, word in enumerate(("aa", "b", "cc", "d"))]
        rows.append(dict(prompt=f"{split} text {i}:", responses=responses[: (3, 2, 4)[i % 3]]))
    return rows


def classifier(folder):
    """A folder's model and tokenizer, loaded by transformers."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    return model, AutoTokenizer.from_pretrained(folder)


# ---- Labels ------------------------------------------------------------------------------------------------


def training_texts(calls, tokenizer):
    """The decoded texts of each row in calls of collate_texts."""
    return sum([decoded(batch, tokenizer) for (batch, *_), _ in calls], [])


def scored_texts(call, tokenizer):
    """The decoded texts of each row in a call of score_rows."""
    (_, rows, _), _ = call
    return decoded(rows, tokenizer)


def decoded(rows, tokenizer):
    return [[tokenizer.decode(ids) for ids in row.texts] for row in rows]


def logits_alone(model, ids):
    """The outputs of one text, by transformers."""
    model.config.pad_token_id = None  # one text has no pads
    return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("min_prefix_length", [0, 3])
def test_every_number_of_a_classifier(
    reward, script, tiny_classifier, tmp_path, monkeypatch, capsys, min_prefix_length
):
    """Metrics of each update, the confusion matrix of the held-out rows, and the weights in model/."""
    data, train, test = three_splits(tmp_path / "data", labeled_of)
    calls = spy(monkeypatch, script, "collate_texts")
    scored = spy(monkeypatch, script, "score_rows")
    _, folder, metrics = reward(
        dataset_name=data,
        min_prefix_length=min_prefix_length,
        max_length=18,
        **THREE_UPDATES,
        label_names="negative,positive",
    )
    model, tokenizer = classifier(tiny_classifier())
    all_train = [tokenizer(row["text"]).input_ids[:18] for row in train]
    assert len({len(ids) for ids in all_train}) > 3
    assert len(metrics) == 3 and len(calls) == 3 * 3
    order = []
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-3)
    for update, row in enumerate(metrics, start=1):
        losses, right, lengths = [], 0, []
        for (batch, *_), _ in calls[3 * update - 3 : 3 * update]:
            for item in batch:
                [ids] = item.texts
                found = [i for i, whole in enumerate(all_train) if whole[: len(ids)] == ids]
                label = item.label
                assert label in [train[i]["label"] for i in found]
                assert min_prefix_length > 0 or len(found) == 1 and ids in all_train
                order += found
                logits = logits_alone(model, ids)
                losses.append(F.cross_entropy(logits, torch.tensor(label)))
                right += int(logits.argmax().item() == label)
                lengths.append(len(ids))
        assert len(losses) == 6 and lengths == sorted(lengths)  # texts of similar length together
        loss = torch.stack(losses).mean()
        rate = linear(5e-3, update, 3, warmup=2)
        expected = dict(
            update=update,
            epoch=6 * update / 13,
            lr=rate,
            loss=loss.item(),
            accuracy=right / 6,
            grad_norm=adamw_step(model, optimizer, loss, rate, max_norm=0.5),
        )
        assert {name: row[name] for name in expected} == pytest.approx(expected, **close)
    if min_prefix_length == 0:
        assert set(Counter(order).values()) <= {1, 2} and len(set(order)) == 13
    assert_weights_of(folder, model)

    # Evaluation: seven test rows, whole.
    held_out = [number_in(text, "test") for [text] in scored_texts(*scored, tokenizer)]
    assert len(set(held_out)) == len(held_out) == 7
    confusion = [[0, 0], [0, 0]]
    for i in held_out:
        with torch.no_grad():
            predicted = logits_alone(model, tokenizer(test[i]["text"]).input_ids[:18]).argmax().item()
        confusion[test[i]["label"]][predicted] += 1
    accuracy = (confusion[0][0] + confusion[1][1]) / 7
    names = ["negative", "positive"]
    expected = dict(accuracy=pytest.approx(accuracy), confusion=confusion, labels=names, n=7)
    assert evaluation_of(folder) == expected
    lines = capsys.readouterr().out
    assert f"7 held-out rows, accuracy {accuracy:.4f}" in lines
    num_full = sum(len(tokenizer(row["text"]).input_ids) >= 18 for row in train)
    assert f"13 of 13 rows have a text, {num_full} at the limit of 18 tokens" in lines and num_full > 0
    assert "classes 0, 1, ...: negative, positive; the head is new: False" in lines
    assert AutoTokenizer.from_pretrained(folder / "model").model_max_length == 18


def test_names_give_words_their_numbers(script):
    """--label-names puts words in its own order. Without it, they are sorted."""
    rows = [dict(label=label) for label in ("sad", "glad", "mixed", "glad")]
    for names, expected in (("sad,mixed,glad", ["sad", "mixed", "glad"]), (None, ["glad", "mixed", "sad"])):
        found, class_of = script.find_classes(rows, script.Args(label_names=names))
        assert found == expected
        assert [class_of[name] for name in expected] == [0, 1, 2]


@pytest.mark.parametrize(
    "columns, learned",
    [
        ("dialog act text label", "labels"),
        ("text label prompt chosen rejected", "labels"),
        ("text prompt chosen rejected", "pairs"),
        ("prompt chosen rejected responses", "pairs"),
        ("responses", "rankings"),
    ],
)
def test_which_columns_decide(script, small, world, tmp_path, columns, learned):
    """Acts before labels, labels before pairs, pairs before rankings. A prompt is optional."""
    tokenizer = AutoTokenizer.from_pretrained(world.lm())
    values = dict(text="a", label=0, dialog=["b", "c"], act=[1, 2], prompt="d", chosen="e", rejected="f")
    values["responses"] = ["g", "h", "i"]
    rows = [{column: values[column] for column in columns.split()} for _ in range(4)]
    data = write_rows(tmp_path / "data", train=rows, test=rows)
    args = small("reward_model", dataset_name=data, label_names="x,y")
    loaded, _, _, label_names = script.load_data(args, tokenizer)
    assert label_names == (["x", "y"] if learned == "labels" else None)
    assert len(loaded[0].texts) == dict(labels=1, pairs=2, rankings=3)[learned]


def test_columns_that_are_none_of_these(script, small, tmp_path):
    """Text without label, a dialog without acts, a prompt and one response."""
    rows = [dict(text="a", dialog=["b", "c"], prompt="d", chosen="e")] * 4
    data = write_rows(tmp_path / "data", train=rows, test=rows)
    [line, _] = check.errors(script, small("reward_model", dataset_name=data))
    assert "no training row can be used: fewer than two responses" in line


def test_a_row_without_text_takes_its_label_with_it(script, capsys):
    """Wherever it is; also with the tokenizer of an encoder, which marks the ends of an empty text too."""
    tokenizer = byte_level_tokenizer()
    mark = [(EOS, tokenizer.eos_token_id)]
    template = tokenizers.processors.TemplateProcessing(f"$A {EOS}", special_tokens=mark)
    tokenizer.backend_tokenizer.post_processor = template
    texts = ["", "one", " ", "two", None, "three", "four"]
    rows = [dict(text=text, label=label) for text, label in zip(texts, "dabcabd", strict=True)]
    loaded = script.load_labeled_rows(dict(a=0, b=1, c=2, d=3), rows, tokenizer, script.Args())
    found = [(tokenizer.decode(row.texts[0]), row.label) for row in loaded]
    assert found == [(f"one{EOS}", 0), (f"two{EOS}", 2), (f"three{EOS}", 1), (f"four{EOS}", 3)]
    assert capsys.readouterr().out == "4 of 7 rows have a text, 0 at the limit of 512 tokens\n"


# ---- Which rows --------------------------------------------------------------------------------------------


def loaded_numbers(script, small, tokenizer, **flags):
    """The numbers of the rows that reward_model.py trains on, and of those that it evaluates."""
    train, test, *_ = script.load_data(small("reward_model", **flags), tokenizer)
    numbers = []
    for split, rows in (("train", train), ("test", test)):
        numbers.append([number_in(tokenizer.decode(row.texts[0]), split) for row in rows])
    return numbers


@pytest.mark.parametrize("make", [labeled_of, pairs_of, rankings_of])
def test_rows_of_a_reward_model(script, small, world, tmp_path, make):
    """All training rows in their order, and test rows that are drawn at random, the same for each seed."""
    train, test = make("train", 30), make("test", 20)
    data = write_rows(tmp_path / "data", train=train, test=test, validation=make("validation", 5))
    tokenizer = AutoTokenizer.from_pretrained(world.lm())
    drawn = []
    for seed in (1, 2):
        flags = dict(dataset_name=data, seed=seed, num_eval_prompts=6, max_length=200)
        numbers, held_out = loaded_numbers(script, small, tokenizer, **flags)
        assert numbers == list(range(30))
        assert len(set(held_out)) == len(held_out) == 6 and set(held_out) != set(range(6))
        drawn.append(held_out)
    assert drawn[0] == drawn[1]


def test_shards_are_parts_of_the_shuffled_rows(script, small, world, tmp_path):
    """Whatever the seeds of their runs: disjoint, complete, and mixed though the file is sorted by label."""
    train = labeled_of("train", 30)
    for i, row in enumerate(train):
        row["label"] = int(i >= 15)
    test = labeled_of("test", 8)
    data = write_rows(tmp_path / "data", train=train, test=test)
    tokenizer = AutoTokenizer.from_pretrained(world.classifier())
    shards = []
    for part in range(3):
        flags = dict(dataset_name=data, train_shard=f"{part}/3", seed=part + 1)
        numbers, held_out = loaded_numbers(script, small, tokenizer, **flags, num_eval_prompts=8)
        assert sorted(held_out) == list(range(8))  # shards are of training rows only
        assert len(numbers) == 10 and 2 <= sum(number >= 15 for number in numbers) <= 8
        shards += numbers
    assert sorted(shards) == list(range(30))


def test_shards_have_no_dialog_in_common(script, small, world, tmp_path):
    """Two answers of one dialog would have an utterance in common."""
    rows = [dict(dialog=[f"train text {3 * i + k}: sun." for k in range(3)], act=[1, 2, 3]) for i in range(8)]
    data = write_rows(tmp_path / "data", train=rows, test=rows)
    tokenizer = AutoTokenizer.from_pretrained(world.intents())
    shards = []
    for shard in ("0/2", "1/2"):
        flags = dict(dataset_name=data, train_shard=shard, label_names=",".join(ACTS))
        loaded, *_ = script.load_data(small("reward_model", **flags), tokenizer)
        texts = [tokenizer.decode(row.texts[0]) for row in loaded]
        shards.append(Counter(number_in(text, "train") // 3 for text in texts))
    assert sorted(shards[0] | shards[1]) == list(range(8)) and not shards[0] & shards[1]
    assert set((shards[0] + shards[1]).values()) == {2}  # both answers of each


@pytest.mark.parametrize("shortest, is_refused", [(1, True), (2, True), (3, False)])
def test_a_prefix_of_special_tokens_is_refused(script, small, world, tmp_path, shortest, is_refused):
    """[CLS] and [SEP] alone are an empty text."""
    tokenizer = byte_level_tokenizer()
    marks = [(EOS, tokenizer.eos_token_id)]
    template = tokenizers.processors.TemplateProcessing(f"{EOS} $A {EOS}", special_tokens=marks)
    tokenizer.backend_tokenizer.post_processor = template
    tokenizer.cls_token = tokenizer.sep_token = EOS
    model = shutil.copytree(world.classifier(), tmp_path / "classifier")
    tokenizer.save_pretrained(model)
    data, _, _ = three_splits(tmp_path / "data", labeled_of)
    flags = dict(model_name_or_path=str(model), dataset_name=data, min_prefix_length=shortest)
    errors = check.errors(script, small("reward_model", **flags))
    assert len(errors) == is_refused
    assert all("must be more than the number of special tokens" in line for line in errors)


def test_answers_are_not_cut_to_prefixes(script, small, world):
    """An answer that is cut off would keep its act."""
    flags = dict(model_name_or_path=world.intents(), dataset_name=world.dialogs, label_names=",".join(ACTS))
    assert check.errors(script, small("reward_model", **flags)) == []
    [line] = check.errors(script, small("reward_model", **flags, min_prefix_length=3))
    assert "--min-prefix-length is only for the columns text and label" in line


def test_prefixes_by_hand(script):
    """Of all lengths from the shortest to the whole text, with its label. Each update cuts anew."""
    tokenizer = byte_level_tokenizer()
    args = script.Args(min_prefix_length=4, seed=3)
    texts = [[100 * i + k for k in range(10)] for i in range(1, 81)]
    rows = [script.Row([ids], number % 3) for number, ids in enumerate(texts)]
    rows += [script.Row([[7, 8, 9]], 2)]  # shorter than the shortest
    cuts = [script.cut_to_prefixes(rows, tokenizer, args, update) for update in (1, 1, 2)]
    assert cuts[0] == cuts[1] != cuts[2]
    for prefixes in cuts:
        assert prefixes[-1] == script.Row([[7, 8, 9]], 2)
        lengths = Counter(len(row.texts[0]) for row in prefixes[:-1])
        assert sorted(lengths) == list(range(4, 11)) and max(lengths.values()) < 30
        for row, prefix in zip(rows, prefixes, strict=True):
            [ids], [whole] = prefix.texts, row.texts
            assert ids == whole[: len(ids)] and prefix.label == row.label
    assert [row.texts[0] for row in rows[:-1]] == texts  # the training rows stay whole


@pytest.mark.parametrize("name", ["sep_token", "eos_token"])
def test_prefixes_that_end_in_a_mark(script, name):
    """[SEP] or EOS takes the last place of a prefix, whose length it does not change."""
    tokenizer = byte_level_tokenizer()
    mark = tokenizer.eos_token_id
    tokenizer.eos_token = None
    setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(mark))
    args = script.Args(min_prefix_length=4)
    rows = [script.Row([[*range(10, 19), mark]], i % 2) for i in range(60)]
    prefixes = [row.texts[0] for row in script.cut_to_prefixes(rows, tokenizer, args, 1)]
    assert {len(ids) for ids in prefixes} == set(range(4, 11))
    assert all(ids == [*range(10, 9 + len(ids)), mark] for ids in prefixes)


# ---- Preferences -------------------------------------------------------------------------------------------


def response_ids(tokenizer, prompt, responses, max_length):
    """The ids of prompt, response and EOS, without those in front if there are too many."""
    start = tokenizer(prompt).input_ids
    ids = [start + tokenizer(text).input_ids + [tokenizer.eos_token_id] for text in responses]
    return [text[-max_length:] for text in ids]


def pair_losses(scores, margin):
    """-log sigmoid(difference - margin) of every pair of a ranking, and the differences."""
    differences = []
    for i, better in enumerate(scores):
        differences += [better - worse for worse in scores[i + 1 :]]
    losses = [torch.log1p(torch.exp(margin - x)) for x in differences]
    return losses, [x.item() for x in differences]


def calibration_by_hand(differences):
    """Five parts, of equal size but for one pair, of the pairs sorted by the size of their difference."""
    by_size = sorted(differences, key=abs)
    size, larger = divmod(len(by_size), 5)
    table, start = [], 0
    for i in range(5):
        part = by_size[start : start + size + (i < larger)]
        start += len(part)
        table.append({
            "score difference": f"{abs(part[0]):.2f} to {abs(part[-1]):.2f}",
            "pairs": len(part),
            "accuracy": pytest.approx(sum(x > 0 for x in part) / len(part)),
            "expected": pytest.approx(sum(1 / (1 + math.exp(-abs(x))) for x in part) / len(part), abs=1e-4),
        })  # fmt: skip
    return table


@pytest.mark.parametrize("make", [pairs_of, rankings_of])
def test_every_number_of_a_preference_model(
    reward, script, tiny_preference_model, tmp_path, monkeypatch, capsys, make
):
    """Metrics of each update, accuracy, margin and calibration of held-out rows, offset and weights."""
    max_length = 200
    data, train, test = three_splits(tmp_path / "data", make)
    calls = spy(monkeypatch, script, "collate_texts")
    scored = spy(monkeypatch, script, "score_rows")
    _, folder, metrics = reward(
        model_name_or_path=tiny_preference_model(),
        dataset_name=data,
        max_length=max_length,
        **THREE_UPDATES,
    )
    del calls[:2]  # of can_share_prompts
    assert len(calls) == 9 and all(shares_prompts for (_, _, shares_prompts), _ in calls)
    model, tokenizer = classifier(tiny_preference_model())

    def scores_of(row):
        """The scores of all responses of a data row, best first."""
        responses = row["responses"] if make is rankings_of else [row["chosen"], row["rejected"]]
        texts = response_ids(tokenizer, row["prompt"], responses, max_length)
        return [logits_alone(model, ids)[0] for ids in texts]

    assert len(metrics) == 3
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-3)
    order = []
    for update, row in enumerate(metrics, start=1):
        texts = training_texts(calls[3 * update - 3 : 3 * update], tokenizer)
        numbers = [number_in(responses[0], "train") for responses in texts]
        assert len(numbers) == 6
        order += numbers
        losses, shares, margins, rewards = [], [], [], []
        for i in numbers:
            scores = scores_of(train[i])
            of_pairs, differences = pair_losses(scores, train[i].get("margin", 0.0))
            losses.append(torch.stack(of_pairs).mean())
            shares.append(sum(x > 0 for x in differences) / len(differences))
            margins.append(sum(differences) / len(differences))
            rewards += [x.item() for x in scores]
        loss = torch.stack(losses).mean()
        rate = linear(5e-3, update, 3, warmup=2)
        expected = dict(
            update=update,
            epoch=6 * update / 13,
            lr=rate,
            loss=loss.item(),
            accuracy=sum(shares) / 6,
            margin=sum(margins) / 6,
            min_reward=min(rewards),
            mean_reward=sum(rewards) / len(rewards),
            max_reward=max(rewards),
            grad_norm=adamw_step(model, optimizer, loss, rate, max_norm=0.5),
        )
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-4)
    assert len(set(order[:12])) == 12 and len(set(order)) == 13
    assert_weights_of(folder, model)

    # Evaluation: seven test rows, and all training rows for the offset.
    held_out, references = [scored_texts(call, tokenizer) for call in scored]
    numbers = [number_in(responses[0], "test") for responses in held_out]
    assert len(set(numbers)) == len(numbers) == 7
    assert all(len(texts) == 1 for texts in references)
    assert sorted(number_in(text, "train") for [text] in references) == list(range(13))
    with torch.no_grad():
        by_row = [pair_losses(scores_of(test[i]), 0.0)[1] for i in numbers]
        best = [scores_of(row)[0].item() for row in train]
    differences = sum(by_row, [])
    evaluation = evaluation_of(folder)
    assert set(evaluation) == {"accuracy", "margin", "calibration", "n", "reward_offset"}
    assert evaluation["n"] == 7
    shares = [sum(x > 0 for x in pairs) / len(pairs) for pairs in by_row]
    assert evaluation["accuracy"] == pytest.approx(sum(shares) / 7)
    assert evaluation["margin"] == pytest.approx(sum(sum(x) / len(x) for x in by_row) / 7, **close)
    assert evaluation["calibration"] == calibration_by_hand(differences)
    assert evaluation["reward_offset"] == pytest.approx(sum(best) / 13, **close)
    config = json.loads((folder / "model/config.json").read_text())
    assert config["reward_offset"] == evaluation["reward_offset"]
    lines = capsys.readouterr().out
    assert f"7 held-out rows, accuracy {evaluation['accuracy']:.4f}" in lines
    offset = f"{evaluation['reward_offset']:.3f}"
    assert f"reward_offset: {offset}, the mean score of 13 references" in lines


def test_evaluation_of_few_pairs(script):
    """Four pairs are a table of four. A row counts once, however many pairs it has."""
    rows = [script.Row([[1], [2]]), script.Row([[1], [2], [3]])]
    metrics, table = script.evaluate_pairs(torch.tensor([1.0, 0.0, 0.0, 2.0, 0.5]), rows)
    assert [row["pairs"] for row in table] == [1, 1, 1, 1]
    assert metrics["accuracy"] == pytest.approx((1 + 1 / 3) / 2)


# ---- Models ------------------------------------------------------------------------------------------------


def test_a_new_head_is_drawn_by_the_seed(reward, tiny_lm, tmp_path):
    """The rest is the language model."""
    data, _, _ = three_splits(tmp_path / "data", pairs_of)
    heads = []
    for name, seed in (("one", 1), ("again", 1), ("other", 2)):
        flags = dict(model_name_or_path=tiny_lm("llama"), dataset_name=data, seed=seed, learning_rate=0.0)
        _, folder, _ = reward(name, **flags, num_train_epochs=0.1)
        saved, start = weights(folder / "model"), weights(tiny_lm("llama"))
        heads.append(saved.pop("score.weight"))
        start.pop("lm_head.weight", None)
        assert same(saved, start)
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])


def test_the_pipeline_finds_the_pad(reward, tiny_lm, tmp_path):
    """config.json names the tokenizer's pad, also if the language model's config named another or none."""
    lm = tmp_path / "lm"
    folder = tiny_lm("gpt2", "eos")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    model.config.pad_token_id = None
    model.save_pretrained(lm)
    tokenizer.save_pretrained(lm)
    _, folder, _ = reward(model_name_or_path=str(lm), num_train_epochs=0.1, label_names="bad,good")
    config = transformers.AutoConfig.from_pretrained(folder / "model")
    assert config.pad_token_id == tokenizer.eos_token_id
    assert config.id2label == {0: "bad", 1: "good"} and config.num_labels == 2


def test_texts_for_an_encoder(script):
    """Prompt and response are one text, with [CLS] and [SEP] as the tokenizer sets them."""
    tokenizer = byte_level_tokenizer()
    text = tokenizer("A film, a good one").input_ids
    sep, cls = 300, 301
    tokenizer.cls_token, tokenizer.sep_token = tokenizer.convert_ids_to_tokens([cls, sep])
    marks = [(tokenizer.cls_token, cls), (tokenizer.sep_token, sep)]
    template = f"{tokenizer.cls_token} $A {tokenizer.sep_token}"
    processor = tokenizers.processors.TemplateProcessing(template, special_tokens=marks)
    tokenizer.backend_tokenizer.post_processor = processor
    ids_for = script.preference_ids
    assert ids_for(tokenizer, "A film,", [" a good one"], 64) == [[cls, *text, sep]]
    assert ids_for(tokenizer, "A film,", [" a good one"], 5) == [[cls, *text[-3:], sep]]


DISTILBERT_LAYERS = {"q_lin", "k_lin", "v_lin", "out_lin", "lin1", "lin2"}


@pytest.mark.parametrize(
    "kind, layers, adapted, head",
    [
        ("gpt2", "c_attn, c_fc", {"c_attn", "c_fc"}, {"score"}),
        ("distilbert", "all-linear", DISTILBERT_LAYERS, {"pre_classifier", "classifier"}),
    ],
)
def test_which_layers_lora_trains(script, tiny_lm, tiny_classifier, kind, layers, adapted, head):
    """Adapters in the named layers, or in all linear layers of the transformer; and the whole head."""
    folder = tiny_lm() if kind == "gpt2" else tiny_classifier()
    args = script.Args(model_name_or_path=folder, lora_r=2, lora_target_modules=layers, max_length=32)
    model, _ = script.build_classifier(args, AutoTokenizer.from_pretrained(folder), [], ["bad", "good"])
    trained = set(script.trainable(model))
    of_lora = {name for name in trained if "lora_" in name}
    assert {name.split(".lora_")[0].split(".")[-1] for name in of_lora} == adapted
    assert {name.split(".")[0] for name in trained - of_lora} == head


def assert_same_as_pipeline(script, folder, names):
    """The pipeline of transformers gives the probabilities that the script computes, for a padded batch."""
    model, tokenizer = classifier(folder)
    texts = [row["text"] for row in texts_of("test", 5)]
    rows = [script.Row([ids]) for ids in tokenizer(texts).input_ids]
    _, ids, mask, _ = script.collate_texts(rows, "cpu")
    with torch.no_grad():
        ours = script.sequence_logits(model, ids, mask).softmax(-1)
    pipeline = transformers.pipeline("text-classification", model=str(folder), top_k=None)
    for probs, entries in zip(ours, pipeline(texts), strict=True):
        theirs = {entry["label"]: entry["score"] for entry in entries}
        assert set(theirs) == set(names)
        assert [theirs[name] for name in names] == pytest.approx(probs.tolist(), abs=1e-5)


@pytest.mark.parametrize("arch, pad", [("gpt2", "eos"), ("llama", "own"), ("opt", "own")])
def test_decoders_as_classifiers(reward, script, tiny_lm, arch, pad):
    """A language model gets a head, read at the last token, also if pad is EOS. The pipeline agrees."""
    lm = tiny_lm(arch, pad)
    _, folder, _ = reward(model_name_or_path=lm, label_names="negative,positive", learning_rate=1e-3)
    assert_same_as_pipeline(script, folder / "model", ["negative", "positive"])


# ---- Options -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", ["distilbert", "llama"])
def test_reward_lora(reward, script, tiny_lm, tiny_classifier, base):
    """The merged model is complete: plain transformers loads it."""
    path = tiny_classifier() if base == "distilbert" else tiny_lm(base)
    _, folder, _ = reward(model_name_or_path=path, lora_r=4, label_names="negative,positive")
    assert_same_as_pipeline(script, folder / "model", ["negative", "positive"])
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


def test_answers_and_acts(script, tiny_lm, capsys):
    """Trick 38: acts count from 1, classes from 0. The text is the utterance before and the answer."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm())
    rows = script.load_answers([*DIALOGS, dict(note="no dialog")])
    texts = ["Who are you? I am Leo.", "I am Leo. Then come in.", "Two. Three."]
    expected = [dict(text=text, label=label) for text, label in zip(texts, (0, 2, 3), strict=True)]
    assert rows == expected  # none for answers without an act, or in a dialog with a gap
    assert capsys.readouterr().out == "3 of 17 utterances are answers with an act\n"
    loaded = script.load_labeled_rows(dict.fromkeys(range(4), 0), rows, tokenizer, script.Args())
    assert len(loaded) == 3


@pytest.fixture
def pairs(reward, tiny_lm, tiny_pairs):
    """pairs(folder="run", **changes): a run on pairs. -> model, folder, rows of metrics"""
    flags = dict(model_name_or_path=tiny_lm("gpt_neox"), dataset_name=tiny_pairs, max_length=200)
    return lambda folder="run", **changes: reward(folder, **flags | changes)


# ---- Token ids ---------------------------------------------------------------------------------------------


def test_pairs_with_a_common_beginning(script, tiny_lm):
    """As in HH, both texts begin with the prompt. They are read as if the prompt had its own column."""
    joined = dict(chosen="Human: hi yes, it is", rejected="Human: hi no no no no")
    separate = dict(prompt="Human: hi", chosen=" yes, it is", rejected=" no no no no")
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm())
    [[one], [other]] = [
        script.load_preference_rows([row], tokenizer, script.Args()) for row in (joined, separate)
    ]
    assert one == other


def test_all_stages_tokenize_alike(scripts, tiny_lm, small):
    """Tricks 7 and 9: three scripts read the same ids for a prompt and a finished completion."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm())
    prompt, completion = "A post about a dog.\n\nTL;DR:", " My dog barks. What now?"
    rows = [dict(prompt=prompt, completion=completion)]
    [(trained, _)], _ = scripts["sft"].load_documents(rows, tokenizer, small("sft"))
    [scored] = scripts["reward_model"].preference_ids(tokenizer, prompt, [completion], 100)
    [post] = scripts["rloo_tldr"].load_prompts(rows, tokenizer, small("rloo_tldr"))
    completion_ids = tokenizer(completion).input_ids + [tokenizer.eos_token_id]
    assert list(trained) == scored == post["ids"] + completion_ids


def test_a_prompt_is_cut_once_per_row(script, tiny_lm):
    """All texts of a row lose as many tokens of the prompt as the longest must. BOS and EOS stay."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm())
    prompt, responses = "one two three four five six", [" seven", " eight nine ten", " a"]
    whole = script.preference_ids(tokenizer, prompt, responses, 100)
    longest = max(map(len, whole))
    cut = script.preference_ids(tokenizer, prompt, responses, longest - 3)
    assert cut == [ids[3:] for ids in whole]
    assert script.preference_ids(tokenizer, prompt, responses, longest) == whole
    bos = tokenizer.bos_token_id
    assert script.preference_ids(tokenizer, EOS + prompt, responses, longest - 3) == [
        [bos, *ids[4:]] for ids in whole
    ]
    # What is longer than max_length without its prompt loses more.
    for ids, all_ids in zip(script.preference_ids(tokenizer, prompt, responses, 4), whole, strict=True):
        assert len(ids) <= 4 and ids == all_ids[-len(ids) :]
        assert ids[-1] == tokenizer.eos_token_id


def test_a_text_that_is_the_beginning_of_another_keeps_its_end(script, tiny_lm):
    """A chat, for example, with another turn after it."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm())
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    chats = [[dict(role="assistant", content="one two" + more)] for more in ("", " three four five six")]
    short, long = script.preference_ids(tokenizer, [], chats, 4)
    assert short == tokenizer("one two").input_ids[-1:]
    assert len(long) == 4


def test_responses_that_are_equal_after_the_cut(pairs, script, tiny_lm, tmp_path, capsys):
    """The better place counts, and the run says how many leave, and how many prompts were cut."""
    rows = [
        dict(prompt="Say.", chosen=" Yes" + " and so on" * 20, rejected=" No" + " and so on" * 20),
        dict(prompt="Say.", chosen=" no", rejected=" no"),
        dict(prompt="Say it" + " again" * 20, chosen=" a", rejected=" b"),
        dict(prompt="Say.", responses=[" a", " b", " a"]),
    ]
    empty = [dict(prompt="Say.", chosen=" a", rejected="  "), dict(prompt="Say.", responses=[" a", "\n"])]
    data = write_rows(tmp_path / "data", train=rows + empty, test=rows[2:])
    pairs(dataset_name=data, max_length=16, num_train_epochs=0.1)
    lines = capsys.readouterr().out
    for count, num_equal in ((6, 3), (2, 1)):  # training and held-out rows
        kept = f"2 of {count} rows have different responses, 1 at the limit of 16 tokens"
        assert f"{kept}; left out: {num_equal} responses equal to a better one\n" in lines
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm())
    [row] = script.load_preference_rows(rows[3:], tokenizer, script.Args())
    assert [tokenizer.decode(ids) for ids in row.texts] == [f"Say. {x}{EOS}" for x in "ab"]


# ---- Head and offset ---------------------------------------------------------------------------------------


@pytest.fixture
def build(script, tiny_lm):
    """build(folder, labels=None) -> what build_classifier makes of a model, and whether its head is new"""
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm())

    def run(folder, labels=None):
        args = script.Args(model_name_or_path=str(folder), max_length=64)
        return script.build_classifier(args, tokenizer, [], labels)

    return run


def test_a_head_of_another_size_is_replaced(build, tiny_lm, tmp_path):
    """A decoder with 2 labels gets a new head for pairs, with the standard deviation of a new head."""
    config = AutoConfig.from_pretrained(tiny_lm("llama"), num_labels=2)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    model, is_new = build(tmp_path)
    assert is_new and model.score.weight.shape == (1, 32)
    assert model.score.weight.std().item() == pytest.approx(33**-0.5, rel=0.4)
    _, is_new = build(tmp_path, ["bad", "good"])
    assert not is_new


def test_standard_deviation_of_a_new_head(script, build, tiny_lm, tmp_path):
    """1 / sqrt(d + 1) for a language model. A head that was saved is kept (trick 35)."""
    config = AutoConfig.from_pretrained(
        tiny_lm("gpt_neox"), hidden_size=512, num_hidden_layers=1, intermediate_size=64
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "lm")
    load = partial(script.load_model, AutoModelForSequenceClassification)
    with pytest.raises(script.UserError, match="missing from the checkpoint, such as score.weight"):
        load(str(tmp_path / "lm"), num_labels=1)
    model, is_new = build(tmp_path / "lm")
    assert is_new and model.score.weight.std().item() == pytest.approx(513**-0.5, rel=0.15)
    model.save_pretrained(tmp_path / "rm")
    again, is_new = build(tmp_path / "rm")
    assert not is_new and torch.equal(again.score.weight, model.score.weight)


def test_a_classifier_has_no_offset(build, tiny_preference_model):
    """reward_offset belongs to the score that the model had before."""
    model, _ = build(tiny_preference_model("llama"), ["bad", "good"])
    assert not hasattr(model.config, "reward_offset")


@pytest.mark.parametrize("base, is_bf16", [("distilbert", False), ("gpt2", True)])
def test_bf16_is_for_decoders(reward, tiny_lm, tiny_classifier, capsys, base, is_bf16):
    """The run says so: BERT's family stays in fp32."""
    path = tiny_classifier() if base == "distilbert" else tiny_lm(base)
    reward(model_name_or_path=path, dtype="bfloat16", num_train_epochs=0.1)
    assert f"bf16: {is_bf16}\n" in capsys.readouterr().out


@pytest.mark.parametrize("references", ["given", "chosen"])
def test_references_have_the_mean_score_0(pairs, scripts, tiny_posts, tiny_pairs, references):
    """Trick 24: after reloading. References are --center-dataset-name, or else the chosen responses."""
    if references == "given":
        data, column = tiny_posts, "completion"
        _, folder, _ = pairs(center_dataset_name=data, max_length=256)
    else:
        data, column = tiny_pairs, "chosen"
        _, folder, _ = pairs(max_length=256)  # nothing is cut
    rows = rows_of(data, "train.jsonl")
    script = scripts["rloo_tldr"]
    score_all = script.load_reward_model(script.Args(), str(folder / "model"), torch.device("cpu"))
    scores = score_all([row["prompt"] for row in rows], [row[column] for row in rows])
    assert sum(scores) / len(scores) == pytest.approx(0, abs=1e-4)
    offset = json.loads((folder / "model/config.json").read_text())["reward_offset"]
    assert offset == pytest.approx(evaluation_of(folder)["reward_offset"]) and abs(offset) > 1e-3
    model, tokenizer = classifier(folder / "model")
    [ids] = response_ids(tokenizer, rows[0]["prompt"], [rows[0][column]], 256)
    assert scores[0] == pytest.approx(logits_alone(model, ids).item() - offset, abs=1e-4)
