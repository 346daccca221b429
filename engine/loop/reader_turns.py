"""ReaderTurns: wakes the readers of streams some at a time, so that the next step does not wait for all."""

from __future__ import annotations

import asyncio
from collections import deque

READERS_A_TURN = 32  # of some 40 µs each, where each writes an event to a socket
FEW_READERS = 8  # done before a hold would be
LONGEST_HOLD_S = 0.003  # several times what the host takes to queue a draw of all kinds and a recorded step
LONGEST_DRAFTING_S = 0.05  # more than a GPU and its host take for the drafts of a step


class ReaderTurns:
    """Wakes readers in the order in which something came for them, READERS_A_TURN in a turn of the loop.

    An event loop runs what is ready in the order in which it became so. If all readers of a large batch were
    ready at once, a step that lands meanwhile would be looked at behind all of them, and a quick device would
    wait for the host. Readers whose turn has not come when it is looked at find the tokens of both steps in
    one delta: the further the host is behind, the more tokens an event carries, and the fewer events there
    are. While another thread queues a step, nobody is woken: each of its calls that lets go of the
    interpreter would get it back behind a reader. FEW_READERS are woken at once, unless the step waits for
    drafts. Loop thread only.
    """

    def __init__(self) -> None:
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._next_turn: asyncio.Handle | None = None
        self._hold: asyncio.TimerHandle | None = None

    def add(self, waiter: asyncio.Future[None]) -> None:
        """Something has come for a reader, which the next `begin` wakes if it still waits."""
        self._waiters.append(waiter)

    def begin(self) -> None:
        """All of a step were added: wake them if they are few, else the first of them soon."""
        if self._next_turn is not None or self._hold is not None:
            return
        if len(self._waiters) > FEW_READERS:
            self._plan()
        else:
            self._wake_some()

    def hold(self) -> bool:
        """Wake nobody until `release`, for LONGEST_HOLD_S at most.

        False, and nobody is held, if few wait who are not held already.
        """
        if self._hold is None and len(self._waiters) <= FEW_READERS:
            return False
        self._hold_for(LONGEST_HOLD_S)
        return True

    def hold_for_drafts(self) -> None:
        """Wake nobody before the next step is queued, for LONGEST_DRAFTING_S at most.

        The step waits for drafts, which another thread queues: the device is idle until then, and while it
        works on the step there is time for readers, few or many.
        """
        if self._waiters and self._hold is None:
            self._hold_for(LONGEST_DRAFTING_S)

    def _hold_for(self, seconds: float) -> None:
        if self._hold is not None:
            self._hold.cancel()
        self._hold = asyncio.get_running_loop().call_later(seconds, self.release)

    def release(self) -> None:
        """Go on at once with those who wait, before what is ready by now. Without a hold nothing changes."""
        if self._hold is not None:
            self._hold.cancel()
            self._hold = None
            self._wake_some()

    def _plan(self) -> None:
        self._next_turn = asyncio.get_running_loop().call_soon(self._let_others_go_first)

    def _let_others_go_first(self) -> None:
        """What is ready by now runs before the turn: it may launch a step, and hold it."""
        self._next_turn = asyncio.get_running_loop().call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._next_turn = None
        if self._hold is None:
            self._wake_some()

    def _wake_some(self) -> None:
        for _ in range(min(READERS_A_TURN, len(self._waiters))):
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
        if self._waiters and self._next_turn is None:
            self._plan()
