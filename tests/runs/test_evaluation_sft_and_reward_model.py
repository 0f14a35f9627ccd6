"""Which rows sft.py and reward_model.py train on and evaluate on, and every number that they report.

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
from conftest import ACTS, EOS, byte_level_tokenizer, ids_of
from datasets import ClassLabel, Dataset, Features
from run_tools import rows_of, same, spy, weights, write_rows
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


def language_model(folder):
    """A folder's model and tokenizer, loaded by transformers."""
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def classifier(folder):
    """The same of a classifier."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def linear(rate, update, updates, warmup):
    """The learning rate of an update: up from 0 during warmup, then down to 0 after the last update."""
    if update <= warmup:
        return rate * (update - 1) / warmup
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


# ---- sft.py: rows, tables and files ------------------------------------------------------------------------


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
    """How many rows these documents fill, in their order."""
    rows, room = 0, 0
    for ids, _ in documents:
        if len(ids) > room:
            rows, room = rows + 1, max_length
        room -= len(ids)
    return rows


def collated(calls, split, tokenizer):
    """The numbers of the data rows in calls of collate_rows, for each of their rows a list."""
    numbers = []
    for (rows, _), _ in calls:
        numbers += [[number_in(tokenizer.decode(ids), split) for ids, _ in row] for row in rows]
    return numbers


@pytest.mark.parametrize("packing", [True, False])
def test_every_number_of_sft(sft, scripts, tiny_lm, tmp_path, monkeypatch, capsys, packing):
    """Metrics of each update, the table before and after, the samples, and the weights in model/."""
    data, train, test = three_splits(tmp_path / "data", posts_of)
    model, tokenizer = language_model(tiny_lm())
    all_train = [document_of(tokenizer, row, 96) for row in train[:11]]
    all_test = [document_of(tokenizer, row, 96) for row in test]
    assert len(all_train[4][0]) == 96 and all_train[4][0][-1] != tokenizer.eos_token_id
    num_rows = filled_rows(all_train, 96) if packing else 11
    assert num_rows < 8 or not packing
    calls = spy(monkeypatch, scripts["sft"], "collate_rows")
    _, folder, metrics = sft(
        dataset_name=data,
        packing=packing,
        max_length=96,
        num_train_rows=11,
        num_eval_rows=7,
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
        assert row["perf/tokens_per_second"] * row["perf/seconds"] == pytest.approx(count)
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
    assert [row["prompt"] for row in samples] == [test[i]["prompt"] for i in held_out[:2]]
    assert [row["update"] for row in samples] == [updates] * 2


def test_held_out_documents_are_drawn_at_random(sft, scripts, tiny_lm, tmp_path, monkeypatch):
    """Another seed draws others, and another order of the training rows. Validation rows are not used."""
    data, _, _ = three_splits(tmp_path / "data", texts_of)
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm())
    held_out, orders = [], []
    for seed in (1, 2, 3):
        with monkeypatch.context() as patch:
            calls = spy(patch, scripts["sft"], "collate_rows")
            sft(
                f"run{seed}",
                dataset_name=data,
                seed=seed,
                packing=False,
                num_train_rows=8,
                num_train_epochs=2.0,
                num_samples=0,
            )
        held_out.append(tuple(sum(collated(calls[:1], "test", tokenizer), [])))
        order = sum(collated(calls[1:5], "train", tokenizer), [])
        assert sorted(order[:8]) == sorted(order[8:]) == list(range(8))
        assert order[:8] != order[8:]  # another order in each epoch
        orders.append(tuple(order))
    assert len({frozenset(numbers) for numbers in held_out} | {frozenset(range(4))}) >= 3
    assert all(sorted(numbers) != [0, 1, 2, 3] for numbers in held_out)
    assert len(set(orders)) == len(set(held_out)) == 3


@pytest.mark.parametrize("script", ["sft", "reward_model"])
def test_which_split_is_held_out(scripts, tmp_path, script):
    """Test, else validation, else the last tenth of train, which is not trained on then."""
    load_splits = scripts[script].load_splits
    train, test, validation = texts_of("train", 25), texts_of("test", 3), texts_of("validation", 2)
    cases = [
        (dict(test=test, validation=validation), train, test),
        (dict(validation=validation), train, validation),
        ({}, train[:23], train[23:]),
    ]
    for i, (held_out, expected_train, expected_held_out) in enumerate(cases):
        data = write_rows(tmp_path / f"data{i}", train=train, **held_out)
        ours, others = load_splits(data)
        assert list(ours["text"]) == [row["text"] for row in expected_train]
        assert list(others["text"]) == [row["text"] for row in expected_held_out]
    few = write_rows(tmp_path / "few", train=train[:3])
    ours, others = load_splits(few)
    assert (len(ours), len(others)) == (2, 1)


def test_samples_are_of_the_trained_model_and_of_held_out_prompts(sft, tmp_path):
    """It learned to end every post with the same words. They follow prompts that it never saw."""
    train, test = posts_of("train", 12), posts_of("test", 6)
    for row in train:
        row["completion"] = " all is well."
    data = write_rows(tmp_path / "data", train=train, test=test)
    flags = dict(dataset_name=data, packing=False, num_train_rows=None, num_train_epochs=14.0)
    _, folder, _ = sft(**flags, num_eval_rows=6, num_samples=5, learning_rate=1e-2)
    samples = rows_of(folder, "samples.jsonl")
    prompts = [row["prompt"] for row in samples]
    assert len(set(prompts)) == len(prompts) == 5
    assert set(prompts) <= {row["prompt"] for row in test}
    assert all(row["completion"].endswith(f" is well.{EOS}") for row in samples), samples


def test_samples_are_drawn_from_all_tokens(scripts, tiny_lm):
    """Not the likeliest ones, nor only from the 50 likeliest (transformers' default). 40 tokens, or EOS."""
    model, tokenizer = language_model(tiny_lm())
    model.lm_head.weight.data *= 0.3  # flatter
    ids = tokenizer("The film was").input_ids
    documents = [(ids + [7], [-100] * len(ids) + [7])] * 6
    torch.manual_seed(0)
    calls = []
    generate = model.generate
    model.generate = lambda *args, **kwargs: calls.append(generate(*args, **kwargs)[0]) or calls[-1][None]
    samples = scripts["sft"].write_samples(model, tokenizer, documents, tokenizer.eos_token_id)
    assert len({row["completion"] for row in samples}) == 6
    is_rare = []
    for output, row in zip(calls, samples, strict=True):
        written = output[len(ids) :].tolist()
        assert row == dict(prompt="The film was", completion=tokenizer.decode(written))
        assert len(written) == 40 or written[-1] == tokenizer.eos_token_id
        with torch.no_grad():
            logits = model(output[None]).logits[0, len(ids) - 1 : -1]
        ranks = (logits > logits.gather(1, output[len(ids) :, None])).sum(1)
        is_rare += (ranks >= 50).tolist()
    assert 0.1 < sum(is_rare) / len(is_rare) < 0.99


def test_no_samples(sft):
    """--num-samples 0 writes none."""
    _, folder, _ = sft(num_samples=0)
    assert not (folder / "samples.jsonl").exists()


def test_dropout_is_on_in_training_only(sft, tmp_path):
    """Random weights keep the dropout of their config. Both evaluations, and model/, have none."""
    data, train, test = three_splits(tmp_path / "data", posts_of)
    shape = f"{TINY_GPT2} resid_pdrop=0.5 embd_pdrop=0.5"
    flags = dict(dataset_name=data, num_eval_rows=9, learning_rate=0.0, num_samples=0, train_tokenizer=300)
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
    _, folder, _ = sft(lora_r=2, lora_alpha=6, packing=False, num_train_rows=8)
    [checkpoint] = (folder / "checkpoints").iterdir()
    trained = torch.load(checkpoint / "state.pt", weights_only=True)["parameters"]
    before, after = weights(tiny_lm()), weights(folder / "model")
    names = [name for name in before if "c_attn.weight" in name]
    for name in names:
        [A] = [x for key, x in trained.items() if name.removesuffix("weight") + "lora_A" in key]
        [B] = [x for key, x in trained.items() if name.removesuffix("weight") + "lora_B" in key]
        assert B.abs().max() > 1e-3
        torch.testing.assert_close(after[name], before[name] + 3 * (B @ A).T)  # GPT-2 has W transposed
    assert len(names) == 2


# ---- sft.py: documents -------------------------------------------------------------------------------------


def documents_of(scripts, tokenizer, columns, **flags):
    """sft.load_documents of a data set with these columns."""
    script = scripts["sft"]
    return script.load_documents(Dataset.from_dict(columns), tokenizer, script.Args(**flags))


def with_bos(tokenizer):
    """The tokenizer, with a BOS in front of each text, as Llama's does it."""
    tokenizer.add_special_tokens(dict(bos_token="<s>"))
    mark = [("<s>", tokenizer.bos_token_id)]
    template = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=mark)
    tokenizer.backend_tokenizer.post_processor = template
    return tokenizer


