"""From hidden states to log-probabilities and entropies: token_logprobs.

The reference is plain autograd on all logits at once, in float64.
"""

import pytest
import torch
from math_tools import close, gradients, head_case, reference_logprobs
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import ppo_sentiment as ppo

CHUNK = 128  # rows
both_temperatures = pytest.mark.parametrize("temperature", [0.7, 1.0])


def ours(tokens, temperature=1.0):
    """Log-probabilities and entropies [2, ...] as a function of hidden states, weight and bias."""

    def function(hidden, weight, bias=None):
        found = ppo.token_logprobs(hidden.flatten(0, 1), weight, tokens.flatten(), temperature, bias)
        return torch.stack(found).view(2, *tokens.shape)

    return function


def exact(tokens, temperature=1.0):
    """The same from all logits, in float64."""
    return lambda h, w, b=None: torch.stack(reference_logprobs(h, w, tokens, temperature, b))


def doubles(*tensors):
    return [x.double() for x in tensors]


# ---- Values and gradients ----------------------------------------------------------------------------------


@both_temperatures
@pytest.mark.parametrize("N", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK - 1, 3 * CHUNK])
def test_values_and_gradients_agree_with_autograd(N, temperature):
    """Of log-probabilities and entropies, in hidden states, weight and bias."""
    hidden, weight, tokens, bias = head_case(1, N, 3, 11)
    chunked, at_once = ours(tokens, temperature), exact(tokens, temperature)
    in_float64 = doubles(hidden, weight, bias)
    found = chunked(hidden, weight, bias)
    assert found.dtype is torch.float32
    close(found, at_once(*in_float64))
    for x, y in zip(gradients(chunked, hidden, weight, bias), gradients(at_once, *in_float64)):
        close(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("V", [700, 2**18])  # the second chunk of 128 rows is kept, or computed again
def test_the_entropies_alone_have_their_gradient(V):
    hidden, weight, tokens, _ = head_case(1, CHUNK + 2, 3, V)
    found = gradients(lambda *inputs: ours(tokens)(*inputs)[1], hidden, weight)
    for x, y in zip(found, gradients(lambda *inputs: exact(tokens)(*inputs)[1], *doubles(hidden, weight))):
        assert (x.double() - y).norm() < 1e-4 * y.norm()


# ---- Memory ------------------------------------------------------------------------------------------------


class Results(TorchDispatchMode):
    """The sizes of all tensors that operations return, and how many of one size are in memory at once."""

    def __init__(self, size=None):
        super().__init__()
        self.sizes, self.size, self.living, self.peak = [0], size, {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        outputs = result if isinstance(result, tuple | list) else [result]
        outputs = [x for x in outputs if isinstance(x, torch.Tensor)]
        self.sizes += [x.numel() for x in outputs]
        self.living |= {
            x.data_ptr(): StorageWeakRef(x.untyped_storage()) for x in outputs if x.numel() == self.size
        }
        self.living = {key: storage for key, storage in self.living.items() if not storage.expired()}
        self.peak = max(self.peak, len(self.living))
        return result


def test_at_most_2_to_25_numbers_are_kept():
    """For the backward pass: of chunks of 2**24 logits two, each of them once."""
    V, N = 2**17, 2 * CHUNK + 2
    hidden, weight, tokens = torch.ones(N, 1, requires_grad=True), torch.zeros(V, 1), torch.zeros(N).long()
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.setdefault(x.data_ptr(), x), lambda x: x):
        ppo.token_logprobs(hidden, weight, tokens)
    assert [x.numel() for x in kept.values() if x.numel() > V] == [2**24, 2**24]


def test_a_chunk_that_is_computed_again_is_freed_before_the_next():
    """With a loss that has no entropies."""
    V, N = 2**16, 8 * CHUNK  # the first 4 chunks are kept
    hidden, weight, tokens = torch.ones(N, 1, requires_grad=True), torch.zeros(V, 1), torch.zeros(N).long()
    with Results(CHUNK * V) as results:
        ppo.token_logprobs(hidden, weight, tokens)[0].sum().backward()
    assert 4 < results.peak <= 4 + 3  # logits or log-probabilities, and gradients


def test_token_logprobs_never_hold_all_logits():
    """Not in the forward pass, and not in the backward pass."""
    V, N = 2**14, 5 * CHUNK
    hidden, weight, tokens, _ = head_case(1, N, 2, V)
    hidden.requires_grad_()
    with Results() as results:
        logprobs, entropies = ppo.token_logprobs(hidden[0], weight, tokens[0])
        (logprobs + entropies).sum().backward()
    assert max(results.sizes) == CHUNK * V


# ---- bf16 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_bias", [False, True])
def test_logits_are_never_rounded_to_bf16(with_bias):
    """Autocast changes no bit, neither of values nor of gradients. Logits near -110 would show it."""
    hidden, weight, tokens, bias = head_case(1, 150, 16, 300)
    hidden[..., 0], weight[:, 0] = 11.0, -10.0  # adds -110 to each logit
    hidden = hidden.bfloat16()
    inputs = (hidden.float(), weight, bias) if with_bias else (hidden.float(), weight)

    def in_autocast(*inputs):
        with torch.autocast("cpu", torch.bfloat16):
            logits = ppo.token_logits(inputs[0][0], inputs[1], 0.7, *inputs[2:])
            return ours(tokens, 0.7)(inputs[0].bfloat16(), *inputs[1:]), logits

    found, logits = in_autocast(*inputs)
    close(found, exact(tokens, 0.7)(*inputs), rtol=0, atol=1e-4)
    close(logits.log_softmax(-1).gather(1, tokens[0, :, None])[:, 0], found[0, 0], rtol=0, atol=1e-4)
    expected = gradients(ours(tokens, 0.7), *inputs)
    expected[0] = expected[0].bfloat16()  # of the hidden states, which are in bf16
    for x, y in zip(gradients(lambda *args: in_autocast(*args)[0], *inputs), expected):
        assert x.dtype is torch.float32 and torch.equal(x, y.float())
