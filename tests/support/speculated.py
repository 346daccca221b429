"""The same requests through whole engines, with speculation and without, and what differs between them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from config import load_settings
from engine import Engine, TokenLogprobs
from engine.loop.engine_parts import EngineLimits, EngineParts, Executors, StepRunner
from engine.loop.stream import Finish, RequestStream
from engine.plan.request import FinishReason
from engine.plan.speculation.spec_stats import SpecStats
from engine.startup.build import load_parts
from tests.support.engines import InlineExecutor
from tests.support.native import WITHOUT_KERNELS
from tests.support.repetitive_world import Ask, Family

MAX_MODEL_LEN = 96
BLOCK_SIZE = 4
LOGPROB_TOLERANCE = 1e-4
COMMON_FLAGS = (
    *("--dtype", "float32", "--kv-cache-memory", "4MiB", "--swap-space", "1MiB"),
    *("--max-model-len", str(MAX_MODEL_LEN), "--kv-block-size", str(BLOCK_SIZE)),
)


@contextmanager
def single_threaded() -> Iterator[None]:
    """Let each engine compute with one thread: models this small only wait for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.startup.build.use_compute_threads", lambda: torch.set_num_threads(1))
        patch.setattr("engine.startup.build.worthwhile_threads", lambda: (1,))
        yield
    torch.set_num_threads(before)


class TurnExecutor(Executor):
    """Runs each call on the event loop after some turns of it, up to `most`, drawn from a seed.

    So what runs beside what hangs on the seed and not on the machine.
    """

    def __init__(self, seed: int, most: int) -> None:
        self._draw = random.Random(seed)
        self._most = most

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """A future that is done some turns later."""
        future: Future[Any] = Future()
        loop = asyncio.get_running_loop()

        def wait(turns: int) -> None:
            if turns:
                loop.call_soon(wait, turns - 1)
            elif future.set_running_or_notify_cancel():
                try:
                    future.set_result(call(*args, **kwargs))
                except Exception as error:
                    future.set_exception(error)

        loop.call_soon(wait, self._draw.randrange(self._most + 1))
        return future


def by_turns(seed: int) -> Executors:
    """A drafter that is mostly ahead of the target, sometimes far behind it; no threads."""
    return Executors(TurnExecutor(seed, 24), TurnExecutor(seed + 1, 8), InlineExecutor())


@asynccontextmanager
async def engine_of(
    directory: Path,
    *flags: str,
    executors: Executors | None = None,
    home: Path | None = None,
    wrap: Callable[[StepRunner], StepRunner] = lambda runner: runner,
) -> AsyncIterator[Engine]:
    """A ready engine; on leaving, nothing is left in it and nothing went wrong. `wrap` is for its runner."""
    environ = WITHOUT_KERNELS | ({} if home is None else {"SLIPSTREAM_HOME": str(home)})
    settings = load_settings([str(directory), *COMMON_FLAGS, *flags], environ)

    def load() -> EngineParts:
        parts = load_parts(settings)
        return replace(parts, runner=wrap(parts.runner))

    engine = Engine(load, EngineLimits(), executors=executors)
    await engine.start()
    try:
        yield engine
        await assert_quiet(engine)
    finally:
        await engine.stop()


async def assert_quiet(engine: Engine) -> None:
    """No request, no block, neither the target's nor a draft model's, and no error of any kind."""
    async with asyncio.timeout(5):
        while engine._loaded.batcher._in_flight:  # noqa: ASYNC110  # a step ahead, for nobody
            await asyncio.sleep(0.001)
    gauges, metrics = engine.gauges(), engine.metrics
    assert gauges.kv_blocks_used == gauges.num_requests_swapped == 0
    assert gauges.num_requests_running == gauges.num_requests_waiting == 0
    assert not +metrics.engine_errors
    assert metrics.requests_started == sum(metrics.requests_finished.values())
    batcher = engine._loaded.batcher
    batcher.kv.check_integrity()
    for drafter in [link.drafter for link in batcher.decoder.links]:
        if drafter.method == "draft_model":
            async with asyncio.timeout(5):
                while drafter.num_used_blocks:  # type: ignore[attr-defined]  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            drafter.check_integrity()  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Spoken:
    """What came of one request."""

    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprobs]
    finish: Finish


