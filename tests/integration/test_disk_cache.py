"""K/V of a real model on disk: what one process computed costs the next nothing, and changes no token."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from config import load_settings
from engine import Engine, GenerationRequest, SamplingParams, build_engine
from engine.plan.scheduling.service_rates import ServiceRates
from tests.support.engines import Collected, collect
from tests.support.native import WITHOUT_KERNELS
from tests.support.tiny_models import save_tiny_model

PROMPT = [3 + (i * 7) % 200 for i in range(100)]
SAMPLED = SamplingParams(max_tokens=12, temperature=0.9, seed=3, ignore_eos=True)
FLAGS = ("--dtype", "float32", "--kv-cache-memory", "1MiB", "--kv-block-size", "4", "--max-model-len", "128")
NUM_BLOCKS = 27  # of the prompt and of all output but the last token, whose K/V nobody needs
NUM_READ = 24  # of the prompt: its last token is computed in any case


@asynccontextmanager
async def engine_over(model: Path, directory: Path) -> AsyncIterator[Engine]:
    """A ready engine that keeps its K/V in `directory`."""
    flags = [str(model), *FLAGS, "--prefix-cache-dir", str(directory)]
    engine = build_engine(load_settings(flags, environ=WITHOUT_KERNELS))
    await engine.start()
    try:
        yield engine
        await engine.drain(10)
        assert engine.gauges().kv_blocks_used == 0
    finally:
        await engine.stop()


async def answer(engine: Engine, name: str) -> Collected:
    """One request to its end."""
    return await collect(engine.submit(GenerationRequest(name, PROMPT, SAMPLED)))


async def test_the_next_process_reads_what_the_last_one_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So tiny a model computes the prompt sooner than a disk is asked.
    monkeypatch.setattr(ServiceRates, "prefill_s", lambda rates, num_tokens: 0.1 * num_tokens)
    model = save_tiny_model("llama", tmp_path / "model")
    async with engine_over(model, tmp_path / "kv") as engine:
        first = await answer(engine, "first")
    assert engine.metrics.prefix_cache_disk_written_blocks == NUM_BLOCKS
    async with engine_over(model, tmp_path / "kv") as engine:
        second = await answer(engine, "second")
        assert engine.metrics.prefix_cache_disk_read_blocks == NUM_READ
    assert second.token_ids == first.token_ids
    assert second.finish.num_cached_tokens == 4 * NUM_READ
