"""What the README and the docs say is true: commands parse, changes fit the scripts, names exist, numbers are
those of results/, links lead somewhere."""

import ast
import contextlib
import functools
import importlib.util
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers.trainer_callback  # noqa: F401 (scripts import it late; here it happens before a device check)
from conftest import ROOT, SCRIPTS
from device_check import pretended_gpu
from run_tools import reward_file

pytest_plugins = ["run_fixtures"]
README = (ROOT / "README.md").read_text()
DOCS = {path.stem: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
CODE_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)


def load_program(path):
    """A program of benchmarks/ as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def result(path):
    """A JSON file of results/."""
    return json.loads((ROOT / "results" / path).read_text())


def cells_of(page, first_cell):
    """The other cells of the table row that begins with this cell. -> list of str"""
    rows = [line for line in page.splitlines() if line.startswith(f"| {first_cell} |")]
    assert rows, f"no row {first_cell!r}"
    return [cell.strip() for cell in rows[0].strip().strip("|").split("|")[1:]]


# ---- Commands and code -------------------------------------------------------------------------------------


def test_the_readme_snippet_continues_a_prompt(ppo, tiny_lm):
    """The Python block of the README, with the folder of a real run, prints the prompt and a continuation."""
    code = dict(CODE_BLOCK.findall(README))["python"]
    _, folder, _ = ppo(model_name_or_path=tiny_lm())
    code = code.replace("runs/ppo_sentiment/<your run>/model", str(folder / "model"))
    assert str(folder) in code
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    prompt = "The plot of this film"
    assert printed.getvalue().startswith(prompt)
    assert len(printed.getvalue().strip()) > len(prompt)


def documented_commands():
    """The indented commands of README, docs and docstrings that start a script. -> (script, words)"""
    docstrings = [ast.get_docstring(ast.parse((ROOT / f"{name}.py").read_text()), False) for name in SCRIPTS]
    command = re.compile(r"^ {4}(?:\w+=\S+ )?(?:python|torchrun|accelerate|uv)\b(.*?(?:\\\n.*)?)$", re.M)
    for page in [README, *DOCS.values(), *docstrings]:
        for line in command.findall(page):
            words = shlex.split(line.replace("\\\n", " "), comments=True)
            paths = [i for i, word in enumerate(words) if word.endswith(".py")]
            if paths and Path(words[paths[0]]).stem in SCRIPTS and "/" not in words[paths[0]]:
                yield Path(words[paths[0]]).stem, tuple(words[paths[0] + 1 :])


@pytest.mark.parametrize("name, words", sorted(set(documented_commands())))
def test_a_documented_command_parses(scripts, name, words):
    if "--resume" in words:
        pytest.skip("needs a run folder")
    verbs = {"judge": 1, "chat": 2}  # chat is followed by a folder
    skipped = verbs.get(words[0], 0) if words else 0
    assert scripts[name].parse_args(list(words[skipped:]))


def test_the_notebook_runs_scripts_and_shows_a_run(scripts, tmp_path, monkeypatch):
    """Its commands parse, and its last cell reads what ppo_sentiment.py writes."""
    cells = json.loads((ROOT / "examples/real_model.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    commands = [shlex.split(line) for line in code if line.startswith("!python ")]
    args = {Path(words[1]).stem: scripts[Path(words[1]).stem].parse_args(words[2:]) for words in commands}
    assert list(args) == ["sft", "reward_model", "ppo_sentiment"]
    assert args["ppo_sentiment"].model_name_or_path == f"{args['sft'].output_dir}/model"
    assert args["ppo_sentiment"].reward_model_path == f"{args['reward_model'].output_dir}/model"
    folder = tmp_path / args["ppo_sentiment"].output_dir
    shutil.copytree(ROOT / "results/smollm2-imdb/seed1", folder)
    monkeypatch.chdir(tmp_path)
    tables = []
    exec(code[-1], {"Path": Path, "display": tables.append})
    assert [len(table) for table in tables] == [7, 10]
    assert tables[0].loc["score mean", "after"] == pytest.approx(1.238, abs=1e-3)


@pytest.mark.parametrize("name", [*DOCS, "README"])
def test_every_flag_in_the_docs_exists(scripts, name):
    """`--flag` is a field of some script's Args, or an option of a program that the docs name."""
    page = README if name == "README" else DOCS[name]
    known = {"a_b", "help", "nproc_per_node", "num_processes", "multi_gpu", "cpu", "config_file"}  # launchers
    known |= {"no_deps", "target", "index_url", "with"}  # pip, uv
    known |= {"output", "diagnose"}  # report.py
    known |= {"local_dir", "repo_type"}  # hf
    # Flags of the programs in benchmarks/.
    known |= {"peers", "other", "only", "rounds", "batches", "results", "show", "save", "signals", "trl"}
    known |= {"trl112", "jobs", "seeds", "side", "responses", "algorithm", "gpus", "gpu_memory"}
    known |= {"reward_model", "sharding", "rows", "responses_per_prompt", "prompt_length"}
    known |= {"num_examples"}  # TRL's name of --num-eval-prompts
    for script in scripts.values():
        for field in script.Args.__dataclass_fields__.values():
            known |= {field.name, f"no_{field.name}"}
    named = {flag.replace("-", "_") for flag in re.findall(r"(?<![\w-])--([a-z][a-z0-9_-]+)", page)}
    assert not named - known