def test_damaged_rows_are_skipped_and_counted(scripts, capsys):
    """Each completion stays with its prompt. An empty prompt is a prompt, an empty completion is not."""
    tokenizer = byte_level_tokenizer()
    prompts = ["one", None, "two", "", "three", "four"]
    completions = [" a", " b", None, " c", "", " d"]
    documents = documents_of(scripts, tokenizer, dict(prompt=prompts, completion=completions))
    assert [tokenizer.decode(ids) for ids, _ in documents] == [f"one a{EOS}", f" c{EOS}", f"four d{EOS}"]
    learned = [tokenizer.decode([label for label in labels if label != -100]) for _, labels in documents]
    assert learned == [f" a{EOS}", f" c{EOS}", f" d{EOS}"]
    assert "skipped 3 of 6 rows: no prompt or no completion" in capsys.readouterr().out
    documents = documents_of(scripts, tokenizer, dict(text=["one", None, "", "two", "three"]))
    assert [tokenizer.decode(ids) for ids, _ in documents] == [text + EOS for text in ("one", "two", "three")]
    assert "skipped 2 of 5 rows: no text" in capsys.readouterr().out


def test_the_column_text_comes_first(scripts):
    """A data set that has text, and prompt and completion too, is one of texts."""
    tokenizer = byte_level_tokenizer()
    columns = dict(prompt=["one"], completion=[" two"], text=["three"])
    [(ids, labels)] = documents_of(scripts, tokenizer, columns)
    assert tokenizer.decode(ids) == f"three{EOS}" and labels == ids


