"""The verb chat of ppo_dialog.py: what it shows, what it remembers, which flags it takes; and the same at a terminal."""

import os
import select
import sys
import termios
import time

import pytest
from run_tools import ROOT, spy, start_process
from transformers import AutoTokenizer

pytest_plugins = ["run_fixtures"]
STEADY = ["--temperature", "0.3", "--response-length", "32", "--num-context-utterances", "2"]
TEA, CAFE = ("Do you like tea?", "Yes, I like tea very much."), ("Where is the café?", "Déjà vu: the café is 3 € away.")


@pytest.fixture
def script(scripts):
    return scripts["ppo_dialog"]


@pytest.fixture
def chat(script, monkeypatch):
    """chat(argv, *lines): a whole chat in this process. -> (what was printed, call by call, the calls of generate_until)"""
    def run(argv, *lines):
        said, calls = [], spy(monkeypatch, script, "generate_until")
        typed = iter([*lines, "quit"])

        def answer(question):
            line = next(typed)
            if isinstance(line, type):
                raise line
            said.append(f"{question}{line}\n")
            return line

        def show(*words, end="\n", flush=False):
            said.append(" ".join(words) + end)

        monkeypatch.setattr("builtins.input", answer)
        monkeypatch.setattr(script, "print", show, raising=False)
        try:
            script.main(["chat", *argv])
        except KeyboardInterrupt:
            pytest.fail("Ctrl-C came through")
        return said, calls

    return run


def tidy(text):
    """Without the space that stood before a mark."""
    return text.replace(" \n", "\n")


def asked_of(calls):
    """The ids of each prompt."""
    return [args[1][0].tolist() for args, _ in calls]


# ---- In this process -------------------------------------------------------------------------------------------------
def test_an_answer_appears_as_it_is_written(chat, talker):
    """Piece by piece, without the mark of its end, and no letter before it is whole."""
    said, calls = chat([talker.model, *STEADY], TEA[0], "reset", CAFE[0])
    whole = tidy("".join(said))
    assert whole.endswith("> You: {}\n> Bot: {}\n> You: reset\nforgotten\n> You: {}\n> Bot: {}\n> You: quit\n".format(*TEA, *CAFE))
    assert not any(sign in whole for sign in ("<", "EOU", "\ufffd"))
    shown = [piece for piece in said if piece.strip() and piece[0] != ">"]
    assert len(shown) > 12 and "é" in whole and "€" in whole
    assert all(stopped for _, (_, _, stopped) in calls)


def test_what_looks_like_a_mark_is_shown(chat, script, talker, monkeypatch):
    """What might have become the mark and did not is shown late, and not lost: also where the answer ends with it."""
    tokenizer = AutoTokenizer.from_pretrained(talker.model)
    for text in ("5 <EO 6", "ends <EO", "a<<EOU", "tab <EOU>"):
        ids = iter(tokenizer(f" {text}", add_special_tokens=False).input_ids)
        with monkeypatch.context() as patch:
            patch.setattr(script, "sample_tokens", lambda probs, uniforms: probs.new_full((1,), next(ids)).long())  # noqa: B023
            count = len(tokenizer(f" {text}", add_special_tokens=False).input_ids)
            said, _ = chat([talker.model, "--response-length", str(count)], "Speak")
        at = said.index("> Bot: ")
        assert tidy("".join(said[at:])) == f"> Bot: {text.removesuffix(' <EOU>')}\n> You: quit\n"


def test_what_is_remembered(chat, script, talker):
    """The last utterances of both, by the rule of training; reset forgets them; an empty line is ignored."""
    tokenizer = AutoTokenizer.from_pretrained(talker.model)
    said, calls = chat([talker.model, *STEADY], TEA[0], "", "  ", "And  you?", "reset", CAFE[0])
    ids = script.utterance_ids(tokenizer, [TEA[0], TEA[1], "And you?", CAFE[0]], " <EOU>")
    assert asked_of(calls) == [ids[0], ids[1] + ids[2], ids[3]]
    assert [line for line in said if line.startswith("> You")] == [
        f"> You: {text}\n" for text in (TEA[0], "", "  ", "And  you?", "reset", CAFE[0], "quit")]  # fmt: skip
    assert said.count("forgotten\n") == 1 and sum(line.startswith("> Bot") for line in said) == 3
    uniforms = [args[3].tolist() for args, _ in calls]
    assert uniforms[0] != uniforms[1] != uniforms[2]


