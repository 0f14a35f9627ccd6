"""The scripts against torch's own functions: cross-entropy, KLDivLoss, Adam and AdamW."""

import naive
import pytest
import torch
import torch.nn.functional as F
from conftest import SCRIPTS, shipping
from test_kernels import close, head_case, normal


@shipping("token_logprobs")
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_log_probabilities_are_cross_entropies(k, temperature):
    """In value and in the slopes of hidden states, weights and bias."""
    hidden, weight, tokens, bias = head_case()
    ours, theirs = ([x.clone().requires_grad_() for x in (hidden, weight, bias)] for _ in range(2))
    logprobs, _ = k.token_logprobs(ours[0], ours[1], tokens, temperature, ours[2])
    loss = F.cross_entropy((F.linear(*theirs) / temperature).transpose(1, 2), tokens, reduction="none")
    close(logprobs, -loss.detach())
    logprobs.sum().backward()
    loss.sum().backward()
    for x, y in zip(ours, theirs):
        close(x.grad, -y.grad, rtol=1e-4)


@shipping("next_token_losses")
def test_next_token_losses_are_cross_entropies(k):
    """With labels of -100, in value and slope."""
    hidden, weight, labels = normal(3, 6, 4), normal(11, 4, seed=2), torch.randint(11, (3, 6), generator=torch.Generator().manual_seed(1))
    labels[0, :3], labels[2, 4:] = -100, -100
    ours, theirs = (hidden.clone().requires_grad_() for _ in range(2))
    losses, _ = k.next_token_losses(ours, weight, labels)
    loss = F.cross_entropy((theirs @ weight.T)[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
    close(losses, loss.detach())
    losses.sum().backward()
    loss.sum().backward()
    close(ours.grad, theirs.grad)


@shipping("kl_per_token", "token_logprobs")
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_mean_of_the_estimates_is_kl_div(k, estimator):
    """Weighted with the policy's probabilities of all tokens, k1 and k3 add up to torch's KLDivLoss; k2 does not, it is biased."""
    hidden, weights, V = normal(1, 1, 6).expand(1, 13, 6), [normal(13, 6, seed=seed) for seed in (1, 2)], 13
    logp, ref = (k.token_logprobs(hidden, weight, torch.arange(V)[None])[0] for weight in weights)
    theirs = torch.nn.KLDivLoss(reduction="sum", log_target=True)(ref, logp)  # its input is the second distribution of the KL
    close((logp.exp() * k.kl_per_token(logp, ref, estimator)).sum(), theirs, rtol=1e-4)
    assert theirs > 0.5 and ((logp.exp() * k.kl_per_token(logp, ref, "k2")).sum() - theirs).abs() > 0.05


def steps(optimizer, p, gradients, before=lambda t: None):
    """The parameter after each step."""
    seen = []
    for t, gradient in enumerate(gradients, 1):
        before(t)
        p.grad = torch.tensor([gradient], dtype=p.dtype)
        optimizer.step()
        seen.append(p.item())
    return seen


GRADIENTS = [0.5, -0.2, 3.0, 1e-3, 0.0, -0.7]


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("kind, decay", [("Adam", 0.0), ("AdamW", 0.01)])
def test_adam_is_that_of_the_paper(scripts, name, kind, decay):
    """The optimizer that a script makes, over six steps, with a large epsilon so that its place shows; AdamW decays by torch's 0.01."""
    script, p = scripts[name], torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    args = script.Args(optimizer=f"torch.optim.{kind}", learning_rate=0.1, adam_eps=1e-2)
    optimizer, _ = script.make_optimizer(args, [p], 10)
    close(steps(optimizer, p, GRADIENTS), naive.adam(1.0, GRADIENTS, 0.1, 1e-2, decay=decay), rtol=1e-9)


@shipping("token_logprobs")
def test_tensorflows_adam_is_torchs_with_another_epsilon(k):
    """Trick 31: with eps / sqrt(1 - beta2^t) set before each step, torch's Adam is TensorFlow's (Kingma and Ba 2015, end of section 2)."""
    p, eps = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64)), 1e-2
    optimizer, _ = k.make_optimizer(k.Args(optimizer="torch.optim.Adam", learning_rate=0.1, adam_eps=eps), [p], 10)
    tensorflows = naive.adam(1.0, GRADIENTS, 0.1, eps, tensorflow=True)
    ours = steps(optimizer, p, GRADIENTS, lambda t: optimizer.param_groups[0].update(eps=eps / (1 - 0.999**t) ** 0.5))
    close(ours, tensorflows, rtol=1e-9)
    assert abs(naive.adam(1.0, GRADIENTS, 0.1, eps)[0] - tensorflows[0]) > 1e-2