def changes():
    """The diff blocks under "Lines to change". -> (script, title, block)

    Those of ppo_sentiment.py fit ppo_dialog.py too, and each script that the lines above a block name.
    """
    pattern = r"^\*\*([^*]+)\*\*((?:(?!^\*\*).)*?)```diff\n(.*?)```"
    for name in SCRIPTS:
        for title, text, block in re.findall(pattern, DOCS[name], re.M | re.S):
            yield name, title, block
            if name == "ppo_sentiment" and "load_reviews" not in block:
                yield "ppo_dialog", title, block
            for other in re.findall(r"`(rloo_tldr|grpo_math)\.py`", text):
                yield other, title, block.replace(', "kl_coef": kl_coef', "")


def changed_script(monkeypatch, tmp_path, name, block):
    """Apply a diff block: the old lines of each hunk must be in the script exactly once. -> a module"""
    source = (ROOT / f"{name}.py").read_text()
    hunks = re.split(r"^@@.*\n", block, flags=re.M)[1:]
    assert hunks
    for hunk in hunks:
        lines = hunk.splitlines()
        old = "\n" + "".join(line[1:] + "\n" for line in lines if not line.startswith("+"))
        new = "\n" + "".join(line[1:] + "\n" for line in lines if not line.startswith("-"))
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    path = tmp_path / f"{name}_changed.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name, title, block", list(changes()), ids=lambda x: x if len(x) < 70 else "")
def test_lines_to_change_fit_the_script_and_run(small, monkeypatch, tmp_path, name, title, block):
    """The changed script runs in bf16 on a pretended GPU: four updates, samples and the evaluation."""
    module = changed_script(monkeypatch, tmp_path, name, block)
    flags = {}
    if name in ("ppo_sentiment", "ppo_dialog", "rloo_tldr", "grpo_math"):
        flags = dict(total_episodes=32, num_sample_generations=2, learning_rate=1e-4)
    args = small(name, dtype="bfloat16", **flags)
    (tmp_path / "teacher").symlink_to(args.model_name_or_path)  # of on-policy distillation
    with pretended_gpu() as check:
        module.train(module.Args(**vars(args)))
    assert check.mistakes == []


@pytest.mark.parametrize("name", ["ppo_sentiment", "ppo_dialog", "grpo_math"])
def test_an_entropy_bonus_raises_the_entropy(scripts, small, monkeypatch, tmp_path, name):
    """The documented change, with a larger factor, against the same run without it."""
    [block] = [x for script, title, x in changes() if script == name and title.startswith("Entropy bonus")]
    block = re.sub(r"0\.0*1 \* entropies", "1.0 * entropies", block)
    assert "1.0 * entropies" in block
    entropies = []
    for script in (scripts[name], changed_script(monkeypatch, tmp_path, name, block)):
        flags = dict(total_episodes=64, learning_rate=1e-3, output_dir=str(tmp_path / script.__name__))
        args = script.Args(**vars(small(name)) | flags)
        _, folder = script.train(args)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        entropies.append(rows[-1]["policy/entropy_avg"])
    assert entropies[1] > entropies[0] + 0.02


