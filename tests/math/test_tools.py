"""Trajectories of several turns: which tokens are sampled, what the gradient is, what the tools get."""

import itertools
import json
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

script = pytest.importorskip("grpo_tools")
MODEL = str(ROOT / "checkpoints/tools-sft")
TASKS = [json.loads(line) for line in (ROOT / "data/calculator/test.jsonl").read_text().splitlines()[:6]]
ARGS = script.replace(script.RECIPES["tiny"], num_generations=4, response_length=56, temperature=1.3)


@pytest.fixture(scope="module")
def rolled_out():
    """24 trajectories of the fine-tuned model at a high temperature, so that they differ in their turns."""
    tokenizer, policy = (
        AutoTokenizer.from_pretrained(MODEL),
        AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
    )
    make_tools, schemas = script.load_tools(ARGS)
    stop_ids = script.find_stop_tokens(ARGS, tokenizer, policy)
    turn_format = script.TurnFormat(tokenizer, stop_ids)
    examples = []
    for row in TASKS:
        ids = script.tokenize_prompt(tokenizer, row["prompt"])
        examples.append(dict(ids=ids, prompt=row["prompt"], columns=row))
    batch = script.draw_batch(examples, 4, ARGS, "test")
    with torch.no_grad():
        trajectories = script.write_trajectories(
            policy, tokenizer, turn_format, make_tools, stop_ids, batch, ARGS
        )

    def get_scores(trajectories):
        return {"reward": torch.arange(len(trajectories)) % 3.0}

    inputs = policy, tokenizer, turn_format, make_tools, stop_ids, get_scores, batch, ARGS
    b, responses = script.sample_responses(*inputs)
    return SimpleNamespace(
        policy=policy,
        tokenizer=tokenizer,
        trajectories=trajectories,
        batch=batch,
        b=b,
        responses=responses,
        turn_format=turn_format,
        make_tools=make_tools,
        stop_ids=stop_ids,
    )


def test_the_trajectories_have_different_numbers_of_turns(rolled_out):
    """What the other tests need. The same random numbers give the same trajectories."""
    assert {x.num_turns for x in rolled_out.trajectories} >= {1, 2}
    assert sum(x.num_failures for x in rolled_out.trajectories) > 0
    assert not all(x.has_ended for x in rolled_out.trajectories)
    assert rolled_out.b["turns"].tolist() == [x.num_turns for x in rolled_out.trajectories]


def test_the_tokens_are_those_of_the_chat_template(rolled_out):
    """A whole conversation, rendered at once, is what prompt, turns and results were put together to."""
    tokenizer = rolled_out.tokenizer
    compared = 0
    for x in rolled_out.trajectories:
        if x.has_ended:
            messages = [dict(role=m["role"], content=m["content"]) for m in x.example["prompt"] + x.messages]
            text = tokenizer.apply_chat_template(messages, tokenize=False)
            assert text == tokenizer.decode(x.example["ids"] + x.tokens) + "\n"
            compared += x.num_turns > 1
    assert compared > 3


def test_sampled_marks_what_the_policy_wrote(rolled_out):
    """Its end of turn included; nothing of a tool's message, nor the next turn's header."""
    tokenizer = rolled_out.tokenizer
    for x in rolled_out.trajectories:
        runs = [
            (is_sampled, tokenizer.decode([token for token, _ in run]))
            for is_sampled, run in itertools.groupby(zip(x.tokens, x.sampled), key=lambda pair: pair[1])
        ]
        assert [is_sampled for is_sampled, _ in runs] == [i % 2 == 0 for i in range(len(runs))]
        written = [m["content"] for m in x.messages if m["role"] == "assistant"]
        results = [m["content"] for m in x.messages if m["role"] == "tool"]
        assert [text.removesuffix("<|im_end|>") for _, text in runs[::2]] == written
        for (_, text), result in zip(runs[1::2], results, strict=True):
            assert text == f"\n<|im_start|>tool\n{result}<|im_end|>\n<|im_start|>assistant\n"
        assert x.sampled[-1]
        assert len(x.logprobs) == len(x.tokens) == len(x.sampled)
        assert not any(logprob for logprob, is_sampled in zip(x.logprobs, x.sampled) if not is_sampled)


def plain_loss(model, rolled_out, advantages, temperature):
    """The loss by plain transformers: one trajectory at a time, without padding. -> a tensor"""
    total, count = 0.0, 0
    for x, advantage in zip(rolled_out.trajectories, advantages.tolist(), strict=True):
        ids = x.example["ids"] + x.tokens
        logp = (model(torch.tensor([ids])).logits[0, :-1] / temperature).log_softmax(-1)
        for t, (token, is_sampled) in enumerate(zip(x.tokens, x.sampled)):
            if is_sampled:
                total = total - advantage * logp[len(x.example["ids"]) + t - 1, token]
                count += 1
    return total / count


