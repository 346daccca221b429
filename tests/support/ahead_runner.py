"""AheadOnHost: steps launched ahead on a device that computes at once, for loops that are tested on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from engine.loop.engine_parts import StepRunner
from engine.plan.step_records import SampledRows, SamplingInputs, StepInputs, StepResult


@dataclass(frozen=True, slots=True)
class Landed:
    """A LaunchedStep that is over, well or badly."""

    outcome: StepResult | Exception

    def draw(self, sampling: SamplingInputs) -> None:
        """It was drawn when it was launched."""
        raise AssertionError("a step is drawn once")

    def wait(self) -> StepResult:
        """See LaunchedStep."""
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class ToBeDrawn:
    """A LaunchedStep that is carried out as soon as it is known how it is drawn."""

    def __init__(self, carry_out: Callable[[SamplingInputs], Landed]) -> None:
        self._carry_out = carry_out
        self._landed = Landed(StepResult(SampledRows([]), 0.0, 0.0))

    def draw(self, sampling: SamplingInputs) -> None:
        """See LaunchedStep."""
        self._landed = self._carry_out(sampling)

    def wait(self) -> StepResult:
        """See LaunchedStep."""
        return self._landed.wait()


class AheadOnHost:
    """An AheadRunner around any StepRunner: a launch computes the whole step, its errors come from `wait`.

    A step that is drawn later is computed then.

    A token that the last launch drew and that failed there is 0 in the next, as on a device: what comes of it
    means nothing, and computing it must not fail.
    """

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self._drawn = np.zeros(0, np.int64)  # [R] of the last launch

    def run(self, inputs: StepInputs) -> StepResult:
        """See StepRunner."""
        return self.launch(inputs).wait()

    def launch(self, inputs: StepInputs) -> Landed | ToBeDrawn:
        """See AheadRunner."""
        inputs = with_drawn(inputs, self._drawn)
        if inputs.is_drawn_later:
            return ToBeDrawn(lambda sampling: self._carry_out(replace(inputs, sampling=sampling)))
        return self._carry_out(inputs)

    def _carry_out(self, inputs: StepInputs) -> Landed:
        self._drawn = np.zeros(len(inputs.logits_rows), np.int64)
        try:
            result = self._runner.run(inputs)
        except Exception as error:
            return Landed(error)
        self._drawn[:] = result.rows.token_ids
        self._drawn[[*(result.rows.row_errors or ())]] = 0
        return Landed(result)


def with_drawn(inputs: StepInputs, drawn: np.ndarray) -> StepInputs:
    """The same step with the tokens that only the last launch knew, `drawn` [its rows], filled in."""
    rows = inputs.previous_rows
    if rows is None:
        return inputs
    token_ids = inputs.token_ids.copy()
    token_ids[rows >= 0] = np.maximum(drawn[rows[rows >= 0]], 0)
    return replace(inputs, token_ids=token_ids, previous_rows=None)
