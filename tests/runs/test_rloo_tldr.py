"""Whole runs of rloo_tldr.py on tiny models: groups, rewards, ratios of responses, judges, TRL's commands."""

import math
import shlex
import time
from dataclasses import replace

import pytest
import torch
import transformers
from run_tools import (
    eos_prone,
    evaluation_of,
    one_line,
    reward_file,
    rows_of,
    same,
    spy,
    weights,
    write_rows,
)
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import judge as judge_script

pytest_plugins = ["run_fixtures"]
SCRIPT = "rloo_tldr"
CPU = torch.device("cpu")


def scores_by_hand(folder, rows, column):
    """The scores of texts after their prompts, by a reward model in plain transformers."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    model.config.pad_token_id = None  # so that transformers reads the last token
    tokenizer = AutoTokenizer.from_pretrained(folder)
    scores = []
    for row in rows:
        ids = tokenizer(row["prompt"]).input_ids + tokenizer(row[column]).input_ids
        with torch.no_grad():
            scores.append(model(torch.tensor([[*ids, tokenizer.eos_token_id]])).logits.item())
    return scores


def test_the_model_reads_each_prompt_once(script, tiny_lm, monkeypatch):
    """Generation starts with P rows and goes on with P * k."""
    model = AutoModelForCausalLM.from_pretrained(tiny_lm()).eval()
    ids = torch.randint(3, 1000, (2, 5), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids, dtype=torch.bool)
    calls = spy(monkeypatch, script, "hidden_states")
    script.generate(
        model, ids, mask, torch.rand(2, 3, 6, dtype=torch.float64), torch.tensor([], dtype=torch.long), 1.0
    )
    assert [tuple(args[1].shape) for args, _ in calls] == [(2, 5)] + [(6, 1)] * 5


def test_the_score_is_transformers_own(script, tiny_preference_model):
    """Prompt, response and EOS, read at the last token, minus the offset, whatever else is in the batch."""
    folder = tiny_preference_model()
    prompts = ["A post.", "A longer post about a cat."] * 2
    responses = [" yes", " no, never", "", " a"]
    args = script.Args(local_rollout_forward_batch_size=3)
    scores = script.load_reward_model(args, folder, CPU)(prompts, responses)
    rows = [dict(prompt=prompt, response=text) for prompt, text in zip(prompts, responses, strict=True)]
    expected = [logit - 0.25 for logit in scores_by_hand(folder, rows, "response")]  # its reward_offset
    assert scores == pytest.approx(expected, abs=1e-5)


def test_a_reward_model_with_another_tokenizer(rloo, tiny_classifier, tmp_path):
    """Trick 23: an encoder with 300 tokens scores what a policy with 1024 wrote."""
    folder = tmp_path / "encoder"
    config = transformers.AutoConfig.from_pretrained(tiny_classifier("other"), num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_classifier("other")).save_pretrained(folder)
    _, _, rows = rloo(reward_model_path=str(folder))
    assert rows[0]["env/reward_std"] > 0


@pytest.mark.parametrize("kind", ["a word", "a word and EOS", "a special token"])
def test_another_stop_token(rloo, script, monkeypatch, tiny_lm, tmp_path, kind):
    """Trick 16: --stop-token-id ends a response, and EOS only if it is named too. The reward reads the stop
    token, if it is text."""
    rollouts = spy(monkeypatch, script, "rollout")  # before training, an update, and after
    lm = eos_prone(tiny_lm, tmp_path / "lm")
    tokenizer = AutoTokenizer.from_pretrained(lm)
    length = reward_file(tmp_path, "return [float(len(text)) for text in completions]")
    flags = dict(model_name_or_path=lm, temperature=1.0, total_episodes=8, reward_fn=length)
    rloo("first", **flags)
    tokens = rollouts[1][1][0]["ids"][:, -6:]
    stop = next(x for x in tokens[:, 1].tolist() if x not in (0, tokenizer.eos_token_id))
    rollouts.clear()
    stops = [stop, tokenizer.eos_token_id] if kind == "a word and EOS" else [stop]
    if kind == "a special token":
        special = tokenizer.convert_ids_to_tokens(stop)
        tokenizer.add_special_tokens({"additional_special_tokens": [special]})
        assert tokenizer.convert_tokens_to_ids(special) == stop
        tokenizer.save_pretrained(lm)
    _, _, [row] = rloo("second", stop_token_id=stops, **flags)
    b, responses = rollouts[1][1]
    lengths, ends, texts = [], [], []
    for ids in b["ids"][:, -6:].tolist():
        places = [t for t, token in enumerate(ids) if token in stops]
        ends.append(bool(places))
        lengths.append(places[0] + 1 if places else 6)
        texts.append(tokenizer.decode(ids[: lengths[-1]], skip_special_tokens=True))
    assert 0 < sum(ends) < 8
    last = {ids[n - 1] for ids, n, ended in zip(b["ids"][:, -6:].tolist(), lengths, ends) if ended}
    assert last == set(stops)
    assert responses == texts
    assert row["val/num_eos_tokens"] == sum(ends)
    assert row["completions/mean_length"] == sum(lengths) / 8
    scores = [len(text) - (0.0 if ended else 1.0) for text, ended in zip(texts, ends)]
    assert row["objective/scores"] == pytest.approx(sum(scores) / 8)


def test_sft_model_path_is_the_policy(rloo, tiny_lm, tmp_path):
    """As in TRL, the tokenizer comes from model_name_or_path."""
    torch.manual_seed(5)
    config = transformers.AutoConfig.from_pretrained(tiny_lm())
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "sft")
    _, folder, _ = rloo(sft_model_path=str(tmp_path / "sft"), learning_rate=0.0, total_episodes=8)
    assert same(weights(folder / "model"), weights(tmp_path / "sft"))


def test_the_reference_of_lora_is_the_base_model(rloo):
    """The policy without its adapter, which learns: the KL is 0 before the first step, but not after it."""
    _, _, rows = rloo(lora_r=4, learning_rate=0.05)
    assert rows[0]["objective/kl"] == 0 and abs(rows[1]["objective/kl"]) > 1e-3


# ---- TRL's page --------------------------------------------------------------------------------------------

COMMANDS = {
    "rloo": """
        --learning_rate 3e-6
        --output_dir models/minimal/rloo
        --per_device_train_batch_size 64
        --gradient_accumulation_steps 1
        --total_episodes 10000
        --model_name_or_path EleutherAI/pythia-14m
        --reward_model_path EleutherAI/pythia-14m
        --missing_eos_penalty 1.0
        """,
    "rloo_tldr": """
        --output_dir models/minimal/rloo_tldr
        --num_ppo_epochs 2
        --num_mini_batches 2
        --learning_rate 3e-6
        --per_device_train_batch_size 8
        --gradient_accumulation_steps 8
        --total_episodes 1000000
        --model_name_or_path EleutherAI/pythia-1b-deduped
        --sft_model_path cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr
        --reward_model_path cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr
        --local_rollout_forward_batch_size 16
        --missing_eos_penalty 1.0
        --stop_token eos
        --kl_coef 0.03
        """,
}


@pytest.mark.parametrize("name, batch, steps", [("rloo", 64, 4), ("rloo_tldr", 128, 4)])
def test_commands_of_trls_page(script, name, batch, steps):
    """They parse unchanged. An update has as many episodes and steps as in TRL 0.11."""
    args = script.parse_args(shlex.split(COMMANDS[name]))
    assert args.recipe == "custom"
    assert (args.rloo_k, args.temperature, args.response_length, args.cliprange) == (2, 0.7, 53, 0.2)
    accumulated = args.per_device_train_batch_size * args.gradient_accumulation_steps
    assert accumulated * args.num_mini_batches == batch
    assert args.num_ppo_epochs * args.num_mini_batches == steps


# ---- Judges ------------------------------------------------------------------------------------------------


def test_a_named_judge_is_the_judge(rloo, script, tiny_preference_model, monkeypatch):
    """--judge-model comes before the gold score of recipe tiny: a chat model, or a reward model."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    tiny = script.parse_args(["--judge-model", "m", "--judge-url", "http://here/v1"])
    assert tiny.judge_fn
    for judge_url, asked in (("http://here/v1", "http://here/v1/"), (None, "https://api.openai.com/v1/")):
        judge = script.load_judge(replace(tiny, judge_url=judge_url), None, None, CPU)
        assert judge.func.__name__ == "ask_chat_model"
        assert str(judge.args[0].base_url) == asked

    args = replace(tiny, judge_model=tiny_preference_model("llama"), judge_url=None)
    tokenizer = AutoTokenizer.from_pretrained(args.judge_model)
    judge = script.load_judge(args, tokenizer, None, CPU)
    posts = [dict(prompt="a post" * (i % 7), reference=" x", columns={}) for i in range(32)]
    assert judge(posts, [" x"] * 32).tolist() == [0.5] * 32  # equal texts, in batches that round differently

    _, folder, _ = rloo(judge_model=args.judge_model)
    assert evaluation_of(folder)["judge"] == args.judge_model
    rows = rows_of(folder, "evaluation_samples.jsonl")
    ours, theirs = (scores_by_hand(args.judge_model, rows, name) for name in ("after", "reference"))
    wins = [(x > y) + 0.5 * (x == y) for x, y in zip(ours, theirs, strict=True)]
    assert evaluation_of(folder)["after"]["win rate"] == pytest.approx(sum(wins) / len(wins))


