"""The list of all numbers, benchmarks/all_numbers.toml: it is complete, commands parse, and it can be run."""

import ast
import json
import re
import shlex
import signal
import subprocess
import sys
import time
import zipfile

import pytest
from conftest import ROOT, SCRIPTS

sys.path.insert(0, str(ROOT / "benchmarks"))
import all_numbers  # noqa: E402

import check  # noqa: E402

ENTRIES = all_numbers.load_entries()
MEASURED = all_numbers.read_measured()
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
RUNS = [run for entry in ENTRIES for run in entry["expanded"]]
OF_FLAGS = [check.check_numbers, check.check_pairs_of_flags]
NOT_MEASURED = {  # sections with numbers in a table, or figures, that no run gave
    "README.md#before-a-long-run": "the screen of check.py",
    "docs/check.md#what-it-shows": "the same",
    "docs/dpo_tldr.md#metrics": "log 2",
    "docs/from_trl.md#a-command": "defaults",
    "docs/scale.md#scale-which-model-on-how-many-gpus": "computed by benchmarks/scale.py",
}


def test_each_result_is_in_one_entry():
    """And results/ has few files."""
    listed = [run.result for run in RUNS if run.result]
    made = {path for entry in ENTRIES for path in entry["made"]}
    assert len(listed) == len(set(listed))
    files = [path for path in (ROOT / "results").rglob("*") if path.is_file()]
    assert len(files) < 300
    for path in files:
        name = str(path.relative_to(ROOT))
        if name in ("results/README.md", "results/measured.jsonl") or name in made:
            continue
        owners = {
            entry["name"]
            for entry in ENTRIES
            for run in entry["expanded"]
            if run.result and (name == run.result or name.startswith(f"{run.result}/"))
        }
        assert len(owners) == 1, (name, owners)


def test_each_result_exists_and_has_a_commit():
    assert {run.result for run in RUNS if run.result} == MEASURED.keys()
    assert all((ROOT / result).exists() for result in MEASURED)
    assert all((ROOT / path).exists() for entry in ENTRIES for path in entry["made"])


def test_the_table_and_the_marks_are_those_of_the_program():
    """`python benchmarks/all_numbers.py --write` changes nothing."""
    page = all_numbers.TABLE.read_text()
    assert page == all_numbers.with_table(page, ENTRIES, MEASURED)
    for name in {*PAGES, *all_numbers.pages(ENTRIES)}:
        page = (ROOT / name).read_text()
        assert page == all_numbers.with_marks(name, page, ENTRIES, MEASURED), name


def test_a_mark_names_what_is_older_than_the_edition():
    page = "# A page\n\nText.\n\n## Results\n\n| a |\n|---|\n| 1.5 |\n\nMore.\n\n### Below\n\nText.\n"
    entry = {"name": "runs", "shown": ["docs/a.md#results"]}
    entry["expanded"] = [all_numbers.Run(f"results/{x}", "", x) for x in "abc"]
    measured = {
        f"results/{x}": {"commit": x * 7, "date": f"20{y}"} for x, y in (("a", 25), ("b", 24), ("c", 30))
    }
    marked = all_numbers.with_marks("docs/a.md", page, [entry], measured)
    mark = f"\n{all_numbers.OLD} ([list](../results/README.md)): runs (bbbbbbb, aaaaaaa).*\n"
    assert marked == page.replace("| 1.5 |\n", f"| 1.5 |\n{mark}")
    assert all_numbers.with_marks("docs/a.md", marked, [entry], measured) == marked
    measured = {result: row | {"date": "2030"} for result, row in measured.items()}
    assert all_numbers.with_marks("docs/a.md", marked, [entry], measured) == page


def test_what_the_entries_say_is_on_the_pages():
    """The sections exist, and a page that names a result shows it."""
    for name in all_numbers.pages(ENTRIES):
        anchors = {anchor for anchor, *_ in all_numbers.sections((ROOT / name).read_text())}
        shown = {x.split("#")[1] for entry in ENTRIES for x in entry["shown"] if x.startswith(f"{name}#")}
        assert shown <= anchors, name
    for name in PAGES:
        for path in re.findall(r"results/[\w./-]*\w", (ROOT / name).read_text()):
            owners = [
                entry for entry in ENTRIES if any(is_below(run.result, path) for run in entry["expanded"])
            ]
            shown = [place for entry in owners for place in entry["shown"]]
            assert not owners or any(place.startswith(f"{name}#") for place in shown), (name, path)


def is_below(path, other):
    """Is one of two paths a folder above the other, or are they the same?"""
    return f"{path}/".startswith(f"{other}/") or f"{other}/".startswith(f"{path}/")


def covered(name, index, sections):
    """Is a section, or one above it, in an entry?"""
    shown = {place for entry in ENTRIES for place in entry["shown"]} | NOT_MEASURED.keys()
    level = 9
    for anchor, its_level, *_ in reversed(sections[: index + 1]):
        if its_level < level:
            level = its_level
            if f"{name}#{anchor}" in shown:
                return True
    return False


