"""Mutation testing: puts one known fault at a time into a copy of the project and asks if the tests notice.

    python tests/faults/mutate.py           # all faults, about 10 minutes
    python tests/faults/mutate.py 15 gae    # those of trap 15, and those with "gae" in their name or test
    python tests/faults/mutate.py sft       # those of sft.py

The faults are in known_faults.py. A fault is killed if its test fails with an assertion, or with the error
that the fault names. A fault is broken if its text is not found, if it does not compile, or if its test fails
in another way. The result of each fault is written to mutations.jsonl. Exit code 1 if any fault survives or
is broken.

Tests run in processes forked from this one (Linux, macOS), which has imported the libraries but no script.
"""

import ast
import functools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
sys.dont_write_bytecode = True  # two faults of the same size in the same second would share a .pyc

import pytest  # noqa: E402
from known_faults import FAULTS  # noqa: E402
from rich.console import Console  # noqa: E402

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RESULTS = HERE / "mutations.jsonl"
TIME_LIMIT = 600  # seconds for the test of one fault
NOT_COPIED = {"runs", "results", "wandb"}  # folders of the project that these tests do not need


# ---- Faults in sources -------------------------------------------------------------------------------------


parse = functools.cache(ast.parse)


def find_function(source, path):
    """Where a function or Class.method is in a source. -> start, end, in characters"""
    nodes = parse(source).body
    for name in path.split("."):
        found = [node for node in nodes if getattr(node, "name", None) == name]
        if len(found) != 1:
            raise ValueError(f"there are {len(found)} definitions of {path}")
        nodes = found[0].body
    lines = source.splitlines(keepends=True)
    start = sum(len(line) for line in lines[: found[0].lineno - 1])
    end = sum(len(line) for line in lines[: found[0].end_lineno])
    return start, end


def with_fault(source, fault):
    """The source of a script with a fault in it."""
    start, end = find_function(source, fault.function)
    function = source[start:end]
    if function.count(fault.old) != 1:
        raise ValueError(f"its text is {function.count(fault.old)} times in {fault.script}.{fault.function}")
    changed = source[:start] + function.replace(fault.old, fault.new) + source[end:]
    compile(changed, fault.script, "exec")
    return changed


def test_exists(fault):
    """True if the file of the fault's test has a function with its name."""
    file, _, test = fault.test.partition("::")
    path = ROOT / "tests" / file
    return path.exists() and f"\ndef {test.partition('[')[0]}(" in path.read_text()


def ignore(folder, names):
    """What copies of the project leave out, for shutil.copytree."""
    ignored = {name for name in names if name.startswith(".") or name == "__pycache__"}
    if Path(folder) == ROOT:
        ignored |= NOT_COPIED
    return ignored


# ---- Running tests -----------------------------------------------------------------------------------------


def error_names(error):
    """Names of the class of an exception, or of all exceptions in a group."""
    if not isinstance(error, BaseExceptionGroup):
        return [type(error).__name__]
    return sorted({name for part in error.exceptions for name in error_names(part)})


class Recorder:
    """A pytest plugin that keeps what failed: (test, phase, names of the exceptions)."""

    def __init__(self):
        self.failed = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if report.failed:
            self.failed.append((item.nodeid, call.when, error_names(call.excinfo.value)))
        return report

    def pytest_collectreport(self, report):
        if report.failed:
            last_line = str(report.longrepr).strip().splitlines()[-1]
            self.failed.append((report.nodeid, "collect", [last_line]))


def run_in_child(folder, tests, flags):
    """What a forked process does: run tests of the copy, write what failed to result.json, and end."""
    os.setsid()
    os.chdir(folder)
    out = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    ours = (ROOT, ROOT / "tests", HERE)
    sys.path[:] = [path for path in sys.path if Path(path).resolve() not in ours]
    recorder, code = Recorder(), 3
    try:
        options = [*flags, "-q", "-p", "no:cacheprovider", f"--basetemp={folder}/tmp"]
        code = pytest.main([*tests, *options], plugins=[recorder])
    finally:
        (folder / "result.json").write_text(json.dumps([int(code), recorder.failed]))
        sys.stdout.flush()
        os._exit(0)


