"""The whole engine around a model made on the device: started, read, its steps watched."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import numpy as np

from config import CPU_SEATS, Settings, load_settings
from engine import freeze_heap
from engine.compute.loading.loader import LoadedModel
from engine.loop.engine import Engine
from engine.loop.engine_parts import EngineLimits, EngineParts, LaunchedStep, StepRunner
from engine.loop.stream import RequestStream
from engine.plan.request import GenerationRequest, SamplingParams
from engine.plan.speculation.speculative_decoder import DraftSource
from engine.plan.step_records import SamplingInputs, StepInputs, StepResult
from engine.startup.build import put_together
from engine.startup.part_factories import PartFactories
from engine.text.tokenizer import Tokenizer
from tests.bench.gpu.made_models import BLOCK_SIZE
from tests.bench.streams import BenchmarkFailed, StreamRecord

SETTLE_STEPS = 12


def settings_for(max_num_seqs: int, num_tokens: int, *flags: str, batched_tokens: int = 8192) -> Settings:
    """Settings with seats for so many sequences of up to `num_tokens` tokens, each of its own."""
    blocks = max_num_seqs * (-(-num_tokens // BLOCK_SIZE) + 1)
    sizes = {
        "max-num-seqs": max_num_seqs,
        "num-kv-blocks": blocks,
        "kv-block-size": BLOCK_SIZE,
        "max-num-batched-tokens": max(batched_tokens, max_num_seqs),
        "max-prefill-tokens": max(batched_tokens, max_num_seqs),
    }
    given = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    plain = ("--compile", "off", "--no-prefix-caching", "--preemption", "recompute")
    method = () if "--speculative-method" in flags else ("--speculative-method", "none")
    return load_settings([*given, *plain, *method, *flags], {})


@dataclass(slots=True)
class StepWatch:
    """The device's own seconds of each step, with the time when its result was read, newest last."""

    steps: list[tuple[float, float]] = field(default_factory=list)

    def note(self, result: StepResult) -> StepResult:
        """Keep what one step took."""
        self.steps.append((perf_counter(), result.forward_s + result.sample_s))
        return result

    def mean_s(self, begin: float, end: float) -> float:
        """Of the steps whose results were read in between. Raises BenchmarkFailed if there were none."""
        seconds = [device_s for when, device_s in self.steps if begin <= when <= end]
        if not seconds:
            raise BenchmarkFailed("no step was read in the time that was looked at")
        return statistics.mean(seconds)


class WatchedRunner:
    """Any runner, watched; prompts may be taken as read: only their last tokens are computed.

    Keys and values of the others are then what lies in their blocks.
    """

    def __init__(self, runner: StepRunner, watch: StepWatch, *, skip_prompts: bool) -> None:
        self._runner: Any = runner
        self._watch = watch
        self._skip_prompts = skip_prompts

    def run(self, inputs: StepInputs) -> StepResult:
        """See StepRunner."""
        return self._watch.note(self._runner.run(self._wanted(inputs)))

    def _wanted(self, inputs: StepInputs) -> StepInputs:
        return last_tokens(inputs) if self._skip_prompts else inputs


class WatchedAheadRunner(WatchedRunner):
    """The same of a runner whose steps may be launched ahead."""

    def launch(self, inputs: StepInputs) -> LaunchedStep:
        """See AheadRunner."""
        return WatchedStep(self._runner.launch(self._wanted(inputs)), self._watch)


@dataclass(frozen=True, slots=True)
class WatchedStep:
    """A launched step whose result is noted when it is read."""

    step: LaunchedStep
    watch: StepWatch

    def draw(self, sampling: SamplingInputs) -> None:
        """See LaunchedStep."""
        self.step.draw(sampling)

    def wait(self) -> StepResult:
        """See LaunchedStep."""
        return self.watch.note(self.step.wait())


def last_tokens(inputs: StepInputs) -> StepInputs:
    """The step with one token of each sequence, its last, as if all before it were computed already."""
    assert inputs.drafts is None, "a draft's keys and values must be computed"
    last = np.cumsum(inputs.query_lens, dtype=np.int64) - 1  # [S] indices into [0, N)
    return replace(
        inputs,
        token_ids=inputs.token_ids[last],
        positions=inputs.positions[last],
        slot_mapping=inputs.slot_mapping[last],
        query_lens=np.ones_like(inputs.query_lens),
        logits_rows=np.flatnonzero(np.isin(last, inputs.logits_rows)),
        previous_rows=None if inputs.previous_rows is None else inputs.previous_rows[last],
    )


@dataclass(frozen=True, slots=True)
class MadeEngine:
    """An engine that runs, its parts, and what its steps take."""

    engine: Engine
    parts: EngineParts
    watch: StepWatch


