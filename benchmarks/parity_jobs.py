"""The jobs of parity.py: what each side trains, and how all sides are measured.

    python benchmarks/parity_jobs.py grpo ours 1      # one run: job, side, seed; its last line is the result

A side is a function (args, updates, snapshots) -> nothing. It trains as long as args say, and lets `snapshots` see the
policy before the first update and after each update.
"""

import copy
import importlib
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from parity_snapshots import Snapshots

ROOT = Path(__file__).resolve().parents[1]
SEED = 0  # of all measurements
sys.path.insert(0, str(ROOT))


# ---- Sides -------------------------------------------------------------------------------------------------


def train_ours(script, args, updates, snapshots):
    """One of our scripts. copy_weights is called before the first update, and after the steps of each."""
    count = 0
    copy_weights = script.copy_weights

    def copy_and_see(parameters, model):
        nonlocal count
        copy_weights(parameters, model)
        snapshots.see(count, model.policy)
        count += 1

    script.copy_weights = copy_and_see
    script.train(args)


def callback_of(snapshots, steps_per_update):
    """A callback for TRL's trainers that shows snapshots the policy."""
    import transformers

    class See(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **named_inputs):
            snapshots.see(0, model)

        def on_step_end(self, args, state, control, model=None, **named_inputs):
            if state.global_step % steps_per_update == 0:
                snapshots.see(state.global_step // steps_per_update, model)

    return See()


def train_grpo_trl(script, args, updates, snapshots):
    """TRL 1.16's GRPOTrainer, with the settings of grpo_against_trl.py."""
    from grpo_against_trl import trl_trainer

    trainer, _ = trl_trainer(args, updates, args.output_dir, [callback_of(snapshots, 1)])
    trainer.train()


def train_rloo_trl(script, args, updates, snapshots):
    """TRL 1.16's RLOOTrainer. The penalty for a missing EOS, which it does not have, is part of the reward."""
    import datasets
    import transformers
    import trl

    steps = args.num_mini_batches * args.num_ppo_epochs
    config = trl.RLOOConfig(
        output_dir=args.output_dir,
        per_device_train_batch_size=args.per_device_train_batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        steps_per_generation=args.gradient_accumulation_steps * args.num_mini_batches,
        num_iterations=args.num_ppo_epochs,
        num_generations=args.rloo_k,
        beta=args.kl_coef,
        epsilon=args.cliprange,
        max_completion_length=args.response_length,
        temperature=args.temperature,
        learning_rate=args.learning_rate,
        lr_scheduler_type=args.lr_scheduler_type,
        weight_decay=0.01,
        max_grad_norm=args.max_grad_norm,
        max_steps=updates * steps,
        seed=args.seed,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_steps=steps,
    )
    tokenizer = script.load_tokenizer(args.model_name_or_path)
    score = script.load_reward_model(
        args.reward_model_path, args.local_rollout_forward_batch_size, torch.device("cpu")
    )

    def reward(prompts, completions, completion_ids, **columns):
        ended = [tokenizer.eos_token_id in ids for ids in completion_ids]
        scores = score(prompts, completions)
        return [x - args.missing_eos_penalty * (not end) for x, end in zip(scores, ended)]

    rows = datasets.load_dataset(str(ROOT / args.dataset_name))["train"].select_columns(["prompt"])
    trainer = trl.RLOOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(
            ROOT / args.model_name_or_path, dtype="float32"
        ),
        reward_funcs=reward,
        args=config,
        train_dataset=rows,
        processing_class=tokenizer,
        callbacks=[callback_of(snapshots, steps)],
    )
    trainer.train()


def train_rloo_trl_old(script, args, updates, snapshots):
    """TRL 0.11.4's RLOOTrainer, in an environment of its own: parity_trl_old.py."""
    if "TRL_PYTHON" not in os.environ:
        raise SystemExit("TRL_PYTHON must name the Python of an environment with TRL 0.11.4")
    tokenizer = script.load_tokenizer(args.model_name_or_path)
    train_rows, _ = script.load_splits(args.dataset_name)
    posts = script.load_posts(train_rows, tokenizer, args)
    with tempfile.TemporaryDirectory() as folder:
        settings = asdict(args) | {"updates": updates, "rows": [post["ids"] for post in posts]}
        Path(folder, "settings.json").write_text(json.dumps(settings))
        words = [os.environ["TRL_PYTHON"], str(ROOT / "benchmarks/parity_trl_old.py"), folder]
        environment = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
        end = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
        if end.returncode:
            raise SystemExit(end.stdout[-2000:] + end.stderr[-3000:])
        copies = torch.load(Path(folder, "copies.pt"), weights_only=True)
    for update, seconds, weights in copies:
        weights["lm_head.weight"] = weights.pop("embed_out.weight")  # its name in newer versions of GPT-NeoX
        snapshots.copies.append((update, seconds, weights))


# ---- Jobs --------------------------------------------------------------------------------------------------


@dataclass
class Job:
    """A job that our script and trainers of TRL can do."""

    title: str
    script: str  # its name; the job is its recipe tiny
    k: int  # responses to each held-out prompt in the last measurement
    sides: dict[str, Callable]  # "ours" first
    load_rows: Callable  # (script, data set, tokenizer, args) -> all held-out rows
    scores: Callable  # (script, args) -> dict: name -> RewardFunctions; the first one is the score


