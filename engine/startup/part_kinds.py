"""PartKinds: which kind of each part an engine is built of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from engine.compute.loading.loader import LoadedModel
from engine.compute.sampling.sampler import Sampler
from engine.loop.engine_parts import StepRunner
from engine.plan.scheduling.batcher import ContinuousBatcher
from engine.plan.speculation.drafter import Drafter
from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import Tokenizer

RunnerOf: TypeAlias = Callable[[StepRunner, LoadedModel], StepRunner]


def _as_it_is(runner: StepRunner, _: LoadedModel) -> StepRunner:
    return runner


def _as_loaded(drafter: Drafter, _: int) -> Drafter:
    return drafter


@dataclass(frozen=True, slots=True)
class PartKinds:
    """What makes the parts that a fault plan may put others in the place of; by default the plain ones.

    `runner` gets the runner that was made and its model, `drafter` one that was loaded and the size of the
    target's vocabulary; the others are made in the same way as the plain ones.
    """

    tokenizer: Callable[..., Tokenizer] = Tokenizer
    detokenizer: Callable[..., Detokenizer] = Detokenizer
    sampler: Callable[..., Sampler] = Sampler
    runner: RunnerOf = _as_it_is
    drafter: Callable[[Drafter, int], Drafter] = _as_loaded
    batcher: Callable[..., ContinuousBatcher] = ContinuousBatcher


PLAIN_PARTS: Final = PartKinds()
