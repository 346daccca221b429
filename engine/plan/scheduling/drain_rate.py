"""DrainRate: how fast requests end while there is work, for an honest Retry-After."""

from __future__ import annotations

import math

HORIZON_S = 30.0
MAX_RETRY_AFTER_S = 120


class DrainRate:
    """Requests ended over busy seconds, both decayed so that the last half minute of work counts most.

    Idle time is not observed: a server that had nothing to do is not a slow one.
    """

    def __init__(self, horizon_s: float = HORIZON_S) -> None:
        self._horizon_s = horizon_s
        self._num_finished = 0.0
        self._seconds = 0.0

    def observe(self, num_finished: int, seconds: float) -> None:
        """Count the requests that ended during `seconds` of work: a step, usually."""
        keep = math.exp(-seconds / self._horizon_s)
        self._num_finished = self._num_finished * keep + num_finished
        self._seconds = self._seconds * keep + seconds

    @property
    def per_second(self) -> float | None:
        """Requests ended a second; None before any time was observed.

        While less than one request has ended it counts as one: no slower rate has been seen.
        """
        return max(1.0, self._num_finished) / self._seconds if self._seconds > 0 else None

    def retry_after_s(self, num_queued: int) -> int:
        """Whole seconds until `num_queued` requests have ended, 1 to 120; 1 while the rate is unknown."""
        rate = self.per_second
        if rate is None:
            return 1
        return min(MAX_RETRY_AFTER_S, max(1, math.ceil(num_queued / rate)))
