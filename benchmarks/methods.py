"""Best-of-n, DPO, RLOO and PPO on the same held-out posts: reward, gold score and win rate over the KL to the start.

    python benchmarks/methods.py best-of-n     # sample 64 summaries of each post from the start, and keep scores
    python benchmarks/methods.py ppo 1 FOLDER  # PPO on these posts with seed 1; at the end, another learning rate
    python benchmarks/methods.py measure       # rewards, gold scores and wins of the responses of all runs
    python benchmarks/methods.py cost          # CPU time and memory of some of these runs, from results/measured.jsonl
    python benchmarks/methods.py show          # print the tables of docs/methods.md and draw docs/methods.png

Everything begins at checkpoints/tldr-sft, and what is preferred comes from data/tldr-preference: as the reward
model checkpoints/tldr-reward (best-of-n, RLOO, PPO), or as pairs (DPO). The gold score of data/make_tldr.py judges. The
runs of DPO, RLOO and PPO are committed ones: RUNS. A run has one point per seed.

Best-of-n keeps the response with the highest reward of n. From 64 responses, the mean over all choices of n of
them is computed exactly. The KL of best-of-n is at most log n - (n - 1) / n, which is the number shown (Stiennon et
al. 2020, appendix G.3).
"""

import gzip
import json
import math
import sys
from functools import partial
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "data")]

import torch  # noqa: E402
from archive import read, read_rows, run_folder  # noqa: E402
from make_tldr import gold_score  # noqa: E402

import dpo_tldr  # noqa: E402
import ppo_sentiment  # noqa: E402
import rloo_tldr  # noqa: E402

FOLDER = ROOT / "results/methods"
RUNS = {  # label -> folder in results/ with a run per seed, or one run with seed 1
    "DPO, beta 0.5": "dpo-tldr-tiny",
    "DPO, beta 1, learning rate 3e-4": "dpo-tldr-sweep/lr-3e-4-beta-1",
    "DPO, beta 0.1, learning rate 3e-5": "dpo-tldr-sweep/lr-3e-5-beta-0.1",
    "DPO, beta 1, learning rate 1e-3": "dpo-tldr-sweep/lr-1e-3-beta-1",
    "DPO, beta 0.1, learning rate 3e-4": "dpo-tldr-sweep/lr-3e-4-beta-0.1",
    "RLOO, kl_coef 0.2": "methods/rloo-kl-0.2",
    "RLOO, kl_coef 0.05": "rloo-tiny",
    "RLOO, kl_coef 0.01": "methods/rloo-kl-0.01",
    "RLOO, kl_coef 0": "methods/rloo-kl-0.0",
    "RLOO, kl_coef 0, 4 times as long": "methods/rloo-kl-0.0-long",
    "PPO, kl_coef 0.05": "methods/ppo",
}
COSTS = {  # run -> its result
    "RLOO, kl_coef 0.2, seed 1": "methods/rloo-kl-0.2/seed1.zip",
    "PPO, kl_coef 0.05, seed 1": "methods/ppo/seed1.zip",
    "RLOO, kl_coef 0, seed 1": "methods/rloo-kl-0.0/seed1.zip",
    "RLOO, kl_coef 0.01, seed 1": "methods/rloo-kl-0.01/seed1.zip",
    "best of n, 64 responses to each of the 300 posts": "methods/best-of-n.json.gz",
    "DPO, beta 0.5, seed 4": "healthy/dpo_tldr/seed4.zip",
}
NUM_SAMPLES = 64
SIZES = (1, 2, 4, 8, 16, 32, 64)


def best_of_n(scores, values, n):
    """The mean value of the best of n responses by score. [posts, k], [posts, k] -> [posts]

    The response with rank r from below is the best of n in comb(r - 1, n - 1) of comb(k, n) choices.
    """
    k = scores.shape[1]
    weights = torch.tensor([math.comb(r, n - 1) / math.comb(k, n) for r in range(k)], dtype=torch.float64)
    values = values.gather(1, scores.argsort(1))
    return (values.double() * weights).sum(1)


def kl_bound(n):
    """The largest KL that best-of-n can have, in nats."""
    return math.log(n) - (n - 1) / n


def load_reward():
    """The reward model, as rloo_tldr.py calls it: prompts, completions -> list of floats"""
    args = rloo_tldr.parse_args([])
    return rloo_tldr.load_reward_model(args, args.reward_model_path, torch.device("cpu"))


def judge(prompts, responses):
    """Gold scores, and wins against the references of the data set (a tie is half a win). -> two lists"""
    rows = dpo_tldr.read_rows(ROOT / "data/tldr/test.jsonl")
    references = {row["prompt"]: row["completion"] for row in rows}
    golds = gold_score(prompts, responses)
    reference_golds = gold_score(prompts, [references[prompt] for prompt in prompts])
    return golds, [(x > y) + 0.5 * (x == y) for x, y in zip(golds, reference_golds)]


