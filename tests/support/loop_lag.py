"""How late an event loop serves a timer, measured as if someone asked every few milliseconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

TICK_S = 0.002


@dataclass
class Lags:
    """Seconds, one entry a tick; those that a block of the loop swallowed waited for the rest of it.

    `own` is the part of each that the loop's thread spent computing: other processes add nothing to it.
    """

    wall: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)

    def percentile(self, percent: float) -> float:
        """The smallest lag that at least `percent` of all do not exceed."""
        return percentile(self.wall, percent)

    def percentile_own(self, percent: float) -> float:
        """The same of the loop's own part."""
        return percentile(self.own, percent)


@asynccontextmanager
async def loop_lags() -> AsyncIterator[Lags]:
    """Watches the running loop until it is left."""
    lags = Lags()
    watcher = asyncio.create_task(_watch(lags))
    try:
        yield lags
    finally:
        watcher.cancel()


async def _watch(lags: Lags) -> None:
    loop = asyncio.get_running_loop()
    due = loop.time() + TICK_S
    while True:
        worked_before = time.thread_time()
        await asyncio.sleep(due - loop.time())
        now, worked = loop.time(), time.thread_time() - worked_before
        while due <= now:
            lags.wall.append(now - due)
            lags.own.append(min(now - due, worked))
            due += TICK_S


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-len(ordered) * percent // 100) - 1)]
