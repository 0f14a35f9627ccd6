"""report.py: what it finds in committed runs, and the page in a real browser."""

import ast
import json
import math
import re
import shutil
import sys

import numpy as np
import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT))
import report  # noqa: E402

HEALTHY = [
    *(f"ppo-sentiment-tiny/seed{seed}" for seed in range(1, 6)),
    *(f"ppo-dialog-tiny/seed{seed}" for seed in range(1, 4)),
    *(f"rloo-tiny/seed{seed}" for seed in range(1, 4)),
    *(f"grpo-math-tiny/seed{seed}" for seed in range(1, 6)),
]


def titles(folder):
    return [finding.title for finding in report.find_problems(report.read_run(ROOT / "results" / folder))]


# ---- Findings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", HEALTHY)
def test_nothing_is_found_in_a_healthy_run(folder):
    assert titles(folder) == []


def test_false_alarms_are_counted_in_the_docs():
    """Of the runs in results/diagnose, with seeds and flags that the limits were not chosen on."""
    folders = sorted((ROOT / "results/diagnose/runs/healthy").iterdir())
    alarms = [folder for folder in folders if report.find_problems(report.read_run(folder))]
    page = " ".join((ROOT / "docs/running.md").read_text().split())
    assert not alarms and f"no false alarm in {len(folders)} runs" in page


