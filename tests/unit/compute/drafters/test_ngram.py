"""NgramDrafter: where it looks, and how much it dares."""

from __future__ import annotations

import numpy as np
import pytest

from engine.compute.drafters.ngram import NgramDrafter, last_occurrence
from tests.support.draft_jobs import ToldSequence, draft_request, drafted

SENTENCE = list(range(10, 40))


@pytest.mark.parametrize(
    ("tokens", "follows"),
    [
        ([], []),
        ([1], []),
        ([1, 2, 3, 4], []),
        ([1, 2, 3, 1], []),  # one token is no match
        ([1, 2, 3, 4, 1, 2], [3]),
        ([1, 2, 3, 4, 9, 1, 2, 3], [4, 9]),
        ([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4], [5, 6, 7, 8]),
        ([1, 2, 5, 1, 2, 6, 1, 2], [6]),  # the last of two places
        ([0, 1, 2, 5, 9, 1, 2, 6, 0, 1, 2], [5, 9]),  # but the longer match first
        ([2, 3, 7, 1, 2], []),  # a match does not run into what it is looked for with
    ],
)
def test_copies_what_followed_the_last_tokens(tokens: list[int], follows: list[int]) -> None:
    assert drafted(NgramDrafter(), tokens) == follows


def test_a_draft_is_as_long_as_what_agrees_before_it() -> None:
    for length in range(5, 12):
        assert drafted(NgramDrafter(), [*SENTENCE, *SENTENCE[:length]], 32) == SENTENCE[length : 2 * length]
    assert drafted(NgramDrafter(), [*SENTENCE, *SENTENCE[:20]], 4) == SENTENCE[20:24]


def test_periodic_text_is_continued_from_the_draft_itself() -> None:
    assert drafted(NgramDrafter(), [1, 2, 3] * 11, 30) == [1, 2, 3] * 10
    assert drafted(NgramDrafter(), [5] * 40, 32) == [5] * 32


def test_token_ids_whose_bytes_look_alike_do_not_match() -> None:
    shifted = [0x0102_0304, 0x0506_0708]
    tokens = [0x0203_0405, 0x0607_0801, 3, *shifted, 4, 0x0304_0506, 0x0708_0102]
    assert drafted(NgramDrafter(), tokens) == []


def test_matches_include_the_drafts_after_the_committed_tokens() -> None:
    sequence = ToldSequence(NgramDrafter(), [*SENTENCE, *SENTENCE[:6]])
    assert list(sequence.ask(4).token_ids) == SENTENCE[6:10]
    assert list(sequence.ask(4).token_ids) == SENTENCE[10:12]  # six in all: as long as the committed match
    assert list(sequence.ask(4).token_ids) == []
    sequence.redraft(2, [99])
    assert list(sequence.ask(4).token_ids) == []  # nothing is known to follow those drafts


def test_the_sizes_of_matches_can_be_chosen() -> None:
    assert drafted(NgramDrafter(min_match=1), [1, 2, 3, 1]) == [2]
    assert drafted(NgramDrafter(min_match=3), [1, 2, 3, 4, 1, 2]) == []
    assert drafted(NgramDrafter(min_match=3), [1, 2, 3, 4, 1, 2, 3]) == [4, 1]
    text = np.array([1, 2, 3, 4, 1, 2, 3, 4], np.int32)
    assert last_occurrence(text, 2) == (4, 2)
    assert last_occurrence(text, 9) == (4, 4)


def test_stops_with_a_token_that_stops_the_request() -> None:
    tokens = [*SENTENCE, *SENTENCE[:8]]
    request = draft_request(num_prompt_tokens=30, stop_token_ids=[SENTENCE[10], SENTENCE[12]])
    sequence = ToldSequence(NgramDrafter(), tokens, request)
    assert list(sequence.ask(32).token_ids) == SENTENCE[8:11]
    assert sequence.ask(32).token_ids == ()  # nothing comes after it
    sequence.commit([SENTENCE[8], SENTENCE[9], SENTENCE[10]])  # it was allowed to go on
    assert list(sequence.ask(32).token_ids) == SENTENCE[11:13]


def test_wanting_nothing_gets_nothing_and_is_remembered() -> None:
    sequence = ToldSequence(NgramDrafter(), [1, 2, 3, 4, 1, 2])
    assert sequence.ask(0).token_ids == ()
    assert sequence.ask(1).token_ids == (3,)
