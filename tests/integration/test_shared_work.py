"""Sharing prefixes, forking and swapping over a tiny real model: the text stays what it is without them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from config import load_settings
from engine import GenerationRequest, SamplingParams
from engine.compute.native import install
from engine.compute.runner.model_runner import ModelRunner
from engine.loop.engine import Engine
from engine.loop.engine_parts import EngineParts, Executors
from engine.startup.build import load_parts
from tests.support.engines import Collected, InlineExecutor, collect
from tests.support.native import WITHOUT_KERNELS
from tests.support.tiny_models import VOCAB_SIZE, save_tiny_model

NUM_TOKENS = 16


INT8 = "int8"  # the folder of a model whose K/V is kept so


@pytest.fixture(scope="module", params=["llama", "gemma2", f"gemma2/{INT8}"])
def model_directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in float32; the others attend by windows in every other layer."""
    family = request.param.partition("/")[0]
    return save_tiny_model(family, tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Load without dummy steps, and put back the number of threads, which loading sets."""
    monkeypatch.setattr(install, "check_forward", lambda *_: None)
    monkeypatch.setattr(ModelRunner, "warm_up", lambda _: None)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@dataclass
class Served:
    """A running engine and what it is made of."""

    engine: Engine
    parts: EngineParts

    @property
    def runner(self) -> ModelRunner:
        assert isinstance(self.parts.runner, ModelRunner)
        return self.parts.runner

    async def generate(self, requests: list[GenerationRequest]) -> list[Collected]:
        """All at once, to the end of each."""
        streams = [self.engine.submit(request) for request in requests]
        return await asyncio.gather(*(collect(stream) for stream in streams))


@asynccontextmanager
async def serving(directory: Path, **changes: object) -> AsyncIterator[Served]:
    """An engine with these settings, whatever their section; everything runs on this thread."""
    settings = load_settings(
        [str(directory), "--dtype", "float32", "--kv-block-size", "4", "--max-model-len", "64"],
        environ=WITHOUT_KERNELS,
    )
    sections = {}
    changes["kv_cache_dtype"] = INT8 if directory.name == INT8 else "auto"
    for name in ("cache", "scheduler"):
        section = getattr(settings, name)
        own = {key: value for key, value in changes.items() if key in type(section).model_fields}
        sections[name] = section.model_copy(update=own)
    parts = load_parts(settings.model_copy(update=sections))
    torch.set_num_threads(1)
    inline = InlineExecutor()
    engine = Engine(lambda: parts, executors=Executors(inline, inline, inline))
    await engine.start()
    try:
        yield Served(engine, parts)
        gauges = engine.gauges()
        assert (gauges.kv_blocks_used, gauges.num_requests_swapped) == (0, 0)
        assert parts.batcher.kv.host.num_free == parts.batcher.kv.host.num_blocks
        parts.batcher.kv.check_integrity()
    finally:
        await engine.stop()


def request_of(
    name: str, prompt: list[int], seed: int, fork_of: str | None = None, num_tokens: int = NUM_TOKENS
) -> GenerationRequest:
    """A sampled one, whose text shows the smallest difference."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.9, seed=seed, ignore_eos=True)
    return GenerationRequest(name, prompt, params, fork_of=fork_of)


def prompts(number: int, length: int, num_shared: int = 0) -> list[list[int]]:
    """Random ones with the first `num_shared` tokens in common."""
    draw = random.Random(length)
    shared = [draw.randrange(3, VOCAB_SIZE) for _ in range(num_shared)]
    return [
        shared + [draw.randrange(3, VOCAB_SIZE) for _ in range(length - num_shared)] for _ in range(number)
    ]


def texts(results: list[Collected]) -> list[list[int]]:
    """The tokens of each."""
    return [result.token_ids for result in results]


async def test_a_shared_prefix_gives_the_text_it_gives_without_the_cache(model_directory: Path) -> None:
    requests = [request_of(f"{i}", prompt, i) for i, prompt in enumerate(prompts(6, 40, num_shared=33))]
    async with serving(model_directory, prefix_caching=False, num_kv_blocks=128) as plain:
        expected = await plain.generate(requests)
        assert all(result.finish.num_cached_tokens == 0 for result in expected)
    async with serving(model_directory, prefix_caching=True, num_kv_blocks=128) as cached:
        burst = await cached.generate(requests)
        cold = sum(result.finish.num_cached_tokens for result in burst)
        assert cold == 5 * 32, "one of the burst computes the prefix, the others wait for it"
        again = await cached.generate(requests)
        assert [result.finish.num_cached_tokens for result in again] == [36] * 6
        assert cached.parts.batcher.kv.prefixes.reset() > 0
        after = await cached.generate(requests[:1])
        assert after[0].finish.num_cached_tokens == 0
    assert texts(burst) == texts(again) == texts(expected)
    assert texts(after) == texts(expected[:1])


async def test_forks_give_the_text_of_separate_requests(model_directory: Path) -> None:
    prompt = prompts(1, 30)[0]
    separate = [request_of(f"{seed}", prompt, seed) for seed in range(4)]
    forked = [request_of(f"{seed}", prompt, seed, "0" if seed else None) for seed in range(4)]
    async with serving(model_directory, prefix_caching=False, num_kv_blocks=128) as served:
        expected = await served.generate(separate)
        results = await served.generate(forked)
        assert [result.finish.num_cached_tokens for result in results[1:]] == [0, 0, 0]
    assert texts(results) == texts(expected)
    assert len({tuple(text) for text in texts(expected)}) == 4, "each choice draws its own"


@pytest.mark.by_default
@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
async def test_a_full_cache_gives_the_text_of_a_large_one_by_recompute_and_by_swap(
    model_directory: Path, mode: str
) -> None:
    requests = [request_of(f"{i}", prompt, i, num_tokens=40) for i, prompt in enumerate(prompts(6, 20, 4))]
    async with serving(model_directory, preemption="recompute", num_kv_blocks=256) as large:
        expected = texts(await large.generate(requests))
        assert not large.engine.metrics.preemptions.total()
        assert large.parts.batcher.kv.host.num_blocks == 0
    for caching in (False, True):
        async with serving(
            model_directory, preemption=mode, prefix_caching=caching, num_kv_blocks=30
        ) as small:
            assert texts(await small.generate(requests)) == expected, caching
            preemptions = small.engine.metrics.preemptions
            assert preemptions.total() >= 2
            if mode != "auto":
                assert set(+preemptions) == {mode}
            assert (small.runner.swap.reserved_bytes > 0) is (preemptions["swap"] > 0)
