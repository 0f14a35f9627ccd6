"""The gallery of docs/debugging.md and docs/grpo_tools.md: real runs of the defaults, each with one fault put in.

    python benchmarks/gallery.py run --jobs 2    # the runs that are not there yet; all of them within an hour
    python benchmarks/gallery.py draw            # their pictures: docs/gallery/NAME.png

A fault is one of tests/faults/known_faults.py, by its name, a change of the source, or a bad setting. Each run stops as
soon as it has shown its fault; until then it has the learning rates of a whole run, so that its curves can be compared
with the healthy band. results/gallery/NAME.zip: metrics, samples and tokens of the run. The page has the change as
`the_line` writes it; tests/documents/test_gallery.py checks that.
"""

import argparse
import difflib
import importlib
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from archive import pack, run_folder

ROOT = Path(__file__).resolve().parents[1]
GALLERY = ROOT / "results/gallery"
PICTURES = ROOT / "docs/gallery"
KEPT = ("metrics.jsonl", "samples.jsonl", "tokens.jsonl")
sys.path[:0] = [str(ROOT), str(ROOT / "tests/faults")]


@dataclass
class Entry:
    """One fault of the gallery."""

    name: str  # of its folder and anchor
    script: str
    fault: str = ""  # the name of a known fault
    change: tuple = ()  # or: function, old text, new text
    flags: dict = field(default_factory=dict)
    updates: int = 60
    metrics: tuple = ("objective/scores", "objective/kl", "policy/entropy_avg", "val/ratio_var")
    no_ratio_check: bool = False  # the script would end before or in its first update
    existing: str = ""  # a whole run of results/; nothing is run


