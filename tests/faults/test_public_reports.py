"""Bug reports that were filed against other projects, tried here.

A run is right, or it is refused before training. It never goes on with other weights, prompts or rewards than
those that the user gave.
"""

import csv
import gzip
import json
import shutil
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import accelerate
import datasets
import pytest
import tokenizers
import torch
import transformers
from conftest import ACTS, RL
from run_tools import reward_file, rows_of, spy, weights, write_rows
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import check

pytest_plugins = ["run_fixtures"]
SCRIPT = "ppo_sentiment"
CPU = torch.device("cpu")
Accelerator = accelerate.Accelerator
CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def copy_of(tmp_path):
    """copy_of(folder) -> a copy that a test may damage."""

    def copy(folder):
        return Path(shutil.copytree(folder, tmp_path / "copy"))

    return copy


def refused(module, args, word):
    """True if check.py, and so the script's main, refuses a run with this word."""
    return any(word in text for text in check.errors(module, args))


def chat_model(source, folder):
    """A model and its tokenizer, with a chat template. -> the folder, a str"""
    shutil.copytree(source, folder)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    return str(folder)


# ---- Settings of the model ---------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", [dict(min_p=0.1), dict(pad_token_id=-1), dict(stop_strings=["###"])])
def test_a_generation_config_that_cannot_be_saved_or_used(scripts, small, tiny_lm, copy_of, setting):
    """transformers#29988: settings of sampling without do_sample; and others that would stop the samples at
    the end. Stop tokens stay, the model is saved."""
    folder = copy_of(tiny_lm())
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(config | setting))
    for name in ("sft", "ppo_sentiment"):
        _, run_folder = scripts[name].train(small(name, name, model_name_or_path=str(folder)))
        saved = transformers.GenerationConfig.from_pretrained(run_folder / "model")
        assert saved.eos_token_id in (config["eos_token_id"], [config["eos_token_id"]])


def test_samples_do_not_use_the_settings_of_the_model(scripts, tiny_lm):
    """They are drawn from the model's own distribution."""
    script, tokenizer = scripts["sft"], AutoTokenizer.from_pretrained(tiny_lm())
    samples = []
    for settings in ({}, dict(do_sample=True, temperature=0.01, repetition_penalty=9.0)):
        model = AutoModelForCausalLM.from_pretrained(tiny_lm())
        stop_ids = [tokenizer.eos_token_id]
        model.generation_config = transformers.GenerationConfig(eos_token_id=stop_ids, **settings)
        torch.manual_seed(0)
        samples += script.write_samples(model, tokenizer, [([5, 6, 7], [-100, -100, 7])])
    assert samples[0] == samples[1]


# ---- Nothing that a file lacks is made up ------------------------------------------------------------------


