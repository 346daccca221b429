"""A drafter that is told what requests will say, and is right for one to five tokens at a time."""

from __future__ import annotations

from collections.abc import Sequence

from engine.plan.speculation.drafter import Draft, DraftJob, DraftResult


class HalfRight:
    """Drafts what it is told that requests will say, and something else after one to five tokens."""

    method, is_cheap, is_stepwise, reads_features = "ngram", True, False, False

    def __init__(self, spoken: dict[str, list[int]]) -> None:
        self.spoken = spoken

    def draft(self, jobs: Sequence[DraftJob]) -> DraftResult:
        """See Drafter."""
        drafts = []
        for job in jobs:
            first = job.next_position
            tokens = self.spoken[job.request.request_id][first : first + job.num_wanted]
            tokens[1 + first % 5 :] = [7] * len(tokens[1 + first % 5 :])
            drafts.append(Draft(job.request.request_id, job.epoch, first, tuple(tokens)))
        return DraftResult(tuple(drafts), 0.0)

    def close(self, request_ids: Sequence[str]) -> None:
        """See Drafter."""
