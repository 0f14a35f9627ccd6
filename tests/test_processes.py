"""Two processes give the run of one: the same draws, the same losses; and nobody runs on fewer processes than were asked for."""

import json

import pytest
from run_tools import (
    ROOT,
    distance,
    flags_of,
    free_port,
    maker,
    reward_file,
    rows_of,
    same,
    script_words,
    start_process,
    timeless,
    torchrun_words,
    weights,
)
from safetensors.torch import load_file

pytest_plugins = ["run_fixtures"]
pytestmark = pytest.mark.xdist_group("processes")  # the runs on several processes are started once
SGD = dict(optimizer="torch.optim.SGD", learning_rate=0.1)
SIZES = {  # flags of both, then the same global batch for one process and for two
    "ppo_sentiment": (
        SGD | dict(total_episodes=16, whiten_rewards=True, missing_eos_penalty=1.0, kl_target=0.5, kl_horizon=50, vf_coef=1.0),
        dict(per_device_train_batch_size=4, num_mini_batches=2),
        dict(per_device_train_batch_size=2, num_mini_batches=2),
    ),
    "ppo_dialog": (
        SGD | dict(total_episodes=16, model_name_or_path="TALKER", dataset_name="DIALOGS", utterance_end=" <EOU>", response_length=20,
                   temperature=1.2, missing_eos_penalty=1.0, kl_target=0.5, kl_horizon=50, num_eval_prompts=5),
        dict(per_device_train_batch_size=4, num_mini_batches=2),
        dict(per_device_train_batch_size=2, num_mini_batches=2),
    ),
    "rloo_tldr": (
        SGD | dict(total_episodes=24, whiten_rewards=True, kl_coef=0.2, num_examples=5),
        dict(per_device_train_batch_size=4, num_mini_batches=2),
        dict(per_device_train_batch_size=2, num_mini_batches=2),
    ),
    "sft": (SGD | dict(num_train_rows=8, num_eval_rows=7), dict(per_device_train_batch_size=4), dict(per_device_train_batch_size=2)),
    "reward_model": (
        SGD | dict(num_train_epochs=0.4, min_prefix_length=4, num_eval_rows=9),
        dict(per_device_train_batch_size=4, gradient_accumulation_steps=2),
        dict(per_device_train_batch_size=4),
    ),
}
READ_ONCE = {  # where the responses to a prompt share it: the script, flags of both, of one process, of two
    "rloo_groups": ("rloo_tldr", SIZES["rloo_tldr"][0] | dict(share_prompts=True, learning_rate=0.03), *SIZES["rloo_tldr"][1:]),
    "pairs": ("reward_model", SGD | dict(model_name_or_path="LLAMA", dataset_name="PAIRS", num_train_epochs=0.4, max_length=200),
              *SIZES["reward_model"][1:]),
}  # fmt: skip
OTHERS = ("ppo_dialog", "sft", "reward_model", "rloo_tldr")
PARTS = {
    "lora": SGD | dict(lora_r=4, total_episodes=8),
    "lora-8bit": SGD | dict(lora_r=4, load_in_8bit=True, total_episodes=8),
    "shared": SGD | dict(num_shared_layers=1, gradient_accumulation_steps=2, gradient_checkpointing=True, total_episodes=16),
    "critic": SGD | dict(value_model_path="CRITIC", total_episodes=8, vf_coef=1.0),
}
STOPPED = """import signal
if os.environ["RANK"] == "1" and os.path.exists("stopped/metrics.jsonl") and not os.path.exists("sent"):
    open("sent", "w").close()
    signal.raise_signal(signal.SIGTERM)
return [float(len(r) % 7) - 3 for r in responses]"""
DRIVER = """import accelerate, importlib, json, os, sys, time, torch, traceback
torch.distributed.destroy_process_group = lambda *_: None  # a run ends it, and there are more to come
if os.environ["RANK"] == "1":  # a process that is late wherever the run folder is agreed on
    broadcast = accelerate.utils.broadcast_object_list
    accelerate.utils.broadcast_object_list = lambda *args, **kwargs: (broadcast(*args, **kwargs), time.sleep(0.3))[0]
sys.path.insert(0, {root!r})
for name, script, words in json.load(open("jobs.json")):
    module, code = importlib.import_module(script), 0
    accelerate.state.AcceleratorState._reset_state()  # each run configures accelerate anew
    try:
        module.train(module.parse_args(words))
    except SystemExit as end:
        code = end.code
    except Exception:
        code = traceback.format_exc()
    with open(name + "." + os.environ["RANK"], "w") as file:
        json.dump(code, file)
"""


