"""LoopGuard: notices from outside when the event loop itself has stopped turning, which nothing on it can."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event, Thread

log = logging.getLogger("slipstream.server")

_LEGS = 4  # waits in one timeout: a process that was stopped in between is noticed to within this part of it


@dataclass(frozen=True, slots=True)
class GuardClocks:
    """Seconds by the wall, and seconds that the process has computed, in all of its threads together."""

    wall: Callable[[], float] = time.monotonic
    computed: Callable[[], float] = time.process_time


class LoopGuard:
    """Calls `on_stuck()`, in its own thread, when `loop` did not get round to a callback for `timeout_s`.

    Asks once every quarter of that. Time in which the process did not run does not count. `start` and `stop`
    are for the loop's thread.

    A call that holds the interpreter lock stops this thread as well. Of one that does so for `timeout_s` the
    stacks are written to stderr by a thread that needs no lock, again after every further `timeout_s`, and
    the log has its length once it is over. After a stop of the whole process the stacks may come as well.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        timeout_s: float,
        on_stuck: Callable[[], None],
        clocks: GuardClocks | None = None,
    ) -> None:
        self._loop = loop
        self._clocks = clocks or GuardClocks()
        self._timeout_s = timeout_s
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
        try:
            while not self._wait_leg(self._stopped)[0]:
                self._turned.clear()
                if self._stopped.is_set():  # since we looked; from here on `stop` wakes us
                    return
                try:
                    self._loop.call_soon_threadsafe(self._turned.set)
                except RuntimeError:  # it is closed
                    return
                if not self._has_turned() and not self._stopped.is_set():
                    faulthandler.cancel_dump_traceback_later()
                    self._on_stuck()
                    return
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _has_turned(self) -> bool:
        legs = 0
        while legs < _LEGS:
            turned, counts = self._wait_leg(self._turned)
            if turned:
                return True
            legs += counts
        return False

    def _wait_leg(self, event: Event) -> tuple[bool, bool]:
        """Whether `event` came within a leg, and whether the process ran meanwhile."""
        if sys.__stderr__ is not None:
            # A leg later than what `on_stuck` tells, so that it speaks only where that cannot.
            later_s = self._timeout_s + self._leg_s
            faulthandler.dump_traceback_later(later_s, repeat=True, file=sys.__stderr__)
        began, computed = self._clocks.wall(), self._clocks.computed()
        came = event.wait(self._leg_s)
        took_s = self._clocks.wall() - began
        if took_s < 2 * self._leg_s:
            return came, True
        if took_s >= self._timeout_s and self._clocks.computed() - computed > took_s / 2:
            log.error("one call held the interpreter for %.1f s: no request was served meanwhile", took_s)
        return came, False
