"""What is different between two scripts, in the math and the steps of the loop: docs/differences.md.

python benchmarks/differences.py > docs/differences.md
"""

import ast
import difflib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAIRS = {  # the two scripts -> what the second one changes
    ("ppo_sentiment", "ppo_dialog"): """
The algorithm is the same, line for line: no formula differs. What differs comes from the task.

1. The prompt is the end of a dialog, and it comes with a reference answer: what the person said next.
2. The score is a weighted sum of parts (intent, METEOR, your functions), and each part is logged.
3. An answer ends at EOS, or where its text has an end mark (`is_end`). Other stop tokens do not end it.
4. Prompts keep their own lengths, so C is the longest prompt of each batch.
5. Your own metrics get all answers of the batch (`custom_metrics`).
""",
    ("ppo_sentiment", "rloo_tldr"): """
1. There is no value function: no GAE, no value loss, no whitening of advantages.
2. Each of P prompts gets k responses (B = P * k rows; those of a prompt are neighbors), and the baseline of a
   response is the mean reward of the others.
3. A whole response is one action: one log-probability (the sum over its tokens), one ratio, one clip, one
   advantage. So the loss is a mean over responses, not over tokens. In the first optimizer step of an update,
   all ratios are 1: its gradient is that of REINFORCE.
4. There is one reward per response: its score minus the coefficient times the KL of the whole response. The
   coefficient is fixed. (With k2 or k3, the KL is a term of the loss instead.)
5. Minibatches consist of whole groups, because the k responses share one pass over their prompt. Prompts come
   from a stream of shuffled passes, and responses have no random limits.
6. A judge compares the summaries of the policy before and after training with references. (--judge-fn also
   scores every batch, only to log it.)
""",
    ("rloo_tldr", "grpo_math"): """
1. The reward is checked by a function, for example whether the answer is right. No reward model, no penalty
   for a missing stop token, no KL in the reward.
2. The advantage is the reward minus the mean of the group, divided by the group's standard deviation.
3. Every token is an action with a ratio and a clip of its own. All tokens of a response share its advantage.
4. The loss is a mean over tokens, not over responses. A KL penalty, if there is one, is k3 in the loss.
5. By default there is one optimizer step per batch. Then the old log-probabilities are the new ones, and
   every ratio is 1.
""",
    ("grpo_math", "grpo_tools"): """
1. A response is a trajectory: the policy writes, tools answer, the policy goes on.
2. A mask `sampled` marks the tokens that the policy wrote. The loss, the KL, the entropy and all means over
   tokens use it instead of `valid`. Attention sees all tokens.
3. A rollout needs tools, the chat template's format of a turn, and environments. New: Trajectory,
   write_trajectories, sample_turns, the section Tools and, in Part II, the threads that run them.
4. A reward function sees the list of messages, and the environment.
5. Turns, calls, failed calls and why trajectories end are logged. Gone: distinct_bigrams and --hard-dataset-name.
""",
    ("reward_model", "dpo_tldr"): """
1. The loss is the same, -log sigmoid(a - b). But the score of a response is beta times the difference of its
   log-probabilities under the policy and the reference: there is no head.
2. The reference's log-probabilities are computed once, before training.
3. A micro-batch has 2n rows: the better and the worse response to each prompt.
4. Samples of the policy are compared before and after training.
""",
}


def part_1(script):
    """The section Math of Part I, and the loop of train up to its log. -> dict: name -> source; str"""
    source = (ROOT / f"{script}.py").read_text()
    math, training = source.split("\n# ---- Math")[1].split("\n# ---- Training")
    loop = training[training.index("\n    for update in ") + 1 :]
    return sources("#" + math), re.split(r"\n        # \d\. Log", loop)[0]


def sources(text):
    """Name of each function -> its source, with its comments."""
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.get_source_segment(text, node) for node in nodes}


def difference(old, new):
    """The lines that differ, with one line around them. old, new: sources"""
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), n=1, lineterm="")
    lines = [line for line in lines if not line.startswith(("---", "+++"))]
    return "\n".join("@@" if line.startswith("@@") else line for line in lines)


def section(old_script, new_script):
    """What differs between two scripts, as markdown."""
    lines = [f"## From {old_script}.py to {new_script}.py", PAIRS[old_script, new_script]]
    (old_math, old_loop), (new_math, new_loop) = part_1(old_script), part_1(new_script)
    gone, added = [name for name in old_math if name not in new_math], {**new_math}
    for name, source in old_math.items():
        if added.get(name) == source:
            del added[name]
    if gone:
        lines.append(f"Functions that are gone: {', '.join(f'`{name}`' for name in gone)}.\n")
    for name, source in added.items():
        before = old_math.get(name, "")
        lines += [f"```diff\n{difference(before, source)}\n```\n"]
    lines += [f"The loop in `train`, until it logs:\n\n```diff\n{difference(old_loop, new_loop)}\n```\n"]
    return "\n".join(lines)


def page():
    """The whole page."""
    lines = [
        "# What differs between the scripts\n",
        "The math of two scripts and the steps of their training loops, compared line by line: - is the first",
        "script, + the second. Functions of one name have the same role in all scripts, and come in the same order within a part.",
        "Most of them, such as `make_learner`, also have the same source. Of the others, such as `rollout`,",
        "`generate` and `load_prompts`, `diff` shows what another task needs.\n",
    ]
    return "\n".join(lines) + "\n" + "\n".join(section(*pair) for pair in PAIRS)


if __name__ == "__main__":
    print(page(), end="")
