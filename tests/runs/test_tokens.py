"""tokens.jsonl: the numbers of each token, which report.py shows."""

import json
import math
import sys
from collections import defaultdict

import pytest
import torch
from conftest import GROUPS, PPO, RL, ROOT
from run_tools import rows_of
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(ROOT))
import report  # noqa: E402

pytest_plugins = ["run_fixtures"]
SAVE_ALL = dict(num_sample_generations=100)


def all_lines(scripts, small, name, **changes):
    """Train with samples in every update. -> Args, lines of tokens.jsonl, rows of metrics.jsonl"""
    args = small(name, **(SAVE_ALL | changes))
    _, folder = scripts[name].train(args)
    return args, rows_of(folder, "tokens.jsonl"), rows_of(folder)


@pytest.mark.parametrize("name", RL)
def test_log_probabilities_ratio_and_entropy(scripts, small, name):
    """Without learning, they are those of the initial model, and the ratio is 1."""
    args, lines, _ = all_lines(scripts, small, name, learning_rate=0.0, temperature=0.7)
    model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    for line in lines:
        prompt = tokenizer(line["prompt"], add_special_tokens=False).input_ids
        response = tokenizer("".join(line["tokens"]), add_special_tokens=False).input_ids
        if len(response) != len(line["tokens"]):
            continue  # a sampled text may be tokenized in another way
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        logprobs = (logits / 0.7).log_softmax(-1)
        chosen = logprobs.gather(1, torch.tensor(response)[:, None]).squeeze(1)
        entropies = -(logprobs.exp() * logprobs).sum(1)
        assert line["logprob"] == pytest.approx(chosen.tolist(), abs=2e-3)
        assert line["entropy"] == pytest.approx(entropies.tolist(), abs=2e-3)
        assert line["ratio"] == pytest.approx([1.0] * len(response), abs=1e-4)
    assert any(len(line["tokens"]) > 1 for line in lines)


@pytest.mark.parametrize("name", RL)
def test_the_ratio_is_that_after_the_update(scripts, small, name):
    """exp(log-probability of the next policy - old one): not 1 after a step."""
    _, lines, _ = all_lines(scripts, small, name, learning_rate=1e-2)
    first = [line for line in lines if line["update"] == 1]
    assert any(abs(ratio - 1) > 0.01 for line in first for ratio in line["ratio"])


@pytest.mark.parametrize("name", PPO)
def test_the_reward_of_ppo(scripts, small, name):
    """The KL penalty for each token, and the score for the last one. With lam = 1, a return is their sum."""
    flags = dict(total_episodes=24, learning_rate=1e-2, kl_coef=0.3, kl_target=None, lam=1.0)
    flags |= dict(score_clip=None, missing_eos_penalty=None)
    _, lines, _ = all_lines(scripts, small, name, **flags)
    assert {line["update"] for line in lines} == {1, 2, 3}
    assert any(abs(kl) > 0.01 for line in lines for kl in line["KL"])
    for line in lines:
        rewards = [-0.3 * kl for kl in line["KL"]]
        rewards[-1] += line["score"]
        assert line["reward"] == pytest.approx(rewards, abs=1e-3)
        returns = [sum(rewards[t:]) for t in range(len(rewards))]
        assert line["return"] == pytest.approx(returns, abs=1e-2)


@pytest.mark.parametrize("name", GROUPS)
def test_lines_of_a_group(scripts, small, name):
    """All responses to one prompt. Each has one advantage, and they rise with the scores."""
    args, lines, metrics = all_lines(scripts, small, name)
    k = args.rloo_k if name == "rloo_tldr" else args.num_generations
    groups = defaultdict(list)
    for line in lines:
        groups[line["update"]].append(line)
    assert sorted(groups) == [row["update"] for row in metrics]
    for group in groups.values():
        assert len(group) == k and len({line["prompt"] for line in group}) == 1
        for line in group:
            assert len(set(line["advantage"])) == 1
        if name == "grpo_math":
            by_score = sorted(group, key=lambda line: line["score"])
            advantages = [line["advantage"][0] for line in by_score]
            assert advantages == sorted(advantages)
            assert sum(advantages) == pytest.approx(0, abs=1e-2)


