"""LogWriter: log lines to a file descriptor by a thread of its own: no reader can stop the server."""

from __future__ import annotations

import logging
import os
import queue
import select
import time
from threading import Thread

MAX_WAITING = 4096  # lines; with a traceback in each, some ten MiB
_DROPPED = "%d log lines were dropped: their reader is too slow"
_LOST = "%d log lines were lost: they could not be written"
CLOSE_S = 2.0  # what is written after the end of the process's work must not hold up its exit


class LogWriter(logging.Handler):
    """Formats a record on the thread that logs it and writes it on its own; never waits for the reader.

    While the reader is slow up to `max_waiting` lines wait and further ones are dropped, which a line tells
    as soon as it has caught up. Lines that cannot be written, on a full disk say, are lost, which a line
    tells once one can. `close` gives what waits up to `CLOSE_S` seconds.
    """

    def __init__(self, fd: int, max_waiting: int = MAX_WAITING) -> None:
        super().__init__()
        self._fd = fd
        self._lines: queue.Queue[str | None] = queue.Queue(max_waiting)
        self._num_dropped = 0  # written under the handler's lock
        self._is_torn = False  # the last line was written in part; for the thread
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
        num_told = num_lost = 0
        ends = False
        while not ends:
            line = self._lines.get()
            ends = line is None
            if num_lost and self._write(self._notice(_LOST, num_lost)):
                num_lost = 0
            if line is not None and not self._write(line):
                num_lost += 1
            num_dropped = self._num_dropped
            if num_dropped > num_told and (ends or self._lines.empty()):
                self._write(self._notice(_DROPPED, num_dropped - num_told))
                num_told = num_dropped

    def _notice(self, message: str, num_lines: int) -> str:
        args = (num_lines,)
        return self.format(
            logging.LogRecord("slipstream.server", logging.WARNING, __file__, 0, message, args, None)
        )

    def _write(self, line: str) -> bool:
        """Write a line, behind the end of one that was cut; False if that cannot be."""
        data = f"{line}\n".encode("utf-8", "backslashreplace")
        if self._is_torn:
            data = b"\n" + data
        num_written = write_all(self._fd, data)
        if num_written:
            self._is_torn = num_written < len(data)
        return num_written == len(data)


def write_all(fd: int, data: bytes) -> int:
    """Write all of `data`, waiting for its reader; how many bytes were written when no more can be."""
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(fd, left) :]
        except BlockingIOError:  # another process that has this pipe made it so
            select.select([], [fd], [])
        except OSError:
            break
    return len(data) - len(left)
