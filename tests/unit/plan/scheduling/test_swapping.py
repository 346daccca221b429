"""Preemption by swap, and its bounds."""

from typing import Any

import pytest

from engine.plan.request import FinishReason, Request, RequestStatus
from engine.plan.scheduling.batcher import ContinuousBatcher
from engine.plan.step_records import BatchDecision, BlockMoves, StepInputs
from tests.support.factories import make_batcher, make_request, make_runner, preempted, run_step, shape_of
from tests.support.fakes import FakeRunner, expected_output


def inputs_of(decision: BatchDecision) -> StepInputs:
    assert decision.inputs is not None
    return decision.inputs


def start(
    num_host_blocks: int = 8, preemption: str = "swap", **further: Any
) -> tuple[ContinuousBatcher, FakeRunner, Request, Request]:
    """Two requests of which the next step swaps out b; no block is free."""
    batcher = make_batcher(
        num_blocks=5, max_model_len=20, num_host_blocks=num_host_blocks, preemption=preemption, **further
    )
    runner = make_runner(batcher)
    a, b = make_request("a", 8, arrival=0, max_tokens=8), make_request("b", 7, arrival=1, max_tokens=6)
    batcher.add(a)
    batcher.add(b)
    run_step(batcher, runner)
    run_step(batcher, runner)
    assert [batcher.kv.block_ids(name) for name in "ab"] == [(0, 1, 4), (2, 3)]
    return batcher, runner, a, b


def finish(batcher: ContinuousBatcher, runner: FakeRunner, *requests: Request) -> None:
    """Run to the end, with the right text and nothing held."""
    while batcher.has_work:
        run_step(batcher, runner)
        batcher.kv.check_integrity()
    for request in requests:
        prompt = request.token_ids[: request.num_prompt_tokens]
        assert request.output_token_ids == expected_output(prompt, request.sampling.max_tokens)
    assert batcher.kv.num_used_blocks == 0
    assert batcher.kv.host.num_free == batcher.kv.host.num_blocks


def test_kv_goes_to_the_host_and_comes_back() -> None:
    batcher, runner, a, b = start()
    decision, _ = run_step(batcher, runner)
    assert (decision.preempted, decision.swapped) == (("b",), ("b",))
    assert inputs_of(decision).moves.swap_out == ((2, 0), (3, 1))
    assert (b.status, b.num_computed_tokens, b.num_preemptions) == (RequestStatus.SWAPPED, 8, 1)
    assert b.preemptions[0][1] == "swap"
    assert (batcher.kv.host.num_saved, len(batcher.queue)) == (1, 1)
    while b.status is RequestStatus.SWAPPED:
        decision, _ = run_step(batcher, runner)
    assert shape_of(decision) == [("b", 8, 1, True)], "nothing is computed again"
    assert inputs_of(decision).moves.swap_in == ((0, 2), (1, 3))
    assert batcher.kv.host.num_saved == 0
    decision, _ = run_step(batcher, runner)
    assert (inputs_of(decision).moves.swap_out, inputs_of(decision).moves.swap_in) == ((), ())
    finish(batcher, runner, a, b)


def test_who_was_swapped_out_resumes_before_who_never_ran() -> None:
    batcher, runner, _, b = start()
    run_step(batcher, runner)
    c = make_request("c", 1, arrival=-1, max_tokens=1)
    batcher.add(c)
    order = []
    while batcher.has_work:
        _, committed = run_step(batcher, runner)
        order += [token.request.request_id for token in committed if token.finish_reason is not None]
    assert order == ["a", "c", "b"]
    assert b.num_preemptions == 1


def test_blocks_still_found_on_the_device_are_not_copied_back() -> None:
    batcher, runner, _, b = start(prefix_caching=True)
    run_step(batcher, runner)
    batcher.finish("a", FinishReason.ABORT)
    decision, _ = run_step(batcher, runner)
    assert shape_of(decision) == [("b", 8, 1, True)]
    assert batcher.kv.block_ids("b")[:2] == (2, 3)
    assert inputs_of(decision).moves.swap_in == ()
    finish(batcher, runner, b)


def test_a_full_host_means_recompute() -> None:
    batcher, runner, a, b = start(num_host_blocks=1)
    decision, _ = run_step(batcher, runner)
    assert (decision.preempted, decision.swapped) == (("b",), ())
    assert (b.status, b.num_computed_tokens) == (RequestStatus.PREEMPTED, 0)
    assert b.preemptions[0][1] == "recompute"
    finish(batcher, runner, a, b)


def test_auto_goes_by_the_measured_costs() -> None:
    batcher, runner, _, b = start(preemption="auto", kv_block_bytes=1000)
    for num_prefill in (0, 100, 200, 300) * 8:
        batcher.rates.observe(num_prefill, 1, 0.01 + 0.001 * num_prefill)
    batcher.rates.observe_swap(1_000, 0.001)  # 4 ms for what takes 8 to compute
    run_step(batcher, runner)
    assert b.status is RequestStatus.SWAPPED


def test_a_swapped_request_that_is_cancelled_leaves_the_host() -> None:
    batcher, runner, a, b = start()
    decision = batcher.step()
    assert batcher.kv.host.num_free == 6
    assert batcher.finish("b", FinishReason.ABORT) is b
    assert batcher.kv.host.num_free == 8
    batcher.commit(decision, runner.run(inputs_of(decision)).rows)
    finish(batcher, runner, a)


