"""Runs that are stopped and continued end with the same bits as a run that was never stopped."""

import json
import random
import shutil
import signal
import time
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import RL
from run_tools import (
    ALL,
    SIX_UPDATES,
    assert_same_run,
    distance,
    reward_file,
    rows_of,
    script_words,
    start_process,
    stop_after,
    weights,
)

pytest_plugins = ["run_fixtures"]


@pytest.fixture
def script(scripts):
    """ppo_sentiment.py as a module."""
    return scripts["ppo_sentiment"]


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
    assert (folder / f"checkpoints/{update:06d}/state.pt").exists()
    assert not (folder / "model").exists()
    resume(module, folder)
    assert f"resumed after update {update}" in capsys.readouterr().out
    return folder


# ---- Signals and kills -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_sigterm_then_resume(scripts, small, monkeypatch, capsys, name):
    """SIGTERM finishes the update, saves, says how to continue, and exits with 143. The rest is identical."""
    _, whole = scripts[name].train(small(name, "whole", **SIX_UPDATES[name]))
    assert len(rows_of(whole)) == 6
    args = small(name, "parts", **SIX_UPDATES[name])
    parts = stop_and_resume(scripts[name], monkeypatch, args, 3, capsys)
    assert_same_run(whole, parts)


@pytest.mark.parametrize("name", ALL)
def test_what_came_after_the_checkpoint_is_forgotten(scripts, small, monkeypatch, name):
    """A run that dies in update 3 goes on after update 2. The lines of update 3 are not there twice."""
    module = scripts[name]
    flags = SIX_UPDATES[name]
    if name in RL:
        flags = flags | dict(total_episodes=24, num_sample_generations=6)
    _, whole = module.train(small(name, "whole", **flags))
    args = small(name, "parts", **flags)
    checkpoint = module.Run.checkpoint

    def die(self, update, *rest, **extra):
        if update == 3:
            raise KeyboardInterrupt
        checkpoint(self, update, *rest, **extra)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module.Run, "checkpoint", die)
        module.train(args)
    folder = Path(args.output_dir)
    files = ["metrics.jsonl"]
    if name in RL:
        files += ["samples.jsonl", "tokens.jsonl"]
    for file in files:
        assert 3 in {row["update"] for row in rows_of(folder, file)}
    resume(module, folder)
    assert_same_run(whole, folder)


PARTS = {
    "lora": dict(lora_r=4, optimizer="bitsandbytes.optim.Adam8bit"),
    "shared": dict(num_shared_layers=1, optimizer="torch.optim.AdamW", whiten_rewards=True),
    "critic": dict(value_model_path="CRITIC", optimizer="bitsandbytes.optim.Lion"),
}


@pytest.mark.parametrize("part", PARTS)
def test_resume_with_other_parts(script, small, monkeypatch, capsys, tiny_lm, part):
    """An adapter, frozen layers, a critic and 8-bit optimizer states continue where they were."""
    flags = SIX_UPDATES["ppo_sentiment"] | dict(total_episodes=24) | PARTS[part]
    if part == "critic":
        flags["value_model_path"] = tiny_lm("qwen2")
    _, whole = script.train(small("ppo_sentiment", "whole", **flags))
    parts = stop_and_resume(script, monkeypatch, small("ppo_sentiment", "parts", **flags), 1, capsys)
    assert_same_run(whole, parts)


def test_resume_with_dropout(scripts, small, monkeypatch, capsys):
    """A model that sft.py trains from scratch has dropout. Its masks are those of an uninterrupted run."""
    flags = SIX_UPDATES["sft"] | dict(
        from_config="gpt2 n_embd=32 n_layer=1 n_head=2 n_positions=256 resid_pdrop=0.5",
        train_tokenizer=300,
        save_every=0,
    )
    _, whole = scripts["sft"].train(small("sft", "whole", **flags))
    parts = stop_and_resume(scripts["sft"], monkeypatch, small("sft", "parts", **flags), 3, capsys)
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


@pytest.mark.parametrize("name", ["ppo_sentiment", "grpo_math"])
def test_kill_at_a_random_moment(scripts, small, tmp_path, name):
    """After SIGKILL, --resume ends with the same bits, whatever the process was doing."""
    flags = dict(total_episodes=8 * 20, save_every=1)
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


def test_kill_while_a_checkpoint_is_written(script, small, monkeypatch):
    """Half a file never has the name of a checkpoint: the run continues from the one before."""
    flags = dict(total_episodes=32, save_every=1)
    _, whole = script.train(small("ppo_sentiment", "whole", **flags))
    save = torch.save

    def torn(state, file):
        if state["update"] == 3:
            file.write(b"half a checkpoint")
            raise KeyboardInterrupt
        save(state, file)

    args = small("ppo_sentiment", "parts", **flags)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch, "save", torn)
        script.train(args)
    checkpoints = Path(args.output_dir) / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == [".000003", "000001", "000002"]
    resume(script, args.output_dir)
    assert not list(checkpoints.glob(".*"))
    assert_same_run(whole, args.output_dir)


