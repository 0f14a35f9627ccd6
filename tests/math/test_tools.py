"""Trajectories of several turns: which tokens are sampled, what the gradient is, what the tools get."""

import asyncio
import copy
import itertools
import json
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace

import datasets
import pytest
import torch
from conftest import ROOT
from math_tools import trl_1_16
from run_tools import distance, has_ended, reward_file, rows_of, spy, weights, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest_plugins = ["run_fixtures"]
script = pytest.importorskip("grpo_tools")
MODEL = str(ROOT / "checkpoints/tools-sft")
TASKS = [json.loads(line) for line in (ROOT / "data/calculator/test.jsonl").read_text().splitlines()[:6]]
ARGS = script.replace(script.RECIPES["tiny"], num_generations=4, response_length=56, temperature=1.3)


def task(tokenizer, messages, **columns):
    """An example for draw_batch."""
    ids = script.tokenize_prompt(tokenizer, messages)
    return dict(ids=ids, prompt=messages, columns=columns)


@pytest.fixture(scope="module")
def parts():
    """The fine-tuned model and all that its rollouts need."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    policy = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    start_tools, schemas = script.load_tools(ARGS)
    stop_ids = script.find_stop_tokens(ARGS, tokenizer, policy)
    turn_format = script.TurnFormat(tokenizer, stop_ids, schemas)
    examples = [task(tokenizer, row["prompt"], **row) for row in TASKS]
    batch = script.draw_batch(examples, 4, ARGS, "test")
    inputs = policy, turn_format, start_tools, stop_ids
    return SimpleNamespace(
        policy=policy,
        tokenizer=tokenizer,
        turn_format=turn_format,
        stop_ids=stop_ids,
        batch=batch,
        inputs=inputs,
    )


def numbered_scores(trajectories):
    """Some rewards."""
    return {"reward": torch.arange(len(trajectories)) % 3.0}


@pytest.fixture(scope="module")
def rolled_out(parts):
    """24 trajectories of the fine-tuned model at a high temperature, so that they differ in their turns."""
    with torch.no_grad():
        trajectories = script.write_trajectories(*parts.inputs, parts.batch, ARGS)
    b, *_ = script.sample_responses(*parts.inputs, numbered_scores, parts.batch, ARGS)
    return SimpleNamespace(**vars(parts), trajectories=trajectories, b=b)


def test_the_trajectories_have_different_numbers_of_turns(rolled_out):
    """What the other tests need. The same random numbers give the same trajectories."""
    assert {x.num_turns for x in rolled_out.trajectories} >= {1, 2}
    assert sum(x.num_failures for x in rolled_out.trajectories) > 0
    assert not all(has_ended(x) for x in rolled_out.trajectories)
    assert rolled_out.b["turns"].tolist() == [x.num_turns for x in rolled_out.trajectories]


def test_the_tokens_are_those_of_the_chat_template(rolled_out):
    """A whole conversation, rendered at once, is what prompt, turns and results were put together to."""
    tokenizer = rolled_out.tokenizer
    compared = 0
    for x in rolled_out.trajectories:
        if has_ended(x):
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


def test_no_turn_is_tokenized_again(parts, monkeypatch):
    """Each sampled token is in one trajectory, once, even if the tokenizer would write its text otherwise."""
    rounds = spy(monkeypatch, script, "sample_turns")
    hot = script.replace(ARGS, temperature=3.0)
    with torch.no_grad():
        trajectories = script.write_trajectories(*parts.inputs, parts.batch, hot)
    written = [tokens for _, turns in rounds for tokens, _ in turns]
    kept = []
    for x in trajectories:
        for is_sampled, run in itertools.groupby(zip(x.tokens, x.sampled), key=lambda pair: pair[1]):
            kept += [[token for token, _ in run]] * is_sampled
    assert sorted(kept) == sorted(written)
    texts = [parts.tokenizer.decode(tokens) for tokens in written]
    assert any(parts.tokenizer(text).input_ids != tokens for text, tokens in zip(texts, written))


def test_earlier_messages_are_not_trained(parts, monkeypatch):
    """A prompt may hold turns and calls of the assistant. Only the new turns are learned, each one once."""
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "2 * 3"}}</tool_call>'
    turns = [
        ("user", "What is 2 * 3?"),
        ("assistant", call),
        ("tool", "6"),
        ("assistant", "The answer is 6."),
    ]
    earlier = [{"role": role, "content": content} for role, content in turns]
    examples = [task(parts.tokenizer, earlier + row["prompt"]) for row in TASKS[:2]]
    examples.append(task(parts.tokenizer, TASKS[2]["prompt"]))
    rounds = spy(monkeypatch, script, "sample_turns")
    batch = script.draw_batch(examples, 4, ARGS, "test")
    b, *_ = script.sample_responses(*parts.inputs, numbered_scores, batch, ARGS)
    written = sorted(token for _, turns in rounds for tokens, _ in turns for token in tokens)
    learned = b["ids"][:, -ARGS.response_length :][b["sampled"]]
    assert sorted(learned.tolist()) == written
    for i, row in enumerate(b["ids"]):
        ids = examples[i // 4]["ids"]
        assert row[: -ARGS.response_length][-len(ids) :].tolist() == ids


def test_attention_reads_all_tokens_of_a_trajectory(rolled_out):
    """What the tools wrote, and tokens with the id of the padding; nothing after the end."""
    b, C = rolled_out.b, rolled_out.b["ids"].shape[1] - ARGS.response_length
    for row, x in zip(b["mask"], rolled_out.trajectories, strict=True):
        width = len(x.example["ids"])
        assert row.tolist() == [i >= C - width and i < C + len(x.tokens) for i in range(len(row))]


def test_a_turn_does_not_depend_on_the_other_texts(parts):
    """Nor on their number. Some begin with token 0, which is also the padding of a batch."""
    assert parts.tokenizer.pad_token_id == 0
    prompts = [example["ids"] for example in parts.batch["examples"]]
    texts = [prompts[0], [0, 0, *prompts[1]], [*prompts[2], *prompts[3]], [0, *prompts[4]]]
    uniforms = [parts.batch["uniforms"][i, 0, : 12 + 9 * i] for i in range(4)]

    def sample(rows, **changes):
        inputs = [texts[i] for i in rows], [uniforms[i] for i in rows], parts.stop_ids
        with torch.no_grad():
            return script.sample_turns(parts.policy, *inputs, script.replace(ARGS, **changes))

    together = sample(range(4))
    for turns in (
        sample([0]) + sample([1]) + sample([2]) + sample([3]),
        sample(range(4), local_rollout_forward_batch_size=1),
    ):
        assert [tokens for tokens, _ in turns] == [tokens for tokens, _ in together]
        for (_, one), (_, other) in zip(turns, together):
            assert one == pytest.approx(other, abs=1e-4)
    lengths = [len(tokens) for tokens, _ in together]
    assert all(length <= 12 + 9 * i for i, length in enumerate(lengths)) and lengths[0] == 12

    for (tokens, logprobs), text in zip(together, texts):
        with torch.no_grad():
            logits = parts.policy(torch.tensor([text + tokens])).logits[0, len(text) - 1 : -1]
        logp = (logits / ARGS.temperature).log_softmax(-1)
        assert logp[range(len(tokens)), tokens].tolist() == pytest.approx(logprobs, abs=1e-4)


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

    end, tokenizer = 0, Letters()

    def after_turn(self, messages):
        return [LETTERS.index(message["content"]) for message in messages]

    def read_turn(self, tokens):
        """An "a" calls a tool."""
        is_complete = tokens[-1] == 0
        text = Letters().decode(tokens[:-1] if is_complete else tokens)
        return text, ["{}"] if "a" in text else [], is_complete

    def has_open_call(self, text):
        return False

    def text_of_result(self, result, max_tokens):
        return result


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

    def run_call(x, call):
        return answer_of_tool(x.messages[-1]["content"], x.example["columns"]["secret"]), False

    monkeypatch.setattr(script, "run_call", run_call)

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
    start_tools, _ = script.load_tools(args)
    examples = [dict(ids=prompt, prompt="", columns=dict(secret=secret)) for secret in (0, 1)]
    estimates = []
    for seed in range(16):
        batch = script.draw_batch(examples, k, args, seed)

        def get_scores(trajectories):
            turns = [[m["content"] for m in x.messages if m["role"] == "assistant"] for x in trajectories]
            secrets = [x.example["columns"]["secret"] for x in trajectories]
            return {"game": torch.tensor([game_reward(*pair) for pair in zip(turns, secrets)])}

        inputs = policy, LetterTurns(), start_tools, torch.tensor([0]), get_scores
        b, *_ = script.sample_responses(*inputs, batch, args)
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


def trajectory_with(tools, *calls, worker=None, environment=None):
    """A trajectory whose last message has these calls."""
    x = script.Trajectory({}, None, worker or script.Worker(), tools, environment)
    x.messages.append({"role": "assistant", "content": "", "tool_calls": list(calls)})
    return x


def call_of(name, **arguments):
    return json.dumps({"name": name, "arguments": arguments})


def test_what_the_policy_writes_wrongly_becomes_the_result():
    """Broken JSON, no such tool, wrong arguments and an exception are told to the policy, and counted. Only
    the last is the tool's."""

    def half(number: int):
        if number % 2:
            raise ValueError("odd")
        return number // 2

    bad = ['{"name": "half"', call_of("no"), "[1]", call_of("half", x=1), call_of("half", number=7)]
    x = trajectory_with(dict(half=half), call_of("half", number=8), *bad)
    [results] = script.call_tools([x], 10)
    assert results[0] == "4" and all(result.startswith("error: ") for result in results[1:])
    assert "ValueError: odd" in results[-1]
    assert (x.num_calls, x.num_failures, x.num_errors, x.num_timeouts) == (6, 5, 1, 0)


