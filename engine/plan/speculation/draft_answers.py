"""read_answers: the part of a micro-step's result that can be used. A drafter may be wrong in any way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from engine.plan.speculation.drafter import Draft, DraftJob, DraftResult


@dataclass(slots=True)
class DraftAnswers:
    """The answers that fit their jobs, and the jobs whose answers do not; a job without one got no drafts.

    `fault` says what is wrong with one of the unfit answers, None if all fit; `num_unfit_tokens` counts the
    tokens of the unfit ones.
    """

    seconds: float
    fitting: list[tuple[DraftJob, Draft]] = field(default_factory=list)
    unfit: list[DraftJob] = field(default_factory=list)
    fault: str | None = None
    num_unfit_tokens: int = 0

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
    """What is wrong with an answer, in a few words; None if it may be put on a tape. Never raises.

    The values in `probs` are not checked here.
    """
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
    return None if parents is None else _fault_of_tree(job, parents, len(token_ids))


def _fault_of_tree(job: DraftJob, parents: tuple[int, ...], num_tokens: int) -> str | None:
    if len(parents) != num_tokens or not all(-1 <= p < i for i, p in enumerate(parents)):
        return "drafts that are no tree"
    has_drafts_before = job.num_committed < job.next_position
    return "a tree behind other drafts" if num_tokens and has_drafts_before else None


_FIELD_TYPES = (int, int, tuple, tuple, bool, str)


def _has_right_types(draft: Draft) -> bool:
    fields = (draft.epoch, draft.first, draft.token_ids, draft.probs, draft.is_behind, draft.method)
    if tuple(map(type, fields)) != _FIELD_TYPES or not _are_ints(draft.token_ids):
        return False
    return draft.parents is None or (type(draft.parents) is tuple and _are_ints(draft.parents))


def _are_ints(values: tuple[object, ...]) -> bool:
    return all(type(value) is int for value in values)
