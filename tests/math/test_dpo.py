"""The loss of dpo_tldr.py in plain Python, in print and in TRL's DPOTrainer, and the batches it gets."""

import math

import datasets
import pytest
import torch
from math_tools import normal, trl_1_16
from transformers import AutoModelForCausalLM, AutoTokenizer

import dpo_tldr as dpo
import rloo_tldr as rloo

BETA = 0.3


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_the_loss_and_its_gradient_in_plain_python(label_smoothing):
    """Rafailov et al. 2023, eq. 7 and the gradient below it; label smoothing as in Mitchell 2023, eq. 3."""
    columns = [(-20 - 5 * normal(7, seed=seed).double()).requires_grad_() for seed in range(4)]
    losses = dpo.dpo_loss(*columns, BETA, label_smoothing)
    losses.sum().backward()
    rows = zip(*[column.tolist() for column in columns])
    for i, (chosen, rejected, ref_chosen, ref_rejected) in enumerate(rows):
        difference = BETA * ((chosen - ref_chosen) - (rejected - ref_rejected))
        right = math.log(1 + math.exp(-difference))
        wrong = math.log(1 + math.exp(difference))
        loss = (1 - label_smoothing) * right + label_smoothing * wrong
        assert losses[i].item() == pytest.approx(loss)
        gradient = -BETA * (1 / (1 + math.exp(difference)) - label_smoothing)
        found = [column.grad[i].item() for column in columns]
        assert found == pytest.approx([gradient, -gradient, -gradient, gradient])


def test_a_large_difference_is_no_infinity():
    zero, far = torch.zeros(1), torch.tensor([-4000.0])
    assert dpo.dpo_loss(zero, far, zero, zero, 1.0).item() == 0.0
    assert dpo.dpo_loss(far, zero, zero, zero, 1.0).item() == 4000.0


def test_pair_metrics():
    logprobs = torch.tensor([[-5.0, -9.0], [-7.0, -2.0], [-3.0, -3.0]])
    ref_logprobs = torch.tensor([[-6.0, -7.0], [-6.0, -2.0], [-3.0, -3.0]])
    metrics = dpo.pair_metrics(logprobs, ref_logprobs, 0.5)
    assert metrics["rewards/chosen"].tolist() == [0.5, -0.5, 0.0]
    assert metrics["rewards/rejected"].tolist() == [-1.0, 0.0, 0.0]
    assert metrics["rewards/margins"].tolist() == [1.5, -0.5, 0.0]
    assert metrics["rewards/accuracies"].tolist() == [1.0, 0.0, 0.5]  # a tie is half right
    assert metrics["logps/chosen"].tolist() == [-5.0, -7.0, -3.0]
    assert metrics["logps/rejected"].tolist() == [-9.0, -2.0, -3.0]


# ---- Pairs -------------------------------------------------------------------------------------------------

PAIRS = [
    dict(ids=[7, 8, 9], responses=[[10, 11, 2], [12, 2]]),
    dict(ids=[5], responses=[[13], [14, 15, 16, 2]]),
    dict(ids=[7, 8, 9], responses=[[10, 2], [10, 11, 2]]),  # the prompt of the first pair
]


def test_a_batch_of_pairs():
    ids, mask, T = dpo.collate_pairs(PAIRS[:2], "cpu")
    assert T == 4
    assert ids.tolist() == [
        [7, 8, 9, 10, 11, 2, 0],
        [7, 8, 9, 12, 2, 0, 0],
        [0, 0, 5, 13, 0, 0, 0],
        [0, 0, 5, 14, 15, 16, 2],
    ]
    assert mask.int().tolist() == [
        [1, 1, 1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1, 0, 0],
        [0, 0, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 1, 1, 1],
    ]
    assert [dpo.text_length(pair) for pair in PAIRS] == [6, 5, 6]


