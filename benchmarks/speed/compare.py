"""Our scripts and TRL's trainers: the same models, prompts, lengths, batches, epochs and optimizer steps.

    python benchmarks/speed/compare.py rloo --peers FOLDER    # one comparison; `all` runs all of them
    python benchmarks/speed/compare.py rloo --show            # only the table of the committed results

FOLDER is where install_peers.sh put TRL and the models. Each contestant has its own process, and they take turns:
A B C C B A ... docs/speed.md says what the numbers mean. Two versions of our scripts, without TRL and a network:

    python benchmarks/speed/build_models.py FOLDER/models
    python benchmarks/speed/compare.py sft --peers FOLDER --rows FOLDER/models/texts --results RESULTS \\
        --other CHECKOUT --only "ours fp32" other      # for reward-model: FOLDER/models/pairs
"""

import argparse
import json
import os
import platform
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OLD, NEW = "TRL 0.11.4", "TRL 1.16.0"

# ---- What is compared: jobs, and who takes part ------------------------------------------------------------

RLOO = dict(
    script="rloo_tldr.py",
    model="neox14m",
    prompts="prompts_50k",
    batch=64,
    epochs=2,
    mini_batches=2,
    micro_batch=8,
    prompt=(64, 64),
    response=(53, 53),
    temperature=0.7,
    learning_rate=3e-6,
    rloo_k=2,
    reward_model=True,
)
LONG = dict(prompts="prompts_50k_long", prompt=(448, 448), rloo_k=4, batch=32, mini_batches=1)
SENTIMENT = dict(
    script="ppo_sentiment.py",
    model="gpt2_small",
    prompts="prompts_50k",
    batch=32,
    epochs=4,
    mini_batches=2,
    micro_batch=16,
    prompt=(2, 7),
    response=(4, 15),
    temperature=1.0,
    learning_rate=1.41e-5,
)
SFT = dict(
    script="sft.py",
    model="neox14m",
    micro_batch=8,
    accumulation=1,
    max_length=512,
    learning_rate=5e-5,
    rows="stanfordnlp/imdb",
)
ARITHMETIC = dict(  # the default of grpo_math.py, shortened; it has no peer here
    script="grpo_math.py",
    model=str(ROOT / "checkpoints/arithmetic-sft"),
    batch=256,
    epochs=1,
    mini_batches=1,
    micro_batch=64,
    prompt=(15, 20),
    response=(1, 48),
    temperature=1.0,
)
JOBS = {
    "rloo": RLOO,
    "rloo-long": RLOO | LONG,
    "ppo-token": RLOO | dict(script="ppo_sentiment.py", critic=True),
    "ppo-sentiment-small": SENTIMENT,
    "sft": SFT,
    "reward-model": SFT | dict(script="reward_model.py", accumulation=4, rows="trl-lib/tldr-preference"),
    "grpo-math": ARITHMETIC,
}
OURS = {"ours fp32": {}}  # name -> more flags
LORA = {"ours fp32, LoRA": dict(lora_r=16, lora_target_modules="c_attn")}
# peers: name -> (environment, script, flags)
RLOO_PEERS = {OLD: ("trl_old", "trl_old_rloo.py", ""), NEW: ("trl_new", "trl_new_rloo.py", "")}
TOKEN_PEERS = {
    f"{OLD}, PPOv2": ("trl_old", "trl_old_ppov2.py", ""),
    "TRL 1.12.0, PPO": ("trl_new", "trl_new_ppo.py", "--trl-path {peers}/trl_1_12"),
}
SENTIMENT_PEERS = {
    f"{OLD}, {name}": ("trl_old", "trl_old_ppo_step.py", flags)
    for name, flags in {
        "one query at a time": "--query-max 8 --response-max 16",
        "in one batch": "--generation-batch {batch}",
        "in one batch, LoRA": "--generation-batch {batch} --lora-r 16",
    }.items()
}
SFT_PEERS = {
    f"{NEW}, {name}": ("trl_new", "trl_new_sft.py", flags)
    for name, flags in {
        "packing bfd": "--packing bfd",
        "packing wrapped": "--packing wrapped",
        "padding": "--packing none",
    }.items()
}
CONTESTANTS = {
    "rloo": OURS | RLOO_PEERS,
    "rloo-long": OURS | RLOO_PEERS,
    "ppo-token": OURS | TOKEN_PEERS,
    "ppo-sentiment-small": OURS | LORA | SENTIMENT_PEERS,
    "sft": OURS | SFT_PEERS,
    "reward-model": OURS | {NEW: ("trl_new", "trl_new_reward.py", "")},
    "grpo-math": OURS,
}


