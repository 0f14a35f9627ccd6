"""benchmarks/parity.py: the statistics, the measurement that all sides share, and the committed results."""

import copy
import json
import sys
from dataclasses import replace
from statistics import mean, median

import numpy as np
import pytest
import torch
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import parity  # noqa: E402
import parity_jobs  # noqa: E402


def test_the_interval_is_that_of_welch():
    """An example by hand: means 3 and 8, variances 2.5 and 10, 5 and 5 runs, 5.882 degrees of freedom."""
    delta, low, high = parity.difference([1, 2, 3, 4, 5], [4, 6, 8, 10, 12])
    assert delta == -5
    assert (low + high) / 2 == pytest.approx(-5)
    t, error = 1.9484, (2.5 / 5 + 10 / 5) ** 0.5  # t: 95 % quantile
    assert high - low == pytest.approx(2 * t * error, rel=1e-3)


def test_the_paired_interval():
    """By hand: differences -1, -3, -2, -6, -3; mean -3, variance 3.5, 4 degrees of freedom."""
    delta, low, high = parity.difference([1, 2, 3, 4, 5], [2, 5, 5, 10, 8], paired=True)
    assert delta == -3
    assert (low + high) / 2 == pytest.approx(-3)
    t, error = 2.1318, (3.5 / 5) ** 0.5  # t: 95 % quantile
    assert high - low == pytest.approx(2 * t * error, rel=1e-3)


@pytest.mark.parametrize(
    "low, high, word",
    [
        (-0.01, 0.019, "equivalent"),
        (0.001, 0.019, "equivalent"),  # a real difference, but less than the margin
        (0.001, 0.021, "different"),
        (-0.03, -0.001, "different"),
        (-0.03, 0.001, "inconclusive"),
    ],
)
def test_verdicts(low, high, word):
    assert parity.verdict(low, high, 0.02) == word


SMALL = dict(
    grpo=dict(
        total_episodes=48, per_device_train_batch_size=16, gradient_accumulation_steps=1, num_eval_samples=1
    ),
    rloo=dict(total_episodes=48, per_device_train_batch_size=8),
    ppo=dict(total_episodes=48, per_device_train_batch_size=4, num_ppo_epochs=1),
    critic=dict(total_episodes=48, per_device_train_batch_size=4, num_ppo_epochs=1),
)
SIDES = [
    ("rloo", "ours, no gradient clipping"),
    ("critic", "ours, TRL's value head and variance"),
]


@pytest.mark.parametrize("job, side", SIDES)
def test_our_sides_of_a_job(monkeypatch, job, side):
    """Copies of the policy before the first update and after each; the KL begins at 0."""
    count = 70 if job in ("grpo", "rloo") else 10
    rows_of = parity_jobs.JOBS[job].load_rows
    few = replace(parity_jobs.JOBS[job], k=2, load_rows=lambda *inputs: rows_of(*inputs)[:count])
    monkeypatch.setitem(parity_jobs.JOBS, job, few)
    row = parity_jobs.run(job, side, 1, learning_rate=1e-2, **SMALL[job])
    assert (row["job"], row["side"], row["seed"], row["updates"]) == (job, side, 1, 3)
    assert [point["episode"] for point in row["curve"]] == [0, 16, 32, 48]
    assert row["curve"][0]["kl"] == 0 and row["curve"][0]["seconds"] == 0
    assert row["curve"][3]["kl"] > 0 and row["final"]["kl"] > 0
    assert row["seconds"] == row["curve"][3]["seconds"] > row["curve"][2]["seconds"] > 0
    assert row["held_out_responses"] == 2 * count
    assert set(few.metrics) <= set(row["curve"][0])


@pytest.mark.parametrize("job", ["sft", "reward"])
def test_our_side_of_a_supervised_job(tmp_path, job):
    """The held-out loss falls, and the first copy is that of random weights."""
    script = parity_jobs.importlib.import_module(parity_jobs.JOBS[job].script)
    splits = script.load_splits(str(ROOT / script.RECIPES["tiny-tldr"].dataset_name))
    for name, rows, count in zip(("train", "test"), splits, (48, 20)):
        lines = [json.dumps(row) + "\n" for row in rows[:count]]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    flags = dict(dataset_name=str(tmp_path), num_train_epochs=2.0, per_device_train_batch_size=16)
    if job == "reward":
        flags["center_dataset_name"] = None
    row = parity_jobs.run(job, "ours", 1, **flags)
    assert row["updates"] == 6 and row["held_out_responses"] == 20
    assert [point["episode"] for point in row["curve"]] == [16 * update for update in range(7)]
    assert row["curve"][0]["loss"] > row["curve"][-1]["loss"] == row["final"]["loss"] > 0
    assert set(parity_jobs.JOBS[job].metrics) == set(row["final"])
    if job == "sft":
        assert row["curve"][0]["loss"] == pytest.approx(np.log(1024), abs=0.2)


