"""Classifiers and reward models against transformers, which reads each text alone, without padding."""

import pytest
import tokenizers
import torch
import transformers
from conftest import ARCHITECTURES, ROOT
from math_tools import close

import ppo_sentiment as ppo
import reward_model as reward

near = dict(rtol=0, atol=1e-5)
CPU = torch.device("cpu")
TEXTS = ["I loved it.", "What a mess, from the first minute to the last.", "Fine"]


@pytest.fixture(scope="module")
def classifier_folder(tiny_lm, tiny_classifier, tmp_path_factory):
    """classifier_folder(arch, pad="own", labels=...) -> folder of a random classifier with its tokenizer."""

    def make(arch, pad="own", labels=("negative", "positive")):
        body = tiny_classifier("own") if arch == "distilbert" else tiny_lm(arch, pad)
        torch.manual_seed(5)
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            body, num_labels=2, id2label=dict(enumerate(labels))
        )
        folder = tmp_path_factory.mktemp("classifier")
        model.save_pretrained(folder)
        transformers.AutoTokenizer.from_pretrained(body).save_pretrained(folder)
        return str(folder)

    return make


@torch.no_grad()
def logits_alone(folder, rows):
    """transformers' own logits of each row of tokens alone, where there is nothing to pad."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    model.config.pad_token_id = -1
    return torch.stack([model(input_ids=torch.tensor([row])).logits[0] for row in rows])


def logits_of_texts(folder, texts):
    """The same of texts."""
    return logits_alone(folder, transformers.AutoTokenizer.from_pretrained(folder)(texts).input_ids)


def collate(rows):
    """Token ids of texts as one padded batch. -> ids, mask"""
    _, ids, mask, _ = reward.collate_texts([reward.Row([row]) for row in rows], "cpu")
    return ids, mask


# ---- Reward models and classifiers on tokens ---------------------------------------------------------------


@pytest.mark.parametrize("arch", [*ARCHITECTURES, "distilbert"])
@pytest.mark.parametrize("pad", ["own", "eos"])
def test_sequence_logits_do_not_depend_on_padding(classifier_folder, arch, pad):
    """Trick 9: read at the last real token, also if it is EOS and pad is EOS, for any padding."""
    folder = classifier_folder(arch, pad)
    rows = [[5, 6, 7, 8, 9], [11], [12, 13, 0], [0, 0]]
    theirs = logits_alone(folder, rows)
    model = reward.load_model(transformers.AutoModelForSequenceClassification, folder).eval()
    ids, mask = collate(rows)
    close(reward.sequence_logits(model, ids, mask), theirs, **near)
    wide_mask = torch.nn.functional.pad(mask, (0, 4), value=False)
    for pad_id in (0, 1):
        wide_ids = torch.full((4, 9), pad_id)
        wide_ids[wide_mask] = ids[mask]
        close(reward.sequence_logits(model, wide_ids, wide_mask), theirs, **near)


PAIRS = [  # texts with 5, 2 and 0 tokens in common; one of the last row is the beginning of the other
    [[5, 6, 7, 8, 9, 10, 3], [5, 6, 7, 8, 9, 11]],
    [[12, 13, 14], [12, 13, 15, 16, 17], [12, 13, 18]],
    [[5], [6, 6]],
    [[7, 8], [7, 8, 9, 10]],
]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_prompt_that_is_read_once(classifier_folder, arch):
    """The texts of a row share the keys and values of their beginning: the same scores, gradients too."""
    model = reward.load_model(transformers.AutoModelForSequenceClassification, classifier_folder(arch))
    learner = reward.ClassLogits(model)
    results = []
    for shares_prompts in (False, True):
        batch = reward.collate_texts([reward.Row(texts) for texts in PAIRS], "cpu", shares_prompts)
        logits = learner.train()(*batch)
        weights = torch.linspace(-1, 2, logits.numel()).view_as(logits)  # each logit counts differently
        grads = torch.autograd.grad((logits * weights).sum(), model.parameters(), allow_unused=True)
        results.append([logits, *(g for g in grads if g is not None)])
    prompts, _, _, row_of_text = batch
    assert prompts.tolist()[1] == [-1, -1, -1, 12, 13]
    assert prompts.ge(0).sum(1).tolist() == [5, 2, 0, 1]
    assert row_of_text.tolist() == [0, 0, 1, 1, 1, 2, 2, 3, 3]
    for plain, shared in zip(*results, strict=True):
        close(shared, plain, rtol=0, atol=1e-5 * max(1, plain.abs().max().item()))


def test_where_prompts_are_shared(classifier_folder):
    """Not by an encoder, whose states of a prompt depend on the response, nor where a cache does not work."""

    def is_possible(arch, checkpointing=False):
        model = reward.load_model(transformers.AutoModelForSequenceClassification, classifier_folder(arch))
        if checkpointing:
            model.gradient_checkpointing_enable(dict(use_reentrant=False))
        rows = [reward.Row(texts) for texts in PAIRS]
        return reward.can_share_prompts(reward.ClassLogits(model), rows)

    assert is_possible("gpt2")
    assert not is_possible("distilbert")
    assert not is_possible("gpt2", checkpointing=True)
    assert not is_possible("qwen3_5_text")


# ---- Classifiers on texts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arch, pad, appends_eos",
    [
        ("distilbert", "own", False),
        ("gpt2", "eos", False),
        ("gpt2", None, False),
        ("llama", "eos", True),  # a decoder learned to be read at the EOS of its texts
        ("llama", None, True),
    ],
)
def test_the_reward_of_a_text_is_the_classifiers(classifier_folder, arch, pad, appends_eos):
    """In batches of 2."""
    folder = classifier_folder(arch, pad or "own")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    eos, eos_id = tokenizer.eos_token, tokenizer.eos_token_id
    if appends_eos:
        tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"$A {eos}", special_tokens=[(eos, eos_id)]
        )
    if pad is None:
        tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    assert [ids[-1] == eos_id for ids in tokenizer(TEXTS).input_ids] == [appends_eos] * 3
    for number, label in enumerate(("negative", "positive")):
        args = ppo.Args(reward_label=label, local_rollout_forward_batch_size=2)
        logits, _ = ppo.load_label_scorer(args, folder, CPU)([""] * 3, TEXTS)
        close(logits, logits_of_texts(folder, TEXTS)[:, number], **near)


def test_a_label_is_scored_by_its_logit_and_its_probability(classifier_folder):
    """Of prompt and response as one text; upper and lower case do not matter."""
    folder = classifier_folder("distilbert")
    theirs = logits_of_texts(folder, TEXTS)
    args = ppo.Args(reward_label="Positive", local_rollout_forward_batch_size=2)
    score_label = ppo.load_label_scorer(args, folder, CPU)
    logits, probabilities = score_label([text[:4] for text in TEXTS], [text[4:] for text in TEXTS])
    close(logits, theirs[:, 1], **near)
    close(probabilities, theirs.softmax(-1)[:, 1], **near)


def test_the_logits_of_a_bert_are_not_rounded(classifier_folder):
    """Autocast would round them to 8 bits, so that two close scores would be equal."""
    model = ppo.load_model(
        transformers.AutoModelForSequenceClassification, classifier_folder("distilbert")
    ).eval()
    ids, mask = torch.arange(2, 14).view(2, 6), torch.ones(2, 6, dtype=torch.bool)
    expected = reward.sequence_logits(model, ids, mask)
    assert expected.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(reward.sequence_logits(model, ids, mask), expected)


@pytest.mark.parametrize(
    "labels, names, number",
    [
        (("negative", "positive"), ["positive", "Positive"], 1),
        (("POSITIVE", "NEGATIVE"), ["POSITIVE", "positive"], 0),
        (("1", "0"), ["1"], 0),  # a name, not a place
    ],
)
def test_the_reward_is_asked_for_by_name(classifier_folder, labels, names, number):
    """Trick 22: by the label's name, not by its position in a list sorted by score."""
    folder = classifier_folder("distilbert", labels=labels)
    theirs = logits_of_texts(folder, TEXTS)[:, number]
    for label in names:
        get_scores = ppo.load_reward(ppo.Args(reward_model_path=folder, reward_label=label), None, CPU)
        close(get_scores([{}] * 3, [""] * 3, TEXTS, [[1]] * 3)["classifier"], theirs, **near)


def test_a_reward_model_may_have_another_tokenizer(tiny_classifier):
    """Trick 23: texts are tokenized with the classifier's own tokenizer."""
    folder = tiny_classifier("other")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    policys = transformers.AutoTokenizer.from_pretrained(ROOT / "checkpoints/reviews-lm")
    assert theirs(TEXTS[0]).input_ids != policys(TEXTS[0]).input_ids
    get_scores = ppo.load_reward(ppo.Args(reward_model_path=folder), None, CPU)
    scores = get_scores([{}] * 3, [""] * 3, TEXTS, [[1]] * 3)
    close(scores["classifier"], logits_of_texts(folder, TEXTS)[:, 1], **near)
