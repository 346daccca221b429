"""CircuitBreaker: leaves alone, for a while, what keeps failing."""

from __future__ import annotations

from collections.abc import Callable

MAX_FAILURES = 3  # in a row
FIRST_PAUSE_S, MAX_PAUSE_S = 5.0, 300.0


class CircuitBreaker:
    """Closed at first. Opens after MAX_FAILURES in a row, then lets one try through after each pause.

    Every failed try doubles the pause, up to a limit; a success closes it and forgets the past.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._num_failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._open_until = 0.0

    @property
    def is_open(self) -> bool:
        """True while it is better not tried."""
        return self._num_failures >= MAX_FAILURES and self._clock() < self._open_until

    def succeed(self) -> None:
        """It worked."""
        self._num_failures = 0
        self._pause_s = FIRST_PAUSE_S

    def fail(self) -> bool:
        """It did not; True if it is left alone from now on."""
        self._num_failures += 1
        if self._num_failures < MAX_FAILURES:
            return False
        self._open_until = self._clock() + self._pause_s
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        return True
