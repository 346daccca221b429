"""What many measured values have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import fsum


@dataclass(frozen=True, slots=True)
class Distribution:
    """`count` values; all else is 0 when there are none."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution:
        """The distribution of `values`, in any order."""
        ordered = sorted(values)
        if not ordered:
            return cls(0, 0.0, 0.0, 0.0, 0.0, 0.0)
        return cls(
            len(ordered),
            fsum(ordered) / len(ordered),
            percentile(ordered, 0.5),
            percentile(ordered, 0.9),
            percentile(ordered, 0.99),
            ordered[-1],
        )


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of `ordered` lies, between two neighbours by straight line.

    The usual definition (numpy's "linear"): share 0 is the first, 1 the last.
    """
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
