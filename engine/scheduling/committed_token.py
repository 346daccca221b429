"""CommittedToken: what a step gave one request."""

from __future__ import annotations

from typing import NamedTuple

from engine.request import FinishReason, Request


class CommittedToken(NamedTuple):
    """One sampled row after its commit. `error` is set, and the token meaningless, when that row failed."""

    request: Request
    token_id: int
    row: int
    finish_reason: FinishReason | None
    error: str | None
