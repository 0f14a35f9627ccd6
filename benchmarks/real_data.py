"""Write the data folders of a job of real_models.sh, in the columns that the scripts read.

    python benchmarks/real_data.py smollm2-imdb RAW OUT

RAW is a folder of data sets that datasets.load_dataset can read: RAW/imdb with the splits train and test and
the columns text and label, for example from

    hf download stanfordnlp/imdb --repo-type dataset --local-dir RAW/imdb

smollm2-imdb writes
    OUT/imdb          train: IMDB's training half, for the language model, the reward and the prompts of PPO
    OUT/imdb-judge    train: most of IMDB's test half, for the judge
Both have the same split test: the other 5,000 reviews of the test half. Nothing is trained on them.

qwen-gsm8k copies the splits train and test of RAW/gsm8k, openai/gsm8k with its configuration main, to OUT/gsm8k.

smollm2-word-problems reads RAW/word_problems with the columns question, equation (56 * 9) and answer (504):
train from MAWPS and ASDiv-A, test from SVAMP. They are data/mawps-asdiv-a_svamp of arkilpatel/SVAMP on GitHub,
after the numbers have been put back into the texts. It writes
    OUT/word-problems-sft    train: half of the training problems with their solutions, for fine-tuning
    OUT/word-problems        train: the other half with their answers and equations, for GRPO
Both have SVAMP as their split test. Nothing is trained on it.

smollm2-hh reads RAW/hh_rlhf with the columns chosen and rejected of Anthropic/hh-rlhf, and writes OUT/hh with the
columns prompt, completion (the chosen answer), chosen and rejected as chats. Its split test are the pairs of 250
prompts. Nothing is trained on them.
"""

import json
import random
import re
import sys
from pathlib import Path

import datasets


def write(rows, path):
    """Write a list of dict as jsonl. The file appears only when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    with open(unfinished, "w") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
    unfinished.rename(path)


def shuffled(rows):
    """The same order every time."""
    rows = list(rows)
    random.Random(0).shuffle(rows)
    return rows


def write_imdb(raw, out):
    splits = datasets.load_dataset(str(raw / "imdb"))
    columns = ["text", "label"]
    train = shuffled(splits["train"].select_columns(columns))
    train_texts = {row["text"] for row in train}
    test = shuffled(splits["test"].select_columns(columns))
    test = [row for row in test if row["text"] not in train_texts]  # IMDB has 123 reviews in both halves
    held_out, judge = test[:5_000], test[5_000:25_000]
    write(train, out / "imdb/train.jsonl")
    write(held_out, out / "imdb/test.jsonl")
    write(judge, out / "imdb-judge/train.jsonl")
    write(held_out, out / "imdb-judge/test.jsonl")


def write_gsm8k(raw, out):
    for split, rows in datasets.load_dataset(str(raw / "gsm8k")).items():
        write(rows, out / f"gsm8k/{split}.jsonl")


def chat(row):
    """A word problem as a chat, with its solution and its answer."""
    solution = f"{row['equation']} = {row['answer']}\n<answer>{row['answer']}</answer>"
    return {
        "prompt": [{"role": "user", "content": row["question"]}],
        "completion": [{"role": "assistant", "content": solution}],
        "answer": row["answer"],
        "equation": row["equation"],
    }


def write_word_problems(raw, out):
    splits = datasets.load_dataset(str(raw / "word_problems"))
    by_question = {row["question"]: chat(row) for row in splits["train"]}  # each problem once
    train = shuffled(by_question.values())
    half = len(train) // 2
    test = [chat(row) for row in splits["test"]]
    for folder, rows, columns in (
        ("word-problems-sft", train[:half], ["prompt", "completion"]),
        ("word-problems", train[half:], ["prompt", "answer", "equation"]),  # real_results.py: the equation
    ):
        write([{name: row[name] for name in columns} for row in rows], out / folder / "train.jsonl")
        write([{name: row[name] for name in columns} for row in test], out / folder / "test.jsonl")


def messages(transcript):
    """A dialog of hh-rlhf as a chat."""
    turns = re.split(r"\n\n(Human|Assistant): ?", transcript)[1:]
    roles = {"Human": "user", "Assistant": "assistant"}
    return [
        {"role": roles[speaker], "content": text.strip()} for speaker, text in zip(turns[::2], turns[1::2])
    ]


def write_hh(raw, out):
    pairs_of = {}  # prompt -> its pairs
    for split in datasets.load_dataset(str(raw / "hh_rlhf")).values():
        for row in split:
            chosen, rejected = messages(row["chosen"]), messages(row["rejected"])
            prompt = chosen[:-1]
            texts = [chat[-1]["content"] for chat in (chosen, rejected)]
            # Some dialogs differ in more than their last turn, or are empty there.
            if rejected[:-1] == prompt and chosen[-1]["role"] == "assistant" and all(texts):
                pair = {
                    "prompt": prompt,
                    "completion": chosen[-1:],
                    "chosen": chosen[-1:],
                    "rejected": rejected[-1:],
                }
                pairs_of.setdefault(json.dumps(prompt), []).append(pair)
    groups = shuffled(pairs_of.values())
    write([pair for group in groups[:250] for pair in group], out / "hh/test.jsonl")
    write([pair for group in groups[250:] for pair in group], out / "hh/train.jsonl")


WRITERS = {
    "qwen-gsm8k": write_gsm8k,
    "smollm2-imdb": write_imdb,
    "smollm2-word-problems": write_word_problems,
    "smollm2-hh": write_hh,
}

if __name__ == "__main__":
    job, raw, out = sys.argv[1:]
    WRITERS[job](Path(raw), Path(out))
