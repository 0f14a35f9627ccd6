"""The loss of dpo_tldr.py in plain Python, in print and in TRL's DPOTrainer, and the batches it gets."""

import importlib.util
import math
import os
import subprocess
import sys

import pytest
import torch
from conftest import module_with
from math_tools import normal
from transformers import AutoModelForCausalLM, AutoTokenizer

dpo = module_with("dpo_loss")
BETA = 0.3


def plain_loss(chosen, rejected, ref_chosen, ref_rejected, beta, label_smoothing=0.0):
    """The loss of one pair, in plain Python (Rafailov et al. 2023, eq. 7; Mitchell 2023, eq. 3)."""
    difference = beta * ((chosen - ref_chosen) - (rejected - ref_rejected))
    right = math.log(1 + math.exp(-difference))
    wrong = math.log(1 + math.exp(difference))
    return (1 - label_smoothing) * right + label_smoothing * wrong


def logprobs_of_pairs(count=7):
    """Four columns of log-probabilities, in fp64, that require gradients."""
    columns = [-20 - 5 * normal(count, seed=seed).double() for seed in range(4)]
    return [column.requires_grad_() for column in columns]


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_the_loss_and_its_gradient_in_plain_python(label_smoothing):
    columns = logprobs_of_pairs()
    losses = dpo.dpo_loss(*columns, BETA, label_smoothing)
    rows = list(zip(*[column.tolist() for column in columns]))
    expected = [plain_loss(*row, BETA, label_smoothing) for row in rows]
    assert losses.tolist() == pytest.approx(expected, abs=1e-9)
    losses.sum().backward()
    step = 1e-6
    for column in range(4):
        for i, row in enumerate(rows):
            up, down = list(row), list(row)
            up[column] += step
            down[column] -= step
            slope = plain_loss(*up, BETA, label_smoothing) - plain_loss(*down, BETA, label_smoothing)
            assert columns[column].grad[i].item() == pytest.approx(slope / (2 * step), abs=1e-6)


def test_the_gradient_has_the_published_form():
    """-beta * sigmoid(score of the rejected - score of the chosen) (Rafailov et al. 2023, section 4)."""
    chosen, rejected, ref_chosen, ref_rejected = logprobs_of_pairs()
    dpo.dpo_loss(chosen, rejected, ref_chosen, ref_rejected, BETA).sum().backward()
    weight = torch.sigmoid(BETA * ((rejected - ref_rejected) - (chosen - ref_chosen)))
    torch.testing.assert_close(chosen.grad, -BETA * weight)
    torch.testing.assert_close(rejected.grad, BETA * weight)


def test_values_of_torchtune():
    """The inputs and the expected losses of torchtune's own test of its DPOLoss."""
    columns = [torch.tensor([-0.5, -10.0, -1.0]), torch.tensor([-0.1, -30.0, -21.0])]
    columns += [torch.tensor([-0.5, -10.1, -0.1]), torch.tensor([-0.1, -20.1, -0.1])]
    losses = dpo.dpo_loss(*columns, beta=0.1, label_smoothing=0.0)
    # The differences of log-ratios are 0, 10 and 20.
    expected = [math.log(2), math.log(1 + math.exp(-1.0)), math.log(1 + math.exp(-2.0))]
    assert losses.tolist() == pytest.approx(expected, abs=1e-6)


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
    assert metrics["rewards/accuracies"].tolist() == [1.0, 0.0, 0.0]  # a tie is not right, as in TRL
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
    """sample_texts: the log-probabilities are those of the update, and equal random numbers give the tokens
    that generate_groups of rloo_tldr.py gives."""
    lm = AutoModelForCausalLM.from_pretrained(tiny_lm("gpt_neox", pad)).eval()
    ids, mask, T = dpo.collate_pairs([pair | dict(responses=pair["responses"][:1]) for pair in PAIRS], "cpu")
    ids, mask = ids[:, :-T], mask[:, :-T]
    uniforms = torch.rand(3, 9, generator=torch.Generator().manual_seed(2))
    tokens, logprobs = dpo.sample_texts(lm, ids, mask, uniforms, 0.7)
    inputs = torch.cat([ids, tokens], 1), torch.cat([mask, torch.ones_like(tokens, dtype=bool)], 1)
    expected = dpo.logprobs_of_tokens(lm, *inputs, 9, 0.7)
    torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=1e-4)
    rloo = module_with("generate_groups")
    theirs, _ = rloo.generate_groups(lm, ids, mask, uniforms[:, None], torch.tensor([-1]), 0.7)
    assert torch.equal(tokens, theirs)


