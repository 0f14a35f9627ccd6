"""What the scripts promise each other and their readers: shared source, flags, two parts, no side effects
of an import."""

import ast
import collections
import dataclasses
import io
import itertools
import subprocess
import sys
import tokenize
import tomllib

import pytest
from conftest import ROOT, SCRIPTS

SOURCES = {name: (ROOT / f"{name}.py").read_text() for name in SCRIPTS}
VERSIONS = {  # what has one role and one name in all scripts, but not one source: how many there are
    **dict.fromkeys(["Args", "RECIPES", "train"], len(SCRIPTS)),
    **dict(evaluate=7, evaluate_set=2, table_metrics=2, report_evaluation=7),
    **dict(draw_batch=4, rollout=5, sample_responses=2, generate=4),
    **dict(response_logprobs=3, reference_logprobs=2, load_prompts=5, load_reward=3),
    "main": 3,  # the verbs judge and chat
    **dict(MAY_CHANGE=5, OF_DATA=7),  # only flags that the script has: see the test of them
    "load_model": 2,  # reward_model.py makes new heads
    "check_model": 2,  # sft.py packs documents
    "find_stop_tokens": 2,  # ppo_sentiment.py has no chats
    **dict.fromkeys(["render_chat", "tokenize_prompt", "load_tasks"], 2),  # with the schemas of tools, or not
}
SHORTENED = {  # what ppo_minimal.py has in a shorter form than ppo_sentiment.py
    *("Args", "train", "load_prompts", "draw_batch", "rollout", "generate", "load_label_scorer"),
    *("PolicyAndValue", "response_logprobs", "sample_tokens", "masked_whiten"),
}
every_script = pytest.mark.parametrize("name", SCRIPTS)


# ---- Shared source -----------------------------------------------------------------------------------------


def names_of(node):
    """Names that a statement at the top level defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return [leaf.id for target in targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)]


def definitions(source):
    """Top-level name -> its lines, with decorators, comments in it and comments right above it."""
    lines = source.splitlines()
    found = {}
    for node in ast.parse(source).body:
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *[decorator.lineno for decorator in decorators]]) - 1
        while lines[first - 1].startswith("#") and not lines[first - 1].startswith("# ----"):
            first -= 1
        for name in names_of(node):
            found[name] = "\n".join(lines[first : node.end_lineno])
    return found


def test_same_name_means_same_source():
    """Names in VERSIONS have as many sources as it says, so that no copy is changed alone."""
    sources_of = collections.defaultdict(dict)
    for script, source in SOURCES.items():
        for name, text in definitions(source).items():
            sources_of[name][script] = text
    found = {name: len(set(texts.values())) for name, texts in sources_of.items()}
    different = {name: n for name, n in found.items() if n != VERSIONS.get(name, 1)}
    copy = (
        "python tests/documents/copy_shared.py SCRIPT.py copies the functions of one script into the others"
    )
    assert not different, f"numbers of different sources: {different}. {copy}"


def test_same_order_of_functions():
    """What two scripts have in the same part has the same order, so that a reader finds it again."""
    orders = {}
    for script, source in SOURCES.items():
        first = list(definitions(source.split("# Part II")[0] + "\n"))
        orders[script] = first, [name for name in definitions(source) if name not in first]
    for a, b in itertools.combinations(orders.values(), 2):
        for names, others in zip(a, b):
            shared = [name for name in names if name in others]
            assert shared == [name for name in others if name in names]


def test_ppo_minimal_has_the_functions_of_ppo_sentiment():
    """Each of its functions is one of ppo_sentiment.py, with the same source unless it is shortened."""
    minimal = definitions((ROOT / "ppo_minimal.py").read_text())
    big = definitions(SOURCES["ppo_sentiment"])
    assert set(minimal) <= set(big)
    assert {name for name, text in minimal.items() if text != big[name]} == SHORTENED


@every_script
def test_every_definition_is_used(name):
    """A script holds only what it uses."""
    tree = ast.parse(SOURCES[name])
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    used |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    called_by_hand = {"main", "train"}
    unused = set(definitions(SOURCES[name])) - used - called_by_hand
    assert not unused, f"{name}.py defines but never uses {unused}"


MATH = """
response_lengths length_mask token_logits token_logprobs kl_per_token token_rewards masked_mean masked_whiten
gae rloo_advantages grpo_advantages clipped_policy_loss clipped_value_loss adaptive_kl_coef sample_tokens
pair_loss dpo_loss pair_metrics
"""


@pytest.mark.parametrize("function", MATH.split())
def test_the_math_is_in_part_1_and_reads_no_flags(function):
    """In dpo_tldr.py, samples are no part of the algorithm."""
    names = [name for name, source in SOURCES.items() if f"\ndef {function}(" in source]
    if function in ("response_lengths", "sample_tokens", "token_logits"):
        names.remove("dpo_tldr")
    parts = [SOURCES[name].split("# Part II")[0] for name in names]
    nodes = [node for part in parts for node in ast.parse(part + "\n").body if function in names_of(node)]
    assert len(nodes) == len(parts) > 0, f"not in Part I: {function}"
    used = {leaf.id for node in nodes for leaf in ast.walk(node) if isinstance(leaf, ast.Name)}
    assert not used & {"args", "Args"}


# ---- Flags -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["MAY_CHANGE", "OF_DATA"])
def test_lists_of_flags_differ_only_by_the_flags_of_the_script(scripts, name):
    """A flag that may change in one script, or describes its data, does so in all that have it."""
    listed = {flag for script in scripts.values() for flag in getattr(script, name)}
    for script in scripts.values():
        flags = {field.name for field in dataclasses.fields(script.Args)}
        assert sorted(getattr(script, name)) == sorted(listed & flags), script.__name__


def comments_of(source):
    """Line number -> the comment on this line."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}


