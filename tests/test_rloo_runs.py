"""Whole runs of rloo_tldr.py on tiny models: groups, rewards, ratios of whole responses, judges, and the commands of TRL's page."""

import json
import math
import shlex
import subprocess
import time
import urllib.request
from dataclasses import replace

import pytest
import torch
import transformers
from run_tools import distance, free_port, reward_file, rows_of, same, spy, start_process, weights, write_rows
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

pytest_plugins = ["run_fixtures"]
SGD = dict(optimizer="torch.optim.SGD", max_grad_norm=None)


@pytest.fixture
def script(scripts):
    return scripts["rloo_tldr"]


def start_of(folder):
    """The weights of a policy before the run, named as in its file."""
    return weights(folder)


# ---- Learning rate 0 -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sizes, off", [(dict(num_mini_batches=1, per_device_train_batch_size=8), 0.0), ({}, 1e-5),
                                        (dict(share_prompts=True), 1e-5)], ids=["equal", "drawn", "groups"])
def test_learning_rate_0_changes_nothing(rloo, tiny_lm, sizes, off):
    """Trick 10: the first ratio of whole responses is 1, the KL 0, and the weights stay to the bit. A batch in one pass has
    the rollout's own width in the update, so the ratio is exactly 1; in other passes the width differs, and so does the rounding.
    """
    _, folder, metrics = rloo(learning_rate=0.0, **sizes)
    assert len(metrics) == 2
    for row in metrics:
        assert abs(row["val/ratio"] - 1) <= off and row["policy/approxkl_avg"] <= off**2
        assert (row["objective/kl"], row["policy/clipfrac_avg"]) == (0.0, 0.0)
    assert same(weights(folder / "model"), start_of(tiny_lm()))


@pytest.mark.parametrize("flags", [dict(), dict(share_prompts=True, temperature=0.7), dict(lora_r=2, lora_target_modules="c_attn")],
                         ids=["plain", "groups", "lora"])
def test_old_logprobs_of_the_sampler_make_the_same_step(rloo, script, monkeypatch, flags):
    """Trick 10: they are those of a forward pass to 1e-5, which the rollout then does without; the step is the same."""
    seen = {}
    for old in ("forward", "sampler"):
        with monkeypatch.context() as patch:
            rollouts, forwards = spy(patch, script, "rollout_groups"), spy(patch, script.PolicyAndReference, "forward")
            _, folder, (row,) = rloo(old, old_logprobs=old, total_episodes=8, **SGD, learning_rate=1e-2, **flags)
        seen[old] = rollouts[1][1][0]["logprobs"], weights(folder / "model"), row, len(forwards)
    (logprobs, after, row, forwards), (drawn, after_drawn, row_drawn, fewer) = seen.values()
    torch.testing.assert_close(drawn, logprobs, atol=1e-5, rtol=1e-5)
    assert not torch.equal(drawn, logprobs) and fewer < forwards and distance(after, after_drawn) < 2e-6
    assert row_drawn["val/ratio"] == pytest.approx(row["val/ratio"], rel=1e-4) != 1


def test_old_logprobs_of_the_sampler_are_checked(rloo, script, monkeypatch):
    """Trick 10: where the first ratio of an update is not 1, in bf16 or by a mistake, the run ends; --old-logprobs forward goes on."""
    with pytest.raises(script.UserError, match="--old-logprobs sampler: the first ratios"):
        rloo("bf16", old_logprobs="sampler", dtype="bfloat16")
    original, calls = script.generate_groups, []

    def later(*args):  # a distribution that has moved, from the second update on (the first call is the evaluation's)
        calls.append(1)
        tokens, lengths, logprobs = original(*args)
        return tokens, lengths, logprobs + 0.01 * (len(calls) > 2)

    monkeypatch.setattr(script, "generate_groups", later)
    with pytest.raises(script.UserError, match="--old-logprobs sampler: the first ratios"):
        rloo("moved", old_logprobs="sampler")
    assert len(calls) == 3
    rloo("forward", old_logprobs="forward")


