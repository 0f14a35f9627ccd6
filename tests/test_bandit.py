"""Whole runs whose answer is known: what reward and KL together must lead to, for PPO and RLOO, with the scripts' own train.

A language model of six tokens, two prompts, and a table of rewards. All responses can be counted, so their probabilities are exact.
With a reward r and a price of beta for each nat of KL(policy || reference), the best policy is pi(y) = ref(y) exp(r(y) / beta) / Z
(Ziegler et al. 2019, section 2.2; Korbak et al. 2022). Distances are in total variation: half the sum of the absolute differences.
"""

import functools
import math

import pytest
import tokenizers
import torch
from conftest import EOS, RL
from run_tools import reward_file, rows_of, write_rows
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

pytest_plugins = ["run_fixtures"]
WORDS = [EOS, *"abcde"]  # pad is EOS
PROMPTS = ["a b", "c d"]


@functools.cache
def responses(length):
    """All responses of at most `length` tokens, where EOS is the last one. -> tuple of tuples of ids"""
    if length == 1:
        return tuple((token,) for token in range(len(WORDS)))
    shorter = responses(length - 1)
    open_ends = [row for row in shorter if len(row) == length - 1 and row[-1] != 0]
    return tuple(row for row in shorter if row not in open_ends) + tuple((*row, token) for row in open_ends for token in range(len(WORDS)))


def text(row):
    """What a reward function reads."""
    return " ".join(WORDS[token] for token in row if token)


