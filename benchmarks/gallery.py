"""The failure gallery: real runs of the defaults, each with one fault put in, and docs/debugging.md about them.

    python benchmarks/gallery.py run --jobs 2    # the runs that are not there yet; all of them within an hour
    python benchmarks/gallery.py write           # docs/debugging.md and its pictures

A fault is one of tests/faults/known_faults.py, by its name, a change of the source, or a bad setting. Each run stops as
soon as it has shown its fault; until then it has the learning rates of a whole run, so that its curves can be compared
with the healthy band. results/gallery/NAME: metrics, samples and tokens of the run.
"""

import argparse
import difflib
import gzip
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GALLERY = ROOT / "results/gallery"
PICTURES = ROOT / "docs/gallery"
KEPT = ("metrics.jsonl", "samples.jsonl", "tokens.jsonl")
sys.path[:0] = [str(ROOT), str(ROOT / "tests/faults")]


@dataclass
class Entry:
    """One fault of the gallery."""

    name: str  # of its folder and heading
    title: str
    script: str
    see: str  # what one sees
    why: str
    fix: str = ""  # what to do, if the change does not say it
    fault: str = ""  # the name of a known fault
    change: tuple = ()  # or: function, old text, new text
    flags: dict = field(default_factory=dict)
    updates: int = 60
    metrics: tuple = ("objective/scores", "objective/kl", "policy/entropy_avg", "val/ratio_var")
    met_by: str = ""  # who reported it
    no_ratio_check: bool = False  # the script would refuse to go on after its first update
    existing: str = ""  # a folder of results/ with a whole run; nothing is run
    show_response: bool = False  # the last response shows the fault


