"""benchmarks/gpu_all.py: what it keeps of a step, what it repeats, and one real step at toy size."""

import _thread
import importlib.util
import json
import subprocess
import sys
import threading
import time
import zipfile
from types import SimpleNamespace

import pytest
from conftest import ROOT

SPEC = importlib.util.spec_from_file_location("gpu_all", ROOT / "benchmarks/gpu_all.py")
gpu_all = importlib.util.module_from_spec(SPEC)
sys.modules["gpu_all"] = gpu_all  # its dataclass looks up its module
SPEC.loader.exec_module(gpu_all)
Step = gpu_all.Step


@pytest.fixture
def run(monkeypatch, tmp_path):
    """run(steps, limit) -> exit code. A step that is ended has one second to finish."""
    for name in ("PYTHON", "SHARED", "TOY", "MODELS", "DATA", "XDIST"):
        monkeypatch.setenv(name, "")  # run_all sets them; pytest restores them
    monkeypatch.setattr(gpu_all, "GRACE", 1)
    folders = {"models": tmp_path / "models", "data": tmp_path / "data", "zip": tmp_path / "all.zip"}

    def run_with(steps, limit=60):
        options = SimpleNamespace(**folders, out=tmp_path / "out", limit=limit, toy=False)
        return gpu_all.run_all(steps, options)

    return run_with


def record(tmp_path, name):
    return json.loads((tmp_path / f"out/{name}.json").read_text())


def test_what_ended_is_kept_and_not_repeated(run, tmp_path, capsys):
    steps = [
        Step(
            "good", 20, "echo text; echo '{\"x\": 1}'; echo run >> $SHARED.log; echo 5 > $WORK/a", files="a"
        ),
        Step("bad", 20, "echo first; echo broken >&2; echo run >> $SHARED.log; exit 3"),
        Step("empty", 20, "true", files="results.json"),
        Step("no data", 20, "false", needs="$MODELS/nothing module:nothing_of_this_name"),
    ]
    assert run(steps) == 1
    good, bad = record(tmp_path, "good"), record(tmp_path, "bad")
    assert good["state"] == "done" and good["printed"] == ['{"x": 1}'] and good["files"] == {"a": "5\n"}
    assert (bad["state"], bad["exit_code"], bad["last_lines"]) == ("failed", 3, ["first", "broken"])
    assert record(tmp_path, "empty")["reason"] == "did not write results.json"
    assert not (tmp_path / "out/no data.json").exists()
    with zipfile.ZipFile(tmp_path / "all.zip") as archive:
        assert {"good.json", "bad.json"} <= set(archive.namelist())
    table = capsys.readouterr().out
    assert "broken" in table and "no nothing_of_this_name, " in table
    assert "1 done, 2 failed, 1 skipped" in table

    assert run(steps) == 1  # again: nothing runs
    assert (tmp_path / "out-work/shared.log").read_text() == "run\nrun\n"
    assert run([steps[0], steps[3]]) == 0


def test_limits(run, tmp_path, capsys):
    """A step that is cut may save something, and runs again. One that takes too long has failed."""
    saves = "trap 'echo saved; exit 143' TERM; echo ran >> $SHARED.log; sleep 60 & wait"
    assert run([Step("long", 60, saves), Step("next", 60, "true")], limit=4) == 1
    assert record(tmp_path, "long")["state"] == "cut"
    assert record(tmp_path, "long")["last_lines"] == ["saved"]
    assert "not started" in capsys.readouterr().out
    assert run([Step("long", 3, saves)]) == 1
    assert record(tmp_path, "long")["reason"] == "longer than 3 s"
    log = tmp_path / "out-work/shared.log"
    assert log.read_text() == "ran\nran\n"

    def press_ctrl_c():
        while log.read_text() == "ran\nran\n":
            time.sleep(0.1)
        _thread.interrupt_main()

    threading.Thread(target=press_ctrl_c).start()
    with pytest.raises(KeyboardInterrupt):
        run([Step("ended", 60, saves)])
    assert (tmp_path / "out-work/ended/log").read_text() == "saved\n"

    start = time.time()
    assert run([Step("deaf", 1, "trap '' TERM; sleep 60; sleep 60")]) == 1  # is killed
    assert time.time() - start < 20


def test_a_step_of_the_toy(tmp_path):
    """30 updates of a script on a pretended GPU become two, which are recorded."""
    words = ["benchmarks/gpu_all.py", "--toy", "--out", tmp_path / "out", "--only", "memory-grpo_math"]
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True)
    *updates, end = [json.loads(line) for line in record(tmp_path, "memory-grpo_math")["printed"]]
    assert [row["update"] for row in updates] == [1, 2]
    assert updates[-1]["recordings"] > updates[0]["recordings"] > 0
    assert updates[0]["peak_reserved"] > 0
    assert end == {"growth_bytes": 0}


def test_the_list():
    names = [step.name for step in gpu_all.all_steps(is_toy=False)]
    assert len(set(names)) == len(names)
    assert {step.name for step in gpu_all.all_steps(is_toy=True)} <= set(names)


def test_memory_growth():
    """A leak, and batches of different sizes."""
    assert gpu_all.memory_growth([100, 50] + [10 + update for update in range(9)]) == 6
    assert gpu_all.memory_growth([100, 50] + [10, 30, 20] * 5) == 0
    assert gpu_all.memory_growth([1, 2]) == 0
