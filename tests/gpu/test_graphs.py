"""Recorded steps, tokens that stay on the device and draws that nobody waits for, on a GPU."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine.compute.cuda.cuda_runner import CudaRunner
from engine.compute.cuda.device_draw import (
    DrawColumns,
    column_words,
    draw_filtered,
    draw_plain,
    filtered_rows,
)
from engine.compute.cuda.draw_choice import choose_draws
from engine.compute.cuda.graphs.step_graphs import GraphLimits
from engine.compute.loading.loader import LoadedModel
from engine.compute.runner.dummy_steps import Part, pack_step
from engine.compute.runner.model_runner import ModelRunner
from engine.compute.sampling.sampler import Sampler
from engine.plan.grammar import MaskOf
from engine.plan.step_records import (
    BlockCopy,
    BlockMoves,
    LogitAdjustment,
    SampledRows,
    StepInputs,
    TokenCounts,
)
from tests.support.attention_noise import numbers_in, write_noise
from tests.support.device_waits import waiting_refused
from tests.support.fixed_grammar import Allowing
from tests.support.packed import as_loaded, random_tokens
from tests.support.recorded import with_sampling
from tests.support.sampling_reference import Row, inputs_of
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from engine.compute.cuda.graphs.recorder import CudaRecorder  # noqa: E402

CUDA = torch.device("cuda", 0)
BLOCK_SIZE = 16
BYTES = [torch.int8]
if torch.cuda.get_device_capability(CUDA) >= (8, 9):
    BYTES.append(torch.float8_e4m3fn)
NUM_SEQS = 12
BLOCKS_EACH = 16
TOKENS = random_tokens(np.random.default_rng(7), BLOCKS_EACH * BLOCK_SIZE + NUM_SEQS)
LIMITS = GraphLimits(NUM_SEQS, BLOCKS_EACH, max_draft_tokens=5, max_tokens=256)


def load(family: str, **changes: Any) -> LoadedModel:
    return replace(as_loaded(tiny_model(family, **changes).to(CUDA)), device=CUDA)


def make_plain(loaded: LoadedModel) -> ModelRunner:
    sampler = Sampler(loaded.vocab_size, CUDA)
    return ModelRunner(loaded, NUM_SEQS * BLOCKS_EACH, BLOCK_SIZE, sampler)


def make_ahead(loaded: LoadedModel) -> CudaRunner:
    runner = CudaRunner(make_plain(loaded), 512, LIMITS, CudaRecorder(CUDA), choose_draws(CUDA))
    runner.warm_up()
    return runner


@pytest.fixture(scope="module")
def llama() -> tuple[ModelRunner, CudaRunner]:
    loaded = load("llama")
    plain, ahead = make_plain(loaded), make_ahead(loaded)
    assert len(ahead.graphs.shapes) == len(LIMITS.shapes())
    return plain, ahead


def blocks(row: int) -> range:
    return range(row * BLOCKS_EACH, (row + 1) * BLOCKS_EACH)


def part(row: int, stop: int, count: int = 1, num_drafts: int = 0) -> Part:
    return Part(TOKENS[row:], stop - count, stop, blocks(row), range(-1, num_drafts - 1))


def same_noise(*runners: ModelRunner | CudaRunner) -> None:
    for tensors in zip(*(runner.kv.tensors for runner in runners), strict=True):
        tensors[0].normal_()
        for other in tensors[1:]:
            other.copy_(tensors[0])


STEPS = {
    "one": [part(3, 200)],
    "some": [part(row, 30 + 17 * row) for row in range(5)],
    "all": [part(row, 250 - row) for row in range(NUM_SEQS)],
    "chains": [part(0, 90), part(1, 60, 6, 5), part(2, 33, 2, 1)],
    "a tree": [part(0, 90), Part(TOKENS, 60, 64, blocks(4), (-1, -1, 1))],
    "a prompt": [part(0, 90), part(5, 180, 150)],
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_steps_are_the_plain_ones(
    name: str, temperature: float, llama: tuple[ModelRunner, CudaRunner]
) -> None:
    plain, ahead = llama
    same_noise(plain, ahead)
    inputs = pack_step(STEPS[name], BLOCK_SIZE, temperature=temperature)
    ours = ahead.run(inputs)
    assert ours.rows == plain.run(inputs).rows
    assert 0 < ours.forward_s < 10 and 0 < ours.sample_s < 10
    for mine, theirs in zip(ahead.kv.tensors, plain.kv.tensors, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3)  # other products of other sizes


MIXED = {
    "temperature": np.array([0.0, 1.0, 1.3, 0.8, 2.0], np.float32),
    "top_k": np.array([0, 3, 0, 0, 50], np.int32),
    "top_p": np.array([1.0, 1.0, 0.6, 1.0, 0.9], np.float32),
    "min_p": np.array([0.0, 0.0, 0.0, 0.1, 0.01], np.float32),
    "seed": np.array([1, -2, 3, 4, 2**60], np.int64),
}


def all_at_once(vocab_size: int) -> dict[str, Any]:
    """What five rows may ask for beside MIXED: every adjustment, a mask, and log-probabilities."""
    history = TokenCounts(np.arange(9), np.array([0, 0, 0, 1, 2, 3, 1, 1, 1]))
    mask = MaskOf(Allowing(frozenset(range(0, vocab_size, 3)), vocab_size))
    return {
        "num_logprobs": np.array([-1, 20, 0, 5, -1], np.int32),
        "adjustments": (
            LogitAdjustment(row=0, banned_token_ids=(3, 9), logit_bias=((4, 2.5), (8, -1.0))),
            LogitAdjustment(row=1, allowed_mask=mask),
            LogitAdjustment(row=2, allowed_token_ids=(5, 6, 7), presence_penalty=0.5, history=history),
            LogitAdjustment(row=4, repetition_penalty=1.3, frequency_penalty=0.2, history=history),
        ),
    }


@pytest.mark.parametrize("has_more", [False, True])
def test_rows_of_every_kind(has_more: bool, llama: tuple[ModelRunner, CudaRunner]) -> None:
    plain, ahead = llama
    same_noise(plain, ahead)
    more = all_at_once(plain.forward.loaded.vocab_size) if has_more else {}
    inputs = with_sampling(pack_step(STEPS["some"], BLOCK_SIZE), **MIXED, **more)
    agree(ahead.run(inputs).rows, plain.run(inputs).rows)


def agree(ours: SampledRows, expected: SampledRows) -> None:
    """The same tokens, errors and ranks; log-probabilities as close as other products are."""
    assert (ours.token_ids, ours.row_errors) == (expected.token_ids, expected.row_errors)
    for mine, theirs in zip(ours.logprobs or (), expected.logprobs or (), strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert (mine.token_id, mine.rank, len(mine.top)) == (
                theirs.token_id,
                theirs.rank,
                len(theirs.top),
            )
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-3)


def test_adjusted_rows_and_logprobs_are_launched_without_waiting(
    llama: tuple[ModelRunner, CudaRunner],
) -> None:
    """At once, and in the draw of a pass that was launched before the last step's tokens were known."""
    plain, ahead = llama
    same_noise(plain, ahead)
    more = all_at_once(plain.forward.loaded.vocab_size)
    first = with_sampling(pack_step(STEPS["some"], BLOCK_SIZE), **MIXED, **more)
    ahead.run(first)  # loads what these kernels need
    expected = plain.run(first).rows
    second = pack_step([part(row, 31 + 17 * row) for row in range(5)], BLOCK_SIZE)
    second.token_ids[:] = expected.token_ids
    second = with_sampling(second, **MIXED, **more)
    expected_next = plain.run(second).rows
    unknown = replace(
        second, token_ids=np.zeros(5, np.int64), previous_rows=np.arange(5), is_drawn_later=True
    )
    with waiting_refused():
        flying = [ahead.launch(first), ahead.launch(unknown)]
    agree(flying[0].wait().rows, expected)
    with waiting_refused():
        flying[1].draw(second.sampling)
    agree(flying[1].wait().rows, expected_next)