PPO = "ppo_sentiment"
ENTRIES = [
    Entry(
        name="score-after-the-last-token",
        title="The score is paid on padding",
        script=PPO,
        change=("token_rewards", "lengths[:, None] - 1", "lengths[:, None].clamp(max=kl.shape[1] - 1)"),
        see="Score and KL hardly move. In the token view, most last tokens have no reward.",
        why="The score is added one position after the last token. That is padding, unless the response has the full length, and the mask removes it.",
        met_by="[trl#3750](https://github.com/huggingface/trl/issues/3750) ([trap 15](implementation_details.md#15-the-score-after-eos-or-on-a-pad)).",
    ),
    Entry(
        name="score-on-every-token",
        title="The score is paid on every token",
        script=PPO,
        fault="the score at every token",
        see="The score looks healthy. But the value loss is a hundred times as large, and the KL goes to 90.",
        why="A return grows with the number of tokens that are left, and the KL penalty is small next to it.",
        fix="In the token view, only the last token may be deep blue.",
        metrics=("objective/scores", "objective/kl", "loss/value_avg", "objective/rlhf_reward"),
    ),
    Entry(
        name="hidden-states-off-by-one",
        title="Log-probabilities one token to the right",
        script=PPO,
        fault="hidden states one to the right",
        see="From the first update on, rollout and update differ by several nats per token. The ratio is still 1: old and new are wrong in the same way.",
        why="The hidden state before a token predicts it, not the one after it.",
        metrics=("sampling/logprob_gap_mean", "objective/scores", "objective/kl", "policy/entropy_avg"),
        updates=40,
    ),
    Entry(
        name="gae-forwards",
        title="GAE runs forwards in time",
        script=PPO,
        fault="gae forwards in time",
        see="The score does not rise, and the value loss is small and flat.",
        why="Credit flows to tokens that came after the reward was earned.",
        metrics=("objective/scores", "objective/kl", "loss/value_avg", "policy/entropy_avg"),
    ),
    Entry(
        name="kl-sign",
        title="The KL penalty is a bonus",
        script=PPO,
        change=("token_rewards", "-kl_coef * kl, 0.0", "kl_coef * kl, 0.0"),
        see="The KL goes to 120 and the entropy doubles. The score rises all the same. The adaptive coefficient rises with the KL, and so drives it on.",
        why="The policy is paid for leaving its reference.",
        metrics=("objective/kl", "objective/kl_coef", "objective/scores", "policy/entropy_avg"),
        show_response=True,
    ),
    Entry(
        name="no-kl-penalty",
        title="No KL penalty",
        script=PPO,
        flags=dict(kl_coef=0.0, kl_target=None),
        see="The score rises faster than in a healthy run, the KL is far above the usual target, and words repeat.",
        why="Nothing keeps the policy near its reference.",
        metrics=("objective/scores", "objective/kl", "completions/distinct_2", "policy/entropy_avg"),
        show_response=True,
    ),
    Entry(
        name="coefficient-the-wrong-way",
        title="The adaptive KL coefficient moves the wrong way",
        script=PPO,
        change=("adaptive_kl_coef", "1 + error * episodes", "1 - error * episodes"),
        see="The KL is below its target, yet the coefficient rises. The score stays behind.",
        why="The error of the controller has the wrong sign.",
        metrics=("objective/kl", "objective/kl_coef", "objective/scores", "policy/entropy_avg"),
        flags=dict(kl_horizon=1000),
        updates=90,
    ),
    Entry(
        name="reference-moves",
        title="The reference moves with the policy",
        script=PPO,
        change=(
            "train",
            "                optimizer.zero_grad()\n        copy_weights(learner, model)\n",
            "                optimizer.zero_grad()\n        copy_weights(learner, model)\n"
            "        ref_model.load_state_dict(model.policy.state_dict())\n",
        ),
        see="The KL is exactly 0 although the responses change.",
        why="The reference shares its weights with the policy, or is updated with it.",
        fix="Copy the reference once and freeze it.",
        metrics=("objective/kl", "objective/kl_coef", "objective/scores", "completions/distinct_2"),
    ),
    Entry(
        name="stale-old-logprobs",
        title="Old log-probabilities are stale",
        script=PPO,
        change=(
            "train",
            'old_logprobs, old_values = b["logprobs"][rows, :t]',
            'old_logprobs, old_values = b["ref_logprobs"][rows, :t]',
        ),
        see="The first update looks right. Then the variance of the ratio, the clipped fraction and the approximate KL are several times too large.",
        why="The ratio compares the new policy with the initial one, not with the one that sampled.",
        fix="Compute old log-probabilities right after the rollout.",
        metrics=("val/ratio_var", "policy/clipfrac_avg", "policy/approxkl_avg", "objective/scores"),
    ),
    Entry(
        name="advantages-have-the-wrong-sign",
        title="The loss has the wrong sign",
        script=PPO,
        change=("clipped_policy_loss", "torch.max(", "-torch.max("),
        see="The score does not rise. The KL goes to 190, and half of all tokens are clipped.",
        why="The optimizer minimizes, so the loss is -advantage * ratio.",
        fix="Check the sign with one update: log-probabilities of tokens with positive advantages must rise.",
        show_response=True,
    ),
    Entry(
        name="clip-takes-the-better",
        title="The clipped loss takes the better of two",
        script=PPO,
        fault="the policy loss takes the better of two",
        see="The approximate KL is twice as large, and nothing is ever clipped. The score looks healthy.",
        why="PPO takes the larger of the clipped and the unclipped loss. The smaller one does not limit how far a token may move.",
        metrics=("val/ratio_var", "policy/approxkl_avg", "objective/kl", "objective/scores"),
    ),
    Entry(
        name="learning-rate-too-high",
        title="The learning rate is too high",
        script=PPO,
        flags=dict(learning_rate=1e-3),
        see="The score rises to twice the gain of healthy runs. But the KL is at 30, one word is in nine of ten responses, and the variance of the ratio is in the hundreds.",
        why="It is 20 times that of the recipe.",
        fix="Divide it by 10 until the variance of the ratio is below 0.1.",
    ),
    Entry(
        name="dropout-on",
        title="Dropout is on in rollout and update",
        script=PPO,
        change=(
            "rollout",
            "    model.eval()\n",
            "    model.train()\n    for module in model.modules():\n"
            "        if isinstance(module, nn.Dropout):\n            module.p = 0.1\n",
        ),
        no_ratio_check=True,
        see="Rollout and update differ by 0.6 nats per token, and the KL of the first update is not 0. The script would stop: its check was switched off for this run.",
        why="Each forward pass drops other units.",
        fix="Set dropout to 0, in the reference too.",
        metrics=("val/ratio_var", "sampling/logprob_gap_mean", "objective/kl", "objective/scores"),
        updates=40,
    ),
    Entry(
        name="top-k-sampling",
        title="Top-k in the rollout",
        script=PPO,
        change=(
            "generate",
            "probs = token_logits(hidden, head.weight, temperature, head.bias).softmax(-1)",
            "logits = token_logits(hidden, head.weight, temperature, head.bias)\n"
            "        cut = logits.topk(3).values[:, -1:]\n"
            "        probs = logits.masked_fill(logits < cut, -torch.inf).softmax(-1)",
        ),
        see="A gap between rollout and update, and a better score. Another temperature in sampling than in scoring looks the same.",
        why="Tokens outside the top 3 are never sampled, but the loss assumes that they could have been.",
        fix="Sample from the whole softmax, without top-k, top-p or repetition penalties. Divide the logits by the temperature everywhere, also in the reference.",
        metrics=("sampling/logprob_gap_mean", "objective/kl", "policy/entropy_avg", "objective/scores"),
        updates=40,
        met_by="[Trap 12](implementation_details.md#12-top-k-top-p-and-a-minimum-length-make-the-kl-negative).",
    ),
    Entry(
        name="critic-does-not-learn",
        title="The critic does not learn",
        script=PPO,
        flags=dict(vf_coef=0.0),
        see="The value loss rises. Everything else looks healthy, because whitened advantages hide a bad baseline.",
        why="The value loss has weight 0, or the value head is not among the optimizer's parameters.",
        metrics=("loss/value_avg", "objective/scores", "objective/kl", "policy/clipfrac_avg"),
    ),
    Entry(
        name="reward-hacking",
        title="The policy exploits the reward",
        script=PPO,
        existing="ppo-sentiment-hacked",
        see="The score rises to twice that of a healthy run. One word is in most responses.",
        why="The classifier is weak, and the KL coefficient cannot rise enough within the run.",
        fix="Raise the KL coefficient, shorten --kl-horizon, or train a better reward model.",
        metrics=("objective/scores", "objective/kl", "completions/distinct_2", "objective/kl_coef"),
        met_by="An earlier default of this script: [the lesson](ppo_sentiment.md#a-higher-score-look-at-the-words).",
        show_response=True,
    ),
    Entry(
        name="weak-reward-model",
        title="A weak reward model is over-optimized",
        script="rloo_tldr",
        existing="rloo-weak-reward",
        see="The score rises to the end. The gold score, which the policy is not trained on, falls below its start.",
        why="The reward model learned from few pairs, and the policy finds where it is wrong.",
        fix="More pairs, a larger reward model, a higher KL coefficient, or an earlier end.",
        metrics=("objective/scores", "judge/scores", "objective/kl", "completions/mean_length"),
        met_by="Gao et al. 2022, Scaling Laws for Reward Model Overoptimization.",
    ),
    Entry(
        name="groups-mixed-up",
        title="Groups are read in the wrong order",
        script="rloo_tldr",
        change=("rloo_advantages", "view(-1, rloo_k)", "view(rloo_k, -1).T"),
        see="Score and gold score fall, while KL and entropy rise.",
        why="The responses to a prompt are neighbors in the batch, but are read as if all first responses came first. Their baselines come from other prompts.",
        fix="Assert that the rows of a group answer the same prompt.",
        metrics=("objective/scores", "judge/scores", "objective/kl", "policy/entropy_avg"),
        updates=40,
    ),
    Entry(
        name="equal-groups",
        title="Groups without variance",
        script="grpo_math",
        flags=dict(temperature=0.1),
        see="Four of five groups have equal rewards from the start. Nothing is learned for ten updates.",
        why="At temperature 0.1 the responses to a task are all right or all wrong. Their advantages are 0.",
        fix="Sample at temperature 1, and choose tasks that the policy solves sometimes.",
        metrics=("frac_reward_zero_std", "objective/scores", "policy/entropy_avg", "completions/mean_length"),
        updates=40,
        met_by="DAPO's dynamic sampling (Yu et al. 2025, section 3.2).",
    ),
    Entry(
        name="no-stop-token",
        title="The rollout waits for a stop token that the model does not use",
        script="grpo_math",
        change=(
            "find_stop_tokens",
            "{*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id}",
            '{tokenizer.convert_tokens_to_ids("<|endoftext|>")}',
        ),
        see="All responses have 48 tokens, the limit. The score starts near 0, because text after the answer makes it wrong.",
        why="A chat model ends its turn with a token that generation_config lists. It may not be tokenizer.eos_token.",
        fix="Stop at all tokens of generation_config.eos_token_id.",
        metrics=(
            "completions/clipped_ratio",
            "completions/mean_length",
            "objective/scores",
            "policy/entropy_avg",
        ),
        updates=20,
        met_by="[trl#5338](https://github.com/huggingface/trl/issues/5338) ([trap 16](implementation_details.md#16-a-stop-token-that-is-not-the-tokenizers-eos)).",
    ),
    Entry(
        name="no-chat-template",
        title="The chat template is missing",
        script="grpo_math",
        change=(
            "render_chat",
            "return tokenizer.apply_chat_template(",
            "return plain_text(messages)\n    tokenizer.apply_chat_template(",
        ),
        see="No answer is right, although the supervised model answers every third task.",
        why="The model was trained on rendered chats only.",
        fix="Use tokenizer.apply_chat_template(..., add_generation_prompt=True).",
        metrics=(
            "objective/scores",
            "completions/mean_length",
            "completions/clipped_ratio",
            "policy/entropy_avg",
        ),
        updates=20,
    ),
]


