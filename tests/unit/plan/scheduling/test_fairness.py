import pytest

from engine.errors import StartRefused
from engine.plan.scheduling.policy import FairnessWeights, VirtualCounters


def make_counters(**tenants: float) -> VirtualCounters:
    return VirtualCounters(FairnessWeights(prompt=1.0, output=2.0, tenants=tenants))


def test_service_is_counted_in_weighted_tokens() -> None:
    counters = make_counters()
    counters.join("a")
    counters.charge("a", 10, 0)
    counters.charge("a", 0, 3)
    assert counters.of("a") == 16.0


def test_a_heavier_tenant_is_charged_less() -> None:
    counters = make_counters(big=4.0)
    counters.join("big")
    counters.join("small")
    for tenant in ("big", "small"):
        counters.charge(tenant, 8, 0)
    assert (counters.of("big"), counters.of("small")) == (2.0, 8.0)


def test_an_idle_tenant_comes_back_at_the_least_counter_of_those_that_wait() -> None:
    counters = make_counters()
    counters.join("a")
    counters.join("b")
    counters.charge("a", 100, 0)
    counters.charge("b", 70, 0)
    counters.join("idle")
    assert counters.of("idle") == 70.0


def test_a_tenant_that_was_served_more_is_not_set_back() -> None:
    counters = make_counters()
    counters.join("a")
    counters.join("b")
    counters.charge("b", 50, 0)
    counters.leave("b")
    counters.charge("b", 5, 0)  # what it has running goes on
    counters.join("b")
    assert counters.of("b") == 55.0
    assert counters.of("a") == 0.0


def test_with_nobody_waiting_the_last_one_that_left_sets_the_level() -> None:
    counters = make_counters()
    counters.join("a")
    counters.leave("a")
    counters.charge("a", 30, 0)  # it was served after it had left the queue
    counters.join("b")
    assert counters.of("b") == 30.0


def test_the_first_of_all_starts_at_nothing() -> None:
    counters = make_counters()
    counters.join("a")
    counters.join("a")
    counters.leave("a")
    assert counters.of("a") == counters.of("b") == 0.0


def test_waiting_keeps_the_counter_where_service_left_it() -> None:
    counters = make_counters()
    counters.join("patient")
    counters.join("busy")
    counters.charge("busy", 100, 0)
    counters.join("busy")
    assert counters.of("patient") == 0.0


def test_counters_of_tenants_that_are_gone_do_not_pile_up() -> None:
    counters = make_counters()
    for number in range(10_000):
        counters.join(f"t{number}")
        counters.charge(f"t{number}", 1, 0)
        counters.leave(f"t{number}")
    assert len(counters._counters) <= 2 * VirtualCounters.PRUNE_ABOVE
    assert counters.of("t0") == counters.of("anybody")


def test_counters_above_the_floor_survive() -> None:
    counters = make_counters()
    counters.join("least")
    for number in range(500):
        counters.join(f"t{number}")
        counters.charge(f"t{number}", 5, 0)
        counters.leave(f"t{number}")
    assert all(counters.of(f"t{number}") == 5.0 for number in range(500))


@pytest.mark.parametrize("weights", [{"prompt": 0.0}, {"output": -1.0}, {"tenants": {"a": 0.0}}])
def test_weights_must_be_above_zero(weights: dict[str, float]) -> None:
    with pytest.raises(StartRefused, match="must be above 0"):
        FairnessWeights(**weights)  # type: ignore[arg-type]
