"""What the README and the docs say is true: commands parse, changes fit the scripts, names exist, numbers are
those of results/, links lead somewhere."""

import ast
import contextlib
import functools
import gzip
import importlib.util
import inspect
import io
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import tokenize
from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev

import pytest
import torch
import transformers.trainer_callback  # noqa: F401 (scripts import it late; here it happens before a device check)
from conftest import ROOT, SCRIPTS
from device_check import pretended_gpu
from diff_blocks import apply_block
from run_tools import reward_file, rows_of
from safetensors.torch import load_file

sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
from archive import read, read_rows, run_folder  # noqa: E402

import check  # noqa: E402
import report  # noqa: E402

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
    """A JSON file of results/, or of a run of results/."""
    path = ROOT / "results" / path
    return json.loads(read(path.parent, path.name))


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


def test_an_adapter_is_merged_as_the_page_says(ppo, tiny_lm, tmp_path):
    """The Python block of docs/running.md gives the weights that the run saved, and a tokenizer."""
    [code] = re.findall(r"^```python\n(.*?)^```", section("running", "## LoRA"), re.M | re.S)
    _, folder, _ = ppo(model_name_or_path=tiny_lm(), lora_r=4)
    exec(code.replace("ADAPTER", str(folder / "adapter")).replace("MERGED", str(tmp_path / "merged")), {})
    weights = [load_file(path / "model.safetensors") for path in (tmp_path / "merged", folder / "model")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(x, weights[1][name]) for name, x in weights[0].items())
    assert (tmp_path / "merged/tokenizer.json").exists()


def documented_commands():
    """The indented commands of README, docs and docstrings that start a script. -> (script, words)

    check.py takes the name of a script and its flags, judge.py the flags of rloo_tldr.py.
    """
    docstrings = [ast.get_docstring(ast.parse((ROOT / f"{name}.py").read_text()), False) for name in SCRIPTS]
    command = re.compile(r"^ {4}(?:\w+=\S+ )?(?:python|torchrun|accelerate|uv)\b(.*?(?:\\\n.*?)*)$", re.M)
    for page in [README, *DOCS.values(), *docstrings]:
        for line in command.findall(page):
            words = shlex.split(line.replace("\\\n", " "), comments=True)
            paths = [i for i, word in enumerate(words) if word.endswith(".py") and word != "check.py"]
            if paths and "/" not in words[paths[0]]:
                name = words[paths[0]].removesuffix(".py")
                if name in (*SCRIPTS, "judge"):
                    yield "rloo_tldr" if name == "judge" else name, tuple(words[paths[0] + 1 :])


@pytest.mark.parametrize("name, words", sorted(set(documented_commands())))
def test_a_documented_command_parses(scripts, name, words):
    if "--resume" in words:
        pytest.skip("needs a run folder")
    assert scripts[name].parse_args(list(words))


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
    shutil.copytree(run_folder(ROOT / "results/smollm2-imdb/seed1.zip"), folder)
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
    known |= {"tasks", "prompt", "num_tasks", "num_shown", "greedy"}  # play.py
    # Flags of the programs in benchmarks/.
    known |= {"peers", "other", "rounds", "batches", "show", "trl", "jobs", "seeds", "rows"}
    known |= {"algorithm", "gpus", "gpu_memory", "sharding", "reward_model", "responses_per_prompt"}
    known |= {"checkpoint", "signals_to_handle"}  # the second: of torchrun
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
            if name == "ppo_sentiment" and "load_prompts" not in block:
                yield "ppo_dialog", title, block
            for other in re.findall(r"`(rloo_tldr|grpo_math)\.py`", text):
                yield other, title, block.replace(', "kl_coef": kl_coef', "")


def changed_script(monkeypatch, tmp_path, name, block):
    """Apply a diff block. -> a module"""
    source = apply_block((ROOT / f"{name}.py").read_text(), block)
    path = tmp_path / f"{name}_changed.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name, title, block", list(changes()), ids=lambda x: x if len(x) < 70 else "")
def test_lines_to_change_fit_the_script_and_run(small, monkeypatch, tmp_path, name, title, block):
    """The changed script runs in bf16 on a pretended GPU: two updates, samples and the evaluation.

    If report.py cannot follow the rewards or advantages, it says that this may be on purpose.
    """
    module = changed_script(monkeypatch, tmp_path, name, block)
    flags = {}
    if name in ("ppo_sentiment", "ppo_dialog", "rloo_tldr", "grpo_math"):
        flags = dict(total_episodes=16, num_sample_generations=2, learning_rate=1e-4)
    if title == "Reward per turn.":  # of an environment
        game = f"{ROOT}/examples/guess_for_bits.py:GuessForBits"
        flags = dict(environment=game, tools=None, reward_fn=None, dataset_name=str(ROOT / "data/guess"))
    args = small(name, dtype="bfloat16", **flags)
    (tmp_path / "teacher").symlink_to(args.model_name_or_path)  # of on-policy distillation
    with pretended_gpu() as check:
        _, folder = module.train(module.Args(**vars(args)))
    assert check.mistakes == []
    for finding in report.find_problems(report.read_run(folder)):
        if finding.entry in ("token-rewards", "token-advantages", "group-advantages"):
            assert "on purpose" in finding.causes[-1]


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