# ---- Runs --------------------------------------------------------------------------------------------------


def changes_of(entry):
    """What makes the fault. -> list of (function, old text, new text)"""
    from known_faults import FAULTS

    if not entry.fault:
        return [entry.change] if entry.change else []
    [fault] = [fault for fault in FAULTS if fault.name == entry.fault]
    assert fault.script == entry.script, entry
    return [(fault.function, fault.old, fault.new)]


def faulty_source(entry):
    """The source of the entry's script with its fault."""
    from mutate import find_function

    source = (ROOT / f"{entry.script}.py").read_text()
    for function, old, new in changes_of(entry):
        start, end = find_function(source, function)
        body = source[start:end]
        assert body.count(old) == 1, (entry.name, function, body.count(old))
        source = source[:start] + body.replace(old, new) + source[end:]
    return source


class Enough(Exception):
    """The run has shown its fault."""


def train_faulty(entry, project, output):
    """Train in this process with the script of a copy of the project. -> None; the run is in the folder output"""
    sys.path.insert(0, str(project))
    script = importlib.import_module(entry.script)
    assert Path(script.__file__).parent == project
    save = script.Run.checkpoint

    def checkpoint(self, state):
        save(self, state)
        if state["update"] == entry.updates:
            raise Enough

    script.Run.checkpoint = checkpoint
    flags = dict(recipe="tiny", output_dir=output, num_sample_generations=20, save_every=0)
    args = replace(script.RECIPES["tiny"], **(flags | entry.flags))
    try:
        script.train(args)
    except Enough:
        pass


