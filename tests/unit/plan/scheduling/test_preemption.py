import pytest

from engine.errors import StartRefused
from engine.plan.request import Request
from engine.plan.scheduling.cost_model import CostModel
from engine.plan.scheduling.policy import FcfsPolicy
from engine.plan.scheduling.preemption import MeasuredSwapCost, PreemptionPolicy
from tests.support.factories import make_request, preempted


class Cost:
    def __init__(self, swap_is_cheaper: bool) -> None:
        self.answer = swap_is_cheaper

    def swap_is_cheaper(self, num_tokens: int, num_blocks: int) -> bool:
        return self.answer


@pytest.mark.parametrize(
    ("mode", "cost", "expected"),
    [
        ("recompute", Cost(True), False),
        ("swap", Cost(False), True),
        ("auto", Cost(True), True),
        ("auto", Cost(False), False),
        ("auto", None, False),
    ],
)
def test_the_mode_decides(mode: str, cost: Cost | None, expected: bool) -> None:
    policy = PreemptionPolicy(mode, 8, cost)
    assert policy.swaps(9, 3, 3) is expected
    assert not policy.swaps(9, 3, 2), "a full host means recompute"
    assert not policy.swaps(0, 0, 3), "there is nothing to save"


def test_an_unknown_mode_stops_the_start() -> None:
    with pytest.raises(StartRefused, match="preemption 'drop' is not available: choose one of auto"):
        PreemptionPolicy("drop")


def test_the_last_by_policy_gives_way_but_neither_the_oldest_nor_the_spent() -> None:
    policy = PreemptionPolicy("recompute", 2)
    a, b, c = (make_request(name, arrival=i) for i, name in enumerate("abc"))
    running: list[Request] = [b, c, a]
    key = FcfsPolicy().key
    assert policy.victim(running, a, key) is c
    preempted(c, 2)
    assert policy.is_spent(c)
    assert policy.victim(running, a, key) is b
    preempted(b, 3)
    assert policy.victim(running, a, key) is None


def test_measured_costs_are_compared() -> None:
    costs = CostModel()
    cost = MeasuredSwapCost(costs, 1000)
    assert not cost.swap_is_cheaper(64, 4), "nobody knows what computing takes"
    for num_prefill in (0, 100, 200, 300) * 8:
        costs.observe(num_prefill, 1, 0.01 + 0.001 * num_prefill)
    assert cost.swap_is_cheaper(64, 4), "it must be tried to be known"
    costs.observe_swap(1_000_000, 1.0)
    assert cost.swap_is_cheaper(64, 4), "8 ms against 64"
    assert not cost.swap_is_cheaper(64, 40), "80 ms against 64"