def test_a_tool_cannot_end_the_run():
    """sys.exit() in a tool is a mistake of the tool, and its thread goes on."""
    x = trajectory_with(dict(f=lambda: sys.exit(0), g=lambda: "fine"), call_of("f"), call_of("g"))
    assert script.call_tools([x], 10) == [["error: SystemExit: 0", "fine"]]
    assert (x.num_failures, x.num_errors) == (1, 1)


def test_async_tools():
    """The policy reads what they return at their end. They share one event loop, in which a lock survives."""
    loops = []

    async def add(a: int, b: int):
        await asyncio.sleep(0.01)
        loops.append(asyncio.get_running_loop())
        return a + b

    def plain():
        return asyncio.get_event_loop().run_until_complete(add(3, 4))

    tools = dict(add=add, plain=plain, alone=lambda: asyncio.run(add(5, 6)))
    calls = call_of("add", a=1, b=2), call_of("alone"), call_of("plain"), call_of("add", a=7, b=8)
    x = trajectory_with(tools, *calls)
    assert script.call_tools([x], 10) == [["3", "11", "7", "15"]]
    assert loops[0] is loops[2] is loops[3] is not loops[1]


def test_half_of_a_surrogate_pair(play):
    """JSON can write it, and a tool can return it or raise it, but no tokenizer takes it."""
    half = CALL.replace("12", r"\ud83d")

    def broken(text):
        raise ValueError(text)

    for tools in (None, dict(echo=broken)):
        x, read, _ = play(half + END, "72" + END, tools=tools, response_length=200)
        assert "?" in x.messages[1]["content"] and x.messages[1]["content"] in read[1][0] and has_ended(x)


