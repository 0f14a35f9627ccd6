"""Tests that mutate.py asked for: faults that the others let pass."""

import json
import math

import mutate
import pytest
import torch
from conftest import PPO, RL, ROOT, SCRIPTS, shipping
from run_tools import eos_prone, rows_of, same, spy, start_process, timeless, torchrun_words, weights, write_rows
from transformers import AutoModel, AutoModelForCausalLM

pytest_plugins = ["run_fixtures"]
ROLLOUT = {"ppo_sentiment": "rollout", "ppo_dialog": "rollout_answers", "rloo_tldr": "rollout_groups"}
SGD = dict(optimizer="torch.optim.SGD", max_grad_norm=None, learning_rate=0.1)


@pytest.mark.parametrize("script", RL)
def test_nothing_behind_the_end_is_read(scripts, small, monkeypatch, tiny_lm, tmp_path, script):
    """Tricks 4 and 5: with nan behind each response, in all that the model says, metrics and weights are the same to the bit."""
    module, flags = scripts[script], dict(model_name_or_path=eos_prone(tiny_lm, tmp_path / "lm"), total_episodes=16, whiten_rewards=True)
    _, clean = module.train(small(script, "clean", **flags))
    kind = module.PolicyAndValue if script in PPO else module.PolicyAndReference
    forward, reference = kind.forward, kind.reference_logprobs

    def torn(self, ids, mask, T, *rest):
        return tuple(torch.where(mask[:, -T:], x, math.nan) for x in forward(self, ids, mask, T, *rest))

    def torn_reference(self, ids, mask, T, *rest):
        return torch.where(mask[:, -T:], reference(self, ids, mask, T, *rest), math.nan)

    monkeypatch.setattr(kind, "forward", torn)
    monkeypatch.setattr(kind, "reference_logprobs", torn_reference)
    _, other = module.train(small(script, "torn", **flags))
    assert timeless(rows_of(clean)) == timeless(rows_of(other)) and same(weights(clean / "model"), weights(other / "model"))
    assert rows_of(clean)[0]["completions/min_length"] < rows_of(clean)[0]["completions/max_length"]


