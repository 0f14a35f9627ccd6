"""What README.md and docs/ promise: the snippet runs, the commands parse, every metric is explained and every flag exists."""

import ast
import contextlib
import importlib.util
import io
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import SCRIPTS
from run_tools import reward_file

pytest_plugins = ["run_fixtures"]
ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_readme_snippet_answers_a_prompt(ppo, tiny_lm):
    """The Python block of the README, with its folder replaced by that of a run, prints the prompt and a continuation."""
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S).group(1)
    _, folder, _ = ppo(model_name_or_path=tiny_lm())
    block = block.replace("runs/ppo_sentiment/<your run>/model", str(folder / "model"))
    assert str(folder) in block
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(block, {})
    assert out.getvalue().startswith("The plot of this film") and len(out.getvalue().strip()) > len("The plot of this film")


def code_commands():
    """Those that stand in code blocks (four spaces), which a reader will paste."""
    for text in [page.read_text() for page in PAGES] + [(ROOT / f"{name}.py").read_text().split('"""')[1] for name in SCRIPTS]:
        for line in re.findall(r"^ {4}(?:\w+=\S+ )?(?:python|torchrun|accelerate)\b(.*)$", text, re.M):
            words = shlex.split(line, comments=True)
            at = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
            if at is not None and Path(words[at]).stem in SCRIPTS:
                yield Path(words[at]).stem, words[at + 1 :]


@pytest.mark.parametrize("name, words", sorted({(name, tuple(words)) for name, words in code_commands()}))
def test_a_documented_command_parses(scripts, name, words):
    """Every command of README, docs and docstrings is one that the script takes (--resume needs a run and is left out)."""
    if "--resume" in words or "--help" in words:
        pytest.skip("needs a run folder")
    verb = {"judge": 1, "chat": 2}.get(words[0], 0) if words else 0  # chat has a folder behind it
    assert scripts[name].parse_args(list(words[verb:]))


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_flag_named_in_the_docs_exists(scripts, name):
    """`--flag` in a script's page is a field of some script's Args, or an option of torchrun, accelerate, pip or git."""
    foreign = {"a_b", "nproc_per_node", "num_processes", "multi_gpu", "cpu", "help", "private", "repo_type"}
    fields = [field for script in scripts.values() for field in script.Args.__dataclass_fields__.values()]
    known = {field.name for field in fields} | {f"no_{field.name}" for field in fields if field.type is bool} | foreign
    page = (ROOT / "docs" / f"{name}.md").read_text()
    named = {flag.replace("-", "_") for flag in re.findall(r"(?<!-)--([a-z][a-z0-9_-]+)", page)}
    assert not named - known


def test_every_logged_metric_is_explained(ppo, rloo, dialog, sft, reward, tiny_lm, tiny_classifier, tiny_pairs, tmp_path):
    """The names in metrics.jsonl are the names in the tables of docs/, both ways."""
    logged = {
        "ppo_sentiment": set(ppo("a", model_name_or_path=tiny_lm())[2][0]),
        "sft": set(sft("b", model_name_or_path=tiny_lm())[2][0]),
        "reward_model": set(reward("c", model_name_or_path=tiny_classifier())[2][0])
        | set(reward("d", model_name_or_path=tiny_lm(), dataset_name=tiny_pairs, max_length=200)[2][0]),
        "ppo_dialog": set(dialog("f", reward_fn=reward_file(tmp_path, "return [0.0] * len(prompts)"))[2][0]),
        "rloo_tldr": set(rloo("e", judge_fn=reward_file(tmp_path, "return [0.0] * len(prompts)"))[2][0]),
    }
    for name, metrics in logged.items():
        section = (ROOT / "docs" / f"{name}.md").read_text().split("## Metrics")[1].split("\n## ")[0]
        cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")]
        explained = {word for cell in cells for word in re.findall(r"`([^`]+)`", cell)}
        assert metrics == explained


TINY = [("ppo_sentiment", "ppo-sentiment-tiny"), ("ppo_dialog", "ppo-dialog-tiny"), ("rloo_tldr", "rloo-tiny")]


@pytest.mark.parametrize("script, folder", TINY)
def test_results_in_the_docs_are_those_of_the_benchmarks(script, folder):
    """Each number of the result tables stands in a committed evaluation.json."""
    page = (ROOT / "docs" / f"{script}.md").read_text().split("## Results")[1]
    for seed in (1, 2, 3):
        numbers = json.loads((ROOT / f"benchmarks/{folder}/seed{seed}/evaluation.json").read_text())
        for metric, value in numbers["after"].items():
            row = next(line for line in page.splitlines() if line.startswith(f"| {metric} |"))
            assert row.split("|")[1 + 2 * seed].strip() == f"{value:.3f}"
            assert row.split("|")[2 * seed].strip() == f"{numbers['before'][metric]:.3f}"


def test_results_on_imdb_are_those_of_the_benchmark():
    page = (ROOT / "docs/ppo_sentiment.md").read_text().split("### Real reviews")[1]
    numbers = json.loads((ROOT / "benchmarks/imdb/ppo/evaluation.json").read_text())
    for metric, value in numbers["after"].items():
        assert f"| {metric} | {numbers['before'][metric]:.3f} | {value:.3f} |" in page


# ---- docs/tricks.md --------------------------------------------------------------------------------------------------
TRICKS = dict(re.findall(r"^### (\d+)\. (.*?)(?=^##|\Z)", (ROOT / "docs/tricks.md").read_text(), re.M | re.S))