def test_other_splits_of_the_batch_sample_the_same_tokens(rloo, script, monkeypatch):
    """Micro-batches and rollout batches of other sizes: the same responses in the same order, and a ratio within 1e-4 of 1."""
    seen = []
    for i, (rollout, n, accumulation, minibatches) in enumerate([(8, 4, 1, 2), (3, 2, 2, 2), (1, 1, 8, 1)]):
        with monkeypatch.context() as patch:
            calls = spy(patch, script, "rollout_groups")
            sizes = dict(per_device_train_batch_size=n, gradient_accumulation_steps=accumulation, num_mini_batches=minibatches)
            _, _, metrics = rloo(f"run{i}", learning_rate=0.0, local_rollout_forward_batch_size=rollout, **sizes)
        assert abs(metrics[0]["val/ratio"] - 1) < 1e-4 and abs(metrics[0]["objective/kl"]) < 1e-4
        seen.append([(prompts, responses) for _, (_, prompts, responses) in calls])
    assert seen[0] == seen[1] == seen[2]


# ---- Groups ----------------------------------------------------------------------------------------------------------
def test_a_group_answers_one_prompt(rloo, script, monkeypatch):
    """Trick 25: rows r, P + r, 2 P + r, ... are the k responses to prompt r, and they are not all the same."""
    calls = spy(monkeypatch, script, "rollout_groups")
    rloo(rloo_k=4)
    b, prompts, responses = calls[1][1]  # the first call is the evaluation's
    asked = b["ids"][:, : -b["logprobs"].shape[1]]
    assert torch.equal(asked[:2].repeat(4, 1), asked) and prompts == prompts[:2] * 4
    assert len(set(responses)) > 2 and len(set(prompts)) == 2


def test_a_prompt_runs_through_the_model_once(script, tiny_lm, monkeypatch):
    """The first forward has P rows for k * P responses, and these are what k copies of the prompts would have got."""
    model = AutoModelForCausalLM.from_pretrained(tiny_lm()).eval()
    ids, uniforms = torch.randint(3, 1000, (2, 5), generator=torch.Generator().manual_seed(0)), torch.rand(3, 2, 6)
    mask = torch.tensor([[False, True, True, True, True], [True] * 5])
    calls = spy(monkeypatch, script, "hidden_states")
    tokens, lengths, _ = script.generate_groups(model, ids, mask, uniforms.flatten(0, 1), 0, 1.0)
    assert [args[1].shape for args, _ in calls[:2]] == [(2, 5), (6, 1)]
    for i in range(3):
        alone = script.generate_groups(model, ids, mask, uniforms[i], 0, 1.0)
        assert torch.equal(lengths[2 * i : 2 * i + 2], alone[1])
        valid = script.length_mask(alone[1], 6)
        assert torch.equal(tokens[2 * i : 2 * i + 2][valid], alone[0][valid])


def test_mixed_groups_are_noticed(rloo, script, monkeypatch):
    """A rollout that orders its rows prompt by prompt ends with an assertion."""
    original = script.rollout_groups

    def prompt_major(model, tokenizer, score, batch, stop_token_id, args):
        b, prompts, responses = original(model, tokenizer, score, batch, stop_token_id, args)
        k = batch[2].shape[0]
        return {name: x.view(k, -1, *x.shape[1:]).transpose(0, 1).flatten(0, 1) for name, x in b.items()}, prompts, responses

    monkeypatch.setattr(script, "rollout_groups", prompt_major)
    with pytest.raises(AssertionError, match="same prompt"):
        rloo()


# ---- Rewards ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("flags", [dict(), dict(whiten_rewards=True), dict(kl_in_loss=True, kl_estimator="k3"), dict(score_clip=0.01),
                                   dict(kl_estimator="k2")], ids=["k1", "whiten", "loss-k3", "clip", "k2"])  # fmt: skip
def test_rewards_by_hand(rloo, script, monkeypatch, flags):
    """Score, clip, EOS penalty, KL, whitening, in this order (tricks 17 to 19)."""
    advantages, rollouts = spy(monkeypatch, script, "rloo_advantages"), spy(monkeypatch, script, "rollout_groups")
    _, _, rows = rloo(kl_coef=0.3, **flags)
    (rewards, k), _ = advantages[1]  # of the second update, whose KL is not 0
    b = rollouts[2][1][0]
    expected = []
    for i in range(len(rewards)):
        n, ratios = int(b["lengths"][i]), (b["logprobs"] - b["ref_logprobs"])[i].tolist()
        kl = sum({"k1": x, "k2": x * x / 2, "k3": math.exp(-x) - 1 + x}[flags.get("kl_estimator", "k1")] for x in ratios[:n])
        score = b["scores"][i].item()
        if "score_clip" in flags:
            score = min(max(score, -0.01), 0.01)
        score -= 0 if b["stopped"][i] else 1.0
        expected.append(score if flags.get("kl_in_loss") else score - 0.3 * kl)
    expected = torch.tensor(expected)
    if flags.get("whiten_rewards"):
        expected = expected / expected.std(correction=0)
    torch.testing.assert_close(rewards, expected, atol=1e-5, rtol=1e-4)
    assert k == 2 and rows[1]["objective/non_score_reward"] == pytest.approx(-0.3 * rows[1]["objective/kl"])
    assert rows[1]["objective/rlhf_reward"] == pytest.approx(rows[1]["objective/scores"] + rows[1]["objective/non_score_reward"])


