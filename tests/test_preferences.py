"""Preferences in reward_model.py: pairs, rankings, margins, the head, the offset, and what plain transformers makes of the result."""

import json
import math

import peft
import pytest
import torch
from run_tools import distance, spy, weights, write_rows
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

pytest_plugins = ["run_fixtures"]
EOS = "<|endoftext|>"
GOOD, BAD = [" yes, it is", " a fine day", " all is well"], [" no no no no", " who knows what", " bad"]


@pytest.fixture
def script(scripts):
    return scripts["reward_model"]


@pytest.fixture
def pairs(reward, tiny_lm, tiny_pairs):
    """pairs(folder="run", **changes): a run from a language model, on prompt, chosen, rejected. -> model, folder, rows of metrics"""

    def run(folder="run", **changes):
        return reward(folder, **(dict(model_name_or_path=tiny_lm("gpt_neox"), dataset_name=tiny_pairs, max_length=200) | changes))

    return run


def numbers_of(folder):
    return json.loads((folder / "evaluation.json").read_text())


def score(folder, prompt, response):
    """By transformers alone, one text at a time."""
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt).input_ids + tokenizer(response).input_ids + [tokenizer.eos_token_id]
    model.config.pad_token_id = None
    with torch.no_grad():
        return model(torch.tensor([ids])).logits.item()


# ---- Columns ---------------------------------------------------------------------------------------------------------
def test_pairs_are_learned(pairs, tiny_pairs):
    """Overfitting some pairs orders them all, and the result is a plain transformers classifier with one label."""
    _, folder, rows = pairs(num_train_epochs=30.0, learning_rate=3e-3, lr_scheduler_type="cosine")
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=0.4) and rows[-1]["accuracy"] == 1 and rows[-1]["loss"] < 0.1
    assert rows[-1]["margin"] > 2 and rows[-1]["min_reward"] < rows[-1]["mean_reward"] < rows[-1]["max_reward"]
    row = json.loads(open(f"{tiny_pairs}/train.jsonl").readline())
    assert score(folder / "model", row["prompt"], row["chosen"]) > score(folder / "model", row["prompt"], row["rejected"]) + 1
    assert AutoModelForSequenceClassification.from_pretrained(folder / "model").config.num_labels == 1


def test_loss_of_a_pair_by_hand(pairs, tmp_path, tiny_lm):
    """The first loss is -log sigmoid of the difference of two scores, each computed alone; a margin is subtracted."""
    rows = [dict(prompt="A post.", chosen=" good one", rejected=" bad", margin=1.5)]
    data = write_rows(tmp_path / "data", train=rows * 4, test=rows)
    start, _, _ = pairs("start", dataset_name=data, learning_rate=0.0, per_device_train_batch_size=4)
    folder = tmp_path / "start/model"
    difference = score(folder, "A post.", " good one") - score(folder, "A post.", " bad")
    _, _, metrics = pairs("again", dataset_name=data, model_name_or_path=str(folder), learning_rate=0.0, per_device_train_batch_size=4)
    assert metrics[0]["loss"] == pytest.approx(math.log1p(math.exp(1.5 - difference)), rel=1e-4)
    assert metrics[0]["margin"] == pytest.approx(difference, rel=1e-3, abs=1e-5)


def test_pairs_with_a_common_beginning(pairs, tmp_path):
    """As HH: chosen and rejected hold the whole dialogue; the scores are those of the same texts with a prompt of their own."""
    whole = [dict(chosen=f"Human: hi{g}", rejected=f"Human: hi{b}") for g, b in zip(GOOD, BAD)]
    data = write_rows(tmp_path / "hh", train=whole * 4, test=whole)
    _, folder, rows = pairs(dataset_name=data, num_train_epochs=20.0, learning_rate=3e-3)
    assert rows[-1]["accuracy"] == 1 and numbers_of(folder)["accuracy"] == 1 and numbers_of(folder)["n"] == 3
    split = [dict(prompt="Human: hi", chosen=g, rejected=b) for g, b in zip(GOOD, BAD)]
    data = write_rows(tmp_path / "split", train=split * 4, test=split)
    _, _, others = pairs("split", dataset_name=data, num_train_epochs=20.0, learning_rate=3e-3)
    assert [row["loss"] for row in others] == pytest.approx([row["loss"] for row in rows], rel=1e-3, abs=1e-4)


