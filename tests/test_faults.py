"""What goes wrong in a long run: disks, locks, the user's functions, a model that overflows, a process that fails, a damaged checkpoint."""

import json
import os
import platform
import resource
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from run_tools import ROOT, distance, flags_of, reward_file, rows_of, script_words, start_process, torchrun_words, weights
from test_bad_input import one_line
from test_resume import ALL, LONG, assert_same_run, stop_after

pytest_plugins = ["run_fixtures"]
RL = ("ppo_sentiment", "ppo_dialog", "rloo_tldr")
HOLDER = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print('held', flush=True); input()"


# ---- disks -----------------------------------------------------------------------------------------------------------
@contextmanager
def read_only(folder):
    """A folder that nobody can write into, root neither."""
    folder.mkdir()
    if os.geteuid():
        folder.chmod(0o555)
    elif subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("root writes everywhere, and may not mount here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], capture_output=True) if not os.geteuid() else folder.chmod(0o755)


def limit_files(size):
    """Let no file grow beyond so many bytes: what a disk or a quota does that is full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.fixture
def unlimited():
    """Whatever a test limits, files may grow again after it."""
    yield
    limit_files(resource.RLIM_INFINITY)


@pytest.mark.parametrize("script", ALL)
def test_read_only_folder(scripts, small, capsys, tmp_path, script):
    """Said before the first update."""
    with read_only(tmp_path / "locked") as folder:
        line = one_line(scripts[script], flags_of(small(script, output_dir=str(folder / "run"))), capsys)
        assert str(folder) in line and "Traceback" not in line


@pytest.mark.parametrize("script", ALL)
def test_disk_full_while_a_checkpoint_is_saved(scripts, small, monkeypatch, capsys, unlimited, script):
    """One line that names the checkpoint; the one before is whole, nothing half written is left, and --resume ends with the same bits."""
    module, args = scripts[script], small(script, "parts", **LONG[script])
    _, whole = module.train(small(script, "whole", **LONG[script]))
    log = module.Run.log

    def logged(self, metrics, *rest):
        log(self, metrics, *rest)
        limit_files(20_000 if metrics["update"] == 4 else resource.RLIM_INFINITY)

    with monkeypatch.context() as patch:
        patch.setattr(module.Run, "log", logged)
        line = one_line(module, flags_of(args), capsys)
    limit_files(resource.RLIM_INFINITY)
    assert "checkpoints/000004" in line and "File too large" in line
    assert [path.name for path in (Path(args.output_dir) / "checkpoints").iterdir()] == ["000002"]
    _, folder = module.train(module.parse_args(["--resume", args.output_dir]))
    assert_same_run(script, whole, folder)


@pytest.mark.parametrize("script", ALL)
def test_disk_full_while_the_model_is_saved(scripts, small, monkeypatch, capsys, unlimited, script):
    """The run can be resumed and writes the model then."""
    module, args = scripts[script], small(script, "parts")
    _, whole = module.train(small(script, "whole"))
    write = module.Run.write

    def written(self, name, text):
        write(self, name, text)
        limit_files(20_000 if name == "evaluation.json" else resource.RLIM_INFINITY)

    with monkeypatch.context() as patch:
        patch.setattr(module.Run, "write", written)
        line = one_line(module, flags_of(args), capsys)
    limit_files(resource.RLIM_INFINITY)
    assert "File too large" in line and "--resume" in line and not (Path(args.output_dir) / "model/model.safetensors").exists()
    _, folder = module.train(module.parse_args(["--resume", args.output_dir]))
    assert (folder / "model/model.safetensors").read_bytes() == (whole / "model/model.safetensors").read_bytes()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
@pytest.mark.parametrize("script", ALL)
def test_full_tmpfs(scripts, small, capsys, tmp_path, script):
    """A file system that is full while some checkpoint is saved: the last one that was saved is whole, and with room the run ends well."""
    module, disk = scripts[script], tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20M", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        args = small(script, output_dir=str(disk / "run"), **LONG[script] | dict(save_every=1, keep_checkpoints=99))
        _, whole = module.train(small(script, "whole", **LONG[script]))
        size = sum(path.stat().st_size for path in (whole / "checkpoints").glob("*/state.pt")) * 3 // 2  # of three checkpoints
        subprocess.run(["mount", "-o", f"remount,size={size + 100_000}", disk], check=True)
        line = one_line(module, flags_of(args), capsys)
        assert "No space left on device" in line and "checkpoints/" in line
        found = sorted(path.name for path in (disk / "run/checkpoints").iterdir())
        assert found and found == [f"{update:06d}" for update in range(1, len(found) + 1)]
        subprocess.run(["mount", "-o", "remount,size=40M", disk], check=True)
        _, folder = module.train(module.parse_args(["--resume", args.output_dir]))
        assert_same_run(script, whole, folder)
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


# ---- a folder in use ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("script", ALL)
def test_folder_in_use(scripts, small, capsys, script):
    """While another process goes on with a run, --resume is refused; when that one is dead, it is not."""
    module, args = scripts[script], small(script)
    module.train(args)
    lock, before = Path(args.output_dir) / ".lock", (Path(args.output_dir) / "args.json").read_bytes()
    open(lock).close()  # this process held it for its own run; a lock of POSIX goes with any closing of the file
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    capsys.readouterr()
    assert f"{args.output_dir} is in use" in one_line(module, ["--resume", args.output_dir], capsys)
    assert (lock.parent / "args.json").read_bytes() == before
    holder.kill()
    holder.communicate()
    module.main(["--resume", args.output_dir])


def test_folder_of_a_living_run(scripts, small, capsys, tmp_path):
    """The same with a run that lives: its reward function takes its time."""
    body = "import time\nopen('asked', 'w').close()\ntime.sleep(600)"
    args = small("ppo_sentiment", reward_fn=reward_file(tmp_path, body))
    process = start_process(script_words("ppo_sentiment", args), tmp_path)
    while not (tmp_path / "asked").exists():
        assert process.poll() is None, process.communicate()
    assert "is in use" in one_line(scripts["ppo_sentiment"], ["--resume", args.output_dir], capsys)
    process.kill()
    process.communicate()


# ---- the user's functions ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("script", RL)
@pytest.mark.parametrize("body, word", [
    ("return [1 / 0 for _ in prompts]", "reward.py:reward: ZeroDivisionError: division by zero (PATH, line 4)"),
    ("raise ValueError('one\\ntwo')", "ValueError: one two (PATH, line 4)"),
    ("import json\nreturn json.loads('{')", "JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1) "
     "(PATH, line 5)"),
    ("import sys\nsys.exit('enough')", "SystemExit: enough (PATH, line 5)"),
    ("import no_such_module", "No module named 'no_such_module' (PATH, line 4)"),
    ("return undefined", "NameError: name 'undefined' is not defined (PATH, line 4)"),
    ("import time\ntime.sleep(600)", "no answer within 0.3 seconds (PATH, line 5)"),
    ("while True:\n    try:\n        pass\n    except Exception:\n        pass", "no answer within 0.3 seconds"),
    ("return None", "list of"),
    ("return [1.0] * (len(prompts) + 1)", "list of"),
    ("return [[1.0]] * len(prompts)", "list of"),
    ("return ['1.0'] * len(prompts)", "list of"),
    ("return [None] * len(prompts)", "list of"),
    ("return [float('inf')] * len(prompts)", "the reward is inf for the prompt "),
    ("return [float('nan')] * len(prompts)", "the reward is nan for the prompt "),
    ("return [1e39] * len(prompts)", "the reward is 1e+39 for the prompt "),
    ("return [10 ** 400] * len(prompts)", "for the prompt "),
])  # fmt: skip
def test_reward_function_that_fails(scripts, small, monkeypatch, capsys, tmp_path, script, body, word):
    """What it raised, with its file and line; what it returned, with the prompt and the response; how long it was waited for."""
    monkeypatch.setattr(scripts[script], "FUNCTION_SECONDS", 0.3 if "within" in word else 600)
    name = reward_file(tmp_path, body)
    line = one_line(scripts[script], flags_of(small(script, reward_fn=name)), capsys)
    assert word.replace("PATH", name.rpartition(":")[0]) in line and not (tmp_path / "run/model").exists()


@pytest.mark.parametrize("script", RL)
@pytest.mark.parametrize("text, word", [
    ("def reward(:", "SyntaxError"), ("1 / 0", "line 1"), ("import time; time.sleep(60)", "within 0.3"),
])  # fmt: skip
def test_file_of_a_reward_function_that_fails(scripts, small, monkeypatch, capsys, tmp_path, script, text, word):
    """Before a run folder is made."""
    monkeypatch.setattr(scripts[script], "FUNCTION_SECONDS", 0.3 if "within" in word else 600)
    (tmp_path / "mine.py").write_text(text)
    line = one_line(scripts[script], flags_of(small(script, reward_fn=f"{tmp_path}/mine.py:reward")), capsys)
    assert word in line and "mine.py" in line and not (tmp_path / "run").exists()


def test_judge_function_that_fails(scripts, small, capsys, tmp_path):
    """The judge of rloo_tldr.py is named as the reward is."""
    args = small("rloo_tldr", judge_fn=reward_file(tmp_path, "return [1 / 0]"))
    assert "--judge-fn" in (line := one_line(scripts["rloo_tldr"], flags_of(args), capsys)) and "line 4" in line


@pytest.mark.parametrize("script", RL)
def test_other_numbers_of_a_reward_function(scripts, small, tmp_path, script):
    """Integers, bools, fractions and numpy's numbers are numbers."""
    numbers = "[1, True, fractions.Fraction(1, 3), numpy.float32(2.5), numpy.int64(3)]"
    body = f"import fractions, numpy\nreturn ({numbers} * len(prompts))[: len(prompts)]"
    _, folder = scripts[script].train(small(script, reward_fn=reward_file(tmp_path, body)))
    assert 1 <= rows_of(folder)[0]["env/reward_mean"] <= 3


# ---- a model that overflows ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("script, rate", [(script, 1e20) for script in ALL] + [(script, 1e3) for script in RL])
def test_steps_that_ruin_the_model(scripts, small, capsys, script, rate):
    """One line that says so, and neither a model nor a checkpoint whose weights or losses are not finite."""
    flags = LONG[script] | dict(optimizer="torch.optim.SGD", learning_rate=rate, max_grad_norm=None, lr_scheduler_type="constant")
    args = small(script, **flags | dict(save_every=1))
    line = one_line(scripts[script], flags_of(args), capsys)
    assert "finite" in line and "--learning-rate" in line
    folder = Path(args.output_dir)
    assert not (folder / "model").exists()
    for path in folder.glob("checkpoints/*/state.pt"):
        assert all(x.isfinite().all() for x in torch.load(path, weights_only=True)["parameters"].values())


# ---- processes ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", ["one fails", "all fail", "one hangs", "all see a bug"])
def test_a_process_that_fails_ends_the_run(small, tmp_path, case):
    """On all processes, and one of them says why, once."""
    bodies = {"one fails": "return 1 / 0 if os.environ['RANK'] == '1' else [0.0] * len(prompts)", "all fail": "return 1 / 0",
              "one hangs": "import time\ntime.sleep(600 * int(os.environ['RANK']))\nreturn [0.0] * len(prompts)"}  # fmt: skip
    flags = dict(reward_fn=reward_file(tmp_path, bodies[case])) if case in bodies else {}
    words = torchrun_words("ppo_sentiment", small("ppo_sentiment", **flags), 2)
    place = words.index(ROOT / "ppo_sentiment.py")
    source = words[place].read_text().replace("FUNCTION_SECONDS = 600", "FUNCTION_SECONDS = 5")
    if case == "all see a bug":
        source = source.replace("    accelerator = start(args)\n", "    accelerator = start(args)\n    bug\n")
    (tmp_path / "ppo_sentiment.py").write_text(source)
    process = start_process([*words[:place], tmp_path / "ppo_sentiment.py", *words[place + 1 :]], tmp_path)
    _, errors = process.communicate(timeout=300)
    ours = errors.split("torch/distributed/elastic", 1)[0].splitlines()
    assert process.returncode == 1
    if case == "all see a bug":
        assert sum(line.endswith("NameError: name 'bug' is not defined") for line in ours) == 1, errors
    else:
        word = "no answer within 5 seconds" if case == "one hangs" else "division by zero"
        assert sum(line.startswith("ppo_sentiment.py: --reward-fn") and word in line for line in errors.splitlines()) == 1, errors
        assert not [line for line in ours if "Connection" in line or "ppo_sentiment.py\", line" in line], errors


# ---- resume ------------------------------------------------------------------------------------------------------------
def test_no_parent_is_seen(scripts, monkeypatch):
    """In a container the process that started the run may not be visible: then nobody asked for several processes."""
    monkeypatch.setattr(psutil.Process, "parent", lambda self: None)
    monkeypatch.setattr(os, "getppid", lambda: 0)
    assert scripts["sft"].start(scripts["sft"].Args()).num_processes == 1


def test_what_is_freed_is_kept(tmp_path):
    """Linux would give each new tensor of 64 MiB fresh pages, a fault for nearly each of 16,384; memory that it has kept costs none.

    The first tensors do not count: glibc before 2.38 does not find the place of a freed one at once, where they are aligned.
    """
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        pytest.skip("another C library has no mallopt")
    code = """
import resource, torch, ppo_sentiment
ppo_sentiment.start(ppo_sentiment.Args())
faults = []
for _ in range(24):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(faults)
"""
    process = start_process([sys.executable, "-c", code], ROOT)
    faults = json.loads(process.communicate(timeout=120)[0].splitlines()[-1])
    assert sum(faults[-8:]) < 16_000 < faults[0], faults  # a page or two may be there before


@pytest.mark.parametrize("error", [torch.distributed.DistNetworkError("timed out"), KeyError("MASTER_ADDR")])
def test_an_error_before_the_processes_have_met(scripts, monkeypatch, capsys, error):
    """Without torchrun nobody keeps the count of failures yet, and each process says its own."""
    def store(*_, **__):
        raise error

    monkeypatch.setattr(torch.distributed, "TCPStore", store)
    for name, value in dict(WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="1").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end:
        scripts["sft"].fail(scripts["sft"].UserError("what is wrong"))
    assert end.value.code == 2 and capsys.readouterr().err == "sft.py: what is wrong\n"


@pytest.mark.parametrize("script", ALL)
def test_resume_with_more_updates(scripts, small, script):
    """At a constant learning rate a run that was made longer is the run that was longer from the start."""
    module, name = scripts[script], "num_train_epochs" if script in ("sft", "reward_model") else "total_episodes"
    flags = LONG[script] | dict(lr_scheduler_type="constant")
    long = getattr(small(script, **flags), name)
    _, whole = module.train(small(script, "whole", **flags))
    args = small(script, "parts", **flags | {name: long / 2 if isinstance(long, float) else long // 2})
    module.train(args)
    assert len(rows_of(args.output_dir)) == 3
    _, folder = module.train(module.parse_args(["--resume", args.output_dir, f"--{name}", str(long)]))
    assert timeless_weights(whole, folder) and [row["update"] for row in rows_of(folder)] == [1, 2, 3, 4, 5, 6]


def timeless_weights(one, other):
    """The models of two runs are equal to the bit."""
    return (one / "model/model.safetensors").read_bytes() == (other / "model/model.safetensors").read_bytes()


def test_resume_with_dropout(scripts, small, monkeypatch):
    """A model that starts at random has dropout; stopped in the middle and resumed, its masks are those of one go."""
    module, shape = scripts["sft"], "gpt2 n_embd=32 n_layer=1 n_head=2 n_positions=256 resid_pdrop=0.5"
    flags = LONG["sft"] | dict(from_config=shape, train_tokenizer=300, save_every=0)
    _, whole = module.train(small("sft", "whole", **flags))
    args = small("sft", "parts", **flags)
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        stop_after(patch, module, 3)
        module.train(args)
    _, folder = module.train(module.parse_args(["--resume", args.output_dir]))
    assert timeless_weights(whole, folder)


@pytest.mark.parametrize("script", ALL)
def test_resume_with_other_micro_batches(scripts, small, monkeypatch, script):
    """Half the rows a pass and twice the passes: the same run up to rounding. Another batch is refused, and both are named."""
    module, flags = scripts[script], LONG[script] | dict(optimizer="torch.optim.SGD", learning_rate=0.1)
    _, whole = module.train(small(script, "whole", **flags))
    args = small(script, "parts", **flags)
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        stop_after(patch, module, 3)
        module.train(args)
    n = args.per_device_train_batch_size
    with pytest.raises(module.UserError, match=f"of {n} rows, here of {n // 2}: "):
        module.train(module.parse_args(["--resume", args.output_dir, "--per-device-train-batch-size", str(n // 2)]))
    changes = ["--per-device-train-batch-size", str(n // 2), "--gradient-accumulation-steps", "2"]
    _, folder = module.train(module.parse_args(["--resume", args.output_dir, *changes]))
    assert distance(weights(whole / "model"), weights(folder / "model")) < 1e-5


def test_resume_on_other_processes(scripts, small, tmp_path):
    """A run of one process goes on with two, and ends with the same weights up to rounding."""
    module, flags = scripts["ppo_sentiment"], dict(total_episodes=32, save_every=2, optimizer="torch.optim.SGD", learning_rate=0.1)
    _, whole = module.train(small("ppo_sentiment", "whole", **flags))
    args = small("ppo_sentiment", "parts", **flags | dict(total_episodes=16))
    module.train(args)
    open(tmp_path / "parts/.lock").close()  # as in test_folder_in_use
    words = torchrun_words("ppo_sentiment", args, 2)
    words = words[: words.index(ROOT / "ppo_sentiment.py") + 1]
    changes = ["--resume", args.output_dir, "--total-episodes", "32", "--per-device-train-batch-size", "2"]
    process = start_process([*words, *changes], tmp_path)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert json.loads((tmp_path / "parts/args.json").read_text())["world_size"] == 2
    assert distance(weights(whole / "model"), weights(tmp_path / "parts/model")) < 1e-5


@pytest.mark.parametrize("script", ALL)
def test_damaged_runs(scripts, small, capsys, script):
    """A checkpoint that is cut or does not exist, and flags that are cut, are named."""
    module, args = scripts[script], small(script)
    module.train(args)
    folder = Path(args.output_dir)
    assert "000099" in one_line(module, ["--resume", str(folder / "checkpoints/000099")], capsys)
    for path in (next(folder.glob("checkpoints/*/state.pt")), folder / "args.json"):
        path.write_bytes(path.read_bytes()[:100])
        assert str(path) in one_line(module, ["--resume", str(folder)], capsys)


def test_drafts_are_removed(scripts, small):
    """What a kill left half written goes when the run goes on."""
    module, args = scripts["sft"], small("sft")
    module.train(args)
    draft = Path(args.output_dir) / "checkpoints/.000007"
    draft.mkdir()
    (draft / "state.pt").write_bytes(b"half a checkpoint")
    module.train(module.parse_args(["--resume", args.output_dir]))
    assert not draft.exists()