def run_one(entry):
    """Run an entry in a process of its own, with one thread, and keep what report.py needs."""
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder).resolve() / "project"
        project.mkdir()
        for path in ROOT.iterdir():  # links, but the script with the fault
            if path.name not in (f"{entry.script}.py", "runs", "__pycache__"):
                (project / path.name).symlink_to(path)
        (project / f"{entry.script}.py").write_text(faulty_source(entry))
        options = ["-O"] if entry.no_ratio_check else []  # without the script's assert
        words = [sys.executable, *options, __file__, "train", entry.name, str(project), f"{folder}/run"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        end = subprocess.run(words, cwd=project, env=environment, capture_output=True, text=True)
        (GALLERY / entry.name).mkdir(parents=True, exist_ok=True)
        if not (Path(folder) / "run/metrics.jsonl").exists():
            raise RuntimeError(f"{entry.name}:\n{end.stdout[-2000:]}{end.stderr[-3000:]}")
        for name in KEPT:
            path = Path(folder) / "run" / name
            if path.exists():
                with (
                    open(path, "rb") as source,
                    gzip.open(GALLERY / entry.name / f"{name}.gz", "wb") as target,
                ):
                    shutil.copyfileobj(source, target)
        about = json.loads((Path(folder) / "run/args.json").read_text())
        about["command"] = [f"{entry.script}.py"]
        about["args"]["output_dir"] = entry.name
        (GALLERY / entry.name / "args.json").write_text(json.dumps(about, indent=2))
    print(entry.name, flush=True)


def run_all(jobs, only):
    todo = [entry for entry in ENTRIES if not entry.existing and only in (None, entry.name)]
    todo = [entry for entry in todo if not (GALLERY / entry.name / "args.json").exists()]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run_one, todo))


