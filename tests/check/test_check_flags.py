"""Flags that make no sense, contradict each other, or have no effect."""

import importlib
import importlib.util

import pytest
from check_helpers import assert_only, assert_remark, findings, texts
from conftest import ROOT
from run_tools import ALL

pytest_plugins = ["run_fixtures"]
CASES = {
    "negative": ("ppo_sentiment", dict(cliprange=-0.2), "--cliprange cannot be -0.2"),
    "zero": ("dpo_tldr", dict(beta=0.0), "--beta cannot be 0.0"),
    "not a number": ("sft", dict(learning_rate=float("nan")), "--learning-rate cannot be nan"),
    "nothing is clipped": ("ppo_sentiment", dict(cliprange_value=0.0), "--cliprange-value cannot be 0.0"),
    "a variable that is not set": ("grpo_math", dict(hard_dataset_name=""), "--hard-dataset-name is empty"),
    "no function": ("grpo_math", dict(reward_fn=[]), "--reward-fn names no function"),
    "no weight": ("grpo_math", dict(reward_weights=[0.0]), "--reward-weights: all are 0"),
    "all layers": ("ppo_sentiment", dict(num_shared_layers=2), "the model has 2 layers"),
    "warm-up": ("sft", dict(warmup_ratio=100.0), "--warmup-ratio is a fraction"),
    "gamma": ("ppo_dialog", dict(gamma=1.5), "--gamma is a fraction"),
    "half of the labels": ("dpo_tldr", dict(label_smoothing=0.5), "--label-smoothing"),
    "query": ("ppo_sentiment", dict(query_min_length=7, query_max_length=6), "--query-min-length 7"),
    "response": ("ppo_sentiment", dict(response_min_length=7, response_length=6), "--response-min-length 7"),
    "penalty": ("rloo_tldr", dict(stop_token=None), "--missing-eos-penalty without a stop token"),
    "tools never answer": ("grpo_tools", dict(stop_token=None), "--stop-token None"),
    "horizon": ("ppo_sentiment", dict(kl_target=1.0, kl_horizon=1.6), "more than 1/5 of the batch, 8"),
    "one response": ("rloo_tldr", dict(rloo_k=1), "--rloo-k 1 must be 2 or more"),
    "3 of 4": ("grpo_math", dict(num_generations=3), "--num-generations 3"),
    "8 bit, sft": ("dpo_tldr", dict(load_in_8bit=True), "no weights are frozen"),
    "8 bit, no reference": ("grpo_math", dict(load_in_8bit=True, kl_coef=0.0), "or --kl-coef"),
    "shared and LoRA": ("ppo_sentiment", dict(num_shared_layers=1, lora_r=4), "cannot be combined"),
    "shared layers": ("ppo_sentiment", dict(num_shared_layers=3), "the model has 2 layers"),
    "alpha": ("sft", dict(lora_r=4, lora_alpha=0), "--lora-alpha cannot be 0"),
    "from scratch": (
        "sft",
        dict(lora_r=4, from_config="gpt2 n_embd=32 n_layer=2 n_head=4"),
        "--lora-r: an adapter",
    ),
    "name of a config": (
        "sft",
        dict(from_config="gpt2 n_embd=32 n_layers=2 n_head=4"),
        "gpt2 has no n_layers",
    ),
    "value of a config": (
        "sft",
        dict(from_config="gpt2 n_embd=32 n_layer=two"),
        "n_layer=two needs a JSON value",
    ),
    "judge": ("rloo_tldr", dict(judge_url="http://here/v1"), "--judge-url needs --judge-model"),
    "weights": ("grpo_math", dict(reward_weights=[1.0, 0.5]), "2 numbers for 1 rewards"),
    "stop token": ("ppo_sentiment", dict(stop_token_id=[5, 1024]), "--stop-token-id 1024"),
    "no stop token": ("rloo_tldr", dict(stop_token_id=[]), "--stop-token-id needs an id"),
    "optimizer": ("sft", dict(optimizer="torch.optim.Adamm"), "torch.optim has no Adamm"),
    "optimizer without a module": ("sft", dict(optimizer="Adam"), "--optimizer Adam: name its module too"),
    "optimizer's package": ("sft", dict(optimizer="nobody.Adam"), "needs the package 'nobody'"),
    "targets": ("sft", dict(lora_r=4, lora_target_modules="c_attn,q_proj"), "q_proj matches no layer"),
    "head": ("ppo_sentiment", dict(lora_r=4, lora_target_modules="c_attn,lm_head"), "lm_head matches no"),
    "embeddings": ("dpo_tldr", dict(lora_r=4, lora_target_modules="wte,c_attn"), "wte matches no layer"),
    "mark": ("ppo_dialog", dict(utterance_end=" "), "--utterance-end ''"),
    "acts without names": ("reward_model", dict(dataset_name="data/dialogs"), "--label-names is missing"),
    "shard": ("reward_model", dict(train_shard="2/2"), "--train-shard 2/2"),
    "prefix": (
        "reward_model",
        dict(min_prefix_length=3, dataset_name="data/tldr-preference"),
        "--min-prefix",
    ),
    "center": ("reward_model", dict(center_dataset_name="data/tldr"), "only for preferences"),
    "one name": ("reward_model", dict(label_names="only"), "two labels or more"),
}


