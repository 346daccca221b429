"""Drafter: the protocol of every draft source, and its messages, which are frozen to cross threads.

A drafter gets the known tokens by messages, and may be wrong, late or gone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol, runtime_checkable

from engine.plan.request import SamplingParams
from engine.plan.step_records import FeatureRows


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What a drafter may know of a request beside its tokens; it never changes."""

    request_id: str
    num_prompt_tokens: int
    sampling: SamplingParams
    stop_token_ids: frozenset[int] = frozenset()  # with EOS unless it is ignored
    prediction: tuple[int, ...] = ()  # the client's guess of the output


@dataclass(frozen=True, slots=True)
class TargetFeatures:
    """What the target left at verified positions; from the last of them the token at `position` was drawn."""

    position: int
    hidden: FeatureRows

    @property
    def first(self) -> int:
        """The position of the first row."""
        return self.position - len(self.hidden)


@dataclass(frozen=True, slots=True)
class DraftJob:
    """Continue one sequence by up to `num_wanted` tokens (0: only take the known ones).

    The sequence is what the drafter holds of it before position `first`, then `token_ids`. Its first
    `num_committed` tokens are final; the others are drafts, which a later job may replace. A drafter holds
    what it answered, so a job that agrees with the last answer repeats nothing of it. `features` are
    those that a drafter which reads them was not given yet, oldest first; the newest final token's are last.
    Where it was given all of them, it gets the last again. Unless it `may_branch`, the answer must be a
    chain: a later job goes on behind it while it is verified. Of a sequence that `is_quiet` the drafter has
    long had nothing of use: it should take little trouble. Drafts of less than `least_chance`, by the
    drafter's own account, with all before them, are not worth making. At the first `num_lanes` positions
    behind the final tokens it may draft for another outcome, too; see Lane.
    """

    request: DraftRequest
    epoch: int
    first: int
    token_ids: tuple[int, ...]
    num_committed: int
    num_wanted: int
    features: tuple[TargetFeatures, ...] = ()
    may_branch: bool = True
    is_quiet: bool = False
    least_chance: float = 0.0
    num_lanes: int = 0

    @property
    def next_position(self) -> int:
        """The position of the first drafted token."""
        return self.first + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Lane:
    """The token that may come at `position` in place of the draft there, and drafts behind it."""

    position: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """A drafter's answer to one job: tokens for the positions from `first` on, none if it has no draft.

    With `parents` the drafts form a tree: entry i is the index, below i, of the draft that draft i follows,
    or -1 for the known tokens. `chances` are how likely the drafter thinks each is to come where the one
    before it did; what they are worth is found by what comes of them. `lanes` are all that there are by now
    for what is being verified.
    """

    request_id: str
    epoch: int
    first: int
    token_ids: tuple[int, ...]
    parents: tuple[int, ...] | None = None  # None is a chain
    probs: tuple[object, ...] = ()  # float32 [vocab], each one's distribution; empty: each was certain
    is_behind: bool = False  # it asks for another turn, to read more known tokens first
    method: str = ""  # the source inside the drafter; "" is the drafter's own
    chances: tuple[float, ...] = field(default=(), compare=False)  # in [0, 1]; empty: it does not say
    lanes: tuple[Lane, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftResult:
    """The answers of one micro-step and the seconds it took."""

    drafts: tuple[Draft, ...]
    draft_s: float


@dataclass(frozen=True, slots=True)
class UnreadChains:
    """Chains of a micro-step that are on their way through the device; its answers will hold them.

    `places` are where each request's drafts lie among the `tokens`; one without any gets none.
    """

    tokens: object
    places: Mapping[str, tuple[int, ...]]


class Drafter(Protocol):
    """A draft source for many sequences. Its methods are called one at a time, by one thread at a time.

    `method` labels it in the metrics. With `is_cheap` a call takes microseconds and may run on the event
    loop. With `is_stepwise` a job gives one token, or one tree. With `reads_features` jobs carry them, and
    unless it is stepwise it goes on behind its own chain while that is verified.
    """

    method: str
    is_cheap: bool
    is_stepwise: bool
    reads_features: bool

    def draft(self, jobs: Sequence[DraftJob]) -> DraftResult:
        """Run one micro-step for all jobs, at most one a request. May raise, which costs speed only."""

    def close(self, request_ids: Sequence[str]) -> None:
        """Forget these sequences and free their memory; unknown ones are passed over."""


@runtime_checkable
class TellingDrafter(Protocol):
    """A Drafter whose drafts a step on the same device may verify before the host has read them."""

    def draft_and_tell(self, jobs: Sequence[DraftJob], tell: Callable[[UnreadChains], None]) -> DraftResult:
        """As `draft`; once all drafts of the micro-step are on their way, `tell` may be called with them."""
        ...


@dataclass(slots=True)
class DraftAnswers:
    """The answers that fit their jobs, and the jobs whose answers do not; a job without one got no drafts."""

    seconds: float
    fitting: list[tuple[DraftJob, Draft]] = field(default_factory=list)
    unfit: list[DraftJob] = field(default_factory=list)
    fault: str | None = None  # what is wrong with one of the unfit answers
    num_unfit_tokens: int = 0  # in the unfit ones

    def refuse(self, draft: Draft, fault: str) -> None:
        """Count an answer that cannot be used."""
        self.fault = fault
        if type(draft.token_ids) is tuple:
            self.num_unfit_tokens += len(draft.token_ids)


def read_answers(jobs: Sequence[DraftJob], result: DraftResult, vocab_size: int) -> DraftAnswers:
    """Sort the answers. Raises ValueError, and nothing else, if the result is no DraftResult of Drafts.

    Types must match exactly, so that no code of a drafter's own types runs here or later.
    """
    if type(result) is not DraftResult or type(result.drafts) is not tuple:
        raise ValueError(f"a micro-step gave a {type(result).__name__}, which is no result")
    if type(result.draft_s) not in (float, int) or not 0 <= result.draft_s < inf:
        raise ValueError("a micro-step took no number of seconds")
    answers = DraftAnswers(float(result.draft_s))
    given: dict[str, Draft] = {}
    for draft in result.drafts:
        if type(draft) is not Draft or type(draft.request_id) is not str:
            raise ValueError(f"an answer is a {type(draft).__name__}, for no request")
        given[draft.request_id] = draft
    for job in jobs:
        request_id = job.request.request_id
        found = given.pop(request_id, None) or Draft(request_id, job.epoch, job.next_position, ())
        fault = fault_of(job, found, vocab_size)
        if fault is None:
            answers.fitting.append((job, found))
        else:
            answers.unfit.append(job)
            answers.refuse(found, fault)
    for stray in given.values():
        answers.refuse(stray, f"an answer for {stray.request_id}, which was not asked about")
    return answers


def fault_of(job: DraftJob, draft: Draft, vocab_size: int) -> str | None:
    """What is wrong with an answer, but for the values in `probs`; None if it is usable. Never raises."""
    token_ids, parents = draft.token_ids, draft.parents
    if not _has_right_types(draft):
        return "an answer with fields of other types"
    if (draft.first, draft.epoch) != (job.next_position, job.epoch):
        return f"drafts for position {draft.first} where {job.next_position} comes next"
    if len(token_ids) > job.num_wanted:
        return f"{len(token_ids)} tokens where {job.num_wanted} were wanted"
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            return f"token id {token_id} is outside the vocabulary [0, {vocab_size})"
    if draft.probs and len(draft.probs) != len(token_ids):
        return f"{len(draft.probs)} distributions for {len(token_ids)} tokens"
    if draft.chances and not (
        len(draft.chances) == len(token_ids) and all(0 <= c <= 1 for c in draft.chances)
    ):
        return f"{len(draft.chances)} chances from 0 to 1 expected for {len(token_ids)} tokens"
    if draft.lanes and (fault := _fault_of_lanes(job, draft.lanes, vocab_size)) is not None:
        return fault
    return None if parents is None else _fault_of_tree(job, parents, len(token_ids))


def _fault_of_lanes(job: DraftJob, lanes: Sequence[Lane], vocab_size: int) -> str | None:
    for lane in lanes:
        if not 0 <= lane.position - job.num_committed < job.num_lanes:
            return f"a lane at position {lane.position}, where none was wanted"
        if not all(0 <= token_id < vocab_size for token_id in lane.token_ids):
            return f"a lane with token ids outside the vocabulary [0, {vocab_size})"
    return None


def _fault_of_tree(job: DraftJob, parents: tuple[int, ...], num_tokens: int) -> str | None:
    if len(parents) != num_tokens or not all(-1 <= p < i for i, p in enumerate(parents)):
        return "drafts that are no tree"
    has_drafts_before = job.num_committed < job.next_position
    return "a tree behind other drafts" if num_tokens and has_drafts_before else None


_FIELD_TYPES = (int, int, tuple, tuple, tuple, bool, str)


def _has_right_types(draft: Draft) -> bool:
    numbers, tuples = (draft.epoch, draft.first), (draft.token_ids, draft.probs, draft.chances)
    types = tuple(map(type, (*numbers, *tuples, draft.is_behind, draft.method)))
    if types != _FIELD_TYPES or not _are_ints(draft.token_ids):
        return False
    if not all(type(chance) is float for chance in draft.chances):
        return False
    if type(draft.lanes) is not tuple or not all(map(_is_lane, draft.lanes)):
        return False
    return draft.parents is None or (type(draft.parents) is tuple and _are_ints(draft.parents))


def _is_lane(lane: object) -> bool:
    if type(lane) is not Lane or type(lane.position) is not int or type(lane.token_ids) is not tuple:
        return False
    return bool(lane.token_ids) and _are_ints(lane.token_ids)


def _are_ints(values: tuple[object, ...]) -> bool:
    return all(type(value) is int for value in values)
