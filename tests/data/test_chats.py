"""Chats: lists of messages, written by the chat templates of real models, in all scripts that take them."""

import json
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import tokenizers
import torch
import transformers
from conftest import GROUPS, byte_level_tokenizer, random_lm, save
from run_tools import reward_file, rows_of, spy, write_rows

import check
import judge
import sft as sft_py

pytest_plugins = ["run_fixtures"]
NO_STOP_TOKENS = SimpleNamespace(generation_config=transformers.GenerationConfig())
TEMPLATES = Path(__file__).parent / "templates"

# family -> special tokens: BOS (None: none), EOS, pad, others; and what ends a turn
FAMILIES = {
    "qwen2_5": (None, "<|im_end|>", "<|endoftext|>", ["<|im_start|>"], "<|im_end|>"),
    "qwen3": (None, "<|im_end|>", "<|endoftext|>", ["<|im_start|>"], "<|im_end|>"),
    "llama3": (
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|finetune_right_pad_id|>",
        ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "<|eot_id|>",
    ),
    "gemma": ("<bos>", "<eos>", "<pad>", ["<start_of_turn>", "<end_of_turn>"], "<end_of_turn>"),
}
USER, ASSISTANT = "user", "assistant"
TURNS = [
    (USER, "What is 2 + 3?"),
    (ASSISTANT, "It is 5."),
    (USER, "And 4 + 4?"),
    (ASSISTANT, "That is 8, two times 4."),
]
ADD = {  # the schema of a tool
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "a number"},
                "b": {"type": "integer", "description": "a number"},
            },
            "required": ["a", "b"],
        },
    },
}


WITHOUT_END = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
WITHOUT_END += "{% if add_generation_prompt %}assistant:{% endif %}"


def chat(*turns):
    """A list of messages."""
    return [{"role": role, "content": content} for role, content in turns]


def build_tokenizer(family):
    """A byte-level tokenizer with the special tokens and the chat template of a family of models."""
    bos, eos, pad, others, _ = FAMILIES[family]
    bpe = tokenizers.ByteLevelBPETokenizer()
    special = [token for token in (bos, eos, pad, *others) if token is not None]
    bpe.train_from_iterator([content for _, content in TURNS] * 3, vocab_size=300, special_tokens=special)
    backend = bpe._tokenizer
    if bos is not None:  # like Llama's and Gemma's, it puts BOS in front of every text
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token=pad
    )
    tokenizer.chat_template = (TEMPLATES / f"{family}.jinja").read_text()
    return tokenizer


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


def chat_lm(family, folder, stop_ids):
    """The folder of a tiny model with this chat template and these stop tokens."""
    tokenizer = build_tokenizer(family)
    model = random_lm("llama", tokenizer, seed=0)
    model.generation_config.eos_token_id = stop_ids
    return save(model, tokenizer, folder)


def documents_of(tokenizer, *rows, **flags):
    """What sft.py learns from these rows. -> list of (ids, labels)"""
    documents, _ = sft_py.load_documents(rows, tokenizer, sft_py.Args(**(dict(max_length=256) | flags)))
    return [(list(ids), list(labels)) for ids, labels in documents]


def learned(tokenizer, labels):
    """The texts of the runs of labels that are not -100."""
    runs, current = [], []
    for label in [*labels, -100]:
        if label != -100:
            current.append(label)
        elif current:
            runs.append(tokenizer.decode(current))
            current = []
    return runs


# ---- sft.py ------------------------------------------------------------------------------------------------


def test_what_is_learned_of_a_chat(family):
    """The tokens are the template's, with one BOS. Labels are on the assistant's turns and their ends."""
    tokenizer = build_tokenizer(family)
    bos, _, _, _, end = FAMILIES[family]
    messages = chat(*TURNS)
    [(ids, labels)] = documents_of(tokenizer, {"messages": messages})
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(messages, tokenize=False)
    if bos is not None:
        assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id
    answers = [f"It is 5.{end}", f"That is 8, two times 4.{end}"]
    if family == "qwen3":  # it drops the thoughts of earlier turns, and writes an empty one in the last turn
        answers = [f"<think>\n\n</think>\n\nThat is 8, two times 4.{end}"]
    assert learned(tokenizer, labels) == answers
    assert all(label in (-100, token) for token, label in zip(ids, labels))


def test_thoughts_of_earlier_turns_are_not_learned():
    """Qwen3 drops the thoughts of a turn once a user's message follows, so that turn is not learned."""
    tokenizer = build_tokenizer("qwen3")
    thought = "<think>\nEasy.\n</think>\n\n"
    answers = (ASSISTANT, thought + "It is 5."), (ASSISTANT, thought + "That is 8.")
    messages = chat(TURNS[0], answers[0], TURNS[2], answers[1])
    [(_, labels)] = documents_of(tokenizer, {"messages": messages})
    assert learned(tokenizer, labels) == [thought + "That is 8.<|im_end|>"]