@dataclass
class Run:
    """What came of all of them, by name; `stats` are the engine's."""

    spoken: dict[str, Spoken] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    stats: SpecStats = field(default_factory=SpecStats)

    @property
    def token_ids(self) -> dict[str, list[int]]:
        """What was said, by name."""
        return {name: spoken.token_ids for name, spoken in self.spoken.items()}


async def run(engine: Engine, families: Sequence[Family], concurrency: int, *, cuts: bool = True) -> Run:
    """All families, so many at a time; `cuts` False hears everyone out."""
    result = Run(stats=engine.metrics.speculation)
    places = asyncio.Semaphore(concurrency)

    async def serve(family: Family) -> None:
        async with places:
            asks = family if cuts else [replace(ask, cut=None) for ask in family]
            streams = [engine.submit(ask.request) for ask in asks]
            heard = await asyncio.gather(*(listen(engine, *each) for each in zip(asks, streams, strict=True)))
        for ask, spoken in zip(asks, heard, strict=True):
            result.spoken[ask.name] = spoken
            result.kinds[ask.name] = ask.kind

    await asyncio.gather(*(serve(family) for family in families))
    return result


async def listen(engine: Engine, ask: Ask, stream: RequestStream) -> Spoken:
    """Read a stream to its end, which may be of the reader's making."""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    text, finish = "", None
    left = False
    async for delta in stream:
        token_ids += delta.token_ids
        logprobs += delta.logprobs
        text, finish = text + delta.text, delta.finish
        if ask.cut is not None and len(token_ids) >= ask.cut and not left:
            left = True
            if ask.leaves:
                stream.close()
            else:
                engine.cancel(stream.request_id)
    assert finish is not None
    return Spoken(token_ids, text, logprobs, finish)


def is_cut(spoken: Spoken) -> bool:
    """True if it did not end by its own terms."""
    return spoken.finish.reason is FinishReason.ABORT


def differences(expected: Run, found: Run) -> list[str]:
    """What of tokens, text, log-probabilities and ends differs, a line each request.

    Of those that were cut short only what there is of them is compared.
    """
    lines = []
    for name, got in found.spoken.items():
        fault = difference(expected.spoken[name], got)
        if fault is not None:
            lines.append(f"{name}: {fault}")
    return lines


def difference(want: Spoken, got: Spoken) -> str | None:
    """What differs, None if nothing does; see `differences`."""
    count = len(got.token_ids)
    if got.token_ids != want.token_ids[:count]:
        pairs = zip(got.token_ids, want.token_ids, strict=False)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), len(want.token_ids))
        return f"{got.token_ids} differs from {want.token_ids} at {place}"
    if not _same_logprobs(got.logprobs, want.logprobs[: len(got.logprobs)]):
        return "log-probabilities differ"
    if not is_cut(got) and _ending(got) != _ending(want):
        return f"{_ending(got)} instead of {_ending(want)}"
    return None


def _ending(spoken: Spoken) -> tuple[object, ...]:
    finish = spoken.finish
    counts = len(spoken.token_ids), len(spoken.logprobs), finish.num_prompt_tokens, finish.num_output_tokens
    return spoken.text, finish.reason, finish.stop_reason, *counts


def _same_logprobs(found: Sequence[TokenLogprobs], wanted: Sequence[TokenLogprobs]) -> bool:
    def close(a: TokenLogprobs, b: TokenLogprobs) -> bool:
        tokens = [[each.token_id, each.rank, *(token for token, _ in each.top)] for each in (a, b)]
        values = [[each.logprob, *(value for _, value in each.top)] for each in (a, b)]
        gaps = (abs(x - y) for x, y in zip(*values, strict=False))
        return tokens[0] == tokens[1] and max(gaps) <= LOGPROB_TOLERANCE

    return len(found) == len(wanted) and all(map(close, found, wanted))
