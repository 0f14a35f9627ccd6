"""Which rows reward_model.py trains on and evaluates on, and every number that it reports.

The rows of each split name it, and differ in length. The numbers are computed again by transformers and plain
Python, one text at a time, from the rows of the data set.
"""

import json
import math
from collections import Counter

import pytest
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from conftest import ACTS, EOS, byte_level_tokenizer
from run_tools import same, spy, weights, write_rows
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

pytest_plugins = ["run_fixtures"]
TINY_GPT2 = "gpt2 n_embd=32 n_layer=1 n_head=2 n_positions=128"
close = dict(rel=1e-3, abs=2e-5)


def texts_of(split, count):
    """Rows with the column text, such as "test text 3: sun sun."."""
    return [dict(text=f"{split} text {i}:" + " sun" * (5 * i % 8) + ".") for i in range(count)]


def posts_of(split, count, longest=60):
    """Rows with the columns prompt and completion. The text of number 4 is long."""
    rows = []
    for i in range(count):
        prompt = f"{split} text {i}:" + " rain" * (i % 4)
        completion = f" {split} answer {i}" + " sun" * (longest if i == 4 else 5 * i % 7) + "."
        rows.append(dict(prompt=prompt, completion=completion))
    return rows


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


def three_splits(folder, make):
    """A data set with 13 training, 9 test and 5 validation rows. -> its path, rows of train, rows of test"""
    train, test = make("train", 13), make("test", 9)
    return write_rows(folder, train=train, test=test, validation=make("validation", 5)), train, test


def number_in(text, split):
    """The number of the row of this split that a text begins with; fails if it is of another split."""
    start = f"{split} text "
    assert text.startswith(start), text
    return int(text.removeprefix(start).split(":")[0])


def evaluation_of(folder):
    """evaluation.json of a run."""
    return json.loads((folder / "evaluation.json").read_text())


