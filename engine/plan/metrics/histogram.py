"""Histogram: observations counted by size; Distribution: what it had counted at one time, or in between."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass


class Histogram:
    """Counts of observations at or below each bound, plus their sum; the last count is above every bound."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` times over."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        """Observations so far."""
        return sum(self.counts)

    def distribution(self) -> Distribution:
        """All observations so far."""
        return Distribution(self.bounds, tuple(self.counts), self.sum)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Some observations, counted as a histogram counts them."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    def __sub__(self, earlier: Distribution) -> Distribution:
        """What came since `earlier`, which was taken of the same histogram."""
        counts = tuple(now - then for now, then in zip(self.counts, earlier.counts, strict=True))
        return Distribution(self.bounds, counts, self.sum - earlier.sum)

    @property
    def count(self) -> int:
        """How many there are."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """0 when there are none."""
        return self.sum / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """What about this share of them does not exceed, guessed evenly within a bucket; 0 of none.

        Those above every bound count as the last bound.
        """
        rank = share * self.count
        below, lower = 0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            if count and below + count >= rank:
                return lower + (bound - lower) * max(0.0, rank - below) / count
            below, lower = below + count, bound
        return lower if self.count else 0.0