def test_without_references(rloo, tmp_path):
    """Data without summaries: the same table, without a win rate."""
    train = [dict(prompt=f"Old post {i}.\n\nTL;DR:") for i in range(12)]
    test = [dict(prompt=f"Post {i}.\n\nTL;DR:") for i in range(7)]
    _, folder, _ = rloo(dataset_name=write_rows(tmp_path / "data", train=train, test=test))
    rows = rows_of(folder, "evaluation_samples.jsonl")
    assert all(row["prompt"].startswith("Post ") and row["reference"] == "" for row in rows)
    table = evaluation_of(folder)
    assert "win rate" not in table["after"]
    assert "score mean" in table["after"] and table["n"] == 4


def test_a_judge_that_fails_at_the_end(script, small, tiny_preference_model, tmp_path, monkeypatch):
    """Nothing is lost: the model is saved, and --resume with a --judge-model judges it."""
    broken = tmp_path / "broken"
    body = f"""if os.path.exists('{broken}'):
    return [float('nan')] * len(prompts)
return [float(len(r)) for r in completions]"""
    [judge_fn] = reward_file(tmp_path, body)
    args = small("rloo_tldr", judge_fn=judge_fn, total_episodes=8)
    checkpoint = script.Run.checkpoint

    def break_the_judge(self, *rest):
        checkpoint(self, *rest)
        broken.touch()

    with monkeypatch.context() as patch:
        patch.setattr(script.Run, "checkpoint", break_the_judge)
        with pytest.raises(script.UserError, match="must return a finite number"):
            script.train(args)
    assert (tmp_path / "run/model/model.safetensors").exists()
    other = tiny_preference_model()
    _, folder = script.train(script.parse_args(["--resume", args.output_dir, "--judge-model", other]))
    assert evaluation_of(folder)["judge"] == other


