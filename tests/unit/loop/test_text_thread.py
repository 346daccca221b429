"""Work on text by turns: whatever one tenant asks for, another's is next."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from functools import partial
from typing import Any

import pytest

from engine.errors import RequestFailed
from engine.loop.daemon_executor import DaemonExecutor
from engine.loop.engine_parts import MAX_TEXT_THREADS, Executors
from engine.loop.text_thread import TextThread
from engine.plan.metrics.batch_metrics import BatchMetrics
from tests.support.engines import InlineExecutor

LIMIT_S = 20.0


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What a long call waits for."""
    gate = threading.Event()
    yield gate
    gate.set()


def thread_of(num_workers: int, executor: Executor | None = None) -> TextThread:
    return TextThread(executor or DaemonExecutor("test-text", num_workers), BatchMetrics(), num_workers)


def starts(count: int, text: TextThread, call: Callable[[], Any], tenant: str) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(text.run(call, "grammar", tenant)) for _ in range(count)]


@pytest.mark.parametrize("num_workers", [2, 4])
async def test_however_much_one_tenant_has_waiting_another_is_served(
    num_workers: int, gate: threading.Event
) -> None:
    text = thread_of(num_workers)
    hostile = starts(20, text, lambda: gate.wait(LIMIT_S), "hostile")
    await asyncio.sleep(0)
    async with asyncio.timeout(LIMIT_S / 2):
        for number in range(5):
            assert await text.run(partial(int, number * 2), "tokenizer", "other") == number * 2
    gate.set()
    assert all(await asyncio.gather(*hostile))


async def test_tenants_have_turns_and_each_of_them_its_calls_in_order(gate: threading.Event) -> None:
    text = thread_of(1)
    made: list[Any] = []
    first = asyncio.create_task(text.run(lambda: gate.wait(LIMIT_S), "tokenizer", "a"))
    await asyncio.sleep(0)
    calls = [(tenant, number) for tenant, count in (("a", 4), ("b", 2), (None, 1)) for number in range(count)]
    tasks = []
    for each in calls:
        tasks.append(asyncio.create_task(text.run(partial(made.append, each), "tokenizer", each[0])))
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(first, *tasks)
    assert made == [("a", 0), ("b", 0), (None, 0), ("a", 1), ("b", 1), ("a", 2), ("a", 3)]


async def test_a_call_that_is_cancelled_before_its_turn_is_never_made(gate: threading.Event) -> None:
    text = thread_of(1)
    made: list[Any] = []
    first = asyncio.create_task(text.run(lambda: gate.wait(LIMIT_S), "tokenizer", "a"))
    tasks = [asyncio.create_task(text.run(partial(made.append, i), "tokenizer", "a")) for i in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    gate.set()
    await asyncio.gather(first, tasks[0], tasks[2])
    assert made == [0, 2]
    assert tasks[1].cancelled()


async def test_a_call_that_is_cancelled_later_keeps_its_worker_to_its_end(gate: threading.Event) -> None:
    text = thread_of(1)
    ended: list[str] = []

    def long() -> None:
        gate.wait(LIMIT_S)
        ended.append("long")
        raise ValueError("nobody listens any more")

    begun = asyncio.create_task(text.run(long, "tokenizer", "a"))
    next_one = asyncio.create_task(text.run(lambda: ended.append("next"), "tokenizer", "b"))
    await asyncio.sleep(0)
    begun.cancel()
    await asyncio.sleep(0)
    assert not next_one.done()
    gate.set()
    await next_one
    assert ended == ["long", "next"]
    assert begun.cancelled()


async def test_who_is_cancelled_as_the_turn_comes_passes_it_on() -> None:
    text = thread_of(1, InlineExecutor())
    made: list[int] = []
    holder = asyncio.create_task(text.run(lambda: made.append(0), "tokenizer"))
    cancelled = asyncio.create_task(text.run(lambda: made.append(1), "tokenizer"))
    last = asyncio.create_task(text.run(lambda: made.append(2), "tokenizer"))
    await holder
    cancelled.cancel()
    await asyncio.wait_for(last, LIMIT_S)
    assert 2 in made
    assert await asyncio.wait_for(text.run(lambda: 3, "tokenizer"), LIMIT_S) == 3


async def test_a_call_that_fails_gives_its_worker_back() -> None:
    text = thread_of(1)
    for _ in range(3):
        with pytest.raises(RequestFailed):
            await text.run(lambda: 1 / 0, "tokenizer")
    assert await text.run(lambda: 1, "tokenizer") == 1


async def test_what_waits_is_cancelled_when_it_closes(gate: threading.Event) -> None:
    text = thread_of(1)
    first, second = starts(2, text, lambda: gate.wait(LIMIT_S), "a")
    await asyncio.sleep(0)
    text.close()
    with pytest.raises(asyncio.CancelledError):
        await second
    gate.set()
    assert await first


def test_there_is_always_a_second_worker() -> None:
    executors = Executors.threads()
    assert 2 <= executors.num_text_threads <= MAX_TEXT_THREADS
    meeting = threading.Barrier(executors.num_text_threads)
    met = [executors.text.submit(meeting.wait, LIMIT_S) for _ in range(executors.num_text_threads)]
    assert sorted(each.result(LIMIT_S) for each in met) == list(range(executors.num_text_threads))
    executors.shutdown(wait=True)