def nap(seconds=0.0):
    time.sleep(seconds)
    return "awake"


def test_tools_run_in_parallel_and_one_that_hangs_ends_in_an_error():
    """The others have their results, also those after it in the same thread."""
    start = time.time()
    workers = [script.Worker() for _ in range(5)]
    rows = [
        trajectory_with(dict(nap=nap), call_of("nap", seconds=0.2), worker=workers[i % 5]) for i in range(20)
    ]
    hangs = trajectory_with(
        dict(nap=nap), call_of("nap"), call_of("nap", seconds=30), call_of("nap"), worker=workers[0]
    )
    rows.insert(0, hangs)
    first, *results = script.call_tools(rows, 1.0)
    assert time.time() - start < 3
    assert results == 20 * [["awake"]]
    assert first == ["awake", "error: no result after 1 seconds", "awake"]
    assert (hangs.num_calls, hangs.num_failures, hangs.num_errors, hangs.num_timeouts) == (3, 1, 0, 1)


def test_each_call_has_its_own_time():
    """The limit counts from the start of the call, not from when it was asked for."""
    worker = script.Worker()
    call = call_of("nap", seconds=0.4)
    rows = [trajectory_with(dict(nap=nap), call, call, worker=worker) for _ in range(2)]
    assert script.call_tools(rows, 0.7) == 2 * [["awake", "awake"]]


def test_many_calls_that_hang():
    """As many at once as there are threads, and each is waited for once: four rounds of half a second."""
    workers = [script.Worker() for _ in range(4)]
    rows = [
        trajectory_with(dict(nap=nap), call_of("nap", seconds=30), worker=workers[i % 4]) for i in range(16)
    ]
    start = time.time()
    results = script.call_tools(rows, 0.5)
    assert results == 16 * [["error: no result after 0.5 seconds"]]
    assert 1.9 < time.time() - start < 3


def test_an_endless_loop_is_ended():
    """It would take time from everything that runs afterwards."""
    counted = [0]

    def count():
        while True:
            counted[0] += 1

    [results] = script.call_tools([trajectory_with(dict(count=count), call_of("count"))], 0.2)
    assert results == ["error: no result after 0.2 seconds"]
    time.sleep(0.3)
    end = counted[0]
    time.sleep(0.3)
    assert counted[0] == end > 0


def test_a_call_that_lets_no_other_thread_run():
    """It cannot be given up while it runs. Its result comes too late, so it is none."""
    started = []

    def power():
        started.append(time.time())
        while time.time() - started[0] < 0.5:
            pow(7, 200_000)  # one call of C code
        return "done"

    interval = sys.getswitchinterval()
    sys.setswitchinterval(5)  # Python offers the lock to other threads only after 5 seconds
    x = trajectory_with(dict(power=power), call_of("power"))
    [results] = script.call_tools([x], 0.1)
    sys.setswitchinterval(interval)
    assert results == ["error: no result after 0.1 seconds"] and x.num_timeouts == 1


