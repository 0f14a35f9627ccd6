"""Every number that the PPO scripts log, save and show, recomputed by hand for small runs.

The runs have different training, validation and test rows, which their first words tell apart. `replay`
repeats the training in plain transformers, one response at a time, from the tokens that the run sampled.
"""

import collections
import contextlib
import io
import json
import math
import re
import resource
import statistics
import time
from statistics import fmean as mean
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from conftest import PPO, RL, ROOT
from run_tools import evaluation_of, reward_file, rows_of, same, spy, weights, write_rows
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


class Clock:
    """In place of the module time: it moves only when a test moves it."""

    def __init__(self):
        self.now = 1000.0

    def time(self):
        return self.now

    def strftime(self, form):
        return time.strftime(form)

    def after(self, function, seconds):
        """The same function, which now takes this long."""

        def slow(*args, **kwargs):
            result = function(*args, **kwargs)
            self.now += seconds
            return result

        return slow


def record(script, args, rollout, generate):
    """Train. -> what the run wrote, printed and sampled, and the responses of each micro-batch"""
    from run_fixtures import handlers_kept

    clock, screen, micro_batches = Clock(), io.StringIO(), []
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
        patch.setattr(script, "compare_logprobs", lambda *inputs: None)  # it would refuse the gap
        patch.setattr(script, "time", clock)
        patch.setattr(script, rollout, clock.after(getattr(script, rollout), 2.0))
        clip_grad_norm = clock.after(Accelerator.clip_grad_norm_, 3.0)
        patch.setattr(Accelerator, "clip_grad_norm_", clip_grad_norm)
        rollouts = spy(patch, script, rollout)
        patch.setenv("COLUMNS", "200")
        with contextlib.redirect_stdout(screen):
            _, folder = script.train(args)
    return SimpleNamespace(
        script=script,
        args=args,
        folder=folder,
        screen=screen.getvalue(),
        rows=rows_of(folder),
        evaluation=evaluation_of(folder),
        samples=rows_of(folder, "evaluation_samples.jsonl"),
        rollouts=rollouts,  # before training, updates 1 to 4, after training
        updates=rollouts[1:5],
        micro_batches=micro_batches,
        tokenizer=AutoTokenizer.from_pretrained(args.model_name_or_path),
    )


def review(start, split):
    """A text whose first two tokens are a letter and the number of its split."""
    endings = [" film was slow.", " very good story about the sea", " bad", " long and dark, with no end."]
    return f"{start}{split}{endings[ord(start) % 4]} The {start} of it."


TRAIN_LETTERS, TEST_LETTERS = "ABCDEFGHIJK", "LMNOPQRST"


@pytest.fixture(scope="module")
def reviews_run(scripts, tiny_classifier, tmp_path_factory):
    """A run of ppo_sentiment.py: 11 usable training rows, 6 of 9 test rows; a full stop ends a response."""
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
        stop_token_id=AutoTokenizer.from_pretrained(lm)(".").input_ids[0],
        temperature=1.3,
        num_eval_prompts=6,
        missing_eos_penalty=0.5,
        score_clip=1.0,
        seed=7,
        **FLAGS,
    )
    run = record(scripts["ppo_sentiment"], args, "rollout", "generate")
    run.new_texts = [responses for _, (_, _, responses) in run.updates]
    run.scores = [review_scores(run, prompts, responses) for _, (_, prompts, responses) in run.updates]
    return run


def review_scores(run, prompts, responses):
    """The logit of the third label, positive, in plain transformers."""
    texts = [prompt + response for prompt, response in zip(prompts, responses)]
    return plain_logits(run.args.reward_model_path, texts)[:, 2].tolist()


LONGEST, LIMIT = 18, 12  # tokens of a prompt and of an answer
DIALOGS = {
    "train": [
        ["Hello Ann.", "I am fine, thank you.", "Do you like tea?", "Yes, I like it very much."],
        ["Where is Ann?", "She is in the garden."],
        ["It is cold here, Ann.", "I will close the window.", "Thank you.", "You are welcome.", "Good."],
    ],
    "test": [
        ["Hello Bob, how are you today?", "I am fine.", "Good.", "Do you like music?", "Yes, I do."],
        ["Bob, could you lend me your bike?", "Of course, I will lend you my bike."],
        ["Is Bob there?", "No."],
    ],
    "validation": [["Hello Cid.", "Who are you?"]],
}
ACTS = {
    "train": [[1, 1, 2, 1], [2, 1], [3, 4, 1, 1, 1]],
    "test": [[2, 1, 1, 2, 1], [3, 4], [2, 1]],
    "validation": [[1, 2]],
}


