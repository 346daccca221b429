"""Seats: how many lines may run beside what people wait for; LinePace: how fast lines are answered."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from config import CPU_SEATS
from server.http.context import ServerContext

MOST_AT_ONCE = 64
_RESERVE = 8  # of so many seats one stays free, so that who comes need not wait for a line to leave
_MOST_SLOWDOWN = 1.03  # of a step, that its other rows may notice
_FEWEST_ANSWERS = 16  # before a rate is one
_MEMORY = 0.99  # of an answer's weight is left one answer later


@dataclass(frozen=True, slots=True)
class Seats:
    """Reads the engine's measured step times. Loop thread only."""

    context: ServerContext

    @property
    def max_num_seqs(self) -> int:
        """The engine's seats; before it is loaded, and of vectors alone, what was asked for or a CPU's."""
        info, asked = self.context.info, self.context.settings.scheduler.max_num_seqs
        return info.max_num_seqs if info is not None else asked or CPU_SEATS

    def most(self, *, is_urgent: bool = False) -> int:
        """Lines that may run now.

        Beside requests that people wait for they are as many as add next to nothing to a step; with a window
        about to be missed, `is_urgent`, as many as there are seats.
        """
        others = self.context.live.num_interactive
        seats = self.max_num_seqs
        free = min(MOST_AT_ONCE, seats - max(1, seats // _RESERVE)) - others
        if seats == 1:
            free = 1 - others
        if not others or is_urgent or free <= 0:
            return max(0, free)
        return self._unnoticed(others, free)

    def _unnoticed(self, others: int, free: int) -> int:
        seconds = self.context.engine.decode_steps_s(others + free)
        if seconds is None:
            return 1
        return bisect_right(seconds, _MOST_SLOWDOWN * seconds[others - 1]) - others


class LinePace:
    """Seconds a line takes, by the answers of late; the time in which none runs does not count."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._num_running = 0
        self._since = 0.0
        self._seconds = 0.0
        self._num_answered = 0.0
        self._num_ever = 0

    def begin(self) -> None:
        """A line begins to run."""
        self._tick()
        self._num_running += 1

    def end(self, *, is_answered: bool) -> None:
        """A line has left, with an answer or without."""
        self._tick()
        self._num_running -= 1
        if is_answered:
            self._num_ever += 1
            self._num_answered = self._num_answered * _MEMORY + 1
            self._seconds *= _MEMORY

    def needed_s(self, num_lines: int) -> float | None:
        """Seconds that so many lines take; None while unknown."""
        self._tick()
        if self._num_ever < _FEWEST_ANSWERS:
            return None
        return num_lines * self._seconds / self._num_answered

    def _tick(self) -> None:
        now = self._clock()
        if self._num_running:
            self._seconds += now - self._since
        self._since = now
