"""Arrival traces: when requests come and what they ask for. The same seed gives the same trace."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

OWN_TOKENS_FROM = 1 << 30  # token ids below are those of shared prefixes


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace, `time` in seconds from its start.

    The first `shared_tokens` of the prompt are the same for all arrivals of one `prefix`. `deadline_s` counts
    from the arrival.
    """

    time: float
    prompt_tokens: int
    output_tokens: int
    tenant: str | None = None
    priority: int = 0
    deadline_s: float | None = None
    prefix: int = 0
    shared_tokens: int = 0

    def token_ids(self, number: int) -> list[int]:
        """The prompt of the trace's request `number`: its prefix, then tokens that no other request has."""
        first_own = OWN_TOKENS_FROM + (number << 20)
        first_shared = self.prefix << 20
        own = self.prompt_tokens - self.shared_tokens
        return [*range(first_shared, first_shared + self.shared_tokens), *range(first_own, first_own + own)]


Trace = Sequence[Arrival]
Lengths = Callable[[random.Random], tuple[int, int]]
"""Draws the prompt and output lengths of one request."""


def poisson(rng: random.Random, rate: float) -> Iterator[float]:
    """Arrival times of a Poisson process with `rate` a second."""
    time = 0.0
    while True:
        time += rng.expovariate(rate)
        yield time


def bursts(rng: random.Random, rate: float, size: int) -> Iterator[float]:
    """`rate` a second in the mean, but always `size` at once, at Poisson times."""
    for time in poisson(rng, rate / size):
        for _ in range(size):
            yield time


def lognormal(rng: random.Random, median: int, sigma: float, longest: int) -> int:
    """A length of at least 1 and at most `longest`."""
    return max(1, min(longest, round(median * math.exp(rng.gauss(0.0, sigma)))))


def make_trace(rng: random.Random, count: int, times: Iterator[float], lengths: Lengths) -> list[Arrival]:
    """`count` requests."""
    return [Arrival(next(times), *lengths(rng)) for _ in range(count)]


def lognormal_lengths(prompt: int, output: int, *, sigma: float, longest: int) -> Lengths:
    """Prompts and outputs drawn apart, with these medians; each at most `longest`."""
    return lambda rng: (lognormal(rng, prompt, sigma, longest), lognormal(rng, output, sigma, longest))


def bimodal_lengths(short: tuple[int, int], long: tuple[int, int], share_long: float) -> Lengths:
    """Two kinds of request, given by their prompt and output lengths; both vary by a quarter."""

    def draw(rng: random.Random) -> tuple[int, int]:
        prompt, output = long if rng.random() < share_long else short
        return max(1, round(prompt * rng.uniform(0.75, 1.25))), max(
            1, round(output * rng.uniform(0.75, 1.25))
        )

    return draw


def at_rate(trace: Trace, rate: float) -> list[Arrival]:
    """The same requests in the same order, coming at `rate` a second in the mean."""
    factor = len(trace) / (trace[-1].time * rate)
    return [replace(arrival, time=arrival.time * factor) for arrival in trace]


def all_at_once(trace: Trace) -> list[Arrival]:
    """The same requests, all there from the start."""
    return [replace(arrival, time=0.0) for arrival in trace]


def merged(*traces: Trace) -> list[Arrival]:
    """All of them in the order of their times."""
    return sorted((arrival for trace in traces for arrival in trace), key=lambda arrival: arrival.time)
