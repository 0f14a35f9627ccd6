"""The verb chat of ppo_dialog.py: what it shows, remembers and takes as flags."""

import pytest
from conftest import ROOT
from run_tools import one_line, spy, write_rows
from transformers import AutoTokenizer

pytest_plugins = ["run_fixtures"]
SCRIPT = "ppo_dialog"
STEADY = ["--temperature", "0.3", "--response-length", "32", "--num-context-utterances", "2"]
TEA = ("Do you like tea?", "Yes, I like tea very much.")  # question and answer, which the talker knows
CAFE = ("Where is the café?", "Déjà vu: the café is 3 € away.")


@pytest.fixture
def chat(script, monkeypatch):
    """chat(argv, *lines): a whole chat in this process. -> what print wrote, calls of generate_until

    A line may also be an exception, which input() then raises.
    """

    def run(argv, *lines):
        printed = []
        calls = spy(monkeypatch, script, "generate_until")
        rows_of_check = 2  # check_dialog_model calls it with two prompts
        typed = iter([*lines, "quit"])

        def fake_input(question):
            line = next(typed)
            if isinstance(line, type):
                raise line
            printed.append(f"{question}{line}\n")
            return line

        def fake_print(*words, **options):
            printed.append(" ".join(words) + "\n")

        monkeypatch.setattr("builtins.input", fake_input)
        monkeypatch.setattr(script, "print", fake_print, raising=False)
        try:
            script.main(["chat", *argv])
        except KeyboardInterrupt:
            pytest.fail("chat did not catch Ctrl-C")
        return printed, [call for call in calls if len(call[0][1]) != rows_of_check]

    return run


def answers_in(printed):
    """The answers that were shown."""
    return [line.removeprefix("> Bot: ").strip() for line in printed if line.startswith("> Bot: ")]


def prompts_of(calls):
    """The token ids of each prompt."""
    return [ids[0].tolist() for (_, ids, *_), _ in calls]


# ---- In this process ---------------------------------------------------------------------------------------


def test_questions_and_answers(chat, talker):
    """What is shown: no end mark, and letters of several tokens are complete."""
    printed, _ = chat([talker.model, *STEADY], TEA[0], "reset", CAFE[0])
    assert "".join(printed).endswith(
        f"> You: {TEA[0]}\n> Bot: {TEA[1]}\n"
        f"> You: reset\nforgotten\n"
        f"> You: {CAFE[0]}\n> Bot: {CAFE[1]}\n"
        f"> You: quit\n"
    )


def speak(script, monkeypatch, *tokens):
    """Let the model sample these tokens, one after the other."""
    tokens = iter(tokens)

    def next_token(probs, uniforms):
        return probs.new_full((1,), next(tokens)).long()

    monkeypatch.setattr(script, "sample_tokens", next_token)
    monkeypatch.setattr(script, "check_dialog_model", lambda *_: None)  # it samples too


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
    assert answers_in(printed) == ["Fine"] * 3
    texts = [f" {text} <EOU>" for text in ("Hello", "Fine", "And?", "So")]
    hello, fine, and_, so = tokenizer(texts, add_special_tokens=False).input_ids
    first = [tokenizer.bos_token_id] if bos else []
    assert prompts_of(calls) == [first + hello, first + and_, first + and_ + fine + so]


def test_nothing_follows_eos(chat, script, bang_lm, monkeypatch):
    """The zeros after the end are no tokens of the answer, although token 0 is "!"."""
    tokenizer = AutoTokenizer.from_pretrained(bang_lm())
    ids = tokenizer(" Yes! I do", add_special_tokens=False).input_ids
    speak(script, monkeypatch, *ids, tokenizer.eos_token_id, *ids, tokenizer.eos_token_id)
    flags = ["--response-length", "30", "--utterance-end", "eos"]
    printed, calls = chat([bang_lm(), *flags], "You?", "So?")
    assert answers_in(printed) == ["Yes! I do"] * 2
    you, yes, so = script.utterance_ids(tokenizer, ["You?", "Yes! I do", "So?"], "eos")
    assert prompts_of(calls) == [you, you + yes + so]


def test_an_empty_answer_is_forgotten(chat, script, bang_lm, monkeypatch):
    """With its question: fine-tuning saw no empty utterance, and none after another of the same person."""
    tokenizer = AutoTokenizer.from_pretrained(bang_lm())
    speak(script, monkeypatch, *[tokenizer.eos_token_id] * 2)
    printed, calls = chat([bang_lm(), "--utterance-end", "eos"], "You?", "So?")
    assert answers_in(printed) == ["", ""]
    assert prompts_of(calls) == script.utterance_ids(tokenizer, ["You?", "So?"], "eos")


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
    assert len(answers_in(printed)) == 3
    uniforms = [tuple(uniforms[0].tolist()) for (_, _, _, uniforms, *_), _ in calls]
    assert len(set(uniforms)) == 3


def test_a_prompt_longer_than_the_context_is_refused(script, talker, capsys):
    """One line, before the first question."""
    line = one_line(script, ["chat", talker.model, "--max-prompt-length", "9999"], capsys)
    assert "reads fewer tokens than the 10019" in line


@pytest.mark.parametrize("end", [EOFError, KeyboardInterrupt])
def test_end_of_input_leaves(chat, talker, end):
    """Ctrl-D and Ctrl-C leave, like quit."""
    printed, calls = chat([talker.model, *STEADY], TEA[0], end)
    assert printed[-1] == "\n"
    assert len(calls) == 1


def test_flags_of_a_chat(chat, dialog, script, monkeypatch, talker):
    """A run and its model/ bring their own flags, a recipe's model the recipe's; others have the defaults."""
    _, folder, _ = dialog(temperature=0.6)
    criteria = spy(monkeypatch, script, "load_end_criteria")
    models = spy(monkeypatch, script, "load_model")

    def last_args():
        (args, _), _ = criteria[-1]
        return args

    for name in (folder, folder / "model"):
        _, calls = chat([str(name), "--response-length", "5"], "Hello.")
        assert last_args().utterance_end == "eos"
        assert last_args().num_context_utterances == 2
        assert last_args().response_length == 5
        (_, model_name), _ = models[-1]
        assert model_name == str(folder / "model")
        (_, _, _, _, _, temperature), _ = calls[-1]
        assert temperature == 0.6
    for name in (
        "checkpoints/dialogs-lm",
        "./checkpoints/dialogs-lm/",
        f"{ROOT}/docs/../checkpoints/dialogs-lm",
    ):
        chat([name])
        assert last_args().utterance_end == "eos"
        assert last_args().num_context_utterances == 8
    chat([talker.model])
    assert last_args() == script.Args()


def test_flags_of_a_model_that_sft_trained(chat, sft, script, monkeypatch, tmp_path):
    """The run brings the flags that both scripts have, and flags of the command line replace them."""
    rows = [dict(dialog=["Hello.", "Who are you?", "I am Leo."])] * 12
    _, folder, _ = sft(dataset_name=write_rows(tmp_path / "data", train=rows), utterance_end=" ~~", seed=5)
    criteria = spy(monkeypatch, script, "load_end_criteria")
    for name in (folder, folder / "model"):
        chat([str(name), "--response-length", "3"], "Hello.")
        (args, _), _ = criteria[-1]
        assert (args.utterance_end, args.seed) == (" ~~", 5)
        assert (args.response_length, args.num_context_utterances) == (3, 5)
