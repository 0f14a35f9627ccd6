"""Whole runs whose answer is known: what reward and KL together must lead to, for PPO, RLOO and GRPO.

A language model that says six tokens, two prompts, and a table of rewards. All responses can be counted, so
their probabilities are exact. With a reward r and a coefficient beta of KL(policy || reference), the best
policy is pi(y) = ref(y) exp(r(y) / beta) / Z (Ziegler et al. 2019, section 2.2; Korbak et al. 2022).
Distances are in total variation: half the sum of the absolute differences.
"""

import functools
import math

import pytest
import tokenizers
import torch
from conftest import EOS
from run_tools import rows_of, write_rows
from transformers import GPTJConfig, GPTJForCausalLM, PreTrainedTokenizerFast

pytest_plugins = ["run_fixtures"]
WORDS = [EOS, *"abcdefg"]  # pad is EOS
SAID = range(6)  # the last two are in no response
PROMPTS = ["a b", "c d"]


@functools.cache
def all_responses(length):
    """All responses of at most `length` tokens; only the last token can be EOS. -> tuple of tuples of ids"""
    if length == 1:
        return tuple((token,) for token in SAID)
    responses = []
    for row in all_responses(length - 1):
        if len(row) < length - 1 or row[-1] == 0:  # it has ended
            responses.append(row)
        else:
            responses += [(*row, token) for token in SAID]
    return tuple(responses)


def text_of(row):
    """What a reward function reads."""
    return " ".join(WORDS[token] for token in row if token)


@functools.cache
def some_reward(prompt, response):
    """A reward from -1 to 1 for each pair of texts, without any order."""
    number = sum((i + 3) * ord(letter) for i, letter in enumerate(f"{prompt} {response}"))
    return math.sin(number * number)


def reward(prompts, completions, **columns):
    """For --reward-fn."""
    return [some_reward(prompt, text.strip()) for prompt, text in zip(prompts, completions)]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """The folders of the model and of data for all scripts."""
    root = tmp_path_factory.mktemp("bandit")
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=EOS))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = dict(bos_token=EOS, eos_token=EOS, pad_token=EOS, unk_token=EOS)
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(root / "lm")
    torch.manual_seed(5)
    sizes = dict(n_positions=8, n_embd=16, n_layer=1, n_head=2, rotary_dim=4, initializer_range=0.2)
    noise = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    config = GPTJConfig(vocab_size=8, bos_token_id=0, eos_token_id=0, pad_token_id=0, **sizes, **noise)
    model = GPTJForCausalLM(config)
    model.lm_head.bias.data[len(SAID) :] = -100
    model.save_pretrained(root / "lm")
    rows = [dict(text=prompt, prompt=prompt, dialog=[prompt, "e"]) for prompt in PROMPTS]
    return str(root / "lm"), write_rows(root / "data", train=rows, test=rows)


@torch.no_grad()
def exact_probabilities(model, length, end):
    """The probabilities of all responses to each prompt, in plain transformers. -> fp64 [prompts, responses]

    end: the tokens between the prompt and the response.
    """
    table = []
    for prompt in PROMPTS:
        prompt_ids = [WORDS.index(word) for word in prompt.split()] + end
        logprobs = []
        for row in all_responses(length):
            logp = model(torch.tensor([[*prompt_ids, *row]])).logits[0].double().log_softmax(-1)
            logprobs.append(sum(logp[len(prompt_ids) - 1 + t, token] for t, token in enumerate(row)))
        table.append(torch.stack(logprobs).exp())
    return torch.stack(table)


def reward_table(length):
    """The rewards of all responses to each prompt. -> fp64 [prompts, responses]"""
    table = [[some_reward(prompt, text_of(row)) for row in all_responses(length)] for prompt in PROMPTS]
    return torch.tensor(table, dtype=torch.float64)


def best_policy(reference, rewards, beta):
    """ref exp(r / beta) / Z for each prompt."""
    return torch.softmax(reference.log() + rewards / beta, -1)


def distance(p, q):
    """The larger one of the total variations of the two prompts."""
    return 0.5 * (p - q).abs().sum(-1).max().item()


