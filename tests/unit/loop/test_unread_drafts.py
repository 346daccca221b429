"""Drafts that a step verifies before the host has read them: who waits for what, and what comes of faults."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from engine.plan.request import Request
from engine.plan.speculation.draft_tape import DraftedToken
from engine.plan.speculation.drafter import Draft, DraftJob, DraftResult, UnreadChains
from engine.plan.speculation.speculation_config import Schedule
from engine.plan.step_records import NO_TOKEN
from tests.support.factories import make_request
from tests.support.fake_drafters import FakeDrafter
from tests.support.fakes import VOCAB_SIZE, ManualClock, expected_output
from tests.support.fixed_grammar import Allowing
from tests.unit.loop.test_run_ahead import LOAD, LONGEST, Stage, draft_thread, settle, until

TOKENS = object()  # the device's


@dataclass
class TellingFake(FakeDrafter):
    """Tells of all its drafts and has them when `is_done` is set; `answers` may change them."""

    alpha: float = 1.0
    is_stepwise: bool = False
    is_done: threading.Event = field(default_factory=threading.Event)
    answers: Callable[[Draft], Draft] = lambda draft: draft
    num_told: int = 0

    def draft_and_tell(self, jobs: Sequence[DraftJob], tell: Callable[[UnreadChains], None]) -> DraftResult:
        """See TellingDrafter."""
        result = self.draft(jobs)
        self.num_told += 1
        names = [draft.request_id for draft in result.drafts]
        tell(UnreadChains(TOKENS, {name: tuple(range(9 * n, 9 * n + 8)) for n, name in enumerate(names)}))
        assert self.is_done.wait(10)
        return replace(result, drafts=tuple(map(self.answers, result.drafts)))


def stage_of(drafter: FakeDrafter, executor: Executor | None, schedule: Schedule = "sync") -> Stage:
    return Stage(schedule, drafter, executor=executor)


async def verify(stage: Stage, *requests: Request) -> dict[str, tuple[DraftedToken, ...]]:
    """The drafts of a step that has begun."""
    stage.run_ahead.choose_arm(len(requests))
    while await stage.run_ahead.draft_once():
        pass
    chosen = {request.request_id: drafted for request, drafted in stage.decoder.choose(requests, LOAD)}
    stage.run_ahead.beside_step()
    return chosen


def commit(stage: Stage, request: Request, drafted: Sequence[DraftedToken], count: int) -> None:
    request.token_ids += expected_output(request.token_ids, count)
    request.num_computed_tokens = len(request.token_ids) - 1
    stage.decoder.commit(request, drafted, count)
    stage.run_ahead.after_step(1, count, 0.02)


async def test_a_step_begins_before_its_drafts_are_read_and_they_are_judged_by_what_they_are() -> None:
    drafter = TellingFake()
    async with draft_thread() as executor:
        stage = stage_of(drafter, executor)
        request = stage.open()
        chosen = (await verify(stage, request))["a"]
        assert [draft.token_id for draft in chosen] == [NO_TOKEN] * LONGEST, "the drafter is not done"
        assert [draft.unread for draft in chosen] == [(TOKENS, place) for place in range(LONGEST)]
        drafter.is_done.set()
        await stage.run_ahead.settle(0.01)
        tape = stage.decoder.links[0]._clients["a"][0].tape
        assert [draft.token_id for draft in tape.drafted] == expected_output(request.token_ids, LONGEST)
        assert all(draft.unread is None for draft in tape.drafted)
        commit(stage, request, chosen, LONGEST + 1)
        stats = stage.decoder.stats
        assert (stats.num_rounds, stats.num_proposed, stats.num_accepted) == (1, LONGEST, LONGEST)
        chosen = (await verify(stage, request))["a"]
        await stage.run_ahead.settle(0.01)
        commit(stage, request, chosen, 1)
        assert drafter.num_told == 2 and not drafter.violations


async def test_wrong_drafts_are_counted_as_such() -> None:
    drafter = TellingFake(alpha=0.0)
    drafter.is_done.set()
    async with draft_thread() as executor:
        stage = stage_of(drafter, executor)
        request = stage.open()
        for _ in range(3):
            chosen = (await verify(stage, request))["a"]
            await stage.run_ahead.settle(0.01)
            commit(stage, request, chosen, 1)
        stats = stage.decoder.stats
        assert (stats.num_rounds, stats.num_proposed, stats.num_accepted) == (3, 3 * LONGEST, 0)
        assert not drafter.violations


def ends_early(draft: Draft) -> Draft:
    return replace(draft, token_ids=draft.token_ids[:2])


def fails(draft: Draft) -> Draft:
    return replace(draft, token_ids=())


def is_outside(draft: Draft) -> Draft:
    return replace(draft, token_ids=(10**6, *draft.token_ids[1:]))


@pytest.mark.parametrize(("answers", "num_drafted"), [(ends_early, 2), (fails, None), (is_outside, None)])
async def test_an_answer_of_fewer_drafts_than_were_told_of_is_what_counts(
    answers: Callable[[Draft], Draft], num_drafted: int | None
) -> None:
    drafter = TellingFake(answers=answers)
    async with draft_thread() as executor:
        stage = stage_of(drafter, executor)
        request = stage.open()
        chosen = (await verify(stage, request))["a"]
        assert len(chosen) == LONGEST
        drafter.is_done.set()
        await stage.run_ahead.settle(0.01)
        commit(stage, request, chosen, 1 if num_drafted is None else num_drafted + 1)
        stats = stage.decoder.stats
        assert stats.num_proposed == (num_drafted or 0)
        assert not stage.decoder.links[0]._clients["a"][0].tape.drafted
        assert stage.num_errors == (answers is is_outside)


async def test_a_drafter_that_never_says_it_is_done_holds_up_one_step_and_loses_its_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter = TellingFake()
    async with draft_thread() as executor:
        monkeypatch.setattr("engine.loop.run_ahead._PATIENCE_S", 0.05)
        stage = stage_of(drafter, executor)
        request = stage.open()
        chosen = (await verify(stage, request))["a"]
        await stage.run_ahead.settle(0.01)
        commit(stage, request, chosen, 1)
        assert stage.decoder.stats.num_rounds == 0, "nobody knows what they were"
        assert await verify(stage, request) == {}, "it keeps its thread"
        monkeypatch.setattr("engine.loop.run_ahead._PATIENCE_S", 10.0)
        drafter.is_done.set()
        commit(stage, request, (), 1)
        await until(lambda: stage.run_ahead._task is None)
        chosen = (await verify(stage, request))["a"]
        assert len(chosen) == LONGEST
        await stage.run_ahead.settle(0.01)
        commit(stage, request, chosen, LONGEST + 1)
        assert stage.decoder.stats.num_stale == 1, "the late answer"
        assert not drafter.violations


async def test_who_ends_meanwhile_is_passed_over() -> None:
    drafter = TellingFake()
    async with draft_thread() as executor:
        stage = stage_of(drafter, executor)
        ended, other = stage.open("ended"), stage.open("other")
        chosen = await verify(stage, ended, other)
        assert set(chosen) == {"ended", "other"}
        stage.decoder.close("ended")
        drafter.is_done.set()
        await stage.run_ahead.settle(0.01)
        assert stage.decoder.stats.dropped["cancelled"] == LONGEST
        commit(stage, other, chosen["other"], LONGEST + 1)
        assert stage.decoder.stats.num_accepted == LONGEST


def test_drafts_of_an_older_epoch_are_not_expected() -> None:
    stage = stage_of(TellingFake(), None)
    stage.open()
    (link,) = stage.decoder.links
    jobs = link.jobs(ahead=False)
    tape = link._clients["a"][0].tape
    link.expect(jobs, UnreadChains(TOKENS, {"a": (0, 1), "nobody": (2,)}))
    assert len(tape) == 2
    tape.drop_drafts()
    link.expect(jobs, UnreadChains(TOKENS, {"a": (0, 1)}))
    assert len(tape) == 0


async def test_a_failed_pass_leaves_the_drafts_for_the_next_step() -> None:
    drafter = TellingFake()
    async with draft_thread() as executor:
        stage = stage_of(drafter, executor)
        request = stage.open()
        await verify(stage, request)
        drafter.is_done.set()
        await stage.run_ahead.settle(None)
        chosen = (await verify(stage, request))["a"]
        assert [draft.token_id for draft in chosen] == expected_output(request.token_ids, LONGEST)
        assert drafter.num_told == 1


@pytest.mark.parametrize(
    "params",
    [{"grammar": True}, {"presence_penalty": 0.5}, {"bad_words": ((3, 4),)}],
    ids=["grammar", "penalty", "bad words"],
)
async def test_what_hangs_on_the_tokens_before_a_row_waits_for_them(params: dict[str, Any]) -> None:
    drafter = TellingFake()
    drafter.is_done.set()
    async with draft_thread() as executor:
        stage = stage_of(drafter, executor)
        free, request = stage.open(), make_request("b", 3, arrival=1, max_tokens=100, temperature=0.0)
        if "grammar" in params:
            request.grammar = Allowing(frozenset({1}), VOCAB_SIZE)
        else:
            request.sampling = replace(request.sampling, **params)
        stage.decoder.open(request)
        request.num_computed_tokens = len(request.token_ids) - 1
        chosen = await verify(stage, free, request)
        assert drafter.num_told == 0
        assert all(draft.unread is None for drafted in chosen.values() for draft in drafted)


async def test_what_runs_ahead_of_a_step_tells_nothing() -> None:
    drafter = TellingFake()
    stage = stage_of(drafter, None, "async")
    request = stage.open()
    for _ in range(4):
        await stage.step(request)
        await settle()
    assert drafter.num_calls and drafter.num_told == 0


async def test_a_step_waited_until_the_device_began_it_but_for_what_deciding_it_took() -> None:
    drafter, clock = TellingFake(), ManualClock()
    async with draft_thread() as executor:
        stage = Stage("sync", drafter, executor=executor, clock=clock)
        request = stage.open()
        stage.run_ahead.choose_arm(1)
        assert not await stage.run_ahead.draft_once()  # told at once
        clock.advance(0.25)  # the step is decided
        stage.run_ahead.beside_step()
        clock.advance(4.0)
        drafter.is_done.set()
        await stage.run_ahead.settle(3.0)
        assert stage.decoder.gain.waited_s == pytest.approx(1.0)
        assert len(request.token_ids) == 3