@pytest.fixture(scope="module")
def dialogs_run(scripts, tiny_intents, tmp_path_factory):
    """A run of ppo_dialog.py with three parts of the reward: 8 training answers, 5 of 6 test answers."""
    root = tmp_path_factory.mktemp("dialogs")
    rows = {}
    for split, dialogs in DIALOGS.items():
        rows[split] = [dict(dialog=texts, act=acts) for texts, acts in zip(dialogs, ACTS[split])]
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
        seed=6,
        **FLAGS,
    )
    run = record(scripts["ppo_dialog"], args, "rollout_answers", "generate_until")
    run.new_texts = [answers for _, (_, answers) in run.updates]
    run.parts = [dialog_parts(run, inputs[5]["turns"], answers) for inputs, (_, answers) in run.updates]
    run.scores = [dialog_scores(parts) for parts in run.parts]
    return run


@pytest.fixture(params=["reviews_run", "dialogs_run"])
def run(request):
    """Each of the two runs."""
    return request.getfixturevalue(request.param)


# ---- By hand -----------------------------------------------------------------------------------------------


def plain_logits(folder, texts):
    """A classifier's logits in plain transformers, one text at a time. -> [texts, labels]"""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return torch.cat([model(**tokenizer(text, return_tensors="pt")).logits for text in texts])


def dialog_parts(run, turns, answers):
    """The parts of the reward of each answer, from plain transformers, nltk and a formula."""
    texts = [f"{turn.context[-1]} {answer}" for turn, answer in zip(turns, answers)]
    probs = plain_logits(run.args.reward_model_path, texts).softmax(-1)
    parts = collections.defaultdict(list)
    for turn, answer, p in zip(turns, answers, probs.tolist()):
        parts["intent"].append(p[turn.act - 1])
        parts["intent_match"].append(float(p[turn.act - 1] == max(p)))
        parts["meteor"].append(plain_meteor(turn.reference, answer))
        parts["rewards/reward"].append(len(answer) / 50 - len("\n".join(turn.context)) / 100)
    return parts


def plain_meteor(reference, answer):
    """nltk's METEOR. WordNet counts if it is installed."""
    from nltk.corpus import wordnet
    from nltk.tokenize import NLTKWordTokenizer
    from nltk.translate.meteor_score import single_meteor_score

    words = NLTKWordTokenizer().tokenize
    try:
        wordnet.ensure_loaded()
    except LookupError:
        wordnet = SimpleNamespace(synsets=lambda word: [])
    return single_meteor_score(words(reference), words(answer), wordnet=wordnet)


def dialog_scores(parts):
    """0.7 intent + 1.9 METEOR - 0.4 function."""
    names = ("intent", "meteor", "rewards/reward")
    return [0.7 * i + 1.9 * m - 0.4 * f for i, m, f in zip(*[parts[name] for name in names])]


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


def texts_of(b):
    """The tokens of each row without padding, and the lengths of the responses."""
    return [row[m] for row, m in zip(b["ids"], b["mask"])], b["lengths"].tolist()


def plain_std(numbers):
    """Of the population."""
    return math.sqrt(mean([(x - mean(numbers)) ** 2 for x in numbers]))