@pytest.mark.parametrize("name, changes, word", CASES.values(), ids=CASES)
def test_wrong_flags(scripts, small, name, changes, word, monkeypatch):
    """One error, which names the flag."""
    monkeypatch.chdir(ROOT)
    assert_only(findings(scripts[name], small(name, **changes)), word)


@pytest.mark.parametrize("name", ALL)
def test_every_size_must_be_positive(scripts, small, name):
    """In each script that has it."""
    args = small(name)
    for flag in ("per_device_train_batch_size", "gradient_accumulation_steps", "num_mini_batches"):
        if hasattr(args, flag):
            word = f"--{flag.replace('_', '-')} cannot be 0"
            assert word in texts(findings(scripts[name], small(name, **{flag: 0})))


EFFECTLESS = {
    "alpha": ("sft", dict(lora_alpha=8), "--lora-alpha has no effect without --lora-r"),
    "clip": (
        "grpo_math",
        dict(num_mini_batches=1, num_ppo_epochs=1, cliprange=0.1),
        "--cliprange has no effect",
    ),
    "target": (
        "ppo_sentiment",
        dict(kl_coef=0.0, kl_target=2.0, kl_horizon=100.0),
        "--kl-target has no effect",
    ),
    "eps": ("sft", dict(optimizer="torch.optim.SGD", adam_eps=1e-5), "--adam-eps has no effect"),
    "stop": ("rloo_tldr", dict(stop_token_id=[7], stop_token=None), "--stop-token has no effect"),
    "template": ("grpo_math", dict(prompt_template="{answer}?"), "beside the data's column prompt"),
    "estimator": ("rloo_tldr", dict(kl_coef=0.0, kl_estimator="k3"), "no effect with --kl-coef 0"),
    "completion": (
        "sft",
        dict(completion_only_loss=False),
        "--completion-only-loss has no effect without a column completion",
    ),
}


@pytest.mark.parametrize("name, changes, word", EFFECTLESS.values(), ids=EFFECTLESS)
def test_flags_without_effect(scripts, small, name, changes, word):
    """A remark, because nothing is wrong but the expectation. stop_token None is not given by anybody."""
    found = findings(scripts[name], small(name, **changes))
    if "stop" in word:
        assert not any(word in text for text in texts(found, "remark"))
    else:
        assert_remark(found, word)


POINTLESS = {
    "a critic that is not trained": ("ppo_sentiment", dict(vf_coef=0.0), "--vf-coef 0"),
    "one turn": ("grpo_tools", dict(max_turns=1), "--max-turns 1: a call of a tool ends"),
    "no penalty": ("rloo_tldr", dict(missing_eos_penalty=0.0), "no effect if it is 0"),
    "an empty message": ("grpo_math", dict(system_prompt=""), "which is a system message too"),
}