@pytest.mark.parametrize("name", ["faults", "unseen", "unseen2", "unseen3", "unseen4"])
def test_the_lists_of_faults_fit_the_scripts(monkeypatch, name):
    """Each fault's old text is in its function once, and the script with the new one can be read."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import diagnose

    runs = diagnose.all_runs(name)
    assert len(runs) >= 20 and len({run[0] for run in runs}) == len(runs)
    for _, script, source, words in runs:
        ast.parse(source)
        assert words or source != (ROOT / f"{script}.py").read_text()


def test_the_verdicts_in_the_docs_are_those_of_the_file():
    """Of two judges, about the first three causes that were printed for each fault."""
    with open(ROOT / "results/diagnose/verdicts.jsonl") as file:
        rows = [json.loads(line) for line in file]
    page = (ROOT / "docs/running.md").read_text()
    right = [row for row in rows if row["verdicts"] == ["right", "right"]]
    for name in ("unseen", "unseen2", "unseen3", "unseen4"):
        count = sum(row["name"].startswith(f"{name}/") for row in right)
        total = sum(row["name"].startswith(f"{name}/") for row in rows)
        share = f"{count} of {total} ({count / total:.0%})".replace("%", " %")
        [line] = [line for line in page.splitlines() if line.startswith(f"| `results/diagnose/{name}.jsonl`")]
        assert line.endswith(f"| {share} |")
    total = f"{len(right)} of {len(rows)} ({len(right) / len(rows):.0%})".replace("%", " %")
    assert f"Together that is {total}" in page
    others = []
    for row in rows:
        if row not in right:
            first_cause = row["causes"][0] if row["causes"] else "(nothing)"
            others.append(f"| `{row['name']}` | {first_cause} | {', '.join(row['verdicts'])} |")
    assert others == [
        line
        for line in page.splitlines()
        if line.startswith("| `") and line.endswith(("wrong |", "close |", "right |"))
    ]


def test_an_exploited_reward_is_found():
    """One word is in most of the responses, and the KL is far above its target."""
    assert titles("ppo-sentiment-hacked") == [
        "Flags differ from those of healthy runs",
        "The responses become alike",
        "The KL is above its target",
    ]


def test_over_optimization_is_found():
    """The score of a weak reward model rises, and the gold score falls."""
    assert titles("rloo-weak-reward") == ["The score rises, and the gold score falls"]


def write_run(folder, args=(), **columns):
    """A run folder. columns: metric -> function of the fraction of the run that is over. -> its path"""
    folder.mkdir()
    defaults = {"objective/scores": lambda x: x, "env/reward_std": lambda x: 1.0}
    columns = defaults | {name.replace("__", "/"): function for name, function in columns.items()}
    rows = []
    for update in range(1, 101):
        rows.append({"update": update} | {name: f((update - 1) / 99) for name, f in columns.items()})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    about = {"args": {"recipe": "none", "dtype": "float32"} | dict(args), "command": ["ppo_sentiment.py"]}
    (folder / "args.json").write_text(json.dumps(about))
    return folder


def noise(size):
    """The same random numbers in each test, one per update."""
    values = np.random.default_rng(0).normal(0, size, 100)
    return lambda x: values[round(99 * x)].item()


CASES = {  # a change of a healthy run -> title of what is found, or None
    "healthy": ({}, {}, None),
    "sampler": ({"sampling__logprob_gap_mean": lambda x: 0.02}, {}, "Rollout and update compute"),
    "sampler in bf16": ({"sampling__logprob_gap_mean": lambda x: 0.02}, {"dtype": "bfloat16"}, None),
    "KL negative": ({"objective__kl": lambda x: -2 * x}, {}, "The KL is negative"),
    "KL by chance negative": ({"objective__kl": lambda x: (-1) ** round(99 * x) * (x > 0)}, {}, None),
    "not finite": (
        {"loss__policy_avg": lambda x: math.nan if x > 0.5 else 0.0},
        {},
        "Some numbers are not finite",
    ),
    "flat and noisy": ({"objective__scores": noise(1.0)}, {}, "The score does not rise"),
    "gold score, flat and noisy": ({"judge__scores": noise(0.3)}, {}, None),
    "gold score falls": (
        {"judge__scores": lambda x: 2 * x if x < 0.5 else 1 - 2 * (x - 0.5)},
        {},
        "The score rises, and the gold score falls",
    ),
    "loss, noisy, falls a little": ({"loss": lambda x: 2 - 0.2 * x + noise(0.05)(x)}, {}, None),
    "KL at the start": ({"objective__kl": lambda x: 0.4}, {}, "The KL is not 0 in the first update"),
    "equal rewards": ({"env__reward_std": lambda x: 0.0}, {}, "In most updates, all rewards are equal"),
    "equal groups": ({"frac_reward_zero_std": lambda x: 0.9}, {}, "Most groups have equal rewards"),
    "equal groups at the end": ({"frac_reward_zero_std": lambda x: 0.9 * x}, {}, None),
    "no gradient": ({"grad_norm": lambda x: 0.0}, {}, "There is no gradient"),
    "learning rate ends early": (
        {"lr": lambda x: max(0.0, 1 - 4 * x)},
        {},
        "The learning rate is 0 for a part of the run",
    ),
    "learning rate ends at the end": ({"lr": lambda x: 1 - x}, {}, None),
    "KL stays 0": ({"objective__kl": lambda x: 0.0}, {}, "The KL is exactly 0"),
    "no steps": (
        {"policy__approxkl_avg": lambda x: 0.0},
        {"num_ppo_epochs": 4},
        "The policy does not move",
    ),
    "one step": ({"policy__approxkl_avg": lambda x: 0.0}, {"num_ppo_epochs": 1}, None),
    "large steps": (
        {"val__ratio_var": lambda x: 3.0, "policy__clipfrac_avg": lambda x: 0.1},
        {},
        "The steps are too large",
    ),
    "falls": ({"objective__scores": lambda x: -x}, {}, "The score falls"),
    "flat": ({"objective__scores": lambda x: 0.1 * (-1) ** round(99 * x)}, {}, "The score does not rise"),
    "small but clear gain": ({"objective__scores": lambda x: 0.1 * x}, {}, None),
    "above target": (
        {"objective__kl": lambda x: 10 * (x > 0), "objective__kl_coef": lambda x: 0.1 + x},
        {"kl_target": 4.0},
        "The KL is above its target",
    ),
    "coefficient up": (
        {"objective__kl": lambda x: 3 * x, "objective__kl_coef": lambda x: 0.1 + x},
        {"kl_target": 4.0},
        "The KL coefficient moves the wrong way",
    ),
    "coefficient down": (
        {"objective__kl": lambda x: 3 * x, "objective__kl_coef": lambda x: 0.1 - 0.05 * x},
        {"kl_target": 4.0},
        None,
    ),
    "near target": (
        {"objective__kl": lambda x: 4.4 * min(1, 3 * x), "objective__kl_coef": lambda x: 0.1},
        {"kl_target": 4.0},
        None,
    ),
    "another controller": (
        {
            "episode": lambda x: 1 + round(99 * x),
            "objective__kl": lambda x: 3.0 * (x > 0),
            "objective__kl_coef": lambda x: 0.1 * (1 - 0.001) ** round(99 * x),
        },
        {"kl_target": 4.0, "kl_horizon": 100},
        "The KL coefficient does not take the steps of its controller",
    ),
    "the controller": (
        {
            "episode": lambda x: 1 + round(99 * x),
            "objective__kl": lambda x: 3.0 * (x > 0),
            "objective__kl_coef": lambda x: 0.1 * (1 - 0.2 / 100) ** round(99 * x),
        },
        {"kl_target": 4.0, "kl_horizon": 100},
        None,
    ),
    "penalty": (
        {
            "env__reward_mean": lambda x: x + 0.3 * 0.5,
            "completions__clipped_ratio": lambda x: 0.3,
        },
        {"missing_eos_penalty": 0.5},
        None,
    ),
    "penalty of responses that end": (
        {
            "env__reward_mean": lambda x: x + 0.7 * 0.5,
            "completions__clipped_ratio": lambda x: 0.3,
        },
        {"missing_eos_penalty": 0.5},
        "The score is not what the flags make of the reward",
    ),
    "clipped scores": (
        {"env__reward_mean": lambda x: 2 * x, "completions__clipped_ratio": lambda x: 0.3},
        {"score_clip": 1.0},
        None,
    ),
    "entropy up": ({"policy__entropy_avg": lambda x: 1 + x}, {}, "The entropy rises"),
    "entropy down with a gain": ({"policy__entropy_avg": lambda x: 1.01 - x}, {}, None),
    "no end": (
        {"completions__clipped_ratio": lambda x: 0.9},
        {"missing_eos_penalty": 1.0},
        "Responses do not end",
    ),
    "no end is wanted": ({"completions__clipped_ratio": lambda x: 1.0}, {}, None),
    "short": ({"completions__mean_length": lambda x: 20 - 18 * x}, {}, "Responses become short"),
    "long": ({"completions__mean_length": lambda x: 20 + 30 * x}, {}, "Responses become long"),
    "critic": ({"loss__value_avg": lambda x: 1 + x}, {"vf_coef": 0.1}, "The critic gets worse"),
    "loss": ({"loss": lambda x: 2 + x}, {}, "The loss does not fall"),
    "word": ({"completions__new_word_share": lambda x: 0.5 * x}, {}, "The responses become alike"),
}


def write_tokens(folder, row, num_rows=3):
    """tokens.jsonl with four saved updates of num_rows responses. row: function of a generator -> dict"""
    rng = np.random.default_rng(0)
    rows = [{"update": update} | row(rng) for update in (1, 34, 67, 100) for _ in range(num_rows)]
    (folder / "tokens.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


GAMMA, LAM, KL_COEF = 0.9, 0.8, 0.5


def ppo_row(rng):
    """A response of 4 to 7 tokens, with right rewards and advantages; computed by the definition of GAE."""
    T = int(rng.integers(4, 8))
    kl, value = rng.normal(0, 1, T), rng.normal(0, 1, T)
    score = float(rng.normal(0, 2))
    reward = -KL_COEF * kl
    reward[-1] += score
    next_value = np.append(value[1:], 0.0)
    delta = reward + GAMMA * next_value - value
    advantage = [sum((GAMMA * LAM) ** (j - t) * delta[j] for j in range(t, T)) for t in range(T)]
    row = {"KL": kl, "value": value, "reward": reward, "advantage": 0.3 * np.array(advantage) - 0.1}
    row["return"] = np.array(advantage) + value
    return {"score": score, "tokens": ["a"] * T} | {name: x.round(4).tolist() for name, x in row.items()}


def with_change(**functions):
    """ppo_row with some columns changed. functions: column -> function of the row"""

    def row(rng):
        right = ppo_row(rng)
        return right | {name: function(right) for name, function in functions.items()}

    return row


def shifted_rewards(row):
    """The score one token too early."""
    rewards = list(row["reward"])
    rewards[-1] -= row["score"]
    rewards[-2] += row["score"]
    return rewards


def rewards_with_a_bonus(row):
    """+KL instead of -KL."""
    rewards = [KL_COEF * kl for kl in row["KL"]]
    rewards[-1] += row["score"]
    return rewards


def masked(where):
    """KL, return and advantage of a token are exactly 0."""

    def zeros(name):
        return lambda row: [0.0 if i == where % len(row[name]) else x for i, x in enumerate(row[name])]

    return {name: zeros(name) for name in ("KL", "return", "advantage")}


def penalty_of_all(row):
    """Each token pays the KL of the whole response."""
    rewards = [-KL_COEF * sum(row["KL"])] * len(row["KL"])
    rewards[-1] += row["score"]
    return rewards


def penalty_of_twice(row):
    rewards = [-2 * KL_COEF * kl for kl in row["KL"]]
    rewards[-1] += row["score"]
    return rewards


TOKEN_CASES = {  # rows of tokens.jsonl -> titles, and a part of the first cause
    "healthy": (ppo_row, [], ""),
    "score too early": (
        with_change(reward=shifted_rewards, advantage=lambda row: None),
        ["Rewards are not the KL penalty and the score"],
        "the score is paid on more tokens than the last one",
    ),
    "KL is a bonus": (
        with_change(reward=rewards_with_a_bonus, advantage=lambda row: None),
        ["Rewards are not the KL penalty and the score"],
        "the KL penalty has the wrong sign",
    ),
    "KL of the response on each token": (
        with_change(reward=penalty_of_all, advantage=lambda row: None),
        ["Rewards are not the KL penalty and the score"],
        "the KL of the whole response is charged to each of its tokens",
    ),
    "twice the KL": (
        with_change(reward=penalty_of_twice, advantage=lambda row: None),
        ["Rewards are not the KL penalty and the score"],
        "the KL penalty has another coefficient: rewards are -1 * KL",
    ),
    "the last token is masked": (
        with_change(**masked(-1), reward=lambda row: None, value=lambda row: None),
        ["Tokens of the responses are masked out"],
        "the mask leaves out the last token",
    ),
    "the first token is masked": (
        with_change(**masked(0), reward=lambda row: None, value=lambda row: None),
        ["Tokens of the responses are masked out"],
        "the mask leaves out the first token",
    ),
    "another token is masked": (
        with_change(**masked(1), reward=lambda row: None, value=lambda row: None),
        ["Tokens of the responses are masked out"],
        "the mask of the response is of other tokens",
    ),
    "no score": (
        with_change(reward=lambda row: [-KL_COEF * kl for kl in row["KL"]], advantage=lambda row: None),
        ["Rewards are not the KL penalty and the score"],
        "the score is not put on the last token",
    ),
    "advantages backwards": (
        with_change(advantage=lambda row: row["advantage"][::-1]),
        ["Advantages do not follow from rewards and values"],
        "the recursion of GAE is wrong",
    ),
    "advantages negative": (
        with_change(advantage=lambda row: [-x for x in row["advantage"]]),
        ["Advantages do not follow from rewards and values"],
        "the recursion of GAE is wrong",
    ),
    "whitened returns": (
        with_change(**{"return": lambda row: row["advantage"]}),
        ["Returns are not advantages plus values"],
        "the critic learns another target",
    ),
    "values are 0": (
        with_change(value=lambda row: [0.0] * len(row["value"]), advantage=lambda row: None),
        ["The critic predicts 0 for every token"],
        "the value loss has no weight",
    ),
}


@pytest.mark.parametrize("case", TOKEN_CASES)
def test_what_the_tokens_show(tmp_path, case):
    row, titles, cause = TOKEN_CASES[case]
    flags = {"gamma": GAMMA, "lam": LAM}
    folder = write_run(tmp_path / "run", flags, objective__kl_coef=lambda x: KL_COEF)

    def without_none(rng):
        return {name: x for name, x in row(rng).items() if x is not None}

    write_tokens(folder, without_none)
    found = report.find_problems(report.read_run(folder))
    assert [finding.title for finding in found] == titles
    assert all(finding.causes[0].startswith(cause) for finding in found)


@pytest.mark.parametrize("clip, penalty, paid", [(1.0, None, 1.0), (None, 0.5, 2.5), (1.0, 0.5, 0.5)])
def test_a_score_may_be_clipped_and_penalized(tmp_path, clip, penalty, paid):
    flags = {"score_clip": clip, "missing_eos_penalty": penalty}
    folder = write_run(tmp_path / "run", flags, objective__kl_coef=lambda x: KL_COEF)
    write_tokens(
        folder, lambda rng: {"score": 3.0, "tokens": ["a"] * 2, "KL": [1, 0], "reward": [-0.5, paid]}
    )
    assert report.find_problems(report.read_run(folder)) == []


@pytest.mark.parametrize(
    "metrics, cause",
    [
        (["completions/clipped_ratio", "policy/entropy_avg"], "the model's input: positions"),
        (["completions/mean_length", "env/reward_mean"], "the model's input: positions"),
        (["completions/mean_length"], "the stop token: forbidden"),
        (["completions/distinct_2", "intent"], "the texts of responses: decoded"),
        (["completions/distinct_2", "policy/entropy_avg"], "the model's input: positions"),
        (["objective/entropy"], "sampling: temperature"),
        (["intent", "env/reward_mean"], "what the intent is compared with"),
    ],
)
def test_several_metrics_tell_more_about_the_first_update(metrics, cause):
    causes = report.causes_at_first([(metric, True) for metric in metrics])
    assert causes[0].startswith(cause) and len(set(causes)) == len(causes)


def naive_rloo(rewards):
    """Reward minus the mean of the others."""
    rewards = rewards.tolist()
    return [x - (sum(rewards) - x) / (len(rewards) - 1) for x in rewards]


def naive_grpo(rewards):
    deviations = rewards - rewards.mean()
    return deviations / (deviations @ deviations / (len(rewards) - 1)) ** 0.5


OTHER_GROUP = "Advantages do not follow from the rewards of the group"
OTHER_BASELINE = "The advantages of a group do not sum to 0"
OTHER_SCALE = "The advantages of a group have another scale"
GROUP_CASES = {  # script, function: scores, KL of the responses -> advantages; title of what is found
    "rloo": ("rloo_tldr", lambda scores, kl: naive_rloo(scores - KL_COEF * kl), None),
    "grpo": ("grpo_math", lambda scores, kl: naive_grpo(scores), None),
    "negative": ("rloo_tldr", lambda scores, kl: -np.array(naive_rloo(scores - KL_COEF * kl)), OTHER_GROUP),
    "of another response": ("grpo_math", lambda scores, kl: naive_grpo(np.roll(scores, 1)), OTHER_GROUP),
    "no baseline": ("rloo_tldr", lambda scores, kl: scores - KL_COEF * kl, OTHER_BASELINE),
    "baseline of other groups": ("grpo_math", lambda scores, kl: naive_grpo(scores) - 0.3, OTHER_BASELINE),
    "no standard deviation": ("grpo_math", lambda scores, kl: scores - scores.mean(), OTHER_SCALE),
    "GRPO's deviation in RLOO": (
        "rloo_tldr",
        lambda scores, kl: naive_grpo(scores - KL_COEF * kl),
        OTHER_SCALE,
    ),
    "KL is a bonus": ("rloo_tldr", lambda scores, kl: naive_rloo(scores + KL_COEF * kl), OTHER_GROUP),
    "no KL": ("rloo_tldr", lambda scores, kl: naive_rloo(scores), OTHER_GROUP),
}


def write_groups(folder, script, advantages, texts=None):
    """tokens.jsonl with a group of five responses in each of three updates; each has one token."""
    rng = np.random.default_rng(0)
    rows = []
    for update in (1, 50, 100):
        scores, kl = rng.normal(0, 1, 5).round(4), rng.normal(0, 0.1, 5).round(4)
        for i, advantage in enumerate(advantages(scores, kl)):
            text = f"{update} {i}" if texts is None else texts
            row = {"update": update, "prompt": f"task {update}", "tokens": [text], "score": scores[i]}
            rows.append(row | {"KL": [kl[i]], "advantage": [round(float(advantage), 4)]})
    (folder / "tokens.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    set_script(folder, script)


def set_script(folder, script):
    about = json.loads((folder / "args.json").read_text()) | {"command": [f"{script}.py"]}
    (folder / "args.json").write_text(json.dumps(about))


@pytest.mark.parametrize("case", GROUP_CASES)
def test_advantages_of_groups(tmp_path, case):
    script, advantages, title = GROUP_CASES[case]
    folder = write_run(tmp_path / "run", {"kl_coef": KL_COEF})
    write_groups(folder, script, advantages)
    found = report.find_problems(report.read_run(folder))
    assert [finding.title for finding in found] == [title] * (title is not None)
    if "KL" in case:
        assert found[0].causes[0].startswith("the KL penalty")


@pytest.mark.parametrize("scale", [1.0, 0.01, 0.0001])
@pytest.mark.parametrize("script", ["rloo_tldr", "grpo_math"])
def test_small_rewards_are_no_fault(tmp_path, script, scale):
    """GRPO divides by their deviation, and so does RLOO with --whiten-rewards."""
    folder = write_run(tmp_path / "run", {"kl_coef": KL_COEF, "whiten_rewards": script == "rloo_tldr"})

    def advantages(scores, kl):
        scores *= scale  # in place: these are saved
        kl *= 0.0
        deviation = np.std(scores, ddof=1)
        if script == "grpo_math":
            return (scores - scores.mean()) / (deviation + 1e-4)
        return np.array(naive_rloo(scores)) / deviation

    write_groups(folder, script, advantages)
    assert report.find_problems(report.read_run(folder)) == []


@pytest.mark.parametrize("logprob, is_found", [(-2.0, True), (-0.05, False)])
def test_the_same_responses_in_all_groups(tmp_path, logprob, is_found):
    """No fault if the policy is certain of them."""
    folder = write_run(tmp_path / "run", {"kl_coef": KL_COEF})
    row = {"tokens": ["same"], "ids": [7], "score": 1.0, "logprob": [logprob], "advantage": [0.0]}
    rows = [{"update": update, "prompt": f"task {update}"} | row for update in (1, 50, 100) for _ in range(4)]
    (folder / "tokens.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    set_script(folder, "grpo_math")
    titles = [finding.title for finding in report.find_problems(report.read_run(folder))]
    assert titles == ["The responses to a prompt are the same"] * is_found


@pytest.mark.parametrize(
    "script, prompts, tokens, scores, is_found",
    [
        ("grpo_math", "aabb", "xxyy", [1.0, 1.0, 0.0, 0.0], False),
        ("grpo_math", "aabb", "xxyy", [1.0, 0.0, 0.0, 1.0], True),
        ("grpo_math", "abab", "xxyy", [1.0, 0.0, 0.0, 1.0], False),
        ("ppo_sentiment", "aabb", "xxyy", [1.0, 0.0, 0.0, 1.0], False),  # columns of the rows may differ
    ],
)
def test_the_same_response_has_one_score(tmp_path, script, prompts, tokens, scores, is_found):
    folder = write_run(tmp_path / "run")
    rows = [
        {"update": 1, "prompt": prompt, "tokens": [token], "score": score}
        for prompt, token, score in zip(prompts, tokens, scores)
    ]
    (folder / "tokens.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    set_script(folder, script)
    titles = [finding.title for finding in report.find_problems(report.read_run(folder))]
    assert titles == ["The same response has different scores"] * is_found


@pytest.mark.parametrize(
    "sign, size, dtype, is_found",
    [
        (1, 1.0, "float32", False),
        (-1, 1.0, "float32", True),
        (-1, 1.0, "bfloat16", True),
        (-1, 0.1, "float32", True),
        (-1, 0.1, "bfloat16", False),  # may be rounding
    ],
)
def test_the_direction_of_the_updates(tmp_path, sign, size, dtype, is_found):
    """sign: of what a high advantage does to the probability of its token; size: of the steps"""

    def row(rng):
        right = ppo_row(rng)
        noise = rng.normal(0, 0.1, len(right["advantage"]))
        log_ratio = size * (sign * 0.1 * np.array(right["advantage"]) + noise)
        return right | {"ratio": np.exp(log_ratio).tolist()}

    flags = {"gamma": GAMMA, "lam": LAM, "dtype": dtype}
    folder = write_run(tmp_path / "run", flags, objective__kl_coef=lambda x: KL_COEF)
    write_tokens(folder, row, num_rows=12)
    titles = [finding.title for finding in report.find_problems(report.read_run(folder))]
    assert titles == ["Updates do not make tokens with high advantages more likely"] * is_found


def test_the_direction_of_the_updates_of_groups(tmp_path):
    """RLOO and GRPO: all tokens of a response have its advantage."""
    for name, sign in (("right", 1), ("wrong", -1)):
        folder = write_run(tmp_path / name)

        def row(rng, sign=sign):
            advantage = float(rng.normal())
            log_ratios = sign * 0.1 * advantage + rng.normal(0, 0.1, 6)
            return {"tokens": ["a"] * 6, "advantage": [advantage] * 6, "ratio": np.exp(log_ratios).tolist()}

        write_tokens(folder, row, num_rows=12)
        set_script(folder, "grpo_math")
        titles = [finding.title for finding in report.find_problems(report.read_run(folder))]
        assert titles == ["Updates do not make tokens with high advantages more likely"] * (sign < 0)


@pytest.mark.parametrize(
    "last_tokens, clipped, is_found",
    [("eeeeeeee", 0.1, False), ("eeeeabcd", 0.1, False), ("abcdefgh", 0.1, True), ("abcdefgh", 0.9, False)],
)
def test_responses_have_their_stop_token(tmp_path, last_tokens, clipped, is_found):
    folder = write_run(tmp_path / "run", completions__clipped_ratio=lambda x: clipped)
    rows = []
    for i, token in enumerate(last_tokens):
        update, score = 1 + 50 * (i // 4), float(i)
        advantage = (i % 4 - 1.5) * 4 / 3
        row = {"update": update, "tokens": [f"{i}", token], "score": score, "advantage": [advantage] * 2}
        rows.append(row | {"prompt": f"task {update}"})
    (folder / "tokens.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    set_script(folder, "rloo_tldr")
    titles = [finding.title for finding in report.find_problems(report.read_run(folder))]
    assert titles == ["Responses lack their stop token"] * is_found


@pytest.mark.parametrize("column", ["ratio", "advantage", "score", "reward"])
@pytest.mark.parametrize("script", ["ppo_sentiment", "grpo_math"])
def test_tokens_may_have_numbers_that_are_not_finite(tmp_path, script, column):
    def row(rng):
        row = ppo_row(rng) | {"prompt": "a", "ids": [1]}
        row["ratio"] = list(row["advantage"])
        row[column] = math.nan if column == "score" else [math.inf] * len(row["value"])
        return row

    folder = write_run(tmp_path / "run", {"gamma": GAMMA, "lam": LAM}, objective__kl_coef=lambda x: KL_COEF)
    write_tokens(folder, row)
    set_script(folder, script)
    report.find_problems(report.read_run(folder))  # no error


@pytest.mark.parametrize(
    "script, prompts, is_found",
    [
        ("ppo_sentiment", {1: ["The film", "My"], 50: ["The", "My friend"]}, True),
        ("ppo_sentiment", {1: ["The film", "My"], 50: ["The", "A friend"]}, False),
        (
            "ppo_sentiment",
            {1: ["The film", "The"], 50: ["The", "The film is"]},
            False,
        ),  # all texts begin alike
        ("ppo_sentiment", {1: ["The film", "My"]}, False),
        ("rloo_tldr", {1: ["The film", "My"], 50: ["The film", "My"]}, True),
        ("rloo_tldr", {1: ["The film", "My"], 50: ["The", "My friend"]}, False),
    ],
)
def test_prompts_that_come_again(tmp_path, script, prompts, is_found):
    folder = write_run(tmp_path / "run")
    set_script(folder, script)
    rows = [{"update": update, "prompt": text} for update, texts in prompts.items() for text in texts]
    (folder / "tokens.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    titles = [finding.title for finding in report.find_problems(report.read_run(folder))]
    assert titles == ["Every update has the same prompts"] * is_found


HELD_OUT_CASES = {  # held-out responses and scores before and after, the judge after, what is found
    "same gain": (lambda i: {"after": "b", "score after": 1.0 + 0.01 * i}, 0.7, []),
    "same texts": (
        lambda i: {"after": f"text {i}", "score after": 0.01 * i},
        0.7,
        ["The policy does not change"],
    ),
    "training prompts only": (
        lambda i: {"after": "b", "score after": 0.1 + 0.01 * i},
        0.7,
        ["The score rises on the training prompts only"],
    ),
    "judge falls": (
        lambda i: {"after": "b", "score after": 1.0 + 0.01 * i},
        0.3,
        ["The score rises, and the judge disagrees"],
    ),
}


@pytest.mark.parametrize("case", HELD_OUT_CASES)
def test_what_held_out_prompts_show(tmp_path, case):
    after, judge, titles = HELD_OUT_CASES[case]
    folder = write_run(tmp_path / "run", env__reward_mean=lambda x: x)
    pairs = [{"prompt": "p", "before": f"text {i}", "score": 0.01 * i} | after(i) for i in range(60)]
    (folder / "evaluation_samples.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    evaluation = {"before": {"judge: P(positive)": 0.5}, "after": {"judge: P(positive)": judge}, "n": 60}
    (folder / "evaluation.json").write_text(json.dumps(evaluation))
    assert [finding.title for finding in report.find_problems(report.read_run(folder))] == titles


def test_a_policy_that_does_not_move_is_reported_once(tmp_path):
    """Its responses stay the same, too."""
    folder = write_run(tmp_path / "run", {"num_ppo_epochs": 4}, policy__approxkl_avg=lambda x: 0.0)
    pairs = [{"prompt": "p", "before": f"text {i}", "after": f"text {i}"} for i in range(60)]
    (folder / "evaluation_samples.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    found = [finding.title for finding in report.find_problems(report.read_run(folder))]
    assert found == ["The policy does not move"]


@pytest.mark.parametrize(
    "of_data, read, is_found",
    [
        (["one. TL;DR:", "two? TL;DR:", "three TL;DR:"], ["one. ", "two"], True),
        (["one. TL;DR:", "two? TL;DR:", "three TL;DR:"], ["four. TL;DR:", "wo? TL;DR: "], False),
        (["one. TL;DR:", "two? TL;DR:", "three TL;DR:"], ["one. ", "o. TL;DR:", "two? TL;DR:"], False),
        (["one. TL;DR:", "two? TL;DR:"], ["one. "], False),  # too few to tell
        (["one?", "two?", "three?"], ["one"], False),  # too short to tell
        (["one", "two", "three"], ["on"], False),
    ],
)
def test_prompts_without_their_end(tmp_path, of_data, read, is_found):
    folder = write_run(tmp_path / "run")
    for name, prompts in (("samples.jsonl", of_data), ("tokens.jsonl", read)):
        rows = [{"update": 1, "prompt": prompt, "response": "a", "tokens": ["a"]} for prompt in prompts]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = report.find_problems(report.read_run(folder))
    assert [finding.entry for finding in found] == ["prompts-without-end"] * is_found
    if is_found:
        assert "'TL;DR:'" in found[0].evidence and "100%" in found[0].evidence


@pytest.mark.parametrize(
    "gain, flags, is_found",
    [
        (1.0, {"kl_coef": 5.0}, True),
        (2.0, {"kl_coef": 5.0}, False),
        (1.0, {"kl_coef": 0.1}, False),  # the usual flags: check_band decides
        (1.0, {"kl_coef": 5.0, "intent_reward": "match"}, False),  # another reward cannot be compared
    ],
)
def test_a_score_that_rises_less_than_with_the_usual_flags(tmp_path, monkeypatch, gain, flags, is_found):
    """Healthy runs gain 3; their range is wide, so that check_band is silent."""
    band = {"update": [1, 50, 100], "5": [-1.0, -1.0, 0.0], "50": [0.0, 3.0, 3.0], "95": [1.0, 4.0, 4.0]}
    usual = {"kl_coef": 0.1, "intent_reward": "probability"}
    bands = {"ppo_sentiment none": {"metrics": {"env/reward_mean": band}, "args": usual}}
    (tmp_path / "bands.json").write_text(json.dumps(bands))
    monkeypatch.setattr(report, "BANDS", tmp_path / "bands.json")
    columns = {"env__reward_mean": lambda x: gain * min(1.0, 2 * x)}
    run = report.read_run(write_run(tmp_path / "run", usual | flags, **columns))
    titles = ["Flags differ from those of healthy runs", "The score rises less than with the usual flags"]
    assert [finding.title for finding in report.find_problems(run)] == titles * is_found


@pytest.mark.parametrize(
    "fall, flags, is_found",
    [
        (2.0, {"learning_rate": 1e-5}, True),
        (4.0, {"learning_rate": 1e-5}, False),  # more than half of the usual
        (2.0, {"learning_rate": 1e-3}, False),  # the usual flags: the band decides
        (2.0, {"dataset_name": "other"}, False),  # other losses
    ],
)
def test_a_loss_that_falls_less_than_with_the_usual_flags(tmp_path, monkeypatch, fall, flags, is_found):
    """Healthy runs fall by 6; their range is wide, so that check_band is silent."""
    band = {"update": [1, 50, 100], "5": [0.0, 0.0, 0.0], "50": [7.0, 1.0, 1.0], "95": [9.0, 9.0, 9.0]}
    usual = {"learning_rate": 1e-3, "dataset_name": "data/reviews"}
    bands = {"sft none": {"metrics": {"loss": band}, "args": usual}}
    (tmp_path / "bands.json").write_text(json.dumps(bands))
    monkeypatch.setattr(report, "BANDS", tmp_path / "bands.json")
    folder = write_run(tmp_path / "run", usual | flags, loss=lambda x: 7 - fall * min(1.0, 2 * x))
    set_script(folder, "sft")
    titles = ["Flags differ from those of healthy runs", "The loss falls less than with the usual flags"]
    found = [finding.title for finding in report.find_problems(report.read_run(folder))]
    assert found == titles * is_found


@pytest.mark.parametrize(
    "early, mean_length, cause",
    [
        (0.1, 20.0, "the reward grows with length"),
        (1.0, 20.0, "the response length is too short"),
        (1.0, 12.0, "the stop token is forbidden, cut off"),
    ],
)
def test_why_responses_do_not_end(tmp_path, early, mean_length, cause):
    """They did at first; they never did, and reach the limit; or they never did, and are shorter."""
    folder = write_run(
        tmp_path / "run",
        {"missing_eos_penalty": 1.0},
        completions__clipped_ratio=lambda x: early + (1 - early) * x,
        completions__mean_length=lambda x: mean_length,
        completions__max_length=lambda x: 20.0,
    )
    [finding] = report.find_problems(report.read_run(folder))
    assert finding.title == "Responses do not end" and finding.causes[0].startswith(cause)


@pytest.mark.parametrize("healthy, cause", [(0.0, "the stop token is"), (1.0, "the response length is")])
def test_a_limit_that_is_enough_for_healthy_runs_is_not_too_short(tmp_path, monkeypatch, healthy, cause):
    """All responses reach the limit. healthy: how many do so in healthy runs with the same flags."""
    band = {"update": [1, 50, 100], "5": [healthy] * 3, "95": [healthy] * 3}
    metrics = {"completions/clipped_ratio": band}
    args = {"dtype": "float32", "missing_eos_penalty": 1.0}
    bands = {"ppo_sentiment none": {"metrics": metrics, "args": args}}
    (tmp_path / "bands.json").write_text(json.dumps(bands))
    monkeypatch.setattr(report, "BANDS", tmp_path / "bands.json")
    columns = dict(
        completions__clipped_ratio=1.0, completions__mean_length=20.0, completions__max_length=20.0
    )
    columns = {name: lambda x, value=value: value for name, value in columns.items()}
    run = report.read_run(write_run(tmp_path / "run", args, **columns))
    finding = report.find_problems(run)[0]
    assert finding.title == "Responses do not end" and finding.causes[0].startswith(cause)


def test_a_kl_that_is_above_its_target_in_healthy_runs_too_is_no_finding(tmp_path, monkeypatch):
    args = {"kl_target": 4.0}
    columns = dict(objective__kl=lambda x: 7.0 * x, objective__kl_coef=lambda x: 0.1)
    run = report.read_run(write_run(tmp_path / "run", args, **columns))
    assert [finding.title for finding in report.find_problems(run)] == ["The KL is above its target"]
    band = {"update": [1, 50, 100], "5": [0.0, 3.0, 6.0], "95": [0.1, 4.0, 8.0]}
    bands = {"ppo_sentiment none": {"metrics": {"objective/kl": band}, "args": args}}
    (tmp_path / "bands.json").write_text(json.dumps(bands))
    monkeypatch.setattr(report, "BANDS", tmp_path / "bands.json")
    assert report.find_problems(report.read_run(tmp_path / "run")) == []


def test_a_finding_without_causes_has_no_empty_list(tmp_path, monkeypatch):
    run = run_with_band(tmp_path, monkeypatch, env__reward_std=lambda x: 3.0)
    text = report.describe_findings(run)
    assert text.count("Likely causes:") == 1 and text.count("See docs/debugging.md") == 2
    assert report.page([run]).count("Likely causes:") == 1


@pytest.mark.parametrize(
    "ratio, gap, causes",
    [
        (1.0, 0.0, []),
        (1.04, 0.0, []),
        (1.2, 0.0, ["padding is counted: tokens after the end of a response"]),
        (0.8, 0.0, ["sampling prefers likely tokens"]),
        (1.2, 0.5, ["positions, padding or the attention mask differ"]),
        (0.8, 0.5, ["sampling and scoring use another temperature"]),
    ],
)
def test_sampled_tokens_are_as_unlikely_as_the_entropy_says(tmp_path, ratio, gap, causes):
    """ratio: -log p of a sampled token / entropy; gap: between the log-probabilities of rollout and update"""
    columns = {
        "objective__entropy": lambda x: 20 * 0.5 * ratio * (1 + noise(0.01)(x)),
        "policy__entropy_avg": lambda x: 0.5,
        "completions__mean_length": lambda x: 20.0,
        "sampling__logprob_gap_mean": lambda x: gap,
    }
    found = report.find_problems(report.read_run(write_run(tmp_path / "run", **columns)))
    assert [finding.entry for finding in found] == ["rollout-and-update-disagree"] * len(causes)
    assert all(finding.causes[0].startswith(cause) for finding, cause in zip(found, causes))


@pytest.mark.parametrize(
    "first, cause",
    [
        (0.0, "the weights used for generation are not"),
        (0.02, "sampling and scoring use another temperature"),
        (2.0, "other rows or tokens are scored"),
    ],
)
def test_what_the_first_gap_tells(tmp_path, first, cause):
    gap = {"sampling__logprob_gap_mean": lambda x: 0.02 if x > 0 else first}
    [finding] = report.find_problems(report.read_run(write_run(tmp_path / "run", **gap)))
    assert finding.causes[0].startswith(cause)


BAND = {  # metric -> what ten healthy runs have in each update, give or take 0.01
    "objective/entropy": 5.0,
    "env/reward_std": 1.0,
    "objective/kl": 0.005,
    "loss/value_avg": 0.5,
    "lr": 0.1,
}


def run_with_band(tmp_path, monkeypatch, **columns):
    """A run folder whose script and recipe have a band. columns: as write_run's. -> Run"""
    band = {}
    for name, x in BAND.items():
        quantiles = {"5": [x - 0.01] * 5, "50": [x] * 5, "95": [x + 0.01] * 5}
        band[name] = {"update": [1, 26, 51, 76, 100]} | quantiles
    bands = {"ppo_sentiment none": {"metrics": band, "args": {"dtype": "float32"}}}
    (tmp_path / "bands.json").write_text(json.dumps(bands))
    monkeypatch.setattr(report, "BANDS", tmp_path / "bands.json")
    usual = {name.replace("/", "__"): lambda x, usual=usual: usual for name, usual in BAND.items()}
    return report.read_run(write_run(tmp_path / "run", **usual | columns))


