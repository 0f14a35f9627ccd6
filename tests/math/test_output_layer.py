"""From hidden states to log-probabilities: token_logprobs and next_token_losses.

The references are naive.py, and torch on all logits at once, in float64.
"""

import copy
import math

import naive
import pytest
import torch
import torch.nn.functional as F
from conftest import module_with
from math_tools import INF, close, gradients, head_case, normal, reference_logprobs
from torch.utils._python_dispatch import TorchDispatchMode

ppo = module_with("token_logprobs", "ChunkedLogprobs")
sft = module_with("next_token_losses")
CHUNK = 128  # rows


def our_logprobs(tokens, temperature=1.0):
    """token_logprobs as a function of hidden states, weight and bias. -> only the log-probabilities"""
    return lambda hidden, weight, bias=None: ppo.token_logprobs(hidden, weight, tokens, temperature, bias)[0]


def exact_logprobs(tokens, temperature=1.0):
    """The same from all logits in float64."""
    return lambda hidden, weight, bias=None: reference_logprobs(hidden, weight, tokens, temperature, bias)[0]


# ---- Values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.5])
@pytest.mark.parametrize("with_bias", [False, True])
def test_token_logprobs_agree_with_naive(temperature, with_bias):
    hidden, weight, tokens, bias = head_case()
    if not with_bias:
        bias = None
    ours = ppo.token_logprobs(hidden, weight, tokens, temperature, bias)
    bias_list = bias.tolist() if with_bias else None
    theirs = naive.token_logprobs(
        hidden.tolist(), weight.tolist(), tokens.tolist(), temperature, bias_list
    )  # logprobs, entropies
    for x, y in zip(ours, theirs):
        assert x.dtype is torch.float32
        close(x, y)


def test_token_logprobs_of_one_token_and_one_word():
    logprobs, entropies = ppo.token_logprobs(normal(1, 1, 2), normal(1, 2), torch.zeros(1, 1).long())
    close(logprobs, [[0.0]])
    close(entropies, [[0.0]])


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4)])
def test_token_logprobs_take_any_shape(shape):
    """A tensor of tokens of any shape gives log-probabilities of this shape."""
    hidden, weight = normal(*shape, 6), normal(11, 6, seed=1)
    tokens = torch.randint(11, shape, generator=torch.Generator().manual_seed(2))
    logprobs, entropies = ppo.token_logprobs(hidden, weight, tokens)
    exact, exact_entropies = reference_logprobs(hidden.view(1, -1, 6), weight, tokens.view(1, -1))
    close(logprobs, exact.view(shape))
    close(entropies, exact_entropies.view(shape))


@pytest.mark.parametrize("V, N, atol", [(50_257, 200, 5e-5), (1_500, 128, 1e-5), (769, 1025, 1e-5)])
def test_token_logprobs_in_several_chunks(V, N, atol):
    """Chunks have 128 rows: here one full chunk, one and a part, and eight and a single row.

    The tolerance is that of fp32 sums over V numbers.
    """
    hidden, weight, tokens, bias = head_case(1, N, 2, V)
    tokens[0, 0], tokens[0, -1] = 0, V - 1
    ours = ppo.token_logprobs(hidden, weight, tokens, 0.7, bias)
    exact = reference_logprobs(hidden, weight, tokens, 0.7, bias)
    for x, y in zip(ours, exact):
        close(x, y, rtol=0, atol=atol)


def test_token_logprobs_with_impossible_tokens():
    """A bias of -inf forbids a token. Neither the entropies nor the gradients become nan."""
    hidden, weight, tokens, bias = head_case()
    bias[4] = -INF
    tokens[tokens == 4] = 5
    hidden.requires_grad_()
    logprobs, entropies = ppo.token_logprobs(hidden, weight, tokens, 1.0, bias)
    possible = [v for v in range(11) if v != 4]
    renumbered = tokens - (tokens > 4).long()
    exact = reference_logprobs(hidden, weight[possible], renumbered, 1.0, bias[possible])
    close(logprobs, exact[0])
    close(entropies, exact[1])
    logprobs.sum().backward()
    assert hidden.grad.isfinite().all()


def test_token_logprobs_of_logits_far_apart():
    """Logits of 0 and 1000: log-probabilities of -1000 and 0, and entropies of 0."""
    weight, tokens = torch.tensor([[0.0], [1000.0]]), torch.tensor([[0, 1]])
    logprobs, entropies = ppo.token_logprobs(torch.ones(1, 2, 1), weight, tokens)
    close(logprobs, [[-1000.0, 0.0]])
    close(entropies, [[0.0, 0.0]])


