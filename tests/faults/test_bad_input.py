"""What a user can get wrong: exit code 2, one line that names the cause, and no run folder."""

import json
import re
from dataclasses import asdict, replace

import pytest
import transformers
from conftest import ACTS, GROUPS, RL
from run_tools import ALL, flags_of, one_line, reward_file, rows_of, script_words, start_process, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest_plugins = ["run_fixtures"]
MISSING = "/no/such/folder"
REVIEW = "A warm and clever film about a lighthouse keeper who learns to dance, told without a dull minute. "
DIALOG = ["Hello, who are you?", "I am Leo."]


@pytest.fixture
def script(scripts):
    """ppo_sentiment.py as a module."""
    return scripts["ppo_sentiment"]


@pytest.fixture(scope="module")
def broken(tiny_lm, tiny_classifier, tmp_path_factory):
    """A folder of data sets and models, each wrong in one way. The tables below call it DATA."""
    root = tmp_path_factory.mktemp("broken") / "DATA"

    # Data
    short_text = [dict(text="A film of " + "ten " * 50)] * 8
    write_rows(root / "other-columns", train=[dict(review=REVIEW, stars=i) for i in range(8)])
    write_rows(root / "empty", train=[dict(text="", prompt="", label=i % 2) for i in range(8)])
    write_rows(root / "numbers", train=[dict(text=i, label=i % 2) for i in range(8)])
    write_rows(root / "one-row", train=[dict(text=REVIEW, label=1)])
    questions = [dict(question=f"{i} + 2?", answer=str(i + 2)) for i in range(8)]
    write_rows(root / "questions", train=questions)
    write_rows(root / "long", train=[dict(prompt="1 + 2?")] * 2, test=[dict(prompt="1" + " + 1" * 99)])
    chats = [dict(prompt=[dict(role="user", content=row["question"])], answer="2") for row in questions]
    write_rows(root / "chats", train=chats)
    write_rows(root / "short", train=short_text, test=short_text)
    write_rows(root / "pairs", train=[dict(prompt=REVIEW, chosen=" good", rejected=" bad")] * 8)
    write_rows(root / "no-completions", train=[dict(prompt=REVIEW, completion="")] * 8)
    chat = [dict(role="user", content=REVIEW)]
    write_rows(root / "chats-and-texts", train=[dict(prompt=chat, completion=REVIEW)] * 8)
    write_rows(root / "empty-pairs", train=[dict(prompt=REVIEW, chosen="", rejected=" bad")] * 8)
    (root / "broken").mkdir()
    (root / "broken/train.jsonl").write_text('{"text": "a film"}\n{"text": \n')
    dialogs = {
        "act-0": dict(dialog=DIALOG, act=[1, 0]),
        "act-3": dict(dialog=DIALOG, act=[1, 3]),
        "act-5": dict(dialog=DIALOG, act=[1, 5]),
        "few-acts": dict(dialog=DIALOG, act=[1]),
        "no-acts": dict(dialog=DIALOG),
        "blank": dict(dialog=["Hello.", " "], act=[1, 1]),
        "alone": dict(dialog=["Hello."], act=[1]),
    }
    for name, row in dialogs.items():
        write_rows(root / name, train=[row] * 8)
    good_row, bad_row = dict(dialog=DIALOG, act=[1, 1]), dict(dialog=DIALOG, act=[1, 9])
    write_rows(root / "held-out-acts", train=[good_row] * 8, test=[bad_row])
    labeled = [dict(text=REVIEW, label=i % 2) for i in range(8)]
    write_rows(root / "no-held-out-labels", train=labeled, test=[dict(text=REVIEW)])

    # Models
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm())
    sizes = {"small-vocabulary": dict(vocab_size=300), "short-context": dict(vocab_size=1024, n_positions=8)}
    for name, size in sizes.items():
        config = transformers.GPT2Config(
            n_embd=32, n_layer=1, n_head=4, bos_token_id=0, eos_token_id=0, **size
        )
        transformers.GPT2LMHeadModel(config).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    config = transformers.DistilBertConfig(vocab_size=1024, dim=32, n_layers=1, n_heads=4)
    transformers.DistilBertModel(config).save_pretrained(root / "both-directions")
    model = AutoModelForCausalLM.from_pretrained(tiny_lm())
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(root / "no-eos")
    without_eos = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    without_eos.save_pretrained(root / "no-eos")
    (root / "lm").symlink_to(tiny_lm())
    (root / "classifier").symlink_to(tiny_classifier())

    function = "def reward(prompts, completions):\n    return [0.0] * len(prompts)\n"
    (root / "reward.py").write_text(f"SEVEN = 7\n{function}")
    (root / "other.py").write_text(function)
    return root


