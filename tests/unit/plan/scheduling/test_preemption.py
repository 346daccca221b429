import pytest

from engine.errors import StartRefused
from engine.plan.request import Request
from engine.plan.scheduling.policy import FcfsPolicy
from engine.plan.scheduling.preemption import PreemptionPolicy
from engine.plan.scheduling.service_rates import ServiceRates
from tests.support.factories import make_request, preempted


def rates(swap_bytes_a_second: float) -> ServiceRates:
    """A token takes a millisecond to compute."""
    found = ServiceRates()
    for num_prefill in (0, 100, 200, 300) * 8:
        found.observe(num_prefill, 1, 0.01 + 0.001 * num_prefill)
    found.observe_swap(1_000_000, 1_000_000 / swap_bytes_a_second)
    return found


CHEAP, DEAR = rates(1e9), rates(1e3)


@pytest.mark.parametrize(
    ("mode", "rates", "expected"),
    [
        ("recompute", CHEAP, False),
        ("swap", DEAR, True),
        ("auto", CHEAP, True),
        ("auto", DEAR, False),
        ("auto", None, False),
    ],
)
def test_the_mode_decides(mode: str, rates: ServiceRates | None, expected: bool) -> None:
    policy = PreemptionPolicy(mode, 8, rates, 1000)
    assert policy.swaps(9, 3, has_room=True) is expected
    assert not policy.swaps(9, 3, has_room=False), "a full host means recompute"
    assert not policy.swaps(0, 0, has_room=True), "there is nothing to save"


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


def test_measured_rates_are_compared() -> None:
    rates = ServiceRates()
    assert not rates.swap_is_cheaper(64, 4_000), "how long computing takes is unknown"
    for num_prefill in (0, 100, 200, 300) * 8:
        rates.observe(num_prefill, 1, 0.01 + 0.001 * num_prefill)
    assert rates.swap_is_cheaper(64, 4_000), "it must be tried to be known"
    rates.observe_swap(1_000_000, 1.0)
    assert rates.swap_is_cheaper(64, 4_000), "8 ms against 64"
    assert not rates.swap_is_cheaper(64, 40_000), "80 ms against 64"
