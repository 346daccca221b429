"""SpeculativeDecoder: what is drafted for whom, how much of it each step verifies, and what came of it.

The plan tier's half of speculation: it owns the tapes and the statistics and touches neither drafters nor
threads. Loop thread only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine.request import Request
from engine.speculation.acceptance import Acceptance, MethodPrior
from engine.speculation.controller import Candidate, LengthPolicy, StepLoad
from engine.speculation.draft_tape import DraftedToken, DraftTape, PutOutcome, TapeOutcome
from engine.speculation.drafter import Draft, Drafter, DraftJob, DraftRequest, TargetFeatures
from engine.speculation.spec_stats import SpecStats
from engine.speculation.speculation_config import SpeculationConfig
from engine.speculation.step_costs import StepCosts

_FORGETTING = 0.02  # a step's share in figures of late


@dataclass(frozen=True, slots=True)
class DraftSource:
    """A drafter and its part: how long its drafts may be, and whether it drafts for requests that name none."""

    drafter: Drafter
    max_tokens: int
    unasked: bool = True


@dataclass(slots=True)
class _View:
    """What one drafter has to do with one sequence.

    `told` is how many leading tokens it knows to be as they are, drafts included. `silent_at` is how many
    were known when it last had nothing to say. `max_tokens` is the longest draft it may make, and `limit` how
    long a draft is worth having.
    """

    acceptance: Acceptance
    max_tokens: int
    limit: int
    told: int = 0
    silent_at: int = -1
    is_behind: bool = False


@dataclass(slots=True)
class _Sequence:
    """One request that drafts may be made for. `num_flying` drafts of its tape are being verified."""

    request: Request
    about: DraftRequest
    tape: DraftTape
    views: list[_View | None]  # by drafter; None for those it does not want
    num_flying: int = 0
    features: TargetFeatures | None = None
    author: _View | None = field(default=None)  # whose drafts the tape holds

    @property
    def num_known(self) -> int:
        """Tokens up to the end of the tape."""
        return len(self.request.token_ids) + len(self.tape)

    @property
    def is_decoding(self) -> bool:
        """True when a step would compute nothing of it but its newest token, and drafts."""
        return len(self.request.token_ids) - self.request.num_computed_tokens == 1


class SpeculativeDecoder:
    """Drafts come in by `jobs` and `put`, go out by `choose`, and are judged by `settle`.

    A request takes part from `open` to `close`, except while it is preempted (`pause`). Drafters are only
    asked for their names and ways: whoever runs them asks for `jobs`, by their place in `sources`, the most
    trusted first. `can_rewind` False verifies nothing and counts what might have been.
    """

    def __init__(
        self,
        config: SpeculationConfig,
        sources: Sequence[DraftSource],
        policy: LengthPolicy,
        costs: StepCosts,
        *,
        can_rewind: bool = True,
    ) -> None:
        self.config = config
        self.costs = costs
        self.stats = SpecStats()
        self.waited_s = 0.0  # for drafts, before the step that comes next
        self.step_waits_s = [0.0] * len(sources)  # by drafter: what a micro-step that is waited for takes
        self.draft_length = 0.0  # drafts a round, of late
        self.speedup = 1.0  # of late, over steps without drafts as the costs know them
        self.drafters = tuple(source.drafter for source in sources)
        self._sources = tuple(sources)
        self._policy = policy
        self._can_rewind = can_rewind
        self._priors = [MethodPrior() for _ in sources]
        self._sequences: dict[str, _Sequence] = {}  # those that have not ended
        self._active: dict[str, _Sequence] = {}  # those that have a seat
        self._closed: list[list[str]] = [[] for _ in sources]  # to be forgotten by each drafter

    @property
    def has_active(self) -> bool:
        """True while any running request may be drafted for."""
        return bool(self._active)

    # Requests come and go.

    def open(self, request: Request) -> None:
        """A request has taken a seat, maybe again."""
        options = request.speculation
        if not options.enabled:
            return
        sequence = self._sequences.get(request.request_id)
        if sequence is None:
            sequence = self._sequences[request.request_id] = self._make(request)
            request.spec_stats = SpecStats()
        self._active[request.request_id] = sequence

    def _make(self, request: Request) -> _Sequence:
        options = request.speculation
        method = None if options.method == "auto" else options.method
        views: list[_View | None] = []
        for source, prior in zip(self._sources, self._priors, strict=True):
            if source.unasked if method is None else method == source.drafter.method:
                acceptance = Acceptance(prior)
                max_tokens = min(source.max_tokens, options.num_tokens or source.max_tokens)
                views.append(_View(acceptance, max_tokens, self._policy.wanted(acceptance, max_tokens)))
            else:
                views.append(None)
        about = DraftRequest(
            request_id=request.request_id,
            num_prompt_tokens=request.num_prompt_tokens,
            sampling=request.sampling,
            stop_token_ids=request.stop_token_ids,
            prediction=options.prediction,
        )
        return _Sequence(request, about, DraftTape(len(request.token_ids)), views)

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
        for index, view in enumerate(sequence.views):
            if view is not None:
                view.told, view.silent_at, view.is_behind = 0, -1, False
                self._closed[index].append(request_id)

    def give_up(self, request_id: str) -> None:
        """Draft for this request no more."""
        self.pause(request_id)
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            sequence.views = [None] * len(self.drafters)

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
        sequences, candidates = [], []
        for request in decodes:
            sequence = self._active.get(request.request_id)
            if sequence is None:
                continue
            if not self._can_rewind:
                self.stats.num_fallbacks += 1
                continue
            author = sequence.author
            if author is None:
                continue
            room = min(author.max_tokens, request.max_num_tokens - len(request.token_ids) - 1)
            num_available = min(len(sequence.tape), room)
            if num_available > 0:
                sequences.append(sequence)
                candidates.append(Candidate(author.acceptance, num_available, is_tree=sequence.tape.is_tree))
        if not candidates:
            return []
        chosen = []
        lengths = self._policy.lengths(candidates, load)
        for sequence, num_drafts in zip(sequences, lengths, strict=True):
            sequence.num_flying = num_drafts
            if num_drafts:
                chosen.append((sequence.request, tuple(sequence.tape.drafted[:num_drafts])))
        return chosen

    def settle(self, request: Request, drafted: Sequence[DraftedToken], num_tokens: int) -> None:
        """A step has committed so many tokens, of which it had these drafts; before the request ends by it."""
        sequence = self._active.get(request.request_id)
        if sequence is None or num_tokens == 0:
            return
        tokens = request.token_ids[-num_tokens:]
        if drafted:
            self._judge(sequence, drafted, tokens)
        self._settle_tape(sequence, tokens)
        for view, wait_s in zip(sequence.views, self.step_waits_s, strict=True):
            if view is not None:
                view.limit = self._policy.wanted(view.acceptance, view.max_tokens, wait_s)

    def _judge(self, sequence: _Sequence, drafted: Sequence[DraftedToken], tokens: Sequence[int]) -> None:
        """Count one round."""
        self.draft_length += _FORGETTING * (len(drafted) - self.draft_length)
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

    def _settle_tape(self, sequence: _Sequence, tokens: Sequence[int]) -> None:
        tape, first = sequence.tape, sequence.tape.first
        num_ahead = len(tape) - sequence.num_flying
        outcome, num_right = tape.settle(tokens)
        sequence.num_flying = 0
        if outcome is TapeOutcome.MISS:
            for view in sequence.views:
                if view is not None:
                    view.told = min(view.told, first + num_right)
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

    def jobs(self, index: int, *, ahead: bool) -> list[DraftJob]:
        """What this drafter is to do now; none for those it has done enough for.

        `ahead` is beside the target's pass: past what is being verified and the token drawn after it.
        """
        jobs = []
        for sequence in self._active.values():
            view = sequence.views[index]
            if view is None or not (ahead or sequence.is_decoding):
                continue
            wanted = self._num_wanted(sequence, view, index, ahead)
            if wanted > 0:
                jobs.append(self._job(sequence, view, wanted))
        return jobs

    def _num_wanted(self, sequence: _Sequence, view: _View, index: int, ahead: bool) -> int:
        request, tape = sequence.request, sequence.tape
        if view.limit == 0 or view.silent_at == sequence.num_known:
            return 0
        if self.drafters[index].reads_features and sequence.features is None:
            return 0
        if tape.drafted:
            by_another = sequence.author is not view
            ended = tape.drafted[-1].token_id in request.stop_token_ids
            if by_another or ended or tape.is_tree:
                return 0
        length = view.limit + (sequence.num_flying + 1 if ahead else 0)
        room = request.max_num_tokens - len(request.token_ids) - 1
        return min(length, room) - len(tape)

    def _job(self, sequence: _Sequence, view: _View, num_wanted: int) -> DraftJob:
        token_ids, tape = sequence.request.token_ids, sequence.tape
        num_committed = len(token_ids)
        first = min(view.told, sequence.num_known)
        drafts = tape.drafted[max(0, first - num_committed) :]
        view.told = sequence.num_known
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
        """Take a drafter's answer, which fits the job; see `fault_of`."""
        sequence = self._active.get(draft.request_id)
        view = None if sequence is None else sequence.views[index]
        if sequence is None or view is None:
            self.stats.dropped["cancelled"] += len(draft.token_ids)
            return
        if draft.epoch != sequence.tape.epoch:
            self._drop_stale(len(draft.token_ids))
            return
        view.is_behind = draft.is_behind
        if not draft.token_ids:
            if not draft.is_behind:
                view.silent_at = job.next_position
            return
        tape = sequence.tape
        was_empty, num_late = not tape.drafted, tape.num_late
        if tape.drafted and sequence.author is not view:
            self._drop_stale(len(draft.token_ids))  # another was faster
            view.told = min(view.told, draft.first)
            return
        outcome = tape.put(draft, sequence.request.token_ids, draft.method or self.drafters[index].method)
        if outcome is PutOutcome.TAKEN:
            if was_empty:
                sequence.author = view
            if draft.parents is None:
                view.told = job.next_position + len(draft.token_ids)
            self.stats.num_late += tape.num_late > num_late
            self.stats.dropped["late"] += tape.num_late - num_late
        else:
            view.told = min(view.told, draft.first)
            self._drop_stale(len(draft.token_ids))

    def _drop_stale(self, num_tokens: int) -> None:
        self.stats.num_stale += 1
        self.stats.dropped["stale"] += num_tokens

    def lose(self, index: int, jobs: Iterable[DraftJob]) -> None:
        """A micro-step failed: nobody knows what its drafter remembers of these, so it forgets them."""
        for job in jobs:
            request_id = job.request.request_id
            self._closed[index].append(request_id)
            sequence = self._active.get(request_id)
            view = None if sequence is None else sequence.views[index]
            if sequence is not None and view is not None:
                view.told, view.silent_at = 0, sequence.num_known

    def all_behind(self, index: int, jobs: Sequence[DraftJob]) -> bool:
        """True if the drafter has more to read of all of these before it can answer."""
        views = (self._active[job.request.request_id].views[index] for job in jobs)
        return all(view is not None and view.is_behind for view in views)

    # What steps took.

    def observe_pass(self, num_seqs: int, num_tokens: int, num_drafts: int, seconds: float) -> None:
        """A pass over decodes and drafts only took so long."""
        self.costs.observe(num_seqs, num_tokens, seconds)
        if num_drafts:
            self.stats.verify_s += seconds

    def observe_pace(self, num_seqs: int, num_committed: int, seconds: float) -> None:
        """So many sequences got so many tokens in a step, drafting included."""
        plain_s = self.costs.seconds(num_seqs, num_seqs)
        if plain_s is not None and seconds > 0:
            self.speedup += _FORGETTING * (num_committed / num_seqs * plain_s / seconds - self.speedup)


