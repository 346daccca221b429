"""Attention's share of a decode step: as long as it takes by itself, over the whole step."""

from __future__ import annotations

import asyncio

import uvloop

from tests.bench.bare import BareModel
from tests.bench.context import BenchContext
from tests.bench.decode import WARM_UP_STEPS, loaded_engine
from tests.bench.report import Bar, Section

BATCH = 32
CONTEXT_TOKENS = 288
STEPS = 32
BAR_PERCENT = 40.0


def step_and_attention_s(bare: BareModel) -> tuple[float, float]:
    """Seconds of a step of the runner, sampling included, and of its attention done once more by itself."""
    bare.runner_step_s(WARM_UP_STEPS)
    step_s = bare.runner_step_s(STEPS)
    bare.attention_s(WARM_UP_STEPS)
    return step_s, bare.attention_s(STEPS)


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
            runs.append(await loop.run_in_executor(target, step_and_attention_s, bare))
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
