"""DaemonExecutor: one thread whose work may hang without keeping the process from ending."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_JOIN_S = 1.0  # what is left running then is lost with the process


class DaemonExecutor(Executor):
    """Runs calls one after another in a daemon thread, started with the first.

    A ThreadPoolExecutor's threads are joined when the interpreter exits, however long that takes.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._closed = False

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """The future of the call. RuntimeError after `shutdown`."""
        if self._closed:
            raise RuntimeError("this executor takes no more work")
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                _settle(future, call, args, kwargs)

        self._calls.put(run)
        if self._thread is None:
            self._thread = Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        return future

    def _work(self) -> None:
        while (run := self._calls.get()) is not None:
            run()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more work; with `wait`, join the thread for a moment. What is queued still runs."""
        if not self._closed:
            self._closed = True
            self._calls.put(None)
        if wait and self._thread is not None:
            self._thread.join(_JOIN_S)


def _settle(future: Future[T], call: Callable[..., T], args: Any, kwargs: Any) -> None:
    try:
        result = call(*args, **kwargs)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
