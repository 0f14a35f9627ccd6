"""Runs that are stopped and continued end with the same bits as a run that was never stopped."""

import json
import os
import random
import shutil
import signal
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import RL
from run_tools import (
    ALL,
    SIX_UPDATES,
    assert_same_run,
    distance,
    guesses,
    reward_file,
    rows_of,
    script_words,
    start_process,
    stop_after,
    weights,
)

pytest_plugins = ["run_fixtures"]
SCRIPT = "ppo_sentiment"
signal.signal(signal.SIGINT, signal.default_int_handler)  # runs ignore it if they start in the background


def resume(module, folder, *flags):
    """Continue a run in this process. -> its folder"""
    _, folder = module.train(module.parse_args(["--resume", str(folder), *flags]))
    return folder


def stop_and_resume(module, monkeypatch, args, update, capsys):
    """Run until SIGTERM in this update, then --resume to the end. -> run folder"""
    folder = Path(args.output_dir)
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
        stop_after(patch, module, update)
        module.train(args)
    assert end.value.code == 143
    assert f"--resume {folder}" in capsys.readouterr().out
    assert (folder / f"checkpoints/{update:06d}/state.json").exists()
    assert not (folder / "model").exists()
    resume(module, folder)
    assert f"after update {update}" in capsys.readouterr().out
    return folder


# ---- Signals and kills -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_sigterm_then_resume(scripts, small, monkeypatch, capsys, name):
    """SIGTERM finishes the update, saves, says how to continue, and exits with 143. The rest is identical."""
    flags = SIX_UPDATES[name] | dict(eval_every=2)
    _, whole = scripts[name].train(small(name, "whole", **flags))
    assert len(rows_of(whole)) == 6
    parts = stop_and_resume(scripts[name], monkeypatch, small(name, "parts", **flags), 3, capsys)
    assert_same_run(whole, parts)


def test_a_signal_makes_no_tensor(script, small, monkeypatch):
    """It may come while a GPU records a token step, which a copy to the GPU would end with an error."""
    args = small(SCRIPT)
    run = script.Run(args, script.start_accelerator(args), 1, {})
    run.start(8)
    with monkeypatch.context() as patch:
        patch.setattr(script.torch, "tensor", None)
        signal.raise_signal(signal.SIGTERM)
    assert run.got_signal


SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.mark.parametrize("number", SIGNALS)
def test_every_signal_saves(script, small, monkeypatch, number):
    """Ctrl-C, kill, and a terminal that is closed: the exit code is the same, and there is a checkpoint.
    A second Ctrl-C would stop at once, but a terminal that is closed may say so more than once."""
    args = small("ppo_sentiment", total_episodes=24, save_every=0)
    stop_after(monkeypatch, script, 2, number)
    with pytest.raises(SystemExit) as end:
        script.train(args)
    assert end.value.code == 143
    assert (Path(args.output_dir) / "checkpoints/000002/state.json").exists()
    for other in SIGNALS:
        assert (signal.getsignal(other) == signal.SIG_DFL) == (other == number == signal.SIGINT)


@pytest.mark.parametrize("name", ["ppo_sentiment", "sft"])
def test_a_signal_before_training(scripts, small, monkeypatch, tmp_path, name):
    """There is nothing to save: it ends the process at once, as it would without us."""
    module = scripts[name]
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    make_learner = module.make_learner

    def with_handlers_noted(*inputs):
        assert {number: signal.getsignal(number) for number in SIGNALS} == handlers
        assert not (tmp_path / "run").exists()
        return make_learner(*inputs)

    monkeypatch.setattr(module, "make_learner", with_handlers_noted)
    module.train(small(name))
    assert handlers.keys() == {x for x in handlers if signal.getsignal(x) != handlers[x]}


def test_a_signal_while_the_run_folder_is_made(script, small, monkeypatch):
    """Without args.json, the run could neither be resumed nor begin again in this folder."""
    replace = os.replace

    def replace_after_a_signal(*paths):
        signal.raise_signal(signal.SIGTERM)
        replace(*paths)

    def end(number, frame):
        raise AssertionError("the signal ended the run")

    monkeypatch.setattr(script.os, "replace", replace_after_a_signal)
    signal.signal(signal.SIGTERM, end)
    args = small(SCRIPT, total_episodes=24, save_every=0)
    with pytest.raises(SystemExit):
        script.train(args)
    assert [path.name for path in Path(args.output_dir, "checkpoints").iterdir()] == ["000001"]
    assert Path(args.output_dir, "args.json").exists()