def test_bos_comes_once_and_in_front(scripts):
    """In texts, in prompts and in dialogs; never in the middle, also if a text brings its own."""
    tokenizer = with_bos(byte_level_tokenizer())
    columns = dict(text=["one", "<s>two"])
    texts = [tokenizer.decode(ids) for ids, _ in documents_of(scripts, tokenizer, columns)]
    assert texts == [f"<s>one{EOS}", f"<s>two{EOS}"]
    columns = dict(prompt=["one", ""], completion=[" a", " b"])
    documents = documents_of(scripts, tokenizer, columns)
    assert [tokenizer.decode(ids) for ids, _ in documents] == [f"<s>one a{EOS}", f"<s> b{EOS}"]
    assert [labels.count(-100) for _, labels in documents] == [1 + len(tokenizer.encode("one")) - 1, 1]
    for end, text in ((" <EOU>", f"<s> Hi. <EOU> Yes. <EOU>{EOS}"), ("eos", f"<s> Hi.{EOS} Yes.{EOS}")):
        columns = dict(dialog=[["Hi.", "Yes."]])
        [(ids, _)] = documents_of(scripts, tokenizer, columns, utterance_end=end)
        assert tokenizer.decode(ids) == text


def test_documents_that_cannot_be_learned_are_skipped(scripts, capsys):
    """A prompt of max_length tokens or more leaves nothing to learn; one less leaves one token."""
    tokenizer = byte_level_tokenizer()
    words = ["sun" + " sun" * n for n in (3, 4, 5, 8)]
    lengths = [len(tokenizer.encode(text)) for text in words]
    max_length = lengths[1] + 1
    documents = documents_of(
        scripts, tokenizer, dict(prompt=words, completion=[" rain rain"] * 4), max_length=max_length
    )
    assert [len(ids) for ids, _ in documents] == [max_length] * 2
    assert [len(ids) - labels.count(-100) for ids, labels in documents] == [1 + lengths[1] - lengths[0], 1]
    assert "skipped 2 of 4 documents: no text to learn from" in capsys.readouterr().out


def test_a_first_token_alone_is_nothing_to_learn(scripts, capsys):
    """Nothing predicts it. One token of a completion without a prompt is too little, two are enough."""
    script, tokenizer = scripts["sft"], byte_level_tokenizer()
    columns = dict(prompt=["", "a", ""], completion=["b", "c", "d"])
    documents = documents_of(scripts, tokenizer, columns, max_length=2)
    assert [tokenizer.decode(ids) for ids, _ in documents] == [f"b{EOS}", "ac", f"d{EOS}"]
    with pytest.raises(script.UserError, match="no text to learn from within --max-length 1 tokens"):
        documents_of(scripts, tokenizer, columns, max_length=1)
    columns = dict(prompt=["", "a"], completion=["b", "c"])
    with pytest.raises(script.UserError, match="no text to learn from"):
        documents_of(scripts, tokenizer, columns, max_length=1, completion_only_loss=False)


def test_rows_are_filled_in_order(scripts):
    """A row may be exactly full. A document that does not fit begins the next row, whatever follows."""
    documents = []
    for i, length in enumerate((3, 9, 4, 7, 12, 1, 11, 2, 2)):
        documents.append(([i] * length, [i] * length))
    rows = scripts["sft"].pack(documents, 12, packing=True)
    numbers = [[ids[0] for ids, _ in row] for row in rows]
    assert numbers == [[0, 1], [2, 3], [4], [5, 6], [7, 8]]
    assert [document for row in rows for document in row] == documents
    alone = scripts["sft"].pack(documents, 12, packing=False)
    assert alone == [[document] for document in documents]


def test_rows_of_documents_by_hand(scripts):
    """Positions begin at 0 in each document, whose first token has no label. Pads have none either."""
    rows = [
        [([5, 0], [5, 0])],
        [([6, 7, 0], [-100, 7, 0]), ([0, 8], [0, 8]), ([9, 9, 9, 0], [-100, -100, 9, 0])],
        [([4], [4]), ([3, 2, 0], [3, 2, 0])],
    ]
    batch = scripts["sft"].collate_rows(rows, "cpu")
    no = -100
    assert batch["ids"].tolist() == [
        [5, 0, 0, 0, 0, 0, 0, 0, 0],
        [6, 7, 0, 0, 8, 9, 9, 9, 0],
        [4, 3, 2, 0, 0, 0, 0, 0, 0],
    ]
    assert batch["labels"].tolist() == [
        [no, 0, no, no, no, no, no, no, no],
        [no, 7, 0, no, 8, no, no, 9, 0],
        [no, no, 2, 0, no, no, no, no, no],
    ]
    assert batch["positions"].tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 7, 8],
        [0, 1, 2, 0, 1, 0, 1, 2, 3],
        [0, 0, 1, 2, 4, 5, 6, 7, 8],
    ]


# ---- sft.py: models from a config --------------------------------------------------------------------------


def test_a_new_tokenizer_learns_the_training_rows_only(sft, tmp_path):
    """Words of training prompts and of completions become tokens. Those of held-out rows do not."""
    train = [dict(prompt="zebra" * 3, completion=" quokka" * 3)] * 6
    test = [dict(prompt="giraffe" * 3, completion=" ocelot" * 3)] * 40
    data = write_rows(tmp_path / "data", train=train, test=test, validation=test)
    _, folder, _ = sft(dataset_name=data, from_config=TINY_GPT2, train_tokenizer=268)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert len(tokenizer) <= 268
    lengths = {word: len(tokenizer.encode(word)) for word in ("zebra", " quokka", "giraffe", " ocelot")}
    assert lengths["zebra"] < 5 and lengths[" quokka"] < 7
    assert lengths["giraffe"] == 7 and lengths[" ocelot"] == 7


