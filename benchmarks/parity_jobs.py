"""The jobs of parity.py: what each side trains, and how all sides are measured.

    python benchmarks/parity_jobs.py grpo ours 1      # one run: job, side, seed; its last line is the result
    python benchmarks/parity_jobs.py grpo ours 1 --time    # training only: the seconds of each copy

A side is a function (script, args, updates, snapshots) -> nothing. It trains as long as args say, and lets
`snapshots` see the policy before the first update and after each update.
"""

import argparse
import copy
import importlib
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from parity_snapshots import Snapshots

ROOT = Path(__file__).resolve().parents[1]
SEED = 0  # of all measurements
sys.path.insert(0, str(ROOT))


# ---- Sides -------------------------------------------------------------------------------------------------


def train_ours(script, args, updates, snapshots, patches=(), **changes):
    """One of our scripts that sample.

    make_learner gets the model, Run.start comes before the first update, and Run.checkpoint is the end of each.
    patches: changes of the script, each a list of (old lines, new lines); changes: flags of this side only
    """
    args = replace(args, **changes)
    if patches:
        script = patched(script, patches)
    make_learner, start, checkpoint = script.make_learner, script.Run.start, script.Run.checkpoint
    policy = None

    def make_and_keep(model, args, accelerator):
        nonlocal policy
        policy = model.policy
        return make_learner(model, args, accelerator)

    def start_and_see(run, batch_size):
        state = start(run, batch_size)
        snapshots.see(0, policy)
        return state

    def checkpoint_and_see(run, state):
        snapshots.see(state["update"], policy)
        checkpoint(run, state)

    with (
        mock.patch.object(script, "make_learner", make_and_keep),
        mock.patch.multiple(script.Run, start=start_and_see, checkpoint=checkpoint_and_see),
    ):
        script.train(args)


def patched(script, patches):
    """A copy of a script in which lines are replaced. patches: lists of (old, new) -> module"""
    source = Path(script.__file__).read_text()
    for old, new in sum(patches, []):
        if source.count(old) != 1:
            raise ValueError(f"these lines are not in {script.__name__}.py exactly once:\n{old}")
        source = source.replace(old, new)
    module = types.ModuleType(f"{script.__name__}_patched")
    module.__file__ = script.__file__
    sys.modules[module.__name__] = module  # dataclasses look for it there
    exec(compile(source, script.__file__, "exec"), module.__dict__)
    return module


# What TRL's PPO does in another way than ppo_sentiment.py.

RANDOM_VALUE_HEAD = [
    (
        "        nn.init.zeros_(self.value_head.weight)\n        nn.init.zeros_(self.value_head.bias)\n",
        "",
    ),
]
UNBIASED_VARIANCE = [
    (
        "    variance = masked_mean((values - mean) ** 2, mask)\n",
        "    variance = masked_mean((values - mean) ** 2, mask) * mask.sum() / (mask.sum() - 1)\n",
    ),
]


def train_critic_ours(script, args, updates, snapshots, patches=(), reward_head=False):
    """ppo_sentiment.py with a critic of its own, on the prompts and the reward of rloo_tldr.py.

    script: rloo_tldr.py; args: its flags; reward_head: the values begin as the scores of the reward model,
    not as 0
    """
    ppo = importlib.import_module("ppo_sentiment")
    if patches:
        ppo = patched(ppo, patches)
    tokenizer = script.load_tokenizer(args.model_name_or_path)
    post_lists = [
        script.load_prompts(rows, tokenizer, args) for rows in script.load_splits(args.dataset_name)
    ]
    longest = max(len(post["ids"]) for posts in post_lists for post in posts)
    names = {x.name for x in fields(args)} & {x.name for x in fields(ppo.Args)} - {"num_eval_prompts"}
    flags = {name: getattr(args, name) for name in names}
    ppo_args = ppo.Args(
        **flags,
        value_model_path=args.reward_model_path,
        query_min_length=longest,  # prompts are not cut
        query_max_length=longest,
        response_min_length=args.response_length,
        num_eval_prompts=4,
        kl_target=None,
    )

    def load_prompts(rows, tokenizer, ppo_args):
        return script.load_prompts(rows, tokenizer, args)

    def load_reward(ppo_args, trainer_state, device):
        functions = {"reward_model": script.load_reward_model(args, args.reward_model_path, device)}
        return partial(ppo.call_reward_functions, functions, trainer_state, device)

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.multiple(ppo, load_prompts=load_prompts, load_reward=load_reward),
    ):
        if reward_head:  # ppo_sentiment.py loads a head that it finds next to the critic
            critic = Path(folder, "critic")
            shutil.copytree(ROOT / args.reward_model_path, critic)
            head = centered_reward_model(script, args).score.state_dict()
            ppo.save_file(head, critic / "value_head.safetensors")
            ppo_args = replace(ppo_args, value_model_path=str(critic))
        train_ours(ppo, ppo_args, updates, snapshots)


