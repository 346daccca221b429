"""How long a request may take: the caller's deadline, in the body or a header, and the server's own limit."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import TypeAdapter, ValidationError

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
