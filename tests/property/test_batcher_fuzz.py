"""The batcher, played from seeds: no wrong text, no leak, no stall, whatever is drafted, ended or fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from engine.plan.kv.paged_kv_manager import PagedKvManager
from engine.plan.request import Request
from engine.plan.scheduling.running_set import RunningSet
from engine.plan.scheduling.step_planner import StepPlanner
from tests.support.batcher_fuzz import Draw, play
from tests.support.simulation import POLICIES, PREEMPTION_LIMITS, PREEMPTIONS

NUM_SEEDS = 300
NUM_SLOW_SEEDS = 10_000

# What a fuzzer that has gone lame would no longer do, and how often it does at least in so many runs.
EVENTS = {
    "length": 300,
    "stop": 50,
    "abort": 100,
    "error": 100,
    "preempted": 100,
    "swapped": 20,
    "swapped in": 50,
    "states in": 8,
    "forks": 30,
    "drafts": 1000,
    "trees": 100,
    "spent with drafts": 200,
    "steps ahead": 500,
    "drawn later": 100,
    "failed rows": 100,
    "failed passes": 50,
    "out of memory": 50,
}


@pytest.mark.by_default("a third")
@pytest.mark.parametrize("seeds", [range(100, 200), range(NUM_SEEDS)], ids=["a third", "all"])
def test_every_request_gets_its_text_and_nothing_is_left(seeds: range) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        seen += play(seed)
    for event, least in EVENTS.items():
        assert seen[event] * NUM_SEEDS >= least * len(seeds), f"{event} hardly ever happens: {seen}"


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_ten_thousand_seeds() -> None:
    for seed in range(NUM_SEEDS, NUM_SLOW_SEEDS):
        play(seed)


def test_every_policy_mode_and_limit_is_played() -> None:
    limits = [Draw(seed).scenario().limits for seed in range(NUM_SEEDS)]
    for name, values in (
        ("policy", POLICIES),
        ("preemption", PREEMPTIONS),
        ("max_preemptions", PREEMPTION_LIMITS),
        ("prefix_caching", (True, False)),
    ):
        played = Counter(chosen[name] for chosen in limits)
        assert played.keys() == set(values)
        assert min(played.values()) >= 20, f"{name} is hardly ever one of them: {played}"


def first_failure(monkeypatch: pytest.MonkeyPatch, **faults: Callable[..., object]) -> BaseException | None:
    """What goes wrong first in the default seeds, with these faults in the scheduler."""
    for name, fault in faults.items():
        owner = next(kind for kind in (RunningSet, PagedKvManager, StepPlanner) if hasattr(kind, name))
        monkeypatch.setattr(owner, name, fault)
    for seed in range(NUM_SEEDS):
        try:
            play(seed)
        except Exception as failure:
            return failure
    return None


def cut_always(running: RunningSet, request: Request) -> None:
    """Also what a spent request keeps in reserve."""
    running.kv.rewind(request.request_id, request.num_computed_tokens)


def choose_carelessly(planner: StepPlanner, decodes: list[Request], limit: int) -> Sequence[Request]:
    """Leave out the last only of those that have no slot."""
    chosen = planner._running.take_turns(decodes, limit)
    preempted, stalled = planner._running.make_room(chosen)
    planner.requeue(preempted)
    return [request for request in chosen if request in planner._running and request not in stalled[-1:]]


def row_unchecked(kv: PagedKvManager, request_id: str, num_tokens: int) -> int:
    """Also where blocks are missing."""
    return kv.row(request_id)


def test_it_finds_a_request_that_writes_into_a_block_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = first_failure(
        monkeypatch,
        release_draft_room=cut_always,
        _choose_decodes=choose_carelessly,
        row_for=row_unchecked,
    )
    assert failure is not None
    assert any("python -m tests.support.batcher_fuzz" in note for note in failure.__notes__), (
        "it can be replayed"
    )


def test_it_finds_a_reserve_that_drafts_have_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = first_failure(monkeypatch, release_draft_room=cut_always)
    assert "two steps without progress" in str(failure)
