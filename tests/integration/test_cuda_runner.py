"""The runner of steps that nobody waits for gives what the plain one gives: on a CPU that plays along."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from config import FaultPoint, PlannedFault
from config.units import rough_size
from engine.compute.cuda.cuda_runner import CudaRunner
from engine.compute.cuda.device_draw import TORCH_DRAWS, draw_filtered
from engine.compute.cuda.graphs import step_graphs
from engine.compute.cuda.graphs.graph_shapes import MAX_QUERY_LEN, GraphShape
from engine.compute.cuda.graphs.step_graphs import GraphLimits
from engine.compute.runner.dummy_steps import Part, pack_step
from engine.compute.runner.following_steps import FollowingSteps
from engine.compute.runner.model_runner import ForDrafts, ModelRunner
from engine.compute.sampling.processors import Filters
from engine.compute.sampling.sampler import NOT_FINITE, Sampler
from engine.errors import OutOfDeviceMemory
from engine.faults.fault_counter import FaultCounter
from engine.faults.faulty_ahead_runner import FaultyAheadRunner, make_faulty
from engine.faults.faulty_sampler import FaultySampler
from engine.faults.step_owners import StepOwners
from engine.plan.step_records import (
    BlockCopy,
    BlockMoves,
    LogitAdjustment,
    SampledRows,
    StepInputs,
    StepResult,
    TokenLogprobs,
)
from tests.support.device_waits import WaitingRefused
from tests.support.packed import load_tiny, random_tokens
from tests.support.recorded import Playback, TabledReference, with_sampling
from tests.support.sampling_reference import counted

BLOCK_SIZE = 4
NUM_BLOCKS = 64
LIMITS = GraphLimits(max_num_seqs=6, max_blocks=16, max_draft_tokens=4)
WITH_PROMPTS = LIMITS._replace(max_tokens=128)
TOKENS = random_tokens(np.random.default_rng(7), 40)
MATCHED = ForDrafts()
BLOCKS = [list(range(8 * row, 8 * row + 8)) for row in range(6)]


def make_plain(
    family: str = "llama", for_drafts: ForDrafts = MATCHED, sampler_class: type[Sampler] = Sampler
) -> ModelRunner:
    loaded = load_tiny(family)
    sampler = sampler_class(loaded.vocab_size, loaded.device)
    runner = ModelRunner(loaded, NUM_BLOCKS, BLOCK_SIZE, sampler, 4, for_drafts)
    runner.forward.backend = TabledReference()
    return runner


def make_ahead(
    family: str = "llama",
    for_drafts: ForDrafts = MATCHED,
    recorder: Playback | None = None,
    limits: GraphLimits = LIMITS,
    sampler: type[Sampler] = Sampler,
) -> CudaRunner:
    runner = CudaRunner(make_plain(family, for_drafts, sampler), 64, limits, recorder or Playback())
    runner.graphs.record(recorder or Playback())
    return runner


def count_replays(runner: CudaRunner) -> list[int]:
    """A list that grows with each recorded pass that is replayed: its places."""
    seen: list[int] = []
    for module in runner.pass_modules:
        module.register_forward_hook(lambda _, __, output: seen.append(output.logits.shape[1]))
    return seen


def decode(rows: Sequence[int], stop: int, temperature: float = 0.0) -> StepInputs:
    """The token before `stop` of each of these sequences, whose blocks hold noise before it."""
    parts = [Part(TOKENS[row:] + TOKENS, stop + row - 1, stop + row, BLOCKS[row]) for row in rows]
    return pack_step(parts, BLOCK_SIZE, temperature=temperature)


def verify(rows: Sequence[int], num_drafts: Sequence[int], temperature: float = 0.0) -> StepInputs:
    """Chains of drafts of these lengths."""
    parts = []
    for row, count in zip(rows, num_drafts, strict=True):
        stop = 11 + row + count
        parts.append(Part(TOKENS[row:] + TOKENS, stop - 1 - count, stop, BLOCKS[row], range(-1, count - 1)))
    return pack_step(parts, BLOCK_SIZE, temperature=temperature)


def fill_with_noise(*runners: ModelRunner | CudaRunner) -> None:
    generator = torch.Generator().manual_seed(3)
    first = runners[0].kv.tensors
    for tensor in first:
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    for runner in runners[1:]:
        for target, source in zip(runner.kv.tensors, first, strict=True):
            target.copy_(source)


def agree(
    inputs: StepInputs,
    family: str = "llama",
    for_drafts: ForDrafts = MATCHED,
    *,
    replays: bool = True,
    limits: GraphLimits = LIMITS,
) -> StepResult:
    """Our result, found to be the plain runner's, with the K/V of every block as that left it."""
    plain, ahead = make_plain(family, for_drafts), make_ahead(family, for_drafts, limits=limits)
    fill_with_noise(plain, ahead)
    replayed = count_replays(ahead)
    expected, ours = plain.run(inputs), ahead.run(inputs)
    assert replace(ours.rows, logprobs=None) == replace(expected.rows, logprobs=None)
    agree_on_logprobs(ours.rows.logprobs or (), expected.rows.logprobs or ())
    assert bool(replayed) == replays
    for mine, theirs in zip(ahead.kv.tensors, plain.kv.tensors, strict=True):
        torch.testing.assert_close(mine, theirs)
    agree_on_features(ours, expected)
    agree_on_logprobs(ours.prompt_logprobs, expected.prompt_logprobs)
    return ours


