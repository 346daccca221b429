"""How an engine dies and ends: whatever breaks, every stream ends once, and nobody waits for what sticks."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from engine.errors import DeviceLost, EngineDead, Overloaded
from engine.loop.engine_parts import EngineLimits, EngineState
from engine.plan.request import FinishReason
from engine.plan.step_records import StepInputs
from tests.support.engines import EngineShape, Harness, collect, running_engine
from tests.support.fake_drafters import FakeDrafter
from tests.support.fakes import expected_output

PROMPT = [1, 2, 3, 4, 5]


class Held:
    """Holds the model's steps, from the `first` on, until released."""

    def __init__(self, first: int = 1) -> None:
        self._first = first
        self._num_steps = 0
        self._release = threading.Event()
        self.entered = threading.Event()

    def __call__(self, inputs: StepInputs) -> None:
        self._num_steps += 1
        if self._num_steps >= self._first:
            self.entered.set()
            self._release.wait(30)

    async def until_entered(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, 10)

    def release(self) -> None:
        self._release.set()


def raising(error: BaseException) -> Callable[..., None]:
    """A function that raises."""

    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


async def assert_dies(harness: Harness, num_requests: int) -> None:
    """All open streams end with EngineDead, the counters agree, and nothing is taken any more."""
    streams = [harness.submit([seed, 2], max_tokens=20) for seed in range(num_requests)]
    for stream in streams:
        assert isinstance((await asyncio.wait_for(collect(stream), 5)).finish.error, EngineDead)
    await asyncio.wait_for(harness.engine.wait_dead(), 1)
    assert harness.engine.state is EngineState.DEAD
    metrics = harness.engine.metrics
    assert metrics.requests_started == num_requests
    assert dict(metrics.requests_finished) == {FinishReason.ERROR: num_requests}
    with pytest.raises(EngineDead):
        harness.engine.admit(1)
    with pytest.raises(EngineDead):
        harness.submit(PROMPT)


async def test_a_fault_of_the_loop_itself_is_death_for_the_queue_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_engine(EngineShape(max_num_seqs=2)) as harness:
        batcher = harness.parts.batcher
        with monkeypatch.context() as patch:
            patch.setattr(batcher, "step", raising(RuntimeError("the books are wrong")))
            await assert_dies(harness, 4)


async def test_a_broken_scheduler_keeps_no_stream_open(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_engine(EngineShape(max_num_seqs=2)) as harness:
        batcher = harness.parts.batcher
        with monkeypatch.context() as patch:
            patch.setattr(batcher, "step", raising(RuntimeError("the books are wrong")))
            patch.setattr(batcher, "finish", raising(KeyError("no such request")))
            await assert_dies(harness, 4)
        for seed in range(1, 5):
            batcher.finish(f"request-{seed}", FinishReason.ERROR)


async def test_a_lost_device_is_death_at_once() -> None:
    """No request is tried again, or blamed, for what nothing can go well after."""
    steps: list[StepInputs] = []

    def lose(inputs: StepInputs) -> None:
        steps.append(inputs)
        raise DeviceLost("The device is lost: CUDA error: unspecified launch failure.")

    async with running_engine(EngineShape(max_num_seqs=2), before=lose) as harness:
        await assert_dies(harness, 4)
        assert len(steps) == 1 and not harness.engine.metrics.forward_faults


async def test_a_loop_whose_step_was_cancelled_by_nobody_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_engine() as harness:
        with monkeypatch.context() as patch:
            patch.setattr(harness.parts.batcher, "step", raising(asyncio.CancelledError()))
            await assert_dies(harness, 2)


async def test_what_outlasts_the_drain_ends_in_the_middle_of_a_step() -> None:
    held = Held(first=3)
    async with running_engine(EngineShape(max_num_seqs=1), before=held) as harness:
        streams = [harness.submit(PROMPT, max_tokens=50), harness.submit([7, 8], max_tokens=5)]
        await held.until_entered()
        began = time.monotonic()
        await harness.engine.drain(0.1)
        for stream in streams:
            finish = (await collect(stream)).finish
            assert isinstance(finish.error, Overloaded)
            assert finish.reason is FinishReason.ABORT
        assert time.monotonic() - began < 5
        assert harness.engine.metrics.request_aborts["drain"] == 2
        assert harness.engine.gauges().num_requests_running == 0
        held.release()


async def test_a_text_that_takes_long_holds_up_neither_the_stop_nor_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began, go = threading.Event(), threading.Event()

    def encode(*_: object, **__: object) -> list[int]:
        began.set()
        go.wait(30)
        return [1]

    async with running_engine() as harness:
        monkeypatch.setattr(type(harness.parts.tokenizer), "encode", encode)
        reading = asyncio.create_task(harness.engine.text.encode("abc"))
        await asyncio.to_thread(began.wait, 10)
        stopping = time.monotonic()
        await harness.engine.stop()
        assert time.monotonic() - stopping < 5
        go.set()
        await reading


async def test_a_drafter_that_hangs_is_no_hang_of_the_engine() -> None:
    go = threading.Event()
    drafter = FakeDrafter(before=lambda _: go.wait(30))
    shape = EngineShape(schedule="sync")
    limits = EngineLimits(watchdog_timeout_s=1.2)
    async with running_engine(shape, drafters=[drafter], limits=limits) as harness:
        until = time.monotonic() + 1.8
        while time.monotonic() < until:
            assert (await collect(harness.submit(PROMPT))).token_ids == expected_output(PROMPT, 8)
        assert harness.engine.fault is None
        go.set()
