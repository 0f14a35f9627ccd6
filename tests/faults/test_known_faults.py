"""The table of known faults fits the scripts, and mutate.py saw a test notice each of them."""

import json

import mutate
from conftest import ROOT
from known_faults import FAULTS


def test_every_fault_finds_its_text():
    """And its test is a function in the file it names."""
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    for fault in FAULTS:
        source = (ROOT / f"{fault.script}.py").read_text()
        assert mutate.with_fault(source, fault) != source
        assert mutate.test_exists(fault), fault.test


def test_every_fault_was_killed():
    """mutations.jsonl has one line for each fault, and the test that noticed it."""
    lines = [json.loads(line) for line in mutate.RESULTS.read_text().splitlines()]
    assert [line["fault"] for line in lines] == [fault.name for fault in FAULTS]
    assert all(line["killed_by"] for line in lines)
