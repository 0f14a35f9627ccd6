"""What a user can get wrong: exit code 2, one line that names the culprit, no traceback, and nothing half written."""

import json
from dataclasses import asdict

import pytest
import transformers
from conftest import ACTS
from run_tools import flags_of, reward_file, script_words, start_process, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest_plugins = ["run_fixtures"]
ALL = ("ppo_sentiment", "ppo_dialog", "sft", "reward_model", "rloo_tldr")
TEXT = "A warm and clever film about a lighthouse keeper who learns to dance, told without one dull minute. "
MISSING, SAID = "/no/such/folder", ["Hello, who are you?", "I am Leo."]
DISTILBERT = "distilbert dim=32 n_layers=1 n_heads=4 hidden_dim=64 max_position_embeddings=128"
SIZES = {
    "ppo_sentiment": ("total_episodes", "per_device_train_batch_size", "gradient_accumulation_steps", "num_mini_batches", "num_ppo_epochs",
                      "local_rollout_forward_batch_size", "response_length", "query_max_length"),
    "ppo_dialog": ("total_episodes", "per_device_train_batch_size", "gradient_accumulation_steps", "num_mini_batches", "num_ppo_epochs",
                   "local_rollout_forward_batch_size", "response_length", "num_context_utterances", "max_prompt_length",
                   "num_eval_prompts"),
    "rloo_tldr": ("total_episodes", "per_device_train_batch_size", "gradient_accumulation_steps", "num_mini_batches", "num_ppo_epochs",
                  "local_rollout_forward_batch_size", "response_length", "num_examples"),
    "sft": ("per_device_train_batch_size", "gradient_accumulation_steps", "max_length"),
    "reward_model": ("per_device_train_batch_size", "gradient_accumulation_steps", "max_length"),
}  # fmt: skip
LEAST = {("ppo_sentiment", "response_length"): dict(response_min_length=0), ("ppo_sentiment", "query_max_length"): dict(query_min_length=0)}
TABLE = [(script, f"{name}-0", {name: 0} | LEAST.get((script, name), {}), name.split("_")[0]) for script in ALL for name in SIZES[script]]
TABLE += [(script, "model", dict(model_name_or_path=MISSING), MISSING) for script in ALL]
TABLE += [(script, "model-hub", dict(model_name_or_path="nobody/no-such-model"), "nobody/no-such-model") for script in ALL]
TABLE += [(script, "data", dict(dataset_name=MISSING), MISSING) for script in ALL]
TABLE += [(script, f"{name}-data", dict(dataset_name=f"DATA/{name}"), word) for script in ALL for name, word in
          (("other", "column"), ("empty", "DATA/empty"), ("single", "DATA/single"), ("broken", "DATA/broken"), ("numbers", "DATA/numbers"))]
TABLE += [(script, f"optimizer-{name}", dict(optimizer=name), name) for script in ALL
          for name in ("torch.optim.Nonsense", "nonsense", "torch.optim", "torch.nn.Linear")]  # fmt: skip
