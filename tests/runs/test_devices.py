"""Device rules without a GPU: whole runs of all scripts, and mistakes that the check must notice.

device_check.py says how it works, and what it cannot see.
"""

import copy
import importlib.util
import io
import json
import shutil
import sys
import types

import accelerate
import device_check
import numpy
import peft  # noqa: F401 (the scripts import some modules late; here it happens before the check begins)
import pytest
import torch
import torch.nn.functional as F
import transformers.trainer_callback  # noqa: F401 (the same)
from conftest import ACTS, RL, ROOT
from device_check import CPU, GPU, DeviceCheck, DeviceMistake, patches, pretended_gpu, tag_of
from run_tools import ALL, assert_same_run, eos_prone, reward_file, stop_after, write_rows
from torch import nn

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


# ---- Rules -------------------------------------------------------------------------------------------------

# Functions of c, a tensor [3] on the CPU, and g, a tensor [3] on the GPU.

ALLOWED = {  # name -> function, device of its result
    "a number on the left": (lambda c, g: c[0] + g, "cuda"),
    "a number on the right": (lambda c, g: g / c.sum(), "cuda"),
    "a number in place": (lambda c, g: g.mul_(c[0]), "cuda"),
    "numbers in where": (lambda c, g: torch.where(g > 0, c[0], c[1]), "cuda"),
    "a number in a mask": (lambda c, g: g.masked_fill(g > 0, c[0]), "cuda"),
    "to": (lambda c, g: c.to("cuda") + g, "cuda"),
    "to another tensor's": (lambda c, g: c.to(g) + c.type_as(g), "cuda"),
    "cpu": (lambda c, g: g.cpu() + c, "cpu"),
    "copy_": (lambda c, g: c.copy_(g), "cpu"),
    "a part": (lambda c, g: g.__setitem__(slice(1), c[:1]) or g, "cuda"),
    "an index on the CPU": (lambda c, g: g[torch.tensor([2, 0])], "cuda"),
    "a mask on the CPU": (lambda c, g: g[c > 0], "cuda"),
    "a number at an index": (lambda c, g: g.__setitem__(torch.tensor([2, 0]), c[0]) or g, "cuda"),
    "one element as an index": (lambda c, g: c[torch.zeros((), dtype=torch.long, device=g.device)], "cpu"),
    "like": (lambda c, g: torch.zeros_like(g) + g.new_ones(3), "cuda"),
    "like, on the CPU": (lambda c, g: torch.zeros_like(g, device="cpu"), "cpu"),
    "its device": (lambda c, g: g + torch.arange(3, device=g.device), "cuda"),
    "as_tensor": (lambda c, g: g + torch.as_tensor(c, device="cuda"), "cuda"),
    "tolist": (lambda c, g: torch.tensor(g.tolist()) + c, "cpu"),
    "item": (lambda c, g: c + g.sum().item() + float(g[0]), "cpu"),
    "numpy after cpu": (lambda c, g: torch.from_numpy(g.cpu().numpy()) + c, "cpu"),
    "an array": (lambda c, g: torch.as_tensor(numpy.ones(3)) + c, "cpu"),
    "a generator of the GPU": (
        lambda c, g: g + torch.rand(3, generator=generator("cuda"), device="cuda"),
        "cuda",
    ),
    "another generator of the GPU": (lambda c, g: g.normal_(generator=generator("cuda")), "cuda"),
    "a generator of the CPU": (lambda c, g: torch.randperm(3, generator=generator("cpu")).to("cuda"), "cuda"),
    "padding": (lambda c, g: nn.utils.rnn.pad_sequence([g, g[:1]]), "cuda"),
    "deepcopy": (lambda c, g: copy.deepcopy(g) + g, "cuda"),
    "saved": (lambda c, g: saved(g) + g, "cuda"),
    "saved, for the CPU": (lambda c, g: saved(g, map_location="cpu") + c, "cpu"),
    "saved, for the GPU": (lambda c, g: saved(c, map_location="cuda") + g, "cuda"),
    "a module": (lambda c, g: nn.Linear(3, 3).to("cuda")(g), "cuda"),
    "a buffer": (lambda c, g: nn.BatchNorm1d(3).cuda().eval()(g[None]), "cuda"),
    "a gradient": (lambda c, g: gradient(c, lambda x: (x.to("cuda") * g).sum()), "cpu"),
    "autocast": (lambda c, g: autocast_matmul(g[None], g[:, None]), "cuda"),
    "products in fp32": (lambda c, g: fp32_product(g[None].bfloat16(), g[:, None].bfloat16()), "cuda"),
    "pinned": (lambda c, g: c.pin_memory().to("cuda", non_blocking=True), "cuda"),
    "vmap": (lambda c, g: torch.vmap(lambda x: x + torch.ones(3, device=x.device))(g[None]), "cuda"),
}
WRONG = {
    "two devices": lambda c, g: c + g,
    "a view": lambda c, g: g[:2] * c.view(3, 1)[:2, 0].detach(),
    "one element": lambda c, g: g + c[:1],
    "a number on the GPU": lambda c, g: c + g[0],
    "a limit": lambda c, g: g.clamp(min=c[0]),
    "two numbers": lambda c, g: torch.addcmul(g, c[0], c[1]),
    "a number that changes": lambda c, g: c[0].add_(g[0]),
    "a number as output": lambda c, g: torch.add(g[0], g[1], out=c[0]),
    "an output": lambda c, g: torch.add(g, g, out=c),
    "a mask": lambda c, g: torch.where(c > 0, g, 0.0),
    "masked_fill": lambda c, g: g.masked_fill(c > 0, 0.0),
    "arange without device": lambda c, g: torch.arange(3) < g,
    "a tensor of a list": lambda c, g: torch.tensor([1.0, 2.0, 3.0]) * g,
    "cat": lambda c, g: torch.cat([g, c]),
    "stack": lambda c, g: torch.stack([g[0], c[0]]),
    "matmul": lambda c, g: c[None] @ g,
    "gather": lambda c, g: g.gather(0, torch.tensor([1])),
    "index_select": lambda c, g: g.index_select(0, torch.tensor([1])),
    "embedding": lambda c, g: F.embedding(torch.tensor([1]), g[:, None]),
    "an index on the GPU": lambda c, g: c[torch.tensor([2, 0], device="cuda")],
    "a mask on the GPU": lambda c, g: c[g > 0],
    "new values": lambda c, g: g.__setitem__(torch.tensor([2, 0]), c[:2]),
    "masked_scatter": lambda c, g: g.masked_scatter(g > 0, c),
    "searchsorted": lambda c, g: torch.searchsorted(g, c),
    "equal": lambda c, g: torch.equal(c, g),
    "numpy": lambda c, g: g.numpy(),
    "asarray": lambda c, g: numpy.asarray(g),
    "a generator of the CPU": lambda c, g: torch.rand(3, generator=generator("cpu"), device="cuda"),
    "a generator of the GPU": lambda c, g: torch.rand(3, generator=generator("cuda")),
    "another generator of the CPU": lambda c, g: g.normal_(generator=generator("cpu")),
    "multinomial": lambda c, g: torch.multinomial(g, 1, generator=generator("cpu")),
    "padding": lambda c, g: g + nn.utils.rnn.pad_sequence([c, c])[:, 0],
    "a module that is not moved": lambda c, g: nn.Linear(3, 3)(g),
    "a tensor that is no buffer": lambda c, g: NoBuffer().cuda()(g),
    "a saved tensor": lambda c, g: saved(g) + c,
    "the backward pass": lambda c, g: gradient(g, lambda x: WrongBackward.apply(x).exp().sum()),
    "pinned": lambda c, g: g.pin_memory(),
    "an optimizer's state": lambda c, g: step_with(g, torch.zeros_like(g, device="cpu")),
    "the state of random numbers": lambda c, g: torch.set_rng_state(torch.get_rng_state().cuda()),
    "a second GPU": lambda c, g: c.to("cuda:99"),
}