def test_calls_in_a_turn(parts):
    """All of them, on one line or on several, with what is between."""
    one, two = '{"name": "f"}', '\n{"name": "g"}\n'
    text = f"First <tool_call>{one}</tool_call> and <tool_call>{two}</tool_call>, not <tool_call>{one}"
    tokens = parts.tokenizer(text + END).input_ids
    assert parts.turn_format.read_turn(tokens) == (text, [one, two], True)


def test_what_counts_as_failed(monkeypatch):
    """A result that begins with "error: ", whoever wrote it; not each result with that word."""
    results = iter(["no error: 0", "error: none"])
    x = trajectory_with(dict(f=lambda: next(results)), *2 * [call_of("f")])
    assert script.call_tools([x], 10) == [["no error: 0", "error: none"]]
    assert (x.num_calls, x.num_failures, x.num_errors) == (2, 1, 0)


def test_a_result_that_comes_too_late_is_dropped():
    """The policy has read an error, and the call that goes on cannot change that."""
    x = trajectory_with(dict(nap=nap), call_of("nap", seconds=0.6), call_of("nap"))
    [results] = script.call_tools([x], 0.2)
    time.sleep(0.8)
    assert results == ["error: no result after 0.2 seconds", "awake"] and x.num_failures == 1


def test_a_thread_that_was_left_ends():
    """When its call ends. Otherwise two threads would make the calls that follow."""
    x = trajectory_with(dict(nap=nap), call_of("nap", seconds=0.4))
    left = x.worker.thread
    [results] = script.call_tools([x], 0.1)
    assert results == ["error: no result after 0.1 seconds"] and x.worker.thread is not left
    left.join(5)
    assert not left.is_alive() and x.worker.thread.is_alive()


def test_an_environment_is_left_after_a_call_that_hangs():
    """Its state is unknown, and the call may still change it."""
    made = []

    class World:
        def wait(self):
            made.append("wait")
            time.sleep(0.4)

        def get_reward(self):
            made.append("get_reward")

    world = World()
    calls = call_of("wait"), call_of("wait")
    x = trajectory_with(dict(wait=world.wait), *calls, environment=world)
    [results] = script.call_tools([x], 0.1)
    assert results[0] == "error: no result after 0.1 seconds" and results[1].startswith("error: TimeoutError")
    assert x.ask("get_reward").result() is None
    time.sleep(0.5)
    assert made == ["wait"] and (x.num_failures, x.num_errors, x.num_timeouts) == (2, 0, 1)


# ---- The loop over turns -----------------------------------------------------------------------------------


END = "<|im_end|>"
TEXT = " ".join(map(str, range(50)))
CALL = '<tool_call>{"name": "echo", "arguments": {"text": "12"}}</tool_call>'
TOLD = (
    "\n<|im_start|>tool\n12<|im_end|>\n<|im_start|>assistant\n"  # what the template writes after CALL + END
)


@pytest.fixture
def play(parts, monkeypatch):
    """play(*turns, tools, environment, **flags) -> the trajectory of a policy that writes these turns; what
    it read, with the random numbers that it got, before each; the random numbers of the trajectory"""
    tokenizer = parts.tokenizer

    def echo(text):
        return text

    def run(*turns, tools=None, environment=None, **flags):
        args = script.replace(ARGS, num_generations=1, **flags)
        coming, read = iter(turns), []

        def sample_turns(policy, texts, uniforms, *rest):
            [text], [numbers] = texts, uniforms
            read.append((tokenizer.decode(text), numbers.tolist()))
            tokens = tokenizer(next(coming)).input_ids[: len(numbers)]
            return [(tokens, len(tokens) * [-1.0])]

        monkeypatch.setattr(script, "sample_turns", sample_turns)
        batch = script.draw_batch(parts.batch["examples"][:1], 1, args, "test")

        def start_tools(trajectories):
            [x] = trajectories
            x.worker, x.tools, x.environment = script.Worker(), tools or dict(echo=echo), environment
            return [x.ask("reset").result()]

        [x] = script.write_trajectories(None, parts.turn_format, start_tools, parts.stop_ids, batch, args)
        return x, read, batch["uniforms"][0, 0].tolist()

    run.length = lambda text: len(tokenizer(text).input_ids)
    return run