# ---- TRL ---------------------------------------------------------------------------------------------------

TRLS_SIDE = """
import sys, torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

model, folder, beta = sys.argv[1], sys.argv[2], float(sys.argv[3])
rows, start = torch.load(folder + "/in.pt")
policy = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
args = DPOConfig(
    output_dir=folder + "/trl", beta=beta, per_device_train_batch_size=len(rows), max_length=None,
    use_cpu=True, bf16=False, report_to="none", gradient_checkpointing=False,
)
tokenizer = AutoTokenizer.from_pretrained(model)
data = Dataset.from_list(rows)
trainer = DPOTrainer(policy, reference, args, train_dataset=data, processing_class=tokenizer)
inputs = trainer.data_collator([trainer.train_dataset[i] for i in range(len(rows))])
trainer.model.train()
loss = trainer.compute_loss(trainer.model, inputs)
loss.backward()
gradients = {name: p.grad for name, p in trainer.model.named_parameters()}
metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
torch.save((loss.detach(), gradients, metrics), folder + "/out.pt")
"""
TEXTS = [
    ("How is the weather?", " It is sunny.", " Who knows? I have not been outside today."),
    ("Name a fruit:", " An apple, or a pear.", " Stone"),
    ("Say no more. Done", ".", " and a lot more than that"),
]


def trl_python():
    """A Python that has TRL 1.x, for which TRL1_PYTHON is the name."""
    python = os.environ.get("TRL1_PYTHON", sys.executable)
    if python == sys.executable and importlib.util.find_spec("trl") is None:
        pytest.skip("TRL is not installed: name a Python that has trl 1.16 in TRL1_PYTHON")
    ask = "from importlib.metadata import version; print(version('trl'))"
    answer = subprocess.run([python, "-c", ask], capture_output=True, text=True).stdout.strip()
    if not answer.startswith("1."):
        pytest.skip(f"{python} has no trl 1.x; it has {answer or 'none'}")
    return python


def moved(folder, name):
    """A copy of a model with other weights, so that it differs from the reference. -> its folder"""
    model = AutoModelForCausalLM.from_pretrained(name)
    torch.manual_seed(3)
    for p in model.parameters():
        p.data += 0.02 * torch.randn_like(p)
    model.save_pretrained(folder / "start")
    return str(folder / "start")


def test_loss_gradient_and_metrics_of_trl(tiny_lm, tmp_path):
    """The same texts, weights and reference in TRL's DPOTrainer: its tokens, loss, gradient and metrics."""
    python, name = trl_python(), tiny_lm("gpt_neox")
    rows = [dict(prompt=prompt, chosen=chosen, rejected=rejected) for prompt, chosen, rejected in TEXTS]
    start = moved(tmp_path, name)
    torch.save((rows, start), tmp_path / "in.pt")
    command = [python, "-c", TRLS_SIDE, name, tmp_path, str(BETA)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    loss, gradients, metrics = torch.load(tmp_path / "out.pt")

    tokenizer = AutoTokenizer.from_pretrained(name)
    args = dpo.Args(beta=BETA, max_length=250)
    pairs, _ = dpo.load_pairs(rows, tokenizer, args)
    accelerator = dpo.start_accelerator(args)
    reference, policy = [AutoModelForCausalLM.from_pretrained(x) for x in (name, start)]
    ref_logprobs = dpo.pair_logprobs(dpo.Policy(reference), pairs, args, accelerator)
    ids, mask, T = dpo.collate_pairs(pairs, "cpu")
    logprobs = dpo.Policy(policy.train())(ids, mask, T, 1.0)[0].sum(1).view(-1, 2)
    columns = *logprobs.unbind(1), *ref_logprobs.unbind(1)
    ours = dpo.dpo_loss(*columns, BETA).mean()
    ours.backward()
    assert ours.item() == pytest.approx(loss.item(), abs=1e-6)
    for key, p in policy.named_parameters():
        torch.testing.assert_close(p.grad, gradients[key], atol=1e-6, rtol=1e-4)
    for key, x in dpo.pair_metrics(logprobs, ref_logprobs, BETA).items():
        assert x.mean().item() == pytest.approx(metrics[key], abs=1e-4), key