# ---- Flags, data and models --------------------------------------------------------------------------------

REWARD, OTHER = "DATA/reward.py:reward", "DATA/other.py:reward"
CASES_OF_ALL = {  # name of the case -> the flags that are wrong, a word of the line
    "model": (dict(model_name_or_path=MISSING), MISSING),
    "clipping": (dict(max_grad_norm=-1.0), "--max-grad-norm"),
    "data": (dict(dataset_name=MISSING), MISSING),
    "other columns": (dict(dataset_name="DATA/other-columns"), "column"),
    "empty texts": (dict(dataset_name="DATA/empty"), "DATA/empty"),
    "numbers, not texts": (dict(dataset_name="DATA/numbers"), "DATA/numbers"),
    "optimizer": (dict(optimizer="torch.optim.Nonsense"), "torch.optim.Nonsense"),
    "LoRA layers": (dict(lora_r=4, lora_target_modules="q_nonsense"), "q_nonsense"),
}
CASES_OF_RL = {
    "no EOS": (dict(model_name_or_path="DATA/no-eos"), "EOS"),
    "shared layers": (dict(num_shared_layers=99), "2 layers"),
    "reward function, file": (dict(reward_fn=[f"{MISSING}.py:reward"]), f"--reward-fn {MISSING}.py"),
    "reward function, name": (dict(reward_fn=["DATA/reward.py:nonsense"]), "nonsense"),
    "no reward function": (dict(reward_fn=[]), "--reward-fn needs a function"),
    "weights": (dict(reward_fn=[REWARD], reward_weights=[1.0, 2.0]), "2 weights, but --reward-fn has 1"),
}
CASES_OF_GROUPS = {
    "context": (dict(response_length=250), "can read 256 tokens"),
    "long prompts": (dict(max_prompt_length=3), "--max-prompt-length"),
}
CASES = {
    "ppo_sentiment": {
        "hub model": (dict(model_name_or_path="nobody/no-such-model"), "nobody/no-such-model"),
        "broken data": (dict(dataset_name="DATA/broken"), "DATA/broken"),
        "one row": (dict(dataset_name="DATA/one-row"), "DATA/one-row"),
        "short texts": (dict(min_text_length=10**6), "no text is long enough"),
        "short prompts": (
            dict(dataset_name="DATA/short", query_min_length=60, query_max_length=64),
            "no text is long enough",
        ),
        "optimizer, no module": (dict(optimizer="nonsense"), "nonsense"),
        "optimizer, another class": (dict(optimizer="torch.nn.Linear"), "torch.nn.Linear"),
        "LoRA, negative rank": (dict(lora_r=-1), "positive integer"),
        "LoRA on the head": (dict(lora_r=4, lora_target_modules="c_attn,lm_head"), "not for embeddings"),
        "LoRA on embeddings": (dict(lora_r=4, lora_target_modules="c_attn,wte"), "not for embeddings"),
        "reward model": (dict(reward_model_path=MISSING), MISSING),
        "judge": (dict(judge_model_path=MISSING), MISSING),
        "critic": (dict(value_model_path=MISSING), MISSING),
        "critic, vocabulary": (dict(value_model_path="DATA/small-vocabulary"), "small-vocabulary"),
        "critic, context": (dict(value_model_path="DATA/short-context"), "context"),
        "critic, not causal": (dict(value_model_path="DATA/both-directions"), "later tokens"),
        "label": (dict(reward_label="splendid"), "splendid"),
        "label, number": (dict(reward_label="7"), "7"),
        "context, by one token": (dict(query_max_length=200, response_length=57), "can read 256 tokens"),
        "query lengths": (dict(query_min_length=9, query_max_length=8), "--query-min-length"),
        "response lengths": (dict(response_min_length=9, response_length=8), "--response-min-length"),
        "KL horizon": (dict(kl_target=1.0, kl_horizon=1.6), "must be more than 1/5 of the batch, 8"),
        "reward function, no name": (dict(reward_fn=["DATA/reward.py"]), "reward.py"),
        "reward function, a number": (dict(reward_fn=["DATA/reward.py:SEVEN"]), "SEVEN"),
        "reward functions, equal names": (dict(reward_fn=[REWARD, OTHER]), "two of this name"),
        "weights of nothing": (dict(reward_weights=[0.5]), "1 weights, but --reward-fn has 0"),
        "shared layers below 0": (dict(num_shared_layers=-1), "--num-shared-layers"),
        "shared layers and LoRA": (dict(num_shared_layers=1, lora_r=4), "--num-shared-layers"),
    },
    "ppo_dialog": {
        "reward model": (dict(reward_model_path=MISSING), MISSING),
        "critic, context": (dict(value_model_path="DATA/short-context"), "context"),
        "context, by one token": (dict(max_prompt_length=251), "can read 256 tokens"),
        "KL horizon": (dict(kl_target=1.0, kl_horizon=1.6), "must be more than 1/5 of the batch, 8"),
        "two labels": (
            dict(reward_model_path="DATA/classifier", dataset_name="DATA/act-3"),
            "act 3, but the classifier knows 1 to 2",
        ),
        "no acts": (dict(dataset_name="DATA/no-acts"), "act"),
        "act 0": (dict(dataset_name="DATA/act-0"), "act 0, "),
        "acts, too few": (dict(dataset_name="DATA/few-acts"), "DATA/few-acts"),
        "held-out acts": (dict(dataset_name="DATA/held-out-acts"), "act 9, "),
        "blank": (dict(dataset_name="DATA/blank"), "DATA/blank"),
        "one utterance": (dict(dataset_name="DATA/alone"), "DATA/alone"),
        "end, blank": (dict(utterance_end=" "), "--utterance-end"),
    },
    "rloo_tldr": {
        "reward model": (dict(reward_model_path=MISSING), MISSING),
        "reward model, 2 labels": (dict(reward_model_path="DATA/classifier"), "mismatched"),
        "policy": (dict(sft_model_path=MISSING), MISSING),
        "no stop token": (dict(stop_token=None), "--missing-eos-penalty"),
        "one response": (dict(rloo_k=1), "--rloo-k"),
        "3 responses of 8": (dict(rloo_k=3), "--rloo-k"),
        "judge, file": (dict(judge_fn=f"{MISSING}.py:right"), f"--judge-fn {MISSING}.py"),
        "judge, name": (dict(judge_fn="DATA/reward.py:nonsense"), "nonsense"),
        "judge without a model": (dict(judge_url="http://here/v1"), "--judge-model"),
    },
    "grpo_math": {
        "one response": (dict(num_generations=1), "--num-generations 1 must be 2 or more"),
        "3 responses of 8": (dict(num_generations=3), "3 must be 2 or more and divide the 8 episodes"),
        "negative KL": (dict(kl_coef=-0.1), "--kl-coef must be 0 (no KL penalty) or more; it is -0.1"),
        "8 bit without frozen weights": (dict(load_in_8bit=True, kl_coef=0.0), "no weights are frozen"),
        "no prompt, no template": (dict(dataset_name="DATA/questions"), "--prompt-template"),
        "template, no such column": (
            dict(dataset_name="DATA/questions", prompt_template="{task}"),
            "DATA/questions' has no column prompt, but question, answer",
        ),
        "template, an open brace": (
            dict(dataset_name="DATA/questions", prompt_template="{question"),
            "--prompt-template '{question'",
        ),
        "chats without a template": (dict(dataset_name="DATA/chats"), "cannot render chats"),
        "harder data": (dict(hard_dataset_name=MISSING), MISSING),
        "harder data, long prompts": (dict(hard_dataset_name="DATA/long"), "DATA/long'"),
    },
    "sft": {
        "blank dialogs": (dict(dataset_name="DATA/blank"), "DATA/blank"),
        "context": (dict(max_length=257), "context"),
        "no EOS": (dict(model_name_or_path="DATA/no-eos"), "EOS"),
        "config, type": (dict(from_config="nonsense n_layer=2"), "nonsense"),
        "config, value": (dict(from_config="gpt2 n_layer=two"), "two"),
        "config, heads": (dict(from_config="gpt2 n_layer=1 n_embd=30 n_head=4"), "30"),
        "blank end": (dict(utterance_end=" "), "--utterance-end must not be empty"),
        "packing in windows": (
            dict(
                from_config="mistral hidden_size=32 intermediate_size=64 num_hidden_layers=2 "
                "num_attention_heads=2 num_key_value_heads=2 sliding_window=8",
            ),
            "--no-packing",
        ),
    },
    "reward_model": {
        "context": (dict(max_length=257), "context"),
        "shard, form": (dict(train_shard="half"), "half"),
        "shard, number": (dict(train_shard="2/2"), "2/2"),
        "held-out labels": (dict(dataset_name="DATA/no-held-out-labels"), "None is none of"),
        "one label": (dict(label_names="only"), "needs two labels or more"),
        "acts": (dict(dataset_name="DATA/act-5", label_names=",".join(ACTS)), "4 is none of"),
        "blank dialogs": (dict(dataset_name="DATA/blank", label_names=",".join(ACTS)), "DATA/blank"),
        "no pairs": (dict(dataset_name="DATA/empty-pairs"), "two responses"),
        "center data": (dict(dataset_name="DATA/pairs", center_dataset_name=MISSING), MISSING),
        "center data, empty": (
            dict(dataset_name="DATA/pairs", center_dataset_name="DATA/no-completions"),
            "no row has a prompt and a completion",
        ),
        "center data, mixed": (
            dict(dataset_name="DATA/pairs", center_dataset_name="DATA/chats-and-texts"),
            "chats and texts are mixed",
        ),
        "center data, columns": (
            dict(dataset_name="DATA/pairs", center_dataset_name="DATA/pairs"),
            "no row has a prompt and a completion",
        ),
    },
}
TABLE = []
for name in ALL:
    cases = CASES_OF_ALL | CASES[name]
    if name in RL:
        cases |= CASES_OF_RL
    if name in GROUPS:
        cases |= CASES_OF_GROUPS
    for case, (changes, word) in cases.items():
        TABLE.append(pytest.param(name, changes, word, id=f"{name}: {case}"))


