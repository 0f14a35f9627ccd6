"""CPU time and memory of dpo_tldr.py and TRL's DPOTrainer, on the same pairs with the same model.

    python benchmarks/speed/dpo.py --rounds 3            # in an environment with TRL 1.16; writes results/speed/dpo.jsonl
    python benchmarks/speed/dpo.py --show                # prints the table of docs/dpo_tldr.md

A GPT-NeoX of the size of pythia-14m with random weights and a vocabulary of 50,304 reads the first pairs of
data/tldr-preference: 8 updates of 8 pairs, one thread, fp32, SGD. Each contestant runs alone in a
process, in turn. Seconds are the CPU time of that process from the first to the last update, with the log-probabilities of
the reference: so other programs on the machine matter less. TRL computes the reference in each update (default), or
before (precompute_ref_log_probs), as ours does. Both are told not to evaluate or save.
"""

import argparse
import gzip
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results/speed/dpo.jsonl"
UPDATES, BATCH = 8, 8
CONTESTANTS = ("ours", "TRL 1.16", "TRL 1.16, reference before")


def make_job(folder):
    """The model, its tokenizer and the pairs."""
    import torch
    from transformers import AutoTokenizer, GPTNeoXConfig, GPTNeoXForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "checkpoints/tldr-sft")
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=50304,
        hidden_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    GPTNeoXForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    with gzip.open(ROOT / "data/tldr-preference/train.jsonl.gz", "rt") as file:
        rows = [json.loads(next(file)) for _ in range(UPDATES * BATCH)]
    (folder / "data").mkdir()
    for split in ("train", "test"):
        lines = rows if split == "train" else rows[:8]
        (folder / f"data/{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))


def run_ours(folder):
    """-> CPU seconds of the reference and the updates"""
    sys.path.insert(0, str(ROOT))
    import dpo_tldr

    marks = {}
    pair_logprobs, log = dpo_tldr.pair_logprobs, dpo_tldr.Run.log

    def timed(model, pairs, args, accelerator):
        start = time.process_time()
        result = pair_logprobs(model, pairs, args, accelerator)
        if len(pairs) == UPDATES * BATCH:
            marks["reference"] = time.process_time() - start
        return result

    def logged(self, metrics):
        marks.setdefault("first", time.process_time())
        marks["last"] = time.process_time()
        return log(self, metrics)

    dpo_tldr.pair_logprobs, dpo_tldr.Run.log = timed, logged
    dpo_tldr.train(
        dpo_tldr.Args(
            model_name_or_path=str(folder / "model"),
            dataset_name=str(folder / "data"),
            output_dir=str(folder / "ours"),
            dtype="float32",
            num_train_epochs=1.0,
            per_device_train_batch_size=BATCH,
            optimizer="torch.optim.SGD",
            learning_rate=1e-3,
            num_eval_prompts=1,
            response_length=1,
            save_every=0,
        )
    )
    # The first update is not counted: it warms up. Nor is its share of the reference.
    return marks["last"] - marks["first"] + marks["reference"] * (UPDATES - 1) / UPDATES


def run_trl(folder, precompute):
    """-> the same for DPOTrainer"""
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    marks = {}

    class Clock(TrainerCallback):
        def on_step_end(self, *rest, **more):
            marks.setdefault("first", time.process_time())
            marks["last"] = time.process_time()

    def load():
        return AutoModelForCausalLM.from_pretrained(folder / "model", dtype="float32")

    args = DPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=BATCH,
        num_train_epochs=1,
        optim="sgd",
        learning_rate=1e-3,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        precompute_ref_log_probs=precompute,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        max_length=None,
    )
    data = load_dataset(
        "json", data_files=str(folder / "data/train.jsonl"), split="train", cache_dir=str(folder)
    )
    start = time.process_time()
    trainer = DPOTrainer(
        load(),
        None if precompute else load(),
        args,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[Clock()],
    )
    reference = time.process_time() - start if precompute else 0.0  # with the tokens, which take little
    trainer.train()
    return marks["last"] - marks["first"] + reference * (UPDATES - 1) / UPDATES


def run_one(contestant, folder):
    folder = Path(folder)
    seconds = run_ours(folder) if contestant == "ours" else run_trl(folder, "before" in contestant)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    pairs = (UPDATES - 1) * BATCH
    line = dict(
        contestant=contestant, pairs_per_cpu_second=pairs / seconds, peak_mb=peak, load=os.getloadavg()[0]
    )
    print("RESULT " + json.dumps(line))


def run_all(rounds):
    lines = []
    with tempfile.TemporaryDirectory() as work:
        make_job(Path(work))
        for _ in range(rounds):
            for contestant in CONTESTANTS:
                words = [sys.executable, __file__, "--one", contestant, "--folder", work]
                env = os.environ | dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
                done = subprocess.run(words, capture_output=True, text=True, env=env)
                found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
                assert found, done.stderr[-3000:]
                lines.append(found[0].removeprefix("RESULT "))
                print(lines[-1], flush=True)
                subprocess.run(["rm", "-rf", f"{work}/ours", f"{work}/trl"], check=True)
    RESULTS.write_text("".join(line + "\n" for line in lines))


def table():
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    lines = ["| | pairs per CPU second | peak memory, MiB |", "|---|---|---|"]
    for contestant in CONTESTANTS:
        mine = [row for row in rows if row["contestant"] == contestant]
        speeds = [row["pairs_per_cpu_second"] for row in mine]
        peak = statistics.median(row["peak_mb"] for row in mine)
        speed = f"{statistics.median(speeds):.1f} ({min(speeds):.1f} to {max(speeds):.1f})"
        lines.append(f"| {contestant} | {speed} | {peak:.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--one")
    parser.add_argument("--folder")
    options = parser.parse_args()
    if options.one:
        run_one(options.one, options.folder)
    elif options.show:
        print(table())
    else:
        run_all(options.rounds)
