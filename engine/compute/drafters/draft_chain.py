"""Several drafts of each sequence in one go: every step but the first computes what the last one drew.

The tokens stay on the device meanwhile, so that it has the next step before it is done with the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.compute.attention.kv_tensors import KvTensors
from engine.compute.sampling.sampler import select_rows
from engine.plan.step_records import Int64, StepInputs, StepResult

Rows = NDArray[np.intp]


class ChainStep(Protocol):
    """A step that the device may still be at work on."""

    def wait(self) -> StepResult:
        """Its result, once it is there. Raises what went wrong."""
        ...


class ChainRunner(Protocol):
    """Runs a draft model's steps over its K/V: `previous_rows` of a step are rows of the one launched before.

    Two steps may be under way at a time.
    """

    @property
    def kv(self) -> KvTensors:
        """The K/V that steps are computed over."""
        ...

    def launch(self, inputs: StepInputs) -> ChainStep:
        """Start a step and come back at once."""
        ...


def draw_chains(
    runner: ChainRunner, first: StepInputs, num_drafts: Sequence[int], block_size: int
) -> list[list[int] | None]:
    """Draw `num_drafts[r]` tokens, at least one, after row r of the step, each token by a step of its own.

    `first` has for each sequence the blocks of all its tokens to come; a row with several drafts must need
    nothing of them to be drawn but the newest. A row of which one draw failed gets None. Raises what the
    runner raises, once nothing is under way.
    """
    wanted = np.asarray(num_drafts)
    rows = np.arange(len(wanted))  # of the first step, for each row of the step at hand
    token_ids: list[list[int] | None] = [[] for _ in wanted]
    inputs, owners = first, owners_of(first)
    step = runner.launch(first)
    for count in range(1, int(wanted.max()) + 1):
        kept = np.flatnonzero(wanted[rows] > count)
        following = None
        if len(kept):
            inputs = next_step(inputs, owners, kept, block_size)
            following = _launch_behind(runner, step, inputs)
        try:
            _take(token_ids, rows, step.wait())
        except BaseException:
            if following is not None:
                _wait_for(following)
            raise
        if following is None:
            break
        step, rows, owners = following, rows[kept], np.arange(len(kept))
    return token_ids


def owners_of(inputs: StepInputs) -> Rows:
    """The sequence that each row of logits is of. [R]"""
    stops = np.cumsum(inputs.query_lens)
    return np.searchsorted(stops, inputs.logits_rows, side="right")


def next_step(inputs: StepInputs, owners: Rows, kept: Rows, block_size: int) -> StepInputs:
    """The step that computes what the rows `kept` of `inputs`, which are of `owners`, draw."""
    sampling = select_rows(inputs.sampling, kept)
    positions: Int64 = sampling.position
    tables = inputs.block_tables[owners[kept]]
    blocks = tables[np.arange(len(kept)), positions // block_size].astype(np.int64)
    return StepInputs(
        token_ids=np.zeros(len(kept), np.int64),
        positions=positions,
        slot_mapping=blocks * block_size + positions % block_size,
        query_lens=np.ones(len(kept), np.int32),
        kv_lens=(positions + 1).astype(np.int32),
        block_tables=tables,
        logits_rows=np.arange(len(kept)),
        sampling=replace(sampling, position=positions + 1),
        previous_rows=kept.astype(np.int64),
    )


def _launch_behind(runner: ChainRunner, step: ChainStep, inputs: StepInputs) -> ChainStep:
    """Launch the step behind `step`, which is waited for if that fails."""
    try:
        return runner.launch(inputs)
    except BaseException:
        _wait_for(step)
        raise


def _wait_for(step: ChainStep) -> None:
    """Let the device be done with a step, however it ends: another error is on its way already."""
    try:
        step.wait()
    except Exception:
        return


def _take(token_ids: list[list[int] | None], rows: Rows, result: StepResult) -> None:
    """Put what a step drew behind what its rows have."""
    errors = result.rows.row_errors or {}
    for place, (row, token_id) in enumerate(zip(rows.tolist(), result.rows.token_ids, strict=True)):
        drawn = token_ids[row]
        if place in errors:
            token_ids[row] = None
        elif drawn is not None:
            drawn.append(token_id)
