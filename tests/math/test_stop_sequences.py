"""Where an answer ends: the automaton of the stop sequence, its table for real tokenizers, and generation.

The reference decodes the text so far, and looks whether the stop sequence is in it.
"""

from itertools import combinations
from types import SimpleNamespace

import naive
import pytest
import torch
from conftest import byte_level_tokenizer, module_with
from hypothesis import given, settings
from hypothesis import strategies as st
from math_tools import left_padded, random_ids
from transformers import AutoModelForCausalLM, AutoTokenizer

dialog = module_with("stop_sequence_table", "stop_sequence_seen", "build_stop_table", "generate_until")
many = settings(max_examples=200, deadline=None, derandomize=True)
EOU = " <EOU>"
METASPACE_MARK = " -AN END-"  # of letters that the tokenizer of metaspace_lm knows


def states_after(table, tokens):
    """The states of the automaton after each token of a row."""
    state, states = 0, []
    for token in tokens:
        state = int(table[state, token])
        states.append(state)
    return states


def cuts(text):
    """Every way to cut a text into pieces. -> lists of str"""
    for count in range(len(text)):
        for places in combinations(range(1, len(text)), count):
            yield [text[start:end] for start, end in zip((0, *places), (*places, len(text)))]


def assert_found(pieces, rows, stop):
    """After each token of each row, the automaton says what a look at the text so far says."""
    table = dialog.stop_sequence_table(pieces, stop)
    assert table.shape == (len(stop) + 1, len(pieces))
    expected = []
    for row in rows:
        texts = ["".join(pieces[token] for token in row[: t + 1]) for t in range(len(row))]
        expected.append([naive.stop_sequence_state(text, stop) for text in texts])
    assert [states_after(table, row) for row in rows] == expected
    seen = dialog.stop_sequence_seen(torch.tensor(rows), table)
    assert seen.dtype is torch.bool
    assert seen.tolist() == [[state == len(stop) for state in states] for states in expected]


# ---- The automaton -----------------------------------------------------------------------------------------


@st.composite
def vocabularies(draw):
    """(pieces, rows of tokens of equal length, stop sequence), all of a few letters."""
    letters = draw(st.sampled_from(["ab", "abc", "<EOU>. "]))
    overlapping = st.sampled_from(["aab", "abab", "aaa", "abaab", "<EOU>", "<EO<EOU>", "<<E"])
    stop = draw(overlapping | st.text(letters, min_size=1, max_size=6))
    place = st.integers(0, len(stop))
    part_of_stop = st.tuples(place, place).map(lambda ends: stop[min(ends) : max(ends)])
    few_letters = st.text(letters, max_size=2)
    with_neighbours = st.tuples(few_letters, part_of_stop, few_letters).map("".join)
    piece = part_of_stop | st.text(letters, max_size=4) | with_neighbours
    pieces = draw(st.lists(piece, min_size=1, max_size=8))
    T = draw(st.integers(1, 8))
    row = st.lists(st.integers(0, len(pieces) - 1), min_size=T, max_size=T)
    return pieces, draw(st.lists(row, min_size=1, max_size=4)), stop


@given(vocabularies())
@many
def test_stop_sequences_agree_with_naive(case):
    """Random vocabularies and stop sequences, also such as overlap themselves, and rows of one token."""
    assert_found(*case)


def test_stop_sequence_table_by_hand():
    """aab, which overlaps itself: after "aa", one more a still leaves "aa". The last state is never left."""
    pieces = ["a", "b", "aa", "ab", "baab c", ""]
    table = [[1, 0, 2, 0, 3, 0], [2, 0, 2, 3, 3, 1], [2, 3, 2, 3, 3, 2], [3] * 6]
    assert dialog.stop_sequence_table(pieces, "aab").tolist() == table


def test_the_table_of_the_docstring():
    """The example that explains stop_sequence_table."""
    table = dialog.stop_sequence_table(["fine", ".<", "<", "EO", "U>!"], "<EOU>").tolist()
    lines = dialog.stop_sequence_table.__doc__.splitlines()[-7:-1]
    assert [[int(number) for number in line.split()[-5:]] for line in lines] == table


