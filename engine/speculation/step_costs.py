"""StepCosts: how long a step takes, by its sequences and its tokens, learnt from the steps that ran.

Kept apart from the scheduler's CostModel, which is linear: what a draft costs is a matter of where the
machine's own steps in the curve are. Loop thread only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

_MOST_WEIGHT = 16.0  # observations that an average goes over
_MAX_SURPRISE = 1.3  # an observation counts as so many times the average at most: a stall is no cost
_MAX_FIRST_SURPRISE = 1.5  # a first one counts as so many times what was expected at most, until the second
_TOO_FAST = 0.5  # of the average: nothing is that fast by accident, so the average was wrong
_MEMORY = 1024  # steps; what was not seen for so long is not held against trying it again
_LONE_MEMORY = 256  # steps; the same for what was seen only once
_PLAIN_EVERY = 256  # steps, at the least, in which one without drafts is wanted
_SEED_WEIGHT = 4
_GUESS = 0.25  # of a straight line between two knots, where others would lie
_FAR = 65536  # tokens
_TRUSTED_SPAN = 8  # tokens; the slope of a curve that spans so few counts half beyond its end


@dataclass(slots=True)
class _Knot:
    """Steps of about equal size, on average."""

    num_tokens: float
    seconds: float
    first_s: float
    weight: float
    last_step: int

    def observe(self, num_tokens: int, seconds: float, step: int) -> None:
        self.last_step = step
        if seconds < _TOO_FAST * self.seconds:
            self.num_tokens, self.seconds, self.weight = num_tokens, seconds, 2.0
            return
        self.weight = min(_MOST_WEIGHT, self.weight + 1)
        self.num_tokens += (num_tokens - self.num_tokens) / self.weight
        if self.weight == 2:
            self.seconds = min(self.first_s, seconds)
        else:
            self.seconds += (min(seconds, _MAX_SURPRISE * self.seconds) - self.seconds) / self.weight


class _Curve:
    """Seconds by tokens: a few dozen knots, one each below 8 tokens, then four for each doubling."""

    __slots__ = ("_knots", "_points")

    def __init__(self) -> None:
        self._knots: dict[int, _Knot] = {}
        self._points: list[tuple[float, float]] | None = None

    def observe(self, num_tokens: int, seconds: float, step: int, expected: float | None) -> None:
        index = _index(num_tokens)
        knot = self._knots.get(index)
        if knot is None:
            likely = seconds if expected is None else min(seconds, _MAX_FIRST_SURPRISE * expected)
            self._knots[index] = _Knot(num_tokens, likely, seconds, 1.0, step)
        else:
            knot.observe(num_tokens, seconds, step)
        self._points = None

    def forget(self, step: int) -> None:
        """Drop what was last seen long before that step."""
        old = [
            index
            for index, knot in self._knots.items()
            if step - knot.last_step > (_MEMORY if knot.weight > 1 else _LONE_MEMORY)
        ]
        for index in old:
            del self._knots[index]
        if old:
            self._points = None

    def last_seen(self, num_tokens: int) -> int | None:
        """The step in which so many tokens were last seen; None if never."""
        knot = self._knots.get(_index(num_tokens))
        return None if knot is None else knot.last_step

    def points(self) -> list[tuple[float, float]]:
        """(tokens, seconds) in order, where more tokens never take less: not to be changed."""
        if self._points is None:
            self._points = _increasing([self._knots[index] for index in sorted(self._knots)])
        return self._points

    def at(self, num_tokens: int) -> float | None:
        """Seconds of so many tokens, as at the nearest known beyond both ends; None when empty."""
        points = self.points()
        if not points:
            return None
        above = bisect_right(points, (num_tokens, float("inf")))
        if above == 0:
            return points[0][1]
        if above == len(points):
            return points[-1][1]
        (left, low), (right, high) = points[above - 1], points[above]
        return low + (high - low) * (num_tokens - left) / (right - left)


class StepCosts:
    """Seconds of a step as a piecewise linear function that never sinks with more tokens.

    Steps of one token a sequence have a curve of their own, since a machine may have a faster way for them;
    those with drafts have one for each doubling of the sequences. What was never seen is guessed low, and
    what was not seen for long is forgotten: one step shows better.
    """

    def __init__(self) -> None:
        self._step = 0
        self._plain = _Curve()
        self._wider: list[_Curve] = []  # by bit length of the sequences
        self._lines: dict[int, tuple[list[float], list[float]] | None] = {}  # until the next observation

    def observe(self, num_seqs: int, num_tokens: int, seconds: float) -> None:
        """Learn from one step that computed so many tokens of so many sequences."""
        if num_seqs < 1 or num_tokens < num_seqs or seconds <= 0:
            return
        self._step += 1
        expected = self.seconds(num_seqs, num_tokens)
        self._lines.clear()
        if num_tokens == num_seqs:
            self._plain.observe(num_tokens, seconds, self._step, expected)
        else:
            bucket = num_seqs.bit_length()
            while bucket >= len(self._wider):
                self._wider.append(_Curve())
            self._wider[bucket].observe(num_tokens, seconds, self._step, expected)
        if self._step % _LONE_MEMORY == 0:
            for curve in self._wider:
                curve.forget(self._step)

    def seed(self, profile: Sequence[tuple[int, int, float]]) -> None:
        """Take (sequences, tokens, seconds) that were measured beforehand."""
        for _ in range(_SEED_WEIGHT):
            for num_seqs, num_tokens, seconds in profile:
                self.observe(num_seqs, num_tokens, seconds)

    def needs_plain(self, num_seqs: int) -> bool:
        """True if no step without drafts was seen at about this size for long.

        Drafts are held against such steps, so one should be run.
        """
        last = self._plain.last_seen(num_seqs)
        return last is None or self._step - last > _PLAIN_EVERY

    def seconds(self, num_seqs: int, num_tokens: int) -> float | None:
        """Seconds of a step; None while nothing is known."""
        run = self.run(num_seqs, num_tokens, 0)
        return None if run is None else float(run[0])

    def run(self, num_seqs: int, num_tokens: int, num_more: int) -> NDArray[np.float64] | None:
        """Seconds of a step with 0, 1, ... `num_more` tokens beyond `num_tokens`; None while unknown."""
        if num_seqs not in self._lines:
            self._lines[num_seqs] = self._line(num_seqs)
        line = self._lines[num_seqs]
        if line is None:
            return None
        return np.interp(np.arange(num_tokens, num_tokens + num_more + 1), *line)

    def _line(self, num_seqs: int) -> tuple[list[float], list[float]] | None:
        """Tokens and seconds for so many sequences, from the step without drafts to one far out."""
        nearest = self._nearest(num_seqs.bit_length())
        wider = [point for point in nearest if point[0] > num_seqs]
        plain_s = self._plain.at(num_seqs)
        if plain_s is None:
            if not nearest:
                return None
            plain_s = (wider[0] if wider else nearest[-1])[1]
        if wider:
            plain_s = min(plain_s, wider[0][1])
        else:
            wider = [(n, max(plain_s, s)) for n, s in self._plain.points() if n > num_seqs]
        line = _lowered([(float(num_seqs), plain_s), *wider])
        last_n, last_s = line[-1]
        slope = (last_s - plain_s) / (last_n - num_seqs + _TRUSTED_SPAN)  # a few tokens tell little of many
        line.append((last_n + _FAR, last_s + _FAR * slope))
        return [n for n, _ in line], [s for _, s in line]

    def _nearest(self, bucket: int) -> list[tuple[float, float]]:
        """The points of the curve for about so many sequences, which may be one for fewer or more."""
        for distance in range(max(bucket, len(self._wider)) + 1):
            for index in (bucket - distance, bucket + distance):
                if 0 <= index < len(self._wider) and (points := self._wider[index].points()):
                    return points
        return []


def _index(num_tokens: int) -> int:
    """Which knot a step belongs to."""
    shift = max(0, num_tokens.bit_length() - 3)
    return 4 * shift + (num_tokens >> shift)


def _lowered(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points, and one where knots are missing between two: a guess that makes it worth a look there."""
    lowered = [points[0]]
    for (left, low), (right, high) in pairwise(points):
        index = _index(int(right))
        if index > _index(int(left)) + 1:
            shift = max(0, index // 4 - 1)
            before = ((index - 4 * shift) << shift) - 0.5  # between what this knot stands for and the gap
            lowered.append((before, low + _GUESS * (high - low) * (before - left) / (right - left)))
        lowered.append((right, high))
    return lowered


def _increasing(knots: Sequence[_Knot]) -> list[tuple[float, float]]:
    """Points of which none lies below the one before, by pooling neighbours by weight."""
    pools: list[list[float]] = []  # weighted seconds, weight, first and one past the last knot
    for i, knot in enumerate(knots):
        pool = [knot.seconds * knot.weight, knot.weight, i, i + 1]
        while pools and pools[-1][0] * pool[1] > pool[0] * pools[-1][1]:
            before = pools.pop()
            pool = [before[0] + pool[0], before[1] + pool[1], before[2], pool[3]]
        pools.append(pool)
    return [
        (knots[i].num_tokens, total / weight)
        for total, weight, first, end in pools
        for i in range(int(first), int(end))
    ]
