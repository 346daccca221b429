"""BodyRoom: how much memory all bodies that are still arriving may take together."""

from __future__ import annotations

from server.http.errors import OVERLOADED, ApiError, ErrorReply

FREE_BYTES = 64 * 1024  # of each body: an ordinary request gets in however many large ones arrive
MIN_BODIES = 16  # of the largest size that may arrive at once


class BodyRoom:
    """Counts the bytes that arriving bodies hold beyond their first `FREE_BYTES`. Event-loop thread only."""

    def __init__(self, max_body_bytes: int) -> None:
        self.limit = MIN_BODIES * max_body_bytes
        self.num_taken = 0

    def grow(self, size: int, new_size: int) -> None:
        """Let a body that holds `size` bytes hold `new_size`; 0 gives everything back.

        Raises ApiError, a 503, when there is no room; what the body had is still taken then.
        """
        more = max(0, new_size - FREE_BYTES) - max(0, size - FREE_BYTES)
        if more > 0 and self.num_taken + more > self.limit:
            message = f"Request bodies that are still arriving take {self.limit} bytes, the limit."
            retry = {"retry-after": "1"}
            raise ApiError(ErrorReply(503, OVERLOADED, message, code="queue_full", headers=retry))
        self.num_taken += more
