"""Launched: a step on its way through the device, and the result that is made of it once it is through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.compute.runner.device import Mark, failures_named, seconds_between, wait_for
from engine.compute.runner.following_steps import UnreadRows
from engine.compute.sampling.logprobs import RowScores
from engine.compute.sampling.sampler import NOT_FINITE, NOTHING_LEFT
from engine.compute.verification.draft_rows import DraftRows
from engine.compute.verification.verified import Draws, Verified, commit_rows
from engine.plan.step_records import (
    NO_TOKEN,
    FeatureRows,
    Int64,
    SampledRows,
    SamplingInputs,
    StepResult,
    TokenLogprobs,
)

NOTHING_LEFT_HERE = -2  # as a token on the device; NO_TOKEN says there that the logits are not finite


@dataclass(frozen=True, slots=True)
class PassMarks:
    """When the device came by: before blocks were moved, before the pass, behind it."""

    start: Mark
    begin: Mark
    end: Mark


@dataclass(frozen=True, slots=True)
class QueuedDraw:
    """The draw of a step; once the device is past `end`, the `verdict` may be asked for, then `features`."""

    begin: Mark
    end: Mark
    verdict: Callable[[], Verified]
    features: Callable[[Verified], tuple[FeatureRows | None, ...] | None]
    scores: tuple[TokenLogprobs | None, ...] = ()


class Launched:
    """A LaunchedStep: its pass is queued, and `queue_draw` queues its draw."""

    def __init__(
        self, marks: PassMarks, queue_draw: Callable[[SamplingInputs], QueuedDraw], swap_bytes: int = 0
    ) -> None:
        self._marks = marks
        self._queue_draw: Callable[[SamplingInputs], QueuedDraw] | None = queue_draw
        self._swap_bytes = swap_bytes
        self._drawn: QueuedDraw | None = None

    def draw(self, sampling: SamplingInputs) -> None:
        """See LaunchedStep."""
        queue_draw, self._queue_draw = self._queue_draw, None  # and what it holds of the pass
        assert queue_draw is not None, "a step is drawn once"
        self._drawn = queue_draw(sampling)

    @torch.inference_mode()
    def wait(self) -> StepResult:
        """See LaunchedStep; the thread sleeps until then."""
        marks, drawn = self._marks, self._drawn
        with failures_named():
            wait_for(marks.end if drawn is None else drawn.end)
            forward_s = seconds_between(marks.begin, marks.end)
            if drawn is None:
                return StepResult(SampledRows([]), forward_s, 0.0)
            verified = drawn.verdict()
            features = drawn.features(verified)
        return StepResult(
            verified.rows,
            forward_s,
            seconds_between(drawn.begin, drawn.end),
            seconds_between(marks.start, marks.begin) if self._swap_bytes else 0.0,
            self._swap_bytes,
            features,
            drawn.scores,
        )


@dataclass(frozen=True, slots=True)
class LaunchedChain:
    """Steps behind one another on their way through the device."""

    end: Mark
    tokens: torch.Tensor  # int64 [steps, R], on the host once the device is past `end`
    unread: UnreadRows | None  # those of the step before, too

    def wait(self) -> Int64:
        """What they drew, below 0 where logits were not finite or the row had ended; the thread sleeps."""
        with failures_named():
            wait_for(self.end)
        drawn: Int64 = self.tokens.numpy()
        return drawn


@dataclass(frozen=True, slots=True)
class LaunchedApart:
    """The same of steps that were launched one by one."""

    steps: Sequence[Launched]
    goes_on: NDArray[np.bool_]  # [steps, R] which rows each step has
    unread: UnreadRows | None = None

    def wait(self) -> Int64:
        """See LaunchedChain."""
        try:
            results = [step.wait() for step in self.steps]
        except BaseException:
            with suppress(Exception):
                self.steps[-1].wait()  # of all the last one
            raise
        drawn = np.full(self.goes_on.shape, NO_TOKEN, np.int64)
        for tokens, rows, result in zip(drawn, self.goes_on, results, strict=True):
            tokens[rows] = result.rows.token_ids
        return drawn


class ScoredRows(NamedTuple):
    """The log-probabilities of some rows of a step, and how many of the likeliest each asked for."""

    rows: list[int]
    num_top: list[int]
    scores: RowScores  # on their way to the host


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """The tokens of a step on their way to the host, where row r has place `places[r]`."""

    host: torch.Tensor  # int64 [places], there once the device is past the copy
    places: Int64  # [R]
    bad: dict[int, str]  # by row, what was wrong with its data
    scored: tuple[ScoredRows, ...]

    def verdict(self, sampling: SamplingInputs, drafts: DraftRows | None) -> Verified:
        """What the step commits; drafts are judged by `match`."""
        token_ids = self.host.numpy()[self.places]
        failed = np.flatnonzero(token_ids < 0).tolist()
        not_finite = frozenset(row for row in failed if token_ids[row] != NOTHING_LEFT_HERE)
        errors = self.bad | {row: NOT_FINITE if row in not_finite else NOTHING_LEFT for row in failed}
        token_ids[list(errors)] = NO_TOKEN
        logprobs = self._logprobs(token_ids)
        if drafts is None:
            return Verified(SampledRows(token_ids.tolist(), logprobs, errors or None))
        draws = Draws(token_ids, errors, not_finite, logprobs)
        return commit_rows(None, sampling, drafts, draws, drafts.follow(token_ids))

    def _logprobs(self, token_ids: Int64) -> tuple[TokenLogprobs | None, ...] | None:
        if not self.scored:
            return None
        records: list[TokenLogprobs | None] = [None] * len(token_ids)
        for rows, num_top, scores in self.scored:
            found = scores.records(token_ids[rows].tolist(), num_top)
            for row, record in zip(rows, found, strict=True):
                records[row] = record if token_ids[row] >= 0 else None
        return tuple(records)