def test_a_turn_goes_on_after_the_result(parts, play):
    """The policy reads all tokens so far, and has the random numbers of its own positions."""
    x, read, uniforms = play(CALL + END, "72" + END)
    prompt = parts.tokenizer.decode(x.example["ids"])
    assert [text for text, _ in read] == [prompt, prompt + CALL + END + TOLD]
    start = play.length(CALL + END + TOLD)
    assert read[0][1] == uniforms and read[1][1] == uniforms[start:]
    assert parts.tokenizer.decode(x.tokens) == CALL + END + TOLD + "72" + END
    assert [m["role"] for m in x.messages] == ["assistant", "tool", "assistant"]
    assert [m["content"] for m in x.messages] == [CALL, "12", "72"]
    assert has_ended(x) and (x.num_turns, x.num_calls, x.num_failures) == (2, 1, 0)


def test_a_result_must_leave_room_for_a_token(play):
    """Otherwise the trajectory ends with the call, and has no answer."""
    full = play.length(CALL + END + TOLD)
    x, read, _ = play(CALL + END, "72" + END, response_length=full + 1)
    assert len(x.tokens) == full + 1 and len(read) == 2 and not has_ended(x)
    x, read, _ = play(CALL + END, "72" + END, response_length=full)
    assert len(x.tokens) == play.length(CALL + END) and len(read) == 1 and not has_ended(x)
    assert len(x.messages) == 1 and all(x.sampled) and x.num_calls == 1


def test_the_last_turn(play):
    """Its call is made, which may matter for an environment, but there is no turn to read the result."""
    x, read, _ = play(*3 * [CALL + END], max_turns=2, response_length=200)
    assert len(read) == x.num_turns == x.num_calls == 2
    assert not has_ended(x) and x.sampled[-1]
    assert [m["role"] for m in x.messages] == ["assistant", "tool", "assistant"]


def test_a_turn_that_is_cut_off(play):
    """Its call is not made, and no end of the turn is added that the policy did not write."""
    room = play.length(CALL)
    x, read, _ = play(CALL + END, "72" + END, response_length=room)
    assert len(x.tokens) == room and len(read) == 1 and x.num_calls == 0 and not has_ended(x)
    x, _, _ = play("The answer is 72." + END, response_length=3)
    assert len(x.tokens) == 3 and not has_ended(x)
    x, _, _ = play("The answer is 72." + END)
    assert has_ended(x) and x.num_calls == 0


def test_a_call_that_another_stop_token_ends(parts, play):
    """The template cannot go on after it: the trajectory ends without an answer, and nothing is called."""
    other = parts.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    parts.turn_format.stops.append(other)
    x, read, _ = play(CALL + "<|endoftext|>", "72" + END)
    parts.turn_format.stops.remove(other)
    assert len(read) == x.num_turns == 1 and x.num_calls == 0 and not has_ended(x)


OPEN = CALL.removesuffix("</tool_call>")
ENDS = {  # turns -> why the trajectory ends
    "answer": (["The answer is 72." + END], {}),
    "no_turn": ([CALL + END, CALL + END], dict(max_turns=2, response_length=200)),
    "no_token": (["The answer is 72." + END], dict(response_length=3)),
    "unfinished_call": ([OPEN + END], {}),
}


@pytest.mark.parametrize("end", ENDS)
def test_why_a_trajectory_ends(play, end):
    """One of a few reasons, of which the first two are ends of its own."""
    turns, flags = ENDS[end]
    x, _, _ = play(*turns, **flags)
    assert x.end == end and has_ended(x) == (end == "answer")


def test_no_room_for_a_result_is_no_room_for_a_token(play):
    x, _, _ = play(CALL + END, response_length=play.length(CALL + END + TOLD))
    assert x.end == "no_token"


class Talker:
    """An environment that speaks first, answers turns without a call, and can end the trajectory."""

    def __init__(self, first=None, replies=(), last=None):
        self.first, self.replies, self.last, self.heard = first, list(replies), last, []

    def reset(self):
        return self.first

    def reply(self, text):
        self.heard.append(text)
        return self.replies.pop(0) if self.replies else None

    async def is_over(self):
        return len(self.heard) == self.last


def test_an_environment_speaks_first(parts, play):
    """What reset returns is the end of the prompt, for the policy and for reward functions."""
    x, read, _ = play("72" + END, environment=Talker(first=" Hello!"))
    [message] = TASKS[0]["prompt"]
    told = [message | {"content": message["content"] + " Hello!"}]
    assert x.example["prompt"] == told and x.example["ids"] == script.tokenize_prompt(parts.tokenizer, told)
    assert [text for text, _ in read] == [parts.tokenizer.decode(x.example["ids"])]
    assert parts.batch["examples"][0]["prompt"] == [message]  # siblings and later passes read their own


def test_an_environment_answers_a_turn_without_a_call(parts, play):
    """As the user, whose words are read but not learned. If it has none, the turn was the answer."""
    environment = Talker(replies=["Sure?"])
    x, read, _ = play("71" + END, "72" + END, environment=environment)
    told = "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    assert read[1][0].endswith("71" + END + told)
    assert environment.heard == ["71", "72"] and x.end == "answer" and x.num_turns == 2
    assert [(m["role"], m["content"]) for m in x.messages] == [
        ("assistant", "71"),
        ("user", "Sure?"),
        ("assistant", "72"),
    ]
    assert parts.tokenizer.decode([t for t, s in zip(x.tokens, x.sampled) if not s]) == told


