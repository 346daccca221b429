"""A plain socket client: shows exactly what goes over the wire."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class RawReply:
    """One whole HTTP reply."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Wire:
    """One connection. Requests are sent as given; replies are read to the byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, url: str) -> Wire:
        parts = urlsplit(url)
        return cls(*await asyncio.open_connection(parts.hostname, parts.port))

    async def send(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> None:
        """Send one request, which is JSON unless the headers say otherwise; an empty header is left out."""
        lines = {
            "host": "localhost",
            **({"content-type": "application/json"} if body or method == "POST" else {}),
            **(headers or {}),
        }
        lines.setdefault("content-length", str(len(body)))
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value)
        self.writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body)
        await self.writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        """The status and headers of the next reply."""
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        return int(lines[0].split(" ")[1]), headers

    async def chunk(self) -> bytes:
        """The next chunk of a chunked body: what the server wrote at once; empty at the end."""
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        data = await self.reader.readexactly(size + 2)
        return data[:-2]

    async def chunks(self) -> list[bytes]:
        """All that are left."""
        found = []
        while chunk := await self.chunk():
            found.append(chunk)
        return found

    async def reply(self) -> RawReply:
        """The next reply, whole."""
        status, headers = await self.head()
        if headers.get("transfer-encoding") == "chunked":
            return RawReply(status, headers, b"".join(await self.chunks()))
        return RawReply(status, headers, await self.reader.readexactly(int(headers["content-length"])))

    async def close(self) -> None:
        """Close as a client that leaves does."""
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()


async def ask(
    url: str, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
) -> RawReply:
    """One request on a connection of its own. A `body` of bytes is sent as it is, anything else as JSON."""
    wire = await Wire.connect(url)
    try:
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        await wire.send(method, path, data, headers)
        return await wire.reply()
    finally:
        await wire.close()


def events_of(body: bytes) -> list[Any]:
    """The JSON of every event of a stream, which must end with [DONE]."""
    events = [part for part in body.split(b"\n\n") if part and not part.startswith(b":")]
    assert events.pop() == b"data: [DONE]"
    return [json.loads(event.removeprefix(b"data: ")) for event in events]
