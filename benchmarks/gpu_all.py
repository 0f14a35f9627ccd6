"""Everything that has to be measured on a GPU: a list of steps, each a command with a time limit.

    python benchmarks/gpu_all.py --out runs/gpu --limit 580 --models MODELS --data DATA
    python benchmarks/gpu_all.py --out runs/gpu-toy --toy    # all steps on a CPU, at toy size

Call it again until the table says that all steps are done. As soon as a step ends, --out has its file
NAME.json: lines that it printed as JSON, the files that it names in `files`, and its last lines. A step whose
file says "done" or "failed" does not run again: delete the file to repeat it. A step that was cut by --limit
runs again, and continues if it is a job of real_models.sh. MODELS and DATA are the folders of real_models.sh,
and optional: without them, random weights answer most questions about memory, speed and correctness.

The toy uses the checkpoints of this repository. A recording is emulated by tests/cuda_graphs.py, and `train`
runs on the pretended GPU of tests/device_check.py. So on a GPU, only CUDA itself is new.
"""

import argparse
import importlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
GRACE = 20  # seconds that a run has after SIGTERM, to save a checkpoint

# ---- The steps ---------------------------------------------------------------------------------------------


@dataclass
class Step:
    """A command of bash, run in the root of the repository."""

    name: str
    limit: int  # seconds
    command: str  # may use $PYTHON, $MODELS, $DATA, $WORK (its own folder), $SHARED (one of all steps)
    toy: str = ""  # more flags, for --toy
    needs: str = ""  # files, folders and modules: without them, the step is skipped
    files: str = ""  # what its file keeps, in $SHARED or else $WORK


SHAPE = "$PYTHON benchmarks/gpu_all.py shape $SHARED/qwen"
TRAIN = "$PYTHON benchmarks/gpu_all.py train"
ROLLOUT = "$PYTHON benchmarks/gpu_rollout.py $WORK/rollout.json"
TORCHRUN = "$PYTHON -m torch.distributed.run --standalone --nproc_per_node"
RUN = "run/metrics.jsonl run/evaluation.json run/args.json"
SMALL = "--dtype bfloat16 --num-eval-prompts 8 --save-every 0 --output-dir $WORK/run"
BATCHES = {"ppo_sentiment": 128, "ppo_dialog": 128, "rloo_tldr": 128, "grpo_math": 256, "grpo_tools": 256}

# The recipe on random weights: prompts of about 200 tokens, and responses that never end early.
RANDOM = (
    "gsm8k-qwen-0.5b --model-name-or-path $SHARED/qwen --dataset-name data/arithmetic --prompt-template None "
    '--system-prompt "$(printf "abc %.0s" {1..45})" --num-eval-prompts 8 --num-eval-samples 1 --save-every 0 '
    "--num-sample-generations 0 --output-dir $WORK/run"
)
# The recipe on real weights.
QWEN = "$MODELS/qwen2.5-coder-0.5b-instruct"
GSM8K_DATA = f"--model-name-or-path {QWEN} --dataset-name $DATA/gsm8k --system-prompt "
GSM8K_DATA += r"'Think step by step, and put your final answer within \boxed{}.'"  # the recipe's
GSM8K = f"{GSM8K_DATA} --save-every 0 --output-dir $WORK/run"
GSM8K_EVALUATION = "--num-eval-prompts 1319 --num-eval-samples 4 --local-rollout-forward-batch-size 1024"
GSM8K_NEEDS = f"{QWEN} $DATA/gsm8k"
REAL = "bash benchmarks/real_models.sh"
VARIANTS = {  # name -> title of a block in docs/grpo_math.md, flags
    "dr-grpo": ("Dr. GRPO", ""),
    "reinforce-pp": ("REINFORCE++", ""),
    # With one optimizer step per batch, nothing would be clipped.
    "two-steps": ("", "--num-mini-batches 2 --gradient-accumulation-steps 4"),
    "clip-higher": ("Clip-higher", "--num-mini-batches 2 --gradient-accumulation-steps 4"),
}

