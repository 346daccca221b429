"""Readers of a large batch are woken some at a time, behind the step that landed meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.loop.reader_turns import (
    FEW_READERS,
    LONGEST_DRAFTING_S,
    LONGEST_HOLD_S,
    READERS_A_TURN,
    ReaderTurns,
)
from engine.loop.step_pipeline import StepPipeline
from engine.loop.stream import Finish, RequestStream
from engine.plan.request import FinishReason
from engine.text.detokenizer import Detokenizer
from tests.support.ahead_fakes import AheadFakeRunner
from tests.support.engines import EngineShape, collect, running_engine, text_tokenizer
from tests.support.fakes import expected_output

CROWD = 2 * READERS_A_TURN + 5


def waiters(turns: ReaderTurns, count: int) -> list[asyncio.Future[None]]:
    """So many readers for whom something has come."""
    futures = [asyncio.get_running_loop().create_future() for _ in range(count)]
    for future in futures:
        turns.add(future)
    return futures


def num_woken(futures: list[asyncio.Future[None]]) -> int:
    """How many, which must be the first ones."""
    woken = [future.done() for future in futures]
    assert woken == sorted(woken, reverse=True), "in the order in which something came for them"
    return sum(woken)


async def all_woken(futures: list[asyncio.Future[None]]) -> None:
    async with asyncio.timeout(5):
        await asyncio.gather(*futures)


@pytest.mark.parametrize("count", [0, 1, FEW_READERS])
async def test_few_are_woken_at_once(count: int) -> None:
    turns = ReaderTurns()
    futures = waiters(turns, count)
    assert num_woken(futures) == 0
    turns.begin()
    assert num_woken(futures) == count
    assert not turns.hold(), "nobody waits who could be held"


@pytest.mark.parametrize("count", [1, CROWD])
async def test_any_number_is_held_while_a_step_waits_for_drafts(count: int) -> None:
    turns = ReaderTurns()
    futures = waiters(turns, count)
    turns.hold_for_drafts()
    turns.begin()
    for _ in range(5):
        await asyncio.sleep(0)
    assert num_woken(futures) == 0
    assert turns.hold(), "also while the step is queued behind them"
    turns.release()
    assert num_woken(futures) == min(count, READERS_A_TURN)
    await all_woken(futures)


async def test_drafts_that_take_long_hold_nobody_up_for_as_long() -> None:
    turns = ReaderTurns()
    futures = waiters(turns, 3)
    started = asyncio.get_running_loop().time()
    turns.hold_for_drafts()
    while not num_woken(futures):
        turns.hold_for_drafts()
        await asyncio.sleep(LONGEST_DRAFTING_S / 5)
    assert asyncio.get_running_loop().time() - started >= LONGEST_DRAFTING_S / 2


async def test_without_a_reader_drafts_hold_nobody() -> None:
    turns = ReaderTurns()
    turns.hold_for_drafts()
    futures = waiters(turns, 1)
    turns.begin()
    await all_woken(futures)


async def test_of_many_some_are_woken_in_each_turn_behind_what_is_ready() -> None:
    turns = ReaderTurns()
    futures = waiters(turns, CROWD)
    seen: list[int] = []

    def look() -> None:
        seen.append(num_woken(futures))
        if seen[-1] < CROWD:
            asyncio.get_running_loop().call_soon(look)

    turns.begin()
    asyncio.get_running_loop().call_soon(look)
    await all_woken(futures)
    assert seen[0] == 0, "what was ready runs first"
    assert sorted({*seen, CROWD}) == [0, READERS_A_TURN, 2 * READERS_A_TURN, CROWD]


async def test_who_comes_later_is_woken_later() -> None:
    turns = ReaderTurns()
    futures = waiters(turns, CROWD)
    turns.begin()
    futures += waiters(turns, 3)
    turns.begin()
    assert num_woken(futures) == 0, "no begin overtakes those who wait"
    await all_woken(futures)


async def test_a_hold_keeps_all_until_it_is_released_and_then_some_go_at_once() -> None:
    turns = ReaderTurns()
    futures = waiters(turns, CROWD)
    turns.begin()
    assert turns.hold()
    for _ in range(5):
        await asyncio.sleep(0)
        turns.begin()
    assert num_woken(futures) == 0
    turns.release()
    assert num_woken(futures) == READERS_A_TURN
    turns.release()
    assert num_woken(futures) == READERS_A_TURN, "there was nothing to release"
    await all_woken(futures)


async def test_a_hold_that_nobody_releases_ends() -> None:
    turns = ReaderTurns()
    futures = waiters(turns, CROWD)
    assert turns.hold()
    assert turns.hold()
    assert num_woken(futures) == 0
    started = asyncio.get_running_loop().time()
    await all_woken(futures)
    assert asyncio.get_running_loop().time() - started >= LONGEST_HOLD_S / 2


async def test_who_has_gone_is_passed_over() -> None:
    turns = ReaderTurns()
    futures = waiters(turns, CROWD)
    futures[1].cancel()
    futures[-1].set_result(None)
    turns.begin()
    await all_woken([future for future in futures if not future.cancelled()])


class Later(Executor):
    """Does what it is given when it is told to."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], Any]] = []

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.calls.append(partial(call, *args, **kwargs))
        return Future()


