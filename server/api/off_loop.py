"""off_loop: work on a request that was read, on the event loop only where it is soon done."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from server.http.context import ServerContext

T = TypeVar("T")

_SMALL_BYTES = 262_144  # of memory: as much is gone through in a few milliseconds


async def off_loop(context: ServerContext, num_bytes: int, call: Callable[[], T]) -> T:
    """What `call` makes of a request that holds so many bytes; of many, in the thread for large bodies."""
    if num_bytes <= _SMALL_BYTES:
        return call()
    return await context.large_bodies.run(call, num_bytes)
