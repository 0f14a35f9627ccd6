"""Tests for the faults of mutate.py that no other test would notice."""

import math
from pathlib import Path

import pytest
import torch
from conftest import PPO, RL, module_with
from run_tools import (
    eos_prone,
    rows_of,
    same,
    spy,
    start_process,
    timeless,
    torchrun_words,
    weights,
    without_check_of_models,
    write_rows,
)
from transformers import AutoModel, AutoModelForCausalLM

pytest_plugins = ["run_fixtures"]
ROLLOUT = {
    "ppo_sentiment": "rollout",
    "ppo_dialog": "rollout_answers",
    "rloo_tldr": "rollout_groups",
    "grpo_math": "rollout_tasks",
}
CREDIT = {
    "ppo_sentiment": "gae",
    "ppo_dialog": "gae",
    "rloo_tldr": "rloo_advantages",
    "grpo_math": "grpo_advantages",
}
SGD = dict(optimizer="torch.optim.SGD", max_grad_norm=None, learning_rate=0.1)


# ---- Responses that end early ------------------------------------------------------------------------------


@pytest.mark.parametrize("script", RL)
def test_nothing_after_the_end_is_read(scripts, small, monkeypatch, tiny_lm, tmp_path, script):
    """Traps 4 and 5: put large numbers at all pads in the hidden states. Not a bit changes."""
    module = scripts[script]
    lm = eos_prone(tiny_lm, tmp_path / "lm")
    flags = dict(model_name_or_path=lm, total_episodes=16)
    if script != "grpo_math":
        flags["whiten_rewards"] = True
    _, clean = module.train(small(script, "clean", **flags))
    hidden_states = module.hidden_states

    def with_large_numbers(body, ids, mask, cache=None):
        hidden = hidden_states(body, ids, mask, cache)
        return hidden.masked_fill(~mask[:, -ids.shape[1] :, None], 1e4)

    without_check_of_models(monkeypatch, module)
    monkeypatch.setattr(module, "hidden_states", with_large_numbers)
    _, torn = module.train(small(script, "torn", **flags))
    rows = rows_of(clean)
    assert timeless(rows) == timeless(rows_of(torn))
    assert same(weights(clean / "model"), weights(torn / "model"))
    assert rows[0]["completions/min_length"] < rows[0]["completions/max_length"]


# ---- One update by hand ------------------------------------------------------------------------------------


def loss_of_ppo(module, args, b, advantages, returns):
    """The loss before the first step. -> the model, and its loss"""
    T = args.response_length
    model, _ = module.load_policy_and_value(args, "cpu")
    logprobs, _, values = model(b["ids"], b["mask"], T, args.temperature)
    valid = b["mask"][:, -T:]
    A = advantages[valid]
    A = (A - A.mean()) / A.std(correction=0)
    value_loss = 0.5 * (values - returns)[valid] ** 2
    return model, (-A * logprobs[valid] + args.vf_coef * value_loss).mean()


def loss_of_groups(module, args, b, advantages):
    """The loss of RLOO or GRPO before the first step, when the KL and its gradient are 0.

    -> the model, and its loss
    """
    T = args.response_length
    policy, _ = module.load_policy_and_reference(args, args.model_name_or_path, "cpu")
    model = module.Policy(policy)
    logprobs, _ = model(b["ids"], b["mask"], T, args.temperature)
    if module.__name__ == "rloo_tldr":
        return model, -(advantages * logprobs.sum(1)).mean()
    return model, -(advantages[:, None] * logprobs)[b["mask"][:, -T:]].mean()