# ---- Which checkpoint, which flags -------------------------------------------------------------------------


def test_resume_from_an_older_checkpoint(script, small, monkeypatch, capsys):
    """--resume RUN/checkpoints/NUMBER continues from there, with the same end."""
    flags = dict(total_episodes=32, save_every=1, keep_checkpoints=4)
    _, whole = script.train(small("ppo_sentiment", "whole", **flags))
    stop_after(monkeypatch, script, 3)
    with pytest.raises(SystemExit):
        script.train(small("ppo_sentiment", "again", **flags))
    monkeypatch.undo()
    folder = whole.parent / "again"
    assert sorted(path.name for path in (folder / "checkpoints").iterdir())[-1] == "000003"
    # A path as people type it: relative, and not the shortest one.
    monkeypatch.chdir(folder)
    resume(script, f"checkpoints/../../{folder.name}/checkpoints/000002")
    assert "resumed after update 2," in capsys.readouterr().out
    assert [row["update"] for row in rows_of(folder)] == [1, 2, 3, 4]
    assert_same_run(whole, folder)


def test_resume_from_an_older_checkpoint_forgets_the_newer_ones(script, small, monkeypatch):
    """They are gone before the first update: a kill in it must not bring them back by `--resume latest`."""
    flags = dict(total_episodes=32, save_every=1, keep_checkpoints=4)
    _, folder = script.train(small("ppo_sentiment", **flags, learning_rate=0.0))
    numbers = ["000001", "000002", "000003", "000004"]
    for number in numbers[:3]:  # the last checkpoint alone is left of a finished run
        shutil.copytree(folder / "checkpoints/000004", folder / "checkpoints" / number, dirs_exist_ok=True)
        state = torch.load(folder / "checkpoints" / number / "state.pt", weights_only=True)
        torch.save(state | dict(update=int(number)), folder / "checkpoints" / number / "state.pt")
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == numbers
    monkeypatch.setattr(script.Run, "log", lambda *inputs: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        resume(script, folder / "checkpoints/000002")
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == numbers[:2]
    assert [row["update"] for row in rows_of(folder)] == [1, 2]


def test_resume_latest(script, small, monkeypatch, tmp_path):
    """`latest` is the newest run of this script in runs/."""
    monkeypatch.chdir(tmp_path)
    script.train(small("ppo_sentiment", output_dir="runs/ppo_sentiment/b", seed=1))
    _, newer = script.train(small("ppo_sentiment", output_dir="runs/ppo_sentiment/a", seed=2))
    args = script.parse_args(["--resume", "latest"])
    assert Path(args.output_dir) == newer and args.seed == 2


def test_default_folder(scripts, small, monkeypatch, tmp_path):
    """Without --output-dir the run folder is runs/<script>/<recipe>-s<seed>-<time>."""
    monkeypatch.chdir(tmp_path)
    _, folder = scripts["sft"].train(small("sft", output_dir=None, seed=3))
    assert folder.parent == Path("runs/sft") and folder.name.startswith("custom-s3-")


def test_flags_that_would_change_the_result_are_refused(script, small):
    """They are named. Flags that would not change it are accepted."""
    args = small("ppo_sentiment", save_every=0)
    script.train(args)
    resume_flags = ["--resume", args.output_dir]
    with pytest.raises(script.UserError, match="learning_rate"):
        script.parse_args([*resume_flags, "--learning-rate", "0.5"])
    with pytest.raises(script.UserError, match="custom, not tiny"):
        script.parse_args(["tiny", *resume_flags])
    assert script.parse_args([*resume_flags, "--save-every", "7"]).save_every == 7
    again = script.parse_args([*resume_flags, "--learning-rate", str(args.learning_rate)])
    assert (again.output_dir, again.dataset_name) == (args.output_dir, args.dataset_name)


MAY_CHANGE = {  # no effect on the result, or a longer run; of the two about micro-batches, see the next test
    *("save_every", "keep_checkpoints", "log_with", "total_episodes", "num_train_epochs"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "judge_fn", "judge_model", "judge_url"),
}


@pytest.mark.parametrize("name", ALL)
def test_every_flag_that_would_change_the_result_is_refused(scripts, small, tmp_path, monkeypatch, name):
    """Each field of Args in turn has another value than in the saved run."""
    module = scripts[name]
    args = small(name)
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "args.json").write_text(json.dumps({"args": asdict(args)}))
    refused = []
    names = [field.name for field in fields(module.Args) if field.name != "resume"]
    for name_of_field in names:
        other = replace(args, resume=str(saved), **{name_of_field: "another value"})
        monkeypatch.setattr(module.tyro, "cli", lambda *inputs, other=other, **named_inputs: other)
        try:
            module.parse_args(["--resume", str(saved)])
        except module.UserError as error:
            assert f"would change {name_of_field};" in str(error)
            refused.append(name_of_field)
    assert set(refused) == set(names) - MAY_CHANGE


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
    with pytest.raises(module.UserError, match=r"its batch was (\d+), this one is (\d+)") as error:
        resume(module, args.output_dir, *half)
    was, now = [int(word.strip(",:")) for word in str(error.value).split() if word.strip(",:").isdigit()]
    assert was == 2 * now
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


