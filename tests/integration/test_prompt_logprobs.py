"""Log-probabilities of prompt tokens are the model's own, however the prompt was computed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from config import load_settings
from engine import Engine, GenerationRequest, SamplingParams, TokenLogprobs, build_engine
from engine.compute.loading.loader import LoadedModel
from engine.compute.runner import prompt_scorer
from engine.compute.runner.dummy_steps import Part, pack_step
from engine.compute.runner.model_runner import ModelRunner
from engine.compute.sampling.logprobs import known_logprobs
from engine.compute.sampling.sampler import Sampler
from engine.errors import RequestFailed
from engine.loop.stream import OutputDelta, RequestStream
from engine.plan.step_records import PromptRows, StepInputs, StepResult
from tests.support.native import WITHOUT_KERNELS
from tests.support.packed import load_tiny, plain_logits, random_tokens
from tests.support.recurrent import BLOCK_SIZE, make_recurrent_runner, pack_slots, whole_logits
from tests.support.tiny_models import (
    FAMILIES,
    PECULIAR_FAMILIES,
    REBOUND_FAMILIES,
    RECURRENT_FAMILIES,
    save_tiny_model,
)

PROMPT = random_tokens(np.random.default_rng(3), 50)
NUM_TOP = 3
SCORED = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, prompt_logprobs=NUM_TOP)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiny products are slower on more threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr("engine.startup.build.use_compute_threads", lambda: torch.set_num_threads(1))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in float32."""
    return save_tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")


@asynccontextmanager
async def engine_of(directory: Path, *flags: str) -> AsyncIterator[Engine]:
    """A ready engine; on leaving it holds no block."""
    flags = ("--dtype", "float32", "--kv-cache-memory", "4MiB", "--kv-block-size", "4", *flags)
    engine = build_engine(load_settings([str(directory), *flags], environ=WITHOUT_KERNELS))
    await engine.start()
    try:
        yield engine
        assert engine.gauges().kv_blocks_used == 0
    finally:
        await engine.stop()


def submit(
    engine: Engine, name: str, prompt: list[int], params: SamplingParams = SCORED, fork_of: str | None = None
) -> RequestStream:
    return engine.submit(GenerationRequest(name, prompt, params, fork_of=fork_of))


async def read(stream: RequestStream) -> tuple[list[int], tuple[TokenLogprobs, ...], int]:
    """Output, the prompt's records, which must come with the first token, and cached tokens."""
    deltas: list[OutputDelta] = [delta async for delta in stream]
    assert not any(delta.prompt_logprobs for delta in deltas[1:])
    finish = deltas[-1].finish
    assert finish is not None
    assert finish.error is None
    token_ids = [token for delta in deltas for token in delta.token_ids]
    return token_ids, deltas[0].prompt_logprobs, finish.num_cached_tokens


def check(loaded: LoadedModel, prompt: list[int], found: tuple[TokenLogprobs, ...], num_top: int) -> None:
    """Exactly what the plain model says of every token but the first."""
    logprobs = plain_logits(loaded, prompt).float().log_softmax(dim=1)[:-1]
    assert [record.token_id for record in found] == prompt[1:]
    for row, record in zip(logprobs, found, strict=True):
        own = row[record.token_id]
        assert record.logprob == pytest.approx(float(own), abs=2e-3)
        assert abs(record.rank - 1 - int((row > own).sum())) <= 1  # neighbours may be nearly equal
        best = row.topk(num_top)
        assert [value for _, value in record.top] == pytest.approx(best.values.tolist(), abs=2e-3)
        assert len({token for token, _ in record.top}) == num_top


