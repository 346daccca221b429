"""Decode rate of the whole engine against a bare tight loop over the same model, in turns, in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from time import perf_counter

import uvloop

from engine import freeze_heap
from engine.loop.engine import Engine
from engine.loop.engine_parts import EngineParts, Executors, StepRunner
from engine.loop.stream import RequestStream
from engine.plan.request import GenerationRequest, SamplingParams, SpeculationOptions
from engine.startup.build import load_parts
from tests.bench.bare import BareModel
from tests.bench.context import BenchContext
from tests.bench.report import Bar, Section
from tests.bench.streams import steady_step_s
from tests.bench.timed_runner import StepShares, TimedRunner
from tests.bench.workloads import Prompt, prompts_of

BATCHES = (1, 8, 32)
CONTEXT_TOKENS = 256  # of the bare loop, and of the engine on average over its steady steps
STEPS = 64
SETTLE_STEPS = 8
WARM_UP_STEPS = 3
BAR = 0.90
SHARE_BAR_PERCENT = 8.0


@dataclass(frozen=True)
class LoadedEngine:
    """A started engine, what it was made of, the thread its model runs on, and when its steps were."""

    engine: Engine
    parts: EngineParts
    executors: Executors
    timed: TimedRunner


@asynccontextmanager
async def loaded_engine(
    context: BenchContext, around: Callable[[StepRunner], StepRunner] = lambda runner: runner
) -> AsyncIterator[LoadedEngine]:
    """The engine that `slipstream serve` would run with these settings, without the server.

    `around` puts something between the engine and its runner.
    """
    executors = Executors.threads()
    loaded: list[tuple[EngineParts, TimedRunner]] = []

    def load() -> EngineParts:
        parts = load_parts(context.settings)
        loaded.append((parts, TimedRunner(around(parts.runner))))
        return replace(parts, runner=loaded[0][1])

    engine = Engine(load, executors=executors)
    context.say("loading the model")
    await engine.start()
    freeze_heap()  # as the server does
    try:
        parts, timed = loaded[0]
        yield LoadedEngine(engine, parts, executors, timed)
    finally:
        await engine.stop()


async def engine_step_s(engine: Engine, prompts: Sequence[Prompt], run: int) -> float:
    """Mean seconds of a decode step while all prompts are decoding, nothing drafted."""
    sampling = SamplingParams(max_tokens=SETTLE_STEPS + STEPS, temperature=0.0, ignore_eos=True)
    plain = SpeculationOptions(enabled=False)
    streams = [
        engine.submit(
            GenerationRequest(f"bench-{run}-{number}", prompt.token_ids, sampling, speculation=plain)
        )
        for number, prompt in enumerate(prompts)
    ]
    times = await asyncio.gather(*(token_times(stream) for stream in streams))
    return steady_step_s(times, SETTLE_STEPS)


async def token_times(stream: RequestStream) -> list[float]:
    """When each token of a stream came, its text decoded as for a client."""
    times: list[float] = []
    async for delta in stream:
        times += [perf_counter()] * len(delta.token_ids)
    return times


class DecodeCase:
    """One batch size: the bare step, prepared, and what the runs gave, in tokens a second."""

    def __init__(self, loaded: LoadedEngine, context: BenchContext, batch: int) -> None:
        self._loaded = loaded
        self._context = context
        self._batch = batch
        self._bare: BareModel | None = None
        self.bare: list[float] = []
        self.runner: list[float] = []
        self.engine: list[float] = []
        self.shares: list[StepShares] = []

    async def run(self, number: int) -> None:
        """One run of each of the three, the model's thread doing nothing else."""
        loop, target = asyncio.get_running_loop(), self._loaded.executors.target
        if self._bare is None:
            self._bare = await loop.run_in_executor(target, self._prepare)
        for step_s, rates in ((self._bare.step_s, self.bare), (self._bare.runner_step_s, self.runner)):
            await loop.run_in_executor(target, step_s, WARM_UP_STEPS)
            rates.append(self._batch / await loop.run_in_executor(target, step_s, STEPS))
        prompt_tokens = CONTEXT_TOKENS - SETTLE_STEPS - STEPS // 2
        prompts = prompts_of(
            self._context.words, self._batch, prompt_tokens, seed=1000 * number + self._batch
        )
        self.engine.append(self._batch / await engine_step_s(self._loaded.engine, prompts, number))
        self.shares.append(StepShares.of(self._loaded.timed.take_decodes(self._batch, SETTLE_STEPS)))

    def _prepare(self) -> BareModel:
        token_ids = self._context.words.token_ids
        runner = self._loaded.parts.runner
        return BareModel(runner, token_ids, self._batch, CONTEXT_TOKENS - 1, CONTEXT_TOKENS)


async def measure(context: BenchContext) -> dict[int, DecodeCase]:
    """All cases, run by run, so that a drift of the machine meets each alike."""
    async with loaded_engine(context) as loaded:
        cases = {batch: DecodeCase(loaded, context, batch) for batch in BATCHES}
        for run in range(context.runs):
            for batch, case in cases.items():
                context.say(f"decode, batch {batch}, run {run + 1}/{context.runs}")
                await case.run(run)
    return cases


def run_decode(context: BenchContext) -> list[Section]:
    """The section `decode` with its bars."""
    section = Section("decode", f"engine against a bare loop, context {CONTEXT_TOKENS}, greedy")
    for batch, case in uvloop.run(measure(context)).items():
        name = f"batch {batch}"
        section.add(name, "bare loop", "tokens/s", case.bare)
        section.add(name, "runner", "tokens/s", case.runner)
        section.add(name, "engine", "tokens/s", case.engine)
        pairs = zip(case.engine, case.bare, strict=True)
        ratio = section.add(name, "engine / bare", "x", [engine / bare for engine, bare in pairs])
        section.bars.append(Bar(f"engine / bare loop, {name}", BAR, "x", ratio.median, at_least=True))
        share = [100 * shares.around_model for shares in case.shares]
        around = section.add(name, "host and sampling", "% of a step", share)
        section.add(name, "host", "% of a step", [100 * shares.around_device for shares in case.shares])
        if batch == max(BATCHES):
            bar = f"host and sampling of a step, {name}"
            section.bars.append(Bar(bar, SHARE_BAR_PERCENT, "%", around.median, at_least=False))
    section.notes.append(
        "bare loop: fixed inputs, prepared once; runner: the same through arrays and sampler. Shares: of the"
        " engine's own steps, from one to the next, less the forward pass and, for the host's, less sampling."
    )
    return [section]