def centered_reward_model(script, args):
    """The reward model of rloo_tldr.py, with reward_offset in the bias of its head. -> transformers model"""
    model = script.load_model(script.AutoModelForSequenceClassification, args.reward_model_path).eval()
    model.score.bias = torch.nn.Parameter(torch.tensor([-model.config.reward_offset]))
    return model


class RewardAfterEos(torch.nn.Module):
    """The reward of rloo_tldr.py for TRL's PPOTrainer: a response that was cut off is scored at an EOS.

    PPOTrainer asks the module that base_model_prefix names for hidden states, and then `score` for the
    scores. It reads the score at the last token of a response.
    """

    base_model_prefix = "states"

    def __init__(self, model, eos_id):
        super().__init__()
        self.model, self.eos_id = model, eos_id
        self.score = model.score

    def states(self, input_ids, attention_mask, **named_inputs):
        """[B, L] each -> hidden_states of the last layer, [B, L, H].

        A response without EOS fills the last column. Its state there is that of an EOS after it.
        """
        ids = torch.nn.functional.pad(input_ids, (0, 1), value=self.eos_id)
        mask = torch.nn.functional.pad(attention_mask, (0, 1), value=True)
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        output = self.model.base_model(input_ids=ids, attention_mask=mask, position_ids=positions)
        hidden = output.last_hidden_state  # [B, L + 1, H]
        was_cut = attention_mask[:, -1].bool() & (input_ids[:, -1] != self.eos_id)  # [B]
        last = torch.where(was_cut[:, None], hidden[:, -1], hidden[:, -2])  # [B, H]
        return types.SimpleNamespace(hidden_states=[torch.cat([hidden[:, :-2], last[:, None]], 1)])


def train_supervised_ours(script, args, updates, snapshots, scale=1.0):
    """sft.py or reward_model.py.

    make_learner gets the model before the first update, and Run.checkpoint is the end of an update.
    scale: factor of all weights before the first update
    """
    make_learner, checkpoint = script.make_learner, script.Run.checkpoint
    inner = None

    def make_and_see(model, args, accelerator):
        nonlocal inner
        [inner] = model.children()  # the transformers model
        for weights in inner.parameters():
            weights.data *= scale
        snapshots.see(0, inner)
        return make_learner(model, args, accelerator)

    def checkpoint_and_see(run, state):
        snapshots.see(state["update"], inner)
        checkpoint(run, state)

    with (
        mock.patch.object(script, "make_learner", make_and_see),
        mock.patch.object(script.Run, "checkpoint", checkpoint_and_see),
    ):
        script.train(args)


