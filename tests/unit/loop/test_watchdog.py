"""The watchdog in made-up time: it bites when work stands still, and only then."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from engine.errors import EngineDead
from engine.loop.engine_parts import EngineLimits, EngineState
from engine.loop.watchdog import Watchdog, thread_stacks
from engine.plan.request import FinishReason
from engine.plan.step_records import StepInputs
from tests.support.engines import EngineShape, collect, running_engine
from tests.support.virtual_time import VirtualTimeLoop, run_in_virtual_time

TIMEOUT_S = 8.0


class Bites:
    """A watchdog on the running loop's clock, and the times at which it bit."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        self.loop = loop
        self.start = loop.time()
        self.times: list[float] = []
        self.dog = Watchdog(timeout_s, loop.time, lambda _: self.times.append(loop.time() - self.start))

    def suspend(self, after_s: float, seconds: float) -> None:
        """Stop the process once: time goes on, and nothing runs."""

        def stop() -> None:
            self.loop.now += seconds

        self.loop.call_later(after_s, stop)


def virtual(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test that runs in made-up time."""

    def run() -> None:
        run_in_virtual_time(test())

    run.__name__ = test.__name__
    return run


@virtual
async def test_it_bites_once_when_work_stands_still() -> None:
    bites = Bites()
    bites.dog.note_work()
    await asyncio.sleep(5 * TIMEOUT_S)
    assert bites.times == [pytest.approx(TIMEOUT_S)]
    assert bites.dog.age_s == pytest.approx(5 * TIMEOUT_S)


@virtual
async def test_it_counts_from_the_last_progress_wherever_that_falls() -> None:
    bites = Bites()
    bites.dog.note_work()
    for _ in range(20):
        await asyncio.sleep(0.9 * TIMEOUT_S)
        bites.dog.note_work()  # more of it is no progress
        assert not bites.times
        bites.dog.note_progress()
    await asyncio.sleep(2 * TIMEOUT_S)
    assert bites.times == [pytest.approx(20 * 0.9 * TIMEOUT_S + TIMEOUT_S)]


@virtual
async def test_rest_is_no_hang_and_arms_no_timer() -> None:
    bites = Bites()
    bites.dog.note_work()
    await asyncio.sleep(0.5 * TIMEOUT_S)
    bites.dog.note_rest()
    assert bites.dog.age_s == 0
    await asyncio.sleep(3 * TIMEOUT_S)
    assert not bites.times
    assert bites.dog._timer is None
    bites.dog.note_work()
    await asyncio.sleep(0.9 * TIMEOUT_S)
    assert not bites.times
    await asyncio.sleep(0.2 * TIMEOUT_S)
    assert bites.times == [pytest.approx(4.5 * TIMEOUT_S)]


@virtual
async def test_a_rest_shorter_than_a_look_starts_the_count_anew() -> None:
    bites = Bites()
    bites.dog.note_work()
    await asyncio.sleep(0.9 * TIMEOUT_S)
    bites.dog.note_rest()
    bites.dog.note_work()
    await asyncio.sleep(0.9 * TIMEOUT_S)
    assert not bites.times


@pytest.mark.parametrize("after", [0.1, 0.5, 0.95])
@pytest.mark.parametrize("seconds", [5.0, 1000.0])
def test_time_in_which_the_process_was_stopped_does_not_count(after: float, seconds: float) -> None:
    async def test() -> None:
        bites = Bites()
        bites.dog.note_work()
        bites.suspend(after * TIMEOUT_S, seconds)
        await asyncio.sleep(after * TIMEOUT_S + seconds)
        await asyncio.sleep(0.1)
        assert not bites.times, "the step has had no more time than before the stop"
        await asyncio.sleep(2 * TIMEOUT_S)
        counted = bites.times[0] - seconds
        assert TIMEOUT_S <= counted <= TIMEOUT_S * 9 / 8

    run_in_virtual_time(test())


@virtual
async def test_after_stop_it_is_silent() -> None:
    bites = Bites()
    bites.dog.note_work()
    bites.dog.stop()
    await asyncio.sleep(3 * TIMEOUT_S)
    assert not bites.times


# In the engine.


class Hang:
    """Holds every step, from the `first` on, until released."""

    def __init__(self, first: int = 1) -> None:
        self.first = first
        self.num_steps = 0
        self.entered, self.release = threading.Event(), threading.Event()

    def __call__(self, inputs: StepInputs) -> None:
        self.num_steps += 1
        if self.num_steps >= self.first:
            self.entered.set()
            self.release.wait(30)


async def test_a_hung_step_is_death_with_its_stack_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    hang, limits = Hang(first=3), EngineLimits(watchdog_timeout_s=0.4)
    async with running_engine(EngineShape(max_num_seqs=2), before=hang, limits=limits) as harness:
        streams = [harness.submit([seed, 2], max_tokens=50) for seed in range(3)]
        ends = [asyncio.create_task(collect(stream)) for stream in streams]
        await asyncio.wait_for(harness.engine.wait_dead(), 10)
        results = await asyncio.wait_for(asyncio.gather(*ends), 1)  # the one that waits in the queue too
        for result in results:
            assert result.finish.reason is FinishReason.ERROR
            assert isinstance(result.finish.error, EngineDead)
            assert result.finish.error.code == "engine_hung"
        engine = harness.engine
        assert engine.state is EngineState.DEAD
        with pytest.raises(EngineDead, match=r"no progress for 0\.4 s"):
            engine.admit(1)
        assert engine.metrics.engine_errors["watchdog"] == 1
        assert engine.metrics.requests_finished[FinishReason.ERROR] == 3
        hang.release.set()
    record = next(record for record in caplog.records if "a step hangs" in record.message)
    assert "3 requests open" in record.message
    assert (record.step, record.num_seqs, record.decode_tokens) == (3, 2, 2)  # type: ignore[attr-defined]
    assert "thread target_0" in record.stack and "self.release.wait(30)" in record.stack  # type: ignore[attr-defined]


async def test_a_step_that_never_comes_back_does_not_hold_up_the_stop() -> None:
    hang, limits = Hang(), EngineLimits(watchdog_timeout_s=0.2)
    async with running_engine(before=hang, limits=limits) as harness:
        stream = harness.submit([1, 2])
        await asyncio.wait_for(harness.engine.wait_dead(), 10)
        await collect(stream)
        await asyncio.wait_for(harness.engine.stop(), 2)
        hang.release.set()
        assert harness.engine._task is not None
        await asyncio.wait_for(asyncio.shield(harness.engine._task), 10)


async def test_a_stop_that_begins_before_the_hang_is_noticed_returns_when_it_is() -> None:
    hang, limits = Hang(), EngineLimits(watchdog_timeout_s=0.2)
    async with running_engine(before=hang, limits=limits) as harness:
        stream = harness.submit([1, 2])
        assert await asyncio.to_thread(hang.entered.wait, 10)
        await asyncio.wait_for(harness.engine.stop(), 2)
        assert (await collect(stream)).finish.reason is FinishReason.ABORT
        assert harness.engine.state is EngineState.DEAD
        hang.release.set()
        assert harness.engine._task is not None
        await asyncio.wait_for(asyncio.shield(harness.engine._task), 10)


async def test_work_that_nobody_takes_up_between_steps_is_a_hang_too() -> None:
    limits = EngineLimits(watchdog_timeout_s=0.3)
    async with running_engine(limits=limits) as harness:
        await collect(harness.submit([1, 2]))
        assert harness.engine._loop is not None
        harness.engine._loop._wake = asyncio.Event()  # the loop waits for the old one, for ever
        stuck = harness.submit([3, 4])
        assert isinstance((await collect(stuck)).finish.error, EngineDead)
        assert harness.engine.fault is not None
        assert harness.engine._task is not None
        harness.engine._task.cancel()


async def test_slow_steps_with_work_piled_up_raise_no_alarm() -> None:
    pause = threading.Event()

    def before(inputs: StepInputs) -> None:
        pause.wait(0.05)

    limits = EngineLimits(watchdog_timeout_s=0.5)
    async with running_engine(EngineShape(max_num_seqs=2), before=before, limits=limits) as harness:
        streams = [harness.submit([seed, 2], max_tokens=10) for seed in range(4)]
        for stream in streams:
            assert (await collect(stream)).finish.reason is FinishReason.LENGTH
        assert harness.engine.fault is None
        assert harness.engine.gauges().heartbeat_age_s < 0.5


def test_stacks_are_of_the_threads_named() -> None:
    release, started = threading.Event(), threading.Event()

    def wait_here() -> None:
        started.set()
        release.wait(10)

    thread = threading.Thread(target=wait_here, name="target_9", daemon=True)
    thread.start()
    started.wait(10)
    assert "wait_here" in thread_stacks("target")
    assert "wait_here" not in thread_stacks("draft")
    release.set()
    thread.join()
