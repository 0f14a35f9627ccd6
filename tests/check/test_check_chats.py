"""Chats, chat templates and tokenizers."""

import json
import shutil

import pytest
import tokenizers
import transformers
from check_helpers import assert_only, assert_remark, findings, texts
from conftest import ROOT, byte_level_tokenizer, random_lm, save
from run_tools import write_rows

pytest_plugins = ["run_fixtures"]
USER, ASSISTANT = "user", "assistant"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ONLY_LAST_THOUGHT = CHATML.replace(
    "m['content']",
    "(m['content'] if loop.last or m['role'] == 'user' else m['content'].split('</think>')[-1])",
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
PLAIN += "{% if add_generation_prompt %}assistant:{% endif %}"


def chat(*contents, roles=(USER, ASSISTANT)):
    return [dict(role=roles[i % 2], content=content) for i, content in enumerate(contents)]


@pytest.fixture
def chat_model(tmp_path):
    """chat_model(template, bos=False) -> folder of a small model with a chat template."""

    def make(template=CHATML, bos=False, appends_eos=False):
        learned = tokenizers.ByteLevelBPETokenizer()
        special = ["<|im_end|>", "<|im_start|>", "<s>"]
        learned.train_from_iterator(["What is 2 + 3? It is 5."], vocab_size=300, special_tokens=special)
        backend = learned._tokenizer
        if bos or appends_eos:
            form = f"{'<s> ' if bos else ''}$A{' <|im_end|>' if appends_eos else ''}"
            used = [("<s>", 2), ("<|im_end|>", 0)]
            backend.post_processor = tokenizers.processors.TemplateProcessing(
                single=form, special_tokens=used
            )
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=backend, bos_token="<s>", eos_token="<|im_end|>", pad_token="<|im_end|>"
        )
        tokenizer.chat_template = template
        folder = tmp_path / f"model-{len(list(tmp_path.iterdir()))}"
        return save(random_lm("llama", tokenizer, seed=0), tokenizer, folder)

    return make


@pytest.fixture
def look(scripts, small, chat_model, tmp_path):
    """look(script, rows, **flags) -> findings about these rows, with the chat model"""

    def make(script, rows, template=CHATML, **flags):
        data = write_rows(tmp_path / "data", train=rows, test=rows[:2])
        places = dict(dataset_name=data, model_name_or_path=chat_model(template))
        if script == "dpo_tldr":
            places |= dict(eval_dataset_name=None, judge_fn=None)
        return findings(scripts[script], small(script, **(places | flags)))

    return make


def tasks(count=9, **columns):
    return [dict(prompt=chat(f"What is {i} + 3?"), answer=str(i + 3)) | columns for i in range(count)]


def test_a_chat_is_fine(look):
    assert texts(look("grpo_math", tasks())) == []


def test_an_sft_chat_is_fine(look):
    assert texts(look("sft", [dict(messages=chat(f"{i}?", "5.")) for i in range(9)])) == []


# ---- Rows --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, column",
    [("grpo_math", "prompt"), ("sft", "messages"), ("sft", "text"), ("dpo_tldr", "chosen")],
)
def test_a_chat_that_is_a_json_text(look, name, column):
    """It would be trained on with its brackets."""
    row = dict(prompt="2?", answer="2", rejected=" so bad") if name != "sft" else {}
    rows = [row | {column: json.dumps(chat("Who are you?", "Leo."))}] * 9
    found = look(name, rows)
    assert any("JSON text" in text for text in texts(found)), texts(found)


@pytest.mark.parametrize("content", [None, 5, [dict(type="text", text="What?")]])
def test_content_that_is_no_text(look, content):
    """A template would print it as Python does."""
    rows = tasks()
    rows[3]["prompt"][0]["content"] = content
    found = look("grpo_math", rows)
    word = "train.jsonl row 4, column prompt: the content of a message must be a text"
    assert any(word in text for text in texts(found)), texts(found)


@pytest.mark.parametrize("key, value", [("weight", 0), ("train", False), ("loss_mask", 1), ("name", "Leo")])
def test_parts_that_the_template_does_not_read(look, key, value):
    """Marks of what not to learn, which would be learned."""
    rows = [dict(messages=chat(f"{i}?", "5.")) for i in range(9)]
    rows[2]["messages"][1][key] = value
    found = look("sft", rows)
    assert any("train.jsonl row 3" in text and f"a message has {key}" in text for text in texts(found)), (
        texts(found)
    )


