"""Preferences in reward_model.py: pairs, rankings, margins, the new head, the offset and the saved model."""

import json
import math
from functools import partial

import peft
import pytest
import torch
from conftest import EOS, PAD
from run_tools import rows_of, weights, write_rows
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

pytest_plugins = ["run_fixtures"]
CHOSEN = [" yes, it is", " a fine day", " all is well"]
REJECTED = [" no no no no", " who knows what", " bad"]


@pytest.fixture
def script(scripts):
    return scripts["reward_model"]


@pytest.fixture
def pairs(reward, tiny_lm, tiny_pairs):
    """pairs(folder="run", **changes): a run on pairs. -> model, folder, rows of metrics"""
    flags = dict(model_name_or_path=tiny_lm("gpt_neox"), dataset_name=tiny_pairs, max_length=200)
    return lambda folder="run", **changes: reward(folder, **flags | changes)


def evaluation_of(folder):
    """evaluation.json of a run."""
    return json.loads((folder / "evaluation.json").read_text())


def score(folder, prompt, response):
    """The score of one text, by transformers alone."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt).input_ids + tokenizer(response).input_ids + [tokenizer.eos_token_id]
    model.config.pad_token_id = None
    with torch.no_grad():
        return model(torch.tensor([ids])).logits.item()


# ---- Learning ----------------------------------------------------------------------------------------------


def test_pairs_are_learned(pairs, tiny_pairs, tmp_path):
    """Overfitting orders 16 pairs. The result is a plain transformers classifier with one label."""
    pairs_of_data = rows_of(tiny_pairs, "train.jsonl")[:16]
    data = write_rows(tmp_path / "data", train=pairs_of_data, test=pairs_of_data)
    flags = dict(num_train_epochs=30.0, learning_rate=3e-3, lr_scheduler_type="cosine")
    _, folder, rows = pairs(dataset_name=data, **flags)
    first, last = rows[0], rows[-1]
    assert first["loss"] == pytest.approx(math.log(2), abs=0.4)
    assert last["accuracy"] == 1 and last["loss"] < 0.1 and last["margin"] > 2
    assert last["min_reward"] < last["mean_reward"] < last["max_reward"]
    row = pairs_of_data[0]
    chosen = score(folder / "model", row["prompt"], row["chosen"])
    assert chosen > score(folder / "model", row["prompt"], row["rejected"]) + 1
    assert AutoModelForSequenceClassification.from_pretrained(folder / "model").config.num_labels == 1


def test_pairs_with_a_common_beginning(pairs, tmp_path):
    """As in HH, the two texts begin with the prompt. They are learned as if the prompt had its own column."""
    joined, separate = [], []
    for chosen, rejected in zip(CHOSEN, REJECTED):
        joined.append(dict(chosen=f"Human: hi{chosen}", rejected=f"Human: hi{rejected}"))
        separate.append(dict(prompt="Human: hi", chosen=chosen, rejected=rejected))
    flags = dict(num_train_epochs=20.0, learning_rate=3e-3)
    data = write_rows(tmp_path / "hh", train=joined * 4, test=joined)
    _, folder, rows = pairs(dataset_name=data, **flags)
    assert rows[-1]["accuracy"] == evaluation_of(folder)["accuracy"] == 1
    assert evaluation_of(folder)["n"] == 3
    data = write_rows(tmp_path / "split", train=separate * 4, test=separate)
    _, _, others = pairs("split", dataset_name=data, **flags)
    losses = [row["loss"] for row in rows]
    assert [row["loss"] for row in others] == pytest.approx(losses, rel=1e-3, abs=1e-4)


def test_rankings(pairs, tmp_path):
    """2 to 4 responses, best first: all pairs are learned."""
    rows = [
        dict(prompt="Say.", responses=[" aa", " bb", " cc", " dd"]),
        dict(prompt="Go on.", responses=[" b", " a", " c"]),
        dict(prompt="Well?", responses=[" yes", " no"]),
    ]
    data = write_rows(tmp_path / "data", train=rows * 4, test=rows)
    flags = dict(num_train_epochs=20.0, learning_rate=3e-3, per_device_train_batch_size=6)
    _, folder, metrics = pairs(dataset_name=data, **flags)
    assert metrics[-1]["accuracy"] == pytest.approx(1) and metrics[-1]["loss"] < 0.2
    evaluation = evaluation_of(folder)
    assert evaluation["accuracy"] == pytest.approx(1) and evaluation["n"] == 3
    assert sum(row["pairs"] for row in evaluation["calibration"]) == 6 + 3 + 1
    scores = [score(folder / "model", "Say.", text) for text in rows[0]["responses"]]
    assert scores == sorted(scores, reverse=True)


def test_an_encoder_learns_from_pairs(pairs, tiny_classifier, capsys):
    """DistilBERT, whose head with two labels is replaced by a head with one score."""
    _, folder, rows = pairs(model_name_or_path=tiny_classifier(), num_train_epochs=0.5)
    assert AutoModelForSequenceClassification.from_pretrained(folder / "model").config.num_labels == 1
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert "a new head" in capsys.readouterr().out


# ---- Token ids ---------------------------------------------------------------------------------------------


def test_all_stages_tokenize_alike(scripts, tiny_lm, small):
    """Tricks 7 and 9: three scripts read the same ids for a prompt and a finished completion."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm())
    prompt, completion = "A post about a dog.\n\nTL;DR:", " My dog barks. What now?"
    rows = [dict(prompt=prompt, completion=completion)]
    [(trained, _)], _ = scripts["sft"].load_documents(rows, tokenizer, small("sft"))
    [scored] = scripts["reward_model"].preference_ids(tokenizer, prompt, [completion], 100)
    [post] = scripts["rloo_tldr"].load_posts(rows, tokenizer, small("rloo_tldr"))
    completion_ids = tokenizer(completion).input_ids + [tokenizer.eos_token_id]
    assert list(trained) == scored == post["ids"] + completion_ids