@torch.no_grad()
def test_the_reward_of_coming_from_trl_reads_eos(scripts):
    """Its function gives the scores of rloo_tldr.py. As a classifier, check.py refuses the model."""
    name = str(ROOT / "checkpoints/tldr-reward")
    [block] = re.findall(r"(?:^    .*\n|^\n(?=    ))+", DOCS["from_trl"].split("appends EOS:\n")[1], re.M)[:1]
    namespace = {}
    exec(textwrap.dedent(block).replace("MY_REWARD_MODEL", name), namespace)
    rows = [json.loads(line) for line in (ROOT / "data/tldr-preference/test.jsonl").read_text().splitlines()]
    ppo, rloo, cpu = scripts["ppo_sentiment"], scripts["rloo_tldr"], torch.device("cpu")
    errors = check.errors(ppo, replace(ppo.RECIPES["tiny"], reward_model_path=name))
    assert any("see docs/from_trl.md" in error for error in errors)
    reward_model = rloo.load_reward_model(rloo.Args(), name, cpu)
    offset = result("tldr-reward/evaluation.json")["reward_offset"]
    num_right = 0
    for row in rows:
        prompts, pair = [row["prompt"]] * 2, [row["chosen"], row["rejected"]]
        with_eos = namespace["score"](prompts=prompts, completions=pair)
        assert with_eos == pytest.approx([x + offset for x in reward_model(prompts, pair)], abs=1e-3)
        num_right += with_eos[0] > with_eos[1]
    assert num_right / len(rows) > 0.8


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


METRIC_RUNS = {  # pages -> the runs whose metrics they explain, with their flags
    ("running", "ppo_sentiment"): [("ppo_sentiment", {})],
    ("running", "ppo_sentiment", "ppo_dialog"): [("ppo_dialog", dict(reward_fn="ZERO"))],
    ("running", "rloo_tldr"): [("rloo_tldr", dict(judge_fn="ZERO"))],
    ("running", "grpo_math"): [("grpo_math", {})],
    ("running", "grpo_math", "grpo_tools"): [("grpo_tools", {})],
    ("sft",): [("sft", {})],
    ("reward_model",): [
        ("reward_model", {}),
        ("reward_model", dict(model_name_or_path="LM", dataset_name="PAIRS", max_length=200)),
    ],
    ("dpo_tldr",): [("dpo_tldr", {})],
}


@pytest.mark.parametrize("pages", METRIC_RUNS, ids=lambda pages: pages[-1])
def test_every_metric_is_explained(scripts, small, tiny_lm, tiny_pairs, tmp_path, pages):
    zero = reward_file(tmp_path, "return [0.0] * len(prompts)")
    values = {"LM": tiny_lm(), "PAIRS": tiny_pairs}
    found = set()
    for i, (name, flags) in enumerate(METRIC_RUNS[pages]):
        flags = {flag: values.get(x, x) for flag, x in flags.items()}
        flags |= {flag: zero if flag == "reward_fn" else zero[0] for flag, x in flags.items() if x == "ZERO"}
        _, folder = scripts[name].train(small(name, f"run{i}", **flags))
        found |= names_of(rows_of(folder)[0])
    missing = {
        name
        for name in explained_metrics(*pages)
        if f"`{name}` | fraction | not in {pages[-1]}.py" in DOCS["running"]
    }
    assert explained_metrics(*pages) - missing <= found <= explained_metrics("running", *pages) - missing


# ---- Numbers -----------------------------------------------------------------------------------------------


def section(page, heading):
    """What follows a heading of docs/, up to the next heading of its level."""
    level = heading.split()[0]
    return DOCS[page].split(f"\n{heading}")[1].split(f"\n{level} ")[0]


