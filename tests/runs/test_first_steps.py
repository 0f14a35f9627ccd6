"""What somebody meets who runs a script with models, data and trackers of their own."""

from dataclasses import replace

import pytest
from run_tools import ALL, evaluation_of, rows_of
from transformers import AutoTokenizer

pytest_plugins = ["run_fixtures"]


@pytest.mark.parametrize(
    "name, field",
    [("ppo_sentiment", "model_name_or_path"), ("rloo_tldr", "sft_model_path"), ("sft", "from_config")],
)
def test_a_named_model_means_the_published_defaults(scripts, name, field):
    """A model but no recipe: custom. Flags may be spelled with - or _, and with a space or =."""
    script = scripts[name]
    expected = replace(script.Args(), **{field: "gpt2"})
    for flag in (f"--{field}", f"--{field.replace('_', '-')}"):
        for words in ([flag, "gpt2"], [f"{flag}=gpt2"], ["--seed", "1", flag, "gpt2"]):
            assert script.parse_args(words) == expected
    assert expected.recipe == "custom"
    tiny = replace(script.RECIPES["tiny"], recipe="tiny")
    assert script.parse_args(["tiny", f"--{field}", "gpt2"]) == replace(tiny, **{field: "gpt2"})
    assert script.parse_args([]) == tiny


OF_ITS_DATA = {  # recipe -> its flags that say something of its own data or random weights
    ("sft", "tiny-tldr"): {"from_config"},
    ("reward_model", "tiny"): {"label_names"},
    ("reward_model", "tiny-tldr"): {"center_dataset_name"},
    ("rloo_tldr", "tiny"): {"judge_fn"},
    ("dpo_tldr", "tiny"): {"judge_fn", "eval_dataset_name"},
    ("grpo_math", "tiny"): {"hard_dataset_name", "prompt_template"},
    ("grpo_math", "countdown-qwen-1.5b"): {"reward_fn", "prompt_template", "system_prompt"},
    ("grpo_tools", "tiny"): {"tools", "reward_fn", "prompt_template"},
    ("grpo_tools", "guess"): {"environment", "prompt_template"},
}


@pytest.mark.parametrize("name, recipe", OF_ITS_DATA)
def test_what_a_recipe_says_of_its_data_does_not_outlive_it(scripts, name, recipe):
    """With other data (or, for random weights, another model), they have the defaults of Args. Flags that are
    given stay. That holds for the recipe's own data, too, if the command line names it."""
    script = scripts[name]
    fields = OF_ITS_DATA[name, recipe]
    other = "--model-name-or-path" if name == "sft" else "--dataset-name"
    args = script.parse_args([recipe, other, "mine"])
    whole = replace(script.RECIPES[recipe], recipe=recipe)
    changed = {field: getattr(script.Args(), field) for field in fields}
    changed[other.removeprefix("--").replace("-", "_")] = "mine"
    assert args == replace(whole, **changed)
    if other == "--dataset-name":
        mentioned = [str(x) for key, x in vars(args).items() if not key.endswith("path")]
        assert not [x for x in mentioned if x.startswith("data/")]
        same_data = script.parse_args([recipe, other, whole.dataset_name])
        assert same_data == replace(args, dataset_name=whole.dataset_name)

    assert script.parse_args([recipe]) == whole
    field = min(fields)
    own = script.parse_args([recipe, other, "mine", f"--{field.replace('_', '-')}", "own"])
    assert getattr(own, field) == (["own"] if field == "reward_fn" else "own")


def test_an_environment_with_its_own_data_has_its_own_reward(scripts):
    """The calculator and its reward function belong to other data, and None means None."""
    own = ["--environment", "mine.py:Game", "--dataset-name", "mine"]
    for words in (own, ["guess", *own], [*own, "--reward-fn", "None"]):
        args = scripts["grpo_tools"].parse_args(words)
        assert (args.environment, args.tools, args.reward_fn) == ("mine.py:Game", None, None)


def test_a_run_folder_means_its_model(sft, ppo):
    """RUN is taken as RUN/model, which the next script needs."""
    _, folder, _ = sft("first", num_samples=0)
    assert not (folder / "config.json").exists()
    _, second, rows = ppo("second", model_name_or_path=str(folder))
    _, third, same_rows = ppo("third", model_name_or_path=str(folder / "model"))
    assert rows[0]["objective/scores"] == same_rows[0]["objective/scores"]


@pytest.mark.parametrize("name", [name for name in ALL if name != "grpo_tools"])  # needs a chat template
def test_a_model_with_linear_attention(scripts, small, world, tiny_lm, name):
    """Qwen3.5 in a whole run. Sampling drops rows of its states, which several responses cannot share."""
    flags = dict(model_name_or_path=tiny_lm("qwen3_5_text"))
    if name == "sft":
        flags["packing"] = False  # otherwise it is refused: states go on in the next document
    if name == "reward_model":
        flags |= dict(dataset_name=world.pairs, max_length=200)
    _, folder = scripts[name].train(small(name, **flags))
    rows = rows_of(folder)
    assert any(row["grad_norm"] > 0 for row in rows)
    assert all(row.get("sampling/logprob_gap_max", 0) < 1e-3 for row in rows)


def test_bos_in_documents_of_sft(scripts, bang_lm):
    """The model reads it once, at the beginning."""
    sft, tokenizer = scripts["sft"], AutoTokenizer.from_pretrained(bang_lm(bos=True))
    bos, *film = tokenizer("The film").input_ids
    good = tokenizer(" good", add_special_tokens=False).input_ids
    eos = tokenizer.eos_token_id
    assert bos == tokenizer.bos_token_id
    document, labels = sft.make_document(dict(text="The film"), tokenizer, sft.Args(), {})
    assert document == labels == [bos, *film, eos]
    row = dict(prompt="The film", completion=" good")
    document, labels = sft.make_document(row, tokenizer, sft.Args(), {})
    assert document == [bos, *film, *good, eos]
    assert labels == [-100] * (1 + len(film)) + [*good, eos]


def test_tensorboard(ppo):
    """The metrics are under train/, the numbers of evaluations under eval/."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, folder, rows = ppo(log_with="tensorboard", total_episodes=16, num_sample_generations=2, eval_every=1)
    files = [EventAccumulator(str(path)).Reload() for path in folder.rglob("events.out.tfevents.*")]
    tags = {tag for file in files for tag in file.Tags()["scalars"]}
    after = evaluation_of(folder)["after"]
    assert {f"eval/{name}" for name in after} <= tags
    assert not any(tag.startswith("train/eval/") for tag in tags)
    [points] = [
        file.Scalars("train/objective/kl") for file in files if "train/objective/kl" in file.Tags()["scalars"]
    ]
    assert [point.value for point in points] == pytest.approx([row["objective/kl"] for row in rows], rel=1e-5)


def test_wandb_names_the_run(ppo, monkeypatch, tmp_path):
    """WANDB_MODE=offline leaves a folder. A run has the name of its folder."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    names, init = [], wandb.init

    def recorded_init(**kwargs):
        names.append(kwargs["name"])
        return init(**kwargs)

    monkeypatch.setattr(wandb, "init", recorded_init)
    ppo("a-name", log_with="wandb", total_episodes=16)
    assert list(tmp_path.rglob("offline-run-*/*.wandb"))
    assert names == ["a-name"]