@pytest.mark.parametrize("job", ["sft", "reward"])
def test_trl_gets_the_rows_in_our_order(monkeypatch, job):
    """Update by update those that our script draws, beyond the first epoch too."""
    script = parity_jobs.importlib.import_module(parity_jobs.JOBS[job].script)
    args = replace(script.RECIPES["tiny-tldr"], per_device_train_batch_size=6, gradient_accumulation_steps=2)
    rows = script.load_splits(args.dataset_name)[0][:20]
    monkeypatch.setattr(script, "load_splits", lambda name: (rows, None))
    found = parity_jobs.rows_for_trl(script, args, updates=3, as_ours=True)["prompt"]
    drawn = [script.stream_rows(20, start=12 * update, count=12, seed=args.seed) for update in range(3)]
    assert found == [rows[i]["prompt"] for i in torch.cat(drawn).tolist()]
    prompts = [row["prompt"] for row in rows]
    assert sorted(found[:20]) == sorted(prompts) != found[:20]
    assert parity_jobs.rows_for_trl(script, args, updates=3, as_ours=False)["prompt"] == prompts


def test_trls_trainer_gets_the_same_reward():
    """RewardAfterEos, read at the last token, scores responses as rloo_tldr.py does, ended or cut off."""
    job = parity_jobs.JOBS["critic"]
    script = parity_jobs.importlib.import_module("rloo_tldr")
    args = script.RECIPES["tiny"]
    tokenizer = script.load_tokenizer(args.model_name_or_path)
    policy = script.load_model(script.AutoModelForCausalLM, args.model_name_or_path).eval()
    rows = job.load_rows(script, script.load_splits(args.dataset_name)[1], tokenizer, args)[:20]
    b, texts = job.respond(script, args, policy, tokenizer, rows, 1, 0)
    assert 0 < b["stopped"].sum() < 20
    expected = script.weighted_sum(job.scores(script, args)["score"](*texts))

    model = parity_jobs.RewardAfterEos(
        parity_jobs.centered_reward_model(script, args), tokenizer.eos_token_id
    )
    ids = torch.where(b["mask"], b["ids"], 0)
    with torch.no_grad():
        states = model.states(ids, b["mask"], use_cache=False).hidden_states[-1]
    last = ids.shape[1] - args.response_length + b["lengths"] - 1
    scores = model.score(states[torch.arange(20), last]).squeeze(1)
    assert torch.allclose(scores, expected, atol=1e-4)


def test_a_comparison_by_hand(monkeypatch, tmp_path):
    """A - B, with the verdict of the plan's margin."""
    ours, theirs = [1.0, 2.0, 3.0], [2.0, 4.0, 6.0]
    rows = []
    for side, values in {"ours": ours, "TRL 0.11 PPOTrainer": theirs}.items():
        for seed, x in zip((4, 5, 6), values):
            rows.append({"side": side, "seed": seed, "final": dict(score=x, kl=x)})
    rows.append({"side": "ours", "seed": 1, "final": dict(score=99)})  # of the pilot
    monkeypatch.setattr(parity, "read", lambda job: rows)
    plan = {"ppo": {"seeds": [4, 5, 6], "margin": {"score": 0.5, "kl": 100}}}
    monkeypatch.setattr(parity, "PLAN", tmp_path / "plan.json")
    parity.PLAN.write_text(json.dumps(plan))
    found = {row["metric"]: row for row in parity.compare("ppo")}
    assert list(found) == ["score", "kl"]
    assert found["score"]["difference"] == -2
    assert found["score"]["low"] < -2 < found["score"]["high"]
    assert (found["score"]["ours"], found["score"]["theirs"]) == (ours, theirs)
    assert [row["verdict"] for row in found.values()] == ["inconclusive", "equivalent"]
    assert all(row["planned"] for row in found.values())
    assert parity.table("ppo").splitlines()[2].split(" | ")[1:6] == [
        "TRL 0.11 PPOTrainer", "score", "2.000 (sd 1.000)", "4.000 (sd 2.000)",
        f"-2.000 ({found['score']['low']:.3f} to +{found['score']['high']:.3f})",
    ]  # fmt: skip