@pytest.mark.parametrize("column, value", [("tools", [dict(name="f")]), ("images", ["a.png"])])
@pytest.mark.parametrize("name", ["grpo_math", "rloo_tldr", "sft"])
def test_columns_beside_a_chat(look, name, column, value):
    """The template would need them."""
    rows = tasks(completion=chat("It is.", roles=(ASSISTANT, USER)))
    rows[5][column] = value
    found = look(name, rows)
    assert any(column in text for text in texts(found)), texts(found)


@pytest.mark.parametrize("row, is_read", [(dict(messages=chat("Q", "A")), True), (dict(text="Q"), False)])
def test_who_reads_the_column_tools(look, row, is_read):
    """The template does, to which sft.py gives the tools of a chat. Beside a text, nobody does."""
    found = look("sft", [row | dict(tools=[dict(name="f")])] * 9, "{{ tools }}" + CHATML)
    assert texts(found) == []
    assert any("nobody reads these columns" in text for text in texts(found, "remark")) != is_read


@pytest.mark.parametrize("roles", [("human", "gpt"), ("User", "Assistant")])
def test_roles_of_another_format(look, roles):
    """Nothing would be learned."""
    rows = [dict(messages=chat(f"{i}?", "5.", roles=roles)) for i in range(9)]
    found = look("sft", rows)
    assert any(f"role {roles[0]!r}" in text for text in texts(found)), texts(found)


def test_a_role_of_its_own(look):
    rows = tasks()
    rows[3]["prompt"].insert(0, dict(role="narrator", content="It is night."))
    assert_remark(look("grpo_math", rows), "train.jsonl row 4", "role 'narrator'")


@pytest.mark.parametrize("name", ["dpo_tldr", "reward_model"])
def test_a_prompt_that_ends_with_the_assistant(look, name):
    """A template would close that message, and begin another one."""
    good, bad = [[dict(role=ASSISTANT, content=text)] for text in (" 5.", " 6.")]
    rows = [dict(prompt=chat("2 + 3?", "It is"), chosen=good, rejected=bad)] * 9
    found = look(name, rows)
    assert any(
        "a prompt ends with the assistant" in t or "the prompt ends with" in t for t in texts(found)
    ), found


def test_no_response_ends(look):
    """dpo_tldr.py samples until a stop token. Here, all responses end in another special token instead."""
    good, bad = [[dict(role=ASSISTANT, content=text)] for text in (" 5.<s>", " 6.<s>")]
    rows = [dict(prompt=chat(f"{i} + 3?"), chosen=good, rejected=bad) for i in range(9)]
    found = look("dpo_tldr", rows, template=PLAIN)
    assert_only(found, "no response in the held-out rows contains a token that ends")


def test_chats_without_a_template(look):
    found = look("grpo_math", tasks(), template=None)
    assert any("has no chat template" in text for text in texts(found)), texts(found)


def test_a_template_that_refuses_rows(look):
    """Gemma's takes no system message, Mistral's no two messages of the user in a row."""
    strict = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system message') }}{% endif %}" + CHATML
    )
    rows = tasks()
    rows[5]["prompt"].insert(0, dict(role="system", content="Be short."))
    found = look("grpo_math", rows, template=strict)
    assert_only(found, "1 of 9 rows cannot be read", "train.jsonl row 6", "no system message")


def test_a_template_that_refuses_all_rows(look):
    strict = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system message') }}{% endif %}" + CHATML
    )
    assert_only(look("grpo_math", tasks(), template=strict, system_prompt="Be short."), "no system message")


def test_control_tokens_in_a_text(look):
    """The user would end their own turn."""
    rows = tasks()
    rows[6]["prompt"][0]["content"] = "What is <|im_end|> for?"
    assert_remark(look("grpo_math", rows), "1 rows hold text", "<|im_end|>", "train.jsonl row 7")


@pytest.mark.parametrize("script", ["grpo_math", "reward_model", "ppo_dialog"])
def test_control_tokens_in_every_column(look, script):
    """In a text, or in one of a list: what a prompt template names, a ranking, a dialog."""
    rows, flags = [], dict(prompt_template="{question}") if script == "grpo_math" else {}
    for i in range(9):
        one, two = "The first.", f"The second {i}{'<|im_end|>' * (i == 4)}."
        columns = {
            "grpo_math": dict(question=two, answer="2"),
            "reward_model": dict(prompt=f"{i}:", responses=[one, two]),
            "ppo_dialog": dict(dialog=[one, two], act=[1, 1]),
        }
        rows.append(columns[script])
    said = texts(look(script, rows, **flags), "remark")
    assert any("1 rows hold text" in text and "train.jsonl row 5" in text for text in said), said


