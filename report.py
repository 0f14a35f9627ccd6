"""Show what a run did, on one HTML page: findings, answers before and after, curves, numbers per token.

    python report.py runs/ppo_sentiment/tiny-s1-20260101-120000    # writes report.html into that folder
    python report.py RUN1 RUN2 --output compare.html               # several runs, their curves overlaid
    python report.py RUN --diagnose                                # only print the findings

A run is a folder that one of the scripts wrote. The page is one file that needs no network. If
reference_bands.json next to this file knows the recipe, a gray band behind the curves shows healthy runs with
other seeds.
"""

import argparse
import gzip
import json
import math
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median, stdev

ROOT = Path(__file__).resolve().parent
BANDS = ROOT / "reference_bands.json"
SHORT = 10  # a run of fewer updates is too short to judge

# What the charts show, in this order: group -> metric -> (title with unit, what to look for).
METRICS = {
    "Does it learn?": {
        "objective/scores": ("score per response", "After clipping and penalties. It rises and levels off."),
        "judge/scores": ("gold score", "If it falls while the score rises, the policy exploits the reward."),
        "objective/kl": ("KL to the reference, nats per response", "0 at first, never clearly negative."),
        "objective/kl_coef": ("KL coefficient", "With a target, it rises while the KL is above it."),
        "policy/entropy_avg": ("entropy, nats per token", "Near 0, all responses are alike."),
        "frac_reward_zero_std": ("groups with equal rewards, fraction", "These prompts teach nothing."),
        "loss": ("loss, nats per token or pair", "It falls and levels off."),
        "accuracy": ("accuracy on the batch", ""),
        "mean_token_accuracy": ("accuracy of the next token", ""),
    },
    "How large are the steps?": {
        "val/ratio": ("probability ratio, new / old", "Near 1. A few large ratios can hide many small ones."),
        "val/ratio_var": ("variance of the ratio", "Large values: the policy moves too far in one update."),
        "policy/approxkl_avg": ("approximate KL, nats per token", "New to old policy of one update."),
        "policy/clipfrac_avg": ("tokens or responses clipped, fraction", "0: the policy does not move."),
        "loss/policy_avg": ("policy loss", "Near 0, because advantages are. Its size says little."),
        "loss/value_avg": ("value loss", "It falls at first, and rises again when scores spread."),
        "grad_norm": ("gradient norm before clipping", "Single peaks are harmless, a steady rise is not."),
        "lr": ("learning rate", ""),
    },
    "What do the responses look like?": {
        "completions/mean_length": ("tokens per response", "A steady rise: the reward may pay for length."),
        "completions/clipped_ratio": ("responses without a stop token, fraction", ""),
        "completions/distinct_2": ("different word pairs, fraction", "If it falls, responses become alike."),
        "env/reward_std": ("standard deviation of the reward", "0: there is nothing to learn from."),
    },
    "How does it use its tools?": {
        "tools/call_frequency": ("calls per trajectory", "It rises if the tools help. 0: they are avoided."),
        "tools/failure_frequency": ("calls that fail, fraction", "It falls. 0 too if there are no calls."),
        "tools/error_frequency": (
            "calls with an exception in the tool, fraction",
            "Near 0 if the tool works.",
        ),
        "tools/timeout_frequency": ("calls that took too long, fraction", "0 if the tool works."),
        "tools/turns": ("turns per trajectory", ""),
    },
    "Why do trajectories end?": {
        "completions/end_answer": ("an answer, fraction", "It rises."),
        "completions/end_environment": ("ended by the environment, fraction", ""),
        "completions/end_no_turn": ("no turn left, fraction", "If it rises, --max-turns may be too low."),
        "completions/end_no_token": (
            "no token left, fraction",
            "If it rises, --response-length may be too low.",
        ),
        "completions/end_unfinished_call": ("a call that is not finished, fraction", "It falls."),
    },
    "Do rollout and update agree?": {
        "sampling/logprob_gap_mean": ("log-probability gap, mean, nats per token", "fp32: 1e-6, bf16: 0.01"),
        "sampling/logprob_gap_max": ("log-probability gap, largest, nats per token", ""),
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
    pairs: list  # of dict: set, prompt, before, score, after, score after
    tokens: list  # of dict: update, prompt, ids, and lists with one number per token
    band: dict = field(default_factory=dict)  # metric -> update, 5, 50, 95: lists, of healthy runs
    band_args: dict = field(default_factory=dict)  # the flags of these runs

    def by_update(self, metric):
        """-> dict: update -> value, without values that are missing or not finite"""
        values = {row["update"]: number(row.get(metric)) for row in self.metrics}
        return {update: x for update, x in values.items() if x is not None}

    def values(self, metric):
        return list(self.by_update(metric).values())


def read_lines(folder, name):
    """The rows of a file of JSON lines, perhaps compressed; [] if there is none.

    It skips a last line that is still being written, and says so of any other that is not JSON.
    """
    rows = []
    for path, opener in ((folder / name, open), (folder / f"{name}.gz", gzip.open)):
        if path.exists():
            with opener(path, "rt", encoding="utf-8") as file:
                lines = [line for line in file if line.endswith("\n")]
            for i, line in enumerate(lines, 1):
                try:
                    rows.append(json.loads(line))
                except json.JSONDecodeError as error:
                    print(f"{path}, line {i}, is left out: {error}", file=sys.stderr)
            break
    return rows


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def read_run(folder):
    """A run folder -> Run"""
    folder = Path(folder).resolve()
    metrics = read_lines(folder, "metrics.jsonl")
    if not metrics:
        raise SystemExit(f"{folder}: no metrics.jsonl. A run is a folder that one of the scripts wrote")
    about = read_json(folder / "args.json")
    args = about.get("args", {})
    script = Path(about.get("command", ["run"])[0]).stem
    tokens = read_lines(folder, "tokens.jsonl")
    clip = args.get("score_clip") or math.inf
    for row in tokens:
        if "KL" in row:  # the runs in results/ are of an earlier edition
            row["kl"] = row.pop("KL")
        # Earlier versions did not save what was paid. It is known without a penalty for a missing EOS, and in
        # results/, where rows have the texts of tokens: there the score is after the penalty.
        if args.get("missing_eos_penalty") is None or "tokens" in row:
            row.setdefault("score paid", max(-clip, min(clip, row["score"])))
    band = read_json(BANDS).get(f"{script} {args.get('recipe')}", {})
    return Run(
        folder=folder,
        name=f"{folder.parent.name}/{folder.name}",
        script=script,
        args=args,
        about=about,
        metrics=metrics,
        evaluation=read_json(folder / "evaluation.json"),
        pairs=to_pairs(read_lines(folder, "evaluation_samples.jsonl")),
        tokens=tokens,
        band=band.get("metrics", {}),
        band_args=band.get("args", {}),
    )


def to_pairs(rows):
    """Rows of evaluation_samples.jsonl -> dicts: set, prompt, before, score, after, score after"""
    pairs = []
    for row in rows:
        if isinstance(row["before"], dict):  # grpo_math.py: several responses per task
            before, after = row["before"], row["after"]
            reward = next(name for name in before if name.startswith("rewards/"))
            sides = zip(before["responses"], before[reward], after["responses"], after[reward])
        else:
            sides = [(row["before"], row["score"], row["after"], row["score after"])]
        for old, score, new, score_after in sides:
            pair = {"set": row.get("set", "held-out"), "prompt": prompt_of(row)}
            pair |= {"before": old, "score": number(score)}
            pairs.append(pair | {"after": new, "score after": number(score_after)})
    return pairs


def prompt_of(row):
    """The prompt, whatever the script calls it."""
    return next((row[name] for name in ("prompt", "task", "last") if name in row), "")


def number(x):
    """A float, or None for what is none: missing or not finite."""
    return float(x) if isinstance(x, (int, float)) and math.isfinite(x) else None


# ---- Findings ----------------------------------------------------------------------------------------------
#
# Each check names one of the committed faults that no other check names, or something that a user would miss;
# results/diagnose/checks.json has the table. The limits are round numbers, chosen on the runs in results/,
# which are tiny models in fp32. docs/debugging.md says how often the findings are right.


@dataclass
class Finding:
    """Something that looks wrong."""

    title: str
    evidence: str
    causes: list  # the likeliest first
    entry: str  # of docs/debugging.md


CHECKS = {}  # function -> title, causes, entry; in the order in which findings are shown


def check(entry, title, *causes):
    """Make a function a check: it gets a run and returns its evidence as a text, or None if nothing is wrong.

    It may also return (evidence, causes), with causes that come before those of the decorator.
    """

    def register(function):
        CHECKS[function] = (title, causes, entry)
        return function

    return register


def run_check(function, run):
    """-> Finding, or None if nothing is wrong"""
    title, causes, entry = CHECKS[function]
    result = function(run)
    if result is None:
        return None
    evidence, first_causes = result if isinstance(result, tuple) else (result, ())
    return Finding(title, evidence, [*first_causes, *causes], entry)


def find_problems(run):
    """What looks wrong in a run, the most direct evidence first. -> list of Finding"""
    found = [finding for function in CHECKS if (finding := run_check(function, run)) is not None]
    if [finding.entry for finding in found] == ["first-update"]:
        if all(distance_from_band(run, metric) < 2 for metric in different_at_first(run)):
            return []  # one update may differ by chance, if nothing looks wrong later
    flags = unusual_flags(run)
    is_own = any(flag.endswith(OWN) for flag in flags)  # other data, models or rewards may need other flags
    if found and flags and not is_own:  # a run that fails with other flags most likely fails because of them
        evidence = "Something else looks wrong too. Check these flags first."
        place = 1 if found[0].entry == "flat-reward" else 0
        causes = [f"{flag} is {own}, healthy runs: {usual}" for flag, (own, usual) in flags.items()][:3]
        found.insert(place, Finding("Flags differ from those of healthy runs", evidence, causes, "flags"))
    return found


def unusual_flags(run):
    """Flags that differ from those of the healthy runs. -> dict: flag -> (its value, that of healthy runs)"""
    names = sorted(run.args.keys() & run.band_args.keys() - MAY_DIFFER)
    if not run.args.get("lora_r") and not run.band_args.get("lora_r"):  # no adapter
        names = [name for name in names if not name.startswith("lora_")]
    return {
        f"--{name.replace('_', '-')}": (run.args[name], run.band_args[name])
        for name in names
        if run.args[name] != run.band_args[name]
    }


MAY_DIFFER = {
    "seed", "output_dir", "resume", "num_sample_generations", "save_every", "keep_checkpoints", "log_with",
    "judge_model_path", "judge_model", "judge_url", "judge_fn", "num_eval_prompts", "num_eval_samples",
    "num_samples"
}  # fmt: skip
OWN = ("dataset-name", "-path", "reward-fn")  # ends of the flags that name data, models and rewards


def skipped_checks(run):
    """What could not be checked, and why: one line, or "" if everything was."""
    skipped = []
    if not has_flags_of_band(run):
        if not run.band:
            reason = "there are none of this recipe"
        elif unusual_flags(run):
            reason = f"their flags differ: {', '.join(unusual_flags(run))}"
        else:
            reason = "they have one process"
        skipped.append(f"the comparison with healthy runs ({reason})")
    if run.values("objective/scores"):  # of the RL scripts
        if not run.tokens:
            skipped.append("the numbers per token (none are saved)")
        elif not saved_rows(run, "score paid"):
            skipped.append("the rewards (what was paid is not saved)")
        elif run.args.get("whiten_rewards") and saved_rows(run, "reward"):
            skipped.append("the rewards (they are whitened)")
        if not run.pairs:
            skipped.append("the held-out prompts (no evaluation yet)")
        judges = [x for name, x in run.args.items() if name.startswith("judge")]
        if judges and not any(judges):
            skipped.append("whether a judge agrees (there is none)")
    return f"Not checked: {'; '.join(skipped)}." if skipped else ""


def part_mean(values, start, end):
    """Mean of a part of a list, by fractions of its length. At least one value."""
    first = min(int(start * len(values)), len(values) - 1)
    last = max(first + 1, math.ceil(end * len(values)))
    return mean(values[first:last])


def tenths(values):
    """The means of ten parts of a list."""
    return [part_mean(values, i / 10, (i + 1) / 10) for i in range(10)]


def early_and_late(run, metric):
    """Means over the first 5 % and the last 20 % of a run. -> two floats; nan without such a metric"""
    values = run.values(metric) or [math.nan]
    return part_mean(values, 0, 0.05), part_mean(values, 0.8, 1)


# ---- Findings: the saved tokens ----------------------------------------------------------------------------
#
# The run folder has the numbers of a few responses. From them, rewards and advantages are computed again.


ON_PURPOSE = "you changed this on purpose, as “Lines to change” in the docs does: then it is not a bug"


def saved_rows(run, *columns):
    """The saved responses that have these columns."""
    return [row for row in run.tokens if all(name in row for name in columns)]


def saved_groups(run, *columns):
    """RLOO and GRPO: whole groups of responses to one prompt. -> list of lists of rows"""
    size = run.args.get("rloo_k") or run.args.get("num_generations")
    groups = {}
    for row in saved_rows(run, *columns):
        groups.setdefault((row["update"], prompt_of(row)), []).append(row)
    return [rows for rows in groups.values() if len(rows) == size]


@check(
    "flat-reward",
    "All scores are equal",
    "the reward function returns the same number for every response, or always misses what it looks for",
    "scores are clipped, rounded or parsed so that no difference is left",
)
def check_variance(run):
    """Without a difference between scores, no response is better than another.

    If healthy runs differ from this one already in the first update, that tells more.
    """
    stds = run.values("env/reward_std")
    if stds and mean(x < 1e-6 for x in stds) > 0.5 and not different_at_first(run):
        return f"In {mean(x < 1e-6 for x in stds):.0%} of the updates, all responses have the same score."


@check(
    "masks",
    "Tokens of the responses are masked out",
    "the mask leaves out the last token, or the length does not count it",
    "the mask is made of token ids (pad = EOS), or is of other tokens or rows",
)
def check_masks(run):
    """PPO: a token of a response with a KL, return and advantage of exactly 0 is outside of the mask."""
    rows = saved_rows(run, "kl", "return", "advantage")
    rows = [row for row in rows if row["update"] > 1]  # in update 1, every KL is 0
    masked = [row for row in rows if row["kl"][-1] == row["return"][-1] == row["advantage"][-1] == 0]
    if len(masked) >= max(2, 0.25 * len(rows)):
        return f"The last token of {len(masked)} of {len(rows)} saved responses."


@check(
    "rollout-and-update-disagree",
    "Rollout and update compute different distributions",
    "sampling and scoring use another temperature, or only one of them uses top-k or forbids tokens",
    "positions, padding or the attention mask differ, or the cache holds wrong keys",
    "dropout is on in one of them",
)
def check_sampling(run):
    gaps = run.values("sampling/logprob_gap_mean")
    # Products may be in bf16 or weights in 8 bits. The dtype "auto" depends on the machine.
    rounds_more = run.args.get("dtype") != "float32" or run.args.get("load_in_8bit")
    limit = 0.1 if rounds_more else 0.001
    if not gaps or max(gaps) <= limit:
        return None
    causes = []
    if gaps[0] > 1:
        causes = ["other rows or tokens are scored than were sampled: another order, or off by one"]
    if gaps[0] <= limit:  # no difference in the first update
        causes = ["the weights used for generation are older copies of those that are trained"]
    return (
        f"Log-probabilities of the sampled tokens differ by up to {max(gaps):.3g} nats per token (mean of a "
        f"batch), {gaps[0]:.3g} in the first update. Above {limit:g} it is more than rounding.",
        causes,
    )


@check(
    "token-rewards",
    "Rewards are not the KL penalty and the score",
    "the KL penalty is computed from other log-probabilities, or with another coefficient",
    ON_PURPOSE,
)
def check_token_rewards(run):
    """PPO pays each token -kl_coef * KL, and the last token the score too."""
    if run.args.get("whiten_rewards"):
        return None
    coefficients = run.by_update("objective/kl_coef")
    rows = saved_rows(run, "reward", "kl", "score paid")
    rows = [row for row in rows if row["update"] in coefficients]
    last, early = 0, Counter()  # responses with a wrong last reward; cause -> responses with other wrong ones
    for row in rows:
        coefficient = coefficients[row["update"]]
        # What a token is paid apart from its KL: 0, and the score at the end.
        rest = [reward + coefficient * kl for reward, kl in zip(row["reward"], row["kl"])]
        tolerance = 0.01 + 0.001 * coefficient
        if any(abs(x) > tolerance for x in rest[:-1]):
            early[cause_of_rewards(row["reward"][:-1], row["kl"][:-1], tolerance)] += 1
        last += abs(rest[-1] - row["score paid"]) > tolerance
    if last + early.total() < max(1, 0.1 * len(rows)):
        return None
    causes = [cause for cause, _ in early.most_common(1)]
    if last:
        causes.append("the score is not put on the last token of a response: on padding, off by one, or lost")
    return (
        f"Of {len(rows)} saved responses, {last} have a last token that is not paid the score, and "
        f"{early.total()} have earlier tokens that are not paid -kl_coef * KL.",
        causes,
    )


def cause_of_rewards(rewards, kl, tolerance):
    """Why tokens before the last one are not paid -kl_coef * KL. -> str"""
    spread = sum(x**2 for x in kl)
    slope = sum(x * reward for x, reward in zip(kl, rewards)) / spread if spread else 0.0
    if all(abs(reward - slope * x) < tolerance for reward, x in zip(rewards, kl)):
        if slope > 0:
            return "the KL penalty has the wrong sign: tokens that are rare under the reference are paid"
        return "the KL penalty has another coefficient"
    if spread and len(rewards) > 1 and max(rewards) - min(rewards) < 0.0005:
        return "the KL of the whole response is charged to each of its tokens"
    return "the score is paid on more tokens than the last one"


@check(
    "token-advantages",
    "Advantages do not follow from rewards and values",
    "the recursion of GAE is wrong: its direction, a token too early or late, gamma or lambda",
    "advantages have the wrong sign, or belong to other tokens or responses",
    "advantages are whitened over the wrong tokens: of one response, of a minibatch, or with padding",
    "you replaced GAE on purpose: check that the KL penalty is still part of the advantages",
)
def check_token_advantages(run):
    """PPO: advantages must follow from rewards and values by GAE. They were whitened: an affine function."""
    gamma, lam = run.args.get("gamma"), run.args.get("lam")
    updates = {}
    for row in saved_rows(run, "reward", "value", "advantage"):
        updates.setdefault(row["update"], []).append(row)
    wrong = []  # for each saved update
    for rows in updates.values():
        ours = [x for row in rows for x in gae(row["reward"], row["value"], gamma, lam)]
        theirs = [x for row in rows for x in row["advantage"]]
        if len(ours) > 2 and max(ours) - min(ours) > 0.001:
            slope, error = fit(ours, theirs)
            wrong.append(slope <= 0 or error > 0.02 + 0.01 * max(abs(x) for x in theirs))
    if sum(wrong) > len(wrong) / 2:
        return f"In {sum(wrong)} of {len(wrong)} saved updates, GAE gives other advantages."


def gae(rewards, values, gamma, lam):
    """Generalized advantage estimates of one response. -> list of float"""
    advantage, next_value, advantages = 0.0, 0.0, []
    for reward, value in zip(reversed(rewards), reversed(values)):
        advantage = reward + gamma * next_value - value + gamma * lam * advantage
        next_value = value
        advantages.append(advantage)
    return advantages[::-1]


def fit(x, y):
    """Least squares: y = slope * x + offset. Two lists -> slope, largest error"""
    x_mean, y_mean = mean(x), mean(y)
    spread = sum((a - x_mean) ** 2 for a in x)
    slope = sum((a - x_mean) * (b - y_mean) for a, b in zip(x, y)) / spread if spread > 0 else 0.0
    return slope, max(abs(slope * (a - x_mean) + y_mean - b) for a, b in zip(x, y))


@check(
    "same-responses",
    "The responses to a prompt are the same",
    "the responses of a group are sampled with the same random numbers",
    "the rows of a group are copies of one response",
)
def check_same_responses(run):
    groups = saved_groups(run)
    alike = [rows for rows in groups if len({str(row.get("ids") or row["tokens"]) for row in rows}) == 1]
    # The probability of the same text again, if it is sampled.
    log_chance = sum((len(rows) - 1) * sum(rows[0]["logprob"]) for rows in alike)
    if len(groups) >= 3 and len(alike) > 0.8 * len(groups) and log_chance < math.log(1e-3):
        return f"In {len(alike)} of {len(groups)} saved groups, which is no coincidence by their probability."


@check(
    "group-advantages",
    "Advantages do not follow from the rewards of the group",
    "groups are mixed up: rows are grouped or ordered in two different ways",
    "rewards or advantages are of other responses, or have the wrong sign",
    "rewards are clipped, whitened or penalized in another way, or have another KL penalty",
    ON_PURPOSE,
)
def check_group_advantages(run):
    """RLOO and GRPO: compute the advantages of a group again from its scores and KL."""
    in_reward = run.args.get("kl_estimator") == "k1"
    coefficient = run.args["kl_coef"] if in_reward else 0.0
    wrong, off_center, total = 0, 0, 0  # numbers of groups
    for rows in saved_groups(run, "score paid"):
        rewards = [row["score paid"] - coefficient * sum(row.get("kl", [])) for row in rows]
        saved = [row["advantage"][0] for row in rows]
        if max(rewards) - min(rewards) < 0.01 and max(abs(x) for x in saved) < 0.01:
            continue  # all rewards are equal
        slope, error = fit(rewards, saved)
        tolerance = 0.005 * max(abs(x) for x in saved)
        is_wrong = error > tolerance or (slope <= 0 and max(rewards) - min(rewards) > 0.01)
        wrong += is_wrong
        off_center += not is_wrong and abs(mean(saved)) > tolerance
        total += 1
    if off_center > total / 2:
        causes = ["the baseline is missing, or it is the mean of other responses than those of the group"]
        return f"In {off_center} of {total} saved groups, they do not sum to 0.", causes
    if wrong + off_center > total / 2:
        return f"In {wrong + off_center} of {total} saved groups."


# ---- Findings: metrics that contradict each other ----------------------------------------------------------


@check(
    "not-finite",
    "Some numbers are not finite",
    "the learning rate is too high",
    "a product overflows: use --dtype float32, and look for logarithms of 0",
    "a reward function returns nan",
)
def check_numbers(run):
    bad = Counter()
    for row in run.metrics:
        bad.update(metric for metric, x in row.items() if isinstance(x, float) and not math.isfinite(x))
    if bad:
        counts = ", ".join(f"{metric} in {count}" for metric, count in bad.most_common(4))
        return f"Of {len(run.metrics)} updates: {counts}."


@check(
    "kl-is-zero",
    "The KL is exactly 0",
    "the reference is the trained policy itself: the same object, or the adapter is left on",
    "the policy that generates does not get the new weights",
)
def check_kl_is_zero(run):
    """Sampled tokens have a KL of exactly 0 only under the same model."""
    values = [abs(x) for x in run.values("objective/kl")[1:]]
    if len(values) >= 5 and mean(x < 1e-6 for x in values) > 0.8 and not does_not_move(run):
        return f"In {mean(x < 1e-6 for x in values):.0%} of the updates after the first one."


def score_gain(run):
    """How much the score rose, in standard deviations of the reward at the start. nan without scores."""
    early, late = early_and_late(run, "objective/scores")
    spread = run.values("env/reward_std") or [math.nan]
    return (late - early) / max(part_mean(spread, 0, 0.1), 1e-8)


def rises(run):
    return score_gain(run) >= 0.15


def held_out_gains(run):
    """Score after - score before of each held-out response that has both. -> list of float

    Not of the harder tasks of grpo_math.py, nor of greedy decoding.
    """
    pairs = [pair for pair in run.pairs if pair["set"] == "held-out"]
    both = [pair for pair in pairs if None not in (pair["score"], pair["score after"])]
    return [pair["score after"] - pair["score"] for pair in both]


def clear_change(run):
    """1 if the score rose by more than two standard errors, -1 if it fell by as much, else 0.

    On held-out prompts if there are any, or else on the batches.
    """
    gains = held_out_gains(run)
    if len(gains) > 1:
        change, error = mean(gains), stdev(gains) / len(gains) ** 0.5
    else:
        change, error = rise_in_training(run, "objective/scores")
    return (change > 2 * error) - (change < -2 * error)


def rise_in_training(run, metric):
    """Late mean - early mean, and its standard error: of a short run, large. -> two floats"""
    values = run.values(metric)
    last = values[int(0.8 * len(values)) :]
    if len(last) < 2:
        return 0.0, math.inf
    early, late = early_and_late(run, metric)
    return late - early, stdev(last) * (1 / math.ceil(0.05 * len(values)) + 1 / len(last)) ** 0.5


def flat_or_falling(run):
    """The score in words if it does not rise, else None. Not in short runs, nor if healthy runs are alike."""
    gain = score_gain(run)
    if gain <= 0.15 and len(run.metrics) >= 10 and not is_in_band(run, "objective/scores"):
        early, late = early_and_late(run, "objective/scores")
        return (
            f"It was {early:.3g} in the first updates and {late:.3g} in the last fifth of the run "
            f"({gain:+.2f} standard deviations of the reward; a clear rise is more than 0.15)."
        )


WRONG_PLACE = "rewards or advantages reach the wrong responses or tokens: padding, off by one, another order"


@check(
    "score-falls",
    "The score falls",
    "the loss, the advantages or the logarithm of the ratio have the wrong sign",
    "the learning rate is too high: the policy has come apart (look at its entropy and KL)",
    WRONG_PLACE,
)
def check_score_falls(run):
    if clear_change(run) == -1 and score_gain(run) < -0.15:
        return flat_or_falling(run)


@check(
    "responses-do-not-end",
    "Responses do not end",
    "the stop token is forbidden, cut off before it is counted, or another one than the model's",
    "the policy has not learned a stop token: it was masked out as padding in supervised training",
    "the response length is too short for this task",
)
def check_endings(run):
    early, late = early_and_late(run, "completions/clipped_ratio")
    wants_end = run.args.get("missing_eos_penalty") is not None or run.script == "grpo_math"
    if late > early + 0.3 or (wants_end and late > 0.5):
        causes = ["the reward grows with length, or an end is not rewarded"] if early < 0.5 else []
        return f"Without a stop token: {late:.0%} in the last fifth of the run, {early:.0%} at first.", causes


@check(
    "policy-does-not-move",
    "The policy does not move",
    "the policy is frozen, or the optimizer holds another copy: is the reference the same object?",
    "all advantages are 0",
)
def check_no_step(run):
    norms, stds = run.values("grad_norm") or [1.0], run.values("env/reward_std") or [1.0]
    if mean(x < 1e-9 for x in norms) >= 0.5 and mean(x == 0 for x in stds) <= 0.5:
        causes = ["the loss does not depend on the parameters: it is detached, or old and new are one tensor"]
        return f"The gradient is 0 in {mean(x < 1e-9 for x in norms):.0%} of the updates.", causes
    if does_not_move(run):
        causes = ["no step takes effect: the learning rate is 0, or gradients are zeroed before the step"]
        return "The approximate KL of new and old policy is 0 in every update.", causes


def does_not_move(run):
    """True if no optimizer step changes the policy. Only a second step per update can show it."""
    several_steps = run.args.get("num_ppo_epochs", 1) * run.args.get("num_mini_batches", 1) > 1
    return several_steps and max(run.values("policy/approxkl_avg"), default=1.0) < 1e-9


# ---- Findings: healthy runs with the same flags ------------------------------------------------------------

# What to look for if a metric differs from that of healthy runs. If several differ in the first update, the
# first of them decides, so those that a script computes first come first: a fault shows in all that follows.
MODEL_INPUT = (
    "the model's input: positions, padding, another template, prompts that are truncated or end in EOS"
)
STOPPING = ["the stop token: forbidden, another one, or cut off", MODEL_INPUT, "the limit of the length"]
SAMPLING = ["sampling: temperature, top-k, top-p or random seed", MODEL_INPUT]
DECODING = "the texts of responses: decoded with special tokens, with the prompt, or of other tokens"
REWARD_INPUT = [
    "the reward function's texts: truncated, without prompt or EOS, or the prompt or answer of another row",
    "the prompts: truncated, with another template, or other data",
    "the output of the reward model: another label, sign or scale, or read on padding",
]
OLD_LOGPROBS = "old and new log-probabilities are of different updates, rows or tokens"
STEP_SIZE = "the size of the steps: learning rate, epochs, minibatches, or gradients that are not zeroed"
CAUSES = {
    "lr": ["the learning rate or its schedule"],
    "completions/clipped_ratio": STOPPING,
    "completions/mean_length": STOPPING,
    "objective/entropy": SAMPLING,
    "completions/distinct_2": [DECODING, *SAMPLING],
    "intent": [
        "what the intent is compared with: the act of another turn or row",
        "the input of the intent classifier: another utterance, truncated, or without the utterance before",
        "the output of the intent classifier: another class, or a softmax over the wrong dimension",
    ],
    "meteor": ["what METEOR compares: another reference (an utterance too early, of another row)", DECODING],
    "env/reward_mean": REWARD_INPUT,
    "env/reward_std": REWARD_INPUT,
    "objective/scores": [
        "rewards or advantages reach the wrong responses or tokens: shuffled, off by one, wrong sign",
        "what is done to rewards: clipping, penalty for a missing end, a KL penalty that is too strong",
        "steps get lost: weights in bf16, frozen parameters, weight decay",
    ],
    "objective/kl": [
        "the reference: it follows the policy, or is another model",
        "a KL penalty that is too weak",
    ],
    "policy/entropy_avg": ["means over tokens: padding is counted, or tokens are left out", MODEL_INPUT],
    "loss/value_avg": [
        "returns: the score does not reach all tokens, or is paid more than once (its position, GAE, gamma)",
        "the value loss: its sign, its weight, its clipping, or a mean over other tokens",
    ],
    "loss/policy_avg": [
        "the sign of the loss or of the advantages, or min and max swapped in the clipped loss",
        "rewards or advantages of other tokens or responses, or whitened with padding",
        "the steps do not follow the gradient: weight decay, another optimizer, frozen parameters",
    ],
    "policy/approxkl_avg": [STEP_SIZE, OLD_LOGPROBS],
    "policy/clipfrac_avg": ["clipping: its range, min and max, or a ratio per response", STEP_SIZE],
    "grad_norm": ["the scale of the loss or of the advantages: a sum for a mean, or not whitened", STEP_SIZE],
}
# Metrics that can tell why a run leaves the band later.
LATER = ["lr", "objective/kl", "policy/approxkl_avg", "policy/clipfrac_avg", "objective/scores"]
LATER += ["loss/value_avg"]
# Metrics whose distance from the band in the later half says little.
NOT_COMPARED = {"loss/policy_avg", "grad_norm", "env/reward_mean"}


@check("first-update", "The first update is not like that of healthy runs")
def check_first_update(run):
    """All healthy runs start from the same models, so only chance tells their first updates apart."""
    different = different_at_first(run)
    if different:
        evidence = [against_band(run, metric, 1) for metric in different[:3]]
        return "; ".join(evidence) + ".", CAUSES[different[0]]


def different_at_first(run):
    """The metrics of CAUSES that are far outside the band in update 1, in this order. -> list of str"""
    different = []
    for metric in CAUSES if has_flags_of_band(run) else []:
        points = band_points(run, metric)
        if 1 in points and abs(points[1][3]) > 1:
            different.append(metric)
    return different


def has_flags_of_band(run):
    """True if there is a band, and its runs had the same flags. This run must have one process, as they had.

    Flags that only one side has do not count, nor do those of MAY_DIFFER.
    """
    is_comparable = run.band and run.args and run.about.get("world_size", 1) == 1
    return bool(is_comparable) and not unusual_flags(run)


def is_in_band(run, metric):
    """True if the metric is inside the band of healthy runs with the same flags, or close to it."""
    return metric in run.band and has_flags_of_band(run) and distance_from_band(run, metric) < 0.5


def band_points(run, metric):
    """A metric and the range of healthy runs, at the updates that both have.

    -> dict: update -> (value, 5 %, 95 %, by how many widths of this range it is outside; negative if below)
    """
    by_update, band = run.by_update(metric), run.band.get(metric, {"update": [], "5": [], "95": []})
    points = {}
    for update, low, high in zip(band["update"], band["5"], band["95"]):
        if update in by_update:
            value, width = by_update[update], max(high - low, 0.02 * abs(high), 1e-6)
            points[update] = value, low, high, (max(value - high, 0.0) - max(low - value, 0.0)) / width
    return points


def distance_from_band(run, metric):
    """How far a metric is outside of the band, in widths of it: the median of the later half. 0: inside"""
    distances = [abs(outside) for *_, outside in band_points(run, metric).values()]
    return median(distances[len(distances) // 2 :] or [0.0])


def against_band(run, metric, update):
    """The value of an update and the range of healthy runs, in words."""
    value, low, high, _ = band_points(run, metric)[update]
    usual = f"90 % of healthy runs: {low:.3g} to {high:.3g}" if low != high else f"healthy runs: {low:.3g}"
    return f"{metric} is {value:.3g} at update {update} ({usual})"


# ---- Findings: more metrics --------------------------------------------------------------------------------


@check(
    "groups-without-variance",
    "Most groups have equal rewards from the start",
    "the task is too hard or too easy for this policy, or the responses cannot be parsed",
    "the temperature is low, so the responses to a prompt are alike",
    "too few responses per prompt",
)
def check_equal_groups(run):
    equal = run.values("frac_reward_zero_std")
    if equal and part_mean(equal, 0, 0.2) > 0.6:
        return f"{part_mean(equal, 0, 0.2):.0%} in the first fifth of the run. Their advantages are 0."


@check(
    "judge-disagrees",
    "The score rises, and the judge disagrees",
    "the reward is not what was meant: a wrong label, sign, column or order of the texts",
    "the policy has found what the reward model gets wrong",
)
def check_judge(run):
    """A judge that the policy is not trained on, before and after on held-out prompts."""
    before, after = evaluate(run)
    if rises(run) and run.evaluation.get("n", 0) >= 50 and check_gold_score(run) is None:
        for name in judge_names(before):
            if after[name] <= before[name] - 0.1:
                return f"{name} fell from {before[name]:.2f} to {after[name]:.2f} on held-out prompts."


def evaluate(run):
    """The numbers of evaluation.json before and after. -> two dicts with the same keys"""
    before, after = run.evaluation.get("before", {}), run.evaluation.get("after", {})
    names = [name for name in before if None not in (number(before[name]), number(after[name]))]
    return {name: before[name] for name in names}, {name: after[name] for name in names}


def judge_names(metrics):
    """The metrics of evaluation.json that come from a judge: fractions."""
    return [name for name in metrics if name.startswith("judge") or name == "win rate"]


@check(
    "over-optimization",
    "The score rises, and the gold score falls",
    "the reward model is too weak: the policy has found what it gets wrong",
    "the policy is too far from its reference: raise the KL coefficient, or stop earlier",
    "the reward model reads something else than in its training: no prompt, no EOS, another template",
)
def check_gold_score(run):
    """Compare the end with the best tenth of the run. Noise alone must not look like a fall."""
    values = run.values("judge/scores")
    if len(values) < 10 or not rises(run):
        return None
    means = tenths(values)
    fall = max(means) - means[-1]
    steps = [after - before for before, after in zip(values, values[1:])]
    error = stdev(steps) / math.ceil(len(values) / 10) ** 0.5  # of the difference of two means
    # 4 standard errors, because the best one of many means is above the truth
    if fall > max(4 * error, 0.3 * (max(means) - means[0])):
        return f"The gold score reached {max(means):.3g} and ended at {means[-1]:.3g}."


@check(
    "training-prompts-only",
    "The score rises on the training prompts only",
    "the prompts are few, or always the same ones: the policy learns their answers by heart",
    "training and evaluation differ: another temperature, length, stop token or template",
)
def check_held_out(run):
    """What is learned on the training prompts must show on others."""
    gains = held_out_gains(run)
    if len(gains) < 50 or len(run.metrics) < 10 or not rises(run):
        return None
    rise, rise_error = rise_in_training(run, "env/reward_mean")
    gain, error = mean(gains), (stdev(gains) ** 2 / len(gains) + rise_error**2) ** 0.5
    if gain < 0.65 * rise and rise - gain > 3 * error:
        return f"There it rose by {rise:.3g}, on held-out prompts by {gain:.3g}."


@check(
    "kl-coefficient",
    "The KL coefficient moves the wrong way",
    "the error of the controller has the wrong sign",
    "the controller reads another KL than the one that is logged: per token, or of one process",
)
def check_coefficient(run):
    target, kl = run.args.get("kl_target"), run.by_update("objective/kl")
    coefficients = run.by_update("objective/kl_coef")
    against = []  # for each update: does the coefficient move against the error?
    for update in kl if target else []:
        if update in coefficients and update + 1 in coefficients:
            error, step = kl[update] / target - 1, coefficients[update + 1] - coefficients[update]
            if step != 0:
                against.append(error * step < 0)
    if len(against) >= 8 and mean(against) > 0.5:
        return f"Away from the target {target:g} in {mean(against):.0%} of the updates."


@check(
    "steps-too-large",
    "The steps are too large",
    "the learning rate is too high, or there are too many epochs per batch",
    "old log-probabilities are of another model, update, temperature, row or token",
    "advantages are not normalized, or min and max are swapped in the clipped loss",
)
def check_step_size(run):
    variance, clipped = run.values("val/ratio_var") or [0.0], run.values("policy/clipfrac_avg") or [0.0]
    if mean(variance) > 0.5 or mean(clipped) > 0.35:
        return (
            f"In the mean, {mean(clipped):.0%} of the ratios are clipped. Their variance is "
            f"{median(variance):.2g} (median), at most {max(variance):.2g}."
        )


@check(
    "outside-the-band",
    "Not like healthy runs with the same flags",
    "advantages, values, returns, loss, clipping or optimizer differ",
)
def check_band(run):
    """Metrics far from those of healthy runs in the later half, and the first one to leave their range."""
    if not has_flags_of_band(run):
        return None
    distances = {metric: distance_from_band(run, metric) for metric in CAUSES if metric not in NOT_COMPARED}
    farthest = max(distances, key=distances.get)
    if distances[farthest] < 0.75:
        return None
    evidence = against_band(run, farthest, max(band_points(run, farthest))) + "."
    left = []  # (update, metric)
    for metric in LATER if not different_at_first(run) else []:
        points = [(update, outside) for update, (*_, outside) in band_points(run, metric).items()]
        pairs = zip(points, points[1:])  # one point outside is chance
        left += [(update, metric) for (update, x), (_, y) in pairs if min(x, y) > 1 or max(x, y) < -1]
    if not left:
        return evidence
    update, metric = min(left, key=lambda pair: pair[0])
    return f"{evidence} {metric} was the first to leave their range, at update {update}.", CAUSES[metric]


@check(
    "score-does-not-rise",
    "The score does not rise",
    WRONG_PLACE,
    "the learning rate is too low, or the run too short",
    "the KL penalty is too strong: the policy stays at its reference",
)
def check_score(run):
    if clear_change(run) < 1 and check_score_falls(run) is None:
        return flat_or_falling(run)


@check(
    "score-does-not-rise",
    "The score rises less than with the usual flags",
    "the KL penalty is too strong",
    "the learning rate is too low, or the run too short",
)
def check_gain(run):
    """With other flags, less than half of what healthy runs gain. The reward functions must be the same."""
    band, flags = run.band.get("env/reward_mean"), " ".join(unusual_flags(run))
    early, late = early_and_late(run, "env/reward_mean")
    other_reward = any(word in flags for word in ("reward", "weight", "dataset", "model"))
    if band is None or len(run.metrics) < 10 or not flags or other_reward:
        return None
    usual = part_mean(band["50"], 0.8, 1) - band["50"][0]
    if late - early < 0.5 * usual and check_score(run) is None and check_score_falls(run) is None:
        return f"The raw reward rose by {late - early:.3g}; the median of healthy runs: by {usual:.3g}."


@check(
    "entropy-rises",
    "The entropy rises",
    "the loss or the KL penalty has the wrong sign, or the KL penalty is missing",
    "the learning rate is too high: the policy comes apart",
    "an entropy bonus is too large",
)
def check_entropy(run):
    early, late = early_and_late(run, "policy/entropy_avg")
    if late > 1.6 * early:
        return f"From {early:.3g} to {late:.3g} nats per token: the policy becomes more random."


@check(
    "reward-hacking",
    "The responses become alike",
    "the policy exploits the reward: certain words raise it whatever the response says",
    "the KL penalty is too weak, or missing",
    "the learning rate is too high",
    "an entropy bonus has the wrong sign: the entropy falls",
)
def check_words(run):
    """A new word takes over, or word pairs repeat. Arithmetic and calls of tools have few words."""
    if run.script in ("grpo_math", "grpo_tools"):
        return None
    before, after = evaluate(run)
    word, share_before, share = (new_words(run.pairs) or [("", 0.0, 0.0)])[0]
    judge_gain = min((after[name] - before[name] for name in judge_names(before)), default=0.0)
    spreads = share > 0.15 and len(run.pairs) * share >= 10
    if spreads and (share >= 0.4 or judge_gain <= 0.1):  # else somebody else likes the responses, too
        return f"“{word}” is in {share:.0%} of the held-out responses, before training in {share_before:.0%}."
    early, late = early_and_late(run, "completions/distinct_2")
    for name in {"distinct bigrams", "distinct2"} & before.keys():
        early, late = before[name], after[name]
    if late < 0.75 * early and not is_in_band(run, "completions/distinct_2"):
        return f"The fraction of different word pairs fell from {early:.2f} to {late:.2f}."


FUNCTION_WORDS = set(
    """
    about after again also always another anything because been before being both could does doing down
    during each either even ever every everybody everyone everything from have having here however into
    itself just many might more most much must neither never nobody none nothing once only other over
    perhaps quite rather same should since some somebody someone something such than that their them
    then there these they this those though through under until upon very well were what when where
    whether which while whole whom whose will with within without would your yours
    """.split()
)


def new_words(pairs):
    """Content words whose share of the responses has at least doubled, the commonest first.

    -> list of (word, share before, share after)
    """
    shares = {}
    for side in ("before", "after"):
        counts = Counter()
        for pair in pairs:
            words = re.findall(r"[^\W\d_]{4,}", pair[side].lower())  # [^\W\d_] is any letter
            counts.update(set(words) - FUNCTION_WORDS)
        shares[side] = {word: count / len(pairs) for word, count in counts.items()}
    words = [
        (word, shares["before"].get(word, 0.0), share) for word, share in sorted(shares["after"].items())
    ]
    return sorted((row for row in words if row[2] >= 2 * row[1]), key=lambda row: -row[2])


@check(
    "kl-above-target",
    "The KL is above its target",
    "the coefficient starts too low, or --kl-horizon is too long for a run of this length",
    "the learning rate is too high",
    "the KL penalty does not reach the rewards, or has the wrong sign",
)
def check_kl_target(run):
    target, values = run.args.get("kl_target"), run.values("objective/kl")
    if not target or not values or is_in_band(run, "objective/kl"):
        return None
    late = part_mean(values, 0.5, 1)
    if late > (3 if len(values) < 10 else 1.3) * target:
        return f"{late:.3g} in the second half of the run, target {target:g}."


@check(
    "critic",
    "The critic does not learn",
    "the value loss has the wrong sign or too little weight, or does not reach the critic",
    "values are aligned with other tokens than the returns: off by one, or padding",
    "the learning rate is too high for the critic, or the scores spread more and more",
    "you removed the critic on purpose",
)
def check_critic(run):
    """The value loss must not rise, and values must leave 0, where they start."""
    early, late = early_and_late(run, "loss/value_avg")
    if late > 1.5 * early and len(run.metrics) >= 20:
        return f"The value loss rises from {early:.3g} to {late:.3g}."
    rows = saved_rows(run, "value")
    later = [x for row in rows if row["update"] > rows[0]["update"] for x in row["value"]]
    if later and all(abs(x) < 1e-6 for x in later) and not does_not_move(run):
        return f"The values of {len(later)} saved tokens are all 0."


@check(
    "loss-does-not-fall",
    "The loss does not fall",
    "the learning rate is too high or too low",
    "labels are shifted twice, or not at all",
    "all labels are masked, or the wrong ones",
)
def check_loss(run):
    """Of sft.py and reward_model.py."""
    values = run.values("loss")
    early, late = early_and_late(run, "loss")
    last = values[int(0.8 * len(values)) :]
    if len(values) >= 10 and late >= early - 2 * stdev(last) / len(last) ** 0.5:
        return f"From {early:.3g} to {late:.3g}."


# ---- Curves ------------------------------------------------------------------------------------------------


def chart_groups(runs):
    """The metrics that some run has. -> list of (group, list of (metric, title, what to look for))"""
    known = {metric for metrics in METRICS.values() for metric in metrics}
    known |= {"update", "episode", "eps", "epoch", "step"}
    others = {name: (name, "") for run in runs for row in run.metrics for name in row if name not in known}
    groups = []
    for group, metrics in [*METRICS.items(), ("Everything else", others)]:
        charts = [(metric, *titles) for metric, titles in metrics.items()]
        groups.append((group, [chart for chart in charts if any(run.values(chart[0]) for run in runs)]))
    return [(group, charts) for group, charts in groups if charts]


def chart(metric, title, runs, colors):
    """A Bokeh figure of one metric over the updates."""
    from bokeh.models import HoverTool, Span
    from bokeh.plotting import figure

    plot = figure(height=230, sizing_mode="stretch_width", tools="", toolbar_location=None, title=title)
    band = runs[0].band.get(metric)
    if band is not None:
        plot.varea(band["update"], band["5"], band["95"], color="#bbbbbb", alpha=0.4)
        plot.line(band["update"], band["50"], color="#bbbbbb", line_width=1)
    for run in runs:
        points = run.by_update(metric)
        line = plot.line(list(points), list(points.values()), color=colors[run.name], line_width=1.5)
        tooltips = [("", run.name), ("update", "@x"), (title, "@y{0.0000a}")]
        plot.add_tools(HoverTool(renderers=[line], tooltips=tooltips, mode="vline"))
        if metric == "objective/kl" and run.args.get("kl_target"):
            plot.add_layout(Span(location=run.args["kl_target"], dimension="width", line_dash="dashed"))
    plot.xaxis.axis_label = "update"
    return plot


# ---- Tokens ------------------------------------------------------------------------------------------------


def token_data(run):
    """What the token view shows. -> dict: columns, and rows with the text and the numbers of each token

    The column `sampled` is in the rows only: tokens that a tool wrote have no color and no numbers.
    """
    if not run.tokens:
        return {}
    columns = [name for name, x in run.tokens[0].items() if isinstance(x, list)]
    columns = [name for name in columns if name not in ("tokens", "ids", "sampled")]
    tokenizer = load_tokenizer(run)
    rows = []
    for row in run.tokens:
        about = {"update": row["update"], "prompt": prompt_of(row), "score": number(row["score"])}
        # The runs in results/ have the texts of the tokens.
        about["tokens"] = row.get("tokens") or token_pieces(tokenizer, row["ids"])
        about["sampled"] = row.get("sampled") or [True] * len(about["tokens"])
        rows.append(about | {name: [number(x) for x in row[name]] for name in columns})
    return {"columns": columns, "rows": rows}


def load_tokenizer(run):
    """The tokenizer of the run's model, or of the model that it began with. None if neither is there."""
    from transformers import AutoTokenizer

    name = run.args.get("model_name_or_path", "")
    for path in (run.folder / "model", ROOT / name, name):
        try:
            return AutoTokenizer.from_pretrained(path, local_files_only=True)
        except Exception:  # no such folder, not cached, another version, a damaged file
            continue
    return None


def token_pieces(tokenizer, ids):
    """The text that each token adds; without a tokenizer, its id. Decoding single tokens may lose spaces.

    A character of several tokens belongs to the last of them.
    """
    if tokenizer is None:
        return [f" {i}" for i in ids]
    texts = [tokenizer.decode(ids[:end]).rstrip("\N{REPLACEMENT CHARACTER}") for end in range(len(ids) + 1)]
    return [text[len(before) :] for before, text in zip(texts, texts[1:])]


# ---- The page ----------------------------------------------------------------------------------------------


def page(runs):
    """The whole page as HTML."""
    from bokeh.embed import components
    from bokeh.palettes import Category10
    from bokeh.resources import Resources
    from jinja2 import Environment

    colors = {run.name: Category10[10][i % 10] for i, run in enumerate(runs)}
    groups = chart_groups(runs)
    titles = {metric: title for _, charts in groups for metric, title, _ in charts}
    script, divs = components({name: chart(name, title, runs, colors) for name, title in titles.items()})
    data = [{"pairs": run.pairs, "tokens": token_data(run)} for run in runs]
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(TEMPLATE).render(
        title=", ".join(run.name for run in runs),
        runs=runs,
        findings=[find_problems(run) for run in runs],
        verdict=verdict,
        skipped_checks=skipped_checks,
        tables=[evaluation_tables(run) for run in runs],
        groups=groups,
        divs=divs,
        colors=colors,
        script=script,
        bokeh=Resources(mode="inline", components=["bokeh"]).render_js(),
        data=json.dumps(data).replace("<", "\\u003c"),
        style=STYLE,
        program=PROGRAM,
    )


def evaluation_tables(run):
    """evaluation.json and the words that spread. -> list of (title, columns, rows)"""
    before, after = evaluate(run)
    tables = []
    if before:
        rows = [(name, before[name], after[name]) for name in before]
        tables.append((f"{run.evaluation.get('n', '')} held-out prompts", ["", "before", "after"], rows))
    pairs, pairs_before = [run.evaluation.get(name, {}) for name in ("pairs", "pairs before")]
    if pairs:  # dpo_tldr.py; an older run has only those after training
        rows = [(name, pairs_before.get(name, ""), x) for name, x in pairs.items()]
        tables.append((f"{run.evaluation['number of pairs']} held-out pairs", ["", "before", "after"], rows))
    numbers = [(name, x) for name, x in run.evaluation.items() if number(x) is not None]
    if numbers and not before:
        tables.append(("Held-out data", ["", ""], numbers))
    words = [(word, f"{old:.1%}", f"{new:.1%}") for word, old, new in new_words(run.pairs)[:12]]
    if words and len(run.pairs) >= 64:  # of a few responses, one is a large share
        tables.append(("Words that spread: in how many responses", ["word", "before", "after"], words))
    return [
        (title, columns, [[f"{x:.4g}" if isinstance(x, float) else x for x in row] for row in rows])
        for title, columns, rows in tables
    ]


def verdict(run):
    """What to say about a run without findings."""
    if len(run.metrics) < SHORT:
        return "too short to judge"
    return "no findings in what was checked" if skipped_checks(run) else "nothing looks wrong"


def describe_findings(run):
    """The findings as text for the screen."""
    findings = find_problems(run)
    count = "1 finding" if len(findings) == 1 else f"{len(findings)} findings"
    count = count if findings else verdict(run)
    lines = [f"{run.name}: {count} (updates: {len(run.metrics)})", *filter(None, [skipped_checks(run)])]
    for finding in findings:
        lines += ["", f"{finding.title}. {finding.evidence}"]
        lines += ["Likely causes:"]
        lines += [f"  {i}. {cause}" for i, cause in enumerate(finding.causes, 1)]
        lines += [f"  See docs/debugging.md#{finding.entry}"]
    return "\n".join(lines)


STYLE = """
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 1200px; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
nav a { margin-right: 1rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
td, th { border-bottom: 1px solid #ddd; padding: .2rem .7rem .2rem 0; text-align: left; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)); gap: 1rem; }
.columns { display: flex; flex-wrap: wrap; gap: 0 3rem; }
.chart p, .note, .score { color: #5a6672; font-size: .85rem; margin: .2rem 0; }
.finding { border-left: 4px solid #b23b00; background: #f6f7f9; padding: .6rem 1rem; margin: .7rem 0; }
.healthy { border-color: #2e7d32; } .unknown { border-color: #5a6672; } .pair div { padding: .4rem 0; }
.pair, .heads { display: grid; gap: .8rem; grid-template-columns: 1fr 1fr 1fr; }
.pair { border-top: 1px solid #ddd; }
.pair div, .line { white-space: pre-wrap; overflow-wrap: anywhere; }
.token { border-radius: 3px; cursor: default; } .token:hover { outline: 2px solid #555; }
.unsampled { color: #8a949e; font-style: italic; }
.line { margin: .5rem 0 1rem; font: 14px/1.9 monospace; }
#tip { position: fixed; display: none; z-index: 9; white-space: pre; font: .8rem monospace; }
#tip { background: #fff; border: 1px solid #888; padding: .3rem .6rem; pointer-events: none; }
@media (max-width: 640px) { .pair { grid-template-columns: 1fr; } .heads { display: none; } }
"""


PROGRAM = r"""
const data = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");
const format = (x) => (x === null ? "-" : Number(x.toPrecision(4)).toString());

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
  const heads = add(list, "div", "heads");
  for (const head of ["prompt", "before training", "after training"]) add(heads, "b", "", head);
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

// The token microscope. Blue is above 0, red below.
function tokenColor(x, scale) {
  const strength = 0.75 * Math.min(1, Math.abs(x) / scale);
  return x >= 0 ? `rgba(31, 119, 180, ${strength})` : `rgba(214, 39, 40, ${strength})`;
}
function showTokens(box) {
  const tokens = data[box.dataset.run].tokens;
  const [update, column] = [...box.querySelectorAll("select")].map((select) => select.value);
  const lines = tokens.rows.filter((row) => String(row.update) === update);
  // The scale is the same for all updates, so that colors can be compared. A few outliers may saturate.
  const trained = tokens.rows.flatMap((row) => row[column].filter((_, i) => row.sampled[i]));
  const sizes = trained.map(Math.abs).sort((a, b) => a - b);
  const scale = sizes[Math.floor(0.98 * (sizes.length - 1))] || 1;
  const hasTools = tokens.rows.some((row) => row.sampled.includes(false));
  box.querySelector(".scale").textContent =
    `blue: above 0, red: below; the full color is ${format(scale)} or more` +
    (hasTools ? "; gray text: written by a tool or the chat template, not trained" : "");
  const list = box.querySelector(".list");
  list.replaceChildren();
  let prompt = null;
  for (const line of lines) {
    const row = add(list, "div", "line");
    add(row, "span", "score", line.prompt === prompt ? "(the same prompt) " : line.prompt);
    prompt = line.prompt;
    line.tokens.forEach((text, i) => {
      const token = add(row, "span", line.sampled[i] ? "token" : "token unsampled", text);
      token.dataset.tip = `${JSON.stringify(text)}\nnot sampled, not trained`;
      if (!line.sampled[i]) return;
      token.style.background = tokenColor(line[column][i], scale);
      const numbers = tokens.columns.map((name) => `${name.padEnd(10)}${format(line[name][i])}`);
      token.dataset.tip = [JSON.stringify(text), ...numbers].join("\n");
    });
    add(row, "span", "score", `  score ${format(line.score)}`);
  }
}
for (const box of document.querySelectorAll(".tokens")) {
  const tokens = data[box.dataset.run].tokens;
  const [updates, columns] = box.querySelectorAll("select");
  for (const update of new Set(tokens.rows.map((row) => row.update))) add(updates, "option", "", update);
  for (const column of tokens.columns) add(columns, "option", "", column);
  const first = ["reward", "advantage"].find((name) => tokens.columns.includes(name));
  if (first) columns.value = first;
  updates.addEventListener("change", () => showTokens(box));
  columns.addEventListener("change", () => showTokens(box));
  showTokens(box);
}
function showTip(event) {
  const text = event.target.dataset && event.target.dataset.tip;
  tip.style.display = text ? "block" : "none";
  if (!text) return;
  tip.textContent = text;
  tip.style.left = Math.min(event.clientX + 12, innerWidth - tip.offsetWidth) + "px";
  tip.style.top = Math.min(event.clientY + 16, innerHeight - tip.offsetHeight) + "px";
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
<a href="#tokens">Tokens</a></nav>
<table>
<tr><th>run<th>recipe<th>seed<th>updates<th>command
{% for run in runs %}
<tr><td><b style="color: {{ colors[run.name] }}">&#9632;</b> {{ run.name }}<td>{{ run.args.recipe }}
<td>{{ run.args.seed }}<td>{{ run.metrics[-1]["update"] }}<td><code>{{ run.about.command | join(" ") }}</code>
{% endfor %}
</table>

<h2 id="findings">Findings</h2>
<p class="note">The most direct evidence comes first. What comes after it may only follow from it.</p>
{% for run in runs %}
{% if runs | length > 1 %}<h3>{{ run.name }}</h3>{% endif %}
{% for finding in findings[loop.index0] %}
<div class="finding"><b>{{ finding.title }}.</b> {{ finding.evidence }}
<br>Likely causes:
<ol>{% for cause in finding.causes %}<li>{{ cause }}{% endfor %}</ol>
<span class="note">See docs/debugging.md#{{ finding.entry }}</span></div>
{% else %}
<p class="finding {{ "healthy" if verdict(run) == "nothing looks wrong" else "unknown" }}">
{{ verdict(run) | capitalize }} (updates: {{ run.metrics | length }}). Read the answers all the same.</p>
{% endfor %}
<p class="note">{{ skipped_checks(run) }}</p>
{% endfor %}

<h2 id="answers">Before and after</h2>
{% for run in runs %}
{% if runs | length > 1 %}<h3>{{ run.name }}</h3>{% endif %}
<div class="columns">
{% for title, columns, rows in tables[loop.index0] %}
<div><p class="note">{{ title }}</p>
<table><tr>{% for column in columns %}<th>{{ column }}{% endfor %}
{% for row in rows %}
<tr>{% for x in row %}<td>{{ x }}{% endfor %}
{% endfor %}
</table></div>
{% else %}
<p class="note">No evaluation yet.</p>
{% endfor %}
</div>
{% if run.pairs %}
<div class="pairs" data-run="{{ loop.index0 }}" data-count="8">Sort by <select></select>
<div class="list"></div><button>Show more</button></div>
{% endif %}
{% endfor %}

<h2 id="curves">Curves</h2>
<p>{% for run in runs %}<b style="color: {{ colors[run.name] }}">&#9632;</b> {{ run.name }} {% endfor %}
{% if runs[0].band %}<b style="color: #bbbbbb">&#9632;</b> 5 to 95 % of ten healthy runs of
{{ runs[0].script }}.py, with its default flags and data.{% endif %}
{% for run in runs if run.values("objective/kl") and not run.args.get("kl_target") %}
{% if loop.first %}There is no KL target (dashed line), so the KL may go on rising.{% endif %}
{% else %}Dashed line: KL target.{% endfor %}</p>
{% for group, charts in groups %}
<h3>{{ group }}</h3>
<div class="charts">
{% for metric, _, text in charts %}
<div class="chart">{{ divs[metric] | safe }}<p>{{ text }}</p></div>
{% endfor %}
</div>
{% endfor %}

<h2 id="tokens">Tokens</h2>
<p class="note">Responses that the policy learned from. Point at a token or tap it to see its numbers. reward
(PPO): the KL penalty, and on the last token the score too. kl: log-probability minus the reference's.</p>
{% for run in runs %}
{% if runs | length > 1 %}<h3>{{ run.name }}</h3>{% endif %}
{% if run.tokens %}
<div class="tokens" data-run="{{ loop.index0 }}">Update <select></select> color by <select></select>
<span class="note scale"></span><div class="list"></div></div>
{% else %}
<p class="note">This run has no numbers per token.</p>
{% endif %}
{% endfor %}
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
    parser.add_argument("--output", type=Path, help="the page; default: report.html in the first run")
    parser.add_argument("--diagnose", action="store_true", help="print the findings, and write no page")
    flags = parser.parse_args(argv)
    runs = [read_run(folder) for folder in flags.runs]
    if flags.diagnose:
        print("\n\n".join(describe_findings(run) for run in runs))
        return
    output = flags.output or runs[0].folder / "report.html"
    output.write_text(page(runs), encoding="utf-8")
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
