"""PartFactories: what makes each part of an engine that tests replace."""

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
class PartFactories:
    """What makes each part that a fault plan may replace; by default the plain classes.

    `runner` gets the runner that was made and its model; `drafter` gets a loaded drafter and the size of the
    target's vocabulary. The others take the arguments of the plain class.
    """

    tokenizer: Callable[..., Tokenizer] = Tokenizer
    detokenizer: Callable[..., Detokenizer] = Detokenizer
    sampler: Callable[..., Sampler] = Sampler
    runner: RunnerOf = _as_it_is
    drafter: Callable[[Drafter, int], Drafter] = _as_loaded
    batcher: Callable[..., ContinuousBatcher] = ContinuousBatcher


PLAIN_FACTORIES: Final = PartFactories()