def test_a_terminal_that_is_closed_may_say_so_twice(script, small, monkeypatch):
    """bash sends SIGHUP to its jobs; when it ends, the kernel sends it again."""
    args = small(SCRIPT, total_episodes=24, save_every=0)
    stop_after(monkeypatch, script, 2, signal.SIGHUP)
    stop_after(monkeypatch, script, 2, signal.SIGHUP)
    with pytest.raises(SystemExit) as end:
        script.train(args)
    assert end.value.code == 143 and len(rows_of(args.output_dir)) == 2


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_the_run_was_told_to_ignore(script, small, monkeypatch, number):
    """nohup ignores SIGHUP, and a shell that is no terminal lets its background jobs ignore SIGINT."""
    signal.signal(number, signal.SIG_IGN)
    stop_after(monkeypatch, script, 2, number)
    _, folder = script.train(small(SCRIPT, total_episodes=24, save_every=0))
    assert len(rows_of(folder)) == 3 and signal.getsignal(number) is signal.SIG_IGN


WAITS = """import signal, time
if columns["trainer_state"].global_step == 1 and len(prompts) == 8:
    open("waits", "w").close()
    while not os.path.exists("closed"):
        time.sleep(0.01)
    signal.raise_signal(int(os.environ["NUMBER"]))
return [float(len(text)) for text in completions]"""


def wait_for_update_2(process, folder):
    """Return when the process is in its second update, where it waits for a file with the name closed."""
    while not (folder / "waits").exists():
        assert process.poll() is None
        time.sleep(0.05)


def test_output_that_nobody_reads(small, tmp_path):
    """`| tee log` is stopped first, by the same Ctrl-C. The run still saves."""
    args = small("ppo_sentiment", total_episodes=24, save_every=0, reward_fn=reward_file(tmp_path, WAITS))
    process = start_process(script_words("ppo_sentiment", args), tmp_path, NUMBER=str(int(signal.SIGINT)))
    wait_for_update_2(process, tmp_path)
    process.stdout.close()
    process.stderr.close()
    (tmp_path / "closed").touch()
    assert process.wait() != 0
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["000002"]


def test_a_terminal_that_is_closed(small, tmp_path):
    """Its process gets SIGHUP, and all output fails. The run saves."""
    args = small("ppo_sentiment", total_episodes=24, save_every=0, reward_fn=reward_file(tmp_path, WAITS))
    screen, terminal = os.openpty()
    words = script_words("ppo_sentiment", args)
    process = start_process(words, tmp_path, terminal, NUMBER=str(int(signal.SIGHUP)))
    wait_for_update_2(process, tmp_path)
    os.close(terminal)
    os.close(screen)
    (tmp_path / "closed").touch()
    assert process.wait() != 0
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["000002"]


@pytest.mark.parametrize("name", ["ppo_sentiment", "sft"])
def test_a_run_that_fails_early(scripts, small, monkeypatch, name):
    """Before the first update its folder stays free, so the corrected command can use it. In the first update
    it can be resumed, or another folder is needed."""
    module = scripts[name]
    with monkeypatch.context() as patch, pytest.raises(KeyError):
        patch.setattr(module, "evaluate", lambda *inputs: {}["mine"])
        module.train(small(name))
    assert not Path(small(name).output_dir).exists()
    with monkeypatch.context() as patch, pytest.raises(KeyError):
        patch.setattr(module, "learning_rate", lambda *inputs: {}["mine"])
        module.train(small(name))
    with pytest.raises(module.UserError, match="holds a run"):
        module.train(small(name))
    _, whole = module.train(small(name, "whole"))
    assert_same_run(whole, resume(module, small(name).output_dir))


