"""ExchangeMiddleware: the outermost layer. Labels, times and counts every request; lets none go unanswered.

Pure ASGI, like every layer here: Starlette's BaseHTTPMiddleware hides a client's leaving from the routes.
"""

from __future__ import annotations

from time import time_ns

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.http.anthropic_error import speaks_anthropic
from server.http.client import ClientGone
from server.http.context import EXCHANGE_KEY, Exchange, ServerContext
from server.http.errors import ERROR_KEY, REQUEST_ID_KEY, error_reply
from server.http.peer import peer_of
from server.observability.ended_request import EndedRequest
from server.observability.request_log import GENERATING_ROUTES, TEXT_ROUTES, RequestLog

MAX_REQUEST_ID = 128
CLIENT_CLOSED_REQUEST = 499
UNMATCHED_ROUTE = "unmatched"


class ReplyCutShort(Exception):
    """Raised into the server below, which logs it and drops the connection; tells nothing of a client's."""


class ExchangeMiddleware:
    """Opens an `Exchange` for each HTTP request and closes it with a count and a log line."""

    def __init__(self, app: ASGIApp, context: ServerContext, request_log: RequestLog) -> None:
        self.app = app
        self._http = context.http
        self._clock = context.engine.now
        self._log = request_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; raises only after the reply has begun, when nothing can be said any more."""
        if scope["type"] == "websocket":  # no route speaks it, and no key could be asked for
            await send({"type": "websocket.close"})
            return
        if scope["type"] != "http" or EXCHANGE_KEY in scope:  # a line of a batch has one
            await self.app(scope, receive, send)
            return
        exchange = scope[EXCHANGE_KEY] = Exchange(caller_id_of(scope), clock=self._clock, peer=peer_of(scope))
        scope[REQUEST_ID_KEY] = exchange.request_id
        if speaks_anthropic(scope["path"]):
            exchange.id_headers = (b"x-request-id", b"request-id")

        async def send_labelled(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                message["headers"] = [*message.get("headers", ()), *exchange.reply_headers()]
            await send(message)

        try:
            await self.app(scope, receive, send_labelled)
        except ClientGone:
            exchange.status = CLIENT_CLOSED_REQUEST
        except Exception as error:
            reply = error_reply(error)
            if exchange.status is not None:
                raise ReplyCutShort(reply.name) from None
            await reply.send(scope, receive, send_labelled)
        finally:
            self._close(scope, exchange)

    def _close(self, scope: Scope, exchange: Exchange) -> None:
        route, status = route_of(scope), exchange.status or CLIENT_CLOSED_REQUEST
        self._http.requests[route, status] += 1
        accepted, exchange.accepted = exchange.accepted, None  # it refers to the exchange: no reference cycle
        self._log.end(
            EndedRequest(
                exchange=exchange,
                accepted=accepted,
                headers=scope["headers"],
                route=route,
                status=status,
                ended_ns=time_ns(),
                seconds=exchange.age_s,
                error=scope.get(ERROR_KEY),
            )
        )


def route_of(scope: Scope) -> str:
    """The template of the route that served a request; for one refused before that, the one it was meant for.

    One of a few, whatever a client writes.
    """
    path = getattr(scope.get("route"), "path", None)
    if path is None and scope["path"] in GENERATING_ROUTES | TEXT_ROUTES:
        path = scope["path"]
    return path or UNMATCHED_ROUTE


def caller_id_of(scope: Scope) -> str | None:
    """The caller's x-request-id if it is short printable ASCII, else None."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            return usable_label(value.decode("latin-1"))
    return None


def usable_label(text: str) -> str | None:
    """`text` if it can be a header value and a word in a log line, else None."""
    usable = 0 < len(text) <= MAX_REQUEST_ID and text.isascii() and text.isprintable()
    return text if usable else None
