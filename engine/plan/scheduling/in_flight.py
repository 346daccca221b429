"""InFlightStep: a step that was decided and has no result yet, and what it gives its requests."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from engine.plan.request import FinishReason, Request
from engine.plan.scheduling.step_inputs import ScheduledItem
from engine.plan.step_records import NO_TOKEN, BatchDecision, BlockMoves, SampledRows


class CommittedToken(NamedTuple):
    """One sampled row after its commit. `error` is set, and the token meaningless, when that row failed.

    `num_tokens` is how many the request knew with it; a step may commit several of one request, in order.
    """

    request: Request
    token_id: int
    row: int
    num_tokens: int
    finish_reason: FinishReason | None
    error: str | None


def append_rows(request: Request, own: range, rows: SampledRows) -> list[CommittedToken]:
    """Append the tokens of a request's own rows, at least one or an error, up to its end or NO_TOKEN."""
    row_errors = rows.row_errors or {}
    committed: list[CommittedToken] = []
    for row in own:
        token_id, error = rows.token_ids[row], row_errors.get(row)
        if error is None and token_id == NO_TOKEN:
            break
        reason = FinishReason.ERROR if error is not None else request.append(token_id)
        committed.append(CommittedToken(request, token_id, row, len(request.token_ids), reason, error))
        if reason is not None:
            break
    return committed


@dataclass(frozen=True)
class InFlightStep:
    """One step: the order, what it computes in that order, and the blocks that it moves."""

    decision: BatchDecision
    items: list[ScheduledItem]
    moves: BlockMoves

    @cached_property
    def request_ids(self) -> frozenset[str]:
        """The requests that it computes for."""
        return frozenset(item.scheduled.request_id for item in self.items)

    @cached_property
    def rows(self) -> list[range]:
        """The rows of logits of each item; none where it does not sample."""
        counts = [(item.scheduled.num_drafts + 1) * item.scheduled.samples for item in self.items]
        return [range(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True)]

    def ended_but_good(self, drawn: SampledRows) -> set[str]:
        """The requests that a token ended before this step's result, and whose row is finite all the same.

        All their KV is good then, as it is where a row is drawn for a request that goes on.
        """
        errors = drawn.row_errors or {}
        return {
            item.request.request_id
            for item, own in zip(self.items, self.rows, strict=True)
            if item.request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
            and len(own) == 1
            and own[0] not in errors
        }
