"""Look at what a model that grpo_tools.py trained does with its tools. Nothing is trained.

grpo_tools.py and check.py must lie next to this file. Flags, tools and rewards are those of the run.

    python play.py RUN_FOLDER                                  # the first 4 held-out tasks of the run
    python play.py RUN_FOLDER --tasks my.jsonl --num-tasks 256 --greedy    # the first 256 tasks of a file
    python play.py RUN_FOLDER --prompt "What is 12 * 345?"     # one task without columns or --reward-fn
    python play.py RUN_FOLDER --model-name-or-path MODEL       # another model, such as the one before the run

It writes RUN_FOLDER/play (or --output-dir): turns.jsonl, and what `python report.py FOLDER` shows.
"""

import json
import sys
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import datasets
import torch
import transformers
import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import AutoModelForCausalLM

import check
import grpo_tools

STYLES = {"assistant": "bold", "tool": "cyan"}


@dataclass
class Args(grpo_tools.Args):
    """The flags of the run, and some more."""

    tasks: str | None = None  # a file of tasks (jsonl, csv, parquet) instead of the held-out ones
    prompt: str | None = None  # one task: what the user says
    num_tasks: int = 4  # play the first N tasks
    num_shown: int = 4  # show the turns of the first N of them
    greedy: bool = False  # nearly greedy decoding, as in the evaluation of grpo_tools.py


def parse_args(folder, flags):
    """The flags of the run, with the model that it trained, then those of the command line. -> Args"""
    about = json.loads(Path(folder, "args.json").read_text())
    if about.get("script", "play") not in ("grpo_tools", "play"):
        raise grpo_tools.UserError(
            f"{folder} is a run of {about['script']}.py: name one of grpo_tools.py, and --model-name-or-path "
            f"{folder}"
        )
    saved = about["args"]
    own = {"model_name_or_path": f"{folder}/model", "output_dir": f"{folder}/play", "resume": None}
    args = tyro.cli(Args, default=Args(**saved | own), args=flags, description=__doc__)
    if args.prompt is not None:
        args.reward_fn = args.reward_weights = None  # reward functions need the columns of a task
    if args.greedy:
        args.temperature = 0.01
    return replace(args, num_eval_samples=1)


def load_tasks(args, tokenizer, schemas):
    """The tasks to play: from --prompt, --tasks, or the data of the run. -> list of dict"""
    if args.prompt is None and args.tasks is None:
        args = replace(args, num_eval_prompts=args.num_tasks)
        _, held_out = grpo_tools.load_prompts(args, tokenizer, schemas)
        return held_out
    rows = [{"prompt": args.prompt}]
    if args.prompt is None:
        rows = grpo_tools.read_rows(Path(args.tasks))[: args.num_tasks]
    for row in rows:
        if isinstance(row.get("prompt"), str):
            row["prompt"] = [{"role": "user", "content": row["prompt"]}]
    return grpo_tools.load_tasks(rows, tokenizer, args, schemas)


def play(args):
    """Let the model solve each task once. Show the turns, and write the folder. -> list of dict"""
    accelerator = grpo_tools.start_accelerator(args)
    device, name = accelerator.device, args.model_name_or_path
    tokenizer = grpo_tools.load_tokenizer(name)
    grpo_tools.set_template_options(tokenizer, args)
    start_tools, schemas = grpo_tools.load_tools(args)
    tasks = load_tasks(args, tokenizer, schemas)
    if not tasks:
        raise grpo_tools.UserError("there is no task to play")
    policy = grpo_tools.load_model(AutoModelForCausalLM, name, **grpo_tools.eight_bit(args)).to(device)
    grpo_tools.check_model(policy, args.max_prompt_length + args.response_length)
    stop_ids = grpo_tools.find_stop_tokens(args, tokenizer, policy).to(device)
    turn_format = grpo_tools.TurnFormat(tokenizer, stop_ids, schemas)
    functions = grpo_tools.load_functions(args.reward_fn or [])
    state = transformers.TrainerState()
    trajectories = []

    def get_scores(played):
        trajectories.extend(played)
        return grpo_tools.score_trajectories(functions, state, device, played)

    def respond(batch, args):
        setting = policy, turn_format, start_tools, stop_ids, get_scores
        return grpo_tools.sample_responses(*setting, batch, args)

    with torch.autocast(device.type, torch.bfloat16, enabled=grpo_tools.wants_bf16(args, device)):
        records = grpo_tools.evaluate_set(respond, tasks, args, accelerator)
    games = [game_of(record, x) for record, x in zip(records, trajectories, strict=True)]
    metrics = grpo_tools.trajectory_metrics(records)
    for end in grpo_tools.ENDS:
        metrics[f"ended: {end}"] = sum(game["end"] == end for game in games) / len(games)

    console = Console()
    for number, game in enumerate(games[: args.num_shown], 1):
        console.print(turns_table(number, game))
    table = Table("metric", "mean", title=f"{len(games)} tasks, {name}", title_justify="left")
    for metric, x in metrics.items():
        table.add_row(metric, f"{x:.3f}")
    console.print(table)
    write_folder(args, games, trajectories, metrics)
    return games


