"""TRL 1.16.0's SFTTrainer in fp32 and without gradient checkpointing (by default it uses bf16).

--packing bfd: best fit, whole documents, flattened to one row without padding (made for flash attention; on a CPU sdpa masks the rest).
--packing wrapped: documents one after the other, cut wherever a row is full; they see each other. --packing none: padding.
"""

import torch
import transformers
import trl
from common import Clock, batches, parse, report
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

args = parse(rows="", max_length=512, accumulation=1, packing="bfd")
packing = dict(packing=False) if args.packing == "none" else dict(packing=True, packing_strategy=args.packing)
config = SFTConfig(
    output_dir=args.out, per_device_train_batch_size=args.micro_batch, gradient_accumulation_steps=args.accumulation,
    max_steps=args.batches, max_length=args.max_length, learning_rate=args.learning_rate, save_strategy="no", report_to=[], use_cpu=True,
    disable_tqdm=True, logging_steps=1, bf16=False, gradient_checkpointing=False, seed=args.seed, **packing,
)  # fmt: skip
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
rows = load_dataset("json", data_files=f"{args.rows}/train.jsonl", split="train", cache_dir=args.out)
trainer = SFTTrainer(
    model=model, args=config, train_dataset=rows, processing_class=AutoTokenizer.from_pretrained(args.model)
)
clock = Clock()
step = trainer.training_step


def counted(model, inputs, *rest):
    clock.count(
        prompt_tokens=0, response_tokens=int((inputs["labels"][:, 1:] != -100).sum())
    )  # what is learned, without pads
    return step(model, inputs, *rest)


trainer.training_step = counted


trainer.add_callback(batches(clock))
trainer.train()
report(clock, trl, transformers)
