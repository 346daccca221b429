"""What is computed once: published prefixes, prefixes in the making, and prompts of several choices."""

from collections.abc import Sequence
from typing import Any

import pytest

from engine.plan.request import FinishReason, Request, RequestStatus
from engine.plan.scheduling.batcher import ContinuousBatcher
from engine.plan.scheduling.prefix_lookup import PrefixLookup
from engine.plan.step_records import SampledRows
from tests.support.factories import make_batcher, make_request, make_runner, run_step, shape_of
from tests.support.fakes import FakeRunner, expected_output

PREFIX = list(range(8))


def make(**limits: Any) -> tuple[ContinuousBatcher, FakeRunner]:
    batcher = make_batcher(prefix_caching=True, **limits)
    return batcher, make_runner(batcher)


def run_all(batcher: ContinuousBatcher, runner: FakeRunner) -> None:
    while batcher.has_work:
        run_step(batcher, runner)
        batcher.kv.check_integrity()
    assert batcher.kv.num_used_blocks == 0


def assert_text_is_right(*requests: Request) -> None:
    for request in requests:
        prompt = request.token_ids[: request.num_prompt_tokens]
        assert request.output_token_ids == expected_output(prompt, request.sampling.max_tokens)


def test_a_prefix_is_found_by_the_next_request() -> None:
    batcher, runner = make()
    a = make_request("a", [*PREFIX, 90], arrival=0, max_tokens=4)
    b = make_request("b", [*PREFIX, 91, 92], arrival=1, max_tokens=4)
    batcher.add(a)
    run_all(batcher, runner)
    assert batcher.kv.pool.num_free_kept == 3, "the last one holds output"
    batcher.add(b)
    decision, _ = run_step(batcher, runner)
    assert shape_of(decision) == [("b", 8, 2, True)]
    assert batcher.kv.block_ids("b")[:2] == (0, 1)
    assert (a.num_cached_tokens, b.num_cached_tokens) == (0, 8)
    run_all(batcher, runner)
    assert_text_is_right(a, b)


def test_output_is_found_too() -> None:
    batcher, runner = make()
    a = make_request("a", PREFIX, max_tokens=9)
    batcher.add(a)
    run_all(batcher, runner)
    b = make_request("b", [*a.token_ids, 3], arrival=1)
    batcher.add(b)
    assert shape_of(run_step(batcher, runner)[0]) == [("b", 16, 2, True)]


def test_the_last_token_is_always_computed() -> None:
    batcher, runner = make()
    for name in "ab":
        request = make_request(name, PREFIX, max_tokens=1)
        batcher.add(request)
        decision, _ = run_step(batcher, runner)
    assert shape_of(decision) == [("b", 4, 4, True)]
    assert request.num_cached_tokens == 4


def test_salts_do_not_share() -> None:
    batcher, runner = make()
    for name, salt in (("a", None), ("b", "x"), ("c", "x")):
        batcher.add(make_request(name, [*PREFIX, 90], max_tokens=1, cache_salt=salt))
        decision, _ = run_step(batcher, runner)
        assert decision.scheduled[0].first_position == (8 if name == "c" else 0)


def test_without_caching_nothing_is_found() -> None:
    batcher = make_batcher()
    runner = make_runner(batcher)
    for name in "ab":
        batcher.add(make_request(name, [*PREFIX, 90], max_tokens=1))
        assert shape_of(run_step(batcher, runner)[0]) == [(name, 0, 9, True)]
    assert batcher.kv.pool.num_free_kept == 0


def test_a_reset_forgets_what_nobody_uses() -> None:
    batcher, runner = make()
    batcher.add(make_request("a", PREFIX, max_tokens=1))
    run_all(batcher, runner)
    assert batcher.kv.prefixes.reset() == 2
    assert batcher.kv.pool.num_free_kept == 0
    batcher.add(make_request("b", PREFIX, max_tokens=1))
    assert shape_of(run_step(batcher, runner)[0]) == [("b", 0, 8, True)]


def test_a_failed_row_takes_back_what_it_was_drawn_from() -> None:
    batcher, runner = make()
    batcher.add(make_request("a", [*PREFIX, 90], max_tokens=1))
    run_step(batcher, runner)
    batcher.add(make_request("b", [*PREFIX, 91]))
    decision = batcher.step()
    batcher.commit(decision, SampledRows([0], row_errors={0: "NaN"}))
    assert batcher.kv.pool.num_free_kept == 0
    batcher.add(make_request("c", [*PREFIX, 91], max_tokens=1))
    decision, _ = run_step(batcher, runner)
    assert shape_of(decision) == [("c", 0, 9, True)]
    assert decision.inputs is not None
    assert decision.inputs.moves.scrub_blocks == (0, 1, 3), "block 2 was a's own, and proven"


