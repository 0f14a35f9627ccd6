"""The results of real_models.sh: copy them from its output directory, draw them, print the tables.

    python benchmarks/real_results.py smollm2-imdb          # docs/real-smollm2-imdb.png, tables to the screen
    python benchmarks/real_results.py smollm2-imdb OUT      # first copy the finished runs of OUT to results/

Copied are numbers and the samples of the evaluation. Models and data stay in OUT.
"""

import gzip
import json
import sys
from pathlib import Path

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import health  # noqa: E402

PANELS = {  # metric -> title
    "objective/scores": "score: the classifier's logit for positive",
    "objective/kl": "KL to the start, nats per response",
    "completions/distinct_2": "distinct bigrams of the 64 responses",
}


def copy_results(out, results):
    """Copy what finished runs wrote, without models and data, and without paths of this machine."""
    for run in sorted(path.parent for path in out.glob("*/finished")):
        folder = results / run.name.removeprefix("ppo-")
        folder.mkdir(parents=True, exist_ok=True)
        about = (run / "args.json").read_text().replace(f"{ROOT}/", "")
        (folder / "args.json").write_text(about + "\n")
        metrics = (run / "metrics.jsonl").read_bytes()
        (folder / "metrics.jsonl.gz").write_bytes(gzip.compress(metrics, mtime=0))
        for name in ("evaluation.json", "evaluation_samples.jsonl"):
            if (run / name).exists():
                (folder / name).write_text((run / name).read_text())


def read_metrics(folder):
    """One dict per update."""
    return [json.loads(line) for line in health.read(folder, "metrics.jsonl").splitlines()]


def read_json(path):
    return json.loads(path.read_text())


def minutes(folder):
    """Minutes of all updates, without evaluation and start."""
    rows = read_metrics(folder)
    return sum(row["perf/seconds"] for row in rows) / 60


def smooth(values, width=8):
    """The mean over the last updates."""
    return [sum(values[max(0, i - width + 1) : i + 1]) / min(i + 1, width) for i in range(len(values))]


def draw(seeds, title, path):
    figure = Figure(figsize=(12, 3.5), layout="constrained")
    for axis, (name, label) in zip(figure.subplots(1, len(PANELS)), PANELS.items()):
        for folder in seeds:
            rows = read_metrics(folder)
            episodes = [row["episode"] for row in rows]
            values = [row[name] for row in rows]
            line = axis.plot(episodes, smooth(values), label=folder.name)
            axis.plot(episodes, values, color=line[0].get_color(), alpha=0.25)
            if name == "objective/kl":
                target = read_json(folder / "args.json")["args"]["kl_target"]
                axis.axhline(target, color="gray", linestyle="--", label="target")
        axis.set(title=label, xlabel="episodes (responses)")
        axis.set_ylim(bottom=0 if name != "objective/scores" else None)
        axis.grid(alpha=0.3)
    figure.axes[1].legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def before_and_after(folder):
    """The table of evaluation.json, in markdown."""
    evaluation = read_json(folder / "evaluation.json")
    lines = [f"| {evaluation['n']} held-out prompts | before | after |", "|---|---|---|"]
    for name, after in evaluation["after"].items():
        lines.append(f"| {name} | {evaluation['before'][name]:.3f} | {after:.3f} |")
    return "\n".join(lines)


def cell(text):
    """A text for a cell of a markdown table."""
    return " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


def first_samples(folder, count=4):
    """The first samples of the evaluation, in markdown."""
    lines = ["| prompt | before | after | score |", "|---|---|---|---|"]
    for line in (folder / "evaluation_samples.jsonl").read_text().splitlines()[:count]:
        row = json.loads(line)
        texts = [cell(row[name]) for name in ("prompt", "before", "after")]
        lines.append(f"| {' | '.join(texts)} | {row['score']:.1f} → {row['score after']:.1f} |")
    return "\n".join(lines)


def scores_and_words(folder, count=6):
    """How the scores of the samples spread, and the words that spread most, in markdown."""
    samples = [json.loads(line) for line in health.read(folder, "evaluation_samples.jsonl").splitlines()]
    before = [row["score"] for row in samples]
    after = [row["score after"] for row in samples]
    lines = ["| of the same responses | before | after |", "|---|---|---|"]
    positive = [sum(score > 0 for score in scores) / len(scores) for scores in (before, after)]
    lines.append(f"| score above 0 | {positive[0]:.0%} | {positive[1]:.0%} |")
    lines.append(f"| largest score | {max(before):.2f} | {max(after):.2f} |")
    words = health.report.new_words(health.report.to_pairs(samples))
    for word, share_before, share in words[:count]:
        lines.append(f'| contain "{word}" | {share_before:.1%} | {share:.1%} |')
    return "\n".join(lines)


def stages(results, seeds):
    """What each stage of the job learned, and how long it took, in markdown."""
    lines = ["| stage | held-out result | minutes of updates |", "|---|---|---|"]
    sft = read_json(results / "sft/evaluation.json")
    losses = f"{sft['before']['loss']:.3f} → {sft['after']['loss']:.3f} nats per token"
    lines.append(f"| `sft` | loss {losses} | {minutes(results / 'sft'):.0f} |")
    for name in ("reward", "judge"):
        evaluation = read_json(results / name / "evaluation.json")
        accuracy = f"accuracy {evaluation['accuracy']:.3f} on {evaluation['n']:,} reviews"
        lines.append(f"| `{name}` | {accuracy} | {minutes(results / name):.0f} |")
    for folder in seeds:
        evaluation = read_json(folder / "evaluation.json")
        scores = [f"{evaluation[side]['score mean']:.3f}" for side in ("before", "after")]
        lines.append(f"| `{folder.name}` | score {' → '.join(scores)} | {minutes(folder):.0f} |")
    return "\n".join(lines)


def tables(job):
    """All tables of the page about a job. -> list of str"""
    results = ROOT / "results" / job
    seeds = sorted(results.glob("seed*"))
    blocks = [stages(results, seeds), health.table(seeds)]
    for folder in seeds:
        blocks += [before_and_after(folder), scores_and_words(folder), first_samples(folder)]
    return blocks


if __name__ == "__main__":
    job, *out = sys.argv[1:]
    if out:
        copy_results(Path(out[0]), ROOT / "results" / job)
    seeds = sorted((ROOT / "results" / job).glob("seed*"))
    draw(seeds, f"{job}: thin line per update, thick line mean of 8 updates", ROOT / f"docs/real-{job}.png")
    print("\n\n".join(tables(job)))
