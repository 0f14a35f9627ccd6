"""The verb chat of ppo_dialog.py: what it shows, remembers and takes as flags; and the same at a terminal."""

import os
import select
import sys
import termios
import time

import pytest
from run_tools import ROOT, spy, start_process, write_rows
from transformers import AutoTokenizer

pytest_plugins = ["run_fixtures"]
STEADY = ["--temperature", "0.3", "--response-length", "32", "--num-context-utterances", "2"]
TEA = ("Do you like tea?", "Yes, I like tea very much.")  # question and answer, which the talker knows
CAFE = ("Where is the café?", "Déjà vu: the café is 3 € away.")
SHOW_CURSOR = "\x1b[?25h"  # every command writes it at its end


@pytest.fixture
def script(scripts):
    """ppo_dialog.py as a module."""
    return scripts["ppo_dialog"]


@pytest.fixture
def chat(script, monkeypatch):
    """chat(argv, *lines): a whole chat in this process. -> what print wrote, calls of generate_until

    A line may also be an exception, which input() then raises.
    """

    def run(argv, *lines):
        printed = []
        calls = spy(monkeypatch, script, "generate_until")
        typed = iter([*lines, "quit"])

        def fake_input(question):
            line = next(typed)
            if isinstance(line, type):
                raise line
            printed.append(f"{question}{line}\n")
            return line

        def fake_print(*words, end="\n", flush=False):
            printed.append(" ".join(words) + end)

        monkeypatch.setattr("builtins.input", fake_input)
        monkeypatch.setattr(script, "print", fake_print, raising=False)
        try:
            script.main(["chat", *argv])
        except KeyboardInterrupt:
            pytest.fail("chat did not catch Ctrl-C")
        return printed, calls

    return run


def tidy(text):
    """Without the space before an end mark, which is shown before the mark is known."""
    return text.replace(" \n", "\n")


def prompts_of(calls):
    """The token ids of each prompt."""
    return [ids[0].tolist() for (_, ids, *_), _ in calls]


# ---- In this process ---------------------------------------------------------------------------------------


def test_an_answer_appears_while_it_is_generated(chat, talker):
    """Piece by piece, without its end mark, and no character before all of its bytes are there."""
    printed, _ = chat([talker.model, *STEADY], TEA[0], "reset", CAFE[0])
    text = tidy("".join(printed))
    expected = (
        f"> You: {TEA[0]}\n> Bot: {TEA[1]}\n"
        f"> You: reset\nforgotten\n"
        f"> You: {CAFE[0]}\n> Bot: {CAFE[1]}\n"
        f"> You: quit\n"
    )
    assert text.endswith(expected)
    assert not any(sign in text for sign in ("<", "EOU", "\ufffd"))
    pieces = [piece for piece in printed if piece.strip() and not piece.startswith(">")]
    assert len(pieces) > 12


@pytest.mark.parametrize("text", ["5 <EO 6", "ends <EO", "a<<EOU", "tab <EOU>"])
def test_half_an_end_mark_is_shown(chat, script, talker, monkeypatch, text):
    """What might have become the end mark and did not is shown late, but it is not lost."""
    tokenizer = AutoTokenizer.from_pretrained(talker.model)
    ids = tokenizer(f" {text}", add_special_tokens=False).input_ids
    tokens = iter(ids)

    def next_token(probs, uniforms):
        return probs.new_full((1,), next(tokens)).long()

    monkeypatch.setattr(script, "sample_tokens", next_token)
    printed, _ = chat([talker.model, "--response-length", str(len(ids))], "Speak")
    answer = printed[printed.index("> Bot: ") :]
    assert tidy("".join(answer)) == f"> Bot: {text.removesuffix(' <EOU>')}\n> You: quit\n"


def speak(script, monkeypatch, *tokens):
    """Let the model sample these tokens, one after the other."""
    tokens = iter(tokens)

    def next_token(probs, uniforms):
        return probs.new_full((1,), next(tokens)).long()

    monkeypatch.setattr(script, "sample_tokens", next_token)


@pytest.mark.parametrize("bos", [True, False])
def test_a_token_that_goes_on_after_the_end_mark(chat, script, bang_lm, monkeypatch, bos):
    """Nothing after the mark is shown or remembered, and BOS comes once, before all that is remembered."""
    tokenizer = AutoTokenizer.from_pretrained(bang_lm(bos))
    ids = tokenizer(" Fine <EOU>!", add_special_tokens=False).input_ids
    assert tokenizer.decode(ids[-1:]) == ">!"
    speak(script, monkeypatch, *ids, *ids, *ids)
    printed, calls = chat(
        [bang_lm(bos), "--response-length", str(len(ids) + 2)], "Hello", "reset", "And?", "So"
    )
    answers = tidy("".join(printed)).split("> Bot: ")[1:]
    assert [answer.split("\n")[0] for answer in answers] == ["Fine"] * 3
    texts = [f" {text} <EOU>" for text in ("Hello", "Fine", "And?", "So")]
    hello, fine, and_, so = tokenizer(texts, add_special_tokens=False).input_ids
    first = [tokenizer.bos_token_id] if bos else []
    assert prompts_of(calls) == [first + hello, first + and_, first + and_ + fine + so]