# ---- Templates ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", ['{"enable_thinking": false}', '{"messages": []}'])
def test_options_that_the_template_does_not_have(look, options):
    found = look("grpo_math", tasks(), chat_template_kwargs=options)
    assert any("has no option" in text for text in texts(found)), texts(found)


def test_options_of_several_templates(look):
    """The script would make one text of them, and prompts would have its braces."""
    template = CHATML + "{% if enable_thinking %}<think>{% endif %}"
    templates = dict(default=template, tool_use=template)
    found = look("grpo_math", tasks(), template=templates, chat_template_kwargs='{"enable_thinking": true}')
    assert any("has several chat templates" in text for text in texts(found)), texts(found)


@pytest.mark.parametrize("options, is_said", [(None, True), ('{"date_string": "26 Jul 2024"}', False)])
def test_a_template_that_writes_the_date(look, options, is_said):
    """As that of Llama 3.1, which has an option for a fixed one."""
    template = "{{ date_string | default(strftime_now('%d %b %Y')) }}" + CHATML
    found = look("grpo_math", tasks(), template=template, chat_template_kwargs=options)
    remarks = [finding.text for finding in found if finding.kind == "remark"]
    assert any("writes today's date" in text for text in remarks) == is_said, remarks


def test_options_that_are_not_json(look):
    found = look("grpo_math", tasks(), chat_template_kwargs="{enable_thinking: false}")
    assert any("--chat-template-kwargs is not JSON" in text for text in texts(found)), texts(found)


def test_answers_that_are_not_learned(look):
    """The template drops the thoughts of earlier turns, so that these are not what a policy wrote."""
    thought = "<think>Well.</think>Yes."
    rows = [dict(messages=chat("a?", thought, "b?", thought)) for _ in range(6)] + [
        dict(messages=chat("a?", thought))
    ] * 3
    found = look("sft", rows, template=ONLY_LAST_THOUGHT)
    assert_remark(found, "9 of 15 answers in chats are learned", "train.jsonl row 1")


def test_answers_behind_the_cut(look):
    """The cut is reported, and no fault of the template."""
    rows = [dict(messages=chat("a?", "Yes.", "long " * 300, "No.")), *[dict(messages=chat("a?", "Yes."))] * 8]
    found = look("sft", rows)
    assert_remark(found, "1 of 9 train examples: cut to --max-length 128")
    assert not any("answers in chats" in text for text in texts(found, "remark"))


WITH_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML.replace(
    "m['content']", "(m['content'] or '') + ((m.tool_calls or '') | string)"
)


def calls_of(name, question="a?", **columns):
    """A row of sft.py: a question and a call of the function with this name."""
    call = dict(type="function", function=dict(name=name, arguments={}))
    turn = dict(role=ASSISTANT, content="", tool_calls=[call])
    return dict(messages=[dict(role=USER, content=question), turn]) | columns


def test_calls_and_their_tools(look):
    """sft.py gives the column tools to the template, so somebody reads it."""
    tools = [dict(type="function", function=dict(name="f", description="x", parameters={}))]
    found = look("sft", [calls_of("f", tools=tools)] * 9, template=WITH_TOOLS)
    assert texts(found) == []
    assert not any("tools" in text for text in texts(found, "remark")), found


def test_calls_without_tools(look):
    """The prompts of grpo_tools.py would have a part that these chats lack."""
    rows = [calls_of("f", "You have f(). a?"), *[calls_of("f")] * 8]
    assert_remark(look("sft", rows, template=WITH_TOOLS), "train.jsonl row 2", "calls f", "no column tools")


def test_a_template_without_an_end(look):
    assert_remark(look("grpo_math", tasks(), template=PLAIN), "has no control token", "'<|im_end|>'")


# ---- Tokenizers --------------------------------------------------------------------------------------------


