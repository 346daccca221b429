"""`python -m tests.bench.sse`: what the server side costs for each event, with an engine that is free.

A process of its own reads the streams, so that the CPU time of this process's loop is the server's alone:
what an event takes of a core, whatever else the machine does. Everything from a stream's next delta to
the socket is in it, opening and closing the requests and the fake stream's own few microseconds too. The last
line is a thousand streams at once, stepped as one engine would step them.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass

import uvloop

from engine import FinishReason, GenerationRequest, OutputDelta, freeze_heap, prepare_process
from tests.e2e.http_server import server_url
from tests.support.fake_engine import FakeEngine, FakeStream
from tests.support.loop_lag import Lags, loop_lags
from tests.support.paced_engine import PacedEngine
from tests.support.sse_reader import read_streams, room_for_sockets

STREAMS, TOKENS, RUNS = 64, 1000, 5
MANY, MANY_TOKENS, PER_SECOND = 1000, 20, 500
BATCH, STEP_S = 64, 0.01


@dataclass
class ReadyEngine(FakeEngine):
    """Every token is there at once; between two of one stream others get their turn."""

    began: tuple[float, float] = (0.0, 0.0)  # clock and CPU time of the first request
    ended: tuple[float, float] = (0.0, 0.0)  # and of the last end

    def submit(self, request: GenerationRequest) -> FakeStream:
        if not self.streams:
            self.began = time.perf_counter(), time.thread_time()
        self.streams.append(stream := ReadyStream(self, request))
        return stream


class ReadyStream(FakeStream):
    """As little work a token as there can be."""

    async def __anext__(self) -> OutputDelta:
        await asyncio.sleep(0)
        sent, request = self.num_sent, self.request
        self.num_sent += 1
        token = request.prompt_token_ids[sent % len(request.prompt_token_ids)]
        delta = OutputDelta(chr(token), (token,), (), None)
        return delta if self.num_sent < request.sampling.max_tokens else self._end(delta, FinishReason.LENGTH)

    def close(self) -> None:
        super().close()
        assert isinstance(self.engine, ReadyEngine)
        self.engine.ended = time.perf_counter(), time.thread_time()


async def microseconds_an_event() -> tuple[float, float]:
    """Of the clock and of the loop's CPU time. Raises AssertionError if a stream was not whole."""
    engine = ReadyEngine(max_model_len=2 * TOKENS)
    async with server_url(engine) as url:
        found = await read_streams(url, STREAMS, TOKENS)
    assert found.whole == STREAMS, found.first_fault
    wall_s, cpu_s = (end - begin for end, begin in zip(engine.ended, engine.began, strict=True))
    return wall_s / found.events * 1e6, cpu_s / found.events * 1e6


async def lags_at_scale() -> Lags:
    """Of the loop, while MANY streams open, run together and end."""
    engine = PacedEngine(crowd=MANY)
    async with server_url(engine) as url, loop_lags() as lags:
        reading = asyncio.create_task(read_streams(url, MANY, MANY_TOKENS, PER_SECOND))
        await engine.crowded.wait()
        async with engine.stepping(BATCH, STEP_S):
            found = await reading
    assert found.whole == MANY, found.first_fault
    return lags


async def measure() -> None:
    """Print every run."""
    freeze_heap()
    print("load average", *(f"{load:.2f}" for load in os.getloadavg()))
    for _ in range(RUNS):
        wall_us, cpu_us = await microseconds_an_event()
        print(
            f"{cpu_us:5.1f} µs of the loop an event = {1e6 / cpu_us:6.0f} events/s on one core"
            f" ({1e6 / wall_us:6.0f} by the clock)",
            flush=True,
        )
    with room_for_sockets(4 * MANY):
        lags = await lags_at_scale()
    print(
        f"{MANY} streams at once: loop lag p99 {lags.percentile(99) * 1000:.1f} ms,"
        f" {lags.percentile_own(99) * 1000:.1f} ms of it the loop's own work"
    )
    print("bars: at least 20000 events/s on one core, at most 50 µs an event; p99 below 50 ms")


if __name__ == "__main__":
    prepare_process()
    uvloop.run(measure())