@asynccontextmanager
async def made_engine(
    settings: Settings,
    loaded: LoadedModel,
    tokenizer: Tokenizer,
    sources: tuple[DraftSource, ...] = (),
    *,
    skip_prompts: bool = False,
) -> AsyncIterator[MadeEngine]:
    """The engine that would serve this model, without the server.

    `skip_prompts` computes the last token of a prompt only; its other keys and values are random numbers.
    """
    watch = StepWatch()
    made: list[EngineParts] = []

    def watched(runner: StepRunner, _: LoadedModel) -> StepRunner:
        kind = WatchedAheadRunner if hasattr(runner, "launch") else WatchedRunner
        if skip_prompts:
            for tensor in runner.kv.tensors:  # type: ignore[attr-defined]  # every runner of ours has it
                tensor.normal_()
        return kind(runner, watch, skip_prompts=skip_prompts)

    def load() -> EngineParts:
        made.append(put_together(settings, loaded, tokenizer, sources, PartFactories(runner=watched)))
        return made[0]

    limits = EngineLimits(
        max_queued_requests=settings.scheduler.max_num_seqs or CPU_SEATS, max_queued_tokens=10**9
    )
    engine = Engine(load, limits)
    await engine.start()
    freeze_heap()  # as the server does
    try:
        yield MadeEngine(engine, made[0], watch)
    finally:
        await engine.stop()


def random_prompts(vocab_size: int, batch: int, num_tokens: int, seed: int) -> list[list[int]]:
    """Prompts of random words, no two alike."""
    rng = random.Random(seed)
    return [rng.choices(range(2, vocab_size), k=num_tokens) for _ in range(batch)]


Change = Callable[[GenerationRequest], GenerationRequest]


def as_it_is(request: GenerationRequest) -> GenerationRequest:
    """A Change that is none."""
    return request


def submit_all(
    engine: Engine, prompts: Sequence[list[int]], max_tokens: int, first: Change = as_it_is
) -> list[RequestStream]:
    """Ask for exactly `max_tokens` after each prompt, greedily, all at once; `first` changes the first."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    requests = [
        GenerationRequest(f"{id(prompts)}-{number}", prompt, sampling)
        for number, prompt in enumerate(prompts)
    ]
    return [engine.submit(request) for request in (first(requests[0]), *requests[1:])]


async def read(stream: RequestStream) -> tuple[list[float], list[int]]:
    """When each token came, and which it was."""
    times: list[float] = []
    token_ids: list[int] = []
    async for delta in stream:
        times += [perf_counter()] * len(delta.token_ids)
        token_ids += delta.token_ids
        if delta.finish is not None and delta.finish.error is not None:
            raise BenchmarkFailed(f"a request failed: {delta.finish.error}")
    return times, token_ids


async def burst(
    engine: Engine, prompts: Sequence[list[int]], max_tokens: int, first: Change = as_it_is
) -> list[StreamRecord]:
    """Send all prompts at once and read them to their ends."""
    sent = perf_counter()
    streams = submit_all(engine, prompts, max_tokens, first)
    found = await asyncio.gather(*(read(stream) for stream in streams))
    return [
        StreamRecord(sent, tuple(times), len(prompt), len(times))
        for prompt, (times, _) in zip(prompts, found, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A step in which all sequences decode: seconds by the clock, and those the device was at work."""

    seconds: float
    device_s: float

    @property
    def host_percent(self) -> float:
        """How much of the time the device had no step to work on."""
        return max(0.0, 100 * (1 - self.device_s / self.seconds))


async def decode_step(
    made: MadeEngine, batch: int, context: int, steps: int, first: Change = as_it_is
) -> DecodeStep:
    """The mean of `steps` steps of so many sequences, whose contexts are `context` in their middle."""
    prompt_tokens = max(2, context - SETTLE_STEPS - steps // 2)
    vocab_size = made.parts.info.vocab_size
    prompts = random_prompts(vocab_size, batch, prompt_tokens, seed=batch + context)
    # They need not start together: those that came first go on until the last have settled.
    num_starts = batch * prompt_tokens // made.parts.batcher.config.max_num_batched_tokens
    max_tokens = 2 * SETTLE_STEPS + steps + num_starts
    records = await burst(made.engine, prompts, max_tokens, first)
    begin = max(record.event_times[SETTLE_STEPS - 1] for record in records)
    first_to_end = min(records, key=lambda record: record.event_times[-1])
    inside = [time for time in first_to_end.event_times if time >= begin][: steps + 1]
    if len(inside) < 2:
        raise BenchmarkFailed(f"{batch} sequences of {context} tokens were never decoding all at once")
    return DecodeStep((inside[-1] - inside[0]) / (len(inside) - 1), made.watch.mean_s(inside[0], inside[-1]))
