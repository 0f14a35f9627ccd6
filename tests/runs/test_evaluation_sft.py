"""Which rows sft.py trains on and evaluates on, and every number that it reports.

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
from conftest import EOS, byte_level_tokenizer, ids_of
from run_tools import rows_of, same, spy, weights, write_rows
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

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


def three_splits(folder, make, num_train=13):
    """A data set with 9 test and 5 validation rows. -> its path, rows of train, rows of test"""
    train, test = make("train", num_train), make("test", 9)
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
def test_every_number_of_sft(sft, scripts, tiny_lm, tmp_path, monkeypatch, capsys, packing):
    """Metrics of each update, the table before and after, the samples, and the weights in model/."""
    data, train, test = three_splits(tmp_path / "data", posts_of, 11)
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


def test_held_out_documents_are_drawn_at_random(sft, scripts, tiny_lm, tmp_path, monkeypatch):
    """Another seed draws others, and another order of the training rows. Validation rows are not used."""
    data, _, _ = three_splits(tmp_path / "data", texts_of, 8)
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


def test_which_split_is_held_out(scripts, tmp_path):
    """Test, else validation, else every tenth row of train, which is not trained on then."""
    load_splits = scripts["sft"].load_splits
    train, test, validation = texts_of("train", 25), texts_of("test", 3), texts_of("validation", 2)
    cases = [
        (dict(test=test, validation=validation), train, test),
        (dict(validation=validation), train, validation),
        ({}, [row for i, row in enumerate(train) if i % 10], train[::10]),
    ]
    for i, (held_out, expected_train, expected_held_out) in enumerate(cases):
        data = write_rows(tmp_path / f"data{i}", train=train, **held_out)
        ours, others = load_splits(data)
        assert (ours, others) == (expected_train, expected_held_out)
    few = write_rows(tmp_path / "few", train=train[:3])
    ours, others = load_splits(few)
    assert (len(ours), len(others)) == (2, 1)


def test_samples_are_of_the_trained_model_and_of_held_out_prompts(sft, tmp_path):
    """It learned to end every post with the same words. They follow prompts that it never saw."""
    train, test = posts_of("train", 12), posts_of("test", 6)
    for row in train:
        row["completion"] = " all is well."
    data = write_rows(tmp_path / "data", train=train, test=test)
    flags = dict(dataset_name=data, packing=False, num_train_rows=None, num_train_epochs=30.0)
    _, folder, _ = sft(**flags, num_eval_prompts=6, num_samples=5, learning_rate=1e-2)
    samples = rows_of(folder, "samples.jsonl")
    prompts = [row["prompt"] for row in samples]
    assert len(set(prompts)) == len(prompts) == 5
    assert set(prompts) <= {row["prompt"] for row in test}
    assert all(row["completion"].endswith(f" is well.{EOS}") for row in samples), samples


def test_samples_are_drawn_from_all_tokens(scripts, tiny_lm):
    """Not only the 50 likeliest (transformers' default). 40 tokens, or a stop token."""
    model, tokenizer = language_model(tiny_lm())
    model.lm_head.weight.data *= 0.3  # flatter
    stops = [tokenizer.eos_token_id, *range(100, 130)]
    model.generation_config.eos_token_id = stops
    ids = tokenizer("The film was").input_ids
    drawn = []
    multinomial = torch.multinomial

    def recorded(probs, count):
        token = multinomial(probs, count)
        drawn[-1].append((token.item(), (probs > probs[token]).sum().item()))  # token, rank
        return token

    torch.manual_seed(0)
    ranks, lengths = [], []
    for _ in range(6):
        drawn.append([])
        torch.multinomial = recorded
        try:
            [row] = scripts["sft"].write_samples(model, tokenizer, [(ids + [7], [-100] * len(ids) + [7])])
        finally:
            torch.multinomial = multinomial
        tokens = [token for token, _ in drawn[-1]]
        assert row == dict(prompt="The film was", completion=tokenizer.decode(tokens))
        assert not set(tokens[:-1]) & set(stops)
        assert len(tokens) == 40 or tokens[-1] in stops
        lengths.append(len(tokens))
        ranks += [rank for _, rank in drawn[-1]]
    assert len(set(lengths)) > 1
    assert 0.1 < sum(rank >= 50 for rank in ranks) / len(ranks) < 0.99


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
    _, folder, _ = sft(lora_r=2, lora_alpha=6, packing=False, num_train_rows=8)
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


def documents_of(scripts, tokenizer, *examples, **flags):
    """sft.load_documents of these rows of a data set, without the text."""
    script = scripts["sft"]
    documents, _ = script.load_documents(examples, tokenizer, script.Args(**flags))
    return [(list(ids), list(labels)) for ids, labels in documents]


def pairs_of(prompts, completions):
    """Rows with the columns prompt and completion."""
    return [dict(prompt=prompt, completion=completion) for prompt, completion in zip(prompts, completions)]


def with_bos(tokenizer):
    """The tokenizer, with a BOS in front of each text, as Llama's does it."""
    tokenizer.add_special_tokens(dict(bos_token="<s>"))
    mark = [("<s>", tokenizer.bos_token_id)]
    template = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=mark)
    tokenizer.backend_tokenizer.post_processor = template
    return tokenizer


