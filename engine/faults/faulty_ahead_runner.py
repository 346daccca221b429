"""FaultyAheadRunner: has launched steps go wrong as they do on a device that works beside the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.compute.loading.loader import LoadedModel
from engine.faults.fault_counter import FaultCounter
from engine.faults.faulty_runner import FAILURE, NO_MEMORY, FaultyRunner, cursed, rows_hit
from engine.faults.pass_hooks import PassHooks
from engine.faults.step_owners import StepOwners
from engine.loop.engine_parts import AheadRunner, LaunchedStep, StepRunner
from engine.plan.step_records import SamplingInputs, StepInputs, StepResult


class FaultyAheadRunner:
    """An AheadRunner around another; what is a hit is the same as of FaultyRunner.

    Memory is the host's to give: where it ends the launch raises. All else shows when the step is waited for.
    A pass that sleeps holds up the steps behind it, as the device takes them in turn, but no launch. One that
    fails has computed other tokens than it was to: none of what it wrote or drew may be read.
    """

    def __init__(
        self, plan: FaultCounter, owners: StepOwners, runner: AheadRunner, loaded: LoadedModel
    ) -> None:
        self._plan = plan
        self._owners = owners
        self._runner = runner
        self._hooks = PassHooks(runner, loaded)
        self._free_at = 0.0  # when the device will be done with what sleeps

    def run(self, inputs: StepInputs) -> StepResult:
        """See StepRunner."""
        return self.launch(inputs).wait()

    def launch(self, inputs: StepInputs) -> FaultyStep:
        """See AheadRunner."""
        plan, step = self._plan, self._owners.of(inputs)

        def curse(sampling: SamplingInputs) -> SamplingInputs:
            return cursed(plan, step, sampling)

        given = inputs if inputs.is_drawn_later else replace(inputs, sampling=curse(inputs.sampling))
        sleep = plan.hit_by_all("forward_sleep", step.numbers)
        is_out_of_memory = plan.hit_by_all("forward_oom", step.numbers) is not None
        fails = plan.hit_by_all("forward_raise", step.numbers) is not None
        if fails:
            given = replace(given, token_ids=np.zeros_like(inputs.token_ids), previous_rows=None)

        def before() -> None:
            if is_out_of_memory and not fails:
                raise torch.OutOfMemoryError(NO_MEMORY)

        with self._hooks.around(inputs, before, lambda: [] if fails else rows_hit(plan, "logits_nan", step)):
            launched = self._runner.launch(given)
        slept_s = 0.0 if sleep is None else sleep.seconds
        if slept_s:
            self._free_at = max(self._free_at, time.monotonic()) + slept_s
        return FaultyStep(launched, curse, self._free_at, slept_s, fails)


@dataclass(frozen=True, slots=True)
class FaultyStep:
    """A LaunchedStep around another: how it is drawn, when it may end, and whether well."""

    launched: LaunchedStep
    curse: Callable[[SamplingInputs], SamplingInputs]
    ends_at: float  # at the earliest, by time.monotonic
    slept_s: float
    fails: bool

    def draw(self, sampling: SamplingInputs) -> None:
        """See LaunchedStep."""
        self.launched.draw(self.curse(sampling))

    def wait(self) -> StepResult:
        """See LaunchedStep."""
        result = self.launched.wait()
        time.sleep(max(0.0, self.ends_at - time.monotonic()))
        if self.fails:
            raise RuntimeError(FAILURE)
        return replace(result, forward_s=result.forward_s + self.slept_s)


def make_faulty(
    plan: FaultCounter, owners: StepOwners, runner: StepRunner, loaded: LoadedModel
) -> FaultyRunner | FaultyAheadRunner:
    """The faulty runner around this one, which is launched ahead if this one is."""
    if isinstance(runner, AheadRunner):
        return FaultyAheadRunner(plan, owners, runner, loaded)
    return FaultyRunner(plan, owners, runner, loaded)