def agree_on_features(ours: StepResult, expected: StepResult) -> None:
    assert (ours.features is None) == (expected.features is None)
    for own, same in zip(ours.features or (), expected.features or (), strict=True):
        assert isinstance(own, torch.Tensor) and isinstance(same, torch.Tensor)
        torch.testing.assert_close(own, same)


def agree_on_logprobs(ours: Sequence[TokenLogprobs | None], expected: Sequence[TokenLogprobs | None]) -> None:
    """The same tokens in the same order; the figures as close as padded products round."""
    for mine, theirs in zip(ours, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is None or theirs is None:
            continue
        assert (mine.token_id, mine.rank) == (theirs.token_id, theirs.rank)
        assert [token_id for token_id, _ in mine.top] == [token_id for token_id, _ in theirs.top]
        figures = [mine.logprob, *(logprob for _, logprob in mine.top)]
        assert figures == pytest.approx([theirs.logprob, *(logprob for _, logprob in theirs.top)], abs=1e-5)


@pytest.mark.by_default
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "qwen3", "gemma3n"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_decodes_are_replayed_with_padding(family: str, temperature: float) -> None:
    agree(decode([3, 0, 5], 9, temperature), family)


@pytest.mark.parametrize("num_sequences", [1, 2, 5, 6])
def test_any_number_of_decodes(num_sequences: int) -> None:
    agree(decode(range(num_sequences), 14, 0.7))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_chains_of_drafts_are_replayed_and_judged_late(temperature: float) -> None:
    result = agree(verify([0, 1, 2], [3, 0, 4], temperature))
    assert -1 in result.rows.token_ids, "some draft was refused"


def test_accepted_drafts_are_committed() -> None:
    """The drafts are what the model itself goes on with."""
    runner = make_ahead()
    first = runner.run(decode([0], 9)).rows.token_ids[0]
    tokens = [*TOKENS[:9], first]
    second = runner.run(pack_step([Part(tokens, 9, 10, BLOCKS[0])], BLOCK_SIZE)).rows.token_ids[0]
    part = Part([*tokens, second, 1], 9, 12, BLOCKS[0], (-1, 0))
    rows = runner.run(pack_step([part], BLOCK_SIZE)).rows
    assert rows.token_ids[0] == second and rows.token_ids[1] >= 0


TREES = ((-1, -1, 1, 1), (-1, 0), (-1, -1, 0))  # of three sequences; the second is a chain


def grow(plain: ModelRunner, temperature: float) -> StepInputs:
    """Trees behind 10, 11 and 12 known tokens: right on a second branch, right all along, never right."""
    tokens = []
    for row in range(2):
        known = [*(TOKENS[row:] + TOKENS)[: 11 + row]]
        for _ in range(2):
            parts = [Part(known, len(known) - 1, len(known), BLOCKS[row])]
            drawn = plain.run(pack_step(parts, BLOCK_SIZE, temperature=temperature)).rows.token_ids[0]
            known.append(drawn)
        tokens.append(known)
    (*first, a, b), (*second, c, d) = tokens
    wrong = [(token_id + 1) % 512 for token_id in (a, b)]
    parts = [
        Part([*first, wrong[0], a, wrong[1], b], len(first) - 1, len(first) + 4, BLOCKS[0], TREES[0]),
        Part([*second, c, d], len(second) - 1, len(second) + 2, BLOCKS[1], TREES[1]),
        Part(TOKENS, 12, 16, BLOCKS[2], TREES[2]),
    ]
    return pack_step(parts, BLOCK_SIZE, temperature=temperature)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "for_drafts", [MATCHED, ForDrafts(keeps_features=True), ForDrafts("match", True, (1, 0))]
)
def test_trees_are_judged_late_and_their_accepted_drafts_moved(
    for_drafts: ForDrafts, temperature: float
) -> None:
    plain, ahead = make_plain(for_drafts=for_drafts), make_ahead(for_drafts=for_drafts)
    fill_with_noise(plain, ahead)
    inputs = grow(plain, temperature)
    num_logprobs = np.repeat([2, -1, 0], [5, 3, 4]).astype(np.int32)
    inputs = with_sampling(inputs, num_logprobs=num_logprobs)
    fill_with_noise(plain, ahead)
    ahead.graphs._steps.clear()  # the fake attention knows chains only
    never_judged_while_launched(ahead)
    step = ahead.launch(inputs)
    ours, expected = step.wait(), plain.run(inputs)
    assert replace(ours.rows, logprobs=None) == replace(expected.rows, logprobs=None)
    assert [token_id >= 0 for token_id in ours.rows.token_ids[:8]] == [True] * 3 + [False] * 2 + [True] * 3
    assert ours.rows.logprobs is not None and ours.rows.logprobs[2] is not None
    agree_on_logprobs(ours.rows.logprobs, expected.rows.logprobs or ())
    for mine, theirs in zip(ahead.kv.tensors, plain.kv.tensors, strict=True):
        torch.testing.assert_close(mine, theirs)
    agree_on_features(ours, expected)