def test_two_bos(scripts, small, chat_model, tmp_path):
    """Texts that begin with BOS, and a tokenizer that adds one."""
    rows = [dict(prompt=f"<s>What is {i} + 3?", answer="3") for i in range(9)]
    data = write_rows(tmp_path / "data", train=rows, test=rows[:2])
    args = small("grpo_math", dataset_name=data, model_name_or_path=chat_model(None, bos=True))
    found = findings(scripts["grpo_math"], args)
    assert any("BOS twice" in text for text in texts(found)), texts(found)


def test_eos_after_every_text(scripts, small, chat_model, tiny_tasks):
    args = small("grpo_math", dataset_name=tiny_tasks, model_name_or_path=chat_model(None, appends_eos=True))
    assert_only(findings(scripts["grpo_math"], args), "its tokenizer appends EOS to every text")


def test_eos_between_prompt_and_response(scripts, small, chat_model, tiny_preference_model, tmp_path):
    """Of a reward model, whose tokenizer is its own."""
    folder = shutil.copytree(tiny_preference_model(), tmp_path / "reward")
    transformers.AutoTokenizer.from_pretrained(chat_model(None, appends_eos=True)).save_pretrained(folder)
    found = findings(scripts["rloo_tldr"], small("rloo_tldr", reward_model_path=str(folder)))
    assert_only(found, "--reward-model-path", "appends EOS, which would be between prompt and response")


def test_no_tokenizer(scripts, small, tiny_lm, tmp_path):
    """transformers makes one up, which knows no words."""
    folder = tmp_path / "lm"
    folder.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(f"{tiny_lm('gpt_neox')}/{name}", folder)
    found = findings(scripts["grpo_math"], small("grpo_math", model_name_or_path=str(folder)))
    assert any("tokenizer" in text for text in texts(found)), texts(found)


def test_no_eos(scripts, small, tiny_lm, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_lm())
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    backend = transformers.AutoTokenizer.from_pretrained(tiny_lm()).backend_tokenizer
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<|pad|>")
    args = small("ppo_sentiment", model_name_or_path=save(model, tokenizer, tmp_path / "lm"))
    found = findings(scripts["ppo_sentiment"], args)
    assert texts(found) and all("EOS" in text for text in texts(found)), texts(found)


def test_the_tokenizer_of_a_larger_model(scripts, small, tmp_path):
    """Its last tokens have no embedding; only the pad needs none."""
    tokenizer = byte_level_tokenizer()
    model = random_lm("gpt2", tokenizer, seed=0)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    folder = save(model, tokenizer, tmp_path / "padded")
    assert texts(findings(scripts["ppo_sentiment"], small("ppo_sentiment", model_name_or_path=folder))) == []
    tokenizer.add_tokens(["<answer>", "</answer>"])
    folder = save(model, tokenizer, tmp_path / "larger")
    found = findings(scripts["ppo_sentiment"], small("ppo_sentiment", model_name_or_path=folder))
    assert_only(found, "2 tokens beyond the model's 1024 embeddings", "'<answer>'")


def test_the_small_models_of_this_repository_have_templates():
    """What the tests above assume."""
    assert (ROOT / "checkpoints/tools-sft/chat_template.jinja").exists()


def test_posts_that_end_otherwise(scripts, small, chat_model, tmp_path):
    """The pairs end in EOS, and the chats of --eval-dataset-name in another special token."""
    pairs = [dict(prompt=f"{i} + 3?", chosen=" 5.", rejected=" 6.") for i in range(9)]
    posts = [
        dict(prompt=chat(f"{i} + 3?"), completion=chat(" 5.<s>", roles=(ASSISTANT, USER))) for i in range(9)
    ]
    flags = dict(judge_fn=None, model_name_or_path=chat_model(PLAIN))
    flags["dataset_name"] = write_rows(tmp_path / "pairs", train=pairs, test=pairs)
    flags["eval_dataset_name"] = write_rows(tmp_path / "posts", train=posts, test=posts)
    found = findings(scripts["dpo_tldr"], small("dpo_tldr", **flags))
    assert_only(found, "no response in the held-out rows contains a token that ends a response")


def test_a_template_that_cannot_continue_an_answer(look):
    """It trims what the assistant wrote, so that transformers does not find it."""
    rows = tasks()
    rows[4]["prompt"] = chat("2 + 3?", "It is ")
    found = look("grpo_math", rows, template=CHATML.replace("m['content']", "m['content'] | upper"))
    assert any("row 5" in text and "cannot go on with a begun answer" in text for text in texts(found)), (
        texts(found)
    )