# ---- Gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("V, N, atol", [(11, 12, 1e-6), (50_257, 160, 2e-4), (1_500, 2_100, 2e-4)])
def test_token_logprobs_gradients_agree_with_autograd(V, N, atol, temperature):
    """In hidden states, weight and bias, in one chunk and in many."""
    hidden, weight, tokens, bias = head_case(1, N, 3, V)
    ours = gradients(our_logprobs(tokens, temperature), hidden, weight, bias)
    inputs = hidden.double(), weight.double(), bias.double()
    exact = gradients(exact_logprobs(tokens, temperature), *inputs)
    for x, y in zip(ours, exact):
        close(x, y, rtol=1e-4, atol=atol)


def test_token_logprobs_gradients_agree_with_finite_differences():
    """Each number moved up and down a little, in naive.py."""
    hidden, weight, tokens, bias = head_case(1, 2, 3, 5)
    factors = normal(1, 2, seed=9).tolist()[0]
    inputs = [hidden.double().tolist(), weight.double().tolist(), bias.double().tolist()]

    def total(hidden, weight, bias):
        logprobs, _ = naive.token_logprobs(hidden, weight, tokens.tolist(), 0.7, bias)
        return sum(factor * logprob for factor, logprob in zip(factors, logprobs[0]))

    def difference(which, *place):
        ends = []
        for step in (1e-5, -1e-5):
            moved = copy.deepcopy(inputs)
            numbers = moved[which]
            for i in place[:-1]:
                numbers = numbers[i]
            numbers[place[-1]] += step
            ends.append(total(*moved))
        return (ends[0] - ends[1]) / 2e-5

    d_hidden, d_weight, d_bias = gradients(our_logprobs(tokens, 0.7), hidden, weight, bias)
    close(d_hidden, [[[difference(0, 0, t, i) for i in range(3)] for t in range(2)]], rtol=1e-4, atol=1e-5)
    close(d_weight, [[difference(1, v, i) for i in range(3)] for v in range(5)], rtol=1e-4, atol=1e-5)
    close(d_bias, [difference(2, v) for v in range(5)], rtol=1e-4, atol=1e-5)


def test_token_logprobs_with_a_frozen_output_layer():
    """LoRA freezes the output layer. Then only the hidden states have a gradient."""
    hidden, weight, tokens, _ = head_case()
    ours = gradients(lambda h: our_logprobs(tokens)(h, weight), hidden)
    exact = gradients(lambda h: exact_logprobs(tokens)(h, weight), hidden.double())
    close(ours[0], exact[0], rtol=1e-4)
    assert weight.grad is None
    with torch.no_grad():
        assert not ppo.token_logprobs(hidden, weight, tokens)[0].requires_grad


def test_only_log_probabilities_have_a_gradient():
    hidden, weight, tokens, _ = head_case()
    logprobs, entropies = ppo.token_logprobs(hidden.requires_grad_(), weight, tokens)
    assert logprobs.requires_grad
    assert not entropies.requires_grad


def test_gradients_of_large_logits():
    """All logits near -100, as many models have them. The gradients must not lose digits to their size."""
    hidden, weight, tokens, _ = head_case(4, 16, 64, 2_000)
    hidden[..., 0], weight[:, 0] = 1, -100
    ours = gradients(our_logprobs(tokens), hidden, weight)
    exact = gradients(exact_logprobs(tokens), hidden, weight)
    for x, y in zip(ours, exact):
        assert (x.double() - y).norm() < 2e-5 * y.norm()


def test_token_logprobs_of_no_token():
    """A micro-batch without a valid token has gradients of 0."""
    hidden, weight, _, bias = head_case(1, 1, 16, 1_600)
    no_tokens = torch.zeros(1, 0, dtype=torch.long)
    logprobs, entropies = ppo.token_logprobs(hidden[:, :0], weight, no_tokens, 1.0, bias)
    assert logprobs.shape == entropies.shape == (1, 0)
    for x in gradients(lambda h, w, b: our_logprobs(no_tokens)(h[:, :0], w, b), hidden, weight, bias):
        assert torch.equal(x, torch.zeros_like(x))