def test_damaged_rows_are_skipped(scripts):
    """Each completion stays with its prompt. Rows without a text, a prompt or a completion are skipped. A
    prompt may be empty."""
    tokenizer = byte_level_tokenizer()
    prompts = ["one", None, "two", "", "three", "four"]
    completions = [" a", " b", None, " c", "", " d"]
    documents = documents_of(scripts, tokenizer, *pairs_of(prompts, completions))
    assert [tokenizer.decode(ids) for ids, _ in documents] == [f"one a{EOS}", f" c{EOS}", f"four d{EOS}"]
    learned = [tokenizer.decode([label for label in labels if label != -100]) for _, labels in documents]
    assert learned == [f" a{EOS}", EOS, f" d{EOS}"]  # nothing predicts the first token of a document
    texts = [dict(text=text) for text in ("one", None, "", "two", "three")]
    documents = documents_of(scripts, tokenizer, *texts, {})
    assert [tokenizer.decode(ids) for ids, _ in documents] == [text + EOS for text in ("one", "two", "three")]


def test_two_kinds_of_columns_are_refused(scripts):
    """text, and prompt and completion too: one of them would be ignored. Other columns may be there."""
    tokenizer = byte_level_tokenizer()
    with pytest.raises(scripts["sft"].UserError, match="has text and completion; keep one of them"):
        documents_of(scripts, tokenizer, dict(prompt="one", completion=" two", text="three"))
    example = dict(text="three", prompt="one", completion=None, label=1)
    [(ids, labels)] = documents_of(scripts, tokenizer, example)
    assert tokenizer.decode(ids) == f"three{EOS}" and labels == [-100, *ids[1:]]


def test_bos_comes_once_and_in_front(scripts):
    """In texts, in prompts and in dialogs; never in the middle."""
    tokenizer = with_bos(byte_level_tokenizer())
    [(ids, _)] = documents_of(scripts, tokenizer, dict(text="one"))
    assert tokenizer.decode(ids) == f"<s>one{EOS}"
    [(ids, labels)] = documents_of(scripts, tokenizer, dict(prompt="one", completion=" a"))
    assert tokenizer.decode(ids) == f"<s>one a{EOS}"
    assert labels.count(-100) == len(tokenizer("one").input_ids)
    for end, text in ((" <EOU>", f"<s> Hi. <EOU> Yes. <EOU>{EOS}"), ("eos", f"<s> Hi.{EOS} Yes.{EOS}")):
        [(ids, _)] = documents_of(scripts, tokenizer, dict(dialog=["Hi.", "Yes."]), utterance_end=end)
        assert tokenizer.decode(ids) == text


def test_documents_that_cannot_be_learned_are_skipped(scripts):
    """A prompt of max_length tokens or more leaves nothing to learn; one less leaves one token."""
    tokenizer = byte_level_tokenizer()
    words = ["sun" + " sun" * n for n in (3, 4, 5, 8)]
    lengths = [len(tokenizer.encode(text)) for text in words]
    max_length = lengths[1] + 1
    examples = pairs_of(words, [" rain rain"] * 4)
    documents = documents_of(scripts, tokenizer, *examples, max_length=max_length)
    assert [len(ids) for ids, _ in documents] == [max_length] * 2
    assert [len(ids) - labels.count(-100) for ids, labels in documents] == [1 + lengths[1] - lengths[0], 1]


