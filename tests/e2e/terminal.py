"""The command line as a person has it: on a terminal of its own, with keys to press and a screen to read."""

from __future__ import annotations

import asyncio
import codecs
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
from collections.abc import Mapping

from tests.e2e.command_line import QUIET, SLIPSTREAM

_STEERING = re.compile(r"\x1b\[\?2004l\r|\x1b\[[?0-9;]*[a-zA-Z]|\r(?=\n)")  # colours, the cursor, pastes

# What runs tests side by side sets the size of its own terminal.
_WITHOUT_SIZE = {name: value for name, value in QUIET.items() if name not in ("COLUMNS", "LINES")}


class Terminal:
    """`slipstream` with `argv` in a terminal of its own, so many columns wide."""

    def __init__(self, *argv: str, env: Mapping[str, str] | None = None, width: int = 120) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
        self.process = subprocess.Popen(
            [*SLIPSTREAM, *argv],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**_WITHOUT_SIZE, "TERM": "xterm", "NO_COLOR": "1", **(env or {})},
            start_new_session=True,
            preexec_fn=lambda: _take_terminal(slave),
        )
        os.close(slave)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.raw = ""  # all of it
        self.seen = ""  # what is not taken off yet, without what steers the terminal

    def say(self, text: str) -> None:
        """As if typed; \\x03 is Ctrl-C, \\x04 is Ctrl-D."""
        os.write(self._master, text.encode())

    async def expect(self, pattern: str, timeout_s: float = 60) -> str:
        """All that was shown up to the first match of `pattern`, which is taken off."""
        deadline = time.monotonic() + timeout_s
        while not (found := re.search(pattern, self.seen)):
            if time.monotonic() > deadline:
                raise AssertionError(f"no {pattern!r} in {self.seen!r}")
            await asyncio.sleep(0.01)
            if select.select([self._master], [], [], 0)[0] and not self._read():
                break
        assert found is not None, self.seen
        before, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return before

    async def end(self) -> int:
        """Read to the end; the exit code."""
        await asyncio.to_thread(self._read_all)
        return await asyncio.to_thread(self.process.wait, 30)

    def _read_all(self) -> None:
        while self._read():
            pass

    def _read(self) -> bool:
        """False when the other end has closed."""
        try:
            data = os.read(self._master, 65536)
        except OSError:
            return False
        text = self._decoder.decode(data)
        self.raw += text
        self.seen = _STEERING.sub("", self.seen + text)
        return bool(data)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)


def _take_terminal(slave: int) -> None:
    """Make `slave` the new session's own terminal, so that Ctrl-C there is a signal here."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs are born deaf to it
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