@pytest.mark.parametrize("content", ["", " \n"])
@pytest.mark.parametrize("name", ["grpo_math", "rloo_tldr"])
def test_a_begun_answer_that_is_empty(look, name, content):
    """transformers cuts off the end of the header, if the template trims. The first begun answer is fine."""
    rows = tasks()
    rows[2]["prompt"] = chat("2 + 3?", "It is")
    rows[4]["prompt"] = chat("2 + 3?", content)
    flags = dict(reward_fn=["data/math_rewards.py:well_formed"], judge_fn=None) if name == "rloo_tldr" else {}
    found = look(name, rows, template=CHATML.replace("m['content']", "m['content'] | trim"), **flags)
    errors = [text for text in texts(found) if "empty message of the assistant" in text]
    assert len(errors) == 1 and "row 5" in errors[0], found


TWO_ENDS = CHATML.replace("'<|im_end|>\n'", "'<|im_end|>\n<s>'")


@pytest.mark.parametrize(
    "template, words",
    [
        (PLAIN, ["ends an answer with '\\n', which has no control token", "only the last answer"]),
        (PLAIN.replace("{{ m.role", "<s>{{ m.role").replace("\n", ""), ["an answer with nothing"]),
        (TWO_ENDS, ["after '<|im_end|>'", "the chat template writes '<s>'"]),
        (CHATML, []),
    ],
)
def test_templates_that_end_answers_otherwise(look, template, words):
    found = look("sft", [dict(messages=chat(f"{i} + 3?", "5.")) for i in range(9)], template=template)
    ends = [text for text in texts(found, "remark") if "the chat template" in text]
    assert len(ends) == bool(words) and all(word in ends[0] for word in words), found


@pytest.mark.parametrize("is_null", [True, False])
def test_calls_without_a_text(look, is_null):
    """content null is usual beside tool_calls, if the template can write it."""
    content = "m['content']" + (" or ''" if is_null else "")
    template = CHATML.replace("m['content']", f"({content}) + ((m.tool_calls or '') | string)")
    call = dict(type="function", function=dict(name="f", arguments={}))
    rows = [dict(messages=chat(f"{i} + 3?", "5.")) for i in range(9)]
    for row in rows:
        row["messages"][1] = dict(role=ASSISTANT, content=None, tool_calls=[call])
    found = look("sft", rows, template=template)
    wrong = [text for text in texts(found) if "the content of a message must be a text" in text]
    assert len(wrong) == (not is_null), found


@pytest.mark.parametrize("message", [dict(content=None), dict(content=""), dict()])
def test_calls_that_the_template_does_not_write(look, message):
    """An empty answer would be learned in place of the call."""
    template = CHATML.replace("m['content']", "(m['content'] or '')")
    called = message | dict(role=ASSISTANT, tool_calls=[dict(function=dict(name="f", arguments={}))])
    rows = [dict(messages=[*chat(f"{i} + 3?"), called, dict(role="tool", content="5")]) for i in range(9)]
    found = look("sft", rows, template=template)
    assert any("a message has tool_calls, which the chat template does not read" in x for x in texts(found))


def test_a_mark_that_the_tokenizer_cannot_write(scripts, small, tmp_path):
    """It knows no "<": the mark would be <unk>s, or nothing, and no answer would ever end."""
    learned = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<|endoftext|>": 0, "hello": 1, "hi": 2}, "<|endoftext|>")
    )
    learned.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=learned,
        eos_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        pad_token="<|endoftext|>",
    )
    model = save(random_lm("gpt2", tokenizer, seed=0), tokenizer, tmp_path / "words")
    rows = [dict(dialog=["hello", "hi"], act=[1, 2])] * 9
    data = write_rows(tmp_path / "data", train=rows, test=rows[:2])
    for name in ("ppo_dialog", "sft"):
        args = small(name, dataset_name=data, model_name_or_path=model, utterance_end=" <EOU>")
        assert_only(findings(scripts[name], args), "--utterance-end '<EOU>'", "cannot write it")


