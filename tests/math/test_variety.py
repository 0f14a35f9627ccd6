"""Words and pairs of words: what shows that a policy repeats itself."""

import pytest

import ppo_sentiment as script


def test_distinct_bigrams_by_hand():
    """Pairs: the film, film was | The film, film is | (none). Three different ones of four."""
    assert script.distinct_bigrams(["the film was", "The  film is", "superb"]) == 3 / 4


def test_distinct_bigrams_do_not_span_texts():
    """Of "a b" and "b a", no pair "b b"."""
    assert script.distinct_bigrams(["a b", "b a"]) == 1
    assert script.distinct_bigrams(["a b", "a b", "a b", "b a"]) == 2 / 4


@pytest.mark.parametrize("texts", [["word"], [""], ["", "one"]])
def test_distinct_bigrams_without_pairs(texts):
    assert script.distinct_bigrams(texts) == 0


def test_word_shares_count_texts():
    """A word counts once per text, in any case. Words of three letters, numbers and "every" do not count."""
    shares = script.word_shares(["Good, good film!", "Every bad film.", "film1999 été superbe", "not one"])
    assert shares == {"good": 1 / 4, "film": 3 / 4, "superbe": 1 / 4}


def test_the_commonest_new_word_at_least_doubled():
    """ "film" is in more texts, but was in half of them before; "great" is in 3 of 4, before in 1 of 4."""
    before = ["great film", "bad film", "it was long", "no"]
    after = ["great film", "great fun film", "great, great", "superb film"]
    assert script.commonest_new_word(before, after) == ("great", 1 / 4, 3 / 4)


def test_exactly_twice_as_common_is_new():
    assert script.commonest_new_word(["good", "x", "x", "x"], ["good", "good", "x", "x"]) == (
        "good",
        0.25,
        0.5,
    )
    assert script.commonest_new_word(["good", "good", "x", "x"], ["good"] * 3 + ["x"]) == ("", 0.0, 0.0)


def test_a_tie_goes_to_the_first_of_the_alphabet():
    """Whatever the order of the texts, so that a run can be repeated."""
    assert script.commonest_new_word(["x"], ["zebra apple", "mango"])[0] == "apple"
    assert script.commonest_new_word(["x"], ["mango", "apple zebra"])[0] == "apple"


def metrics(share, episode=128, update=1):
    """Metrics of a healthy update, but for the share of a new word."""
    return {
        "update": update,
        "episode": episode,
        "objective/kl": 3.0,
        "val/ratio": 1.0,
        "policy/entropy_avg": 1.0,
        "env/reward_std": 1.0,
        "val/num_eos_tokens": 3,
        "completions/new_word_share": share,
    }


def test_a_collapse_is_named():
    """A word in a quarter of the responses and in at least 10, five times as common as before."""

    def warn(before, after, **changes):
        return script.health_warnings(metrics(after, **changes), script.Args(), ("superb", before, after))

    assert list(warn(0.05, 0.25)) == ["completions/new_word_share"]
    assert '"superb" is in 25% of the responses, before training in 5%' in warn(0.05, 0.25).popitem()[1]
    assert warn(0.0, 0.24) == {}
    assert warn(0.051, 0.25) == {}
    assert warn(0.0, 0.5, episode=36, update=2) == {}  # 9 of 18
    assert warn(0.0, 0.6, episode=36, update=2) != {}


class Screen:
    """What Run.print shows."""

    def __init__(self):
        self.lines = []

    def print(self, text, style=None):
        self.lines.append(text)


def test_the_report_of_a_collapse():
    """The final table names the word and its shares before and after, and lines below it warn."""
    before, after = ["a good film"] * 9 + ["superb film"], ["superb film"] * 4 + ["a good film"] * 6
    row = script.new_word_row(before, after)
    assert row == {"metric": 'commonest new word: "superb"', "before": 0.1, "after": 0.4}
    screen = Screen()
    script.report_collapse(screen, row, 0.5, 0.39)
    assert '"superb" is in 40% of the responses, before in 10%' in screen.lines[0]
    assert "78% of their first value" in screen.lines[1]
    healthy = Screen()
    script.report_collapse(healthy, row | {"after": 0.15}, 0.5, 0.4)
    assert healthy.lines == []