def end(process, code=0):
    """Wait for a process that must end with this code. -> stdout, stderr"""
    out, errors = process.communicate(timeout=600)
    assert process.returncode == code, f"exit code {process.returncode}\n{out[-4000:]}\n{errors[-4000:]}"
    return out, errors


def accelerate_words(*flags):
    """accelerate launch with these flags, whatever the machine's own configuration says."""
    return ["accelerate", "launch", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no",
            "--dynamo_backend", "no", *flags]  # fmt: skip


@pytest.fixture(scope="module")
def filled(tiny_lm, tiny_pairs, talker):
    """filled(flags) -> the flags of SIZES or PARTS with folders in place of their names."""
    folders = dict(CRITIC=tiny_lm("llama"), LLAMA=tiny_lm("llama"), PAIRS=tiny_pairs, TALKER=talker.model, DIALOGS=talker.data)
    return lambda flags: {name: folders.get(value, value) for name, value in flags.items()}


@pytest.fixture(scope="module")
def two(scripts, filled, world, tmp_path_factory):
    """Many small runs, one after the other, on the same two processes, which accelerate launch starts. -> their folder"""
    root = tmp_path_factory.mktemp("two")
    make = maker(scripts, world, root)
    jobs = [(script, script, flags_of(make(script, script, **filled(SIZES[script][0] | SIZES[script][2])))) for script in OTHERS]
    for name, (script, flags, _, sizes) in READ_ONCE.items():
        jobs.append((name, script, flags_of(make(script, name, **filled(flags | sizes)))))
    for name, flags in PARTS.items():
        jobs.append((name, "ppo_sentiment", flags_of(make("ppo_sentiment", name, per_device_train_batch_size=1, **filled(flags)))))
    flags = dict(total_episodes=32, per_device_train_batch_size=2, reward_fn=reward_file(root, STOPPED))
    jobs.append(("stopped", "ppo_sentiment", flags_of(make("ppo_sentiment", "stopped", **flags))))
    jobs.append(("resumed", "ppo_sentiment", ["--resume", str(root / "stopped")]))
    (root / "jobs.json").write_text(json.dumps(jobs))
    (root / "driver.py").write_text(DRIVER.format(root=str(ROOT)))
    words = [*accelerate_words("--multi_gpu", "--main_process_port", free_port()), root / "driver.py"]
    end(start_process(words, root, ACCELERATE_USE_CPU="true", HF_HOME=str(root)))
    return root


SHARDED = {"fsdp2": 0, "zero2": 2, "zero3": 3}  # accelerate_configs/<name>.yaml, DeepSpeed's stage


@pytest.fixture(scope="module", params=SHARDED)
def sharded(request, scripts, filled, world, tmp_path_factory):
    """Small runs whose weights or optimizer states are cut into shards, one after the other on two processes. -> name, their folder"""
    if SHARDED[request.param]:
        pytest.importorskip("deepspeed", reason="DeepSpeed is optional; pip install deepspeed runs this test")
    root = tmp_path_factory.mktemp(request.param)
    make = maker(scripts, world, root)
    jobs = [(script, script, flags_of(make(script, script, **filled(SIZES[script][0] | SIZES[script][2])))) for script in SIZES]
    for name, (script, flags, _, sizes) in READ_ONCE.items():
        jobs.append((name, script, flags_of(make(script, name, **filled(flags | sizes)))))
    for name in ("shared", "critic", "lora"):
        jobs.append((name, "ppo_sentiment", flags_of(make("ppo_sentiment", name, per_device_train_batch_size=1, **filled(PARTS[name])))))
    for name, body in dict(straight=STOPPED.splitlines()[-1], stopped=STOPPED).items():
        flags = dict(total_episodes=32, per_device_train_batch_size=2, reward_fn=reward_file(root, body, name))
        jobs.append((name, "ppo_sentiment", flags_of(make("ppo_sentiment", name, **flags))))
    jobs.append(("resumed", "ppo_sentiment", ["--resume", str(root / "stopped")]))
    for name, flags in dict(eight=PARTS["lora-8bit"], early=dict(total_episodes=8, early_stop_approxkl=1e-9)).items():
        jobs.append((name, "ppo_sentiment", flags_of(make("ppo_sentiment", name, per_device_train_batch_size=1, **flags))))
    (root / "jobs.json").write_text(json.dumps(jobs))
    (root / "driver.py").write_text(DRIVER.format(root=str(ROOT)))
    config = ROOT / "accelerate_configs" / f"{request.param}.yaml"
    words = ["accelerate", "launch", "--config_file", config, "--main_process_port", free_port(), root / "driver.py"]
    end(start_process(words, root, HF_HOME=str(root)))
    return request.param, root