@pytest.mark.parametrize(
    "before, after", [("", ""), (".", ""), ("", "!"), ("<", ""), ("<EO", ">"), ("fine.", "<EOU")]
)
def test_a_mark_cut_in_all_ways(before, after):
    """All 16 cuts of <EOU>, merged with what is around it: found with its last piece, not earlier."""
    for cut in cuts("<EOU>"):
        pieces = ["yes", before + cut[0], *cut[1:]]
        pieces[-1] += after
        tokens = [*range(len(pieces)), 0, 0]  # each piece is a token
        assert_found(pieces, [tokens], "<EOU>")
        seen = dialog.stop_sequence_seen(torch.tensor([tokens]), dialog.stop_sequence_table(pieces, "<EOU>"))
        last_piece = len(pieces) - 1
        assert seen.tolist() == [[t >= last_piece for t in range(len(tokens))]]


def test_a_mark_that_is_never_complete():
    """Almost the mark, again and again; then the same with its last letter; then rows of one token."""
    table = dialog.stop_sequence_table(["<", "EO", "U", ">", " ", "<EOU>"], "<EOU>")
    rows = [[0, 1, 2, 4, 3, 0, 1, 3], [0, 0, 1, 1, 2, 3, 0, 1], [4] * 8, [0, 0, 1, 2, 3, 0, 1, 2]]
    seen = dialog.stop_sequence_seen(torch.tensor(rows), table)
    assert seen[:, -1].tolist() == [False, False, False, True]
    assert dialog.response_lengths(seen.long(), 1).tolist() == [8, 8, 8, 5]
    assert dialog.stop_sequence_seen(torch.tensor([[5], [3]]), table).tolist() == [[True], [False]]


# ---- The table for a tokenizer -----------------------------------------------------------------------------

SENTENCES = ("I am fine", "no", "Is 3 < 4", "café, naïve €", "<EO", "so <EO and U>")
UTTERANCES = [f"{text}{end}" for text in SENTENCES for end in ("", ".", "?!", "<")]


def merging_tokenizer():
    """A tokenizer that has merged <EOU> with the characters around it (".<", "EOU", ">.")."""
    texts = []
    for word in ("fine", "no"):
        for sign in (".", "?", "!", "<", ""):
            for gap in ("", " "):
                for after in ("", ".", " <EOU>"):
                    texts.append(f"{word}{sign}{gap}<EOU>{after}")
    return byte_level_tokenizer(texts * 3, 330)


@pytest.fixture(scope="module", params=["reviews", "merging", "metaspace"])
def tokenizer(request, metaspace_lm):
    """GPT-2's kind, the same after merging the mark with its neighbours, and Llama's kind."""
    if request.param == "reviews":
        return byte_level_tokenizer()
    if request.param == "merging":
        return merging_tokenizer()
    return AutoTokenizer.from_pretrained(metaspace_lm)


def ids_of_text(tokenizer, text):
    return tokenizer(text, add_special_tokens=False).input_ids


def mark_of(tokenizer):
    """A mark that this tokenizer can write."""
    knows_eou = tokenizer.decode(ids_of_text(tokenizer, EOU)).strip() == EOU.strip()
    return EOU if knows_eou else METASPACE_MARK


def table_for(tokenizer, mark, num_more=0):
    """build_stop_table for this mark. The embedding has `num_more` more rows than there are tokens."""
    head = torch.nn.Embedding(len(tokenizer) + num_more, 1)
    policy = SimpleNamespace(base_model=None, get_output_embeddings=lambda: head)
    return dialog.build_stop_table(dialog.Args(utterance_end=mark), tokenizer, policy)


def length_until(tokenizer, ids, mark):
    """After how many tokens the decoded text has the mark. None: never."""
    for n in range(1, len(ids) + 1):
        if mark.strip() in tokenizer.decode(ids[:n]):
            return n
    return None


