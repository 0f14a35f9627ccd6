"""chat.py: what it shows, remembers and takes as flags."""

import json
import re

import pytest
from conftest import ROOT
from run_tools import spy, write_rows
from transformers import AutoTokenizer

import chat as chat_script

pytest_plugins = ["run_fixtures"]
SCRIPT = "ppo_dialog"
STEADY = ["--temperature", "0.3", "--response-length", "32", "--num-context-utterances", "2"]
TEA = ("Do you like tea?", "Yes, I like tea very much.")  # question and answer, which the talker knows
CAFE = ("Where is the café?", "Déjà vu: the café is 3 € away.")


@pytest.fixture
def chat(script, monkeypatch, capsys):
    """chat(argv, *lines): a whole chat in this process. -> its answers, calls of generate

    A line may also be an exception, which input() then raises.
    """
    monkeypatch.setattr(chat_script, "ppo_dialog", script)
    monkeypatch.setattr(script, "check_model", lambda *_: None)  # it generates, too

    def run(argv, *lines):
        calls = spy(monkeypatch, script, "generate")
        typed = iter([*lines, "quit"])

        def fake_input(question):
            line = next(typed)
            if isinstance(line, type):
                raise line
            return line

        monkeypatch.setattr("builtins.input", fake_input)
        chat_script.main(argv)
        return re.findall("> Bot: (.*)\n", capsys.readouterr().out), calls

    return run


def prompts_of(calls):
    """The token ids of each prompt."""
    return [ids[0].tolist() for (_, ids, *_), _ in calls]


def speak(script, monkeypatch, *tokens):
    """Let the model sample these tokens, one after the other."""
    tokens = iter(tokens)

    def next_token(probs, uniforms):
        return probs.new_full((1,), next(tokens)).long()

    monkeypatch.setattr(script, "sample_tokens", next_token)


# ---- Utterances --------------------------------------------------------------------------------------------


def test_what_is_shown_and_remembered(chat, script, talker):
    """The last utterances of both, by the rule of training. reset forgets them; an empty line is ignored.

    What is shown has no end mark, and letters of several tokens are complete.
    """
    answers, calls = chat([talker.model, *STEADY], TEA[0], "", "  ", "And  you?", "reset", CAFE[0])
    assert (answers[0], answers[2]) == (TEA[1], CAFE[1])
    tokenizer = AutoTokenizer.from_pretrained(talker.model)
    utterances = [TEA[0], TEA[1], "And you?", CAFE[0]]
    question, answer, follow_up, other = script.utterance_ids(tokenizer, utterances, " <EOU>")
    assert prompts_of(calls) == [question, answer + follow_up, other]
    uniforms = [tuple(uniforms[0].tolist()) for (_, _, _, uniforms, *_), _ in calls]
    assert len(set(uniforms)) == 3


@pytest.mark.parametrize("bos", [True, False])
def test_a_token_that_goes_on_after_the_end_mark(chat, script, bang_lm, monkeypatch, bos):
    """Nothing after the mark is shown or remembered, and BOS comes once, before all that is remembered."""
    tokenizer = AutoTokenizer.from_pretrained(bang_lm(bos))
    ids = tokenizer(" Fine <EOU>!", add_special_tokens=False).input_ids
    assert tokenizer.decode(ids[-1:]) == ">!"
    speak(script, monkeypatch, *ids, *ids, *ids)
    flags = ["--response-length", str(len(ids) + 2)]
    answers, calls = chat([bang_lm(bos), *flags], "Hello", "reset", "And?", "So")
    assert answers == ["Fine"] * 3
    texts = [f" {text} <EOU>" for text in ("Hello", "Fine", "And?", "So")]
    hello, fine, and_, so = tokenizer(texts, add_special_tokens=False).input_ids
    first = [tokenizer.bos_token_id] if bos else []
    assert prompts_of(calls) == [first + hello, first + and_, first + and_ + fine + so]


