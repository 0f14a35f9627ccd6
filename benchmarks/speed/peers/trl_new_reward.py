"""TRL 1.16.0's RewardTrainer in fp32 and without gradient checkpointing (by default it uses bf16). It has no packing: texts are padded."""

import torch
import transformers
import trl
from common import Clock, batches, parse, report
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer

args = parse(rows="", max_length=512, accumulation=1)
config = RewardConfig(
    output_dir=args.out, per_device_train_batch_size=args.micro_batch, gradient_accumulation_steps=args.accumulation,
    max_steps=args.batches, max_length=args.max_length, learning_rate=args.learning_rate, save_strategy="no", report_to=[], use_cpu=True,
    disable_tqdm=True, logging_steps=1, bf16=False, gradient_checkpointing=False, seed=args.seed,
)  # fmt: skip
model = AutoModelForSequenceClassification.from_pretrained(
    f"{args.model}_rm", num_labels=1, dtype=torch.float32
)
rows = load_dataset("json", data_files=f"{args.rows}/train.jsonl", split="train", cache_dir=args.out)
trainer = RewardTrainer(
    model=model, args=config, train_dataset=rows, processing_class=AutoTokenizer.from_pretrained(args.model)
)
clock = Clock()
step = trainer.training_step


def counted(model, inputs, *rest):
    clock.count(prompt_tokens=0, response_tokens=int(inputs["attention_mask"].sum()))
    return step(model, inputs, *rest)


trainer.training_step = counted


trainer.add_callback(batches(clock))
trainer.train()
report(clock, trl, transformers)
