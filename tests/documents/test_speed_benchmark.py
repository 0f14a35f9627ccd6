"""benchmarks/speed: every comparison runs our scripts with flags that they have, on the batch that it
names."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPEED = ROOT / "benchmarks/speed"
SPEC = importlib.util.spec_from_file_location("compare", SPEED / "compare.py")
compare = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(compare)


@pytest.mark.parametrize("name", compare.JOBS)
def test_our_command_is_the_job(name, scripts, tmp_path):
    job = compare.JOBS[name]
    for changes in (entry for entry in compare.CONTESTANTS[name].values() if isinstance(entry, dict)):
        words, processes = (
            compare.our_command(job, changes, tmp_path, tmp_path, 3, tmp_path / "run"),
            changes.get("processes", 1),
        )
        place = next(i for i, word in enumerate(words) if isinstance(word, Path))
        script, flags = words[place], words[place + 1 :]
        args = scripts[script.stem].parse_args(list(map(str, flags)))
        assert args.dtype == changes.get("dtype", "float32") and args.save_every == 0
        for function in getattr(args, "reward_fn", None) or []:
            assert Path(function.split(":")[0]).exists()
        if "batch" in job:
            local_batch_size = args.per_device_train_batch_size * args.gradient_accumulation_steps
            assert (
                local_batch_size * args.num_mini_batches * processes == job["batch"]
                and args.total_episodes == 3 * job["batch"]
            )
            assert args.num_ppo_epochs * args.num_mini_batches == job["epochs"] * job["mini_batches"]
            assert (args.response_length, args.temperature) == (job["response"][1], job["temperature"])
        else:
            batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * processes
            assert batch == job["micro_batch"] * job["accumulation"]


@pytest.mark.parametrize("name", compare.JOBS)
def test_every_peer_has_its_script(name):
    for environment, script, *_ in (
        entry for entry in compare.CONTESTANTS[name].values() if not isinstance(entry, dict)
    ):
        assert (SPEED / "peers" / script).exists() and f"-m venv {environment}" in (
            SPEED / "install_peers.sh"
        ).read_text()


def test_useful_work_by_hand():
    """10 weights in the body, 4 in the head, prompts of 3 tokens in all and responses of 2: generation,
    reference, two epochs."""
    job = dict(script="rloo_tldr.py", epochs=2, flops=dict(forward=2, reward=1))
    assert compare.useful_flops(job, 10, 4, 3, 2) == (2 + 2 + 6 + 6) * (10 * 5 + 4 * 2) + 2 * 10 * 5
    assert (
        compare.useful_flops(job, 10, 4, 3, 2, 4) == (2 + 2 + 4 + 4) * (10 * 5 + 4 * 2) + 2 * 10 * 5
    )  # LoRA
    job["flops"] = dict(forward=2, reward=2, critic=True)  # PPO: the critic reads and learns
    assert compare.useful_flops(job, 10, 4, 3, 2) == 16 * (10 * 5 + 4 * 2) + 2 * 2 * 50 + 12 * 50


def runs_by_hand(file, gflops=1.0):
    """Write two rounds of ours fp32 and of theirs, of batches of 10 episodes. -> their lines, and the job"""
    job = dict(script="rloo_tldr.py", model="m", batch=10, epochs=1, flops=dict(forward=2, reward=1))
    machine = dict(cpu="a CPU", cores=2, flags=["avx2"], threads=1)
    rest = dict(
        peak_memory_mb=100,
        gemm_fp32_gflops=gflops,
        gemm_bf16_gflops=2.0,
        parameters=[10, 4],
        load_average=0.0,
    )
    rest |= dict(job=job, machine=machine)
    lines = []
    for ours, name, rounds in ((True, "ours fp32", (1.0, 2.0)), (False, "theirs", (4.0, 4.0))):
        for seconds in rounds:
            batch = dict(
                seconds=seconds,
                rollout=seconds / 4,
                train=seconds * 3 / 4,
                prompt_tokens=30,
                response_tokens=20,
            )
            lines.append(
                dict(contestant=name, ours=ours, batches=[batch | dict(seconds=99.0), batch, batch]) | rest
            )
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines, job


@pytest.fixture
def profile_update(monkeypatch):
    monkeypatch.syspath_prepend(SPEED)
    return importlib.import_module("profile_update")


def test_bounds_by_hand(profile_update, tmp_path, monkeypatch):
    """1.5 s; 6,800 useful operations, 6,800 a second at full speed: an MFU of 1 in 1 s and 1/2 in 2 s."""
    monkeypatch.setattr(profile_update, "FILE", tmp_path / "profiles.jsonl")
    runs_by_hand(tmp_path / "rloo.jsonl", gflops=6.8e-6)  # (2 + 2 + 6) * (10 * 50 + 4 * 20) + 2 * 10 * 50
    assert "| rloo | theirs | 1.50 | 1.12 | 4.00 | 2.67 | 3.56 |" in profile_update.bounds(["rloo"])


def test_phases_do_not_count_what_runs_inside_them(profile_update, monkeypatch):
    """A minute of its own before and after two inside, and three of nobody's."""
    now = [0.0]
    monkeypatch.setattr(profile_update.time, "perf_counter", lambda: 60 * now[0])

    class Script:
        def outer(self):
            now[0] += 1
            Script.inner(2)
            now[0] += 1

        @staticmethod
        def inner(minutes):
            now[0] += minutes

    clock = profile_update.Clock()
    for name in ("outer", "inner"):
        clock.time(Script, name, name)
    now[0] += 3
    Script().outer()
    assert clock.seconds == dict(rest=180, outer=120, inner=120)


@pytest.mark.parametrize(
    "phase",
    ["generation", "transformer, forward", "logits and their gradient", "transformer, backward", "optimizer"],
)
def test_every_phase_has_functions(profile_update, phase, scripts):
    """Each name is one that a script has, so that no phase is empty because a function was renamed."""
    for name in profile_update.PHASES[phase]:
        assert any(profile_update.find(script, name) for script in scripts.values()), name


def test_table_from_results(tmp_path, capsys):
    """Two rounds by hand: the first batch of a run does not count, a ratio is of medians, its range of the
    rounds."""
    lines, job = runs_by_hand(tmp_path / "rloo.jsonl")
    args = type("Args", (), dict(results=tmp_path))
    compare.show("rloo", args)
    shown = capsys.readouterr().out
    assert "| theirs | 2.5 | 12.5 | 4 | 1 | 3 | 100 |" in shown
    assert "| ours fp32 | 7.5 | 37.5 | 1.5 |" in shown  # medians of 10 and 5 episodes a second
    assert "| ours fp32 | 3.00 (2.00 to 4.00) |" in shown
    assert "| episodes/s, ours / peer | theirs |" in shown and "| tokens/s, ours / peer" not in shown
    drawn = [
        line | dict(job=job | dict(response=(4, 15))) for line in lines
    ]  # lengths are drawn: episodes are not alike
    (tmp_path / "rloo.jsonl").write_text("".join(json.dumps(line) + "\n" for line in drawn))
    compare.show("rloo", args)
    shown = capsys.readouterr().out
    assert "| episodes/s, ours / peer | theirs |" in shown and "| tokens/s, ours / peer | theirs |" in shown
