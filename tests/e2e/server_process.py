"""The server as its users start it: a process of its own, with a log to wait for and an exit code."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.command_line import QUIET, SLIPSTREAM

START_S = 90.0  # on a machine that has other things to do


@dataclass
class ServerProcess:
    """A running `slipstream serve`; `log` holds its records so far, `url` is known once it listens."""

    process: asyncio.subprocess.Process
    log: list[dict[str, Any]] = field(default_factory=list)
    other_lines: list[str] = field(default_factory=list)  # on stderr, not from the log
    _news: asyncio.Condition = field(default_factory=asyncio.Condition)
    _url: str | None = None

    @property
    def url(self) -> str:
        assert self._url is not None, "it does not listen yet"
        return self._url

    async def said(self, words: str, timeout_s: float = START_S) -> dict[str, Any]:
        """The first record whose message has these words, awaited."""
        async with asyncio.timeout(timeout_s), self._news:
            while True:
                for record in self.log:
                    if words in record["event"]:
                        return record
                assert self.process.returncode is None, f"it ended without {words!r}: {self.other_lines}"
                await self._news.wait()

    async def until_ready(self) -> None:
        """Return when the model is loaded."""
        await self.said("serving ")

    def signal(self, number: int = signal.SIGTERM) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def children(self) -> list[psutil.Process]:
        """The processes that it has started."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    async def exit_code(self, timeout_s: float) -> int:
        """Its exit code, which must come within `timeout_s`."""
        return await asyncio.wait_for(self.process.wait(), timeout_s)

    async def read_log(self) -> None:
        """Take in stderr until it is closed."""
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            async with self._news:
                self._take(line.decode())
                self._news.notify_all()
        await self.process.wait()  # so that whoever waits for words sees that none will come
        async with self._news:
            self._news.notify_all()

    def _take(self, line: str) -> None:
        try:
            record = json.loads(line)
        except ValueError:
            self.other_lines.append(line)
            return
        self.log.append(record)
        found = re.match(r"listening on (\S+) ", record["event"])
        if found is not None:
            self._url = found[1]


@asynccontextmanager
async def server_process(
    model: Path | str,
    *flags: str,
    home: Path | None = None,
    faults: Sequence[dict[str, Any]] = (),
    port: int = 0,
    under: Sequence[str] = (),
) -> AsyncIterator[ServerProcess]:
    """A server of `model` that listens on `port`, 0 for any; killed on leaving if it still runs.

    It keeps what it makes in `home`, None for a folder beside the model. `under` is a command that runs the
    command behind it, to change what it runs in.
    """
    env = {**QUIET, "SLIPSTREAM_HOME": str(home or Path(model).parent / "home"), "HF_HUB_OFFLINE": "1"}
    if faults:
        env |= {"SLIPSTREAM_ALLOW_FAULTS": "1", "SLIPSTREAM_FAULT_PLAN": json.dumps(faults)}
    server = ServerProcess(
        await asyncio.create_subprocess_exec(
            *under,
            *SLIPSTREAM,
            *("serve", str(model), "--port", str(port), "--log-format", "json", *flags),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=env,
            limit=1 << 20,
        )
    )
    reading = asyncio.create_task(server.read_log())
    try:
        await server.said("listening on")
        yield server
    finally:
        with suppress(ProcessLookupError):
            server.process.kill()
        await server.process.wait()
        await reading
