"""Launched: a step on its way through the device, and the result that is made of it once it is through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from engine.compute.runner.device import Mark, out_of_memory_named, seconds_between, wait_for
from engine.compute.sampling.sampler import NOT_FINITE
from engine.compute.verification.draft_rows import DraftRows
from engine.compute.verification.verified import Draws, Verified, commit_rows
from engine.plan.step_records import FeatureRows, Int64, SampledRows, StepInputs, StepResult, TokenLogprobs


@dataclass(frozen=True, slots=True)
class StepMarks:
    """When the device came by: before blocks were moved, before the pass, behind it, behind the drawing."""

    start: Mark
    begin: Mark
    middle: Mark
    end: Mark


@dataclass(frozen=True, slots=True)
class Launched:
    """A LaunchedStep. `verdict` may be asked for once the device is past the last of the `marks`."""

    marks: StepMarks
    verdict: Callable[[], Verified]
    swap_bytes: int = 0
    features: tuple[FeatureRows | None, ...] | None = None
    scores: tuple[TokenLogprobs | None, ...] = ()

    def wait(self) -> StepResult:
        """See LaunchedStep; the thread sleeps until then."""
        marks = self.marks
        with out_of_memory_named():
            wait_for(marks.end)
        return StepResult(
            self.verdict().rows,
            seconds_between(marks.begin, marks.middle),
            seconds_between(marks.middle, marks.end),
            seconds_between(marks.start, marks.begin) if self.swap_bytes else 0.0,
            self.swap_bytes,
            self.features,
            self.scores,
        )


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """The tokens of a step on their way to the host, where row r has place `places[r]`."""

    host: torch.Tensor  # int64 [places], there once the device is past the copy
    places: Int64  # [R]

    def verdict(self, inputs: StepInputs, drafts: DraftRows | None) -> Verified:
        """What the step commits; drafts are judged by `match`."""
        token_ids = self.host.numpy()[self.places]
        errors = dict.fromkeys(np.flatnonzero(token_ids < 0).tolist(), NOT_FINITE)
        if drafts is None:
            return Verified(SampledRows(token_ids.tolist(), row_errors=errors or None))
        draws = Draws(token_ids, errors)
        return commit_rows(None, inputs.sampling, drafts, draws, drafts.follow(token_ids))
