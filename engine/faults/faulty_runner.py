"""FaultyRunner: has forward passes fail, lag, or give rows that cannot be drawn from."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from config import FaultPoint
from engine.compute.loading.loader import LoadedModel
from engine.faults.fault_counter import FaultCounter
from engine.faults.faulty_sampler import CURSED
from engine.loop.engine_parts import StepRunner
from engine.plan.step_records import SamplingInputs, StepInputs, StepResult


@dataclass(slots=True)
class Flight:
    """Whom the step that is about to run is for: the number of each of its sequences, in their order.

    Written between two steps and read during one, so that one thread at a time has it.
    """

    numbers: list[int | None] = field(default_factory=list)


class FaultyRunner:
    """A StepRunner around another. What comes before the first step, as passes to warm up, are no hits.

    It launches nothing ahead, so that it is always known whom a pass is for. A pass is a hit of each
    `forward_` point. Faults of it happen where they do in earnest, around the model. A sequence that is drawn
    from is a hit of `logits_nan` and of `sampler_raise`, whatever its drafts.
    """

    def __init__(self, plan: FaultCounter, flight: Flight, runner: StepRunner, loaded: LoadedModel) -> None:
        self._plan = plan
        self._flight = flight
        self._runner = runner
        self._inputs: StepInputs | None = None  # of the step whose pass is still to come
        # Passes that are replayed do not come by the model: their runner says what they come by.
        for module in (loaded.model, *getattr(runner, "pass_modules", ())):
            module.register_forward_pre_hook(self._before_pass)
            module.register_forward_hook(self._after_pass)

    def run(self, inputs: StepInputs) -> StepResult:
        """See StepRunner."""
        self._inputs = inputs
        try:
            return self._runner.run(replace(inputs, sampling=self._cursed(inputs)))
        finally:
            self._inputs = None

    def _cursed(self, inputs: StepInputs) -> SamplingInputs:
        """The rows' parameters, with a mark on those that the sampler is to fail on."""
        rows = self._rows_hit("sampler_raise", inputs)
        if not rows:
            return inputs.sampling
        top_k = inputs.sampling.top_k.copy()
        top_k[rows] = CURSED
        return replace(inputs.sampling, top_k=top_k)

    def _rows_hit(self, point: FaultPoint, inputs: StepInputs) -> list[int]:
        """The first rows of the sequences that a fault is due for."""
        ends = np.cumsum(inputs.query_lens)
        owners = np.searchsorted(ends, inputs.logits_rows, side="right")  # [R] indices into [0, S)
        sequences, first_rows = np.unique(owners, return_index=True)
        numbers = self._flight.numbers
        return [
            int(row)
            for sequence, row in zip(sequences, first_rows, strict=True)
            if self._plan.hit(point, numbers[sequence]) is not None
        ]

    def _before_pass(self, model: torch.nn.Module, args: object) -> None:
        if self._inputs is None:
            return  # no pass of a step
        numbers = self._flight.numbers
        if (fault := self._plan.hit_by_all("forward_sleep", numbers)) is not None:
            time.sleep(fault.seconds)
        is_out_of_memory = self._plan.hit_by_all("forward_oom", numbers) is not None
        if self._plan.hit_by_all("forward_raise", numbers) is not None:
            raise RuntimeError("the fault plan has this pass fail")
        if is_out_of_memory:
            raise torch.OutOfMemoryError("the fault plan has this pass run out of memory")

    def _after_pass(self, model: torch.nn.Module, args: object, output: Any) -> None:
        inputs, self._inputs = self._inputs, None
        if inputs is None:
            return
        rows = self._rows_hit("logits_nan", inputs)
        logits = output.logits[0]  # [R, vocab], or [N, vocab] of a model that gives all
        if rows:
            logits[rows if len(logits) == len(inputs.logits_rows) else inputs.logits_rows[rows]] = torch.nan