TABLE += [(script, "lora", dict(lora_r=4, lora_target_modules="q_nonsense"), "q_nonsense") for script in ALL]
TABLE += [(script, "critic-both-ways", dict(value_model_path="DATA/both-ways"), "later") for script in ("ppo_sentiment", "ppo_dialog")]
TABLE += [(script, "lora-below-0", dict(lora_r=-1), "--lora-r") for script in ALL]
MISTRAL = "mistral hidden_size=32 intermediate_size=64 num_hidden_layers=2 num_attention_heads=2 num_key_value_heads=2 sliding_window=8"
TABLE += [("sft", "packing-in-windows", dict(from_config=MISTRAL, train_tokenizer=300), "--no-packing")]
SHORT = dict(dataset_name="DATA/short", query_min_length=60, query_max_length=64)
TABLE += [("ppo_sentiment", "queries-too-short", SHORT, "--query-min-length")]
HEAD = dict(lora_r=4, lora_target_modules="c_attn,lm_head")
TABLE += [(script, "lora-head", HEAD, "output embedding") for script in ALL if script != "reward_model"]
TABLE += [
    ("ppo_sentiment", "reward-model", dict(reward_model_path=MISSING), MISSING),
    ("ppo_sentiment", "judge", dict(judge_model_path=MISSING), MISSING),
    ("ppo_sentiment", "critic", dict(value_model_path=MISSING), MISSING),
    ("ppo_sentiment", "critic-vocabulary", dict(value_model_path="DATA/small-vocabulary"), "small-vocabulary"),
    ("ppo_sentiment", "critic-context", dict(value_model_path="DATA/short-context"), "context"),
    ("ppo_sentiment", "label", dict(reward_label="splendid"), "splendid"),
    ("ppo_sentiment", "label-number", dict(reward_label="7"), "7"),
    ("ppo_sentiment", "context", dict(query_max_length=200, response_length=100), "context"),
    ("ppo_sentiment", "context-by-one", dict(query_max_length=200, response_length=57), "context"),
    ("ppo_sentiment", "query-order", dict(query_min_length=9, query_max_length=8), "query"),
    ("ppo_sentiment", "response-order", dict(response_min_length=9, response_length=8), "response"),
    ("ppo_sentiment", "temperature", dict(temperature=0.0), "temperature"),
    ("ppo_sentiment", "kl-target", dict(kl_target=0.0), "kl"),
    ("ppo_sentiment", "kl-horizon", dict(kl_target=1.0, kl_horizon=0.0), "kl"),
    ("ppo_sentiment", "short-kl-horizon", dict(kl_target=1.0, kl_horizon=1.6), "more than a fifth of the batch, 8"),
    ("ppo_sentiment", "long-texts", dict(min_text_length=10**6), "text"),
    ("ppo_sentiment", "no-eos", dict(model_name_or_path="DATA/no-eos"), "stop"),
    ("ppo_sentiment", "reward-file", dict(reward_fn=f"{MISSING}.py:reward"), MISSING),
    ("ppo_sentiment", "reward-name", dict(reward_fn="DATA/reward.py:nonsense"), "nonsense"),
    ("ppo_sentiment", "reward-colon", dict(reward_fn="DATA/reward.py"), "FILE.py:function"),
    ("ppo_sentiment", "reward-constant", dict(reward_fn="DATA/reward.py:SEVEN"), "SEVEN"),
    ("ppo_dialog", "reward-model", dict(reward_model_path=MISSING), MISSING),
    ("ppo_dialog", "critic", dict(value_model_path=MISSING), MISSING),
    ("ppo_dialog", "critic-vocabulary", dict(value_model_path="DATA/small-vocabulary"), "small-vocabulary"),
    ("ppo_dialog", "critic-context", dict(value_model_path="DATA/short-context"), "context"),
    ("ppo_dialog", "context", dict(max_prompt_length=200, response_length=100), "context"),
    ("ppo_dialog", "context-by-one", dict(max_prompt_length=251), "context"),
    ("ppo_dialog", "two-labels", dict(reward_model_path="DATA/classifier", dataset_name="DATA/act-3"), "the act 3 is none of the class"),
    ("ppo_dialog", "no-acts", dict(dataset_name="DATA/no-acts"), "act"),
    ("ppo_dialog", "act-0", dict(dataset_name="DATA/act-0"), "the act 0 "),
    ("ppo_dialog", "act-5", dict(dataset_name="DATA/act-5"), "the act 5 "),
    ("ppo_dialog", "act-word", dict(dataset_name="DATA/act-word"), "the act 'question' "),
    ("ppo_dialog", "few-acts", dict(dataset_name="DATA/few-acts"), "DATA/few-acts"),
    ("ppo_dialog", "held-out-acts", dict(dataset_name="DATA/held-out-acts"), "the act 9 "),
    ("ppo_dialog", "blank", dict(dataset_name="DATA/blank"), "DATA/blank"),
    ("ppo_dialog", "alone", dict(dataset_name="DATA/alone"), "DATA/alone"),
    ("ppo_dialog", "strings", dict(dataset_name="DATA/strings", reward_model_path=None), "DATA/strings"),
    ("ppo_dialog", "temperature", dict(temperature=0.0), "temperature"),
    ("ppo_dialog", "kl-target", dict(kl_target=0.0), "kl"),
    ("ppo_dialog", "kl-horizon", dict(kl_horizon=0.0), "kl"),
    ("ppo_dialog", "short-kl-horizon", dict(kl_target=1.0, kl_horizon=1.6), "more than a fifth of the batch, 8"),
    ("ppo_dialog", "end-empty", dict(utterance_end=""), "utterance-end"),
    ("ppo_dialog", "end-blank", dict(utterance_end=" "), "utterance-end"),
    ("ppo_dialog", "end-letters", dict(utterance_end=" «ende»"), "«ende»"),
    ("ppo_dialog", "end-line", dict(utterance_end="<E\nOU>"), "utterance-end"),
    ("ppo_dialog", "offload-8bit", dict(offload=True, load_in_8bit=True), "offload"),
    ("ppo_dialog", "no-eos", dict(model_name_or_path="DATA/no-eos"), "EOS"),
    ("ppo_dialog", "shared-many", dict(num_shared_layers=99), "2 layers"),
    ("ppo_dialog", "reward-file", dict(reward_fn=f"{MISSING}.py:reward"), MISSING),
    ("ppo_dialog", "reward-name", dict(reward_fn="DATA/reward.py:nonsense"), "nonsense"),
    ("ppo_dialog", "reward-colon", dict(reward_fn="DATA/reward.py"), "FILE.py:function"),
    ("ppo_dialog", "reward-constant", dict(reward_fn="DATA/reward.py:SEVEN"), "SEVEN"),
    ("rloo_tldr", "reward-model", dict(reward_model_path=MISSING), MISSING),
    ("rloo_tldr", "sft-model", dict(sft_model_path=MISSING), MISSING),
    ("rloo_tldr", "k-1", dict(rloo_k=1), "rloo-k"),
    ("rloo_tldr", "k-3", dict(rloo_k=3), "rloo-k"),
    ("rloo_tldr", "kl-in-loss", dict(kl_in_loss=True), "k1"),
    ("rloo_tldr", "classifier", dict(reward_model_path="DATA/classifier"), "2 labels"),
    ("rloo_tldr", "judge-file", dict(judge_fn=f"{MISSING}.py:gold"), MISSING),
    ("rloo_tldr", "judge-name", dict(judge_fn="DATA/reward.py:nonsense"), "nonsense"),
    ("rloo_tldr", "reward-colon", dict(reward_fn="DATA/reward.py"), "FILE.py:function"),
    ("rloo_tldr", "context", dict(response_length=250), "context"),
    ("rloo_tldr", "long-prompts", dict(max_prompt_length=3), "max-prompt-length"),
    ("rloo_tldr", "temperature", dict(temperature=0.0), "temperature"),
    ("rloo_tldr", "no-eos", dict(model_name_or_path="DATA/no-eos"), "stop"),
    ("rloo_tldr", "no-stop", dict(stop_token=None), "missing-eos-penalty"),
    ("rloo_tldr", "judge-url", dict(judge_url="http://here/v1"), "judge-model"),
    ("rloo_tldr", "shared-many", dict(num_shared_layers=99), "2 layers"),
    ("ppo_sentiment", "shared-many", dict(num_shared_layers=99), "2 layers"),
    ("ppo_sentiment", "shared-negative", dict(num_shared_layers=-1), "num-shared-layers"),
    ("reward_model", "center", dict(model_name_or_path="DATA/lm", dataset_name="DATA/pairs", center_dataset_name=MISSING), MISSING),
    ("reward_model", "center-columns", dict(model_name_or_path="DATA/lm", dataset_name="DATA/pairs", center_dataset_name="DATA/pairs"),
     "completion"),
    ("reward_model", "no-pairs", dict(model_name_or_path="DATA/lm", dataset_name="DATA/empty-pairs"), "two responses"),
    ("reward_model", "acts", dict(dataset_name="DATA/act-5", label_names=",".join(ACTS)), "the label 4 is none of"),
    ("sft", "blank-dialogues", dict(dataset_name="DATA/blank"), "DATA/blank"),
    ("sft", "context", dict(max_length=257), "context"),
    ("sft", "no-eos", dict(model_name_or_path="DATA/no-eos"), "EOS"),
    ("sft", "config-type", dict(from_config="nonsense n_layer=2"), "nonsense"),
    ("sft", "config-value", dict(from_config="gpt2 n_layer=two"), "two"),
    ("sft", "config-pair", dict(from_config="gpt2 n_layer"), "n_layer"),
    ("sft", "config-heads", dict(from_config="gpt2 n_layer=1 n_embd=30 n_head=4"), "30"),
    ("sft", "tokenizer-alone", dict(train_tokenizer=300), "tokenizer"),
    ("reward_model", "context", dict(max_length=257), "context"),
    ("reward_model", "tokenizer", dict(tokenizer_name_or_path=MISSING), MISSING),
    ("reward_model", "config-type", dict(from_config="nonsense dim=2"), "nonsense"),
    ("reward_model", "shard-form", dict(train_shard="half"), "half"),
    ("reward_model", "shard-number", dict(train_shard="2/2"), "2/2"),
    ("reward_model", "shard-none", dict(train_shard="0/0"), "0/0"),
    ("reward_model", "few-names", dict(label_names="only", from_config=DISTILBERT), "label"),
]


