"""Show what a run did, on one HTML page: findings, answers before and after, curves, numbers of each token.

    python report.py runs/ppo_sentiment/tiny-s1-20260101-120000    # writes report.html into that folder
    python report.py RUN1 RUN2 --output compare.html               # several runs, their curves overlaid
    python report.py RUN --diagnose                                # only the findings, on the screen
    python report.py RUN --unipo run.json                          # for UNIPO, which explains token losses

A run is a folder that one of the scripts wrote. The page is one file that needs no network. If
results/reference_bands.json knows the recipe, a gray band behind the curves shows healthy runs with other
seeds.
"""

import argparse
import gzip
import json
import math
import os
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import correlation, mean, median, stdev

ROOT = Path(__file__).resolve().parent
BANDS = ROOT / "results/reference_bands.json"
MAX_POINTS = 300  # per curve, so that the page stays small
MAX_PAIRS = 600  # answers before and after, per run
MAX_TOKEN_LINES = 48  # responses in the token microscope, per run
MAX_BYTES = 2_000_000

# What the charts show, in this order: group -> metric -> (title with unit, what to look for).
METRICS = {
    "Does it learn?": {
        "objective/scores": (
            "score per response",
            "What the policy is trained to raise, after clipping and penalties. It rises and levels off.",
        ),
        "judge/scores": (
            "gold score",
            "A second opinion that the policy is not trained on. If it falls while the score rises, "
            "the policy exploits the reward.",
        ),
        "objective/kl": (
            "KL to the reference, nats per response",
            "How far the policy is from where it began. 0 at first, never clearly negative, near its target "
            "if it has one.",
        ),
        "objective/kl_coef": (
            "KL coefficient",
            "With a target, it rises while the KL is above it, and falls while the KL is below.",
        ),
        "policy/entropy_avg": (
            "entropy, nats per token",
            "How undecided the policy is. Near 0, all responses are alike.",
        ),
        "frac_reward_zero_std": (
            "groups with equal rewards, fraction",
            "These prompts teach nothing: all their responses are equally good.",
        ),
        "loss": ("loss, nats per token or pair", "It should fall, and level off."),
        "accuracy": ("accuracy on the batch", ""),
        "mean_token_accuracy": ("accuracy of the next token", ""),
    },
    "How large are the steps?": {
        "val/ratio": (
            "probability ratio, new / old",
            "Near 1. The mean of a few large ratios can hide many small ones: see its variance.",
        ),
        "val/ratio_var": ("variance of the ratio", "Large values: the policy moves too far in one update."),
        "policy/approxkl_avg": (
            "approximate KL, nats per token",
            "Between the new and the old policy of one update.",
        ),
        "policy/clipfrac_avg": (
            "tokens or responses clipped, fraction",
            "0 if the policy does not move at all. Above 0.3, most of the update is thrown away.",
        ),
        "loss/policy_avg": ("policy loss", "Near 0, because advantages are. Its size says little."),
        "loss/value_avg": (
            "value loss",
            "The critic's error. It should fall at first. It rises again when scores spread.",
        ),
        "val/clipfrac_avg": ("values clipped, fraction", ""),
        "grad_norm": ("gradient norm before clipping", "Single peaks are harmless, a steady rise is not."),
        "lr": ("learning rate", ""),
    },
    "What do the responses look like?": {
        "completions/mean_length": (
            "tokens per response",
            "A steady rise may mean that the reward pays for length.",
        ),
        "completions/clipped_ratio": ("responses without a stop token, fraction", ""),
        "val/num_eos_tokens": ("responses with a stop token, per batch", ""),
        "completions/distinct_2": (
            "different word pairs, fraction",
            "If it falls, responses repeat each other.",
        ),
        "completions/new_word_share": (
            "responses with the commonest new word, fraction",
            "A word that spreads is the most visible sign of an exploited reward.",
        ),
        "env/reward_std": ("standard deviation of the reward", "0: there is nothing to learn from."),
    },
    "Do rollout and update agree?": {
        "sampling/logprob_gap_mean": (
            "log-probability gap, mean, nats per token",
            "How far the log-probabilities of rollout and update differ: about 1e-6 in fp32, 0.01 in bf16. "
            "If it is larger, the two compute different distributions.",
        ),
        "sampling/logprob_gap_max": ("log-probability gap, largest, nats per token", ""),
    },
    "How fast is it?": {
        "perf/seconds": ("seconds per update", ""),
        "perf/tokens_per_second": ("tokens generated per second", ""),
        "perf/peak_memory_mb": ("peak memory, MB", ""),
    },
}


# ---- Reading runs ------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What a run folder holds."""

    folder: Path
    name: str
    script: str  # "ppo_sentiment"
    args: dict
    about: dict  # args.json
    metrics: list  # of dict, one per update
    evaluation: dict
    pairs: list  # of dict: prompt, before, score, after, score after
    samples: list  # of dict: update and texts
    tokens: list  # of dict: update, prompt, tokens, and one list of numbers per column
    band: dict = field(default_factory=dict)  # metric -> update, 5, 50, 95: lists, of healthy runs
    band_args: dict = field(default_factory=dict)  # the flags of these runs

    def values(self, metric):
        """The values of a metric over the updates. -> list of float, without those that are not finite"""
        values = [row.get(metric) for row in self.metrics]
        return [x for x in values if isinstance(x, (int, float)) and math.isfinite(x)]

    def target(self, metric):
        """The value that a flag asks for, if there is one."""
        if metric == "objective/kl":
            return self.args.get("kl_target")
        return None


def read_lines(folder, name):
    """The rows of a file of JSON lines, perhaps compressed; [] if there is none. Skips a torn last line."""
    for path, opener in ((folder / name, open), (folder / f"{name}.gz", gzip.open)):
        if path.exists():
            with opener(path, "rt") as file:
                lines = [line for line in file if line.endswith("\n")]
            return [parse(path, line) for line in lines]
    return []


def read_json(folder, name):
    path = folder / name
    return parse(path, path.read_text()) if path.exists() else {}


def parse(path, text):
    try:
        return json.loads(text)
    except ValueError as error:
        raise SystemExit(f"{path} is damaged: {error}") from error


def read_run(folder):
    """A run folder -> Run. Exits with one line if it is none."""
    folder = Path(folder).resolve()
    metrics = read_lines(folder, "metrics.jsonl")
    if not metrics:
        raise SystemExit(f"{folder}: no metrics.jsonl. A run is a folder that one of the scripts wrote")
    about = read_json(folder, "args.json")
    command = about.get("command") or ["run"]
    args = about.get("args", {})
    run = Run(
        folder=folder,
        name=f"{folder.parent.name}/{folder.name}",
        script=Path(command[0]).stem,
        args=args,
        about=about,
        metrics=metrics,
        evaluation=read_json(folder, "evaluation.json"),
        pairs=to_pairs(read_lines(folder, "evaluation_samples.jsonl")),
        samples=read_lines(folder, "samples.jsonl"),
        tokens=read_lines(folder, "tokens.jsonl"),
    )
    bands = json.loads(BANDS.read_text()) if BANDS.exists() else {}
    band = bands.get(f"{run.script} {args.get('recipe')}", {})
    run.band = band.get("metrics", {})
    run.band_args = band.get("args", {})
    return run


def to_pairs(rows):
    """Rows of evaluation_samples.jsonl of any script -> dicts: prompt, before, score, after, score after"""
    pairs = []
    for row in rows:
        if isinstance(row.get("before"), dict):  # grpo_math.py: several responses per task
            reward = next((name for name in row["before"] if name.startswith("rewards/")), "right")
            for k in range(len(row["before"]["responses"])):
                pairs.append({
                    "prompt": row["task"],
                    "before": row["before"]["responses"][k],
                    "score": number(row["before"][reward][k]),
                    "after": row["after"]["responses"][k],
                    "score after": number(row["after"][reward][k]),
                })  # fmt: skip
        elif "before" in row:
            pairs.append({
                "prompt": row.get("prompt") or row.get("last") or "",
                "before": row["before"],
                "score": number(row.get("score")),
                "after": row["after"],
                "score after": number(row.get("score after")),
            })  # fmt: skip
    return pairs


def number(x):
    """A float, or None for what is none: missing or not finite."""
    return float(x) if isinstance(x, (int, float)) and math.isfinite(x) else None


# ---- Findings ----------------------------------------------------------------------------------------------
#
# The limits are round numbers, chosen on the runs in results/. The metrics of the 60 healthy runs of the
# defaults, each compared with the band of the other nine, give no finding (tests/documents/test_gallery.py),
# nor do the 20 healthy runs in results/diagnose, with their samples and tokens. All of them are tiny models
# in fp32. This does not say how often the findings err on other jobs.


@dataclass
class Finding:
    """Something that looks wrong."""

    title: str
    evidence: str
    causes: list  # the likeliest first
    entry: str  # of docs/debugging.md


def part_mean(values, start, end):
    """Mean of a part of a list, by fractions of its length. At least one value."""
    first = min(int(start * len(values)), len(values) - 1)
    last = max(first + 1, math.ceil(end * len(values)))
    return mean(values[first:last])


def early_and_late(run, metric):
    """Means over the first 5 % and the last 20 % of a run. -> two floats, or None, None"""
    values = run.values(metric)
    if not values:
        return None, None
    return part_mean(values, 0, 0.05), part_mean(values, 0.8, 1)


def find_problems(run):
    """What looks wrong in a run, the most direct evidence first. -> list of Finding"""
    checks = [
        # Evidence for one fault: numbers that contradict each other.
        check_numbers,
        check_masks,
        check_sampling,
        check_surprise,
        check_token_rewards,
        check_token_advantages,
        check_same_responses,
        check_group_advantages,
        check_same_scores,
        check_last_tokens,
        check_values,
        check_schedule,
        check_shaped_scores,
        check_kl_is_zero,
        check_kl_sign,
        check_first_kl,
        check_endings,
        check_prompts,
        check_same_prompts,
        check_gradient,
        check_no_step,
        check_same_answers,
        check_direction,
        check_score_falls,
        check_first_update,
        check_rewards_differ,
        check_judge,
        check_held_out,
        check_gold_score,
        check_coefficient,
        check_step_size,
        check_band,
        # Consequences: many faults lead to them.
        check_score,
        check_gain,
        check_words,
        check_kl_target,
        check_entropy,
        check_lengths,
        check_critic,
        check_loss,
        check_loss_gain,
    ]
    found = []
    for check in checks:
        finding = check(run)
        if finding is not None:
            found.append(finding)
    if [finding.entry for finding in found] == ["first-update"]:
        metrics = [metric for metric, _ in different_at_first(run)]
        if all(distance_from_band(run, metric) < 2 for metric in metrics):
            return []  # one update may differ by chance, if nothing looks wrong later
    other_flags = unusual_flags(run)
    if found and other_flags:  # a run that fails with other flags fails, most likely, because of them
        found.insert(0, finding_of_flags(other_flags))
    return found


def unusual_flags(run):
    """Flags that differ from those of the healthy runs, numbers by a clear factor. -> list of str"""
    if not run.band:
        return []
    unusual = []
    for name in sorted(set(run.args) & set(run.band_args) - MAY_DIFFER):
        value, usual = run.args[name], run.band_args[name]
        if value == usual:
            continue
        shown = f"--{name.replace('_', '-')} is {value}, healthy runs: {usual}"
        if number(value) and number(usual) and value * usual > 0 and not isinstance(value, bool):
            factor = max(value / usual, usual / value)
            near_one = name in NEAR_ONE and abs(value - usual) > 0.02
            if factor < 1.5 and not near_one:
                continue
            shown += f" ({factor:.3g} times {'more' if value > usual else 'less'})"
        unusual.append(shown)
    return unusual


NEAR_ONE = {"temperature", "gamma", "lam"}  # usually 1 or a little less, where small changes count


def finding_of_flags(other_flags):
    return Finding(
        "Flags differ from those of healthy runs",
        "Something else looks wrong too (below). Check these flags first.",
        other_flags[:3],
        "flags",
    )


def check_numbers(run):
    bad = Counter()
    for row in run.metrics:
        bad.update(metric for metric, x in row.items() if isinstance(x, float) and not math.isfinite(x))
    if not bad:
        return None
    counts = ", ".join(f"{metric} in {count}" for metric, count in bad.most_common(4))
    return Finding(
        "Some numbers are not finite",
        f"Of {len(run.metrics)} updates: {counts}.",
        [
            "the learning rate is too high",
            "a product overflows: use --dtype float32, and look for logarithms of 0",
            "a reward function returns nan",
        ],
        "not-finite",
    )


