"""Steps launched ahead change no token: whole engines over a tiny model, one step at a time against two."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from engine.plan.request import FinishReason
from tests.support.ahead_asks import StepCount, adjusted_families, plain_families
from tests.support.ahead_runner import AheadOnHost
from tests.support.examples import share_of
from tests.support.repetitive_world import Family, save_repetitive_model
from tests.support.speculated import Run, differences, engine_of, run, single_threaded

PLAIN = ("--speculative-method", "none")


@pytest.fixture(autouse=True, scope="module")
def small() -> Iterator[None]:
    """Models this small only wait for their threads."""
    with single_threaded():
        yield


@pytest.fixture(scope="module")
def target(small: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_repetitive_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def families() -> list[Family]:
    return plain_families(share_of(48, 2))


@pytest.fixture(scope="module")
def expected(target: Path, families: list[Family]) -> Run:
    async def speak() -> Run:
        async with engine_of(target, *PLAIN) as engine:
            return await run(engine, families, 1, cuts=False)

    return asyncio.run(speak())


CELLS = {
    "plain": PLAIN,
    "in chunks": (*PLAIN, "--max-num-batched-tokens", "24"),
    "by default": (),
    "in little memory": (*PLAIN, "--num-kv-blocks", "30", "--preemption", "swap"),
}


@pytest.mark.by_default("in chunks", "by default", "in little memory")
@pytest.mark.parametrize("cell", CELLS)
async def test_text_is_the_same(cell: str, target: Path, families: list[Family], expected: Run) -> None:
    count = StepCount()
    wrap = partial(count.watch, make_ahead=AheadOnHost)
    async with engine_of(target, *CELLS[cell], wrap=wrap) as engine:
        found = await run(engine, families, 4)
        metrics = engine.metrics
    assert not differences(expected, found)
    assert count.num_ahead > (5 if cell == "by default" else 30)
    assert metrics.generation_tokens == sum(len(spoken.token_ids) for spoken in found.spoken.values())
    reasons = {spoken.finish.reason for spoken in found.spoken.values()}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT}
    if cell == "in little memory":
        assert metrics.preemptions.total() > 0


async def test_passes_whose_draws_wait_give_the_same(target: Path) -> None:
    """Penalties, biases and schemas, with readers that leave in the middle."""
    families = adjusted_families(24)
    async with engine_of(target, *PLAIN) as engine:
        expected = await run(engine, families, 1, cuts=False)
    count = StepCount()
    wrap = partial(count.watch, make_ahead=AheadOnHost)
    async with engine_of(target, *PLAIN, wrap=wrap) as engine:
        found = await run(engine, families, 4)
    assert not differences(expected, found)
    assert count.num_drawn_later > 30
    reasons = {spoken.finish.reason for spoken in found.spoken.values()}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT}
