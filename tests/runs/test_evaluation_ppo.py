"""Every number that the PPO scripts log, save and show, recomputed by hand for small runs.

The runs have different training, validation and test rows, which their first words tell apart. `replay`
repeats the training in plain transformers, one response at a time, from the tokens that the run sampled.
"""

import collections
import math
import resource
from statistics import fmean as mean
from statistics import median, pstdev
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from run_fixtures import handlers_kept
from run_tools import bigram_share, distance, evaluation_of, reward_file, rows_of, spy, write_rows
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GPT2Config

pytest_plugins = ["run_fixtures"]
SCRIPT = "ppo_sentiment"
pytestmark = pytest.mark.xdist_group("evaluation_ppo")  # one worker trains the two runs, once
B = 8  # episodes per update in both runs: 2 minibatches x 2 micro-batches x 2 responses
RATES = [0.4, 0.3, 0.2, 0.1]  # the linear schedule of 4 updates
FLAGS = dict(
    dtype="float32",
    total_episodes=30,  # rounded up to 4 updates
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    num_mini_batches=2,
    num_ppo_epochs=2,
    local_rollout_forward_batch_size=3,
    optimizer="torch.optim.SGD",
    learning_rate=0.4,
    lr_scheduler_type="linear",
    max_grad_norm=0.8,
    kl_coef=0.3,
    kl_target=4.0,
    kl_horizon=60,
    gamma=0.97,
    lam=0.9,
    cliprange=0.05,
    cliprange_value=0.03,
    vf_coef=0.5,
    num_sample_generations=2,
    save_every=0,
)


# ---- Runs --------------------------------------------------------------------------------------------------


