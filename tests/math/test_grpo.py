"""The math of grpo_math.py and of the variants that docs/grpo_math.md describes, against naive.py and TRL.

A variant is a block under "Lines to change", applied to a copy of the script. One update of it is trained,
and the losses that reach the backward pass are compared. The tests against TRL are skipped without TRL 1.16,
which can be installed next to the packages of the scripts:

    pip install trl==1.16.0 && python -m pytest tests/math/test_grpo.py
"""

import collections
import functools
import math
import types
from types import SimpleNamespace

import accelerate
import naive
import pytest
import torch
from conftest import ROOT
from diff_blocks import apply_block, blocks
from math_tools import close, normal, trl_1_16
from run_fixtures import handlers_kept
from run_tools import eos_prone, maker, rows_of, spy

import grpo_math as grpo

pytest_plugins = ["run_fixtures"]
K, P, T = 3, 4, 6  # responses per task, tasks, tokens per response
SCORES = (0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.5, -3.0, 7.0, 2.0, 0.25, 0.3)  # those of the second task are equal
BLOCKS = blocks((ROOT / "docs/grpo_math.md").read_text())


# ---- Advantages --------------------------------------------------------------------------------------------


def test_advantages_by_hand():
    """Two tasks with three responses each, which are neighbors; the deviation has k - 1."""
    expected = [0.5, -0.5, 0, -1, -1, 2]
    deviations = [0.5] * 3 + [math.sqrt(3)] * 3
    ours = grpo.grpo_advantages(torch.tensor([1.0, 0.0, 0.5, 0.0, 0.0, 3.0]), 3)
    close(ours, [x / (deviation + 1e-4) for x, deviation in zip(expected, deviations)])
    assert ours.dtype is torch.float32


def test_the_small_number_is_added_to_the_deviation():
    """Rewards 0 and 0.0002: the deviation is 0.0001 * sqrt(2). Under the root it would not show."""
    ours = grpo.grpo_advantages(torch.tensor([2e-4, 0.0]), 2)
    close(ours, [1 / (math.sqrt(2) + 1), -1 / (math.sqrt(2) + 1)], rtol=1e-4)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.5, -2.0, 0.1, 0.2, 0.7, 1.2])
def test_a_group_with_equal_rewards_teaches_nothing(reward):
    """Its advantages are exactly 0, whatever the others are. 1.2 is a right answer with a format reward."""
    for k in (2, 3, 4, 5, 6, 8, 16):
        rewards = torch.stack([torch.full((k,), reward), torch.arange(k)])
        equal, different = grpo.grpo_advantages(rewards.flatten(), k).view(2, k)
        assert equal.tolist() == [0.0] * k, k
        assert (different != 0).any()


