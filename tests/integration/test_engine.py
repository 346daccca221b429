"""The whole engine over a tiny real model: the promises that only real logits can break."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from config import load_settings
from engine import Engine, GenerationRequest, SamplingParams, StartRefused, build_engine
from engine.compute.attention.kv_tensors import KvTensors
from engine.compute.runner.packed_forward import PackedForward
from engine.errors import RequestFailed
from engine.loop.stream import RequestStream
from engine.plan.request import FinishReason
from engine.plan.step_records import StepInputs
from tests.support.engines import Collected, collect
from tests.support.native import WITHOUT_KERNELS
from tests.support.tiny_models import VOCAB_SIZE, save_tiny_model, tiny_model


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in float32."""
    return save_tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")


@asynccontextmanager
async def engine_of(directory: Path, *flags: str) -> AsyncIterator[Engine]:
    """A ready engine; on leaving it holds no block."""
    settings = load_settings(
        [str(directory), "--dtype", "float32", "--kv-cache-memory", "4MiB", *flags], environ=WITHOUT_KERNELS
    )
    engine = build_engine(settings)
    await engine.start()
    try:
        yield engine
        assert engine.gauges().kv_blocks_used == 0
    finally:
        await engine.stop()


def prompt_of(seed: int, length: int) -> list[int]:
    """A random prompt."""
    draw = random.Random(seed)
    return [draw.randrange(3, VOCAB_SIZE) for _ in range(length)]


def submit(engine: Engine, name: str, prompt: list[int], params: SamplingParams) -> RequestStream:
    """Queue one request."""
    return engine.submit(GenerationRequest(name, prompt, params))


SAMPLED = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.95, seed=1234, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


async def generate(engine: Engine, name: str, prompt: list[int], params: SamplingParams) -> Collected:
    """One request to its end."""
    return await collect(submit(engine, name, prompt, params))


async def test_greedy_text_is_what_plain_transformers_generates(model_directory: Path) -> None:
    prompt = prompt_of(0, 30)
    expected = tiny_model("llama").generate(
        torch.tensor([prompt]), max_new_tokens=24, min_new_tokens=24, do_sample=False
    )
    async with engine_of(model_directory) as engine:
        result = await generate(engine, "greedy", prompt, GREEDY)
    assert result.token_ids == expected[0, 30:].tolist()


@pytest.mark.by_default
@pytest.mark.parametrize("params", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
@pytest.mark.parametrize(
    "flags",
    [(), ("--max-num-batched-tokens", "7"), ("--num-kv-blocks", "40", "--max-model-len", "128")],
    ids=["plain", "chunked", "tight-cache"],
)
async def test_the_same_seed_gives_the_same_text_alone_and_among_sixteen(
    model_directory: Path, params: SamplingParams, flags: tuple[str, ...]
) -> None:
    prompt = prompt_of(1, 40)
    async with engine_of(model_directory) as engine:
        alone = await generate(engine, "alone", prompt, params)
    async with engine_of(model_directory, "--kv-block-size", "4", *flags) as engine:
        crowd = [
            submit(
                engine,
                f"other-{i}",
                prompt_of(100 + i, 5 + 5 * i),
                SamplingParams(max_tokens=30, temperature=1.0, seed=i, ignore_eos=True),
            )
            for i in range(16)
        ]
        among, *_ = await asyncio.gather(
            generate(engine, "among", prompt, params), *(collect(stream) for stream in crowd)
        )
        again = await generate(engine, "again", prompt, params)
    assert among.token_ids == alone.token_ids == again.token_ids
    assert among.text == alone.text


async def test_two_hundred_cancels_at_random_moments_leave_no_trace(model_directory: Path) -> None:
    draw = random.Random(7)
    prompt = prompt_of(2, 25)

    async def cut(engine: Engine, index: int) -> None:
        for _ in range(draw.randrange(60)):
            await asyncio.sleep(0)
        stream = submit(engine, f"cut-{index}", prompt_of(index, draw.randint(1, 120)), GREEDY)
        for _ in range(draw.randrange(6)):
            await anext(stream)
        if draw.random() < 0.5:
            stream.close()
        else:
            engine.cancel(stream.request_id)
        assert (await collect(stream)).finish.reason is FinishReason.ABORT

    async with engine_of(model_directory, "--max-num-seqs", "8", "--num-kv-blocks", "24") as engine:
        before = await generate(engine, "before", prompt, SAMPLED)
        during = asyncio.create_task(generate(engine, "during", prompt, SAMPLED))
        await asyncio.gather(*(cut(engine, index) for index in range(200)))
        during_them = await during
        assert engine.gauges().kv_blocks_used == 0
        after = await generate(engine, "after", prompt, SAMPLED)
    assert before.token_ids == during_them.token_ids == after.token_ids
    assert sum(engine.metrics.request_aborts.values()) == 200


async def test_a_row_that_turns_nan_ends_alone_and_poisons_nobody(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(3, 20)
    async with engine_of(model_directory, "--num-kv-blocks", "16", "--kv-block-size", "16") as engine:
        expected = await generate(engine, "before", prompt, GREEDY)
        runner = engine._loaded.runner
        keys = runner.kv.keys[0]  # type: ignore[attr-defined]
        bad = submit(engine, "bad", prompt_of(4, 20), GREEDY)
        good = submit(engine, "good", prompt, GREEDY)
        await anext(bad)
        blocks = engine._loaded.batcher.kv.block_ids("bad")
        with torch.inference_mode():
            keys[list(blocks)] = float("nan")
        poisoned, whole = await asyncio.gather(collect(bad), collect(good))
        assert poisoned.finish.reason is FinishReason.ERROR
        assert whole.token_ids == expected.token_ids
        for index in range(16):  # every block is used again
            result = await generate(engine, f"later-{index}", prompt, GREEDY)
            assert result.token_ids == expected.token_ids


async def test_out_of_memory_is_retried_once_then_ends_the_batch_alone(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_room = RuntimeError("DefaultCPUAllocator: can't allocate memory")
    faults: list[RuntimeError] = []
    call = PackedForward.__call__

    def flaky(self: PackedForward, inputs: StepInputs, kv: KvTensors) -> torch.Tensor:
        if faults:
            raise faults.pop()
        return call(self, inputs, kv)

    monkeypatch.setattr(PackedForward, "__call__", flaky)
    prompt = prompt_of(5, 20)
    async with engine_of(model_directory) as engine:
        expected = await generate(engine, "undisturbed", prompt, GREEDY)
        faults.append(torch.OutOfMemoryError("no room"))
        assert (await generate(engine, "retried", prompt, GREEDY)).token_ids == expected.token_ids
        faults.extend([no_room, no_room])
        ended = await generate(engine, "ended", prompt, GREEDY)
        assert (ended.finish.reason, ended.token_ids) == (FinishReason.ERROR, [])
        assert isinstance(ended.finish.error, RequestFailed)
        assert "OutOfDeviceMemory" in str(ended.finish.error)
        assert (await generate(engine, "after", prompt, GREEDY)).token_ids == expected.token_ids


async def test_a_cache_too_small_for_one_sequence_is_refused_with_the_numbers(model_directory: Path) -> None:
    settings = load_settings([str(model_directory), "--num-kv-blocks", "15"], environ=WITHOUT_KERNELS)
    engine = build_engine(settings)
    with pytest.raises(StartRefused, match=r"256: that needs 16 blocks .* --num-kv-blocks 15 gives 15"):
        await engine.start()
    await engine.stop()