def test_kl_in_the_loss_pulls_to_the_reference(rloo, script, monkeypatch):
    """With equal rewards for all the loss is the KL alone: a second epoch moves back towards the reference."""
    monkeypatch.setattr(script, "rloo_advantages", lambda rewards, k: torch.ones_like(rewards))
    moved = []
    for coef in (0.0, 50.0):
        flags = dict(kl_in_loss=True, kl_estimator="k2", kl_coef=coef, num_mini_batches=1, per_device_train_batch_size=8, total_episodes=32)
        _, _, rows = rloo(f"run{coef}", learning_rate=1e-4, optimizer="torch.optim.SGD", num_ppo_epochs=4, max_grad_norm=1.0, **flags)
        moved.append(abs(rows[-1]["objective/kl"]))
    assert moved[1] < moved[0]


def test_loss_is_of_whole_responses(rloo, script, monkeypatch):
    """clipped_policy_loss gets one number a response: the sum over its tokens, new minus old."""
    calls = spy(monkeypatch, script, "clipped_policy_loss")
    rloo(learning_rate=0.5, num_ppo_epochs=3, **SGD)
    shapes = {tuple(x.shape for x in args[:3]) for args, _ in calls}
    assert shapes == {((4,), (4,), (4,))}
    assert any(args[0].abs().max() > 1e-3 for args, _ in calls)


def test_gradient_does_not_depend_on_micro_batches(rloo, tiny_lm):
    """Trick 28: one step of SGD on 8 responses: as 8, as 2 x 4 and as 8 x 1."""
    results = []
    for n, accumulation in ((8, 1), (4, 2), (1, 8)):
        sizes = dict(per_device_train_batch_size=n, gradient_accumulation_steps=accumulation, num_mini_batches=1, num_ppo_epochs=1)
        flags = dict(kl_in_loss=True, kl_estimator="k3", learning_rate=0.1, total_episodes=8)
        _, folder, _ = rloo(f"run{n}", **SGD, **sizes, **flags)
        results.append(weights(folder / "model"))
    assert distance(results[0], results[1]) < 2e-6 and distance(results[0], results[2]) < 2e-6
    assert distance(results[0], start_of(tiny_lm())) > 1e-3


def test_share_prompts_is_another_way_to_the_same_step(rloo, tiny_lm):
    """A step of SGD on 8 responses, 4 to a prompt: with prompts read once, in passes of 8 and of 4, and without."""
    results = []
    halves = dict(per_device_train_batch_size=4, gradient_accumulation_steps=2)
    for i, sizes in enumerate(({}, dict(share_prompts=True), dict(share_prompts=True, **halves))):
        sizes = dict(rloo_k=4, per_device_train_batch_size=8, num_mini_batches=1, num_ppo_epochs=1, total_episodes=8) | sizes
        _, folder, rows = rloo(f"run{i}", **SGD | dict(learning_rate=0.1), kl_in_loss=True, kl_estimator="k3", **sizes)
        assert abs(rows[0]["val/ratio"] - 1) < 1e-5
        results.append(weights(folder / "model"))
    assert distance(results[0], results[1]) < 2e-6 and distance(results[0], results[2]) < 2e-6
    assert distance(results[0], start_of(tiny_lm())) > 1e-3


def test_share_prompts_keeps_groups_together(rloo, script, monkeypatch):
    """Every pass of the rollout and of the update has whole groups: all first responses, then all second ones, ..."""
    calls = spy(monkeypatch, script, "group_states")
    rloo(share_prompts=True, rloo_k=2, per_device_train_batch_size=4, num_mini_batches=2, num_ppo_epochs=2, total_episodes=8)
    trained = [args for args, out in calls if out.requires_grad]
    assert len(trained) == 4 and {len(ids) for _, _, ids, *_ in trained} == {4}
    for k, _, ids, _, T in (args for args, _ in calls):
        first, second = ids[:, :-T].chunk(2)
        assert k == 2 and torch.equal(first, second) and not torch.equal(*ids[:, -T:].chunk(2))
    epochs = [torch.cat([trained[i][2], trained[i + 1][2]]) for i in (0, 2)]  # each has all 8 rows
    assert [len(epoch.unique(dim=0)) for epoch in epochs] == [8, 8]