def record(script, args, rollout, generate):
    """Train. -> what the run wrote and sampled, and the responses of each micro-batch"""
    micro_batches = []
    forward = script.PolicyAndValue.forward
    plain_generate = getattr(script, generate)

    def recorded_forward(self, ids, *rest):
        if torch.is_grad_enabled():
            micro_batches.append(ids)
        return forward(self, ids, *rest)

    def generate_with_a_gap(*inputs):
        tokens, logprobs, *rest = plain_generate(*inputs)
        return tokens, logprobs - 0.01 * torch.arange(1, tokens.shape[1] + 1), *rest

    with handlers_kept(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(script.PolicyAndValue, "forward", recorded_forward)
        patch.setattr(script, generate, generate_with_a_gap)
        calls = spy(patch, script, rollout)
        _, folder = script.train(args)
    rollouts = [read_rollout(*call) for call in calls]
    return SimpleNamespace(
        script=script,
        args=args,
        folder=folder,
        rows=rows_of(folder),
        evaluation=evaluation_of(folder),
        samples=rows_of(folder, "evaluation_samples.jsonl"),
        rollouts=rollouts,  # before training, updates 1 to 4, after training
        updates=rollouts[1:5],
        micro_batches=micro_batches,
        tokenizer=AutoTokenizer.from_pretrained(args.model_name_or_path),
    )


def read_rollout(inputs, result):
    """What a rollout function got and returned. texts: tokens of prompt and response, without padding."""
    b, *prompts, responses = result
    [batch] = [x for x in inputs if isinstance(x, dict)]
    texts = [ids[is_token] for ids, is_token in zip(b["ids"], b["mask"])]
    return SimpleNamespace(
        batch=batch,
        b=b,
        prompts=prompts[0] if prompts else None,
        responses=responses,
        texts=texts,
        lengths=b["lengths"].tolist(),
    )


def review(start, split):
    """A text whose first two tokens are a letter and the number of its split."""
    endings = [" film was slow.", " very good story about the sea", " bad", " long and dark, with no end."]
    return f"{start}{split}{endings[ord(start) % 4]} The {start} of it."


TRAIN_LETTERS, TEST_LETTERS = "ABCDEFGHIJK", "LMNOPQ"


@pytest.fixture(scope="module")
def reviews_run(scripts, tiny_classifier, tmp_path_factory):
    """A run of ppo_sentiment.py: 11 usable training rows, 6 test rows; a full stop ends a response."""
    root = tmp_path_factory.mktemp("reviews")
    train = [dict(text=text) for text in ("x1 too short", None, "u1 1234567890")]  # the last one has 13
    train += [dict(text=review(letter, 1)) for letter in TRAIN_LETTERS]
    test = [dict(text=review(letter, 2)) for letter in TEST_LETTERS] + [dict(text="y2 short")]
    validation = [dict(text=review(letter, 3)) for letter in "UVWXYZ"]
    data = write_rows(root / "data", train=train, test=test, validation=validation)
    lm = str(ROOT / "checkpoints/reviews-lm")
    args = scripts["ppo_sentiment"].Args(
        model_name_or_path=lm,
        reward_model_path=tiny_classifier("other", labels=("mixed", "negative", "positive")),
        judge_model_path=tiny_classifier("own", labels=("positive", "negative")),
        dataset_name=data,
        output_dir=str(root / "run"),
        min_text_length=13,
        query_min_length=2,
        query_max_length=5,
        response_min_length=3,
        response_length=10,
        stop_token_id=AutoTokenizer.from_pretrained(lm)(".").input_ids,
        temperature=1.3,
        num_eval_prompts=50,  # more than there are
        missing_eos_penalty=0.5,
        score_clip=1.0,
        seed=7,
        **FLAGS,
    )
    run = record(scripts["ppo_sentiment"], args, "rollout", "generate")
    for rollout in run.rollouts:
        texts = [prompt + response for prompt, response in zip(rollout.prompts, rollout.responses)]
        rollout.scores = plain_logits(args.reward_model_path, texts)[:, 2].tolist()  # of the label positive
    run.words_of = str.split
    return run


LONGEST, LIMIT = 18, 12  # tokens of a prompt and of an answer
DIALOGS = {
    "train": [
        (["Hello Ann.", "I am fine, thank you.", "Do you like tea?", "Yes, very much."], [1, 1, 2, 1]),
        (["Where is Ann?", "She is in the garden."], [2, 1]),
        (
            ["It is cold here, Ann.", "I will close the window.", "Thank you.", "You are welcome.", "Good."],
            [3, 4, 1, 1, 1],
        ),
    ],
    "test": [
        (
            ["Hello Bob, how are you today?", "I am fine.", "Good.", "Do you like music?", "Yes, I do."],
            [2, 1, 1, 2, 1],
        ),
        (["Bob, could you lend me your bike?", "Of course, I will lend you my bike."], [3, 4]),
        (["Is Bob there?", "No."], [2, 1]),
    ],
    "validation": [(["Hello Cid.", "Who are you?"], [1, 2])],
}


@pytest.fixture(scope="module")
def dialogs_run(scripts, tiny_intents, tmp_path_factory):
    """A run of ppo_dialog.py with three parts of the reward: 8 training answers, 5 of 6 test answers."""
    root = tmp_path_factory.mktemp("dialogs")
    rows = {}
    for split, dialogs in DIALOGS.items():
        rows[split] = [dict(dialog=texts, act=acts) for texts, acts in dialogs]
    body = "return [len(r) / 50 - len(p) / 100 for p, r in zip(prompts, completions)]"
    args = scripts["ppo_dialog"].Args(
        model_name_or_path=str(ROOT / "checkpoints/dialogs-lm"),
        reward_model_path=tiny_intents("other"),
        reward_fn=reward_file(root, body),
        dataset_name=write_rows(root / "data", **rows),
        output_dir=str(root / "run"),
        utterance_end="eos",
        num_context_utterances=2,
        max_prompt_length=LONGEST,
        response_length=LIMIT,
        temperature=1.2,
        num_eval_prompts=5,
        intent_weight=0.7,
        intent_reward="probability",
        meteor_weight=1.9,
        reward_weights=[-0.4],
        missing_eos_penalty=0.25,
        score_clip=0.9,
        whiten_rewards=True,
        seed=2,
        **FLAGS,
    )
    run = record(scripts["ppo_dialog"], args, "rollout", "generate")
    for rollout in run.rollouts:
        rollout.parts = dialog_parts(run, rollout.batch["turns"], rollout.responses)
        names = ("intent", "meteor", "rewards/reward")
        parts = zip(*[rollout.parts[name] for name in names])
        rollout.scores = [0.7 * intent + 1.9 * meteor - 0.4 * reward for intent, meteor, reward in parts]
    run.words_of = run.script.words_of
    return run


@pytest.fixture(params=["reviews_run", "dialogs_run"])
def run(request):
    """Each of the two runs. replay: what training by hand leads to."""
    run = request.getfixturevalue(request.param)
    if not hasattr(run, "replay"):
        run.replay = replay(run)
    return run


# ---- By hand -----------------------------------------------------------------------------------------------


def plain_logits(folder, texts):
    """A classifier's logits in plain transformers, one text at a time. -> [texts, labels]"""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return torch.cat([model(**tokenizer(text, return_tensors="pt")).logits for text in texts])


def dialog_parts(run, turns, answers):
    """The parts of the reward of each answer, from plain transformers, METEOR and a formula."""
    meteor = run.script.load_meteor()
    texts = [f"{turn.context[-1]} {answer}" for turn, answer in zip(turns, answers)]
    probs = plain_logits(run.args.reward_model_path, texts).softmax(-1)
    parts = collections.defaultdict(list)
    for turn, answer, p in zip(turns, answers, probs.tolist()):
        parts["intent"].append(p[turn.act - 1])
        parts["intent_match"].append(float(p[turn.act - 1] == max(p)))
        parts["meteor"].append(meteor(turn.reference, answer))
        parts["rewards/reward"].append(len(answer) / 50 - len("\n".join(turn.context)) / 100)
    return parts


def plain_lm(folder):
    """A language model in fp32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def next_tokens(model, ids, n, temperature):
    """The log-probabilities [n, V] and hidden states that predict the last n tokens of a text."""
    out = model(ids[None], output_hidden_states=True)
    logp = (out.logits[0, -n - 1 : -1] / temperature).log_softmax(-1)
    return logp, out.hidden_states[-1][0, -n - 1 : -1]


def of_tokens(logp, ids):
    """The numbers in logp [n, V] of the last n tokens."""
    return logp.gather(1, ids[-len(logp) :, None]).squeeze(1)


def row_numbers(ids, b):
    """Which rows of the batch these are. Micro-batches end with their longest response."""
    return [[torch.equal(row, other[: len(row)]) for other in b["ids"]].index(True) for row in ids]


def plain_advantages(rewards, values, gamma, lam):
    """GAE of one response: every advantage is the sum of all later errors, with falling weights."""
    n = len(rewards)
    next_values = [*values[1:], 0.0]
    errors = [rewards[t] + gamma * next_values[t] - values[t] for t in range(n)]
    return [sum((gamma * lam) ** (k - t) * errors[k] for k in range(t, n)) for t in range(n)]


def replay(run):
    """Train in plain transformers with the same tokens and minibatches. -> what must come out"""
    args, temperature = run.args, run.args.temperature
    policy, reference = (plain_lm(args.model_name_or_path) for _ in range(2))
    head = torch.nn.Linear(policy.config.n_embd, 1)
    for p in head.parameters():
        torch.nn.init.zeros_(p)
    parameters = [*policy.parameters(), *head.parameters()]
    kl_coef, micro_batches, history, samples, margins = 0.3, iter(run.micro_batches), [], [], []
    policies = [{name: p.clone() for name, p in policy.state_dict().items()}]
    for update, rate in zip(run.updates, RATES):
        texts, lengths = update.texts, update.lengths
        old, old_values, old_entropies, kl = [], [], [], []
        for ids, n in zip(texts, lengths):
            with torch.no_grad():
                logp, hidden = next_tokens(policy, ids, n, temperature)
                ref = of_tokens(next_tokens(reference, ids, n, temperature)[0], ids)
                old.append(of_tokens(logp, ids))
                old_values.append(head(hidden).squeeze(1))
                old_entropies.append(-(logp.exp() * logp).sum(1))
                kl.append(old[-1] - ref)

        scores, rewards = [], []
        for i, score in enumerate(update.scores):
            score = min(max(score, -args.score_clip), args.score_clip)
            scores.append(score if ended(run, texts[i]) else score - args.missing_eos_penalty)
            rewards.append([-kl_coef * x for x in kl[i].tolist()])
            rewards[i][-1] += scores[i]
        if args.whiten_rewards:
            every = sum(rewards, [])
            rewards = [[mean(every) + (x - mean(every)) / pstdev(every) for x in row] for row in rewards]
        advantages, returns = [], []
        for row, values in zip(rewards, (x.tolist() for x in old_values)):
            advantages.append(plain_advantages(row, values, 0.97, 0.9))
            returns.append(torch.tensor([a + v for a, v in zip(advantages[-1], values)]))
        every = [a for row in advantages for a in row]
        shift, scale = mean(every), pstdev(every)
        advantages = [torch.tensor([(a - shift) / scale for a in row]) for row in advantages]
        columns = dict(logprob=old, entropy=old_entropies, kl=kl, value=old_values, reward=rewards)
        columns["score paid"] = scores
        samples.append(columns | {"return": returns, "advantage": advantages})

        seen = collections.defaultdict(list)
        for _ in range(4):  # 2 epochs of 2 minibatches
            rows = row_numbers(next(micro_batches), update.b) + row_numbers(next(micro_batches), update.b)
            num_tokens = sum(lengths[i] for i in rows)
            loss = 0.0
            for i in rows:
                logp, hidden = next_tokens(policy, texts[i], lengths[i], temperature)
                new, values = of_tokens(logp, texts[i]), head(hidden).squeeze(1)
                ratio = (new - old[i]).exp()
                plain = -advantages[i] * ratio
                policy_loss = torch.max(plain, -advantages[i] * ratio.clamp(0.95, 1.05))
                near = torch.max(torch.min(values, old_values[i] + 0.03), old_values[i] - 0.03)
                squares = (values - returns[i]) ** 2, (near - returns[i]) ** 2
                value_loss = 0.5 * torch.max(*squares)
                loss = loss + (policy_loss + 0.5 * value_loss).sum() / num_tokens
                margins += ((ratio - 1).abs() - 0.05).tolist()
                margins += ((values - old_values[i]).abs() - 0.03).tolist()
                margins += ((values + near) / 2 - returns[i])[near != values].tolist()
                seen["loss/policy_avg"] += policy_loss.tolist()
                seen["loss/value_avg"] += value_loss.tolist()
                seen["policy/entropy_avg"] += (-(logp.exp() * logp).sum(1)).tolist()
                seen["policy/approxkl_avg"] += (0.5 * (new - old[i]) ** 2).tolist()
                seen["policy/clipfrac_avg"] += (policy_loss > plain).float().tolist()
                seen["val/clipfrac_avg"] += (squares[1] > squares[0]).float().tolist()
                seen["val/ratio"] += ratio.tolist()
            gradients = torch.autograd.grad(loss, parameters)
            norm = math.sqrt(sum((g**2).sum().item() for g in gradients))
            for p, g in zip(parameters, gradients):
                p.data -= rate * min(1.0, 0.8 / norm) * g
        metrics = {name: mean(numbers) for name, numbers in seen.items()}
        metrics["val/ratio_var"] = pstdev(seen["val/ratio"]) ** 2
        metrics["grad_norm"] = norm  # of the last step
        kl_per_response = mean([x.sum().item() for x in kl])
        num_ended = sum(ended(run, ids) for ids in texts)
        metrics |= {
            "lr": rate,
            "objective/kl": kl_per_response,
            "objective/kl_coef": kl_coef,
            "objective/entropy": -mean([x.sum().item() for x in old]),
            "objective/non_score_reward": -kl_coef * kl_per_response,
            "objective/rlhf_reward": mean(scores) - kl_coef * kl_per_response,
            "objective/scores": mean(scores),
            "env/reward_mean": mean(update.scores),
            "env/reward_std": pstdev(update.scores),
            "val/num_eos_tokens": num_ended,
            "completions/mean_length": mean(lengths),
            "completions/min_length": min(lengths),
            "completions/max_length": max(lengths),
            "completions/clipped_ratio": 1 - num_ended / B,
            # generate_with_a_gap: 0.01 at the first token, 0.02 at the second, ...
            "sampling/logprob_gap_mean": mean([0.01 * t for n in lengths for t in range(1, n + 1)]),
            "sampling/logprob_gap_max": 0.01 * max(lengths),
        }
        history.append(metrics)
        policies.append({name: p.clone() for name, p in policy.state_dict().items()})
        kl_coef *= 1 + min(max(kl_per_response / 4 - 1, -0.2), 0.2) * B / 60
    assert next(micro_batches, None) is None
    return SimpleNamespace(
        metrics=history,
        policies=policies,
        head=head.state_dict(),
        samples=samples,
        margin=min(map(abs, margins)),  # how near a token came to a limit at which clipping begins
    )


def ended(run, ids):
    """True if the last token is one that ends a response."""
    return ids[-1].item() in (getattr(run.args, "stop_token_id", None) or [run.tokenizer.eos_token_id])


# ---- Training ----------------------------------------------------------------------------------------------


def test_the_runs_are_not_symmetric(run):
    """Otherwise the tests below would see less."""
    stopped = torch.cat([update.b["stopped"] for update in run.updates])
    assert 0 < stopped.sum() < len(stopped)
    for update in run.updates:
        assert len(set(update.lengths)) > 2
        assert update.batch["mask"].sum(1).unique().numel() > 1
    scores = [score for update in run.updates for score in update.scores]
    assert 0 < sum(abs(score) > run.args.score_clip for score in scores) < len(scores)
    for row in run.rows:
        assert 0 < row["policy/clipfrac_avg"] < 1 and 0 < row["val/clipfrac_avg"] < 1
    assert len({row["objective/kl_coef"] for row in run.rows}) == 4


def test_rounding_does_not_decide_what_is_clipped(run):
    """A clipped token has no gradient. Processors round differently, by up to about 1e-5 in these runs: if a
    ratio or a value came that near to its limit, tests below could fail (then choose another seed)."""
    assert run.replay.margin > 5e-5


def test_every_metric_of_every_update(run):
    """metrics.jsonl has these numbers and no others."""
    expected = run.replay.metrics
    assert len(run.rows) == len(expected) == 4
    for i, (row, numbers, update) in enumerate(zip(run.rows, expected, run.updates)):
        numbers |= {
            "update": i + 1,
            "episode": (i + 1) * B,
            "completions/distinct_2": bigram_share(update.responses, run.words_of),
        }
        if run.script.__name__ == "ppo_dialog":
            numbers |= {name: mean(update.parts[name]) for name in ("intent", "intent_match", "meteor")}
            numbers["rewards/reward/mean"] = mean(update.parts["rewards/reward"])
            numbers["custom/questions"] = mean([answer.endswith("?") for answer in update.responses])
        else:
            numbers["rewards/classifier/mean"] = mean(update.scores)
        row = dict(row)
        seconds = row.pop("perf/seconds")
        assert row.pop("eps") * seconds == pytest.approx(B)
        assert row.pop("perf/tokens_per_second") * seconds == pytest.approx(sum(update.lengths))
        parts = [row.pop("perf/rollout_seconds"), row.pop("perf/train_seconds")]
        assert min(parts) > 0 and sum(parts) == pytest.approx(seconds)
        memory = row.pop("perf/peak_memory_mb")
        assert 50 < memory <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        assert row == pytest.approx(numbers, rel=2e-3, abs=2e-4)


def test_the_saved_model_is_the_policy_after_the_last_update(run):
    """In plain transformers, model/ and the value head have the weights that training by hand leads to."""
    by_hand = run.replay
    saved = plain_lm(run.folder / "model").state_dict()
    last, earlier = by_hand.policies[4], by_hand.policies[3]
    gap, step = distance(saved, last), distance(earlier, last)
    assert gap < 1e-4 and gap < step / 50
    head = load_file(run.folder / "model/value_head.safetensors")
    for name, x in by_hand.head.items():
        torch.testing.assert_close(head[name], x, atol=1e-4, rtol=1e-3)


def test_minibatches(run):
    """Every epoch has each response once, and no two epochs of the run have the same order."""
    orders = []
    micro_batches = iter(run.micro_batches)
    for update in run.updates:
        for _ in range(2):
            orders.append(sum([row_numbers(next(micro_batches), update.b) for _ in range(4)], []))
    assert all(sorted(order) == list(range(B)) for order in orders)
    assert len({tuple(order) for order in orders}) == 8
    assert list(range(B)) not in orders


def test_responses_come_from_the_policy_of_their_time(run):
    """Every rollout inverts the cumulative distribution of its policy, up to the end or the limit."""
    policies = run.replay.policies
    model = plain_lm(run.args.model_name_or_path)
    assert len(run.rollouts) == 6
    for rollout, updates_done in zip(run.rollouts, (0, 0, 1, 2, 3, 4)):
        model.load_state_dict(policies[updates_done])
        limits = rollout.batch.get("max_new_tokens", torch.full((B,), LIMIT)).tolist()
        for i, (ids, n) in enumerate(zip(rollout.texts, rollout.lengths)):
            with torch.no_grad():
                logp, _ = next_tokens(model, ids, n, run.args.temperature)
            ends = logp.double().exp().cumsum(1)
            for t in range(n):
                token, u = ids[t - n].item(), rollout.batch["uniforms"][i, t].item()
                start = ends[t, token - 1].item() if token else 0.0
                assert start - 1e-3 <= u <= ends[t, token].item() + 1e-3
            is_end = [ended(run, ids[: len(ids) - n + t + 1]) for t in range(n)]
            assert not any(is_end[:-1])
            assert is_end[-1] or n == limits[i]
            assert rollout.b["stopped"][i].item() == is_end[-1]


# ---- Which rows --------------------------------------------------------------------------------------------


def test_which_reviews_train_and_which_are_evaluated(reviews_run):
    """Usable rows of train in two epochs; each row of test once, in the order of seed 0; never validation."""
    run = reviews_run
    trained = [prompt[:2] for update in run.updates for prompt in update.prompts]
    usable = [f"{letter}1" for letter in TRAIN_LETTERS]
    assert trained == [usable[i] for i in run.script.stream_rows(11, 0, 32, 7).tolist()]
    assert sorted(trained[:11]) == sorted(trained[11:22]) == usable
    evaluated = [row["prompt"][:2] for row in run.samples]
    assert evaluated == [f"{TEST_LETTERS[i]}2" for i in run.script.stream_rows(6, 0, 6, 0).tolist()]
    assert run.evaluation["n"] == len(set(evaluated)) == 6 and evaluated != sorted(evaluated)


def test_prompts_are_the_beginnings_of_reviews(reviews_run):
    """Lengths and limits have both ends of their ranges. Each update draws others, like the evaluation."""
    run, lengths, limits = reviews_run, set(), set()
    for rollout in (run.rollouts[0], *run.updates):
        for ids, mask, prompt in zip(rollout.batch["ids"], rollout.batch["mask"], rollout.prompts):
            whole = run.tokenizer(review(prompt[0], prompt[1])).input_ids
            tokens = ids[mask].tolist()
            assert mask.tolist() == [False] * (5 - len(tokens)) + [True] * len(tokens)
            assert tokens == whole[: len(tokens)]
            assert run.tokenizer.decode(tokens) == prompt
            lengths.add(len(tokens))
        limits |= set(rollout.batch["max_new_tokens"].tolist())
    assert (lengths, limits) == (set(range(2, 6)), set(range(3, 11)))
    for name in ("max_new_tokens", "uniforms"):
        draws = [str(rollout.batch[name][:6].tolist()) for rollout in (run.rollouts[0], *run.updates)]
        assert len(set(draws)) == 5


def test_which_answers_train_and_which_are_evaluated(dialogs_run):
    """All 8 turns of train in four epochs; 5 of 6 turns of test in the order of seed 0."""
    run, turns = dialogs_run, {}
    for split, dialogs in DIALOGS.items():
        turns[split] = [(texts[:t], texts[t]) for texts, _ in dialogs for t in range(1, len(texts))]
    trained = [turn for update in run.updates for turn in update.batch["turns"]]
    expected = [turns["train"][i] for i in run.script.stream_rows(8, 0, 32, run.args.seed).tolist()]
    assert [(turn.context, turn.reference) for turn in trained] == expected
    order = run.script.stream_rows(6, 0, 5, 0).tolist()
    assert order != sorted(order)
    expected = [turns["test"][i] for i in order]
    for rollout in (run.rollouts[0], run.rollouts[-1]):
        assert [(turn.context, turn.reference) for turn in rollout.batch["turns"]] == expected
    assert [(row["last"], row["reference"]) for row in run.samples] == [
        (context[-1], reference) for context, reference in expected
    ]


# ---- The final table ---------------------------------------------------------------------------------------


def columns(run):
    """Before and after training: the column's name, the rollout, the model by plain transformers."""
    models = plain_lm(run.args.model_name_or_path), plain_lm(run.folder / "model")
    return zip(("before", "after"), (run.rollouts[0], run.rollouts[-1]), models)


def score_numbers(scores):
    """Of both tables."""
    return {
        "score mean": mean(scores),
        "score mean, +-": 1.96 * pstdev(scores) / len(scores) ** 0.5,
        "score median": median(scores),
    }


def kl_of_responses(run, model, rollout):
    """The KL of each response, estimated from its own tokens."""
    reference = plain_lm(run.args.model_name_or_path)
    kl = []
    for ids, n in zip(rollout.texts, rollout.lengths):
        with torch.no_grad():
            ref = of_tokens(next_tokens(reference, ids, n, run.args.temperature)[0], ids)
            new = of_tokens(next_tokens(model, ids, n, run.args.temperature)[0], ids)
        kl.append((new - ref).sum().item())
    return kl


def check_samples(run, column, rollout):
    """evaluation_samples.jsonl has the responses of a rollout, and their scores."""
    assert [row[column] for row in run.samples] == rollout.responses
    score_column = {"before": "score", "after": "score after"}[column]
    scores = [row[score_column] for row in run.samples]
    assert scores == pytest.approx(rollout.scores, rel=1e-4, abs=1e-4)


def test_the_table_of_reviews(reviews_run):
    """Every number before and after, from the texts and the saved model."""
    run = reviews_run
    for column, rollout, model in columns(run):
        check_samples(run, column, rollout)
        assert [row["prompt"] for row in run.samples] == rollout.prompts
        texts = [run.tokenizer.decode(ids, skip_special_tokens=True) for ids in rollout.texts]
        assert texts == [prompt + text for prompt, text in zip(rollout.prompts, rollout.responses)]
        judged = plain_logits(run.args.judge_model_path, texts).softmax(-1)[:, 0].tolist()
        expected = score_numbers(rollout.scores) | {
            "KL, nats per response": mean(kl_of_responses(run, model, rollout)),
            "distinct bigrams": bigram_share(rollout.responses),
            "tokens per response": mean(rollout.lengths),
            "judge: P(positive)": mean(judged),
        }
        assert run.evaluation[column] == pytest.approx(expected, rel=1e-3, abs=1e-4)
        assert expected["score mean"] != pytest.approx(expected["score median"], abs=1e-2)
    before, after = run.evaluation["before"], run.evaluation["after"]
    assert before["KL, nats per response"] == 0 and after["KL, nats per response"] > 0.1


def test_the_table_of_dialogs(dialogs_run):
    """Every number before and after, and of the references."""
    import sacrebleu
    from rouge_score.rouge_scorer import RougeScorer

    run = dialogs_run
    rouge = RougeScorer(["rouge1", "rougeLsum"], use_stemmer=True)
    turns = run.rollouts[0].batch["turns"]
    references = [row["reference"] for row in run.samples]

    def variety(texts):
        every = [word for text in texts for word in run.words_of(text.lower())]
        return {
            "distinct1": len(set(every)) / len(every),
            "distinct2": bigram_share(texts, run.words_of),
            "custom/questions": mean([text.endswith("?") for text in texts]),
        }

    for column, rollout, model in columns(run):
        check_samples(run, column, rollout)
        answers, parts = rollout.responses, rollout.parts
        of_references = []
        for turn, ids, is_token in zip(turns, rollout.batch["ids"], rollout.batch["mask"]):
            reference = run.tokenizer(f" {turn.reference}").input_ids + [0]
            ids = torch.cat([ids[is_token], torch.tensor(reference)])
            with torch.no_grad():
                of_references += of_tokens(next_tokens(model, ids, len(reference), 1.0)[0], ids).tolist()
        found = [rouge.score(*pair) for pair in zip(references, answers)]
        expected = score_numbers(rollout.scores) | {
            "rouge1": mean([x["rouge1"].fmeasure for x in found]),
            "rougeLsum": mean([x["rougeLsum"].fmeasure for x in found]),
            "meteor": mean(parts["meteor"]),
            "sacrebleu": sacrebleu.BLEU(force=True).corpus_score(answers, [references]).score / 100,
            "intent": mean(parts["intent"]),
            "intent_match": mean(parts["intent_match"]),
            "rewards/reward/mean": mean(parts["rewards/reward"]),
            "tokens per answer": mean(rollout.lengths),
            "perplexity of the references": math.exp(-mean(of_references)),
            "KL, nats per response": mean(kl_of_responses(run, model, rollout)),
            **variety(answers),
        }
        assert run.evaluation[column] == pytest.approx(expected, rel=1e-3, abs=1e-4)
        assert expected["intent_match"] != pytest.approx(expected["intent"], abs=0.01)
        assert expected["score mean"] != pytest.approx(expected["score median"], abs=1e-3)
    own = {"tokens per answer": mean([len(turn.reference_tokens) for turn in turns]), **variety(references)}
    assert run.evaluation["references"] == pytest.approx(own)


def test_samples_of_a_run(run):
    """tokens.jsonl: the first four responses of updates 1, 2 and 4, with all numbers of their tokens."""
    samples = rows_of(run.folder, "tokens.jsonl")
    assert [row["update"] for row in samples] == [1] * 4 + [2] * 4 + [4] * 4
    text = "answer" if run.script.__name__ == "ppo_dialog" else "response"
    for rows, update in ((samples[:4], 0), (samples[4:8], 1), (samples[8:], 3)):
        rollout = run.updates[update]
        for i, row in enumerate(rows):
            assert row[text] == rollout.responses[i]
            assert row["ids"] == rollout.texts[i][-rollout.lengths[i] :].tolist()
            assert row["score"] == pytest.approx(rollout.scores[i], rel=1e-4, abs=1e-4)
            for name, column in run.replay.samples[update].items():
                expected = torch.as_tensor(column[i]).tolist()
                assert row[name] == pytest.approx(expected, rel=2e-3, abs=2e-3), name


# ---- Single functions --------------------------------------------------------------------------------------


def test_which_stop_tokens(script):
    """The ids that are given, even 0; none; or EOS and those of the generation config."""
    tokenizer = SimpleNamespace(eos_token_id=9, chat_template=None)

    def found(eos, **flags):
        config = GPT2Config(vocab_size=10)
        policy = SimpleNamespace(config=config, generation_config=SimpleNamespace(eos_token_id=eos))
        return script.find_stop_tokens(script.Args(**flags), tokenizer, policy).tolist()

    assert found(None) == found(9) == [9]
    assert found([7, 9]) == [7, 9]
    assert found(7, stop_token=None) == [-1]  # the id of no token
    assert found(7, stop_token_id=[0]) == [0]
    assert found(7, stop_token_id=[4, 2], stop_token=None) == [4, 2]


@pytest.mark.parametrize("name", ["ppo_sentiment", "rloo_tldr", "grpo_math"])
def test_stop_tokens_on_the_command_line(scripts, name):
    """One, as in TRL's commands, or several."""
    parse = scripts[name].parse_args
    assert parse(["tiny"]).stop_token_id is None
    assert parse(["tiny", "--stop_token_id", "7"]).stop_token_id == [7]
    assert parse(["tiny", "--stop-token-id", "151643", "151645"]).stop_token_id == [151643, 151645]


def test_which_split_is_held_out(script, tmp_path):
    """test; without it validation; without both a random tenth of train, which is then not trained on."""
    rows, test, validation = [dict(text=f"row {i}") for i in range(25)], [dict(text="t")], [dict(text="v")]

    def load(folder, **splits):
        return script.load_splits(write_rows(tmp_path / folder, train=rows, **splits))

    assert load("all", validation=validation, test=test) == (rows, test)
    assert load("no test", validation=validation) == (rows, validation)
    train, held_out = load("train only")
    assert len(held_out) == 3 and sorted(map(rows.index, held_out + train)) == list(range(25))

    # From everywhere, and all responses to a prompt are on the same side.
    rows = [dict(prompt=f"prompt {i // 5}", response=i) for i in range(1000)]
    train, held_out = load("prompts")
    assert len(held_out) == 100 and len({row["response"] % 10 for row in held_out}) == 10
    assert 20 < sum(row["response"] < 500 for row in held_out) < 80
    assert not {row["prompt"] for row in held_out} & {row["prompt"] for row in train}

    # Also if all rows have the same prompt, and the file is sorted.
    rows = [dict(prompt="Write!", label=i // 50) for i in range(100)]
    rows = [row | dict(text=str(i)) for i, row in enumerate(rows)]
    assert {row["label"] for row in load("one prompt")[1]} == {0, 1}
