"""Build the models of compare.py: local and small, with random weights, the same for all contestants.

    trl_old/bin/python build_models.py FOLDER    # install_peers.sh does this

transformers 4.45 writes them if TRL 0.11 is among the contestants, because 4.45 and 5 can both load the result.

- neox14m: the shape of pythia-14m
- gpt2_small: GPT-2 with 124 M parameters
- NAME_rm and NAME_labels, for each of them: a sequence classifier with one label, and one with two, because
  ppo_sentiment.py refuses the first
- prompts_50k, prompts_50k_long: texts of exactly 64 and 448 tokens
- texts, pairs: pieces of Python files with the columns of film reviews and of preferences, for the jobs sft and
  reward-model without a network
"""

import argparse
import copy
import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PreTrainedTokenizerFast,
)

TRAIN_PROMPTS, TEST_PROMPTS = 1024, 64


def corpus(characters=25_000_000):
    """Python files of installed packages whose names begin with t (torch, transformers, ...), shuffled."""
    files = sorted(path for path in Path(torch.__file__).parents[1].glob("t*/**/*.py") if path.is_file())
    random.Random(0).shuffle(files)
    for path in files:
        text = path.read_text(encoding="utf-8", errors="ignore")
        yield text
        characters -= len(text)
        if characters < 0:
            return


def learn_tokenizer(size):
    """A byte-level BPE tokenizer with EOS and a pad of its own."""
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer, learned.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet, eos, pad = pre_tokenizers.ByteLevel.alphabet(), "<|endoftext|>", "[PAD]"
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[eos, pad], initial_alphabet=alphabet, show_progress=False
    )
    learned.train_from_iterator(corpus(), trainer)
    ends = dict(eos_token=eos, bos_token=eos, pad_token=pad)
    return PreTrainedTokenizerFast(tokenizer_object=learned, clean_up_tokenization_spaces=False, **ends)


def write_prompts(tokenizer, folder, length=64):
    """train.jsonl and test.jsonl: texts of exactly `length` ordinary tokens, in the columns prompt and text."""
    generator, texts = torch.Generator().manual_seed(0), []
    while len(texts) < TRAIN_PROMPTS + TEST_PROMPTS:
        ids = torch.randint(300, 4000, (2 * length,), generator=generator).tolist()
        ids = tokenizer(tokenizer.decode(ids)).input_ids[:length]  # tokenized again, some tokens join
        text = tokenizer.decode(ids)
        if tokenizer(text).input_ids == ids and "\ufffd" not in text:
            texts.append(text)
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", texts[:TRAIN_PROMPTS]), ("test", texts[TRAIN_PROMPTS:])):
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(dict(prompt=text, text=text)) + "\n" for text in part)
        )


def save(model, tokenizer, folder):
    """The model, and classifiers of its shape with one label and with two."""
    ends = dict(
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    model.config.update(ends)
    model.generation_config.update(**ends)
    kinds = {"": model}
    for suffix, num_labels in (("_rm", 1), ("_labels", 2)):
        config = copy.deepcopy(model.config)
        config.num_labels = num_labels
        kinds[suffix] = AutoModelForSequenceClassification.from_config(config)
    for suffix, kind in kinds.items():
        path = folder.with_name(folder.name + suffix)
        kind.save_pretrained(path)
        tokenizer.save_pretrained(path)
    print(f"{folder.name}: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")


def write_pieces(folder, count=1024):
    """Texts of 200 to 1,800 characters; and pairs of answers of 40 to 300 to prompts of 800 to 1,400."""
    draw, text = random.Random(1), "\n".join(corpus(4_000_000))

    def piece(shortest, longest):
        start = draw.randrange(len(text) - longest)
        return text[start : start + draw.randint(shortest, longest)]

    texts = [{"text": piece(200, 1_800)} for _ in range(count)]
    pairs = [
        {"prompt": piece(800, 1_400), "chosen": piece(40, 300), "rejected": piece(40, 300)}
        for _ in range(count)
    ]
    for name, rows in (("texts", texts), ("pairs", pairs)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    torch.manual_seed(0)
    tokenizer = learn_tokenizer(50257)
    write_prompts(tokenizer, folder / "prompts_50k")
    write_prompts(tokenizer, folder / "prompts_50k_long", 448)
    write_pieces(folder)
    shape = dict(hidden_size=128, num_hidden_layers=6, num_attention_heads=4, intermediate_size=512)
    neox = GPTNeoXForCausalLM(
        GPTNeoXConfig(vocab_size=50304, max_position_embeddings=2048, rotary_pct=0.25, **shape)
    )
    save(neox, tokenizer, folder / "neox14m")
    save(GPT2LMHeadModel(GPT2Config()), tokenizer, folder / "gpt2_small")


if __name__ == "__main__":
    main()