@pytest.mark.parametrize("script", RL)
def test_one_step_by_hand(scripts, small, monkeypatch, script):
    """Trick 28: SGD moves the weights by the gradient of the loss as it is written down. PPO: whitened advantages, the mean over valid
    tokens, vf_coef; RLOO: the log-probability of whole responses, the mean over them."""
    module, flags = scripts[script], SGD | dict(total_episodes=8, per_device_train_batch_size=8, num_mini_batches=1, num_ppo_epochs=1)
    rollouts = spy(monkeypatch, module, ROLLOUT[script])
    credits = spy(monkeypatch, module, "gae" if script in PPO else "rloo_advantages")
    args = small(script, **flags, **(dict(vf_coef=0.3) if script in PPO else {}))
    model, _ = module.train(args)
    b = rollouts[1][1][0]  # the first rollout is of the held-out prompts
    T, mask = b["logprobs"].shape[1], module.length_mask(b["lengths"], b["logprobs"].shape[1])
    if script in PPO:
        start, (A, returns) = module.build_policy(args), credits[0][1]
        logprobs, _, values = start(b["ids"], b["mask"], T, args.temperature)
        A = (A - A[mask].mean()) / A[mask].std(correction=0)
        loss = -(A * logprobs)[mask].mean() + 0.3 * 0.5 * ((values - returns)[mask] ** 2).mean()
    else:
        start, A = module.PolicyAndReference(*module.load_policy(args, args.model_name_or_path)), credits[0][1]
        logprobs, _ = start(b["ids"], b["mask"], T, args.temperature)
        loss = -(A * torch.where(mask, logprobs, 0.0).sum(1)).mean()
    loss.backward()
    moved = [(p.grad, p.detach() - q.detach()) for p, q in zip(start.parameters(), model.parameters()) if p.grad is not None]
    assert max(step.abs().max() for _, step in moved) > 1e-3
    for gradient, step in moved:
        torch.testing.assert_close(step, 0.1 * gradient, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("script", RL)
def test_metrics_of_an_update_by_hand(scripts, small, monkeypatch, script):
    """approxkl, ratio, clip fractions and losses are means over the valid tokens (RLOO: the responses) of all minibatches."""
    module, flags = scripts[script], SGD | dict(total_episodes=8, num_ppo_epochs=3, cliprange=0.01)
    rollouts, policy = spy(monkeypatch, module, ROLLOUT[script]), spy(monkeypatch, module, "clipped_policy_loss")
    value = spy(monkeypatch, module, "clipped_value_loss") if script in PPO else []
    _, folder = module.train(small(script, **flags, **(dict(cliprange_value=0.01, vf_coef=1.0) if script in PPO else {})))
    new, old, A, loss = (torch.cat(x).detach().double() for x in zip(*((*args[:3], result) for args, result in policy)))
    n = 3 * rollouts[1][1][0]["lengths"].sum() if script in PPO else len(new)
    ratio = torch.exp(new - old)  # 1 behind the end, where both are 0
    clipped = ((A > 0) & (ratio > 1.01)) | ((A < 0) & (ratio < 0.99))
    expected = {"policy/approxkl_avg": (new - old).square().sum() / 2 / n, "val/ratio": 1 + (ratio - 1).sum() / n,
                "policy/clipfrac_avg": clipped.sum() / n, "loss/policy_avg": loss.sum() / n}
    expected["val/ratio_var"] = (ratio - 1).square().sum() / n - (expected["val/ratio"] - 1) ** 2
    if value:
        values, before, returns, loss = (torch.cat(x).detach().double() for x in zip(*((*args[:3], result) for args, result in value)))
        worse = (before + (values - before).clamp(-0.01, 0.01) - returns).abs() > (values - returns).abs() + 1e-6
        expected |= {"loss/value_avg": loss.sum() / n, "val/clipfrac_avg": worse.sum() / n}
    row = rows_of(folder)[0]
    assert {name: row[name] for name in expected} == pytest.approx({name: x.item() for name, x in expected.items()}, rel=1e-3, abs=1e-6)
    assert all(abs(row[name]) > 1e-6 for name in expected), row


@pytest.mark.parametrize("script", RL)
def test_clip_ranges_reach_the_losses(scripts, small, monkeypatch, script):
    """Trick 36: cliprange and cliprange_value are what the losses are clipped with."""
    module = scripts[script]
    names = {"clipped_policy_loss": "cliprange"} | ({"clipped_value_loss": "cliprange_value"} if script in PPO else {})
    calls = {flag: spy(monkeypatch, module, name) for name, flag in names.items()}
    module.train(small(script, **{flag: 0.123 + i for i, flag in enumerate(names.values())}))
    assert {flag: {args[3] for args, _ in seen} for flag, seen in calls.items()} == {flag: {0.123 + i} for i, flag in enumerate(calls)}


@pytest.mark.parametrize("script", ["sft", "reward_model"])
def test_a_larger_batch_of_equal_rows_has_the_same_gradient(scripts, small, tiny_lm, tmp_path, script):
    """Trick 28: the loss is a mean, so 6 equal rows give the gradient of 2."""
    row = dict(prompt="A post.", completion=" good") if script == "sft" else dict(prompt="A post.", chosen=" good one", rejected=" bad")
    data, norms = write_rows(tmp_path / "data", train=[row] * 6, test=[row]), []
    for n in (2, 6):
        flags = dict(dataset_name=data, model_name_or_path=tiny_lm(), per_device_train_batch_size=n, num_train_epochs=n / 6)
        _, folder = scripts[script].train(small(script, f"run{n}", **flags, **(dict(packing=False) if script == "sft" else {})))
        norms.append(rows_of(folder)[0]["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4) and norms[0] > 1e-3


@shipping("gae")
@pytest.mark.parametrize("critic", ["shared", "own"])
def test_a_value_is_said_before_its_token(k, tiny_lm, critic):
    """Trick 6: another third token changes the fourth value and no earlier one."""
    critic = AutoModel.from_pretrained(tiny_lm("llama")) if critic == "own" else None
    model = k.PolicyAndValue(AutoModelForCausalLM.from_pretrained(tiny_lm()), None, critic).eval()
    torch.manual_seed(0)
    torch.nn.init.normal_(model.value_head.weight)
    ids = torch.randint(3, 1000, (2, 9))
    other = ids.clone()
    other[:, -2] += 1
    with torch.no_grad():
        before, after = (model(x, torch.ones_like(x, dtype=torch.bool), 4, 1.0)[2] for x in (ids, other))
    torch.testing.assert_close(before[:, :3], after[:, :3])
    assert (before - after)[:, 3].abs().min() > 1e-4


@pytest.mark.parametrize("script", SCRIPTS)
def test_lora_has_no_dropout(scripts, tiny_lm, script):
    """Trick 13: two forwards of an adapter in train mode are equal."""
    module = scripts[script]
    model = module.add_lora(module.load_model(AutoModelForCausalLM, tiny_lm()), module.Args(lora_r=4, lora_target_modules="c_attn")).train()
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p)
    ids = torch.arange(3, 12)[None]
    first, second = (model(ids).logits for _ in range(2))
    assert torch.equal(first, second)


def test_the_meteor_of_a_run_is_of_the_reference(scripts, small):
    """METEOR is not symmetric: recall, which weighs nine times as much as precision, is of the reference's words."""
    module = scripts["ppo_dialog"]
    parts, _, _ = module.load_reward_parts(small("ppo_dialog", reward_model_path=None), torch.device("cpu"))
    found = parts([module.Turn(["Hello."], "the cat sat here", None, [])], ["the cat"])["meteor"].item()
    precision, recall, chunks = 1.0, 0.5, 1 / 2
    assert found == pytest.approx(10 * precision * recall / (recall + 9 * precision) * (1 - 0.5 * chunks**3))


@pytest.mark.parametrize("script", PPO)
def test_the_coefficient_follows_the_logged_kl(scripts, small, monkeypatch, script):
    """Trick 44: the target is of the KL of a response, a sum over its tokens, which is what the log says."""
    calls = spy(monkeypatch, scripts[script], "adaptive_kl_coef")
    _, folder = scripts[script].train(small(script, total_episodes=24, kl_target=0.5, kl_horizon=100))
    rows = rows_of(folder)
    assert [args[1] for args, _ in calls] == [row["objective/kl"] for row in rows] and rows[2]["objective/kl"] > 1e-3
    assert [args[4] for args, _ in calls] == [8] * 3


def test_two_processes_have_one_kl_coefficient(small, tmp_path):
    """Trick 21: the coefficient follows the logged KL, which is that of both processes, where Ziegler's error is not clipped."""
    flags = SGD | dict(total_episodes=24, per_device_train_batch_size=2, kl_coef=0.3, kl_target=0.9, kl_horizon=50)
    process = start_process(torchrun_words("ppo_sentiment", small("ppo_sentiment", "two", **flags), 2), tmp_path)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    rows = rows_of(tmp_path / "two")
    error = rows[1]["objective/kl"] / 0.9 - 1
    assert len(rows) == 3 and 1e-3 < abs(error) < 0.19
    assert rows[2]["objective/kl_coef"] == pytest.approx(rows[1]["objective/kl_coef"] * (1 + error * 8 / 50), rel=1e-5)


def test_the_committed_table_is_of_these_faults():
    """tests/mutations.jsonl: the faults of mutate.py, each killed; and each still finds its text in the scripts."""
    lines = [json.loads(line) for line in (ROOT / "tests/mutations.jsonl").read_text().splitlines()]
    assert [line["fault"] for line in lines] == [fault.name for fault in mutate.FAULTS] and all(line["killed_by"] for line in lines)
    for fault in mutate.FAULTS:
        source = (ROOT / f"{fault.script}.py").read_text()
        assert mutate.with_fault(source, fault) != source
