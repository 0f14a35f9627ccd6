"""Write two small worlds for grpo_tools.py, in which a model needs a tool, and their tokenizer.

    data/calculator     prompt, answer    products and sums that a small model cannot do in its head
    data/guess          prompt, secret    guess a number from 1 to 31, with "higher" or "lower" as the only hints
    data/tools-sft      messages          conversations about both, for fine-tuning before RL

A prompt is a list with one user message, such as "Multiply 347 by 86, then add 59.". An answer is a str. A
tool call is written in the format of Qwen2.5 and Hermes:

    <tool_call>
    {"name": "calculator", "arguments": {"expression": "347 * 86 + 59"}}
    </tool_call>

The fine-tuned model should know this format, and should use it rarely and often wrongly, so that RL has
something to teach. Of the conversations about a calculation, half answer at once, with a wrong number. A quarter
call the calculator rightly and answer with its result. The last quarter makes a mistake: a wrong number or sign,
a misspelled name, or broken JSON; the answer after it is the tool's result, if there is one, or a wrong number.
In those about guessing, each guess is random: half of the conversations keep to the numbers that are still
possible, and half do not. A third of all give up after a few guesses.

The tokenizer is that of data/make_arithmetic.py: each digit is a token, and so is each word of the texts.

    python data/make_tool_tasks.py                             # writes to data/ and checkpoints/
    python data/make_tool_tasks.py --folder A --tokenizer B    # writes the data below A, the tokenizer to B
"""

import argparse
import json
import random
from pathlib import Path

import make_arithmetic

ROOT = Path(__file__).resolve().parent.parent
SEED = 41
# A comment in the chat template. It writes no tools into a prompt: the conversations teach them. check.py reads it.
KNOWN_TOOLS = "{#- The model knows its tools from fine-tuning: calculator, guess. -#}\n"
SIZES = {"calculator": {"train": 4000, "test": 512}, "tools-sft": {"train": 10_000, "test": 500}}
LARGEST_SECRET = 31

PHRASINGS = {
    "{a} * {b}": ["What is {a} * {b}?", "Multiply {a} by {b}.", "How much is {a} times {b}?"],
    "{a} * {b} + {c}": [
        "What is {a} * {b} + {c}?",
        "Multiply {a} by {b}, then add {c}.",
        "Add {c} to the product of {a} and {b}.",
    ],
    "{a} * {b} - {c}": [
        "What is {a} * {b} - {c}?",
        "Multiply {a} by {b}, then subtract {c}.",
        "Subtract {c} from the product of {a} and {b}.",
    ],
}
# Two more kinds of pieces than in data/make_arithmetic.py: tags such as <tool_call>, and keys of JSON.
PIECES = r"</?[\p{L}_]+>|\{?\"\p{L}+\": |" + make_arithmetic.PIECES
GUESS_PROMPT = f"Guess my number from 1 to {LARGEST_SECRET}."