def callback_of(snapshots, steps_per_update):
    """A callback for TRL's trainers that shows snapshots the policy."""
    import transformers

    class See(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **named_inputs):
            snapshots.see(0, getattr(model, "policy", model))  # PPOTrainer wraps the policy

        def on_step_end(self, args, state, control, model=None, **named_inputs):
            if state.global_step % steps_per_update == 0:
                snapshots.see(state.global_step // steps_per_update, getattr(model, "policy", model))

    return See()


SAME = "per_device_train_batch_size gradient_accumulation_steps learning_rate lr_scheduler_type max_grad_norm seed"
QUIET = dict(
    bf16=False,
    gradient_checkpointing=False,
    use_cpu=True,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)


def same_flags(args, names):
    """Flags that have the same name in TRL. -> dict"""
    return {name: getattr(args, name) for name in names.split()}


def train_grpo_trl(script, args, updates, snapshots):
    """TRL 1.16's GRPOTrainer."""
    import datasets
    import transformers
    import trl

    config = trl.GRPOConfig(
        output_dir=args.output_dir,
        **same_flags(args, f"{SAME} num_generations temperature"),
        max_completion_length=args.response_length,
        weight_decay=0.01,
        max_steps=updates,
        **QUIET,
        logging_steps=1,
    )
    policy = transformers.AutoModelForCausalLM.from_pretrained(
        ROOT / args.model_name_or_path, dtype="float32"
    )
    trainer = trl.GRPOTrainer(
        model=policy,
        reward_funcs=list(script.load_functions(args.reward_fn).values()),
        args=config,
        train_dataset=datasets.load_dataset(str(ROOT / args.dataset_name))["train"],
        processing_class=script.load_tokenizer(args.model_name_or_path),
        callbacks=[callback_of(snapshots, 1)],
    )
    trainer.train()


def train_rloo_trl(script, args, updates, snapshots):
    """TRL 1.16's RLOOTrainer. The penalty for a missing EOS, which it does not have, is part of the reward."""
    import datasets
    import transformers
    import trl

    steps = args.num_mini_batches * args.num_ppo_epochs
    config = trl.RLOOConfig(
        output_dir=args.output_dir,
        **same_flags(args, f"{SAME} temperature"),
        steps_per_generation=args.gradient_accumulation_steps * args.num_mini_batches,
        num_iterations=args.num_ppo_epochs,
        num_generations=args.rloo_k,
        beta=args.kl_coef,
        epsilon=args.cliprange,
        max_completion_length=args.response_length,
        weight_decay=0.01,
        max_steps=updates * steps,
        **QUIET,
        logging_steps=steps,
    )
    tokenizer = script.load_tokenizer(args.model_name_or_path)
    score = script.load_reward_model(args, args.reward_model_path, torch.device("cpu"))

    def reward(prompts, completions, completion_ids, **columns):
        ended = [tokenizer.eos_token_id in ids for ids in completion_ids]
        scores = score(prompts, completions)
        return [x - args.missing_eos_penalty * (not end) for x, end in zip(scores, ended)]

    rows = datasets.load_dataset(str(ROOT / args.dataset_name))["train"].select_columns(["prompt"])
    trainer = trl.RLOOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(
            ROOT / args.model_name_or_path, dtype="float32"
        ),
        reward_funcs=reward,
        args=config,
        train_dataset=rows,
        processing_class=tokenizer,
        callbacks=[callback_of(snapshots, steps)],
    )
    trainer.train()


def train_rloo_trl_old(script, args, updates, snapshots):
    """TRL 0.11.4's RLOOTrainer, but a response that was cut off is scored at an EOS, not at its last token."""
    tokenizer = script.load_tokenizer(args.model_name_or_path)
    train_rows, _ = script.load_splits(args.dataset_name)
    posts = script.load_prompts(train_rows, tokenizer, args)
    rows = [post["ids"] for post in posts]
    settings = asdict(args) | {"updates": updates, "rows": rows}
    copies = train_trl_old("rloo", settings)
    for update, seconds, weights in copies:
        weights["lm_head.weight"] = weights.pop("embed_out.weight")  # its name in newer versions of GPT-NeoX
        snapshots.copies.append((update, seconds, weights))


def train_ppo_trl_old(script, args, updates, snapshots):
    """TRL 0.11.4's PPOTrainer, which takes prompts, responses and scores batch by batch."""
    tokenizer = script.load_tokenizer(args.model_name_or_path)
    train_rows, _ = script.load_splits(args.dataset_name)
    reviews = script.load_prompts(train_rows, tokenizer, args)
    B = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.num_mini_batches
    other = replace(args, seed=args.seed + 1000)  # not the prompts of our run with this seed
    batches = []  # of each update: prompts (lists of ids), and the longest length of each response
    for update in range(1, updates + 1):
        batch = script.draw_batch(reviews, (update - 1) * B, B, other, update)
        prompts = [ids[mask].tolist() for ids, mask in zip(batch["ids"], batch["mask"])]
        batches.append({"prompts": prompts, "limits": batch["max_new_tokens"].tolist()})
    snapshots.copies += train_trl_old("ppo", asdict(args) | {"updates": updates, "batches": batches})


def train_trl_old(algorithm, settings):
    """parity_trl_old.py in an environment of its own. -> list of (update, seconds, weights)"""
    if "TRL_PYTHON" not in os.environ:
        raise SystemExit("TRL_PYTHON must name the Python of an environment with TRL 0.11.4")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "settings.json").write_text(json.dumps(settings))
        words = [os.environ["TRL_PYTHON"], str(ROOT / "benchmarks/parity_trl_old.py"), algorithm, folder]
        environment = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
        end = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
        if end.returncode:
            raise SystemExit(end.stdout[-2000:] + end.stderr[-3000:])
        return torch.load(Path(folder, "copies.pt"), weights_only=True)