def check_sampling(run):
    gaps = run.values("sampling/logprob_gap_mean")
    if not gaps:
        return None
    limit = 0.1 if rounds_more(run) else 0.001
    if max(gaps) <= limit:
        return None
    evidence = (
        f"Log-probabilities of the sampled tokens differ by up to {max(gaps):.3g} nats per token between the "
        f"two (mean of a batch). Above {limit:g} it is more than rounding."
    )
    causes = [
        "sampling and scoring use another temperature, or only one of them uses top-k or forbids tokens",
        "positions, padding or the attention mask differ, or the cache holds wrong keys",
        "dropout is on in one of them",
    ]
    ratio, _ = surprise(run)
    if ratio is not None and ratio > 1.1:
        causes = [*causes[1:], causes[0]]  # sharper sampling would make the ratio smaller than 1
    if gaps[0] > 1:
        causes.insert(
            0, "other rows or tokens are scored than were sampled: rows in another order, or off by one"
        )
    elif gaps[0] <= limit:
        evidence += " In the first update there is no difference."
        causes.insert(
            0, "the weights used for generation are not those that are trained: they are older copies"
        )
    return Finding(
        "Rollout and update compute different distributions", evidence, causes, "rollout-and-update-disagree"
    )


def surprise(run):
    """Mean of -log p of the sampled tokens / entropy of the distributions that are scored. -> ratio, error

    Entropy is the mean of -log p of tokens that are sampled from the distribution. So the ratio is 1, up to
    chance, and up to the steps of an update: the entropy is a mean over its forward passes. error: its
    standard error. None, None without the metrics, or if the policy is too certain to tell.
    """
    ratios = []
    total = 0.0  # nats of all responses
    for row in run.metrics:
        sampled, entropy = number(row.get("objective/entropy")), number(row.get("policy/entropy_avg"))
        length = number(row.get("completions/mean_length"))
        if None not in (sampled, entropy, length) and entropy * length > 0.05:
            ratios.append(sampled / (entropy * length))
            num_responses = row.get("episode", row["update"]) / row["update"]
            total += entropy * length * num_responses
    if len(ratios) < 10 or total < 100:
        return None, None
    return mean(ratios), stdev(ratios) / len(ratios) ** 0.5


def check_surprise(run):
    ratio, error = surprise(run)
    if ratio is None or abs(ratio - 1) < max(0.05, 3.5 * error):
        return None
    if check_sampling(run) is not None or check_step_size(run) is not None:
        return None  # it says the same; or the entropy changes during each update
    causes = [
        "padding is counted: tokens after the end of a response",
        "tokens are sampled in another way: wrong random numbers, other weights, another prompt or position",
    ]
    if ratio < 1:
        causes = [
            "sampling prefers likely tokens: top-k, top-p, greedy, a lower temperature, wrong random numbers",
            "the temperature does not reach the log-probabilities",
        ]
    return Finding(
        "The sampled tokens are not from the distribution that is scored",
        f"In the mean, -log p of the sampled tokens is {ratio:.2f} times the entropy. Both should be equal, "
        "up to what the steps of an update change.",
        causes,
        "rollout-and-update-disagree",
    )


def rounds_more(run):
    """True if products may be in bf16 or weights in 8 bits. The dtype "auto" depends on the machine."""
    may_use_bf16 = run.args.get("dtype") != "float32" or bool(run.args.get("bf16"))
    return may_use_bf16 or bool(run.args.get("load_in_8bit"))


def check_kl_sign(run):
    """By chance, the mean of a batch may be negative. The mean of a tenth of the run may not."""
    values = run.values("objective/kl")
    if not values:
        return None
    window = math.ceil(len(values) / 10)
    means = [mean(values[i : i + window]) for i in range(len(values) - window + 1)]
    worst = min(means)
    noise = stdev(values) / window**0.5 if len(values) > 1 else 0.0
    if worst > -max(0.1, 3 * noise):
        return None
    negative = mean(x < 0 for x in values)
    return Finding(
        "The KL is negative",
        f"In the mean of {window} updates it is as low as {worst:.3g} nats per response. It is negative in "
        f"{negative:.0%} of all updates.",
        [
            "the tokens are not sampled from the distribution that is scored: temperature, top-k, top-p",
            "tokens after the end of the response are counted",
            "the penalty has the wrong sign, so the policy learns tokens that are rare under itself",
        ],
        "negative-kl",
    )


def check_first_kl(run):
    if run.args.get("load_in_8bit") and not run.args.get("lora_r"):
        return None  # only the reference has 8-bit weights, so it differs from the policy
    first = [number(row.get("objective/kl")) for row in run.metrics if row.get("update") == 1]
    limit = 0.2 if rounds_more(run) else 0.01
    if not first or first[0] is None or abs(first[0]) < limit:
        return None
    return Finding(
        "The KL is not 0 in the first update",
        f"It is {first[0]:.3g} nats per response, before anything was trained.",
        [
            "the reference is not the initial policy: another checkpoint, or an adapter left on",
            "dropout is on in one of the two",
            "one of them runs in another precision, or with other padding",
        ],
        "kl-not-zero-at-the-start",
    )


def check_gradient(run):
    norms, stds = run.values("grad_norm"), run.values("env/reward_std")
    if not norms or mean(x < 1e-9 for x in norms) < 0.5 or mean(x == 0 for x in stds or [1]) > 0.5:
        return None
    return Finding(
        "There is no gradient",
        f"The norm of the gradient is 0 in {mean(x < 1e-9 for x in norms):.0%} of the updates.",
        [
            "the loss does not depend on the parameters: it is detached, or old and new are one tensor",
            "all advantages are 0",
            "the parameters that are used are frozen",
        ],
        "no-gradient",
    )


def check_schedule(run):
    """The learning rate may only be 0 at the end."""
    rates = run.values("lr")
    if len(rates) < 10 or max(rates) == 0:
        return None
    num_zero = sum(rate < 1e-6 * max(rates) for rate in rates[1:-1])
    if num_zero < 0.1 * len(rates):
        return None
    return Finding(
        "The learning rate is 0 for a part of the run",
        f"In {num_zero} of {len(rates)} updates.",
        [
            "the schedule counts other steps than the training loop: optimizer steps, episodes, processes",
            "the schedule was made for a shorter run",
        ],
        "schedule",
    )


def check_kl_is_zero(run):
    """Sampled tokens have a KL of exactly 0 only under the same model."""
    values = [number(row.get("objective/kl")) for row in run.metrics[1:]]
    values = [abs(x) for x in values if x is not None]
    if len(values) < 5 or mean(x < 1e-6 for x in values) < 0.8:
        return None
    moved = run.values("policy/approxkl_avg")
    if moved and max(moved) < 1e-9 and takes_several_steps(run):
        return None  # the policy does not move: check_step_size
    return Finding(
        "The KL is exactly 0",
        f"In {mean(x < 1e-6 for x in values):.0%} of the updates after the first one.",
        [
            "the reference is the trained policy itself: the same object, or the adapter is left on",
            "the policy that generates does not get the new weights",
            "the optimizer does not hold the parameters of the policy",
        ],
        "kl-is-zero",
    )


def check_rewards_differ(run):
    stds = run.values("env/reward_std")
    equal = run.values("frac_reward_zero_std")
    if stds and mean(x == 0 for x in stds) > 0.5:
        return Finding(
            "In most updates, all rewards are equal",
            f"The standard deviation of the reward is 0 in {mean(x == 0 for x in stds):.0%} of the updates.",
            [
                "the reward function cannot parse the responses: another format, or truncated texts",
                "the task is too hard or too easy for this policy",
                "the reward model is constant: a head that was not trained, or not loaded",
            ],
            "equal-rewards",
        )
    if equal and part_mean(equal, 0, 0.2) > 0.6:
        return Finding(
            "Most groups have equal rewards from the start",
            f"{part_mean(equal, 0, 0.2):.0%} in the first fifth of the run. Their advantages are 0.",
            [
                "the task is too hard or too easy for this policy, or the responses cannot be parsed",
                "the temperature is low, so the responses to a prompt are alike",
                "too few responses per prompt",
            ],
            "groups-without-variance",
        )
    return None


def check_prompts(run):
    """Prompts of samples.jsonl are those of the data, prompts of tokens.jsonl are what the policy read."""
    of_data = [row["prompt"].rstrip() for row in run.samples if isinstance(row.get("prompt"), str)]
    read = [row["prompt"].rstrip() for row in run.tokens if isinstance(row.get("prompt"), str)]
    if len(set(of_data)) < 3 or not read:
        return None
    end = os.path.commonprefix([text[::-1] for text in of_data])[::-1]
    missing = mean(not text.endswith(end) for text in read)
    if len(end.strip()) < 4 or missing < 0.5:
        return None
    return Finding(
        "The policy does not read the end of its prompts",
        f"All prompts of the data end with {end.strip()!r}, but {missing:.0%} of the saved prompts that the "
        "policy read do not.",
        [
            "prompts that are too long lose their end instead of their beginning: the truncation side",
            "the prompts are shortened twice, or padded on the wrong side",
        ],
        "prompts-without-end",
    )


def check_same_prompts(run):
    """tokens.jsonl has the first prompts of a few updates. ppo_sentiment.py cuts them to random lengths."""
    updates = []
    for rows in rows_by_update(run).values():
        updates.append([row["prompt"] for row in rows if isinstance(row.get("prompt"), str)])
    first = updates[0] if updates else []
    if len(updates) < 2 or not first or len(run.metrics) < 10 or run.args.get("num_train_rows") is not None:
        return None
    is_cut = run.script == "ppo_sentiment"
    if is_cut and any(begin_alike(x, y) for i, x in enumerate(first) for y in first[:i]):
        return None  # all texts begin alike
    for prompts in updates[1:]:
        if len(prompts) != len(first):
            return None
        for prompt, first_prompt in zip(prompts, first):
            if not (begin_alike(prompt, first_prompt) if is_cut else prompt == first_prompt):
                return None
    how = "begin like those of the first one" if is_cut else "are the same"
    return Finding(
        "Every update has the same prompts",
        f"The prompts of all {len(updates)} saved updates {how}.",
        ["the same rows of the data are taken in every update", "the data set has very few rows"],
        "same-prompts",
    )


def begin_alike(x, y):
    """True if one text is the beginning of the other."""
    return x.startswith(y) or y.startswith(x)


def check_no_step(run):
    moved = run.values("policy/approxkl_avg")
    if not moved or max(moved) >= 1e-9 or not takes_several_steps(run):
        return None
    return Finding(
        "The policy does not move",
        f"The new policy equals the old one in every update: approximate KL at most {max(moved):.1g}.",
        [
            "no step takes effect: the learning rate is 0, or gradients are zeroed before the step",
            "the policy is frozen, or the optimizer holds another copy: is the reference the same object?",
            "all advantages are 0",
        ],
        "policy-does-not-move",
    )


def check_step_size(run):
    variance = run.values("val/ratio_var")
    clipped = run.values("policy/clipfrac_avg")
    evidence = []
    if variance and mean(variance) > 0.5:
        evidence.append(
            f"The variance of the ratio is {median(variance):.2g} (median), at most {max(variance):.2g}."
        )
    if clipped and mean(clipped) > 0.35:
        evidence.append(
            f"The clipped loss differs from the unclipped one in {mean(clipped):.0%} of the ratios."
        )
    if evidence:
        return Finding(
            "The steps are too large",
            " ".join(evidence),
            [
                "the learning rate is too high, or there are too many epochs per batch",
                "old log-probabilities are of another model, update, temperature, row or token",
                "advantages are not normalized, or min and max are swapped in the clipped loss",
            ],
            "steps-too-large",
        )
    return None


def takes_several_steps(run):
    return run.args.get("num_ppo_epochs", 1) * run.args.get("num_mini_batches", 1) > 1


def score_gain(run):
    """How much the score rose, in standard deviations of the reward at the start. None without scores."""
    early, late = early_and_late(run, "objective/scores")
    spread = run.values("env/reward_std")
    if early is None or not spread:
        return None
    return (late - early) / max(part_mean(spread, 0, 0.1), 1e-8)


def clear_change(run):
    """1 if the score rose by more than two standard errors, -1 if it fell by as much, else 0.

    On held-out prompts if there are any, or else on the batches.
    """
    both = [pair for pair in run.pairs if None not in (pair["score"], pair["score after"])]
    if len(both) > 1:
        gains = [pair["score after"] - pair["score"] for pair in both]
        change, error = mean(gains), stdev(gains) / len(gains) ** 0.5
    else:
        values = run.values("objective/scores")
        last = values[int(0.8 * len(values)) :]
        if len(last) < 2:
            return 0
        early, late = early_and_late(run, "objective/scores")
        num_early = math.ceil(0.05 * len(values))
        change, error = late - early, stdev(last) * (1 / num_early + 1 / len(last)) ** 0.5
    if abs(change) <= 2 * error:
        return 0
    return 1 if change > 0 else -1


def score_in_words(run):
    early, late = early_and_late(run, "objective/scores")
    return (
        f"It was {early:.3g} in the first updates and {late:.3g} in the last fifth of the run "
        f"({score_gain(run):+.2f} standard deviations of the reward)"
    )


