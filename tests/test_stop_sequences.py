"""Where an answer ends: the automaton of the stop sequence, its table for real tokenizers, and generation until it.

`k` is the script under test. The reference decodes the text so far and looks whether the mark is in it.
"""

from itertools import combinations

import naive
import pytest
import torch
from conftest import byte_level_tokenizer, shipping
from hypothesis import given, settings
from hypothesis import strategies as st
from run_tools import eos_prone
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest_plugins = ["run_fixtures"]
many = settings(max_examples=200, deadline=None, derandomize=True)
EOU, METASPACE_MARK = " <EOU>", " -AN END-"  # the second one is of letters that the tokenizer of metaspace_lm knows


def walk(table, tokens):
    """The states of the automaton after each token of one row."""
    states = [0]
    for token in tokens:
        states.append(int(table[states[-1], token]))
    return states[1:]


def cuts(text):
    """Every way to cut a text into pieces. -> lists of str"""
    for count in range(len(text)):
        for places in combinations(range(1, len(text)), count):
            yield [text[a:b] for a, b in zip((0, *places), (*places, len(text)))]


def assert_found(k, pieces, tokens, stop):
    """The automaton says after each token of each row what the text so far says."""
    table = k.stop_sequence_table(pieces, stop)
    assert table.shape == (len(stop) + 1, len(pieces))
    held = [[naive.stop_sequence_held("".join(pieces[i] for i in row[: t + 1]), stop) for t in range(len(row))] for row in tokens]
    assert [walk(table, row) for row in tokens] == held
    seen = k.stop_sequence_seen(torch.tensor(tokens), table)
    assert seen.dtype is torch.bool and seen.tolist() == [[state == len(stop) for state in row] for row in held]


# ---- the automaton ---------------------------------------------------------------------------------------------------
@st.composite
def texts(draw):
    """(pieces, rows of tokens of one length, stop sequence), all of few letters, so that beginnings of the stop often occur."""
    letters = draw(st.sampled_from(["ab", "abc", "<EOU>. "]))
    known = st.sampled_from(["aab", "abab", "aaa", "abaab", "<EOU>", "<EO<EOU>", "<<E"])
    stop = draw(known | st.text(letters, min_size=1, max_size=6))
    part = st.tuples(st.integers(0, len(stop)), st.integers(0, len(stop))).map(lambda ends: stop[min(ends) : max(ends)])
    piece = part | st.text(letters, max_size=4) | st.tuples(st.text(letters, max_size=2), part, st.text(letters, max_size=2)).map("".join)
    pieces = draw(st.lists(piece, min_size=1, max_size=8))
    T = draw(st.integers(1, 8))
    row = st.lists(st.integers(0, len(pieces) - 1), min_size=T, max_size=T)
    return pieces, draw(st.lists(row, min_size=1, max_size=4)), stop


@shipping("stop_sequence_table", "stop_sequence_seen")
@given(texts())
@many
def test_stop_sequences_agree_with_naive(k, case):
    """Random vocabularies and stop sequences, also such as overlap themselves, and T = 1."""
    pieces, tokens, stop = case
    assert_found(k, pieces, tokens, stop)


@shipping("stop_sequence_table")
def test_stop_sequence_table_by_hand(k):
    """aab, which overlaps itself: after "aa" another a still leaves "aa". A text that had it stays in the last row."""
    pieces = ["a", "b", "aa", "ab", "baab c", ""]
    table = [[1, 0, 2, 0, 3, 0], [2, 0, 2, 3, 3, 1], [2, 3, 2, 3, 3, 2], [3] * 6]
    assert k.stop_sequence_table(pieces, "aab").tolist() == table


