"""How many connections may be open, and what the next one gets."""

from __future__ import annotations

import enum
import logging

log = logging.getLogger("slipstream.server")

try:
    import resource
except ImportError:  # Windows, which has no such limit
    resource = None  # type: ignore[assignment]

LOBBY = 32  # connections over the cap that still get an answer: that it is full, or the server's health
_OTHER_FILES = 96  # all that is not a served connection: the lobby, the model's files, logs, pipes


class Seat(enum.Enum):
    """What a new connection gets: service, one reply that says the server is full, or nothing."""

    SERVED = enum.auto()
    LOBBY = enum.auto()
    NONE = enum.auto()


class ConnectionGate:
    """Gives each new connection its seat, and says in the log, once each time, that the seats are taken."""

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self._warned = False

    def seat(self, num_open: int) -> Seat:
        """The seat of a connection that came when `num_open` others were open, the lobby included."""
        if num_open < self.max_connections:
            self._warned = self._warned and num_open > self.max_connections // 2
            return Seat.SERVED
        if not self._warned:
            self._warned = True
            log.warning("%d connections are open, the limit: more are refused", self.max_connections)
        return Seat.LOBBY if num_open < self.max_connections + LOBBY else Seat.NONE


def room_for(max_connections: int) -> int:
    """How many of so many connections the process may hold open, with files to spare for everything else.

    Raises the process's own limit on open files as far as that is needed and allowed.
    """
    if resource is None:
        return max_connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max_connections + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return max_connections
    limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if limit > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    room = max(1, limit - _OTHER_FILES, limit // 2 - LOBBY)
    if room < max_connections:
        log.warning("%d connections can be open, not %d: see 'ulimit -n'", room, max_connections)
    return min(room, max_connections)
