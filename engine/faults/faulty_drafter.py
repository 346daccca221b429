"""FaultyDrafter: fails, lags, or answers with drafts that are wrong in some way."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from engine.faults.fault_counter import FaultCounter
from engine.plan.speculation.drafter import (
    Draft,
    Drafter,
    DraftJob,
    DraftResult,
    TellingDrafter,
    UnreadChains,
)


class FaultyDrafter:
    """A Drafter around another. A micro-step is a hit of `draft_raise` and of `draft_sleep`.

    A job that wants drafts is a hit of the other points, also where the drafter has no answer. One that may
    be told to sleep is not cheap, whatever it says.
    """

    def __init__(self, plan: FaultCounter, drafter: Drafter, vocab_size: int) -> None:
        self._plan = plan
        self._drafter = drafter
        self._vocab_size = vocab_size
        self.method = drafter.method
        self.is_cheap = drafter.is_cheap and not plan.has("draft_sleep")
        self.is_stepwise = drafter.is_stepwise
        self.reads_features = drafter.reads_features

    def draft(self, jobs: Sequence[DraftJob]) -> DraftResult:
        """See Drafter."""
        return self._draft(jobs, self._drafter.draft)

    def draft_and_tell(self, jobs: Sequence[DraftJob], tell: Callable[[UnreadChains], None]) -> DraftResult:
        """See TellingDrafter: what it tells of is right, whatever it answers. Another tells of nothing."""
        drafter = self._drafter
        if not isinstance(drafter, TellingDrafter):
            return self.draft(jobs)
        return self._draft(jobs, partial(drafter.draft_and_tell, tell=tell))

    def _draft(
        self, jobs: Sequence[DraftJob], answer: Callable[[Sequence[DraftJob]], DraftResult]
    ) -> DraftResult:
        numbers = [self._plan.number_of(job.request.request_id) for job in jobs]
        if (fault := self._plan.hit_by_all("draft_sleep", numbers)) is not None:
            time.sleep(fault.seconds)
        if self._plan.hit_by_all("draft_raise", numbers) is not None:
            raise RuntimeError("the fault plan has the drafter fail")
        result = answer(jobs)
        drafts = {draft.request_id: draft for draft in result.drafts}
        for job, number in zip(jobs, numbers, strict=True):
            if job.num_wanted > 0:
                request_id = job.request.request_id
                draft = drafts.get(request_id) or Draft(request_id, job.epoch, job.next_position, ())
                drafts[request_id] = self._spoil(job, draft, number)
        return replace(result, drafts=tuple(drafts.values()))

    def close(self, request_ids: Sequence[str]) -> None:
        """See Drafter."""
        self._drafter.close(request_ids)

    def _spoil(self, job: DraftJob, draft: Draft, number: int | None) -> Draft:
        size, wanted = self._vocab_size, job.num_wanted
        if self._plan.hit("draft_garbage", number) is not None:
            right = draft.token_ids or range(wanted)
            draft = replace(draft, token_ids=tuple((7 * token_id + 3) % size for token_id in right))
        if self._plan.hit("draft_out_of_vocab", number) is not None:
            draft = replace(draft, token_ids=(size, *draft.token_ids[1:]))
        if self._plan.hit("draft_too_many", number) is not None:
            draft = replace(draft, token_ids=(0,) * (wanted + 1), parents=None, probs=())
        return draft
