"""Grammars are followed off the event loop, whatever kind of device there is."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from engine.plan.grammar import TokenMask
from engine.plan.request import FinishReason, GenerationRequest, SamplingParams
from engine.plan.step_records import StepInputs
from tests.support.ahead_fakes import AheadFakeRunner
from tests.support.engines import collect, running_engine
from tests.support.fakes import VOCAB_SIZE, expected_output

PROMPT = [1, 2, 3]
ahead_engine = partial(running_engine, make_runner=AheadFakeRunner)


class Noted:
    """A grammar that allows everything and notes what it is asked, and on which thread."""

    is_dear = False

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, list[int]]] = []

    def _note(self, what: str, token_ids: Sequence[int]) -> None:
        self.asked.append((what, threading.current_thread().name.partition("_")[0], list(token_ids)))

    def start(self, end_token_ids: frozenset[int]) -> Noted:
        return self

    def mask(self, path: Sequence[int]) -> TokenMask:
        self._note("mask", path)
        return np.full(-(-VOCAB_SIZE // 8), 0xFF, np.uint8)

    def num_valid(self, token_ids: Sequence[int]) -> int:
        return len(token_ids)

    def foresee(self, token_ids: Sequence[int]) -> None:
        self._note("foresee", token_ids)

    def accept(self, token_id: int) -> bool:
        self._note("accept", [token_id])
        return False


def draw_by_masks(inputs: StepInputs) -> None:
    """As the sampler does."""
    for adjustment in inputs.sampling.adjustments:
        assert adjustment.allowed_mask is not None
        adjustment.allowed_mask.bits()


@pytest.mark.parametrize("engine", [running_engine, ahead_engine], ids=["serial", "ahead"])
async def test_the_loop_only_asks_what_was_worked_out_on_the_target_thread(engine: Any) -> None:
    noted = Noted()
    async with engine() as harness:
        harness.runner.on_draw = draw_by_masks
        others = [harness.submit([seed, 9], max_tokens=6) for seed in range(3)]
        sampling = SamplingParams(max_tokens=4, temperature=0.0)
        stream = harness.engine.submit(GenerationRequest("formed", PROMPT, sampling, grammar=noted))
        result = await collect(stream)
        for other in others:
            await collect(other)
    tokens = expected_output(PROMPT, 4)
    assert result.token_ids == tokens
    loop = threading.current_thread().name
    assert noted.asked == [
        each
        for token_id in tokens
        for each in (("mask", "target", []), ("foresee", "target", [token_id]), ("accept", loop, [token_id]))
    ]


class Ending(Noted):
    """One that a reply has followed to its end after three tokens."""

    def accept(self, token_id: int) -> bool:
        super().accept(token_id)
        return sum(what == "accept" for what, *_ in self.asked) == 3


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_grammar_that_has_ended_is_not_asked_for_the_row_that_runs_already(is_late: bool) -> None:
    ending = Ending()
    async with running_engine(make_runner=partial(AheadFakeRunner, is_late=is_late)) as harness:
        harness.runner.on_draw = draw_by_masks
        other = harness.submit([9, 9], max_tokens=8)
        sampling = SamplingParams(max_tokens=8, temperature=0.0)
        stream = harness.engine.submit(GenerationRequest("formed", PROMPT, sampling, grammar=ending))
        result = await collect(stream)
        assert (await collect(other)).token_ids == expected_output([9, 9], 8)
        assert isinstance(harness.runner, AheadFakeRunner)
        assert harness.runner.num_drawn_later >= 3, "the last of them has its row in vain"
    assert result.finish.reason is FinishReason.STOP
    assert result.token_ids == expected_output(PROMPT, 3)
    assert [what for what, *_ in ending.asked] == ["mask", "foresee", "accept"] * 3