@pytest.mark.parametrize("name", PAGES)
def test_each_table_of_numbers_and_each_figure_is_in_an_entry(name):
    made = {path for entry in ENTRIES for path in entry["made"]} | MEASURED.keys()
    page = (ROOT / name).read_text()
    lines, sections = page.split("\n"), all_numbers.sections(page)
    for i, (anchor, _, start, end) in enumerate(sections):
        cells = [cell for line in lines[start:end] if line.startswith("|") for cell in line.split(" | ")]
        numbers = [cell for cell in cells if re.match(r"\W*\d+\.\d", cell)]
        figures = [x for line in lines[start:end] for x in re.findall(r"^!\[.*?\]\((.*?)\)", line)]
        assert not (numbers or figures) or covered(name, i, sections), (anchor, numbers[:2], figures)
        for figure in figures:
            path = str(((ROOT / name).parent / figure).resolve().relative_to(ROOT))
            assert path in made or f"{name}#{anchor}" in NOT_MEASURED, path


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["name"])
def test_the_commands_of_an_entry_parse(scripts, entry):
    """Flags of the eight scripts, without the errors that check.py finds in flags alone.

    For other programs, the first argument is one that their docstring has.
    """
    for command in {run.command for run in entry["expanded"] if run.command}:
        words = shlex.split(command.replace("$OUT", "out"))
        while "=" in words[0]:
            words.pop(0)
        program = ROOT / words[1]
        assert program.exists()
        if program.stem in SCRIPTS:
            args = scripts[program.stem].parse_args(words[2:])
            assert not check.errors(scripts[program.stem], args, OF_FLAGS)
        elif program.suffix == ".py" and program.parent == ROOT / "benchmarks" and len(words) > 2:
            assert "/" in words[2] or words[2] in ast.get_docstring(ast.parse(program.read_text()))


def test_commands_of_the_pages_are_those_of_the_list():
    """The flags of your_data.md, whose runs need each other."""
    page = (ROOT / "docs/your_data.md").read_text().replace("\\\n", " ")
    shown = {" ".join(line.split()) for line in re.findall(r"^    (python .*)$", page, re.M)}
    [entry] = [entry for entry in ENTRIES if entry["name"] == "your own data"]
    for run in entry["expanded"]:
        if "-seed" not in run.result and "rloo-far" not in run.result:
            assert run.command in shown


# ---- Runs --------------------------------------------------------------------------------------------------

SCRIPT = '''"""A script that counts to 40, unless it is told to stop."""
import json, signal, sys, time
from pathlib import Path

words = sys.argv[1:]
resume = "--resume" in words
folder = Path(words[words.index("--resume" if resume else "--output-dir") + 1])
folder.mkdir(exist_ok=resume, parents=True)
if not resume:
    (folder / "args.json").write_text(json.dumps({"args": {"seed": words[1]}, "command": sys.argv}))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
sum(range(10_000_000))  # 0.2 seconds
rows = (folder / "metrics.jsonl").read_text().splitlines() if resume else []
with open(folder / "metrics.jsonl", "a") as file:
    for i in range(len(rows), 40):
        print(json.dumps({"update": i, "resumed": resume}), file=file, flush=True)
        time.sleep(0.02)
'''
PROGRAM = """import sys
from pathlib import Path

folder = Path(__file__).resolve().parents[1] / "results"
path = folder / "lines.jsonl"
assert not path.exists() or sys.argv[1] == "b"
with open(path, "a") as file:
    print(sys.argv[1], (folder.parent / "runs/first/metrics.jsonl").exists(), file=file)
"""
LIST = """
[[entries]]
name = "seeds"
shown = []
runs = [["results/toy/seed{1-2}.zip", "python toy.py --seed {}"]]

[[entries]]
name = "steps"
shown = []
in_order = true
runs = [
    ["", "python toy.py --seed 3 --output-dir runs/first"],
    ["", "python benchmarks/lines.py a"],
    ["results/lines.jsonl", "python benchmarks/lines.py b"],
]

[[entries]]
name = "far"
shown = []
needs = "GPU"
runs = [["results/far.json", "python toy.py"]]

[[entries]]
name = "elsewhere"
shown = []
needs = "TRL"
runs = [["results/elsewhere.json", "python toy.py $NOWHERE"]]
"""


def git(folder, *words):
    about = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.check_output(["git", *about, *words], cwd=folder, text=True).strip()


