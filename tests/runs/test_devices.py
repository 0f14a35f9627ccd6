"""Device rules without a GPU: whole runs of all scripts, and mistakes that the check must notice.

device_check.py says how it works, and what it cannot see.
"""

import importlib

import peft  # noqa: F401 (the scripts import some modules late; here it happens before the check begins)
import pytest
import torch
import transformers.trainer_callback  # noqa: F401 (the same)
from conftest import ACTS, RL
from device_check import CPU, GPU, DeviceMistake, pretended_gpu, tag_of
from run_tools import assert_same_run, eos_prone, reward_file, stop_after

import chat
import judge

pytest_plugins = ["run_fixtures"]
ON_GPU = "import torch\nreturn torch.tensor([float(len(text)) for text in completions], device='cuda')"
ARRAY = "import numpy\nreturn numpy.array([len(text) % 5 for text in completions])"


def assert_clean(check):
    """No mistake, not even one that somebody caught; and most operators ran on the GPU."""
    assert check.mistakes == []
    assert check.operators[GPU] > check.operators[CPU]


def train(module, args):
    """A whole run on the pretended GPU, without a mistake. -> its folder"""
    with pretended_gpu() as check:
        model, folder = module.train(args)
    assert_clean(check)
    assert {tag_of(x) for x in [*model.parameters(), *model.buffers()]} == {GPU}
    return folder


# ---- Whole runs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ppo_sentiment", "sft"])
def test_stop_and_resume(scripts, small, monkeypatch, tiny_lm, tmp_path, name):
    """A run that is stopped and resumed."""
    module = scripts[name]
    if name in RL:  # some responses end early, and leave the batch
        flags = dict(total_episodes=16, model_name_or_path=eos_prone(tiny_lm, tmp_path / "eos"))
    else:
        flags = dict(num_train_rows=8)
    whole = train(module, small(name, "whole", **flags))
    args = small(name, "parts", **flags)
    with monkeypatch.context() as patch, pytest.raises(SystemExit), pretended_gpu() as check:
        stop_after(patch, module, 1)
        module.train(args)
    assert_clean(check)
    parts = train(module, module.parse_args(["--resume", args.output_dir]))
    assert_same_run(whole, parts)


LORA = dict(lora_r=4, gradient_checkpointing=True, dtype="auto")
RUNS = {  # script: about the run -> flags from `world` and a folder
    "ppo_sentiment: LoRA, bf16, judge": lambda w, folder: (
        LORA
        | dict(judge_model_path=w.classifier("other"), whiten_rewards=True, missing_eos_penalty=1.0)
        | dict(score_clip=1.0, kl_target=1.0, kl_horizon=100)
    ),
    "ppo_sentiment: critic": lambda w, folder: dict(
        value_model_path=w.lm("llama"), optimizer="torch.optim.RMSprop", stop_token=None
    ),
    "ppo_dialog: LoRA, bf16, function": lambda w, folder: (
        LORA | dict(intent_reward="match", utterance_end=" <EOU>", reward_fn=reward_file(folder, ARRAY))
    ),
    "rloo_tldr: LoRA, bf16, KL in the loss": lambda w, folder: (
        LORA
        | dict(model_name_or_path=w.lm("gpt_neox"), judge_model=w.preference_model("gpt2"))
        | dict(kl_estimator="k3", whiten_rewards=True)
    ),
    "rloo_tldr: shared layers, functions": lambda w, folder: dict(
        model_name_or_path=w.lm("bloom"),
        num_shared_layers=1,
        reward_fn=reward_file(folder, ON_GPU),
        judge_fn=reward_file(folder, ARRAY, "taste")[0],
    ),
    "grpo_math: LoRA, bf16, no reference": lambda w, folder: (
        LORA | dict(model_name_or_path=w.lm("qwen2"), kl_coef=0.0, hard_dataset_name=w.tasks)
    ),
    "grpo_math: shared layers": lambda w, folder: dict(model_name_or_path=w.lm("opt"), num_shared_layers=1),
    "sft: LoRA, bf16, prompts": lambda w, folder: (
        LORA | dict(dataset_name=w.posts, packing=False, max_length=250)
    ),
    "sft: a new model on dialogs": lambda w, folder: dict(
        dataset_name=w.dialogs, from_config="gpt2 n_embd=32 n_layer=2 n_head=4"
    ),
    "dpo_tldr: LoRA, bf16": lambda w, folder: LORA,
    "reward_model: LoRA, bf16, acts": lambda w, folder: dict(
        dataset_name=w.dialogs, label_names=",".join(ACTS), num_train_epochs=0.1, lora_r=4, dtype="auto"
    ),
    "reward_model: pairs": lambda w, folder: dict(
        dataset_name=w.pairs, model_name_or_path=w.lm("gpt_neox"), max_length=200, num_train_epochs=0.2
    ),
}


@pytest.mark.parametrize("run", RUNS)
def test_runs(scripts, small, world, tmp_path, run):
    """Other flags, models and rewards."""
    script = run.split(":")[0]
    train(scripts[script], small(script, **RUNS[run](world, tmp_path)))


@pytest.mark.parametrize("flags", [dict(), dict(lora_r=4)], ids=["reference", "LoRA"])
def test_8_bit(scripts, small, flags):
    """bitsandbytes loads the model onto the GPU itself. Its operators come from another library."""
    pytest.importorskip("bitsandbytes")  # also imports it before the check begins
    importlib.import_module("transformers.integrations.bitsandbytes")
    module = scripts["ppo_sentiment"]
    with pretended_gpu() as check:
        model, _ = module.train(small("ppo_sentiment", load_in_8bit=True, **flags))
    assert_clean(check)
    assert {tag_of(p) for p in model.parameters()} == {GPU}


def test_judge_and_chat(scripts, monkeypatch, capsys, world):
    """judge.py and chat.py use the GPU."""
    flags = f"--model-name-or-path {world.lm()} --dataset-name {world.posts} --num-eval-prompts 3"
    flags += f" --max-prompt-length 200 --response-length 9 --judge-model {world.preference_model()}"
    with pretended_gpu() as check:
        result = judge.judge_policy(scripts["rloo_tldr"].parse_args(flags.split()))
    assert_clean(check)
    assert 0 <= result["win rate"] <= 1

    lines = iter(["Hello, who are you?", "reset", "And you?", "quit"])
    monkeypatch.setattr("builtins.input", lambda question: next(lines))
    with pretended_gpu() as check:
        chat.main([world.lm(), "--response-length", "5"])
    assert check.mistakes == [] and check.operators[GPU] > 100
    assert "forgotten" in capsys.readouterr().out


# ---- Mistakes ----------------------------------------------------------------------------------------------

MISTAKES = {  # each is right on a CPU
    "a mask without device=": lambda gpu: torch.arange(8) < torch.ones(2, 1, device=gpu),
    "a generator of the CPU": lambda gpu: torch.rand(2, generator=torch.Generator(), device=gpu),
    "an accumulator on the CPU": lambda gpu: torch.zeros(()).add_(torch.ones((), device=gpu)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_check_notices_mistakes(mistake):
    with pytest.raises(DeviceMistake), pretended_gpu():
        MISTAKES[mistake]("cuda")
    MISTAKES[mistake]("cpu")