# ---- The loss of an update ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def update(world, tiny_lm, tmp_path_factory):
    """update(block="", **changes) -> one update of a variant with two epochs and learning rate 0, recorded.

    Scores, old log-probabilities and those of the reference are replaced, so that ratios are not 1, and so
    that some are clipped. A token of the best response gets more likely by `jump` nats. loss: what all
    backward passes of an epoch add up to.
    """
    lm = eos_prone(tiny_lm, tmp_path_factory.mktemp("lm"))

    @functools.cache
    def run(block="", scores=SCORES, jump=0.0, **changes):
        with handlers_kept(), pytest.MonkeyPatch.context() as patch:
            return recorded_update(patch, variant(block), scores, jump, changes)

    def variant(block):
        """A copy of the script with the lines of a block changed."""
        module = types.ModuleType("grpo_math")
        module.__file__ = grpo.__file__
        source = apply_block((ROOT / "grpo_math.py").read_text(), block)
        for limit in (0.02, 0.1):  # rollout, sampling and update: here they differ
            assert source.count(f"assert gap < {limit},") == 1
            source = source.replace(f"assert gap < {limit},", "assert gap < math.inf,")
        exec(compile(source, "variant", "exec"), module.__dict__)
        return module

    def recorded_update(patch, module, scores, jump, changes):
        flags = dict(
            model_name_or_path=lm,
            total_episodes=K * P,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=3,
            num_mini_batches=1,
            num_generations=K,
            response_length=T,
            learning_rate=0.0,
            seed=3,
            num_sample_generations=0,
            save_every=0,
        )
        root = tmp_path_factory.mktemp("update")
        patch.chdir(root)
        (root / "teacher").symlink_to(lm)
        args = maker({"grpo_math": module}, world, root)("grpo_math", **(flags | changes))
        rollout, losses, rollouts, gradients = module.rollout, [], [], []
        backward, clip_grad_norm_ = accelerate.Accelerator.backward, accelerate.Accelerator.clip_grad_norm_

        def rollout_with_noise(*inputs):
            b, responses = rollout(*inputs)
            valid = b["mask"][:, -T:]
            b["scores"] = torch.tensor(scores)
            for i, name in enumerate(name for name in b if name.startswith("rewards/")):
                b[name] = torch.tensor(scores).roll(i)  # other numbers for each reward function
            for seed, name in enumerate(("logprobs", "ref_logprobs", "sampling_logprobs"), 3):
                if name in b:
                    b[name] = torch.where(valid, b[name] + 0.3 * normal(K * P, T, seed=seed), 0.0)
            b["logprobs"][SCORES.index(max(SCORES)), 0] -= jump
            rollouts.append(b)
            return b, responses

        def recorded_backward(self, loss, **kwargs):
            losses.append(loss.item() / args.gradient_accumulation_steps)
            return backward(self, loss, **kwargs)

        def recorded_clip(self, parameters, max_norm):
            parameters = list(parameters)
            gradients.append(flat_gradient(parameters))
            return clip_grad_norm_(self, parameters, max_norm)

        patch.setattr(module, "rollout", rollout_with_noise)
        patch.setattr(accelerate.Accelerator, "clip_grad_norm_", recorded_clip)
        patch.setattr(accelerate.Accelerator, "backward", recorded_backward)
        advantages = spy(patch, module, "grpo_advantages")
        model, folder = module.train(args)
        [b] = rollouts
        with torch.no_grad():
            new, entropies = model(b["ids"], b["mask"], T, args.temperature)
        assert len(losses) == 6
        assert sum(losses[:3]) == pytest.approx(
            sum(losses[3:]), rel=1e-6, abs=1e-5
        )  # the epochs have other orders
        return SimpleNamespace(
            b=b,
            model=model,
            new=new,
            entropies=entropies,
            old=b["logprobs"],
            ref=b.get("ref_logprobs"),
            lengths=b["lengths"].tolist(),
            advantages=advantages[0][1] if advantages else None,
            loss=sum(losses[:3]),
            gradient=gradients[0],
            metrics=rows_of(folder)[0],
        )

    return run


def flat_gradient(parameters):
    """All gradients, one after the other. -> [number of weights]"""
    return torch.cat([p.grad.flatten() for p in parameters])


def by_token(run):
    """What naive.grpo_loss reads. -> for each response a list of (logprob, old one, reference's)"""
    ref = run.new if run.ref is None else run.ref
    rows = []
    for new, old, other, length in zip(run.new.tolist(), run.old.tolist(), ref.tolist(), run.lengths):
        rows.append(list(zip(new[:length], old[:length], other[:length])))
    return rows


def test_the_loss_is_a_mean_over_tokens(update):
    """Per-token ratios and clips, with k3 on each token, divided by the tokens of all micro-batches."""
    run = update(kl_coef=0.3)
    close(run.advantages, naive.grpo_advantages(SCORES, K), rtol=1e-4)
    expected = naive.grpo_loss(by_token(run), naive.grpo_advantages(SCORES, K), "token", kl_coef=0.3)
    assert run.loss == pytest.approx(expected, abs=1e-5)
    assert 1 < min(run.lengths) + 1 < max(run.lengths)  # of different lengths
    without = update(kl_coef=0.0)
    expected = naive.grpo_loss(by_token(without), naive.grpo_advantages(SCORES, K), "token")
    assert without.loss == pytest.approx(expected, abs=1e-5)
    assert abs(without.loss - run.loss) > 1e-3


def of_group(scale):
    return lambda lengths: naive.grpo_advantages(SCORES, K, scale)


def of_batch(lengths):
    """Hu 2025: minus the mean, divided by the deviation. Every token of a response has its reward."""
    rewards = [score for score, length in zip(SCORES, lengths) for _ in range(length)]
    mean = sum(rewards) / len(rewards)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in rewards) / len(rewards))
    return [(score - mean) / deviation for score in SCORES]