@pytest.mark.parametrize("name", ALL)
def test_what_came_after_the_checkpoint_is_forgotten(scripts, small, monkeypatch, name):
    """A run that dies in update 3 goes on after update 2. The lines of update 3 are not there twice."""
    module = scripts[name]
    flags = SIX_UPDATES[name]
    if name in (*RL, "grpo_tools"):
        flags = flags | dict(total_episodes=24, num_sample_generations=6)
    _, whole = module.train(small(name, "whole", **flags))
    args = small(name, "parts", **flags)
    checkpoint = module.Run.checkpoint

    def die(self, state):
        if state["update"] == 3:
            raise KeyboardInterrupt
        checkpoint(self, state)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module.Run, "checkpoint", die)
        module.train(args)
    folder = Path(args.output_dir)
    files = ["metrics.jsonl"]
    if name in (*RL, "grpo_tools"):
        files += ["samples.jsonl", "tokens.jsonl"]
    for file in files:
        assert 3 in {row["update"] for row in rows_of(folder, file)}
    resume(module, folder)
    assert_same_run(whole, folder)


PARTS = {  # script, flags
    "lora": ("ppo_sentiment", dict(lora_r=4, optimizer="bitsandbytes.optim.Adam8bit")),
    "shared layers": (
        "ppo_sentiment",
        dict(num_shared_layers=1, optimizer="torch.optim.AdamW", whiten_rewards=True),
    ),
    "critic": ("ppo_sentiment", dict(value_model_path="CRITIC", optimizer="bitsandbytes.optim.Lion")),
    "environment": ("grpo_tools", dict(save_every=3)),
    "dropout": ("sft", dict(from_config="gpt2 n_embd=32 n_layer=1 n_head=2 n_positions=256 resid_pdrop=0.5")),
}


@pytest.mark.parametrize("part", PARTS)
def test_resume_with_other_parts(scripts, small, monkeypatch, capsys, tiny_lm, tmp_path, part):
    """Adapter, frozen layers, critic, 8-bit optimizer states, dropout, environment: all as before."""
    name, flags = PARTS[part]
    flags = SIX_UPDATES[name] | flags
    if part == "critic":
        flags["value_model_path"] = tiny_lm("qwen2")
    if part == "environment":
        flags |= guesses(tmp_path)
    _, whole = scripts[name].train(small(name, "whole", **flags))
    parts = stop_and_resume(scripts[name], monkeypatch, small(name, "parts", **flags), 3, capsys)
    assert_same_run(whole, parts)


def test_random_numbers_of_a_reward_function(script, small, monkeypatch, capsys, tmp_path):
    """A reward function that uses torch and random gets the same numbers after a resume."""
    body = "import random, torch\nreturn [random.random() + torch.rand(1).item() for _ in prompts]"
    flags = dict(total_episodes=32, reward_fn=reward_file(tmp_path, body))
    random.seed(0)
    _, whole = script.train(small("ppo_sentiment", "whole", **flags))
    random.seed(0)
    args = small("ppo_sentiment", "parts", **flags)
    parts = stop_and_resume(script, monkeypatch, args, 2, capsys)
    scores = [[row["objective/scores"] for row in rows_of(folder)] for folder in (whole, parts)]
    assert len(scores[0]) == 4 and scores[0] == scores[1]


@pytest.mark.parametrize("name", ["ppo_sentiment", "grpo_math", "grpo_tools"])
def test_kill_at_a_random_moment(scripts, small, tmp_path, name):
    """After SIGKILL, --resume ends with the same bits, whatever the process was doing."""
    flags = dict(total_episodes=8 * 20, save_every=1, eval_every=2)
    if name == "grpo_tools":
        flags |= guesses(tmp_path) | dict(total_episodes=8 * 12)
    _, whole = scripts[name].train(small(name, "whole", **flags))
    process = start_process(script_words(name, small(name, "parts", **flags)), tmp_path)
    metrics = tmp_path / "parts/metrics.jsonl"
    updates = random.Random().randint(1, 10)
    while process.poll() is None:
        if metrics.exists() and len(metrics.read_text().splitlines()) >= updates:
            break
        time.sleep(0.005)
    time.sleep(random.Random().uniform(0, 0.05))
    process.kill()
    _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, errors
    assert not (tmp_path / "parts/model").exists()
    resume(scripts[name], tmp_path / "parts")
    assert_same_run(whole, tmp_path / "parts")


KILLED = """state, log = columns["trainer_state"], os.environ.get("LOG")
if log and os.path.exists(log) and len(open(log).readlines()) == 3 and state.global_step == state.max_steps:
    os.kill(os.getpid(), 9)
return [float(len(text)) for text in completions]"""