def test_the_tables_are_those_of_the_programs():
    """Which print them from the committed files."""
    assert load_program("benchmarks/speed/dpo.py").table() in DOCS["dpo_tldr"]
    assert load_program("benchmarks/differences.py").page() == DOCS["differences"]
    assert load_program("benchmarks/trl_dpo.py").table() in DOCS["dpo_tldr"]
    assert load_program("benchmarks/dpo_variants.py").table() in DOCS["dpo_tldr"]
    variants = load_program("benchmarks/grpo_variants.py")
    assert variants.table() in DOCS["grpo_math"]
    rows = [json.loads(line) for line in variants.RESULTS.read_text().splitlines()]
    right = {(row["variant"], row["seed"]): row["evaluation"]["after"]["held-out: pass@1"] for row in rows}
    largest = max(abs(x - right["GRPO", seed]) for (_, seed), x in right.items())
    interval = rows[0]["evaluation"]["after"]["held-out: +- (95 % interval)"]
    text = f"by at most {largest:.3f}. The 95 % interval of GRPO's is +- {interval:.3f}."
    assert text in " ".join(DOCS["grpo_math"].split())
    assert load_program("benchmarks/eval_every.py").table() in DOCS["running"]
    assert load_program("benchmarks/transformers_versions.py").table() in DOCS["running"]
    vllm, speed = load_program("benchmarks/vllm_runs.py"), load_program("benchmarks/vllm_speed.py")
    assert vllm.gap_table() in DOCS["running"] and vllm.lesson_table() in DOCS["running"]
    assert speed.speed_table() in DOCS["running"] and speed.cost_table() in DOCS["running"]
    tools = load_program("benchmarks/tool_results.py")
    shown = []
    for run in ("lr-3e-4", "seed1"):  # of updates 81 to 98
        rows = read_rows(tools.GUESS.with_name(f"{run}.zip"), "metrics.jsonl")[80:98]
        shown.append(
            [fmean(row[key] for row in rows) for key in ("env/reward_mean", "tools/failure_frequency")]
        )
    (reward, failed), (reward_before, failed_before) = shown
    text = (
        f"is {reward:.2f} instead of {reward_before:.2f}, but {100 * failed:.1f} % of the calls fail instead"
    )
    assert f"{text} of {100 * failed_before:.1f} %." in " ".join(DOCS["grpo_tools"].split())
    games = [row for row in read_rows(tools.GUESS, "evaluation_samples.jsonl") if row["set"] == "held-out"]
    games = [
        re.search(r'"number": (-?\d+)\}\}\n</tool_call>', text)
        for row in games
        for text in row["after"]["responses"]
    ]
    begin = sum(first is not None and first[1] == "11" for first in games)
    assert f"after, it is 11 in {begin} of the games." in " ".join(DOCS["grpo_tools"].split())
    rows = read_rows(tools.TURN_REWARDS, "metrics.jsonl")
    reward, failed = (
        fmean(row[key] for row in rows[80:98]) for key in ("env/reward_mean", "tools/failure_frequency")
    )
    ends = [f"{fmean(row['env/reward_mean'] for row in rows[i : i + 20]):.2f}" for i in (140, 160, 180)]
    broken = read_rows(tools.GUESS.with_name("no-end.zip"), "metrics.jsonl")
    last = 100 * broken[-1]["completions/end_unfinished_call"]
    for text in (
        f"the reward of updates 81 to 98 is {reward:.2f}, and {100 * failed:.1f} % of the calls fail",
        f"is {ends[0]} in updates 141 to 160, {ends[1]} in the next 20, and {ends[2]} in the last 20",
        f"after {len(broken)} updates, {last:.0f} % of the games",
    ):
        assert text in " ".join(DOCS["grpo_tools"].split())
    *_, line = tools.distance().splitlines()  # the rewards
    before, *after, best = (float(cell) for cell in line.strip("|").split("|")[1:])
    for reward, text in zip(
        after, ("One reward for the whole game: {} % of the way", "turn: {} % of the way")
    ):
        share = 100 * (reward - before) / (best - before)
        assert text.format(round(share)) in " ".join(DOCS["grpo_tools"].split())
    for table in (tools.results, tools.errors, tools.misuse, tools.distance):
        assert table() in DOCS["grpo_tools"]
    greedy = [result(f"grpo-tools-tiny/seed{seed}/evaluation.json") for seed in tools.SEEDS]
    before, after = ([x[when]["greedy: pass@1"] for x in greedy] for when in ("before", "after"))
    before, after = (" to ".join(sorted({f"{x:.2f}" for x in values})) for values in (before, after))
    ranges = f"{before} before, {after} after"
    assert f"greedy pass@1 {ranges}, three seeds" in " ".join(README.split())
    steps = load_program("benchmarks/worked_steps.py")
    assert set(steps.table(steps.read_lines()).splitlines()) <= set(DOCS["grpo_math"].splitlines())
    methods = load_program("benchmarks/methods.py")
    for table in (methods.table(), methods.long_run(), methods.cost()):
        assert table in DOCS["methods"]

    program = load_program("benchmarks/real_results.py")
    tables = [program.reference_runs(), *(table for job in program.PANELS for table in program.tables(job))]
    printed = {line for table in tables for line in table.splitlines()}
    lines = DOCS["real_models"].splitlines()
    rows = [line for line in lines if line.startswith("|") and re.search(r"\d\.\d", line)]
    assert len(rows) > 30 and not set(rows) - printed
    rows = [line for line in section("speed", "### A GRPO update").splitlines() if line.startswith("|")]
    assert len(rows) == 5 and not set(rows) - printed


EVALUATIONS = [  # page, heading above the table, evaluation.json of one run or of seeds
    (DOCS["ppo_dialog"], "## Results", [f"ppo-dialog-tiny/seed{seed}" for seed in (1, 2, 3)]),
    (DOCS["rloo_tldr"], "## Results", [f"rloo-tiny/seed{seed}" for seed in (1, 2, 3)]),
    (DOCS["dpo_tldr"], "## Results", [f"dpo-tldr-tiny/seed{seed}" for seed in (1, 2, 3)]),
    (DOCS["sft"], "## Results", ["reviews-lm"]),
    (README, "", ["ppo-sentiment-default"]),
]


@pytest.mark.parametrize("page, heading, folders", EVALUATIONS, ids=lambda x: x[0] if type(x) is list else "")
def test_a_table_before_and_after_is_that_of_the_file(page, heading, folders):
    page = page.split(f"\n{heading}")[1] if heading else page
    for i, folder in enumerate(folders):
        evaluation = result(f"{folder}/evaluation.json")
        names = {name: re.sub(r" an? (response|answer)", r" per \1", name) for name in evaluation["after"]}
        shown = [name for name, today in names.items() if f"\n| {today} |" in page]
        assert len(shown) >= 3
        for name in shown:
            before, after = evaluation["before"][name], evaluation["after"][name]
            assert cells_of(page, names[name])[2 * i : 2 * i + 2] == [f"{before:.3f}", f"{after:.3f}"]