def check_score_falls(run):
    gain = score_gain(run)
    if gain is None or gain > -0.15 or len(run.metrics) < 10:
        return None
    if clear_change(run) > -1 or is_in_band(run, "objective/scores"):
        return None
    return Finding(
        "The score falls",
        f"{score_in_words(run)}.",
        [
            "the loss, the advantages or the logarithm of the ratio have the wrong sign",
            "the learning rate is too high: the policy has come apart (look at its entropy and KL)",
            "rewards or advantages reach the wrong responses or tokens: padding, off by one, another order",
        ],
        "score-falls",
    )


def check_score(run):
    gain = score_gain(run)
    if gain is None or gain > 0.15 or len(run.metrics) < 10 or check_score_falls(run) is not None:
        return None
    if clear_change(run) == 1 or is_in_band(run, "objective/scores"):
        return None
    evidence = score_in_words(run)
    _, late_kl = early_and_late(run, "objective/kl")
    causes = [
        "rewards or advantages reach the wrong responses or tokens: padding, off by one, another order",
        "the learning rate is too low, or the run too short",
        "the KL penalty is too strong: the policy stays at its reference",
        "the reward does not depend on what the policy can change",
    ]
    moved = run.values("policy/approxkl_avg")
    if late_kl is not None and late_kl < 0.3 and moved and mean(moved) < 1e-4:
        causes = [causes[1], causes[2], causes[0], causes[3]]
        evidence += f", and the policy hardly left its reference (KL {late_kl:.2g})"
    return Finding("The score does not rise", f"{evidence}.", causes, "score-does-not-rise")


def check_gain(run):
    """With other flags, less than half of what healthy runs gain is a finding.

    The metric is the raw reward, before clipping and penalties. The reward functions must be the same.
    """
    band = run.band.get("env/reward_mean")
    early, late = early_and_late(run, "env/reward_mean")
    if band is None or early is None or len(run.metrics) < 10 or has_flags_of_band(run):
        return None
    if check_score(run) is not None or check_score_falls(run) is not None:
        return None
    if any(word in text for text in unusual_flags(run) for word in REWARD_FLAGS):
        return None
    usual = part_mean(band["50"], 0.8, 1) - band["50"][0]
    if usual <= 0 or late - early > 0.5 * usual:
        return None
    return Finding(
        "The score rises less than with the usual flags",
        f"The raw reward rose by {late - early:.3g}; the median of healthy runs: by {usual:.3g}.",
        ["the KL penalty is too strong", "the learning rate is too low, or the run too short"],
        "score-does-not-rise",
    )


REWARD_FLAGS = ("reward", "weight", "judge", "dataset", "model")  # with them, rewards cannot be compared


def check_judge(run):
    """A judge that the policy is not trained on, before and after."""
    before, after = run.evaluation.get("before") or {}, run.evaluation.get("after") or {}
    gain = score_gain(run)
    if gain is None or gain < 0.15 or run.evaluation.get("n", 0) < 50:
        return None
    if check_gold_score(run) is not None:
        return None  # it says the same, with more evidence
    for name in judge_names(run):
        if after.get(name) is None or after[name] > before[name] - 0.1:  # both are fractions
            continue
        return Finding(
            "The score rises, and the judge disagrees",
            f"{name} fell from {before[name]:.2f} to {after[name]:.2f} on held-out prompts; the score rose "
            f"by {gain:.1f} standard deviations of a batch's rewards.",
            [
                "the reward is another one than was meant: a wrong label, sign, column or order of the texts",
                "the policy has found what the reward model gets wrong",
            ],
            "judge-disagrees",
        )
    return None


def check_same_answers(run):
    if len(run.pairs) < 50 or check_no_step(run) is not None:  # which says the same
        return None
    same = mean(pair["before"] == pair["after"] for pair in run.pairs)
    if same <= 0.95:
        return None
    return Finding(
        "The policy does not change",
        f"{same:.0%} of the held-out responses are the same after training as before.",
        [
            "the steps are too small: the learning rate, the optimizer, or weights that round them away",
            "the policy is frozen, or the optimizer holds another copy of its parameters",
            "all advantages are 0, or no gradient reaches the policy",
        ],
        "policy-does-not-change",
    )


def check_held_out(run):
    """What is learned on the training prompts must show on others."""
    pairs = [pair for pair in run.pairs if None not in (pair["score"], pair["score after"])]
    if len(pairs) < 50 or check_same_answers(run) is not None:  # the same answers have the same scores
        return None
    train_before, train_after = early_and_late(run, "env/reward_mean")
    if train_before is None:
        return None
    gains = [pair["score after"] - pair["score"] for pair in pairs]
    train_gain, held_out_gain = train_after - train_before, mean(gains)
    error = (stdev(gains) ** 2 / len(gains) + stdev(run.values("env/reward_mean")) ** 2 / 10) ** 0.5
    spread = part_mean(run.values("env/reward_std"), 0, 0.1)
    if (
        train_gain < 0.3 * spread
        or held_out_gain > 0.65 * train_gain
        or train_gain - held_out_gain < 3 * error
    ):
        return None
    return Finding(
        "The score rises on the training prompts only",
        f"There it rose by {train_gain:.3g}, on held-out prompts by {held_out_gain:.3g}.",
        [
            "the prompts are few, or always the same ones: the policy learns their answers by heart",
            "training and evaluation differ: another temperature, length, stop token or template",
            "the score is computed in another way while training",
        ],
        "training-prompts-only",
    )


def check_gold_score(run):
    """Compare the end with the best tenth of the run. Noise alone must not look like a fall."""
    values = run.values("judge/scores")
    gain = score_gain(run)
    if len(values) < 10 or gain is None or gain < 0.15:
        return None
    window = math.ceil(len(values) / 10)
    means = [mean(values[i : i + window]) for i in range(len(values) - window + 1)]
    steps = [after - before for before, after in zip(values, values[1:])]
    error = stdev(steps) / 2**0.5 * (2 / window) ** 0.5  # of the difference of two means
    best, late = max(means), means[-1]
    fall = best - late
    # 4 standard errors, because the best one of many means is above the truth
    if fall < 4 * error or fall < 0.3 * (best - means[0]):
        return None
    return Finding(
        "The score rises, and the gold score falls",
        f"The gold score reached {best:.3g} and ended at {late:.3g}, while the score rose.",
        [
            "the reward model is too weak: the policy has found what it gets wrong",
            "the policy is too far from its reference: raise the KL coefficient, or stop earlier",
            "the reward model reads something else than in its training: no prompt, no EOS, another template",
        ],
        "over-optimization",
    )


def check_words(run):
    word = run.evaluation.get("commonest new word", {})
    new_word_shares = run.values("completions/new_word_share") or [0.0]
    share = word.get("after", part_mean(new_word_shares, 0.8, 1))
    share_before = word.get("before", part_mean(new_word_shares, 0, 0.05))
    enough = run.evaluation.get("n", 100) * share >= 10  # responses
    spreads = share > 0.15 and share > 2 * share_before and enough
    if share < 0.4 and judge_gain(run) > 0.1:
        spreads = False  # somebody else likes the responses too
    early, late = distinct_pairs(run)
    repeats = early is not None and late < 0.75 * early and not is_in_band(run, "completions/distinct_2")
    if not (spreads or repeats):
        return None
    evidence = []
    if spreads:
        if word:
            name = re.sub(r'^.*"(.*)"$', r"“\1”", word["metric"])
            text = (
                f"{name} is in {share:.0%} of the held-out responses, before training in {share_before:.0%}."
            )
        else:
            text = f"The commonest new word is in {share:.0%} of a batch, at first in {share_before:.0%}."
        evidence.append(text)
    if repeats:
        evidence.append(f"The fraction of different word pairs fell from {early:.2f} to {late:.2f}.")
    return Finding(
        "The responses become alike",
        " ".join(evidence),
        [
            "the policy exploits the reward: certain words raise it whatever the response says",
            "the KL penalty is too weak, or missing",
            "the learning rate is too high",
        ],
        "reward-hacking",
    )


def judge_gain(run):
    """By how much the fraction that a judge approves rose on held-out prompts; 0 without a judge."""
    before, after = run.evaluation.get("before") or {}, run.evaluation.get("after") or {}
    gains = [after[name] - before[name] for name in judge_names(run) if after.get(name) is not None]
    return min(gains, default=0.0)


def judge_names(run):
    """The metrics of evaluation.json that come from a judge: fractions."""
    return [
        name for name in run.evaluation.get("before") or {} if name.startswith("judge") or name == "win rate"
    ]


def distinct_pairs(run):
    """The fraction of different word pairs before and after, on held-out prompts if possible. -> two floats

    Arithmetic has few words, so there it says nothing.
    """
    if run.script == "grpo_math":
        return None, None
    before, after = run.evaluation.get("before") or {}, run.evaluation.get("after") or {}
    for name in ("distinct bigrams", "distinct2"):
        if name in before and name in after:
            return before[name], after[name]
    return early_and_late(run, "completions/distinct_2")


def check_shaped_scores(run):
    """Without clipping, the score is the reward minus the penalty of the responses that did not end."""
    penalty = run.args.get("missing_eos_penalty") or 0.0
    wrong = []
    for row in run.metrics:
        score, reward = number(row.get("objective/scores")), number(row.get("env/reward_mean"))
        not_ended = number(row.get("completions/clipped_ratio"))
        if None not in (score, reward, not_ended):
            expected = reward - penalty * not_ended
            wrong.append(abs(score - expected) > 0.001 + 0.001 * abs(expected))
    if not run.args or run.args.get("score_clip") is not None or not wrong or mean(wrong) < 0.1:
        return None
    text = "reward - missing_eos_penalty * responses without an end" if penalty else "reward"
    return Finding(
        "The score is not what the flags make of the reward",
        f"In {mean(wrong):.0%} of the updates, the mean score is not the mean of {text}.",
        [
            "the penalty for a missing end has the wrong sign, or hits other responses",
            "scores are clipped or scaled, though no flag says so",
        ],
        "shaped-score",
    )


def check_coefficient(run):
    target = run.target("objective/kl")
    rows = [row for row in run.metrics if {"objective/kl", "objective/kl_coef"} <= row.keys()]
    if not target or len(rows) < 10:
        return None
    against = []  # for each update with a clear error: does the coefficient move against it?
    other_steps = []  # is its step another one than that of the controller?
    for row, next_row in zip(rows, rows[1:]):
        error = row["objective/kl"] / target - 1
        step = next_row["objective/kl_coef"] - row["objective/kl_coef"]
        if abs(error) > 0.05 and step != 0:
            against.append(error * step < 0)
        if run.args.get("kl_horizon") and "episode" in row and "episode" in next_row:
            episodes = next_row["episode"] - row["episode"]
            relative_step = min(max(error, -0.2), 0.2) * episodes / run.args["kl_horizon"]
            expected = row["objective/kl_coef"] * relative_step
            other_steps.append(abs(step - expected) > 0.05 * abs(expected) + 1e-5 * row["objective/kl_coef"])
    if not against or mean(against) < 0.5:
        if not other_steps or mean(other_steps) < 0.5:
            return None
        return Finding(
            "The KL coefficient does not take the steps of its controller",
            f"In {mean(other_steps):.0%} of the updates, its relative change is not "
            "clip(KL / target - 1, -0.2, 0.2) * episodes of the update / --kl-horizon.",
            [
                "the controller reads another KL than the one that is logged: per token, or of one process",
                "the error is not clipped, or the step counts other episodes than those of an update",
            ],
            "kl-coefficient",
        )
    return Finding(
        "The KL coefficient moves the wrong way",
        f"In {mean(against):.0%} of the updates in which the KL is not near its target {target:g}, it falls "
        "while the KL is above, or rises while it is below.",
        [
            "the error of the controller has the wrong sign",
            "the controller reads another KL than the one that is logged: per token, or of one process",
        ],
        "kl-coefficient",
    )


def check_kl_target(run):
    target = run.target("objective/kl")
    values, coefficients = run.values("objective/kl"), run.values("objective/kl_coef")
    if not target or len(values) < 10 or not coefficients:
        return None
    late = part_mean(values, 0.5, 1)
    if late < 1.3 * target or is_in_band(run, "objective/kl"):
        return None
    causes = [
        "the coefficient starts too low, or --kl-horizon is too long for a run of this length",
        "the learning rate is too high",
        "the KL penalty does not reach the rewards, or has the wrong sign",
    ]
    return Finding(
        "The KL is above its target",
        f"{late:.3g} in the second half of the run, target {target:g}. The coefficient went from "
        f"{coefficients[0]:.3g} to {coefficients[-1]:.3g}.",
        causes,
        "kl-above-target",
    )


def check_entropy(run):
    early, late = early_and_late(run, "policy/entropy_avg")
    if early is None or early <= 0:
        return None
    change = late / early
    if change > 1.6:
        return Finding(
            "The entropy rises",
            f"From {early:.3g} to {late:.3g} nats per token: the policy becomes more random.",
            [
                "the loss or the KL penalty has the wrong sign",
                "the learning rate is too high: the policy comes apart",
                "rewards are noise: they do not depend on the responses they are paid for",
            ],
            "entropy-rises",
        )
    if change < 0.25 and score_gain(run) is not None and clear_change(run) < 1:
        return Finding(
            "The entropy collapses",
            f"From {early:.3g} to {late:.3g} nats per token, without a gain in score.",
            [
                "the policy exploits one response that is always paid",
                "the KL penalty is too weak, or the learning rate too high",
            ],
            "entropy-collapses",
        )
    return None


