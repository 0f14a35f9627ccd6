"""Tables of docs/grpo_tools.md: before and after in three seeds, why wrong trajectories are wrong, how those with a
result end, and how far the policy that guesses numbers is from the best one.

python benchmarks/tool_results.py
"""

import json
import re
from collections import Counter
from pathlib import Path

from archive import read, read_rows

RESULTS = Path(__file__).resolve().parents[1] / "results/grpo-tools-tiny"
GUESS = RESULTS.parent / "grpo-tools-guess/seed1.zip"
TURN_REWARDS = GUESS.with_name("turn-rewards.zip")
NUMBERS = 31  # the secret is one of 1 to 31
MOST_GUESSES = 8
SEEDS = (1, 2, 3)
METRICS = (
    "held-out: pass@1",
    "held-out: +- (95 % interval)",
    "held-out: pass@8",
    "held-out: calls per trajectory",
    "held-out: failed calls",
    "held-out: turns",
    "greedy: pass@1",
    "greedy: calls per trajectory",
)
KINDS = (
    "no call",
    "a call failed or was not complete",
    "other numbers than the task's",
    "right numbers, another operation or answer",
)


def results():
    """Before and after of each seed, as a markdown table."""
    evaluations = [json.loads(read(RESULTS / f"seed{seed}.zip", "evaluation.json")) for seed in SEEDS]
    head = " | ".join(f"seed {seed}: before | after" for seed in SEEDS)
    lines = [f"| 256 held-out tasks | {head} |", "|---" * (1 + 2 * len(SEEDS)) + "|"]
    for name in METRICS:
        cells = [f"{x[when][name]:.3f}" for x in evaluations for when in ("before", "after")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def kind_of_error(task, response):
    """Why a trajectory is wrong: the first of KINDS that applies."""
    calls = re.findall(r'"expression": "(.*?)"', response)
    if "<tool_call>" not in response:
        return KINDS[0]
    if "error:" in response or not calls:
        return KINDS[1]
    numbers = [set(re.findall(r"\d+", text)) for text in (task, calls[-1])]
    return KINDS[2] if numbers[0] != numbers[1] else KINDS[3]


def trajectories(seed, when):
    """The sampled trajectories of the held-out tasks. when: before or after -> list of (task, text, is right)"""
    found = []
    for row in read_rows(RESULTS / f"seed{seed}.zip", "evaluation_samples.jsonl"):
        if row["set"] == "held-out":
            for text, is_right in zip(row[when]["responses"], row[when]["right"]):
                found.append((row["task"], text, is_right))
    return found


def misuse():
    """How trajectories with a result end, as a markdown table."""
    kinds = "all with a result", "no answer after it", "another number than the result", "a second call"
    counts = []
    for seed in SEEDS:
        for when in ("before", "after"):
            count = Counter()
            for _, text, _ in trajectories(seed, when):
                *_, last = text.split("<|im_start|>tool\n")
                if last == text:
                    continue  # no result
                result, _, rest = last.partition("<|im_end|>")
                answer = re.search(r"<answer>(.*?)</answer>", rest)
                count[kinds[0]] += 1
                count[kinds[1]] += answer is None
                count[kinds[2]] += answer is not None and answer.group(1) != result
                count[kinds[3]] += text.count("<|im_start|>tool\n") > 1
            counts.append(count)
    head = " | ".join(f"seed {seed}: before | after" for seed in SEEDS)
    lines = [f"| of 2,048 trajectories | {head} |", "|---" * (1 + 2 * len(SEEDS)) + "|"]
    for kind in kinds:
        lines.append(f"| {kind} | {' | '.join(str(count[kind]) for count in counts)} |")
    return "\n".join(lines)


def errors():
    """How many of the sampled trajectories are wrong, and why, as a markdown table."""
    counts = {}
    for seed in SEEDS:
        for when in ("before", "after"):
            found = trajectories(seed, when)
            kinds = Counter(kind_of_error(task, text) for task, text, is_right in found if not is_right)
            counts[seed, when] = kinds, len(found)
    [total] = {total for _, total in counts.values()}
    head = " | ".join(f"seed {seed}: before | after" for seed in SEEDS)
    lines = [f"| wrong, of {total:,} | {head} |", "|---" * (1 + 2 * len(SEEDS)) + "|"]
    for kind in KINDS:
        lines.append(f"| {kind} | {' | '.join(str(kinds[kind]) for kinds, _ in counts.values())} |")
    lines.append(f"| all | {' | '.join(str(kinds.total()) for kinds, _ in counts.values())} |")
    return "\n".join(lines)


def best_guesses(n):
    """The sum, over n equally likely numbers, of the guesses that the best policy needs: it halves."""
    if n <= 0:
        return 0
    lower = (n - 1) // 2
    return n + best_guesses(lower) + best_guesses(n - 1 - lower)  # each number pays this guess


def game(text):
    """A trajectory of a game. -> guesses, those that no earlier result rules out

    The result of the last guess is not in the text if it ended the game.
    """
    low, high, possible = 1, NUMBERS, 0
    call = r'"number": (-?\d+)\}\}\n</tool_call><\|im_end\|>'
    found = re.findall(rf"{call}(?:\n<\|im_start\|>tool\n(higher|lower|right)|$)", text)[:MOST_GUESSES]
    for number, result in found:
        number = int(number)
        possible += low <= number <= high
        if result == "higher":
            low = max(low, number + 1)
        if result == "lower":
            high = min(high, number - 1)
    return len(found), possible


def distance():
    """How far sampled games are from the best policy, as a markdown table."""
    best = best_guesses(NUMBERS) / NUMBERS
    columns = []
    for run, when in ((GUESS, "before"), (GUESS, "after"), (TURN_REWARDS, "after")):
        games, rewards = [], []
        for row in read_rows(run, "evaluation_samples.jsonl"):
            if row["set"] == "held-out":
                games += [game(text) for text in row[when]["responses"]]
                rewards += row[when]["rewards/environment"]
        found = [guesses for (guesses, _), reward in zip(games, rewards, strict=True) if reward > 0]
        possible = sum(possible for _, possible in games) / sum(guesses for guesses, _ in games)
        columns.append([
            f"{len(found) / len(games):.3f}",
            f"{sum(found) / len(found):.2f}",
            f"{possible:.3f}",
            f"{sum(rewards) / len(games):.3f}",
        ])  # fmt: skip
    columns.append(["1.000", f"{best:.2f}", "1.000", f"{1 + (MOST_GUESSES - best) / MOST_GUESSES:.3f}"])
    names = (
        "games in which the number was found",
        "guesses, if it was found",
        "guesses that no earlier result rules out",
        "reward",
    )
    titles = f"| {len(games):,} sampled games | before | after | after, with rewards per turn | best policy |"
    lines = [titles, "|---|---|---|---|---|"]
    for name, *cells in zip(names, *columns):
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(results(), errors(), misuse(), distance(), sep="\n\n")