def test_a_cancel_in_flight_keeps_what_was_published_and_scrubs_the_rest() -> None:
    batcher, runner = make()
    batcher.add(make_request("a", [*PREFIX, 90], max_tokens=1))
    run_step(batcher, runner)
    batcher.add(make_request("b", [*PREFIX, 91]))
    decision = batcher.step()
    batcher.finish("b", FinishReason.ABORT)
    batcher.commit(decision, SampledRows([0]))
    assert batcher.kv.pool.num_free_kept == 2
    batcher.add(make_request("c", [*PREFIX, 91], max_tokens=1))
    decision, _ = run_step(batcher, runner)
    assert decision.inputs is not None
    assert (shape_of(decision), decision.inputs.moves.scrub_blocks) == ([("c", 8, 1, True)], (3,))


def test_a_preempted_request_finds_its_own_blocks() -> None:
    batcher, runner = make(num_blocks=5, max_model_len=20)
    a, b = make_request("a", 7, arrival=0, max_tokens=9), make_request("b", 4, arrival=1, max_tokens=9)
    batcher.add(a)
    batcher.add(b)
    firsts = []
    while batcher.has_work:
        decision, _ = run_step(batcher, runner)
        firsts += [e.first_position for e in decision.scheduled if e.request_id == "b"]
    assert b.num_preemptions == 1
    assert firsts.count(0) == 1
    assert b.num_cached_tokens == 0, "what counts is the first time"
    assert_text_is_right(a, b)


# Prefixes in the making.


def test_a_burst_computes_its_prefix_once() -> None:
    batcher, runner = make()
    requests = [make_request(f"r{i}", [*PREFIX, 90 + i], arrival=i, max_tokens=3) for i in range(4)]
    other = make_request("other", [7, 7, 7], arrival=9, max_tokens=3)
    for request in (*requests, other):
        batcher.add(request)
    decision, _ = run_step(batcher, runner)
    assert shape_of(decision) == [("r0", 0, 9, True), ("other", 0, 3, True)], "others are not in the way"
    decision, _ = run_step(batcher, runner)
    assert shape_of(decision)[2:] == [("r1", 8, 1, True), ("r2", 8, 1, True)], "as many as there are seats"
    assert batcher.kv.pool.ref_count(0) == 3
    run_all(batcher, runner)
    assert_text_is_right(*requests, other)


def test_who_is_held_waits_like_the_rest() -> None:
    batcher, runner = make()
    for name in "ab":
        batcher.add(make_request(name, PREFIX))
    decision = batcher.step()
    assert (len(batcher.running), len(batcher.queue)) == (1, 1)
    assert decision.inputs is not None
    ended = batcher.finish("b", FinishReason.ABORT)
    assert ended is not None and ended.status is RequestStatus.FINISHED
    assert len(batcher.queue) == 0
    batcher.commit(decision, runner.run(decision.inputs).rows)
    assert len(batcher.queue) == 0


def test_who_is_held_goes_on_alone_when_the_other_dies() -> None:
    batcher, runner = make(max_num_batched_tokens=4)
    a, b = make_request("a", PREFIX, arrival=0), make_request("b", PREFIX, arrival=1, max_tokens=2)
    batcher.add(a)
    batcher.add(b)
    assert shape_of(run_step(batcher, runner)[0]) == [("a", 0, 4, False)]
    batcher.finish("a", FinishReason.ABORT)
    assert shape_of(run_step(batcher, runner)[0]) == [("b", 0, 4, False)]
    run_all(batcher, runner)
    assert_text_is_right(b)


def test_nobody_is_held_for_someone_less_urgent() -> None:
    batcher, runner = make(max_num_batched_tokens=6, policy="priority")
    batcher.add(make_request("flex", [*PREFIX, 9, 9, 9, 9], arrival=0, priority=10))
    run_step(batcher, runner)
    batcher.add(make_request("high", PREFIX, arrival=1, priority=-10))
    assert shape_of(run_step(batcher, runner)[0]) == [("high", 0, 6, False)]


@pytest.mark.parametrize(("name", "priority"), [("b", -10), ("a", 10)])
def test_nobody_stays_held_for_someone_who_becomes_less_urgent(name: str, priority: int) -> None:
    batcher, runner = make(max_num_batched_tokens=4, policy="priority")
    a, b = (
        make_request(each, [*PREFIX, 9, 9, 9, 9, place], arrival=place) for place, each in enumerate("ab")
    )
    for request in (a, b):
        batcher.add(request)
    run_step(batcher, runner)
    run_step(batcher, runner)
    assert batcher.queue.held_for("b") == "a"
    batcher.reprioritize(name, priority=priority)
    assert shape_of(run_step(batcher, runner)[0]) == [("b", 0, 4, False)]
    run_all(batcher, runner)
    assert_text_is_right(a, b)


