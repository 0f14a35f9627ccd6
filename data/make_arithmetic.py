"""Write a small world of sums and differences for GRPO, and its tokenizer.

    data/arithmetic         prompt, answer        numbers of 2 or 3 digits, to train on with rewards
    data/arithmetic-hard    prompt, answer        numbers of 4 digits, only for tests
    data/arithmetic-sft     prompt, completion    solutions, for fine-tuning before GRPO

A prompt is a list with one user message, such as "What is 347 + 85?". An answer is a str, such as "432". A
completion is a list with one assistant message. In about 35 % of the rows this is a worked solution: one line
per digit, from the right, and then the answer. In the others it is the last line of one, the answer alone. So
a fine-tuned model knows the steps, but often does without them.

    347 + 85             347 - 85
    7+5=12 carry 1       7-5=2
    4+8+1=13 carry 1     14-8=6 borrow 1
    3+1=4                3-1=2
    <answer>432</answer> <answer>262</answer>

Every line is a true equation. A carry or a borrow is the last term of the next line. A digit that is too
small gets its 10 before the subtraction: 14-8, not 4-8. If the shorter number has no digit left, its term is
missing: 3+1, or just 3=3. The last line of a sum has no carry, because all its digits belong to the answer:
9+1=10.

In about 10 % of the rows for fine-tuning both numbers have 4 digits, so that a model has seen such tasks. No
task occurs twice in all files together, and a + b is the same task as b + a. Differences are never negative.
All chance comes from random.Random(seed).random(), so every machine writes the same rows.

The tokenizer is byte-level, so it can encode any text. Each digit is a token of its own, and so is each word
of the training texts, together with the spaces around it: "12 carry 1" is 1, 2, " carry ", 1.

    python data/make_arithmetic.py                             # writes to data/ and checkpoints/
    python data/make_arithmetic.py --folder A --tokenizer B    # writes the data below A, the tokenizer to B
"""

import argparse
import gzip
import itertools
import json
import random
from pathlib import Path

import tokenizers
import transformers

ROOT = Path(__file__).resolve().parent.parent
SEED = 23
SPLIT_SIZES = {
    "arithmetic": {"train": 4000, "test": 512},
    "arithmetic-hard": {"test": 512},
    "arithmetic-sft": {"train": 10_000, "test": 500},
}
EASY_LENGTHS = (2, 3)  # digits; each number draws one of them
HARD_LENGTHS = (4,)
HARD_SHARE = 0.1  # of the rows for fine-tuning
DIRECT_SHARE = 0.65  # of the rows for fine-tuning: they give the answer without its steps

PHRASINGS = {
    "+": [
        "What is {a} + {b}?",
        "Compute {a} + {b}.",
        "Add {b} to {a}.",
        "How much is {a} plus {b}?",
        "What is the sum of {a} and {b}?",
    ],
    "-": [
        "What is {a} - {b}?",
        "Compute {a} - {b}.",
        "Subtract {b} from {a}.",
        "How much is {a} minus {b}?",
        "What is the difference between {a} and {b}?",
    ],
}

ROLES = ("system", "user", "assistant")
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
# A text is cut into tags, words with a space on either side, single digits, signs with a space on either
# side, and other white space.
PIECES = r"</?\p{L}+>| ?\p{L}+ ?|\p{N}| ?[^\s\p{L}\p{N}]+ ?|\s+"
CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


# ---- Worked steps ------------------------------------------------------------------------------------------


def columns_of(a: int, b: int) -> list[tuple]:
    """The digits of a and b, from the right: 347 and 85 -> [("7", "5"), ("4", "8"), ("3", None)]."""
    return list(itertools.zip_longest(reversed(str(a)), reversed(str(b))))


def sum_steps(a: int, b: int) -> list[str]:
    """The lines of a + b, one per digit from the right."""
    lines = []
    carry = 0
    columns = columns_of(a, b)
    for column in columns:
        terms = [int(digit) for digit in column if digit is not None]
        if carry:
            terms.append(carry)
        total = sum(terms)
        carry = total // 10
        line = "+".join(str(term) for term in terms) + f"={total}"
        if carry and len(lines) < len(columns) - 1:
            line += f" carry {carry}"
        lines.append(line)
    return lines


def difference_steps(a: int, b: int) -> list[str]:
    """The lines of a - b, one per digit from the right, for a >= b."""
    lines = []
    borrow = 0
    for digit_of_a, digit_of_b in columns_of(a, b):
        top = int(digit_of_a)
        subtracted = [] if digit_of_b is None else [int(digit_of_b)]
        if borrow:
            subtracted.append(borrow)
        borrow = int(sum(subtracted) > top)
        if borrow:
            top += 10
        line = "-".join(str(term) for term in [top, *subtracted]) + f"={top - sum(subtracted)}"
        if borrow:
            line += f" borrow {borrow}"
        lines.append(line)
    return lines


def solve(sign: str, a: int, b: int) -> int:
    """The answer to a task."""
    return a + b if sign == "+" else a - b


