"""A runner that notes when each of its steps began and how long the model was at it."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

from engine.loop.engine_parts import StepRunner
from engine.plan.step_records import StepInputs, StepResult
from tests.bench.streams import BenchmarkFailed


class TimedStep(NamedTuple):
    """One step. Seconds; `started` is of `perf_counter`."""

    started: float
    num_seqs: int
    num_tokens: int
    forward_s: float
    sample_s: float


class TimedRunner:
    """Passes every step on to a runner; on the target thread, like that."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self.steps: list[TimedStep] = []

    def run(self, inputs: StepInputs) -> StepResult:
        """What the runner gives."""
        started = perf_counter()
        result = self._runner.run(inputs)
        size = len(inputs.query_lens), len(inputs.token_ids)
        self.steps.append(TimedStep(started, *size, result.forward_s, result.sample_s))
        return result

    def take_decodes(self, num_seqs: int, settle: int) -> list[TimedStep]:
        """The steps since the last call in which `num_seqs` sequences decoded, but for the first `settle`.

        Raises BenchmarkFailed when fewer than two are left.
        """
        steps = [step for step in self.steps if step.num_seqs == step.num_tokens == num_seqs][settle:]
        self.steps.clear()
        if len(steps) < 2:
            raise BenchmarkFailed(f"{num_seqs} sequences were hardly ever decoding at once")
        return steps


class StepShares(NamedTuple):
    """Where the time of consecutive steps went: seconds of a whole step, and two shares of it, 0 to 1."""

    step_s: float
    around_model: float  # all but the model's forward pass: host and sampling
    around_device: float  # all but forward pass and sampling: the host alone

    @classmethod
    def of(cls, steps: Sequence[TimedStep]) -> StepShares:
        """Of two steps or more that followed each other; the last one only ends the one before."""
        wall_s = steps[-1].started - steps[0].started
        forward_s = sum(step.forward_s for step in steps[:-1])
        sample_s = sum(step.sample_s for step in steps[:-1])
        return cls(wall_s / (len(steps) - 1), 1 - forward_s / wall_s, 1 - (forward_s + sample_s) / wall_s)