def test_share_prompts_needs_whole_groups(script, small):
    for flags in (dict(rloo_k=4, per_device_train_batch_size=2), dict(gradient_checkpointing=True)):
        with pytest.raises(script.UserError, match="--share-prompts"):
            script.train(small("rloo_tldr", share_prompts=True, **flags))


@pytest.mark.parametrize("minibatches, epochs, accumulation", [(1, 1, 1), (4, 3, 1), (2, 2, 2)])
def test_number_of_steps(rloo, monkeypatch, minibatches, epochs, accumulation):
    """Trick 27: num_mini_batches * num_ppo_epochs steps an update; accumulation adds none."""
    steps, step = [], torch.optim.SGD.step
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self, *args, **kwargs: (steps.append(1), step(self, *args, **kwargs))[1])
    sizes = dict(num_mini_batches=minibatches, num_ppo_epochs=epochs, gradient_accumulation_steps=accumulation)
    rloo(per_device_train_batch_size=2, total_episodes=2 * minibatches * accumulation, **SGD, **sizes)
    assert len(steps) == minibatches * epochs


def test_rewarded_behaviour_is_learned(rloo, tmp_path):
    """A reward for short responses makes them shorter."""
    flags = dict(reward_fn=reward_file(tmp_path, "return [-len(r) / 10 for r in responses]"), total_episodes=16 * 30, rloo_k=4)
    _, _, rows = rloo(per_device_train_batch_size=8, learning_rate=3e-3, num_ppo_epochs=1, kl_coef=0.0, missing_eos_penalty=None, **flags)
    first, last = (sum(row["objective/scores"] for row in part) / 5 for part in (rows[:5], rows[-5:]))
    assert last > first + 0.5


def test_zero_variance_groups_are_counted(rloo, tmp_path, capsys):
    """frac_reward_zero_std is the share of prompts whose responses have equal scores, and a line warns where it is most of them."""
    _, _, rows = rloo("equal", reward_fn=reward_file(tmp_path, "return [1.0] * len(prompts)", "equal"))
    assert rows[0]["frac_reward_zero_std"] == 1 and "equal rewards" in capsys.readouterr().out
    _, _, rows = rloo("half", reward_fn=reward_file(tmp_path, "return [float(i == 0) for i in range(len(prompts))]", "half"))
    assert rows[0]["frac_reward_zero_std"] == 0.75  # of 4 prompts one has a response that differs


# ---- The reward model ------------------------------------------------------------------------------------------------
def test_score_is_transformers_own(script, tiny_preference_model):
    """Prompt, response and EOS, read at the last token, minus the offset; whatever else is in the batch."""
    folder = tiny_preference_model()
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    prompts, responses = ["A post.", "A longer post about a cat."] * 2, [" yes", " no, never", "", " a"]
    ours = script.load_scorer(folder, 3, torch.device("cpu"))(prompts, responses)
    for p, r, score in zip(prompts, responses, ours):
        ids = tokenizer(p).input_ids + tokenizer(r).input_ids + [tokenizer.eos_token_id]
        model.config.pad_token_id = None  # so that transformers reads the last token too, which is an EOS
        with torch.no_grad():
            assert score == pytest.approx(model(torch.tensor([ids])).logits.item() - 0.25, abs=1e-5)


def test_reward_model_with_another_tokenizer(rloo, script, tiny_classifier, tmp_path):
    """Trick 23: an encoder with 300 tokens scores what a policy with 1024 wrote."""
    folder = tmp_path / "encoder"
    config = transformers.AutoConfig.from_pretrained(tiny_classifier("other"), num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_classifier("other")).save_pretrained(folder)
    _, _, rows = rloo(reward_model_path=str(folder))
    assert math.isfinite(rows[-1]["objective/scores"]) and rows[0]["env/reward_std"] > 0


def test_bare_language_model_as_reward(rloo, tiny_lm, capsys):
    """It gets a fresh head, and a line says so."""
    _, _, rows = rloo(reward_model_path=tiny_lm("gpt_neox"))
    assert "its new head is random" in capsys.readouterr().err and rows[0]["env/reward_std"] > 0