def check_endings(run):
    clipped = run.values("completions/clipped_ratio")
    wants_end = run.args.get("missing_eos_penalty") is not None or run.script == "grpo_math"
    if not clipped:
        return None
    early, late = early_and_late(run, "completions/clipped_ratio")
    if not (wants_end and late > 0.5) and late <= early + 0.3:
        return None
    evidence = (
        f"{late:.0%} of the responses have no stop token in the last fifth of the run, {early:.0%} at first."
    )
    not_learned = (
        "the policy has not learned a stop token: the supervised model was trained without one, or with the "
        "pad token masked out that is also the stop token"
    )
    too_short = "the response length is too short for this task"
    not_seen = "the stop token is forbidden, cut off before it is counted, or another one than the model's"
    longer = "the reward grows with length, or an end is not rewarded"
    limit = max(run.values("completions/max_length") or [0])
    lengths = run.values("completions/mean_length")
    band = run.band.get("completions/clipped_ratio") if has_flags_of_band(run) else None
    if early < 0.5:
        causes = [longer, not_seen, not_learned]
    elif band is not None and band["95"][0] < 0.5:  # with the same model and flags, responses end
        causes = [not_seen, not_learned]
    elif lengths and part_mean(lengths, 0, 0.05) < 0.9 * limit:
        evidence += (
            f" But they have {part_mean(lengths, 0, 0.05):.1f} tokens in the mean, and may have {limit:.0f}."
        )
        causes = [not_seen, not_learned, too_short]
    else:
        causes = [too_short, not_learned, not_seen]
    return Finding("Responses do not end", evidence, causes, "responses-do-not-end")


def check_lengths(run):
    early, late = early_and_late(run, "completions/mean_length")
    if early is None or run.script == "grpo_math":  # worked steps are longer than bare answers
        return None
    if late < 0.5 * early:
        return Finding(
            "Responses become short",
            f"From {early:.1f} to {late:.1f} tokens.",
            ["the reward pays for short responses", "each token costs a KL penalty that is too high"],
            "lengths",
        )
    if late > 1.8 * early:
        return Finding(
            "Responses become long",
            f"From {early:.1f} to {late:.1f} tokens.",
            ["the reward grows with length", "the KL penalty has the wrong sign: each token is paid for"],
            "lengths",
        )
    return None


def check_critic(run):
    values = run.values("loss/value_avg")
    if len(values) < 20 or run.args.get("vf_coef") is None:
        return None
    early, late = part_mean(values, 0, 0.05), part_mean(values, 0.8, 1)
    if late < 1.5 * early:
        return None
    return Finding(
        "The critic gets worse",
        f"The value loss rises from {early:.3g} to {late:.3g}.",
        [
            "the value loss has the wrong sign, or too little weight",
            "values are aligned with other tokens than the returns: off by one, or padding",
            "the learning rate is too high for the value head",
            "the scores spread out more and more: clip or whiten them",
        ],
        "critic",
    )


MAY_DIFFER = {
    "seed",
    "output_dir",
    "resume",
    "num_sample_generations",
    "save_every",
    "keep_checkpoints",
    "log_with",
}
TOLD_ELSEWHERE = {  # metrics whose distance from the band says little by itself
    "objective/kl_coef", "sampling/logprob_gap_mean", "sampling/logprob_gap_max", "loss/policy_avg",
    "completions/min_length", "completions/max_length", "val/num_eos_tokens", "objective/rlhf_reward",
    "objective/non_score_reward", "env/reward_mean", "val/clipfrac_avg", "grad_norm",
    "completions/new_word_share",
}  # fmt: skip


def check_band(run):
    """Metrics far from those of healthy runs with the same flags."""
    if not has_flags_of_band(run):
        return None
    distances = {
        metric: distance_from_band(run, metric) for metric in run.band if metric not in TOLD_ELSEWHERE
    }
    far = sorted(
        (metric for metric in distances if distances[metric] > 0.75), key=distances.get, reverse=True
    )
    if not far:
        return None
    evidence = []
    for metric in far[:3]:
        update, value, low, high = last_value_and_band(run, metric)
        evidence.append(f"{metric} is {value:.3g} at update {update} ({in_band(low, high)})")
    text = "; ".join(evidence) + "."
    if different_at_first(run):
        return Finding(
            "Not like healthy runs with the same flags",
            f"{text} The first update differed already: see that finding.",
            [],
            "outside-the-band",
        )
    causes = []
    first = first_to_leave_band(run)
    if first is not None:
        metric, update, is_higher = first
        where = "above" if is_higher else "below"
        text += (
            " The first update was close to theirs. Of the learning rate, KL, step size, score and value "
            f"loss, {metric} was the first to be {where} their range, at update {update}."
        )
        causes += causes_of(metric, is_higher, LATER_UPDATES)
    causes.append("advantages, loss, clipping, optimizer or schedule differ")
    if run.args.get("vf_coef") is not None:
        causes.append("values, returns or the value loss differ")
    return Finding("Not like healthy runs with the same flags", text, causes, "outside-the-band")


def in_band(low, high):
    """The range of healthy runs, in words."""
    return f"90 % of healthy runs: {low:.3g} to {high:.3g}" if low != high else f"healthy runs: {low:.3g}"


# Likely causes if a metric is not as in healthy runs.
MODEL_INPUT = (
    "the model's input: positions, padding, another template, prompts that are truncated or end in EOS"
)
DECODING = "the texts of responses: decoded with special tokens, with the prompt, or of other tokens"
SAMPLING = ["sampling: temperature, top-k, top-p or random seed", MODEL_INPUT]
STOPPING = ["the stop token: forbidden, another one, or cut off", "the limit of the response length"]
METEOR_INPUT = [
    "what METEOR compares: another reference (an utterance too early, of another row), or a text that is not "
    "only the answer",
]
INTENT_INPUT = [
    "what the intent is compared with: the act of another turn or row, or acts counted from another number",
    "the input of the intent classifier: another utterance, truncated, or without the utterance before",
    "the output of the intent classifier: another class, or a softmax over the wrong dimension",
]
REWARD_INPUT = [
    "what the reward function gets: texts that are truncated, without the prompt or without their EOS, or "
    "the prompt or answer of another row",
    "the prompts: truncated, with another template, or other data",
    "the output of the reward model: another label, sign or scale, or read on padding",
]
SHAPED_SCORE = ["what is done to rewards: clipping, scaling, whitening, penalty for a missing end"]
REFERENCE = ["the reference, or the estimator of the KL"]
COEFFICIENT = ["the coefficient of the KL, or its controller"]
PADDING = ["means over tokens: padding is counted, or tokens are left out"]
OTHER_VALUE_LOSS = "the critic does not start at 0, or the value loss is averaged over other tokens"
SMALL_RETURNS = [
    "returns are too small: the score does not reach all tokens (its position, GAE, gamma, lambda)",
    OTHER_VALUE_LOSS,
]
LARGE_RETURNS = [
    "returns are too large: the score is paid more than once, not clipped or scaled, or padding is counted",
    OTHER_VALUE_LOSS,
]
LOW_LOSS = [
    "the sign of the advantages or of the loss, or min and max swapped in the clipped loss",
    "the mean of the advantages is not 0: whitening is missing, or counts padding",
]
HIGH_LOSS = [
    "advantages: their sign, whitening or mask, or those of other tokens or responses",
    "the steps do not follow the gradient: weight decay, another optimizer, frozen parameters",
    "rewards belong to other responses",
]
SMALL_STEP = "the steps are small: learning rate, epochs, minibatches, gradient clipping"
LARGE_STEP = "the steps are large: learning rate, epochs, minibatches, or gradients that are not zeroed"
OTHER_LOGPROBS = "old and new log-probabilities are of different rows, tokens, models or temperatures"
SMALL_ADVANTAGES = "advantages are too small: not whitened, or the score hardly reaches them"
LARGE_ADVANTAGES = "advantages are too large: not whitened, or whitened over padding"
CLIPPING = "clipping: its range, min and max, or a ratio per token instead of per response"
SMALL_GRADIENT = [
    "the loss is scaled down: divided twice, or a mean over padding",
    "advantages are too small: not divided by the standard deviation, or not of their group",
]
LARGE_GRADIENT = [
    "the loss is scaled up: a sum instead of a mean, or gradients that are not zeroed",
    "advantages are too large: not divided by the standard deviation, or not of their group",
]
SCHEDULE = ["the learning rate or its schedule"]
LOW_KL = ["the reference follows the policy, or the policy hardly moves"]
HIGH_KL = ["the KL penalty is too weak: its coefficient, its controller, or what it is added to"]
LOW_SCORE = [
    "rewards or advantages reach the wrong responses or tokens: shuffled, off by one, wrong sign",
    "the KL penalty is too strong, or clipping or masks leave little of the loss",
    "steps get lost: weights in bf16, frozen parameters, weight decay",
]
HIGH_SCORE = ["the prompts are few, or always the same", "the KL penalty is too weak"]
SMALL_LATER_STEP = ["the steps become small: the schedule, gradient clipping, the optimizer's state"]
LARGE_LATER_STEP = ["the steps become large: stale old log-probabilities, or gradients that are not zeroed"]
LATER_CRITIC = [
    "the value loss: its sign, its weight, its clipping, or old values of another update",
    "what the critic learns: returns of other tokens, or scores on another scale",
]

# (metric, causes if it is lower than in healthy runs, causes if it is higher). The first metric that differs
# decides, so those that a script computes first come first: a fault shows in all that follows. Loss, KL and
# clipping of the first update are means over its optimizer steps.
FIRST_UPDATE = [
    ("lr", SCHEDULE, SCHEDULE),
    ("completions/clipped_ratio", STOPPING, STOPPING),
    ("completions/max_length", STOPPING, STOPPING),
    ("completions/mean_length", STOPPING, STOPPING),
    ("objective/entropy", SAMPLING, SAMPLING),
    ("completions/distinct_2", SAMPLING, SAMPLING),
    ("intent", INTENT_INPUT, INTENT_INPUT),
    ("meteor", METEOR_INPUT + REWARD_INPUT, METEOR_INPUT + REWARD_INPUT),
    ("env/reward_mean", REWARD_INPUT, REWARD_INPUT),
    ("env/reward_std", REWARD_INPUT, REWARD_INPUT),
    ("objective/scores", SHAPED_SCORE, SHAPED_SCORE),
    ("objective/kl", REFERENCE, REFERENCE),
    ("objective/kl_coef", COEFFICIENT, COEFFICIENT),
    ("policy/entropy_avg", PADDING, PADDING),
    ("loss/value_avg", SMALL_RETURNS, LARGE_RETURNS),
    ("loss/policy_avg", LOW_LOSS, HIGH_LOSS),
    ("policy/approxkl_avg", [SMALL_STEP, SMALL_ADVANTAGES], [LARGE_STEP, OTHER_LOGPROBS, LARGE_ADVANTAGES]),
    ("policy/clipfrac_avg", [CLIPPING, SMALL_STEP], [CLIPPING, LARGE_STEP, OTHER_LOGPROBS]),
    ("grad_norm", SMALL_GRADIENT, LARGE_GRADIENT),
]
MARGINS = {  # in widths of the band; others: 1.5. Entropy and loss vary less between batches than scores do.
    "objective/entropy": 0.75,
    "loss/value_avg": 1,
    "loss/policy_avg": 1,
    "policy/approxkl_avg": 1,
    "policy/clipfrac_avg": 1,
    "grad_norm": 1,
}
# The same for the metric that is the first to leave the band after the first update.
LATER_UPDATES = [
    ("lr", SCHEDULE, SCHEDULE),
    ("objective/kl", LOW_KL, HIGH_KL),
    ("objective/kl_coef", COEFFICIENT, COEFFICIENT),
    ("policy/approxkl_avg", SMALL_LATER_STEP, LARGE_LATER_STEP),
    ("policy/clipfrac_avg", SMALL_LATER_STEP, LARGE_LATER_STEP),
    ("val/ratio_var", SMALL_LATER_STEP, LARGE_LATER_STEP),
    ("objective/scores", LOW_SCORE, HIGH_SCORE),
    ("loss/value_avg", LATER_CRITIC, LATER_CRITIC),
]


def causes_of(metric, is_higher, table):
    """The causes that FIRST_UPDATE or LATER_UPDATES has for a metric. -> list of str"""
    [causes] = [higher if is_higher else lower for name, lower, higher in table if name == metric]
    return causes