def codes(root, name, processes=2):
    """How a job ended on each process."""
    return [json.loads((root / f"{name}.{rank}").read_text()) for rank in range(processes)]


def assert_near(value, other):
    """Floats to 1e-4, wherever they stand in dicts and lists; all else equal."""
    if isinstance(value, (dict, list)):
        assert len(value) == len(other)
        for key in value if isinstance(value, dict) else range(len(value)):
            assert_near(value[key], other[key])
    else:
        assert value == (pytest.approx(other, abs=1e-4, rel=1e-4) if isinstance(value, float) else other)


def assert_same_numbers(one, two, processes=2):
    """Metrics, weights and world size of a run on one process and of its double on several."""
    sizes = [json.loads((folder / "args.json").read_text())["world_size"] for folder in (one, two)]
    assert sizes == [1, processes]
    a, b = rows_of(one), rows_of(two)
    assert len(a) == len(b) >= 2 and a[-1]["lr"] > 0
    for row, other in zip(a, b):
        names = [name for name in row if name != "eps" and not name.startswith("perf/")]
        assert {n: row[n] for n in names} == pytest.approx({n: other[n] for n in names}, abs=1e-5, rel=1e-5)
    for file in ("model.safetensors", "adapter_model.safetensors", "critic/model.safetensors"):
        if (one / "model" / file).exists():
            assert distance(load_file(one / "model" / file), load_file(two / "model" / file)) < 1e-5
    tables = [json.loads((folder / "evaluation.json").read_text()) for folder in (one, two)]
    assert_near(*tables)


def test_ppo_on_two_processes(scripts, small, tmp_path):
    """torchrun with 2 processes: prompts, responses, losses, KL, coefficient and weights of one process."""
    flags, one, two = SIZES["ppo_sentiment"]
    process = start_process(torchrun_words("ppo_sentiment", small("ppo_sentiment", "two", **flags | two), 2), tmp_path)
    scripts["ppo_sentiment"].train(small("ppo_sentiment", "one", **flags | one))
    end(process)
    one, two = tmp_path / "one", tmp_path / "two"
    assert_same_numbers(one, two)
    texts = [[(row["update"], row["prompt"], row["response"]) for row in rows_of(folder, "samples.jsonl")] for folder in (one, two)]
    assert texts[0] == texts[1] and len(texts[0]) == 4
    assert distance(*(load_file(folder / "model/value_head.safetensors") for folder in (one, two))) < 1e-5


@pytest.mark.parametrize("script", OTHERS)
def test_others_on_two_processes(scripts, small, filled, two, tmp_path, script):
    """Losses, weights and held-out numbers of one process."""
    assert codes(two, script) == [0, 0]
    scripts[script].train(small(script, "one", **filled(SIZES[script][0] | SIZES[script][1])))
    assert_same_numbers(tmp_path / "one", two / script)


def assert_read_once(scripts, small, filled, root, folder, name):
    """A run of READ_ONCE on two processes: the numbers of one process."""
    script, flags, sizes, _ = READ_ONCE[name]
    assert codes(root, name) == [0, 0]
    scripts[script].train(small(script, "one", **filled(flags | sizes)))
    assert_same_numbers(folder / "one", root / name)