def test_rankings(pairs, script, tmp_path, monkeypatch):
    """K responses, best first, of unequal number: all of a prompt in one forward, the mean over its pairs as loss, all pairs learned."""
    rows = [dict(prompt="Say.", responses=[" aa", " bb", " cc", " dd"]), dict(prompt="Go on.", responses=[" b", " a", " c"]),
            dict(prompt="Well?", responses=[" yes", " no"])]  # fmt: skip
    data = write_rows(tmp_path / "data", train=rows * 4, test=rows)
    calls = spy(monkeypatch, script, "ranking_loss")
    flags = dict(num_train_epochs=20.0, learning_rate=3e-3, per_device_train_batch_size=6)
    _, folder, metrics = pairs(dataset_name=data, **flags)
    assert {args[0].shape[0] for args, _ in calls} == {6} and max(args[0].shape[1] for args, _ in calls) == 4
    assert metrics[-1]["accuracy"] == 1 and metrics[-1]["loss"] < 0.2
    numbers = numbers_of(folder)
    assert numbers["accuracy"] == 1 and numbers["n"] == 3 and sum(row["pairs"] for row in numbers["calibration"]) == 6 + 3 + 1
    wanted = [" aa", " bb", " cc", " dd"]
    scores = [score(folder / "model", "Say.", text) for text in wanted]
    assert scores == sorted(scores, reverse=True)


def test_missing_columns_are_named(script, small, tmp_path, tiny_lm):
    data = write_rows(tmp_path / "data", train=[dict(prompt="a", chosen="b")] * 8)
    with pytest.raises(script.UserError, match="chosen and rejected"):
        script.train(small("reward_model", dataset_name=data, model_name_or_path=tiny_lm()))
    for name, row, word in (("margin", dict(prompt="a", chosen="b", rejected="c", margin="1"), "margin"),
                            ("both", dict(prompt="a", responses=["b", "c"], margin=1.0), "margin"),
                            ("messages", dict(prompt="a", chosen=[dict(content="b")], rejected=[dict(content="c")]), "strings")):
        data = write_rows(tmp_path / name, train=[row] * 8)
        with pytest.raises(script.UserError, match=word):
            script.train(small("reward_model", dataset_name=data, model_name_or_path=tiny_lm()))
    data = write_rows(tmp_path / "empty", train=[dict(prompt="a", chosen="", rejected="b")] * 8)
    with pytest.raises(script.UserError, match="two responses"):
        script.train(small("reward_model", dataset_name=data, model_name_or_path=tiny_lm()))


# ---- Tokens ----------------------------------------------------------------------------------------------------------
def test_one_rule_of_tokens_in_all_stages(scripts, tiny_lm, small):
    """Tricks 7 and 9: sft.py, reward_model.py and rloo_tldr.py see the same ids for a prompt and a completion that ended."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm())
    prompt, completion = "A post about a dog.\n\nTL;DR:", " My dog barks. What now?"
    rows = scripts["sft"].datasets.Dataset.from_dict(dict(prompt=[prompt], completion=[completion]))
    [(trained, _)] = scripts["sft"].documents(rows, tokenizer, small("sft"))
    [scored] = scripts["reward_model"].preference_ids(tokenizer, [prompt], [completion], 100)
    [(asked, *_)] = scripts["rloo_tldr"].load_posts(rows, tokenizer, small("rloo_tldr"))
    assert trained == scored == asked + tokenizer(completion).input_ids + [tokenizer.eos_token_id]


def test_what_is_too_long_loses_its_beginning(scripts, tiny_lm, tiny_classifier):
    """The EOS stays; an encoder's tokenizer without EOS keeps its own marks and cuts on the left too."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm())
    [ids] = scripts["reward_model"].preference_ids(tokenizer, ["one two three four five six"], [" seven"], 4)
    assert len(ids) == 4 and ids[-1] == tokenizer.eos_token_id and tokenizer.decode(ids).endswith(f"seven{EOS}")
    tokenizer.cls_token = "<|pad|>"  # an encoder's, which marks the ends itself
    [ids] = scripts["reward_model"].preference_ids(tokenizer, ["one two three four five six"], [" seven"], 4)
    assert len(ids) == 4 and tokenizer.decode(ids).endswith("seven")


