"""TRL 1.12.0's experimental PPOTrainer, which later releases do not have; --trl-path names the folder it was installed to.

Its optimizer steps once per gradient_accumulation_steps micro-batches, whatever num_mini_batches says: half as many optimizer steps a
batch as the others, with the same forward and backward work.
"""

import sys

sys.path.insert(0, sys.argv[sys.argv.index("--trl-path") + 1])  # before the environment's own trl

import torch
import transformers
import trl
import trl.experimental.ppo.ppo_trainer as module
from common import Clock, batches, parse, read_prompts, report, response_tokens
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer

args = parse(trl_path="")
tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
policy, reference = (AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32) for _ in range(2))
reward_model, critic = (AutoModelForSequenceClassification.from_pretrained(f"{args.model}_rm", num_labels=1, dtype=torch.float32)
                        for _ in range(2))  # fmt: skip
config = PPOConfig(
    output_dir=args.out, per_device_train_batch_size=args.micro_batch, gradient_accumulation_steps=args.batch // args.micro_batch,
    num_mini_batches=args.mini_batches, num_ppo_epochs=args.epochs, total_episodes=args.batch * args.batches,
    response_length=args.response_length, temperature=args.temperature, local_rollout_forward_batch_size=args.rollout_batch,
    learning_rate=args.learning_rate, stop_token="eos", missing_eos_penalty=1.0, num_sample_generations=0, save_strategy="no",
    report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=1, seed=args.seed, bf16=False, gradient_checkpointing=False,
)  # fmt: skip
clock = Clock()
generate = module.batch_generation


def counted(*inputs):
    tokens, logits = generate(*inputs)
    responses, ends = tokens[:, args.prompt_tokens :], [tokenizer.eos_token_id, tokenizer.pad_token_id]
    clock.count(
        prompt_tokens=responses.shape[0] * args.prompt_tokens,
        response_tokens=response_tokens(responses, ends),
    )
    return tokens, logits


module.batch_generation, module.forward = counted, clock.until_training(module.forward)


rows = Dataset.from_dict({"input_ids": tokenizer(read_prompts(args.prompts)).input_ids})
trainer = PPOTrainer(args=config, processing_class=tokenizer, model=policy, ref_model=reference, reward_model=reward_model,
                     train_dataset=rows, value_model=critic, eval_dataset=rows.select(range(8)), callbacks=[batches(clock)])  # fmt: skip
trainer.train()
report(clock, trl, transformers)