@pytest.mark.parametrize("family", [*FAMILIES, *PECULIAR_FAMILIES, *REBOUND_FAMILIES])
def test_every_family_s_own_head_is_used(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Soft caps, logit scales and groups of rows included."""
    monkeypatch.setattr("engine.compute.sampling.row_groups.GROUP_LOGITS", 512 * 7)
    loaded = load_tiny(family)
    runner = ModelRunner(loaded, 32, 4, Sampler(loaded.vocab_size, loaded.device))
    tokens = PROMPT[:30]
    num_rows = len(tokens) - 1
    step = pack_step([Part(tokens, 0, len(tokens), range(8))], 4)
    rows = PromptRows(
        sequence=np.zeros(num_rows, np.int32),
        rows=np.arange(num_rows),
        token_ids=np.array(tokens[1:]),
        num_top=np.full(num_rows, NUM_TOP, np.int32),
    )
    result = runner.run(replace(step, prompt_rows=rows))
    assert result.rows.token_ids == runner.run(step).rows.token_ids
    found = tuple(record for record in result.prompt_logprobs if record is not None)
    check(loaded, tokens, found, NUM_TOP)


def test_logits_that_are_not_finite_have_no_record() -> None:
    loaded = load_tiny("llama")
    runner = ModelRunner(loaded, 32, 4, Sampler(loaded.vocab_size, loaded.device))
    step = pack_step([Part(PROMPT[:8], 0, 8, range(2))], 4)
    rows = PromptRows(np.zeros(2, np.int32), np.array([0, 1]), np.array([5, 6]), np.array([0, 9], np.int32))
    hidden_nan = torch.full((1, 8, 64), torch.nan)
    handle = loaded.model.base_model.register_forward_hook(
        lambda _, __, output: replace(output, last_hidden_state=hidden_nan.clone())
    )
    try:
        assert runner.run(replace(step, prompt_rows=rows)).prompt_logprobs == (None, None)
    finally:
        handle.remove()


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--max-num-batched-tokens", "7"),
        ("--max-num-batched-tokens", "1"),
        ("--speculative-method", "none"),
        ("--draft-length-policy", "fixed", "--min-acceptance-rate", "0", "--max-num-batched-tokens", "9"),
        ("--no-prefix-caching",),
    ],
    ids=["whole", "chunked", "token-by-token", "plain", "drafts", "no-cache"],
)
async def test_a_prompt_is_scored_however_it_is_computed(
    model_directory: Path, flags: tuple[str, ...]
) -> None:
    loaded = load_tiny("llama")
    plain = replace(SCORED, prompt_logprobs=None)
    async with engine_of(model_directory, *flags) as engine:
        expected, nothing, _ = await read(submit(engine, "plain", PROMPT, plain))
        output, found, num_cached = await read(submit(engine, "scored", PROMPT))
        again, _, found_cached = await read(submit(engine, "again", PROMPT, plain))
    assert nothing == ()
    assert output == expected == again
    assert num_cached == 0  # although another request has left this prompt in the cache
    assert found_cached == (0 if "--no-prefix-caching" in flags else 48)
    check(loaded, PROMPT, found, NUM_TOP)


async def test_lone_and_double_tokens(model_directory: Path) -> None:
    async with engine_of(model_directory) as engine:
        assert (await read(submit(engine, "one", PROMPT[:1])))[1] == ()
        check(load_tiny("llama"), PROMPT[:2], (await read(submit(engine, "two", PROMPT[:2])))[1], NUM_TOP)


async def test_forks_and_neighbours_do_not_disturb(model_directory: Path) -> None:
    """Same prompts at once: with scores, without, forked, and one that begins alike."""
    loaded = load_tiny("llama")
    plain = replace(SCORED, prompt_logprobs=None)
    async with engine_of(model_directory, "--max-num-batched-tokens", "16") as engine:
        streams = [
            submit(engine, "first", PROMPT, replace(SCORED, prompt_logprobs=0)),
            submit(engine, "fork", PROMPT, plain, fork_of="first"),
            submit(engine, "scored-fork", PROMPT, SCORED, fork_of="first"),
            submit(engine, "plain", PROMPT, plain),
            submit(engine, "other", [*PROMPT[:20], *PROMPT[:20]], SCORED),
        ]
        results = await asyncio.gather(*map(read, streams))
    assert results[0][0] == results[1][0] == results[2][0] == results[3][0]
    check(loaded, PROMPT, results[0][1], 0)
    check(loaded, PROMPT, results[2][1], NUM_TOP)
    check(loaded, [*PROMPT[:20], *PROMPT[:20]], results[4][1], NUM_TOP)
    assert results[1][1] == results[3][1] == ()


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
async def test_preempted_prompts_are_scored_once(model_directory: Path, preemption: str) -> None:
    """More sequences than the blocks hold, so that some go while their prompt is half computed."""
    loaded = load_tiny("llama")
    flags = ("--num-kv-blocks", "44", "--max-model-len", "128", "--max-num-batched-tokens", "11")
    async with engine_of(model_directory, *flags, "--preemption", preemption) as engine:
        prompts = [random_tokens(np.random.default_rng(seed), 40) for seed in range(4)]
        long = replace(SCORED, max_tokens=60)
        results = await asyncio.gather(
            *(read(submit(engine, f"r{i}", prompt, long)) for i, prompt in enumerate(prompts))
        )
        assert sum(engine.metrics.preemptions.values()) > 0
    for prompt, (output, found, _) in zip(prompts, results, strict=True):
        assert len(output) == 60
        check(loaded, prompt, found, NUM_TOP)


async def test_a_prompt_whose_logits_are_not_finite_fails_alone(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = known_logprobs

    def spoiled(logits: torch.Tensor, token_ids: np.ndarray, num_top: np.ndarray) -> list[object]:
        if len(token_ids) == 1:
            logits = torch.full_like(logits, math.nan)
        return list(real(logits, token_ids, num_top))

    monkeypatch.setattr(prompt_scorer, "known_logprobs", spoiled)
    monkeypatch.setattr(
        "engine.compute.sampling.row_groups.GROUP_LOGITS", 512 * 48
    )  # the last of 49 is a group of its own
    async with engine_of(model_directory) as engine:
        bad = submit(engine, "bad", PROMPT)
        good = submit(engine, "good", PROMPT[:40], replace(SCORED, prompt_logprobs=None))
        deltas = [delta async for delta in bad]
        finish = deltas[-1].finish
        assert finish is not None
        assert isinstance(finish.error, RequestFailed)
        assert len((await read(good))[0]) == 12
        check(load_tiny("llama"), PROMPT[:45], (await read(submit(engine, "after", PROMPT[:45])))[1], NUM_TOP)


async def test_a_pass_that_fails_behind_a_prompt_does_not_have_it_scored_again(model_directory: Path) -> None:
    """Both requests go on from their last whole blocks, the scored one's being in its prompt."""
    flags = ("--kv-block-size", "16", "--speculative-method", "none")
    plain = replace(SCORED, prompt_logprobs=None)
    async with engine_of(model_directory, *flags) as engine:
        streams = [submit(engine, "scored", PROMPT[:40]), submit(engine, "beside", PROMPT[40:], plain)]
        first = await anext(streams[0])
        check(load_tiny("llama"), PROMPT[:40], first.prompt_logprobs, NUM_TOP)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ModelRunner, "run", fail_once(ModelRunner.run))
            deltas = [delta async for delta in streams[0]]
        assert engine.metrics.engine_errors["forward"] == 1
        assert not any(delta.prompt_logprobs for delta in deltas)
        assert sum(len(delta.token_ids) for delta in [first, *deltas]) == 12
        await read(streams[1])


