"""grpo_tools.py: an update and the final table of a small run, recomputed with plain transformers.

Calls that fail, calls of several turns and turns without a call are in every batch.
"""

import json
import statistics
from statistics import fmean as mean
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from run_fixtures import handlers_kept
from run_tools import distance, evaluation_of, has_ended, maker, rows_of, spy, weights
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest_plugins = ["run_fixtures"]
SCRIPT = "grpo_tools"
T, K, P, EPOCHS = 56, 4, 4, 2
MODEL = str(ROOT / "checkpoints/tools-sft")
ENDS = ("answer", "environment", "no_turn", "no_token", "unfinished_call")
FLAGS = dict(  # one update of 16 trajectories
    total_episodes=P * K,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=8,
    num_mini_batches=1,
    num_ppo_epochs=EPOCHS,
    num_generations=K,
    response_length=T,
    temperature=1.3,
    kl_coef=0.3,
    cliprange=0.05,
    learning_rate=1.0,
    optimizer="torch.optim.SGD",
    max_grad_norm=None,
    num_eval_prompts=4,
    num_eval_samples=3,
    seed=4,
)
REWARDS = """
def judge(prompts, completions, **columns):  # says what is right, but does not apply to every third task
    rights = [len(str(messages)) % 2 for messages in completions]
    return [None if len(x[0]["content"]) % 3 == 0 else right for x, right in zip(prompts, rights)]


def points(completions, **columns):
    return [float(len(str(messages)) % 7) for messages in completions]
"""


@pytest.fixture(scope="module")
def trained(scripts, world, tmp_path_factory):
    """All about the run, with what each call of write_trajectories returned."""
    root = tmp_path_factory.mktemp("trained")
    (root / "rewards_of_tools.py").write_text(REWARDS)
    rewards = [f"{root}/rewards_of_tools.py:{name}" for name in ("judge", "points")]
    args = maker(scripts, world, root)(SCRIPT, reward_fn=rewards, reward_weights=[0.0, 1.0], **FLAGS)
    with pytest.MonkeyPatch.context() as patch, handlers_kept():
        written = spy(patch, scripts[SCRIPT], "write_trajectories")
        _, folder = scripts[SCRIPT].train(args)
    names = "held-out", "greedy"
    calls = [*(f"before {name}" for name in names), "update", *(f"after {name}" for name in names)]
    parts = {name: trajectories for name, (_, trajectories) in zip(calls, written, strict=True)}
    return SimpleNamespace(folder=folder, parts=parts, metrics=rows_of(folder)[0])


def plain_logprobs(model, x):
    """Of all tokens of a trajectory. -> log-probabilities and entropies, [len(x.tokens)] each"""
    ids = x.example["ids"] + x.tokens
    start = len(x.example["ids"]) - 1
    table = (model(torch.tensor([ids])).logits[0, start:-1] / FLAGS["temperature"]).log_softmax(-1)
    return table[range(len(x.tokens)), x.tokens], -(table.exp() * table).sum(-1)


@pytest.fixture(scope="module")
def by_hand(trained):
    """The update with plain transformers, one trajectory at a time. -> its policy, and its metrics"""
    rows = trained.parts["update"]
    policy, reference = (AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32) for _ in range(2))
    scores = [float(len(str(x.messages)) % 7) for x in rows]
    advantages = []
    for i in range(0, P * K, K):
        group = scores[i : i + K]
        advantages += [(score - mean(group)) / (statistics.stdev(group) + 1e-4) for score in group]
    with torch.no_grad():
        old = [plain_logprobs(policy, x)[0] for x in rows]
        ref = [plain_logprobs(reference, x)[0] for x in rows]
    marks = [torch.tensor(x.sampled) for x in rows]
    count = sum(mark.sum().item() for mark in marks)
    optimizer = torch.optim.SGD(policy.parameters(), lr=FLAGS["learning_rate"])
    losses, clipped, entropies, ratios = [], [], [], []
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        for x, mark, advantage, before, refs in zip(rows, marks, advantages, old, ref, strict=True):
            logprobs, row_entropies = plain_logprobs(policy, x)
            ratio = (logprobs - before).exp()
            bounded = ratio.clamp(1 - FLAGS["cliprange"], 1 + FLAGS["cliprange"])
            loss = -torch.min(ratio * advantage, bounded * advantage)
            kl = (refs - logprobs).exp() - 1 - (refs - logprobs)
            ((loss + FLAGS["kl_coef"] * kl)[mark].sum() / count).backward()
            clipped += (bounded * advantage < ratio * advantage)[mark].tolist()
            for numbers, row in ((losses, loss), (entropies, row_entropies), (ratios, ratio)):
                numbers += row[mark].tolist()
        optimizer.step()

    lengths = [sum(x.sampled) for x in rows]
    gaps = [(torch.tensor(x.logprobs) - row)[mark].abs() for x, row, mark in zip(rows, old, marks)]
    num_calls = sum(x.num_calls for x in rows)
    metrics = {
        "objective/scores": mean(scores),
        "objective/entropy": -sum(row[mark].sum().item() for row, mark in zip(old, marks)) / len(rows),
        "objective/kl": sum((a - b)[mark].sum().item() for a, b, mark in zip(old, ref, marks)) / len(rows),
        "loss/policy_avg": mean(losses),
        "policy/clipfrac_avg": mean(clipped),
        "policy/entropy_avg": mean(entropies),
        "val/ratio": mean(ratios),
        "val/ratio_var": statistics.pvariance(ratios),
        "val/num_eos_tokens": sum(has_ended(x) for x in rows),
        "completions/mean_length": mean(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": mean(not has_ended(x) for x in rows),
        "tools/call_frequency": num_calls / len(rows),
        "tools/failure_frequency": sum(x.num_failures for x in rows) / num_calls,
        "tools/error_frequency": sum(x.num_errors for x in rows) / num_calls,
        "tools/timeout_frequency": 0.0,
        "tools/turns": mean(x.num_turns for x in rows),
        **{f"completions/end_{end}": mean(x.end == end for x in rows) for end in ENDS},
        "sampling/logprob_gap_max": max(gap.max().item() for gap in gaps),
    }
    return policy, metrics


def test_an_update_by_hand(trained, by_hand):
    """The weights after two steps: only sampled tokens are learned, and each one counts the same."""
    policy, _ = by_hand
    ours, right = weights(trained.folder / "model"), dict(policy.state_dict())
    right = {name: x for name, x in right.items() if name in ours}
    start = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).state_dict()
    moved = distance({name: start[name] for name in ours}, right)
    assert moved > 1e-2 and distance(ours, right) < 1e-4 * moved


