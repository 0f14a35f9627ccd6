"""TRL 1.16.0's RLOOTrainer in fp32 and without gradient checkpointing (by default it uses bf16 and checkpointing).

steps_per_generation, num_iterations and gradient_accumulation_steps are set so that its batches, epochs and optimizer steps are those of
the older trainer.
"""

import torch
import transformers
import trl
from common import Clock, batches, parse, read_prompts, report
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)
from trl import RLOOConfig, RLOOTrainer

args = parse(rloo_k=2)
tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
policy = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
reward_model = AutoModelForSequenceClassification.from_pretrained(
    f"{args.model}_rm", num_labels=1, dtype=torch.float32
)
steps_a_batch = args.mini_batches * args.epochs
config = RLOOConfig(
    output_dir=args.out, per_device_train_batch_size=args.micro_batch, num_iterations=args.epochs, num_generations=args.rloo_k, beta=0.05,
    gradient_accumulation_steps=args.batch // args.mini_batches // args.micro_batch, steps_per_generation=args.batch // args.micro_batch,
    max_completion_length=args.response_length, temperature=args.temperature, learning_rate=args.learning_rate,
    max_steps=args.batches * steps_a_batch, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    logging_steps=steps_a_batch, bf16=False, gradient_checkpointing=False, disable_dropout=True, seed=args.seed,
)  # fmt: skip
trainer = RLOOTrainer(model=policy, reward_funcs=reward_model, args=config, processing_class=tokenizer,
                      train_dataset=Dataset.from_dict({"prompt": read_prompts(args.prompts)}),
                      reward_processing_classes=AutoTokenizer.from_pretrained(f"{args.model}_rm"))  # fmt: skip
clock = Clock()
generate = trainer._generate


def counted(*inputs, **kwargs):
    out = generate(*inputs, **kwargs)
    clock.count(prompt_tokens=sum(map(len, out[0])), response_tokens=sum(map(len, out[1])))
    return out


trainer._generate = counted
trainer._generate_and_score_completions = clock.timed("rollout", trainer._generate_and_score_completions)


trainer.add_callback(batches(clock, steps_a_batch))
trainer.train()
report(clock, trl, transformers)
