"""UploadPace: large bodies are read a piece in each turn of the event loop, the tenants in turn.

UploadRoom: how much of them one tenant may send at a time; the others of its clients wait.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from contextlib import suppress

from server.http.errors import OVERLOADED, ApiError, ErrorReply


class UploadPace:
    """Keeps those who upload from having the event loop to themselves, however many. Loop thread only.

    Who waits here reads nothing: what its client sends stays in the kernel, and the client waits as well.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[str | None, deque[asyncio.Future[None]]] = OrderedDict()

    async def turn(self, tenant: str | None) -> None:
        """Return when one more piece may be read."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._next, loop)
        self._waiting.setdefault(tenant, deque()).append(turn)
        await turn

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let the first tenant's oldest go on; who has gone away meanwhile takes no time."""
        while self._waiting:
            tenant, turns = next(iter(self._waiting.items()))
            turn = turns.popleft()
            self._waiting.move_to_end(tenant)
            if not turns:
                del self._waiting[tenant]
            if not turn.done():
                turn.set_result(None)
                break
        if self._waiting:
            loop.call_soon(self._next, loop)


class UploadRoom:
    """Lets a tenant's large bodies in one after another: until one is read and parsed, it takes room.

    Who waits sends no more than the kernel takes, so that a crowd costs neither time nor memory meanwhile.
    Without tenants nobody waits: a slow client would keep out strangers. Loop thread only.
    """

    def __init__(self, num_bytes: int, max_waiting: int) -> None:
        """For each tenant, as announced by its clients; no more of whose bodies wait."""
        self._num_bytes = num_bytes
        self._max_waiting = max_waiting
        self._taken: Counter[str] = Counter()
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}

    async def enter(self, tenant: str, size: int) -> None:
        """Return once there is room; `leave` gives it back. One alone gets in whatever its size.

        Raises ApiError, a 503, when too many wait.
        """
        if tenant not in self._waiting and self._has_room(tenant, size):
            self._taken[tenant] += size
            return
        waiting = self._waiting.setdefault(tenant, deque())
        if len(waiting) >= self._max_waiting:
            message = f"{len(waiting)} large bodies of one tenant wait to be read, the limit."
            retry = {"retry-after": "1"}
            raise ApiError(ErrorReply(503, OVERLOADED, message, code="queue_full", headers=retry))
        entered = asyncio.get_running_loop().create_future()
        waiting.append((size, entered))
        try:
            await entered
        except asyncio.CancelledError:
            if entered.done() and not entered.cancelled():  # there was room all the same
                self.leave(tenant, size)
            else:
                with suppress(ValueError):
                    waiting.remove((size, entered))
                self._let_in(tenant)
            raise

    def leave(self, tenant: str, size: int) -> None:
        """The body is parsed, or its request has ended."""
        self._taken[tenant] -= size
        if not self._taken[tenant]:
            del self._taken[tenant]
        self._let_in(tenant)

    def _has_room(self, tenant: str, size: int) -> bool:
        return not self._taken[tenant] or self._taken[tenant] + size <= self._num_bytes

    def _let_in(self, tenant: str) -> None:
        """The oldest of those that wait, as long as there is room; those that have gone are forgotten."""
        waiting = self._waiting.get(tenant, deque())
        while waiting and (waiting[0][1].done() or self._has_room(tenant, waiting[0][0])):
            size, entered = waiting.popleft()
            if not entered.done():
                self._taken[tenant] += size
                entered.set_result(None)
        if not waiting:
            self._waiting.pop(tenant, None)