def check_first_update(run):
    """All healthy runs start from the same models, so only chance tells their first updates apart."""
    different = different_at_first(run)
    if not different:
        return None
    evidence = []
    for metric, _ in different[:3]:
        low, high = run.band[metric]["5"][0], run.band[metric]["95"][0]
        evidence.append(f"{metric} is {run.metrics[0][metric]:.3g} ({in_band(low, high)})")
    return Finding(
        "The first update is not like that of healthy runs",
        "; ".join(evidence) + ".",
        causes_at_first(different),
        "first-update",
    )


def causes_at_first(different):
    """The causes of the first metric that differs; others come before them if several metrics tell more."""
    metrics = [metric for metric, _ in different]
    causes = causes_of(*different[0], FIRST_UPDATE)
    has_other_length = metrics[0].startswith("completions/") and metrics[0] != "completions/distinct_2"
    if "policy/entropy_avg" in metrics or (has_other_length and "env/reward_mean" in metrics):
        # The policy predicts other tokens: it reads something else.
        causes = [MODEL_INPUT, *(cause for cause in causes if cause != MODEL_INPUT)]
    elif metrics[0] == "completions/distinct_2":  # other texts, of tokens that are as likely as usual
        causes = [DECODING, *causes]
    return causes


def different_at_first(run):
    """What is far outside the band in update 1. -> list of (metric, is higher), in the order of FIRST_UPDATE

    Far: by more than 0.75 widths of the band for the entropy, 1 for the loss and its steps, 1.5 for the rest.
    """
    if not run.metrics or run.metrics[0].get("update") != 1 or not has_flags_of_band(run):
        return []
    different = []
    for metric, *_ in FIRST_UPDATE:
        value, band = number(run.metrics[0].get(metric)), run.band.get(metric)
        if value is None or band is None or band["update"][0] != 1:
            continue
        low, high = band["5"][0], band["95"][0]
        margin = MARGINS.get(metric, 1.5) * max(high - low, 0.02 * abs(high), 1e-6)
        if value < low - margin or value > high + margin:
            different.append((metric, value > high))
    return different


def first_to_leave_band(run):
    """The metric of LATER_UPDATES that leaves the band first. -> metric, update, is higher; or None

    It leaves the band if it is outside by more than a width of it, on the same side, at two points in a row.
    """
    found = None
    by_update = {row["update"]: row for row in run.metrics}
    for metric, *_ in LATER_UPDATES:
        band = run.band.get(metric)
        if band is None:
            continue
        previous_side = 0  # -1: below the band at the point before, 1: above, 0: inside
        previous_update = 0
        for update, low, high in zip(band["update"], band["5"], band["95"]):
            value = number(by_update.get(update, {}).get(metric))
            width = max(high - low, 1e-3 * abs(high), 1e-9)
            side = 0
            if value is not None and value > high + width:
                side = 1
            elif value is not None and value < low - width:
                side = -1
            if side != 0 and side == previous_side:  # one point outside is chance
                if found is None or previous_update < found[1]:
                    found = (metric, previous_update, side > 0)
                break
            previous_side, previous_update = side, update
    return found


def has_flags_of_band(run):
    """True if there is a band, and its runs had the same flags. This run must have one process, as they had.

    Flags that only one side has do not count, nor do those of MAY_DIFFER.
    """
    if run.about.get("world_size", 1) != 1:
        return False
    shared = (set(run.args) & set(run.band_args)) - MAY_DIFFER
    return bool(run.band and run.args) and all(run.args[name] == run.band_args[name] for name in shared)


def is_in_band(run, metric):
    """True if the metric is inside the band of healthy runs with the same flags, or close to it."""
    return metric in run.band and has_flags_of_band(run) and distance_from_band(run, metric) < 0.5


