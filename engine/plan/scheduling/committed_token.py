"""CommittedToken: what a step gave one request."""

from __future__ import annotations

from typing import NamedTuple

from engine.plan.request import FinishReason, Request
from engine.plan.step_records import NO_TOKEN, SampledRows


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
