"""The results of real_models.sh: copy them from its output directory, draw them, print the tables.

    python benchmarks/real_results.py qwen-gsm8k            # docs/real-qwen-gsm8k.png, tables to the screen
    python benchmarks/real_results.py qwen-gsm8k OUT        # first copy the finished runs of OUT to results/
    python benchmarks/real_results.py                       # the table of all reference runs

The other jobs are those of real_models.sh. Copied are numbers and the samples of the evaluation; except for the
film reviews, only a few of them with the texts of the data. Models and data stay in OUT.
"""

import ast
import json
import math
import re
import sys
from pathlib import Path
from statistics import fmean, pstdev

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "data")]
import health  # noqa: E402
from archive import pack, read, read_rows  # noqa: E402
from math_rewards import boxed_answer, value_of  # noqa: E402

PANELS = {  # job -> metric -> title
    "qwen-gsm8k": {
        "objective/scores": "reward: share of right answers, training problems",
        "policy/entropy_avg": "entropy, nats per token",
        "completions/mean_length": "tokens per response",
    },
    "smollm2-imdb": {
        "objective/scores": "score: the classifier's logit for positive",
        "objective/kl": "KL to the start, nats per response",
        "completions/distinct_2": "distinct bigrams of the 64 responses",
    },
    "smollm2-dailydialog": {
        "meteor": "METEOR of the 256 answers",
        "intent": "probability of the reference's intent",
        "objective/kl": "KL to the start, nats per response",
        "completions/distinct_2": "distinct bigrams of the 256 answers",
    },
    "smollm2-tldr": {
        "objective/scores": "score of the 256 summaries",
        "objective/kl": "KL to the start, nats per response",
        "completions/mean_length": "tokens per summary",
    },
    "smollm2-hh": {
        "objective/scores": "score of the 256 answers",
        "objective/kl": "KL to the start, nats per response",
        "completions/mean_length": "tokens per answer",
    },
    "smollm2-word-problems": {
        "objective/scores": "reward: share of right answers, training problems",
        "frac_reward_zero_std": "groups with equal rewards",
        "policy/entropy_avg": "entropy, nats per token",
    },
}
NUM_TEXTS = 20  # prompts, with their references, that are copied
OPENRL = {  # before and after, from OpenRL's page about DailyDialog
    "rouge1": (0.164, 0.181),
    "rougeLsum": (0.137, 0.153),
    "meteor": (0.234, 0.292),
    "sacrebleu": (0.063, 0.090),
    "intent": (0.427, 0.435),
    "tokens per answer": (18.950, 18.690),
}


def copy_results(out, results):
    """Copy what finished runs wrote, without models and data, and without paths of this machine."""
    for run in sorted(path.parent for path in out.glob("*/finished")):
        files = {name: (run / name).read_text() for name in ("args.json", "metrics.jsonl", "evaluation.json")}
        files["args.json"] = re.sub(r'"/[^"]*/(?=[^"/]+")', '"', files["args.json"]) + "\n"
        if results.name == "qwen-gsm8k":
            files |= copy_solutions(run)
        elif run.name.startswith("grpo-"):
            files["evaluation_samples.jsonl"] = copy_tasks(run, out / "word-problems/test.jsonl")
        elif (run / "evaluation_samples.jsonl").exists():
            rows = read_rows(run, "evaluation_samples.jsonl")
            if results.name != "smollm2-imdb":
                for row in rows[NUM_TEXTS:]:
                    for name in {"prompt", "last", "reference"} & set(row):
                        del row[name]
            files["evaluation_samples.jsonl"] = to_lines(rows)
        pack(results / (re.sub("^(ppo|rloo|grpo)-", "", run.name) + ".zip"), files)


