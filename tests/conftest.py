"""What all tests share: the scripts as modules, and tiny models and data that are made on the spot, without network."""

import functools
import gzip
import importlib
import json
import os
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}

import pytest  # noqa: E402
import tokenizers  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

torch.set_num_threads(1)  # as in the processes that tests start: the same bits need the same number of threads
transformers.utils.logging.disable_progress_bar()

SCRIPTS = [name for name in ("sft", "reward_model", "ppo_sentiment", "ppo_dialog", "rloo_tldr") if (ROOT / f"{name}.py").exists()]
ARCHITECTURES = ("gpt2", "gpt_neo", "gpt_neox", "opt", "bloom", "llama", "qwen2")
PPO, RL = ("ppo_sentiment", "ppo_dialog"), ("ppo_sentiment", "ppo_dialog", "rloo_tldr")
KERNELS = {  # kernel -> the scripts that must ship it
    "response_lengths": RL,
    "length_mask": RL,
    "token_logprobs": RL,
    "kl_per_token": RL,
    "token_rewards": PPO,
    "masked_mean": RL,
    "masked_whiten": PPO,
    "gae": PPO,
    "rloo_advantages": ("rloo_tldr",),
    "clipped_policy_loss": RL,
    "clipped_value_loss": PPO,
    "adaptive_kl_coef": PPO,
    "sample_tokens": RL,
    "stop_sequence_table": ("ppo_dialog",),
    "stop_sequence_seen": ("ppo_dialog",),
    "next_token_losses": ("sft",),
    "preference_loss": ("reward_model",),
    "ranking_loss": ("reward_model",),
}
EOS, PAD = "<|endoftext|>", "<|pad|>"
ACTS = ("inform", "question", "directive", "commissive")  # DailyDialog's, 1 to 4
WIDTH, LAYERS, HEADS, CONTEXT = 32, 2, 4, 256
SIZES = {
    "gpt2": dict(n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=CONTEXT),
    "gpt_neo": dict(hidden_size=WIDTH, num_layers=LAYERS, num_heads=HEADS, max_position_embeddings=CONTEXT, window_size=8,
                    attention_types=[[["global", "local"], 1]]),
    "gpt_neox": dict(intermediate_size=64),
    "opt": dict(ffn_dim=64, word_embed_proj_dim=WIDTH),
    "bloom": dict(hidden_size=WIDTH, n_layer=LAYERS, n_head=HEADS),
    "llama": dict(intermediate_size=64, num_key_value_heads=2),
    "qwen2": dict(intermediate_size=64, num_key_value_heads=2),
}  # fmt: skip
COMMON = dict(hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, max_position_embeddings=CONTEXT)


def byte_level_tokenizer(texts=None, size=300):
    """The tokenizer of checkpoints/reviews-lm (1024 tokens), or a new byte-level BPE of `size` tokens learned from texts."""
    if texts is None:
        return transformers.AutoTokenizer.from_pretrained(ROOT / "checkpoints/reviews-lm")
    learned = tokenizers.ByteLevelBPETokenizer()
    learned.train_from_iterator(texts, vocab_size=size, special_tokens=[PAD, EOS], show_progress=False)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=learned._tokenizer, bos_token=EOS, eos_token=EOS, pad_token=PAD)


def ids_of(tokenizer):
    """The tokenizer's sizes and special ids, as a config names them."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return dict(vocab_size=len(tokenizer)) | {name: getattr(tokenizer, name) for name in names}


def shipping(*kernels):
    """Parametrises a test's argument `k` with every existing script that must ship all these kernels."""
    names = [name for name in SCRIPTS if all(name in KERNELS[kernel] for kernel in kernels)]
    return pytest.mark.parametrize("k", [pytest.param(importlib.import_module(name), id=name) for name in names])


@pytest.fixture(scope="session")
def scripts():
    """Name -> module of every script that exists."""
    return {name: importlib.import_module(name) for name in SCRIPTS}


@pytest.fixture(scope="session")
def tiny_lm(tmp_path_factory):
    """tiny_lm(arch="gpt2", pad="own" | "eos") -> folder of a random causal language model with its tokenizer, made once."""
    made = {}

    def make(arch="gpt2", pad="own"):
        if (arch, pad) not in made:
            tokenizer = byte_level_tokenizer()
            tokenizer.pad_token = PAD if pad == "own" else EOS
            sizes = SIZES[arch] if arch in ("gpt2", "gpt_neo", "bloom") else COMMON | SIZES[arch]
            spread = {"initializer_range": 0.2, "init_std": 0.2}  # far enough from uniform that a wrong position shows
            config = transformers.AutoConfig.for_model(arch, **sizes, **ids_of(tokenizer), **spread)
            torch.manual_seed(0)
            folder = tmp_path_factory.mktemp(f"{arch}-{pad}")
            model = transformers.AutoModelForCausalLM.from_config(config)
            for vector in (p for p in model.parameters() if p.dim() == 1):
                vector.data += 0.1 * torch.randn_like(vector)  # biases and norms that are not 0 and 1
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            made[arch, pad] = str(folder)
        return made[arch, pad]

    return make


