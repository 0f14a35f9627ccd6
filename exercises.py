"""Write eight functions of RLHF yourself, and have them checked.

    python exercises.py          # the list
    python exercises.py gae      # the first time: writes my_gae.py, which says what to compute
    python exercises.py gae      # then: checks your function

Your function is compared with the papers' formula in plain Python (tests/math/naive.py), on random inputs. If
it is wrong in the same way as a common mistake, you are told which one. The solutions are in the scripts.
"""

import argparse
import ast
import functools
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent
sys.path.append(str(ROOT / "tests/math"))
import naive  # noqa: E402

NUM_DRAWS = 20  # random inputs per check


@dataclass
class Exercise:
    """A function to write."""

    script: str  # that has the solution
    draw: Callable  # random generator -> inputs of the function
    formula: Callable  # the same inputs -> what the function should return, as lists
    mistakes: list  # of (what it is, old text, new text): common mistakes, as changes of the solution
    hint: str  # what the reader needs to know besides the docstring


# ---- Inputs ------------------------------------------------------------------------------------------------


def normal(generator, *shape):
    return torch.randn(shape, generator=generator)


def draw_lengths(generator, rows, most):
    """Lengths from 1 to `most`. The first row has the full length, the second one is shorter."""
    lengths = torch.randint(1, most + 1, (rows,), generator=generator)
    lengths[0] = most
    lengths[1] = most - 2
    return lengths


def mask_of(lengths, most):
    return torch.arange(most) < lengths[:, None]


def with_nan(values, mask):
    """What is outside the mask must not matter. nan times 0 is nan."""
    return torch.where(mask, values, torch.nan)


def draw_tokens(generator):
    """Tokens [4, 6], of which 3 is the stop token."""
    tokens = torch.randint(0, 5, (4, 6), generator=generator)
    tokens[0] = torch.tensor([0, 1, 2, 4, 0, 1])  # no stop token
    tokens[1] = torch.tensor([1, 3, 0, 3, 3, 3])  # several
    return tokens, 3


def draw_kl(generator):
    estimator = ["k1", "k2", "k3"][int(torch.randint(0, 3, (), generator=generator))]
    return normal(generator, 2, 5), normal(generator, 2, 5), estimator


def draw_token_rewards(generator):
    lengths = draw_lengths(generator, 4, 6)
    kl = with_nan(normal(generator, 4, 6), mask_of(lengths, 6))
    return normal(generator, 4), kl, lengths, 0.3


def draw_whiten(generator):
    mask = mask_of(draw_lengths(generator, 3, 5), 5)
    return with_nan(3 + 2 * normal(generator, 3, 5), mask), mask


def draw_gae(generator):
    mask = mask_of(draw_lengths(generator, 4, 6), 6)
    rewards, values = normal(generator, 4, 6), normal(generator, 4, 6)
    return with_nan(rewards, mask), with_nan(values, mask), mask, 0.9, 0.8


def draw_policy_loss(generator):
    logprobs = normal(generator, 12)
    return logprobs, logprobs + 0.4 * normal(generator, 12), normal(generator, 12), 0.2


def draw_group(generator):
    """Rewards of 3 responses to each of 4 prompts. The responses to a prompt are neighbors."""
    return 5 * normal(generator, 4).repeat_interleave(3) + normal(generator, 12), 3


# ---- Formulas ----------------------------------------------------------------------------------------------


def by_element(function):
    """A formula for numbers, applied to each element of the tensors among the inputs."""

    def formula(*inputs):
        tensors = [x for x in inputs if torch.is_tensor(x)]
        others = [x for x in inputs if not torch.is_tensor(x)]
        flat = [function(*numbers, *others) for numbers in zip(*[x.flatten().tolist() for x in tensors])]
        if isinstance(flat[0], tuple):  # the formula has several results
            return tuple(torch.tensor(x).view(tensors[0].shape).tolist() for x in zip(*flat))
        return torch.tensor(flat).view(tensors[0].shape).tolist()

    return formula


def by_list(function):
    """A formula for lists."""

    def formula(*inputs):
        return function(*[x.tolist() if torch.is_tensor(x) else x for x in inputs])

    return formula


# ---- The exercises -----------------------------------------------------------------------------------------