def ask(script, flags, posts, responses):
    """The verdicts of a chat model; None where there is none."""
    judge = script.load_judge(script.Args(**flags), None, None, CPU)
    return [None if math.isnan(verdict) else verdict for verdict in judge(posts, responses).tolist()]


def test_verdicts_of_a_chat_judge_stay_with_their_posts(script, chat_with):
    """Three kinds of posts: ours is better, theirs is better, no verdict; slow answers change nothing.

    The order of the two is random, a function of the seed.
    """

    def answer(question):
        number = int(question.split("post number ")[1].split()[0])
        time.sleep(0.02 if number == 0 else 0)
        first_is_ours = f"Summary A: ours {number}\n" in question
        assert f"Summary {'B' if first_is_ours else 'A'}: theirs {number}\n" in question
        return {0: "A" if first_is_ours else "B", 1: "B" if first_is_ours else "A", 2: "?"}[number % 3]

    flags, asked = chat_with(answer)
    numbers = range(40)
    posts = [dict(prompt=f"post number {i}", reference=f" theirs {i}") for i in numbers]
    ours = [f" ours {i}" for i in numbers]
    verdicts = ask(script, flags, posts, ours)
    assert verdicts == [{0: 1.0, 1: 0.0, 2: None}[i % 3] for i in numbers]
    assert len(asked) == 40
    assert all(options == dict(model="m") for _, options in asked)  # what any server accepts
    assert 8 < sum("Summary A: ours" in question for question, _ in asked) < 32
    questions = sorted(question for question, _ in asked)
    for seed in (1, 2):
        asked.clear()
        ask(script, flags | dict(seed=seed), posts, ours)
        assert (sorted(question for question, _ in asked) == questions) == (seed == 1)


