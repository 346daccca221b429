from itertools import pairwise

import pytest

from engine.errors import StartRefused
from engine.plan.request import MAX_PRIORITY, MIN_PRIORITY, Priority, Request, RequestStatus
from engine.plan.scheduling.policy import (
    FairnessWeights,
    FairPolicy,
    SchedulingPolicy,
    aging_periods,
    make_policy,
)
from tests.support.factories import make_request


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


def test_beyond_the_tiers_a_step_shrinks_but_still_counts() -> None:
    requests = [
        make_request(str(p), arrival=p, arrival_time=float(p < 0), priority=p)
        for p in (-1000, -999, 999, 1000)
    ]
    assert order(make_policy("priority", 30.0), *reversed(requests)) == ["-1000", "-999", "999", "1000"]
    worths = [aging_periods(priority) for priority in range(MIN_PRIORITY, MAX_PRIORITY + 1)]
    steps = [after - before for before, after in pairwise(worths)]
    assert min(steps) > 0.009
    assert max(steps) == pytest.approx(1)
    assert aging_periods(Priority.FLEX) - aging_periods(Priority.HIGH) == 20


@pytest.mark.parametrize("name", ["priority", "fair"])
def test_within_113_periods_any_request_outranks_any_newcomer(name: str) -> None:
    policy = make_policy(name, 30.0)
    old = make_request("old", arrival=1, arrival_time=0.0, priority=MAX_PRIORITY)
    for later_s, first in ((112 * 30.0, "new"), (113 * 30.0, "old")):
        new = make_request("new", arrival=2, arrival_time=later_s, priority=MIN_PRIORITY)
        assert order(policy, new, old)[0] == first


def test_without_aging_the_class_decides_for_ever() -> None:
    flex = make_request("flex", arrival=1, arrival_time=0.0, priority=1)
    high = make_request("high", arrival=2, arrival_time=1e9, priority=0)
    assert order(make_policy("priority", 0.0), flex, high) == ["high", "flex"]


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(StartRefused, match="'lottery' is not available: choose one of fcfs, sjf"):
        make_policy("lottery", 0.0)


def test_deadline_is_earliest_first_and_those_without_last() -> None:
    requests = [
        make_request("none", arrival=1, priority=Priority.HIGH),
        make_request("late", arrival=2),
        make_request("soon", arrival=4),
        make_request("as_soon", arrival=3),
        make_request("none_either", arrival=5),
    ]
    for request, deadline in zip(requests[1:4], (9.0, 5.0, 5.0), strict=True):
        request.deadline = deadline
    names = ["as_soon", "soon", "late", "none", "none_either"]
    assert order(make_policy("deadline", 30.0), *requests) == names


def test_orca_is_arrival_order() -> None:
    late = make_request("late", arrival=2, priority=Priority.HIGH)
    early = make_request("early", arrival=1)
    policy = make_policy("orca", 30.0)
    assert order(policy, late, early) == ["early", "late"]
    assert not policy.takes_turns


def test_sjf_is_fewest_remaining_tokens_first() -> None:
    requests = [
        make_request("first", 50, arrival=1, max_tokens=50),  # nothing waited before it: nobody overtakes
        make_request("long", 10, arrival=2, max_tokens=400),
        make_request("prompt", 90, arrival=3, max_tokens=10),
        make_request("short", 1, arrival=4, max_tokens=9),
    ]
    policy = make_policy("sjf", 30.0)
    for request in requests:
        policy.enqueue(request)
    assert order(policy, *requests) == ["first", "short", "long", "prompt"]


def test_sjf_lets_at_most_nine_backlogs_overtake() -> None:
    policy = make_policy("sjf", 0.0)
    requests = [make_request("first", 1, arrival=0, max_tokens=9)]
    requests.append(make_request("long", 1, arrival=1, max_tokens=999))
    requests += [make_request(f"r{i}", 1, arrival=i, max_tokens=1) for i in range(2, 100)]
    for request in requests:
        policy.enqueue(request)
    names = order(policy, *requests)
    ahead = names.index("long") - 1  # without the one that waited before
    assert 0 < ahead * 2 <= 90


