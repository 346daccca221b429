"""The loop's side of drafting: who is asked for what, what becomes of answers, and who must forget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine.plan.request import Request, RequestStatus, SpeculationOptions
from engine.plan.speculation.acceptance import Acceptance
from engine.plan.speculation.draft_tape import DraftedToken, NewFeatures
from engine.plan.speculation.drafter import Draft, DraftJob
from engine.plan.speculation.drafting_state import DrafterState, DraftingState, RequestDrafting
from engine.plan.speculation.length_policy import Candidate, FixedPolicy, StepLoad
from engine.plan.speculation.pass_costs import PassCosts
from engine.plan.speculation.speculation_config import DraftingChange, DraftingRules, SpeculationConfig
from engine.plan.speculation.speculative_decoder import DraftSource, SpeculativeDecoder
from engine.plan.step_records import ScheduledRequest
from tests.support.factories import make_request
from tests.support.fake_drafters import FakeDrafter
from tests.support.fakes import VOCAB_SIZE

LOAD = StepLoad(num_seqs=1, num_tokens=1, num_prefill_tokens=0, max_draft_tokens=100)


class NotingPolicy(FixedPolicy):
    """The fixed policy, which notes what it is asked."""

    def __init__(self, config: SpeculationConfig) -> None:
        super().__init__(config)
        self.num_asked: list[int] = []
        self.waits_s: list[float] = []
        self.shared: list[list[float]] = []
        self.told: Sequence[float] = ()  # of the newest first candidate
        self.price = 0.0
        self.serves = True

    def least_chance(self, acceptance: Acceptance) -> float:
        return self.price

    def lengths(self, candidates: Sequence[Candidate], load: StepLoad) -> list[int]:
        self.num_asked.append(len(candidates))
        self.told = candidates[0].chances if candidates else ()
        return super().lengths(candidates, load)

    def wanted(self, acceptance: Any, limit: int, draft_s: float = 0.0) -> int:
        self.waits_s.append(draft_s)
        return super().wanted(acceptance, limit, draft_s)

    def served(
        self, acceptances: Sequence[Acceptance], gains: Sequence[float], seconds: Sequence[float]
    ) -> list[int]:
        self.shared.append(list(seconds))
        return super().served(acceptances, gains, seconds) if self.serves else []


class World:
    """A decoder, and requests whose target says what the test says."""

    def __init__(
        self, *methods: str, longest: int = 4, can_rewind: bool = True, reader: str = "", **ways: Any
    ) -> None:
        """The method `reader` reads features, beside those that all do."""
        config = SpeculationConfig(VOCAB_SIZE, longest, length_policy="fixed", min_acceptance_rate=0.0)
        self.policy = NotingPolicy(config)
        sources = [
            DraftSource(
                FakeDrafter(
                    method=method, **({**ways, "reads_features": True} if method == reader else ways)
                ),
                longest,
                feature_window=8,
            )
            for method in methods or ("draft_model",)
        ]
        self.decoder = SpeculativeDecoder(config, sources, self.policy, PassCosts(), can_rewind=can_rewind)
        self.num_requests = 0

    def open(self, name: str = "a", prompt: int = 3, **options: Any) -> Request:
        """A request that has computed its prompt."""
        request = make_request(name, prompt, arrival=self.num_requests, max_tokens=options.pop("most", 20))
        self.num_requests += 1
        request.speculation = SpeculationOptions(**options)
        self.decoder.open(request)
        request.num_computed_tokens = len(request.token_ids) - 1
        return request

    def job(self, index: int = 0, *, ahead: bool = False) -> DraftJob:
        (job,) = self.decoder.links[index].jobs(ahead=ahead)
        return job

    def answer(self, job: DraftJob, *token_ids: int, index: int = 0, **more: Any) -> None:
        draft = Draft(job.request.request_id, job.epoch, job.next_position, token_ids, **more)
        self.decoder.links[index].put(job, draft)

    def verify(self, request: Request) -> tuple[DraftedToken, ...]:
        """What goes into the next step."""
        chosen = self.decoder.choose([request], LOAD)
        return chosen[0][1] if chosen else ()

    def commit(self, request: Request, *token_ids: int, drafted: Sequence[DraftedToken] = ()) -> None:
        request.token_ids += token_ids
        request.num_computed_tokens = len(request.token_ids) - 1
        self.decoder.commit(request, drafted, len(token_ids))


def synced(job: DraftJob) -> tuple[int, tuple[int, ...], int, int]:
    return job.first, job.token_ids, job.num_committed, job.num_wanted


def ids(drafted: Sequence[DraftedToken]) -> list[int]:
    return [draft.token_id for draft in drafted]


# What is synced to a drafter.


def test_a_first_job_tells_all_and_later_ones_what_is_new() -> None:
    world = World()
    a = world.open()
    job = world.job()
    assert synced(job) == (0, (0, 1, 2), 3, 4)
    world.answer(job, 7)
    job = world.job()
    assert synced(job) == (4, (), 3, 3), "its own draft is no news to it"
    world.answer(job, 8)
    drafted = world.verify(a)
    assert ids(drafted) == [7, 8]
    world.commit(a, 7, 8, 9, drafted=drafted)
    assert synced(world.job()) == (5, (9,), 6, 4)


def test_after_a_miss_only_what_was_wrong_is_told_again_in_a_new_epoch() -> None:
    world = World()
    a = world.open()
    first = world.job()
    world.answer(first, 7, 8, 9)
    drafted = world.verify(a)
    world.commit(a, 7, 5, drafted=drafted)
    job = world.job()
    assert synced(job) == (4, (5,), 5, 4)
    assert job.epoch == first.epoch + 1


def test_prefilling_sequences_are_drafted_for_only_ahead() -> None:
    world = World()
    a = world.open()
    a.num_computed_tokens = 0
    assert world.decoder.links[0].jobs(ahead=False) == []
    assert len(world.decoder.links[0].jobs(ahead=True)) == 1


def test_ahead_goes_past_what_is_verified_and_the_token_after_it() -> None:
    world = World(longest=2)
    a = world.open()
    world.answer(world.job(), 7, 8)
    assert world.decoder.links[0].jobs(ahead=False) == []
    drafted = world.verify(a)
    assert len(drafted) == 2
    assert world.job(ahead=True).num_wanted == 3
    world.commit(a, 7, 8, 9, drafted=drafted)
    assert world.job(ahead=True).num_wanted == 3, "nothing is verified any more: one for the next token"


def test_nobody_drafts_past_the_longest_output_or_a_stop_token() -> None:
    world = World()
    world.open(most=3)
    job = world.job()
    assert job.num_wanted == 2, "the last token is the target's own"
    world.answer(job, 7, 8)
    assert world.decoder.links[0].jobs(ahead=True) == []
    world = World()
    b = make_request("b", 3, max_tokens=20, stop_token_ids=frozenset({7}))
    b.num_computed_tokens = 2
    world.decoder.open(b)
    world.answer(world.job(), 7)
    assert world.decoder.links[0].jobs(ahead=True) == []


def test_who_had_nothing_to_say_is_asked_again_when_more_is_known() -> None:
    world = World()
    a = world.open()
    world.answer(world.job())
    assert world.decoder.links[0].jobs(ahead=False) == world.decoder.links[0].jobs(ahead=True) == []
    world.commit(a, 5)
    assert synced(world.job()) == (3, (5,), 4, 4)


def test_who_is_behind_is_asked_again_at_once() -> None:
    world = World()
    world.open()
    job = world.job()
    world.answer(job, is_behind=True)
    assert world.decoder.links[0].is_reading([job])
    assert world.decoder.links[0].jobs(ahead=False, may_read=False) == []
    job = world.job()
    assert synced(job) == (3, (), 3, 4), "a job that was not handed out counts as not synced"
    world.answer(job, 7)
    assert not world.decoder.links[0].is_reading([job])


def test_readers_are_asked_beside_those_who_can_draft() -> None:
    world = World()
    world.open("a")
    world.answer(world.job(), is_behind=True)
    world.open("b")
    assert len(world.decoder.links[0].jobs(ahead=False, may_read=False)) == 2


def test_who_claims_to_be_behind_for_ever_is_asked_once_a_token() -> None:
    world = World()
    a = world.open()
    turns = 0
    while jobs := world.decoder.links[0].jobs(ahead=True):
        world.answer(jobs[0], is_behind=True)
        turns += 1
        assert turns <= 4
    world.commit(a, 5)
    world.answer(world.job(), is_behind=True)
    assert world.decoder.links[0].jobs(ahead=True) == []
    world.commit(a, 6)
    world.answer(world.job(), 7)
    assert ids(world.verify(a)) == [7]


# What becomes of answers.


def test_a_late_answer_that_agrees_is_kept_from_where_it_is_news() -> None:
    world = World()
    a = world.open()
    job = world.job()
    world.commit(a, 7)
    world.answer(job, 7, 8, 9)
    assert ids(world.verify(a)) == [8, 9]
    stats = world.decoder.stats
    assert (stats.num_late, stats.dropped["late"], stats.num_stale) == (1, 1, 0)


def test_a_late_answer_that_disagrees_is_told_better() -> None:
    world = World()
    a = world.open()
    job = world.job()
    world.commit(a, 7)
    world.answer(job, 6, 8)
    assert world.verify(a) == ()
    assert world.decoder.stats.dropped["stale"] == 2
    assert synced(world.job()) == (3, (7,), 4, 4)


def test_an_answer_of_an_older_epoch_is_dropped() -> None:
    world = World()
    a = world.open()
    world.answer(world.job(), 7, 8)
    drafted = world.verify(a)
    job = world.job(ahead=True)
    world.commit(a, 6, drafted=drafted)
    world.answer(job, 9)
    assert world.verify(a) == ()
    assert world.decoder.stats.num_stale == 1
    assert synced(world.job()) == (3, (6,), 4, 4)


def test_an_answer_for_one_who_is_gone_is_dropped() -> None:
    world = World()
    world.open()
    job = world.job()
    world.decoder.close("a")
    world.answer(job, 7, 8)
    assert world.decoder.stats.dropped["cancelled"] == 2
    assert world.decoder.links[0].take_closed() == ["a"]


def test_of_two_drafters_the_first_to_speak_goes_on() -> None:
    world = World("draft_model", "medusa")
    a = world.open()
    slow = world.job(0)
    world.answer(world.job(1), 7, index=1)
    assert world.decoder.links[0].jobs(ahead=False) == [], "the other has spoken"
    world.answer(slow, 5, 6)
    assert world.decoder.stats.dropped["stale"] == 2
    world.answer(world.job(1), 8, index=1)
    drafted = world.verify(a)
    assert ids(drafted) == [7, 8]
    world.commit(a, 7, 8, 9, drafted=drafted)
    assert synced(world.job(0)) == (3, (7, 8, 9), 6, 4)
    assert synced(world.job(1)) == (5, (9,), 6, 4)
    assert world.decoder.stats.proposed == {"medusa": 2}


def test_one_drafter_s_miss_is_told_to_the_other_too() -> None:
    world = World("draft_model", "medusa")
    a = world.open()
    world.answer(world.job(0), 7)
    world.commit(a, 5, drafted=world.verify(a))
    assert synced(world.job(0)) == (3, (5,), 4, 4)
    assert synced(world.job(1)) == (0, (0, 1, 2, 5), 4, 4)


def test_a_tree_is_verified_once_and_nobody_drafts_behind_it() -> None:
    world = World()
    a = world.open()
    world.answer(world.job(), 7, 8, 9, parents=(-1, -1, 1))
    assert world.decoder.links[0].jobs(ahead=True) == []
    drafted = world.verify(a)
    assert [draft.parent for draft in drafted] == [-1, -1, 1]
    world.commit(a, 8, 9, 4, drafted=drafted)
    stats = world.decoder.stats
    assert (stats.num_proposed, stats.num_accepted, stats.num_bonus) == (3, 2, 0)
    assert synced(world.job()) == (3, (8, 9, 4), 6, 4), "a tree counts as nothing synced"


def test_features_are_used_for_the_newest_token_only() -> None:
    world = World(reads_features=True)
    a = world.open()
    world.decoder.begin_step(world.decoder.links)
    assert world.decoder.links[0].jobs(ahead=True) == [], "nothing was left yet"
    step = ScheduledRequest("a", 0, 2, samples=True)
    world.decoder.keep_features(step, "hi")
    job = world.job(ahead=True)
    assert [(run.first, run.position, run.hidden) for run in job.features] == [(0, 2, "hi")]
    world.answer(job, 7)
    assert world.decoder.links[0].jobs(ahead=True) == [], "they tell nothing of what follows a draft"
    world.commit(a, 7, 8, drafted=world.verify(a))
    assert world.decoder.links[0].jobs(ahead=True) == [], "they are of an older token"
    world.decoder.keep_features(step, "h")
    assert len(world.decoder.links[0].jobs(ahead=True)) == 1
    world.decoder.keep_features(step._replace(request_id="nobody"), "h")


def test_a_reader_that_goes_on_gets_the_newest_features_again() -> None:
    world = World(reads_features=True, is_stepwise=False)
    a = world.open()
    world.decoder.begin_step(world.decoder.links, ahead=())
    world.decoder.keep_features(ScheduledRequest("a", 0, 2, samples=True), "hi")
    job = world.job()
    assert not job.may_branch, "a tree cannot be gone on with"
    world.answer(job, 7, 8)
    assert world.decoder.links[0].jobs(ahead=False) == [], "no step waits where there are drafts"
    drafted = world.verify(a)
    ahead = world.job(ahead=True)
    assert synced(ahead)[:3] == (5, (), 3) and ahead.features == job.features
    world.answer(ahead, 9, 10)
    world.commit(a, 7, 8, 9, drafted=drafted)
    assert [draft.token_id for draft in world.verify(a)] == [10], "the bet was right: nothing is waited for"
    assert world.decoder.links[0].jobs(ahead=True) == [], "what was given is of an older token"
    world.decoder.keep_features(ScheduledRequest("a", 3, 3, samples=True), "hij")
    assert [run.hidden for run in world.job(ahead=True).features] == ["hij"]
    world.decoder.pause("a")
    world.decoder.open(a)
    world.decoder.begin_step(world.decoder.links)
    assert world.decoder.links[0].jobs(ahead=True) == [], "a request that runs anew has none yet"


def asked_a_step(world: World, requests: Sequence[Request], num_steps: int) -> list[int]:
    """How many of these the drafter is asked about before each step; it never has a draft."""
    asked = []
    for _ in range(num_steps):
        jobs = world.decoder.links[0].jobs(ahead=False)
        for job in jobs:
            world.answer(job)
        for request in requests:
            world.commit(request, 5)
        asked.append(len(jobs))
    return asked


def test_a_crowd_that_a_cheap_drafter_is_of_no_use_to_is_asked_about_in_turn() -> None:
    world = World("suffix", is_cheap=True)
    crowd = [world.open(f"r{n}", most=400) for n in range(16)]
    asked = asked_a_step(world, crowd, 60)
    assert asked[:8] == [16] * 8, "at first of each, in every step"
    assert sum(asked[12:]) == 2 * 48, "then about two a step"
    for request in crowd[3:]:
        world.decoder.close(request.request_id)
    assert asked_a_step(world, crowd[:3], 20)[1:] == [3] * 19, "a few are no crowd"


def test_a_sequence_whose_draft_was_accepted_is_asked_about_in_every_step_again() -> None:
    world = World("suffix", is_cheap=True)
    crowd = [world.open(f"r{n}", most=400) for n in range(16)]
    asked_a_step(world, crowd, 40)
    while not (jobs := [j for j in world.decoder.links[0].jobs(ahead=False) if j.request.request_id == "r0"]):
        asked_a_step(world, crowd, 1)
    world.answer(jobs[0], 7)
    world.commit(crowd[0], 7, 8, drafted=world.verify(crowd[0]))
    for _ in range(10):
        names = [job.request.request_id for job in world.decoder.links[0].jobs(ahead=False)]
        assert "r0" in names
        world.commit(crowd[0], 5)


def test_a_drafter_that_is_not_cheap_is_asked_about_everyone() -> None:
    world = World("draft_model")
    crowd = [world.open(f"r{n}", most=400) for n in range(16)]
    assert asked_a_step(world, crowd, 60) == [16] * 60


@pytest.mark.parametrize(
    ("draft", "kept"), [((7,), False), ((7, 8, 9, 1), True)], ids=["shorter", "as long as the reader's"]
)
def test_a_short_draft_gives_way_to_a_reader_that_promises_more(draft: tuple[int, ...], kept: bool) -> None:
    world = World("suffix", "heads", reader="heads")
    text, heads = world.decoder.links
    request = world.open()
    world.decoder.keep_features(ScheduledRequest("a", 0, 2, samples=True), "hi")
    world.decoder.begin_step([text, heads])
    world.answer(world.job(0), *draft)
    assert [len(link.jobs(ahead=False)) for link in (text, heads)] == ([0, 0] if kept else [0, 1])
    assert ids(world.verify(request)) == (list(draft) if kept else [])


def test_a_short_draft_stands_where_no_reader_can_do_better() -> None:
    world = World("suffix", "heads", reader="heads")
    text, heads = world.decoder.links
    request = world.open()
    world.decoder.begin_step([text, heads])
    world.answer(world.job(0), 7)
    assert ids(world.verify(request)) == [7], "there are no features"
    world.commit(request, 7, 8, drafted=world.verify(request))
    world.decoder.keep_features(ScheduledRequest("a", 3, 2, samples=True), "hi")
    world.decoder.begin_step([text])
    world.answer(world.job(0), 9)
    assert ids(world.verify(request)) == [9], "the step does not wait for the reader"


def test_features_wait_for_the_drafter_up_to_its_window() -> None:
    features = NewFeatures(limit=4)
    assert features.position == -1
    for position, rows in ((5, "aaaaa"), (6, "b"), (8, "cc"), (9, "d")):
        features.add(position, rows, len(rows))
    assert [run.hidden for run in features.take()] == ["b", "cc", "d"]
    assert features.take() == () and features.position == -1
    assert features.reach(9) and not features.reach(8)
    assert [run.hidden for run in features.take_again()] == ["d"]
    features.clear()
    assert features.take_again() == () and not features.reach(9)
    features.add(30, "x" * 20, 20)
    assert features.position == 30, "the newest run is kept whole"


def test_refused_drafts_count_among_the_features_that_are_kept() -> None:
    """Their rows lie in the same memory, which is there as long as any of it is kept."""
    world = World(reads_features=True)
    request = world.open()
    features = world.decoder._sequences["a"].features
    features._limit = 8
    for length in range(3, 9):
        scheduled = ScheduledRequest("a", length - 1, 4, samples=True, num_drafts=3)
        request.token_ids += [5]
        world.decoder.keep_features(scheduled, "x")  # all three were refused
    assert len(features.take()) == 2, "behind the older 4 tokens were computed, behind one more it were 8"
    features.add(20, "y", 1)
    assert [run.hidden for run in features.take()] == ["y"]


def test_no_features_are_kept_of_a_request_that_no_reader_drafts_for() -> None:
    world = World("ngram", "heads", reader="heads")
    for name, method, is_kept in (("a", "ngram", False), ("b", "heads", True), ("c", None, True)):
        world.open(name, method=method)
        world.decoder.keep_features(ScheduledRequest(name, 0, 3, samples=True), "hid")
        assert world.decoder._sequences[name].has_features is is_kept


def test_features_of_a_chunk_of_a_prompt_are_given_with_those_behind_it() -> None:
    world = World(reads_features=True)
    request = world.open()
    world.decoder.keep_features(ScheduledRequest("a", 0, 1, samples=False), "p")
    assert world.decoder.links[0].jobs(ahead=True) == [], "its newest token was not drawn yet"
    world.decoder.keep_features(ScheduledRequest("a", 1, 1, samples=True), "q")
    (job,) = world.decoder.links[0].jobs(ahead=True)
    assert [(run.first, run.position) for run in job.features] == [(0, 1), (1, 2)]
    world.decoder.pause(request.request_id)


# What is verified.


def test_no_more_is_verified_than_the_author_may_draft_and_than_there_is_room_for() -> None:
    world = World(longest=2)
    a = world.open(most=3)
    world.answer(world.job(ahead=True), 7, 8)
    assert len(world.verify(a)) == 2
    world.commit(a, 7, drafted=world.verify(a)[:1])
    assert ids(world.verify(a)) == [8]
    world.commit(a, 8, drafted=world.verify(a))
    assert world.verify(a) == ()


def test_the_policy_is_asked_once_a_step_also_when_there_are_no_drafts() -> None:
    world = World()
    a = world.open()
    world.policy.num_asked.clear()
    assert world.decoder.choose([a], LOAD) == []
    world.answer(world.job(), 7)
    world.decoder.choose([a], LOAD)
    assert world.policy.num_asked == [0, 1]
    world.decoder.close("a")
    world.decoder.choose([], LOAD)
    assert world.policy.num_asked == [0, 1], "nobody is drafted for"


def test_only_a_drafter_that_is_waited_for_has_a_price() -> None:
    world = World("draft_model", "medusa")
    a = world.open()
    world.decoder.begin_step(world.decoder.links)
    for waited_s in (9.0, 0.25):  # the first counts for nothing
        world.decoder.links[1].note_waited(1, waited_s)
    world.policy.waits_s.clear()
    world.commit(a, 5)
    assert world.policy.waits_s[0] == 0 < world.policy.waits_s[1]
    world.job()
    assert world.policy.shared == []
    world.job(index=1)
    assert world.policy.shared == [[0.25]]


def test_the_step_ahead_does_not_wait_for_drafts_that_are_not_worth_it() -> None:
    world = World()
    a = world.open()
    (link,) = world.decoder.links
    assert not world.decoder.expects_drafts([a]), "no step waits for this drafter"
    world.decoder.begin_step([link])
    assert world.decoder.expects_drafts([a]), "what the wait costs is not known"
    for waited_s in (9.0, 0.25):
        link.note_waited(1, waited_s)
    assert world.decoder.expects_drafts([a])
    world.policy.serves = False
    assert not world.decoder.expects_drafts([a])
    assert link.jobs(ahead=False) == []
    world.policy.serves = True
    world.answer(world.job(), 7)
    world.policy.serves = False
    assert world.decoder.expects_drafts([a]), "there is a draft"
    assert not world.decoder.expects_drafts([]), "it does not go on"


def test_a_drafter_that_still_reads_is_waited_for_whatever_it_costs() -> None:
    world = World()
    a = world.open()
    (link,) = world.decoder.links
    world.decoder.begin_step([link])
    for waited_s in (9.0, 0.25):
        link.note_waited(1, waited_s)
    world.policy.serves = False
    a_view = world.decoder._active["a"].views[0]
    a_view.is_behind = True
    assert world.decoder.expects_drafts([a])


def test_drafts_that_are_made_beside_the_step_are_expected() -> None:
    world = World()
    a = world.open()
    world.decoder.begin_step((), ahead=world.decoder.links)
    assert world.decoder.expects_drafts([a])
    world.decoder.begin_step((), ahead=())
    assert not world.decoder.expects_drafts([a])
    nobody = world.open("b", enabled=False)
    world.decoder.begin_step(world.decoder.links)
    assert not world.decoder.expects_drafts([nobody])


def test_what_found_no_room_counts_as_ahead_not_as_verified() -> None:
    world = World()
    a = world.open()
    world.answer(world.job(), 7, 8, 9)
    drafted = world.verify(a)
    world.commit(a, 7, 8, drafted=drafted[:1])
    stats = world.decoder.stats
    assert (stats.num_proposed, stats.num_accepted, stats.num_bonus) == (1, 1, 1)
    assert stats.run_ahead == {"hit": 1}
    assert ids(world.verify(a)) == [9]


@pytest.mark.parametrize("num_verified", [0, 2], ids=["none", "a part"])
def test_what_is_not_verified_of_a_tree_was_drafted_in_vain_but_not_past_a_round(num_verified: int) -> None:
    world = World()
    a = world.open()
    world.answer(world.job(), 7, 8, 9, parents=(-1, -1, 0))
    drafted = world.verify(a)
    assert len(drafted) == 3
    world.commit(a, 7, 5, drafted=drafted[:num_verified])
    stats = world.decoder.stats
    assert (stats.num_proposed, stats.dropped["stale"]) == (num_verified, 3 - num_verified)
    assert not +stats.run_ahead, "it would say that drafters run ahead in vain, and keep them from it"


@pytest.mark.parametrize(
    ("tokens", "bonus", "recovered", "histogram"),
    [((7, 8, 9), 1, 0, [0, 0, 1]), ((7, 5), 0, 1, [0, 1]), ((5,), 0, 1, [1]), ((7,), 0, 0, [0, 1])],
    ids=["all", "one", "none", "ended"],
)
def test_a_round_is_counted_for_the_request_and_for_all(
    tokens: tuple[int, ...], bonus: int, recovered: int, histogram: list[int]
) -> None:
    world = World()
    a = world.open()
    world.answer(world.job(), 7, 8)
    world.commit(a, *tokens, drafted=world.verify(a))
    assert a.spec_stats is not None
    for stats in (world.decoder.stats, a.spec_stats):
        assert (stats.num_rounds, stats.num_proposed, stats.num_committed) == (1, 2, len(tokens))
        assert (stats.num_bonus, stats.num_recovered) == (bonus, recovered)
        assert stats.acceptance_histogram == histogram
    assert world.decoder.gain.draft_length == 2.0, "the first round is no less than later ones"


def test_a_target_that_cannot_rewind_has_nothing_drafted_and_is_counted() -> None:
    world = World(can_rewind=False)
    a = world.open()
    b = world.open("b", enabled=False)
    assert world.decoder.links[0].jobs(ahead=True) == []
    assert world.decoder.choose([a, b], LOAD) == []
    assert world.decoder.stats.num_fallbacks == 1


# Who must forget.


def test_only_those_who_were_told_must_forget() -> None:
    world = World("draft_model", "medusa")
    world.open()
    world.job(1)
    world.decoder.close("a")
    assert [world.decoder.links[index].take_closed() for index in (0, 1)] == [[], ["a"]]
    assert world.decoder.links[1].take_closed() == []


def test_a_paused_request_is_forgotten_and_told_anew() -> None:
    world = World()
    a = world.open()
    first = world.job()
    world.answer(first, 7, 8)
    world.decoder.pause("a")
    assert world.decoder.stats.dropped["cancelled"] == 2
    assert world.decoder.links[0].jobs(ahead=True) == []
    world.decoder.pause("a")
    world.decoder.open(a)
    assert world.decoder.links[0].take_closed() == ["a"]
    assert world.verify(a) == ()
    job = world.job()
    assert synced(job) == (0, (0, 1, 2), 3, 4)
    assert job.epoch > first.epoch


def test_an_answer_from_before_a_pause_is_stale() -> None:
    world = World()
    a = world.open()
    job = world.job()
    world.decoder.pause("a")
    world.decoder.open(a)
    world.answer(job, 7)
    assert world.verify(a) == ()
    assert world.decoder.links[0].take_closed() == ["a"], "its drafter may remember that answer"


def test_a_lost_micro_step_is_forgotten_and_asked_for_again_with_news() -> None:
    world = World()
    a = world.open()
    job = world.job()
    world.decoder.links[0].lose([job])
    assert world.decoder.links[0].take_closed() == ["a"]
    assert world.decoder.links[0].jobs(ahead=True) == []
    world.commit(a, 5)
    assert synced(world.job()) == (0, (0, 1, 2, 5), 4, 4)
    world.decoder.close("a")
    world.decoder.links[0].lose([job])
    assert world.decoder.links[0].take_closed() == ["a"]


def test_what_is_given_up_is_drafted_for_no_more() -> None:
    world = World()
    a = world.open()
    world.answer(world.job(), 7)
    world.decoder.give_up("a")
    world.decoder.open(a)
    assert world.verify(a) == ()
    world.commit(a, 5)
    assert world.decoder.links[0].jobs(ahead=True) == []
    world.decoder.close("a")
    world.decoder.give_up("nobody")


def test_requests_choose_their_drafters_and_lengths() -> None:
    world = World("ngram", "draft_model")
    world.open("a", method="draft_model", num_tokens=2)
    world.open("b", enabled=False)
    world.open("c", method="unheard of")
    world.open("d", method="auto", num_tokens=9)
    assert [(j.request.request_id, j.num_wanted) for j in world.decoder.links[0].jobs(ahead=False)] == [
        ("d", 4)
    ]
    assert [(j.request.request_id, j.num_wanted) for j in world.decoder.links[1].jobs(ahead=False)] == [
        ("a", 2),
        ("d", 4),
    ]


def test_the_pace_is_held_against_steps_without_drafts() -> None:
    world = World()
    decoder = world.decoder
    assert decoder.gain.speedup == 1.0
    decoder.observe_pace(2, 2, 0.1)
    assert decoder.gain.speedup == 1.0, "costs are unknown"
    for _ in range(8):
        decoder.observe_pass(2, 2, 0, 0.1, 0.1)
    decoder.observe_pace(2, 6, 0.15)
    assert decoder.gain.speedup == pytest.approx(2.0), "three tokens each in the time of one and a half"
    decoder.observe_pass(2, 8, 6, 0.12, 0.15)
    assert decoder.stats.verify_s == 0.12
    assert decoder.costs.seconds(2, 8) == pytest.approx(0.15), "what drafts cost the host counts"


def test_what_a_step_brings_is_half_of_all_drafts_at_first_and_then_the_mean_of_the_rounds() -> None:
    world = World()
    assert world.decoder.tokens_a_step == 1 + world.decoder.config.max_draft_tokens / 2
    for _ in range(30):
        world.decoder.stats.observe_round("ngram", 3, 0, 1)
    for _ in range(10):
        world.decoder.stats.observe_round("ngram", 3, 3, 4)
    assert world.decoder.tokens_a_step == pytest.approx(70 / 40)
    assert SpeculativeDecoder.without_drafters().tokens_a_step == 1


# Changes while a request lives.


def retune(world: World, request: Request, **change: Any) -> None:
    """As a caller asks between two steps."""
    request.retune(DraftingChange(**change))
    world.decoder.retune(request)


def test_a_shorter_draft_holds_from_the_next_step_on() -> None:
    world = World()
    a = world.open()
    world.answer(world.job(), 7, 8, 9)
    retune(world, a, num_tokens=2)
    drafted = world.verify(a)
    assert ids(drafted) == [7, 8, 9], "the step is being prepared"
    world.commit(a, 7, 8, 9, 5, drafted=drafted)
    world.decoder.begin_step(())
    assert world.job().num_wanted == 2
    world.answer(world.job(), 1, 2)
    assert ids(world.verify(a)) == [1, 2]
    retune(world, a, num_tokens=4)
    world.decoder.begin_step(())
    assert world.decoder.drafting_of(a).num_tokens == 4
    assert world.job().num_wanted == 2, "two are there"


def test_of_a_drafter_that_is_not_asked_no_lengths_are_measured_out() -> None:
    """And it is asked again from the second step on in which it may be."""
    world = World()
    a = world.open()
    links = world.decoder.links
    world.decoder.begin_step((), not_asked=links)
    measured = []
    wanted = world.decoder._policy.wanted
    world.decoder._policy.wanted = lambda *each: measured.append(each) or wanted(*each)  # type: ignore
    for token_id in range(5):
        world.commit(a, token_id)
    assert not measured and not links[0].jobs(ahead=False)
    world.decoder.begin_step(links)
    world.commit(a, 7)
    assert len(measured) == 1 and world.job().num_wanted == 4


def test_what_is_drafted_already_is_cut_to_the_new_length() -> None:
    world = World()
    a = world.open()
    world.answer(world.job(), 7, 8, 9)
    retune(world, a, num_tokens=1)
    world.decoder.begin_step(())
    assert ids(world.verify(a)) == [7]


def test_drafting_may_end_and_begin_again_and_is_counted_on() -> None:
    world = World()
    a = world.open()
    a.status = RequestStatus.RUNNING
    world.answer(world.job(), 7, 8)
    drafted = world.verify(a)
    retune(world, a, enabled=False)
    assert world.decoder.drafting_of(a).why_off == "The request asks for no drafts."
    world.commit(a, 7, 5, drafted=drafted)
    assert a.spec_stats is not None and a.spec_stats.num_rounds == 1, "a round under way is judged"
    world.decoder.begin_step(())
    assert world.decoder.links[0].jobs(ahead=True) == []
    assert world.decoder.links[0].take_closed() == ["a"]
    retune(world, a, enabled=True)
    world.decoder.begin_step(())
    job = world.job()
    assert synced(job)[:2] == (0, (0, 1, 2, 7, 5)), "it is told all of it anew"
    assert a.spec_stats.num_rounds == 1


def test_an_answer_from_before_the_drafters_changed_is_stale() -> None:
    world = World("ngram", "draft_model")
    a = world.open()
    a.status = RequestStatus.RUNNING
    job = world.job()
    retune(world, a, method="draft_model")
    world.decoder.begin_step(())
    world.answer(job, 7, 8)
    assert world.verify(a) == ()
    assert world.decoder.links[0].jobs(ahead=True) == []
    retune(world, a, method="auto")
    world.decoder.begin_step(())
    world.answer(job, 7, 8)
    assert world.verify(a) == (), "nor is it when it comes back"


def test_a_change_keeps_what_was_learnt_where_the_drafters_stay() -> None:
    world = World()
    a = world.open()
    for _ in range(5):
        world.answer(world.job(), 7)
        world.commit(a, 7, 5, drafted=world.verify(a))
    (view,) = world.decoder._sequences["a"].views.values()
    retune(world, a, length_policy="threshold", num_tokens=2)
    world.decoder.begin_step(())
    (same,) = world.decoder._sequences["a"].views.values()
    assert same is view
    assert (view.acceptance.num_rounds, view.acceptance.pacing.policy) == (5, "threshold")
    assert world.decoder.drafting_of(a).length_policy == "threshold"


def test_who_waits_is_drafted_for_as_was_asked_when_it_runs() -> None:
    world = World()
    request = make_request("late", 3, max_tokens=20)
    retune(world, request, enabled=False)
    world.decoder.begin_step(())
    assert world.decoder._sequences == {}
    retune(world, request, enabled=True, num_tokens=3)
    world.decoder.begin_step(())
    world.decoder.open(request)
    assert world.decoder.drafting_of(request).num_tokens == 3


def test_what_was_given_up_is_not_taken_up_again() -> None:
    world = World()
    a = world.open()
    a.status = RequestStatus.RUNNING
    world.decoder.give_up("a")
    retune(world, a, enabled=True, num_tokens=2)
    world.decoder.begin_step(())
    assert world.decoder.links[0].jobs(ahead=True) == []
    assert "not finite" in str(world.decoder.drafting_of(a).why_off)


def test_a_change_of_what_has_ended_is_forgotten() -> None:
    world = World()
    a = world.open()
    retune(world, a, num_tokens=2)
    world.decoder.close("a")
    world.decoder.begin_step(())
    assert world.decoder._sequences == {}


def test_rules_hold_for_all_and_a_request_wants_less_or_another_policy() -> None:
    world = World()
    decoder = world.decoder
    a, b = world.open("a"), world.open("b", num_tokens=2, length_policy="fixed")
    decoder.change_rules(DraftingChange(num_tokens=3, length_policy="threshold"))
    assert [decoder.drafting_of(each).num_tokens for each in (a, b)] == [3, 2]
    assert [decoder.drafting_of(each).length_policy for each in (a, b)] == ["threshold", "fixed"]
    decoder.begin_step(())
    assert [job.num_wanted for job in decoder.links[0].jobs(ahead=False)] == [3, 2]
    decoder.change_rules(DraftingChange(num_tokens=1))
    decoder.begin_step(())
    assert decoder.drafting_of(world.open("c", num_tokens=4)).num_tokens == 1
    assert decoder.rules == DraftingRules(1, "threshold")


def test_off_for_all_is_off_until_it_is_on_again() -> None:
    world = World()
    decoder = world.decoder
    a = world.open("a")
    a.status = RequestStatus.RUNNING
    world.answer(world.job(), 7, 8)
    drafted = world.verify(a)
    decoder.change_rules(DraftingChange(enabled=False))
    assert decoder.why_off == "Drafting was turned off for all requests."
    assert decoder.tokens_a_step == 1
    world.commit(a, 7, 5, drafted=drafted)
    assert decoder.stats.num_rounds == 1, "a round under way is judged"
    decoder.begin_step(())
    world.open("b").status = RequestStatus.RUNNING
    assert decoder.links[0].jobs(ahead=True) == []
    assert world.verify(a) == ()
    decoder.change_rules(DraftingChange(enabled=True))
    decoder.begin_step(())
    assert {job.request.request_id for job in decoder.links[0].jobs(ahead=False)} == {"a", "b"}


# What is said of it.


def test_why_nothing_is_drafted_for_anyone() -> None:
    nobody = SpeculativeDecoder.without_drafters()
    assert nobody.why_off == "No drafter is loaded: --speculative-method is none."
    assert nobody.drafting_of(make_request("a", 3)).why_off == nobody.why_off
    stuck = World(can_rewind=False)
    assert stuck.decoder.drafting_of(stuck.open()).why_off == (
        "The model's state cannot go back behind a wrong draft."
    )
    assert World().decoder.why_off is None


def test_how_a_request_is_drafted_for() -> None:
    world = World("ngram", "draft_model")
    a = world.open()
    methods = ("ngram", "draft_model")
    assert world.decoder.drafting_of(a) == RequestDrafting(methods, None, 4, 4, "fixed", None)
    world.answer(world.job(index=1), 7, 8, index=1)
    assert world.decoder.drafting_of(a).drafter == "draft_model"
    world.commit(a, 7, drafted=world.verify(a))
    assert world.decoder.drafting_of(a).drafter == "draft_model", "the newest drafts were its own"
    only = world.open("b", method="ngram", num_tokens=2, length_policy="goodput")
    assert world.decoder.drafting_of(only) == RequestDrafting(("ngram",), None, 2, 2, "goodput", None)


def test_why_nothing_is_drafted_for_a_request() -> None:
    world = World()
    decoder = world.decoder

    def why(request: Request) -> str:
        found = decoder.drafting_of(request)
        assert found.length == 0
        return str(found.why_off)

    assert why(make_request("new", 3)) == "It does not run."
    assert why(world.open("none", enabled=False)) == "The request asks for no drafts."
    assert why(world.open("odd", method="magic")) == "No drafter here makes drafts of the method magic."
    a = world.open()
    decoder.pause("a")
    assert why(a) == "It does not run."
    decoder.open(a)
    (view,) = decoder._sequences["a"].views.values()
    view.limit = 0
    assert why(a).startswith("Drafts would cost it more time than they save")
    view.acceptance.pacing.is_off = True
    assert why(a).startswith("Too few of its drafts were right")
    decoder.give_up("a")
    assert "not finite" in why(a)


def test_a_dear_grammar_is_a_reason() -> None:
    class Dear:
        is_dear = True

    world = World()
    a = world.open()
    a.grammar = Dear()  # type: ignore[assignment]
    assert "grammar" in str(world.decoder.drafting_of(a).why_off)


def test_a_request_is_off_where_all_of_its_drafters_are() -> None:
    off = DrafterState("ngram", 4, "off", "It fails.")
    on = DrafterState("heads", 4, "sync", None)
    state = DraftingState(DraftingRules(4, "goodput"), "auto", (off, on), None)
    both = RequestDrafting(("ngram", "heads"), "ngram", 4, 3, "goodput", None)
    assert both.within(state) == replace(both, schedule="sync")
    alone = replace(both, methods=("ngram",))
    assert alone.within(state) == replace(alone, length=0, why_off="It fails.", schedule="off")
    paused = replace(alone, length=0, why_off="It does not run.")
    assert paused.within(state).why_off == "It does not run.", "the nearer reason"
    nobody = replace(paused, methods=())
    assert nobody.within(state) == nobody


# What drafters say of their drafts.


def test_what_a_drafter_says_of_its_drafts_is_told_to_the_policy_and_learnt_from() -> None:
    world = World("suffix")
    request = world.open(most=100)
    acceptance = world.decoder._sequences["a"].views[0].acceptance
    told = []
    for _ in range(40):
        world.answer(world.job(), 7, 8, chances=(0.9, 0.5))
        drafted = world.verify(request)
        told.append(list(world.policy.told))
        world.commit(request, 9, drafted=drafted)
    assert told[0] == pytest.approx([0.9, 0.45])
    assert told[-1][0] < 0.3  # nothing that it was so sure of ever came
    assert acceptance.is_told and acceptance.num_rounds == 40


def test_a_chain_that_came_in_part_keeps_what_was_said_of_the_rest() -> None:
    world = World("suffix")
    request = world.open()
    world.answer(world.job(), 7, 8, 9, 10, chances=(0.9, 0.8, 0.7, 0.6))
    world.verify(request)
    world.commit(request, 7, 8, drafted=world.decoder._sequences["a"].tape.drafted[:1])
    assert [draft.chance for draft in world.decoder._sequences["a"].tape.drafted] == [0.7, 0.6]


@pytest.mark.parametrize("is_cheap", [False, True])
def test_a_drafter_that_costs_something_is_told_below_which_chance_drafts_are_in_vain(
    is_cheap: bool,
) -> None:
    world = World("draft_model", is_cheap=is_cheap)
    request = world.open()
    world.policy.price = 0.25
    job = world.job()
    assert job.least_chance == 0.0  # it has not said anything yet
    world.answer(job, 7, chances=(0.5,))
    world.commit(request, 9, drafted=world.verify(request))
    assert world.job().least_chance == (0.0 if is_cheap else pytest.approx(0.25, abs=0.05))
