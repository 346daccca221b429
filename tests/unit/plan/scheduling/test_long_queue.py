"""A long queue must not make a step dear: what is counted is how often the policy is asked for a rank."""

import pytest

from engine.plan.request import Request
from engine.plan.scheduling.batcher import ContinuousBatcher
from engine.plan.step_records import SampledRows
from tests.support.factories import make_batcher, make_request

POLICIES = ("fcfs", "sjf", "priority", "deadline", "orca", "fair")
NUM_STEPS = 200


def arrive(batcher: ContinuousBatcher, number: int) -> None:
    request = make_request(f"r{number}", number % 7 + 1, arrival=number, max_tokens=number % 5 + 1)
    request.tenant, request.priority = f"t{number % 4}", number % 3
    request.deadline = 1000.0 - number % 97
    batcher.add(request)


def ranks_asked(policy: str, num_waiting: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many ranks as many arrivals and steps ask for while so many wait."""
    batcher = make_batcher(policy=policy, num_blocks=256)
    for number in range(num_waiting):
        arrive(batcher, number)
    asked = 0
    kind = type(batcher._policy)
    key = kind.key

    def counting(self: object, request: Request) -> tuple[float, ...]:
        nonlocal asked
        asked += 1
        return key(self, request)  # type: ignore[arg-type]

    monkeypatch.setattr(kind, "key", counting)
    for number in range(NUM_STEPS):
        arrive(batcher, num_waiting + number)
        decision = batcher.step()
        assert decision.inputs is not None
        batcher.commit(decision, SampledRows([7] * len(decision.inputs.logits_rows)))
    monkeypatch.setattr(kind, "key", key)
    assert batcher.num_waiting >= num_waiting / 2
    return asked


@pytest.mark.parametrize("policy", POLICIES)
def test_ten_thousand_waiting_requests_cost_no_more_than_a_hundred(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = (ranks_asked(policy, num_waiting, monkeypatch) for num_waiting in (400, 10_000))
    assert many <= 1.5 * few
    assert many <= 40 * NUM_STEPS