@pytest.mark.parametrize("page", ["README", "ppo_sentiment", "grpo_math"])
def test_reward_functions_in_the_docs_work(scripts, monkeypatch, page):
    """They are called with what every reward function gets, and with a column of the data."""
    monkeypatch.chdir(ROOT)
    blocks = re.findall(r"(?:^    .*\n|^\n(?=    ))+", README if page == "README" else DOCS[page], re.M)
    blocks = [textwrap.dedent(block) for block in blocks if re.search(r"^    def .*completions", block, re.M)]
    assert len(blocks) == 1
    namespace = {}
    exec(blocks[0], namespace)
    names = re.findall(r"^def (\w+)", blocks[0], re.M)
    prompts, completions, answers = ["2 + 3?", "2 + 3?"], ["It is 5", "It is 6"], ["5", "5"]
    if page == "grpo_math":
        completions = [[{"role": "assistant", "content": text}] for text in completions]
    inputs = dict(prompts=prompts, completions=completions, completion_ids=[[1], [2]])
    rows = [{"answer": answer} for answer in answers]
    functions = {name: namespace[name] for name in names}
    call = scripts["rloo_tldr"].call_reward_functions
    rewards = call(functions, None, torch.device("cpu"), rows, **inputs)
    assert all(len(x) == 2 and x.isfinite().all() for x in rewards.values())
    if page == "grpo_math":
        assert rewards["correct"].tolist() == [1, 0]


# ---- Metrics -----------------------------------------------------------------------------------------------


def explained_metrics(*pages):
    """The names in the first column of the tables under "## Metrics"."""
    names = set()
    for page in pages:
        section = DOCS[page].split("\n## Metrics")[1].split("\n## ")[0]
        cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")]
        names |= {metric for cell in cells for metric in re.findall(r"`([^`]+)`", cell)}
    return names


def names_of(row):
    """The metrics of an update. Each reward has its own name in rewards/NAME/mean."""
    return {re.sub(r"^rewards/\w+/mean$", "rewards/NAME/mean", name) for name in row}


def test_every_metric_of_ppo_sentiment_is_explained(ppo):
    _, _, rows = ppo()
    assert names_of(rows[0]) == explained_metrics("running", "ppo_sentiment")


def test_every_metric_of_ppo_dialog_is_explained(dialog, tmp_path):
    _, _, rows = dialog(reward_fn=reward_file(tmp_path, "return [0.0] * len(prompts)"))
    assert names_of(rows[0]) == explained_metrics("running", "ppo_sentiment", "ppo_dialog")


def test_every_metric_of_rloo_tldr_is_explained(rloo, tmp_path):
    [function] = reward_file(tmp_path, "return [0.0] * len(prompts)")
    _, _, rows = rloo(judge_fn=function)
    assert names_of(rows[0]) == explained_metrics("running", "rloo_tldr")


def test_every_metric_of_grpo_math_is_explained(grpo):
    """Those of the KL are there only with a penalty."""
    _, _, with_kl = grpo("with")
    _, _, without_kl = grpo("without", kl_coef=0.0)
    assert names_of(with_kl[0]) == explained_metrics("running", "grpo_math")
    assert names_of(with_kl[0]) - names_of(without_kl[0]) == {"objective/kl", "objective/kl_coef"}


def test_every_metric_of_sft_and_reward_model_is_explained(sft, reward, tiny_lm, tiny_pairs):
    _, _, rows = sft()
    assert set(rows[0]) == explained_metrics("sft")
    _, _, of_labels = reward("labels")
    _, _, of_pairs = reward("pairs", model_name_or_path=tiny_lm(), dataset_name=tiny_pairs, max_length=200)
    assert set(of_labels[0]) | set(of_pairs[0]) == explained_metrics("reward_model")


def test_every_metric_of_dpo_tldr_is_explained(dpo):
    _, _, rows = dpo()
    assert set(rows[0]) == explained_metrics("dpo_tldr")


# ---- Numbers -----------------------------------------------------------------------------------------------

THREE_SEEDS = [
    ("ppo_dialog", "ppo-dialog-tiny"),
    ("rloo_tldr", "rloo-tiny"),
    ("dpo_tldr", "dpo-tldr-tiny"),
]
NUMBERS_OF_PAIRS = "dpo_tldr", "dpo-tldr-tiny"
BEFORE_AND_AFTER = [  # page, the heading before the table, evaluation.json
    ("sft", "## Results", "reviews-lm"),
]
CALIBRATION = [("### Pairs", "tldr-reward")]


@pytest.mark.parametrize("name, folder", THREE_SEEDS)
def test_the_results_of_three_seeds_are_those_of_the_files(name, folder):
    page = DOCS[name].split("\n## Results")[1]
    for seed in (1, 2, 3):
        evaluation = result(f"{folder}/seed{seed}/evaluation.json")
        for metric, after in evaluation["after"].items():
            before = evaluation["before"][metric]
            columns = slice(2 * seed - 2, 2 * seed)
            assert cells_of(page, metric)[columns] == [f"{before:.3f}", f"{after:.3f}"]