def test_numbers_after_training_are_those_of_the_files():
    """Of DPO's held-out pairs, the calibration and confusion of reward models, and a hacked reward."""
    page = DOCS["dpo_tldr"].split("\n## Results")[1]
    for seed in (1, 2, 3):
        for metric, x in result(f"dpo-tldr-tiny/seed{seed}/evaluation.json")["pairs"].items():
            assert cells_of(page, metric)[seed - 1] == f"{x:.3f}"
    page = DOCS["reward_model"].split("\n### Pairs")[1]
    for row in result("tldr-reward/evaluation.json")["calibration"]:
        expected = [str(row["pairs"]), f"{row['accuracy']:.3f}", f"{row['expected']:.3f}"]
        assert cells_of(page, row["score difference"]) == expected
    evaluation = result("reviews-sentiment/evaluation.json")
    for label, counts in zip(evaluation["labels"], evaluation["confusion"]):
        assert cells_of(DOCS["reward_model"], label) == [f"{count:.0f}" for count in counts]
    page = DOCS["grpo_math"].split("\n### A reward that can be hacked")[1]
    run = result("grpo-math-hacked/work-alone/seed1/evaluation.json")
    for name in ("held-out: rewards/shows_work", "held-out: pass@1", "held-out: ended by itself"):
        assert cells_of(page, name) == [f"{run['before'][name]:.3f}", f"{run['after'][name]:.3f}"]


