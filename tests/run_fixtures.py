"""Fixtures of the tests of whole runs: small runs of each script, a second or two each."""

import shutil
import signal
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from run_tools import BY_HEART, maker, rows_of, write_rows


@contextmanager
def handlers_kept():
    """A run installs its own handlers of signals; put back what was there."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def signal_handlers():
    """Each test leaves the handlers of signals as they were."""
    with handlers_kept():
        yield


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


SCRIPTS = ("ppo_sentiment", "ppo_dialog", "rloo_tldr", "sft", "reward_model")
ppo, dialog, rloo, sft, reward = (small_fixture(script) for script in SCRIPTS)


@pytest.fixture(scope="session")
def talker(scripts, world, tmp_path_factory):
    """What sft.py makes of five short dialogues, which it then knows by heart; their utterances end with " <EOU>". -> model, data"""
    root = tmp_path_factory.mktemp("talker")
    rows = [dict(dialog=utterances, act=acts) for utterances, acts in BY_HEART]
    data = write_rows(root / "data", train=rows, test=rows)
    flags = dict(num_train_epochs=80.0, packing=False, per_device_train_batch_size=5, num_samples=0, save_every=0)
    with handlers_kept():
        _, folder = scripts["sft"].train(maker(scripts, world, root)("sft", dataset_name=data, **flags))
    return SimpleNamespace(model=str(shutil.move(folder / "model", root / "talker")), data=data)
