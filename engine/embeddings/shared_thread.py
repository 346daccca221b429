"""SharedThread: the one thread that computes, for the model's steps and for passes that give way to them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# Where the user leaves it to us: beside prompts or passes, streams go on at seven tokens a second.
GAP_LIMIT_S = 0.15
# A pass computes this many times as long as the step before it took, so that it gets on beside short steps,
_STEPS_A_TURN = 3.0
# at least so long, so that it gets on beside long ones, which are made shorter by as much,
LEAST_TURN_S = 0.03
# and at most until tokens are due; a piece of a pass is done once it is begun.
_PIECE_S = 0.02


class PassDropped(Exception):
    """Nobody waits any more for what a pass computes."""


class SharedThread(Executor):
    """Begins steps in the order in which they come; a pass lets steps that wait run inside of it.

    `gap_limit_s` is how long streams may wait for a token. `submit` and `submit_pass` are for one
    thread, the owner's; `give_way` is for the pass, on the shared thread.
    """

    def __init__(self, gap_limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._gap_limit_s = gap_limit_s - _PIECE_S
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="target")
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._turn_ends = 0.0  # when the running pass lets a step that waits go first

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """The future of a step. RuntimeError after `shutdown`."""
        future: Future[T] = Future()
        task = (future, partial(call, *args, **kwargs))
        self._waiting.append(task)
        try:
            self._thread.submit(self._run_next)
        except RuntimeError:
            self._waiting.remove(task)
            raise
        return future

    def submit_pass(self, call: Callable[[], T]) -> Future[T]:
        """The future of a pass, which calls `give_way` between its pieces. RuntimeError after `shutdown`."""
        return self._thread.submit(call)

    def give_way(self) -> None:
        """Run what waits, if the turn of the pass is over."""
        while self._waiting and self._clock() >= self._turn_ends:
            self._run_next()

    def _run_next(self) -> None:
        """Carry out the step that has waited longest; none if a pass has done so."""
        try:
            future, call = self._waiting.popleft()
        except IndexError:
            return
        if not future.set_running_or_notify_cancel():
            return
        began = self._clock()
        try:
            result = call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        ended = self._clock()
        step_s = ended - began
        turn_s = min(_STEPS_A_TURN * step_s, max(LEAST_TURN_S, self._gap_limit_s - step_s))
        self._turn_ends = ended + turn_s

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See Executor."""
        if cancel_futures:
            for future, _ in list(self._waiting):
                future.cancel()
        self._thread.shutdown(wait=wait, cancel_futures=cancel_futures)