def accepted_drafts(drafted: Sequence[DraftedToken], tokens: Sequence[int]) -> list[int]:
    """The indices of the drafts that `tokens` begin with, along one path from the root."""
    accepted: list[int] = []
    for token_id in tokens:
        found = _child(drafted, accepted[-1] if accepted else -1, token_id)
        if found is None:
            break
        accepted.append(found)
    return accepted


def _child(drafted: Sequence[DraftedToken], root: int, token_id: int) -> int | None:
    """The draft that follows `root` with this token."""
    if drafted[0].parent is None:
        index = root + 1
        return index if index < len(drafted) and drafted[index].token_id == token_id else None
    found = (i for i, draft in enumerate(drafted) if draft.parent == root and draft.token_id == token_id)
    return next(found, None)


def fault_of(job: DraftJob, draft: Draft, vocab_size: int) -> str | None:
    """What is wrong with an answer, in a few words; None if it can be put on a tape."""
    num_tokens = len(draft.token_ids)
    if num_tokens > job.num_wanted:
        return f"{num_tokens} tokens where {job.num_wanted} were wanted"
    wrong = [t for t in draft.token_ids if not (isinstance(t, int) and 0 <= t < vocab_size)]
    if wrong:
        return f"token id {wrong[0]} is outside the vocabulary [0, {vocab_size})"
    if draft.parents is None:
        if num_tokens and (draft.first, draft.epoch) != (job.next_position, job.epoch):
            return f"drafts for position {draft.first} where {job.next_position} comes next"
    elif len(draft.parents) != num_tokens or any(not -1 <= p < i for i, p in enumerate(draft.parents)):
        return "drafts that are no tree"
    if draft.probs and len(draft.probs) != num_tokens:
        return f"{len(draft.probs)} distributions for {num_tokens} tokens"
    return None