def run_tests(folder, tests, flags=(), limit=TIME_LIMIT):
    """Run tests in a fork. -> exit code of pytest (-1: out of time), what failed, seconds"""
    start_time = time.time()
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        run_in_child(folder, [f"tests/{test}" for test in tests], flags)
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        time.sleep(0.05)
        if time.time() - start_time > limit:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            break
    code, failed = json.loads(result.read_text()) if result.exists() else (-1, [])
    return code, failed, round(time.time() - start_time, 1)


def judge(folder, fault):
    """Put a fault into the copy, run its test, and remove the fault. -> a line of mutations.jsonl"""
    path = folder / f"{fault.script}.py"
    source = path.read_text()
    line = {
        "fault": fault.name,
        "trap": fault.trap,
        "script": fault.script,
        "function": fault.function,
        "killed_by": None,
        "seconds": 0.0,
    }
    if not test_exists(fault):
        return line | {"broken": f"there is no test {fault.test}"}
    try:
        path.write_text(with_fault(source, fault))
        code, failed, line["seconds"] = run_tests(folder, [fault.test], ["-x"])
    except (ValueError, SyntaxError) as error:
        return line | {"broken": str(error)}
    finally:
        path.write_text(source)
    if code == 0:
        return line
    if not failed:
        return line | {"broken": f"pytest ended with code {code}"}
    test, phase, errors = failed[0]
    expected = {"AssertionError", "Failed", fault.raises}  # Failed: pytest.raises saw no error
    if code == 1 and phase == "call" and set(errors) <= expected:
        return line | {"killed_by": test.removeprefix("tests/")}
    return line | {"broken": f"{test} {phase} {' '.join(errors)}"}


# ---- Command line ------------------------------------------------------------------------------------------


def outcome(line):
    """What became of a fault, for the screen."""
    if "broken" in line:
        return f"BROKEN: {line['broken']}"
    return line["killed_by"] or "SURVIVED"


def is_chosen(fault, words):
    """True if a word is the fault's trap or script, or part of its name or test. No words: all faults."""
    for word in words:
        if word in (str(fault.trap), fault.script):
            return True
        if not word.isdigit() and (word in fault.name or word in fault.test):
            return True
    return not words


def save_results(new_lines):
    """Write mutations.jsonl in the order of FAULTS: the new lines, and the old ones of all other faults."""
    old_lines = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    by_name = {line["fault"]: line for line in old_lines + new_lines}
    lines = [by_name[fault.name] for fault in FAULTS if fault.name in by_name]
    RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines))


def main(words):
    """Run the faults that the words choose. -> exit code"""
    console = Console(soft_wrap=True, highlight=False, markup=False)
    chosen = [fault for fault in FAULTS if is_chosen(fault, words)]
    if not chosen:
        console.print(f"no fault has {' or '.join(words)} as its trap or script, or in its name or test")
        return 1

    import accelerate, datasets, hypothesis, peft, torch, transformers, tyro  # noqa: E401, F401, I001  for all forks

    no_shrinking = [hypothesis.Phase.explicit, hypothesis.Phase.generate]  # one failing example is enough
    hypothesis.settings.register_profile("mutate", database=None, phases=no_shrinking)
    hypothesis.settings.load_profile("mutate")

    start_time = time.time()
    lines = []
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top).resolve() / "copy"
        shutil.copytree(ROOT, folder, ignore=ignore)
        tests = list(dict.fromkeys(fault.test for fault in chosen if test_exists(fault)))
        code, failed, seconds = run_tests(folder, tests, limit=10 * TIME_LIMIT)
        console.print(f"without a fault: {len(tests)} tests, {len(failed)} failed, {seconds} s")
        if code != 0:
            console.print((folder / "log.txt").read_text()[-3000:])
            return 1
        for i, fault in enumerate(chosen):
            line = judge(folder, fault)
            lines.append(line)
            save_results(lines)
            console.print(f"{i + 1:3}/{len(chosen)}  {line['seconds']:5.1f} s  {fault.name}: {outcome(line)}")

    killed = sum(line["killed_by"] is not None for line in lines)
    broken = sum("broken" in line for line in lines)
    survived = len(lines) - killed - broken
    seconds = time.time() - start_time
    for line in lines:
        if line["killed_by"] is None:
            console.print(f"{line['script']}.py, {line['function']}, {line['fault']}: {outcome(line)}")
    counts = f"{killed} killed, {survived} survived, {broken} broken"
    console.print(f"{len(lines)} faults: {counts}, {seconds:.0f} s")
    return int(killed < len(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
