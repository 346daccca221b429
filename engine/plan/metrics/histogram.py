"""Histogram: observations counted by size. TokenGaps: how long a token took, as an operator counts it."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from operator import sub


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

    def __sub__(self, earlier: Histogram) -> Histogram:
        """What came since `earlier`, a copy of this one or a new one; a copy itself."""
        since = Histogram(self.bounds)
        since.counts = list(map(sub, self.counts, earlier.counts))
        since.sum = self.sum - earlier.sum
        return since

    def copy(self) -> Histogram:
        """All observations so far."""
        return self - Histogram(self.bounds)

    @property
    def count(self) -> int:
        """How many there are."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """0 when there are none."""
        return self.sum / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """What this share does not exceed, guessed evenly in a bucket; at most the last bound, 0 of none."""
        rank = share * self.count
        below, lower = 0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            if count and below + count >= rank:
                return lower + (bound - lower) * max(0.0, rank - below) / count
            below, lower = below + count, bound
        return lower if self.count else 0.0


class TokenGaps:
    """Counts the time from one output of a request to its next, shared equally among the latter's tokens.

    A step that commits five tokens is five observations of a fifth of the gap: the sum is the time spent
    decoding, and drafts that are accepted show as tokens that took less. Tokens are told one by one, those of
    a request after each other, then the step's end. What had a token in the last step, too, has the same gap.
    """

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._last_step = float("-inf")
        self._before = 0.0  # when the request at hand had its last output
        self._num_tokens = 0  # of the request at hand; 0 when there is none
        self._regular: Counter[int] = Counter()  # requests that had a token in the last step, by tokens now

    def add(self, before: float, now: float) -> None:
        """A token that is not its request's first, which comes alone; the last was at `before`, maybe now."""
        if before == now and self._num_tokens:
            self._num_tokens += 1
            return
        self._settle(now)
        self._before, self._num_tokens = before, 1

    def end_step(self, now: float) -> None:
        """All tokens of this step have been told."""
        self._settle(now)
        for num_tokens, num_requests in self._regular.items():
            gap = (now - self._last_step) / num_tokens
            self._histogram.observe(gap, num_tokens * num_requests)
        self._regular.clear()
        self._last_step = now

    def _settle(self, now: float) -> None:
        num_tokens, self._num_tokens = self._num_tokens, 0
        if not num_tokens:
            return
        if self._before == self._last_step:
            self._regular[num_tokens] += 1
        else:
            self._histogram.observe((now - self._before) / num_tokens, num_tokens)
