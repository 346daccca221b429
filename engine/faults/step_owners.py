"""StepOwners: whom a step is for, from the batcher that decides it to the runner that is given it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from engine.plan.step_records import StepInputs

_MAX_STEPS = 2  # the one in flight, and one decided ahead of its result


@dataclass(frozen=True, slots=True)
class OwnedStep:
    """A step and whom it is for: the number of each of its sequences, in their order."""

    inputs: StepInputs
    numbers: tuple[int | None, ...]

    def drawn(self) -> Iterator[tuple[int, int | None]]:
        """Of each sequence that is drawn from its first row, and its number."""
        ends = np.cumsum(self.inputs.query_lens)
        owners = np.searchsorted(ends, self.inputs.logits_rows, side="right")  # [R] indices into [0, S)
        sequences, first_rows = np.unique(owners, return_index=True)
        for sequence, row in zip(sequences.tolist(), first_rows.tolist(), strict=True):
            yield row, self.numbers[sequence]


class StepOwners:
    """The steps that may still have to be launched. The loop's thread writes it, the target thread reads it.

    A step is known by its inputs, the very object: one that could not be launched behind another that failed
    never comes to the runner, so that counting them would go wrong.
    """

    def __init__(self) -> None:
        self._steps: tuple[OwnedStep, ...] = ()  # always replaced as a whole, oldest first

    def note(self, inputs: StepInputs, numbers: tuple[int | None, ...]) -> None:
        """A step was decided; the one before the last is over."""
        self._steps = (*self._steps, OwnedStep(inputs, numbers))[-_MAX_STEPS:]

    def of(self, inputs: StepInputs) -> OwnedStep:
        """The step of these inputs."""
        return next(step for step in self._steps if step.inputs is inputs)