def fail_once(run: Callable[[ModelRunner, StepInputs], StepResult]) -> Callable[..., StepResult]:
    """The same, but for the first call."""
    calls: list[None] = []

    def faulty(runner: ModelRunner, inputs: StepInputs) -> StepResult:
        calls.append(None)
        if len(calls) == 1:
            raise RuntimeError("a pass fails")
        return run(runner, inputs)

    return faulty


@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_recurrent_prompts_are_scored_piece_by_piece(family: str) -> None:
    runner = make_recurrent_runner(family)
    tokens = PROMPT[:20]
    found: list[TokenLogprobs | None] = []
    for first, end in ((0, 7), (7, 8), (8, 20)):
        step = pack_slots({1: Part(tokens, first, end, range(3, 3 + 20 // BLOCK_SIZE + 1))})
        known = tokens[first + 1 : end + 1]
        rows = PromptRows(
            sequence=np.zeros(len(known), np.int32),
            rows=np.arange(len(known)),
            token_ids=np.array(known),
            num_top=np.full(len(known), NUM_TOP, np.int32),
        )
        found += runner.run(replace(step, prompt_rows=rows)).prompt_logprobs
    expected = whole_logits(family, tokens).log_softmax(dim=1)
    assert [record.token_id for record in found if record] == tokens[1:]
    for row, record in zip(expected, found, strict=False):
        assert record is not None
        assert record.logprob == pytest.approx(float(row[record.token_id]), abs=2e-3)


def test_a_head_that_fails_on_a_prompt_gives_no_records_and_costs_the_step_nothing() -> None:
    loaded = load_tiny("llama")
    runner = ModelRunner(loaded, 32, 4, Sampler(loaded.vocab_size, loaded.device))
    step = pack_step([Part(PROMPT[:8], 0, 8, range(2))], 4)
    rows = PromptRows(np.zeros(2, np.int32), np.array([0, 1]), np.array([5, 6]), np.array([0, 9], np.int32))
    passes: list[object] = []

    def fail_on_the_second(_: object, __: object) -> None:
        passes.append(None)
        if len(passes) == 2:
            raise ValueError("no scores")

    token_ids = runner.run(step).rows.token_ids
    handle = loaded.model.register_forward_pre_hook(fail_on_the_second)
    try:
        result = runner.run(replace(step, prompt_rows=rows))
    finally:
        handle.remove()
    assert result.prompt_logprobs == (None, None)
    assert result.rows.token_ids == token_ids
