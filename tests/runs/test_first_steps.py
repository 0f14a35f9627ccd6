"""What somebody meets who runs a script for the first time: a bare machine, a lone copy, models and data of
their own."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
import torch
from rich.console import Console
from run_tools import ALL, ROOT, maker, one_line, reward_file, rows_of, spy, write_rows
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

pytest_plugins = ["run_fixtures"]


# ---- The machine -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_without_git(scripts, small, monkeypatch, tmp_path, name):
    """A run works on a machine without git. args.json then has no commit."""
    monkeypatch.setenv("PATH", str(tmp_path))
    _, folder = scripts[name].train(small(name))
    assert json.loads((Path(folder) / "args.json").read_text())["commit"] == ""


def test_the_commit_is_that_of_the_script(scripts):
    """With git, and in a repository, it is what git says of the script's folder."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    for module in scripts.values():
        assert module.git_commit() == git.stdout.strip()


def test_a_script_alone(tmp_path):
    """A copy without checkpoints/ beside it says in one line that the folder is missing."""
    shutil.copy(ROOT / "ppo_sentiment.py", tmp_path)
    command = [sys.executable, "ppo_sentiment.py"]
    end = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert end.returncode == 2
    lines = end.stderr.splitlines()
    assert len(lines) == 1
    assert "'checkpoints/reviews-lm'" in lines[0]
    assert "need checkpoints/ from the repository next to the script" in lines[0]


