"""Another engine to be measured beside ours, as the command line names it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that somebody else started. It cannot be paused: it must idle while others are measured."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Peer:
    """`how` is a URL, a command with `{port}` that serves over HTTP, or one that answers lines of JSON.

    In a command `{model}` stands for the directory of the model that our server has.
    """

    name: str
    how: str

    @classmethod
    def parse(cls, text: str) -> Peer:
        """Of `NAME=HOW`. Raises ValueError."""
        name, equals, how = text.partition("=")
        if not name.strip() or not equals or not how.strip():
            raise ValueError(f"{text!r} is not NAME=URL and not NAME=COMMAND")
        peer = cls(name.strip(), how.strip())
        peer.command(Path(), 0)
        if peer.is_running and peer.address.port == 0:
            raise ValueError(f"{how!r} names no port")
        return peer

    @property
    def is_running(self) -> bool:
        """True for a URL."""
        return self.how.startswith("http://")

    @property
    def serves_http(self) -> bool:
        """True for what takes completions over HTTP."""
        return self.is_running or "{port}" in self.how

    @property
    def address(self) -> RunningServer:
        """Where a running one listens."""
        url = urlsplit(self.how)
        return RunningServer(url.hostname or "", url.port or 0)

    def command(self, model: Path, port: int) -> list[str]:
        """What to start, its words without a shell. Raises ValueError for quotes that do not close."""
        return [
            word.replace("{port}", str(port)).replace("{model}", str(model)) for word in shlex.split(self.how)
        ]