def train_critic_trl(script, args, updates, snapshots):
    """TRL 1.12's PPOTrainer. Its critic begins as the reward model, with its head. script: rloo_tldr.py"""
    import datasets
    import transformers
    import trl
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    assert trl.__version__.startswith("1.12."), f"this side needs TRL 1.12, not {trl.__version__}"
    config = PPOConfig(
        output_dir=args.output_dir,
        # With gradient accumulation, the minibatches of TRL 1.12 make no optimizer step of their own. So a
        # micro-batch is as large as the batch, and each minibatch is a part of it.
        per_device_train_batch_size=args.per_device_train_batch_size * args.num_mini_batches,
        gradient_accumulation_steps=1,
        **same_flags(
            args,
            "num_mini_batches num_ppo_epochs total_episodes local_rollout_forward_batch_size response_length "
            "temperature missing_eos_penalty kl_coef cliprange learning_rate lr_scheduler_type seed",
        ),
        stop_token="eos",
        weight_decay=0.0,  # AdamW without it is Adam
        num_sample_generations=0,
        **QUIET,
        logging_steps=1,
    )
    tokenizer = script.load_tokenizer(args.model_name_or_path)
    tokenizer.padding_side = "left"
    train_rows, held_out = (
        datasets.Dataset.from_dict(
            {"input_ids": [post["ids"] for post in script.load_prompts(rows, tokenizer, args)]}
        )
        for rows in script.load_splits(args.dataset_name)
    )
    policy, reference = (
        transformers.AutoModelForCausalLM.from_pretrained(ROOT / args.model_name_or_path, dtype="float32")
        for _ in range(2)
    )
    np.random.seed(args.seed)  # TRL shuffles the minibatches with it, and does not seed it
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=RewardAfterEos(centered_reward_model(script, args), tokenizer.eos_token_id),
        value_model=centered_reward_model(script, args),
        train_dataset=train_rows,
        eval_dataset=held_out,
        callbacks=[callback_of(snapshots, 1)],
    )
    trainer.train()


def supervised_settings(args, updates, as_ours):
    """The settings that TRL 1.16's SFTConfig and RewardConfig share. -> dict"""
    return dict(
        output_dir=args.output_dir,
        **same_flags(args, f"{SAME} max_length"),
        max_steps=updates,
        warmup_steps=math.ceil(args.warmup_ratio * updates),
        weight_decay=0.01,
        train_sampling_strategy="sequential" if as_ours else "random",
        **QUIET,
        logging_steps=updates,
    )


def rows_for_trl(script, args, updates, as_ours):
    """The training rows. as_ours: those of all updates, in the order of our script, which TRL then keeps."""
    import datasets

    rows, _ = script.load_splits(args.dataset_name)
    if as_ours:
        B = args.per_device_train_batch_size * args.gradient_accumulation_steps
        numbers = script.stream_rows(len(rows), start=0, count=updates * B, seed=args.seed)
        rows = [rows[i] for i in numbers.tolist()]
    return datasets.Dataset.from_list(rows)


def load_language_model(script, args):
    """What sft.py starts from. -> model, tokenizer, held-out documents"""
    tokenizer = script.load_tokenizer(args.model_name_or_path)
    splits = script.load_splits(args.dataset_name)
    documents, held_out = (script.load_documents(rows, tokenizer, args)[0] for rows in splits)
    return script.load_language_model(args, tokenizer, documents), tokenizer, held_out


def load_classifier(script, args):
    """What reward_model.py starts from. -> model, tokenizer, held-out rows"""
    tokenizer = script.load_tokenizer(args.model_name_or_path)
    splits = script.load_splits(args.dataset_name)
    train, held_out = (script.load_preference_rows(rows, tokenizer, args) for rows in splits)
    model, _ = script.build_classifier(args, tokenizer, train, None)
    return model, tokenizer, held_out


