"""Our scripts and TRL's trainers: the same models, prompts, lengths, batches, epochs and optimizer steps.

    python benchmarks/speed/compare.py rloo --peers FOLDER    # one comparison; `all` runs all of them
    python benchmarks/speed/compare.py rloo --show            # only the table of the committed results
    python benchmarks/speed/compare.py rloo --peers FOLDER --other CHECKOUT --only "ours fp32" other

FOLDER is where install_peers.sh put TRL and the models. The last command compares two versions of our scripts.
Each contestant has its own process, and they take turns: A B C A B C ... docs/speed.md says what the numbers mean.
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

# ---- What is compared: jobs, and who takes part ------------------------------------------------------------------------
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
    flops=dict(forward=2, reward=1),
)
LONG = RLOO | dict(prompts="prompts_50k_long", prompt=(448, 448), rloo_k=4, batch=32, mini_batches=1)
TOKEN = RLOO | dict(script="ppo_sentiment.py", flops=dict(forward=2, reward=2, critic=True))
SENTIMENT = dict(
    script="ppo_sentiment.py",
    model="gpt2_tiny",
    prompts="prompts_4k",
    batch=128,
    epochs=4,
    mini_batches=8,
    micro_batch=16,
    prompt=(2, 7),
    response=(4, 15),
    temperature=1.0,
    learning_rate=1.41e-5,
    flops=dict(forward=2),
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
PAIRS = SFT | dict(script="reward_model.py", accumulation=4, rows="trl-lib/tldr-preference")
ARITHMETIC = dict(  # the default of grpo_math.py, shortened; it has no peer here
    script="grpo_math.py",
    model=str(ROOT / "checkpoints/arithmetic-sft"),
    batch=256,
    epochs=1,
    mini_batches=1,
    micro_batch=64,
    prompt=(15, 20),
    response=(48, 48),
    temperature=1.0,
    flops=dict(forward=1),
)
JOBS = {
    "rloo": RLOO,
    "rloo-eos": RLOO | dict(model="neox14m_eos"),
    "rloo-long": LONG,
    "rloo-long-two": LONG | dict(mini_batches=2),
    "rloo-long-small": LONG | dict(model="gpt2_small", batch=8),
    "ppo-token": TOKEN,
    "ppo-sentiment": SENTIMENT,
    "ppo-sentiment-small": SENTIMENT
    | dict(model="gpt2_small", prompts="prompts_50k", batch=32, mini_batches=2),
    "sft": SFT,
    "reward-model": PAIRS,
    "grpo-math": ARITHMETIC,
}
OURS = {"ours fp32": {}}  # name -> more flags
LORA = {"ours fp32, LoRA": dict(lora_r=16)}
# peers: name -> (environment, script, flags)
RLOO_PEERS = {
    OLD: ("trl_old", "trl_old_rloo.py", ""),
    NEW: ("trl_new", "trl_new_rloo.py", ""),
}
SENTIMENT_PEERS = {
    f"{OLD}, one query at a time": ("trl_old", "trl_old_ppo_step.py", "--query-max 8 --response-max 16"),
    f"{OLD}, in one batch": ("trl_old", "trl_old_ppo_step.py", "--generation-batch {batch}"),
    f"{OLD}, in one batch, LoRA": (
        "trl_old",
        "trl_old_ppo_step.py",
        "--generation-batch {batch} --lora-r 16",
    ),
}
SFT_PEERS = {
    f"{NEW}, packing bfd": ("trl_new", "trl_new_sft.py", "--packing bfd"),
    f"{NEW}, packing wrapped": ("trl_new", "trl_new_sft.py", "--packing wrapped"),
    f"{NEW}, padding": ("trl_new", "trl_new_sft.py", "--packing none"),
}
PAIRS_PEERS = {NEW: ("trl_new", "trl_new_reward.py", "")}
TOKEN_PEERS = {
    f"{OLD}, PPOv2": ("trl_old", "trl_old_ppov2.py", ""),
    "TRL 1.12.0, PPO": ("trl_new", "trl_new_ppo.py", "--trl-path {peers}/trl_1_12"),
}
CONTESTANTS = {
    "rloo": OURS | RLOO_PEERS,
    "rloo-eos": OURS | RLOO_PEERS,
    "rloo-long": OURS | RLOO_PEERS,
    "rloo-long-two": OURS | RLOO_PEERS,
    "rloo-long-small": OURS,
    "ppo-token": OURS | TOKEN_PEERS,
    "ppo-sentiment": OURS | LORA | SENTIMENT_PEERS,
    "ppo-sentiment-small": OURS | LORA | SENTIMENT_PEERS,
    "sft": OURS | SFT_PEERS,
    "reward-model": OURS | PAIRS_PEERS,
    "grpo-math": OURS,
}


# ---- The machine ------------------------------------------------------------------------------------------------------
def describe_machine(threads):
    """What decides the numbers, without names: CPU, cores, the instructions that matter, threads, versions
    of our side."""
    import psutil
    import torch
    import transformers

    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"model name\s*: (.*)", text)
    flags = sorted(
        {
            word
            for word in re.findall(r"\w+", text)
            if re.fullmatch(r"avx2|avx512f|avx512_bf16|avx512_vnni|amx_\w+", word)
        }
    )
    versions = dict(
        python=platform.python_version(), torch=torch.__version__, transformers=transformers.__version__
    )
    about = dict(
        cpu=model[1] if model else platform.machine(), cores=os.cpu_count(), flags=flags, threads=threads
    )
    return about | dict(memory_gb=round(psutil.virtual_memory().total / 2**30)) | versions


GEMM = """
import statistics, time, torch
def gflops(dtype, m=1024, k=768, n=3072):
    x, w, seconds = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype), []
    for _ in range(33):
        began = time.perf_counter(); x @ w; seconds.append(time.perf_counter() - began)
    return 2 * m * k * n / statistics.median(seconds[3:]) / 1e9
