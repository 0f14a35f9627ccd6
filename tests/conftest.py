"""What all tests share: the scripts as modules, and tiny models and data that need no network."""

import functools
import gzip
import importlib
import json
import os
import signal
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

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # runs ignore it if they are started by nohup, as tests may be
torch.set_num_threads(1)  # as in the processes that tests start: equal bits need an equal number of threads
transformers.utils.logging.disable_progress_bar()

SCRIPTS = (
    *("sft", "reward_model", "ppo_sentiment", "ppo_dialog"),
    *("rloo_tldr", "grpo_math", "grpo_tools", "dpo_tldr"),
)
PPO = ("ppo_sentiment", "ppo_dialog")
GROUPS = ("rloo_tldr", "grpo_math")  # those with several responses to each prompt
RL = (*PPO, *GROUPS)
EOS, PAD = "<|endoftext|>", "<|pad|>"
ACTS = ("inform", "question", "directive", "commissive")  # DailyDialog's, 1 to 4

ARCHITECTURES = ("gpt2", "gpt_neo", "gpt_neox", "opt", "bloom", "llama", "qwen2")
# With other layers than attention to all tokens: linear attention, convolutions, windows and shared keys.
HYBRIDS = ("qwen3_5_text", "qwen3_next", "lfm2", "gemma4_text")
WIDTH, LAYERS, HEADS, CONTEXT = 32, 2, 4, 256
USUAL_NAMES = dict(
    hidden_size=WIDTH,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    max_position_embeddings=CONTEXT,
)
LINEAR_ATTENTION = dict(
    head_dim=8,
    layer_types=["linear_attention", "full_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)
SIZES = {  # the configs of tiny models, by architecture
    "gpt2": dict(n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=CONTEXT),
    "gpt_neo": dict(
        hidden_size=WIDTH,
        num_layers=LAYERS,
        num_heads=HEADS,
        max_position_embeddings=CONTEXT,
        window_size=8,
        attention_types=[[["global", "local"], 1]],
    ),
    "gpt_neox": dict(**USUAL_NAMES, intermediate_size=64),
    "opt": dict(**USUAL_NAMES, ffn_dim=64, word_embed_proj_dim=WIDTH // 2),
    "bloom": dict(hidden_size=WIDTH, n_layer=LAYERS, n_head=HEADS),
    "llama": dict(**USUAL_NAMES, intermediate_size=64, num_key_value_heads=2),
    "qwen2": dict(**USUAL_NAMES, intermediate_size=64, num_key_value_heads=2),
    "qwen3_5_text": dict(**USUAL_NAMES, **LINEAR_ATTENTION, intermediate_size=64, num_key_value_heads=2),
    "qwen3_next": dict(
        **USUAL_NAMES,
        **LINEAR_ATTENTION,
        intermediate_size=64,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
    "lfm2": dict(**USUAL_NAMES, intermediate_size=64, num_key_value_heads=2, full_attn_idxs=[1]),
    "gemma4_text": dict(
        **(USUAL_NAMES | dict(num_hidden_layers=4)),
        intermediate_size=64,
        num_key_value_heads=2,
        head_dim=8,
        global_head_dim=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=6,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=1024,
    ),
    "distilbert": dict(
        dim=WIDTH, n_layers=LAYERS, n_heads=HEADS, hidden_dim=64, max_position_embeddings=CONTEXT
    ),
}


@pytest.fixture(scope="session")
def scripts():
    """Name -> module of every script."""
    return {name: importlib.import_module(name) for name in SCRIPTS}


# ---- Tokenizers and models ---------------------------------------------------------------------------------


def byte_level_tokenizer(texts=None, size=300):
    """The tokenizer of checkpoints/reviews-lm (1024 tokens), or a new byte-level BPE learned from texts."""
    if texts is None:
        return transformers.AutoTokenizer.from_pretrained(ROOT / "checkpoints/reviews-lm")
    learned = tokenizers.ByteLevelBPETokenizer()
    learned.train_from_iterator(texts, vocab_size=size, special_tokens=[PAD, EOS], show_progress=False)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=learned._tokenizer, bos_token=EOS, eos_token=EOS, pad_token=PAD
    )


def ids_of(tokenizer):
    """The tokenizer's size and special ids, under their names in a config."""
    return dict(
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def random_lm(arch, tokenizer, seed, **changes):
    """A small language model with random weights."""
    config = transformers.AutoConfig.for_model(arch, **SIZES[arch], **ids_of(tokenizer), **changes)
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.fixture(scope="session")
def tiny_lm(tmp_path_factory):
    """tiny_lm(arch="gpt2", pad="own" | "eos") -> folder of a random language model with its tokenizer."""

    @functools.cache
    def make(arch, pad):
        tokenizer = byte_level_tokenizer()
        tokenizer.pad_token = PAD if pad == "own" else EOS
        # Weights far from 0, so that the distributions are not uniform and a wrong position shows.
        model = random_lm(arch, tokenizer, seed=0, initializer_range=0.2, init_std=0.2)
        for p in model.parameters():
            if p.dim() == 1:
                p.data += 0.1 * torch.randn_like(p)  # biases and norms that are not 0 and 1
        return save(model, tokenizer, tmp_path_factory.mktemp(f"{arch}-{pad}"))

    return lambda arch="gpt2", pad="own": make(arch, pad)


@pytest.fixture(scope="session")
def language_model(tiny_lm):
    """language_model(arch, pad="own") -> the folder's model, loaded by transformers, in evaluation mode."""
    return lambda *kind: transformers.AutoModelForCausalLM.from_pretrained(tiny_lm(*kind)).eval()


def save(model, tokenizer, folder):
    """-> the folder, as str"""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def metaspace_lm(tmp_path_factory):
    """Folder of a random GPT-2. Its tokenizer drops the first space when it decodes, as Llama's does."""
    learned = tokenizers.Tokenizer(tokenizers.models.BPE())
    learned.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    learned.decoder = tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=[PAD, EOS], show_progress=False)
    learned.train_from_iterator([row["text"] for row in reviews("test", 100)], trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=learned,
        clean_up_tokenization_spaces=False,
        bos_token=EOS,
        eos_token=EOS,
        pad_token=PAD,
    )
    return save(random_lm("gpt2", tokenizer, seed=4), tokenizer, tmp_path_factory.mktemp("metaspace"))


@pytest.fixture(scope="session")
def bang_lm(tmp_path_factory):
    """bang_lm(bos=False) -> folder of a random GPT-2. About one token in six is EOS.

    As in GPT-2 itself, token 0 is "!", EOS is one of the last tokens, and there is no pad token.
    Another token is ">!", with which an end mark can merge. bos: the tokenizer puts <s> before each text.
    """

    @functools.cache
    def make(bos):
        learned = tokenizers.ByteLevelBPETokenizer()
        texts = [row["text"] for row in reviews("test", 40)] + ["Fine <EOU>!"] * 40
        learned.train_from_iterator(texts, vocab_size=400, show_progress=False)
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=learned._tokenizer, bos_token="<s>", eos_token=EOS
        )
        if bos:
            tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
                single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
            )
        model = random_lm("gpt2", tokenizer, seed=6, initializer_range=0.2)
        model.transformer.ln_f.bias.data += 2 * model.lm_head.weight[tokenizer.eos_token_id].detach()
        return save(model, tokenizer, tmp_path_factory.mktemp("bang"))

    return lambda bos=False: make(bos)


@pytest.fixture(scope="session")
def tiny_classifier(tmp_path_factory):
    """tiny_classifier(tokenizer="own" | "other", labels=(...)) -> folder of a random DistilBERT.

    Its tokenizer is the language models', or another one of 300 tokens with other ids.
    """

    @functools.cache
    def make(tokenizer, labels):
        texts = None if tokenizer == "own" else [row["text"] for row in reviews("test", 100)]
        learned = byte_level_tokenizer(texts)
        config = transformers.AutoConfig.for_model(
            "distilbert",
            **SIZES["distilbert"],
            **ids_of(learned),
            initializer_range=0.2,
            id2label=dict(enumerate(labels)),
            label2id={name: i for i, name in enumerate(labels)},
        )
        torch.manual_seed(1)
        model = transformers.AutoModelForSequenceClassification.from_config(config)
        return save(model, learned, tmp_path_factory.mktemp(f"classifier-{tokenizer}"))

    return lambda tokenizer="own", labels=("negative", "positive"): make(tokenizer, labels)


@pytest.fixture(scope="session")
def tiny_intents(tiny_classifier):
    """tiny_intents(tokenizer="own" | "other") -> folder of a random classifier of dialog acts."""
    return functools.partial(tiny_classifier, labels=ACTS)


@pytest.fixture(scope="session")
def tiny_preference_model(tiny_lm, tmp_path_factory):
    """tiny_preference_model(arch="gpt_neox") -> folder of a random reward model with reward_offset 0.25."""

    @functools.cache
    def make(arch):
        config = transformers.AutoConfig.from_pretrained(tiny_lm(arch), num_labels=1)
        config.reward_offset = 0.25
        torch.manual_seed(2)
        model = transformers.AutoModelForSequenceClassification.from_config(config)
        return save(model, byte_level_tokenizer(), tmp_path_factory.mktemp(f"preferences-{arch}"))

    return lambda arch="gpt_neox": make(arch)


# ---- Data --------------------------------------------------------------------------------------------------


def rows_of_data(name, count):
    """The first rows of a file in data/."""
    path = ROOT / f"data/{name}.jsonl"
    opened = open(path) if path.exists() else gzip.open(f"{path}.gz", "rt")
    with opened as file:
        return [json.loads(line) for line, _ in zip(file, range(count))]


def reviews(split, count):
    """The first rows of data/reviews."""
    return rows_of_data(f"reviews/{split}", count)


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory):
    """small_folder(name) -> a folder with the first 48 training rows and 24 test rows of data/<name>.

    change: a function of a row, whose result is written in its place
    """

    def make(name, change=dict):
        folder = tmp_path_factory.mktemp(name)
        for split, count in (("train", 48), ("test", 24)):
            lines = [json.dumps(change(row)) + "\n" for row in rows_of_data(f"{name}/{split}", count)]
            (folder / f"{split}.jsonl").write_text("".join(lines))
        return str(folder)

    return make


