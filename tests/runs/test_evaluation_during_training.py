"""--eval-every: the numbers of the final table, during training."""

import re
import shutil

import pytest
import torch
from conftest import ROOT
from run_tools import ALL, SIX_UPDATES, evaluation_of, rows_of, same, timeless, weights

pytest_plugins = ["run_fixtures"]


def numbers_after(name, folder):
    """The numbers of the final table, as --eval-every names them."""
    evaluation = evaluation_of(folder)
    if name == "reward_model":
        evaluation = {key: x for key, x in evaluation.items() if isinstance(x, float)}
    elif name == "dpo_tldr":
        evaluation = evaluation["after"] | evaluation["pairs"]
    else:
        evaluation = evaluation["after"]
    return {f"eval/{key}": x for key, x in evaluation.items()}


@pytest.mark.parametrize("name", ALL)
def test_eval_every(scripts, small, name):
    """Updates 2 and 4 of 6 have the numbers of the final table. (The last evaluation is the final table.)
    Training stays the same, bit for bit."""
    module = scripts[name]
    _, plain = module.train(small(name, "plain", **SIX_UPDATES[name]))
    _, folder = module.train(small(name, "evaluated", **SIX_UPDATES[name] | dict(eval_every=2)))
    rows = timeless(rows_of(folder))
    names = numbers_after(name, folder).keys()
    assert names
    for row in rows:
        found = {key for key in row if key.startswith("eval/")}
        assert found == (set(names) if row["update"] in (2, 4) else set())
    trained = [{key: x for key, x in row.items() if not key.startswith("eval/")} for row in rows]
    assert trained == timeless(rows_of(plain))
    assert same(weights(folder / "model"), weights(plain / "model"))
    assert evaluation_of(folder) == evaluation_of(plain)


@pytest.mark.parametrize("name", ALL)
def test_an_evaluation_is_of_the_policy_after_the_update(scripts, small, monkeypatch, name):
    """A run that stops after update 2 has a final table with the numbers that a longer run logs there."""
    module = scripts[name]
    flags = SIX_UPDATES[name] | dict(lr_scheduler_type="constant", warmup_ratio=0.0)
    _, folder = module.train(small(name, "long", **flags, eval_every=2))
    length = "total_episodes" if "total_episodes" in flags else "num_train_epochs"
    args = small(name, "short", **flags)
    setattr(args, length, type(getattr(args, length))(getattr(args, length) / 3))
    _, short = module.train(args)
    assert len(rows_of(short)) == 2
    logged = rows_of(folder)[1]
    for key, x in numbers_after(name, short).items():
        if key != "eval/reward_offset":  # measured once, at the end
            assert logged[key] == x, key


@pytest.mark.parametrize("name", ALL)
def test_seeds_are_compared_on_the_same_rows(scripts, small, name):
    """Before training, the final table of two seeds is the same; training differs."""
    if name == "reward_model":  # it has no table before training
        flags = dict(num_eval_prompts=5, learning_rate=0.0)
    else:
        flags = SIX_UPDATES[name]
    tables, updates = [], []
    for seed in (1, 2):
        _, folder = scripts[name].train(small(name, f"seed{seed}", **flags | dict(seed=seed)))
        evaluation = evaluation_of(folder)
        tables.append(evaluation if name == "reward_model" else evaluation["before"])
        updates.append(timeless(rows_of(folder)))
        if (folder / "evaluation_samples.jsonl").exists():
            rows = rows_of(folder, "evaluation_samples.jsonl")
            old = [{key: x for key, x in row.items() if "after" not in key} for row in rows]
            tables[-1] = tables[-1], old
    assert tables[0] == tables[1]
    assert updates[0] != updates[1]


def lines_of_the_page():
    """The Python of docs/running.md: to choose a checkpoint, and to load the weights of one."""
    page = (ROOT / "docs/running.md").read_text()
    section = page.split("\n## Evaluation during training")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.S)


@pytest.mark.parametrize("name", ALL)
def test_the_lines_that_choose_a_checkpoint(scripts, small, capsys, name):
    """Those of docs/running.md name the best update, and their command makes a model of it. The final table
    of the copy has the numbers that the run logged there; the run itself stays as it was."""
    module = scripts[name]
    flags = SIX_UPDATES[name] | dict(eval_every=2, save_every=2, keep_checkpoints=1000)
    if name == "grpo_math":
        flags |= dict(lora_r=2)
    _, folder = module.train(small(name, "my-run", **flags))
    last_weights = weights(folder / "model")
    shutil.copytree(folder / "checkpoints/000002", folder / "checkpoints/mine")  # as the page suggests
    second, fourth = rows_of(folder)[1], rows_of(folder)[3]
    changed = [key for key in second if key.startswith("eval/") and second[key] != fourth[key]]
    metric = [*changed, "eval/accuracy"][0]  # that of a classifier may stay the same
    best = min(second, fourth, key=lambda row: row[metric])

    choose, _ = lines_of_the_page()
    code, count = re.subn(r"(?<=best_of = ).*", f"Path({str(folder)!r}), {metric!r}, min", choose)
    assert count == 1
    capsys.readouterr()
    exec(code, {})
    found, command = capsys.readouterr().out.splitlines()
    assert found == f"update {best['update']}: {metric} {best[metric]:.3f}"

    python, program, *words = command.split()
    assert (python, program) == ("python", f"{name}.py")
    module.main(words)
    copy = folder.parent / f"my-run-{best['update']}"
    assert len(rows_of(copy)) == best["update"] and len(rows_of(folder)) == 6
    for key, x in numbers_after(name, copy).items():
        if key != "eval/reward_offset":
            assert x == best[key], key
    assert same(weights(folder / "model"), last_weights)
    assert not same(weights(copy / "model"), last_weights)


def test_the_lines_that_load_a_checkpoint(ppo):
    """Those of docs/running.md load the weights of any update into plain transformers."""
    _, load = lines_of_the_page()
    model, folder, _ = ppo(**SIX_UPDATES["ppo_sentiment"] | dict(save_every=2, keep_checkpoints=100))
    names = {}
    for update, is_last in ((2, False), (6, True)):
        code = load.replace("RUN_FOLDER", str(folder)).replace("000020", f"{update:06d}")
        exec(code, names)
        last = model.policy.state_dict()
        loaded = names["model"].state_dict()
        assert all(torch.equal(x, last[name]) for name, x in loaded.items()) == is_last
