"""A real engine over the fake model: batcher, KV accounting, loop, text; only the forward pass is faked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engine.loop.engine import Engine
from engine.loop.engine_parts import EngineInfo, EngineLimits, EngineParts, Executors, StepRunner
from engine.loop.stream import Finish, OutputDelta, RequestStream
from engine.plan.kv.paged_kv_manager import PagedKvManager
from engine.plan.request import GenerationRequest, SamplingParams
from engine.plan.scheduling.batcher import ContinuousBatcher
from engine.plan.scheduling.policy import make_policy
from engine.plan.scheduling.step_planner import BatchConfig
from engine.plan.speculation.controller import make_length_policy
from engine.plan.speculation.drafter import Drafter
from engine.plan.speculation.pass_costs import PassCosts
from engine.plan.speculation.speculation_config import LengthPolicyName, Schedule, SpeculationConfig
from engine.plan.speculation.speculative_decoder import DraftSource, SpeculativeDecoder
from engine.plan.step_records import StepInputs
from engine.text.tokenizer import Tokenizer
from tests.support.fakes import VOCAB_SIZE, FakeRunner
from tests.support.tiny_models import tiny_tokenizer


class InlineExecutor(Executor):
    """Runs each call at once on the calling thread, so that a whole run is deterministic."""

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """The finished future of the call."""
        future: Future[Any] = Future()
        try:
            future.set_result(call(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


@cache
def text_tokenizer() -> Tokenizer:
    """A small real tokenizer whose vocabulary holds every id the fake model speaks."""
    with TemporaryDirectory() as directory:
        tiny_tokenizer().save_pretrained(directory)
        return Tokenizer(Path(directory))


@dataclass(frozen=True)
class EngineShape:
    """The sizes of a test engine."""

    num_blocks: int = 64
    block_size: int = 4
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 64
    max_model_len: int = 128
    policy: str = "fcfs"
    prefix_caching: bool = False
    preemption: str = "recompute"
    max_preemptions: int = 8
    num_host_blocks: int = 0
    schedule: Schedule = "auto"
    length_policy: LengthPolicyName = "fixed"
    max_draft_tokens: int = 4
    min_acceptance_rate: float = 0.0


def make_decoder(
    shape: EngineShape, drafters: Sequence[Drafter], *, can_rewind: bool = True
) -> SpeculativeDecoder:
    """What drafts and judges, for these drafters."""
    config = SpeculationConfig(
        vocab_size=VOCAB_SIZE,
        max_draft_tokens=shape.max_draft_tokens,
        schedule=shape.schedule,
        length_policy=shape.length_policy,
        min_acceptance_rate=shape.min_acceptance_rate,
    )
    costs = PassCosts()
    sources = [DraftSource(drafter, shape.max_draft_tokens) for drafter in drafters]
    return SpeculativeDecoder(
        config, sources, make_length_policy(config, costs), costs, can_rewind=can_rewind
    )


def make_parts(
    shape: EngineShape,
    runner: StepRunner,
    eos_token_ids: frozenset[int] = frozenset(),
    drafters: Sequence[Drafter] = (),
    clock: Callable[[], float] = time.monotonic,
) -> EngineParts:
    """The engine's parts around any runner. `clock` must be the engine's."""
    config = BatchConfig(
        max_num_seqs=shape.max_num_seqs,
        max_num_batched_tokens=shape.max_num_batched_tokens,
        max_prefill_tokens=shape.max_num_batched_tokens,
        max_decode_seqs=shape.max_num_seqs,
        max_model_len=shape.max_model_len,
        max_logits_rows=max(shape.max_num_seqs, shape.max_num_batched_tokens),
        prefix_caching=shape.prefix_caching,
        preemption=shape.preemption,
        max_preemptions=shape.max_preemptions,
        kv_block_bytes=shape.block_size,
    )
    kv = PagedKvManager(
        num_blocks=shape.num_blocks,
        block_size=shape.block_size,
        max_num_seqs=shape.max_num_seqs,
        max_blocks_per_seq=-(-shape.max_model_len // shape.block_size),
        num_host_blocks=shape.num_host_blocks,
    )
    info = EngineInfo(
        max_model_len=shape.max_model_len,
        vocab_size=VOCAB_SIZE,
        dtype="float32",
        device="cpu",
        num_kv_blocks=shape.num_blocks,
        kv_block_size=shape.block_size,
        kv_bytes=0,
        has_chat_template=True,
        draft_methods=tuple(drafter.method for drafter in drafters),
        max_draft_tokens=shape.max_draft_tokens if drafters else 0,
        max_num_seqs=shape.max_num_seqs,
        max_num_batched_tokens=shape.max_num_batched_tokens,
    )
    decoder = make_decoder(shape, drafters) if drafters else None
    batcher = ContinuousBatcher(config, kv, make_policy(shape.policy, 30.0), clock, decoder)
    return EngineParts(
        runner, batcher, text_tokenizer(), eos_token_ids, info, text_tokenizer().reply_format()
    )


@dataclass
class Harness:
    """A started engine with its parts in reach."""

    engine: Engine
    parts: EngineParts
    runner: FakeRunner
    num_submitted: int = 0

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int = 8,
        group: str | None = None,
        tenant: str | None = None,
        **sampling: Any,
    ) -> RequestStream:
        """Queue one greedy request."""
        self.num_submitted += 1
        return self.engine.submit(
            GenerationRequest(
                request_id=f"request-{self.num_submitted}",
                prompt_token_ids=list(prompt),
                sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling),
                group=group,
                tenant=tenant,
            )
        )

    def assert_quiet(self) -> None:
        """No request, no block, no row is left behind."""
        gauges = self.engine.gauges()
        assert gauges.kv_blocks_used == 0
        assert gauges.num_requests_swapped == 0
        assert gauges.num_requests_running == 0
        assert gauges.num_requests_waiting == 0
        self.parts.batcher.kv.check_integrity()
        metrics = self.engine.metrics
        assert metrics.requests_started == sum(metrics.requests_finished.values())


@asynccontextmanager
async def running_engine(
    shape: EngineShape | None = None,
    *,
    before: Callable[[StepInputs], None] | None = None,
    row_errors: Callable[[int, int], str | None] | None = None,
    eos_token_ids: frozenset[int] = frozenset(),
    limits: EngineLimits | None = None,
    clock: Callable[[], float] = time.monotonic,
    inline: bool = False,
    drafters: Sequence[Drafter] = (),
    make_runner: Callable[..., FakeRunner] = FakeRunner,
) -> AsyncIterator[Harness]:
    """An engine that is started and, on leaving, stopped and found quiet."""
    shape = shape or EngineShape()
    runner = make_runner(
        shape.num_blocks, shape.block_size, before, row_errors, num_host_blocks=shape.num_host_blocks
    )
    parts = make_parts(shape, runner, eos_token_ids, drafters, clock)
    executors = Executors(InlineExecutor(), InlineExecutor(), InlineExecutor()) if inline else None
    engine = Engine(lambda: parts, limits, clock, executors)
    await engine.start()
    harness = Harness(engine, parts, runner)
    try:
        yield harness
    finally:
        await engine.stop()
    harness.assert_quiet()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert not others, others


@dataclass(frozen=True)
class Collected:
    """Everything one stream gave."""

    text: str
    token_ids: list[int]
    finish: Finish
    num_deltas: int


async def collect(stream: RequestStream) -> Collected:
    """Read a stream to its end."""
    deltas: list[OutputDelta] = [delta async for delta in stream]
    assert [delta.finish is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    finish = deltas[-1].finish
    assert finish is not None
    token_ids = [token for delta in deltas for token in delta.token_ids]
    return Collected("".join(delta.text for delta in deltas), token_ids, finish, len(deltas))