@pytest.fixture(scope="module")
def broken(tiny_lm, tiny_classifier, tmp_path_factory):
    """A folder of data sets, models and code that are wrong, each in one way."""
    root = tmp_path_factory.mktemp("broken") / "DATA"
    write_rows(root / "other", train=[dict(review=TEXT, stars=i) for i in range(8)])
    write_rows(root / "empty", train=[dict(text="", label=i % 2) for i in range(8)])
    write_rows(root / "single", train=[dict(text=TEXT, label=1)])
    write_rows(root / "numbers", train=[dict(text=i, label=i % 2) for i in range(8)])
    (root / "broken").mkdir()
    (root / "broken/train.jsonl").write_text('{"text": "a film"}\n{"text": \n')
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm())
    for name, sizes in (("small-vocabulary", dict(vocab_size=300)), ("short-context", dict(vocab_size=1024, n_positions=8))):
        config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, bos_token_id=0, eos_token_id=0, **sizes)
        transformers.GPT2LMHeadModel(config).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    config = transformers.DistilBertConfig(vocab_size=1024, dim=32, n_layers=1, n_heads=4)
    transformers.DistilBertModel(config).save_pretrained(root / "both-ways")
    AutoModelForCausalLM.from_pretrained(tiny_lm()).save_pretrained(root / "no-eos")
    plain = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    plain.save_pretrained(root / "no-eos")
    (root / "reward.py").write_text("SEVEN = 7\n")
    for name, link in (("lm", tiny_lm()), ("classifier", tiny_classifier())):
        (root / name).symlink_to(link)
    for name, texts, acts in (("act-0", SAID, [1, 0]), ("act-3", SAID, [1, 3]), ("act-5", SAID, [1, 5]), ("few-acts", SAID, [1]),
                              ("act-word", SAID, ["greeting", "question"]), ("blank", ["Hello.", " "], [1, 1]), ("alone", ["Hello."], [1]),
                              ("strings", "Hello.", 1)):  # fmt: skip
        write_rows(root / name, train=[dict(dialog=texts, act=acts)] * 8)
    write_rows(root / "no-acts", train=[dict(dialog=SAID)] * 8)
    write_rows(root / "short", train=[dict(text="A film of " + "ten " * 50)] * 8, test=[dict(text="A film of " + "ten " * 50)] * 8)
    write_rows(root / "held-out-acts", train=[dict(dialog=SAID, act=[1, 1])] * 8, test=[dict(dialog=SAID, act=[1, 9])])
    write_rows(root / "pairs", train=[dict(prompt=TEXT, chosen=" good", rejected=" bad")] * 8)
    write_rows(root / "empty-pairs", train=[dict(prompt=TEXT, chosen=" ", rejected=" bad")] * 8)
    return root


