"""Several drafts of each sequence in one go: every step but the first computes what the last one drew.

The tokens stay on the device meanwhile, which is given all of the steps before it is done with the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import numpy as np

from engine.compute.attention.kv_tensors import KvTensors
from engine.compute.runner.following_steps import FollowingSteps, UnreadRows
from engine.plan.step_records import Int64, StepInputs, StepResult


class ChainStep(Protocol):
    """A step that the device may still be at work on."""

    def wait(self) -> StepResult:
        """Its result, once it is there. Raises what went wrong."""
        ...


class ChainRest(Protocol):
    """The steps behind a first one, which the device may still be at work on.

    What they and the first one draw is `unread` till then; None where no other runner can compute it.
    """

    @property
    def unread(self) -> UnreadRows | None:
        """See above."""
        ...

    def wait(self) -> Int64:
        """What each row draws in each step, [steps, R], below 0 where that failed or the row has ended."""
        ...


class ChainRunner(Protocol):
    """Runs a draft model's steps over its K/V."""

    @property
    def kv(self) -> KvTensors:
        """The K/V that steps are computed over."""
        ...

    def launch(self, inputs: StepInputs) -> ChainStep:
        """Start a step and come back at once."""
        ...

    def follow(self, steps: FollowingSteps) -> ChainRest:
        """Start all of these behind the step that was launched last, and come back at once.

        What it raises, it raises when the device is done with what was started of them.
        """
        ...

    def keep(self) -> UnreadRows | None:
        """What the step that was launched last draws; None where no other runner can compute it."""
        ...


def draw_chains(
    runner: ChainRunner,
    first: StepInputs,
    num_drafts: Sequence[int],
    block_size: int,
    tell: Callable[[UnreadRows], None] | None = None,
) -> list[list[int] | None]:
    """Draw `num_drafts[r]` tokens, at least one, after row r of the step, each token by a step of its own.

    `first` has for each sequence the blocks of all its tokens to come; a row with several drafts must need
    nothing of them to be drawn but the newest. A row of which one draw failed gets None. `tell` is told what
    is on its way once all of it is started. Raises what the runner raises, once nothing is under way.
    """
    step, rest = runner.launch(first), None
    try:
        following = FollowingSteps.behind(first, np.asarray(num_drafts, np.int64) - 1, block_size)
        rest = None if following is None else runner.follow(following)
        if tell is not None and (unread := runner.keep() if rest is None else rest.unread) is not None:
            tell(unread)
        result = step.wait()
    except BaseException:
        _wait_for(step if rest is None else rest)
        raise
    errors = result.rows.row_errors or {}
    chains = [None if row in errors else [token] for row, token in enumerate(result.rows.token_ids)]
    if following is None or rest is None:
        return chains
    drawn = rest.wait()  # [steps, R]
    for place, row in enumerate(following.previous_rows.tolist()):
        token_ids, chain = drawn[: num_drafts[row] - 1, place].tolist(), chains[row]
        chains[row] = None if chain is None or min(token_ids) < 0 else chain + token_ids
    return chains


def _wait_for(steps: ChainStep | ChainRest) -> None:
    """Let the device be done with them, however they end: another error is on its way already."""
    with suppress(Exception):
        steps.wait()