def test_resume_of_a_finished_run(scripts, small):
    """It trains nothing more and ends with the same model."""
    module = scripts["sft"]
    _, folder = module.train(small("sft"))
    model, rows = (folder / "model/model.safetensors").read_bytes(), rows_of(folder)
    resume(module, folder)
    assert (folder / "model/model.safetensors").read_bytes() == model
    assert rows_of(folder) == rows


def test_samples_and_evaluation_of_a_finished_run_are_written_once(scripts, small):
    """Resuming it writes the same samples and numbers again, in place of the old ones."""
    module = scripts["sft"]
    _, folder = module.train(small("sft", num_samples=3))
    files = ("samples.jsonl", "evaluation.json")
    before = [(folder / name).read_text() for name in files]
    assert len(rows_of(folder, "samples.jsonl")) == 3
    resume(module, folder)
    assert [(folder / name).read_text() for name in files][0] == before[0]
    assert json.loads((folder / files[1]).read_text())["after"] == json.loads(before[1])["after"]


def test_another_sharding_is_refused(scripts):
    """A checkpoint names the stage of DeepSpeed and its number of processes. Others do not fit it."""
    module = scripts["sft"]

    def run_of(stage, processes):
        """A run with this stage of DeepSpeed (None: without it) on so many processes."""
        run = object.__new__(module.Run)
        run.accelerator = SimpleNamespace(num_processes=processes)
        if stage is not None:
            engine = SimpleNamespace(zero_optimization_stage=lambda: stage)
            run.accelerator.deepspeed_engine_wrapped = SimpleNamespace(engine=engine)
        return run

    runs = [run_of(*parts) for parts in ((None, 1), (None, 2), (2, 1), (2, 2), (2, 4), (3, 2))]
    fits = [[True, True] + [False] * 4] * 2  # without DeepSpeed, any number of processes goes on
    fits += [[i == j for j in range(6)] for i in range(2, 6)]
    words = ["without DeepSpeed"] * 2
    words += [f"ZeRO-{stage} on {n} processes" for stage, n in ((2, 1), (2, 2), (2, 4), (3, 2))]
    for i, saved in enumerate(runs):
        state = dict(batch_size=8, sharding=saved.sharding())
        for j, run in enumerate(runs):
            if fits[i][j]:
                run.check_resumable("RUN", state, 8)
            else:
                with pytest.raises(module.UserError, match=f"that run was {words[i]}, and it must stay so"):
                    run.check_resumable("RUN", state, 8)
            with pytest.raises(module.UserError, match="its batch was 8, this one is 16"):
                run.check_resumable("RUN", state, 16)


def test_a_checkpoint_that_does_not_fit_changes_nothing(scripts, small):
    """It is refused before anything is loaded or deleted."""
    module = scripts["sft"]
    _, folder = module.train(small("sft", num_samples=0))
    [checkpoint] = (folder / "checkpoints").iterdir()
    state = torch.load(checkpoint / "state.pt", weights_only=True)
    later = checkpoint.with_name("000099")
    later.mkdir()
    metrics = (folder / "metrics.jsonl").read_text()
    about = (folder / "args.json").read_text()
    for changes in (dict(sharding="ZeRO-2 on 2 processes"), dict(batch_size=3)):
        torch.save(state | dict(update=0) | changes, checkpoint / "state.pt")
        with pytest.raises(module.UserError, match=f"--resume {checkpoint}"):
            resume(module, checkpoint)
        assert later.exists() and (folder / "metrics.jsonl").read_text() == metrics
        assert (folder / "args.json").read_text() == about


def test_a_refused_flag_is_forgotten(scripts, small):
    """After a resume with another batch was refused, the run continues with its own flags."""
    module = scripts["sft"]
    _, folder = module.train(small("sft", num_samples=0))
    with pytest.raises(module.UserError, match="its batch was 4, this one is 8"):
        resume(module, folder, "--per-device-train-batch-size", "8")
    resume(module, folder, "--keep-checkpoints", "3")
    args = json.loads((folder / "args.json").read_text())["args"]
    assert args["per_device_train_batch_size"] == 4 and args["keep_checkpoints"] == 3