HEALTH_TABLES = [
    [f"ppo-sentiment-tiny/seed{seed}" for seed in range(1, 6)],
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


def test_the_tables_and_numbers_of_your_data_are_those_of_the_files():
    """results/your-data, and the table that examples/make_answers.py writes."""
    program = load_program("benchmarks/your_data.py")
    page = " ".join(DOCS["your_data"].split())
    for table in (program.first_rows, program.results, program.samples, program.too_far, program.too_long):
        assert table() in DOCS["your_data"]
    rloo, dpo = program.evaluation("rloo"), program.evaluation("dpo")
    wins = rloo["after"]["win rate"], dpo["after"]["win rate"]
    assert rloo["n"] == dpo["n"] == 75
    assert f"On the 75 held-out rows, RLOO's answers now win {wins[0]:.0%}".replace("%", " %") in page
    assert f"and DPO's {wins[1]:.0%}".replace("%", " %") in page
    assert f"held-out pairs: {program.evaluation('reward')['accuracy']:.3f}" in page
    assert (
        f"The better answers of the table have {program.mean_parts(program.answers('rloo'), 'reference'):.2f}"
        in page
    )

    after, before = (program.wrong_articles(program.answers("rloo"), when) for when in ("after", "before"))
    verb = "names" if after[0] == 1 else "name"
    assert f"Of the {after[1]} answers that name an article, {after[0]} {verb} a wrong one" in page
    assert f"before training, {before[0]} of {before[1]} did" in page
    after, before = (program.wrong_articles(program.answers("dpo"), when) for when in ("after", "before"))
    assert f"(DPO: {after[0]} of {after[1]}, before {before[0]} of {before[1]})" in page
    questions = {row["prompt"] for row in program.answers("rloo")}
    assert f"The rows are only {len(questions)} different questions" in page
    far, last = program.answers("rloo-far"), program.answers("rloo-kl0")
    wrong, named = program.wrong_articles(far, "after")
    assert f"{wrong} of the {named} answers that name an article name a wrong one" in page
    ends = [program.evaluation(name)["after"] for name in ("rloo-far", "rloo")]
    scores, wins = ([f"{end[name]:.2f}" for end in ends] for name in ("score mean", "win rate"))
    assert f"the score reaches {scores[0]}, more than the {scores[1]} of the run with 0.2" in page
    assert f"the win rate {wins[0]} instead of {wins[1]}" in page
    for quoted, answers in ((r'are broken: "(.*?)"', last), (r'the model answers: "(.*?)"', far)):
        assert re.search(quoted, page)[1] in [row["after"].strip() for row in answers]

    best_to_last, best_kls, late = [], [], []
    for name in ("rloo-kl0", "rloo-kl0-seed2", "rloo-kl0-seed3"):
        rows = program.read_rows(program.RUNS / name, "metrics.jsonl")
        points = [(x["eval/KL, nats per response"], x["eval/win rate"]) for x in rows if "eval/win rate" in x]
        best_kl, best = max(points, key=lambda point: point[1])
        best_kls.append(round(best_kl))
        late += [best - win for kl, win in points if kl >= 15]
        best_to_last.append(f"from {best:.2f} to {program.evaluation(name)['after']['win rate']:.2f}")
    assert f"the win rate falls {best_to_last[1]} and {best_to_last[2]}" in page
    assert (min(best_kls), max(best_kls)) == (4, 6) and min(late) > 0.1
    assert "the win rate is best at 4 to 6 nats, and lower at 15 and above" in page

    rows = program.read_rows(program.RUNS / "rloo-kl0", "metrics.jsonl")
    best = max((row for row in rows if "eval/win rate" in row), key=lambda row: row["eval/win rate"])
    assert f"is best after update {best['update']}" in page
    rows = program.read_rows(program.RUNS / "sft-long", "metrics.jsonl")
    best = sorted((row for row in rows if "eval/loss" in row), key=lambda row: row["eval/loss"])[:2]
    assert sorted(row["update"] for row in best) == [200, 300]
    assert sorted(math.ceil(row["epoch"]) for row in best) == [6, 8]
    assert "lowest after updates 200 and 300, in the sixth and the eighth epoch" in page


def test_the_own_reward_of_the_readme_is_that_of_the_file():
    evaluation = result("ppo-sentiment-own-reward/evaluation.json")
    before, after = evaluation["before"]["score mean"], evaluation["after"]["score mean"]
    text = " ".join(README.split())
    assert f"the mean of {evaluation['n']} held-out prompts rises from {before:.2f} to {after:.2f}" in text


def test_the_memory_of_running_is_that_of_the_file():
    rows = result("memory.json")["rows"]
    peaks = {row["flags"]: row["peak_mb"] for row in rows if row["size"] == "10 layers x 640"}
    both = peaks["--lora-r 16 --gradient-checkpointing"]
    assert f"from {peaks['']:.0f} to {both:.0f} MiB" in DOCS["running"]


def test_the_speed_page_has_the_numbers_of_the_rollout():
    """results/gpu-rollout.json"""
    steps = result("gpu-rollout.json")["step"]
    for first, shape, key in (
        ("Qwen2.5-0.5B, recorded", "qwen2.5-0.5b", "ms_recorded"),
        ("Qwen2.5-0.5B, growing cache", "qwen2.5-0.5b", "ms_growing_cache"),
        ("GPT-2 (124M), recorded", "gpt2-124m", "ms_recorded"),
    ):
        for rows, cell in zip((64, 256, 512, 1024), cells_of(DOCS["speed"], first), strict=True):
            found = steps[f"{shape}, {rows} rows"]
            assert cell == (f"{found[key]:.1f}" if key in found else "")


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


def test_the_ratios_of_the_readme_are_those_of_the_speed_page():
    """With one significant digit."""
    table = README.split("\n## Speed")[1].split("\n## ")[0]
    ratios = re.findall(r"(?<=[|;] )\d+(?= *[;|])", table)
    assert len(ratios) == 8
    exact = [float(ratio) for ratio in re.findall(r"\| (\d+\.\d\d) \(", DOCS["speed"])]
    assert {int(ratio) for ratio in ratios} <= {round(ratio) for ratio in exact}


def test_the_samples_and_numbers_of_the_readme_are_those_of_the_files():
    """The first four answers; known faults and those that notice them; blind faults; kills."""
    lines = read(ROOT / "results/smollm2-imdb/seed1", "evaluation_samples.jsonl").splitlines()
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
    assert {kill["script"] for kill in kills} == {*SCRIPTS}
    earlier = [json.loads(line) for line in open(ROOT / "results/reliability/kills-033745e.jsonl")]
    lost = sum(not kill["same"] for kill in earlier)
    assert f"Of {len(earlier)} SIGINTs to an earlier version, {lost} came while" in DOCS["evidence"]
    noticed = []
    for path in sorted((ROOT / "results/blind-faults").glob("*.outcomes.jsonl")):
        outcomes = [json.loads(line) for line in path.read_text().splitlines()]
        noticed.append(sum(outcome["killed_by"] is not None for outcome in outcomes))
    assert f"{', '.join(map(str, noticed[:-1]))} and {noticed[-1]} on the first try" in DOCS["evidence"]
    assert f"{min(noticed)} to {max(noticed)} of the 30 new faults" in README


def code_lines(source):
    """Number of lines without comments, empty lines and docstrings."""
    no_code = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (*no_code, tokenize.ENDMARKER):
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def test_the_size_of_ppo_minimal():
    """Counted in the same way, CleanRL's cleanrl/ppo.py of commit fe8d8a0 has 225 lines of code."""
    source = (ROOT / "ppo_minimal.py").read_text()
    lines, code = round(len(source.splitlines()), -1), round(code_lines(source), -1)
    assert f"in {lines} lines, of which {code} are code (CleanRL's ppo.py: 225 of 312)" in " ".join(
        README.split()
    )
    assert f"in {code} lines of code" in DOCS["reading"]


def test_the_gain_on_gsm8k_is_in_the_pages():
    """The paired gain of seed 1, the minutes of its updates, and the number of its problems."""
    program = load_program("benchmarks/real_results.py")
    folder = ROOT / "results/qwen-gsm8k/seed1"
    row = program.solved(folder).splitlines()[2]
    before, after, gain = [cell.strip() for cell in row.strip("|").split("|")[1:]]
    sentence = f"{before.replace('%', ' %')} to {after.replace('%', ' %')}"
    for page in (README, DOCS["real_models"], DOCS["grpo_math"]):
        assert sentence in " ".join(page.split()) and gain.removesuffix(" points").lstrip("+") in page
    assert program.minutes(folder) == "5"
    args = result("qwen-gsm8k/seed1/args.json")["args"]
    problems = args["total_episodes"] // args["num_generations"]  # each one is drawn once
    page = " ".join(DOCS["real_models"].split())
    assert f"on {problems:,} of the 7,473 training problems" in page
    assert f"In {args['total_episodes'] // 256} updates of 256 responses" in page


def evaluations(folder):
    """evaluation.json of a folder of results/, before and after training."""
    evaluation = result(f"{folder}/evaluation.json")
    return evaluation["before"], evaluation["after"]


def test_what_the_page_says_of_gaps_is_in_the_runs():
    """A healthy engine, one with weights of the update before, and one that keeps those of the start."""
    text = section("running", "### The gap between sampling and update")
    name = "sampling/logprob_gap_mean"
    healthy, old, never, exact, exact_old = (
        [row[name] for row in read_rows(ROOT / f"results/vllm/{run}.zip", "metrics.jsonl")]
        for run in ("grpo_math", "one-update-old", "never-told", "float32", "float32-one-update-old")
    )
    ratios = [x / y for x, y in zip(old[1:], healthy[1:], strict=True)]
    assert f"{min(ratios):.1f} to {max(ratios):.1f} times as large" in text
    assert f"{healthy[1]:.3f} in a healthy run (update 2) and {old[9]:.3f} in this one (update 10)" in text
    assert max(exact) < 1e-6 and min(exact_old[1:]) >= 0.005 and "with old weights 0.005 or more" in text
    for run in ("grpo_math", "never-told"):
        evaluation = result(f"vllm/{run}/evaluation.json")
        assert (evaluation["before"] == evaluation["after"]) == (run == "never-told")
    assert never[0] < 0.01 < 0.09 < never[-1]


def sentences_with_numbers():
    """-> pairs: name of a page, what it should say, with numbers from results/, data/ and checkpoints/"""
    imdb, words, dialogs = "smollm2-imdb", "smollm2-word-problems", "smollm2-dailydialog"
    program = load_program("benchmarks/real_results.py")

    minutes = sum(
        sum(row["perf/seconds"] for row in json_lines(f"{imdb}/{part}/metrics.jsonl.gz")) / 60
        for part in ("sft", "reward", "seed1")
    )
    yield "README", f"three scripts, {minutes:.0f} minutes of updates"
    peaks = [max(row["perf/peak_memory_mb"] for row in json_lines(f"{x}/metrics.jsonl.gz")) for x in DEFAULTS]
    yield "README", f"two CPU cores and {math.ceil(max(peaks) * 2**20 / 5e8) / 2:g} GB of memory"
    rows = (ROOT / "data/reviews/train.jsonl").read_text().splitlines()
    weights = load_file(ROOT / "checkpoints/reviews-lm/model.safetensors").values()
    millions = sum(x.numel() for x in weights) / 1e6
    yield (
        "README",
        f"a GPT-2 with {millions:.2f} million parameters that learned to write from {len(rows):,} reviews",
    )
    first, *_ = json_lines("grpo-math-tiny/seed1/metrics.jsonl.gz")
    yield "debugging", f"({first['loss/policy_avg']:.1f} at the start of grpo_math.py's default)"
    shares = [
        row["completions/clipped_ratio"]
        for seed in range(1, 6)
        for row in json_lines(f"ppo-sentiment-tiny/seed{seed}/metrics.jsonl.gz")
    ]
    yield "running", f"{min(shares):.2f} to {max(shares):.0f} in the default of ppo_sentiment.py"
    gpu = {(row["size"], row["flags"]): f"{row['peak_mb'] / 1024:.1f}" for row in gpu_memory()}
    both = "--lora-r 16 --gradient-checkpointing"
    yield "README", f"RLOO with GPT-2 ({gpu['gpt2-124m', '']} GiB)"
    yield "README", f"the shape of pythia-410m ({gpu['pythia-410m', '']} GiB)"
    yield "README", f"pythia-1b with LoRA and gradient checkpointing ({gpu['pythia-1b', both]} GiB)"
    yield "README", f"with gradient checkpointing ({gpu['pythia-1b', '--gradient-checkpointing']} GiB)"

    updates = json_lines("qwen-gsm8k/seed1/metrics.jsonl.gz")
    seconds, rollout = (fmean(row[f"perf/{x}"] for row in updates) for x in ("seconds", "rollout_seconds"))
    gib = max(row["perf/peak_memory_mb"] for row in updates) / 1024
    yield "real_models", f"an update takes {seconds:.1f} seconds, of which {rollout:.1f} are generation"
    yield "real_models", f"The peak memory is {gib:.0f} GiB"
    yield "README", f"({gib:.0f} GiB), 5 minutes of updates"
    reward, judge = (result(f"{imdb}/{part}/evaluation.json")["accuracy"] for part in ("reward", "judge"))
    yield "real_models", f"the classifier that rewards it (accuracy {reward:.3f})"
    yield "real_models", f"is the judge (accuracy {judge:.3f})"
    acts = result(f"{dialogs}/intent/evaluation.json")["accuracy"]
    yield "real_models", f"a classifier of dialog acts (accuracy {acts:.3f})"
    false, several = program.equations(ROOT / f"results/{words}/seed1").splitlines()[2:]
    before, after = (100 * float(x) for x in re.findall(r"0\.\d+", several))
    yield "real_models", f"two or more operators fall from {before:.0f} to {after:.0f} %"
    before, after = (100 * float(x) for x in re.findall(r"0\.\d+", false))
    yield "real_models", f"{before:.0f} % of its equations are false before, {after:.0f} % after"
    runs = [evaluations(f"{dialogs}/{run}") for run in ("lr-3e-4", "lr-3e-4-seed5")]
    gains = [100 * (after["meteor"] / before["meteor"] - 1) for before, after in runs]
    yield "real_models", f"with which METEOR rose by {gains[0]:.0f} and {gains[1]:.0f} %"
    for name, sentence in (
        ("tldr", "right on {:.0f} and {:.0f} % of {} held-out pairs"),
        ("hh", "right on {:.0f} % of {n} held-out pairs, the judge on {:.0f} %"),
    ):
        rows = [result(f"smollm2-{name}/{part}/evaluation.json") for part in ("reward", "judge")]
        shares = [100 * row["accuracy"] for row in rows]
        yield "real_models", sentence.format(*shares, rows[0]["n"], n=rows[0]["n"])

    before, after = evaluations("grpo-math-hacked/format-alone/seed1")
    change = f"from {before['held-out: pass@1']:.3f} to {after['held-out: pass@1']:.3f}"
    yield "grpo_math", f"pass@1 hardly changes: {change} (`results/grpo-math-hacked/format-alone`)"
    sharp, _ = evaluations("ppo-dialog-sharp")
    yield (
        "ppo_dialog",
        f"METEOR {sharp['meteor']:.3f} and intent {sharp['intent']:.3f} on the same prompts",
    )
    yield "ppo_dialog", f"({sharp['distinct2']:.3f}; `results/ppo-dialog-sharp`)"
    weak, good = (
        result(f"{x}.json")["accuracy"] for x in ("rloo-weak-reward/reward", "tldr-reward/evaluation")
    )
    yield (
        "rloo_tldr",
        f"({100 * weak:.1f} % of held-out pairs in the right order instead of {100 * good:.1f} %;",
    )
    gains, perfect = [], []
    for seed in (1, 2, 3):
        rows = json_lines(f"dpo-tldr-tiny/seed{seed}/evaluation_samples.jsonl.gz")
        differences = [row["score after"] - row["score"] for row in rows]
        width = 1.96 * pstdev(differences) / len(rows) ** 0.5
        gains.append(f"{fmean(differences):.2f} +- {width:.2f}")
        perfect.append(
            "{} to {}".format(*(sum(row[x] == 3 for row in rows) for x in ("score", "score after")))
        )
    for texts in (gains, perfect):
        yield "dpo_tldr", f"{texts[0]}, {texts[1]} and {texts[2]}"


DEFAULTS = [  # runs of the scripts without flags
    *("reviews-lm", "reviews-sentiment", "ppo-sentiment-default"),
    *(f"{name}/seed1" for name in ("ppo-dialog-tiny", "rloo-tiny", "dpo-tldr-tiny", "grpo-math-tiny")),
]


def json_lines(path):
    """Objects of a file of results/, compressed or not."""
    path = ROOT / "results" / path
    return read_rows(path.parent, path.name.removesuffix(".gz"))


def gpu_memory():
    return result("gpu-memory.json")["rows"]


def test_numbers_in_sentences_are_those_of_the_files():
    pages = {name: " ".join(page.split()) for name, page in {**DOCS, "README": README}.items()}
    pairs = list(sentences_with_numbers())
    assert len(pairs) > 20
    assert not [pair for pair in pairs if pair[1] not in pages[pair[0]]]


def test_the_table_of_memory_on_a_gpu_is_that_of_the_file():
    sizes = {
        "gpt2-124m": "GPT-2 (124M)",
        "pythia-410m": "shape of pythia-410m",
        "pythia-1b": "shape of pythia-1b",
    }
    for size, name in sizes.items():
        peaks = [f"{row['peak_mb'] / 1024:.1f}" for row in gpu_memory() if row["size"] == size]
        assert cells_of(DOCS["speed"], name) == peaks


def test_the_texts_that_methods_counts_are_in_the_files():
    page = " ".join(DOCS["methods"].split())

    def count(run, pattern, when="after"):
        rows = read_rows(ROOT / f"results/methods/{run}", "evaluation_samples.jsonl")
        assert len(rows) == 300
        return sum(re.search(pattern, row[when]) is not None for row in rows)

    form = r"^ My \w+ \w+ [^?]*\. [^?.]*\?$"  # My roommate Vera ... . How ...?
    first, *others = (f"rloo-kl-0.0/seed{seed}" for seed in (1, 2, 3))
    counts = [count(run, form) for run in (first, *others)]
    text = "without a penalty {}, {} and {} of 300, by seed, and {} before training"
    assert text.format(*counts, count(first, form, "before")) in page
    run, periods, begins = "rloo-kl-0.0-long/seed1", r"[?.]\.+$", "^ Help:"
    text = "{} of 300 responses have one or more periods after their end, and {} begin with"
    assert text.format(count(run, periods), count(run, begins)) in page
    before = count(run, periods, "before"), count(run, begins, "before")
    assert "(before training {} and {})".format(*before) in page
    best = json.loads(gzip.decompress((ROOT / "results/methods/best-of-n.json.gz").read_bytes()))["best"]
    bad = sum(x["gold"] <= 1.5 for x in best)
    assert f"a gold score of 1.5 or less in {bad} of the {len(best)} posts" in page
    quoted = re.search(r'posts: "(.*?)" got', page)[1]
    shown = max((x for x in best if x["text"].strip() == quoted), key=lambda x: x["reward"])
    assert f"a reward of {shown['reward']:.1f} and a gold score of {shown['gold']:.0f}." in page


def test_the_table_of_dpos_flags_is_that_of_the_files():
    page = DOCS["dpo_tldr"].split("\n### What goes wrong")[1]
    rows = [
        [x.strip() for x in line.strip("|").split("|")] for line in page.split("\n\n")[2].splitlines()[2:]
    ]
    assert len(rows) == 5
    for rate, beta, *cells in rows:
        name = f"dpo-tldr-sweep/lr-{rate}-beta-{beta}"
        run = result(f"{'dpo-tldr-tiny/seed1' if rate == '1e-4' else name}/evaluation.json")
        after, pairs = run["after"], run["pairs"]
        expected = [f"{after['win rate']:.3f}", f"{after['KL, nats per response']:.3f}"]
        expected += [f"{pairs['logps/chosen']:.2f}", f"{pairs['rewards/accuracies']:.3f}"]
        assert cells == expected


def test_the_table_of_prefixes_is_that_of_the_file():
    good, other = (
        result("prefixes.json")[x] for x in ("checkpoints/reviews-sentiment", "runs/without-prefixes/model")
    )
    page = DOCS["reward_model"].split("\n### Why the classifier")[1]
    for row, other_row in zip(good, other):
        if row["tokens"] != 24:
            values = [x[name] for x in (row, other_row) for name in ("accuracy", "mean P(positive)")]
            assert cells_of(page, row["tokens"]) == [f"{value:.3f}" for value in values]


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_readme_lists_the_recipes(scripts, name):
    """The default first."""
    [row] = [line for line in README.splitlines() if line.startswith(f"| [`{name}.py`](")]
    listed = re.findall(r"`([^`]+)`", row.split("|")[3])
    assert listed[0] == "tiny" and sorted(listed) == sorted(scripts[name].RECIPES)


def test_numbers_that_follow_from_the_code(scripts):
    """Optimizer steps of the defaults, tokens that the classifier reads, tokens per round, traps."""
    pages = {name: " ".join(page.split()) for name, page in {**DOCS, "README": README}.items()}
    for name in ("ppo_sentiment", "ppo_dialog", "rloo_tldr", "grpo_math"):
        args = scripts[name].RECIPES["tiny"]
        episodes, minibatch = args.total_episodes, args.per_device_train_batch_size
        steps = episodes // (minibatch * args.gradient_accumulation_steps) * args.num_ppo_epochs
        assert f"{episodes:,} episodes, {steps:,} optimizer steps" in pages[name]
    args = scripts["ppo_sentiment"].RECIPES["tiny"]
    shortest = args.query_min_length + args.response_min_length
    longest = args.query_max_length + args.response_length
    assert f"texts of {shortest} to {longest} tokens" in pages["reward_model"]
    for name in ("rloo_tldr", "grpo_math"):
        assert f"rounds of {scripts[name].TOKENS_PER_ROUND} tokens" in pages["running"]
        assert f"each round of {scripts[name].TOKENS_PER_ROUND} tokens" in pages["implementation_details"]
    for name in ("README", "index", "implementation_details"):
        assert f"{len(TRAPS)} traps" in pages[name]
    assert sum("- Tests: none" in text for text in TRAPS.values()) == 2  # as the README says


def test_the_flags_that_may_change_are_those_of_the_page(scripts):
    """All but --resume itself and the judge, which the page names in words."""
    text = DOCS["running"].split("\n## Resuming")[1].split("With one process or DDP")[0]
    listed = {flag.replace("-", "_") for flag in re.findall(r"`--([a-z-]+)`", text)}
    may_change = {flag for script in scripts.values() for flag in script.MAY_CHANGE}
    may_change = {flag for flag in may_change if not flag.startswith("judge")}
    assert listed == may_change - {"resume"}
    *judged, last = [
        name for name in scripts if any(x.startswith("judge") for x in vars(scripts[name].Args()))
    ]
    judged = ", ".join(f"{name}.py" for name in judged)
    assert f"the judge of {judged} and {last}.py" in " ".join(text.split())


def test_the_recipes_that_need_no_download_are_those_of_the_readme(scripts):
    [named] = re.findall(r"Recipes whose name begins with `tiny`, and (.*?), use the models", README)
    for script in scripts.values():
        for name, args in script.RECIPES.items():
            is_named = name.startswith("tiny") or f"`{name}`" in named
            assert args.dataset_name.startswith("data/") == is_named, name


def test_the_classifiers_that_are_refused_are_those_of_the_page():
    source = inspect.getsource(check.check_reward_models)
    [refused] = re.findall(r"model_type in \((.*?)\)", source)
    [sentence] = re.findall(
        r"any classifier of transformers(.*?)\. ", " ".join(DOCS["ppo_sentiment"].split())
    )
    for name in re.findall(r"[a-z-]+", refused):
        assert name.replace("-", " ") in sentence.lower()


def test_the_scripts_that_record_token_steps_are_those_of_the_page(scripts):
    text = section("running", "## Generation on a GPU")
    named = set(re.findall(r"`(\w+)\.py`", text))
    assert named == {name for name in scripts if hasattr(scripts[name], "generate_recorded")}


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
    assert list(TRAPS) == [str(number) for number in range(1, 61)]
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


def test_the_names_in_the_section_on_larger_changes_are_those_of_the_script():
    source = (ROOT / "grpo_math.py").read_text() + "advantages[rows, :t] advantages[:k]"  # after the change
    named = re.findall(r"`([^`]+)`", section("grpo_math", "## Larger changes"))
    assert len(named) > 15 and not [name for name in named if name not in source]


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


def test_the_five_seeds_of_grpo_are_those_of_the_files():
    """Every row of the first table, and the gain that the page promises."""
    page = DOCS["grpo_math"].split("\n### The default")[1].split("\n### ")[0]
    runs = [result(f"grpo-math-tiny/seed{seed}/evaluation.json") for seed in range(1, 6)]
    rows = re.findall(r"^\| ((?:held-out|harder|greedy): [^|]+?) \|", page, re.M)
    assert len(rows) == 6
    for name in rows:
        digits = 1 if "tokens" in name else 3
        values = [runs[0]["before"][name], *[run["after"][name] for run in runs]]
        assert cells_of(page, name) == [f"{value:.{digits}f}" for value in values]
    for run in runs:
        assert run["after"]["held-out: pass@1"] - run["before"]["held-out: pass@1"] > 0.3


def test_all_seeds_begin_with_the_same_numbers():
    """docs/grpo_math.md shows those of seed 1 only."""
    before = [result(f"grpo-math-tiny/seed{seed}/evaluation.json")["before"] for seed in range(1, 6)]
    assert all(row == before[0] for row in before)
    assert "the same for all seeds, so all begin with these numbers" in " ".join(DOCS["grpo_math"].split())