def test_keys_with_a_prefix(script, tiny_lm, copy_of):
    """transformers#46620: a compiled or wrapped model was saved; none of its weights is found."""
    folder = copy_of(tiny_lm())
    tensors = {f"_orig_mod.{name}": x for name, x in weights(folder).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(script.UserError, match="weights are missing from the checkpoint"):
        script.load_model(AutoModelForCausalLM, str(folder))


def test_a_reward_model_without_its_score(scripts, tiny_preference_model, tiny_lm, copy_of, capsys):
    """OpenRLHF#209: the reward would be random. RLOO, as in TRL's first command, says so and goes on."""
    rloo = scripts["rloo_tldr"]
    folder = copy_of(tiny_preference_model())
    tensors = weights(folder)
    del tensors["score.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(rloo.UserError, match="score.weight"):
        rloo.load_reward_model(rloo.Args(), str(folder), CPU)
    rloo.load_reward_model(rloo.Args(), tiny_lm(), CPU)
    assert "random reward head" in capsys.readouterr().out
    for name, load in (("ppo_sentiment", "load_label_scorer"), ("ppo_dialog", "load_classifier")):
        with pytest.raises(scripts[name].UserError, match="score.weight"):
            getattr(scripts[name], load)(scripts[name].Args(), tiny_lm(), CPU)


@pytest.mark.parametrize("names", ["c_attn,c_porj", "c_attn,"])
def test_names_of_lora_layers(script, small, tiny_lm, names):
    """peft#1959: each name must be that of a layer; spaces do not matter."""
    args = small("ppo_sentiment", lora_r=2, lora_target_modules=names)
    wrong = names.removeprefix("c_attn,")
    assert refused(script, args, f"--lora-target-modules {wrong} matches no layer; there are c_")
    args = small("ppo_sentiment", lora_r=2, lora_target_modules="c_attn, c_fc")
    assert check.errors(script, args) == []
    model = script.add_lora(AutoModelForCausalLM.from_pretrained(tiny_lm()), args)
    assert {name.split(".")[-1] for name in model.targeted_module_names} == {"c_attn", "c_fc"}


def test_a_critic_that_cannot_read_left_padding(script, small, tmp_path):
    """RWKV does not know of padding."""
    sizes = dict(vocab_size=1024, hidden_size=8, num_hidden_layers=2, attention_hidden_size=8)
    transformers.RwkvConfig(**sizes).save_pretrained(tmp_path / "rwkv")
    args = small("ppo_sentiment", value_model_path=str(tmp_path / "rwkv"))
    assert refused(script, args, "cannot read left-padded rows")


# ---- Functions and modules of users ------------------------------------------------------------------------


def test_a_function_may_change_its_inputs(script):
    """trl#6364: neither another function, nor another response, nor the data set sees it."""
    nums = [1, 2]  # the same list in both rows, as for two responses to one prompt
    rows = [{"nums": nums}, {"nums": nums}]
    completions = [["x"], ["y"]]

    def cross_off(completions, nums, **kwargs):
        for text, left in zip(completions, nums):
            text.append("seen")
            left.remove(1)
        return [len(left) for left in nums]

    functions = {"first": cross_off, "second": cross_off}
    rewards = script.call_reward_functions(functions, None, CPU, rows, ["a", "b"], completions, [[3], [4]])
    assert rewards["first"].tolist() == rewards["second"].tolist() == [1, 1]
    assert nums == [1, 2] and completions == [["x"], ["y"]]


def test_a_file_behind_a_link(script, tmp_path):
    """The Hub's cache links a file's name to its hash."""
    reward_file(tmp_path, "return [1.0] * len(prompts)", "3f2a9c")
    (tmp_path / "linked_reward.py").symlink_to(tmp_path / "3f2a9c.py")
    assert script.load_functions([f"{tmp_path}/linked_reward.py:reward"])


@pytest.mark.parametrize("name", [*RL, "grpo_tools"])
def test_each_process_has_random_numbers_of_its_own(scripts, small, monkeypatch, name):
    """For reward functions."""
    module, calls, real = scripts[name], [], scripts[name].set_global_seed

    def record(*purpose):
        calls.append(purpose)
        return real(*purpose)

    @contextmanager
    def everything(accelerator, inputs):  # there is no process 7
        yield inputs

    monkeypatch.setattr(module, "set_global_seed", record)
    monkeypatch.setattr(Accelerator, "process_index", 7)
    monkeypatch.setattr(Accelerator, "split_between_processes", everything)
    args = small(name)
    module.train(args)
    assert (args.seed, 1, 7) in calls and (args.seed, 1) not in calls


def test_a_function_that_changes_the_directory(ppo, tmp_path, monkeypatch):
    """The run stays in its folder."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    body = "os.chdir('elsewhere') if os.path.exists('elsewhere') else None\nreturn [1.0] * len(prompts)"
    ppo(output_dir="run", reward_fn=reward_file(tmp_path, body, "moving"))
    assert rows_of(tmp_path / "run") and (tmp_path / "run/model/model.safetensors").exists()


# ---- What the model is trained on is what the user gave ----------------------------------------------------


def test_a_text_that_ends_with_eos(scripts, tiny_lm):
    """Many notebooks add EOS to the data. It is not added again."""
    sft, reward_model = scripts["sft"], scripts["reward_model"]
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm())
    ids = tokenizer(" good").input_ids
    expected = [*ids, tokenizer.eos_token_id]
    responses = [" good", f" good{tokenizer.eos_token}"]
    for text in responses:
        assert sft.make_document({"text": text}, tokenizer, sft.Args(), {}) == (expected, expected)
        row = dict(prompt=" good", completion=text)
        document, labels = sft.make_document(row, tokenizer, sft.Args(), {})
        assert document == ids + expected and labels == [-100] * len(ids) + expected
    assert reward_model.preference_ids(tokenizer, " good", responses, 99) == [ids + expected] * 2


def test_responses_that_begin_with_their_prompt(scripts, small, tiny_lm, tmp_path):
    """In a column of its own, it would be read twice. But a response may quote its prompt."""
    script = scripts["reward_model"]
    row = dict(prompt=CHAT[:1], chosen=CHAT, rejected=[CHAT[0], {"role": "assistant", "content": "No"}])
    lm = chat_model(tiny_lm(), tmp_path / "lm")
    for prompt, is_refused in ((CHAT[:1], True), ([], False)):
        data = write_rows(tmp_path / f"{is_refused}", train=[row | dict(prompt=prompt)] * 9)
        args = small("reward_model", dataset_name=data, model_name_or_path=lm)
        assert refused(script, args, "the responses contain their prompt") == is_refused
        assert len(check.errors(script, args)) == is_refused
    # An empty response leaves its row, and the others stay.
    row = dict(prompt="Who?", responses=["Me.", "", "You."])
    assert script.read_preferences([row]) == [(row, "Who?", ["Me.", "You."])]
    rows = [dict(prompt="Who?", chosen="Who? Me.", rejected="Who? You.")]
    rows += [dict(prompt="Who?", chosen="Me.", rejected="You.")] * 2
    data = write_rows(tmp_path / "quotes", train=rows, test=rows[1:])
    assert check.errors(script, small("reward_model", dataset_name=data)) == []


def test_references_that_begin_with_their_prompt(scripts, small, tiny_pairs, tmp_path):
    """They would be scored, or measured in tokens, with two prompts."""
    row = dict(prompt="Who?", completion="Who? Me.")
    data = write_rows(tmp_path / "data", train=[row] * 3, test=[row])
    args = small("reward_model", dataset_name=tiny_pairs, center_dataset_name=data)
    assert refused(scripts["reward_model"], args, "3 of 3 completions begin with their prompt")
    args = small("dpo_tldr", eval_dataset_name=data)
    assert refused(scripts["dpo_tldr"], args, "1 of 1 completions begin with their prompt")


def test_a_prompt_beside_chats(scripts, tiny_lm):
    """If chosen and rejected hold only the answers, the column prompt is the user's message."""
    script, tokenizer = scripts["reward_model"], AutoTokenizer.from_pretrained(tiny_lm())
    tokenizer.chat_template = CHATML
    user, good, bad = [
        dict(role=x, content=y) for x, y in (("user", "Hi"), *[("assistant", z) for z in "ab"])
    ]
    pairs = [
        dict(prompt="Hi", chosen=[good], rejected=[bad]),
        dict(prompt="Hi", chosen=[user, good], rejected=[user, bad]),
    ]
    first, second = script.load_preference_rows(pairs, tokenizer, script.Args(max_length=200))
    assert first.texts == second.texts
    # An answer, another question and an answer to it do not contain the prompt.
    pair = dict(prompt="Hi", chosen=[good, user, good], rejected=[good, user, bad])
    assert script.find_prompt(pair, [pair["chosen"], pair["rejected"]]) == [user]
    # A system message beside complete chats begins them.
    system = dict(role="system", content="Be kind.")
    pair = dict(prompt=[system], chosen=[user, good], rejected=[user, bad])
    assert script.find_prompt(pair, [pair["chosen"], pair["rejected"]]) == [system]
    assert tokenizer.decode(first.texts[0]) == "<|user|>Hi<|end|><|assistant|>a<|end|>"


def test_special_tokens_of_the_text(script, tiny_lm):
    """trl#2897: a reward that looks for <answer> must see it. BOS, EOS and pad are no text."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<answer>"]})
    response = tokenizer("<answer>5").input_ids + [tokenizer.eos_token_id]
    prompts, responses = script.decode(tokenizer, [tokenizer("2 + 3").input_ids], [response])
    assert prompts == ["2 + 3"] and responses == ["<answer>5"]


# ---- What is read is what is written -----------------------------------------------------------------------

TASK = {"prompt": "1 + 1", "answer": "2", "day": "2024-01-15", "points": 0.7}
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]


@pytest.mark.parametrize("name", ["data/train.jsonl", "train.json", "train_1.json", "anything.jsonl"])
@pytest.mark.parametrize(
    "text", [json.dumps(TASK) + "\n", json.dumps(TASK, indent=1), json.dumps([TASK] * 3)]
)
def test_json_in_other_files(scripts, small, tmp_path, name, text):
    """datasets#8652: its reader makes a timestamp of the day. train.jsonl keeps every value."""
    script, folder = scripts["grpo_math"], tmp_path / "data"
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_text(text)
    assert refused(script, small("grpo_math", dataset_name=str(folder)), str(folder))
    (folder / "train.jsonl").write_text(json.dumps(TASK) + "\n" + json.dumps(TASK | {"points": 1}) + "\n")
    rows, held_out = script.load_splits(str(folder))
    assert [repr(row) for row in held_out + rows] == [repr(TASK), repr(TASK | {"points": 1})]


@pytest.mark.parametrize("column", ["messages", "prompt"])
def test_chats_as_texts(scripts, small, tmp_path, column):
    """A list of messages that was saved as a text would be trained on as it is. Other JSON is a text."""
    turned = [dict(reversed(message.items())) for message in CHAT]
    texts = [json.dumps(CHAT), str(CHAT), json.dumps(turned), json.dumps(CHAT, indent=2)]
    texts += ['[{"id": 7}] Name the id.', "[role] no", "A text."]
    for number, text in enumerate(texts):
        rows = [{"text": "A text."}] * 5 + [{column: text} | {"completion": " No."}]
        data = write_rows(tmp_path / str(number), train=rows, test=rows)
        is_refused = refused(scripts["sft"], small("sft", dataset_name=data), "is a JSON text, not a list")
        assert is_refused == (number < 4), text


TABLE = [
    ["prompt", "answer", "note"],
    ["1 + 1", "007", "None"],
    ["NA", "1.50", "null"],
    ['He said "2, or 3"', "2024-01-15", ""],
    ["two\nlines\r\n", "nan", " x "],
]
AS_WRITTEN = [dict(zip(TABLE[0], line)) for line in TABLE[1:]]


def write_table(path, lines=TABLE):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(lines)


def test_csv_files(script, tmp_path):
    """datasets#4467: its reader makes None of "NA", and 7 of "007". All values are the texts of the file."""
    write_table(tmp_path / "train.csv")
    (tmp_path / "test.csv").write_bytes(b"\xef\xbb\xbfprompt,answer\r\n\r\na,1\r\n")  # as Excel writes it
    train, held_out = script.load_splits(str(tmp_path))
    assert train == AS_WRITTEN and held_out == [dict(prompt="a", answer="1")]


@pytest.mark.parametrize(
    "text", ["a,b\n1\n", "a,b\n1,2,3\n", "a,a\n1,2\n", 'a,b\n1,"2\n3,4\n', 'a,b\n1,"2"3\n'], ids=repr
)
def test_a_csv_file_that_does_not_fit_its_header(script, small, tmp_path, text):
    """A comma or a quote too many would move values, or swallow rows. Of two columns, one would be lost."""
    (tmp_path / "train.csv").write_text(text)
    assert refused(script, small("ppo_sentiment", dataset_name=str(tmp_path)), f"{tmp_path}/train.csv, line ")


def test_a_csv_file_with_an_open_quote(script, tmp_path):
    """Without check.py too: the rest of the file would become one value."""
    (tmp_path / "train.csv").write_text('a,b\n1,"2\n3,4\n')
    with pytest.raises(csv.Error):
        script.read_rows(tmp_path / "train.csv")


@pytest.mark.parametrize("name", ["data/train.csv", "my.csv", "train.tsv", "train.csv.gz"])
def test_csv_in_other_files(scripts, small, tmp_path, name):
    """datasets would read them."""
    folder = tmp_path / "data"
    (folder / name).parent.mkdir(parents=True)
    content = "\n".join(("\t" if name.endswith("tsv") else ",").join(line) for line in TABLE[:3]).encode()
    (folder / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    args = small("grpo_math", dataset_name=str(folder))
    assert refused(scripts["grpo_math"], args, "is read by the csv reader of datasets")


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "csv", "parquet"])
def test_a_data_set_that_is_a_file(script, tmp_path, kind, monkeypatch):
    """It is train, whatever its name and its neighbors; a random tenth is held out."""
    rows = [dict(prompt=f"{i} + 1", answer=str(i + 1)) for i in range(20)]
    path = tmp_path / f"anything.{kind}"
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if kind == "jsonl":
        path.write_text(lines)
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(lines.encode()))
    elif kind == "csv":
        write_table(path, [["prompt", "answer"], *[list(row.values()) for row in rows]])
    else:
        datasets.Dataset.from_list(rows).to_parquet(path)
    (tmp_path / "test.jsonl").write_text(json.dumps(rows[0]) + "\n")
    train, held_out = script.load_splits(str(path))
    assert len(held_out) == 2 and sorted(map(repr, train + held_out)) == sorted(map(repr, rows))
    monkeypatch.chdir(tmp_path)
    assert script.load_splits(path.name) == (train, held_out)


