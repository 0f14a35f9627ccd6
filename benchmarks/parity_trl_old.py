"""TRL 0.11.4's RLOOTrainer for parity_jobs.py, which starts it with the Python of an older environment:

python3 -m venv OLD && OLD/bin/pip install torch==2.13.0
OLD/bin/pip install trl==0.11.4 transformers==4.45.2 accelerate==0.34.2 'datasets<4' 'numpy<2.3' rich psutil tyro
TRL_PYTHON=OLD/bin/python python benchmarks/parity.py run rloo ...

TRL_PYTHON benchmarks/parity_trl_old.py FOLDER    # FOLDER/settings.json -> FOLDER/copies.pt
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from datasets import Dataset
from parity_snapshots import Snapshots
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast
from trl import RLOOConfig, RLOOTrainer


def load_tokenizer(folder):
    """The tokenizer of a checkpoint: the older transformers does not know its class."""
    names = json.loads((Path(folder) / "tokenizer_config.json").read_text())
    return PreTrainedTokenizerFast(
        tokenizer_file=f"{folder}/tokenizer.json",
        eos_token=names["eos_token"],
        pad_token=names["pad_token"],
        padding_side="left",
    )


def train(settings, snapshots):
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
            per_device_train_batch_size=settings["per_device_train_batch_size"],
            gradient_accumulation_steps=settings["gradient_accumulation_steps"],
            num_mini_batches=settings["num_mini_batches"],
            num_ppo_epochs=settings["num_ppo_epochs"],
            total_episodes=settings["total_episodes"],
            local_rollout_forward_batch_size=settings["local_rollout_forward_batch_size"],
            response_length=settings["response_length"],
            temperature=settings["temperature"],
            rloo_k=settings["rloo_k"],
            kl_coef=settings["kl_coef"],
            cliprange=settings["cliprange"],
            missing_eos_penalty=settings["missing_eos_penalty"],
            stop_token="eos",
            learning_rate=settings["learning_rate"],
            lr_scheduler_type=settings["lr_scheduler_type"],
            weight_decay=0.01,
            seed=settings["seed"],
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
        trainer.train()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    settings = json.loads((folder / "settings.json").read_text())
    snapshots = Snapshots(settings["updates"])
    train(settings, snapshots)
    torch.save(snapshots.copies, folder / "copies.pt")
