import pytest

from engine.plan.request import Request, RequestStatus
from engine.plan.scheduling.policy import make_policy
from engine.plan.scheduling.preemption import PreemptionPolicy
from engine.plan.scheduling.running_set import RunningSet
from tests.support.factories import free_block_ids, make_kv, make_request, preempted
from tests.support.fakes import ManualClock


def make_running(
    num_blocks: int = 8, max_num_seqs: int = 4, policy: str = "fcfs", clock: ManualClock | None = None
) -> RunningSet:
    kv = make_kv(num_blocks, 4, max_num_seqs, num_blocks)
    return RunningSet(max_num_seqs, kv, make_policy(policy, 0.0), clock or ManualClock())


def run(running: RunningSet, name: str, num_tokens: int, *, arrival: int, priority: int = 0) -> Request:
    """Run a request that lacks only its newest token."""
    request = make_request(name, num_tokens, arrival=arrival, priority=priority)
    running.admit(request)
    request.advance_to(num_tokens - 1)
    running.kv.mark_kv_good(request.request_id)
    return request


def grow(request: Request) -> Request:
    """Commit one token."""
    request.advance_to(request.num_computed_tokens + 1)
    request.token_ids.append(0)
    return request


def test_a_running_request_has_a_row_with_blocks_for_all_known_tokens() -> None:
    clock = ManualClock()
    running = make_running(clock=clock)
    request = make_request("a", 6, temperature=0.25)
    assert running.can_admit(request)
    running.admit(request)
    assert running.kv.block_ids("a") == (0, 1)
    assert request.status is RequestStatus.RUNNING
    assert request.first_scheduled_time == clock.now
    assert running.sampling._columns["temperature"].tolist() == [0.25, 0.0, 0.0, 0.0]
    assert list(running) == [request]
    assert running.get("a") is request
    assert running.get("b") is None


def test_the_first_time_scheduled_is_kept() -> None:
    clock = ManualClock()
    running = make_running(clock=clock)
    request = make_request("a")
    running.admit(request)
    first = clock.now
    running.preempt(request)
    clock.advance(5.0)
    running.admit(request)
    assert request.first_scheduled_time == first


def test_no_more_run_than_may() -> None:
    running = make_running(max_num_seqs=1)
    run(running, "a", 1, arrival=0)
    assert not running.can_admit(make_request("b", 1))


def test_a_newcomer_leaves_a_block_for_each_running_request() -> None:
    running = make_running(num_blocks=8)
    assert running.can_admit(make_request("all", 32)), "alone it may have everything"
    run(running, "a", 4, arrival=0)
    assert running.can_admit(make_request("b", 24))
    assert not running.can_admit(make_request("b", 25))
    run(running, "b", 8, arrival=1)
    assert running.can_admit(make_request("c", 12))
    assert not running.can_admit(make_request("c", 13))


def test_growth_within_a_block_takes_nothing() -> None:
    running = make_running(num_blocks=2)
    a, b = run(running, "a", 3, arrival=0), run(running, "b", 3, arrival=1)
    assert running.make_room([grow(a), grow(b)]) == ([], [])
    assert running.kv.pool.num_free == 0


def test_the_newest_gives_way() -> None:
    running = make_running(num_blocks=3)
    a, b, c = (run(running, name, 4, arrival=i) for i, name in enumerate("abc"))
    assert running.make_room([grow(a), grow(c)]) == ([c], [])
    assert (c.status, c.num_computed_tokens, c.num_preemptions) == (RequestStatus.PREEMPTED, 0, 1)
    assert "c" not in running.kv
    assert list(running) == [a, b]
    assert running.kv.block_ids("a") == (0, 2)
    assert running.kv.block_ids("b") == (1,)


def test_a_request_may_have_to_preempt_itself() -> None:
    running = make_running(num_blocks=2)
    run(running, "a", 3, arrival=0)
    b = run(running, "b", 4, arrival=1)
    assert running.make_room([grow(b)]) == ([b], [])
    assert b.status is RequestStatus.PREEMPTED
    assert free_block_ids(running.kv.pool) == (1,)


