"""Run: what became of every request of a trace, and the figures drawn from that."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

from tests.bench.sim.trace import Arrival


@dataclass(slots=True)
class Outcome:
    """What became of one arrival. `token_times` are those of its tokens; all times are the simulation's.

    `refused` and `expired` requests have no `finish_time`. `seated_time` is None when it never ran.
    """

    arrival: Arrival
    token_times: list[float] = field(default_factory=list)
    seated_time: float | None = None
    finish_time: float | None = None
    refused: bool = False
    expired: bool = False
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    @property
    def latency_s(self) -> float:
        """Arrival to end. Only for a request that was served."""
        assert self.finish_time is not None
        return self.finish_time - self.arrival.time

    @property
    def wait_s(self) -> float:
        """Arrival to its first seat. Only for a request that ran."""
        assert self.seated_time is not None
        return self.seated_time - self.arrival.time

    @property
    def ttft_s(self) -> float:
        """Arrival to first token. Only for a request that has one."""
        return self.token_times[0] - self.arrival.time

    @property
    def met_deadline(self) -> bool:
        """True if it was served whole and in time; without a deadline, whenever it was."""
        if self.finish_time is None:
            return False
        return self.arrival.deadline_s is None or self.latency_s <= self.arrival.deadline_s


@dataclass(slots=True)
class Run:
    """One trace through one server. `end` is when the last request was done."""

    outcomes: list[Outcome]
    end: float
    num_steps: int

    @property
    def served(self) -> list[Outcome]:
        """Those that got all their tokens."""
        return [outcome for outcome in self.outcomes if outcome.finish_time is not None]

    @property
    def rate(self) -> float:
        """Requests served a second, from the first arrival to the end: an overload cannot raise it."""
        return len(self.served) / (self.end - self.outcomes[0].arrival.time)

    @property
    def wasted_share(self) -> float:
        """Of all tokens, those of requests that did not meet their deadlines."""
        tokens = [(len(outcome.token_times), outcome.met_deadline) for outcome in self.outcomes]
        wasted = sum(count for count, has_met in tokens if not has_met)
        return wasted / max(1, sum(count for count, _ in tokens))

    @property
    def mean_latency_s(self) -> float:
        """Mean time from arrival to end."""
        return fmean(outcome.latency_s for outcome in self.served)

    @property
    def mean_ttft_s(self) -> float:
        """Mean time from arrival to first token."""
        return fmean(outcome.ttft_s for outcome in self.served)

    @property
    def gaps_s(self) -> list[float]:
        """Every time between two tokens of one request."""
        return [b - a for outcome in self.served for a, b in pairwise(outcome.token_times)]

    @property
    def share_in_time(self) -> float:
        """Deadlines met, of all requests, those refused included."""
        return sum(outcome.met_deadline for outcome in self.outcomes) / len(self.outcomes)


def percentile(values: Iterable[float], percent: float) -> float:
    """The smallest value that `percent` of them do not exceed."""
    ordered: Sequence[float] = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