def test_bos_takes_room_in_a_chat(chat, script, bang_lm, monkeypatch):
    """A long prompt loses words, not its BOS, and is no longer than the flag says."""
    tokenizer = AutoTokenizer.from_pretrained(bang_lm(bos=True))
    speak(script, monkeypatch, tokenizer.eos_token_id)
    flags = ["--max-prompt-length", "9", "--utterance-end", "eos"]
    _, calls = chat([bang_lm(bos=True), *flags], "very long " * 20)
    [prompt] = prompts_of(calls)
    words = tokenizer(" very long" * 20, add_special_tokens=False).input_ids
    assert prompt == [tokenizer.bos_token_id, *words[-7:], tokenizer.eos_token_id]


def test_nothing_follows_eos(chat, script, bang_lm, monkeypatch):
    """The zeros after the end are no tokens of the answer, although token 0 is "!"."""
    tokenizer = AutoTokenizer.from_pretrained(bang_lm())
    ids = tokenizer(" Yes! I do", add_special_tokens=False).input_ids
    speak(script, monkeypatch, *ids, tokenizer.eos_token_id, *ids, tokenizer.eos_token_id)
    flags = ["--response-length", "30", "--utterance-end", "eos"]
    printed, calls = chat([bang_lm(), *flags], "You?", "So?")
    answers = tidy("".join(printed)).split("> Bot: ")[1:]
    assert [answer.split("\n")[0] for answer in answers] == ["Yes! I do"] * 2
    you, yes, so = script.utterance_ids(tokenizer, ["You?", "Yes! I do", "So?"], "eos")
    assert prompts_of(calls) == [you, you + yes + so]


def test_what_is_remembered(chat, script, talker):
    """The last utterances of both, by the rule of training. reset forgets them; an empty line is ignored."""
    lines = [TEA[0], "", "  ", "And  you?", "reset", CAFE[0]]
    printed, calls = chat([talker.model, *STEADY], *lines)
    tokenizer = AutoTokenizer.from_pretrained(talker.model)
    utterances = [TEA[0], TEA[1], "And you?", CAFE[0]]
    question, answer, follow_up, other = script.utterance_ids(tokenizer, utterances, " <EOU>")
    assert prompts_of(calls) == [question, answer + follow_up, other]
    assert [line for line in printed if line.startswith("> You")] == [
        f"> You: {line}\n" for line in [*lines, "quit"]
    ]
    assert printed.count("forgotten\n") == 1
    assert printed.count("> Bot: ") == 3
    uniforms = [tuple(uniforms[0].tolist()) for (_, _, _, uniforms, *_), _ in calls]
    assert len(set(uniforms)) == 3


def test_a_very_long_input(chat, talker):
    """The last tokens of 10,000 words are the prompt, and an answer comes."""
    text = "once and " * 5000 + TEA[0]
    _, calls = chat([talker.model, *STEADY, "--max-prompt-length", "40"], text)
    tokenizer = AutoTokenizer.from_pretrained(talker.model)
    end = tokenizer(f" {TEA[0]} <EOU>").input_ids
    [prompt] = prompts_of(calls)
    assert len(prompt) == 40
    assert prompt[-len(end) :] == end

    _, calls = chat([talker.model, "--max-prompt-length", "9999"], text)
    assert len(prompts_of(calls)[-1]) == 256 - 20  # the model's context minus the response


@pytest.mark.parametrize("end", [EOFError, KeyboardInterrupt])
def test_end_of_input_leaves(chat, talker, end):
    """Ctrl-D and Ctrl-C leave, like quit."""
    printed, calls = chat([talker.model, *STEADY], TEA[0], end)
    assert printed[-1] == "\n"
    assert len(calls) == 1


def test_flags_of_a_chat(chat, dialog, script, monkeypatch, talker):
    """A run and its model/ bring their own flags, a recipe's model the recipe's; others have the defaults."""
    _, folder, _ = dialog(temperature=0.6)
    tables = spy(monkeypatch, script, "build_stop_table")
    models = spy(monkeypatch, script, "load_model")

    def last_args():
        (args, _, _), _ = tables[-1]
        return args

    for name in (folder, folder / "model"):
        _, calls = chat([str(name), "--response-length", "5"], "Hello.")
        assert last_args().utterance_end == "eos"
        assert last_args().num_context_utterances == 2
        assert last_args().response_length == 5
        (_, model_name), _ = models[-1]
        assert model_name == str(folder / "model")
        (_, _, _, _, _, temperature, _), _ = calls[-1]
        assert temperature == 0.6
    chat(["checkpoints/dialogs-lm"])
    assert last_args().utterance_end == "eos"
    assert last_args().num_context_utterances == 8
    chat([talker.model])
    assert last_args() == script.Args()


