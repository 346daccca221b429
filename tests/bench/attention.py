"""Attention's share of a decode step: the time spent inside the attention context over the whole step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any
from unittest.mock import patch

import uvloop

from engine.compute.attention import AttentionContext
from tests.bench.bare import BareModel
from tests.bench.context import BenchContext
from tests.bench.decode import WARM_UP_STEPS, loaded_engine
from tests.bench.report import Bar, Section

BATCH = 32
CONTEXT_TOKENS = 288
STEPS = 32
BAR_PERCENT = 40.0


class Stopwatch:
    """Adds up the time spent inside the functions it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, timed."""

        def timed(*arguments: Any, **keywords: Any) -> Any:
            started = perf_counter()
            try:
                return function(*arguments, **keywords)
            finally:
                self.seconds += perf_counter() - started

        return timed


@contextmanager
def timed_attention() -> Iterator[Stopwatch]:
    """Time laying a step's attention out, and every layer's writing of K/V and attending."""
    watch = Stopwatch()
    with (
        patch.object(AttentionContext, "__init__", watch.wrap(AttentionContext.__init__)),
        patch.object(AttentionContext, "attend", watch.wrap(AttentionContext.attend)),
    ):
        yield watch


def share_of_step(bare: BareModel) -> tuple[float, float]:
    """Seconds of a step of the runner, sampling included, and of the attention in it."""
    bare.runner_step_s(WARM_UP_STEPS)
    with timed_attention() as watch:
        step_s = bare.runner_step_s(STEPS)
    return step_s, watch.seconds / STEPS


async def measure(context: BenchContext) -> list[tuple[float, float]]:
    """Step and attention seconds of every run; nothing when the device runs ahead of the clock."""
    async with loaded_engine(context) as loaded:
        if loaded.parts.info.device != "cpu":
            return []
        loop, target = asyncio.get_running_loop(), loaded.executors.target

        def prepare() -> BareModel:
            runner = loaded.parts.runner
            return BareModel(runner, context.words.token_ids, BATCH, CONTEXT_TOKENS - 1, CONTEXT_TOKENS)

        bare = await loop.run_in_executor(target, prepare)
        runs = []
        for run in range(context.runs):
            context.say(f"attention, run {run + 1}/{context.runs}")
            runs.append(await loop.run_in_executor(target, share_of_step, bare))
    return runs


def run_attention(context: BenchContext) -> list[Section]:
    """The section `attention` with its bar."""
    section = Section("attention", "its share of a decode step")
    runs = uvloop.run(measure(context))
    case = f"batch {BATCH}, context {CONTEXT_TOKENS}"
    section.add(case, "step", "ms", [1e3 * step for step, _ in runs])
    section.add(case, "attention", "ms", [1e3 * attention for _, attention in runs])
    share = section.add(case, "share", "%", [100 * attention / step for step, attention in runs])
    name = f"attention's share of a decode step, {case}"
    section.bars.append(Bar(name, BAR_PERCENT, "%", share.median, at_least=False))
    section.notes.append(
        "Attention: its layout for the step, writing K/V, attending. Step: forward and sampling."
    )
    if not runs:
        section.notes.append(
            "Measured on a CPU only: an accelerator runs ahead of the clock that is used here."
        )
    return [section]