def test_a_new_tokenizer_learns_from_dialogs(scripts):
    """All utterances, as they are tokenized: each after a space."""
    script = scripts["sft"]
    rows = Dataset.from_dict(dict(dialog=[["zebra zebra", "quokka"], None, ["quokka", None, "zebra"]]))
    assert script.all_texts(rows) == [" zebra zebra quokka", " ", " quokka zebra"]
    rows = Dataset.from_dict(dict(prompt=["a", None], completion=["b", "c"], text=[None, "d"]))
    assert sorted(script.all_texts(rows)) == ["a", "b", "c", "d"]


def turns(*contents):
    """A list of messages: a user's, the assistant's, a user's, ..."""
    return [dict(role=("user", "assistant")[i % 2], content=text) for i, text in enumerate(contents)]


def test_a_new_tokenizer_learns_from_chats(scripts):
    """From all messages of all roles, in each of three columns; not from what is no chat or has no text."""
    script = scripts["sft"]

    def texts(**columns):
        return sorted(script.all_texts(Dataset.from_dict(columns)))

    chats = [turns("a", "b", "c"), None, turns("d", None), [], turns("", "e")]
    assert texts(messages=chats) == ["a", "b", "c", "e"]
    prompts = [turns("f", "g", "h"), None, turns("i")]
    completions = [turns("j"), turns("k", "l"), turns("m")]
    assert texts(prompt=prompts, completion=completions) == list("fghijklm")
    assert texts(prompt=prompts, answer=completions) == list("fghi")
    assert texts(completion=completions) == list("jklm")
    assert texts(prompt=["n", "o", ""], completion=completions, messages=prompts) == ["", *"fghijklmno"]


def test_a_new_tokenizer_learns_all_training_rows(sft, tmp_path):
    """Also those that --num-train-rows leaves out: it limits what the model learns."""
    train = [dict(text="zebra" * 3)] * 4 + [dict(text="quokka" * 3)] * 4
    data = write_rows(tmp_path / "data", train=train, test=train[:2])
    flags = dict(num_train_rows=2, num_samples=0)
    _, folder, _ = sft(dataset_name=data, from_config=TINY_GPT2, train_tokenizer=266, **flags)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert len(tokenizer.encode("zebra")) < 5 and len(tokenizer.encode("quokka")) < 6


def test_a_tokenizer_that_would_be_replaced_is_refused(scripts, tiny_lm):
    """transformers loads a Qwen2 model with its own way to split texts. One text of ten must show it."""
    script = scripts["sft"]
    tokenizer = byte_level_tokenizer(["1234567 sun"] * 9)  # 1234567 is one token; Qwen2 splits it into digits
    qwen2, gpt2 = (AutoModelForCausalLM.from_pretrained(tiny_lm(arch)) for arch in ("qwen2", "gpt2"))

    def check(model, *texts):
        script.check_tokenizer_survives(tokenizer, model, Dataset.from_dict(dict(text=texts)))

    for texts in (["1234567"], ["sun"] * 9 + ["1234567"]):
        with pytest.raises(script.UserError, match="with a qwen2 model, transformers would load"):
            check(qwen2, *texts)
        check(gpt2, *texts)
    check(qwen2, *["sun"] * 10, "1234567")


@pytest.mark.parametrize("script", ["sft", "reward_model"])
def test_from_config_of_a_folder(scripts, small, tiny_lm, script):
    """The shape of the model in the folder, changed by name=value. The random weights follow the seed."""
    module, lm = scripts[script], tiny_lm()
    folders = []
    for name, seed in (("one", 1), ("again", 1), ("other", 2)):
        flags = dict(from_config=f"{lm} n_layer=1", tokenizer_name_or_path=lm, label_names="bad,good")
        if script == "sft":
            flags = dict(from_config=f"{lm} n_layer=1")
        args = small(script, name, **flags, seed=seed, learning_rate=0.0, num_train_epochs=0.1)
        model, folder = module.train(args)
        folders.append(folder / "model")
    assert (model.config.n_layer, model.config.n_embd) == (1, 32)
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    config = json.loads((folders[0] / "config.json").read_text())
    assert {name: config[name] for name in ids_of(tokenizer)} == ids_of(tokenizer)
    one, again, other = (weights(folder) for folder in folders)
    pretrained = weights(lm)
    name = "transformer.h.0.attn.c_attn.weight"
    assert same(one, again)
    assert not torch.equal(one[name], other[name]) and not torch.equal(one[name], pretrained[name])


# ---- reward_model.py: labels -------------------------------------------------------------------------------


def training_texts(calls, tokenizer):
    """The decoded texts of each row in calls of collate_texts."""
    rows = []
    for (batch, _), _ in calls:
        rows += [[tokenizer.decode(ids) for ids in row.texts] for row in batch]
    return rows


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
    _, folder, metrics = reward(
        dataset_name=data,
        min_prefix_length=min_prefix_length,
        max_length=18,
        num_eval_rows=7,
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
    assert len(metrics) == 3 and len(calls) == 3 * 3 + 1
    order = []
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-3)
    for update, row in enumerate(metrics, start=1):
        losses, right, lengths = [], 0, []
        for (batch, _), _ in calls[3 * update - 3 : 3 * update]:
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
    held_out = [number_in(text, "test") for [text] in training_texts(calls[-1:], tokenizer)]
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
    assert f"7 held-out rows, accuracy {accuracy:.4f}" in capsys.readouterr().out
    assert AutoTokenizer.from_pretrained(folder / "model").model_max_length == 18


