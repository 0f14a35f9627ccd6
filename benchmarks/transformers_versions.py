"""Do the scripts compute the same with older versions of transformers? Two updates of each default.

    python benchmarks/transformers_versions.py run OLD/bin/python OLDER/bin/python   # results/transformers-versions.json
    python benchmarks/transformers_versions.py show                                  # a table

`run` compares this environment with others, which may be overlays of it:

    python -m pip install --target OLD --no-deps transformers==5.16.1 "huggingface-hub<2"
    PYTHONPATH=OLD python ...

An argument that is a folder is such an overlay; everything else is a python. Equal means: each metric of each update
and each number of the final table has the same bits. Times and memory are left out.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results/transformers-versions.json"
FEW_PROMPTS = "--num-eval-prompts 32"
FEW_TASKS = "--num-eval-prompts 16 --num-eval-samples 4"
FLAGS = {  # two updates of the default, and a short evaluation
    "sft": "--num-train-epochs 0.025 --num-eval-prompts 16",
    "reward_model": "--num-train-epochs 0.018 --num-eval-prompts 64",
    "dpo_tldr": "--num-train-epochs 0.0064 --num-eval-pairs 32 --num-eval-prompts 16",
    "ppo_sentiment": f"--total-episodes 256 {FEW_PROMPTS}",
    "ppo_dialog": f"--total-episodes 256 {FEW_PROMPTS}",
    "rloo_tldr": f"--total-episodes 256 {FEW_PROMPTS}",
    "grpo_math": f"--total-episodes 512 {FEW_TASKS}",
    "grpo_tools": f"--total-episodes 512 {FEW_TASKS}",
}


def numbers_of(script, environment):
    """Run the default of a script. -> version of transformers; dict: name -> number, of all updates"""
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    python = environment or sys.executable
    if Path(python).is_dir():
        env["PYTHONPATH"], python = python, sys.executable
    with tempfile.TemporaryDirectory() as folder:
        words = f"{ROOT / script}.py {FLAGS[script]} --save-every 0 --output-dir {folder}/run"
        subprocess.run([python, *words.split()], env=env, check=True, stdout=subprocess.DEVNULL)
        run = Path(folder, "run")
        version = json.loads((run / "args.json").read_text())["versions"]["transformers"]
        evaluation = json.loads((run / "evaluation.json").read_text())
        updates = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    numbers = {f"evaluation {name}": x for name, x in flat(evaluation)}
    for row in updates:
        for name, x in row.items():
            if name != "eps" and not name.startswith("perf/"):
                numbers[f"update {row['update']} {name}"] = x
    return version, numbers


def flat(tree, prefix=""):
    """The numbers of nested dicts. -> pairs of a name and a number"""
    for name, x in tree.items():
        if isinstance(x, dict):
            yield from flat(x, f"{prefix}{name} ")
        elif isinstance(x, int | float):
            yield f"{prefix}{name}", x


def run(*environments):
    """Compare each environment with this one."""
    results = {}
    for script in FLAGS:
        version, numbers = numbers_of(script, None)
        result = dict(flags=FLAGS[script], version=version, numbers=numbers, others={})
        for environment in environments:
            other_version, other_numbers = numbers_of(script, environment)
            assert other_version not in (version, *result["others"]), f"{other_version} twice"
            assert other_numbers.keys() == numbers.keys()
            result["others"][other_version] = {
                name: x for name, x in other_numbers.items() if x != numbers[name]
            }
        results[script] = result
        RESULTS.write_text(json.dumps(results, indent=1))


def table():
    """How many numbers were compared, and which metrics differ, as a markdown table."""
    results = json.loads(RESULTS.read_text())
    versions = sorted(next(iter(results.values()))["others"])
    [newest] = {result["version"] for result in results.values()}
    lines = ["| command | numbers | " + " | ".join(f"{v} / {newest}" for v in versions) + " |"]
    lines.append("|---" * (2 + len(versions)) + "|")
    for script, result in results.items():
        cells = []
        for version in versions:
            names = {name.split()[-1] for name in result["others"][version]}
            cells.append(f"equal, except {', '.join(sorted(names))}" if names else "equal")
        cells = [f"`{script}.py {result['flags']}`", str(len(result["numbers"])), *cells]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run(*sys.argv[2:])
    print(table())
