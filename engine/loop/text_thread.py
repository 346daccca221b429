"""TextThread: work on text that would hold up the event loop, each tenant's in its turn."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Executor
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from engine.errors import EngineError, RequestFailed, frames_of
from engine.plan.metrics.batch_metrics import BatchMetrics

log = logging.getLogger("slipstream.engine")
T = TypeVar("T")
Tenant = str | None
_Waiting = tuple[Callable[[], Any], asyncio.Future[Any]]  # a call, and where its outcome goes


class TextThread:
    """Runs calls in `executor`, each in the context of the task that asks for it. Loop thread only.

    `num_workers` is how many the executor runs at a time. A free worker goes to the tenants in turn, of each
    to its oldest call. None gets more than all workers but one, or where there is only one, that: however
    many calls one has waiting, and however long they take, another's is next.
    """

    def __init__(self, executor: Executor, metrics: BatchMetrics, num_workers: int = 1) -> None:
        self._executor = executor
        self._metrics = metrics
        self._num_free = num_workers
        self._most = max(1, num_workers - 1)
        self._busy: Counter[Tenant] = Counter()
        self._waiting: OrderedDict[Tenant, deque[_Waiting]] = OrderedDict()

    async def run(self, call: Callable[[], T], stage: str, tenant: Tenant = None) -> T:
        """What `call` gives. Raises its EngineErrors; any other error is counted and a RequestFailed.

        So is a panic of a library in Rust, which is no Exception. A call that was cancelled before its turn
        is never made; one that has begun keeps its worker to its end.
        """
        outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        waiting = partial(copy_context().run, call), outcome
        self._waiting.setdefault(tenant, deque()).append(waiting)
        self._begin_next()
        try:
            return await outcome
        except asyncio.CancelledError:
            if waiting in self._waiting.get(tenant, ()):
                self._waiting[tenant].remove(waiting)
            raise
        except (EngineError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            log.error("the %s failed on the text of a request", stage, extra=frames_of(error))
            self._metrics.count_error(stage)
            raise RequestFailed(f"the {stage} failed ({type(error).__name__})", stage) from error

    def close(self) -> None:
        """Cancel what waits for its turn. The executor takes no more."""
        for calls in self._waiting.values():
            for _, outcome in calls:
                outcome.cancel()
        self._waiting.clear()

    def _begin_next(self) -> None:
        """Give what is free to those whose turn it is. Passes over no more tenants than there are workers."""
        while self._num_free:
            free = (each for each in self._waiting.items() if self._busy[each[0]] < self._most)
            tenant, calls = next(free, (None, None))
            if calls is None:
                return
            if calls:
                self._begin(tenant, *calls.popleft())
            self._waiting.move_to_end(tenant)
            if not calls:
                del self._waiting[tenant]

    def _begin(self, tenant: Tenant, call: Callable[[], Any], outcome: asyncio.Future[Any]) -> None:
        try:
            begun = asyncio.get_running_loop().run_in_executor(self._executor, call)
        except RuntimeError as error:  # it takes no more
            outcome.set_exception(error)
            return
        self._num_free -= 1
        self._busy[tenant] += 1
        begun.add_done_callback(partial(self._end, tenant, outcome))

    def _end(self, tenant: Tenant, outcome: asyncio.Future[Any], begun: asyncio.Future[Any]) -> None:
        self._num_free += 1
        self._busy[tenant] -= 1
        if not self._busy[tenant]:
            del self._busy[tenant]
        error = None if begun.cancelled() else begun.exception()  # retrieved: the caller may have gone
        if not outcome.done():
            if begun.cancelled():
                outcome.cancel()
            elif error is not None:
                outcome.set_exception(error)
                outcome.exception()  # the same
            else:
                outcome.set_result(begun.result())
        self._begin_next()