def test_no_room_after_bos(scripts, small, chat_model, tmp_path):
    """A prompt of no tokens would be all of them: prompt[-0:]."""
    rows = [dict(dialog=["Who?", "It is."], act=[1, 2])] * 9
    data = write_rows(tmp_path / "data", train=rows, test=rows[:2])
    flags = dict(dataset_name=data, model_name_or_path=chat_model(None, bos=True))
    found = findings(scripts["ppo_dialog"], small("ppo_dialog", **flags, max_prompt_length=1))
    assert_only(found, "--max-prompt-length 1 must be more than 1, the number of special tokens")
    assert texts(findings(scripts["ppo_dialog"], small("ppo_dialog", **flags, max_prompt_length=2))) == []


@pytest.mark.parametrize("mark, is_said", [(" <EOU>", True), ("eos", False), (".", False)])
def test_a_mark_of_several_tokens(scripts, small, mark, is_said):
    """Only a policy that was fine-tuned with it ends its answers so."""
    found = findings(scripts["ppo_dialog"], small("ppo_dialog", utterance_end=mark))
    assert texts(found) == []
    assert is_said == any(f"--utterance-end {mark!r} is no token" in t for t in texts(found, "remark"))


def test_a_mark_of_fine_tuning_itself(scripts, small, tmp_path):
    """sft.py teaches it, whatever its tokens are."""
    rows = [dict(dialog=["Who are you?", "I am Leo."], act=[2, 1])] * 9
    data = write_rows(tmp_path / "data", train=rows, test=rows[:2])
    found = findings(scripts["sft"], small("sft", dataset_name=data, utterance_end=" <EOU>"))
    assert not any("--utterance-end" in finding.text for finding in found), found


def test_chats_without_an_answer(look):
    """--max-length is not the reason."""
    rows = [dict(messages=chat("Hello.", "5.", roles=(USER, "narrator")))] * 9
    found = look("sft", rows)
    reason = "no message of the role assistant is learned: the roles are user, narrator"
    assert any(f"no training row can be used: {reason}" in text for text in texts(found)), texts(found)
    assert not any("--max-length" in finding.text for finding in found)


def test_answers_behind_the_limit(look):
    """Here it is the reason."""
    rows = [dict(messages=chat("long " * 300, "5."))] * 9
    assert any("in the first 128 tokens (--max-length)" in text for text in texts(look("sft", rows)))


def test_chats_that_begin_with_an_answer(look):
    """It answers nothing: a policy is never asked to begin."""
    begun = chat("Hello, I am a bot.", "2 + 3?", "5.", roles=(ASSISTANT, USER))
    why = "the chat begins with an assistant message, which answers nothing"
    assert_remark(look("sft", [dict(messages=begun)] * 9), "answers in chats are learned", why)


def test_chats_that_only_begin_with_an_answer(look):
    found = look("sft", [dict(messages=chat("Hello.", "2 + 3?", roles=(ASSISTANT, USER)))] * 9)
    why = "the chat begins with an assistant message, which answers nothing"
    assert any(f"no message of the role assistant is learned: {why}" in text for text in texts(found))


@pytest.mark.parametrize("name", ["sft", "grpo_math", "rloo_tldr", "dpo_tldr"])
@pytest.mark.parametrize("role", ["developer", "system"])
def test_a_message_that_the_template_leaves_out(look, name, role):
    """Qwen's templates write no message of a developer: nobody would read it."""
    template = CHATML.replace("for m in messages", "for m in messages if m['role'] != 'developer'")
    instruction = [dict(role=role, content="Answer in one word.")]
    rows = tasks(completion=chat("5.", roles=(ASSISTANT, USER)))
    if name == "sft":
        rows = [dict(messages=instruction + chat(f"{i}?", "5.")) for i in range(9)]
    for row in rows:
        if name == "dpo_tldr":
            row |= {
                key: chat(text, roles=(ASSISTANT, USER))
                for key, text in (("chosen", "5."), ("rejected", "6."))
            }
        if name != "sft":
            row["prompt"] = instruction + row["prompt"]
    found = [text for text in texts(look(name, rows, template)) if "leaves out" in text]
    column = "messages" if name == "sft" else "prompt"
    word = f"column {column}: the chat template leaves out the message of the role developer: nobody reads it"
    assert [text.endswith(word) for text in found] == [True] * (role == "developer"), found


@pytest.mark.parametrize("prompt, role", [("Be brief.", "system"), (None, "system"), ("Be brief.", "other")])
def test_a_system_prompt_that_the_template_leaves_out(look, prompt, role):
    template = CHATML.replace("for m in messages", f"for m in messages if m['role'] != '{role}'")
    rows = [dict(question=f"{i} + 3?", answer="5") for i in range(9)]
    found = look("grpo_math", rows, template, system_prompt=prompt, prompt_template="{question}")
    word = "the chat template leaves out the message of the role system: nobody reads it"
    assert (word in texts(found)) == (prompt is not None and role == "system")


