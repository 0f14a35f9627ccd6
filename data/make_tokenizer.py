"""Train a byte-level BPE tokenizer (Radford et al. 2019) on the training texts of a data set.

    python data/make_tokenizer.py data/reviews 1024 runs/tokenizer
    python sft.py --from-config "gpt2 n_layer=3 n_head=4 n_embd=128" --model-name-or-path runs/tokenizer

So the tokenizers of checkpoints/reviews-lm, tldr-sft (data/tldr) and dialogs-lm (data/dialogs) were made, with 1,024
tokens each. EOS and a separate pad are two of them.
"""

import argparse
import json
from pathlib import Path

import tokenizers
import transformers


def training_texts(folder):
    """The texts of train.jsonl: text, prompt and completion, the messages of chats, dialogs. -> list of str"""
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    texts = []
    for name in ("text", "prompt", "completion", "messages"):
        for row in rows:
            value = row.get(name) or []
            texts += [value] if isinstance(value, str) else [message["content"] for message in value]
    texts += [" " + " ".join(row["dialog"]) for row in rows if "dialog" in row]
    return texts


def make_tokenizer(texts, size):
    bpe = tokenizers.ByteLevelBPETokenizer()
    special_tokens = ["<|endoftext|>", "<|pad|>"]
    bpe.train_from_iterator(texts, vocab_size=size, special_tokens=special_tokens, show_progress=False)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|pad|>",
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Train a byte-level BPE tokenizer on the texts of a data set."
    )
    parser.add_argument("data", type=Path, help="folder with train.jsonl")
    parser.add_argument("size", type=int, help="number of tokens")
    parser.add_argument("folder", type=Path, help="where to save the tokenizer")
    flags = parser.parse_args()
    make_tokenizer(training_texts(flags.data), flags.size).save_pretrained(flags.folder)
