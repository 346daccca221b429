"""DrafterLink: what one drafter holds of each sequence, what to ask it next, and what its answers come to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate
from operator import mul

from engine.plan.request import Request
from engine.plan.speculation.acceptance import MethodPrior
from engine.plan.speculation.draft_tape import DraftedSequence, DraftTape, DraftView, UnreadToken
from engine.plan.speculation.drafter import Draft, DraftAnswers, Drafter, DraftJob, UnreadChains
from engine.plan.speculation.length_policy import LengthPolicy
from engine.plan.speculation.pass_costs import PassCosts
from engine.plan.speculation.spec_stats import SpecStats

_VAIN_ANSWERS = 8  # in a row, after which a cheap drafter is asked about a sequence less often
_CROWD = 4  # sequences, which one of no use to each may still be asked about in every step
_QUIET_ASKED = 2  # in a larger crowd, such sequences that a step asks about, on average

_Wish = tuple[DraftedSequence, DraftView, int]  # and how many more drafts it wants


class DrafterLink:
    """The decoder's side of one drafter. It calls no method of the drafter: the loop carries the messages.

    It counts the tokens of each sequence that are synced to the drafter, so that a job sends only new ones.
    A wrong answer costs that answer, and at most what the drafter holds of the sequence. `prior` is what the
    drafter did for all requests.
    """

    def __init__(self, drafter: Drafter, policy: LengthPolicy, stats: SpecStats) -> None:
        self.drafter = drafter
        self.prior = MethodPrior(is_free=drafter.is_cheap)
        self.is_awaited = False
        self.is_asked = True
        self.runs_ahead = False
        self.may_branch = True
        self.max_num_lanes = 0  # that a job may ask for
        self.rival: DrafterLink | None = None  # who reads features, where this drafter does not
        self._policy = policy
        self._stats = stats
        self._waits = PassCosts()  # of micro-steps that a step waited for
        self._has_waited = False
        self._clients: dict[str, tuple[DraftedSequence, DraftView]] = {}
        self._closed: list[str] = []

    # Around a step.

    def begin_step(
        self, *, is_awaited: bool, runs_ahead: bool, may_branch: bool, is_asked: bool = True
    ) -> None:
        """Note whether the next step waits for this drafter, or it drafts beside this one, maybe trees.

        One that is not asked at all has no drafts to be measured out, which takes time for each sequence.
        """
        self.is_awaited = is_awaited
        self.is_asked = is_asked
        self.runs_ahead = runs_ahead
        self.may_branch = may_branch

    def note_waited(self, num_jobs: int, seconds: float) -> None:
        """A step has waited so long for a micro-step of so many jobs.

        The first wait counts for nothing: drafters set up memory then, and would seem too dear for ever.
        """
        if self._has_waited:
            self._waits.observe(num_jobs, num_jobs, seconds)
        self._has_waited = True

    @property
    def goes_on(self) -> bool:
        """True if the drafter drafts on behind its own drafts while these are verified."""
        return not (self.drafter.reads_features and self.drafter.is_stepwise)

    @property
    def has_price(self) -> bool:
        """True if this drafter makes the next step later, and it is known by how much."""
        return self.is_awaited and self._waits.is_known

    @property
    def has_clients(self) -> bool:
        """True if there is a sequence to draft for."""
        return bool(self._clients)

    def may_draft(self, requests: Iterable[Request]) -> bool:
        """Whether to expect drafts of these for the next step, before the result of the one that runs.

        They have none now. A draft that the step has to wait for must be worth it by what is known now.
        """
        if not (self.is_awaited or self.runs_ahead):
            return False
        found = (self._clients.get(request.request_id) for request in requests)
        wishes = [(*client, client[1].limit) for client in found if client is not None and client[1].limit]
        if not wishes or not self.has_price or any(view.is_behind for _, view, _ in wishes):
            return bool(wishes)
        return bool(self._worth_waiting_for(wishes))

    def is_due(self, view: DraftView) -> bool:
        """Whether to ask about this sequence before the next step; to be called once a step.

        What is not asked at all is never due. A cheap drafter that has long been of no use to a sequence is
        asked about it in turn with others of that kind, so that a crowd of them costs the host no more than a
        few: each answer is time that the model does not compute in.
        """
        if not self.is_asked or (self.drafter.reads_features and not self.is_awaited):
            return False
        if not self._is_quiet(view) or view.is_behind:
            return True
        view.num_passed += 1
        if view.num_passed * _QUIET_ASKED < len(self._clients):
            return False
        view.num_passed = 0
        return True

    def _is_quiet(self, view: DraftView) -> bool:
        """True in a crowd, for a sequence that a cheap drafter has long been of no use to."""
        is_useless = self.drafter.is_cheap and view.num_vain >= _VAIN_ANSWERS
        return is_useless and len(self._clients) > _CROWD

    # Requests come and go.

    def add(self, sequence: DraftedSequence, view: DraftView) -> None:
        """Draft for this sequence from now on."""
        self._clients[sequence.request.request_id] = (sequence, view)

    def remove(self, request_id: str) -> None:
        """Draft for this request no more, and have the drafter close it."""
        _, view = self._clients.pop(request_id)
        self._forget(request_id, view)

    def take_closed(self) -> list[str]:
        """The requests that the drafter must close before its next job."""
        closed, self._closed = self._closed, []
        return closed

    def _forget(self, request_id: str, view: DraftView) -> None:
        if view.num_synced:
            self._closed.append(request_id)
            view.forget()

    # What to ask.

    def jobs(self, *, ahead: bool, may_read: bool = True) -> list[DraftJob]:
        """The jobs of the next micro-step, empty if there are none; their tokens count as synced.

        `ahead` drafts past what the target's pass is verifying and the token drawn after it, from the newest
        features where the drafter reads them. With `may_read` False there are no jobs either while the
        drafter is behind with every sequence.
        """
        wishes = [
            (sequence, view, count)
            for sequence, view in self._clients.values()
            if view.limit and (count := _num_wanted(sequence, view, ahead)) > 0
        ]
        if self.drafter.reads_features:
            again = ahead and self.goes_on
            wishes = [
                wish for wish in wishes if (wish[0].has_features if again else wish[0].has_new_features)
            ]
        if not may_read and all(view.is_behind for _, view, _ in wishes):
            return []
        if wishes and not ahead and self.has_price and not any(view.is_behind for _, view, _ in wishes):
            wishes = self._worth_waiting_for(wishes)
            if wishes:
                self._policy.note_served()
        return [self._job(*wish) for wish in wishes]

    def _worth_waiting_for(self, wishes: list[_Wish]) -> list[_Wish]:
        """Those whose gain makes up for the time that all requests lose by the micro-step."""
        gains: list[float] = []
        is_chain = self.drafter.is_stepwise and not self.drafter.reads_features
        for sequence, view, count in wishes:
            num_drafted = len(sequence.tape)
            num_more = 1 if is_chain else count  # a tree comes at once
            gains.append(self._policy.gain(view.acceptance, num_drafted, num_more))
        acceptances = [view.acceptance for _, view, _ in wishes]
        waited_s = self._waits.plain(len(wishes))
        seconds = [0.0] * len(wishes) if waited_s is None else waited_s.tolist()
        return [wishes[place] for place in self._policy.served(acceptances, gains, seconds)]

    def _job(self, sequence: DraftedSequence, view: DraftView, num_wanted: int) -> DraftJob:
        """Ask for so many drafts, and sync all known tokens to the drafter."""
        token_ids, tape = sequence.request.token_ids, sequence.tape
        num_committed = len(token_ids)
        first = min(view.num_synced, sequence.num_known)
        drafts = tape.drafted[max(0, first - num_committed) :]
        view.num_synced = sequence.num_known
        return DraftJob(
            request=sequence.about,
            epoch=tape.epoch,
            first=first,
            token_ids=(*token_ids[first:], *(draft.token_id for draft in drafts)),
            num_committed=num_committed,
            num_wanted=num_wanted,
            features=sequence.features.take_again() if self.drafter.reads_features else (),
            may_branch=self.may_branch,
            is_quiet=self._is_quiet(view),
            least_chance=self._least_chance(sequence, view),
            # At each draft that is or will be verified, and behind them.
            num_lanes=min(self.max_num_lanes, 1 + max(sequence.num_in_flight, min(len(tape), view.limit))),
        )

    def _least_chance(self, sequence: DraftedSequence, view: DraftView) -> float:
        """That the drafter must state of a draft for it to be verified; 0 where drafts cost nothing."""
        acceptance = view.acceptance
        if acceptance.is_free or not acceptance.is_told:
            return 0.0
        kind = self.drafter.method, sequence.request.sampling.temperature > 0
        return acceptance.least_stated(kind, self._policy.least_chance(acceptance))

    # What comes back.

    def may_be_unread(self, jobs: Iterable[DraftJob]) -> bool:
        """Whether a step may verify drafts for these before they are read.

        A grammar has to know them, penalties count them, and a rival may promise more.
        """
        if self.rival is not None:
            return False
        found = [self._clients.get(job.request.request_id) for job in jobs]
        return all(client is not None and self._is_open(*client) for client in found)

    @staticmethod
    def _is_open(sequence: DraftedSequence, view: DraftView) -> bool:
        by_another = bool(sequence.tape.drafted) and sequence.author is not view
        return not (by_another or sequence.request.draws_by_history)

    def expect(self, jobs: Iterable[DraftJob], chains: UnreadChains) -> None:
        """Put drafts that are still to be read on the tapes; `withdraw` takes them back."""
        for job in jobs:
            found = self._clients.get(job.request.request_id)
            places = chains.places.get(job.request.request_id, ())[: job.num_wanted]
            if found is None or found[0].tape.epoch != job.epoch or not places:
                continue
            sequence, view = found
            if not sequence.tape.drafted:
                sequence.author = view
            sequence.tape.expect([UnreadToken(chains.tokens, place) for place in places], self.drafter.method)

    def withdraw(self, jobs: Iterable[DraftJob]) -> None:
        """Take back what was expected, before the answers are taken."""
        for tape in self._tapes(jobs):
            tape.withdraw()

    def give_up(self, jobs: Iterable[DraftJob]) -> None:
        """What was expected for these may come at any time, and is stale then."""
        for tape in self._tapes(jobs):
            tape.drop_drafts()

    def _tapes(self, jobs: Iterable[DraftJob]) -> list[DraftTape]:
        """Of those that still run."""
        found = (self._clients.get(job.request.request_id) for job in jobs)
        return [client[0].tape for client in found if client is not None]

    def take(self, answers: DraftAnswers) -> None:
        """Count a micro-step and put its fitting answers on the tapes."""
        self._stats.draft_s += answers.seconds
        self._stats.note_dropped("error", answers.num_unfit_tokens)
        for job, draft in answers.fitting:
            self.put(job, draft)

    def put(self, job: DraftJob, draft: Draft) -> None:
        """Take one answer, which fits the job; see `read_answers`."""
        found = self._clients.get(draft.request_id)
        if found is None:
            self._stats.note_dropped("cancelled", len(draft.token_ids))
            return
        sequence, view = found
        tape = sequence.tape
        if draft.epoch != tape.epoch:
            self._drop_stale(draft)
            return
        view.is_behind = draft.is_behind
        view.num_vain += 1
        if not draft.token_ids:
            self._note_no_draft(view, job)
            return
        view.num_turns = 0
        if self._is_outbid(sequence, view, draft):
            view.unsync(draft.first)
            view.no_draft_at = job.next_position
            return
        was_empty, method = not tape.drafted, draft.method or self.drafter.method
        is_author = was_empty or sequence.author is view  # else another drafter was faster
        num_late = tape.put(draft, sequence.request.token_ids, method) if is_author else None
        if num_late is None:
            view.unsync(draft.first)
            self._drop_stale(draft)
            return
        if was_empty:
            sequence.author = view
        if draft.parents is None:
            view.num_synced = job.next_position + len(draft.token_ids)
        self._stats.num_late += num_late > 0
        self._stats.note_dropped("late", num_late)

    def _is_outbid(self, sequence: DraftedSequence, view: DraftView, draft: Draft) -> bool:
        """True if the rival, which the step waits for, promises more than this draft.

        A draft as long as the rival's longest stands: text sources draft so far only behind a long match.
        """
        rival = self.rival
        found = rival._clients.get(draft.request_id) if rival is not None and rival.is_awaited else None
        if found is None or not sequence.has_new_features:
            return False
        other, length = found[1], len(draft.token_ids)
        if draft.chances:
            kind = draft.method or self.drafter.method, sequence.request.sampling.temperature > 0
            chances = view.acceptance.believe(kind, list(accumulate(draft.chances, mul)))
        elif length >= other.max_tokens:
            return False
        else:
            chances = view.acceptance.survival(length)
        return sum(other.acceptance.survival(other.limit)) > sum(chances)

    def _drop_stale(self, draft: Draft) -> None:
        self._stats.num_stale += 1
        self._stats.note_dropped("stale", len(draft.token_ids))

    def _note_no_draft(self, view: DraftView, job: DraftJob) -> None:
        """An answer had no draft. The drafter is asked again at once only if it still has tokens to read.

        A drafter that reads at all needs fewer turns than there are tokens, so the turns are limited.
        """
        view.num_turns += 1
        is_reading = view.is_behind and (
            view.num_turns <= job.next_position
            or view.num_turns <= sum(sequence.num_known for sequence, _ in self._clients.values())
        )
        if not is_reading:
            view.no_draft_at, view.is_behind = job.next_position, False

    def lose(self, jobs: Iterable[DraftJob]) -> None:
        """A micro-step failed: the drafter must close these, and is not asked before something is new."""
        for job in jobs:
            request_id = job.request.request_id
            found = self._clients.get(request_id)
            if found is not None:
                sequence, view = found
                self._forget(request_id, view)
                view.no_draft_at = sequence.num_known

    def is_reading(self, jobs: Iterable[DraftJob]) -> bool:
        """True if the drafter has more to read of any of these before it can draft for it."""
        found = (self._clients.get(job.request.request_id) for job in jobs)
        return any(client is not None and client[1].is_behind for client in found)


def _num_wanted(sequence: DraftedSequence, view: DraftView, ahead: bool) -> int:
    """How many more drafts the sequence wants. Sequences that want none come first: they are most."""
    request, drafted = sequence.request, sequence.tape.drafted
    num_committed = len(request.token_ids)
    if view.no_draft_at == num_committed + len(drafted):
        return 0
    if not ahead and num_committed - request.num_computed_tokens != 1:
        return 0  # it will not decode in the next step
    if drafted:
        by_another = sequence.author is not view
        if by_another or drafted[-1].token_id in request.stop_token_ids or sequence.tape.is_tree:
            return 0
    length = view.limit + (sequence.num_in_flight + 1 if ahead else 0)
    return min(length, request.max_num_tokens - num_committed - 1) - len(drafted)


MAX_FAILURES = 3  # in a row
FIRST_PAUSE_S, MAX_PAUSE_S = 5.0, 300.0


class CircuitBreaker:
    """Opens after MAX_FAILURES in a row; lets one try through after each pause, which a failure doubles."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._num_failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._open_until = 0.0

    @property
    def is_open(self) -> bool:
        """True while it must not be tried."""
        return self._num_failures >= MAX_FAILURES and self._clock() < self._open_until

    def succeed(self) -> None:
        """A try has succeeded."""
        self._num_failures = 0
        self._pause_s = FIRST_PAUSE_S

    def fail(self) -> bool:
        """A try has failed; True if the breaker is open from now on."""
        self._num_failures += 1
        if self._num_failures < MAX_FAILURES:
            return False
        self._open_until = self._clock() + self._pause_s
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        return True
