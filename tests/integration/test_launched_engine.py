"""The whole engine over the runner that launches ahead gives the text that it gives over the plain one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.startup.build
from config import load_settings
from engine import Engine, GenerationRequest, SamplingParams, build_engine
from engine.compute.cuda.cuda_runner import CudaRunner
from engine.compute.cuda.graphs.step_graphs import GraphLimits
from engine.compute.loading.loader import LoadedModel
from engine.compute.runner.model_runner import ForDrafts, ModelRunner
from engine.compute.sampling.sampler import Sampler
from engine.startup.build_runner import RunnerSizes
from tests.support.engines import Collected, collect
from tests.support.recorded import Playback, TabledReference
from tests.support.tiny_models import VOCAB_SIZE, save_tiny_model


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in float32."""
    return save_tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")


def make_ahead(
    loaded: LoadedModel, sampler: Sampler, sizes: RunnerSizes, for_drafts: ForDrafts
) -> CudaRunner:
    """What a CUDA device gets, on a CPU."""
    plain = ModelRunner(loaded, *sizes[:2], sampler, sizes.num_host_blocks, for_drafts)
    plain.forward.backend = TabledReference()
    max_blocks = -(-loaded.max_model_len // sizes.block_size)
    limits = GraphLimits(8, max_blocks, min(sizes.max_draft_tokens, 3))
    return CudaRunner(plain, sizes.max_num_tokens, limits, Playback())


@asynccontextmanager
async def engine_of(directory: Path, *flags: str) -> AsyncIterator[Engine]:
    """A ready engine; on leaving it holds no block."""
    fixed = ("--dtype", "float32", "--kv-cache-memory", "4MiB", "--compile", "off")
    engine = build_engine(load_settings([str(directory), *fixed, *flags], environ={}))
    await engine.start()
    try:
        yield engine
        assert engine.gauges().kv_blocks_used == 0
    finally:
        await engine.stop()


def prompt_of(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, VOCAB_SIZE) for _ in range(length)]


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.7, "frequency_penalty": 0.5},
    {"temperature": 1.2, "min_p": 0.05, "ignore_eos": False},
]


async def everything(engine: Engine) -> list[Collected]:
    """Requests of every kind, each after every other has begun, with prompts that repeat themselves."""
    streams = []
    for seed in range(8):
        params = SamplingParams(
            **{"max_tokens": 6 + 2 * seed, "seed": seed, "ignore_eos": True, **KINDS[seed % len(KINDS)]}
        )
        prompt = prompt_of(seed, 4 + seed) * (1 + seed % 4)
        streams.append(engine.submit(GenerationRequest(f"r-{seed}", prompt, params)))
        await asyncio.sleep(0)
    return await asyncio.gather(*(collect(stream) for stream in streams))


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--max-num-batched-tokens", "16", "--max-num-seqs", "6"), id="drafts"),
        pytest.param(("--speculative-method", "none"), id="no-drafts", marks=pytest.mark.slow),
    ],
)
async def test_launched_ahead_or_not_the_text_is_the_same(
    model_directory: Path, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    async with engine_of(model_directory, *flags) as plain:
        expected = await everything(plain)
    monkeypatch.setattr(engine.startup.build, "make_runner", make_ahead)
    async with engine_of(model_directory, *flags) as ahead:
        results = await everything(ahead)
    torch.set_num_threads(before)
    for ours, theirs in zip(results, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.text == theirs.text