def test_the_held_out_pairs_are_those_of_the_files():
    name, folder = NUMBERS_OF_PAIRS
    page = DOCS[name].split("\n## Results")[1]
    for seed in (1, 2, 3):
        for metric, x in result(f"{folder}/seed{seed}/evaluation.json")["pairs"].items():
            assert cells_of(page, metric)[seed - 1] == f"{x:.3f}"


def test_the_speed_of_dpo_is_that_of_the_file():
    assert load_program("benchmarks/speed/dpo.py").table() in DOCS["dpo_tldr"]


def test_the_table_of_methods_is_that_of_the_program():
    """benchmarks/methods.py prints all rows of docs/methods.md, from the KL of all committed runs."""
    program = load_program("benchmarks/methods.py")
    printed = program.table().splitlines()
    rows = [line for line in DOCS["methods"].splitlines() if re.match(r"\| (best|DPO|RLOO|PPO),? ", line)]
    assert rows and set(rows) == set(printed[2:])
    assert program.long_run() in DOCS["methods"] and program.cost() in DOCS["methods"]
    for method, folder in program.RUNS.items():
        kls = sorted(x["kl"] for x in program.read_points()[method])
        evaluations = [
            json.loads(path.read_text()) for path in (ROOT / "results" / folder).rglob("evaluation.json")
        ]
        assert kls == pytest.approx(
            sorted(x["after"]["KL, nats per response"] for x in evaluations), abs=1e-4
        )


def test_the_table_of_dpo_variants_is_that_of_the_program():
    assert load_program("benchmarks/dpo_variants.py").table() in DOCS["dpo_tldr"]


def test_the_table_beside_trl_is_that_of_the_program():
    assert load_program("benchmarks/trl_dpo.py").table() in DOCS["dpo_tldr"]


def test_the_best_of_n_by_hand():
    """Of three responses, the best two of all choices: 3 pairs."""
    program = load_program("benchmarks/methods.py")
    scores, golds = torch.tensor([[2.0, 9.0, 5.0]]), torch.tensor([[10.0, 40.0, 70.0]])
    assert program.best_of_n(scores, golds, 1).item() == pytest.approx(40)
    assert program.best_of_n(scores, golds, 2).item() == pytest.approx((40 + 70 + 40) / 3)
    assert program.best_of_n(scores, golds, 3).item() == pytest.approx(40)
    assert program.kl_bound(4) == pytest.approx(1.3863 - 0.75, abs=1e-3)


FIVE_SEEDS = [f"ppo-sentiment-tiny/seed{seed}" for seed in range(1, 6)]
HEALTH_TABLES = [
    FIVE_SEEDS,
    ["ppo-sentiment-1.41e-5"],
    ["ppo-sentiment-tiny/seed1", "ppo-sentiment-hacked"],
]


@pytest.mark.parametrize("folders", HEALTH_TABLES)
def test_a_table_of_health_is_that_of_the_program(folders):
    """benchmarks/health.py prints these lines for the committed runs."""
    health = load_program("benchmarks/health.py")
    lines = health.table([ROOT / "results" / folder for folder in folders]).splitlines()
    page = DOCS["ppo_sentiment"].split("\n## Results")[1]
    assert set(lines) <= set(page.splitlines())