@shipping("stop_sequence_table", "stop_sequence_seen")
@pytest.mark.parametrize("before, behind", [("", ""), (".", ""), ("", "!"), ("<", ""), ("<EO", ">"), ("fine.", "<EOU")])
def test_mark_cut_in_all_ways(k, before, behind):
    """All 16 cuts of <EOU>, whose ends merge with what stands beside them: it is there with its last piece and not before."""
    for cut in cuts("<EOU>"):
        pieces = ["yes", before + cut[0], *cut[1:]]
        pieces[-1] += behind
        tokens = list(range(len(pieces))) + [0, 0]  # each piece is a token
        assert_found(k, pieces, [tokens], "<EOU>")
        seen = k.stop_sequence_seen(torch.tensor([tokens]), k.stop_sequence_table(pieces, "<EOU>"))
        assert seen.tolist() == [[t >= len(pieces) - 1 for t in range(len(tokens))]]


@shipping("stop_sequence_table", "stop_sequence_seen")
def test_a_mark_that_never_comes(k):
    """Nearly the mark, again and again, and then the same with its last letter; responses of one token."""
    pieces = ["<", "EO", "U", ">", " ", "<EOU>"]
    table = k.stop_sequence_table(pieces, "<EOU>")
    tokens = torch.tensor([[0, 1, 2, 4, 3, 0, 1, 3], [0, 0, 1, 1, 2, 3, 0, 1], [4] * 8, [0, 0, 1, 2, 3, 0, 1, 2]])
    assert k.stop_sequence_seen(tokens, table)[:, -1].tolist() == [False, False, False, True]
    assert k.stop_sequence_seen(torch.tensor([[5], [3]]), table).tolist() == [[True], [False]]
    lengths = k.response_lengths(k.stop_sequence_seen(tokens, table), True)
    assert lengths.tolist() == [8, 8, 8, 5]


# ---- the table for a tokenizer ---------------------------------------------------------------------------------------
SAID = ("I am fine", "no", "Is 3 < 4", "café, naïve €", "<EO", "so <EO and U>")
WRITTEN = [f"{text}{end}" for text in SAID for end in ("", ".", "?!", "<")]


@pytest.fixture(scope="module", params=["reviews", "merging", "metaspace"])
def tokenizer(request, metaspace_lm):
    """GPT-2's kind, one that has merged marks with the signs beside them (".<", "EOU", ">."), and Llama's kind."""
    if request.param == "metaspace":
        return AutoTokenizer.from_pretrained(metaspace_lm)
    merges = [f"{word}{sign}{gap}<EOU>{behind}" for word in ("fine", "no") for sign in (".", "?", "!", "<", "") for gap in ("", " ")
              for behind in ("", ".", " <EOU>")]  # fmt: skip
    return byte_level_tokenizer(merges * 3 if request.param == "merging" else None, 330)


def mark_of(tokenizer):
    """The mark that this tokenizer can write."""
    return EOU if tokenizer.decode(tokenizer(EOU, add_special_tokens=False).input_ids).strip() == EOU.strip() else METASPACE_MARK


def stops_of(k, tokenizer, mark, more=0):
    """load_stops for this mark, and an embedding with more rows than the tokenizer has tokens."""
    return k.load_stops(tokenizer, len(tokenizer) + more, k.Args(utterance_end=mark))


def said_until(tokenizer, ids, mark):
    """After how many tokens the decoded text has the mark. None: never."""
    return next((n for n in range(1, len(ids) + 1) if mark.strip() in tokenizer.decode(ids[:n])), None)


@shipping("stop_sequence_table", "stop_sequence_seen")
@pytest.mark.parametrize("gap", [" ", ""])
def test_every_utterance_ends_where_its_mark_does(k, tokenizer, gap):
    """With and without a sign before the mark, merged with it or not: seen at the token that completes it, and what was said is left."""
    mark = mark_of(tokenizer)
    stops, lengths = stops_of(k, tokenizer, mark), set()
    for ids, text in zip(k.utterance_ids(tokenizer, WRITTEN, gap + mark.strip()), WRITTEN):
        seen = k.stop_sequence_seen(torch.tensor([ids + ids]), stops)
        n = int(k.response_lengths(seen, True))
        assert n == said_until(tokenizer, ids, mark) == len(ids)
        said = tokenizer.decode(tokenizer(f" {text}", add_special_tokens=False).input_ids).strip()  # as far as it knows the letters
        assert k.answer_text(tokenizer, ids, gap + mark.strip()) == said and (said == text or mark is METASPACE_MARK)
        lengths.add(len(ids) - len(tokenizer(f" {text}", add_special_tokens=False).input_ids))
    assert len(lengths) > 1 or gap == " " or ".<" not in tokenizer.get_vocab()  # it did merge


