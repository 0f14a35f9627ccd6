"""Supervised fine-tuning: documents, labels and packing, against transformers on each document alone."""

import json

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import ARCHITECTURES, CONTEXT, module_with
from datasets import Dataset
from math_tools import close, gradients, logprobs_alone, normal, random_ids

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


def model_from(kind, **settings):
    """A small model of this architecture, with random weights of transformers' usual size."""
    sizes = dict(vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    sizes |= dict(num_key_value_heads=2, intermediate_size=64, max_position_embeddings=128)
    config = transformers.AutoConfig.for_model(kind, **sizes | settings)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


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


CAP = "its losses differ from ours"
PACKED = "packed documents of this model differ from single ones: use --no-packing"
OTHER_MODELS = {  # what is wrong with a document alone, and with documents in a row
    "gemma2 head_dim=16": (CAP, CAP),
    "granite logits_scaling=4.0": (CAP, CAP),
    "bloom": (None, PACKED),  # ALiBi of whole rows
    "falcon alibi=true": (None, PACKED),
    "falcon alibi=false": (None, None),
    "mamba": (None, PACKED),  # a recurrent state
    "lfm2 full_attn_idxs=[1]": (None, PACKED),  # a convolution
    "mistral sliding_window=64": (None, None),
    "mistral sliding_window=63": (None, PACKED),
    "llama": (None, None),
    "gpt_neox": (None, None),
}


def check(model, **flags):
    """What sft.check_documents says about a model: None if nothing."""
    before = {name: x.clone() for name, x in model.state_dict().items()}
    try:
        flags = dict(max_length=64, from_config="its dropout is meant") | flags
        sft.check_documents(model, sft.Args(**flags))
        line = None
    except sft.UserError as error:
        line = str(error).partition(": ")[2].removeprefix("this kind of model does not work here, ")
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())  # bit for bit
    return line


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("model", OTHER_MODELS)
def test_models_are_measured(model, packing):
    """A model that would learn something else is refused; with --no-packing, only if it must be."""
    kind, *pairs = model.split()
    settings = {name: json.loads(value) for name, value in (pair.split("=") for pair in pairs)}
    assert check(model_from(kind, **settings), packing=packing) == OTHER_MODELS[model][packing]


def test_noise_of_a_loaded_model_is_refused():
    """Falcon reads its dropout from the config, where load_model does not look for it."""
    settings = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=300)
    for dropout, said in ((0.0, None), (0.1, "its losses differ from ours")):
        model = model_from("falcon", hidden_dropout=dropout, **settings)
        assert check(model, packing=False, from_config=None) == said


def test_an_encoder_is_refused():
    """Without packing too: each token would see its label."""
    settings = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32)
    model = model_from("bert-generation", vocab_size=300, **settings)
    assert check(model, packing=False) == "its losses differ from ours"


@every_architecture
def test_the_check_does_not_depend_on_the_length_of_rows(language_model, arch):
    """From rows of a single token to the whole context of the model."""
    for max_length in (1, 2, 3, 100, CONTEXT):
        said = check(language_model(arch), max_length=max_length)
        assert said is None or arch == "bloom" and said == PACKED
        assert check(language_model(arch), max_length=max_length, packing=False) is None
    if arch != "bloom":  # it has no limit
        assert "256 tokens" in check(language_model(arch), max_length=CONTEXT + 1)


@pytest.mark.parametrize("arch", [arch for arch in ARCHITECTURES if arch not in ("bloom", "gpt_neo")])
@pytest.mark.parametrize("spread", ["wide", "usual"])
def test_the_check_notices_a_mask_or_positions_that_are_missing(language_model, monkeypatch, arch, spread):
    """Whole rows are causal, but documents are not kept apart; or positions go on from one to the next."""
    model = language_model(arch) if spread == "wide" else model_from(arch, word_embed_proj_dim=32)
    document_states = sft.document_states

    def without_mask(body, ids, positions):  # with packed position_ids, transformers would make a mask
        return body(input_ids=ids, use_cache=False).last_hidden_state

    def without_positions(body, ids, positions):
        def without(position_ids, **inputs):
            return body(**inputs)

        return document_states(without if ids.shape == (2, 64) else body, ids, positions)

    assert check(model) is None
    monkeypatch.setattr(sft, "document_states", without_mask)
    assert check(model) == PACKED
    monkeypatch.setattr(sft, "document_states", without_positions)
    is_relative = arch in ("llama", "qwen2", "gpt_neox")  # rotary: only distances count
    assert check(model) == (None if is_relative else PACKED)


def test_the_loss_of_packed_rows_is_the_loss_of_all_documents(language_model):
    """And so is its gradient: packing changes only the speed."""
    sums, gradients = [], []
    for packing in (True, False):
        model = language_model("llama")
        loss_sum, _ = sft.LanguageModel(model)(**collate(DOCUMENTS, 16, packing))
        loss_sum.backward()
        sums.append(loss_sum)
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
        loss_sum, correct_sum = sft.LanguageModel(model)(**batch)
        theirs = model(input_ids=ids, labels=labels)
    has_label = labels[:, 1:] != -100
    assert has_label.sum() == (labels != -100).sum()  # the script divides by this: first tokens have no label
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


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_input_gets_no_gradient(frozen):
    """The output layer under LoRA, for example."""
    inputs = dict(hidden=normal(200, 5, seed=1), weight=normal(11, 5, seed=2))
    for name, x in inputs.items():
        x.requires_grad_(name != frozen)
    labels = random_ids(200, high=11, seed=3)
    [trained] = [x for x in inputs.values() if x.requires_grad]
    [expected] = torch.autograd.grad(
        F.cross_entropy(F.linear(*inputs.values()), labels, reduction="sum"), trained
    )
    sft.next_token_loss(**inputs, labels=labels)[0].backward()
    close(trained.grad, expected, atol=1e-4)
    assert inputs[frozen].grad is None


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
        batch["labels"][batch["labels"] != eos] = -100
        loss_sum, _ = sft.LanguageModel(model)(**batch)
        close(loss_sum, sum(expected), **near)


def test_only_completions_have_labels(tiny_lm):
    """Trick 7: prompt and completion are tokenized separately. The completion begins with its own space."""
    tokenizer = sft.load_tokenizer(tiny_lm())
    prompts, completions = ["A film", "The end of"], [" about a cook.", " it"]
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