PPO = "ppo_sentiment"
TOOL_METRICS = (
    "objective/scores",
    "tools/call_frequency",
    "tools/failure_frequency",
    "completions/clipped_ratio",
)
ENTRIES = [
    Entry(
        name="score-after-the-last-token",
        script=PPO,
        change=("token_rewards", "lengths[:, None] - 1", "lengths[:, None].clamp(max=kl.shape[1] - 1)"),
    ),
    Entry(
        name="score-on-every-token",
        script=PPO,
        fault="the score at every token",
        metrics=("objective/scores", "objective/kl", "loss/value_avg", "objective/rlhf_reward"),
    ),
    Entry(
        name="hidden-states-off-by-one",
        script=PPO,
        fault="hidden states one to the right",
        no_ratio_check=True,
        metrics=("sampling/logprob_gap_mean", "objective/scores", "objective/kl", "policy/entropy_avg"),
        updates=40,
    ),
    Entry(
        name="gae-forwards",
        script=PPO,
        fault="gae forwards in time",
        metrics=("objective/scores", "objective/kl", "loss/value_avg", "policy/entropy_avg"),
    ),
    Entry(
        name="kl-sign",
        script=PPO,
        change=("token_rewards", "-kl_coef * kl, 0.0", "kl_coef * kl, 0.0"),
        metrics=("objective/kl", "objective/kl_coef", "objective/scores", "policy/entropy_avg"),
    ),
    Entry(
        name="no-kl-penalty",
        script=PPO,
        flags=dict(kl_coef=0.0, kl_target=None),
        metrics=("objective/scores", "objective/kl", "completions/distinct_2", "policy/entropy_avg"),
    ),
    Entry(
        name="coefficient-the-wrong-way",
        script=PPO,
        change=("adaptive_kl_coef", "1 + error * episodes", "1 - error * episodes"),
        metrics=("objective/kl", "objective/kl_coef", "objective/scores", "policy/entropy_avg"),
        flags=dict(kl_horizon=1000),
        updates=90,
    ),
    Entry(
        name="reference-moves",
        script=PPO,
        change=(
            "train",
            "# DDP keeps gradients in its buckets\n",
            "# DDP keeps gradients in its buckets\n"
            "        ref_model.load_state_dict(model.policy.state_dict())\n",
        ),
        metrics=("objective/kl", "objective/kl_coef", "objective/scores", "completions/distinct_2"),
    ),
    Entry(
        name="stale-old-logprobs",
        script=PPO,
        change=(
            "train",
            'old_logprobs, old_values = b["logprobs"][rows, :t]',
            'old_logprobs, old_values = b["ref_logprobs"][rows, :t]',
        ),
        metrics=("val/ratio_var", "policy/clipfrac_avg", "policy/approxkl_avg", "objective/scores"),
    ),
    Entry(
        name="advantages-have-the-wrong-sign",
        script=PPO,
        change=("clipped_policy_loss", "torch.max(", "-torch.max("),
    ),
    Entry(
        name="clip-takes-the-better",
        script=PPO,
        fault="the policy loss takes the better of two",
        metrics=("val/ratio_var", "policy/approxkl_avg", "objective/kl", "objective/scores"),
    ),
    Entry(
        name="learning-rate-too-high",
        script=PPO,
        flags=dict(learning_rate=1e-3),
    ),
    Entry(
        name="dropout-on",
        script=PPO,
        change=(
            "rollout",
            "    model.eval()\n",
            "    model.train()\n    for module in model.modules():\n"
            "        if isinstance(module, nn.Dropout):\n            module.p = 0.1\n",
        ),
        no_ratio_check=True,
        metrics=("val/ratio_var", "sampling/logprob_gap_mean", "objective/kl", "objective/scores"),
        updates=40,
    ),
    Entry(
        name="top-k-sampling",
        script=PPO,
        change=(
            "sample_next",
            "probs = token_logits(hidden, head.weight, temperature, head.bias).softmax(-1)",
            "logits = token_logits(hidden, head.weight, temperature, head.bias)\n"
            "    cut = logits.topk(3).values[:, -1:]\n"
            "    probs = logits.masked_fill(logits < cut, -torch.inf).softmax(-1)",
        ),
        no_ratio_check=True,
        metrics=("sampling/logprob_gap_mean", "objective/kl", "policy/entropy_avg", "objective/scores"),
        updates=40,
    ),
    Entry(
        name="critic-does-not-learn",
        script=PPO,
        flags=dict(vf_coef=0.0),
        metrics=("loss/value_avg", "objective/scores", "objective/kl", "policy/clipfrac_avg"),
    ),
    Entry(
        name="reward-exploited",
        script=PPO,
        existing="ppo-sentiment-hacked",
        metrics=("objective/scores", "objective/kl", "completions/distinct_2", "objective/kl_coef"),
    ),
    Entry(
        name="weak-reward-model",
        script="rloo_tldr",
        existing="rloo-weak-reward",
        metrics=("objective/scores", "judge/scores", "objective/kl", "completions/mean_length"),
    ),
    Entry(
        name="groups-mixed-up",
        script="rloo_tldr",
        change=("rloo_advantages", "view(-1, rloo_k)", "view(rloo_k, -1).T"),
        metrics=("objective/scores", "judge/scores", "objective/kl", "policy/entropy_avg"),
        updates=40,
    ),
    Entry(
        name="equal-groups",
        script="grpo_math",
        flags=dict(temperature=0.1),
        metrics=("frac_reward_zero_std", "objective/scores", "policy/entropy_avg", "completions/mean_length"),
        updates=40,
    ),
    Entry(
        name="no-stop-token",
        script="grpo_math",
        change=(
            "end_tokens",
            "return torch.tensor(sorted(ids))",
            'return torch.tensor([tokenizer.convert_tokens_to_ids("<|endoftext|>")])',
        ),
        metrics=(
            "completions/clipped_ratio",
            "completions/mean_length",
            "objective/scores",
            "policy/entropy_avg",
        ),
        updates=20,
    ),
    Entry(
        name="no-chat-template",
        script="grpo_math",
        change=(
            "render_chat",
            "return tokenizer.apply_chat_template(",
            "return plain_text(messages)\n    tokenizer.apply_chat_template(",
        ),
        metrics=(
            "objective/scores",
            "completions/mean_length",
            "completions/clipped_ratio",
            "policy/entropy_avg",
        ),
        updates=20,
    ),
    Entry(
        name="tool-is-avoided",
        script="grpo_tools",
        change=(
            "rollout",
            "# nan: does not apply to a row\n",
            '# nan: does not apply to a row\n    b["scores"] -= 0.5 * b["calls"]\n',
        ),
        metrics=TOOL_METRICS,
        updates=25,
    ),
    Entry(
        name="calls-without-need",
        script="grpo_tools",
        change=(
            "rollout",
            "# nan: does not apply to a row\n",
            '# nan: does not apply to a row\n    b["scores"] += 0.5 * b["calls"]\n',
        ),
        metrics=TOOL_METRICS,
        updates=25,
    ),
]


# ---- Runs --------------------------------------------------------------------------------------------------


def changes_of(entry):
    """What makes the fault. -> list of (function, old text, new text)"""
    from known_faults import FAULTS

    if not entry.fault:
        return [entry.change] if entry.change else []
    [fault] = [fault for fault in FAULTS if fault.name == entry.fault]
    assert fault.script == entry.script, entry
    return [(fault.function, fault.old, fault.new)]


def faulty_source(entry):
    """The source of the entry's script with its fault."""
    from mutate import find_function

    source = (ROOT / f"{entry.script}.py").read_text()
    for function, old, new in changes_of(entry):
        start, end = find_function(source, function)
        body = source[start:end]
        assert body.count(old) == 1, (entry.name, function, body.count(old))
        source = source[:start] + body.replace(old, new) + source[end:]
    return source


class Enough(Exception):
    """The run has shown its fault."""


def train_faulty(entry, project, output):
    """Train in this process with the script of a copy of the project. -> None; the run is in the folder output"""
    sys.path.insert(0, str(project))
    script = importlib.import_module(entry.script)
    assert Path(script.__file__).parent == project
    save = script.Run.checkpoint

    def checkpoint(self, state):
        save(self, state)
        if state["update"] == entry.updates:
            raise Enough

    script.Run.checkpoint = checkpoint
    flags = dict(recipe="tiny", output_dir=output, num_sample_generations=20, save_every=0)
    if hasattr(script.Args, "num_eval_prompts"):
        flags["num_eval_prompts"] = 8  # the evaluation is not kept
    args = replace(script.RECIPES["tiny"], **(flags | entry.flags))
    try:
        script.train(args)
    except Enough:
        pass


