"""Choices of one prompt on a model that keeps state: they begin on a copy of the first one's slot."""

from __future__ import annotations

from typing import Any

import pytest

from engine.plan.kv.paged_kv_manager import Rewindable
from engine.plan.request import FinishReason, Request
from engine.plan.scheduling.batcher import ContinuousBatcher
from engine.plan.step_records import BatchDecision, StateCopy, StepInputs
from tests.support.factories import make_batcher, make_request, make_runner, run_step, shape_of


def state_batcher(rewindable: Rewindable = Rewindable.DRAFTS, **limits: Any) -> ContinuousBatcher:
    """Blocks of 4 tokens, and no snapshots."""
    return make_batcher(rewindable=rewindable, **limits)


def choices(length: int, number: int = 3, max_tokens: int = 4) -> list[Request]:
    """Of one prompt: "a", and its forks "b", "c" …"""
    return [
        make_request(
            name, range(length), arrival=index, max_tokens=max_tokens, fork_of="a" if index else None
        )
        for index, name in enumerate("abcd"[:number])
    ]


def inputs_of(decision: BatchDecision) -> StepInputs:
    assert decision.inputs is not None
    return decision.inputs


def start(batcher: ContinuousBatcher, requests: list[Request]) -> BatchDecision:
    for request in requests:
        batcher.add(request)
    return batcher.step()


def test_forks_begin_on_a_copy_of_the_slot_and_compute_the_last_token_alone() -> None:
    batcher = state_batcher()
    runner = make_runner(batcher)
    decision = start(batcher, choices(10))
    assert shape_of(decision) == [("a", 0, 10, True)]
    assert inputs_of(decision).held_back == (0,), "the state stays before the last token"
    assert batcher.kv.state_at("a") == 9
    batcher.kv.check_integrity()
    batcher.commit(decision, runner.run(inputs_of(decision)).rows)
    decision, _ = run_step(batcher, runner)
    assert shape_of(decision) == [("a", 10, 1, True), ("b", 9, 1, True), ("c", 9, 1, True)]
    inputs = inputs_of(decision)
    assert inputs.moves.state_copies == ((0, 1), (0, 2))
    assert inputs.moves.block_copies == ((2, 3), (2, 4))
    assert (inputs.held_back, inputs.moves.state_restores) == ((), ())
    decision, _ = run_step(batcher, runner)
    assert (inputs_of(decision).moves.state_copies, inputs_of(decision).moves.block_copies) == ((), ())
    while batcher.has_work:
        run_step(batcher, runner)
    batcher.kv.check_integrity()


def test_without_waiting_forks_nothing_is_held_back() -> None:
    batcher = state_batcher()
    decision = start(batcher, choices(10, number=1))
    assert inputs_of(decision).held_back == () and batcher.kv.state_at("a") is None


def test_only_the_chunk_that_ends_the_prompt_is_held_back() -> None:
    batcher = state_batcher(max_num_batched_tokens=6)
    runner = make_runner(batcher)
    assert inputs_of(start(batcher, choices(10))).held_back == ()
    batcher.abandon(batcher._in_flight[0].decision)
    held = [inputs_of(run_step(batcher, runner)[0]).held_back for _ in range(2)]
    assert held == [(), (0,)]


def test_a_state_that_has_moved_on_is_not_copied() -> None:
    """There was no seat in the step behind the prompt: the fork computes its prompt."""
    batcher = state_batcher(max_num_seqs=2)
    runner = make_runner(batcher)
    other = make_request("other", 6, arrival=-1, max_tokens=3)
    decision = start(batcher, [other, *choices(10, number=2, max_tokens=9)])
    assert inputs_of(decision).held_back == (1,)
    batcher.commit(decision, runner.run(inputs_of(decision)).rows)
    copies: list[StateCopy] = []
    shapes: list[list[tuple[str, int, int, bool]]] = []
    while "b" not in {entry[0] for shape in shapes for entry in shape}:
        decision, _ = run_step(batcher, runner)
        copies += inputs_of(decision).moves.state_copies
        shapes.append(shape_of(decision))
    assert shapes[-1][-1] == ("b", 0, 10, True) and copies == []


def test_a_prompt_of_one_token_has_no_state_to_copy() -> None:
    batcher = state_batcher()
    runner = make_runner(batcher)
    assert inputs_of(start(batcher, choices(1))).held_back == ()
    batcher.abandon(batcher._in_flight[0].decision)
    run_step(batcher, runner)
    decision, _ = run_step(batcher, runner)
    assert shape_of(decision)[1:] == [("b", 0, 1, True), ("c", 0, 1, True)]
    assert inputs_of(decision).moves.state_copies == ()


def test_a_failed_step_leaves_no_state_to_fork_from() -> None:
    batcher = state_batcher()
    decision = start(batcher, choices(10))
    batcher.abandon(decision)
    assert batcher.kv.state_at("a") is None
    batcher.kv.check_integrity()


def test_forks_of_a_failed_step_begin_anew() -> None:
    batcher = state_batcher()
    runner = make_runner(batcher)
    decision = start(batcher, choices(10, number=2))
    batcher.commit(decision, runner.run(inputs_of(decision)).rows)
    decision = batcher.step()
    assert inputs_of(decision).moves.state_copies == ((0, 1),)
    batcher.preempt_for_memory(decision)
    firsts: dict[str, int] = {}
    while batcher.has_work:
        decision, _ = run_step(batcher, runner)
        assert inputs_of(decision).moves.state_copies == ()
        for entry in decision.scheduled:
            firsts.setdefault(entry.request_id, entry.first_position)
    assert firsts == {"a": 0, "b": 0}


def test_a_model_that_takes_nothing_back_does_not_fork() -> None:
    batcher = state_batcher(Rewindable.NEVER)
    decision = start(batcher, choices(10))
    assert shape_of(decision) == [("a", 0, 10, True), ("b", 0, 10, True), ("c", 0, 10, True)]
    assert inputs_of(decision).held_back == ()


def test_what_is_held_back_is_not_saved_as_if_it_were_computed() -> None:
    """The prompt ends with a block, behind which the slot's state is not."""
    for number, expected in ((1, ((0, 0),)), (2, ())):
        batcher = make_batcher(rewindable=Rewindable.DRAFTS, num_snapshots=2, prefix_caching=True)
        batcher.running.lookup.stops.least = 8
        decision = start(batcher, choices(8, number))
        saves = inputs_of(decision).moves.state_saves
        assert [copy.source for copy in saves] == [source for source, _ in expected]


def test_the_parent_s_end_lets_the_forks_go_alone() -> None:
    batcher = state_batcher()
    runner = make_runner(batcher)
    decision = start(batcher, choices(10, number=2))
    batcher.finish("a", FinishReason.ABORT)
    batcher.commit(decision, runner.run(inputs_of(decision)).rows)
    decision, _ = run_step(batcher, runner)
    assert shape_of(decision) == [("b", 0, 10, True)]


@pytest.mark.parametrize("num_tokens", [0, 10, 11])
def test_a_state_that_cannot_be_there_is_found(num_tokens: int) -> None:
    batcher = state_batcher()
    start(batcher, choices(10))
    batcher.kv.hold_state("a", num_tokens)
    with pytest.raises(AssertionError, match="no state behind"):
        batcher.kv.check_integrity()