@pytest.fixture(scope="session")
def metaspace_lm(tmp_path_factory):
    """A random GPT-2 whose tokenizer marks spaces as Llama's: decoded alone, a response loses its first space. -> folder"""
    learned = tokenizers.Tokenizer(tokenizers.models.BPE())
    learned.pre_tokenizer, learned.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=[PAD, EOS], show_progress=False)
    learned.train_from_iterator([row["text"] for row in reviews("test", 100)], trainer)
    ends = dict(bos_token=EOS, eos_token=EOS, pad_token=PAD)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=learned, clean_up_tokenization_spaces=False, **ends)
    folder = tmp_path_factory.mktemp("metaspace")
    torch.manual_seed(4)
    config = transformers.AutoConfig.for_model("gpt2", **SIZES["gpt2"], **ids_of(tokenizer))
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny_classifier(tmp_path_factory):
    """tiny_classifier(tokenizer="own" | "other", labels=("negative", "positive")) -> folder of a random DistilBERT with these labels.

    Its tokenizer is the language models', or another one of 300 tokens with other ids.
    """
    made = {}

    def make(tokenizer="own", labels=("negative", "positive")):
        if (tokenizer, labels) not in made:
            learned = byte_level_tokenizer(None if tokenizer == "own" else [row["text"] for row in reviews("test", 100)])
            config = transformers.AutoConfig.for_model(
                "distilbert", dim=WIDTH, n_layers=LAYERS, n_heads=HEADS, hidden_dim=64, max_position_embeddings=CONTEXT,
                initializer_range=0.2, id2label=dict(enumerate(labels)), label2id={name: i for i, name in enumerate(labels)},
                **ids_of(learned),
            )  # fmt: skip
            torch.manual_seed(1)
            folder = tmp_path_factory.mktemp(f"classifier-{tokenizer}")
            transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
            learned.save_pretrained(folder)
            made[tokenizer, labels] = str(folder)
        return made[tokenizer, labels]

    return make


@pytest.fixture(scope="session")
def tiny_intents(tiny_classifier):
    """tiny_intents(tokenizer="own" | "other") -> folder of a random classifier of acts."""
    return functools.partial(tiny_classifier, labels=ACTS)


@pytest.fixture(scope="session")
def tiny_preference_model(tiny_lm, tmp_path_factory):
    """tiny_preference_model(arch="gpt_neox") -> folder of a random model with one score, whose config says reward_offset 0.25."""
    made = {}

    def make(arch="gpt_neox"):
        if arch not in made:
            config = transformers.AutoConfig.from_pretrained(tiny_lm(arch), num_labels=1)
            config.reward_offset = 0.25
            torch.manual_seed(2)
            made[arch] = str(tmp_path_factory.mktemp(f"preferences-{arch}"))
            transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(made[arch])
            byte_level_tokenizer().save_pretrained(made[arch])
        return made[arch]

    return make


def rows_of_data(name, count):
    """The first rows of a file of data/."""
    path = ROOT / f"data/{name}.jsonl"
    with open(path) if path.exists() else gzip.open(f"{path}.gz", "rt") as file:
        return [json.loads(line) for line, _ in zip(file, range(count))]


def reviews(split, count):
    """The first rows of data/reviews."""
    return rows_of_data(f"reviews/{split}", count)


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory):
    """small_folder(name) -> a folder with the first 48 rows of data/<name>'s train.jsonl and the first 24 of its test.jsonl."""

    def make(name):
        folder = tmp_path_factory.mktemp(name)
        for split, count in (("train", 48), ("test", 24)):
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of_data(f"{name}/{split}", count)))
        return str(folder)

    return make


@pytest.fixture(scope="session")
def tiny_posts(small_folder):
    """Columns prompt and completion, from data/tldr."""
    return small_folder("tldr")


@pytest.fixture(scope="session")
def tiny_pairs(small_folder):
    """Columns prompt, chosen and rejected, from data/tldr-preference."""
    return small_folder("tldr-preference")


@pytest.fixture(scope="session")
def tiny_dialogs(small_folder):
    """Columns dialog and act, from data/dialogs."""
    return small_folder("dialogs")


@pytest.fixture(scope="session")
def world(tiny_lm, tiny_classifier, tiny_preference_model, tiny_intents, tiny_reviews, tiny_posts, tiny_dialogs):
    """All that small runs need."""
    models = dict(lm=tiny_lm, classifier=tiny_classifier, preference_model=tiny_preference_model, intents=tiny_intents)
    return types.SimpleNamespace(**models, reviews=tiny_reviews, posts=tiny_posts, dialogs=tiny_dialogs)


@pytest.fixture(scope="session")
def tiny_reviews(small_folder):
    """Columns text and label, from data/reviews."""
    return small_folder("reviews")