def test_the_worst_class_gives_way_first() -> None:
    running = make_running(num_blocks=3, policy="priority")
    a = run(running, "a", 4, arrival=0)
    flex = run(running, "flex", 4, arrival=1, priority=10)
    run(running, "high", 4, arrival=2, priority=-10)
    assert running.make_room([grow(a)]) == ([flex], [])


def test_the_oldest_never_gives_way_even_when_its_class_is_the_worst() -> None:
    running = make_running(num_blocks=2, policy="priority")
    old = run(running, "old", 4, arrival=0, priority=10)
    high = run(running, "high", 4, arrival=1, priority=-10)
    assert running.oldest() is old
    assert running.make_room([grow(high), grow(old)]) == ([high], [])
    assert running.kv.block_ids("old") == (0, 1)


def test_several_may_have_to_give_way() -> None:
    running = make_running(num_blocks=4)
    a, b, c, d = (run(running, name, 4, arrival=i) for i, name in enumerate("abcd"))
    assert running.make_room([grow(x) for x in (a, b, c, d)]) == ([d, c], [])
    assert [running.kv.block_ids(name) for name in "ab"] == [(0, 3), (1, 2)]


def test_everybody_who_is_left_without_a_slot_is_named() -> None:
    kv = make_kv(2, 4, 2, 2)
    running = RunningSet(2, kv, make_policy("fcfs", 0.0), ManualClock(), PreemptionPolicy(max_preemptions=1))
    a, b = run(running, "a", 4, arrival=0), make_request("b", 4, arrival=1)
    running.admit(b)
    b.advance_to(3)
    preempted(b, 1)  # spent, and without the blocks that such hold
    assert running.make_room([grow(a), grow(b)]) == ([], [a, b])


def test_who_was_served_goes_to_the_back_of_the_line() -> None:
    running = make_running()
    a, b, c = (run(running, name, 1, arrival=i) for i, name in enumerate("abc"))
    assert running.take_turns([a, b, c], 2) == [a, b]
    assert list(running) == [c, a, b]


def leave(running: RunningSet, request: Request) -> tuple[int, ...]:
    """End a request; the blocks to scrub for it."""
    running.remove(request)
    assert running.get(request.request_id) is None
    assert request.request_id in running.kv, "row and blocks stay until they are vacated"
    running.kv.free(request.request_id)
    assert request.request_id not in running.kv
    return running.block_moves().scrub_blocks


def test_blocks_proven_good_are_not_scrubbed() -> None:
    running = make_running()
    assert leave(running, run(running, "a", 8, arrival=0)) == ()


def test_blocks_of_a_prompt_in_progress_are_scrubbed() -> None:
    running = make_running()
    request = make_request("a", 8)
    running.admit(request)
    assert leave(running, request) == (0, 1)
    assert running.block_moves().scrub_blocks == (), "they are handed out once"


def test_doubted_blocks_are_scrubbed_but_not_those_another_still_holds() -> None:
    running = make_running()
    a = run(running, "a", 8, arrival=0)
    running.kv.fork("a", "fork")
    running.kv.rewind("fork", 4)
    running.kv.mark_kv_suspect("a")
    assert leave(running, a) == (1,)


def test_doubt_does_not_outlive_the_request() -> None:
    running = make_running()
    a = run(running, "a", 4, arrival=0)
    running.kv.mark_kv_suspect("a")
    leave(running, a)
    assert running.kv.start("a", 4) and not running.kv.is_suspect("a")


def test_scrubbing_can_be_given_back() -> None:
    running = make_running()
    running.kv.scrub((3, 4))
    running.kv.scrub((1,))
    assert running.block_moves().scrub_blocks == (3, 4, 1)


def test_a_row_is_needed_for_each_running_request() -> None:
    with pytest.raises(AssertionError, match="needs a row"):
        RunningSet(2, make_kv(max_num_seqs=1), make_policy("fcfs", 0.0), ManualClock())


def test_taking_without_asking_is_caught() -> None:
    with pytest.raises(AssertionError, match="found to fit and does not"):
        make_running(num_blocks=1).admit(make_request("a", 5))