def final_answer(sign: str, a: int, b: int) -> str:
    """The last line of a solution."""
    return f"<answer>{solve(sign, a, b)}</answer>"


def worked_solution(sign: str, a: int, b: int) -> str:
    """The steps of a solution, and its last line."""
    lines = sum_steps(a, b) if sign == "+" else difference_steps(a, b)
    return "\n".join([*lines, final_answer(sign, a, b)])


# ---- Rows --------------------------------------------------------------------------------------------------


class Writer:
    """Writes one row after another from a single stream of random numbers, and no task twice."""

    def __init__(self, seed: int) -> None:
        """Start the stream of random numbers."""
        self.rand = random.Random(seed).random
        self.seen: set[tuple] = set()

    def choose(self, options):
        """Return one of the options."""
        return options[int(self.rand() * len(options))]

    def number(self, lengths: tuple) -> int:
        """Draw a length, then a number with that many digits."""
        lowest = 10 ** (self.choose(lengths) - 1)
        return lowest + int(self.rand() * 9 * lowest)

    def task(self, lengths: tuple) -> tuple[str, int, int]:
        """Draw a task that has not occurred yet. -> (sign, a, b)"""
        while True:
            sign = self.choose("+-")
            a, b = self.number(lengths), self.number(lengths)
            ordered = (sign, max(a, b), min(a, b))
            if ordered not in self.seen:
                self.seen.add(ordered)
                return ordered if sign == "-" else (sign, a, b)

    def prompt(self, sign: str, a: int, b: int) -> list[dict]:
        """Ask for the result in one of the phrasings."""
        question = self.choose(PHRASINGS[sign]).format(a=a, b=b)
        return [{"role": "user", "content": question}]

    def answer_row(self, lengths: tuple) -> dict:
        """A row for GRPO: the prompt and the right answer."""
        task = self.task(lengths)
        return {"prompt": self.prompt(*task), "answer": str(solve(*task))}

    def solution_row(self) -> dict:
        """A row for fine-tuning: the prompt and a solution, with or without its steps."""
        lengths = HARD_LENGTHS if self.rand() < HARD_SHARE else EASY_LENGTHS
        task = self.task(lengths)
        prompt = self.prompt(*task)
        if self.rand() < DIRECT_SHARE:
            solution = final_answer(*task)
        else:
            solution = worked_solution(*task)
        return {"prompt": prompt, "completion": [{"role": "assistant", "content": solution}]}


def make(seed: int = SEED) -> dict[str, list[dict]]:
    """Return the rows of each file, by its path below data/."""
    writer = Writer(seed)
    files = {}
    for folder, sizes in SPLIT_SIZES.items():
        for split, size in sizes.items():
            if folder == "arithmetic-sft":
                rows = [writer.solution_row() for _ in range(size)]
            elif folder == "arithmetic-hard":
                rows = [writer.answer_row(HARD_LENGTHS) for _ in range(size)]
            else:
                rows = [writer.answer_row(EASY_LENGTHS) for _ in range(size)]
            packed = ".gz" if size > 5_000 else ""
            files[f"{folder}/{split}.jsonl{packed}"] = rows
    return files


def write(folder: Path, files: dict[str, list[dict]]) -> None:
    """Write each file below the folder, one JSON object per line; gzip packs the largest one."""
    for name, rows in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = "".join(json.dumps(row) + "\n" for row in rows).encode("utf-8")
        path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


# ---- Tokenizer ---------------------------------------------------------------------------------------------


def make_tokenizer(texts: list[str], pieces: str = PIECES) -> transformers.PreTrainedTokenizerFast:
    """A byte-level tokenizer in which each word of the texts is one token, with the ChatML template.

    It is a BPE without merges. With ignore_merges, a piece of text that is in the vocabulary is one token,
    and any other piece is split into its bytes.
    """
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pieces), behavior="isolated")
    to_bytes = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, to_bytes])

    words = set()
    for text in texts:
        words.update(piece for piece, _ in pre_tokenizer.pre_tokenize_str(text))
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())  # 256 characters, one for each byte
    vocabulary = [*SPECIAL_TOKENS, *alphabet, *sorted(words - set(alphabet))]

    ids = {token: i for i, token in enumerate(vocabulary)}
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=ids, merges=[], ignore_merges=True))
    bpe.pre_tokenizer = pre_tokenizer
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def training_texts(files: dict[str, list[dict]]) -> list[str]:
    """The roles and all messages of the training files."""
    texts = list(ROLES)
    for name, rows in files.items():
        if "/train.jsonl" in name:
            for row in rows:
                messages = row["prompt"] + row.get("completion", [])
                texts.extend(message["content"] for message in messages)
    return texts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the arithmetic tasks and their tokenizer.")
    parser.add_argument("--folder", type=Path, default=ROOT / "data")
    parser.add_argument("--tokenizer", type=Path, default=ROOT / "checkpoints/arithmetic-tokenizer")
    flags = parser.parse_args()
    made = make()
    write(flags.folder, made)
    make_tokenizer(training_texts(made)).save_pretrained(flags.tokenizer)
