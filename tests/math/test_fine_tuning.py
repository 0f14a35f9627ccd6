"""Supervised fine-tuning: documents, labels and packing, against transformers on each document alone."""

import json
import random

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import ARCHITECTURES
from math_tools import close, gradients, logprobs_alone, normal, random_ids, random_model

import sft

near = dict(rtol=0, atol=1e-5)
every_architecture = pytest.mark.parametrize("arch", ARCHITECTURES)
NOT_PACKED = ("opt", "bloom")  # they do not read the positions
PACKED = [arch for arch in ARCHITECTURES if arch not in NOT_PACKED]
DOCUMENTS = [  # (ids, labels)
    ([5, 6, 7, 8, 0], [-100, 6, 7, 8, 0]),
    ([9, 0], [-100, 0]),
    ([3, 4, 5, 6, 7, 8, 9, 0], [-100, -100, -100, 6, 7, 8, 9, 0]),
    ([12, 13, 14, 0], [-100, 13, 14, 0]),
    ([20, 21, 22], [-100, 21, 22]),
]


def collate(documents, max_length, packing):
    """The documents as a batch of rows of max_length tokens. -> dict of ids, labels, positions"""
    return sft.collate_rows(sft.pack(documents, max_length, packing), "cpu")


@torch.no_grad()
def document_logits(model, batch):
    """The logits of rows of documents."""
    body, head = sft.body_and_head(model)
    hidden = sft.document_states(body, batch["ids"], batch["positions"])
    return F.linear(hidden, head.weight, head.bias)  # [B, L, V]


# ---- Packing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_best_fit_decreasing(seed):
    """Against a slow version. Every document is there once and whole, and no two rows fit into one."""
    numbers = random.Random(seed)
    lengths = [numbers.randint(1, 12) for _ in range(numbers.randint(1, 40))]
    documents = [([i] * length, [i] * length) for i, length in enumerate(lengths)]
    rows = sft.pack(documents, 12, packing=True)
    assert sorted(ids[0] for row in rows for ids, _ in row) == list(range(len(lengths)))
    assert all(document in documents for row in rows for document in row)
    used = []
    for length in sorted(lengths, reverse=True):
        fullest = max((x for x in used if x + length <= 12), default=None)
        if fullest is not None:
            used.remove(fullest)
        used.append((fullest or 0) + length)
    found = sorted(sum(len(ids) for ids, _ in row) for row in rows)
    assert found == sorted(used)
    assert len(found) < 2 or found[0] + found[1] > 12
    assert sft.pack(documents, 12, packing=False) == [[document] for document in documents]


@pytest.mark.parametrize("arch", PACKED)
def test_packed_documents_do_not_see_each_other(language_model, arch):
    """In rows of 16 tokens, the log-probabilities of each document are those that it has alone."""
    model = language_model(arch)
    rows = sft.pack(DOCUMENTS, 16, packing=True)
    assert [[len(ids) for ids, _ in row] for row in rows] == [[8, 5, 3], [4, 2]]
    logits = document_logits(model, sft.collate_rows(rows, "cpu"))
    for row, row_logits in zip(rows, logits):
        start = 0
        for ids, _ in row:
            ours = row_logits[start : start + len(ids)].double().log_softmax(-1)
            close(ours, logprobs_alone(model, torch.tensor(ids)), **near)
            start += len(ids)


DIFFERS = "its own logits differ from ours"
ALONE = f"does not work here: {DIFFERS}"
USE = f"does not work here (perhaps with --no-packing): {DIFFERS}"
OTHER_MODELS = {  # what is said about a document alone, and about documents in a row
    "gemma2 head_dim=16": (ALONE, USE),
    "granite logits_scaling=4.0": (ALONE, USE),
    "bert-generation": (ALONE, USE),  # an encoder
    "bloom": (None, USE),  # ALiBi of whole rows
    "falcon alibi=true": (None, USE),
    "falcon alibi=false": (None, USE),
    "opt word_embed_proj_dim=32": (None, USE),
    "mamba": (None, USE),  # a recurrent state
    "lfm2 full_attn_idxs=[1]": (None, USE),  # a convolution
    'qwen3_5_text head_dim=16 layer_types=["linear_attention","full_attention"]': (None, USE),
    "mistral sliding_window=16": (None, None),
    "gemma3_text head_dim=16 sliding_window=16": (None, None),
    "gptj rotary_dim=8": (None, None),
    "phi": (None, None),
}