def test_sjf_keeps_a_preempted_requests_turn() -> None:
    policy = make_policy("sjf", 0.0)
    a, b = make_request("a"), make_request("b", arrival=1)
    policy.enqueue(a)
    policy.enqueue(b)
    turn, key = b.turn_tokens, policy.key(b)
    policy.dequeue(b)
    policy.enqueue(b)
    assert (b.turn_tokens, b.backlog_tokens, policy.key(b)) == (turn, 12, key)


def tenants_request(
    name: str, tenant: str | None, arrival: int, prompt: int = 10, priority: int = 0
) -> Request:
    request = make_request(name, prompt, arrival=arrival, priority=priority)
    request.tenant = tenant
    return request


def test_fair_serves_the_tenant_served_least_and_its_best_request() -> None:
    policy = make_policy("fair", 0.0)
    a, b = tenants_request("a", "x", 1), tenants_request("b", "x", 2, priority=-1)
    c, anonymous = tenants_request("c", "y", 3), tenants_request("anonymous", None, 4)
    for request in (a, b, c, anonymous):
        policy.enqueue(request)
    assert order(policy, a, b, c, anonymous) == ["b", "a", "c", "anonymous"]
    policy.charge(b, 10, 0)
    policy.charge(c, 4, 1)
    assert order(policy, a, b, c, anonymous) == ["anonymous", "c", "b", "a"]
    assert policy.lane(a) == policy.lane(b) != policy.lane(anonymous) == ""


def test_fair_lets_no_tenant_outrank_another_by_priority() -> None:
    policy = make_policy("fair", 30.0)
    a = tenants_request("a", "x", 1, priority=MAX_PRIORITY)
    b, c = (
        tenants_request(name, "y", number, priority=MIN_PRIORITY) for number, name in ((2, "b"), (3, "c"))
    )
    for request in (a, b, c):
        policy.enqueue(request)
    assert order(policy, a, b, c) == ["a", "b", "c"], "equally served: whoever began to wait first"
    policy.dequeue(a)
    policy.charge(a, 10, 0)
    d = tenants_request("d", "x", 4, priority=MIN_PRIORITY)
    policy.enqueue(d)
    policy.charge(b, 10, 0)
    assert order(policy, b, c, d) == ["b", "c", "d"], "who comes back waits behind those who waited"


def test_fair_charges_a_prompt_token_once_however_often_it_is_computed() -> None:
    policy = make_policy("fair", 0.0)
    assert isinstance(policy, FairPolicy)
    request = tenants_request("a", "x", 1, prompt=10)
    policy.enqueue(request)
    request.num_computed_tokens = 4  # found in the prefix cache
    policy.charge(request, 3, 0)
    assert policy.counters.of("x") == 3.0
    request.num_computed_tokens = 0  # preempted
    request.token_ids.append(1)
    policy.charge(request, 8, 0)
    assert policy.counters.of("x") == 4.0
    request.num_computed_tokens = 8
    policy.charge(request, 3, 0)  # two of the prompt, and one generated before
    assert policy.counters.of("x") == 6.0


def test_fair_weighs_tokens_and_tenants_as_told() -> None:
    policy = make_policy("fair", 0.0, FairnessWeights(prompt=3.0, output=5.0, tenants={"x": 2.0}))
    assert isinstance(policy, FairPolicy)
    request = tenants_request("a", "x", 1)
    policy.charge(request, 1, 1)
    assert policy.counters.of("x") == 4.0


@pytest.mark.parametrize("name", ["fcfs", "sjf", "priority", "deadline", "orca", "fair"])
def test_each_policy_goes_by_its_name(name: str) -> None:
    assert make_policy(name, 30.0).name == name


def test_a_policy_has_to_rank() -> None:
    with pytest.raises(NotImplementedError):
        SchedulingPolicy().key(make_request())


def test_sjf_counts_what_runs_as_backlog_until_it_ends() -> None:
    policy = make_policy("sjf", 0.0)
    running, ended, late = make_request("a"), make_request("b", arrival=1), make_request("c", arrival=2)
    for request in (running, ended):
        policy.enqueue(request)
        policy.dequeue(request)
    running.num_computed_tokens = 5
    ended.status = RequestStatus.FINISHED
    policy.enqueue(late)
    assert late.backlog_tokens == 7
