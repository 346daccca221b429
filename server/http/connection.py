"""Connection: uvicorn's HTTP protocol for clients that are slow, broken or hostile.

What it adds: a time for a request to arrive in, a time for a reply to be read in, a size for what is not
body, a cap on connections and on requests sent ahead, and an end that lets the client read why. Refusals that
can be told to the application are: its reply is counted, labelled and spelled like any other.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast

import httptools
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from server.http.auth import METRICS_PATH, OPEN_PATHS
from server.http.connection_gate import ConnectionGate, Seat
from server.http.context import Exchange
from server.http.errors import INVALID, OVERLOADED, TIMEOUT, ApiError, ErrorReply
from server.http.json_reply import encode_json
from server.http.middleware import UNMATCHED_ROUTE
from server.http.peer import introduce, peer_of
from server.http.plain_writer import PlainWriter
from server.http.stall_watch import StallWatch
from server.observability.http_metrics import HttpMetrics

LOBBY_S = 2.0  # for a client over the cap to ask, so that it can be told
LINGER_S = 2.0  # for a client that still sends to read the reply: closing at once would take it from it
MAX_PIPELINED = 16  # requests sent ahead of the replies to those before
_ALWAYS_SERVED = OPEN_PATHS | {METRICS_PATH}
_VERSIONS = ("1.1", "1.0")
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)

_MALFORMED = ErrorReply(400, INVALID, "This is not a valid HTTP/1.1 request.", code="bad_http")

_NO_PROXY = ErrorReply(400, INVALID, "This server is no proxy: it takes no CONNECT.", code="bad_http")


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What one connection may take: seconds and bytes."""

    read_timeout_s: float
    stall_timeout_s: float
    max_header_bytes: int


@dataclass(frozen=True, slots=True)
class ConnectionHouse:
    """What all connections of a server share."""

    limits: ConnectionLimits
    gate: ConnectionGate
    http: HttpMetrics


@dataclass(frozen=True, slots=True)
class _ReplyTransport:
    """The part of a transport that a reply uses, with the end of it taken over by the connection."""

    write: Callable[[bytes], None]
    is_closing: Callable[[], bool]
    close: Callable[[], None]