@pytest.mark.parametrize("name, changes, word", TABLE)
def test_bad_input(scripts, small, broken, capsys, tmp_path, name, changes, word):
    """The line names the cause, and there is no run folder."""
    for flag, value in changes.items():
        if isinstance(value, str):
            changes = changes | {flag: value.replace("DATA/", f"{broken}/")}
        elif isinstance(value, list):
            changes = changes | {flag: [str(x).replace("DATA/", f"{broken}/") for x in value]}
    line = one_line(scripts[name], flags_of(small(name, **changes)), capsys)
    assert word in line
    assert not (tmp_path / "run").exists()


BATCH_SIZES = "per_device_train_batch_size gradient_accumulation_steps"
RL_SIZES = f"{BATCH_SIZES} total_episodes num_mini_batches num_ppo_epochs local_rollout_forward_batch_size"
RL_SIZES += " temperature response_length"
PPO_SIZES = f"{RL_SIZES} num_eval_prompts kl_target kl_horizon"
SIZES = {
    "ppo_sentiment": f"{PPO_SIZES} query_min_length response_min_length",
    "ppo_dialog": f"{PPO_SIZES} num_context_utterances max_prompt_length",
    "rloo_tldr": f"{RL_SIZES} num_examples max_prompt_length",
    "grpo_math": f"{RL_SIZES} num_examples num_eval_samples num_train_rows max_prompt_length",
    "sft": f"{BATCH_SIZES} num_train_epochs max_length num_train_rows num_eval_rows",
    "reward_model": f"{BATCH_SIZES} num_train_epochs max_length num_eval_rows",
}


