"""Fixtures of the tests of whole runs: small runs of each script, a second or two each."""

import signal
from pathlib import Path

import pytest
from run_tools import maker, rows_of


@pytest.fixture(autouse=True)
def signal_handlers():
    """A run installs its own; put back what was there."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def small(scripts, world, tmp_path):
    """small(script, folder="run", **changes) -> Args of a run of a second or two; the folder is in tmp_path."""
    return maker(scripts, world, tmp_path)


def small_fixture(script):
    """A fixture: run(folder="run", **changes) trains with small flags -> (model, run folder, rows of metrics.jsonl)."""

    @pytest.fixture
    def fixture(scripts, small):
        def run(folder="run", **changes):
            model, folder = scripts[script].train(small(script, folder, **changes))
            return model, Path(folder), rows_of(folder)

        return run

    return fixture


ppo, rloo, sft, reward = (small_fixture(script) for script in ("ppo_sentiment", "rloo_tldr", "sft", "reward_model"))
