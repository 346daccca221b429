"""RequestCounts: how many requests were started, finished and refused, and how they ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from engine.errors import EngineError, Overloaded
from engine.plan.metrics.batch_metrics import BatchMetrics
from engine.plan.request import FinishReason

GRAVITY = (
    FinishReason.STOP,
    FinishReason.LENGTH,
    FinishReason.ABORT,
    FinishReason.DEADLINE,
    FinishReason.ERROR,
)


class _Outcome(NamedTuple):
    """How a choice ended; `abort` and `rejection` are labels, None for what is neither."""

    reason: FinishReason
    abort: str | None
    rejection: str | None


class RequestCounts:
    """Counts what becomes of requests; nothing else writes these fields of the metrics. Loop thread only.

    A reply's choices are one request: started with the first, finished with the last. The outcome counted is
    the gravest of its choices', the first of equals.
    """

    def __init__(self, metrics: BatchMetrics) -> None:
        self._metrics = metrics
        self._group_of: dict[str, str] = {}
        self._num_open: Counter[str] = Counter()
        self._gravest: dict[str, _Outcome] = {}

    def open(self, request_id: str, group: str | None) -> None:
        """A choice of `group` was accepted; None is a group of its own."""
        name = self._group_of[request_id] = request_id if group is None else group
        if not self._num_open[name]:
            self._metrics.requests_started += 1
        self._num_open[name] += 1

    def close(
        self, request_id: str, reason: FinishReason, abort: str | None, error: EngineError | None
    ) -> None:
        """A choice has ended; with the last one its group has."""
        gave_up = isinstance(error, Overloaded) and error.code == "queue_timeout"
        outcome = _Outcome(reason, abort, "queue_timeout" if gave_up else None)
        name = self._group_of.pop(request_id)
        gravest = max(self._gravest.pop(name, outcome), outcome, key=lambda each: GRAVITY.index(each.reason))
        self._num_open[name] -= 1
        if self._num_open[name]:
            self._gravest[name] = gravest
            return
        del self._num_open[name]
        metrics = self._metrics
        metrics.requests_finished[gravest.reason] += 1
        metrics.deadlines_missed += gravest.reason is FinishReason.DEADLINE
        if gravest.abort is not None:
            metrics.request_aborts[gravest.abort] += 1
        if gravest.rejection is not None:
            metrics.requests_rejected[gravest.rejection] += 1

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Count an Overloaded that is raised inside: what it refuses was never started."""
        try:
            yield
        except Overloaded as refusal:
            self._metrics.requests_rejected[refusal.code] += 1
            raise

    def miss_deadline(self) -> None:
        """A request was refused because its deadline has passed or cannot be met; it was never started."""
        self._metrics.deadlines_missed += 1
        self._metrics.requests_rejected["deadline_exceeded"] += 1
