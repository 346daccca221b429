"""What the batcher says about requests, and what can be changed of them while they wait or run."""

import pytest

from engine.plan.request import FinishReason, Request
from engine.plan.scheduling.batcher import ContinuousBatcher
from tests.support.factories import make_batcher, make_request, make_runner, run_step
from tests.support.fakes import FakeRunner, ManualClock


def seated(batcher: ContinuousBatcher, *requests: Request) -> FakeRunner:
    for request in requests:
        batcher.add(request)
    runner = make_runner(batcher)
    run_step(batcher, runner)
    return runner


def waits_because(batcher: ContinuousBatcher, request_id: str) -> str | None:
    explanation = batcher.explain(request_id)
    assert explanation is not None
    return explanation.waits_because


# Changing them.


def test_a_waiting_request_is_ranked_anew() -> None:
    batcher = make_batcher(max_num_seqs=1, policy="priority")
    for i, name in enumerate("abc"):
        batcher.add(make_request(name, arrival=i))
    assert batcher.reprioritize("c", priority=-1)
    assert [entry.request_id for entry in batcher.step().scheduled] == ["c"]


def test_a_new_deadline_counts_too() -> None:
    batcher = make_batcher(max_num_seqs=1, policy="deadline")
    for i, name in enumerate("ab"):
        batcher.add(make_request(name, arrival=i))
    assert batcher.reprioritize("b", deadline=200.0)
    explanation = batcher.explain("b")
    assert explanation is not None and explanation.position == 1


def test_a_running_request_becomes_the_victim() -> None:
    batcher = make_batcher(num_blocks=6, block_size=2, max_num_seqs=3, max_model_len=12, policy="priority")
    requests = [make_request(name, 2, arrival=i, max_tokens=10) for i, name in enumerate("abc")]
    runner = seated(batcher, *requests)
    assert batcher.reprioritize("b", priority=5)
    while not any(request.num_preemptions for request in requests):
        run_step(batcher, runner)
    assert [request.num_preemptions for request in requests] == [0, 1, 0]


def test_nothing_given_changes_nothing() -> None:
    batcher = make_batcher()
    request = make_request("a", priority=3)
    batcher.add(request)
    assert batcher.reprioritize("a")
    assert (request.priority, request.deadline) == (3, None)


def test_what_has_ended_is_not_there() -> None:
    batcher = make_batcher()
    batcher.add(make_request("a"))
    batcher.finish("a", FinishReason.ABORT)
    assert not batcher.reprioritize("a", priority=1)
    assert batcher.explain("a") is None


# Explaining them.


def test_a_running_request_waits_for_nothing() -> None:
    batcher = make_batcher()
    seated(batcher, make_request("a", 5))
    explanation = batcher.explain("a")
    assert explanation is not None
    assert (explanation.status, explanation.waits_because, explanation.position) == ("running", None, None)
    assert (explanation.num_known_tokens, explanation.num_computed_tokens, explanation.num_blocks) == (
        6,
        5,
        2,
    )


def test_all_seats_are_taken() -> None:
    batcher = make_batcher(max_num_seqs=1)
    seated(batcher, make_request("a"), make_request("b", arrival=1), make_request("c", arrival=2))
    assert waits_because(batcher, "b") == "It waits for a seat: 1 of 1 requests run."
    assert waits_because(batcher, "c") == "It waits behind 1 request by policy fcfs."
    explanation = batcher.explain("c")
    assert explanation is not None and explanation.position == 2


def test_others_go_first() -> None:
    batcher = make_batcher(max_num_seqs=1, policy="priority")
    for i, name in enumerate("abc"):
        batcher.add(make_request(name, arrival=i))
    assert waits_because(batcher, "c") == "It waits behind 2 requests by policy priority."


def test_blocks_are_missing() -> None:
    batcher = make_batcher(num_blocks=4, block_size=4, max_model_len=16)
    seated(batcher, make_request("a", 8), make_request("b", 8, arrival=1, max_tokens=4))
    assert waits_because(batcher, "b") == (
        "It waits for KV blocks: it needs 2 and one must be left for each of 1 running requests; 2 are free."
    )


def test_nothing_is_missing() -> None:
    batcher = make_batcher()
    batcher.add(make_request("a"))
    assert waits_because(batcher, "a") == "It waits for the next step."