def check(model, **flags):
    """What sft.check_model says about a model: None if nothing."""
    before = {name: x.clone() for name, x in model.state_dict().items()}
    flags = dict(max_length=64, model_name_or_path="it", from_config="it") | flags  # its dropout is meant
    try:
        sft.check_model(model, sft.Args(**flags))
        line = None
    except sft.UserError as error:
        line = str(error).removeprefix("it ").partition(" by ")[0]
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())  # bit for bit
    return line


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("model", OTHER_MODELS)
def test_models_are_checked(model, packing):
    """A model that would learn something else is refused; with --no-packing, only if it must be."""
    kind, *pairs = model.split()
    settings = {name: json.loads(value) for name, value in (pair.split("=") for pair in pairs)}
    assert check(random_model(kind, **settings), packing=packing) == OTHER_MODELS[model][packing]


def test_noise_of_a_loaded_model_is_refused():
    """Falcon reads its dropout from the config, where load_model does not look for it."""
    settings = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=300)
    for dropout, said in ((0.0, None), (0.1, ALONE)):
        model = random_model("falcon", hidden_dropout=dropout, **settings)
        assert check(model, packing=False, from_config=None) == said
        assert check(model, packing=False) is None


@pytest.mark.parametrize("arch", PACKED)
def test_the_check_notices_a_mask_that_is_missing(monkeypatch, arch):
    """Another version of transformers may find no documents in the positions."""
    layers = dict(attention_types=[[["global", "local"], 1]]) if arch == "gpt_neo" else {}
    model = random_model(arch, **layers)
    assert check(model) is None
    monkeypatch.setattr(transformers.masking_utils, "find_packed_sequence_indices", lambda positions: None)
    assert check(model) == USE
    assert check(model, packing=False) is None


# ---- Losses ------------------------------------------------------------------------------------------------


@every_architecture
def test_losses_are_transformers_own(language_model, arch):
    """The sum over all labels divided by their number is model(labels=...).loss, for a padded batch."""
    model = language_model(arch)
    batch = collate(DOCUMENTS, 16, packing=False)
    ids, labels = batch["ids"], batch["labels"]
    with torch.no_grad():
        loss_sum, correct_sum = sft.LanguageModel(model)(**batch)
        theirs = model(input_ids=ids, labels=labels)
    has_label = labels[:, 1:] != -100
    assert has_label.sum() == (labels != -100).sum()  # the script divides by this
    close(loss_sum / has_label.sum(), theirs.loss, **near)
    assert correct_sum == (theirs.logits[:, :-1].argmax(-1) == labels[:, 1:])[has_label].sum()


@pytest.mark.parametrize("num_labels", [1, 128, 300])
@pytest.mark.parametrize("has_bias", [False, True])
def test_cross_entropy_in_chunks(num_labels, has_bias):
    """The loss, correct predictions and gradients are those of F.cross_entropy, in chunks too."""
    hidden, weight = normal(num_labels, 5, seed=1), normal(11, 5, seed=2)
    labels = random_ids(num_labels, high=11, seed=3)
    inputs = [hidden, weight, normal(11, seed=4)][: 2 + has_bias]

    def ours(hidden, weight, bias=None):
        return sft.next_token_loss(hidden, weight, labels, bias)[0]

    def theirs(hidden, weight, bias=None):
        return F.cross_entropy(F.linear(hidden, weight, bias), labels, reduction="sum")

    close(ours(*inputs), theirs(*inputs))
    for one, other in zip(gradients(ours, *inputs), gradients(theirs, *inputs), strict=True):
        close(one, other, atol=1e-4)
    _, correct_sum = sft.next_token_loss(hidden, weight, labels, *inputs[2:])
    assert correct_sum == (F.linear(hidden, weight, *inputs[2:]).argmax(-1) == labels).sum()


