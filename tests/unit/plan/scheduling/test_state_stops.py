"""Where the chunks of prompts end so that the states behind them can be shared."""

from __future__ import annotations

from engine.plan.kv.paged_kv_manager import Rewindable
from engine.plan.request import Request
from engine.plan.scheduling.batcher import ContinuousBatcher
from engine.plan.step_records import BatchDecision
from tests.support.factories import make_batcher, make_request, make_runner, run_step
from tests.support.fakes import FakeRunner


def state_batcher(num_snapshots: int = 8, **limits: int) -> ContinuousBatcher:
    """Blocks of 4 tokens; a stop is worth 8 tokens, and comes each 32."""
    batcher = make_batcher(
        num_snapshots=num_snapshots,
        rewindable=Rewindable.DRAFTS,
        prefix_caching=True,
        num_blocks=128,
        max_model_len=128,
        max_num_batched_tokens=limits.get("budget", 512),
    )
    stops = batcher.running.lookup.stops
    stops.least, stops.period = 8, 32
    return batcher


def served(
    batcher: ContinuousBatcher, *requests: Request, runner: FakeRunner | None = None
) -> list[BatchDecision]:
    """The decisions until they have ended."""
    runner, decisions = runner or make_runner(batcher), []
    for request in requests:
        batcher.add(request)
    while batcher.has_work:
        decisions.append(run_step(batcher, runner)[0])
        batcher.kv.check_integrity()
    return decisions


def ends_of(decisions: list[BatchDecision], request_id: str) -> list[int]:
    """Where each step of a request's prompt ended."""
    entries = [entry for decision in decisions for entry in decision.scheduled]
    return [e.first_position + e.num_tokens for e in entries if e.request_id == request_id]


def num_saves(decisions: list[BatchDecision]) -> int:
    inputs = [decision.inputs for decision in decisions if decision.inputs is not None]
    return sum(len(each.moves.state_saves) for each in inputs)


def test_a_prompt_is_computed_up_to_each_period_and_its_last_whole_block() -> None:
    decisions = served(state_batcher(), make_request("a", list(range(77)), max_tokens=1))
    assert ends_of(decisions, "a") == [32, 64, 76, 77]
    assert num_saves(decisions) == 3


def test_a_stop_too_close_to_the_one_before_is_left_out() -> None:
    decisions = served(state_batcher(), make_request("a", list(range(39)), max_tokens=1))
    assert ends_of(decisions, "a") == [32, 39]
    decisions = served(state_batcher(), make_request("b", list(range(7)), max_tokens=1))
    assert ends_of(decisions, "b") == [7]


def test_without_snapshots_a_prompt_is_one_chunk() -> None:
    decisions = served(state_batcher(0), make_request("a", list(range(77)), max_tokens=1))
    assert ends_of(decisions, "a") == [77] and num_saves(decisions) == 0


def test_small_chunks_come_past_the_same_stops() -> None:
    decisions = served(state_batcher(budget=20), make_request("a", list(range(77)), max_tokens=1))
    assert ends_of(decisions, "a") == [20, 32, 52, 64, 76, 77]
    assert num_saves(decisions) == 3


def test_the_second_that_begins_alike_stops_where_it_parts_from_the_first() -> None:
    batcher = state_batcher()
    runner = make_runner(batcher)
    one = make_request("one", [*range(21), *[90] * 10], max_tokens=1)
    two = make_request("two", [*range(21), *[91] * 10], max_tokens=1)
    three = make_request("three", [*range(21), *[92] * 10], max_tokens=1)
    served(batcher, one, runner=runner)
    assert ends_of(served(batcher, two, runner=runner), "two") == [20, 28, 31]
    assert ends_of(served(batcher, three, runner=runner), "three")[0] == 28
    assert [request.num_cached_tokens for request in (one, two, three)] == [0, 0, 20]


def test_those_that_come_together_wait_for_the_first_if_that_saves_much() -> None:
    batcher = state_batcher()
    runner = make_runner(batcher)
    alike = [make_request(f"r{n}", [*range(21), *[90 + n] * 10], arrival=n, max_tokens=1) for n in range(3)]
    decisions = served(batcher, *alike, runner=runner)
    assert ends_of(decisions, "r0") == [20, 28, 31]
    assert [request.num_cached_tokens for request in alike] == [0, 20, 20]
    little = [
        make_request(f"s{n}", [*[80] * 5, *[90 + n] * 9], arrival=9 + n, max_tokens=1) for n in range(3)
    ]
    decisions = served(batcher, *little, runner=runner)
    assert len(decisions[0].scheduled) == 3, "one block in common is nothing to wait for"


def test_decodes_are_saved_where_a_block_ends_and_the_newest_alone_is_kept() -> None:
    batcher = state_batcher()
    decisions = served(batcher, make_request("a", list(range(9)), max_tokens=20))
    assert num_saves(decisions) == 6, "behind 8 of the prompt, then 12, 16, 20, 24 and 28"
    assert len(batcher.kv.snapshots) == 2


def test_what_a_step_saved_that_failed_is_not_kept() -> None:
    batcher = state_batcher()
    batcher.add(make_request("a", list(range(77)), max_tokens=2))
    decision = batcher.step()
    assert decision.inputs is not None and decision.inputs.moves.state_saves
    assert batcher.kv.snapshots.pending("a") == (8,)
    batcher.abandon(decision)
    assert batcher.kv.snapshots.pending("a") == ()
    batcher.kv.check_integrity()