def run_one(entry):
    """Run an entry in a process of its own, with one thread, and keep what report.py needs."""
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder).resolve() / "project"
        project.mkdir()
        for path in ROOT.iterdir():  # links, but the script with the fault
            if path.name not in (f"{entry.script}.py", "runs", "__pycache__"):
                (project / path.name).symlink_to(path)
        source = faulty_source(entry)
        if entry.no_ratio_check:
            for limit in (0.02, 0.1):  # of the update, and of the sampler
                source = source.replace(f"assert gap < {limit}", "assert True")
            source = source.replace("if not gap < 0.1:", "if False:")  # of check_model
        (project / f"{entry.script}.py").write_text(source)
        words = [sys.executable, __file__, "train", entry.name, str(project), f"{folder}/run"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        end = subprocess.run(words, cwd=project, env=environment, capture_output=True, text=True)
        if not (Path(folder) / "run/metrics.jsonl").exists():
            raise RuntimeError(f"{entry.name}:\n{end.stdout[-2000:]}{end.stderr[-3000:]}")
        paths = [Path(folder) / "run" / name for name in KEPT]
        files = {path.name: path.read_text() for path in paths if path.exists()}
        about = json.loads((Path(folder) / "run/args.json").read_text())
        about["command"] = [f"{entry.script}.py"]
        about["args"]["output_dir"] = entry.name
        files["args.json"] = json.dumps(about, indent=2)
        pack(GALLERY / f"{entry.name}.zip", files)
    print(entry.name, flush=True)


def run_all(jobs, only):
    todo = [entry for entry in ENTRIES if not entry.existing and only in (None, entry.name)]
    todo = [entry for entry in todo if not (GALLERY / f"{entry.name}.zip").exists()]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run_one, todo))


# ---- The page ----------------------------------------------------------------------------------------------


def run_of(entry):
    """The run of an entry, as report.py reads it."""
    import report

    name = entry.existing or f"gallery/{entry.name}"
    run = report.read_run(run_folder(ROOT / "results" / name))
    bands = json.loads(report.BANDS.read_text())
    run.script = entry.script
    band = bands.get(f"{entry.script} tiny", {})  # there is none of grpo_tools.py
    run.band, run.band_args = band.get("metrics", {}), band.get("args", {})
    return run


def draw(entry, run):
    """docs/gallery/NAME.png: four metrics of the run, and the healthy band."""
    from matplotlib.figure import Figure

    import report

    titles = {name: title for metrics in report.METRICS.values() for name, (title, _) in metrics.items()}
    figure = Figure(figsize=(13, 2.7), layout="constrained")
    last = run.metrics[-1]["update"]
    for axis, name in zip(figure.subplots(1, len(entry.metrics)), entry.metrics):
        rows = [row for row in run.metrics if name in row]
        axis.plot(
            [row["update"] for row in rows], [row[name] for row in rows], color="tab:red", label="this run"
        )
        if name in run.band:
            band = run.band[name]
            shown = [i for i, update in enumerate(band["update"]) if update <= last]
            updates = [band["update"][i] for i in shown]
            axis.fill_between(
                updates,
                [band["5"][i] for i in shown],
                [band["95"][i] for i in shown],
                color="gray",
                alpha=0.4,
                label="healthy seeds",
            )
        axis.set_title(titles.get(name, name), fontsize=9)
        axis.set_xlabel("update", fontsize=8)
        axis.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=8)
    PICTURES.mkdir(exist_ok=True)
    figure.savefig(PICTURES / f"{entry.name}.png", dpi=80)


def the_line(entry):
    """The change that made the fault, as markdown: whole lines."""
    if entry.existing:
        return f"The run: `results/{entry.existing}`, see [results](../results/README.md)."
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in entry.flags.items())
    if not (entry.fault or entry.change):
        return f"The setting: `python {entry.script}.py {flags}`"
    right = (ROOT / f"{entry.script}.py").read_text().splitlines()
    _, _, *lines = difflib.unified_diff(right, faulty_source(entry).splitlines(), n=0, lineterm="")
    lines = [line for line in lines if not line.startswith("@@")]
    indent = min(len(line[1:]) - len(line[1:].lstrip()) for line in lines)
    shown = [line[0] + line[1 + indent :] for line in lines]
    [(function, _, _)] = changes_of(entry)
    with_flags = f", with `{flags}`" if flags else ""
    head = f"In `{function}` of `{entry.script}.py`{with_flags}:"
    return "\n".join([head, "", "```diff", *shown, "```"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Runs with one fault each.")
    parser.add_argument("what", choices=["run", "draw", "train"])
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--only", help="only this entry")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    flags = parser.parse_args()
    if flags.what == "train":
        name, project, output = flags.words
        [entry] = [entry for entry in ENTRIES if entry.name == name]
        train_faulty(entry, Path(project), output)
    elif flags.what == "run":
        run_all(flags.jobs, flags.only)
    else:
        for entry in ENTRIES:
            draw(entry, run_of(entry))
