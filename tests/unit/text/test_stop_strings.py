from __future__ import annotations

import time

import pytest

from engine.text.stop_strings import StopMatch, StopMatcher


def feed_all(stops: list[str], pieces: list[str]) -> tuple[int, StopMatch | None]:
    """Index of the piece that completed a stop string, and the match."""
    matcher = StopMatcher(stops)
    for index, piece in enumerate(pieces):
        match = matcher.feed(piece)
        if match:
            return index, match
    return len(pieces), None


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (["END"], ["the END of it"], (0, StopMatch("END", 7))),
        (["END"], ["the E", "N", "D of it"], (2, StopMatch("END", 1))),
        (["END"], ["EEN", "EN", "D"], (2, StopMatch("END", 1))),
        (["aab"], ["aaa", "ab"], (1, StopMatch("aab", 2))),
        (["abab"], ["aba", "abab"], (1, StopMatch("abab", 4))),
        (["\n\n"], ["a\n", "b\n", "\nc"], (2, StopMatch("\n\n", 1))),
        (["你好"], ["说你", "好吗"], (1, StopMatch("你好", 1))),
        (["x"], ["", "yx"], (1, StopMatch("x", 2))),
        (["END"], ["EN", "EN", "E"], (3, None)),
    ],
)
def test_finds_a_stop_string_wherever_it_is_cut(
    stops: list[str], pieces: list[str], expected: tuple[int, StopMatch | None]
) -> None:
    assert feed_all(stops, pieces) == expected


def test_the_first_completed_wins_even_when_another_began_earlier() -> None:
    assert feed_all(["abcd", "bc"], ["abcd"]) == (0, StopMatch("bc", 3))
    assert feed_all(["abcd", "bc"], list("abcd")) == (2, StopMatch("bc", 1))


def test_the_longest_wins_among_those_completed_together() -> None:
    assert feed_all(["c", "abc", "bc"], ["xabc"]) == (0, StopMatch("abc", 4))
    assert feed_all(["c", "bc", "abc"], ["xa", "b", "c"]) == (2, StopMatch("abc", 1))


def test_holds_exactly_the_longest_end_that_could_become_a_stop() -> None:
    matcher = StopMatcher(["abcx", "bcy"])
    held = []
    for character in "zabcabczb":
        assert matcher.feed(character) is None
        held.append(matcher.num_held)
    assert held == [0, 1, 2, 3, 1, 2, 3, 0, 1]


def test_an_ignored_match_does_not_count_but_its_end_may_begin_another() -> None:
    matcher = StopMatcher(["aba"])
    assert matcher.feed("aba", ignore=True) is None
    assert matcher.num_held == 1
    assert matcher.feed("ba") == StopMatch("aba", 2)


def test_an_ignored_match_does_not_hide_a_later_one_in_the_same_piece() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.feed("ab ab a", ignore=True) is None
    assert matcher.feed("b") == StopMatch("ab", 1)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(AssertionError, match="everywhere"):
        StopMatcher(["x", ""])


@pytest.mark.parametrize("pieces", [1, 1000])
def test_the_worst_text_costs_time_linear_in_its_length(pieces: int) -> None:
    """A stop string that nearly matches everywhere: rescanning would cost length times length."""

    def seconds(length: int) -> float:
        matcher = StopMatcher(["a" * (length // 2) + "b"])
        piece = "a" * (length // pieces)
        start = time.process_time()
        for _ in range(pieces):
            assert matcher.feed(piece) is None
        assert matcher.num_held == length // 2
        return time.process_time() - start

    # Eight times the length: a rescan would take some 64 times as long, which no cache of a CPU hides.
    short = min(seconds(25_000) for _ in range(3))
    long = min(seconds(200_000) for _ in range(3))
    assert long < 20 * short + 0.002
