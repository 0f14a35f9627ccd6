"""The changes of lines in docs/grpo_tools.md: one update of each, and its gradient by a plain loop."""

import functools
import json
import math
import types
from statistics import fmean
from types import SimpleNamespace

import accelerate
import pytest
import torch
from conftest import ROOT
from diff_blocks import apply_block, blocks
from run_fixtures import handlers_kept
from run_tools import has_ended, spy

import grpo_tools as script

pytest_plugins = ["run_fixtures"]
K, TASKS, T = 4, 8, 96  # trajectories per task, tasks, tokens per trajectory
RECIPES = {  # title of a block -> a recipe that is not tiny, and flags
    "Reward per turn": ("guess", dict(environment="examples/guess_for_bits.py:GuessForBits")),
}
BLOCKS = blocks((ROOT / "docs/grpo_tools.md").read_text().split("## Lines to change")[1])


@pytest.fixture(scope="module")
def update(tmp_path_factory):
    """update(title, max_turns) -> one update of a variant, with learning rate 0."""

    @functools.cache
    def run(title, max_turns):
        with handlers_kept(), pytest.MonkeyPatch.context() as patch:
            recipe, flags = RECIPES.get(title, ("tiny", {}))
            return recorded_update(patch, variant(BLOCKS[title]), recipe, dict(max_turns=max_turns, **flags))

    def variant(block):
        module = types.ModuleType("grpo_tools")
        module.__file__ = script.__file__
        source = apply_block((ROOT / "grpo_tools.py").read_text(), block)
        exec(compile(source, "variant", "exec"), module.__dict__)
        return module

    def recorded_update(patch, module, recipe, flags):
        args = module.replace(
            module.RECIPES[recipe],
            total_episodes=K * TASKS,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=K * TASKS // 8,
            local_rollout_forward_batch_size=8,
            num_generations=K,
            response_length=T,
            **flags,
            temperature=1.3,
            learning_rate=0.0,
            max_grad_norm=None,
            num_eval_prompts=2,
            num_eval_samples=2,
            num_sample_generations=1,
            save_every=0,
            output_dir=str(tmp_path_factory.mktemp("update") / "run"),
        )
        written, gradients = spy(patch, module, "write_trajectories"), []
        clip_grad_norm_ = accelerate.Accelerator.clip_grad_norm_

        def recorded_clip(self, parameters, max_norm):
            parameters = list(parameters)
            gradients.append(torch.cat([p.grad.flatten() for p in parameters]).clone())
            return clip_grad_norm_(self, parameters, max_norm)

        patch.setattr(accelerate.Accelerator, "clip_grad_norm_", recorded_clip)
        model, _ = module.train(args)
        [trajectories] = [output for _, output in written if len(output) == K * TASKS]
        return SimpleNamespace(policy=model.policy, trajectories=trajectories, gradient=gradients[0])

    return run


def plain_gradient(run, advantages, kept):
    """Of the mean of -advantage * log p over sampled tokens. advantages: one for each turn of each row"""
    loss, count = 0.0, 0
    for x, advantages_of_turns, is_kept in zip(run.trajectories, advantages, kept, strict=True):
        ids = x.example["ids"] + x.tokens
        logp = (run.policy(torch.tensor([ids])).logits[0, :-1] / 1.3).log_softmax(-1)
        turn, was_sampled = -1, False
        for t, (token, is_sampled) in enumerate(zip(x.tokens, x.sampled, strict=True)):
            turn += is_sampled and not was_sampled
            was_sampled = is_sampled
            if is_sampled and is_kept:
                loss = loss - advantages_of_turns[turn] * logp[len(x.example["ids"]) + t - 1, token]
                count += 1
    run.policy.zero_grad()
    (loss / count).backward()
    return torch.cat([p.grad.flatten() for p in script.trainable(run.policy).values()])


def answers(x):
    """1.0 if the last message has the answer of the task."""
    return float(f"<answer>{x.example['columns']['answer']}</answer>" in x.messages[-1]["content"])


RESULTS = {  # of a guess -> the numbers that it leaves possible
    "higher": lambda number, guess: number > guess,
    "lower": lambda number, guess: number < guess,
    "right": lambda number, guess: False,  # none is left to find
}


def bits_of_turns(x):
    """What each turn of a game tells about a number from 1 to 31, in bits, by going through all numbers."""
    possible, bits = range(1, 32), []
    calls = []
    for message in x.messages + x.unread:
        if message["role"] == "assistant":
            calls = list(message["tool_calls"])
            bits.append(0.0)
        elif message["content"] in RESULTS:
            guess = json.loads(calls.pop(0))["arguments"]["number"]
            left = [number for number in possible if RESULTS[message["content"]](number, guess)]
            bits[-1] += math.log2((len(possible) + 1) / (len(left) + 1))
            possible = left
        elif message["role"] == "tool":
            calls.pop(0)  # it failed
    return bits


def game_reward(x):
    """0, or 1 for a number that is found by the last of 8 guesses, and an eighth more for each one left."""
    results = [message["content"] for message in x.messages + x.unread]
    num_guesses = sum(result in RESULTS for result in results)
    return 2 - num_guesses / 8 if "right" in results else 0.0


def group_advantages(scores):
    advantages = []
    for start in range(0, len(scores), K):
        group = torch.tensor(scores[start : start + K], dtype=torch.float64)
        advantages += ((group - group.mean()) / (group.std() + 1e-4)).tolist()
    return advantages


SCORES = {  # title of a block -> the score of a trajectory
    "Reward per turn": game_reward,
    "Discount over turns": lambda x: answers(x) * 0.9 ** (x.num_turns - 1),
    "Penalty per call": lambda x: answers(x) - 0.05 * x.num_calls,
    "No loss on trajectories that were cut off": answers,
    "Demand an answer in the last turn": answers,
}


@pytest.mark.parametrize("title", SCORES)
def test_the_gradient_of_a_variant(update, title):
    assert BLOCKS.keys() == SCORES.keys()
    run = update(title, 3)  # turns
    scores = [SCORES[title](x) for x in run.trajectories]
    advantages = [
        [advantage] * x.num_turns for advantage, x in zip(group_advantages(scores), run.trajectories)
    ]
    kept = [True] * len(scores)
    if title == "Reward per turn":
        bits = [bits_of_turns(x) for x in run.trajectories]
        for start in range(0, len(bits), K):
            for turn in range(3):
                group = [i for i in range(start, start + K) if len(bits[i]) > turn]
                for i in group:
                    advantages[i][turn] += bits[i][turn] - fmean(bits[j][turn] for j in group)
        assert len({len(of_turns) for of_turns in bits}) > 2
    if title.startswith("No loss"):
        kept = [has_ended(x) for x in run.trajectories]
        assert 0 < sum(kept) < len(kept)
    assert any(scores) and len({x.num_turns for x in run.trajectories}) > 1
    expected = plain_gradient(run, advantages, kept)
    assert (run.gradient - expected).norm() < 1e-3 * expected.norm()


@pytest.mark.parametrize("max_turns", [2, 3])
def test_an_answer_is_demanded_before_the_last_turn_only(update, max_turns):
    """Some trajectories call a tool in their first turn. With two turns at most, the next one is the last."""
    run = update("Demand an answer in the last turn", max_turns)
    results = [x.messages[1]["content"] for x in run.trajectories if len(x.messages) > 1]
    assert len(results) > 3
    for result in results:
        assert result.endswith("\nThis was the last call. Answer now.") == (max_turns == 2)