def names_in(path):
    """Functions, classes and Class.method of a file."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        found |= {node.name} if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else set()
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return found


def test_all_tricks_are_there():
    assert list(TRICKS) == [str(n) for n in range(1, 45)]


@pytest.mark.parametrize("number", TRICKS)
def test_a_trick_names_what_exists(scripts, number):
    """Its code, its tests and its flags; the steps of train that it names are there."""
    lines = {line.split(":")[0][2:]: line for line in TRICKS[number].splitlines() if line.startswith("- ")}
    assert set(lines) == {"Code", "Who", "Tests", "Flag"}
    for kind, folder in (("Code", ROOT), ("Tests", ROOT / "tests")):
        named = re.findall(r"`(\w+\.py)::([\w.]+)`", lines[kind])
        assert named and all(name in names_in(folder / file) for file, name in named), named
        assert all(name.startswith("test_") == (kind == "Tests") for _, name in named)
    for file, steps in re.findall(r"`(\w+\.py)::train`, steps? ([\d, and]+\d|\d)", lines["Code"]):
        train = (ROOT / file).read_text().split("\ndef train(")[1]
        assert all(re.search(rf"^ +# {step}\. ", train, re.M) for step in re.findall(r"\d", steps))
    flags = {flag.replace("-", "_") for flag in re.findall(r"--([a-z][a-z0-9-]+)", lines["Flag"])}
    assert flags <= {field for script in scripts.values() for field in script.Args.__dataclass_fields__}
    assert flags or lines["Flag"].startswith("- Flag: none")


@pytest.fixture(scope="module")
def ablations():
    """benchmarks/ablations.py as a module."""
    spec = importlib.util.spec_from_file_location("ablations", ROOT / "benchmarks/ablations.py")
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


def test_every_ablation_is_a_command(scripts, ablations):
    """Each changes its recipe, no two are the same, and its tricks are in docs/tricks.md."""
    assert len({(change.script, change.flags) for change in ablations.CHANGES}) == len(ablations.CHANGES)
    assert len({ablations.slug(change, 1) for change in ablations.CHANGES}) == len(ablations.CHANGES)
    for change in ablations.CHANGES:
        args = scripts[change.script].parse_args(shlex.split(change.flags))
        tiny = replace(scripts[change.script].RECIPES["tiny"], recipe="tiny")
        assert (args == tiny) == (change.flags == "") and set(map(str, change.tricks)) <= set(TRICKS)


def test_tables_of_ablations_are_those_of_the_results(ablations):
    """In docs/tricks.md and benchmarks/ablations/README.md; nothing stands there before there are results."""
    found = ablations.tables(ablations.read(ablations.HOME / "results.jsonl"))
    page = ablations.PAGE.read_text()
    assert all(page.count(marker) == 1 for marker in ablations.MARKERS)
    between = page.split(ablations.MARKERS[0])[1].split(ablations.MARKERS[1])[0].strip()
    assert between == found
    readme = ablations.HOME / "README.md"
    assert (found in readme.read_text()) if found else not readme.exists()


def test_a_table_of_ablations_by_hand(ablations):
    """Means over the seeds with the lowest and the highest, differences to the run with the same seed, and a run that stopped."""
    def line(flags, seed, rate):
        after = {"win rate": rate, "score mean": 10 * rate, "KL, nats a response": 1.0, "ended by itself": 1.0, "tokens a response": 9.0}
        return {("rloo_tldr", flags, seed): dict(after=after, seed=seed)}

    k3 = "--kl-estimator k3"
    results = line("", 1, 0.5) | line("", 2, 0.75) | line(k3, 1, 0.25) | line(k3, 2, 0.25)
    results |= {("rloo_tldr", "--rloo-k 2", 1): dict(stopped="5 gradients in a row", seed=1)}
    head, _, start, two, other = ablations.table("rloo_tldr", results).splitlines()
    assert head.split(" | ")[:6] == ["| changed", "tricks", "win rate", "difference", "score mean", "difference"]
    assert start.split(" | ")[2:6] == ["0.625 (0.500 .. 0.750)", "", "6.250 (5.000 .. 7.500)", ""]
    assert other.split(" | ")[2:6] == ["0.250 (0.250 .. 0.250)", "-0.375 (-0.500 .. -0.250)", "2.500 (2.500 .. 2.500)",
                                       "-3.750 (-5.000 .. -2.500)"]  # fmt: skip
    assert "stopped by itself in 1 of 1 runs" in two and "1 of 3 seeds" in two and "2 of 3 seeds" in other
    page = f"a\n{ablations.MARKERS[0]}\nold\n{ablations.MARKERS[1]}\nb"
    assert ablations.page_with(page, "new").split("\n\n") == [f"a\n{ablations.MARKERS[0]}", "new", f"{ablations.MARKERS[1]}\nb"]


def test_the_commands_of_the_reliability_page_choose_tests():
    """Each `pytest ...` of the page has files that exist and a -k that chooses one of their tests at least."""
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", "tests"]
    done = subprocess.run(collect, cwd=ROOT, capture_output=True, text=True)
    ids = [line for line in done.stdout.splitlines() if "::" in line]
    commands = re.findall(r"`pytest ([^`]+)`", (ROOT / "docs/reliability.md").read_text())
    assert ids and len(commands) > 15
    for command in commands:
        words = shlex.split(re.sub(" [(]needs root[)]", "", command))
        files = [word for word in words if word.startswith("tests/")]
        asked = words[words.index("-k") + 1] if "-k" in words else "test"
        names = [name for file, name in (x.split("::", 1) for x in ids) if file in files]
        words = [re.sub(r"(?!and\b|or\b|not\b)\b\w+", lambda word, name=name: str(word[0] in name), asked) for name in names]
        assert any(map(eval, words)), command
