"""Peer: what a connection learns of the client behind a request and ASGI has no words for."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import Scope

from server.http.errors import ApiError, ErrorReply

_KEY = "slipstream.peer"


@dataclass(slots=True)
class Peer:
    """One request's client. Written by its connection, read by the application; event-loop thread only.

    `fault` is the only answer the request may get, None for one like any other. `stalled` says that its
    connection was dropped because the client read nothing for too long.
    """

    fault: ErrorReply | None = None
    stalled: bool = False

    def check(self) -> None:
        """Raise the fault, if there is one, as an ApiError."""
        if self.fault is not None:
            raise ApiError(self.fault)


def introduce(scope: Scope) -> Peer:
    """A peer for a request that begins, to be found in its scope."""
    peer = scope[_KEY] = Peer()
    return peer


def peer_of(scope: Scope) -> Peer:
    """The request's peer; one without a fault when the server in front knows nothing of them."""
    peer = scope.get(_KEY)
    return peer if isinstance(peer, Peer) else Peer()