def test_the_default_is_healthy():
    """The committed runs of all five seeds keep the limits that the page promises."""
    health = load_program("benchmarks/health.py")
    for folder in FIVE_SEEDS:
        evaluation = result(f"{folder}/evaluation.json")
        before, after = evaluation["before"], evaluation["after"]
        assert evaluation["commonest new word"]["after"] <= 0.15
        assert after["distinct bigrams"] >= 0.8 * before["distinct bigrams"]
        assert after["score mean"] >= before["score mean"] + 1.5
        judge = "judge: P(positive)"
        assert after[judge] - before[judge] >= 0.5 * (1 - before[judge])
        target = result(f"{folder}/args.json")["args"]["kl_target"]
        lines = health.read(ROOT / "results" / folder, "metrics.jsonl").splitlines()
        updates = [json.loads(line) for line in lines]
        last_half = [update["objective/kl"] for update in updates[len(updates) // 2 :]]
        assert abs(sum(last_half) / len(last_half) - target) <= 0.15 * target


@pytest.mark.parametrize("name, heading, folder", BEFORE_AND_AFTER)
def test_a_table_before_and_after_is_that_of_the_file(name, heading, folder):
    page = DOCS[name].split(f"\n{heading}")[1]
    evaluation = result(f"{folder}/evaluation.json")
    for metric, after in evaluation["after"].items():
        before = evaluation["before"][metric]
        name_today = metric.replace(" a response", " per response").replace(" an answer", " per answer")
        assert cells_of(page, name_today)[:2] == [f"{before:.3f}", f"{after:.3f}"]


def test_the_table_of_the_readme_is_that_of_the_file():
    evaluation = result("ppo-sentiment-default/evaluation.json")
    assert f"| {evaluation['n']} held-out prompts | before | after |" in README
    for metric, after in evaluation["after"].items():
        before = evaluation["before"][metric]
        assert cells_of(README, metric) == [f"{before:.3f}", f"{after:.3f}"]


def test_the_own_reward_of_the_readme_is_that_of_the_file():
    evaluation = result("ppo-sentiment-own-reward/evaluation.json")
    before, after = evaluation["before"]["score mean"], evaluation["after"]["score mean"]
    text = " ".join(README.split())
    assert f"the mean of {evaluation['n']} held-out prompts rises from {before:.2f} to {after:.2f}" in text


@pytest.mark.parametrize("heading, folder", CALIBRATION)
def test_a_calibration_table_is_that_of_the_file(heading, folder):
    page = DOCS["reward_model"].split(f"\n{heading}")[1]
    for row in result(f"{folder}/evaluation.json")["calibration"]:
        expected = [str(row["pairs"]), f"{row['accuracy']:.3f}", f"{row['expected']:.3f}"]
        assert cells_of(page, row["score difference"]) == expected


def test_the_confusion_matrix_is_that_of_the_file():
    evaluation = result("reviews-sentiment/evaluation.json")
    for label, counts in zip(evaluation["labels"], evaluation["confusion"]):
        assert cells_of(DOCS["reward_model"], label) == [f"{count:.0f}" for count in counts]


def test_the_memory_of_running_is_that_of_the_file():
    rows = result("memory.json")["rows"]
    peaks = {row["flags"]: row["peak_mb"] for row in rows if row["size"] == "10 layers x 640"}
    both = peaks["--lora-r 16 --gradient-checkpointing"]
    assert f"from {peaks['']:.0f} to {both:.0f} MiB" in DOCS["running"]


def test_the_speed_tables_are_those_of_the_files(capsys):
    """Each table row under a comparison is one that compare.py prints for it."""
    compare = load_program("benchmarks/speed/compare.py")
    arguments = type("Arguments", (), {"results": ROOT / "results/speed"})
    results = DOCS["speed"].split("\n## Results")[1].split("\n## ")[0]
    sections = results.split("\n### ")[1:]
    assert len(sections) >= 6
    for section in sections:
        name = re.findall(r"`([\w-]+)`", section.splitlines()[0])[-1]
        compare.show(name, arguments)
        printed = capsys.readouterr().out.splitlines()
        rows = [line for line in section.splitlines() if line.startswith("|")]
        assert rows and not set(rows) - set(printed)


def test_the_table_of_a_busy_machine_is_that_of_the_file():
    lines = (ROOT / "results/speed/busy.jsonl").read_text().splitlines()
    assert (
        load_program("benchmarks/speed/busy.py").table([json.loads(line) for line in lines]) in DOCS["speed"]
    )


def test_profiles_are_those_of_the_files(capsys, monkeypatch):
    """The column of dtypes is left out: all are fp32."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks/speed")
    load_program("benchmarks/speed/profile_update.py").show()
    printed = capsys.readouterr().out.replace(" float32 |", "").splitlines()
    section = DOCS["speed"].split("\n## What bounds")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|") and "---" not in line]
    assert len(rows) >= 6 and not set(rows[1:]) - set(printed)


def test_the_ratios_of_the_readme_are_those_of_the_speed_page():
    """With one significant digit."""
    table = README.split("\n## Speed")[1].split("\n## ")[0]
    ratios = re.findall(r"(?<=[|;] )\d+(?= *[;|])", table)
    assert len(ratios) == 8
    exact = [float(ratio) for ratio in re.findall(r"\| (\d+\.\d\d) \(", DOCS["speed"])]
    assert {int(ratio) for ratio in ratios} <= {round(ratio) for ratio in exact}


def test_the_samples_and_numbers_of_the_readme_are_those_of_the_files():
    """The first four answers; known faults and those that notice them; blind faults; kills."""
    lines = (ROOT / "results/smollm2-imdb/seed1/evaluation_samples.jsonl").read_text().splitlines()
    rows = re.findall(r"^\| (.*\*\*) \| (\*\*.*\*\*) \| (\S+) → (\S+) \|$", README, re.M)
    assert len(rows) == 4
    for line, (before, after, *scores) in zip(map(json.loads, lines), rows):
        plain = " ".join(before.replace("**", " ").split()).replace(" ", "")
        assert plain == (line["prompt"] + line["before"]).replace(" ", "")
        assert after.strip("*") == " ".join(line["after"].split())
        assert scores == [f"{line['score']:.1f}", f"{line['score after']:.1f}"]

    faults = [json.loads(line) for line in open(ROOT / "tests/faults/mutations.jsonl")]
    for page in (README, DOCS["evidence"]):
        assert f"all {len(faults)} known faults" in page and all(fault["killed_by"] for fault in faults)
    kills = [json.loads(line) for line in open(ROOT / "results/reliability/kills.jsonl")]
    sigkills = sum(kill["signal"] == "SIGKILL" for kill in kills)
    assert f"{sigkills} SIGKILLs at random moments" in DOCS["evidence"] and all(
        kill["same"] for kill in kills
    )
    assert f"and {len(kills) - sigkills} SIGTERMs and SIGINTs" in DOCS["evidence"]
    noticed = []
    for path in sorted((ROOT / "results/blind-faults").glob("*.outcomes.jsonl")):
        outcomes = [json.loads(line) for line in path.read_text().splitlines()]
        noticed.append(sum(outcome["killed_by"] is not None for outcome in outcomes))
    assert f"{', '.join(map(str, noticed[:-1]))} and {noticed[-1]} on the first try" in DOCS["evidence"]
    assert f"{min(noticed)} to {max(noticed)} of the 30 new faults" in README


def test_the_weak_start_of_the_dialogs_is_that_of_the_files():
    """The gain of METEOR, and the quoted answer."""
    run = result("ppo-dialog-weak/epochs3/evaluation.json")
    before, after = run["before"]["meteor"], run["after"]["meteor"]
    page = " ".join(DOCS["ppo_dialog"].split())
    assert f"METEOR rises by {100 * (after / before - 1):.0f} %, from {before:.3f} to {after:.3f}" in page
    texts = (ROOT / "results/ppo-dialog-weak/epochs3-meteor2-lr3e-4/evaluation_samples.jsonl").read_text()
    assert re.search('"(You can I find my tent back[?])"', page)[1] in texts


def test_the_tables_of_real_models_are_those_of_the_program():
    """benchmarks/real_results.py prints all rows with results from the committed files."""
    program = load_program("benchmarks/real_results.py")
    tables = [program.reference_runs(), *(table for job in program.PANELS for table in program.tables(job))]
    printed = {line for table in tables for line in table.splitlines()}
    lines = DOCS["real_models"].splitlines()
    rows = [line for line in lines if line.startswith("|") and re.search(r"\d\.\d|&lt;", line)]
    assert len(rows) > 50 and not set(rows) - printed


def test_equations_of_a_solution_by_hand():
    """Units, LaTeX, thousands, percentages and bullets are read; code, variables and repetitions are not."""
    find = load_program("benchmarks/real_results.py").worked_equations
    assert find("10 packs * 30 balloons/pack = 300 balloons") == [[1, True]]
    assert find(r"\[ 2 \times \frac{3}{4} = 1.5 \text{ hours} \]") == [[2, True]]
    assert find(r"\$1,000 + \$200 = \$1,300") == [[1, False]]
    assert find("- 60% * 50 = 30 = 20 + 9") == [[2, True]]  # 60% is 60/100
    assert find("3. 100 / 3 = 33.3, so 5 + 5 = 10") == [[1, True], [1, True]]
    assert find("2 + 2 = 4\n2 + 2 = 4") == [[1, True]]
    assert find("2x + 3 = 7\ny = 4 + y\n```python\n1 + 1 = 3\n```\nx = 5") == []


def test_the_gain_on_gsm8k_is_in_the_pages():
    """The paired gain of seed 1, and the minutes of its updates."""
    program = load_program("benchmarks/real_results.py")
    folder = ROOT / "results/qwen-gsm8k/seed1"
    row = program.solved(folder).splitlines()[2]
    before, after, gain = [cell.strip() for cell in row.strip("|").split("|")[1:]]
    sentence = f"{before.replace('%', ' %')} to {after.replace('%', ' %')}"
    for page in (README, DOCS["real_models"], DOCS["grpo_math"]):
        assert sentence in " ".join(page.split()) and gain.removesuffix(" points").lstrip("+") in page
    assert program.minutes(folder) == "5"


@pytest.fixture(scope="module")
def ablations():
    """benchmarks/ablations.py as a module."""
    return load_program("benchmarks/ablations.py")


def test_every_ablation_is_a_command(scripts, ablations):
    """Each one changes its recipe, no two are the same, and its traps exist."""
    assert len({(change.script, change.flags) for change in ablations.CHANGES}) == len(ablations.CHANGES)
    assert len({ablations.slug(change, 1) for change in ablations.CHANGES}) == len(ablations.CHANGES)
    for change in ablations.CHANGES:
        script = scripts[change.script]
        args = script.parse_args(shlex.split(change.flags))
        tiny = replace(script.RECIPES["tiny"], recipe="tiny")
        assert (args == tiny) == (change.flags == "")
        assert {str(number) for number in change.tricks} <= set(TRAPS)


def test_the_tables_of_ablations_are_those_of_the_results(ablations):
    found = ablations.tables(ablations.read(ROOT / "results/ablations/results.jsonl"))
    assert found in (ROOT / "results/ablations/README.md").read_text()


def test_a_table_of_ablations_by_hand(ablations):
    """Means over seeds with lowest and highest value, differences to the same seed, a run that stopped."""

    def run(flags, seed, rate):
        after = {
            "win rate": rate,
            "score mean": 10 * rate,
            "KL, nats per response": 1.0,
            "ended by itself": 1.0,
            "tokens per response": 9.0,
        }
        return {("rloo_tldr", flags, seed): {"after": after, "seed": seed}}

    k3 = "--kl-estimator k3"
    results = run("", 1, 0.5) | run("", 2, 0.75) | run(k3, 1, 0.25) | run(k3, 2, 0.25)
    results["rloo_tldr", "--rloo-k 2", 1] = {"stopped": "5 gradients in a row", "seed": 1}
    head, _, start, two, other = ablations.table("rloo_tldr", results).splitlines()
    assert head.split(" | ")[2:6] == ["win rate", "difference", "score mean", "difference"]
    assert start.split(" | ")[2:6] == ["0.625 (0.500 .. 0.750)", "", "6.250 (5.000 .. 7.500)", ""]
    assert other.split(" | ")[2:4] == ["0.250 (0.250 .. 0.250)", "-0.375 (-0.500 .. -0.250)"]
    assert other.split(" | ")[4:6] == ["2.500 (2.500 .. 2.500)", "-3.750 (-5.000 .. -2.500)"]
    assert "in 1 of 1 runs" in two and "1 of 3 seeds" in two
    assert "2 of 3 seeds" in other


# ---- docs/implementation_details.md ------------------------------------------------------------------------

TRAPS = {}  # number -> text
for number, text in re.findall(r"^### (\d+)\. (.*?)(?=^##|\Z)", DOCS["implementation_details"], re.M | re.S):
    TRAPS[number] = " ".join(text.split())


@functools.cache
def names_in(path):
    """Functions, classes, variables and Class.method at the top level of a file."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return names


def test_every_trap_has_code_and_tests():
    assert list(TRAPS) == [str(number) for number in range(1, 48)]
    for number, text in TRAPS.items():
        code, tests = re.search(r"- Code: (.*) - Reported: .* - Tests: (.*)", text).groups()
        assert ".py::" in code, number
        assert tests.startswith("none") or re.fullmatch(r"(`tests/\w+/\w+\.py::test_\w+`(, )?)+", tests), (
            number
        )


def test_what_the_page_on_details_names_exists():
    """Functions and tests, and steps of train."""
    page = " ".join(DOCS["implementation_details"].split())
    for file, name in set(re.findall(r"`([\w/]+\.py)::([\w.]+)`", page)):
        assert (ROOT / file).exists() and name in names_in(ROOT / file), (file, name)
    for file, steps in re.findall(r"`(\w+\.py)::train`, steps? (\d(?:(?:, | and )\d)*)", page):
        train = (ROOT / file).read_text().split("\ndef train(")[1]
        for step in re.findall(r"\d", steps):
            assert re.search(rf"^ +# {step}\. ", train, re.M), (file, step)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_functions_that_a_description_names_exist(scripts, name):
    """In the sections that explain the algorithm, names in backticks are those of the script."""
    sections = re.split(r"^## ", DOCS[name], flags=re.M)
    text = "".join(part for part in sections if part.startswith(("What the algorithm", "What differs")))
    named = set(re.findall(r"`([A-Za-z_]+(?:\.[A-Za-z_]+)?)`", text))
    named = {word for word in named if "_" in word or re.match("[A-Z][a-z]+[A-Z]", word)}
    known = names_in(ROOT / f"{name}.py") | set(scripts[name].Args.__dataclass_fields__)
    known |= {"compute_rewards", "reward_offset", "model_max_length", "generation_config.json"}  # of others
    known |= {"frac_reward_zero_std"}  # a metric
    assert named and not named - known


# ---- Links and names ---------------------------------------------------------------------------------------


def tracked_pages():
    """All Markdown files of the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.md"], cwd=ROOT, capture_output=True
    )
    return sorted(name for name in listed.stdout.decode().split() if (ROOT / name).exists())


def anchors(page):
    """The anchors that GitHub makes of the headings, and those that are written out."""
    headings = re.findall(r"^#+ (.+)$", page, re.M)
    made = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return made | set(re.findall(r'<a id="([^"]+)">', page))


@pytest.mark.parametrize("name", tracked_pages())
def test_every_link_leads_somewhere(name):
    page = (ROOT / name).read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", page):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        linked = (ROOT / name).parent / path if path else ROOT / name
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors(linked.read_text()), target


@pytest.mark.parametrize("name", tracked_pages())
def test_every_path_in_a_page_exists(name):
    """Paths in backticks and commands that begin with a folder of this repository."""
    page = (ROOT / name).read_text()
    folders = "accelerate_configs|benchmarks|checkpoints|data|docs|results|tests"
    for path in re.findall(rf"(?<![\w/.-])((?:{folders})/[\w./-]*)", page):
        path = path.rstrip("./-")
        assert (ROOT / path).exists() or (ROOT / name).parent.joinpath(path).exists(), path


def test_the_readme_has_the_two_commands_that_ci_runs():
    """Both in .ci/run, and the tests in GitHub's workflow too."""
    commands = [line for line in README.splitlines() if line.startswith("    python3 -m venv")]
    assert len(commands) == 2
    assert commands[0].endswith("python ppo_sentiment.py")
    assert commands[1].endswith("python -m pytest -q -n 2")
    assert f"run: {commands[1].strip()}\n" in (ROOT / ".github/workflows/tests.yml").read_text()


# ---- GRPO --------------------------------------------------------------------------------------------------


def test_the_variants_of_grpo_are_those_of_the_files():
    """benchmarks/variants.py prints the table of the page from the committed results."""
    variants = load_program("benchmarks/variants.py")
    section = DOCS["grpo_math"].split("\n### Variants")[1].split("\n### ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    assert len(rows) > 10 and set(rows) <= set(variants.table().splitlines())


def test_the_five_seeds_of_grpo_are_those_of_the_files():
    """Every row of the first table, and the gain that the page promises."""
    page = DOCS["grpo_math"].split("\n### The default")[1].split("\n### ")[0]
    runs = [result(f"grpo-math-tiny/seed{seed}/evaluation.json") for seed in range(1, 6)]
    rows = re.findall(r"^\| ((?:held-out|harder|greedy): [^|]+?) \|", page, re.M)
    assert len(rows) == 8
    for name in rows:
        digits = 1 if "tokens" in name else 3
        values = [runs[0]["before"][name], *[run["after"][name] for run in runs]]
        assert cells_of(page, name) == [f"{value:.{digits}f}" for value in values]
    for run in runs:
        assert run["after"]["held-out: pass@1"] - run["before"]["held-out: pass@1"] > 0.3


def test_the_table_of_worked_steps_is_that_of_the_files():
    """benchmarks/worked_steps.py prints it from the committed results."""
    program = load_program("benchmarks/worked_steps.py")
    table = program.table(program.read_lines())
    assert len(table.splitlines()) > 4
    assert set(table.splitlines()) <= set(DOCS["grpo_math"].splitlines())


def test_the_ranges_before_training_are_those_of_the_files():
    before = [result(f"grpo-math-tiny/seed{seed}/evaluation.json")["before"] for seed in range(1, 6)]
    ranges = []
    for name in ("held-out: pass@1", "held-out: pass@8", "greedy: pass@1"):
        values = [row[name] for row in before]
        ranges.append(f"{min(values):.3f} to {max(values):.3f}")
    sentence = "a pass@1 of {}, a pass@8 of {}, and a greedy pass@1 of {}".format(*ranges)
    assert sentence in DOCS["grpo_math"]


def test_the_hacked_reward_of_grpo_is_that_of_the_file():
    page = DOCS["grpo_math"].split("\n### A reward that can be hacked")[1]
    run = result("grpo-variants/work-alone/seed1/evaluation.json")
    for name in ("held-out: rewards/shows_work", "held-out: pass@1", "held-out: ended by itself"):
        assert cells_of(page, name) == [f"{run['before'][name]:.3f}", f"{run['after'][name]:.3f}"]