def distance_from_band(run, metric):
    """How far a metric is outside of the band, in widths of it: the median of the later half. 0: inside"""
    by_update = {row["update"]: number(row.get(metric)) for row in run.metrics}
    band = run.band[metric]
    points = list(zip(band["update"], band["5"], band["95"]))
    points = [point for point in points if by_update.get(point[0]) is not None]
    distances = []
    for update, low, high in points[len(points) // 2 :]:
        outside = max(low - by_update[update], by_update[update] - high, 0.0)
        width = max(high - low, 1e-3 * abs(high), 1e-9)
        distances.append(outside / width)
    return median(distances) if distances else 0.0


def last_value_and_band(run, metric):
    """The last value that can be compared. -> update, value, 5 %, 95 %"""
    by_update = {row["update"]: number(row.get(metric)) for row in run.metrics}
    band = run.band[metric]
    i = max(i for i, update in enumerate(band["update"]) if by_update.get(update) is not None)
    update = band["update"][i]
    return update, by_update[update], band["5"][i], band["95"][i]


def check_loss(run):
    values = run.values("loss")
    if len(values) < 10:
        return None
    early, late = part_mean(values, 0, 0.05), part_mean(values, 0.8, 1)
    last = values[int(0.8 * len(values)) :]
    if late < early - 2 * stdev(last) / len(last) ** 0.5:
        return None
    return Finding(
        "The loss does not fall",
        f"From {early:.3g} to {late:.3g}.",
        [
            "the learning rate is too high or too low",
            "labels are shifted twice, or not at all",
            "all labels are masked, or the wrong ones",
        ],
        "loss-does-not-fall",
    )


def check_loss_gain(run):
    """With other flags, a loss that falls by less than half of what it does in healthy runs is a finding.

    Only for sft.py and reward_model.py, whose bands have a loss. Model, tokenizer and data must be the same.
    """
    band = run.band.get("loss")
    early, late = early_and_late(run, "loss")
    if band is None or early is None or len(run.metrics) < 10 or has_flags_of_band(run):
        return None
    if check_loss(run) is not None:
        return None
    if any(word in text for text in unusual_flags(run) for word in LOSS_FLAGS):
        return None
    usual = band["50"][0] - part_mean(band["50"], 0.8, 1)
    if early - late > 0.5 * usual:
        return None
    return Finding(
        "The loss falls less than with the usual flags",
        f"It fell by {early - late:.3g}; the median of healthy runs: by {usual:.3g}.",
        ["the learning rate is too low, or much too high", "the run is too short"],
        "loss-does-not-fall",
    )


# With them, losses cannot be compared.
LOSS_FLAGS = ("model", "config", "tokenizer", "dataset", "shard", "label")


# ---- Findings: the saved tokens ----------------------------------------------------------------------------
#
# tokens.jsonl has the numbers of a few responses. From them, rewards and advantages are computed once more.


def rows_by_update(run):
    """The rows of tokens.jsonl. -> dict: update -> list of rows"""
    updates = {}
    for row in run.tokens:
        updates.setdefault(row["update"], []).append(row)
    return updates


def fit(x, y):
    """Least squares: y = slope * x + offset. Two lists -> slope, offset, largest error"""
    x_mean, y_mean = mean(x), mean(y)
    spread = sum((a - x_mean) ** 2 for a in x)
    slope = sum((a - x_mean) * (b - y_mean) for a, b in zip(x, y)) / spread if spread > 0 else 0.0
    offset = y_mean - slope * x_mean
    error = max(abs(slope * a + offset - b) for a, b in zip(x, y))
    return slope, offset, error


def check_token_rewards(run):
    """PPO pays each token -kl_coef * KL, and the last token the score too."""
    if run.args.get("whiten_rewards"):
        return None
    coefficients = {row.get("update"): number(row.get("objective/kl_coef")) for row in run.metrics}
    wrong_kl, wrong_last, paid_elsewhere = 0, 0, 0
    equal_rewards, proportional = 0, 0  # responses whose tokens all have the same reward, or -c * KL
    slopes = []  # of reward over KL: -kl_coef is right
    rows = [row for row in run.tokens if {"reward", "KL", "score"} <= row.keys()]
    rows = [row for row in rows if coefficients.get(row["update"]) is not None and row["reward"]]
    for row in rows:
        coefficient = coefficients[row["update"]]
        # What a token is paid apart from its KL: 0, and the score at the end.
        rest = [reward + coefficient * kl for reward, kl in zip(row["reward"], row["KL"])]
        tolerance = [0.002 + 0.001 * coefficient * abs(kl) for kl in row["KL"]]
        wrong = [abs(x) > limit for x, limit in zip(rest, tolerance)]
        early_kl, early_rewards = row["KL"][:-1], row["reward"][:-1]
        spread = sum(kl**2 for kl in early_kl)
        if any(wrong[:-1]) and spread > 0:
            slopes.append(sum(kl * reward for kl, reward in zip(early_kl, early_rewards)) / spread)
            wrong_kl += 1
            equal_rewards += max(early_rewards) - min(early_rewards) < 0.0005
            errors = [abs(reward - slopes[-1] * kl) for kl, reward in zip(early_kl, early_rewards)]
            proportional += all(error <= limit for error, limit in zip(errors, tolerance))
            scores = [score for score in possible_scores(run, row["score"]) if abs(score) > 0.05]
            paid_elsewhere += any(abs(x - score) < 0.01 for x in rest[:-1] for score in scores)
        paid = possible_scores(run, row["score"])
        if min(abs(rest[-1] - score) for score in paid) > tolerance[-1] + 0.001 * abs(row["score"]):
            wrong_last += 1
    if wrong_kl + wrong_last < max(1, 0.1 * len(rows)):
        return None
    evidence = []
    causes = []
    if wrong_last:
        evidence.append(
            f"In {wrong_last} of {len(rows)} saved responses, the last token is not paid the score"
        )
        causes.append("the score is not put on the last token of a response: on padding, off by one, or lost")
    if wrong_kl:
        evidence.append(f"in {wrong_kl}, earlier tokens are paid something else than -kl_coef * KL")
        if mean(slopes) > 0 and paid_elsewhere < 0.5 * wrong_kl:
            causes.insert(
                0, "the KL penalty has the wrong sign: tokens that are rare under the reference are paid"
            )
        elif paid_elsewhere > 0.2 * wrong_kl:
            causes.insert(0, "the score is paid on more tokens than the last one")
        elif equal_rewards > 0.5 * wrong_kl:
            causes.insert(0, "the KL of the whole response is charged to each of its tokens")
        elif proportional > 0.5 * wrong_kl:
            causes.insert(0, f"the KL penalty has another coefficient: rewards are {median(slopes):.3g} * KL")
        causes.append("the KL penalty is computed from other log-probabilities, or with another coefficient")
    return Finding(
        "Rewards are not the KL penalty and the score",
        ("; ".join(evidence) + ".").capitalize(),
        causes,
        "token-rewards",
    )


def check_masks(run):
    """PPO: a token of a response with a KL, return and advantage of exactly 0 is outside of the mask."""
    rows = [row for row in run.tokens if {"KL", "return", "advantage"} <= row.keys() and row["KL"]]
    masked_last, masked_first, masked_between = 0, 0, 0
    for row in rows:
        masked = [
            kl == 0 and x == 0 and y == 0 for kl, x, y in zip(row["KL"], row["return"], row["advantage"])
        ]
        masked_last += masked[-1]
        masked_first += masked[0]
        masked_between += any(masked[1:-1])
    if max(masked_last, masked_first, masked_between) < max(2, 0.25 * len(rows)):
        return None
    causes = []
    if masked_last >= max(masked_first, masked_between):
        causes = [
            "the mask leaves out the last token: it is made of token ids (pad = EOS), or it is one too short",
            "the length of a response does not count its stop token",
        ]
    elif masked_first >= masked_between:
        causes = ["the mask leaves out the first token: it begins one too late, or ends one too early"]
    causes.append("the mask of the response is of other tokens or rows")
    return Finding(
        "Tokens of the responses are masked out",
        f"In {len(rows)} saved responses, the last token has a KL, return and advantage of exactly 0 in "
        f"{masked_last}, the first one in {masked_first}, others in {masked_between}. They are not learned.",
        causes,
        "masks",
    )


def possible_scores(run, score):
    """A saved score, as it is, clipped, or with the penalty for a missing end. -> list of float"""
    clip = run.args.get("score_clip") or math.inf
    penalty = run.args.get("missing_eos_penalty") or 0.0
    clipped = max(-clip, min(clip, score))
    return [score, clipped, score - penalty, clipped - penalty]


def check_token_advantages(run):
    """PPO: advantages must follow from rewards and values by GAE. They were whitened: an affine function."""
    gamma, lam = run.args.get("gamma"), run.args.get("lam")
    if gamma is None or lam is None:
        return None
    wrong, wrong_returns, total = 0, 0, 0
    for rows in rows_by_update(run).values():
        ours, theirs = [], []
        return_errors = []
        for row in rows:
            if not {"reward", "value", "advantage"} <= row.keys():
                continue
            advantage, next_value, advantages = 0.0, 0.0, []
            for reward, value in zip(reversed(row["reward"]), reversed(row["value"])):
                advantage = reward + gamma * next_value - value + gamma * lam * advantage
                next_value = value
                advantages.append(advantage)
            advantages.reverse()
            ours += advantages
            theirs += row["advantage"]
            if row.get("return"):
                sums = [advantage + value for advantage, value in zip(advantages, row["value"])]
                return_errors += [abs(x - y) for x, y in zip(row["return"], sums)]
        if len(ours) < 3 or not all_finite(ours + theirs) or max(ours) - min(ours) < 0.001:
            continue
        total += 1
        slope, _, error = fit(ours, theirs)
        # Rewards and values are saved with four digits after the point, and add up over the tokens.
        rounding = 2e-4 * max(len(row.get("reward", [])) for row in rows) * max(slope, 0.0)
        wrong += slope <= 0 or error > 0.02 + 0.01 * max(abs(x) for x in theirs) + rounding
        wrong_returns += any(x > 0.02 + 0.01 * max(abs(y) for y in ours) for x in return_errors)
    if wrong <= total / 2 and wrong_returns > total / 2:
        return Finding(
            "Returns are not advantages plus values",
            f"In {wrong_returns} of {total} saved updates. In most of them, the advantages follow from GAE.",
            [
                "the critic learns another target: whitened returns, or values added twice or not at all",
                "returns belong to other tokens or responses",
            ],
            "token-advantages",
        )
    if wrong <= total / 2:
        return None
    return Finding(
        "Advantages do not follow from rewards and values",
        f"In {wrong} of {total} saved updates, GAE (gamma {gamma:g}, lambda {lam:g}) gives other advantages "
        "for the saved rewards and values.",
        [
            "the recursion of GAE is wrong: its direction, a token too early or late, gamma or lambda",
            "advantages have the wrong sign, or belong to other tokens or responses",
            "advantages are whitened over the wrong tokens: of one response, of a minibatch, or with padding",
        ],
        "token-advantages",
    )


def check_last_tokens(run):
    """RLOO and GRPO: the stop token is the last token of a response that has ended, and is trained."""
    rows = [row for rows in saved_groups(run) for row in rows]
    clipped = run.values("completions/clipped_ratio")
    if len(rows) < 8 or not clipped or mean(clipped) > 0.5:
        return None
    [(last_token, count)] = Counter(row["tokens"][-1] for row in rows).most_common(1)
    if count > 0.4 * len(rows):  # there may be more than one stop token
        return None
    return Finding(
        "Responses lack their stop token",
        f"{1 - mean(clipped):.0%} of the responses end by themselves. But only {count / len(rows):.0%} of "
        f"the saved ones have the commonest last token, {last_token!r}.",
        [
            "the length of a response does not count its stop token, so the policy is never trained to stop",
            "responses are cut at another token than the one at which they stop",
        ],
        "responses-do-not-end",
    )


def check_same_scores(run):
    """In a group, the same response has the same score, unless the reward function uses chance or the batch.

    Not in the PPO scripts: there, rows with equal prompts may have different references or other columns.
    """
    if run.script not in ("rloo_tldr", "grpo_math"):
        return None
    scores = {}  # (update, prompt, response) -> scores
    for row in run.tokens:
        if {"prompt", "tokens", "score"} <= row.keys():
            response = tuple(row.get("ids", row["tokens"]))  # runs of old versions have no ids
            scores.setdefault((row["update"], row["prompt"], response), []).append(row["score"])
    repeated = [values for values in scores.values() if len(values) > 1]
    different = sum(max(values) - min(values) > 0.01 + 0.01 * abs(values[0]) for values in repeated)
    if different < max(2, 0.1 * len(repeated)):
        return None
    return Finding(
        "The same response has different scores",
        f"In {different} of {len(repeated)} cases in which a prompt got the same response more than once.",
        [
            "scores belong to other responses or prompts: shuffled, or ordered in another way",
            "the reward function reads more than prompt and response: the batch, the order, random numbers",
        ],
        "same-response-other-score",
    )


def check_direction(run):
    """After an update, tokens with a high advantage should be more likely than before."""
    rounding = 0.05 if rounds_more(run) else 0.001  # of log-ratios
    correlations, total = [], 0
    for rows in rows_by_update(run).values():
        advantages, log_ratios = [], []
        for row in rows:
            if not {"advantage", "ratio"} <= row.keys() or not row["ratio"]:
                continue
            if all_finite(row["advantage"] + row["ratio"]):
                advantages += row["advantage"]
                log_ratios += [math.log(max(x, 1e-4)) for x in row["ratio"]]
        if len(advantages) > 2 and stdev(advantages) > 1e-6 and stdev(log_ratios) > rounding:
            correlations.append(correlation(advantages, log_ratios))
            total += len(advantages)
    if len(correlations) < 3 or total < 100 or max(correlations) > 0.1 or mean(correlations) > 0.02:
        return None
    return Finding(
        "Updates do not make tokens with high advantages more likely",
        f"In {len(correlations)} saved updates ({total} tokens), advantage and log-ratio have correlations "
        f"from {min(correlations):.2f} to {max(correlations):.2f}.",
        [
            "the sign of the loss, of the advantages in it, or of the logarithm of the ratio",
            "the loss multiplies ratios and advantages of different tokens or responses",
            "something else moves the weights: value loss, weight decay, steps that are far too large",
        ],
        "direction",
    )


def all_finite(values):
    return all(x is not None and math.isfinite(x) for x in values)


def check_values(run):
    """Values start at 0. After some updates they should not be 0 any more."""
    if check_no_step(run) is not None:  # nothing moves at all
        return None
    updates = rows_by_update(run)
    rows = [row for update in list(updates)[1:] for row in updates[update] if row.get("value")]
    if not rows or any(abs(value) > 1e-6 for row in rows for value in row["value"]):
        return None
    return Finding(
        "The critic predicts 0 for every token",
        f"In all {len(rows)} responses that were saved after the first time.",
        [
            "the value loss has no weight, or does not reach the critic",
            "the optimizer does not hold the critic's parameters",
        ],
        "critic-says-zero",
    )


def saved_groups(run):
    """RLOO and GRPO: all responses to one prompt, for each saved update. -> list of lists of rows"""
    if run.script not in ("rloo_tldr", "grpo_math"):
        return []
    groups = []
    for rows in rows_by_update(run).values():
        rows = [row for row in rows if row.get("advantage") and {"tokens", "score"} <= row.keys()]
        numbers = [[row["score"], row["advantage"][0], *row.get("KL", [])] for row in rows]
        if len(rows) > 1 and all(all_finite(values) for values in numbers):
            groups.append(rows)
    return groups


def check_same_responses(run):
    groups = saved_groups(run)
    alike = [rows for rows in groups if all(row["tokens"] == rows[0]["tokens"] for row in rows)]
    log_chance = 0.0  # of these groups, by the probability of their response
    for rows in alike:
        log_chance += (len(rows) - 1) * sum(rows[0].get("logprob", [-math.inf]))
    if len(groups) < 3 or len(alike) <= 0.8 * len(groups) or log_chance > math.log(1e-3):
        return None
    return Finding(
        "The responses to a prompt are the same",
        f"In {len(alike)} of {len(groups)} saved groups, all responses are the same text. By their "
        "probabilities, that is no chance.",
        [
            "the responses of a group are sampled with the same random numbers",
            "the rows of a group are copies of one response",
        ],
        "same-responses",
    )


def check_group_advantages(run):
    """RLOO and GRPO: compute the advantages of a group again from its scores and KL."""
    coefficient = 0.0
    if run.script == "rloo_tldr" and not run.args.get("kl_in_loss"):
        coefficient = run.args.get("kl_coef") or 0.0
    kinds = Counter()  # what is wrong -> number of groups
    all_expected, all_saved = [], []
    num_groups = 0
    for rows in saved_groups(run):
        rewards = [row["score"] - coefficient * sum(row.get("KL", [0.0])) for row in rows]
        saved = [row["advantage"][0] for row in rows]
        expected = group_advantages(run.script, rewards)
        if max(abs(x) for x in expected + saved) < 0.01:
            continue  # all rewards are equal
        num_groups += 1
        all_expected += expected
        all_saved += [x - mean(saved) for x in saved]
        slope, _, error = fit(expected, saved)
        # KL and advantages are saved with four digits after the point.
        rounding = 1e-4 * (1 + coefficient * max(len(row["tokens"]) for row in rows)) * max(1.0, slope)
        tolerance = rounding + 0.005 * max(abs(x) for x in saved)
        equal_rewards = max(abs(x) for x in expected) < 0.01
        if error > tolerance or (slope <= 0 and not equal_rewards):
            kinds["order"] += 1
        elif abs(mean(saved)) > tolerance:
            kinds["baseline"] += 1
        elif abs(slope - 1) > 0.05 and not run.args.get("whiten_rewards"):  # which divides by another number
            kinds["scale"] += 1
    if kinds.total() <= num_groups / 2:
        return None
    [(kind, count)] = kinds.most_common(1)
    evidence = f"In {count} of {num_groups} saved groups"
    if kind == "baseline":
        return Finding(
            "The advantages of a group do not sum to 0",
            f"{evidence}. They rise with the reward, but have another baseline.",
            [
                "the baseline is missing, or it is the mean of other responses than those of the group",
                "advantages are whitened over the batch",
            ],
            "group-advantages",
        )
    if kind == "scale":
        return Finding(
            "The advantages of a group have another scale",
            f"{evidence}. They follow from the rewards, but for a factor.",
            [
                "GRPO: not divided by the standard deviation of the group, or by that of the batch",
                "RLOO: divided by a standard deviation, as in GRPO",
                "advantages are whitened or clipped after that",
            ],
            "group-advantages",
        )
    causes = [
        "groups are mixed up: rows are grouped or ordered in two different ways",
        "the advantages have the wrong sign, or a wrong baseline",
        "rewards and advantages are of different responses",
    ]
    similar = 0.0
    if stdev(all_expected) > 0 and stdev(all_saved) > 0:
        similar = correlation(all_expected, all_saved)
    if similar > 0.9:  # the scores are in the advantages, but something small is wrong
        causes.insert(0, "rewards are clipped, whitened or penalized in another way")
        if coefficient > 0:
            kl_cause = "the KL penalty: a mean over tokens, its sign, its coefficient, its estimator"
            causes.insert(0, kl_cause)
    return Finding(
        "Advantages do not follow from the rewards of the group",
        f"{evidence}. Saved advantages and those computed again from scores and KL have a correlation of "
        f"{similar:.3f}.",
        causes,
        "group-advantages",
    )


def group_advantages(script, rewards):
    """The advantages of RLOO or GRPO for the rewards of one group. Two lists of float"""
    k, center = len(rewards), mean(rewards)
    if script == "grpo_math":
        return [(reward - center) / (stdev(rewards) + 1e-4) for reward in rewards]
    # reward - mean of the others = k / (k - 1) * (reward - mean of the group)
    return [k / (k - 1) * (reward - center) for reward in rewards]


# ---- Curves ------------------------------------------------------------------------------------------------


def thin(items):
    """At most MAX_POINTS items, evenly spaced, with the last one."""
    step = math.ceil(len(items) / MAX_POINTS)
    return items[::-1][::step][::-1] if step > 1 else items


def chart(metric, title, runs, colors):
    """A Bokeh figure of one metric over the updates, or None if no run has it."""
    from bokeh.models import HoverTool, Span
    from bokeh.plotting import figure

    runs = [run for run in runs if run.values(metric)]
    if not runs:
        return None
    plot = figure(height=230, sizing_mode="stretch_width", tools="", toolbar_location=None, title=title)
    band = runs[0].band.get(metric)
    if band is not None:
        color = "#bbbbbb"
        plot.varea(band["update"], band["5"], band["95"], color=color, alpha=0.4)
        plot.line(band["update"], band["50"], color=color, line_width=1)
    for run in runs:
        rows = thin([row for row in run.metrics if number(row.get(metric)) is not None])
        updates = [row["update"] for row in rows]
        values = [row[metric] for row in rows]
        line = plot.line(updates, values, color=colors[run.name], line_width=1.5)
        tooltips = [("", run.name), ("update", "@x"), (title, "@y{0.0000a}")]
        plot.add_tools(HoverTool(renderers=[line], tooltips=tooltips, mode="vline"))
        if run.target(metric):
            plot.add_layout(Span(location=run.target(metric), dimension="width", line_dash="dashed"))
    values = [x for run in runs for x in run.values(metric)]
    limits = without_outliers(values)
    if max(values) == min(values) and band is None:  # Bokeh would draw from x - 1 to x + 1
        margin = 0.1 * abs(values[0]) or 0.1
        plot.y_range.start, plot.y_range.end = values[0] - margin, values[0] + margin
    if limits is not None:
        plot.y_range.start, plot.y_range.end = limits
        plot.title.text += " (outliers cut off)"
    plot.xaxis.axis_label = "update"
    return plot


def without_outliers(values):
    """The range to draw if a few values would flatten all others, else None. -> (low, high)"""
    if len(values) < 50:
        return None
    ordered = sorted(values)
    low, high = ordered[len(values) // 50], ordered[-1 - len(values) // 50]  # without the outer 2 %
    margin = high - low
    if margin == 0 or ordered[-1] - ordered[0] < 6 * margin:
        return None
    return low - margin / 2, high + margin / 2


def histogram(title, before, after):
    """A Bokeh figure: how a number is distributed before and after the run."""
    from bokeh.plotting import figure

    low, high = min(before + after), max(before + after)
    width = (high - low) / 24 or 1.0
    plot = figure(height=230, sizing_mode="stretch_width", tools="", toolbar_location=None, title=title)
    for name, values, color in (("before", before, "#8c8c8c"), ("after", after, "#1f77b4")):
        counts = Counter(min(23, int((x - low) / width)) for x in values)
        bins = sorted(counts)
        plot.quad(
            left=[low + width * i for i in bins],
            right=[low + width * (i + 1) for i in bins],
            bottom=0,
            top=[counts[i] / len(values) for i in bins],
            color=color,
            alpha=0.5,
            legend_label=name,
        )
    plot.yaxis.axis_label = "fraction of responses"
    plot.legend.background_fill_alpha = 0.6
    plot.legend.label_text_font_size = "8pt"
    return plot


# ---- Samples -----------------------------------------------------------------------------------------------


def new_words(pairs, count=12):
    """The words whose share of the responses grew most. -> list of (word, share before, share after)"""
    shares = []
    for side in ("before", "after"):
        counts = Counter()
        for pair in pairs:
            counts.update(set(re.findall(r"[a-z']+", pair[side].lower())))
        shares.append({word: n / len(pairs) for word, n in counts.items()})
    before, after = shares
    spread = [
        word for word in after if after[word] > 2 * before.get(word, 0)
    ]  # leaves out most function words
    growth = sorted(spread, key=lambda word: (before.get(word, 0) - after[word], word))
    return [(word, before.get(word, 0), after[word]) for word in growth[:count]]


def samples_over_time(run):
    """Responses to the same prompts in several updates. -> list of (prompt, [(update, text, score), ...])"""
    prompts = {}
    for row in run.samples:
        prompt = next((row[name] for name in ("prompt", "query", "task", "last") if name in row), "")
        texts = [row[name] for name in ("response", "model response", "answer", "completion") if name in row]
        score = next((row[name] for name in row if "score" in name or name.startswith("rewards/")), None)
        if texts and "update" in row:
            prompts.setdefault(str(prompt), []).append((row["update"], texts[0], number(score)))
    return list(prompts.items())


def token_data(run):
    """What the token microscope shows. -> dict: columns, and lines with texts and numbers"""
    lines = run.tokens
    while len(lines) > MAX_TOKEN_LINES:  # leave out every other update, but not the last one
        updates = sorted({line["update"] for line in lines})
        if len(updates) == 1:
            break
        kept = updates[::-1][::2]
        lines = [line for line in lines if line["update"] in kept]
    first = lines[0] if lines else {}
    columns = [name for name, x in first.items() if isinstance(x, list) and name not in ("tokens", "ids")]
    clean = []
    for line in lines[:MAX_TOKEN_LINES]:
        numbers = {name: [number(x) for x in line.get(name, [])] for name in columns}
        clean.append({**line, **numbers, "score": number(line.get("score"))})
    return {"columns": columns, "lines": clean}


# ---- Export ------------------------------------------------------------------------------------------------


ALGORITHMS = {"ppo_sentiment": "ppo", "ppo_dialog": "ppo", "rloo_tldr": "rloo", "grpo_math": "grpo"}
UNIPO_METRICS = {  # its name -> ours
    "reward": "objective/scores",
    "reward_std": "env/reward_std",
    "policy_loss": "loss/policy_avg",
    "value_loss": "loss/value_avg",
    "entropy": "policy/entropy_avg",
    "kl": "objective/kl",
    "clip_fraction": "policy/clipfrac_avg",
    "grad_norm": "grad_norm",
    "learning_rate": "lr",
    "response_length": "completions/mean_length",
    "importance_sampling_ratio": "val/ratio",
}
UNIPO_TOKENS = {
    "values": "value",
    "advantages": "advantage",
    "returns": "return",
    "token_kl": "KL",
    "rewards": "reward",
}


def to_unipo(run):
    """A run of an RL script for UNIPO (arXiv 2605.11549), a page that explains the loss of each token.

    -> dict, in the format of docs/canonical_schema.json of github.com/poloclub/unipo
    """
    cliprange = run.args.get("cliprange", 0.2)
    entries = []
    for row in run.metrics:
        metrics = {name: number(row[ours]) for name, ours in UNIPO_METRICS.items() if ours in row}
        metrics["policy_objective"] = -metrics["policy_loss"]
        groups = {}  # prompt -> responses
        for i, line in enumerate(run.tokens):
            if line["update"] == row["update"]:
                groups.setdefault(line["prompt"], []).append(unipo_response(i, line, cliprange))
        entry = {"step": row["update"], "is_first_step_after_rollout_phase": True, "metrics": metrics}
        if groups:
            entry["prompts"] = [{"prompt": prompt, "responses": groups[prompt]} for prompt in groups]
        entries.append(entry)
    model = run.args.get("model_name_or_path")
    header = {
        "task": run.script,
        "dataset": run.args.get("dataset_name"),
        "reward_strategy": ", ".join(run.args.get("reward_fn") or [run.args.get("reward_model_path") or ""]),
        "algorithm": ALGORITHMS[run.script],
        "totalSteps": len(entries),
        "model_name": model,
        "reference_model_name": model,
        "hparams": {name: x for name, x in run.args.items() if isinstance(x, (int, float))},
    }
    return {"header": header, "entries": entries}


def unipo_response(i, line, cliprange):
    """Line i of tokens.jsonl -> dict"""
    tokens = {"ids": line["ids"], "strings": line["tokens"], "old_log_probs": line["logprob"]}
    # tokens.jsonl has four digits after the point, so a ratio may be 0 there.
    ratios = [max(ratio, 1e-4) for ratio in line["ratio"]]
    tokens["log_probs"] = [old + math.log(ratio) for old, ratio in zip(line["logprob"], ratios)]
    if "KL" in line:
        tokens["ref_log_probs"] = [old - kl for old, kl in zip(line["logprob"], line["KL"])]
    tokens |= {name: line[ours] for name, ours in UNIPO_TOKENS.items() if ours in line}
    objectives = []
    for ratio, advantage in zip(ratios, line["advantage"]):
        clipped = min(max(ratio, 1 - cliprange), 1 + cliprange)
        objectives.append(min(ratio * advantage, clipped * advantage))
    tokens["token_objective"] = objectives
    return {
        "id": f"step{line['update']}_line{i}",
        "reward": line["score"],
        "advantage": mean(line["advantage"]),
        "response_text": "".join(line["tokens"]),
        "response_length": len(line["tokens"]),
        "tokens": tokens,
    }


# ---- The page ----------------------------------------------------------------------------------------------


def page(runs):
    """The whole page as HTML."""
    try:
        from bokeh.embed import components
        from bokeh.palettes import Category10
        from bokeh.resources import Resources
        from jinja2 import Environment
    except ImportError as error:
        raise SystemExit(f"report.py needs bokeh and jinja2: pip install bokeh jinja2 ({error})") from error

    for i, run in enumerate(runs):  # names are keys of colors
        if run.name in [other.name for other in runs[:i]]:
            run.name = f"{run.name} ({i + 1})"
    colors = {run.name: Category10[10][i % 10] for i, run in enumerate(runs)}
    plots = {}  # name -> Bokeh figure
    groups = []  # (title, list of (name of the plot, help))
    known = {metric for metrics in METRICS.values() for metric in metrics}
    others = {metric: (metric, "") for run in runs for metric in run.metrics[-1] if metric not in known}
    not_shown = {"update", "episode", "eps", "epoch", "step"}
    others = {metric: titles for metric, titles in others.items() if metric not in not_shown}
    for group, metrics in [*METRICS.items(), ("Everything else", others)]:
        charts = []
        for metric, (title, text) in metrics.items():
            plot = chart(metric, title, runs, colors)
            if plot is not None:
                plots[metric] = plot
                charts.append((metric, text))
        groups.append((group, charts))

    views = []
    for i, run in enumerate(runs):
        histograms = []
        if run.pairs:
            for title, values in (("score", pair_scores(run)), ("words per response", pair_lengths(run))):
                if values[0] and values[1]:
                    plots[f"{i} {title}"] = histogram(title, *values)
                    histograms.append(f"{i} {title}")
        views.append({
            "run": run,
            "findings": find_problems(run),
            "comparison": comparison(run),
            "tables": evaluation_tables(run),
            "words": new_words(run.pairs) if run.pairs else [],
            "over_time": samples_over_time(run),
            "histograms": histograms,
        })  # fmt: skip
    data = [{"pairs": run.pairs[:MAX_PAIRS], "tokens": token_data(run)} for run in runs]

    script, divs = components(plots)
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(TEMPLATE).render(
        title=", ".join(run.name for run in runs),
        runs=runs,
        views=views,
        groups=groups,
        divs=divs,
        colors=colors,
        script=script,
        bokeh=Resources(mode="inline", components=["bokeh"]).render_js(),
        data=json.dumps(data).replace("<", "\\u003c"),
        style=STYLE,
        max_pairs=MAX_PAIRS,
        program=PROGRAM,
        as_text=as_text,
    )


def pair_scores(run):
    """Scores before and after. -> two lists of float"""
    before = [pair["score"] for pair in run.pairs if pair["score"] is not None]
    after = [pair["score after"] for pair in run.pairs if pair["score after"] is not None]
    return before, after


def pair_lengths(run):
    """Words before and after. -> two lists of int"""
    before = [len(pair["before"].split()) for pair in run.pairs]
    after = [len(pair["after"].split()) for pair in run.pairs]
    return before, after


def evaluation_tables(run):
    """Other numbers and tables in evaluation.json, of reward_model.py. -> list of (title, columns, rows)"""
    numbers = [(name, x) for name, x in run.evaluation.items() if number(x) is not None]
    tables = [("Held-out data", ["metric", "value"], numbers)] if numbers and not comparison(run) else []
    confusion, labels = run.evaluation.get("confusion"), run.evaluation.get("labels")
    if confusion and labels:
        rows = [[label, *counts] for label, counts in zip(labels, confusion)]
        tables.append(("Confusion: what it is, what was predicted", ["is", *labels], rows))
    calibration = run.evaluation.get("calibration")
    if calibration:
        rows = [list(bin.values()) for bin in calibration]
        tables.append(("Calibration: are larger differences right more often?", list(calibration[0]), rows))
    return tables


def as_text(x):
    """A number of a table in four digits; a text as it is."""
    return f"{x:.4g}" if isinstance(x, float) else str(x)


def comparison(run):
    """evaluation.json as rows. -> list of (metric, before, after)"""
    before, after = run.evaluation.get("before"), run.evaluation.get("after")
    if not isinstance(before, dict) or not isinstance(after, dict):
        return []
    names = [
        name for name in before if number(before[name]) is not None and number(after.get(name)) is not None
    ]
    return [(name, before[name], after[name]) for name in names]


def describe_findings(run):
    """The findings as text for the screen."""
    findings = find_problems(run)
    if not findings and len(run.metrics) < 10:
        return f"{run.name}: too few updates to judge ({len(run.metrics)})"
    if not findings:
        return f"{run.name}: nothing looks wrong"
    lines = [f"{run.name}: {len(findings)} findings"]
    for finding in findings:
        lines += ["", f"{finding.title}. {finding.evidence}"]
        lines += ["Likely causes:"] if finding.causes else []
        lines += [f"  {i}. {cause}" for i, cause in enumerate(finding.causes, 1)]
        lines += [f"  See docs/debugging.md#{finding.entry}"]
    return "\n".join(lines)


STYLE = """
:root { --line: #ddd; --soft: #f6f7f9; --text: #1c2733; --good: #2e7d32; --bad: #b23b00; }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); }
body { margin: 0 auto; padding: 1rem; max-width: 1200px; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
nav a { margin-right: 1rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
td, th { border-bottom: 1px solid var(--line); padding: .2rem .7rem .2rem 0; }
td, th { text-align: left; vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)); gap: 1rem; }
.columns { display: flex; flex-wrap: wrap; gap: 0 3rem; }
.chart p, .note { color: #5a6672; font-size: .85rem; margin: .2rem 0; }
.finding { border-left: 4px solid var(--bad); background: var(--soft); padding: .6rem 1rem; margin: .7rem 0; }
.flags code { display: inline-block; margin-right: 1rem; font-size: .8rem; overflow-wrap: anywhere; }
.differs { font-weight: bold; }
.healthy { border-left: 4px solid var(--good); background: var(--soft); padding: .6rem 1rem; }
.pair { display: grid; gap: .8rem; grid-template-columns: 1fr 1fr 1fr; }
.pair { border-top: 1px solid var(--line); padding: .5rem 0; }
.pair div, .line, td.text { white-space: pre-wrap; overflow-wrap: anywhere; }
.score { font-variant-numeric: tabular-nums; color: #5a6672; font-size: .85rem; }
.token { border-radius: 3px; cursor: default; } .token:hover { outline: 2px solid #555; }
.line { margin: .5rem 0 1rem; font: 14px/1.9 ui-monospace, monospace; }
#tip { position: fixed; display: none; z-index: 9; white-space: pre; font: .8rem ui-monospace, monospace; }
#tip { background: #fff; border: 1px solid #888; padding: .3rem .6rem; box-shadow: 0 2px 8px #0003; }
select, button { font: inherit; padding: .2rem .5rem; margin: .2rem .4rem .2rem 0; }
@media (max-width: 640px) { .pair { grid-template-columns: 1fr; } body { padding: .6rem; } }
"""


PROGRAM = r"""
const data = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");
const format = (x) => (x === null || x === undefined ? "-" : Number(x.toPrecision(4)).toString());

function add(parent, tag, className, text) {
  const element = document.createElement(tag);
  element.className = className;
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

// Answers before and after, sorted.
const orders = {
  "as they come": null,
  "largest gain": (a) => a["score"] - a["score after"],
  "largest loss": (a) => a["score after"] - a["score"],
  "best after": (a) => -a["score after"],
  "worst after": (a) => a["score after"],
};
function showPairs(box) {
  const pairs = [...data[box.dataset.run].pairs];
  const order = orders[box.querySelector("select").value];
  if (order) pairs.sort((a, b) => order(a) - order(b));
  const list = box.querySelector(".list");
  list.replaceChildren();
  for (const pair of pairs.slice(0, Number(box.dataset.count))) {
    const row = add(list, "div", "pair");
    add(row, "div", "", pair.prompt);
    for (const side of [["before", "score"], ["after", "score after"]]) {
      const cell = add(row, "div", "", pair[side[0]]);
      add(cell, "span", "score", `\n${side[0]}: ${format(pair[side[1]])}`);
    }
  }
}
for (const box of document.querySelectorAll(".pairs")) {
  const select = box.querySelector("select");
  for (const name of Object.keys(orders)) add(select, "option", "", name);
  select.addEventListener("change", () => showPairs(box));
  box.querySelector("button").addEventListener("click", () => {
    box.dataset.count = Number(box.dataset.count) + 20;
    showPairs(box);
  });
  showPairs(box);
}

// The token microscope. Blue is above the neutral value, red below.
function tokenColor(x, neutral, scale) {
  if (x === null || x === undefined) return "transparent";
  const strength = Math.min(1, Math.abs(x - neutral) / scale);
  return x >= neutral ? `rgba(31, 119, 180, ${0.75 * strength})` : `rgba(214, 39, 40, ${0.75 * strength})`;
}
function showTokens(box) {
  const tokens = data[box.dataset.run].tokens;
  const [update, column] = [...box.querySelectorAll("select")].map((select) => select.value);
  const neutral = column === "ratio" ? 1 : 0;
  const lines = tokens.lines.filter((line) => String(line.update) === update);
  // The scale is the same for all updates, so that colors can be compared. A few outliers may saturate.
  const sizes = tokens.lines.flatMap((line) => line[column]).filter((x) => x !== null);
  const sorted = sizes.map((x) => Math.abs(x - neutral)).sort((a, b) => a - b);
  const scale = sorted[Math.floor(0.98 * (sorted.length - 1))] || 1;
  box.querySelector(".scale").textContent =
    `blue: above ${neutral}, red: below; the full color is ${format(scale)} or more from ${neutral}`;
  const list = box.querySelector(".list");
  list.replaceChildren();
  let prompt = null;
  for (const line of lines) {
    const row = add(list, "div", "line");
    if (line.prompt !== prompt) add(row, "span", "score", line.prompt);
    else add(row, "span", "score", "(the same prompt) ");
    prompt = line.prompt;
    line.tokens.forEach((text, i) => {
      const token = add(row, "span", "token", text);
      token.style.background = tokenColor(line[column][i], neutral, scale);
      const numbers = tokens.columns.map((name) => `${name.padEnd(10)}${format(line[name][i])}`);
      token.dataset.tip = [JSON.stringify(text), ...numbers].join("\n");
    });
    const advantages = new Set(line.advantage || []);
    const one = advantages.size === 1 ? `, advantage ${format(line.advantage[0])}` : "";
    add(row, "span", "score", `  score ${format(line.score)}${one}`);
  }
}
for (const box of document.querySelectorAll(".tokens")) {
  const tokens = data[box.dataset.run].tokens;
  const [updates, columns] = box.querySelectorAll("select");
  for (const update of new Set(tokens.lines.map((line) => line.update))) add(updates, "option", "", update);
  for (const column of tokens.columns) add(columns, "option", "", column);
  if (tokens.columns.includes("reward")) columns.value = "reward";
  updates.addEventListener("change", () => showTokens(box));
  columns.addEventListener("change", () => showTokens(box));
  showTokens(box);
}
function showTip(event) {
  const text = event.target.dataset && event.target.dataset.tip;
  tip.style.display = text ? "block" : "none";
  if (!text) return;
  tip.textContent = text;
  tip.style.left = Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8) + "px";
  const below = event.clientY + 16;
  const fits = below + tip.offsetHeight < innerHeight;
  tip.style.top = (fits ? below : event.clientY - tip.offsetHeight - 10) + "px";
}
document.addEventListener("mouseover", showTip);
document.addEventListener("click", showTip);
"""


TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<link rel="icon" href="data:,">
<style>{{ style | safe }}</style>
{{ bokeh | safe }}
</head>
<body>
<h1>{{ title }}</h1>
<nav><a href="#findings">Findings</a><a href="#answers">Before and after</a><a href="#curves">Curves</a>
{% if runs | selectattr("tokens") | list %}<a href="#tokens">Tokens</a>{% endif %}
{% if views | selectattr("over_time") | list %}<a href="#time">Over time</a>{% endif %}</nav>
<table>
<tr><th>run<th>script<th>recipe<th>seed<th>updates<th>command
{% for run in runs %}
<tr><td><b style="color: {{ colors[run.name] }}">&#9632;</b> {{ run.name }}<td>{{ run.script }}.py
<td>{{ run.args.recipe }}<td>{{ run.args.seed }}<td>{{ run.metrics[-1]["update"] }}
<td><code>{{ (run.about.command or []) | join(" ") }}</code>
{% endfor %}
</table>

<details><summary>All flags</summary>
{% for run in runs %}
<p class="note">{{ run.name }}{% if run.band_args %}; bold: other than in the healthy runs{% endif %}</p>
<p class="flags">{% for name, value in run.args.items() %}
{% set differs = run.band_args and name in run.band_args and run.band_args[name] != value %}
<code{% if differs %} class="differs"{% endif %}>--{{ name | replace("_", "-") }} {{ value }}</code>
{% endfor %}</p>
{% endfor %}
</details>

<h2 id="findings">Findings</h2>
<p class="note">The most direct evidence comes first. What comes after it may only follow from it.</p>
{% for view in views %}
{% if runs | length > 1 %}<h3>{{ view.run.name }}</h3>{% endif %}
{% if not view.findings %}
{% if view.run.metrics | length < 10 %}
<p class="note">Too few updates to judge: {{ view.run.metrics | length }}.</p>
{% else %}<p class="healthy">Nothing looks wrong in the numbers. Read the answers all the same.</p>{% endif %}

{% endif %}
{% for finding in view.findings %}
<div class="finding"><b>{{ finding.title }}.</b> {{ finding.evidence }}
{% if finding.causes %}<br>Likely causes:
<ol>{% for cause in finding.causes %}<li>{{ cause }}{% endfor %}</ol>{% endif %}
<span class="note">See docs/debugging.md#{{ finding.entry }}</span></div>
{% endfor %}
{% endfor %}

<h2 id="answers">Before and after</h2>
{% for view in views %}
{% if runs | length > 1 %}<h3>{{ view.run.name }}</h3>{% endif %}
<div class="columns">
{% if view.comparison %}
<div><p class="note">{{ view.run.evaluation.n }} held-out prompts; {{ view.run.evaluation.decoding }}</p>
<table><tr><th>metric<th>before<th>after
{% for name, before, after in view.comparison %}
<tr><td>{{ name }}<td class="number">{{ "%.3f" | format(before) }}
<td class="number">{{ "%.3f" | format(after) }}
{% endfor %}
</table></div>
{% endif %}
{% for title, columns, rows in view.tables %}
<div><p class="note">{{ title }}</p>
<table><tr>{% for column in columns %}<th>{{ column }}{% endfor %}
{% for row in rows %}
<tr>{% for x in row %}<td{% if x is number %} class="number"{% endif %}>{{ as_text(x) }}{% endfor %}
{% endfor %}
</table></div>
{% endfor %}
{% if view.words %}
<div><p class="note">Words that spread: in how many responses they are</p>
<table><tr><th>word<th>before<th>after
{% for word, before, after in view.words %}
<tr><td>{{ word }}<td class="number">{{ "%.1f" | format(100 * before) }} %
<td class="number">{{ "%.1f" | format(100 * after) }} %
{% endfor %}
</table></div>
{% endif %}
</div>
<div class="charts">
{% for name in view.histograms %}<div class="chart">{{ divs[name] | safe }}</div>{% endfor %}
</div>
{% if view.run.pairs %}
<h3>Answers to the same prompts</h3>
<p class="note">{{ [view.run.pairs | length, max_pairs] | min }} of {{ view.run.pairs | length }}</p>
<div class="pairs" data-run="{{ loop.index0 }}" data-count="8">Sort by <select></select>
<div class="list"></div><button>Show more</button></div>
{% elif not view.tables and not view.comparison %}
<p class="note">There is no evaluation: the run stopped before its end, or is still going on.</p>
{% endif %}
{% endfor %}

<h2 id="curves">Curves</h2>
<p>{% for run in runs %}<b style="color: {{ colors[run.name] }}">&#9632;</b> {{ run.name }} {% endfor %}
{% if runs[0].band %}<b style="color: #bbbbbb">&#9632;</b> 5 to 95 % of ten healthy runs of
{{ runs[0].script }}.py {{ runs[0].args.recipe }}, with its default flags (not for all metrics).{% endif %}
 Dashed line: target.</p>
{% for group, charts in groups if charts %}
<h3>{{ group }}</h3>
<div class="charts">
{% for name, text in charts %}<div class="chart">{{ divs[name] | safe }}<p>{{ text }}</p></div>{% endfor %}
</div>
{% endfor %}

{% if runs | selectattr("tokens") | list %}
<h2 id="tokens">Tokens</h2>
<p class="note">Responses that the policy learned from, token by token. Point at a token or tap it to see its
numbers. score: what the response was paid in the end. reward (PPO): the KL penalty, and on the last token the
score. KL: log-probability minus the reference's. value, return (PPO): what the critic expected, and what
came. advantage: in RLOO and GRPO, one number per response. logprob: under the policy that is about to be
trained. ratio, entropy: after the update.</p>
{% for view in views %}
{% if runs | length > 1 %}<h3>{{ view.run.name }}</h3>{% endif %}
{% if view.run.tokens %}
<div class="tokens" data-run="{{ loop.index0 }}">Update <select></select> color by <select></select>
<span class="note scale"></span><div class="list"></div></div>
{% else %}
<p class="note">This run has no tokens.jsonl.</p>
{% endif %}
{% endfor %}

{% endif %}
{% if views | selectattr("over_time") | list %}
<h2 id="time">The same prompts over time</h2>
{% for view in views %}
{% if runs | length > 1 %}<h3>{{ view.run.name }}</h3>{% endif %}
{% for prompt, rows in view.over_time %}
<h3>{{ prompt }}</h3>
<table>{% for update, text, score in rows %}
<tr><td class="number">{{ update }}<td class="text">{{ text }}
<td class="number">{% if score is not none %}{{ "%.2f" | format(score) }}{% endif %}
{% endfor %}</table>
{% endfor %}
{% endfor %}
{% endif %}
<div id="tip"></div>
<script type="application/json" id="data">{{ data | safe }}</script>
{{ script | safe }}
<script>{{ program | safe }}</script>
</body>
</html>
"""


# ---- Command line ------------------------------------------------------------------------------------------


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    parser.add_argument(
        "--output", type=Path, help="the page; default: report.html in the first run's folder"
    )
    parser.add_argument("--diagnose", action="store_true", help="print the findings, and write no page")
    parser.add_argument(
        "--unipo", type=Path, help="write the first run for github.com/poloclub/unipo, and no page"
    )
    flags = parser.parse_args(argv)
    runs = [read_run(folder) for folder in flags.runs]
    if flags.unipo is not None:
        if runs[0].script not in ALGORITHMS:
            raise SystemExit(f"--unipo: {runs[0].name} is no run of an RL script")
        flags.unipo.write_text(json.dumps(to_unipo(runs[0])))
        print(f"wrote {flags.unipo}")
        return
    if flags.diagnose:
        print("\n\n".join(describe_findings(run) for run in runs))
        return
    output = flags.output or runs[0].folder / "report.html"
    text = page(runs)
    output.write_text(text)
    size = len(text.encode())
    if size > MAX_BYTES:
        print(f"{output} has {size / 1e6:.1f} MB: compare fewer runs at a time", file=sys.stderr)
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
