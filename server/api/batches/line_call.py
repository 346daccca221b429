"""LineCaller: a line of a batch as a request to this very application, behind the gate that asks for keys."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Scope

from server.http.context import EXCHANGE_KEY, Exchange
from server.http.errors import REQUEST_ID_KEY, error_reply
from server.http.json_reply import encode_json


@dataclass(frozen=True, slots=True)
class LineReply:
    """What the application answered."""

    status: int
    request_id: str
    body: bytes
    retry_after_s: float

    @property
    def is_final(self) -> bool:
        """False where the server only had no room, or is about to end: the line is asked again."""
        return self.status != 503

    def response(self) -> bytes:
        """As JSON, for an output line."""
        head = encode_json({"status_code": self.status, "request_id": self.request_id})[:-1].encode()
        return head + b',"body":' + (self.body or b"null") + b"}"


@dataclass(frozen=True, slots=True)
class LineCaller:
    """Asks `app`; `clock` is the engine's."""

    app: ASGIApp
    clock: Callable[[], float]

    async def ask(self, path: str, body: bytes, tenant: str) -> LineReply:
        """The reply to one POST of this tenant's, in the background class. Cancelled, the request ends."""
        exchange = Exchange(None, clock=self.clock, tenant=tenant or None, is_background=True)
        scope = _scope(path, body, exchange)
        pieces = iter([{"type": "http.request", "body": body, "more_body": False}])
        reply = _Reply()

        async def receive() -> Message:
            piece = next(pieces, None)
            if piece is None:  # nobody can hang up
                await reply.forever()
            assert piece is not None
            return piece

        try:
            await self.app(scope, receive, reply.send)
        except Exception as error:
            failure = error_reply(error)
            reply.status, reply.body = failure.status, bytearray(encode_json(failure.body()).encode())
            reply.headers = dict(failure.headers)
        retry = reply.headers.get("retry-after", "1")
        retry_after_s = float(retry) if retry.isdigit() else 1.0
        return LineReply(reply.status, exchange.request_id, bytes(reply.body), retry_after_s)


class _Reply:
    """Collects what the application sends."""

    def __init__(self) -> None:
        self.status = 500
        self.headers: dict[str, str] = {}
        self.body = bytearray()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {
                name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]
            }
        elif message["type"] == "http.response.body":
            self.body += message.get("body", b"")

    async def forever(self) -> None:
        """Until cancelled."""
        await asyncio.get_running_loop().create_future()


def _scope(path: str, body: bytes, exchange: Exchange) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
        "client": None,
        "server": None,
        "state": {},
        EXCHANGE_KEY: exchange,
        REQUEST_ID_KEY: exchange.request_id,
    }
