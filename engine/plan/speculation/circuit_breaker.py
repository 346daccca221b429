"""CircuitBreaker: stops calls, for a while, to what keeps failing."""

from __future__ import annotations

from collections.abc import Callable

MAX_FAILURES = 3  # in a row
FIRST_PAUSE_S, MAX_PAUSE_S = 5.0, 300.0


class CircuitBreaker:
    """Opens after MAX_FAILURES in a row, then lets one try through after each pause.

    Every failed try doubles the pause, up to a limit; a success closes it and resets the pause.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._num_failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._open_until = 0.0

    @property
    def is_open(self) -> bool:
        """True while it must not be tried."""
        return self._num_failures >= MAX_FAILURES and self._clock() < self._open_until

    def succeed(self) -> None:
        """A try has succeeded."""
        self._num_failures = 0
        self._pause_s = FIRST_PAUSE_S

    def fail(self) -> bool:
        """A try has failed; True if the breaker is open from now on."""
        self._num_failures += 1
        if self._num_failures < MAX_FAILURES:
            return False
        self._open_until = self._clock() + self._pause_s
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        return True
