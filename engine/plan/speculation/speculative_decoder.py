"""SpeculativeDecoder: what is drafted for whom, how much of it each step verifies, and what came of it.

The plan tier's half of speculation: it owns the tapes and the statistics and touches neither drafters nor
threads. Loop thread only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.plan.request import Request
from engine.plan.speculation.acceptance import Acceptance, MethodPrior
from engine.plan.speculation.controller import make_length_policy
from engine.plan.speculation.draft_tape import (
    DraftedToken,
    DraftTape,
    PutOutcome,
    TapeOutcome,
    accepted_drafts,
)
from engine.plan.speculation.drafted_sequence import DraftedSequence, DraftView, RecentRatio
from engine.plan.speculation.drafter import Draft, Drafter, DraftJob, DraftRequest, TargetFeatures
from engine.plan.speculation.length_policy import Candidate, LengthPolicy, StepLoad
from engine.plan.speculation.pass_costs import PassCosts
from engine.plan.speculation.spec_stats import SpecStats
from engine.plan.speculation.speculation_config import SpeculationConfig


@dataclass(frozen=True, slots=True)
class DraftSource:
    """A drafter and its part: how long its drafts may be, and whether those get any who name no method."""

    drafter: Drafter
    max_tokens: int
    unasked: bool = True


_KNOWN_ROUNDS = 32  # before these nobody knows what drafts bring
_HARDLY_S = 1e-9  # that one more draft of a request adds to a micro-step


class SpeculativeDecoder:
    """Drafts come in by `jobs` and `put`, go out by `choose`, and are judged by `commit`.

    A request takes part from `open` to `close`, except while it is preempted (`pause`). Drafters are only
    asked for their names and ways: whoever runs them asks for `jobs`, by their place in `sources`, the most
    trusted first. `can_rewind` False drafts nothing and counts the steps that might have had drafts.

    It counts the tokens of each sequence that are synced to each drafter, so that a job sends only new ones.
    A wrong answer costs that answer, and at most what its drafter holds of the sequence.
    """

    def __init__(
        self,
        config: SpeculationConfig,
        sources: Sequence[DraftSource],
        policy: LengthPolicy,
        costs: PassCosts,
        *,
        can_rewind: bool = True,
    ) -> None:
        self.config = config
        self.costs = costs
        self.stats = SpecStats()
        self.waited_s = 0.0  # for drafts, before the step that comes next
        self.waits = [PassCosts() for _ in sources]  # by drafter: micro-steps that were waited for
        self.awaited: frozenset[int] = frozenset()  # the drafters that the next step waits for
        self.drafters = tuple(source.drafter for source in sources)
        self._sources = tuple(sources)
        self._policy = policy
        self._can_rewind = can_rewind
        self._priors = [MethodPrior() for _ in sources]
        self._sequences: dict[str, DraftedSequence] = {}  # those that have not ended
        self._active: dict[str, DraftedSequence] = {}  # those that have a seat
        self._clients: list[dict[str, tuple[DraftedSequence, DraftView]]] = [
            {} for _ in sources
        ]  # of them, by drafter
        self._closed: list[list[str]] = [[] for _ in sources]  # to be forgotten by each drafter
        self._lengths = RecentRatio()
        self._pace = RecentRatio()

    @classmethod
    def without_drafters(cls) -> SpeculativeDecoder:
        """One that does nothing, at next to no cost."""
        config = SpeculationConfig(vocab_size=0, max_draft_tokens=0)
        costs = PassCosts()
        return cls(config, (), make_length_policy(config, costs), costs)

    @property
    def draft_length(self) -> float:
        """Drafts a round, of late; 0 before the first."""
        return self._lengths.ratio

    @property
    def speedup(self) -> float:
        """Of late, over steps without drafts as the costs know them; 1 while they are unknown."""
        return self._pace.ratio or 1.0

    @property
    def best_tokens_a_step(self) -> int:
        """How many tokens a request may hope for a step: what one round in twenty commits.

        1 where nothing is drafted; all that can be drafted while too little is known.
        """
        if not (self._sources and self._can_rewind):
            return 1
        if self.stats.num_rounds < _KNOWN_ROUNDS:
            return 1 + self.config.max_draft_tokens
        left = self.stats.num_rounds // 20
        for num_accepted in range(len(self.stats.acceptance_histogram) - 1, 0, -1):
            left -= self.stats.acceptance_histogram[num_accepted]
            if left < 0:
                return 1 + num_accepted
        return 1

    # Requests come and go.

    def open(self, request: Request) -> None:
        """A request has taken a seat, maybe again."""
        if not (self._sources and request.speculation.enabled):
            return
        request_id = request.request_id
        sequence = self._sequences.get(request_id)
        if sequence is None:
            sequence = self._sequences[request_id] = self._make(request)
            request.spec_stats = SpecStats()
        self._active[request_id] = sequence
        for index, view in sequence.views.items():
            self._clients[index][request_id] = (sequence, view)

    def _make(self, request: Request) -> DraftedSequence:
        options = request.speculation
        method = None if options.method == "auto" else options.method
        views: dict[int, DraftView] = {}
        for index, source in enumerate(self._sources):
            is_meant = source.unasked if method is None else method == source.drafter.method
            if is_meant and self._can_rewind:
                acceptance = Acceptance(self._priors[index])
                max_tokens = min(source.max_tokens, options.num_tokens or source.max_tokens)
                limit = self._policy.wanted(acceptance, max_tokens)
                views[index] = DraftView(acceptance, max_tokens, limit)
        about = DraftRequest(
            request_id=request.request_id,
            num_prompt_tokens=request.num_prompt_tokens,
            sampling=request.sampling,
            stop_token_ids=request.stop_token_ids,
            prediction=options.prediction,
        )
        return DraftedSequence(request, about, DraftTape(len(request.token_ids)), views)

    def pause(self, request_id: str) -> None:
        """A request has lost its seat: its drafts and what drafters hold for it are dropped."""
        sequence = self._active.pop(request_id, None)
        if sequence is None:
            return
        self.stats.dropped["cancelled"] += max(0, len(sequence.tape) - sequence.num_flying)
        sequence.tape.clear()
        sequence.tape.epoch += 1
        sequence.num_flying = 0
        sequence.features = None
        for index in sequence.views:
            self._forget(index, request_id)
            del self._clients[index][request_id]

    def _forget(self, index: int, request_id: str) -> None:
        """Have a drafter forget what it knows of a request, if it knows anything."""
        found = self._clients[index].get(request_id)
        if found is not None and found[1].num_synced:
            self._closed[index].append(request_id)
            found[1].forget()

    def give_up(self, request_id: str) -> None:
        """Draft for this request no more."""
        self.pause(request_id)
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            sequence.views = {}

    def close(self, request_id: str) -> None:
        """A request has ended; unknown ones are passed over."""
        self.pause(request_id)
        self._sequences.pop(request_id, None)

    def take_closed(self, index: int) -> list[str]:
        """The requests that a drafter is to forget before its next job."""
        closed, self._closed[index] = self._closed[index], []
        return closed

    # For the scheduler.

    def choose(
        self, decodes: Sequence[Request], load: StepLoad
    ) -> list[tuple[Request, tuple[DraftedToken, ...]]]:
        """The drafts to verify in this step, for those of `decodes` that get any."""
        if not self._active:
            return []
        sequences, candidates = [], []
        for request in decodes:
            sequence = self._active.get(request.request_id)
            if sequence is None:
                continue
            if not self._can_rewind:
                self.stats.num_fallbacks += 1
                continue
            author, num_drafted = sequence.author, len(sequence.tape.drafted)
            if author is None or not num_drafted:
                continue
            room = min(author.max_tokens, request.max_num_tokens - len(request.token_ids) - 1)
            num_available = sequence.num_allowed(min(num_drafted, room))
            if num_available > 0:
                sequences.append(sequence)
                candidates.append(Candidate(author.acceptance, num_available, is_tree=sequence.tape.is_tree))
        if not self._can_rewind:
            return []
        chosen = []
        lengths = self._policy.lengths(candidates, load)
        for sequence, num_drafts in zip(sequences, lengths, strict=True):
            sequence.num_flying = num_drafts
            if num_drafts:
                chosen.append((sequence.request, tuple(sequence.tape.drafted[:num_drafts])))
        return chosen

    def expects_drafts(self, requests: Iterable[Request]) -> bool:
        """True if the next step may have drafts of these to verify: some are there, or are waited for."""
        found = (self._active.get(request.request_id) for request in requests) if self._active else ()
        return any(sequence is not None and sequence.expects_drafts(self.awaited) for sequence in found)

    def commit(self, request: Request, drafted: Sequence[DraftedToken], num_tokens: int) -> None:
        """A step that verified `drafted` has committed `num_tokens`; call it before the request is closed."""
        sequence = self._active.get(request.request_id)
        if sequence is None or num_tokens == 0:
            return
        if sequence.tape.drafted:
            tokens = request.token_ids[-num_tokens:]
            sequence.num_flying = len(drafted)  # there may not have been room for all that were chosen
            if drafted:
                self._judge(sequence, drafted, tokens)
            self._commit_tape(sequence, tokens)
        else:
            sequence.tape.first += num_tokens
        for index, view in sequence.views.items():
            draft_s = _HARDLY_S if self._waits_for(index) else 0.0
            view.limit = self._policy.wanted(view.acceptance, view.max_tokens, draft_s)

    def _judge(
        self, sequence: DraftedSequence, drafted: Sequence[DraftedToken], tokens: Sequence[int]
    ) -> None:
        """Count one round."""
        self._lengths.observe(len(drafted), 1)
        author, request = sequence.author, sequence.request
        assert author is not None and request.spec_stats is not None
        accepted = accepted_drafts(drafted, tokens)
        if drafted[0].parent is None:
            num_judged = len(drafted) if len(tokens) > len(accepted) else len(accepted)
            self._policy.observe(author.acceptance, num_judged, len(accepted))
        else:
            self._policy.observe_tree(author.acceptance, len(drafted), accepted)
        for stats in (self.stats, request.spec_stats):
            stats.observe_round(sequence.tape.method, len(drafted), len(accepted), len(tokens))

    def _commit_tape(self, sequence: DraftedSequence, tokens: Sequence[int]) -> None:
        tape, first = sequence.tape, sequence.tape.first
        num_ahead = len(tape) - sequence.num_flying
        outcome, num_right = tape.commit(tokens)
        sequence.num_flying = 0
        if outcome is TapeOutcome.MISS:
            for view in sequence.views.values():
                view.num_synced = min(view.num_synced, first + num_right)
        if num_ahead > 0:
            hit = outcome is TapeOutcome.HIT
            self.stats.run_ahead["hit" if hit else "miss"] += 1
            if not hit:
                self.stats.dropped["stale"] += num_ahead

    def keep_features(self, request_id: str, hidden: object) -> None:
        """What the target's last pass left where it drew the newest token, for drafters that read it."""
        sequence = self._active.get(request_id)
        if sequence is not None:
            sequence.features = TargetFeatures(len(sequence.request.token_ids) - 1, hidden)

    # For whoever runs the drafters.

    def jobs(self, index: int, *, ahead: bool, may_read: bool = True) -> list[DraftJob]:
        """The jobs of this drafter's next micro-step, empty if it has none; their tokens count as synced.

        `ahead` drafts past what the target's pass is verifying and the token drawn after it. With `may_read`
        False there are no jobs either while the drafter is behind with every sequence.
        """
        wanted = [
            (sequence, view, count)
            for sequence, view in self._clients[index].values()
            if view.limit and (count := self._num_wanted(sequence, view, ahead)) > 0
        ]
        if wanted and self.drafters[index].reads_features:
            wanted = [entry for entry in wanted if entry[0].has_new_features]
        if not may_read and all(view.is_behind for _, view, _ in wanted):
            return []
        if wanted and self._waits_for(index) and not any(view.is_behind for _, view, _ in wanted):
            wanted = self._worth_waiting_for(index, wanted)
        return [self._job(*entry) for entry in wanted]

    def _waits_for(self, index: int) -> bool:
        """True if this drafter makes the next step later, and by how much is known."""
        return index in self.awaited and self.waits[index].seconds(1, 1) is not None

    def _worth_waiting_for(
        self, index: int, wanted: list[tuple[DraftedSequence, DraftView, int]]
    ) -> list[tuple[DraftedSequence, DraftView, int]]:
        """Those for which a micro-step makes up for the time that all requests lose by it."""
        gains: list[float] = []
        for sequence, view, count in wanted:
            num_drafted = len(sequence.tape)
            is_chain = self.drafters[index].is_stepwise and not self.drafters[index].reads_features
            num_more = 1 if is_chain else count  # a tree comes at once
            gains.append(sum(view.acceptance.survival(num_drafted + num_more)[num_drafted:]))
        order = sorted(range(len(wanted)), key=lambda place: -gains[place])
        seconds = [self.waits[index].seconds(count, count) or 0.0 for count in range(1, len(wanted) + 1)]
        served = order[: self._policy.num_served([gains[place] for place in order], seconds)]
        return [wanted[place] for place in sorted(served)]

    def _num_wanted(self, sequence: DraftedSequence, view: DraftView, ahead: bool) -> int:
        """How many more drafts; those that need none are found out first, since they are most."""
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
        length = view.limit + (sequence.num_flying + 1 if ahead else 0)
        return min(length, request.max_num_tokens - num_committed - 1) - len(drafted)

    def _job(self, sequence: DraftedSequence, view: DraftView, num_wanted: int) -> DraftJob:
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
            features=sequence.features,
        )

    def put(self, index: int, job: DraftJob, draft: Draft) -> None:
        """Take a drafter's answer, which fits the job; see `read_answers`."""
        sequence = self._active.get(draft.request_id)
        view = None if sequence is None else sequence.views.get(index)
        if sequence is None or view is None:
            self.stats.dropped["cancelled"] += len(draft.token_ids)
            return
        tape = sequence.tape
        if draft.epoch != tape.epoch:
            self._drop_stale(len(draft.token_ids))
            return
        view.is_behind = draft.is_behind
        if not draft.token_ids:
            self._note_silence(index, view, job)
            return
        view.num_turns = 0
        was_empty, num_late = not tape.drafted, tape.num_late
        outcome = PutOutcome.WRONG  # if another was faster
        if was_empty or sequence.author is view:
            method = draft.method or self.drafters[index].method
            outcome = tape.put(draft, sequence.request.token_ids, method)
        if outcome is not PutOutcome.TAKEN:
            view.num_synced = min(view.num_synced, draft.first)
            self._drop_stale(len(draft.token_ids))
            return
        if was_empty:
            sequence.author = view
        if draft.parents is None:
            view.num_synced = job.next_position + len(draft.token_ids)
        self.stats.num_late += tape.num_late > num_late
        self.stats.dropped["late"] += tape.num_late - num_late

    def _note_silence(self, index: int, view: DraftView, job: DraftJob) -> None:
        """A drafter had nothing to say: it is asked again at once if it has yet to read, but not for ever.

        One that reads anything at all needs fewer turns than there are tokens.
        """
        view.num_turns += 1
        is_reading = view.is_behind and (
            view.num_turns <= job.next_position
            or view.num_turns <= sum(sequence.num_known for sequence, _ in self._clients[index].values())
        )
        if not is_reading:
            view.no_draft_at, view.is_behind = job.next_position, False

    def _drop_stale(self, num_tokens: int) -> None:
        self.stats.num_stale += 1
        self.stats.dropped["stale"] += num_tokens

    def lose(self, index: int, jobs: Iterable[DraftJob]) -> None:
        """A micro-step failed: nobody knows what its drafter remembers of these, so it forgets them.

        It is not asked about them again before something new is known.
        """
        for job in jobs:
            request_id = job.request.request_id
            found = self._clients[index].get(request_id)
            if found is not None:  # else it is about to be forgotten anyway
                self._forget(index, request_id)
                found[1].no_draft_at = found[0].num_known

    def is_reading(self, index: int, jobs: Iterable[DraftJob]) -> bool:
        """True if the drafter has more to read of any of these before it can draft for it."""
        clients = self._clients[index]
        found = (clients.get(job.request.request_id) for job in jobs)
        return any(client is not None and client[1].is_behind for client in found)

    # What steps took.

    def observe_pass(
        self, num_seqs: int, num_tokens: int, num_drafts: int, pass_s: float, step_s: float
    ) -> None:
        """A step of decodes and drafts only took so long on the device, and so long in all."""
        self.costs.observe(num_seqs, num_tokens, step_s)
        if num_drafts:
            self.stats.verify_s += pass_s

    def observe_pace(self, num_seqs: int, num_committed: int, seconds: float) -> None:
        """So many sequences got so many tokens in a step, drafting included."""
        plain_s = self.costs.seconds(num_seqs, num_seqs)
        if plain_s is not None and seconds > 0:
            self._pace.observe(num_committed / num_seqs * plain_s, seconds)