# ---- Chunks and memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_kept", [0, 1, 2, 3])
def test_chunks_that_are_kept_change_no_gradient(num_kept, monkeypatch):
    """Of three chunks the first ones are kept for the backward pass, as many as fit into MAX_KEPT numbers.

    The others are computed again. The gradients are equal to the bit, and those of float64.
    """
    V = 2_000
    hidden, weight, tokens, bias = head_case(1, 2 * CHUNK + 40, 4, V)
    usual = gradients(our_logprobs(tokens, 0.7), hidden, weight, bias)
    monkeypatch.setattr(ppo.ChunkedLogprobs, "MAX_KEPT", num_kept * CHUNK * V)
    sizes = []

    def pack(x):
        sizes.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        ours = gradients(our_logprobs(tokens, 0.7), hidden, weight, bias)
    kept = [size for size in sizes if size >= 40 * V]  # smaller ones: hidden states, weight, tokens, bias
    assert kept == [CHUNK * V, CHUNK * V, 40 * V][:num_kept]
    exact = gradients(exact_logprobs(tokens, 0.7), hidden.double(), weight.double(), bias.double())
    for x, y, z in zip(ours, usual, exact):
        assert torch.equal(x, y)
        close(x, z, rtol=1e-4, atol=1e-4)


class LargestResult(TorchDispatchMode):
    """Remembers the size of the largest tensor that an operation returned."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        outputs = result if isinstance(result, tuple | list) else [result]
        for x in outputs:
            if isinstance(x, torch.Tensor):
                self.size = max(self.size, x.numel())
        return result


def test_token_logprobs_never_hold_all_logits():
    """Not in the forward pass, and not in the backward pass."""
    V, N = 2**14, 5 * CHUNK
    hidden, weight, tokens, _ = head_case(1, N, 2, V)
    hidden.requires_grad_()
    with LargestResult() as largest:
        logprobs, _ = ppo.token_logprobs(hidden, weight, tokens)
        logprobs.sum().backward()
    assert largest.size == CHUNK * V


# ---- bf16 --------------------------------------------------------------------------------------------------


def rounded(*tensors):
    """The numbers that bf16 makes of these."""
    return [x.bfloat16().float() for x in tensors]


@pytest.mark.parametrize("with_bias", [False, True])
def test_token_logprobs_under_autocast(with_bias):
    """Logits are rounded to bf16, so log-probabilities are off by twice the rounding of the largest logit.

    Everything after the logits is fp32.
    """
    hidden, weight, tokens, bias = head_case(4, 8, 16, 500)
    hidden, weight, bias = rounded(hidden, weight, bias)
    if not with_bias:
        bias = None
    largest = (hidden @ weight.T).abs().max().item() + 4
    exact = reference_logprobs(hidden, weight, tokens, 1.0, bias)
    with torch.autocast("cpu", torch.bfloat16):
        ours = ppo.token_logprobs(hidden, weight, tokens, 1.0, bias)
        mixed = ppo.token_logprobs(hidden.bfloat16(), weight, tokens, 1.0, bias)
    for x, y, z in zip(ours, mixed, exact):
        assert x.dtype is torch.float32
        assert torch.equal(x, y)
        close(x, z, rtol=0, atol=2 * largest * 2**-8)


def test_gradients_under_autocast():
    """fp32, and within a few roundings of bf16, also where three chunks add up."""
    hidden, weight, tokens, bias = head_case(1, 2 * CHUNK + 17, 16, 500)
    hidden, weight, bias = rounded(hidden, weight, bias)
    with torch.autocast("cpu", torch.bfloat16):
        ours = gradients(our_logprobs(tokens), hidden, weight, bias)
    exact = gradients(exact_logprobs(tokens), hidden.double(), weight.double(), bias.double())
    for x, y in zip(ours, exact):
        assert x.dtype is torch.float32
        close(x, y, rtol=0, atol=0.02 * y.abs().max().item())


def test_token_logprobs_under_autocast_sum_in_fp32():
    """Over 4096 equal logits the answer is -log 4096. A sum in bf16 would stop growing at 256."""
    with torch.autocast("cpu", torch.bfloat16):
        logprobs, entropies = ppo.token_logprobs(
            torch.zeros(1, 2), torch.zeros(4096, 2), torch.ones(1).long()
        )
    close(logprobs, [-math.log(4096)])
    close(entropies, [math.log(4096)])


@pytest.mark.parametrize("with_bias", [False, True])
def test_logits_are_never_rounded_to_bf16(with_bias):
    """Logits near -110, as GPT-2's are: with operands in bf16, logits and log-probabilities are fp32."""
    hidden, weight, tokens, _ = head_case(1, 20, 16, 300)
    hidden, weight = rounded(hidden, weight)
    hidden[..., 0], weight[:, 0] = 11.0, -10.0  # adds -110 to each logit
    bias = normal(300, seed=9) if with_bias else None
    logits = hidden.double() @ weight.double().T  # [1, 20, V]
    if with_bias:
        logits = logits + bias.double()
    expected = (logits / 0.7).log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    rounded_logits = (logits.bfloat16().double() / 0.7).log_softmax(-1)
    wrong = rounded_logits.gather(-1, tokens[..., None]).squeeze(-1)
    with torch.autocast("cpu", torch.bfloat16):
        close(ppo.fp32_logits(hidden[0], weight, bias), logits[0], rtol=0, atol=1e-4)
        logprobs, _ = ppo.token_logprobs(hidden, weight, tokens, 0.7, bias)
        losses, _ = sft.next_token_losses(hidden, weight, F.pad(tokens[:, :-1], (1, 0)), bias)
    close(logprobs, expected, rtol=0, atol=1e-4)
    close(
        losses,
        -logits.log_softmax(-1)[:, :-1].gather(-1, tokens[:, :-1, None]).squeeze(-1),
        rtol=0,
        atol=1e-4,
    )
    assert (wrong - expected).abs().max() > 0.05  # what rounding would do