def to_lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def copy_tasks(run, data):
    """The samples of a GRPO run with the operators of each task, most of them without the text. -> str"""
    problems = [json.loads(line) for line in data.read_text().splitlines()]
    equations = {row["prompt"][0]["content"]: row["equation"] for row in problems}
    rows = read_rows(run, "evaluation_samples.jsonl")
    for i, row in enumerate(rows):
        row["task"] = row["task"].removeprefix("user: ")
        row["operators"] = [x for x in equations[row["task"]].split() if x in "+-*/"]
        if i >= NUM_TEXTS:
            del row["task"]
    return to_lines(rows)


def copy_solutions(run):
    """The samples of the first problems, and for all of them what GSM8K's tables need of each response.

    -> dict: file -> text
    """
    samples, counts = [], []
    for row in read_rows(run, "evaluation_samples.jsonl"):
        count = {"set": row["set"]}
        for side in ("before", "after"):
            responses = row[side]["responses"]
            count[side] = {name: row[side][name] for name in ("right", "ended", "length")}
            count[side]["python"] = ["```" in x for x in responses]
            count[side]["boxed"] = [boxed_answer(x) is not None for x in responses]
            count[side]["equations"] = [worked_equations(x) for x in responses]
        counts.append(count)
        if sum(sample["set"] == row["set"] for sample in samples) < NUM_TEXTS:
            samples.append(row)
    return {"evaluation_samples.jsonl": to_lines(samples), "evaluation_counts.jsonl": to_lines(counts)}


# What is left of a LaTeX solution when only numbers and operators count, by (pattern, replacement) in this order.
ARITHMETIC = [
    (r"(?s)```.*?(```|\Z)", "\n"),  # code blocks
    (r"(?m)^\s*([-*]|\d+[.)]|#+)\s+", ""),  # bullets
    (r"\\(text|mathrm|textbf|mathbf)\s*\{[^{}]*\}", " "),  # units in LaTeX
    (r"\\boxed\s*\{([^{}]*)\}", r"\1"),
    (r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"((\1)/(\2))"),
    (r"\\times|\\cdot|×", "*"),
    (r"\\div|÷", "/"),
    (r"(?<=\d)(,|\{,\})(?=\d{3}(?!\d))", ""),  # 1,000
    (r"(\d+(?:\.\d+)?)\s*\\?%", r"(\1/100)"),
    (r"\\[()\[\],;:! ]|\\?\$|\\left|\\right|[€£]|\*\*", ""),
    (r"(?<=\d)[A-Za-z]|\b[A-Za-z]\b", "?"),  # a variable: its equation does not count
    (r"[/-]?\s*[A-Za-z]{2,}(\s*/\s*[A-Za-z]+)?", " "),  # words and units
    (r"\(\s*\)", " "),
]


def worked_equations(response):
    """The equations of numbers in a solution, such as 3 * 4 = 12. -> list of [number of operators, bool: true?]

    An equation needs an operator on its left side. It is true if its sides differ by less than 0.5 %, which
    allows for rounding. Those with variables, or that cannot be read, are left out.
    """
    for pattern, replacement in ARITHMETIC:
        response = re.sub(pattern, replacement, response)
    found = {}  # each left side once: some responses repeat themselves
    for line in response.splitlines():
        parts = line.split("=")
        for left, right in zip(parts, parts[1:]):
            left = re.search(r"[-+*/(). \d]*$", left)[0].strip(" .")
            right = re.match(r"[-+*/(). \d]*", right)[0].strip(" .")
            operators = len(re.findall(r"[\d)] *[-+*/]", left))
            try:
                values = [float(value_of(ast.parse(side, mode="eval").body)) for side in (left, right)]
            except (SyntaxError, TypeError, ValueError, ZeroDivisionError):
                continue
            if operators:
                found[left] = [operators, math.isclose(*values, rel_tol=5e-3)]
    return list(found.values())


def read_metrics(folder):
    """One dict per update."""
    return read_rows(folder, "metrics.jsonl")


def read_json(folder, name):
    return json.loads(read(folder, name))


def minutes(folder):
    """Minutes of all updates, without evaluation and start. -> str"""
    value = sum(row["perf/seconds"] for row in read_metrics(folder)) / 60
    return f"{value:.0f}" if value >= 1 else f"{value:.1f}"