def one_line(module, argv, capsys):
    """Run main() with what must end in exit code 2 and one line on stderr. -> that line"""
    with pytest.raises(SystemExit) as end:
        module.main(argv)
    lines = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and len(lines) == 1 and lines[0].startswith(f"{module.__name__}.py: "), lines
    return lines[0]


@pytest.mark.parametrize("script, name, changes, word", TABLE, ids=[f"{row[0]}-{row[1]}" for row in TABLE])
def test_bad_input(scripts, small, broken, capsys, tmp_path, script, name, changes, word):
    """Each line of the table ends before a run folder is made."""
    changes = {name: x.replace("DATA/", f"{broken}/") if isinstance(x, str) else x for name, x in changes.items()}
    argv = flags_of(small(script, **changes))
    assert word in one_line(scripts[script], argv, capsys)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("script", ALL)
def test_unknown_recipe(scripts, capsys, script):
    """It is named, and so are those that there are."""
    line = one_line(scripts[script], ["gpt5-imdb"], capsys)
    assert "gpt5-imdb" in line and all(name in line for name in scripts[script].RECIPES)


@pytest.mark.parametrize("script", ALL)
@pytest.mark.parametrize("flags", [["--learning-rat", "1"], ["--learning-rate", "fast"], ["--lr-scheduler-type", "magic"], ["--seed"]])
def test_unknown_flags(scripts, capsys, script, flags):
    """An unknown flag and a value of the wrong kind end in exit code 2 and name the flag."""
    with pytest.raises(SystemExit) as end:
        scripts[script].main(flags)
    assert end.value.code == 2 and flags[0].strip("-")[:12] in "".join(capsys.readouterr())