def test_a_wrong_folder_is_not_a_missing_data(scripts, tmp_path, monkeypatch, capsys):
    """With data/ in place, a wrong name in it is reported as the loader reports it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    line = one_line(scripts["sft"], ["--dataset-name", "data/my_revews"], capsys)
    assert "cannot load the data set 'data/my_revews'" in line
    assert "beside the script" not in line


def test_resume_latest_without_runs(scripts, tmp_path, monkeypatch, capsys):
    """`latest` looks in runs/<script> only, and says so."""
    monkeypatch.chdir(tmp_path)
    line = one_line(scripts["sft"], ["--resume", "latest"], capsys)
    assert "there is no run in runs/sft; name the --output-dir of your run" in line


# ---- What is printed ---------------------------------------------------------------------------------------


def test_flags_that_differ_from_the_recipe(scripts):
    """Each one, with the value of the recipe; not where the run is saved."""
    script = scripts["ppo_sentiment"]
    args = script.parse_args(["--seed", "7", "--learning-rate", "2e-5", "--output-dir", "here"])
    usual = script.RECIPES["tiny"].learning_rate
    assert (
        script.flags_that_differ(args, script.RECIPES["tiny"])
        == f"--seed 7 (1), --learning-rate 2e-05 ({usual})"
    )
    assert script.flags_that_differ(script.RECIPES["tiny"], script.RECIPES["tiny"]) == ""


def test_a_named_model_changes_other_defaults_and_says_so(scripts, small, capsys):
    """Without a recipe, the first lines name what differs from the recipe tiny."""
    scripts["rloo_tldr"].train(small("rloo_tldr", temperature=0.7))
    out = capsys.readouterr().out
    assert "recipe custom" in out
    assert "--rloo-k 2 (4)" in out
    assert "--temperature 0.7 (1.0)" in out


def test_a_recipe_without_changes_says_none(scripts, small, capsys):
    """A run with a recipe prints the flags that were changed."""
    script = scripts["sft"]
    args = small("sft")
    script.RECIPES["test"] = replace(args, recipe="custom", output_dir=None)
    try:
        script.train(replace(args, recipe="test"))
    finally:
        del script.RECIPES["test"]
    assert "flags that differ from the recipe: none" in capsys.readouterr().out


def test_a_warning_is_shown_once(ppo, capsys, tmp_path):
    """All rewards are equal in both updates: one line."""
    constant = reward_file(tmp_path, "return [1.0] * len(prompts)")
    ppo(reward_fn=constant, total_episodes=16)
    assert capsys.readouterr().out.count("all rewards are equal") == 1


# ---- Flags -------------------------------------------------------------------------------------------------

MODEL_FLAGS = [(name, "model_name_or_path") for name in ALL]
MODEL_FLAGS += [("rloo_tldr", "sft_model_path"), ("sft", "from_config"), ("reward_model", "from_config")]


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


# ---- Models of others --------------------------------------------------------------------------------------


def as_bin(folder, copy):
    """A copy of a model folder whose weights are pytorch_model.bin. -> its path, a str"""
    shutil.copytree(folder, copy)
    torch.save(load_file(copy / "model.safetensors"), copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()
    return str(copy)


def test_weights_in_pytorch_model_bin(scripts, ppo, world, tmp_path):
    """Folders without safetensors load as policy, reward and critic, with the same result."""
    flags = dict(learning_rate=0.0, num_sample_generations=0)
    _, _, expected = ppo("safetensors", value_model_path=world.lm(), **flags)
    lm = as_bin(world.lm(), tmp_path / "lm")
    classifier = as_bin(world.classifier(), tmp_path / "classifier")
    changes = dict(model_name_or_path=lm, value_model_path=lm, reward_model_path=classifier)
    _, _, rows = ppo("bin", **changes, **flags)
    for name in ("objective/scores", "objective/entropy", "objective/kl"):
        assert rows[0][name] == expected[0][name]


def test_a_bin_file_runs_no_code(scripts, world, tmp_path, capsys):
    """pytorch_model.bin is read with weights_only, so a pickled call is refused."""
    lm = Path(as_bin(world.lm(), tmp_path / "lm"))

    class Bad:
        def __reduce__(self):
            return Path.touch, (tmp_path / "was-here",)

    torch.save({"transformer.wte.weight": Bad()}, lm / "pytorch_model.bin")
    with pytest.raises(scripts["sft"].UserError, match="cannot load the model"):
        scripts["sft"].load_model(AutoModelForCausalLM, str(lm))
    assert not (tmp_path / "was-here").exists()


# ---- BOS ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def bos_lm(tiny_lm, tmp_path_factory):
    """tiny_lm with a tokenizer that puts BOS in front and EOS behind each text, as some tokenizers do."""
    folder = tmp_path_factory.mktemp("bos")
    shutil.copytree(tiny_lm(), folder, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.bos_token = "<s>"  # an id of its own, beyond the ids of the data
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    model.resize_token_embeddings(len(tokenizer))
    bos, eos = (tokenizer.bos_token, tokenizer.bos_token_id), (tokenizer.eos_token, tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{bos[0]} $A {eos[0]}", special_tokens=[bos, eos]
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def bos_tokenizer(bos_lm):
    tokenizer = AutoTokenizer.from_pretrained(bos_lm)
    ids = tokenizer("The film").input_ids
    assert ids[0] == tokenizer.bos_token_id and ids[-1] == tokenizer.eos_token_id  # the fixture works
    return tokenizer


@pytest.mark.parametrize("name", ["sft", "reward_model", "ppo_sentiment", "rloo_tldr"])
def test_bos_comes_first_and_once(scripts, bos_tokenizer, tiny_lm, name):
    """As the tokenizer does it; not again if a text brings its own; nothing at the end."""
    tokenize = scripts[name].tokenize
    bos = bos_tokenizer.bos_token_id
    plain = bos_tokenizer("The film", add_special_tokens=False).input_ids
    assert tokenize(bos_tokenizer, ["The film", "<s>The film", ""]) == [[bos, *plain], [bos, *plain], [bos]]
    assert tokenize(bos_tokenizer, []) == []
    without = AutoTokenizer.from_pretrained(tiny_lm())  # its BOS is EOS, and no text begins with it
    assert tokenize(without, ["The film"]) == [without("The film").input_ids]


def first_real_tokens(prompt_batch):
    """The first token of each left-padded prompt, and how many tokens it has."""
    ids, mask = prompt_batch["ids"], prompt_batch["mask"]
    return [row[m][0].item() for row, m in zip(ids, mask)], mask.sum(1).tolist()


def test_bos_in_ppo_sentiment(scripts, ppo, bos_lm, bos_tokenizer, monkeypatch, tmp_path):
    """Each prompt begins with BOS, and is no longer than the flag says. The reward reads no BOS."""
    calls = spy(monkeypatch, scripts["ppo_sentiment"], "rollout")
    body = """assert not any('<s>' in text for text in prompts + completions)
