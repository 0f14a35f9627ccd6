"""Pairs of words: what shows that a policy repeats itself."""

import pytest
from conftest import module_with

distinct_bigrams = module_with("gae", "distinct_bigrams").distinct_bigrams


@pytest.mark.parametrize(
    "texts, share",
    [
        (["the film was", "The  film is", "superb"], 3 / 4),  # the film, film was | the film, film is
        (["a b", "b a"], 1),  # no pair "b b": pairs do not span texts
        (["a b", "a b", "a b", "b a"], 2 / 4),
        (["", "one"], 0),
    ],
)
def test_distinct_bigrams_by_hand(texts, share):
    assert distinct_bigrams(texts) == share