def test_a_deadline_that_will_probably_be_missed_is_said() -> None:
    batcher = make_batcher(max_num_seqs=1, policy="deadline")
    requests = [make_request(name, arrival=i) for i, name in enumerate("ab")]
    seated(batcher, *requests)
    requests[1].mark_late()
    assert waits_because(batcher, "b") == (
        "It waits for a seat: 1 of 1 requests run. "
        "It will probably miss its deadline: those that can be in time go first."
    )


def test_preemptions_are_remembered() -> None:
    clock = ManualClock()
    batcher = make_batcher(num_blocks=4, block_size=2, max_num_seqs=2, max_model_len=8, clock=clock)
    requests = [make_request(name, 2, arrival=i, max_tokens=6) for i, name in enumerate("ab")]
    runner = seated(batcher, *requests)
    while not requests[1].num_preemptions:
        clock.advance(1.0)
        run_step(batcher, runner)
    explanation = batcher.explain("b")
    assert explanation is not None
    assert explanation.preemptions == ((clock.now, "recompute"),)
    reason = explanation.waits_because
    assert reason is not None and reason.startswith("It was preempted and waits to resume")


# Judging deadlines.


def learned(batcher: ContinuousBatcher) -> ContinuousBatcher:
    """A step takes 10 ms, and 1 ms more for each token."""
    for tokens in range(64):
        batcher.rates.observe(tokens % 16, tokens // 16, 0.010 + 0.001 * (tokens % 16 + tokens // 16))
    return batcher


def urgent(in_s: float, name: str = "urgent", max_tokens: int = 10) -> Request:
    """A prompt of 20 tokens; ManualClock starts at 100."""
    request = make_request(name, 20, arrival=9, max_tokens=max_tokens)
    request.deadline = 100.0 + in_s
    return request


NEEDED_S = 2 * 0.010 + 0.020 + 9 * 0.011  # two chunks of the prompt, then nine more tokens


def test_nothing_is_refused_without_a_deadline_or_while_rates_are_unknown() -> None:
    assert make_batcher().can_meet(urgent(0.001))
    assert learned(make_batcher()).can_meet(make_request())


def test_a_request_alone_needs_its_own_time() -> None:
    batcher = learned(make_batcher(max_num_batched_tokens=16))
    assert batcher.can_meet(urgent(NEEDED_S * 1.02))
    assert not batcher.can_meet(urgent(NEEDED_S * 0.98))


def test_a_free_seat_means_no_wait() -> None:
    batcher = learned(make_batcher(max_num_batched_tokens=16, max_num_seqs=2))
    seated(batcher, make_request("a", max_tokens=40))
    assert batcher.can_meet(urgent(NEEDED_S * 1.02))


def test_a_seat_must_become_free_first() -> None:
    batcher = learned(make_batcher(max_num_batched_tokens=16, max_num_seqs=1))
    seated(batcher, make_request("a", max_tokens=40))
    assert not batcher.can_meet(urgent(NEEDED_S + 39 * 0.011 * 0.98))
    assert batcher.can_meet(urgent(NEEDED_S + 39 * 0.011 * 1.02))


def test_two_that_run_at_once_share_their_steps() -> None:
    batcher = learned(make_batcher(max_num_batched_tokens=16, max_num_seqs=2))
    seated(batcher, *(make_request(name, 2, arrival=i, max_tokens=31) for i, name in enumerate("ab")))
    waiting = [make_request(name, 2, arrival=2 + i, max_tokens=30) for i, name in enumerate("cd")]
    for request in waiting:
        batcher.add(request)
    served_s = (30 + 30 + 30) / 2 * 0.012  # three of the four have to end
    assert not batcher.can_meet(urgent(NEEDED_S + served_s * 0.98))
    assert batcher.can_meet(urgent(NEEDED_S + served_s * 1.02))


@pytest.mark.parametrize(("policy", "can"), [("fcfs", False), ("deadline", True), ("sjf", True)])
def test_only_those_that_go_first_count(policy: str, can: bool) -> None:
    batcher = learned(make_batcher(max_num_batched_tokens=16, max_num_seqs=1, policy=policy))
    for i in range(5):
        batcher.add(make_request(f"r{i}", arrival=i, max_tokens=50))
    assert batcher.can_meet(urgent(NEEDED_S * 1.02)) is can


def test_a_prefix_is_being_computed_by_another() -> None:
    batcher = make_batcher(max_num_batched_tokens=4, prefix_caching=True)
    prompt = range(12)
    seated(batcher, make_request("a", prompt), make_request("b", prompt, arrival=1))
    batcher.step()
    assert waits_because(batcher, "b") == (
        "It waits until a has computed the prompt tokens that both begin with."
    )
