"""Whole runs of ppo_sentiment.py on tiny models: what each option does to weights, rewards, tokens and files.

Some tests also run the other RL scripts, where all must behave alike.
"""

import math
import shutil
from dataclasses import replace

import pytest
import torch
import transformers
from conftest import EOS, RL
from run_tools import (
    ALL,
    assert_same_run,
    distance,
    eos_prone,
    rows_of,
    same,
    spy,
    timeless,
    weights,
    without_check_of_models,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest_plugins = ["run_fixtures"]
SCRIPT = "ppo_sentiment"
SGD = dict(optimizer="torch.optim.SGD")


def build(script, args):
    """The models that these flags build: PolicyAndValue, reference."""
    return script.load_policy_and_value(args, torch.device("cpu"))


def random_inputs(B=3, L=10, T=5):
    """Random tokens as inputs of PolicyAndValue, without padding: ids, mask, T, temperature."""
    ids = torch.randint(0, 1000, (B, L), generator=torch.Generator().manual_seed(0))
    return ids, torch.ones_like(ids, dtype=torch.bool), T, 1.0


# ---- The first update --------------------------------------------------------------------------------------


def test_learning_rate_0_changes_nothing(ppo, tiny_lm):
    """The ratio is 1, the KL is 0, and the weights stay bit-identical, in both updates."""
    model, folder, metrics = ppo(learning_rate=0.0, total_episodes=16)
    for row in metrics:
        assert row["policy/approxkl_avg"] < 1e-10
        assert row["objective/kl"] == 0
    assert same(weights(folder / "model"), weights(tiny_lm()))
    assert not model.value_head.weight.any()


@pytest.mark.parametrize("script", [*RL, "grpo_tools"])
def test_a_model_that_changes_between_calls_ends_the_run(scripts, small, monkeypatch, script):
    """Before the first step the ratio must be 1. If rollout and update differ, the run ends."""
    module = scripts[script]
    response_logprobs = module.response_logprobs

    def other_in_training(*inputs, **options):
        logprobs, *rest = response_logprobs(*inputs, **options)
        return logprobs + 0.03 * torch.is_grad_enabled(), *rest

    without_check_of_models(monkeypatch, module)
    monkeypatch.setattr(module, "response_logprobs", other_in_training)
    with pytest.raises(AssertionError, match="rollout and update differ"):
        module.train(small(script))


@pytest.mark.parametrize("script", [*RL, "grpo_tools"])
def test_a_sampler_that_reads_less_ends_the_run(scripts, small, monkeypatch, script):
    """It misses every second token. One step per batch hides that: all ratios are 1."""
    module = scripts[script]
    hidden_states = module.hidden_states

    def with_gaps(body, ids, mask, cache=None):
        if ids.shape[1] == 1:  # the newest token, in sampling
            mask = mask.clone()
            mask[:, :-1:2] = False
        return hidden_states(body, ids, mask, cache)

    without_check_of_models(monkeypatch, module)
    monkeypatch.setattr(module, "hidden_states", with_gaps)
    with pytest.raises(AssertionError, match=r"sampling and update differ by [\d.]+ nats per token"):
        module.train(small(script, num_mini_batches=1, num_ppo_epochs=1))


@pytest.mark.parametrize("script", [*RL, "grpo_tools", "dpo_tldr"])
def test_rare_tokens_can_be_sampled(scripts, small, monkeypatch, script):
    """Uniforms in fp32 are multiples of 2^-24: tokens of lower probability are missed, or come too often."""
    calls = spy(monkeypatch, scripts[script], "sample_tokens")
    scripts[script].train(small(script))
    assert calls
    for (_, uniforms), _ in calls:
        assert (uniforms * 2**24 % 1 != 0).all()


@pytest.mark.parametrize("script", ALL)
def test_another_number_of_micro_batches_ends_the_run(scripts, small, monkeypatch, script):
    """Three, where accelerate expects two: otherwise it would skip optimizer steps."""
    module = scripts[script]
    start_accelerator = module.start_accelerator

    def expect_two(args):
        accelerator = start_accelerator(args)
        accelerator.gradient_accumulation_steps = 2
        return accelerator

    monkeypatch.setattr(module, "start_accelerator", expect_two)
    with pytest.raises(AssertionError, match="no optimizer step: too few or too many micro-batches"):
        module.train(small(script, per_device_train_batch_size=2, gradient_accumulation_steps=3))


def test_responses_keep_their_first_space(ppo, script, metaspace_lm, monkeypatch):
    """prompt + response is the text of all tokens, even if the tokenizer drops the first space it decodes."""
    calls = spy(monkeypatch, script, "rollout")
    ppo(model_name_or_path=metaspace_lm)
    b, prompts, responses = calls[1][1]
    tokenizer = AutoTokenizer.from_pretrained(metaspace_lm)
    tokens = [row[m].tolist() for row, m in zip(b["ids"], b["mask"])]
    texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    assert [prompt + response for prompt, response in zip(prompts, responses)] == texts
    assert any(response.startswith(" ") for response in responses)


@pytest.mark.parametrize("script", [*RL, "grpo_tools"])
def test_nothing_after_the_end_is_read(scripts, small, monkeypatch, tiny_lm, tmp_path, script):
    """Traps 4 and 5: put large numbers at all pads in the hidden states. Not a bit changes."""
    module = scripts[script]
    lm = eos_prone(tiny_lm, tmp_path / "lm")
    flags = dict(model_name_or_path=lm, total_episodes=16, seed=2)
    if script == "grpo_tools":  # its model writes turns of different lengths
        del flags["model_name_or_path"]
    elif script != "grpo_math":
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


# ---- LoRA, memory and precision ----------------------------------------------------------------------------

LORA = dict(lora_r=4, lora_alpha=8)


def test_shared_layers(ppo, script, small, tiny_lm):
    """Shared parameters are the same objects in policy and reference, and frozen. Only the others move."""
    model, reference = build(script, small("ppo_sentiment", num_shared_layers=1))
    policy = dict(model.policy.named_parameters())
    reference = dict(reference.named_parameters())
    shared = {name for name in policy if policy[name] is reference[name]}
    assert shared == {name for name in policy if ".wte." in name or ".wpe." in name or ".h.0." in name}
    assert all(policy[name].requires_grad == (name not in shared) for name in policy)
    assert not any(p.requires_grad for p in reference.values())

    model, _, _ = ppo(num_shared_layers=1)
    start = dict(AutoModelForCausalLM.from_pretrained(tiny_lm()).named_parameters())
    for name, p in model.policy.named_parameters():
        assert torch.equal(p, start[name]) == (name in shared), name


def test_reference_in_8_bit(ppo, script, small):
    """Without LoRA the reference is in int8. The policy stays in fp32."""
    model, reference = build(script, small("ppo_sentiment", load_in_8bit=True))
    assert sum(p.dtype == torch.int8 for p in reference.parameters()) == 8
    assert all(p.dtype == torch.float32 for p in model.policy.parameters())
    _, _, metrics = ppo(load_in_8bit=True)
    assert 0 < abs(metrics[0]["objective/kl"]) < 0.5  # only rounding


def test_lora_on_a_base_in_8_bit(ppo, script, small):
    """The base is in int8 and does not change. model/ is the adapter, which plain transformers loads."""
    flags = dict(load_in_8bit=True, **LORA)
    start = build(script, small("ppo_sentiment", **flags))[0].policy.get_base_model().state_dict()
    model, folder, metrics = ppo(total_episodes=16, **flags)
    base = model.policy.get_base_model().state_dict()
    frozen = [name for name in base if name.endswith("weight") and base[name].dtype == torch.int8]
    assert len(frozen) == 8 and all(torch.equal(base[name], start[name]) for name in frozen)
    assert all(x.abs().max() > 0 for name, x in base.items() if "lora_B" in name)
    assert metrics[0]["objective/kl"] == 0 and metrics[1]["objective/kl"] != 0
    assert (folder / "model/adapter_config.json").exists()
    loaded = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    ids = random_inputs()[0]
    with torch.no_grad():
        trained = model.policy.eval()(ids).logits.log_softmax(-1)
        gap = (trained - loaded(ids).logits.log_softmax(-1)).abs()
    assert gap.max() < 0.5 and gap.mean() < 0.05  # the base was rounded


def test_outliers_in_8_bit(ppo, script, tiny_lm, monkeypatch, tmp_path):
    """Activations above 6, as real models have: rollout and update still compute the same probabilities.

    With a threshold for outliers, rounding depends on which rows are in a batch. And bitsandbytes on a CPU
    rounds activations in eval mode only.
    """
    lm = AutoModelForCausalLM.from_pretrained(tiny_lm())
    for block in lm.transformer.h:  # the same function: the norms grow, and what reads them shrinks
        for norm, layer in ((block.ln_1, block.attn.c_attn), (block.ln_2, block.mlp.c_fc)):
            norm.weight.data *= 3
            norm.bias.data *= 3
            layer.weight.data /= 3
    lm.save_pretrained(tmp_path / "lm")
    AutoTokenizer.from_pretrained(tiny_lm()).save_pretrained(tmp_path / "lm")
    calls = spy(monkeypatch, script, "clipped_policy_loss")
    ppo(load_in_8bit=True, model_name_or_path=str(tmp_path / "lm"), **LORA)
    (new_logprobs, old_logprobs, _, _), _ = calls[0]  # before the first step
    assert (new_logprobs - old_logprobs).abs().mean() < 1e-3


@pytest.mark.parametrize("lora", [{}, LORA], ids=["full", "lora"])
def test_gradient_checkpointing(ppo, lora):
    """Activations are recomputed in the backward pass, with the same loss and the same weights."""
    rows, trained = [], []
    for on in (False, True):
        model, folder, metrics = ppo(f"run-{on}", gradient_checkpointing=on, learning_rate=0.1, **SGD, **lora)
        body = model.policy.get_base_model() if lora else model.policy
        assert body.is_gradient_checkpointing == on
        rows.append(metrics[0])
        trained.append(weights(folder / "model"))
    for name in ("loss/policy_avg", "loss/value_avg"):
        assert rows[0][name] == pytest.approx(rows[1][name], abs=1e-6)
    assert distance(*trained) < 1e-6


@pytest.mark.parametrize("name", [*RL, "grpo_tools"])
def test_bf16_in_the_whole_run(scripts, small, monkeypatch, name):
    """Evaluations, rollouts and updates all use the precision of the flag."""
    script, seen = scripts[name], []
    hidden_states = script.hidden_states

    def recorded(*inputs):
        seen.append(torch.is_autocast_enabled("cpu"))
        return hidden_states(*inputs)

    without_check_of_models(monkeypatch, script)  # it is in fp32
    monkeypatch.setattr(script, "hidden_states", recorded)
    script.train(small(name, dtype="bfloat16"))
    assert len(seen) > 20 and all(seen)


@pytest.mark.parametrize("name, lora_r", [*((name, 4) for name in ALL), *((name, 0) for name in RL)])
def test_weights_rounded_in_advance_change_no_bit(scripts, small, world, monkeypatch, tmp_path, name, lora_r):
    """With and without round_frozen_weights, a run in bf16 is the same: LoRA, references, reward models."""
    script = scripts[name]
    args = small(name, "rounded", dtype="bfloat16", lora_r=lora_r)
    # A checkpoint in bf16. For a reward model, not BERT, which runs in fp32.
    start = world.lm() if name == "reward_model" else args.model_name_or_path
    base = AutoModelForCausalLM.from_pretrained(start, dtype=torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(start).save_pretrained(tmp_path / "base")
    args.model_name_or_path = str(tmp_path / "base")
    round_frozen_weights, counts = script.round_frozen_weights, []

    def counted(model, only_if_exact):
        round_frozen_weights(model, only_if_exact)
        counts.append(sum(p.dtype == torch.bfloat16 for p in model.parameters()))

    monkeypatch.setattr(script, "round_frozen_weights", counted)
    script.train(args)
    assert any(counts)
    monkeypatch.setattr(script, "round_frozen_weights", lambda model, only_if_exact: None)
    script.train(replace(args, output_dir=str(tmp_path / "plain")))
    assert_same_run(tmp_path / "plain", tmp_path / "rounded")


def test_dtype_auto_wants_hardware_for_bf16(script, monkeypatch):
    """If a GPU only emulates bf16, --dtype auto is float32."""

    def is_bf16_supported(including_emulation=True):
        return including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    assert not script.wants_bf16(script.Args(dtype="auto"), torch.device("cuda"))


# ---- Value function and padding ----------------------------------------------------------------------------


def test_a_critic_with_its_own_weights(ppo, script, small, tiny_lm):
    """The critic trains, and it loads again with its head."""
    model, folder, _ = ppo(value_model_path=tiny_lm("llama"), vf_coef=1.0)
    start = transformers.AutoModel.from_pretrained(tiny_lm("llama")).state_dict()
    trained = model.critic.state_dict()
    assert sum(not torch.equal(start[name], trained[name]) for name in start) >= 0.8 * len(start)

    paths = dict(model_name_or_path=folder / "model", value_model_path=folder / "model/critic")
    args = small("ppo_sentiment", **{name: str(path) for name, path in paths.items()})
    again, _ = build(script, args)
    model.eval()
    inputs = random_inputs()
    with torch.no_grad():
        logprobs, _, values = model(*inputs)
        logprobs_again, _, values_again = again(*inputs)
        torch.testing.assert_close(logprobs, logprobs_again)
        torch.testing.assert_close(values, values_again)
        assert values.abs().min() > 0


def test_the_value_head_survives_saving(ppo, script, small):
    """A run that starts from model/ starts with its value head."""
    model, folder, _ = ppo()
    again, _ = build(script, small("ppo_sentiment", model_name_or_path=str(folder / "model")))
    inputs = random_inputs()
    with torch.no_grad():
        values = model.eval()(*inputs)[2]
        torch.testing.assert_close(again(*inputs)[2], values)
    assert values.abs().min() > 0
    assert set(load_file(folder / "model/value_head.safetensors")) == {"weight", "bias"}


@pytest.mark.parametrize("pad", [EOS, "[PAD]"])
def test_the_pad_token_does_not_matter(ppo, tiny_lm, tmp_path, pad):
    """Pad may be EOS, or a token without a row in the embedding table. Some responses end early."""
    lm = eos_prone(tiny_lm, tmp_path / "lm")
    other = shutil.copytree(lm, tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(lm)
    tokenizer.add_special_tokens(dict(pad_token=pad))
    tokenizer.save_pretrained(other)
    assert tokenizer.pad_token_id in (tokenizer.eos_token_id, 1024)
    _, _, rows = ppo("run-1", model_name_or_path=lm, seed=3)
    _, _, other_rows = ppo("run-2", model_name_or_path=str(other), seed=3)
    assert 0 < rows[0]["val/num_eos_tokens"] < 8
    assert timeless(rows) == timeless(other_rows)


# ---- Rewards and optimizer steps ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reward_weights, expected",
    [(None, [11, 2, -30, 0]), ([2, -0.5], [-3, 4, 15, 0]), ([0, 1], [10, 0, -30, 0])],
)
def test_the_score_is_a_weighted_sum(script, small, tiny_lm, reward_weights, expected):
    """Weights go by position, and are 1 if none are given. A reward that does not apply (nan) counts as 0."""
    args = small("ppo_sentiment", reward_weights=reward_weights, response_length=3)
    model, reference = build(script, args)
    tokenizer = script.load_tokenizer(tiny_lm())
    reviews = script.load_prompts([dict(text=f"{i} films are good") for i in range(4)], tokenizer, args)
    rewards = {
        "b": torch.tensor([1, 2, math.nan, math.nan]),
        "a": torch.tensor([10, math.nan, -30, math.nan]),
    }
    batch = script.draw_batch(reviews, 0, 4, args, 1)
    stop_ids = torch.tensor([tokenizer.eos_token_id])
    b, _, _ = script.rollout(model, reference, tokenizer, stop_ids, lambda *_: rewards, batch, args)
    assert b["raw_scores"].tolist() == expected
    for name, x in rewards.items():
        torch.testing.assert_close(b[f"rewards/{name}"], x, equal_nan=True)


def test_whiten_rewards(ppo, script, monkeypatch):
    """The rewards of valid tokens get a standard deviation of 1 and keep their mean."""
    [rewards, advantages] = [spy(monkeypatch, script, name) for name in ("token_rewards", "gae")]
    ppo(whiten_rewards=True)
    [((_, _, lengths, _), raw)] = rewards
    [((used, *_), _)] = advantages
    valid = script.length_mask(lengths, 6)
    raw, used = raw[valid], used[valid]
    assert raw.std(correction=0).item() != pytest.approx(1, abs=1e-2)
    assert used.std(correction=0).item() == pytest.approx(1, abs=1e-4)
    assert used.mean().item() == pytest.approx(raw.mean().item(), abs=1e-6)


def test_the_gradient_does_not_depend_on_micro_batches(ppo, tiny_lm):
    """One step of SGD on 8 responses of unequal lengths: as 8, as 2 x 4 and as 8 x 1."""
    trained = []
    for n, accumulation in ((8, 1), (4, 2), (1, 8)):
        _, folder, rows = ppo(
            f"run{n}",
            learning_rate=0.1,
            max_grad_norm=None,
            vf_coef=1.0,
            per_device_train_batch_size=n,
            gradient_accumulation_steps=accumulation,
            num_mini_batches=1,
            num_ppo_epochs=1,
            **SGD,
        )
        value_head = load_file(folder / "model/value_head.safetensors")
        trained.append(weights(folder / "model") | value_head)
    assert rows[0]["completions/min_length"] < rows[0]["completions/max_length"]
    assert distance(trained[0], trained[1]) < 1e-6
    assert distance(trained[0], trained[2]) < 1e-6
    start = weights(tiny_lm())
    assert max((trained[0][name] - start[name]).abs().max() for name in start) > 1e-3


def test_a_metric_that_is_not_finite_ends_the_run(ppo, script, monkeypatch, tmp_path):
    """It is named, and nothing is saved for that update."""
    value_loss = script.clipped_value_loss
    calls = []

    def infinite_in_update_2(*args):
        calls.append(1)
        loss, is_clipped = value_loss(*args)
        # A constant, so the gradient stays finite.
        return loss + (math.inf if len(calls) > 4 else 0.0), is_clipped

    monkeypatch.setattr(script, "clipped_value_loss", infinite_in_update_2)
    with pytest.raises(script.UserError, match="update 2: not finite: loss/value_avg .--learning"):
        ppo(total_episodes=24, save_every=1)
    assert [row["update"] for row in rows_of(tmp_path / "run")] == [1]
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["000001"]
    assert not (tmp_path / "run/model").exists()


# ---- The run folder ----------------------------------------------------------------------------------------


def test_a_run_that_is_made_longer_follows_the_longer_schedule(ppo, script):
    """Its next learning rate is the one of the longer run, not the 0 at the end of the shorter one."""
    _, folder, _ = ppo(total_episodes=16, lr_scheduler_type="linear")
    script.train(script.parse_args(["--resume", str(folder), "--total-episodes", "32"]))
    assert [row["lr"] for row in rows_of(folder)] == pytest.approx([1e-2, 0.5e-2, 0.5e-2, 0.25e-2])


def test_old_checkpoints_are_deleted(ppo):
    """The newest keep_checkpoints stay."""
    _, folder, _ = ppo(total_episodes=40, save_every=1, keep_checkpoints=2, num_ppo_epochs=1)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["000004", "000005"]
