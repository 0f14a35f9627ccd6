"""grpo_math.py: every number of metrics.jsonl and of the final table, recomputed by hand from a small run.

The data are asymmetric: training, held-out and harder tasks begin with other words, prompts have different
lengths, some rows cannot be used, some groups have equal rewards, some responses stop but not all, and the
first reward function, which says what is right, has weight 0.
"""

import functools
import math
import statistics
from statistics import fmean as mean
from types import SimpleNamespace

import pytest
import torch
from run_fixtures import handlers_kept
from run_tools import (
    bigram_share,
    distance,
    eos_prone,
    evaluation_of,
    grouped,
    maker,
    plain_logprobs,
    rows_by_hand,
    rows_of,
    spy,
    timeless,
    with_a_gap,
    wordy,
    write_rows,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest_plugins = ["run_fixtures"]
SCRIPT = "grpo_math"
T, K, P = 9, 3, 4  # tokens per response, responses per task, tasks per update
EPOCHS, MINIBATCHES = 2, 4  # of 3 responses, which are 3 micro-batches
SAMPLES = 5  # responses to each held-out task
SYSTEM = "Be brief."
FLAGS = dict(  # of the run that most tests look at; 20 episodes are rounded up to 2 updates of 12
    total_episodes=20,
    per_device_train_batch_size=1,
    gradient_accumulation_steps=3,
    num_mini_batches=MINIBATCHES,
    num_ppo_epochs=EPOCHS,
    num_generations=K,
    response_length=T,
    prompt_template="{kind} {number}: {text} =",
    system_prompt=SYSTEM,
    max_prompt_length=40,
    temperature=0.8,
    kl_coef=0.3,
    cliprange=0.1,
    learning_rate=0.02,
    lr_scheduler_type="linear",
    optimizer="torch.optim.SGD",
    max_grad_norm=None,
    num_eval_prompts=6,
    num_eval_samples=SAMPLES,
    num_sample_generations=2,
    seed=19,
)
WEIGHTS = [1.0, 0.5]


def judge(completions, number, **columns):
    """Says what is right: -3 to 1.5, where 1 or more is right. It does not apply to every fifth task."""
    return [None if n % 5 == 4 else 0.75 * (len(text) % 7 - 4) for n, text in zip(number, completions)]


def points(completions, number, **columns):
    """The responses to every third task have equal points."""
    return [0.5 if n % 3 == 0 else 0.25 * (len(text) % 8) for n, text in zip(number, completions)]


def short(completions, number, **columns):
    """Does not apply to every fourth task."""
    return [None if n % 4 == 1 else float(len(text) < 35) for n, text in zip(number, completions)]


def row_of(kind, number):
    """A row of the data."""
    return dict(kind=kind, number=number, text="1" + " + 1" * (number % 4))


def prompt_of(kind, number):
    """What --prompt-template and --system-prompt make of it."""
    row = row_of(kind, number)
    return f"{SYSTEM}\n\n{kind} {number}: {row['text']} ="


CALLS = [  # the calls of sample_responses
    *("before held-out", "before harder", "before greedy"),
    *("update 1", "update 2"),
    *("after held-out", "after harder", "after greedy"),
]
SETS = ("held-out", "harder", "greedy")


@pytest.fixture(scope="module")
def trained(scripts, world, tiny_lm, tmp_path_factory):
    """trained(**changes) -> all about a run on asymmetric data, recorded; the same flags run only once."""
    root = tmp_path_factory.mktemp("trained")

    @functools.cache
    def run(**changes):
        return recorded_run(scripts["grpo_math"], tmp_path_factory.mktemp("run"), changes)

    too_long = dict(kind="Long", number=99, text="1 +" * 60)
    train = [*(row_of("Train", i) for i in range(4)), too_long, *(row_of("Train", i) for i in range(4, 8))]
    test = [too_long, *(row_of("Exam", i) for i in range(20, 29))]
    validation = [row_of("Valid", i) for i in range(40, 44)]
    run.data = write_rows(root / "data", train=train, validation=validation, test=test)
    never, hard = [row_of("Never", i) for i in range(4)], [row_of("Hard", i) for i in range(60, 65)]
    run.hard = write_rows(root / "hard", train=never, test=hard)  # fewer than --num-eval-prompts
    run.lm = wordy(eos_prone(tiny_lm, root / "lm"))

    def recorded_run(script, folder, changes):
        places = dict(
            dataset_name=run.data,
            hard_dataset_name=run.hard,
            model_name_or_path=run.lm,
            reward_fn=[f"{__file__}:{name}" for name in ("judge", "points", "short")],
            reward_weights=[0.0, *WEIGHTS],
        )
        args = maker(scripts, world, folder)("grpo_math", **(places | FLAGS | changes))
        with pytest.MonkeyPatch.context() as patch, handlers_kept():
            patch.setattr(script, "sample_responses", with_a_gap(script.sample_responses, P * K))
            sampled = spy(patch, script, "sample_responses")
            _, run_folder = script.train(args)
        tokenizer = AutoTokenizer.from_pretrained(run.lm)
        parts = {}
        for name, (inputs, (b, responses)) in zip(CALLS, sampled, strict=True):
            parts[name] = rows_by_hand(tokenizer, b, responses, inputs[-1].temperature)
            for row in parts[name]:
                row.number = int(row.prompt.split(": ")[0].split()[-1])
                for reward in (judge, points, short):
                    [score] = reward([row.response], [row.number])
                    setattr(row, reward.__name__, score)
        return SimpleNamespace(
            args=args,
            folder=run_folder,
            metrics=rows_of(run_folder),
            table=evaluation_of(run_folder),
            samples=rows_of(run_folder, "evaluation_samples.jsonl"),
            parts=parts,
            uniforms={name: inputs[4]["uniforms"] for name, (inputs, _) in zip(CALLS, sampled)},
        )

    return run


def scores_of(rows):
    """The weighted sums. A reward that does not apply counts 0."""
    first, second = WEIGHTS
    return [first * row.points + second * (row.short or 0) for row in rows]


def mean_of_applied(rows, name):
    """The mean of a reward over the responses to which it applies."""
    return mean(getattr(row, name) for row in rows if getattr(row, name) is not None)


def advantages_of(rows, scores):
    """(Score - mean of the group) / (its deviation, with n - 1, + 1e-4)."""
    advantages = []
    for group in grouped(rows, scores):
        advantages += [(score - mean(group)) / (statistics.stdev(group) + 1e-4) for score in group]
    return advantages


def update_by_hand(script, run, number, policy, reference, lr):
    """Train with plain transformers on the rollouts of an update. -> its metrics, except for clocks"""
    args, rows = run.args, run.parts[f"update {number}"]
    old, ref, gaps = [], [], []
    for row in rows:
        with torch.no_grad():
            old.append(plain_logprobs(policy, row)[0])
            ref.append(plain_logprobs(reference, row)[0])
        gaps += (row.sampled - old[-1]).abs().tolist()
    scores = scores_of(rows)
    advantages = advantages_of(rows, scores)
    optimizer = torch.optim.SGD(policy.parameters(), lr=lr)
    losses, log_ratios, clipped, entropies = [], [], [], []
    for epoch in range(EPOCHS):
        generator = script.generator_for(args.seed, "order", number, epoch)
        for tasks in torch.randperm(P, generator=generator).split(P // MINIBATCHES):
            minibatch = [task * K + i for task in tasks.tolist() for i in range(K)]
            optimizer.zero_grad()
            total = 0.0
            for i in minibatch:
                logprobs, row_entropies = plain_logprobs(policy, rows[i])
                ratio = (logprobs - old[i]).exp()
                bounded = ratio.clamp(1 - args.cliprange, 1 + args.cliprange)
                loss = -torch.min(ratio * advantages[i], bounded * advantages[i])
                clipped += (bounded * advantages[i] < ratio * advantages[i]).tolist()
                losses += loss.tolist()
                log_ratios += (logprobs - old[i]).tolist()
                entropies += row_entropies.tolist()
                x = ref[i] - logprobs
                total = total + (loss + args.kl_coef * (x.exp() - 1 - x)).sum()
            (total / sum(len(rows[i].tokens) for i in minibatch)).backward()
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm or math.inf)
            optimizer.step()

    ratios = [math.exp(x) for x in log_ratios]
    lengths = [len(row.tokens) for row in rows]
    ended = [row.ended for row in rows]
    kl = [(x - y).sum().item() for x, y in zip(old, ref)]
    metrics = {
        "update": number,
        "episode": 12 * number,
        "lr": lr,
        "objective/entropy": mean(-x.sum().item() for x in old),
        "objective/scores": mean(scores),
        "rewards/judge/mean": mean_of_applied(rows, "judge"),
        "rewards/points/mean": mean_of_applied(rows, "points"),
        "rewards/short/mean": mean_of_applied(rows, "short"),
        "loss/policy_avg": mean(losses),
        "policy/approxkl_avg": mean(0.5 * x**2 for x in log_ratios),
        "policy/clipfrac_avg": mean(clipped),
        "policy/entropy_avg": mean(entropies),
        "val/ratio": mean(ratios),
        "val/ratio_var": statistics.pvariance(ratios),
        "grad_norm": norm.item(),
        "val/num_eos_tokens": sum(ended),
        "env/reward_mean": mean(scores),
        "env/reward_std": statistics.pstdev(scores),
        "frac_reward_zero_std": mean(len(set(group)) == 1 for group in grouped(rows, scores)),
        "completions/mean_length": mean(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": 1 - mean(ended),
        "completions/distinct_2": bigram_share([row.response for row in rows]),
        "sampling/logprob_gap_mean": mean(gaps),
        "sampling/logprob_gap_max": max(gaps),
    }
    if args.kl_coef > 0:
        metrics |= {"objective/kl": mean(kl), "objective/kl_coef": args.kl_coef}
    return metrics


# ---- Training, by hand -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(kl_coef=0.0, max_grad_norm=0.5),
    ],
    ids=["plain", "no KL, clipped gradient"],
)
def test_two_updates_by_hand(script, trained, changes):
    """Every metric of both updates, and the weights in model/, are those of a run in plain transformers."""
    run = trained(**changes)
    policy = AutoModelForCausalLM.from_pretrained(trained.lm).eval()
    reference = AutoModelForCausalLM.from_pretrained(trained.lm).eval()
    assert len(run.metrics) == 2
    for number, row in enumerate(timeless(run.metrics), 1):
        lr = run.args.learning_rate / number  # linear
        expected = update_by_hand(script, run, number, policy, reference, lr)
        assert row == pytest.approx(expected, rel=2e-3, abs=2e-5)
    ours = AutoModelForCausalLM.from_pretrained(run.folder / "model").state_dict()
    assert distance(ours, policy.state_dict()) < 2e-4
    assert distance(ours, reference.state_dict()) > 1e-3


