import pytest

from engine.plan.request import Request, RequestStatus
from engine.plan.scheduling.policy import make_policy
from engine.plan.scheduling.preemption import PreemptionPolicy
from engine.plan.scheduling.seats import Seats
from tests.support.factories import make_kv, make_request, preempted
from tests.support.fakes import ManualClock


def make_seats(
    num_blocks: int = 8, max_num_seqs: int = 4, policy: str = "fcfs", clock: ManualClock | None = None
) -> Seats:
    kv = make_kv(num_blocks, 4, max_num_seqs, num_blocks)
    return Seats(max_num_seqs, kv, make_policy(policy, 0.0), clock or ManualClock())


def seat(seats: Seats, name: str, num_tokens: int, *, arrival: int, priority: int = 0) -> Request:
    """Seat a request that lacks only its newest token."""
    request = make_request(name, num_tokens, arrival=arrival, priority=priority)
    seats.take(request)
    request.advance_to(num_tokens - 1)
    seats.prove(request)
    return request


def grow(request: Request) -> Request:
    """Commit one token."""
    request.advance_to(request.num_computed_tokens + 1)
    request.token_ids.append(0)
    return request


def test_a_seat_is_a_row_with_blocks_for_all_known_tokens() -> None:
    clock = ManualClock()
    seats = make_seats(clock=clock)
    request = make_request("a", 6, temperature=0.25)
    assert seats.can_take(request)
    seats.take(request)
    assert seats.kv.block_ids("a") == (0, 1)
    assert request.status is RequestStatus.RUNNING
    assert request.first_scheduled_time == clock.now
    assert seats.sampling._temperature.tolist() == [0.25, 0.0, 0.0, 0.0]
    assert list(seats) == [request]
    assert seats.get("a") is request
    assert seats.get("b") is None


def test_the_first_time_scheduled_is_kept() -> None:
    clock = ManualClock()
    seats = make_seats(clock=clock)
    request = make_request("a")
    seats.take(request)
    first = clock.now
    seats.preempt(request)
    clock.advance(5.0)
    seats.take(request)
    assert request.first_scheduled_time == first


def test_the_seats_are_counted() -> None:
    seats = make_seats(max_num_seqs=1)
    seat(seats, "a", 1, arrival=0)
    assert not seats.can_take(make_request("b", 1))


def test_a_newcomer_leaves_a_block_for_each_running_request() -> None:
    seats = make_seats(num_blocks=8)
    assert seats.can_take(make_request("all", 32)), "alone it may have everything"
    seat(seats, "a", 4, arrival=0)
    assert seats.can_take(make_request("b", 24))
    assert not seats.can_take(make_request("b", 25))
    seat(seats, "b", 8, arrival=1)
    assert seats.can_take(make_request("c", 12))
    assert not seats.can_take(make_request("c", 13))


def test_growth_within_a_block_takes_nothing() -> None:
    seats = make_seats(num_blocks=2)
    a, b = seat(seats, "a", 3, arrival=0), seat(seats, "b", 3, arrival=1)
    assert seats.make_room([grow(a), grow(b)]) == ([], [])
    assert seats.kv.num_free_blocks == 0


def test_the_newest_gives_way() -> None:
    seats = make_seats(num_blocks=3)
    a, b, c = (seat(seats, name, 4, arrival=i) for i, name in enumerate("abc"))
    assert seats.make_room([grow(a), grow(c)]) == ([c], [])
    assert (c.status, c.num_computed_tokens, c.num_preemptions) == (RequestStatus.PREEMPTED, 0, 1)
    assert "c" not in seats.kv
    assert list(seats) == [a, b]
    assert seats.kv.block_ids("a") == (0, 2)
    assert seats.kv.block_ids("b") == (1,)


def test_a_request_may_have_to_preempt_itself() -> None:
    seats = make_seats(num_blocks=2)
    seat(seats, "a", 3, arrival=0)
    b = seat(seats, "b", 4, arrival=1)
    assert seats.make_room([grow(b)]) == ([b], [])
    assert b.status is RequestStatus.PREEMPTED
    assert seats.kv.pool.free_block_ids() == (1,)


