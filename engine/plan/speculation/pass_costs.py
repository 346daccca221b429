"""PassCosts: the seconds of a pass by its sequences and tokens, learnt from the passes that ran.

The scheduler's rates are linear; the price of a draft depends on where the machine's curve has its steps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from engine.plan.speculation.isotonic import never_decreasing

_MOST_WEIGHT = 16.0  # observations that an average goes over
_STEADY_WEIGHT = 4.0  # from which one more observation hardly moves it
_MAX_SURPRISE = 1.3  # times the average, that an observation counts at most: a stall is no cost
_MAX_FIRST_SURPRISE = 1.5  # times the next smaller size, that a first one counts at most
_TOO_FAST = 0.5  # of the average: no pass is that fast by accident, so the average was wrong
_MEMORY = 1024  # steps, after which a size is forgotten and so tried again
_LONE_MEMORY = 256  # steps; the same for a size that was seen once
_PLAIN_EVERY = 256  # steps, after which one without drafts is wanted
_SEED_WEIGHT = 4
_FRESH = 512  # steps, in which a size is as good as just seen; the next so many halve what is known of it
_PACE_SHARE = 1 / 8  # of the newest pass in the machine's pace
_GUESS = 0.25  # of the way up between two knots, where unknown ones between them are assumed
_FAR = 65536  # tokens
_DRAWN_EVERY = 8  # observations of well-known sizes, after which lines are drawn again
_TRUSTED_SPAN = 8  # tokens; beyond its end, a curve that spans so few has half its slope


@dataclass(slots=True)
class _Knot:
    """The average of passes of about equal size, at one pace; `pace` was the machine's when it was begun."""

    num_tokens: float
    seconds: float
    weight: float
    last_step: int
    pace: float

    @property
    def is_lone(self) -> bool:
        """True until a second observation shows whether the first was a stall."""
        return self.weight < 2

    def is_forgotten(self, step: int) -> bool:
        """True if it was last seen too long before that step."""
        return step - self.last_step > (_LONE_MEMORY if self.is_lone else _MEMORY)

    def trust(self, step: int) -> float:
        """How much it still says at that step, 1 to 0."""
        return float(0.5 ** max(0.0, (step - self.last_step) / _FRESH - 1))

    def is_wrong_by(self, seconds: float) -> bool:
        """True if no pass of that size could be so fast."""
        return seconds < _TOO_FAST * self.seconds

    def observe(self, num_tokens: int, seconds: float, step: int) -> None:
        self.weight = max(1.0, self.weight * self.trust(step))
        self.last_step = step
        if self.is_wrong_by(seconds):
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

    def __init__(self) -> None:
        self._knots: dict[int, _Knot] = {}
        self._sorted: list[_Knot] | None = None

    def observe(self, num_tokens: int, seconds: float, step: int, pace: float) -> bool:
        """Learn from a pass, at one pace; True if it may change the curve much."""
        knot = self.knot(num_tokens)
        if knot is None:
            self._knots[_index(num_tokens)] = _Knot(num_tokens, seconds, 1.0, step, pace)
            self._sorted = None
            return True
        knot.observe(num_tokens, seconds, step)
        return knot.weight < _STEADY_WEIGHT

    def forget(self, step: int) -> None:
        """Drop what was last seen long before that step."""
        self._knots = {index: knot for index, knot in self._knots.items() if not knot.is_forgotten(step)}
        self._sorted = None

    def knot(self, num_tokens: int) -> _Knot | None:
        """The average of passes of about so many tokens; None if there was none."""
        return self._knots.get(_index(num_tokens))

    def knots(self) -> list[_Knot]:
        """All, in order of their tokens; the caller must not change the list."""
        if self._sorted is None:
            self._sorted = [self._knots[index] for index in sorted(self._knots)]
        return self._sorted

    def at(self, num_tokens: int) -> float | None:
        """Seconds of so many tokens, constant beyond both ends; None when empty."""
        points = _increasing(self.knots(), None)
        if not points:
            return None
        return float(np.interp(num_tokens, [n for n, _ in points], [s for _, s in points]))