CASES = {  # title of a block -> advantages (lengths -> list), other inputs of naive.grpo_loss
    "Dr. GRPO": (of_group("none"), dict(mean=K * P * T)),
    "Mean per response": (of_group("group"), dict(mean="response")),
    "MaxRL": (of_group("mean"), dict(mean="token")),
    "RLOO's baseline": (lambda lengths: naive.rloo_advantages(SCORES, K), dict(mean="token")),
    "REINFORCE++": (of_batch, dict(mean="token")),
    "Clip-higher": (of_group("group"), dict(mean="token", high=0.28)),
    "Unbiased KL": (of_group("group"), dict(mean="token", unbiased_kl=True)),
    "GSPO": (of_group("group"), dict(mean="response", by_sequence=True)),
    "CISPO": (of_group("group"), dict(mean="token", surrogate=naive.cispo)),
}


@pytest.mark.parametrize("title", CASES)
def test_a_variant_has_the_loss_of_its_paper(update, title):
    advantages, inputs = CASES[title]
    run = update(BLOCKS[title])
    expected = naive.grpo_loss(by_token(run), advantages(run.lengths), kl_coef=0.1, **inputs)
    assert run.loss == pytest.approx(expected, abs=1e-5)
    assert abs(run.loss - update().loss) > 1e-4


def test_gdpo(update):
    """Each reward is normalized in its group, then the weighted sum over the batch."""
    functions = (f"{ROOT}/data/math_rewards.py:correct", f"{ROOT}/data/math_rewards.py:shows_work")
    run = update(BLOCKS["GDPO"], kl_coef=0.0, reward_fn=functions, reward_weights=(1.0, 0.3))
    second = SCORES[-1:] + SCORES[:-1]
    parts = zip(naive.grpo_advantages(SCORES, K), naive.grpo_advantages(second, K))
    sums = [a + 0.3 * b for a, b in parts]
    mean = sum(sums) / len(sums)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in sums) / (len(sums) - 1))
    advantages = [(x - mean) / (deviation + 1e-4) for x in sums]
    assert run.loss == pytest.approx(naive.grpo_loss(by_token(run), advantages, "token"), abs=1e-5)


def test_entropy_bonus(update):
    run, plain = update(BLOCKS["Entropy bonus"]), update()
    entropy = sum(run.entropies[i, :n].sum().item() for i, n in enumerate(run.lengths)) / sum(run.lengths)
    assert plain.loss - run.loss == pytest.approx(0.001 * entropy, rel=0.01)


@pytest.mark.parametrize("title", ["Dynamic sampling, without a refill", "Overlong filtering"])
def test_responses_that_are_left_out(update, title):
    """Groups with equal rewards, or responses that did not end: no loss, and their tokens are not counted."""
    scores = (1.2,) * K + SCORES[K:]
    run = update(BLOCKS[title], kl_coef=0.1, scores=scores)
    if title == "Overlong filtering":
        kept = run.b["stopped"].tolist()
    else:
        kept = [len(set(scores[i - i % K :][:K])) > 1 for i in range(P * K)]
    rows = [row for row, is_kept in zip(by_token(run), kept) if is_kept]
    advantages = [x for x, is_kept in zip(naive.grpo_advantages(scores, K), kept) if is_kept]
    assert 0 < len(rows) < P * K
    assert run.loss == pytest.approx(naive.grpo_loss(rows, advantages, "token", kl_coef=0.1), abs=1e-5)


@pytest.mark.parametrize("title", ["", *BLOCKS])
def test_a_ratio_of_e_100_has_a_finite_gradient(update, title):
    """Infinite, it would be nan in the backward pass of the clip."""
    run = update(BLOCKS[title] if title else "", kl_coef=1e-6, jump=100.0)
    assert run.gradient.isfinite().all()


@pytest.mark.parametrize("title", ["", *BLOCKS])
def test_clipfrac_is_0_if_nothing_is_clipped(update, title):
    run = update(BLOCKS[title] if title else "", kl_coef=1.0, cliprange=10.0)
    is_clipped = title == "Clip-higher"  # its second bound stays 1.28
    assert (run.metrics["policy/clipfrac_avg"] > 0) == is_clipped