def test_the_worst_class_gives_way_first() -> None:
    seats = make_seats(num_blocks=3, policy="priority")
    a = seat(seats, "a", 4, arrival=0)
    flex = seat(seats, "flex", 4, arrival=1, priority=10)
    seat(seats, "high", 4, arrival=2, priority=-10)
    assert seats.make_room([grow(a)]) == ([flex], [])


def test_the_oldest_never_gives_way_even_when_its_class_is_the_worst() -> None:
    seats = make_seats(num_blocks=2, policy="priority")
    old = seat(seats, "old", 4, arrival=0, priority=10)
    high = seat(seats, "high", 4, arrival=1, priority=-10)
    assert seats.oldest() is old
    assert seats.make_room([grow(high), grow(old)]) == ([high], [])
    assert seats.kv.block_ids("old") == (0, 1)


def test_several_may_have_to_give_way() -> None:
    seats = make_seats(num_blocks=4)
    a, b, c, d = (seat(seats, name, 4, arrival=i) for i, name in enumerate("abcd"))
    assert seats.make_room([grow(x) for x in (a, b, c, d)]) == ([d, c], [])
    assert [seats.kv.block_ids(name) for name in "ab"] == [(0, 3), (1, 2)]


def test_everybody_who_is_left_without_a_slot_is_named() -> None:
    kv = make_kv(2, 4, 2, 2)
    seats = Seats(2, kv, make_policy("fcfs", 0.0), ManualClock(), PreemptionPolicy(max_preemptions=1))
    a, b = seat(seats, "a", 4, arrival=0), make_request("b", 4, arrival=1)
    seats.take(b)
    b.advance_to(3)
    preempted(b, 1)  # spent, and without the blocks that such hold
    assert seats.make_room([grow(a), grow(b)]) == ([], [a, b])


def test_who_was_served_goes_to_the_back_of_the_line() -> None:
    seats = make_seats()
    a, b, c = (seat(seats, name, 1, arrival=i) for i, name in enumerate("abc"))
    assert seats.take_turns([a, b, c], 2) == [a, b]
    assert list(seats) == [c, a, b]


def leave(seats: Seats, request: Request) -> tuple[int, ...]:
    """End a request; the blocks to scrub for it."""
    seats.leave(request)
    assert seats.get(request.request_id) is None
    assert request.request_id in seats.kv, "row and blocks stay until they are vacated"
    seats.vacate(request.request_id)
    assert request.request_id not in seats.kv
    return seats.block_moves().scrub


def test_blocks_proven_good_are_not_scrubbed() -> None:
    seats = make_seats()
    assert leave(seats, seat(seats, "a", 8, arrival=0)) == ()


def test_blocks_of_a_prompt_in_progress_are_scrubbed() -> None:
    seats = make_seats()
    request = make_request("a", 8)
    seats.take(request)
    assert leave(seats, request) == (0, 1)
    assert seats.block_moves().scrub == (), "they are handed out once"


def test_doubted_blocks_are_scrubbed_but_not_those_another_still_holds() -> None:
    seats = make_seats()
    a = seat(seats, "a", 8, arrival=0)
    seats.kv.fork("a", "fork")
    seats.kv.rewind("fork", 4)
    seats.doubt("a")
    assert leave(seats, a) == (1,)


def test_doubt_does_not_outlive_the_request() -> None:
    seats = make_seats()
    a = seat(seats, "a", 4, arrival=0)
    seats.doubt("a")
    leave(seats, a)
    assert not seats._unproven


def test_scrubbing_can_be_given_back() -> None:
    seats = make_seats()
    seats.scrub((3, 4))
    seats.scrub((1,))
    assert seats.block_moves().scrub == (3, 4, 1)


def test_a_row_is_needed_for_each_seat() -> None:
    with pytest.raises(AssertionError, match="needs a row"):
        Seats(2, make_kv(max_num_seqs=1), make_policy("fcfs", 0.0), ManualClock())


def test_taking_without_asking_is_caught() -> None:
    with pytest.raises(AssertionError, match="found to fit and does not"):
        make_seats(num_blocks=1).take(make_request("a", 5))