def optimize_as_ours(script, model, args, updates):
    """AdamW with weight decay of all weights, and our schedule: TRL's warm-up is one step behind. -> optimizer,
    scheduler
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.01)

    def factor(step):
        return script.learning_rate(args, step + 1, updates) / args.learning_rate

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def train_sft_trl(script, args, updates, snapshots, as_ours=False):
    """TRL 1.16's SFTTrainer, from the weights that sft.py starts from with this seed."""
    import trl

    script.set_global_seed(args.seed)
    model, tokenizer, _ = load_language_model(script, args)
    rows = rows_for_trl(script, args, updates, as_ours)
    trainer = trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(**supervised_settings(args, updates, as_ours), packing=False),
        train_dataset=rows.select_columns(["prompt", "completion"]),
        processing_class=tokenizer,
        callbacks=[callback_of(snapshots, 1)],
        optimizers=optimize_as_ours(script, model, args, updates) if as_ours else (None, None),
    )
    trainer.train()


def train_reward_trl(script, args, updates, snapshots, as_ours=False):
    """TRL 1.16's RewardTrainer, from the weights that reward_model.py starts from with this seed."""
    import trl

    script.set_global_seed(args.seed)
    model, tokenizer, _ = load_classifier(script, args)
    rows = rows_for_trl(script, args, updates, as_ours)
    trainer = trl.RewardTrainer(
        model=model,
        args=trl.RewardConfig(**supervised_settings(args, updates, as_ours)),
        train_dataset=rows.select_columns(["prompt", "chosen", "rejected"]),
        processing_class=tokenizer,
        callbacks=[callback_of(snapshots, 1)],
        optimizers=optimize_as_ours(script, model, args, updates) if as_ours else (None, None),
    )
    trainer.train()


# ---- Jobs --------------------------------------------------------------------------------------------------


SAMPLED = {  # metrics of responses: name -> title
    "score": "score",
    "kl": "KL to the initial policy, nats per response",
    "entropy": "entropy, nats per token",
    "length": "tokens per response",
}


@dataclass
class Job:
    """A job that our script and trainers of TRL can do."""

    title: str
    script: str  # its name
    sides: dict[str, Callable]  # "ours" first; names of patched sides begin with "ours" too
    comparisons: list[tuple[str, str]]  # of the plan: (our side, peer)
    meter: Callable  # (job, script, args) -> model, function that measures it, how many held-out rows
    recipe: str = "tiny"
    changes: dict = field(default_factory=dict)  # flags that differ from the recipe's
    metrics: dict[str, str] = field(default_factory=lambda: SAMPLED)  # in the figure: name -> title
    explored: list[tuple[str, str]] = field(default_factory=list)  # comparisons that were added later
    tested: tuple[str, str] = ("score", "kl")  # metrics of the plan
    digits: int = 3  # after the point, in the table
    log_scale: bool = False  # of the first metric, in the figure
    unit: str = "episodes (responses)"
    paired: bool = False  # both sides start from the same random weights for a seed
    k: int = 1  # responses to each held-out prompt in the last measurement
    load_rows: Callable = None  # (script, data set, tokenizer, args) -> all held-out rows
    scores: Callable = None  # (script, args) -> dict: name -> function of what `respond` returns -> [B]
    respond: Callable = None  # samples responses, see respond_in_groups


CPU = torch.device("cpu")


def grpo_scores(script, args):
    """Is the answer right?"""
    return {"score": partial(script.score_responses, script.load_functions(args.reward_fn), None, CPU)}


def rloo_scores(script, args):
    """The reward model."""
    return {"score": script.load_reward(args, None, CPU)}


def ppo_scores(script, args):
    """The classifier's logit, clipped as in training."""
    reward = script.load_reward(args, None, CPU)

    def clipped(*texts):
        return {name: x.clamp(-args.score_clip, args.score_clip) for name, x in reward(*texts).items()}

    return {"score": clipped}


def respond_in_groups(script, args, policy, tokenizer, rows, k, start):
    """Sample k responses to each row of grpo_math.py or rloo_tldr.py.

    start: number of the first row -> dict of tensors (ids, mask [B, C + T]; lengths, stopped [B]), and what
    a reward function of the script gets, which is what the scores of the job need
    """
    inputs = []

    def record(*texts):
        inputs.append(texts)
        return {}

    stop_ids = script.find_stop_tokens(args, tokenizer, policy)
    batch = script.draw_batch(rows, k, args, ("parity", start))
    b, _ = script.sample_responses(policy, tokenizer, stop_ids, record, batch, args)
    return b, inputs[0]