EXERCISES = {
    "response_lengths": Exercise(
        "ppo_sentiment",
        draw_tokens,
        by_list(naive.response_lengths),
        [
            ("the stop token is not counted", "torch.arange(1, T + 1,", "torch.arange(0, T,"),
            ("the last stop token is taken instead of the first", ", T).amin(1)", ", 0).amax(1)"),
            ("without a stop token the length is too long", "position, T)", "position, T + 1)"),
            ("all tokens up to the end are counted", ".amin(1)", ".amax(1)"),
            ("tokens that are not the stop token are looked for", "torch.isin(", "~torch.isin("),
        ],
        "A response without the stop token has length T.",
    ),
    "kl_per_token": Exercise(
        "rloo_tldr",
        draw_kl,
        by_element(naive.kl_estimate),
        [
            ("k1 has the wrong sign", "return log_ratio\n", "return -log_ratio\n"),
            ("k2 lacks its half", "0.5 * log_ratio**2", "log_ratio**2"),
            (
                "the ratio of k3 is upside down",
                "torch.expm1(-log_ratio) + log_ratio",
                "torch.expm1(log_ratio) - log_ratio",
            ),
            ("k3 lacks its - 1", "torch.expm1(-log_ratio)", "torch.exp(-log_ratio)"),
            ("the two models are swapped", "logprobs - ref_logprobs", "ref_logprobs - logprobs"),
        ],
        "With the log-ratio x = logprob - ref_logprob:\nk1 = x, k2 = x^2 / 2, k3 = exp(-x) - 1 + x",
    ),
    "token_rewards": Exercise(
        "ppo_sentiment",
        draw_token_rewards,
        by_list(naive.token_rewards),
        [
            ("the KL penalty is a bonus", "-kl_coef * kl, 0.0", "kl_coef * kl, 0.0"),
            (
                "the score is on padding, one position late",
                "lengths[:, None] - 1",
                "lengths[:, None].clamp(max=kl.shape[1] - 1)",
            ),
            (
                "the score is on every token",
                "rewards.scatter_add(1, last, scores[:, None].to(rewards.dtype))",
                "rewards + scores[:, None]",
            ),
            ("the score replaces the KL penalty of the last token", "scatter_add(", "scatter("),
            (
                "nan from padding: multiply after masking, not before",
                "torch.where(mask, -kl_coef * kl, 0.0)",
                "mask * -kl_coef * kl",
            ),
        ],
        "kl is nan after the end of a response. The result is 0 there.",
    ),
    "masked_whiten": Exercise(
        "ppo_sentiment",
        draw_whiten,
        by_list(naive.masked_whiten),
        [
            ("the mean counts padding", "mean = masked_mean(values, mask)", "mean = values.mean()"),
            (
                "the variance counts padding",
                "variance = masked_mean((values - mean) ** 2, mask)",
                "variance = ((values - mean) ** 2).mean()",
            ),
            (
                "divided by the variance instead of its root",
                "torch.rsqrt(variance + 1e-8)",
                "(variance + 1e-8).reciprocal()",
            ),
            ("padding is not 0 afterwards", "return torch.where(mask, whitened, 0.0)", "return whitened"),
            ("the mean is not subtracted", "(values - mean) * torch.rsqrt", "values * torch.rsqrt"),
            (
                "the unbiased variance, n - 1",
                "torch.rsqrt(variance + 1e-8)",
                "torch.rsqrt(variance * mask.sum() / (mask.sum() - 1) + 1e-8)",
            ),
        ],
        "values is nan outside the mask, and the result is 0 there. Divide by sqrt(variance + "
        "1e-8), with the\n"
        "population variance. Only shift_mean=True is checked here.",
    ),
    "gae": Exercise(
        "ppo_sentiment",
        draw_gae,
        by_list(naive.gae),
        [
            (
                "the loop runs forwards in time",
                "reversed(range(rewards.shape[1]))",
                "range(rewards.shape[1])",
            ),
            ("gamma and lambda are swapped", "gamma * next_value", "lam * next_value"),
            ("lambda is missing", "gamma * lam * next_advantage", "gamma * next_advantage"),
            ("returns lack the values", "returns = advantages + values", "returns = advantages"),
            (
                "the value of this token is used as the next one",
                "next_value = values[:, t]",
                "next_value = values[:, t - 1]",
            ),
            ("the value is not subtracted", " - values[:, t]\n", "\n"),
            (
                "nan from padding",
                "values = torch.where(mask, values, 0.0).float()",
                "values = values.float()",
            ),
        ],
        "rewards and values are nan outside the mask. Both results are 0 there. From the last token "
        "to the first:\n"
        "delta_t = reward_t + gamma * value_(t+1) - value_t, advantage_t = delta_t + gamma * lam * "
        "advantage_(t+1),\n"
        "return_t = advantage_t + value_t",
    ),
    "clipped_policy_loss": Exercise(
        "ppo_sentiment",
        draw_policy_loss,
        by_element(naive.clipped_policy_loss),
        [
            ("the better of the two is taken: the larger loss is the worse one", "torch.max(", "torch.min("),
            ("the ratio is upside down", "logprobs - old_logprobs", "old_logprobs - logprobs"),
            (
                "the sign is missing: a loss is minimized",
                "return torch.max(unclipped, clipped)",
                "return -torch.max(unclipped, clipped)",
            ),
            ("nothing is clipped", "torch.max(unclipped, clipped)", "unclipped"),
            ("only the clipped one is used", "torch.max(unclipped, clipped)", "clipped"),
            (
                "the logarithm of the ratio is used",
                "ratio = torch.exp(log_ratio.clamp(max=40))",
                "ratio = log_ratio",
            ),
        ],
        "ratio = exp(logprob - old_logprob). The loss is the larger of -advantage * ratio and\n"
        "-advantage * (ratio clipped to 1 +- cliprange). Return the loss, the ratio, and True where the\n"
        "second is larger.",
    ),
    "rloo_advantages": Exercise(
        "rloo_tldr",
        draw_group,
        by_list(naive.rloo_advantages),
        [
            (
                "the rows are read as all first responses, then all second ones",
                "view(-1, rloo_k)  # [P, k]",
                "view(rloo_k, -1).T",
            ),
            (
                "the groups are right, but the advantages are in another order",
                "(rewards - baselines).flatten()",
                "(rewards - baselines).T.flatten()",
            ),
            (
                "the mean of all responses, not of the others",
                "sum_of_others / (rloo_k - 1)",
                "rewards.mean(1, keepdim=True)",
            ),
            ("divided by k instead of k - 1", "sum_of_others / (rloo_k - 1)", "sum_of_others / rloo_k"),
            (
                "the response's own reward is counted",
                "rewards.sum(1, keepdim=True) - rewards",
                "rewards.sum(1, keepdim=True)",
            ),
            ("the mean of the batch", "(rewards - baselines)", "(rewards - rewards.mean())"),
        ],
        "The k = 3 responses to each of P = 4 prompts are neighbors: rows 0, 1 and 2 answer prompt 0.",
    ),
    "grpo_advantages": Exercise(
        "grpo_math",
        draw_group,
        by_list(naive.grpo_advantages),
        [
            (
                "the rows are read as all first responses, then all second ones",
                "view(-1, k)  # [P, k]",
                "view(k, -1).T",
            ),
            ("the deviation is the population's", "correction=1", "correction=0"),
            ("the deviation is missing (Dr. GRPO)", " / (std + 1e-4)", ""),
            ("divided by the variance", "(std + 1e-4)", "(std**2 + 1e-4)"),
            ("the mean of the batch", "(groups - mean)", "(groups - groups.mean())"),
        ],
        "The k = 3 responses to each of P = 4 tasks are neighbors: rows 0, 1 and 2 answer the first task.\n"
        "The standard deviation has k - 1 in its denominator.",
    ),
}


