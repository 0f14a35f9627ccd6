"""Supervised fine-tuning: documents, labels and packing, against transformers on each document alone."""

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import ARCHITECTURES, module_with
from datasets import Dataset
from math_tools import close, logprobs_alone

sft = module_with("load_documents", "pack", "document_states")
near = dict(rtol=0, atol=1e-5)
every_architecture = pytest.mark.parametrize("arch", ARCHITECTURES)
DOCUMENTS = [  # (ids, labels)
    ([5, 6, 7, 8, 0], [5, 6, 7, 8, 0]),
    ([9, 0], [9, 0]),
    ([3, 4, 5, 6, 7, 8, 9, 0], [-100, -100, -100, 6, 7, 8, 9, 0]),
    ([12, 13, 14, 0], [12, 13, 14, 0]),
    ([20, 21, 22], [20, 21, 22]),
]


@pytest.fixture(scope="module")
def language_model(tiny_lm):
    """language_model(arch, pad="own") -> the folder's model, loaded by transformers, in evaluation mode."""

    def get(arch, pad="own"):
        return transformers.AutoModelForCausalLM.from_pretrained(tiny_lm(arch, pad)).eval()

    return get


def collate(documents, max_length, packing):
    """The documents as a batch of rows of max_length tokens. -> dict of ids, labels, positions"""
    return sft.collate_rows(sft.pack(documents, max_length, packing), "cpu")


@torch.no_grad()
def document_logits(model, batch):
    """The logits of rows of documents."""
    body, head = sft.body_and_head(model)
    hidden = sft.document_states(body, batch["ids"], batch["positions"])
    return F.linear(hidden, head.weight, head.bias)


# ---- Packing -----------------------------------------------------------------------------------------------


def test_pack_keeps_every_document_whole():
    rows = sft.pack(DOCUMENTS, 12, packing=True)
    assert [document for row in rows for document in row] == DOCUMENTS
    assert max(sum(len(ids) for ids, _ in row) for row in rows) <= 12
    assert [len(row) for row in sft.pack(DOCUMENTS, 12, packing=False)] == [1] * 5


@pytest.mark.parametrize("arch", [arch for arch in ARCHITECTURES if arch != "bloom"])
def test_packed_documents_do_not_see_each_other(language_model, arch):
    """In rows of 16 tokens, the log-probabilities of each document are those that it has alone."""
    model = language_model(arch)
    rows = sft.pack(DOCUMENTS, 16, packing=True)
    assert [len(row) for row in rows] == [3, 2]
    logits = document_logits(model, sft.collate_rows(rows, "cpu"))
    for row, row_logits in zip(rows, logits):
        start = 0
        for ids, _ in row:
            ours = row_logits[start : start + len(ids)].double().log_softmax(-1)
            close(ours, logprobs_alone(model, torch.tensor(ids)), **near)
            start += len(ids)


def test_bloom_is_never_packed_silently(language_model):
    """BLOOM has no position ids, so it cannot keep documents apart: an error, not a wrong result."""
    model = language_model("bloom")
    assert not sft.can_pack(model, 16)
    with pytest.raises((TypeError, ValueError, sft.UserError)):
        document_logits(model, collate(DOCUMENTS, 16, packing=True))