def test_files_of_several_kinds(scripts, small, tmp_path):
    """Each split may be of another kind, but no file is ignored because of another one."""
    script, args = scripts["grpo_math"], small("grpo_math", dataset_name=str(tmp_path))
    write_table(tmp_path / "test.csv")
    (tmp_path / "train.jsonl").write_text(json.dumps(TASK) + "\n")
    assert script.load_splits(str(tmp_path)) == ([TASK], AS_WRITTEN)
    datasets.Dataset.from_list([TASK] * 2).to_parquet(tmp_path / "validation.parquet")
    assert script.load_splits(str(tmp_path)) == ([TASK], AS_WRITTEN)  # test before validation
    (tmp_path / "test.csv").unlink()
    assert script.load_splits(str(tmp_path)) == ([TASK], [TASK] * 2)
    for name in ("train.csv", "train-0.jsonl", "train.jsonl.gz", "validation.jsonl"):
        (tmp_path / name).write_bytes(gzip.compress(b"") if name.endswith("gz") else b"")
        split = name.partition(".")[0].removesuffix("-0")
        assert refused(script, args, f"which file is {split}? "), name
        (tmp_path / name).unlink()
    (tmp_path / "train.jsonl").rename(tmp_path / "train-1.jsonl")
    (tmp_path / "train-0.jsonl").write_text("{}\n")
    assert script.load_splits(str(tmp_path))[0] == [{}, TASK]  # parts of one file