def first(value, later):
    """A column: value in the first update, then something else."""
    return lambda x: value if x == 0 else later


@pytest.mark.parametrize(
    "columns, causes",
    [
        ({"env__reward_std": first(3.0, 1.0)}, report.REWARD_INPUT),
        # Responses come before rewards, and rewards before the loss.
        ({"env__reward_std": first(3.0, 1.0), "objective__entropy": first(6.0, 5.0)}, report.SAMPLING),
        ({"loss__value_avg": first(0.3, 0.5)}, report.SMALL_RETURNS),
        ({"loss__value_avg": first(0.7, 0.5)}, report.LARGE_RETURNS),
        ({"lr": first(0.3, 0.1)}, report.SCHEDULE),
    ],
)
def test_the_first_update_says_where_to_look(tmp_path, monkeypatch, columns, causes):
    """A run whose score does not rise, and that differs from healthy runs before any step."""
    run = run_with_band(tmp_path, monkeypatch, **columns, objective__scores=lambda x: 0.0)
    found = report.find_problems(run)
    assert [finding.title for finding in found] == [
        "The first update is not like that of healthy runs",
        "The score does not rise",
    ]
    assert found[0].causes == causes


def test_a_first_update_that_differs_is_no_fault_by_itself(tmp_path, monkeypatch):
    run = run_with_band(tmp_path, monkeypatch, env__reward_std=first(3.0, 1.0))
    assert report.different_at_first(run) == [("env/reward_std", True)]
    assert report.find_problems(run) == []