@pytest.mark.parametrize("name", READ_ONCE)
def test_prompts_read_once_on_two_processes(scripts, small, filled, two, tmp_path, name):
    assert_read_once(scripts, small, filled, two, tmp_path, name)


@pytest.mark.parametrize("name", READ_ONCE)
def test_prompts_read_once_in_shards(scripts, small, filled, sharded, tmp_path, name):
    """The layers run twice in each pass, which FSDP2 and ZeRO-3 cannot: pairs are read the plain way there, groups are refused."""
    kind, root = sharded
    if name == "rloo_groups" and kind != "zero2":
        assert all("use ZeRO-2" in code for code in codes(root, name))
    else:
        assert_read_once(scripts, small, filled, root, tmp_path, name)


THREE = {  # 5 updates of 12 or 6 rows, which leave a rest of the data, of the held-out rows and of what is sampled at once
    "ppo_sentiment": dict(total_episodes=55, num_eval_prompts=5, local_rollout_forward_batch_size=3),
    "ppo_dialog": dict(total_episodes=55, local_rollout_forward_batch_size=3),
    "rloo_tldr": dict(total_episodes=55, local_rollout_forward_batch_size=6, learning_rate=0.03),  # ratios near 1: their variance rounds
    "sft": dict(num_train_rows=17, packing=False, num_train_epochs=1.76),
    "reward_model": dict(num_train_epochs=0.62, gradient_accumulation_steps=1),
}


@pytest.fixture(scope="module")
def three(scripts, filled, world, tmp_path_factory):
    """A small run of each script on the same three processes. -> their folder"""
    root = tmp_path_factory.mktemp("three")
    make = maker(scripts, world, root)
    flags = {script: filled(SIZES[script][0] | SIZES[script][1] | THREE[script] | dict(per_device_train_batch_size=2)) for script in THREE}
    (root / "jobs.json").write_text(json.dumps([(script, script, flags_of(make(script, script, **flags[script]))) for script in THREE]))
    (root / "driver.py").write_text(DRIVER.format(root=str(ROOT)))
    words = torchrun_words("sft", make("sft"), 3)
    end(start_process([*words[: words.index(ROOT / "sft.py")], root / "driver.py"], root))
    return root


@pytest.mark.parametrize("script", THREE)
def test_three_processes(scripts, small, filled, three, tmp_path, script):
    """Losses, KL coefficient, weights and held-out numbers of one process, after 5 updates."""
    assert codes(three, script, 3) == [0, 0, 0]
    saved = (three / script / "curves.png").stat().st_mtime  # the last file of a run
    assert all((three / f"{script}.{rank}").stat().st_mtime >= saved for rank in range(3))  # all wait for what is saved
    flags = SIZES[script][0] | SIZES[script][1] | THREE[script] | dict(per_device_train_batch_size=6)
    scripts[script].train(small(script, "one", **filled(flags)))
    assert len(rows_of(three / script)) == 5
    assert_same_numbers(tmp_path / "one", three / script, 3)


def test_dialogues_on_two_processes(two):
    """What was compared was worth it: answers of both processes with and without a question, stopped and not, a KL that moves its price."""
    rows = rows_of(two / "ppo_dialog")
    assert any(0 < row["custom/questions"] < 1 for row in rows) and any(0 < row["val/num_eos_tokens"] < 8 for row in rows)
    assert rows[0]["objective/kl_coef"] != rows[1]["objective/kl_coef"] and rows[1]["objective/kl"] != 0
    assert all(row["env/reward_std"] > 0.1 for row in rows)
    assert len({row["answer"] for row in rows_of(two / "ppo_dialog", "samples.jsonl")}) > 2


@pytest.mark.parametrize("name", PARTS)
def test_parts_on_two_processes(ppo, two, filled, tmp_path, name):
    """LoRA, LoRA on 8 bit, frozen layers with accumulated and recomputed passes, and a critic: the numbers of one process."""
    assert codes(two, name) == [0, 0]
    ppo("one", per_device_train_batch_size=2, **filled(PARTS[name]))
    assert_same_numbers(tmp_path / "one", two / name)
    heads = [next((folder / "model").rglob("value_head.safetensors")) for folder in (tmp_path / "one", two / name)]
    assert distance(*map(load_file, heads)) < 1e-5 and load_file(heads[0])["weight"].abs().max() > 0