def fields_of(source):
    """Field of Args -> (type, its comment or None)."""
    args_class = next(node for node in ast.parse(source).body if getattr(node, "name", "") == "Args")
    comments = comments_of(source)
    found = {}
    for node in args_class.body:
        if isinstance(node, ast.AnnAssign):
            comment = comments.get(node.end_lineno) or comments.get(node.lineno)
            found[node.target.id] = ast.unparse(node.annotation), comment
    return found


def attributes_read(source):
    """Fields of args that are read, as args.name or self.args.name."""
    read = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            if ast.unparse(node.value) in ("args", "self.args", "run.args"):
                read.add(node.attr)
    return read


@every_script
def test_every_flag_is_used(name):
    """Trick 36."""
    unused = set(fields_of(SOURCES[name])) - attributes_read(SOURCES[name])
    assert not unused, f"parsed and never used: {sorted(unused)}"


@every_script
def test_every_flag_is_explained_on_its_line(name, scripts):
    explained = fields_of(SOURCES[name])
    assert set(explained) == {field.name for field in dataclasses.fields(scripts[name].Args)}
    assert not [field for field, (_, comment) in explained.items() if not comment]


def test_a_flag_has_the_same_type_in_all_scripts():
    types = collections.defaultdict(set)
    for source in SOURCES.values():
        for field, (kind, _) in fields_of(source).items():
            types[field].add(kind)
    may_differ = {
        "model_name_or_path",  # rloo_tldr.py can do with --sft-model-path
        "reward_model_path",  # ppo_dialog.py can do without the intent classifier
        "reward_fn",  # grpo_math.py cannot do without a function
        "num_eval_prompts",  # rloo_tldr.py accepts TRL's name too
    }
    assert not {field for field, kinds in types.items() if len(kinds) > 1} - may_differ