@pytest.fixture
def learn(scripts, places, tmp_path):
    """learn(script, length, **flags) -> the probabilities of all responses after training, and before."""

    def run(script, length, updates=60, batch=256, minibatches=1, **flags):
        lm, data = places
        common = dict(
            model_name_or_path=lm,
            dataset_name=data,
            output_dir=str(tmp_path / "run"),
            dtype="float32",
            reward_fn=[f"{__file__}:reward"],
            response_length=length,
            total_episodes=batch * updates,
            per_device_train_batch_size=batch // minibatches,
            num_mini_batches=minibatches,
            num_ppo_epochs=1,
            local_rollout_forward_batch_size=batch,
            learning_rate=1e-2,
            lr_scheduler_type="linear",
            max_grad_norm=None,
            save_every=0,
            num_sample_generations=0,
        )
        if script == "rloo_tldr":
            own = dict(rloo_k=4, num_eval_prompts=2, temperature=1.0)
        elif script == "grpo_math":
            own = dict(num_generations=batch // 2, gradient_accumulation_steps=1, num_eval_prompts=2)
            own |= dict(prompt_template=None, system_prompt=None, num_eval_samples=1, max_prompt_length=2)
        else:
            own = dict(num_eval_prompts=2, kl_target=None, lam=1.0)
        if script == "ppo_sentiment":
            own |= dict(query_min_length=2, query_max_length=2, response_min_length=length, min_text_length=0)
        if script == "ppo_dialog":
            own |= dict(reward_model_path=None, meteor_weight=0.0, utterance_end="eos", max_prompt_length=3)
        model, folder = scripts[script].train(scripts[script].Args(**(common | own | flags)))
        assert len(rows_of(folder)) == updates
        end = [0] if script == "ppo_dialog" else []  # there, a prompt ends with the end of an utterance
        reference = GPTJForCausalLM.from_pretrained(lm).eval()
        policy = model.policy.eval()
        return exact_probabilities(policy, length, end), exact_probabilities(reference, length, end)

    return run


BETA = 0.5
TWO_TOKENS = dict(length=2, updates=80, minibatches=2)  # EOS may come first


@pytest.mark.parametrize(
    "script, tolerance, flags",
    [
        ("ppo_sentiment", 0.06, TWO_TOKENS),
        ("ppo_dialog", 0.02, dict(length=1)),
        ("rloo_tldr", 0.06, TWO_TOKENS | dict(updates=120)),
        ("rloo_tldr", 0.035, dict(length=1, kl_estimator="k2")),
    ],
)
def test_reward_and_kl_lead_to_the_best_policy(learn, script, tolerance, flags):
    """The start is far away from it, and so are the best policies for half and twice the coefficient.

    With k1 in the reward, all advantages are 0 at the goal. With k2 in the loss only their mean is, so the
    noise of sampling remains.
    """
    policy, reference = learn(script, kl_coef=BETA, **flags)
    rewards = reward_table(flags["length"])
    goal = best_policy(reference, rewards, BETA)
    others = [reference, best_policy(reference, rewards, BETA / 2), best_policy(reference, rewards, BETA * 2)]
    assert distance(policy, goal) < tolerance < min(distance(other, goal) for other in others) / 3


def test_k3_in_the_loss_leads_elsewhere(learn):
    """As a loss, k3 is KL(reference || policy), as in GRPO. So its best policy is another one.

    The best policy for sum pi r - beta KL(reference || pi) is pi = beta reference / (c - r), where c is above
    all rewards and makes it sum to 1.
    """
    policy, reference = learn("rloo_tldr", 1, kl_coef=BETA, kl_estimator="k3")
    rewards = reward_table(1)
    goal = best_policy_of_k3(reference, rewards, BETA)
    assert distance(policy, goal) < 0.04
    assert distance(policy, best_policy(reference, rewards, BETA)) > 0.15


def best_policy_of_k3(reference, rewards, beta):
    """beta reference / (c - r) for each prompt; beta is a number or has one for each prompt."""
    beta = torch.as_tensor(beta, dtype=torch.float64).expand(len(rewards))[:, None]
    low = rewards.max(-1, keepdim=True).values
    high = low + beta
    for _ in range(60):  # by bisection: the sum falls if c grows
        c = (low + high) / 2
        too_low = (beta * reference / (c - rewards)).sum(-1, keepdim=True) > 1
        low, high = torch.where(too_low, c, low), torch.where(too_low, high, c)
    goal = beta * reference / (c - rewards)
    assert (goal.sum(-1) - 1).abs().max() < 1e-9
    return goal


def test_grpo_with_a_penalty(learn):
    """With large groups, GRPO maximizes sum pi r / sigma - beta KL(reference || pi).

    sigma is the deviation of the reward under pi itself. So the goal is that of k3 with the coefficient
    beta sigma, where sigma is that of the goal.
    """
    policy, reference = learn("grpo_math", 1, kl_coef=BETA, seed=4)
    rewards = reward_table(1)
    goal = reference
    for _ in range(200):
        mean = (goal * rewards).sum(-1, keepdim=True)
        sigma = (goal * (rewards - mean) ** 2).sum(-1).sqrt()
        goal = best_policy_of_k3(reference, rewards, BETA * sigma)
    assert distance(policy, goal) < 0.05
    others = [reference, best_policy_of_k3(reference, rewards, BETA), best_policy(reference, rewards, BETA)]
    assert min(distance(other, goal) for other in others) > 0.12
