"""When the requests of an open loop are due."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, takewhile
from random import Random

from server.commands.bench.plan import Load


def poisson_arrivals(rate: float, seed: int) -> Iterator[float]:
    """Endless times in seconds from the start, of a Poisson process of `rate` a second.

    Independent arrivals: the gaps are exponentially distributed. Equal seeds give equal times.
    """
    random = Random(f"arrivals/{seed}")
    at = 0.0
    while True:
        at += random.expovariate(rate)
        yield at


def due_times(load: Load) -> Iterator[float]:
    """The arrival times of one run, until its number of requests or its duration ends it."""
    assert load.rate is not None
    arrivals = poisson_arrivals(load.rate, load.seed)
    if load.num_requests is not None:
        yield from (at for at, _ in zip(arrivals, range(load.num_requests), strict=False))
    else:
        duration_s = load.duration_s or 0.0
        yield from takewhile(lambda at: at < duration_s, arrivals)


def indices(load: Load) -> Iterator[int]:
    """The numbers of the requests of a closed loop; endless when only the time ends it."""
    yield from range(load.num_requests) if load.num_requests is not None else count()