TOY_SHAPES = "--toy --shapes gpt2-124m llama-1b"
TOY_BATCH = "--total-episodes 16 --per-device-train-batch-size 8 --gradient-accumulation-steps 1"
TOY_PPO = f"{TOY_BATCH} --num-mini-batches 1 --num-eval-prompts 4"
TOY_GROUPS = f"{TOY_BATCH} --response-length 8 --num-eval-prompts 4"
TOY_DPO = (
    "--dataset-name $DATA/pairs --per-device-train-batch-size 4 --num-eval-prompts 4 --response-length 8"
)
TOY_GRPO = f"{TOY_GROUPS} --num-eval-samples 2 --local-rollout-forward-batch-size 16"
TOY_QWEN = f"{TOY_GRPO} --prompt-template None --system-prompt None --max-prompt-length 64"
TOY_QWEN += " --num-sample-generations 0"


def all_steps(is_toy):
    """-> list of Step, in the order in which they run"""
    steps = []

    def add(*values, **named):
        steps.append(Step(*values, **named))

    # Right? Tests; recorded steps next to called ones and to the plain loop; memory over 30 updates.
    tests, needs = "$PYTHON -m pytest -q $XDIST", "module:pytest module:hypothesis"
    add("tests-math", 300, f"{tests} tests/math", "-k test_grpo_records_too", needs)
    whole_runs = "tests/runs/test_rloo_tldr.py tests/runs/test_grpo_math.py"  # the scripts choose the GPU
    add("tests-runs", 240, f"{tests} {whole_runs}", "-k test_ratios_are_to_the_policy", needs)
    right = f"{ROLLOUT} --only right --shapes qwen2.5-0.5b gpt2-124m pythia-1b llama-1b"
    for script in ("rloo_tldr", "grpo_math", "grpo_tools"):
        add(f"recorded-{script}", 180, f"{right} --script {script}", TOY_SHAPES, files="rollout.json")
    add("recorded-lora", 180, f"{right} --lora", TOY_SHAPES, files="rollout.json")
    for script, batch in BATCHES.items():
        toy = TOY_PPO if script.startswith("ppo") else TOY_GROUPS
        add(f"memory-{script}", 90, f"{TRAIN} {script} tiny --total-episodes {30 * batch} {SMALL}", toy)
    add("memory-dpo_tldr", 90, f"{TRAIN} dpo_tldr tiny --num-train-epochs 0.2 {SMALL}", TOY_DPO)
    quantized = "--load-in-8bit --lora-r 8 --total-episodes 1024"  # these must not be recorded
    add("8bit", 90, f"{TRAIN} grpo_math tiny {quantized} {SMALL}", TOY_GROUPS, "module:bitsandbytes")

    # Questions about memory and speed, with random weights.
    add("rollout", 240, ROLLOUT, "--toy --shapes qwen2.5-0.5b", files="rollout.json")
    micro_batches = "--per-device-train-batch-size 8 --gradient-accumulation-steps 32"
    for name, options, flags in (
        ("24gb", "", f"--total-episodes 768 {micro_batches}"),
        ("24gb-limit", "--gib 23.4", f"--total-episodes 768 {micro_batches}"),
        ("24gb-checkpointing", "--gib 23.4", "--total-episodes 768 --gradient-checkpointing"),
        # torch.cuda.graph returns all free memory to the driver before it records.
        ("emptied", "", "--total-episodes 1536"),
        ("not-emptied", "--no-empty", "--total-episodes 1536"),
    ):
        command = f"{SHAPE} && {TRAIN} {options} grpo_math {RANDOM} {flags}"
        add(name, 120, command, TOY_GRPO)
    add("casts", 180, f"{ROLLOUT} --only casts --shapes llama-7b --lora", "--toy", files="rollout.json")
    nccl = f"{TORCHRUN} 1 benchmarks/gpu_all.py train rloo_tldr tiny --total-episodes 1024 {SMALL}"
    add("nccl", 90, nccl, TOY_GROUPS)  # next to recordings
    gloo = (
        f"{TORCHRUN} 2 benchmarks/gpu_all.py train --gloo grpo_math {RANDOM} --per-device-train-batch-size 16"
    )
    gloo = f"{SHAPE} && ACCELERATE_BYPASS_DEVICE_MAP=true {gloo} --total-episodes 768"
    add("two-ranks", 120, gloo, TOY_GRPO)  # on one GPU
    # How far the ratios of an unchanged policy are from 1: sqrt(2 * approxkl), because nothing is learned.
    for name, flags in {"gap": "", "gap-checkpointing": "--gradient-checkpointing"}.items():
        command = (
            f"$PYTHON grpo_math.py gsm8k-qwen-0.5b {GSM8K} --learning-rate 1e-30 --total-episodes 512 {flags}"
        )
        command += " --num-mini-batches 2 --gradient-accumulation-steps 4 --num-eval-prompts 8"
        add(name, 120, command, TOY_QWEN, GSM8K_NEEDS, "run/metrics.jsonl")

    # GSM8K, as in docs/real_models.md.
    for name, seed, flags in (
        ("gsm8k-seed2", 2, ""),
        ("gsm8k-seed3", 3, ""),
        ("gsm8k-200-updates", 1, "--total-episodes 51200"),
    ):
        command = f"{REAL} qwen-gsm8k {seed} $MODELS $DATA $SHARED/gsm8k --save-every 20 {flags}"
        add(name, 1300, command, TOY_QWEN, GSM8K_NEEDS, RUN.replace("run/", f"gsm8k/grpo-seed{seed}/"))
    # TRL next to ours, three updates each.
    three = "--learning-rate 1e-6 --total-episodes 768"
    ours = f"$PYTHON grpo_math.py gsm8k-qwen-0.5b {GSM8K} {three} --num-eval-prompts 64 --num-eval-samples 1"
    add("trl-ours", 150, ours, TOY_QWEN, GSM8K_NEEDS, "run/metrics.jsonl")
    for name, config, needs in (
        ("generate", "{}", ""),
        ("continuous-batching", '{"use_transformers_continuous_batching": true}', ""),
        ("vllm", '{"use_vllm": true, "vllm_mode": "colocate"}', "module:vllm"),
    ):
        command = f"GRPO_CONFIG='{config}' $PYTHON benchmarks/trl_gsm8k.py $WORK/trl.json {three}"
        command += f" {GSM8K_DATA}"
        toy, needs = f"{TOY_QWEN} --total-episodes 8", f"{GSM8K_NEEDS} module:trl {needs}"
        add(f"trl-{name}", 240, command, toy, needs, "trl.json")
    # The same with vLLM as the sampler of our script. On a CPU it has run; on a GPU, not yet.
    vllm = "$PYTHON benchmarks/vllm_runs.py apply grpo_math && " + ours.replace(
        "grpo_math.py", "grpo_math_vllm.py"
    )
    add("vllm-rollout", 240, vllm, TOY_QWEN, f"{GSM8K_NEEDS} module:vllm", "run/metrics.jsonl")
    # PPO on real data.
    for job, data in {"smollm2-imdb": "$DATA/imdb", "smollm2-dailydialog": "$DATA/daily_dialog"}.items():
        needs = f"$MODELS/smollm2-135m-instruct $MODELS/minilm-l6 {data}"
        command = f"{REAL} {job} 1 $MODELS $DATA $SHARED/{job}"
        add(job, 1300, command, TOY_PPO, needs, RUN.replace("run/", f"{job}/ppo-seed1/"))
    # The lines to change of docs/grpo_math.md, next to gsm8k-seed2 and gsm8k-seed3.
    for seed in (2,) if is_toy else (2, 3):
        for name, (title, flags) in VARIANTS.items():
            command = f'$PYTHON benchmarks/gpu_all.py variant "{title}" $WORK gsm8k-qwen-0.5b --seed {seed}'
            command += f" {GSM8K} {GSM8K_EVALUATION} {flags}"
            add(f"variant-{name}-seed{seed}", 540, command, TOY_QWEN, GSM8K_NEEDS, RUN)
    # A calculator, and the same run in which a response ends at its first call.
    for name, flags in {"tools": "", "no-tools": "--max-turns 1"}.items():
        prompted = GSM8K.replace("step by step,", "step by step, use the calculator,")  # that recipe's
        command = f"$PYTHON grpo_tools.py gsm8k-tools-qwen-0.5b {prompted} {GSM8K_EVALUATION} {flags}"
        add(name, 540, command, TOY_QWEN, GSM8K_NEEDS, RUN)
    return steps


