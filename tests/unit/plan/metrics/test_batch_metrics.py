"""What the engine counts about itself: totals, and the last minute of them."""

from __future__ import annotations

import logging
import time
from statistics import median
from typing import Any

import pytest

from engine.loop.engine_loop import REPORT_EVERY_S
from engine.plan.metrics.batch_metrics import LATENCY_BOUNDS_S, PHASES, BatchMetrics
from engine.plan.metrics.histogram import Histogram
from engine.plan.step_records import BatchDecision, ScheduledRequest
from tests.support.engines import collect, running_engine


def make_decision(decodes: int = 0, prefill_tokens: int = 0) -> BatchDecision:
    scheduled = [ScheduledRequest(f"d{i}", 9, 1, True) for i in range(decodes)]
    if prefill_tokens:
        scheduled.append(ScheduledRequest("p", 0, prefill_tokens, True))
    return BatchDecision(1, tuple(scheduled), None, decodes, prefill_tokens)


def step(metrics: BatchMetrics, at: float, seconds: float = 0.5, **decision: Any) -> None:
    """One step from `at` on that generates a token for each decode, with half the seats in use."""
    metrics.begin_step(at)
    metrics.generation_tokens += decision.get("decodes", 0)
    metrics.end_step(make_decision(**decision), seconds, 0.5, 0.25)


# Histograms.


def test_a_quantile_lies_evenly_within_its_bucket() -> None:
    histogram = Histogram((1.0, 2.0, 4.0))
    for value, times in ((0.5, 2), (1.5, 4), (3.0, 2), (99.0, 2)):
        histogram.observe(value, times)
    found = histogram
    assert found.count == 10
    assert found.mean == pytest.approx(21.1)
    assert [found.quantile(share) for share in (0.0, 0.1, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 1.0)] == (
        pytest.approx([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 4.0, 4.0])
    )


def test_a_difference_is_what_came_in_between() -> None:
    histogram = Histogram(LATENCY_BOUNDS_S)
    histogram.observe(100.0)
    earlier = histogram.copy()
    histogram.observe(0.01, 3)
    later = histogram - earlier
    assert later.count == 3
    assert later.mean == pytest.approx(0.01)
    assert later.quantile(0.99) <= 0.01
    nothing = earlier - earlier
    assert (nothing.count, nothing.mean, nothing.quantile(0.5)) == (0, 0.0, 0.0)
    assert Histogram(()).quantile(0.5) == 0.0


# The last minute.


def test_the_last_minute_tells_rates_sizes_and_use() -> None:
    metrics = BatchMetrics()
    for second in range(10):
        step(metrics, 100.0 + second, decodes=4)
    step(metrics, 110.0, seconds=1.0, decodes=2, prefill_tokens=30)
    step(metrics, 111.0, seconds=2.0, prefill_tokens=60)
    metrics.time_to_first_token.observe(0.2)
    found = metrics.last_minute(120.0)
    assert (found.seconds, found.busy_s, found.num_steps) == (20.0, 8.0, 12)
    assert (found.generation_tokens, found.num_sequences) == (42, 10 * 4 + 3 + 1)
    assert found.step_tokens.sum == 10 * 4 + 32 + 60
    assert (found.seats_s, found.kv_s) == (4.0, 2.0)
    assert [getattr(found, phase).count for phase in PHASES] == [1, 10, 1]
    assert 0.1 < found.time_to_first_token.quantile(0.5) <= 0.25


def test_what_is_older_than_a_minute_does_not_count() -> None:
    metrics = BatchMetrics()
    for second in range(300):
        step(metrics, float(second), decodes=1 if second < 200 else 3)
    found = metrics.last_minute(300.0)
    assert 55 <= found.seconds <= 60
    assert found.generation_tokens == pytest.approx(3 * found.seconds)
    assert len(metrics._recent) <= 13


def test_a_pause_counts_for_nothing_but_its_time() -> None:
    metrics = BatchMetrics()
    for second in range(30):
        step(metrics, float(second), decodes=100)
    idle = metrics.last_minute(3600.0)
    assert (idle.generation_tokens, idle.num_steps, idle.busy_s) == (0, 0, 0.0)
    step(metrics, 3600.0, decodes=1)
    found = metrics.last_minute(3602.0)
    assert (found.seconds, found.generation_tokens) == (2.0, 1)


def test_before_the_first_step_there_is_nothing_to_tell() -> None:
    metrics = BatchMetrics()
    nothing = metrics.last_minute(5.0)
    assert (nothing.seconds, nothing.generation_tokens, nothing.num_steps, nothing.kv_s) == (0, 0, 0, 0)
    assert metrics.since_first_step(5.0).figures()["num_ended"] == 0


def test_the_figures_are_of_all_since_the_first_step() -> None:
    metrics = BatchMetrics()
    for second in range(10):
        step(metrics, 100.0 + second, decodes=4)
    step(metrics, 110.0, seconds=0.004, prefill_tokens=60)
    metrics.prompt_tokens += 60
    metrics.time_to_first_token.observe(0.01)
    assert metrics.since_first_step(120.0).figures() == {
        "seconds": 20.0,
        "num_ended": 0,
        "prompt_tokens": 60,
        "generation_tokens": 40,
        "num_sequences": 41,
        "busy_s": 5.004,
        "seats_s": 2.502,
        "kv_s": 1.251,
        "step_tokens": 9.0909,
        "time_to_first_token": 0.01,
        "prefill": 0.004,
        "decode": 0.5,
        "mixed": 0.0,
    }


def test_a_step_costs_microseconds() -> None:
    metrics, decision = BatchMetrics(), make_decision(decodes=64)

    def thousand_steps() -> float:
        started = time.perf_counter()
        for number in range(1000):
            metrics.begin_step(number * 0.02)
            metrics.end_step(decision, 0.01, 0.5, 0.5)
        return (time.perf_counter() - started) / 1000

    assert median(thousand_steps() for _ in range(5)) < 50e-6  # a tenth of it on a quiet machine


# In the engine.


async def test_the_engine_counts_its_work() -> None:
    async with running_engine() as harness:
        await collect(harness.submit([1, 2, 3], max_tokens=6))
        metrics = harness.engine.metrics
        found = metrics.last_minute(time.monotonic())
        assert (found.generation_tokens, found.num_steps) == (6, 6)
        assert 0 < found.seats_s <= found.busy_s / 8
        assert 0 < found.kv_s < found.busy_s
        assert found.num_sequences == found.num_steps
    done = metrics.since_first_step(time.monotonic())
    assert (done.num_ended, done.generation_tokens, done.prompt_tokens) == (1, 6, 3)


async def test_every_minute_with_work_is_told_at_level_debug(caplog: pytest.LogCaptureFixture) -> None:
    now = 1000.0
    caplog.set_level(logging.DEBUG, "slipstream.engine")
    async with running_engine(clock=lambda: now, inline=True) as harness:
        for minutes in (0.0, 0.4, 0.7, 0.1, 0.1, 100.0, 0.1):
            now += minutes * REPORT_EVERY_S
            await collect(harness.submit([1, 2, 3], max_tokens=6))
        reports = [vars(record) for record in caplog.records if record.message == "the last minute"]
    # When the third comes, of the second: the first is older. The minute before the sixth was empty.
    assert [report["num_ended"] for report in reports] == [1]
    names = ("draft_speedup", "draft_theoretical_speedup", "draft_alpha", "draft_gamma", "draft_cost_ratio")
    assert [reports[0][name] for name in names] == [1.0, 1.0, 0.0, 0.0, 0.0], "nothing drafts here"