print(gflops(torch.float32), gflops(torch.bfloat16))
"""


def run(command, threads, log):
    """A process with its threads fixed -> what it printed. If it fails, its last lines are shown and the
    comparison ends."""
    env = os.environ | dict(
        OMP_NUM_THREADS=str(threads),
        MKL_NUM_THREADS=str(threads),
        TOKENIZERS_PARALLELISM="false",
        HF_HUB_OFFLINE="1",
    )
    with open(log, "w") as errors:
        done = subprocess.run(
            command, env=env, cwd=log.parent, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    if done.returncode:
        sys.exit(
            "\n".join(
                [
                    f"failed ({done.returncode}): {' '.join(map(str, command))}",
                    done.stdout[-3000:],
                    log.read_text()[-3000:],
                ]
            )
        )
    return done.stdout


# ---- Contestants -------------------------------------------------------------------------------------------------------
def flags_of(options):
    """{"a_b": 1, "c": ["x", "y"]} -> ["--a-b", "1", "--c", "x", "y"]; True and False are switches."""
    words = []
    for name, value in options.items():
        if value is False:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if isinstance(value, list):
            words += value
        elif value is not True:
            words.append(str(value))
    return words


def our_command(job, changes, models, rows, batches, out, root=ROOT):
    """One of our scripts with its normal flags. What a comparison does not want is off, or as small as the
    script allows."""
    if job["script"] == "grpo_math.py":
        flags = dict(
            output_dir=out, save_every=0, total_episodes=batches * job["batch"], num_sample_generations=0
        )
        return [sys.executable, root / job["script"], *flags_of(flags | dict(num_examples=1) | changes)]
    model = models / job["model"]
    passes = (
        job["batch"] // job["mini_batches"] // job["micro_batch"] if "batch" in job else job["accumulation"]
    )
    flags = dict(
        model_name_or_path=model,
        dtype="float32",
        per_device_train_batch_size=job["micro_batch"],
        output_dir=out,
        save_every=0,
        learning_rate=job["learning_rate"],
        gradient_accumulation_steps=passes,
    )
    if "batch" in job:
        shortest, longest = job["response"]
        flags |= dict(
            dataset_name=models / job["prompts"],
            total_episodes=batches * job["batch"],
            num_mini_batches=job["mini_batches"],
            num_ppo_epochs=job["epochs"],
            response_length=longest,
            temperature=job["temperature"],
            local_rollout_forward_batch_size=job["batch"],
            num_sample_generations=0,
        )
        reward = dict(reward_model_path=f"{model}_rm", missing_eos_penalty=1.0)
        if job["script"] == "rloo_tldr.py":
            flags |= reward | dict(rloo_k=job["rloo_k"], num_examples=1)
        else:
            flags |= dict(
                query_min_length=job["prompt"][0],
                query_max_length=job["prompt"][1],
                response_min_length=shortest,
                min_text_length=0,
                num_eval_prompts=1,
            )
            critic = dict(reward_label=0, value_model_path=f"{model}_rm", kl_target=None, kl_coef=0.05)
            flags |= (
                reward | critic
                if "critic" in job["flops"]
                else dict(reward_fn=[f"{HERE / 'reward.py'}:distinct_letters"])
            )
    else:
        flags |= dict(dataset_name=rows, max_length=job["max_length"], num_train_epochs=1.0, num_eval_rows=1)
        flags |= dict(num_samples=0) if job["script"] == "sft.py" else {}
    return [sys.executable, root / job["script"], *flags_of(flags | changes)]


def read_ours(folder, job, rows):
    """metrics.jsonl -> seconds, rollout, train, prompt_tokens, response_tokens of each batch, and the peak
    of memory."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    batches = [
        dict(
            seconds=line["perf/seconds"],
            train=line.get("perf/train_seconds", line["perf/seconds"]),
            rollout=line.get("perf/rollout_seconds", 0.0),
        )
        for line in lines
    ]
    for i, (batch, line) in enumerate(zip(batches, lines)):
        if "batch" in job:  # the mean of the drawn prompt lengths stands for them
            batch |= dict(prompt_tokens=job["batch"] * sum(job["prompt"]) / 2)
            batch |= dict(response_tokens=job["batch"] * line["completions/mean_length"])
        elif job["script"] == "sft.py":
            batch |= dict(
                prompt_tokens=0, response_tokens=round(line["perf/tokens_per_second"] * line["perf/seconds"])
            )
        else:  # the rows of each update, drawn as the script draws them
            lengths = json.loads((rows / "lengths.json").read_text())
            size = job["micro_batch"] * job["accumulation"]
            drawn = runpy.run_path(ROOT / job["script"])["stream_rows"](len(lengths), i * size, size, 1)
            batch |= dict(prompt_tokens=0, response_tokens=sum(lengths[row] for row in drawn.tolist()))
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
    extra = extra.format(batch=job.get("batch"), peers=args.peers)
    return [
        args.peers / environment / "bin/python",
        HERE / "peers" / script,
        *flags_of(flags),
        *extra.split(),
    ]


