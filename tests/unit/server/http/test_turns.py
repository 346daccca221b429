"""One call at a time, the cheapest first; a cancelled caller passes its turn on, once its call has ended."""

from __future__ import annotations

import asyncio
import threading

import pytest

from server.http.turns import Turns


async def test_the_cheapest_of_those_that_wait_goes_first() -> None:
    turns, go, done = Turns(), threading.Event(), []
    first = asyncio.create_task(turns.run(go.wait, 9))
    await asyncio.sleep(0)
    others = [
        asyncio.create_task(turns.run(lambda name=name: done.append(name), cost))  # type: ignore[misc]
        for name, cost in (("large", 3), ("small", 1), ("second small", 1), ("middle", 2))
    ]
    await asyncio.sleep(0)
    go.set()
    await asyncio.gather(first, *others)
    assert done == ["small", "second small", "middle", "large"]


async def test_a_cancelled_caller_waits_for_its_call_and_passes_its_turn_on() -> None:
    turns, go = Turns(), threading.Event()
    running = asyncio.create_task(turns.run(go.wait, 1))
    waiting = asyncio.create_task(turns.run(lambda: None, 1))
    last = asyncio.create_task(turns.run(lambda: "last", 1))
    await asyncio.sleep(0)
    running.cancel()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not running.done()
    go.set()
    assert await last == "last"
    assert running.cancelled()
    assert await turns.run(lambda: "free", 1) == "free"


async def test_a_turn_given_to_a_caller_that_is_cancelled_at_that_moment_is_not_lost() -> None:
    turns, go = Turns(), threading.Event()
    running = asyncio.create_task(turns.run(go.wait, 1))
    waiting = asyncio.create_task(turns.run(lambda: None, 1))
    await asyncio.sleep(0)
    running.add_done_callback(lambda _: waiting.cancel())
    go.set()
    await asyncio.wait({running, waiting})
    assert await turns.run(lambda: "free", 1) == "free"


async def test_an_error_passes_the_turn_on() -> None:
    turns = Turns()
    with pytest.raises(ZeroDivisionError):
        await turns.run(lambda: 1 // 0, 1)
    assert await turns.run(lambda: "free", 1) == "free"