def test_an_environment_ends_a_trajectory(play):
    """After a reply, or after the calls of a turn. It has ended as it should."""
    x, read, _ = play("71" + END, "72" + END, environment=Talker(replies=["Sure?"], last=1))
    assert x.end == "environment" and has_ended(x) and len(read) == x.num_turns == 1
    x, read, _ = play(CALL + END, "72" + END, environment=Talker(last=0))
    assert x.end == "environment" and has_ended(x) and x.num_calls == x.num_turns == 1
    assert len(x.messages) == 1  # the result, which the policy does not read, is not there


def test_the_environment_is_not_asked_about_a_broken_turn(play):
    """A call that was not finished is no answer."""
    environment = Talker(replies=["Sure?"])
    x, _, _ = play(OPEN + END, environment=environment)
    assert environment.heard == [] and x.end == "unfinished_call"


def test_a_long_result_is_cut(parts, play):
    """The first --max-tool-tokens tokens, for the policy and for reward functions."""
    x, read, _ = play(CALL + END, "72" + END, tools=dict(echo=lambda text: TEXT), max_tool_tokens=5)
    tokens = parts.tokenizer(TEXT).input_ids
    assert x.messages[1]["content"] == parts.tokenizer.decode(tokens[:5]) and TEXT.startswith(
        x.messages[1]["content"]
    )
    assert read[1][0].endswith(TOLD.replace("12", x.messages[1]["content"]))
    x, _, _ = play(CALL + END, "72" + END, tools=dict(echo=lambda text: "6 7"), max_tool_tokens=5)
    assert x.messages[1]["content"] == "6 7"


# ---- Environments and rewards ------------------------------------------------------------------------------


COUNTER = '''
import threading


class Counter:
    step = 1

    def reset(self, start, cards=(), **columns):
        self.count = start
        self.lock = threading.Lock()  # cannot be copied
        if cards:
            return cards.pop()

    def add(self, number: int) -> str:
        """Add.

        Args:
            number: a number
        """
        self.count += number
        return str(self.count)

    def _hidden(self) -> str:
        """Not for the policy."""

    @property
    def broken(self):
        raise OSError("a property was read")

    def get_reward(self) -> float:
        """Not for the policy either."""
        return self.count


def length(completions, environments, completion_ids, start, **columns):
    for messages, environment, n in zip(completions, environments, start):
        assert len(messages) == 1 + 2 * (environment.count - n)
    assert [messages[-1]["content"] for messages in completions] == len(start) * ["done"]
    return [len(ids) for ids in completion_ids]


def say(text: str) -> str:
    """Say.

    Args:
        text: a text
    """
    return text
'''


@pytest.fixture
def counter(tmp_path):
    """Args with an environment that counts."""
    (tmp_path / "counter.py").write_text(COUNTER)
    return script.replace(
        ARGS,
        tools=[f"{tmp_path}/counter.py:say"],
        environment=f"{tmp_path}/counter.py:Counter",
        reward_fn=[f"{tmp_path}/counter.py:length"],
        response_length=200,
        max_turns=6,
    )


def started(args, *columns):
    """Trajectories with tools and environments, and what these say first."""
    start_tools, _ = script.load_tools(args)
    trajectories = [script.Trajectory(dict(columns=own, prompt=[]), None) for own in columns]
    return trajectories, start_tools(trajectories)


def reward_of(args):
    """The reward as train makes it."""
    functions = script.load_functions(args.reward_fn or [])
    return partial(script.score_trajectories, functions, SimpleNamespace(global_step=0), torch.device("cpu"))


def test_the_tools_of_an_environment(counter):
    """Its public methods but its own ones, and the functions of --tools. Properties are not read."""
    _, schemas = script.load_tools(counter)
    assert [schema["function"]["name"] for schema in schemas] == ["say", "add"]
    [x], firsts = started(counter, dict(start=4))
    assert list(x.tools) == ["say", "add"] and firsts == [None]
    assert x.tools["add"](2) == "6" and x.ask("get_reward").result() == 6


def test_reset_gets_a_copy_of_the_columns(counter):
    """It may change them, but siblings, later passes and rewards read the same row."""
    columns = dict(start=4, cards=["one", "two"], method="a", function="b")  # the names are nobody's
    _, firsts = started(counter, columns, columns)
    assert columns["cards"] == ["one", "two"] and firsts == ["two", "two"]


def test_an_exception_in_reset_is_one_of_the_run(counter):
    """It is not the policy's fault. The traceback shows the line of the environment."""
    with pytest.raises(TypeError, match="start") as caught:
        started(counter, dict(cards=[]))
    assert caught.traceback[-1].name == "start"  # where reset was called


