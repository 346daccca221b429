"""The runner that notes its steps, and the shares that follow from them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.loop.engine import Engine
from engine.plan.request import GenerationRequest, SamplingParams
from tests.bench.streams import BenchmarkFailed
from tests.bench.timed_runner import StepShares, TimedRunner, TimedStep
from tests.support.engines import EngineShape, collect, make_parts
from tests.support.fakes import FakeRunner


def step(started: float, num_seqs: int = 2, num_tokens: int = 2) -> TimedStep:
    return TimedStep(started, num_seqs, num_tokens, forward_s=0.6, sample_s=0.3)


def test_shares_are_of_the_time_from_one_step_to_the_next() -> None:
    shares = StepShares.of([step(10.0), step(11.0), step(12.0)])
    assert shares == pytest.approx((1.0, 0.4, 0.1))


def test_only_steps_in_which_all_decode_are_taken_and_each_once() -> None:
    timed = TimedRunner(FakeRunner(4, 4))
    timed.steps = [step(0.0, 2, 9), step(1.0), step(2.0), step(3.0), step(4.0), step(5.0, 1, 1)]
    assert [taken.started for taken in timed.take_decodes(2, settle=1)] == [2.0, 3.0, 4.0]
    with pytest.raises(BenchmarkFailed, match="2 sequences"):
        timed.take_decodes(2, settle=0)


async def test_steps_of_an_engine_are_noted_as_they_are() -> None:
    shape = EngineShape()
    parts = make_parts(shape, FakeRunner(shape.num_blocks, shape.block_size))
    timed = TimedRunner(parts.runner)
    engine = Engine(lambda: replace(parts, runner=timed))
    await engine.start()
    sampling = SamplingParams(max_tokens=6, temperature=0.0)
    found = await collect(engine.submit(GenerationRequest("one", list(range(20, 30)), sampling)))
    await engine.stop()
    assert [(one.num_seqs, one.num_tokens) for one in timed.steps] == [(1, 10), *[(1, 1)] * 5]
    assert len(found.token_ids) == 6
    assert len(timed.take_decodes(1, settle=1)) == 4