@pytest.mark.parametrize("name", RL)
def test_export_for_unipo(scripts, small, name, tmp_path):
    """Its fields, with numbers that fit together: objectives from ratios and advantages."""
    args = small(name, **SAVE_ALL, learning_rate=1e-2, total_episodes=16)
    _, folder = scripts[name].train(args)
    about = json.loads((folder / "args.json").read_text()) | {"command": [f"{name}.py"]}
    (folder / "args.json").write_text(json.dumps(about))
    report.main([str(folder), "--unipo", str(tmp_path / "run.json")])
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["header"]["algorithm"] in ("ppo", "rloo", "grpo") and run["header"]["totalSteps"] == 2
    lines = rows_of(folder, "tokens.jsonl")
    for entry, row in zip(run["entries"], rows_of(folder), strict=True):
        assert entry["step"] == row["update"] and entry["metrics"]["reward"] == row["objective/scores"]
        assert entry["metrics"]["policy_objective"] == -row["loss/policy_avg"]
        responses = [response for prompt in entry["prompts"] for response in prompt["responses"]]
        assert len(responses) == sum(line["update"] == row["update"] for line in lines)
        assert len({response["id"] for response in responses}) == len(responses)
        assert name in PPO or len(entry["prompts"]) == 1  # the responses of a group share their prompt
        for response in responses:
            tokens = response["tokens"]
            assert {len(x) for x in tokens.values()} == {response["response_length"]}
            for i in range(response["response_length"]):
                ratio = math.exp(tokens["log_probs"][i] - tokens["old_log_probs"][i])
                advantage = tokens["advantages"][i]
                expected = min(
                    ratio * advantage, min(max(ratio, 1 - args.cliprange), 1 + args.cliprange) * advantage
                )
                assert tokens["token_objective"][i] == pytest.approx(expected, abs=1e-6)


def test_no_samples_no_tokens(scripts, small):
    args = small("ppo_sentiment", num_sample_generations=0)
    _, folder = scripts["ppo_sentiment"].train(args)
    assert not (folder / "tokens.jsonl").exists()


def test_token_pieces_keep_spaces(scripts):
    """Joined, they are the text, also with a tokenizer that decodes a single token without its space."""

    class Tokenizer:
        def decode(self, ids):
            return "".join(["▁The", "▁film", "s", "."][i] for i in ids).replace("▁", " ").removeprefix(" ")

    assert scripts["rloo_tldr"].token_pieces(Tokenizer(), [0, 1, 2, 3]) == ["The", " film", "s", "."]


@pytest.mark.parametrize("name", RL)
def test_characters_of_several_tokens_stay_whole(scripts, name):
    """Each byte is a token. The last character is cut off, and stays visible as such."""

    class Bytes:
        def decode(self, ids):
            return bytes(ids).decode(errors="replace")

    text = "é🎉b"
    pieces = scripts[name].token_pieces(Bytes(), list(text.encode()))
    assert pieces == ["", "é", "", "", "", "🎉", "b"]
    assert scripts[name].token_pieces(Bytes(), list("aé".encode())[:-1]) == [
        "a",
        "\N{REPLACEMENT CHARACTER}",
    ]


@pytest.mark.parametrize("name", PPO)
def test_the_score_is_what_was_paid(scripts, small, name):
    """After clipping: it is part of the last reward."""
    _, lines, _ = all_lines(scripts, small, name, score_clip=0.05, kl_coef=0.0, kl_target=None)
    assert all(abs(line["score"]) <= 0.0501 for line in lines)
    assert [line["reward"][-1] for line in lines] == pytest.approx(
        [line["score"] for line in lines], abs=1e-3
    )