@pytest.mark.parametrize("script", RL)
def test_one_step_by_hand(scripts, small, monkeypatch, script):
    """Trap 28: SGD moves the weights by the gradient of the loss.

    PPO: whitened advantages, the mean over valid tokens, vf_coef. RLOO: the log-probabilities of whole
    responses, the mean over them. GRPO: the mean over all valid tokens.
    """
    module = scripts[script]
    is_ppo = script in PPO
    flags = SGD | dict(total_episodes=8, per_device_train_batch_size=8, num_mini_batches=1, num_ppo_epochs=1)
    if is_ppo:
        flags["vf_coef"] = 0.3
    args = small(script, **flags)
    rollouts = spy(monkeypatch, module, ROLLOUT[script])
    credits = spy(monkeypatch, module, CREDIT[script])
    trained, _ = module.train(args)
    b = rollouts[0 if script == "grpo_math" else 1][1][0]  # of others, the first is of the evaluation
    _, credit = credits[0]
    if is_ppo:
        model, loss = loss_of_ppo(module, args, b, *credit)
    else:
        model, loss = loss_of_groups(module, args, b, credit)
    loss.backward()
    steps = []
    for before, after in zip(model.parameters(), trained.parameters()):
        if before.grad is not None:
            step = before.detach() - after.detach()
            torch.testing.assert_close(step, 0.1 * before.grad, atol=1e-5, rtol=1e-3)
            steps.append(step.abs().max())
    assert max(steps) > 1e-3


def all_calls(calls, valid):
    """Inputs and results of several calls, each put together where valid. -> list of float64 tensors"""
    rows = [(*inputs[:3], result) for inputs, result in calls]
    return [torch.cat([x[v] for x, v in zip(column, valid)]).detach().double() for column in zip(*rows)]


@pytest.mark.parametrize("script", RL)
def test_metrics_of_an_update_by_hand(scripts, small, monkeypatch, script):
    """Approximate KL, ratio, clip fractions and losses: means over all valid tokens (RLOO: responses)."""
    module = scripts[script]
    flags = SGD | dict(total_episodes=8, num_ppo_epochs=3, cliprange=0.01)
    policy_calls = spy(monkeypatch, module, "clipped_policy_loss")
    if script in PPO:
        flags |= dict(cliprange_value=0.01, vf_coef=1.0)
        value_calls = spy(monkeypatch, module, "clipped_value_loss")
    _, folder = module.train(small(script, **flags))

    # Log-probabilities after the end of a response are 0.
    valid = [old != 0 for (_, old, *_), _ in policy_calls]
    new, old, A, loss = all_calls(policy_calls, valid)
    ratio = torch.exp(new - old)
    is_clipped = ((A > 0) & (ratio > 1.01)) | ((A < 0) & (ratio < 0.99))
    expected = {
        "policy/approxkl_avg": 0.5 * (new - old).square().mean(),
        "policy/clipfrac_avg": is_clipped.double().mean(),
        "val/ratio": ratio.mean(),
        "val/ratio_var": ratio.var(correction=0),
        "loss/policy_avg": loss.mean(),
    }
    if script in PPO:
        values, old_values, returns, value_loss = all_calls(value_calls, valid)
        clipped_values = old_values + (values - old_values).clamp(-0.01, 0.01)
        is_worse = (clipped_values - returns).abs() > (values - returns).abs() + 1e-6
        expected |= {"loss/value_avg": value_loss.mean(), "val/clipfrac_avg": is_worse.double().mean()}
    row = rows_of(folder)[0]
    for name, x in expected.items():
        assert row[name] == pytest.approx(x.item(), rel=1e-3, abs=1e-6), name
        assert abs(row[name]) > 1e-6, name


@pytest.mark.parametrize("script", RL)
def test_clip_ranges_reach_the_losses(scripts, small, monkeypatch, script):
    """Trap 36: the losses are clipped with cliprange and cliprange_value."""
    module = scripts[script]
    flags = {"clipped_policy_loss": "cliprange"}
    if script in PPO:
        flags["clipped_value_loss"] = "cliprange_value"
    ranges = {flag: 0.123 + i for i, flag in enumerate(flags.values())}
    calls = {flag: spy(monkeypatch, module, name) for name, flag in flags.items()}
    module.train(small(script, **ranges))
    for flag, seen in calls.items():
        assert {inputs[3] for inputs, _ in seen} == {ranges[flag]}