@torch.no_grad()
def sample():
    """Sample and score responses of the start. Writes best-of-n.json.gz."""
    args = dpo_tldr.parse_args([])
    tokenizer = dpo_tldr.load_tokenizer(args.model_name_or_path)
    posts = dpo_tldr.load_eval_posts([], tokenizer, args)
    posts = dpo_tldr.choose_rows(posts, args.num_eval_prompts)
    lm = dpo_tldr.load_lm(args).eval()
    stop_ids = dpo_tldr.end_tokens(lm, tokenizer)
    reward = load_reward()
    ids, mask, num_reference_tokens = dpo_tldr.collate_pairs(posts, "cpu")
    ids, mask = ids[:, :-num_reference_tokens], mask[:, :-num_reference_tokens]
    prompts = tokenizer.batch_decode([post["ids"] for post in posts])
    columns = {"rewards": [], "golds": [], "wins": []}
    best = [{"reward": -math.inf}] * len(posts)  # of all responses to each post
    for i in range(NUM_SAMPLES):
        generator = dpo_tldr.generator_for(args.seed, "best of n", i)
        shape = len(posts), args.response_length
        uniforms = torch.rand(shape, dtype=torch.float64, generator=generator)
        tokens, _ = dpo_tldr.generate(lm, ids, mask, uniforms, args.temperature)
        lengths = dpo_tldr.response_lengths(tokens, stop_ids).tolist()
        rows = [row[:length] for row, length in zip(tokens.tolist(), lengths)]
        responses = tokenizer.batch_decode(rows, skip_special_tokens=True)
        for name, values in zip(columns, (reward(prompts, responses), *judge(prompts, responses))):
            columns[name].append([round(x, 3) for x in values])
        for row, response in enumerate(responses):
            if columns["rewards"][-1][row] > best[row]["reward"]:
                best[row] = dict(
                    reward=columns["rewards"][-1][row], gold=columns["golds"][-1][row], text=response
                )
        print(i + 1, "of", NUM_SAMPLES, flush=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "best-of-n.json.gz").write_bytes(
        gzip.compress(json.dumps(columns | {"best": best}).encode(), mtime=0)
    )


def run_ppo(seed, folder, learning_rate="1e-4"):
    """ppo_sentiment.py on the posts. Two functions are replaced: prompts are whole posts, not the beginnings of reviews, and
    the reward model is that of rloo_tldr.py. Reward, penalty and number of responses are those of its default run."""

    def load_prompts(rows, tokenizer, args):
        return [{"ids": tokenizer(row["prompt"]).input_ids, "columns": row} for row in rows]

    ppo_sentiment.load_prompts = load_prompts

    def load_reward_function(args, trainer_state, device):
        functions = {"reward_model": load_reward()}
        return partial(ppo_sentiment.call_reward_functions, functions, trainer_state, device)

    ppo_sentiment.load_reward = load_reward_function
    flags = f"--model-name-or-path checkpoints/tldr-sft --dataset-name data/tldr --seed {seed} --output-dir {folder}"
    flags += " --query-min-length 80 --query-max-length 80 --response-min-length 40 --response-length 40"
    flags += (
        " --total-episodes 10240 --per-device-train-batch-size 64 --num-mini-batches 2 --num-ppo-epochs 2"
    )
    flags += " --kl-coef 0.05 --kl-target None --missing-eos-penalty 1"
    flags += f" --learning-rate {learning_rate} --lr-scheduler-type linear --dtype float32 --num-eval-prompts 300 --num-sample-generations 3"
    ppo_sentiment.train(ppo_sentiment.parse_args(flags.split()))


def measure():
    """Writes points.json: for each run and each n, means over the 300 posts."""
    found = []
    saved = json.loads(gzip.decompress((FOLDER / "best-of-n.json.gz").read_bytes()))
    saved = {name: torch.tensor(values).T for name, values in saved.items()}  # [posts, k] each
    for n in SIZES:
        columns = [best_of_n(saved["rewards"], values, n).tolist() for values in saved.values()]
        found.append(point(f"best of {n}", 1, kl_bound(n), *columns))
    reward = load_reward()
    for method, name in RUNS.items():
        runs = sorted((ROOT / "results" / name).glob("seed*.zip")) or [ROOT / "results" / name]
        for folder in map(run_folder, runs):
            seed = json.loads(read(folder, "args.json"))["args"]["seed"]
            after = json.loads(read(folder, "evaluation.json"))["after"]
            if not (
                folder / "evaluation_samples.jsonl"
            ).exists():  # runs of DPO whose responses were not kept
                numbers = dict(gold=after["score mean"], error=after["score mean, +-"], win=after["win rate"])
                kl = after["KL, nats per response"]
                found.append(dict(method=method, seed=seed, kl=kl, reward=None) | numbers)
                continue
            rows = read_rows(folder, "evaluation_samples.jsonl")
            prompts, responses = [[row[column] for row in rows] for column in ("prompt", "after")]
            columns = reward(prompts, responses), *judge(prompts, responses)
            found.append(point(method, seed, after["KL, nats per response"], *columns))
    (FOLDER / "points.json").write_text(json.dumps(found, indent=0) + "\n")


