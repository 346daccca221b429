"""A client that sends any bytes at all and reads what comes back until the server closes."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

from tests.e2e.wire import Wire

HOST = b"Host: localhost\r\n"
JSON = b"Content-Type: application/json\r\n"


def request(
    headers: bytes = b"", body: bytes = b"", start: bytes = b"POST /v1/completions HTTP/1.1"
) -> bytes:
    """A request with exactly these headers after a host."""
    return start + b"\r\n" + HOST + headers + b"\r\n" + body


def completion(body: bytes = b'{"prompt":"abc","max_tokens":3,"temperature":0}') -> bytes:
    """A sound request, to be answered with 200."""
    return request(JSON + b"Content-Length: %d\r\n" % len(body), body)


async def say(url: str, *parts: bytes, within_s: float = 10) -> bytes:
    """Send the parts, then read until the server closes; TimeoutError when it does not."""
    wire = await Wire.connect(url)
    try:
        async with asyncio.timeout(within_s):
            with suppress(ConnectionError):
                for part in parts:
                    wire.writer.write(part)
                    await wire.writer.drain()
            return await read_all(wire)
    finally:
        await wire.close()


async def read_all(wire: Wire) -> bytes:
    """What comes until the server closes, in whatever way it does."""
    received = b""
    with suppress(ConnectionError):
        while some := await wire.reader.read(65536):
            received += some
    return received


def statuses(received: bytes) -> list[int]:
    """The status of every reply in what was received; 100 Continue is none."""
    found = re.findall(rb"HTTP/1\.1 ([2-5]\d\d) ", received)
    return [int(status) for status in found]


@asynccontextmanager
async def narrow_wire(url: str) -> AsyncIterator[Wire]:
    """A connection of a client whose kernel takes very little ahead of its reading."""
    parts = urlsplit(url)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (parts.hostname, parts.port))
    wire = Wire(*await asyncio.open_connection(sock=sock, limit=1024))
    try:
        yield wire
    finally:
        await wire.close()


def flood(piece: bytes, size: int) -> Iterable[bytes]:
    """`piece` over and over, `size` bytes of it, in parts of up to 64 KiB."""
    part = piece * (65536 // len(piece))
    return (part for _ in range(size // len(part) + 1))
