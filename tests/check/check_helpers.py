"""Helpers for tests of check.py."""

import importlib

import check


def findings(module, args, is_quick=False):
    """All findings about a run. -> list of Finding"""
    importlib.invalidate_caches()  # tests write the files of reward functions
    return check.find(check.Inputs(module, args, is_quick))


def texts(found, kind="error"):
    """The texts of the findings of a kind."""
    return [finding.text for finding in found if finding.kind == kind]


def assert_only(found, *words):
    """There is one error, or several about one cause, and each word is in the first one."""
    errors = texts(found)
    assert len(errors) == 1, errors
    for word in words:
        assert word in errors[0], errors


def assert_remark(found, *words):
    """There is no error, and one remark has all these words."""
    assert texts(found) == []
    fitting = [text for text in texts(found, "remark") if all(word in text for word in words)]
    assert len(fitting) == 1, texts(found, "remark")
