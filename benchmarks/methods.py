"""Best-of-n, DPO and RLOO on the same held-out posts: gold score over the KL to the start.

    python benchmarks/methods.py best-of-n     # sample 16 summaries of each post from the start, and keep scores
    python benchmarks/methods.py show          # print the table of docs/methods.md and draw docs/methods.png

Everything begins at checkpoints/tldr-sft, and what is preferred comes from data/tldr-preference: as the reward
model checkpoints/tldr-reward (best-of-n, RLOO), or as pairs (DPO). The gold score of data/make_tldr.py judges. The
runs of DPO and RLOO are committed ones: RUNS. A run has one point per seed.

Best-of-n keeps the response with the highest reward of n. From 16 responses, the mean over all choices of n of
them is computed exactly. The KL of best-of-n is at most log n - (n - 1) / n, which is the number shown (Stiennon et
al. 2020, appendix G.3).
"""

import json
import math
import sys
import time
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "data")]

import torch  # noqa: E402
from make_tldr import gold_score  # noqa: E402

FOLDER = ROOT / "results/methods"
RUNS = {  # label -> folders in results/, one per seed
    "DPO, beta 0.5": [f"dpo-tldr-tiny/seed{seed}" for seed in (1, 2, 3)],
    "RLOO, kl_coef 0.05": [f"rloo-tiny/seed{seed}" for seed in (1, 2, 3)],
}
SWEEP = {  # DPO with other flags, seed 1
    "DPO, beta 0.1, learning rate 3e-5": "dpo-tldr-sweep/lr-3e-5-beta-0.1",
    "DPO, beta 1, learning rate 3e-4": "dpo-tldr-sweep/lr-3e-4-beta-1",
    "DPO, beta 1, learning rate 1e-3": "dpo-tldr-sweep/lr-1e-3-beta-1",
    "DPO, beta 0.1, learning rate 3e-4": "dpo-tldr-sweep/lr-3e-4-beta-0.1",
}
NUM_SAMPLES = 16
SIZES = (1, 2, 4, 8, 16)


def best_of_n(scores, golds, n):
    """The mean gold score of the best of n responses by score. [posts, k], [posts, k] -> [posts]

    The response with rank r from below is the best of n in comb(r - 1, n - 1) of comb(k, n) choices.
    """
    k = scores.shape[1]
    weights = torch.tensor([math.comb(r, n - 1) / math.comb(k, n) for r in range(k)], dtype=torch.float64)
    golds = golds.gather(1, scores.argsort(1))
    return (golds.double() * weights).sum(1)


def kl_bound(n):
    """The largest KL that best-of-n can have, in nats."""
    return math.log(n) - (n - 1) / n


@torch.no_grad()
def sample():
    """Sample and score responses of the start. Writes best-of-n.json."""
    from transformers import AutoModelForCausalLM

    import dpo_tldr
    import rloo_tldr

    start_time = time.time()
    args = dpo_tldr.parse_args([])
    tokenizer = dpo_tldr.load_tokenizer(args.model_name_or_path)
    posts = dpo_tldr.choose_rows(
        dpo_tldr.load_eval_posts([], tokenizer, args), args.num_eval_prompts, args.seed
    )
    lm = dpo_tldr.load_model(AutoModelForCausalLM, args.model_name_or_path).eval()
    stop_ids = dpo_tldr.end_tokens(lm, tokenizer)
    rloo_args = rloo_tldr.parse_args([])
    reward = rloo_tldr.load_reward_model(rloo_args, rloo_args.reward_model_path, torch.device("cpu"))
    ids, mask, num_reference_tokens = dpo_tldr.collate_pairs(posts, "cpu")
    ids, mask = ids[:, :-num_reference_tokens], mask[:, :-num_reference_tokens]
    prompts = tokenizer.batch_decode([post["ids"] for post in posts])
    scores, golds = [], []
    for i in range(NUM_SAMPLES):
        generator = dpo_tldr.generator_for(args.seed, "best of n", i)
        uniforms = torch.rand(len(posts), args.response_length, generator=generator)
        tokens, _ = dpo_tldr.sample_texts(lm, ids, mask, uniforms, args.temperature)
        lengths = dpo_tldr.response_lengths(tokens, stop_ids).tolist()
        rows = [row[:length] for row, length in zip(tokens.tolist(), lengths)]
        responses = tokenizer.batch_decode(rows, skip_special_tokens=True)
        scores.append(reward(prompts, responses))
        golds.append(gold_score(prompts, responses))
    about = dict(scores=list(zip(*scores)), golds=list(zip(*golds)), seconds=time.time() - start_time)
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "best-of-n.json").write_text(json.dumps(about))


def interval(values):
    """Half of the 95 % interval of a mean."""
    mean = fmean(values)
    return 1.96 * (fmean((x - mean) ** 2 for x in values) / len(values)) ** 0.5


def points():
    """-> list of dict: method, seed, KL, gold, interval (half the width), tokens or None"""
    found = []
    path = FOLDER / "best-of-n.json"
    if path.exists():
        saved = json.loads(path.read_text())
        scores, golds = torch.tensor(saved["scores"]), torch.tensor(saved["golds"])
        for n in SIZES:
            values = best_of_n(scores, golds, n).tolist()
            found.append(
                dict(
                    method=f"best of {n}", seed=1, kl=kl_bound(n), gold=fmean(values), error=interval(values)
                )
            )
    for label, folders in RUNS.items():
        for seed, folder in enumerate(folders, 1):
            folder = ROOT / "results" / folder
            evaluation = json.loads((folder / "evaluation.json").read_text())
            rows = [json.loads(line) for line in open(folder / "evaluation_samples.jsonl")]
            golds = gold_score([row["prompt"] for row in rows], [row["after"] for row in rows])
            kl = evaluation["after"]["KL, nats per response"]
            found.append(dict(method=label, seed=seed, kl=kl, gold=fmean(golds), error=interval(golds)))
    for label, folder in SWEEP.items():
        after = json.loads((ROOT / "results" / folder / "evaluation.json").read_text())["after"]
        gold, error = after["score mean"], after["score mean, +-"]  # the gold score
        found.append(dict(method=label, seed=1, kl=after["KL, nats per response"], gold=gold, error=error))
    return found


def table():
    lines = [
        "| method | seed | KL, nats per response | gold score | +- (95 % interval) |",
        "|---|---|---|---|---|",
    ]
    for x in points():
        lines.append(f"| {x['method']} | {x['seed']} | {x['kl']:.2f} | {x['gold']:.2f} | {x['error']:.2f} |")
    return "\n".join(lines)


def draw():
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    groups = {}
    for x in points():
        name = "best of n (largest possible KL)" if x["method"].startswith("best of") else x["method"]
        if x["method"] in SWEEP:
            name = "DPO, other flags"
        if x["kl"] < 10:
            groups.setdefault(name, []).append(x)
    for style, (name, found) in zip(("-o", "s", "^", "x"), groups.items()):
        kls, golds, errors = [[x[key] for x in found] for key in ("kl", "gold", "error")]
        axes.errorbar(kls, golds, yerr=errors, fmt=style, capsize=3, label=name)
    axes.set_xlabel("KL to the start, nats per response")
    axes.set_ylabel("gold score of 300 held-out posts")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(ROOT / "docs/methods.png", dpi=120)


if __name__ == "__main__":
    if sys.argv[1] == "best-of-n":
        sample()
    else:
        print(table())
        draw()