# ---- Run them ----------------------------------------------------------------------------------------------


def missing(step):
    """What a step needs and does not find. -> list of str"""
    names = os.path.expandvars(step.needs).split()
    modules = [name.removeprefix("module:") for name in names if name.startswith("module:")]
    paths = [name for name in names if not name.startswith("module:")]
    no_modules = [name for name in modules if importlib.util.find_spec(name) is None]
    return no_modules + [name for name in paths if not Path(name).exists()]


def run_step(step, seconds, work):
    """Run a command for at most this many seconds. -> what its file says"""
    folder = work / step.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = f"{step.command} {step.toy}" if os.environ.get("TOY") else step.command
    start = time.time()
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=ROOT,
            env=os.environ | {"WORK": str(folder)},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            state = "failed" if process.wait(timeout=seconds) else "done"
        except subprocess.TimeoutExpired:
            state = "cut"
        finally:
            end_group(process)
    lines = (folder / "log").read_text(errors="replace").splitlines()
    texts = [line for line in lines if re.search(r"\w", line)]  # without the borders of boxes
    reason = texts[-1] if state == "failed" and texts else ""
    files = {}
    for name in step.files.split():
        for path in (work / "shared" / name, folder / name):
            if path.exists():
                files[name] = path.read_text()
        if state == "done" and name not in files:
            state, reason = "failed", f"did not write {name}"
    return {
        "state": state,
        "reason": reason,
        "device": device_name(),
        "seconds": round(time.time() - start, 1),
        "exit_code": process.returncode,
        "command": command,
        "printed": [line for line in lines if line.startswith('{"')],
        "files": files,
        "last_lines": lines[-40:],
    }


