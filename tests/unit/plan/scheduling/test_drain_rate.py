import pytest

from engine.plan.scheduling.service_rates import DrainRate


def test_an_unknown_rate_says_one_second() -> None:
    rate = DrainRate()
    assert rate.per_second is None
    assert rate.retry_after_s(1000) == 1


def test_a_steady_rate_is_found() -> None:
    rate = DrainRate()
    for _ in range(1000):
        rate.observe(2, 0.5)
    assert rate.per_second == pytest.approx(4.0, rel=0.02)
    assert rate.retry_after_s(39) == 10
    assert rate.retry_after_s(0) == 1


def test_a_new_rate_replaces_the_old_one_within_a_minute_or_two() -> None:
    rate = DrainRate()
    for _ in range(600):
        rate.observe(10, 1.0)
    for _ in range(120):
        rate.observe(1, 1.0)
    assert rate.per_second == pytest.approx(1.0, rel=0.2)


def test_nothing_ended_yet_is_at_most_one_request_in_the_time_seen() -> None:
    rate = DrainRate()
    rate.observe(0, 2.0)
    assert rate.retry_after_s(5) == 10


def test_the_answer_is_capped() -> None:
    rate = DrainRate()
    for _ in range(100):
        rate.observe(0, 1.0)
    assert rate.retry_after_s(100_000) == 120


def test_steps_that_take_no_time_tell_nothing() -> None:
    rate = DrainRate()
    rate.observe(3, 0.0)
    assert rate.per_second is None
