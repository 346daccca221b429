"""EndedRequest: what is known of one HTTP request at its end, for the log and for traces.

Holds no text of a prompt or a reply that is ever shown: ids, counts, times and reasons are taken from it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from engine import Finish, FinishReason
from server.api.generation import Accepted
from server.http.context import Exchange
from server.http.errors import error_reply

_FAILURES = (FinishReason.ERROR, FinishReason.DEADLINE)
_TRACE_PARENT = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """One answered HTTP request.

    `accepted` is None for what was refused, and on every other route. `route` is a template. `ended_ns` is
    Unix time, `seconds` its whole life. `error` names the error that came in place of a reply.
    """

    exchange: Exchange
    accepted: Accepted | None
    headers: Sequence[tuple[bytes, bytes]]
    route: str
    status: int
    ended_ns: int
    seconds: float
    error: str | None = None

    @property
    def finishes(self) -> list[Finish]:
        """How the choices ended, as far as that is known."""
        if self.accepted is None:
            return []
        return [choice.finish for choice in self.accepted.generation.choices if choice.finish is not None]

    @property
    def finish_reasons(self) -> list[str]:
        """The reason of each choice, in order; "abort" where the client left before it."""
        if self.accepted is None:
            return []
        ends = [choice.finish for choice in self.accepted.generation.choices]
        return ["abort" if end is None else end.reason.value for end in ends]

    @property
    def fault(self) -> str | None:
        """A short name for what went wrong, whether the client was told before its reply began or within."""
        if self.error is not None:
            return self.error
        for finish in self.finishes:
            if finish.error is not None:
                return error_reply(finish.error).name
        return None

    @property
    def is_failure(self) -> bool:
        """True when the server did not give what was asked: not for what a client did wrong, or gave up."""
        return self.status >= 500 or any(finish.reason in _FAILURES for finish in self.finishes)

    @property
    def caller_trace_id(self) -> str | None:
        """The trace that the caller says this request is part of, by its `traceparent`."""
        for name, value in self.headers:
            if name == b"traceparent":
                found = _TRACE_PARENT.fullmatch(value)
                return None if found is None else found[1].decode("ascii")
        return None