def test_who_shares_nothing_more_is_not_held() -> None:
    batcher, runner = make()
    for name in "ab":
        batcher.add(make_request(name, [*PREFIX[:2], 90], arrival=ord(name)))
    assert len(run_step(batcher, runner)[0].scheduled) == 2, "there is no full block to share"


# Choices of one prompt.


def fork_of(parent: Request, name: str, *, arrival: int, max_tokens: int = 6) -> Request:
    prompt = parent.token_ids[: parent.num_prompt_tokens]
    return make_request(name, prompt, arrival=arrival, max_tokens=max_tokens, fork_of=parent.request_id)


def test_choices_share_the_prompt_and_copy_its_last_block() -> None:
    batcher = make_batcher()
    runner = make_runner(batcher)
    a = make_request("a", [*PREFIX, 90, 91], arrival=0, max_tokens=6)
    b, c = fork_of(a, "b", arrival=1), fork_of(a, "c", arrival=2)
    for request in (a, b, c):
        batcher.add(request)
    assert shape_of(run_step(batcher, runner)[0]) == [("a", 0, 10, True)]
    decision, _ = run_step(batcher, runner)
    assert shape_of(decision) == [("a", 10, 1, True), ("b", 9, 1, True), ("c", 9, 1, True)]
    assert decision.inputs is not None
    assert decision.inputs.moves.block_copies == ((2, 3), (2, 4))
    assert [batcher.kv.block_ids(name) for name in "abc"] == [(0, 1, 2), (0, 1, 3), (0, 1, 4)]
    assert [batcher.kv.pool.ref_count(block) for block in range(5)] == [3, 3, 1, 1, 1]
    decision, _ = run_step(batcher, runner)
    assert decision.inputs is not None
    assert decision.inputs.moves.block_copies == ()
    run_all(batcher, runner)
    assert_text_is_right(a, b, c)


def test_a_last_token_in_a_block_of_its_own_needs_no_copy() -> None:
    batcher = make_batcher()
    runner = make_runner(batcher)
    a = make_request("a", [*PREFIX, 90], arrival=0)
    b = fork_of(a, "b", arrival=1)
    batcher.add(a)
    batcher.add(b)
    run_step(batcher, runner)
    decision, _ = run_step(batcher, runner)
    assert decision.inputs is not None
    assert (shape_of(decision)[1], decision.inputs.moves.block_copies) == (("b", 8, 1, True), ())
    assert batcher.kv.block_ids("b") == (0, 1, 3)


def test_a_fork_needs_room_for_its_last_block_only() -> None:
    batcher = make_batcher(num_blocks=5, max_model_len=20)
    runner = make_runner(batcher)
    a = make_request("a", [*PREFIX, 90, 91], arrival=0, max_tokens=2)
    b = fork_of(a, "b", arrival=1, max_tokens=2)
    batcher.add(a)
    batcher.add(b)
    run_step(batcher, runner)
    assert shape_of(run_step(batcher, runner)[0])[1] == ("b", 9, 1, True)


def test_a_fork_that_cannot_be_preempted_takes_all_blocks_that_it_may_ever_need() -> None:
    batcher, runner = make(num_blocks=9, max_model_len=16, max_preemptions=0)
    a = make_request("a", 6, max_tokens=10)
    children = [make_request(f"a{i}", range(6), arrival=i, max_tokens=10, fork_of="a") for i in (1, 2)]
    for request in (a, *children):
        batcher.add(request)
    run_step(batcher, runner)
    assert len(batcher.kv.block_ids("a")) == 4
    run_step(batcher, runner)
    assert len(batcher.kv.block_ids("a1")) == 4, "one of them shared"
    assert (len(batcher.running), batcher.kv.pool.num_free) == (2, 2), "three more would have been too many"
    run_all(batcher, runner)
    assert_text_is_right(a, *children)
    assert not any(request.num_preemptions for request in (a, *children))


def test_a_choice_waits_for_a_parent_that_waits_and_goes_alone_when_it_ends() -> None:
    batcher = make_batcher(policy="priority")
    runner = make_runner(batcher)
    a = make_request("a", PREFIX, arrival=0)
    b = fork_of(a, "b", arrival=1)
    b.priority = -10
    batcher.add(a)
    batcher.add(b)
    assert shape_of(run_step(batcher, runner)[0]) == [("a", 0, 8, True)], "b is held though it ranks first"
    batcher.finish("a", FinishReason.ABORT)
    assert shape_of(run_step(batcher, runner)[0]) == [("b", 0, 8, True)]
    run_all(batcher, runner)
    assert_text_is_right()