def test_labels_that_are_texts(scripts):
    """Those of a csv file: a number, with --label-names or without. Nothing is no class."""
    script, names = scripts["reward_model"], ["negative", "positive"]

    def classes(labels, **flags):
        return script.find_classes([dict(label=x) for x in labels], script.Args(**flags))

    for label_names in (None, "negative,positive"):
        found, class_of = classes(["1", "", "0", None, "1"], label_names=label_names)
        assert found == (["0", "1"] if label_names is None else names)
        assert [class_of["0"], class_of["1"]] == [0, 1] and "" not in class_of
    assert classes([0, 1], label_names="1,0")[1] | {"0": 1, "1": 0} == classes([0, 1], label_names="1,0")[1]
    for labels, found in (([1, 0], ["0", "1"]), (["b", "a"], ["a", "b"]), ([True, False], ["False", "True"])):
        assert classes(labels)[0] == found


@pytest.mark.parametrize("decimals", [["0.0", "1.0"], ["-.5", "1"], [1e-9, 2e-9]])
def test_decimals_are_no_classes(scripts, small, tmp_path, decimals):
    """A column of scores would be as many classes as it has values."""
    rows = [dict(text=f"A film, number {i}.", label=decimals[i % 2]) for i in range(8)]
    data = write_rows(tmp_path / "data", train=rows, test=rows[:2])
    args = small("reward_model", dataset_name=data)
    assert refused(scripts["reward_model"], args, "the column label has decimals")


