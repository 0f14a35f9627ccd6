"""curves.png: what is drawn."""

import json
from types import SimpleNamespace

import pytest
from conftest import SCRIPTS
from matplotlib.figure import Figure

pytest_plugins = ["run_fixtures"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_is_drawn(scripts, curves, tmp_path, monkeypatch, name):
    """Each value, the mean of the last twentieth, the target, and only updates that have the metric."""
    rows = [{"update": update, "a": update**2} for update in range(1, 41)]
    rows[30]["b"] = 5.0
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    saved = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, dpi: saved.append((self, path)))
    run = SimpleNamespace(folder=tmp_path, args=SimpleNamespace(recipe="tiny", seed=7))
    titles = {"a": "the first", "b": "the second"}
    scripts[name].Run.plot(run, titles, {"a": 3.5, "b": None})
    [(figure, path)] = saved
    assert path == tmp_path / "curves.png"
    assert "tiny" in figure.get_suptitle() and "seed 7" in figure.get_suptitle()
    first, second = figure.axes
    assert [first.get_title(), second.get_title()] == ["the first", "the second"]
    assert [len(axis.get_lines()) for axis in (first, second)] == [3, 2]  # values, means; target
    values, means, target = first.get_lines()
    assert list(values.get_xdata()) == list(range(1, 41))
    assert list(values.get_ydata()) == [update**2 for update in range(1, 41)]
    assert list(means.get_ydata())[:3] == [1, (1 + 4) / 2, (4 + 9) / 2]  # a window of 40 / 20 updates
    assert set(target.get_ydata()) == {3.5}
    values, means = second.get_lines()
    assert list(values.get_xdata()) == [31]
