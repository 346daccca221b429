"""How requests end, and what failed steps leave behind."""

import pytest

from engine.plan.request import FinishReason, RequestStatus
from engine.plan.scheduling.batcher import ContinuousBatcher
from engine.plan.step_records import SampledRows
from tests.support.factories import make_batcher, make_request, make_runner, run_step, shape_of
from tests.support.fakes import expected_output


def assert_empty(batcher: ContinuousBatcher) -> None:
    assert not batcher.has_work
    assert batcher.kv.num_used_blocks == 0
    batcher.kv.check_integrity()


def test_the_last_token_ends_a_request_and_frees_its_blocks() -> None:
    batcher = make_batcher()
    request = make_request("a", 5, max_tokens=1)
    batcher.add(request)
    decision = batcher.step()
    (token,) = batcher.commit(decision, SampledRows([9]))
    assert token == (request, 9, 0, 6, FinishReason.LENGTH, None)
    assert (request.status, request.finish_reason) == (RequestStatus.FINISHED, FinishReason.LENGTH)
    assert request.output_token_ids == [9]
    assert_empty(batcher)
    assert batcher.finish("a", FinishReason.STOP) is None, "it has ended already"


def test_a_stop_token_ends_a_request() -> None:
    batcher = make_batcher()
    batcher.add(make_request("a", stop_token_ids=frozenset([2])))
    (token,) = batcher.commit(batcher.step(), SampledRows([2]))
    assert token.finish_reason is FinishReason.STOP
    assert_empty(batcher)


def test_rows_belong_to_the_requests_that_sample() -> None:
    batcher = make_batcher(max_num_batched_tokens=7)
    requests = [make_request(name, 3, arrival=i) for i, name in enumerate("abc")]
    for request in requests:
        batcher.add(request)
    decision = batcher.step()
    assert shape_of(decision) == [("c", 0, 1, False), ("a", 0, 3, True), ("b", 0, 3, True)]
    committed = batcher.commit(decision, SampledRows([50, 60]))
    assert [(token.request.request_id, token.token_id, token.row) for token in committed] == [
        ("a", 50, 0),
        ("b", 60, 1),
    ]


def test_a_failed_row_ends_its_request_alone_and_its_blocks_are_scrubbed() -> None:
    batcher = make_batcher(block_size=4)
    a, b = make_request("a", 5, arrival=0), make_request("b", 5, arrival=1)
    batcher.add(a)
    batcher.add(b)
    decision = batcher.step()
    first, second = batcher.commit(decision, SampledRows([7, 8], row_errors={0: "not finite"}))
    assert first == (a, 7, 0, 5, FinishReason.ERROR, "not finite")
    assert (a.status, a.finish_reason) == (RequestStatus.FINISHED, FinishReason.ERROR)
    assert a.output_token_ids == [], "its token was never committed"
    assert second == (b, 8, 1, 6, None, None)
    decision = batcher.step()
    assert decision.inputs is not None
    assert decision.inputs.moves.scrub_blocks == (0, 1)
    batcher.commit(decision, SampledRows([8]))
    decision = batcher.step()
    assert decision.inputs is not None
    assert decision.inputs.moves.scrub_blocks == ()


def test_a_row_that_fails_after_good_ones_is_scrubbed_too() -> None:
    batcher = make_batcher()
    batcher.add(make_request("a", 4, arrival=0))
    batcher.add(make_request("b", 4, arrival=1))
    batcher.commit(batcher.step(), SampledRows([7, 8]))
    batcher.commit(batcher.step(), SampledRows([7, 8], row_errors={1: "not finite"}))
    decision = batcher.step()
    assert decision.inputs is not None
    assert decision.inputs.moves.scrub_blocks == (1, 3)


def test_scrubbing_waits_for_a_step_that_runs() -> None:
    batcher = make_batcher()
    batcher.add(make_request("a"))
    batcher.commit(batcher.step(), SampledRows([7], row_errors={0: "not finite"}))
    assert not batcher.step().scheduled
    batcher.add(make_request("b"))
    decision = batcher.step()
    assert decision.inputs is not None
    assert decision.inputs.moves.scrub_blocks == (0,)
    batcher.abandon(decision)
    decision = batcher.step()
    assert decision.inputs is not None
    assert decision.inputs.moves.scrub_blocks == (0,), "nobody knows whether the abandoned step did it"


def test_a_waiting_request_is_ended_in_the_queue() -> None:
    batcher = make_batcher()
    request = make_request("a")
    batcher.add(request)
    assert batcher.finish("a", FinishReason.ABORT) is request
    assert (request.status, request.finish_reason) == (RequestStatus.FINISHED, FinishReason.ABORT)
    assert batcher.finish("a", FinishReason.ABORT) is None
    assert batcher.finish("never seen", FinishReason.ABORT) is None
    assert_empty(batcher)


def test_a_running_request_is_ended_between_steps() -> None:
    batcher = make_batcher()
    request = make_request("a")
    batcher.add(request)
    run_step(batcher, make_runner(batcher))
    assert batcher.finish("a", FinishReason.STOP) is request
    assert request.finish_reason is FinishReason.STOP
    assert_empty(batcher)


