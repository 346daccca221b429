"""Watchdog: says when there is work but nothing gets done. One timer, armed while there is work."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable

_LEGS = 8  # looks in one timeout: a process that was stopped in between is noticed to within this part of it
_ROUNDING_S = 1e-6


class Watchdog:
    """Calls `on_hung(seconds)` once, when no progress was made for `timeout_s` while there was work.

    Loop thread only; costs a step two assignments. Time in which this process did not run, because it was
    stopped or the machine slept, shows as a timer that fires late; nothing up to there counts since the last
    look, because the step may have stood still as well.
    """

    def __init__(
        self, timeout_s: float, clock: Callable[[], float], on_hung: Callable[[float], None]
    ) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._on_hung = on_hung
        self._progress_at: float | None = None  # None while there is no work
        self._stalled_s = 0.0  # what counts of the time since then, up to the last look
        self._armed_at = self._due_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def age_s(self) -> float:
        """Seconds since the last progress, or since there is work; 0 while there is none."""
        return 0.0 if self._progress_at is None else self._clock() - self._progress_at

    def note_work(self) -> None:
        """There is something to do; while that was known already, nothing changes."""
        if self._progress_at is None:
            self.note_progress()

    def note_progress(self) -> None:
        """Something got done, and there may be more to do."""
        self._progress_at = self._clock()
        self._stalled_s = 0.0
        if self._timer is None:
            self._arm()

    def note_rest(self) -> None:
        """There is nothing to do; the timer runs out by itself."""
        self._progress_at = None

    def stop(self) -> None:
        """Say nothing any more."""
        self._progress_at = None
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        delay_s = min(self._timeout_s / _LEGS, self._timeout_s - self._stalled_s)
        self._armed_at = self._clock()
        self._due_at = self._armed_at + delay_s
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._progress_at is None:
            return
        if self._clock() - self._due_at < self._timeout_s / _LEGS:
            self._stalled_s += max(0.0, self._due_at - max(self._armed_at, self._progress_at))
        if self._stalled_s < self._timeout_s - _ROUNDING_S:
            self._arm()
        else:
            self._on_hung(self.age_s)


def thread_stacks(*names: str) -> str:
    """The Python stacks of the live threads whose names begin with one of these, each under its name."""
    frames = sys._current_frames()
    lines: list[str] = []
    for thread in threading.enumerate():
        if thread.name.startswith(names) and thread.ident in frames:
            lines += [f"thread {thread.name}\n", *traceback.format_stack(frames[thread.ident])]
    return "".join(lines)