def respond_to_reviews(script, args, policy, tokenizer, rows, k, start):
    """The same for ppo_sentiment.py: prompts are cut at random and responses have random limits."""
    inputs = []

    def record(*texts):
        inputs.append(texts)
        return {"none": torch.zeros(k * len(rows))}

    batch = script.draw_batch(rows * k, 0, k * len(rows), args, ("parity", start))
    model = script.PolicyAndValue(policy)
    stop_ids = script.find_stop_tokens(args, tokenizer, policy)
    b, _, _ = script.rollout(model, policy, tokenizer, stop_ids, record, batch, args)
    return b, inputs[0]


def sampling_meter(job, script, args):
    """Measures a policy by its responses to held-out prompts."""
    tokenizer = script.load_tokenizer(args.model_name_or_path)
    policy = script.load_model(script.AutoModelForCausalLM, args.model_name_or_path).eval()
    reference = copy.deepcopy(policy)
    _, held_out = script.load_splits(args.dataset_name)
    rows = job.load_rows(script, held_out, tokenizer, args)
    scores = job.scores(script, args)

    def measure_policy(is_last):
        k = job.k if is_last else 1
        return measure(job.respond, script, args, policy, reference, tokenizer, rows, k, scores)

    return policy, measure_policy, len(rows) * job.k


def sft_meter(job, script, args):
    """Measures a language model by its loss on held-out documents, in nats per token."""
    accelerator = script.start_accelerator(args)
    lm, _, held_out = load_language_model(script, args)
    model = script.LanguageModel(lm)
    rows = script.pack(held_out, args.max_length, args.packing)

    def measure_model(is_last):
        found = script.evaluate(model, rows, accelerator, args)
        return {"loss": found["loss"], "accuracy": found["mean_token_accuracy"]}

    return lm, measure_model, len(rows)


def reward_meter(job, script, args):
    """Measures a reward model by loss and accuracy on held-out pairs."""
    accelerator = script.start_accelerator(args)
    model, _, rows = load_classifier(script, args)
    better, worse, weight, _ = script.pair_table(rows, CPU)

    def measure_model(is_last):
        scores = script.score_rows(model, rows, accelerator).squeeze(-1)  # [texts]
        differences = scores[better] - scores[worse]
        found = {"accuracy": differences > 0, "margin": differences}
        found["loss"] = script.pair_loss(scores[better], scores[worse])
        return {name: (weight * x).sum().item() / len(rows) for name, x in found.items()}

    return model, measure_model, len(rows)


PPO_PATCHES = [RANDOM_VALUE_HEAD, UNBIASED_VARIANCE]
SHORT = dict(num_eval_prompts=4, num_sample_generations=0)  # our evaluations are not needed

