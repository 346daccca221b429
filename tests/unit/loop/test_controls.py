"""Controls before the model is loaded, over a request that hangs in a step, and once it has ended."""

from __future__ import annotations

import asyncio

import pytest

from engine import DraftingChange, Engine, Overloaded
from engine.errors import InvalidRequest
from engine.loop.engine_parts import EngineParts
from tests.support.engines import collect, running_engine
from tests.support.fakes import Hang, ManualClock

PROMPT = [3, 1, 4]


async def test_while_loading_there_is_nothing_to_explain_or_change() -> None:
    def load() -> EngineParts | None:
        raise NotImplementedError

    controls = Engine(load).controls
    assert controls.explain("a") is None
    assert not controls.reprioritize("a", priority=1)
    assert not controls.retune("a", DraftingChange(enabled=False))
    for call in (controls.reset_prefix_cache, lambda: controls.change_drafting(DraftingChange())):
        with pytest.raises(Overloaded) as caught:
            call()
        assert caught.value.code == "loading"


async def test_an_open_request_is_explained_and_changed_until_it_ends() -> None:
    clock, hang = ManualClock(), Hang(2)
    async with running_engine(before=hang, clock=clock) as harness:
        controls = harness.engine.controls
        stream = harness.submit(PROMPT)
        await asyncio.to_thread(hang.entered.wait, 10)
        name = stream.request_id
        assert controls.reprioritize(name, priority=-3, deadline_s=50.0)
        assert controls.retune(name, DraftingChange(enabled=False))
        found = controls.explain(name)
        assert found is not None and found.waits_because is None
        assert (found.priority, found.deadline_s) == (-3, 50.0)
        assert found.drafting.why_off is not None
        with pytest.raises(InvalidRequest, match="No drafter is loaded"):
            controls.change_drafting(DraftingChange(enabled=False))
        hang.release.set()
        await collect(stream)
        assert controls.explain(name) is None
        assert not controls.reprioritize(name, priority=1)
        assert not controls.retune(name, DraftingChange(enabled=True))