@pytest.mark.parametrize(
    "answer, expected",
    [
        (" A", "first"),
        ("Answer: B.", "second"),
        ("**B**", "second"),
        ("Summary A", "first"),
        *[(answer, None) for answer in ("hmm", "Both A and B", "ABBA", "a", "A tie", "A, or B", None)],
    ],
)
def test_a_chat_judge_reads_verdicts(script, chat_with, answer, expected):
    """The letter A or B alone. Anything else is no verdict, and no defeat."""
    flags, asked = chat_with(lambda question: answer)
    posts = [dict(prompt=f"post {i}", reference=" theirs") for i in range(40)]
    verdicts = ask(script, flags, posts, [" ours"] * 40)
    if expected is None:
        assert verdicts == [None] * 40
        return
    is_first = {int(question.split("post ")[2].split()[0]): "A: ours" in question for question, _ in asked}
    assert verdicts == [float(is_first[i] == (expected == "first")) for i in range(40)]
    assert 8 < sum(verdicts) < 32


# ---- judge.py ----------------------------------------------------------------------------------------------


def test_judge(script, capsys, tiny_lm, tiny_posts, tmp_path):
    """The flags of TRL's judge_tldr.py, here with a judge whose win rate is known."""
    [judge] = reward_file(tmp_path, "return [float(len(r)) for r in completions]")
    flags = f"--model_name_or_path {tiny_lm()} --dataset_name {tiny_posts} --num_examples 5"
    flags += " --max_prompt_length 200 --response_length 2"
    judge_script.main([*flags.split(), "--judge_fn", judge])
    out = capsys.readouterr().out
    expected = "Model win rate: 0.00% +- 0.00% (0.0% ties, 0.0% without verdict), n = 5, judge "
    line = out.splitlines()[-1]
    assert line.startswith(expected) and line.endswith(f", model {flags.split()[1]}, data {tiny_posts}")
    assert "no --resume" in one_line(judge_script, ["--sft-model-path", tiny_lm()], capsys)
    assert "name a judge" in one_line(judge_script, ["--model-name-or-path", tiny_lm()], capsys)
    with pytest.raises(script.UserError, match="no --resume"):
        judge_script.judge_policy(script.Args(resume="RUN"))


def test_judge_takes_the_flags_of_training(rloo, script, small, bang_lm, tiny_preference_model, monkeypatch):
    """It judges the summaries that a run with the same flags evaluates, after prompts that begin with BOS."""
    calls = spy(monkeypatch, script, "sample_responses")
    flags = dict(
        model_name_or_path=bang_lm(bos=True),
        judge_model=tiny_preference_model(),
        bf16=True,
        stop_token=None,
        missing_eos_penalty=None,
        num_eval_prompts=11,
        temperature=1.1,
        response_length=25,
    )
    _, folder, _ = rloo(**flags, total_episodes=8, num_sample_generations=0)
    _, (b, _) = calls[0]
    calls.clear()
    args = small("rloo_tldr", **flags)
    result = judge_script.judge_policy(args)
    [(_, (judged, responses))] = calls
    assert responses == [row["before"] for row in rows_of(folder, "evaluation_samples.jsonl")]
    assert torch.equal(judged["ids"], b["ids"])
    assert torch.equal(judged["sampling_logprobs"], b["sampling_logprobs"])
    first = judged["ids"][judged["mask"].cumsum(1) == 1]  # of each row, the first token that is no padding
    assert first.tolist() == [AutoTokenizer.from_pretrained(args.model_name_or_path).bos_token_id] * 11
    assert not judged["stopped"].any()
    assert set(result) == {"win rate", "+- (95 % interval)", "ties", "no verdict"}
    assert result == {name: pytest.approx(evaluation_of(folder)["before"][name]) for name in result}
    assert 0 < result["win rate"] < 1
    judge_script.judge_policy(replace(args, bf16=False, dtype="float32"))
    assert not torch.equal(calls[1][1][0]["sampling_logprobs"], judged["sampling_logprobs"])
