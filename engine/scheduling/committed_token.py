"""CommittedToken: what a step gave one request."""

from __future__ import annotations

from typing import NamedTuple

from engine.request import FinishReason, Request


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
