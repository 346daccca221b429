"""The whole loop with a disk behind its prefix cache, over the fake model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.disk_cache.block_files import BlockFiles
from engine.loop.engine_parts import EngineState
from engine.plan.kv.prefix_cache import owned_salt
from engine.plan.request import FinishReason, GenerationRequest, SamplingParams
from tests.support.disk_engines import disk_engine
from tests.support.engines import Collected, EngineShape, Harness, collect
from tests.support.fakes import expected_output

PROMPT = [5 + i % 90 for i in range(50)]
NUM_OUTPUT = 12
NUM_BLOCKS = 15  # of the prompt and of all output but the last token, whose K/V nobody needs
NUM_READ = 12  # of the prompt


async def answer(engine: Harness, prompt: list[int] = PROMPT, salt: str | None = None) -> Collected:
    """One request to its end, whose text must be right."""
    engine.num_submitted += 1
    sampling = SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.0)
    name = f"request-{engine.num_submitted}"
    found = await collect(engine.engine.submit(GenerationRequest(name, prompt, sampling, cache_salt=salt)))
    assert found.token_ids == expected_output(prompt, NUM_OUTPUT)
    return found


def num_read(engine: Harness) -> int:
    """Blocks."""
    return engine.engine.metrics.prefix_cache_disk_read_blocks


async def test_the_next_engine_reads_what_the_last_one_computed(tmp_path: Path) -> None:
    async with disk_engine(tmp_path / "kv") as engine:
        await answer(engine)
    assert engine.engine.metrics.prefix_cache_disk_written_blocks == NUM_BLOCKS
    async with disk_engine(tmp_path / "kv") as engine:
        found = await answer(engine)
        assert (found.finish.num_cached_tokens, num_read(engine)) == (48, NUM_READ)
        await answer(engine)
        assert num_read(engine) == NUM_READ, "it is in memory now"
        assert engine.runner.max_tokens_seen <= 2


async def test_tenants_and_salts_are_kept_apart(tmp_path: Path) -> None:
    async with disk_engine(tmp_path / "kv") as engine:
        await answer(engine, salt=owned_salt("a", "x"))
    async with disk_engine(tmp_path / "kv") as engine:
        for salt in (None, owned_salt("b", "x"), owned_salt("a", "y"), owned_salt("a", None), "x"):
            await answer(engine, salt=salt)
        assert num_read(engine) == 0
        await answer(engine, salt=owned_salt("a", "x"))
        assert num_read(engine) == NUM_READ


async def test_two_who_begin_alike_read_it_once(tmp_path: Path) -> None:
    async with disk_engine(tmp_path / "kv") as engine:
        await answer(engine)
    async with disk_engine(tmp_path / "kv") as engine:
        await asyncio.gather(answer(engine), answer(engine), answer(engine, [*PROMPT, 7, 8]))
        assert num_read(engine) == NUM_READ


async def test_two_engines_share_a_directory(tmp_path: Path) -> None:
    async with disk_engine(tmp_path / "kv") as one, disk_engine(tmp_path / "kv") as other:
        await answer(one)
        store = one.parts.prefix_store
        assert store is not None
        await store.flush()
        await answer(other)
        assert num_read(other) == NUM_READ


async def test_what_is_reset_is_gone_from_disk_too(tmp_path: Path) -> None:
    async with disk_engine(tmp_path / "kv") as engine:
        for owner in ("a", "b"):
            await answer(engine, salt=owned_salt(owner, None))
        store = engine.parts.prefix_store
        assert store is not None
        await store.flush()
        assert len(list((tmp_path / "kv").glob("v*/*/*"))) == 2 * NUM_BLOCKS
        engine.engine.controls.reset_prefix_cache("a")
        await store.flush()
        assert len(list((tmp_path / "kv").glob("v*/*/*"))) == NUM_BLOCKS
        engine.engine.controls.reset_prefix_cache()
    assert not list((tmp_path / "kv").glob("v*/*/*"))


async def test_the_budget_is_kept(tmp_path: Path) -> None:
    async with disk_engine(tmp_path / "kv", max_bytes=5_000_000) as engine:
        for first in range(5):
            await answer(engine, [first + 1, *PROMPT])
    sizes = [path.stat().st_size for path in (tmp_path / "kv").glob("v*/*/*")]
    assert 3_000_000 < sum(sizes) <= 5_000_000


class FailingFiles(BlockFiles):
    """Neither read nor written."""

    def read(self, block_ids: Sequence[int], names: Sequence[bytes]) -> int:
        raise OSError(5, "Input/output error")

    def write(
        self, block_ids: Sequence[int], names: Sequence[bytes], is_unchanged: Callable[[int], bool]
    ) -> int:
        raise OSError(28, "No space left on device")


async def test_a_disk_that_fails_costs_nothing_but_time(tmp_path: Path) -> None:
    async with disk_engine(tmp_path / "kv") as engine:
        await answer(engine)
    async with disk_engine(tmp_path / "kv", kind=FailingFiles) as engine:
        await answer(engine)
        await answer(engine, [9, *PROMPT])
    assert engine.engine.metrics.engine_errors["disk"] >= 2
    assert num_read(engine) == 0


class HangingFiles(BlockFiles):
    """A disk that answers when it is let."""

    let = threading.Event()
    is_asked = threading.Event()

    def count_stored(self, names: Sequence[bytes]) -> int:
        self.is_asked.set()
        self.let.wait()
        return super().count_stored(names)


async def test_a_request_waits_no_longer_than_computing_takes(tmp_path: Path) -> None:
    async with disk_engine(tmp_path / "kv") as engine:
        await answer(engine)
    async with disk_engine(tmp_path / "kv", kind=HangingFiles) as engine:
        engine.parts.batcher.rates.seed([(0, 1, 0.0005), (64, 0, 0.064)])  # about 50 ms
        await answer(engine)
        assert HangingFiles.is_asked.is_set()
        assert num_read(engine) == 0
        HangingFiles.let.set()


async def test_a_request_that_is_cancelled_while_the_disk_is_asked_ends(tmp_path: Path) -> None:
    HangingFiles.let.clear()
    async with disk_engine(tmp_path / "kv", kind=HangingFiles) as engine:
        stream = engine.submit(PROMPT)
        engine.engine.cancel("request-1")
        assert (await collect(stream)).finish.reason is FinishReason.ABORT
        HangingFiles.let.set()


async def test_a_crowd_over_a_small_pool_and_a_shared_disk(tmp_path: Path) -> None:
    shape = EngineShape(prefix_caching=True, num_blocks=40, max_model_len=120, preemption="swap")
    for _ in range(3):
        async with disk_engine(tmp_path / "kv", shape, max_bytes=30_000_000) as engine:
            prompts = [[10 * (i % 4) + 1] * (8 * (i % 4 + 1)) + PROMPT[: 5 * (i % 7) + 1] for i in range(24)]
            await asyncio.gather(*(answer(engine, prompt) for prompt in prompts))
    assert num_read(engine) > 0


async def test_what_is_cancelled_while_a_step_is_decided_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    HangingFiles.let.clear()
    try:
        async with disk_engine(tmp_path / "kv", kind=HangingFiles) as engine:
            loop = engine.engine._loop
            assert loop is not None

            async def draft_once() -> bool:
                """As if a step had waited for a drafter in vain, while the request's client left."""
                stream.close()
                return False

            loop._run_ahead.draft_once = draft_once  # type: ignore[method-assign]
            sampling = SamplingParams(max_tokens=NUM_OUTPUT)
            stream = engine.engine.submit(GenerationRequest("a", PROMPT, sampling))
            try:
                left = await asyncio.wait_for(collect(stream), 5)
            finally:
                HangingFiles.let.set()
            assert left.finish.reason is FinishReason.ABORT
    finally:
        HangingFiles.let.set()


async def test_a_disk_that_hangs_is_no_step_that_hangs(tmp_path: Path) -> None:
    HangingFiles.let.clear()
    try:
        async with disk_engine(tmp_path / "kv", kind=HangingFiles) as engine:
            engine.engine._watchdog._timeout_s = 0.2
            answered = asyncio.create_task(answer(engine))
            await asyncio.sleep(0.6)
            assert (engine.engine.state, engine.engine.gauges().heartbeat_age_s) == (EngineState.READY, 0.0)
            HangingFiles.let.set()
            await answered
    finally:
        HangingFiles.let.set()
