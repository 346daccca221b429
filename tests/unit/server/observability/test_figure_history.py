"""Figures of the last ten minutes: taken by the clock, no more of them than that, cheap to take."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

from engine import Engine, FinishReason
from server.observability.figure_history import NUM_KEPT, PERIOD_S, FigureHistory
from server.observability.http_metrics import HttpMetrics
from tests.support.fake_engine import FakeEngine
from tests.support.virtual_time import run_in_virtual_time


class Clock:
    """Seconds as a test sets them."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def make_history(engine: FakeEngine, clock: Clock, http: HttpMetrics | None = None) -> FigureHistory:
    return FigureHistory(cast(Engine, engine), http or HttpMetrics(), clock)


def read(history: FigureHistory, after_s: float = -1) -> list[dict[str, Any]]:
    return [json.loads(sample) for sample in history.since(after_s)]


def test_ten_minutes_are_kept_and_no_more() -> None:
    engine, clock = FakeEngine(), Clock()
    history = make_history(engine, clock)
    for _ in range(2 * NUM_KEPT):
        history.keep()
        clock.now += PERIOD_S
        engine.metrics.generation_tokens += 1
    found = read(history)
    assert NUM_KEPT * PERIOD_S == 600
    assert [each["at"] for each in found] == [600 + PERIOD_S * i for i in range(NUM_KEPT + 1)]
    assert [each["generated"] for each in found] == list(range(NUM_KEPT, 2 * NUM_KEPT + 1))
    assert [each["at"] for each in read(history, 1196)] == [1198, 1200]
    assert sum(map(len, history.since(-1))) < 300_000  # bytes


def test_a_sample_says_what_was_counted() -> None:
    engine, clock, http = FakeEngine(draft_gauges=(4.0, 0.5, 1.75)), Clock(), HttpMetrics()
    metrics = engine.metrics
    metrics.requests_finished[FinishReason.STOP] += 2
    metrics.requests_finished[FinishReason.LENGTH] += 1
    metrics.requests_rejected["queue_full"] += 4
    metrics.time_to_first_token.observe(0.2, times=20)
    metrics.speculation.proposed["ngram"] += 8
    metrics.speculation.accepted["ngram"] += 6
    http.requests["/v1/completions", 503] += 5
    http.requests["/health/ready", 503] += 7  # a probe that is told "not ready"
    (sample,) = read(make_history(engine, clock, http))
    assert sample["counts"]["completed"] == 3
    assert sample["counts"]["refused"] == 4
    assert sample["counts"]["http"] == 5
    assert (sample["drafted"], sample["accepted"], sample["speedup"]) == (8, 6, 1.75)
    assert sample["kv"] == [0, 0, 64]
    assert sample["ttft"] == sorted(sample["ttft"])
    assert (sample["ttft"][0], sample["ttft"][-1]) == (0, 20)


def test_figures_are_taken_at_a_steady_pace_until_the_end() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        history = FigureHistory(cast(Engine, FakeEngine()), HttpMetrics(), loop.time)
        history.start()
        await asyncio.sleep(5 * PERIOD_S + 1)
        history.stop()
        await asyncio.sleep(10 * PERIOD_S)
        return [json.loads(sample)["at"] for sample in history.since(-1)]

    assert run_in_virtual_time(main()) == [0, 2, 4, 6, 8, 10, 31]
