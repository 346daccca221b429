import pytest

from engine.plan.metrics.tenant_shares import MAX_SHOWN, TenantShares
from tests.support.fakes import ManualClock


def test_shares_add_up_and_the_anonymous_tenant_has_a_name() -> None:
    shares = TenantShares(ManualClock())
    assert shares.shares() == {"anonymous": 0.0}
    shares.count("a", 30)
    shares.count(None, 10)
    assert shares.shares() == {"a": 0.75, "anonymous": 0.25}


def test_what_is_long_past_counts_little_however_long_it_runs() -> None:
    clock = ManualClock()
    shares = TenantShares(clock)
    for step in range(2000):
        shares.count(f"t{step // 1000}", 1)
        clock.advance(60.0)
    assert shares.shares()["t1"] == pytest.approx(1.0)


def test_many_tenants_make_a_bounded_set_of_labels() -> None:
    shares = TenantShares(ManualClock())
    for i in range(5000):
        shares.count(f"t{i}", 1 + i)
    found = shares.shares()
    assert len(found) == MAX_SHOWN + 1
    assert next(iter(found)) == "t4999"
    assert sum(found.values()) == pytest.approx(1.0)
