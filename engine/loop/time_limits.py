"""TimeLimits: ends requests whose time is up, at that time, whatever the loop is doing then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from engine.errors import DeadlineExceeded, EngineError, Overloaded
from engine.plan.request import Request

_EARLIEST_RETRY_S = 0.001  # a timer that fires before the engine's clock says so waits at least this long


@dataclass(slots=True, eq=False)
class TimeLimits:
    """One timer a deadline and one a bounded wait in the queue; nothing is polled. Loop thread only.

    `_on_due(request, error)` is called when a watched request's time is up: past its deadline, or not run at
    all within `_queue_timeout_s` seconds of being queued (0: no limit).
    """

    _queue_timeout_s: float
    _clock: Callable[[], float]
    _on_due: Callable[[Request, EngineError], None]
    _deadlines: dict[str, asyncio.TimerHandle] = field(init=False, default_factory=dict)
    _waits: dict[str, asyncio.TimerHandle] = field(init=False, default_factory=dict)

    def watch(self, request: Request) -> None:
        """Time a request that was accepted, or whose deadline has changed."""
        self._forget(self._deadlines, request.request_id)
        if self._queue_timeout_s and request.request_id not in self._waits:
            self._check_wait(request, self._clock() + self._queue_timeout_s)
        if request.deadline is not None:
            self._check_deadline(request)  # last: if it has passed, all of the request's timers are forgotten

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._forget(self._deadlines, request_id)
        self._forget(self._waits, request_id)

    def _forget(self, timers: dict[str, asyncio.TimerHandle], request_id: str) -> None:
        timer = timers.pop(request_id, None)
        if timer is not None:
            timer.cancel()

    def _check_deadline(self, request: Request) -> None:
        assert request.deadline is not None
        left_s = request.deadline - self._clock()
        if left_s <= 0:
            self._on_due(request, deadline_passed(request))
        else:
            self._set(self._deadlines, request, left_s, self._check_deadline)

    def _check_wait(self, request: Request, until: float) -> None:
        if request.first_scheduled_time is not None:
            return
        left_s = until - self._clock()
        if left_s <= 0:
            limit = f"{self._queue_timeout_s:g} s"
            error = Overloaded(f"The request waited {limit} in the queue, the limit.", code="queue_timeout")
            self._on_due(request, error)
        else:
            self._set(self._waits, request, left_s, partial(self._check_wait, until=until))

    def _set(
        self,
        timers: dict[str, asyncio.TimerHandle],
        request: Request,
        delay_s: float,
        check: Callable[[Request], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        timers[request.request_id] = loop.call_later(max(delay_s, _EARLIEST_RETRY_S), check, request)


def deadline_passed(request: Request) -> DeadlineExceeded:
    """The error of a request whose deadline has passed."""
    assert request.deadline is not None
    limit = f"{request.deadline - request.arrival_time:.3f}".rstrip("0").rstrip(".")
    done = f"{request.num_output_tokens} of at most {request.sampling.max_tokens} tokens"
    return DeadlineExceeded(f"The deadline, {limit} s after the request arrived, passed after {done}.")


def deadline_too_soon(request: Request, now: float) -> DeadlineExceeded:
    """The error of a request that will not end by its deadline, which is still to come."""
    assert request.deadline is not None
    left_s = request.deadline - now
    return DeadlineExceeded(f"The deadline is {left_s:.3g} s away, too soon at the present load.")
