"""A small HTTP/1.1 client for many streaming replies at once: asyncio's own transports and httptools.

General clients spend a tenth of a millisecond on each event of a stream, so that a thousand streams measure
the client. Here an event costs a few microseconds. No redirects, proxies or compression.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol, cast

import httptools

from server.commands.remote.address import Address
from server.commands.remote.failures import Unreachable

CONNECT_TIMEOUT_S = 10.0
_MAX_IDLE = 4096


class ReplySink(Protocol):
    """Takes one reply as it comes, in the event loop."""

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        """The status and the headers, by lower-case name."""

    def on_data(self, data: bytes, at: float) -> None:
        """Part of the body, and when it came by `perf_counter`."""


@dataclass(slots=True)
class BodySink:
    """Collects a whole reply."""

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        """Keep them."""
        self.status, self.headers = status, headers

    def on_data(self, data: bytes, at: float) -> None:
        """Keep it."""
        self.body += data


class HttpClient:
    """Connections to one server, kept open for the next request. For one event loop; close it at the end."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._idle: list[_Connection] = []
        self._tls = ssl.create_default_context() if address.scheme == "https" else None

    async def exchange(
        self,
        method: str,
        path: str,
        content: bytes,
        sink: ReplySink,
        content_type: str = "application/json",
    ) -> None:
        """Send one request and give the reply to `sink` until it is complete. Raises Unreachable.

        What `sink` raises ends it and is raised from here. Ending early, by that or by being cancelled,
        closes the connection, which tells the server. A kept connection that the server had closed meanwhile
        is replaced without a word.
        """
        message = self._message(method, path, content, content_type)
        while self._idle:
            connection = self._idle.pop()
            try:
                await self._use(connection, message, sink)
                return
            except Unreachable:
                if connection.has_replied:
                    raise
        await self._use(await self._connect(), message, sink)

    async def fetch(self, method: str, path: str, content: bytes = b"") -> BodySink:
        """The whole reply to one request, whatever its status. Raises Unreachable."""
        sink = BodySink()
        await self.exchange(method, path, content, sink)
        return sink

    def close(self) -> None:
        """Hang up on every idle connection."""
        while self._idle:
            self._idle.pop().close()

    async def _use(self, connection: _Connection, message: bytes, sink: ReplySink) -> None:
        try:
            await connection.exchange(message, sink)
        except BaseException:
            connection.close()
            raise
        if connection.can_be_kept and len(self._idle) < _MAX_IDLE:
            self._idle.append(connection)
        else:
            connection.close()

    async def _connect(self) -> _Connection:
        address = self._address
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await asyncio.get_running_loop().create_connection(
                    _Connection, address.host, address.port, ssl=self._tls
                )
        except TimeoutError:
            raise Unreachable(
                "connect timeout", f"no connection to {address.netloc} within {CONNECT_TIMEOUT_S:.0f} s"
            ) from None
        except OSError as error:
            reason = _reason(error)
            raise Unreachable(f"connect: {reason}", f"cannot connect to {address.netloc}: {reason}") from None
        except UnicodeError:  # of a label that is empty, or longer than 63 characters
            raise Unreachable("connect: no host name", f"{address.netloc} is no name of a host") from None
        return connection

    def _message(self, method: str, path: str, content: bytes, content_type: str) -> bytes:
        key = self._address.api_key
        lines = [
            f"{method} {path} HTTP/1.1",
            f"host: {self._address.netloc}",
            "user-agent: slipstream",
            "x-requested-with: slipstream",  # uploads need a header that no page sends unasked
            "accept: application/json, text/event-stream",
            "accept-encoding: identity",
            *([f"authorization: Bearer {key}"] if key is not None else []),
            *([f"content-type: {content_type}"] if content or method == "POST" else []),
            *([f"content-length: {len(content)}"] if content or method != "GET" else []),
        ]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + content


class _Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self.has_replied = False  # any byte came in answer to the present request
        self.can_be_kept = False
        self._transport: asyncio.Transport | None = None
        self._sink: ReplySink | None = None
        self._over: asyncio.Future[None] | None = None
        self._parser: httptools.HttpResponseParser
        self._headers: dict[str, str] = {}
        self._ends_with_connection = False
        self._arrived = 0.0

    async def exchange(self, message: bytes, sink: ReplySink) -> None:
        """Send `message` and feed its reply to `sink`. Raises Unreachable."""
        if self._transport is None or self._transport.is_closing():
            raise Unreachable("connection closed", "the server closed the connection")
        self._sink, self.has_replied, self.can_be_kept = sink, False, False
        self._parser = httptools.HttpResponseParser(self)
        self._over = asyncio.get_running_loop().create_future()
        self._transport.write(message)
        await self._over

    def close(self) -> None:
        """Hang up at once."""
        self._sink = None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own is no subclass of it

    def data_received(self, data: bytes) -> None:
        """Note the time first, then take the reply apart."""
        self._arrived = perf_counter()
        self.has_replied = True
        if self._over is None or self._over.done():
            self.close()  # bytes that belong to no request
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(Unreachable("no HTTP", f"the server does not speak HTTP ({error})"))

    def connection_lost(self, error: Exception | None) -> None:
        """Ends the reply: well if it was one without a length, else as a failure."""
        self.can_be_kept = False
        if self._ends_with_connection and error is None:
            self._finish()
        elif self.has_replied:
            self._fail(Unreachable("reply cut short", "the server closed the connection in mid-reply"))
        else:
            self._fail(Unreachable("connection closed", "the server closed the connection before it replied"))

    def on_message_begin(self) -> None:
        """Called by the parser."""
        self._headers = {}
        self._ends_with_connection = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1").strip()

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        status = self._parser.get_status_code()
        if self._sink is not None and status >= 200:
            self._ends_with_connection = not {"content-length", "transfer-encoding"} & self._headers.keys()
            self._sink.on_head(status, self._headers)

    def on_body(self, data: bytes) -> None:
        """Called by the parser, for each chunk."""
        if self._sink is None:
            return
        try:
            self._sink.on_data(data, self._arrived)
        except Exception as error:  # the parser would hide it
            self._sink = None
            self._fail(error)

    def on_message_complete(self) -> None:
        """Called by the parser; an interim reply (1xx) is no end."""
        if self._parser.get_status_code() >= 200:
            self.can_be_kept = bool(self._parser.should_keep_alive())
            self._finish()

    def _finish(self) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(None)

    def _fail(self, failure: Exception) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_exception(failure)


def _reason(error: OSError) -> str:
    """What the system says, in a few words that hold no address: equal failures are counted together."""
    if isinstance(error, ssl.SSLError):
        why = getattr(error, "verify_message", "") or error.reason or "failed"
        return f"TLS: {why.replace('_', ' ').lower()}"
    if isinstance(error, ConnectionRefusedError) or "Connect call failed" in str(error):
        return "connection refused"  # by every address of the host, in the second case
    if isinstance(error, ConnectionError):
        return "connection reset"
    text = error.strerror or str(error) or type(error).__name__
    return text.split("] ")[-1].split(" (")[0].lower()