def test_responses_keep_their_first_space(rloo, script, metaspace_lm, monkeypatch):
    """Trick 7: prompt + response is the text of all tokens, also where a tokenizer drops the first space of what it decodes."""
    calls = spy(monkeypatch, script, "rollout_groups")
    rloo(model_name_or_path=metaspace_lm)
    b, prompts, responses = calls[1][1]
    tokenizer = AutoTokenizer.from_pretrained(metaspace_lm)
    whole = tokenizer.batch_decode([row[m].tolist() for row, m in zip(b["ids"], b["mask"])], skip_special_tokens=True)
    assert [p + r for p, r in zip(prompts, responses)] == whole and any(r.startswith(" ") for r in responses)


def test_custom_stop_token(rloo, script, monkeypatch):
    """Trick 16: a response ends at the named token, which is not part of its text, and is not punished."""
    calls = spy(monkeypatch, script, "rollout_groups")
    rloo("first")
    tokens = calls[1][1][0]["ids"][:, -6:]
    stop = int(tokens[0, 2])
    calls.clear()
    rloo("second", stop_token_id=stop)
    b = calls[1][1][0]
    n = tokens[0].tolist().index(stop) + 1
    assert b["stopped"][0] and int(b["lengths"][0]) == n and b["logprobs"].shape[1] == 6
    calls.clear()
    _, _, rows = rloo("none", stop_token=None, missing_eos_penalty=None)
    assert not calls[1][1][0]["stopped"].any() and rows[0]["completions/min_length"] == 6 and rows[0]["val/num_eos_tokens"] == 0


def test_missing_eos_penalty(rloo, script, tiny_lm, monkeypatch, tmp_path):
    """It is subtracted from the score of a response that did not stop, and from no other."""
    calls, advantages = spy(monkeypatch, script, "rollout_groups"), spy(monkeypatch, script, "rloo_advantages")
    _, _, rows = rloo(missing_eos_penalty=5.0, reward_fn=reward_file(tmp_path, "return [1.0] * len(prompts)"), kl_coef=0.0)
    b, rewards = calls[1][1][0], advantages[0][0][0]
    assert torch.equal(rewards, torch.where(b["stopped"], 1.0, -4.0))


# ---- Models ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("flags", [dict(lora_r=4), dict(lora_r=4, load_in_8bit=True), dict(load_in_8bit=True), dict(num_shared_layers=1),
                                   dict(gradient_checkpointing=True), dict(bf16=True)], ids=lambda flags: "-".join(flags))  # fmt: skip
def test_parts(rloo, tiny_lm, flags):
    """Each trains: the KL starts at 0 (bf16 and 8 bit: near it) and leaves it."""
    _, folder, rows = rloo(total_episodes=24, **flags)
    assert abs(rows[0]["objective/kl"]) < (0.5 if "load_in_8bit" in flags or "bf16" in flags else 1e-6)
    assert abs(rows[-1]["objective/kl"]) > 1e-3
    assert all(math.isfinite(x) for row in rows for x in row.values()) and (folder / "model").exists()


@pytest.mark.parametrize("arch", ["gpt_neo", "gpt_neox", "opt", "bloom", "llama", "qwen2"])
def test_architectures(rloo, tiny_lm, tiny_preference_model, arch):
    """As policy and as reward model: ratio 1 at learning rate 0 in one pass, and a model that plain transformers loads."""
    folder = tiny_lm(arch)
    reward = tiny_preference_model(arch)
    whole = dict(num_mini_batches=1, per_device_train_batch_size=8)
    _, run, rows = rloo(model_name_or_path=folder, reward_model_path=reward, learning_rate=0.0, total_episodes=8, **whole)
    assert rows[0]["val/ratio"] == 1 and rows[0]["objective/kl"] == 0
    AutoModelForCausalLM.from_pretrained(run / "model")


def test_sft_model_path_is_the_policy(rloo, script, tiny_lm, tmp_path):
    """TRL: the policy comes from sft_model_path, the tokenizer from model_name_or_path."""
    torch.manual_seed(5)
    config = transformers.AutoConfig.from_pretrained(tiny_lm())
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "sft")
    _, folder, _ = rloo(sft_model_path=str(tmp_path / "sft"), learning_rate=0.0, total_episodes=8)
    assert same(weights(folder / "model"), weights(tmp_path / "sft"))
    assert script.parse_args(["--sft-model-path", "x"]).recipe == "custom"


