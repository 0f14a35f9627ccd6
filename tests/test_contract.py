"""What the scripts promise each other and their readers: shared code, flags, banners, imports, the data and its size."""

import ast
import collections
import dataclasses
import functools
import hashlib
import json
import re
import subprocess
import sys
import types

import psutil
import pytest
import torch
from conftest import KERNELS, ROOT, SCRIPTS

SOURCES = {name: (ROOT / f"{name}.py").read_text() for name in SCRIPTS}
OWN = {"Args", "RECIPES", "TINY", "TINY_TLDR", "TINY_DIALOG", "train", "main"}  # the names that mean something else in every script
DIFFERENT = {}  # (script, shared name) -> why its source may differ; empty
LINES = {"sft": 987, "reward_model": 1015, "rloo_tldr": 1559, "ppo_sentiment": 1407, "ppo_dialog": 1614}
BANNERS = ["2. Imports", "3. Config", "4. Kernels", "5. Models", "6. Data", "7. Rollout", "8. Evaluation", "9. Logging and run folder",
           "10. Train", "11. Main"]  # fmt: skip
WITHOUT = {"reward_model": {"7. Rollout"}}  # it samples nothing
every_script = pytest.mark.parametrize("name", SCRIPTS)


# ---- shared code -----------------------------------------------------------------------------------------------------
def names_of(node):
    """Names that a statement at the top level binds."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, (ast.AnnAssign, ast.AugAssign)) else []
    return [leaf.id for target in targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)]


def definitions(source):
    """Top-level name -> its lines, with decorators, comments inside and after it on the line, and comments right above it."""
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))]) - 1
        while lines[first - 1].startswith("#") and not lines[first - 1].startswith("# ----"):
            first -= 1
        found |= dict.fromkeys(names_of(node), "\n".join(lines[first : node.end_lineno]))
    return found


def test_definitions_sees_comments_and_decorators():
    source = "import a\n# why\n@b\ndef c():\n    return 1  # how\nD: int = 2  # two\n# ---- 3. E ----\nf = 1"
    shown = {"c": "# why\n@b\ndef c():\n    return 1  # how", "D": "D: int = 2  # two", "f": "f = 1"}
    assert definitions(source) == shown


def test_same_name_means_same_source():
    holders = collections.defaultdict(dict)
    for script, source in SOURCES.items():
        for name, text in definitions(source).items():
            if name not in OWN and (script, name) not in DIFFERENT:
                holders[name][script] = text
    different = {name: sorted(texts) for name, texts in holders.items() if len(set(texts.values())) > 1}
    assert not different, f"these differ between scripts: {different}"


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_is_where_it_must_be(kernel):
    """And is pure: a function at the top level of section 4 that reads no Args."""
    for name in set(KERNELS[kernel]) & set(SCRIPTS):
        assert kernel in definitions(SOURCES[name]), f"{name}.py must ship {kernel}"
        section = SOURCES[name].split("# ---- 4.")[1].split("# ---- 5.")[0]
        assert f"\ndef {kernel}(" in section, f"{kernel} of {name}.py is no kernel of section 4"
    for name in SCRIPTS:
        node = next((n for n in ast.parse(SOURCES[name]).body if kernel in names_of(n)), None)
        assert node is None or not any(isinstance(n, ast.Name) and n.id in ("args", "Args") for n in ast.walk(node))


SIGNATURES = {  # as others call them
    "response_lengths": "tokens, stop_token_id",
    "length_mask": "lengths, max_length",
    "token_logprobs": "hidden, weight, tokens, temperature=1.0, bias=None, keep=0",
    "kl_per_token": "logprobs, ref_logprobs, estimator",
    "token_rewards": "scores, kl, lengths, kl_coef",
    "masked_mean": "values, mask",
    "masked_whiten": "values, mask, shift_mean=True",
    "gae": "rewards, values, mask, gamma, lam",
    "rloo_advantages": "rewards, rloo_k",
    "clipped_policy_loss": "logprobs, old_logprobs, advantages, cliprange",
    "clipped_value_loss": "values, old_values, returns, cliprange_value",
    "adaptive_kl_coef": "kl_coef, kl, target, horizon, episodes",
}


@pytest.mark.parametrize("kernel", SIGNATURES)
def test_a_kernel_is_called_as_documented(kernel):
    for source in SOURCES.values():
        node = next((n for n in ast.parse(source).body if kernel in names_of(n)), None)
        assert node is None or ast.unparse(node.args).replace(" = ", "=") == SIGNATURES[kernel]


# ---- flags -----------------------------------------------------------------------------------------------------------
@functools.cache
def fields(source):
    """Field of Args -> (type, docstring or None)."""
    body = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "Args").body
    found = {}
    for node, after in zip(body, [*body[1:], None]):
        if isinstance(node, ast.AnnAssign):
            said = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
            found[node.target.id] = ast.unparse(node.annotation), after.value.value if said else None
    return found


def attributes_read(source):
    """Attributes of args (of self, in a property of Args) that are read, and those that a loop with getattr(args, ...) gets by name."""
    tree, read = ast.parse(source), set()
    inside = {id(leaf) for node in tree.body if getattr(node, "name", "") == "Args" for leaf in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = ast.unparse(node.value)
            if owner in ("args", "self.args") or (owner == "self" and id(node) in inside):
                read.add(node.attr)
        if isinstance(node, ast.For) and "getattr(args" in ast.unparse(node):
            read |= {leaf.value for leaf in ast.walk(node.iter) if isinstance(leaf, ast.Constant)}
    return read


@every_script
def test_every_flag_is_read(name):
    """Trick 36."""
    dead = set(fields(SOURCES[name])) - attributes_read(SOURCES[name])
    assert not dead, f"parsed and never used: {sorted(dead)}"


def test_a_flag_that_nobody_reads_is_found():
    source = "class Args:\n    a: int = 1\n    'x'\n    b: int = 2\n    c: int = 3\n    'y'\ndef f(args): return args.a + g.b"
    assert set(fields(source)) - attributes_read(source) == {"b", "c"} and fields(source)["b"] == ("int", None)


@every_script
def test_every_flag_is_explained(name, scripts):
    told = fields(SOURCES[name])
    assert set(told) == {field.name for field in dataclasses.fields(scripts[name].Args)}
    assert not [field for field, (_, text) in told.items() if not text]


# Why a shared flag does not read the same everywhere. (field, script) -> the reason.
FLAGS_OF_THEIR_OWN = {
    ("model_name_or_path", "reward_model"): "a classifier: a model without a head gets a new one",
    ("model_name_or_path", "ppo_sentiment"): "it is the policy and the reference",
    ("from_config", "reward_model"): "the example is a classifier's",
    ("lora_r", "ppo_sentiment"): "it also says what becomes of the reference",
    ("gradient_checkpointing", "ppo_sentiment"): "generation is not affected",
    ("dataset_name", "reward_model"): "other columns",
    ("dataset_name", "ppo_sentiment"): "other columns",
    ("max_length", "reward_model"): "a text is cut, and no row is filled",
    ("per_device_train_batch_size", "reward_model"): "texts instead of rows",
    ("per_device_train_batch_size", "ppo_sentiment"): "responses instead of rows",
    ("gradient_accumulation_steps", "ppo_sentiment"): "the batch has minibatches too",
    ("learning_rate", "reward_model"): "another source of the value",
    ("learning_rate", "ppo_sentiment"): "another source of the value",
    ("num_eval_rows", "reward_model"): "scored, not in a before / after table",
    ("model_name_or_path", "rloo_tldr"): "TRL's: sft_model_path may be another policy",
    ("reward_model_path", "rloo_tldr"): "preferences instead of a sentiment",
    ("share_prompts", "rloo_tldr"): "it moves responses to other minibatches; pairs are in one anyway",
    ("gradient_checkpointing", "rloo_tldr"): "generation is not affected",
    ("lora_r", "rloo_tldr"): "it also says what becomes of the reference",
    ("dataset_name", "rloo_tldr"): "other columns",
    ("stop_token", "rloo_tldr"): "no room is drawn",
    ("total_episodes", "rloo_tldr"): "several responses to a prompt",
    ("per_device_train_batch_size", "rloo_tldr"): "responses instead of rows",
    ("gradient_accumulation_steps", "rloo_tldr"): "the batch has minibatches too",
    ("kl_coef", "rloo_tldr"): "it does not adapt",
    ("kl_estimator", "rloo_tldr"): "the KL can be in the loss",
    ("whiten_rewards", "rloo_tldr"): "one reward a response",
    ("learning_rate", "rloo_tldr"): "another source of the value",
    ("model_name_or_path", "ppo_dialog"): "it is the policy and the reference",
    ("reward_model_path", "ppo_dialog"): "an intent instead of a sentiment",
    ("reward_fn", "ppo_dialog"): "one part of several",
    ("gradient_checkpointing", "ppo_dialog"): "generation is not affected",
    ("lora_r", "ppo_dialog"): "it also says what becomes of the reference",
    ("dataset_name", "ppo_dialog"): "other columns",
    ("max_prompt_length", "rloo_tldr"): "a post is left out, of a dialogue the oldest utterances are",
    ("total_episodes", "ppo_dialog"): "another length",
    ("per_device_train_batch_size", "ppo_dialog"): "responses instead of rows",
    ("gradient_accumulation_steps", "ppo_dialog"): "the batch has minibatches too",
    ("learning_rate", "ppo_dialog"): "another source of the value",
}
TYPES_OF_THEIR_OWN = {("reward_model_path", "ppo_dialog"): "the reward can do without the intent"}


def test_shared_flags_have_one_meaning():
    """Type and docstring of a flag are the first script's that has it."""
    first, different = {}, []
    for script in SCRIPTS:
        for field, (kind, text) in fields(SOURCES[script]).items():
            owner = first.setdefault(field, (script, kind, text))
            another = kind != owner[1] and (field, script) not in TYPES_OF_THEIR_OWN
            if another or (text != owner[2] and (field, script) not in FLAGS_OF_THEIR_OWN):
                different.append(f"{field}: {owner[0]} says {owner[1:]}, {script} says {(kind, text)}")
    assert not different, "\n".join(different)