def smooth(values, width=8):
    """The mean over the last updates."""
    return [sum(values[max(0, i - width + 1) : i + 1]) / min(i + 1, width) for i in range(len(values))]


def draw(job, seeds, path):
    panels = PANELS[job]
    figure = Figure(figsize=(4 * len(panels), 3.5), layout="constrained")
    for axis, (name, label) in zip(figure.subplots(1, len(panels)), panels.items()):
        for folder in seeds:
            rows = read_metrics(folder)
            episodes = [row["episode"] for row in rows]
            values = [row[name] for row in rows]
            line = axis.plot(episodes, smooth(values), label=folder.stem)
            axis.plot(episodes, values, color=line[0].get_color(), alpha=0.25)
            target = read_json(folder, "args.json")["args"].get("kl_target")
            if name == "objective/kl" and target:
                axis.axhline(
                    target, color="gray", linestyle="--", label="target" if folder == seeds[0] else None
                )
        axis.set(title=label, xlabel="episodes (responses)")
        axis.set_ylim(bottom=0 if name != "objective/scores" else None)
        axis.grid(alpha=0.3)
    figure.axes[1].legend()
    figure.suptitle(f"{job}: thin line per update, thick line mean of 8 updates")
    figure.savefig(path, dpi=110)


def before_and_after(folder):
    """The table of evaluation.json, in markdown."""
    evaluation = read_json(folder, "evaluation.json")
    lines = [f"| {evaluation['n']} held-out prompts | before | after |", "|---|---|---|"]
    for name, after in evaluation["after"].items():
        lines.append(f"| {name} | {evaluation['before'][name]:.3f} | {after:.3f} |")
    return "\n".join(lines)