# ---- TRL's page ------------------------------------------------------------------------------------------------------
COMMANDS = {
    "rloo": "--learning_rate 3e-6 --output_dir models/minimal/rloo --per_device_train_batch_size 64 --gradient_accumulation_steps 1 "
            "--total_episodes 10000 --model_name_or_path EleutherAI/pythia-14m --reward_model_path EleutherAI/pythia-14m "
            "--missing_eos_penalty 1.0",
    "rloo_tldr": "--output_dir models/minimal/rloo_tldr --num_ppo_epochs 2 --num_mini_batches 2 --learning_rate 3e-6 "
                 "--per_device_train_batch_size 8 --gradient_accumulation_steps 8 --total_episodes 1000000 "
                 "--model_name_or_path EleutherAI/pythia-1b-deduped "
                 "--sft_model_path cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr "
                 "--reward_model_path cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr "
                 "--local_rollout_forward_batch_size 16 --missing_eos_penalty 1.0 --stop_token eos --kl_coef 0.03",
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_of_trls_page(script, small, tiny_lm, tiny_preference_model, tiny_posts, monkeypatch, tmp_path, name):
    """They parse as they stand, with TRL's batch arithmetic; with local folders in place of the Hub's names one update runs."""
    args = script.parse_args(shlex.split(COMMANDS[name]))
    batch, steps = {"rloo": (64, 4), "rloo_tldr": (128, 4)}[name]
    assert (args.recipe, args.local_batch_size, args.num_ppo_epochs * args.num_mini_batches) == ("custom", batch, steps)
    assert (args.rloo_k, args.temperature, args.response_length, args.cliprange) == (2, 0.7, 53, 0.2)  # TRL 0.11's defaults
    folder, reward = tiny_lm("gpt_neox"), tiny_preference_model("gpt_neox") if name == "rloo_tldr" else tiny_lm("gpt_neox")
    monkeypatch.chdir(tmp_path)
    local = dict(model_name_or_path=folder, reward_model_path=reward, sft_model_path=args.sft_model_path and folder)
    args = replace(args, **local, dataset_name=tiny_posts, total_episodes=batch, num_examples=4, response_length=8, max_prompt_length=200)
    _, folder = script.train(args)
    assert str(folder) == f"models/minimal/{name}" and len(rows_of(folder)) == 1
    assert (folder / "model/model.safetensors").exists()


METRICS = """eps objective/kl objective/entropy objective/non_score_reward objective/rlhf_reward objective/scores policy/approxkl_avg
    policy/clipfrac_avg loss/policy_avg policy/entropy_avg val/ratio val/ratio_var val/num_eos_tokens lr episode""".split()


def test_metrics_and_samples_of_trls_page(rloo):
    """Every metric of the page that RLOO has (it has no value function), and its table of samples."""
    _, folder, rows = rloo(num_sample_generations=2)
    assert set(METRICS) <= set(rows[0]) and not any("value" in name for name in rows[0])
    samples = rows_of(folder, "samples.jsonl")
    assert {row["update"] for row in samples} == {1, 2}
    assert list(samples[0]) == ["update", "query", "model response", "score"] and samples[0]["query"].endswith("TL;DR:")
    table = json.loads((folder / "evaluation.json").read_text())
    assert {"before", "after", "n", "judge", "decoding"} == set(table) and table["n"] == 4


# ---- Judges ----------------------------------------------------------------------------------------------------------
def test_win_rate_by_a_function(rloo, tmp_path):
    """Scores of summaries against those of references: 1, 0.5 for a tie, 0, and the interval of their mean."""
    _, folder, _ = rloo("equal", judge_fn=reward_file(tmp_path, "return [0.0] * len(prompts)", "equal"))
    table = json.loads((folder / "evaluation.json").read_text())["before"]
    assert (table["win rate"], table["ties"], table["+- (95 % interval)"], table["no verdict"]) == (0.5, 1, 0, 0)
    path = tmp_path / "gold.py"
    path.write_text("CALLS = []\ndef score(prompts, responses):\n"
                    "    if len(prompts) == 8: return [3.0] * 8  # a batch of the training\n    CALLS.append(1)\n"
                    "    return [1.0, 0.0, 0.0, 0.0] if len(CALLS) % 2 else [0.5, 0.0, 1.0, 1.0]\n")  # ours, then the references
    _, folder, rows = rloo("other", judge_fn=f"{path}:score")
    assert rows[0]["judge/scores"] == 3
    table = json.loads((folder / "evaluation.json").read_text())["before"]
    assert table["win rate"] == pytest.approx((1 + 0.5 + 0 + 0) / 4) and table["ties"] == 0.25
    spread = torch.tensor([1, 0.5, 0, 0]).var(correction=0).item()
    assert table["+- (95 % interval)"] == pytest.approx(1.96 * math.sqrt(spread / 4))


def test_a_named_judge_is_the_judge(script, tiny_preference_model, small):
    """--judge-model and --judge-url come before the gold scorer of recipe tiny; an address without a name is refused."""
    tiny = script.parse_args(["--judge-model", "m", "--judge-url", "http://here/v1"])
    assert tiny.judge_fn and script.judge_name(tiny) == "m"
    assert script.load_judge(tiny, None, None, "cpu").__qualname__.startswith("chat_judge")
    model = script.load_judge(replace(tiny, judge_model=tiny_preference_model(), judge_url=None), None, None, torch.device("cpu"))
    assert model(["a post"], [" x"], [" x"]) == [0.5]
    with pytest.raises(script.UserError, match="--judge-url"):
        script.train(small("rloo_tldr", judge_url="http://here/v1"))


def test_keys_go_to_their_own_server(script, monkeypatch):
    """OPENAI_API_KEY is for --judge-url alone; Hugging Face's service gets the token that huggingface_hub knows."""
    import huggingface_hub

    chat = Chat(None)
    monkeypatch.setattr(huggingface_hub, "InferenceClient", chat)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    script.chat_judge(script.Args(judge_model="m"))
    assert chat.about == dict(base_url=None, api_key=None)
    script.chat_judge(script.Args(judge_model="m", judge_url="http://here/v1"))
    assert chat.about == dict(base_url="http://here/v1", api_key="secret")


def test_only_posts_with_references_are_judged(rloo, tmp_path):
    """Where some rows have no reference, the win rate is of the others, and n says how many."""
    rows = [dict(prompt=f"Post {i}.\n\nTL;DR:", completion=" A summary." if i % 2 else None) for i in range(12)]
    data = write_rows(tmp_path / "data", train=rows, test=rows)
    _, folder, _ = rloo(dataset_name=data, num_examples=10)
    assert json.loads((folder / "evaluation.json").read_text())["n"] == 6


def test_a_judge_that_fails_at_the_end(rloo, script, small, tmp_path):
    """Nothing is lost: --resume with another judge evaluates and saves the model."""
    body = "if os.path.exists(__file__ + '.fail'): return [float('nan')] * len(prompts)"
    judge = reward_file(tmp_path, body + "\nreturn [float(len(r)) for r in responses]", "judge")
    args = small("rloo_tldr", judge_fn=judge, total_episodes=8, num_sample_generations=0)
    log = script.Run.checkpoint

    def failing(self, *rest, **state):
        log(self, *rest, **state)
        (tmp_path / "judge.py.fail").touch()

    script.Run.checkpoint = failing
    try:
        with pytest.raises(script.UserError, match="nan"):
            script.train(args)
    finally:
        script.Run.checkpoint = log
    assert not (tmp_path / "run/model").exists()
    (tmp_path / "judge.py.fail").unlink()
    other = reward_file(tmp_path, "return [0.0] * len(prompts)", "other")
    _, folder = script.train(script.parse_args(["--resume", args.output_dir, "--judge-fn", other]))
    assert (folder / "model/model.safetensors").exists()
    assert json.loads((folder / "evaluation.json").read_text())["judge"] == other


def test_win_rate_by_another_model(rloo, script, tiny_preference_model, tiny_posts):
    """A second model of preferences that the run never trained on; named in evaluation.json."""
    _, folder, _ = rloo(judge_model=tiny_preference_model("llama"))
    about = json.loads((folder / "evaluation.json").read_text())
    assert about["judge"] == tiny_preference_model("llama") and 0 <= about["before"]["win rate"] <= 1


class Chat:
    """A chat model that can be told what to answer, in the place of huggingface_hub's client."""

    def __init__(self, answer):
        self.answer, self.questions = answer, []

    def __call__(self, **kwargs):
        self.about = kwargs
        return self

    def chat_completion(self, messages, **kwargs):
        self.questions.append(messages[0]["content"])
        text = self.answer(messages[0]["content"])
        message = transformers.utils.ModelOutput(content=text)
        return transformers.utils.ModelOutput(choices=[transformers.utils.ModelOutput(message=message)])


def judged(script, monkeypatch, answer, n=40, seed=1):
    """Verdicts of a chat model about n pairs "ours", "theirs"."""
    import huggingface_hub

    chat = Chat(answer)
    monkeypatch.setattr(huggingface_hub, "InferenceClient", chat)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    judge = script.chat_judge(script.Args(judge_url="http://here/v1", judge_model="m", seed=seed))
    return judge([f"post {i}" for i in range(n)], [" ours"] * n, [" theirs"] * n), chat


def test_chat_judge_reads_verdicts(script, monkeypatch):
    """The order of the two is drawn, so a judge that always says A is undecided; one that looks is not; nonsense is no verdict."""
    verdicts, chat = judged(script, monkeypatch, lambda q: "A" if "Summary A: ours" in q else "B")
    assert verdicts == [1.0] * 40
    first = ["Summary A: ours" in q for q in chat.questions]
    assert 8 < sum(first) < 32 and all("post" in q and "theirs" in q for q in chat.questions)
    assert judged(script, monkeypatch, lambda q: "Answer: B." if "Summary A: ours" in q else " A")[0] == [0.0] * 40
    always = judged(script, monkeypatch, lambda q: "A")[0]
    assert 8 < sum(always) < 32
    for nothing in ("hmm...", "Both A and B", "ABBA", "a"):
        assert judged(script, monkeypatch, lambda q: nothing)[0] == [None] * 40  # noqa: B023
    assert judged(script, monkeypatch, lambda q: None)[0] == [None] * 40


def test_chat_judge_tries_again(script, monkeypatch):
    """Two failures and an answer is an answer; four failures end the run in one line that names the judge."""
    calls = []

    def flaky(question):
        calls.append(1)
        if len(calls) % 3:
            raise TimeoutError("busy")
        return "A"

    assert None not in judged(script, monkeypatch, flaky, n=1)[0] and len(calls) == 3

    def dead(question):
        raise ConnectionError("refused")

    with pytest.raises(script.UserError, match="m: no answer after 4 attempts: refused"):
        judged(script, monkeypatch, dead, n=1)


@pytest.fixture(scope="module")
def server(tiny_lm, tmp_path_factory):
    """transformers serve on a local folder, a model that says " A" whatever it is asked. -> its address, the model's name"""
    folder = tmp_path_factory.mktemp("judge")
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm())
    model = AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tiny_lm(), n_positions=1024))
    model.transformer.ln_f.weight.data.zero_()
    model.transformer.ln_f.bias.data = model.lm_head.weight[tokenizer(" A").input_ids[-1]].detach() * 10
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    port = free_port()
    process = start_process(["transformers", "serve", str(folder), "--port", port, "--device", "cpu"], folder, HF_HOME=str(folder))
    try:
        for _ in range(240):
            time.sleep(0.5)
            assert process.poll() is None, process.communicate()
            try:
                urllib.request.urlopen(f"http://localhost:{port}/health", timeout=5)
                break
            except OSError:
                pass
        yield f"http://localhost:{port}/v1", str(folder)
    finally:
        process.terminate()
        try:
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()


