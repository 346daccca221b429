"""LogWriter: log lines to a file descriptor by a thread of its own: no reader can stop the server."""

from __future__ import annotations

import logging
import os
import queue
import select
import time
from threading import Thread

MAX_WAITING = 4096  # lines; with a traceback in each, some ten MiB
CLOSE_S = 2.0  # what is written after the end of the process's work must not hold up its exit


class LogWriter(logging.Handler):
    """Formats a record on the thread that logs it and writes it on its own; never waits for the reader.

    While the reader is slow up to `max_waiting` lines wait and further ones are dropped, which a line tells
    as soon as it has caught up. When it has gone everything is dropped. `close` gives what waits up to
    `CLOSE_S` seconds.
    """

    def __init__(self, fd: int, max_waiting: int = MAX_WAITING) -> None:
        super().__init__()
        self._fd = fd
        self._lines: queue.Queue[str | None] = queue.Queue(max_waiting)
        self._num_dropped = 0  # written under the handler's lock
        self._thread = Thread(target=self._write_lines, name="slipstream-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Take a record; never raises and never waits."""
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._num_dropped += 1
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        """Write what waits, for a bounded time. Lines logged later are lost."""
        until = time.monotonic() + CLOSE_S
        try:
            self._lines.put(None, timeout=CLOSE_S)
            self._thread.join(max(0.0, until - time.monotonic()))
        except queue.Full:
            pass  # the reader has gone
        super().close()

    def _write_lines(self) -> None:
        num_told = 0
        is_read, ends = True, False
        while not ends:
            line = self._lines.get()
            ends = line is None
            if line is not None:
                is_read = is_read and self._write(line)
            num_dropped = self._num_dropped
            if num_dropped > num_told and (ends or self._lines.empty()):
                is_read = is_read and self._write(self._notice(num_dropped - num_told))
                num_told = num_dropped

    def _notice(self, num_dropped: int) -> str:
        message = "%d log lines were dropped: their reader is too slow"
        args = (num_dropped,)
        return self.format(
            logging.LogRecord("slipstream.server", logging.WARNING, __file__, 0, message, args, None)
        )

    def _write(self, line: str) -> bool:
        return write_all(self._fd, f"{line}\n".encode("utf-8", "backslashreplace"))


def write_all(fd: int, data: bytes) -> bool:
    """Write all of `data`, waiting for its reader; False when there is none any more."""
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(fd, left) :]
        except BlockingIOError:  # another process that has this pipe made it so
            select.select([], [fd], [])
        except OSError:
            return False
    return True
