"""Activity: what the engine did up to a time, or between two, in plain numbers."""

from __future__ import annotations

from collections import deque
from operator import sub
from typing import NamedTuple

from engine.plan.metrics.histogram import Histogram

HORIZON_S = 60.0
_SNAPSHOT_S = 5.0  # how finely the last minute is known
PHASES = ("prefill", "decode", "mixed")


class Activity(NamedTuple):
    """What was counted up to a time of the engine's clock; a difference of two is what came in between."""

    seconds: float  # that time, or the length of the difference
    num_ended: int
    prompt_tokens: int
    generation_tokens: int
    num_sequences: int  # the sum of the batch sizes of all steps
    busy_s: float  # in steps
    seats_s: float  # in steps, times the share of seats in use
    kv_s: float  # in steps, times the share of K/V blocks in use
    step_tokens: Histogram
    time_to_first_token: Histogram
    prefill: Histogram  # seconds of the steps that computed nothing else
    decode: Histogram
    mixed: Histogram  # of those that computed both

    def __sub__(self, earlier: Activity) -> Activity:
        return Activity(*map(sub, self, earlier))

    @property
    def num_steps(self) -> int:
        """Steps that computed something."""
        return self.step_tokens.count

    def figures(self) -> dict[str, float]:
        """All of it in numbers for a log, by name; of what was observed many times the mean."""
        means = (value.mean if isinstance(value, Histogram) else value for value in self)
        return {name: round(mean, 4) for name, mean in zip(self._fields, means, strict=True)}


class RollingWindow:
    """Keeps some totals of the last minute, so that what came since then can be told."""

    def __init__(self) -> None:
        self._first: Activity | None = None
        self._kept: deque[Activity] = deque()
        self._next_s = float("-inf")

    def is_due(self, now: float) -> bool:
        """True if there should be new totals to `keep`."""
        return now >= self._next_s

    def keep(self, totals: Activity) -> None:
        """Remember these, and forget what is older than a minute then."""
        self._first = self._first or totals
        self._kept.append(totals)
        self._next_s = totals.seconds + _SNAPSHOT_S
        while totals.seconds - self._kept[0].seconds > HORIZON_S:
            self._kept.popleft()

    def last_minute(self, now: Activity) -> Activity:
        """What came in the last minute; less of it if the window is younger. Nothing, if nothing is kept."""
        recent = (kept for kept in self._kept if now.seconds - kept.seconds <= HORIZON_S)
        return now - next(recent, now)

    def all(self, now: Activity) -> Activity:
        """What came since the first totals that were kept."""
        return now - (self._first or now)