def never_judged_while_launched(ahead: CudaRunner) -> None:
    """Have the runner fail where a launch would wait for what is drawn."""
    ahead.parts.judge = failing(AssertionError("the launch waits"))  # type: ignore[assignment, method-assign]


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_drafts_that_are_judged_by_chance_wait(verification: Any) -> None:
    agree(verify([0, 1], [2, 3], 1.0), for_drafts=ForDrafts(verification))
    ahead = make_ahead(for_drafts=ForDrafts(verification))
    never_judged_while_launched(ahead)
    with pytest.raises(AssertionError, match="the launch waits"):
        ahead.launch(verify([0, 1], [2, 3], 1.0))


@pytest.mark.parametrize("layers", [(), (1, 0)])
@pytest.mark.parametrize("inputs", [decode([0, 1], 9), verify([2, 0], [1, 3])])
def test_features_are_of_what_is_verified(inputs: StepInputs, layers: tuple[int, ...]) -> None:
    keeping = ForDrafts(keeps_features=True, feature_layers=layers)
    assert agree(inputs, for_drafts=keeping).features
    ahead = make_ahead(for_drafts=keeping)
    never_judged_while_launched(ahead)
    assert ahead.run(inputs).features


@pytest.mark.parametrize("layers", [(), (1, 0)])
def test_features_are_of_their_step_though_the_next_has_been_launched(layers: tuple[int, ...]) -> None:
    keeping = ForDrafts(keeps_features=True, feature_layers=layers)
    plain, ahead = make_plain(for_drafts=keeping), make_ahead(for_drafts=keeping)
    fill_with_noise(plain, ahead)
    first, second = verify([0, 1], [2, 1]), verify([3, 4], [2, 1])  # in the same recorded memory
    flying = [ahead.launch(first), ahead.launch(second)]
    agree_on_features(flying[0].wait(), plain.run(first))
    agree_on_features(flying[1].wait(), plain.run(second))


PROMPTS = [
    Part(TOKENS, 11, 12, BLOCKS[3]),
    Part(TOKENS * 2, 0, 60, [*BLOCKS[0], *BLOCKS[4]]),
    Part(TOKENS, 4, 34, [*BLOCKS[1], *BLOCKS[2]]),
]


def test_prompts_beyond_what_is_recorded_are_not_replayed() -> None:
    agree(pack_step(PROMPTS, BLOCK_SIZE, temperature=1.0), replays=False)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "qwen3"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_prompts_are_replayed_beside_decodes(family: str, temperature: float) -> None:
    agree(pack_step(PROMPTS, BLOCK_SIZE, temperature=temperature), family, limits=WITH_PROMPTS)


def test_of_prompts_only_the_wanted_rows_reach_the_head() -> None:
    ahead = make_ahead(limits=WITH_PROMPTS)
    replayed = count_replays(ahead)
    ahead.run(pack_step(PROMPTS, BLOCK_SIZE))
    assert replayed == [6 * (1 + 4)]


def test_a_chunk_that_samples_nothing_is_replayed_beside_others() -> None:
    inputs = pack_step(PROMPTS, BLOCK_SIZE)
    kept = {name: column[[0, 2]] for name, column in columns(inputs).items()}
    agree(replace(with_sampling(inputs, **kept), logits_rows=inputs.logits_rows[[0, 2]]), limits=WITH_PROMPTS)


@pytest.mark.parametrize("layers", [(), (1, 0)])
def test_drafts_beside_a_prompt_are_judged_and_leave_features(layers: tuple[int, ...]) -> None:
    drafted = Part(TOKENS, 11, 15, BLOCKS[5], range(-1, 2))
    inputs = pack_step([drafted, *PROMPTS], BLOCK_SIZE)
    agree(inputs, limits=WITH_PROMPTS)
    keeping = ForDrafts(keeps_features=True, feature_layers=layers)
    assert agree(inputs, for_drafts=keeping, limits=WITH_PROMPTS).features


def test_trees_beside_a_prompt_are_not_replayed() -> None:
    tree = Part(TOKENS, 11, 15, BLOCKS[5], (-1, -1, 0))
    agree(pack_step([tree, *PROMPTS], BLOCK_SIZE), replays=False, limits=WITH_PROMPTS)


