"""Which choices are one request."""

from __future__ import annotations

from engine.loop.open_requests import RequestCounts
from engine.plan.metrics.batch_metrics import BatchMetrics


def test_choices_of_a_reply_are_known_and_what_is_read_ahead_has_none() -> None:
    counts = RequestCounts(BatchMetrics())
    counts.open("a-0", "a")
    counts.open("b", None)
    counts.open("a-1", "a")
    assert counts.choices_beside("a-1") == ["a-0", "a-1"]
    assert counts.choices_beside("b") == ["b"]
    assert counts.choices_beside("next-turn-1") == []  # it waits in the queue and nobody has opened it