def test_exceptions_of_shared_flags_are_needed():
    for field, script in FLAGS_OF_THEIR_OWN:
        if script in SCRIPTS:
            texts = {fields(SOURCES[other])[field][1] for other in SCRIPTS if field in fields(SOURCES[other])}
            assert len(texts) > 1, f"{field} of {script} reads as the others do: no exception needed"


@every_script
def test_recipes_are_args_and_default_to_tiny(name, scripts):
    assert next(iter(scripts[name].RECIPES)) == "tiny"
    assert all(isinstance(recipe, scripts[name].Args) for recipe in scripts[name].RECIPES.values())
    assert scripts[name].RECIPES["tiny"].dtype == "float32"  # so that results do not depend on the CPU


# ---- layout ----------------------------------------------------------------------------------------------------------
@every_script
def test_banners(name):
    """The same ten, in the same order, all of one width; the docstring is number 1."""
    lines = [line for line in SOURCES[name].splitlines() if re.match(r"# -{2,}", line)]
    found = [re.fullmatch(r"# ---- (\d+\. .+?) -+", line) for line in lines]
    assert all(found), [line for line, match in zip(lines, found) if not match]
    assert [match[1] for match in found] == [banner for banner in BANNERS if banner not in WITHOUT.get(name, ())]
    assert {len(line) for line in lines} == {120}
    assert ast.get_docstring(ast.parse(SOURCES[name])) and SOURCES[name].startswith('"""')