def game_of(record, x):
    """All about a trajectory, from the record of evaluate_set and the trajectory itself. -> dict"""
    rewards = {name: values[0] for name, values in record.items() if name.startswith("rewards/")}
    return {
        "task": record["task"],
        "messages": [*x.example["prompt"], *x.messages, *x.unread],
        "end": x.end,
        "turns": x.num_turns,
        "calls": x.num_calls,
        "failures": x.num_failures,
        **rewards,
    }


def turns_table(number, game):
    """The turns of a trajectory, for the screen."""
    rewards = "  ".join(f"{name} {x:g}" for name, x in game.items() if name.startswith("rewards/"))
    counts = f"turns {game['turns']}, calls {game['calls']}, failed {game['failures']}"
    title = f"task {number}: ended: {game['end']}; {counts}  {rewards}"
    table = Table("role", "text", title=Text(title), title_justify="left", show_lines=True)
    for message in game["messages"]:
        style = STYLES.get(message["role"], "")
        table.add_row(message["role"], Text(message["content"], style, overflow="fold"))
    return table


def write_folder(args, games, trajectories, metrics):
    """Write turns.jsonl, and args.json, metrics.jsonl and tokens.jsonl as a run does, for report.py."""
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    tokens = []
    for game, x in zip(games, trajectories):
        rewards = [value or 0 for name, value in game.items() if name.startswith("rewards/")]
        weights = args.reward_weights or [1.0] * len(rewards)
        score = sum(weight * value for weight, value in zip(weights, rewards, strict=True))
        row = {"update": 0, "prompt": game["task"], "score": score, "ids": x.tokens}
        tokens.append(row | {"logprob": x.logprobs, "sampled": x.sampled})
    about = {"args": asdict(args), "script": "play", "command": sys.argv}
    (folder / "args.json").write_text(json.dumps(about, indent=2))
    for name, rows in {"turns": games, "metrics": [{"update": 0} | metrics], "tokens": tokens}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"wrote {folder}; to look at the tokens: python report.py {folder}")


def main(argv=None):
    """Run the command line: a run folder, then flags. A UserError prints one line, exit code 2."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # libraries that use each other's old names
    for library in (transformers, datasets):
        library.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
    argv = sys.argv[1:] if argv is None else argv
    try:
        if not argv or not Path(argv[0], "args.json").exists():
            problem = f"{argv[0]} is not the folder of a run. " if argv else ""
            raise grpo_tools.UserError(f"{problem}Name the folder of a run: python play.py RUN_FOLDER")
        args = parse_args(argv[0], argv[1:])
        checks = [check.check_numbers, check.check_paths, check.check_reward_weights]
        checks += [check.check_template_options]
        if args.tasks is not None:
            checks += [check.check_chat_texts]
        data = args.tasks or args.dataset_name
        for error in check.errors(grpo_tools, replace(args, dataset_name=data), checks):
            raise grpo_tools.UserError(error)
        play(args)
    except grpo_tools.UserError as error:
        print(f"play.py: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
