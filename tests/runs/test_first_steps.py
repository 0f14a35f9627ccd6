"""What somebody meets who runs a script for the first time: a bare machine, a lone copy, models and data of
their own."""

import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import tokenizers
import torch
from accelerate import Accelerator
from run_tools import ALL, ROOT, evaluation_of, reward_file, rows_of, spy, without_check_of_models, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest_plugins = ["run_fixtures"]


# ---- The machine -------------------------------------------------------------------------------------------


def test_a_script_alone(tmp_path):
    """A copy without the folder checkpoints/ names what is missing, in one line."""
    shutil.copy(ROOT / "ppo_sentiment.py", tmp_path)
    command = [sys.executable, "ppo_sentiment.py"]
    end = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert end.returncode == 2
    assert end.stderr == "ppo_sentiment.py: checkpoints/reviews-lm: no such file or folder\n"


# ---- Flags -------------------------------------------------------------------------------------------------

MODEL_FLAGS = [
    ("ppo_sentiment", "model_name_or_path"),
    ("rloo_tldr", "sft_model_path"),
    ("sft", "from_config"),
]


@pytest.mark.parametrize("name, field", MODEL_FLAGS)
def test_a_named_model_means_the_published_defaults(scripts, name, field):
    """A model but no recipe: custom. Flags may be spelled with - or _, and with a space or =."""
    script = scripts[name]
    expected = replace(script.Args(), **{field: "gpt2"})
    for flag in (f"--{field}", f"--{field.replace('_', '-')}"):
        for words in ([flag, "gpt2"], [f"{flag}=gpt2"], ["--seed", "1", flag, "gpt2"]):
            assert script.parse_args(words) == expected
    assert expected.recipe == "custom"
    tiny = replace(script.RECIPES["tiny"], recipe="tiny")
    assert script.parse_args([f"--{field}", "gpt2"]) != replace(tiny, **{field: "gpt2"})
    assert script.parse_args(["tiny", f"--{field}", "gpt2"]) == replace(tiny, **{field: "gpt2"})
    assert script.parse_args([]) == tiny


# ---- BOS ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def bos_lm(tiny_lm, tmp_path_factory):
    """tiny_lm with a tokenizer that puts BOS in front of each text, as Llama's does."""
    folder = tmp_path_factory.mktemp("bos")
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm())
    tokenizer.add_special_tokens({"bos_token": "<s>"})  # an id of its own, beyond the ids of the data
    model = AutoModelForCausalLM.from_pretrained(tiny_lm())
    model.resize_token_embeddings(len(tokenizer))
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def bos_tokenizer(bos_lm):
    tokenizer = AutoTokenizer.from_pretrained(bos_lm)
    assert tokenizer("The film").input_ids[0] == tokenizer.bos_token_id  # the fixture works
    return tokenizer


@pytest.mark.parametrize(
    "name, limit, flags",
    [
        ("ppo_sentiment", 5, dict(query_max_length=5)),
        ("ppo_dialog", 20, dict(max_prompt_length=20)),
        ("rloo_tldr", 200, dict(reward_model_path=None)),
        ("grpo_math", 64, dict(system_prompt="Be brief.")),
    ],
)
def test_bos_in_prompts(scripts, small, bos_lm, bos_tokenizer, monkeypatch, tmp_path, name, limit, flags):
    """Each prompt begins with BOS and has no other, and its limit counts BOS. Rewards read no BOS."""
    names = dict(ppo_sentiment="generate", ppo_dialog="generate_until")
    calls = spy(monkeypatch, scripts[name], names.get(name, "generate_groups"))
    without_check_of_models(monkeypatch, scripts[name])
    if name != "ppo_dialog":  # it takes no reward function
        body = "assert not any('<s>' in text for text in prompts + completions)\nreturn [0.0] * len(prompts)"
        [reward] = reward_file(tmp_path, body)
        flags["reward_fn"] = [reward]
    scripts[name].train(small(name, model_name_or_path=bos_lm, **flags))
    for (_, ids, mask, *_), _ in calls:
        for row in (row[m] for row, m in zip(ids, mask.bool(), strict=True)):
            assert (row == bos_tokenizer.bos_token_id).tolist() == [True] + [False] * (len(row) - 1)
            assert 1 < len(row) <= limit
    assert calls


def test_bos_in_a_rollout_that_a_reward_model_scores(scripts, rloo, bos_lm):
    """The reward model's own tokenizer puts its own BOS there."""
    rloo(model_name_or_path=bos_lm)
    tokenizer = AutoTokenizer.from_pretrained(bos_lm)
    [ids] = scripts["rloo_tldr"].preference_ids(tokenizer, "The film", [" was good"], 99)
    assert tokenizer.decode(ids) == "<s>The film was good<|endoftext|>"


def texts_of_lengths(split, count):
    """Rows with the columns text and label. The texts have different lengths."""
    return [dict(text=f"{split} {i}" + " sun" * (3 * i % 7), label=int(i % 3 == 1)) for i in range(count)]


def assert_saved_as(lm, folder):
    """model/ has the tokenizer of lm, with its special tokens."""
    before, after = (AutoTokenizer.from_pretrained(name) for name in (lm, folder))
    for text in ("The film", "<s>The film", ""):
        assert before(text).input_ids == after(text).input_ids
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    assert [getattr(before, name) for name in names] == [getattr(after, name) for name in names]
    return after