def test_a_first_token_alone_is_nothing_to_learn(scripts):
    """Nothing predicts it."""
    script, tokenizer = scripts["sft"], byte_level_tokenizer()
    pairs = pairs_of("ab", "cd")
    documents = documents_of(scripts, tokenizer, *pairs, max_length=2)
    assert [tokenizer.decode(ids) for ids, _ in documents] == ["ac", "bd"]
    for examples in (pairs, [dict(text="a"), dict(text="b")]):
        for completion_only in (True, False):
            with pytest.raises(script.UserError, match="2 examples without anything to learn"):
                flags = dict(max_length=1, completion_only_loss=completion_only)
                documents_of(scripts, tokenizer, *examples, **flags)


def test_rows_of_documents_by_hand(scripts):
    """Positions begin at 0 in each document. Pads go on counting, and have no label."""
    no = -100
    rows = [
        [([5, 0], [no, 0])],
        [([6, 7, 0], [no, 7, 0]), ([0, 8], [no, 8]), ([9, 9, 9, 0], [no, no, 9, 0])],
        [([4], [no]), ([3, 2, 0], [no, 2, 0])],
    ]
    batch = scripts["sft"].collate_rows(rows, "cpu")
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


# ---- Models from a config ----------------------------------------------------------------------------------


def test_a_tokenizer_that_would_be_replaced_is_refused(scripts):
    """transformers loads a Qwen2 model with its own way to split texts."""
    tokenizer = byte_level_tokenizer(["1234567 sun"] * 9)  # 1234567 is one token; Qwen2 splits it into digits
    script = scripts["sft"]
    with pytest.raises(script.UserError, match="with a qwen2 model, transformers would load"):
        sizes = "hidden_size=8 num_hidden_layers=1 num_attention_heads=1 num_key_value_heads=1"
        script.model_from_config(f"qwen2 {sizes}", tokenizer)
    script.model_from_config(TINY_GPT2, tokenizer)


def test_a_name_that_a_config_does_not_have_is_refused(scripts):
    """transformers would ignore it: n_layers=1 would make a GPT-2 of twelve layers."""
    script = scripts["sft"]
    with pytest.raises(script.UserError, match="a config of type gpt2 has no n_layers"):
        script.model_from_config("gpt2 n_embd=8 n_layers=1", byte_level_tokenizer())


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


def test_what_a_run_prints(sft, tmp_path, capsys):
    """The model and the data, how many rows there are, the batch, what is learned, and where the model is."""
    train, test = posts_of("train", 9), posts_of("test", 4)
    train[2]["completion"] = None
    data = write_rows(tmp_path / "data", train=train[:8], test=test)
    flags = dict(per_device_train_batch_size=2, gradient_accumulation_steps=3, learning_rate=0.0)
    _, folder, metrics = sft(
        dataset_name=data,
        max_length=64,
        num_train_rows=8,
        num_eval_prompts=3,
        num_samples=0,
        lora_r=2,
        **flags,
    )
    out = capsys.readouterr().out
    rows = round(6 * len(metrics) / metrics[-1]["epoch"])
    left_out = "1 cut to --max-length 64, 1 examples without anything to learn"
    assert f"for training: 7 of 8 examples ({left_out})" in out
    assert "held out: 4 of 4 examples (nothing left out or cut)" in out
    assert f"packed for training: {rows} rows of up to 64 tokens" in out
    batch = f"2 rows per pass x 3 accumulated x 1 processes = 6 rows; {len(metrics)} updates"
    assert f"batch: {batch} of one optimizer step each" in out
    shown = [f"{row['prompt']}[{row['completion']}{EOS}]" for row in train]
    assert any(text in " ".join(out.splitlines()) for text in shown)
    assert f"saved {folder / 'model'}" in out
    assert not (folder / "samples.jsonl").read_text()  # --num-samples 0
