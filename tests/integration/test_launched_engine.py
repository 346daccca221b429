"""The whole engine over the runner that launches ahead gives the text that it gives over the plain one."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
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
from engine.compute.cuda.graphs.launched import Launched
from engine.compute.cuda.graphs.step_graphs import GraphLimits
from engine.compute.loading.loader import LoadedModel
from engine.compute.runner import kept_kv
from engine.compute.runner.model_runner import ForDrafts, ModelRunner
from engine.compute.sampling.sampler import Sampler
from engine.plan.request import FinishReason
from engine.plan.step_records import StepInputs
from engine.startup.build_runner import RunnerSizes
from engine.text.grammar_compiler import FollowableGrammar
from tests.support.engines import Collected, collect
from tests.support.recorded import Playback, TabledReference
from tests.support.structures import SCHEMAS, compiled
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


@pytest.mark.by_default("fp8")
@pytest.mark.parametrize("kept", ["int8", "fp8"])
async def test_k_v_in_bytes_is_the_same_swapped_shared_forked_and_rewound(
    kept: str, model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a third of the blocks that its requests want, launched ahead; and with room for all, plainly."""
    monkeypatch.setattr(kept_kv, "_why_no_fp8", lambda _: None)  # as on a GPU
    flags = ("--kv-cache-dtype", kept, "--max-num-batched-tokens", "16", "--kv-block-size", "4")

    async def answers(engine: Engine) -> list[Collected]:
        """Two rounds of the same prompts, of which the second finds blocks of the first, each with a fork."""
        given = []
        for turn in range(2):
            streams = []
            for seed in range(6):
                params = SamplingParams(max_tokens=40, temperature=seed % 2, seed=seed, ignore_eos=True)
                prompt, first = prompt_of(seed // 2, 10) * 2, f"{turn}-{seed // 2 * 2}"
                fork_of = first if seed % 2 else None
                request = GenerationRequest(f"{turn}-{seed}", prompt, params, fork_of=fork_of)
                streams.append(engine.submit(request))
            given += await asyncio.gather(*(collect(stream) for stream in streams))
        return given

    before = torch.get_num_threads()
    async with engine_of(model_directory, *flags, "--no-prefix-caching") as plain:
        assert plain.info.kv_dtype in ("int8", "float8_e4m3fn")
        expected = await answers(plain)
        assert not plain.metrics.preemptions.total()
    monkeypatch.setattr(engine.startup.build, "make_runner", make_ahead)
    tight = ("--num-kv-blocks", "30", "--preemption", "swap", "--max-model-len", "100")
    async with engine_of(model_directory, *flags, *tight) as ahead:
        results = await answers(ahead)
        assert ahead.metrics.preemptions["swap"] > 0
        assert ahead.metrics.prefix_cache_hits > 0
    torch.set_num_threads(before)
    for ours, theirs in zip(results, expected, strict=True):
        assert ours.token_ids == theirs.token_ids


def schema(name: str) -> FollowableGrammar:
    return compiled("json_schema", json.dumps(SCHEMAS[name]))


async def few_among_plain(engine: Engine) -> list[Collected]:
    """Plain requests, and with them what steps hang on: schemas, penalties, words that may not be said."""
    wishes: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.9, "logprobs": 3, "ignore_eos": False, "grammar": schema("nested")},
        {"temperature": 0.7, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
        {"temperature": 1.0, "ignore_eos": False, "grammar": schema("array"), "logprobs": 0},
        {"temperature": 0.9, "min_tokens": 5, "ignore_eos": False, "bad_words": ((7,), (8, 9))},
        {"temperature": 0.0, "ignore_eos": False, "grammar": schema("boolean or null")},
        {"temperature": 0.8, "top_k": 20, "logit_bias": ((5, 2.0),)},
        {"temperature": 1.0, "presence_penalty": 1.0, "logprobs": 5, "allowed_token_ids": (*range(3, 90),)},
    ]
    streams = []
    for seed, wish in enumerate(wishes * 2):
        fields = {"max_tokens": 24 + seed, "seed": seed, "ignore_eos": True, **wish}
        grammar = fields.pop("grammar", None)
        request = GenerationRequest(
            f"m-{seed}", prompt_of(seed, 5), SamplingParams(**fields), grammar=grammar
        )
        streams.append(engine.submit(request))
    return await asyncio.gather(*(collect(stream) for stream in streams))


async def test_what_is_drawn_later_is_what_is_drawn_at_once(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--speculative-method", "none", "--max-num-seqs", "8")
    before = torch.get_num_threads()
    async with engine_of(model_directory, *flags) as plain:
        expected = await few_among_plain(plain)
    drawn_later = Counter[bool]()

    class Counting(CudaRunner):
        def launch(self, inputs: StepInputs) -> Launched:
            drawn_later[inputs.is_drawn_later] += 1
            return super().launch(inputs)

    monkeypatch.setattr(f"{__name__}.CudaRunner", Counting)
    monkeypatch.setattr(engine.startup.build, "make_runner", make_ahead)
    async with engine_of(model_directory, *flags) as ahead:
        results = await few_among_plain(ahead)
    torch.set_num_threads(before)
    for ours, theirs in zip(results, expected, strict=True):
        assert (ours.token_ids, ours.text) == (theirs.token_ids, theirs.text)
        assert (ours.finish.reason, ours.finish.error) == (theirs.finish.reason, None)
    assert {ours.finish.reason for ours in results} == {FinishReason.STOP, FinishReason.LENGTH}
    assert drawn_later[True] > 30 and drawn_later[False] > 3