def test_flags_of_a_model_that_sft_trained(chat, sft, script, monkeypatch, tmp_path):
    """The run brings the flags that both scripts have, and flags of the command line replace them."""
    rows = [dict(dialog=["Hello.", "Who are you?", "I am Leo."])] * 12
    _, folder, _ = sft(dataset_name=write_rows(tmp_path / "data", train=rows), utterance_end=" ~~", seed=5)
    tables = spy(monkeypatch, script, "build_stop_table")
    for name in (folder, folder / "model"):
        chat([str(name), "--response-length", "3"], "Hello.")
        (args, tokenizer, _), _ = tables[-1]
        assert (args.utterance_end, args.seed) == (" ~~", 5)
        assert (args.response_length, args.num_context_utterances) == (
            3,
            script.Args().num_context_utterances,
        )


# ---- At a terminal -----------------------------------------------------------------------------------------


class Terminal:
    """A process at a pseudo-terminal that does not echo what is typed."""

    def __init__(self, words, folder):
        self.end, inner = os.openpty()
        settings = termios.tcgetattr(inner)
        settings[3] &= ~termios.ECHO
        termios.tcsetattr(inner, termios.TCSANOW, settings)
        command = [sys.executable, ROOT / "ppo_dialog.py", *words]
        self.process = start_process(command, folder, inner, PYTHONUTF8="1")
        self.output = b""  # what was not read yet
        os.close(inner)

    def read(self, seconds):
        """Add more output. -> False if the process has ended"""
        ready, _, _ = select.select([self.end], [], [], seconds)
        assert ready, f"nothing more came after {self.output!r}"
        try:
            self.output += os.read(self.end, 65536)
        except OSError:  # Linux: the other end is closed
            return False
        return True

    def until(self, mark, seconds=120):
        """The output before this mark. -> str"""
        deadline = time.time() + seconds
        while mark.encode() not in self.output:
            is_running = self.read(max(0, deadline - time.time()))
            assert is_running, f"the process ended after {self.output!r}"
        before, _, self.output = self.output.partition(mark.encode())
        return tidy(before.decode().replace("\r\n", "\n"))

    def until_exit(self, seconds=120):
        """The rest of the output, and the exit code."""
        while self.read(seconds):
            pass
        text = self.output.decode().replace("\r\n", "\n").replace(SHOW_CURSOR, "")
        return text, self.process.wait(60)

    def type(self, text):
        os.write(self.end, text.encode())

    def ask(self, text):
        """Type a line and wait for the next question. -> the output between the two"""
        self.type(f"{text}\n")
        return self.until("> You: ")


@pytest.fixture
def terminal(tmp_path):
    """terminal(*words): ppo_dialog.py with these words at its own terminal."""
    opened = []

    def start(*words):
        opened.append(Terminal(words, tmp_path))
        return opened[-1]

    yield start
    for one in opened:
        one.process.kill()
        one.process.wait()
        os.close(one.end)


def test_chat_at_a_terminal(terminal, dialog, talker):
    """A run, and a model with flags: answers, reset, an empty line, a very long line, quit and Ctrl-D."""
    _, folder, _ = dialog(
        model_name_or_path=talker.model,
        dataset_name=talker.data,
        utterance_end=" <EOU>",
        response_length=32,
        learning_rate=0.0,
        temperature=0.3,
    )
    run = terminal("chat", folder)
    bare = terminal("chat", talker.model, *STEADY)

    greeting = run.until("> You: ")
    assert greeting.count("\n") == 1
    assert str(folder / "model") in greeting
    assert run.ask(TEA[0]) == f"> Bot: {TEA[1]}\n"
    assert run.ask("") == ""
    assert run.ask("reset") == "forgotten\n"
    assert run.ask(CAFE[0]) == f"> Bot: {CAFE[1]}\n"
    assert run.ask("reset") == "forgotten\n"
    longest = ("word " * 1000)[: 4095 - len(TEA[0])] + TEA[0]  # a terminal takes no longer line
    answer = run.ask(longest)
    assert answer.startswith("> Bot:")
    assert answer.endswith("\n")
    assert "Traceback" not in answer
    run.type("quit\n")
    assert run.until_exit() == ("", 0)

    assert talker.model in bare.until("> You: ")
    assert bare.ask(TEA[0]) == f"> Bot: {TEA[1]}\n"
    bare.type("\x04")  # Ctrl-D
    assert bare.until_exit() == ("\n", 0)