# ---- Head and offset -------------------------------------------------------------------------------------------------
def test_heads_of_another_size_are_new(pairs, script, tiny_lm, tmp_path, capsys):
    """Pairs from a decoder with 2 labels: its head does not fit, the new one is drawn as documented, and the screen says so."""
    config = AutoConfig.from_pretrained(tiny_lm("llama"), num_labels=2)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "two")
    AutoTokenizer.from_pretrained(tiny_lm("llama")).save_pretrained(tmp_path / "two")
    pairs(model_name_or_path=str(tmp_path / "two"), num_train_epochs=0.2)
    assert "a new head" in capsys.readouterr().out


def test_from_an_adapter(pairs, rloo, tiny_lm):
    """A LoRA folder that rloo_tldr.py saved is a start like any other."""
    _, run, _ = rloo("policy", lora_r=4, model_name_or_path=tiny_lm("llama"))
    _, folder, rows = pairs(model_name_or_path=str(run / "adapter"), tokenizer_name_or_path=tiny_lm("llama"), num_train_epochs=0.2)
    assert math.isfinite(rows[0]["loss"]) and (folder / "model/model.safetensors").exists()


def test_a_new_head_has_the_documented_spread(script, tiny_lm, tmp_path):
    """1 / sqrt(d + 1) where the folder is a language model; a head that was saved stays as it is (trick 35)."""
    config = AutoConfig.from_pretrained(tiny_lm("gpt_neox"), hidden_size=512, num_hidden_layers=1, intermediate_size=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "lm")
    model = script.load_model(AutoModelForSequenceClassification, str(tmp_path / "lm"), dict(num_labels=1))
    assert script.new_head(model, str(tmp_path / "lm"))
    assert model.score.weight.std().item() == pytest.approx(513**-0.5, rel=0.15)
    model.save_pretrained(tmp_path / "rm")
    again = script.load_model(AutoModelForSequenceClassification, str(tmp_path / "rm"))
    assert not script.new_head(again, str(tmp_path / "rm")) and torch.equal(again.score.weight, model.score.weight)


def test_the_head_of_an_adapter_stays(script, tiny_lm, tmp_path):
    """peft keeps the head beside an adapter of a classifier (trick 35): it is not drawn again."""
    model = AutoModelForSequenceClassification.from_pretrained(tiny_lm("llama"), num_labels=1)
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"]))
    model.base_model.model.score.modules_to_save["default"].weight.data.fill_(0.5)
    model.save_pretrained(tmp_path)
    model = script.load_model(AutoModelForSequenceClassification, str(tmp_path), dict(num_labels=1))
    assert not script.new_head(model, str(tmp_path)) and (model.score.weight == 0.5).all()


def test_references_score_0(pairs, scripts, tiny_posts, tiny_pairs):
    """Trick 24: after reloading, the mean score of the references of the centring data is 0; without such data, of the chosen ones."""
    for name, data, column in (("given", tiny_posts, "completion"), ("chosen", None, "chosen")):
        _, folder, _ = pairs(name, center_dataset_name=data)
        rows = [json.loads(line) for line in open(f"{data or tiny_pairs}/train.jsonl")]
        scorer = scripts["rloo_tldr"].load_scorer(str(folder / "model"), 8, torch.device("cpu"))
        scores = scorer([row["prompt"] for row in rows], [row[column] for row in rows])
        assert sum(scores) / len(scores) == pytest.approx(0, abs=1e-4)
        offset = json.loads((folder / "model/config.json").read_text())["reward_offset"]
        assert offset == pytest.approx(numbers_of(folder)["reward_offset"]) and abs(offset) > 1e-3
        assert scores[0] == pytest.approx(score(folder / "model", rows[0]["prompt"], rows[0][column]) - offset, abs=1e-4)


def test_calibration_by_hand(script):
    """Five equal parts by the size of the difference; in each the share that is right and the mean of sigmoid(difference)."""
    differences = [0.1, -0.2, 0.5, 0.6, -1.0, 1.1, 2.0, 2.1, 4.0, 5.0]
    found = [([[x], [0.0]], 0.0) for x in differences]
    numbers, table = script.calibration_table(found)
    assert [row["pairs"] for row in table] == [2] * 5 and [row["accuracy"] for row in table] == [0.5, 1, 0.5, 1, 1]
    assert table[0]["expected"] == pytest.approx((1 / (1 + math.exp(-0.1)) + 1 / (1 + math.exp(-0.2))) / 2)
    assert numbers["accuracy"] == pytest.approx(0.8) and numbers["margin"] == pytest.approx(sum(differences) / 10)