def test_confusion_by_hand(scripts):
    """A row for each label, a column for each prediction, also of a label that nobody predicts."""
    script = scripts["reward_model"]
    labels = [0, 0, 0, 0, 1, 1, 2, 2, 2]
    predicted = [0, 1, 1, 2, 1, 1, 0, 0, 1]
    logits = F.one_hot(torch.tensor(predicted), 4).float()[:, None] - 2
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
        args = script.Args(label_names=names)
        return script.find_classes(Dataset.from_dict(dict(label=labels)), args)

    for labels, names, expected, order in (
        (words, "sad,mixed,glad", ["sad", "mixed", "glad"], [0, 2, 1, 2]),
        (words, None, ["glad", "mixed", "sad"], [2, 0, 1, 0]),
        (numbers, "sad,mixed,glad", ["sad", "mixed", "glad"], [1, 0, 2, 0]),
        ([7, 3, 5, 3], None, ["3", "5", "7"], [2, 0, 1, 0]),
    ):
        found, class_of = classes(labels, names)
        assert found == expected and [class_of[label] for label in labels] == order


def test_names_of_a_data_set(scripts):
    """A column of class labels has names, also of classes that no row has. --label-names replaces them."""
    script = scripts["reward_model"]
    feature = ClassLabel(names=["sad", "mixed", "glad"])
    rows = Dataset.from_dict(dict(label=[2, 0, 2]), features=Features(label=feature))
    for names, expected in ((None, ["sad", "mixed", "glad"]), ("c,b,a", ["c", "b", "a"])):
        found, class_of = script.find_classes(rows, script.Args(label_names=names))
        assert found == expected
        assert [class_of[number] for number in range(3)] == [class_of[name] for name in expected] == [0, 1, 2]