JOBS = {
    "grpo": Job(
        title="GRPO on arithmetic",
        script="grpo_math",
        changes=SHORT,
        k=8,
        sides={"ours": train_ours, "TRL 1.16 GRPOTrainer": train_grpo_trl},
        comparisons=[("ours", "TRL 1.16 GRPOTrainer")],
        meter=sampling_meter,
        load_rows=lambda script, rows, tokenizer, args: script.load_tasks(rows, tokenizer, args),
        scores=grpo_scores,
        respond=respond_in_groups,
    ),
    "rloo": Job(
        title="RLOO on the tiny TL;DR",
        script="rloo_tldr",
        changes=SHORT,
        k=8,
        sides={
            "ours": train_ours,
            "ours, no gradient clipping": partial(train_ours, max_grad_norm=None),
            "TRL 1.16 RLOOTrainer": train_rloo_trl,
            "TRL 0.11 RLOOTrainer": train_rloo_trl_old,
        },
        comparisons=[("ours", "TRL 1.16 RLOOTrainer"), ("ours", "TRL 0.11 RLOOTrainer")],
        explored=[
            ("ours, no gradient clipping", "TRL 0.11 RLOOTrainer"),
            ("ours", "ours, no gradient clipping"),
        ],
        meter=sampling_meter,
        load_rows=lambda script, rows, tokenizer, args: script.load_prompts(rows, tokenizer, args),
        scores=rloo_scores,
        respond=respond_in_groups,
    ),
    "ppo": Job(
        title="PPO on film reviews",
        script="ppo_sentiment",
        # TRL 0.11 clips the first gradient only: it keeps the parameters in an iterator, which is then empty.
        changes=dict(num_eval_prompts=4, num_sample_generations=0, max_grad_norm=None),
        k=8,
        sides={
            "ours": train_ours,
            "ours, TRL's value head and variance": partial(train_ours, patches=PPO_PATCHES),
            "TRL 0.11 PPOTrainer": train_ppo_trl_old,
        },
        comparisons=[
            ("ours", "TRL 0.11 PPOTrainer"),
            ("ours, TRL's value head and variance", "TRL 0.11 PPOTrainer"),
        ],
        explored=[("ours", "ours, TRL's value head and variance")],
        # No length: the limit of each response is random, and nearly all responses reach it.
        metrics={name: title for name, title in SAMPLED.items() if name != "length"},
        meter=sampling_meter,
        load_rows=lambda script, rows, tokenizer, args: script.load_prompts(rows, tokenizer, args)[:512],
        scores=ppo_scores,
        respond=respond_to_reviews,
    ),
    "critic": Job(
        title="PPO with a critic of its own, on the tiny TL;DR",
        script="rloo_tldr",  # prompts and reward; the algorithm is that of ppo_sentiment.py
        changes=SHORT
        | dict(
            optimizer="torch.optim.Adam",
            max_grad_norm=None,  # TRL 1.12's PPOTrainer has no clipping of gradients
            per_device_train_batch_size=32,
            total_episodes=5_120,
            num_mini_batches=4,
            num_ppo_epochs=4,
            learning_rate=1e-4,
        ),
        k=8,
        sides={
            "ours": train_critic_ours,
            "ours, TRL's value head and variance": partial(
                train_critic_ours, patches=[UNBIASED_VARIANCE], reward_head=True
            ),
            "TRL 1.12 PPOTrainer": train_critic_trl,
        },
        comparisons=[
            ("ours", "TRL 1.12 PPOTrainer"),
            ("ours, TRL's value head and variance", "TRL 1.12 PPOTrainer"),
        ],
        explored=[("ours", "ours, TRL's value head and variance")],
        meter=sampling_meter,
        load_rows=lambda script, rows, tokenizer, args: script.load_prompts(rows, tokenizer, args),
        scores=rloo_scores,
        respond=respond_in_groups,
    ),
    "sft": Job(
        title="Supervised fine-tuning on the tiny TL;DR",
        script="sft",
        recipe="tiny-tldr",
        changes=dict(
            packing=False,
            num_train_epochs=5.0,
            per_device_train_batch_size=48,  # the data have 50 batches
            num_eval_prompts=4,
            num_samples=0,
        ),
        sides={
            "ours": train_supervised_ours,
            "TRL 1.16 SFTTrainer": train_sft_trl,
            "TRL 1.16 SFTTrainer, our order, weight decay and warm-up": partial(train_sft_trl, as_ours=True),
        },
        comparisons=[("ours", "TRL 1.16 SFTTrainer")],
        explored=[
            ("ours", "TRL 1.16 SFTTrainer, our order, weight decay and warm-up"),
        ],
        paired=True,
        digits=4,
        log_scale=True,
        meter=sft_meter,
        metrics={"loss": "held-out loss, nats per token", "accuracy": "held-out accuracy of tokens"},
        tested=("loss", "accuracy"),
        unit="documents",
    ),
    "reward": Job(
        title="Reward model of the tiny TL;DR",
        script="reward_model",
        recipe="tiny-tldr",
        changes=dict(per_device_train_batch_size=40, num_train_epochs=1.0),  # the data have 250 batches
        sides={
            "ours": train_supervised_ours,
            "TRL 1.16 RewardTrainer": train_reward_trl,
            "TRL 1.16 RewardTrainer, our order, weight decay and warm-up": partial(
                train_reward_trl, as_ours=True
            ),
            # The same run but for rounding: how far apart do two runs end by chance alone?
            "reward_model.py, weights x 1.000001": partial(train_supervised_ours, scale=1 + 1e-6),
        },
        comparisons=[("ours", "TRL 1.16 RewardTrainer")],
        explored=[
            ("ours", "TRL 1.16 RewardTrainer, our order, weight decay and warm-up"),
            ("ours", "reward_model.py, weights x 1.000001"),
        ],
        paired=True,
        digits=4,
        meter=reward_meter,
        metrics={
            "loss": "held-out loss, nats",
            "accuracy": "held-out accuracy",
            "margin": "chosen - rejected score",
        },
        tested=("loss", "accuracy"),
        unit="pairs",
    ),
}


