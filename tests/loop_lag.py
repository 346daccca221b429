"""How late an event loop serves a timer, measured as if someone asked every few milliseconds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

TICK_S = 0.002


@asynccontextmanager
async def loop_lags() -> AsyncIterator[list[float]]:
    """Fills a list with seconds of lag, one for every tick, those that a block of the loop swallowed too.

    A tick that fell into a block waited for the rest of it; leaving them out would hide what is looked for.
    """
    lags: list[float] = []
    watcher = asyncio.create_task(_watch(lags))
    try:
        yield lags
    finally:
        watcher.cancel()


async def _watch(lags: list[float]) -> None:
    loop = asyncio.get_running_loop()
    due = loop.time() + TICK_S
    while True:
        await asyncio.sleep(due - loop.time())
        now = loop.time()
        while due <= now:
            lags.append(now - due)
            due += TICK_S


def percentile(values: list[float], percent: float) -> float:
    """The smallest value that at least `percent` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-len(ordered) * percent // 100) - 1)]