def test_which_models_can_pack():
    """Not if a model has no position ids, keeps a state, or sees less than the whole row."""
    sizes = dict(vocab_size=8, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    wider = sizes | dict(intermediate_size=8)

    def can_pack(kind, max_length=60, **settings):
        config = getattr(transformers, f"{kind}Config")(**settings)
        return sft.can_pack(getattr(transformers, f"{kind}ForCausalLM")(config), max_length)

    assert can_pack("Llama", **wider)
    assert can_pack("Mistral", **wider, num_key_value_heads=2, sliding_window=60)
    assert not can_pack("Mistral", **wider, num_key_value_heads=2, sliding_window=59)
    assert can_pack("Falcon", **sizes, alibi=False)
    assert not can_pack("Falcon", **sizes, alibi=True)
    assert not can_pack("Bloom", vocab_size=8, hidden_size=32, n_layer=1, n_head=2)
    assert not can_pack("Mamba", vocab_size=8, hidden_size=32, num_hidden_layers=1)


def test_the_loss_of_packed_rows_is_the_loss_of_all_documents(language_model):
    """And so is its gradient: packing changes only the speed."""
    sums, gradients = [], []
    for packing in (True, False):
        model = language_model("llama")
        losses, _ = sft.LanguageModel(model)(**collate(DOCUMENTS, 16, packing))
        losses.sum().backward()
        sums.append(losses.sum())
        gradients.append(model.get_input_embeddings().weight.grad)
    close(*sums, rtol=0, atol=1e-4)
    close(*gradients, rtol=0, atol=1e-4)


# ---- Losses ------------------------------------------------------------------------------------------------


@every_architecture
def test_losses_are_transformers_own(language_model, arch):
    """The sum over all labels divided by their number is model(labels=...).loss, for a padded batch."""
    model = language_model(arch)
    batch = collate(DOCUMENTS, 16, packing=False)
    ids, labels = batch["ids"], batch["labels"]
    with torch.no_grad():
        losses, correct = sft.LanguageModel(model)(**batch)
        theirs = model(input_ids=ids, labels=labels)
    assert losses.shape == correct.shape == (5, 7)
    has_label = labels[:, 1:] != -100
    assert has_label.sum() == (labels != -100).sum()  # the script divides by this: first tokens have no label
    close(losses.sum() / has_label.sum(), theirs.loss, **near)
    likeliest = theirs.logits[:, :-1].argmax(-1)
    assert torch.equal(correct, (likeliest == labels[:, 1:]) & has_label)


def test_the_check_of_the_head_accepts_and_refuses(language_model):
    """A scaled head, which is more than hidden @ weight, is refused (trick 43)."""
    model = language_model("llama")
    sft.check_own_losses(model, "some_folder")
    scaled = copy.deepcopy(model)
    forward = scaled.lm_head.forward
    scaled.lm_head.forward = lambda hidden: 0.5 * forward(hidden)
    with pytest.raises(sft.UserError, match="some_folder"):
        sft.check_own_losses(scaled, "some_folder")


# ---- Labels ------------------------------------------------------------------------------------------------


def load_documents(tokenizer, columns, **flags):
    """sft.load_documents of a data set with these columns."""
    return sft.load_documents(Dataset.from_dict(columns), tokenizer, sft.Args(**flags))


@pytest.mark.parametrize("pad", ["own", "eos"])
def test_eos_is_learned_at_the_end_of_every_document(tiny_lm, language_model, pad):
    """Trick 8: text + EOS, with labels on all of it, also if pad is EOS. The loss at EOS is transformers'."""
    tokenizer = sft.load_tokenizer(tiny_lm("gpt2", pad))
    eos = tokenizer.eos_token_id
    assert (tokenizer.pad_token_id == eos) == (pad == "eos")
    texts = ["A fine film.", "No.", "I liked the thief, and the cook."]
    documents = load_documents(tokenizer, dict(text=texts))
    for text, (ids, labels) in zip(texts, documents, strict=True):
        assert ids == labels == [*tokenizer(text).input_ids, eos]
    model = language_model("gpt2", pad)
    expected = [-logprobs_alone(model, torch.tensor(ids))[-2, eos] for ids, _ in documents]
    for packing in (True, False):
        batch = collate(documents, 64, packing)
        losses, _ = sft.LanguageModel(model)(**batch)
        close(losses[batch["labels"][:, 1:] == eos], torch.stack(expected), **near)


def test_only_completions_have_labels(tiny_lm):
    """Trick 7: prompt and completion are tokenized separately. The completion begins with its own space."""
    tokenizer = sft.load_tokenizer(tiny_lm())
    prompts, completions = ["A film", "", "The end of"], [" about a cook.", "Short.", " it"]
    documents = load_documents(tokenizer, dict(prompt=prompts, completion=completions))
    for prompt, completion, (ids, labels) in zip(prompts, completions, documents, strict=True):
        prompt_ids = tokenizer(prompt).input_ids
        completion_ids = [*tokenizer(completion).input_ids, tokenizer.eos_token_id]
        assert ids == prompt_ids + completion_ids
        assert labels == [-100] * len(prompt_ids) + completion_ids


def test_prompts_have_labels_too_on_request(tiny_lm):
    """--no-completion-only-loss"""
    tokenizer = sft.load_tokenizer(tiny_lm())
    columns = dict(prompt=["A question?"], completion=[" An answer."])
    [(ids, labels)] = load_documents(tokenizer, columns, completion_only_loss=False)
    both = tokenizer("A question?").input_ids + tokenizer(" An answer.").input_ids
    assert ids == labels == [*both, tokenizer.eos_token_id]


def test_a_cut_document_has_no_eos(tiny_lm):
    """Documents with nothing to learn within max_length are skipped."""
    tokenizer = sft.load_tokenizer(tiny_lm())
    long_text = "The cook and the thief went to the sea, and then they came home. " * 3
    long_ids = tokenizer(long_text).input_ids
    documents = load_documents(tokenizer, dict(text=[long_text, "", None, "No."]), max_length=10)
    assert len(documents) == 2
    assert documents[0] == (long_ids[:10], long_ids[:10])
    assert documents[1][0][-1] == tokenizer.eos_token_id
    columns = dict(prompt=[long_text, "A film"], completion=[" and more", " I like"])
    [(ids, _)] = load_documents(tokenizer, columns, max_length=10)
    start = tokenizer("A film").input_ids
    assert ids[: len(start)] == start