def plain_distinct_bigrams(texts, words):
    """Different pairs of neighboring words / all pairs."""
    pairs = [pair for text in texts for pair in zip(words(text.lower()), words(text.lower())[1:])]
    return len(set(pairs)) / len(pairs)


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
    """Train in plain transformers with the same tokens and minibatches. -> metrics, policies, value head"""
    args, temperature = run.args, run.args.temperature
    policy, reference = (plain_lm(args.model_name_or_path) for _ in range(2))
    head = torch.nn.Linear(policy.config.n_embd, 1)
    for p in head.parameters():
        torch.nn.init.zeros_(p)
    parameters = [*policy.parameters(), *head.parameters()]
    kl_coef, micro_batches, history, samples = 0.3, iter(run.micro_batches), [], []
    policies = [{name: p.clone() for name, p in policy.state_dict().items()}]
    for (_, (b, *_)), raw_scores, rate in zip(run.updates, run.scores, RATES):
        texts, lengths = texts_of(b)
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
        for i, score in enumerate(raw_scores):
            score = min(max(score, -args.score_clip), args.score_clip)
            scores.append(score if ended(run, texts[i]) else score - args.missing_eos_penalty)
            rewards.append([-kl_coef * x for x in kl[i].tolist()])
            rewards[i][-1] += scores[i]
        if args.whiten_rewards:
            every = sum(rewards, [])
            rewards = [[mean(every) + (x - mean(every)) / plain_std(every) for x in row] for row in rewards]
        advantages, returns = [], []
        for row, values in zip(rewards, (x.tolist() for x in old_values)):
            advantages.append(plain_advantages(row, values, 0.97, 0.9))
            returns.append(torch.tensor([a + v for a, v in zip(advantages[-1], values)]))
        every = [a for row in advantages for a in row]
        shift, scale = mean(every), plain_std(every)
        advantages = [torch.tensor([(a - shift) / scale for a in row]) for row in advantages]
        columns = dict(logprob=old, entropy=old_entropies, kl=kl, value=old_values, reward=rewards)
        samples.append(columns | {"return": returns, "advantage": advantages})

        seen = collections.defaultdict(list)
        for _ in range(4):  # 2 epochs of 2 minibatches
            rows = row_numbers(next(micro_batches), b) + row_numbers(next(micro_batches), b)
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
        metrics["val/ratio_var"] = plain_std(seen["val/ratio"]) ** 2
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
            "env/reward_mean": mean(raw_scores),
            "env/reward_std": plain_std(raw_scores),
            "val/num_eos_tokens": num_ended,
            "completions/mean_length": mean(lengths),
            "completions/min_length": min(lengths),
            "completions/max_length": max(lengths),
            "completions/clipped_ratio": 1 - num_ended / B,
            # generate_with_a_gap: 0.01 at the first token, 0.02 at the second, ...
            "sampling/logprob_gap_mean": mean([0.01 * t for n in lengths for t in range(1, n + 1)]),
            "sampling/logprob_gap_max": 0.01 * max(lengths),
            "perf/tokens_per_second": sum(lengths) / 14,
        }
        history.append(metrics)
        policies.append({name: p.clone() for name, p in policy.state_dict().items()})
        kl_coef *= 1 + min(max(kl_per_response / 4 - 1, -0.2), 0.2) * B / 60
    assert next(micro_batches, None) is None
    return SimpleNamespace(
        metrics=history, policies=policies, head=head.state_dict(), kl_coef=kl_coef, samples=samples
    )


def ended(run, ids):
    """True if the last token is the one that ends a response."""
    return ids[-1].item() == (getattr(run.args, "stop_token_id", None) or run.tokenizer.eos_token_id)


@pytest.fixture(scope="module")
def replays():
    """replays(run) -> what replay returns, once per run."""
    known = {}

    def get(run):
        if run.args.output_dir not in known:
            known[run.args.output_dir] = replay(run)
        return known[run.args.output_dir]

    return get


# ---- Training ----------------------------------------------------------------------------------------------


def test_the_runs_are_not_symmetric(run):
    """The tests below can see something: lengths, ends, clipping and scores differ from row to row."""
    num_stopped = [b["stopped"].sum().item() for _, (b, *_) in run.updates]
    assert all(num_stopped) and min(num_stopped) < B
    for _, (b, *_) in run.updates:
        assert b["lengths"].unique().numel() > 2
        assert b["mask"][:, : -run.args.response_length].sum(1).unique().numel() > 1
    scores = [score for row in run.scores for score in row]
    assert 0 < sum(abs(score) > run.args.score_clip for score in scores) < len(scores)
    for name in ("policy/clipfrac_avg", "val/clipfrac_avg"):
        assert all(0 < row[name] < 1 for row in run.rows)
    assert run.rows[3]["objective/kl"] > 0.1
    assert len({row["objective/kl_coef"] for row in run.rows}) == 4


