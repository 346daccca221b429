"""A drafter that knows the fake model, is right as often as it is told to be, and can misbehave on demand.

It keeps each sequence as the messages tell it, so that a message that tells too little, or of a wrong place,
gives wrong drafts where right ones were due.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from engine.plan.speculation.drafter import Draft, DraftJob, DraftResult
from tests.support.fakes import VOCAB_SIZE, next_token


@dataclass
class FakeDrafter:
    """Draws each draft right with chance `alpha`, by a hash of the prefix, so that time plays no part.

    `step_s` is what a micro-step is said to take. `before(jobs)` may raise or block. `spoil(job, draft)` may
    replace an answer, and `mangle(result)` all of them. `tree` is how many siblings the first draft of an
    answer has. Of what is known `reads` tokens are read in one turn. `touched` counts the micro-steps that
    had a job for a request.
    """

    method: str = "draft_model"
    alpha: float = 0.8
    is_cheap: bool = False
    is_stepwise: bool = True
    reads_features: bool = False
    step_s: float = 0.0
    reads: int = 10_000
    tree: int = 0
    is_shy: bool = False  # now and then it has nothing to say
    before: Callable[[Sequence[DraftJob]], object] | None = None
    before_close: Callable[[Sequence[str]], object] | None = None
    spoil: Callable[[DraftJob, Draft], Draft] | None = None
    mangle: Callable[[DraftResult], object] | None = None
    known: dict[str, list[int]] = field(default_factory=dict)
    num_read: dict[str, int] = field(default_factory=dict)
    num_calls: int = 0
    num_drafted: int = 0
    touched: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)  # of the protocol: jobs that cannot be
    closed: list[str] = field(default_factory=list)

    def draft(self, jobs: Sequence[DraftJob]) -> DraftResult:
        """See Drafter."""
        self.num_calls += 1
        self.touched.update(job.request.request_id for job in jobs)
        if self.before is not None:
            self.before(jobs)
        try:
            assert len({job.request.request_id for job in jobs}) == len(jobs), "two jobs for one request"
            drafts = [self._answer(job) for job in jobs]
        except AssertionError as violation:
            self.violations.append(str(violation))
            raise
        if self.spoil is not None:
            drafts = [self._spoil(job, draft) for job, draft in zip(jobs, drafts, strict=True)]
        result = DraftResult(tuple(drafts), self.step_s)
        return result if self.mangle is None else cast(DraftResult, self.mangle(result))

    def close(self, request_ids: Sequence[str]) -> None:
        """See Drafter."""
        if self.before_close is not None:
            self.before_close(request_ids)
        for request_id in request_ids:
            self.known.pop(request_id, None)
            self.num_read.pop(request_id, None)
            self.closed.append(request_id)

    def _spoil(self, job: DraftJob, draft: Draft) -> Draft:
        """Another answer; what it says counts as known."""
        assert self.spoil is not None
        spoilt = self.spoil(job, draft)
        if spoilt is not draft and isinstance(spoilt, Draft) and isinstance(spoilt.token_ids, tuple):
            self.known[job.request.request_id][job.next_position :] = spoilt.token_ids
        return spoilt

    def _answer(self, job: DraftJob) -> Draft:
        request_id = job.request.request_id
        known = self.known.setdefault(request_id, [])
        assert job.first <= len(known), f"told of position {job.first}, knows {len(known)}"
        assert job.num_wanted >= 1
        del known[job.first :]
        known += job.token_ids
        assert job.num_committed <= len(known)
        nothing = Draft(request_id, job.epoch, len(known), ())
        read = min(self.num_read.get(request_id, 0), job.first) + self.reads
        self.num_read[request_id] = read
        if read < len(known):
            return Draft(request_id, job.epoch, len(known), (), is_behind=True)
        if self.is_shy and next_token(known, 5) % 5 == 0:
            return nothing
        tokens = self._chain(job, known)
        self.num_drafted += len(tokens)
        first = len(known)
        if self.tree:
            return self._with_siblings(job, first, tokens)
        known += tokens
        return Draft(request_id, job.epoch, first, tuple(tokens))

    def _chain(self, job: DraftJob, known: Sequence[int]) -> list[int]:
        sampling = job.request.sampling
        seed = sampling.seed if sampling.temperature else 0
        prefix = list(known)
        count = 1 if self.is_stepwise and not self.tree else job.num_wanted
        for _ in range(count):
            right = next_token(prefix, seed)
            is_right = random.Random(hash((tuple(prefix), seed))).random() < self.alpha
            prefix.append(right if is_right else (right + 1) % VOCAB_SIZE)
        return prefix[len(known) :]

    def _with_siblings(self, job: DraftJob, first: int, tokens: list[int]) -> Draft:
        """Wrong siblings before the first draft, within what is wanted."""
        siblings = [(tokens[0] + 7 + i) % VOCAB_SIZE for i in range(min(self.tree, job.num_wanted - 1))]
        chain = tokens[: job.num_wanted - len(siblings)]
        parents = [-1] * len(siblings)
        for i in range(len(chain)):
            parents.append(-1 if i == 0 else len(siblings) + i - 1)
        return Draft(job.request.request_id, job.epoch, first, (*siblings, *chain), tuple(parents))
