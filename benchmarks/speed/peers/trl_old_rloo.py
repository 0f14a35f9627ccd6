"""TRL 0.11.4's RLOOTrainer."""

import transformers
import trl
import trl.trainer.rloo_trainer as module
from common import Clock, batches, parse, read_prompts, report, response_tokens
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)
from trl import RLOOConfig, RLOOTrainer

args = parse(rloo_k=2)
tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
policy, reference = (AutoModelForCausalLM.from_pretrained(args.model) for _ in range(2))
reward_model = AutoModelForSequenceClassification.from_pretrained(f"{args.model}_rm", num_labels=1)
config = RLOOConfig(
    output_dir=args.out, per_device_train_batch_size=args.micro_batch, num_mini_batches=args.mini_batches,
    gradient_accumulation_steps=args.batch // args.mini_batches // args.micro_batch, num_ppo_epochs=args.epochs,
    total_episodes=args.batch * args.batches, response_length=args.response_length, temperature=args.temperature, rloo_k=args.rloo_k,
    local_rollout_forward_batch_size=args.rollout_batch, learning_rate=args.learning_rate, stop_token="eos", missing_eos_penalty=1.0,
    num_sample_generations=0, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=1, seed=args.seed,
)  # fmt: skip
clock = Clock()
generate = module.batch_generation


def counted(*inputs):
    tokens, logits = generate(*inputs)
    responses = tokens[:, args.prompt_tokens :]
    clock.count(
        prompt_tokens=responses.shape[0] * args.prompt_tokens,
        response_tokens=response_tokens(responses, [tokenizer.eos_token_id]),
    )
    return tokens, logits


module.batch_generation, module.forward = counted, clock.until_training(module.forward)


rows = Dataset.from_dict({"input_ids": tokenizer(read_prompts(args.prompts)).input_ids})
trainer = RLOOTrainer(config=config, tokenizer=tokenizer, policy=policy, ref_policy=reference, reward_model=reward_model,
                      train_dataset=rows, callbacks=[batches(clock)])  # fmt: skip
trainer.train()
report(clock, trl, transformers)
