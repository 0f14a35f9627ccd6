"""response_logprobs reads the prompt of a group once. It is compared with response_logprobs."""

import peft
import pytest
import torch
import transformers
from conftest import ARCHITECTURES, HYBRIDS
from math_tools import close, normal, random_ids, random_model

import ppo_sentiment as ppo
import rloo_tldr as rloo

C, T = 5, 4


def groups():
    """Three responses to a long prompt, two to a short one, two to the short one after a 0 (pads are 0, too),
    one to a prompt of one token; and two rows apart from their groups. -> ids, mask [10, C + T]
    """
    long, short = random_ids(C, seed=1) % 90 + 1, random_ids(2, seed=2) % 90 + 1
    with_zero = torch.cat([torch.tensor([0]), short])
    prompts = [long, long, long, short, short, with_zero, with_zero, short[:1], long, short]
    lengths = torch.tensor([4, 1, 3, 2, 4, 1, 2, 3, 2, 4])
    ids, mask = torch.zeros(10, C + T, dtype=torch.long), torch.zeros(10, C + T, dtype=torch.bool)
    for i, prompt in enumerate(prompts):
        ids[i, C - len(prompt) : C] = prompt
        mask[i, C - len(prompt) : C + lengths[i]] = True
    ids[:, C:] = random_ids(10, T, seed=3)
    return ids, mask


def load(folder):
    """In train mode, in which gradient checkpointing would be on."""
    return rloo.load_model(transformers.AutoModelForCausalLM, folder).train()


def outputs_and_gradients(function, model):
    """Both outputs, and the gradient of an uneven sum of them for each trained weight."""
    logprobs, entropies = function(model, *groups(), T, 0.7)[:2]
    weights = torch.linspace(-1, 2, logprobs.numel()).view_as(logprobs)
    (weights * logprobs + weights.flip(0) * entropies).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return [logprobs.detach(), entropies.detach()], gradients


KINDS = ("plain", "lora", "checkpointing")
CASES = [(arch, kind) for arch in (*ARCHITECTURES, *HYBRIDS) for kind in KINDS]
# A window that is shorter than the prompt, and one that ends within the response.
CASES += [("mistral", 3), ("mistral", 7)]


@pytest.mark.parametrize("arch, kind", CASES)
def test_a_prompt_that_is_read_once_gives_the_same(tiny_lm, arch, kind):
    """Log-probabilities, entropies and all gradients, in any order of the rows, and with equal prompts that
    are padded differently."""
    if arch == "mistral":
        model = random_model("mistral", vocab_size=1024, sliding_window=kind).train()
    else:
        model = load(tiny_lm(arch))
    torch.manual_seed(0)
    if kind == "lora":
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))
        for name, p in model.named_parameters():
            if "lora_B" in name:  # B = 0 would hide the gradient of A
                p.data = normal(*p.shape, seed=4) / 10
    expected, expected_gradients = outputs_and_gradients(ppo.response_logprobs, model)
    if kind == "checkpointing":
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
    found, gradients = outputs_and_gradients(rloo.response_logprobs, model)
    for one, other in zip(found + gradients, expected + expected_gradients, strict=True):
        close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "arch, kind, rows_read",
    [
        ("gpt_neox", "plain", 6),
        ("gpt_neox", "checkpointing", 10),
        ("gemma4_text", "plain", 6),
        ("qwen3_5_text", "plain", 10),
        ("lfm2", "plain", 10),
    ],
)
def test_how_many_prompts_are_read(tiny_lm, arch, kind, rows_read):
    """Once for neighbors, or else once for each row. A rollout takes the path of the update, so that their
    log-probabilities are bit-identical."""
    model = load(tiny_lm(arch))
    if kind == "checkpointing":
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
    shapes = []
    body, _ = rloo.body_and_head(model)
    see = lambda body, _, inputs: shapes.append(inputs["input_ids"].shape)  # noqa: E731
    body.register_forward_pre_hook(see, with_kwargs=True)
    updated, _ = rloo.response_logprobs(model, *groups(), T, 1.0)
    with torch.no_grad():
        rolled_out, _ = rloo.response_logprobs(model.eval(), *groups(), T, 1.0)
    assert shapes == 2 * ([(10, C + T)] if rows_read == 10 else [(6, C), (10, T)])
    assert torch.equal(updated, rolled_out)


def test_sorted_groups():
    """Groups 0, 3 and 1, three responses each: that with the shortest longest response comes first."""
    lengths = torch.tensor([1, 9, 2, 4, 3, 2, 7, 7, 7, 4, 4, 1])
    groups = torch.tensor([0, 3, 1])
    rows = rloo.sorted_groups(groups, lengths, 3, reuses_prompts=True)
    assert rows.tolist() == [9, 10, 11, 3, 4, 5, 0, 1, 2]  # 3 before 1: they are equal, and 3 came first
    rows = rloo.sorted_groups(groups, lengths, 3, reuses_prompts=False)
    assert rows.tolist() == [11, 0, 5, 2, 4, 9, 10, 3, 1]  # those of a group are no neighbors: less padding
