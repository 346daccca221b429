"""Calibration: what became of drafts that were given with a chance, and so what such a chance is worth.

A drafter's own confidence tells its good drafts from its bad ones (Li et al., "EAGLE-2", 2024), but not how
often either come: a layer that was trained on distributions says too little of a target that is greedy.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from engine.plan.speculation.isotonic import never_decreasing

_STATED = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 1.0)  # where the curve is known
_KEEP = 0.5 ** (1 / 512)  # half of an observation's weight is gone 512 observations later
_PRIOR_WEIGHT = 4.0  # observations that the drafter's word counts for
_REFRESH = 64  # observations, after which the curve is drawn again


class Calibration:
    """A curve from stated chances to those that they turned out to be: straight between knots, never falling.

    Before anything was observed a drafter is taken at its word.
    """

    def __init__(self) -> None:
        self._judged = [0.0] * len(_STATED)
        self._came = [0.0] * len(_STATED)
        self._num_unseen = 0  # observations that are not in the curve yet
        self._curve = list(_STATED)

    def observe(self, stated: Sequence[float], came: Sequence[bool]) -> None:
        """Drafts of these chances were verified; each counts for the two knots beside it."""
        for chance, is_right in zip(stated, came, strict=True):
            knot, share = _place(chance)
            for at, weight in ((knot, 1.0 - share), (knot + 1, share)):
                kept = _KEEP**weight
                self._judged[at] = kept * self._judged[at] + weight
                self._came[at] = kept * self._came[at] + weight * is_right
        self._num_unseen += len(stated)
        if self._num_unseen >= _REFRESH:
            self._draw()

    def _draw(self) -> None:
        self._num_unseen = 0
        rates = (
            ((came + _PRIOR_WEIGHT * chance) / (judged + _PRIOR_WEIGHT), judged + _PRIOR_WEIGHT)
            for chance, came, judged in zip(_STATED, self._came, self._judged, strict=True)
        )
        self._curve = never_decreasing(rates)

    def read(self, stated: Sequence[float]) -> list[float]:
        """What each of these chances is worth."""
        curve = self._curve
        found = []
        for chance in stated:
            knot, share = _place(chance)
            found.append(curve[knot] + share * (curve[knot + 1] - curve[knot]))
        return found

    def least_stated(self, chance: float) -> float:
        """The least stated chance that is worth this one; 1 where none is."""
        knot = bisect_left(self._curve, chance)
        if knot == 0:
            return 0.0
        if knot == len(_STATED):
            return 1.0
        low, high = self._curve[knot - 1], self._curve[knot]
        return _STATED[knot - 1] + (chance - low) / (high - low) * (_STATED[knot] - _STATED[knot - 1])


def _place(chance: float) -> tuple[int, float]:
    """The knot at or before a chance, never the last, and how far it is on the way to the next."""
    knot = min(bisect_right(_STATED, chance), len(_STATED) - 1) - 1
    return knot, (chance - _STATED[knot]) / (_STATED[knot + 1] - _STATED[knot])