def test_a_real_server_as_judge(script, small, server, capsys):
    """The verb judge asks a real server of that interface, and prints rate, interval, n, judge and decoding."""
    url, name = server
    args = small("rloo_tldr", judge_url=url, judge_model=name, num_examples=6)
    numbers = script.judge_alone(args)
    line = capsys.readouterr().out
    first = (torch.rand(6, generator=script.draws(args.seed, "order of the two")) < 0.5).float().mean().item()
    assert numbers["no verdict"] == 0 and numbers["win rate"] == pytest.approx(first)  # it wins where it stands first
    assert "Model win rate: " in line and name in line and "n = 6" in line and "temperature 0.7" in line


def test_the_verb_judge(script, small, capsys, tiny_lm, tiny_posts, tmp_path, monkeypatch):
    """As TRL's judge_tldr.py, its flags included; here with a function, so that the rate is known. Models attend as in training."""
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "sdpa", sdpa_attention_forward)
    judge = reward_file(tmp_path, "return [float(len(r)) for r in responses]")
    flags = ["--model_name_or_path", tiny_lm(), "--judge_fn", judge, "--num_examples", "5", "--dataset_name", tiny_posts]
    script.main(["judge", *flags, "--response_length", "2", "--max_prompt_length", "200"])
    out = capsys.readouterr().out
    assert out.startswith("Model win rate: 0.00% +- 0.00% (0.0% ties; 0 posts without verdict), n = 5, judge ")
    assert transformers.AttentionInterface()["sdpa"] is script.attention
    with pytest.raises(SystemExit):
        script.main(["judge", *flags[:2], "--judge_model", "/no/such/folder", "--judge_url", "http://localhost:9/v1", *flags[4:],
                     "--max_prompt_length", "200"])  # fmt: skip
    assert "no answer after 4 attempts" in capsys.readouterr().err