def test_a_request_cancelled_while_it_comes_back_leaves_nothing() -> None:
    batcher, runner, _, b = start()
    run_step(batcher, runner)
    batcher.finish("a", FinishReason.ABORT)
    decision = batcher.step()
    assert inputs_of(decision).moves.swap_in != ()
    batcher.finish("b", FinishReason.ABORT)
    batcher.commit(decision, runner.run(inputs_of(decision)).rows)
    finish(batcher, runner)
    assert b.status is RequestStatus.FINISHED


def test_kv_that_may_not_have_been_saved_is_computed_again() -> None:
    batcher, runner, a, b = start()
    batcher.abandon(batcher.step())
    assert (b.status, b.num_computed_tokens, b.num_preemptions) == (RequestStatus.PREEMPTED, 0, 1)
    assert (batcher.kv.host.num_saved, batcher.kv.host.num_free) == (0, 8)
    assert inputs_of(run_step(batcher, runner)[0]).moves.swap_out == ()
    finish(batcher, runner, a, b)


def test_kv_that_may_not_have_come_back_is_brought_again() -> None:
    batcher, runner, _, b = start()
    run_step(batcher, runner)
    batcher.finish("a", FinishReason.ABORT)
    decision = batcher.step()
    batcher.abandon(decision)
    again = batcher.step()
    assert inputs_of(again).moves.swap_in == inputs_of(decision).moves.swap_in != ()
    batcher.commit(again, runner.run(inputs_of(again)).rows)
    finish(batcher, runner, b)


def test_who_is_preempted_before_it_is_back_stays_on_the_host() -> None:
    batcher, runner, _, b = start()
    run_step(batcher, runner)
    batcher.finish("a", FinishReason.ABORT)
    batcher.abandon(batcher.step())
    batcher.running.preempt(b)
    assert (b.status, b.num_computed_tokens) == (RequestStatus.SWAPPED, 8)
    assert batcher.kv.host.num_saved == 1
    assert batcher.kv.host.copies() == BlockMoves()


def test_who_gives_way_when_memory_runs_out_is_computed_again() -> None:
    batcher, runner, _, b = start(num_host_blocks=8)
    batcher.finish("a", FinishReason.ABORT)
    c = make_request("c", 2, arrival=2, max_tokens=3)
    batcher.add(c)
    batcher.preempt_for_memory(batcher.step())
    assert (c.status, batcher.kv.host.num_saved) == (RequestStatus.PREEMPTED, 0)
    finish(batcher, runner, b, c)


def test_kv_not_saved_yet_is_given_up_when_its_request_is_seated_again() -> None:
    batcher, runner, _, b = start()
    a_step = batcher.step()
    batcher.commit(a_step, runner.run(inputs_of(a_step)).rows)
    seats, kv = batcher.running, batcher.kv
    batcher.finish("a", FinishReason.ABORT)
    run_step(batcher, runner)
    seats.preempt(b)
    seats.admit(b)
    assert (b.num_computed_tokens, kv.host.num_free, kv.host.copies()) == (0, 8, BlockMoves())


def test_nobody_is_preempted_more_often_than_the_limit() -> None:
    batcher, runner, a, b = start(preemption="recompute", max_preemptions=1)
    run_step(batcher, runner)
    assert b.num_preemptions == 1
    while b.status is not RequestStatus.RUNNING:
        run_step(batcher, runner)
    assert len(batcher.kv.block_ids("b")) == 4, "13 tokens: all that it may ever need"
    finish(batcher, runner, a, b)
    assert b.num_preemptions == 1


@pytest.mark.parametrize(("policy", "max_decode_seqs"), [("fcfs", 2), ("fcfs", 1), ("orca", 1)])
def test_the_oldest_misses_steps_beside_who_must_not_be_preempted(policy: str, max_decode_seqs: int) -> None:
    batcher = make_batcher(num_blocks=5, max_model_len=20, policy=policy, max_decode_seqs=max_decode_seqs)
    runner = make_runner(batcher)
    old = make_request("old", 4, arrival=0, max_tokens=8)
    spent = make_request("spent", 4, arrival=1, max_tokens=8)
    preempted(spent, 8)
    batcher.add(spent)
    batcher.add(old)
    steps = []
    while batcher.has_work:
        decision, _ = run_step(batcher, runner)
        assert decision.preempted == ()
        steps.append([entry.request_id for entry in decision.scheduled])
    assert [] not in steps
    if max_decode_seqs == 2:
        assert steps == [["old", "spent"]] * 5 + [["spent"]] * 3 + [["old"]] * 3
    finish(batcher, runner, old, spent)


@pytest.mark.parametrize("policy", ["fcfs", "orca"])
@pytest.mark.parametrize("max_decode_seqs", [3, 2])
def test_all_that_have_no_slot_miss_the_step(max_decode_seqs: int, policy: str) -> None:
    batcher = make_batcher(num_blocks=5, max_model_len=20, max_decode_seqs=max_decode_seqs, policy=policy)
    runner = make_runner(batcher)
    a, b, c = (make_request(name, 4, arrival=i, max_tokens=4) for i, name in enumerate("abc"))
    for request in (a, b, c):
        batcher.add(request)
    while not c.num_output_tokens:
        run_step(batcher, runner)
    preempted(b, 8)
    preempted(c, 8)  # without the blocks that a spent request is seated with
    assert batcher.kv.allocate("somebody", 4 * batcher.kv.pool.num_free)
    held = {name: len(batcher.kv.block_ids(name)) for name in "abc"}
    decision, _ = run_step(batcher, runner)
    assert all(entry.first_position < 4 * held[entry.request_id] for entry in decision.scheduled)
    assert len(decision.scheduled) < max_decode_seqs
    batcher.kv.free("somebody")
    finish(batcher, runner, a, b, c)