@every_script
def test_a_script_ends_with_its_guard(name):
    assert SOURCES[name].endswith('\nif __name__ == "__main__":\n    main()\n')


@every_script
def test_a_script_has_no_common_module(name):
    """No script imports another, or anything of ours."""
    imported = set()
    for node in ast.walk(ast.parse(SOURCES[name])):
        imported |= {alias.name.split(".")[0] for alias in node.names} if isinstance(node, ast.Import) else set()
        imported |= {(node.module or "").split(".")[0]} if isinstance(node, ast.ImportFrom) else set()
    ours = {path.stem for path in ROOT.glob("*.py")} | {path.name for path in ROOT.iterdir() if path.is_dir()}
    assert not imported & ours - {""}


@every_script
def test_a_script_is_short(name):
    count = len(SOURCES[name].splitlines())
    assert count <= LINES[name]


MODULES = "import sys; print(*sorted({name.split('.')[0] for name in sys.modules}))"
BARE = "import transformers, accelerate, datasets, tyro, rich, safetensors"
AUTOS = "from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer"


def run_python(*arguments, **kwargs):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True, **kwargs)


@pytest.fixture(scope="module")
def bare():
    """What the libraries load, and say, by themselves."""
    done = run_python("-c", f"{BARE}\n{AUTOS}\n{MODULES}")
    return set(done.stdout.split()), done.stderr