def test_nothing_follows_eos(chat, script, bang_lm, monkeypatch):
    """The zeros after the end are no tokens of the answer, although token 0 is "!"."""
    tokenizer = AutoTokenizer.from_pretrained(bang_lm())
    ids = tokenizer(" Yes! I do", add_special_tokens=False).input_ids
    speak(script, monkeypatch, *ids, tokenizer.eos_token_id, *ids, tokenizer.eos_token_id)
    answers, calls = chat([bang_lm(), "--utterance-end", "eos"], "You?", "So?")
    assert answers == ["Yes! I do"] * 2
    you, yes, so = script.utterance_ids(tokenizer, ["You?", "Yes! I do", "So?"], "eos")
    assert prompts_of(calls) == [you, you + yes + so]


def test_an_empty_answer_is_forgotten(chat, script, bang_lm, monkeypatch):
    """With its question: fine-tuning saw no empty utterance, and none after another of the same person."""
    tokenizer = AutoTokenizer.from_pretrained(bang_lm())
    speak(script, monkeypatch, *[tokenizer.eos_token_id] * 2)
    answers, calls = chat([bang_lm(), "--utterance-end", "eos"], "You?", "So?")
    assert answers == ["", ""]
    assert prompts_of(calls) == script.utterance_ids(tokenizer, ["You?", "So?"], "eos")


@pytest.mark.parametrize("end", [EOFError, KeyboardInterrupt])
def test_end_of_input_leaves(chat, talker, end):
    """Ctrl-D and Ctrl-C leave, like quit."""
    answers, _ = chat([talker.model, *STEADY], TEA[0], end)
    assert len(answers) == 1


# ---- Flags -------------------------------------------------------------------------------------------------


@pytest.fixture
def chat_args(chat, script, monkeypatch):
    """chat_args(argv) -> the Args of a chat, the folder of its model"""
    criteria = spy(monkeypatch, script, "load_end_criteria")
    models = spy(monkeypatch, script, "load_model")

    def run(*argv):
        chat(argv)
        (args, _), _ = criteria[-1]
        (_, model_name), _ = models[-1]
        return args, model_name

    return run


def test_flags_of_a_chat(chat_args, dialog, script, talker):
    """A run and its model/ bring their own flags, a recipe's model the recipe's; others have the defaults."""
    _, folder, _ = dialog(temperature=0.6)
    for name in (folder, folder / "model"):
        args, model_name = chat_args(str(name), "--response-length", "5")
        assert (args.utterance_end, args.num_context_utterances) == ("eos", 2)
        assert (args.temperature, args.response_length) == (0.6, 5)
        assert model_name == str(folder / "model")
    for name in ("checkpoints/dialogs-lm", f"{ROOT}/docs/../checkpoints/dialogs-lm"):
        args, _ = chat_args(name)
        assert (args.utterance_end, args.num_context_utterances) == ("eos", 8)
    assert chat_args(talker.model) == (script.Args(model_name_or_path=talker.model), talker.model)


def test_flags_of_a_model_that_sft_trained(chat_args, sft, tmp_path):
    """The run brings the flags that both scripts have; the others have their defaults."""
    rows = [dict(dialog=["Hello.", "Who are you?", "I am Leo."])] * 12
    _, folder, _ = sft(dataset_name=write_rows(tmp_path / "data", train=rows), utterance_end=" ~~", seed=5)
    args, _ = chat_args(str(folder))
    assert (args.utterance_end, args.seed, args.num_context_utterances) == (" ~~", 5, 5)


def test_the_adapter_of_a_run_has_the_flags_of_the_run(tmp_path):
    """adapter/ and model/ are the same policy, so they are asked alike."""
    args = dict(utterance_end="eos", temperature=0.3)
    (tmp_path / "args.json").write_text(json.dumps(dict(args=args)))
    for name in ("", "model", "adapter"):
        (tmp_path / name).mkdir(exist_ok=True)
        found = chat_script.parse_args(str(tmp_path / name), [])
        assert (found.utterance_end, found.temperature) == ("eos", 0.3)
        assert found.model_name_or_path == str(tmp_path / "model")