@functools.cache
def worth(prompt, response):
    """The reward of a text, from -1 to 1: a number for each pair, with no order in it."""
    number = sum((i + 3) * ord(letter) for i, letter in enumerate(f"{prompt} {response}"))
    return math.sin(number * number)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Folders of the model and of the data of each script."""
    root = tmp_path_factory.mktemp("bandit")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token=EOS))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token=EOS, eos_token=EOS, pad_token=EOS, unk_token=EOS)
    torch.manual_seed(5)
    ids = dict(bos_token_id=0, eos_token_id=0, pad_token_id=0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(WORDS), n_positions=8, n_embd=16, n_layer=1, n_head=2, initializer_range=0.3, **ids))
    for place in (model, tokenizer):
        place.save_pretrained(root / "lm")
    columns = {
        "ppo_sentiment": [dict(text=prompt) for prompt in PROMPTS],
        "ppo_dialog": [dict(dialog=[prompt, "e"]) for prompt in PROMPTS],
        "rloo_tldr": [dict(prompt=prompt) for prompt in PROMPTS],
    }
    return {"model": str(root / "lm")} | {name: write_rows(root / name, train=rows, test=rows) for name, rows in columns.items()}


@torch.no_grad()
def probabilities(model, length, end):
    """Of all responses to each prompt and its end, by plain transformers, one text at a time. -> fp64 [prompts, responses]"""
    table = []
    for prompt in PROMPTS:
        asked = [*(WORDS.index(word) for word in prompt.split()), *end]
        table.append([])
        for row in responses(length):
            logp = model(torch.tensor([[*asked, *row]])).logits[0].double().log_softmax(-1)
            table[-1].append(math.exp(sum(logp[len(asked) - 1 + i, token].item() for i, token in enumerate(row))))
    return torch.tensor(table, dtype=torch.float64)


def rewards(length, reward=worth):
    """-> fp64 [prompts, responses]"""
    return torch.tensor([[reward(prompt, text(row)) for row in responses(length)] for prompt in PROMPTS], dtype=torch.float64)


def closed_form(ref, r, beta):
    """ref exp(r / beta) / Z, for each prompt."""
    return torch.softmax(ref.log() + r / beta, -1)


def distance(p, q):
    """The larger total variation of the two prompts."""
    return 0.5 * (p - q).abs().sum(-1).max().item()


@pytest.fixture
def learn(scripts, places, tmp_path, monkeypatch):
    """learn(script, length, **flags) trains -> what policy and reference say of all responses. `reward` is of prompt and response."""

    def run(script, length, reward=worth, updates=60, batch=512, minibatches=1, **flags):
        table = {(p, text(row)): reward(p, text(row)) for p in PROMPTS for row in responses(length)}
        ppo = dict(num_eval_prompts=2, kl_target=None, lam=1.0)
        own = {
            "ppo_sentiment": ppo | dict(query_min_length=2, query_max_length=2, response_min_length=length, min_text_length=0),
            "ppo_dialog": ppo | dict(reward_model_path=None, meteor_weight=0.0, utterance_end="eos", max_prompt_length=3),
            "rloo_tldr": dict(rloo_k=4, num_examples=2, temperature=1.0),
        }[script]
        args = scripts[script].Args(**(own | dict(
            model_name_or_path=places["model"], dataset_name=places[script], output_dir=str(tmp_path / "run"), dtype="float32",
            reward_fn=reward_file(tmp_path, f"table = {table!r}\nreturn [table[p, r.strip()] for p, r in zip(prompts, responses)]"),
            response_length=length, total_episodes=batch * updates, per_device_train_batch_size=batch // minibatches,
            num_mini_batches=minibatches, num_ppo_epochs=1, local_rollout_forward_batch_size=batch, learning_rate=1e-2,
            lr_scheduler_type="linear", max_grad_norm=None, save_every=0, num_sample_generations=0,
        ) | flags))  # fmt: skip
        monkeypatch.setattr(scripts[script].Run, "curves", lambda *_: None)
        model, folder = scripts[script].train(args)
        assert len(rows_of(folder)) == updates
        end = [0] if script == "ppo_dialog" else []  # there a prompt ends with the end of an utterance
        return [probabilities(part.eval(), length, end) for part in (model.policy, model.reference)]

    return run


@pytest.mark.parametrize("script", RL)
def test_the_rewarded_token_is_learned(learn, script):
    """A reward of 1 for one token, and no price on the KL: from 0.3 or less to more than 0.95."""
    found = learn(script, 1, reward=lambda prompt, response: float(response == "c"), updates=40, batch=128, kl_coef=0.0)
    policy, reference = (table[:, WORDS.index("c")] for table in found)
    assert reference.max() < 0.3 and policy.min() > 0.95, (reference, policy)


LONG = dict(updates=120, batch=256, minibatches=2)
BETA = 0.5


@pytest.mark.parametrize("script, length, tolerance, flags", [
    ("ppo_sentiment", 1, 0.02, {}), ("ppo_dialog", 1, 0.02, {}), ("rloo_tldr", 1, 0.02, {}),
    ("ppo_sentiment", 2, 0.06, LONG), ("ppo_dialog", 2, 0.06, LONG), ("rloo_tldr", 2, 0.06, LONG),
    ("rloo_tldr", 1, 0.04, dict(kl_in_loss=True, kl_estimator="k2")),
])  # fmt: skip
def test_reward_and_kl_lead_to_the_closed_form(learn, script, length, tolerance, flags):
    """Of one token, and of two, where EOS may come first. The start, and what half and twice the price lead to, are far away.

    With k1 in the reward all advantages are 0 at the goal; with k2 in the loss only their mean is, and the noise of sampling stays.
    """
    policy, reference = learn(script, length, kl_coef=BETA, **flags)
    r = rewards(length)
    goal, others = closed_form(reference, r, BETA), [reference, closed_form(reference, r, BETA / 2), closed_form(reference, r, BETA * 2)]
    assert distance(policy, goal) < tolerance < min(distance(other, goal) for other in others) / 3


def test_k3_in_the_loss_leads_elsewhere(learn):
    """Trick 32: as a loss k3 is KL(reference || policy), as in GRPO. The best policy for sum pi r - beta KL(reference || pi) is
    pi = beta reference / (c - r), with the c above all rewards that makes it sum to 1; it is not the closed form of the others.
    """
    policy, reference = learn("rloo_tldr", 1, kl_coef=BETA, kl_in_loss=True, kl_estimator="k3")
    r = rewards(1)
    low, high = (r.max(-1, keepdim=True).values + width for width in (0.0, BETA))
    for _ in range(60):  # by halving: the sum falls where c grows
        c = (low + high) / 2
        above = (BETA * reference / (c - r)).sum(-1, keepdim=True) > 1
        low, high = torch.where(above, c, low), torch.where(above, high, c)
    goal = BETA * reference / (c - r)
    assert (goal.sum(-1) - 1).abs().max() < 1e-9
    assert distance(policy, goal) < 0.04 and distance(policy, closed_form(reference, r, BETA)) > 0.15
