"""Turns: work for a thread that is done one call at a time, the shortest of those that wait first."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from itertools import count
from typing import TypeVar

T = TypeVar("T")


class Turns:
    """Runs calls that keep the interpreter busy: two at once would keep the event loop from it twice as long.

    Loop thread only.
    """

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._arrivals = count()

    async def run(self, call: Callable[[], T], cost: int) -> T:
        """What `call` gives or raises; among those that wait the least `cost` goes first, then the oldest.

        Cancelled, it ends when the call has: nothing runs beside the next one.
        """
        await self._take(cost)
        try:
            running = asyncio.get_running_loop().run_in_executor(None, call)
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                await asyncio.wait({running})
                raise
        finally:
            self._pass_on()

    async def _take(self, cost: int) -> None:
        if not self._is_taken:
            self._is_taken = True
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (cost, next(self._arrivals), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was given to us all the same
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            turn = heapq.heappop(self._waiting)[2]
            if not turn.done():
                turn.set_result(None)
                return
        self._is_taken = False