def device_name():
    """Calls may run on different GPUs."""
    words = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    has_driver = shutil.which(words[0])
    return subprocess.run(words, capture_output=True, text=True).stdout.strip() if has_driver else "no GPU"


def end_group(process):
    """End what is left of a step: first by SIGTERM, on which the scripts save a checkpoint."""
    try:
        for number in (signal.SIGTERM, signal.SIGKILL):
            os.killpg(process.pid, number)
            for _ in range(10 * GRACE):
                process.poll()
                os.killpg(process.pid, 0)  # raises when all its processes are gone
                time.sleep(0.1)
    except ProcessLookupError:
        process.wait()


def run_all(steps, options):
    """Run all steps that have not ended yet, and print a table. -> exit code"""
    end = time.time() + options.limit
    out = options.out.resolve()
    work = out.with_name(out.name + "-work")
    out.mkdir(parents=True, exist_ok=True)
    os.environ |= {"PYTHON": sys.executable, "SHARED": str(work / "shared")}
    os.environ |= {"TOY": "1" if options.toy else ""}
    os.environ |= {"MODELS": str(options.models.resolve()), "DATA": str(options.data.resolve())}
    os.environ |= {"XDIST": "-n 8" if importlib.util.find_spec("xdist") and not options.toy else ""}
    if options.toy:
        make_toy_folders(work / "toy", work / "shared")
    rows = []
    for step in steps:
        file = out / f"{step.name}.json"
        record = json.loads(file.read_text()) if file.exists() else {}
        left = end - time.time() - GRACE  # a cut step may take so long to save a checkpoint
        seconds = ""
        if record.get("state") in ("done", "failed"):
            state, seconds, note = record["state"], record["seconds"], f"earlier {record['reason']}"
        elif missing(step):
            state, note = "skipped", "no " + ", ".join(missing(step))
        elif left < GRACE:
            state, note = "not started", "no time left"
        else:
            record = run_step(step, min(step.limit, left), work)
            if record["state"] == "cut" and step.limit <= left:
                record |= {"state": "failed", "reason": f"longer than {step.limit} s"}
            file.write_text(json.dumps(record, indent=1) + "\n")
            state, seconds, note = record["state"], record["seconds"], record["reason"]
            if options.zip:
                shutil.make_archive(f"{options.zip}.part", "zip", out)
                os.replace(f"{options.zip}.part.zip", options.zip)
        rows.append((step.name, state, seconds, note[:200]))
        print("{:26} {:12} {:6}  {}".format(*rows[-1]), flush=True)
    table = ["| step | state | seconds | |", "|---|---|---|---|"]
    table += ["| {} | {} | {} | {} |".format(*row) for row in rows]
    (out / "table.md").write_text("\n".join(table) + "\n")
    counts = {state: [row[1] for row in rows].count(state) for state in sorted({row[1] for row in rows})}
    print("\n" + ", ".join(f"{count} {state}" for state, count in counts.items()))
    return int(not {row[1] for row in rows} <= {"done", "skipped"})