def test_a_first_update_within_chance_does_not_differ(tmp_path, monkeypatch):
    run = run_with_band(tmp_path, monkeypatch, env__reward_std=first(1.035, 1.0))
    assert report.different_at_first(run) == []  # 1.25 widths above


def test_the_loss_of_the_first_update_has_a_smaller_margin(tmp_path, monkeypatch):
    run = run_with_band(tmp_path, monkeypatch, loss__value_avg=first(0.535, 0.5))
    assert report.different_at_first(run) == [("loss/value_avg", True)]  # 1.25 widths above


@pytest.mark.parametrize(
    "columns, metric, update, causes",
    [
        ({"loss__value_avg": lambda x: 0.5 + x}, "loss/value_avg", 26, report.LATER_CRITIC),
        ({"loss__value_avg": lambda x: 0.5 - x}, "loss/value_avg", 26, report.LATER_CRITIC),
        # The one that leaves first counts, not the one that is listed first.
        (
            {"objective__kl": lambda x: 1.0 if x > 0.4 else 0.0, "loss__value_avg": lambda x: 0.5 + x},
            "loss/value_avg",
            26,
            report.LATER_CRITIC,
        ),
        ({"objective__kl": lambda x: 0.5 if x > 0.4 else 0.0}, "objective/kl", 51, report.HIGH_KL),
        # One point outside is chance.
        (
            {"lr": lambda x: 0.3 if 0.2 < x < 0.3 else 0.1, "loss__value_avg": lambda x: 0.5 + 2 * (x > 0.4)},
            "loss/value_avg",
            51,
            report.LATER_CRITIC,
        ),
    ],
)
def test_the_metric_that_leaves_the_band_first_is_named(
    tmp_path, monkeypatch, columns, metric, update, causes
):
    run = run_with_band(tmp_path, monkeypatch, **columns)
    found = {finding.entry: finding for finding in report.find_problems(run)}
    finding = found["outside-the-band"]
    assert f"{metric} was the first to be" in finding.evidence
    assert f"at update {update}." in finding.evidence
    assert finding.causes[: len(causes)] == causes


