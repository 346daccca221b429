"""Activity: what the engine did between two times. Plain numbers, and the words for them."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from engine.plan.metrics.histogram import Distribution

HORIZON_S = 60.0
_SNAPSHOT_S = 5.0  # how finely the last minute is known
PHASES = ("prefill", "decode", "mixed")


class Totals(NamedTuple):
    """What had been counted at `time`, on the engine's clock.

    `busy_s` are the seconds of all steps; `seats_s` and `kv_s` the same, each times the share of seats, or of
    K/V blocks, that was in use. `num_sequences` sums the batch sizes of all steps.
    """

    time: float
    num_ended: int
    prompt_tokens: int
    generation_tokens: int
    num_sequences: int
    busy_s: float
    seats_s: float
    kv_s: float
    step_duration: dict[str, Distribution]  # by phase
    step_tokens: Distribution
    time_to_first_token: Distribution


class Activity(NamedTuple):
    """Everything between two times. Shares are of 1, and 0 where there was nothing to share."""

    earlier: Totals
    later: Totals

    @property
    def seconds(self) -> float:
        """From the one to the other."""
        return self.later.time - self.earlier.time

    @property
    def busy_s(self) -> float:
        """Seconds in steps."""
        return self.later.busy_s - self.earlier.busy_s

    @property
    def num_steps(self) -> int:
        """Steps that computed something."""
        return self._step_tokens.count

    @property
    def generation_tokens(self) -> int:
        """Tokens generated."""
        return self.later.generation_tokens - self.earlier.generation_tokens

    @property
    def tokens_per_s(self) -> float:
        """Tokens generated a second, idle ones included."""
        return _ratio(self.generation_tokens, self.seconds)

    @property
    def mean_sequences(self) -> float:
        """Batch size: sequences a step."""
        return _ratio(self.later.num_sequences - self.earlier.num_sequences, self.num_steps)

    @property
    def mean_step_tokens(self) -> float:
        """Tokens computed a step."""
        return self._step_tokens.mean

    @property
    def busy_ratio(self) -> float:
        """Share of the time that went into steps."""
        return min(1.0, _ratio(self.busy_s, self.seconds))

    @property
    def seats_ratio(self) -> float:
        """Share of the seats that was in use, while busy."""
        return _ratio(self.later.seats_s - self.earlier.seats_s, self.busy_s)

    @property
    def kv_ratio(self) -> float:
        """Share of the K/V blocks that was in use, while busy."""
        return _ratio(self.later.kv_s - self.earlier.kv_s, self.busy_s)

    @property
    def time_to_first_token(self) -> Distribution:
        """Of the requests that got it."""
        return self.later.time_to_first_token - self.earlier.time_to_first_token

    def step_duration(self, phase: str) -> Distribution:
        """Seconds of the steps with nothing but prefill, nothing but decodes, or both ("mixed")."""
        return self.later.step_duration[phase] - self.earlier.step_duration[phase]

    @property
    def _step_tokens(self) -> Distribution:
        return self.later.step_tokens - self.earlier.step_tokens

    def format_report(self, title: str) -> str:
        """Several lines for a person to read, without a newline at the end."""
        head = f"{title}, {self.seconds:.3g} s:"
        return "\n".join([head, *(f"  {name:<12}{text}" for name, text in self._report_lines())])

    def _report_lines(self) -> list[tuple[str, str]]:
        prompt_tokens = self.later.prompt_tokens - self.earlier.prompt_tokens
        rate = f"{self.tokens_per_s:,.1f}/s, {_ratio(self.generation_tokens, self.busy_s):,.1f}/s while busy"
        lines = [("requests", f"{self.later.num_ended - self.earlier.num_ended:,} ended")]
        lines.append(("tokens", f"{self.generation_tokens:,} generated ({rate}), {prompt_tokens:,} read"))
        if self.time_to_first_token.count:
            lines.append(("first token", f"after {_spread(self.time_to_first_token)}"))
        for phase in PHASES:
            steps = self.step_duration(phase)
            if steps.count:
                lines.append((phase, f"{_spread(steps)} a step, {steps.count:,} in all"))
        if self.num_steps:
            batch = f"{self.mean_sequences:.1f} sequences and {self.mean_step_tokens:.1f} tokens a step"
            lines.append(("batch", batch))
            used = f"{self.seats_ratio:.0%} of the seats and {self.kv_ratio:.0%} of the K/V blocks"
            lines.append(("in use", f"{used} while busy, which was {self.busy_ratio:.0%} of the time"))
        return lines


class RollingWindow:
    """Keeps some totals of the last minute, so that what came since then can be told.

    A step asks `is_due` before it counts anything, and mostly that is all.
    """

    def __init__(self) -> None:
        self._first: Totals | None = None
        self._kept: deque[Totals] = deque()
        self._next_s = float("-inf")

    def is_due(self, now: float) -> bool:
        """True if there should be new totals to `keep`."""
        return now >= self._next_s

    def keep(self, totals: Totals) -> None:
        """Remember these, and forget what is older than a minute then."""
        self._first = self._first or totals
        self._kept.append(totals)
        self._next_s = totals.time + _SNAPSHOT_S
        while totals.time - self._kept[0].time > HORIZON_S:
            self._kept.popleft()

    def last_minute(self, now: Totals) -> Activity:
        """What came in the last minute; less of it if the window is younger. Nothing, if nothing is kept."""
        recent = (kept for kept in self._kept if now.time - kept.time <= HORIZON_S)
        return Activity(next(recent, now), now)

    def all(self, now: Totals) -> Activity:
        """What came since the first totals that were kept."""
        return Activity(self._first or now, now)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _spread(seconds: Distribution) -> str:
    mean, median, most = (
        1000 * each for each in (seconds.mean, seconds.quantile(0.5), seconds.quantile(0.99))
    )
    return f"{mean:.3g} ms (p50 {median:.3g}, p99 {most:.3g})"