@pytest.fixture
def project(tmp_path):
    """A repository with a script, results of its first commit, and a second commit."""
    for folder in ("benchmarks", "results/toy"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("all_numbers.py", "archive.py"):
        (tmp_path / f"benchmarks/{name}").write_text((ROOT / f"benchmarks/{name}").read_text())
    (tmp_path / "benchmarks/lines.py").write_text(PROGRAM)
    (tmp_path / "benchmarks/all_numbers.toml").write_text(LIST)
    (tmp_path / "toy.py").write_text(SCRIPT)
    (tmp_path / "results/lines.jsonl").write_text("old\n")
    (tmp_path / "README.md").write_text(
        "A reward:\n\n    def score(prompts, **kwargs):\n        return [0.0]\n"
    )
    (tmp_path / ".gitignore").write_text("runs/\n__pycache__/\n")
    results = ("toy/seed1.zip", "toy/seed2.zip", "lines.jsonl", "far.json", "elsewhere.json")
    rows = [{"result": f"results/{name}", "commit": "0" * 7, "date": "2020-01-01"} for name in results]
    (tmp_path / "results/measured.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


def start(project, *words):
    command = [sys.executable, "benchmarks/all_numbers.py", "--older-than", "HEAD", *words]
    return subprocess.Popen(command, cwd=project, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def rows_of(path, name):
    with zipfile.ZipFile(path) as archive:
        return [json.loads(line) for line in archive.read(name).decode().splitlines()]


def test_what_is_older_is_run_once(project):
    """Each result gets this commit and its time; what needs a GPU or a variable is left."""
    commit = git(project, "rev-parse", "--short=7", "HEAD")
    printed, _ = start(project).communicate()
    assert "seeds (0000000)" in printed and "far (0000000)  needs GPU" in printed
    run = start(project, "--run", "--jobs", "2")
    printed, _ = run.communicate()
    assert run.returncode == 0, printed
    assert len(rows_of(project / "results/toy/seed2.zip", "metrics.jsonl")) == 40
    with zipfile.ZipFile(project / "results/toy/seed2.zip") as archive:
        about = json.loads(archive.read("args.json"))
    assert about == {"args": {"seed": "2"}, "command": ["toy.py", "--seed", "2"], "commit": commit}
    assert (project / "results/lines.jsonl").read_text() == "a True\nb True\n"
    rows = {row.pop("result"): row for row in map(json.loads, open(project / "results/measured.jsonl"))}
    new = {name for name, row in rows.items() if row["commit"] == commit}
    assert new == {"results/toy/seed1.zip", "results/toy/seed2.zip", "results/lines.jsonl"}
    assert all(rows[f"results/toy/seed{seed}.zip"]["minutes"] > 0 for seed in (1, 2))
    assert all(rows[name]["peak_mb"] > 1 for name in new)
    again = start(project, "--run")
    assert again.communicate()[0] == "" and again.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_was_stopped_goes_on(project, number):
    """With the updates that it had. Only one program runs at a time; a run that survives its own counts."""
    run = start(project, "--run", "--only", "seeds")
    [log] = wait_for(lambda: list(project.glob("runs/numbers/*/runs/toy-seed1.zip/metrics.jsonl")))
    wait_for(lambda: len(log.read_text().splitlines()) > 4)
    second = start(project, "--run")
    assert "still at work" in second.communicate()[0] and second.returncode == 1
    run.send_signal(number)
    run.communicate()
    assert not (project / "results/toy/seed1.zip").exists()
    if number == signal.SIGKILL:  # the script does not know
        assert start(project, "--run").communicate()[0].startswith("this program, or a run")
        wait_for(lambda: len(log.read_text().splitlines()) == 40)
        time.sleep(0.3)
    run = start(project, "--run", "--only", "seeds")
    printed, _ = run.communicate()
    assert run.returncode == 0, printed
    rows = rows_of(project / "results/toy/seed1.zip", "metrics.jsonl")
    assert [row["update"] for row in rows] == list(range(40))
    assert not rows[0]["resumed"] and (rows[-1]["resumed"] or number == signal.SIGKILL)


def wait_for(condition):
    for _ in range(500):
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError


def test_a_failure_is_named_and_the_rest_is_run(project):
    (project / "toy.py").write_text(SCRIPT + "\nassert '1' not in words\n")
    git(project, "commit", "-q", "-am", "second")
    run = start(project, "--run", "--only", "seeds")
    printed, _ = run.communicate()
    assert run.returncode == 1 and "FAILED: toy-seed1.zip" in printed and "AssertionError" in printed
    assert not (project / "results/toy/seed1.zip").exists()
    assert (project / "results/toy/seed2.zip").exists()


def test_results_made_by_hand_get_a_commit(project):
    commit = git(project, "rev-parse", "--short=7", "HEAD")
    command = [sys.executable, "benchmarks/all_numbers.py", "--measured", "results/far.json"]
    for minutes in ({"minutes": 2.5}, {}):  # those of a former run do not stay
        words = [word for name, x in minutes.items() for word in (f"--{name}", str(x))]
        subprocess.run([*command, *words], cwd=project, check=True)
        rows = {row.pop("result"): row for row in map(json.loads, open(project / "results/measured.jsonl"))}
        far = rows["results/far.json"]
        assert far.pop("date") and far == {"commit": commit} | minutes
    assert rows["results/elsewhere.json"]["commit"] == "0" * 7
