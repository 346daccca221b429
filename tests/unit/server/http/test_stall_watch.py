"""When a client counts as stalled, in made-up time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

from server.http.stall_watch import StallWatch
from tests.support.virtual_time import run_in_virtual_time

TIMEOUT_S = 10.0


class Buffer:
    """A transport's write buffer, and when its client was called stalled."""

    def __init__(self) -> None:
        self.size = 0
        self.stalled_at: float | None = None
        self.began = asyncio.get_running_loop().time()
        self.watch = StallWatch(cast(asyncio.WriteTransport, self), TIMEOUT_S, self._on_stall)

    def get_write_buffer_size(self) -> int:
        return self.size

    def _on_stall(self) -> None:
        self.stalled_at = asyncio.get_running_loop().time() - self.began


def stalled_at(play: Callable[[Buffer], Coroutine[Any, Any, None]]) -> float | None:
    """Seconds from the start to the stall, None for none, when `play` is followed by a minute of nothing."""

    async def main() -> float | None:
        buffer = Buffer()
        await play(buffer)
        await asyncio.sleep(60)
        return buffer.stalled_at

    return run_in_virtual_time(main())


def test_what_is_never_taken_stalls_in_time() -> None:
    async def play(buffer: Buffer) -> None:
        await asyncio.sleep(3)
        buffer.size = 100
        buffer.watch.pause()

    assert stalled_at(play) == 3 + TIMEOUT_S


def test_what_is_taken_late_does_not() -> None:
    async def play(buffer: Buffer) -> None:
        for _ in range(5):
            buffer.watch.pause()
            await asyncio.sleep(9)
            buffer.watch.resume()

    assert stalled_at(play) is None


def test_the_time_counts_from_the_last_pause_not_the_first() -> None:
    async def play(buffer: Buffer) -> None:
        buffer.watch.pause()
        await asyncio.sleep(7)
        buffer.watch.resume()
        await asyncio.sleep(2)
        buffer.watch.pause()

    assert stalled_at(play) == 9 + TIMEOUT_S


def test_a_client_that_takes_little_is_kept_until_it_takes_nothing() -> None:
    async def play(buffer: Buffer) -> None:
        buffer.size = 100
        buffer.watch.pause()
        for _ in range(5):
            await asyncio.sleep(9)
            buffer.size -= 1

    found = stalled_at(play)
    assert found is not None
    assert 45 + TIMEOUT_S <= found <= 45 + 2 * TIMEOUT_S


def test_a_closed_connection_is_watched_no_more() -> None:
    async def play(buffer: Buffer) -> None:
        buffer.watch.pause()
        buffer.watch.stop()

    assert stalled_at(play) is None
