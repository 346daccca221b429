"""Host time a step: the whole engine, every stream read, around a model that answers at once.

What is timed is everything between two calls of the model: its answer's way back to the loop, commit,
streams, readers and their text, the next decision, its arrays and their way to the model's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter, process_time
from typing import NamedTuple

import uvloop

from engine import freeze_heap
from engine.loop.engine import Engine
from engine.loop.engine_parts import EngineLimits
from engine.loop.stream import RequestStream
from engine.plan.request import GenerationRequest, SamplingParams
from engine.plan.step_records import SampledRows, StepInputs, StepResult
from engine.text.tokenizer import Tokenizer
from tests.bench.context import BenchContext
from tests.bench.report import Bar, Section
from tests.bench.streams import BenchmarkFailed
from tests.support.engines import EngineShape, make_parts
from tests.support.fakes import FakeRunner

BATCHES = (1, 8, 64, 256, 1024)
PROMPT_TOKENS = 32
SETTLE_STEPS = 20
BLOCK_SIZE = 16
DRAIN_S = 10.0  # for the loop to see that those that waited are no longer wanted
RING = 64  # steps after which the words come round again
FIXED_US, PER_SEQUENCE_US = 100.0, 5.0
MOST_GROWTH = 1.5  # of the cost of one more sequence, from 64-256 to 256-1024


class HostStep(NamedTuple):
    """Mean microseconds of one step: by the clock, and of CPU time in all threads of the process.

    The clock also counts how long sleeping threads take to wake, most of it on an idle virtual machine.
    """

    wall_us: float
    cpu_us: float


class InstantRunner:
    """A model that takes no time: walks through the words, and notes when it was called for pure decodes."""

    def __init__(self, token_ids: Sequence[int], num_sequences: int) -> None:
        needed = num_sequences + RING
        self._tokens = (list(token_ids) * -(-needed // len(token_ids)))[:needed]
        self._num_sequences = num_sequences
        self.call_times: list[float] = []
        self.cpu_times: list[float] = []

    def run(self, inputs: StepInputs) -> StepResult:
        """A word for each row."""
        if self.notes(inputs):
            self.call_times.append(perf_counter())
            self.cpu_times.append(process_time())
        return StepResult(SampledRows(self.row_tokens(len(inputs.logits_rows))), 0.0, 0.0)

    def notes(self, inputs: StepInputs) -> bool:
        """True for a step in which every sequence decodes."""
        return len(inputs.token_ids) == len(inputs.logits_rows) == self._num_sequences

    def row_tokens(self, num_rows: int) -> list[int]:
        """A word for each row, other ones each step."""
        start = len(self.call_times) % RING
        return self._tokens[start : start + num_rows]


def steps_for(batch: int) -> int:
    """How many steps to time: about a second's worth at the bar."""
    return max(50, min(400, int(1e6 / (FIXED_US + PER_SEQUENCE_US * batch))))


async def host_step(
    tokenizer: Tokenizer, token_ids: Sequence[int], batch: int, num_steps: int, num_waiting: int = 0
) -> HostStep:
    """What a step costs with `batch` sequences decoding, and `num_waiting` more in the queue."""
    output_tokens = SETTLE_STEPS + num_steps + 2 + batch // 8  # they start at most batch/8 steps apart
    length = PROMPT_TOKENS + output_tokens
    shape = EngineShape(
        num_blocks=batch * (-(-length // BLOCK_SIZE) + 1),
        block_size=BLOCK_SIZE,
        max_num_seqs=batch,
        max_num_batched_tokens=max(2048, 2 * batch),
        max_model_len=length,
        policy="priority",  # the default
    )
    runner = InstantRunner(token_ids, batch)
    parts = make_parts(shape, FakeRunner(shape.num_blocks, shape.block_size))
    parts = replace(parts, runner=runner, tokenizer=tokenizer)
    engine = Engine(
        lambda: parts, EngineLimits(max_queued_requests=batch + num_waiting, max_queued_tokens=10**9)
    )
    await engine.start()
    freeze_heap()  # as the server does
    try:
        streams = [engine.submit(greedy_request(number, output_tokens)) for number in range(batch)]
        waiting = [engine.submit(greedy_request(batch + i, output_tokens)) for i in range(num_waiting)]
        await asyncio.gather(*(read(stream) for stream in streams))
        for stream in waiting:
            stream.close()
        await engine.drain(DRAIN_S)
    finally:
        await engine.stop()
    if len(runner.call_times) < SETTLE_STEPS + num_steps + 1:
        raise BenchmarkFailed(f"only {len(runner.call_times)} steps had all {batch} sequences decoding")
    first, last = SETTLE_STEPS, SETTLE_STEPS + num_steps
    wall = runner.call_times[last] - runner.call_times[first]
    cpu = runner.cpu_times[last] - runner.cpu_times[first]
    return HostStep(1e6 * wall / num_steps, 1e6 * cpu / num_steps)


def greedy_request(number: int, max_tokens: int) -> GenerationRequest:
    """A request whose prompt any vocabulary holds."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return GenerationRequest(f"bench-{number}", [20 + number % 50] * PROMPT_TOKENS, sampling)


async def read(stream: RequestStream) -> int:
    """Read a stream to its end as a route would; its length in characters."""
    return sum([len(delta.text) async for delta in stream])


def run_host(context: BenchContext) -> list[Section]:
    """The section `host` with its bars."""
    section = Section("host", "host time a step, a model that answers at once")
    tokenizer, token_ids = Tokenizer(context.model_directory), context.words.token_ids
    medians: dict[int, float] = {}
    runs: dict[int, list[HostStep]] = {batch: [] for batch in BATCHES}
    for number in range(context.runs):
        for batch in BATCHES:
            context.say(f"host, {batch} sequences, run {number + 1}/{context.runs}")
            runs[batch].append(uvloop.run(host_step(tokenizer, token_ids, batch, steps_for(batch))))
    for batch in BATCHES:
        case = f"{batch} sequence{'s' if batch > 1 else ''}"
        step = section.add(case, "step", "µs", [run.wall_us for run in runs[batch]])
        section.add(case, "CPU time", "µs", [run.cpu_us for run in runs[batch]])
        section.add(case, "per sequence", "µs", [run.wall_us / batch for run in runs[batch]])
        assert step.median is not None
        medians[batch] = step.median
        limit = FIXED_US + PER_SEQUENCE_US * batch
        section.bars.append(Bar(f"host step, {case}", limit, "µs", step.median, at_least=False))
    name = "linear: cost of one more sequence, 256-1024 over 64-256"
    section.bars.append(Bar(name, MOST_GROWTH, "x", growth(medians), at_least=False))
    return [section]


def growth(medians: dict[int, float]) -> float:
    """How much dearer a sequence is among 256 to 1024 than among 64 to 256; 1 is linear."""
    later = (medians[1024] - medians[256]) / (1024 - 256)
    earlier = (medians[256] - medians[64]) / (256 - 64)
    return later / earlier
