"""How time per token and peak memory of rloo_tldr.py grow with response length, vocabulary, batch and model size.

    python benchmarks/speed/growth.py                                         # all points of all sweeps
    python benchmarks/speed/growth.py --sweep vocabulary --points 1024 8192   # some
    python benchmarks/speed/growth.py --show                                  # only the table and the plot

Writes results/speed/growth.jsonl and growth.png, and prints a table.

A point is a process with two updates, of which the second counts: one epoch, one minibatch, micro-batches of 8, no
reward model, no early stop. Weights are random, and the prompt has 32 tokens. What a sweep does not change: 64
responses of 64 tokens, a vocabulary of 8192, and a GPT-2 of 4 layers of width 128. All responses of a batch are
generated at once.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from compare import ROOT, describe_machine, flags_of, run, table

START = dict(prompt=32, response=64, vocabulary=8192, batch=64, layers=4, width=128)
MODELS = {
    1: (2, 96),
    7: (6, 256),
    29: (8, 512),
    124: (12, 896),
}  # millions of weights, with a vocabulary of 8192
SWEEPS = {
    "response": dict(points=[16, 32, 64, 128, 256, 512, 1024], batch=16),
    "vocabulary": dict(points=[1024, 4096, 16384, 50257, 150_000]),
    "batch": dict(points=[8, 32, 128, 512]),
    "model": dict(points=list(MODELS), batch=16),
}


def write_world(folder, setting):
    """A model of this size with a tokenizer of 512 tokens, whatever its vocabulary, and prompts of one
    length."""
    import tokenizers
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    learned = tokenizers.ByteLevelBPETokenizer()
    learned.train_from_iterator(
        [path.read_text() for path in ROOT.glob("*.md")] + [" a"] * 100,
        vocab_size=512,
        special_tokens=["<|end|>"],
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=learned._tokenizer, eos_token="<|end|>", pad_token="<|end|>"
    )
    prompt = " a" * setting["prompt"]
    assert len(tokenizer(prompt).input_ids) == setting["prompt"]
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_layer=setting["layers"], n_embd=setting["width"], n_head=setting["width"] // 32, vocab_size=setting["vocabulary"],
        n_positions=setting["prompt"] + setting["response"], bos_token_id=0, eos_token_id=0, activation_function="gelu_pytorch_tanh",
    ))  # fmt: skip
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "data").mkdir()
    for name, rows in (("train", setting["batch"]), ("test", 2)):
        (folder / "data" / f"{name}.jsonl").write_text((json.dumps(dict(prompt=prompt)) + "\n") * rows)
    return model.num_parameters()


def measure(setting, threads, dtype, **others):
    """Two updates of rloo_tldr.py in a process -> a line: the setting, weights, load before it, seconds of
    the second's phases, peak."""
    with tempfile.TemporaryDirectory() as work:
        folder, batch = Path(work), setting["batch"]
        weights = write_world(folder, setting)
        flags = dict(
            model_name_or_path=folder / "model",
            dataset_name=folder / "data",
            output_dir=folder / "run",
            dtype=dtype,
            reward_fn=[f"{Path(__file__).parent / 'reward.py'}:distinct_letters"],
            stop_token=None,
            response_length=setting["response"],
            total_episodes=2 * batch,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=batch // 8,
            num_mini_batches=1,
            num_ppo_epochs=1,
            local_rollout_forward_batch_size=batch,
            num_examples=1,
            num_sample_generations=0,
            save_every=0,
        )
        load = os.getloadavg()[0]
        run([sys.executable, ROOT / "rloo_tldr.py", *flags_of(flags | others)], threads, folder / "log")
        last = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    phases = {
        name: last[f"perf/{name}"]
        for name in ("seconds", "rollout_seconds", "train_seconds", "peak_memory_mb")
    }
    return dict(dtype=dtype, parameters=weights, load_average=load) | setting | phases


def read(file):
    """The lines, each with its seconds a response token and the size of the logits that nobody should
    hold."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        tokens = line["batch"] * line["response"]
        line |= dict(
            ms=1e3 * line["seconds"] / tokens,
            rollout_ms=1e3 * line["rollout_seconds"] / tokens,
            logits_mb=4 * tokens * line["vocabulary"] / 2**20,
        )
    return lines


def show(file):
    """The table, and growth.png beside the file."""
    from matplotlib.figure import Figure

    lines = read(file)
    header = ["sweep", "point", "ms per token", "rollout, ms", "peak MB", "batch x length x vocabulary, MB"]
    keys = ("point", "ms", "rollout_ms", "peak_memory_mb", "logits_mb")
    print(table(header, [[line["sweep"], *(f"{line[key]:.4g}" for key in keys)] for line in lines]))
    sweeps = [sweep for sweep in SWEEPS if any(line["sweep"] == sweep for line in lines)]
    figure = Figure(figsize=(3.2 * len(sweeps), 5), layout="constrained")
    axes = figure.subplots(2, len(sweeps), squeeze=False, sharey="row")
    names = dict(
        response="tokens per response",
        vocabulary="vocabulary",
        batch="responses per batch",
        model="weights, millions",
    )
    for column, sweep in zip(axes.T, sweeps):
        found = [line for line in lines if line["sweep"] == sweep]
        points = [line["point"] for line in found]
        column[0].loglog(points, [line["ms"] for line in found], "o-", label="whole update")
        column[0].loglog(points, [line["rollout_ms"] for line in found], "o-", label="rollout")
        column[1].loglog(
            points, [line["peak_memory_mb"] for line in found], "o-", label="peak of the process"
        )
        column[1].loglog(
            points, [line["logits_mb"] for line in found], "k:", label="batch x length x vocabulary"
        )
        column[1].set_xlabel(names[sweep])
    for axis in axes[:, 0]:
        axis.yaxis.set_major_formatter("{x:g}")
    axes[0, 0].set_ylabel("ms per response token")
    axes[1, 0].set_ylabel("MB")
    axes[0, 0].legend(fontsize=7)
    axes[1, 0].legend(fontsize=7)
    figure.savefig(file.with_suffix(".png"), dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sweep", nargs="+", choices=SWEEPS, default=list(SWEEPS))
    parser.add_argument("--points", nargs="+", type=int, help="only these points of the sweeps")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--results", type=Path, default=ROOT / "results/speed")
    parser.add_argument("--show", action="store_true", help="print and plot earlier results, run nothing")
    args = parser.parse_args()
    file = args.results.resolve() / "growth.jsonl"
    if not args.show:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
        machine = describe_machine(args.threads)
        for sweep in args.sweep:
            for point in args.points or SWEEPS[sweep]["points"]:
                setting = START | {key: value for key, value in SWEEPS[sweep].items() if key != "points"}
                setting |= (
                    dict(zip(("layers", "width"), MODELS[point])) if sweep == "model" else {sweep: point}
                )
                line = dict(sweep=sweep, point=point) | measure(setting, args.threads, args.dtype)
                with open(file, "a") as lines:
                    lines.write(json.dumps(line | dict(machine=machine)) + "\n")
                print(
                    f"{sweep} {point}: {line['seconds']:.2f} s, {line['peak_memory_mb']:.0f} MB", flush=True
                )
    show(file)


if __name__ == "__main__":
    main()
