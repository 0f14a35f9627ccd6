"""The scripts against torch's KLDivLoss, and the optimizers that they make against the papers of Adam."""

import naive
import pytest
import torch
from conftest import module_with
from math_tools import close, normal

rloo = module_with("kl_per_token", "token_logprobs", "make_optimizer")
GRADIENTS = [0.5, -0.2, 3.0, 1e-3, 0.0, -0.7]


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_mean_of_the_estimates_is_kl_div(estimator):
    """Weighted with the probabilities of all tokens, k1 and k3 add up to the KL. k2 is biased."""
    V = 13
    hidden = normal(1, 1, 6).expand(1, V, 6)
    logprobs, _ = rloo.token_logprobs(hidden, normal(V, 6, seed=1), torch.arange(V)[None])
    ref_logprobs, _ = rloo.token_logprobs(hidden, normal(V, 6, seed=2), torch.arange(V)[None])
    kl = torch.nn.KLDivLoss(reduction="sum", log_target=True)(ref_logprobs, logprobs)
    assert kl > 0.5

    def mean(estimator):
        return (logprobs.exp() * rloo.kl_per_token(logprobs, ref_logprobs, estimator)).sum()

    close(mean(estimator), kl, rtol=1e-4)
    assert (mean("k2") - kl).abs() > 0.05


def values_of(optimizer, p, before_step=None):
    """The parameter after each step with one of GRADIENTS."""
    values = []
    for t, gradient in enumerate(GRADIENTS, 1):
        if before_step is not None:
            before_step(t)
        p.grad = torch.tensor([gradient], dtype=p.dtype)
        optimizer.step()
        values.append(p.item())
    return values


def one_parameter():
    return torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))


@pytest.mark.parametrize("kind, decay", [("Adam", 0.0), ("AdamW", 0.01)])
def test_adam_is_that_of_the_paper(kind, decay):
    """Over six steps, with an epsilon so large that its place in the formula shows."""
    p = one_parameter()
    args = rloo.Args(optimizer=f"torch.optim.{kind}", learning_rate=0.1, adam_eps=1e-2)
    optimizer = rloo.make_optimizer(args, {"p": p})
    close(values_of(optimizer, p), naive.adam(1.0, GRADIENTS, 0.1, 1e-2, decay=decay), rtol=1e-9)


def test_tensorflows_adam_is_torchs_with_another_epsilon():
    """Trick 31: eps / sqrt(1 - beta2^t), set before each step (Kingma and Ba 2015, end of section 2)."""
    p, eps = one_parameter(), 1e-2
    args = rloo.Args(optimizer="torch.optim.Adam", learning_rate=0.1, adam_eps=eps)
    optimizer = rloo.make_optimizer(args, {"p": p})

    def set_epsilon(t):
        optimizer.param_groups[0]["eps"] = eps / (1 - 0.999**t) ** 0.5

    tensorflows = naive.adam(1.0, GRADIENTS, 0.1, eps, tensorflow=True)
    close(values_of(optimizer, p, set_epsilon), tensorflows, rtol=1e-9)
    assert abs(naive.adam(1.0, GRADIENTS, 0.1, eps)[0] - tensorflows[0]) > 1e-2