def test_signal_and_resume_on_two_processes(two):
    """A SIGTERM to one process stops both after the same update; the run goes on, on both."""
    assert (two / "sent").exists() and codes(two, "stopped") == [143, 143] and codes(two, "resumed") == [0, 0]
    assert [row["update"] for row in rows_of(two / "stopped")] == [1, 2, 3, 4] and (two / "stopped/model").exists()


@pytest.mark.parametrize("script", SIZES)
def test_shards(scripts, small, filled, sharded, tmp_path, script):
    """FSDP2, ZeRO-2 and ZeRO-3: losses, KL coefficient, weights and held-out numbers of one process."""
    _, root = sharded
    assert codes(root, script) == [0, 0]
    scripts[script].train(small(script, "one", **filled(SIZES[script][0] | SIZES[script][1])))
    assert_same_numbers(tmp_path / "one", root / script)


@pytest.mark.parametrize("name", ["shared", "critic", "lora"])
def test_parts_in_shards(ppo, filled, sharded, tmp_path, name):
    """Frozen layers with accumulated and recomputed passes, a critic, LoRA: the numbers of one process."""
    _, root = sharded
    assert codes(root, name) == [0, 0]
    ppo("one", per_device_train_batch_size=2, **filled(PARTS[name]))
    assert_same_numbers(tmp_path / "one", root / name)


def test_resume_in_shards(scripts, sharded):
    """A SIGTERM to one process, then --resume on both: the bits of the run that was left alone.

    On one process FSDP2's checkpoint, which is whole, goes on from its update; DeepSpeed's shards are refused.
    """
    name, root = sharded
    assert codes(root, "stopped") == [143, 143] and codes(root, "resumed") == [0, 0]
    assert timeless(rows_of(root / "stopped")) == timeless(rows_of(root / "straight"))
    assert same(weights(root / "stopped/model"), weights(root / "straight/model"))
    last = sorted((root / "straight/checkpoints").iterdir())[-1]
    words = ["--resume", str(last), "--total-episodes", "40", "--per-device-train-batch-size", "4"]
    module = scripts["ppo_sentiment"]
    if SHARDED[name]:
        with pytest.raises(module.UserError, match=f"it is of ZeRO-{SHARDED[name]} on 2 processes"):
            module.train(module.parse_args(words))
    else:
        module.train(module.parse_args(words))
        assert [row["update"] for row in rows_of(root / "straight")] == [1, 2, 3, 4, 5]


def test_refused_in_shards(sharded):
    """FSDP2 cannot shard 8-bit weights; DeepSpeed steps before --early-stop-approxkl can stop it. Each works with the other."""
    name, root = sharded
    for job, wrong, line in (("eight", name == "fsdp2", "cut 8-bit weights"), ("early", name != "fsdp2", "DeepSpeed has made the step")):
        assert all(line in code for code in codes(root, job)) if wrong else codes(root, job) == [0, 0]


def test_the_first_fsdp_is_refused(scripts, small, monkeypatch):
    """One line that says what to put into accelerate's configuration."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "1")
    for script, module in scripts.items():
        with pytest.raises(module.UserError, match="fsdp_version: 2"):
            module.start(small(script))


def test_one_process_in_place_of_two_is_refused(small, tmp_path):
    """accelerate launch --cpu --num_processes 2 starts one process: exit code 2 and one line, and no run folder."""
    words = script_words("ppo_sentiment", small("ppo_sentiment"))[1:]
    process = start_process([*accelerate_words("--cpu"), *words], tmp_path, HF_HOME=str(tmp_path))
    _, errors = process.communicate(timeout=150)
    ours = [line for line in errors.splitlines() if line.startswith("ppo_sentiment.py:")]
    assert len(ours) == 1 and "2 processes were asked for and 1 runs" in ours[0] and "exit status 2" in errors
    assert not (tmp_path / "run").exists()