def make_toy_folders(toy, shared):
    """The folders of real_models.sh: MODELS, DATA, and the stages before PPO."""
    links = {
        toy / "models/qwen2.5-coder-0.5b-instruct": "checkpoints/tools-sft",
        toy / "models/smollm2-135m-instruct": "checkpoints/reviews-lm",
        toy / "models/minilm-l6": "checkpoints/reviews-sentiment",
        toy / "data/gsm8k": "data/calculator",
        toy / "data/imdb": "data/reviews",
        toy / "data/daily_dialog": "data/dialogs",
        shared / "smollm2-imdb/imdb": "data/reviews",
        shared / "smollm2-imdb/imdb-judge": "data/reviews",
        shared / "smollm2-imdb/judge-start": "checkpoints/reviews-judge",
        shared / "smollm2-imdb/sft/model": "checkpoints/reviews-lm",
        shared / "smollm2-imdb/reward/model": "checkpoints/reviews-sentiment",
        shared / "smollm2-imdb/judge/model": "checkpoints/reviews-judge",
        shared / "smollm2-dailydialog/sft/model": "checkpoints/dialogs-lm",
        shared / "smollm2-dailydialog/intent/model": "checkpoints/dialogs-intent",
    }
    for link, target in links.items():
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(ROOT / target)
        if link.name == "model":
            (link.parent / "finished").touch()
    (toy / "data/pairs").mkdir(exist_ok=True)  # a few, because the reference of dpo_tldr.py reads all pairs
    pairs = (ROOT / "data/tldr-preference/test.jsonl").read_text().splitlines(keepends=True)
    (toy / "data/pairs/train.jsonl").write_text("".join(pairs[:40]))
    (toy / "data/pairs/test.jsonl").write_text("".join(pairs[40:50]))
    os.environ |= {"MODELS": str(toy / "models"), "DATA": str(toy / "data")}


# ---- Commands that steps use -------------------------------------------------------------------------------


def save_shape(folder):
    """A model of the shape of Qwen2.5-0.5B with random weights, and a tokenizer."""
    if Path(folder, "config.json").exists():
        return
    import torch
    import transformers

    sizes = dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14)
    sizes |= dict(num_key_value_heads=2, vocab_size=151_936, tie_word_embeddings=True)
    if os.environ.get("TOY"):
        sizes |= dict(hidden_size=56, intermediate_size=64, num_hidden_layers=2, vocab_size=1000)
    config = transformers.Qwen2Config(**sizes, max_position_embeddings=4096, eos_token_id=2, pad_token_id=0)
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "checkpoints/arithmetic-tokenizer")
    tokenizer.save_pretrained(folder)


def run_variant(title, folder, *flags):
    """grpo_math.py with one of the lines to change of its page, or ("") as it is."""
    sys.path.insert(0, str(ROOT / "tests"))
    from diff_blocks import apply_block, blocks

    source = (ROOT / "grpo_math.py").read_text()
    if title:
        source = apply_block(source, blocks((ROOT / "docs/grpo_math.md").read_text())[title])
    Path(folder, "grpo_math.py").write_text(source)
    for part in ("data", "checkpoints"):
        Path(folder, part).symlink_to(ROOT / part)
    os.chdir(folder)
    os.execv(sys.executable, [sys.executable, "grpo_math.py", *flags])


MEMORY = {  # our name -> that of torch.cuda.memory_stats
    "allocated": "allocated_bytes.all.current",
    "peak_allocated": "allocated_bytes.all.peak",
    "reserved": "reserved_bytes.all.current",
    "peak_reserved": "reserved_bytes.all.peak",
    "device_allocs": "num_device_alloc",
    "device_frees": "num_device_free",
    "retries": "num_alloc_retries",
}