def all_seeds(folders):
    """The evaluations of several runs side by side, in markdown."""
    runs = [read_json(folder, "evaluation.json") for folder in folders]
    lines = [f"| {runs[0]['n']} held-out prompts | {' | '.join(folder.stem for folder in folders)} |"]
    lines.append("|---" * (len(runs) + 1) + "|")
    for name in runs[0]["after"]:
        cells = [f"{run['before'][name]:.3f} → {run['after'][name]:.3f}" for run in runs]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def beside_openrl(folders):
    """The mean of the tables of evaluation.json beside OpenRL's, in markdown."""
    runs = [read_json(folder, "evaluation.json") for folder in folders]
    head = [f"{runs[0]['n']:,} held-out prompts", "before", "after", "gain"]
    head += ["OpenRL: SFT", "OpenRL: PPO", "gain"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name in runs[0]["after"]:
        before, after = (sum(run[side][name] for run in runs) / len(runs) for side in ("before", "after"))
        gain = f"{after / before - 1:+.1%}" if before else ""
        cells = [name, f"{before:.3f}", f"{after:.3f}", gain]
        old, new = OPENRL.get(name, (None, None))
        cells += ["", "", ""] if old is None else [f"{old:.3f}", f"{new:.3f}", f"{new / old - 1:+.1%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def is_false(response):
    """True if a response begins with an equation of numbers, such as 60 - 7 = 43, that is not true."""
    equation = re.match(r"([-+*/() .\d]+) = ([-.\d]+)\s", response)
    try:
        value = value_of(ast.parse(equation[1].strip(), mode="eval").body)
        return not math.isclose(value, float(equation[2]), rel_tol=1e-3)
    except (TypeError, SyntaxError, ValueError, ZeroDivisionError):  # TypeError: no equation
        return False


def has_two_operators(response):
    """True if the left side of a response's equation, such as (3 + 4) - 6 = 1, has more than one operator."""
    return len(re.findall(r"[-+*/]", response.split("=")[0])) > 1


def equations(folder):
    """How many responses to held-out problems say something like 60 - 7 = 43, in markdown."""
    rows = read_rows(folder, "evaluation_samples.jsonl")
    lines = ["| of the same responses | before | after |", "|---|---|---|"]
    kinds = {"is false": is_false, "has two or more operators": has_two_operators}
    for label, is_kind in kinds.items():
        shares = []
        for side in ("before", "after"):
            responses = [x for row in rows if row["set"] == "held-out" for x in row[side]["responses"]]
            shares.append(f"{sum(map(is_kind, responses)) / len(responses):.3f}")
        lines.append(f"| their equation {label} | {' | '.join(shares)} |")
    return "\n".join(lines)


def read_solutions(folder, kind):
    """The evaluation of a run on GSM8K. kind: "greedy" or "held-out" -> one dict per problem"""
    rows = read_rows(folder, "evaluation_counts.jsonl")
    return [row for row in rows if row["set"] == kind]


def paired_gain(pairs):
    """The mean gain of (before, after) pairs, and the half width of its 95 % interval. -> two floats"""
    gains = [after - before for before, after in pairs]
    return fmean(gains), 1.96 * pstdev(gains) / len(gains) ** 0.5


def solved(folder):
    """How many problems of GSM8K are solved, with the gain over the same problems, in markdown."""
    evaluation = read_json(folder, "evaluation.json")
    lines = [f"| {evaluation['n']:,} test problems | before | after | gain |", "|---" * 4 + "|"]
    measures = {
        "greedy: pass@1": ("greedy", fmean),
        "sampled: pass@1": ("held-out", fmean),
        "sampled: pass@4": ("held-out", any),
    }
    for label, (kind, measure) in measures.items():
        pairs = [
            [float(measure(row[side]["right"])) for side in ("before", "after")]
            for row in read_solutions(folder, kind)
        ]
        before, after = map(fmean, zip(*pairs))
        gain, half = paired_gain(pairs)
        lines.append(
            f"| {label} | {before:.1%} | {after:.1%} | {100 * gain:+.1f} ± {100 * half:.1f} points |"
        )
    greedy = [
        [row[side]["right"][0] for side in ("before", "after")] for row in read_solutions(folder, "greedy")
    ]
    for label, pair in (("newly solved", [False, True]), ("no longer solved", [True, False])):
        lines.append(f"| greedy: {label} | | {greedy.count(pair)} | |")
    return "\n".join(lines)


def solutions(folder):
    """What is in the responses to GSM8K's problems, in markdown."""
    columns = {
        f"{label}, {side}": [row[side] for row in read_solutions(folder, kind)]
        for label, kind in (("greedy", "greedy"), ("sampled", "held-out"))
        for side in ("before", "after")
    }
    measures = {  # of one response: -> number
        "code block": lambda x, i: x["python"][i],
        "answer in a box": lambda x, i: x["boxed"][i],
        "cut off at 512 tokens": lambda x, i: not x["ended"][i],
        "at least one false equation": lambda x, i: not all(true for _, true in x["equations"][i]),
    }
    lines = [f"| share of responses with | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for label, measure in measures.items():
        shares = [
            fmean(measure(x, i) for x in column for i in range(len(x["right"])))
            for column in columns.values()
        ]
        lines.append(f"| {label} | {' | '.join(f'{share:.1%}' for share in shares)} |")
    equations = {  # column -> equations of each response
        label: [found for x in column for found in x["equations"]] for label, column in columns.items()
    }
    cells = [f"{fmean(len(found) for found in lists):.1f}" for lists in equations.values()]
    lines.append(f"| equations per response | {' | '.join(cells)} |")
    cells = [f"{fmean(sum(n for n, _ in found) for found in lists):.1f}" for lists in equations.values()]
    lines.append(f"| operations in them | {' | '.join(cells)} |")
    cells = [f"{fmean(true for found in lists for _, true in found):.1%}" for lists in equations.values()]
    lines.append(f"| true equations | {' | '.join(cells)} |")
    return "\n".join(lines)


def beside_trl(results):
    """Seconds of the second and third update, ours and TRL's on the same GPU in the same call, in markdown."""
    ours = read_metrics(results / "three-updates")[1:]
    theirs = read_json(results, "trl.json")["updates"][1:]
    columns = {
        "ours": ([x["perf/seconds"] for x in ours], [x["perf/rollout_seconds"] for x in ours]),
        "TRL 1.16": ([x["seconds"] for x in theirs], [x["seconds"] - x["train"] for x in theirs]),
    }
    tokens = {
        "ours": [256 * x["completions/mean_length"] for x in ours],
        "TRL 1.16": [x["tokens"] for x in theirs],
    }
    lines = [f"| per update | {' | '.join(columns)} |", "|---|---|---|"]
    rows = {"seconds": [], "of these, rollout": [], "tokens per second": []}
    for label, (seconds, rollout) in columns.items():
        rows["seconds"].append(f"{fmean(seconds):.1f}")
        rows["of these, rollout"].append(f"{fmean(rollout):.1f}")
        rows["tokens per second"].append(f"{sum(tokens[label]) / sum(seconds):,.0f}")
    return "\n".join([*lines, *(f"| {label} | {' | '.join(cells)} |" for label, cells in rows.items())])


# job, run, name of the metric in evaluation.json, its short name, algorithm, model, data, hardware
REFERENCE_RUNS = [
    ("qwen-gsm8k", "seed1", "greedy: pass@1", "greedy pass@1", "GRPO", "Qwen2.5-Coder-0.5B-Instruct", "GSM8K", "H200"),
    ("smollm2-imdb", "seed1", "score mean", "score", "PPO, LoRA", "SmolLM2-135M-Instruct", "IMDB", "one CPU core"),
    ("smollm2-dailydialog", "seed1", "meteor", "METEOR", "PPO, LoRA", "SmolLM2-135M-Instruct", "DailyDialog", "H200"),
    ("smollm2-word-problems", "seed1", "held-out: pass@1", "pass@1", "GRPO", "SmolLM2-135M-Instruct", "MAWPS, ASDiv-A; SVAMP", "H200"),
    ("smollm2-tldr", "seed1", "win rate", "win rate", "RLOO", "SmolLM2-135M-Instruct", "TL;DR", "H200"),
    ("smollm2-hh", "seed1", "win rate", "win rate", "RLOO", "SmolLM2-135M-Instruct", "hh-rlhf", "H200"),
]  # fmt: skip


def reference_runs():
    """The first seed of each job, in markdown. Minutes are those of the updates of the RL run."""
    head = ["job", "algorithm", "model", "data", "hardware", "minutes", "before → after"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for job, run, metric, name, *about in REFERENCE_RUNS:
        folder = ROOT / "results" / job / run
        evaluation = read_json(folder, "evaluation.json")
        change = " → ".join(f"{evaluation[side][metric]:.3f}" for side in ("before", "after"))
        lines.append(f"| `{job}` | {' | '.join(about)} | {minutes(folder)} | {name} {change} |")
    return "\n".join(lines)


def tables(job):
    """The tables of the pages about a job. -> list of str"""
    results = ROOT / "results" / job
    seeds = sorted(results.glob("seed*.zip"))
    if job == "qwen-gsm8k":
        return [solved(seeds[0]), solutions(seeds[0]), beside_trl(results)]
    if job == "smollm2-word-problems":
        return [all_seeds(seeds), equations(seeds[0])]
    if job == "smollm2-dailydialog":
        return [beside_openrl(seeds)]
    if job == "smollm2-imdb":
        return [health.table(seeds)]
    return [before_and_after(seeds[0])]


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(print(reference_runs()))
    job, *out = sys.argv[1:]
    if out:
        copy_results(Path(out[0]), ROOT / "results" / job)
    seeds = sorted((ROOT / "results" / job).glob("seed*.zip"))
    draw(job, seeds, ROOT / f"docs/real-{job}.png")
    print("\n\n".join(tables(job)))
