"""The KV accounts are checked when the engine has nothing to do, and a fault is told once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from engine.loop import engine_loop
from tests.support.captured_log import captured_log
from tests.support.engines import Harness, collect, running_engine

PROMPT = [1, 2, 3, 4, 5]


class Checks:
    """Counts the checks of a harness's accounts, and says whether any request was open then."""

    def __init__(self, harness: Harness) -> None:
        self._harness = harness
        self._check = harness.parts.batcher.kv.check_integrity
        self.num_open: list[int] = []
        harness.parts.batcher.kv.check_integrity = self  # type: ignore[method-assign]

    def __call__(self) -> None:
        self.num_open.append(len(self._harness.engine._requests))
        self._check()


async def until(found: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not found():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.fixture
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_loop, "IDLE_CHECK_S", 0.0)


@pytest.mark.usefixtures("no_delay")
async def test_each_idle_time_is_checked_once() -> None:
    async with running_engine() as harness:
        checks = Checks(harness)
        for number in range(1, 4):
            await asyncio.gather(*(collect(harness.submit(PROMPT)) for _ in range(3)))
            await until(lambda number=number: len(checks.num_open) == number)  # type: ignore[misc]
            harness.engine._loop.wake()  # type: ignore[union-attr]
            await asyncio.sleep(0.01)
        assert checks.num_open == [0, 0, 0]


async def test_whoever_asks_on_and_on_never_waits_for_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_loop, "IDLE_CHECK_S", 3600.0)
    async with running_engine() as harness:
        checks = Checks(harness)
        for _ in range(3):
            await collect(harness.submit(PROMPT))
        assert checks.num_open == []


@pytest.mark.usefixtures("no_delay")
async def test_a_lost_block_is_told_once_and_serving_goes_on() -> None:
    with captured_log() as log:
        async with running_engine() as harness:
            checks, pool = Checks(harness), harness.parts.batcher.kv.pool
            (lost,) = pool.take(1) or []
            errors = harness.engine.metrics.engine_errors
            await collect(harness.submit(PROMPT))
            await until(lambda: errors["kv"] == 1)
            again = await collect(harness.submit(PROMPT))
            await asyncio.sleep(0.01)
            assert (again.finish.error, errors["kv"], checks.num_open) == (None, 1, [0])
            pool.release([lost])
    assert log.text.count(f"block {lost}: 1 references, 0 tables") == 1