@pytest.mark.parametrize(
    "label, word", [("", "label '' is none of"), ("2", "label '2' is none of"), ("1", None)]
)
def test_labels_and_margins_of_a_csv_file(scripts, small, tiny_classifier, tmp_path, label, word):
    """From the file to the numbers that are trained on."""
    script, tokenizer = scripts["reward_model"], AutoTokenizer.from_pretrained(tiny_classifier())
    write_table(tmp_path / "train.csv", [["text", "label"], ["good", "1"], ["bad", "0"], ["so so", label]])
    write_table(tmp_path / "test.csv", [["text", "label"], ["bad", "0"]])
    args = small("reward_model", dataset_name=str(tmp_path), label_names="negative,positive")
    if word is not None:
        assert refused(script, args, word)
        return
    assert check.errors(script, args) == []
    train, held_out, *_ = script.load_data(args, tokenizer)
    assert [row.label for row in train + held_out] == [1, 0, 1, 0]
    pair = dict(prompt="p", chosen=" a", rejected=" b")
    rows = script.load_preference_rows([pair | dict(margin=x) for x in ("0.5", "", "2")], tokenizer, args)
    assert [row.min_difference for row in rows] == [0.5, 0.0, 2.0]


FIRST_COLUMNS = {  # script -> rows
    "sft": dict(prompt="Who?", completion=" Me."),
    "reward_model": dict(prompt="Who?", chosen=" Me.", rejected=" You."),
    "dpo_tldr": dict(prompt="Who?", chosen=" Me.", rejected=" You."),
    "rloo_tldr": dict(prompt="Who?"),
    "grpo_math": dict(prompt="Who?"),
    "ppo_sentiment": dict(text="Who is this, and what does she say in this film?"),
}


@pytest.mark.parametrize("name", FIRST_COLUMNS)
def test_texts_that_begin_with_bos(scripts, small, copy_of, tiny_lm, tmp_path, name):
    """DeepSeek-R1#151: apply_chat_template wrote it, and the tokenizer adds another one."""
    row, folder = FIRST_COLUMNS[name], copy_of(tiny_lm())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    bos, first = tokenizer.bos_token, next(iter(row))
    started = [row | {first: bos + row[first]}]
    if "chosen" in row:  # the responses contain the prompt
        started.append(dict(prompt="", chosen=f"{bos}Who? Me.", rejected=f"{bos}Who? You."))
    if name == "reward_model":
        started.append(dict(text=f"{bos}Me.", label=1))
    flags = dict(model_name_or_path=str(folder))
    if name == "dpo_tldr":
        flags |= dict(eval_dataset_name=None, judge_fn=None)

    def is_refused(number, rows):
        if "label" in rows[0]:
            rows = [dict(text="You.", label=0), *rows]
        data = write_rows(tmp_path / str(number), train=rows, test=rows)
        return refused(scripts[name], small(name, dataset_name=data, **flags), "begins with BOS twice")

    assert not any(is_refused(f"none {i}", [started[i]]) for i in range(len(started)))
    tokenizer._tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
    tokenizer.save_pretrained(folder)
    assert not is_refused("right", [row])
    for number, example in enumerate(started):
        others = [] if "label" in example else [row]
        assert is_refused(f"twice {number}", [*others, example])