def write_rows(job, name, models, batches, folder):
    """The rows of sft and reward-model, enough for `batches` updates, that fit max_length: the same for
    all. lengths.json: their tokens."""
    from datasets import disable_progress_bars, load_dataset
    from transformers import AutoTokenizer

    disable_progress_bars()
    found, tokenizer = load_dataset(name), AutoTokenizer.from_pretrained(models / job["model"])
    found = found["train"] if "train" in found else next(iter(found.values()))
    need = (
        batches * job["micro_batch"] * job["accumulation"]
    )  # rows of pairs; of text, that many times max_length tokens
    rows, lengths = [], []
    for row in found.shuffle(seed=0):
        if job["script"] == "sft.py":
            row = dict(text=row["text"] if "text" in row else row["prompt"] + row["completion"])
            texts = [row["text"]]
        else:
            row = {key: row[key] for key in ("prompt", "chosen", "rejected") if key in row}
            texts = [row.get("prompt", "") + row[key] for key in ("chosen", "rejected")]
        ids = tokenizer(texts).input_ids
        if all(texts) and max(map(len, ids)) < job["max_length"]:
            rows.append(json.dumps(row) + "\n")
            lengths.append(sum(len(x) + 1 for x in ids))  # + 1: EOS
        if (sum(lengths) / job["max_length"] if job["script"] == "sft.py" else len(rows)) >= need:
            break
    (folder / "train.jsonl").write_text("".join(rows))
    (folder / "test.jsonl").write_text("".join(rows[:2]))
    (folder / "lengths.json").write_text(json.dumps(lengths))


