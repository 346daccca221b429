"""LoopGuard: notices from outside when the event loop itself has stopped turning, which nothing on it can."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from threading import Event, Thread

_LEGS = 4  # waits in one timeout: a process that was stopped in between is noticed to within this part of it


class LoopGuard:
    """Calls `on_stuck()`, in its own thread, when `loop` did not get round to a callback for `timeout_s`.

    Asks once every quarter of that. Time in which the process did not run does not count. `start` and `stop`
    are for the loop's thread.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        timeout_s: float,
        on_stuck: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._leg_s = timeout_s / _LEGS
        self._on_stuck = on_stuck
        self._stopped = Event()
        self._turned = Event()
        self._thread = Thread(target=self._watch, name="slipstream-loop-guard", daemon=True)

    def start(self) -> None:
        """Watch from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Watch no more; the thread has ended on return. Safe before `start`."""
        self._stopped.set()
        self._turned.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(self._leg_s):
            self._turned.clear()
            if self._stopped.is_set():  # since we looked; from here on `stop` wakes us
                return
            try:
                self._loop.call_soon_threadsafe(self._turned.set)
            except RuntimeError:  # it is closed
                return
            if not self._has_turned() and not self._stopped.is_set():
                self._on_stuck()
                return

    def _has_turned(self) -> bool:
        legs = 0
        while legs < _LEGS:
            began = self._clock()
            if self._turned.wait(self._leg_s):
                return True
            if self._clock() - began < 2 * self._leg_s:  # else we were stopped as well
                legs += 1
        return False
