"""grpo_math.py and TRL's GRPOTrainer on the same job: model, tasks, reward, batch, lengths, optimizer steps.

    python benchmarks/grpo_against_trl.py --trl FOLDER            # both, seeds 1, 2, 3, one thread each
    python benchmarks/grpo_against_trl.py --trl FOLDER --jobs 2   # two runs at a time: not for timings
    python benchmarks/grpo_against_trl.py --table                 # only the table of the results

FOLDER is where `pip install --no-deps --target FOLDER trl==1.16.0` put TRL; all else is this environment's.
TRL runs as its defaults are (loss_type dapo, scale_rewards group, beta 0), but in fp32 and without gradient
checkpointing, which would only make it slower, and with the weight decay of torch.optim.AdamW. After its
training, grpo_math.py's own evaluation solves the same held-out tasks with the same random numbers.
A line of results/grpo-against-trl/results.jsonl is one run.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results/grpo-against-trl/results.jsonl"
SEEDS = (1, 2, 3)
METRICS = ["held-out: pass@1", "harder: pass@1", "greedy: pass@1", "held-out: tokens per response"]
sys.path.insert(0, str(ROOT))


def load_script():
    """grpo_math.py as a module."""
    import grpo_math

    return grpo_math


def settings(seed, updates):
    """The default job of grpo_math.py."""
    from dataclasses import replace

    args = load_script().RECIPES["tiny"]
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
    return replace(args, seed=seed, total_episodes=updates * batch, save_every=0, num_sample_generations=0)


def train_ours(seed, updates, folder):
    """Run grpo_math.py. -> metrics after training, seconds of each update"""
    from dataclasses import replace

    script = load_script()
    args = replace(settings(seed, updates), output_dir=f"{folder}/run")
    _, run = script.train(args)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    after = json.loads((run / "evaluation.json").read_text())["after"]
    return after, [row["perf/seconds"] for row in rows]


def trl_trainer(args, updates, folder, callbacks):
    """TRL's GRPOTrainer for the job of grpo_math.py. args: Args of grpo_math.py -> trainer, tokenizer"""
    import datasets
    import transformers
    import trl

    script = load_script()
    [reward] = [script.load_function("--reward-fn", name) for name in args.reward_fn]
    config = trl.GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=args.per_device_train_batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        num_generations=args.num_generations,
        max_completion_length=args.response_length,
        temperature=args.temperature,
        learning_rate=args.learning_rate,
        lr_scheduler_type=args.lr_scheduler_type,
        weight_decay=0.01,
        max_grad_norm=args.max_grad_norm,
        max_steps=updates,
        seed=args.seed,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
    )
    tokenizer = script.load_tokenizer(args.model_name_or_path)
    trainer = trl.GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(
            ROOT / args.model_name_or_path, dtype="float32"
        ),
        reward_funcs=reward,
        args=config,
        train_dataset=datasets.load_dataset(str(ROOT / args.dataset_name))["train"],
        processing_class=tokenizer,
        callbacks=callbacks,
    )
    return trainer, tokenizer


def train_trl(seed, updates, folder):
    """Run TRL's GRPOTrainer, then the evaluation of grpo_math.py. -> the same"""
    import transformers

    args = settings(seed, updates)
    ends = []

    class Clock(transformers.TrainerCallback):
        def on_train_begin(self, *inputs, **named_inputs):
            ends.append(time.time())

        def on_step_end(self, *inputs, **named_inputs):
            ends.append(time.time())

    trainer, tokenizer = trl_trainer(args, updates, folder, [Clock()])
    trainer.train()
    return evaluate(trainer.model, tokenizer, args), [end - start for start, end in zip(ends, ends[1:])]


def evaluate(policy, tokenizer, args):
    """The final table of grpo_math.py for a model. -> dict: name -> number"""
    from dataclasses import replace

    script = load_script()
    accelerator = script.start_accelerator(args)
    model = script.PolicyAndReference(policy.eval(), None)
    stop_ids = script.find_stop_tokens(args, tokenizer, policy)
    reward = script.load_reward_functions("--reward-fn", args.reward_fn, accelerator.device)
    _, rows = script.load_splits(args.dataset_name)
    hard_rows = script.load_test_split(args.hard_dataset_name)
    tasks = script.choose_tasks(script.load_tasks(rows, tokenizer, args, args.dataset_name), args)
    hard_tasks = script.choose_tasks(
        script.load_tasks(hard_rows, tokenizer, args, args.hard_dataset_name), args
    )
    greedy = replace(args, temperature=0.01, num_eval_samples=1)
    metrics = {}
    for name, chosen, flags in (
        ("held-out", tasks, args),
        ("harder", hard_tasks, args),
        ("greedy", tasks, greedy),
    ):
        inputs = model, tokenizer, reward, reward, chosen, stop_ids, flags, accelerator
        records = script.evaluate_tasks(*inputs)
        metrics |= {f"{name}: {metric}": x for metric, x in script.task_metrics(records).items()}
    return metrics


def child(who, seed, updates):
    """One run in this process; prints a line of results."""
    with tempfile.TemporaryDirectory() as folder:
        train = train_ours if who == "ours" else train_trl
        after, seconds = train(seed, updates, folder)
    print(json.dumps({
        "who": who,
        "seed": seed,
        "updates": updates,
        "seconds per batch (median)": median(seconds),
        "seconds in all": sum(seconds),
        "peak memory, MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        **{name: after[name] for name in METRICS},
    }))  # fmt: skip


def run(who, seed, updates, trl):
    """One run in a process of its own, with one thread."""
    words = [sys.executable, __file__, "--child", who, "--seed", str(seed), "--updates", str(updates)]
    path = os.pathsep.join([str(trl)] if who == "TRL 1.16" else [])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    end = subprocess.run(words, env=environment, capture_output=True, text=True, cwd=ROOT)
    if end.returncode:
        raise RuntimeError(end.stdout[-2000:] + end.stderr[-3000:])
    line = end.stdout.splitlines()[-1]
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with open(RESULTS, "a") as file:
        file.write(line + "\n")
    print(line, flush=True)


def table():
    """The markdown table of the results: one line per run."""
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    names = list(rows[0])
    lines = [names, ["---"] * len(names)]
    for row in rows:
        lines.append([f"{x:.3f}" if isinstance(x, float) else str(x) for x in row.values()])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="grpo_math.py and TRL's GRPOTrainer on the same job.")
    parser.add_argument("--trl", type=Path, help="folder with TRL 1.16")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--table", action="store_true", help="only print the table")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=1, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.child:
        child(flags.child, flags.seed, flags.updates)
        sys.exit()
    if not flags.table:
        jobs = [(who, seed) for seed in SEEDS for who in ("ours", "TRL 1.16")]
        with ThreadPoolExecutor(flags.jobs) as pool:
            list(pool.map(lambda job: run(*job, flags.updates, flags.trl), jobs))
    print(table())
