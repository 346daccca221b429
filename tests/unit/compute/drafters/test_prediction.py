"""PredictionDrafter: following what the caller expects, and finding it again after an edit."""

from __future__ import annotations

import time

import pytest

from engine.compute.drafters.prediction import PredictionDrafter
from tests.support.draft_jobs import ToldSequence, draft_request

PROMPT = [1, 2, 3]
EXPECTED = list(range(100, 160))


def sequence_of(prediction: list[int], *, stop_token_ids: tuple[int, ...] = ()) -> ToldSequence:
    request = draft_request(
        num_prompt_tokens=len(PROMPT), prediction=prediction, stop_token_ids=stop_token_ids
    )
    return ToldSequence(PredictionDrafter(), PROMPT, request)


def after(prediction: list[int], output: list[int], num_wanted: int = 4) -> list[int]:
    """What is drafted after this output, told token by token."""
    sequence = sequence_of(prediction)
    for token_id in output:
        sequence.ask(0)
        sequence.commit([token_id])
    return list(sequence.ask(num_wanted).token_ids)


def test_starts_at_the_beginning_of_the_prediction() -> None:
    assert list(sequence_of(EXPECTED).ask(32).token_ids) == EXPECTED[:32]
    assert list(sequence_of(EXPECTED[:3]).ask(32).token_ids) == EXPECTED[:3]
    assert sequence_of([]).ask(32).token_ids == ()


def test_follows_while_output_equals_it_and_ends_with_it() -> None:
    assert after(EXPECTED, EXPECTED[:10]) == EXPECTED[10:14]
    assert after(EXPECTED, EXPECTED[:58]) == EXPECTED[58:]
    assert after(EXPECTED, EXPECTED) == []
    assert after(EXPECTED, [*EXPECTED, 7, 8]) == []


@pytest.mark.parametrize(
    ("edit", "output"),
    [
        ("replacement", [*EXPECTED[:10], 7, *EXPECTED[11:13]]),
        ("longer replacement", [*EXPECTED[:10], 7, 8, 9, *EXPECTED[12:14]]),
        ("insertion", [*EXPECTED[:10], 7, 8, 9, *EXPECTED[10:12]]),
        ("deletion", [*EXPECTED[:10], *EXPECTED[15:17]]),
        ("deletion at the start", EXPECTED[5:7]),
        ("insertion at the start", [7, 8, *EXPECTED[:2]]),
        ("two edits", [*EXPECTED[:10], 7, *EXPECTED[11:14], *EXPECTED[20:22]]),
    ],
)
def test_finds_its_place_again_after_an_edit(edit: str, output: list[int]) -> None:
    place = EXPECTED.index(output[-1]) + 1
    assert after(EXPECTED, output[:-1]) == [], f"{edit}: one token is not enough"
    assert after(EXPECTED, output) == EXPECTED[place : place + 4]


def test_far_from_where_they_parted_it_takes_a_longer_match() -> None:
    output = [*EXPECTED[:5], *EXPECTED[50:54]]
    assert [after(EXPECTED, output[:end]) for end in (7, 8)] == [[], []]
    assert after(EXPECTED, output) == EXPECTED[54:58]


def test_of_several_places_the_longest_match_counts_then_the_closest() -> None:
    prediction = [1, 2, 10, 5, 6, 20, 7, 8, 30, 5, 6, 40, 9, 5, 6, 50]
    assert after(prediction, [1, 2, 10, 99, 5, 6], 1) == [20]
    assert after(prediction, [*prediction[:8], 99, 5, 6], 1) == [40]
    assert after(prediction, [*prediction[:8], 9, 5, 6], 1) == [50]


def test_a_fresh_match_is_drafted_for_briefly() -> None:
    output = [*EXPECTED[:5], 7, *EXPECTED[6:8]]
    assert after(EXPECTED, output, 32) == EXPECTED[8:16]
    assert len(after(EXPECTED, [*output, EXPECTED[8]], 32)) == 12


def test_drafts_are_followed_and_forgotten() -> None:
    sequence = sequence_of(EXPECTED)
    assert list(sequence.ask(4).token_ids) == EXPECTED[:4]
    assert list(sequence.ask(4).token_ids) == EXPECTED[4:8]
    sequence.redraft(6, [7, 8])
    assert sequence.ask(4).token_ids == ()
    sequence.redraft(0, [])
    assert list(sequence.ask(4).token_ids) == EXPECTED[:4]  # as if those drafts had never been
    sequence.commit(EXPECTED[:5])
    assert list(sequence.ask(4).token_ids) == EXPECTED[5:9]


def test_a_prediction_that_has_nothing_to_do_with_the_output_is_left_alone() -> None:
    sequence = sequence_of(EXPECTED)
    sequence.ask(8)
    for token_id in range(500, 540):
        sequence.commit([token_id])
        assert sequence.ask(8).token_ids == ()


def test_stops_with_a_token_that_stops_the_request() -> None:
    sequence = sequence_of(EXPECTED, stop_token_ids=(EXPECTED[2],))
    assert list(sequence.ask(8).token_ids) == EXPECTED[:3]
    assert sequence.ask(8).token_ids == ()


def test_a_prediction_of_one_token_over_and_over_costs_no_more() -> None:
    sequence = sequence_of([5] * 30_000)
    sequence.commit([6])
    sequence.ask(8)
    start = time.process_time()
    for _ in range(200):
        sequence.commit([5, 5, 6])
        sequence.ask(8)
    assert time.process_time() - start < 0.5
