"""Helpers for tests of whole runs: small flags, readers of run folders, and scripts as processes."""

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import EOS
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
ALL = (
    *("ppo_sentiment", "ppo_dialog", "sft", "reward_model"),
    *("rloo_tldr", "grpo_math", "dpo_tldr", "grpo_tools"),
)
RL_FLAGS = dict(  # of a run of about a second, with one or two updates of 8 responses
    dtype="float32",
    per_device_train_batch_size=4,
    num_mini_batches=2,
    num_ppo_epochs=2,
    learning_rate=1e-2,
    response_length=6,
    num_eval_prompts=4,
    num_sample_generations=1,
    local_rollout_forward_batch_size=8,
)
BATCHES = dict(dtype="float32", num_train_epochs=1.0, per_device_train_batch_size=8, learning_rate=1e-2)
SMALL = {
    "ppo_sentiment": RL_FLAGS
    | dict(total_episodes=8, query_max_length=6, response_min_length=3, min_text_length=0, kl_target=None),
    "ppo_dialog": RL_FLAGS
    | dict(
        total_episodes=8,
        utterance_end="eos",
        num_context_utterances=2,
        max_prompt_length=48,
        kl_target=None,
        intent_reward="probability",
    ),
    "rloo_tldr": RL_FLAGS | dict(total_episodes=16, max_prompt_length=200, missing_eos_penalty=1.0),
    "grpo_math": RL_FLAGS
    | dict(
        prompt_template=None,
        system_prompt=None,
        total_episodes=16,
        gradient_accumulation_steps=1,
        num_generations=2,
        kl_coef=0.1,
        max_prompt_length=64,
        num_eval_samples=2,
    ),
    "grpo_tools": RL_FLAGS
    | dict(
        prompt_template=None,
        system_prompt=None,
        tools=["data/tools.py:calculator"],
        total_episodes=16,
        gradient_accumulation_steps=1,
        num_generations=2,
        kl_coef=0.1,
        max_prompt_length=64,
        response_length=64,
        max_turns=3,
        num_eval_samples=2,
        temperature=1.3,  # then some trajectories have one turn, some two, and some three
    ),
    "sft": dict(
        dtype="float32",
        max_length=128,
        num_train_rows=16,
        num_eval_prompts=4,
        num_samples=1,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
    ),
    "reward_model": BATCHES | dict(max_length=64, num_eval_prompts=8),
    "dpo_tldr": BATCHES | dict(max_length=250, num_eval_pairs=8, num_eval_prompts=4, response_length=6),
}
COSINE = dict(save_every=2, lr_scheduler_type="cosine", warmup_ratio=0.3)
ADAPTIVE = dict(total_episodes=48, kl_target=0.5, kl_horizon=50)
SIX_UPDATES = {  # with these flags on top, a run has 6 updates, and everything that a checkpoint must hold
    "ppo_sentiment": COSINE | ADAPTIVE,
    "ppo_dialog": COSINE | ADAPTIVE | dict(lr_scheduler_type="linear"),
    "rloo_tldr": COSINE | dict(total_episodes=48, whiten_rewards=True),
    "grpo_math": COSINE | dict(total_episodes=48),
    "grpo_tools": COSINE | dict(total_episodes=48),
    "sft": COSINE | dict(num_train_epochs=4.0, max_length=256),
    "reward_model": dict(save_every=2, min_prefix_length=4, lr_scheduler_type="linear"),
    "dpo_tldr": COSINE,
}
BY_HEART = [  # dialogs that a model learns by heart: some answers are questions
    (["Hello, who are you?", "I am Leo, and you?", "I am Nina."], [2, 2, 1]),
    (["Do you like tea?", "Yes, I like tea very much.", "Then come in."], [2, 1, 3]),
    (["Please open the door.", "Of course, I will open it.", "Thank you, my friend."], [3, 4, 1]),
    (["Where is the café?", "Déjà vu: the café is 3 € away."], [2, 1]),  # some letters are 2 or 3 tokens
    (["It is cold here.", "Why do you not close the window?"], [1, 2]),
]
DIALOGS = [  # for fine-tuning and classifiers: some can be used, some in part, some not at all
    dict(dialog=["Who  are\nyou?", "I am Leo.", "Then come in."], act=[2, 1, 3]),
    dict(dialog=["Fine.", " "], act=[1, 1]),
    dict(dialog=["Alone."], act=[1]),
    dict(dialog=["Is it?", "It is."], act=[2, 1, 3]),
    dict(dialog=["Was it?", "It was."], act=None),
    dict(dialog=None, act=[1, 2]),
    dict(dialog=["Yes.", None], act=[1, 2]),
    dict(dialog=["One.", "Two.", "Three."], act=[1, None, 4]),
    dict(dialog=["Four.", "Five."], act=[1, None]),
]