def data_fixture(name):
    """The folder small_folder(name), as a fixture."""
    return pytest.fixture(scope="session")(lambda small_folder: small_folder(name))


tiny_reviews = data_fixture("reviews")  # columns text and label
tiny_posts = data_fixture("tldr")  # prompt and completion
tiny_pairs = data_fixture("tldr-preference")  # prompt, chosen and rejected
tiny_dialogs = data_fixture("dialogs")  # dialog and act


@pytest.fixture(scope="session")
def tiny_tasks(small_folder):
    """Columns prompt (a text, not a chat) and answer."""
    return small_folder("arithmetic", lambda row: row | dict(prompt=row["prompt"][0]["content"]))


@pytest.fixture(scope="session")
def tiny_verifier(tmp_path_factory):
    """FILE.py:letters, a reward of 0, 1 or 2 that a random model gets now and then."""
    path = tmp_path_factory.mktemp("verifier") / "verifier.py"
    path.write_text(
        "def letters(completions, **columns):\n    return [len(set(str(text))) % 3 for text in completions]\n"
    )
    return f"{path}:letters"


@pytest.fixture(scope="session")
def world(request):
    """All that small runs need."""
    fixtures = dict(
        lm="tiny_lm",
        classifier="tiny_classifier",
        preference_model="tiny_preference_model",
        intents="tiny_intents",
        reviews="tiny_reviews",
        posts="tiny_posts",
        pairs="tiny_pairs",
        dialogs="tiny_dialogs",
        tasks="tiny_tasks",
        verifier="tiny_verifier",
    )
    return types.SimpleNamespace(**{name: request.getfixturevalue(x) for name, x in fixtures.items()})