COLUMNS = {  # of a training split, of a held-out split -> those that decide what is learned
    "all": ("dialog act text label prompt responses chosen rejected", "same", "dialog act"),
    "no acts": ("dialog text label prompt responses chosen rejected", "same", "text label"),
    "prompts with labels": ("prompt text label chosen rejected", "same", "text label"),
    "both kinds of preferences": ("prompt chosen rejected responses", "same", "prompt responses"),
    "no prompt": ("responses chosen rejected", "same", "chosen rejected"),
    "no labels in train": ("text chosen rejected", "text label chosen rejected", "chosen rejected"),
    "no labels in test": ("text label chosen rejected", "text chosen rejected", "chosen rejected"),
    "nothing in common": ("text label", "chosen rejected", None),
    "half of each": ("text dialog prompt chosen", "same", None),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_which_columns_decide(scripts, name):
    """Those that both splits have; acts before labels, labels before rankings, rankings before pairs."""
    script = scripts["reward_model"]
    train, held_out, expected = COLUMNS[name]
    held_out = train if held_out == "same" else held_out
    splits = [Dataset.from_dict({column: ["a"] for column in part.split()}) for part in (train, held_out)]
    if expected is None:
        with pytest.raises(script.UserError, match="needs the columns text and label, or dialog and act"):
            script.find_columns(*splits, script.Args())
    else:
        assert script.find_columns(*splits, script.Args()) == tuple(expected.split())


def test_a_text_without_tokens_takes_its_label_with_it(scripts, capsys):
    """As do rows without a text, wherever they are."""
    script, tokenizer = scripts["reward_model"], byte_level_tokenizer()
    tokenizer.backend_tokenizer.normalizer = tokenizers.normalizers.Strip()
    texts = ["", "one", " ", "two", None, "three", "four"]
    rows = Dataset.from_dict(dict(text=texts, label=["d", "a", "b", "c", "a", "b", "d"]))
    class_of = dict(a=0, b=1, c=2, d=3)
    loaded = script.load_labeled_rows(rows, class_of, tokenizer, script.Args())
    found = [(tokenizer.decode(row.texts[0]), row.label) for row in loaded]
    assert found == [("one", 0), ("two", 2), ("three", 1), ("four", 3)]
    assert "skipped 3 of 7 rows: no text" in capsys.readouterr().out


def test_answers_that_have_no_act_are_counted(scripts, capsys):
    """Of dialogs that can be used. An act that is a float is a number. Each answer keeps its own act."""
    script = scripts["reward_model"]
    dialogs = [["a", "b", "c"], ["d", " "], ["e", "f", "g"], ["h", "i"], ["j", "k", "l", "m"]]
    acts = [None, [1.0, 2.0], [4.0, None, 3.0], [1.0, 2.0, 3.0], [1.0, 2.0, 0.5, 4.0]]
    rows = script.load_answers(Dataset.from_dict(dict(dialog=dialogs, act=acts)), script.Args())
    assert list(zip(rows["text"], rows["label"])) == [("f g", 2), ("j k", 1), ("l m", 3)]
    out = capsys.readouterr().out
    assert "skipped 1 of 5 dialogs" in out and "skipped 5 of 8 answers: no act" in out


def test_a_long_labeled_text_keeps_its_beginning(scripts, small, world, tmp_path):
    """And a row without text takes its label with it."""
    rows = labeled_of("train", 6)
    rows[1]["text"], rows[4]["text"] = None, ""
    data = write_rows(tmp_path / "data", train=rows, test=labeled_of("test", 4))
    tokenizer = AutoTokenizer.from_pretrained(world.classifier())
    args = small("reward_model", dataset_name=data, max_length=9, num_eval_rows=3)
    loaded = scripts["reward_model"].load_data(args, tokenizer)
    kept = [row for row in rows if row["text"]]
    assert [(row.texts, row.label) for row in loaded["train"]] == [
        ([tokenizer(row["text"]).input_ids[:9]], row["label"]) for row in kept
    ]
    assert len(loaded["held_out"]) == 3 and loaded["references"] == []
    assert loaded["label_names"] == ["0", "1"]


# ---- reward_model.py: which rows ---------------------------------------------------------------------------


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
        flags = dict(dataset_name=data, seed=seed, num_eval_rows=6, max_length=200)
        numbers, held_out = loaded_numbers(scripts, small, tokenizer, **flags)
        assert numbers == list(range(30))
        assert len(set(held_out)) == len(held_out) == 6 and set(held_out) != set(range(6))
        drawn.append(held_out)
    assert set(drawn[0]) != set(drawn[1])
    flags = dict(dataset_name=data, num_eval_rows=99, max_length=200)
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
            numbers, held_out = loaded_numbers(scripts, small, tokenizer, **flags, num_eval_rows=8)
            assert sorted(held_out) == list(range(8))  # shards are of training rows only
            assert len(numbers) == 30 // parts
            assert 2 <= sum(number >= 15 for number in numbers) <= len(numbers) - 2
            assert sorted(numbers) not in (
                list(range(part, 30, parts)),
                list(range(part * 30 // parts, (part + 1) * 30 // parts)),
            )
            shards += numbers
        assert sorted(shards) == list(range(30))


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
    args = small("reward_model", dataset_name=data, num_eval_rows=4, label_names=",".join(ACTS))
    loaded = scripts["reward_model"].load_data(args, tokenizer)
    assert len(loaded["train"]) == 14 and len(loaded["held_out"]) == 4
    for name, split in (("train", "train"), ("held_out", "test")):
        for row in loaded[name]:
            text = tokenizer.decode(row.texts[0])
            number = number_in(text, split)
            assert f" {split} text {number + 1}:" in text
            i, k = divmod(number, 3)
            assert row.label == ((i % 2, 2 + i % 2)[k])


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


# ---- reward_model.py: preferences --------------------------------------------------------------------------


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
    _, folder, metrics = reward(
        model_name_or_path=tiny_preference_model(),
        dataset_name=data,
        max_length=max_length,
        num_eval_rows=7,
        num_train_epochs=1.4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
        learning_rate=5e-3,
        lr_scheduler_type="linear",
        warmup_ratio=0.4,
        adam_eps=1e-3,
        max_grad_norm=0.5,
    )
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
            margins.append((scores[0] - scores[-1]).item())
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
    numbers = [number_in(responses[0], "test") for responses in training_texts(calls[9:10], tokenizer)]
    assert len(set(numbers)) == len(numbers) == 7
    references = training_texts(calls[10:], tokenizer)
    assert all(len(texts) == 1 for texts in references)
    assert sorted(number_in(text, "train") for [text] in references) == list(range(13))
    with torch.no_grad():
        differences = sum([pair_losses(scores_of(test[i]), 0.0)[1] for i in numbers], [])
        best = [scores_of(row)[0].item() for row in train]
    evaluation = evaluation_of(folder)
    assert set(evaluation) == {"accuracy", "margin", "calibration", "n", "reward_offset"}
    assert evaluation["n"] == 7
    assert evaluation["accuracy"] == pytest.approx(sum(x > 0 for x in differences) / len(differences))
    assert evaluation["margin"] == pytest.approx(sum(differences) / len(differences), **close)
    assert evaluation["calibration"] == calibration_by_hand(differences)
    assert evaluation["reward_offset"] == pytest.approx(sum(best) / 13, **close)
    config = json.loads((folder / "model/config.json").read_text())
    assert config["reward_offset"] == evaluation["reward_offset"]
    lines = capsys.readouterr().out
    assert f"7 held-out rows, accuracy {evaluation['accuracy']:.4f}" in lines
    offset = f"{evaluation['reward_offset']:.3f}"
    assert f"mean score of 13 references, saved as reward_offset: {offset}" in lines


def test_evaluation_of_rankings_by_hand(scripts):
    """All pairs of all rows, none with a response that a row does not have. A tie is not in order."""
    script = scripts["reward_model"]
    rows = [script.Row([[1]] * 3), script.Row([[1]] * 2), script.Row([[1]] * 4)]
    scores = torch.tensor([[3.0, 1.0, 2.0, 0.0], [5.0, 5.0, 0.0, 0.0], [-1.0, 1.5, -4.0, -1.75]])
    differences = [2.0, 1.0, -1.0, 0.0, -2.5, 3.0, 0.75, 5.5, 3.25, -2.25]
    metrics, table = script.evaluate_preferences(scores[:, :, None], rows)
    assert metrics["accuracy"] == pytest.approx(6 / 10)
    assert metrics["margin"] == pytest.approx(sum(differences) / 10)
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


def test_a_tie_is_not_in_order_in_training_either(scripts):
    """Equal scores in one of three pairs, and in the only pair."""
    scores = torch.tensor([[2.0, 2.0, 0.0], [1.0, 1.0, 0.0]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    metrics = scripts["reward_model"].preference_metrics(scores, mask, torch.zeros(2))
    assert metrics["accuracy"].tolist() == pytest.approx([2 / 3, 0.0])


def test_evaluation_of_few_pairs(scripts):
    """Three pairs are a table of three."""
    script = scripts["reward_model"]
    scores = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.5, 0.0]])
    _, table = script.evaluate_preferences(scores[:, :, None], [script.Row([[1], [2]])] * 3)
    assert [row["pairs"] for row in table] == [1, 1, 1]
    assert [row["accuracy"] for row in table] == [1.0, 0.0, 1.0]


def test_scores_stay_with_their_rows(scripts, small, tiny_preference_model):
    """40 rankings of unequal lengths, scored by length in passes of 32 rows: as each text alone."""
    script = scripts["reward_model"]
    model, _ = classifier(tiny_preference_model())
    rows = []
    for i in range(40):
        texts = [[3 + (7 * i + k) % 900] * (1 + (11 * i + 5 * k) % 17) for k in range(2 + i % 3)]
        rows.append(script.Row(texts))
    accelerator = script.start_accelerator(small("reward_model"))
    device = accelerator.device
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=False)
    scores = script.score_rows(script.Classifier(model.to(device)), rows, accelerator, autocast)
    assert scores.shape == (40, 4, 1)
    model.to("cpu")
    for row, ours in zip(rows, scores[:, :, 0].tolist(), strict=True):
        with torch.no_grad():
            alone = [logits_alone(model, ids).item() for ids in row.texts]
        assert ours == pytest.approx(alone + [0.0] * (4 - len(alone)), abs=1e-4)


def test_scores_have_no_dropout_but_training_has(reward, tiny_lm, tmp_path):
    """Random weights keep the dropout of their config. The evaluation, the offset and model/ have none."""
    data, train, test = three_splits(tmp_path / "data", pairs_of)
    _, folder, [metrics] = reward(
        from_config=f"{TINY_GPT2} resid_pdrop=0.5 embd_pdrop=0.5",
        tokenizer_name_or_path=tiny_lm(),
        dataset_name=data,
        max_length=100,
        num_eval_rows=9,
        per_device_train_batch_size=13,
        learning_rate=0.0,
    )
    model, tokenizer = classifier(folder / "model")

    def differences(rows):
        """Chosen minus rejected score of each row, and the chosen scores."""
        chosen, rejected = [], []
        for row in rows:
            texts = response_ids(tokenizer, row["prompt"], [row["chosen"], row["rejected"]], 100)
            with torch.no_grad():
                pair = [logits_alone(model, ids).item() for ids in texts]
            chosen.append(pair[0])
            rejected.append(pair[1])
        return [a - b for a, b in zip(chosen, rejected)], chosen

    evaluation = evaluation_of(folder)
    assert evaluation["margin"] == pytest.approx(sum(differences(test)[0]) / 9, **close)
    in_training, chosen = differences(train)
    assert evaluation["reward_offset"] == pytest.approx(sum(chosen) / 13, **close)
    assert abs(metrics["margin"] - sum(in_training) / 13) > 1e-3


def test_references_are_drawn_from_the_training_split(scripts, small, world, tmp_path):
    """1,000 completions of --center-dataset-name at random, with EOS, without damaged and test rows."""
    script = scripts["reward_model"]
    posts = [dict(prompt=f"train text {i}:", completion=f" a{i}") for i in range(1300)]
    posts[5]["completion"], posts[6]["prompt"] = "", None
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
        assert len(set(numbers)) == len(numbers) == 1000 and not {5, 6} & set(numbers)
        assert 180 < sum(number >= 1050 for number in numbers) < 210  # 250 of 1,298
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


def test_margins_stay_with_their_pairs(scripts, world, capsys):
    """Rows that are skipped take their margins with them. Rankings and pairs without a column have 0."""
    script = scripts["reward_model"]
    tokenizer = AutoTokenizer.from_pretrained(world.lm())
    rows = pairs_of("train", 6)
    rows[1]["rejected"], rows[3]["prompt"] = " ", None
    loaded = script.load_preference_rows(Dataset.from_list(rows), tokenizer, script.Args())
    kept = [row for i, row in enumerate(rows) if i not in (1, 3)]
    assert [row.margin for row in loaded] == [row["margin"] for row in kept]
    for row, data_row in zip(loaded, kept, strict=True):
        pair = [data_row["chosen"], data_row["rejected"]]
        assert row.texts == response_ids(tokenizer, data_row["prompt"], pair, 512)
    assert "skipped 2 of 6 rows: fewer than two responses to compare" in capsys.readouterr().out
    rankings = rankings_of("train", 4)
    loaded = script.load_preference_rows(Dataset.from_list(rankings), tokenizer, script.Args())
    assert [len(row.texts) for row in loaded] == [3, 2, 4, 3]
    assert [row.margin for row in loaded] == [0.0] * 4


def test_a_new_head_is_drawn_by_the_seed(reward, tiny_lm, tmp_path):
    """With standard deviation 1 / sqrt(d + 1); the rest is the language model. from_config has one too."""
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
    shape = "gpt2 n_embd=96 n_layer=1 n_head=2 n_positions=512"
    flags = dict(from_config=shape, tokenizer_name_or_path=tiny_lm(), dataset_name=data, learning_rate=0.0)
    _, folder, _ = reward("new", **flags, num_train_epochs=0.1)
    assert weights(folder / "model")["score.weight"].std().item() == pytest.approx(97**-0.5, rel=0.3)


def test_the_pipeline_finds_the_pad(reward, tiny_lm, tmp_path):
    """config.json names the tokenizer's pad, also if the language model's config named another or none."""
    lm = tmp_path / "lm"
    model, tokenizer = language_model(tiny_lm("gpt2", "eos"))
    model.config.pad_token_id = None
    model.save_pretrained(lm)
    tokenizer.save_pretrained(lm)
    _, folder, _ = reward(model_name_or_path=str(lm), num_train_epochs=0.1, label_names="bad,good")
    config = transformers.AutoConfig.from_pretrained(folder / "model")
    assert config.pad_token_id == tokenizer.eos_token_id
    assert config.id2label == {0: "bad", 1: "good"} and config.num_labels == 2


@pytest.mark.parametrize("kind", ["cls", "no eos"])
def test_texts_for_an_encoder(scripts, kind):
    """With [CLS], or without EOS: prompt and response are one text, with the marks of the tokenizer."""
    tokenizer = byte_level_tokenizer()
    sep, cls = 300, 301
    if kind == "cls":
        tokenizer.cls_token, tokenizer.sep_token = tokenizer.convert_ids_to_tokens([cls, sep])
    else:
        tokenizer.eos_token = None
    marks = [(tokenizer.convert_ids_to_tokens(cls), cls), (tokenizer.convert_ids_to_tokens(sep), sep)]
    template = f"{marks[0][0]} $A {marks[1][0]}"
    processor = tokenizers.processors.TemplateProcessing(template, special_tokens=marks)
    text = byte_level_tokenizer()("A film, a good one").input_ids
    tokenizer.backend_tokenizer.post_processor = processor
    ids_for = scripts["reward_model"].preference_ids
    assert ids_for(tokenizer, ["A film,"], [" a good one"], 64) == [[cls, *text, sep]]
    assert ids_for(tokenizer, ["A film,"], [" a good one"], 5) == [[cls, *text[-3:], sep]]


def test_lora_trains_the_whole_head_of_a_classifier(scripts, tiny_classifier):
    """The head of DistilBERT has two layers, and both are trained without an adapter."""
    script = scripts["reward_model"]
    folder = tiny_classifier()
    flags = dict(lora_r=2, lora_target_modules="q_lin", max_length=32)
    args = script.Args(model_name_or_path=folder, **flags)
    model, _ = script.build_classifier(args, AutoTokenizer.from_pretrained(folder), ["negative", "positive"])
    trained = {part for name in script.trainable(model) for part in name.split(".")}
    assert {"pre_classifier", "classifier", "lora_A"} <= trained


def layers_with_adapter(model):
    """The names of the layers that LoRA trains, without what is the same in all of them."""
    names = [name for name, p in model.named_parameters() if "lora_A" in name and p.requires_grad]
    return {name.split(".lora_A")[0].split(".")[-1] for name in names}


def test_lora_on_several_layers(scripts, tiny_lm, tiny_classifier):
    """Each name of a list, or all linear layers of the transformer, and never a head."""
    sft, reward = scripts["sft"], scripts["reward_model"]
    cases = {
        "c_attn": {"c_attn"},
        "c_attn,c_fc": {"c_attn", "c_fc"},
        "all-linear": {"c_attn", "c_proj", "c_fc"},
    }
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm())
    for layers, expected in cases.items():
        flags = dict(lora_r=2, lora_target_modules=layers, max_length=32)
        for name in (None, ["bad", "good"]):
            args = reward.Args(model_name_or_path=tiny_lm(), **flags)
            model, _ = reward.build_classifier(args, tokenizer, name)
            assert layers_with_adapter(model) == expected
        model = sft.build_language_model(sft.Args(model_name_or_path=tiny_lm(), **flags), tokenizer)
        assert layers_with_adapter(model) == expected
    args = reward.Args(
        model_name_or_path=tiny_classifier(), lora_r=2, lora_target_modules="all-linear", max_length=32
    )
    model, _ = reward.build_classifier(args, tokenizer, ["bad", "good"])
    assert layers_with_adapter(model) == {"q_lin", "k_lin", "v_lin", "out_lin", "lin1", "lin2"}