def test_every_metric_of_every_update(run, replays):
    """metrics.jsonl has these numbers and no others."""
    expected = replays(run).metrics
    assert len(run.rows) == len(expected) == 4
    for i, (row, numbers) in enumerate(zip(run.rows, expected)):
        responses = run.new_texts[i]
        numbers |= {
            "update": i + 1,
            "episode": (i + 1) * B,
            "eps": B / 14,  # 2 seconds for the rollout, 3 for each of 4 steps
            "perf/seconds": 14,
            "perf/rollout_seconds": 2,
            "perf/train_seconds": 12,
            "completions/distinct_2": plain_distinct_bigrams(responses, words_of(run)),
        }
        if hasattr(run, "parts"):
            numbers |= {name: mean(run.parts[i][name]) for name in ("intent", "intent_match", "meteor")}
            numbers["rewards/reward/mean"] = mean(run.parts[i]["rewards/reward"])
            numbers["custom/questions"] = mean([answer.endswith("?") for answer in responses])
        else:
            numbers["rewards/classifier/mean"] = mean(run.scores[i])
        memory = row.pop("perf/peak_memory_mb")
        assert 50 < memory <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        assert row.keys() == numbers.keys()
        for name, number in numbers.items():
            assert row[name] == pytest.approx(number, rel=2e-3, abs=2e-4), (name, i + 1)
        row["perf/peak_memory_mb"] = memory


def words_of(run):
    """How the run splits a text into words."""
    if not hasattr(run, "parts"):
        return str.split
    from nltk.tokenize import NLTKWordTokenizer

    return NLTKWordTokenizer().tokenize


def test_the_saved_model_is_the_policy_after_the_last_update(run, replays):
    """In plain transformers, model/ and the value head have the weights that training by hand leads to."""
    by_hand = replays(run)
    saved = plain_lm(run.folder / "model").state_dict()
    last, earlier = by_hand.policies[4], by_hand.policies[3]
    assert saved.keys() == last.keys()
    gap = max((saved[name] - last[name]).abs().max().item() for name in last)
    step = max((earlier[name] - last[name]).abs().max().item() for name in last)
    assert gap < 1e-4 and gap < step / 50
    head = load_file(run.folder / "model/value_head.safetensors")
    for name, x in by_hand.head.items():
        torch.testing.assert_close(head[name], x, atol=1e-4, rtol=1e-3)
    assert AutoTokenizer.from_pretrained(run.folder / "model").get_vocab() == run.tokenizer.get_vocab()


def test_the_last_checkpoint(run, replays):
    """It holds the trained weights, the next KL coefficient and the number of the update."""
    folder = run.folder / "checkpoints/000004"
    state = json.loads((folder / "state.json").read_text())
    assert (state["update"], state["batch_size"]) == (4, B)
    assert state["kl_coef"] == pytest.approx(replays(run).kl_coef, rel=1e-4)
    trained = load_file(folder / "trained.safetensors")
    parameters = {name: x for name, x in trained.items() if name.startswith("policy.")}
    saved = {f"policy.{name}": x for name, x in weights(run.folder / "model").items()}
    assert same({name: saved[name] for name in parameters}, parameters)
    head = load_file(run.folder / "model/value_head.safetensors")
    assert torch.equal(trained["value_head.weight"], head["weight"])
    assert len(parameters) + 2 == len(trained)


def test_minibatches(run):
    """Every epoch has each response once, and no two epochs of the run have the same order."""
    orders = []
    for update, (_, (b, *_)) in enumerate(run.updates):
        for epoch in range(2):
            start = 8 * update + 4 * epoch
            orders.append(sum([row_numbers(ids, b) for ids in run.micro_batches[start : start + 4]], []))
    assert all(sorted(order) == list(range(B)) for order in orders)
    assert len({tuple(order) for order in orders}) == 8
    assert list(range(B)) not in orders