# ---- Options ---------------------------------------------------------------------------------------------------------
def test_gradient_does_not_depend_on_micro_batches(pairs):
    """One step of SGD on 8 pairs: as 8, as 2 x 4 and as 8 x 1."""
    results = []
    flags = dict(optimizer="torch.optim.SGD", max_grad_norm=None, num_train_epochs=8 / 48, lr_scheduler_type="constant", learning_rate=0.1)
    for n, accumulation in ((8, 1), (4, 2), (1, 8)):
        _, folder, rows = pairs(f"run{n}", per_device_train_batch_size=n, gradient_accumulation_steps=accumulation, **flags)
        assert len(rows) == 1
        results.append((weights(folder / "model"), rows[0]["loss"]))
    assert distance(results[0][0], results[1][0]) < 2e-6 and distance(results[0][0], results[2][0]) < 2e-6
    assert results[0][1] == pytest.approx(results[1][1]) == pytest.approx(results[2][1])


@pytest.mark.parametrize("flags", [{}, dict(lora_r=4)])
def test_share_prompts(pairs, script, monkeypatch, flags):
    """The same run with prompts read once and once for each response; with --gradient-checkpointing there is no cache to share."""
    kept = []
    for number, changes in enumerate((dict(share_prompts=True), dict(share_prompts=False), dict(gradient_checkpointing=True))):
        with monkeypatch.context() as patch:
            calls = spy(patch, script, "shared_prompt_scores")
            kept.append([row["loss"] for row in pairs(f"run{number}", **flags, **changes)[2]])
        assert bool(calls) == (number == 0)
    assert kept[0] == pytest.approx(kept[1], abs=1e-4) and kept[0] == pytest.approx(kept[2], abs=1e-4)


def test_lora_trains_adapter_and_head(pairs, script, tiny_lm):
    """The adapter is on no head, which is trained whole; the saved model is merged and carries its head."""
    _, folder, rows = pairs(lora_r=4, learning_rate=5e-2)
    state = torch.load(folder / "checkpoints/000006/state.pt", weights_only=True)["parameters"]
    assert [name for name in state if "score" in name] == ["model.base_model.model.score.weight"] and any("lora_" in name for name in state)
    assert len(rows) == 6
    start = script.load_model(AutoModelForSequenceClassification, tiny_lm("gpt_neox"), dict(num_labels=1))
    after = weights(folder / "model")
    assert "score.weight" in after and not (folder / "model/adapter_config.json").exists()
    assert (after["gpt_neox.layers.0.attention.dense.weight"] - start.state_dict()["gpt_neox.layers.0.attention.dense.weight"]).any()
    assert torch.equal(after["gpt_neox.embed_in.weight"], start.state_dict()["gpt_neox.embed_in.weight"])


@pytest.mark.parametrize("arch", ["gpt2", "gpt_neo", "opt", "bloom", "llama", "qwen2"])
def test_architectures(pairs, script, tiny_lm, tiny_pairs, arch):
    """Each learns from pairs, and scores what transformers scores."""
    _, folder, rows = pairs(model_name_or_path=tiny_lm(arch), num_train_epochs=0.5)
    row = json.loads(open(f"{tiny_pairs}/test.jsonl").readline())
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model").eval()
    tokenizer, texts = AutoTokenizer.from_pretrained(folder / "model"), [row["chosen"], row["rejected"]]
    ids = script.preference_ids(tokenizer, [row["prompt"]] * 2, texts, 200)
    batch, mask, *_ = script.collate_texts([(ids, 0.0)], "cpu")
    with torch.no_grad():
        ours = script.sequence_logits(model, batch, mask)[:, 0].tolist()
    assert ours == pytest.approx([score(folder / "model", row["prompt"], row[name]) for name in ("chosen", "rejected")], abs=1e-4)


def test_an_encoder_learns_from_pairs(pairs, tiny_classifier):
    """DistilBERT, whose head of two labels makes place for one score."""
    _, folder, rows = pairs(model_name_or_path=tiny_classifier(), num_train_epochs=0.5)
    assert AutoModelForSequenceClassification.from_pretrained(folder / "model").config.num_labels == 1
    assert all(math.isfinite(row["loss"]) for row in rows)
