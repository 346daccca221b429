"""FaultyRunner: has forward passes fail, lag, or give rows that cannot be drawn from."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from config import FaultPoint
from engine.compute.loading.loader import LoadedModel
from engine.faults.fault_counter import FaultCounter
from engine.faults.faulty_sampler import CURSED
from engine.faults.pass_hooks import PassHooks
from engine.faults.step_owners import OwnedStep, StepOwners
from engine.loop.engine_parts import StepRunner
from engine.plan.step_records import SamplingInputs, StepInputs, StepResult

FAILURE = "the fault plan has this pass fail"
NO_MEMORY = "the fault plan has this pass run out of memory"


class FaultyRunner:
    """A StepRunner around another. What comes before the first step, as passes to warm up, are no hits.

    A pass is a hit of each `forward_` point. Faults of it happen where they do in earnest, around the model.
    A sequence that is drawn from is a hit of `logits_nan` and of `sampler_raise`, whatever its drafts.
    """

    def __init__(
        self, plan: FaultCounter, owners: StepOwners, runner: StepRunner, loaded: LoadedModel
    ) -> None:
        self._plan = plan
        self._owners = owners
        self._runner = runner
        self._hooks = PassHooks(runner, loaded)

    def run(self, inputs: StepInputs) -> StepResult:
        """See StepRunner."""
        step = self._owners.of(inputs)
        sampling = cursed(self._plan, step, inputs.sampling)
        with self._hooks.around(
            inputs, lambda: self._before_pass(step), lambda: rows_hit(self._plan, "logits_nan", step)
        ):
            return self._runner.run(replace(inputs, sampling=sampling))

    def _before_pass(self, step: OwnedStep) -> None:
        plan, numbers = self._plan, step.numbers
        if (fault := plan.hit_by_all("forward_sleep", numbers)) is not None:
            time.sleep(fault.seconds)
        is_out_of_memory = plan.hit_by_all("forward_oom", numbers) is not None
        if plan.hit_by_all("forward_raise", numbers) is not None:
            raise RuntimeError(FAILURE)
        if is_out_of_memory:
            raise torch.OutOfMemoryError(NO_MEMORY)


def rows_hit(plan: FaultCounter, point: FaultPoint, step: OwnedStep) -> list[int]:
    """The first rows of the sequences that a fault is due for."""
    return [row for row, number in step.drawn() if plan.hit(point, number) is not None]


def cursed(plan: FaultCounter, step: OwnedStep, sampling: SamplingInputs) -> SamplingInputs:
    """The rows' parameters, with a mark on those that the sampler is to fail on."""
    rows = rows_hit(plan, "sampler_raise", step)
    if not rows:
        return sampling
    top_k = sampling.top_k.copy()
    top_k[rows] = CURSED
    return replace(sampling, top_k=top_k)
