"""Chat with a model that ppo_dialog.py or sft.py trained. ppo_dialog.py and check.py must lie next to it.

    python chat.py RUN_FOLDER                               # with the flags of that run
    python chat.py RUN_FOLDER --temperature 0.7 --seed 3    # with other flags of ppo_dialog.py
    python chat.py MODEL --utterance-end eos                # a folder or a Hub name

`reset` forgets the conversation; `quit`, Ctrl-D and Ctrl-C leave.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import transformers
import tyro
from transformers import AutoModelForCausalLM

import check
import ppo_dialog


def parse_args(name, flags):
    """The flags, with defaults from the run, from the recipe that starts with this model, or from Args."""
    default = ppo_dialog.Args()
    path = Path(ppo_dialog.resolve_path(name))
    for recipe in ppo_dialog.RECIPES.values():
        start = Path(recipe.model_name_or_path)
        if path == start or path.resolve() == (ppo_dialog.HERE / start).resolve():
            default = recipe
    run_folder = path.parent if path.name in ("model", "adapter") else path  # both are the trained policy
    if (run_folder / "args.json").exists():  # perhaps of another script: take the flags that both have
        saved = json.loads((run_folder / "args.json").read_text())["args"]
        default = replace(default, **{key: x for key, x in saved.items() if hasattr(ppo_dialog.Args, key)})
        name = str(run_folder / "model")
    default = replace(default, model_name_or_path=name)
    return tyro.cli(ppo_dialog.Args, default=default, args=flags, description=__doc__)


def chat(args):
    """Read lines from the keyboard and answer them."""
    name = args.model_name_or_path
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = ppo_dialog.load_tokenizer(name)
    is_end = ppo_dialog.load_end_criteria(args, tokenizer)
    model = ppo_dialog.load_model(AutoModelForCausalLM, name).to(device)
    ppo_dialog.check_model(model, args.max_prompt_length + args.response_length)
    model.eval()
    bos = tokenizer("").input_ids  # [BOS], or nothing
    torch.manual_seed(args.seed)
    print(
        f"{name}: the prompt is the last {args.num_context_utterances} utterances, each with the end mark "
        f"{args.utterance_end!r}; `reset` forgets them, `quit` leaves"
    )
    history = []  # all utterances since the last reset
    while (text := input("> You: ").strip()) != "quit":
        if text == "reset":
            history = []
            print("forgotten")
        elif text:
            history.append(text)
            utterances = ppo_dialog.utterance_ids(tokenizer, history, args.utterance_end)
            prompt, _ = ppo_dialog.context_ids(utterances, args, bos)
            ids = torch.tensor([prompt], device=device)  # [1, C]
            mask = torch.ones_like(ids, dtype=torch.bool)
            uniforms = torch.rand(1, args.response_length, dtype=torch.float64, device=device)
            tokens, _, length, _ = ppo_dialog.generate(model, ids, mask, uniforms, is_end, args.temperature)
            answer = ppo_dialog.answer_text(tokenizer, tokens[0, :length].tolist(), args.utterance_end)
            print(f"> Bot: {answer}")
            if answer:
                history.append(answer)
            else:  # fine-tuning never saw an empty utterance, so forget both
                history.pop()


def main(argv=None):
    """Run the command line: a run folder or a model, then flags. A UserError prints one line, exit code 2."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    argv = sys.argv[1:] if argv is None else argv
    try:
        if not argv or argv[0].startswith("-"):
            raise ppo_dialog.UserError("name a run folder or a model: python chat.py RUN_FOLDER_OR_MODEL")
        args = parse_args(argv[0], argv[1:])
        for error in check.errors(ppo_dialog, args, [check.check_numbers]):
            raise ppo_dialog.UserError(error)
        chat(args)
    except ppo_dialog.UserError as error:
        print(f"chat.py: {error}", file=sys.stderr)
        sys.exit(2)
    except (EOFError, KeyboardInterrupt):  # Ctrl-D, Ctrl-C
        print()


if __name__ == "__main__":
    main()
