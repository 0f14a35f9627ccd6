"""Search: a tool for grpo_tools.py over a small corpus, its tasks and reward, and chats for a cold start.

    python examples/search_tool.py FOLDER

writes FOLDER/train.jsonl and test.jsonl (questions) and sft/ (chats of someone who often guesses, or searches
for the wrong town). docs/grpo_tools.md goes on from there.
"""

import json
import random
import re
import sys
from pathlib import Path

from transformers.utils import get_json_schema

QUESTIONS = {"people": "How many people live in town {town}?", "height": "How high is town {town}?"}


def write_notes():
    """The corpus: 200 invented towns, which have numbers. -> dict: town -> dict: field -> number"""
    generator = random.Random(0)
    towns = generator.sample(range(100, 1000), 200)
    return {town: {field: generator.randint(1000, 9999) for field in QUESTIONS} for town in towns}


NOTES = write_notes()
TEXTS = [f"town {town}: people {note['people']}, height {note['height']}" for town, note in NOTES.items()]


def search(number: int) -> str:
    """Find notes in which a number occurs.

    Args:
        number: what the note should contain
    """
    if number < 0:
        raise ValueError("no note has a negative number")  # the policy reads "error: ValueError: no note ..."
    found = [text for text in TEXTS if str(number) in re.findall(r"\d+", text)]
    return "\n".join(found) or "nothing found"


def right(prompts, completions, answer, **columns):
    """The reward: 1 if the last message of a trajectory has the right answer."""
    texts = [messages[-1]["content"] for messages in completions]
    return [float(text == f"<answer>{x}</answer>") for text, x in zip(texts, answer)]


def task(town, field):
    question = QUESTIONS[field].format(town=town)
    return {"prompt": [{"role": "user", "content": question}], "answer": str(NOTES[town][field])}


def chat(generator, towns):
    """Half of the chats guess, a quarter search for a wrong town, a quarter are right. -> a row for sft.py"""
    town, field = generator.choice(towns), generator.choice(list(QUESTIONS))
    row, kind = task(town, field), generator.choice(["guess", "guess", "wrong town", "right"])
    answer = row["answer"] if kind == "right" else str(generator.randint(1000, 9999))
    messages = row["prompt"]
    if kind != "guess":
        number = town if kind == "right" else generator.randint(100, 999)
        call = {"type": "function", "function": {"name": "search", "arguments": {"number": number}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "content": search(number)})
    messages.append({"role": "assistant", "content": f"<answer>{answer}</answer>"})
    return {"messages": messages, "tools": [get_json_schema(search)]}


def write(folder):
    generator = random.Random(1)
    towns = generator.sample(list(NOTES), len(NOTES))
    train, test = towns[:150], towns[150:]  # so that the held-out answers were never seen
    files = {
        "train": [task(town, field) for town in train for field in QUESTIONS],
        "test": [task(town, field) for town in test for field in QUESTIONS],
        "sft/train": [chat(generator, train) for _ in range(1000)],
        "sft/test": [chat(generator, train) for _ in range(50)],
    }
    for name, rows in files.items():
        path = Path(folder, f"{name}.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    write(sys.argv[1])
