"""An event loop whose time is made up: a run with timers and pauses takes no time and repeats exactly."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from engine.plan.speculation.drafter import DraftResult
from engine.plan.step_records import StepResult

T = TypeVar("T")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Jumps to the next timer when nothing else is left to do. Nothing outside can wake it.

    A call that it hands to an executor runs at once instead, and is answered after the seconds that its
    result, if it is a step's or a drafter's, says it took. AssertionError when everybody waits and nothing
    will ever come.
    """

    def __init__(self) -> None:
        self.now = 100.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        """Seconds of made-up time."""
        return self.now

    def pass_by(self, seconds: float) -> None:
        """Let time pass on the loop's own thread, as a call that takes long does."""
        self.now += seconds

    def run_in_executor(  # type: ignore[override]
        self, executor: object, call: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """The answer of `call(*args)`, which comes when it would have come."""
        future: asyncio.Future[T] = self.create_future()
        try:
            result = call(*args)
        except Exception as error:
            self.call_soon(_settle, future.set_exception, future, error)
        else:
            self.call_later(_seconds(result), _settle, future.set_result, future, result)
        return future


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on a loop of made-up time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everybody waits and nothing will ever come"
        self._loop.now += max(0.0, timeout)
        return []


def _seconds(result: object) -> float:
    if isinstance(result, StepResult):
        return result.forward_s + result.swap_s
    return result.draft_s if isinstance(result, DraftResult) else 0.0


def _settle(settle: Callable[[Any], None], future: asyncio.Future[Any], value: object) -> None:
    if not future.cancelled():
        settle(value)