def test_a_chat_in_prompt_and_completion(family):
    """Only the completion is learned, unless the flag says otherwise. The tokens are those of messages."""
    tokenizer = build_tokenizer(family)
    end = FAMILIES[family][4]
    row = {"prompt": chat(*TURNS[:3]), "completion": chat(TURNS[3])}
    [(ids, labels)] = documents_of(tokenizer, row)
    [answer] = learned(tokenizer, labels)
    assert answer.endswith(f"That is 8, two times 4.{end}")
    everything = {"messages": chat(*TURNS)}
    assert documents_of(tokenizer, row, completion_only_loss=False) == documents_of(tokenizer, everything)


def tool_chat(content=None, **call):
    """A chat in which the assistant calls a tool, and answers."""
    function = {"name": "add", "arguments": {"a": 2, "b": 3}} | call
    called = {
        "role": ASSISTANT,
        "content": content,
        "tool_calls": [{"type": "function", "function": function}],
    }
    return [*chat(TURNS[0]), called, *chat(("tool", "5"), TURNS[1])]


@pytest.mark.parametrize("content", [None, ""])
def test_what_is_learned_of_a_chat_with_tools(content):
    """The template shows the tools; calls and answers are learned, results are not."""
    tokenizer = build_tokenizer("qwen2_5")
    messages = tool_chat(content)
    [(ids, labels)] = documents_of(tokenizer, {"messages": messages, "tools": [ADD]}, max_length=2000)
    text = tokenizer.decode(ids)
    assert text == tokenizer.apply_chat_template(messages, tools=[ADD], tokenize=False)
    assert "Add two numbers." in text and "<tool_response>\n5\n</tool_response>" in text
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>'
    assert learned(tokenizer, labels) == [call, "It is 5.<|im_end|>"]


def test_calls_of_a_model_that_drops_thoughts():
    """Qwen3 writes a thought into a last answer only. So a call needs one of its own, or a row of its own."""
    tokenizer = build_tokenizer("qwen3")
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>'
    answer = "<think>\n\n</think>\n\nIt is 5.<|im_end|>"
    messages = tool_chat()
    for row, expected in (
        ({"messages": messages}, [answer]),
        ({"prompt": messages[:1], "completion": messages[1:2]}, ["<think>\n\n</think>\n\n" + call]),
    ):
        [(_, labels)] = documents_of(tokenizer, row | {"tools": [ADD]}, max_length=2000)
        assert learned(tokenizer, labels) == expected
    messages[1]["reasoning_content"] = "Hm."
    [(_, labels)] = documents_of(tokenizer, {"messages": messages, "tools": [ADD]}, max_length=2000)
    assert learned(tokenizer, labels) == ["<think>\nHm.\n</think>\n\n" + call, answer]


def test_tools_of_a_chat_as_a_json_text():
    """So a parquet file must hold them. Empty ones are none."""
    tokenizer = build_tokenizer("qwen2_5")
    with_tools = documents_of(tokenizer, {"messages": tool_chat(), "tools": [ADD]}, max_length=2000)
    assert (
        documents_of(tokenizer, {"messages": tool_chat(), "tools": json.dumps([ADD])}, max_length=2000)
        == with_tools
    )
    row = {"prompt": tool_chat()[:1], "completion": tool_chat()[1:], "tools": [ADD]}
    assert documents_of(tokenizer, row, max_length=2000) == with_tools
    without = documents_of(tokenizer, {"messages": tool_chat()})
    assert without != with_tools
    for empty in (None, "", []):
        assert documents_of(tokenizer, {"messages": tool_chat(), "tools": empty}) == without
    text = {"prompt": "2 + 3?", "completion": " 5", "tools": "none"}  # a column of a text, like any other
    assert documents_of(tokenizer, text) == documents_of(tokenizer, text | {"tools": None})


def test_a_turn_without_a_prompt_is_not_learned():
    """Before any message, or after another turn of the assistant. It is counted."""
    tokenizer = build_tokenizer("llama3")
    started = chat((ASSISTANT, "Hello."), *TURNS, (ASSISTANT, "Sure."))
    documents, left_out = sft_py.load_documents([{"messages": started}], tokenizer, sft_py.Args())
    answers = ["It is 5.<|eot_id|>", "That is 8, two times 4.<|eot_id|>"]
    assert learned(tokenizer, documents[0][1]) == answers
    assert left_out == "2 answers not learned (no rollout could give them: see docs/sft.md)"


def test_a_template_without_an_end_of_turn():
    """Then EOS ends the last turn, so that the model learns to stop."""
    tokenizer = build_tokenizer("qwen2_5")
    tokenizer.chat_template = WITHOUT_END
    [(ids, labels)] = documents_of(tokenizer, {"messages": chat(*TURNS)})
    assert learned(tokenizer, labels) == [" It is 5.", " That is 8, two times 4.<|im_end|>"]
    assert ids[-1] == labels[-1] == tokenizer.eos_token_id
    question = chat((USER, "Hm?"))
    [(ids, _)] = documents_of(tokenizer, {"prompt": question, "completion": chat((ASSISTANT, ""))})
    assert tokenizer.decode(ids) == "user: Hm?\nassistant:<|im_end|>"  # nothing but the end