def test_losses_are_fp32_under_autocast():
    """Forward and backward: autocast would round the logits to bf16."""
    hidden, weight, labels = normal(4, 8, seed=1), normal(9, 8, seed=2), torch.arange(4)

    def ours(hidden, weight):
        return sft.next_token_loss(hidden, weight, labels)[0]

    expected = ours(hidden, weight), *gradients(ours, hidden, weight)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = ours(hidden, weight), *gradients(ours, hidden, weight)
    assert all(map(torch.equal, expected, rounded))


# ---- Labels ------------------------------------------------------------------------------------------------


def load_documents(tokenizer, *examples, **flags):
    """sft.load_documents of these rows, as lists, without the text."""
    documents, _ = sft.load_documents(examples, tokenizer, sft.Args(**flags))
    return [(list(ids), list(labels)) for ids, labels in documents]


@pytest.mark.parametrize("pad", ["own", "eos"])
def test_eos_is_learned_at_the_end_of_every_document(tiny_lm, language_model, pad):
    """Trick 8: text + EOS, with labels on all but the first token, also if pad is EOS.

    The loss at EOS is transformers'.
    """
    tokenizer = sft.load_tokenizer(tiny_lm("gpt2", pad))
    eos = tokenizer.eos_token_id
    assert (tokenizer.pad_token_id == eos) == (pad == "eos")
    texts = ["A fine film.", "No.", "I liked the thief, and the cook."]
    documents = load_documents(tokenizer, *[dict(text=text) for text in texts])
    for text, (ids, labels) in zip(texts, documents, strict=True):
        assert ids == [*tokenizer(text).input_ids, eos] and labels == [-100, *ids[1:]]
    model = language_model("gpt2", pad)
    expected = [-logprobs_alone(model, torch.tensor(ids))[-2, eos] for ids, _ in documents]
    for packing in (True, False):
        batch = collate(documents, 64, packing)
        batch["labels"][batch["labels"] != eos] = -100
        loss_sum, _ = sft.LanguageModel(model)(**batch)
        close(loss_sum, sum(expected), **near)


@pytest.mark.parametrize("completion_only_loss", [True, False])
def test_labels_of_prompts_and_completions(tiny_lm, completion_only_loss):
    """Trick 7: they are tokenized separately. The completion begins with its own space."""
    tokenizer = sft.load_tokenizer(tiny_lm())
    pairs = [("A film", " about a cook."), ("The end of", " it")]
    examples = [dict(prompt=prompt, completion=completion) for prompt, completion in pairs]
    documents = load_documents(tokenizer, *examples, completion_only_loss=completion_only_loss)
    for (prompt, completion), (ids, labels) in zip(pairs, documents, strict=True):
        prompt_ids = tokenizer(prompt).input_ids
        assert ids == [*prompt_ids, *tokenizer(completion).input_ids, tokenizer.eos_token_id]
        start = len(prompt_ids) if completion_only_loss else 1
        assert labels == [-100] * start + ids[start:]


def test_a_cut_document_has_no_eos(tiny_lm):
    """Documents with nothing to learn within max_length are skipped. Both are counted."""
    tokenizer = sft.load_tokenizer(tiny_lm())
    long_text = "The cook and the thief went to the sea, and then they came home. " * 3
    long_ids = tokenizer(long_text).input_ids
    examples = [dict(text=long_text), dict(text=""), dict(text=None), {}, dict(text="No.")]
    documents, left_out = sft.load_documents(examples, tokenizer, sft.Args(max_length=10))
    assert left_out == "1 cut to --max-length 10, 3 examples without anything to learn"
    assert len(documents) == 2
    assert [list(x) for x in documents[0]] == [long_ids[:10], [-100, *long_ids[1:10]]]
    assert documents[1][0][-1] == tokenizer.eos_token_id
    pairs = [(long_text, " and more"), ("A film", " I like")]
    examples = [dict(prompt=prompt, completion=completion) for prompt, completion in pairs]
    [(ids, _)] = load_documents(tokenizer, *examples, max_length=10)
    start = tokenizer("A film").input_ids
    assert ids[: len(start)] == start