@functools.cache
def solution(name):
    """The source of the function in its script."""
    source = (ROOT / f"{EXERCISES[name].script}.py").read_text()
    [node] = [node for node in ast.parse(source).body if getattr(node, "name", None) == name]
    return ast.get_source_segment(source, node)


def stub(name):
    """The signature and docstring of the solution, without its body."""
    source = solution(name)
    docstring = ast.parse(source).body[0].body[0]
    head = "\n".join(source.splitlines()[: docstring.end_lineno])
    hint = "".join(f"    # {line}\n" for line in EXERCISES[name].hint.splitlines())
    return f"import torch\n\n\n{head}\n{hint}    raise NotImplementedError\n"


# ---- Checking ----------------------------------------------------------------------------------------------


def as_tuple(x):
    return x if isinstance(x, tuple) else (x,)


def difference(name, function):
    """Compare a function with the formula. -> None if they agree, else (inputs, what it returned, right)

    What it returned is an Exception if it raised one.
    """
    exercise = EXERCISES[name]
    for seed in range(NUM_DRAWS):
        inputs = exercise.draw(torch.Generator().manual_seed(seed))
        right = [torch.as_tensor(x) for x in as_tuple(exercise.formula(*inputs))]
        copies = [x.clone() if torch.is_tensor(x) else x for x in inputs]
        try:
            found = as_tuple(function(*copies))
        except Exception as error:  # whatever the reader's function raises is shown
            return inputs, error, right
        agree = len(found) == len(right) and all(is_close(x, y) for x, y in zip(found, right))
        if not agree:
            return inputs, found, right
    return None