@pytest.mark.parametrize("template", [None, WITHOUT_END], ids=["own", "without end"])
def test_what_dpo_scores_is_what_is_learned(scripts, family, template):
    """The answer and its end, token by token: no "\n" after it, and EOS if the template writes no end."""
    tokenizer = build_tokenizer(family)
    tokenizer.chat_template = template or tokenizer.chat_template
    prompt, end = chat(*TURNS[:3]), tokenizer.eos_token if template else FAMILIES[family][4]
    rows = [{"prompt": prompt, "completion": chat((ASSISTANT, text))} for text in ("That is 8.", "No")]
    pair = scripts["dpo_tldr"].tokenize_pair(tokenizer, prompt, [row["completion"] for row in rows])
    for response, (ids, labels) in zip(pair["responses"], documents_of(tokenizer, *rows), strict=True):
        learned_ids = [label for label in labels if label != -100]
        assert response[-len(learned_ids) :] == learned_ids and tokenizer.decode(response[-1:]) == end
        assert pair["ids"] + response == ids[: len(pair["ids"] + response)]


def test_a_prompt_that_ends_in_a_space():
    """In the chat, the space is a part of the next token; in a rollout, of the prompt.

    So nothing is learned, and that is counted.
    """
    tokenizer = byte_level_tokenizer()
    row = {"messages": chat((USER, "Well?"), (ASSISTANT, "The film was good."))}
    tokenizer.chat_template = WITHOUT_END
    [(_, labels)] = documents_of(tokenizer, row)
    assert learned(tokenizer, labels) == [" The film was good.<|endoftext|>"]
    tokenizer.chat_template = WITHOUT_END.replace("assistant:", "assistant: ")
    documents, left_out = sft_py.load_documents([row], tokenizer, sft_py.Args())
    assert documents == [] and "1 answers not learned (no rollout could give them" in left_out


@pytest.mark.parametrize("is_special", [False, True])
def test_an_added_token_ends_a_turn_only_if_it_is_special(is_special):
    """After a mere word, such as a tag, EOS follows; after a special token that has no name, nothing does."""
    tokenizer = build_tokenizer("qwen2_5")
    tokenizer.add_tokens([tokenizers.AddedToken("<done>", special=is_special)])
    done, eos = tokenizer.convert_tokens_to_ids("<done>"), tokenizer.eos_token_id
    tokenizer.chat_template = WITHOUT_END
    messages = chat(TURNS[0], (ASSISTANT, "It is 5.<done>"))
    [(ids, labels)] = documents = documents_of(tokenizer, {"messages": messages})
    stops = sft_py.find_end_tokens(NO_STOP_TOKENS, tokenizer, documents, 256)
    if is_special:
        assert learned(tokenizer, labels) == [" It is 5.<done>"] and eos not in ids
        assert tokenizer.decode(ids).endswith("<done>\n") and stops == sorted([done, eos])
    else:
        assert learned(tokenizer, labels) == [" It is 5.<done><|im_end|>"]
        assert ids[-2:] == [done, eos] and stops == [eos]


@pytest.fixture
def faults(scripts, small, tmp_path):
    """faults(name, rows, tokenizer, **flags) -> what check.py finds before a run on these rows

    The columns of the rows are those of load_chats.
    """

    def find(name, rows, tokenizer, **flags):
        folder = tmp_path / f"faults-{len(list(tmp_path.iterdir()))}"
        model = random_lm("bloom", tokenizer, seed=0)  # it reads texts of any length
        lm = save(model, tokenizer, folder / "lm")
        rows = [columns_for(name, row) for row in rows]
        flags |= dict(model_name_or_path=lm, dataset_name=write_rows(folder / "data", train=rows, test=rows))
        if name in (*GROUPS, "grpo_tools"):
            flags |= dict(max_prompt_length=1000, response_length=8)
        if name == "grpo_tools":  # not every template shows it
            flags |= dict(system_prompt="Use calculator(expression).")
        if name == "rloo_tldr":
            flags |= dict(reward_fn=reward_file(tmp_path, "return [1.0] * len(prompts)"))
        if name == "dpo_tldr":
            flags |= dict(eval_dataset_name=None, judge_fn=None)
        return check.errors(scripts[name], small(name, **flags))

    return find


@pytest.mark.parametrize("columns", ["text", "prompt completion"])
def test_a_text_with_bos_of_its_own(faults, columns):
    """Rendered chats often begin with BOS. The tokenizer adds another one, which no rollout has."""
    tokenizer = build_tokenizer("llama3")
    row = dict(zip(columns.split(), ["It is 5.", " Or 6."]))
    [(ids, _)], _ = sft_py.load_documents([row], tokenizer, sft_py.Args())
    assert ids[0] == tokenizer.bos_token_id != ids[1]
    rows = [row | {columns.split()[0]: f"{start}It is 5."} for start in ("", "<|begin_of_text|>")]
    assert faults("sft", rows[:1], tokenizer) == []
    [line] = faults("sft", rows, tokenizer)
    assert line.startswith("train.jsonl row 2 begins with BOS twice")