def test_a_batch_that_differs_at_first_and_later_is_not_said_to_leave(tmp_path, monkeypatch):
    run = run_with_band(tmp_path, monkeypatch, env__reward_std=lambda x: 3.0)
    found = report.find_problems(run)
    assert [finding.entry for finding in found] == ["first-update", "outside-the-band"]
    assert found[1].evidence.endswith("The first update differed already: see that finding.")


def test_all_metrics_with_causes_are_logged():
    """A misspelled metric would never be looked at."""
    bands = json.loads((ROOT / "results/reference_bands.json").read_text()).values()
    logged = {metric for band in bands for metric in band["metrics"]}
    tables = report.FIRST_UPDATE + report.LATER_UPDATES
    assert {metric for metric, *_ in tables} <= logged
    assert all(lower and higher for _, lower, higher in tables)


@pytest.mark.parametrize("after, share, is_found", [(0.7, 0.25, False), (0.5, 0.25, True), (0.7, 0.45, True)])
def test_a_word_that_a_judge_approves_may_spread(tmp_path, after, share, is_found):
    """after: what the judge approves, 0.5 before. A word in nearly half of the texts is too much."""
    folder = write_run(tmp_path / "run")
    evaluation = {
        "n": 200,
        "before": {"win rate": 0.5},
        "after": {"win rate": after},
        "commonest new word": {"metric": 'commonest new word: "upset"', "before": 0.05, "after": share},
    }
    (folder / "evaluation.json").write_text(json.dumps(evaluation))
    found = [finding.title for finding in report.find_problems(report.read_run(folder))]
    assert ("The responses become alike" in found) == is_found