def test_responses_come_from_the_policy_of_their_time(run, replays):
    """Every rollout inverts the cumulative distribution of its policy, up to the end or the limit."""
    policies = replays(run).policies
    model = plain_lm(run.args.model_name_or_path)
    assert len(run.rollouts) == 6
    for (inputs, (b, *_)), updates_done in zip(run.rollouts, (0, 0, 1, 2, 3, 4)):
        model.load_state_dict(policies[updates_done])
        batch = next(x for x in inputs if isinstance(x, dict))
        limits = batch.get("max_new_tokens", torch.full((len(b["ids"]),), LIMIT)).tolist()
        texts, lengths = texts_of(b)
        for i, (ids, n) in enumerate(zip(texts, lengths)):
            with torch.no_grad():
                logp, _ = next_tokens(model, ids, n, run.args.temperature)
            ends = logp.double().exp().cumsum(1)
            for t in range(n):
                token, u = ids[t - n].item(), batch["uniforms"][i, t].item()
                start = ends[t, token - 1].item() if token else 0.0
                assert start - 1e-3 <= u <= ends[t, token].item() + 1e-3
            is_end = [ended(run, ids[: len(ids) - n + t + 1]) for t in range(n)]
            assert not any(is_end[:-1])
            assert is_end[-1] or n == limits[i]
            assert b["stopped"][i].item() == is_end[-1]


# ---- Which rows --------------------------------------------------------------------------------------------


def test_which_reviews_train_and_which_are_evaluated(reviews_run):
    """Usable rows of train in two passes; 6 different rows of test in the seed's order; never validation."""
    run = reviews_run
    trained = [prompt[:2] for _, (_, prompts, _) in run.updates for prompt in prompts]
    usable = [f"{letter}1" for letter in TRAIN_LETTERS]
    order = run.script.stream_rows(11, 0, 32, 7).tolist()
    assert trained == [usable[i] for i in order]
    assert sorted(trained[:11]) == sorted(trained[11:22]) == usable
    evaluated = [row["prompt"][:2] for row in run.samples]
    order = run.script.stream_rows(9, 0, 6, 7).tolist()
    assert evaluated == [f"{TEST_LETTERS[i]}2" for i in order]
    assert len(set(evaluated)) == 6
    assert order != sorted(order)


def test_prompts_are_the_beginnings_of_reviews(reviews_run):
    """Lengths and limits have both ends of their ranges. Each update draws others, like the evaluation."""
    run = reviews_run
    whole = {}
    for split, letters in ((1, TRAIN_LETTERS), (2, TEST_LETTERS)):
        whole |= {f"{letter}{split}": run.tokenizer(review(letter, split)).input_ids for letter in letters}
    draws = []
    for (*_, batch), (_, prompts, _) in (run.rollouts[0], *run.updates):
        for ids, mask, prompt in zip(batch["ids"], batch["mask"], prompts):
            tokens = ids[mask].tolist()
            assert mask.tolist() == [False] * (5 - len(tokens)) + [True] * len(tokens)
            assert tokens == whole[prompt[:2]][: len(tokens)]
            assert run.tokenizer.decode(tokens) == prompt
        draws.append([batch[name][:6].tolist() for name in ("max_new_tokens", "uniforms")])
        draws[-1].append(batch["mask"].sum(1)[:6].tolist())
    for column, expected in zip(zip(*draws), (range(3, 11), None, range(2, 6))):
        assert len(set(map(str, column))) == 5
        assert expected is None or set(sum(column, [])) == set(expected)


def turns_of(split):
    """Every answer of the dialogs: context, reference, act."""
    found = []
    for texts, acts in zip(DIALOGS[split], ACTS[split]):
        found += [(texts[:t], texts[t], acts[t]) for t in range(1, len(texts))]
    return found