@every_script
def test_help_shows_the_comments(name, scripts, capsys):
    with pytest.raises(SystemExit):
        scripts[name].parse_args(["--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "random seed" in shown
    assert all(recipe in shown for recipe in scripts[name].RECIPES)


@every_script
def test_recipes_are_args_and_the_first_one_is_tiny(name, scripts):
    assert next(iter(scripts[name].RECIPES)) == "tiny"
    assert all(isinstance(recipe, scripts[name].Args) for recipe in scripts[name].RECIPES.values())
    assert scripts[name].RECIPES["tiny"].dtype == "float32"  # so that results do not depend on the hardware


def imports_of(source):
    """The top-level packages that a source imports, in functions too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found.add(node.module.split(".")[0])
    return found


# ---- Layout and imports ------------------------------------------------------------------------------------


@every_script
def test_a_script_has_two_parts_and_a_docstring(name):
    assert ast.get_docstring(ast.parse(SOURCES[name]))
    assert SOURCES[name].count("\n# Part I: the algorithm\n") == 1
    part_1, part_2 = SOURCES[name].split("\n# Part II: infrastructure.")
    assert "\ndef train(args):" in part_1 and "\nclass Run:" in part_2
    assert SOURCES[name].endswith('\nif __name__ == "__main__":\n    main()\n')


# Lines of Part II without the recipes. Whoever adds a line takes one out.
BUDGETS = {
    **dict(sft=605, reward_model=590, dpo_tldr=824),  # dpo_tldr.py samples and judges there, in 220 lines
    **dict(ppo_sentiment=727, ppo_dialog=875, rloo_tldr=1066, grpo_math=918, grpo_tools=957),
}


@every_script
def test_the_infrastructure_does_not_grow(name):
    source = SOURCES[name].split("\n# Part II: infrastructure.")[1]
    lines = len(source.splitlines())
    for text in ("TINY", "BOXED", "RECIPES"):
        lines -= len(definitions(SOURCES[name]).get(text, "").splitlines())
    assert lines <= BUDGETS[name]


@every_script
def test_uv_installs_what_requirements_pin(name):
    """The inline metadata (PEP 723) of all scripts is the same, and pins what requirements.txt pins."""
    _, block = SOURCES[name].split("\n# /// script\n")
    block, _ = block.split("\n# ///\n")
    lines = [line.removeprefix("# ").removeprefix("#") for line in block.splitlines()]
    metadata = tomllib.loads("\n".join(lines))
    pins = (ROOT / "requirements.txt").read_text().split()
    assert set(metadata["dependencies"]) <= set(pins)
    packages = {pin.split("==")[0].replace("-", "_") for pin in metadata["dependencies"]}
    optional = {"bitsandbytes", "deepspeed", "openai"}
    of_transformers = {"safetensors", "tokenizers", "huggingface_hub"}
    assert packages == imports_of(SOURCES[name]) - set(sys.stdlib_module_names) - optional - of_transformers


@every_script
def test_a_script_imports_nothing_of_this_repository(name):
    files = {path.stem for path in ROOT.glob("*.py")}
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()}
    assert not imports_of(SOURCES[name]) & (files | folders)


LIST_MODULES = "import sys; print(*sorted({name.split('.')[0] for name in sys.modules}))"
LIBRARIES = """
import transformers, accelerate, datasets, tyro, rich, safetensors
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers import AutoModelForSequenceClassification, AutoTokenizer
"""


def run_python(*arguments, **kwargs):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True, **kwargs)


def test_imports_have_no_side_effects(tmp_path):
    """Nothing is printed or written, and no optional package is loaded."""
    alone = run_python("-c", LIBRARIES + LIST_MODULES)
    others = [name for name in SCRIPTS if name != "ppo_dialog"]  # it needs three packages in every run
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {', '.join(others)}\n{LIST_MODULES}"
    done = run_python("-B", "-c", f"{code}\nimport ppo_dialog\n{LIST_MODULES}", cwd=tmp_path)
    assert done.stderr == alone.stderr and not list(tmp_path.iterdir())
    modules, with_dialog = [
        set(line.split()) - set(alone.stdout.split()) for line in done.stdout.splitlines()
    ]
    optional = {"wandb", "peft", "matplotlib", "bitsandbytes", "tensorboard", "deepspeed", "trl", "evaluate"}
    assert not optional & with_dialog and not {"nltk", "sacrebleu", "rouge_score"} & modules