def test_unusual_flags_come_first_if_something_is_wrong(tmp_path, monkeypatch):
    usual = {"learning_rate": 1e-4, "kl_coef": 0.2, "gamma": 1.0, "optimizer": "Adam", "seed": 1}
    bands = {"ppo_sentiment none": {"metrics": {"x": {}}, "args": usual}}
    (tmp_path / "bands.json").write_text(json.dumps(bands))
    monkeypatch.setattr(report, "BANDS", tmp_path / "bands.json")
    flags = {"learning_rate": 1e-2, "kl_coef": 0.25, "gamma": 0.9, "optimizer": "SGD", "seed": 2}
    healthy = report.read_run(write_run(tmp_path / "healthy", flags))
    assert report.find_problems(healthy) == []
    failed = report.read_run(write_run(tmp_path / "failed", flags, objective__scores=lambda x: -x))
    first, second = report.find_problems(failed)
    assert first.entry == "flags" and second.title == "The score falls"
    assert first.causes == [
        "--gamma is 0.9, healthy runs: 1.0 (1.11 times less)",
        "--learning-rate is 0.01, healthy runs: 0.0001 (100 times more)",
        "--optimizer is SGD, healthy runs: Adam",
    ]


@pytest.mark.parametrize("case", CASES)
def test_each_finding(tmp_path, case):
    columns, args, title = CASES[case]
    run = report.read_run(write_run(tmp_path / "run", args, **columns))
    found = [finding.title for finding in report.find_problems(run)]
    if title is None:
        assert found == []
    else:
        assert len(found) == 1 and found[0].startswith(title)


