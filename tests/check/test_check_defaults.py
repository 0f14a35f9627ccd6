"""What is right has no errors: defaults, recipes of this repository, and small runs of other tests."""

import inspect

import pytest
from check_helpers import findings, texts
from conftest import ROOT
from run_tools import ALL

import check

pytest_plugins = ["run_fixtures"]


def local_recipes(module):
    """The recipes whose model and data are in this repository."""
    for name, recipe in module.RECIPES.items():
        if all(
            str(x).startswith(("checkpoints/", "data/"))
            for x in (recipe.model_name_or_path, recipe.dataset_name)
        ):
            yield name


@pytest.mark.parametrize("name", ALL)
def test_recipes_of_this_repository(scripts, name, monkeypatch, capsys):
    """No errors, nothing left unchecked; errors() agrees, and prints nothing."""
    monkeypatch.chdir(ROOT)
    module = scripts[name]
    recipes = list(local_recipes(module))
    assert "tiny" in recipes
    for recipe in recipes:
        args = module.parse_args([recipe])
        found = findings(module, args)
        assert texts(found) == [], recipe
        assert texts(found, "not checked") == [], recipe
        capsys.readouterr()
        assert check.errors(module, args) == []
        assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", ALL)
def test_small_runs(scripts, small, name):
    """Random models and a few rows."""
    found = findings(scripts[name], small(name))
    assert texts(found) == []
    assert texts(found, "not checked") == []


def test_every_check_is_in_the_list():
    """A check that nobody calls finds nothing."""
    defined = [f for name, f in inspect.getmembers(check, inspect.isfunction) if name.startswith("check_")]
    parts = {
        check.check_classes,
        check.check_label,
        check.check_scores,
        check.check_references,
        check.check_clipped,
        check.check_order,
        check.check_last_turn,
    }
    assert {*defined} - parts == {*check.CHECKS}
    assert {*check.ONLY_REMARKS} < {*check.CHECKS}


@pytest.mark.parametrize("check_one", check.CHECKS, ids=lambda f: f.__name__)
def test_errors_does_not_skip_errors(check_one):
    """What errors() leaves out yields remarks only."""
    if check_one in check.ONLY_REMARKS:
        assert "error(" not in inspect.getsource(check_one)


def test_errors_never_raises(scripts, small, monkeypatch):
    """Not even if a check does, or if something is missing: the run decides."""

    def broken(x):
        raise RuntimeError("no such thing")
        yield

    monkeypatch.setattr(check, "CHECKS", [broken, check.check_numbers])
    args = small("ppo_sentiment", cliprange=-0.2)
    assert check.errors(scripts["ppo_sentiment"], args) == ["--cliprange cannot be -0.2"]
    assert texts(findings(scripts["ppo_sentiment"], args), "not checked") == [
        "broken (RuntimeError: no such thing)"
    ]


def test_a_run_begins_as_without_it(scripts, small):
    """No process group is started, and the script's functions are its own again."""
    module = scripts["grpo_math"]
    before = (
        module.load_splits,
        module.read_rows,
        module.datasets.load_dataset,
        module.accelerate.PartialState,
    )
    check.errors(module, small("grpo_math"))
    after = module.load_splits, module.read_rows, module.datasets.load_dataset, module.accelerate.PartialState
    assert before == after


def test_the_hub_is_not_there(scripts, small):
    """What cannot be looked at is no error, and the command line says what it was."""
    args = small("ppo_sentiment", model_name_or_path="nobody/no-such-model")
    found = findings(scripts["ppo_sentiment"], args)
    assert texts(found) == []
    assert any("nobody/no-such-model" in text for text in texts(found, "not checked"))
