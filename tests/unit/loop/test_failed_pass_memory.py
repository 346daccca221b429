"""What a failed pass had in its hands is let go at once: the pass after it may need the room."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest

from engine.errors import OutOfDeviceMemory
from engine.plan.step_records import StepInputs
from tests.support.engines import collect, running_engine
from tests.support.fakes import expected_output

PROMPT = [1, 2, 3]


class Activations:
    """Stands for tensors."""


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """Let nothing go by chance."""
    gc.disable()
    yield
    gc.enable()


def failing(refs: list[weakref.ref[Activations]], fail: Callable[[], None]) -> Callable[[StepInputs], None]:
    """A first pass that fails deep inside a model; later ones note what is left of it."""

    def layer(held: Activations) -> None:
        more = Activations()
        refs.append(weakref.ref(more))
        fail()

    def before(inputs: StepInputs) -> None:
        if not refs:
            held = Activations()
            refs.append(weakref.ref(held))
            layer(held)
        assert [ref() for ref in refs] == [None, None]

    return before


def run_out() -> None:
    try:
        raise MemoryError
    except MemoryError as error:
        raise OutOfDeviceMemory("no room") from error


async def test_the_retry_has_the_room_of_the_first_try() -> None:
    refs: list[weakref.ref[Activations]] = []
    async with running_engine(before=failing(refs, run_out)) as harness:
        result = await collect(harness.submit(PROMPT, max_tokens=5))
        assert result.token_ids == expected_output(PROMPT, 5)
        assert len(refs) == 2
        assert harness.engine.metrics.engine_errors == {"forward": 1}


async def test_a_batch_that_fails_leaves_nothing() -> None:
    refs: list[weakref.ref[Activations]] = []

    def fail() -> None:
        raise RuntimeError("boom")

    async with running_engine(before=failing(refs, fail)) as harness:
        assert (await collect(harness.submit(PROMPT, max_tokens=5))).finish.error is not None
        assert [ref() for ref in refs] == [None, None]
        assert (await collect(harness.submit(PROMPT, max_tokens=5))).finish.error is None