return [float(len(prompt)) for prompt in prompts]"""
    ppo(model_name_or_path=bos_lm, reward_fn=reward_file(tmp_path, body), query_max_length=5)
    for (_, _, _, _, prompt_batch, _, _), (_, prompts, _) in calls:
        first, lengths = first_real_tokens(prompt_batch)
        assert set(first) == {bos_tokenizer.bos_token_id}
        assert max(lengths) <= 5
        assert all(prompts) and not any("<s>" in prompt for prompt in prompts)


def test_bos_in_rloo_tldr(scripts, rloo, bos_lm, bos_tokenizer, monkeypatch):
    """Each post begins with BOS. The reward model's own tokenizer puts its own BOS there."""
    script = scripts["rloo_tldr"]
    calls = spy(monkeypatch, script, "rollout_groups")
    rloo(model_name_or_path=bos_lm)
    for (_, _, _, posts, prompt_batch, _, _), (_, responses) in calls:
        assert set(first_real_tokens(prompt_batch)[0]) == {bos_tokenizer.bos_token_id}
        assert not any("<s>" in text for text in [post["prompt"] for post in posts] + responses)
    bos, eos = bos_tokenizer.bos_token_id, bos_tokenizer.eos_token_id
    ids = script.preference_ids(bos_tokenizer, ["The film"], [" was good"], 99)[0]
    assert (ids[0], ids[-1]) == (bos, eos)
    assert ids.count(bos) == ids.count(eos) == 1


def test_bos_in_grpo_math(scripts, grpo, bos_lm, bos_tokenizer, monkeypatch):
    """Each prompt begins with BOS, after which the system prompt comes. Reward functions read no BOS."""
    script = scripts["grpo_math"]
    calls = spy(monkeypatch, script, "rollout_tasks")
    grpo(model_name_or_path=bos_lm, system_prompt="Be brief.")
    for (_, _, _, tasks, prompt_batch, _, _), (_, responses) in calls:
        assert set(first_real_tokens(prompt_batch)[0]) == {bos_tokenizer.bos_token_id}
        assert not any("<s>" in text for text in [task["prompt"] for task in tasks] + responses)
        for task in tasks:
            assert task["ids"].count(bos_tokenizer.bos_token_id) == 1
            assert task["prompt"].startswith("Be brief.\n\n")


def test_bos_in_ppo_dialog(scripts, dialog, bos_lm, bos_tokenizer, monkeypatch):
    """Each prompt begins with BOS and then whole utterances; with BOS it is not too long."""
    calls = spy(monkeypatch, scripts["ppo_dialog"], "rollout_answers")
    dialog(model_name_or_path=bos_lm, max_prompt_length=20)
    for (_, _, _, turns, prompt_batch, _, _), _ in calls:
        first, lengths = first_real_tokens(prompt_batch)
        assert set(first) == {bos_tokenizer.bos_token_id}
        assert max(lengths) <= 20
        for turn in turns:
            assert turn.prompt_tokens.count(bos_tokenizer.bos_token_id) == 1


def test_bos_in_sft(scripts, bos_tokenizer, tmp_path):
    """Texts, prompts with completions, and dialogs begin with BOS. A completion has none of its own."""
    script, bos, eos = scripts["sft"], bos_tokenizer.bos_token_id, bos_tokenizer.eos_token_id
    kinds = {
        "texts": dict(text="The film"),
        "completions": dict(prompt="The film", completion=" was good"),
        "dialogs": dict(dialog=["Hello there.", "And you?"]),
    }
    for kind, row in kinds.items():
        rows = script.load_splits(write_rows(tmp_path / kind, train=[row] * 2, test=[row]))[0]
        documents = script.load_documents(rows, bos_tokenizer, script.Args(utterance_end=" <EOU>"))
        ids, labels = documents[0]
        assert ids.count(bos) == 1 and ids[0] == bos
        assert ids.count(eos) == 1 and ids[-1] == eos
        assert labels[-1] == eos