@pytest.mark.parametrize("name", ALL)
def test_sizes_that_are_0(scripts, small, name):
    """Each is named, before anything is loaded."""
    module, args = scripts[name], small(name)
    for size in SIZES[name].split():
        flag = f"--{size.replace('_', '-')} must be more than 0"
        with pytest.raises(module.UserError, match=flag):
            module.train(replace(args, **{size: 0}))


@pytest.mark.parametrize("name", ALL)
def test_no_samples(scripts, small, name):
    """A run may print no samples, and continue no documents."""
    field = "num_samples" if name == "sft" else "num_sample_generations"
    args = small(name)
    if hasattr(args, field):
        args = replace(args, **{field: 0})
        _, folder = scripts[name].train(args)
        assert rows_of(folder) and not (folder / "samples.jsonl").exists()


# ---- The command line --------------------------------------------------------------------------------------


def test_unknown_recipe(script, capsys):
    """The line names it, and the recipes that there are."""
    line = one_line(script, ["gpt5-imdb"], capsys)
    assert "gpt5-imdb" in line and all(name in line for name in script.RECIPES)


@pytest.mark.parametrize(
    "flags",
    [["--learning-rat", "1"], ["--learning-rate", "fast"], ["--lr-scheduler-type", "magic"], ["--seed"]],
)
def test_unknown_flags(script, capsys, flags):
    """An unknown flag, or a value of the wrong type, is named. Exit code 2."""
    with pytest.raises(SystemExit) as end:
        script.main(flags)
    output = capsys.readouterr()
    assert end.value.code == 2
    assert flags[0].strip("-")[:12] in output.out + output.err