def test_a_request_ended_in_flight_keeps_its_blocks_until_the_step_lands() -> None:
    batcher = make_batcher(block_size=4)
    a, b = make_request("a", 5, arrival=0), make_request("b", 5, arrival=1)
    batcher.add(a)
    batcher.add(b)
    decision = batcher.step()
    assert batcher.finish("a", FinishReason.ABORT) is a
    assert batcher.finish("a", FinishReason.ABORT) is None
    assert len(batcher.running) == 1
    assert batcher.kv.block_ids("a") == (0, 1)
    (token,) = batcher.commit(decision, SampledRows([7, 8]))
    assert (token.request, token.token_id, token.row) == (b, 8, 1)
    assert a.output_token_ids == []
    assert "a" not in batcher.kv
    decision = batcher.step()
    assert decision.inputs is not None
    assert decision.inputs.moves.scrub_blocks == (0, 1), "whatever that step wrote was never checked"
    assert len(batcher.commit(decision, SampledRows([9]))) == 1


def test_an_abandoned_step_is_scheduled_again() -> None:
    batcher = make_batcher()
    runner = make_runner(batcher)
    request = make_request("a", 5, max_tokens=3)
    batcher.add(request)
    first = batcher.step()
    batcher.abandon(first)
    assert request.num_computed_tokens == 0
    decision, _ = run_step(batcher, runner)
    assert decision.scheduled == first.scheduled
    batcher.abandon(batcher.step())
    while batcher.has_work:
        run_step(batcher, runner)
    assert request.output_token_ids == expected_output(request.token_ids[:5], 3)
    assert_empty(batcher)


def test_a_failed_step_of_one_request_ends_it_and_nobody_else() -> None:
    batcher = make_batcher(max_num_seqs=3, max_decode_seqs=2)
    runner = make_runner(batcher)
    requests = [make_request(name, 2, arrival=i) for i, name in enumerate("abcd")]
    for request in requests:
        batcher.add(request)
    run_step(batcher, runner)
    decision = batcher.step()
    assert [entry.request_id for entry in decision.scheduled] == ["a", "b"]
    batcher.finish("b", FinishReason.ABORT)
    assert batcher.isolate(decision) == [requests[0]]
    assert [request.finish_reason for request in requests] == [
        FinishReason.ERROR,
        FinishReason.ABORT,
        None,
        None,
    ]
    assert (len(batcher.running), len(batcher.queue)) == (1, 1)
    decision = batcher.step()
    assert decision.inputs is not None
    assert set(decision.inputs.moves.scrub_blocks) == {0, 1}
    assert [entry.request_id for entry in decision.scheduled] == ["c", "d"]


def test_out_of_memory_is_retried_with_half_the_requests_and_half_the_tokens() -> None:
    batcher = make_batcher(max_num_seqs=5, max_num_batched_tokens=32)
    runner = make_runner(batcher)
    requests = [make_request(f"r{i}", 4, arrival=i, max_tokens=20) for i in range(5)]
    for request in requests:
        batcher.add(request)
    decision = batcher.step()
    assert decision.num_tokens == 20
    batcher.preempt_for_memory(decision)
    assert [request.num_preemptions for request in requests] == [0, 0, 0, 1, 1]
    assert (len(batcher.running), len(batcher.queue)) == (3, 2)
    decision, _ = run_step(batcher, runner)
    assert decision.preempted == ("r3", "r4")
    assert shape_of(decision) == [("r0", 0, 4, True), ("r1", 0, 4, True), ("r2", 0, 2, False)]
    decision, _ = run_step(batcher, runner)
    assert decision.preempted == ()
    assert decision.num_tokens == 11, "each good step allows one token more"
    while batcher.has_work:
        run_step(batcher, runner)
    for request in requests:
        assert request.output_token_ids == expected_output(request.token_ids[:4], 20)
    assert_empty(batcher)


def test_the_limit_after_out_of_memory_rises_to_the_configured_one_and_no_further() -> None:
    batcher = make_batcher(max_num_batched_tokens=4)
    runner = make_runner(batcher)
    batcher.add(make_request("a", 40, max_tokens=1))
    batcher.preempt_for_memory(batcher.step())
    sizes = [run_step(batcher, runner)[0].num_tokens for _ in range(5)]
    assert sizes == [2, 3, 4, 4, 4]


def test_out_of_memory_with_one_token_is_tried_again_as_it_is() -> None:
    batcher = make_batcher()
    runner = make_runner(batcher)
    request = make_request("a", 1, max_tokens=3)
    batcher.add(request)
    batcher.preempt_for_memory(batcher.step())
    assert request.status is RequestStatus.RUNNING
    while batcher.has_work:
        run_step(batcher, runner)
    assert request.output_token_ids == expected_output([request.token_ids[0]], 3)
    assert_empty(batcher)


def test_out_of_memory_never_preempts_the_oldest_nor_what_has_ended() -> None:
    batcher = make_batcher(policy="priority")
    old = make_request("old", 2, arrival=0, priority=10)
    gone = make_request("gone", 2, arrival=1, priority=10)
    high = make_request("high", 2, arrival=2, priority=0)
    more = make_request("more", 2, arrival=3, priority=0)
    for request in (old, gone, high, more):
        batcher.add(request)
    decision = batcher.step()
    batcher.finish("gone", FinishReason.ABORT)
    batcher.preempt_for_memory(decision)
    assert [request.num_preemptions for request in (old, gone, high, more)] == [0, 0, 0, 0]
    assert len(batcher.running) == 3


def test_the_protocol_is_enforced() -> None:
    batcher = make_batcher()
    batcher.add(make_request("a"))
    decision = batcher.step()
    with pytest.raises(AssertionError, match="neither committed nor abandoned"):
        batcher.step()
    batcher.commit(decision, SampledRows([1]))
    with pytest.raises(AssertionError, match="not the one in flight"):
        batcher.commit(decision, SampledRows([1]))
    with pytest.raises(AssertionError, match="not the one in flight"):
        batcher.abandon(decision)
