"""One daemon thread, calls in order, and no waiting for what hangs."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

from engine.loop.daemon_executor import DaemonExecutor


@pytest.fixture
def executor() -> Iterator[DaemonExecutor]:
    executor = DaemonExecutor("test-draft")
    yield executor
    executor.shutdown()


def test_calls_run_one_after_another_in_one_named_daemon_thread(executor: DaemonExecutor) -> None:
    seen: list[int] = []

    def call(number: int) -> threading.Thread:
        seen.append(number)
        return threading.current_thread()

    futures = [executor.submit(call, number) for number in range(20)]
    threads = {future.result(5) for future in futures}
    assert seen == list(range(20))
    (thread,) = threads
    assert (thread.name, thread.daemon) == ("test-draft", True)


def test_no_thread_is_started_for_nothing() -> None:
    before = threading.active_count()
    DaemonExecutor("idle").shutdown()
    assert threading.active_count() == before


@pytest.mark.parametrize("kind", [ValueError, StopIteration, SystemExit, KeyboardInterrupt, CancelledError])
def test_what_a_call_raises_comes_through_and_the_thread_goes_on(
    executor: DaemonExecutor, kind: type[BaseException]
) -> None:
    def fail() -> None:
        raise kind("no")

    assert isinstance(executor.submit(fail).exception(5), kind)
    assert executor.submit(int, "7").result(5) == 7


def test_shutdown_refuses_more_and_lets_what_is_queued_run() -> None:
    executor = DaemonExecutor("test-draft")
    gate = threading.Event()
    first, second = executor.submit(gate.wait, 5), executor.submit(int, "3")
    executor.shutdown(wait=False)
    with pytest.raises(RuntimeError):
        executor.submit(int)
    gate.set()
    assert (first.result(5), second.result(5)) == (True, 3)
    executor.shutdown()
    executor.shutdown()


def test_shutdown_can_cancel_what_has_not_begun() -> None:
    executor = DaemonExecutor("test-draft")
    gate = threading.Event()
    running = threading.Event()

    def call() -> None:
        running.set()
        gate.wait(5)

    first = executor.submit(call)
    assert running.wait(5)
    second = executor.submit(int)
    executor.shutdown(wait=False, cancel_futures=True)
    assert second.cancelled() and not first.done()
    gate.set()
    first.result(5)


def test_a_cancelled_call_is_not_run(executor: DaemonExecutor) -> None:
    gate = threading.Event()
    executor.submit(gate.wait, 5)
    called: list[int] = []
    future = executor.submit(called.append, 1)
    assert future.cancel()
    gate.set()
    executor.submit(int).result(5)
    assert called == []


def test_shutdown_does_not_wait_for_what_hangs() -> None:
    executor = DaemonExecutor("test-draft")
    begun, gate = threading.Event(), threading.Event()

    def hang() -> bool:
        begun.set()
        return gate.wait()

    hung = executor.submit(hang)
    assert begun.wait(5)
    start = time.perf_counter()
    executor.shutdown(wait=True, cancel_futures=True)
    assert time.perf_counter() - start < 1.0
    gate.set()
    assert hung.result(5)


def test_an_idle_thread_holds_on_to_nothing(executor: DaemonExecutor) -> None:
    class Thing:
        pass

    thing = Thing()
    reference = weakref.ref(thing)
    executor.submit(lambda it: None, thing).result(5)
    executor.submit(int).result(5)
    del thing
    gc.collect()
    assert reference() is None
