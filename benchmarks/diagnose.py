"""Does report.py name the true cause of a failed run, and is it silent about healthy ones?

    python benchmarks/diagnose.py run --only healthy --jobs 2    # whole runs, those that are missing
    python benchmarks/diagnose.py findings --only unseen         # what report.py says of each run
    python benchmarks/diagnose.py findings --only unseen --save causes.jsonl    # for a judge
    python benchmarks/diagnose.py table                          # results/diagnose/checks.json

healthy: runs with seeds and flags on which the limits of report.py were not chosen. A finding in them is a false alarm.
unseen, unseen2, unseen3, unseen4: lists of faults and bad settings in results/diagnose, each with its true cause. The
author of a list had not read report.py. Checks were added after each measurement, so how many of these faults
report.py names today says nothing about new faults. results/diagnose/verdicts.jsonl has what two judges said of each
list before that. The lists and their runs are of the second edition: to run them again, use a worktree of 21db0b9.
faults: such a list, on which checks were developed.

table: which check finds which fault, of all these lists and of results/gallery, from the committed runs. A fault is
named if one of the first three causes matches its pattern in results/diagnose/naming.json; one reader wrote these
patterns, and is kinder than the two judges. A check is needed for a fault if it is no longer named without the check.
The table of the 41 checks of the second edition, checks_before.json:

    git show 21db0b9:report.py > /tmp/report_before.py
    python benchmarks/diagnose.py table --report /tmp/report_before.py --save results/diagnose/checks_before.json
"""

import argparse
import gzip
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "results/diagnose"
LISTS = ("unseen4", "unseen3", "unseen2", "unseen", "faults")
KEPT = ("metrics.jsonl", "samples.jsonl", "evaluation_samples.jsonl", "tokens.jsonl")
HEALTHY = [  # script, flags
    *[("ppo_sentiment", f"--seed {seed}") for seed in (11, 12, 13, 14)],
    ("ppo_sentiment", "--learning-rate 1.41e-5 --seed 15"),
    ("ppo_sentiment", "--value-model-path checkpoints/reviews-lm --seed 16"),
    *[("ppo_dialog", f"--seed {seed}") for seed in (11, 12)],
    ("ppo_dialog", "--intent-reward match --seed 13"),
    *[("rloo_tldr", f"--seed {seed}") for seed in (11, 12, 13)],
    ("rloo_tldr", "--kl-estimator k3 --seed 14"),
    ("rloo_tldr", "--rloo-k 4 --seed 15"),
    *[("grpo_math", f"--seed {seed}") for seed in (11, 12, 13, 14)],
    ("grpo_math", "--kl-coef 0.04 --seed 15"),
    ("grpo_math", "--num-mini-batches 4 --gradient-accumulation-steps 1 --seed 16"),
]


def read_faults(list_name):
    """list_name: one of LISTS -> list of dict"""
    with open(FOLDER / f"{list_name}.jsonl") as file:
        return [json.loads(line) for line in file]


def flag_words(flags):
    """{"reward_fn": ["a", "b"]} -> ["--reward-fn", "a", "b"]"""
    words = []
    for name, value in flags.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return [word.replace("_", "-") if word.startswith("--") else word for word in words]


def faulty_source(fault):
    """The source of the fault's script with the fault in it."""
    sys.path.insert(0, str(ROOT / "tests/faults"))
    from mutate import find_function

    source = (ROOT / f"{fault['script']}.py").read_text()
    if not fault["function"]:
        return source
    start, end = find_function(source, fault["function"])
    body = source[start:end]
    assert body.count(fault["old"]) == 1, fault["name"]
    return source[:start] + body.replace(fault["old"], fault["new"]) + source[end:]


def run_one(name, script, source, words):
    """A whole run of a script, with one thread. What report.py needs goes to results/diagnose/runs/NAME.

    name: LIST/NAME, as of names_of_runs
    """
    target = FOLDER / "runs" / name
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder).resolve() / "project"
        project.mkdir()
        for path in ROOT.iterdir():
            if path.name not in (f"{script}.py", "runs", "__pycache__"):
                (project / path.name).symlink_to(path)
        (project / f"{script}.py").write_text(source)
        command = [sys.executable, f"{script}.py", *words, "--output-dir", "run"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        end = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)
        if not (project / "run/metrics.jsonl").exists():
            raise RuntimeError(f"{name}:\n{end.stdout[-2000:]}{end.stderr[-3000:]}")
        target.mkdir(parents=True, exist_ok=True)
        for file_name in KEPT:
            path = project / "run" / file_name
            if path.exists():
                with open(path, "rb") as plain, gzip.open(target / f"{file_name}.gz", "wb") as packed:
                    shutil.copyfileobj(plain, packed)
        if (project / "run/evaluation.json").exists():
            shutil.copy(project / "run/evaluation.json", target)
        about = json.loads((project / "run/args.json").read_text())
        about["command"] = [f"{script}.py", *words]
        about["exit_code"] = end.returncode
        about["last_line"] = end.stdout.strip().splitlines()[-1:] + end.stderr.strip().splitlines()[-1:]
        (target / "args.json").write_text(json.dumps(about, indent=2))
    print(name, end.returncode, flush=True)


def names_of_runs(only):
    """only: "healthy" or the name of a list -> list of LIST/NAME"""
    if only == "healthy":
        return [f"healthy/{script}-{flags.split()[-1]}" for script, flags in HEALTHY]
    return [f"{only}/{fault['name']}" for fault in read_faults(only)]


def all_runs(only):
    """-> list of (name, script, source, words)"""
    names = names_of_runs(only)
    runs = []
    if only == "healthy":
        for name, (script, flags) in zip(names, HEALTHY):
            runs.append((name, script, (ROOT / f"{script}.py").read_text(), flags.split()))
    else:
        for name, fault in zip(names, read_faults(only)):
            runs.append((name, fault["script"], faulty_source(fault), flag_words(fault["flags"])))
    return runs