def classifier(folder):
    """The same of a classifier."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def linear(rate, update, updates, warmup):
    """The learning rate of an update: up during warmup, then down to 0 after the last update."""
    if update <= warmup:
        return rate * update / warmup
    return rate * (updates - (update - 1)) / (updates - warmup)


def adamw_step(model, optimizer, loss, rate, max_norm):
    """One step along a clipped gradient. -> the norm of the gradient before it was clipped"""
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.param_groups[0]["lr"] = rate
    optimizer.step()
    return norm.item()


def assert_weights_of(folder, model):
    """model/ has the weights of a model that was trained by hand."""
    saved = type(model).from_pretrained(folder / "model").state_dict()
    for name, x in model.state_dict().items():
        torch.testing.assert_close(saved[name], x, atol=1e-4, rtol=1e-3, msg=name)


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
    reward, scripts, tiny_classifier, tmp_path, monkeypatch, capsys, min_prefix_length
):
    """Metrics of each update, the confusion matrix of the held-out rows, and the weights in model/."""
    data, train, test = three_splits(tmp_path / "data", labeled_of)
    calls = spy(monkeypatch, scripts["reward_model"], "collate_texts")
    scored = spy(monkeypatch, scripts["reward_model"], "score_rows")
    _, folder, metrics = reward(
        dataset_name=data,
        min_prefix_length=min_prefix_length,
        max_length=18,
        num_eval_prompts=7,
        num_train_epochs=1.4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
        learning_rate=5e-3,
        lr_scheduler_type="linear",
        warmup_ratio=0.4,
        adam_eps=1e-3,
        max_grad_norm=0.5,
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
    assert f"training: 13 of 13 rows, {num_full} at the limit of 18 tokens" in lines and num_full > 0
    assert "the head that was saved with the model; classes 0, 1, ...: negative, positive" in lines
    assert AutoTokenizer.from_pretrained(folder / "model").model_max_length == 18


def test_confusion_by_hand(scripts):
    """A row for each label, a column for each prediction, also of a label that nobody predicts."""
    script = scripts["reward_model"]
    labels = [0, 0, 0, 0, 1, 1, 2, 2, 2]
    predicted = [0, 1, 1, 2, 1, 1, 0, 0, 1]
    logits = F.one_hot(torch.tensor(predicted), 4).float() - 2
    rows = [script.Row([[1]], label) for label in labels]
    metrics, table = script.evaluate_labels(logits, rows, ["a", "b", "c", "d"])
    assert metrics["confusion"] == [[1, 2, 1, 0], [0, 2, 0, 0], [2, 1, 0, 0], [0, 0, 0, 0]]
    assert metrics["accuracy"] == pytest.approx(3 / 9) and metrics["n"] == 9
    assert table[0] == {"label \\ predicted": "a", "a": 1, "b": 2, "c": 1, "d": 0}
    assert [list(row.values())[0] for row in table] == metrics["labels"] == ["a", "b", "c", "d"]


def test_names_give_words_their_numbers(scripts, tmp_path):
    """--label-names puts words in its own order, and names numbers. Without it, the words are sorted."""
    script = scripts["reward_model"]
    words, numbers = ["sad", "glad", "mixed", "glad"], [1, 0, 2, 0]

    def classes(labels, names):
        return script.find_classes([dict(label=label) for label in labels], script.Args(label_names=names))

    for labels, names, expected, order in (
        (words, "sad,mixed,glad", ["sad", "mixed", "glad"], [0, 2, 1, 2]),
        (words, None, ["glad", "mixed", "sad"], [2, 0, 1, 0]),
        (numbers, "sad,mixed,glad", ["sad", "mixed", "glad"], [1, 0, 2, 0]),
        ([7, 3, 5, 3], None, ["3", "5", "7"], [2, 0, 1, 0]),
    ):
        found, class_of = classes(labels, names)
        assert found == expected and [class_of[label] for label in labels] == order


@pytest.mark.parametrize(
    "columns, learned",
    [
        ("dialog act text label", "labels"),
        ("text label prompt chosen rejected", "labels"),
        ("text prompt chosen rejected", "pairs"),
        ("prompt chosen rejected responses", "rankings"),
        ("responses", "rankings"),
        ("text dialog prompt chosen", None),
    ],
)
def test_which_columns_decide(scripts, small, world, tmp_path, columns, learned):
    """Acts before labels, labels before rankings, rankings before pairs. A prompt is optional."""
    script, tokenizer = scripts["reward_model"], AutoTokenizer.from_pretrained(world.lm())
    values = dict(text="a", label=0, dialog=["b", "c"], act=[1, 2], prompt="d", chosen="e", rejected="f")
    values["responses"] = ["g", "h", "i"]
    rows = [{column: values[column] for column in columns.split()} for _ in range(4)]
    data = write_rows(tmp_path / "data", train=rows, test=rows)
    args = small("reward_model", dataset_name=data, label_names="x,y")
    if learned is None:
        with pytest.raises(script.UserError, match="no columns text and label, or dialog and act"):
            script.load_data(args, tokenizer)
        return
    loaded = script.load_data(args, tokenizer)
    assert loaded["label_names"] == (["x", "y"] if learned == "labels" else None)
    assert len(loaded["train"][0].texts) == dict(labels=1, pairs=2, rankings=3)[learned]


def test_a_row_without_text_takes_its_label_with_it(scripts):
    """Wherever it is; also with the tokenizer of an encoder, which marks the ends of an empty text too."""
    script, tokenizer = scripts["reward_model"], byte_level_tokenizer()
    mark = [(EOS, tokenizer.eos_token_id)]
    template = tokenizers.processors.TemplateProcessing(f"$A {EOS}", special_tokens=mark)
    tokenizer.backend_tokenizer.post_processor = template
    texts = ["", "one", " ", "two", None, "three", "four"]
    rows = [dict(text=text, label=label) for text, label in zip(texts, "dabcabd", strict=True)]
    loaded, counts = script.load_labeled_rows(dict(a=0, b=1, c=2, d=3), rows, tokenizer, script.Args())
    found = [(tokenizer.decode(row.texts[0]), row.label) for row in loaded]
    assert found == [(f"one{EOS}", 0), (f"two{EOS}", 2), (f"three{EOS}", 1), (f"four{EOS}", 3)]
    assert counts == "4 of 7 rows, 0 at the limit of 512 tokens"


def test_labels_that_cannot_be_learned(scripts):
    """A label without a name, and a single label, end in one line."""
    script, tokenizer = scripts["reward_model"], byte_level_tokenizer()
    rows = [dict(text="a", label=0), dict(text="b", label=2)]
    with pytest.raises(script.UserError, match="label 2 is none of"):
        _, class_of = script.find_classes(rows, script.Args(label_names="bad,good"))
        script.load_labeled_rows(class_of, rows, tokenizer, script.Args())
    with pytest.raises(script.UserError, match="two labels or more"):
        script.find_classes([dict(text="a", label=1), dict(text="b", label=1)], script.Args())


def test_a_long_labeled_text_keeps_its_beginning(scripts, small, world, tmp_path):
    """And a row without text takes its label with it."""
    rows = labeled_of("train", 6)
    rows[1]["text"], rows[4]["text"] = None, ""
    data = write_rows(tmp_path / "data", train=rows, test=labeled_of("test", 4))
    tokenizer = AutoTokenizer.from_pretrained(world.classifier())
    args = small("reward_model", dataset_name=data, max_length=9, num_eval_prompts=3)
    loaded = scripts["reward_model"].load_data(args, tokenizer)
    kept = [row for row in rows if row["text"]]
    assert [(row.texts, row.label) for row in loaded["train"]] == [
        ([tokenizer(row["text"]).input_ids[:9]], row["label"]) for row in kept
    ]
    assert len(loaded["held_out"]) == 3 and loaded["references"] == []
    assert loaded["label_names"] == ["0", "1"]


# ---- Which rows --------------------------------------------------------------------------------------------


def loaded_numbers(scripts, small, tokenizer, **flags):
    """The numbers of the rows that reward_model.py trains on, and of those that it evaluates."""
    data = scripts["reward_model"].load_data(small("reward_model", **flags), tokenizer)
    numbers = []
    for name, split in (("train", "train"), ("held_out", "test")):
        numbers.append([number_in(tokenizer.decode(row.texts[0]), split) for row in data[name]])
    return numbers


@pytest.mark.parametrize("make", [labeled_of, pairs_of, rankings_of])
def test_rows_of_a_reward_model(scripts, small, world, tmp_path, make):
    """All training rows in their order, and test rows that are drawn at random: another seed, others."""
    train, test = make("train", 30), make("test", 20)
    data = write_rows(tmp_path / "data", train=train, test=test, validation=make("validation", 5))
    tokenizer = AutoTokenizer.from_pretrained(world.lm())
    drawn = []
    for seed in (1, 2):
        flags = dict(dataset_name=data, seed=seed, num_eval_prompts=6, max_length=200)
        numbers, held_out = loaded_numbers(scripts, small, tokenizer, **flags)
        assert numbers == list(range(30))
        assert len(set(held_out)) == len(held_out) == 6 and set(held_out) != set(range(6))
        drawn.append(held_out)
    assert set(drawn[0]) != set(drawn[1])
    flags = dict(dataset_name=data, num_eval_prompts=99, max_length=200)
    _, held_out = loaded_numbers(scripts, small, tokenizer, **flags)
    assert sorted(held_out) == list(range(20))


def test_shards_are_parts_of_the_shuffled_rows(scripts, small, world, tmp_path):
    """Whatever the seeds of their runs: disjoint, complete, and mixed though the file is sorted by label."""
    train = labeled_of("train", 30)
    for i, row in enumerate(train):
        row["label"] = int(i >= 15)
    test = labeled_of("test", 8)
    data = write_rows(tmp_path / "data", train=train, test=test)
    tokenizer = AutoTokenizer.from_pretrained(world.classifier())
    for parts in (2, 3):
        shards = []
        for part in range(parts):
            flags = dict(dataset_name=data, train_shard=f"{part}/{parts}", seed=part + 1)
            numbers, held_out = loaded_numbers(scripts, small, tokenizer, **flags, num_eval_prompts=8)
            assert sorted(held_out) == list(range(8))  # shards are of training rows only
            assert len(numbers) == 30 // parts
            assert 2 <= sum(number >= 15 for number in numbers) <= len(numbers) - 2
            assert sorted(numbers) not in (
                list(range(part, 30, parts)),
                list(range(part * 30 // parts, (part + 1) * 30 // parts)),
            )
            shards += numbers
        assert sorted(shards) == list(range(30))


def test_shards_have_no_dialog_in_common(scripts, small, world, tmp_path):
    """Two answers of one dialog would have an utterance in common."""
    rows = [dict(dialog=[f"train text {3 * i + k}: sun." for k in range(3)], act=[1, 2, 3]) for i in range(8)]
    data = write_rows(tmp_path / "data", train=rows, test=rows)
    tokenizer = AutoTokenizer.from_pretrained(world.intents())
    shards = []
    for shard in ("0/2", "1/2"):
        flags = dict(dataset_name=data, train_shard=shard, label_names=",".join(ACTS))
        loaded = scripts["reward_model"].load_data(small("reward_model", **flags), tokenizer)["train"]
        texts = [tokenizer.decode(row.texts[0]) for row in loaded]
        shards.append(Counter(number_in(text, "train") // 3 for text in texts))
    assert sorted(shards[0] | shards[1]) == list(range(8)) and not shards[0] & shards[1]
    assert set((shards[0] + shards[1]).values()) == {2}  # both answers of each


def test_answers_of_dialogs_are_drawn_from_the_test_dialogs(scripts, small, world, tmp_path):
    """Each with its own act, and the utterance before it."""

    def dialogs(split, count):
        rows = []
        for i in range(count):
            texts = [f"{split} text {3 * i + k}: {'sun ' * k}." for k in range(3)]
            rows.append(dict(dialog=texts, act=[4, 1 + i % 2, 3 + i % 2]))
        return rows

    data = write_rows(tmp_path / "data", train=dialogs("train", 7), test=dialogs("test", 5))
    tokenizer = AutoTokenizer.from_pretrained(world.intents())
    args = small("reward_model", dataset_name=data, num_eval_prompts=4, label_names=",".join(ACTS))
    loaded = scripts["reward_model"].load_data(args, tokenizer)
    assert len(loaded["train"]) == 14 and len(loaded["held_out"]) == 4
    for name, split in (("train", "train"), ("held_out", "test")):
        for row in loaded[name]:
            text = tokenizer.decode(row.texts[0])
            number = number_in(text, split)
            assert f" {split} text {number + 1}:" in text
            i, k = divmod(number, 3)
            assert row.label == ((i % 2, 2 + i % 2)[k])


def test_answers_are_not_cut_to_prefixes(scripts, small, world, tiny_pairs):
    """An answer that is cut off would keep its act, and so would a response its rank."""
    script = scripts["reward_model"]
    for data in (world.dialogs, tiny_pairs):
        args = small("reward_model", dataset_name=data, min_prefix_length=3)
        with pytest.raises(script.UserError, match="--min-prefix-length is only for"):
            script.load_data(args, AutoTokenizer.from_pretrained(world.lm()))


def test_a_prefix_of_special_tokens_is_refused(scripts, small, world, tmp_path):
    """[CLS] and [SEP] alone are an empty text."""
    script, tokenizer = scripts["reward_model"], byte_level_tokenizer()
    marks = [(EOS, tokenizer.eos_token_id)]
    template = tokenizers.processors.TemplateProcessing(f"{EOS} $A {EOS}", special_tokens=marks)
    tokenizer.backend_tokenizer.post_processor = template
    data, _, _ = three_splits(tmp_path / "data", labeled_of)
    for shortest in (1, 2):
        with pytest.raises(script.UserError, match="must be more than 2"):
            script.load_data(small("reward_model", dataset_name=data, min_prefix_length=shortest), tokenizer)
    script.load_data(small("reward_model", dataset_name=data, min_prefix_length=3), tokenizer)


def test_prefixes_by_hand(scripts):
    """Of all lengths from the shortest to the whole text, with its label. Each update cuts anew."""
    script = scripts["reward_model"]
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
    other = script.cut_to_prefixes(rows, tokenizer, script.Args(min_prefix_length=4, seed=4), 1)
    assert other != cuts[0]


@pytest.mark.parametrize("name", ["sep_token", "eos_token"])
def test_prefixes_that_end_in_a_mark(scripts, name):
    """[SEP] or EOS takes the last place of a prefix, whose length it does not change."""
    script = scripts["reward_model"]
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
    reward, scripts, tiny_preference_model, tmp_path, monkeypatch, capsys, make
):
    """Metrics of each update, accuracy, margin and calibration of held-out rows, offset and weights."""
    max_length = 200
    data, train, test = three_splits(tmp_path / "data", make)
    calls = spy(monkeypatch, scripts["reward_model"], "collate_texts")
    scored = spy(monkeypatch, scripts["reward_model"], "score_rows")
    _, folder, metrics = reward(
        model_name_or_path=tiny_preference_model(),
        dataset_name=data,
        max_length=max_length,
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
    assert f"mean score of 13 references, saved as reward_offset: {offset}" in lines


def test_evaluation_of_rankings_by_hand(scripts):
    """All pairs of all rows. A tie is not in order."""
    script = scripts["reward_model"]
    rows = [script.Row([[1, k] for k in range(count)]) for count in (3, 2, 4)]
    scores = torch.tensor([3.0, 1.0, 2.0, 5.0, 5.0, -1.0, 1.5, -4.0, -1.75])
    differences = [2.0, 1.0, -1.0, 0.0, -2.5, 3.0, 0.75, 5.5, 3.25, -2.25]
    metrics, table = script.evaluate_pairs(scores, rows)
    # Rows count alike, however many pairs they have: 3, 1 and 6.
    assert metrics["accuracy"] == pytest.approx((2 / 3 + 0 + 4 / 6) / 3)
    assert metrics["margin"] == pytest.approx((2 / 3 + 0 + sum(differences[4:]) / 6) / 3)
    assert metrics["n"] == 3 and metrics["calibration"] == table
    assert [row["score difference"] for row in table] == [
        "0.00 to 0.75",
        "1.00 to 1.00",
        "2.00 to 2.25",
        "2.50 to 3.00",
        "3.25 to 5.50",
    ]
    assert [row["accuracy"] for row in table] == [0.5, 0.5, 0.5, 0.5, 1.0]
    expected = [sum(1 / (1 + math.exp(-x)) for x in pair) / 2 for pair in ((0, 0.75), (1, 1), (2, 2.25))]
    assert [row["expected"] for row in table[:3]] == pytest.approx(expected)


def test_evaluation_of_few_pairs(scripts):
    """Four pairs are a table of four. Equal texts are not a pair, here as in training."""
    script = scripts["reward_model"]
    rows = [script.Row([[1], [2]]), script.Row([[1], [2], [1]]), script.Row([[1], [2]])]
    metrics, table = script.evaluate_pairs(torch.tensor([1.0, 0.0, 0.0, 2.0, 0.0, 3.5, 0.0]), rows)
    assert [row["pairs"] for row in table] == [1, 1, 1, 1]
    assert metrics["accuracy"] == pytest.approx((1 + 1 / 2 + 1) / 3)


def test_scores_stay_with_their_rows(scripts, small, tiny_preference_model):
    """Rankings of unequal lengths, scored by length in passes of 64 texts: as each text alone."""
    script = scripts["reward_model"]
    model, _ = classifier(tiny_preference_model())
    rows = []
    for i in range(40):
        texts = [[3 + (7 * i + k) % 900] * (1 + (11 * i + 5 * k) % 17) for k in range(2 + i % 3)]
        rows.append(script.Row(texts))
    accelerator = script.start_accelerator(small("reward_model"))
    scores = script.score_rows(model.to(accelerator.device), rows, accelerator)
    model.to("cpu")
    with torch.no_grad():
        alone = [logits_alone(model, ids).item() for row in rows for ids in row.texts]
    assert scores.squeeze(1).tolist() == pytest.approx(alone, abs=1e-4)


def test_training_has_no_dropout(reward, tiny_lm, tmp_path):
    """Also where the config asks for it."""
    data, train, _ = three_splits(tmp_path / "data", pairs_of)
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(tiny_lm()),
        AutoTokenizer.from_pretrained(tiny_lm()),
    )
    model.config.resid_pdrop = model.config.embd_pdrop = 0.5
    model.save_pretrained(tmp_path / "lm")
    tokenizer.save_pretrained(tmp_path / "lm")
    _, folder, [metrics] = reward(
        model_name_or_path=str(tmp_path / "lm"),
        dataset_name=data,
        max_length=100,
        per_device_train_batch_size=13,
        learning_rate=0.0,
    )
    model, tokenizer = classifier(folder / "model")
    margins = []
    for row in train:
        texts = response_ids(tokenizer, row["prompt"], [row["chosen"], row["rejected"]], 100)
        with torch.no_grad():
            chosen, rejected = [logits_alone(model, ids).item() for ids in texts]
        margins.append(chosen - rejected)
    assert metrics["margin"] == pytest.approx(sum(margins) / 13, **close)


def test_references_are_drawn_from_the_training_split(scripts, small, world, tmp_path):
    """1,000 completions of --center-dataset-name at random, with EOS, and no test rows."""
    script = scripts["reward_model"]
    posts = [dict(prompt=f"train text {i}:", completion=f" a{i}") for i in range(1300)]
    center = write_rows(tmp_path / "center", train=posts, test=posts_of("test", 9))
    data = write_rows(tmp_path / "data", train=pairs_of("train", 9), test=pairs_of("test", 5))
    tokenizer = AutoTokenizer.from_pretrained(world.lm())
    drawn = []
    for seed in (1, 2):
        flags = dict(dataset_name=data, center_dataset_name=center, seed=seed)
        references = script.load_data(small("reward_model", **flags), tokenizer)["references"]
        texts = [tokenizer.decode(row.texts[0]) for row in references]
        numbers = [number_in(text, "train") for text in texts]
        assert texts == [f"train text {i}: a{i}{EOS}" for i in numbers]
        assert len(set(numbers)) == len(numbers) == 1000
        assert 175 < sum(number >= 1050 for number in numbers) < 210  # 250 of 1,300
        drawn.append(set(numbers))
    assert drawn[0] != drawn[1]
    short = small("reward_model", dataset_name=data, center_dataset_name=center, max_length=4)
    for row in script.load_data(short, tokenizer)["references"]:
        assert len(row.texts[0]) == 4 and row.texts[0][-1] == tokenizer.eos_token_id


def test_references_of_a_shard_are_its_chosen_responses(scripts, small, world, tmp_path):
    """Without --center-dataset-name: the first response of each row that is trained on, no other."""
    script = scripts["reward_model"]
    data = write_rows(tmp_path / "data", train=pairs_of("train", 12), test=pairs_of("test", 5))
    tokenizer = AutoTokenizer.from_pretrained(world.lm())
    args = small("reward_model", dataset_name=data, train_shard="1/3", max_length=200)
    loaded = script.load_data(args, tokenizer)
    assert len(loaded["train"]) == 4
    chosen = sorted(row.texts[0] for row in loaded["train"])
    assert sorted(ids for row in loaded["references"] for ids in row.texts) == chosen
    assert all(" train answer" in tokenizer.decode(ids) for ids in chosen)


def test_margins_stay_with_their_pairs(scripts, world):
    """Rows that are skipped take their margins with them. Rankings and pairs without a column have 0."""
    script = scripts["reward_model"]
    tokenizer = AutoTokenizer.from_pretrained(world.lm())
    rows = pairs_of("train", 6)
    rows[1]["rejected"], rows[3]["chosen"] = "", None
    rows[4]["rejected"] = rows[4]["chosen"]
    loaded, counts = script.load_preference_rows(rows, tokenizer, script.Args())
    assert counts == "3 of 6 rows, 0 at the limit of 512 tokens, 1 pairs of equal texts left out"
    kept = [row for i, row in enumerate(rows) if i not in (1, 3, 4)]
    assert [row.margin for row in loaded] == [row["margin"] for row in kept]
    for row, data_row in zip(loaded, kept, strict=True):
        pair = [data_row["chosen"], data_row["rejected"]]
        assert row.texts == response_ids(tokenizer, data_row["prompt"], pair, 512)
    rankings = rankings_of("train", 4)
    loaded, _ = script.load_preference_rows(rankings, tokenizer, script.Args())
    assert [len(row.texts) for row in loaded] == [3, 2, 4, 3]
    assert [row.margin for row in loaded] == [0.0] * 4


# ---- Models ------------------------------------------------------------------------------------------------


def test_a_new_head_is_drawn_by_the_seed(reward, tiny_lm, tmp_path):
    """With standard deviation 1 / sqrt(d + 1); the rest is the language model."""
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
    both = torch.cat([heads[0], heads[2]])
    assert both.std().item() == pytest.approx(33**-0.5, rel=0.3)  # not 0.02 or 0.2


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


def test_texts_for_an_encoder(scripts):
    """Prompt and response are one text, with [CLS] and [SEP] as the tokenizer sets them."""
    tokenizer = byte_level_tokenizer()
    text = tokenizer("A film, a good one").input_ids
    sep, cls = 300, 301
    tokenizer.cls_token, tokenizer.sep_token = tokenizer.convert_ids_to_tokens([cls, sep])
    marks = [(tokenizer.cls_token, cls), (tokenizer.sep_token, sep)]
    template = f"{tokenizer.cls_token} $A {tokenizer.sep_token}"
    processor = tokenizers.processors.TemplateProcessing(template, special_tokens=marks)
    tokenizer.backend_tokenizer.post_processor = processor
    ids_for = scripts["reward_model"].preference_ids
    assert ids_for(tokenizer, "A film,", [" a good one"], 64) == [[cls, *text, sep]]
    assert ids_for(tokenizer, "A film,", [" a good one"], 5) == [[cls, *text[-3:], sep]]


def layers_with_adapter(model):
    """The names of the layers that LoRA trains, without what is the same in all of them."""
    names = [name for name, p in model.named_parameters() if "lora_A" in name and p.requires_grad]
    return {name.split(".lora_A")[0].split(".")[-1] for name in names}


@pytest.mark.parametrize(
    "kind, layers, adapted, head",
    [
        ("gpt2", "c_attn, c_fc", {"c_attn", "c_fc"}, {"score"}),
        ("gpt2", "all-linear", {"c_attn", "c_proj", "c_fc"}, {"score"}),
        ("distilbert", "q_lin", {"q_lin"}, {"pre_classifier", "classifier"}),
        (
            "distilbert",
            "all-linear",
            {"q_lin", "k_lin", "v_lin", "out_lin", "lin1", "lin2"},
            {"pre_classifier", "classifier"},
        ),
    ],
)
def test_which_layers_lora_trains(scripts, tiny_lm, tiny_classifier, kind, layers, adapted, head):
    """Adapters in the named layers, or in all linear layers of the transformer; and the whole head."""
    script = scripts["reward_model"]
    folder = tiny_lm() if kind == "gpt2" else tiny_classifier()
    args = script.Args(model_name_or_path=folder, lora_r=2, lora_target_modules=layers, max_length=32)
    model, _ = script.build_classifier(args, AutoTokenizer.from_pretrained(folder), [], ["bad", "good"])
    assert layers_with_adapter(model) == adapted
    assert {name.split(".")[0] for name in script.trainable(model) if "lora_" not in name} == head