def test_every_number_of_an_update(trained, by_hand):
    """Means over tokens and lengths count sampled tokens only; calls, turns and ends count trajectories."""
    _, right = by_hand
    metrics = {name: trained.metrics[name] for name in right}
    assert metrics == pytest.approx(right, abs=1e-4, rel=1e-4)


def test_the_run_is_worth_something(trained):
    """There are trajectories with one, two and three turns, failed calls, and some that end by themselves."""
    rows = trained.parts["update"]
    assert {x.num_turns for x in rows} >= {1, 2}
    assert 0 < sum(x.num_failures for x in rows) < sum(x.num_calls for x in rows)
    assert 0 < sum(has_ended(x) for x in rows) < len(rows)
    assert any(has_ended(x) and x.num_turns > 1 for x in rows)
    assert sum(trained.metrics[f"completions/end_{end}"] for end in ENDS) == pytest.approx(1)
    assert 0 < trained.metrics["policy/clipfrac_avg"] < 1


def test_tokens_of_samples(trained):
    """tokens.jsonl says of each token whether it was sampled."""
    rows = rows_of(trained.folder, "tokens.jsonl")
    for row, x in zip(rows, trained.parts["update"][:K], strict=True):
        assert (row["ids"], row["sampled"]) == (x.tokens, x.sampled)
        assert row["logprob"] == pytest.approx(x.logprobs)
        assert not any(kl for kl, is_sampled in zip(row["kl"], x.sampled, strict=True) if not is_sampled)


def test_what_a_tool_wrote_may_be_arbitrarily_unlikely(scripts, tools, monkeypatch):
    """Its tokens have no part in the loss, though exp(200) is inf, and inf * 0 is nan."""
    _, plain, _ = tools("plain", total_episodes=8)  # one update
    header = AutoTokenizer.from_pretrained(MODEL).convert_tokens_to_ids("<|im_start|>")  # never sampled
    response_logprobs = scripts[SCRIPT].response_logprobs

    def shifted(lm, ids, mask, T, temperature):
        """In updates, the headers of turns have become unlikely."""
        logprobs, entropies = response_logprobs(lm, ids, mask, T, temperature)
        return logprobs - 200.0 * torch.is_grad_enabled() * (ids[:, -T:] == header), entropies

    monkeypatch.setattr(scripts[SCRIPT], "response_logprobs", shifted)
    _, folder, _ = tools("unlikely", total_episodes=8)
    assert any(header in row["ids"] for row in rows_of(plain, "tokens.jsonl"))
    assert distance(weights(folder / "model"), weights(plain / "model")) == 0


@pytest.mark.parametrize("time", ["before", "after"])
def test_the_final_table(trained, time):
    """The first reward that applies says what is right."""
    table = evaluation_of(trained.folder)[time]
    records = [json.loads(line) for line in open(trained.folder / "evaluation_samples.jsonl")]
    for name, k in (("held-out", 3), ("greedy", 1)):
        rows = trained.parts[f"{time} {name}"]
        right = []
        for x in rows:
            applies = len(x.example["prompt"][0]["content"]) % 3 != 0
            right.append(len(str(x.messages)) % (2 if applies else 7) >= 1)
        assert table[f"{name}: pass@1"] == pytest.approx(mean(right))
        assert table[f"{name}: calls per trajectory"] == pytest.approx(mean(x.num_calls for x in rows))
        failed = sum(x.num_failures for x in rows) / max(1, sum(x.num_calls for x in rows))
        assert table[f"{name}: failed calls"] == pytest.approx(failed)
        assert table[f"{name}: turns"] == pytest.approx(mean(x.num_turns for x in rows))
        assert table[f"{name}: sampled tokens"] == pytest.approx(mean(sum(x.sampled) for x in rows))
        assert table[f"{name}: ended by itself"] == pytest.approx(mean(has_ended(x) for x in rows))
        own = [row[time] for row in records if row["set"] == name]
        assert [x for row in own for x in row["right"]] == right
        assert len(own[0]["right"]) == k