# ---- Run folders -------------------------------------------------------------------------------------------


def maker(scripts, world, root):
    """make(script, folder="run", **changes) -> Args of a small run, whose folder is in root."""

    def make(script, folder="run", **changes):
        if script == "ppo_sentiment":
            places = dict(dataset_name=world.reviews, reward_model_path=world.classifier())
        elif script == "ppo_dialog":
            places = dict(dataset_name=world.dialogs, reward_model_path=world.intents())
        elif script == "rloo_tldr":
            places = dict(dataset_name=world.posts, reward_model_path=world.preference_model())
        elif script == "grpo_math":
            places = dict(dataset_name=world.tasks, reward_fn=[world.verifier])
        elif script == "grpo_tools":
            places = dict(dataset_name=str(ROOT / "data/calculator"), reward_fn=[world.verifier])
        elif script == "dpo_tldr":
            places = dict(dataset_name=world.pairs, eval_dataset_name=world.posts, judge_fn=world.verifier)
        else:
            places = dict(dataset_name=world.reviews)
        places["model_name_or_path"] = world.classifier() if script == "reward_model" else world.lm()
        if script == "grpo_tools":  # a random model calls no tool
            places["model_name_or_path"] = str(ROOT / "checkpoints/tools-sft")
        places["output_dir"] = str(root / folder)
        return scripts[script].Args(**(places | SMALL[script] | changes))

    return make


def rows_of(folder, name="metrics.jsonl"):
    """The objects in a file of a run folder that holds one per line."""
    return [json.loads(line) for line in (Path(folder) / name).read_text().splitlines()]


def evaluation_of(folder):
    """evaluation.json of a run."""
    return json.loads((Path(folder) / "evaluation.json").read_text())


def timeless(rows):
    """Rows of metrics without those that depend on the clock."""
    kept = []
    for row in rows:
        kept.append({name: x for name, x in row.items() if name != "eps" and not name.startswith("perf/")})
    return kept


def weights(folder):
    """model.safetensors of a folder. -> dict: name -> tensor"""
    return load_file(Path(folder) / "model.safetensors")


def same(a, b):
    """True if two dicts of tensors are equal, bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def distance(a, b):
    """The largest difference between two dicts of tensors."""
    assert a.keys() == b.keys()
    return max((a[name].float() - b[name].float()).abs().max().item() for name in a)


def assert_same_run(one, other):
    """Models, value heads, metrics, samples and evaluation are bit-identical, except for clocks."""
    one, other = Path(one), Path(other)
    files = sorted(path.relative_to(one) for path in (one / "model").rglob("*.safetensors"))
    assert files
    for name in files:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    assert timeless(rows_of(one)) == timeless(rows_of(other))
    for name in ("samples.jsonl", "tokens.jsonl", "evaluation.json", "evaluation_samples.jsonl"):
        assert (one / name).exists() == (other / name).exists()
        if (one / name).exists():
            assert (one / name).read_text() == (other / name).read_text(), name


# ---- Models, data, functions -------------------------------------------------------------------------------


def spy(monkeypatch, module, name):
    """Record the calls of module.name. -> a list that fills with (arguments, result)"""
    calls = []
    original = getattr(module, name)

    def recorded(*args, **kwargs):
        result = original(*args, **kwargs)
        calls.append((args, result))
        return result

    monkeypatch.setattr(module, name, recorded)
    return calls


def without_check_of_models(monkeypatch, module):
    """Let a script train any model, and generate nothing before the evaluation."""
    name = next(name for name in vars(module) if name.startswith("check_") and name.endswith("_model"))
    monkeypatch.setattr(module, name, lambda *inputs: None)


def eos_prone(tiny_lm, folder):
    """tiny_lm with a final bias towards EOS, so that about one token in six is EOS. -> its folder, a str"""
    model = AutoModelForCausalLM.from_pretrained(tiny_lm())
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm())
    model.transformer.ln_f.bias.data += 5 * model.lm_head.weight[tokenizer.eos_token_id].detach()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def forget_reward_files(root):
    """Let the next run of this process import a file of the same name as one under root."""
    importlib.invalidate_caches()
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(root)):
            del sys.modules[name]


def reward_file(folder, body, name="reward"):
    """Write a reward function with these lines as its body. -> [FILE.py:function]"""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    path = folder / f"{name}.py"
    path.write_text("import os\n\ndef reward(prompts, completions, **columns):\n" + lines)
    return [f"{path}:reward"]


GUESSES = """
import random


