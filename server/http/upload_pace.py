"""UploadPace: large bodies are read a piece in each turn of the event loop, the tenants in turn."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque


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
