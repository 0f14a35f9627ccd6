"""The win rate of a model: how often a judge prefers its summaries to the reference summaries.

This is TRL's judge_tldr.py with the flags, data and judges of rloo_tldr.py. Both rloo_tldr.py and check.py
must lie next to this file. Nothing is trained. The posts and random numbers are those of the evaluation of
rloo_tldr.py, whose final table has the same win rate. A judge is --judge-model (a reward model or a chat
model) or --judge-fn. rloo_tldr.py too finds here how to ask a chat model (`ask_chat_model`).

    python judge.py                                            # the policy of recipe tiny, by its gold score
    python judge.py tiny --model-name-or-path RUN_FOLDER       # the same after training
    python judge.py --model-name-or-path MODEL --judge-model gpt-4o-mini    # OPENAI_API_KEY is set
    python judge.py --model-name-or-path MODEL --judge-model JUDGE --judge-url URL    # a chat model there
"""

import math
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import datasets
import torch
import transformers
from transformers import AutoModelForCausalLM

import check
import rloo_tldr

QUESTION = """Which of two summaries of a forum post is better? A good summary is short, true to the post, \
and keeps what matters most.

{post}

Summary A: {a}

Summary B: {b}

Answer with one letter, A or B, and nothing else."""


def load_chat_judge(args):
    """A chat model on an OpenAI-compatible server. -> a function of posts and responses: ask_chat_model"""
    import openai

    client = openai.OpenAI(base_url=args.judge_url, max_retries=4)  # its key is in OPENAI_API_KEY
    return partial(ask_chat_model, client, args)


def ask_chat_model(client, args, posts, responses):
    """The verdicts of a chat model on an OpenAI-compatible server. -> fp32 [posts]

    Judges often prefer the first summary, or the second, so the order is random. Temperature and token limit
    are left to the server: some models reject any other value, and some think before they answer.
    """
    uniforms = torch.rand(len(posts), generator=rloo_tldr.generator_for(args.seed, "order of the two"))

    def ask(post, response, response_is_a):
        a, b = response.strip(), post["reference"].strip()
        if not response_is_a:
            a, b = b, a
        question = QUESTION.format(post=rloo_tldr.plain_text(post["prompt"]), a=a, b=b)
        messages = [{"role": "user", "content": question}]
        [choice] = client.chat.completions.create(model=args.judge_model, messages=messages).choices
        _, _, answer = (choice.message.content or "").rpartition("</think>")  # without its thoughts
        # A verdict is the letter alone, as in "B", "**B**" or "Answer: B.".
        verdict = re.fullmatch(r"(?:Answer|Summary|\W)*([AB])\W*", answer)
        return math.nan if verdict is None else float((verdict[1] == "A") == response_is_a)

    with ThreadPoolExecutor(8) as pool:
        return torch.tensor(list(pool.map(ask, posts, responses, (uniforms < 0.5).tolist())))


def no_rewards(examples, responses, response_tokens):
    """In place of reward functions, whose rewards would not be used."""
    return {}


def judge_policy(args):
    """Sample a summary of each held-out post, and ask the judge. -> win_rate's dict"""
    if args.resume is not None or args.sft_model_path is not None:  # they name another model
        raise rloo_tldr.UserError("--model-name-or-path is the model: use --sft-model-path None, no --resume")
    if args.judge_model is None and args.judge_fn is None:
        raise rloo_tldr.UserError("name a judge: --judge-model or --judge-fn")
    for error in check.errors(
        rloo_tldr, args, [check.check_numbers, check.check_paths, check.check_completions]
    ):
        raise rloo_tldr.UserError(error)
    if args.bf16:
        args = replace(args, dtype="bfloat16")
    accelerator = rloo_tldr.start_accelerator(args)
    if not accelerator.is_main_process:  # so that a judge on a server is asked only once
        return None
    device, name = accelerator.device, args.model_name_or_path
    tokenizer = rloo_tldr.load_tokenizer(name)
    rloo_tldr.set_template_options(tokenizer, args)
    _, rows = rloo_tldr.load_splits(args.dataset_name)
    posts = rloo_tldr.choose_held_out(rloo_tldr.load_prompts(rows, tokenizer, args), args)
    judge = rloo_tldr.load_judge(args, tokenizer, transformers.TrainerState(), device)
    policy = rloo_tldr.load_model(AutoModelForCausalLM, name, **rloo_tldr.eight_bit(args)).to(device)
    rloo_tldr.check_model(policy, max(len(post["ids"]) for post in posts) + args.response_length)
    stop_ids = rloo_tldr.find_stop_tokens(args, tokenizer, policy).to(device)

    batch = rloo_tldr.draw_batch(posts, 1, replace(args, seed=0), "held-out")  # as in train
    with torch.autocast(device.type, torch.bfloat16, enabled=rloo_tldr.wants_bf16(args, device)):
        _, responses = rloo_tldr.sample_responses(policy, tokenizer, stop_ids, no_rewards, batch, args)
    metrics = rloo_tldr.win_rate(judge(posts, responses))
    print(
        f"Model win rate: {metrics['win rate']:.2%} +- {metrics['+- (95 % interval)']:.2%} "
        f"({metrics['ties']:.1%} ties, {metrics['no verdict']:.1%} without verdict), n = {len(posts)}, "
        f"judge {args.judge_model or args.judge_fn}, sampling, temperature {args.temperature}, "
        f"at most {args.response_length} tokens, model {name}, data {args.dataset_name}"
    )
    return metrics


def main(argv=None):
    """Run the command line: that of rloo_tldr.py. A UserError prints one line, with exit code 2."""
    for library in (transformers, datasets):
        library.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
    try:
        judge_policy(rloo_tldr.parse_args(sys.argv[1:] if argv is None else argv))
    except rloo_tldr.UserError as error:
        print(f"judge.py: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
