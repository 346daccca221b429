"""TokenGaps: how long a token of each request took, as an operator counts it."""

from __future__ import annotations

from collections import Counter

from engine.plan.metrics.histogram import Histogram


class TokenGaps:
    """Counts the time from one output of a request to its next, shared equally among the latter's tokens.

    So a step that commits five tokens is five observations of a fifth of the gap: the sum is the time spent
    decoding, the count the tokens, and drafts that are accepted show as tokens that took less. Gaps of zero
    between the tokens of one step, and long ones between steps, would tell the same mean and no percentile.

    Tokens are told one by one, those of a request in a step after each other, then the end of the step. What
    had a token in the last step too is counted together, since its gap is the same.
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