def test_the_fixture_is_asymmetric(trained):
    """Otherwise the test above would see less."""
    run = trained()
    rows = run.parts["update 1"] + run.parts["update 2"]
    assert any(row.ended and len(row.tokens) == T for row in rows)  # EOS on the last allowed token
    assert 0 < sum(row.ended for row in rows) < len(rows) and len({len(row.tokens) for row in rows}) > 3
    assert {row.short for row in rows} == {None, 0.0, 1.0}
    assert any(0 < row["frac_reward_zero_std"] < 1 for row in run.metrics)
    assert run.metrics[1]["policy/clipfrac_avg"] > 0 and abs(run.metrics[1]["objective/kl"]) > 0.005


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_one_step_per_batch(trained, kl_coef):
    """The default: every ratio is 1, and the loss is minus the mean advantage."""
    one_step = dict(num_mini_batches=1, num_ppo_epochs=1, gradient_accumulation_steps=12)
    run = trained(**one_step, kl_coef=kl_coef)
    for number, row in enumerate(run.metrics, 1):
        rows = run.parts[f"update {number}"]
        advantages = advantages_of(rows, scores_of(rows))
        tokens = [a for a, r in zip(advantages, rows) for _ in r.tokens]
        assert row["loss/policy_avg"] == pytest.approx(-mean(tokens), abs=1e-5)
        assert row["val/ratio"] == pytest.approx(1, abs=1e-5)
        assert row["grad_norm"] > 1e-3
        gaps = [0.001 * t for r in rows for t in range(1, len(r.tokens) + 1)]
        assert row["sampling/logprob_gap_mean"] == pytest.approx(mean(gaps), abs=2e-5)
        assert row["sampling/logprob_gap_max"] == pytest.approx(max(gaps), abs=2e-5)


