"""SuffixAutomaton: what follows, how sure that is, and what a token costs."""

from __future__ import annotations

import random
import time

from engine.compute.drafters.suffix_automaton import SuffixAutomaton


def automaton_of(text: list[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    automaton.extend(text)
    return automaton


def continued(text: list[int], num_wanted: int, min_chance: float = 0.0) -> list[int]:
    automaton = automaton_of(text)
    return automaton.continuation(automaton.longest_repeat(), num_wanted, 1.0, min_chance).token_ids


def test_goes_on_as_the_longest_repeat_did() -> None:
    text = [1, 2, 3, 4, 5, 9, 2, 3, 7, 1, 2, 3]
    assert automaton_of(text).longest_repeat().length == 3
    assert continued(text, 2) == [4, 5]


def test_periodic_text_goes_on_past_its_end() -> None:
    assert continued([1, 2, 3] * 4, 10) == [1, 2, 3, 1, 2, 3, 1, 2, 3, 1]
    assert continued([7] * 9, 5) == [7] * 5


def test_the_more_frequent_of_two_ways_is_taken_whichever_came_last() -> None:
    assert continued([1, 2, 5, 8, 1, 2, 5, 9, 1, 2, 6, 7, 1, 2], 1) == [5]


def test_a_long_match_is_trusted_for_longer_than_a_short_one() -> None:
    text = list(range(100))
    lengths = [len(continued([*text, *text[10 : 10 + n]], 60, 0.3)) for n in (1, 2, 4, 8, 16)]
    assert lengths[0] == 0 and lengths[1] == 1
    assert lengths == sorted(lengths) and lengths[-1] >= 16


def test_a_place_where_records_differ_ends_a_draft_however_alike_they_are() -> None:
    record = [1, 2, 3, 4, 5, 6, 7, 8]
    text = []
    for value in range(100, 110):
        text += [*record, value]
    text += record[:3]
    assert continued(text, 20, 0.3) == record[3:]


def test_one_of_very_many_followers_is_not_even_looked_for() -> None:
    text = []
    for value in range(100, 160):
        text += [1, value]
    assert continued([*text, 1], 4) == []


def test_a_token_costs_the_same_in_any_text() -> None:
    draw = random.Random(5)
    fibonacci, previous = [1, 2], [1]
    while len(fibonacci) < 20_000:
        previous, fibonacci = fibonacci, fibonacci + previous
    texts = (
        [draw.randrange(40_000) for _ in range(20_000)],
        [draw.randrange(2) for _ in range(20_000)],
        [7] * 20_000,
        list(range(50)) * 400,
        fibonacci[:20_000],
    )
    for text in texts:
        automaton = automaton_of(text[:10_000])
        start = time.process_time()
        automaton.extend(text[10_000:])
        assert (
            time.process_time() - start < 10_000 * 60e-6
        )  # ten times what it takes; quadratic would be far more
