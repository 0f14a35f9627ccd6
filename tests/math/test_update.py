"""One optimizer step: micro-batches, the first ratio, the clipped gradient, the optimizer."""

import pytest
import torch
import transformers
from accelerate import Accelerator
from conftest import module_with
from math_tools import close, padded_batch

ppo = module_with("gae", "micro_batches", "check_first_ratio")


class Processes:
    """An accelerator of one of several processes. It counts the micro-batches without an exchange."""

    def __init__(self, rank=0, world=1):
        self.process_index, self.num_processes = rank, world
        self.sync_gradients = True
        self.num_without_exchange = 0

    def no_sync(self, learner):
        self.num_without_exchange += 1
        return torch.no_grad()  # any context


# ---- Micro-batches -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("world, size", [(1, 5), (2, 3), (4, 6), (1, 24), (3, 1)])
def test_micro_batches(world, size):
    """Every row of a minibatch once; of a process all its share, sorted by length, `size` rows at a time."""
    lengths = torch.randint(1, 9, (48,), generator=torch.Generator().manual_seed(0))
    minibatch = torch.randperm(48, generator=torch.Generator().manual_seed(1))[:24]
    seen = []
    for rank in range(world):
        accelerator = Processes(rank, world)
        exchanges, parts = [], []
        for part in ppo.micro_batches(minibatch, lengths, size, None, accelerator):
            exchanges.append(accelerator.sync_gradients)
            parts.append(part)
        rows = torch.cat(parts)
        assert sorted(rows.tolist()) == sorted(
            minibatch[rank * 24 // world : (rank + 1) * 24 // world].tolist()
        )
        assert lengths[rows].diff().min() >= 0
        assert {len(part) for part in parts[:-1]} <= {size} and len(parts[-1]) <= size
        assert exchanges == [False] * (len(parts) - 1) + [True]
        assert accelerator.num_without_exchange == len(parts) - 1
        seen += rows.tolist()
    assert sorted(seen) == sorted(minibatch.tolist())


def test_equal_lengths_keep_their_order():
    """So that a run can be repeated on any machine."""
    minibatch = torch.arange(40).flip(0)
    parts = ppo.micro_batches(minibatch, torch.ones(40).long(), 7, None, Processes())
    assert torch.equal(torch.cat(list(parts)), minibatch)


# ---- The first ratio ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def logprobs(tiny_lm):
    """logprobs(arch, is_bf16, temperature=1.0, size=4, extra=0): of padded_batch, `size` rows at a time.

    extra: more columns of padding on the left.
    """

    def compute(arch, is_bf16, temperature=1.0, size=4, extra=0):
        model = ppo.load_model(transformers.AutoModelForCausalLM, tiny_lm(arch)).train()
        ids, mask, _, T = padded_batch()
        ids, mask = (torch.nn.functional.pad(x, (extra, 0)) for x in (ids, mask))
        parts = []
        with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16), torch.no_grad():
            for rows in torch.arange(4).split(size):
                parts.append(ppo.response_logprobs(model, ids[rows], mask[rows], T, temperature)[0])
        return torch.cat(parts)

    return compute


@pytest.mark.parametrize("is_bf16", [False, True])
@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_a_temperature_that_is_off_by_5_percent_is_refused(logprobs, arch, is_bf16):
    """Rounding in batches of other shapes is not."""
    args = ppo.Args(dtype="bfloat16" if is_bf16 else "float32")
    old = logprobs(arch, is_bf16)
    ppo.check_first_ratio(logprobs(arch, is_bf16, size=1, extra=3) - old, args)
    for temperature in (0.95, 1.05):
        with pytest.raises(ppo.UserError, match="do not compute the same probabilities"):
            ppo.check_first_ratio(logprobs(arch, is_bf16, temperature) - old, args)


def test_rounding_of_bf16_is_not_that_of_fp32(logprobs):
    """In fp32 a gap of the size of bf16's roundings is refused."""
    gap = logprobs("gpt2", True) - logprobs("gpt2", False)
    ppo.check_first_ratio(gap, ppo.Args(dtype="bfloat16"))
    with pytest.raises(ppo.UserError):
        ppo.check_first_ratio(gap, ppo.Args(dtype="float32"))