def test_a_very_long_input(chat, talker):
    """Of 10,000 words the last tokens are the prompt, and an answer comes."""
    _, calls = chat([talker.model, *STEADY, "--max-prompt-length", "40"], "once and " * 5000 + TEA[0])
    ids = AutoTokenizer.from_pretrained(talker.model)(f" {TEA[0]} <EOU>").input_ids
    assert len(asked_of(calls)[0]) == 40 and asked_of(calls)[0][-len(ids) :] == ids
    _, calls = chat([talker.model, "--max-prompt-length", "9999"], "once and " * 5000)
    assert len(asked_of(calls)[0]) == 256 - 20  # the model's context less the response


@pytest.mark.parametrize("end", [EOFError, KeyboardInterrupt])
def test_end_of_input_leaves(chat, talker, end):
    """As quit does."""
    said, calls = chat([talker.model, *STEADY], TEA[0], end)
    assert said[-1] == "\n" and len(calls) == 1


def test_which_flags_a_chat_has(chat, dialog, script, monkeypatch, talker):
    """A run and its model/ bring the flags of the run, the recipe's model those of the recipe, any other the defaults of Args."""
    _, folder, _ = dialog(temperature=0.6, total_episodes=8)
    stops, models = spy(monkeypatch, script, "load_stops"), spy(monkeypatch, script, "load_model")
    for name in (folder, folder / "model"):
        _, calls = chat([str(name), "--response-length", "5"], "Hello.")
        args = stops[-1][0][2]
        assert (args.utterance_end, args.num_context_utterances, args.response_length) == ("eos", 2, 5)
        assert models[-1][0][1] == str(folder / "model") and calls[-1][0][5] == 0.6
    chat(["checkpoints/dialogs-lm"])
    assert stops[-1][0][2].utterance_end == "eos" and stops[-1][0][2].num_context_utterances == 2
    chat([talker.model])
    assert stops[-1][0][2] == script.Args(max_prompt_length=128)


# ---- At a terminal ---------------------------------------------------------------------------------------------------
class Terminal:
    """A process at a pseudo-terminal that does not repeat what is typed."""

    def __init__(self, words, folder):
        self.end, inner = os.openpty()
        settings = termios.tcgetattr(inner)
        settings[3] &= ~termios.ECHO
        termios.tcsetattr(inner, termios.TCSANOW, settings)
        self.process, self.bytes = start_process([sys.executable, ROOT / "ppo_dialog.py", *words], folder, inner, PYTHONUTF8="1"), b""
        os.close(inner)

    def until(self, mark, seconds=120):
        """What appears before this mark; with None, before the end of the process. -> str"""
        limit = time.time() + seconds
        while mark is None or mark.encode() not in self.bytes:
            assert select.select([self.end], [], [], max(0, limit - time.time()))[0], f"nothing more came after {self.bytes!r}"
            try:
                self.bytes += os.read(self.end, 65536)
            except OSError:  # Linux: the other end is closed
                assert mark is None, f"the process ended after {self.bytes!r}"
                break
        text, _, self.bytes = self.bytes.partition(mark.encode()) if mark else (self.bytes, b"", b"")
        return tidy(text.decode().replace("\r\n", "\n"))

    def ask(self, text):
        """Type a line and wait for the next question. -> what appeared"""
        os.write(self.end, f"{text}\n".encode())
        return self.until("> You: ")


@pytest.fixture
def terminal(tmp_path):
    """terminal(*words): ppo_dialog.py with these words at a terminal of its own."""
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
    """A run folder, and a bare model with flags: answers, reset, an empty line, the longest line that a terminal takes, both ends."""
    _, folder, _ = dialog(model_name_or_path=talker.model, dataset_name=talker.data, utterance_end=" <EOU>", response_length=32,
                          learning_rate=0.0, temperature=0.3)  # fmt: skip
    run, bare = terminal("chat", folder), terminal("chat", talker.model, *STEADY)
    first = run.until("> You: ")
    assert first.count("\n") == 1 and str(folder / "model") in first
    assert run.ask(TEA[0]) == f"> Bot: {TEA[1]}\n"
    assert run.ask("") == ""
    assert run.ask("reset") == "forgotten\n"
    assert run.ask(CAFE[0]) == f"> Bot: {CAFE[1]}\n"
    assert run.ask("reset") == "forgotten\n"
    longest = run.ask(("word " * 1000)[: 4095 - len(TEA[0])] + TEA[0])
    assert longest.startswith("> Bot:") and longest.endswith("\n") and "Traceback" not in longest
    os.write(run.end, b"quit\n")
    assert run.until(None) == "" and run.process.wait(60) == 0

    assert talker.model in bare.until("> You: ")
    assert bare.ask(TEA[0]) == f"> Bot: {TEA[1]}\n"
    os.write(bare.end, b"\x04")  # Ctrl-D
    assert bare.until(None) == "\n" and bare.process.wait(60) == 0
