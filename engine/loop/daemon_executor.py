"""DaemonExecutor: threads whose work may hang without keeping the process from ending."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_JOIN_S = 0.5  # what is left running then is lost with the process


class DaemonExecutor(Executor):
    """Begins calls one after another in daemon threads, one by default, started with the first call.

    A ThreadPoolExecutor's threads are joined when the interpreter exits, however long that takes. `submit`
    and `shutdown` are for one thread, the owner's.
    """

    def __init__(self, name: str, num_threads: int = 1) -> None:
        self._names = [name] if num_threads == 1 else [f"{name}_{i}" for i in range(num_threads)]
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads: list[Thread] = []
        self._is_closed = False

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """The future of the call. RuntimeError after `shutdown`, or if there can be no thread."""
        if self._is_closed:
            raise RuntimeError("this executor takes no more work")
        while len(self._threads) < len(self._names):
            thread = Thread(target=self._work, name=self._names[len(self._threads)], daemon=True)
            thread.start()
            self._threads.append(thread)
        future: Future[T] = Future()
        self._calls.put((future, partial(call, *args, **kwargs)))
        return future

    def _work(self) -> None:
        while (task := self._calls.get()) is not None:
            _carry_out(*task)
            del task  # with all that it holds, while there is nothing to do

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more work; what is queued still runs unless cancelled. `wait` joins for a moment only."""
        self._is_closed = True
        while cancel_futures and not self._calls.empty():
            with suppress(Empty):
                if (task := self._calls.get_nowait()) is not None:
                    task[0].cancel()
        for _ in self._names:
            self._calls.put(None)
        ends = time.monotonic() + _JOIN_S
        for thread in self._threads if wait else ():
            thread.join(max(0.0, ends - time.monotonic()))


def _carry_out(future: Future[Any], call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