@pytest.mark.parametrize(
    "value, rate, is_found",
    [(2.5, 0.1, False), (3.6, 0.1, False), (6.0, 0.1, True), (-1.0, 0.1, True), (6.0, 0.2, False)],
)
def test_distance_from_the_band(tmp_path, monkeypatch, value, rate, is_found):
    """The band of this metric is from 2 to 3. Other flags than those of the healthy runs: no comparison."""
    band = {"update": [1, 50, 100], "5": [2.0] * 3, "50": [2.5] * 3, "95": [3.0] * 3}
    flags = {"recipe": "none", "learning_rate": 0.1, "seed": 1}
    bands = {"ppo_sentiment none": {"seeds": 10, "args": flags, "metrics": {"objective/entropy": band}}}
    (tmp_path / "bands.json").write_text(json.dumps(bands))
    monkeypatch.setattr(report, "BANDS", tmp_path / "bands.json")
    args = {"learning_rate": rate, "seed": 2}
    run = report.read_run(write_run(tmp_path / "run", args, objective__entropy=lambda x: value))
    found = report.find_problems(run)
    assert [finding.entry for finding in found] == ["first-update", "outside-the-band"] * is_found
    if is_found:
        evidence = f"objective/entropy is {value:.3g} at update 100 (90 % of healthy runs: 2 to 3)"
        assert evidence in found[1].evidence


def test_healthy_runs_excuse_what_a_limit_would_not(tmp_path, monkeypatch):
    """A flat score is a finding, unless the score of healthy runs with the same flags is as flat."""
    flat = dict(objective__scores=lambda x: 0.1 * (-1) ** round(99 * x))
    folder = write_run(tmp_path / "run", **flat)
    assert [finding.title for finding in report.find_problems(report.read_run(folder))] == [
        "The score does not rise"
    ]
    band = {"update": [1, 50, 100], "5": [-0.2] * 3, "50": [0.0] * 3, "95": [0.2] * 3}
    bands = {"ppo_sentiment none": {"args": {"recipe": "none"}, "metrics": {"objective/scores": band}}}
    (tmp_path / "bands.json").write_text(json.dumps(bands))
    monkeypatch.setattr(report, "BANDS", tmp_path / "bands.json")
    assert report.find_problems(report.read_run(folder)) == []


def test_no_run(tmp_path):
    with pytest.raises(SystemExit, match="no metrics.jsonl"):
        report.main([str(tmp_path)])


