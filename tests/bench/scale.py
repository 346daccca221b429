"""Scale curves: decoding at many batch sizes and contexts, and what a waiting or running request costs.

Prompts are not computed: a step with one in it is answered at once, and decodes then read K/V that was filled
beforehand. That is as fast or slow as any other K/V, and a cell takes a second instead of minutes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import uvloop

from config import load_settings
from engine.loop.engine_parts import EngineInfo, StepRunner
from engine.plan.request import GenerationRequest, SamplingParams
from engine.plan.step_records import SampledRows, StepInputs, StepResult
from engine.text.tokenizer import Tokenizer
from tests.bench.bare import fill_kv, model_runner
from tests.bench.context import BenchContext
from tests.bench.decode import LoadedEngine, loaded_engine
from tests.bench.host import HostStep, host_step, read, steps_for
from tests.bench.machine import REPOSITORY
from tests.bench.report import Section
from tests.bench.scale_plot import plot_scale
from tests.bench.timed_runner import StepShares

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (128, 512, 2048, 8192)
SETTLE_STEPS, STEPS = 4, 16
MARGIN_STEPS = 4  # for those that begin a step later than the first
# All prompts fit one step, which nothing computes; drafts and shared prefixes would hide what is measured.
FLAGS = (
    *("--max-num-seqs", str(max(BATCHES)), "--speculative-method", "none", "--no-prefix-caching"),
    *("--max-num-batched-tokens", "131072", "--max-prefill-tokens", "131072", "--preemption", "recompute"),
)
KV_MEMORY = ("--kv-cache-memory", "2GiB")  # on a CPU; a GPU's is what it has
QUEUES = (0, 1_000, 10_000)
QUEUED_BATCH, LARGE_BATCH = 32, 256


@dataclass(frozen=True, slots=True)
class Cell:
    """So many sequences decoding, each with so many tokens of context at the end."""

    batch: int
    context: int

    @property
    def name(self) -> str:
        """As tables show it."""
        return f"batch {self.batch}, context {self.context}"

    def fits(self, info: EngineInfo) -> bool:
        """True if the model's positions and the memory for K/V hold it."""
        blocks = self.batch * (-(-self.context // info.kv_block_size) + 1)
        return self.context <= info.max_model_len and blocks <= info.num_kv_blocks


class WithoutPrompts:
    """Answers a step that has any prompt in it without computing it."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner

    def run(self, inputs: StepInputs) -> StepResult:
        """What the runner gives for decodes; a token that any vocabulary has for each row of others."""
        if len(inputs.token_ids) == len(inputs.query_lens):
            return self._runner.run(inputs)
        return StepResult(SampledRows([0] * len(inputs.logits_rows)), 0.0, 0.0)


def around_filled(runner: StepRunner) -> WithoutPrompts:
    """The same around a model's runner, its K/V filled."""
    fill_kv(model_runner(runner).kv)
    return WithoutPrompts(runner)


async def cell_shares(loaded: LoadedEngine, token_ids: Sequence[int], cell: Cell, run: int) -> StepShares:
    """The steps of one cell. Raises BenchmarkFailed when its sequences were not decoding at once."""
    max_tokens = SETTLE_STEPS + STEPS + MARGIN_STEPS
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    rng = random.Random(f"{cell.name}/{run}")
    loaded.timed.steps.clear()
    streams = [
        loaded.engine.submit(
            GenerationRequest(
                f"{cell.name}-{run}-{number}",
                rng.choices(token_ids, k=cell.context - max_tokens),
                sampling,
            )
        )
        for number in range(cell.batch)
    ]
    await asyncio.gather(*map(read, streams))
    return StepShares.of(loaded.timed.take_decodes(cell.batch, SETTLE_STEPS))


async def measure(context: BenchContext) -> tuple[dict[Cell, list[StepShares]], list[Cell]]:
    """All cells that fit, run by run, and those that do not."""
    flags = FLAGS if any("kv-cache-memory" in flag for flag in context.flags) else (*FLAGS, *KV_MEMORY)
    scaled = replace(context, settings=load_settings([*context.flags, *flags]))
    cells = [Cell(batch, length) for length in CONTEXTS for batch in BATCHES]
    async with loaded_engine(scaled, around_filled) as loaded:
        fitting = [cell for cell in cells if cell.fits(loaded.parts.info)]
        found: dict[Cell, list[StepShares]] = {cell: [] for cell in fitting}
        for run in range(context.runs):
            for cell in fitting:
                context.say(f"scale, {cell.name}, run {run + 1}/{context.runs}")
                found[cell].append(await cell_shares(loaded, context.words.token_ids, cell, run))
    return found, [cell for cell in cells if cell not in fitting]


def run_scale(context: BenchContext) -> list[Section]:
    """The sections `scale`, with a plot beside the report, and `scale: host`."""
    section = Section("scale", "steady decoding, whole engine, nothing drafted")
    found, left_out = uvloop.run(measure(context))
    for cell, runs in found.items():
        section.add(cell.name, "output", "tokens/s", [cell.batch / run.step_s for run in runs])
        section.add(cell.name, "step", "ms", [1e3 * run.step_s for run in runs])
        section.add(cell.name, "host", "% of a step", [100 * run.around_device for run in runs])
        section.add(cell.name, "host and sampling", "% of a step", [100 * run.around_model for run in runs])
    if left_out:
        section.notes.append("Does not fit the memory for K/V: " + "; ".join(cell.name for cell in left_out))
    medians = {cell: median(run.step_s for run in runs) for cell, runs in found.items()}
    shares = {cell: median(run.around_model for run in runs) for cell, runs in found.items()}
    points = [(c.batch, c.context, medians[c], shares[c]) for c in found]
    section.notes.append(f"Plot: {plot_scale(points, REPOSITORY / '.bench').relative_to(REPOSITORY)}")
    section.notes.append("Prompts are not computed; decodes read K/V of constants.")
    return [section, host_section(context)]


def host_section(context: BenchContext) -> Section:
    """What a request costs the host a step while it waits, and while it runs, beside a model that is free."""
    section = Section("scale: host", f"host time a step, {QUEUED_BATCH} decoding and others waiting")
    tokenizer, token_ids = Tokenizer(context.model_directory), context.words.token_ids
    cases = [(QUEUED_BATCH, waiting) for waiting in QUEUES] + [(LARGE_BATCH, 0)]
    runs: dict[tuple[int, int], list[HostStep]] = {case: [] for case in cases}
    for run in range(context.runs):
        for batch, waiting in cases:
            context.say(f"scale, {batch} running, {waiting} waiting, run {run + 1}/{context.runs}")
            step = uvloop.run(host_step(tokenizer, token_ids, batch, steps_for(batch), waiting))
            runs[batch, waiting].append(step)
    for batch, waiting in cases:
        case = f"{batch} running, {waiting:,} waiting"
        section.add(case, "step", "µs", [step.wall_us for step in runs[batch, waiting]])
        section.add(case, "CPU time", "µs", [step.cpu_us for step in runs[batch, waiting]])
    one_waiting = cost_of_one(runs[QUEUED_BATCH, 0], runs[QUEUED_BATCH, QUEUES[-1]], QUEUES[-1])
    one_running = cost_of_one(runs[QUEUED_BATCH, 0], runs[LARGE_BATCH, 0], LARGE_BATCH - QUEUED_BATCH)
    section.add("one more waiting request", "CPU time", "µs", one_waiting)
    section.add("one more running request", "CPU time", "µs", one_running)
    return section


def cost_of_one(few: Sequence[HostStep], many: Sequence[HostStep], more: int) -> list[float]:
    """Microseconds of CPU time a step that each of `more` requests adds, run by run."""
    return [(after.cpu_us - before.cpu_us) / more for before, after in zip(few, many, strict=True)]
