"""Deadlines and bounded waits: refused early, ended on time, also while nothing else happens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from engine.errors import DeadlineExceeded, Overloaded
from engine.loop.engine_parts import EngineLimits
from engine.loop.stream import RequestStream
from engine.plan.request import FinishReason, GenerationRequest, Request, SamplingParams
from engine.plan.step_records import StepInputs
from tests.support.engines import EngineShape, Harness, collect, running_engine
from tests.support.fakes import Hang, ManualClock, expected_output

PROMPT = [1, 2, 3, 4, 5]


def submit(
    harness: Harness, name: str, deadline_s: float | None = None, max_tokens: int = 100
) -> RequestStream:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    deadline = None if deadline_s is None else harness.engine.now() + deadline_s
    return harness.engine.submit(GenerationRequest(name, PROMPT, sampling, deadline=deadline))


def submit_choices(
    harness: Harness, number: int, deadline_s: float | None = None, name: str = "reply"
) -> list[RequestStream]:
    sampling = SamplingParams(max_tokens=4, temperature=0.0)
    deadline = None if deadline_s is None else harness.engine.now() + deadline_s
    choices = [
        GenerationRequest(
            *(f"{name}-{choice}", PROMPT, sampling),
            group=name,
            deadline=deadline,
            fork_of=f"{name}-0" if choice else None,
        )
        for choice in range(number)
    ]
    return harness.engine.submit_all(choices)


def take_slowly(harness: Harness, clock: ManualClock) -> None:
    """Each request that is taken costs a second."""
    add = harness.parts.batcher.add

    def add_slowly(request: Request) -> None:
        add(request)
        clock.advance(1.0)

    harness.parts.batcher.add = add_slowly  # type: ignore[method-assign]


async def test_a_deadline_ends_running_and_waiting_requests_in_the_middle_of_a_step() -> None:
    hang = Hang(3)
    async with running_engine(EngineShape(max_num_seqs=1), before=hang) as harness:
        running, waiting = submit(harness, "a", 0.3), submit(harness, "b", 0.3)
        patient = submit(harness, "c", 60.0, max_tokens=4)
        await asyncio.to_thread(hang.entered.wait, 10)
        first, second = await asyncio.wait_for(asyncio.gather(collect(running), collect(waiting)), 5)
        assert not hang.release.is_set()
        hang.release.set()
        assert (await collect(patient)).token_ids == expected_output(PROMPT, 4)
        for result in (first, second):
            assert result.finish.reason is FinishReason.DEADLINE
            assert isinstance(result.finish.error, DeadlineExceeded)
        assert first.token_ids == expected_output(PROMPT, 2)
        assert str(first.finish.error) == (
            "The deadline, 0.3 s after the request arrived, passed after 2 of at most 100 tokens."
        )
        metrics = harness.engine.metrics
        assert metrics.requests_finished[FinishReason.DEADLINE] == 2
        assert metrics.deadlines_missed == 2


async def test_a_deadline_that_passes_while_the_request_is_taken_leaves_no_drain_waiting() -> None:
    clock = ManualClock()
    async with running_engine(clock=clock) as harness:
        take_slowly(harness, clock)
        late = await collect(submit(harness, "a", 0.5))
        assert late.finish.reason is FinishReason.DEADLINE
        await asyncio.wait_for(harness.engine.drain(60.0), 2)


async def test_choices_whose_deadline_passes_while_they_are_taken_are_one_request() -> None:
    clock = ManualClock()
    async with running_engine(clock=clock) as harness:
        take_slowly(harness, clock)
        results = await asyncio.gather(*map(collect, submit_choices(harness, 3, 0.5)))
        assert {result.finish.reason for result in results} == {FinishReason.DEADLINE}
        metrics = harness.engine.metrics
        assert (metrics.requests_started, metrics.deadlines_missed) == (1, 1)
        assert metrics.requests_finished[FinishReason.DEADLINE] == 1


async def test_the_last_choice_of_a_prompt_is_judged_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[tuple[str, list[str]]] = []

    def can_meet(request: Request, before: Sequence[Request]) -> bool:
        judged.append((request.request_id, [other.request_id for other in before]))
        return True

    async with running_engine() as harness:
        monkeypatch.setattr(harness.parts.batcher, "can_meet", can_meet)
        await asyncio.gather(*map(collect, submit_choices(harness, 3, 60.0)))
        assert judged == [("reply-2", ["reply-0", "reply-1"])], "each look is at all that wait"


async def test_a_deadline_that_has_passed_is_refused_and_kept_nowhere() -> None:
    async with running_engine() as harness:
        with pytest.raises(DeadlineExceeded):
            submit(harness, "a", 0.0)
        metrics = harness.engine.metrics
        assert (metrics.deadlines_missed, metrics.requests_started) == (1, 0)
        assert metrics.requests_rejected["deadline_exceeded"] == 1


async def test_a_wait_longer_than_allowed_ends_with_overloaded_and_a_run_does_not() -> None:
    hang = Hang(2)
    limits = EngineLimits(queue_timeout_s=0.2)
    async with running_engine(EngineShape(max_num_seqs=1), before=hang, limits=limits) as harness:
        running, waiting = submit(harness, "a", max_tokens=5), submit(harness, "b")
        ended = await asyncio.wait_for(collect(waiting), 5)
        hang.release.set()
        assert (await collect(running)).token_ids == expected_output(PROMPT, 5)
        error = ended.finish.error
        assert isinstance(error, Overloaded)
        assert (error.code, ended.finish.reason) == ("queue_timeout", FinishReason.ABORT)
        assert error.retry_after_s >= 1
        assert harness.engine.metrics.requests_rejected["queue_timeout"] == 1
        assert harness.engine.metrics.request_aborts["timeout"] == 1


async def test_a_reply_that_has_begun_may_have_its_other_choices_wait_for_a_seat() -> None:
    hang = Hang(2)
    limits = EngineLimits(queue_timeout_s=0.2)
    async with running_engine(EngineShape(max_num_seqs=1), before=hang, limits=limits) as harness:
        choices = submit_choices(harness, 3)
        waiting = submit_choices(harness, 2, name="later")
        await asyncio.to_thread(hang.entered.wait, 10)
        late = await asyncio.wait_for(asyncio.gather(*map(collect, waiting)), 5)
        await asyncio.sleep(0.1)
        hang.release.set()
        results = await asyncio.gather(*map(collect, choices))
        assert [result.token_ids for result in results] == 3 * [expected_output(PROMPT, 4)]
        assert {result.finish.reason for result in late} == {FinishReason.ABORT}, "none of it has begun"
        metrics = harness.engine.metrics
        assert (metrics.requests_rejected["queue_timeout"], metrics.request_aborts["timeout"]) == (1, 1)


async def test_the_queue_timeout_counts_from_the_submission() -> None:
    clock = ManualClock()
    limits = EngineLimits(queue_timeout_s=5.0)
    async with running_engine(clock=clock, limits=limits) as harness:
        arrival = harness.engine.now()
        clock.advance(60.0)  # a client that sent its body slowly
        request = GenerationRequest("a", PROMPT, SamplingParams(max_tokens=3), arrival_time=arrival)
        assert (await collect(harness.engine.submit(request))).finish.reason is FinishReason.LENGTH


async def test_a_new_deadline_counts_from_the_arrival() -> None:
    clock, hang = ManualClock(), Hang(2)
    async with running_engine(before=hang, clock=clock) as harness:
        engine, arrival = harness.engine, harness.engine.now()
        clock.advance(3.0)
        sampling = SamplingParams(max_tokens=100, temperature=0.0)
        stream = engine.submit(GenerationRequest("a", PROMPT, sampling, arrival_time=arrival))
        await asyncio.to_thread(hang.entered.wait, 10)
        assert engine.controls.reprioritize("a", deadline_s=2.5)
        result = await asyncio.wait_for(collect(stream), 5)
        hang.release.set()
        assert result.finish.reason is FinishReason.DEADLINE
        assert "2.5 s after the request arrived" in str(result.finish.error)


async def test_a_timer_that_fires_before_the_clock_says_so_waits_on() -> None:
    clock, hang = ManualClock(), Hang(2)
    async with running_engine(before=hang, clock=clock) as harness:
        stream = submit(harness, "a", 0.01)
        await asyncio.to_thread(hang.entered.wait, 10)
        await asyncio.sleep(0.05)
        assert harness.engine.gauges().num_requests_running == 1
        clock.advance(1.0)
        result = await asyncio.wait_for(collect(stream), 5)
        hang.release.set()
        assert result.finish.reason is FinishReason.DEADLINE


async def test_what_ends_in_time_leaves_no_timer() -> None:
    limits = EngineLimits(queue_timeout_s=60.0)
    async with running_engine(limits=limits) as harness:
        await collect(submit(harness, "a", 60.0, max_tokens=3))
        time_limits = harness.engine._time_limits
        assert (time_limits._deadlines, time_limits._waits) == ({}, {})


async def test_a_new_deadline_that_has_passed_leaves_no_timer_of_a_request_that_waits() -> None:
    hang = Hang(2)
    limits = EngineLimits(queue_timeout_s=60.0)
    async with running_engine(EngineShape(max_num_seqs=1), before=hang, limits=limits) as harness:
        running, waiting = submit(harness, "a", max_tokens=3), submit(harness, "b")
        await asyncio.to_thread(hang.entered.wait, 10)
        assert harness.engine.controls.reprioritize("b", deadline_s=1e-9)
        assert (await collect(waiting)).finish.reason is FinishReason.DEADLINE
        hang.release.set()
        await collect(running)
        time_limits = harness.engine._time_limits
        assert (time_limits._deadlines, time_limits._waits) == ({}, {})


async def test_a_full_queue_says_when_to_come_back_by_the_measured_rate() -> None:
    def before(inputs: StepInputs) -> None:
        time.sleep(0.4)

    limits = EngineLimits(max_queued_requests=8)
    async with running_engine(EngineShape(max_num_seqs=1), before=before, limits=limits) as harness:
        await collect(submit(harness, "a", max_tokens=1))
        streams = [submit(harness, f"b{i}", max_tokens=1) for i in range(8)]
        with pytest.raises(Overloaded) as caught:
            harness.engine.admit(1)
        assert caught.value.code == "queue_full"
        assert 3 <= caught.value.retry_after_s <= 60  # 8 requests at 0.4 s each, more on a busy machine
        for stream in streams:
            stream.close()