class Guesses:
    def reset(self, secret, **columns):
        self.random, self.guesses = random.Random(secret), []

    def guess(self, number: int) -> str:
        \"""Guess the number.

        Args:
            number: the guess
        \"""
        self.guesses.append(number)
        return self.random.choice(["higher", "lower"]) if len(self.guesses) < 4 else "right"

    def get_reward(self):
        return sum(self.guesses) % 7
"""


def guesses(folder):
    """Flags of a run of grpo_tools.py whose environment has a state and random numbers of its own."""
    (folder / "guesses.py").write_text(GUESSES)
    environment = f"{folder}/guesses.py:Guesses"
    return dict(
        environment=environment,
        tools=None,
        reward_fn=None,
        dataset_name=str(ROOT / "data/guess"),
        response_length=48,
        num_eval_prompts=2,
    )


def write_rows(folder, **splits):
    """A data set: a folder with one jsonl file per split. -> its path, a str"""
    folder.mkdir(parents=True)
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


# ---- By hand -----------------------------------------------------------------------------------------------


def wordy(folder):
    """Bias a model towards three words, so that its responses repeat some, and that few end. -> its folder"""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for word, bias in ((" this", 3), (" movie", 3), (" with", 3), (EOS, -2)):
        [token] = tokenizer(word).input_ids
        model.transformer.ln_f.bias.data += bias * model.lm_head.weight[token].detach()
    model.save_pretrained(folder)
    return folder


def rows_by_hand(tokenizer, b, responses, temperature):
    """What was sampled, row by row, in plain lists. Only the token ids and the texts are the script's."""
    T, rows = b["sampling_logprobs"].shape[1], []
    for i, (ids, sampled) in enumerate(zip(b["ids"], b["sampling_logprobs"], strict=True)):
        prompt = tokenizer.decode(ids[:-T][b["mask"][i, :-T]])
        tokens = ids[-T:].tolist()
        ended = tokenizer.eos_token_id in tokens
        if ended:
            tokens = tokens[: tokens.index(tokenizer.eos_token_id) + 1]
        text = tokenizer.decode(tokens[:-1] if ended else tokens, skip_special_tokens=True)
        assert responses[i] == text
        rows.append(
            SimpleNamespace(
                prompt=prompt,
                response=text,
                ids=tokenizer(prompt).input_ids,
                tokens=tokens,
                ended=ended,
                sampled=sampled[: len(tokens)],
                temperature=temperature,
            )
        )
    return rows


def with_a_gap(sample_responses, B):
    """sample_responses, whose log-probabilities are too low in updates, which have B responses.

    By 0.001 at the first token, by 0.002 at the second one, ...: so little that other differences show.
    """

    def sample_with_a_gap(*inputs):
        b, *texts = sample_responses(*inputs)
        if len(b["lengths"]) == B:
            b["sampling_logprobs"] -= 0.001 * torch.arange(1, b["sampling_logprobs"].shape[1] + 1)
        return b, *texts

    return sample_with_a_gap


def plain_logprobs(model, row):
    """Log-probabilities of a response and entropies, by plain transformers, without padding. -> [T] each"""
    logits = model(torch.tensor([row.ids + row.tokens])).logits[0, len(row.ids) - 1 : -1]
    log_p = (logits / row.temperature).log_softmax(-1)
    entropies = -(log_p.exp() * log_p).sum(-1)
    return log_p[range(len(row.tokens)), row.tokens], entropies