def test_an_unknown_word_ends_no_turn():
    """<unk> is a special token, but an answer that ends with it needs EOS."""
    tokenizer = build_tokenizer("qwen3")
    tokenizer.unk_token = "8"
    others = sft_py.special_ids(tokenizer)
    assert tokenizer.unk_token_id not in others and tokenizer.eos_token_id in others
    tokenizer.unk_token = tokenizer.eos_token  # as in GPT-2
    assert tokenizer.eos_token_id in sft_py.special_ids(tokenizer)


def test_rows_without_messages():
    """They are counted."""
    tokenizer = build_tokenizer("gemma")
    rows = [{"messages": messages} for messages in (chat(*TURNS), [], None)]
    documents, left_out = sft_py.load_documents(rows, tokenizer, sft_py.Args(max_length=256))
    assert len(documents) == 1 and left_out == "2 examples without anything to learn"


SENTENCEPIECE = {  # template -> what comes before and after the text of an answer
    "zephyr": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + eos_token + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}",
        ("", "</s>"),
    ),
    "llama2": (
        "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}",
        ("▁", "▁</s>"),
    ),
}


@pytest.mark.parametrize("kind", ["normalizer", "pre-tokenizer"])
@pytest.mark.parametrize("template", SENTENCEPIECE)
def test_answers_of_a_sentencepiece_tokenizer(template, kind):
    """It puts a space before each text that it gets, so an answer that is tokenized alone has a wrong start.

    A rollout goes on after the tokens of its prompt. What is learned must be such a continuation.
    """
    pieces = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True))
    pieces.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    special = ["<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    pieces.train_from_iterator(["No way. Yes way! <|user|> <|assistant|> [INST] [/INST] Why?"] * 9, trainer)
    if kind == "normalizer":  # as in Llama 2's tokenizer.json
        steps = [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
        pieces.normalizer = tokenizers.normalizers.Sequence(steps)
        pieces.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([])
    else:
        pieces.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=pieces, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.chat_template, (before, after) = SENTENCEPIECE[template]
    messages = chat((USER, "Why?"), (ASSISTANT, "Yes way!"), (USER, "Way?"), (ASSISTANT, "No way."))
    [(ids, labels)] = documents_of(tokenizer, {"messages": messages})
    expected = [-100] * len(ids)
    for i, answer in ((1, "Yes▁way!"), (3, "No▁way.")):
        prompt = tokenizer.apply_chat_template(messages[:i], tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(prompt, add_special_tokens=False).input_ids
        start = len(prompt)
        end = ids.index(tokenizer.eos_token_id, start) + 1
        assert ids[:start] == prompt
        assert "".join(tokenizer.convert_ids_to_tokens(ids[start:end])) == before + answer + after
        expected[start:end] = ids[start:end]
    assert labels == expected


def test_the_end_of_a_turn_ends_generation(sft, tmp_path):
    """model/ stops there, at EOS, and where the model before did. Samples continue the last turns."""
    chats = []
    for i in range(12):
        first = [(USER, f"What is {i} + 1?" + " Hm." * (i % 3)), (ASSISTANT, f"It is {i + 1}.")]
        chats.append(chat(*first, (USER, "And 0?"), (ASSISTANT, "No" * (i % 4 + 1))))
    rows = [{"messages": messages} for messages in chats]
    data = write_rows(tmp_path / "data", train=rows[:8], test=rows[8:])
    lm = chat_lm("gemma", tmp_path / "lm", stop_ids=[40, 41])  # neither EOS nor the end of a turn
    flags = dict(num_train_rows=None, max_length=200, num_samples=4)
    _, folder, _ = sft(model_name_or_path=lm, dataset_name=data, **flags)
    saved = transformers.GenerationConfig.from_pretrained(folder / "model").eos_token_id
    tokenizer = build_tokenizer("gemma")
    assert saved == sorted([40, 41, *tokenizer.convert_tokens_to_ids(["<eos>", "<end_of_turn>"])])
    write = tokenizer.apply_chat_template
    prompts = [write(messages[:3], tokenize=False, add_generation_prompt=True) for messages in chats[8:]]
    assert sorted(row["prompt"] for row in rows_of(folder, "samples.jsonl")) == sorted(prompts)


def test_what_ends_a_response(family):
    """The last token of what is learned, if it is special: not what follows it, nor where a document was cut.

    The answers before the cut count too: perhaps every document of a data set is too long.
    """
    tokenizer = build_tokenizer(family)
    eos, end = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(FAMILIES[family][4])
    start = tokenizer.convert_tokens_to_ids(FAMILIES[family][3][0])  # a special token that ends nothing
    assert start not in (eos, end)
    learned = ([9, 20, end, 21, start], [-100, 20, end, -100, -100])  # a line break follows, for example
    whole = ([9, 20, end], [-100, 20, end])  # nothing follows, as with Llama 3
    cut = ([9, 20, 20, 20, 20, start], [-100, 20, 20, 20, 20, start])
    cut_later = ([9, 20, end, 21, 20, start], [-100, 20, end, -100, 20, start])
    assert sft_py.find_end_tokens(NO_STOP_TOKENS, tokenizer, [cut], 6) == [eos]
    for documents in ([learned, cut], [whole, cut], [cut_later], [cut_later, cut]):
        found = sft_py.find_end_tokens(NO_STOP_TOKENS, tokenizer, documents, 6)
        assert found == sorted({eos, end})


@pytest.mark.parametrize("name", [*GROUPS, "grpo_tools"])
def test_a_message_that_the_assistant_has_begun(scripts, family, name):
    """A prompt that ends with it is continued: no end of the turn, and no header of a new one."""
    tokenizer = build_tokenizer(family)
    rows = [{"prompt": chat(TURNS[0]), "completion": chat(TURNS[1])}]
    rows.append(rows[0] | {"prompt": chat(TURNS[0], (ASSISTANT, "It is"))})
    prompts = load_prompts(scripts[name], rows, tokenizer)
    plain, begun = [tokenizer.decode(prompt["ids"]) for prompt in prompts]
    if family == "qwen3":  # its template writes an empty thought before the last answer
        plain += "<think>\n\n</think>\n\n"
    assert begun == plain + "It is"


# ---- Nothing of a chat is ignored --------------------------------------------------------------------------


def load_chats(scripts, name, row, tokenizer):
    """What a script makes of a row with the columns prompt, chosen and rejected."""
    script, row = scripts[name], columns_for(name, row)
    if name in (*GROUPS, "grpo_tools"):
        return [task["ids"] for task in load_prompts(script, [row], tokenizer)]
    if name == "sft":
        return script.load_documents([row], tokenizer, script.Args())[0]
    readers = dict(reward_model="load_preference_rows", dpo_tldr="load_pairs")
    return getattr(script, readers[name])([row], tokenizer, script.Args())


def columns_for(name, row):
    """A row with the columns prompt, chosen and rejected, as a script names them."""
    if name in ("reward_model", "dpo_tldr"):
        return row
    return {dict(chosen="completion").get(column, column): x for column, x in row.items()}


CHAT_ROW = {
    "prompt": chat(TURNS[0]),
    "chosen": chat(TURNS[1]),
    "rejected": chat((ASSISTANT, "No idea.")),
}
TEXT_ROW = {"prompt": "2 + 3?", "chosen": " 5", "rejected": " 6"}
CHAT_SCRIPTS = ["sft", "reward_model", "dpo_tldr", *GROUPS, "grpo_tools"]
TOOL = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize("name", CHAT_SCRIPTS)
def test_columns_for_the_template(scripts, faults, name):
    """Its options would be ignored. Empty ones are none; to texts, they are columns like others. Tools reach
    the template in sft.py."""
    tokenizer = build_tokenizer("qwen3")
    columns = {"tools": [ADD], "chat_template_kwargs": {"enable_thinking": False}, "images": ["a.png"]}
    plain = load_chats(scripts, name, CHAT_ROW, tokenizer)
    lines = faults(name, [CHAT_ROW, CHAT_ROW | columns], tokenizer)
    for column, value in columns.items():
        found = [
            line for line in lines if f"train.jsonl row 2: the column {column} belongs to the chat" in line
        ]
        assert len(found) == (column != "tools" or name != "sft"), lines
        for empty in (None, [], {}, ""):
            assert load_chats(scripts, name, CHAT_ROW | {column: empty}, tokenizer) == plain
        assert load_chats(scripts, name, TEXT_ROW | {column: value}, tokenizer)
    assert faults(name, [CHAT_ROW | dict.fromkeys(columns)], tokenizer) == []
    assert faults(name, [TEXT_ROW | columns], tokenizer) == []


def test_tools_in_a_prompt_of_the_template_flag(scripts):
    """--prompt-template says what is in the prompt, and the reward function gets all columns."""
    script, tokenizer = scripts["grpo_math"], build_tokenizer("qwen3")
    args = script.Args(prompt_template="{question} {tools}")
    [task] = script.load_tasks([dict(question="2 + 3?", tools=[TOOL])], tokenizer, args)
    assert "'name': 'add'" in tokenizer.decode(task["ids"]) and task["columns"]["tools"] == [TOOL]


@pytest.mark.parametrize("name", CHAT_SCRIPTS)
def test_keys_that_the_template_does_not_read(scripts, faults, name):
    """Marks of what not to learn, of OpenAI, Mistral, axolotl and others. A null is no mark, and a word of a
    system message is no key."""
    tokenizer = build_tokenizer("llama3")
    tokenizer.chat_template = "The weight of a name, and how to train. " + tokenizer.chat_template
    plain = load_chats(scripts, name, CHAT_ROW, tokenizer)
    [message] = CHAT_ROW["prompt"]
    marks = dict(weight=0, train=False, loss_mask=0, thinking="Hm.", name="Ann")
    rows = [CHAT_ROW, *(CHAT_ROW | {"prompt": [message | {key: x}]} for key, x in marks.items())]
    lines = faults(name, rows, tokenizer)
    for number, key in enumerate(marks, start=2):
        expected = f"train.jsonl row {number}, column prompt: a message has {key}, which the chat template"
        assert any(line.startswith(expected) for line in lines), lines
        for empty in (None, "", [], {}):
            row = CHAT_ROW | {"prompt": [message | {key: empty}]}
            assert load_chats(scripts, name, row, tokenizer) == plain
    empty = CHAT_ROW | {"prompt": [message | dict.fromkeys(marks)]}
    assert faults(name, [CHAT_ROW, empty], tokenizer) == []


def test_keys_that_the_template_reads():
    """Qwen3's writes the thought of an answer, or the call of a tool."""
    tokenizer = build_tokenizer("qwen3")
    question, answer = chat(*TURNS[:2])
    for key, value, expected in (
        ("reasoning_content", "Easy.", "<think>\nEasy.\n</think>\n\nIt is 5.<|im_end|>"),
        ("tool_calls", [TOOL | {"function": {"name": "add", "arguments": {}}}], '{"name": "add", '),
    ):
        [(_, labels)] = documents_of(tokenizer, {"messages": [question, answer | {key: value}]})
        [text] = learned(tokenizer, labels)
        assert expected in text


def sft_faults(faults, messages, tokenizer):
    """What check.py finds in a chat with tools, after one without a fault."""
    rows = [{"messages": tool_chat(""), "tools": [ADD]}, {"messages": messages, "tools": [ADD]}]
    return faults("sft", rows, tokenizer, max_length=2000)


def test_a_chat_with_calls_has_no_fault(faults):
    """content: null next to calls, and the id of a call, which no template needs."""
    messages = tool_chat()
    messages[2]["tool_call_id"] = "call_1"
    assert sft_faults(faults, messages, build_tokenizer("qwen2_5")) == []


def test_tools_that_the_template_does_not_show(faults):
    rows = [CHAT_ROW, CHAT_ROW | {"tools": [ADD]}]
    [line] = faults("sft", rows, build_tokenizer("gemma"))
    assert line == "train.jsonl row 2: the chat template does not show the column tools"


def test_arguments_as_a_json_text(faults):
    """As in OpenAI's API. A template that writes JSON would write them as a text in quotes."""
    messages = tool_chat(arguments='{"a": 2, "b": 3}')
    [line] = sft_faults(faults, messages, build_tokenizer("qwen2_5"))
    assert line.startswith("train.jsonl row 2, column messages: the arguments of a call are a JSON text")


SAME = [{"a": 2}, {"a": 3}]
PARAMETERS = [{"properties": {"a": "number"}}, {"properties": {"b": "number"}}]


@pytest.mark.parametrize(
    "arguments_of_rows, tools_of_rows, is_found",
    [
        (SAME, [[ADD], [ADD]], False),
        ([{"a": 2}, {"b": 3}], [[ADD], [ADD]], True),
        (SAME, [[{"parameters": parameters}] for parameters in PARAMETERS], True),
        (SAME, [json.dumps([{"default": None}])] * 2, False),
    ],
)
def test_arguments_of_other_rows(scripts, small, tmp_path, arguments_of_rows, tools_of_rows, is_found):
    """A parquet file has one type for all rows, so each call has the arguments of all calls."""
    tokenizer = build_tokenizer("qwen2_5")
    lm = save(random_lm("bloom", tokenizer, seed=0), tokenizer, tmp_path / "lm")
    rows = [{"messages": tool_chat(arguments=arguments)} for arguments in arguments_of_rows]
    rows = [row | {"tools": tools} for row, tools in zip(rows, tools_of_rows)]
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / f"data/{split}.parquet"))
    args = small("sft", model_name_or_path=lm, dataset_name=str(tmp_path / "data"), max_length=2000)
    lines = check.errors(scripts["sft"], args)
    assert any("a call or a tool has null" in line for line in lines) == is_found, lines


@pytest.mark.parametrize("name", CHAT_SCRIPTS)
@pytest.mark.parametrize(
    "content",
    [None, {"text": "2 + 3?"}, [{"type": "text", "text": "2 + 3?"}], 5],
    ids=lambda x: type(x).__name__,
)
def test_content_that_is_no_text(faults, name, content):
    """A template would print it as Python does, or write nothing."""
    prompt = [{"role": USER, "content": content}]
    lines = faults(name, [CHAT_ROW, CHAT_ROW | {"prompt": prompt}], build_tokenizer("qwen3"))
    expected = "train.jsonl row 2, column prompt: the content of a message must be a text"
    assert any(line.startswith(expected) for line in lines), lines


def test_messages_with_the_names_of_sharegpt(faults):
    foreign = [{"from": "human", "value": "2 + 3?"}, {"from": "gpt", "value": "5"}]
    lines = faults("sft", [{"messages": foreign}], build_tokenizer("gemma"))
    assert any("the content of a message must be a text" in line for line in lines), lines


# ---- Options of the chat template --------------------------------------------------------------------------


def with_options(script, tokenizer, text):
    script.set_template_options(tokenizer, script.Args(chat_template_kwargs=text))
    return tokenizer


@pytest.mark.parametrize("name", CHAT_SCRIPTS)
def test_options_of_the_chat_template(scripts, name, tmp_path):
    """They are what apply_chat_template gets as arguments, also after the model is saved."""
    script, plain = scripts[name], build_tokenizer("qwen3")
    write = dict(tokenize=False, add_generation_prompt=True)
    thinking, without = [
        plain.apply_chat_template(CHAT_ROW["prompt"], enable_thinking=x, **write) for x in (True, False)
    ]
    assert thinking != without
    tokenizer = with_options(script, build_tokenizer("qwen3"), '{"enable_thinking": false}')
    assert script.render_chat(tokenizer, CHAT_ROW["prompt"], is_prompt=True) == without
    tokenizer.save_pretrained(tmp_path)
    saved = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert saved.apply_chat_template(CHAT_ROW["prompt"], **write) == without
    assert saved.apply_chat_template(CHAT_ROW["prompt"], enable_thinking=True, **write) == thinking
    again = with_options(script, saved, '{"enable_thinking": true}')  # of the next script
    assert script.render_chat(again, CHAT_ROW["prompt"], is_prompt=True) == thinking
    assert with_options(script, build_tokenizer("qwen3"), None).chat_template == plain.chat_template


def test_values_of_options(scripts):
    """Any JSON value. What comes first in the template keeps its line breaks."""
    template = "\n  {% if b %}{{ a | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}\n"
    for value in ('it\'s "so"\n%}', [1, None, {"x": True}], 0.5, None):
        tokenizer = build_tokenizer("qwen2_5")
        tokenizer.chat_template = template
        expected = tokenizer.apply_chat_template(CHAT_ROW["prompt"], tokenize=False, a=value, b=True)
        with_options(scripts["sft"], tokenizer, json.dumps({"a": value, "b": True}))
        assert tokenizer.apply_chat_template(CHAT_ROW["prompt"], tokenize=False) == expected


@pytest.mark.parametrize("option", ["enable_thinkng", "enable", "tools", "eos_token", "messages"])
@pytest.mark.parametrize("template", ["qwen3", None])
def test_options_that_would_have_no_effect(faults, option, template):
    """Jinja ignores a name that the template does not have, and transformers sets some names itself."""
    tokenizer = build_tokenizer("qwen3")
    row = CHAT_ROW
    if template is None:
        tokenizer.chat_template, row = None, TEXT_ROW
    [line] = faults("sft", [row], tokenizer, chat_template_kwargs=json.dumps({option: True}))
    assert f"the chat template has no option {option}" in line
    if template is not None:
        assert faults("sft", [row], tokenizer, chat_template_kwargs='{"enable_thinking": false}') == []


@pytest.mark.parametrize("name", CHAT_SCRIPTS)
def test_options_reach_the_run(scripts, small, monkeypatch, tmp_path, name):
    """Before the data are read. (judge.py, which has the flags of rloo_tldr.py, has them too.)"""
    model = chat_lm("qwen3", tmp_path / "lm", [1])
    flags = dict(model_name_or_path=model, chat_template_kwargs='{"enable_thinking": false}')
    calls = [lambda script, args: script.train(args)]
    if name == "rloo_tldr":
        flags |= dict(
            reward_fn=reward_file(tmp_path, "return [1.0] * len(prompts)"), judge_fn="no/judge.py:f"
        )
        calls.append(lambda script, args: judge.judge_policy(args))

    class ReachedError(Exception):
        pass

    def load_splits(path):
        raise ReachedError

    templates = spy(monkeypatch, scripts[name], "load_tokenizer")
    monkeypatch.setattr(scripts[name], "load_splits", load_splits)
    monkeypatch.setattr(scripts[name], "load_judge", lambda *inputs: True, raising=False)
    monkeypatch.setattr(check, "errors", lambda *inputs: [])  # judge.py looks at its data, too
    for i, call in enumerate(calls):
        with pytest.raises(ReachedError):
            call(scripts[name], small(name, f"run{i}", **flags))
    assert len(templates) == len(calls)
    for _, tokenizer in templates:
        text = scripts[name].render_chat(tokenizer, CHAT_ROW["prompt"], is_prompt=True)
        assert text.endswith("<think>\n\n</think>\n\n")


# ---- What ends a response ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dpo_tldr", *GROUPS, "grpo_tools"])
def test_the_end_of_a_turn_is_a_stop_token(scripts, family, name):
    """A base model's generation_config has only the end of a text; its template ends turns with another."""
    tokenizer = build_tokenizer(family)
    end = tokenizer.convert_tokens_to_ids(FAMILIES[family][4])
    base = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=7))
    for eos in (tokenizer.eos_token, tokenizer.pad_token):
        tokenizer.eos_token = eos
        found = scripts[name].end_tokens(base, tokenizer).tolist()
        assert found == sorted({7, tokenizer.eos_token_id, end})
    without_answers = "{% for m in messages %}" + FAMILIES[family][4] + "{% endfor %}"
    for template in (None, WITHOUT_END, without_answers):
        tokenizer.chat_template = template
        assert scripts[name].end_tokens(base, tokenizer).tolist() == sorted({7, tokenizer.eos_token_id})


