"""Where an answer ends: generate and load_end_criteria of ppo_dialog.py, with several tokenizers.

The reference decodes the text so far, and looks whether the end mark is in it.
"""

from types import SimpleNamespace

import pytest
import torch
from conftest import byte_level_tokenizer
from math_tools import left_padded, random_ids
from transformers import AutoModelForCausalLM, AutoTokenizer

import check
import ppo_dialog as dialog

pytest_plugins = ["run_fixtures"]
EOU = " <EOU>"
METASPACE_MARK = " -AN END-"  # of letters that the tokenizer of metaspace_lm knows


@pytest.fixture(scope="module", params=["reviews", "merging", "metaspace"])
def tokenizer(request, bang_lm, metaspace_lm):
    """GPT-2's kind, the same after merging the end of the mark with "!", and Llama's kind."""
    if request.param == "reviews":
        return byte_level_tokenizer()
    return AutoTokenizer.from_pretrained(bang_lm() if request.param == "merging" else metaspace_lm)


def ids_of_text(tokenizer, text):
    return tokenizer(text, add_special_tokens=False).input_ids


def mark_of(tokenizer):
    """A mark that this tokenizer can write."""
    knows_eou = tokenizer.decode(ids_of_text(tokenizer, EOU)).strip() == EOU.strip()
    return EOU if knows_eou else METASPACE_MARK


def length_of(tokenizer, ids, mark):
    """After how many tokens the script says that a row has ended. None: never."""
    is_end = dialog.load_end_criteria(dialog.Args(utterance_end=mark), tokenizer)
    for n in range(1, len(ids) + 1):
        if is_end(torch.tensor([ids[:n]]), None).item():
            return n
    return None


def length_until(tokenizer, ids, mark):
    """After how many tokens the decoded text has the mark. None: never."""
    for n in range(1, len(ids) + 1):
        if mark.strip() in tokenizer.decode(ids[:n]):
            return n
    return None


def test_random_tokens_stop_where_their_text_does(tokenizer):
    """Rows of tokens with letters of the mark, half of them with the mark, against their decoded text."""
    mark, generator = mark_of(tokenizer), torch.Generator().manual_seed(0)
    mark_ids = ids_of_text(tokenizer, mark.strip())
    similar = []
    for token in range(len(tokenizer)):
        is_special = token in tokenizer.all_special_ids
        if not is_special and set(tokenizer.decode([token]).strip()) & set(mark.strip()):
            similar.append(token)
    rows = torch.tensor(similar)[torch.randint(len(similar), (200, 24), generator=generator)]
    for row, place in zip(rows[::2], torch.randint(24, (100,), generator=generator).tolist()):
        row[place : place + len(mark_ids)] = torch.tensor(mark_ids[: 24 - place])  # may be cut off at the end
    expected = [length_until(tokenizer, row, mark) for row in rows.tolist()]
    assert [length_of(tokenizer, row, mark) for row in rows.tolist()] == expected
    assert 50 < sum(length is not None for length in expected) < 150


@pytest.mark.parametrize("end", ["mark", "eos"])
def test_eos_ends_an_answer_too(tokenizer, end):
    """Alone, and after half a mark. If EOS is the end, a mark is not."""
    mark, eos = mark_of(tokenizer), tokenizer.eos_token_id
    mark_ids = ids_of_text(tokenizer, mark)
    flag = mark if end == "mark" else "eos"
    rows = [[eos, *mark_ids], [*mark_ids[:-1], eos, eos], [*mark_ids, eos]]
    lengths = [length_of(tokenizer, row, flag) for row in rows]
    assert lengths == [1, len(mark_ids), len(mark_ids) + (end == "eos")]
    assert length_of(tokenizer, mark_ids[:-1], flag) is None


def test_a_mark_that_cannot_be_written_is_refused(small, metaspace_lm):
    """It would never be found, and no answer would end."""
    args = small("ppo_dialog", model_name_or_path=metaspace_lm, utterance_end=" ⟂")
    [error] = check.errors(dialog, args)
    assert "--utterance-end '⟂'" in error and "cannot write it" in error


# ---- Generation --------------------------------------------------------------------------------------------

MARK = "er"  # common enough that a random model writes it


@pytest.fixture(scope="module")
def generation(tiny_lm):
    """A random model, its tokenizer, what ends an answer, and prompts to continue."""
    model = AutoModelForCausalLM.from_pretrained(tiny_lm()).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm())
    ids, mask = left_padded([random_ids(1 + i % 5, seed=i) for i in range(32)], 5)
    generator = torch.Generator().manual_seed(0)
    uniforms = torch.rand(32, 24, dtype=torch.float64, generator=generator)
    is_end = dialog.load_end_criteria(dialog.Args(utterance_end=MARK), tokenizer)
    return SimpleNamespace(model=model, tokenizer=tokenizer, is_end=is_end, inputs=(ids, mask, uniforms))


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_generation_until_a_mark(generation, temperature):
    """An answer ends with the token that completes the mark in its text, or at EOS. Then there are zeros."""
    g = generation
    tokens, logprobs, lengths, stopped = dialog.generate(g.model, *g.inputs, g.is_end, temperature)
    expected = []
    for row, row_logprobs in zip(tokens.tolist(), logprobs):
        ends = [length_until(g.tokenizer, row, MARK)]
        if g.tokenizer.eos_token_id in row:
            ends.append(row.index(g.tokenizer.eos_token_id) + 1)
        ends = [end for end in ends if end is not None]
        length = min(ends, default=24)
        assert not any(row[length:])
        assert (row_logprobs[:length] < 0).all()
        assert not row_logprobs[length:].any()
        expected.append((length, bool(ends)))
    assert list(zip(lengths.tolist(), stopped.tolist())) == expected
    assert len(set(lengths.tolist())) > 3
    assert stopped.sum() >= 8


def test_a_mark_that_the_prompt_began_does_not_end_the_answer(generation, monkeypatch):
    """The prompt ends with "e", the answer begins with "r": that is no mark of the answer."""
    g = generation
    e, r = (g.tokenizer.convert_tokens_to_ids(letter) for letter in "er")
    spoken = iter([r, e, r])
    monkeypatch.setattr(dialog, "sample_tokens", lambda probs, _: torch.tensor([next(spoken)]))
    ids = torch.tensor([[e, e]])
    inputs = ids, torch.ones_like(ids, dtype=torch.bool), torch.rand(1, 9, dtype=torch.float64)
    _, _, lengths, stopped = dialog.generate(g.model, *inputs, g.is_end, 1.0)
    assert (lengths.item(), stopped.item()) == (3, True)