def test_what_a_run_prints_first(sft, reward, tiny_lm, tiny_classifier, tiny_pairs, capsys):
    """How much of the model is trained, how many rows there are, what is learned, and the batch."""
    flags = dict(per_device_train_batch_size=2, gradient_accumulation_steps=3, learning_rate=0.0)
    model, folder, metrics = sft("lm", lora_r=2, num_train_rows=8, num_eval_rows=3, num_samples=0, **flags)
    total = sum(x.numel() for x in weights(tiny_lm()).values())
    adapter = 2 * 2 * (32 + 96)  # in two layers, two rows of A and two columns of B
    out = capsys.readouterr().out
    share = f"{adapter / (total + adapter):.2%}"
    assert f"{adapter:,} of {total + adapter:,} parameters are trained ({share})" in out
    rows = round(6 * len(metrics) / metrics[-1]["epoch"])
    batch = f"2 rows per pass x 3 accumulated x 1 processes = 6 rows; {len(metrics)} updates"
    assert f"8 documents in {rows} rows of up to 128 tokens; batch: {batch} of one optimizer step each" in out
    assert f"saved {folder / 'model'}" in out
    for name, lm, data, task in (
        ("new", tiny_lm(), {}, "48 training rows; 2 classes: bad, good; a new head"),
        ("old", tiny_classifier(), {}, "48 training rows; 2 classes: bad, good; the head that was saved"),
        ("pairs", tiny_lm(), dict(dataset_name=tiny_pairs), "48 training rows; preferences; a new head"),
    ):
        _, _, metrics = reward(name, model_name_or_path=lm, label_names="bad,good", **flags, **data)
        out = capsys.readouterr().out
        assert task in out
        assert "2 rows per pass x 3 accumulated x 1 processes = 6 rows; 8 optimizer steps" in out
        assert len(metrics) == 8
