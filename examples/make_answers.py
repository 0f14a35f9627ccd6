"""Write a small table of comparisons: questions to a shop, two answers to each, and which one is better.

    python examples/make_answers.py FOLDER    # writes FOLDER/answers.csv, the example of docs/your_data.md

All of it is invented. An answer has five parts, each in a good or a bad wording, at random. The answer with
more good parts wins.
"""

import csv
import random
import sys
from pathlib import Path

ROWS = 1000
NOISE = 0.05  # share of the rows with a winner in which the wrong answer wins: people err, too

QUESTIONS = [
    "Where is my {thing}?",
    "When will the {thing} come?",
    "I ordered a {thing} {when}. Where is it?",
    "My {thing} broke {when}. What now?",
    "Can I return a {thing} bought {when}?",
    "The {thing} that came {when} is not mine.",
    "I paid for a {thing} {when}. Is it here?",
]
THINGS = ["phone", "laptop", "desk", "bed", "bike", "coat", "tent", "sofa", "book", "chair", "lamp", "kettle"]
WHEN = ["today", "yesterday", "on Monday", "on Friday", "last week", "in May"]
PARTS = [  # of an answer, in this order: good wordings, bad wordings
    (["Hello!", "Hi there!", "Good day!"], ["What is it?", "You again!", "So what?"]),
    (["I am sorry.", "We are sorry.", "Sorry for this."], ["Bad luck.", "Such is life.", "Not our fault."]),
    (["I see your {thing} here.", "We have your {thing}."], ["I cannot find it.", "I do not know."]),
    (["We will send a new one.", "We will call you."], ["You have to wait.", "Ask a friend."]),
    (["Thank you for waiting.", "Thank you!"], ["Goodbye.", "That is all."]),
]


def good_parts(prompts, completions, **kwargs):
    """How many of the five good parts each answer has: a function for --judge-fn. -> list of int"""
    counts = []
    for prompt, answer in zip(prompts, completions):
        [thing] = [thing for thing in THINGS if thing in prompt]
        is_good = [
            answer.strip().startswith(("Hello!", "Hi there!", "Good day!")),
            "sorry" in answer.lower(),
            thing in answer,
            "We will" in answer,
            "Thank you" in answer,
        ]
        counts.append(sum(is_good))
    return counts


def make_rows(seed=0):
    """The rows of the table. -> list of dict(question, a, b, winner)"""
    rng = random.Random(seed)
    rows = []
    for _ in range(ROWS):
        names = {"thing": rng.choice(THINGS), "when": rng.choice(WHEN)}
        question = rng.choice(QUESTIONS).format(**names)
        answers = []
        for _ in range(2):
            wordings = [rng.choice(rng.choice(part)) for part in PARTS]
            answers.append(" ".join(wordings).format(**names))
        good_in_a, good_in_b = good_parts([question] * 2, answers)
        is_wrong = rng.random() < NOISE
        winner = "a" if (good_in_a > good_in_b) != is_wrong else "b"
        if good_in_a == good_in_b:
            winner = "tie"
        rows.append({"question": question, "a": answers[0], "b": answers[1], "winner": winner})
    return rows


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    with open(folder / "answers.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["question", "a", "b", "winner"])
        writer.writeheader()
        writer.writerows(make_rows())
    print(f"wrote {folder / 'answers.csv'}: {ROWS} rows")