def test_the_gradient_is_that_of_a_plain_loop(rolled_out):
    """Micro-batches, padding and shared prompts change nothing; what the tools wrote is not learned."""
    b, T = rolled_out.b, ARGS.response_length
    advantages = torch.linspace(-1, 2, len(b["ids"]))
    plain = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    plain_loss(plain, rolled_out, advantages, ARGS.temperature).backward()

    policy = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    model = script.Policy(policy)
    C = b["ids"].shape[1] - T
    num_tokens = b["sampled"].sum()
    order = script.sorted_groups(torch.tensor([3, 0, 5, 1, 2, 4]), b["lengths"], 4, True)
    for rows in order.split(6):
        t = b["lengths"][rows].max().item()
        logprobs, _ = model(b["ids"][rows, : C + t], b["mask"][rows, : C + t], t, ARGS.temperature)
        token_advantages = advantages[rows, None].expand(-1, t)
        losses, _, _ = script.clipped_policy_loss(logprobs, logprobs.detach(), token_advantages, 0.2)
        ((losses * b["sampled"][rows, :t]).sum() / num_tokens).backward()
    for (name, p), q in zip(policy.named_parameters(), plain.parameters(), strict=True):
        scale = q.grad.abs().max()
        assert (p.grad - q.grad).abs().max() < 1e-5 * scale, name


def test_sampling_and_update_agree(rolled_out):
    """The log-probabilities of all sampled tokens, in later turns too: nothing is hidden from attention."""
    b, T = rolled_out.b, ARGS.response_length
    with torch.no_grad():
        logprobs, _ = script.Policy(rolled_out.policy)(b["ids"], b["mask"], T, ARGS.temperature)
    gap = (logprobs - b["sampling_logprobs"])[b["sampled"]].abs()
    assert gap.max() < 1e-4
    assert (b["sampling_logprobs"][~b["sampled"]] == 0).all()


# ---- The exact gradient of a small game --------------------------------------------------------------------


LETTERS = ["<end>", "a", "b", "<hi>", "<lo>"]  # the policy writes the first three, the tool the others


class Letters:
    """A tokenizer of five letters."""

    def decode(self, tokens):
        return "".join(LETTERS[token] for token in tokens)

    def __call__(self, text, add_special_tokens):
        return SimpleNamespace(input_ids=[LETTERS.index(text)])


class LetterTurns:
    """The policy's turns end with <end>; a result is one letter."""

    end = 0

    def after_calls(self, results):
        return [LETTERS.index(result) for result in results]

    def text_of_turn(self, tokens):
        is_complete = tokens[-1] == 0
        return Letters().decode(tokens[:-1] if is_complete else tokens), is_complete


def answer_of_tool(text, secret):
    """ "a" calls a tool, whose answer depends on the task and on the length of the turn."""
    return "<hi>" if (len(text) + secret) % 2 else "<lo>"


def game_reward(turns, secret):
    """A reward without any order, of all that the policy wrote."""
    return float(sum((i + 2) * ord(letter) for i, letter in enumerate("/".join(turns))) * (secret + 3) % 7)


def all_trajectories(logprobs_of, prompt, secret, room, max_turns):
    """Every trajectory of the game. -> (its sampled tokens' log-probability, its turns)

    logprobs_of(ids) -> log-probabilities of the next token, which the policy draws from the first three.
    """
    stack, found = [([], 0.0, [[]])], []
    while stack:
        tokens, logprob, turns = stack.pop()
        logp = logprobs_of(prompt + tokens)
        for token in range(3):
            ids, total, now = [*tokens, token], logprob + logp[token], [*turns[:-1], [*turns[-1], token]]
            text = Letters().decode([t for t in now[-1] if t])
            goes_on = token != 0
            if token == 0 and "a" in text and len(now) < max_turns and len(ids) + 1 < room:
                ids, now, goes_on = [*ids, LETTERS.index(answer_of_tool(text, secret))], [*now, []], True
            if goes_on and len(ids) < room:
                stack.append((ids, total, now))
            else:
                found.append((total, [Letters().decode([t for t in turn if t]) for turn in now]))
    return found


