"""Runs of dpo_tldr.py on tiny models: its pairs, its reference, what it learns, and the evaluation."""

import math

import pytest
import torch
from run_tools import (
    distance,
    eos_prone,
    evaluation_of,
    reward_file,
    rows_of,
    spy,
    timeless,
    weights,
    write_rows,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest_plugins = ["run_fixtures"]
SCRIPT = "dpo_tldr"
CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
CHAT_TEMPLATE += "{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.fixture
def tokenizer(tiny_lm):
    loaded = AutoTokenizer.from_pretrained(tiny_lm())
    loaded.chat_template = CHAT_TEMPLATE
    loaded.add_tokens("<end>", special_tokens=True)
    return loaded


def texts_of(pair, tokenizer):
    """The prompt and the two responses as texts, with their special tokens."""
    return [tokenizer.decode(ids) for ids in (pair["ids"], *pair["responses"])]


def load(script, tokenizer, *rows, **flags):
    """load_pairs. -> the pairs as texts"""
    pairs = script.load_pairs(list(rows), tokenizer, script.Args(**flags))
    return [texts_of(pair, tokenizer) for pair in pairs]


def said(*texts):
    """A conversation that the user begins."""
    return [dict(role=("user", "assistant")[i % 2], content=text) for i, text in enumerate(texts)]


# ---- Pairs -------------------------------------------------------------------------------------------------


def test_texts(script, tokenizer):
    """Prompt, response, EOS. The tokens of the prompt are those that a rollout reads."""
    row = dict(prompt="How? TL;DR:", chosen=" So.", rejected=" Not so.")
    assert load(script, tokenizer, row) == [["How? TL;DR:", " So.<|endoftext|>", " Not so.<|endoftext|>"]]
    [pair] = script.load_pairs([row], tokenizer, script.Args())
    assert pair["ids"] == tokenizer("How? TL;DR:").input_ids
    assert pair["responses"][0][:-1] == tokenizer(" So.", add_special_tokens=False).input_ids


def test_a_ranking(script, tokenizer):
    """The best one against the worst one. chosen and rejected come first: responses may be in any order."""
    row = dict(prompt="P:", responses=[" a", " b", " c"])
    [pair] = load(script, tokenizer, row)
    assert pair == ["P:", " a<|endoftext|>", " c<|endoftext|>"]
    [pair] = load(script, tokenizer, row | dict(chosen=" b", rejected=" a"))
    assert pair == ["P:", " b<|endoftext|>", " a<|endoftext|>"]


def test_a_prompt_that_both_texts_contain(script, tokenizer):
    row = dict(chosen="Hello.\n\nMe: yes, so", rejected="Hello.\n\nMe: no")
    [pair] = load(script, tokenizer, row)
    assert pair == ["Hello.\n\nMe:", " yes, so<|endoftext|>", " no<|endoftext|>"]


@pytest.mark.parametrize("kind", ["explicit", "implicit", "text", "text and messages"])
def test_chats(script, tokenizer, kind):
    """With their prompt or without, and after a text, which is the user's message unless there is one."""
    answers = [said("Hi.", "Yes, so.")[1:], said("Hi.", "Yes, no.")[1:]]
    if kind == "explicit":
        row = dict(prompt=said("Hi."), chosen=answers[0], rejected=answers[1])
    elif kind == "implicit":
        row = dict(chosen=said("Hi.") + answers[0], rejected=said("Hi.") + answers[1])
    elif kind == "text":
        row = dict(prompt="Hi.", chosen=answers[0], rejected=answers[1])
    else:
        row = dict(prompt="Hi.", chosen=said("Hi.") + answers[0], rejected=said("Hi.") + answers[1])
    [pair] = load(script, tokenizer, row)
    # The prompt ends with the header of the answer, as in a rollout, though both answers begin with "Yes,".
    assert pair == ["<user>Hi.<end><assistant>", "Yes, so.<end>", "Yes, no.<end>"]


def test_a_chat_of_several_turns(script, tokenizer):
    """The response is the last answer, so the user's second question is a part of the prompt."""
    turns = said("Hi.", "Hello.", "More?")[1:]
    answers = [said("", text)[1:] for text in ("Yes.", "No.")]
    row = dict(prompt="Hi.", chosen=turns + answers[0], rejected=turns + answers[1])
    [pair] = load(script, tokenizer, row)
    prompt = "<user>Hi.<end><assistant>Hello.<end><user>More?<end><assistant>"
    assert pair == [prompt, "Yes.<end>", "No.<end>"]


def test_rows_that_are_left_out_are_counted(script, tokenizer, capsys):
    """Equal responses, missing ones, no prompt at all, and texts that are too long by one token."""
    good = dict(prompt="P:", chosen=" a b", rejected=" b")
    longest = len(tokenizer("P: a b").input_ids) + 1
    rows = [good, dict(prompt="P:", chosen=" a", rejected=" a"), dict(prompt="P:", chosen=" a")]
    rows += [dict(chosen="a", rejected="b"), dict(prompt="P:", responses=[" a"]), dict(prompt="P:")]
    rows += [dict(prompt="P:", responses="ab"), dict(prompt="P:", chosen="", rejected=" b")]
    rows += [good | dict(rejected=" "), dict(prompt="P:", responses=[" a", "\n"])]  # whitespace is no text
    rows += [good | dict(chosen=" a b b"), good | dict(rejected=" a b b")]
    pairs = load(script, tokenizer, *rows, max_length=longest)
    assert pairs == [["P:", " a b<|endoftext|>", " b<|endoftext|>"]]
    assert capsys.readouterr().out == (
        "1 of 12 rows; left out: 8 with an empty prompt or response, 1 with equal ones, "
        f"2 of more than {longest} tokens\n"
    )


def test_posts_of_the_evaluation(script, tokenizer, tmp_path, capsys):
    """Complete rows of --eval-dataset-name that are short enough, or the prompts of the pairs."""
    rows = [dict(prompt="P:", completion=" a"), dict(prompt="P:" * 400, completion=" a")]
    rows += [dict(prompt="", completion=" a"), dict(prompt=None, completion=" a")]
    rows += [dict(prompt="P:", completion="  ")]  # a judge would prefer anything to it
    data = write_rows(tmp_path / "posts", train=rows, test=rows)
    args = script.Args(eval_dataset_name=data, max_length=300)
    [post] = script.load_eval_posts([], tokenizer, args)
    assert texts_of(post, tokenizer) == ["P:", " a<|endoftext|>"]
    assert "1 of 5 rows have a prompt, a completion and at most 300 tokens" in capsys.readouterr().out
    pairs = script.load_pairs([dict(prompt="Q:", chosen=" c", rejected=" d")], tokenizer, args)
    [post] = script.load_eval_posts(pairs, tokenizer, script.Args())
    assert texts_of(post, tokenizer) == ["Q:", " c<|endoftext|>"]


# ---- Training ----------------------------------------------------------------------------------------------


def test_a_policy_learns_pairs_by_heart(dpo, tiny_pairs, tmp_path):
    """16 pairs. The chosen responses become more probable compared with the rejected ones."""
    rows = rows_of(tiny_pairs, "train.jsonl")[:16]
    data = write_rows(tmp_path / "data", train=rows, test=rows)
    _, folder, metrics = dpo(dataset_name=data, num_train_epochs=10.0, learning_rate=3e-3, num_eval_pairs=16)
    assert metrics[-1]["loss"] < 0.2 and metrics[-1]["rewards/accuracies"] > 0.9
    evaluation = evaluation_of(folder)
    assert evaluation["number of pairs"] == 16 and evaluation["pairs"]["rewards/accuracies"] > 0.9
    assert evaluation["pairs"]["rewards/margins"] > 2
    assert evaluation["after"]["KL, nats per response"] > 0.1


def plain_logprob(lm, pair, response):
    """The log-probability of a response in plain transformers, without padding."""
    with torch.no_grad():
        logits = lm(torch.tensor([pair["ids"] + response])).logits[0].double().log_softmax(-1)
    return sum(logits[len(pair["ids"]) - 1 + t, token].item() for t, token in enumerate(response))


@pytest.mark.parametrize("adapter", [{}, dict(lora_r=4), dict(lora_r=4, load_in_8bit=True)], ids=str)
def test_the_reference_is_the_start(dpo, script, monkeypatch, tiny_lm, tiny_pairs, adapter):
    """In all updates, each pair meets the log-probabilities that it had before training, chosen first."""
    batches, losses = spy(monkeypatch, script, "collate_pairs"), []
    dpo_loss = script.dpo_loss

    def recorded(*columns):
        losses.append((batches[-1][0][0], columns))  # the pairs of this micro-batch
        return dpo_loss(*columns)

    monkeypatch.setattr(script, "dpo_loss", recorded)
    flags = dict(per_device_train_batch_size=4, gradient_accumulation_steps=2, label_smoothing=0.1, beta=0.3)
    _, _, metrics = dpo(num_train_epochs=0.5, **flags, **adapter)
    lm = AutoModelForCausalLM.from_pretrained(tiny_lm()).eval()
    assert len(losses) == 6
    for pairs, (_, _, ref_chosen, ref_rejected, *flags) in losses:
        assert flags == [0.3, 0.1] and len(pairs) == 4
        expected = [[plain_logprob(lm, pair, x) for x in pair["responses"]] for pair in pairs]
        found = torch.stack([ref_chosen, ref_rejected], 1)
        tolerance = 0.5 if "load_in_8bit" in adapter else 1e-3
        torch.testing.assert_close(found, torch.tensor(expected), atol=tolerance, rtol=0)
    assert metrics[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert abs(metrics[0]["rewards/margins"]) < 1e-4 < abs(metrics[-1]["rewards/margins"])


def test_the_gradient_does_not_depend_on_micro_batches(dpo):
    """8 pairs at once, or 2 at a time. The metrics do not depend on it either."""
    flags = dict(optimizer="torch.optim.SGD", learning_rate=0.05, num_train_epochs=0.5)
    _, whole, rows = dpo("whole", per_device_train_batch_size=8, **flags)
    parts = dict(per_device_train_batch_size=2, gradient_accumulation_steps=4)
    _, parts, other_rows = dpo("parts", **parts, **flags)
    assert distance(weights(whole / "model"), weights(parts / "model")) < 1e-5
    assert len(rows) == 3  # in the first one, all margins are 0 up to rounding
    for row, other in zip(timeless(rows[1:]), timeless(other_rows[1:]), strict=True):
        assert row == pytest.approx(other, rel=1e-3, abs=1e-5)


# ---- Evaluation --------------------------------------------------------------------------------------------

JUDGE = """
def words(prompts, completions, **columns):
    assert all(prompt.startswith("SUBREDDIT") for prompt in prompts)
    return [min(len(text.split()), 3) for text in completions]
"""


@pytest.fixture
def judge(tmp_path):
    (tmp_path / "good_words.py").write_text(JUDGE)
    return f"{tmp_path}/good_words.py:words"


def test_the_evaluation_by_hand(script, small, tiny_lm, tmp_path, judge):
    """Responses, lengths, stops, KL and verdicts against plain transformers."""
    name = eos_prone(tiny_lm, tmp_path / "eos")
    policy, reference = [AutoModelForCausalLM.from_pretrained(x).eval() for x in (name, tiny_lm())]
    tokenizer = AutoTokenizer.from_pretrained(name)
    args = small("dpo_tldr", judge_fn=judge, num_eval_prompts=24, response_length=9, temperature=0.8)
    accelerator = script.start_accelerator(args)
    posts = script.load_eval_posts([], tokenizer, args)
    posts[0]["responses"] = [tokenizer(" one").input_ids]
    metrics, columns = script.evaluate_samples(policy, posts, tokenizer, args, accelerator, reference)
    kls, wins, scores = [], [], []
    eos = tokenizer.eos_token_id
    generator = script.generator_for(0, "tokens", "held-out")
    uniforms = torch.rand(len(posts), 9, dtype=torch.float64, generator=generator)
    for i, post in enumerate(posts):
        ids, kl, tokens = list(post["ids"]), 0.0, []
        for t in range(9):
            logps = []
            for lm in (policy, reference):
                with torch.no_grad():
                    logits = lm(torch.tensor([ids])).logits[0, -1].double()
                logps.append((logits / 0.8).log_softmax(-1))
            token = torch.searchsorted(logps[0].exp().cumsum(0), uniforms[i, t]).item()
            kl += (logps[0][token] - logps[1][token]).item()
            ids.append(token)
            tokens.append(token)
            if token == eos:
                break
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        assert columns["response"][i] == text
        assert columns["length"][i] == len(tokens) and columns["stopped"][i] == (tokens[-1] == eos)
        assert columns["prompt"][i] == tokenizer.decode(post["ids"])
        reference_text = tokenizer.decode(post["responses"][0], skip_special_tokens=True)
        assert columns["reference"][i] == reference_text
        ours, theirs = min(len(text.split()), 3), min(len(reference_text.split()), 3)
        kls.append(kl)
        wins.append(1.0 if ours > theirs else 0.5 if ours == theirs else 0.0)
        scores.append(float(ours))
    assert 0 < sum(columns["stopped"]) < 24 and 0.5 in wins and 0.0 in wins
    n = len(posts)
    for key, values in (("win rate", wins), ("score mean", scores), ("KL, nats per response", kls)):
        mean = sum(values) / n
        error = (sum((x - mean) ** 2 for x in values) / n / n) ** 0.5
        assert metrics[key] == pytest.approx(mean, abs=1e-4)
        assert metrics[f"{key}, +-"] == pytest.approx(1.96 * error, abs=1e-4)
    assert columns["kl"] == pytest.approx(kls, abs=1e-3)
    assert metrics["ended by itself"] == pytest.approx(sum(columns["stopped"]) / n)
    assert metrics["tokens per response"] == pytest.approx(sum(columns["length"]) / n)


def test_what_the_judge_reads(script, small, tiny_lm, monkeypatch):
    """trl#2897: special tokens that are text. Not the token that ends a response, nor what follows it."""
    policy = AutoModelForCausalLM.from_pretrained(tiny_lm())
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm())
    tokenizer.add_special_tokens({"additional_special_tokens": ["ever"]})
    [end] = tokenizer("!").input_ids
    policy.generation_config.eos_token_id = end
    ids = {text: tokenizer(text).input_ids for text in ("Is it ever?", " It is ever", "ever it is")}
    posts = [dict(ids=ids["Is it ever?"], responses=[[*ids["ever it is"], end, 20, 21]])]
    tokens = torch.tensor([[*ids[" It is ever"], end, 22, end]])
    monkeypatch.setattr(script, "generate", lambda *inputs: (tokens, torch.zeros(tokens.shape)))
    seen = []

    def judge(prompts, completions):
        seen.append((prompts, completions))
        return [1.0]

    monkeypatch.setattr(script, "load_functions", lambda names: {"judge": judge})
    args = small("dpo_tldr", response_length=tokens.shape[1])
    inputs = policy, posts, tokenizer, args, script.start_accelerator(args)
    _, columns = script.evaluate_samples(*inputs, ref_model=policy)
    assert seen == [(["Is it ever?"], [" It is ever"]), (["Is it ever?"], ["ever it is"])]
    assert columns["reference"] == ["ever it is"] and columns["length"] == [len(ids[" It is ever"]) + 1]


def test_the_policies_that_are_compared(dpo, script, monkeypatch, tiny_lm):
    """Before: the start with itself, so the KL is 0. After: what was trained, with the start, loaded anew."""
    evaluate_samples, references = script.evaluate_samples, []

    def recorded(*inputs, ref_model):
        references.append(ref_model)
        return evaluate_samples(*inputs, ref_model=ref_model)

    monkeypatch.setattr(script, "evaluate_samples", recorded)
    calls = spy(monkeypatch, script, "evaluate_samples")
    model, folder, _ = dpo()
    (before, _), (after, _) = calls
    assert after[0] is before[0] is model.policy
    start = weights(tiny_lm())
    for reference in references:
        assert reference is not model.policy
        assert all(torch.equal(reference.state_dict()[name], x) for name, x in start.items())
    assert distance(weights(folder / "model"), start) > 1e-3
    evaluation = evaluation_of(folder)
    assert abs(evaluation["before"]["KL, nats per response"]) < 1e-4
    rows = rows_of(folder, "evaluation_samples.jsonl")
    assert [row["before"] for row in rows] == calls[0][1][1]["response"]
    assert [row["after"] for row in rows] == calls[1][1][1]["response"]
    assert [row["score after"] for row in rows] == calls[1][1][1]["score"]


def test_the_responses_before_are_those_of_rloo(dpo, rloo):
    """The same posts, in the same order, and the same random numbers."""
    flags = dict(seed=3, num_eval_prompts=5, response_length=7, temperature=0.7)
    _, ours, _ = dpo("dpo", **flags)
    _, theirs, _ = rloo("rloo", total_episodes=8, **flags)
    ours, theirs = [rows_of(folder, "evaluation_samples.jsonl") for folder in (ours, theirs)]
    for row, other in zip(ours, theirs, strict=True):
        assert [row[name] for name in ("prompt", "before")] == [other[name] for name in ("prompt", "before")]
        assert row["reference"] == other["reference"]


def test_training_rows_are_drawn_alike_for_every_seed(dpo, script, monkeypatch):
    """--num-train-rows."""
    calls = spy(monkeypatch, script, "load_pairs")
    for seed in (1, 2):
        dpo(f"run{seed}", seed=seed, num_train_rows=5)
    rows = [inputs[0] for inputs, _ in calls[::2]]
    assert rows[0] == rows[1] and len(rows[0]) == 5


def test_only_the_held_out_rows_that_are_used_are_read(dpo, script, monkeypatch):
    calls = spy(monkeypatch, script, "load_pairs")
    _, folder, _ = dpo(num_eval_pairs=3)
    assert len(calls[1][0][0]) == 3
    assert evaluation_of(folder)["number of pairs"] == 3


def test_without_a_judge_and_without_other_posts(dpo):
    """The prompts of held-out pairs, and no win rate."""
    _, folder, _ = dpo(judge_fn=None, eval_dataset_name=None)
    evaluation = evaluation_of(folder)
    assert "win rate" not in evaluation["after"] and evaluation["n"] == 4
    assert {row["score"] for row in rows_of(folder, "evaluation_samples.jsonl")} == {None}


def test_a_judge_that_forgets_a_response(dpo, script, tmp_path):
    [judge_fn] = reward_file(tmp_path, "return [1.0] * (len(completions) - 1)")
    with pytest.raises(script.UserError, match="must return a finite number per response"):
        dpo(judge_fn=judge_fn)


def test_a_model_with_other_probabilities_is_refused(script, tiny_lm):
    """Its own logits are divided by 2, which ours are not."""
    model = script.load_model(AutoModelForCausalLM, tiny_lm())
    script.check_model(model, 30)
    model.lm_head.register_forward_hook(lambda module, inputs, logits: logits / 2)
    with pytest.raises(script.UserError, match="its log-probabilities differ"):
        script.check_model(model, 30)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_forward_pass_is_checked(script, small, monkeypatch, checkpointing):
    """With gradient checkpointing, it reads whole rows; otherwise it uses a cache."""
    model = script.load_lm(small("dpo_tldr", gradient_checkpointing=checkpointing))
    script.check_model(model, 30)
    hidden_states = script.hidden_states

    def scaled(body, ids, mask, cache=None):
        return hidden_states(body, ids, mask, cache) * (2 if (cache is None) == checkpointing else 1)

    monkeypatch.setattr(script, "hidden_states", scaled)
    with pytest.raises(script.UserError, match="its log-probabilities differ"):
        script.check_model(model, 30)