def grpo_scores(script, args):
    """Is the answer right?"""
    return {"score": script.load_reward_functions("--reward-fn", args.reward_fn, torch.device("cpu"))}


def rloo_scores(script, args):
    """The reward model, and the gold score that it learned from."""
    return {
        "score": script.load_summary_reward(args, torch.device("cpu")),
        "gold": script.load_reward_functions("--judge-fn", [args.judge_fn], torch.device("cpu")),
    }


JOBS = {
    "grpo": Job(
        title="GRPO on arithmetic",
        script="grpo_math",
        k=8,
        sides={"ours": train_ours, "TRL 1.16 GRPOTrainer": train_grpo_trl},
        load_rows=lambda script, rows, tokenizer, args: script.load_tasks(
            rows, tokenizer, args, args.dataset_name
        ),
        scores=grpo_scores,
    ),
    "rloo": Job(
        title="RLOO on the tiny TL;DR",
        script="rloo_tldr",
        k=8,
        sides={
            "ours": train_ours,
            "TRL 1.16 RLOOTrainer": train_rloo_trl,
            "TRL 0.11 RLOOTrainer": train_rloo_trl_old,
        },
        load_rows=lambda script, rows, tokenizer, args: script.load_posts(rows, tokenizer, args),
        scores=rloo_scores,
    ),
}


# ---- Measurement -------------------------------------------------------------------------------------------


@torch.no_grad()
def measure(script, args, policy, reference, tokenizer, rows, k, scores):
    """Sample k responses to each held-out row. -> dict: score, kl, entropy, length, ended

    score: mean of the reward per response; kl: nats per response, k1; entropy: nats per token, of the whole
    distribution; length: tokens with the stop token; ended: fraction that stopped by themselves.
    """
    args = replace(args, seed=SEED)
    stop_ids = script.find_stop_tokens(args, tokenizer, policy)
    T = args.response_length
    found = {name: [] for name in [*scores, "kl", "entropy", "length", "ended"]}
    for start in range(0, len(rows), 64):
        part = rows[start : start + 64]
        batch = script.draw_groups(part, k, args, "parity", start)
        b, responses, tokens = script.sample_responses(policy, tokenizer, batch, stop_ids, args)
        for name, reward in scores.items():
            values = script.score_responses(reward, part * k, responses, tokens)
            found[name].append(script.weighted_sum(values))
        inputs = b["ids"], b["mask"], T, args.temperature
        logprobs, entropies, _ = script.response_logprobs(policy, *inputs)
        ref_logprobs, _, _ = script.response_logprobs(reference, *inputs)
        valid = script.length_mask(b["lengths"], T)
        found["kl"].append((logprobs - ref_logprobs).sum(1))  # both are 0 after the end
        found["entropy"].append(entropies[valid])
        found["length"].append(b["lengths"].float())
        found["ended"].append(b["stopped"].float())
    return {name: torch.cat(values).mean().item() for name, values in found.items()}


def run(name, side, seed, **changes):
    """One run and its measurements. changes: flags that differ from the job's -> dict, a line of results/parity"""
    job = JOBS[name]
    script = importlib.import_module(job.script)
    flags = dict(recipe="tiny", seed=seed, save_every=0, num_examples=4, num_sample_generations=0)
    args = replace(script.RECIPES["tiny"], **(flags | changes))
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.num_mini_batches
    updates = math.ceil(args.total_episodes / batch)
    snapshots = Snapshots(updates)
    with tempfile.TemporaryDirectory() as folder:
        args = replace(args, output_dir=f"{folder}/run")
        job.sides[side](script, args, updates, snapshots)
    own, child = (
        resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    memory = max(own, child) / 1024

    tokenizer = script.load_tokenizer(args.model_name_or_path)
    policy, _ = script.load_policy_and_reference(args, args.model_name_or_path, wants_reference=False)
    policy.eval()
    reference = copy.deepcopy(policy)
    _, held_out = script.load_splits(args.dataset_name)
    rows = job.load_rows(script, held_out, tokenizer, args)
    scores = job.scores(script, args)
    curve = []
    for update, seconds, weights in snapshots.copies:
        missing, _ = policy.load_state_dict(weights, strict=False)  # older versions have buffers besides
        assert not missing, missing
        point = measure(script, args, policy, reference, tokenizer, rows, 1, scores)
        curve.append({"update": update, "episode": update * batch, "seconds": seconds, **point})
    assert curve[-1]["update"] == updates, "the policy after the last update was not copied"
    final = measure(script, args, policy, reference, tokenizer, rows, job.k, scores)
    return {
        "job": name,
        "side": side,
        "seed": seed,
        "updates": updates,
        "seconds": curve[-1]["seconds"],
        "peak_memory_mb": memory,
        "held_out_responses": len(rows) * job.k,
        "final": final,
        "curve": curve,
    }


if __name__ == "__main__":
    job, side, seed = sys.argv[1:]
    print(json.dumps(run(job, side, int(seed))))
