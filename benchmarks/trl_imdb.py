"""TRL 0.11.4's PPOTrainer on the job of recipe smollm2-imdb of ppo_sentiment.py, in an older environment:

    python3 -m venv OLD && OLD/bin/pip install torch
    OLD/bin/pip install trl==0.11.4 transformers==4.45.2 accelerate==0.34.2 peft==0.13.2 'datasets<4' rich
    OLD/bin/python benchmarks/trl_imdb.py OUT/sft/model OUT/reward/model OUT/imdb/train.jsonl OUT/trl

OUT is the output directory of real_models.sh. This writes OUT/trl/metrics.jsonl and OUT/trl/model, the policy
with its adapter merged. After --max-seconds, counted from the start of the program, no update begins.

Prompts, and their order for a seed, are those of ppo_sentiment.py, and so are all numbers of the recipe. Different:

- TRL draws one length (8 to 24) for all responses of a batch; ours draws one per response.
- TRL's autocast covers the forward passes, with the output layer and the value head. It generates without.
- The value head starts at random numbers, ours at 0.
- TRL clips the gradient in the first step only (it keeps a generator of the parameters, which is then empty), so
  it gets a list here. Its rule to skip minibatches with a ratio above 10 is switched off.
"""

import argparse
import json
import math
import random
import shutil
import time
from pathlib import Path

import peft
import torch
import trl
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedTokenizerFast,
)
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from trl.core import LengthSampler

START = time.time()
BATCH = 64


# ---- Files of transformers 5 for transformers 4.45.2 ---------------------------------------------------------


def load_model(auto_class, folder):
    """transformers 4.45.2 ignores rope_parameters, and would take a rope_theta of 10,000."""
    raw = json.loads(Path(folder, "config.json").read_text())
    for name in ("dtype", "torch_dtype", "transformers_version"):
        raw.pop(name, None)
    rope = raw.pop("rope_parameters", None)
    if rope:
        raw["rope_theta"] = rope["rope_theta"]
    if "id2label" in raw:
        raw["id2label"] = {int(i): label for i, label in raw["id2label"].items()}
    config = AutoConfig.for_model(raw.pop("model_type"), **raw)
    return auto_class.from_pretrained(folder, config=config, torch_dtype=torch.float32)


