import pytest

from engine.errors import StartRefused
from engine.request import Priority, Request
from engine.scheduling.policy import SchedulingPolicy, make_policy
from tests.factories import make_request


def order(policy: SchedulingPolicy, *requests: Request) -> list[str]:
    return [request.request_id for request in sorted(requests, key=policy.key)]


def test_fcfs_is_arrival_order_whatever_the_class() -> None:
    late = make_request("late", arrival=2, priority=Priority.HIGH)
    early = make_request("early", arrival=1, priority=Priority.FLEX)
    assert order(make_policy("fcfs", 30.0), late, early) == ["early", "late"]


def test_priority_is_class_then_arrival() -> None:
    requests = [
        make_request("flex", arrival=1, priority=Priority.FLEX),
        make_request("second", arrival=3),
        make_request("first", arrival=2),
        make_request("high", arrival=4, priority=Priority.HIGH),
    ]
    for aging_s in (0.0, 30.0):
        assert order(make_policy("priority", aging_s), *requests) == ["high", "first", "second", "flex"]


def test_arrival_breaks_a_tie_in_time() -> None:
    a = make_request("a", arrival=2, arrival_time=5.0)
    b = make_request("b", arrival=1, arrival_time=5.0)
    assert order(make_policy("priority", 30.0), a, b) == ["b", "a"]


@pytest.mark.parametrize(("later_s", "first"), [(299.0, "high"), (301.0, "flex")])
def test_each_aging_period_waited_is_worth_one_class(later_s: float, first: str) -> None:
    flex = make_request("flex", arrival=1, arrival_time=0.0, priority=10)
    high = make_request("high", arrival=2, arrival_time=later_s, priority=0)
    assert order(make_policy("priority", 30.0), high, flex)[0] == first


def test_without_aging_the_class_decides_for_ever() -> None:
    flex = make_request("flex", arrival=1, arrival_time=0.0, priority=1)
    high = make_request("high", arrival=2, arrival_time=1e9, priority=0)
    assert order(make_policy("priority", 0.0), flex, high) == ["high", "flex"]


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(StartRefused, match="'lottery' is not available: choose one of fcfs, sjf"):
        make_policy("lottery", 0.0)