def test_a_prompt_is_cut_once_per_row(script, tiny_lm):
    """All texts of a row lose as many tokens of the prompt as the longest must. BOS and EOS stay."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm())
    prompt, responses = "one two three four five six", [" seven", " eight nine ten", " a"]
    whole = script.preference_ids(tokenizer, prompt, responses, 100)
    longest = max(map(len, whole))
    cut = script.preference_ids(tokenizer, prompt, responses, longest - 3)
    assert cut == [ids[3:] for ids in whole]
    assert script.preference_ids(tokenizer, prompt, responses, longest) == whole
    bos = tokenizer.bos_token_id
    assert script.preference_ids(tokenizer, EOS + prompt, responses, longest - 3) == [
        [bos, *ids[4:]] for ids in whole
    ]
    # What is longer than max_length without its prompt loses more.
    for ids, all_ids in zip(script.preference_ids(tokenizer, prompt, responses, 4), whole, strict=True):
        assert len(ids) <= 4 and ids == all_ids[-len(ids) :]
        assert ids[-1] == tokenizer.eos_token_id


def test_an_encoder_keeps_its_marks(script, tiny_lm):
    """Its tokenizer writes [CLS] and [SEP] itself."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm())
    tokenizer.cls_token = PAD  # as an encoder's tokenizer has one
    [ids] = script.preference_ids(tokenizer, "one two three four five six", [" seven"], 4)
    assert len(ids) == 4 and tokenizer.decode(ids).endswith("seven")


def test_pairs_that_are_equal_after_the_cut(pairs, script, tiny_lm, tmp_path, capsys):
    """They leave, and the run says how many there are, and how many prompts were cut."""
    rows = [
        dict(prompt="Say.", chosen=" Yes" + " and so on" * 20, rejected=" No" + " and so on" * 20),
        dict(prompt="Say.", chosen=" no", rejected=" no"),
        dict(prompt="Say it" + " again" * 20, chosen=" a", rejected=" b"),
        dict(prompt="Say.", responses=[" a", " b", " a"]),
    ]
    data = write_rows(tmp_path / "data", train=rows, test=rows[2:])
    pairs(dataset_name=data, max_length=16, num_train_epochs=0.1)
    lines = capsys.readouterr().out
    assert "training: 2 of 4 rows, 1 at the limit of 16 tokens, 3 pairs of equal texts left out" in lines
    assert "held out: 2 of 2 rows, 1 at the limit of 16 tokens, 1 pairs of equal texts left out" in lines


# ---- Errors ------------------------------------------------------------------------------------------------

CHATS = dict(chosen=[dict(role="user", content="b")], rejected=[dict(role="user", content="c")])
BAD_ROWS = {
    "no rejected": (dict(prompt="a", chosen="b"), "UserError", "its columns are prompt, chosen"),
    "one response": (dict(prompt="a", responses=["b"]), "UserError", "two different responses"),
    "empty": (dict(prompt="a", chosen="", rejected="b"), "UserError", "two different responses"),
    "equal": (dict(prompt="a", chosen="b", rejected="b"), "UserError", "two different responses"),
    "no template": (CHATS, "ValueError", "chat_template"),
    "a chat before texts": (
        CHATS | dict(prompt=CHATS["chosen"], chosen="a", rejected="b"),
        "ValueError",
        "type",
    ),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_rows_are_explained(pairs, script, tmp_path, name):
    row, error, word = BAD_ROWS[name]
    data = write_rows(tmp_path / "data", train=[row] * 8)
    with pytest.raises(Exception, match=word) as caught:
        pairs(dataset_name=data)
    assert caught.type.__name__ == error


# ---- Head and offset ---------------------------------------------------------------------------------------


@pytest.fixture
def build(script, tiny_lm):
    """build(folder, labels=None) -> what build_classifier makes of a model, and whether its head is new"""
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm())

    def run(folder, labels=None):
        args = script.Args(model_name_or_path=str(folder), max_length=64)
        return script.build_classifier(args, tokenizer, [], labels)

    return run


