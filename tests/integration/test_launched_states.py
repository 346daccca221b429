"""The whole engine over a model that carries state, its steps recorded and launched ahead, says the same."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import Engine, GenerationRequest, SamplingParams, SpeculationOptions
from engine.compute.cuda.cuda_runner import CudaRunner
from engine.compute.cuda.graphs.launched import Launched
from engine.plan.step_records import StepInputs
from tests.integration.test_launched_engine import engine_of, everything, prompt_of
from tests.support.engines import Collected, collect
from tests.support.played_back import play_back_targets
from tests.support.speculated import single_threaded
from tests.support.tiny_models import VOCAB_SIZE, save_tiny_model

FAMILIES = ["mamba2", "qwen3_5_hybrid"]
ROOM = ("--max-model-len", "200", "--max-num-seqs", "8")
NO_DRAFTS = ("--speculative-method", "none")
IN_LITTLE_MEMORY = (
    *("--max-num-seqs", "4", "--kv-block-size", "4", "--num-kv-blocks", "100"),
    *("--preemption", "swap", "--max-num-batched-tokens", "16", "--swap-space", "4MiB"),
)


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    """Models this small only wait for their threads."""
    with single_threaded():
        yield


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many steps were launched, and of these before the tokens of the last one were known."""
    seen, launch = Counter[str](), CudaRunner.launch

    def counted(runner: CudaRunner, inputs: StepInputs) -> Launched:
        seen["all"] += 1
        seen["ahead"] += inputs.previous_rows is not None
        seen["with drafts"] += inputs.drafts is not None
        seen["taking drafts in"] += runner.parts.memory.num_again(inputs) > 0
        return launch(runner, inputs)

    monkeypatch.setattr(CudaRunner, "launch", counted)
    return seen


async def forks_in_turns(engine: Engine) -> list[Collected]:
    """Two rounds of the same prompts, of which the second finds what the first has left, each with a fork."""
    given = []
    for turn in range(2):
        streams = []
        for seed in range(6):
            params = SamplingParams(max_tokens=40, temperature=seed % 2, seed=seed, ignore_eos=True)
            prompt, first = prompt_of(seed // 2, 24) * 4, f"{turn}-{seed // 2 * 2}"
            fork_of = first if seed % 2 else None
            request = GenerationRequest(f"{turn}-{seed}", prompt, params, fork_of=fork_of)
            streams.append(engine.submit(request))
        given += await asyncio.gather(*(collect(stream) for stream in streams))
    return given


def differences(ours: list[Collected], theirs: list[Collected]) -> list[int]:
    pairs = zip(ours, theirs, strict=True)
    return [index for index, (one, other) in enumerate(pairs) if one.token_ids != other.token_ids]


@pytest.mark.by_default("mamba2")
@pytest.mark.parametrize("family", FAMILIES)
async def test_requests_of_every_kind_say_the_same(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launches: Counter[str]
) -> None:
    model = save_tiny_model(family, tmp_path)
    async with engine_of(model, *ROOM, *NO_DRAFTS) as plain:
        expected = await everything(plain)
    assert not launches
    play_back_targets(monkeypatch)
    async with engine_of(model, *ROOM, *NO_DRAFTS) as ahead:
        found = await everything(ahead)
    assert not differences(found, expected)
    assert launches["ahead"] > 3 and not launches["with drafts"]


@pytest.mark.by_default("qwen3_5_hybrid")
@pytest.mark.parametrize("family", FAMILIES)
async def test_with_drafts_of_which_some_come_true_they_say_the_same(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launches: Counter[str]
) -> None:
    """Each is told what it will say, but for every fifth token."""
    model = save_tiny_model(family, tmp_path)

    async def answers(engine: Engine, told: list[Collected] | None = None) -> list[Collected]:
        streams = []
        for seed in range(6):
            params = SamplingParams(max_tokens=30, temperature=seed % 2, seed=seed, ignore_eos=True)
            guess = [] if told is None else told[seed].token_ids
            wrong = tuple((token_id + (place % 5 == 4)) % VOCAB_SIZE for place, token_id in enumerate(guess))
            wish = SpeculationOptions(prediction=wrong)
            request = GenerationRequest(f"r-{seed}", prompt_of(seed, 5 + seed), params, speculation=wish)
            streams.append(engine.submit(request))
        return await asyncio.gather(*(collect(stream) for stream in streams))

    async with engine_of(model, *ROOM, *NO_DRAFTS) as plain:
        expected = await answers(plain)
    play_back_targets(monkeypatch)
    always = ("--draft-length-policy", "fixed", "--min-acceptance-rate", "0", "--num-speculative-tokens", "3")
    async with engine_of(model, *ROOM, *always) as ahead:
        found = await answers(ahead, expected)
    assert not differences(found, expected)
    assert launches["with drafts"] > 3 and launches["taking drafts in"] > 3


@pytest.mark.by_default("mamba2")
@pytest.mark.parametrize("family", FAMILIES)
async def test_swapped_shared_and_forked_they_say_the_same(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launches: Counter[str]
) -> None:
    model = save_tiny_model(family, tmp_path)
    async with engine_of(model, *ROOM, "--no-prefix-caching") as plain:
        expected = await forks_in_turns(plain)
    play_back_targets(monkeypatch)
    async with engine_of(model, *ROOM, *IN_LITTLE_MEMORY, *NO_DRAFTS) as ahead:
        found = await forks_in_turns(ahead)
        assert ahead.metrics.prefix_cache_hits > 0
        assert ahead.metrics.preemptions["swap"] > 0 or family == "mamba2"
    assert not differences(found, expected)
    assert launches["ahead"] > 3
