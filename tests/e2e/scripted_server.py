"""A server on a real socket that says exactly what a test tells it to, right or wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass
class Script:
    """`replies` are given in turn, the last one for ever; `requests` are the heads and bodies that came."""

    replies: Sequence[bytes]
    url: str = ""
    requests: list[tuple[str, bytes]] = field(default_factory=list)
    num_connections: int = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                length = next(
                    (line[15:] for line in head.split("\r\n") if line.startswith("content-length")), "0"
                )
                self.requests.append((head, await reader.readexactly(int(length))))
                reply = self.replies[min(len(self.requests), len(self.replies)) - 1]
                writer.write(reply)
                await writer.drain()
                if b"connection: close" in reply or not reply:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def scripted_server(*replies: bytes) -> AsyncIterator[Script]:
    """Serves `replies` until it is left."""
    script = Script(replies)
    server = await asyncio.start_server(script.answer, "127.0.0.1", 0)
    script.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield script
    finally:
        server.close()
        await asyncio.sleep(0)


def reply(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    """One HTTP reply with a length."""
    lines = [f"HTTP/1.1 {status}", *headers, f"content-length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode() + body


def json_reply(value: object, status: str = "200 OK", *headers: str) -> bytes:
    """One HTTP reply with JSON."""
    return reply(json.dumps(value).encode(), status, *headers)


def event(**fields: object) -> bytes:
    """One event of a stream."""
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def chunk(text: str, finish_reason: str | None = None) -> bytes:
    """One event of a chat with some text."""
    return event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}])


DONE = b"data: [DONE]\n\n"