# ---- Losses of fine-tuning ---------------------------------------------------------------------------------


@pytest.mark.parametrize("with_bias", [False, True])
def test_next_token_losses_agree_with_naive(with_bias):
    hidden, weight, bias = normal(2, 4, 3), normal(5, 3, seed=1), normal(5, seed=2)
    labels = [[3, 1, -100, 4], [-100, -100, 0, 2]]
    hidden[1, 0] = math.nan  # no label depends on it
    losses, correct = sft.next_token_losses(hidden, weight, torch.tensor(labels), bias if with_bias else None)
    assert losses.dtype is torch.float32
    assert correct.dtype is torch.bool
    logits = hidden.double() @ weight.double().T
    if with_bias:
        logits = logits + bias.double()
    for b in range(2):
        for t in range(1, 4):
            label = labels[b][t]
            logprobs = naive.log_softmax(logits[b, t - 1].tolist())
            has_label = label != -100
            close(losses[b, t - 1], -logprobs[label] if has_label else 0.0)
            assert correct[b, t - 1].item() == (has_label and logprobs[label] == max(logprobs))


@pytest.mark.parametrize("num_kept", [0, 1, 4])
def test_next_token_losses_are_cross_entropies(num_kept, monkeypatch):
    """Losses and gradients of four chunks against torch's in float64, and none where there is no label.

    All chunks are kept for the backward pass, or only some of them.
    """
    V = 2_500
    monkeypatch.setattr(sft.ChunkedCrossEntropy, "MAX_KEPT", num_kept * CHUNK * V)
    hidden, weight, bias = normal(2, 201, 2), normal(V, 2, seed=1), normal(V, seed=2)
    labels = torch.randint(V, hidden.shape[:2], generator=torch.Generator().manual_seed(3))
    labels[:, 5:8] = -100

    def ours(hidden, weight, bias):
        return sft.next_token_losses(hidden, weight, labels, bias)[0]

    def theirs(hidden, weight, bias):
        logits = F.linear(hidden, weight, bias)[:, :-1].transpose(1, 2)
        return F.cross_entropy(logits, labels[:, 1:], reduction="none")

    inputs = hidden, weight, bias
    exact_inputs = hidden.double(), weight.double(), bias.double()
    close(ours(*inputs), theirs(*exact_inputs), atol=1e-4)
    found = gradients(ours, *inputs)
    for x, y in zip(found, gradients(theirs, *exact_inputs)):
        close(x, y, rtol=1e-4, atol=1e-4)
    assert not found[0][:, 4:7].any()


def test_next_token_losses_of_no_label():
    """A micro-batch without a label has gradients of 0."""
    labels = torch.full((2, 5), -100)
    for x in gradients(lambda h, w: sft.next_token_losses(h, w, labels)[0], normal(2, 5, 3), normal(7, 3)):
        assert torch.equal(x, torch.zeros_like(x))


def test_next_token_losses_under_autocast():
    """fp32 losses and gradients, within a few roundings of bf16."""
    hidden, weight = rounded(normal(2, 150, 16), normal(500, 16, seed=1))
    labels = torch.randint(500, (2, 150), generator=torch.Generator().manual_seed(2))
    with torch.autocast("cpu", torch.bfloat16):
        ours = gradients(lambda h, w: sft.next_token_losses(h, w, labels)[0], hidden, weight)
    inputs = hidden[:, :-1].double(), weight.double()
    exact = gradients(lambda h, w: -exact_logprobs(labels[:, 1:])(h, w), *inputs)
    close(ours[0][:, :-1], exact[0], rtol=0, atol=0.02 * exact[0].abs().max().item())
    close(ours[1], exact[1], rtol=0, atol=0.02 * exact[1].abs().max().item())
    assert ours[0].dtype is ours[1].dtype is torch.float32