@pytest.mark.parametrize("kind", ["texts", "completions"])
def test_bos_in_an_evaluation_of_sft(sft, bos_lm, bos_tokenizer, tmp_path, kind):
    """The loss before and after, of model/ too, by plain transformers. BOS is read, but never predicted."""
    rows = {split: texts_of_lengths(split, 8) for split in ("train", "test")}
    if kind == "completions":
        for row in rows["train"] + rows["test"]:
            row["prompt"], row["completion"] = row.pop("text"), " fine" * (1 + row["label"])
    data = write_rows(tmp_path / "data", **rows)
    _, folder, _ = sft(
        model_name_or_path=bos_lm, dataset_name=data, num_train_rows=None, num_eval_prompts=8, num_samples=8
    )
    tokenizer = assert_saved_as(bos_lm, folder / "model")
    evaluation = evaluation_of(folder)
    prompts = []
    for part, lm in (("before", bos_lm), ("after", folder / "model")):
        model = AutoModelForCausalLM.from_pretrained(lm).eval()
        assert model.generation_config.eos_token_id == [tokenizer.eos_token_id] or part == "before"
        losses = []
        for row in rows["test"]:
            if kind == "texts":
                ids, unlabeled = tokenizer(row["text"]).input_ids + [tokenizer.eos_token_id], 1
                prompts.append(tokenizer.decode(ids[:8] if len(ids) > 8 else ids[:-1]))
            else:
                prompt = tokenizer(row["prompt"]).input_ids
                completion = tokenizer(row["completion"]).input_ids[1:]  # without BOS
                ids, unlabeled = prompt + completion + [tokenizer.eos_token_id], len(prompt)
                prompts.append("<s>" + row["prompt"])
            with torch.no_grad():
                log_p = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            losses += (-log_p.gather(1, torch.tensor(ids[1:])[:, None]))[unlabeled - 1 :].flatten().tolist()
        assert evaluation[part]["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    samples = rows_of(folder, "samples.jsonl")
    assert sorted(row["prompt"] for row in samples) == sorted(set(prompts)) and len(samples) == 8


# ---- Trackers ----------------------------------------------------------------------------------------------


def test_tensorboard(ppo):
    """The metrics are under train/, the final numbers under eval/."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, folder, rows = ppo(log_with="tensorboard", total_episodes=16, num_sample_generations=2)
    files = [EventAccumulator(str(path)).Reload() for path in folder.rglob("events.out.tfevents.*")]
    tags = {tag for file in files for tag in file.Tags()["scalars"]}
    after = evaluation_of(folder)["after"]
    assert {f"eval/{name}" for name in after} <= tags
    [points] = [
        file.Scalars("train/objective/kl") for file in files if "train/objective/kl" in file.Tags()["scalars"]
    ]
    assert [point.value for point in points] == pytest.approx([row["objective/kl"] for row in rows], rel=1e-5)


def test_wandb_names_the_run(ppo, monkeypatch, tmp_path):
    """WANDB_MODE=offline leaves a folder. A run has the name of its folder. The final numbers are logged."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    logged, names = {}, []
    log, init = wandb.Run.log, wandb.init

    def recorded_log(self, data, *args, **kwargs):
        logged.update(data)
        return log(self, data, *args, **kwargs)

    def recorded_init(**kwargs):
        names.append(kwargs["name"])
        return init(**kwargs)

    monkeypatch.setattr(wandb.Run, "log", recorded_log)
    monkeypatch.setattr(wandb, "init", recorded_init)
    ppo("a-name", log_with="wandb", total_episodes=16)
    assert list(tmp_path.rglob("offline-run-*/*.wandb"))
    assert names == ["a-name"]
    assert "eval/score mean" in logged


# ---- A gradient that is not finite -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_a_gradient_that_is_not_finite_ends_the_run(scripts, small, monkeypatch, tmp_path, name):
    """Nothing is saved."""
    script = scripts[name]
    clip = Accelerator.clip_grad_norm_

    def broken(self, parameters, *rest):
        parameters = list(parameters)
        next(p for p in parameters if p.grad is not None).grad.view(-1)[0] = torch.nan
        return clip(self, parameters, *rest)

    monkeypatch.setattr(Accelerator, "clip_grad_norm_", broken)
    with pytest.raises(script.UserError, match="not finite: .*grad_norm.*--learning-rate"):
        script.train(small(name))
    assert not list((tmp_path / "run/checkpoints").iterdir()) and not (tmp_path / "run/model").exists()


# ---- Long texts --------------------------------------------------------------------------------------------


def test_a_long_text_loses_its_beginning(scripts, tiny_classifier, tmp_path):
    """The classifier reads the end of a text that is too long: the response is there."""
    folder = tmp_path / "classifier"
    shutil.copytree(tiny_classifier(), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.model_max_length = 5
    tokenizer.save_pretrained(folder)
    script = scripts["ppo_sentiment"]
    classify, _ = script.load_classifier(script.Args(), str(folder), torch.device("cpu"))
    end = " superb and clever and warm in every way"
    same_end = classify(["The film is bad" + end, "What a day it was" + end])
    assert torch.allclose(same_end[0], same_end[1], atol=1e-6)
    other_end = classify(["The film is bad" + end, "The film is bad" + end + " but I was bored"])
    assert not torch.allclose(other_end[0], other_end[1], atol=1e-4)