def test_each_response_has_its_own_random_numbers(trained):
    """All numbers of a run differ, except those that an evaluation repeats."""
    run = trained()
    numbers = run.uniforms["before held-out"].flatten().tolist()
    for number in (1, 2):
        numbers += run.uniforms[f"update {number}"].flatten().tolist()
    assert len(set(numbers)) == len(numbers) == (6 * SAMPLES + 2 * P * K) * T
    for name in SETS:
        assert torch.equal(run.uniforms[f"before {name}"], run.uniforms[f"after {name}"])


# ---- The evaluation, by hand -------------------------------------------------------------------------------


def is_right(row):
    """At 1 or more, by the first reward that applies."""
    return (row.points if row.judge is None else row.judge) >= 1


def table_by_hand(name, rows):
    """The numbers of the final table for one set of tasks."""
    right = grouped(rows, [is_right(row) for row in rows])
    shares = [mean(group) for group in right]
    expected = {
        "pass@1": mean(shares),
        "+- (95 % interval)": 1.96 * statistics.pstdev(shares) / math.sqrt(len(shares)),
        "tokens per response": mean(len(row.tokens) for row in rows),
    }
    if name != "greedy":
        texts = grouped(rows, [row.response for row in rows])
        expected |= {
            f"pass@{SAMPLES}": mean(any(group) for group in right),
            "tasks all right or all wrong": mean(len(set(group)) == 1 for group in right),
            "different responses per task": mean(len(set(group)) for group in texts),
            "distinct bigrams": bigram_share([row.response for row in rows]),
            "ended by itself": mean(row.ended for row in rows),
            "rewards/judge": mean_of_applied(rows, "judge"),
            "rewards/points": mean_of_applied(rows, "points"),
            "rewards/short": mean_of_applied(rows, "short"),
        }
    return {f"{name}: {metric}": x for metric, x in expected.items()}