# ---- Rollouts ----------------------------------------------------------------------------------------------


def load_prompts(script, rows, tokenizer):
    """What rloo_tldr.py or grpo_math.py makes of the rows, without a system prompt."""
    if script.__name__ == "rloo_tldr":
        return script.load_prompts(rows, tokenizer, script.Args())
    return script.load_tasks(rows, tokenizer, script.Args(system_prompt=None))


@pytest.mark.parametrize("name", [*GROUPS, "grpo_tools"])
def test_the_prompt_of_a_rollout_is_that_of_training(scripts, family, name):
    """Token by token: the prompt with its generation prompt is where the learned turn begins."""
    tokenizer = build_tokenizer(family)
    row = {"prompt": chat(*TURNS[:3]), "completion": chat(TURNS[3])}
    [(ids, labels)] = documents_of(tokenizer, row)
    [post] = load_prompts(scripts[name], [row], tokenizer)
    assert post["ids"] == ids[: len(post["ids"])]
    assert labels[len(post["ids"]) - 1] == -100 and labels[len(post["ids"])] != -100
    assert post["prompt"] == row["prompt"]
    if name == "rloo_tldr":
        assert post["reference"] == "That is 8, two times 4."
    else:
        assert post["columns"] == row


@pytest.mark.parametrize("name", GROUPS)
def test_rollouts_on_chats(scripts, small, tmp_path, monkeypatch, name):
    """Reward functions get lists of messages. Stop tokens of the model end a response, and only these."""
    rows = [{"prompt": chat((USER, f"What is {i} + 1?")), "answer": str(i + 1)} for i in range(24)]
    body = """for prompt, completion, answer in zip(prompts, completions, columns["answer"]):
    assert prompt == [dict(role="user", content=f"What is {int(answer) - 1} + 1?")]
    assert completion[0]["role"] == "assistant"
return [float(len(completion[0]["content"])) for completion in completions]"""
    rollouts = spy(monkeypatch, scripts[name], "sample_responses")
    stops = [1, *range(40, 80)]  # EOS, and so many others that random weights stop now and then
    args = small(
        name,
        model_name_or_path=chat_lm("llama3", tmp_path / "lm", stops),
        dataset_name=write_rows(tmp_path / "data", train=rows[:16], test=rows[16:]),
        reward_fn=reward_file(tmp_path, body),
        max_prompt_length=200,
        response_length=12,
        temperature=1.0,
    )
    scripts[name].train(args)
    ended_by = set()
    for _, (b, _) in rollouts:
        for tokens, length, has_stopped in zip(b["ids"][:, -12:].tolist(), b["lengths"], b["stopped"]):
            *others, last = tokens[:length]
            assert not set(others) & set(stops) and (last in stops) == has_stopped
            ended_by |= {last} & set(stops)
    assert len(ended_by) > 1


