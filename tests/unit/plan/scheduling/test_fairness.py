import pytest

from engine.errors import StartRefused
from engine.plan.request import Request
from engine.plan.scheduling.batcher import ContinuousBatcher
from engine.plan.scheduling.policy import FairnessWeights, VirtualCounters
from tests.support.factories import make_batcher, make_request, make_runner, run_step
from tests.support.fakes import FakeRunner, expected_output


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


CREDIT = VirtualCounters.CREDIT


def test_an_idle_tenant_comes_back_a_little_below_the_least_counter_of_those_that_wait() -> None:
    counters = make_counters()
    counters.join("a")
    counters.join("b")
    counters.charge("a", 10_000, 0)
    counters.charge("b", 7_000, 0)
    counters.join("idle")
    assert counters.of("idle") == 7_000.0 - CREDIT
    assert counters.of("never seen") == 7_000.0 - CREDIT


def test_a_tenant_that_comes_back_within_a_moment_keeps_its_credit() -> None:
    counters = make_counters()
    counters.join("busy")
    counters.charge("busy", 10_000, 0)
    counters.join("closed loop")
    counters.leave("closed loop")
    counters.charge("closed loop", 100, 50)
    counters.charge("busy", 150, 0)
    counters.join("closed loop")  # its next request: it waits behind nobody served more
    assert counters.of("closed loop") == 10_000.0 - CREDIT + 200 < counters.of("busy")


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
    counters.charge("a", 3_000, 0)  # it was served after it had left the queue
    counters.join("b")
    assert counters.of("b") == 3_000.0 - CREDIT


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


def test_counters_well_above_the_floor_survive() -> None:
    counters = make_counters()
    counters.join("least")
    for number in range(500):
        counters.join(f"t{number}")
        counters.charge(f"t{number}", 5_000, 0)
        counters.leave(f"t{number}")
    assert all(counters.of(f"t{number}") == 5_000.0 for number in range(500))


@pytest.mark.parametrize("weights", [{"prompt": 0.0}, {"output": -1.0}, {"tenants": {"a": 0.0}}])
def test_weights_must_be_above_zero(weights: dict[str, float]) -> None:
    with pytest.raises(StartRefused, match="must be above 0"):
        FairnessWeights(**weights)  # type: ignore[arg-type]


def flooded(seats: int = 4, policy: str = "fair") -> tuple[ContinuousBatcher, FakeRunner]:
    """A batcher whose seats one tenant has taken, with as many more of its requests waiting."""
    batcher = make_batcher(max_num_seqs=seats, policy=policy, prefix_caching=True)
    runner = make_runner(batcher)
    for number in range(2 * seats):
        add_for("flood", f"f{number}", batcher, arrival=number)
    run_step(batcher, runner)
    run_step(batcher, runner)
    return batcher, runner


def add_for(tenant: str, name: str, batcher: ContinuousBatcher, arrival: int, length: int = 4) -> Request:
    request = make_request(name, length, arrival=arrival, max_tokens=20, seed=arrival)
    request.tenant = tenant
    batcher.add(request)
    return request


def seats_of(batcher: ContinuousBatcher) -> str:
    return " ".join(sorted(request.request_id for request in batcher.running))


def test_a_tenant_without_a_seat_gets_that_of_the_newest_of_who_has_all_in_the_next_step() -> None:
    batcher, runner = flooded()
    assert seats_of(batcher) == "f0 f1 f2 f3"
    quiet = add_for("quiet", "q", batcher, arrival=20)
    decision, _ = run_step(batcher, runner)
    assert decision.preempted == ("f3",)
    assert seats_of(batcher) == "f0 f1 f2 q"
    assert quiet.num_output_tokens == 1
    while not quiet.is_finished:
        decision, _ = run_step(batcher, runner)
        assert not decision.preempted, "a seat moves once"
    assert quiet.output_token_ids == expected_output(list(range(200, 204)), 20, seed=20)


def test_seats_move_only_up_to_the_share_and_what_gave_way_goes_on_with_the_right_text() -> None:
    batcher, runner = flooded()
    requests = [*batcher.running, *batcher.queue]
    requests += [add_for("quiet", f"q{number}", batcher, arrival=20 + number) for number in range(3)]
    for _ in range(4):
        run_step(batcher, runner)
    assert seats_of(batcher) == "f0 f1 q0 q1"
    while batcher.has_work:
        run_step(batcher, runner)
    assert sum(request.num_preemptions for request in requests) <= 3, "one for each that came"
    for request in requests:
        prompt = request.token_ids[:4]
        assert request.output_token_ids == expected_output(prompt, 20, seed=request.arrival)
    assert batcher.kv.num_used_blocks == 0


def test_the_first_of_a_third_tenant_has_a_seat_of_who_has_most() -> None:
    batcher, runner = flooded()
    for number, tenant in enumerate(("quiet", "third")):
        add_for(tenant, tenant, batcher, arrival=20 + number)
    run_step(batcher, runner)
    run_step(batcher, runner)
    assert seats_of(batcher) == "f0 f1 quiet third"


def test_nobody_gives_way_to_its_own_tenant_or_under_another_policy() -> None:
    for policy in ("fair", "fcfs", "priority"):
        batcher, runner = flooded(policy=policy)
        add_for("flood" if policy == "fair" else "quiet", "late", batcher, arrival=20)
        assert not any(run_step(batcher, runner)[0].preempted for _ in range(4))


def test_a_single_seat_does_not_move() -> None:
    batcher, runner = flooded(seats=1)
    add_for("quiet", "q", batcher, arrival=20)
    assert not any(run_step(batcher, runner)[0].preempted for _ in range(4))


def test_a_request_that_gave_way_too_often_keeps_its_seat() -> None:
    batcher, runner = flooded(seats=2)
    for number in range(30):
        add_for("quiet", f"q{number}", batcher, arrival=20 + number)
    requests = [*batcher.running, *batcher.queue]
    while batcher.has_work:
        run_step(batcher, runner)
    assert max(request.num_preemptions for request in requests) <= 8


def test_no_step_is_decided_ahead_while_a_seat_is_to_move() -> None:
    batcher, runner = flooded(seats=2)
    decision = batcher.step()
    add_for("quiet", "q", batcher, arrival=20)
    assert batcher.step_ahead(decision) is None
    assert decision.inputs is not None
    batcher.commit(decision, runner.run(decision.inputs).rows)
    assert batcher.step().preempted == ("f1",)
