"""PassHooks: acts around the passes of single steps, where faults of them happen in earnest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from engine.compute.cuda.graphs.recorded_step import RecordedStep
from engine.compute.loading.loader import LoadedModel
from engine.loop.engine_parts import StepRunner
from engine.plan.step_records import StepInputs


@dataclass(frozen=True, slots=True)
class _Acts:
    inputs: StepInputs
    before: Callable[[], None]
    bad_rows: Callable[[], Sequence[int]]


class PassHooks:
    """Hooks on all that a runner's passes come by. For the target thread. Other passes are left alone."""

    def __init__(self, runner: StepRunner, loaded: LoadedModel) -> None:
        self._acts: _Acts | None = None  # of the step whose pass is still to come
        # Passes that are replayed do not come by the model: their runner says what they come by.
        for module in (loaded.model, *getattr(runner, "pass_modules", ())):
            module.register_forward_pre_hook(self._before_pass)
            module.register_forward_hook(self._after_pass)

    @contextmanager
    def around(
        self, inputs: StepInputs, before: Callable[[], None], bad_rows: Callable[[], Sequence[int]]
    ) -> Iterator[None]:
        """Call `before` right before the pass of this step, and have it give NaN in `bad_rows` of [0, R)."""
        self._acts = _Acts(inputs, before, bad_rows)
        try:
            yield
        finally:
            self._acts = None

    def _before_pass(self, module: torch.nn.Module, args: object) -> None:
        if self._acts is not None:
            self._acts.before()

    def _after_pass(self, module: torch.nn.Module, args: tuple[object, ...], output: Any) -> None:
        acts, self._acts = self._acts, None
        if acts is None:
            return
        logits = output.logits[0]  # [R, vocab], or of more places than that
        for row in acts.bad_rows():
            logits[_place(row, acts.inputs, len(logits), args)].fill_(torch.nan)  # without waiting


def _place(row: int, inputs: StepInputs, num_places: int, args: tuple[object, ...]) -> int:
    """Where the logits of a row are: a recording knows; a model gives the rows', or those of every token."""
    if args and isinstance(args[0], RecordedStep):
        return int(args[0].places(inputs)[row])
    return row if num_places == len(inputs.logits_rows) else int(inputs.logits_rows[row])