class PassCosts:
    """Seconds of a pass as a piecewise linear function that never sinks with more tokens.

    Passes of one token a sequence have their own curve, since a machine may run them faster; passes with
    drafts have one for each doubling of the sequences. A size never seen is guessed low, and one not seen for
    long is forgotten, because trying it costs one step and shows the truth.

    A machine's pace drifts by more than a draft costs, and sizes are not seen at the same times. So averages
    are kept of seconds at one pace, which is followed apart.
    """

    def __init__(self) -> None:
        self._step = 0
        self._pace = 1.0  # seconds that a second of the averages takes now
        self._plain = _Curve()
        self._wider: list[_Curve] = []  # by bit length of the sequences
        self._lines: dict[int, tuple[list[float], list[float]] | None] = {}  # until there is news

    def observe(self, num_seqs: int, num_tokens: int, seconds: float) -> None:
        """Learn from a pass that computed so many tokens of so many sequences."""
        if num_seqs < 1 or num_tokens < num_seqs or seconds <= 0:
            return
        self._step += 1
        curve = self._plain
        if num_tokens > num_seqs:
            bucket = num_seqs.bit_length()
            while bucket >= len(self._wider):
                self._wider.append(_Curve())
            curve = self._wider[bucket]
        knot = curve.knot(num_tokens)
        if knot is not None and knot.is_wrong_by(seconds / self._pace):
            # So is what it made of the pace: steps now slow, now fast would raise it for ever.
            self._pace = min(self._pace, knot.pace)
        is_news = curve.observe(num_tokens, seconds / self._pace, self._step, self._pace)
        if knot is not None and not knot.is_lone:
            surprise = min(seconds / (self._pace * knot.seconds), _MAX_SURPRISE)
            self._pace *= 1 + _PACE_SHARE * (surprise - 1)
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

    @property
    def is_known(self) -> bool:
        """True once a pass was observed."""
        return self._step > 0

    def needs_plain(self, num_seqs: int) -> bool:
        """True if a pass without drafts of about this size should be run: drafts are compared with it."""
        knot = self._plain.knot(num_seqs)
        return knot is None or knot.is_lone or self._step - knot.last_step > _PLAIN_EVERY

    def seconds(self, num_seqs: int, num_tokens: int) -> float | None:
        """Seconds of a pass; None while nothing is known."""
        line = self._line_of(num_seqs)
        return None if line is None else self._pace * _at(*line, num_tokens)

    def plain(self, most: int) -> NDArray[np.float64] | None:
        """Seconds of passes of 1, 2, ... `most` sequences without drafts; None while there was none."""
        points = _increasing(self._plain.knots(), None)
        if not points:
            return None
        sizes = np.arange(1, most + 1)
        return self._pace * np.interp(sizes, [n for n, _ in points], [s for _, s in points])

    def run(self, num_seqs: int, num_tokens: int, num_more: int) -> NDArray[np.float64] | None:
        """Seconds of a pass with 0, 1, ... `num_more` tokens beyond `num_tokens`; None while unknown."""
        line = self._line_of(num_seqs)
        if line is None:
            return None
        return self._pace * np.interp(np.arange(num_tokens, num_tokens + num_more + 1), *line)

    def _line_of(self, num_seqs: int) -> tuple[list[float], list[float]] | None:
        if num_seqs not in self._lines:
            self._lines[num_seqs] = self._line(num_seqs)
        return self._lines[num_seqs]

    def _line(self, num_seqs: int) -> tuple[list[float], list[float]] | None:
        """Tokens and seconds for so many sequences, from a pass without drafts to one of very many tokens."""
        nearest = self._nearest(num_seqs.bit_length())
        plain_s = self._plain.at(num_seqs)
        if plain_s is None:
            known = _increasing(nearest, None)
            if not known:
                return None
            plain_s = next((s for n, s in known if n > num_seqs), known[-1][1])
        wider = _increasing([knot for knot in nearest if knot.num_tokens > num_seqs], plain_s, self._step)
        if wider:
            plain_s = min(plain_s, wider[0][1])
        else:
            larger = [knot for knot in self._plain.knots() if knot.num_tokens > num_seqs]
            wider = [(n, max(plain_s, s)) for n, s in _increasing(larger, plain_s, self._step)]
        line = _lowered([(float(num_seqs), plain_s), *wider])
        last_n, last_s = line[-1]
        slope = (last_s - plain_s) / (last_n - num_seqs + _TRUSTED_SPAN)  # a few tokens tell little of many
        line.append((last_n + _FAR, last_s + _FAR * slope))
        return [n for n, _ in line], [s for _, s in line]

    def _nearest(self, bucket: int) -> list[_Knot]:
        """The knots of the curve for about so many sequences, or the nearest number that has one."""
        for distance in range(max(bucket, len(self._wider)) + 1):
            for index in (bucket - distance, bucket + distance):
                if 0 <= index < len(self._wider) and (knots := self._wider[index].knots()):
                    return knots
        return []


def _at(places: Sequence[float], values: Sequence[float], place: float) -> float:
    """As np.interp, which takes longer for a single place."""
    right = bisect_right(places, place)
    if right == 0 or right == len(places):
        return values[max(0, right - 1)]
    left, low = places[right - 1], values[right - 1]
    return low + (values[right] - low) * (place - left) / (places[right] - left)


def _index(num_tokens: int) -> int:
    """The knot that a pass belongs to."""
    shift = max(0, num_tokens.bit_length() - 3)
    return 4 * shift + (num_tokens >> shift)


def _lowered(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points, and a low guess where knots are missing between two, so that a size there is tried."""
    lowered = [points[0]]
    for (left, low), (right, high) in pairwise(points):
        index = _index(int(right))
        if index > _index(int(left)) + 1:
            shift = max(0, index // 4 - 1)
            before = ((index - 4 * shift) << shift) - 0.5  # between what this knot stands for and the gap
            lowered.append((before, low + _GUESS * (high - low) * (before - left) / (right - left)))
        lowered.append((right, high))
    return lowered


def _increasing(
    knots: Sequence[_Knot], floor_s: float | None, step: int | None = None
) -> list[tuple[float, float]]:
    """Tokens and seconds, none below the one before; `floor_s` is what a smaller pass takes, if known.

    What a size takes beyond a smaller one is believed less the longer before `step` it was seen: it may have
    been an accident, and who avoids it would never know. None believes all.
    """
    weighted: list[tuple[float, float]] = []
    for knot in knots:
        seconds = knot.seconds
        if knot.is_lone and floor_s is not None:
            seconds = min(seconds, _MAX_FIRST_SURPRISE * floor_s)
        if step is not None and floor_s is not None and seconds > floor_s:
            seconds = floor_s + (seconds - floor_s) * knot.trust(step)
        floor_s = seconds if floor_s is None else max(floor_s, seconds)
        weighted.append((seconds, knot.weight))
    return [(knot.num_tokens, s) for knot, s in zip(knots, never_decreasing(weighted), strict=True)]