def run_all(only, jobs):
    todo = [run for run in all_runs(only) if not (FOLDER / "runs" / run[0] / "args.json").exists()]
    with ThreadPoolExecutor(jobs) as pool:
        for end in [pool.submit(run_one, *run) for run in todo]:
            try:
                end.result()
            except RuntimeError as error:
                print(error, flush=True)


def print_findings(only, save=None):
    """What report.py says of each run that is there: its titles, and the first three causes.

    save: a file for lines with the name, the true cause and these three
    """
    sys.path.insert(0, str(ROOT))
    import report

    true_causes = {}
    if only != "healthy":
        true_causes = {f"{only}/{fault['name']}": fault["cause"] for fault in read_faults(only)}
    num_runs, num_silent = 0, 0
    lines = []
    for name in names_of_runs(only):
        folder = FOLDER / "runs" / name
        if not (folder / "args.json").exists():
            continue
        findings = report.find_problems(report.read_run(folder))
        num_runs += 1
        num_silent += not findings
        print(f"{name}: {'; '.join(finding.title for finding in findings) or 'nothing'}")
        causes = [cause for finding in findings for cause in finding.causes][:3]
        for i, cause in enumerate(causes, 1):
            print(f"    {i}. {cause}")
        lines.append({"name": name, "true cause": true_causes.get(name), "causes": causes})
    print(f"nothing found in {num_silent} of {num_runs} runs")
    if save is not None:
        save.write_text("".join(json.dumps(line) + "\n" for line in lines))


def folder_of(name):
    """The run of a fault. name: LIST/NAME, gallery/NAME, or results/NAME for a run of another purpose"""
    group, _, rest = name.partition("/")
    if group == "results":
        return ROOT / "results" / rest
    return ROOT / "results" / name if group == "gallery" else FOLDER / "runs" / name


def import_report(path):
    """report.py, or an earlier version of it in another file."""
    spec = importlib.util.spec_from_file_location("report_to_measure", path)
    report = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = report  # dataclasses look it up
    spec.loader.exec_module(report)
    report.BANDS = ROOT / "results/reference_bands.json"
    return report


def finding_of(report, check, run):
    """What one check says. -> Finding or None. Checks of earlier versions return a Finding themselves."""
    return report.run_check(check, run) if hasattr(report, "run_check") else check(run)


def named_faults(report, runs, patterns):
    """The faults of which one of the first three causes matches the pattern. -> set of names"""
    named = set()
    for name, run in runs.items():
        causes = [cause for finding in report.find_problems(run) for cause in finding.causes][:3]
        if any(re.search(patterns[name], cause) for cause in causes):
            named.add(name)
    return named


def named_without(report, check_name, runs, patterns):
    """The same if a check is left out."""
    check, all_checks = getattr(report, check_name), dict(getattr(report, "CHECKS", {}))
    if all_checks:
        report.CHECKS.pop(check)
    else:
        setattr(report, check_name, lambda run: None)
    named = named_faults(report, runs, patterns)
    setattr(report, check_name, check)
    if all_checks:
        report.CHECKS.clear()
        report.CHECKS.update(all_checks)
    return named


def make_table(report):
    """Checks x faults. -> dict"""
    patterns = json.loads((FOLDER / "naming.json").read_text())
    runs = {name: report.read_run(folder_of(name)) for name in patterns}
    healthy = {name: report.read_run(folder_of(name)) for name in names_of_runs("healthy")}
    named = named_faults(report, runs, patterns)
    unseen = {name: replace(run, band={}, band_args={}) for name, run in runs.items() if "unseen" in name}
    alone = named_faults(report, unseen, patterns)
    groups = {}
    for name in runs:
        groups.setdefault(name.split("/")[0], []).append(name in named)
    table = {
        "named": {group: f"{sum(right)} of {len(right)}" for group, right in groups.items()},
        "not named": sorted(runs.keys() - named),
        "unseen faults named without the bands of healthy runs": f"{len(alone)} of {len(unseen)}",
        "false alarms": [name for name, run in healthy.items() if report.find_problems(run)],
        "healthy runs": len(healthy),
        "checks": {},
    }
    for check_name in [name for name in vars(report) if name.startswith("check_")]:
        row = {"finds": [], "names": []}
        for name, run in runs.items():
            finding = finding_of(report, getattr(report, check_name), run)
            if finding is not None:
                row["finds"].append(name)
                if any(re.search(patterns[name], cause) for cause in finding.causes[:3]):
                    row["names"].append(name)
        row["needed for"] = sorted(named - named_without(report, check_name, runs, patterns))
        table["checks"][check_name.removeprefix("check_")] = row
    return table


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["run", "findings", "table"])
    parser.add_argument("--only", choices=["healthy", *LISTS], help="for run and findings")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--save", type=Path, help="with findings or table: write to this file")
    parser.add_argument(
        "--report", type=Path, default=ROOT / "report.py", help="with table: another report.py"
    )
    flags = parser.parse_args()
    if flags.what == "table":
        table = make_table(import_report(flags.report))
        (flags.save or FOLDER / "checks.json").write_text(json.dumps(table, indent=1) + "\n")
        for name, row in table.pop("checks").items():
            counts = {column: len(faults) for column, faults in row.items()}
            print(f"{name:20} {counts}")
        print(json.dumps(table, indent=1))
    elif flags.only is None:
        parser.error("--only is missing")
    elif flags.what == "run":
        run_all(flags.only, flags.jobs)
    else:
        print_findings(flags.only, flags.save)