def test_after_a_failed_step_a_fork_computes_its_last_block() -> None:
    batcher = make_batcher()
    runner = make_runner(batcher)
    a = make_request("a", [*PREFIX, 90, 91], arrival=0, max_tokens=6)
    b = fork_of(a, "b", arrival=1)
    batcher.add(a)
    batcher.add(b)
    run_step(batcher, runner)
    batcher.abandon(batcher.step())
    decision, _ = run_step(batcher, runner)
    assert decision.inputs is not None
    assert (shape_of(decision)[1], decision.inputs.moves.block_copies) == (("b", 8, 2, True), ())
    run_all(batcher, runner)
    assert_text_is_right(a, b)


def test_a_choice_of_a_preempted_parent_runs_by_itself() -> None:
    batcher = make_batcher(num_blocks=8, max_model_len=32)
    a = make_request("a", PREFIX, arrival=0)
    first = make_request("first", 4, arrival=-1)
    b = fork_of(a, "b", arrival=1)
    batcher.add(first)
    batcher.add(a)
    batcher.add(b)
    batcher.preempt_for_memory(batcher.step())
    assert a.status is RequestStatus.PREEMPTED
    decision = batcher.step()
    assert shape_of(decision) == [("first", 0, 4, True), ("a", 0, 2, False)]
    batcher.finish("a", FinishReason.ABORT)
    batcher.commit(decision, SampledRows([1]))
    assert [entry.request_id for entry in batcher.step().scheduled] == ["first", "b"]


def test_a_newcomer_s_deadline_is_judged_by_what_nobody_computes_for_it() -> None:
    batcher, runner = make(num_blocks=32)
    batcher.add(make_request("a", [*PREFIX, 90], arrival=0, max_tokens=4))
    decision = batcher.step()
    newcomer = make_request("b", [*PREFIX, 91], arrival=1, max_tokens=4)
    running = batcher.running
    assert running.lookup.num_to_compute(newcomer) == 1, "a is computing the prefix just now"
    assert decision.inputs is not None
    batcher.commit(decision, runner.run(decision.inputs).rows)
    assert running.lookup.num_to_compute(newcomer) == 1, "the prefix is published"
    assert running.lookup.num_to_compute(make_request("c", [70, 71, 72, 73, 74], arrival=2)) == 5
    run_all(batcher, runner)


# What finding costs a step.


def hashed(requests: Sequence[Request]) -> int:
    return sum(len(request.block_hashes) for request in requests)


def test_a_step_hashes_so_much_and_no_more_though_many_wait_with_one_prefix() -> None:
    num_blocks, prompts = 500, [[*range(2000), 3000 + number] for number in range(100)]
    batcher, _ = make(num_blocks=2000, max_num_seqs=100, max_model_len=2100, max_num_batched_tokens=2100)
    requests = [make_request(str(i), prompt, arrival=i, max_tokens=4) for i, prompt in enumerate(prompts)]
    for request in requests:
        batcher.add(request)
    most = most_seated = num_steps = 0
    while batcher.has_work:
        before = hashed(requests)
        decision = batcher.step()
        assert decision.inputs is not None, "somebody always goes on"
        most = max(most, hashed(requests) - before)
        batcher.commit(decision, SampledRows([7] * len(decision.inputs.logits_rows)))
        most_seated = max(most_seated, len(batcher.running))
        num_steps += 1
    assert most <= PrefixLookup.HASHES_A_STEP + num_blocks, "of 50 thousand"
    assert sum(request.num_cached_tokens for request in requests) == 99 * 2000
    assert most_seated > 20 and num_steps < 60, "they are many a step all the same"


def test_a_prefix_is_hashed_no_further_than_it_is_found() -> None:
    batcher, runner = make(num_blocks=2000, max_model_len=2100, max_num_batched_tokens=64)
    leader, other = (make_request(name, 2000, max_tokens=1) for name in "ab")
    other.token_ids[40] = 9999
    batcher.add(leader)
    run_step(batcher, runner)
    batcher.add(other)
    run_step(batcher, runner)
    assert other.status is RequestStatus.WAITING
    assert len(other.block_hashes) <= 4, "the first block is in the making: that is enough to wait for it"


def test_a_long_prompt_is_taken_though_it_alone_is_more_than_a_step_hashes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PrefixLookup, "HASHES_A_STEP", 1)
    batcher, runner = make(num_blocks=400)
    a, b = (make_request(name, [*PREFIX, *PREFIX, number], max_tokens=3) for number, name in enumerate("ab"))
    for request in (a, b):
        batcher.add(request)
    run_all(batcher, runner)
    assert_text_is_right(a, b)
    assert b.num_cached_tokens == 16
