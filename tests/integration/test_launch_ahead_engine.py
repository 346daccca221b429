"""Steps launched ahead change no token: whole engines over a tiny model, one step at a time against two."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.engine_parts import StepRunner
from engine.outputs import StepInputs
from engine.request import FinishReason
from tests.ahead_runner import AheadOnHost, Landed
from tests.repetitive_world import WORDS, Family, make_family, save_repetitive_model
from tests.speculated import Run, differences, engine_of, run, single_threaded

NUM_FAMILIES = 48
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
    """Most of them of a kind that launching ahead is for; one in six may have penalties."""
    draw = random.Random(3)
    beginning = draw.choices(WORDS, k=17)
    prompts = [beginning[: draw.choice((0, 8, 17))] + draw.choices(WORDS, k=6) for _ in range(NUM_FAMILIES)]
    kinds = ["T 1.2" if number % 6 == 5 else "T 0.7" for number in range(NUM_FAMILIES)]
    return [
        make_family(f"{number}", *each, draw) for number, each in enumerate(zip(kinds, prompts, strict=True))
    ]


@pytest.fixture(scope="module")
def expected(target: Path, families: list[Family]) -> Run:
    async def speak() -> Run:
        async with engine_of(target, *PLAIN) as engine:
            return await run(engine, families, 1, cuts=False)

    return asyncio.run(speak())


class Counting(AheadOnHost):
    """Counts the steps that are made of tokens nobody has read."""

    num_ahead = 0

    def launch(self, inputs: StepInputs) -> Landed:
        """See AheadRunner."""
        self.num_ahead += inputs.previous_rows is not None
        return super().launch(inputs)


CELLS = {
    "plain": PLAIN,
    "in chunks": (*PLAIN, "--max-num-batched-tokens", "24"),
    "by default": (),
    "in little memory": (*PLAIN, "--num-kv-blocks", "30", "--preemption", "swap"),
}


@pytest.mark.parametrize("cell", CELLS)
async def test_text_is_the_same(cell: str, target: Path, families: list[Family], expected: Run) -> None:
    runners: list[Counting] = []

    def wrap(runner: StepRunner) -> StepRunner:
        runners.append(Counting(runner))
        return runners[0]

    async with engine_of(target, *CELLS[cell], wrap=wrap) as engine:
        found = await run(engine, families, 4)
        metrics = engine.metrics
    assert not differences(expected, found)
    assert runners[0].num_ahead > (5 if cell == "by default" else 30)
    assert metrics.generation_tokens == sum(len(spoken.token_ids) for spoken in found.spoken.values())
    reasons = {spoken.finish.reason for spoken in found.spoken.values()}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT}
    if cell == "in little memory":
        assert metrics.preemptions.total() > 0