def test_truncated_importance_sampling(update):
    """Each token's policy loss has the weight p(trained, old) / p(sampler), at most 2."""
    run = update(BLOCKS["Truncated importance sampling"], kl_coef=0.0)
    log_weights = (run.old - run.b["sampling_logprobs"]).tolist()
    weights = [[min(math.exp(x), 2.0) for x in row] for row in log_weights]
    assert max(map(max, weights)) == 2.0 and min(map(min, weights)) < 1
    total = 0.0
    for i, advantage in enumerate(naive.grpo_advantages(SCORES, K)):
        for t in range(run.lengths[i]):
            new, old = run.new[i, t].item(), run.old[i, t].item()
            total += weights[i][t] * naive.clipped_policy_loss(new, old, advantage, 0.2)[0]
    assert run.loss == pytest.approx(total / sum(run.lengths), abs=1e-5)


def test_on_policy_distillation(update):
    """The advantage of a token is log p(teacher) - log p(old policy). There is no other KL."""
    run = update(BLOCKS["On-policy distillation"], kl_coef=1.0)
    total = 0.0
    for new, old, ref in (token for row in by_token(run) for token in row):
        total += naive.clipped_policy_loss(new, old, ref - old, 0.2)[0]
    assert run.loss == pytest.approx(total / sum(run.lengths), abs=1e-5)


# ---- TRL ---------------------------------------------------------------------------------------------------


def trls_loss(run, advantages, bias_correction=False, **settings):
    """The loss that GRPOTrainer computes from the tensors of an update, and its gradient."""
    trl = trl_1_16()
    args = trl.GRPOConfig(
        output_dir="unused",
        use_cpu=True,
        bf16=False,
        num_generations=K,
        use_bias_correction_kl=bias_correction,
        per_device_train_batch_size=12,
    )
    mask = run.b["mask"][:, -T:].long()
    logprobs, entropies = run.model(run.b["ids"], run.b["mask"], T, 1.0)
    inputs = {
        "prompt_ids": run.b["ids"][:, :-T],
        "prompt_mask": run.b["mask"][:, :-T],
        "completion_ids": run.b["ids"][:, -T:],
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": run.old,
        "ref_per_token_logps": run.ref,
        "num_items_in_batch": mask.sum(),
    }
    # What the method reads of a trainer. A name that is not given here is an AttributeError.
    trainer = SimpleNamespace(
        accelerator=accelerate.Accelerator(cpu=True),
        args=args,
        model=run.model.policy.train(),
        beta=0.1,
        epsilon_low=0.2,
        top_entropy_quantile=1.0,
        max_completion_length=T,
        current_gradient_accumulation_steps=1,
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, entropies, None),
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
        use_vllm=False,
        aux_loss_enabled=False,
        off_policy_mask_threshold=None,
        _entropy_bonus_enabled=False,
        **settings,
    )
    loss = trl.GRPOTrainer._compute_loss(trainer, run.model.policy, inputs)
    run.model.zero_grad()
    loss.backward()
    return loss.item(), flat_gradient(grpo.trainable(run.model).values())


OF_TRL = {  # title of a block, "" for the default -> TRL's loss_type, other settings
    "": ("dapo", {}),
    "Mean per response": ("grpo", {}),
    "Dr. GRPO": ("dr_grpo", {}),
    "Clip-higher": ("dapo", dict(epsilon_high=0.28)),
    "GSPO": ("grpo", dict(importance_sampling_level="sequence")),
    "CISPO": ("cispo", dict(epsilon_high=5.0)),
    "Unbiased KL": ("dapo", dict(bias_correction=True)),
}


@pytest.mark.parametrize("title", OF_TRL)
def test_losses_and_gradients_are_trls(update, title):
    """Those of an update, and TRL's of the same tensors and advantages."""
    loss_type, others = OF_TRL[title]
    run = update(BLOCKS[title] if title else "")
    advantages, _ = CASES[title] if title else (of_group("group"), {})
    settings = dict(loss_type=loss_type, epsilon_high=0.2, importance_sampling_level="token") | others
    loss, gradient = trls_loss(run, torch.tensor(advantages(run.lengths)), **settings)
    assert run.loss == pytest.approx(loss, abs=1e-5)
    assert (run.gradient - gradient).norm() < 1e-5 * gradient.norm()