def test_a_measurement_by_hand():
    """Score, KL, entropy and length of 70 rows, 3 responses each, against a plain forward pass per row."""
    script = parity_jobs.importlib.import_module("grpo_math")
    job = parity_jobs.JOBS["grpo"]
    args = replace(script.RECIPES["tiny"], seed=5)
    tokenizer = script.load_tokenizer(args.model_name_or_path)
    reference = script.load_model(script.AutoModelForCausalLM, args.model_name_or_path).eval()
    policy = copy.deepcopy(reference)
    torch.manual_seed(0)
    for p in policy.parameters():
        p.data += 0.02 * torch.randn_like(p)
    rows = job.load_rows(script, script.load_splits(args.dataset_name)[1], tokenizer, args)[:70]
    batches = []
    sample = script.sample_responses

    def recorded(*inputs):
        batches.append(sample(*inputs))
        return batches[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "sample_responses", recorded)
        scores = job.scores(script, args)
        inputs = script, args, policy, reference, tokenizer, rows, 3, scores
        found = parity_jobs.measure(job.respond, *inputs)
    expected = {"score": [], "kl": [], "entropy": [], "length": [], "ended": []}
    answers = [row["columns"]["answer"] for row in rows for _ in range(3)]
    T = args.response_length
    for b, responses in batches:
        for i, response in enumerate(responses):
            ids = b["ids"][i][b["mask"][i]][None]
            length = int(b["mask"][i, -T:].sum())
            tokens = ids[0, -length:]
            logs = []
            for model in (policy, reference):
                with torch.no_grad():
                    logs.append(model(ids).logits[0, -length - 1 : -1].log_softmax(-1))
            mine, theirs = (x.gather(1, tokens[:, None]).sum().item() for x in logs)
            expected["kl"].append(mine - theirs)
            expected["entropy"] += (-(logs[0].exp() * logs[0]).sum(-1)).tolist()
            expected["length"].append(length)
            expected["ended"].append(float(tokens[-1] in script.find_stop_tokens(args, tokenizer, policy)))
            expected["score"].append(float(f"<answer>{answers[len(expected['score'])]}</answer>" in response))
    assert len(expected["score"]) == 210 and 0 < mean(expected["score"]) < 1
    for name, values in expected.items():
        assert found[name] == pytest.approx(mean(values), abs=1e-4), name


@pytest.mark.parametrize("job", parity_jobs.JOBS)
def test_the_page_has_the_table_of_the_results(job):
    """docs/parity.md has lines that parity.py prints, and all planned ones; the seeds are the plan's."""
    section = (ROOT / "docs/parity.md").read_text().split(f"(`{job}`)\n")[1].split("\n### ")[0]
    rows = [line for line in section.splitlines() if line.count(" | ") == 7]
    printed = parity.table(job).splitlines()
    assert set(rows) <= set(printed)
    assert {line for line in printed if line.endswith("** |")} <= set(rows)
    planned = json.loads(parity.PLAN.read_text())[job]
    shown = {(row["side"], row["peer"]) for row in parity.compare(job)}
    assert shown == {*parity_jobs.JOBS[job].comparisons, *parity_jobs.JOBS[job].explored}
    rows = parity.read(job)
    for side in parity_jobs.JOBS[job].sides:
        seeds = [row["seed"] for row in rows if row["side"] == side]
        assert len(seeds) == len(set(seeds))
        assert set(seeds) <= {*planned["pilot_seeds"], *planned["seeds"]}
        assert not set(planned["pilot_seeds"]) & set(planned["seeds"])


def test_the_page_has_the_times():
    assert parity.time_table() in (ROOT / "docs/parity.md").read_text()


def test_what_the_page_says_of_small_differences():
    """With the same order and weight decay: equal losses for sft, differences that grow for reward."""
    loss = {}  # job -> list of curves: how far the losses are apart
    for job, peer in (("sft", "SFT"), ("reward", "Reward")):
        sides = {}
        for row in parity.read(job):
            sides.setdefault(row["side"], {})[row["seed"]] = [point["loss"] for point in row["curve"]]
        theirs = sides[f"TRL 1.16 {peer}Trainer, our order and weight decay"]
        loss[job] = np.array([np.abs(np.subtract(sides["ours"][seed], theirs[seed])) for seed in theirs])
    assert loss["sft"].shape == (5, 11) and loss["reward"].shape == (9, 11)
    assert loss["sft"][:, -1].max() < 2e-7
    assert loss["reward"][:, 1].max() < 2.5e-7  # after 25 steps
    last = np.sort(loss["reward"][:, -1])
    assert 0.0005 < last[0] and last[-2] < 0.015 and 0.045 < last[-1] < 0.055


def test_numbers_of_the_text():
    """Those of docs/parity.md that are in no table, from the committed results."""
    page = " ".join((ROOT / "docs/parity.md").read_text().split())
    [row] = [
        row
        for row in parity.compare("rloo")
        if row["peer"] == "TRL 1.16 RLOOTrainer" and row["metric"] == "kl"
    ]
    assert f"{median(row['ours']):.2f} nats for ours and {median(row['theirs']):.2f} for TRL" in page
    highest = sorted(row["theirs"])[-2:]
    assert [f"{x:.1f}" for x in highest] == ["4.9", "7.3"]
