"""BodyRoom: how much memory all requests together may take beside the engine's; Lease: one's part of it."""

from __future__ import annotations

from contextlib import ExitStack

from starlette.types import Scope

from server.http.errors import OVERLOADED, ApiError, ErrorReply
from server.http.json_body import MAX_PARTS, MAX_VALUES

FREE_BYTES = 64 * 1024  # of each request: an ordinary one gets in however many large ones are there
MAX_BODIES = 32  # of the largest size that may be held at once
LEAST_BYTES = 256 * 2**20  # of all, however small a body may be: what is made of one takes more than it

_KEY = "slipstream.lease"

# What is made of a body: a list, object or key, any other value, a character of text that is not all ASCII.
_PART_BYTES, _VALUE_BYTES, _WIDE_CHAR_BYTES = 250, 48, 4


class BodyRoom:
    """Counts the bytes that requests hold beyond their first `FREE_BYTES`. Event-loop thread only."""

    def __init__(self, max_body_bytes: int) -> None:
        self.limit = max(LEAST_BYTES, MAX_BODIES * max_body_bytes)
        self.num_taken = 0

    def grow(self, size: int, new_size: int) -> None:
        """Let a request that holds `size` bytes hold `new_size`; 0 gives everything back.

        Raises ApiError, a 503, when there is no room; what the request had is still taken then.
        """
        more = max(0, new_size - FREE_BYTES) - max(0, size - FREE_BYTES)
        if more > 0 and self.num_taken + more > self.limit:
            message = f"Requests hold {self.num_taken} bytes and this one needs {more}; the limit of all is "
            message += f"{self.limit}."
            retry = {"retry-after": "1"}
            raise ApiError(ErrorReply(503, OVERLOADED, message, code="queue_full", headers=retry))
        self.num_taken += more


class Lease:
    """What one request holds of the room, from the first byte of its body to the last of its reply.

    Code that keeps more or less of a request than before reports that here, and closes `upload` once the body
    is parsed. Event-loop thread only.
    """

    def __init__(self, room: BodyRoom) -> None:
        self._room = room
        self.num_bytes = 0
        self.upload = ExitStack()

    def hold(self, num_bytes: int) -> None:
        """All together it is `num_bytes` from here on. Raises ApiError, a 503, when there is no room."""
        self._room.grow(self.num_bytes, num_bytes)
        self.num_bytes = num_bytes

    def release(self) -> None:
        """Nothing is held any more. Safe to call twice."""
        self.upload.close()
        self.hold(0)


def give_lease(scope: Scope, room: BodyRoom) -> Lease:
    """A lease for the request of `scope`, to be found there."""
    lease = scope[_KEY] = Lease(room)
    return lease


def lease_of(scope: Scope) -> Lease:
    """The request's lease."""
    lease = scope[_KEY]
    assert isinstance(lease, Lease)
    return lease


def parsed_bytes(body: bytes | bytearray) -> int:
    """About the memory that a JSON body takes once it has been read, at most; the text itself not counted."""
    num_parts = min(MAX_PARTS, sum(map(body.count, (b"[", b"{", b":"))))  # beyond, nothing is read
    num_values = min(MAX_VALUES, body.count(b","))
    is_wide = not body.isascii() or b"\\u" in body
    text_bytes = len(body) * (_WIDE_CHAR_BYTES if is_wide else 1)
    return text_bytes + num_parts * _PART_BYTES + num_values * _VALUE_BYTES
