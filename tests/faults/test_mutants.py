"""Tests for the faults of mutate.py that no other test would notice."""

import math
from pathlib import Path

import pytest
import torch
from conftest import RL, module_with
from run_tools import (
    eos_prone,
    rows_of,
    same,
    start_process,
    timeless,
    torchrun_words,
    weights,
    without_check_of_models,
)
from transformers import AutoModel, AutoModelForCausalLM

pytest_plugins = ["run_fixtures"]
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