def test_in_a_shell(small, tmp_path):
    """The same as a process: exit code 2, and stderr holds nothing but one line."""
    args = small("ppo_sentiment", optimizer="nonsense")
    process = start_process(script_words("ppo_sentiment", args), tmp_path)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert len(errors.splitlines()) == 1 and "--optimizer nonsense" in errors
    assert not (tmp_path / "run").exists()


# ---- Run folders -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["latest", "runs/nothing"])
def test_resume_of_nothing(script, capsys, monkeypatch, tmp_path, folder):
    """No run is found, and the line says where."""
    monkeypatch.chdir(tmp_path)
    assert folder in one_line(script, ["--resume", folder], capsys)
    assert not list(tmp_path.iterdir())


def test_resume_of_another_scripts_run(script, small, capsys, tmp_path):
    """Its flags are others, so it is refused."""
    (tmp_path / "args.json").write_text(json.dumps(dict(args=asdict(small("sft")))))
    assert str(tmp_path) in one_line(script, ["--resume", str(tmp_path)], capsys)


def test_resume_of_an_old_editions_run(scripts, small, capsys, tmp_path):
    """The flags that it had give it away. Nothing of it is touched."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("{}\n")
    for name, flags in dict(
        ppo_sentiment=dict(compile=False), reward_model=dict(save_dtype="float32")
    ).items():
        saved = asdict(small(name)) | flags
        (folder / "args.json").write_text(json.dumps(dict(args=saved)))
        line = one_line(scripts[name], ["--resume", str(folder)], capsys)
        assert str(folder) in line and "CHANGELOG.md" in line
        assert (folder / "metrics.jsonl").read_text() == "{}\n"


def test_a_folder_that_holds_a_run(script, small, capsys, tmp_path):
    """A new run does not write into it."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "args.json").write_text("{}")
    line = one_line(script, flags_of(small("ppo_sentiment")), capsys)
    assert str(folder) in line and "--resume" in line
    assert [path.name for path in folder.iterdir()] == ["args.json"]
    assert (folder / "args.json").read_text() == "{}"