def next_decodes(rows: Sequence[int], stop: int, previous: Sequence[int]) -> StepInputs:
    inputs = pack_step([part(row, stop) for row in rows], BLOCK_SIZE, temperature=1.0)
    inputs.token_ids[:] = 0
    return replace(inputs, previous_rows=np.array(previous, np.int64))


def test_launches_wait_for_nothing_and_know_the_tokens(llama: tuple[ModelRunner, CudaRunner]) -> None:
    plain, ahead = llama
    same_noise(plain, ahead)
    rows = list(range(7))
    first = pack_step([part(row, 40) for row in rows], BLOCK_SIZE, temperature=1.0)
    expected = [plain.run(first).rows.token_ids]
    for stop in range(41, 60):
        step = pack_step([part(row, stop) for row in rows], BLOCK_SIZE, temperature=1.0)
        step.token_ids[:] = expected[-1]
        expected.append(plain.run(step).rows.token_ids)
    with waiting_refused():
        flying = [ahead.launch(first)]
        flying += [ahead.launch(next_decodes(rows, stop, rows)) for stop in range(41, 60)]
    with ThreadPoolExecutor(1) as elsewhere:
        results = list(elsewhere.map(lambda step: step.wait(), flying))
    assert [result.rows.token_ids for result in results] == expected


