"""How long a request may take: the caller's deadline, in the body or a header, and the server's own limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from pydantic import TypeAdapter, ValidationError

from engine import DeadlineExceeded, Engine
from server.api.openai.protocol_values import MAX_WHOLE, Milliseconds
from server.http.errors import invalid

DEADLINE_HEADER = "x-request-deadline-ms"
_MILLISECONDS: TypeAdapter[float] = TypeAdapter(Milliseconds)


def deadline_header(headers: Mapping[str, str]) -> float | None:
    """The header twin of `deadline_ms`, None when it was not sent. Raises ApiError (400)."""
    text = headers.get(DEADLINE_HEADER)
    if text is None:
        return None
    try:
        if text.isascii() and "_" not in text:
            return _MILLISECONDS.validate_python(float(text))
    except (ValueError, ValidationError):
        pass
    raise invalid(
        f"The header '{DEADLINE_HEADER}' must be a number of milliseconds, above 0 and at most {MAX_WHOLE}.",
        DEADLINE_HEADER,
    )


def soonest(*limits: float | None) -> float | None:
    """The least of the limits that are set; None when none is."""
    return min((limit for limit in limits if limit is not None), default=None)


def allowed_s(deadline_ms: float | None, request_timeout_s: float) -> float | None:
    """Seconds from arrival that a request may take; None is without end. A timeout of 0 is none."""
    asked_s = None if deadline_ms is None else deadline_ms / 1000
    return soonest(asked_s, request_timeout_s or None)


@asynccontextmanager
async def prepared_by(engine: Engine, deadline: float | None, arrival_time: float) -> AsyncIterator[None]:
    """Bound the work on a request's text, before the request is submitted. `engine.now` gives both times.

    At the deadline the work is cancelled, the miss is counted and DeadlineExceeded raised. None: no limit.
    """
    try:
        async with asyncio.timeout(None if deadline is None else deadline - engine.now()) as timeout:
            yield
    except TimeoutError:
        if deadline is None or not timeout.expired():
            raise
        engine.miss_deadline()
        limit = f"{deadline - arrival_time:.3f}".rstrip("0").rstrip(".")
        raise DeadlineExceeded(
            f"The deadline, {limit} s after the request arrived, passed before its prompt was read."
        ) from None
