"""The command line as a person has it: on a terminal of its own, with keys to press and a screen to read."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tests.e2e.command_line import QUIET, SLIPSTREAM

_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A process on a pseudo-terminal."""

    def __init__(self, process: subprocess.Popen[bytes], fd: int) -> None:
        self.process = process
        self._fd = fd
        self._seen = b""

    @property
    def raw(self) -> str:
        """All it has written so far."""
        return self._seen.decode(errors="replace")

    @property
    def lines(self) -> list[str]:
        """The lines so far, without colours; what a carriage return wrote over is gone, as on a screen."""
        text = _CODES.sub("", self.raw).replace("\r\n", "\n")
        return [line.rpartition("\r")[2] for line in text.splitlines()]

    def until(self, words: str, timeout_s: float = 90.0) -> None:
        """Read until it has written `words`, after what was awaited before."""
        deadline = time.monotonic() + timeout_s
        while words not in self.raw:
            assert self._read(deadline - time.monotonic()), f"it ended without {words!r}: {self.raw}"

    def press(self, keys: str) -> None:
        """As if typed."""
        os.write(self._fd, keys.encode())

    def end(self, timeout_s: float = 30.0) -> int:
        """Read to the end; the exit code."""
        deadline = time.monotonic() + timeout_s
        while self._read(deadline - time.monotonic()):
            pass
        return self.process.wait(timeout_s)

    def interrupt(self) -> None:
        """As Ctrl-C does."""
        self.process.send_signal(signal.SIGINT)

    def _read(self, timeout_s: float) -> bool:
        """False once it has closed its side."""
        ready, _, _ = select.select([self._fd], [], [], max(0.0, timeout_s))
        assert ready, f"it wrote nothing more: {self.raw}"
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # Linux's word for the other side having gone
            return False
        self._seen += data
        return bool(data)


@contextmanager
def on_terminal(*argv: str, env: Mapping[str, str] | None = None, width: int = 100) -> Iterator[Terminal]:
    """`slipstream` with `argv` on a terminal of that many columns; killed at the end if it still runs."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    process = subprocess.Popen(
        [*SLIPSTREAM, *argv],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**QUIET, "TERM": "xterm-256color", "HF_HUB_OFFLINE": "1", **(env or {})},
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