def test_a_short_chunk_is_replayed_whether_it_samples_or_not() -> None:
    inputs = pack_step([Part(TOKENS, 8, 9, BLOCKS[0]), Part(TOKENS, 0, 5, BLOCKS[1])], BLOCK_SIZE)
    agree(inputs)
    unsampled = with_sampling(inputs, **{name: column[:1] for name, column in columns(inputs).items()})
    agree(replace(unsampled, logits_rows=inputs.logits_rows[:1]))
    nothing = with_sampling(inputs, **{name: column[:0] for name, column in columns(inputs).items()})
    assert agree(replace(nothing, logits_rows=inputs.logits_rows[:0])).rows.token_ids == []


def columns(inputs: StepInputs) -> dict[str, np.ndarray]:
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "position", "num_logprobs")
    return {name: getattr(inputs.sampling, name) for name in names}


MIXED = {
    "temperature": np.array([0.0, 1.0, 1.3, 0.8, 2.0], np.float32),
    "top_k": np.array([0, 3, 0, 0, 50], np.int32),
    "top_p": np.array([1.0, 1.0, 0.6, 1.0, 0.9], np.float32),
    "min_p": np.array([0.0, 0.0, 0.0, 0.1, 0.01], np.float32),
    "seed": np.array([1, -2, 3, 4, 2**60], np.int64),
}
ASKING: dict[str, dict[str, Any]] = {
    "logprobs": {"num_logprobs": np.array([-1, 2, 0, -1, -1], np.int32)},
    "adjustments": {"adjustments": (LogitAdjustment(row=1, banned_token_ids=(3, 4)),)},
    "nothing": {},
}


@pytest.mark.parametrize("asked", ASKING)
def test_rows_of_every_kind_in_one_step(asked: str) -> None:
    inputs = with_sampling(decode(range(5), 12), **MIXED, **ASKING[asked])
    agree(inputs)
    longer = Part(TOKENS, 3, 34, [*BLOCKS[4], *BLOCKS[5]])
    parts = [Part(TOKENS, 9, 10, BLOCKS[row]) for row in range(4)]
    prefill = pack_step([*parts, longer], BLOCK_SIZE)
    agree(with_sampling(prefill, **MIXED, **ASKING[asked]), replays=False)


def unknown(rows: Sequence[int], stop: int, previous: Sequence[int], temperature: float) -> StepInputs:
    inputs = decode(rows, stop, temperature)
    inputs.token_ids[np.array(previous) >= 0] = 0
    return replace(inputs, previous_rows=np.array(previous, np.int64))


@pytest.mark.parametrize("asked", ASKING)
@pytest.mark.parametrize("first_is_replayed", [True, False])
def test_tokens_that_only_the_device_knows(asked: str, first_is_replayed: bool) -> None:
    """Three steps at once: rows change places, one is known, the first step is of any kind."""
    plain, ahead = make_plain(), make_ahead()
    fill_with_noise(plain, ahead)
    if not first_is_replayed:
        plain.forward.backend = ahead.parts.forward.backend
        ahead.graphs._steps, kept = {}, ahead.graphs._steps
    first = with_sampling(decode(range(5), 12), **MIXED, **ASKING[asked])
    drawn = plain.run(first).rows.token_ids
    second = decode([4, 0, 5, 2], 13, 0.9)
    second.token_ids[:] = [drawn[4], drawn[0], TOKENS[3], drawn[2]]
    drawn_next = plain.run(second).rows.token_ids
    third = decode([5, 4], 14)
    third.token_ids[:] = [drawn_next[2], drawn_next[0]]
    expected = plain.run(third).rows.token_ids

    flying = [ahead.launch(first)]
    if not first_is_replayed:
        ahead.graphs._steps = kept
    launched = unknown([4, 0, 5, 2], 13, [4, 0, -1, 2], 0.9)
    launched.token_ids[2] = TOKENS[3]
    flying.append(ahead.launch(launched))
    flying.append(ahead.launch(unknown([5, 4], 14, [2, 0], 0.0)))
    assert [step.wait().rows.token_ids for step in flying] == [drawn, drawn_next, expected]


