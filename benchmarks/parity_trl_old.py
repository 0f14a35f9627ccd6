"""TRL 0.11.4's trainers for parity_jobs.py, which starts them with the Python of an older environment:

python3 -m venv OLD && OLD/bin/pip install torch==2.13.0
OLD/bin/pip install trl==0.11.4 transformers==4.45.2 accelerate==0.34.2 'datasets<4' 'numpy<2.3' rich psutil tyro
TRL_PYTHON=OLD/bin/python python benchmarks/parity.py run rloo ...

TRL_PYTHON benchmarks/parity_trl_old.py rloo FOLDER    # or ppo; FOLDER/settings.json -> FOLDER/copies.pt
"""

import json
import math
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch
import transformers
from datasets import Dataset
from parity_snapshots import Snapshots
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, RLOOConfig, RLOOTrainer
from trl.trainer import rloo_trainer


def load_tokenizer(folder, padding_side="left"):
    """The tokenizer of a checkpoint: the older transformers does not know its class."""
    names = json.loads((Path(folder) / "tokenizer_config.json").read_text())
    return PreTrainedTokenizerFast(
        tokenizer_file=f"{folder}/tokenizer.json",
        eos_token=names["eos_token"],
        pad_token=names["pad_token"],
        padding_side=padding_side,
        truncation_side="left",
        model_max_length=names["model_max_length"],
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],  # without token types, which GPT-2 would add
    )


def select(settings, names):
    """Settings that have the same name in TRL. -> dict"""
    return {name: settings[name] for name in names.split()}


def train_rloo(settings, snapshots):
    """Train as the settings say. They are fields of rloo_tldr.py's Args, and rows: token ids of the prompts."""
    tokenizer = load_tokenizer(settings["model_name_or_path"])
    policy = AutoModelForCausalLM.from_pretrained(settings["model_name_or_path"], torch_dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(
        settings["model_name_or_path"], torch_dtype=torch.float32
    )
    reward_model = AutoModelForSequenceClassification.from_pretrained(
        settings["reward_model_path"], num_labels=1, torch_dtype=torch.float32
    )
    with tempfile.TemporaryDirectory() as folder:
        config = RLOOConfig(
            output_dir=folder,
            **select(
                settings,
                "per_device_train_batch_size gradient_accumulation_steps num_mini_batches num_ppo_epochs "
                "total_episodes local_rollout_forward_batch_size response_length temperature rloo_k kl_coef "
                "cliprange missing_eos_penalty learning_rate lr_scheduler_type seed",
            ),
            stop_token="eos",
            weight_decay=0.01,
            num_sample_generations=0,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            logging_steps=1,
        )

        class See(transformers.TrainerCallback):
            update = 0

            def on_step_end(self, *inputs, **named_inputs):
                self.update += 1
                snapshots.see(self.update, policy)

        trainer = RLOOTrainer(
            config=config,
            tokenizer=tokenizer,
            policy=policy,
            ref_policy=reference,
            reward_model=reward_model,
            train_dataset=Dataset.from_dict({"input_ids": settings["rows"]}),
            callbacks=[See()],
        )
        snapshots.see(0, policy)
        with score_at_eos(tokenizer):
            trainer.train()


def score_at_eos(tokenizer):
    """A patch: a response that was cut off gets its score at an EOS after it, and not at its last token."""
    get_reward = rloo_trainer.get_reward

    def get_reward_at_eos(model, ids, pad_token_id, context_length):
        ended = (ids[:, context_length:] == tokenizer.eos_token_id).any(1)
        next_ids = torch.where(ended, pad_token_id, tokenizer.eos_token_id)
        return get_reward(model, torch.cat([ids, next_ids[:, None]], 1), pad_token_id, context_length)

    return mock.patch.object(rloo_trainer, "get_reward", get_reward_at_eos)


def load_classifier(settings):
    """The reward of ppo_sentiment.py: the logit of --reward-label. -> function: list of B str -> fp32 [B]"""
    folder = settings["reward_model_path"]
    tokenizer = load_tokenizer(folder, "right")
    model = AutoModelForSequenceClassification.from_pretrained(folder, torch_dtype=torch.float32).eval()
    label = model.config.label2id[settings["reward_label"]]

    @torch.no_grad()
    def classify(texts):
        batch = tokenizer(texts, truncation=True, padding=True, return_tensors="pt")
        return model(**batch).logits[:, label]

    return classify


def train_ppo(settings, snapshots):
    """Train as the settings say, with the loop of TRL's example for sentiment.

    settings: fields of ppo_sentiment.py's Args, and batches: for each update prompts (lists of ids) and
    limits (the longest length of each response)
    """
    # PPOTrainer.step passes no position ids, so GPT-2 needs padding on the right there. generate pads on the
    # left by itself.
    tokenizer = load_tokenizer(settings["model_name_or_path"], "right")
    no_dropout = dict(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    policy, reference = (
        AutoModelForCausalLMWithValueHead.from_pretrained(
            settings["model_name_or_path"], torch_dtype=torch.float32, **no_dropout
        )
        for _ in range(2)
    )
    classify = load_classifier(settings)
    updates = settings["updates"]
    mini_batch_size = settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"]
    batch_size = mini_batch_size * settings["num_mini_batches"]
    config = PPOConfig(
        **select(
            settings,
            "seed learning_rate gradient_accumulation_steps gamma lam cliprange cliprange_value vf_coef "
            "score_clip whiten_rewards max_grad_norm",
        ),
        batch_size=batch_size,
        mini_batch_size=settings["per_device_train_batch_size"],
        ppo_epochs=settings["num_ppo_epochs"],
        init_kl_coef=settings["kl_coef"],
        adap_kl_ctrl=settings["kl_target"] is not None,
        target=settings["kl_target"],
        horizon=settings["kl_horizon"],
        ratio_threshold=math.inf,  # no minibatch is skipped
    )
    assert settings["lr_scheduler_type"] == "linear" and settings["temperature"] == 1
    optimizer = torch.optim.Adam(policy.parameters(), lr=settings["learning_rate"])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 - update / updates)
    trainer = PPOTrainer(
        config=config,
        model=policy,
        ref_model=reference,
        tokenizer=tokenizer,
        optimizer=optimizer,
        lr_scheduler=scheduler,
    )
    snapshots.see(0, policy.pretrained_model)
    for update, batch in enumerate(settings["batches"], 1):
        queries = [torch.tensor(ids) for ids in batch["prompts"]]
        responses = trainer.generate(
            queries,
            batch_size=settings["local_rollout_forward_batch_size"],
            return_prompt=False,
            max_new_tokens=settings["response_length"],
            do_sample=True,
            top_k=0,
            top_p=1.0,
            pad_token_id=tokenizer.pad_token_id,
        )
        responses = [ids[:limit] for ids, limit in zip(responses, batch["limits"])]
        texts = [torch.cat(pair).tolist() for pair in zip(queries, responses)]
        scores = classify(tokenizer.batch_decode(texts, skip_special_tokens=True))
        trainer.step(queries, responses, list(scores))
        snapshots.see(update, policy.pretrained_model)


if __name__ == "__main__":
    algorithm, folder = sys.argv[1], Path(sys.argv[2])
    settings = json.loads((folder / "settings.json").read_text())
    snapshots = Snapshots(settings["updates"])
    train = train_ppo if algorithm == "ppo" else train_rloo
    train(settings, snapshots)
    torch.save(snapshots.copies, folder / "copies.pt")