def tool_call(name: str, arguments: dict) -> str:
    """A call in the format of Qwen2.5 and Hermes."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def message(role: str, content: str) -> dict:
    """One message of a conversation."""
    return {"role": role, "content": content}


class Writer:
    """Writes one row after another from a single stream of random numbers, and no calculation twice."""

    def __init__(self, seed: int) -> None:
        """Start the stream of random numbers."""
        self.random = random.Random(seed)
        self.seen: set[tuple] = set()

    def calculation(self) -> tuple[str, str, int]:
        """A task that has not occurred yet. -> prompt, expression, result"""
        while True:
            expression = self.random.choice(list(PHRASINGS))
            a, b, c = self.random.randint(12, 999), self.random.randint(12, 99), self.random.randint(12, 999)
            if (expression, a, b, c) not in self.seen:
                self.seen.add((expression, a, b, c))
                prompt = self.random.choice(PHRASINGS[expression]).format(a=a, b=b, c=c)
                sign = {"{a} * {b} + {c}": 1, "{a} * {b} - {c}": -1}.get(expression, 0)
                return prompt, expression.format(a=a, b=b, c=c), a * b + sign * c

    def wrong_number(self, result: int) -> int:
        """A number with about as many digits as the result."""
        return self.random.randint(max(10, result // 3), 2 * abs(result) + 50)

    def task_row(self) -> dict:
        """A row for RL: the prompt and the right answer."""
        prompt, _, result = self.calculation()
        return {"prompt": [message("user", prompt)], "answer": str(result)}

    def mistaken_call(self, expression: str, result: int) -> tuple[str, str, int]:
        """A call with a mistake. -> the call, the tool's result, the number that is answered"""
        kind = self.random.choice(["number", "sign", "name", "json"])
        if kind == "name":
            call = tool_call(self.random.choice(["calculate", "compute"]), {"expression": expression})
            return call, "error: there is no such tool", self.wrong_number(result)
        if kind == "json":
            call = tool_call("calculator", {"expression": expression}).replace('"}}', '"}')
            return call, "error: the call is not valid JSON", self.wrong_number(result)
        first, *rest = expression.split()
        if kind == "number":
            wrong = " ".join([str(self.random.randint(12, 999)), *rest])
        else:
            wrong = " ".join([first, self.random.choice("+-"), *rest[1:]])
        value = eval(wrong)  # numbers and signs that this program wrote
        return tool_call("calculator", {"expression": wrong}), str(value), value

    def calculation_messages(self) -> list[dict]:
        """A conversation about a calculation."""
        prompt, expression, result = self.calculation()
        kind = self.random.random()
        if kind < 0.5:
            answer = f"<answer>{self.wrong_number(result)}</answer>"
            return [message("user", prompt), message("assistant", answer)]
        if kind < 0.75:
            call, value, number = tool_call("calculator", {"expression": expression}), str(result), result
        else:
            call, value, number = self.mistaken_call(expression, result)
        return [
            message("user", prompt),
            message("assistant", call),
            message("tool", value),
            message("assistant", f"<answer>{number}</answer>"),
        ]

    def guess_messages(self) -> list[dict]:
        """A conversation in which a number is guessed at random."""
        secret, low, high = self.random.randint(1, LARGEST_SECRET), 1, LARGEST_SECRET
        keeps_to_bounds = self.random.random() < 0.5
        last_guess = self.random.randint(1, 4) if self.random.random() < 1 / 3 else 8
        messages = [message("user", GUESS_PROMPT)]
        for _ in range(last_guess):
            bounds = (low, high) if keeps_to_bounds else (1, LARGEST_SECRET)
            number = self.random.randint(*bounds)
            messages.append(message("assistant", tool_call("guess", {"number": number})))
            if number == secret:
                messages.append(message("tool", "right"))
                messages.append(message("assistant", f"The number is {number}."))
                return messages
            messages.append(message("tool", "higher" if number < secret else "lower"))
            low = max(low, number + 1) if number < secret else low
            high = min(high, number - 1) if number > secret else high
        return [*messages, message("assistant", "I give up.")]


def make(seed: int = SEED) -> dict[str, list[dict]]:
    """Return the rows of each file, by its path below data/."""
    writer = Writer(seed)
    files = {}
    for split, size in SIZES["calculator"].items():
        files[f"calculator/{split}.jsonl"] = [writer.task_row() for _ in range(size)]
    secrets = [{"prompt": [message("user", GUESS_PROMPT)], "secret": x} for x in range(1, LARGEST_SECRET + 1)]
    files["guess/train.jsonl"] = files["guess/test.jsonl"] = secrets
    for split, size in SIZES["tools-sft"].items():
        rows = []
        for _ in range(size):
            is_guess = writer.random.random() < 1 / 3
            messages = writer.guess_messages() if is_guess else writer.calculation_messages()
            rows.append({"messages": messages})
        files[f"tools-sft/{split}.jsonl"] = rows
    return files


def training_texts(files: dict[str, list[dict]]) -> list[str]:
    """The roles and all messages of the training files."""
    texts = ["user", "assistant", "tool", "system"]
    for name, rows in files.items():
        if name.endswith("/train.jsonl"):
            for row in rows:
                texts.extend(x["content"] for x in row.get("messages", row.get("prompt")))
    return texts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the tasks for tools and their tokenizer.")
    parser.add_argument("--folder", type=Path, default=ROOT / "data")
    parser.add_argument("--tokenizer", type=Path, default=ROOT / "checkpoints/tools-tokenizer")
    flags = parser.parse_args()
    made = make()
    make_arithmetic.write(flags.folder, made)
    tokenizer = make_arithmetic.make_tokenizer(training_texts(made), PIECES)
    tokenizer.chat_template = KNOWN_TOOLS + tokenizer.chat_template
    tokenizer.save_pretrained(flags.tokenizer)