def grouped(rows, values):
    """The values of each prompt. -> list of lists, in the order in which the prompts come first"""
    groups = {}
    for row, value in zip(rows, values, strict=True):
        groups.setdefault(row.prompt, []).append(value)
    assert len({len(group) for group in groups.values()}) == 1
    return list(groups.values())


def bigram_share(texts, words_of=str.split):
    """Different pairs of neighboring words / all pairs."""
    words = [words_of(text.lower()) for text in texts]
    pairs = [pair for row in words for pair in zip(row, row[1:])]
    return len(set(pairs)) / len(pairs)


def texts_of(split, count):
    """Rows with the column text, such as "test text 3: sun sun."."""
    return [dict(text=f"{split} text {i}:" + " sun" * (5 * i % 8) + ".") for i in range(count)]


def posts_of(split, count, longest=60):
    """Rows with the columns prompt and completion. The text of number 4 is long."""
    rows = []
    for i in range(count):
        prompt = f"{split} text {i}:" + " rain" * (i % 4)
        completion = f" {split} answer {i}" + " sun" * (longest if i == 4 else 5 * i % 7) + "."
        rows.append(dict(prompt=prompt, completion=completion))
    return rows


def three_splits(folder, make, num_train=13):
    """A data set with 9 test and 5 validation rows. -> its path, rows of train, rows of test"""
    train, test = make("train", num_train), make("test", 9)
    return write_rows(folder, train=train, test=test, validation=make("validation", 5)), train, test


def number_in(text, split):
    """The number of the row of this split that a text begins with; fails if it is of another split."""
    start = f"{split} text "
    assert text.startswith(start), text
    return int(text.removeprefix(start).split(":")[0])


def linear(rate, update, updates, warmup):
    """The learning rate of an update: up during warmup, then down to 0 after the last update."""
    if update <= warmup:
        return rate * update / warmup
    return rate * (updates - (update - 1)) / (updates - warmup)


def adamw_step(model, optimizer, loss, rate, max_norm):
    """One step along a clipped gradient. -> the norm of the gradient before it was clipped"""
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.param_groups[0]["lr"] = rate
    optimizer.step()
    return norm.item()


def assert_weights_of(folder, model):
    """model/ has the weights of a model that was trained by hand."""
    saved = type(model).from_pretrained(folder / "model").state_dict()
    for name, x in model.state_dict().items():
        torch.testing.assert_close(saved[name], x, atol=1e-4, rtol=1e-3, msg=name)


# ---- Ends of runs ------------------------------------------------------------------------------------------


def stop_after(monkeypatch, module, update, number=signal.SIGTERM):
    """Send this process a signal while the metrics of an update are logged."""
    log = module.Run.log

    def logged(self, metrics, *rest):
        if metrics["update"] == update:
            signal.raise_signal(number)
        return log(self, metrics, *rest)

    monkeypatch.setattr(module.Run, "log", logged)


def one_line(module, argv, capsys):
    """Call main(), which must end with exit code 2 and one line on stderr. -> that line"""
    with pytest.raises(SystemExit) as end:
        module.main(argv)
    lines = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and len(lines) == 1, lines
    assert lines[0].startswith(f"{module.__name__}.py: "), lines
    return lines[0]


# ---- Processes ---------------------------------------------------------------------------------------------


def flags_of(args):
    """The command line that gives these Args, with every field named."""
    words = []
    for field in fields(args):
        value = getattr(args, field.name)
        flag = field.name.replace("_", "-")
        if field.name in ("recipe", "resume"):
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            words += [f"--{flag}", *map(str, value)]
        else:
            words += [f"--{flag}", str(value)]
    return words


def free_port():
    """A TCP port that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def start_process(words, folder, terminal=None, **env):
    """Start a command on one core. Its output is kept, or goes to a terminal."""
    env = os.environ | dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", COLUMNS="200") | env
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    output = terminal or subprocess.PIPE
    return subprocess.Popen(
        [str(word) for word in words],
        cwd=folder,
        env=env,
        text=True,
        stdin=terminal,
        stdout=output,
        stderr=output,
    )


def script_words(script, args):
    """The command that runs a script in one process."""
    return [sys.executable, ROOT / f"{script}.py", *flags_of(args)]


def has_ended(x):
    """True if nothing cut this trajectory of grpo_tools.py off."""
    return x.end in ("answer", "environment")