async def test_all_are_held_while_a_step_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.loop.reader_turns.LONGEST_HOLD_S", 60.0)
    turns, executor = ReaderTurns(), Later()
    pipeline = StepPipeline(AheadFakeRunner(1, 1), executor, turns)
    futures = waiters(turns, CROWD)
    turns.begin()
    pipeline.launch(cast(Any, SimpleNamespace(previous_rows=None)))  # fails where it is carried out
    for _ in range(5):
        await asyncio.sleep(0)
    assert num_woken(futures) == 0
    executor.calls.pop()()
    await asyncio.sleep(0)
    assert num_woken(futures) == READERS_A_TURN, "also behind a launch that failed"
    await all_woken(futures)


def stream_in(turns: ReaderTurns) -> RequestStream:
    return RequestStream(
        "request", Detokenizer(text_tokenizer(), ()), lambda *_: None, checks_stops=False, wake=turns.add
    )


async def test_tokens_of_two_steps_come_in_one_delta_and_the_end_comes_at_once() -> None:
    turns = ReaderTurns()
    stream = stream_in(turns)
    reader = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    crowd = waiters(turns, CROWD)
    stream.put(20, None, shown=True)
    turns.begin()
    assert turns.hold()
    stream.put(21, None, shown=True)
    await asyncio.sleep(0)
    assert not reader.done()
    finish = Finish(FinishReason.LENGTH, None, None, 1, 2, 0, cast(Any, None))
    stream.finish(finish)
    delta = await reader
    assert (delta.token_ids, delta.finish) == ((20, 21), finish)
    assert num_woken(crowd) == 0
    turns.release()
    await all_woken(crowd)


async def test_a_step_that_landed_is_taken_before_all_readers_of_the_last_one_have_run() -> None:
    """With a device that computes at once every reader gets several steps at a time, and its share."""
    num_tokens = 24
    shape = EngineShape(num_blocks=CROWD * 8, max_num_seqs=CROWD, max_num_batched_tokens=4 * CROWD)
    async with running_engine(shape, inline=True) as harness:
        streams = [harness.submit([seed, 3], max_tokens=num_tokens) for seed in range(CROWD)]
        results = await asyncio.gather(*(collect(stream) for stream in streams))
        for seed, result in enumerate(results):
            assert result.token_ids == expected_output([seed, 3], num_tokens)
        counts = [result.num_deltas for result in results]
        assert max(counts) < 0.75 * num_tokens, "steps went on while readers waited for their turn"
        assert 2 * min(counts) > max(counts) > 3