@pytest.mark.parametrize("num_own", [0, 3, 9])
def test_a_system_prompt_beside_those_of_the_data(look, num_own):
    """Rows that have one keep it, so the flag may do nothing."""
    rows = tasks()
    for row in rows[:num_own]:
        row["prompt"].insert(0, dict(role="system", content="Think."))
    found = look("grpo_math", rows, system_prompt="Be brief.")
    word = f"--system-prompt is not used in {num_own} of 9 training rows, which have their own"
    assert (word in texts(found)) == (num_own == 9)
    assert (word in texts(found, "remark")) == (num_own == 3)


@pytest.mark.parametrize("prompt", [None, "Be brief."])
def test_tools_that_a_system_message_hides(look, prompt):
    """The policy would not know them."""
    shows = "{% if tools and messages[0].role == 'user' %}{{ tools | tojson }}{% endif %}"
    rows = [dict(prompt=f"{i} + 3?", answer="5") for i in range(9)]
    flags = dict(max_prompt_length=400, response_length=100, system_prompt=prompt)
    found = texts(look("grpo_tools", rows, shows + CHATML, **flags))
    word = "shows the tools (calculator) to a user alone, but not in a prompt with the roles system, user"
    assert any(word in text for text in found) == (prompt is not None), found


# ---- What a template makes of an answer --------------------------------------------------------------------

WITHOUT_THOUGHTS = CHATML.replace("m['content']", "m['content'].split('</think>')[-1]")
OPENS_THOUGHT = WITHOUT_THOUGHTS.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")
WITHOUT_HEADER = CHATML.partition("{% if add")[0]


def pairs(chosen="It is 5.", rejected="No."):
    return [
        dict(prompt=chat(f"{i} + 3?"), chosen=[answer(chosen)], rejected=[answer(rejected)]) for i in range(9)
    ]


def answer(content):
    return dict(role=ASSISTANT, content=content)


@pytest.mark.parametrize("template", [WITHOUT_THOUGHTS, ONLY_LAST_THOUGHT])
@pytest.mark.parametrize("script", ["dpo_tldr", "reward_model", "sft"])
def test_a_template_that_drops_thoughts_of_last_answers(look, script, template):
    """As that of DeepSeek-R1: neither pairs nor documents would have them. The other drops earlier ones."""
    thought = "<think>Well.</think>Yes."
    rows = pairs(thought) if script != "sft" else [dict(messages=chat(f"{i}?", thought)) for i in range(9)]
    found = look(script, rows, template=template)
    if template == WITHOUT_THOUGHTS:
        assert_only(found, "leaves out a part", "row 1", "<think>")
    else:
        assert texts(found) == []


def test_pairs_after_another_prompt_than_samples(look):
    """The prompt opens a thought that the pairs do not have."""
    found = look("dpo_tldr", pairs(), template=OPENS_THOUGHT)
    assert_only(found, "ends a prompt with '<think>\\n', and writes answers without it")


@pytest.mark.parametrize("script", ["grpo_math", "sft"])
def test_a_template_without_a_generation_prompt(look, script):
    """The policy would have to write the header of its answer; a reward would read it."""
    rows = tasks() if script == "grpo_math" else [dict(messages=chat(f"{i}?", "Yes.")) for i in range(9)]
    found = look(script, rows, template=WITHOUT_HEADER)
    words = "'<|im_start|>assistant\\n' before an answer", "the policy has to write that itself"
    (assert_only if script == "grpo_math" else assert_remark)(found, *words)


def test_a_model_that_names_its_channels(look):
    """As gpt-oss: after the generation prompt, the policy itself writes the name of a channel."""
    content = "('final: ' if m['role'] == 'assistant' else '') + m['content']"
    found = look("grpo_math", tasks(), template=CHATML.replace("m['content']", content))
    assert_remark(found, "writes 'final: ' before an answer")


def test_an_empty_last_answer(look):
    rows = [dict(messages=chat(f"{i}?", "" if i == 3 else "Yes.")) for i in range(9)]
    assert_remark(look("sft", rows), "1 last answers are empty; the first is in train.jsonl row 4")