@pytest.mark.parametrize("part", ["before", "after"])
def test_the_final_table_by_hand(trained, part):
    """Every number of evaluation.json, from the texts; and who wrote them, in plain transformers."""
    run = trained()
    expected = {}
    for name in SETS:
        expected |= table_by_hand(name, run.parts[f"{part} {name}"])
    assert run.table[part] == pytest.approx(expected, abs=1e-6)
    lm = trained.lm if part == "before" else run.folder / "model"
    policy = AutoModelForCausalLM.from_pretrained(lm).eval()
    for name in SETS:
        for row in run.parts[f"{part} {name}"]:
            with torch.no_grad():
                logprobs, _ = plain_logprobs(policy, row)
            near = 0.05 if name == "greedy" else 1e-4  # a temperature of 0.01 magnifies roundings
            assert torch.allclose(logprobs, row.sampled, atol=near)
    assert 0 < expected["held-out: pass@1"] < expected[f"held-out: pass@{SAMPLES}"] < 1
    assert 0 < expected["held-out: tasks all right or all wrong"] < 1


def test_greedy_responses_are_the_likeliest_tokens(trained):
    """One response to each held-out task; its tokens are the most probable ones."""
    run = trained()
    policy = AutoModelForCausalLM.from_pretrained(run.folder / "model").eval()
    for row in run.parts["after greedy"]:
        with torch.no_grad():
            logits = policy(torch.tensor([row.ids + row.tokens])).logits[0, len(row.ids) - 1 : -1]
        lead = logits.max(-1).values - logits[range(len(row.tokens)), row.tokens]
        assert lead.max() < 0.1  # temperature 0.01 chooses among what is as good as equal
        assert row.temperature == 0.01


def test_the_tasks_of_the_evaluation(trained):
    """6 of the 9 usable test rows, and all 5 harder ones, each once and in random order."""
    run = trained()
    tasks = {name: [row["task"] for row in run.samples if row["set"] == name] for name in SETS}
    assert len(set(tasks["held-out"])) == len(tasks["held-out"]) == 6
    assert set(tasks["held-out"]) < {prompt_of("Exam", i) for i in range(20, 29)}
    assert tasks["held-out"] != sorted(tasks["held-out"])
    assert sorted(tasks["harder"]) == [prompt_of("Hard", i) for i in range(60, 65)]
    assert tasks["greedy"] == tasks["held-out"]


def test_evaluation_samples(trained):
    """All responses to each task, with what is known of them."""
    run = trained()
    for part in ("before", "after"):
        for name in SETS:
            rows, k = run.parts[f"{part} {name}"], 1 if name == "greedy" else SAMPLES
            lines = [line for line in run.samples if line["set"] == name]
            assert len(rows) == k * len(lines)
            for i, line in enumerate(lines):
                of_task = rows[i * k : (i + 1) * k]
                assert {row.prompt for row in of_task} == {line["task"]}
                seen = line[part]
                assert seen["responses"] == [row.response for row in of_task]
                assert seen["right"] == [is_right(row) for row in of_task]
                assert seen["ended"] == [row.ended for row in of_task]
                assert seen["length"] == [len(row.tokens) for row in of_task]
                assert seen["rewards/short"] == [row.short for row in of_task]


def test_samples_during_the_run(trained):
    """After updates 1 and 2: all responses to the first task of the batch, token by token."""
    run = trained()
    samples = rows_of(run.folder, "tokens.jsonl")
    assert [row["update"] for row in samples] == [1] * K + [2] * K
    for number in (1, 2):
        rows = run.parts[f"update {number}"]
        scores = scores_of(rows)
        advantages = advantages_of(rows, scores)
        of_update = [row for row in samples if row["update"] == number]
        for i, (sample, row) in enumerate(zip(of_update, rows[:K], strict=True)):
            assert (sample["prompt"], sample["response"]) == (row.prompt, row.response)
            assert sample["score"] == pytest.approx(scores[i])
            assert sample["ids"] == row.tokens
            assert sample["logprob"] == pytest.approx(row.sampled.tolist())
            assert sample["advantage"] == pytest.approx([advantages[i]] * len(row.tokens), rel=1e-4)
            assert len(sample["kl"]) == len(row.tokens)
