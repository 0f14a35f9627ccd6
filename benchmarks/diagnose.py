"""Does report.py name the true cause of a failed run, and is it silent about healthy ones?

    python benchmarks/diagnose.py    # writes results/diagnose/checks.json

The runs are committed, but only two of the list faults. healthy: 20 runs with seeds and flags on which the limits of
report.py were not chosen. A finding in them is a false alarm. unseen, unseen2, unseen3, unseen4: lists of faults and
bad settings in results/diagnose, each with its true cause. The author of a list had not read report.py. Checks were
added after each measurement, so how many of these faults report.py names today says nothing about new faults.
results/diagnose/verdicts.jsonl has what two judges said of each list before that. faults: such a list, on which
checks were developed. The lists and their runs are of the second edition, 21db0b9, whose diagnose.py ran them.

The table: which check finds which fault, of all these runs, of results/gallery and of two other results. A fault is
named if one of the first three causes matches its pattern in results/diagnose/naming.json; one reader wrote these
patterns, and is kinder than the two judges. A check is needed for a fault if it is no longer named without the check.
"""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

from archive import run_folder

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "results/diagnose"


def folder_of(name):
    """The run of a fault. name: LIST/NAME, gallery/NAME, or results/NAME for a run of another purpose"""
    group, _, rest = name.partition("/")
    if group in ("results", "gallery"):
        return run_folder(ROOT / "results" / name.removeprefix("results/"))
    return run_folder(FOLDER / "runs" / group) / rest


def healthy_runs(report):
    """-> dict: name -> run"""
    folders = sorted(run_folder(FOLDER / "runs/healthy").iterdir())
    return {folder.name: report.read_run(folder) for folder in folders}


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
    checks = dict(report.CHECKS)
    del report.CHECKS[getattr(report, check_name)]
    named = named_faults(report, runs, patterns)
    report.CHECKS.clear()
    report.CHECKS.update(checks)
    return named


def make_table(report):
    """Checks x faults. -> dict"""
    patterns = json.loads((FOLDER / "naming.json").read_text())
    runs = {name: report.read_run(folder_of(name)) for name in patterns}
    healthy = healthy_runs(report)
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
            finding = report.run_check(getattr(report, check_name), run)
            if finding is not None:
                row["finds"].append(name)
                if any(re.search(patterns[name], cause) for cause in finding.causes[:3]):
                    row["names"].append(name)
        row["needed for"] = sorted(named - named_without(report, check_name, runs, patterns))
        table["checks"][check_name.removeprefix("check_")] = row
    return table


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    import report

    table = make_table(report)
    (FOLDER / "checks.json").write_text(json.dumps(table, indent=1) + "\n")
    for name, row in table.pop("checks").items():
        counts = {column: len(faults) for column, faults in row.items()}
        print(f"{name:20} {counts}")
    print(json.dumps(table, indent=1))