def test_a_part_of_a_sorted_file(scripts, small, tmp_path, monkeypatch):
    """The reviews of IMDB are sorted by label. Neither held-out rows nor --num-train-rows take one end."""
    rows = [dict(text=f"{'bad' if i < 50 else 'good'} film number {i}", label=i // 50) for i in range(100)]
    script, calls = scripts["sft"], spy(monkeypatch, scripts["sft"], "load_documents")
    _, held_out = script.load_splits(write_rows(tmp_path / "train only", train=rows))
    assert {row["label"] for row in held_out} == {0, 1}
    data = write_rows(tmp_path / "data", train=rows, test=rows[:5])
    script.train(small("sft", dataset_name=data, num_train_rows=20))
    (train, *_), _ = [inputs for inputs, _ in calls]
    assert len(train) == 20 and 4 < sum(row["label"] for row in train) < 16


# ---- Reward functions: what they get, and what they may do -------------------------------------------------


def test_a_column_with_the_name_of_an_argument(script):
    """It would be replaced. TRL raises a TypeError, too."""
    call = partial(script.call_reward_functions, {"f": lambda **inputs: [1.0]}, None, CPU)
    for column in ("prompts", "completions", "completion_ids", "trainer_state"):
        with pytest.raises(TypeError, match=f"multiple values for keyword argument '{column}'"):
            call([{column: "x"}], ["a"], ["b"], [[3]])
    assert call([dict(prompt="x", completion="y")], ["a"], ["b"], [[3]])["f"] == 1


def test_a_begun_answer_is_whole_for_rewards(scripts):
    """trl#6966: functions get the beginning with the rest, as in TRL, and the prompt ends with the user."""
    script, seen = scripts["grpo_math"], {}
    begun = [CHAT[0], {"role": "assistant", "content": "<answer>"}]
    examples = [dict(prompt=prompt, columns={}) for prompt in (begun, CHAT[:1])]
    function = lambda **inputs: seen.update(inputs) or [0.0, 0.0]  # noqa: E731
    script.score_responses({"f": function}, None, CPU, examples, ["6</answer>", "6"], [[3], [4]])
    assert [texts[0]["content"] for texts in seen["completions"]] == ["<answer>6</answer>", "6"]
    assert seen["prompts"] == [CHAT[:1]] * 2 and begun[-1]["role"] == "assistant"


# ---- Evaluation --------------------------------------------------------------------------------------------


def test_words_of_scripts_without_spaces(script):
    """Each character is a word. Other languages are split at spaces."""
    for text in ("今天天气很好天气", "きょうはよい", "สวัสดีครับ", "今天 天气"):
        letters = " ".join(text.replace(" ", ""))
        assert script.distinct_bigrams([text]) == script.distinct_bigrams([letters]) > 0
    assert script.distinct_bigrams(["Привет, мир! Привет, мир!"]) == 2 / 3


def test_meteor_of_scripts_without_spaces(scripts):
    meteor = scripts["ppo_dialog"].load_meteor()
    assert meteor("今天天气很好", "今天天气很好") > 0.98 > meteor("今天天气很好", "今天很好") > 0.3
    assert meteor("你好", "再见") == 0


@pytest.mark.parametrize("thought", ["", "<think>\nA is short. B is long.\n</think>\n\n", "A or B?</think>"])
def test_a_judge_that_thinks_first(scripts, chat_with, thought):
    """inspect_ai#3259: the thought is no verdict. An answer that was cut off is none either."""
    script = scripts["rloo_tldr"]
    posts = [dict(prompt="A post.", reference=" theirs")] * 8
    for end, verdicts in (("A", {0.0, 1.0}), ("A is...", set()), ("", set())):
        flags, _ = chat_with(lambda question, end=end: thought + end)
        judge = script.load_judge(script.Args(**flags), None, None, CPU)
        found = judge(posts, [" ours"] * 8)
        assert set(found[~found.isnan()].tolist()) == verdicts


@pytest.mark.parametrize("name", ["ppo_sentiment", "rloo_tldr"])
def test_a_score_is_the_same_in_all_files(scripts, small, tmp_path, name):
    """In samples.jsonl as in evaluation_samples.jsonl: what the reward gave, before clip and penalty."""
    flags = dict(reward_fn=reward_file(tmp_path, "return [5.0] * len(prompts)", "five"), score_clip=1.0)
    _, folder = scripts[name].train(small(name, missing_eos_penalty=1.0, **flags))
    assert {row["score"] for row in rows_of(folder, "samples.jsonl")} == {5.0}
    held_out = rows_of(folder, "evaluation_samples.jsonl")
    assert {row[name] for row in held_out for name in ("score", "score after")} == {5.0}
    assert rows_of(folder)[0]["objective/scores"] <= 1.0


def test_the_kl_before_the_first_step(grpo):
    """It is 0: both log-probabilities are of a forward pass over whole responses."""
    _, _, rows = grpo(num_mini_batches=1, num_ppo_epochs=1, gradient_accumulation_steps=2)
    assert rows[0]["objective/kl"] == 0 != rows[-1]["objective/kl"]


# ---- The environment changes nothing -----------------------------------------------------------------------


def test_two_runs_in_one_folder(script, small):
    """trl#6947: the second one is refused, even if both found the folder empty."""
    args = small("ppo_sentiment")
    runs = [script.Run(args, script.start_accelerator(args), 1, {}) for _ in range(2)]
    runs[0].start(4)
    with pytest.raises(FileExistsError):
        runs[1].start(4)
    with pytest.raises(script.UserError, match="holds a run"):
        script.Run(args, script.start_accelerator(args), 1, {})
    unnamed = replace(args, output_dir=None)
    names = {script.Run(unnamed, script.start_accelerator(args), 1, {}).name for _ in range(9)}
    assert len(names) == 9


def test_a_resumed_run_keeps_its_beginning(script, small, monkeypatch):
    """KempnerForge#19: one run of Weights & Biases, not two."""
    started = []
    monkeypatch.setattr(
        Accelerator, "init_trackers", lambda self, *inputs: started.append(inputs[2]["wandb"])
    )
    args = small("ppo_sentiment", log_with="wandb", num_sample_generations=0)
    abouts = []
    for flags in ([], ["--resume", args.output_dir, "--total-episodes", "16"]):
        monkeypatch.setattr(script.sys, "argv", ["ppo_sentiment.py", *flags])
        script.train(script.parse_args(flags) if flags else args)
        abouts.append(json.loads((Path(args.output_dir) / "args.json").read_text()))
    assert [len(about["command"]) for about in abouts] == [1, 5]
    assert abouts[1]["args"]["total_episodes"] == 16
    assert started[0]["id"] == started[1]["id"] == abouts[0]["id"] and started[1]["resume"] == "allow"
    other = replace(args, output_dir=args.output_dir + "2")
    script.train(other)
    assert started[2]["id"] != started[0]["id"]


SIZES = dict(vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
SIZES |= dict(num_key_value_heads=2, intermediate_size=32, initializer_range=0.3)


def model_of(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


# ---- Data --------------------------------------------------------------------------------------------------


VALUES = [
    dict(x=72, y="2024-01-15", z=[1]),
    dict(x=3.5, y=None, z=[2.5, "7"]),
    dict(x="7", y='{"a": 1}', w={"a": "true"}),
]


@pytest.mark.parametrize("name", ["train.jsonl", "train.jsonl.gz", "train-00000-of-00002.jsonl"])
def test_values_stay_as_they_are(script, tmp_path, name):
    """No 1 becomes 1.0, and no text a date. What editors leave next to a file is no part of the split."""
    for number, file in enumerate([name, f"{name}~", f"{name}.bak", "train-2.jsonl.tmp"]):
        rows = VALUES if number == 0 else [dict(x="of a backup")]
        lines = "\n\n".join(map(json.dumps, rows)).encode()
        (tmp_path / file).write_bytes(gzip.compress(lines) if file.endswith("gz") else lines)
    (tmp_path / "test.jsonl").write_text(json.dumps(VALUES[0]))
    train, held_out = script.load_splits(str(tmp_path))
    assert repr(train) == repr(VALUES) and repr(held_out) == repr(VALUES[:1])


def test_names_of_labels(scripts, tmp_path):
    """Spaces around them do not count."""
    script = scripts["reward_model"]
    rows = [dict(text="a", label=0), dict(text="b", label=1)]
    names, _ = script.find_classes(rows, script.Args(label_names="negative, positive"))
    assert names == ["negative", "positive"]


# ---- Tokenizers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_side_to_cut_is_saved(scripts, tiny_classifier, tmp_path, side):
    """An answer at the end of a dialog must survive, in plain transformers too."""
    script = scripts["reward_model"]
    model = AutoModelForSequenceClassification.from_pretrained(tiny_classifier())
    tokenizer = AutoTokenizer.from_pretrained(tiny_classifier())
    tokenizer.truncation_side = side
    tokenizer("word")  # forgets what an earlier call has cut
    script.save_reward_model(model, tokenizer, script.Args(max_length=4), tmp_path)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    ids = saved("one two three four five", add_special_tokens=False).input_ids
    cut = saved("one two three four five", add_special_tokens=False, truncation=True).input_ids
    assert cut == (ids[-4:] if side == "left" else ids[:4])


def test_the_side_to_cut_is_that_of_the_data(scripts, tiny_pairs, tiny_classifier, small_folder):
    """Texts with a label lose their end, everything else its beginning, whatever the tokenizer came with."""
    script = scripts["reward_model"]
    tokenizer = AutoTokenizer.from_pretrained(tiny_classifier())
    folders = {"left": (tiny_pairs, small_folder("dialogs")), "right": (small_folder("reviews"),)}
    for side, of_side in folders.items():
        for folder in of_side:
            tokenizer.truncation_side = "right" if side == "left" else "left"
            names = None if folder == tiny_pairs else ",".join(ACTS[: 2 if side == "right" else 4])
            script.load_data(script.Args(dataset_name=folder, label_names=names), tokenizer)
            assert tokenizer.truncation_side == side


@pytest.fixture
def eos_appender(tiny_lm, copy_of):
    """A language model whose tokenizer appends EOS to every text, and whose pad is EOS."""
    folder = copy_of(tiny_lm("gpt2", "eos"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    eos = tokenizer.eos_token
    tokenizer._tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"$A {eos}", special_tokens=[(eos, tokenizer.eos_token_id)]
    )
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_reward_model_whose_tokenizer_appends_eos(scripts, small, reward, eos_appender, tiny_pairs):
    """With preferences, EOS would stand between prompt and response. With labels, transformers must not take
    the EOS of a text for a pad."""
    args = small("reward_model", model_name_or_path=eos_appender, dataset_name=tiny_pairs)
    assert refused(scripts["reward_model"], args, "appends EOS")
    _, folder, _ = reward("labels", model_name_or_path=eos_appender, num_train_epochs=0.1)
    assert transformers.AutoConfig.from_pretrained(folder / "model").pad_token_id is None


# ---- Models ------------------------------------------------------------------------------------------------


def test_rope_that_changes_with_the_length(script, small, tiny_lm, tmp_path):
    """Phi-3's longrope has other factors for long texts; keys in the cache have those of short ones. The
    first batch shows it."""
    rope = dict(rope_type="longrope", short_factor=[1.0] * 8, long_factor=[4.0] * 8, rope_theta=1e4)
    config = transformers.Phi3Config(
        **SIZES | dict(vocab_size=1024),
        max_position_embeddings=256,
        original_max_position_embeddings=32,
        pad_token_id=0,
        rope_parameters=rope | dict(original_max_position_embeddings=32),
    )
    model_of(config).save_pretrained(tmp_path / "phi")
    AutoTokenizer.from_pretrained(tiny_lm()).save_pretrained(tmp_path / "phi")
    flags = dict(model_name_or_path=str(tmp_path / "phi"), stop_token=None)
    script.train(small("ppo_sentiment", "short", response_min_length=20, response_length=20, **flags))
    with pytest.raises(AssertionError, match="sampling and update differ"):
        script.train(small("ppo_sentiment", response_min_length=60, response_length=60, **flags))


def test_noise_of_a_router(scripts, tmp_path):
    """Mixtral's jitter, in train mode."""
    config = transformers.MixtralConfig(**SIZES, num_local_experts=2, router_jitter_noise=0.5)
    model_of(config).save_pretrained(tmp_path)
    script = scripts["sft"]
    model = script.load_model(AutoModelForCausalLM, str(tmp_path)).train()
    ids = torch.arange(2, 20).view(2, 9)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, model(ids).logits)


def test_a_classifier_that_looks_to_its_right(scripts):
    """Gemma 3's text model may be bidirectional. Then it must not read the pads."""
    flags = dict(use_bidirectional_attention=True, num_labels=1)
    config = transformers.Gemma3TextConfig(**SIZES, head_dim=16, **flags)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    script, texts = scripts["rloo_tldr"], [[5, 7, 9], [*range(20, 29)], [*range(40, 46)]]
    found = script.score_tokens(model, texts, 3)
    alone = torch.stack([script.score_tokens(model, [text], 1)[0] for text in texts])
    torch.testing.assert_close(found, alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("change", [dict(architectures=None), dict(architectures=["GPT2Model"])])
def test_a_head_in_spite_of_the_config(scripts, world, copy_of, change):
    """The file has the head, so it is used, whatever the config says."""
    script = scripts["rloo_tldr"]
    folder = copy_of(world.preference_model())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    expected = script.load_reward_model(script.Args(dtype="float32"), world.preference_model(), CPU)
    found = script.load_reward_model(script.Args(dtype="float32"), str(folder), CPU)
    texts = ["A sun."], [" It shines."]
    assert found(*texts) == expected(*texts)