@pytest.mark.parametrize("script", ALL)
@pytest.mark.parametrize("name", ["latest", "runs/nothing"])
def test_resume_of_nothing(scripts, capsys, monkeypatch, tmp_path, script, name):
    """No run is found, and the line says where."""
    monkeypatch.chdir(tmp_path)
    assert name in one_line(scripts[script], ["--resume", name], capsys)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", ALL)
def test_folder_that_holds_a_run(scripts, small, capsys, tmp_path, script):
    """An output folder with a run in it is left as it is."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "args.json").write_text("{}")
    line = one_line(scripts[script], flags_of(small(script)), capsys)
    assert str(folder) in line and "--resume" in line
    assert [path.name for path in folder.iterdir()] == ["args.json"] and (folder / "args.json").read_text() == "{}"


@pytest.mark.parametrize("script", ALL)
def test_output_dir_that_is_a_file(scripts, small, capsys, tmp_path, script):
    """An output folder that cannot be made is named."""
    (tmp_path / "run").write_text("a file")
    assert "run" in one_line(scripts[script], flags_of(small(script)), capsys)


@pytest.mark.parametrize("script", ["ppo_sentiment", "ppo_dialog"])
@pytest.mark.parametrize("body, word", [
    ("return [float('nan')] * len(prompts)", "nan"),
    ("return [1.0]", "list of"),
    ("return 'good'", "list of"),
])  # fmt: skip
def test_reward_function_that_goes_wrong(scripts, small, capsys, tmp_path, script, body, word):
    """What it returned is said in one line."""
    assert word in one_line(scripts[script], flags_of(small(script, reward_fn=reward_file(tmp_path, body))), capsys)


@pytest.mark.parametrize("script", ALL)
def test_resume_of_another_scripts_run(scripts, small, capsys, tmp_path, script):
    """A run folder of another script has other flags: it is refused and named."""
    other = ALL[ALL.index(script) - 1]
    (tmp_path / "args.json").write_text(json.dumps(dict(args=asdict(small(other)))))
    assert str(tmp_path) in one_line(scripts[script], ["--resume", str(tmp_path)], capsys)


@pytest.mark.parametrize("script, name", [("ppo_sentiment", "num_eval_prompts"), ("sft", "num_eval_rows"), ("sft", "num_samples"),
                                          ("reward_model", "num_eval_rows"), ("ppo_sentiment", "num_sample_generations"),
                                          ("ppo_dialog", "num_sample_generations")])  # fmt: skip
def test_no_evaluation(scripts, small, capsys, script, name):
    """0 held-out rows: a run without that table, or one line; never a traceback."""
    argv = flags_of(small(script, **{name: 0}))
    try:
        scripts[script].main(argv)
    except SystemExit as end:
        assert end.code == 2 and len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("words, word", [
    ([], "RUN_FOLDER_OR_MODEL"), (["--temperature", "0.5"], "RUN_FOLDER_OR_MODEL"), ([MISSING], MISSING),
    (["DATA/unfinished"], "unfinished"), (["nobody/no-such-model"], "no-such-model"), (["DATA/reward.py"], "reward.py"),
    (["DATA/no-eos"], "EOS"), (["DATA/lm", "--utterance-end", ""], "utterance-end"),
])  # fmt: skip
def test_chat_without_a_model(scripts, small, broken, capsys, words, word):
    """The verb chat without a folder, with a wrong one, with a run that has no model yet, and with a mark that it cannot look for."""
    args = small("ppo_dialog")
    (broken / "unfinished").mkdir(exist_ok=True)
    (broken / "unfinished/args.json").write_text(json.dumps(dict(args=asdict(args))))
    words = [text.replace("DATA", str(broken)) for text in words]
    assert word in one_line(scripts["ppo_dialog"], ["chat", *words], capsys)


def typed(*lines):
    """What input() is where somebody types these lines."""
    lines = iter(lines)
    return lambda question: next(lines)


@pytest.mark.parametrize("flag", ["temperature", "response-length", "num-context-utterances", "max-prompt-length"])
def test_chat_with_a_size_of_0(scripts, broken, capsys, monkeypatch, flag):
    """As the training does, before a question is asked."""
    monkeypatch.setattr("builtins.input", typed("Hello.", "quit"))
    assert flag in one_line(scripts["ppo_dialog"], ["chat", f"{broken}/lm", f"--{flag}", "0"], capsys)


def test_chat_with_too_long_answers(scripts, broken, capsys, monkeypatch):
    """A response as long as the model's context leaves no room for a prompt."""
    monkeypatch.setattr("builtins.input", typed("Hello.", "quit"))
    assert "response-length" in one_line(scripts["ppo_dialog"], ["chat", f"{broken}/lm", "--response-length", "300"], capsys)


def test_chat_with_a_run_of_another_script(scripts, sft, monkeypatch):
    """One can talk with what sft.py made: its model, and the flags that both scripts have, or the defaults."""
    _, folder, _ = sft()
    monkeypatch.setattr("builtins.input", typed("quit", "quit"))
    for name in (folder, folder / "model"):
        scripts["ppo_dialog"].main(["chat", str(name)])


@pytest.mark.parametrize("data", ["blank", "alone", "strings", "few-acts", "act-word"])
def test_dialogues_without_a_labelled_turn(scripts, small, broken, capsys, data):
    """A classifier of acts cannot be made of them."""
    args = small("reward_model", dataset_name=f"{broken}/{data}", label_names=",".join(ACTS))
    assert data in one_line(scripts["reward_model"], flags_of(args), capsys)


def test_as_a_process(small, tmp_path):
    """The same from a shell: exit code 2, one line on stderr and nothing else."""
    process = start_process(script_words("ppo_sentiment", small("ppo_sentiment", dataset_name=MISSING)), tmp_path)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2 and len(errors.splitlines()) == 1 and MISSING in errors and not (tmp_path / "run").exists()