@pytest.mark.parametrize("name, changes, word", POINTLESS.values(), ids=POINTLESS)
def test_values_that_disable_what_a_flag_is_for(scripts, small, name, changes, word):
    assert_remark(findings(scripts[name], small(name, **changes)), word)


@pytest.mark.parametrize("has_judge", [False, True])
def test_a_label_without_a_classifier(scripts, small, tmp_path, has_judge):
    """The judge of the final table reads the label, too."""
    path = tmp_path / "short.py"
    path.write_text(
        "def short(prompts, completions, **columns):\n    return [-len(x) for x in completions]\n"
    )
    changes = dict(reward_fn=[f"{path}:short"], reward_label="negative")
    judge = "checkpoints/reviews-judge" if has_judge else None
    args = small("ppo_sentiment", **changes, judge_model_path=judge)
    remarks = texts(findings(scripts["ppo_sentiment"], args), "remark")
    assert any("--reward-label has no effect" in text for text in remarks) != has_judge


@pytest.mark.parametrize("value, is_wrong", [("1", True), ("0", False), ("", False)])
def test_python_without_asserts(scripts, small, monkeypatch, value, is_wrong):
    """The script's own checks would be gone."""
    monkeypatch.setenv("PYTHONOPTIMIZE", value)
    found = findings(scripts["sft"], small("sft"))
    assert any("python -O and PYTHONOPTIMIZE" in text for text in texts(found)) == is_wrong


def test_fewer_held_out_rows_than_processes(scripts, small, monkeypatch):
    """Some processes would have nothing to evaluate."""
    monkeypatch.setenv("WORLD_SIZE", "25")  # the small data have 24 rows
    found = findings(scripts["ppo_sentiment"], small("ppo_sentiment", per_device_train_batch_size=1))
    assert_only(found, "25 processes need as many held-out prompts; there are 24")


MISSING = {
    "model": (dict(model_name_or_path="runs/nowhere"), "--model-name-or-path runs/nowhere: no such file"),
    "data": (dict(dataset_name="/no/such/folder"), "--dataset-name /no/such/folder: no such file"),
    "critic": (dict(value_model_path="./critic"), "--value-model-path ./critic: no such file"),
    "function's file": (dict(reward_fn=["data/nowhere.py:f"]), "--reward-fn data/nowhere.py: no such file"),
    "function": (dict(reward_fn=["data/math_rewards.py:corect"]), "data/math_rewards.py has no corect, but"),
    "no function": (dict(reward_fn=["data"]), "name a function as FILE.py:function"),
}


@pytest.mark.parametrize("changes, word", MISSING.values(), ids=MISSING)
def test_what_is_not_there(scripts, small, changes, word):
    """The name is in the line, with its flag; the same fault is not told again in other words."""
    found = findings(scripts["ppo_sentiment"], small("ppo_sentiment", **changes))
    assert_only(found, word)


@pytest.mark.parametrize("flags, package", [(dict(log_with="wandb"), "wandb"), (dict(lora_r=4), "peft")])
def test_packages_that_are_not_installed(scripts, small, monkeypatch, flags, package):
    """The run would end with a traceback after its models are loaded."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else find_spec(name)
    )
    assert_only(findings(scripts["sft"], small("sft", **flags)), f"needs the package '{package}'")


@pytest.mark.parametrize(
    "script, flags", [("chat", ["--temperature", "0"]), ("judge", ["--temperature", "0"])]
)
def test_scripts_that_train_nothing(scripts, tiny_lm, capsys, script, flags):
    """A temperature of 0 would print nonsense."""
    model = (
        [tiny_lm()] if script == "chat" else ["--model-name-or-path", tiny_lm(), "--judge-model", tiny_lm()]
    )
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(script).main([*model, *flags])
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"{script}.py: --temperature cannot be 0.0\n"
