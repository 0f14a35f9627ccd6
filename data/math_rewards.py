"""Rewards for mathematics that a program can check, for grpo_math.py and for TRL's GRPOTrainer.

    correct        the final answer is the one in the column `answer` (data/arithmetic, gsm8k)
    well_formed    the completion ends with one number in <answer> tags, whatever that number is
    shows_work     the completion has several lines with an equals sign, right or wrong
    countdown      the equation uses each of `nums` once and makes `target` (Jiayi-Pan/Countdown-Tasks-3to4)

All have TRL's signature: the completions, and the columns of the data set as keyword arguments with one
entry per completion. They return one float per completion, from 0.0 to 1.0. A completion is a str, or a list
of messages, of which the last one counts.

Completions are untrusted text: they are never passed to eval(), none takes long, and none raises an
exception. A column that is not as long as the list of completions raises ValueError.

well_formed and shows_work can be hacked: "<answer>7</answer>" always earns the first. Use them together with
correct, and with a small weight.
"""

import ast
import re
from fractions import Fraction

OPENING, CLOSING = "<answer>", "</answer>"
MOST_CHARACTERS = 200  # of a number or an equation; longer texts are neither


# ---- Completions -------------------------------------------------------------------------------------------


def text_of(completion):
    """The text of a completion: itself, or the content of its last message. -> str"""
    if isinstance(completion, str):
        return completion
    if not completion:
        return ""
    return completion[-1].get("content") or ""


def tagged_answer(text):
    """What is in the last <answer>...</answer>, or None. -> str or None

    A regular expression with .*? would take quadratic time for a text that only repeats <answer>.
    """
    before, _, _ = text.rpartition(CLOSING)  # "" if there is no closing tag
    _, opening, inside = before.rpartition(OPENING)
    if not opening:
        return None
    return inside.partition(CLOSING)[0]


def boxed_answer(text):
    r"""What is in the last \boxed{...}, nested braces included, or None. -> str or None

    The last box is the one that begins last, so of two nested boxes it is the inner one. A box that is never
    closed does not count.
    """
    starts = []  # of the contents of all braces that are open
    last_start, last_end = -1, -1
    for brace in re.finditer(r"[{}]", text):
        if brace.group() == "{":
            starts.append(brace.end())
        elif starts:
            start = starts.pop()
            if start > last_start and text.endswith(r"\boxed{", 0, start):
                last_start, last_end = start, brace.start()
    if last_start == -1:
        return None
    return text[last_start:last_end]


def final_answer(text):
    r"""The final answer of a text, or None if it has none. -> str or None

    It is in the last <answer>...</answer>, or else in the last \boxed{...}, or else after the last ####.
    """
    answer = tagged_answer(text)
    if answer is None:
        answer = boxed_answer(text)
    if answer is None and "####" in text:
        answer = after_hashes(text)
    return answer


def after_hashes(text):
    """The line after the last ####. -> str"""
    _, _, rest = text.rpartition("####")
    line, _, _ = rest.strip().partition("\n")
    return line


# ---- Numbers -----------------------------------------------------------------------------------------------


def plain(text):
    r"""The text without $ and % (in LaTeX \$ and \%), a final period and the spaces around it. -> str"""
    text = re.sub(r"\\?[$%]", "", text)
    return text.strip().removesuffix(".").strip()


def as_number(text):
    """The exact value of "72", "-0.5", "1,234" or "3/4"; None for other texts. -> Fraction or None"""
    text = plain(text)
    if len(text) > MOST_CHARACTERS:
        return None
    text = re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", text)  # thousands commas
    if not re.fullmatch(r"[+-]?([0-9]+|[0-9]*\.[0-9]+|[0-9]+/[0-9]+)", text):
        return None
    try:
        return Fraction(text)
    except ZeroDivisionError:
        return None


def same_answer(answer, reference):
    """True if both are the same number, or else the same text. -> bool"""
    number, reference_number = as_number(answer), as_number(reference)
    if number is not None and reference_number is not None:
        return number == reference_number
    return plain(answer) == plain(reference) != ""


# ---- Rewards -----------------------------------------------------------------------------------------------


def correct(completions, answer, **columns):
    """1.0 if the final answer is right, else 0.0. -> list of float

    answer[i] is an answer ("72") or a solution of gsm8k ("... #### 72"), of which only what follows ####
    counts. Numbers are compared as numbers, so "72.0", "$72" and "72." equal "72". Other answers are
    compared as texts.
    """
    rewards = []
    for completion, reference in zip(completions, answer, strict=True):
        final = final_answer(text_of(completion))
        reference = str(reference)
        if "####" in reference:
            reference = after_hashes(reference)
        right = final is not None and same_answer(final, reference)
        rewards.append(float(right))
    return rewards


def well_formed(completions, **columns):
    """1.0 if the completion ends with its only <answer>, and it holds a number, else 0.0. -> list of float

    The number may be wrong. White space may follow.
    """
    rewards = []
    for completion in completions:
        text = text_of(completion).rstrip()
        answer = tagged_answer(text)
        only_one = text.count(OPENING) == 1 and text.count(CLOSING) == 1
        has_number = answer is not None and as_number(answer) is not None
        rewards.append(float(only_one and has_number and text.endswith(CLOSING)))
    return rewards


def shows_work(completions, **columns):
    """0.25 for each different line that has an equals sign, at most 1.0. -> list of float

    A reward that can be hacked: it pays for the look of a worked solution, and no line needs to be right.
    docs/grpo_math.md shows what a policy makes of it.
    """
    rewards = []
    for completion in completions:
        lines = {line for line in text_of(completion).splitlines() if "=" in line}
        rewards.append(min(0.25 * len(lines), 1.0))
    return rewards


def countdown(completions, target, nums, **columns):
    """1.0 if the last <answer> makes target[i] of nums[i], each used exactly once, else 0.0. -> list of float

    An answer is an expression such as (1 + 2) * 3: whole numbers, + - * / and parentheses. Division is exact.
    """
    rewards = []
    for completion, wanted, numbers in zip(completions, target, nums, strict=True):
        equation = tagged_answer(text_of(completion)) or ""
        rewards.append(float(solves_countdown(equation, wanted, numbers)))
    return rewards


def solves_countdown(equation, target, nums):
    """True if the equation uses each of nums exactly once and makes the target. -> bool"""
    equation = " ".join(equation.split())  # ast.parse takes a space at the start for an indentation
    if len(equation) > MOST_CHARACTERS or not re.fullmatch(r"[0-9+\-*/() ]+", equation):
        return False
    try:
        tree = ast.parse(equation, mode="eval")
        used = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        return sorted(used) == sorted(nums) and value_of(tree.body) == target
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return False  # the last two: nested too deeply for ast.parse or value_of


def value_of(node):
    """The value of a parsed expression. -> Fraction

    Raises ValueError for anything but whole numbers and + - * /, and ZeroDivisionError.
    """
    if isinstance(node, ast.Constant):
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -value_of(node.operand)
    if not isinstance(node, ast.BinOp):
        raise ValueError("not an expression of numbers")
    left, right = value_of(node.left), value_of(node.right)
    if isinstance(node.op, ast.Add):
        return left + right
    if isinstance(node.op, ast.Sub):
        return left - right
    if isinstance(node.op, ast.Mult):
        return left * right
    if isinstance(node.op, ast.Div):
        return left / right
    raise ValueError("not one of + - * /")