def test_an_output_folder_that_is_a_file(script, small, capsys, tmp_path):
    """It is named."""
    (tmp_path / "run").write_text("a file")
    line = one_line(script, flags_of(small("ppo_sentiment")), capsys)
    assert f"{tmp_path}/run" in line and "Not a directory" in line


# ---- Reward functions --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body, word",
    [
        ("return None", "reward reward failed: TypeError(\"'NoneType'"),
        ("return ['a'] * len(prompts)", 'reward reward failed: ValueError("could not convert'),
        ("return [1.0]", "reward reward: 1 numbers for 4 responses"),
        ("return [float('inf')] * len(prompts)", "inf is not a finite number"),
        ("return [1e39] * len(prompts)", "1e+39 is not a finite number"),
        ("return (float('nan') for _ in prompts)", "nan is not a finite number"),
    ],
)
def test_wrong_rewards(script, small, capsys, tmp_path, body, word):
    """What a reward function returned must be finite numbers, one per response. The line says which one."""
    args = small("ppo_sentiment", reward_fn=reward_file(tmp_path, body))
    with pytest.raises(SystemExit) as end:
        script.main(flags_of(args))
    assert end.value.code == 2
    assert word in capsys.readouterr().err.splitlines()[-1]  # after the traceback, if there was an exception
    assert not (tmp_path / "run/model").exists()


@pytest.mark.parametrize(
    "numbers",
    [
        "[1, True, numpy.float32(2.5), numpy.int64(3)]",
        "tuple(torch.tensor([[1], [1], [2.5], [3]]))",
    ],
)
def test_other_kinds_of_numbers(script, small, tmp_path, numbers):
    """What float() accepts is a number, in any sequence: a list, an array, a tensor."""
    body = f"""import numpy, torch
numbers = {numbers}
return [numbers[i % 4] for i in range(len(prompts))] if len(prompts) > 4 else numbers"""
    _, folder = script.train(small("ppo_sentiment", reward_fn=reward_file(tmp_path, body)))
    assert rows_of(folder)[0]["env/reward_mean"] == pytest.approx(7.5 / 4)


@pytest.mark.parametrize("name", RL)
def test_a_reward_function_that_raises(scripts, small, capsys, tmp_path, name):
    """Its author sees its own traceback, then the line."""
    args = small(name, reward_fn=reward_file(tmp_path, "raise KeyError('mine')"))
    with pytest.raises(SystemExit) as end:
        scripts[name].main(flags_of(args))
    first, *traceback, line = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and line == f"{name}.py: reward reward failed: KeyError('mine')"
    assert first.startswith("Traceback") and "raise KeyError('mine')" in "".join(traceback)
    assert not (tmp_path / "run/model").exists()


# ---- Processes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_the_first_fsdp_is_refused(scripts, small, monkeypatch, name):
    """The line says what to put into accelerate's configuration."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "1")
    with pytest.raises(scripts[name].UserError, match="fsdp_version: 2"):
        scripts[name].train(small(name))


# ---- Chat --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, word",
    [
        ([], "RUN_FOLDER_OR_MODEL"),
        ([MISSING], MISSING),
        (["DATA/unfinished"], "unfinished"),
        (["DATA/reward.py"], "reward.py"),
        (["DATA/no-eos"], "EOS"),
        (["DATA/lm", "--utterance-end", ""], "utterance-end"),
        (["DATA/lm", "--response-length", "300"], "can read 256 tokens"),
        (["DATA/lm", "--temperature", "0"], "temperature"),
    ],
)
def test_chat_that_cannot_start(scripts, small, broken, capsys, monkeypatch, words, word):
    """No folder, a wrong one, a run without a model yet, or a wrong flag: one line, and no question."""
    monkeypatch.setattr("builtins.input", None)
    (broken / "unfinished").mkdir(exist_ok=True)
    args = dict(args=asdict(small("ppo_dialog")))
    (broken / "unfinished/args.json").write_text(json.dumps(args))
    words = [text.replace("DATA", str(broken)) for text in words]
    assert re.search(word, one_line(scripts["ppo_dialog"], ["chat", *words], capsys))
