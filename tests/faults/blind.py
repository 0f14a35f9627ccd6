"""First-try kill rate: faults by an author who has not read the tests, each against all tests of its script.

    python tests/faults/blind.py LIST.jsonl

Each line of a list is a fault: name, script, function, old, new, effect. The outcome of each fault goes to
LIST.outcomes.jsonl: the test that noticed it, or null. Not counted: tests/documents, which only see that a
text differs from its copies, and tests/faults/test_known_faults.py, which looks up texts of known faults.
A function that several scripts share must be the same in all of them (tests/documents/test_contract.py). So a
fault in it is put into all of them, and the tests of all of them count.

The six lists in results/blind-faults name texts of the scripts as they were: run them in a worktree of
commit 21db0b9. Lists 1 to 4 were tried in another way: a fault in a shared function was put into one script
only, and the tests that look up texts were left out with others of their file.
Two faults run at a time; a list of 30 takes about half an hour on 2 cores.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from types import SimpleNamespace

from mutate import ROOT, find_function, ignore, with_fault

TIME_LIMIT = 3600  # seconds for one fault

# script -> what its test files are named after
NAMES = {
    "sft": "sft",
    "reward_model": "reward_model",
    "ppo_sentiment": "ppo",
    "ppo_dialog": "ppo",
    "rloo_tldr": "rloo",
    "grpo_math": "grpo",
    "dpo_tldr": "dpo",
}


def function_source(script, name):
    """The source of a function or Class.method of a script; None if it has none."""
    source = (ROOT / f"{script}.py").read_text()
    try:
        start, end = find_function(source, name)
    except ValueError:
        return None
    return source[start:end]


def sharing_scripts(fault):
    """The scripts that have the function of a fault with the same source, that of the fault first."""
    source = function_source(fault["script"], fault["function"])
    others = [script for script in NAMES if script != fault["script"]]
    sharing = [script for script in others if function_source(script, fault["function"]) == source]
    return [fault["script"], *sharing]


def test_files(scripts):
    """The files with tests of scripts, the likeliest to notice first. -> paths relative to the project"""

    def owners(path):
        return {script for script, name in NAMES.items() if name in path.stem}

    paths = [path for path in sorted(ROOT.glob("tests/*/test_*.py")) if path.stem != "test_known_faults"]
    paths = [path for path in paths if path.parent.name != "documents"]
    paths = [path for path in paths if not owners(path) or owners(path) & set(scripts)]
    return [str(path.relative_to(ROOT)) for path in sorted(paths, key=lambda path: not owners(path))]


def try_fault(fault):
    """Put one fault into a copy of the project and run the tests. -> the outcome, a dict"""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "project"
        shutil.copytree(ROOT, copy, ignore=ignore)
        scripts = sharing_scripts(fault)
        for script in scripts:
            path = copy / f"{script}.py"
            path.write_text(with_fault(path.read_text(), SimpleNamespace(**fault)))
        words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
        words += [f"--basetemp={folder}/tmp", *test_files(scripts)]
        environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            end = subprocess.run(
                ["env", *[f"{name}={value}" for name, value in environment.items()], *words],
                cwd=copy,
                capture_output=True,
                text=True,
                timeout=TIME_LIMIT,
            )
        except subprocess.TimeoutExpired:
            return {"fault": fault["name"], "script": fault["script"], "killed_by": "time limit"}
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", end.stdout, re.M)
    if end.returncode and not failed:
        raise RuntimeError(end.stdout[-2000:] + end.stderr[-2000:])
    return {
        "fault": fault["name"],
        "script": fault["script"],
        "killed_by": failed[0].removeprefix("tests/") if failed else None,
    }


def main():
    path = Path(sys.argv[1])
    faults = [json.loads(line) for line in path.read_text().splitlines()]
    out = path.with_suffix(".outcomes.jsonl")
    out.touch()
    tried = {json.loads(line)["fault"] for line in out.read_text().splitlines()}  # go on where it stopped
    new = [fault for fault in faults if fault["name"] not in tried]
    with ThreadPoolExecutor(2) as pool:
        for future in as_completed([pool.submit(try_fault, fault) for fault in new]):
            outcome = future.result()
            with open(out, "a") as file:
                file.write(json.dumps(outcome) + "\n")
            print(
                outcome["killed_by"] or "SURVIVED", "|", outcome["script"], "|", outcome["fault"], flush=True
            )
    outcomes = [json.loads(line) for line in out.read_text().splitlines()]
    killed = sum(outcome["killed_by"] is not None for outcome in outcomes)
    print(f"{killed} of {len(faults)} killed on the first try")


if __name__ == "__main__":
    main()
