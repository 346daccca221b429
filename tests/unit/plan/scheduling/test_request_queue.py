import pytest

from engine.plan.request import Request, RequestStatus
from engine.plan.scheduling.policy import make_policy
from engine.plan.scheduling.request_queue import RequestQueue
from tests.support.factories import make_request


def make_queue(*requests: Request, policy: str = "priority") -> RequestQueue:
    queue = RequestQueue(make_policy(policy, 0.0))
    for request in requests:
        queue.add(request)
    return queue


def drain(queue: RequestQueue) -> list[str]:
    return [queue.pop().request_id for _ in range(len(queue))]


def test_requests_come_out_by_policy() -> None:
    queue = make_queue(
        make_request("c", arrival=3),
        make_request("a", arrival=1),
        make_request("urgent", arrival=4, priority=-1),
        make_request("b", arrival=2),
    )
    assert len(queue) == 4
    assert drain(queue) == ["urgent", "a", "b", "c"]
    assert len(queue) == 0


def test_preempted_requests_resume_before_new_ones() -> None:
    queue = make_queue(make_request("urgent", arrival=1, priority=-10))
    for name, arrival in (("second", 9), ("first", 8)):
        request = make_request(name, arrival=arrival, priority=10)
        request.status = RequestStatus.PREEMPTED
        queue.add(request)
    assert drain(queue) == ["first", "second", "urgent"]


def test_peek_takes_nothing() -> None:
    request = make_request("a")
    queue = make_queue(request)
    assert queue.peek() is request
    assert queue.peek() is request
    assert "a" in queue
    assert queue.pop() is request
    assert queue.peek() is None
    assert "a" not in queue
    with pytest.raises(IndexError):
        queue.pop()


def test_a_request_can_be_removed_from_anywhere_and_come_back() -> None:
    a, b, c = (make_request(name, arrival=i) for i, name in enumerate("abc"))
    queue = make_queue(a, b, c)
    assert queue.remove("b") is b
    assert queue.remove("b") is None
    assert queue.remove("a") is a
    assert queue.peek() is c
    queue.add(a)
    queue.add(b)
    assert drain(queue) == ["a", "b", "c"]


def test_a_request_waits_once() -> None:
    queue = make_queue(make_request("a"))
    with pytest.raises(AssertionError, match="a waits already"):
        queue.add(make_request("a"))


def test_reprioritize_moves_a_request_both_ways() -> None:
    a, b, c = (make_request(name, arrival=i) for i, name in enumerate("abc"))
    queue = make_queue(a, b, c)
    c.priority = -1
    queue.reprioritize("c")
    assert queue.peek() is c
    c.priority = 0
    queue.reprioritize("c")
    a.priority = 5
    queue.reprioritize("a")
    assert drain(queue) == ["b", "c", "a"]
    with pytest.raises(KeyError):
        queue.reprioritize("a")


def test_reprioritizing_without_a_change_keeps_the_order() -> None:
    queue = make_queue(*(make_request(name, arrival=i) for i, name in enumerate("abc")))
    for name in "abcabc":
        queue.reprioritize(name)
    assert drain(queue) == ["a", "b", "c"]


def test_dead_places_do_not_pile_up() -> None:
    requests = [make_request(f"r{i}", arrival=i) for i in range(1000)]
    queue = make_queue(*requests)
    for request in requests[1:]:  # from behind the head, where popping never looks
        queue.remove(request.request_id)
    assert len(queue._lanes[""]._heap) <= 2 * len(queue) + 9
    for _ in range(1000):
        queue.reprioritize("r0")
    assert len(queue._lanes[""]._heap) <= 2 * len(queue) + 9
    assert drain(queue) == ["r0"]


def test_a_held_request_is_passed_over_until_it_is_let_go() -> None:
    a, b, c = (make_request(name, arrival=i) for i, name in enumerate("abc"))
    queue = make_queue(a, b, c)
    queue.hold("a", "leader")
    queue.hold("b", "leader")
    assert queue.peek() is c
    assert (len(queue), queue.held_for("a"), queue.held_for("c")) == (3, "leader", None)
    assert queue.ahead_of(c) == []
    a.priority = 1
    queue.reprioritize("a")
    assert queue.remove("b") is b
    assert queue.pop() is c
    assert queue.peek() is None
    queue.unhold("nobody")
    queue.unhold("leader")
    assert drain(queue) == ["a"]


def test_a_held_request_waits_like_the_rest() -> None:
    a, b, c = (make_request(name, 2, arrival=i) for i, name in enumerate("abc"))
    queue = make_queue(a, b, c)
    queue.hold("a", "x")
    queue.hold("c", "y")
    assert queue.peek() is b
    assert queue.held_for("a") == "x"
    assert queue.held_for("b") is None
    assert (len(queue), "a" in queue, queue.get("a")) == (3, True, a)
    queue.unhold("nobody")
    queue.unhold("x")
    assert queue.peek() is a
    assert queue.held_for("a") is None
    assert queue.pop() is a
    assert queue.pop() is b
    assert queue.peek() is None, "c waits, held"
    assert len(queue) == 1


def test_a_held_request_may_leave_and_be_held_for_another() -> None:
    a, b = make_request("a", arrival=0), make_request("b", arrival=1)
    queue = make_queue(a, b)
    queue.hold("a", "x")
    assert queue.remove("a") is a
    queue.add(a)
    queue.unhold("x")
    assert queue.peek() is a
    queue.hold("a", "x")
    queue.remove("a")
    queue.add(a)
    queue.hold("a", "y")
    queue.unhold("x")
    assert (queue.peek(), queue.held_for("a")) == (b, "y")


def test_a_held_request_is_ranked_when_it_is_let_go() -> None:
    a, b = make_request("a", arrival=0), make_request("b", arrival=1)
    queue = make_queue(a, b)
    queue.hold("b", "x")
    b.priority = -10
    queue.reprioritize("b")
    assert queue.peek() is a
    queue.unhold("x")
    assert queue.peek() is b


def test_forks_are_known_until_the_last_of_them_is_gone_or_has_begun() -> None:
    b, c = (make_request(name, arrival=place, fork_of="a") for place, name in enumerate("bc"))
    queue = make_queue(b, c)
    assert queue.has_forks_of("a") and not queue.has_forks_of("b")
    queue.hold("b", "a")
    queue.remove("b")
    assert queue.has_forks_of("a")
    queue.pop()
    assert not queue.has_forks_of("a")
    c.status = RequestStatus.PREEMPTED
    queue.add(c)
    assert not queue.has_forks_of("a"), "it goes on with what it has"
    queue.pop()
    assert not queue.has_forks_of("a")