@pytest.mark.parametrize("gap", [" ", ""])
def test_every_utterance_ends_where_its_mark_does(tokenizer, gap):
    """With and without a sign before the mark, merged with it or not. What is left is what was said."""
    mark = mark_of(tokenizer)
    table = table_for(tokenizer, mark)
    tokens_of_marks = set()
    for ids, text in zip(dialog.utterance_ids(tokenizer, UTTERANCES, gap + mark.strip()), UTTERANCES):
        seen = dialog.stop_sequence_seen(torch.tensor([ids + ids]), table)
        length = int(dialog.response_lengths(seen.long(), 1))
        assert length == length_until(tokenizer, ids, mark) == len(ids)
        text_ids = ids_of_text(tokenizer, f" {text}")
        known_text = tokenizer.decode(text_ids).strip()  # without letters that the tokenizer does not know
        assert dialog.answer_text(tokenizer, ids, gap + mark.strip()) == known_text
        assert known_text == text or mark is METASPACE_MARK
        tokens_of_marks.add(len(ids) - len(text_ids))
    if ".<" in tokenizer.get_vocab() and gap == "":
        assert len(tokens_of_marks) > 1, "the mark was never merged with a neighbour"


def test_every_spelling_of_a_mark_is_found(tokenizer):
    """However the vocabulary can spell it: a policy need not split it as the tokenizer does."""
    mark, pieces = mark_of(tokenizer), {}
    table = table_for(tokenizer, mark)
    for token in range(len(tokenizer)):
        text = tokenizer.decode([tokenizer.eos_token_id, token]).removeprefix(tokenizer.eos_token)
        pieces.setdefault(text, token)
    spellings = []
    for cut in [*cuts(mark.strip()), *cuts(mark)]:
        if all(piece in pieces for piece in cut):
            spellings.append([pieces[piece] for piece in cut])
    assert len(spellings) >= 2
    for ids in spellings:
        for before in ([], ids_of_text(tokenizer, "It is")):
            seen = dialog.stop_sequence_seen(torch.tensor([before + ids + before]), table)[0].tolist()
            last = len(before + ids) - 1
            assert seen == [t >= last for t in range(len(seen))]


def test_random_tokens_stop_where_their_text_does(tokenizer):
    """Rows of tokens with letters of the mark, half of them with the mark, against their decoded text."""
    mark, generator = mark_of(tokenizer), torch.Generator().manual_seed(0)
    table = table_for(tokenizer, mark)
    mark_ids = ids_of_text(tokenizer, mark.strip())
    similar = []
    for token in range(len(tokenizer)):
        is_special = token in tokenizer.all_special_ids
        if not is_special and set(tokenizer.decode([token]).strip()) & set(mark.strip()):
            similar.append(token)
    rows = torch.tensor(similar)[torch.randint(len(similar), (200, 24), generator=generator)]
    for row, place in zip(rows[::2], torch.randint(24, (100,), generator=generator).tolist()):
        row[place : place + len(mark_ids)] = torch.tensor(mark_ids[: 24 - place])  # may be cut off at the end
    lengths = dialog.response_lengths(dialog.stop_sequence_seen(rows, table).long(), 1)
    expected = [length_until(tokenizer, row, mark) for row in rows.tolist()]
    assert lengths.tolist() == [length or 24 for length in expected]
    assert 50 < sum(length is not None for length in expected) < 150


@pytest.mark.parametrize("end", ["mark", "eos"])
def test_eos_ends_an_answer_too(tokenizer, end):
    """Alone, after half a mark, and twice. If EOS is the end, a mark is not."""
    mark, eos = mark_of(tokenizer), tokenizer.eos_token_id
    mark_ids = ids_of_text(tokenizer, mark)
    table = table_for(tokenizer, mark if end == "mark" else "eos")
    rows = [[eos, *mark_ids], [*mark_ids[:-1], eos, eos], [*mark_ids, eos]]
    lengths = []
    for row in rows:
        seen = dialog.stop_sequence_seen(torch.tensor([row]), table)
        lengths.append(int(dialog.response_lengths(seen.long(), 1)))
    assert lengths == [1, len(mark_ids), len(mark_ids) + (end == "eos")]
    assert not dialog.stop_sequence_seen(torch.tensor([mark_ids[:-1]]), table).any()