def test_steps_that_move_blocks_are_launched_without_waiting(llama: tuple[ModelRunner, CudaRunner]) -> None:
    plain, ahead = llama
    free = blocks(NUM_SEQS - 1)
    moves = replace(
        pack_step([part(row, 40) for row in range(3)], BLOCK_SIZE),
        moves=BlockMoves(scrub_blocks=(free[0],), block_copies=(BlockCopy(blocks(4)[0], free[1]),)),
    )
    same_noise(plain, ahead)
    expected = plain.run(moves).rows
    with waiting_refused():
        step = ahead.launch(moves)
    assert step.wait().rows == expected
    for mine, theirs in zip(ahead.kv.tensors, plain.kv.tensors, strict=True):
        assert torch.equal(mine[[free[0], free[1]]], theirs[[free[0], free[1]]])


def test_steps_that_swap_blocks_are_launched_without_waiting() -> None:
    """Numbers of blocks and their contents go through pinned memory, both ways."""
    loaded = load("llama")
    plain = ModelRunner(loaded, NUM_SEQS * BLOCKS_EACH, BLOCK_SIZE, Sampler(loaded.vocab_size, CUDA), 8)
    ahead = CudaRunner(plain, 512, LIMITS, CudaRecorder(CUDA), choose_draws(CUDA))
    ahead.warm_up()
    for tensor in ahead.kv.tensors:
        tensor.normal_()
    decodes = pack_step([part(row, 40) for row in range(3)], BLOCK_SIZE)
    expected = ahead.run(decodes).rows
    kept, back = blocks(4), blocks(NUM_SEQS - 1)
    saved = [tensor[list(kept[:5])].clone() for tensor in ahead.kv.tensors]
    moves = BlockMoves(swap_out=tuple(map(BlockCopy, kept, range(5))), scrub_blocks=tuple(kept[:5]))
    out = replace(decodes, moves=moves)
    again = replace(decodes, moves=BlockMoves(swap_in=tuple(map(BlockCopy, range(5), back))))
    with waiting_refused():
        flying = [ahead.launch(out), ahead.launch(again)]
    assert [step.wait().rows for step in flying] == [expected, expected]
    for tensor, was in zip(ahead.kv.tensors, saved, strict=True):
        assert torch.equal(tensor[list(back[:5])], was) and not tensor[list(kept[:5])].any()


def test_prompts_and_filtered_rows_are_launched_without_waiting(
    llama: tuple[ModelRunner, CudaRunner],
) -> None:
    plain, ahead = llama
    same_noise(plain, ahead)
    parts = [*(part(row, 90) for row in range(4)), part(5, 180, 150)]
    inputs = with_sampling(pack_step(parts, BLOCK_SIZE), **MIXED)
    expected = plain.run(inputs).rows
    ahead.run(inputs)  # compiles what a prompt of this size needs
    same_noise(plain, ahead)
    expected = plain.run(inputs).rows
    with waiting_refused():
        step = ahead.launch(inputs)
    assert step.wait().rows == expected


def test_a_row_that_is_not_finite_fails_alone_and_stops_no_later_step(
    llama: tuple[ModelRunner, CudaRunner],
) -> None:
    plain, ahead = llama
    same_noise(plain, ahead)
    for runner in (plain, ahead):
        runner.kv.values[0][blocks(1)[0]] = torch.nan
    inputs = pack_step([part(row, 40) for row in range(3)], BLOCK_SIZE, temperature=1.0)
    flying = [ahead.launch(inputs), ahead.launch(next_decodes([0, 2], 41, [0, 2]))]
    assert list(flying[0].wait().rows.row_errors or ()) == [1]
    assert flying[1].wait().rows.row_errors is None
    for runner in (plain, ahead):
        for tensor in runner.kv.tensors:
            tensor.zero_()


