"""dpo_tldr.py and TRL 1.16's DPOTrainer with the same start, pairs, order and flags: do they learn the same?

    pip install trl==1.16.0
    OMP_NUM_THREADS=1 python benchmarks/trl_dpo.py run 1 2 3 4 5    # these seeds -> results/parity/dpo.jsonl
    python benchmarks/trl_dpo.py show                               # the table of docs/dpo_tldr.md

The flags are those of the recipe tiny, with two changes. There is no warm-up: TRL begins it with a learning rate of 0,
one update later than ours. And the optimizer is Adam: ours decays all weights, TRL no biases and norms. Each seed has
its own order of the first 3,008 pairs, 94 updates. TRL reads them in that order. Both compute the reference before.
"""

import gzip
import json
import sys
import tempfile
from pathlib import Path
from statistics import fmean, stdev

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results/parity/dpo.jsonl"
NUM_PAIRS = 3008
CURVES = ("loss", "rewards/margins", "logps/chosen", "logps/rejected", "grad_norm")
sys.path.insert(0, str(ROOT))


def make_data(folder):
    """A data set with the first pairs, and all held-out ones. -> its folder"""
    folder.mkdir()
    with gzip.open(ROOT / "data/tldr-preference/train.jsonl.gz", "rt") as file:
        (folder / "train.jsonl").write_text("".join(next(file) for _ in range(NUM_PAIRS)))
    (folder / "test.jsonl").write_text((ROOT / "data/tldr-preference/test.jsonl").read_text())
    return folder


def train_trl(dpo, args, folder):
    """-> the model that TRL's DPOTrainer trained, and its metrics in each update"""
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    config = trl.DPOConfig(
        output_dir=f"{folder}/trl",
        beta=args.beta,
        learning_rate=args.learning_rate,
        lr_scheduler_type=args.lr_scheduler_type,
        num_train_epochs=args.num_train_epochs,
        per_device_train_batch_size=args.per_device_train_batch_size,
        max_grad_norm=args.max_grad_norm,
        max_length=args.max_length,
        gradient_checkpointing=args.gradient_checkpointing,
        precompute_ref_log_probs=True,
        train_sampling_strategy="sequential",
        seed=args.seed,
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    tokenizer = dpo.load_tokenizer(args.model_name_or_path)
    rows, _ = dpo.load_splits(args.dataset_name)
    order = dpo.stream_rows(len(rows), 0, len(rows), args.seed).tolist()
    rows = [rows[i] for i in order]
    path = dpo.resolve_path(args.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    trainer = trl.DPOTrainer(
        model, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    pairs = dpo.load_pairs(rows, tokenizer, args)
    for pair, other in zip(pairs, trainer.train_dataset, strict=True):
        assert pair["ids"] == other["prompt_ids"]
        assert pair["responses"] == [other["chosen_ids"], other["rejected_ids"]]
    trainer.train()
    return trainer.model, [row for row in trainer.state.log_history if "loss" in row]


def run(seed):
    """Both sides with one seed. Appends a line for each to RESULTS."""
    import dpo_tldr as dpo

    with tempfile.TemporaryDirectory() as folder:
        data = make_data(Path(folder, "data"))
        flags = f"--seed {seed} --dataset-name {data} --output-dir {folder}/ours --warmup-ratio 0"
        flags += " --optimizer torch.optim.Adam --num-eval-prompts 8 --save-every 0"
        flags += " --eval-dataset-name data/tldr --judge-fn data/make_tldr.py:gold_score"
        args = dpo.parse_args(flags.split())
        tokenizer = dpo.load_tokenizer(args.model_name_or_path)
        held_out = dpo.load_pairs(dpo.load_splits(args.dataset_name)[1], tokenizer, args)
        accelerator = dpo.start_accelerator(args)
        start = dpo.pair_logprobs(dpo.PairPolicy(dpo.load_lm(args)), held_out, args, accelerator)
        model, run_folder = dpo.train(args)
        ours = model.policy, dpo.read_rows(run_folder / "metrics.jsonl")
        for side, (lm, updates) in (("ours", ours), ("TRL", train_trl(dpo, args, folder))):
            logprobs = dpo.pair_logprobs(dpo.PairPolicy(lm), held_out, args, accelerator)
            metrics = dpo.pair_metrics(logprobs, start, args.beta)
            held_out_means = {name: [x.mean().item()] for name, x in metrics.items()}
            curves = {name: [float(f"{row[name]:.6g}") for row in updates] for name in CURVES}
            line = {"seed": seed, "side": side, "held out": held_out_means, "updates": curves}
            with open(RESULTS, "a") as file:
                file.write(json.dumps(line) + "\n")


def table():
    """Both sides, the mean of their paired differences with its 95 % interval, and the largest difference."""
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    ours, theirs = [[line for line in lines if line["side"] == side] for side in ("ours", "TRL")]
    assert [line["seed"] for line in ours] == [line["seed"] for line in theirs]
    t = {3: 4.303, 4: 3.182, 5: 2.776}[len(ours)]  # Student's t, one degree of freedom less than seeds
    head = f"| {len(ours)} seeds | ours | TRL 1.16 | ours - TRL | largest difference |"
    rows = [head, "|---|---|---|---|---|"]
    names = [("held out", name) for name in ours[0]["held out"]] + [("updates", name) for name in CURVES]
    for part, name in names:
        x, y = [[line[part][name] for line in side] for side in (ours, theirs)]  # a list of numbers per seed
        gaps = [[p - q for p, q in zip(*pair)] for pair in zip(x, y)]
        mean_gaps = [fmean(row) for row in gaps]
        error = t * stdev(mean_gaps) / len(gaps) ** 0.5
        means = [fmean(map(fmean, side)) for side in (x, y)]
        largest = max(abs(gap) for row in gaps for gap in row)
        cells = f"{means[0]:.4f} | {means[1]:.4f} | {fmean(mean_gaps):.0e} +- {error:.0e} | {largest:.0e}"
        rows.append(f"| {part}: {name} | {cells} |")
    return "\n".join(rows)


if __name__ == "__main__":
    if sys.argv[1] == "run":
        for seed in sys.argv[2:]:
            run(int(seed))
    else:
        print(table())