@shipping("stop_sequence_table", "stop_sequence_seen")
def test_every_spelling_of_a_mark_is_found(k, tokenizer):
    """However the vocabulary can spell it: a policy is not bound to the tokenizer's own cut."""
    mark, pieces = mark_of(tokenizer), {}
    stops = stops_of(k, tokenizer, mark)
    for i in range(len(tokenizer)):
        pieces.setdefault(tokenizer.decode([tokenizer.eos_token_id, i]).removeprefix(tokenizer.eos_token), i)
    spellings = [[pieces[piece] for piece in cut] for cut in cuts(mark.strip()) if all(piece in pieces for piece in cut)]
    spellings += [[pieces[piece] for piece in cut] for cut in cuts(mark) if all(piece in pieces for piece in cut)]
    assert len(spellings) >= 2
    for ids in spellings:
        for before in ([], tokenizer("It is").input_ids):
            seen = k.stop_sequence_seen(torch.tensor([before + ids + before]), stops)[0].tolist()
            assert seen == [t >= len(before + ids) - 1 for t in range(len(seen))]


@shipping("stop_sequence_table", "stop_sequence_seen")
def test_random_tokens_stop_where_their_text_does(k, tokenizer):
    """Rows of tokens that have letters of the mark, against the decoded text so far."""
    mark, draws = mark_of(tokenizer), torch.Generator().manual_seed(0)
    stops, written = stops_of(k, tokenizer, mark), tokenizer(mark.strip(), add_special_tokens=False).input_ids
    ordinary = [i for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids]
    near = torch.tensor([i for i in ordinary if set(tokenizer.decode([i]).strip()) & set(mark.strip())])
    rows = near[torch.randint(len(near), (200, 24), generator=draws)]
    for row, place in zip(rows[::2], torch.randint(24, (100,), generator=draws).tolist()):
        row[place : place + len(written)] = torch.tensor(written[: 24 - place])  # whole, or cut by the end
    lengths = k.response_lengths(k.stop_sequence_seen(rows, stops), True)
    found = [said_until(tokenizer, row, mark) for row in rows.tolist()]
    assert lengths.tolist() == [n or 24 for n in found] and 50 < sum(n is not None for n in found) < 150


@shipping("stop_sequence_table", "stop_sequence_seen")
@pytest.mark.parametrize("end", ["mark", "eos"])
def test_eos_ends_too(k, tokenizer, end):
    """Alone, behind half a mark, and twice; where EOS is the end, no mark is."""
    mark, eos = mark_of(tokenizer), tokenizer.eos_token_id
    written = tokenizer(mark, add_special_tokens=False).input_ids
    stops = stops_of(k, tokenizer, mark if end == "mark" else "eos")
    rows = [[eos, *written], [*written[:-1], eos, eos], [*written, eos]]
    lengths = [int(k.response_lengths(k.stop_sequence_seen(torch.tensor([row]), stops), True)) for row in rows]
    assert lengths == [1, len(written), len(written) + (end == "eos")]
    assert not (k.stop_sequence_seen(torch.tensor([written[:-1]]), stops)).any()


@shipping("stop_sequence_table")
@pytest.mark.parametrize("end", ["mark", "eos"])
def test_embedding_with_more_rows_than_tokens(k, tokenizer, end):
    """A token that the tokenizer does not know says nothing: it neither ends nor goes on with a mark."""
    mark = mark_of(tokenizer) if end == "mark" else "eos"
    stops, plain = stops_of(k, tokenizer, mark, more=7), stops_of(k, tokenizer, mark)
    assert torch.equal(stops[:, : len(tokenizer)], plain) and stops.shape[1] == len(tokenizer) + 7
    assert torch.equal(stops[:, len(tokenizer) :], torch.arange(len(stops))[:, None].expand(-1, 7))