def test_the_expected_gradient_of_a_game_of_two_turns(monkeypatch):
    """The mean of many estimates is the gradient of the expected reward, summed over all trajectories."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    config = LlamaConfig(vocab_size=5, **sizes, tie_word_embeddings=False, initializer_range=0.5)
    policy = LlamaForCausalLM(config).eval()
    policy.lm_head.weight.data[3:] = 0  # these two are never sampled
    prompt, room, max_turns = [1, 2], 5, 2
    never = torch.tensor([0.0, 0.0, 0.0, -60.0, -60.0])
    plain_logits = script.token_logits
    monkeypatch.setattr(script, "token_logits", lambda *inputs: plain_logits(*inputs) + never)
    monkeypatch.setattr(script, "find_calls", lambda text: ["call"] if "a" in text else [])

    def run_calls(trajectory, results):
        text = trajectory.messages[-1]["content"]
        results.append(answer_of_tool(text, trajectory.example["columns"]["secret"]))

    monkeypatch.setattr(script, "run_calls", run_calls)

    # Exactly: the gradient of sum p(trajectory) * reward.
    def logprobs_of(ids):
        return (policy(torch.tensor([ids])).logits[0, -1] + never).log_softmax(-1)

    expected_reward = 0.0
    for secret in (0, 1):
        found = all_trajectories(logprobs_of, prompt, secret, room, max_turns)
        probabilities = torch.stack([total for total, _ in found]).exp()
        assert abs(probabilities.sum().item() - 1) < 1e-5
        rewards = torch.tensor([game_reward(turns, secret) for _, turns in found])
        expected_reward = expected_reward + (probabilities * rewards).sum() / 2
    names = [name for name, _ in policy.named_parameters()]
    exact = torch.autograd.grad(expected_reward, list(policy.parameters()))

    # Estimated: rewards minus the mean of the others in the group, times the log-probabilities.
    k = 1000
    args = script.Args(response_length=room, max_turns=max_turns, local_rollout_forward_batch_size=4 * k)
    args = script.replace(args, num_generations=k)
    examples = [dict(ids=prompt, prompt="", columns=dict(secret=secret)) for secret in (0, 1)]
    estimates = []
    for seed in range(16):
        batch = script.draw_batch(examples, k, args, seed)

        def get_scores(trajectories):
            turns = [[m["content"] for m in x.messages if m["role"] == "assistant"] for x in trajectories]
            secrets = [x.example["columns"]["secret"] for x in trajectories]
            return {"game": torch.tensor([game_reward(*pair) for pair in zip(turns, secrets)])}

        inputs = policy, Letters(), LetterTurns(), lambda columns: ({}, None), torch.tensor([0]), get_scores
        b, _ = script.sample_responses(*inputs, batch, args)
        rewards = b["rewards/game"].view(2, k)
        advantages = ((rewards - rewards.mean(1, keepdim=True)) * k / (k - 1)).flatten()
        logprobs, _ = script.Policy(policy)(b["ids"], b["mask"], room, 1.0)
        objective = (advantages[:, None] * logprobs * b["sampled"]).sum() / (2 * k)
        estimates.append(torch.autograd.grad(objective, list(policy.parameters())))
    for name, right, *parts in zip(names, exact, *estimates, strict=True):
        parts = torch.stack(parts)
        error = parts.std(0) / len(parts) ** 0.5
        tolerance = 6 * error + 1e-4
        assert ((parts.mean(0) - right).abs() < tolerance).all(), name
        if name != "lm_head.weight":
            assert right.abs().max() > 10 * error.min(), name  # there is something to see


# ---- Calls -------------------------------------------------------------------------------------------------


def trajectory_with(tools, *calls):
    """A trajectory whose last message has these calls."""
    x = script.Trajectory({}, tools, None, None)
    x.messages.append({"role": "assistant", "content": "", "tool_calls": list(calls)})
    return x


def test_what_the_policy_writes_wrongly_becomes_the_result():
    """Broken JSON, no such tool, wrong arguments and an exception are told to the policy, and counted."""

    def half(number: int):
        if number % 2:
            raise ValueError("odd")
        return number // 2

    good, odd = '{"name": "half", "arguments": {"number": 8}}', '{"name": "half", "arguments": {"number": 7}}'
    bad = ['{"name": "half"', '{"name": "no"}', "[1]", '{"name": "half", "arguments": {"x": 1}}', odd]
    x = trajectory_with(dict(half=half), good, *bad)
    [results] = script.call_tools([x], 10)
    assert results[0] == "4" and all(result.startswith("error: ") for result in results[1:])
    assert "ValueError: odd" in results[-1]
    assert (x.num_calls, x.num_failures) == (6, 5)


def test_tools_run_in_parallel_and_one_that_hangs_ends_in_an_error():
    """The others have their results; the calls after the one that hangs have none."""

    def nap(seconds):
        time.sleep(seconds)
        return "awake"

    def call(seconds):
        return json.dumps({"name": "nap", "arguments": {"seconds": seconds}})

    start = time.time()
    rows = [trajectory_with(dict(nap=nap), call(0.2)) for _ in range(20)]
    rows.append(trajectory_with(dict(nap=nap), call(0), call(30), call(0)))
    *results, last = script.call_tools(rows, 1.5)
    assert time.time() - start < 3
    assert results == 20 * [["awake"]]
    assert last[0] == "awake" and all("no result after 1.5 seconds" in x for x in last[1:]) and len(last) == 3
    assert rows[-1].num_failures == 2


def test_the_calls_of_a_turn_share_the_time():
    """Each is fast enough alone, but the second one has no result in time."""

    def nap():
        time.sleep(0.6)
        return "awake"

    call = json.dumps({"name": "nap", "arguments": {}})
    [results] = script.call_tools([trajectory_with(dict(nap=nap), call, call)], 1.0)
    assert results == ["awake", "error: no result after 1 seconds"]
