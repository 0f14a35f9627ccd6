"""rloo_tldr.py: every number of metrics.jsonl and of the final table, recomputed by hand from a small run.

The data are asymmetric: training, validation and test rows begin with other words, prompts and summaries have
different lengths, some rows cannot be used, and some responses stop but not all.
"""

import functools
import math
import statistics
from statistics import fmean as mean
from types import SimpleNamespace

import pytest
import tokenizers
import torch
import transformers
from run_fixtures import handlers_kept
from run_tools import (
    bigram_share,
    distance,
    eos_prone,
    evaluation_of,
    forget_reward_files,
    grouped,
    maker,
    plain_logprobs,
    reward_file,
    rows_by_hand,
    rows_of,
    spy,
    stop_after,
    with_a_gap,
    wordy,
    write_rows,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from rloo_tldr import generator_for

pytest_plugins = ["run_fixtures"]
SCRIPT = "rloo_tldr"
T, K, P, EPOCHS = 9, 3, 4, 3  # tokens per response, responses per prompt, prompts per update, epochs
FLAGS = dict(  # of the run that most tests look at; 20 episodes are rounded up to 2 updates of 12
    total_episodes=20,
    per_device_train_batch_size=3,
    gradient_accumulation_steps=4,
    num_mini_batches=1,
    num_ppo_epochs=EPOCHS,
    rloo_k=K,
    response_length=T,
    max_prompt_length=40,
    temperature=0.7,
    score_clip=2.0,
    missing_eos_penalty=1.5,
    kl_coef=0.3,
    cliprange=0.1,
    learning_rate=0.008,
    lr_scheduler_type="linear",
    optimizer="torch.optim.SGD",
    max_grad_norm=None,
    num_eval_prompts=6,
    num_sample_generations=2,
    seed=3,
)
CALLS = """import json
{score}
scores = [score(p, r) for p, r in zip(prompts, completions)]
with open(__file__ + ".calls", "a") as file:
    file.write(json.dumps([prompts, completions, scores]) + "\\n")
return scores"""
REWARD = """
def score(prompt, response):
    number = int(prompt.split()[1])
    if number % 3 == 0:
        return 0.5 * number - 1
    if number % 3 == 1:
        return 3 + len(response) / 10
    return 0.5 * (len(response) % 8) - 1.7"""
JUDGE = """
def score(prompt, response):
    return -(len(response) // 8) + len(prompt) / 100"""


def post(word, number, completion=True):
    """A row of the data. Its prompt and its summary begin with this word and this number."""
    prompt = f"{word} {number} a film" + " that I saw" * (number % 4) + "\n\nTL;DR:"
    row = dict(prompt=prompt)
    if completion:
        row["completion"] = f" {word} {number} is" + " good" * (number % 5)
    return row


def asymmetric_data(folder):
    """Splits train, validation and test. One row of each is too long; test has one without a summary."""
    too_long = dict(prompt="Long 99 " + "very " * 60 + "\n\nTL;DR:", completion=" Long 99")
    train = [post("Train", i) for i in range(8)]
    train.insert(3, too_long)
    train.insert(6, dict(prompt="", completion=" empty"))
    validation = [post("Valid", i) for i in range(5)] + [too_long]
    test = [post("Exam", i) for i in range(20, 29)]
    test[4]["completion"] = None
    test.insert(2, too_long)
    return write_rows(folder, train=train, validation=validation, test=test)


def calls_of(path):
    """The recorded calls of a reward or judge function. -> list of lists of (prompt, response, score)"""
    if not path.exists():
        return []
    return [list(zip(*call)) for call in rows_of(path.parent, path.name)]


@pytest.fixture(scope="module")
def trained(scripts, world, tiny_lm, tmp_path_factory):
    """trained(**changes) -> all about a run on asymmetric data, recorded; the same flags run only once."""

    @functools.cache
    def run(**changes):
        return recorded_run(scripts["rloo_tldr"], tmp_path_factory.mktemp("run"), changes)

    root = tmp_path_factory.mktemp("trained")
    run.data = asymmetric_data(root / "data")
    run.lm = wordy(eos_prone(tiny_lm, root / "lm"))

    def recorded_run(script, folder, changes):
        forget_reward_files(folder.parent)
        places = dict(
            dataset_name=run.data,
            model_name_or_path=run.lm,
            reward_fn=reward_file(folder, CALLS.format(score=REWARD.strip())),
            judge_fn=reward_file(folder, CALLS.format(score=JUDGE.strip()), "verdicts")[0],
        )
        args = maker(scripts, world, folder)("rloo_tldr", **(places | FLAGS | changes))
        with pytest.MonkeyPatch.context() as patch, handlers_kept():
            patch.setattr(script, "sample_responses", with_a_gap(script.sample_responses, P * K))
            rollouts = spy(patch, script, "rollout")
            _, run_folder = script.train(args)
        names = ("before", "update 1", "update 2", "after")
        tokenizer = AutoTokenizer.from_pretrained(run.lm)
        parts = {}
        for name, (inputs, (b, responses)) in zip(names, rollouts, strict=True):
            parts[name] = rows_by_hand(tokenizer, b, responses, args.temperature)
            assert [row.prompt for row in parts[name]] == prompts_of(inputs, responses)
        return SimpleNamespace(
            args=args,
            folder=run_folder,
            metrics=rows_of(run_folder),
            table=evaluation_of(run_folder),
            samples=rows_of(run_folder, "evaluation_samples.jsonl"),
            lines=rows_of(run_folder, "tokens.jsonl"),
            parts=parts,
            reward_calls=calls_of(folder / "reward.py.calls"),
            judge_calls=calls_of(folder / "verdicts.py.calls"),
        )

    return run


def prompts_of(inputs, responses):
    """The prompt of each response of a call of rollout. Those of a prompt are neighbors."""
    posts = inputs[5]["examples"]
    return [post["prompt"] for post in posts for _ in range(len(responses) // len(posts))]


def rewards_by_hand(args, rows, raw_scores, kl):
    """-> scores after clipping and penalty, rewards"""
    scores = [min(max(score, -args.score_clip), args.score_clip) for score in raw_scores]
    scores = [score if row.ended else score - args.missing_eos_penalty for row, score in zip(rows, scores)]
    rewards = scores
    if args.kl_estimator == "k1":
        rewards = [score - args.kl_coef * x for score, x in zip(scores, kl)]
    if args.whiten_rewards:
        spread = statistics.pstdev(rewards)
        rewards = [reward / spread for reward in rewards]
    return scores, rewards


def update_by_hand(run, number, rows, policy, reference, optimizer, lr):
    """Train with plain transformers on the rollouts of an update. -> metrics without clocks, samples"""
    args = run.args
    raw_scores = [score for _, _, score in run.reward_calls[number]]
    old, old_entropies, ref, gaps = [], [], [], []
    for row in rows:
        with torch.no_grad():
            logprobs, row_entropies = plain_logprobs(policy, row)
            old.append(logprobs)
            old_entropies.append(row_entropies)
            ref.append(plain_logprobs(reference, row)[0])
        gaps += (row.sampled - old[-1]).abs().tolist()
    kl = [(x - y).sum().item() for x, y in zip(old, ref)]
    scores, rewards = rewards_by_hand(args, rows, raw_scores, kl)
    total = {row.prompt: 0.0 for row in rows}
    for row, reward in zip(rows, rewards):
        total[row.prompt] += reward
    advantages = [x - (total[row.prompt] - x) / (K - 1) for row, x in zip(rows, rewards)]
    advantages = [x if abs(x) > 1e-9 else 0.0 for x in advantages]  # without rounding

    for group in optimizer.param_groups:
        group["lr"] = lr
    losses, log_ratios, clipped, entropies = [], [], [], []
    for epoch in range(EPOCHS):
        order = torch.randperm(P, generator=generator_for(args.seed, "order", number, epoch))
        for minibatch in order.split(P // args.num_mini_batches):
            optimizer.zero_grad()
            for i in [K * prompt + j for prompt in minibatch.tolist() for j in range(K)]:
                logprobs, row_entropies = plain_logprobs(policy, rows[i])
                log_ratio = logprobs.sum() - old[i].sum()
                ratio = log_ratio.exp()
                bounded = ratio.clamp(1 - args.cliprange, 1 + args.cliprange)
                loss = -torch.min(ratio * advantages[i], bounded * advantages[i])
                clipped.append(float(bounded * advantages[i] < ratio * advantages[i]))
                losses.append(loss.item())
                log_ratios.append(log_ratio.item())
                entropies += row_entropies.tolist()
                if args.kl_estimator != "k1":
                    x = logprobs - ref[i]
                    kl_loss = 0.5 * x**2 if args.kl_estimator == "k2" else torch.exp(-x) - 1 + x
                    loss = loss + args.kl_coef * kl_loss.sum()
                (loss / (len(minibatch) * K)).backward()
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm or math.inf)
            optimizer.step()

    ratios = [math.exp(x) for x in log_ratios]
    lengths = [len(row.tokens) for row in rows]
    ended = [row.ended for row in rows]
    responses = [row.response for row in rows]
    samples = []
    for i in range(K):  # the responses to the first prompt
        texts = dict(update=number, prompt=rows[0].prompt, response=responses[i], score=raw_scores[i])
        texts["score paid"] = scores[i]
        numbers = {"ids": rows[i].tokens, "logprob": old[i], "entropy": old_entropies[i]}
        numbers |= {"kl": old[i] - ref[i], "advantage": torch.full([lengths[i]], advantages[i])}
        samples.append(texts | numbers)
    metrics = {
        "update": number,
        "episode": 12 * number,
        "lr": lr,
        "objective/kl": mean(kl),
        "objective/kl_coef": 0.3,
        "objective/entropy": mean([-x.sum().item() for x in old]),
        "objective/non_score_reward": -0.3 * mean(kl),
        "objective/rlhf_reward": mean(scores) - 0.3 * mean(kl),
        "objective/scores": mean(scores),
        "loss/policy_avg": mean(losses),
        "policy/approxkl_avg": mean([0.5 * x**2 for x in log_ratios]),
        "policy/clipfrac_avg": mean(clipped),
        "policy/entropy_avg": mean(entropies),
        "val/ratio": mean(ratios),
        "val/ratio_var": statistics.pvariance(ratios),
        "grad_norm": norm.item(),
        "val/clipfrac_avg": 0.0,
        "val/num_eos_tokens": sum(ended),
        "env/reward_mean": mean(raw_scores),
        "env/reward_std": statistics.pstdev(raw_scores),
        "rewards/reward/mean": mean(raw_scores),
        "frac_reward_zero_std": mean([len(set(group)) == 1 for group in grouped(rows, raw_scores)]),
        "completions/mean_length": mean(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": 1 - mean(ended),
        "completions/distinct_2": bigram_share(responses),
        "sampling/logprob_gap_mean": mean(gaps),
        "sampling/logprob_gap_max": max(gaps),
        "judge/scores": mean([score for _, _, score in run.judge_calls[number - 1]]),
    }
    return metrics, samples


# ---- Training, by hand -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(per_device_train_batch_size=2, gradient_accumulation_steps=3, num_mini_batches=2),
        dict(kl_estimator="k2"),
        dict(kl_estimator="k3", max_grad_norm=0.5),
        dict(whiten_rewards=True, optimizer="torch.optim.AdamW", adam_eps=1e-2),
    ],
    ids=["plain", "minibatches", "k2 in the loss", "k3 in the loss, clipped gradient", "whitened, AdamW"],
)
def test_two_updates_by_hand(trained, changes):
    """Every metric and sample of both updates, and the weights in model/, as in plain transformers."""
    run = trained(**changes)
    policy = AutoModelForCausalLM.from_pretrained(trained.lm).eval()
    reference = AutoModelForCausalLM.from_pretrained(trained.lm).eval()
    if "optimizer" in changes:
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1.0, eps=1e-2)
    else:
        optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    assert len(run.metrics) == 2
    for number, lr in ((1, 0.008), (2, 0.004)):
        expected, samples = update_by_hand(
            run, number, run.parts[f"update {number}"], policy, reference, optimizer, lr
        )
        row = run.metrics[number - 1]
        clocks = {name for name in row if name == "eps" or name.startswith("perf/")}
        assert set(expected) == set(row) - clocks
        for name, x in expected.items():
            assert row[name] == pytest.approx(x, rel=2e-3, abs=2e-5), (number, name)
        for line, wanted in zip(run.lines[K * number - K : K * number], samples, strict=True):
            assert list(line) == list(wanted)
            for name, x in wanted.items():
                if isinstance(x, torch.Tensor):
                    x = pytest.approx(x.tolist(), rel=1e-3, abs=1e-4)
                assert line[name] == (pytest.approx(x) if isinstance(x, float) else x), (number, name)
    assert len(run.lines) == 2 * K
    ours = AutoModelForCausalLM.from_pretrained(run.folder / "model").state_dict()
    assert distance(ours, policy.state_dict()) < 1e-5
    assert distance(ours, reference.state_dict()) > 5e-4


def test_the_fixture_is_asymmetric(trained):
    """Numbers that could be equal by chance are not: otherwise the test above would see less."""
    run = trained()
    for number in (1, 2):
        row, rows = run.metrics[number - 1], run.parts[f"update {number}"]
        assert 0 < sum(r.ended for r in rows) < 12
        assert row["policy/clipfrac_avg"] > 0
        assert row["env/reward_mean"] != pytest.approx(row["objective/scores"], abs=0.1)
    rows = run.parts["update 1"] + run.parts["update 2"]
    assert any(row.ended and len(row.tokens) == T for row in rows)  # EOS on the last allowed token
    assert abs(run.metrics[1]["objective/kl"]) > 0.01
    assert any(0 < row["frac_reward_zero_std"] < 1 for row in run.metrics)
    assert run.table["before"]["distinct bigrams"] < 1
    assert run.table["after"]["distinct bigrams"] != run.table["before"]["distinct bigrams"]


def test_every_training_post_is_used_once_per_epoch(trained):
    """8 usable training posts, 4 prompts per update: in 2 updates each comes once, and in another order."""
    run = trained()
    usable = [post("Train", i)["prompt"] for i in range(8)]
    seen = []
    for number in (1, 2):
        prompts = [row.prompt for row in run.parts[f"update {number}"]]
        assert prompts == [prompt for prompt in prompts[::K] for _ in range(K)]
        assert [prompt for prompt, _, _ in run.reward_calls[number]] == prompts
        seen += prompts[::K]
        rows = run.parts[f"update {number}"]  # the responses of a group differ
        assert all(len(set(group)) > 1 for group in grouped(rows, [tuple(row.tokens) for row in rows]))
    assert sorted(seen) == usable
    assert seen != usable


# ---- The evaluation, by hand -------------------------------------------------------------------------------


def judged(call, samples, responses):
    """The scores of responses and references, from a call of the judge, which gets them as neighbors."""
    scores = []
    for texts, calls in ((responses, call[::2]), ([row["reference"] for row in samples], call[1::2])):
        prompts, seen, scores_of_texts = zip(*calls)
        assert list(prompts) == [row["prompt"] for row in samples]
        assert list(seen) == texts
        scores.append(scores_of_texts)
    return scores


@pytest.mark.parametrize("part", ["before", "after"])
def test_the_final_table_by_hand(trained, part):
    """Every number of evaluation.json, from the texts and from plain transformers."""
    run = trained()
    rows = run.parts[part]
    reference = AutoModelForCausalLM.from_pretrained(trained.lm).eval()
    policy = reference
    if part == "after":
        policy = AutoModelForCausalLM.from_pretrained(run.folder / "model").eval()
    kl = []
    for row in rows:
        with torch.no_grad():
            ours, _ = plain_logprobs(policy, row)
            theirs, _ = plain_logprobs(reference, row)
        assert torch.allclose(ours, row.sampled, atol=1e-4)  # this policy wrote it, at this temperature
        kl.append((ours - theirs).sum().item())
    score, responses = {"before": "score", "after": "score after"}[part], [row.response for row in rows]
    raw_scores = [row[score] for row in run.samples]
    assert len(run.judge_calls) == 4  # both rollouts, then before and after
    call = run.judge_calls[{"before": 2, "after": 3}[part]]
    ours, theirs = judged(call, run.samples, responses)
    verdicts = [1.0 if x > y else 0.5 if x == y else 0.0 for x, y in zip(ours, theirs)]
    expected = {
        "win rate": mean(verdicts),
        "+- (95 % interval)": 1.96 * statistics.pstdev(verdicts) / math.sqrt(6),
        "ties": mean([x == 0.5 for x in verdicts]),
        "no verdict": 0.0,
        "score mean": mean(raw_scores),
        "score mean, +-": 1.96 * statistics.pstdev(raw_scores) / math.sqrt(6),
        "KL, nats per response": mean(kl),
        "ended by itself": mean([row.ended for row in rows]),
        "tokens per response": mean([len(row.tokens) for row in rows]),
        "distinct bigrams": bigram_share(responses),
    }
    assert set(run.table[part]) == set(expected)
    for name, x in expected.items():
        assert run.table[part][name] == pytest.approx(x, rel=1e-3, abs=1e-5), name
    assert 0 < expected["win rate"] < 1
    assert part == "after" or 0 < expected["ended by itself"] < 1
    assert (run.table["n"], run.table["judge"]) == (6, run.args.judge_fn)
    assert run.table["decoding"] == "sampling, temperature 0.7, at most 9 tokens"


def test_the_posts_of_the_evaluation(trained):
    """6 of the 8 usable test posts, each once, with its own summary; no training or validation row."""
    run = trained()
    references = {}
    for i in range(20, 29):
        row = post("Exam", i)
        references[row["prompt"]] = row["completion"]
    without_summary = post("Exam", 24)["prompt"]
    prompts = [row["prompt"] for row in run.samples]
    assert len(set(prompts)) == len(prompts) == 6
    assert set(prompts) <= set(references) - {without_summary}
    assert prompts != sorted(prompts)  # random order
    for row in run.samples:
        assert row["reference"] == references[row["prompt"]]


def test_evaluation_samples(trained):
    """Both responses of each post and their raw scores: before from the first model, after from the last."""
    run = trained()
    assert list(run.samples[0]) == ["prompt", "reference", "before", "score", "after", "score after"]
    for name, score, part, call in (
        ("before", "score", "before", 0),
        ("after", "score after", "after", -1),
    ):
        assert [row[name] for row in run.samples] == [row.response for row in run.parts[part]]
        seen = [(row["prompt"], row[name], pytest.approx(row[score])) for row in run.samples]
        assert run.reward_calls[call] == seen
    assert [row["before"] for row in run.samples] != [row["after"] for row in run.samples]


def test_the_same_random_numbers_before_and_after(trained):
    """A policy that did not learn writes the same again, with another seed too."""
    frozen = trained(learning_rate=0.0)
    assert frozen.table["before"] == frozen.table["after"]
    assert [row["before"] for row in frozen.samples] == [row["after"] for row in frozen.samples]
    assert [row["before"] for row in frozen.samples] == [row["before"] for row in trained().samples]
    other = trained(learning_rate=0.0, seed=4)
    for name in ("prompt", "before"):
        assert [row[name] for row in frozen.samples] == [row[name] for row in other.samples]


def test_a_run_without_a_judge(trained):
    """Without --judge-fn and --judge-model, there is no win rate; evaluation.json says so."""
    run = trained(judge_fn=None)
    assert run.table["judge"] == "none" and "win rate" not in run.table["after"]
    assert "judge/scores" not in run.metrics[0]


def test_a_response_that_completes_a_character(script):
    """A prompt may end inside a character (Llama, Mistral). The response then begins with that character."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"t": 256, "h": 257, "i": 258, "<e>": 259}
    model = tokenizers.models.BPE(vocabulary, [], byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    steps = [tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    backend.decoder = tokenizers.decoders.Sequence(steps)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<e>")
    first, second, third = "€".encode()
    prompts, responses = script.decode(
        tokenizer, [[256, first, second], [256]], [[third, 257, 258], [257, 258, 259]]
    )
    assert prompts == ["t", "t"]  # so that prompt + response is the whole text
    assert responses == ["€hi", "hi"]


# ---- Judges ------------------------------------------------------------------------------------------------


def test_a_post_without_a_verdict_does_not_count(rloo, script, monkeypatch):
    """Neither before nor after training. The win rate is that of the others, here the first and the last."""
    before, after = torch.tensor([1.0, math.nan, 0.0, 0.5]), torch.tensor([0.0, 1.0, math.nan, 1.0])
    verdicts = iter([before, after])
    monkeypatch.setattr(script, "load_judge", lambda *flags: lambda posts, responses: next(verdicts))
    _, folder, _ = rloo(total_episodes=8)
    table = evaluation_of(folder)
    assert [table[part]["win rate"] for part in ("before", "after")] == [0.75, 0.5]
    assert [table[part]["no verdict"] for part in ("before", "after")] == [0.5, 0.5]


@pytest.mark.parametrize("judge, count", [({}, 4), (dict(judge_fn="a.py:f"), 2), (dict(judge_model="m"), 2)])
def test_a_judge_gets_posts_with_a_reference(script, judge, count):
    """Against an empty text, every response would win."""
    posts = [dict(reference=text) for text in ("", " a", " \n", "b")]
    chosen = script.choose_held_out(posts, script.Args(num_eval_prompts=9, **judge))
    assert len(chosen) == count and all(post["reference"].strip() for post in chosen) == bool(judge)


def test_a_judge_of_scores_sees_both_texts_with_their_prompt(script, tiny_lm):
    """The response wins with the higher score, post by post, by however little. Equal scores are a tie.

    So are equal texts, which rounding may give other scores. A post for which one of the two has no score has
    no verdict, whatever the texts.
    """
    calls = []

    def score(prompts, completions, **columns):
        calls.append(1)
        pairs = list(zip(prompts, completions))
        scores = [2000 + prompt.count(text.strip()) for prompt, text in pairs]
        rounding = [1e-3 * i if "same" in prompt else 0.0 for i, prompt in enumerate(prompts)]
        return [None if "?" in prompt else x + y for x, y, prompt in zip(scores, rounding, prompts)]

    def judge(prompts, references):
        posts = [dict(prompt=x, reference=y, columns={}) for x, y in zip(prompts, references, strict=True)]
        return script.compare_scores(get_scores, tokenizer, posts, [" x"] * len(posts)).tolist()

    tokenizer = AutoTokenizer.from_pretrained(tiny_lm())
    get_scores = functools.partial(script.score_responses, {"score": score}, None, torch.device("cpu"))
    prompts = ["x x y", "y y x", "x y", "z y y", "x", "x ?"]
    verdicts = judge(prompts, [" y"] * 6)
    assert verdicts[:5] == [1.0, 0.0, 0.5, 0.0, 1.0] and math.isnan(verdicts[5])
    verdicts = judge(["same ?", "same", "same x"], [" x", " x", " y"])
    assert math.isnan(verdicts[0]) and verdicts[1:] == [0.5, 1.0]


def test_a_chat_judge_reads_the_text_of_a_chat(script, chat_with):
    """Not the list of messages as Python writes it."""
    flags, asked = chat_with(lambda question: "A")
    messages = [dict(role="system", content="Be brief."), dict(role="user", content="What is\n2 + 3?")]
    judge = script.load_judge(script.Args(**flags), None, None, None)
    judge([dict(prompt=messages, reference="5")], ["It is 5."])
    [(question, _)] = asked
    assert "system: Be brief.\n\nuser: What is\n2 + 3?" in question and "{" not in question


def test_a_paid_judge_is_asked_once(script, small, world, chat_with, monkeypatch):
    """About each summary, at the end: not in a run that was stopped, and not twice when it is resumed.

    --judge-fn costs nothing, so it judges each update.
    """
    flags, asked = chat_with(lambda question: "A")
    args = small("rloo_tldr", judge_fn=world.verifier, **flags)
    with monkeypatch.context() as patch:
        stop_after(patch, script, update=1)
        with pytest.raises(SystemExit):
            script.train(args)
    assert asked == []
    _, folder = script.train(script.parse_args(["--resume", args.output_dir]))
    assert len(asked) == 2 * args.num_eval_prompts == 8
    assert evaluation_of(folder)["judge"] == "m"
    assert "judge/scores" in rows_of(folder)[0]
