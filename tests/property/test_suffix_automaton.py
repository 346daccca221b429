"""SuffixAutomaton against searching the text for every suffix."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from engine.compute.drafters.suffix_automaton import Match, SuffixAutomaton
from tests.support.examples import share_of

TEXT = st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size), max_size=40))


def occurs(text: list[int], part: list[int]) -> bool:
    return any(text[i : i + len(part)] == part for i in range(len(text) - len(part) + 1))


def longest_known_suffix(text: list[int], read: list[int]) -> int:
    """Length of the longest suffix of `read` that occurs in `text`, the empty one included."""
    return next(n for n in range(len(read), -1, -1) if occurs(text, read[len(read) - n :]))


def longest_repeat(text: list[int]) -> int:
    """Length of the longest suffix that also ends before the end."""
    return next((n for n in range(len(text) - 1, 0, -1) if occurs(text[:-1], text[-n:])), 0)


@given(text=TEXT)
@settings(max_examples=share_of(300))
def test_longest_repeat_is_that_of_a_search_after_every_token(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for end, token_id in enumerate(text, start=1):
        automaton.extend([token_id])
        assert automaton.longest_repeat().length == longest_repeat(text[:end])
        assert automaton.num_tokens == end


@given(text=TEXT, more=TEXT)
@settings(max_examples=share_of(300))
def test_following_tokens_matches_like_a_search_and_adds_nothing(text: list[int], more: list[int]) -> None:
    automaton = SuffixAutomaton()
    automaton.extend(text)
    match = automaton.longest_repeat()
    for end, token_id in enumerate(more, start=1):
        match = automaton.follow(match, [token_id])
        assert match.length == longest_known_suffix(text, text + more[:end])
    assert automaton.follow(automaton.longest_repeat(), more) == match
    assert automaton.num_tokens == len(text)


@given(text=TEXT, num_wanted=st.integers(0, 12))
@settings(max_examples=share_of(300))
def test_each_proposed_token_followed_the_longest_match_before_the_end(
    text: list[int], num_wanted: int
) -> None:
    automaton = SuffixAutomaton()
    automaton.extend(text)
    match = automaton.longest_repeat()
    proposed = automaton.continuation(match, num_wanted, 1.0, 0.0).token_ids
    assert len(proposed) <= num_wanted
    read = list(text)
    for token_id in proposed:
        length = match.length
        if not any(text[i : i + length] == read[len(read) - length :] for i in range(len(text) - length)):
            length = longest_repeat(text)  # the match ends the text: a shorter one goes on
        assert occurs(text, [*read[len(read) - length :], token_id])
        read.append(token_id)
        match = automaton.follow(match, [token_id])


@given(text=TEXT, cut=st.integers(0, 40))
def test_text_may_come_in_pieces(text: list[int], cut: int) -> None:
    whole, pieces = SuffixAutomaton(), SuffixAutomaton()
    whole.extend(text)
    pieces.extend(text[:cut])
    pieces.extend(text[cut:])
    match = whole.longest_repeat()
    assert match == pieces.longest_repeat()
    assert whole.continuation(match, 9, 1.0, 0.05) == pieces.continuation(match, 9, 1.0, 0.05)


@given(text=TEXT)
def test_chances_are_chances(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    automaton.extend(text)
    match = automaton.longest_repeat()
    sure = automaton.continuation(match, 9, 1.0, 1.0).token_ids
    likely = automaton.continuation(match, 9, 1.0, 0.3).token_ids
    assert sure == []  # nothing that was seen a few times is certain to come again
    assert (
        automaton.continuation(match, 9, 0.5, 0.3).token_ids
        == likely[: len(automaton.continuation(match, 9, 0.5, 0.3).token_ids)]
    )


def test_an_empty_text_says_nothing() -> None:
    automaton = SuffixAutomaton()
    assert automaton.longest_repeat() == Match(0, 0)
    assert automaton.continuation(Match(0, 0), 4, 1.0, 0.0).token_ids == []
    assert automaton.follow(Match(0, 0), [1, 2]) == Match(0, 0)