# ---- The machine -------------------------------------------------------------------------------------------


def describe_machine(threads):
    """What decides the numbers, without names: CPU, cores, instructions, threads, versions."""
    import psutil
    import torch
    import transformers

    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"model name\s*: (.*)", text)
    flags = {word for word in text.split() if re.fullmatch(r"avx2|avx512f|avx512_bf16|amx_\w+", word)}
    return {
        "cpu": model[1] if model else platform.machine(),
        "cores": os.cpu_count(),
        "flags": sorted(flags),
        "threads": threads,
        "memory_gb": round(psutil.virtual_memory().total / 2**30),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def run(command, threads, log):
    """A process with its threads fixed. -> what it printed; if it fails, the comparison ends with its log"""
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    env |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    with open(log, "w") as errors:
        done = subprocess.run(
            command, env=env, cwd=log.parent, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    if done.returncode:
        words = " ".join(map(str, command))
        sys.exit(f"failed ({done.returncode}): {words}\n{done.stdout[-3000:]}\n{log.read_text()[-3000:]}")
    return done.stdout


# ---- Contestants -------------------------------------------------------------------------------------------


def flags_of(options):
    """{"a_b": 1, "c": ["x", "y"]} -> ["--a-b", "1", "--c", "x", "y"]"""
    words = []
    for name, value in options.items():
        words.append(f"--{name.replace('_', '-')}")
        words += value if isinstance(value, list) else [str(value)]
    return words


def our_command(job, changes, models, rows, batches, out, root=ROOT):
    """One of our scripts with its normal flags. What is not compared is off, or as small as possible.

    root: this repository or another checkout; the flags here are those of both
    """
    script = job["script"]
    flags = dict(output_dir=out, save_every=0)
    if "batch" in job:
        flags |= dict(total_episodes=batches * job["batch"], num_sample_generations=0)
    if script == "grpo_math.py":  # its default
        return [sys.executable, root / script, *flags_of(flags | dict(num_eval_prompts=1) | changes)]
    model = models / job["model"]
    flags |= dict(
        model_name_or_path=model,
        dtype="float32",
        per_device_train_batch_size=job["micro_batch"],
        learning_rate=job["learning_rate"],
    )
    if "batch" in job:
        flags |= dict(
            dataset_name=models / job["prompts"],
            gradient_accumulation_steps=job["batch"] // job["mini_batches"] // job["micro_batch"],
            num_mini_batches=job["mini_batches"],
            num_ppo_epochs=job["epochs"],
            response_length=job["response"][1],
            temperature=job["temperature"],
            local_rollout_forward_batch_size=job["batch"],
        )
    else:
        flags |= dict(
            dataset_name=rows,
            gradient_accumulation_steps=job["accumulation"],
            max_length=job["max_length"],
            num_train_epochs=1.0,
            num_eval_prompts=1,
        )
    if script == "sft.py":
        flags |= dict(num_samples=0)
    if "reward_model" in job:
        flags |= dict(reward_model_path=f"{model}_rm", missing_eos_penalty=1.0)
    if script == "rloo_tldr.py":
        flags |= dict(rloo_k=job["rloo_k"], num_eval_prompts=1)
    if script == "ppo_sentiment.py":
        flags |= dict(
            query_min_length=job["prompt"][0],
            query_max_length=job["prompt"][1],
            response_min_length=job["response"][0],
            min_text_length=0,
            num_eval_prompts=1,
        )
        if "critic" in job:
            flags |= dict(reward_model_path=f"{model}_labels", reward_label="LABEL_0")
            flags |= dict(value_model_path=f"{model}_rm", kl_target=None, kl_coef=0.05)
        else:
            flags |= dict(reward_fn=[f"{HERE / 'reward.py'}:distinct_letters"])
    return [sys.executable, root / script, *flags_of(flags | changes)]


def read_ours(folder, job, rows):
    """metrics.jsonl -> for each batch seconds, rollout, train, prompt_tokens and response_tokens; peak memory"""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    batches = []
    for i, line in enumerate(lines):
        seconds, prompt_tokens = line["perf/seconds"], 0
        if "batch" in job:  # the mean of the drawn prompt lengths is taken for all
            prompt_tokens = job["batch"] * sum(job["prompt"]) / 2
            response_tokens = job["batch"] * line["completions/mean_length"]
        elif job["script"] == "sft.py":
            response_tokens = round(line["perf/tokens_per_second"] * seconds)
        else:  # the rows of each update, drawn as the script draws them
            lengths = json.loads((rows / "lengths.json").read_text())
            size = job["micro_batch"] * job["accumulation"]
            drawn = runpy.run_path(ROOT / job["script"])["stream_rows"](len(lengths), i * size, size, 1)
            response_tokens = sum(lengths[row] for row in drawn.tolist())
        batches.append({
            "seconds": seconds,
            "train": line.get("perf/train_seconds", seconds),
            "rollout": line.get("perf/rollout_seconds", 0.0),
            "prompt_tokens": prompt_tokens,
            "response_tokens": response_tokens,
        })  # fmt: skip
    versions = json.loads((folder / "args.json").read_text())["versions"]
    return dict(batches=batches, peak_memory_mb=lines[-1]["perf/peak_memory_mb"], versions=versions)


def peer_command(job, entry, args, models, rows):
    """A script of peers/ in its own environment."""
    environment, script, extra = entry
    flags = dict(
        model=models / job["model"],
        batches=args.batches,
        micro_batch=job["micro_batch"],
        learning_rate=job["learning_rate"],
    )
    if "batch" in job:
        flags |= dict(
            prompts=models / job["prompts"],
            batch=job["batch"],
            epochs=job["epochs"],
            mini_batches=job["mini_batches"],
            prompt_tokens=job["prompt"][1],
            response_length=job["response"][1],
            temperature=job["temperature"],
            rollout_batch=job["batch"],
        )
        if job["script"] == "rloo_tldr.py":
            flags |= dict(rloo_k=job["rloo_k"])
    else:
        flags |= dict(rows=rows, max_length=job["max_length"], accumulation=job["accumulation"])
    words = extra.format(batch=job.get("batch"), peers=args.peers).split()
    return [args.peers / environment / "bin/python", HERE / "peers" / script, *flags_of(flags), *words]


def write_rows(job, name, models, batches, folder):
    """The rows of sft and reward-model, enough for `batches` updates, that fit max_length: the same for all.

    name: a Hub name or a folder. lengths.json: their tokens
    """
    from datasets import disable_progress_bars, load_dataset
    from transformers import AutoTokenizer

    disable_progress_bars()
    found, tokenizer = load_dataset(str(name)), AutoTokenizer.from_pretrained(models / job["model"])
    is_text = job["script"] == "sft.py"
    need = batches * job["micro_batch"] * job["accumulation"]  # pairs; or max_length tokens of text
    lines, lengths = [], []
    for row in found["train"].shuffle(seed=0):
        if is_text:
            row = dict(text=row["text"] if "text" in row else row["prompt"] + row["completion"])
            texts = [row["text"]]
        else:
            row = {key: row[key] for key in ("prompt", "chosen", "rejected") if key in row}
            texts = [row.get("prompt", "") + row[key] for key in ("chosen", "rejected")]
        ids = tokenizer(texts).input_ids
        if all(texts) and max(map(len, ids)) < job["max_length"]:
            lines.append(json.dumps(row) + "\n")
            lengths.append(sum(len(x) + 1 for x in ids))  # + 1: EOS
        if (sum(lengths) / job["max_length"] if is_text else len(lines)) >= need:
            break
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(lines))
    (folder / "test.jsonl").write_text("".join(lines[:2]))
    (folder / "lengths.json").write_text(json.dumps(lengths))


def run_contestant(name, who, entry, args, rows, work):
    """One run. -> a line of the results"""
    job, models, log = JOBS[name], args.peers / "models", work / "log"
    load = os.getloadavg()[0]
    if isinstance(entry, dict):
        root = args.other if who == "other" else ROOT
        out = Path(tempfile.mkdtemp(dir=work)) / "run"
        run(our_command(job, entry, models, rows, args.batches, out, root), args.threads, log)
        line = read_ours(out, job, rows)
    else:
        printed = run(peer_command(job, entry, args, models, rows), args.threads, log)
        line = json.loads(printed.strip().splitlines()[-1])
    about = {
        "comparison": name,
        "contestant": who,
        "ours": isinstance(entry, dict),
        "flags": entry if isinstance(entry, dict) else entry[2],
        "load_average": load,
    }
    return about | line | dict(job=job, machine=describe_machine(args.threads))


def compare(name, args):
    """All rounds of one comparison; their lines are written to the results as they come."""
    job, file = JOBS[name], args.results / f"{name}.jsonl"
    contestants = CONTESTANTS[name] | ({"other": {}} if args.other else {})
    entries = [(who, entry) for who, entry in contestants.items() if not args.only or who in args.only]
    args.results.mkdir(parents=True, exist_ok=True)
    file.write_text("")
    with tempfile.TemporaryDirectory() as work:
        rows = Path(work, "rows")
        if "rows" in job:
            write_rows(job, args.rows or job["rows"], args.peers / "models", args.batches, rows)
        for number in range(args.rounds):
            for who, entry in entries if number % 2 == 0 else entries[::-1]:
                line = {"round": number} | run_contestant(name, who, entry, args, rows, Path(work))
                with open(file, "a") as lines:
                    lines.write(json.dumps(line) + "\n")
                seconds = median(batch["seconds"] for batch in timed(line))
                print(f"{name}, round {number + 1}, {who}: {seconds:.3f} s per batch", flush=True)
    show(name, args)


# ---- The table ---------------------------------------------------------------------------------------------


def timed(line):
    """The batches that count: all but the first, which warms up."""
    return line["batches"][1:] or line["batches"]


def numbers(line):
    """One run -> its row of the table."""
    job, batches = line["job"], timed(line)
    is_rl = "batch" in job
    rates = [(batch["prompt_tokens"] + batch["response_tokens"]) / batch["seconds"] for batch in batches]
    seconds = median(batch["seconds"] for batch in batches)
    row = {"episodes/s": job["batch"] / seconds} if is_rl else {}
    row |= {"tokens/s": median(rates), "s per batch": seconds}
    for phase in ("rollout", "train") if is_rl else ():
        row[phase] = median(batch[phase] for batch in batches)
    return row | {"peak MB": line["peak_memory_mb"]}


def table(header, rows):
    """A table in Markdown."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def show(name, args):
    """Medians over the rounds; ratios ours / peer of the medians, in brackets the smallest and largest round."""
    runs = {}
    lines = [json.loads(line) for line in (args.results / f"{name}.jsonl").read_text().splitlines()]
    for line in lines:
        runs.setdefault(line["contestant"], []).append(line)
    for found in runs.values():  # every second round runs in reverse order
        found.sort(key=lambda line: line.get("round", 0))
    rows = {who: [numbers(line) for line in found] for who, found in runs.items()}
    machine, loads = lines[0]["machine"], [line["load_average"] for line in lines]
    print(
        f"\n{name}: {lines[0]['job']['model']}, {max(map(len, runs.values()))} rounds of "
        f"{len(lines[0]['batches'])} batches, the first not counted; {machine['cpu']}, {machine['cores']} cores "
        f"({' '.join(machine['flags'])}), {machine['threads']} threads, load {min(loads):.1f} to "
        f"{max(loads):.1f}\n"
    )
    names = list(next(iter(rows.values()))[0])
    medians = {who: {key: median(row[key] for row in found) for key in names} for who, found in rows.items()}
    cells = [[who, *(f"{row[key]:.4g}" for key in names)] for who, row in medians.items()]
    print(table(["contestant", *names], cells))
    peers = [who for who in runs if not runs[who][0]["ours"]] or [who for who in runs if who == "other"]
    ours = [who for who in runs if runs[who][0]["ours"] and who not in peers]
    shortest, longest = lines[0]["job"].get("response", (0, 0))
    # If lengths vary, tokens/s too, because episodes differ.
    for rate in names[: 1 + (shortest < longest)] if ours and peers else []:
        cells = []
        for who in ours:
            cells.append([who])
            for peer in peers:
                each = [a[rate] / b[rate] for a, b in zip(rows[who], rows[peer])]
                ratio = medians[who][rate] / medians[peer][rate]
                cells[-1].append(f"{ratio:.2f} ({min(each):.2f} to {max(each):.2f})")
        print(f"\n{table([f'{rate}, ours / peer', *peers], cells)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("comparison", choices=[*JOBS, "all"])
    parser.add_argument("--peers", type=Path, help="the folder of install_peers.sh")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", type=int, default=4, help="of each run; the first is not counted")
    parser.add_argument("--only", nargs="+", help="names of contestants, as the table gives them")
    parser.add_argument("--other", type=Path, help="another checkout of this repository: contestant `other`")
    parser.add_argument("--rows", type=Path, help="sft and reward-model: a folder with a copy of the data")
    parser.add_argument("--results", type=Path, default=ROOT / "results/speed")
    parser.add_argument("--show", action="store_true", help="print the table of earlier results, run nothing")
    args = parser.parse_args()
    for name in ("peers", "results", "other", "rows"):
        if getattr(args, name) is not None:
            setattr(args, name, getattr(args, name).resolve())
    if not args.show and not (args.peers and (args.peers / "models").is_dir()):
        parser.error("--peers FOLDER: run benchmarks/speed/install_peers.sh FOLDER first")
    for name in JOBS if args.comparison == "all" else [args.comparison]:
        show(name, args) if args.show else compare(name, args)


if __name__ == "__main__":
    main()