# ---- reward_model.py ---------------------------------------------------------------------------------------


def test_preferences_between_chats(scripts, family):
    """The text is the whole conversation, as the template writes it, with a column prompt or without."""
    script = scripts["reward_model"]
    tokenizer = build_tokenizer(family)
    args = script.Args(max_length=200)
    worse = (ASSISTANT, "No idea.")
    separate = {"prompt": chat(*TURNS[:3]), "chosen": chat(TURNS[3]), "rejected": chat(worse)}
    joined = {"chosen": chat(*TURNS), "rejected": chat(*TURNS[:3], worse)}
    ids = []
    for row in (separate, joined):
        [loaded] = script.load_preference_rows([row], tokenizer, args)
        ids.append(loaded.texts)
    assert ids[0] == ids[1]
    for text, turns in zip(ids[0], [TURNS, (*TURNS[:3], worse)]):
        assert tokenizer.decode(text) == tokenizer.apply_chat_template(chat(*turns), tokenize=False)
        assert text.count(tokenizer.bos_token_id) == (FAMILIES[family][0] is not None)


# ---- Turns of a model that calls tools ---------------------------------------------------------------------


def turn_format(scripts, tokenizer, end):
    """What grpo_tools.py knows about a chat template whose turns end with this token."""
    stops = torch.tensor([tokenizer.convert_tokens_to_ids(end)])
    return scripts["grpo_tools"].TurnFormat(tokenizer, stops, [ADD])


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3"])
@pytest.mark.parametrize("results", [["72"], ["72", ""], ["error: KeyError: 'x'", " 5\n", "<b>"]])
def test_results_of_tools_are_those_of_the_template(scripts, family, results):
    """What is appended is the difference of two renderings, as ids: with results and without."""
    tokenizer = build_tokenizer(family)
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    begun = chat((USER, "What is 8 * 9?"))
    before = tokenizer.apply_chat_template(begun, tokenize=False, add_generation_prompt=True)
    before += call + "<|im_end|>"
    messages = chat(*(("tool", result) for result in results))
    whole = begun + chat((ASSISTANT, call)) + messages
    after = tokenizer.apply_chat_template(whole, tokenize=False, add_generation_prompt=True)
    assert after.startswith(before)
    ids, all_ids = tokenizer(before).input_ids, tokenizer(after).input_ids
    assert all_ids[: len(ids)] == ids
    ours = turn_format(scripts, tokenizer, "<|im_end|>")
    assert ours.after_turn(messages) == all_ids[len(ids) :]
    assert ours.end == ids[-1]
    calls = ['\n{"name": "f", "arguments": {}}\n']
    assert ours.read_turn(tokenizer(call + "<|im_end|>").input_ids) == (call, calls, True)
    assert ours.read_turn(tokenizer(call).input_ids) == (call, calls, False)