# ---- Measurement -------------------------------------------------------------------------------------------


@torch.no_grad()
def measure(respond, script, args, policy, reference, tokenizer, rows, k, scores):
    """Sample k responses to each held-out row. -> dict: score, kl, entropy, length, ended

    score: mean of the reward per response; kl: nats per response, k1; entropy: nats per token, of the whole
    distribution; length: tokens with the stop token; ended: fraction that stopped by themselves.
    """
    args = replace(args, seed=SEED)
    T = args.response_length
    found = {name: [] for name in [*scores, "kl", "entropy", "length", "ended"]}
    for start in range(0, len(rows), 64):
        b, texts = respond(script, args, policy, tokenizer, rows[start : start + 64], k, start)
        for name, reward in scores.items():
            found[name].append(sum(x.nan_to_num() for x in reward(*texts).values()))
        inputs = b["ids"], b["mask"], T, args.temperature
        logprobs, entropies, *_ = script.response_logprobs(policy, *inputs)  # [B, T] each
        ref_logprobs, *_ = script.response_logprobs(reference, *inputs)
        found["kl"].append((logprobs - ref_logprobs).sum(1))
        found["entropy"].append(entropies[script.length_mask(b["lengths"], T)])
        found["length"].append(b["lengths"].float())
        found["ended"].append(b["stopped"].float())
    return {name: torch.cat(values).mean().item() for name, values in found.items()}


def count_updates(script, args, batch):
    """Updates of a run, as our scripts count them. batch: responses or rows per update"""
    if hasattr(args, "total_episodes"):
        return math.ceil(args.total_episodes / batch)
    rows, _ = script.load_splits(args.dataset_name)
    return max(1, round(args.num_train_epochs * len(rows) / batch))


def train_side(name, side, seed, **changes):
    """Train one side of a job. changes: flags that differ from the job's -> script, args, batch, Snapshots"""
    job = JOBS[name]
    script = importlib.import_module(job.script)
    flags = dict(recipe=job.recipe, seed=seed, save_every=0) | job.changes | changes
    args = replace(script.RECIPES[job.recipe], **flags)
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
    batch *= getattr(args, "num_mini_batches", 1)
    updates = count_updates(script, args, batch)
    snapshots = Snapshots(updates)
    with tempfile.TemporaryDirectory() as folder:
        job.sides[side](script, replace(args, output_dir=f"{folder}/run"), updates, snapshots)
    last, _, _ = snapshots.copies[-1]
    assert last == updates, "the policy after the last update was not copied"
    return script, args, batch, snapshots


def run(name, side, seed, **changes):
    """One run and its measurements. changes: flags that differ from the job's -> dict, a line of results/parity"""
    job = JOBS[name]
    script, args, batch, snapshots = train_side(name, side, seed, **changes)
    own, child = (
        resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    memory = max(own, child) / 1024

    model, measure_now, held_out_responses = job.meter(job, script, args)
    curve = []
    for update, seconds, weights in snapshots.copies:
        missing, _ = model.load_state_dict(weights, strict=False)  # older versions have buffers besides
        assert not missing, missing
        point = measure_now(is_last=False)
        curve.append({"update": update, "episode": update * batch, "seconds": seconds, **point})
    return {
        "job": name,
        "side": side,
        "seed": seed,
        "updates": curve[-1]["update"],
        "seconds": curve[-1]["seconds"],
        "peak_memory_mb": memory,
        "held_out_responses": held_out_responses,
        "final": measure_now(is_last=True),
        "curve": curve,
    }


def time_side(name, side, seed, **changes):
    """Only train. -> dict, a line of results/parity/times.jsonl; seconds: [episode, seconds] of each copy"""
    _, _, batch, snapshots = train_side(name, side, seed, **changes)
    seconds = [[update * batch, seconds] for update, seconds, _ in snapshots.copies]
    return {"job": name, "side": side, "seed": seed, "seconds": seconds}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="One run of one side of a job.")
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("side")
    parser.add_argument("seed", type=int)
    parser.add_argument("--time", action="store_true", help="train, but measure nothing")
    flags = parser.parse_args()
    function = time_side if flags.time else run
    print(json.dumps(function(flags.job, flags.side, flags.seed)))
