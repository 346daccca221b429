"""StepCosts: how long a step takes, by its sequences and its tokens, learnt from the steps that ran.

Kept apart from the scheduler's ServiceRates, which is linear: what a draft costs is a matter of where the
machine's own steps in the curve are. Loop thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

_MOST_WEIGHT = 16.0  # observations that an average goes over
_MAX_SURPRISE = 1.3  # an observation counts as so many times the average at most: a stall is no cost
_MAX_FIRST_SURPRISE = 1.5  # a first one counts as so many times the next smaller size at most
_TOO_FAST = 0.5  # of the average: nothing is that fast by accident, so the average was wrong
_MEMORY = 1024  # steps; what was not seen for so long is not held against trying it again
_LONE_MEMORY = 256  # steps; the same for what was seen only once
_PLAIN_EVERY = 256  # steps, at the least, in which one without drafts is wanted
_SEED_WEIGHT = 4
_GUESS = 0.25  # of a straight line between two knots, where others would lie
_FAR = 65536  # tokens
_DRAWN_EVERY = 8  # observations of sizes that are known well; each moves its average by a sixteenth at most
_TRUSTED_SPAN = 8  # tokens; the slope of a curve that spans so few counts half beyond its end


@dataclass(slots=True)
class _Knot:
    """Steps of about equal size, on average."""

    num_tokens: float
    seconds: float
    weight: float
    last_step: int

    @property
    def is_lone(self) -> bool:
        """True until there is a second observation, which may show that the first was a stall."""
        return self.weight < 2

    def is_forgotten(self, step: int) -> bool:
        """True if it was last seen too long before that step."""
        return step - self.last_step > (_LONE_MEMORY if self.is_lone else _MEMORY)

    def observe(self, num_tokens: int, seconds: float, step: int) -> None:
        self.last_step = step
        if seconds < _TOO_FAST * self.seconds:
            self.num_tokens, self.seconds, self.weight = num_tokens, seconds, 2.0
            return
        self.weight = min(_MOST_WEIGHT, self.weight + 1)
        self.num_tokens += (num_tokens - self.num_tokens) / self.weight
        if self.weight == 2:
            self.seconds = min(self.seconds, seconds)
        else:
            self.seconds += (min(seconds, _MAX_SURPRISE * self.seconds) - self.seconds) / self.weight


class _Curve:
    """Seconds by tokens: a few dozen knots, one each below 8 tokens, then four for each doubling."""

    __slots__ = ("_knots", "_sorted")

    def __init__(self) -> None:
        self._knots: dict[int, _Knot] = {}
        self._sorted: list[_Knot] | None = None

    def observe(self, num_tokens: int, seconds: float, step: int) -> bool:
        """Learn from a step; True if the curve may be quite another by it."""
        knot = self.knot(num_tokens)
        if knot is None:
            self._knots[_index(num_tokens)] = _Knot(num_tokens, seconds, 1.0, step)
            self._sorted = None
            return True
        knot.observe(num_tokens, seconds, step)
        return knot.weight < _MOST_WEIGHT

    def forget(self, step: int) -> None:
        """Drop what was last seen long before that step."""
        self._knots = {index: knot for index, knot in self._knots.items() if not knot.is_forgotten(step)}
        self._sorted = None

    def knot(self, num_tokens: int) -> _Knot | None:
        """What is known of steps of about so many tokens; None if there was none."""
        return self._knots.get(_index(num_tokens))

    def knots(self) -> list[_Knot]:
        """All, in order of their tokens: not to be changed."""
        if self._sorted is None:
            self._sorted = [self._knots[index] for index in sorted(self._knots)]
        return self._sorted

    def at(self, num_tokens: int) -> float | None:
        """Seconds of so many tokens, as at the nearest known beyond both ends; None when empty."""
        points = _increasing(self.knots(), None)
        if not points:
            return None
        return float(np.interp(num_tokens, [n for n, _ in points], [s for _, s in points]))


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
        self._lines: dict[int, tuple[list[float], list[float]] | None] = {}  # until there is news

    def observe(self, num_seqs: int, num_tokens: int, seconds: float) -> None:
        """Learn from one step that computed so many tokens of so many sequences."""
        if num_seqs < 1 or num_tokens < num_seqs or seconds <= 0:
            return
        self._step += 1
        if num_tokens == num_seqs:
            is_news = self._plain.observe(num_tokens, seconds, self._step)
        else:
            bucket = num_seqs.bit_length()
            while bucket >= len(self._wider):
                self._wider.append(_Curve())
            is_news = self._wider[bucket].observe(num_tokens, seconds, self._step)
        if self._step % _LONE_MEMORY == 0:
            for curve in self._wider:
                curve.forget(self._step)
        if is_news or self._step % _DRAWN_EVERY == 0:
            self._lines.clear()

    def seed(self, profile: Sequence[tuple[int, int, float]]) -> None:
        """Take (sequences, tokens, seconds) that were measured beforehand."""
        for _ in range(_SEED_WEIGHT):
            for num_seqs, num_tokens, seconds in profile:
                self.observe(num_seqs, num_tokens, seconds)

    def needs_plain(self, num_seqs: int) -> bool:
        """True if no step without drafts was seen at about this size for long.

        Drafts are held against such steps, so one should be run.
        """
        knot = self._plain.knot(num_seqs)
        return knot is None or knot.is_lone or self._step - knot.last_step > _PLAIN_EVERY

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
        plain_s = self._plain.at(num_seqs)
        if plain_s is None:
            known = _increasing(nearest, None)
            if not known:
                return None
            plain_s = next((s for n, s in known if n > num_seqs), known[-1][1])
        wider = _increasing([knot for knot in nearest if knot.num_tokens > num_seqs], plain_s)
        if wider:
            plain_s = min(plain_s, wider[0][1])
        else:
            larger = [knot for knot in self._plain.knots() if knot.num_tokens > num_seqs]
            wider = [(n, max(plain_s, s)) for n, s in _increasing(larger, plain_s)]
        line = _lowered([(float(num_seqs), plain_s), *wider])
        last_n, last_s = line[-1]
        slope = (last_s - plain_s) / (last_n - num_seqs + _TRUSTED_SPAN)  # a few tokens tell little of many
        line.append((last_n + _FAR, last_s + _FAR * slope))
        return [n for n, _ in line], [s for _, s in line]

    def _nearest(self, bucket: int) -> list[_Knot]:
        """The knots of the curve for about so many sequences, which may be one for fewer or more."""
        for distance in range(max(bucket, len(self._wider)) + 1):
            for index in (bucket - distance, bucket + distance):
                if 0 <= index < len(self._wider) and (knots := self._wider[index].knots()):
                    return knots
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


def _increasing(knots: Sequence[_Knot], floor_s: float | None) -> list[tuple[float, float]]:
    """Tokens and seconds, of which none lies below the one before, by pooling neighbours by weight.

    `floor_s` is what a smaller step takes, None when unknown.
    """
    pools: list[list[float]] = []  # weighted seconds, weight, first and one past the last knot
    for i, knot in enumerate(knots):
        seconds = knot.seconds
        if knot.is_lone and floor_s is not None:
            seconds = min(seconds, _MAX_FIRST_SURPRISE * floor_s)
        floor_s = seconds if floor_s is None else max(floor_s, seconds)
        pool = [seconds * knot.weight, knot.weight, i, i + 1]
        while pools and pools[-1][0] * pool[1] > pool[0] * pools[-1][1]:
            before = pools.pop()
            pool = [before[0] + pool[0], before[1] + pool[1], before[2], pool[3]]
        pools.append(pool)
    return [
        (knots[i].num_tokens, total / weight)
        for total, weight, first, end in pools
        for i in range(int(first), int(end))
    ]