@pytest.mark.parametrize("end", ["mark", "eos"])
def test_an_embedding_with_more_rows_than_tokens(tokenizer, end):
    """A token that the tokenizer does not have is no text: it leaves each state as it is."""
    mark, n = mark_of(tokenizer) if end == "mark" else "eos", len(tokenizer)
    table, plain_table = table_for(tokenizer, mark, num_more=7), table_for(tokenizer, mark)
    assert table.shape[1] == n + 7
    assert torch.equal(table[:, :n], plain_table)
    unchanged = torch.arange(len(table))[:, None].expand(-1, 7)
    assert torch.equal(table[:, n:], unchanged)


# ---- Generation --------------------------------------------------------------------------------------------

MARK = "er"  # common enough that a random model writes it


@pytest.fixture(scope="module")
def generation(tiny_lm):
    """A random model, its tokenizer, the table of MARK, and prompts to continue."""
    model = AutoModelForCausalLM.from_pretrained(tiny_lm()).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm())
    ids, mask = left_padded([random_ids(1 + i % 5, seed=i) for i in range(32)], 5)
    uniforms = torch.rand(32, 24, generator=torch.Generator().manual_seed(0))
    return SimpleNamespace(
        model=model,
        tokenizer=tokenizer,
        table=table_for(tokenizer, MARK),
        inputs=(ids, mask, uniforms),
    )


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_generation_until_a_mark(generation, temperature):
    """An answer ends with the token that completes the mark in its text, or at EOS. Then there are zeros."""
    g = generation
    tokens, logprobs = dialog.generate_until(g.model, *g.inputs, g.table, temperature)
    lengths = []
    for row, row_logprobs in zip(tokens.tolist(), logprobs):
        ends = [24, length_until(g.tokenizer, row, MARK)]
        if g.tokenizer.eos_token_id in row:
            ends.append(row.index(g.tokenizer.eos_token_id) + 1)
        length = min(end for end in ends if end is not None)
        assert not any(row[length:])
        assert (row_logprobs[:length] < 0).all()
        assert not row_logprobs[length:].any()
        lengths.append(length)
    seen = dialog.stop_sequence_seen(tokens, g.table)
    assert dialog.response_lengths(seen.long(), 1).tolist() == lengths
    assert len(set(lengths)) > 3
    assert sum(length < 24 for length in lengths) >= 8


def test_rows_that_end_early_change_nothing_for_the_others(generation):
    """Each row alone gets the same tokens."""
    g = generation
    tokens, _ = dialog.generate_until(g.model, *g.inputs, g.table, 1.0)
    for i in range(8):
        row = [x[i : i + 1] for x in g.inputs]
        alone, _ = dialog.generate_until(g.model, *row, g.table, 1.0)
        assert torch.equal(alone[0], tokens[i])


def test_on_token_sees_every_token(generation):
    """The first row while it grows, and how much of the mark it ends with."""
    g = generation
    lengths_of_rows, states = [], set()
    for i in range(12):
        calls = []

        def on_token(tokens, state, calls=calls):
            calls.append((tokens.tolist(), state))

        row = [x[i : i + 1] for x in g.inputs]
        tokens, _ = dialog.generate_until(g.model, *row, g.table, 1.0, on_token)
        length = int(dialog.response_lengths(dialog.stop_sequence_seen(tokens, g.table).long(), 1))
        lengths_of_rows.append(length)
        assert [shown for shown, _ in calls] == [tokens[0, :t].tolist() for t in range(1, length + 1)]
        for shown, state in calls:
            is_eos = shown[-1] == g.tokenizer.eos_token_id
            assert (
                state == 2 if is_eos else state == naive.stop_sequence_state(g.tokenizer.decode(shown), MARK)
            )
            states.add(state)
    assert min(lengths_of_rows) < 24
    assert states == {0, 1, 2}