@pytest.mark.parametrize("script", ["sft", "reward_model"])
def test_a_larger_batch_of_equal_rows_has_the_same_gradient(scripts, small, tiny_lm, tmp_path, script):
    """Trap 28: the loss is a mean, so 6 equal rows give the gradient of 2."""
    if script == "sft":
        row = dict(prompt="A post.", completion=" good")
        packing = dict(packing=False)
    else:
        row = dict(prompt="A post.", chosen=" good one", rejected=" bad")
        packing = {}
    data = write_rows(tmp_path / "data", train=[row] * 6, test=[row])
    norms = []
    for n in (2, 6):
        batch = dict(per_device_train_batch_size=n, num_train_epochs=n / 6)
        args = small(script, f"run{n}", dataset_name=data, model_name_or_path=tiny_lm(), **batch, **packing)
        _, folder = scripts[script].train(args)
        norms.append(rows_of(folder)[0]["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert norms[0] > 1e-3


# ---- Models ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["shared", "own"])
def test_a_value_is_predicted_before_its_token(tiny_lm, kind):
    """Trap 6: another third token of the response changes the fourth value and no earlier one."""
    ppo = module_with("PolicyAndValue")
    critic = AutoModel.from_pretrained(tiny_lm("llama")) if kind == "own" else None
    model = ppo.PolicyAndValue(AutoModelForCausalLM.from_pretrained(tiny_lm()), critic=critic).eval()
    torch.manual_seed(0)
    torch.nn.init.normal_(model.value_head.weight)
    ids = torch.randint(3, 1000, (2, 9))
    other = ids.clone()
    other[:, -2] += 1
    mask = torch.ones_like(ids, dtype=torch.bool)
    with torch.no_grad():
        values = model(ids, mask, 4, 1.0)[2].view(2, 4)
        other_values = model(other, mask, 4, 1.0)[2].view(2, 4)
    torch.testing.assert_close(values[:, :3], other_values[:, :3])
    assert (values - other_values)[:, 3].abs().min() > 1e-4


def test_lora_has_no_dropout(tiny_lm):
    """Trap 13: two forward passes of an adapter in training mode are equal."""
    module = module_with("add_lora")
    base = module.load_model(AutoModelForCausalLM, tiny_lm())
    model = module.add_lora(base, module.Args(lora_r=4, lora_target_modules="c_attn")).train()
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p)
    ids = torch.arange(3, 12)[None]
    assert torch.equal(model(ids).logits, model(ids).logits)


# ---- Rewards -----------------------------------------------------------------------------------------------


def test_the_meteor_of_a_run_is_of_the_reference(scripts, small):
    """METEOR is not symmetric: recall, of the reference's words, has nine times the weight of precision."""
    module = scripts["ppo_dialog"]
    args = small("ppo_dialog", reward_model_path=None)
    reward_parts, *_ = module.load_reward_parts(args, torch.device("cpu"), None)
    turn = module.Turn({}, 1, ["Hello."], "the cat sat here", None, [], [])
    score = reward_parts([turn], ["the cat"], [[]])["meteor"].item()
    precision, recall, chunks_per_match = 1.0, 0.5, 1 / 2
    mean = 10 * precision * recall / (recall + 9 * precision)
    assert score == pytest.approx(mean * (1 - 0.5 * chunks_per_match**3))


def test_bleu_is_of_the_answers(scripts):
    """BLEU is not symmetric: an answer that is too short is penalized, and has a precision of 1."""
    answers, references = ["the cat sat on the mat"], ["the cat sat on the mat and slept"]
    bleu = scripts["ppo_dialog"].text_metrics(answers, references)["sacrebleu"]
    assert bleu == pytest.approx(math.exp(1 - 8 / 6))


# ---- The adaptive KL coefficient ---------------------------------------------------------------------------


@pytest.mark.parametrize("script", PPO)
def test_the_coefficient_follows_the_logged_kl(scripts, small, monkeypatch, script):
    """Trap 44: the target and the logged KL are both per response, a sum over its tokens."""
    calls = spy(monkeypatch, scripts[script], "adaptive_kl_coef")
    args = small(script, total_episodes=24, kl_target=0.5, kl_horizon=100)
    _, folder = scripts[script].train(args)
    kl = [row["objective/kl"] for row in rows_of(folder)]
    assert [inputs[1] for inputs, _ in calls] == kl
    assert kl[2] > 1e-3
    assert [inputs[4] for inputs, _ in calls] == [8] * 3


def test_two_processes_have_one_kl_coefficient(small, tmp_path):
    """Trap 21: the coefficient follows the logged KL, which is that of both processes."""
    flags = SGD | dict(per_device_train_batch_size=2, kl_coef=0.3, kl_target=0.9, kl_horizon=50)
    args = small("ppo_sentiment", "two", total_episodes=24, **flags)
    process = start_process(torchrun_words("ppo_sentiment", args, 2), tmp_path)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    rows = rows_of(tmp_path / "two")
    assert len(rows) == 3
    error = rows[1]["objective/kl"] / 0.9 - 1
    assert 1e-3 < abs(error) < 0.19  # inside of Ziegler's clip
    expected = rows[1]["objective/kl_coef"] * (1 + error * 8 / 50)
    assert rows[2]["objective/kl_coef"] == pytest.approx(expected, rel=1e-5)


# ---- Data and run folder -----------------------------------------------------------------------------------


def test_held_out_documents_of_sft_are_drawn_at_random(scripts, small, monkeypatch):
    """The first rows of a file are often alike, such as all negative in IMDB."""
    module = scripts["sft"]
    packed = spy(monkeypatch, module, "pack")
    args = small("sft", num_eval_prompts=4)
    module.train(args)
    _, rows = module.load_splits(args.dataset_name)
    documents, _ = module.load_documents(rows, module.load_tokenizer(args.model_name_or_path), args)
    (held_out, *_), _ = packed[1]  # packed[0] are the training documents
    places = [documents.index(document) for document in held_out]
    assert len(set(places)) == 4
    assert max(places) > 8


@pytest.mark.parametrize("script", ["sft", "ppo_sentiment"])
def test_weights_that_are_not_finite_are_not_saved(scripts, small, monkeypatch, script):
    """Metrics are computed before the optimizer step, so they can be finite when the weights are not."""

    def step(self, closure=None):
        self.param_groups[0]["params"][0].data.fill_(math.inf)

    monkeypatch.setattr(torch.optim.SGD, "step", step)
    one_step = dict(num_train_rows=4, num_samples=0) if script == "sft" else dict(num_ppo_epochs=1)
    if script == "ppo_sentiment":
        one_step |= dict(num_mini_batches=1, per_device_train_batch_size=8)
    args = small(script, optimizer="torch.optim.SGD", **one_step)
    with pytest.raises(Exception, match="finite"):
        scripts[script].train(args)
    assert not list(Path(args.output_dir).glob("checkpoints/*/*"))
    assert not (Path(args.output_dir) / "model").exists()


def test_the_estimator_of_a_kl_in_the_loss(scripts, small, monkeypatch):
    """Trap 36: --kl-estimator is used in the loss. The logged KL is always k1."""
    calls = spy(monkeypatch, scripts["rloo_tldr"], "kl_per_token")
    scripts["rloo_tldr"].train(small("rloo_tldr", total_episodes=8, kl_estimator="k3"))
    estimators = [inputs[2] for inputs, _ in calls]
    assert estimators == ["k1"] + ["k3"] * 4  # 2 epochs of 2 minibatches
