"""Two processes give the numbers of one process with the same global batch, with DDP and with ZeRO-2.

Each kind starts its two processes once, and they do all runs of the table one after the other.
"""

import json
import sys

import accelerate
import pytest
import torch
from run_tools import (
    ALL,
    ROOT,
    distance,
    eos_prone,
    evaluation_of,
    flags_of,
    free_port,
    guesses,
    maker,
    one_line,
    reward_file,
    rows_of,
    same,
    start_process,
    timeless,
    weights,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest_plugins = ["run_fixtures"]
pytestmark = pytest.mark.xdist_group("processes")  # one worker runs them all, so they start only once

SGD = dict(optimizer="torch.optim.SGD", learning_rate=0.1)  # Adam would amplify rounding
BATCHES = dict(num_train_epochs=0.4, num_eval_prompts=9)
PAIRS = dict(num_train_epochs=0.4, num_eval_pairs=9, num_eval_prompts=5)
JOBS = {  # name -> script, flags; at least two updates each. Names in capital letters: see make_job
    "ppo_sentiment": (
        "ppo_sentiment",
        dict(
            total_episodes=24,
            response_min_length=12,
            response_length=24,
            temperature=0.4,  # so that pairs of words repeat
            whiten_rewards=True,
            missing_eos_penalty=1.0,
            kl_coef=0.3,
            kl_target=0.9,  # near the KL of update 2, so that the error is not clipped
            kl_horizon=50,
            vf_coef=1.0,
            seed=2,  # so that words repeat in each update
        ),
    ),
    "ppo_dialog": (
        "ppo_dialog",
        dict(
            model_name_or_path="TALKER",
            dataset_name="TALKER DATA",
            total_episodes=16,
            utterance_end=" <EOU>",
            response_length=20,
            temperature=1.2,
            missing_eos_penalty=1.0,
            kl_target=0.5,
            kl_horizon=50,
            num_eval_prompts=5,
        ),
    ),
    "rloo_tldr": (
        "rloo_tldr",
        dict(
            total_episodes=24,
            whiten_rewards=True,
            kl_coef=0.2,
            num_eval_prompts=5,
            learning_rate=0.02,
            judge_fn="VERIFIER",
        ),
    ),
    "grpo_math": (
        "grpo_math",
        dict(
            model_name_or_path="ENDING",
            total_episodes=24,
            kl_coef=0.2,
            num_eval_prompts=5,
            num_eval_samples=3,
            hard_dataset_name="TASKS",
            reward_fn="FUNCTIONS",
            reward_weights=[0.5, 2.0],
            num_ppo_epochs=3,
        ),
    ),
    "grpo_tools": (
        "grpo_tools",
        dict(total_episodes=24, kl_coef=0.2, num_eval_prompts=5, num_eval_samples=3),
    ),
    "sft": ("sft", dict(num_train_rows=8, num_eval_prompts=7)),
    "reward_model": ("reward_model", BATCHES | dict(min_prefix_length=4)),
    "preferences": (
        "reward_model",
        BATCHES | dict(model_name_or_path="LM", dataset_name="PAIRS", max_length=200),
    ),
    "dpo_tldr": ("dpo_tldr", PAIRS | dict(learning_rate=0.02)),
    "dpo adapter": ("dpo_tldr", PAIRS | dict(lora_r=4, per_device_train_batch_size=4)),
    "shared layers": (
        "ppo_sentiment",
        dict(
            num_shared_layers=1, gradient_accumulation_steps=2, gradient_checkpointing=True, total_episodes=32
        ),
    ),
    "critic": ("ppo_sentiment", dict(value_model_path="LLAMA", total_episodes=16, vf_coef=1.0)),
    "lora": ("ppo_sentiment", dict(lora_r=4, total_episodes=16)),
    "lora 8bit": ("ppo_sentiment", dict(lora_r=4, load_in_8bit=True, total_episodes=16)),
    "bf16": (
        "sft",
        dict(
            model_name_or_path="LLAMA",
            dtype="bfloat16",
            learning_rate=0.02,
            num_train_rows=16,
            num_eval_prompts=7,
            gradient_accumulation_steps=2,
        ),
    ),
    "bf16 adapter": (  # frozen weights are stored in bf16
        "sft",
        dict(
            model_name_or_path="BF16",
            dtype="bfloat16",
            lora_r=4,
            lora_target_modules="all-linear",
            num_train_rows=16,
            num_eval_prompts=7,
            gradient_accumulation_steps=2,
        ),
    ),
}

SCORE = "return [float(len(r) % 7) - 3 for r in completions]"
SCORE_AND_STOP = f"""import signal
if os.environ["RANK"] == "1" and os.path.exists("stopped/metrics.jsonl") and not os.path.exists("sent"):
    open("sent", "w").close()
    signal.raise_signal(signal.SIGTERM)
{SCORE}"""

FUNCTIONS = """
def close_to_answer(completions, answer, **kwargs):
    return [float(len(set(text)) % 3 - len(x)) for text, x in zip(completions, answer)]


def of_sums(prompts, completions, **kwargs):
    return [len(text) % 2 if "+" in prompt else None for prompt, text in zip(prompts, completions)]
"""

# What the processes run: jobs.json is a list of [name, script, flags]. How a job ended is in NAME.RANK.
DRIVER = f"""import accelerate, importlib, json, os, sys, time, torch, traceback

sys.path.insert(0, {str(ROOT)!r})
rank = os.environ["RANK"]
torch.distributed.destroy_process_group = lambda *_: None  # a run ends it, but the next one needs it
broadcast = accelerate.utils.broadcast_object_list


def late_broadcast(*args, **kwargs):
    result = broadcast(*args, **kwargs)
    time.sleep(0.2)
    return result


if rank == "1":  # one process is late after the run folder was chosen
    accelerate.utils.broadcast_object_list = late_broadcast
is_sharded = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
Accelerator = accelerate.Accelerator
if is_sharded:  # accelerate shards only on GPUs, so it has to take these processes for some
    accelerate.Accelerator = lambda cpu, **options: Accelerator(**options)
for name, script, words in json.load(open("jobs.json")):
    module = importlib.import_module(script)
    accelerate.state.AcceleratorState._reset_state()  # each run configures accelerate anew
    if is_sharded:
        accelerate.PartialState(cpu=True).distributed_type = accelerate.DistributedType.MULTI_GPU
    code = 0
    try:
        module.train(module.parse_args(words))
    except SystemExit as end:
        code = end.code
    except Exception:
        code = traceback.format_exc()
    with open(name + "." + rank, "w") as file:
        json.dump(code, file)
os._exit(0)  # threads that are still alive may abort a process that ends by itself
"""
LEFT_OUT = [("zero2", "dpo adapter"), ("ddp", "critic")]  # to DDP a critic is like any other weights
CASES = [(kind, name) for kind in ("ddp", "zero2") for name in JOBS if (kind, name) not in LEFT_OUT]
CASES_OF_ZERO3 = [("zero3", name) for name in ("ppo_sentiment", "grpo_math", "sft")]


@pytest.fixture(scope="module")
def make_job(scripts, world, tiny_lm, talker, tmp_path_factory):
    """make_job(root, name, processes) -> Args of a run of JOBS, whose folder is in root."""
    functions = tmp_path_factory.mktemp("functions") / "functions.py"
    functions.write_text(FUNCTIONS)
    places = {
        "TALKER": talker.model,
        "TALKER DATA": talker.data,
        "LLAMA": tiny_lm("llama"),
        "BF16": bf16_copy(tiny_lm("llama"), functions.with_name("bf16")),
        "LM": tiny_lm(),
        "ENDING": eos_prone(tiny_lm, functions.with_name("ending")),  # responses of different lengths
        "PAIRS": world.pairs,
        "TASKS": world.tasks,
        "VERIFIER": world.verifier,
        "FUNCTIONS": [f"{functions}:{name}" for name in ("close_to_answer", "of_sums")],
    }

    def make(root, name, processes):
        script, flags = JOBS[name]
        flags = SGD | dict(per_device_train_batch_size=2, gradient_accumulation_steps=1) | flags
        flags["gradient_accumulation_steps"] *= 2 // processes  # the same global batch
        flags = {key: places.get(str(value), value) for key, value in flags.items()}
        if script == "grpo_tools":
            flags = guesses(functions.parent) | flags
        return maker(scripts, world, root)(script, name, **flags)

    return make


def bf16_copy(source, folder):
    """The checkpoint of a model in bf16. -> its folder, a str"""
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def one(scripts, make_job, tmp_path_factory):
    """one(name) -> the folder of the same run on one process. It runs only once."""
    root = tmp_path_factory.mktemp("one")

    def run_once(name):
        if not (root / name).exists():
            scripts[JOBS[name][0]].train(make_job(root, name, 1))
        return root / name

    return run_once


@pytest.fixture(scope="module")
def two(scripts, world, make_job, tmp_path_factory):
    """two(kind) -> the folder of all runs on two processes of this kind. They are started only once."""
    folders = {}

    def start_once(kind):
        if kind != "ddp":
            pytest.importorskip("deepspeed", reason="optional; pip install deepspeed runs this test")
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp(kind)
            jobs = job_list(kind, folders[kind])
            start_and_wait(kind, folders[kind], jobs)
        return folders[kind]

    def job_list(kind, root):
        make = maker(scripts, world, root)
        jobs = []
        for name, (script, *_) in JOBS.items():
            if (kind, name) in CASES + CASES_OF_ZERO3:
                jobs.append((name, script, flags_of(make_job(root, name, 2))))
        if kind == "zero3":
            return jobs

        # A run that gets SIGTERM in one process, and continues; and the same run without it.
        for name, body in {"straight": SCORE, "stopped": SCORE_AND_STOP}.items():
            flags = dict(total_episodes=24, reward_fn=reward_file(root, body, name))
            args = make("ppo_sentiment", name, per_device_train_batch_size=2, **flags)
            jobs.append((name, "ppo_sentiment", flags_of(args)))
        jobs.append(("resumed", "ppo_sentiment", ["--resume", str(root / "stopped")]))

        # A run that one process began.
        if kind == "ddp":
            args = make("ppo_sentiment", "grown", total_episodes=16, **SGD)
            scripts["ppo_sentiment"].train(args)
            flags = ["--total-episodes", "32", "--per-device-train-batch-size", "2"]
            jobs.append(("grown", "ppo_sentiment", ["--resume", args.output_dir, *flags]))
        return jobs

    return start_once


def start_and_wait(kind, root, jobs):
    """Run these jobs on two processes. What they print is in out.txt."""
    (root / "jobs.json").write_text(json.dumps(jobs))
    (root / "driver.py").write_text(DRIVER)
    if kind == "ddp":
        words = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
        words += ["--master_port", free_port()]
    else:
        words = ["accelerate", "launch", "--config_file", ROOT / f"accelerate_configs/{kind}.yaml"]
        words += ["--main_process_port", free_port()]
    process = start_process([*words, root / "driver.py"], root, HF_HOME=str(root))
    out, errors = process.communicate(timeout=600)
    (root / "out.txt").write_text(out)
    assert process.returncode == 0, f"{out[-4000:]}\n{errors[-4000:]}"


def exit_codes(root, name):
    """How a run ended on each of two processes: its exit code, or a traceback."""
    return [json.loads((root / f"{name}.{rank}").read_text()) for rank in range(2)]


def assert_near(value, other, tolerance=1e-4):
    """Floats are equal to 1e-4, everything else exactly, also in dicts and lists."""
    if isinstance(value, dict):
        assert value.keys() == other.keys()
        for key in value:
            assert_near(value[key], other[key], tolerance)
    elif isinstance(value, list):
        assert len(value) == len(other)
        for x, y in zip(value, other):
            assert_near(x, y, tolerance)
    elif isinstance(value, float):
        assert value == pytest.approx(other, abs=tolerance, rel=tolerance)
    else:
        assert value == other


def assert_same_numbers(one, two, rounding=1):
    """Metrics, weights and evaluation are equal up to rounding. The sampled texts are equal.

    rounding: how many times as far apart as in fp32. On some processors, 8-bit activations are rounded to
    other integers.
    """
    for folder, processes in ((one, 1), (two, 2)):
        assert json.loads((folder / "args.json").read_text())["world_size"] == processes
    rows, other_rows = timeless(rows_of(one)), timeless(rows_of(two))
    assert len(rows) == len(other_rows) >= 2
    for row in (rows[0], other_rows[0]):
        row.pop("rewards/accuracies", None)  # nothing has been learned, so all margins are 0 up to rounding
    for row, other_row in zip(rows, other_rows):
        assert row == pytest.approx(other_row, abs=rounding * 1e-5, rel=rounding * 2e-4)
    for path in (one / "model").rglob("*.safetensors"):
        before, after = load_file(path), load_file(two / path.relative_to(one))
        assert distance(before, after) < rounding * 1e-5, path
    assert_near(*[evaluation_of(folder) for folder in (one, two)], rounding * 1e-4)
    for name in ("evaluation_samples.jsonl", "samples.jsonl", "tokens.jsonl"):
        assert (one / name).exists() == (two / name).exists()
        if (one / name).exists():
            assert_near(rows_of(one, name), rows_of(two, name), rounding * 1e-4)


@pytest.mark.parametrize("kind, name", CASES)
def test_two_processes_give_the_numbers_of_one(one, two, kind, name):
    """Losses, KL, coefficient, weights, and the responses to held-out prompts."""
    root = two(kind)
    assert exit_codes(root, name) == [0, 0]
    assert_same_numbers(one(name), root / name, rounding=50 if "8bit" in name else 1)
    if "lora" in name:
        heads = load_file(root / name / "model/value_head.safetensors")
        assert heads["weight"].abs().max() > 0
    if name == "bf16":  # only in products: weights are gathered, and gradients added up, in fp32
        saved = weights(root / name / "model")
        assert all((x != x.bfloat16()).any() for key, x in saved.items() if "proj" in key)


def test_the_comparison_is_worth_something(one):
    """Responses differ, and the KL moves its coefficient."""
    rows = rows_of(one("ppo_dialog"))
    assert any(0 < row["custom/questions"] < 1 and 0 < row["val/num_eos_tokens"] < 8 for row in rows)
    assert rows[0]["objective/kl_coef"] != rows[1]["objective/kl_coef"]
    assert all(row["completions/distinct_2"] < 1 for row in rows_of(one("ppo_sentiment")))
    rows = rows_of(one("grpo_math"))
    assert any(0 < row["frac_reward_zero_std"] < 1 for row in rows)
    assert any(row["completions/min_length"] < row["completions/max_length"] for row in rows)
    rows = rows_of(one("grpo_tools"))
    assert any(row["grad_norm"] > 0.01 for row in rows)
    assert all(1 < row["tools/turns"] and row["val/num_eos_tokens"] < 8 for row in rows)


@pytest.mark.parametrize("name", [name for _, name in CASES_OF_ZERO3])
def test_zero3_runs_as_zero2(two, name):
    """With the same bits. A line says so."""
    root, other = two("zero3"), two("zero2")
    assert exit_codes(root, name) == [0, 0]
    assert timeless(rows_of(root / name)) == timeless(rows_of(other / name))
    assert same(weights(root / name / "model"), weights(other / name / "model"))
    line = "ZeRO-3 runs as ZeRO-2: each process needs the whole policy, to sample\n"
    assert (root / "out.txt").read_text().count(line) == len(CASES_OF_ZERO3)
    assert line not in (other / "out.txt").read_text()


@pytest.mark.parametrize("name", ALL)
def test_fsdp2_is_refused(scripts, small, monkeypatch, capsys, name):
    """Each process needs the whole policy, to sample. The line names the files that work."""
    monkeypatch.setattr(accelerate.Accelerator, "distributed_type", accelerate.DistributedType.FSDP)
    line = one_line(scripts[name], flags_of(small(name)), capsys)
    for word in ("FSDP2", "ddp.yaml", "zero2.yaml"):
        assert word in line
        assert word == "FSDP2" or (ROOT / "accelerate_configs" / word).exists()


@pytest.mark.parametrize("kind", ["ddp", "zero2"])
def test_signal_and_resume(two, kind):
    """SIGTERM to one process stops both after the same update. --resume gives the bits of the whole run."""
    root = two(kind)
    assert (root / "sent").exists()
    assert exit_codes(root, "stopped") == [143, 143]
    assert exit_codes(root, "straight") == exit_codes(root, "resumed") == [0, 0]
    assert [row["update"] for row in rows_of(root / "stopped")] == [1, 2, 3]
    assert timeless(rows_of(root / "stopped")) == timeless(rows_of(root / "straight"))
    assert same(weights(root / "stopped/model"), weights(root / "straight/model"))


GRADIENTS = f"""import json, os, sys, torch
sys.path.insert(0, {str(ROOT)!r})
import ppo_sentiment as script

args = script.Args(gradient_accumulation_steps=2)
accelerator = script.start_accelerator(args)
learner, optimizer = script.make_learner(torch.nn.Linear(3, 1), args, accelerator)
are_views = []
for micro_batch in range(8):
    with accelerator.accumulate(learner):
        accelerator.backward(learner(torch.ones(2, 3)).sum())
    are_views.append(all(p.grad._is_view() for p in learner.parameters()))
    optimizer.step()
    optimizer.zero_grad(set_to_none=accelerator.num_processes == 1)
with open("are_views." + os.environ["RANK"], "w") as file:
    json.dump(are_views, file)
accelerator.end_training()  # as the scripts do: without it, torch may abort when Python ends
"""


def test_ddp_keeps_gradients_once(tmp_path):
    """From the second optimizer step on, when there are the states of Adam, they are views of buckets."""
    (tmp_path / "gradients.py").write_text(GRADIENTS)
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    words += ["--master_port", free_port(), "gradients.py"]
    process = start_process(words, tmp_path, ACCELERATE_USE_CPU="true")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors[-4000:]
    for rank in range(2):
        assert json.loads((tmp_path / f"are_views.{rank}").read_text()) == [False] + 7 * [True]


def test_one_process_continues_a_run_of_two(scripts, two):
    """Checkpoints of DDP fit any number of processes."""
    folder = two("ddp") / "straight"
    words = ["--resume", str(folder), "--total-episodes", "32", "--per-device-train-batch-size", "4"]
    module = scripts["ppo_sentiment"]
    module.train(module.parse_args(words))
    assert [row["update"] for row in rows_of(folder)] == [1, 2, 3, 4]


def test_two_processes_continue_a_run_of_one(scripts, small, two):
    """The weights are those of a run on one process, up to rounding."""
    root = two("ddp")
    assert exit_codes(root, "grown") == [0, 0]
    _, whole = scripts["ppo_sentiment"].train(small("ppo_sentiment", total_episodes=32, **SGD))
    assert json.loads((root / "grown/args.json").read_text())["world_size"] == 2
    assert distance(weights(whole / "model"), weights(root / "grown/model")) < 1e-5