def generator(device):
    """A random generator on a device."""
    return torch.Generator(device).manual_seed(1)


def saved(x, **options):
    """A tensor that was saved and loaded."""
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=True, **options)


def gradient(x, function):
    """The gradient of function(x) at x."""
    x = x.detach().requires_grad_()
    function(x * 1).backward()
    return x.grad


def autocast_matmul(a, b):
    """A product in bf16, as the scripts ask for it."""
    with torch.autocast(a.device.type, torch.bfloat16):
        assert torch.is_autocast_enabled(a.device.type)
        product = a @ b
    assert product.dtype == torch.bfloat16
    return product


def fp32_product(a, b):
    """A product of bf16 numbers that is never rounded to bf16: on GPUs only."""
    product = torch.mm(a, b, out_dtype=torch.float32)
    assert product.dtype == torch.float32
    return product


def step_with(x, moment):
    """A step of Adam whose first moment is this tensor."""
    p = nn.Parameter(x.clone())
    optimizer = torch.optim.Adam([p], fused=True)
    p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.state[p]["exp_avg"] = moment
    optimizer.step()


class NoBuffer(nn.Module):
    """A module with a tensor that does not move with it."""

    def __init__(self):
        super().__init__()
        self.scale = torch.ones(3)

    def forward(self, x):
        return x * self.scale