WORLD = '''
import sqlite3
import threading

from talk import heard


class World:
    """Its connection works only in the thread that made it."""

    def __init__(self):
        self.database = sqlite3.connect(":memory:")
        self.heard = heard
        self.heard.append(("made", threading.get_ident()))

    def hear(self, what):
        self.database.execute("select 1")
        self.heard.append((what, threading.get_ident()))

    def reset(self, start, **columns):
        self.start = start
        self.hear("reset")

    async def add(self, number: int) -> str:
        """Add.

        Args:
            number: a number
        """
        self.hear("add")

    def reply(self, text):
        self.hear("reply")

    def is_over(self):
        self.hear("is_over")

    def get_reward(self):
        self.hear("get_reward")
        return self.start

    def close(self):
        self.hear("close")
'''


def test_an_environment_lives_in_one_thread(parts, tmp_path, monkeypatch):
    """From its constructor to close(), with two threads for three trajectories."""
    (tmp_path / "talk.py").write_text("heard = []\n")
    (tmp_path / "world.py").write_text(
        WORLD.replace("    def hear(", "    def _hear(").replace("self.hear(", "self._hear(")
    )
    args = script.replace(
        ARGS,
        environment=f"{tmp_path}/world.py:World",
        tools=None,
        reward_fn=None,
        tool_workers=2,
        response_length=200,
    )
    call = '<tool_call>{"name": "add", "arguments": {"number": 1}}</tool_call><|im_end|>'
    turns = iter([3 * [call], 3 * ["done<|im_end|>"]])

    def sample_turns(policy, texts, uniforms, *rest):
        tokens = [parts.tokenizer(text).input_ids for text in next(turns)]
        return [(ids, len(ids) * [0.0]) for ids in tokens]

    monkeypatch.setattr(script, "sample_turns", sample_turns)
    start_tools, _ = script.load_tools(args)
    example = dict(parts.batch["examples"][0], columns=dict(start=7))
    batch = script.draw_batch([example], 3, args, "test")
    get_scores = reward_of(args)
    from_talk = sys.modules["talk"].heard
    b, *_ = script.sample_responses(
        parts.policy, parts.turn_format, start_tools, parts.stop_ids, get_scores, batch, args
    )
    assert b["rewards/environment"].tolist() == 3 * [7.0] and b["failures"].sum() == 0
    order = ["made", "reset", "add", "is_over", "reply", "is_over", "get_reward", "close"]
    threads = list(dict.fromkeys(thread for _, thread in from_talk))
    heard = sorted([what for what, thread in from_talk if thread == one] for one in threads)
    assert threading.get_ident() not in threads
    of_two = 2 * order[:2] + [what for what in order[2:] for _ in range(2)]
    assert heard == sorted([order, of_two])


