"""Activity: what the engine did up to a time, or between two. Plain numbers, and the words for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
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

    def format_report(self, title: str) -> str:
        """Several lines for a person to read, without a newline at the end."""
        head = f"{title}, {self.seconds:.3g} s:"
        return "\n".join([head, *(f"  {name:<12}{text}" for name, text in self._report_lines())])

    def _report_lines(self) -> Iterator[tuple[str, str]]:
        rate, busy_rate = (_ratio(self.generation_tokens, each) for each in (self.seconds, self.busy_s))
        rates = f"{rate:,.1f}/s, {busy_rate:,.1f}/s while busy"
        yield "requests", f"{self.num_ended:,} ended"
        yield "tokens", f"{self.generation_tokens:,} generated ({rates}), {self.prompt_tokens:,} read"
        if self.time_to_first_token.count:
            yield "first token", f"after {_spread(self.time_to_first_token)}"
        for phase in PHASES:
            steps: Histogram = getattr(self, phase)
            if steps.count:
                yield phase, f"{_spread(steps)} a step, {steps.count:,} in all"
        if self.num_steps:
            size = self.num_sequences / self.num_steps
            yield "batch", f"{size:.1f} sequences and {self.step_tokens.mean:.1f} tokens a step"
            seats, kv = (_ratio(each, self.busy_s) for each in (self.seats_s, self.kv_s))
            busy = f"while busy, which was {min(1.0, _ratio(self.busy_s, self.seconds)):.0%} of the time"
            yield "in use", f"{seats:.0%} of the seats and {kv:.0%} of the K/V blocks {busy}"


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


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _spread(seconds: Histogram) -> str:
    mean, median, most = (
        1000 * each for each in (seconds.mean, seconds.quantile(0.5), seconds.quantile(0.99))
    )
    return f"{mean:.3g} ms (p50 {median:.3g}, p99 {most:.3g})"