def point(method, seed, kl, rewards, golds, wins):
    """Means, and half of the 95 % interval of the gold score."""
    error = 1.96 * torch.tensor(golds).std(correction=0).item() / len(golds) ** 0.5
    numbers = dict(kl=kl, reward=fmean(rewards), gold=fmean(golds), error=error, win=fmean(wins))
    return dict(method=method, seed=seed) | {name: round(x, 4) for name, x in numbers.items()}


def read_points():
    """-> dict: method -> list of dicts, one per seed"""
    methods = {}
    for x in json.loads((FOLDER / "points.json").read_text()):
        methods.setdefault(x["method"], []).append(x)
    return methods


def table():
    """One row per method: means over its seeds, and the largest of their intervals."""
    lines = [
        "| method | seeds | KL, nats per response | reward model | gold score | +- (95 % interval) | win rate |",
        "|---|---|---|---|---|---|---|",
    ]
    for method, seeds in read_points().items():
        kl, gold, win = [fmean(x[name] for x in seeds) for name in ("kl", "gold", "win")]
        rewards = [x["reward"] for x in seeds if x["reward"] is not None]
        reward = f"{fmean(rewards):.2f}" if rewards else "not kept"
        error = max(x["error"] for x in seeds)
        lines.append(
            f"| {method} | {len(seeds)} | {kl:.2f} | {reward} | {gold:.2f} | {error:.2f} | {win:.2f} |"
        )
    return "\n".join(lines)


def long_run():
    """The longest run, in tenths: means of its responses to training posts, which the gold score judges, too."""
    folder = ROOT / "results" / RUNS["RLOO, kl_coef 0, 4 times as long"]
    updates = read_rows(folder / "seed1", "metrics.jsonl")
    names = ("objective/kl", "env/reward_mean", "judge/scores", "completions/distinct_2")
    lines = ["| updates | KL, nats per response | reward model | gold score | distinct bigrams |"]
    lines.append("|---|---|---|---|---|")
    for start in range(0, len(updates), len(updates) // 10):
        rows = updates[start : start + len(updates) // 10]
        cells = [f"{fmean(row[name] for row in rows):.2f}" for name in names]
        lines.append(f"| {rows[0]['update']} to {rows[-1]['update']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write_cost():
    """cost.jsonl: CPU seconds and memory of whole processes, as benchmarks/all_numbers.py counted them."""
    rows = {row["result"]: row for row in dpo_tldr.read_rows(ROOT / "results/measured.jsonl")}
    lines = []
    for run, result in COSTS.items():
        row = rows[f"results/{result}"]
        if "peak_mb" not in row:
            sys.exit(f"all_numbers.py has not run {result} yet")
        lines.append(dict(run=run, cpu_seconds=round(60 * row["minutes"]), peak_mb=row["peak_mb"]))
    (FOLDER / "cost.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def cost():
    """The costs as a markdown table."""
    lines = ["| run | CPU seconds | peak memory, MiB |", "|---|---|---|"]
    for x in dpo_tldr.read_rows(FOLDER / "cost.jsonl"):
        lines.append(f"| {x['run']} | {x['cpu_seconds']} | {x['peak_mb']} |")
    return "\n".join(lines)


def draw():
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    groups = {}
    for method, seeds in read_points().items():
        if method.startswith("best of"):
            method = "best of n (largest possible KL)"
        elif method.startswith("DPO") and "learning rate" in method:
            method = "DPO, other flags"
        if seeds[0]["kl"] < 15:  # others would be far to the right
            groups.setdefault(method, []).extend(seeds)
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.5), sharex=True)
    for panel, column in zip(panels, ("gold", "reward")):
        for style, (method, found) in zip(("-o", "s", "x", "^", "v", "<", ">", "*", "D"), groups.items()):
            found = [x for x in found if x[column] is not None]
            kls, values = [x["kl"] for x in found], [x[column] for x in found]
            errors = [x["error"] for x in found] if column == "gold" else None
            panel.errorbar(kls, values, yerr=errors, fmt=style, capsize=3, label=method)
        panel.set_xlabel("KL to the start, nats per response")
        panel.grid(alpha=0.3)
    panels[0].set_title("gold score of 300 held-out posts")
    panels[1].set_title("reward model, the same responses")
    panels[1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(ROOT / "docs/methods.png", dpi=110)


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    if command == "show":
        print(f"{table()}\n\n{long_run()}\n\n{cost()}")
        draw()
    else:
        {"best-of-n": sample, "ppo": run_ppo, "measure": measure, "cost": write_cost}[command](*rest)