def is_close(found, right):
    """True if a result has the right shape and values."""
    if not torch.is_tensor(found) or found.shape != right.shape:
        return False
    return torch.allclose(found.double(), right.double(), rtol=1e-4, atol=1e-5)


def same_results(name, one, other):
    """True if two functions return the same for all inputs, nan included."""
    for seed in range(NUM_DRAWS):
        inputs = EXERCISES[name].draw(torch.Generator().manual_seed(seed))
        for x, y in zip(as_tuple(one(*inputs)), as_tuple(other(*inputs))):
            if not torch.allclose(x.double(), y.double(), rtol=1e-4, atol=1e-5, equal_nan=True):
                return False
    return True


def with_mistake(name, old, new):
    """The solution with a common mistake, as a function."""
    # Without the line that makes the first reward of each group 0, which matters only if there is a mistake.
    source = re.sub(r"\n    (\w+) = \1 - \1\[:, :1\].*", "", solution(name))
    assert source.count(old) == 1, (name, old)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("mistake", loader=None))
    script = load_script(EXERCISES[name].script)
    module.__dict__.update(script.__dict__)  # the function may call others of its script
    exec(source.replace(old, new), module.__dict__)
    return getattr(module, name)


def load(path):
    """A Python file as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@functools.cache
def load_script(name):
    """A script of this project as a module."""
    return load(ROOT / f"{name}.py")


def recognize(name, function):
    """The common mistake that a wrong function makes. -> str or None"""
    for mistake, old, new in EXERCISES[name].mistakes:
        try:
            if same_results(name, function, with_mistake(name, old, new)):
                return mistake
        except Exception:  # the reader's function raises, or returns another shape: not this mistake
            continue
    return None


def check(name, path):
    """Check a reader's file. -> what to print, and whether it is right"""
    function = getattr(load(path), name, None)
    if function is None:
        return f"{path} has no function {name}", False
    found = difference(name, function)
    if found is None:
        return f"{name} is right: it agrees with the formula on {NUM_DRAWS} random inputs", True
    inputs, returned, right = found
    if isinstance(returned, NotImplementedError):
        return f"{path} is still the stub: replace `raise NotImplementedError` by your code", False
    lines = [f"{name} is wrong. For the inputs"]
    lines += [f"  {x}" for x in inputs]
    if isinstance(returned, Exception):
        lines += ["it raised", "".join(traceback.format_exception(returned))]
    else:
        shapes = [tuple(x.shape) if torch.is_tensor(x) else type(x).__name__ for x in returned]
        lines += ["it returned", *[f"  {x}" for x in returned], f"  of shape {shapes}"]
    lines += [
        "and the formula says",
        *[f"  {x}" for x in right],
        f"  of shape {[tuple(x.shape) for x in right]}",
    ]
    mistake = recognize(name, function)
    if mistake is not None:
        lines.append(f"This is a common mistake: {mistake}.")
    return "\n".join(lines), False


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("name", nargs="?", choices=list(EXERCISES), help="the function to write")
    flags = parser.parse_args(argv)
    if flags.name is None:
        print("Write a function yourself:\n")
        for name, exercise in EXERCISES.items():
            print(f"    python exercises.py {name:<21}# used in {exercise.script}.py")
        return
    path = Path(f"my_{flags.name}.py")
    if not path.exists():
        path.write_text(stub(flags.name))
        print(f"wrote {path}: fill in the function, then run this command again")
        return
    text, is_right = check(flags.name, path.resolve())
    print(text)
    if not is_right:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