def test_siblings_may_begin_with_different_texts(parts, tmp_path):
    """Each has its own prompt then, which the sampler and the update read, and the samples show."""
    (tmp_path / "cards.py").write_text(
        "import itertools\n\nnumbers = itertools.count()\n\n\nclass Cards:\n"
        "    def reset(self, **columns):\n        return ' one' * (next(numbers) % 3)\n"
    )
    args = script.replace(ARGS, environment=f"{tmp_path}/cards.py:Cards", tools=None, tool_workers=1)
    start_tools, _ = script.load_tools(args)
    inputs = parts.policy, parts.turn_format, start_tools, parts.stop_ids, numbered_scores, parts.batch, args
    before = copy.deepcopy(parts.batch["examples"])
    b, prompts, _ = script.sample_responses(*inputs)
    assert parts.batch["examples"] == before  # the caller's
    C = b["ids"].shape[1] - args.response_length
    for i, (row, mask) in enumerate(zip(b["ids"], b["mask"])):
        text = TASKS[i // 4]["prompt"][0]["content"] + i % 3 * " one"
        chat = [{"role": "user", "content": text}]
        assert row[:C][mask[:C]].tolist() == script.tokenize_prompt(parts.tokenizer, chat)
        assert prompts[i] == script.plain_text(chat)
    with torch.no_grad():
        logprobs, _ = script.Policy(parts.policy)(b["ids"], b["mask"], args.response_length, args.temperature)
    assert (logprobs - b["sampling_logprobs"])[b["sampled"]].abs().max() < 1e-4


def test_a_text_is_a_message_of_the_user(parts, tmp_path):
    """The chat template writes the tools into the prompt, and the header of the first turn."""
    rows = [dict(prompt=row["prompt"][0]["content"]) for row in TASKS]
    args = script.replace(ARGS, dataset_name=write_rows(tmp_path / "texts", train=rows, test=rows))
    train, held_out = script.load_prompts(args, parts.tokenizer, None)
    right = [example["ids"] for example in parts.batch["examples"]]
    assert [task["ids"] for task in train] == right
    assert sorted(task["ids"] for task in held_out) == sorted(right)


def test_each_trajectory_has_its_own_environment(parts, counter, monkeypatch):
    """It is set to the columns of its task, keeps its state between turns, and has its own reward."""
    tokenizer = parts.tokenizer
    call = '<tool_call>{"name": "add", "arguments": {"number": 1}}</tool_call><|im_end|>'

    def sample_turns(policy, texts, uniforms, *rest):
        """The first of those that still write is done, and the others call."""
        written = ["done<|im_end|>", *(len(uniforms) - 1) * [call]]
        tokens = [tokenizer(text).input_ids for text in written]
        return [(ids, len(ids) * [0.0]) for ids in tokens]

    monkeypatch.setattr(script, "sample_turns", sample_turns)
    start_tools, _ = script.load_tools(counter)
    examples = [
        dict(parts.batch["examples"][i], columns=dict(start=start)) for i, start in ((0, 10), (1, 20))
    ]
    batch = script.draw_batch(examples, 3, counter, "test")
    get_scores = reward_of(counter)
    inputs = None, parts.turn_format, start_tools, parts.stop_ids
    trajectories = script.write_trajectories(*inputs, batch, counter)
    scores = get_scores(trajectories)
    assert scores["environment"].tolist() == [10, 11, 12, 23, 24, 25]
    assert scores["length"].tolist() == [len(x.tokens) for x in trajectories]
    assert list(scores) == ["length", "environment"]
    assert [x.messages[1]["content"] for x in trajectories[1:]] == ["11", "11", "21", "21", "21"]


# ---- TRL ---------------------------------------------------------------------------------------------------


def test_an_update_is_trls(small, tmp_path, monkeypatch):
    """TRL 1.16's GRPOTrainer gets the same ids, marks of sampled tokens (env_mask) and rewards. Its weights
    after a step of SGD and its lengths are ours. Skipped without TRL."""
    trl, P, K = trl_1_16(), 4, 4
    points = "return [float(len(str(messages)) % 7) for messages in completions]"
    flags = dict(  # one step for 16 trajectories
        total_episodes=P * K,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=8,
        num_mini_batches=1,
        num_ppo_epochs=1,
        num_generations=K,
        kl_coef=0.0,
        response_length=56,
        optimizer="torch.optim.SGD",
        learning_rate=1.0,
        max_grad_norm=None,
        num_eval_prompts=1,
        reward_fn=reward_file(tmp_path, points),
    )
    written = spy(monkeypatch, script, "write_trajectories")
    args = small("grpo_tools", **flags)
    _, folder = script.train(args)
    rows, metrics = written[2][1], rows_of(folder)[0]  # the first two calls are the evaluation
    assert len(rows) == P * K and not all(all(x.sampled) for x in rows)

    def write_again(prompts, trainer):
        """The trajectories of TRL's prompts, in the order of these."""
        left = [x for prompt in prompts[::K] for x in rows if x.example["prompt"] == prompt]
        assert [x.example["prompt"] for x in left] == prompts
        return dict(
            prompt_ids=[x.example["ids"] for x in left],
            completion_ids=[x.tokens for x in left],
            logprobs=None,
            env_mask=[[int(is_sampled) for is_sampled in x.sampled] for x in left],
            points=[float(len(str(x.messages)) % 7) for x in left],
        )

    policy = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    config = trl.GRPOConfig(
        output_dir=str(tmp_path / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=P * K,
        num_generations=K,
        max_completion_length=args.response_length,
        temperature=args.temperature,
        loss_type="dapo",
        beta=0.0,
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=1e9,
        max_steps=1,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
    )
    trainer = trl.GRPOTrainer(
        model=policy,
        reward_funcs=lambda points, **columns: points,
        args=config,
        train_dataset=datasets.Dataset.from_list([{"prompt": x.example["prompt"]} for x in rows[::K]]),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
        rollout_func=write_again,
    )
    trainer.train()
    ours, theirs = weights(folder / "model"), dict(policy.state_dict())
    theirs = {name: x for name, x in theirs.items() if name in ours}
    start = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).state_dict()
    moved = distance({name: start[name] for name in ours}, theirs)
    assert moved > 1e-2 and distance(ours, theirs) < 1e-4 * moved
    log = trainer.state.log_history[0]
    for name in ("completions/mean_length", "completions/min_length", "completions/max_length"):
        assert metrics[name] == pytest.approx(log[name])
    assert metrics["policy/entropy_avg"] == pytest.approx(log["entropy"], rel=1e-4)
    assert metrics["objective/scores"] == pytest.approx(log["reward"])
    assert metrics["grad_norm"] == pytest.approx(log["grad_norm"], rel=1e-4)