# ---- The page ----------------------------------------------------------------------------------------------


SYMPTOMS = {  # the entries of report.py's findings: (what people ask, what to know)
    "rollout-and-update-disagree": (
        "Rollout and update compute different distributions",
        "The log-probabilities at sampling must be those that the update computes for the same tokens. `sampling/logprob_gap_mean` is about 1e-6 in fp32 and 0.01 in bf16, from rounding. A larger one shows errors of temperature, top-k, padding, positions, dropout, cache or weights.",
    ),
    "flags": (
        "Flags differ from those of healthy runs",
        "Shown only if something else looks wrong. Try the recipe's flags.",
    ),
    "flat-reward": (
        "All scores are equal",
        "No response is better than another, so only the KL penalty is learned. Call the reward function on a few texts by hand.",
    ),
    "masks": (
        "Tokens of the responses are masked out",
        "A token with a KL, return and advantage of exactly 0 is not learned, and a score paid on it is lost. The usual cause is a mask of `token != pad` if pad is EOS. Make masks from the lengths.",
    ),
    "token-rewards": (
        "Rewards are not the KL penalty and the score",
        "In PPO each token is paid `-kl_coef * KL`, and the last one the score too. `report.py` recomputes this from the saved tokens.",
    ),
    "token-advantages": (
        "Advantages do not follow from rewards and values",
        "`report.py` recomputes GAE from the saved rewards and values. Whitening may only shift and scale the result.",
    ),
    "group-advantages": (
        "Advantages do not follow from the rewards of the group",
        "In RLOO and GRPO the better response must have the larger advantage, and the advantages of a group sum to 0. If not, rows are probably in another order when they are sampled than when they are scored.",
    ),
    "same-responses": (
        "All responses to a prompt are the same",
        "Each response needs its own random numbers, and a temperature near 1.",
    ),
    "kl-is-zero": (
        "The KL is exactly 0",
        "Then the reference is the policy.",
    ),
    "judge-disagrees": (
        "The score rises, and the judge disagrees",
        "Read samples: does the reward like what you like?",
    ),
    "training-prompts-only": (
        "The score rises on the training prompts only",
        "The answers were learned by heart, or evaluation measures something else.",
    ),
    "first-update": (
        "The first update is not like that of healthy runs",
        "All runs of a recipe start from the same models, so their first updates differ only by chance. The first metric that differs, in the order in which a script computes them (responses, rewards, KL, returns, loss, steps), is the closest to the fault.",
    ),
    "not-finite": (
        "Some numbers are not finite",
        "The scripts stop before they save a metric that is not finite. A changed script may continue.",
    ),
    "groups-without-variance": (
        "Most groups have equal rewards from the start",
        "In RLOO and GRPO, a prompt whose responses are equally good teaches nothing. Many such groups are normal at the end of a good run, not at the start: `frac_reward_zero_std`.",
    ),
    "policy-does-not-move": (
        "The policy does not move",
        "If the approximate KL is exactly 0 after several steps per batch, the optimizer does not change the policy. If the gradient is 0, look for a `detach` or `no_grad` too many, or a ratio of a tensor with itself.",
    ),
    "steps-too-large": (
        "The steps are too large",
        "Within an update, the variance of the ratio of new to old probability should stay below 0.1, and less than a third of the tokens should be clipped.",
    ),
    "score-falls": (
        "The score falls",
        "With the wrong sign of the loss, it falls from the first update. If the policy comes apart, it rises first; look at KL and entropy.",
    ),
    "score-does-not-rise": (
        "The score does not rise",
        "Does the policy move (KL, approximate KL)? If not, the steps are too small. If it does, the reward does not reach the tokens that earned it: look at the token view.",
    ),
    "over-optimization": (
        "The score rises, and the gold score falls",
        "Is the reward model any good? Measure with something that the policy is not trained on: a second classifier (`--judge-model-path`), a gold function (`--judge-fn`), or your own eyes.",
    ),
    "reward-hacking": (
        "The responses become alike",
        "Count words, not only scores: `report.py` shows the words that spread.",
    ),
    "kl-above-target": (
        "The KL is above its target",
        "The adaptive coefficient changes by at most 0.2 * episodes / horizon per update: too little if the horizon is long and the run short.",
    ),
    "kl-coefficient": (
        "The KL coefficient moves the wrong way",
        "It must rise while the KL is above its target, and fall while it is below.",
    ),
    "entropy-rises": (
        "The entropy rises",
        "A rewarded policy usually becomes more certain. If its entropy rises by more than a half, noise is rewarded, or nothing holds the policy back.",
    ),
    "responses-do-not-end": (
        "Responses do not end",
        "The policy must have learned a stop token before RL, and the rollout must wait for the same one.",
    ),
    "critic": (
        "The critic does not learn",
        "The value loss should fall, and values must leave 0 within a few updates. Compare the value loss with the variance of the returns.",
    ),
    "outside-the-band": (
        "Not like healthy runs with the same flags",
        "If you changed the script and not the flags, begin with the metric that left the range first.",
    ),
    "loss-does-not-fall": (
        "The loss does not fall",
        "A loss of 0 means that all labels are masked. A loss that stays at log(vocabulary) means that labels and logits do not fit together.",
    ),
}


