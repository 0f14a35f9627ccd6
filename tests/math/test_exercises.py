"""exercises.py: the solutions pass, and common mistakes fail with their name."""

import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT))
import exercises  # noqa: E402

NAMES = list(exercises.EXERCISES)
MISTAKES = [(name, i) for name in NAMES for i in range(len(exercises.EXERCISES[name].mistakes))]


@pytest.mark.parametrize("name", NAMES)
def test_the_solution_is_right(scripts, tmp_path, monkeypatch, capsys, name):
    """First a stub is written, which is not right yet; then the solution takes its place."""
    monkeypatch.chdir(tmp_path)
    exercises.main([name])
    path = tmp_path / f"my_{name}.py"
    assert f"wrote my_{name}.py" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        exercises.main([name])
    assert "still the stub" in capsys.readouterr().out
    script = exercises.EXERCISES[name].script
    path.write_text(f"from {script} import *\n\n\n{exercises.solution(name)}\n")
    exercises.main([name])
    assert "is right" in capsys.readouterr().out


@pytest.mark.parametrize("name, i", MISTAKES)
def test_a_mistake_is_found_and_named(name, i):
    mistake, old, new = exercises.EXERCISES[name].mistakes[i]
    function = exercises.with_mistake(name, old, new)
    assert exercises.difference(name, function) is not None
    assert exercises.recognize(name, function) == mistake


@pytest.mark.parametrize("line, shown", [("rewards.nowhere", "it raised"), ("rewards", "of shape [(4, 6)]")])
def test_other_errors_are_shown(tmp_path, line, shown):
    path = tmp_path / "my_gae.py"
    path.write_text(f"def gae(rewards, values, mask, gamma, lam):\n    return {line}\n")
    text, is_right = exercises.check("gae", path)
    assert not is_right and shown in text
