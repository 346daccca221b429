"""FollowingSteps: steps behind another, of which each computes what the one before drew."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from engine.compute.sampling.sampler import select_rows
from engine.plan.step_records import Int32, Int64, SamplingInputs, StepInputs


@dataclass(frozen=True, slots=True)
class FollowingSteps:
    """One token of each row a step, known to the device alone. A row that has ended computes nothing of use.

    The rows are drawn by their columns: they have no adjustments, and no log-probabilities are wanted.
    """

    previous_rows: Int64  # [R] of the step before all of these
    positions: Int64  # [steps, R] 0 where the row has ended
    slots: Int64  # [steps, R] -1 where it has
    block_tables: Int32  # [R, blocks]
    sampling: SamplingInputs  # [R] of the first of the steps

    @classmethod
    def behind(cls, first: StepInputs, num_steps: Int64, block_size: int) -> FollowingSteps | None:
        """So many steps for each row of `first`, which has the blocks of all; None if no row goes on."""
        rows = num_steps.nonzero()[0]
        if not len(rows):
            return None
        sampling = select_rows(first.sampling, rows)
        tables = first.block_tables[owners_of(first)[rows]]
        step = np.arange(num_steps.max())[:, None]
        goes_on = step < num_steps[rows]
        positions = np.where(goes_on, sampling.position + step, 0)
        blocks = tables[np.arange(len(rows)), positions // block_size].astype(np.int64)
        return cls(
            previous_rows=rows.astype(np.int64),
            positions=positions,
            slots=np.where(goes_on, blocks * block_size + positions % block_size, -1),
            block_tables=tables,
            sampling=replace(sampling, position=sampling.position + 1),
        )

    def __len__(self) -> int:
        """How many steps there are."""
        return len(self.positions)

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.previous_rows)

    def places(self, first: Int64) -> Int64:
        """Where a row's tokens are among those of the first step, at places `first`, then R of each step.

        Of no meaning past its last token; -1 if it does not go on. [rows of the first step, 1 + steps]
        """
        places = np.full((len(first), 1 + len(self)), -1)
        places[:, 0] = first
        steps = int(first[-1]) + 1 + np.arange(len(self) * self.num_rows).reshape(len(self), -1)
        places[self.previous_rows, 1:] = steps.T
        return places

    def step(self, number: int) -> StepInputs:
        """One of the steps, of the rows that go on; `previous_rows` are those of the step before it."""
        goes_on = self.slots[number] >= 0
        rows = goes_on.nonzero()[0]
        previous = self.previous_rows
        if number:
            previous = ((self.slots[number - 1] >= 0).cumsum() - 1)[rows]
        positions = self.positions[number, rows]
        return StepInputs(
            token_ids=np.zeros(len(rows), np.int64),
            positions=positions,
            slot_mapping=self.slots[number, rows],
            query_lens=np.ones(len(rows), np.int32),
            kv_lens=(positions + 1).astype(np.int32),
            block_tables=self.block_tables[rows],
            logits_rows=np.arange(len(rows)),
            sampling=replace(select_rows(self.sampling, rows), position=positions + 1),
            previous_rows=previous,
        )

    def all_rows(self) -> SamplingInputs:
        """What every row of every step is drawn by, step for step. [steps * R]"""
        every = np.tile(np.arange(self.num_rows), len(self))
        return replace(select_rows(self.sampling, every), position=self.positions.ravel() + 1)


@dataclass(frozen=True, slots=True)
class UnreadRows:
    """Tokens that each row draws in successive steps, on their way through the device."""

    tokens: object  # see DeviceTokens
    places: Int64  # [R, steps] among them, of no meaning past a row's last


def owners_of(inputs: StepInputs) -> NDArray[np.intp]:
    """The sequence that each row of logits is of. [R]"""
    stops = np.cumsum(inputs.query_lens)
    return np.searchsorted(stops, inputs.logits_rows, side="right")
