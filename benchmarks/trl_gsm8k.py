"""The recipe gsm8k-qwen-0.5b of grpo_math.py with TRL 1.16's GRPOTrainer: time and memory of a few updates.

    pip install trl==1.16.0
    python benchmarks/trl_gsm8k.py trl.json --total-episodes 768

The flags after the file are those of grpo_math.py, and the tasks of each update are those of its run with the
same flags, in the same order and as the same tokens. Weights are in fp32, with bf16 autocast on a GPU, and
generation is that of transformers. Gradient checkpointing, which TRL turns on, is off as in the
recipe. All other settings are TRL's defaults, or those of GRPO_CONFIG in the environment, as JSON:
{"use_transformers_continuous_batching": true} or {"use_vllm": true, "vllm_mode": "colocate"}.
"""

import json
import os
import sys
import time
from pathlib import Path
from statistics import fmean

os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # as grpo_math.py

import accelerate  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402
from datasets import Dataset  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import grpo_math  # noqa: E402

ON_GPU = torch.cuda.is_available()


def now():
    """Seconds, when the GPU has done its work."""
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_gib():
    """Peak memory since the last call."""
    if not ON_GPU:
        return 0.0
    peak = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return peak


def load_rows(args, tokenizer, updates):
    """The tasks of the first updates of grpo_math.py, in its order. -> list of dict"""
    rows, _ = grpo_math.load_splits(args.dataset_name)
    tasks = grpo_math.load_tasks(rows, tokenizer, args)
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
    numbers = grpo_math.stream_rows(len(tasks), 0, batch // args.num_generations * updates, args.seed)
    tasks = [tasks[i] for i in numbers]
    prompts = [task["prompt"] for task in tasks]
    encoded = tokenizer.apply_chat_template(
        prompts, add_generation_prompt=True, tokenize=True, return_dict=True
    )
    assert encoded["input_ids"] == [list(task["ids"]) for task in tasks], "TRL would read other prompts"
    return [{"prompt": task["prompt"], "answer": task["columns"]["answer"]} for task in tasks]


class TimedTrainer(trl.GRPOTrainer):
    """Counts tokens and seconds of generation and of the whole rollout, which includes generation and rewards."""

    spent = {"generate": 0.0, "rollout": 0.0, "tokens": 0, "peak_gib_generate": 0.0}

    def _generate_single_turn(self, *inputs, **options):
        start = now()
        outputs = super()._generate_single_turn(*inputs, **options)
        self.spent["generate"] += now() - start
        self.spent["tokens"] += sum(len(tokens) for tokens in outputs[0])
        self.spent["peak_gib_generate"] = peak_gib()
        return outputs

    def _generate_and_score_completions(self, inputs):
        start = now()
        outputs = super()._generate_and_score_completions(inputs)
        self.spent["rollout"] += now() - start
        return outputs


class Clock(transformers.TrainerCallback):
    """One dict per update, in self.updates."""

    def __init__(self, spent):
        self.spent = spent
        self.updates = []

    def on_train_begin(self, *inputs, **options):
        self.start = now()

    def on_step_end(self, *inputs, **options):
        spent, seconds = dict(self.spent), now() - self.start
        row = {"seconds": seconds, "generate": spent["generate"], "train": seconds - spent["rollout"]}
        row["tokens"] = spent["tokens"]
        row["tokens_per_second"] = spent["tokens"] / seconds
        row["peak_gib_generate"] = spent["peak_gib_generate"]
        row["peak_gib_train"] = peak_gib()
        self.updates.append(row)
        self.spent.update(dict.fromkeys(self.spent, 0))
        self.start = now()

    def on_log(self, args, state, control, logs=None, **options):
        if logs and "reward" in logs:  # of the update that has just ended
            names = {"reward": "reward", "completions/mean_length": "mean_length", "grad_norm": "grad_norm"}
            self.updates[-1] |= {name: logs[key] for key, name in names.items()}
            print(json.dumps(self.updates[-1]), flush=True)


def main(path, *flags):
    args = grpo_math.parse_args(["gsm8k-qwen-0.5b", *flags])
    torch.set_float32_matmul_precision("high")  # this line and the next as in grpo_math.py
    torch.backends.cuda.enable_cudnn_sdp(False)  # pytorch#196678
    tokenizer = grpo_math.load_tokenizer(args.model_name_or_path)
    tokenizer.padding_side = "left"
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
    updates = -(-args.total_episodes // batch)
    config = trl.GRPOConfig(
        output_dir="runs/trl_gsm8k",
        max_steps=updates,
        per_device_train_batch_size=args.per_device_train_batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        num_generations=args.num_generations,
        max_completion_length=args.response_length,
        temperature=args.temperature,
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant",
        beta=0.0,
        bf16=ON_GPU,
        use_cpu=not ON_GPU,
        gradient_checkpointing=args.gradient_checkpointing,
        shuffle_dataset=False,
        save_strategy="no",
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
        seed=args.seed,
        **json.loads(os.environ.get("GRPO_CONFIG", "{}")),
    )
    trainer = TimedTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype=torch.float32),
        reward_funcs=list(grpo_math.load_functions(args.reward_fn).values()),
        args=config,
        train_dataset=Dataset.from_list(load_rows(args, tokenizer, updates)),
        processing_class=tokenizer,
    )
    clock = Clock(trainer.spent)
    trainer.add_callback(clock)
    trainer.train()

    later = clock.updates[1:] or clock.updates  # the first one warms up
    about = {
        "device": torch.cuda.get_device_name() if ON_GPU else "cpu",
        "versions": {
            module.__name__: module.__version__ for module in (torch, transformers, accelerate, trl)
        },
        "batch": batch,
        "micro": args.per_device_train_batch_size,
        "length": args.response_length,
        "gradient_checkpointing": args.gradient_checkpointing,
        "mean_without_first": {name: fmean(row[name] for row in later) for name in later[0]},
        "updates": clock.updates,
    }
    Path(path).write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