def load_tokenizer(folder):
    """transformers 4.45.2 does not know the tokenizer classes of transformers 5."""
    names = json.loads(Path(folder, "tokenizer_config.json").read_text())
    special = {}
    for name in ("bos", "eos", "pad", "unk", "cls", "sep", "mask"):
        token = names.get(f"{name}_token")
        token = token["content"] if isinstance(token, dict) else token
        if token is not None:
            special[f"{name}_token"] = token
    special.setdefault("pad_token", special.get("eos_token"))
    return PreTrainedTokenizerFast(
        tokenizer_file=f"{folder}/tokenizer.json",
        **special,
        padding_side="right",
        truncation_side="left",
        model_max_length=int(names.get("model_max_length") or 10**30),
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


# ---- Prompts and reward, as in ppo_sentiment.py, which this environment cannot import -------------------------


def generator_for(seed, *purpose):
    return torch.Generator().manual_seed(random.Random(repr((seed, *purpose))).getrandbits(63))


def load_reviews(path, tokenizer):
    """The first 8 tokens of each review of more than 200 characters."""
    texts = [json.loads(line)["text"] for line in Path(path).read_text().splitlines()]
    all_ids = tokenizer(texts).input_ids
    return [ids[:8] for text, ids in zip(texts, all_ids) if len(text) > 200 and len(ids) >= 2]


def draw_prompts(reviews, update, seed):
    """The prompts of an update in the first epoch. -> list of BATCH tensors"""
    order = torch.randperm(len(reviews), generator=generator_for(seed, "pass", 0))
    rows = order[(update - 1) * BATCH : update * BATCH].tolist()
    lengths = torch.randint(2, 9, (BATCH,), generator=generator_for(seed, "query", update)).tolist()
    return [torch.tensor(reviews[row][:length]) for row, length in zip(rows, lengths)]


def load_classifier(folder, device):
    """-> function: list of str -> fp32 logits of the label positive [B]"""
    model = load_model(AutoModelForSequenceClassification, folder).to(device).eval().requires_grad_(False)
    tokenizer = load_tokenizer(folder)
    index = model.config.label2id["positive"]
    max_length = min(tokenizer.model_max_length, model.config.max_position_embeddings)

    @torch.no_grad()
    def classify(texts):
        tokens = tokenizer(texts, truncation=True, max_length=max_length, padding=True, return_tensors="pt")
        with torch.autocast(device.type, enabled=False):
            return model(**tokens.to(device)).logits[:, index].float()

    return classify


# ---- The run ---------------------------------------------------------------------------------------------------


def make_trainer(args, tokenizer):
    trl.core.set_seed(args.seed)
    policy = load_model(AutoModelForCausalLM, args.policy)
    policy.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    lora = peft.LoraConfig(
        r=16, lora_alpha=32, lora_dropout=0.0, bias="none", task_type="CAUSAL_LM", target_modules="all-linear"
    )
    model = AutoModelForCausalLMWithValueHead.from_pretrained(policy, peft_config=lora)
    has_bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    config = PPOConfig(
        seed=args.seed,
        learning_rate=2e-4,
        batch_size=BATCH,
        mini_batch_size=BATCH // 4,
        gradient_accumulation_steps=1,
        ppo_epochs=2,
        init_kl_coef=0.1,
        adap_kl_ctrl=True,
        target=6.0,
        horizon=1000.0,
        gamma=1.0,
        lam=0.95,
        cliprange=0.2,
        cliprange_value=0.2,
        vf_coef=0.1,
        max_grad_norm=1.0,
        ratio_threshold=math.inf,
        accelerator_kwargs=dict(mixed_precision="bf16" if has_bf16 else "no"),
    )
    trainer = PPOTrainer(config=config, model=model, ref_model=None, tokenizer=tokenizer)
    trainer.model_params = [p for p in trainer.model.parameters() if p.requires_grad]
    return trainer


def save(trainer, args, out):
    policy = trainer.accelerator.unwrap_model(trainer.model).pretrained_model
    policy.merge_and_unload().float().save_pretrained(out / "model")
    # Config and tokenizer as they were: transformers 4.45.2 would write its own form of them.
    for path in Path(args.policy).iterdir():
        if path.suffix in (".json", ".jinja") and "index" not in path.name:
            shutil.copyfile(path, out / "model" / path.name)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("policy", "classifier", "train_jsonl", "out"):
        parser.add_argument(name)
    parser.add_argument("--updates", type=int, default=128)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--max-seconds", type=float, default=math.inf)
    args = parser.parse_args()
    out = Path(args.out)
    out.mkdir(parents=True)
    torch.set_float32_matmul_precision("high")  # TF32, as in ppo_sentiment.py

    tokenizer = load_tokenizer(args.policy)
    reviews = load_reviews(args.train_jsonl, tokenizer)
    trainer = make_trainer(args, tokenizer)
    device = trainer.accelerator.device
    classify = load_classifier(args.classifier, device)
    left_out = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    sampler = LengthSampler(8, 25)  # without its upper end, so 8 to 24

    for update in range(1, args.updates + 1):
        if time.time() - START > args.max_seconds:
            break
        start = time.time()
        prompts = [ids.to(device) for ids in draw_prompts(reviews, update, args.seed)]
        responses = trainer.generate(
            prompts,
            batch_size=BATCH,
            return_prompt=False,
            length_sampler=sampler,
            do_sample=True,
            min_length=-1,
            top_k=0,
            top_p=1.0,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        rows = [p.tolist() + r.tolist() for p, r in zip(prompts, responses)]
        texts = tokenizer.batch_decode(
            [[i for i in row if i not in left_out] for row in rows], clean_up_tokenization_spaces=False
        )
        generated = time.time()
        scores = classify(texts)
        kl_coef = trainer.kl_ctl.value
        stats = trainer.step(prompts, responses, list(scores))
        metrics = {
            "update": update,
            "episodes": update * BATCH,
            "score_mean": scores.mean().item(),
            "objective/kl": float(stats["objective/kl"]),
            "kl_coef": float(kl_coef),
            "seconds": time.time() - start,
            "seconds_generate": generated - start,
        }
        with open(out / "metrics.jsonl", "a") as file:
            file.write(json.dumps(metrics) + "\n")
        print(metrics, flush=True)
    save(trainer, args, out)


if __name__ == "__main__":
    main()