EXACT, ROUNDED = (1e-4, 1e-3), (0.02, 0.2)


@pytest.mark.parametrize(
    "flags, limits",
    [
        (dict(dtype="float32"), EXACT),
        (dict(dtype="auto"), EXACT),  # on a CPU
        (dict(dtype="bfloat16"), ROUNDED),
        (dict(load_in_8bit=True), ROUNDED),
    ],
)
def test_limits_of_the_first_ratio(flags, limits):
    """Of the mean, and of all but one in a thousand; either sign; nan is not 1 either."""
    mean, largest = limits
    args, check = ppo.Args(**flags), ppo.check_first_ratio
    one_of_5000 = torch.zeros(5000)
    one_of_5000[7] = 5 * largest  # a single token may be off
    for gap in (torch.zeros(1), torch.full((9,), 0.9 * mean), torch.full((9,), -0.9 * mean), one_of_5000):
        check(gap, args)
    ten_of_5000 = torch.zeros(5000)
    ten_of_5000[:10] = 1.1 * largest
    for gap in (
        torch.full((9,), 1.1 * mean),
        torch.full((9,), -1.1 * mean),
        ten_of_5000,
        torch.full((3,), torch.nan),
    ):
        with pytest.raises(ppo.UserError):
            check(gap, args)


# ---- The clipped gradient ----------------------------------------------------------------------------------


def with_gradient(*gradient):
    p = torch.nn.Parameter(torch.zeros(len(gradient)))
    p.grad = torch.tensor(gradient)
    return p


@pytest.mark.parametrize("max_norm, factor", [(None, 1.0), (26.0, 1.0), (13.0, 1.0), (1.3, 0.1)])
def test_clip_gradients(max_norm, factor):
    """Two parameters with the gradients (3, 4) and 12, whose norm is 13. It is returned before clipping."""
    parameters = {"a": with_gradient(3.0, 4.0), "b": with_gradient(12.0)}
    assert ppo.clip_gradients(parameters, max_norm, Accelerator(cpu=True)) == pytest.approx(13.0)
    close(parameters["a"].grad, [3 * factor, 4 * factor], rtol=1e-4)
    close(parameters["b"].grad, [12 * factor], rtol=1e-4)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_gradient_that_is_not_finite_is_an_error(bad, max_norm):
    parameters = {"a": with_gradient(3.0), "b": with_gradient(bad, 1.0)}
    with pytest.raises(ppo.UserError, match="not finite"):
        ppo.clip_gradients(parameters, max_norm, Accelerator(cpu=True))


# ---- The optimizer -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("torch.optim.Adam", dict(lr=0.1, eps=1e-3, weight_decay=0, fused=True)),
        ("torch.optim.AdamW", dict(lr=0.1, eps=1e-3, weight_decay=0.01, fused=True)),
        ("torch.optim.SGD", dict(lr=0.1, momentum=0)),  # has no epsilon
        ("torch.optim.NAdam", dict(lr=0.1, eps=1e-3)),  # has no fused version
        ("torch.optim.Adafactor", dict(lr=0.1, eps=(None, 1e-3))),  # its epsilon is another one
    ],
)
def test_flags_reach_the_optimizer(kind, expected):
    p = with_gradient(3.0, 4.0)
    optimizer = ppo.make_optimizer(ppo.Args(optimizer=kind, learning_rate=0.1, adam_eps=1e-3), [p])
    assert type(optimizer).__name__ == kind.rpartition(".")[2]
    [group] = optimizer.param_groups
    assert {name: group[name] for name in expected} == expected
    optimizer.step()
    assert (p < 0).all()


@pytest.mark.parametrize("kind", ["torch.optim.NoSuch", "torch.tensor", "Adam", "no.such.module"])
def test_what_is_no_optimizer(kind):
    with pytest.raises(ppo.UserError, match=f"--optimizer {kind}"):
        ppo.make_optimizer(ppo.Args(optimizer=kind), [with_gradient(1.0)])