def in_sentence(title):
    """A title inside a sentence: its first letter is small, unless it begins with an abbreviation."""
    return title if title[1].isupper() else title[0].lower() + title[1:]


def run_of(entry):
    """The run of an entry, as report.py reads it."""
    import report

    run = report.read_run(ROOT / "results" / entry.existing if entry.existing else GALLERY / entry.name)
    bands = json.loads(report.BANDS.read_text())
    run.script = entry.script
    band = bands[f"{entry.script} tiny"]
    run.band, run.band_args = band["metrics"], band["args"]
    return run


def draw(entry, run):
    """docs/gallery/NAME.png: four metrics of the run, and the healthy band."""
    from matplotlib.figure import Figure

    import report

    titles = {name: title for metrics in report.METRICS.values() for name, (title, _) in metrics.items()}
    figure = Figure(figsize=(13, 2.7), layout="constrained")
    last = run.metrics[-1]["update"]
    for axis, name in zip(figure.subplots(1, len(entry.metrics)), entry.metrics):
        rows = [row for row in run.metrics if name in row]
        axis.plot(
            [row["update"] for row in rows], [row[name] for row in rows], color="tab:red", label="this run"
        )
        if name in run.band:
            band = run.band[name]
            shown = [i for i, update in enumerate(band["update"]) if update <= last]
            updates = [band["update"][i] for i in shown]
            axis.fill_between(
                updates,
                [band["5"][i] for i in shown],
                [band["95"][i] for i in shown],
                color="gray",
                alpha=0.4,
                label="healthy seeds",
            )
        axis.set_title(titles.get(name, name), fontsize=9)
        axis.set_xlabel("update", fontsize=8)
        axis.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=8)
    PICTURES.mkdir(exist_ok=True)
    figure.savefig(PICTURES / f"{entry.name}.png", dpi=80)


