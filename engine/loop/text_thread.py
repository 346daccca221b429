"""TextThread: work on text that would hold up the event loop, each tenant's in its turn."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Executor
from contextvars import copy_context
from typing import TypeVar

from engine.errors import EngineError, RequestFailed, frames_of
from engine.plan.metrics.batch_metrics import BatchMetrics

log = logging.getLogger("slipstream.engine")
T = TypeVar("T")
Tenant = str | None


class TextThread:
    """Runs calls in `executor`, each in the context of the task that asks for it. Loop thread only.

    `num_workers` is how many the executor runs at a time. Tenants have turns, and none may have all workers
    to itself where there are several, however many calls it has waiting and however long they take.
    """

    def __init__(self, executor: Executor, metrics: BatchMetrics, num_workers: int = 1) -> None:
        self._executor = executor
        self._metrics = metrics
        self._turns = TenantTurns(num_workers)

    async def run(self, call: Callable[[], T], stage: str, tenant: Tenant = None) -> T:
        """What `call` gives. Raises its EngineErrors; any other error is counted and a RequestFailed.

        So is a panic of a library in Rust, which is no Exception. A call that was cancelled before its turn
        is never made; one that has begun keeps its worker to its end.
        """
        await self._turns.take(tenant)
        try:
            return await asyncio.shield(self._begin(call, tenant))
        except (EngineError, asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            log.error("the %s failed on the text of a request", stage, extra=frames_of(error))
            self._metrics.count_error(stage)
            raise RequestFailed(f"the {stage} failed ({type(error).__name__})", stage) from error

    def close(self) -> None:
        """Cancel what waits for its turn. The executor takes no more."""
        self._turns.close()

    def _begin(self, call: Callable[[], T], tenant: Tenant) -> asyncio.Future[T]:
        def release_worker(done: asyncio.Future[T]) -> None:
            self._turns.give_back(tenant)
            if not done.cancelled():
                done.exception()  # retrieved here because the caller may have gone

        try:
            begun = asyncio.get_running_loop().run_in_executor(self._executor, copy_context().run, call)
        except BaseException:
            self._turns.give_back(tenant)
            raise
        begun.add_done_callback(release_worker)
        return begun


class TenantTurns:
    """Who of those that wait gets the next free worker: the tenants in turn, of each its oldest call.

    A tenant gets all workers but one, and where there is only one, that. Loop thread only.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_free = num_workers
        self._most = max(1, num_workers - 1)
        self._busy: Counter[Tenant] = Counter()
        self._waiting: OrderedDict[Tenant, deque[asyncio.Future[None]]] = OrderedDict()

    async def take(self, tenant: Tenant) -> None:
        """Return when a worker is `tenant`'s. Cancelling the wait gives up the place in the queue."""
        if self._may_begin(tenant):
            self._begin(tenant)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._leave(tenant, turn)
            else:  # it was told to go on just before
                self.give_back(tenant)
            raise

    def give_back(self, tenant: Tenant) -> None:
        """A worker of the tenant's is free. The next that waits gets it."""
        self._num_free += 1
        self._busy[tenant] -= 1
        if not self._busy[tenant]:
            del self._busy[tenant]
        self._pass_on()

    def close(self) -> None:
        """Cancel all who wait."""
        for turns in self._waiting.values():
            for turn in turns:
                turn.cancel()
        self._waiting.clear()

    def _may_begin(self, tenant: Tenant) -> bool:
        return self._num_free > 0 and self._busy[tenant] < self._most

    def _begin(self, tenant: Tenant) -> None:
        self._num_free -= 1
        self._busy[tenant] += 1

    def _pass_on(self) -> None:
        """Give what is free to those whose turn it is. Passes over no more tenants than there are workers."""
        while self._num_free:
            tenant, turns = next(filter(self._is_next, self._waiting.items()), (None, None))
            if turns is None:
                return
            turn = turns.popleft()
            self._waiting.move_to_end(tenant)
            if not turns:
                del self._waiting[tenant]
            if not turn.done():  # else it was cancelled, and does not know it yet
                self._begin(tenant)
                turn.set_result(None)

    def _is_next(self, waiting: tuple[Tenant, deque[asyncio.Future[None]]]) -> bool:
        return self._may_begin(waiting[0])

    def _leave(self, tenant: Tenant, turn: asyncio.Future[None]) -> None:
        """Forget a turn that was cancelled."""
        turns = self._waiting.get(tenant, deque())
        if turn in turns:
            turns.remove(turn)
            if not turns:
                del self._waiting[tenant]