def test_a_head_of_another_size_is_replaced(build, tiny_lm, tmp_path):
    """A decoder with 2 labels gets a new head for pairs, with the standard deviation of a new head."""
    config = AutoConfig.from_pretrained(tiny_lm("llama"), num_labels=2)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    model, is_new = build(tmp_path)
    assert is_new and model.score.weight.shape == (1, 32)
    assert model.score.weight.std().item() == pytest.approx(33**-0.5, rel=0.4)
    _, is_new = build(tmp_path, ["bad", "good"])
    assert not is_new


def test_standard_deviation_of_a_new_head(script, build, tiny_lm, tmp_path):
    """1 / sqrt(d + 1) for a language model. A head that was saved is kept (trick 35)."""
    config = AutoConfig.from_pretrained(
        tiny_lm("gpt_neox"), hidden_size=512, num_hidden_layers=1, intermediate_size=64
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "lm")
    load = partial(script.load_model, AutoModelForSequenceClassification)
    with pytest.raises(script.UserError, match="missing from the checkpoint, such as score.weight"):
        load(str(tmp_path / "lm"), num_labels=1)
    model, is_new = build(tmp_path / "lm")
    assert is_new and model.score.weight.std().item() == pytest.approx(513**-0.5, rel=0.15)
    model.save_pretrained(tmp_path / "rm")
    again, is_new = build(tmp_path / "rm")
    assert not is_new and torch.equal(again.score.weight, model.score.weight)


@pytest.mark.parametrize("task", ["SEQ_CLS", None])
def test_a_run_can_start_from_an_adapter(build, tiny_lm, tmp_path, task):
    """peft saves the head with a classifier's adapter (trick 35). Those that our scripts save have none."""
    auto_class = AutoModelForSequenceClassification if task == "SEQ_CLS" else AutoModelForCausalLM
    model = auto_class.from_pretrained(tiny_lm("llama"), **dict(num_labels=1) if task == "SEQ_CLS" else {})
    config = peft.LoraConfig(task_type=task, r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(model, config)
    if task == "SEQ_CLS":
        model.base_model.model.score.modules_to_save["default"].weight.data.fill_(0.5)
    model.save_pretrained(tmp_path)
    built, is_new = build(tmp_path)
    assert is_new == (task is None) and (built.score.weight == 0.5).all() != is_new
    merged = model.merge_and_unload().base_model.state_dict()
    for name, x in built.base_model.state_dict().items():
        torch.testing.assert_close(x, merged[name])


@pytest.mark.parametrize("references", ["given", "chosen"])
def test_references_have_the_mean_score_0(pairs, scripts, tiny_posts, tiny_pairs, references):
    """Trick 24: after reloading. References are --center-dataset-name, or else the chosen responses."""
    if references == "given":
        data, column = tiny_posts, "completion"
        _, folder, _ = pairs(center_dataset_name=data, max_length=256)
    else:
        data, column = tiny_pairs, "chosen"
        _, folder, _ = pairs(max_length=256)  # nothing is cut
    rows = rows_of(data, "train.jsonl")
    script = scripts["rloo_tldr"]
    score_all = script.load_reward_model(script.Args(), str(folder / "model"), torch.device("cpu"))
    scores = score_all([row["prompt"] for row in rows], [row[column] for row in rows])
    assert sum(scores) / len(scores) == pytest.approx(0, abs=1e-4)
    offset = json.loads((folder / "model/config.json").read_text())["reward_offset"]
    assert offset == pytest.approx(evaluation_of(folder)["reward_offset"]) and abs(offset) > 1e-3
    alone = score(folder / "model", rows[0]["prompt"], rows[0][column])
    assert scores[0] == pytest.approx(alone - offset, abs=1e-4)


# ---- Options -----------------------------------------------------------------------------------------------


def test_lora_trains_adapter_and_head(pairs, script, tiny_lm):
    """The head has no adapter: it is trained as a whole. The saved model is merged and has its head."""
    _, folder, rows = pairs(lora_r=4, learning_rate=5e-2)
    assert len(rows) == 6
    state = load_file(folder / "checkpoints/000006/trained.safetensors")
    assert [name for name in state if "score" in name] == ["model.score.weight"]
    assert any("lora_" in name for name in state)
    before, after = weights(tiny_lm("gpt_neox")), weights(folder / "model")
    assert "score.weight" in after
    assert not (folder / "model/adapter_config.json").exists()
    with_adapter = "gpt_neox.layers.0.attention.dense.weight"
    assert not torch.equal(before[with_adapter], after[with_adapter])
    assert torch.equal(before["gpt_neox.embed_in.weight"], after["gpt_neox.embed_in.weight"])


def test_gradient_checkpointing_changes_nothing(pairs):
    """Also with LoRA."""
    losses = []
    for number, flag in enumerate((False, True)):
        _, _, rows = pairs(f"run{number}", lora_r=4, gradient_checkpointing=flag)
        losses.append([row["loss"] for row in rows])
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
