"""ServiceRates: measured seconds of prefill, decode and swap. DrainRate: how fast requests end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import nsmallest

from engine.plan.speculation.spec_stats import RecentRatio

_MEMORY = 0.99  # of a step's weight is left one step later: some hundred steps count
_FIRST_FIT, _FIT_EVERY = 8, 16  # steps; before the first fit nothing is known
_SEED_ROUNDS = 4  # each as good as so many steps
_LONG_CHUNK = 64  # prefill tokens from which one step alone tells what they cost
_SWEEPS = 24
_DRAIN_HORIZON_S = 30.0
_MAX_RETRY_AFTER_S = 120
_MAX_SURPRISE = 4.0  # a step counts as at most this many times the expected: a stall is no rate


@dataclass(frozen=True, slots=True)
class ReplyWork:
    """What a reply needs once it runs, `num_beside` others beside it."""

    num_to_compute: int  # known tokens
    tokens_a_chunk: int  # of those in a step
    num_steps: float  # that give it its tokens
    num_beside: int


class ServiceRates:
    """Seconds of a step = fixed + one cost a prefill token + one cost a decode, none of them below 0.

    Fitted by least squares with exponential forgetting: `observe` adds to the sums, and every few steps
    coordinate descent solves them from the last answer. Estimates are None while unknown. A part that no step
    tells from the others gets at most its share, so that estimates for one request err towards too fast.
    Swapping is timed apart, by the byte.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._products = [[0.0] * 3 for _ in range(3)]
        self._times = [0.0] * 3
        self._costs = [0.0] * 3
        self._swap = RecentRatio(_MEMORY)  # seconds over bytes
        self._stretch = RecentRatio(_MEMORY)  # seconds by the clock over those of decodes alone

    @property
    def is_known(self) -> bool:
        """True once enough steps were observed for an estimate."""
        return self._num_steps >= _FIRST_FIT

    def observe(self, num_prefill_tokens: int, num_decode_tokens: int, seconds: float) -> None:
        """Learn from one step that ran."""
        expected = self.step_s(num_prefill_tokens, num_decode_tokens)
        if expected:
            seconds = min(seconds, _MAX_SURPRISE * expected)
        step = (1.0, float(num_prefill_tokens), float(num_decode_tokens))
        for value, row in zip(step, self._products, strict=True):
            for column, other in enumerate(step):
                row[column] = _MEMORY * row[column] + value * other
        self._times = [_MEMORY * old + value * seconds for old, value in zip(self._times, step, strict=True)]
        self._num_steps += 1
        is_telling = num_prefill_tokens >= _LONG_CHUNK and self.is_known
        if is_telling or self._num_steps == _FIRST_FIT or self._num_steps % _FIT_EVERY == 0:
            self._fit()

    def seed(self, profile: Iterable[tuple[int, int, float]]) -> None:
        """Learn from (prefill tokens, decodes, seconds) measured beforehand, which count several times."""
        for num_prefill_tokens, num_decode_tokens, seconds in list(profile) * _SEED_ROUNDS:
            self.observe(num_prefill_tokens, num_decode_tokens, seconds)

    def observe_swap(self, num_bytes: int, seconds: float) -> None:
        """Learn from K/V blocks that were copied to or from host memory."""
        self._swap.observe(seconds, num_bytes)

    def _fit(self) -> None:
        costs = self._costs
        for _ in range(_SWEEPS):
            for i, row in enumerate(self._products):
                if row[i]:
                    predicted = row[0] * costs[0] + row[1] * costs[1] + row[2] * costs[2]
                    costs[i] = max(0.0, costs[i] + (self._times[i] - predicted) / row[i])

    def step_s(self, num_prefill_tokens: int, num_decode_tokens: int) -> float | None:
        """Seconds of a step that computes this many tokens; None while unknown."""
        if not self.is_known:
            return None
        fixed, prefill, decode = self._costs
        return fixed + prefill * num_prefill_tokens + decode * num_decode_tokens

    def prefill_tokens_within(self, seconds: float, num_decodes: int) -> int | None:
        """Prompt tokens that fit a step of `seconds` beside the decodes; None while unknown."""
        step = self.step_s(0, num_decodes)
        if step is None or self._costs[1] <= 0:
            return None
        return max(0, int((seconds - step) / self._costs[1]))

    def prefill_s(self, num_tokens: int) -> float | None:
        """Seconds that computing prompt tokens adds to steps that run anyway; None while unknown."""
        return self._costs[1] * num_tokens if self.is_known else None

    def swap_s(self, num_bytes: int) -> float | None:
        """Seconds to copy bytes between device and host; None while unknown."""
        return self._swap.ratio * num_bytes if self._swap.whole else None

    def swap_is_cheaper(self, num_tokens: int, num_bytes: int) -> bool:
        """True if copying KV out and back is known to be faster than computing it, and once to find out."""
        compute_s, swap_s = self.prefill_s(num_tokens), self.swap_s(2 * num_bytes)
        return compute_s is not None and (swap_s is None or swap_s < compute_s)

    def observe_clock(self, num_decode_tokens: int, seconds: float) -> None:
        """A step with so many decodes took so long by the clock: with its drafts, prompts and the host."""
        plain_s = self.step_s(0, num_decode_tokens)
        if num_decode_tokens and plain_s:
            self._stretch.observe(min(seconds, _MAX_SURPRISE * plain_s), plain_s)

    def decoding_s(self, num_steps: float, num_decodes: int) -> float | None:
        """Seconds of steps with so many decodes, prompts and drafts as of late; None while unknown."""
        plain_s = self.step_s(0, num_decodes)
        return None if plain_s is None else num_steps * plain_s * max(1.0, self._stretch.ratio)

    def finish_s(self, work: ReplyWork, steps_before: Sequence[float], places: int) -> float | None:
        """The seconds until a reply has ended, behind others that still take `steps_before`.

        One of the `places` in a step becomes free first. None while unknown.
        """
        prefill_s = self.prefill_s(work.num_to_compute)
        own_s = self.decoding_s(work.num_steps - 1, work.num_beside + 1)
        one_s, full_s = self.decoding_s(1, 1), self.decoding_s(1, places)
        if prefill_s is None or own_s is None or one_s is None or full_s is None:
            return None
        own_s += prefill_s + self._costs[0] * math.ceil(work.num_to_compute / work.tokens_a_chunk)
        num_to_end = len(steps_before) + 1 - places  # before this one can run
        if num_to_end <= 0:
            return own_s
        shortest = nsmallest(num_to_end, steps_before)
        return own_s + max(shortest[-1] * one_s, sum(shortest) / places * full_s)


class DrainRate:
    """Requests ended over busy seconds, for Retry-After; the last half minute of work counts most."""

    def __init__(self) -> None:
        self._num_finished = 0.0
        self._seconds = 0.0

    def observe(self, num_finished: int, seconds: float) -> None:
        """Count the requests that ended during `seconds` of work: a step, usually."""
        keep = math.exp(-seconds / _DRAIN_HORIZON_S)
        self._num_finished = self._num_finished * keep + num_finished
        self._seconds = self._seconds * keep + seconds

    @property
    def per_second(self) -> float | None:
        """Requests ended a second, as if one had at least; None before any time was observed."""
        return max(1.0, self._num_finished) / self._seconds if self._seconds > 0 else None

    def retry_after_s(self, num_queued: int) -> int:
        """Whole seconds until `num_queued` requests have ended, 1 to 120; 1 while the rate is unknown."""
        rate = self.per_second
        if rate is None:
            return 1
        return min(_MAX_RETRY_AFTER_S, max(1, math.ceil(num_queued / rate)))