def the_line(entry):
    """The change that made the fault, as markdown: whole lines."""
    if entry.existing:
        return f"The run: `results/{entry.existing}`, see [results](../results/README.md)."
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in entry.flags.items())
    if not (entry.fault or entry.change):
        return f"The setting: `python {entry.script}.py {flags}`"
    right = (ROOT / f"{entry.script}.py").read_text().splitlines()
    _, _, *lines = difflib.unified_diff(right, faulty_source(entry).splitlines(), n=0, lineterm="")
    lines = [line for line in lines if not line.startswith("@@")]
    indent = min(len(line[1:]) - len(line[1:].lstrip()) for line in lines)
    shown = [line[0] + line[1 + indent :] for line in lines]
    [(function, _, _)] = changes_of(entry)
    with_flags = f", with `{flags}`" if flags else ""
    head = f"In `{function}` of `{entry.script}.py`{with_flags}:"
    return "\n".join([head, "", "```diff", *shown, "```"])


def sample_of(run):
    """The last response to the second held-out prompt, as markdown."""
    import report

    rows = report.read_lines(run.folder, "samples.jsonl")
    _, prompt, *_ = dict.fromkeys(row["prompt"] for row in rows)
    *_, row = [row for row in rows if row["prompt"] == prompt]
    prompt, response = [" ".join(text.split()) for text in (prompt, row["response"])]
    return f"Update {row['update']}, score {row['score']:.2f}: *{prompt[-60:]}* **{response[:160]}**"


def write():
    """docs/debugging.md and its pictures."""
    for entry in ENTRIES:
        draw(entry, run_of(entry))
    (ROOT / "docs/debugging.md").write_text(page())


def page():
    """The text of docs/debugging.md, from the committed runs."""
    from reference_bands import tables

    import report

    sections, found_in = [], {}
    for entry in ENTRIES:
        run = run_of(entry)
        for rank, finding in enumerate(report.find_problems(run)):
            found_in.setdefault(finding.entry, []).append((rank, entry))
        parts = [
            f'<a id="{entry.name}"></a>',
            f"### {entry.title}",
            f"![curves](gallery/{entry.name}.png)",
            f"**What you see.** {entry.see}",
            f"**Why.** {entry.why}",
            the_line(entry),
        ]
        if entry.fix:
            parts.append(f"**What to do.** {entry.fix}")
        if entry.met_by:
            parts.append(f"**Who met it.** {entry.met_by}")
        if entry.show_response:
            parts.append(sample_of(run))
        sections.append("\n\n".join(parts))

    symptoms = []
    for name, (title, text) in SYMPTOMS.items():
        symptoms.append(f'<a id="{name}"></a>\n### {title}\n\n{text}')
        if name in found_in:
            _, entry = min(found_in[name], key=lambda pair: pair[0])
            symptoms[-1] += f"\n\nSeen in: [{in_sentence(entry.title)}](#{entry.name})."
    return (
        INTRODUCTION
        + tables()
        + SYMPTOMS_HEAD
        + "\n\n".join(symptoms)
        + GALLERY_HEAD
        + "\n\n".join(sections)
        + "\n"
    )


