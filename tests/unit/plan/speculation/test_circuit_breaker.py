"""The breaker opens after three failures in a row, tries again after each pause, and closes on success."""

from __future__ import annotations

from engine.plan.speculation.drafter_link import FIRST_PAUSE_S, MAX_PAUSE_S, CircuitBreaker
from tests.support.fakes import ManualClock


def broken() -> tuple[CircuitBreaker, ManualClock]:
    """One that has just opened."""
    clock = ManualClock()
    breaker = CircuitBreaker(clock)
    assert [breaker.fail() for _ in range(3)] == [False, False, True]
    return breaker, clock


def test_it_is_closed_at_first_and_stays_so_while_most_things_work() -> None:
    breaker = CircuitBreaker(ManualClock())
    assert not breaker.is_open
    for _ in range(10):
        assert [breaker.fail(), breaker.fail()] == [False, False]
        breaker.succeed()
    assert not breaker.is_open


def test_it_opens_after_three_failures_in_a_row() -> None:
    breaker, _ = broken()
    assert breaker.is_open


def test_after_a_pause_it_lets_one_through_which_closes_it() -> None:
    breaker, clock = broken()
    clock.advance(FIRST_PAUSE_S - 0.01)
    assert breaker.is_open
    clock.advance(0.01)
    assert not breaker.is_open
    breaker.succeed()
    assert [breaker.fail(), breaker.fail()] == [False, False], "the past is forgotten"
    assert not breaker.is_open


def test_each_failed_try_doubles_the_pause_up_to_a_limit() -> None:
    breaker, clock = broken()
    pauses = []
    for _ in range(9):
        start = clock.now
        while breaker.is_open:
            clock.advance(1.0)
        pauses.append(clock.now - start)
        assert breaker.fail(), "one failure is enough"
    assert pauses == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    assert pauses[-1] == MAX_PAUSE_S
    clock.advance(MAX_PAUSE_S)
    breaker.succeed()
    assert [breaker.fail() for _ in range(3)] == [False, False, True]
    clock.advance(FIRST_PAUSE_S)
    assert not breaker.is_open, "after a success pauses are short again"