@pytest.mark.parametrize(
    "missing", ["policy/clipfrac_avg", "objective/kl_coef", "objective/scores", "env/reward_std"]
)
def test_metrics_may_be_missing(tmp_path, missing):
    """A run of another version: no check needs a metric that it did not ask for."""
    columns = dict(
        objective__kl=lambda x: 20 * x, objective__kl_coef=lambda x: 0.1, val__ratio_var=lambda x: 3.0
    )
    columns |= dict(policy__clipfrac_avg=lambda x: 0.5)
    folder = write_run(tmp_path / "run", {"kl_target": 4.0}, **columns)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [{name: x for name, x in row.items() if name != missing or row["update"] == 3} for row in rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "The steps are too large" in [
        finding.title for finding in report.find_problems(report.read_run(folder))
    ]


def test_few_updates_are_not_called_healthy(tmp_path, capsys):
    folder = write_run(tmp_path / "run")
    (folder / "metrics.jsonl").write_text('{"update": 1, "objective/scores": 0.5}\n')
    report.main([str(folder), "--diagnose"])
    assert "too few updates to judge (1)" in capsys.readouterr().out


def test_a_damaged_file_is_named(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "metrics.jsonl").write_text('{"update": \n{"update": 2}\n')
    with pytest.raises(SystemExit, match="metrics.jsonl is damaged"):
        report.read_run(folder)


def test_diagnose_prints_findings(capsys):
    report.main([str(ROOT / "results/rloo-weak-reward"), "--diagnose"])
    out = capsys.readouterr().out
    assert "1 findings" in out and "1. the reward model is too weak" in out
    report.main([str(ROOT / "results/rloo-tiny/seed1"), "--diagnose"])
    assert "nothing looks wrong" in capsys.readouterr().out


# ---- The page ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_page(tmp_path_factory):
    """A page of two runs, one of them with tokens and with texts that look like HTML. -> path of the page"""
    pytest.importorskip("bokeh")
    root = tmp_path_factory.mktemp("report")
    run = write_run(root / "one", {"kl_target": 4.0}, objective__kl=lambda x: 4 * x)
    for update in (1, 100):
        line = {
            "update": update,
            "prompt": "Is <b> bold?",
            "tokens": [" yes", "</script>", "<i>"],
            "score": 2.5,
        }
        line |= {
            "reward": [0.1, -0.2, 2.0],
            "ratio": [1.0, 1.5, update / 100],
            "advantage": [1.0, None, -1.0],
        }
        with open(run / "tokens.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
    pairs = []
    for i in range(12):
        pairs.append(
            {"prompt": f"prompt {i}", "before": "dull", "score": i, "after": "superb", "score after": 11 - i}
        )
    (run / "evaluation_samples.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    samples = [
        {"update": update, "prompt": "a <p>", "response": f"<u>{update}", "score": 1.0}
        for update in (50, 100)
    ]
    (run / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    other = write_run(root / "two", objective__scores=lambda x: -x)
    report.main([str(run), str(other), "--output", str(root / "page.html")])
    return root / "page.html"


def test_the_page_needs_no_network(small_page):
    text = small_page.read_text()
    assert not re.search(r"<(script|link|img)\b[^>]*(src|href)=.?(https?:)?//", text)
    assert small_page.stat().st_size < report.MAX_BYTES


def test_a_default_run_fits(tmp_path):
    """The largest committed run, with 512 pairs."""
    report.main([str(ROOT / "results/ppo-sentiment-tiny/seed1"), "--output", str(tmp_path / "page.html")])
    assert (tmp_path / "page.html").stat().st_size < report.MAX_BYTES


def test_a_page_of_a_reward_model(tmp_path):
    """Its evaluation has no before and after. Sections of rollouts are left out."""
    pytest.importorskip("bokeh")
    run = write_run(tmp_path / "run", loss=lambda x: 1 - x)
    evaluation = {
        "accuracy": 0.875,
        "n": 8,
        "labels": ["dull", "superb"],
        "confusion": [[3, 0], [1, 4]],
        "calibration": [{"score difference": "0 to 1", "pairs": 8, "expected": 0.71234}],
    }
    (run / "evaluation.json").write_text(json.dumps(evaluation))
    tables = report.evaluation_tables(report.read_run(run))
    assert [rows for _, _, rows in tables] == [
        [("accuracy", 0.875), ("n", 8)],
        [["dull", 3, 0], ["superb", 1, 4]],
        [["0 to 1", 8, 0.71234]],
    ]
    report.main([str(run), "--output", str(tmp_path / "page.html")])
    text = (tmp_path / "page.html").read_text()
    for cell in ("accuracy", ">0.875", "superb", ">4", "0 to 1", ">0.7123"):
        assert cell in text
    assert 'id="tokens"' not in text and 'id="time"' not in text


@pytest.mark.parametrize(
    "values, limits",
    [
        ([1.0] * 100, None),
        ([float(i) for i in range(100)], None),
        ([i / 100 for i in range(100)] + [50.0], (-0.46, 1.46)),
        ([-50.0] + [i / 100 for i in range(100)], (-0.48, 1.46)),
        ([1.0, 50.0] * 10, None),
    ],
)
def test_single_outliers_do_not_flatten_a_chart(values, limits):
    result = report.without_outliers(values)
    assert result == (None if limits is None else pytest.approx(limits, abs=0.05))


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium, driven by selenium. Skips if there is none."""
    webdriver = pytest.importorskip("selenium.webdriver")
    from selenium.webdriver.chrome.service import Service

    programs = [shutil.which("chromium"), shutil.which("chromedriver")]
    if None in programs:
        pytest.skip("no chromium and chromedriver on the PATH")
    options = webdriver.ChromeOptions()
    options.binary_location = programs[0]
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(programs[1]))
    yield driver
    driver.quit()


@pytest.fixture(params=[(1200, 900), (390, 844)], ids=["desktop", "phone"])
def opened(browser, small_page, request):
    """The page, opened from the file system at the width of a desktop or a phone."""
    width, height = request.param
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 700}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(f"file://{small_page}")
    return browser


def texts(driver, selector):
    return [element.text for element in driver.find_elements("css selector", selector)]


def test_in_a_browser(opened):
    """No error, no horizontal scrolling, curves of both runs, and findings of the one that fails."""
    errors = [entry for entry in opened.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
    assert errors == []
    assert opened.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    loaded = opened.execute_script(
        "return performance.getEntriesByType('resource').map((entry) => entry.name)"
    )
    assert [name for name in loaded if not name.startswith(("file:", "data:", "blob:"))] == []
    assert any("The score falls" in text for text in texts(opened, ".finding"))
    assert len(opened.find_elements("css selector", ".bk-Figure")) >= 4


def test_tokens_in_a_browser(opened):
    """Texts are shown as they are. Pointing at a token shows its numbers; the switches change colors."""
    from selenium.webdriver import ActionChains
    from selenium.webdriver.support.ui import Select

    tokens = opened.find_elements("css selector", ".token")
    assert [token.get_attribute("textContent") for token in tokens] == [" yes", "</script>", "<i>"]
    opened.execute_script("arguments[0].scrollIntoView({block: 'center'})", tokens[1])
    ActionChains(opened).move_to_element(tokens[1]).perform()
    tip = opened.find_element("id", "tip")
    assert tip.is_displayed()
    assert re.findall(r"^(\w+) +(\S+)$", tip.text, re.M) == [
        ("reward", "-0.2"),
        ("ratio", "1.5"),
        ("advantage", "-"),
    ]

    def colors():
        return [
            token.value_of_css_property("background-color")
            for token in opened.find_elements("css selector", ".token")
        ]

    by_reward = colors()
    update, column = [Select(element) for element in opened.find_elements("css selector", ".tokens select")]
    assert column.first_selected_option.text == "reward"
    assert "31, 119, 180" in by_reward[2] and "214, 39, 40" in by_reward[1]
    column.select_by_visible_text("ratio")
    assert "214, 39, 40" in colors()[2]  # 0.01 in update 1
    update.select_by_visible_text("100")
    assert "214, 39, 40" not in colors()[2]


def test_pairs_in_a_browser(opened):
    """Eight pairs first, then all; sorted by gain, the largest comes first."""
    from selenium.webdriver.support.ui import Select

    assert len(texts(opened, ".pair")) == 8
    Select(opened.find_element("css selector", ".pairs select")).select_by_visible_text("largest gain")
    assert texts(opened, ".pair")[0].startswith("prompt 0\n")
    button = opened.find_element("css selector", ".pairs button")
    opened.execute_script("arguments[0].click()", button)
    assert texts(opened, ".pair")[-1].startswith("prompt 11\n")
