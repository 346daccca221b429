"""The loop over a device that takes a step before the last one is read: never idle, and the serial text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from engine.errors import EngineDead, OutOfDeviceMemory, RequestFailed
from engine.loop.engine_parts import AheadRunner, EngineState, Executors
from engine.loop.reader_turns import ReaderTurns
from engine.loop.step_pipeline import StepPipeline
from engine.plan.request import FinishReason, GenerationRequest, SamplingParams
from engine.plan.speculation.drafter import DraftResult
from engine.plan.speculation.speculation_config import Schedule
from engine.plan.step_records import SampledRows, StepInputs, StepResult
from tests.support.ahead_fakes import AheadFakeRunner
from tests.support.engines import (
    EngineShape,
    Harness,
    InlineExecutor,
    collect,
    running_engine,
    text_tokenizer,
)
from tests.support.fake_drafters import FakeDrafter
from tests.support.fakes import FakeRunner, expected_output

PROMPT = [1, 2, 3, 4, 5]

ahead_engine = partial(running_engine, make_runner=AheadFakeRunner)
late_engine = partial(running_engine, make_runner=partial(AheadFakeRunner, is_late=True))
both = pytest.mark.parametrize("engine", [ahead_engine, late_engine], ids=["early", "late"])


def events(harness: Harness) -> list[tuple[str, int]]:
    assert isinstance(harness.runner, AheadFakeRunner)
    return harness.runner.events


def launches_and_reads(num_steps: int) -> list[tuple[str, int]]:
    """Every step launched before the one in front of it is read."""
    order = [("launch", 0)]
    for number in range(1, num_steps):
        order += [("launch", number), ("read", number - 1)]
    return [*order, ("read", num_steps - 1)]


async def test_the_device_always_has_the_next_decode_before_the_last_is_read() -> None:
    async with ahead_engine() as harness:
        result = await collect(harness.submit(PROMPT, max_tokens=30))
        assert result.token_ids == expected_output(PROMPT, 30)
        assert events(harness) == launches_and_reads(30)


async def test_a_batch_is_never_waited_for_until_the_last_of_it_ends() -> None:
    async with ahead_engine() as harness:
        streams = [harness.submit([seed, 3], max_tokens=4 + seed) for seed in range(8)]
        results = await asyncio.gather(*(collect(stream) for stream in streams))
        for seed, result in enumerate(results):
            assert result.token_ids == expected_output([seed, 3], 4 + seed)
        assert events(harness) == launches_and_reads(11), "no step is run in vain: all ends are known"
        assert harness.engine.metrics.generation_tokens == sum(4 + seed for seed in range(8))


async def test_a_runner_that_cannot_is_given_one_step_at_a_time() -> None:
    assert not isinstance(FakeRunner(1, 1), AheadRunner)
    assert isinstance(AheadFakeRunner(1, 1), AheadRunner)
    assert not StepPipeline(FakeRunner(1, 1), InlineExecutor(), ReaderTurns()).can_launch_ahead


# What is drawn in vain is nobody's.


@both
async def test_who_stops_gets_nothing_of_the_step_ahead(engine: Callable[..., Any]) -> None:
    output = expected_output(PROMPT, 9)
    async with engine() as harness:
        stopped = harness.submit(PROMPT, max_tokens=9, stop_token_ids=frozenset({output[4]}))
        other = harness.submit([9, 9], max_tokens=20)
        result, rest = await asyncio.gather(collect(stopped), collect(other))
        end = output.index(output[4]) + 1
        assert result.token_ids == output[:end]
        assert (result.finish.reason, result.finish.num_output_tokens) == (FinishReason.STOP, end)
        assert rest.token_ids == expected_output([9, 9], 20)
        assert harness.engine.metrics.generation_tokens == end + 20


@both
async def test_a_stop_string_ends_the_text_where_it_would(engine: Callable[..., Any]) -> None:
    tokens = expected_output(PROMPT, 40)
    text = text_tokenizer().decode(tokens, skip_special_tokens=True)
    stop = next(text[i : i + 5] for i in range(8, len(text) - 5) if text[i : i + 5].isascii())
    found = []
    for each in (running_engine, engine):
        async with each() as harness:
            result = await collect(harness.submit(PROMPT, max_tokens=40, stop=(stop,)))
            assert (result.finish.reason, result.finish.stop_reason) == (FinishReason.STOP, stop)
            assert harness.engine.metrics.generation_tokens == len(result.token_ids)
            found.append((result.text, result.token_ids, result.finish.num_output_tokens))
    assert found[0] == found[1]


@both
async def test_leaving_and_cancelling_end_requests_in_flight(engine: Callable[..., Any]) -> None:
    async with engine() as harness:
        leaving, cancelled, other = (harness.submit([seed, 3], max_tokens=100) for seed in range(3))
        await asyncio.gather(anext(leaving), anext(cancelled))
        leaving.close()
        assert harness.engine.cancel(cancelled.request_id)
        assert (await collect(leaving)).finish.reason is FinishReason.ABORT
        assert (await collect(cancelled)).finish.reason is FinishReason.ABORT
        assert (await collect(other)).token_ids == expected_output([2, 3], 100)


@both
async def test_a_bad_row_ends_one_request(engine: Callable[..., Any]) -> None:
    def row_errors(step: int, row: int) -> str | None:
        return "the logits are not finite" if (step, row) == (4, 1) else None

    async with engine(row_errors=row_errors) as harness:
        streams = [harness.submit([seed, 3], max_tokens=10) for seed in range(3)]
        results = await asyncio.gather(*(collect(stream) for stream in streams))
        assert isinstance(results[1].finish.error, RequestFailed)
        for seed in (0, 2):
            assert results[seed].token_ids == expected_output([seed, 3], 10)
        assert harness.engine.metrics.engine_errors == {"sampler": 1}


async def test_stopping_waits_for_both_steps_in_flight() -> None:
    async with ahead_engine() as harness:
        stream = harness.submit(PROMPT, max_tokens=100)
        await anext(stream)
    launched = [number for kind, number in events(harness) if kind == "launch"]
    assert launched == [number for kind, number in events(harness) if kind == "read"]


# Whose draw has to wait.


def drawn_later(num_steps: int) -> list[tuple[str, int]]:
    """Every pass launched before the step in front of it is read, its draw as soon as that is."""
    order = [("launch", 0)]
    for number in range(1, num_steps):
        order += [("launch", number), ("read", number - 1), ("draw", number)]
    return [*order, ("read", num_steps - 1)]


@both
async def test_penalties_are_reckoned_from_every_token_while_the_pass_runs(
    engine: Callable[..., Any],
) -> None:
    """The runner itself looks whether they are."""
    async with engine() as harness:
        plain, penalized = (
            harness.submit([seed, 3], max_tokens=12, repetition_penalty=penalty)
            for seed, penalty in enumerate((1.0, 1.1))
        )
        results = await asyncio.gather(collect(plain), collect(penalized))
        for seed, result in enumerate(results):
            assert result.token_ids == expected_output([seed, 3], 12)
        assert events(harness) == drawn_later(12)
        assert not harness.runner.violations


@both
async def test_who_stops_before_the_draw_of_the_pass_that_has_it(engine: Callable[..., Any]) -> None:
    output = expected_output(PROMPT, 9)
    async with engine() as harness:
        stopped = harness.submit(
            PROMPT, max_tokens=9, presence_penalty=1.0, stop_token_ids=frozenset({output[4]})
        )
        other = harness.submit([9, 9], max_tokens=20, presence_penalty=1.0)
        result, rest = await asyncio.gather(collect(stopped), collect(other))
        assert result.token_ids == output[: output.index(output[4]) + 1]
        assert result.finish.reason is FinishReason.STOP
        assert rest.token_ids == expected_output([9, 9], 20)
        assert not harness.runner.violations


@both
async def test_cancelling_before_and_after_the_draw(engine: Callable[..., Any]) -> None:
    async with engine() as harness:
        streams = [harness.submit([seed, 3], max_tokens=100, presence_penalty=1.0) for seed in range(4)]
        await asyncio.gather(*(anext(stream) for stream in streams))
        for number, stream in enumerate(streams[:3]):
            for _ in range(number):
                await anext(stream)
            assert harness.engine.cancel(stream.request_id)
            assert (await collect(stream)).finish.reason is FinishReason.ABORT
        known = expected_output([3, 3], 100)
        rest = (await collect(streams[3])).token_ids
        assert rest == known[len(known) - len(rest) :]
        assert not harness.runner.violations


@both
@pytest.mark.parametrize("number", [3, 4])
async def test_a_failing_draw_ends_as_a_failing_pass_does(engine: Callable[..., Any], number: int) -> None:
    penalty = {"presence_penalty": 1.0}
    async with engine() as harness:
        harness.runner.on_draw = failing_at(number, error=RuntimeError("boom"))
        result = await collect(harness.submit(PROMPT, max_tokens=10, **penalty))
        assert isinstance(result.finish.error, RequestFailed)
        assert result.token_ids == expected_output(PROMPT, number)
        again = await collect(harness.submit(PROMPT, max_tokens=6, **penalty))
        assert again.token_ids == expected_output(PROMPT, 6)
        assert harness.engine.metrics.engine_errors == {"forward": 1}


@both
async def test_a_draw_without_memory_is_tried_again(engine: Callable[..., Any]) -> None:
    async with engine() as harness:
        harness.runner.on_draw = failing_at(4, error=OutOfDeviceMemory("no room"))
        streams = [harness.submit([seed, 3], max_tokens=10, presence_penalty=1.0) for seed in range(3)]
        results = await asyncio.gather(*(collect(stream) for stream in streams))
        for seed, result in enumerate(results):
            assert result.token_ids == expected_output([seed, 3], 10)
        assert harness.engine.metrics.preemptions["recompute"] == 1


async def test_stopping_reads_a_step_that_was_never_drawn() -> None:
    async with ahead_engine() as harness:
        stream = harness.submit(PROMPT, max_tokens=100, presence_penalty=1.0)
        await anext(stream)
    launched = [number for kind, number in events(harness) if kind == "launch"]
    assert launched == [number for kind, number in events(harness) if kind == "read"]
    assert not harness.runner.violations


# Who has to wait.


async def test_steps_with_drafts_are_read_one_by_one_and_give_the_same() -> None:
    shape = EngineShape(schedule="sync")
    async with ahead_engine(shape, drafters=[FakeDrafter(method="ngram", is_cheap=True)]) as harness:
        result = await collect(harness.submit(PROMPT, max_tokens=60))
        assert result.token_ids == expected_output(PROMPT, 60)
        stats = harness.parts.batcher.decoder.stats
        assert stats.num_accepted > 10
        assert isinstance(harness.runner, AheadFakeRunner)
        assert harness.runner.num_ahead < 10


@pytest.mark.parametrize(
    ("engine", "schedule", "is_cheap", "are_held"),
    [
        (ahead_engine, "sync", False, True),
        (ahead_engine, "async", False, False),
        (ahead_engine, "sync", True, False),
        (running_engine, "sync", False, False),
    ],
    ids=["waited for", "beside the step", "inline", "on a CPU"],
)
async def test_readers_are_held_where_a_device_waits_for_drafts(
    engine: Callable[..., Any],
    schedule: Schedule,
    is_cheap: bool,
    are_held: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[bool] = []  # whether they are held then
    begin = ReaderTurns.begin

    def noted(turns: ReaderTurns) -> None:
        begun.append(turns._hold is not None)
        begin(turns)

    monkeypatch.setattr(ReaderTurns, "begin", noted)
    drafter = FakeDrafter(is_cheap=is_cheap)
    async with engine(EngineShape(schedule=schedule), drafters=[drafter]) as harness:
        result = await collect(harness.submit(PROMPT, max_tokens=60))
        assert result.token_ids == expected_output(PROMPT, 60)
        assert drafter.num_calls > 5
    assert any(begun) == are_held


async def test_a_drafter_that_has_nothing_to_say_holds_nothing_up() -> None:
    silent = FakeDrafter(method="ngram", is_cheap=True, mangle=lambda result: DraftResult((), 0.0))
    async with ahead_engine(EngineShape(schedule="sync"), drafters=[silent]) as harness:
        result = await collect(harness.submit(PROMPT, max_tokens=20))
        assert result.token_ids == expected_output(PROMPT, 20)
        assert events(harness) == launches_and_reads(20)


async def test_newcomers_are_seated_as_soon_as_the_steps_in_flight_have_landed() -> None:
    async with ahead_engine() as harness:
        first = harness.submit(PROMPT, max_tokens=100)
        known = list((await anext(first)).token_ids)
        second = await collect(harness.submit([9, 9], max_tokens=5))
        assert second.token_ids == expected_output([9, 9], 5)
        assert known + (await collect(first)).token_ids == expected_output(PROMPT, 100)


@pytest.mark.parametrize("engine", [running_engine, ahead_engine, late_engine])
async def test_who_will_miss_its_deadline_gives_its_seat_up(
    engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine(EngineShape(max_num_seqs=1)) as harness:
        prompt, sampling = [1, 2, 3], SamplingParams(max_tokens=100, temperature=0.0)
        asked = GenerationRequest("late", prompt, sampling, deadline=harness.engine.now() + 60)
        late = harness.engine.submit(asked)
        await anext(late)
        monkeypatch.setattr(type(harness.parts.batcher), "_will_miss", lambda _, request, *__: True)
        other = await collect(harness.submit(PROMPT, max_tokens=5))
        assert other.token_ids == expected_output(PROMPT, 5)
        finish = (await collect(late)).finish
        assert finish.reason is FinishReason.DEADLINE
        assert finish.num_output_tokens < 30, "it is judged every 16 steps"


# When steps fail.


def failing_at(*numbers: int, error: Exception) -> Callable[[StepInputs], None]:
    """Called before each step, from 0."""
    seen = iter(range(10_000))

    def before(inputs: StepInputs) -> None:
        if next(seen) in numbers:
            raise error

    return before


@both
@pytest.mark.parametrize("number", [3, 4])
async def test_a_failed_step_ends_its_batch_and_the_next_request_is_served(
    engine: Callable[..., Any], number: int
) -> None:
    async with engine(before=failing_at(number, error=RuntimeError("boom"))) as harness:
        result = await collect(harness.submit(PROMPT, max_tokens=10))
        assert isinstance(result.finish.error, RequestFailed)
        assert result.token_ids == expected_output(PROMPT, number)
        assert (await collect(harness.submit(PROMPT, max_tokens=6))).token_ids == expected_output(PROMPT, 6)
        assert harness.engine.metrics.engine_errors == {"forward": 1}, "the one behind it is no fault"


@both
async def test_out_of_memory_is_tried_again(engine: Callable[..., Any]) -> None:
    async with engine(before=failing_at(4, error=OutOfDeviceMemory("no room"))) as harness:
        streams = [harness.submit([seed, 3], max_tokens=10) for seed in range(3)]
        results = await asyncio.gather(*(collect(stream) for stream in streams))
        for seed, result in enumerate(results):
            assert result.token_ids == expected_output([seed, 3], 10)
        assert harness.engine.metrics.preemptions["recompute"] == 1


@both
async def test_three_failed_steps_in_a_row_are_the_end(engine: Callable[..., Any]) -> None:
    failing = failing_at(*range(2, 100), error=OutOfDeviceMemory("no room"))
    async with engine(before=failing) as harness:
        errors = [(await collect(harness.submit(PROMPT, max_tokens=10))).finish.error for _ in range(2)]
        assert list(map(type, errors)) == [RequestFailed, EngineDead]
        assert harness.engine.state is EngineState.DEAD


class Refusing:
    """An AheadRunner that cannot launch its second step, and would not know what the third is made of."""

    def __init__(self) -> None:
        self.num_launched = 0

    def run(self, inputs: StepInputs) -> StepResult:
        raise AssertionError

    def launch(self, inputs: StepInputs) -> Any:
        self.num_launched += 1
        if self.num_launched == 2:
            raise RuntimeError("no room")
        return _Waited()


class _Waited:
    def wait(self) -> StepResult:
        return StepResult(SampledRows([5]), 0.0, 0.0)


async def test_what_follows_a_step_that_could_not_be_launched_is_not_launched_either() -> None:
    runner = Refusing()
    executor: Executor = Executors.threads().target
    pipeline = StepPipeline(runner, executor, ReaderTurns())
    unadjusted = SimpleNamespace(adjustments=())
    plain: Any = SimpleNamespace(previous_rows=None, sampling=unadjusted)
    following: Any = SimpleNamespace(previous_rows=[0], sampling=unadjusted)
    pipeline.launch(plain)
    pipeline.launch(following)
    pipeline.launch(following)
    assert (await pipeline.read()).rows.token_ids == [5]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no room"):
            await pipeline.read()
    assert runner.num_launched == 2
    pipeline.launch(plain)
    assert (await pipeline.read()).rows.token_ids == [5]
    executor.shutdown()