# ---- generation ------------------------------------------------------------------------------------------------------
def prompts_of(k, talker, count=12):
    """(model, tokenizer, left-padded prompts, their mask, uniforms) for the talker."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(talker.model).eval(), AutoTokenizer.from_pretrained(talker.model)
    args = k.Args(utterance_end=EOU, dataset_name=talker.data, response_length=24)
    turns = (k.load_turns(k.load_splits(talker.data)[0], tokenizer, None, args) * count)[:count]
    return model, tokenizer, *k.draw_prompts(turns, args, "here")


@shipping("stop_sequence_table", "stop_sequence_seen")
def test_generation_until_eos_is_that_of_ppo_sentiment(k, scripts, tiny_lm, tmp_path):
    """With the end eos, and the same uniforms: the tokens and lengths of the other script."""
    folder = eos_prone(tiny_lm, tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    draws = torch.Generator().manual_seed(0)
    ids, uniforms = torch.randint(3, 1000, (16, 5), generator=draws), torch.rand(16, 9, generator=draws)
    mask = k.length_mask(torch.tensor([1, 5, 2, 3, 4, 5, 1, 2] * 2), 5).flip(1)
    tokens, lengths, stopped = k.generate_until(model, ids, mask, uniforms, stops_of(k, tokenizer, "eos"), 0.8)
    room, eos = torch.full((16,), 9), tokenizer.eos_token_id
    others = scripts["ppo_sentiment"].generate(model, ids, mask, room, uniforms, eos, 0.8)
    assert torch.equal(tokens, others[0]) and torch.equal(lengths, others[1]) and len(lengths.unique()) > 3
    assert torch.equal(stopped, (tokens == eos).any(1)) and 0 < stopped.sum() < 16


@shipping("stop_sequence_table", "stop_sequence_seen")
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_generation_until_a_mark(k, talker, temperature):
    """Lengths are those of the decoded text; behind them stand zeros; rows that end early change nothing for the others."""
    model, tokenizer, ids, mask, uniforms = prompts_of(k, talker)
    stops = stops_of(k, tokenizer, EOU)
    tokens, lengths, stopped = k.generate_until(model, ids, mask, uniforms, stops, temperature)
    for row, n, whole in zip(tokens.tolist(), lengths.tolist(), stopped.tolist()):
        ends = [said_until(tokenizer, row, EOU), row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else None]
        assert whole == any(ends) and n == min(filter(None, [*ends, 24])) and not any(row[n:])
    assert len(lengths.unique()) > 3 and stopped.sum() >= 6
    for i in range(len(ids)):
        alone = k.generate_until(model, *(x[i : i + 1] for x in (ids, mask, uniforms)), stops, temperature)
        assert torch.equal(alone[0][0], tokens[i]) and alone[1:] == (lengths[i], stopped[i])


@shipping("stop_sequence_table", "stop_sequence_seen")
def test_watch_sees_every_token(k, talker):
    """The first row as it grows, and how much of the mark it ends with."""
    model, tokenizer, ids, mask, uniforms = prompts_of(k, talker, 1)
    shown = []
    watch = lambda tokens, held: shown.append((tokens.tolist(), held))  # noqa: E731
    tokens, lengths, _ = k.generate_until(model, ids, mask, uniforms, stops_of(k, tokenizer, EOU), 0.7, watch)
    n = int(lengths[0])
    assert [row for row, _ in shown] == [tokens[0, : t + 1].tolist() for t in range(n)] and 3 < n < 24
    assert [held for _, held in shown] == [naive.stop_sequence_held(tokenizer.decode(row), "<EOU>") for row, _ in shown]
    assert {1, 5} <= {held for _, held in shown}
