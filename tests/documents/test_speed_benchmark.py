"""benchmarks/speed: every comparison runs our scripts with flags that they have."""

import importlib.util
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
    ours = [changes for changes in compare.CONTESTANTS[name].values() if isinstance(changes, dict)]
    for changes in ours:
        _, script, *flags = compare.our_command(job, changes, tmp_path, tmp_path, 3, tmp_path / "run")
        args = scripts[script.stem].parse_args(list(map(str, flags)))
        assert args.dtype == "float32" and args.save_every == 0
        for function in getattr(args, "reward_fn", None) or []:
            assert Path(function.split(":")[0]).exists()
        batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
        if "batch" in job:
            batch *= args.num_mini_batches
            assert batch == job["batch"] and args.total_episodes == 3 * batch
            assert args.num_ppo_epochs * args.num_mini_batches == job["epochs"] * job["mini_batches"]
            assert (args.response_length, args.temperature) == (job["response"][1], job["temperature"])
        else:
            assert batch == job["micro_batch"] * job["accumulation"]