def texts_of_lengths(split, count):
    """Rows with the columns text and label. The texts have different lengths."""
    return [dict(text=f"{split} {i}" + " sun" * (3 * i % 7), label=int(i % 3 == 1)) for i in range(count)]


def assert_saved_as(lm, folder):
    """model/ has the tokenizer of lm, its BOS and EOS included, and ends at its EOS."""
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
        model_name_or_path=bos_lm, dataset_name=data, num_train_rows=None, num_eval_rows=8, num_samples=8
    )
    tokenizer = assert_saved_as(bos_lm, folder / "model")
    evaluation = json.loads((folder / "evaluation.json").read_text())
    prompts = []
    for part, lm in (("before", bos_lm), ("after", folder / "model")):
        model = AutoModelForCausalLM.from_pretrained(lm).eval()
        assert model.generation_config.eos_token_id == tokenizer.eos_token_id or part == "before"
        losses = []
        for row in rows["test"]:
            if kind == "texts":
                ids, unlabeled = tokenizer(row["text"]).input_ids, 1
                prompts.append(tokenizer.decode(ids[:8] if len(ids) > 8 else ids[:-1]))
            else:
                prompt = tokenizer(row["prompt"]).input_ids[:-1]  # without its EOS
                ids, unlabeled = prompt + tokenizer(row["completion"]).input_ids[1:], len(prompt)
                prompts.append("<s>" + row["prompt"])
            with torch.no_grad():
                log_p = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            losses += (-log_p.gather(1, torch.tensor(ids[1:])[:, None]))[unlabeled - 1 :].flatten().tolist()
        assert evaluation[part]["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    samples = rows_of(folder, "samples.jsonl")
    assert sorted(row["prompt"] for row in samples) == sorted(set(prompts)) and len(samples) == 8


def test_bos_in_a_classifier(scripts, reward, bos_lm, tmp_path, monkeypatch):
    """The outputs for held-out texts are those of model/ and its tokenizer, which cuts long texts alike."""
    rows = {split: texts_of_lengths(split, 12) for split in ("train", "test")}
    data = write_rows(tmp_path / "data", **rows)
    calls = spy(monkeypatch, scripts["reward_model"], "evaluate_labels")
    flags = dict(label_names="bad,good", max_length=14, num_eval_rows=12, num_train_epochs=3.0)
    _, folder, _ = reward(model_name_or_path=bos_lm, dataset_name=data, **flags)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model").eval()
    assert model.config.pad_token_id == tokenizer.pad_token_id
    model.config.pad_token_id = None  # one text has no pads
    expected, lengths = [], []
    for row in rows["test"]:
        lengths.append(len(tokenizer(row["text"]).input_ids))
        with torch.no_grad():
            logits = model(**tokenizer(row["text"], truncation=True, return_tensors="pt")).logits[0]
        expected.append([*logits.tolist(), row["label"]])
    assert min(lengths) < 14 < max(lengths)
    [((logits, loaded, _), _)] = calls
    ours = [[*x.tolist(), row.label] for x, row in zip(logits[:, 0], loaded, strict=True)]
    for one, other in zip(sorted(ours), sorted(expected), strict=True):
        assert one == pytest.approx(other, abs=1e-4)


def test_bos_in_preferences(reward, bos_lm, tmp_path):
    """BOS is read once, in front, unless a long text loses it. Margin and offset are those of model/."""
    rows = {"train": [], "test": []}
    for split, count in (("train", 10), ("test", 7)):
        for i in range(count):
            pair = dict(chosen=" sun" * (1 + i % 4), rejected=" rain" * (1 + 3 * i % 5))
            rows[split].append(dict(prompt=f"{split} {i}:", **pair))
    data = write_rows(tmp_path / "data", **rows)
    _, folder, _ = reward(model_name_or_path=bos_lm, dataset_name=data, max_length=13, num_eval_rows=7)
    tokenizer = assert_saved_as(bos_lm, folder / "model")
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model").eval()
    first = set()

    def score(row, column):
        ids = tokenizer(row["prompt"] + row[column]).input_ids[-13:]
        first.add(ids[0] == tokenizer.bos_token_id)
        model.config.pad_token_id = None  # one text has no pads
        with torch.no_grad():
            return model(torch.tensor([ids])).logits.item()

    evaluation = json.loads((folder / "evaluation.json").read_text())
    margins = [score(row, "chosen") - score(row, "rejected") for row in rows["test"]]
    assert first == {True, False}
    assert evaluation["margin"] == pytest.approx(sum(margins) / 7, abs=1e-4)
    assert evaluation["accuracy"] == pytest.approx(sum(x > 0 for x in margins) / 7)
    offset = sum(score(row, "chosen") for row in rows["train"]) / 10
    assert evaluation["reward_offset"] == pytest.approx(offset, abs=1e-4)


# ---- Data of one's own -------------------------------------------------------------------------------------


def test_short_texts_are_used(scripts, small, capsys, tmp_path):
    """Texts of 40 characters are enough: the default of --min-text-length is 0."""
    rows = [dict(text=f"A short review, number {i}, of a film.") for i in range(30)]
    data = write_rows(tmp_path / "data", train=rows[:20], test=rows[20:])
    args = replace(
        small("ppo_sentiment", dataset_name=data),
        min_text_length=scripts["ppo_sentiment"].Args().min_text_length,
    )
    scripts["ppo_sentiment"].train(args)
    assert "skipped" not in capsys.readouterr().out


@pytest.mark.parametrize("recipe", ["gpt2-imdb", "gpt2-imdb-lora"])
def test_the_published_recipes_still_skip_short_reviews(scripts, recipe):
    """TRL's example uses reviews of more than 200 characters."""
    assert scripts["ppo_sentiment"].RECIPES[recipe].min_text_length == 200


def test_the_gold_judge_is_for_its_own_posts(scripts, monkeypatch):
    """With other data, the gold function of the recipe tiny is no judge; any other judge stays.

    This holds for training, and for the verb judge.
    """
    script = scripts["rloo_tldr"]
    gold = script.RECIPES["tiny"].judge_fn
    for verb, function in (([], "train"), (["judge"], "judge_policy")):
        seen = []
        monkeypatch.setattr(script, function, seen.append)
        script.main([*verb])
        script.main([*verb, "--dataset-name", "mine"])
        script.main([*verb, "--dataset-name", "mine", "--judge-fn", "my.py:judge"])
        script.main([*verb, "--reward-fn", "my.py:reward"])
        assert [args.judge_fn for args in seen] == [gold, None, "my.py:judge", gold]


def test_rloo_with_own_data_and_reward(scripts, rloo, tmp_path):
    """Without references there is no win rate, and the reward function is named as the judge."""
    rows = [dict(prompt=f"Post {i}.\n\nTL;DR:") for i in range(12)]
    data = write_rows(tmp_path / "data", train=rows[:8], test=rows[8:])
    function = reward_file(tmp_path, "return [float(len(r)) for r in completions]")
    _, folder, _ = rloo(dataset_name=data, reward_fn=function, reward_model_path=None)
    table = json.loads((folder / "evaluation.json").read_text())
    assert "win rate" not in table["before"]
    assert [table["judge"]] == function


# ---- Trackers ----------------------------------------------------------------------------------------------


def test_tensorboard_has_samples_and_the_evaluation(ppo):
    """Samples are text under one name; the final numbers are under eval/."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, folder, _ = ppo(log_with="tensorboard", total_episodes=16, num_sample_generations=2)
    files = [EventAccumulator(str(path)).Reload() for path in folder.rglob("events.out.tfevents.*")]
    texts = [event for file in files for tag in file.Tags()["tensors"] for event in file.Tensors(tag)]
    shown = " ".join(text.decode() for event in texts for text in event.tensor_proto.string_val)
    samples = rows_of(folder, "samples.jsonl")
    assert "prompt | response | score" in shown
    for row in samples:
        assert " ".join(row["prompt"].split()).replace("|", "&#124;") in shown
    tags = {tag for file in files for tag in file.Tags()["scalars"]}
    assert {"eval/before/score mean", "eval/after/score mean", "eval/n"} <= tags


def test_only_the_main_process_sends_tables(scripts, tmp_path):
    """On the others, accelerate's tracker has no tables: it raises."""
    for module in scripts.values():
        for is_main in (False, True):
            sent = []
            run = object.__new__(module.Run)
            run.args = SimpleNamespace(log_with="wandb")
            run.accelerator = SimpleNamespace(is_main_process=is_main)
            run.console = Console(quiet=True)
            run.folder = tmp_path
            run.track_table = lambda *inputs, sent=sent: sent.append(inputs)
            run.table("samples", [{"prompt": "a"}], "samples.jsonl", update=3)
            assert sent == [("samples", [{"update": 3, "prompt": "a"}], 3)] * is_main


def test_wandb_names_the_run_and_keeps_one_table(ppo, monkeypatch, tmp_path):
    """WANDB_MODE=offline leaves a folder. A run has the name of its run folder, and its samples have one key.

    The final numbers are logged, too.
    """
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
    ppo("a-name", log_with="wandb", total_episodes=16, num_sample_generations=2)
    assert list(tmp_path.rglob("offline-run-*/*.wandb"))
    assert names == ["a-name"]
    assert [name for name, value in logged.items() if isinstance(value, wandb.Table)] == ["samples"]
    assert {"eval/before/score mean", "eval/after/score mean"} <= set(logged)


# ---- Samples -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, prompt",
    [("ppo_sentiment", "prompt"), ("rloo_tldr", "prompt"), ("ppo_dialog", "last"), ("grpo_math", "task")],
)
def test_samples_repeat_their_prompts(scripts, world, tmp_path, name, prompt):
    """The same held-out prompts at each sample: those that evaluation_samples.jsonl begins with."""
    args = maker(scripts, world, tmp_path)(name, num_sample_generations=2)
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.num_mini_batches
    args = replace(args, total_episodes=2 * batch)
    _, folder = scripts[name].train(args)
    samples = rows_of(folder, "samples.jsonl")
    first = [row[prompt] for row in samples if row["update"] == 1]
    second = [row[prompt] for row in samples if row["update"] == 2]
    held_out = [row[prompt] for row in rows_of(folder, "evaluation_samples.jsonl")]
    assert first == second == held_out[: len(first)]
    assert len(first) >= 3


