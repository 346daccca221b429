"""Preemption by swap on a model that keeps state: a request's state goes to the host with its blocks."""

from __future__ import annotations

from typing import Any

import pytest

from engine.plan.kv.paged_kv_manager import Rewindable
from engine.plan.request import FinishReason, Request, RequestStatus
from engine.plan.scheduling.batcher import ContinuousBatcher
from engine.plan.step_records import BatchDecision, StepInputs
from tests.support.factories import make_batcher, make_request, make_runner, run_step, shape_of
from tests.support.fakes import FakeRunner, expected_output


def inputs_of(decision: BatchDecision) -> StepInputs:
    assert decision.inputs is not None
    return decision.inputs


def start(**limits: Any) -> tuple[ContinuousBatcher, FakeRunner, Request, Request]:
    """Two requests of which the next step swaps out b, in row 1; no block is free."""
    room: dict[str, Any] = {"num_host_blocks": 8, "num_host_states": 2, "preemption": "swap"} | limits
    batcher = make_batcher(num_blocks=5, max_model_len=20, rewindable=Rewindable.DRAFTS, **room)
    runner = make_runner(batcher)
    a, b = make_request("a", 8, arrival=0, max_tokens=8), make_request("b", 7, arrival=1, max_tokens=6)
    batcher.add(a)
    batcher.add(b)
    run_step(batcher, runner)
    run_step(batcher, runner)
    assert [batcher.kv.row(name) for name in "ab"] == [0, 1]
    return batcher, runner, a, b


def finish(batcher: ContinuousBatcher, runner: FakeRunner, *requests: Request) -> None:
    """Run to the end, with the right text and nothing held."""
    while batcher.has_work:
        run_step(batcher, runner)
        batcher.kv.check_integrity()
    for request in requests:
        prompt = request.token_ids[: request.num_prompt_tokens]
        assert request.output_token_ids == expected_output(prompt, request.sampling.max_tokens)
    host = batcher.kv.host
    assert batcher.kv.num_used_blocks == host.num_saved == 0
    assert (host.num_free, len(host._free_states)) == (host.num_blocks, host.num_states)


def swap_in(batcher: ContinuousBatcher, runner: FakeRunner, request: Request) -> BatchDecision:
    """Run until the step that brings it back is decided; not that one."""
    while True:
        decision = batcher.step()
        if request.status is RequestStatus.RUNNING:
            return decision
        if decision.inputs is not None:
            batcher.commit(decision, runner.run(decision.inputs).rows)


def test_a_state_goes_to_the_host_with_its_blocks_and_comes_back() -> None:
    batcher, runner, a, b = start()
    decision, _ = run_step(batcher, runner)
    assert (decision.preempted, decision.swapped) == (("b",), ("b",))
    inputs = inputs_of(decision)
    assert (inputs.moves.states_out, inputs.moves.states_in) == (((1, 0),), ())
    assert inputs.moves.swap_out == ((2, 0), (3, 1))
    assert b.num_computed_tokens == 8
    decision, _ = run_step(batcher, runner)
    assert inputs_of(decision).moves.states_out == ()
    decision = swap_in(batcher, runner, b)
    inputs = inputs_of(decision)
    row = batcher.kv.row("b")
    assert (inputs.moves.states_out, inputs.moves.states_in) == ((), ((0, row),))
    assert ("b", 8, 1, True) in shape_of(decision), "nothing is computed again"
    batcher.commit(decision, runner.run(inputs).rows)
    decision, _ = run_step(batcher, runner)
    assert inputs_of(decision).moves.states_in == ()
    finish(batcher, runner, a, b)


@pytest.mark.parametrize("room", [{"num_host_states": 0}, {"num_host_blocks": 1}])
def test_without_room_for_both_it_is_computed_again(room: dict[str, int]) -> None:
    batcher, runner, a, b = start(**room)
    decision, _ = run_step(batcher, runner)
    assert (decision.preempted, decision.swapped) == (("b",), ())
    assert (inputs_of(decision).moves.states_out, b.num_computed_tokens) == ((), 0)
    finish(batcher, runner, a, b)


def test_what_swapping_moves_decides_where_rates_are_known() -> None:
    for state_bytes, swapped in ((0, ("b",)), (10**9, ())):
        batcher, runner, a, b = start(preemption="auto", kv_block_bytes=1000, state_bytes=state_bytes)
        for num_prefill in (0, 100, 200, 300) * 8:
            batcher.rates.observe(num_prefill, 1, 0.01 + 0.001 * num_prefill)
        batcher.rates.observe_swap(1_000, 0.001)
        decision, _ = run_step(batcher, runner)
        assert decision.swapped == swapped
        finish(batcher, runner, a, b)


def test_a_state_that_may_not_have_been_saved_is_given_up() -> None:
    batcher, runner, a, b = start()
    batcher.abandon(batcher.step())
    assert (b.num_computed_tokens, b.status) == (0, RequestStatus.PREEMPTED)
    batcher.kv.check_integrity()
    assert batcher.kv.host.num_saved == 0
    batcher.running.restart(a)
    finish(batcher, runner, a, b)


def test_a_failed_pass_that_should_have_brought_it_back_has_it_computed_again() -> None:
    batcher, runner, _a, b = start()
    run_step(batcher, runner)
    batcher.abandon(swap_in(batcher, runner, b))
    assert b.num_computed_tokens == 8 and "b" in batcher.kv.host
    assert batcher.running.restart(b)
    assert b.num_computed_tokens == 0 and "b" not in batcher.kv.host
    batcher.kv.check_integrity()
    finish(batcher, runner, b)


def test_who_ends_on_the_host_leaves_nothing_there() -> None:
    batcher, runner, a, _b = start()
    run_step(batcher, runner)
    batcher.finish("b", FinishReason.ABORT)
    batcher.kv.check_integrity()
    finish(batcher, runner, a)


def test_a_state_that_was_not_copied_into_its_slot_yet_is_not_saved() -> None:
    batcher = make_batcher(
        rewindable=Rewindable.DRAFTS, num_host_blocks=8, num_host_states=2, preemption="swap"
    )
    runner = make_runner(batcher)
    parent = make_request("a", 10, arrival=0, max_tokens=4)
    child = make_request("b", range(10), arrival=1, max_tokens=4, fork_of="a")
    batcher.add(parent)
    batcher.add(child)
    run_step(batcher, runner)
    batcher.queue.remove("b")
    batcher.running.admit(child)
    assert child.num_computed_tokens == 9
    batcher.running.preempt(child)
    assert child.status is RequestStatus.PREEMPTED
    batcher.kv.check_integrity()


def test_published_blocks_are_found_as_far_as_they_go_and_no_snapshot_is_taken() -> None:
    """The state comes from the host: no snapshot behind an earlier block may stand in its place."""
    batcher, runner, _a, b = start(prefix_caching=True, num_snapshots=4)
    run_step(batcher, runner)
    inputs = inputs_of(swap_in(batcher, runner, b))
    assert inputs.moves.state_restores == () and len(inputs.moves.states_in) == 1
    assert len(inputs.moves.swap_in) <= 2
