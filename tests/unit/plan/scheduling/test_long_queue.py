"""A long queue must not make a step dear: what is counted is how often the policy is asked for a rank."""

from typing import Any

import pytest

from engine.plan.request import Request
from engine.plan.scheduling.batcher import ContinuousBatcher
from engine.plan.scheduling.policy import FairnessWeights, VirtualCounters
from engine.plan.step_records import SampledRows
from tests.support.factories import make_batcher, make_request

POLICIES = ("fcfs", "sjf", "priority", "deadline", "orca", "fair")
NUM_STEPS = 200


def arrive(batcher: ContinuousBatcher, number: int, num_tenants: int = 4) -> None:
    request = make_request(f"r{number}", number % 7 + 1, arrival=number, max_tokens=number % 5 + 1)
    request.tenant, request.priority = f"t{number % num_tenants}", number % 3
    request.deadline = 1000.0 - number % 97
    batcher.add(request)


def ranks_asked(policy: str, num_waiting: int, monkeypatch: pytest.MonkeyPatch, num_tenants: int = 4) -> int:
    """How many ranks as many arrivals and steps ask for while so many wait."""
    batcher = make_batcher(policy=policy, num_blocks=256)
    for number in range(num_waiting):
        arrive(batcher, number, num_tenants)
    asked = 0
    kind = type(batcher._policy)
    key = kind.key

    def counting(self: object, request: Request) -> tuple[float, ...]:
        nonlocal asked
        asked += 1
        return key(self, request)  # type: ignore[arg-type]

    monkeypatch.setattr(kind, "key", counting)
    for number in range(NUM_STEPS):
        arrive(batcher, num_waiting + number, num_tenants)
        decision = batcher.step()
        assert decision.inputs is not None
        batcher.commit(decision, SampledRows([7] * len(decision.inputs.logits_rows)))
    monkeypatch.setattr(kind, "key", key)
    assert len(batcher.queue) >= num_waiting / 2
    return asked


@pytest.mark.parametrize("policy", POLICIES)
def test_ten_thousand_waiting_requests_cost_no_more_than_a_hundred(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = (ranks_asked(policy, num_waiting, monkeypatch) for num_waiting in (400, 10_000))
    assert many <= 1.5 * few
    assert many <= 40 * NUM_STEPS


def test_two_thousand_tenants_cost_no_more_than_ten(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (ranks_asked("fair", 4_000, monkeypatch, num_tenants) for num_tenants in (10, 2_000))
    assert many <= 1.5 * few


class CountedLookups(dict[str, float]):
    """Counters that count how often one is read."""

    num_read = 0

    def __getitem__(self, tenant: str) -> float:
        self.num_read += 1
        return super().__getitem__(tenant)

    def get(self, tenant: str, default: Any = None) -> Any:
        self.num_read += 1
        return super().get(tenant, default)


def test_a_tenant_s_first_request_costs_no_look_at_all_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VirtualCounters, "PRUNE_ABOVE", 10_000)
    counters = VirtualCounters(FairnessWeights())
    lookups = counters._counters = CountedLookups()
    for number in range(2_000):
        counters.join(f"t{number}")
        counters.charge(f"t{number}", number % 13, 0)
    assert lookups.num_read <= 10 * 2_000, "of 2 million"