# ---- A gradient that is not finite -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_a_skipped_step_leaves_no_gradient(scripts, small, monkeypatch, name):
    """The gradient of a skipped step is gone before the next backward pass."""
    script = scripts[name]
    clip_gradients = script.clip_gradients
    gradients = []

    def broken_once(accelerator, parameters, max_norm):
        if not gradients:
            for p in parameters.values():
                p.grad.fill_(float("nan"))
        gradients.append([p.grad.clone() for p in parameters.values() if p.grad is not None])
        return clip_gradients(accelerator, parameters, max_norm)

    monkeypatch.setattr(script, "clip_gradients", broken_once)
    script.train(small(name))
    assert len(gradients) >= 2
    assert all(gradient.isfinite().all() for step in gradients[1:] for gradient in step)


# ---- Long texts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ppo_sentiment", "ppo_dialog"])
def test_a_long_text_loses_its_beginning(scripts, tiny_classifier, tmp_path, name):
    """The classifier reads the end of a text that is too long: the response is there."""
    folder = tmp_path / "classifier"
    shutil.copytree(tiny_classifier(), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.model_max_length = 5
    tokenizer.save_pretrained(folder)
    classify, _ = scripts[name].load_classifier(scripts[name].Args(), str(folder), torch.device("cpu"))
    end = " superb and clever and warm in every way"
    same_end = classify(["The film is bad" + end, "What a day it was" + end])
    assert torch.allclose(same_end[0], same_end[1], atol=1e-6)
    other_end = classify(["The film is bad" + end, "The film is bad" + end + " but I was bored"])
    assert not torch.allclose(other_end[0], other_end[1], atol=1e-4)