@every_script
def test_an_import_has_no_side_effects(name, bare, tmp_path):
    """Nothing printed, nothing written, and none of the optional parts loaded that the libraries do not load by themselves."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {name}; print('imported')\n{MODULES}"
    done = run_python("-B", "-c", code, cwd=tmp_path)
    first, modules = done.stdout.splitlines()
    assert first == "imported" and done.stderr == bare[1] and not list(tmp_path.iterdir())
    optional = {"wandb", "peft", "matplotlib", "bitsandbytes", "tensorboard", "deepspeed", "trl", "evaluate"}
    optional |= {"nltk", "sacrebleu", "rouge_score"}
    assert not optional & (set(modules.split()) - bare[0])


# ---- data and checkpoints --------------------------------------------------------------------------------------------
def size_of(folder):
    """Bytes of what git would hold: no bytecode."""
    return sum(path.stat().st_size for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def test_data_and_checkpoints_stay_small():
    assert 0 < size_of("data") <= 4 * 2**20
    assert 0 < size_of("checkpoints") <= 12 * 2**20
    assert not [path for kind in ("*.bin", "*.pt", "*.pkl") for path in (ROOT / "checkpoints").rglob(kind)]


def test_reviews_are_made_again_byte_for_byte(tmp_path):
    run_python(str(ROOT / "data/make_reviews.py"), "--folder", str(tmp_path))
    made = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.iterdir()}
    kept = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (ROOT / "data/reviews").glob("*.jsonl")}
    assert made == kept and set(kept) == {"train.jsonl", "test.jsonl"}


def test_reviews_are_balanced_and_the_splits_apart():
    splits = {split: [json.loads(line) for line in open(ROOT / f"data/reviews/{split}.jsonl")] for split in ("train", "test")}
    for rows in splits.values():
        assert all(set(row) == {"text", "label"} and row["text"].strip() for row in rows)
        assert collections.Counter(row["label"] for row in rows) == {0: len(rows) // 2, 1: len(rows) // 2}
    texts = {split: {row["text"] for row in rows} for split, rows in splits.items()}
    assert not texts["train"] & texts["test"]
    assert len(texts["train"]) == len(splits["train"]) and len(texts["test"]) == len(splits["test"])


@pytest.mark.parametrize("sharded", ["NO", "FSDP"])
@pytest.mark.parametrize("recomputed", [False, True])
def test_the_memory_of_a_run_by_hand(scripts, sharded, recomputed):
    """10 weights of which 6 are trained, 3 layers of 8 numbers, passes of 4 rows x 5 tokens, a cache of 7 rows; in bytes, 2 processes."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    model[1].requires_grad_(False)
    learner = torch.nn.Sequential(model[0]) if sharded == "FSDP" else model
    config = types.SimpleNamespace(hidden_size=8, num_hidden_layers=3)
    accelerator = types.SimpleNamespace(device=torch.device("cpu"), distributed_type=sharded, num_processes=2)
    args = types.SimpleNamespace(gradient_checkpointing=recomputed, per_device_train_batch_size=4)
    n = 2 if sharded == "FSDP" else 1
    vector = 5 * 8 * 4  # of a row's tokens in one layer
    parts = dict(weights=40, optimizer=48 // n, shards=12 * (n - 1), gradients=24 // n, activations=4 * vector * (20 if recomputed else 51))
    parts["cache"] = 2 * 3 * vector * 7
    for module in scripts.values():
        shown = module.describe_memory(model, learner, config, args, 5 * 10**6, 7, accelerator)  # so many tokens that GiB show
        scaled = {name: size * (10**6 if name in ("activations", "cache") else 1) for name, size in parts.items()}
        total = sum(scaled.values()) - min(scaled["gradients"] + scaled["activations"], scaled["cache"])
        listed = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in scaled.items() if size)
        assert shown.startswith(f"6 trainable parameters; memory about {total / 2**30:.2f} GiB ({listed}), ")
        assert ("MORE THAN THERE IS" in shown) == (total - 40 > psutil.virtual_memory().available)