def adjustments_of(drawn: Sequence[int]) -> tuple[LogitAdjustment, ...]:
    """What hangs on the tokens that rows 0 to 2 had drawn: a penalty, a ban, a bias."""
    history = counted([1, 2], [drawn[0]])
    return (
        LogitAdjustment(row=0, presence_penalty=9.0, repetition_penalty=1.5, history=history),
        LogitAdjustment(row=1, banned_token_ids=(drawn[1], 5)),
        LogitAdjustment(row=2, logit_bias=((drawn[2], 30.0),)),
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("recorded", [True, False])
def test_a_pass_may_run_before_it_is_known_how_it_is_drawn(recorded: bool, temperature: float) -> None:
    """And the step behind it takes its tokens, as ever."""
    plain, ahead = make_plain(), make_ahead()
    fill_with_noise(plain, ahead)
    if not recorded:
        ahead.graphs._steps.clear()
    first = decode([0, 1, 2, 3], 12, temperature)
    drawn = plain.run(first).rows.token_ids
    second = decode([0, 1, 2, 3], 13, temperature)
    second.token_ids[:] = drawn
    columns = with_sampling(second, num_logprobs=np.array([3, -1, 0, -1], np.int32))
    adjusted = with_sampling(columns, adjustments=adjustments_of(drawn))
    expected = plain.run(adjusted).rows
    third = decode([3, 0], 14)
    third.token_ids[:] = [expected.token_ids[3], expected.token_ids[0]]
    last = plain.run(third).rows.token_ids

    flying = [ahead.launch(first)]
    unknown_second = unknown([0, 1, 2, 3], 13, [0, 1, 2, 3], temperature)
    flying.append(ahead.launch(replace(unknown_second, is_drawn_later=True)))
    assert flying[0].wait().rows.token_ids == drawn
    flying[1].draw(adjusted.sampling)
    flying.append(ahead.launch(unknown([3, 0], 14, [3, 0], 0.0)))
    ours = flying[1].wait().rows
    assert (ours.token_ids, ours.row_errors) == (expected.token_ids, None)
    agree_on_logprobs(ours.logprobs or (), expected.logprobs or ())
    assert flying[2].wait().rows.token_ids == last


def test_a_pass_that_is_never_drawn_is_waited_for_all_the_same() -> None:
    runner = make_ahead()
    fill_with_noise(runner)
    result = runner.launch(replace(decode([0, 1], 9), is_drawn_later=True)).wait()
    assert result.rows == SampledRows([]) and result.forward_s > 0
    assert len(runner.run(decode([0, 1], 9)).rows.token_ids) == 2, "and others go on"


def test_a_later_draw_may_be_left_to_the_sampler() -> None:
    plain, ahead = make_plain(), make_ahead()
    fill_with_noise(plain, ahead)
    odd = with_sampling(decode([0, 1], 9, 1.0), top_k=np.array([0, np.iinfo(np.int32).min], np.int32))
    step = ahead.launch(replace(odd, is_drawn_later=True))
    step.draw(odd.sampling)
    assert step.wait().rows == plain.run(odd).rows


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_chains_whose_rows_are_adjusted_are_judged_late(temperature: float) -> None:
    inputs = verify([0, 1, 2], [3, 0, 4], temperature)
    rows = range(inputs.sampling.num_rows)
    adjustments = tuple(LogitAdjustment(row=row, banned_token_ids=(row, 7)) for row in rows if row != 4)
    nothing = LogitAdjustment(row=4, allowed_token_ids=())
    agree(with_sampling(inputs, adjustments=(*adjustments[:4], nothing, *adjustments[4:])))


def test_rows_behind_refused_drafts_that_nothing_is_left_for_are_not_spoiled() -> None:
    """They are finite: what they wrote may be read again."""
    inputs = verify([0], [3], 1.0)
    nothing = tuple(LogitAdjustment(row=row, allowed_token_ids=()) for row in (2, 3))
    rows = agree(with_sampling(inputs, adjustments=nothing)).rows
    assert rows.token_ids[1:] == [-1] * 3 and rows.spoiled_rows == ()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_with_logprobs_are_judged_late(temperature: float) -> None:
    """Of some sequences, each as many as it asks for, and none of refused drafts."""
    inputs = verify([0, 1, 2], [2, 1, 3], temperature)
    num_logprobs = np.repeat([2, -1, 0], [3, 2, 4]).astype(np.int32)
    inputs = with_sampling(inputs, num_logprobs=num_logprobs)
    logprobs = agree(inputs).rows.logprobs
    assert logprobs is not None
    assert [record is not None for record in logprobs][3:5] == [False, False]
    ahead = make_ahead()
    never_judged_while_launched(ahead)
    assert ahead.run(inputs).rows.logprobs


def test_rows_of_drafts_that_fail_have_no_logprobs() -> None:
    plain, ahead = make_plain(), make_ahead()
    fill_with_noise(plain, ahead)
    for runner in (plain, ahead):
        runner.kv.values[0][BLOCKS[1][0]] = torch.nan
    inputs = verify([0, 1, 2], [1, 1, 2])
    inputs = with_sampling(inputs, num_logprobs=np.full(inputs.sampling.num_rows, 1, np.int32))
    ours, expected = ahead.run(inputs).rows, plain.run(inputs).rows
    assert ours.row_errors == expected.row_errors == {2: NOT_FINITE}
    assert ours.spoiled_rows == expected.spoiled_rows and ours.logprobs is not None
    assert ours.logprobs[2] is ours.logprobs[3] is None
    agree_on_logprobs(ours.logprobs, expected.logprobs or ())


def test_a_step_behind_drafts_finds_the_last_token_of_each() -> None:
    plain, ahead = make_plain(), make_ahead()
    fill_with_noise(plain, ahead)
    inputs = verify([0, 1], [0, 2])
    expected = plain.run(inputs).rows.token_ids
    follower = decode([0], 12)
    follower.token_ids[:] = expected[0]
    flying = [ahead.launch(inputs), ahead.launch(unknown([0], 12, [0], 0.0))]
    assert flying[0].wait().rows.token_ids == expected
    assert flying[1].wait().rows == plain.run(follower).rows


def test_rows_that_are_not_finite_fail_alone() -> None:
    """And a step launched behind them runs on: what it makes of them is thrown away."""
    plain, ahead = make_plain(), make_ahead()
    fill_with_noise(plain, ahead)
    for runner in (plain, ahead):
        runner.kv.values[0][BLOCKS[1][0]] = torch.nan
    for inputs in (decode([0, 1, 2], 9, 1.0), verify([1, 2], [2, 2])):
        expected = plain.run(inputs).rows
        assert expected.row_errors
        flying = [ahead.launch(inputs), ahead.launch(unknown([0, 1], 9, [0, 1], 0.0))]
        ours = flying[0].wait().rows
        for row in expected.row_errors:
            ours.token_ids[row] = expected.token_ids[row]  # means nothing
        assert ours == expected
        assert list(flying[1].wait().rows.row_errors or ()) == [1]


def chain(asked: str, num_steps: Sequence[int]) -> tuple[StepInputs, FollowingSteps]:
    """A step of three sequences, and so many behind it of each."""
    first = with_sampling(decode([0, 1, 2], 9, 0.9 if asked == "all" else 0.0), seed=np.arange(3))
    if asked == "all":
        top_p, top_k = np.array([1, 0.7, 1], np.float32), np.array([0, 0, 5], np.int32)
        first = with_sampling(first, top_p=top_p, top_k=top_k)
    steps = FollowingSteps.behind(first, np.array(num_steps), BLOCK_SIZE)
    assert steps is not None
    return first, steps


@pytest.mark.parametrize("asked", ["nothing", "all"])
@pytest.mark.parametrize("num_steps", [[3, 3, 3], [5, 0, 2], [1, 4, 0]])
def test_steps_that_follow_one_another_draw_what_they_draw_one_by_one(
    asked: str, num_steps: list[int]
) -> None:
    """Recorded and told at once, or each launched by itself: the tokens of single steps, and their K/V."""
    first, steps = chain(asked, num_steps)
    alone, recorded, apart = make_plain(), make_ahead(), make_ahead()
    apart.graphs._steps.clear()
    fill_with_noise(alone, recorded, apart)
    rows = alone.run(first).rows.token_ids
    expected = np.full(steps.slots.shape, -1)
    last = np.array(rows)[steps.previous_rows]
    for number in range(len(steps)):
        goes_on = steps.slots[number] >= 0
        inputs = replace(steps.step(number), token_ids=last[goes_on], previous_rows=None)
        last[goes_on] = expected[number, goes_on] = alone.run(inputs).rows.token_ids
    replayed = count_replays(recorded)
    for ahead in (recorded, apart):
        step = ahead.launch(first)
        with WaitingRefused():  # type: ignore[no-untyped-call]
            rest = ahead.follow(steps)
        assert step.wait().rows.token_ids == rows
        assert np.where(steps.slots >= 0, rest.wait(), -1).tolist() == expected.tolist()
        for mine, theirs in zip(ahead.kv.tensors, alone.kv.tensors, strict=True):
            torch.testing.assert_close(mine, theirs)
    assert len(replayed) == 1 + len(steps)


def test_of_steps_that_follow_one_another_a_row_that_is_not_finite_fails_alone() -> None:
    first, steps = chain("all", [3, 3, 3])
    ahead = make_ahead()
    fill_with_noise(ahead)
    expected = (ahead.launch(first), ahead.follow(steps))[1].wait()
    ahead.kv.values[0][BLOCKS[1][0]] = torch.nan
    found = (ahead.launch(first), ahead.follow(steps))[1].wait()
    assert (found[:, 1] == -1).all()
    assert found[:, [0, 2]].tolist() == expected[:, [0, 2]].tolist()


def test_where_a_step_that_follows_fails_the_device_is_done_with_those_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, steps = chain("nothing", [3, 3, 3])
    ahead = make_ahead()
    waited: list[object] = []
    ahead.launch(first)
    monkeypatch.setattr("engine.compute.cuda.cuda_runner.wait_for", waited.append)
    replayed = count_replays(ahead)
    ahead.graphs.module.register_forward_hook(
        lambda *_: failing(RuntimeError("lost"))() if len(replayed) == 2 else None
    )
    with pytest.raises(RuntimeError, match="lost"):
        ahead.follow(steps)
    assert len(waited) == 1 and len(replayed) == 2


def test_blocks_are_moved_first() -> None:
    plain, ahead = make_plain(), make_ahead()
    fill_with_noise(plain, ahead)
    inputs = replace(
        decode([0], 9),
        moves=BlockMoves(scrub_blocks=(60,), block_copies=(BlockCopy(3, 61),), swap_out=(BlockCopy(2, 1),)),
    )
    plain.run(inputs)
    result = ahead.run(inputs)
    assert result.swap_bytes == ahead.kv.block_bytes and result.swap_s > 0
    for mine, theirs in zip(ahead.kv.tensors, plain.kv.tensors, strict=True):
        assert torch.equal(mine, theirs)


def test_times_what_it_does() -> None:
    result = make_ahead().run(decode([0], 9))
    assert 0 < result.forward_s < 10 and 0 < result.sample_s < 10 and result.swap_s == 0


def test_what_is_recorded() -> None:
    recorder = Playback()
    runner = make_ahead(recorder=recorder)
    assert set(runner.graphs.shapes) == {
        *(GraphShape(size) for size in (1, 2, 4, 8)),
        *(GraphShape(size, MAX_QUERY_LEN) for size in (8, 16, 32)),
    }
    assert recorder.num_recorded == 2 * len(runner.graphs.shapes), "a pass and a draw each"


def test_warming_up_leaves_the_kv_alone() -> None:
    runner = CudaRunner(make_plain(), 64, LIMITS, Playback())
    fill_with_noise(runner)
    before = [tensor.clone() for tensor in runner.kv.tensors]
    runner.warm_up()
    assert runner.graphs.shapes
    for tensor, was in zip(runner.kv.tensors, before, strict=True):
        assert torch.equal(tensor, was)


def test_the_draws_it_is_given_are_warmed_up_and_draw_all_filtered_rows_at_once() -> None:
    drawn: list[int] = []

    def draw(
        logits: torch.Tensor, places: torch.Tensor, filters: Filters, keys: torch.Tensor
    ) -> torch.Tensor:
        drawn.append(len(places))
        return draw_filtered(logits, places, filters, keys)

    runner = CudaRunner(make_plain(), 64, LIMITS, Playback(), TORCH_DRAWS._replace(filtered=draw))
    runner.warm_up()
    assert drawn == [1, 1], "of logits as they are and of adjusted ones"
    runner.run(with_sampling(decode(range(5), 9, 1.0), top_k=np.array([0, 3, 0, 1, 2], np.int32)))
    assert drawn == [1, 1, 3]


def test_what_recordings_take_of_a_device_is_told_beside_what_was_foreseen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left = [5 << 30, 4 << 30]
    gauge = SimpleNamespace(free_and_total=lambda: (left.pop(0), 8 << 30))
    monkeypatch.setattr(step_graphs, "gauge_of", lambda device: gauge)
    with caplog.at_level(logging.INFO):
        make_ahead(recorder=Playback())
    foreseen = rough_size(step_graphs.graph_bytes(load_tiny("llama"), LIMITS))
    assert caplog.messages[-1] == f"they take 1.00 GiB of memory; {foreseen} are set aside for them"


def test_what_cannot_be_recorded_runs_as_before(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        runner = make_ahead(recorder=Playback(None, None, RuntimeError("it waits for the device\nmore")))
    assert runner.graphs.shapes == ()
    assert [record.getMessage() for record in caplog.records] == [
        "0 kinds of steps are CUDA graphs, no more: it waits for the device"
    ]
    assert len(runner.run(decode([0, 1], 9)).rows.token_ids) == 2


def test_what_memory_does_not_allow_runs_as_before(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        runner = make_ahead(recorder=Playback(*[None] * 5, torch.OutOfMemoryError("full")))
    assert len(runner.graphs.shapes) == 2
    assert "2 kinds of steps are CUDA graphs, no more: out of memory" in caplog.text
    assert len(runner.run(decode([0, 1], 9)).rows.token_ids) == 2


def failing(error: Exception) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "expected"),
    [(torch.OutOfMemoryError("full"), OutOfDeviceMemory), (RuntimeError("broken"), RuntimeError)],
)
def test_a_hook_reaches_passes_that_are_replayed(error: Exception, expected: type[Exception]) -> None:
    runner = make_ahead()
    for module in runner.pass_modules:
        module.register_forward_pre_hook(failing(error))
    with pytest.raises(expected):
        runner.launch(decode([0], 9))


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("stage", ["pass", "draw"])
@pytest.mark.parametrize("waits", [None, RuntimeError("the device is lost")])
def test_where_a_step_fails_the_device_is_done_with_it_first(
    waits: Exception | None, stage: str, later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks may be filled from the disk then, in another stream."""
    runner = make_ahead()
    moments: list[float] = []

    def fail(*_: object) -> None:
        moments.append(time.perf_counter())
        raise RuntimeError("broken")

    def wait(moment: float) -> None:
        moments.append(moment)
        if waits is not None:
            raise waits

    monkeypatch.setattr("engine.compute.cuda.cuda_runner.wait_for", wait)
    if stage == "pass":
        runner.pass_modules[0].register_forward_hook(fail)
    else:
        monkeypatch.setattr(runner._draw, "queue", fail)
    inputs = replace(decode([0], 9), is_drawn_later=later)
    with pytest.raises(RuntimeError, match="broken"):
        runner.launch(inputs).draw(inputs.sampling)
    failed, waited = moments
    assert waited >= failed, "for all that was queued by then"


def make_faulty_ahead(ahead: CudaRunner, *faults: PlannedFault) -> tuple[FaultyAheadRunner, StepOwners]:
    """A runner with these faults, and who is to be told whom steps are for: requests 1 and 2."""
    plan, owners = FaultCounter(faults), StepOwners()
    runner = make_faulty(plan, owners, ahead, ahead.parts.forward.loaded)
    assert isinstance(runner, FaultyAheadRunner)
    return runner, owners


@pytest.mark.parametrize("recorded", [True, False])
def test_planned_faults_reach_passes_of_either_kind(recorded: bool) -> None:
    ahead = make_ahead()
    if not recorded:
        ahead.graphs._steps.clear()
    faults = [
        PlannedFault("forward_raise", at=1),
        PlannedFault("logits_nan", at=1, count=2),
    ]
    runner, owners = make_faulty_ahead(ahead, *faults)
    inputs = decode([0, 1], 9, 1.0)
    owners.note(inputs, (1, 2))
    failing = runner.launch(inputs)
    with pytest.raises(RuntimeError, match="has this pass fail"):
        failing.wait()
    assert runner.run(inputs).rows.row_errors == dict.fromkeys((0, 1), NOT_FINITE)
    rows = runner.run(inputs).rows
    assert rows.row_errors is None and len(rows.token_ids) == 2


@pytest.mark.parametrize("victim", [1, 2])
def test_a_planned_fault_of_a_recorded_prompt_hits_the_row_of_its_request(victim: int) -> None:
    """Such a recording has more places than the step has rows, and fewer than it has tokens."""
    ahead = make_ahead(limits=WITH_PROMPTS)
    replayed = count_replays(ahead)
    runner, owners = make_faulty_ahead(ahead, PlannedFault("logits_nan", request=victim))
    parts = [Part(TOKENS[row:] + TOKENS, 4, 20, BLOCKS[row]) for row in (0, 1)]
    inputs = pack_step(parts, BLOCK_SIZE)
    owners.note(inputs, (1, 2))
    assert runner.run(inputs).rows.row_errors == {victim - 1: NOT_FINITE}
    assert replayed and replayed[0] != len(inputs.logits_rows)


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("point", ["logits_nan", "sampler_raise"])
def test_a_planned_fault_hits_a_row_that_is_drawn_later(point: FaultPoint, recorded: bool) -> None:
    ahead = make_ahead(sampler=FaultySampler)
    if not recorded:
        ahead.graphs._steps.clear()
    runner, owners = make_faulty_ahead(ahead, PlannedFault(point, request=2))
    inputs = replace(decode([0, 1], 9), is_drawn_later=True)
    owners.note(inputs, (1, 2))
    step = runner.launch(inputs)
    step.draw(inputs.sampling)
    rows = step.wait().rows
    assert set(rows.row_errors or ()) == {1}
    assert rows.token_ids[0] == make_ahead().run(decode([0, 1], 9)).rows.token_ids[0]


def test_where_memory_ends_by_plan_the_launch_says_so() -> None:
    runner, owners = make_faulty_ahead(make_ahead(), PlannedFault("forward_oom"))
    inputs = decode([0, 1], 9)
    owners.note(inputs, (1, 2))
    with pytest.raises(OutOfDeviceMemory):
        runner.launch(inputs)
    assert runner.launch(inputs).wait().rows.row_errors is None


def test_a_step_that_fails_by_plan_leaves_nothing_right_behind() -> None:
    """Neither its K/V nor its tokens: whatever reads them is found by its text."""
    sound, ahead = make_ahead(), make_ahead()
    fill_with_noise(sound, ahead)
    runner, owners = make_faulty_ahead(ahead, PlannedFault("forward_raise"))
    inputs = decode([0, 1], 9)
    owners.note(inputs, (1, 2))
    step = runner.launch(inputs)
    behind = replace(decode([0, 1], 10), previous_rows=np.array([0, 1]))
    owners.note(behind, (1, 2))
    last = runner.launch(behind)
    with pytest.raises(RuntimeError, match="has this pass fail"):
        step.wait()
    sound.launch(inputs)
    assert last.wait().rows.token_ids != sound.launch(behind).wait().rows.token_ids
    pairs = zip(ahead.kv.tensors, sound.kv.tensors, strict=True)
    assert not any(torch.equal(mine, theirs) for mine, theirs in pairs)
