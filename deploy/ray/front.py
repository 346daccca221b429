"""The front: reads a request whole, asks for the replica that knows its prompt, and passes the reply on.

Light, without a model. What belongs to all replicas (metrics, live requests by id) it asks of all of them.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from config import ServerSettings
from deploy.ray.affinity import prompt_keys
from deploy.ray.exposition import merge_expositions
from deploy.ray.figures import add_figures, join_requests
from deploy.ray.replica import WholeReply
from server.api.requests import LIST_PATH, read_limit
from server.http.client import ClientGone, ClientMiddleware
from server.http.errors import OVERLOADED, SERVER, ErrorReply
from server.http.json_reply import encode_json
from server.http.sse import DONE, encode_event
from server.pages.status_page import FIGURES_PATH

log = logging.getLogger("slipstream.ray")

SESSION_HEADER = "x-session-id"  # Ray Serve's own name for it
ASK_ALL_TIMEOUT_S = 5
_SCOPE = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path"),
    *("query_string", "root_path", "headers", "client", "server"),
)
_RETRY = {"retry-after": "1"}


def build_front(server: ServerSettings, engines: DeploymentHandle[Any]) -> ASGIApp:
    """The ASGI application that Ray's proxy talks to; `engines` leads to the replicas."""
    app = ClientMiddleware(Front(engines), settings=server)

    async def front(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http":
            try:
                await app(scope, receive, send)
            except ClientGone:
                log.debug("a client left before its reply was complete")
        else:
            await send({"type": "websocket.close"})

    return front


async def _live(receive: Receive, send: Send) -> None:
    """Nothing to start, nothing to stop; Ray wants to hear so."""
    while (message := await receive())["type"] == "lifespan.startup":
        await send({"type": "lifespan.startup.complete"})
    await send({"type": f"{message['type']}.complete"})


class Front:
    """Inside ClientMiddleware: the body is whole and within its cap, a client that leaves cancels."""

    def __init__(self, engines: DeploymentHandle[Any]) -> None:
        self._engines = engines
        self._streaming = engines.options(method_name="answer", stream=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive)
        body = await request.body()
        sent = {name: scope[name] for name in _SCOPE if name in scope}
        if request.url.path == "/metrics":
            reply = await self._metrics(sent)
        elif request.url.path == FIGURES_PATH:
            reply = await self._figures(sent)
        elif request.url.path == LIST_PATH and request.method == "GET":
            reply = await self._requests(sent, request)
        elif _concerns_all(request.method, request.url.path):
            reply = _first_found(await self._ask_all(sent, body))
        else:
            keys = prompt_keys(body, request.headers.get(SESSION_HEADER)) if request.method == "POST" else ()
            await self._relay(sent, body, keys, send)
            return
        await reply(scope, receive, send)

    async def _relay(self, scope: Scope, body: bytes, keys: tuple[bytes, ...], send: Send) -> None:
        """One replica's reply, message by message. A replica lost on the way ends it as an error of ours."""
        start: Message | None = None
        response = self._streaming.remote(scope, body, keys=keys)
        try:
            async for message in _messages(response):
                if message["type"] == "http.response.start":
                    start = message
                await send(message)
        except (RayError, RayServeException) as error:
            await _send_failure(_failure(error), start, scope, send)
        except BaseException:  # the client has left
            response.cancel()
            raise

    async def _ask_all(self, scope: Scope, body: bytes) -> list[WholeReply]:
        """Every replica's reply; those that cannot answer are left out."""
        found = self._engines.broadcast("answer_whole", scope, body)
        replies = await found.results_async(timeout_s=ASK_ALL_TIMEOUT_S, return_exceptions=True)
        return [reply for reply in replies if isinstance(reply, WholeReply)]

    async def _metrics(self, scope: Scope) -> Response:
        """All replicas' metrics as one Prometheus text."""
        headers = [each for each in scope["headers"] if each[0] != b"accept"]
        replies = await self._ask_all({**scope, "headers": headers}, b"")
        if (refusal := _refusal(replies)) is not None:
            return refusal
        text = merge_expositions({reply.replica: reply.body.decode() for reply in replies})
        return _response(replies[0], text.encode())

    async def _figures(self, scope: Scope) -> Response:
        """All replicas' present figures added up."""
        replies = await self._ask_all({**scope, "query_string": b"after=inf"}, b"")
        if (refusal := _refusal(replies)) is not None:
            return refusal
        added = add_figures([json.loads(reply.body) for reply in replies])
        return _response(replies[0], encode_json(added).encode("ascii"))

    async def _requests(self, scope: Scope, request: Request) -> Response:
        """All replicas' live requests in one list."""
        replies = await self._ask_all(scope, b"")
        if (refusal := _refusal(replies)) is not None:
            return refusal
        joined = join_requests([json.loads(reply.body) for reply in replies], read_limit(request))
        return _response(replies[0], encode_json(joined).encode("ascii"))


def _refusal(replies: list[WholeReply]) -> Response | None:
    """What to answer where a replica refuses, or none answers; None where all have."""
    refused = [reply for reply in replies if reply.status != 200]
    return _first_found(refused) if refused or not replies else None


async def _messages(response: Any) -> AsyncIterator[Message]:
    async for batch in response:
        for message in batch:
            yield message


def _concerns_all(method: str, path: str) -> bool:
    """True for what every replica is asked: a live request wherever it runs, and changes of the server."""
    is_change = path == "/reset_prefix_cache" or (method, path) == ("PATCH", "/server_info")
    return is_change or path.startswith(f"{LIST_PATH}/")


def _first_found(replies: list[WholeReply]) -> Response:
    """The reply of the replica that knows what was asked for, or what all of them say."""
    if not replies:
        return _failure(RayActorError()).response()
    reply = next((reply for reply in replies if reply.status != 404), replies[0])
    return _response(reply, reply.body)


def _response(reply: WholeReply, body: bytes) -> Response:
    response = Response(body, reply.status)
    kept = [each for each in reply.headers if each[0].lower() != b"content-length"]
    response.raw_headers = [*kept, (b"content-length", str(len(body)).encode())]
    return response


def _failure(error: Exception) -> ErrorReply:
    """What a client is told when no replica could answer to the end."""
    match error:
        case BackPressureError():
            message = "Too many requests wait for a replica."
            return ErrorReply(503, OVERLOADED, message, code="queue_full", headers=_RETRY)
        case RayActorError() | DeploymentUnavailableError():
            message = "The replica that served this request has stopped."
            return ErrorReply(503, OVERLOADED, message, code="replica_lost", headers=_RETRY)
    log.error("a replica failed to answer", exc_info=error)
    return ErrorReply(500, SERVER, "The server had an error while processing the request.")


async def _send_failure(failure: ErrorReply, start: Message | None, scope: Scope, send: Send) -> None:
    """The failure as a reply, or as a stream's last event; a JSON reply that has begun is cut off.

    Raises ConnectionError in that case.
    """
    if start is None:
        await failure.response()(scope, _nothing_more, send)
        return
    if not dict(start["headers"]).get(b"content-type", b"").startswith(b"text/event-stream"):
        raise ConnectionError(failure.message)
    last = encode_event(failure.body()) + DONE
    await send({"type": "http.response.body", "body": last, "more_body": False})


async def _nothing_more() -> Message:
    await asyncio.get_running_loop().create_future()
    return {"type": "http.disconnect"}
