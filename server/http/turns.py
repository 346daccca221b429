"""Turns: work for a thread that is done one call at a time, the shortest of those that wait first."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable
from itertools import count
from typing import TypeVar

T = TypeVar("T")

_RUN_S = 0.001  # of work, before it is worth giving way


class Turns:
    """Runs calls that keep the interpreter busy: two at once would keep the event loop from it twice as long.

    `give_way` waits as is due to others after so many seconds of work. Loop thread only, but for `rest`.
    """

    def __init__(self, give_way: Callable[[float], None] = lambda worked_s: None) -> None:
        self._give_way = give_way
        self._rested_s = 0.0  # of the thread that works, when it last gave way
        self._is_taken = False
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._arrivals = count()

    async def run(self, call: Callable[[], T], cost: int) -> T:
        """What `call` gives or raises; among those that wait the least `cost` goes first, then the oldest.

        Cancelled, it ends when the call has: nothing runs beside the next one.
        """
        await self._take(cost)
        try:
            running = asyncio.get_running_loop().run_in_executor(None, self._work, call)
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                await asyncio.wait({running})
                raise
        finally:
            self._pass_on()

    def rest(self) -> None:
        """For calls of `run`, between two of their steps: gives way for the work since the last time."""
        worked_s = time.thread_time() - self._rested_s
        if worked_s > _RUN_S:
            self._give_way(worked_s)
            self._rested_s = time.thread_time()

    def _work(self, call: Callable[[], T]) -> T:
        self._rested_s = time.thread_time()
        try:
            return call()
        finally:
            self.rest()

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