def compare(name, args):
    """All rounds of one comparison -> its lines, also appended to the results' file as they come."""
    job, file = JOBS[name], args.results / f"{name}.jsonl"
    models, machine = args.peers / "models", describe_machine(args.threads)
    contestants = CONTESTANTS[name] | ({"other": {}} if args.other else {})
    entries = {who: entry for who, entry in contestants.items() if not args.only or who in args.only}
    args.results.mkdir(parents=True, exist_ok=True)
    file.write_text("")
    with tempfile.TemporaryDirectory() as work:
        rows = Path(work, "rows")
        rows.mkdir()
        if "rows" in job:
            write_rows(job, args.rows or job["rows"], models, args.batches, rows)
        for number in range(args.rounds):
            for i, (who, entry) in enumerate(entries.items()):
                ours, out, log = isinstance(entry, dict), Path(work, f"{number}-{i}"), Path(work, "log")
                load = os.getloadavg()[0]
                fp32, bf16 = map(float, run([sys.executable, "-c", GEMM], args.threads, log).split())
                if ours:
                    root = args.other if who == "other" else ROOT
                    run(our_command(job, entry, models, rows, args.batches, out, root), args.threads, log)
                    line = read_ours(out, job, rows)
                else:
                    line = json.loads(
                        run(peer_command(job, entry, args, models, rows), args.threads, log)
                        .strip()
                        .splitlines()[-1]
                    )
                about = dict(
                    comparison=name,
                    round=number,
                    contestant=who,
                    ours=ours,
                    flags=entry if ours else entry[2],
                    load_average=load,
                )
                about |= dict(
                    gemm_fp32_gflops=fp32, gemm_bf16_gflops=bf16, parameters=parameters(models / job["model"])
                )
                line = about | line | dict(job=job, machine=machine)
                with open(file, "a") as lines:
                    lines.write(json.dumps(line) + "\n")
                print(
                    f"round {number + 1}, {who}: {median(b['seconds'] for b in timed(line)):.2f} s per batch",
                    flush=True,
                )
    show(name, args)