INTRODUCTION = """# Debugging a run

Start with `python report.py RUN_FOLDER` ([what it shows](running.md#look-at-a-run)). Its findings link to the symptoms below; each
symptom links to runs that show it. `python benchmarks/gallery.py write` makes this page.

1. [What a healthy run looks like, and when](#what-a-healthy-run-looks-like-and-when)
2. [How often the findings are right](#how-often-the-findings-are-right)
3. [Symptoms](#symptoms), under the titles of report.py's findings
4. [The gallery](#the-gallery): runs with one fault each

## What a healthy run looks like, and when

Ten seeds of the default recipes, except those of sft.py and dpo_tldr.py: the range from the 5 to the 95 % quantile (`results/reference_bands.json`). One metric slightly outside
of its range is normal; several metrics, or one far outside, are not. With other models, data or flags the numbers differ; the curves should
have a similar shape. report.py draws the ranges of all metrics and scripts in gray.

"""
SYMPTOMS_HEAD = """

## How often the findings are right

- There is no false alarm in 20 healthy runs with seeds and flags on which the limits were not chosen.
- An earlier version named the true cause of 54 of 80 faults (68 %) among its first three causes, by two strict judges. The faults
  were invented by authors who had not read `report.py`, and put into default runs (`results/diagnose/verdicts.jsonl`).
- Today's 27 checks name 72 of 80, by the patterns of one reader, but they were improved on these faults (RLOO's with an earlier learning rate). Without the ranges of healthy
  runs, as with your own model and data, they name 47 of 80.

So expect the true cause among the first three in two of three failed runs of a default recipe, and less often elsewhere.

## Questions

- **Why is the loss about 0 in the first step, and later?** Advantages are centered: over each group in GRPO and RLOO, over the batch in PPO.
  With ratios of 1, the loss is minus their mean, so it is about 0, while its gradient is not. In all 51 updates of
  `results/qwen-gsm8k/seed1` it is between -0.02 and 0.02, and `grad_norm` between 0.30 and 0.66. The loss is not a measure of progress; the
  score is.
- **Why is the ratio exactly 1 in the first step?** The old log-probabilities are those of the same weights, computed the same way, and
  nothing has been updated since. Each run asserts it. Later steps on the same batch have other ratios.
- **Why does clipping do nothing?** With one optimizer step per batch (`--num-ppo-epochs 1 --num-mini-batches 1`, the default of grpo_math.py),
  all ratios are 1, so `policy/clipfrac_avg` and `policy/approxkl_avg` are 0. Clipping acts from the second step on.
- **How much memory does it take?** `perf/peak_memory_mb` has the peak so far. Measured: [GPT-2 and pythia](speed.md#on-a-gpu), [a Qwen of
  0.5B](real_models.md#one-gpu-15-minutes-gsm8k); computed for others: [scale](scale.md). [What saves memory](running.md#memory).
- **How long does it take?** `perf/seconds`, `perf/rollout_seconds` and `perf/train_seconds` of the second update, times the number of
  updates, which the run prints at the start; then two evaluations. [Reference runs](real_models.md) with their minutes.
- **Which commands made the start and the reward of this run?** `args.json` has the command of the run and its `model_name_or_path` and
  `reward_model_path`. If these are `model/` in a run folder, its own `args.json` is next to it, and so on. For models of this repository:
  [checkpoints](../checkpoints/README.md).

## Symptoms

"""
GALLERY_HEAD = """

## The gallery

Real runs of the defaults (earlier versions), with one fault each, stopped as soon as they have shown it. Red: this run. Gray: 5 to 95 % of
ten healthy runs. Some entries end with the policy's last response to a held-out prompt.

"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Runs with one fault each, and a page about them.")
    parser.add_argument("what", choices=["run", "write", "train"])
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--only", help="only this entry")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    flags = parser.parse_args()
    if flags.what == "train":
        name, project, output = flags.words
        [entry] = [entry for entry in ENTRIES if entry.name == name]
        train_faulty(entry, Path(project), output)
    elif flags.what == "run":
        run_all(flags.jobs, flags.only)
    else:
        write()
