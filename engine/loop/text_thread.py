"""TextThread: work on text that would hold up the event loop, for one request at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from contextvars import copy_context
from typing import TypeVar

from engine.errors import EngineError, RequestFailed, frames_of
from engine.plan.metrics.batch_metrics import BatchMetrics

log = logging.getLogger("slipstream.engine")
T = TypeVar("T")


class TextThread:
    """Runs calls in `executor`, each in the context of the task that asks for it. Loop thread only."""

    def __init__(self, executor: Executor, metrics: BatchMetrics) -> None:
        self._executor = executor
        self._metrics = metrics

    async def run(self, call: Callable[[], T], stage: str) -> T:
        """What `call` gives. Raises its EngineErrors; any other error is counted and a RequestFailed.

        So is a panic of a library in Rust, which is no Exception.
        """
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._executor, copy_context().run, call)
        except (EngineError, asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            log.error("the %s failed on the text of a request", stage, extra=frames_of(error))
            self._metrics.engine_errors[stage] += 1
            raise RequestFailed(f"the {stage} failed ({type(error).__name__})", stage) from error
