"""StallWatch: notices a client that reads nothing of what waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class StallWatch:
    """Calls `on_stall` once bytes have waited in `transport` for `timeout_s` and the client took none.

    At most one timer, and none while everything was taken. Event-loop thread only.
    """

    def __init__(
        self, transport: asyncio.WriteTransport, timeout_s: float, on_stall: Callable[[], None]
    ) -> None:
        self._transport = transport
        self._timeout_s = timeout_s
        self._on_stall = on_stall
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._since: float | None = None  # when the client last took something; None: nothing waits
        self._num_waiting = 0  # bytes, then

    def pause(self) -> None:
        """Bytes wait from now on."""
        self._note_progress(self._transport.get_write_buffer_size())
        if self._timer is None:
            self._set_timer(self._timeout_s)

    def resume(self) -> None:
        """Everything was taken. The timer stays, for streams pause often."""
        self._since = None

    def stop(self) -> None:
        """The connection is closed."""
        self._since = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _note_progress(self, num_waiting: int) -> None:
        self._since = self._loop.time()
        self._num_waiting = num_waiting

    def _set_timer(self, delay_s: float) -> None:
        self._timer = self._loop.call_later(delay_s, self._check)

    def _check(self) -> None:
        self._timer = None
        if self._since is None:
            return
        num_waiting = self._transport.get_write_buffer_size()
        if num_waiting < self._num_waiting:
            self._note_progress(num_waiting)
        left_s = self._since + self._timeout_s - self._loop.time()
        if left_s > 0:
            self._set_timer(left_s)
        else:
            self._on_stall()
