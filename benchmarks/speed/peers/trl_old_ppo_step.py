"""TRL 0.11.4's gpt2-sentiment job: generate, a cheap reward, PPOTrainer.step.

--generation-batch 0: one query at a time, as the notebook does, each with its own drawn length.
--generation-batch N: PPOTrainer.generate on batches of N, as the later example script does; one drawn length a batch.
--lora-r N: the policy with LoRA on c_attn; the reference is then the policy with its adapter off.
"""

import random
import time

import numpy
import peft
import torch
import transformers
import trl
from common import Clock, parse, read_prompts, report
from transformers import AutoTokenizer
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from trl.core import LengthSampler

args = parse(
    generation_batch=0, lora_r=0, query_min=2, query_max=8, response_min=4, response_max=16
)  # the upper ends are left out
random.seed(args.seed)
numpy.random.seed(args.seed)
tokenizer = AutoTokenizer.from_pretrained(args.model)
tokenizer.pad_token = tokenizer.eos_token  # as the example does
lora = (
    peft.LoraConfig(
        r=args.lora_r, lora_alpha=32, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"
    )
    if args.lora_r
    else None
)
model = AutoModelForCausalLMWithValueHead.from_pretrained(args.model, peft_config=lora)
reference = None if args.lora_r else AutoModelForCausalLMWithValueHead.from_pretrained(args.model)
config = PPOConfig(batch_size=args.batch, mini_batch_size=args.micro_batch, gradient_accumulation_steps=1, ppo_epochs=args.epochs,
                   learning_rate=args.learning_rate, log_with=None, seed=args.seed, accelerator_kwargs={"cpu": True})  # fmt: skip
trainer = PPOTrainer(config, model, reference, tokenizer)
sampling = {
    "min_length": -1,
    "top_k": 0.0,
    "top_p": 1.0,
    "do_sample": True,
    "pad_token_id": tokenizer.eos_token_id,
}
query_length, response_length = (
    LengthSampler(args.query_min, args.query_max),
    LengthSampler(args.response_min, args.response_max),
)
ids = [torch.tensor(x) for x in tokenizer(read_prompts(args.prompts, "text")).input_ids]

clock = Clock()
for _ in range(args.batches):
    clock.start()
    queries = [random.choice(ids)[: query_length()] for _ in range(args.batch)]
    if args.generation_batch:
        responses = trainer.generate(queries, return_prompt=False, batch_size=args.generation_batch, length_sampler=response_length,
                                     **sampling)  # fmt: skip
    else:
        responses = [
            trainer.generate(query, max_new_tokens=response_length(), **sampling).squeeze()[len(query) :]
            for query in queries
        ]
    rewards = [torch.tensor(float(response.unique().numel())) for response in responses]
    clock.count(
        rollout=time.perf_counter() - clock.began,
        prompt_tokens=sum(map(len, queries)),
        response_tokens=sum(map(len, responses)),
    )
    trainer.step(queries, responses, rewards)
    clock.end_batch()
report(clock, trl, transformers)