# ---- The table ---------------------------------------------------------------------------------------------------------
def parameters(folder):
    """(body, head): weights that multiply every token, and those of the language-model head."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    body, tables = (
        model.base_model,
        [module.weight for module in model.base_model.modules() if isinstance(module, torch.nn.Embedding)],
    )
    return sum(p.numel() for p in body.parameters()) - sum(
        p.numel() for p in tables
    ), model.get_output_embeddings().weight.numel()


def timed(line):
    """The batches that count: all but the first, which warms up."""
    return line["batches"][1:] or line["batches"]


def useful_flops(job, body, head, prompt, response, training=6):
    """Of a batch with so many tokens: 2 a weight for a needed forward pass, `training` for a training pass;
    the head on responses only."""
    tokens = prompt + response
    if job["script"] == "sft.py":
        return 6 * (body + head) * tokens
    if job["script"] == "reward_model.py":
        return 6 * body * tokens
    passes = job["flops"]  # generation and reference; reward model (and critic)
    policy = (2 * passes["forward"] + training * job["epochs"]) * (body * tokens + head * response)
    return policy + body * tokens * (2 * passes.get("reward", 0) + 6 * job["epochs"] * ("critic" in passes))


def numbers(line):
    """One run -> its row of the table."""
    job, seconds = line["job"], median(batch["seconds"] for batch in timed(line))
    training = 4 if "LoRA" in line["contestant"] else 6  # frozen weights have no gradient
    each = [(useful_flops(job, *line["parameters"], b["prompt_tokens"], b["response_tokens"], training),
             b["prompt_tokens"] + b["response_tokens"], b["seconds"]) for b in timed(line)]  # fmt: skip
    row = {"episodes/s": job["batch"] / seconds} if "batch" in job else {}
    row |= {"tokens/s": median(tokens / s for _, tokens, s in each), "s per batch": seconds}
    row |= (
        {phase: median(batch[phase] for batch in timed(line)) for phase in ("rollout", "train")}
        if "batch" in job
        else {}
    )
    mfu = median(flops / s for flops, _, s in each) / line["gemm_fp32_gflops"] / 1e9
    return row | {"peak MB": line["peak_memory_mb"], "useful MFU %": 100 * mfu}


def table(header, rows):
    """A table in Markdown."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def show(name, args):
    """Medians over the rounds, and ratios ours / peer: of the medians, and in brackets the smallest and
    largest of a round."""
    lines = [json.loads(line) for line in (args.results / f"{name}.jsonl").read_text().splitlines()]
    runs = {}
    for line in lines:
        runs.setdefault(line["contestant"], []).append(line)
    rows = {who: [numbers(line) for line in found] for who, found in runs.items()}
    machine, loads = lines[0]["machine"], [line["load_average"] for line in lines]
    fp32, bf16 = (median(line[f"gemm_{kind}_gflops"] for line in lines) for kind in ("fp32", "bf16"))
    print(
        f"\n{name}: {lines[0]['job']['model']}, {max(map(len, runs.values()))} rounds of {len(lines[0]['batches'])} batches, the first "
        f"not counted; {machine['cpu']}, {machine['cores']} cores ({' '.join(machine['flags'])}), {machine['threads']} threads, "
        f"load {min(loads):.1f} to {max(loads):.1f}; matrix product {fp32:.0f} GFLOP/s in fp32, {bf16:.0f} in bf16\n"
    )
    names = list(next(iter(rows.values()))[0])
    medians = {who: {key: median(row[key] for row in found) for key in names} for who, found in rows.items()}
    print(
        table(
            ["contestant", *names],
            [[who, *(f"{row[key]:.4g}" for key in names)] for who, row in medians.items()],
        )
    )
    ours, peers = ([who for who in rows if runs[who][0]["ours"] is side] for side in (True, False))
    shortest, longest = lines[0]["job"].get("response", (0, 0))
    for rate in (
        names[: 1 + (shortest < longest)] if ours and peers else ()
    ):  # where lengths are drawn, tokens/s too: episodes differ
        cells = []
        for who in ours:
            cells.append([who])
            for peer in peers:
                each = [a[rate] / b[rate] for a, b in zip(rows[who], rows[peer])]
                cells[-1].append(
                    f"{medians[who][rate] / medians[peer][rate]:.2f} ({min(each):.2f} to {max(each):.2f})"
                    if each
                    else ""
                )
        print(f"\n{table([f'{rate}, ours / peer', *peers], cells)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("comparison", choices=[*JOBS, "all"])
    parser.add_argument("--peers", type=Path, help="the folder of install_peers.sh")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", type=int, default=4, help="of each run; the first is not counted")
    parser.add_argument("--only", nargs="+", help="names of contestants, as the table gives them")
    parser.add_argument(
        "--other", type=Path, help="another checkout of this repository: a contestant named `other`"
    )
    parser.add_argument("--rows", help="sft and reward-model: a Hub name or a folder")
    parser.add_argument("--results", type=Path, default=ROOT / "results/speed")
    parser.add_argument("--show", action="store_true", help="print the table of earlier results, run nothing")
    args = parser.parse_args()
    args.peers, args.results = args.peers and args.peers.resolve(), args.results.resolve()
    args.other = args.other and args.other.resolve()
    if not args.show and not (args.peers and (args.peers / "models").is_dir()):
        parser.error("--peers FOLDER: run benchmarks/speed/install_peers.sh FOLDER first")
    for name in JOBS if args.comparison == "all" else [args.comparison]:
        show(name, args) if args.show else compare(name, args)


if __name__ == "__main__":
    main()