def train(*words):
    """A run of a script. Prints what the allocator did in each update, and counts recordings."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--no-empty", action="store_true", help="a recording keeps the allocator's free memory"
    )
    parser.add_argument("--gib", type=float, help="the GPU pretends to have only so much memory")
    parser.add_argument(
        "--gloo", action="store_true", help="several processes share a GPU, which NCCL refuses"
    )
    parser.add_argument("script")
    options, flags = parser.parse_known_args(words)
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as the scripts do, before torch
    import accelerate
    import torch

    script = importlib.import_module(options.script)
    rows, recordings = [], []
    with ExitStack() as stack:
        if os.environ.get("TOY") and "LOCAL_RANK" not in os.environ:
            # Late imports ask for the real device: here they happen before the GPU is pretended.
            import bitsandbytes  # noqa: F401
            import device_check
            import peft  # noqa: F401
            from transformers import set_seed, trainer_callback  # noqa: F401

            stack.enter_context(device_check.pretended_gpu())
            stats = dict.fromkeys(MEMORY.values(), 2**20)
            for name, answer in {"memory_stats": stats, "set_per_process_memory_fraction": None}.items():
                fake = partial(lambda answer, *args: answer, answer)
                stack.enter_context(patch.object(torch.cuda, name, fake))
        on_gpu = torch.cuda.is_available()
        if options.gib and on_gpu:
            torch.cuda.set_per_process_memory_fraction(options.gib * 2**30 / torch.cuda.mem_get_info()[1])
        if options.gloo:
            accelerate.InitProcessGroupKwargs = partial(accelerate.InitProcessGroupKwargs, backend="gloo")
        enter, log = torch.cuda.graph.__enter__, script.Run.log

        def record(graph):
            recordings.append(graph)
            empty = (lambda: None) if options.no_empty else torch.cuda.empty_cache
            with patch.object(torch.cuda, "empty_cache", empty):
                return enter(graph)

        def log_memory(run, metrics):
            metrics = log(run, metrics)
            shown = ("update", "perf/seconds", "perf/rollout_seconds", "perf/train_seconds")
            shown += ("sampling/logprob_gap_mean", "sampling/logprob_gap_max", "completions/mean_length")
            row = {name: metrics[name] for name in shown if name in metrics}
            row |= {"recordings": len(recordings), "distributed": str(run.accelerator.distributed_type)}
            stats = torch.cuda.memory_stats() if on_gpu else {}
            rows.append(row | {name: stats[key] for name, key in MEMORY.items() if stats})
            if run.accelerator.is_main_process:
                print("\n" + json.dumps(rows[-1]), flush=True)
            return metrics

        stack.enter_context(patch.object(torch.cuda.graph, "__enter__", record))
        stack.enter_context(patch.object(script.Run, "log", log_memory))
        args = script.parse_args(flags)
        script.train(args)
    if not on_gpu:
        return
    records = hasattr(script, "can_be_recorded") and not args.load_in_8bit
    assert bool(recordings) == records, f"{len(recordings)} recordings"
    growth = memory_growth([row["allocated"] for row in rows])
    print(json.dumps({"growth_bytes": growth}), flush=True)
    assert growth <= 2**23 + 0.01 * rows[0]["allocated"], f"memory grows by {growth} bytes"


def memory_growth(allocated):
    """Bytes that are allocated after each update -> growth of their least from the first third to the last.

    The least, because the size of a batch varies. The first two updates are left out: they load kernels.
    """
    later = allocated[2:]
    third = len(later) // 3
    return min(later[-third:]) - min(later[:third]) if third else 0


# ---- The command line --------------------------------------------------------------------------------------


def main():
    if sys.argv[1:2] and sys.argv[1] in COMMANDS:
        COMMANDS[sys.argv[1]](*sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the files of the steps")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds for all steps together")
    parser.add_argument("--models", type=Path, default="models", help="folder of real_models.sh")
    parser.add_argument("--data", type=Path, default="raw-data", help="folder of real_models.sh")
    parser.add_argument("--zip", type=Path, help="also pack --out into this file after each step")
    parser.add_argument("--only", nargs="*", default=[""], help="steps whose names begin with one of these")
    parser.add_argument("--toy", action="store_true", help="on a CPU, at toy size")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the step that runs, too
    steps = [step for step in all_steps(options.toy) if step.name.startswith(tuple(options.only))]
    return run_all(steps, options)


COMMANDS = {"shape": save_shape, "variant": run_variant, "train": train}

if __name__ == "__main__":
    sys.exit(main())
