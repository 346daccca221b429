"""Which hit is whose: the counting of a fault plan, from any thread; and drafts that go wrong by it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from config import FaultPoint, PlannedFault
from engine.compute.drafters.ngram import NgramDrafter
from engine.faults.fault_counter import FaultCounter
from engine.faults.faulty_drafter import FaultyDrafter
from engine.plan.speculation.drafter import Drafter, DraftJob, read_answers
from tests.support.draft_jobs import draft_request
from tests.support.fake_drafters import FakeDrafter
from tests.support.fakes import VOCAB_SIZE

RAISE: FaultPoint = "forward_raise"


def due(plan: FaultCounter, times: int, *numbers: int | None, point: FaultPoint = RAISE) -> list[int]:
    """The hits, from 1, at which a fault was due."""
    return [hit for hit in range(1, times + 1) if plan.hit_by_all(point, numbers) is not None]


def test_hits_of_a_point_are_counted_over_all_requests() -> None:
    plan = FaultCounter([PlannedFault(RAISE, at=3, count=2)])
    assert due(plan, 2, 1) == []
    assert due(plan, 2, 2) == [1, 2]
    assert due(plan, 5) == []


def test_points_are_counted_apart() -> None:
    plan = FaultCounter([PlannedFault(RAISE, at=2), PlannedFault("logits_nan", at=2)])
    assert (due(plan, 1), due(plan, 1, point="logits_nan")) == ([], [])
    assert (due(plan, 1), due(plan, 1, point="logits_nan")) == ([1], [1])


def test_with_a_request_only_its_own_hits_count() -> None:
    plan = FaultCounter([PlannedFault(RAISE, at=2, request=3)])
    assert due(plan, 5, 1, 2) == []
    assert due(plan, 1, 1, 3) == []
    assert due(plan, 5, 2) == []
    assert due(plan, 3, 3, 3, None) == [1], "twice in one pass is one hit"


def test_of_several_faults_that_are_due_it_is_the_longest() -> None:
    faults = [PlannedFault(RAISE, count=3, seconds=1), PlannedFault(RAISE, at=2, seconds=2)]
    for order in (faults, faults[::-1]):
        plan = FaultCounter(order)
        found = [plan.hit(RAISE) for _ in range(4)]
        assert [fault and fault.seconds for fault in found] == [1, 2, 1, None]


def test_choices_of_a_reply_are_one_arrival() -> None:
    plan = FaultCounter([PlannedFault(RAISE, request=2), PlannedFault(RAISE, request=3)])
    for request_id, group in (("a-0", "a"), ("b-0", "b"), ("b-1", "b"), ("c", "c")):
        assert plan.number_for(group) == {"a": 1, "b": 2, "c": 3}[group]
        plan.arrive(request_id, group)
    assert plan.num_arrivals == 3
    numbers = [plan.number_of(request_id) for request_id in ("a-0", "b-0", "b-1", "c", "nobody")]
    assert numbers == [None, 2, 2, 3, None], "those that no fault names need no number"


def test_a_request_that_is_lost_has_had_its_number() -> None:
    plan = FaultCounter([PlannedFault(RAISE, request=2)])
    plan.lose()
    plan.arrive("a", "a")
    assert plan.number_of("a") == 2


def test_no_hit_is_lost_or_counted_twice_among_threads() -> None:
    plan = FaultCounter([PlannedFault(RAISE, at=1, count=5000)])
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: len(due(plan, 1000)), range(8)))
    assert sum(found) == 5000


# Drafts.


def job(request_id: str, num_wanted: int) -> DraftJob:
    return DraftJob(draft_request(request_id), 1, 0, (5, 6), 2, num_wanted)


def faults_of(fault: PlannedFault, jobs: Sequence[DraftJob], drafter: Drafter) -> list[str | None]:
    """What is wrong with the answers of each of three micro-steps."""
    plan = FaultCounter([fault])
    plan.arrive("a", "a")
    plan.arrive("b", "b")
    faulty = FaultyDrafter(plan, drafter, VOCAB_SIZE)
    return [read_answers(jobs, faulty.draft(jobs), VOCAB_SIZE).fault for _ in range(3)]


OUTSIDE = f"token id {VOCAB_SIZE} is outside the vocabulary [0, {VOCAB_SIZE})"
TOO_MANY = "3 tokens where 2 were wanted"


def test_answers_are_spoiled() -> None:
    jobs = [job("b", 2)]
    assert faults_of(PlannedFault("draft_out_of_vocab", at=2), jobs, FakeDrafter()) == [None, OUTSIDE, None]
    found = faults_of(PlannedFault("draft_too_many", count=2, request=2), jobs, FakeDrafter())
    assert found == [TOO_MANY, TOO_MANY, None]


def test_one_that_has_no_idea_is_given_a_wrong_one_where_drafts_were_wanted() -> None:
    jobs = [job("a", 0), job("b", 2)]
    found = faults_of(PlannedFault("draft_out_of_vocab", at=2), jobs, NgramDrafter())
    assert found == [None, OUTSIDE, None]
    found = faults_of(PlannedFault("draft_too_many", count=2), jobs, NgramDrafter())
    assert found == [TOO_MANY, TOO_MANY, None]
    assert faults_of(PlannedFault("draft_too_many", count=-1, request=1), jobs, NgramDrafter()) == [None] * 3


def test_garbage_is_wrong_but_fits() -> None:
    jobs = [job("a", 3), job("b", 1)]
    plain = FakeDrafter(alpha=1.0, is_stepwise=False)
    right = {draft.request_id: draft.token_ids for draft in plain.draft(jobs).drafts}
    plan = FaultCounter([PlannedFault("draft_garbage", count=-1)])
    faulty = FaultyDrafter(plan, FakeDrafter(alpha=1.0, is_stepwise=False), VOCAB_SIZE)
    result = faulty.draft(jobs)
    assert read_answers(jobs, result, VOCAB_SIZE).fault is None
    for draft in result.drafts:
        assert len(draft.token_ids) == len(right[draft.request_id]) > 0
        assert draft.token_ids != right[draft.request_id]


def test_one_that_may_sleep_is_kept_off_the_event_loop() -> None:
    drafter = FakeDrafter(is_cheap=True)
    assert not FaultyDrafter(FaultCounter([PlannedFault("draft_sleep")]), drafter, VOCAB_SIZE).is_cheap
    assert FaultyDrafter(FaultCounter([PlannedFault("draft_raise")]), drafter, VOCAB_SIZE).is_cheap
