"""benchmarks/speed: every comparison runs our scripts with flags that they have, and its arithmetic."""

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


def test_a_table_by_hand(tmp_path, capsys):
    """The first batch of a run does not count; a ratio is of medians, and its range that of the rounds."""
    job = dict(script="rloo_tldr.py", model="m", batch=10, epochs=1)
    rest = dict(
        peak_memory_mb=100,
        load_average=0.0,
        machine=dict(cpu="a CPU", cores=2, flags=["avx2"], threads=1),
        job=job | dict(response=(4, 15)),  # lengths are drawn, so tokens/s are compared too
    )
    lines = []
    for name, rounds in (("ours fp32", (1.0, 2.0)), ("theirs", (4.0, 4.0))):
        for s in rounds:
            batch = dict(seconds=s, rollout=s / 4, train=s * 3 / 4, prompt_tokens=30, response_tokens=20)
            batches = [batch | dict(seconds=99.0), batch, batch]
            lines.append(dict(contestant=name, ours=name != "theirs", batches=batches) | rest)
    (tmp_path / "rloo.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    compare.show("rloo", type("Args", (), dict(results=tmp_path)))
    shown = capsys.readouterr().out
    assert "| theirs | 2.5 | 12.5 | 4 | 1 | 3 | 100 |" in shown
    assert "| ours fp32 | 7.5 | 37.5 | 1.5 |" in shown  # medians of 10 and 5 episodes per second
    assert "| episodes/s, ours / peer | theirs |" in shown and "| tokens/s, ours / peer | theirs |" in shown
    assert shown.count("| ours fp32 | 3.00 (2.00 to 4.00) |") == 2