@pytest.mark.parametrize("kept", BYTES)
def test_steps_over_bytes_are_the_plain_ones(kept: torch.dtype) -> None:
    """And what they leave in the pages, but for numbers between two that bytes hold."""
    loaded = replace(load("llama"), kept_kv=kept)
    plain, ahead = make_plain(loaded), make_ahead(loaded)
    assert len(ahead.graphs.shapes) == len(LIMITS.shapes())
    for name in ("some", "chains", "a tree", "a prompt"):
        for runner in (plain, ahead):
            write_noise(runner.kv, seed=3)
        inputs = pack_step(STEPS[name], BLOCK_SIZE, temperature=1.0)
        assert ahead.run(inputs).rows == plain.run(inputs).rows
        for mine, theirs in zip(numbers_in(ahead.kv), numbers_in(plain.kv), strict=True):
            assert (mine - theirs).abs().mean() <= 1e-3


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2", "gemma3", "mistral", "phi3", "gpt2"])
def test_families_that_are_recorded(family: str) -> None:
    loaded = load(family)
    plain, ahead = make_plain(loaded), make_ahead(loaded)
    assert ahead.graphs.shapes
    same_noise(plain, ahead)
    inputs = pack_step(STEPS["some"], BLOCK_SIZE, temperature=1.0)
    assert ahead.run(inputs).rows == plain.run(inputs).rows


def test_a_model_that_waits_for_the_device_is_served_as_before(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        loaded = load("llama")
        loaded.model.base_model.norm.register_forward_hook(lambda *call: (call[-1].sum().item(), None)[1])
        plain, ahead = make_plain(loaded), make_ahead(loaded)
    assert ahead.graphs.shapes == () and "no more:" in caplog.text
    same_noise(plain, ahead)
    inputs = pack_step(STEPS["some"], BLOCK_SIZE)
    assert ahead.run(inputs).rows == plain.run(inputs).rows


def test_a_model_that_would_choose_its_frequencies_by_length_is_recorded() -> None:
    loaded = load("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0})
    plain, ahead = make_plain(loaded), make_ahead(loaded)
    assert ahead.graphs.shapes
    same_noise(plain, ahead)
    inputs = pack_step(STEPS["some"], BLOCK_SIZE)
    assert ahead.run(inputs).rows == plain.run(inputs).rows


def test_draws_over_a_real_vocabulary_are_the_samplers_and_wait_for_nothing() -> None:
    rng = np.random.default_rng(0)
    rows = [
        Row(
            temperature=float(rng.choice([0.0, 0.3, 1.0, 1.7])),
            top_k=int(rng.choice([0, 0, 1, 50])),
            top_p=float(rng.choice([1.0, 0.2, 0.95])),
            min_p=float(rng.choice([0.0, 0.02])),
            seed=int(rng.integers(2**62)),
            position=row,
        )
        for row in range(40)
    ]
    inputs = inputs_of(rows)
    logits = (torch.randn(40, 128_256, device=CUDA) * 3).bfloat16()
    expected = Sampler(128_256, CUDA).sample(logits, inputs).token_ids
    words = column_words(inputs, np.arange(40), 40)
    columns = DrawColumns.of({name: torch.from_numpy(word).to(CUDA) for name, word in words.items()})
    filtered = filtered_rows(inputs, 128_256)
    assert filtered is not None
    sent = {name: torch.from_numpy(word).to(CUDA) for name, word in filtered.words.items()}
    at = torch.from_numpy(filtered.rows).to(CUDA)
    asked = (logits, at, filtered.filters(sent), sent["keys"])
    draws = choose_draws(CUDA)
    assert draws.plain is not draw_plain and draws.filtered is not draw_filtered
    draws.plain(logits, columns), draws.filtered(*asked)  # compiles
    with waiting_refused():
        drawn = draws.plain(logits, columns).index_copy_(0, at, draws.filtered(*asked))
        slow = draw_plain(logits, columns).index_copy_(0, at, draw_filtered(*asked))
    assert drawn.tolist() == slow.tolist() == expected
