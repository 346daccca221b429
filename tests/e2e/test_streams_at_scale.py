"""A thousand streams at once: every one comes whole, and the loop stays free for everyone else."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

from engine import settle_memory
from tests.e2e.http_server import server_url
from tests.e2e.wire import ask
from tests.loop_lag import loop_lags, percentile
from tests.paced_engine import PacedEngine
from tests.sse_reader import Found, read_streams, room_for_sockets

STREAMS, TOKENS, PER_SECOND = 1000, 10, 500
BATCH, STEP_S = 64, 0.02
LIMIT_S = 0.05
ATTEMPTS = 3  # whatever else the machine does can only make a lag longer


@pytest.fixture(autouse=True)
def settled_memory() -> Iterator[None]:
    """Garbage is collected as the daemon has it collected."""
    threshold = gc.get_threshold()
    settle_memory()
    yield
    gc.unfreeze()
    gc.set_threshold(*threshold)


async def lag_beside_the_streams() -> float:
    """Seconds that 99 of 100 timers were late by at most while all the streams opened, ran and ended."""
    engine = PacedEngine(crowd=STREAMS)
    async with server_url(engine) as url, loop_lags() as lags:
        reading = asyncio.create_task(read_streams(url, STREAMS, TOKENS, PER_SECOND))
        await engine.crowded.wait()  # every request has come, none has got a token
        async with engine.stepping(BATCH, STEP_S):
            found = await reading
        assert (await ask(url, "GET", "/health")).status == 200
    assert found == Found(whole=STREAMS, events=STREAMS * (TOKENS + 1), first_fault=None)
    return percentile(lags, 99)


async def test_a_thousand_streams_come_whole_and_the_loop_stays_free() -> None:
    lags: list[float] = []
    with room_for_sockets(4 * STREAMS):
        while not lags or (min(lags) > LIMIT_S and len(lags) < ATTEMPTS):
            lags.append(await lag_beside_the_streams())
    assert min(lags) < LIMIT_S