class Connection(HttpToolsProtocol):
    """One client. Every wait on it has an end, and what is kept of what it sends or leaves unread a bound."""

    def __init__(
        self,
        house: ConnectionHouse,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._house = house
        self._limits = house.limits
        self._seat = Seat.SERVED
        self._stall_watch: StallWatch | None = None
        self._read_timer: asyncio.TimerHandle | None = None
        self._end_timer: asyncio.TimerHandle | None = None
        self._answering: RequestResponseCycle | None = None
        self._in_message = False  # a request has begun to arrive
        self._in_body = False  # and its head is complete
        self._keep_alive = False  # what that request asks for
        self._num_unparsed = 0  # bytes since the parser last gave a piece of a body, or a whole request
        self._is_deaf = False  # whatever else comes is discarded

    # Coming and going.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the seat there is."""
        self._seat = self._house.gate.seat(len(self.connections))
        super().connection_made(transport)
        if self._seat is Seat.NONE:
            self._is_deaf = True
            transport.abort()
            return
        # Paused whenever the kernel does not take all: no more than one write of ours ever waits here.
        transport.set_write_buffer_limits(0)
        self._stall_watch = StallWatch(transport, self._limits.stall_timeout_s, self._drop)
        self._start_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the reply under way; it need not be the one to the last request.

        What points back at the connection is let go: closed ones that wait for a full collection of garbage
        grow to megabytes, because under load that collection is hours away.
        """
        self._stop_reading()
        self._unset_keepalive_if_required()
        if self._end_timer is not None:
            self._end_timer.cancel()
        if self._stall_watch is not None:
            self._stall_watch.stop()
        if self._answering is not None:
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)
        self._stall_watch = self._answering = None
        self.cycle = cast(RequestResponseCycle, None)
        self.pipeline.clear()

    def _drop(self) -> None:
        """The client has stalled: end its request, and keep nothing in the kernel for it either."""
        if self._answering is not None:
            peer_of(cast(dict[str, Any], self._answering.scope)).stalled = True
        with suppress(OSError):
            sock: socket.socket = self.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.transport.abort()

    def _close_in_order(self) -> None:
        """Close after a reply; a client that still sends gets the time to read it first."""
        if self._in_message and not self.transport.is_closing():
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        self._is_deaf = True
        self._stop_reading()
        self.flow.resume_reading()
        with suppress(OSError):  # it has gone already
            self.transport.write_eof()
        self._end_timer = self.loop.call_later(LINGER_S, self.transport.close)

    # Reading.

    def _start_reading(self) -> None:
        """Give the request that is awaited its time, if it has none yet."""
        if self._read_timer is None and not self._is_deaf:
            self._read_timer = self.loop.call_later(self._read_time_s, self._on_read_timeout)

    @property
    def _read_time_s(self) -> float:
        time_s = self._limits.read_timeout_s
        return min(LOBBY_S, time_s) if self._seat is Seat.LOBBY else time_s

    def _stop_reading(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _on_read_timeout(self) -> None:
        self._read_timer = None
        if self.flow.read_paused:  # it was us who did not read: the reply before takes its time
            self._start_reading()
        elif self._in_message:
            message = f"The request did not arrive within {self._read_time_s:g} s."
            self._refuse(ErrorReply(408, TIMEOUT, message, code="read_timeout"))
        else:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Parse what came, unless nothing the client says can matter any more."""
        if self._is_deaf:
            return
        if self.timeout_keep_alive_task is not None:
            self._unset_keepalive_if_required()
            self._start_reading()
        self._num_unparsed += len(data)
        rest: bytes | None = data
        while rest is not None and not self._is_deaf:
            rest = self._feed(rest)
        limit = self._limits.max_header_bytes
        if self._num_unparsed > limit and not self._is_deaf:
            message = f"The headers take more than {limit} bytes, the limit."
            self._refuse(ErrorReply(431, INVALID, message, code="headers_too_large"))

    def _feed(self, data: bytes) -> bytes | None:
        """Parse `data`; what is still to be parsed of it, in a new form, or None."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return self._without_upgrade() + data[upgrade.args[0] :]
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._refuse(cause.reply if isinstance(cause, ApiError) else _MALFORMED)
        return None

    def _without_upgrade(self) -> bytes:
        """The head just parsed, less its wish for another protocol, which a server may pass over.

        The parser would take the body for that protocol's; Java's client asks for HTTP/2 with every request.
        """
        version = self.parser.get_http_version()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version.encode())]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as the one before
        self._num_unparsed = 0
        return b"\r\n".join([*lines, b"", b""])

    # What the parser finds.

    def on_message_begin(self) -> None:
        """The first bytes of a request."""
        super().on_message_begin()
        self._in_message = True
        introduce(cast(dict[str, Any], self.scope))
        self._start_reading()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; one behind the body says nothing that may still count."""
        if not self._in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """A whole head: the request can be answered, or has to wait for the replies before its own.

        Raises ApiError, which ends the parsing.
        """
        if self.parser.get_method() == b"CONNECT":  # the parser takes what follows for another protocol's
            raise ApiError(_NO_PROXY)
        if self.parser.should_upgrade():
            return
        if self.parser.get_http_version() not in _VERSIONS or _is_ambiguous(self.headers, self.parser):
            raise ApiError(_MALFORMED)
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ApiError(_MALFORMED)  # never sent: the replies before its own are the last
        super().on_headers_complete()
        self.flow.resume_reading()  # paused, a request in the queue would hide that its client has left
        self._in_body = True
        # A reply that begins before the request is complete ends the connection.
        self._keep_alive, self.cycle.keep_alive = self.cycle.keep_alive, False
        if self._seat is Seat.LOBBY and self.scope["path"] not in _ALWAYS_SERVED:
            peer_of(cast(dict[str, Any], self.scope)).fault = self._full()

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._num_unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The end of a request."""
        if not self._in_body:  # the head is to be parsed again
            return
        super().on_message_complete()
        self._in_message = self._in_body = False
        self._num_unparsed = 0
        self._stop_reading()
        self.cycle.keep_alive = self._keep_alive and self._seat is Seat.SERVED

    def shutdown(self) -> None:
        """Answer what was asked, then close."""
        self._keep_alive = False
        super().shutdown()

    # Answering.

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        write: Callable[[bytes], None] = self.transport.write
        if cycle.scope["http_version"] == "1.0":
            cycle.waiting_for_100_continue = False  # nor does it know of that
            write = PlainWriter(write)
        transport = _ReplyTransport(write, self.transport.is_closing, self._close_in_order)
        cycle.transport = cast(asyncio.Transport, transport)
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Go on with the next request, if there may be one."""
        self._answering = None
        if self._end_timer is None:
            super().on_response_complete()

    def pause_writing(self) -> None:
        """The client has not read all that was sent."""
        super().pause_writing()
        if self._stall_watch is not None:
            self._stall_watch.pause()

    def resume_writing(self) -> None:
        """The client has read all, or the kernel has room for it."""
        super().resume_writing()
        if self._stall_watch is not None:
            self._stall_watch.resume()

    def _refuse(self, reply: ErrorReply) -> None:
        """Answer what is no request, or will not be a whole one, and read no more of it."""
        self._is_deaf = True
        self._stop_reading()
        if self._in_body:
            peer_of(cast(dict[str, Any], self.scope)).fault = reply
            self.cycle.more_body = False
            self.cycle.message_event.set()
        elif self._answering is not None:
            self.cycle.keep_alive = False  # of the last one: what was asked in order is still answered
        else:
            self._house.http.requests[UNMATCHED_ROUTE, reply.status] += 1
            self.transport.write(_in_bytes(reply))
            self._linger()

    def _full(self) -> ErrorReply:
        message = f"The server has {self._house.gate.max_connections} connections open, the limit."
        return ErrorReply(503, OVERLOADED, message, code="too_many_connections", headers={"retry-after": "1"})


def _is_ambiguous(headers: list[tuple[bytes, bytes]], parser: httptools.HttpRequestParser) -> bool:
    """True when another server might see another host, or another end, in the same bytes."""
    names = [name for name, _ in headers]
    return names.count(b"host") > 1 or (b"transfer-encoding" in names and parser.get_http_version() != "1.1")


def _in_bytes(reply: ErrorReply) -> bytes:
    """A whole reply to what never became a request, the connection's last."""
    body = encode_json(reply.body()).encode("ascii")
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode("ascii")),
        (b"connection", b"close"),
        *Exchange(None).reply_headers(),
    ]
    phrase = HTTPStatus(reply.status).phrase.encode("ascii")
    lines = [b"HTTP/1.1 %d %s" % (reply.status, phrase), *(b"%s: %s" % header for header in headers)]
    return b"\r\n".join([*lines, b"", body])