class WrongBackward(torch.autograd.Function):
    """The identity, with a gradient that is always on the CPU."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.ones(grad.shape)


def tensors():
    """[3] on the CPU, [3] on the GPU."""
    return torch.ones(3), torch.ones(3, device="cuda")


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed(name):
    """What PyTorch accepts, and the device of the result."""
    function, device = ALLOWED[name]
    with pretended_gpu() as check:
        result = function(*tensors())
        assert result.device.type == device
    assert check.mistakes == []


@pytest.mark.parametrize("name", WRONG)
def test_wrong(name):
    """What PyTorch refuses. The message names this file and a line."""
    with pytest.raises(DeviceMistake, match=r"at test_devices\.py:\d+: .+"), pretended_gpu() as check:
        WRONG[name](*tensors())
    assert len(check.mistakes) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_rules_are_those_of_a_gpu():
    """The same on a real GPU, if there is one."""
    for name, (function, device) in ALLOWED.items():
        assert function(*tensors()).device.type == device, name
    for name, function in WRONG.items():
        with pytest.raises((RuntimeError, TypeError, IndexError, AssertionError)):
            function(*tensors())
            pytest.fail(f"{name}: a GPU accepts it")


# ---- Whole runs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_stop_and_resume(scripts, small, monkeypatch, tiny_lm, tmp_path, name):
    """A run that is stopped and resumed."""
    module = scripts[name]
    if name in RL:  # some responses end early, and leave the batch
        flags = dict(total_episodes=16, model_name_or_path=eos_prone(tiny_lm, tmp_path / "eos"))
    else:
        flags = dict(num_train_rows=8) if name == "sft" else dict(num_train_epochs=0.67)
    whole = train(module, small(name, "whole", **flags))
    args = small(name, "parts", **flags)
    with monkeypatch.context() as patch, pytest.raises(SystemExit), pretended_gpu() as check:
        stop_after(patch, module, 1)
        module.train(args)
    assert_clean(check)
    parts = train(module, module.parse_args(["--resume", args.output_dir]))
    assert_same_run(whole, parts)


RUNS = {  # name -> script, flags from `world` and a folder
    "ppo_sentiment, LoRA, bf16, judge": (
        "ppo_sentiment",
        lambda w, folder: dict(
            lora_r=4,
            gradient_checkpointing=True,
            dtype="auto",
            judge_model_path=w.classifier("other"),
            whiten_rewards=True,
            missing_eos_penalty=1.0,
            score_clip=1.0,
            kl_target=1.0,
            kl_horizon=100,
        ),
    ),
    "ppo_sentiment, shared layers, functions": (
        "ppo_sentiment",
        lambda w, folder: dict(
            num_shared_layers=1,
            optimizer="torch.optim.SGD",
            reward_fn=reward_file(folder, ON_GPU),
            reward_weights=[0.1],
        ),
    ),
    "ppo_sentiment, critic": (
        "ppo_sentiment",
        lambda w, folder: dict(
            value_model_path=w.lm("llama"),
            optimizer="torch.optim.RMSprop",
            max_grad_norm=None,
            stop_token=None,
        ),
    ),
    "ppo_dialog, LoRA, bf16, function": (
        "ppo_dialog",
        lambda w, folder: dict(
            lora_r=4,
            gradient_checkpointing=True,
            dtype="auto",
            intent_reward="match",
            utterance_end=" <EOU>",
            reward_fn=reward_file(folder, ARRAY),
        ),
    ),
    "ppo_dialog, critic": (
        "ppo_dialog",
        lambda w, folder: dict(
            model_name_or_path=w.lm("gpt_neox"), value_model_path=w.lm("qwen2"), reward_model_path=None
        ),
    ),
    "rloo_tldr, LoRA, bf16, KL in the loss": (
        "rloo_tldr",
        lambda w, folder: dict(
            model_name_or_path=w.lm("gpt_neox"),
            total_episodes=8,
            lora_r=4,
            gradient_checkpointing=True,
            dtype="auto",
            kl_estimator="k3",
            whiten_rewards=True,
            judge_model=w.preference_model("gpt2"),
        ),
    ),
    "rloo_tldr, shared layers, functions": (
        "rloo_tldr",
        lambda w, folder: dict(
            model_name_or_path=w.lm("bloom"),
            total_episodes=8,
            num_shared_layers=1,
            score_clip=1.0,
            reward_fn=reward_file(folder, ON_GPU),
            judge_fn=reward_file(folder, ARRAY, "judge")[0],
        ),
    ),
    "grpo_math, LoRA, bf16, no reference": (
        "grpo_math",
        lambda w, folder: dict(
            model_name_or_path=w.lm("qwen2"),
            total_episodes=8,
            lora_r=4,
            gradient_checkpointing=True,
            dtype="auto",
            kl_coef=0.0,
            hard_dataset_name=w.tasks,
        ),
    ),
    "grpo_math, shared layers, one step": (
        "grpo_math",
        lambda w, folder: dict(
            model_name_or_path=w.lm("opt"),
            total_episodes=8,
            num_shared_layers=1,
            gradient_accumulation_steps=2,
            num_mini_batches=1,
            num_ppo_epochs=1,
        ),
    ),
    "sft, LoRA, bf16, prompts": (
        "sft",
        lambda w, folder: dict(
            dataset_name=w.posts,
            lora_r=4,
            gradient_checkpointing=True,
            dtype="auto",
            packing=False,
            max_length=250,
        ),
    ),
    "sft, a new model on dialogs": (
        "sft",
        lambda w, folder: dict(
            dataset_name=w.dialogs,
            from_config="gpt2 n_embd=32 n_layer=2 n_head=4 n_positions=128",
        ),
    ),
    "sft, several texts in a row": (
        "sft",
        lambda w, folder: dict(dataset_name=short_texts(folder), model_name_or_path=w.lm("llama")),
    ),
    "sft, gpt_neo": ("sft", lambda w, folder: dict(model_name_or_path=w.lm("gpt_neo"), num_train_rows=4)),
    "dpo_tldr, LoRA, bf16": ("dpo_tldr", lambda w, folder: dict(lora_r=4, dtype="auto")),
    "dpo_tldr, rankings": (
        "dpo_tldr",
        lambda w, folder: dict(
            dataset_name=rankings(folder),
            eval_dataset_name=None,
            model_name_or_path=w.lm("llama"),
            gradient_checkpointing=True,
        ),
    ),
    "reward_model, LoRA, bf16, acts": (
        "reward_model",
        lambda w, folder: dict(
            dataset_name=w.dialogs,
            label_names=",".join(ACTS),
            num_train_epochs=0.1,
            lora_r=4,
            dtype="auto",
        ),
    ),
    "reward_model, rankings": (
        "reward_model",
        lambda w, folder: dict(
            dataset_name=rankings(folder),
            model_name_or_path=w.lm("gpt_neox"),
            gradient_checkpointing=True,
        ),
    ),
}


def short_texts(folder):
    """Texts of which many fit in a row. -> path of the data set"""
    rows = [dict(text=f"It is day {i}, and the sun shines.") for i in range(40)]
    return write_rows(folder / "texts", train=rows, test=rows[:8])


def rankings(folder):
    """Rows with two to four responses each, the best one first. -> path of the data set"""
    rows = []
    for i in range(10):
        responses = ["It is sunny.", "It is not.", "Maybe.", "Who knows?"][: 2 + i % 3]
        rows.append(dict(prompt=f"How is the weather on day {i}? ", responses=responses))
    return write_rows(folder / "rankings", train=rows, test=rows[:4])


@pytest.mark.parametrize("run", RUNS)
def test_runs(scripts, small, world, tmp_path, run):
    """Other flags, models and rewards."""
    script, flags = RUNS[run]
    train(scripts[script], small(script, **flags(world, tmp_path)))


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


def test_an_adapter_as_policy(scripts, small):
    """peft reads an adapter onto the GPU if there is one, though its base model is still on the CPU."""
    lora = dict(lora_r=4, total_episodes=8)
    adapter = train(scripts["grpo_math"], small("grpo_math", "first", **lora)) / "adapter"
    train(scripts["rloo_tldr"], small("rloo_tldr", "second", sft_model_path=str(adapter), **lora))


def test_chats(scripts, small, tmp_path, world):
    """From a chat template to a model for chats, which two scripts then train on chats."""
    train_rows = [json.loads(line) for line in open(ROOT / "data/arithmetic-sft/train.jsonl")][:24]
    data = write_rows(tmp_path / "chats", train=train_rows, test=train_rows[:6])
    lm = tmp_path / "lm"
    shutil.copytree(world.lm("qwen2"), lm)
    shutil.copy(ROOT / "tests/data/templates/qwen2_5.jinja", lm / "chat_template.jinja")
    flags = dict(model_name_or_path=str(lm), num_train_rows=4)
    flags |= dict(dataset_name=data, max_length=250, num_samples=2, packing=False)
    model = train(scripts["sft"], small("sft", "sft", **flags)) / "model"
    flags = dict(model_name_or_path=str(model), total_episodes=8, max_prompt_length=230)
    rloo = dict(dataset_name=data, reward_model_path=str(model))
    train(scripts["rloo_tldr"], small("rloo_tldr", "rloo", **flags, **rloo))
    tasks = [dict(prompt=row["prompt"], answer="3") for row in train_rows]
    data = write_rows(tmp_path / "tasks", train=tasks, test=tasks[:6])
    grpo = dict(dataset_name=data, reward_fn=[str(ROOT / "data/math_rewards.py:correct")])
    train(scripts["grpo_math"], small("grpo_math", "grpo", **flags, **grpo))


def test_the_verbs(scripts, monkeypatch, capsys, world, tmp_path):
    """judge and chat use the GPU."""
    module = scripts["rloo_tldr"]
    flags = f"--model-name-or-path {world.lm()} --dataset-name {world.posts} --num-eval-prompts 3"
    flags += f" --max-prompt-length 200 --response-length 9 --judge-model {world.preference_model()}"
    with pretended_gpu() as check:
        result = module.judge_policy(module.parse_args(flags.split()))
    assert_clean(check)
    assert 0 <= result["win rate"] <= 1

    lines = iter(["Hello, who are you?", "reset", "And you?", "quit"])
    monkeypatch.setattr("builtins.input", lambda question: next(lines))
    with pretended_gpu() as check:
        scripts["ppo_dialog"].chat([world.lm(), "--response-length", "5"])
    assert check.mistakes == [] and check.operators[GPU] > 100
    assert "forgotten" in capsys.readouterr().out


# ---- Mistakes in the scripts -------------------------------------------------------------------------------

FAULTS = {  # what is wrong -> script, part of its source, what it becomes, what the check says
    "a mask without device=": (
        "ppo_sentiment",
        "return torch.arange(max_length, device=lengths.device) < lengths[:, None]",
        "return torch.arange(max_length) < lengths[:, None]",
        "aten.lt.Tensor: tensors on cpu (8,), cuda:0 (2, 1), at ppo_sentiment.py:",
    ),
    "a batch that is not moved": (
        "ppo_sentiment",
        "batch = accelerate.utils.send_to_device(batch, stop_ids.device)",
        "",
        "aten.index.Tensor: a tensor on cpu with indices on cuda:0, at ppo_sentiment.py:",
    ),
    "rewards that are not moved": (
        "ppo_sentiment",
        "rewards[name] = torch.tensor(numbers, device=device)",
        "rewards[name] = torch.tensor(numbers)",
        "aten.scatter_add.default: tensors on",
    ),
    "a generator of the CPU for the GPU": (
        "ppo_sentiment",
        'uniforms = torch.rand(B, T, generator=generator_for(args.seed, "tokens", purpose))',
        'uniforms = torch.rand(B, T, generator=generator_for(args.seed, "tokens", purpose), device="cuda")',
        "aten.rand.generator: a generator of cpu draws for cuda:0, at ppo_sentiment.py:",
    ),
    "a table on the CPU": (
        "ppo_sentiment",
        "logits = torch.zeros(len(texts), model.config.num_labels, device=model.device)",
        "logits = torch.zeros(len(texts), model.config.num_labels)",
        "aten.index_put_.default: a tensor on cpu with indices on cuda:0, at ppo_sentiment.py:",
    ),
    "a tensor of a list": (
        "ppo_dialog",
        "acts = torch.tensor([turn.act - 1 for turn in turns], dtype=torch.long, device=device)",
        "acts = torch.tensor([turn.act - 1 for turn in turns], dtype=torch.long)",
        "aten.gather.default: tensors on cuda:0 (4, 4), cpu (4, 1), at ppo_dialog.py:",
    ),
    "an accumulator on the CPU": (
        "sft",
        "loss_sum, correct_sum = torch.zeros(2, device=device)",
        "loss_sum, correct_sum = torch.zeros(2)",
        "aten.add_.Tensor: tensors on cpu (), cuda:0 (), at sft.py:",
    ),
}


def faulty_copy(name, line, fault, folder):
    """A copy of a script with a fault in it, as a module."""
    source = (ROOT / f"{name}.py").read_text()
    assert line in source, f"{name}.py has changed: find another line for this fault"
    path = folder / f"{name}.py"
    path.write_text(source.replace(line, fault))
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("fault", FAULTS)
def test_mistakes_in_scripts(small, tmp_path, fault):
    """Each is right on a CPU. The check names the operator, the devices and the line."""
    name, line, replacement, message = FAULTS[fault]
    module = faulty_copy(name, line, replacement, tmp_path)
    with pytest.raises((DeviceMistake, module.UserError)), pretended_gpu() as check:
        module.train(small(name))
    assert message in check.mistakes[0]


# ---- Afterwards --------------------------------------------------------------------------------------------


def test_nothing_is_left():
    """After the check all is as before, also in modules that were imported during one of these tests."""
    places = [(place, name) for place, name, _ in patches(DeviceCheck())]
    before = [vars(place).get(name) for place, name in places]
    with pretended_gpu():
        during = [vars(place)[name] for place, name in places]
        assert accelerate.Accelerator().device == torch.device("cuda")
        assert transformers.utils.is_torch_cuda_available()
    assert not transformers.utils.is_torch_cuda_available()
    assert [vars(place).get(name) for place, name in places] == before
    assert not any(x is y for x, y in zip(before, during))
    assert torch.ones(3).device.type == "cpu"

    left = []
    for module in list(sys.modules.values()):
        if module in (device_check, sys.modules[__name__]):
            continue
        for name, value in list(vars(module).items()):
            if type(value) is types.FunctionType and value.__code__.co_filename == device_check.HERE:
                left.append(f"{module.__name__}.{name}")
    assert left == []