@pytest.mark.parametrize("name", ["ppo_sentiment", "ppo_dialog", "rloo_tldr", "grpo_math", "grpo_tools"])
def test_kill_in_an_evaluation(scripts, small, tmp_path, name):
    """SIGKILL in the evaluation after update 4 of 6, whose last checkpoint is of update 2."""
    flags = SIX_UPDATES[name] | dict(eval_every=2, reward_fn=reward_file(tmp_path, KILLED))
    _, whole = scripts[name].train(small(name, "whole", **flags))
    folder = tmp_path / "parts"
    words = script_words(name, small(name, "parts", **flags))
    process = start_process(words, tmp_path, LOG=str(folder / "metrics.jsonl"))
    _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, errors
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["000002"]
    assert len(rows_of(folder)) == 3
    resume(scripts[name], folder)
    assert_same_run(whole, folder)


# ---- Which checkpoint, which flags -------------------------------------------------------------------------


def test_only_the_checkpoints_of_the_run_count(script, small, monkeypatch, capsys):
    """Names that are no numbers are neither read nor deleted, and a hidden file stops nothing."""
    flags = dict(total_episodes=40, save_every=1, keep_checkpoints=1, num_sample_generations=0)
    _, whole = script.train(small(SCRIPT, "whole", **flags))
    args = small(SCRIPT, "parts", **flags)
    folder = Path(args.output_dir) / "checkpoints"
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        stop_after(patch, script, 2)
        script.train(args)
    copies = ["000001-keep", "000099.old", "2026-11-27", "before-change"]
    for name in copies:
        shutil.copytree(folder / "000002", folder / name)
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        stop_after(patch, script, 3)
        resume(script, args.output_dir)
    (folder / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    capsys.readouterr()
    resume(script, args.output_dir)
    assert "after update 3" in capsys.readouterr().out
    assert_same_run(whole, args.output_dir)
    assert sorted(path.name for path in folder.iterdir()) == [
        ".DS_Store",
        "000001-keep",
        "000005",
        *copies[1:],
    ]


def test_all_processes_load_the_checkpoint_of_the_main_one(script, small, monkeypatch, capsys):
    """This process finds none, as on a slow network disk, but the main one sends it a name."""
    _, folder = script.train(small(SCRIPT))
    [newest] = script.Run.checkpoints(SimpleNamespace(folder=Path(folder).absolute()))
    broadcast = script.accelerate.utils.broadcast_object_list

    def from_main(objects):
        return [newest] if objects == [None] else broadcast(objects)

    with monkeypatch.context() as patch:
        patch.setattr(script.accelerate.utils, "broadcast_object_list", from_main)
        patch.setattr(script.Run, "checkpoints", lambda run: [])
        resume(script, folder)
    assert "after update 1\n" in capsys.readouterr().out


def test_checkpoints_are_in_the_order_of_their_numbers(script, small):
    args = small(SCRIPT)
    folder = Path(args.output_dir) / "checkpoints"
    for update in (100_000, 99_999, 20):
        (folder / f"{update:06d}").mkdir(parents=True)
        (folder / f"{update:06d}/state.json").write_text(json.dumps({"update": update}))
    run = script.Run(replace(args, resume=args.output_dir), script.start_accelerator(args), 1, {})
    assert [path.name for path in run.checkpoints()] == ["000020", "099999", "100000"]


def test_default_folder(scripts, small, monkeypatch, tmp_path):
    """Without --output-dir the run folder is runs/<script>/<recipe>-s<seed>-<time>."""
    monkeypatch.chdir(tmp_path)
    _, folder = scripts["sft"].train(small("sft", output_dir=None, seed=3))
    assert folder.parent == tmp_path / "runs/sft" and folder.name.startswith("custom-s3-")


def test_flags_of_a_resumed_run(script, small):
    """Those of the run, not of a recipe. Only flags that leave each update as it is may change."""
    args = small("ppo_sentiment", save_every=0, learning_rate=0.123)
    script.train(args)
    resume_flags = ["--resume", args.output_dir]
    assert script.parse_args(resume_flags) == replace(args, resume=args.output_dir)
    changed = script.parse_args([*resume_flags, "--save_every", "7", "--learning-rate", "0.123"])
    assert changed == replace(args, resume=args.output_dir, save_every=7)
    assert script.parse_args(["tiny", *resume_flags]) == replace(args, resume=args.output_dir)
    for flag, value in (("kl_coef", "0.5"), ("lora_alpha", "64"), ("output_dir", "elsewhere"), ("seed", "2")):
        with pytest.raises(script.UserError, match=f"cannot change {flag}: it is {getattr(args, flag)} in"):
            script.parse_args([*resume_flags, f"--{flag}", value])
    moved = args.output_dir + "-moved"
    Path(args.output_dir).rename(moved)
    assert resume(script, moved) == Path(moved)


def test_resume_of_another_edition(scripts, small, tmp_path):
    """Its flags have other names, so the run cannot be the same."""
    saved = asdict(small("ppo_sentiment"))
    saved["date"] = saved.pop("save_every")
    (tmp_path / "args.json").write_text(json.dumps({"args": saved}))
    for name in ("ppo_sentiment", "ppo_dialog"):
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            scripts[name].parse_args(["--resume", str(tmp_path)])


@pytest.mark.parametrize("name", ["ppo_sentiment", "sft"])
def test_resume_with_other_micro_batches(scripts, small, monkeypatch, name):
    """Half the rows per pass and twice the passes: the same run up to rounding. Another batch is refused."""
    module = scripts[name]
    flags = SIX_UPDATES[name] | dict(optimizer="torch.optim.SGD", learning_rate=0.1)
    _, whole = module.train(small(name, "whole", **flags))
    args = small(name, "parts", **flags)
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        stop_after(patch, module, 3)
        module.train(args)
    n = args.per_device_train_batch_size
    half = ["--per-device-train-batch-size", str(n // 2)]
    with pytest.raises(module.UserError, match="--resume: that run had a batch of"):
        resume(module, args.output_dir, *half)
    resume(module, args.output_dir, *half, "--gradient-accumulation-steps", "2")
    assert distance(weights(whole / "model"), weights(Path(args.output_dir) / "model")) < 1e-5


@pytest.mark.parametrize("name, flag", [("ppo_sentiment", "total_episodes"), ("sft", "num_train_epochs")])
def test_resume_with_more_updates(scripts, small, name, flag):
    """With a constant learning rate, a run that is made longer equals one that was longer from the start."""
    module = scripts[name]
    flags = SIX_UPDATES[name] | dict(lr_scheduler_type="constant", warmup_ratio=0.0)
    _, whole = module.train(small(name, "whole", **flags))
    kind = type(flags[flag])
    args = small(name, "parts", **flags | {flag: kind(flags[flag] / 2)})
    module.train(args)
    assert len(rows_of(args.output_dir)) == 3
    folder = resume(module, args.output_dir, f"--{flag}", str(flags[flag]))
    assert [row["update"] for row in rows_of(folder)] == [1, 2, 3, 4, 5, 6]
    models = [path / "model/model.safetensors" for path in (whole, folder)]
    assert models[0].read_bytes() == models[1].read_bytes()


def test_files_of_yours_stay_as_they_are(scripts, small, tmp_path):
    """--output-dir may be a folder with other files, also when the run continues."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/train.jsonl").write_text("{}\n")
    module = scripts["sft"]
    _, folder = module.train(small("sft", num_samples=0))
    (folder / "train.jsonl").write_text("{}\n{}\n")
    resume(module, folder)
    assert (folder / "train.jsonl").read_text() == "{}\n{}\n"


def test_resume_of_a_finished_run(scripts, small):
    """It trains nothing more. A flag that was refused in between is forgotten."""
    module = scripts["sft"]
    _, folder = module.train(small("sft", num_samples=0))
    model, rows = (folder / "model/model.safetensors").read_bytes(), rows_of(folder)
    with pytest.raises(module.UserError, match="that run had"):
        resume(module, folder, "--per-device-train-batch-size", "8")
    resume(module, folder, "--keep-checkpoints", "3")
    assert (folder / "model/model.safetensors").read_bytes() == model
    assert rows_of(folder) == rows
    args = json.loads((folder / "args.json").read_text())["args"]
    assert args["per_device_train_batch_size"] == 4 and args["keep_checkpoints"] == 3
