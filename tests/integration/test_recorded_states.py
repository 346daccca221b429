"""Recorded steps of models that carry state give what plain ones give: on a CPU that plays them back."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.compute.cuda.cuda_runner import CudaRunner
from engine.compute.cuda.graphs.step_graphs import GraphLimits
from engine.compute.recurrent.recurrent_runner import RecurrentRunner
from engine.compute.runner.dummy_steps import Part
from engine.compute.runner.model_runner import ForDrafts
from engine.errors import RewindError
from engine.plan.step_records import BlockMoves, StateCopy, StepInputs, StepResult
from tests.support.device_waits import WaitingRefused
from tests.support.packed import random_tokens
from tests.support.recorded import Playback, TabledReference
from tests.support.recurrent import make_recurrent_runner, pack_slots, whole_logits, with_drafts
from tests.support.tabled_scans import TabledScans
from tests.support.tiny_models import RECURRENT_FAMILIES

UNRECORDED = {"rwkv"}  # its states are advanced by torch's operations alone
RECORDED = [family for family in RECURRENT_FAMILIES if family not in UNRECORDED]
LIMITS = GraphLimits(max_num_seqs=4, max_blocks=16, max_draft_tokens=4, max_tokens=64)
TOKENS = [random_tokens(np.random.default_rng(seed), 40) for seed in range(4)]


def make_plain(family: str, for_drafts: ForDrafts | None = None) -> RecurrentRunner:
    return make_recurrent_runner(family, num_slots=4, max_drafts=4, num_snapshots=2, for_drafts=for_drafts)


def make_ahead(family: str, for_drafts: ForDrafts | None = None) -> CudaRunner:
    runner = make_plain(family, for_drafts)
    runner.forward.loaded = replace(runner.forward.loaded, state_kernel=TabledScans())
    runner.forward.backend = TabledReference()
    ahead = CudaRunner(runner, 64, LIMITS, Playback())
    ahead.graphs.record(Playback())
    return ahead


def part(seat: int, first: int, stop: int) -> Part:
    return Part(TOKENS[seat], first, stop, range(16 * seat, 16 * seat + 16))


def prompts(*spans: tuple[int, int, int]) -> StepInputs:
    """Of each seat the tokens from a first one up to a stop."""
    return pack_slots({seat: part(seat, first, stop) for seat, first, stop in spans})


def drafted(spans: Sequence[tuple[int, int, int]], num_drafts: Sequence[int]) -> StepInputs:
    return with_drafts(prompts(*spans), num_drafts)


def count_replays(runner: CudaRunner) -> list[int]:
    """A list that grows with each recorded pass that is replayed: its places."""
    seen: list[int] = []
    runner.pass_modules[0].register_forward_hook(lambda _, __, output: seen.append(output.logits.shape[1]))
    return seen


def agree(ours: StepResult, expected: StepResult) -> None:
    assert ours.rows.token_ids == expected.rows.token_ids
    assert ours.rows.row_errors == expected.rows.row_errors
    assert (ours.features is None) == (expected.features is None)
    for own, same in zip(ours.features or (), expected.features or (), strict=True):
        assert isinstance(own, torch.Tensor) and isinstance(same, torch.Tensor)
        torch.testing.assert_close(own, same, rtol=1e-4, atol=1e-4)


def agree_on_memory(ahead: CudaRunner, plain: RecurrentRunner) -> None:
    own = ahead.parts.memory
    for mine, theirs in zip(own.kv.tensors, plain.kv.tensors, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert isinstance(ahead.parts, RecurrentRunner)
    for mine, theirs in zip(ahead.parts.states.tensors, plain.states.tensors, strict=True):
        torch.testing.assert_close(mine[:4], theirs[:4], rtol=1e-4, atol=1e-4)


# What seats compute step by step: prompts alone and beside decodes, drafts of which some come true, and the
# steps behind these, with drafts to be taken in and without.
COURSES: dict[str, list[StepInputs]] = {
    "decodes": [
        prompts((0, 0, 5), (2, 0, 9)),
        prompts((2, 9, 10), (0, 5, 6)),
        prompts((0, 6, 7)),
        prompts((0, 7, 8), (2, 10, 11)),
    ],
    "chunks beside decodes": [
        prompts((1, 0, 30)),
        prompts((1, 30, 31), (3, 0, 11)),
        prompts((1, 31, 32), (3, 11, 14), (0, 0, 1)),
        prompts((0, 1, 2), (1, 32, 33), (3, 14, 15)),
    ],
    "drafts, all taken back": [
        prompts((0, 0, 6), (1, 0, 4)),
        drafted([(1, 4, 5), (0, 6, 10)], [0, 3]),
        prompts((0, 7, 8), (1, 5, 6)),
    ],
    "drafts, some kept": [
        prompts((0, 0, 6), (1, 0, 4)),
        drafted([(0, 6, 10), (1, 4, 9)], [3, 4]),
        prompts((0, 9, 10), (1, 6, 7)),
        prompts((0, 10, 11), (1, 7, 8)),
    ],
    "drafts upon drafts": [
        prompts((0, 0, 6), (1, 0, 4), (2, 0, 3)),
        drafted([(2, 3, 4), (0, 6, 10), (1, 4, 9)], [0, 3, 4]),
        drafted([(2, 4, 6), (0, 8, 11), (1, 9, 12)], [1, 2, 2]),
        prompts((2, 5, 6), (0, 9, 10), (1, 12, 13)),
    ],
}


@pytest.mark.by_default
@pytest.mark.parametrize("family", RECORDED)
@pytest.mark.parametrize("course", COURSES)
def test_every_step_is_the_plain_one(family: str, course: str) -> None:
    plain, ahead = make_plain(family), make_ahead(family)
    replayed = count_replays(ahead)
    for number, inputs in enumerate(COURSES[course], 1):
        agree(ahead.run(inputs), plain.run(inputs))
        agree_on_memory(ahead, plain)
        assert len(replayed) == number, "the step was not recorded"


def test_a_decode_takes_no_more_places_than_it_needs() -> None:
    ahead = make_ahead("qwen3_5_hybrid")
    replayed = count_replays(ahead)
    for inputs in COURSES["drafts, some kept"]:
        ahead.run(inputs)
    assert replayed[2:] == [8, 2], "with drafts to be taken in, and without"


@pytest.mark.parametrize("family", ["mamba", "qwen3_next_hybrid", "granite_hybrid"])
def test_tokens_that_only_the_last_launch_knows(family: str) -> None:
    plain, ahead = make_plain(family), make_ahead(family)
    first = prompts((0, 0, 5), (1, 0, 8))
    expected = [plain.run(first).rows.token_ids]
    for number in range(4):
        known = [
            [*TOKENS[seat][:stop], *column]
            for seat, stop, column in zip((0, 1), (5, 8), zip(*expected, strict=True), strict=True)
        ]
        parts = {
            seat: Part(known[seat], stop + number, stop + number + 1, range(16 * seat, 16 * seat + 16))
            for seat, stop in ((0, 5), (1, 8))
        }
        expected.append(plain.run(pack_slots(parts)).rows.token_ids)
    flying = [ahead.launch(first)]
    for number in range(4):
        inputs = prompts((0, 5 + number, 6 + number), (1, 8 + number, 9 + number))
        inputs.token_ids[:] = 0
        flying.append(ahead.launch(replace(inputs, previous_rows=np.array([0, 1]))))
    assert [step.wait().rows.token_ids for step in flying] == expected
    agree_on_memory(ahead, plain)


def test_what_drafters_read_of_layers_is_the_same() -> None:
    for_drafts = ForDrafts(feature_layers=(0, 2))
    plain, ahead = make_plain("qwen3_5_hybrid", for_drafts), make_ahead("qwen3_5_hybrid", for_drafts)
    for inputs in COURSES["drafts upon drafts"]:
        result = plain.run(inputs)
        assert result.features is not None
        agree(ahead.run(inputs), result)


def test_states_are_saved_behind_a_recorded_step_and_gone_on_with() -> None:
    family = "granite_hybrid"
    ahead, tokens = make_ahead(family), TOKENS[0]
    saved = replace(prompts((0, 0, 8)), moves=BlockMoves(state_saves=(StateCopy(0, 1),)))
    ahead.run(saved)
    ahead.run(prompts((0, 8, 9)))
    other = Part(tokens, 8, 12, [0, 1, *range(16, 30)])  # the blocks of the first 8 tokens, and its own
    moves = BlockMoves(state_restores=(StateCopy(1, 3),))
    rows = ahead.run(replace(pack_slots({3: other}), moves=moves)).rows
    assert rows.token_ids == [int(whole_logits(family, tokens[:12])[-1].argmax())]


def test_a_sequence_cannot_go_on_where_its_slot_is_not() -> None:
    ahead = make_ahead("mamba2")
    ahead.run(prompts((0, 0, 5)))
    for first in (3, 7):
        with pytest.raises(RewindError):
            ahead.run(prompts((0, first, first + 1)))


@pytest.mark.parametrize("family", sorted(UNRECORDED))
def test_layers_without_a_kernel_run_as_before(family: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "slipstream.model"):
        ahead = make_ahead(family)
    assert "no kernel advances the states" in caplog.text
    plain, replayed = make_plain(family), count_replays(ahead)
    for inputs in COURSES["drafts upon drafts"]:
        agree(ahead.run(inputs), plain.run(inputs))
        agree_on_memory(ahead, plain)
    assert not replayed


@pytest.mark.parametrize("family", ["rwkv", "mamba", "mamba2"])
@pytest.mark.parametrize("course", COURSES)
def test_what_is_not_recorded_is_not_waited_for_either(family: str, course: str) -> None:
    """States that torch's operations advance, of sequences with as many tokens or others each."""
    plain = make_plain(family)
    runner = CudaRunner(plain, 64, LIMITS, Playback())
    for inputs in COURSES[course]:
        with WaitingRefused():  # type: ignore[no-untyped-call]
            step = runner.launch(inputs)
        assert step.wait().rows.row_errors is None