@pytest.mark.parametrize("arch", ["gpt2", "gpt_neox", "llama", "opt"])
def test_log_probabilities_of_pairs(tiny_lm, arch):
    """Padding, shared prompts and batches change nothing: those of plain transformers, text by text."""
    lm = AutoModelForCausalLM.from_pretrained(tiny_lm(arch)).eval()
    args = dpo.Args(per_device_train_batch_size=2)
    found = dpo.pair_logprobs(dpo.PairPolicy(lm), PAIRS, args, dpo.start_accelerator(args))
    for pair, row in zip(PAIRS, found):
        for response, logprob in zip(pair["responses"], row):
            logits = lm(torch.tensor([pair["ids"] + response])).logits[0].log_softmax(-1)
            start = len(pair["ids"]) - 1
            expected = sum(logits[start + t, token].item() for t, token in enumerate(response))
            assert logprob.item() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("pad", ["own", "eos"])
def test_samples_have_the_probabilities_of_the_model(tiny_lm, pad):
    """generate: the log-probabilities are those of the update, and equal random numbers give the tokens
    that generate of rloo_tldr.py gives."""
    lm = AutoModelForCausalLM.from_pretrained(tiny_lm("gpt_neox", pad)).eval()
    ids, mask, T = dpo.collate_pairs([pair | dict(responses=pair["responses"][:1]) for pair in PAIRS], "cpu")
    ids, mask = ids[:, :-T], mask[:, :-T]
    uniforms = torch.rand(3, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    tokens, logprobs = dpo.generate(lm, ids, mask, uniforms, 0.7)
    inputs = torch.cat([ids, tokens], 1), torch.cat([mask, torch.ones_like(tokens, dtype=bool)], 1)
    expected = dpo.response_logprobs(lm, *inputs, 9, 0.7)
    torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=1e-4)
    theirs, _ = rloo.generate(lm, ids, mask, uniforms[:, None], torch.tensor([-1]), 0.7)
    assert torch.equal(tokens, theirs)


# ---- TRL ---------------------------------------------------------------------------------------------------

TEXTS = [
    ("How is the weather?", " It is sunny.", " Who knows? I have not been outside today."),
    ("Name a fruit:", " An apple, or a pear.", " Stone"),
    ("Say no more. Done", ".", " and a lot more than that"),
]


def shaken(model):
    """The model with other weights, so that it differs from the reference."""
    torch.manual_seed(3)
    for p in model.parameters():
        p.data += 0.02 * torch.randn_like(p)
    return model


def test_loss_gradient_and_metrics_of_trl(tiny_lm, tmp_path):
    """The same texts, weights and reference in TRL's DPOTrainer: its tokens, loss, gradient and metrics."""
    trl = trl_1_16()
    name = tiny_lm("gpt_neox")
    tokenizer = AutoTokenizer.from_pretrained(name)
    rows = [dict(prompt=prompt, chosen=chosen, rejected=rejected) for prompt, chosen, rejected in TEXTS]
    reference = AutoModelForCausalLM.from_pretrained(name)
    policy = shaken(AutoModelForCausalLM.from_pretrained(name))
    trainer = trl.DPOTrainer(
        policy,
        reference,
        trl.DPOConfig(
            output_dir=str(tmp_path),
            beta=BETA,
            per_device_train_batch_size=len(rows),
            max_length=None,
            use_cpu=True,
            bf16=False,
            report_to="none",
            gradient_checkpointing=False,
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.model.train()
    inputs = trainer.data_collator([trainer.train_dataset[i] for i in range(len(rows))])
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    expected = [p.grad.clone() for p in policy.parameters()]
    policy.zero_grad()

    args = dpo.Args(beta=BETA, max_length=250)
    pairs, _ = dpo.load_pairs(rows, tokenizer, args)
    ref_logprobs = dpo.pair_logprobs(dpo.PairPolicy(reference), pairs, args, dpo.start_accelerator(args))
    ids, mask, T = dpo.collate_pairs(pairs, "cpu")
    logprobs = dpo.PairPolicy(policy.train())(ids, mask, T).sum(1).view(-1, 2)
    ours = dpo.dpo_loss(*logprobs.unbind(1), *ref_logprobs.unbind(1), BETA).mean()
    ours.backward()
    assert ours.item() == pytest.approx(loss.item(), abs=1e-6)
    for p, gradient in zip(policy.parameters(), expected):
        torch.testing.assert_close(p.grad, gradient, atol=1e-6, rtol=1e-4)
    for key, x in dpo.pair_metrics(logprobs, ref_logprobs, BETA).items():
        assert x.mean().item() == pytest.approx(trainer._metrics["train"][key][-1], abs=1e-4), key