def test_which_answers_train_and_which_are_evaluated(dialogs_run):
    """All 8 turns of train in four passes; 5 different turns of test in the seed's order."""
    run = dialogs_run
    train, test = turns_of("train"), turns_of("test")
    assert (len(train), len(test)) == (8, 6)
    order = run.script.stream_rows(8, 0, 32, 6).tolist()
    trained = [turn for inputs, _ in run.updates for turn in inputs[5]["turns"]]
    assert [(turn.context, turn.reference, turn.act) for turn in trained] == [train[i] for i in order]
    order = run.script.stream_rows(6, 0, 5, 6).tolist()
    assert order != sorted(order)
    for call in (0, -1):
        turns = run.rollouts[call][0][5]["turns"]
        assert [(turn.context, turn.reference, turn.act) for turn in turns] == [test[i] for i in order]
    assert [(row["last"], row["reference"]) for row in run.samples] == [
        (test[i][0][-1], test[i][1]) for i in order
    ]


def test_prompts_are_the_ends_of_dialogs(dialogs_run):
    """The last two utterances, each with a space before and EOS after it; one, if two are too long."""
    run = dialogs_run
    cut = 0
    for inputs, _ in run.rollouts:
        for turn, ids, mask in zip(*[inputs[5][name] for name in ("turns", "ids", "mask")]):
            parts = [run.tokenizer(f" {text}").input_ids + [0] for text in turn.context[-2:]]
            if sum(len(part) for part in parts) > LONGEST:
                parts, cut = parts[1:], cut + 1
            assert ids[mask].tolist() == sum(parts, [])
            assert turn.reference_tokens == run.tokenizer(f" {turn.reference}").input_ids + [0]
    assert cut > 0


# ---- The final table ---------------------------------------------------------------------------------------


def columns(run):
    """Before and after training: the column's name, the rollout, the model by plain transformers."""
    models = plain_lm(run.args.model_name_or_path), plain_lm(run.folder / "model")
    return zip(("before", "after"), (run.rollouts[0], run.rollouts[-1]), models)


def plain_median(numbers):
    low, high = sorted(numbers)[(len(numbers) - 1) // 2], sorted(numbers)[len(numbers) // 2]
    return (low + high) / 2


def kl_and_reference(run, model, b):
    """The KL of each response, and all log-probabilities under the reference."""
    reference = plain_lm(run.args.model_name_or_path)
    kl, of_reference = [], []
    for ids, n in zip(*texts_of(b)):
        with torch.no_grad():
            ref = of_tokens(next_tokens(reference, ids, n, run.args.temperature)[0], ids)
            new = of_tokens(next_tokens(model, ids, n, run.args.temperature)[0], ids)
        kl.append((new - ref).sum().item())
        of_reference += ref.tolist()
    return kl, of_reference


def test_the_table_of_reviews(reviews_run):
    """Every number before and after, from evaluation_samples.jsonl and the saved model."""
    run = reviews_run
    prompts = [row["prompt"] for row in run.samples]
    for column, (_, (b, *_)), model in columns(run):
        responses = [row[column] for row in run.samples]
        texts, lengths = texts_of(b)
        shown = [prompt + response for prompt, response in zip(prompts, responses)]
        assert [run.tokenizer.decode(ids, skip_special_tokens=True) for ids in texts] == shown
        scores = review_scores(run, prompts, responses)
        score_column = {"before": "score", "after": "score after"}[column]
        assert [row[score_column] for row in run.samples] == pytest.approx(scores, rel=1e-4, abs=1e-4)
        kl, of_reference = kl_and_reference(run, model, b)
        judged = plain_logits(run.args.judge_model_path, shown).softmax(-1)[:, 0].tolist()
        expected = {
            "score mean": mean(scores),
            "score mean, +-": 1.96 * statistics.pstdev(scores) / len(scores) ** 0.5,
            "score median": plain_median(scores),
            "KL, nats per response": mean(kl),
            "perplexity under the reference": math.exp(-mean(of_reference)),
            "distinct bigrams": plain_distinct_bigrams(responses, str.split),
            "tokens per response": mean(lengths),
            "judge: P(positive)": mean(judged),
        }
        assert list(run.evaluation[column]) == list(expected)
        assert run.evaluation[column] == pytest.approx(expected, rel=1e-3, abs=1e-4)
        assert run.evaluation[column]["score mean"] != pytest.approx(expected["score median"], abs=1e-2)
    before, after = run.evaluation["before"], run.evaluation["after"]
    assert before["KL, nats per response"] == 0 and after["KL, nats per response"] > 0.1


def test_the_table_of_dialogs(dialogs_run):
    """Every number before and after, and of the references."""
    import sacrebleu
    from nltk.tokenize import NLTKWordTokenizer
    from rouge_score.rouge_scorer import RougeScorer

    run = dialogs_run
    words = NLTKWordTokenizer().tokenize
    rouge = RougeScorer(["rouge1", "rougeLsum"], use_stemmer=True)
    turns = run.rollouts[0][0][5]["turns"]
    references = [row["reference"] for row in run.samples]

    def variety(texts):
        every = [word for text in texts for word in words(text.lower())]
        return {
            "distinct1": len(set(every)) / len(every),
            "distinct2": plain_distinct_bigrams(texts, words),
            "custom/questions": mean([text.endswith("?") for text in texts]),
        }

    for column, (_, (b, _)), model in columns(run):
        answers = [row[column] for row in run.samples]
        texts, lengths = texts_of(b)
        shown = [run.tokenizer.decode(ids[-n:], skip_special_tokens=True) for ids, n in zip(texts, lengths)]
        assert [text.strip() for text in shown] == answers
        parts = dialog_parts(run, turns, answers)
        scores = dialog_scores(parts)
        score_column = {"before": "score", "after": "score after"}[column]
        assert [row[score_column] for row in run.samples] == pytest.approx(scores, rel=1e-4, abs=1e-4)
        of_references = []
        for turn in turns:
            prompt = [run.tokenizer(f" {text}").input_ids + [0] for text in turn.context[-2:]]
            prompt = prompt[1:] if len(sum(prompt, [])) > LONGEST else prompt
            reference = run.tokenizer(f" {turn.reference}").input_ids + [0]
            ids = torch.tensor(sum(prompt, []) + reference)
            with torch.no_grad():
                of_references += of_tokens(next_tokens(model, ids, len(reference), 1.0)[0], ids).tolist()
        pairs = list(zip(references, answers))
        expected = {
            "rouge1": mean([rouge.score(*pair)["rouge1"].fmeasure for pair in pairs]),
            "rougeLsum": mean([rouge.score(*pair)["rougeLsum"].fmeasure for pair in pairs]),
            "meteor": mean(parts["meteor"]),
            "sacrebleu": sacrebleu.BLEU(force=True).corpus_score(answers, [references]).score / 100,
            "intent": mean(parts["intent"]),
            "intent_match": mean(parts["intent_match"]),
            "rewards/reward/mean": mean(parts["rewards/reward"]),
            "tokens per answer": mean(lengths),
            "perplexity of the references": math.exp(-mean(of_references)),
            "score mean": mean(scores),
            "score mean, +-": 1.96 * statistics.pstdev(scores) / len(scores) ** 0.5,
            "score median": plain_median(scores),
            "KL, nats per response": mean(kl_and_reference(run, model, b)[0]),
            **variety(answers),
        }
        assert run.evaluation[column].keys() == expected.keys()
        assert run.evaluation[column] == pytest.approx(expected, rel=1e-3, abs=1e-4)
        assert mean(parts["intent_match"]) != pytest.approx(mean(parts["intent"]), abs=0.01)
        assert mean(scores) != pytest.approx(plain_median(scores), abs=1e-3)
    own = {"tokens per answer": mean([len(turn.reference_tokens) for turn in turns]), **variety(references)}
    assert run.evaluation["references"] == pytest.approx(own)
    before, after = run.evaluation["before"], run.evaluation["after"]
    assert before["KL, nats per response"] == 0 and after["KL, nats per response"] > 0.1


def test_the_table_on_the_screen(run):
    """Each line shows the number before, then the one after, with three digits."""
    n = len(run.samples)
    lines = run.screen.split(f"\n{n} held-out prompts")[1].splitlines()
    cells = [re.split(r"\s*│\s*", line.strip("│ ")) for line in lines if line.startswith("│")]
    assert [row[0] for row in cells] == list(run.evaluation["before"])
    for row in cells:
        before, after = (run.evaluation[name][row[0]] for name in ("before", "after"))
        assert row[1:3] == [f"{before:.3f}", f"{after:.3f}"]
        if "references" in run.evaluation and row[0] in run.evaluation["references"]:
            assert row[3] == f"{run.evaluation['references'][row[0]]:.3f}"


def test_samples_of_a_run(run, replays):
    """tokens.jsonl: the first four responses of updates 2 and 4, with all numbers of their tokens."""
    samples = rows_of(run.folder, "tokens.jsonl")
    assert [row["update"] for row in samples] == [2] * 4 + [4] * 4
    text = "answer" if hasattr(run, "parts") else "response"
    for rows, update in ((samples[:4], 1), (samples[4:], 3)):
        inputs, (b, *_) = run.updates[update]
        assert [row[text] for row in rows] == run.new_texts[update][:4]
        texts, lengths = texts_of(b)
        assert [row["ids"] for row in rows] == [ids[-n:].tolist() for ids, n in zip(texts[:4], lengths)]
        for i, row in enumerate(rows):
            assert row["score"] == pytest.approx(run.scores[update][i], rel=1e-4, abs=1e-4)
            for name, column in replays(run).samples[update].items():
                assert row[name] == pytest.approx(torch.as_tensor(column[i]).tolist(), rel=2e-3, abs=2e-3), (
                    name
                )


# ---- Single functions --------------------------------------------------------------------------------------


def test_which_stop_tokens(script):
    """The id that is given, even 0; none; or EOS and those of the generation config."""
    tokenizer = SimpleNamespace(eos_token_id=9)

    def found(eos, **flags):
        config = GPT2Config(vocab_size=10)
        policy = SimpleNamespace(config=config, generation_config=SimpleNamespace(eos_token_id=eos))
        return script.find_stop_tokens(script.Args(**flags), tokenizer, policy).tolist()

    assert found(None) == found(9) == [9]
    assert found([7, 9]) == [7, 9]
    assert found(7, stop_token=None) == [-1]  # the id of no token
    assert found(7, stop_token_id=0) == [0]
    assert found(7, stop_token_id=4, stop_token=None) == [4]
    for no_token in (-1, 10):
        with pytest.raises(script.UserError, match="the model has no such token"):
            found(7, stop_token_id=no_token)


def test_which_split_is_held_out(script, tmp_path):
    """test; without it validation; without both every tenth row of train, which is then not trained on."""
    rows = [dict(text=f"row {i}") for i in range(25)]
    splits = dict(train=rows, validation=[dict(text="v")], test=[dict(text="t1"), dict(text="t2")])
    for i, (missing, expected) in enumerate([((), ["t1", "t2"]), (("test",), ["v"])]):
        kept = {split: x for split, x in splits.items() if split not in missing}
        train, held_out = script.load_splits(write_rows(tmp_path / str(i), **kept))
        assert train == rows
        assert [row["text"] for row in held_out] == expected
    train, held_out = script.load_splits(write_rows(tmp_path / "last", train=rows))
    assert held_out == [rows[0], rows[10], rows[20]]
    assert train == [row for row in rows if row not in held_out]


@pytest.mark.parametrize("name", PPO)
def test_more_prompts_are_asked_for_than_there_are(scripts, small, tmp_path, name):
    """Each held-out prompt is used once, and the table says how many there were."""
    if name == "ppo_sentiment":
        rows = [dict(text=f"{letter} is a film about the {letter}.") for letter in "ABCDE"]
    else:
        rows = [dict(dialog=[f"{letter} here.", "Who?", f"{letter}."], act=[1, 2, 1]) for letter in "AB"]
    data = write_rows(tmp_path / "data", train=rows, test=rows)
    count = 5 if name == "ppo_sentiment" else 4
    _, folder = scripts[name].train(small(name, dataset_name=data, num_eval_prompts=50, total_episodes=8))
    samples = rows_of(folder, "evaluation_samples.jsonl")
    assert evaluation_of(folder)["n"] == len(samples) == count
    assert len({row.get("prompt") or (row["last"], row["reference"]) for row in samples}) == count


@pytest.mark.parametrize("name", RL)
def test_no_samples_no_file(scripts, small, name):
    _, folder = scripts[name].train(small(name, num_sample_generations=0))
    assert not (folder / "samples.jsonl").exists() and not (folder / "tokens.jsonl").exists()
